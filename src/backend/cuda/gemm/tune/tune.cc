#include "backend/cuda/gemm/tune/tune.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "backend/cuda/fused/gemm_input.h"
#include "backend/cuda/gemm/tune/test_data.h"
#include "backend/cuda/gemm/tune/timing.h"

namespace nfp::cuda {
namespace {

struct DeviceFree {
  void operator()(void* p) const { cudaFree(p); }
};
using DeviceMemory = std::unique_ptr<void, DeviceFree>;

Result<DeviceMemory> allocate(size_t bytes) {
  void* data = nullptr;
  cudaError_t status = cudaMalloc(&data, bytes);
  DeviceMemory memory(data);
  if (status == cudaSuccess) status = cudaMemset(data, 0, bytes);
  if (status != cudaSuccess)
    return error(ErrorCode::kResource, "tune: {} MB of device memory: {}", bytes >> 20, cudaGetErrorString(status));
  return memory;
}

constexpr size_t kRotation = size_t{400} << 20;

// What the products of one shape read and write, with as many copies of the weight as it takes that none is in the L2
// cache when its turn comes again.
class Operands {
 public:
  static Result<Operands> create(const GemmShape& shape, int most_tokens);

  // Median time of the product of `m` tokens, in us, with the kernel before it that makes E4M3 rows where one does.
  Result<double> time(const Gemm& gemm, const Config& config, Mode mode, int m) const;
  // The same of several, which take so many turns in random order: where power is the limit, the clock depends on what
  // ran before.
  Result<std::vector<double>> take_turns(const Gemm& gemm, std::span<const Config> configs, Mode mode, int m,
                                         int turns) const;

 private:
  Result<GraphTimer> timer(const Gemm& gemm, const Config& config, Mode mode, int m) const;
  Status prepare_rows(int m, Stream stream) const;
  GemmCall product(Mode mode, int m, size_t copy) const;

  GemmShape shape_;
  int64_t ldx_ = 0, ldd_ = 0;
  DeviceMemory workspace_, x_, x_e4m3_, d_, scales_, zeros_, residual_;
  std::vector<std::pair<DeviceMemory, DeviceMemory>> weights_;  // upper and lower bytes
};

Result<Operands> Operands::create(const GemmShape& shape, int most_tokens) {
  Operands o;
  o.shape_ = shape;
  const PlaneShape planes{shape.n, shape.k};
  // The copy engine wants rows of x and d at multiples of 16 bytes.
  o.ldx_ = planes.padded_k();
  o.ldd_ = (shape.n + 7) / 8 * 8;
  NFP_ASSIGN_OR_RETURN(o.workspace_, allocate(Workspace::kBytes));
  NFP_ASSIGN_OR_RETURN(o.x_, allocate(static_cast<size_t>(most_tokens * o.ldx_) * 2));
  NFP_ASSIGN_OR_RETURN(o.x_e4m3_, allocate(static_cast<size_t>(most_tokens * o.ldx_)));
  NFP_ASSIGN_OR_RETURN(o.d_, allocate(static_cast<size_t>(most_tokens * o.ldd_) * 2));
  NFP_ASSIGN_OR_RETURN(o.scales_, allocate(static_cast<size_t>(most_tokens) * sizeof(float)));
  // The norm adds zeros to a residual stream, which therefore stays as it is however often it runs.
  NFP_ASSIGN_OR_RETURN(o.zeros_, allocate(static_cast<size_t>(kChainTokens * o.ldx_) * 2));
  NFP_ASSIGN_OR_RETURN(o.residual_, allocate(static_cast<size_t>(kChainTokens * o.ldx_) * 2));
  fill_f16(kChainTokens * o.ldx_, 3, static_cast<uint16_t*>(o.residual_.get()), nullptr);
  fill_f16(most_tokens * o.ldx_, 1, static_cast<uint16_t*>(o.x_.get()), nullptr);
  fill_e4m3(most_tokens * o.ldx_, 2, static_cast<uint8_t*>(o.x_e4m3_.get()), nullptr);
  fill_f32(most_tokens, 0.01f, static_cast<float*>(o.scales_.get()), nullptr);
  const size_t count = std::max<size_t>(2, kRotation / planes.bytes() + 1);
  for (size_t i = 0; i < count; ++i) {
    NFP_ASSIGN_OR_RETURN(DeviceMemory upper, allocate(planes.bytes()));
    NFP_ASSIGN_OR_RETURN(DeviceMemory lower, allocate(planes.bytes()));
    fill_weights(planes, i + 10, static_cast<uint8_t*>(upper.get()), static_cast<uint8_t*>(lower.get()), nullptr,
                 nullptr, nullptr);
    o.weights_.emplace_back(std::move(upper), std::move(lower));
  }
  if (const cudaError_t status = cudaDeviceSynchronize(); status != cudaSuccess) {
    return error(ErrorCode::kResource, "tune: filling operands: {}", cudaGetErrorString(status));
  }
  return o;
}

Status Operands::prepare_rows(int m, Stream stream) const {
  GemmInputCall rows;
  rows.source = GemmInputCall::Source::kNorm;
  rows.m = m;
  rows.k = shape_.k;
  rows.x = zeros_.get();
  rows.ldx = ldx_;
  rows.weight = x_.get();
  rows.residual = residual_.get();
  rows.ldr = ldx_;
  rows.y_e4m3 = static_cast<uint8_t*>(x_e4m3_.get());
  rows.ldy_e4m3 = ldx_;
  rows.scales = static_cast<float*>(scales_.get());
  return prepare_gemm_input(rows, stream);
}

GemmCall Operands::product(Mode mode, int m, size_t copy) const {
  const auto& [upper, lower] = weights_[copy % weights_.size()];
  GemmCall call;
  call.w = {static_cast<const uint8_t*>(upper.get()),
            static_cast<const uint8_t*>(lower.get()),
            nullptr,
            shape_.n,
            shape_.k,
            Join::kBiased};
  call.mode = mode;
  call.m = m;
  call.x = is_fp8(mode) ? x_e4m3_.get() : x_.get();
  call.ldx = ldx_;
  call.token_scale = is_fp8(mode) ? static_cast<const float*>(scales_.get()) : nullptr;
  call.d = d_.get();
  call.ldd = ldd_;
  call.workspace = {workspace_.get(), Workspace::kBytes};
  return call;
}

Result<GraphTimer> Operands::timer(const Gemm& gemm, const Config& config, Mode mode, int m) const {
  const auto launch = [&](int i, CUstream_st* stream) -> Status {
    if (is_fp8(mode) && m <= kChainTokens && shape_.k <= kMaxColumns) NFP_RETURN_IF_ERROR(prepare_rows(m, stream));
    return gemm.run(product(mode, m, static_cast<size_t>(i)), config, stream);
  };
  const int launches = static_cast<int>(std::min<size_t>(weights_.size(), 24));
  return GraphTimer::create(launches, launch);
}

Result<double> Operands::time(const Gemm& gemm, const Config& config, Mode mode, int m) const {
  NFP_ASSIGN_OR_RETURN(GraphTimer captured, timer(gemm, config, mode, m));
  return captured.median(2, 5);
}

Result<std::vector<double>> Operands::take_turns(const Gemm& gemm, std::span<const Config> configs, Mode mode, int m,
                                                 int turns) const {
  std::vector<GraphTimer> timers;
  for (const Config& config : configs) {
    NFP_ASSIGN_OR_RETURN(GraphTimer captured, timer(gemm, config, mode, m));
    timers.push_back(std::move(captured));
  }
  std::vector<std::vector<double>> times(timers.size());
  std::vector<size_t> order(timers.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::minstd_rand random(static_cast<unsigned>(m));
  for (int turn = 0; turn <= turns; ++turn) {
    std::shuffle(order.begin(), order.end(), random);
    for (const size_t i : order) {
      NFP_ASSIGN_OR_RETURN(const double us, timers[i].replay());
      if (turn > 0) times[i].push_back(us);
    }
  }
  std::vector<double> medians;
  medians.reserve(times.size());
  for (std::vector<double>& of_one : times) medians.push_back(median_of(std::move(of_one)));
  return medians;
}

constexpr int kTurns = 5, kMoreTurns = 21;

}  // namespace

Result<Tuned> tune(const Gemm& gemm, std::span<const GemmShape> shapes, const TuneOptions& options) {
  Tuned tuned;
  TuningTable& table = tuned.table;
  TuningTable known;
  int id = 0;
  cudaDeviceProp properties{};
  if (cudaGetDevice(&id) == cudaSuccess && cudaGetDeviceProperties(&properties, id) == cudaSuccess) {
    table.device = properties.name;
    if (const TuningTable* found = built_in_table(properties.name, properties.multiProcessorCount); found != nullptr)
      known = *found;
    table.copy_models(known);
  }
  int most = 1;
  for (const auto& counts : {options.tokens, options.checked}) {
    for (const int m : counts) most = std::max(most, m);
  }
  const auto tell = [&](const GemmShape& shape, Mode mode, int m, const std::string& what) {
    if (options.progress)
      options.progress(fmt::format("n {}, k {}, m {}, {}: {}", shape.n, shape.k, m, name_of(mode), what));
  };
  for (const GemmShape& shape : shapes) {
    NFP_ASSIGN_OR_RETURN(const Operands operands, Operands::create(shape, most));
    for (const Mode mode : options.modes) {
      for (const int m : options.tokens) {
        Config best;
        double best_us = 1e30;
        for (const Config& config :
             likeliest({m, shape.n, shape.k, mode, false}, gemm.device(), known, options.most_candidates)) {
          NFP_ASSIGN_OR_RETURN(const double us, operands.time(gemm, config, mode, m));
          if (us < best_us) {
            best_us = us;
            best = config;
          }
        }
        table.set(shape.n, shape.k, mode, m, best);
        tell(shape, mode, m, fmt::format("{}, {:.1f} us", to_string(best), best_us));
      }
      TuningTable by_then = table;
      by_then.fill_from(known);
      for (const int m : options.checked) {
        const Problem problem{m, shape.n, shape.k, mode, false};
        const std::vector<Config> configs = likeliest(problem, gemm.device(), by_then, options.most_candidates);
        NFP_ASSIGN_OR_RETURN(const Comparison found,
                             compare_with_choice(configs, kCheckMargin, [&](std::span<const Config> some, bool again) {
                               return operands.take_turns(gemm, some, mode, m, again ? kMoreTurns : kTurns);
                             }));
        tuned.check.add(problem, found);
        if (found.is_slower) table.set(shape.n, shape.k, mode, m, found.fastest);
        tell(shape, mode, m,
             fmt::format("{}, {:.1f} us, fastest {}, {:.1f} us{}", to_string(found.chosen), found.chosen_time,
                         to_string(found.fastest), found.fastest_time, found.is_slower ? ": replaced" : ""));
      }
    }
  }
  return tuned;
}

}  // namespace nfp::cuda
