#include "capi/engine_json.h"

#include <gtest/gtest.h>

namespace nfp::capi {
namespace {

TEST(EngineJson, NullIsAsAbsentForEveryOption) {
  const auto absent = parse_settings(*parse_object("{}", "options"));
  ASSERT_TRUE(absent.ok());
  for (const char* name : {"device", "deterministic", "gemm_choices", "dummy", "fp8_head", "threads", "policy", "fp8",
                           "max_model_len", "max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization",
                           "enable_prefix_caching", "speculative_tokens", "kv_cache_dtype"}) {
    const auto null = parse_settings({{name, nullptr}});
    ASSERT_TRUE(null.ok()) << name;
    EXPECT_FALSE(null->fp8) << name;
    EXPECT_EQ(null->policy, absent->policy) << name;
    EXPECT_EQ(null->model.device, absent->model.device) << name;
    EXPECT_EQ(null->serving.limits.max_sequences, absent->serving.limits.max_sequences) << name;
  }
  EXPECT_EQ(parse_settings({{"fp8", "fp8"}})->fp8, Precision::kFp8);
  EXPECT_EQ(parse_settings({{"fp8", "fp8-w8a8"}})->fp8, Precision::kFp8W8A8);
  EXPECT_FALSE(parse_settings({{"fp8", "fp4"}}).ok());
}

TEST(EngineJson, ErrorsNameOptionsAndNotFlags) {
  const std::pair<const char*, const char*> messages[] = {
      {"--threads is 5000", "threads is 5000"},
      {"ask for 7 sequences at most (--max-num-seqs)", "ask for 7 sequences at most (max_num_seqs)"},
      {"or a larger --gpu-memory-utilization", "or a larger gpu_memory_utilization"},
      {"use --device cpu and --dtype-kv f32", "use device cpu and kv_cache_dtype f32"},
      {"--max-model-len: --gemm-choices, --fp8", "max_model_len: gemm_choices, fp8"},
      // What is no option, or part of another word.
      {"--slo-ttft-ms 5, --devices, a--device, /--device, -- device --", nullptr},
      {"", ""},
  };
  for (const auto& [message, named] : messages) {
    EXPECT_EQ(naming_options(message), named == nullptr ? message : named);
  }
  RequestOutput output;
  output.error = "layer 1: keep the KV cache in FP32 (--dtype-kv f32)";
  EXPECT_EQ(to_json(output)["error"], "layer 1: keep the KV cache in FP32 (kv_cache_dtype f32)");
}

}  // namespace
}  // namespace nfp::capi
