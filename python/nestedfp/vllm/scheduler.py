"""A precision for every step: ``--scheduler-cls nestedfp.vllm.scheduler.Scheduler`` together with
``--worker-cls nestedfp.vllm.worker.Worker``.

vLLM's own scheduler decides what runs; this one then decides in which precision, by libnestedfp's policies, and writes
that on the SchedulerOutput, which goes to every worker. All ranks of a step so have one precision.

A request may say what it allows: ``extra_args={"nestedfp_precision": "exact"}`` of its SamplingParams (over HTTP:
``"vllm_xargs": {"nestedfp_precision": "exact"}``). A step with an exact request in it is FP16, and such a request reuses
no cached prefix of others' (whose keys and values an FP8 step may have computed): it gets a salt of its own kind.
"fast" steps are FP8 as long as all requests of the step say so; "auto", the default, follows the policy. Latency targets
(``slo_ttft_ms``, ``slo_tpot_ms``, likewise) make a step FP8 that would be too late for such a request in FP16 (targets.py).
"""

from __future__ import annotations

import time
from typing import Any

from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler as SyncScheduler

from .._library import FP8, FP16
from . import limits, metrics, settings
from .policy import ATTRIBUTE, TIERS, Policy, extra_of, precision_of_step, tier_of
from .targets import TPOT, TTFT, Clock, Target, Wanted, milliseconds

logger = init_logger("vllm.nestedfp")

_NUMBER = "nestedfp_step"  # of a SchedulerOutput
_EXACT_SALT = "nestedfp-exact"
_LOG_SECONDS = 10.0


def _salt(given: str | None, exact: bool) -> str | None:
    """Of a request's cached prefixes: exact requests' end in a mark, and no others' do, whatever clients give."""
    if exact:
        return (given or "") + _EXACT_SALT
    if given is not None and given.rstrip(".").endswith(_EXACT_SALT):
        return given + "."
    return given


class _ChoosesPrecision:
    """What both of vLLM's schedulers get."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not limits.precision_per_step(self.vllm_config):
            raise ValueError(f"nestedfp's scheduler needs --worker-cls {limits.WORKER}")
        limits.check(self.vllm_config)
        self.nestedfp_settings = settings.Settings.parse(self.vllm_config.additional_config)
        self.nestedfp_policy = Policy(self.nestedfp_settings.policy)
        self.nestedfp_tiers: dict[str, str] = {}
        self.nestedfp_targets: dict[str, Target] = {}
        self.nestedfp_ended: dict[str, Target] = {}  # of requests that ended in this update
        self.nestedfp_clock = Clock()
        self.nestedfp_counts = metrics.Counts()
        self.nestedfp_last: int | None = None  # precision of the step before
        self.nestedfp_steps = {FP16: 0, FP8: 0}
        self.nestedfp_tokens = {FP16: 0, FP8: 0}
        self.nestedfp_next_log = time.monotonic() + _LOG_SECONDS

    def add_request(self, request: Any) -> None:
        tier = tier_of(request)
        if tier not in TIERS:
            logger.warning("nestedfp: request %s asks for precision %r; %s are known, auto is taken",
                           request.request_id, tier, ", ".join(TIERS))
            tier = "auto"
        if request.request_id not in self.requests:  # else more input of a request that began as what it is
            if tier != "auto":
                self.nestedfp_tiers[request.request_id] = tier
            salt = _salt(request.cache_salt, tier == "exact")
            if salt != request.cache_salt:
                request.cache_salt = salt
                request.block_hashes = []
                request.update_block_hashes()
            self.nestedfp_add_target(request)
        super().add_request(request)

    def _update_request_as_session(self, session: Any, *args: Any, **kwargs: Any) -> None:
        """The answer to what came before has ended, and that to more input begins: now, or behind it if it had to wait.
        (What says that no more comes is no input.)"""
        super()._update_request_as_session(session, *args, **kwargs)
        self.nestedfp_end_target(session.request_id)
        self.nestedfp_add_target(session)

    def nestedfp_add_target(self, request: Any) -> None:
        found = []
        for name, default in ((TTFT, self.nestedfp_settings.slo_ttft_ms), (TPOT, self.nestedfp_settings.slo_tpot_ms)):
            try:
                found.append(milliseconds(extra_of(request).get(name, default)))
            except ValueError as error:
                logger.warning("nestedfp: request %s: %s %s; ignored", request.request_id, name, error)
                found.append(milliseconds(default))
        if found == [None, None]:
            return
        if limits.external_launcher(self.vllm_config):
            logger.warning("nestedfp: request %s: latency targets do not go with the executor external_launcher; ignored",
                           request.request_id)
        else:
            # From then on only the monotonic clock counts: the other may be set while the request runs.
            arrival_s = time.monotonic() - max(0.0, time.time() - request.arrival_time)
            self.nestedfp_targets[request.request_id] = Target(arrival_s, *found)

    def nestedfp_end_target(self, name: str) -> None:
        if (target := self.nestedfp_targets.pop(name, None)) is not None:
            self.nestedfp_ended[name] = target

    def nestedfp_late(self, scheduled: dict[str, int], tokens: int, now_s: float) -> bool:
        wanted, waits = [], None
        under_way = self.nestedfp_clock.requests_under_way()
        for name, target in self.nestedfp_targets.items():
            count = scheduled.get(name)
            if count is None:  # of thousands that wait, say, one decides
                if (target.first_s is None and target.ttft_s is not None and name not in under_way
                        and (waits is None or target.due(0) < waits.due(0))):
                    waits = target
                continue
            request, in_flight = self.requests[name], self.nestedfp_clock.in_flight(name)
            if request.is_prefill_chunk:  # of a prompt, or of all that it had before it was preempted
                missing = request.num_tokens + request.num_output_placeholders - request.num_computed_tokens
                wanted.append(Wanted(target, 1 + -(-missing // count), in_flight))
            else:
                wanted.append(Wanted(target, 1, in_flight))
        if waits is not None:
            wanted.append(Wanted(waits, 2))  # this step, and one of its own at least
        return self.nestedfp_clock.late(wanted, tokens, now_s)

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
        now_s = time.monotonic()
        if wanted == FP16 and self.nestedfp_targets and self.nestedfp_late(scheduled, tokens, now_s):
            wanted, late = FP8, True
        else:
            late = False
        tiers = [self.nestedfp_tiers.get(name, "auto") for name in scheduled] if self.nestedfp_tiers else []
        precision = precision_of_step(wanted, tiers)
        setattr(output, ATTRIBUTE, precision)
        self.nestedfp_steps[precision] += 1
        self.nestedfp_tokens[precision] += tokens
        with_token = {name for name in self.nestedfp_targets
                      if name in scheduled and not self.requests[name].is_prefill_chunk}
        setattr(output, _NUMBER, self.nestedfp_clock.scheduled(precision, tokens, now_s, with_token))
        name = "fp8" if precision == FP8 else "fp16"
        self.nestedfp_counts.add(f"steps_{name}")
        self.nestedfp_counts.add(f"tokens_{name}", tokens)
        if late and precision == FP8:
            self.nestedfp_counts.add("late")
        if self.nestedfp_last not in (None, precision):
            self.nestedfp_counts.add("switches")
        self.nestedfp_last = precision
        if time.monotonic() >= self.nestedfp_next_log:
            self.nestedfp_next_log = time.monotonic() + _LOG_SECONDS
            logger.info("nestedfp: %d steps (%d tokens) in FP16, %d (%d) in FP8", self.nestedfp_steps[FP16],
                        self.nestedfp_tokens[FP16], self.nestedfp_steps[FP8], self.nestedfp_tokens[FP8])
        return output

    def update_from_output(self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        now_s = time.monotonic()
        number = getattr(scheduler_output, _NUMBER, None)
        if number is not None and (ended := self.nestedfp_clock.ended(number, now_s)) is not None:
            precision, seconds = ended
            self.nestedfp_counts.add("seconds_fp8" if precision == FP8 else "seconds_fp16", seconds)
        before = dict(self.nestedfp_targets)
        outputs = super().update_from_output(scheduler_output, *args, **kwargs)
        if before or self.nestedfp_ended:
            for one in (output for group in outputs.values() for output in group.outputs):
                target = self.nestedfp_ended.get(one.request_id) or self.nestedfp_targets.get(one.request_id)
                if target is None or target is not before.get(one.request_id):  # of input that begins in this update
                    continue
                if one.new_token_ids or one.pooling_output is not None:
                    target.came(len(one.new_token_ids), now_s)
                if one.finish_reason is not None:
                    self.nestedfp_count(target)
                    if self.nestedfp_targets.get(one.request_id) is target:  # the request waits for more input
                        del self.nestedfp_targets[one.request_id]
            self.nestedfp_ended.clear()
        return outputs

    def nestedfp_count(self, target: Target) -> None:
        self.nestedfp_counts.add("slo_requests")
        self.nestedfp_counts.add("slo_attained", int(target.kept()))

    def finish_requests(self, *args: Any, **kwargs: Any) -> Any:
        """Also how the server ends a request at a stop string, which only it looks for: no output says so. One that its
        client leaves looks the same here; without a token it is not counted."""
        finished = super().finish_requests(*args, **kwargs)
        for name, _ in finished:
            target = self.nestedfp_ended.get(name)
            if target is not None and target.first_s is not None:
                del self.nestedfp_ended[name]
                self.nestedfp_count(target)
        return finished

    def make_stats(self, *args: Any, **kwargs: Any) -> Any:
        stats = super().make_stats(*args, **kwargs)
        if stats is not None:
            setattr(stats, metrics.FIELD, self.nestedfp_counts.take())
        return stats

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        self.nestedfp_tiers.pop(request.request_id, None)
        self.nestedfp_end_target(request.request_id)
        return super()._free_request(request, *args, **kwargs)


class NestedScheduler(_ChoosesPrecision, SyncScheduler):
    pass


class NestedAsyncScheduler(_ChoosesPrecision, AsyncScheduler):
    pass


def Scheduler(*args: Any, **kwargs: Any) -> SyncScheduler:  # noqa: N802: vLLM takes it for a class
    """The one that fits vLLM's --async-scheduling."""
    config = kwargs.get("vllm_config", args[0] if args else None)
    return (NestedAsyncScheduler if config.scheduler_config.async_scheduling else NestedScheduler)(*args, **kwargs)
