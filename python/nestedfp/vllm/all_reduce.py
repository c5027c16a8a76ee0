"""The sum over two or four GPUs of tensor parallelism, inside the norm that reads it.

Of few rows: each GPU's kernel stores its part into the others' memory while it begins the norm, in the place of vLLM's
kernel for the sum, ours for the norm, and what lies between their ends and beginnings. Steps of more rows make the sum as
vLLM does."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from vllm.logger import init_logger

from .. import _library
from . import op

logger = init_logger("vllm.nestedfp")

RANKS = (2, 4)
# 256 rows of 8192 columns, which is as many rows as one call takes.
MOST_BYTES = 4 << 20


class _Group:
    """What the operator sums over: one of a process's lifetime, like the group of GPUs that it belongs to."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.handle = ctypes.c_void_p()

    def join(self, group: Any) -> None:
        """vLLM's GroupCoordinator; all of its ranks come here together."""
        from vllm.distributed.device_communicators.custom_all_reduce import CustomAllreduce

        library, on = _library.library(), op.device(group.device.index)
        ranks = group.world_size
        size = library.nfp_all_reduce_buffer_bytes(ranks, MOST_BYTES)
        with torch.cuda.device(group.device):
            buffers = CustomAllreduce.create_shared_buffer(size, group=group.cpu_group)
            _library.check(library.nfp_all_reduce_create(on.handle, group.rank_in_group, ranks,
                                                         (ctypes.c_void_p * ranks)(*buffers), size,
                                                         ctypes.byref(self.handle)))
        torch.distributed.barrier(group=group.cpu_group)  # all buffers are clear
        _library.check(library.nfp_torch_set_all_reduce(group.device.index, self.handle))
        self.name = group.unique_name
        logger.info("nestedfp: norms make the sums over %d GPUs", ranks)

    def max_rows(self, columns: int) -> int:
        return _library.library().nfp_all_reduce_max_rows(self.handle, columns)


_group = _Group()


def _part_or_sum(x: torch.Tensor, group: str) -> tuple[torch.Tensor, bool]:
    """What a norm gets of a rank's part, and whether it makes the sum."""
    if group == _group.name and x.shape[0] <= _group.max_rows(x.shape[1]):
        return x, True
    return torch.ops.vllm.all_reduce(x, group), False


def _reduce_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float,
                 group: str) -> tuple[torch.Tensor, torch.Tensor]:
    """norm of the sum of x over the group."""
    x, reduce = _part_or_sum(x, group)
    return torch.ops.nestedfp.norm(x, residual, weight, epsilon, reduce)


def _reduce_norm_linear(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float,
                        upper: torch.Tensor, lower: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None,
                        n: int, k: int, join: int, swiglu: bool, group: str) -> tuple[torch.Tensor, torch.Tensor]:
    """norm_linear of the sum of x over the group."""
    x, reduce = _part_or_sum(x, group)
    return torch.ops.nestedfp.norm_linear(x, residual, weight, epsilon, upper, lower, scale, bias, n, k, join, swiglu,
                                          reduce)


def register() -> None:
    """The operators; for graphs out of vLLM's compile cache too. Idempotent."""
    if not hasattr(torch.ops.nestedfp, "reduce_norm_linear"):
        op.define("reduce_norm", op.norm_fake, _reduce_norm)
        op.define("reduce_norm_linear", op.norm_linear_fake, _reduce_norm_linear)


def enable(config: Any) -> str | None:
    """The name of the group whose sums norms may make, for the model of this vLLM configuration; None where there is no
    such group, nothing is compiled, or vLLM's own kernel for sums does not run (GPUs that do not see each other's memory,
    several hosts, --disable-custom-all-reduce). All ranks come here together."""
    from vllm.config import CompilationMode
    from vllm.distributed.parallel_state import get_tp_group

    if (config.parallel_config.tensor_parallel_size not in RANKS
            or config.compilation_config.mode != CompilationMode.VLLM_COMPILE):
        return None
    group = get_tp_group()
    custom = getattr(group.device_communicator, "ca_comm", None)
    if custom is None or custom.disabled or _group.name not in (None, group.unique_name):
        return None
    register()
    if _group.name is None:
        _group.join(group)
    if config.compilation_config.pass_config.fuse_allreduce_rms:
        # FlashInfer's of the same sums and norms, which would come before ours and leaves rounding to E4M3 to a kernel of
        # its own.
        config.compilation_config.pass_config.fuse_allreduce_rms = False
        logger.info("nestedfp: FlashInfer's way to do so (fuse_allreduce_rms) is turned off")
    return _group.name
