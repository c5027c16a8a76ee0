"""``torch.ops.nestedfp.linear``: y = x W^T + bias, FP16 or FP8 by the precision of the step; ``swiglu`` and
``norm_linear`` with what follows and goes before it.

The choice is inside the op. vLLM traces a model once for all batch sizes and drops Dynamo's guards, so a branch outside
would be frozen at what the first trace saw. A CUDA graph holds the kernels of the precision that was in force when it
was captured.

What runs on the GPU is libnestedfp's (src/capi/torch_ops.cc): PyTorch's dispatcher calls it with no Python in between,
because steps without a graph wait for the host. (Sums over GPUs are decided on in Python: all_reduce.py.)
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch

from .. import _library
from .._library import FP8, FP16, JOIN_BIASED, JOIN_FREE
from .spent import spent


# 1: our kernels wait for vLLM's before them to end. NESTEDFP_INDEPENDENT_START=1, for comparisons.
INDEPENDENT_START = int(os.environ.get("NESTEDFP_INDEPENDENT_START") == "1")

# A file of `nestedfp tune`, whose kernels come before the built-in choices.
CHOICES = os.environ.get("NESTEDFP_GEMM_CHOICES", "")


class _Step:
    """The precision in force. ``forced`` (FP16 or FP8) is a step's, set by the worker; without one, products of more
    than ``threshold`` rows run in FP8."""

    def __init__(self) -> None:
        self._forced: int | None = None
        self._threshold = 1024
        self.warming_up = False

    def _tell(self) -> None:
        _library.library().nfp_torch_set_precision(-1 if self._forced is None else self._forced, self._threshold)

    @property
    def forced(self) -> int | None:
        return self._forced

    @forced.setter
    def forced(self, precision: int | None) -> None:
        self._forced = precision
        self._tell()

    @property
    def threshold(self) -> int:
        return self._threshold

    @threshold.setter
    def threshold(self, tokens: int) -> None:
        self._threshold = tokens
        self._tell()

    def precisions(self, rows: int) -> tuple[int, ...]:
        """What a product of so many rows runs in, the last one for its result: for those that the operators below do
        not run."""
        asked = self._forced if self._forced is not None else FP8 if rows > self._threshold else FP16
        return (FP16 if asked == FP8 else FP8, asked) if self.warming_up else (asked,)

    @contextmanager
    def warm_up(self) -> Generator[None, None, None]:
        """Products run in the other precision too, before the one in force: what CUDA graphs of both need is then
        loaded by one run. Not while a graph is captured."""
        self.warming_up = True
        _library.library().nfp_torch_set_warm_up(1)
        try:
            yield
        finally:
            self.warming_up = False
            _library.library().nfp_torch_set_warm_up(0)


Step = _Step()


@contextmanager
def forced(precision: int) -> Generator[None, None, None]:
    before = Step.forced
    Step.forced = precision
    try:
        yield
    finally:
        Step.forced = before


class _Device:
    """Kernels and workspace of one GPU. Products share a workspace, so linear layers of one process run on one stream
    at a time: what vLLM does with the layers that this plugin takes."""

    def __init__(self, index: int):
        self.library = _library.library()
        self.index = index
        self.handle = ctypes.c_void_p()
        _bind()
        with torch.cuda.device(index):
            _library.check(self.library.nfp_gpu_create(ctypes.byref(self.handle)))
            if CHOICES:
                _library.check(self.library.nfp_gpu_read_choices(self.handle, os.fsencode(CHOICES)))
            torch.cuda.empty_cache()  # return_free_blocks
            self.workspace = torch.zeros(self.library.nfp_gpu_workspace_bytes(), dtype=torch.uint8, device="cuda")
        _library.check(self.library.nfp_torch_set_device(index, self.handle, self.workspace.data_ptr(),
                                                         self.workspace.numel(), INDEPENDENT_START))

    def forget(self) -> None:
        """Lets go of all tensors that the op has seen: weights are being loaded. Not once CUDA graphs hold them."""
        self.library.nfp_torch_forget(self.index)

    def refresh(self, bias: torch.Tensor | None) -> None:
        """What the op keeps of a bias that was written to in place, or of all."""
        # The op has made its copies in vLLM's inference mode, and only there may such tensors be written to.
        with torch.inference_mode(), torch.cuda.device(self.index):
            _library.check(self.library.nfp_torch_refresh(self.index, None if bias is None else bias.data_ptr()))

    def clear_workspace(self) -> None:
        with torch.cuda.device(self.index):
            self.workspace.zero_()
            torch.cuda.current_stream().synchronize()


_devices: dict[int, _Device] = {}


def device(index: int) -> _Device:
    made = _devices.get(index)
    if made is None:
        with spent("kernels"):
            made = _devices[index] = _Device(index)
    return made


def in_use() -> bool:
    return bool(_devices)


def refresh(bias: torch.Tensor | None = None) -> None:
    """After a bias was written to in place: that one, or, without one, all."""
    for index, one in _devices.items():
        if bias is None or bias.get_device() == index:
            one.refresh(bias)


def clear_workspaces() -> None:
    """They are zero between products; after a sleep that kept no memory they are whatever it holds now."""
    for one in _devices.values():
        one.clear_workspace()


def _linear_fake(x: torch.Tensor, upper: torch.Tensor, lower: torch.Tensor, scale: torch.Tensor,
                 bias: torch.Tensor | None, n: int, k: int, join: int) -> torch.Tensor:
    return x.new_empty((x.shape[0], n))


def _swiglu_fake(x: torch.Tensor, upper: torch.Tensor, lower: torch.Tensor, scale: torch.Tensor, n: int, k: int,
                 join: int) -> torch.Tensor:
    """silu(gate) * up of a weight whose rows interleave() has ordered."""
    return x.new_empty((x.shape[0], n // 2))


def norm_linear_fake(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float,
                      upper: torch.Tensor, lower: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, n: int,
                      k: int, join: int, swiglu: bool, reduce: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """h = x + residual; linear or swiglu of RMSNorm(h), and h. `norms` puts it in. reduce: x is a rank's part of a sum
    (`all_reduce`)."""
    return x.new_empty((x.shape[0], n // 2 if swiglu else n)), residual.new_empty(residual.shape)


def norm_fake(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float,
               reduce: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """h = x + residual; RMSNorm(h), and h. reduce: as norm_linear's."""
    return x.new_empty(x.shape), residual.new_empty(residual.shape)


_namespace: torch.library.Library | None = None


def register() -> None:
    """The ops' schemas, and what they do with shapes alone. Idempotent."""
    global _namespace
    if _namespace is not None:
        return
    _namespace = torch.library.Library("nestedfp", "FRAGMENT")
    for name, fake in (("linear", _linear_fake), ("swiglu", _swiglu_fake), ("norm_linear", norm_linear_fake),
                       ("norm", norm_fake)):
        define(name, fake)


def define(name: str, fake: Callable[..., Any], on_gpus: Callable[..., Any] | None = None) -> None:
    """One operator, after register(). ``on_gpus``: what it does there, where that is not libnestedfp's; ``fake`` then
    takes as many arguments."""
    assert _namespace is not None
    _namespace.define(name + torch.library.infer_schema(on_gpus or fake, mutates_args=()))
    _namespace._register_fake(name, fake)
    if on_gpus is not None:
        _namespace.impl(name, on_gpus, "CUDA")


@cache
def _bind() -> None:
    """The ops on GPUs."""
    register()
    folder = Path(torch.__file__).parent / "lib"
    _library.check(_library.library().nfp_torch_bind(str(folder / "libtorch_cpu.so").encode(),
                                                     str(folder / "libtorch_cuda.so").encode()))


def interleave(rows: torch.Tensor) -> torch.Tensor:
    """[gate; up] -> blocks of 8 rows of each in turn: what the epilogue that computes SwiGLU needs."""
    n = rows.shape[0]
    return rows.reshape(2, n // 16, 8, *rows.shape[1:]).transpose(0, 1).reshape(rows.shape)


def in_order(y: torch.Tensor) -> torch.Tensor:
    """Columns of a product with an interleaved weight -> [gate, up]."""
    m, n = y.shape
    return y.view(m, n // 16, 2, 8).transpose(1, 2).reshape(m, n)


class Planes:
    """A weight in the device's layout: what the op takes."""

    def __init__(self, n: int, k: int, where: torch.device, join: int = JOIN_BIASED):
        self.n, self.k, self.join = n, k, join
        plane_bytes = _library.library().nfp_plane_bytes(n, k)
        self.upper = torch.empty(plane_bytes, dtype=torch.uint8, device=where)
        self.lower = torch.empty(plane_bytes, dtype=torch.uint8, device=where)
        self.scale = torch.empty(n, dtype=torch.float32, device=where)

    def drop_plain_scale(self, scaled: bool | None) -> None:
        """No scale where no row has an exponent, unless `scaled` says that there is one."""
        self.scale = scale_of_form(self.scale, scaled)


class NotNested(Exception):
    """The matrix must stay dense; says why."""


def scale_of_form(scale: torch.Tensor, scaled: bool | None) -> torch.Tensor:
    """Rows' scales, or none where all are 1. True, False: that there are some, or none, is given, by CUDA graphs that
    hold them. Raises ValueError where there can be none."""
    if scaled:
        return scale
    if bool((scale == 1).all()):
        return scale.new_empty(0)
    if scaled is False:
        raise ValueError("rows of the new weights have exponents, and none of those that vLLM was started with had: "
                         "start it with --enable-sleep-mode or a weight transfer configuration, with which there is "
                         "room for them, or with the new weights")
    return scale


def return_free_blocks(weight: torch.Tensor) -> None:
    """vLLM loads with max_split_size_mb:20: a plane would take a free block whole that is up to 20 MiB larger (of the
    dense weight before it), and keep it."""
    if weight.numel() >= 1 << 20:
        torch.cuda.empty_cache()


@spent("nesting")
def nest(weight: torch.Tensor, scaled: bool | None = None) -> Planes:
    """W[n, k] (FP16 or BF16, on the GPU) -> planes. Raises NotNested where it cannot be, ValueError where it is no
    weight at all. ``scaled``: scale_of_form()."""
    n, k = weight.shape
    on = device(weight.get_device())
    return_free_blocks(weight)
    planes = Planes(n, k, weight.device)
    if weight.stride(1) != 1:
        weight = weight.contiguous()
    report = torch.empty(4, dtype=torch.int64, device=weight.device)  # nfp_gpu_report
    bf16 = weight.dtype is torch.bfloat16
    with torch.cuda.device(weight.device):
        _library.check(on.library.nfp_gpu_nest(
            on.handle, weight.data_ptr(), weight.stride(0), n, k, int(bf16), planes.join, planes.upper.data_ptr(),
            planes.lower.data_ptr(), planes.scale.data_ptr(), report.data_ptr(),
            torch.cuda.current_stream().cuda_stream))
    found = report.cpu()
    bad, first_bad, not_finite, _ = found[:2].view(torch.int32).tolist()
    inexact_bf16 = int(found[3])
    if not_finite:
        raise ValueError(f"row {first_bad} holds NaN or infinity ({not_finite} rows do); the checkpoint is damaged")
    if bad:
        raise NotNested(f"{bad} of {n} rows have no exponent that keeps all of their weights, row {first_bad} first")
    if bf16 and inexact_bf16:
        raise NotNested(f"{inexact_bf16} nested weights are no BF16 numbers")
    planes.drop_plain_scale(scaled)
    return planes


@spent("nesting")
def pack(upper: torch.Tensor, lower: torch.Tensor, scale: torch.Tensor, free_join: bool,
         scaled: bool | None = None) -> Planes:
    """A nested checkpoint's tensors (or slices of them): upper and lower bytes [n, k], scale[n] = 2^(e - 8)."""
    n, k = upper.shape
    on = device(upper.get_device())
    return_free_blocks(upper)
    planes = Planes(n, k, upper.device, JOIN_FREE if free_join else JOIN_BIASED)
    with torch.cuda.device(upper.device):
        for which, source, target in ((_library.UPPER, upper, planes.upper), (_library.LOWER, lower, planes.lower)):
            source = source.contiguous()
            _library.check(on.library.nfp_gpu_pack(on.handle, source.data_ptr(), k, n, k, which, planes.join,
                                                   target.data_ptr(), torch.cuda.current_stream().cuda_stream))
    planes.scale = scale.reshape(n).float() * 256.0
    planes.drop_plain_scale(scaled)
    return planes


def restore(planes: Planes, dtype: torch.dtype) -> torch.Tensor:
    """W[n, k] again, bit for bit."""
    on = device(planes.upper.get_device())
    weight = torch.empty(planes.n, planes.k, dtype=dtype, device=planes.upper.device)
    scale = planes.scale.data_ptr() if planes.scale.numel() else None
    with torch.cuda.device(planes.upper.device):
        _library.check(on.library.nfp_gpu_unnest(
            on.handle, planes.upper.data_ptr(), planes.lower.data_ptr(), scale, planes.n, planes.k, planes.join,
            int(dtype is torch.bfloat16), weight.data_ptr(), planes.k, torch.cuda.current_stream().cuda_stream))
    return weight


_tested: set[int] = set()


@spent("self-test")
def self_test(where: torch.device, dtype: torch.dtype) -> None:
    """One known product in both precisions on this GPU, against torch; once for a GPU. Raises RuntimeError."""
    index = where.index if where.index is not None else torch.cuda.current_device()
    if index in _tested:
        return
    generator = torch.Generator(device=where)
    generator.manual_seed(7)
    n, k, m = 192, 448, 33

    def draw(*shape: int, sigma: float) -> torch.Tensor:
        # vLLM's default type is the model's while it loads.
        return (torch.randn(*shape, generator=generator, device=where, dtype=torch.float32) * sigma).to(dtype)

    weight, x = draw(n, k, sigma=0.05), draw(m, k, sigma=1.0)
    weight[weight.abs() < 2.0**-10] = 0  # nesting rounds BF16's smallest numbers
    planes = nest(weight)
    if not torch.equal(restore(planes, dtype).view(torch.int16), weight.view(torch.int16)):
        raise RuntimeError("nestedfp: self-test failed: the weights do not come back bit for bit on this GPU")
    exact = (x.cpu().double() @ weight.cpu().double().t()).to(where)  # on the host: cuBLAS would keep a workspace
    kept = Step.forced
    try:
        # Rounding of the result; and of both operands to E4M3 (3 bits: 2^-4 / sqrt(3) of a value each).
        for precision, limit in ((FP16, 1e-2 if dtype is torch.bfloat16 else 2e-3), (FP8, 6e-2)):
            Step.forced = precision
            y = torch.ops.nestedfp.linear(x, planes.upper, planes.lower, planes.scale, None, n, k, planes.join)
            error = float((y.double() - exact).norm() / exact.norm())
            if not error <= limit:
                raise RuntimeError(f"nestedfp: self-test failed: a product in {'FP16' if precision == FP16 else 'FP8'} "
                                   f"is off by {error:.4f} (limit {limit}) on {torch.cuda.get_device_name(where)}")
    finally:
        Step.forced = kept
    device(index).forget()
    _tested.add(index)
