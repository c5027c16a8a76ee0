"""nestedfp inside vLLM: one 16-bit copy of the weights, FP16 or FP8 chosen for every step.

vLLM loads this by its entry point ``vllm.general_plugins``; docs/vllm.md says what to type.
"""

from __future__ import annotations


def register() -> None:
    """What vLLM calls in each of its processes. Quick, and harmless where nestedfp is not used: everything that can
    fail (versions, the GPU) is looked at once a model asks for this quantization."""
    from . import quantization

    quantization.register()
