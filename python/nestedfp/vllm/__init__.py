"""nestedfp inside vLLM: one 16-bit copy of the weights, FP16 or FP8 chosen for every step.

vLLM loads this by its entry point ``vllm.general_plugins``; docs/vllm.md says what to type.
"""

from __future__ import annotations


def register() -> None:
    """What vLLM calls in each of its processes. Quick, and harmless where nestedfp is not used: what is wrong is said
    once a model asks for this quantization, and before its weights are read."""
    from . import refusal, versions

    version = versions.installed_vllm()
    try:
        versions.check_vllm(version)
        from . import quantization

        quantization.register()
    except (AttributeError, ImportError) as error:
        refusal.register(f"nestedfp's plugin does not fit vLLM {version}: {error}")
    except ValueError as error:
        refusal.register(str(error))
