// How fast one core turns a checkpoint's rows into the CUDA backend's planes, and where the time goes: GB/s of source
// bytes (2 a weight), matrix larger than the caches. With MODEL [THREADS], the same for all matrices of a model, from
// its files. Needs no GPU.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "backend/cuda/gemm/plan/pack.h"
#include "backend/cuda/linear/weight_plan.h"
#include "base/float_types.h"
#include "io/model_source.h"
#include "nested/format.h"
#include "nested/matrix_analysis.h"

namespace {

using namespace nfp;
using namespace nfp::cuda;

double seconds(const std::function<void()>& work) {
  double best = 1e9;
  for (int repeat = 0; repeat < 5; ++repeat) {
    const auto start = std::chrono::steady_clock::now();
    work();
    best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  return best;
}

void bench(WeightType type, int64_t rows, int64_t cols) {
  std::vector<uint16_t> weights(static_cast<size_t>(rows * cols));
  std::mt19937 random(1);
  std::normal_distribution<float> normal(0.0f, 0.02f);
  for (size_t i = 0; i < weights.size(); ++i) {
    if (i >= (size_t{1} << 20)) {
      weights[i] = weights[i * 2654435761u % (1 << 20)];
      continue;
    }
    const float v = normal(random);
    weights[i] = type == WeightType::kF16 ? fp32_to_fp16(v) : fp32_to_bf16(v);
  }
  MatrixSource source;
  source.name = "random";
  source.rows = rows;
  source.cols = cols;
  source.type = type;
  source.read = [&](int64_t first, int64_t count, uint16_t* out) {
    std::memcpy(out, weights.data() + first * cols, static_cast<size_t>(count * cols) * 2);
    return ok_status();
  };
  ThreadPool one(1);
  const double gigabytes = static_cast<double>(rows * cols) * 2 / 1e9;
  const auto tell = [&](const char* what, double time) {
    fmt::print("{{\"type\": \"{}\", \"rows\": {}, \"cols\": {}, \"what\": \"{}\", \"gb_s\": {:.2f}}}\n",
               type == WeightType::kF16 ? "f16" : "bf16", rows, cols, what, gigabytes / time);
  };

  const MatrixAnalysis analysis = *analyse_matrix(source, one);
  const double analyse = seconds([&] { (void)*analyse_matrix(source, one); });
  tell("analyse", analyse);

  const auto reader = make_matrix_reader(source, analysis);
  std::vector<uint8_t> upper(static_cast<size_t>(16 * cols)), lower(upper.size());
  std::vector<int8_t> exponents(16);
  tell("read_nested", seconds([&] {
         for (int64_t r = 0; r + 16 <= rows; r += 16)
           (void)reader->read_nested(r, 16, upper.data(), lower.data(), exponents.data());
       }));

  const PlaneShape shape{rows, cols};
  std::vector<uint8_t> slabs(2 * shape.bytes());
  tell("pack_rows", seconds([&] {
         for (int64_t slab = 0; slab < shape.row_blocks(); ++slab) {
           for (int strip = 0; strip < kBlockRows; strip += 16) {
             uint8_t* out = slabs.data() + static_cast<size_t>(slab) * 2 * shape.slab_bytes();
             pack_rows(shape, Plane::kUpper, Join::kBiased, upper, strip, 16, out);
             pack_rows(shape, Plane::kLower, Join::kBiased, lower, strip, 16, out + shape.slab_bytes());
           }
         }
       }));

  LinearSpec spec;
  spec.parts = {reader.get()};
  const WeightPlan plan = *WeightPlan::make(spec);
  WeightPlan::Staging staging;
  float scales[kBlockRows];
  const double fill = seconds([&] {
    uint8_t* out = slabs.data();
    for (const WeightPiece& piece : plan.pieces()) {
      (void)plan.fill(piece, out, out + plan.piece_bytes(piece), scales, staging);
      out += 2 * plan.piece_bytes(piece);
    }
  });
  tell("fill (read_nested and pack_rows)", fill);
  tell("all (analyse and fill)", analyse + fill);
}

int bench_model(const std::string& model, int count) {
  const auto source = ModelSource::open(model);
  if (!source.ok()) {
    fmt::print(stderr, "{}\n", source.error().message);
    return 1;
  }
  ThreadPool threads(count);
  double bytes = 0, analyse = 0, fill = 0;
  std::vector<WeightPlan::Staging> staging(static_cast<size_t>(count));
  for (const TensorInfo& tensor : (*source)->tensors()) {
    if (tensor.shape.rank() != 2) continue;
    const auto start = std::chrono::steady_clock::now();
    const auto reader = (*source)->matrix(tensor.name, threads);
    if (!reader.ok()) {
      fmt::print(stderr, "{}\n", reader.error().message);
      return 1;
    }
    const auto between = std::chrono::steady_clock::now();
    LinearSpec spec;
    spec.parts = {reader->get()};
    const WeightPlan plan = *WeightPlan::make(spec);
    threads.run([&](int thread) {
      std::vector<uint8_t> out(4 * plan.piece_bytes(plan.pieces()[0]));  // as pinned memory would be, used again
      float scales[kBlockRows];
      const auto pieces = static_cast<int64_t>(plan.pieces().size());
      const Range mine = partition(pieces, thread, count);
      for (int64_t i = mine.begin; i < mine.end; ++i) {
        const WeightPiece& piece = plan.pieces()[static_cast<size_t>(i)];
        uint8_t* upper = out.data() + (i % 2) * 2 * plan.piece_bytes(plan.pieces()[0]);
        (void)plan.fill(piece, upper, upper + plan.piece_bytes(piece), scales, staging[static_cast<size_t>(thread)]);
      }
    });
    const auto end = std::chrono::steady_clock::now();
    bytes += static_cast<double>(tensor.shape.elements()) * 2;
    analyse += std::chrono::duration<double>(between - start).count();
    fill += std::chrono::duration<double>(end - between).count();
  }
  fmt::print(
      "{{\"model\": \"{}\", \"threads\": {}, \"gb\": {:.2f}, \"analyse_gb_s\": {:.2f}, \"fill_gb_s\": {:.2f}, "
      "\"all_gb_s\": {:.2f}}}\n",
      model, count, bytes / 1e9, bytes / 1e9 / analyse, bytes / 1e9 / fill, bytes / 1e9 / (analyse + fill));
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1) return bench_model(argv[1], argc > 2 ? std::atoi(argv[2]) : 1);
  for (const WeightType type : {WeightType::kF16, WeightType::kBF16}) {
    bench(type, 8192, 4096);
    bench(type, 2048, 14336);
  }
  return 0;
}
