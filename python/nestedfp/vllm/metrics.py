"""The plugin's counts, from the scheduler to Prometheus (stat_logger.py).

The scheduler runs in the engine's process, /metrics in the server's; between them goes vLLM's SchedulerStats, which
gets one field more here: what was counted since the last one.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from .patches import around

FIELD = "nestedfp"


def install_field() -> None:
    """Gives SchedulerStats the field. Before vLLM makes its decoders: in register(). Idempotent."""
    from vllm.v1.metrics.stats import SchedulerStats

    if FIELD in SchedulerStats.__dataclass_fields__:
        return
    kind = dict[str, float] | None
    made = dataclasses.make_dataclass("Made", [(FIELD, kind, dataclasses.field(default=None))])
    SchedulerStats.__annotations__[FIELD] = kind
    SchedulerStats.__dataclass_fields__[FIELD] = made.__dataclass_fields__[FIELD]
    setattr(SchedulerStats, FIELD, None)


def install_logger() -> None:
    """Beside vLLM's own loggers, wherever it makes them. Not by its entry point vllm.stat_logger_plugins: a logger from
    there turns statistics on that --disable-log-stats turned off, of every model."""
    from vllm.v1.metrics.loggers import StatLoggerManager

    @around(StatLoggerManager, "__init__")
    def init(original: Any, self: Any, vllm_config: Any, engine_idxs: Any = None, custom_stat_loggers: Any = None,
             *args: Any, **kwargs: Any) -> None:
        if vllm_config.model_config.quantization == "nestedfp":
            from .stat_logger import StatLogger

            custom_stat_loggers = [*(custom_stat_loggers or ()), StatLogger]
        original(self, vllm_config, engine_idxs, custom_stat_loggers, *args, **kwargs)


class Counts(dict):
    """What the scheduler has counted since they were taken last."""

    def add(self, name: str, value: float = 1) -> None:
        self[name] = self.get(name, 0) + value

    def take(self) -> dict[str, float] | None:
        taken = dict(self)
        self.clear()
        return taken or None
