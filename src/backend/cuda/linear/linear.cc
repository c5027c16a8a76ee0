#include "backend/cuda/linear/linear.h"

#include <cuda_runtime_api.h>

#include <unordered_map>

#include "backend/cuda/fused/gemm_input.h"
#include "backend/cuda/fused/round_rows.h"
#include "backend/cuda/gemm/dense.h"
#include "backend/cuda/row_peaks.h"

namespace nfp::cuda {
namespace {

// What a choice of kernels depends on. Weights of one shape share it.
struct ChoiceKey {
  int64_t m = 0;
  int32_t n = 0;
  int32_t k = 0;
  Mode mode = Mode::kF16;
  bool swiglu = false;
  Join join = Join::kBiased;
  Reduction reduction = Reduction::kFastest;
  bool operator==(const ChoiceKey&) const = default;
};
struct DenseKey {
  int64_t m = 0;
  int32_t n = 0;
  int32_t k = 0;
  int32_t ldd = 0;
  int16_t x_alignment = 0;
  int16_t d_alignment = 0;
  bool f32 = false;
  bool bias = false;
  bool operator==(const DenseKey&) const = default;
};

uint64_t mix(uint64_t hash, uint64_t value) {  // boost's hash_combine, widened by a multiplication
  return (hash ^ value) * 0x9e3779b97f4a7c15u + (hash >> 29);
}
struct KeyHash {
  size_t operator()(const ChoiceKey& key) const {
    uint64_t hash =
        mix(static_cast<uint64_t>(key.m), static_cast<uint64_t>(key.n) << 32 | static_cast<uint32_t>(key.k));
    return mix(hash, static_cast<uint64_t>(key.mode) << 16 | static_cast<uint64_t>(key.swiglu) << 8 |
                         static_cast<uint64_t>(key.join) << 9 | static_cast<uint64_t>(key.reduction));
  }
  size_t operator()(const DenseKey& key) const {
    uint64_t hash =
        mix(static_cast<uint64_t>(key.m), static_cast<uint64_t>(key.n) << 32 | static_cast<uint32_t>(key.k));
    hash = mix(hash, static_cast<uint64_t>(key.ldd) << 32 | static_cast<uint64_t>(key.x_alignment) << 16 |
                         static_cast<uint64_t>(key.d_alignment));
    return mix(hash, static_cast<uint64_t>(key.f32) << 1 | static_cast<uint64_t>(key.bias));
  }
};

// The largest power of two up to 256 that divides an address.
int alignment_of(const void* p) {
  const auto address = reinterpret_cast<uintptr_t>(p) | 256;
  return static_cast<int>(address & (~address + 1));
}

template <typename T>
T* offset(T* p, int64_t elements, size_t size) {
  if (p == nullptr) return nullptr;
  using Byte = std::conditional_t<std::is_const_v<T>, const uint8_t, uint8_t>;
  return static_cast<Byte*>(p) + static_cast<size_t>(elements) * size;
}

Status check_call(const CudaWeight& weight, const LinearCall& call) {
  const auto bad = [](std::string_view field, std::string_view rule) {
    return error(ErrorCode::kUsage, "linear: {} {}", field, rule);
  };
  if (call.rows <= 0 || call.rows > call.reserved_rows) return bad("rows", "must be 1 to reserved_rows");
  if (call.x == nullptr || call.y == nullptr) return bad("x and y", "must not be null");
  const bool gated = call.epilogue != LinearEpilogue::kStore;
  if (gated != weight.interleaved()) {
    return bad("epilogue", "must be kSwiglu or kGeglu for an interleaved weight and kStore for others");
  }
  if (gated && (call.y_is_f32 || call.residual != nullptr)) {
    return bad("y_is_f32 and residual", "do not go with a gate");
  }
  if (call.y_is_largest && (!LinearRunner::finds_largest(weight) || call.y_is_f32 || call.residual != nullptr)) {
    return bad("y_is_largest", "is for weights of one nested segment, and goes with neither y_is_f32 nor residual");
  }
  if (!gated && !is_exact(call.consumer)) {
    return bad("consumer", "must be kFp16 with kStore: only norms and gates write E4M3");
  }
  return ok_status();
}

// Interleaved weights are one segment.
bool fuses_gate(const CudaWeight& weight, LinearEpilogue epilogue) {
  return epilogue == LinearEpilogue::kSwiglu && weight.segments().front().nested;
}

// The product of one segment of a weight.
struct Product {
  const WeightSegment& segment;
  int64_t k;
  int64_t columns;  // of a row of d, all segments together
  bool fused;       // SwiGLU in the epilogue
  bool fp8;         // E4M3 activations
  bool dependent;   // may start before the kernel in front of it has ended
  void* d;
  const void* residual;
  uint32_t* peaks;  // of what the product leaves, or null; run_nested() leaves null where the tile finds none
};

}  // namespace

struct LinearRunner::State {
  State(const Gemm& nested_gemm, DenseGemm dense_gemm, const TuningTable* choices)
      : gemm(nested_gemm), dense(std::move(dense_gemm)), table(choices) {}

  const Config& config(const ChoiceKey& key) {
    if (const auto known = configs.find(key); known != configs.end()) return known->second;
    const Problem problem{key.m, key.n, key.k, key.mode, key.swiglu, key.join};
    const Config chosen = choose(problem, gemm.device(), table, key.reduction).config;  // may throw: no entry before it
    return configs.emplace(key, chosen).first->second;
  }

  Result<const DensePlan*> plan(const DenseKey& key) {
    if (const auto known = plans.find(key); known != plans.end()) return &known->second;
    DenseProblem problem;
    problem.m = key.m;
    problem.n = key.n;
    problem.k = key.k;
    problem.output = key.f32 ? DType::kF32 : DType::kF16;
    problem.ldx = key.k;
    problem.ldd = key.ldd;
    problem.bias = key.bias;
    problem.x_alignment = key.x_alignment;
    problem.d_alignment = key.d_alignment;
    NFP_ASSIGN_OR_RETURN(const std::vector<DensePlan> found, dense.plans(problem, 1));
    return &plans.emplace(key, found.front()).first->second;
  }

  Status run_dense(const LinearCall& call, const Product& product) {
    const WeightSegment& segment = product.segment;
    const DenseKey key{call.rows,
                       static_cast<int32_t>(segment.rows),
                       static_cast<int32_t>(product.k),
                       static_cast<int32_t>(product.columns),
                       static_cast<int16_t>(alignment_of(call.x)),
                       static_cast<int16_t>(std::min(alignment_of(product.d), alignment_of(product.residual))),
                       call.y_is_f32,
                       segment.bias != nullptr};
    NFP_ASSIGN_OR_RETURN(const DensePlan* found, plan(key));
    DenseCall c;
    c.w = segment.dense;
    c.x = call.x;
    c.d = product.d;
    c.residual = product.residual;
    c.bias = call.y_is_f32 ? static_cast<const void*>(segment.bias) : segment.bias_f16;
    c.workspace = call.workspace.dense;
    if (c.workspace == nullptr) return error(ErrorCode::kUsage, "linear: workspace.dense is null");
    return dense.run(*found, c, call.stream);
  }

  Status run_nested(const LinearCall& call, Product& product) {
    const bool fp8 = product.fp8;
    GemmCall c;
    c.w = product.segment.matrix;
    c.mode = is_exact(call.precision) ? Mode::kF16
             : !fp8                   ? Mode::kW8A16
             : call.promoted_sums     ? Mode::kE4M3Promoted
                                      : Mode::kE4M3;
    c.m = call.rows;
    c.x = call.x;
    c.ldx = fp8 ? e4m3_row_bytes(product.k) : product.k;
    c.token_scale = fp8 ? e4m3_scales(call.x, call.reserved_rows, product.k) : nullptr;
    c.d = product.d;
    c.ldd = product.columns;
    c.output = call.y_is_largest ? Output::kLargest : call.y_is_f32 ? Output::kF32 : Output::kF16;
    c.bias = product.segment.bias;
    c.swiglu = product.fused;
    c.peaks = product.peaks;
    c.residual = product.residual;
    c.ldr = product.columns;
    c.workspace = call.workspace.gemm;
    c.dependent_launch = product.dependent;
    const ChoiceKey key{call.rows,
                        static_cast<int32_t>(product.segment.rows),
                        static_cast<int32_t>(product.k),
                        c.mode,
                        product.fused,
                        c.w.join,
                        call.reduction};
    const Config& chosen = config(key);
    if (chosen.tile.tokens > RowPeaks::kTileTokens) c.peaks = product.peaks = nullptr;
    return gemm.run(c, chosen, call.stream);
  }

  Gemm gemm;
  DenseGemm dense;
  const TuningTable* table;
  std::unordered_map<ChoiceKey, Config, KeyHash> configs;
  std::unordered_map<DenseKey, DensePlan, KeyHash> plans;
};

LinearRunner::LinearRunner(std::unique_ptr<State> state) : state_(std::move(state)) {}
LinearRunner::~LinearRunner() = default;
LinearRunner::LinearRunner(LinearRunner&&) noexcept = default;
const Gemm& LinearRunner::gemm() const { return state_->gemm; }
void LinearRunner::forget_choices() { state_->configs.clear(); }

Result<LinearRunner> LinearRunner::create(const TuningTable* table) {
  NFP_ASSIGN_OR_RETURN(Gemm gemm, Gemm::create());
  NFP_ASSIGN_OR_RETURN(DenseGemm dense, DenseGemm::create());
  return LinearRunner(std::make_unique<State>(gemm, std::move(dense), table));
}

size_t LinearRunner::scratch_bytes(const CudaWeight& weight, int64_t rows) {
  if (!weight.interleaved()) return 0;
  return align_activation(static_cast<size_t>(rows * weight.n()) * sizeof(uint16_t));
}

// A second kernel where the gate is not in the product's epilogue, or its result has to be rounded to E4M3, which needs
// the largest magnitude of a whole row.
LinearRunner::After LinearRunner::after(const CudaWeight& weight, LinearEpilogue epilogue, Precision consumer) {
  if (!weight.interleaved()) return After::kNothing;
  const bool rounds = !is_exact(consumer);
  if (fuses_gate(weight, epilogue)) return rounds ? After::kRound : After::kNothing;
  return rounds ? After::kActivationRound : After::kActivation;
}

bool LinearRunner::finds_largest(const CudaWeight& weight) {
  return !weight.interleaved() && weight.segments().size() == 1 && weight.segments().front().nested;
}

Status LinearRunner::run(const CudaWeight& weight, const LinearCall& call) {
  NFP_RETURN_IF_ERROR(check_call(weight, call));
  const int64_t n = weight.n(), k = weight.k();
  const bool gated = weight.interleaved();
  const bool fp8 = !is_exact(weight.consumes(call.precision));  // E4M3 activations
  const bool quantised = gated && !is_exact(call.consumer);
  const bool fused = fuses_gate(weight, call.epilogue);
  const bool two_kernels = after(weight, call.epilogue, call.consumer) != After::kNothing;
  if (two_kernels &&
      (call.workspace.scratch == nullptr || call.workspace.scratch_bytes < scratch_bytes(weight, call.rows))) {
    return error(ErrorCode::kUsage, "linear: {} rows of this weight need {} bytes of scratch, {} given", call.rows,
                 scratch_bytes(weight, call.rows), call.workspace.scratch_bytes);
  }
  void* const product = two_kernels ? call.workspace.scratch : call.y;
  const int64_t columns = fused ? n / 2 : n;  // of the product
  const size_t element = call.y_is_f32 ? sizeof(float) : sizeof(uint16_t);
  uint32_t* peaks = fused && fp8 && quantised && call.rows <= RowPeaks::kRows && n / 2 <= kMaxColumns
                        ? call.workspace.peaks
                        : nullptr;
  bool dependent = call.dependent_launch;
  for (const WeightSegment& segment : weight.segments()) {
    Product part{segment,
                 k,
                 columns,
                 fused,
                 fp8,
                 dependent,
                 offset(product, segment.first_column, element),
                 offset(call.residual, segment.first_column, element),
                 peaks};
    NFP_RETURN_IF_ERROR(segment.nested ? state_->run_nested(call, part) : state_->run_dense(call, part));
    dependent = true;
    peaks = part.peaks;
  }
  if (!two_kernels) return ok_status();
  if (call.multiplied != nullptr && cudaEventRecord(call.multiplied, call.stream) != cudaSuccess) {
    return error(ErrorCode::kDevice, "linear: an event cannot be recorded");
  }

  if (peaks != nullptr) {
    return round_rows({.m = call.rows,
                       .k = n / 2,
                       .x = product,
                       .ldx = columns,
                       .peaks = peaks,
                       .y = static_cast<uint8_t*>(call.y),
                       .ldy = e4m3_row_bytes(n / 2),
                       .scales = e4m3_scales(call.y, call.reserved_rows, n / 2)},
                      call.stream);
  }
  GemmInputCall rows;
  rows.source = fused                                     ? GemmInputCall::Source::kPlain
                : call.epilogue == LinearEpilogue::kGeglu ? GemmInputCall::Source::kGeglu
                                                          : GemmInputCall::Source::kSwiglu;
  rows.m = call.rows;
  rows.k = n / 2;
  rows.x = product;
  rows.ldx = columns;
  if (quantised) {
    rows.y_e4m3 = static_cast<uint8_t*>(call.y);
    rows.ldy_e4m3 = e4m3_row_bytes(n / 2);
    rows.scales = e4m3_scales(call.y, call.reserved_rows, n / 2);
  } else {
    rows.y_f16 = call.y;
    rows.ldy = n / 2;
  }
  return prepare_gemm_input(rows, call.stream);
}

}  // namespace nfp::cuda
