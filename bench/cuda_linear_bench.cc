// Linear layers on a Hopper GPU: loading from host memory, what a call costs the host, FP32 logits beside cuBLASLt, the
// two ways to feed an E4M3 consumer behind SwiGLU, and what E4M3 sums lose. One JSON object a line.
#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <chrono>
#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "backend/cuda/fused/gemm_input.h"
#include "backend/cuda/gemm/dense.h"
#include "backend/cuda/gemm/tune/timing.h"
#include "backend/cuda/linear/linear.h"
#include "base/float_types.h"
#include "device_memory.h"
#include "nested/matrix_analysis.h"

namespace {

using namespace nfp;
using namespace nfp::cuda;

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

using bench::DeviceMemory;
using bench::must;

// 64 MB of normal weights; matrices read them from changing offsets.
const std::vector<uint16_t>& pool(WeightType type) {
  static const auto make = [](WeightType of) {
    std::vector<uint16_t> out(size_t{32} << 20);
    std::mt19937 random(1);
    std::normal_distribution<float> normal(0.0f, 0.02f);
    for (size_t i = 0; i < (size_t{1} << 20); ++i) {
      const float v = normal(random);
      out[i] = of == WeightType::kF16 ? fp32_to_fp16(v) : fp32_to_bf16(v);
    }
    for (size_t i = size_t{1} << 20; i < out.size(); ++i) out[i] = out[i * 2654435761u % (1 << 20)];
    return out;
  };
  static const std::vector<uint16_t> f16 = make(WeightType::kF16), bf16 = make(WeightType::kBF16);
  return type == WeightType::kF16 ? f16 : bf16;
}

MatrixSource source(int64_t rows, int64_t cols, WeightType type) {
  MatrixSource out;
  out.name = "random";
  out.rows = rows;
  out.cols = cols;
  out.type = type;
  out.read = [cols, type](int64_t first, int64_t count, uint16_t* to) {
    const std::vector<uint16_t>& numbers = pool(type);
    for (int64_t r = 0; r < count; ++r) {
      const auto at = static_cast<size_t>(first + r) * 1000003u % (numbers.size() - static_cast<size_t>(cols));
      std::memcpy(to + r * cols, numbers.data() + at, static_cast<size_t>(cols) * 2);
    }
    return ok_status();
  };
  return out;
}

std::unique_ptr<CudaWeight> load(int64_t n, int64_t k, RowOrder order, DeviceUploader& uploader, ThreadPool& threads) {
  const bool pair = order == RowOrder::kInterleave;
  MatrixAnalysis analysis;
  analysis.storage = Storage::kNested;
  analysis.exponents.assign(static_cast<size_t>(pair ? n / 2 : n), 0);
  const auto reader = make_matrix_reader(source(pair ? n / 2 : n, k, WeightType::kF16), analysis);
  LinearSpec spec;
  spec.order = order;
  spec.parts.assign(pair ? 2 : 1, reader.get());
  auto weight = must(CudaWeight::make(spec, uploader, threads));
  must(uploader.finish());
  return weight;
}

void bench_loading(DeviceUploader& uploader) {
  constexpr int64_t n = 28672, k = 4096;
  const auto gigabytes = static_cast<double>(n * k * 2) / 1e9;
  for (const WeightType type : {WeightType::kF16, WeightType::kBF16}) {
    pool(type);
    for (const int count : {1, 4, 8, 16}) {
      ThreadPool threads(count);
      double analyse = 1e9, make = 1e9;
      for (int repeat = 0; repeat < (count == 1 ? 1 : 3); ++repeat) {
        const double start = now();
        const MatrixAnalysis analysis = must(analyse_matrix(source(n, k, type), threads));
        const double between = now();
        const auto reader = make_matrix_reader(source(n, k, type), analysis);
        LinearSpec spec;
        spec.parts = {reader.get()};
        const auto weight = must(CudaWeight::make(spec, uploader, threads));
        must(uploader.finish());
        analyse = std::min(analyse, between - start);
        make = std::min(make, now() - between);
      }
      fmt::print(
          "{{\"what\": \"load\", \"type\": \"{}\", \"threads\": {}, \"analyse_gb_s\": {:.2f}, \"make_gb_s\": {:.2f}, "
          "\"both_gb_s\": {:.2f}}}\n",
          type == WeightType::kF16 ? "f16" : "bf16", count, gigabytes / analyse, gigabytes / make,
          gigabytes / (analyse + make));
    }
  }
}

struct Bench {
  LinearRunner runner;
  DeviceUploader& uploader;
  ThreadPool& threads;
  DeviceMemory gemm{Workspace::kBytes};
  DeviceMemory dense{DenseGemm::kWorkspaceBytes};
  DeviceMemory scratch{size_t{256} << 20};
  DeviceMemory x{size_t{64} << 20, 0x22};
  DeviceMemory y{size_t{256} << 20};

  LinearCall call(int64_t m, Precision precision) const {
    LinearCall out;
    out.x = x.get();
    out.rows = m;
    out.reserved_rows = m;
    out.precision = precision;
    out.y = y.get();
    out.workspace = {{gemm.get(), Workspace::kBytes}, dense.get(), scratch.get(), size_t{256} << 20};
    return out;
  }

  void host_cost() {
    const auto weight = load(4096, 4096, RowOrder::kConcat, uploader, threads);
    cudaStream_t stream = nullptr;
    cudaStreamCreate(&stream);
    for (const Precision precision : {Precision::kFp16, Precision::kFp8W8A8}) {
      LinearCall one = call(16, precision);
      one.stream = stream;
      std::vector<double> times;
      for (int repeat = 0; repeat < 30; ++repeat) {
        const double start = now();
        for (int i = 0; i < 200; ++i) must(runner.run(*weight, one));
        times.push_back((now() - start) / 200 * 1e6);
        cudaStreamSynchronize(stream);
      }
      fmt::print("{{\"what\": \"host\", \"precision\": \"{}\", \"us_a_call\": {:.2f}}}\n", name_of(precision),
                 median_of(times));
    }
    cudaStreamDestroy(stream);
  }

  void head() {
    constexpr int64_t n = 128256, k = 4096;
    const auto weight = load(n, k, RowOrder::kConcat, uploader, threads);
    const DeviceMemory plain(static_cast<size_t>(n * k) * 2, 0x22);
    const DenseGemm library = must(DenseGemm::create());
    for (const int64_t m : {1, 16, 64}) {
      LinearCall logits = call(m, Precision::kFp16);
      logits.y_is_f32 = true;
      LinearCall halves = call(m, Precision::kFp16);
      const auto time = [&](const GraphTimer::Launch& launch) {
        return must(must(GraphTimer::create(4, launch)).median(2, 9));
      };
      const double ours = time([&](int, CUstream_st* stream) {
        logits.stream = stream;
        return runner.run(*weight, logits);
      });
      const double half = time([&](int, CUstream_st* stream) {
        halves.stream = stream;
        return runner.run(*weight, halves);
      });
      DenseProblem problem;
      problem.m = m;
      problem.n = n;
      problem.k = k;
      problem.output = DType::kF32;
      problem.ldx = k;
      problem.ldd = n;
      double theirs = 1e9;
      for (const DensePlan& plan : must(library.plans(problem, 5))) {
        DenseCall dense_call;
        dense_call.w = plain.get();
        dense_call.x = x.get();
        dense_call.d = y.get();
        dense_call.workspace = dense.get();
        theirs =
            std::min(theirs, time([&](int, CUstream_st* stream) { return library.run(plan, dense_call, stream); }));
      }
      fmt::print(
          "{{\"what\": \"head\", \"m\": {}, \"nested_f32_us\": {:.1f}, \"nested_f16_us\": {:.1f}, \"cublaslt_f32_us\": "
          "{:.1f}}}\n",
          m, ours, half, theirs);
    }
  }

  // Gate and up for an E4M3 down: SwiGLU in the product's epilogue and then rounding, or both behind a plain product.
  void swiglu() {
    constexpr int64_t n = 28672, k = 4096;
    std::vector<std::unique_ptr<CudaWeight>> copies;
    for (int i = 0; i < 3; ++i) copies.push_back(load(n, k, RowOrder::kInterleave, uploader, threads));
    const TuningTable* table = built_in_table("NVIDIA H200", runner.gemm().device().sms);
    for (const int64_t m : {1, 16, 64, 256, 2048}) {
      double times[2];
      for (const bool fused : {false, true}) {
        const Problem problem{m, n, k, Mode::kE4M3, fused};
        const Choice choice = choose(problem, runner.gemm().device(), table, Reduction::kFastest);
        GemmCall product;
        product.mode = Mode::kE4M3;
        product.m = m;
        product.x = x.get();
        product.ldx = e4m3_row_bytes(k);
        product.token_scale = e4m3_scales(x.get(), m, k);
        product.d = scratch.get();
        product.ldd = fused ? n / 2 : n;
        product.swiglu = fused;
        product.workspace = {gemm.get(), Workspace::kBytes};
        GemmInputCall rows;
        rows.source = fused ? GemmInputCall::Source::kPlain : GemmInputCall::Source::kSwiglu;
        rows.m = m;
        rows.k = n / 2;
        rows.x = scratch.get();
        rows.ldx = product.ldd;
        rows.y_e4m3 = static_cast<uint8_t*>(y.get());
        rows.ldy_e4m3 = e4m3_row_bytes(n / 2);
        rows.scales = e4m3_scales(y.get(), m, n / 2);
        GraphTimer timer = must(GraphTimer::create(6, [&](int index, CUstream_st* stream) -> Status {
          product.w = copies[static_cast<size_t>(index) % 3]->segments()[0].matrix;
          NFP_RETURN_IF_ERROR(runner.gemm().run(product, choice.config, stream));
          return prepare_gemm_input(rows, stream);
        }));
        times[fused ? 1 : 0] = must(timer.median(3, 11));
      }
      fmt::print("{{\"what\": \"swiglu\", \"m\": {}, \"in_rows_us\": {:.1f}, \"in_epilogue_us\": {:.1f}}}\n", m,
                 times[0], times[1]);
    }
  }
};

// E4M3 sums against float64: how much the tensor core's own sums lose, by how far the terms agree in sign.
void bench_sums(const Gemm& gemm) {
  constexpr int64_t n = 128, m = 8;
  const DeviceMemory workspace(Workspace::kBytes);
  for (const int64_t k : {4096, 14336}) {
    for (const float mean : {0.0f, 0.2f, 1.0f, 4.0f}) {  // of weights and activations, in deviations
      std::mt19937 random(1);
      std::normal_distribution<float> normal(mean);
      const PlaneShape shape{n, k};
      std::vector<uint8_t> codes(static_cast<size_t>(n * k)), plane(shape.bytes()),
          x_bytes(static_cast<size_t>(m * e4m3_row_bytes(k)));
      for (auto& code : codes) code = fp32_to_e4m3(normal(random) * 4);
      for (int64_t slab = 0; slab < shape.row_blocks(); ++slab) {
        pack_slab(shape, Plane::kUpper, Join::kBiased, std::span(codes).subspan(static_cast<size_t>(slab * 64 * k)), 64,
                  plane.data() + static_cast<size_t>(slab) * shape.slab_bytes());
      }
      std::vector<float> x(static_cast<size_t>(m * k));
      for (int64_t t = 0; t < m; ++t) {
        for (int64_t i = 0; i < k; ++i) {
          const uint8_t code = fp32_to_e4m3(normal(random) * 64);
          x[static_cast<size_t>(t * k + i)] = e4m3_to_fp32(code);
          x_bytes[static_cast<size_t>(t * e4m3_row_bytes(k) + activation_byte(i))] = code;
        }
      }
      const DeviceMemory upper(plane.size()), dx(x_bytes.size()), d(static_cast<size_t>(m * n) * 4);
      cudaMemcpy(upper.get(), plane.data(), plane.size(), cudaMemcpyHostToDevice);
      cudaMemcpy(dx.get(), x_bytes.data(), x_bytes.size(), cudaMemcpyHostToDevice);
      double errors[2];
      for (const bool promoted : {false, true}) {
        GemmCall call;
        call.w = {static_cast<const uint8_t*>(upper.get()), nullptr, nullptr, n, k, Join::kBiased};
        call.mode = promoted ? Mode::kE4M3Promoted : Mode::kE4M3;
        call.m = m;
        call.x = dx.get();
        call.ldx = e4m3_row_bytes(k);
        call.d = d.get();
        call.ldd = n;
        call.output = Output::kF32;
        call.workspace = {workspace.get(), Workspace::kBytes};
        must(gemm.run(call, {Tile{8, 1, 1, 1}, 1, false}, nullptr));
        std::vector<float> got(static_cast<size_t>(m * n));
        cudaMemcpy(got.data(), d.get(), got.size() * 4, cudaMemcpyDeviceToHost);
        double wrong = 0, all = 0;
        for (int64_t t = 0; t < m; ++t) {
          for (int64_t r = 0; r < n; ++r) {
            double sum = 0;
            for (int64_t i = 0; i < k; ++i) {
              sum += double{e4m3_to_fp32(codes[static_cast<size_t>(r * k + i)])} * x[static_cast<size_t>(t * k + i)];
            }
            sum /= 256;
            const double off = got[static_cast<size_t>(t * n + r)] - sum;
            wrong += off * off;
            all += sum * sum;
          }
        }
        errors[promoted ? 1 : 0] = std::sqrt(wrong / all);
      }
      fmt::print(
          "{{\"what\": \"sums\", \"k\": {}, \"mean_in_deviations\": {}, \"rms_error\": {:.2e}, \"rms_error_promoted\": "
          "{:.2e}}}\n",
          k, mean, errors[0], errors[1]);
    }
  }
}

}  // namespace

int main() {
  int device = 0;
  cudaDeviceProp properties{};
  if (cudaGetDevice(&device) != cudaSuccess || cudaGetDeviceProperties(&properties, device) != cudaSuccess) {
    fmt::print(stderr, "no usable CUDA device\n");
    return 1;
  }
  fmt::print("{{\"device\": \"{}\", \"cores\": {}}}\n", properties.name, std::thread::hardware_concurrency());
  const auto uploader = must(DeviceUploader::create(120));
  ThreadPool threads(static_cast<int>(std::min(16u, std::max(1u, std::thread::hardware_concurrency()))));
  const TuningTable* table = built_in_table(properties.name, properties.multiProcessorCount);
  Bench bench{must(LinearRunner::create(table)), *uploader, threads};
  bench.host_cost();
  bench.swiglu();
  bench.head();
  bench_sums(bench.runner.gemm());
  bench_loading(*uploader);
  return 0;
}
