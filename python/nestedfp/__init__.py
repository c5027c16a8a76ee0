"""nestedfp: one 16-bit copy of a language model's weights, run in exact FP16 or in FP8, step by step."""

from __future__ import annotations
