"""What the plugin was tested with, and clear errors for anything else. Only check_gpu() needs anything of vLLM's."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
from functools import cache
from pathlib import Path
from typing import Any

# vLLM's internals change from release to release; these are the ones that the plugin was run with.
TESTED = ("0.23",)


def installed_vllm() -> str:
    try:
        return importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:  # a copy that no installer has put there
        import vllm

        return vllm.__version__


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


@cache
def own() -> str:
    """The plugin's version, and a digest of its code, which tells apart two builds of one version."""
    from .._library import library

    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(file.read_bytes())
    return f"{library().nfp_version().decode()} {digest.hexdigest()[:16]}"


class _Marked:
    """An additional_config that is no dict, and our version."""

    def __init__(self, inner: Any):
        self.inner = inner
        self.layers: dict[str, str] = {}

    def __getattr__(self, name: str) -> Any:
        if name in ("inner", "layers"):  # not there yet, while it is copied
            raise AttributeError(name)
        return getattr(self.inner, name)

    def compute_hash(self) -> str:
        layers = "".join(f" {model} {form}" for model, form in sorted(self.layers.items()))
        return f"{self.inner.compute_hash()} {own()}{layers}"


def _add(layers: dict[str, str], model: str, form: str) -> None:
    before = layers.get(model)
    layers[model] = form if before in (None, form) else f"{before} {form}"  # a draft of the same kind


def mark(config: Any, model: str | None = None, form: str = "") -> None:
    """Makes the plugin's version part of what vLLM's compile cache is keyed by: additional_config is, and no part of
    the quantization. Also what is known of a model's layers (`form`), once it is."""
    given = config.additional_config
    if isinstance(given, dict):
        given["nestedfp_version"] = own()
        if model is not None:
            _add(given.setdefault("nestedfp_layers", {}), model, form)
        return
    if not isinstance(given, _Marked):
        given = config.additional_config = _Marked(given)
    if model is not None:
        _add(given.layers, model, form)
