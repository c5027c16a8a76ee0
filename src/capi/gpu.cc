// The Hopper kernels behind the C interface.
#include "capi/gpu.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <unordered_map>

#include "backend/cuda/fused/all_reduce.h"
#include "backend/cuda/fused/arrange_codes.h"
#include "backend/cuda/fused/gemm_input.h"
#include "backend/cuda/linear/activations.h"
#include "backend/cuda/nest/nest.h"
#include "capi/status.h"

using nfp::capi::complete;
using nfp::capi::completed;
using nfp::capi::done;
using nfp::capi::fail;
using nfp::capi::guarded;
using nfp::capi::is_one_of;
using namespace nfp::cuda;

static_assert(sizeof(nfp_gpu_report) == sizeof(NestReport));

namespace {

Join join_of(nfp_join_kind join) { return join == NFP_JOIN_FREE ? Join::kFree : Join::kBiased; }
nfp::WeightType type_of(nfp_type type) { return type == NFP_BF16 ? nfp::WeightType::kBF16 : nfp::WeightType::kF16; }

// Sizes that a kernel can be chosen for.
bool is_size(int64_t size) { return size > 0 && size <= kMaxGemmSize; }

NestedMatrix matrix_of(const nfp_weight& weight) {
  return {weight.upper, weight.lower, weight.row_scale, weight.n, weight.k, join_of(weight.join)};
}

// What a call of one number of tokens in one mode has been found to run.
struct Key {
  int64_t m;
  Mode mode;
  bool swiglu;
  bool operator==(const Key&) const = default;
};
struct KeyHash {
  size_t operator()(const Key& key) const {
    return static_cast<size_t>(key.m) * 0x9e3779b97f4a7c15u + static_cast<size_t>(key.mode) * 2 + (key.swiglu ? 1 : 0);
  }
};

}  // namespace

struct nfp_all_reduce {
  AllReduce ranks;
};

struct nfp_linear {
  const nfp_gpu* gpu = nullptr;
  NestedMatrix matrix;
  Workspace workspace;
  bool quantisable = false;  // rows of k columns have an FP8 form
  bool dependent_launch = true;
  std::shared_mutex mutex;  // of what follows
  std::unordered_map<Key, Config, KeyHash> configs;

  Mode mode(nfp_precision precision, nfp_type type) const {
    if (precision == NFP_PRECISION_FP8 && quantisable) return Mode::kE4M3;
    return type == NFP_BF16 ? Mode::kBF16 : Mode::kF16;
  }
  Config config(int64_t m, Mode mode_of_call, bool swiglu) {
    const Key key{m, mode_of_call, swiglu};
    {
      const std::shared_lock lock(mutex);
      if (const auto known = configs.find(key); known != configs.end()) return known->second;
    }
    const Problem problem{m, matrix.n, matrix.k, mode_of_call, swiglu, matrix.join};
    const Config chosen = choose(problem, gpu->gemm.device(), &gpu->table, Reduction::kFastest).config;
    const std::unique_lock lock(mutex);
    return configs.emplace(key, chosen).first->second;
  }
};

namespace {

// One product, with what its activations go through before it.
struct Product {
  int64_t m;
  const void* x;
  int64_t ldx;
  void* y;
  int64_t ldy;
  const float* bias;
  bool swiglu;
  const nfp_norm* norm = nullptr;
};

nfp_status multiply(nfp_linear& linear, nfp_precision precision, nfp_type type, const Product& product, void* scratch,
                    nfp_stream stream) {
  NFP_CAPI_REQUIRE(is_one_of(precision, 2) && is_one_of(type, 2), "nfp_linear_run: precision or type is unknown");
  NFP_CAPI_REQUIRE(is_size(product.m), "nfp_linear_run: m must be 1 to 2^30");
  const auto here = linear.gpu->context.enter();
  const bool bf16 = type == NFP_BF16;
  const int64_t m = product.m, k = linear.matrix.k;
  GemmCall call;
  call.w = linear.matrix;
  call.mode = linear.mode(precision, type);
  call.m = m;
  const bool quantised = call.mode == Mode::kE4M3;
  if (quantised || product.norm != nullptr) {
    NFP_CAPI_REQUIRE(scratch != nullptr,
                     "nfp_linear_run: FP8, and a norm, need scratch of nfp_linear_scratch_bytes(), "
                     "nfp_linear_norm_scratch_bytes()");
    GemmInputCall rows;
    rows.m = m;
    rows.k = k;
    rows.bf16 = bf16;
    rows.dependent_launch = linear.dependent_launch;
    rows.x = product.x;
    rows.ldx = product.ldx;
    if (const nfp_norm* const norm = product.norm; norm != nullptr) {
      rows.source = GemmInputCall::Source::kNorm;
      rows.weight = norm->weight;
      rows.epsilon = norm->epsilon;
      rows.residual = const_cast<void*>(norm->residual);  // not written: h has its own place
      rows.ldr = norm->ldr;
      rows.h = norm->h;
      if (norm->all_reduce != nullptr) rows.all_reduce = &norm->all_reduce->ranks;
    }
    call.x = scratch;
    if (quantised) {
      rows.y_e4m3 = static_cast<uint8_t*>(scratch);
      rows.ldy_e4m3 = e4m3_row_bytes(k);
      rows.scales = e4m3_scales(scratch, m, k);
      call.ldx = rows.ldy_e4m3;
      call.token_scale = rows.scales;
    } else {
      rows.y_f16 = scratch;
      rows.ldy = call.ldx = k;
    }
    if (const auto status = prepare_gemm_input(rows, stream); !status.ok()) return fail(status.error());
  } else {
    call.x = product.x;
    call.ldx = product.ldx;
    call.dependent_launch = linear.dependent_launch;
  }
  call.d = product.y;
  call.ldd = product.ldy;
  call.output = bf16 ? Output::kBF16 : Output::kF16;
  call.bias = product.bias;
  call.swiglu = product.swiglu;
  call.workspace = linear.workspace;
  return done(linear.gpu->gemm.run(call, linear.config(m, call.mode, product.swiglu), stream));
}

nfp_status arrange(const nfp_rows_call& c, nfp_stream stream) {
  NFP_CAPI_REQUIRE(c.y == nullptr, "nfp_rows: y does not go with NFP_ROWS_E4M3");
  NFP_CAPI_REQUIRE(c.x_scale != nullptr || c.token_scale == nullptr,
                   "nfp_rows: token_scale without x_scale with NFP_ROWS_E4M3");
  ArrangeCodesCall call;
  call.m = c.m;
  call.k = c.k;
  call.codes = static_cast<const uint8_t*>(c.x);
  call.ld = c.ldx;
  call.scales = c.x_scale;
  call.one_scale = c.one_scale != 0;
  call.y = c.y_e4m3;
  call.ldy = c.ldy_e4m3;
  call.y_scales = c.token_scale;
  call.dependent_launch = c.independent_start == 0;
  return done(arrange_codes(call, stream));
}

}  // namespace

extern "C" {

nfp_status nfp_gpu_create(nfp_gpu** gpu) {
  return guarded([&]() -> nfp_status {
    NFP_CAPI_REQUIRE(gpu != nullptr, "nfp_gpu_create: gpu is null");
    auto gemm = Gemm::create();
    if (!gemm.ok()) return fail(gemm.error());
    int id = 0;
    cudaDeviceProp properties{};
    if (cudaGetDevice(&id) != cudaSuccess || cudaGetDeviceProperties(&properties, id) != cudaSuccess) {
      return fail(NFP_RESOURCE, "nfp_gpu_create: the device's properties cannot be read");
    }
    const TuningTable* known = built_in_table(properties.name, properties.multiProcessorCount);
    *gpu = new nfp_gpu{std::move(gemm).value(), known == nullptr ? TuningTable() : *known, properties.name,
                       Context::current()};
    return NFP_OK;
  });
}

nfp_status nfp_gpu_read_choices(nfp_gpu* gpu, const char* file) {
  return guarded([&]() -> nfp_status {
    NFP_CAPI_REQUIRE(gpu != nullptr, "nfp_gpu_read_choices: gpu is null");
    NFP_CAPI_REQUIRE(file != nullptr, "nfp_gpu_read_choices: file is null");
    auto read = TuningTable::load(file);
    if (!read.ok()) return fail(read.error());
    if (read->device != gpu->name) {
      return fail(nfp::error(nfp::ErrorCode::kInvalidInput,
                             "{}: its kernels were timed on '{}', this is '{}'; make it again with 'nestedfp tune'",
                             file, read->device, gpu->name));
    }
    read->fill_from(gpu->table);
    gpu->table = std::move(read).value();
    return NFP_OK;
  });
}

void nfp_gpu_destroy(nfp_gpu* gpu) { delete gpu; }
const char* nfp_gpu_name(const nfp_gpu* gpu) { return gpu == nullptr ? "" : gpu->name.c_str(); }
size_t nfp_gpu_workspace_bytes(void) { return Workspace::kBytes; }
int64_t nfp_max_quantised_columns(void) { return kMaxColumns; }

nfp_status nfp_gpu_nest(nfp_gpu* gpu, const void* weights, int64_t ldw, int64_t n, int64_t k, nfp_type type,
                        nfp_join_kind join, uint8_t* upper, uint8_t* lower, float* row_scale, nfp_gpu_report* report,
                        nfp_stream stream) {
  return guarded([&]() -> nfp_status {
    NFP_CAPI_REQUIRE(gpu != nullptr, "nfp_gpu_nest: gpu is null");
    NFP_CAPI_REQUIRE(is_one_of(type, 2) && is_one_of(join, 2), "nfp_gpu_nest: type or join is unknown");
    const auto here = gpu->context.enter();
    return done(nest_matrix({{n, k},
                             static_cast<const uint16_t*>(weights),
                             ldw,
                             type_of(type),
                             join_of(join),
                             upper,
                             lower,
                             row_scale,
                             reinterpret_cast<NestReport*>(report)},
                            stream));
  });
}

nfp_status nfp_gpu_pack(nfp_gpu* gpu, const uint8_t* bytes, int64_t ld, int64_t n, int64_t k, nfp_plane plane,
                        nfp_join_kind join, uint8_t* packed, nfp_stream stream) {
  return guarded([&]() -> nfp_status {
    NFP_CAPI_REQUIRE(gpu != nullptr, "nfp_gpu_pack: gpu is null");
    NFP_CAPI_REQUIRE(is_one_of(plane, 2) && is_one_of(join, 2), "nfp_gpu_pack: plane or join is unknown");
    const auto here = gpu->context.enter();
    return done(pack_plane({n, k}, plane == NFP_LOWER ? Plane::kLower : Plane::kUpper, join_of(join), bytes, ld, packed,
                           stream));
  });
}

nfp_status nfp_gpu_unnest(nfp_gpu* gpu, const uint8_t* upper, const uint8_t* lower, const float* row_scale, int64_t n,
                          int64_t k, nfp_join_kind join, nfp_type type, void* weights, int64_t ldw, nfp_stream stream) {
  return guarded([&]() -> nfp_status {
    NFP_CAPI_REQUIRE(gpu != nullptr, "nfp_gpu_unnest: gpu is null");
    NFP_CAPI_REQUIRE(is_one_of(type, 2) && is_one_of(join, 2), "nfp_gpu_unnest: type or join is unknown");
    const auto here = gpu->context.enter();
    return done(unnest_matrix({n, k}, join_of(join), upper, lower, row_scale, type_of(type),
                              static_cast<uint16_t*>(weights), ldw, stream));
  });
}

nfp_status nfp_linear_create(nfp_gpu* gpu, const nfp_weight* weight, void* workspace, size_t workspace_bytes,
                             nfp_linear** linear) {
  return guarded([&]() -> nfp_status {
    NFP_CAPI_REQUIRE(gpu != nullptr && complete(weight) && linear != nullptr,
                     "nfp_linear_create: a pointer is null, or weight->size is not sizeof(nfp_weight)");
    NFP_CAPI_REQUIRE(is_size(weight->n) && is_size(weight->k) && weight->upper != nullptr,
                     "nfp_linear_create: n and k must be 1 to 2^30 and upper not null");
    NFP_CAPI_REQUIRE(is_one_of(weight->join, 2), "nfp_linear_create: join is unknown");
    NFP_CAPI_REQUIRE(workspace != nullptr && workspace_bytes >= Workspace::kBytes,
                     "nfp_linear_create: {} bytes of workspace given, nfp_gpu_workspace_bytes() are {}",
                     workspace_bytes, Workspace::kBytes);
    auto made = std::make_unique<nfp_linear>();
    made->gpu = gpu;
    made->matrix = matrix_of(*weight);
    made->workspace = {workspace, workspace_bytes};
    made->quantisable = weight->k <= kMaxColumns;
    *linear = made.release();
    return NFP_OK;
  });
}

void nfp_linear_destroy(nfp_linear* linear) { delete linear; }

void nfp_linear_set_independent_start(nfp_linear* linear, int32_t independent) {
  if (linear != nullptr) linear->dependent_launch = independent == 0;
}

size_t nfp_linear_scratch_bytes(const nfp_linear* linear, int64_t m) {
  if (linear == nullptr || !is_size(m) || !linear->quantisable) return 0;
  return e4m3_scale_offset(m, linear->matrix.k) + static_cast<size_t>(m) * sizeof(float);
}

nfp_status nfp_linear_run(nfp_linear* linear, nfp_precision precision, nfp_type type, int64_t m, const void* x,
                          int64_t ldx, void* y, int64_t ldy, const float* bias, void* scratch, nfp_stream stream) {
  return guarded([&]() -> nfp_status {
    NFP_CAPI_REQUIRE(linear != nullptr, "nfp_linear_run: linear is null");
    return multiply(*linear, precision, type, {m, x, ldx, y, ldy, bias, false}, scratch, stream);
  });
}

nfp_status nfp_linear_run_swiglu(nfp_linear* linear, nfp_precision precision, nfp_type type, int64_t m, const void* x,
                                 int64_t ldx, void* y, int64_t ldy, void* scratch, nfp_stream stream) {
  return guarded([&]() -> nfp_status {
    NFP_CAPI_REQUIRE(linear != nullptr, "nfp_linear_run_swiglu: linear is null");
    return multiply(*linear, precision, type, {m, x, ldx, y, ldy, nullptr, true}, scratch, stream);
  });
}

size_t nfp_all_reduce_buffer_bytes(int32_t ranks, size_t most_bytes) {
  return ranks < 2 || ranks > kMaxRanks ? 0 : all_reduce_buffer_bytes(ranks, most_bytes);
}

nfp_status nfp_all_reduce_create(nfp_gpu* gpu, int32_t rank, int32_t ranks, void* const* buffers, size_t bytes,
                                 nfp_all_reduce** all_reduce) {
  return guarded([&]() -> nfp_status {
    NFP_CAPI_REQUIRE(gpu != nullptr && buffers != nullptr && all_reduce != nullptr,
                     "nfp_all_reduce_create: a pointer is null");
    NFP_CAPI_REQUIRE(ranks >= 2 && ranks <= kMaxRanks, "nfp_all_reduce_create: ranks must be 2 to {}", kMaxRanks);
    auto made = std::make_unique<nfp_all_reduce>();
    AllReduce& to = made->ranks;
    to.rank = rank;
    to.ranks = ranks;
    to.bytes = bytes;
    std::copy_n(buffers, ranks, to.buffers.begin());
    if (const auto status = to.check(); !status.ok()) return fail(status.error());
    const auto here = gpu->context.enter();
    const auto status = clear_all_reduce_buffer(to.buffers[static_cast<size_t>(rank)], bytes);
    if (!status.ok()) return fail(status.error());
    *all_reduce = made.release();
    return NFP_OK;
  });
}

void nfp_all_reduce_destroy(nfp_all_reduce* all_reduce) { delete all_reduce; }

int64_t nfp_all_reduce_max_rows(const nfp_all_reduce* all_reduce, int64_t k) {
  if (all_reduce == nullptr || k <= 0 || k > kMaxColumns) return 0;
  return std::min(max_reduced_rows(k), static_cast<int64_t>(all_reduce->ranks.most_bytes()) / (k * 2));
}

size_t nfp_linear_norm_scratch_bytes(const nfp_linear* linear, int64_t m) {
  if (linear == nullptr || !is_size(m) || !linear->quantisable) return 0;
  return activation_bytes(m, linear->matrix.k);
}

nfp_status nfp_linear_run_norm(nfp_linear* linear, nfp_precision precision, nfp_type type, int64_t m, const void* x,
                               int64_t ldx, const nfp_norm* given, void* y, int64_t ldy, const float* bias,
                               int32_t swiglu, void* scratch, nfp_stream stream) {
  return guarded([&]() -> nfp_status {
    const auto norm = completed(given, offsetof(nfp_norm, all_reduce));
    NFP_CAPI_REQUIRE(linear != nullptr && norm.has_value(),
                     "nfp_linear_run_norm: linear or norm is null, or norm->size is not set");
    NFP_CAPI_REQUIRE((norm->residual == nullptr) == (norm->h == nullptr),
                     "nfp_linear_run_norm: residual and h go together");
    NFP_CAPI_REQUIRE(swiglu == 0 || bias == nullptr, "nfp_linear_run_norm: a bias does not go with swiglu");
    if (!linear->quantisable || linear->matrix.k % 8 != 0) {
      return fail(NFP_UNSUPPORTED,
                  "nfp_linear_run_norm: rows must be of a multiple of 8 columns, of at most "
                  "nfp_max_quantised_columns()");
    }
    return multiply(*linear, precision, type, {m, x, ldx, y, ldy, bias, swiglu != 0, &*norm}, scratch, stream);
  });
}

nfp_status nfp_linear_describe(nfp_linear* linear, nfp_precision precision, nfp_type type, int64_t m, char* text,
                               size_t bytes) {
  return guarded([&]() -> nfp_status {
    NFP_CAPI_REQUIRE(linear != nullptr && text != nullptr && bytes > 0 && is_size(m),
                     "nfp_linear_describe: linear or text is null, bytes is 0, or m not 1 to 2^30");
    NFP_CAPI_REQUIRE(is_one_of(precision, 2) && is_one_of(type, 2),
                     "nfp_linear_describe: precision or type is unknown");
    const Problem problem{m,     linear->matrix.n,   linear->matrix.k, linear->mode(precision, type),
                          false, linear->matrix.join};
    const DeviceShape& device = linear->gpu->gemm.device();
    const std::string line =
        describe(problem, choose(problem, device, &linear->gpu->table, Reduction::kFastest), device);
    const size_t length = std::min(line.size(), bytes - 1);
    std::memcpy(text, line.data(), length);
    text[length] = '\0';
    return NFP_OK;
  });
}

nfp_status nfp_gemm(nfp_gpu* gpu, const nfp_gemm_call* c, nfp_stream stream) {
  return guarded([&]() -> nfp_status {
    NFP_CAPI_REQUIRE(complete(c) && complete(&c->weight), "nfp_gemm: call is null, or a struct's size is not set");
    NFP_CAPI_REQUIRE(is_one_of(c->mode, 4), "nfp_gemm: mode is unknown");
    NFP_CAPI_REQUIRE(is_one_of(c->output, 3), "nfp_gemm: output is unknown");
    NFP_CAPI_REQUIRE(is_one_of(c->weight.join, 2), "nfp_gemm: join is unknown");
    GemmCall call;
    call.w = matrix_of(c->weight);
    call.mode = static_cast<Mode>(c->mode);
    call.m = c->m;
    call.x = c->x;
    call.ldx = c->ldx;
    call.token_scale = c->token_scale;
    call.d = c->d;
    call.ldd = c->ldd;
    call.output = static_cast<Output>(c->output);
    call.bias = c->bias;
    call.swiglu = c->swiglu != 0;
    call.residual = c->residual;
    call.ldr = c->ldr;
    call.workspace = {c->workspace, c->workspace_bytes};
    call.dependent_launch = c->independent_start == 0;
    NFP_CAPI_REQUIRE(is_size(call.m) && is_size(call.w.n) && is_size(call.w.k),
                     "nfp_gemm: m, n and k must be 1 to 2^30");
    NFP_CAPI_REQUIRE(gpu != nullptr, "nfp_gemm: gpu is null");
    const auto here = gpu->context.enter();
    const Reduction reduction = c->batch_invariant != 0 ? Reduction::kBatchInvariant : Reduction::kFastest;
    return done(gpu->gemm.run(call, choose(call.problem(), gpu->gemm.device(), &gpu->table, reduction).config, stream));
  });
}

nfp_status nfp_rows(nfp_gpu* gpu, const nfp_rows_call* given, nfp_stream stream) {
  return guarded([&]() -> nfp_status {
    const auto c = completed(given, offsetof(nfp_rows_call, x_scale));
    NFP_CAPI_REQUIRE(c.has_value(), "nfp_rows: call is null, or call->size is not set");
    NFP_CAPI_REQUIRE(is_one_of(c->source, 4), "nfp_rows: source is unknown");
    NFP_CAPI_REQUIRE(is_one_of(c->type, 2), "nfp_rows: type is unknown");
    NFP_CAPI_REQUIRE(gpu != nullptr, "nfp_rows: gpu is null");
    const auto here = gpu->context.enter();
    if (c->source == NFP_ROWS_E4M3) return arrange(*c, stream);
    GemmInputCall call;
    call.source = static_cast<GemmInputCall::Source>(c->source);
    call.m = c->m;
    call.k = c->k;
    call.bf16 = c->type == NFP_BF16;
    call.x = c->x;
    call.ldx = c->ldx;
    call.weight = c->weight;
    call.epsilon = c->epsilon;
    call.residual = c->residual;
    call.ldr = c->ldr;
    call.h = c->h;
    if (c->all_reduce != nullptr) call.all_reduce = &c->all_reduce->ranks;
    call.y_f16 = c->y;
    call.ldy = c->ldy;
    call.y_e4m3 = c->y_e4m3;
    call.ldy_e4m3 = c->ldy_e4m3;
    call.scales = c->token_scale;
    call.dependent_launch = c->independent_start == 0;
    return done(prepare_gemm_input(call, stream));
  });
}

}  // extern "C"
