"""Options of vLLM that nested weights, or a precision for every step, do not go with. Nothing here needs vLLM."""

from __future__ import annotations

from typing import Any

from .settings import Settings

WORKER = "nestedfp.vllm.worker.Worker"  # --worker-cls


def check_batch_invariance(wanted: bool) -> None:
    """Of VLLM_BATCH_INVARIANT. Raises ValueError: how a product's sums are cut, and by default its precision, depends
    on how many rows it has."""
    if wanted:
        raise ValueError("VLLM_BATCH_INVARIANT=1: results of nestedfp's products depend on what else is in a step; "
                         "leave it out, or --quantization nestedfp")


def check_offload(config: Any) -> None:
    """Of any vLLM configuration. Raises ValueError naming the option. Layers whose weights take turns in one piece of
    memory would be taken for each other, and weights that are not read yet have nothing to be moved."""
    offload = getattr(config, "offload_config", None)
    for kind, field in (("uva", "cpu_offload_gb"), ("prefetch", "offload_group_size")):
        if getattr(getattr(offload, kind, None), field, 0) > 0:
            raise ValueError(f"--{field.replace('_', '-')}: nestedfp's weights stay on the GPU; leave it out")


def precision_per_step(config: Any) -> bool:
    """Whether nestedfp's scheduler decides: its worker runs with no other."""
    return config.parallel_config.worker_cls == WORKER


def external_launcher(config: Any) -> bool:
    """Whether each rank has a scheduler of its own, which must come to the others' decisions."""
    return config.parallel_config.distributed_executor_backend == "external_launcher"


def check(config: Any) -> None:
    """Of a vLLM configuration whose scheduler and worker are nestedfp's. Raises ValueError naming the option."""
    parallel, settings = config.parallel_config, Settings.parse(config.additional_config)
    if parallel.use_ubatching:
        raise ValueError("nestedfp: --enable-dbo and --ubatch-size do not go with a precision for every step: graphs "
                         "of a step in parts are not kept apart by precision")
    if parallel.data_parallel_size > 1 and config.model_config.is_moe:
        raise ValueError("nestedfp: with --data-parallel-size a mixture's experts compute the tokens of all ranks in "
                         "one step, and no rank knows the precision that another's requests ask for: leave "
                         "--scheduler-cls and --worker-cls out, and choose policy fp16, fp8-w8a8 or threshold:TOKENS")
    if external_launcher(config) and settings.has_targets():
        raise ValueError("nestedfp: slo_ttft_ms and slo_tpot_ms do not go with --distributed-executor-backend "
                         "external_launcher: each rank would decide by its own clock")
