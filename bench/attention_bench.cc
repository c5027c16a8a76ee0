// Times of the attention kernels over data that the L2 does not hold, a JSON line each: decode with the cache bytes
// read a second, prefill with the multiply-adds that causality leaves. Calls are replayed from a graph, each on another
// part of the cache.
//   attention_bench            single calls of many shapes
//   attention_bench served     as in steps of many prompts of 1024, and in their answers
//   attention_bench prompts    prefill for so long that power counts, with the clock and the power
//   attention_bench cuts       where spans of warps beat spans of blocks
//   attention_bench memory     how it matters where the cache lies: blocks in order or shuffled, few copies or many
//   attention_bench blocks     decode with blocks of 16, 32 and 64 tokens
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <tuple>
#include <vector>

#include "backend/cuda/attention/attention.h"
#include "backend/cuda/gemm/tune/timing.h"
#include "device_memory.h"
#include "gpu_monitor.h"

namespace nfp::cuda {
namespace {

using bench::must;
using Memory = bench::DeviceMemory;

struct Case {
  int sequences, queries, context;
  int heads, kv_heads, head_dim;
  bool deterministic;
  bool e4m3 = false;
  DecodeCut cut = DecodeCut::kAuto;
  bool ragged = false;  // contexts from a quarter of `context` to all of it
  int replays = 7;
  bool in_order = false;  // a sequence's blocks, as a fresh block manager hands them out; else shuffled
  size_t cache_mb = 160;  // that the calls read in turn, at least
  int block_size = 16;    // tokens
};

std::vector<int32_t> contexts_of(const Case& c) {
  std::vector<int32_t> contexts(c.sequences, c.context);
  for (int s = 0; c.ragged && s < c.sequences; ++s)
    contexts[s] =
        c.context / 4 + static_cast<int>(int64_t{s} * 7919 % c.sequences * (c.context - c.context / 4) / c.sequences);
  return contexts;
}

// Random magnitudes of 0.25 to 2, and with `e4m3` no byte that is NaN there.
std::vector<uint16_t> small_numbers(bool e4m3) {
  std::vector<uint16_t> pattern(1 << 20);
  uint32_t state = 1;
  for (uint16_t& v : pattern) {
    state = state * 1664525u + 1013904223u;
    v = static_cast<uint16_t>((state >> 16 & 0x83ff) | (0x3400 + (state >> 8 & 0x800)));  // magnitudes 0.25 to 2
    if (e4m3) v &= 0xbfbf;                                                                // no code of it is NaN
  }
  return pattern;
}

// Microseconds a call, the median of the replays. The FP16 buffers are filled with one repeated small number pattern:
// power, and with it the clock, is a little kinder to it than to a trained model's.
double time_case(const Case& c) {
  const int width = (c.context + c.block_size - 1) / c.block_size;
  const size_t block_numbers = static_cast<size_t>(c.block_size) * c.kv_heads * c.head_dim;  // of keys
  const size_t block_bytes = block_numbers * (c.e4m3 ? 1 : 2);
  const size_t cache = size_t{2} * c.sequences * width * block_bytes;
  const int copies = static_cast<int>(std::clamp<size_t>((c.cache_mb << 20) / cache + 1, 1, 512));
  const int calls = std::max(copies, c.queries == 1 ? 16 : 2);
  const size_t tokens = static_cast<size_t>(c.sequences) * c.queries;
  const size_t q_stride = static_cast<size_t>(c.heads + 2 * c.kv_heads) * c.head_dim;
  const std::vector<uint16_t> pattern = small_numbers(c.e4m3);
  uint32_t state = 1;
  const auto fill = [&](const Memory& memory, size_t bytes) {
    for (size_t at = 0; at < bytes; at += pattern.size() * 2) {
      const size_t part = std::min(bytes - at, pattern.size() * 2);
      if (cudaMemcpy(memory.as<uint8_t>(at), pattern.data(), part, cudaMemcpyHostToDevice) != cudaSuccess) {
        bench::fail("a buffer cannot be filled");
      }
    }
  };
  Memory keys_and_values(cache * copies), q(tokens * q_stride * 2), out(tokens * c.heads * c.head_dim * 2),
      start(size_t{4} * (c.sequences + 1)), context(size_t{4} * c.sequences),
      table(static_cast<size_t>(c.sequences) * width * 4);
  fill(keys_and_values, cache * copies);
  fill(q, tokens * q_stride * 2);
  const std::vector<int32_t> contexts = contexts_of(c);
  std::vector<int32_t> starts, blocks(static_cast<size_t>(c.sequences) * width);
  for (int s = 0; s <= c.sequences; ++s) starts.push_back(s * c.queries);
  for (size_t i = 0; i < blocks.size(); ++i) blocks[i] = static_cast<int32_t>(i);
  for (size_t i = blocks.size() - 1; i > 0 && !c.in_order; --i) {
    state = state * 1664525u + 1013904223u;
    std::swap(blocks[i], blocks[(uint64_t{state} * (i + 1)) >> 32]);
  }
  start.upload(starts);
  context.upload(contexts);
  table.upload(blocks);

  AttentionCall call;
  call.heads = c.heads;
  call.kv_heads = c.kv_heads;
  call.head_dim = c.head_dim;
  call.scale = 0.1f;
  call.cache.blocks = static_cast<int64_t>(blocks.size());
  call.cache.block_size = c.block_size;
  call.cache.block_stride = static_cast<int64_t>(2 * block_numbers);  // as in the engine, a block's values follow
  call.cache.type = c.e4m3 ? KvType::kE4m3 : KvType::kF16;
  if (c.e4m3) call.cache.key_scale = call.cache.value_scale = 1.0f / 256;
  call.q = q.get();
  call.q_stride = static_cast<int64_t>(q_stride);
  call.out = out.get();
  call.query_start = start.as<int32_t>();
  call.context = context.as<int32_t>();
  call.block_table = table.as<int32_t>();
  call.table_width = width;
  call.sequences = c.sequences;
  call.tokens = static_cast<int>(tokens);
  call.deterministic = c.deterministic;
  call.early_cache_reads = true;
  call.likely_context = c.context;
  call.cut = c.cut;
  const size_t bytes = must(decode_needs(call)).workspace_bytes;
  const Memory workspace(bytes);
  call.workspace = workspace.get();
  call.workspace_bytes = bytes;

  GraphTimer timer = must(GraphTimer::create(calls, [&](int i, CUstream_st* stream) {
    call.cache.keys = keys_and_values.as<uint8_t>(cache * (i % copies));
    call.cache.values = static_cast<const uint8_t*>(call.cache.keys) + block_bytes;
    return c.queries == 1 ? run_decode(call, stream) : run_prefill(call, stream);
  }));
  return must(timer.median(2, c.replays));
}

void report(const Case& c) {
  const double us = time_case(c);
  double keys = 0;
  for (const int32_t context : contexts_of(c)) keys += context;
  const double bytes = (c.e4m3 ? 2.0 : 4.0) * keys * c.kv_heads * c.head_dim;
  const double flop =
      4.0 * c.sequences * c.heads * c.head_dim * (c.queries * (c.context - c.queries + (c.queries + 1) / 2.0));
  std::printf(
      "{\"kernel\": \"%s\", \"sequences\": %d, \"queries\": %d, \"context\": %d, \"heads\": %d, \"kv_heads\": %d, "
      "\"head_dim\": %d, \"cache\": \"%s\", \"block_size\": %d, \"in_order\": %s, \"cache_mb\": %zu, "
      "\"deterministic\": %s, "
      "\"ragged\": %s, \"cut\": \"%s\", \"us\": %.2f, \"%s\": %.1f}\n",
      c.queries == 1 ? "decode" : "prefill", c.sequences, c.queries, c.context, c.heads, c.kv_heads, c.head_dim,
      c.e4m3 ? "e4m3" : "f16", c.block_size, c.in_order ? "true" : "false", c.cache_mb,
      c.deterministic ? "true" : "false", c.ragged ? "true" : "false",
      c.cut == DecodeCut::kAuto    ? "auto"
      : c.cut == DecodeCut::kWarps ? "warps"
                                   : "blocks",
      us, c.queries == 1 ? "gb_s" : "tflop_s", c.queries == 1 ? bytes / us * 1e-3 : flop / us * 1e-6);
  std::fflush(stdout);
}

}  // namespace
}  // namespace nfp::cuda

int main(int argc, char** argv) {
  using nfp::cuda::report;
  if (argc == 2 && std::strcmp(argv[1], "cuts") == 0) {
    using nfp::cuda::DecodeCut;
    for (const int batch : {16, 32, 48, 64, 96, 128, 192, 256}) {
      for (const int context : {64, 176, 512, 1536, 4096}) {
        if (batch * context > 256 * 1536) continue;
        for (const DecodeCut cut : {DecodeCut::kBlocks, DecodeCut::kWarps}) {
          report({batch, 1, context, 32, 8, 128, false, false, cut, context > 64});
          if (context == 512) {
            report({batch, 1, context, 32, 8, 128, false, true, cut, true});
            report({batch, 1, context, 9, 3, 64, false, false, cut, true});
            report({batch, 1, context, 16, 4, 256, false, false, cut, true});
          }
        }
      }
    }
    return 0;
  }
  if (argc == 2 && std::strcmp(argv[1], "memory") == 0) {
    for (const auto& [batch, context] :
         {std::pair{16, 1024}, {32, 176}, {32, 1024}, {64, 176}, {64, 1024}, {64, 1032}, {128, 176}, {256, 176}}) {
      for (const size_t cache_mb : {size_t{160}, size_t{1000}, size_t{20000}}) {
        for (const bool in_order : {false, true}) {
          nfp::cuda::Case c{batch, 1, context, 32, 8, 128, false};
          c.in_order = in_order;
          c.cache_mb = cache_mb;
          report(c);
        }
      }
    }
    return 0;
  }
  if (argc == 2 && std::strcmp(argv[1], "blocks") == 0) {
    for (const bool e4m3 : {false, true}) {
      for (const auto& [batch, context, ragged] : {std::tuple{32, 1280, false},
                                                   {64, 1280, false},
                                                   {128, 1280, false},
                                                   {256, 1280, false},
                                                   {256, 1536, true}}) {
        for (const int block_size : {16, 32, 64}) {
          nfp::cuda::Case c{batch, 1, context, 32, 8, 128, false, e4m3};
          c.ragged = ragged;
          c.block_size = block_size;
          report(c);
        }
      }
    }
    return 0;
  }
  if (argc == 2 && std::strcmp(argv[1], "prompts") == 0) {
    nfp::bench::GpuMonitor monitor;
    const auto reading = monitor.during([] {
      for (const auto& [prompts, tokens, head_dim] : {std::tuple{1, 1024, 128},
                                                      {8, 1024, 128},
                                                      {1, 2048, 128},
                                                      {1, 4096, 128},
                                                      {1, 8192, 128},
                                                      {1, 16384, 128},
                                                      {1, 8192, 64},
                                                      {1, 8192, 256}}) {
        for (const bool e4m3 : {false, true}) {
          nfp::cuda::Case c{prompts, tokens, tokens, 32, 8, head_dim, false, e4m3};
          c.replays = 40;
          report(c);
        }
      }
    });
    std::printf("{\"sm_mhz\": %u, \"watts\": %.0f, \"power_limited\": %s}\n", reading.sm_mhz, reading.watts,
                reading.power_limited ? "true" : "false");
    return 0;
  }
  if (argc == 2 && std::strcmp(argv[1], "served") == 0) {
    for (const bool e4m3 : {false, true}) {
      for (const int batch : {1, 8, 32, 64, 128, 256}) report({batch, 1, 1280, 32, 8, 128, false, e4m3});
      for (const int batch : {64, 256}) report({batch, 1, 256, 32, 8, 128, false, e4m3});
      for (const auto& [prompts, tokens] :
           {std::pair{1, 1024}, {8, 1024}, {4, 2048}, {1, 4000}, {2, 4096}, {1, 8192}, {32, 256}, {64, 128}})
        report({prompts, tokens, tokens, 32, 8, 128, false, e4m3});
    }
    return 0;
  }
  for (const int batch : {1, 2, 8, 64, 256}) {
    for (const int context : {128, 1024, 8192}) {
      if (batch * context <= 64 * 8192) report({batch, 1, context, 32, 8, 128, false});
    }
  }
  report({64, 1, 8192, 32, 8, 128, true});
  report({1, 1, 8192, 32, 8, 128, true});
  report({64, 1, 8192, 9, 3, 64, false});
  report({1, 1, 1024, 9, 3, 64, false});
  report({64, 1, 4096, 16, 4, 256, false});
  report({1, 1, 32768, 32, 8, 128, false});
  report({64, 1, 8192, 32, 8, 128, false, true});
  report({64, 1, 1024, 32, 8, 128, false, true});
  report({1, 1, 1024, 32, 8, 128, false, true});
  report({64, 1, 4096, 16, 4, 256, false, true});
  for (const int prompt : {1024, 4096, 8192}) {
    for (const int head_dim : {64, 128, 256}) {
      if (head_dim == 128 || prompt == 8192) report({1, prompt, prompt, 32, 8, head_dim, false});
    }
  }
  report({8, 128, 4096, 32, 8, 128, false});
  report({1, 8192, 8192, 32, 8, 128, false, true});
  report({1, 8192, 8192, 32, 8, 256, false, true});
  return 0;
}
