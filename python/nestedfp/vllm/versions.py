"""What the plugin was tested with, and clear errors for anything else."""

from __future__ import annotations

import os

# vLLM's internals change from release to release; these are the ones that the plugin was run with.
TESTED = ("0.23",)


def check_vllm(version: str) -> None:
    """Raises ValueError for a vLLM that the plugin was not tested with."""
    minor = ".".join(version.split("+")[0].split(".")[:2])
    if minor in TESTED or os.environ.get("NESTEDFP_ANY_VLLM") == "1":
        return
    raise ValueError(f"nestedfp was tested with vLLM {', '.join(TESTED)}.x, and this is {version}: install a tested "
                     "one, or set NESTEDFP_ANY_VLLM=1 to try all the same")


def check_gpu() -> None:
    """Raises ValueError where the current device is not a Hopper GPU or the library has no kernels."""
    from vllm.platforms import current_platform

    from .._library import library

    if library().nfp_build() != b"cuda":
        raise ValueError("this build of nestedfp has no CUDA kernels; install a wheel that was built with nvcc")
    if not current_platform.is_cuda():
        raise ValueError("--quantization nestedfp needs an NVIDIA GPU of compute capability 9.0 (H100, H200, GH200)")
    capability = current_platform.get_device_capability()
    if capability is None or capability.to_int() != 90:
        found = "none" if capability is None else f"{capability.major}.{capability.minor}"
        raise ValueError("--quantization nestedfp needs a GPU of compute capability 9.0 (H100, H200, GH200); this one "
                         f"has {found}")
