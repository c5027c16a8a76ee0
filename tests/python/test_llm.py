"""nestedfp.LLM over a tiny model on the CPU, and over the demo model where NFP_DEMO_MODEL names it."""

import os
import subprocess
import sys
import tempfile
import threading
import unittest
from pathlib import Path

import numpy as np

import nestedfp
from nestedfp import LLM, NestedFPError, SamplingParams

TINY = Path(os.environ.get("NFP_TINY_MODELS", "")) / "llama-tied"
DEMO = os.environ.get("NFP_DEMO_MODEL", "")
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

    def test_more_prompts_than_fit_in_a_step(self):
        prompts = [[3 + i, 4 + i, 5] for i in range(30)]
        together = self.llm.generate(prompts, GREEDY)
        self.assertEqual([o.prompt_token_ids for o in together], prompts)
        for i in (0, 17, 29):
            self.assertEqual(self.llm.generate([prompts[i]], GREEDY)[0].outputs[0].token_ids,
                             together[i].outputs[0].token_ids)

    def test_parameters_of_each_prompt(self):
        many = [SamplingParams(temperature=0.9, seed=seed, max_tokens=8, ignore_eos=True, top_k=-1) for seed in (1, 2, 1)]
        a, b, c = (o.outputs[0].token_ids for o in self.llm.generate([[5, 6]] * 3, many))
        self.assertEqual(a, c)
        self.assertNotEqual(a, b)
        with self.assertRaisesRegex(ValueError, "2 prompts and 1"):
            self.llm.generate([[5], [6]], [GREEDY])

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

    def test_errors_name_what_is_wrong(self):
        for parameters, field in ((SamplingParams(temperature=-1), "temperature"), (SamplingParams(top_p=2), "top_p"),
                                  (SamplingParams(precision="best"), "precision"),
                                  (SamplingParams(max_tokens=0), "max_tokens")):
            with self.assertRaisesRegex(NestedFPError, field):
                self.llm.generate([[5]], parameters)
        with self.assertRaisesRegex(NestedFPError, "prompt"):
            self.llm.generate([[1 << 30]], GREEDY)
        self.assertEqual(len(self.llm.generate([[5]], GREEDY)), 1)  # nothing of these is left behind
        with self.assertRaisesRegex(NestedFPError, "no such file"):
            LLM("/nonexistent")
        with self.assertRaisesRegex(NestedFPError, "'colour' is unknown"):
            LLM(TINY, colour="red")
        with self.assertRaisesRegex(NestedFPError, "precision policy 'never'"):
            LLM(TINY, "never", device="cpu")
        with self.assertRaisesRegex(NestedFPError, "gemm-choices.*choices.json.*cpu"):
            LLM(TINY, device="cpu", gemm_choices="choices.json")
        with self.assertRaisesRegex(NestedFPError, "max_model_len: a context of 1000000 tokens"):
            LLM(TINY, device="cpu", max_model_len=1000000)
        for share in (0, 5, float("nan")):
            with self.assertRaisesRegex(NestedFPError, "'gpu_memory_utilization'"):
                LLM(TINY, device="cpu", gpu_memory_utilization=share)

    def test_errors_name_what_json_has_not(self):
        for field, value in (("temperature", float("nan")), ("top_p", float("inf")), ("logit_bias", {5: float("nan")}),
                             ("stop", ["\udcff"]), ("seed", object())):
            with self.assertRaisesRegex(NestedFPError, f"field '{field}'"):
                self.llm.generate([[5]], SamplingParams(**{field: value}))

    def test_token_ids_of_arrays(self):
        expected = self.llm.generate([[5, 6, 7]], GREEDY)[0].outputs[0].token_ids
        array = np.array([5, 6, 7])
        for prompts in (array, [array], array[None], list(array), (5, 6, 7), {"prompt_token_ids": array}):
            self.assertEqual(self.llm.generate(prompts, GREEDY)[0].outputs[0].token_ids, expected)
        self.assertEqual(self.llm.decode(array), self.llm.decode([5, 6, 7]))

    def test_prompts_that_are_none(self):
        for prompts in (b"ab", [b"ab"], [1.5], [["a", "b"]], None, {"prompt": 5}, {"prompt_token_ids": "ab"}, {"text": "a"}):
            with self.assertRaises(TypeError, msg=repr(prompts)):
                self.llm.generate(prompts, GREEDY)

    def test_a_closed_model_says_so(self):
        llm = LLM(TINY, device="cpu", threads=1, max_model_len=64)
        llm.close()
        with self.assertRaisesRegex(NestedFPError, "closed"):
            llm.generate([[5]], GREEDY)

    def test_it_is_what_the_program_says(self):
        answer = self.llm.generate("ab ba", GREEDY)[0].outputs[0].text
        program = Path(sys.executable).parent / "nestedfp"
        done = subprocess.run([program, "generate", TINY, "-p", "ab ba", "-n", "12", "--ignore-eos", "--device", "cpu",
                               "--temperature", "0", "-q"], capture_output=True, text=True, check=True)
        self.assertEqual(done.stdout.rstrip("\n"), ("ab ba" if done.stdout.startswith("ab ba") else "") + answer)


@unittest.skipUnless(DEMO and os.path.exists(DEMO), "NFP_DEMO_MODEL does not name the demo model")
class DemoModel(unittest.TestCase):
    def test_the_lines_of_the_readme(self):
        with LLM(DEMO, "threshold:512", device="cpu", threads=1, max_model_len=256) as llm:
            text = llm.generate("The capital of France is", SamplingParams(temperature=0))[0].outputs[0].text
            self.assertIn("Paris", text)
            answer = llm.chat([{"role": "user", "content": "What is the capital of France?"}],
                              SamplingParams(temperature=0, max_tokens=24))[0].outputs[0]
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


if __name__ == "__main__":
    unittest.main()
