// The small kernels of a step on a Hopper GPU, as JSON lines: microseconds a launch by replays of a CUDA graph of many
// launches whose data together are larger than the L2 cache.
//
//   step_kernels_bench [FILTER]   (cases whose name contains FILTER)
#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <memory>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "backend/cuda/gemm/tune/test_data.h"
#include "backend/cuda/gemm/tune/timing.h"
#include "backend/cuda/sampling/sampling.h"
#include "backend/cuda/step/step.h"
#include "device_memory.h"

namespace nfp::cuda {
namespace {

constexpr size_t kRotation = size_t{160} << 20;

using Buffer = bench::DeviceMemory;

void print(std::string_view name, std::string_view shape, int copies, const GraphTimer::Launch& launch, double bytes) {
  const int launches = std::clamp(copies, 32, 256);
  GraphTimer timer =
      bench::must(GraphTimer::create(launches, [&](int i, CUstream_st* stream) { return launch(i % copies, stream); }));
  const double us = bench::must(timer.median(3, 15));
  fmt::print("{{\"case\":\"{}\",{},\"us\":{:.2f},\"gb_s\":{:.0f}}}\n", name, shape, us, bytes / us * 1e-3);
  std::fflush(stdout);
}

int copies_of(double bytes) { return static_cast<int>(std::clamp(static_cast<double>(kRotation) / bytes, 1.0, 256.0)); }

void embed(int64_t rows) {
  constexpr int64_t kVocab = 49152, kHidden = 4096;
  const PlaneShape shape{kVocab, kHidden};
  const Buffer upper(shape.bytes()), lower(shape.bytes()), out(static_cast<size_t>(rows * kHidden * 2));
  fill_weights(shape, 1, upper.as<uint8_t>(), lower.as<uint8_t>(), nullptr, nullptr, nullptr);
  std::vector<int32_t> ids;
  constexpr int kCopies = 64;
  for (int64_t i = 0; i < rows * kCopies; ++i) ids.push_back(static_cast<int32_t>(i * 7919 % kVocab));
  Buffer d_ids(ids.size() * 4);
  d_ids.upload(ids);
  print(
      "embed", fmt::format("\"rows\":{},\"hidden\":{}", rows, kHidden), kCopies,
      [&](int i, CUstream_st* stream) {
        EmbedCall call;
        call.table = {upper.as<uint8_t>(), lower.as<uint8_t>(), Join::kBiased, nullptr, nullptr, kVocab, kHidden};
        call.tokens.ids = d_ids.as<int32_t>(static_cast<size_t>(i * rows));
        call.rows = rows;
        call.out = out.as<void>();
        return run_embed(call, stream);
      },
      static_cast<double>(rows * kHidden * 4));
}

void rope(int64_t tokens, bool norm, bool e4m3_cache) {
  constexpr int kHeads = 32, kKvHeads = 8, kDim = 128;
  const auto row = static_cast<size_t>((kHeads + 2 * kKvHeads) * kDim);
  const double bytes = static_cast<double>(tokens) * static_cast<double>(row) * 2;
  const int copies = copies_of(bytes);
  const auto n = static_cast<size_t>(tokens);
  const Buffer qkv(static_cast<size_t>(copies) * n * row * 2), cache(n * kKvHeads * kDim * 4), table(n * kDim * 4);
  fill_f16(static_cast<int64_t>(static_cast<size_t>(copies) * n * row), 1, qkv.as<uint16_t>(), nullptr);
  fill_f32(static_cast<int64_t>(n * kDim), 0.7f, table.as<float>(), nullptr);
  Buffer weight(kDim * 4), places(n * 4);
  fill_f32(kDim, 1.0f, weight.as<float>(), nullptr);
  std::vector<int32_t> places_host(n);
  for (size_t i = 0; i < n; ++i) places_host[i] = static_cast<int32_t>(i);
  places.upload(places_host);
  print(
      e4m3_cache ? "rope_e4m3"
      : norm     ? "rope_norm"
                 : "rope",
      fmt::format("\"rows\":{},\"heads\":{},\"kv_heads\":{},\"head_dim\":{}", tokens, kHeads, kKvHeads, kDim), copies,
      [&](int i, CUstream_st* stream) {
        RopeCall call;
        call.qkv = qkv.as<uint16_t>(static_cast<size_t>(i) * n * row);
        call.tokens = tokens;
        call.heads = kHeads;
        call.kv_heads = kKvHeads;
        call.head_dim = kDim;
        call.cos_sin = table.as<float>();
        call.positions = places.as<int32_t>();
        call.slots = places.as<int32_t>();
        call.q_norm = call.k_norm = norm ? weight.as<float>() : nullptr;
        call.keys = cache.as<uint16_t>();
        call.values = cache.as<uint16_t>(n * kKvHeads * kDim);
        call.e4m3_cache = e4m3_cache;
        call.block_size = 1;
        return run_rope(call, stream);
      },
      2 * bytes - (e4m3_cache ? static_cast<double>(n * kKvHeads * kDim * 2) : 0));
}

void gather(int64_t rows) {
  constexpr int64_t kHidden = 4096, kFrom = 20000;
  const Buffer x(kFrom * kHidden * 2), out(static_cast<size_t>(rows * kHidden * 2));
  std::vector<int32_t> ids;
  constexpr int kCopies = 64;
  for (int64_t i = 0; i < rows * kCopies; ++i) ids.push_back(static_cast<int32_t>(i * 7919 % kFrom));
  Buffer d_ids(ids.size() * 4);
  d_ids.upload(ids);
  print(
      "gather", fmt::format("\"rows\":{},\"hidden\":{}", rows, kHidden), kCopies,
      [&](int i, CUstream_st* stream) {
        return run_gather(
            {x.as<void>(), d_ids.as<int32_t>(static_cast<size_t>(i * rows)), rows, kHidden, out.as<void>(), true},
            stream);
      },
      static_cast<double>(rows * kHidden * 4));
}

struct Sampling {
  std::string_view name;
  uint32_t needs;
  SamplingRow row;
};

void sample(int32_t rows, int32_t vocab, float sigma, std::string_view filter) {
  const size_t elements = static_cast<size_t>(rows) * static_cast<size_t>(vocab);
  const int copies = copies_of(static_cast<double>(elements) * 4);
  Buffer logits(elements * 4 * static_cast<size_t>(copies));
  {  // made up: a bulk of sums of four uniform numbers and 30 tokens above it, the same in every copy
    std::vector<float> host(elements);
    uint64_t state = 88172645463325252ull;
    const auto next = [&] {
      state ^= state << 13;
      state ^= state >> 7;
      state ^= state << 17;
      return state;
    };
    for (float& v : host) {
      const uint64_t bits = next();
      float sum = 0;
      for (int i = 0; i < 4; ++i) sum += static_cast<float>((bits >> (16 * i)) & 0xffff) * 0x1p-16f;
      v = (sum - 2.0f) * 1.732f * sigma;
    }
    for (int32_t r = 0; r < rows; ++r) {
      for (int i = 0; i < 30; ++i)
        host[static_cast<size_t>(r) * static_cast<size_t>(vocab) + next() % static_cast<size_t>(vocab)] +=
            static_cast<float>(i) * 0.3f * sigma;
    }
    for (int c = 0; c < copies; ++c)
      cudaMemcpy(logits.as<float>(static_cast<size_t>(c) * elements), host.data(), elements * 4,
                 cudaMemcpyHostToDevice);
  }
  const auto n = static_cast<size_t>(rows);
  const Buffer counts(static_cast<size_t>(vocab) * 4 * n), counter(4), out(n * sizeof(SampledRow)),
      top(n * kMaxTopLogprobs * sizeof(TokenLogprob));
  using Needs = SamplingNeeds;
  SamplingRow draws;
  draws.temperature = 1.0f;
  draws.seed = 5;
  SamplingRow limited = draws, top_p = draws, min_p = draws, penalised = draws, reported = draws;
  limited.top_k = 50;
  limited.top_p = top_p.top_p = penalised.top_p = 0.95f;
  min_p.min_p = 0.05f;
  penalised.top_k = 50;
  penalised.repetition_penalty = 1.1f;
  reported.report = 20;
  for (const Sampling& s : {Sampling{"greedy", 0, {}}, Sampling{"draw", Needs::kDraw, draws},
                            Sampling{"top_k_top_p", Needs::kDraw | Needs::kLimits, limited},
                            Sampling{"top_p", Needs::kDraw | Needs::kLimits, top_p},
                            Sampling{"min_p", Needs::kDraw | Needs::kLimits, min_p},
                            Sampling{"penalised", Needs::kDraw | Needs::kLimits | Needs::kPenalties, penalised},
                            Sampling{"draw_report_20", Needs::kDraw | Needs::kReport, reported}}) {
    if (s.name.find(filter) == std::string_view::npos && filter != "sample") continue;
    std::vector<SamplingRow> host(n, s.row);
    for (size_t r = 0; r < n; ++r) {
      host[r].draw = r;
      if ((s.needs & Needs::kPenalties) != 0) host[r].history_slot = static_cast<int32_t>(r);
    }
    Buffer row(n * sizeof(SamplingRow));
    row.upload(host);
    print(
        s.name, fmt::format("\"rows\":{},\"vocab\":{},\"sigma\":{}", rows, vocab, sigma), copies,
        [&](int i, CUstream_st* stream) {
          SampleCall call;
          call.logits = {logits.as<float>(static_cast<size_t>(i) * elements), vocab, rows, vocab};
          call.needs = s.needs;
          call.row = row.as<SamplingRow>();
          call.history = {counts.as<uint32_t>(), rows, vocab};
          call.counter = counter.as<uint32_t>();
          call.out = out.as<SampledRow>();
          call.top = top.as<TokenLogprob>();
          return run_sample(call, stream);
        },
        static_cast<double>(elements) * 4);
  }
}

}  // namespace
}  // namespace nfp::cuda

int main(int argc, char** argv) {
  using namespace nfp::cuda;
  const std::string_view filter = argc > 1 ? argv[1] : "";
  const auto wants = [&](std::string_view name) { return name.find(filter) != std::string_view::npos; };
  for (const int rows : {1, 8, 64, 256, 2048, 8192}) {
    if (wants("embed")) embed(rows);
    if (wants("rope")) rope(rows, false, false);
    if (wants("rope_norm")) rope(rows, true, false);
    if (wants("rope_e4m3")) rope(rows, false, true);
    if (wants("gather")) gather(rows);
  }
  for (const int vocab : {49152, 128256}) {
    for (const int rows : {1, 8, 64, 256}) sample(rows, vocab, 2.0f, filter);
  }
  sample(64, 128256, 0.3f, filter);  // flat: no limit leaves few tokens
}
