"""What a request asks of the plugin is checked where vLLM checks its sampling parameters, before it goes to the engine:
its client gets the error."""

from __future__ import annotations

from typing import Any

from . import limits
from .patches import around
from .policy import ATTRIBUTE, TIERS
from .settings import Settings
from .targets import TPOT, TTFT, milliseconds

_NEEDS = "needs nestedfp's scheduler and worker, which this server runs without (docs/vllm.md); leave it out"


def check(extra: dict[str, Any], config: Any) -> None:
    """Of a request's extra_args (vllm_xargs over HTTP) and the vLLM configuration of a model of nestedfp. Raises
    ValueError naming the field that is wrong, or that would be ignored."""
    decides = limits.precision_per_step(config)
    tier = extra.get(ATTRIBUTE, "auto")
    if tier not in TIERS:
        raise ValueError(f"{ATTRIBUTE}: {tier!r} is none of {', '.join(TIERS)}")
    if tier != "auto" and not decides:
        # Where all steps have one precision a request that allows no other gets it.
        always = {"fp16": "exact", "fp8-w8a8": "fast"}.get(Settings.parse(config.additional_config).policy)
        if tier != always:
            raise ValueError(f"{ATTRIBUTE}: {tier!r} {_NEEDS}")
    for name in (TTFT, TPOT):
        try:
            wanted = milliseconds(extra.get(name))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        if wanted is not None and not decides:
            raise ValueError(f"{name}: {_NEEDS}")
        if wanted is not None and limits.external_launcher(config):
            raise ValueError(f"{name}: latency targets do not go with the executor external_launcher; leave it out")


def install() -> None:
    """Idempotent."""
    from vllm.v1.engine.input_processor import InputProcessor

    @around(InputProcessor, "_validate_params")
    def validate(original: Any, self: Any, params: Any, *args: Any, **kwargs: Any) -> None:
        original(self, params, *args, **kwargs)
        if self.model_config.quantization == "nestedfp":
            check(getattr(params, "extra_args", None) or {}, self.vllm_config)
