"""Residual add, RMSNorm, rounding to E4M3 and product in one operation: an Inductor pass that joins each norm to the
linear layer that alone reads it.

An FP8 step then rounds activations where the norm makes them. Otherwise the norm's 16 bits would go to memory and come
back to be rounded by a kernel of its own. In an FP16 step the norm is a kernel of ours in place of Inductor's.
"""

from __future__ import annotations

import operator
import os
from typing import Any

import torch
from torch import fx
from vllm.compilation.passes.inductor_pass import InductorPass

from .. import _library
from . import all_reduce

# Inductor's hook for a pass over its graphs, which vLLM runs before its own operations are lowered.
HOOK = "post_grad_custom_post_pass"
# NESTEDFP_NORMS_APART=1: leave norms to Inductor, for comparisons.
APART = os.environ.get("NESTEDFP_NORMS_APART") == "1"


class JoinNorms(InductorPass):
    """vllm_ir.fused_add_rms_norm -> nestedfp.linear or swiglu becomes nestedfp.norm_linear. With vllm.all_reduce before
    them, over the group of that name, it becomes nestedfp.reduce_norm_linear, and the two first, where others read the
    norm too, nestedfp.reduce_norm (all_reduce.py)."""

    def __init__(self, group: str | None = None) -> None:
        self.group = group

    def uuid(self) -> str:
        return InductorPass.hash_source(self, f"group {self.group}")

    def __call__(self, graph: fx.Graph) -> None:
        norm = torch.ops.vllm_ir.fused_add_rms_norm.default
        place = {node: i for i, node in enumerate(graph.nodes)}
        for node in [node for node in graph.nodes if node.target is norm]:
            if is_ours(node) and not join(graph, node, place, self.group) and self.group is not None:
                join_sum(graph, node, self.group)


def is_ours(norm: fx.Node) -> bool:
    """Whether our kernels have such a norm."""
    x, residual, weight, _, *rest = norm.args
    if norm.kwargs or any(argument is not None for argument in rest) or not isinstance(weight, fx.Node):
        return False
    if not _one_type(x, residual, weight):
        return False
    columns = weight.meta["val"].shape[0]
    return columns % 8 == 0 and columns <= _library.library().nfp_max_quantised_columns()


def join_sum(graph: fx.Graph, norm: fx.Node, group: str) -> None:
    x, residual, weight, epsilon = norm.args[:4]
    if _sum_that_one_reads(x, group):
        with graph.inserting_before(norm):
            made = graph.call_function(torch.ops.nestedfp.reduce_norm.default, (x.args[0], residual, weight, epsilon, group))
        made.meta["val"] = norm.meta["val"]
        norm.replace_all_uses_with(made)
        graph.erase_node(norm)
        graph.erase_node(x)


def join(graph: fx.Graph, norm: fx.Node, place: dict[fx.Node, int], group: str | None) -> bool:
    """Of one norm; False where it stays what it is. ``place``: of the graph's nodes, before any was joined."""
    x, residual, weight, epsilon = norm.args[:4]
    outputs = {user.args[1]: user for user in norm.users if user.target is operator.getitem}
    if len(outputs) != len(norm.users):
        return False
    product, between = _only_reader(outputs.get(0))
    if product is None:
        return False
    plain, swiglu = torch.ops.nestedfp.linear.default, torch.ops.nestedfp.swiglu.default
    if product.target not in (plain, swiglu) or product.kwargs:
        return False
    planes = list(product.args[1:4])
    bias = product.args[4] if product.target is plain else None
    n, k, kind = product.args[-3:]
    # The operation stands where the norm stood: what else it reads must be there already.
    if any(isinstance(a, fx.Node) and place[a] > place[norm] for a in (bias, *planes)):
        return False
    sums = [x] if group is not None and _sum_that_one_reads(x, group) else []
    arguments = (x.args[0] if sums else x, residual, weight, epsilon, *planes, bias, n, k, kind, product.target is swiglu)
    with graph.inserting_before(norm):
        made = (graph.call_function(torch.ops.nestedfp.reduce_norm_linear.default, (*arguments, group)) if sums
                else graph.call_function(torch.ops.nestedfp.norm_linear.default, arguments))
        y, h = (graph.call_function(operator.getitem, (made, i)) for i in (0, 1))
    y.meta["val"], h.meta["val"] = product.meta["val"], norm.meta["val"][1]
    made.meta["val"] = (y.meta["val"], h.meta["val"])
    product.replace_all_uses_with(y)
    if 1 in outputs:
        outputs[1].replace_all_uses_with(h)
    for node in (product, *reversed(between), *outputs.values(), norm, *sums):
        graph.erase_node(node)
    return True


def _one_type(*nodes: Any) -> bool:
    values = [node.meta["val"] for node in nodes]
    return (values[0].dtype in (torch.float16, torch.bfloat16) and len({value.dtype for value in values}) == 1
            and [value.dim() for value in values] == [2, 2, 1])


def _sum_that_one_reads(x: fx.Node, group: str) -> bool:
    return (x.target is torch.ops.vllm.all_reduce.default and len(x.users) == 1
            and [*x.args[1:], *x.kwargs.values()] == [group])


def _only_reader(output: fx.Node | None) -> tuple[fx.Node | None, list[fx.Node]]:
    """What alone reads the output, and the reshapes between them that change nothing."""
    between: list[fx.Node] = []
    while output is not None and len(output.users) == 1:
        reader = next(iter(output.users))
        if reader.target not in (torch.ops.aten.reshape.default, torch.ops.aten.view.default):
            return (reader if reader.args and reader.args[0] is output else None), between
        if reader.meta["val"].shape != output.meta["val"].shape:
            break
        between.append(reader)
        output = reader
    return None, []


def enable(config: Any) -> None:
    """For the model of this vLLM configuration, unless it has such a pass already. All ranks come here together."""
    passes = config.compilation_config.inductor_compile_config
    if not APART and HOOK not in passes:
        passes[HOOK] = JoinNorms(all_reduce.enable(config))
