// Attention over a paged KV cache behind the C interface.
#include "backend/cuda/attention/attention.h"

#include <algorithm>

#include "backend/cuda/step/step.h"
#include "capi/gpu.h"
#include "capi/status.h"

using nfp::capi::complete;
using nfp::capi::done;
using nfp::capi::fail;
using nfp::capi::guarded;
using nfp::capi::is_one_of;
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

// The rotation by a kernel of its own. tokens: 0 = one of each sequence.
nfp::Status rotate(const nfp_attention_call& c, int64_t tokens, nfp_stream stream) {
  RopeCall call;
  call.qkv = const_cast<void*>(c.q);
  call.one_token_each = tokens == 0;
  call.tokens = tokens == 0 ? c.sequences : tokens;
  call.heads = c.heads;
  call.kv_heads = c.kv_heads;
  call.head_dim = c.head_dim;
  call.cos_sin = c.cos_sin;
  call.query_start = c.query_start;
  call.context = c.context;
  call.block_table = c.block_table;
  call.table_width = c.table_width;
  call.first_sequence = c.first_sequence;
  call.sequences = c.sequences;
  call.q_norm = c.q_norm;
  call.k_norm = c.k_norm;
  call.norm_eps = c.norm_epsilon;
  call.keys = const_cast<void*>(c.keys);
  call.values = const_cast<void*>(c.values);
  call.block_stride = c.block_stride;
  call.bf16 = c.kv_type == NFP_KV_BF16;
  call.e4m3_cache = c.kv_type == NFP_KV_E4M3;
  call.block_size = c.block_size;
  call.dependent_launch = c.independent_start == 0;
  return run_rope(call, stream);
}

// With the device of `gpu` current.
template <typename F>
nfp_status with_call(nfp_gpu* gpu, const nfp_attention_call* c, F&& body) {
  return guarded([&]() -> nfp_status {
    NFP_CAPI_REQUIRE(gpu != nullptr && complete(c), "attention: gpu or call is null, or call->size is not set");
    NFP_CAPI_REQUIRE(is_one_of(c->kv_type, 3), "attention: kv_type is unknown");
    if (c->cos_sin != nullptr) {
      NFP_CAPI_REQUIRE(c->q_stride == (int64_t{c->heads} + int64_t{2} * c->kv_heads) * c->head_dim,
                       "attention: with cos_sin q_stride must be (heads + 2 * kv_heads) * head_dim");
      NFP_CAPI_REQUIRE(c->kv_type != NFP_KV_E4M3 || (c->key_scale == 1.0f && c->value_scale == 1.0f),
                       "attention: with cos_sin key_scale and value_scale must be 1");
    }
    const auto here = gpu->context.enter();
    AttentionCall call = call_of(*c);
    return body(call);
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
  return with_call(gpu, call, [&](AttentionCall& c) -> nfp_status {
    if (call->cos_sin != nullptr) {
      const auto needs = decode_needs(c);
      if (!needs.ok()) return fail(needs.error());
      if (c.sequences <= needs->most_rotated) {
        c.rotation = {
            .cos_sin = call->cos_sin, .q_norm = call->q_norm, .k_norm = call->k_norm, .norm_eps = call->norm_epsilon};
      } else {
        // A call that is refused has changed nothing.
        if (const auto status = check_decode(c); !status.ok()) return fail(status.error());
        if (const auto status = rotate(*call, 0, stream); !status.ok()) return fail(status.error());
      }
    }
    return done(run_decode(c, stream));
  });
}

nfp_status nfp_attention_prefill(nfp_gpu* gpu, const nfp_attention_call* call, nfp_stream stream) {
  return with_call(gpu, call, [&](const AttentionCall& c) -> nfp_status {
    if (call->cos_sin != nullptr) {
      if (const auto status = check_prefill(c); !status.ok()) return fail(status.error());
      if (const auto status = rotate(*call, call->tokens, stream); !status.ok()) return fail(status.error());
    }
    return done(run_prefill(c, stream));
  });
}

nfp_status nfp_attention_append(nfp_gpu* gpu, const nfp_attention_call* call, nfp_stream stream) {
  return with_call(gpu, call, [&](const AttentionCall&) -> nfp_status {
    NFP_CAPI_REQUIRE(call->cos_sin != nullptr && call->tokens >= 0, "attention: cos_sin or tokens is missing");
    const int64_t of_a_head = int64_t{call->block_size} * call->head_dim;
    NFP_CAPI_REQUIRE(call->block_stride == 0 || (of_a_head > 0 && call->block_stride % of_a_head == 0 &&
                                                 call->block_stride / of_a_head >= call->kv_heads),
                     "attention: block_stride must be a multiple of block_size * head_dim, and hold all of kv_heads");
    return done(rotate(*call, call->tokens, stream));
  });
}

}  // extern "C"
