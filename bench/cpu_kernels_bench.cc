// The operations of a decode step and of a prefill, on random weights of SmolLM2-135M's shapes, without an engine
// around them: tokens/s, GB/s and GFLOP/s beside the machine's ceilings, as JSON on stdout.
//
//   cpu_kernels_bench [--threads N] [--repeats N] [--kernels NAME] [--prefill N] [--context N] [--batches 1,8,32,64]
//                     [--precisions fp16,fp8,fp8-w8a8] [--profile 1]
//
// Cases are interleaved and the median and best of the repeats are reported: machines are shared and noisy.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "backend/cpu/ceilings.h"
#include "backend/cpu/cpu_backend.h"
#include "base/float_types.h"
#include "nested/format.h"

namespace nfp {
namespace {

constexpr int kHidden = 576, kWide = 1536, kLayers = 30, kHeads = 9, kKvHeads = 3, kHeadDim = 64, kVocab = 49152;
constexpr int kBlockSize = 16;

// Random weights of a plausible size; a few distinct rows, repeated.
class RandomMatrix final : public MatrixReader {
 public:
  RandomMatrix(int64_t rows, int64_t cols) : rows_(rows), cols_(cols) {
    static std::mt19937 engine(1);
    std::normal_distribution<float> normal(0.0f, 0.1f);
    for (int64_t i = 0; i < kDistinct * cols; ++i)
      words_.push_back(fp32_to_fp16(std::clamp(normal(engine), -1.0f, 1.0f)));
  }
  int64_t rows() const override { return rows_; }
  int64_t cols() const override { return cols_; }
  Storage storage() const override { return Storage::kNested; }
  const std::string& name() const override { return name_; }
  Status read_fp16(int64_t, int64_t, uint16_t*) const override { return ok_status(); }
  Status read_nested(int64_t first, int64_t count, uint8_t* upper, uint8_t* lower, int8_t* exponent) const override {
    for (int64_t r = 0; r < count; ++r) {
      const uint16_t* row = words_.data() + (first + r) % kDistinct * cols_;
      for (int64_t c = 0; c < cols_; ++c) {
        const NestedWeight w = split(row[c]);
        upper[r * cols_ + c] = w.upper;
        lower[r * cols_ + c] = w.lower;
      }
      exponent[r] = 0;
    }
    return ok_status();
  }

 private:
  static constexpr int64_t kDistinct = 48;
  int64_t rows_, cols_;
  std::string name_ = "random";
  std::vector<uint16_t> words_;
};

struct Case {
  std::string name;
  Precision precision;
  bool fp8_head;
  int tokens;  // a sequence
  int sequences;
  int context;  // tokens already in the cache
};

template <typename T>
T die_unless(Result<T> result) {
  if (!result.ok()) {
    std::fprintf(stderr, "cpu_kernels_bench: %s\n", result.error().message.c_str());
    std::exit(1);
  }
  return std::move(result).value();
}

void die_unless(const Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "cpu_kernels_bench: %s\n", status.error().message.c_str());
  std::exit(1);
}

// Of one step. Processor time is what is left to compare by where a machine is shared: with one thread it counts no
// waiting for the processor.
struct Times {
  double wall = 0;
  double processor = 0;
};

double processor_seconds() {
  timespec time{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

class Model {
 public:
  Model(Backend& backend, int max_tokens, int max_sequences, int max_context) : backend_(backend) {
    table_width_ = (max_context + kBlockSize - 1) / kBlockSize;
    cache_ = die_unless(backend.make_kv_cache(
        {kLayers, kKvHeads, kHeadDim, kBlockSize, static_cast<int64_t>(table_width_) * max_sequences, DType::kF16}));
    head_ = weight({{kVocab, kHidden}});
    for (int i = 0; i < kLayers; ++i) {
      qkv_.push_back(weight({{kHeads * kHeadDim, kHidden}, {2 * kKvHeads * kHeadDim, kHidden}}));
      output_.push_back(weight({{kHidden, kHidden}}));
      gate_up_.push_back(weight({{kWide, kHidden}, {kWide, kHidden}}, RowOrder::kInterleave));
      down_.push_back(weight({{kHidden, kWide}}));
    }
    norm_ = floats(kHidden, 1.0f);
    cos_sin_ = floats(static_cast<size_t>(max_context) * kHeadDim, 0.5f);
    const auto rows = static_cast<size_t>(std::max(max_tokens, max_sequences));
    x_ = floats(rows * kHidden, 0);
    normed_ = floats(rows * kHidden, 0);
    qkv_out_ = floats(rows * (kHeads + 2 * kKvHeads) * kHeadDim, 0);
    attended_ = floats(rows * kHidden, 0);
    mlp_ = floats(rows * kWide, 0);
    gathered_ = floats(static_cast<size_t>(max_sequences) * kHidden, 0);
    logits_ = floats(static_cast<size_t>(max_sequences) * kVocab, 0);
    token_ = floats(static_cast<size_t>(max_sequences), 0);
  }

  Times run(const Case& c) {
    std::vector<int32_t> ids, positions, slots, start = {0}, context, table, last;
    for (int s = 0; s < c.sequences; ++s) {
      for (int t = 0; t < c.tokens; ++t) {
        ids.push_back((s * 31 + t * 7) % kVocab);
        positions.push_back(c.context + t);
        slots.push_back(s * table_width_ * kBlockSize + c.context + t);
      }
      start.push_back(static_cast<int32_t>(ids.size()));
      last.push_back(start.back() - 1);
      context.push_back(c.context + c.tokens);
      for (int b = 0; b < table_width_; ++b) table.push_back(s * table_width_ + b);
    }
    BatchView batch;
    batch.tokens = static_cast<int32_t>(ids.size());
    batch.sequences = c.sequences;
    batch.max_query = c.tokens;
    batch.max_context = c.context + c.tokens;
    batch.table_width = table_width_;
    std::vector<Buffer> held;
    const auto put = [&](const std::vector<int32_t>& v) {
      held.push_back(die_unless(backend_.allocate(v.size() * 4)));
      die_unless(backend_.upload(held.back().data(), v.data(), v.size() * 4));
      return held.back().as<int32_t>();
    };
    batch.token_ids = put(ids);
    batch.positions = put(positions);
    batch.slots = put(slots);
    batch.query_start = put(start);
    batch.context = put(context);
    batch.block_table = put(table);
    const int32_t* rows = put(last);
    const auto begin = std::chrono::steady_clock::now();
    const double cpu_begin = processor_seconds();
    enqueue(c, batch, rows);
    std::vector<int32_t> tokens(static_cast<size_t>(c.sequences));
    die_unless(backend_.download(tokens.data(), token_.data(), tokens.size() * 4));
    return {std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count(),
            processor_seconds() - cpu_begin};
  }

  double weight_bytes(const Case& c) const {
    double bytes = static_cast<double>(head_->bytes_read(c.fp8_head ? c.precision : Precision::kFp16));
    for (const auto* list : {&qkv_, &output_, &gate_up_, &down_}) {
      for (const auto& w : *list) bytes += static_cast<double>(w->bytes_read(c.precision));
    }
    return bytes;
  }
  static double flops(const Case& c) {
    const double body =
        2.0 * kLayers * kHidden * (static_cast<double>(kHeads + 2 * kKvHeads) * kHeadDim + kHidden + 3.0 * kWide);
    return c.sequences * (c.tokens * body + 2.0 * kHidden * kVocab);
  }

 private:
  std::unique_ptr<LinearWeight> weight(const std::vector<std::pair<int64_t, int64_t>>& shapes,
                                       RowOrder order = RowOrder::kConcat) {
    std::vector<std::unique_ptr<RandomMatrix>> parts;
    LinearSpec spec;
    spec.order = order;
    for (const auto& [n, k] : shapes) {
      parts.push_back(std::make_unique<RandomMatrix>(n, k));
      spec.parts.push_back(parts.back().get());
    }
    return die_unless(backend_.make_linear(spec));
  }
  Buffer floats(size_t count, float value) {
    Buffer buffer = die_unless(backend_.allocate(count * sizeof(float)));
    const std::vector<float> values(count, value);
    die_unless(backend_.upload(buffer.data(), values.data(), buffer.bytes()));
    return buffer;
  }

  void enqueue(const Case& c, const BatchView& batch, const int32_t* rows) {
    const Precision p = c.precision;
    const auto multiply = [&](const LinearWeight& w, const Buffer& in, int32_t count, Epilogue epilogue,
                              const Buffer& out, Precision precision) {
      LinearArgs args;
      args.weight = &w;
      args.x = in.data();
      args.rows = count;
      args.precision = precision;
      args.epilogue = epilogue;
      args.y = out.data();
      backend_.linear(args);
    };
    const auto norm = [&](const Buffer& in, int32_t count, const Buffer& out) {
      backend_.rms_norm({in.data(), norm_.as<float>(), 1e-5f, count, kHidden, p, out.data()});
    };
    const int32_t n = batch.tokens;
    backend_.embed({head_.get(), batch.token_ids, n, 1.0f, x_.data()});
    for (int i = 0; i < kLayers; ++i) {
      const auto at = static_cast<size_t>(i);
      norm(x_, n, normed_);
      multiply(*qkv_[at], normed_, n, Epilogue::kStore, qkv_out_, p);
      RopeArgs rope;
      rope.qkv = qkv_out_.data();
      rope.heads = kHeads;
      rope.kv_heads = kKvHeads;
      rope.head_dim = rope.rotary_dim = kHeadDim;
      rope.cos_sin = cos_sin_.as<float>();
      rope.cache = cache_.get();
      rope.layer = i;
      rope.batch = batch;
      backend_.rope(rope);
      AttentionArgs attention;
      attention.qkv = qkv_out_.data();
      attention.heads = kHeads;
      attention.kv_heads = kKvHeads;
      attention.head_dim = kHeadDim;
      attention.scale = 0.125f;
      attention.cache = cache_.get();
      attention.layer = i;
      attention.batch = batch;
      attention.out = attended_.data();
      backend_.attention(attention);
      multiply(*output_[at], attended_, n, Epilogue::kAdd, x_, p);
      norm(x_, n, normed_);
      multiply(*gate_up_[at], normed_, n, Epilogue::kGatedActivation, mlp_, p);
      multiply(*down_[at], mlp_, n, Epilogue::kAdd, x_, p);
    }
    backend_.gather_rows({x_.data(), rows, c.sequences, kHidden, gathered_.data()});
    norm(gathered_, c.sequences, gathered_);
    multiply(*head_, gathered_, c.sequences, Epilogue::kStore, logits_, c.fp8_head ? p : Precision::kFp16);
    SampleArgs sample;
    sample.logits = logits_.as<float>();
    sample.rows = c.sequences;
    sample.vocab = kVocab;
    sample.token = token_.as<int32_t>();
    backend_.sample(sample);
  }

  Backend& backend_;
  int table_width_ = 0;
  std::unique_ptr<KvCache> cache_;
  std::unique_ptr<LinearWeight> head_;
  std::vector<std::unique_ptr<LinearWeight>> qkv_, output_, gate_up_, down_;
  Buffer norm_, cos_sin_, x_, normed_, qkv_out_, attended_, mlp_, gathered_, logits_, token_;
};

double median(std::vector<double> v) {
  std::nth_element(v.begin(), v.begin() + static_cast<ptrdiff_t>(v.size() / 2), v.end());
  return v[v.size() / 2];
}

int run(int argc, char** argv) {
  std::map<std::string, std::string> flags = {{"--threads", "0"},  {"--repeats", "7"},
                                              {"--kernels", ""},   {"--prefill", "512"},
                                              {"--context", "64"}, {"--batches", "1,2,4,8,16,32,64"},
                                              {"--profile", "0"},  {"--precisions", "fp16,fp8,fp8-w8a8"}};
  for (int i = 1; i + 1 < argc; i += 2) {
    if (!flags.contains(argv[i])) {
      std::fprintf(stderr, "cpu_kernels_bench: unknown flag %s\n", argv[i]);
      return 2;
    }
    flags[argv[i]] = argv[i + 1];
  }
  const auto number = [&](const char* flag) { return std::atoi(flags[flag].c_str()); };
  auto backend = die_unless(make_cpu_backend({.threads = number("--threads"), .kernels = flags["--kernels"]}));
  const int prefill = number("--prefill"), context = number("--context");
  std::vector<int> batches;
  for (const char* p = flags["--batches"].c_str(); *p != '\0';) {
    batches.push_back(std::atoi(p));
    p = std::strchr(p, ',') != nullptr ? std::strchr(p, ',') + 1 : "";
  }
  const int most = *std::max_element(batches.begin(), batches.end());
  Model model(*backend, std::max(prefill, most), most, std::max(prefill, context + 1) + kBlockSize);

  std::vector<Case> cases;
  for (const Precision p : {Precision::kFp16, Precision::kFp8, Precision::kFp8W8A8}) {
    if (("," + flags["--precisions"] + ",").find(fmt::format(",{},", name_of(p))) == std::string::npos) continue;
    const bool fp8 = p != Precision::kFp16;
    for (const int b : batches) {
      cases.push_back({fmt::format("decode {} batch {}", name_of(p), b), p, fp8, 1, b, context});
      if (b == 1 && fp8)
        cases.push_back({fmt::format("decode {} fp16 head batch 1", name_of(p)), p, false, 1, b, context});
    }
    if (prefill > 0) cases.push_back({fmt::format("prefill {} {}", name_of(p), prefill), p, fp8, prefill, 1, 0});
  }
  std::vector<std::vector<double>> times(cases.size());
  std::vector<double> best(cases.size(), 1e30), processor(cases.size(), 1e30);
  for (int r = 0; r < number("--repeats"); ++r) {
    for (size_t i = 0; i < cases.size(); ++i) {
      for (int inner = 0; inner < (cases[i].tokens == 1 ? 5 : 1); ++inner) {
        const Times t = model.run(cases[i]);
        times[i].push_back(t.wall);
        best[i] = std::min(best[i], t.wall);
        processor[i] = std::min(processor[i], t.processor);
      }
    }
  }
  const cpu::MachineCeilings machine = die_unless(cpu::measure_machine({.threads = backend->info().threads}));
  fmt::print(
      "{{\"device\": \"{}\", \"read_gbs\": {:.1f}, \"read_4k_gbs\": {:.1f}, \"fma_gflops\": {:.1f}, "
      "\"bf16_gflops\": {:.1f}, \"cases\": [\n",
      backend->info().device, machine.read_gbs, machine.read_small_gbs, machine.fma_gflops, machine.bf16_gflops);
  for (size_t i = 0; i < cases.size(); ++i) {
    const double tokens = static_cast<double>(cases[i].tokens) * cases[i].sequences, middle = median(times[i]);
    const double bytes = model.weight_bytes(cases[i]) * 1e-9, flops = Model::flops(cases[i]) * 1e-9;
    fmt::print(
        "  {{\"case\": \"{}\", \"ms\": {:.3f}, \"tok_s\": {:.1f}, \"tok_s_best\": {:.1f}, \"gbs\": {:.1f}, "
        "\"gflops\": {:.1f}, \"gbs_best\": {:.1f}, \"gflops_best\": {:.1f}, \"processor_ms\": {:.3f}}}{}\n",
        cases[i].name, middle * 1e3, tokens / middle, tokens / best[i], bytes / middle, flops / middle, bytes / best[i],
        flops / best[i], processor[i] * 1e3, i + 1 < cases.size() ? "," : "");
  }
  fmt::print("]}}\n");
  if (number("--profile") == 0) return 0;
  for (const Case& c : cases) {
    backend->set_profiling(true);
    for (int i = 0; i < 5; ++i) model.run(c);
    std::fprintf(stderr, "%s:", c.name.c_str());
    for (const StageTime& s : backend->profile()) {
      std::fprintf(stderr, " %s %.0f us", std::string(s.stage).c_str(), s.seconds * 1e6 / 5);
    }
    std::fprintf(stderr, "\n");
    backend->set_profiling(false);
  }
  return 0;
}

}  // namespace
}  // namespace nfp

int main(int argc, char** argv) { return nfp::run(argc, argv); }
