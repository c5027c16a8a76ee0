"""Latency targets of requests, and which steps must be FP8 for them to be kept. Nothing here needs vLLM.

vLLM chooses the tokens of a step; what is left to choose is the precision. So the rule is: FP16, unless at FP16's pace
a request of this step would get its next token after it is due. A first token is due `slo_ttft_ms` after the request
came, token i after it at i times `slo_tpot_ms`: time lost earlier is made good, and time saved is spent on FP16 again.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from .._library import FP8, FP16

TTFT, TPOT = "slo_ttft_ms", "slo_tpot_ms"  # of a request's extra_args

_MOST_OF_FP8 = 2.0  # a step's seconds in FP16


class StepTimes:
    """Seconds of a step, by precision and by the power of two that its tokens lie below: exponential means."""

    def __init__(self, weight: float = 0.2) -> None:
        self.weight = weight
        self.means: dict[int, dict[int, float]] = {FP16: {}, FP8: {}}

    def observe(self, precision: int, tokens: int, seconds: float) -> None:
        means, size = self.means[precision], tokens.bit_length()
        before = means.get(size)
        means[size] = seconds if before is None else before + self.weight * (seconds - before)

    def expected(self, precision: int, tokens: int) -> float | None:
        """Of the nearest size that was seen; None before any was. FP16 reads twice the bytes of FP8 and multiplies half
        as fast, so takes at most twice as long: while steps are FP8, nothing else tells that an FP16 step which waited
        for something was no measure."""
        means, size = self.means[precision], tokens.bit_length()
        if not means:
            return None
        mean = means[min(means, key=lambda seen: (abs(seen - size), seen))]
        fp8 = self.means[FP8].get(size)
        return mean if fp8 is None else min(mean, _MOST_OF_FP8 * fp8)


@dataclass
class Target:
    """One request's. Times are seconds on one clock."""

    arrival_s: float
    ttft_s: float | None
    tpot_s: float | None
    first_s: float | None = None  # when its first token came
    last_s: float | None = None
    tokens: int = 0  # that came

    def due(self, in_flight: int) -> float | None:
        """When the next token is due that is not being computed yet."""
        if self.first_s is None and in_flight == 0:
            return None if self.ttft_s is None else self.arrival_s + self.ttft_s
        if self.tpot_s is None:
            return None
        first_s = self.first_s
        if first_s is None:  # it is under way: in time, as far as anybody knows
            if self.ttft_s is None:
                return None
            first_s = self.arrival_s + self.ttft_s
        return first_s + self.tpot_s * (self.tokens + in_flight)

    def came(self, tokens: int, now_s: float) -> None:
        if self.first_s is None:
            self.first_s = now_s
        self.last_s = now_s
        self.tokens += tokens

    def kept(self) -> bool:
        """Of a request that has ended: time to first token, and mean time from token to token."""
        if self.first_s is None or self.last_s is None:
            return False
        if self.ttft_s is not None and self.first_s - self.arrival_s > self.ttft_s:
            return False
        return self.tpot_s is None or self.tokens < 2 or (self.last_s - self.first_s) / (self.tokens - 1) <= self.tpot_s


def milliseconds(value: Any) -> float | None:
    """A target as a request or the settings give it, in seconds; None for nothing. Raises ValueError."""
    if value is None:
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if isinstance(value, bool) or not math.isfinite(number) or number <= 0:
        raise ValueError(f"{value!r} is no positive number of milliseconds")
    return number / 1e3


@dataclass
class Wanted:
    """What a step has for one request with a target."""

    target: Target
    steps: int = 1  # until its next token, this one included
    in_flight: int = 0  # of its tokens


class Clock:
    """When the step that is being scheduled will start, from the steps that are under way, and how long steps take."""

    def __init__(self) -> None:
        self.times = StepTimes()
        # Number, precision, tokens, when it was scheduled, requests that get a token.
        self.under_way: deque[tuple[int, int, int, float, Collection[str]]] = deque()
        self.steps = 0
        self.last_end_s = 0.0

    def starts(self, now_s: float) -> float:
        """The oldest step began when the one before it ended, or when it was scheduled."""
        at = 0.0
        for i, (_, precision, tokens, scheduled_s, _) in enumerate(self.under_way):
            begin = max(scheduled_s, self.last_end_s if i == 0 else at)
            at = begin + (self.times.expected(precision, tokens) or 0.0)
        return max(now_s, at)

    def in_flight(self, request: str) -> int:
        """Its tokens that steps under way give: one each for certain, and no draft before it is accepted."""
        return sum(request in requests for *_, requests in self.under_way)

    def requests_under_way(self) -> set[str]:
        return {name for *_, requests in self.under_way for name in requests}

    def scheduled(self, precision: int, tokens: int, now_s: float, requests: Collection[str] = ()) -> int:
        """The step's number. ``requests``: that get a token from it, of those that in_flight() is asked for."""
        self.steps += 1
        self.under_way.append((self.steps, precision, tokens, now_s, requests))
        return self.steps

    def ended(self, number: int, now_s: float) -> tuple[int, float] | None:
        """Its precision and seconds; None if nobody knows it. Older ones that never ended were dropped by vLLM."""
        while self.under_way and self.under_way[0][0] < number:
            self.under_way.popleft()
        if not self.under_way or self.under_way[0][0] != number:
            return None
        _, precision, tokens, scheduled_s, _ = self.under_way.popleft()
        seconds = max(0.0, now_s - max(scheduled_s, self.last_end_s))  # Prometheus takes nothing negative
        self.times.observe(precision, tokens, seconds)
        self.last_end_s = now_s
        return precision, seconds

    def late(self, wanted: Iterable[Wanted], tokens: int, now_s: float) -> bool:
        """Whether a step of so many tokens in FP16 makes one of them late."""
        start_s = self.starts(now_s)
        step_s = self.times.expected(FP16, tokens) or 0.0
        for one in wanted:
            due_s = one.target.due(one.in_flight)
            if due_s is not None and start_s + one.steps * step_s > due_s:
                return True
        return False
