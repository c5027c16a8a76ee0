"""vLLM engines over tiny models, with and without nestedfp, on a Hopper GPU. Skips elsewhere.

NESTEDFP_NESTED_MODELS names a folder with NAME and NAME-nested (what `nestedfp convert` made of NAME) for each family
of make_models.py; NESTEDFP_TEST_OUT a folder that keeps reports and logs; NESTEDFP_TEST_JOBS how many engines run at
once, NESTEDFP_TEST_SECONDS how long each may; NESTEDFP_TEST_ONLY which (their names with commas)."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import unittest
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

try:
    import torch
    import vllm  # noqa: F401

    HAVE_GPU = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
except ImportError:
    HAVE_GPU = False

MODELS = Path(os.environ.get("NESTEDFP_NESTED_MODELS", ""))
HERE = Path(__file__).parent
SECONDS = float(os.environ.get("NESTEDFP_TEST_SECONDS", "220"))  # for one engine, from its start to its end

ORDINARY = ["--quantization", "nestedfp"]
PER_STEP = [*ORDINARY, "--per-step", "--policy", "alternate:1", "--steps", "1200"]
BF16 = ["--dtype", "bfloat16", "--eager", "--attention", "TRITON_ATTN"]  # which every build of vLLM has for BF16
# name: model, arguments, vLLM's model runner (1: the second; None: as vLLM chooses)
RUNS = {
    "llama stock fp16": ("llama", ["--eager"], None),
    "llama fp16": ("llama", [*ORDINARY, "--policy", "fp16"], 1),
    "llama fp8": ("llama", [*ORDINARY, "--policy", "fp8"], 1),
    "llama nested fp16": ("llama-nested", ["--policy", "fp16"], 1),
    "llama nested fp8": ("llama-nested", ["--policy", "fp8", "--eager"], 1),
    "llama nested stock fp8": ("llama-nested", ["--quantization", "compressed-tensors", "--eager"], None),
    "llama alternate": ("llama", PER_STEP, 1),
    "llama v1 fp16": ("llama", [*ORDINARY, "--policy", "fp16", "--eager"], 0),
    "llama v1 fp8": ("llama", [*ORDINARY, "--policy", "fp8", "--eager"], 0),
    "llama v1 alternate": ("llama", PER_STEP, 0),
    "qwen2 stock fp16": ("qwen2", ["--eager"], None),
    "qwen2 fp16": ("qwen2", [*ORDINARY, "--policy", "fp16"], None),
    "qwen2 stock bf16": ("qwen2", BF16, None),
    "qwen2 bf16": ("qwen2", [*ORDINARY, "--policy", "fp16", *BF16], None),
    "qwen3 stock fp16": ("qwen3", ["--eager"], None),
    "qwen3 fp16": ("qwen3", [*ORDINARY, "--policy", "fp16"], 1),
    "qwen3 stock bf16": ("qwen3", BF16, None),
    "qwen3 bf16": ("qwen3", [*ORDINARY, "--policy", "fp16", "--dtype", "bfloat16"], None),
    "qwen2 nested bf16 refused": ("qwen2-nested", ["--policy", "fp16", "--dtype", "bfloat16"], None),
    "mistral stock fp16": ("mistral", ["--eager"], None),
    "mistral nested fp16": ("mistral-nested", ["--policy", "threshold:512"], None),
}
RUNS.update({
    "llama lora stock fp16": ("llama", ["--eager", "--lora", "llama-lora"], None),
    "llama lora fp16": ("llama", [*ORDINARY, "--policy", "fp16", "--lora", "llama-lora"], None),
    "llama lora alternate": ("llama", [*PER_STEP, "--lora", "llama-lora"], None),
    "llama speculative fp16": ("llama", [*ORDINARY, "--policy", "fp16", "--speculate"], None),
    "llama speculative alternate": ("llama", [*PER_STEP, "--speculate"], None),
    "llama drafted fp16": ("llama", [*ORDINARY, "--policy", "fp16", "--draft", "llama-draft"], 0),
})
# Mixtures of experts. What stock vLLM runs them with needs Triton and a C compiler.
MIXTURES = ("qwen3_moe", "qwen2_moe", "mixtral")
for family in MIXTURES:
    RUNS.update({
        f"{family} stock fp16": (family, ["--eager"], None),
        f"{family} fp16": (family, [*ORDINARY, "--policy", "fp16"], 1),
        f"{family} fp8": (family, [*ORDINARY, "--policy", "fp8"], 1),
        f"{family} nested fp16": (f"{family}-nested", ["--policy", "fp16", "--eager"], 1),
        f"{family} nested fp8": (f"{family}-nested", ["--policy", "fp8", "--eager"], 1),
    })
RUNS.update({
    "qwen3_moe alternate": ("qwen3_moe", PER_STEP, 1),
    "qwen3_moe v1 alternate": ("qwen3_moe", PER_STEP, 0),
    "qwen3_moe stock bf16": ("qwen3_moe", BF16, None),
    "qwen3_moe bf16": ("qwen3_moe", [*ORDINARY, "--policy", "fp16", *BF16], None),
})
# Started with other weights of these shapes; then the model's are read into what graphs were captured of. Qwen2 has biases.
RUNS.update({
    "qwen2 reloaded fp16": ("qwen2", [*ORDINARY, "--policy", "fp16", "--start-with", "qwen2-other"], None),
    "qwen2 nested reloaded fp16": ("qwen2-nested", ["--policy", "fp16", "--start-with", "qwen2-other-nested"], None),
    "qwen2 slept fp16": ("qwen2", [*ORDINARY, "--policy", "fp16", "--start-with", "qwen2-other", "--sleep"], None),
    "qwen3_moe reloaded fp16": ("qwen3_moe", [*ORDINARY, "--policy", "fp16", "--start-with", "qwen3_moe-other"], 1),
    "qwen3_moe nested reloaded fp16": ("qwen3_moe-nested", ["--policy", "fp16", "--start-with", "qwen3_moe-other-nested"], 1),
    "qwen3_moe slept fp16": ("qwen3_moe", [*ORDINARY, "--policy", "fp16", "--start-with", "qwen3_moe-other", "--sleep"], 1),
})
MODEL_ARGUMENT = re.compile(r".*-(lora|draft|other|other-nested)$")
TWO = ["--tensor-parallel", "2"]
WIDE = {
    "llama stock fp16 tp2": ("llama", ["--eager", *TWO], None),
    "llama fp16 tp2": ("llama", [*ORDINARY, "--policy", "fp16", *TWO], None),
    "llama nested fp16 tp2": ("llama-nested", ["--policy", "fp16", *TWO], None),
    "qwen2 fp16 tp2": ("qwen2", [*ORDINARY, "--policy", "fp16", "--eager", *TWO], None),
    "llama alternate tp2": ("llama", [*PER_STEP, *TWO, "--steps", "10000"], 1),
    "llama v1 alternate tp2": ("llama", [*PER_STEP, *TWO, "--steps", "1000"], 0),
    "qwen3_moe fp16 tp2": ("qwen3_moe", [*ORDINARY, "--policy", "fp16", *TWO], None),
    "qwen3_moe nested fp16 tp2": ("qwen3_moe-nested", ["--policy", "fp16", "--eager", *TWO], None),
    "qwen3_moe fp16 ep2": ("qwen3_moe", [*ORDINARY, "--policy", "fp16", *TWO, "--expert-parallel"], None),
    "qwen2_moe fp16 tp2": ("qwen2_moe", [*ORDINARY, "--policy", "fp16", "--eager", *TWO], None),
    "qwen2_moe fp16 ep2": ("qwen2_moe", [*ORDINARY, "--policy", "fp16", "--eager", *TWO, "--expert-parallel"], None),
    "mixtral fp16 tp2": ("mixtral", [*ORDINARY, "--policy", "fp16", "--eager", *TWO], None),
    "qwen3_moe alternate tp2": ("qwen3_moe", [*PER_STEP, *TWO, "--steps", "2000"], 1),
    "qwen3_moe alternate ep2": ("qwen3_moe", [*PER_STEP, *TWO, "--expert-parallel", "--steps", "2000"], 1),
    "llama fp16 pp2": ("llama", [*ORDINARY, "--policy", "fp16", "--eager", "--pipeline-parallel", "2"], None),
}
FOUR = ["--tensor-parallel", "4"]
WIDEST = {
    "llama fp16 tp4": ("llama", [*ORDINARY, "--policy", "fp16", *FOUR], None),
    "llama alternate tp4": ("llama", [*PER_STEP, *FOUR, "--steps", "2000"], 1),
}


@unittest.skipUnless(HAVE_GPU and MODELS.name, "needs vLLM, a Hopper GPU and NESTEDFP_NESTED_MODELS")
class Serving(unittest.TestCase):
    reports: dict = {}
    logs: dict = {}

    @classmethod
    def setUpClass(cls):
        cls.folder = folder = Path(os.environ.get("NESTEDFP_TEST_OUT") or tempfile.mkdtemp())

        def run(item):
            place, (name, (model, arguments, runner)) = item
            environment = dict(os.environ)
            environment["VLLM_PORT"] = str(20000 + 50 * place)  # or two engines may find the same port free
            if runner is not None:
                environment["VLLM_USE_V2_MODEL_RUNNER"] = str(runner)
            out = folder / f"{name.replace(' ', '-')}.json"
            environment["NESTEDFP_MODE_LOG"] = str(out.with_suffix(".modes"))
            arguments = [str(MODELS / a) if MODEL_ARGUMENT.match(a) and not a.startswith("-") else a for a in arguments]
            command = [sys.executable, str(HERE / "serve_once.py"), str(MODELS / model), str(out), *arguments]
            log = out.with_suffix(".log")
            with log.open("w") as sink:
                engine = subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT, env=environment,
                                          start_new_session=True)
                try:
                    engine.wait(SECONDS)
                except subprocess.TimeoutExpired:
                    os.killpg(engine.pid, signal.SIGKILL)  # with its workers
                    sink.write(f"stopped after {SECONDS} s\n")
            return name, json.loads(out.read_text()) if out.exists() else None, log.read_text()

        devices = torch.cuda.device_count()
        runs = {**(WIDEST if devices >= 4 else {}), **(WIDE if devices >= 2 else {}), **RUNS}
        only = os.environ.get("NESTEDFP_TEST_ONLY", "").split(",")
        runs = {name: run for name, run in runs.items() if not only[0] or name in only}
        with ThreadPoolExecutor(int(os.environ.get("NESTEDFP_TEST_JOBS", "12"))) as pool:
            for name, report, log in pool.map(run, enumerate(runs.items())):
                cls.reports[name], cls.logs[name] = report, log

    def report(self, name):
        if name not in self.logs:
            self.skipTest(f"{name} was left out")
        if self.reports[name] is None:
            self.fail(f"{name} did not run:\n" + "\n".join(self.logs[name].splitlines()[-25:]))
        return self.reports[name]

    def distance(self, one, other):
        """Largest and root-mean-square difference of the log-probabilities of all prompts' tokens."""
        differences = [a - b for x, y in zip(one, other) for a, b in zip(x, y)]
        rms = (sum(d * d for d in differences) / len(differences)) ** 0.5
        return max(abs(d) for d in differences), rms

    def assert_close(self, one, other, rms_limit, key="prompts", other_key="prompts"):
        largest, rms = self.distance(self.report(one)[key], self.report(other)[other_key])
        print(f"{one} [{key}] against {other}: largest difference {largest:.5f}, rms {rms:.5f}", flush=True)
        self.assertLess(rms, rms_limit)

    def test_fp16_is_vllm_s_fp16(self):
        for family in ("llama", "qwen2", "qwen3"):
            self.assert_close(f"{family} fp16", f"{family} stock fp16", 5e-3)
        for family in ("qwen2", "qwen3"):
            self.assert_close(f"{family} bf16", f"{family} stock bf16", 5e-2)  # 8 bits: 2^-9 of logits up to 10

    def test_attention_rotates(self):
        for name, layers in (("llama fp16", "3"), ("llama v1 alternate", "3"), ("mistral nested fp16", "3"),
                             ("qwen2 slept fp16", "3"), ("qwen3 fp16", "3"), ("qwen3 bf16", "3"), ("qwen3_moe fp16", "3"),
                             ("llama speculative fp16", "3"), ("llama drafted fp16", "3"), ("qwen2 bf16", None)):
            if name in self.logs:
                said = re.findall(r"nestedfp: attention rotates in (\d+) layers", self.logs[name])
                self.assertEqual(said, [layers] if layers else [], name)

    def test_nested_checkpoints_are_their_source(self):
        self.assert_close("llama nested fp16", "llama stock fp16", 5e-3)
        self.assert_close("mistral nested fp16", "mistral stock fp16", 5e-3)
        self.assert_close("llama nested fp16", "llama fp16", 2e-3)
        self.assert_close("llama nested fp8", "llama fp8", self.fp8_noise())

    def test_mixtures(self):
        """Their experts nested: FP16 mode is vLLM's FP16, FP8 mode differs by what E4M3 weights do, and nested checkpoints
        are their source."""
        for family in MIXTURES:
            self.assert_close(f"{family} fp16", f"{family} stock fp16", 5e-3)
            self.assert_close(f"{family} nested fp16", f"{family} stock fp16", 5e-3)
            noise = self.distance(self.report(f"{family} fp8")["prompts"], self.report(f"{family} fp16")["prompts"])[1]
            print(f"{family}: FP8 against FP16: rms {noise:.5f}", flush=True)
            self.assertGreater(noise, 5e-3)
            self.assert_close(f"{family} nested fp8", f"{family} fp8", noise)
            for name in (f"{family} fp16", f"{family} nested fp16"):
                self.assertNotRegex(self.logs[name], r"nestedfp: \S*experts\S* stays dense")
        self.assert_close("qwen3_moe bf16", "qwen3_moe stock bf16", 5e-2)

    def fp8_noise(self):
        """What rounding to E4M3 does to these models. Engines whose norms Inductor compiled in another way differ in
        some last bits before that rounding, and so by a part of this after it."""
        return self.distance(self.report("llama fp8")["prompts"], self.report("llama stock fp16")["prompts"])[1]

    def test_fp8_is_vllm_s_fp8_on_the_same_uppers(self):
        self.assertGreater(self.fp8_noise(), 5e-3)  # or it was not FP8
        self.assert_close("llama nested fp8", "llama nested stock fp8", self.fp8_noise())

    def test_alternating_steps_are_one_or_the_other(self):
        """Bit for bit those of the same engine's FP16 and FP8 steps."""
        for kind in ("llama alternate", "llama v1 alternate", "qwen3_moe alternate", "qwen3_moe v1 alternate"):
            report = self.report(kind)
            seen = [("fp16" if auto == exact else "fp8" if auto == fast else "neither") for auto, exact, fast in
                    zip(report["prompts"], report["exact"], report["fast"])]
            print(f"{kind}: {seen}", flush=True)
            self.assertEqual(set(seen), {"fp16", "fp8"})

    def test_requests_choose(self):
        for kind in ("llama", "llama v1"):
            self.assert_close(f"{kind} alternate", f"{kind} fp16", 2e-3, key="exact")
            self.assert_close(f"{kind} alternate", f"{kind} fp8", self.fp8_noise(), key="fast")
            self.assertGreater(self.distance(self.report(f"{kind} alternate")["fast"],
                                             self.report(f"{kind} fp16")["prompts"])[1], self.fp8_noise() / 2)

    def test_decode_steps_in_graphs_are_their_prompts(self):
        for name in self.logs:
            if name.endswith("refused"):
                continue
            worst = self.report(name)["decode_vs_prompt"]
            print(f"{name}: decode against prompt {worst:.5f}, started in {self.report(name)['start_s']:.1f} s, "
                  f"{self.report(name)['cudagraph_mode']}", flush=True)
            self.assertLess(worst, 0.5 if "fp8" in name or "bf16" in name else 0.05)

    def test_serving_makes_nothing_new(self):
        """No graph, no compiled piece, no allocation from the driver in hundreds of steps of both precisions."""
        for name in ("llama alternate", "llama v1 alternate", "llama alternate tp2", "llama v1 alternate tp2",
                     "llama alternate tp4", "qwen3_moe alternate", "qwen3_moe v1 alternate", "qwen3_moe alternate tp2",
                     "qwen3_moe alternate ep2"):
            if name in self.logs:
                before, after = self.report(name)["activity"]
                print(f"{name}: {after}", flush=True)
                self.assertTrue(all(rank["captured"] > 0 for rank in before), before)
                self.assertEqual(before, after)

    def test_the_log_says_what_a_start_took(self):
        for name in ("llama alternate", "llama v1 alternate"):
            self.report(name)
            for line in (r"of loading the model: kernels [\d.]+ s, nesting", "capturing the second set of graphs took"):
                said = re.findall(f"nestedfp: {line}.*", self.logs[name])
                print(f"{name}: {said}", flush=True)
                self.assertEqual(len(said), 1)

    def test_fp16_weights_are_refused_with_bf16_activations(self):
        if "qwen2 nested bf16 refused" not in self.logs:
            self.skipTest("left out")
        self.assertIsNone(self.reports["qwen2 nested bf16 refused"])
        self.assertIn("--dtype float16", self.logs["qwen2 nested bf16 refused"])

    def test_weights_that_are_read_again(self):
        """Into an engine of other weights: by steps without graphs here, in graphs where decode steps are compared."""
        for family in ("qwen2", "qwen3_moe"):
            for kind in ("reloaded", "nested reloaded"):
                self.assert_close(f"{family} {kind} fp16", f"{family} fp16", 5e-3)

    def test_weights_that_are_read_again_after_a_sleep(self):
        """Of level 2, which keeps nothing: the products' workspace neither."""
        for family in ("qwen2", "qwen3_moe"):
            self.assert_close(f"{family} slept fp16", f"{family} fp16", 5e-3)

    def test_adapters_and_drafts(self):
        """LoRA over nested weights is LoRA over FP16's; drafted tokens are checked in the step's precision."""
        self.assert_close("llama lora fp16", "llama lora stock fp16", 5e-3)
        self.assert_close("llama lora alternate", "llama lora stock fp16", 5e-3, key="exact")
        self.assertGreater(self.distance(self.report("llama lora fp16")["prompts"], self.report("llama fp16")["prompts"])[1],
                           0.05)  # or the adapter did nothing
        self.assert_close("llama drafted fp16", "llama fp16", 2e-3)
        for name in ("llama speculative fp16", "llama speculative alternate", "llama drafted fp16"):
            metrics = self.report(name)["metrics"]
            drafted, accepted = (sum(value for key, value in metrics.items() if f"num_{what}_tokens[" in key)
                                 for what in ("draft", "accepted"))
            print(f"{name}: {accepted} of {drafted} drafted tokens accepted", flush=True)
            self.assertGreater(drafted, accepted)
            self.assertGreater(accepted, 5)  # these models soon repeat themselves

    @unittest.skipUnless(HAVE_GPU and torch.cuda.device_count() >= 2, "needs two GPUs")
    def test_two_gpus_answer_as_one(self):
        for kind in ("llama", "llama nested", "qwen2"):
            self.assert_close(f"{kind} fp16 tp2", f"{kind} fp16", 5e-3)
        self.assert_close("llama fp16 tp2", "llama stock fp16 tp2", 5e-3)
        for name in ("llama fp16 tp2", "llama v1 alternate tp2", "qwen3_moe fp16 tp2"):
            if name in self.logs:
                self.assertEqual(self.logs[name].count("norms make the sums over 2 GPUs"), 2, name)  # on both
        self.assert_close("llama fp16 pp2", "llama fp16", 5e-3)
        for kind in ("llama", "llama v1"):
            self.assert_close(f"{kind} alternate tp2", f"{kind} fp16", 5e-3, key="exact")
            self.assert_close(f"{kind} alternate tp2", f"{kind} fp8", self.fp8_noise(), key="fast")

    @unittest.skipUnless(HAVE_GPU and torch.cuda.device_count() >= 4, "needs four GPUs")
    def test_four_gpus_answer_as_one(self):
        self.assert_close("llama fp16 tp4", "llama fp16", 5e-3)
        for name in ("llama fp16 tp4", "llama alternate tp4"):
            if name in self.logs:
                self.assertEqual(self.logs[name].count("norms make the sums over 4 GPUs"), 4, name)  # on all
        self.assert_close("llama alternate tp4", "llama fp16", 5e-3, key="exact")
        self.assert_close("llama alternate tp4", "llama fp8", self.fp8_noise(), key="fast")

    @unittest.skipUnless(HAVE_GPU and torch.cuda.device_count() >= 2, "needs two GPUs")
    def test_mixtures_on_two_gpus(self):
        """Experts cut, and experts whole on one GPU or the other."""
        for name in WIDE:
            family, _, kind = name.partition(" ")
            if family in MIXTURES and kind in ("fp16 tp2", "nested fp16 tp2", "fp16 ep2"):
                self.assert_close(name, f"{family} fp16", 5e-3)
        noise = self.distance(self.report("qwen3_moe fp8")["prompts"], self.report("qwen3_moe fp16")["prompts"])[1]
        for kind in ("tp2", "ep2"):
            self.assert_close(f"qwen3_moe alternate {kind}", "qwen3_moe fp16", 5e-3, key="exact")
            self.assert_close(f"qwen3_moe alternate {kind}", "qwen3_moe fp8", noise, key="fast")

    @unittest.skipUnless(HAVE_GPU and torch.cuda.device_count() >= 2, "needs two GPUs")
    def test_all_ranks_have_one_precision(self):
        for name, steps in (("llama alternate tp2", 10000), ("llama v1 alternate tp2", 1000),
                            ("qwen3_moe alternate tp2", 2000), ("qwen3_moe alternate ep2", 2000)):
            with self.subTest(name):
                self.report(name)
                logs = [(self.folder / f"{name.replace(' ', '-')}.modes.{rank}").read_bytes() for rank in (0, 1)]
                print(f"{name}: {len(logs[0])} steps, {sum(logs[0])} in FP8", flush=True)
                self.assertGreaterEqual(len(logs[0]), steps)
                self.assertEqual(logs[0], logs[1])
                self.assertEqual(set(logs[0]), {0, 1})


if __name__ == "__main__":
    unittest.main(verbosity=1)
