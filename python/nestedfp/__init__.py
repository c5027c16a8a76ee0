"""nestedfp: one 16-bit copy of a language model's weights, run in exact FP16 or in FP8, step by step.

    import nestedfp

    planes = nestedfp.nest(weight)      # two bytes a weight; the upper one is a complete FP8 number
    weight = nestedfp.join(planes)      # and back, bit for bit

    llm = nestedfp.LLM("model.gguf", precision="threshold:512")
    llm.generate("The capital of France is", nestedfp.SamplingParams(temperature=0))

The plugin for vLLM is nestedfp.vllm (docs/vllm.md); vLLM loads it by itself.
"""

from ._library import NestedFPError
from .llm import LLM, CompletionOutput, Logprob, RequestOutput, SamplingParams
from .planes import NotNestable, Planes, join, nest

__all__ = ["LLM", "CompletionOutput", "Logprob", "NestedFPError", "NotNestable", "Planes", "RequestOutput",
           "SamplingParams", "join", "nest"]
