"""Kernels that begin while the one before them ends (programmatic dependent launch), for what Inductor compiles around
the linear layers.

Ours fetch weights while the kernel before them still runs, if that one lets them. Inductor's do with its option
triton.enable_pdl, and wait themselves only before they touch what the kernel just before them wrote. That is not enough
behind ours: they let the next one start at their own beginning, so that what was written two kernels before may not be
there yet. Here Inductor's kernels wait before they touch anything. Then each kernel that ends has seen all before it
end.
"""

from __future__ import annotations

from typing import Any

from .op import INDEPENDENT_START
from .patches import around

OPTION = "triton.enable_pdl"


def install() -> bool:
    """False where this PyTorch has no such option."""
    try:
        from torch._inductor.codegen.triton import TritonKernel
    except ImportError:
        return False
    if not hasattr(TritonKernel, "_handle_pdl_before_access"):
        return False

    @around(TritonKernel, "_handle_pdl_before_access")
    def wait_first(original: Any, self: Any, buffer: Any, *dependencies: Any, consider_reads: bool = False) -> None:
        if not self._enable_pdl_codegen():
            return
        in_loop = self.inside_reduction and self.range_trees[-1].is_loop
        (self.body if in_loop else buffer).writeline(self.GDC_WAIT)

    return True


def enable(config: Any) -> None:
    """For the model of this vLLM configuration, unless its compilation_config.inductor_compile_config says otherwise."""
    if install() and not INDEPENDENT_START:
        config.compilation_config.inductor_compile_config.setdefault(OPTION, True)
