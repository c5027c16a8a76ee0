"""The quantization method "nestedfp": ordinary FP16/BF16 checkpoints are nested while they are loaded, nested
checkpoints (docs/format.md) are taken as they are."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import vllm.envs as envs
from vllm.config import get_current_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe import FusedMoE, UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import (
    LinearBase,
    LinearMethodBase,
    ReplicatedLinear,
    UnquantizedLinearMethod,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.quantization.utils.quant_utils import is_layer_skipped
from vllm.model_executor.parameter import ChannelQuantScaleParameter, ModelWeightParameter
from vllm.model_executor.utils import replace_parameter, set_weight_attrs

from . import assembler, checkpoint, limits, loading, metrics, norms, op, overlap, requests, settings, swiglu, versions
from .patches import around
from .policy import Policy

logger = init_logger("vllm.nestedfp")

# The copy engine reads rows of activations in pieces of 16 bytes.
_COLUMNS_MULTIPLE = 8


# What is one matrix in vLLM and several in a checkpoint, where a model does not say so itself.
_FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


# What nested weights are, and the activations that they are multiplied with.
_TYPES = (torch.float16, torch.bfloat16)


# Layers whose weights models read themselves, and not through the layer: their type, to convert images to it (Isaac,
# Qwen-VL), or their numbers (LongCat's latent attention), or where they lie, before they are read, to put a bias there
# (classifiers).
_READ_BY_MODELS = re.compile(r"(^|\.)(vision_embedding\.1|resblocks\.0\.mlp\.c_fc|score)$")
_READ_BY_LONGCAT = re.compile(r"\.kv_b_proj$")


def _why_dense(columns: int) -> str | None:
    if columns % _COLUMNS_MULTIPLE:
        return f"{columns} input features are no multiple of {_COLUMNS_MULTIPLE}"
    return None


def _why_never_nested(layer: torch.nn.Module, prefix: str) -> str | None:
    """Of a layer that cannot be nested in a checkpoint either."""
    if layer.params_dtype not in _TYPES:  # heads of classifiers, some models' gates
        return f"it is {str(layer.params_dtype).removeprefix('torch.')}"
    if _READ_BY_MODELS.search(prefix):
        return "the model reads its weights itself"
    if _READ_BY_LONGCAT.search(prefix):
        model = getattr(get_current_vllm_config().model_config, "hf_config", None)
        if str(getattr(model, "model_type", "")).startswith("longcat"):
            return "the model reads its weights itself"
    return None


def _is_router(layer: torch.nn.Module, prefix: str) -> bool:
    """Of a mixture of experts. It runs beside the shared experts, which alone may have the workspace meanwhile."""
    return isinstance(layer, ReplicatedLinear) and prefix.endswith((".gate", "experts_gate", "expert_gate", "router"))


class _DenseLayers:
    """Names each layer that stays dense once, with the reason."""

    def __init__(self) -> None:
        self.seen: set[str] = set()

    def add(self, prefix: str, why: str) -> None:
        if prefix not in self.seen:
            self.seen.add(prefix)
            logger.info("nestedfp: %s stays dense: %s", prefix, why)


_dense_layers = _DenseLayers()


def _install(layer: torch.nn.Module, planes: op.Planes) -> None:
    replace_parameter(layer, "weight", planes.upper)
    replace_parameter(layer, "weight_lower", planes.lower)
    replace_parameter(layer, "weight_scale", planes.scale)
    layer.nestedfp_shape = (planes.n, planes.k, planes.join)
    if getattr(layer, "_use_min_latency_gemm", False):
        layer._use_min_latency_gemm = False  # DeepSeek's, of the weight as it was made: a kernel that reads BF16


class _NestedLinearMethod(LinearMethodBase):
    def __init__(self, config: NestedFPConfig, prefix: str):
        self.config = config
        self.prefix = prefix
        self.dense = UnquantizedLinearMethod()

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if layer.nestedfp_shape is None:
            return self.dense.apply(layer, x, bias)
        if x.dim() != 2:
            y = self.apply(layer, x.reshape(-1, x.shape[-1]), bias)
            return y.view(*x.shape[:-1], y.shape[-1])
        n, k, join = layer.nestedfp_shape
        planes = (layer.weight, layer.weight_lower, layer.weight_scale)
        if layer.nestedfp_swiglu:
            return torch.ops.nestedfp.swiglu(x, *planes, n, k, join)
        y = torch.ops.nestedfp.linear(x, *planes, bias, n, k, join)
        return op.in_order(y) if layer.nestedfp_interleaved else y

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """A second time where weights are read again. Then vLLM copies what is left in the layer to where the first
        ones lie, which CUDA graphs hold: it must have their form."""
        if getattr(layer, "_already_called_process_weights_after_loading", False):
            return
        missing = loading.missing(layer, self.prefix)
        layer._already_called_process_weights_after_loading = True
        held = loading.held(layer)
        if held is None:
            where = layer.weight.device
            op.self_test(where, self.dtype)
            op.device(layer.weight.get_device()).forget()
            scaled = True if self.config.keeps_scales else None
        elif "weight_lower" in held:
            scaled = held["weight_scale"].numel() > 0
            loading.refresh(layer, held)
        else:  # was left dense
            return
        try:
            _install(layer, self.planes(layer, scaled, missing))
        except op.NotNested as why:
            if held is not None:
                raise ValueError(f"{self.prefix}.weight: the new weights do not nest as those did that vLLM was "
                                 f"started with ({why}); start it with the new ones") from why
            layer.nestedfp_shape = None
            layer.nestedfp_interleaved = False
            self.config.dense_layers.add(self.prefix, str(why))
        except ValueError as error:
            raise ValueError(f"{self.prefix}.weight: {error}") from error

    def planes(self, layer: torch.nn.Module, scaled: bool | None, missing: int) -> op.Planes:
        """Of what was loaded, `missing` weights of which were not. Raises op.NotNested where it must stay dense."""
        raise NotImplementedError

    def prepare(self, layer: torch.nn.Module, parts: list[int], dtype: torch.dtype) -> None:
        """Of create_weights()."""
        self.dtype = dtype
        layer.nestedfp_shape = None
        layer.nestedfp_parts = parts
        layer.nestedfp_interleaved = False
        layer.nestedfp_swiglu = False  # swiglu.join()

    def order(self, layer: torch.nn.Module, *planes: torch.Tensor) -> list[torch.Tensor]:
        """The rows of a weight, or of its planes, as the kernels want them."""
        layer.nestedfp_interleaved = (self.config.joins_swiglu
                                      and swiglu.may_join(self.prefix, layer.nestedfp_parts, layer))
        return [op.interleave(plane) if layer.nestedfp_interleaved else plane for plane in planes]


@register_weight_loader_v2_supported_method
class NestedOnlineLinearMethod(_NestedLinearMethod):
    """Weights of an ordinary checkpoint: each layer is nested as soon as all of it has been read, so that the peak is
    the planes and one layer."""

    uses_meta_device = nestedfp_online = True

    def create_weights(self, layer: torch.nn.Module, input_size_per_partition: int,
                       output_partition_sizes: list[int], input_size: int, output_size: int,
                       params_dtype: torch.dtype, **extra_weight_attrs: Any) -> None:
        from vllm.model_executor.model_loader.reload.layerwise import initialize_online_processing

        weight = ModelWeightParameter(
            data=torch.empty(sum(output_partition_sizes), input_size_per_partition, device="meta", dtype=params_dtype),
            input_dim=1, output_dim=0, weight_loader=extra_weight_attrs.get("weight_loader"))
        layer.register_parameter("weight", weight)
        self.prepare(layer, output_partition_sizes, params_dtype)
        initialize_online_processing(layer)

    def nestedfp_follow_loader(self, layer: torch.nn.Module) -> None:
        """One that writes at once would write nowhere: the weight has no memory yet."""
        from vllm.model_executor.model_loader.reload.layerwise import make_online_process_loader

        if layer.weight.is_meta and getattr(layer.weight.weight_loader, "__name__", "") != "online_process_loader":
            layer.weight.weight_loader = make_online_process_loader(layer, "weight")

    def planes(self, layer: torch.nn.Module, scaled: bool | None, missing: int) -> op.Planes:
        if missing:
            raise op.NotNested(f"{missing} of its {layer.weight.numel()} weights are not in the checkpoint")
        return op.nest(*self.order(layer, layer.weight.data), scaled)


@register_weight_loader_v2_supported_method
class NestedCheckpointLinearMethod(_NestedLinearMethod):
    """Planes of a nested checkpoint. They are cut by rows and columns as any weight is, and packed afterwards."""

    def create_weights(self, layer: torch.nn.Module, input_size_per_partition: int,
                       output_partition_sizes: list[int], input_size: int, output_size: int,
                       params_dtype: torch.dtype, **extra_weight_attrs: Any) -> None:
        rows = sum(output_partition_sizes)
        loader = extra_weight_attrs.pop("weight_loader")
        unread = checkpoint.unread(rows, input_size_per_partition)
        for name, data in (("weight", unread[0]), ("weight_lower", unread[1])):
            plane = ModelWeightParameter(data=data, input_dim=1, output_dim=0, weight_loader=loader)
            layer.register_parameter(name, plane)
            set_weight_attrs(plane, extra_weight_attrs)
        scale = ChannelQuantScaleParameter(data=unread[2], output_dim=0, weight_loader=loader)
        layer.register_parameter("weight_scale", scale)
        layer.nestedfp_loader = layer.weight.weight_loader
        self.prepare(layer, output_partition_sizes, params_dtype)

    def nestedfp_follow_loader(self, layer: torch.nn.Module) -> None:
        """All three tensors are cut in one way."""
        loader = layer.weight.weight_loader
        if loader != layer.nestedfp_loader:
            layer.weight_lower.weight_loader = layer.weight_scale.weight_loader = layer.nestedfp_loader = loader

    def planes(self, layer: torch.nn.Module, scaled: bool | None, missing: int) -> op.Planes:
        planes = (layer.weight.data.view(torch.uint8), layer.weight_lower.data, layer.weight_scale.data)
        if loading.held(layer) is None:  # else they were counted
            checkpoint.clear_unread(self.prefix, *planes)
        return op.pack(*self.order(layer, *planes), self.config.nested.uppers == "free", scaled)


class NestedFPConfig(QuantizationConfig):
    """Both kinds of checkpoints; ``nested`` is None for ordinary ones."""

    def __init__(self) -> None:
        super().__init__()
        self.nested: checkpoint.NestedInfo | None = None
        self.ignore: list[str] = []
        self.prepared = False
        self.dense_layers = _dense_layers
        self.joins_swiglu = False
        self.keeps_scales = False  # of rows, where all are 1 too: weights that are read again may need them

    @classmethod
    def get_name(cls) -> str:
        return "nestedfp"

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    @classmethod
    def get_min_capability(cls) -> int:
        return 90

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> NestedFPConfig:
        """Of a checkpoint that has a quantization_config; whether it is a nested one maybe_update_config finds."""
        made = cls()
        made.ignore = list(config.get("ignore", []))
        if config.get("quant_method") not in (None, "compressed-tensors", "nestedfp"):
            raise ValueError(f"--quantization nestedfp: the checkpoint is quantised already "
                             f"({config.get('quant_method')}); use its FP16 or BF16 original")
        return made

    @classmethod
    def override_quantization_method(cls, hf_quant_cfg: dict[str, Any], user_quant: str | None,
                                     hf_config: Any = None) -> str | None:
        if getattr(hf_config, "nestedfp", None) is None or user_quant not in (None, "nestedfp"):
            return None
        return "nestedfp"

    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None) -> None:
        versions.check_gpu()
        if getattr(hf_config, "nestedfp", None) is not None:
            self.nested = checkpoint.NestedInfo.parse(hf_config.nestedfp)
        elif getattr(hf_config, "quantization_config", None) is not None:
            raise ValueError(f"{model_name}: --quantization nestedfp needs an FP16 or BF16 checkpoint, or one that "
                             "'nestedfp convert' wrote; this one is quantised in another way")

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        if isinstance(layer, FusedMoE):
            return self._experts_method(layer, prefix)
        if not isinstance(layer, LinearBase):
            return None
        if _is_router(layer, prefix):
            return UnquantizedLinearMethod()
        why = _why_never_nested(layer, prefix)
        if why is not None:
            return self._never_nested(prefix, why)
        self._prepare(layer.params_dtype)
        why = _why_dense(getattr(layer, "input_size_per_partition", layer.input_size))
        if why is not None:
            return self._never_nested(prefix, why)
        if self.nested is None:
            return NestedOnlineLinearMethod(self, prefix)
        if self._is_dense_in_checkpoint(prefix):
            return UnquantizedLinearMethod()
        return NestedCheckpointLinearMethod(self, prefix)

    def _never_nested(self, prefix: str, why: str) -> QuantizeMethodBase:
        if self.nested is None:
            self.dense_layers.add(prefix, why)
        elif not self._is_dense_in_checkpoint(prefix):
            raise ValueError(f"{prefix} cannot be nested: {why}: run the model that this nested checkpoint was made of")
        return UnquantizedLinearMethod()

    def _is_dense_in_checkpoint(self, prefix: str) -> bool:
        name = prefix.removeprefix("draft_model.")  # as vLLM puts before the names of a draft model's layers
        # Phi-3's are one matrix in the checkpoint too: vLLM's own class says so, its backend for transformers does not.
        fused = {**_FUSED, **self.packed_modules_mapping}
        if name not in self.ignore and not is_layer_skipped(name, self.ignore, fused):
            return False
        self.dense_layers.add(prefix, "it is in the checkpoint")
        return True

    def _experts_method(self, layer: FusedMoE, prefix: str) -> QuantizeMethodBase:
        from . import fused_moe

        self._prepare(layer.params_dtype)
        why = fused_moe.why_dense(layer)
        if self.nested is not None:
            if self._is_dense_in_checkpoint(prefix):
                return UnquantizedFusedMoEMethod(layer.moe_config)
            if why is not None:
                raise ValueError(f"{prefix}: {why}: run the model that this nested checkpoint was made of")
            return fused_moe.NestedCheckpointExpertsMethod(self, layer, prefix)
        if why is not None:
            self.dense_layers.add(prefix, why)
            return UnquantizedFusedMoEMethod(layer.moe_config)
        return fused_moe.NestedOnlineExpertsMethod(self, layer, prefix)

    def _prepare(self, dtype: torch.dtype) -> None:
        if self.prepared:
            return
        config = get_current_vllm_config()
        checkpoint.check_load_format(config.load_config.load_format, self.nested is not None)
        limits.check_batch_invariance(envs.VLLM_BATCH_INVARIANT)
        limits.check_offload(config)
        wanted = settings.current()
        Policy(wanted.policy)  # an error for one that there is not
        # A draft model runs in its target's worker, which the parallel_config that vLLM makes for it does not name.
        parallel = getattr(config.speculative_config, "target_parallel_config", None) or config.parallel_config
        by_rows = parallel.worker_cls != limits.WORKER
        threshold = wanted.threshold()
        if by_rows and threshold is None:
            raise ValueError(f"precision policy '{wanted.policy}': without nestedfp's scheduler and worker "
                             "(docs/vllm.md) only fp16, fp8-w8a8 and threshold:TOKENS work")
        if by_rows and wanted.has_targets():
            raise ValueError("additional_config: nestedfp.slo_ttft_ms and slo_tpot_ms need nestedfp's scheduler and "
                             "worker (docs/vllm.md)")
        if self.nested is not None and dtype is torch.bfloat16 and self.nested.source_dtype != "BF16":
            raise ValueError("this nested checkpoint was made of FP16 weights, which BF16 activations cannot be "
                             "multiplied with exactly: add --dtype float16")
        self.prepared = True
        op.register()
        versions.mark(config)
        assembler.choose(Path(torch.__file__).parent)
        loading.follow_transformers()
        overlap.enable(config)
        norms.enable(config)
        from . import attention  # imports all of FlashAttention: not in processes without such a model

        attention.enable(config)
        self.joins_swiglu = config.lora_config is None  # adapters add to what the activation gets
        self.keeps_scales = (getattr(config, "weight_transfer_config", None) is not None
                             or bool(getattr(config.model_config, "enable_sleep_mode", False)))
        if by_rows and threshold is not None:
            op.Step.threshold, op.Step.forced = threshold, None  # None, whatever an engine before it left


def _find_at_once() -> None:
    """vLLM's loader asks for the method by its name, and imports all other methods before it looks for ours."""
    from vllm.model_executor.model_loader import weight_utils

    @around(weight_utils, "get_quantization_config")
    def get_quantization_config(original: Callable[[str], Any], quantization: str) -> type[QuantizationConfig]:
        return NestedFPConfig if quantization == "nestedfp" else original(quantization)


def register() -> None:
    register_quantization_config("nestedfp")(NestedFPConfig)
    checkpoint.install_loader()
    metrics.install_field()
    metrics.install_logger()
    loading.install()
    requests.install()
    _find_at_once()  # once all of it fits: from then on vLLM asks for no other, a refusal either
