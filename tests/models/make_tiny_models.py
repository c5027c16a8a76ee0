#!/usr/bin/env python3
"""Writes tiny random models as Hugging Face directories, for tests: make_tiny_models.py OUT [NAME...]

Numpy only, and the same bytes on every machine: random bits come from PCG64's raw stream, which numpy keeps stable, and
become weights by exact arithmetic and one rounding. Exits with 77 (a skipped test) where numpy is missing.

Between them the models have: tied and separate heads, grouped, multi-query and plain attention, head_dim given and left
out, Llama 3 and linear RoPE scaling, a sliding window on all layers and on some, biases on all matrices and on q, k and v,
normalised queries and keys, F16, BF16 and F32 weights, one file and several shards, rows that need an exponent to be
nested, one matrix that cannot be nested, BF16 values too small for FP16, the chat template in either of its places, one
matrix for q, k and v and one for gate and up, heads of which a part rotates, LongRoPE and YaRN, norms of (1 + weight)
before and after attention and MLP, norms only after them, GeGLU, factors of what is added to the stream and of logits, scaled embeddings, soft caps, a rotary base of their own for layers with a
window, layers whose heads do not rotate, experts in all layers and in some, with weights that sum to 1 and that do not,
a shared expert, a norm of all query heads together, and linear layers that are FP8 already: with a scale a matrix, a row and
a block.
"""

import argparse
import json
import os
import shutil
import sys

try:
    import numpy as np
except ImportError:
    print("skipped: numpy is not installed (scripts/test installs it)")
    sys.exit(77)

import e4m3
import safetensors_file
import tiny_tokenizer

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

# name -> how the model is made. "config" is config.json's part that differs from COMMON.
MODELS = {
    "llama-tied": {
        "seed": 11,
        "dtype": "F16",
        "shards": 1,
        "tokenizer": "smollm2",
        "large_rows": True,
        "config": {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 176,
                   "num_hidden_layers": 2, "tie_word_embeddings": True},
    },
    "llama-headdim": {
        "seed": 12,
        "dtype": "BF16",
        "shards": 3,
        "tokenizer": "gpt2",
        "template_file": True,
        "large_rows": True,
        "tiny_values": True,
        "config": {"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 32,
                   "intermediate_size": 112, "num_hidden_layers": 3, "rms_norm_eps": 1e-6},
    },
    "llama3-rope": {
        "seed": 13,
        "dtype": "F32",
        "shards": 1,
        "tokenizer": "llama3",
        "config": {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16,
                   "intermediate_size": 128, "num_hidden_layers": 2, "rope_theta": 500000.0, "rope_scaling": LLAMA3_ROPE},
    },
    "mistral": {
        "seed": 14,
        "dtype": "F16",
        "shards": 2,
        "tokenizer": "gpt2",
        "large_rows": True,
        "dense_matrix": "model.layers.1.self_attn.o_proj.weight",
        "config": {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "hidden_size": 64,
                   "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 96,
                   "num_hidden_layers": 2, "rope_theta": 1000000.0, "sliding_window": 24},
    },
    "llama-bias": {
        "seed": 15,
        "dtype": "F16",
        "shards": 1,
        "tokenizer": "smollm2",
        "config": {"hidden_size": 40, "num_attention_heads": 5, "num_key_value_heads": 1, "intermediate_size": 72,
                   "num_hidden_layers": 2, "attention_bias": True, "mlp_bias": True,
                   "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    },
    "qwen2": {
        "seed": 16,
        "dtype": "F16",
        "shards": 1,
        "tokenizer": "qwen2",
        "large_rows": True,
        "config": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 56,
                   "num_attention_heads": 7, "num_key_value_heads": 1, "intermediate_size": 152, "num_hidden_layers": 3,
                   "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "tie_word_embeddings": True,
                   "use_sliding_window": True, "sliding_window": 28, "max_window_layers": 1},
    },
    "qwen3": {
        "seed": 17,
        "dtype": "BF16",
        "shards": 2,
        "tokenizer": "qwen2",
        "config": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 48,
                   "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24, "intermediate_size": 128,
                   "num_hidden_layers": 3, "attention_bias": True, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
                   "use_sliding_window": True, "sliding_window": 28,
                   "layer_types": ["full_attention", "sliding_attention", "full_attention"]},
    },
    # With a head_dim that is a multiple of 16, which attention on a GPU needs.
    "qwen2-heads16": {
        "seed": 18,
        "dtype": "F16",
        "shards": 1,
        "tokenizer": "qwen2",
        "large_rows": True,
        "config": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 64,
                   "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 160, "num_hidden_layers": 2,
                   "rms_norm_eps": 1e-6, "rope_theta": 1000000.0},
    },
    "qwen3-yarn": {
        "seed": 19,
        "dtype": "F16",
        "shards": 1,
        "tokenizer": "qwen2",
        "config": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 64,
                   "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 128,
                   "num_hidden_layers": 2, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
                   "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
    },
    # Positions of the golden tests stay within the original context: beyond it transformers has other frequencies for
    # long sequences than for short ones, and a server whose context reaches beyond has one set.
    "phi3": {
        "seed": 20,
        "dtype": "BF16",
        "shards": 1,
        "tokenizer": "gpt2",
        "large_rows": True,
        "config": {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "hidden_size": 64,
                   "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 112, "num_hidden_layers": 2,
                   "partial_rotary_factor": 0.5, "sliding_window": 40, "max_position_embeddings": 1024,
                   "original_max_position_embeddings": 256, "pad_token_id": 2,
                   "rope_scaling": {"type": "longrope", "short_factor": [1.0, 1.05, 1.1, 1.25, 1.5, 1.75, 2.0, 2.5],
                                    "long_factor": [1.0, 1.5, 2.0, 4.0, 8.0, 16.0, 24.0, 32.0]}},
    },
    "gemma": {
        "seed": 51,
        "embedding": 0.125,  # times sqrt(hidden), as large as what the layers add
        "dtype": "F16",
        "shards": 1,
        "tokenizer": "gpt2",
        "large_rows": True,
        "config": {"architectures": ["GemmaForCausalLM"], "model_type": "gemma", "hidden_size": 64,
                   "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 32, "intermediate_size": 144,
                   "num_hidden_layers": 3, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
                   "hidden_act": "gelu_pytorch_tanh", "attention_bias": True},
    },
    "gemma2": {
        "seed": 21,
        "embedding": 0.125,  # times sqrt(hidden), as large as what the layers add
        "dtype": "F16",
        "shards": 2,
        "tokenizer": "gpt2",
        "large_rows": True,
        "config": {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "hidden_size": 64,
                   "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 128,
                   "num_hidden_layers": 3, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
                   "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh",
                   "query_pre_attn_scalar": 24, "sliding_window": 24, "attn_logit_softcapping": 3.0,
                   "final_logit_softcapping": 6.0},
    },
    "gemma3": {
        "seed": 22,
        "embedding": 0.125,
        "dtype": "BF16",
        "shards": 1,
        "tokenizer": "gpt2",
        "config": {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "hidden_size": 64,
                   "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 32, "intermediate_size": 112,
                   "num_hidden_layers": 3, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
                   "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 40, "sliding_window": 24,
                   "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
                   "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0,
                   "rope_scaling": {"rope_type": "linear", "factor": 8.0},
                   "attn_logit_softcapping": None, "final_logit_softcapping": None},
    },
    "phi4-mini": {
        "seed": 23,
        "dtype": "F16",
        "shards": 1,
        "tokenizer": "gpt2",
        "large_rows": True,
        "config": {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "hidden_size": 96,
                   "num_attention_heads": 3, "num_key_value_heads": 1, "intermediate_size": 128, "num_hidden_layers": 2,
                   "partial_rotary_factor": 0.75, "sliding_window": None, "max_position_embeddings": 512,
                   "original_max_position_embeddings": 512, "pad_token_id": 2, "tie_word_embeddings": True,
                   "rope_scaling": {"type": "longrope", "short_factor": [1.0 + i / 16 for i in range(12)],
                                    "long_factor": [1.0 + i for i in range(12)]}},
    },
    "llama-yarn": {
        "seed": 24,
        "dtype": "BF16",
        "shards": 1,
        "tokenizer": "smollm2",
        "config": {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 48,
                   "intermediate_size": 96, "num_hidden_layers": 2, "rope_theta": 50000.0,
                   "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32}},
    },
    "smollm3": {
        "seed": 25,
        "dtype": "BF16",
        "shards": 1,
        "tokenizer": "llama3",
        "large_rows": True,
        "config": {"architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "hidden_size": 64,
                   "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 112, "num_hidden_layers": 4,
                   "rms_norm_eps": 1e-6, "rope_theta": 2000000.0, "tie_word_embeddings": True,
                   "no_rope_layers": [1, 0, 1, 0], "no_rope_layer_interval": 2, "use_sliding_window": False,
                   "sliding_window": None, "layer_types": ["full_attention"] * 4, "pad_token_id": 2},
    },
    "smollm3-window": {
        "seed": 26,
        "dtype": "F16",
        "shards": 1,
        "tokenizer": "llama3",
        "config": {"architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "hidden_size": 48,
                   "num_attention_heads": 3, "num_key_value_heads": 1, "intermediate_size": 80, "num_hidden_layers": 3,
                   "rms_norm_eps": 1e-6, "attention_bias": True, "mlp_bias": True, "no_rope_layer_interval": 2,
                   "use_sliding_window": True, "sliding_window": 24, "pad_token_id": 2},
    },
    "mixtral": {
        "seed": 27,
        "dtype": "BF16",
        "shards": 3,
        "tokenizer": "gpt2",
        "large_rows": True,
        "config": {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_size": 64,
                   "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 80, "num_hidden_layers": 2,
                   "rope_theta": 1000000.0, "num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 24},
    },
    "qwen2-moe": {
        "seed": 28,
        "dtype": "F16",
        "shards": 1,
        "tokenizer": "qwen2",
        "large_rows": True,
        "dense_matrix": "model.layers.1.mlp.experts.2.down_proj.weight",
        "config": {"architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe", "hidden_size": 64,
                   "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96, "num_hidden_layers": 3,
                   "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "num_experts": 6, "num_experts_per_tok": 3,
                   "moe_intermediate_size": 40, "shared_expert_intermediate_size": 72, "norm_topk_prob": False,
                   "decoder_sparse_step": 1, "mlp_only_layers": [2], "use_sliding_window": False},
    },
    "qwen3-moe": {
        "seed": 29,
        "dtype": "BF16",
        "shards": 2,
        "tokenizer": "qwen2",
        "config": {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 64,
                   "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24, "intermediate_size": 96,
                   "num_hidden_layers": 4, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "num_experts": 8,
                   "num_experts_per_tok": 3, "moe_intermediate_size": 40, "norm_topk_prob": True,
                   "decoder_sparse_step": 2, "mlp_only_layers": [], "use_sliding_window": False},
    },
    "qwen3-moe-window": {
        "seed": 30,
        "dtype": "F16",
        "shards": 1,
        "tokenizer": "qwen2",
        "config": {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 48,
                   "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "intermediate_size": 96,
                   "num_hidden_layers": 2, "rms_norm_eps": 1e-6, "attention_bias": True, "num_experts": 4,
                   "num_experts_per_tok": 4, "moe_intermediate_size": 32, "norm_topk_prob": False,
                   "decoder_sparse_step": 1, "mlp_only_layers": [], "use_sliding_window": True, "sliding_window": 28,
                   "tie_word_embeddings": True},
    },
    "olmoe": {
        "seed": 31,
        "dtype": "F32",
        "shards": 1,
        "tokenizer": "gpt2",
        "large_rows": True,
        "config": {"architectures": ["OlmoeForCausalLM"], "model_type": "olmoe", "hidden_size": 64,
                   "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48, "num_hidden_layers": 2,
                   "num_experts": 8, "num_experts_per_tok": 4, "norm_topk_prob": False, "clip_qkv": None,
                   "pad_token_id": 1},
    },
    "olmo2": {
        "seed": 52,
        "dtype": "F16",
        "shards": 2,
        "tokenizer": "gpt2",
        "large_rows": True,
        "dense_matrix": "model.layers.1.mlp.down_proj.weight",
        "config": {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2", "hidden_size": 64,
                   "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 112, "num_hidden_layers": 3,
                   "rms_norm_eps": 1e-6, "rope_theta": 500000.0, "pad_token_id": 1},
    },
    "olmo2-tied": {
        "seed": 53,
        "dtype": "BF16",
        "shards": 1,
        "tokenizer": "gpt2",
        "config": {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2", "hidden_size": 48,
                   "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 32, "intermediate_size": 80,
                   "num_hidden_layers": 2, "rms_norm_eps": 1e-6, "attention_bias": True, "tie_word_embeddings": True,
                   "rope_scaling": {"type": "linear", "factor": 4.0}, "pad_token_id": 1},
    },
    "olmo3": {
        "seed": 54,
        "dtype": "BF16",
        "shards": 1,
        "tokenizer": "llama3",
        "large_rows": True,
        "config": {"architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3", "hidden_size": 64,
                   "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96, "num_hidden_layers": 5,
                   "rms_norm_eps": 1e-6, "rope_theta": 50000.0, "sliding_window": 24, "pad_token_id": 1,
                   "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}},
    },
    "granite": {
        "seed": 55,
        "dtype": "BF16",
        "shards": 1,
        "tokenizer": "smollm2",
        "large_rows": True,
        "config": {"architectures": ["GraniteForCausalLM"], "model_type": "granite", "hidden_size": 64,
                   "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 112, "num_hidden_layers": 3,
                   "tie_word_embeddings": True, "embedding_multiplier": 1.5, "residual_multiplier": 0.44,
                   "attention_multiplier": 0.0625, "logits_scaling": 2.0},
    },
    "granite-bias": {
        "seed": 56,
        "dtype": "F16",
        "shards": 1,
        "tokenizer": "smollm2",
        "config": {"architectures": ["GraniteForCausalLM"], "model_type": "granite", "hidden_size": 96,
                   "num_attention_heads": 3, "num_key_value_heads": 1, "intermediate_size": 96, "num_hidden_layers": 2,
                   "attention_bias": True, "mlp_bias": True, "embedding_multiplier": 6.0, "residual_multiplier": 1.5,
                   "attention_multiplier": 0.25, "logits_scaling": 3.0, "rms_norm_eps": 1e-2,
                   "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    },
    # Every prompt reaches past the original context, so that all positions have the long factors in transformers too.
    "phi3-long": {
        "seed": 57,
        "dtype": "F16",
        "shards": 1,
        "tokenizer": "gpt2",
        "large_rows": True,
        "least_tokens": 33,
        "config": {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "hidden_size": 64,
                   "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 96, "num_hidden_layers": 2,
                   "partial_rotary_factor": 1.0, "sliding_window": None, "max_position_embeddings": 512,
                   "original_max_position_embeddings": 32, "pad_token_id": 2,
                   "rope_scaling": {"type": "longrope", "short_factor": [1.0 + i / 32 for i in range(16)],
                                    "long_factor": [1.0 + i * i / 4 for i in range(16)]}},
    },
    "mistral-full": {
        "seed": 58,
        "dtype": "BF16",
        "shards": 1,
        "tokenizer": "gpt2",
        "config": {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "hidden_size": 96,
                   "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 16, "intermediate_size": 112,
                   "num_hidden_layers": 3, "rope_theta": 1000000.0, "sliding_window": None, "tie_word_embeddings": True,
                   "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}},
    },
    "mixtral-full": {
        "seed": 59,
        "dtype": "F16",
        "shards": 1,
        "tokenizer": "gpt2",
        "dense_matrix": "model.layers.0.block_sparse_moe.experts.1.w2.weight",
        "config": {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_size": 48,
                   "num_attention_heads": 3, "num_key_value_heads": 1, "intermediate_size": 64, "num_hidden_layers": 3,
                   "num_local_experts": 4, "num_experts_per_tok": 1, "sliding_window": None, "rms_norm_eps": 1e-6,
                   "tie_word_embeddings": True},
    },
    "gemma2-uncapped": {
        "seed": 60,
        "embedding": 0.125,
        "dtype": "BF16",
        "shards": 1,
        "tokenizer": "gpt2",
        "config": {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "hidden_size": 48,
                   "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "intermediate_size": 96,
                   "num_hidden_layers": 4, "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "attention_bias": True,
                   "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh",
                   "query_pre_attn_scalar": 32, "sliding_window": 28,
                   "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
                   "attn_logit_softcapping": None, "final_logit_softcapping": None},
    },
    "gemma3-pattern": {
        "seed": 61,
        "embedding": 0.125,
        "dtype": "F16",
        "shards": 2,
        "tokenizer": "gpt2",
        "large_rows": True,
        "config": {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "hidden_size": 64,
                   "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96,
                   "num_hidden_layers": 5, "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "attention_bias": True,
                   "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 16, "sliding_window": 28,
                   "sliding_window_pattern": 2, "rope_theta": 500000.0, "rope_local_base_freq": 5000.0,
                   "attn_logit_softcapping": None, "final_logit_softcapping": 6.0},
    },
    "qwen2-moe-sparse": {
        "seed": 62,
        "dtype": "BF16",
        "shards": 2,
        "tokenizer": "qwen2",
        "config": {"architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe", "hidden_size": 64,
                   "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 96, "num_hidden_layers": 6,
                   "rms_norm_eps": 1e-6, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
                   "shared_expert_intermediate_size": 48, "norm_topk_prob": True, "decoder_sparse_step": 2,
                   "mlp_only_layers": [3], "use_sliding_window": False, "qkv_bias": False, "tie_word_embeddings": True},
    },
    "olmoe-norm": {
        "seed": 63,
        "dtype": "BF16",
        "shards": 1,
        "tokenizer": "gpt2",
        "config": {"architectures": ["OlmoeForCausalLM"], "model_type": "olmoe", "hidden_size": 48,
                   "num_attention_heads": 3, "num_key_value_heads": 3, "intermediate_size": 64, "num_hidden_layers": 2,
                   "num_experts": 5, "num_experts_per_tok": 2, "norm_topk_prob": True, "clip_qkv": None,
                   "attention_bias": True, "tie_word_embeddings": True, "pad_token_id": 1},
    },
    "olmo3-tied": {
        "seed": 64,
        "dtype": "F16",
        "shards": 2,
        "tokenizer": "llama3",
        "dense_matrix": "model.layers.2.self_attn.o_proj.weight",
        "config": {"architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3", "hidden_size": 48,
                   "num_attention_heads": 3, "num_key_value_heads": 1, "intermediate_size": 80, "num_hidden_layers": 3,
                   "rms_norm_eps": 1e-5, "attention_bias": True, "tie_word_embeddings": True, "sliding_window": 28,
                   "layer_types": ["full_attention", "sliding_attention", "full_attention"], "pad_token_id": 1},
    },
    "seed-oss": {
        "seed": 65,
        "dtype": "BF16",
        "shards": 2,
        "tokenizer": "gpt2",
        "large_rows": True,
        "config": {"architectures": ["SeedOssForCausalLM"], "model_type": "seed_oss", "hidden_size": 64,
                   "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 112,
                   "num_hidden_layers": 3, "rms_norm_eps": 1e-6, "rope_theta": 10000000.0},
    },
    "seed-oss-bias": {
        "seed": 66,
        "dtype": "F16",
        "shards": 1,
        "tokenizer": "gpt2",
        "dense_matrix": "model.layers.1.self_attn.o_proj.weight",
        "config": {"architectures": ["SeedOssForCausalLM"], "model_type": "seed_oss", "hidden_size": 48,
                   "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 80,
                   "num_hidden_layers": 2, "rms_norm_eps": 1e-5, "attention_bias": False, "attention_out_bias": True,
                   "mlp_bias": True, "tie_word_embeddings": True,
                   "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
    },
    "exaone4": {
        "seed": 67,
        "dtype": "BF16",
        "shards": 1,
        "tokenizer": "gpt2",
        "large_rows": True,
        "config": {"architectures": ["Exaone4ForCausalLM"], "model_type": "exaone4", "hidden_size": 64,
                   "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 96,
                   "num_hidden_layers": 5, "rope_theta": 1000000.0, "sliding_window": 24, "sliding_window_pattern": 2,
                   "rope_scaling": LLAMA3_ROPE},
    },
    "exaone4-full": {
        "seed": 68,
        "dtype": "F16",
        "shards": 2,
        "tokenizer": "gpt2",
        "dense_matrix": "model.layers.0.self_attn.o_proj.weight",
        "config": {"architectures": ["Exaone4ForCausalLM"], "model_type": "exaone4", "hidden_size": 48,
                   "num_attention_heads": 3, "num_key_value_heads": 1, "intermediate_size": 80, "num_hidden_layers": 2,
                   "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "sliding_window": None,
                   "sliding_window_pattern": None, "layer_types": ["full_attention", "full_attention"]},
    },
    "glm": {
        "seed": 69,
        "dtype": "F16",
        "shards": 1,
        "tokenizer": "gpt2",
        "large_rows": True,
        "config": {"architectures": ["GlmForCausalLM"], "model_type": "glm", "hidden_size": 64,
                   "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 112,
                   "num_hidden_layers": 2, "rms_norm_eps": 1.5625e-07, "pad_token_id": 2},
    },
    "glm-tied": {
        "seed": 70,
        "dtype": "BF16",
        "shards": 1,
        "tokenizer": "gpt2",
        "config": {"architectures": ["GlmForCausalLM"], "model_type": "glm", "hidden_size": 48,
                   "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 32, "intermediate_size": 80,
                   "num_hidden_layers": 3, "attention_bias": False, "partial_rotary_factor": 0.75, "pad_token_id": 2,
                   "tie_word_embeddings": True, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    },
    "glm4": {
        "seed": 71,
        "dtype": "BF16",
        "shards": 2,
        "tokenizer": "gpt2",
        "large_rows": True,
        "config": {"architectures": ["Glm4ForCausalLM"], "model_type": "glm4", "hidden_size": 64,
                   "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 96,
                   "num_hidden_layers": 3, "rms_norm_eps": 1e-05, "partial_rotary_factor": 0.5, "pad_token_id": 2,
                   "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
    },
    "glm4-tied": {
        "seed": 72,
        "dtype": "F16",
        "shards": 1,
        "tokenizer": "gpt2",
        "dense_matrix": "model.layers.1.self_attn.o_proj.weight",
        "config": {"architectures": ["Glm4ForCausalLM"], "model_type": "glm4", "hidden_size": 48,
                   "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 80,
                   "num_hidden_layers": 2, "attention_bias": False, "partial_rotary_factor": 1.0, "pad_token_id": 2,
                   "tie_word_embeddings": True},
    },
    "ernie4-5": {
        "seed": 73,
        "dtype": "BF16",
        "shards": 1,
        "tokenizer": "gpt2",
        "large_rows": True,
        "config": {"architectures": ["Ernie4_5ForCausalLM"], "model_type": "ernie4_5", "hidden_size": 64,
                   "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 112,
                   "num_hidden_layers": 3, "rope_theta": 500000.0, "tie_word_embeddings": True},
    },
    "ernie4-5-bias": {
        "seed": 74,
        "dtype": "F16",
        "shards": 2,
        "tokenizer": "gpt2",
        "dense_matrix": "model.layers.0.mlp.down_proj.weight",
        "config": {"architectures": ["Ernie4_5ForCausalLM"], "model_type": "ernie4_5", "hidden_size": 48,
                   "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 80,
                   "num_hidden_layers": 2, "rms_norm_eps": 1e-06, "use_bias": True, "rope_scaling": LLAMA3_ROPE},
    },
    "ministral": {
        "seed": 75,
        "dtype": "BF16",
        "shards": 1,
        "tokenizer": "gpt2",
        "large_rows": True,
        "config": {"architectures": ["MinistralForCausalLM"], "model_type": "ministral", "hidden_size": 64,
                   "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 96,
                   "num_hidden_layers": 3, "rope_theta": 100000000.0, "sliding_window": 24,
                   "layer_types": ["full_attention", "sliding_attention", "sliding_attention"]},
    },
    "ministral-all": {
        "seed": 76,
        "dtype": "F16",
        "shards": 2,
        "tokenizer": "gpt2",
        "dense_matrix": "model.layers.1.mlp.down_proj.weight",
        "config": {"architectures": ["MinistralForCausalLM"], "model_type": "ministral", "hidden_size": 48,
                   "num_attention_heads": 3, "num_key_value_heads": 1, "intermediate_size": 80, "num_hidden_layers": 2,
                   "rms_norm_eps": 1e-6, "head_dim": 16, "sliding_window": 28, "tie_word_embeddings": True,
                   "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
    },
    "helium": {
        "seed": 77,
        "dtype": "BF16",
        "shards": 1,
        "tokenizer": "gpt2",
        "large_rows": True,
        "config": {"architectures": ["HeliumForCausalLM"], "model_type": "helium", "hidden_size": 64,
                   "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 112,
                   "num_hidden_layers": 3, "rms_norm_eps": 1e-8, "rope_theta": 100000.0},
    },
    "helium-bias": {
        "seed": 78,
        "dtype": "F16",
        "shards": 1,
        "tokenizer": "gpt2",
        "dense_matrix": "model.layers.0.self_attn.o_proj.weight",
        "config": {"architectures": ["HeliumForCausalLM"], "model_type": "helium", "hidden_size": 96,
                   "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 32, "intermediate_size": 80,
                   "num_hidden_layers": 2, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True,
                   "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    },
    "phi4-fp8-tensor": {
        "seed": 32,
        "dtype": "BF16",
        "shards": 1,
        "tokenizer": "gpt2",
        "fp8": "tensor",
        "config": {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "hidden_size": 64,
                   "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 112, "num_hidden_layers": 2,
                   "partial_rotary_factor": 0.5, "pad_token_id": 2,
                   "quantization_config": {"quant_method": "fp8", "activation_scheme": "static",
                                           "ignored_layers": ["lm_head"]}},
    },
    "qwen3-fp8-channel": {
        "seed": 33,
        "dtype": "BF16",
        "shards": 2,
        "tokenizer": "qwen2",
        "fp8": "channel",
        "config": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 48,
                   "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 32, "intermediate_size": 80,
                   "num_hidden_layers": 2, "attention_bias": True, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
                   "quantization_config": {
                       "quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"],
                       "quantization_status": "compressed", "config_groups": {"group_0": {
                           "targets": ["Linear"],
                           "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "dynamic": False},
                           "input_activations": {"num_bits": 8, "type": "float", "strategy": "token",
                                                 "dynamic": True}}}}},
    },
    "qwen3-moe-fp8-block": {
        "seed": 34,
        "dtype": "F16",
        "shards": 1,
        "tokenizer": "qwen2",
        "fp8": "block",
        "config": {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 64,
                   "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 96,
                   "num_hidden_layers": 2, "rms_norm_eps": 1e-6, "num_experts": 4, "num_experts_per_tok": 2,
                   "moe_intermediate_size": 40, "norm_topk_prob": True, "decoder_sparse_step": 2, "mlp_only_layers": [],
                   "use_sliding_window": False,
                   "quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3",
                                           "weight_block_size": [24, 20]}},
    },
}

COMMON = {
    "architectures": ["LlamaForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 512,
    "model_type": "llama",
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "use_cache": True,
    "vocab_size": tiny_tokenizer.VOCABULARY,
}

TORCH_DTYPE = {"F16": "float16", "BF16": "bfloat16", "F32": "float32"}


class Random:
    """Bell-shaped numbers (sums of four 16-bit uniforms) with mean 0 and deviation 1, from PCG64's raw 64-bit stream."""

    def __init__(self, seed):
        self._bits = np.random.PCG64(seed)

    def normal(self, *shape):
        raw = np.asarray(self._bits.random_raw(int(np.prod(shape))), np.uint64)
        total = sum((raw >> np.uint64(16 * i)) & np.uint64(0xFFFF) for i in range(4)).astype(np.float64)
        return ((total - 131070.0) / 37837.2).reshape(shape)

    def integers(self, low, high, count):
        raw = np.asarray(self._bits.random_raw(count), np.uint64)
        return (low + (raw % np.uint64(high - low)).astype(np.int64)).tolist()


def full_config(name):
    spec = MODELS[name]
    return {**COMMON, **spec["config"], "torch_dtype": TORCH_DTYPE[spec["dtype"]]}


def experts_of(config):
    return config.get("num_local_experts", config.get("num_experts", 0))


def has_experts(config, layer):
    sparse = (layer + 1) % config.get("decoder_sparse_step", 1) == 0
    return experts_of(config) > 0 and sparse and layer not in config.get("mlp_only_layers", [])


def expert_names(config, layer, expert):
    """Gate, up and down."""
    if config["model_type"] == "mixtral":
        return [f"model.layers.{layer}.block_sparse_moe.experts.{expert}.{part}.weight" for part in ("w1", "w3", "w2")]
    return [f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight" for part in ("gate", "up", "down")]


def router_shapes(config):
    """Names of the matrices that route tokens, with their shapes."""
    shapes = {}
    for layer in range(config["num_hidden_layers"]):
        if not has_experts(config, layer):
            continue
        block = f"model.layers.{layer}." + ("block_sparse_moe" if config["model_type"] == "mixtral" else "mlp")
        shapes[block + ".gate.weight"] = (experts_of(config), config["hidden_size"])
        if config.get("shared_expert_intermediate_size"):
            shapes[block + ".shared_expert_gate.weight"] = (1, config["hidden_size"])
    return shapes


def linear_names(config):
    """Names of the linear matrices, lm_head included where it is separate, with their shapes [n, k]."""
    hidden, inter = config["hidden_size"], config["intermediate_size"]
    head = config.get("head_dim", hidden // config["num_attention_heads"])
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    shapes = {}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        if config["model_type"] == "phi3":
            shapes[prefix + "self_attn.qkv_proj.weight"] = (q + 2 * kv, hidden)
        else:
            shapes[prefix + "self_attn.q_proj.weight"] = (q, hidden)
            shapes[prefix + "self_attn.k_proj.weight"] = (kv, hidden)
            shapes[prefix + "self_attn.v_proj.weight"] = (kv, hidden)
        shapes[prefix + "self_attn.o_proj.weight"] = (hidden, q)
        if has_experts(config, layer):
            wide = config.get("moe_intermediate_size", inter)
            for expert in range(experts_of(config)):
                gate, up, down = expert_names(config, layer, expert)
                shapes.update({gate: (wide, hidden), up: (wide, hidden), down: (hidden, wide)})
            wide = config.get("shared_expert_intermediate_size")
            if wide:
                shared = prefix + "mlp.shared_expert."
                shapes.update({shared + "gate_proj.weight": (wide, hidden), shared + "up_proj.weight": (wide, hidden),
                               shared + "down_proj.weight": (hidden, wide)})
            continue
        if config["model_type"] in ("phi3", "glm", "glm4"):
            shapes[prefix + "mlp.gate_up_proj.weight"] = (2 * inter, hidden)
        else:
            shapes[prefix + "mlp.gate_proj.weight"] = (inter, hidden)
            shapes[prefix + "mlp.up_proj.weight"] = (inter, hidden)
        shapes[prefix + "mlp.down_proj.weight"] = (hidden, inter)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return shapes


def has_bias(config, tensor):
    if config["model_type"] == "ernie4_5":
        return config.get("use_bias", False) and "lm_head" not in tensor
    if ".self_attn." in tensor:
        if config["model_type"] in ("glm", "glm4", "helium"):
            return "o_proj" not in tensor and config.get("attention_bias", config["model_type"] != "helium")
        qwen2 = config["model_type"] in ("qwen2", "qwen2_moe")
        if config["model_type"] == "seed_oss":
            return config.get("attention_out_bias", False) if "o_proj" in tensor else config.get("attention_bias", True)
        return "o_proj" not in tensor and config.get("qkv_bias", True) if qwen2 else config.get("attention_bias", False)
    return ".mlp." in tensor and config.get("mlp_bias", False)


def add_large_rows(random, matrix):
    """Gives three rows one weight of 2 to 9.25 each. Their other weights are kept multiples of 2^-20, so that the row
    divided by 8 or 16 is still exact in FP16."""
    rows = random.integers(0, matrix.shape[0], 3)
    columns = random.integers(0, matrix.shape[1], 3)
    for row, column, large in zip(rows, columns, (2.0, -5.25, 9.25)):
        matrix[row] = np.round(matrix[row] * 2.0**20) / 2.0**20
        matrix[row, column] = large


def make_weights(name):
    """name -> float64 array, in the order of the file; rounding to the dtype comes later."""
    spec, config = MODELS[name], full_config(name)
    random = Random(spec["seed"])
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    weights = {"model.embed_tokens.weight": random.normal(config["vocab_size"], hidden) * spec.get("embedding", 0.25)}
    shapes = linear_names(config)
    for i, (tensor, (n, k)) in enumerate(shapes.items()):
        matrix = random.normal(n, k) * (1.2 / np.sqrt(k))
        if spec["dtype"] == "BF16":
            # What BF16 makes of a multiple of 2^-16 is exact in FP16 too.
            matrix = np.round(matrix * 2.0**16) / 2.0**16
        if spec.get("large_rows") and i % 3 == 1:
            add_large_rows(random, matrix)
        if tensor == spec.get("dense_matrix"):
            # No exponent serves this row: 5 needs division by 4, and 2^-24 is FP16's smallest number.
            matrix[7, 0:2] = (5.0, 2.0**-24)
        if spec.get("tiny_values") and tensor.endswith("v_proj.weight"):
            # Zero in FP16, whatever the row's exponent; too small to be felt in the logits.
            matrix[3, 0:4] = np.array([1.0, -1.5, 1.25, 1.0]) * 2.0**-60
        weights[tensor] = matrix
    for tensor, (n, k) in router_shapes(config).items():
        weights[tensor] = np.round(random.normal(n, k) * 2.0**8) / 2.0**8
    for tensor, (n, _) in shapes.items():
        if has_bias(config, tensor):
            weights[tensor.replace(".weight", ".bias")] = np.round(random.normal(n) * 16.0) / 64.0
    gemma = config["model_type"].startswith("gemma")
    places = ("input", "post_attention")
    if config["model_type"] in ("gemma2", "gemma3_text"):
        places += ("pre_feedforward", "post_feedforward")
    elif config["model_type"] in ("olmo2", "olmo3", "exaone4"):
        places = ("post_attention", "post_feedforward")
    elif config["model_type"] == "glm4":
        places += ("post_self_attn", "post_mlp")
    norms = [f"model.layers.{i}.{n}_layernorm.weight" for i in range(layers) for n in places]
    one = 0.0 if gemma else 1.0
    spanning = config["model_type"] in ("olmo2", "olmo3", "olmoe")
    for tensor in [*norms, "model.norm.weight"]:
        # Multiples of 1/64 near 1 are exact in every dtype.
        weights[tensor] = one + np.round(random.normal(hidden) * 8.0) / 64.0
    if config["model_type"] in ("qwen3", "gemma3_text", "qwen3_moe", "olmo2", "olmo3", "olmoe", "exaone4"):
        for i in range(layers):
            for part, heads in (("q", "num_attention_heads"), ("k", "num_key_value_heads")):
                head_dim = config.get("head_dim", hidden // config["num_attention_heads"])
                size = head_dim * config[heads] if spanning else head_dim
                values = one + np.round(random.normal(size) * 8.0) / 64.0
                weights[f"model.layers.{i}.self_attn.{part}_norm.weight"] = values
    if spec["dtype"] == "F32":
        embedding = weights["model.embed_tokens.weight"]
        weights["model.embed_tokens.weight"] = embedding.astype(np.float16).astype(np.float64)
    return weights


def stored(dtype, values):
    if dtype == "BF16":
        return safetensors_file.f32_to_bf16(values.astype(np.float32))
    return values.astype(safetensors_file.STORAGE[dtype])


def quantised(name, tensor, values):
    """What the file of an FP8 model holds for one tensor: codes, and scales of which a product with a code is exact in
    float32 (BF16 numbers)."""
    spec, config = MODELS[name], full_config(name)
    if "fp8" not in spec or tensor not in linear_names(config) or tensor == "lm_head.weight":
        return {tensor: (spec["dtype"], stored(spec["dtype"], values))}
    rows, columns = values.shape
    down, across = {"tensor": (rows, columns), "channel": (1, columns), "block": (24, 20)}[spec["fp8"]]
    scales = np.array([[np.abs(values[r : r + down, c : c + across]).max() / 448 for c in range(0, columns, across)]
                       for r in range(0, rows, down)])
    bits = safetensors_file.f32_to_bf16(scales.astype(np.float32))
    scales = safetensors_file.to_f32("BF16", bits).astype(np.float64)
    spread = np.repeat(np.repeat(scales, down, 0)[:rows], across, 1)[:, :columns]
    codes = e4m3.code_of(e4m3.nearest(np.clip(values / spread, -448, 448)))
    found = {tensor: ("F8_E4M3", codes)}
    if spec["fp8"] == "tensor":
        found[tensor + "_scale"] = ("F32", scales.astype(np.float32).reshape(1))
        found[tensor.replace(".weight", ".input_scale")] = ("F32", np.full(1, 0.05, np.float32))
    elif spec["fp8"] == "channel":
        found[tensor + "_scale"] = ("BF16", bits.reshape(rows, 1))
    else:
        found[tensor + "_scale_inv"] = ("F32", scales.astype(np.float32))
    return found


def write_weights(folder, tensors, shards):
    metadata = {"format": "pt"}
    if shards == 1:
        safetensors_file.write(os.path.join(folder, "model.safetensors"), tensors, metadata)
        return
    names, index, total = list(tensors), {}, 0
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = names[len(names) * shard // shards : len(names) * (shard + 1) // shards]
        total += safetensors_file.write(os.path.join(folder, file), {n: tensors[n] for n in part}, metadata)
        index.update({n: file for n in part})
    write_json(os.path.join(folder, "model.safetensors.index.json"),
               {"metadata": {"total_size": total}, "weight_map": dict(sorted(index.items()))})


def write_json(path, value):
    with open(path, "w", encoding="utf-8") as file:
        json.dump(value, file, indent=2, ensure_ascii=False)
        file.write("\n")


def make_model(out, name):
    spec, config = MODELS[name], full_config(name)
    folder = os.path.join(out, name)
    shutil.rmtree(folder, ignore_errors=True)
    os.makedirs(folder)
    tensors = {}
    for tensor, values in make_weights(name).items():
        tensors.update(quantised(name, tensor, values))
    write_weights(folder, tensors, spec["shards"])
    write_json(os.path.join(folder, "config.json"), config)
    write_json(os.path.join(folder, "generation_config.json"),
               {"bos_token_id": 0, "eos_token_id": [2, 0], "pad_token_id": 2})
    write_json(os.path.join(folder, "tokenizer.json"), tiny_tokenizer.tokenizer_json(spec["tokenizer"]))
    in_file = spec.get("template_file", False)
    write_json(os.path.join(folder, "tokenizer_config.json"), tiny_tokenizer.tokenizer_config(not in_file))
    if in_file:
        with open(os.path.join(folder, "chat_template.jinja"), "w", encoding="utf-8") as file:
            file.write(tiny_tokenizer.CHATML)
    return folder


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", help="folder that gets one folder per model; models of the same name there are replaced")
    parser.add_argument("names", nargs="*", metavar="NAME", help="which models (default: all): " + ", ".join(MODELS))
    arguments = parser.parse_args()
    unknown = [name for name in arguments.names if name not in MODELS]
    if unknown:
        parser.error(f"no model is called {unknown[0]}; there are {', '.join(MODELS)}")
    for name in arguments.names or MODELS:
        print(make_model(arguments.out, name))


if __name__ == "__main__":
    main()
