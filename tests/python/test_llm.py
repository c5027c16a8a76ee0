"""nestedfp.LLM over a tiny model on the CPU, and over the demo model where NFP_DEMO_MODEL names it."""

import copy
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import types
import unittest
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from unittest.mock import patch

import numpy as np

import nestedfp
from nestedfp import LLM, NestedFPError, SamplingParams

TINY = Path(os.environ.get("NFP_TINY_MODELS", "")) / "llama-tied"
DEMO = os.environ.get("NFP_DEMO_MODEL", "")
SOURCE = Path(os.environ.get("NFP_SOURCE", ""))
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@unittest.skipUnless(TINY.is_dir(), "NFP_TINY_MODELS does not name the tests' tiny models")
class TinyModel(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.llm = LLM(TINY, device="cpu", threads=1, max_model_len=128)

    @classmethod
    def tearDownClass(cls):
        cls.llm.close()

    def test_prompts_of_every_kind_and_their_order(self):
        ids = self.llm.encode("ab ba")
        one = self.llm.generate("ab ba", GREEDY)[0]
        self.assertEqual(one.prompt_token_ids, ids)
        outputs = self.llm.generate(["ab ba", {"prompt_token_ids": ids}, ids, {"prompt": "ab ba"}, [5, 6, 7]], GREEDY)
        self.assertEqual([len(o.outputs[0].token_ids) for o in outputs], [12] * 5)
        for output in outputs[:4]:
            self.assertEqual(output.outputs[0].token_ids, one.outputs[0].token_ids)
        self.assertEqual(outputs[4].prompt_token_ids, [5, 6, 7])
        self.assertTrue(all(o.finished and o.outputs[0].finish_reason == "length" for o in outputs))

    def test_an_answer_ends_where_the_context_is_full(self):
        """A prompt that leaves less room than max_tokens is no error, of which the other prompts would have theirs."""
        for least in (0, 120):
            many = replace(GREEDY, max_tokens=120, min_tokens=least)
            outputs = self.llm.generate([[5] * 100, [5, 6, 7]], many)
            self.assertEqual([(len(o.outputs[0].token_ids), o.outputs[0].finish_reason) for o in outputs],
                             [(28, "length"), (120, "length")])
        self.assertEqual(outputs[0].outputs[0].token_ids,
                         self.llm.generate([5] * 100, replace(GREEDY, max_tokens=28))[0].outputs[0].token_ids)
        with self.assertRaisesRegex(NestedFPError, "the prompt has 128 tokens and the context holds 128"):
            self.llm.generate([5] * 128, GREEDY)
        with self.assertRaisesRegex(NestedFPError, "min_tokens is 130; it must be at most max_tokens"):
            self.llm.generate([5] * 100, replace(GREEDY, max_tokens=120, min_tokens=130))

    def test_a_text_beside_token_ids(self):
        """As vLLM has it: the ids are computed, and the text comes back."""
        given = {"prompt": "ab ba", "prompt_token_ids": [5, 6, 7]}
        self.assertEqual([(o.prompt, o.prompt_token_ids) for o in self.llm.generate(given, GREEDY)], [("ab ba", [5, 6, 7])])
        for given in ({"prompt": "ab ba", "prompt_token_ids": None}, {"prompt": None, "prompt_token_ids": [5, 6, 7]}):
            output = self.llm.generate(given, GREEDY)[0]
            self.assertEqual(output.prompt, given["prompt"])
            self.assertEqual(output.prompt_token_ids, given["prompt_token_ids"] or self.llm.encode("ab ba"))
        for wrong in ({"prompt": None, "prompt_token_ids": None}, {"prompt": 5, "prompt_token_ids": [5]}, {}):
            with self.assertRaisesRegex(TypeError, "^a prompt has 'prompt', a text, or 'prompt_token_ids'"):
                self.llm.generate(wrong, GREEDY)

    def test_more_prompts_than_fit_in_a_step(self):
        prompts = [[3 + i, 4 + i, 5] for i in range(30)]
        together = self.llm.generate(prompts, GREEDY)
        self.assertEqual([o.prompt_token_ids for o in together], prompts)
        for i in (0, 17, 29):
            self.assertEqual(self.llm.generate([prompts[i]], GREEDY)[0].outputs[0].token_ids,
                             together[i].outputs[0].token_ids)

    def test_prompts_that_wait_cost_a_step_nothing(self):
        """One of thousands would look at all of them else."""
        looks = [0]

        class Watched(nestedfp.llm._Answer):
            def __getattribute__(self, name):
                looks[0] += name == "news"
                return super().__getattribute__(name)

        with patch.object(nestedfp.llm, "_Answer", Watched):
            outputs = self.llm.generate([[5, 6]] * 400, replace(GREEDY, max_tokens=2), use_tqdm=False)
        self.assertEqual([len(o.outputs[0].token_ids) for o in outputs], [2] * 400)
        self.assertLess(looks[0], 400 * 2 * 5)

    def test_parameters_of_each_prompt(self):
        many = [SamplingParams(temperature=0.9, seed=seed, max_tokens=8, ignore_eos=True, top_k=-1) for seed in (1, 2, 1)]
        a, b, c = (o.outputs[0].token_ids for o in self.llm.generate([[5, 6]] * 3, many))
        self.assertEqual(a, c)
        self.assertNotEqual(a, b)
        with self.assertRaisesRegex(ValueError, "2 prompts and 1"):
            self.llm.generate([[5], [6]], [GREEDY])

    def test_seeds(self):
        def drawn(llm, seed=None, n=1):
            parameters = SamplingParams(temperature=2, seed=seed, n=n, max_tokens=12, ignore_eos=True)
            return [o.token_ids for output in llm.generate([[5, 6, 7]] * 2, parameters) for o in output.outputs]

        for seed in (None, -1, np.int64(-1)):  # as vLLM has it: none
            answers = drawn(self.llm, seed) + drawn(self.llm, seed, n=2)
            self.assertEqual(len({tuple(answer) for answer in answers}), 6)
        of = {}
        for run, seed in (("a", 3), ("b", 3), ("c", 4), ("d", -1), ("e", -1)):
            with LLM(TINY, device="cpu", threads=1, seed=seed) as llm:
                of[run] = drawn(llm) + drawn(llm, n=2)
                self.assertEqual(drawn(llm, 7), drawn(self.llm, 7))  # a request's own comes first
        self.assertEqual(of["a"], of["b"])
        self.assertEqual(len({tuple(answer) for run in "acde" for answer in of[run]}), 24)
        for seed in ("3", 1.5, True):
            with self.assertRaisesRegex(TypeError, "^seed is a whole number or None"):
                LLM(TINY, device="cpu", seed=seed)

    def test_sampling_that_the_model_recommends(self):
        with tempfile.TemporaryDirectory() as folder:
            model, other = Path(folder, "model"), Path(folder, "other")
            shutil.copytree(TINY, model)
            other.mkdir()
            Path(model, "generation_config.json").write_text('{"temperature": 0.0, "top_k": 7, "top_p": 0.95}')
            Path(other, "generation_config.json").write_text('{"temperature": 0.5, "min_p": 0.1}')
            with LLM(model, device="cpu", threads=1, max_model_len=128) as llm:
                self.assertEqual(llm.get_default_sampling_params(), SamplingParams(temperature=0, top_k=7, top_p=0.95))
                self.assertEqual(llm.info["default_sampling_params"], {"temperature": 0, "top_k": 7, "top_p": 0.95})
                greedy = llm.generate([5, 6, 7], replace(GREEDY, max_tokens=16, ignore_eos=False))[0].outputs
                message = [{"role": "user", "content": "ab"}]
                for made in (llm.generate([5, 6, 7]), list(llm.stream([5, 6, 7]))[-1:]):
                    self.assertEqual(made[0].outputs, greedy)
                self.assertEqual(llm.chat(message)[0].outputs,
                                 llm.chat(message, replace(GREEDY, max_tokens=16, ignore_eos=False))[0].outputs)
            for where, want in (("vllm", SamplingParams()), (str(other), SamplingParams(temperature=0.5, min_p=0.1))):
                with LLM(model, device="cpu", threads=1, generation_config=where) as llm:
                    self.assertEqual(llm.get_default_sampling_params(), want)
            Path(other, "generation_config.json").write_text('{"max_new_tokens": 3}')
            with LLM(model, device="cpu", threads=1, generation_config=str(other)) as llm:
                self.assertEqual(llm.get_default_sampling_params(), SamplingParams(max_tokens=3))
            overrides = {"top_k": 3, "top_p": None, "max_new_tokens": 4}
            with LLM(model, device="cpu", threads=1, override_generation_config=overrides) as llm:
                self.assertEqual(llm.get_default_sampling_params(),
                                 SamplingParams(temperature=0, top_k=3, top_p=0.95, max_tokens=4))
            with self.assertRaisesRegex(TypeError, "^override_generation_config has temperature, .*, not do_sample$"):
                LLM(model, device="cpu", override_generation_config={"do_sample": True})
            Path(model, "generation_config.json").write_text('{"top_p": 7}')
            with self.assertRaisesRegex(NestedFPError, "generation_config.json: .*top_p.*; generation_config none"):
                LLM(model, device="cpu")
            with self.assertRaisesRegex(NestedFPError, f"^generation_config {folder}: .*; it is auto, none, or a"):
                LLM(model, device="cpu", generation_config=folder)

    def test_drafts_change_no_answer(self):
        prompts = [[5, 6, 7] * 5, "ab ba"]
        parameters = [GREEDY, SamplingParams(seed=3, max_tokens=12, logprobs=2, prompt_logprobs=1, ignore_eos=True)]
        def said(llm):
            return [(output.outputs, output.prompt_logprobs, output.usage["completion_tokens"])
                    for output in llm.generate(prompts, parameters)]

        with LLM(TINY, device="cpu", threads=1, max_model_len=128, speculative_tokens=3) as drafting:
            self.assertEqual(said(drafting), said(self.llm))
            text = "".join(output.outputs[0].text for output in drafting.generate([prompts[0]], GREEDY))
            for output in drafting.stream(prompts[0], GREEDY):
                self.assertTrue(text.startswith(output.outputs[0].text))
            self.assertEqual(len(output.outputs[0].token_ids), 12)

    def test_streaming_grows_and_may_be_left(self):
        lengths = [len(o.outputs[0].token_ids) for o in self.llm.stream([5, 6, 7], GREEDY)]
        self.assertEqual(lengths, sorted(lengths))
        self.assertEqual(lengths[-1], 12)
        for output in self.llm.stream([5, 6, 7], SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)):
            if len(output.outputs[0].token_ids) >= 3:
                break
        self.assertFalse(output.finished)
        # The request that was left is gone, and the next one is not disturbed.
        self.assertEqual(self.llm.generate([[5, 6, 7]], GREEDY)[0].outputs[0].token_ids[:3],
                         output.outputs[0].token_ids[:3])

    def test_calls_at_the_same_time(self):
        alone = [self.llm.generate([[5 + i, 6]], GREEDY)[0].outputs[0].token_ids for i in range(4)]
        both = [list(pair) for pair in zip(self.llm.stream([5, 6], GREEDY), self.llm.stream([6, 6], GREEDY))]
        self.assertEqual([both[-1][i].outputs[0].token_ids for i in range(2)], alone[:2])
        found = {}

        def ask(i):
            found[i] = [self.llm.generate([[5 + i, 6]], GREEDY)[0].outputs[0].token_ids for _ in range(5)]

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(found, {i: [alone[i]] * 5 for i in range(4)})

    def test_a_step_of_another_call_changes_nothing_that_was_given(self):
        others = [SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True) for tokens in (2, 3, 4)]
        while_they_wait = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
        finished = []

        class Bar:
            def __init__(bar, **_):
                pass

            def update(bar, count):  # as another thread may do at any time
                finished.append(count)
                self.llm.generate([[8, 9]], while_they_wait, use_tqdm=False)

            def close(bar):
                pass

        prompts = [[5, 6], [6, 7], [7, 8]]
        outputs = self.llm.generate(prompts, others, use_tqdm=Bar)
        self.assertEqual([o.prompt_token_ids for o in outputs], prompts)
        self.assertEqual([len(o.outputs[0].token_ids) for o in outputs], [2, 3, 4])
        self.assertEqual(finished, [1, 1, 1])

        one = self.llm.stream([5, 6], GREEDY)
        given = next(one)
        before = len(given.outputs[0].token_ids)
        self.llm.generate([[8, 9]], while_they_wait, use_tqdm=False)
        self.assertEqual(len(given.outputs[0].token_ids), before)
        self.assertGreater(len(next(one).outputs[0].token_ids), before)
        self.assertEqual([given.finished for given in one][-2:], [False, True])

    def test_logprobs(self):
        output = self.llm.generate([[5, 6, 7, 8]], SamplingParams(temperature=0, max_tokens=4, logprobs=2,
                                                                  prompt_logprobs=0, ignore_eos=True))[0]
        answer = output.outputs[0]
        self.assertEqual(len(answer.logprobs), 4)
        for token, entry in zip(answer.token_ids, answer.logprobs):
            self.assertEqual(entry[token].rank, 1)
            self.assertEqual(entry[token].logprob, max(value.logprob for value in entry.values()))
        self.assertAlmostEqual(answer.cumulative_logprob,
                               sum(e[t].logprob for t, e in zip(answer.token_ids, answer.logprobs)), places=4)
        self.assertEqual([entry is None for entry in output.prompt_logprobs], [True, False, False, False])

    def test_precision_of_every_token(self):
        with LLM(TINY, "alternate:1", device="cpu", threads=1, max_model_len=64) as llm:
            answer = llm.generate([[5, 6, 7]], GREEDY)[0]
            self.assertEqual(set(answer.outputs[0].precisions), {"fp16", "fp8"})
            exact = llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True,
                                                             precision="exact"))[0]
            self.assertEqual(set(exact.outputs[0].precisions), {"fp16"})
            self.assertEqual(exact.usage["fp8_tokens"], 0)
            self.assertEqual(exact.outputs[0].token_ids, self.llm.generate([[5, 6, 7]], GREEDY)[0].outputs[0].token_ids)

    def test_top_p_of_zero_is_greedy(self):
        want = self.llm.generate([[5, 6, 7]], GREEDY)[0].outputs[0].token_ids
        for seed in range(5):
            drawn = SamplingParams(temperature=1, top_p=0, seed=seed, max_tokens=12, ignore_eos=True)
            self.assertEqual(self.llm.generate([[5, 6, 7]], drawn)[0].outputs[0].token_ids, want)

    def test_errors_name_what_is_wrong(self):
        for parameters, field in ((SamplingParams(temperature=-1), "temperature"), (SamplingParams(top_p=2), "top_p"),
                                  (SamplingParams(precision="best"), "precision"),
                                  (SamplingParams(max_tokens=0), "max_tokens"), (SamplingParams(top_k="3"), "top_k"),
                                  (SamplingParams(top_k=-5), "top_k"), (SamplingParams(logit_bias=[5]), "logit_bias"),
                                  (SamplingParams(logit_bias={"a": 1.0}), "logit_bias"),
                                  (SamplingParams(seed=2**63), "seed"), (SamplingParams(detokenize=None), "detokenize"),
                                  (SamplingParams(logit_bias={1.5: 1.0}), "logit_bias"),
                                  (SamplingParams(logprobs=129), "'logprobs' must be 0 to 128"),
                                  (SamplingParams(logprobs=-1), "'logprobs' must be 0 to 128"),
                                  (SamplingParams(prompt_logprobs=129), "'prompt_logprobs' .* from 0 to 128")):
            with self.assertRaisesRegex(NestedFPError, field):
                self.llm.generate([[5]], parameters)
        with self.assertRaisesRegex(NestedFPError, "prompt"):
            self.llm.generate([[1 << 30]], GREEDY)
        self.assertEqual(len(self.llm.generate([[5]], GREEDY)), 1)  # nothing of these is left behind
        with self.assertRaisesRegex(NestedFPError, "no such file"):
            LLM("/nonexistent")
        with self.assertRaisesRegex(ValueError, "zero in it"):
            LLM(f"{TINY}\0else")
        with self.assertRaisesRegex(TypeError, "os.PathLike"):
            LLM(None)
        with self.assertRaisesRegex(NestedFPError, "'colour' is unknown"):
            LLM(TINY, colour="red")
        with self.assertRaisesRegex(NestedFPError, "precision policy 'never'") as refused:
            LLM(TINY, "never", device="cpu")
        self.assertNotIn("graded", str(refused.exception))  # is refused here
        with self.assertRaisesRegex(NestedFPError, "^gemm_choices: .*choices.json.*cpu"):
            LLM(TINY, device="cpu", gemm_choices="choices.json")
        with self.assertRaisesRegex(NestedFPError, "max_model_len: a context of 1000000 tokens"):
            LLM(TINY, device="cpu", max_model_len=1000000)
        try:
            LLM(TINY, device="cuda").close()
        except NestedFPError as error:  # says what to do in the words of this package
            self.assertRegex(str(error), "use device cpu$")
        for share in (0, 5, float("nan")):
            with self.assertRaisesRegex(NestedFPError, "'gpu_memory_utilization'"):
                LLM(TINY, device="cpu", gpu_memory_utilization=share)

    def test_errors_reach_the_caller_of_a_process(self):
        with self.assertRaisesRegex(NestedFPError, "no such file") as caught:
            LLM("/nonexistent")
        again = pickle.loads(pickle.dumps(caught.exception))
        self.assertEqual((type(again), str(again), again.code), (NestedFPError, str(caught.exception), caught.exception.code))

    def test_errors_name_what_json_has_not(self):
        for field, value in (("temperature", float("nan")), ("top_p", float("inf")), ("logit_bias", {5: float("nan")}),
                             ("stop", ["\udcff"]), ("seed", object())):
            with self.assertRaisesRegex(NestedFPError, f"field '{field}'"):
                self.llm.generate([[5]], SamplingParams(**{field: value}))

    def test_text_that_is_not_unicode(self):
        for call in (self.llm.encode, lambda text: self.llm.generate(text, GREEDY)):
            with self.assertRaisesRegex(NestedFPError, "surrogates not allowed"):
                call("a\ud800")

    def test_a_path_that_is_not_unicode(self):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, os.fsdecode(b"\xff"))
            os.symlink(TINY, path)
            with LLM(path, device="cpu", threads=1) as llm:
                self.assertEqual(llm.encode("ab ba"), self.llm.encode("ab ba"))
                self.assertIn("model", llm.info)

    def test_token_ids_of_arrays(self):
        expected = self.llm.generate([[5, 6, 7]], GREEDY)[0].outputs[0].token_ids
        array = np.array([5, 6, 7])
        for prompts in (array, [array], array[None], list(array), (5, 6, 7), {"prompt_token_ids": array}):
            self.assertEqual(self.llm.generate(prompts, GREEDY)[0].outputs[0].token_ids, expected)
        self.assertEqual(self.llm.decode(array), self.llm.decode([5, 6, 7]))

    def test_parameters_of_numpy(self):
        plain = SamplingParams(temperature=0.5, seed=3, max_tokens=5, logprobs=1, stop_token_ids=[9, 7], logit_bias={5: 1.0})
        arrays = SamplingParams(temperature=np.float32(0.5), seed=np.int64(3), max_tokens=np.int64(5), logprobs=np.int8(1),
                                stop_token_ids=np.array([9, 7]), logit_bias={np.int64(5): np.float32(1)})
        self.assertEqual(self.llm.generate("ab", arrays)[0].outputs, self.llm.generate("ab", plain)[0].outputs)
        self.assertEqual(len(self.llm.generate([[5] * 100], replace(GREEDY, max_tokens=np.int64(120)))[0].outputs[0].token_ids), 28)
        for wrong in (5, "5", ["a"], [1.5]):
            with self.assertRaisesRegex(NestedFPError, "stop_token_ids: token ids are a list of whole numbers"):
                self.llm.generate("ab", SamplingParams(stop_token_ids=wrong))

    def test_prompts_that_are_none(self):
        for prompts in (b"ab", [b"ab"], [1.5], [["a", "b"]], None, {"prompt": 5}, {"prompt_token_ids": "ab"}, {"text": "a"}):
            with self.assertRaises(TypeError, msg=repr(prompts)):
                self.llm.generate(prompts, GREEDY)
        for prompt in (5, None, b"ab", [5, [6]], np.int64(5)):
            with self.assertRaises(TypeError, msg=repr(prompt)):
                next(self.llm.stream(prompt, GREEDY))
        with self.assertRaisesRegex(TypeError, "not multi_modal_data$"):
            self.llm.generate({"prompt": "ab", "multi_modal_data": {"image": 5}, "cache_salt": None}, GREEDY)
        for text in (b"ab", None, 5):
            with self.assertRaisesRegex(TypeError, "a text is a str, not "):
                self.llm.encode(text)
        for prompts in (None, 5, {"ab"}, (text for text in ["ab"])):
            with self.assertRaisesRegex(TypeError, "^prompts are a text, token ids or a dict, or a list of such, not "):
                self.llm.generate(prompts, GREEDY)
        for parameters in ({"temperature": 0}, [{"temperature": 0}], "ab"):
            with self.assertRaisesRegex(TypeError, "^sampling_params is SamplingParams or a list of them, not "):
                self.llm.generate([[5]], parameters)
        for messages in ("hi", ["hi"], {"role": "user", "content": "hi"}, None, [[{"role": "user"}], "hi"]):
            with self.assertRaisesRegex(TypeError, "^messages are a list of dicts with 'role' and 'content', or "):
                self.llm.chat(messages, GREEDY)

    def test_several_answers_to_a_prompt(self):
        some = SamplingParams(n=3, temperature=0.9, seed=7, max_tokens=6, ignore_eos=True, logprobs=0, prompt_logprobs=0)
        first, second = self.llm.generate([[5, 6, 7], [8, 9]], some)
        for result in (first, second):
            self.assertTrue(result.finished)
            self.assertEqual([(o.index, len(o.token_ids), len(o.logprobs)) for o in result.outputs],
                             [(i, 6, 6) for i in range(3)])
            self.assertEqual(result.usage["completion_tokens"], 18)
            self.assertEqual(result.usage["prompt_tokens"], len(result.prompt_token_ids))
            self.assertEqual(len(result.prompt_logprobs), len(result.prompt_token_ids))
        for i, output in enumerate(first.outputs):  # seeds that follow each other
            alone = SamplingParams(temperature=0.9, seed=7 + i, max_tokens=6, ignore_eos=True)
            self.assertEqual(self.llm.generate([[5, 6, 7]], alone)[0].outputs[0].token_ids, output.token_ids)
        self.assertEqual(len({tuple(o.token_ids) for o in first.outputs}), 3)
        seen = [[len(o.token_ids) for o in result.outputs] for result in self.llm.stream([5, 6, 7], some)]
        self.assertEqual(seen[-1], [6, 6, 6])
        for result in self.llm.stream([5, 6, 7], some):
            break  # all three are given up
        self.llm.generate([[5]], GREEDY)
        self.assertEqual(self.llm._open, {})
        with self.assertRaisesRegex(NestedFPError, "n must be 1 where temperature is 0"):
            self.llm.generate([[5]], SamplingParams(n=2, temperature=0))
        for wrong in (0, -1, 1.5, "2", True, 10**9):
            with self.assertRaisesRegex(NestedFPError, "n must be a whole number"):
                self.llm.generate([[5]], SamplingParams(n=wrong))

    def test_words_that_are_not_to_come(self):
        start = self.llm.encode("")
        word = next(w for w in "abcdefghij" if len(self.llm.encode(w)) == len(start) + 1)
        token = self.llm.encode(word)[-1]
        drawn = dict(max_tokens=4, ignore_eos=True, seed=1)
        wanted = SamplingParams(logit_bias={token: 100}, **drawn)
        self.assertEqual(self.llm.generate([[5]], wanted)[0].outputs[0].token_ids, [token] * 4)
        for bias in (None, {token: 100}):
            forbidden = SamplingParams(logit_bias=bias, bad_words=[word], **drawn)
            self.assertNotIn(token, self.llm.generate([[5]], forbidden)[0].outputs[0].token_ids)
        pair = word * 2  # two tokens, of which the second may not follow the first
        if len(self.llm.encode(pair)) != len(start) + 2:
            self.skipTest(f"{pair!r} is one token")
        ids = self.llm.generate([[5]], SamplingParams(logit_bias={token: 100}, bad_words=[pair], **drawn))[0].outputs[0].token_ids
        self.assertEqual(ids.count(token), 2)
        self.assertNotIn((token, token), list(zip(ids, ids[1:])))
        with self.assertRaisesRegex(NestedFPError, "bad_words.*white space only"):
            self.llm.generate([[5]], SamplingParams(bad_words=[" "]))
        for wrong in ("word", [5], [""]):
            with self.assertRaisesRegex(NestedFPError, "bad_words must be a list"):
                self.llm.generate([[5]], SamplingParams(bad_words=wrong))

    def test_tokens_that_alone_may_come(self):
        drawn = dict(max_tokens=20, ignore_eos=True, seed=1, temperature=2)
        for some in ([7, 9, 11], [7]):
            ids = self.llm.generate([[5]], SamplingParams(allowed_token_ids=some, **drawn))[0].outputs[0].token_ids
            self.assertEqual((len(ids), set(ids)), (20, set(some)))
        for wrong in ([], [-1], ["a"], 5, [10**6]):
            with self.assertRaisesRegex(NestedFPError, "allowed_token_ids"):
                self.llm.generate([[5]], SamplingParams(allowed_token_ids=wrong))

    def test_why_an_answer_stopped(self):
        def answer(**parameters):
            return self.llm.generate([[5]], SamplingParams(temperature=1, seed=1, max_tokens=4, **parameters))[0].outputs[0]

        end = 2  # of the tiny models
        word = next(i for i in range(3, 300) if "a" in self.llm.decode([i]))
        for token, asked, expected in ((end, {}, None), (end, {"stop_token_ids": [end]}, end),
                                       (word, {"stop_token_ids": [end, word]}, word), (word, {"stop": ["a"]}, "a")):
            found = answer(logit_bias={token: 100}, **asked)
            self.assertEqual((found.finish_reason, found.stop_reason, found.token_ids), ("stop", expected, [token]), asked)

    def test_a_model_without_a_tokenizer(self):
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_bytes((TINY / "config.json").read_bytes())
            with LLM(folder, device="cpu", threads=1, dummy=True) as llm:
                self.assertEqual(len(llm.generate([[5]], GREEDY)[0].outputs[0].token_ids), 12)
                with self.assertRaisesRegex(NestedFPError, "has no tokenizer; give token ids"):
                    llm.generate("ab", GREEDY)

    def test_ids_without_text(self):
        with_text = self.llm.generate([[5, 6, 7]], GREEDY)[0].outputs[0]
        ids = self.llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True,
                                                            detokenize=False))[0].outputs[0]
        self.assertTrue(with_text.text)
        self.assertEqual((ids.text, ids.token_ids), ("", with_text.token_ids))
        with self.assertRaisesRegex(NestedFPError, "stop: .*detokenize"):
            self.llm.generate([[5]], SamplingParams(stop="a", detokenize=False))

    def test_what_only_vllm_has_is_named(self):
        with self.assertRaisesRegex(NestedFPError, "structured_outputs: .*nestedfp serve"):
            self.llm.generate([[5]], SamplingParams(structured_outputs={"json": {}}))
        with self.assertRaisesRegex(TypeError, "logits_processors"):
            SamplingParams(logits_processors=[])
        messages = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "b"}]
        for name, value in (("continue_final_message", True), ("chat_template", "x"), ("lora_request", object()),
                            ("chat_template_content_format", "openai"), ("mm_processor_kwargs", {"a": 1})):
            with self.assertRaisesRegex(TypeError, f"chat has no {name}, which is "):
                self.llm.chat(messages, GREEDY, **{name: value})
        self.llm.chat(messages, GREEDY, continue_final_message=False, chat_template=None, lora_request=None,
                      chat_template_content_format="auto", mm_processor_kwargs={})

    def test_keywords_of_the_chat_template(self):
        def prompt(**keywords):
            return self.llm.chat([{"role": "user", "content": "ab"}], GREEDY, **keywords)[0].prompt_token_ids

        bare = prompt(add_generation_prompt=False)
        self.assertEqual(prompt()[:len(bare)], bare)
        self.assertGreater(len(prompt()), len(bare))
        self.assertEqual(prompt(chat_template_kwargs={"add_generation_prompt": False}), bare)
        for wrong in ("abc", [5]):
            with self.assertRaisesRegex(TypeError, "^tools are a list of dicts"):
                prompt(tools=wrong)

    def test_keywords_of_vllm_that_ask_for_nothing(self):
        with LLM(TINY, device="cpu", threads=1, tensor_parallel_size=1, dtype="float16", trust_remote_code=True,
                 enforce_eager=True, quantization=None, kv_cache_dtype="auto", speculative_config=None,
                 limit_mm_per_prompt={}, task="generate") as llm:
            self.assertEqual(len(llm.generate("ab", GREEDY, lora_request=None, priority=None)), 1)
            with self.assertRaisesRegex(TypeError, "^nestedfp.LLM.generate has no priority, which is 3"):
                llm.generate("ab", GREEDY, priority=3)
            with self.assertRaisesRegex(TypeError, "^nestedfp.LLM.generate has no colour"):
                llm.generate("ab", GREEDY, colour=None)
        for name, value in (("tensor_parallel_size", 2), ("dtype", "bfloat16"), ("quantization", "awq")):
            with self.assertRaisesRegex(TypeError, f"^nestedfp.LLM has no {name}, which is "):
                LLM(TINY, device="cpu", **{name: value})

    def test_tools_that_the_template_does_not_know(self):
        def prompt(messages, **keywords):  # longer than the tiny model's context
            with patch.object(self.llm, "generate", lambda prompts, *_, **__: prompts):
                return self.llm.decode(self.llm.chat(messages, GREEDY, **keywords)[0])

        hi = {"role": "user", "content": "ab"}
        tool = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}
        call = {"id": "c", "type": "function", "function": {"name": "look_up", "arguments": '{"x": 1}'}}
        self.assertEqual(prompt([hi], tools=[]), prompt([hi]))
        shown = prompt([hi, {"role": "assistant", "content": None, "tool_calls": [call]},
                        {"role": "tool", "tool_call_id": "c", "content": "seven"}], tools=[tool])
        for part in ("You can call functions.", '{"name":"look_up","parameters":{"type":"object"}}',
                     '<tool_call>\n{"name":"look_up","arguments":{"x":1}}\n</tool_call>',
                     "<tool_response>\nseven\n</tool_response>"):
            self.assertIn(part, shown)
        with self.assertRaisesRegex(NestedFPError, r"'messages\[0\].content' must be a text"):
            prompt([{"role": "user", "content": 5}], tools=[tool])

    def test_contents_in_parts(self):
        def prompt(content):
            messages = [{"role": "user", "content": content}, {"role": "assistant"}, {"role": "user", "content": "b"}]
            return self.llm.chat(messages, GREEDY)[0].prompt_token_ids

        text = prompt("ab\nba")
        self.assertEqual(prompt([{"type": "text", "text": "ab"}, {"type": "text", "text": "ba"}]), text)
        self.assertEqual(prompt(({"type": "text", "text": "ab"}, "ba")), text)
        self.assertEqual(prompt([]), prompt(""))
        for part in ({"type": "image_url", "image_url": {"url": "x"}}, {"type": "text"}, {"text": "ab"}, 5, ["ab"]):
            with self.assertRaisesRegex(TypeError, "^parts of a message's content are texts, .*, not "):
                prompt([{"type": "text", "text": "ab"}, part])

    def test_calls_of_a_conversation(self):
        with tempfile.TemporaryDirectory() as folder:
            model = shutil.copytree(TINY, Path(folder) / "model")
            described = json.loads((model / "tokenizer_config.json").read_text())
            described["chat_template"] = ("{% for m in messages %}{{ m.content }};{% for call in m.tool_calls %}"
                                          "{{ call.function.arguments | tojson }}{% endfor %}{% endfor %}")
            (model / "tokenizer_config.json").write_text(json.dumps(described))
            with LLM(model, device="cpu", threads=1) as llm:
                def prompt(**more):
                    call = {"id": "c", "type": "function", "function": {"name": "f", **more}}
                    messages = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
                    return llm.decode(llm.chat(messages, GREEDY)[0].prompt_token_ids)

                for arguments in ('{"a": 1}', {"a": 1}):
                    self.assertEqual(prompt(arguments=arguments), 'ab;;{"a": 1}')
                for nothing in ({}, {"arguments": None}, {"arguments": ""}):
                    self.assertEqual(prompt(**nothing), "ab;;{}")
                for wrong in ("{", "[1]", 5):
                    with self.assertRaisesRegex(TypeError, "^a call's arguments are a dict, or the JSON of an object, not "):
                        prompt(arguments=wrong)
                for wrong in ([5], [{}], [{"function": "f"}]):
                    with self.assertRaisesRegex(TypeError, "^tool_calls are a list of dicts with 'function', a dict, not "):
                        llm.chat([{"role": "assistant", "content": "", "tool_calls": wrong}], GREEDY)

    def test_progress(self):
        made = []

        class Bar:
            def __init__(self, total, desc, dynamic_ncols):
                self.total, self.done, self.closed = total, 0, False
                made.append(self)

            def update(self, count):
                self.done += count

            def close(self):
                self.closed = True

        self.llm.generate([[5], [6, 7]], SamplingParams(n=2, max_tokens=3), use_tqdm=Bar)
        self.assertEqual([(bar.total, bar.done, bar.closed) for bar in made], [(2, 2, True)])
        with self.assertRaises(NestedFPError):
            self.llm.generate([[5]], SamplingParams(top_p=2), use_tqdm=Bar)
        self.assertTrue(made[1].closed)
        try:
            with patch.object(Bar, "update", side_effect=KeyError):
                self.llm.generate([[5], [6, 7]], [GREEDY, replace(GREEDY, max_tokens=100)], use_tqdm=Bar)
        except KeyError as error:
            kept = error
        self.assertTrue(made.pop().closed)
        self.llm.generate([[5]], GREEDY, use_tqdm=False)
        self.assertEqual(self.llm._open, {}, kept)  # nobody waits for the long one, while somebody keeps the frames
        tqdm = types.SimpleNamespace(auto=types.SimpleNamespace(tqdm=Bar))
        with patch.dict(sys.modules, {"tqdm": tqdm, "tqdm.auto": tqdm.auto}):
            self.llm.generate([[5]], GREEDY)
            self.assertEqual(len(made), 3)
            self.llm.generate([[5]], GREEDY, use_tqdm=False)
            self.assertEqual(len(made), 3)
        with patch.dict(sys.modules, {"tqdm": None}):
            self.llm.generate([[5]], GREEDY, use_tqdm=True)

    def test_a_closed_model_says_so(self):
        llm = LLM(TINY, device="cpu", threads=1, max_model_len=64)
        llm.close()
        with self.assertRaisesRegex(NestedFPError, "closed"):
            llm.generate([[5]], GREEDY)
        llm.close()

    def in_a_process(self, code):
        """What it prints; one that dies or hangs is a failure. It has an `llm`, and `ask(tokens)` for an answer."""
        begin = ("import gc, os, threading, time\nfrom nestedfp import LLM, NestedFPError, SamplingParams\n"
                 f"llm_path = {str(TINY)!r}\nllm = LLM(llm_path, device='cpu', threads=1, max_model_len=128)\n"
                 "def ask(tokens):\n    some = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)\n"
                 "    return len(llm.generate([[5, 6, 7]], some)[0].outputs[0].token_ids)\n")
        done = subprocess.run([sys.executable, "-c", begin + textwrap.dedent(code)], capture_output=True, text=True,
                              timeout=60)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout.splitlines()

    def test_closing_waits_for_the_calls_of_other_threads(self):
        class Slow:
            """The library, in which one function takes long."""

            def __init__(self, library, slow):
                self.library, self.slow, self.inside, self.ended = library, slow, threading.Event(), []

            def __getattr__(self, name):
                def call(*arguments):
                    result = getattr(self.library, name)(*arguments)
                    if name == self.slow:
                        self.inside.set()
                        time.sleep(0.1)
                    if name in (self.slow, "nfp_engine_close"):
                        self.ended.append(name)
                    return result

                return call

        def work(call):
            with self.assertRaisesRegex(NestedFPError, "the model was closed"):
                while True:
                    call()

        for name, call in (("step", lambda: llm.generate([[5, 6]], GREEDY)), ("info", lambda: llm.info),
                           ("encode", lambda: llm.encode("ab")), ("decode", lambda: llm.decode([5]))):
            llm = LLM(TINY, device="cpu", threads=1, max_model_len=64)
            library = llm._engine._library = Slow(llm._engine._library, f"nfp_engine_{name}")
            with ThreadPoolExecutor() as threads:
                worker = threads.submit(work, call)
                library.inside.wait()
                llm.close()
                worker.result()
            self.assertEqual(library.ended[-1], "nfp_engine_close")

    def test_streams_that_the_garbage_collector_ends(self):
        """Inside a step, where this thread has the lock."""
        said = self.in_a_process("""
            gc.disable()
            stream = llm.stream([5, 6, 7], SamplingParams(max_tokens=100, ignore_eos=True))
            next(stream)
            circle = [stream]
            circle.append(circle)
            del stream, circle
            step = llm._engine.step

            def collected():
                gc.collect()
                return step()

            llm._engine.step = collected
            print(ask(4), ask(4), llm._open, llm._engine.step()["outputs"])
        """)
        self.assertEqual(said, ["4 4 {} []"])

    def test_signals_whose_handlers_raise(self):
        """Anywhere in a call, as KeyboardInterrupt does: other calls miss nothing, and nothing of this one is left."""
        said = self.in_a_process("""
            import random, signal

            class Alarm(BaseException):
                pass

            def ring(*_):
                raise Alarm

            signal.signal(signal.SIGALRM, ring)
            many = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
            expected = llm.generate([[5, 6, 7]], many)[0].outputs[0].token_ids
            random.seed(1)
            rung = 0
            for _ in range(60):
                stream = llm.stream([5, 6, 7], many)
                next(stream)
                for _ in range(5):
                    try:
                        signal.setitimer(signal.ITIMER_REAL, random.uniform(0.0002, 0.003), 1)
                        while True:
                            llm.generate([[8, 9], [9, 10]], many, use_tqdm=False)
                    except Alarm:
                        signal.setitimer(signal.ITIMER_REAL, 0)
                        rung += 1
                *_, output = stream
                assert output.outputs[0].token_ids == expected, output
            print(rung, ask(4), llm._open, llm._engine.step()["outputs"])
        """)
        self.assertEqual(said, ["300 4 {} []"])

    def test_a_signal_handler_that_closes_the_model(self):
        said = self.in_a_process("""
            import signal

            signal.signal(signal.SIGALRM, lambda *_: llm.close())
            for i in range(30):
                signal.setitimer(signal.ITIMER_REAL, 0.001 + i * 3e-5)
                try:
                    while True:
                        ask(100)
                except NestedFPError as error:
                    assert "closed" in str(error) or "null" in str(error), error
                llm = LLM(llm_path, device="cpu", threads=1, max_model_len=128)
            print(ask(4))
        """)
        self.assertEqual(said, ["4"])

    def test_a_model_is_not_sent_to_another_process(self):
        with self.assertRaisesRegex(TypeError, "cannot be sent to another process: .*load the model there"):
            pickle.dumps(self.llm)
        for copied in (copy.copy(self.llm), copy.deepcopy({"llm": self.llm})["llm"]):
            self.assertIs(copied, self.llm)
        self.assertEqual(pickle.loads(pickle.dumps(GREEDY)), GREEDY)

    def test_a_fork_has_no_model(self):
        said = self.in_a_process("""
            ask(4)
            stream = llm.stream([5, 6, 7], SamplingParams(max_tokens=100, ignore_eos=True))
            next(stream)
            llm._lock.acquire()  # as by another thread, in the middle of a step
            llm._engine._lock.acquire()
            child = os.fork()
            if child == 0:
                for call in (lambda: ask(4), lambda: llm.info, lambda: llm.decode([5]), lambda: next(stream)):
                    try:
                        call()
                    except NestedFPError as error:
                        print(error.code, str(os.getppid()) in str(error), "fork" in str(error), flush=True)
                llm.close()
                del stream, llm
                os._exit(0)
            end = time.monotonic() + 20
            while os.waitpid(child, os.WNOHANG) == (0, 0):
                if time.monotonic() > end:
                    os.kill(child, 9)
                time.sleep(0.01)
            llm._engine._lock.release()
            llm._lock.release()
            print(ask(4))
        """)
        self.assertEqual(said, ["6 True True"] * 4 + ["4"])

    def test_text_with_a_zero_in_it(self):
        for text in ("a\0b", "\0", "a\0"):
            self.assertEqual(self.llm.decode(self.llm.encode(text)), text)

    def test_it_is_what_the_program_says(self):
        answer = self.llm.generate("ab ba", GREEDY)[0].outputs[0].text
        program = Path(sys.executable).parent / "nestedfp"
        done = subprocess.run([program, "generate", TINY, "-p", "ab ba", "-n", "12", "--ignore-eos", "--device", "cpu",
                               "--temperature", "0", "-q"], capture_output=True, text=True, check=True)
        self.assertEqual(done.stdout.rstrip("\n"), ("ab ba" if done.stdout.startswith("ab ba") else "") + answer)


@unittest.skipUnless(DEMO and os.path.exists(DEMO), "NFP_DEMO_MODEL does not name the demo model")
class DemoModel(unittest.TestCase):
    def test_the_lines_of_the_readme(self):
        """README.md's and the wheel's, as they are written there."""
        if not SOURCE.name:
            self.skipTest("NFP_SOURCE does not name the sources")
        for readme in (SOURCE / "README.md", SOURCE / "python" / "README.md"):
            lines = readme.read_text().split("\n")
            begin = lines.index("    import nestedfp, numpy as np")
            end = next(i for i in range(begin, len(lines)) if lines[i] and not lines[i].startswith("    "))
            code, before = textwrap.dedent("\n".join(lines[begin:end])), os.getcwd()
            with tempfile.TemporaryDirectory() as folder, redirect_stdout(StringIO()) as said:
                os.symlink(DEMO, Path(folder) / "model.gguf")
                os.chdir(folder)
                try:
                    exec(compile(code, str(readme), "exec"), {})
                finally:
                    os.chdir(before)
            self.assertIn("Paris", said.getvalue(), readme)

    def test_the_same_and_a_chat(self):
        with LLM(DEMO, "threshold:512", device="cpu", threads=1, max_model_len=256) as llm:
            text = llm.generate("The capital of France is", SamplingParams(temperature=0))[0].outputs[0].text
            self.assertIn("Paris", text)
            answer = llm.chat([{"role": "user", "content": "What is the capital of France?"}],
                              SamplingParams(temperature=0, max_tokens=24), use_tqdm=False)[0].outputs[0]
            self.assertIn("Paris", answer.text)
            self.assertEqual(llm.decode(llm.encode("Hello, world")), "Hello, world")


class Package(unittest.TestCase):
    def test_it_is_the_installed_one(self):
        self.assertIn("site-packages", nestedfp.__file__)

    def test_the_entry_point_of_vllm(self):
        from importlib.metadata import entry_points

        self.assertIn("nestedfp.vllm:register", [e.value for e in entry_points(group="vllm.general_plugins")])

    def test_the_program(self):
        program = Path(sys.executable).parent / "nestedfp"
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run([program, "--version"], capture_output=True, text=True, check=True, cwd=folder)
        from importlib.metadata import version

        self.assertEqual(done.stdout.strip(), version("nestedfp"))

    def test_the_program_ends_with_a_broken_pipe(self):
        reader, writer = os.pipe()
        os.close(reader)
        with open(writer, "wb") as broken:
            done = subprocess.run([Path(sys.executable).parent / "nestedfp", "--help"], stdout=broken,
                                  stderr=subprocess.PIPE, text=True)
        self.assertEqual((done.returncode, done.stderr), (-signal.SIGPIPE, ""))


if __name__ == "__main__":
    unittest.main()
