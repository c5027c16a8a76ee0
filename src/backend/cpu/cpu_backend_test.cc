#include "backend/cpu/cpu_backend.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>

#include "backend/cpu/testing/reference.h"

namespace nfp {
namespace {

using cpu::Random;
using cpu::TestMatrix;

std::unique_ptr<Backend> make(int threads = 2, const std::string& kernels = "") {
  auto backend = make_cpu_backend({.threads = threads, .kernels = kernels});
  EXPECT_TRUE(backend.ok());
  return std::move(backend).value();
}

Buffer upload(Backend& backend, const std::vector<float>& values) {
  Buffer buffer = backend.allocate(values.size() * sizeof(float)).value();
  EXPECT_TRUE(backend.upload(buffer.data(), values.data(), buffer.bytes()).ok());
  return buffer;
}

std::vector<float> download(Backend& backend, const Buffer& buffer) {
  std::vector<float> values(buffer.bytes() / sizeof(float));
  EXPECT_TRUE(backend.download(values.data(), buffer.data(), buffer.bytes()).ok());
  return values;
}

TEST(CpuBackend, RefusesUnknownOrMissingKernels) {
  auto unknown = make_cpu_backend({.kernels = "neon"});
  ASSERT_FALSE(unknown.ok());
  EXPECT_EQ(unknown.error().code, ErrorCode::kUsage);
  const auto missing = choose_instruction_set("avx2", CpuFeatures{});
  ASSERT_FALSE(missing.ok());
  EXPECT_EQ(missing.error().code, ErrorCode::kUnsupported);
  EXPECT_EQ(choose_instruction_set("", CpuFeatures{}).value(), InstructionSet::kScalar);
  EXPECT_FALSE(make_cpu_backend({.threads = -1}).ok());
}

TEST(CpuBackend, TheEnvironmentOverridesTheOption) {
  ASSERT_EQ(setenv("NESTEDFP_CPU", "scalar", 1), 0);
  const auto backend = make_cpu_backend({.threads = 1});
  unsetenv("NESTEDFP_CPU");
  ASSERT_TRUE(backend.ok());
  EXPECT_EQ((*backend)->info().kernels, "scalar");
}

TEST(CpuBackend, FreshMemoryIsZeroAndAllocationFailureIsAnError) {
  auto backend = make();
  for (const size_t bytes : {size_t{0}, size_t{12}, size_t{5} << 20}) {
    const Buffer buffer = backend->allocate(bytes).value();
    ASSERT_NE(buffer.data(), nullptr);
    std::vector<char> back(bytes, 1);
    ASSERT_TRUE(backend->download(back.data(), buffer.data(), bytes).ok());
    EXPECT_EQ(std::count(back.begin(), back.end(), 0), static_cast<ptrdiff_t>(bytes));
  }
  for (const size_t bytes : {size_t{1} << 60, ~size_t{0}}) {
    const auto too_much = backend->allocate(bytes);
    ASSERT_FALSE(too_much.ok());
    EXPECT_EQ(too_much.error().code, ErrorCode::kResource);
  }
}

// A small step: embed, norm, gated linear, down, residual and norm, gated linear, gather, head, greedy sample.
struct Step {
  explicit Step(Backend& b, int32_t rows) : backend(b), random(31) {
    const auto linear = [&](int64_t n, int64_t k) {
      matrices.push_back(std::make_unique<TestMatrix>(Storage::kNested, n, k, random));
      LinearSpec spec;
      spec.parts = {matrices.back().get()};
      return backend.make_linear(spec).value();
    };
    head = linear(50, 24);
    down = linear(24, 33);
    matrices.push_back(std::make_unique<TestMatrix>(Storage::kNested, 33, 24, random));
    matrices.push_back(std::make_unique<TestMatrix>(Storage::kDenseF16, 33, 24, random));
    LinearSpec spec;
    spec.parts = {matrices[2].get(), matrices[3].get()};
    spec.order = RowOrder::kInterleave;
    gate_up = backend.make_linear(spec).value();
    norm = upload(backend, random.normals(24));
    const auto make_rows = [&](size_t width) {
      return upload(backend, std::vector<float>(static_cast<size_t>(rows) * width));
    };
    x = make_rows(24);
    normed = make_rows(24);
    wide = make_rows(33);
    product = make_rows(24);
    gathered = make_rows(24);
    logits = make_rows(50);
    ids = make_rows(1);
    order = make_rows(1);
    sampled = make_rows(sizeof(SampledRow) / sizeof(float));
    const std::vector<SamplingRow> greedy(static_cast<size_t>(rows));
    sampling = backend.allocate(greedy.size() * sizeof(SamplingRow)).value();
    EXPECT_TRUE(backend.upload(sampling.data(), greedy.data(), sampling.bytes()).ok());
    set_ids(rows, 0);
  }
  void set_ids(int32_t rows, int shift) {
    std::vector<int32_t> values, places;
    for (int32_t i = 0; i < rows; ++i) values.push_back((i * 7 + shift) % 50), places.push_back(rows - 1 - i);
    ASSERT_TRUE(backend.upload(ids.data(), values.data(), values.size() * 4).ok());
    ASSERT_TRUE(backend.upload(order.data(), places.data(), places.size() * 4).ok());
  }
  void enqueue(int32_t rows, Precision precision) {
    BatchView batch;
    batch.tokens = rows;
    batch.token_ids = ids.as<int32_t>();
    backend.embed({head.get(), batch, 1.5f, x.data()});
    const auto normed_product = [&](const Buffer& in, const Buffer* residual) {
      backend.rms_norm({.x = in.data(),
                        .residual = residual != nullptr ? residual->data() : nullptr,
                        .weight = norm.as<float>(),
                        .rows = rows,
                        .hidden = 24,
                        .consumer = precision,
                        .out = normed.data()});
      backend.linear({.weight = gate_up.get(),
                      .x = normed.data(),
                      .rows = rows,
                      .precision = precision,
                      .epilogue = Epilogue::kGatedActivation,
                      .y = wide.data()});
    };
    normed_product(x, nullptr);
    backend.linear({.weight = down.get(), .x = wide.data(), .rows = rows, .precision = precision, .y = product.data()});
    normed_product(product, &x);
    backend.gather_rows({x.data(), order.as<int32_t>(), rows, 24, gathered.data()});
    backend.linear({.weight = head.get(),
                    .x = gathered.data(),
                    .rows = rows,
                    .precision = precision,
                    .y = logits.data(),
                    .y_is_f32 = true});
    SampleArgs sample;
    sample.logits = logits.as<float>();
    sample.rows = rows;
    sample.vocab = 50;
    sample.row = sampling.as<SamplingRow>();
    sample.out = sampled.as<SampledRow>();
    backend.sample(sample);
  }
  std::vector<float> results() { return download(backend, logits); }

  Backend& backend;
  Random random;
  std::vector<std::unique_ptr<TestMatrix>> matrices;
  std::unique_ptr<LinearWeight> head, down, gate_up;
  Buffer norm, x, normed, wide, gathered, product, logits, ids, order, sampled, sampling;
};

TEST(CpuBackend, AStepGivesTheSameOnAnyNumberOfThreads) {
  for (const Precision precision : {Precision::kFp16, Precision::kFp8, Precision::kFp8W8A8}) {
    auto one = make(1);
    Step first(*one, 9);
    first.enqueue(9, precision);
    const std::vector<float> want = first.results();
    EXPECT_GT(std::count_if(want.begin(), want.end(), [](float v) { return v != 0.0f; }), 400);
    for (const int threads : {2, 3, 8}) {
      auto many = make(threads);
      Step step(*many, 9);
      step.enqueue(9, precision);
      EXPECT_EQ(step.results(), want) << threads;
    }
  }
}

// Up to four rows, threads prepare a product's input each for itself.
TEST(CpuBackend, FewRowsGiveWhatManyGive) {
  for (const char* kernels : {"scalar", ""}) {
    for (const Precision precision : {Precision::kFp16, Precision::kFp8, Precision::kFp8W8A8}) {
      auto backend = make(3, kernels);
      Step many(*backend, 9), few(*backend, 3);
      many.enqueue(9, precision);
      few.enqueue(3, precision);
      const std::vector<float> want = many.results(), got = few.results();  // in reverse order of the tokens
      EXPECT_TRUE(std::equal(got.begin(), got.end(), want.end() - int64_t{3} * 50)) << name_of(precision);
      const std::vector<float> all_normed = download(*backend, many.normed), normed = download(*backend, few.normed);
      EXPECT_TRUE(std::equal(normed.begin(), normed.end(), all_normed.begin())) << name_of(precision);
      const std::vector<float> all_sums = download(*backend, many.x), sums = download(*backend, few.x);
      EXPECT_TRUE(std::equal(sums.begin(), sums.end(), all_sums.begin())) << name_of(precision);
    }
  }
}

// AMX computes FP16 steps on tiles: linear_test.cc has what that is defined to be, and how near it is.
TEST(CpuBackend, ExactStepIsTheSameOnEveryInstructionSetThatComputesItInFp32) {
  auto scalar = make(2, "scalar");
  Step reference(*scalar, 9);
  reference.enqueue(9, Precision::kFp16);
  const std::vector<float> want = reference.results();
  for (const char* name : {"avx2", "avx512", "avx512gfni", "avx512bf16", "avx512fp16"}) {
    const auto backend = make_cpu_backend({.threads = 2, .kernels = name});
    if (!backend.ok()) {
      EXPECT_EQ(backend.error().code, ErrorCode::kUnsupported);
      continue;
    }
    Step step(**backend, 9);
    step.enqueue(9, Precision::kFp16);
    EXPECT_EQ(step.results(), want) << name;
  }
}

TEST(CpuBackend, ReplayReadsDeviceMemoryAsItIsThen) {
  auto backend = make();
  Step step(*backend, 5);
  step.enqueue(5, Precision::kFp8);
  const std::vector<float> direct0 = step.results();
  step.set_ids(5, 3);
  step.enqueue(5, Precision::kFp8);
  const std::vector<float> direct3 = step.results();
  ASSERT_NE(direct0, direct3);

  ASSERT_TRUE(backend->begin_capture().ok());
  step.enqueue(5, Precision::kFp8);
  auto graph = backend->end_capture();
  ASSERT_TRUE(graph.ok());
  EXPECT_EQ(step.results(), direct3);  // recorded, not run
  step.set_ids(5, 0);
  ASSERT_TRUE(backend->replay(**graph).ok());
  EXPECT_EQ(step.results(), direct0);
  step.set_ids(5, 3);
  ASSERT_TRUE(backend->replay(**graph).ok());
  EXPECT_EQ(step.results(), direct3);
}

TEST(CpuBackend, ProfileCountsCallsBytesAndOperations) {
  auto backend = make();
  Step step(*backend, 4);
  backend->set_profiling(true);
  step.enqueue(4, Precision::kFp8);
  ASSERT_TRUE(backend->synchronize().ok());
  bool found = false;
  for (const StageTime& time : backend->profile()) {
    EXPECT_GT(time.cost.activation_bytes, 0u) << time.stage;
    if (time.stage != stage::kLinear) continue;
    found = true;
    EXPECT_EQ(time.precision, Precision::kFp8);
    EXPECT_EQ(time.calls, 4u);
    // With two norms, whose results stay with the product: of 24 features in, and added to as many.
    constexpr uint64_t kRows = 4, kNorms = kRows * 24 * (4 + 5);
    EXPECT_EQ(time.cost.flops, 2 * kRows * (2 * 66 * 24 + 24 * 33 + 50 * 24) + kNorms);
    EXPECT_EQ(time.cost.weight_bytes, step.head->bytes_read(Precision::kFp8) + step.down->bytes_read(Precision::kFp8) +
                                          2 * step.gate_up->bytes_read(Precision::kFp8) + 2 * (24 * sizeof(float)));
    EXPECT_EQ(time.cost.activation_bytes, kRows * sizeof(float) * ((24 + 33) + (33 + 24) + (3 * 24 + 33) + (24 + 50)));
    EXPECT_GT(time.seconds, 0.0);
  }
  EXPECT_TRUE(found);
  backend->set_profiling(true);
  EXPECT_TRUE(backend->profile().empty());
}

TEST(CpuBackend, RmsNormAgreesWithItsDefinition) {
  Random random(32);
  for (const int hidden : {1, 15, 576, 1000}) {
    auto backend = make();
    const std::vector<float> x = random.normals(static_cast<size_t>(hidden) * 3),
                             w = random.normals(static_cast<size_t>(hidden));
    const Buffer in = upload(*backend, x), weight = upload(*backend, w), out = upload(*backend, x);
    backend->rms_norm({.x = in.data(), .weight = weight.as<float>(), .rows = 3, .hidden = hidden, .out = out.data()});
    const std::vector<float> got = download(*backend, out);
    for (size_t row = 0; row < 3; ++row) {
      double sum = 0;
      for (int i = 0; i < hidden; ++i) {
        const double v = x[row * static_cast<size_t>(hidden) + static_cast<size_t>(i)];
        sum += v * v;
      }
      for (int i = 0; i < hidden; ++i) {
        const size_t at = row * static_cast<size_t>(hidden) + static_cast<size_t>(i);
        const double want = static_cast<double>(x[at]) / std::sqrt(sum / hidden + 1e-5) *
                            static_cast<double>(w[static_cast<size_t>(i)]);
        EXPECT_NEAR(got[at], want, 1e-6 * std::max(1.0, std::fabs(want)));
      }
    }
  }
}

TEST(CpuBackend, TokensComeFromTheHostOrFromTheStepBefore) {
  auto backend = make();
  Step step(*backend, 3);
  const std::vector<SampledRow> before = {{.token = 11}, {.token = 12}};
  const std::vector<int32_t> source = {1, -1, 0}, host = {0, 7, 0}, same = {12, 7, 11};
  BatchView batch;
  batch.tokens = 3;
  batch.token_ids = host.data();
  batch.token_source = source.data();
  batch.previous = before.data();
  backend->embed({step.head.get(), batch, 1.0f, step.x.data()});
  const std::vector<float> got = download(*backend, step.x);
  batch = {};
  batch.tokens = 3;
  batch.token_ids = same.data();
  backend->embed({step.head.get(), batch, 1.0f, step.x.data()});
  EXPECT_EQ(got, download(*backend, step.x));
}

// An event waits for what came before it and for nothing else; copies run in their place.
TEST(CpuBackend, EventsAndCopiesKeepTheOrder) {
  auto backend = make();
  const Buffer from = backend->allocate_host(64).value(), device = backend->allocate(64).value(),
               back = backend->allocate_host(64).value();
  auto first = backend->make_event().value(), second = backend->make_event().value();
  for (int32_t i = 0; i < 16; ++i) from.as<int32_t>()[i] = i;
  backend->copy({.dst = device.data(), .src = from.data(), .bytes = 64});
  backend->copy({.dst = back.data(), .src = device.data(), .bytes = 8, .rows = 4, .dst_pitch = 16, .src_pitch = 8});
  backend->record(*first);
  backend->copy({.dst = back.data(), .src = device.as<int32_t>() + 15, .bytes = 4});
  backend->record(*second);
  ASSERT_TRUE(backend->wait(*first).ok());
  EXPECT_EQ(std::vector<int32_t>(back.as<int32_t>(), back.as<int32_t>() + 14),
            (std::vector<int32_t>{0, 1, 0, 0, 2, 3, 0, 0, 4, 5, 0, 0, 6, 7}));
  ASSERT_TRUE(backend->wait(*second).ok());
  EXPECT_EQ(back.as<int32_t>()[0], 15);
  ASSERT_TRUE(backend->wait(*first).ok());
}

TEST(CpuBackend, SamplingAppendsToTheHistory) {
  auto backend = make();
  auto history = backend->make_token_history(2, 4).value();
  ASSERT_TRUE(backend->reset_history(*history, 1, {}, {}).ok());
  const Buffer logits = upload(*backend, {3.0f, 2.9f, 2.8f, 0.0f});
  const Buffer out = backend->allocate(sizeof(SampledRow)).value();
  SamplingRow row;
  row.presence_penalty = 1.0f;
  row.history_slot = 1;
  std::vector<int32_t> chosen;
  for (int i = 0; i < 3; ++i) {
    SampleArgs args;
    args.logits = logits.as<float>();
    args.rows = 1;
    args.vocab = 4;
    args.needs = SamplingNeeds::kPenalties;
    args.row = &row;
    args.history = history.get();
    args.out = out.as<SampledRow>();
    backend->sample(args);
    SampledRow sampled;
    ASSERT_TRUE(backend->download(&sampled, out.data(), sizeof(sampled)).ok());
    chosen.push_back(sampled.token);
  }
  EXPECT_EQ(chosen, (std::vector<int32_t>{0, 1, 2}));
}

// ---- experts ----

struct Routed {
  std::vector<int32_t> start, row, place;
  std::vector<float> weight, shared;
};

struct RouteBuffers {
  RouteBuffers(Backend& backend, int32_t experts, int32_t top, int32_t rows) {
    const auto make = [&](int64_t count) { return backend.allocate(static_cast<size_t>(count) * 4).value(); };
    start = make(experts + 1);
    row = make(int64_t{rows} * top);
    place = make(int64_t{rows} * top);
    weight = make(int64_t{rows} * top);
    logits = make(int64_t{rows} * experts);
    shared = make(rows);
    routes = {experts, top, start.as<int32_t>(), row.as<int32_t>(), place.as<int32_t>(), weight.as<float>()};
  }
  Buffer start, row, place, weight, logits, shared;
  ExpertRoutes routes;
};

TEST(CpuBackend, DotsAreTheSameInAnyCompany) {
  Random random(31);
  constexpr int64_t kRows = 5, kColumns = 7;
  for (const int64_t n : {1, 15, 16, 17, 63, 64, 65, 100, 130, 1000}) {
    const std::vector<float> x = random.normals(static_cast<size_t>(kRows * n));
    const std::vector<float> w = random.normals(static_cast<size_t>(kColumns * n));
    std::vector<float> want(kRows * kColumns);
    for (int64_t r = 0; r < kRows; ++r) {
      for (int64_t c = 0; c < kColumns; ++c) {
        const auto at = static_cast<size_t>(r * kColumns + c);
        cpu::scalar_kernels().dots(x.data() + r * n, 1, w.data() + c * n, 1, n, &want[at], 1);
        double sum = 0, magnitude = 0;
        for (int64_t i = 0; i < n; ++i) {
          const double product = double{x[static_cast<size_t>(r * n + i)]} * double{w[static_cast<size_t>(c * n + i)]};
          sum += product;
          magnitude += std::fabs(product);
        }
        EXPECT_NEAR(want[at], sum, magnitude * static_cast<double>(n + 1) * 0x1p-24) << n;
      }
    }
    for (const auto* table : cpu::runnable_tables()) {
      for (int64_t rows = 1; rows <= kRows; ++rows) {
        for (int64_t columns = 1; columns <= kColumns; ++columns) {
          std::vector<float> got(static_cast<size_t>(rows * kColumns), -1.0f);
          table->dots(x.data(), rows, w.data(), columns, n, got.data(), kColumns);
          for (int64_t i = 0; i < rows * kColumns; ++i) {
            const auto at = static_cast<size_t>(i);
            ASSERT_EQ(got[at], i % kColumns < columns ? want[at] : -1.0f)
                << table->name << " " << rows << " " << columns << " " << n << " at " << i;
          }
        }
      }
    }
  }
}

TEST(CpuBackend, RoutesAreTheLikeliestExpertsSortedByExpert) {
  Random random(21);
  for (const auto& [experts, top, rows, hidden] : std::vector<std::array<int32_t, 4>>{
           {1, 1, 1, 1}, {4, 4, 3, 17}, {8, 2, 1, 64}, {8, 2, 37, 70}, {60, 4, 5, 128}, {512, 32, 9, 33}}) {
    const std::vector<float> x = random.normals(static_cast<size_t>(int64_t{rows} * hidden));
    std::vector<float> router = random.normals(static_cast<size_t>(int64_t{experts} * hidden));
    // Two experts that are alike: the lower number is first.
    if (experts > 1) std::copy_n(router.begin(), hidden, router.begin() + int64_t{experts - 1} * hidden);
    const std::vector<float> gate = random.normals(static_cast<size_t>(hidden));
    for (const bool renormalise : {false, true}) {
      std::vector<float> first_weights;
      for (const char* kernels : {"scalar", ""}) {
        for (const int threads : {1, 3}) {
          const auto backend = make(threads, kernels);
          const Buffer dx = upload(*backend, x), drouter = upload(*backend, router), dgate = upload(*backend, gate);
          RouteBuffers b(*backend, experts, top, rows);
          RouteArgs args;
          args.x = dx.data();
          args.router = drouter.as<float>();
          args.shared_gate = dgate.as<float>();
          args.rows = rows;
          args.hidden = hidden;
          args.renormalise = renormalise;
          args.routes = b.routes;
          args.logits = b.logits.as<float>();
          args.shared_weight = b.shared.as<float>();
          backend->route(args);
          ASSERT_TRUE(backend->synchronize().ok());
          const int32_t *start = b.routes.start, *row = b.routes.row, *place = b.routes.place;
          ASSERT_EQ(start[0], 0);
          ASSERT_EQ(start[experts], rows * top);
          for (int32_t r = 0; r < rows; ++r) {
            std::vector<double> scores;
            double sum = 0, gate_sum = 0;
            const auto product = [&, features = hidden](const float* w) {
              double total = 0;
              for (int32_t i = 0; i < features; ++i)
                total += double{x[static_cast<size_t>(int64_t{r} * features + i)]} * w[i];
              return total;
            };
            scores.reserve(static_cast<size_t>(experts));
            for (int32_t e = 0; e < experts; ++e) scores.push_back(product(router.data() + int64_t{e} * hidden));
            gate_sum = product(gate.data());
            EXPECT_NEAR(b.shared.as<float>()[r], 1 / (1 + std::exp(-gate_sum)), 1e-5);
            std::vector<int32_t> order(static_cast<size_t>(experts));
            std::iota(order.begin(), order.end(), 0);
            std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t c) {
              return scores[static_cast<size_t>(a)] > scores[static_cast<size_t>(c)];
            });
            for (int32_t i = 0; i < (renormalise ? top : experts); ++i) {
              sum += std::exp(scores[static_cast<size_t>(order[static_cast<size_t>(i)])] -
                              scores[static_cast<size_t>(order[0])]);
            }
            for (int32_t i = 0; i < top; ++i) {
              const int32_t at = place[r * top + i];
              ASSERT_GE(at, 0);
              ASSERT_LT(at, rows * top);
              EXPECT_EQ(row[at], r);
              const auto expert = static_cast<int32_t>(std::upper_bound(start, start + experts + 1, at) - start) - 1;
              EXPECT_EQ(expert, order[static_cast<size_t>(i)]) << "row " << r << " choice " << i;
              const double want =
                  std::exp(scores[static_cast<size_t>(expert)] - scores[static_cast<size_t>(order[0])]) / sum;
              // FP32 sums of up to 128 products of about 1 are 1e-5 away, and so, relatively, are their powers.
              EXPECT_NEAR(b.routes.weight[r * top + i], want, 1e-4 * want);
            }
          }
          for (int32_t e = 0; e < experts; ++e) {
            EXPECT_TRUE(std::is_sorted(row + start[e], row + start[e + 1], std::less_equal<>()));  // each row once
          }
          const std::vector<float> weights(b.routes.weight, b.routes.weight + int64_t{rows} * top);
          if (first_weights.empty()) first_weights = weights;
          EXPECT_EQ(weights, first_weights) << kernels << ", " << threads << " threads";
        }
      }
    }
  }
}

TEST(CpuBackend, NanScoresStillGiveEachRowItsExperts) {
  const auto backend = make();
  const Buffer x = upload(*backend, std::vector<float>(8, NAN)),
               router = upload(*backend, std::vector<float>(32, 1.0f));
  RouteBuffers b(*backend, 4, 3, 1);
  RouteArgs args;
  args.x = x.data();
  args.router = router.as<float>();
  args.rows = 1;
  args.hidden = 8;
  args.routes = b.routes;
  args.logits = b.logits.as<float>();
  backend->route(args);
  ASSERT_TRUE(backend->synchronize().ok());
  EXPECT_EQ(std::vector<int32_t>(b.routes.start, b.routes.start + 5), (std::vector<int32_t>{0, 1, 2, 3, 3}));
}

// Against linear layers of one expert at a time: the same bits, whatever the other rows are.
TEST(CpuBackend, ExpertsComputeWhatLinearLayersDo) {
  Random random(22);
  constexpr int32_t kExperts = 5, kTop = 3;
  constexpr int64_t kIn = 70, kWide = 43;
  // Two threads have experts to themselves from four of them on, four threads have shares of all five.
  for (const auto& [threads, kernels] : {std::pair{2, "scalar"}, {2, ""}, {4, ""}}) {
    const auto backend = make(threads, kernels);
    std::vector<std::unique_ptr<LinearWeight>> gate_up, down;
    std::vector<const LinearWeight*> gate_up_list, down_list;
    for (int32_t e = 0; e < kExperts; ++e) {
      const auto storage = [&](bool other) { return e == 2 && other ? Storage::kDenseF16 : Storage::kNested; };
      const TestMatrix gate(storage(false), kWide, kIn, random), up(storage(true), kWide, kIn, random);
      const TestMatrix last(storage(true), kIn, kWide, random);
      gate_up.push_back(backend->make_linear({{&gate, &up}, RowOrder::kInterleave, {}}).value());
      down.push_back(backend->make_linear({{&last}, RowOrder::kConcat, {}}).value());
      gate_up_list.push_back(gate_up.back().get());
      down_list.push_back(down.back().get());
    }
    const std::vector<float> router = random.normals(kExperts * kIn);
    const Buffer drouter = upload(*backend, router);
    for (const int32_t rows : {1, 2, 4, 5, 40, 700}) {
      const std::vector<float> x = random.normals(static_cast<size_t>(rows * kIn));
      const std::vector<float> shared = random.normals(static_cast<size_t>(rows * kIn));
      const Buffer dx = upload(*backend, x), dshared = upload(*backend, shared);
      for (const Precision precision : {Precision::kFp16, Precision::kFp8, Precision::kFp8W8A8}) {
        RouteBuffers b(*backend, kExperts, kTop, rows);
        RouteArgs route;
        route.x = dx.data();
        route.router = drouter.as<float>();
        route.rows = rows;
        route.hidden = kIn;
        route.routes = b.routes;
        route.logits = b.logits.as<float>();
        backend->route(route);
        const Buffer wide = backend->allocate(static_cast<size_t>(int64_t{rows} * kTop * kWide) * 4).value();
        const Buffer results = backend->allocate(static_cast<size_t>(int64_t{rows} * kTop * kIn) * 4).value();
        const Buffer out = backend->allocate(static_cast<size_t>(rows * kIn) * 4).value();
        ExpertLinearArgs call;
        call.weights = gate_up_list.data();
        call.routes = b.routes;
        call.x = dx.data();
        call.rows = rows;
        call.precision = precision;
        call.exact[0] = 1u << 3;
        call.epilogue = Epilogue::kGatedActivation;
        call.y = wide.data();
        backend->expert_linear(call);
        call.weights = down_list.data();
        call.x = wide.data();
        call.sorted = true;
        call.epilogue = Epilogue::kStore;
        call.y = results.data();
        backend->expert_linear(call);
        backend->combine_experts({results.data(), b.routes, rows, kIn, dshared.data(), nullptr, out.data()});
        const std::vector<float> got = download(*backend, out), by_assignment = download(*backend, results);
        for (const int32_t r : {0, rows / 2, rows - 1}) {
          std::vector<float> sum(kIn, 0.0f);
          for (int32_t i = 0; i < kTop; ++i) {
            const int32_t at = b.routes.place[r * kTop + i];
            const auto e = static_cast<size_t>(std::upper_bound(b.routes.start, b.routes.start + kExperts + 1, at) -
                                               b.routes.start - 1);
            const Precision mine = e == 3 ? Precision::kFp16 : precision;
            const Buffer one = backend->allocate(kWide * 4).value(), last = backend->allocate(kIn * 4).value();
            LinearArgs linear;
            linear.weight = gate_up[e].get();
            linear.x = dx.as<float>() + r * kIn;
            linear.rows = 1;
            linear.precision = mine;
            linear.epilogue = Epilogue::kGatedActivation;
            linear.y = one.data();
            backend->linear(linear);
            linear.weight = down[e].get();
            linear.x = one.data();
            linear.epilogue = Epilogue::kStore;
            linear.y = last.data();
            backend->linear(linear);
            const std::vector<float> want = download(*backend, last);
            for (size_t c = 0; c < want.size(); ++c) {
              ASSERT_EQ(by_assignment[static_cast<size_t>(at) * want.size() + c], want[c])
                  << kernels << " " << name_of(precision) << " rows " << rows << " row " << r << " expert " << e;
              sum[c] = std::fma(want[c], b.routes.weight[r * kTop + i], sum[c]);
            }
          }
          for (size_t c = 0; c < sum.size(); ++c) {
            const size_t place = static_cast<size_t>(r * kIn) + c;
            ASSERT_EQ(got[place], sum[c] + shared[place]);
          }
        }
      }
    }
  }
}

TEST(CpuBackend, ANormMaySpanAllHeads) {
  Random random(23);
  constexpr int32_t kTokens = 5, kHeads = 3, kKvHeads = 2, kDim = 20;
  constexpr size_t kWidth = int64_t{kHeads + 2 * kKvHeads} * kDim;
  const std::vector<float> qkv = random.normals(kTokens * kWidth);
  const std::vector<float> q_norm = random.normals(int64_t{kHeads} * kDim),
                           k_norm = random.normals(int64_t{kKvHeads} * kDim);
  const auto backend = make(2);
  const Buffer data = upload(*backend, qkv), dq = upload(*backend, q_norm), dk = upload(*backend, k_norm);
  const Buffer still = upload(*backend, {1.0f, 0.0f});
  const auto cache = backend->make_kv_cache({1, kKvHeads, kDim, 16, 1, DType::kF32}).value();
  const std::vector<int32_t> zeros(kTokens, 0), slots{0, 1, 2, 3, 4};
  RopeArgs args;
  args.qkv = data.data();
  args.heads = kHeads;
  args.kv_heads = kKvHeads;
  args.head_dim = kDim;
  args.rotary_dim = 2;
  args.cos_sin = still.as<float>();
  args.q_norm = dq.as<float>();
  args.k_norm = dk.as<float>();
  args.norm_spans_heads = true;
  args.cache = cache.get();
  args.batch.tokens = kTokens;
  args.batch.positions = zeros.data();
  args.batch.slots = slots.data();
  backend->rope(args);
  const std::vector<float> got = download(*backend, data);
  for (size_t t = 0; t < kTokens; ++t) {
    double squares = 0;
    for (size_t i = 0; i < int64_t{kHeads} * kDim; ++i) squares += double{qkv[t * kWidth + i]} * qkv[t * kWidth + i];
    const double factor = 1 / std::sqrt(squares / (kHeads * kDim) + args.norm_eps);
    for (size_t i = 0; i < int64_t{kHeads} * kDim; ++i) {
      const double want = qkv[t * kWidth + i] * factor * q_norm[i];
      EXPECT_NEAR(got[t * kWidth + i], want, 1e-6 * std::max(1.0, std::abs(want)));
    }
  }
}

// Squares that FP32 does not hold would make zeros of the row.
TEST(CpuBackend, SquaresThatOverflowInANormMakeNoNumbers) {
  for (const auto* table : cpu::runnable_tables()) {
    for (const float large : {1e20f, std::numeric_limits<float>::infinity()}) {
      std::vector<float> x(40, 1.0f), out(40);
      x[17] = large;
      const std::vector<float> weight(40, 1.0f);
      table->rms_norm(x.data(), weight.data(), 1e-5f, 40, out.data());
      for (const float v : out) EXPECT_TRUE(std::isnan(v)) << table->name;
    }
  }
}

TEST(CpuBackend, KeysAndValuesBeyondFp16AreAnErrorThatNamesTheLayer) {
  constexpr int32_t kDim = 20;
  for (const size_t where : {size_t{kDim + 3}, size_t{2 * kDim + 19}}) {  // of the key, of the value
    for (const float large : {65504.0f, 65536.0f, -1e30f, std::numeric_limits<float>::infinity(),
                              std::numeric_limits<float>::quiet_NaN()}) {
      for (const DType dtype : {DType::kF16, DType::kF32, DType::kF8E4M3}) {
        const auto backend = make(2);
        std::vector<float> qkv(int64_t{3} * kDim, 1.0f);
        qkv[where] = large;
        const Buffer data = upload(*backend, qkv), still = upload(*backend, {1.0f, 0.0f});
        const auto cache = backend->make_kv_cache({5, 1, kDim, 16, 1, dtype}).value();
        const int32_t zero = 0;
        RopeArgs args;
        args.qkv = data.data();
        args.heads = args.kv_heads = 1;
        args.head_dim = kDim;
        args.rotary_dim = 2;
        args.cos_sin = still.as<float>();
        args.cache = cache.get();
        args.layer = 4;
        args.batch.tokens = 1;
        args.batch.positions = args.batch.slots = &zero;
        backend->rope(args);
        const Status status = backend->synchronize();
        const bool fits = std::isfinite(large) && (dtype != DType::kF16 || large == 65504.0f);
        ASSERT_EQ(status.ok(), fits) << large;
        if (!fits) {
          EXPECT_NE(status.error().message.find("layer 4:"), std::string::npos) << status.error().message;
        }
        EXPECT_TRUE(backend->synchronize().ok());  // told once
      }
    }
  }
}

}  // namespace
}  // namespace nfp
