"""The plugin's Prometheus metrics, beside vLLM's at /metrics."""

from __future__ import annotations

from typing import Any

from prometheus_client import Counter
from vllm.v1.metrics.loggers import AggregateStatLoggerBase

from .metrics import FIELD

# key of the counts: name, what it is, value of the label "precision" (None: no such label)
_COUNTERS = {
    "steps_fp16": ("nestedfp:steps", "Engine steps", "fp16"),
    "steps_fp8": ("nestedfp:steps", "Engine steps", "fp8"),
    "tokens_fp16": ("nestedfp:tokens", "Tokens computed, prompts included", "fp16"),
    "tokens_fp8": ("nestedfp:tokens", "Tokens computed, prompts included", "fp8"),
    "seconds_fp16": ("nestedfp:step_seconds", "Seconds that steps took", "fp16"),
    "seconds_fp8": ("nestedfp:step_seconds", "Seconds that steps took", "fp8"),
    "switches": ("nestedfp:precision_switches", "Steps whose precision differs from the one before", None),
    "late": ("nestedfp:slo_steps", "Steps that became FP8 because a request would have been late in FP16", None),
    "slo_requests": ("nestedfp:slo_requests", "Ended requests with latency targets", None),
    "slo_attained": ("nestedfp:slo_attained", "Of these, within them", None),
}


class StatLogger(AggregateStatLoggerBase):
    """Of models of nestedfp (metrics.install_logger). Counts nothing where nestedfp's scheduler does not run."""

    made: dict[str, Any] = {}  # Prometheus takes a name once for each process

    def __init__(self, vllm_config: Any, engine_indexes: list[int]):
        model = vllm_config.model_config.served_model_name
        self.children: dict[tuple[int, str], Any] = {}
        for name, text, precision in _COUNTERS.values():
            if name not in self.made:
                labels = ["model_name", "engine", *(["precision"] if precision else [])]
                self.made[name] = Counter(name, text, labelnames=labels)
        for key, (name, _, precision) in _COUNTERS.items():
            for engine in engine_indexes:
                labels = [model, str(engine), *([precision] if precision else [])]
                self.children[engine, key] = self.made[name].labels(*labels)

    def record(self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None,
               engine_idx: int = 0) -> None:
        counts = getattr(scheduler_stats, FIELD, None)
        for key, value in (counts or {}).items():
            child = self.children.get((engine_idx, key))
            if child is not None:
                child.inc(value)

    def log_engine_initialized(self) -> None:
        pass
