"""silu(gate) * up inside the product that computes both, in the layers that vLLM's Llama and Qwen MLPs are made of.

The weight's rows are ordered for it while it is nested. Where the MLP turns out to be another one, the layer's result is
put back in order instead.
"""

from __future__ import annotations

import re

import torch

_GATE_UP = re.compile(r"\.layers\.\d+\.mlp\.gate_up_proj$")


def may_join(prefix: str, parts: list[int], layer: torch.nn.Module) -> bool:
    """Whether the layer's rows are to be interleaved. Biases would have to be, too."""
    return (_GATE_UP.search(prefix) is not None and len(parts) == 2 and parts[0] == parts[1] and parts[0] % 8 == 0
            and getattr(layer, "bias", None) is None)


def join(model: torch.nn.Module) -> int:
    """Lets the gate_up_proj of every MLP of the known forms compute its activation; how many did."""
    from vllm.model_executor.layers.activation import SiluAndMul
    from vllm.model_executor.models.llama import LlamaMLP
    from vllm.model_executor.models.qwen2 import Qwen2MLP

    joined = 0
    for mlp in model.modules():
        if type(mlp) not in (LlamaMLP, Qwen2MLP) or type(mlp.act_fn) is not SiluAndMul:
            continue
        if getattr(mlp.gate_up_proj, "nestedfp_interleaved", False):
            mlp.gate_up_proj.nestedfp_swiglu = True
            mlp.act_fn = torch.nn.Identity()
            joined += 1
    return joined
