"""Which precision a step gets: libnestedfp's policies, and what the step's requests allow. Nothing here needs vLLM."""

from __future__ import annotations

import ctypes
from typing import Any

from .. import _library
from .._library import FP8, FP16

ATTRIBUTE = "nestedfp_precision"  # of a SchedulerOutput, and of a request's extra_args
TIERS = ("auto", "exact", "fast")


class Policy:
    """libnestedfp's policy of that name."""

    def __init__(self, text: str):
        self.handle = ctypes.c_void_p()
        self.load = _library.StepLoad(ctypes.sizeof(_library.StepLoad))
        self.chosen = ctypes.c_int32()
        self.library = _library.library()
        _library.check(self.library.nfp_policy_create(text.encode(), ctypes.byref(self.handle)))

    def __del__(self) -> None:
        if self.handle:
            self.library.nfp_policy_destroy(self.handle)

    def choose(self, step_tokens: int, prefill_tokens: int = 0, running: int = 0, waiting: int = 0, kv_use: float = 0.0,
               step_index: int = 0) -> int:
        load = self.load
        load.step_tokens, load.prefill_tokens, load.running, load.waiting = step_tokens, prefill_tokens, running, waiting
        load.kv_use, load.step_index = kv_use, step_index
        _library.check(self.library.nfp_policy_choose(self.handle, ctypes.byref(load), ctypes.byref(self.chosen)))
        return self.chosen.value


def extra_of(request: Any) -> dict[str, Any]:
    """The fields that vLLM does not know (vllm_xargs over HTTP)."""
    return getattr(getattr(request, "sampling_params", None), "extra_args", None) or {}


def tier_of(request: Any) -> str:
    """What the request's sampling parameters allow."""
    return extra_of(request).get(ATTRIBUTE, "auto")


def precision_of_step(wanted: int, tiers: list[str]) -> int:
    """The policy's wish, and what the requests of the step allow."""
    if "exact" in tiers:
        return FP16
    if tiers and all(tier == "fast" for tier in tiers):
        return FP8
    return wanted
