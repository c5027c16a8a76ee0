"""A precision for every step: ``--scheduler-cls nestedfp.vllm.scheduler.Scheduler`` together with
``--worker-cls nestedfp.vllm.worker.Worker``.

vLLM's own scheduler decides what runs; this one then decides in which precision, by libnestedfp's policies, and writes
that on the SchedulerOutput, which goes to every worker. All ranks of a step so have one precision.

A request may say what it allows: ``extra_args={"nestedfp_precision": "exact"}`` of its SamplingParams (over HTTP:
``"vllm_xargs": {"nestedfp_precision": "exact"}``). A step with an exact request in it is FP16, and such a request reuses
no cached prefix of others' (whose keys and values an FP8 step may have computed): it gets a salt of its own kind.
"fast" steps are FP8 as long as all requests of the step say so; "auto", the default, follows the policy.
"""

from __future__ import annotations

import time
from typing import Any

from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler as SyncScheduler

from .._library import FP8, FP16
from . import settings
from .policy import ATTRIBUTE, TIERS, Policy, precision_of_step, tier_of

logger = init_logger("vllm.nestedfp")

_EXACT_SALT = "nestedfp-exact"
_LOG_SECONDS = 10.0


class _ChoosesPrecision:
    """What both of vLLM's schedulers get."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.vllm_config.parallel_config.worker_cls != "nestedfp.vllm.worker.Worker":
            raise ValueError("nestedfp's scheduler needs --worker-cls nestedfp.vllm.worker.Worker")
        self.nestedfp_policy = Policy(settings.Settings.parse(self.vllm_config.additional_config).policy)
        self.nestedfp_tiers: dict[str, str] = {}
        self.nestedfp_steps = {FP16: 0, FP8: 0}
        self.nestedfp_tokens = {FP16: 0, FP8: 0}
        self.nestedfp_next_log = time.monotonic() + _LOG_SECONDS

    def add_request(self, request: Any) -> None:
        tier = tier_of(request)
        if tier not in TIERS:
            logger.warning("nestedfp: request %s asks for precision %r; %s are known, auto is taken",
                           request.request_id, tier, ", ".join(TIERS))
            tier = "auto"
        if tier != "auto":
            self.nestedfp_tiers[request.request_id] = tier
        if tier == "exact":
            request.cache_salt = (request.cache_salt or "") + _EXACT_SALT
            request.block_hashes = []
            request.update_block_hashes()
        super().add_request(request)

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        output = super().schedule(*args, **kwargs)
        tokens = output.total_num_scheduled_tokens
        if tokens == 0:
            return output
        scheduled = output.num_scheduled_tokens
        cached = output.scheduled_cached_reqs
        prefill = sum(scheduled[request.req_id] for request in output.scheduled_new_reqs)
        prefill += sum(scheduled[name] for name, answered in zip(cached.req_ids, cached.num_output_tokens) if not answered)
        wanted = self.nestedfp_policy.choose(tokens, prefill, len(scheduled), len(self.waiting),
                                             self.kv_cache_manager.usage, sum(self.nestedfp_steps.values()))
        tiers = [self.nestedfp_tiers.get(name, "auto") for name in scheduled] if self.nestedfp_tiers else []
        precision = precision_of_step(wanted, tiers)
        setattr(output, ATTRIBUTE, precision)
        self.nestedfp_steps[precision] += 1
        self.nestedfp_tokens[precision] += tokens
        if time.monotonic() >= self.nestedfp_next_log:
            self.nestedfp_next_log = time.monotonic() + _LOG_SECONDS
            logger.info("nestedfp: %d steps (%d tokens) in FP16, %d (%d) in FP8", self.nestedfp_steps[FP16],
                        self.nestedfp_tokens[FP16], self.nestedfp_steps[FP8], self.nestedfp_tokens[FP8])
        return output

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        self.nestedfp_tiers.pop(request.request_id, None)
        return super()._free_request(request, *args, **kwargs)


class NestedScheduler(_ChoosesPrecision, SyncScheduler):
    pass


class NestedAsyncScheduler(_ChoosesPrecision, AsyncScheduler):
    pass


def Scheduler(*args: Any, **kwargs: Any) -> SyncScheduler:  # noqa: N802: vLLM takes it for a class
    """The one that fits vLLM's --async-scheduling."""
    config = kwargs.get("vllm_config", args[0] if args else None)
    return (NestedAsyncScheduler if config.scheduler_config.async_scheduling else NestedScheduler)(*args, **kwargs)
