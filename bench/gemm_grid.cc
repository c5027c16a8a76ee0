// The grids of docs/kernels.md and docs/kernel-experiments.md: nested FP16 and FP8 products against cuBLASLt's on the
// same machine in the same minute, as JSON lines.
//
//   gemm_grid [--shapes n,k;n,k] [--tokens m,m] [--random-shapes SEED,COUNT] [--random-m SEED,COUNT[,LEAST[,MOST]]]
//             [--choices FILE] [--alone MS] [--quick] [--out FILE]
//
// --random-m measures what an engine would run, whatever the number of tokens: COUNT counts a shape, log-uniform in 1
// to 8192 (each shape its own), with the choice that the built-in table makes, or FILE (a table before it is built in).
//
// In turns all choices share a clock; where power is the limit, --alone shows what each costs a server that runs it
// for long.
//
// Every method is tuned first (cuBLASLt: its heuristics' favourites, timed; ours: candidates(); choices take turns in
// random order), then the winners are measured in turns, also in random order, and from 128 tokens on the four that
// matter most alone for 100 ms as well, with the clock and power they ran at. Weights rotate over more than 400 MB.
#include <CLI/CLI.hpp>
#include <cuda_profiler_api.h>
#include <cuda_runtime_api.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "backend/cuda/fused/gemm_input.h"
#include "backend/cuda/gemm/dense.h"
#include "backend/cuda/gemm/gemm.h"
#include "backend/cuda/gemm/plan/tuning_table.h"
#include "backend/cuda/gemm/tune/check.h"
#include "backend/cuda/gemm/tune/test_data.h"
#include "backend/cuda/gemm/tune/timing.h"
#include "base/atomic_file.h"
#include "device_memory.h"
#include "gpu_monitor.h"

namespace nfp::cuda {
namespace {

struct Shape {
  int64_t n, k;
};
// (n, k) of the linear layers of Llama-3.1-8B, Mistral-Nemo, Phi-4 and Mistral-Small.
const std::vector<Shape> kShapes = {{6144, 4096},  {4096, 4096},  {28672, 4096}, {4096, 14336}, {6144, 5120},
                                    {5120, 4096},  {28672, 5120}, {5120, 14336}, {7680, 5120},  {5120, 5120},
                                    {35840, 5120}, {5120, 17920}, {65536, 5120}, {5120, 32768}};
// Measured alone for 100 ms as well, with the clock and power that they ran at.
constexpr std::array<std::string_view, 4> kSustained = {"cublas_f16", "nested_f16", "cublas_e4m3_fast", "nested_e4m3"};
// What random numbers of tokens are measured with: no search of ours, only what an engine would choose.
constexpr std::array<std::string_view, 7> kRandom = {
    "cublas_f16",         "nested_f16_chosen",           "nested_f16_invariant", "cublas_e4m3_fast",
    "nested_e4m3_chosen", "nested_e4m3_promoted_chosen", "nested_w8a16_chosen"};
constexpr size_t kRotation = size_t{420} << 20;
constexpr int64_t kMostTokens = 8192;

using Buffer = bench::DeviceMemory;

struct Copy {
  std::unique_ptr<Buffer> upper, lower, dense, dense_e4m3;
};

struct Method {
  std::string name;
  std::string choice;
  double tuned_us = 1e30;  // best of the tuning
  GraphTimer::Launch launch;
  std::vector<double> turns;
  double sustained_us = 0;
  Config config{};                                      // ours
  std::vector<std::pair<std::string, double>> tried{};  // every choice and its time
  bench::GpuReading reading{};                          // while the sustained measurement ran
};

struct Bench {
  Gemm gemm;
  DenseGemm dense;
  Buffer x{size_t{kMostTokens} * 32768 * 2}, x_e4m3{size_t{kMostTokens} * 32768}, d{size_t{kMostTokens} * 65536 * 2},
      scales{kMostTokens * 4}, dense_workspace{DenseGemm::kWorkspaceBytes}, workspace{Workspace::kBytes};
  Buffer quantised{size_t{64} * 32768}, residual{size_t{64} * 32768 * 2}, zeros{size_t{64} * 32768 * 2},
      row_scales{64 * 4};
  TuningTable table{};
  const TuningTable* built_in = nullptr;  // of this device, or what --choices named in its place
  TuningTable given{};
  FILE* out = stdout;
  bool random_tokens = false;
  bool quick = false, log_turns = false;
  double alone_ms = 0;
  int candidates_tried = 24;
  bench::GpuMonitor monitor{};
  // Long products differ less.
  int candidates_for(int64_t m) const { return m >= 1024 ? (candidates_tried + 1) / 2 : candidates_tried; }
  bool log_tried = false;
  bool profile = false;
  std::vector<std::string> wanted{};  // methods; empty = all
  // Where the device has a model of time, what would be chosen and then in the model's order; for random numbers of
  // tokens every fifth from anywhere.
  std::vector<Config> worth_timing(const Problem& problem) const {
    std::vector<Config> all = candidates(problem, gemm.device());
    const TimeModel* model = built_in == nullptr ? nullptr : built_in->model(problem.mode);
    if (model == nullptr) return all;
    const auto predicted = [&](const Config& config) {
      const double us = predict_us(*model, problem, config, gemm.device());
      return std::isinf(us) ? 0 : us;  // a tile that is new to the model comes first
    };
    std::stable_sort(all.begin(), all.end(),
                     [&](const Config& one, const Config& other) { return predicted(one) < predicted(other); });
    const Config chosen = choose(problem, gemm.device(), built_in, Reduction::kFastest).config;
    std::erase(all, chosen);
    all.insert(all.begin(), chosen);
    if (!random_tokens) return all;
    std::minstd_rand random(static_cast<unsigned>(problem.m));
    for (size_t i = 4; i < all.size(); i += 5) std::swap(all[i], all[i + random() % (all.size() - i)]);
    return all;
  }
  bool wants(const std::string& name) const {
    if (wanted.empty() && random_tokens) return std::find(kRandom.begin(), kRandom.end(), name) != kRandom.end();
    return wanted.empty() || std::find(wanted.begin(), wanted.end(), name) != wanted.end();
  }
};

// One replay: 300 us or more, and so many weights that none is still in the L2 when its turn comes again.
int launches_for(double us, size_t copies, size_t bytes) {
  constexpr size_t kNoLongerCached = size_t{200} << 20;
  const size_t turn = std::min<size_t>({copies, kNoLongerCached / bytes + 1, us > 400 ? size_t{2} : size_t{32}});
  return std::max<int>(static_cast<int>(turn), std::clamp(static_cast<int>(300.0 / us), 1, 64));
}

struct Candidate {
  std::string choice;
  GraphTimer::Launch launch;
};
// Times choices and keeps the fastest. They take turns in a new order every round: where power is the limit, the clock
// depends on what ran before, by up to a quarter.
// alone_ms > 0: each for so long by itself, twice, at the clock that its own power leaves it.
void consider(Method& method, const std::vector<Candidate>& choices, double expected_us, size_t copies, size_t bytes,
              unsigned seed, double alone_ms) {
  std::vector<GraphTimer> timers;
  std::vector<size_t> order;
  for (const Candidate& c : choices) {
    auto timer = GraphTimer::create(launches_for(expected_us, copies, bytes), c.launch);
    if (!timer.ok()) {
      fmt::print(stderr, "{} {}: {}\n", method.name, c.choice, timer.error().message);
      cudaGetLastError();
      continue;
    }
    order.push_back(static_cast<size_t>(&c - choices.data()));
    timers.push_back(std::move(*timer));
  }
  std::vector<std::vector<double>> times(timers.size());
  std::vector<size_t> turns(timers.size());
  std::iota(turns.begin(), turns.end(), size_t{0});
  std::minstd_rand random(seed);
  const int rounds = alone_ms > 0 ? 3 : expected_us > 150 ? 5 : 6;
  for (int round = 0; round < rounds; ++round) {
    std::shuffle(turns.begin(), turns.end(), random);
    for (const size_t i : turns) {
      const bool alone = alone_ms > 0 && round > 0;
      if (alone && !timers[i].sustained(alone_ms / 2).ok()) std::exit(1);  // the clock settles
      const auto us = alone ? timers[i].sustained(alone_ms) : timers[i].replay();
      if (!us.ok()) {
        fmt::print(stderr, "{} {}: {}\n", method.name, choices[order[i]].choice, us.error().message);
        std::exit(1);  // a kernel failed: nothing after it can be trusted
      }
      if (round > 0) times[i].push_back(*us);
    }
  }
  for (size_t i = 0; i < timers.size(); ++i) {
    const Candidate& c = choices[order[i]];
    const double us = median_of(times[i]);
    method.tried.emplace_back(c.choice, us);
    if (us < method.tuned_us) {
      method.tuned_us = us;
      method.choice = c.choice;
      method.launch = c.launch;
      if (const auto config = parse_config(c.choice)) method.config = *config;
    }
  }
}

// The methods of one product of one shape, chosen, timed against each other, and printed.
class Cell {
 public:
  Cell(Bench& b, const Shape& shape, const std::vector<Copy>& copies, int64_t m)
      : b_(b),
        shape_(shape),
        copies_(copies),
        m_(m),
        plane_bytes_(static_cast<size_t>(shape.n * shape.k)),
        expect16_(std::max(2.0 * static_cast<double>(m * shape.n * shape.k) / 7e14,
                           2.0 * static_cast<double>(shape.n * shape.k) / 4.4e12) *
                  1e6),
        expect8_(expect16_ / 2),
        seed_(static_cast<unsigned>((shape.n * 31 + shape.k) * 31 + m)) {}

  void run() {
    choose_f16();
    choose_e4m3();
    if (b_.profile) profile();
    time();
    print();
  }

 private:
  const Copy& copy_of(int i) const { return copies_[static_cast<size_t>(i) % copies_.size()]; }
  GraphTimer::Launch nested(const Config& config, Mode mode, bool dependent, Join join) const;
  GraphTimer::Launch with_quant(const Config& config) const;

  void add_dense(const char* name, DType input, bool fast);
  void add_nested(const char* name, Mode mode, bool dependent);
  // Another way to run a choice that is already made.
  void add_variant(const char* name, const Method& of, GraphTimer::Launch launch);
  void add_chosen(const char* name, Mode mode);  // what an engine runs
  void add_untuned();
  void add_with_quant();

  void choose_f16();
  void choose_e4m3();
  void profile();
  void time();
  void print();

  Bench& b_;
  const Shape& shape_;
  const std::vector<Copy>& copies_;
  const int64_t m_;
  const size_t plane_bytes_;
  const double expect16_, expect8_;  // us
  const unsigned seed_;              // of the order of turns: each cell has its own
  std::vector<Method> methods_;
};

void Cell::add_dense(const char* name, DType input, bool fast) {
  if (!b_.wants(name)) return;
  Method method{name, {}, 1e30, {}, {}, 0, {}};
  const auto plans =
      b_.dense.plans({m_, shape_.n, shape_.k, input, DType::kF16, shape_.k, shape_.n, fast}, b_.quick ? 4 : 10);
  if (!plans.ok()) {
    fmt::print(stderr, "{}\n", plans.error().message);
    return;
  }
  std::vector<Candidate> choices;
  for (const DensePlan& plan : *plans) {
    const auto launch = [this, plan, input](int i, CUstream_st* stream) {
      const Copy& copy = copy_of(i);
      DenseCall call;
      const bool fp8 = input == DType::kF8E4M3;
      call.w = fp8 ? copy.dense_e4m3->as<void>() : copy.dense->as<void>();
      call.x = fp8 ? b_.x_e4m3.as<void>() : b_.x.as<void>();
      call.d = b_.d.as<void>();
      call.w_scale = call.x_scale = b_.scales.as<float>();
      call.workspace = b_.dense_workspace.as<void>();
      return b_.dense.run(plan, call, stream);
    };
    choices.push_back({fmt::format("heuristic {}", choices.size()), launch});
  }
  const bool fp8 = input != DType::kF16;
  consider(method, choices, fp8 ? expect8_ : expect16_, copies_.size(), plane_bytes_ * (fp8 ? 1 : 2), seed_,
           b_.alone_ms);
  if (method.launch) methods_.push_back(std::move(method));
}

GraphTimer::Launch Cell::nested(const Config& config, Mode mode, bool dependent, Join join) const {
  return [this, mode, config, dependent, join](int i, CUstream_st* stream) {
    const Copy& copy = copy_of(i);
    GemmCall call;
    call.w = {copy.upper->as<uint8_t>(), copy.lower->as<uint8_t>(), nullptr, shape_.n, shape_.k, join};
    call.mode = mode;
    call.m = m_;
    call.x = is_fp8(mode) ? b_.x_e4m3.as<void>() : b_.x.as<void>();
    call.ldx = shape_.k;
    call.token_scale = is_fp8(mode) ? b_.scales.as<float>() : nullptr;
    call.d = b_.d.as<void>();
    call.ldd = shape_.n;
    call.workspace = {b_.workspace.as<void>(), Workspace::kBytes};
    call.dependent_launch = dependent;
    return b_.gemm.run(call, config, stream);
  };
}

void Cell::add_nested(const char* name, Mode mode, bool dependent) {
  if (!b_.wants(name)) return;
  Method method{name, {}, 1e30, {}, {}, 0, {}};
  const Problem problem{m_, shape_.n, shape_.k, mode, false};
  std::vector<Candidate> choices;
  for (const Config& config : b_.worth_timing(problem)) {
    if (static_cast<int>(choices.size()) >= b_.candidates_for(m_)) break;
    choices.push_back({to_string(config), nested(config, mode, dependent, Join::kBiased)});
  }
  consider(method, choices, is_fp8(mode) ? expect8_ : expect16_, copies_.size(), plane_bytes_ * (is_fp8(mode) ? 1 : 2),
           seed_, b_.alone_ms);
  if (dependent && !b_.random_tokens) b_.table.set(shape_.n, shape_.k, mode, token_bucket(m_), method.config);
  methods_.push_back(std::move(method));
}

void Cell::add_variant(const char* name, const Method& of, GraphTimer::Launch launch) {
  if (!b_.wants(name)) return;
  Method method{name, of.choice, of.tuned_us, std::move(launch), {}, 0, of.config};
  methods_.push_back(std::move(method));
}

void Cell::add_chosen(const char* name, Mode mode) {
  if (!b_.wants(name)) return;
  const Choice choice =
      choose({m_, shape_.n, shape_.k, mode, false}, b_.gemm.device(), b_.built_in, Reduction::kFastest);
  Method made{name, to_string(choice.config), is_fp8(mode) ? expect8_ : expect16_, {}, {}, 0, choice.config};
  made.launch = nested(choice.config, mode, true, Join::kBiased);
  methods_.push_back(std::move(made));
}

void Cell::add_untuned() {
  const Problem problem{m_, shape_.n, shape_.k, Mode::kF16, false};
  for (const bool invariant : {false, true}) {
    const TuningTable* table = !invariant ? nullptr : b_.random_tokens ? b_.built_in : &b_.table;
    const Choice choice =
        choose(problem, b_.gemm.device(), table, invariant ? Reduction::kBatchInvariant : Reduction::kFastest);
    Method made{"", to_string(choice.config), 0, {}, {}, 0, choice.config};
    made.tuned_us = expect16_;
    add_variant(invariant ? "nested_f16_invariant" : "nested_f16_analytic", made,
                nested(choice.config, Mode::kF16, true, Join::kBiased));
  }
}

// As a decode layer runs it: residual add, norm and quantisation in one kernel, then the GEMM.
GraphTimer::Launch Cell::with_quant(const Config& config) const {
  return [this, config](int i, CUstream_st* stream) -> Status {
    GemmInputCall rows;
    rows.source = GemmInputCall::Source::kNorm;
    rows.m = m_;
    rows.k = shape_.k;
    rows.x = b_.zeros.as<void>();
    rows.ldx = shape_.k;
    rows.weight = b_.x.as<uint16_t>() + size_t{64} * 32768;
    rows.residual = b_.residual.as<void>();
    rows.ldr = shape_.k;
    rows.y_e4m3 = b_.quantised.as<uint8_t>();
    rows.ldy_e4m3 = shape_.k;
    rows.scales = b_.row_scales.as<float>();
    NFP_RETURN_IF_ERROR(prepare_gemm_input(rows, stream));
    const Copy& copy = copy_of(i);
    GemmCall call;
    call.w = {copy.upper->as<uint8_t>(), nullptr, nullptr, shape_.n, shape_.k, Join::kBiased};
    call.mode = Mode::kE4M3;
    call.m = m_;
    call.x = b_.quantised.as<void>();
    call.ldx = shape_.k;
    call.token_scale = b_.row_scales.as<float>();
    call.d = b_.d.as<void>();
    call.ldd = shape_.n;
    call.workspace = {b_.workspace.as<void>(), Workspace::kBytes};
    return b_.gemm.run(call, config, stream);
  };
}

void Cell::add_with_quant() {
  if (m_ > 64 || !b_.wants("nested_e4m3_with_quant")) return;
  Method method{"nested_e4m3_with_quant", {}, 1e30, {}, {}, 0, {}};
  std::vector<Candidate> choices;
  for (const Config& config : candidates({m_, shape_.n, shape_.k, Mode::kE4M3, false}, b_.gemm.device())) {
    if (static_cast<int>(choices.size()) >= b_.candidates_for(m_)) break;
    choices.push_back({to_string(config), with_quant(config)});
  }
  consider(method, choices, expect8_ + 3, copies_.size(), plane_bytes_, seed_, b_.alone_ms);
  methods_.push_back(std::move(method));
}

void Cell::choose_f16() {
  add_dense("cublas_f16", DType::kF16, false);
  add_nested("nested_f16", Mode::kF16, true);
  if (b_.wants("nested_f16")) {
    const Method f16 = methods_.back();
    if (exists(f16.config.tile, Mode::kF16, Join::kFree))
      add_variant("nested_f16_free_join", f16, nested(f16.config, Mode::kF16, true, Join::kFree));
    add_variant("nested_f16_no_pdl", f16, nested(f16.config, Mode::kF16, false, Join::kBiased));
  }
  add_chosen("nested_f16_chosen", Mode::kF16);
  add_untuned();
}

void Cell::choose_e4m3() {
  add_dense("cublas_e4m3_fast", DType::kF8E4M3, true);
  add_dense("cublas_e4m3", DType::kF8E4M3, false);
  add_nested("nested_e4m3", Mode::kE4M3, true);
  add_chosen("nested_e4m3_chosen", Mode::kE4M3);
  add_with_quant();
  add_nested("nested_e4m3_promoted", Mode::kE4M3Promoted, true);
  add_chosen("nested_e4m3_promoted_chosen", Mode::kE4M3Promoted);
  if (m_ > 64) return;
  add_nested("nested_w8a16", Mode::kW8A16, true);
  add_chosen("nested_w8a16_chosen", Mode::kW8A16);
}

// For a profiler that starts at cudaProfilerStart.
void Cell::profile() {
  cudaProfilerStart();
  for (const Method& method : methods_) {
    if (!method.launch(0, nullptr).ok()) std::exit(1);
  }
  cudaDeviceSynchronize();
  cudaProfilerStop();
}

void Cell::time() {
  std::vector<GraphTimer> timers;
  for (Method& method : methods_) {
    auto timer = GraphTimer::create(launches_for(method.tuned_us, copies_.size(), plane_bytes_), method.launch);
    if (!timer.ok()) {
      fmt::print(stderr, "{}: {}\n", method.name, timer.error().message);
      std::exit(1);
    }
    timers.push_back(std::move(*timer));
  }
  const int rounds = b_.quick ? 12 : 23;
  std::vector<size_t> order(methods_.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::minstd_rand random(seed_);
  for (int round = 0; round < rounds; ++round) {
    std::shuffle(order.begin(), order.end(), random);
    for (const size_t i : order) {
      const auto us = timers[i].replay();
      if (us.ok() && round > 0) methods_[i].turns.push_back(*us);
    }
  }
  if (m_ >= 128 && !b_.quick && !b_.random_tokens) {
    for (size_t i = 0; i < methods_.size(); ++i) {
      if (std::find(kSustained.begin(), kSustained.end(), methods_[i].name) == kSustained.end()) continue;
      methods_[i].reading = b_.monitor.during([&] {
        const auto us = timers[i].sustained(100);
        if (us.ok()) methods_[i].sustained_us = *us;
      });
    }
  }
}

void Cell::print() {
  std::string line = fmt::format("{{\"n\": {}, \"k\": {}, \"m\": {}", shape_.n, shape_.k, m_);
  if (b_.random_tokens) line += ", \"random\": true";
  for (const Method& method : methods_) {
    line += fmt::format(", \"{}\": {{\"us\": {:.3f}, \"tuned_us\": {:.3f}, \"choice\": \"{}\"", method.name,
                        median_of(method.turns), method.tuned_us, method.choice);
    if (b_.log_turns) line += fmt::format(", \"turns\": [{:.2f}]", fmt::join(method.turns, ", "));
    if (method.sustained_us > 0) {
      line +=
          fmt::format(", \"sustained_us\": {:.3f}, \"sm_mhz\": {}, \"watts\": {:.0f}, \"power_limited\": {}",
                      method.sustained_us, method.reading.sm_mhz, method.reading.watts, method.reading.power_limited);
    }
    line += "}";
  }
  if (b_.log_tried) {
    for (const Method& method : methods_) {
      if (method.tried.empty()) continue;
      std::string tried;
      for (const auto& [choice, us] : method.tried)
        tried += fmt::format("{}\"{}\": {:.2f}", tried.empty() ? "" : ", ", choice, us);
      line += fmt::format(", \"{} tried\": {{{}}}", method.name, tried);
    }
  }
  fmt::print(b_.out, "{}}}\n", line);
  std::fflush(b_.out);
}

// Root-mean-square errors against float64, relative to the outputs'.
void errors(Bench& b, const Shape& shape, int64_t m) {
  const PlaneShape planes{shape.n, shape.k};
  Copy copy{std::make_unique<Buffer>(planes.bytes()), std::make_unique<Buffer>(planes.bytes()),
            std::make_unique<Buffer>(planes.bytes() * 2), std::make_unique<Buffer>(planes.bytes())};
  fill_weights(planes, 5, copy.upper->as<uint8_t>(), copy.lower->as<uint8_t>(), copy.dense->as<uint16_t>(),
               copy.dense_e4m3->as<uint8_t>(), nullptr);
  Buffer sums(2 * sizeof(double)), one(64 * sizeof(float));
  fill_f32(64, 0x1p-8f, one.as<float>(), nullptr);
  const auto report = [&](const std::string& name, bool fp8, bool permuted) {
    cudaMemset(sums.as<void>(), 0, 2 * sizeof(double));
    if (fp8) {
      compare_e4m3(m, planes, b.x_e4m3.as<uint8_t>(), permuted, copy.dense_e4m3->as<uint8_t>(), 0.01 * 0x1p-8,
                   b.d.as<uint16_t>(), sums.as<double>(), nullptr);
    } else {
      compare_f16(m, planes, b.x.as<uint16_t>(), copy.dense->as<uint16_t>(), b.d.as<uint16_t>(), sums.as<double>(),
                  nullptr);
    }
    double host[2] = {0, 1};
    if (cudaMemcpy(host, sums.as<void>(), sizeof(host), cudaMemcpyDeviceToHost) != cudaSuccess) return;
    fmt::print(b.out, "{{\"error\": \"{}\", \"n\": {}, \"k\": {}, \"m\": {}, \"relative_rms\": {:.4e}}}\n", name,
               shape.n, shape.k, m, std::sqrt(host[0] / host[1]));
  };
  struct Dense {
    const char* name;
    DType input;
    bool fast;
  };
  for (const Dense& d : {Dense{"cublas_f16", DType::kF16, false}, Dense{"cublas_e4m3_fast", DType::kF8E4M3, true},
                         Dense{"cublas_e4m3", DType::kF8E4M3, false}}) {
    const bool fp8 = d.input == DType::kF8E4M3;
    const auto plans = b.dense.plans({m, shape.n, shape.k, d.input, DType::kF16, shape.k, shape.n, d.fast}, 1);
    if (!plans.ok()) continue;
    DenseCall call;
    call.w = fp8 ? copy.dense_e4m3->as<void>() : copy.dense->as<void>();
    call.x = fp8 ? b.x_e4m3.as<void>() : b.x.as<void>();
    call.d = b.d.as<void>();
    call.w_scale = one.as<float>();
    call.x_scale = b.scales.as<float>();
    call.workspace = b.dense_workspace.as<void>();
    if (b.dense.run(plans->front(), call, nullptr).ok()) report(d.name, fp8, false);
  }
  struct Nested {
    const char* name;
    Mode mode;
    Config config;
  };
  const Tile one_block{64, 1, 1, 1}, two_blocks{64, 2, 1, 1};
  for (const Nested& v : {Nested{"nested_f16", Mode::kF16, {one_block, 1, false}},
                          Nested{"nested_f16 split4", Mode::kF16, {one_block, 4, false}},
                          Nested{"nested_e4m3", Mode::kE4M3, {one_block, 1, false}},
                          Nested{"nested_e4m3 split4", Mode::kE4M3, {one_block, 4, false}},
                          Nested{"nested_e4m3 promoted every 512", Mode::kE4M3Promoted, {one_block, 1, false}},
                          Nested{"nested_e4m3 promoted every 128", Mode::kE4M3Promoted, {two_blocks, 1, false}}}) {
    GemmCall call;
    call.w = {copy.upper->as<uint8_t>(), copy.lower->as<uint8_t>(), nullptr, shape.n, shape.k, Join::kBiased};
    call.mode = v.mode;
    call.m = m;
    call.x = is_fp8(v.mode) ? b.x_e4m3.as<void>() : b.x.as<void>();
    call.ldx = shape.k;
    call.token_scale = is_fp8(v.mode) ? b.scales.as<float>() : nullptr;
    call.d = b.d.as<void>();
    call.ldd = shape.n;
    call.workspace = {b.workspace.as<void>(), Workspace::kBytes};
    if (b.gemm.run(call, v.config, nullptr).ok()) report(v.name, is_fp8(v.mode), true);
  }
  std::fflush(b.out);
}

std::vector<int64_t> numbers(const std::string& text, char separator) {
  std::vector<int64_t> out;
  std::string item;
  for (const char c : text + separator) {
    if (c == separator) {
      if (!item.empty()) out.push_back(std::atoll(item.c_str()));
      item.clear();
    } else {
      item += c;
    }
  }
  return out;
}

// Log-uniform.
std::vector<int64_t> random_tokens(uint64_t seed, int64_t count, int64_t least, int64_t most) {
  std::vector<int64_t> out;
  for (int64_t i = 0; i < count; ++i) out.push_back(log_uniform(&seed, least, most));
  return out;
}

// Of the sizes that models have: 1024 to 40960 features of 1024 to 20480, in multiples of 128.
std::vector<Shape> random_shapes(uint64_t seed, int64_t count) {
  std::vector<Shape> out;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t n = log_uniform(&seed, 8, 320), k = log_uniform(&seed, 8, 160);
    out.push_back({n * 128, k * 128});
  }
  return out;
}

// "n,k;n,k;..."
std::vector<Shape> shapes_of(const std::string& flag) {
  std::vector<Shape> shapes;
  std::string item;
  for (const char c : flag + ";") {
    if (c != ';') {
      item += c;
      continue;
    }
    const auto pair = numbers(item, ',');
    if (pair.size() == 2) shapes.push_back({pair[0], pair[1]});
    item.clear();
  }
  return shapes;
}

// The first line: where and how this ran.
void print_machine(Bench* b, int argc, char** argv) {
  int id = 0, driver = 0, runtime = 0;
  cudaDeviceProp properties{};
  if (cudaGetDevice(&id) == cudaSuccess && cudaGetDeviceProperties(&properties, id) == cudaSuccess &&
      cudaDriverGetVersion(&driver) == cudaSuccess && cudaRuntimeGetVersion(&runtime) == cudaSuccess) {
    if (b->built_in == nullptr) b->built_in = built_in_table(properties.name, properties.multiProcessorCount);
    std::string command;
    for (int i = 1; i < argc; ++i) command += std::string(" ") + argv[i];
    const auto now = std::chrono::floor<std::chrono::days>(std::chrono::system_clock::now());
    const std::chrono::year_month_day day(now);
    fmt::print(
        b->out,
        "{{\"machine\": \"{}\", \"driver_cuda\": {}, \"cuda\": {}, \"date\": \"{:04}-{:02}-{:02}\", \"command\": "
        "\"gemm_grid{}\", \"clusters\": [[{}], [{}]]}}\n",
        properties.name, driver, runtime, static_cast<int>(day.year()), static_cast<unsigned>(day.month()),
        static_cast<unsigned>(day.day()), command, fmt::join(b->gemm.device().clusters[0], ", "),
        fmt::join(b->gemm.device().clusters[1], ", "));
  }
}

std::vector<Copy> make_copies(const PlaneShape& planes) {
  const size_t count = std::max<size_t>(2, kRotation / planes.bytes() + 1);  // FP8 alone exceeds the L2 as well
  std::vector<Copy> copies;
  for (size_t i = 0; i < count; ++i) {
    Copy copy{std::make_unique<Buffer>(planes.bytes()), std::make_unique<Buffer>(planes.bytes()),
              std::make_unique<Buffer>(planes.bytes() * 2), std::make_unique<Buffer>(planes.bytes())};
    fill_weights(planes, i + 10, copy.upper->as<uint8_t>(), copy.lower->as<uint8_t>(), copy.dense->as<uint16_t>(),
                 copy.dense_e4m3->as<uint8_t>(), nullptr);
    copies.push_back(std::move(copy));
  }
  return copies;
}

void write_table(Bench* b, const std::string& path) {
  int id = 0;
  cudaDeviceProp properties{};
  if (cudaGetDevice(&id) == cudaSuccess && cudaGetDeviceProperties(&properties, id) == cudaSuccess)
    b->table.device = properties.name;
  if (b->built_in != nullptr) b->table.copy_models(*b->built_in);
  if (const Status written = write_file(path, b->table.dump()); !written.ok())
    fmt::print(stderr, "{}\n", written.error().message);
}

int run(int argc, char** argv) {
  CLI::App app("Nested products against cuBLASLt, as JSON lines");
  std::string shapes_flag, random_shapes_flag, tokens_flag, random_flag, out_path;
  double seconds = 0, alone_ms = 0;
  bool quick = false, log_tried = false, log_turns = false, profile = false;
  int tried = 24;
  app.add_option("--shapes", shapes_flag,
                 "n,k;n,k;... (default: 14 of Llama-3.1-8B, Mistral-Nemo, Phi-4 and Mistral-Small)");
  app.add_option("--random-shapes", random_shapes_flag, "SEED,COUNT: so many random shapes in place of those");
  app.add_option("--tokens", tokens_flag, "m,m,... (default: 1 to 4096)");
  app.add_option("--random-m", random_flag,
                 "SEED,COUNT[,LEAST[,MOST]]: so many random numbers of tokens a shape, 1 (or LEAST) to 8192 (or MOST)");
  app.add_option("--seconds", seconds, "for all shapes: each has its share, and goes on to the next when it is spent");
  app.add_option("--candidates", tried, "of our kernels, per cell");
  app.add_option("--alone", alone_ms,
                 "milliseconds that each choice runs by itself, where power is the limit (default: in turns)");
  app.add_flag("--log-turns", log_turns, "every turn's time, in order");
  app.add_flag("--quick", quick, "fewer repeats, no sustained runs");
  std::string table_path, choices_path;
  app.add_option("--choices", choices_path, "choices to run by, in place of the built-in ones of this device")
      ->check(CLI::ExistingFile);
  app.add_option("--table", table_path, "file for the tuned choices");
  std::vector<std::string> methods;
  app.add_option("--methods", methods, "name,name (default: all)")->delimiter(',');
  app.add_flag("--log-tried", log_tried, "every choice's time as well");
  app.add_flag("--profile", profile, "run every method's choice once between cudaProfilerStart and cudaProfilerStop");
  app.add_option("--out", out_path, "file for the lines (default: standard output)");
  CLI11_PARSE(app, argc, argv);

  auto gemm = Gemm::create();
  auto dense = DenseGemm::create();
  if (!gemm.ok() || !dense.ok()) {
    fmt::print(stderr, "gemm_grid: {}\n", gemm.ok() ? dense.error().message : gemm.error().message);
    return 1;
  }
  Bench b{std::move(*gemm), std::move(*dense)};
  b.quick = quick;
  b.log_turns = log_turns;
  b.alone_ms = alone_ms;
  b.candidates_tried = tried;
  b.log_tried = log_tried;
  b.profile = profile;
  b.wanted = std::move(methods);
  if (!out_path.empty() && (b.out = std::fopen(out_path.c_str(), "w")) == nullptr) {
    fmt::print(stderr, "gemm_grid: cannot write {}\n", out_path);
    return 1;
  }
  if (!choices_path.empty()) {
    auto given = TuningTable::load(choices_path);
    if (!given.ok()) {
      fmt::print(stderr, "gemm_grid: {}\n", given.error().message);
      return 1;
    }
    b.given = std::move(*given);
    b.built_in = &b.given;
  }
  std::vector<Shape> shapes = kShapes;
  if (!shapes_flag.empty()) {
    shapes = shapes_of(shapes_flag);
  }
  if (!random_shapes_flag.empty()) {
    const std::vector<int64_t> seed_and_count = numbers(random_shapes_flag, ',');
    if (seed_and_count.size() != 2) {
      fmt::print(stderr, "gemm_grid: --random-shapes '{}' is not SEED,COUNT\n", random_shapes_flag);
      return 1;
    }
    shapes = random_shapes(static_cast<uint64_t>(seed_and_count[0]), seed_and_count[1]);
  }
  std::vector<int64_t> tokens(kTokenBuckets.begin(), kTokenBuckets.end());
  if (!tokens_flag.empty()) tokens = numbers(tokens_flag, ',');
  const std::vector<int64_t> random = numbers(random_flag, ',');
  if (!random_flag.empty() && (random.size() < 2 || random.size() > 4)) {
    fmt::print(stderr, "gemm_grid: --random-m '{}' is not SEED,COUNT[,LEAST[,MOST]]\n", random_flag);
    return 1;
  }
  const int64_t least = random.size() > 2 ? random[2] : 1, most = random.size() > 3 ? random[3] : kMostTokens;
  if (least < 1 || most < least || most > kMostTokens) {
    fmt::print(stderr, "gemm_grid: --random-m '{}' is not within 1 to {}\n", random_flag, kMostTokens);
    return 1;
  }
  b.random_tokens = !random.empty();

  fill_f16(kMostTokens * 32768, 1, b.x.as<uint16_t>(), nullptr);
  fill_f16(int64_t{64} * 32768, 3, b.residual.as<uint16_t>(), nullptr);
  fill_e4m3(kMostTokens * 32768, 2, b.x_e4m3.as<uint8_t>(), nullptr);
  fill_f32(kMostTokens, 0.01f, b.scales.as<float>(), nullptr);
  print_machine(&b, argc, argv);
  if (b.wanted.empty() && !b.random_tokens) {
    for (const Shape& shape : {Shape{4096, 4096}, Shape{5120, 32768}}) errors(b, shape, 64);
  }
  using Clock = std::chrono::steady_clock;
  const auto begin = Clock::now();
  for (size_t index = 0; index < shapes.size(); ++index) {
    const Shape& shape = shapes[index];
    const std::vector<Copy> copies = make_copies({shape.n, shape.k});
    cudaDeviceSynchronize();
    if (b.random_tokens)
      tokens = random_tokens(static_cast<uint64_t>(random[0]) * 1000 + index, random[1], least, most);
    const double end = seconds * static_cast<double>(index + 1) / static_cast<double>(shapes.size());
    for (const int64_t m : tokens) {
      if (seconds > 0 && std::chrono::duration<double>(Clock::now() - begin).count() > end) break;
      Cell(b, shape, copies, m).run();
    }
  }
  if (!table_path.empty()) write_table(&b, table_path);
  if (b.out != stdout) std::fclose(b.out);
  return 0;
}

}  // namespace
}  // namespace nfp::cuda

int main(int argc, char** argv) { return nfp::cuda::run(argc, argv); }
