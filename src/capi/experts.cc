// Mixtures of experts behind the C interface.
#include "backend/cuda/experts/experts.h"

#include <algorithm>
#include <memory>
#include <vector>

#include "backend/cuda/experts/grouped.h"
#include "backend/cuda/fused/gemm_input.h"
#include "backend/cuda/gemm/plan/layout.h"
#include "backend/cuda/linear/activations.h"
#include "capi/gpu.h"
#include "capi/status.h"

using nfp::ExpertRoutes;
using nfp::capi::complete;
using nfp::capi::done;
using nfp::capi::guarded;
using nfp::capi::is_one_of;
using namespace nfp::cuda;

namespace {

// The experts' matrices in both precisions.
struct Stack {
  int64_t n = 0, k = 0;
  std::vector<ExpertMatrix> exact;   // of FP16 steps
  std::vector<ExpertMatrix> uppers;  // of FP8 steps
};

bool aligned(const void* p, uintptr_t bytes) { return reinterpret_cast<uintptr_t>(p) % bytes == 0; }

Stack stack_of(const nfp_expert_stack& given, int32_t experts) {
  Stack stack{given.n, given.k, {}, {}};
  const size_t plane = PlaneShape{given.n, given.k}.bytes();
  for (int32_t e = 0; e < experts; ++e) {
    ExpertMatrix matrix;
    matrix.upper = given.bytes + static_cast<size_t>(e) * 2 * plane;
    matrix.row_scale = given.row_scale == nullptr ? nullptr : given.row_scale + e * given.n;
    matrix.dense = given.dense != nullptr && given.dense[e] != 0;
    if (!matrix.dense) {
      matrix.lower = matrix.upper + plane;
      matrix.biased = given.join == NFP_JOIN_BIASED;
    }
    stack.exact.push_back(matrix);
    matrix.lower = nullptr;
    stack.uppers.push_back(matrix);
  }
  return stack;
}

// Pieces of a call's scratch, each 256-byte aligned. With E4M3, codes and scales of x and of what is activated.
struct Scratch {
  size_t start, row, place;
  size_t gathered, gathered_scales;  // x by assignment; then, once that is multiplied, the products
  size_t activated;
  size_t rounded, rounded_scales;  // E4M3
  size_t bytes;
};

}  // namespace

struct nfp_experts {
  Context context;
  int32_t experts = 0;
  ExpertEpilogue epilogue = ExpertEpilogue::kSwiglu;
  Stack gate_up, down;
  bool quantisable = false;  // all matrices nest, and rows have an E4M3 form

  int64_t hidden() const { return down.n; }
  int64_t intermediate() const { return down.k; }
  bool rounds(nfp_precision precision, int64_t rows, int32_t top) const {
    return precision == NFP_PRECISION_FP8 && quantisable && rows * top >= kRoundedRows * experts;
  }
  Scratch scratch(int64_t rows, int32_t top) const {
    const int64_t assignments = rows * top;
    size_t next = 0;
    const auto take = [&next](int64_t count, int64_t bytes) {
      const size_t at = next;
      next += align_activation(static_cast<size_t>(count * bytes));
      return at;
    };
    const bool e4m3 = rounds(NFP_PRECISION_FP8, rows, top);
    Scratch made{};
    made.start = take(experts + 1, sizeof(int32_t));
    made.row = take(assignments, sizeof(int32_t));
    made.place = take(assignments, sizeof(int32_t));
    made.gathered = take(assignments, std::max(2 * hidden(), e4m3 ? e4m3_row_bytes(hidden()) : 0));
    made.activated = take(assignments, 2 * intermediate());
    if (e4m3) {
      made.gathered_scales = take(assignments, sizeof(float));
      made.rounded = take(assignments, e4m3_row_bytes(intermediate()));
      made.rounded_scales = take(assignments, sizeof(float));
    }
    made.bytes = next;
    return made;
  }
};

namespace {

// A call on its way.
class Call {
 public:
  Call(const nfp_experts& experts, const nfp_experts_call& call, nfp_stream stream)
      : experts_(experts),
        call_(call),
        stream_(stream),
        at_(experts.scratch(call.rows, call.top)),
        e4m3_(experts.rounds(call.precision, call.rows, call.top)) {}

  nfp::Status run() {
    NFP_RETURN_IF_ERROR(assign());
    ExpertLinearCall product;
    product.routes = routes_;
    product.rows = call_.rows;
    product.bf16 = call_.type == NFP_BF16;
    product.e4m3 = e4m3_;
    product.x = call_.x;
    product.gathered = piece<uint8_t>(at_.gathered);
    if (e4m3_) {
      NFP_RETURN_IF_ERROR(round(call_.x, call_.rows, experts_.hidden(), at_.gathered, at_.gathered_scales, true));
      product.token_scale = piece<float>(at_.gathered_scales);
    }
    if (e4m3_ || gathers()) {
      product.x = product.gathered;
      product.sorted = true;
    }
    NFP_RETURN_IF_ERROR(multiply(product, experts_.gate_up, experts_.epilogue, at_.activated));
    product.x = piece<uint8_t>(at_.activated);
    product.sorted = true;
    product.follows = !e4m3_;
    if (e4m3_) {
      NFP_RETURN_IF_ERROR(
          round(product.x, call_.rows * call_.top, experts_.intermediate(), at_.rounded, at_.rounded_scales, false));
      product.x = piece<uint8_t>(at_.rounded);
      product.token_scale = piece<float>(at_.rounded_scales);
    }
    NFP_RETURN_IF_ERROR(multiply(product, experts_.down, ExpertEpilogue::kStore, at_.gathered));
    nfp::CombineExpertsArgs sum;
    sum.x = piece<uint8_t>(at_.gathered);
    sum.routes = routes_;
    sum.rows = static_cast<int32_t>(call_.rows);
    sum.hidden = static_cast<int32_t>(experts_.hidden());
    sum.out = call_.y;
    sum.follows = true;
    sum.bf16 = call_.type == NFP_BF16;
    return run_combine(sum, stream_);
  }

 private:
  template <typename T>
  T* piece(size_t offset) const {
    return reinterpret_cast<T*>(static_cast<std::byte*>(call_.scratch) + offset);
  }
  nfp::Status assign() {
    // Weights are only read.
    routes_ = {experts_.experts,          call_.top,
               piece<int32_t>(at_.start), piece<int32_t>(at_.row),
               piece<int32_t>(at_.place), const_cast<float*>(call_.weights)};
    AssignArgs args{call_.ids, routes_.top, call_.map, call_.map_size, call_.rows, routes_};
    if (gathers()) {
      args.x = call_.x;
      args.gathered = piece<uint8_t>(at_.gathered);
      args.row_bytes = 2 * experts_.hidden();
    }
    return run_assign(args, stream_);
  }
  // Where the kernel that finds routes also puts the rows into order.
  bool gathers() const { return !e4m3_ && call_.rows * call_.top <= kPlacedAtOnce; }
  // spread: each row to its assignments.
  nfp::Status round(const void* x, int64_t rows, int64_t columns, size_t codes, size_t scales, bool spread) {
    GemmInputCall call;
    call.m = rows;
    call.k = columns;
    call.bf16 = call_.type == NFP_BF16;
    call.x = x;
    call.ldx = columns;
    call.y_e4m3 = piece<uint8_t>(codes);
    call.ldy_e4m3 = e4m3_row_bytes(columns);
    call.scales = piece<float>(scales);
    if (spread) {
      call.place = routes_.place;
      call.copies = routes_.top;
    }
    return prepare_gemm_input(call, stream_);
  }
  nfp::Status multiply(ExpertLinearCall& product, const Stack& stack, ExpertEpilogue epilogue, size_t y) {
    product.matrices = (call_.precision == NFP_PRECISION_FP16 ? stack.exact : stack.uppers).data();
    product.n = stack.n;
    product.k = stack.k;
    product.epilogue = epilogue;
    product.y = piece<uint8_t>(y);
    return run_expert_linear(product, stream_);
  }

  const nfp_experts& experts_;
  const nfp_experts_call& call_;
  nfp_stream stream_;
  Scratch at_;
  bool e4m3_;
  ExpertRoutes routes_;
};

bool all_nest(const nfp_expert_stack& stack, int32_t experts) {
  return stack.dense == nullptr ||
         std::all_of(stack.dense, stack.dense + experts, [](uint8_t dense) { return dense == 0; });
}

}  // namespace

extern "C" {

nfp_status nfp_experts_create(nfp_gpu* gpu, int32_t experts, const nfp_expert_stack* gate_up,
                              const nfp_expert_stack* down, nfp_activation activation, nfp_experts** made) {
  return guarded([&]() -> nfp_status {
    NFP_CAPI_REQUIRE(gpu != nullptr && complete(gate_up) && complete(down) && made != nullptr,
                     "nfp_experts_create: a pointer is null, or a stack's size is not sizeof(nfp_expert_stack)");
    NFP_CAPI_REQUIRE(experts >= 1 && experts <= nfp::kMaxExperts, "nfp_experts_create: {} experts, must be 1 to {}",
                     experts, nfp::kMaxExperts);
    NFP_CAPI_REQUIRE(is_one_of(activation, 2), "nfp_experts_create: activation is unknown");
    const int64_t hidden = gate_up->k, intermediate = down->k;
    NFP_CAPI_REQUIRE(hidden > 0 && intermediate > 0 && hidden % 8 == 0 && intermediate % 8 == 0 &&
                         hidden <= INT32_MAX && intermediate <= INT32_MAX / 2,
                     "nfp_experts_create: gate_up->k is {} and down->k {}, must be positive multiples of 8", hidden,
                     intermediate);
    NFP_CAPI_REQUIRE(
        gate_up->n == 2 * intermediate && down->n == hidden,
        "nfp_experts_create: gate_up is [{}, {}] and down [{}, {}], must be [2 * intermediate, hidden] and "
        "[hidden, intermediate]",
        gate_up->n, gate_up->k, down->n, down->k);
    for (const nfp_expert_stack* stack : {gate_up, down}) {
      NFP_CAPI_REQUIRE(stack->bytes != nullptr && aligned(stack->bytes, 16),
                       "nfp_experts_create: {}->bytes is null or not 16-byte aligned",
                       stack == down ? "down" : "gate_up");
      NFP_CAPI_REQUIRE(is_one_of(stack->join, 2), "nfp_experts_create: {}->join is unknown",
                       stack == down ? "down" : "gate_up");
    }
    auto layer = std::make_unique<nfp_experts>();
    layer->context = gpu->context;
    layer->experts = experts;
    layer->epilogue = activation == NFP_SILU ? ExpertEpilogue::kSwiglu : ExpertEpilogue::kGeglu;
    layer->gate_up = stack_of(*gate_up, experts);
    layer->down = stack_of(*down, experts);
    layer->quantisable =
        all_nest(*gate_up, experts) && all_nest(*down, experts) && hidden <= kMaxColumns && intermediate <= kMaxColumns;
    *made = layer.release();
    return NFP_OK;
  });
}

void nfp_experts_destroy(nfp_experts* experts) { delete experts; }

size_t nfp_experts_scratch_bytes(const nfp_experts* experts, int64_t rows, int32_t top) {
  return experts == nullptr || top <= 0 || rows <= 0 || rows > INT32_MAX / top ? 0 : experts->scratch(rows, top).bytes;
}

nfp_status nfp_experts_run(nfp_experts* experts, const nfp_experts_call* c, nfp_stream stream) {
  return guarded([&]() -> nfp_status {
    NFP_CAPI_REQUIRE(experts != nullptr && complete(c),
                     "nfp_experts_run: experts is null, or call->size is not sizeof(nfp_experts_call)");
    NFP_CAPI_REQUIRE(
        c->rows >= 1 && c->top >= 1 && c->top <= nfp::kMaxTopExperts && c->rows <= INT32_MAX / c->top,
        "nfp_experts_run: {} rows of {} experts each: rows must be positive, top 1 to {}, and their product "
        "below 2^31",
        c->rows, c->top, nfp::kMaxTopExperts);
    NFP_CAPI_REQUIRE(is_one_of(c->precision, 2), "nfp_experts_run: precision is unknown");
    NFP_CAPI_REQUIRE(is_one_of(c->type, 2), "nfp_experts_run: type is unknown");
    NFP_CAPI_REQUIRE(c->x != nullptr && c->ids != nullptr && c->weights != nullptr && c->y != nullptr,
                     "nfp_experts_run: x, ids, weights or y is null");
    NFP_CAPI_REQUIRE(aligned(c->x, 16) && aligned(c->y, 16), "nfp_experts_run: x and y must be 16-byte aligned");
    const size_t bytes = experts->scratch(c->rows, c->top).bytes;
    NFP_CAPI_REQUIRE(c->scratch != nullptr && aligned(c->scratch, 256) && c->scratch_bytes >= bytes,
                     "nfp_experts_run: {} bytes of scratch given, nfp_experts_scratch_bytes() are {}, 256-byte aligned",
                     c->scratch == nullptr ? 0 : c->scratch_bytes, bytes);
    const auto here = experts->context.enter();
    return done(Call(*experts, *c, stream).run());
  });
}

}  // extern "C"
