"""nestedfp's own engine, with the look of vLLM's offline class.

    from nestedfp import LLM, SamplingParams

    llm = LLM("model.gguf", precision="threshold:512")
    for output in llm.generate(["The capital of France is"], SamplingParams(temperature=0, max_tokens=16)):
        print(output.outputs[0].text)
"""

from __future__ import annotations

import itertools
import json
import operator
import os
import random
import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any, cast

from ._engine import USAGE, Engine
from ._library import NestedFPError

Prompt = str | Sequence[int] | dict[str, Any]

_MAX_ANSWERS = 16384  # to a prompt; vLLM's, too

# Of vLLM's class, and here no options of the engine: values with which they change nothing.
_LLM_OF_VLLM: dict[str, tuple[Any, ...]] = {
    "tokenizer": (None,), "tokenizer_mode": ("auto",), "skip_tokenizer_init": (False,),
    "trust_remote_code": (False, True), "revision": (None,), "tokenizer_revision": (None,),
    "dtype": ("auto", "half", "float16"), "quantization": (None,),
    "load_format": ("auto",), "hf_overrides": (None,), "runner": ("auto", "generate"),
    "tensor_parallel_size": (1,), "pipeline_parallel_size": (1,), "data_parallel_size": (1,), "swap_space": (0,),
    "cpu_offload_gb": (0,), "enforce_eager": (None, False, True), "enable_chunked_prefill": (None, True),
    "disable_log_stats": (False, True), "disable_custom_all_reduce": (False, True), "task": (None, "auto", "generate"),
    "speculative_config": (None,), "compilation_config": (None,), "block_size": (None,), "chat_template": (None,),
    "limit_mm_per_prompt": (None, {}), "served_model_name": (None,), "download_dir": (None,),
    "config_format": ("auto",)}
# Of its generate() and chat(), and here no keywords of the template.
_GENERATE_OF_VLLM = {"lora_request": None, "priority": None, "tokenization_kwargs": None}
_CHAT_OF_VLLM = {**_GENERATE_OF_VLLM, "chat_template": None, "chat_template_content_format": "auto",
                 "continue_final_message": False, "mm_processor_kwargs": None}
_OVERRIDES = {"temperature": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p",
              "repetition_penalty": "repetition_penalty", "max_new_tokens": "max_tokens"}  # of a generation_config.json


@dataclass
class SamplingParams:
    """How tokens are drawn; names and defaults are vLLM's. ``precision``: "auto" (the model's policy), "exact" (FP16
    steps only) or "fast" (FP8 whenever no other request of the step asks for more; never with an LLM of precision
    "fp16"). ``structured_outputs`` is what this class has not: another value than None is an error."""

    n: int = 1  # answers to a prompt
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 and -1: off
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None  # None and -1: the LLM's, else drawn
    max_tokens: int | None = 16  # None: until the context is full
    min_tokens: int = 0
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logit_bias: dict[int, float] | None = None
    logprobs: int | None = None  # so many likeliest tokens beside each one
    prompt_logprobs: int | None = None
    detokenize: bool = True  # False: token ids only
    structured_outputs: Any = None
    precision: str = "auto"

    def _check(self) -> None:
        """What the engine does not look at."""
        if self.structured_outputs is not None:
            raise NestedFPError(USAGE, "structured_outputs: nestedfp.LLM has no grammars; nestedfp serve has them "
                                       "(response_format, docs/serving.md)")
        if not _is_token_id(self.n) or isinstance(self.n, bool) or not 1 <= self.n <= _MAX_ANSWERS:
            raise NestedFPError(USAGE, f"n must be a whole number from 1 to {_MAX_ANSWERS}, not {self.n!r}")
        if self.n > 1 and self.temperature == 0:
            raise NestedFPError(USAGE, f"n must be 1 where temperature is 0, not {self.n}: all answers would be one")
        if not isinstance(self.detokenize, bool):
            raise NestedFPError(USAGE, f"detokenize must be True or False, not {self.detokenize!r}")
        if self.stop and not self.detokenize:
            raise NestedFPError(USAGE, "stop: strings are looked for in the text, which detokenize=False leaves out")
        words = [] if self.bad_words is None else self.bad_words
        if not isinstance(words, (list, tuple)) or not all(isinstance(word, str) and word for word in words):
            raise NestedFPError(USAGE, f"bad_words must be a list of words, not {words!r}")
        try:
            self._stop_ids()
        except TypeError as problem:
            raise NestedFPError(USAGE, f"stop_token_ids: {problem}") from None
        if self.logit_bias is not None and not (isinstance(self.logit_bias, dict)
                                                and all(str(token).isdecimal() for token in self.logit_bias)):
            raise NestedFPError(USAGE, f"logit_bias must be a dict of token ids and biases, not {self.logit_bias!r}")
        if isinstance(self.seed, bool) or not (self.seed is None or _is_token_id(self.seed)):
            raise NestedFPError(USAGE, f"field 'seed': must be a whole number or None, not {self.seed!r}")

    def _stop_ids(self) -> list[int]:
        return [] if self.stop_token_ids is None else _token_ids(self.stop_token_ids)

    def _fields(self) -> dict[str, Any]:
        fields = dict(vars(self))
        for name in ("n", "detokenize", "structured_outputs"):
            del fields[name]
        fields["top_k"] = 0 if self.top_k == -1 else self.top_k
        fields["stop"] = [self.stop] if isinstance(self.stop, str) else self.stop
        fields["stop_token_ids"] = self._stop_ids()
        if self.logit_bias is not None:
            fields["logit_bias"] = [[int(token), bias] for token, bias in self.logit_bias.items()]
        return {name: value for name, value in fields.items() if value is not None}


@dataclass
class Logprob:
    """Of one token at one place; ``rank`` 1 is the likeliest (None where it was not asked for)."""

    logprob: float
    rank: int | None = None


@dataclass
class CompletionOutput:
    """An answer, or with streaming what of it there is so far. ``precisions`` has, for each token, "fp16", "fp8" or
    "fp8-w8a8": that of the step that computed it."""

    index: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    finish_reason: str | None = None  # "stop", "length", "abort"
    stop_reason: int | str | None = None  # which of SamplingParams' stop_token_ids or stop; None: the model's own end
    precisions: list[str] = field(default_factory=list)


@dataclass
class RequestOutput:
    """What came of one prompt. ``usage``: prompt_tokens, and, added up over its answers, cached_tokens,
    completion_tokens, and of all tokens fp16_tokens and fp8_tokens."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    usage: dict[str, int] = field(default_factory=dict)


@dataclass
class _Answer:
    """A request of the engine, and where its tokens go. Whoever takes the engine's step leaves its pieces (with drafts
    one for each token) in ``news``, by the step's number, and the answer in its call's ``fresh``; only the call that made
    the request adds them, so that nothing changes under the hands of its caller."""

    name: str
    result: RequestOutput
    output: CompletionOutput
    detokenize: bool
    stops: list[int]  # that the caller asked for
    fresh: dict[str, _Answer]  # those of its call that have news
    usage: dict[str, int] = field(default_factory=dict)  # so far
    news: dict[int, list[dict[str, Any]]] = field(default_factory=dict)

    def take(self) -> list[dict[str, Any]]:
        taken, self.news = self.news, {}
        return list(itertools.chain.from_iterable(taken.values()))

    def add(self, piece: dict[str, Any]) -> None:
        result, output = self.result, self.output
        if piece.get("finish_reason") == "error":
            raise NestedFPError(9, f"request {self.name}: {piece.get('error', 'failed')}")
        if self.detokenize:
            output.text += piece["text"]
        for token in piece["tokens"]:
            output.token_ids.append(token["id"])
            output.precisions.append(token["precision"])
            if output.logprobs is not None:
                output.logprobs.append(_logprobs(token))
                output.cumulative_logprob = (output.cumulative_logprob or 0.0) + token["logprob"]
        if "prompt_logprobs" in piece:
            result.prompt_logprobs = [None] + [_logprobs(token) for token in piece["prompt_logprobs"][1:]]
        output.finish_reason = piece.get("finish_reason")
        reason = piece.get("stop_reason")  # a token of the model's own ends is none for vLLM
        output.stop_reason = reason if isinstance(reason, str) or reason in self.stops else None
        if output.finish_reason is not None:
            result.finished = all(other.finish_reason is not None for other in result.outputs)
        for name, value in piece["usage"].items():
            before = result.usage.get(name, 0) - self.usage.get(name, 0)
            result.usage[name] = value if name == "prompt_tokens" else before + value
        self.usage = piece["usage"]


def _progress(use_tqdm: bool | Callable[..., Any], prompts: int) -> Any:
    """A progress bar; None where none is wanted, or tqdm is not there."""
    if callable(use_tqdm):
        return use_tqdm(total=prompts, desc="Processed prompts", dynamic_ncols=True)
    if not use_tqdm:
        return None
    try:
        from tqdm.auto import tqdm
    except ImportError:
        return None
    return tqdm(total=prompts, desc="Processed prompts", dynamic_ncols=True)


def _logprobs(token: dict[str, Any]) -> dict[int, Logprob]:
    found = {other: Logprob(value, rank) for rank, (other, value) in enumerate(token.get("top", []), 1) if other >= 0}
    found[token["id"]] = Logprob(token["logprob"], token.get("rank"))
    return found


def _is_token_id(value: Any) -> bool:
    return hasattr(value, "__index__") and getattr(value, "ndim", 0) == 0  # arrays of NumPy have both


def _token_ids(ids: Any) -> list[int]:
    """Of a list, tuple or array (NumPy's, torch's on the host)."""
    try:
        if isinstance(ids, (str, bytes, bytearray)):
            raise TypeError
        return [operator.index(token) for token in ids]
    except TypeError:
        raise TypeError(f"token ids are a list of whole numbers, not {str(ids)[:100]!r}") from None


def _conversations(messages: Any) -> list[list[dict[str, Any]]]:
    """One, or several."""
    try:
        given = list(messages)
        many = [given] if given and isinstance(given[0], dict) else [list(one) for one in given]
    except TypeError:
        many = [[messages]]
    if not all(isinstance(message, dict) for one in many for message in one):
        raise TypeError("messages are a list of dicts with 'role' and 'content', or a list of such lists, not "
                        f"{str(messages)[:100]!r}")
    return many


def _text(content: Any) -> Any:
    """Of a message's content, which may be a list of parts, or None where the message has calls: one text."""
    if content is None:
        return ""
    if not isinstance(content, (list, tuple)):
        return content
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else "text"
        text = part.get(kind) if isinstance(part, dict) and isinstance(kind, str) else part
        if kind not in ("text", "refusal") or not isinstance(text, str):
            raise TypeError("parts of a message's content are texts, {'type': 'text', 'text': ...}, not "
                            f"{str(part)[:100]!r}")
        texts.append(text)
    return "\n".join(texts)


def _call(call: Any) -> dict[str, Any]:
    """Of a message: its arguments, which OpenAI's clients have as text, as the object that templates print."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise TypeError(f"tool_calls are a list of dicts with 'function', a dict, not {str(call)[:100]!r}")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            pass
    if not isinstance(arguments, dict):
        raise TypeError(f"a call's arguments are a dict, or the JSON of an object, not {str(arguments)[:100]!r}")
    return {**call, "function": {**function, "arguments": arguments}}


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """As the server and vLLM make it for templates."""
    made = {**message, "content": _text(message.get("content"))}
    if calls := made.pop("tool_calls", None):
        made["tool_calls"] = [_call(call) for call in calls]
    return made


class LLM:
    """A model on this machine.

    ``model``: a Hugging Face directory, a nested checkpoint, a .gguf file, or org/name in the local cache.
    ``precision``: "fp16" (exact), "fp8", "fp8-w8a8", or a policy that decides for every step: "threshold:TOKENS",
    "alternate:STEPS". Other keywords: device ("auto", "cpu", "cuda"), threads, max_model_len, max_num_seqs,
    max_num_batched_tokens, kv_cache_dtype ("f16", "fp8", "f32"), gpu_memory_utilization, enable_prefix_caching,
    speculative_tokens (at most so many ahead, drafted in FP8 and verified in FP16; 0), fp8 (which arithmetic policies
    mean by FP8), fp8_head, deterministic, gemm_choices (a file of ``nestedfp tune``, for a GPU), generation_config
    ("auto": the model's, "vllm": none, or a directory with a generation_config.json; what calls without SamplingParams
    have), seed (of requests without one of their own; None and -1: drawn). vLLM's others are taken with values that
    ask for nothing else than what is here (tensor_parallel_size=1, dtype="float16").

    Raises NestedFPError with a message that names the file or field."""

    def __init__(self, model: str | os.PathLike[str], precision: str = "fp16", *, seed: int | None = None,
                 override_generation_config: dict[str, Any] | None = None, **options: Any):
        overrides = override_generation_config or {}
        if unknown := [str(name) for name in overrides if name not in _OVERRIDES]:
            raise TypeError(f"override_generation_config has {', '.join(_OVERRIDES)}, not {', '.join(unknown)}")
        if isinstance(seed, bool) or not (seed is None or _is_token_id(seed)):
            raise TypeError(f"seed is a whole number or None, not {seed!r}")
        self._seeds = None if seed is None or seed == -1 else random.Random(operator.index(seed))
        for name, nothing in _LLM_OF_VLLM.items():
            if name in options and (value := options.pop(name)) not in nothing:
                raise TypeError(f"nestedfp.LLM has no {name}, which is {value!r}; leave it out")
        if precision in ("fp8", "fp8-w8a8"):
            options.setdefault("fp8", precision)
        if options.get("kv_cache_dtype") == "auto":
            del options["kv_cache_dtype"]
        self._engine = Engine(model, {"policy": precision, **options})
        info = self._engine.info()
        self._context = int(info["max_model_len"])
        self._sampling: dict[str, Any] = info["default_sampling_params"]
        self._sampling |= {_OVERRIDES[name]: value for name, value in overrides.items() if value is not None}
        self._names = itertools.count()
        self._given_up: deque[str] = deque()  # requests that nobody waits for any more
        self._lock = threading.Lock()  # of what follows
        self._open: dict[str, _Answer] = {}  # that have not ended

    def close(self) -> None:
        """Frees the weights, after the step that another thread may be in. Also what leaving a ``with`` block does."""
        self._engine.close()

    def __copy__(self) -> LLM:  # whoever has a copy has the same model
        return self

    def __deepcopy__(self, _: object) -> LLM:
        return self

    def __reduce__(self) -> str:
        raise TypeError("a nestedfp.LLM cannot be sent to another process: its weights are in the memory of the one that "
                        "loaded it; load the model there")

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def info(self) -> dict[str, Any]:
        """model, device, vocab_size, max_model_len, weight_bytes, load_s, policy, default_sampling_params."""
        return self._engine.info()

    def get_default_sampling_params(self) -> SamplingParams:
        """Of calls that give none: with what the model's generation_config.json says."""
        return SamplingParams(**self._sampling)

    def encode(self, text: str) -> list[int]:
        return self._engine.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        return self._engine.decode(_token_ids(ids))

    def _submit(self, prompt: Prompt, sampling: SamplingParams, made: dict[str, _Answer],
                fresh: dict[str, _Answer]) -> None:
        """The requests of a prompt come into ``made`` by their names, the first of them the result's; each of them
        before the engine has it, so that an exception leaves none there that nobody knows. ``fresh``: their call's."""
        sampling._check()
        text: str | None = None
        if isinstance(prompt, dict):
            if unknown := [str(name) for name, value in prompt.items()
                           if name not in ("prompt", "prompt_token_ids") and value is not None]:
                raise TypeError(f"a prompt has 'prompt', a text, or 'prompt_token_ids', not {', '.join(unknown)}")
            given, text = prompt.get("prompt_token_ids"), prompt.get("prompt")
            if not isinstance(text, str) and (text is not None or given is None):
                raise TypeError(f"a prompt has 'prompt', a text, or 'prompt_token_ids': {str(prompt)[:100]}")
            ids = self.encode(str(text)) if given is None else _token_ids(given)
        elif isinstance(prompt, str):
            text, ids = prompt, self.encode(prompt)
        else:
            ids = _token_ids(prompt)
        outputs = [CompletionOutput(i, logprobs=None if sampling.logprobs is None else []) for i in range(sampling.n)]
        result = RequestOutput(str(next(self._names)), text, ids, outputs)
        room = self._context - len(ids)
        seed = None if sampling.seed == -1 else sampling.seed
        if seed is None and self._seeds is not None:
            seed = self._seeds.getrandbits(62)
        for i, output in enumerate(outputs):
            one = replace(sampling, seed=seed)
            if i > 0:  # as vLLM has it: seeds that follow each other, the prompt's log-probabilities once
                one = replace(sampling, seed=None if seed is None else seed + i, prompt_logprobs=None)
            fields = one._fields()
            most, least = one.max_tokens, one.min_tokens
            if _is_token_id(most) and _is_token_id(least) and least <= most and most > room > 0:
                del fields["max_tokens"]  # as vLLM has it, such an answer ends where the context is full
            name = result.request_id if i == 0 else f"{result.request_id}-{i}"
            made[name] = self._open[name] = _Answer(name, result, output, sampling.detokenize,
                                                    sampling._stop_ids(), fresh)
            self._engine.submit(id=name, prompt=ids, **fields)

    def _settle(self) -> None:
        """First of all under the lock: what earlier calls left to do, which an exception may have ended anywhere. Each
        thing leaves its list once it is done, so that it is done again where an exception came between."""
        if self._engine.undelivered:
            self._step()
        while self._given_up:
            name = self._given_up[0]
            if name in self._open:
                self._engine.cancel(name)
                self._open.pop(name, None)
            self._given_up.popleft()

    def _run(self, prompts: Sequence[Prompt], sampling: Sequence[SamplingParams]) -> Generator[RequestOutput, None, None]:
        """Each result as often as something was added to it. Calls that run at the same time, in threads or as
        generators of which none has ended, share the engine's steps."""
        mine: dict[str, _Answer] = {}
        fresh: dict[str, _Answer] = {}  # looked through instead of all, which may be thousands
        try:
            for prompt, parameters in zip(prompts, sampling, strict=True):
                self._engine.check_process()
                with self._lock:
                    self._settle()
                    self._submit(prompt, parameters, mine, fresh)
            waiting = len(mine)
            while waiting > 0:
                self._engine.check_process()
                with self._lock:
                    self._settle()
                    if not fresh:
                        self._step()
                    news = [(answer, answer.take()) for answer in fresh.values()]
                    fresh.clear()
                results: dict[str, RequestOutput] = {}
                for answer, pieces in news:
                    for piece in pieces:
                        answer.add(piece)
                    if answer.output.finish_reason is not None:
                        waiting -= 1
                    results[answer.result.request_id] = answer.result
                yield from results.values()
        finally:
            # No lock: the garbage collector may end this generator anywhere, in a thread that has the lock too.
            self._given_up.extend(mine)

    def _step(self) -> None:
        step = self._engine.step()
        pieces: dict[str, list[dict[str, Any]]] = {}
        for piece in step["outputs"]:
            pieces.setdefault(piece["id"], []).append(piece)
        for name, news in pieces.items():
            answer = self._open.get(name)
            if answer is None:
                continue  # of a call that was given up
            answer.news[self._engine.steps] = news
            answer.fresh[answer.name] = answer
            if news[-1].get("finish_reason") is not None:
                del self._open[name]
        self._engine.delivered()
        if step["idle"] and not step["outputs"]:
            raise NestedFPError(9, "the engine has nothing left to do and requests without an end")

    def _lists(self, prompts: Prompt | Sequence[Prompt], sampling: SamplingParams | Sequence[SamplingParams] | None
               ) -> tuple[list[Prompt], list[SamplingParams]]:
        if isinstance(prompts, (bytes, bytearray)):
            raise TypeError("a prompt is a text, token ids or a dict, not bytes")
        try:
            single = isinstance(prompts, (str, dict)) or (len(prompts) > 0 and _is_token_id(prompts[0]))
        except TypeError:
            raise TypeError("prompts are a text, token ids or a dict, or a list of such, not "
                            f"{type(prompts).__name__}") from None
        many = cast("list[Prompt]", [prompts] if single else list(prompts))
        if sampling is None:
            sampling = self.get_default_sampling_params()
        parameters = [sampling] * len(many) if isinstance(sampling, SamplingParams) else list(sampling)
        for one in parameters:
            if not isinstance(one, SamplingParams):
                raise TypeError(f"sampling_params is SamplingParams or a list of them, not {str(one)[:100]!r}")
        if len(parameters) != len(many):
            raise ValueError(f"{len(many)} prompts and {len(parameters)} SamplingParams")
        return many, parameters

    def generate(self, prompts: Prompt | Sequence[Prompt],
                 sampling_params: SamplingParams | Sequence[SamplingParams] | None = None, *,
                 use_tqdm: bool | Callable[..., Any] = True, **of_vllm: None) -> list[RequestOutput]:
        """Answers all prompts (texts, token ids, or dicts with "prompt" or "prompt_token_ids"), together; in their
        order. ``use_tqdm``: a progress bar, where tqdm is installed, or what makes one."""
        for name, value in of_vllm.items():
            if name not in _GENERATE_OF_VLLM or value is not None:
                raise TypeError(f"nestedfp.LLM.generate has no {name}, which is {value!r}")
        many, parameters = self._lists(prompts, sampling_params)
        order: list[RequestOutput] = []
        bar = _progress(use_tqdm, len(many))
        try:
            with closing(self._run(many, parameters)) as results:  # also where the bar raises an error that somebody keeps
                for result in results:
                    if result.finished:
                        order.append(result)
                        if bar is not None:
                            bar.update(1)
        finally:
            if bar is not None:
                bar.close()
        return sorted(order, key=lambda result: int(result.request_id))

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Generator[RequestOutput, None, None]:
        """The answer as it comes: the same RequestOutput each time, longer. Leaving the loop ends the request."""
        if _is_token_id(prompt):
            raise TypeError(f"a prompt is a text, token ids or a dict, not {prompt!r}")
        many, parameters = self._lists([prompt], sampling_params)
        yield from self._run(many, parameters)

    def chat(self, messages: Sequence[dict[str, Any]] | Sequence[Sequence[dict[str, Any]]],
             sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
             use_tqdm: bool | Callable[..., Any] = True, *, tools: Sequence[dict[str, Any]] | None = None,
             chat_template_kwargs: dict[str, Any] | None = None, **template: Any) -> list[RequestOutput]:
        """Answers one conversation or several: lists of {"role", "content"}, a text or a list of parts with texts. What
        is in ``chat_template_kwargs``, and further keywords, reach the model's chat template: add_generation_prompt,
        enable_thinking."""
        for name, nothing in _CHAT_OF_VLLM.items():
            if (value := template.pop(name, nothing)) and value != nothing:
                raise TypeError(f"nestedfp.LLM.chat has no {name}, which is {value!r}")
        if not all(isinstance(tool, dict) for tool in tools or ()):
            raise TypeError(f"tools are a list of dicts, not {str(tools)[:100]!r}")
        prompts = []
        for conversation in _conversations(messages):
            made = [_message(message) for message in conversation]
            fields = {**template, **(chat_template_kwargs or {}), "messages": made}
            if tools:
                fields["tools"] = list(tools)
            prompts.append(self._engine.apply_chat_template(**fields))
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)
