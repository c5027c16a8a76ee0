"""What the user asked for: ``--additional-config '{"nestedfp": {...}}'``.

vLLM hashes that object into the key of its compile cache, and hands it to every process.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from .targets import milliseconds

DEFAULT_POLICY = "threshold:1024"


@dataclass(frozen=True)
class Settings:
    """policy: "fp16", "fp8-w8a8" ("fp8" for short) or "threshold:TOKENS" (FP8 in steps of more tokens) without more
    ado; every policy of libnestedfp with nestedfp.vllm's scheduler and worker.

    slo_ttft_ms, slo_tpot_ms: latency targets of requests that name none, with that scheduler (targets.py)."""

    policy: str = DEFAULT_POLICY
    slo_ttft_ms: float | None = None
    slo_tpot_ms: float | None = None

    @classmethod
    def parse(cls, additional_config: Any) -> Settings:
        """Raises ValueError naming the field."""
        given = additional_config.get("nestedfp", {}) if isinstance(additional_config, dict) else {}
        if not isinstance(given, dict):
            raise ValueError("additional_config: 'nestedfp' must be an object")
        known = {field.name for field in fields(cls)}
        for name, value in given.items():
            if name not in known:
                raise ValueError(f"additional_config: nestedfp has no field '{name}'; it has {', '.join(sorted(known))}")
            if name == "policy" and not isinstance(value, str):
                raise ValueError(f"additional_config: nestedfp.{name} must be a string")
            if name != "policy":
                try:
                    milliseconds(value)
                except ValueError as error:
                    raise ValueError(f"additional_config: nestedfp.{name}: {error}") from error
        settings = cls(**given)
        if settings.policy == "fp8":
            settings = replace(settings, policy="fp8-w8a8")
        return settings

    def threshold(self) -> int | None:
        """FP8 above so many tokens of a step; None where the policy cannot be told from that number alone."""
        if self.policy == "fp16":
            return 1 << 30
        if self.policy == "fp8-w8a8":
            return -1
        kind, _, tokens = self.policy.partition(":")
        return int(tokens) if kind == "threshold" and tokens.isdecimal() else None

    def has_targets(self) -> bool:
        return self.slo_ttft_ms is not None or self.slo_tpot_ms is not None


def current() -> Settings:
    """Of the vLLM configuration that is being worked on."""
    from vllm.config import get_current_vllm_config

    return Settings.parse(get_current_vllm_config().additional_config)
