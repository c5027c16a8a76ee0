"""vLLM's FlashAttention backend with the kernels of libnestedfp where they fit: over a cache of the model's own type.

Steps in which every sequence has one token run our decode kernel, in graphs and without. In others the sequences ahead
that have one token run it too, and those behind, prompts and their chunks, run our prefill kernel. What does not fit
(an FP8 cache, sinks, cascades, several drafted tokens a sequence) remains FlashAttention's, over the same cache: HND in
vLLM's terms, a block's keys and then its values, each [kv_heads, block_size, head_dim].

Layers that `rotary` has joined get queries, keys and values as their product left them, and rotate and append here too.
"""

from __future__ import annotations

import copy
import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import vllm.envs as envs
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType
from vllm.v1.attention.backends.flash_attn import (FlashAttentionBackend, FlashAttentionImpl, FlashAttentionMetadata,
                                                   FlashAttentionMetadataBuilder)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.attention.backends.utils import set_kv_cache_layout
from vllm.v1.attention.selector import _cached_get_attn_backend

from .. import _library
from .attention_batch import split
from .op import INDEPENDENT_START, device

# Decode steps of few sequences are launched for a longest context, which a captured graph does not know.
CAPTURED_CONTEXT = 4096


@dataclass
class Rotation:
    """What a joined layer's queries and keys still lack (rotary.join()). All are FP32, of head_size numbers a row."""

    cos_sin: torch.Tensor  # a row for each position
    q_norm: torch.Tensor | None = None  # weights of an RMSNorm of each head before that
    k_norm: torch.Tensor | None = None
    epsilon: float = 0.0

    def describe(self, call: _library.AttentionCall) -> None:
        call.cos_sin, call.norm_epsilon = self.cos_sin.data_ptr(), self.epsilon
        call.q_norm, call.k_norm = ((None, None) if self.q_norm is None or self.k_norm is None
                                    else (self.q_norm.data_ptr(), self.k_norm.data_ptr()))


def batch_call(query_start: torch.Tensor, context: torch.Tensor, table: torch.Tensor, block_size: int,
               kv_type: int) -> _library.AttentionCall:
    """What a batch is, for all layers."""
    return _library.AttentionCall(
        size=ctypes.sizeof(_library.AttentionCall), query_start=query_start.data_ptr(), context=context.data_ptr(),
        block_table=table.data_ptr(), table_width=table.stride(0), block_size=block_size, kv_type=kv_type,
        independent_start=INDEPENDENT_START)


def most_keys(common: Any) -> np.ndarray:
    """Of each sequence, as far as the host knows: vLLM makes other batches of one (of chunks, say), and what it has not
    made anew is still the first one's."""
    for known in (getattr(common, "_seq_lens_cpu", None), getattr(common, "seq_lens_cpu_upper_bound", None)):
        if known is not None and len(known) == common.num_reqs:
            return known.numpy()
    return np.full(common.num_reqs, common.max_seq_len, dtype=np.int32)


@dataclass
class Plan:
    """What all layers' calls of a step have in common: `call`, of which each layer sets its own part."""

    call: _library.AttentionCall
    decodes: int  # sequences with one token, ahead of the others
    prefills: int
    prefill_tokens: int
    tensors: tuple[torch.Tensor, ...]  # whose addresses `call` has


@dataclass
class Metadata(FlashAttentionMetadata):
    nestedfp: Plan | None = None  # None: FlashAttention's


class Builder(FlashAttentionMetadataBuilder):
    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.nestedfp_workspace: torch.Tensor | None = None  # made by the first step; None: FlashAttention's layers
        self.nestedfp_asked = False
        self.nestedfp_type = _library.KV_BF16 if vllm_config.model_config.dtype is torch.bfloat16 else _library.KV_F16
        self.nestedfp_drafts = vllm_config.speculative_config is not None

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        # A graph has the kernels of the batch that it was captured with.
        return min(super().get_cudagraph_support(vllm_config, kv_cache_spec), AttentionCGSupport.UNIFORM_BATCH,
                   key=lambda support: support.value)

    def _workspace(self) -> torch.Tensor | None:
        if not self.nestedfp_asked:
            self.nestedfp_asked = True
            layers = get_layers_from_vllm_config(self.vllm_config, Attention, self.layer_names)
            impls = [layer.impl for layer in layers.values()]
            if (impls and all(isinstance(impl, Impl) and impl.nestedfp_fits for impl in impls)
                    and self.block_size in (16, 32, 64)):
                index = torch.cuda.current_device() if self.device.index is None else self.device.index
                needed = max(impl.workspace_bytes(index, self.block_size, self.nestedfp_type) for impl in impls)
                self.nestedfp_workspace = torch.zeros(needed, dtype=torch.uint8, device=self.device)
        return self.nestedfp_workspace

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        plan = None
        if common_prefix_len == 0 and common_attn_metadata.causal:
            plan = self._plan(common_attn_metadata)
        if plan is None:
            return super().build(common_prefix_len, common_attn_metadata, fast_build)
        common = common_attn_metadata
        return Metadata(num_actual_tokens=common.num_actual_tokens, max_query_len=common.max_query_len,
                        query_start_loc=common.query_start_loc, max_seq_len=common.max_seq_len,
                        seq_lens=common.seq_lens, block_table=common.block_table_tensor,
                        slot_mapping=common.slot_mapping, use_cascade=False, common_prefix_len=0,
                        cu_prefix_query_lens=None, prefix_kv_lens=None, suffix_kv_lens=None, nestedfp=plan)

    def _plan(self, common: Any) -> Plan | None:
        workspace, sequences = self._workspace(), common.num_reqs
        most_rows = _library.library().nfp_max_attention_rows()
        if workspace is None or sequences * self.kv_cache_spec.num_kv_heads > most_rows:
            return None
        decodes, prefill_tokens = sequences, 0
        if common.max_query_len > 1:
            if self.nestedfp_drafts:
                return None
            starts = common.query_start_loc_cpu[:sequences + 1].numpy()
            found = split(np.diff(starts), most_keys(common), self.num_heads_q // self.num_heads_kv, self.num_heads_kv)
            if found is None:
                return None
            decodes, prefill_tokens = found
        tensors = (common.query_start_loc, common.seq_lens, common.block_table_tensor)
        call = batch_call(*tensors, self.block_size, self.nestedfp_type)
        call.likely_context = min(common.max_seq_len, CAPTURED_CONTEXT)
        call.workspace, call.workspace_bytes = workspace.data_ptr(), workspace.numel()
        return Plan(call, decodes, sequences - decodes, prefill_tokens, tensors)

    def update_block_table(self, metadata: Any, blk_table: torch.Tensor, slot_mapping: torch.Tensor) -> Any:
        new = super().update_block_table(metadata, blk_table, slot_mapping)
        plan = getattr(metadata, "nestedfp", None)
        if plan is not None:
            new.nestedfp = copy.copy(plan)
            new.nestedfp.call = _library.AttentionCall.from_buffer_copy(plan.call)
            new.nestedfp.call.block_table, new.nestedfp.call.table_width = blk_table.data_ptr(), blk_table.stride(0)
            new.nestedfp.tensors = (*plan.tensors[:2], blk_table)
        return new


class Impl(FlashAttentionImpl):
    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.nestedfp_fits = (self.attn_type == AttentionType.DECODER and self.alibi_slopes is None
                              and self.sinks is None and self.head_size % 16 == 0 and self.head_size <= 256
                              and self.num_heads <= 16 * self.num_kv_heads
                              and self.kv_cache_dtype in ("auto", "float16", "bfloat16"))
        self.nestedfp_window = self.sliding_window[0] + 1
        self.nestedfp_rotation: Rotation | None = None
        self.nestedfp_library = _library.library()

    def workspace_bytes(self, index: int, block_size: int, kv_type: int) -> int:
        call = _library.AttentionCall(size=ctypes.sizeof(_library.AttentionCall), heads=self.num_heads,
                                      kv_heads=self.num_kv_heads, head_dim=self.head_size, block_size=block_size,
                                      kv_type=kv_type, sequences=1)
        needed = ctypes.c_size_t()
        _library.check(self.nestedfp_library.nfp_attention_workspace_bytes(device(index).handle, ctypes.byref(call),
                                                                           ctypes.byref(needed)))
        return needed.value

    def forward(self, layer: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
                kv_cache: torch.Tensor, attn_metadata: Any, output: torch.Tensor,
                output_scale: torch.Tensor | None = None,
                output_block_scale: torch.Tensor | None = None) -> torch.Tensor:
        plan = getattr(attn_metadata, "nestedfp", None)
        if plan is None or output_scale is not None or output_block_scale is not None:
            if attn_metadata is not None and self.nestedfp_rotation is not None:
                query = self._append(query, key, value, kv_cache, attn_metadata)
            return super().forward(layer, query, key, value, kv_cache, attn_metadata, output, output_scale,
                                   output_block_scale)
        call = plan.call
        if self.nestedfp_rotation is not None:
            query = self._with_keys(query, key, value)
        elif query.stride(1) != self.head_size:  # heads that do not lie one behind the other
            query = query.contiguous()
        self._describe(call, query, kv_cache)
        call.scale, call.soft_cap, call.window = self.scale, self.logits_soft_cap, self.nestedfp_window
        call.out = output.data_ptr()
        handle = device(query.get_device()).handle
        stream = torch.cuda.current_stream().cuda_stream
        if plan.decodes > 0:
            call.first_sequence, call.sequences = 0, plan.decodes
            _library.check(self.nestedfp_library.nfp_attention_decode(handle, call, stream))
        if plan.prefills > 0:
            call.first_sequence, call.sequences, call.tokens = plan.decodes, plan.prefills, plan.prefill_tokens
            _library.check(self.nestedfp_library.nfp_attention_prefill(handle, call, stream))
        return output

    def _describe(self, call: _library.AttentionCall, query: torch.Tensor, kv_cache: torch.Tensor) -> None:
        call.heads, call.kv_heads, call.head_dim = self.num_heads, self.num_kv_heads, self.head_size
        call.blocks, call.block_stride = kv_cache.shape[0], kv_cache.stride(0)
        call.keys = kv_cache.data_ptr()
        call.values = call.keys + 2 * kv_cache.stride(1)
        call.q = query.data_ptr()
        if self.nestedfp_rotation is not None:
            self.nestedfp_rotation.describe(call)
            call.q_stride = self._row()
        else:  # (the stride of a single token may be any number)
            call.cos_sin, call.q_stride = None, query.stride(0) if len(query) > 1 else self.num_heads * self.head_size

    def _row(self) -> int:
        """Numbers of a token's queries, keys and values."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_size

    def _with_keys(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """The queries, in rows that have a token's keys and values behind them."""
        keys = query.data_ptr() + 2 * self.num_heads * self.head_size
        if ((len(query) == 1 or query.stride(0) == self._row()) and key.data_ptr() == keys
                and value.data_ptr() == keys + 2 * self.num_kv_heads * self.head_size):
            return query
        return torch.cat((query, key, value), dim=1)[:, :self.num_heads]  # a product that vLLM took apart

    def _append(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor,
                metadata: Any) -> torch.Tensor:
        """Rotates, and writes keys and values to the cache, for kernels that do neither. -> the rotated queries."""
        query = self._with_keys(query, key, value)
        call = batch_call(metadata.query_start_loc, metadata.seq_lens, metadata.block_table, kv_cache.shape[2],
                          _library.KV_BF16 if query.dtype is torch.bfloat16 else _library.KV_F16)
        call.sequences, call.tokens = metadata.seq_lens.shape[0], metadata.num_actual_tokens
        self._describe(call, query, kv_cache)
        _library.check(self.nestedfp_library.nfp_attention_append(device(query.get_device()).handle, call,
                                                                  torch.cuda.current_stream().cuda_stream))
        return query


class Backend(FlashAttentionBackend):
    """Its name stays FlashAttention's, which vLLM looks up."""

    @staticmethod
    def get_impl_cls() -> type[FlashAttentionImpl]:
        return Impl

    @staticmethod
    def get_builder_cls() -> type[FlashAttentionMetadataBuilder]:
        return Builder

    @classmethod
    def get_required_kv_cache_layout(cls) -> Any:
        return "HND"


class AppendingBackend(Backend):
    """Of layers that rotary.join() has joined."""

    forward_includes_kv_cache_update = True


_OURS = f"{__name__}.{Backend.__name__}"


def enable(config: Any) -> None:
    """In the place of FlashAttention for the model of this vLLM configuration, unless the user named a backend or a
    layout of the cache, or something else than vLLM's own layers reads it."""
    model, parallel = config.model_config, config.parallel_config
    if (model is not None and not model.is_hybrid and config.attention_config.backend is None
            and config.cache_config.cache_dtype in ("auto", str(model.dtype).removeprefix("torch."))
            and config.kv_transfer_config is None and envs.VLLM_KV_CACHE_LAYOUT is None
            and parallel.decode_context_parallel_size == 1 and parallel.prefill_context_parallel_size == 1):
        register_backend(AttentionBackendEnum.FLASH_ATTN, _OURS)
        _cached_get_attn_backend.cache_clear()
    else:
        withdraw()


def withdraw() -> None:
    """FlashAttention's place is its own again, and the cache's layout vLLM's choice: for a model behind another in one
    process."""
    if AttentionBackendEnum.FLASH_ATTN.get_path() == _OURS:
        AttentionBackendEnum.FLASH_ATTN.clear_override()
        _cached_get_attn_backend.cache_clear()
        set_kv_cache_layout(None)
