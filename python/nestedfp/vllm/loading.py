"""What happens around vLLM's loading of a model: how much of a layer was read, weights that are read again while CUDA
graphs hold the old ones' memory, and what is kept in mind once a model is there.

vLLM counts what it reads of a layer that is nested while it is loaded, and of every layer once weights are read again
(reload_weights, weight updates of training). What comes out it then writes to where the first weights lie.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from vllm.logger import init_logger

from . import op, swiglu, versions
from .patches import around
from .spent import seconds

logger = init_logger("vllm.nestedfp")

_dummy = False  # weights are being made up, which nobody counts


def _info(layer: torch.nn.Module) -> Any:
    """vLLM's LayerReloadingInfo; None for a layer that it has none of."""
    from vllm.model_executor.model_loader.reload import layerwise

    return getattr(layerwise, "LAYERWISE_INFO", {}).get(layer)


def held(layer: torch.nn.Module) -> Mapping[str, torch.Tensor] | None:
    """The parameters of weights that are being replaced, into which vLLM copies the new ones: CUDA graphs may hold
    them. None where weights are read for the first time."""
    tensors = getattr(_info(layer), "kernel_tensors", None)
    return None if tensors is None else tensors[0]


def missing(layer: torch.nn.Module, prefix: str) -> int:
    """How many of the layer's weights vLLM did not read; what is in their place is what the memory held before. Raises
    ValueError where it read none, or replaces only a part."""
    info = _info(layer)
    total = getattr(info, "load_numel_total", None)
    if total is None or (_dummy and held(layer) is None):
        return 0
    found = info.load_numel
    if found <= 0:
        raise ValueError(f"{prefix}: the checkpoint has no weights for this layer; copy the whole folder, or leave "
                         "--quantization out if the model does without them")
    if found < total and held(layer) is not None:
        raise ValueError(f"{prefix}: {found} of its {total} weights were given; an update must give all of a layer")
    return max(0, total - found)


def refresh(layer: torch.nn.Module, parameters: Mapping[str, torch.Tensor]) -> None:
    """Of weights that are read again: the bias at once, since the op keeps a copy of it in FP32."""
    bias, new = parameters.get("bias"), getattr(layer, "bias", None)
    if bias is not None and new is not None:
        bias.data.copy_(new.data)
        op.refresh(bias)


def form_of(model: torch.nn.Module) -> list[tuple[Any, ...]]:
    """What of the layers shapes a compiled graph, and is known only once their weights are: which are nested, by which
    join, with rows' scales or without, in which order; and where attention rotates."""
    found = []
    for name, layer in model.named_modules():
        if hasattr(layer, "nestedfp_shape"):
            shape = layer.nestedfp_shape
            scales = shape is not None and layer.weight_scale.numel() > 0
            found.append((name, None if shape is None else int(shape[2]), scales, bool(layer.nestedfp_interleaved),
                          bool(layer.nestedfp_swiglu)))
        elif getattr(layer, "nestedfp_rotates", False):
            found.append((name, "attention rotates"))
    return found


def mark(model: torch.nn.Module, config: Any, prefix: str = "") -> None:
    """Makes form_of() part of what vLLM's compile cache is keyed by. Two checkpoints of one config.json may differ in
    it, and vLLM drops the guards that would tell their graphs apart."""
    form = form_of(model)
    if not form:
        return
    digest = hashlib.sha256(json.dumps(form).encode()).hexdigest()[:16]
    # A part of a model that vLLM compiles may have a copy of the configuration.
    configs = [config, *(getattr(module, "vllm_config", None) for module in model.modules())]
    for one in {id(one): one for one in configs if hasattr(one, "additional_config")}.values():
        versions.mark(one, f"{prefix} {type(model).__name__}", digest)


def _after(owner: Any, name: str, then: Callable[..., None]) -> None:
    """Calls then(...) with a method's arguments once it has returned. Nothing where there is no such method."""
    if not hasattr(owner, name):
        return

    @around(owner, name)
    def method(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        then(*args, **kwargs)
        return result


def _read_again(*_: Any, **__: Any) -> None:
    from . import rotary  # as attention is

    op.refresh()
    rotary.refresh()


def _woken(tags: Any = None, *_: Any, **__: Any) -> None:
    if tags is None or "weights" in tags:
        op.clear_workspaces()


def _follow_worker() -> None:
    """In a worker's process: what was made of weights that were written to in place, and memory that sleep of level 2
    has thrown away."""
    worker = getattr(sys.modules.get("vllm.v1.worker.gpu_worker"), "Worker", None)
    for name in ("reload_weights", "finish_weight_update"):
        _after(worker, name, _read_again)
    _after(worker, "wake_up", _woken)


def _install_dummies() -> None:
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    @around(DummyModelLoader, "load_weights")
    def load_weights(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        global _dummy
        _dummy = True
        try:
            return original(*args, **kwargs)
        finally:
            _dummy = False


def _install_mla() -> None:
    """vLLM makes W_UK and W_UV of multi-head latent attention from what kv_b_proj makes of a unit matrix, which must be
    the weights, whatever precision so many rows would have."""
    from vllm.model_executor.layers.attention import MLAAttention

    @around(MLAAttention, "process_weights_after_loading")
    def process_weights_after_loading(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not op.in_use():
            return original(*args, **kwargs)
        with op.forced(op.FP16):
            return original(*args, **kwargs)


def _install_loaders() -> None:
    """Once a model has been made: some models (Mamba-2's mixer) give a layer another loader then, for its weight
    alone."""
    from vllm.model_executor.model_loader import utils

    @around(utils, "record_metadata_for_reloading")
    def record_metadata_for_reloading(original: Callable[..., Any], model: torch.nn.Module) -> None:
        for layer in model.modules():
            follow = getattr(getattr(layer, "quant_method", None), "nestedfp_follow_loader", None)
            if follow is not None:
                follow(layer)
        original(model)


def follow_transformers() -> None:
    """While a model is made: vLLM's backend for those of transformers gives memory to whatever has none yet, also to the
    weights of layers that are nested while they are read."""
    base = getattr(sys.modules.get("vllm.model_executor.models.transformers.base"), "Base", None)
    if base is None:
        return

    @around(base, "init_parameters")
    def init_parameters(original: Callable[..., None], self: Any, module: torch.nn.Module, *args: Any,
                        **kwargs: Any) -> None:
        unread = [(layer, name, layer._parameters.pop(name)) for layer in module.modules()
                  if getattr(getattr(layer, "quant_method", None), "nestedfp_online", False)
                  for name, parameter in list(layer._parameters.items()) if parameter is not None and parameter.is_meta]
        try:
            original(self, module, *args, **kwargs)
        finally:
            for layer, name, parameter in unread:
                layer.register_parameter(name, parameter)


def begin(model_config: Any) -> None:
    """Before a model is made: one that is not nested has vLLM's own attention, whatever ran in this process before. (A
    draft model has its target's.)"""
    attention = sys.modules.get("nestedfp.vllm.attention")
    if (attention is not None and getattr(model_config, "quantization", None) != "nestedfp"
            and getattr(model_config, "runner_type", None) != "draft"):
        attention.withdraw()


def _install_load() -> None:
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    @around(BaseModelLoader, "load_model")
    def load_model(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> torch.nn.Module:
        config, model_config = (kwargs.get(name, args[i] if len(args) > i else None)
                                for i, name in enumerate(("vllm_config", "model_config")))
        begin(model_config)
        model = original(self, *args, **kwargs)
        if op.in_use():
            from . import rotary  # as attention is

            swiglu.join(model)
            joined = rotary.join(model, config, model_config)
            if joined:
                logger.info("nestedfp: attention rotates in %d layers", joined)
        mark(model, config, kwargs.get("prefix", ""))
        if op.in_use():
            _follow_worker()
        if seconds:
            logger.info("nestedfp: of loading the model: %s", ", ".join(f"{part} {s:.2f} s" for part, s in seconds.items()))
            seconds.clear()
        return model


def install() -> None:
    """Idempotent."""
    _install_dummies()
    _install_mla()
    _install_loaders()
    _install_load()
