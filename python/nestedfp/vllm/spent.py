"""How long the plugin's own parts of a start take."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Generator
from contextlib import contextmanager

seconds: defaultdict[str, float] = defaultdict(float)  # of this process


@contextmanager
def spent(part: str) -> Generator[None, None, None]:
    """Adds what is inside to a part, but what a part in it has counted already."""
    begin, counted = time.perf_counter(), sum(seconds.values())
    try:
        yield
    finally:
        seconds[part] += time.perf_counter() - begin - (sum(seconds.values()) - counted)
