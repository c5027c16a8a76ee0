"""Rotary embedding and the cache's update inside attention, in the layers that vLLM's Llama, Mistral and Qwen2 models
are made of: decode steps of few sequences rotate and append in the attention kernel itself, others in one before it.

Positions are those that a token has by its place in its sequence, which is what these models are given.
"""

from __future__ import annotations

from typing import Any

import torch

from . import attention


class PassThrough(torch.nn.Module):
    """In the place of a rotary embedding. The table is a buffer of the model's: vLLM saves these when it sleeps."""

    def __init__(self, cos_sin: torch.Tensor):
        super().__init__()
        self.register_buffer("cos_sin", cos_sin, persistent=False)
        self.nestedfp_rotates = True  # loading.form_of()

    def forward(self, positions: torch.Tensor, query: torch.Tensor,
                key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return query, key


def join(model: torch.nn.Module, config: Any) -> int:
    """Lets the attention of every layer of the known forms rotate; how many do. Not with drafts, whose tokens have
    other places, and not where vLLM runs made-up batches while it serves (data parallelism), which must not write."""
    if config.speculative_config is not None or config.parallel_config.data_parallel_size > 1:
        return 0
    tables: dict[int, torch.Tensor] = {}  # of a rotary embedding, which layers share
    joined = 0
    for layer in model.modules():
        if not _fits(layer):
            continue
        rotary = layer.rotary_emb
        if id(rotary) not in tables:
            tables[id(rotary)] = rotary.cos_sin_cache.float().contiguous()
        layer.attn.impl.nestedfp_cos_sin = tables[id(rotary)]
        layer.attn.attn_backend = attention.AppendingBackend
        layer.rotary_emb = PassThrough(tables[id(rotary)])
        joined += 1
    return joined


def _fits(layer: torch.nn.Module) -> bool:
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
    from vllm.model_executor.models.llama import LlamaAttention
    from vllm.model_executor.models.mistral import MistralAttention
    from vllm.model_executor.models.qwen2 import Qwen2Attention

    if (type(layer) not in (LlamaAttention, MistralAttention, Qwen2Attention)
            or getattr(layer, "do_llama_4_scaling", False) or getattr(layer, "qk_norm", False)):
        return False
    rotary, impl = layer.rotary_emb, layer.attn.impl
    return (isinstance(rotary, RotaryEmbedding) and type(rotary).forward_cuda is RotaryEmbedding.forward_cuda
            and type(rotary).forward_native is RotaryEmbedding.forward_native and rotary.is_neox_style
            and isinstance(impl, attention.Impl) and impl.nestedfp_fits and layer.attn.attn_backend is attention.Backend
            and rotary.rotary_dim == impl.head_size == rotary.head_size)
