"""The experts of a mixture in the device's layout, and their two products: SwiGLU of gate and up, then down, summed
with the weights of vLLM's router.

vLLM calls a mixture inside an operator of its own (vllm.moe_forward), opaque to torch.compile; so this is no operator
but a call, and the precision in force is looked at when it runs, or when a CUDA graph is captured.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from .. import _library
from .._library import JOIN_BIASED, JOIN_FREE
from .op import Step, device, interleave, return_free_blocks, scale_of_form
from .spent import spent


@dataclass(frozen=True)
class Form:
    """What CUDA graphs hold of a stack besides its bytes: whether there are scales of rows, and the experts that are
    dense. None where that is free."""

    scaled: bool | None = None
    dense: frozenset[int] | None = None


class Stack:
    """Matrices W[n, k] of a layer's experts: of each its planes, or its numbers where it does not nest. With `gated`,
    [gate; up], whose rows are put in the order that the kernels want."""

    def __init__(self, experts: int, n: int, k: int, where: torch.device, gated: bool, join: int = JOIN_BIASED):
        self.experts, self.n, self.k, self.gated, self.join = experts, n, k, gated, join
        self.library = _library.library()
        self.plane = self.library.nfp_plane_bytes(n, k)
        size = self.library.nfp_expert_bytes(n, k)
        self.bytes = torch.empty(experts, size, dtype=torch.uint8, device=where)
        self.scale = torch.ones(experts, n, dtype=torch.float32, device=where)
        self.dense: dict[int, str] = {}  # why, of experts that do not nest

    def order(self, rows: torch.Tensor) -> torch.Tensor:
        return (interleave(rows) if self.gated else rows).contiguous()

    def nest(self, weight: torch.Tensor, form: Form) -> Stack:
        """Of weight[experts, n, k], FP16 or BF16. Raises ValueError where one is no weight at all, or the form cannot
        be had."""
        on = device(weight.get_device())
        bf16 = weight.dtype is torch.bfloat16
        reports = torch.empty(self.experts, 4, dtype=torch.int64, device=weight.device)  # nfp_gpu_report
        with torch.cuda.device(weight.device):
            stream = torch.cuda.current_stream().cuda_stream
            for e in range(self.experts):
                rows = self.order(weight[e])
                slot = self.bytes[e].data_ptr()
                _library.check(self.library.nfp_gpu_nest(
                    on.handle, rows.data_ptr(), self.k, self.n, self.k, int(bf16), self.join, slot, slot + self.plane,
                    self.scale[e].data_ptr(), reports[e].data_ptr(), stream))
        for e, found in enumerate(reports.cpu()):
            bad, first_bad, not_finite, _ = found[:2].view(torch.int32).tolist()
            inexact_bf16 = int(found[3])
            if not_finite:
                raise ValueError(f"expert {e} holds NaN or infinity ({not_finite} of its rows do); the checkpoint is "
                                 "damaged")
            if bad:
                self.dense[e] = (f"{bad} of {self.n} rows have no exponent that keeps all of their weights, row "
                                 f"{first_bad} first")
            elif bf16 and inexact_bf16:
                self.dense[e] = f"{inexact_bf16} nested weights are no BF16 numbers"
            elif form.dense is not None and e in form.dense:
                self.dense[e] = "it was dense when vLLM was started"
            else:
                continue
            if form.dense is not None and e not in form.dense:
                raise ValueError(f"expert {e} does not nest as that did that vLLM was started with ({self.dense[e]}); "
                                 "start it with the new weights")
            self.scale[e] = 1
            self.bytes[e, :2 * self.n * self.k].view(weight.dtype).copy_(self.order(weight[e]).view(-1))
        self.scale = scale_of_form(self.scale, form.scaled)
        return self

    def pack(self, upper: torch.Tensor, lower: torch.Tensor, scale: torch.Tensor, form: Form) -> Stack:
        """Of a nested checkpoint's tensors, or slices of them: upper and lower bytes [experts, n, k],
        scale[experts, n, 1] = 2^(e - 8)."""
        on = device(upper.get_device())
        with torch.cuda.device(upper.device):
            stream = torch.cuda.current_stream().cuda_stream
            for e in range(self.experts):
                for which, plane in ((_library.UPPER, upper[e].view(torch.uint8)), (_library.LOWER, lower[e])):
                    rows = self.order(plane)
                    at = self.bytes[e].data_ptr() + (self.plane if which == _library.LOWER else 0)
                    _library.check(self.library.nfp_gpu_pack(on.handle, rows.data_ptr(), self.k, self.n, self.k, which,
                                                             self.join, at, stream))
                self.scale[e] = self.order(scale[e]).view(-1).float() * 256.0
        self.scale = scale_of_form(self.scale, form.scaled)
        return self

    def restore(self, expert: int, dtype: torch.dtype) -> torch.Tensor:
        """W[n, k] of one expert again, bit for bit, in the order that it is kept in."""
        if expert in self.dense:
            return self.bytes[expert, :2 * self.n * self.k].view(dtype).view(self.n, self.k)
        weight = torch.empty(self.n, self.k, dtype=dtype, device=self.bytes.device)
        slot = self.bytes[expert].data_ptr()
        scale = self.scale[expert].data_ptr() if self.scale.numel() else None
        with torch.cuda.device(self.bytes.device):
            _library.check(self.library.nfp_gpu_unnest(
                device(self.bytes.get_device()).handle, slot, slot + self.plane, scale, self.n, self.k, self.join,
                int(dtype is torch.bfloat16), weight.data_ptr(), self.k, torch.cuda.current_stream().cuda_stream))
        return weight

    def form(self) -> Form:
        return Form(self.scale.numel() > 0, frozenset(self.dense))

    def described(self) -> _library.ExpertStack:
        flags = bytes(int(e in self.dense) for e in range(self.experts)) if self.dense else None
        return _library.ExpertStack(ctypes.sizeof(_library.ExpertStack), self.bytes.data_ptr(),
                                    self.scale.data_ptr() if self.scale.numel() else None, flags, self.n, self.k,
                                    self.join)


@spent("nesting")
def nest(weight: torch.Tensor, gated: bool, form: Form = Form()) -> Stack:
    """weight[experts, n, k] on the GPU -> a stack."""
    return_free_blocks(weight)
    return Stack(*weight.shape, weight.device, gated).nest(weight, form)


@spent("nesting")
def pack(upper: torch.Tensor, lower: torch.Tensor, scale: torch.Tensor, gated: bool, free_join: bool,
         form: Form = Form()) -> Stack:
    return_free_blocks(upper)
    join = JOIN_FREE if free_join else JOIN_BIASED
    return Stack(*upper.shape, upper.device, gated, join).pack(upper, lower, scale, form)


class Mixture:
    """A layer's experts, ready to be run."""

    def __init__(self, gate_up: Stack, down: Stack, activation: int):
        self.library = _library.library()
        self.stacks = (gate_up, down)  # their memory
        self.handle = ctypes.c_void_p()
        _library.check(self.library.nfp_experts_create(
            device(gate_up.bytes.get_device()).handle, gate_up.experts, ctypes.byref(gate_up.described()),
            ctypes.byref(down.described()), activation, ctypes.byref(self.handle)))

    def __del__(self) -> None:
        if getattr(self, "handle", None):
            self.library.nfp_experts_destroy(self.handle)

    def run(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor,
            expert_map: torch.Tensor | None = None) -> torch.Tensor:
        """x[rows, hidden]; weights (FP32) and ids (int32) [rows, top]; expert_map[ids] -> experts of this GPU or -1."""
        rows, top = ids.shape
        x, ids, weights = x.contiguous(), ids.to(torch.int32).contiguous(), weights.to(torch.float32).contiguous()
        y = torch.empty_like(x)
        if rows == 0:
            return y
        size = self.library.nfp_experts_scratch_bytes(self.handle, rows, top)
        scratch = torch.empty(size, dtype=torch.uint8, device=x.device)
        for precision in Step.precisions(rows):
            call = _library.ExpertsCall(
                ctypes.sizeof(_library.ExpertsCall), precision, int(x.dtype is torch.bfloat16), rows, top,
                x.data_ptr(), ids.data_ptr(), weights.data_ptr(), None if expert_map is None else expert_map.data_ptr(),
                0 if expert_map is None else expert_map.numel(), y.data_ptr(), scratch.data_ptr(), size)
            _library.check(self.library.nfp_experts_run(self.handle, ctypes.byref(call),
                                                        torch.cuda.current_stream(x.device).cuda_stream))
        return y
