// Attention over a paged KV cache behind the C interface.
#include "backend/cuda/attention/attention.h"

#include <algorithm>

#include "capi/gpu.h"
#include "capi/status.h"

using nfp::capi::complete;
using nfp::capi::done;
using nfp::capi::fail;
using nfp::capi::guarded;
using namespace nfp::cuda;

namespace {

KvType type_of(nfp_kv_type type) {
  return type == NFP_KV_E4M3 ? KvType::kE4m3 : type == NFP_KV_BF16 ? KvType::kBf16 : KvType::kF16;
}

AttentionCall call_of(const nfp_attention_call& c) {
  AttentionCall call;
  call.heads = c.heads;
  call.kv_heads = c.kv_heads;
  call.head_dim = c.head_dim;
  call.scale = c.scale;
  call.soft_cap = c.soft_cap;
  call.window = c.window;
  call.cache.keys = c.keys;
  call.cache.values = c.values;
  call.cache.type = type_of(c.kv_type);
  call.cache.key_scale = c.key_scale;
  call.cache.value_scale = c.value_scale;
  call.cache.blocks = c.blocks;
  call.cache.block_size = c.block_size;
  call.cache.block_stride = c.block_stride;
  call.q = c.q;
  call.q_stride = c.q_stride;
  call.out = c.out;
  call.query_start = c.query_start;
  call.context = c.context;
  call.block_table = c.block_table;
  call.table_width = c.table_width;
  call.first_sequence = c.first_sequence;
  call.sequences = c.sequences;
  call.tokens = c.tokens;
  call.likely_context = c.likely_context;
  call.deterministic = c.deterministic != 0;
  call.dependent_launch = c.independent_start == 0;
  call.workspace = c.workspace;
  call.workspace_bytes = c.workspace_bytes;
  return call;
}

// With the device of `gpu` current.
template <typename F>
nfp_status with_call(nfp_gpu* gpu, const nfp_attention_call* c, F&& body) {
  return guarded([&]() -> nfp_status {
    NFP_CAPI_REQUIRE(gpu != nullptr && complete(c), "attention: gpu or call is null, or call->size is not set");
    NFP_CAPI_REQUIRE(c->kv_type >= NFP_KV_F16 && c->kv_type <= NFP_KV_BF16, "attention: kv_type is unknown");
    const auto here = gpu->context.enter();
    return body(call_of(*c));
  });
}

}  // namespace

extern "C" {

nfp_status nfp_attention_workspace_bytes(nfp_gpu* gpu, const nfp_attention_call* call, size_t* bytes) {
  return with_call(gpu, call, [&](const AttentionCall& c) -> nfp_status {
    NFP_CAPI_REQUIRE(bytes != nullptr, "attention: bytes is null");
    const auto needs = decode_needs(c);
    if (!needs.ok()) return fail(needs.error());
    *bytes = std::max(needs->workspace_bytes, kPrefillWorkspaceBytes);
    return NFP_OK;
  });
}

nfp_status nfp_attention_decode(nfp_gpu* gpu, const nfp_attention_call* call, nfp_stream stream) {
  return with_call(gpu, call, [&](const AttentionCall& c) { return done(run_decode(c, stream)); });
}

nfp_status nfp_attention_prefill(nfp_gpu* gpu, const nfp_attention_call* call, nfp_stream stream) {
  return with_call(gpu, call, [&](const AttentionCall& c) { return done(run_prefill(c, stream)); });
}

}  // extern "C"
