"""Mixtures of experts: what vLLM's FusedMoE layers do with the weights of their experts. The router and what a token's
experts count stay vLLM's, and so does how shared experts run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe import FusedMoE, FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FUSED_MOE_UNQUANTIZED_CONFIG
from vllm.model_executor.layers.fused_moe.layer import FusedMoeWeightScaleSupported
from vllm.model_executor.utils import replace_parameter, set_weight_attrs

from .. import _library
from . import checkpoint, experts, loading, op

if TYPE_CHECKING:
    from .quantization import NestedFPConfig

logger = init_logger("vllm.nestedfp")

_ACTIVATIONS = {MoEActivation.SILU: _library.SILU, MoEActivation.GELU_TANH: _library.GELU_TANH}
# The library's bounds (nestedfp.h).
_MOST_EXPERTS, _MOST_A_TOKEN, _COLUMNS_MULTIPLE = 512, 32, 8


def why_dense(layer: FusedMoE) -> str | None:
    """Why the experts of this layer cannot be run nested; None where they can."""
    moe, parallel = layer.moe_config, layer.moe_parallel_config
    if layer.params_dtype not in (torch.float16, torch.bfloat16):
        return f"its experts are {str(layer.params_dtype).removeprefix('torch.')}"
    if moe.has_bias:
        return "its experts have biases"
    if not moe.is_act_and_mul or layer.activation not in _ACTIVATIONS:
        return f"its experts' activation is {layer.activation.value}, only gated silu and gelu_tanh are run nested"
    if layer.swiglu_limit is not None:
        return "its experts' activation is limited (swiglu_limit)"
    if layer.apply_router_weight_on_input:
        return "its router's weights count before the experts, not behind them"
    if moe.is_lora_enabled:
        return "adapters of experts are added inside vLLM's own kernels"
    if layer.eplb_state is not None:
        return "the expert load balancer moves weights"
    if parallel.use_all2all_kernels and not parallel.use_ag_rs_all2all_kernels:
        return f"tokens go between GPUs by {parallel.all2all_backend}; nested experts need allgather_reducescatter"
    if layer.local_num_experts > _MOST_EXPERTS or layer.top_k > _MOST_A_TOKEN:
        return (f"{layer.local_num_experts} experts, {layer.top_k} a token, are more than {_MOST_EXPERTS}, "
                f"{_MOST_A_TOKEN}")
    if moe.hidden_dim % _COLUMNS_MULTIPLE or moe.intermediate_size_per_partition % _COLUMNS_MULTIPLE:
        return (f"{moe.hidden_dim} or {moe.intermediate_size_per_partition} features are no multiple of "
                f"{_COLUMNS_MULTIPLE}")
    return None


def _load_by_parameter(param: torch.nn.Parameter, loaded_weight: torch.Tensor, weight_name: str, shard_id: str,
                       expert_id: int, return_success: bool = False) -> bool | None:
    """In the place of a layer's weight_loader(), to which vLLM's backend for transformers gives weights, past the
    loaders of their parameters. These count what is read, and write where no memory is yet."""
    return param.weight_loader(param, loaded_weight, weight_name, shard_id=shard_id, expert_id=expert_id,
                               return_success=return_success)


class _NestedExpertsMethod(FusedMoEMethodBase):
    def __init__(self, config: NestedFPConfig, layer: FusedMoE, prefix: str):
        super().__init__(layer.moe_config)
        self.config = config
        self.prefix = prefix
        self.dtype = layer.params_dtype

    def get_fused_moe_quant_config(self, layer: torch.nn.Module) -> Any:
        return FUSED_MOE_UNQUANTIZED_CONFIG  # of what goes between GPUs

    def maybe_make_prepare_finalize(self, routing_tables: Any = None) -> None:
        return None  # vLLM's runner gathers tokens, and reduces

    @property
    def topk_indices_dtype(self) -> torch.dtype | None:
        return torch.int32

    def install(self, layer: torch.nn.Module, name: str, stack: experts.Stack) -> experts.Stack:
        """In place of the layer's weight w13 (gate and up) or w2 (down)."""
        replace_parameter(layer, f"{name}_weight", stack.bytes)
        replace_parameter(layer, f"{name}_weight_scale", stack.scale)
        if hasattr(layer, f"{name}_weight_lower"):
            delattr(layer, f"{name}_weight_lower")
        if stack.dense:
            first = min(stack.dense)
            self.config.dense_layers.add(f"{self.prefix}, {name} of {len(stack.dense)} of {stack.experts} experts",
                                         f"expert {first}: {stack.dense[first]}")
        return stack

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """A second time where weights are read again. Then vLLM copies what is left in the layer to where the first
        ones lie, which CUDA graphs and the mixture hold: it must have their form."""
        if getattr(layer, "_already_called_process_weights_after_loading", False):
            return
        if missing := loading.missing(layer, self.prefix):
            logger.warning("nestedfp: %s: %d weights of its experts are not in the checkpoint", self.prefix, missing)
        layer._already_called_process_weights_after_loading = True
        before = None if loading.held(layer) is None else layer.nestedfp_experts.stacks
        if before is None:
            op.self_test(layer.w13_weight.device, self.dtype)
            op.device(layer.w13_weight.get_device()).forget()
            forms = [experts.Form(True if self.config.keeps_scales else None)] * 2
        else:
            forms = [stack.form() for stack in before]
        stacks = [self.install(layer, name, self.stack(layer, name, form)) for name, form in zip(("w13", "w2"), forms)]
        if before is None:
            layer.nestedfp_experts = experts.Mixture(*stacks, _ACTIVATIONS[layer.activation])

    def stack(self, layer: torch.nn.Module, name: str, form: experts.Form) -> experts.Stack:
        """Of the weight that was loaded."""
        raise NotImplementedError

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor,
              shared_experts: Any = None, shared_experts_input: Any = None) -> torch.Tensor:
        return layer.nestedfp_experts.run(x, topk_weights, topk_ids, layer.expert_map)


class NestedOnlineExpertsMethod(_NestedExpertsMethod):
    """Experts of an ordinary checkpoint, nested as soon as all of the layer's have been read."""

    uses_meta_device = nestedfp_online = True

    def create_weights(self, layer: torch.nn.Module, num_experts: int, hidden_size: int,
                       intermediate_size_per_partition: int, params_dtype: torch.dtype,
                       **extra_weight_attrs: Any) -> None:
        from vllm.model_executor.model_loader.reload.layerwise import initialize_online_processing

        for name, n, k in (("w13", 2 * intermediate_size_per_partition, hidden_size),
                           ("w2", hidden_size, intermediate_size_per_partition)):
            weight = torch.nn.Parameter(torch.empty(num_experts, n, k, device="meta", dtype=params_dtype),
                                        requires_grad=False)
            layer.register_parameter(f"{name}_weight", weight)
            set_weight_attrs(weight, extra_weight_attrs)
        layer.weight_loader = _load_by_parameter
        initialize_online_processing(layer)

    def stack(self, layer: torch.nn.Module, name: str, form: experts.Form) -> experts.Stack:
        try:
            return experts.nest(getattr(layer, f"{name}_weight").data, name == "w13", form)
        except ValueError as error:
            raise ValueError(f"{self.prefix}.{name}_weight: {error}") from error


class NestedCheckpointExpertsMethod(_NestedExpertsMethod):
    """Planes of a nested checkpoint's experts. They are cut by rows and columns as any weight is, and packed afterwards.
    `convert` writes all experts of a layer nested, or none."""

    def create_weights(self, layer: torch.nn.Module, num_experts: int, hidden_size: int,
                       intermediate_size_per_partition: int, params_dtype: torch.dtype,
                       **extra_weight_attrs: Any) -> None:
        channel = {**extra_weight_attrs, "quant_method": FusedMoeWeightScaleSupported.CHANNEL.value}
        for name, n, k in (("w13", 2 * intermediate_size_per_partition, hidden_size),
                           ("w2", hidden_size, intermediate_size_per_partition)):
            upper, lower, scale = checkpoint.unread(num_experts, n, k)
            for suffix, data, attrs in (("weight", upper, extra_weight_attrs), ("weight_lower", lower, extra_weight_attrs),
                                        ("weight_scale", scale, channel)):
                parameter = torch.nn.Parameter(data, requires_grad=False)
                layer.register_parameter(f"{name}_{suffix}", parameter)
                set_weight_attrs(parameter, attrs)
        layer.weight_loader = _load_by_parameter

    def stack(self, layer: torch.nn.Module, name: str, form: experts.Form) -> experts.Stack:
        upper, lower, scale = (getattr(layer, f"{name}_weight{suffix}").data for suffix in ("", "_lower", "_scale"))
        if loading.held(layer) is None:  # else they were counted
            checkpoint.clear_unread(f"{self.prefix}.{name}_weight", upper.view(torch.uint8), lower, scale)
        try:
            return experts.pack(upper, lower, scale, name == "w13", self.config.nested.uppers == "free", form)
        except ValueError as error:
            raise ValueError(f"{self.prefix}.{name}_weight: {error}") from error
