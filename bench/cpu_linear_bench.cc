// The CPU's matrix kernel by number of rows, over matrices that no cache holds, beside what the machine can do at most:
// a JSON line for each number of rows. The matrices are the experts of a mixture; rows "mixed" are what they get of a
// batch of 32 rows, each of which has so many of them by chance. The same memory is read, and no more, in turns with
// each pass: the rate at which shared machines read changes by the minute. Run it alone and with a high priority.
#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

#include "backend/cpu/ceilings.h"
#include "backend/cpu/huge_pages.h"
#include "backend/cpu/kernel_table.h"
#include "base/cpu_topology.h"
#include "base/instruction_set.h"
#include "base/thread_pool.h"

namespace nfp::cpu {
namespace {

struct Shape {
  int64_t n = 0;
  int64_t k = 0;
  int64_t bytes() const { return 2 * n * k; }
};

// The experts of a layer, each of gate and up together, and down.
struct Mixture {
  const char* name;
  int64_t hidden, wide;
  int experts, top;
  std::array<Shape, 2> shapes() const { return {Shape{2 * wide, hidden}, Shape{hidden, wide}}; }
};
constexpr std::array<Mixture, 2> kMixtures = {Mixture{"8x100m", 1024, 4096, 8, 2}, Mixture{"qwen3", 1024, 384, 128, 8}};
constexpr int kBatch = 32;

struct Matrix {
  Shape shape;
  std::vector<Panel> panels;
};

struct Setting {
  std::vector<int32_t> rows;  // of matrices 2i and 2i + 1
  bool upper_only = false;
};

class Bench {
 public:
  Bench(ThreadPool& threads, const KernelTable& kernels, const Mixture& mixture, int layers)
      : threads_(threads), kernels_(kernels) {
    const int experts = layers * mixture.experts;
    const auto widest = static_cast<size_t>(kMaxLinearRows * std::max(mixture.hidden, 2 * mixture.wide));
    int64_t bytes = 0;
    for (const Shape& shape : mixture.shapes()) bytes += shape.bytes() * experts;
    auto memory = Mapping::create(static_cast<size_t>(bytes));
    if (!memory.ok()) std::exit(1);
    memory_ = std::move(memory).value();
    fill();
    auto* at = memory_.as<uint8_t>();
    scale_.assign(kPanelRows, 1.0f);
    for (int e = 0; e < experts; ++e) {
      for (const Shape& shape : mixture.shapes()) {
        Matrix& matrix = matrices_.emplace_back(Matrix{shape, {}});
        for (int64_t row = 0; row < shape.n; row += kPanelRows) {
          Panel panel;
          panel.upper = at + row * shape.k;
          panel.lower = panel.upper + shape.n * shape.k;
          panel.scale = scale_.data();
          panel.column = static_cast<int32_t>(row);
          matrix.panels.push_back(panel);
        }
        at += shape.bytes();
      }
    }
    for (auto& x : x_) x.assign(widest, 0.25f);
    const auto all = static_cast<int64_t>(widest);
    auto pairs = Mapping::create(static_cast<size_t>(std::max(pair_words(kernels.pairs, all), split_words(all))) * 4);
    if (!pairs.ok()) std::exit(1);
    pairs_ = std::move(pairs).value();
    if (kernels.to_pairs != nullptr) kernels.to_pairs(x_[0].data(), all, pairs_.as<uint32_t>());
    for (auto& y : y_) y.assign(widest, 0.0f);
    for (int t = 0; t < threads.size(); ++t) {
      auto scratch =
          Mapping::create(linear_scratch_bytes(kernels.pairs, kMaxLinearRows, std::max(mixture.hidden, mixture.wide)));
      if (!scratch.ok()) std::exit(1);
      scratch_.push_back(std::move(scratch).value());
    }
  }

  // Medians of passes over all matrices and of reading them, in turns, and of the ratio within a turn.
  struct Times {
    double seconds = 0, reading = 0, ratio = 0;
  };
  Times times(const Setting& setting) {
    std::vector<double> passes, reads, ratios;
    for (int i = 0; i < 9; ++i) {
      reads.push_back(seconds([&](int thread) { read(setting, thread); }));
      passes.push_back(seconds([&](int thread) { pass(setting, thread); }));
      ratios.push_back(passes.back() / reads.back());
    }
    const auto median = [](std::vector<double>& v) {
      std::nth_element(v.begin(), v.begin() + static_cast<std::ptrdiff_t>(v.size() / 2), v.end());
      return v[v.size() / 2];
    };
    return {median(passes), median(reads), median(ratios)};
  }

  // Of the matrices that have rows.
  double bytes(const Setting& setting) const {
    double sum = 0;
    for (size_t i = 0; i < matrices_.size(); ++i) {
      if (setting.rows[i / 2] > 0)
        sum += static_cast<double>(matrices_[i].shape.bytes()) * (setting.upper_only ? 0.5 : 1);
    }
    return sum;
  }
  double flops(const Setting& setting) const {
    double sum = 0;
    for (size_t i = 0; i < matrices_.size(); ++i) {
      sum += static_cast<double>(matrices_[i].shape.bytes()) * setting.rows[i / 2];
    }
    return sum;
  }
  size_t experts() const { return matrices_.size() / 2; }

 private:
  void fill() {
    std::mt19937_64 random(1);
    std::vector<uint64_t> pool(1 << 17);
    for (uint64_t& word : pool) word = random() & 0xbfbfbfbfbfbfbfbfu;  // magnitudes under 1 in either reading
    const size_t piece = pool.size() * sizeof(uint64_t);
    threads_.parallel_for(static_cast<int64_t>(memory_.bytes() / piece), 1, [&](Range range) {
      for (int64_t i = range.begin; i < range.end; ++i) {
        std::memcpy(memory_.as<char>() + static_cast<size_t>(i) * piece, pool.data(), piece);
      }
    });
  }

  template <typename F>
  double seconds(F work) {
    const auto start = std::chrono::steady_clock::now();
    threads_.run(work);
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  }

  // A thread's part of what pass() multiplies.
  Range share(const Matrix& matrix, int thread) const {
    return partition(static_cast<int64_t>(matrix.panels.size()), thread, threads_.size(), 2);
  }

  void read(const Setting& setting, int thread) const {
    for (size_t i = 0; i < matrices_.size(); ++i) {
      if (setting.rows[i / 2] == 0) continue;
      const Matrix& matrix = matrices_[i];
      const Range mine = share(matrix, thread);
      const size_t bytes = static_cast<size_t>(mine.size() * kPanelRows * matrix.shape.k);
      const Panel& first = matrix.panels[static_cast<size_t>(mine.begin)];
      kernels_.read_loop(first.upper, bytes);
      if (!setting.upper_only) kernels_.read_loop(first.lower, bytes);
    }
  }

  void pass(const Setting& setting, int thread) {
    for (size_t i = 0; i < matrices_.size(); ++i) {
      if (setting.rows[i / 2] == 0) continue;
      const Matrix& matrix = matrices_[i];
      const Range mine = share(matrix, thread);
      LinearTask task;
      task.cheap_subnormals = cheap_subnormals_;
      task.panels = matrix.panels.data();
      task.first = mine.begin;
      task.last = mine.end;
      task.k = task.x_stride = matrix.shape.k;
      task.x = x_[i % 2].data();
      task.upper_only = setting.upper_only;
      const bool on_pairs = (setting.upper_only ? kernels_.to_pairs : kernels_.to_split) != nullptr;
      task.x_pairs = on_pairs ? pairs_.as<uint32_t>() : nullptr;
      task.rows = setting.rows[i / 2];
      task.y = y_[i % 2].data();
      task.y_stride = matrix.shape.n;
      task.scratch = scratch_[static_cast<size_t>(thread)].data();
      size_t next = i + 1;
      while (next < matrices_.size() && setting.rows[next / 2] == 0) ++next;
      if (next < matrices_.size()) {
        const Range range = share(matrices_[next], thread);
        task.next = matrices_[next].panels.data() + range.begin;
        task.next_count = range.size();
      }
      kernels_.linear(task);
    }
  }

  ThreadPool& threads_;
  const KernelTable& kernels_;
  const bool cheap_subnormals_ = detect_features().cheap_subnormals;
  Mapping memory_;
  std::vector<float> scale_;
  std::vector<Matrix> matrices_;
  std::array<std::vector<float>, 2> x_, y_;
  Mapping pairs_;  // of any of x_: all values are alike
  std::vector<Mapping> scratch_;
};

std::vector<int32_t> mixed_rows(const Mixture& mixture, size_t experts) {
  std::mt19937 random(7);
  std::vector<int32_t> rows(experts, 0), order(static_cast<size_t>(mixture.experts));
  std::iota(order.begin(), order.end(), 0);
  for (size_t layer = 0; layer < experts; layer += order.size()) {
    for (int i = 0; i < kBatch; ++i) {
      std::shuffle(order.begin(), order.end(), random);
      for (int j = 0; j < mixture.top; ++j) ++rows[layer + static_cast<size_t>(order[static_cast<size_t>(j)])];
    }
  }
  return rows;
}

int run(const Mixture& mixture, int layers, const std::vector<int32_t>& all_rows) {
  const auto set = choose_instruction_set("", detect_features());
  if (!set.ok()) return 1;
  ThreadPool threads(usable_cpu_count());
  const auto machine = measure_machine({});
  if (!machine.ok()) return 1;
  const double fma = machine->fma_gflops * 1e9;
  fmt::print("{{\"read_gb_s\": {:.1f}, \"fma_gflop_s\": {:.0f}, \"kernels\": \"{}\"}}\n", machine->read_gbs, fma * 1e-9,
             kernels_of(*set).name);
  Bench bench(threads, kernels_of(*set), mixture, layers);
  const auto report = [&](const std::string& name, Setting setting) {
    for (const bool upper_only : {false, true}) {
      setting.upper_only = upper_only;
      const Bench::Times times = bench.times(setting);
      const double arithmetic = bench.flops(setting) / fma;
      fmt::print(
          "{{\"rows\": \"{}\", \"precision\": \"{}\", \"ms\": {:.2f}, \"reading_ms\": {:.2f}, \"arithmetic_ms\": "
          "{:.2f}, \"gb_s\": {:.1f}, \"over_reading\": {:.3f}, \"over_bound\": {:.2f}}}\n",
          name, upper_only ? "fp8" : "fp16", times.seconds * 1e3, times.reading * 1e3, arithmetic * 1e3,
          bench.bytes(setting) / times.reading * 1e-9, times.ratio,
          times.seconds / std::max(times.reading, arithmetic));
      std::fflush(stdout);
    }
  };
  for (const int32_t rows : all_rows) {
    report(std::to_string(rows), {std::vector<int32_t>(bench.experts(), rows), false});
  }
  report("mixed", {mixed_rows(mixture, bench.experts()), false});
  return 0;
}

}  // namespace
}  // namespace nfp::cpu

// [8x100m|qwen3] [layers of experts [rows...]]
int main(int argc, char** argv) {
  const nfp::cpu::Mixture* mixture = nfp::cpu::kMixtures.data();
  for (const auto& one : nfp::cpu::kMixtures) {
    if (argc > 1 && std::strcmp(argv[1], one.name) == 0) mixture = &one, --argc, ++argv;
  }
  std::vector<int32_t> rows;
  for (int i = 2; i < argc; ++i) rows.push_back(std::clamp(std::atoi(argv[i]), 1, 512));
  if (argc <= 2) rows = {1, 2, 4, 6, 8, 10, 12, 16, 24, 32};
  return nfp::cpu::run(*mixture, argc > 1 ? std::clamp(std::atoi(argv[1]), 1, 64) : 8, rows);
}
