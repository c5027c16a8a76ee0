// Mixtures of experts behind the C interface.
#include "backend/cuda/experts/experts.h"

#include <algorithm>
#include <memory>
#include <vector>

#include "backend/cuda/gemm/plan/layout.h"
#include "capi/status.h"

using nfp::ExpertRoutes;
using nfp::capi::complete;
using nfp::capi::done;
using nfp::capi::fail;
using nfp::capi::guarded;
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

// Pieces of a call's scratch, each 256-byte aligned.
struct Scratch {
  size_t start, row, place, activated, products, bytes;
};

}  // namespace

struct nfp_experts {
  int32_t experts = 0;
  ExpertEpilogue epilogue = ExpertEpilogue::kSwiglu;
  Stack gate_up, down;

  int64_t hidden() const { return down.n; }
  int64_t intermediate() const { return down.k; }
  Scratch scratch(int64_t rows, int32_t top) const {
    const auto assignments = static_cast<size_t>(rows) * static_cast<size_t>(top);
    size_t next = 0;
    const auto take = [&next](size_t bytes) {
      const size_t at = next;
      next += (bytes + 255) / 256 * 256;
      return at;
    };
    Scratch made{};
    made.start = take((static_cast<size_t>(experts) + 1) * sizeof(int32_t));
    made.row = take(assignments * sizeof(int32_t));
    made.place = take(assignments * sizeof(int32_t));
    made.activated = take(assignments * static_cast<size_t>(intermediate()) * 2);
    made.products = take(assignments * static_cast<size_t>(hidden()) * 2);
    made.bytes = next;
    return made;
  }
};

namespace {

nfp::Status run(const nfp_experts& experts, const nfp_experts_call& c, nfp_stream stream) {
  const Scratch at = experts.scratch(c.rows, c.top);
  auto* const scratch = static_cast<std::byte*>(c.scratch);
  const auto piece = [scratch](size_t offset) { return reinterpret_cast<int32_t*>(scratch + offset); };
  const bool fp16 = c.precision == NFP_PRECISION_FP16, bf16 = c.type == NFP_BF16;
  AssignArgs assign;
  assign.ids = c.ids;
  assign.map = c.map;
  assign.map_size = c.map_size;
  assign.rows = c.rows;
  // Weights are only read.
  assign.routes = {experts.experts, c.top,           piece(at.start),
                   piece(at.row),   piece(at.place), const_cast<float*>(c.weights)};
  NFP_RETURN_IF_ERROR(run_assign(assign, stream));

  ExpertLinearCall product;
  product.matrices = (fp16 ? experts.gate_up.exact : experts.gate_up.uppers).data();
  product.routes = assign.routes;
  product.n = experts.gate_up.n;
  product.k = experts.gate_up.k;
  product.x = c.x;
  product.rows = c.rows;
  product.epilogue = experts.epilogue;
  product.y = scratch + at.activated;
  product.bf16 = bf16;
  NFP_RETURN_IF_ERROR(run_expert_linear(product, stream));
  product.matrices = (fp16 ? experts.down.exact : experts.down.uppers).data();
  product.n = experts.down.n;
  product.k = experts.down.k;
  product.x = scratch + at.activated;
  product.sorted = true;
  product.epilogue = ExpertEpilogue::kStore;
  product.y = scratch + at.products;
  NFP_RETURN_IF_ERROR(run_expert_linear(product, stream));

  nfp::CombineExpertsArgs sum;
  sum.x = product.y;
  sum.routes = assign.routes;
  sum.rows = static_cast<int32_t>(c.rows);
  sum.hidden = static_cast<int32_t>(experts.hidden());
  sum.out = c.y;
  sum.bf16 = bf16;
  return run_combine(sum, stream);
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
    NFP_CAPI_REQUIRE(activation == NFP_SILU || activation == NFP_GELU_TANH,
                     "nfp_experts_create: activation is unknown");
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
    }
    auto layer = std::make_unique<nfp_experts>();
    layer->experts = experts;
    layer->epilogue = activation == NFP_SILU ? ExpertEpilogue::kSwiglu : ExpertEpilogue::kGeglu;
    layer->gate_up = stack_of(*gate_up, experts);
    layer->down = stack_of(*down, experts);
    *made = layer.release();
    return NFP_OK;
  });
}

void nfp_experts_destroy(nfp_experts* experts) { delete experts; }

size_t nfp_experts_scratch_bytes(const nfp_experts* experts, int64_t rows, int32_t top) {
  return experts == nullptr || rows <= 0 || top <= 0 ? 0 : experts->scratch(rows, top).bytes;
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
    NFP_CAPI_REQUIRE(c->precision == NFP_PRECISION_FP16 || c->precision == NFP_PRECISION_FP8,
                     "nfp_experts_run: precision is unknown");
    NFP_CAPI_REQUIRE(c->type == NFP_F16 || c->type == NFP_BF16, "nfp_experts_run: type is unknown");
    NFP_CAPI_REQUIRE(c->x != nullptr && c->ids != nullptr && c->weights != nullptr && c->y != nullptr,
                     "nfp_experts_run: x, ids, weights or y is null");
    const size_t bytes = experts->scratch(c->rows, c->top).bytes;
    NFP_CAPI_REQUIRE(c->scratch != nullptr && aligned(c->scratch, 256) && c->scratch_bytes >= bytes,
                     "nfp_experts_run: {} bytes of scratch given, nfp_experts_scratch_bytes() are {}, 256-byte aligned",
                     c->scratch == nullptr ? 0 : c->scratch_bytes, bytes);
    return done(run(*experts, *c, stream));
  });
}

}  // extern "C"
