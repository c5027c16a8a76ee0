"""Functions of our own in the place of vLLM's and PyTorch's. Nothing here needs either."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any


def around(owner: Any, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorates f(original, *args, **kwargs): from now on owner.name(*args, **kwargs) calls it with what was there
    before. `owner` is a class or a module. Once only: later ones for the same place change nothing."""

    def replace(function: Callable[..., Any]) -> Callable[..., Any]:
        original = getattr(owner, name)
        if getattr(original, "nestedfp", False):
            return function

        @wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return function(original, *args, **kwargs)

        wrapper.nestedfp = True  # type: ignore[attr-defined]
        setattr(owner, name, wrapper)
        return function

    return replace
