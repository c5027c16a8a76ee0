"""Rotary embedding and the cache's update inside attention, in the layers that vLLM's Llama, Mistral, Qwen2 and Qwen3
models are made of, Qwen3's norms of queries and keys with them: decode steps of few sequences do it in the attention
kernel itself, others in one before it.

Positions are those that a token has by its place in its sequence, which is what these models are given.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

from . import attention


class PassThrough(torch.nn.Module):
    """In the place of a rotary embedding, of all layers that share it. The table is a buffer of the model's: vLLM saves
    these when it sleeps, and puts those back that it has a record of when weights are read again."""

    def __init__(self, cos_sin: torch.Tensor):
        super().__init__()
        self.register_buffer("cos_sin", cos_sin, persistent=False)
        record_metadata_for_reloading(self)

    def forward(self, positions: torch.Tensor, query: torch.Tensor,
                key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return query, key


def join(model: torch.nn.Module, config: Any, model_config: Any = None) -> int:
    """Lets the attention of every layer of the known forms rotate; how many do. Not in a draft model, whose tokens have
    other places, and not where vLLM runs made-up batches while it serves (data parallelism), which must not write."""
    if getattr(model_config, "runner_type", None) == "draft" or config.parallel_config.data_parallel_size > 1:
        return 0
    instead: dict[torch.nn.Module, PassThrough] = {}  # of a rotary embedding, which layers share
    joined = 0
    for layer in model.modules():
        if not _fits(layer):
            continue
        rotary = layer.rotary_emb
        if rotary not in instead:
            instead[rotary] = PassThrough(rotary.cos_sin_cache.float().contiguous())
        layer.rotary_emb = instead[rotary]
        rotation = layer.attn.impl.nestedfp_rotation = attention.Rotation(layer.rotary_emb.cos_sin)
        norms = _norms(layer)
        if norms:
            rotation.q_norm, rotation.k_norm = (_weight(norm) for norm in norms)
            rotation.epsilon = norms[0].variance_epsilon
            for norm in norms:
                norm._forward_method = _as_it_is
        layer.attn.attn_backend = attention.AppendingBackend
        layer.nestedfp_rotates = True  # loading.form_of()
        joined += 1
    return joined


def _fits(layer: torch.nn.Module) -> bool:
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
    from vllm.model_executor.models.llama import LlamaAttention
    from vllm.model_executor.models.mistral import MistralAttention
    from vllm.model_executor.models.qwen2 import Qwen2Attention
    from vllm.model_executor.models.qwen3 import Qwen3Attention
    from vllm.model_executor.models.qwen3_moe import Qwen3MoeAttention

    if (type(layer) not in (LlamaAttention, MistralAttention, Qwen2Attention, Qwen3Attention, Qwen3MoeAttention)
            or getattr(layer, "do_llama_4_scaling", False)):
        return False
    rotary, impl, norms = layer.rotary_emb, layer.attn.impl, _norms(layer)
    return (isinstance(rotary, RotaryEmbedding) and type(rotary).forward_cuda is RotaryEmbedding.forward_cuda
            and type(rotary).forward_native is RotaryEmbedding.forward_native and rotary.is_neox_style
            and isinstance(impl, attention.Impl) and impl.nestedfp_fits and layer.attn.attn_backend is attention.Backend
            and rotary.rotary_dim == impl.head_size == rotary.head_size
            and all(_is_plain(norm, impl.head_size) for norm in norms)
            and len({norm.variance_epsilon for norm in norms}) <= 1)


def _norms(layer: torch.nn.Module) -> list[Any]:
    """Of queries and of keys, or none."""
    has_norms = getattr(layer, "qk_norm", type(layer).__name__ in ("Qwen3Attention", "Qwen3MoeAttention"))
    return [layer.q_norm, layer.k_norm] if has_norms else []


def _is_plain(norm: torch.nn.Module, size: int) -> bool:
    return (type(norm) is RMSNorm and norm.has_weight and norm.variance_size_override is None
            and norm.weight.shape == (size,))


def _as_it_is(x: torch.Tensor) -> torch.Tensor:
    return x


_weights: WeakKeyDictionary[torch.nn.Module, torch.Tensor] = WeakKeyDictionary()  # of norms, in FP32


def _weight(norm: RMSNorm) -> torch.Tensor:
    _weights[norm] = norm.weight.data.float().contiguous()
    return _weights[norm]


@torch.inference_mode()
def refresh() -> None:
    """After weights were read again: CUDA graphs hold these."""
    for norm, weight in _weights.items():
        weight.copy_(norm.weight)
