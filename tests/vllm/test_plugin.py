"""What of the plugin needs no GPU, and of it what needs no vLLM either."""

import importlib
import inspect
import json
import logging
import os
import random
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
from nestedfp import _library
from nestedfp.vllm import assembler, checkpoint, versions
from nestedfp.vllm.policy import Policy, precision_of_step, tier_of
from nestedfp.vllm.settings import Settings
from nestedfp.vllm.targets import Clock, StepTimes, Target, Wanted, milliseconds

try:
    import torch
    import vllm  # noqa: F401

    HAVE_VLLM = True
except ImportError:
    HAVE_VLLM = False

HERE = Path(__file__).parent


def nested_model(folder: Path, family: str) -> Path:
    """A model of make_models.py and, beside it, what `nestedfp convert` makes of it."""
    sys.path.insert(0, str(HERE))
    import make_models

    make_models.write(folder / family, family)
    program = Path(sys.executable).parent / "nestedfp"
    subprocess.run([program, "convert", folder / family, folder / f"{family}-nested", "--calibrate", "none"], check=True,
                   stdout=subprocess.DEVNULL)
    return folder / f"{family}-nested"


def tensors(path: Path) -> dict:
    """Of one safetensors file: name -> array (bytes for FP8)."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    kinds = {"F16": np.float16, "F32": np.float32, "U8": np.uint8, "F8_E4M3": np.uint8}
    out = {}
    for name, entry in json.loads(data[8:8 + length]).items():
        if name != "__metadata__":
            begin, end = (8 + length + offset for offset in entry["data_offsets"])
            out[name] = np.frombuffer(data[begin:end], kinds[entry["dtype"]]).reshape(entry["shape"])
    return out


def parts_of(weights: list, cut) -> tuple:
    """What libnestedfp makes of whole matrices, each cut and then one under the other: both planes and the exponents of
    the rows; and the weights, likewise."""
    import nestedfp

    whole = [nestedfp.nest(weight) for weight in weights]
    exponents = [cut(np.broadcast_to(planes.exponents[:, None], planes.upper.shape))[:, 0] for planes in whole]
    return (np.concatenate([cut(planes.upper) for planes in whole]), np.concatenate([cut(planes.lower) for planes in whole]),
            np.concatenate(exponents), np.concatenate([cut(weight) for weight in weights]))


def exponents_of(scale) -> np.ndarray:
    """Of a layer's weight_scale: 2^(exponent - 8) of each row."""
    return (np.log2(scale.numpy().reshape(-1)) + 8).astype(np.int8)


@unittest.skipUnless((Path(sys.executable).parent / "nestedfp").exists(), "the package is not installed")
class Checkpoint(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = Path(tempfile.mkdtemp())
        cls.nested = nested_model(cls.folder, "mistral")

    @classmethod
    def tearDownClass(cls):
        shutil.rmtree(cls.folder)

    def copy(self) -> Path:
        target = Path(tempfile.mkdtemp(dir=self.folder)) / "model"
        shutil.copytree(self.nested, target)
        return target

    def test_a_whole_one(self):
        info = checkpoint.NestedInfo.parse(json.loads((self.nested / "config.json").read_text())["nestedfp"])
        self.assertEqual((info.lower_directory, info.source_dtype, info.uppers), ("nestedfp", "F16", "nearest"))
        checkpoint.check_files(str(self.nested), str(self.nested / "nestedfp"))

    def test_groups_that_vllm_fuses_are_whole(self):
        names = tensors(next(self.nested.glob("model-*.safetensors")))
        for part in ("gate_proj", "up_proj"):  # make_models.py: up_proj of layer 1 does not nest
            self.assertEqual(names[f"model.layers.1.mlp.{part}.weight"].dtype, np.float16)
            self.assertEqual(names[f"model.layers.0.mlp.{part}.weight"].dtype, np.uint8)

    def test_what_is_missing_or_cut_is_named(self):
        model = self.copy()
        lower = next((model / "nestedfp").glob("*.safetensors"))
        whole = lower.read_bytes()
        lower.write_bytes(whole[:-1])
        with self.assertRaisesRegex(ValueError, "lower-.*is cut"):
            checkpoint.check_files(str(model), str(model / "nestedfp"))
        lower.write_bytes(whole[:5])
        with self.assertRaisesRegex(ValueError, "lower-.*is cut"):
            checkpoint.check_files(str(model), str(model / "nestedfp"))
        lower.write_bytes(whole.replace(b"layers.2.mlp.down_proj", b"layers.9.mlp.down_proj"))
        with self.assertRaisesRegex(ValueError, "layers.2.mlp.down_proj.weight_lower' is missing"):
            checkpoint.check_files(str(model), str(model / "nestedfp"))
        lower.unlink()
        with self.assertRaisesRegex(ValueError, "0 lower planes"):
            checkpoint.check_files(str(model), str(model / "nestedfp"))

    def test_config_fields(self):
        good = {"version": 1, "lower": "nestedfp", "source_dtype": "BF16", "uppers": "free"}
        self.assertEqual(checkpoint.NestedInfo.parse(good).uppers, "free")
        for change, field in (({"version": 2}, "version"), ({"lower": "../x"}, "lower"), ({"lower": 3}, "lower"),
                              ({"lower": "."}, "lower"), ({"uppers": "best"}, "uppers")):
            with self.assertRaisesRegex(ValueError, field):
                checkpoint.NestedInfo.parse({**good, **change})
        with self.assertRaisesRegex(ValueError, "nestedfp"):
            checkpoint.NestedInfo.parse("yes")


class Files(unittest.TestCase):
    def test_a_file_without_a_header_is_named(self):
        """Of a copy that was given its size and not its bytes, say."""
        headers = [b"[]", b'{"a": "\xff"}', b'{"a": 1}', b'{"a": {"dtype": "U8"}}', b"[" * 100000,
                   b'{"a": {"dtype": "U8", "shape": [1], "data_offsets": [0]}}',
                   b'{"a": {"dtype": "U8", "shape": [1], "data_offsets": ["0", "x"]}}',
                   b'{"a": {"dtype": "U8", "shape": 1, "data_offsets": [0, 1]}}']
        for content in (bytes(4096), *(len(header).to_bytes(8, "little") + header for header in headers)):
            with tempfile.TemporaryDirectory() as folder:
                (Path(folder) / "model.safetensors").write_bytes(content)
                with self.assertRaisesRegex(ValueError, "model.safetensors: is cut or no safetensors file"):
                    checkpoint.check_files(folder, folder)

    def test_a_configuration_that_is_none_is_named(self):
        """Of weights that are read again."""
        for text, why in (('{"nestedfp": ', "is no JSON"), ("[" * 100000, "is no JSON"),
                          ('{"nestedfp": {"version": 7}}', "nestedfp.version is 7")):
            with tempfile.TemporaryDirectory() as folder:
                (Path(folder) / "config.json").write_text(text)
                with self.assertRaisesRegex(ValueError, f"{folder}/config.json: {why}"):
                    checkpoint.check_replacement(folder, checkpoint.NestedInfo("nestedfp", "F16", "nearest"), False)
        with tempfile.TemporaryDirectory() as folder:
            checkpoint.check_replacement(folder, None, False)  # none at all
            (Path(folder) / "config.json").write_text("[]")
            checkpoint.check_replacement(folder, None, False)


class Decisions(unittest.TestCase):
    def test_settings(self):
        self.assertEqual(Settings.parse({}).threshold(), 1024)
        self.assertEqual(Settings.parse({"nestedfp": {"policy": "threshold:7"}}).threshold(), 7)
        self.assertEqual(Settings.parse({"nestedfp": {"policy": "fp8"}}).threshold(), -1)
        self.assertGreater(Settings.parse({"nestedfp": {"policy": "fp16"}}).threshold(), 1 << 20)
        self.assertIsNone(Settings.parse({"nestedfp": {"policy": "alternate:3"}}).threshold())
        both = Settings.parse({"nestedfp": {"policy": "fp8", "slo_ttft_ms": 500, "slo_tpot_ms": 20.5}})
        self.assertEqual((both.policy, both.slo_ttft_ms, both.slo_tpot_ms), ("fp8-w8a8", 500, 20.5))
        for bad in ({"nestedfp": 1}, {"nestedfp": {"polcy": "fp16"}}, {"nestedfp": {"policy": 8}},
                    {"nestedfp": {"slo_ttft_ms": -1}}, {"nestedfp": {"slo_tpot_ms": "soon"}}):
            with self.assertRaises(ValueError):
                Settings.parse(bad)

    def test_the_op_s_threshold_is_the_library_s(self):
        """What the op compares the rows of a call with, where there is no scheduler of ours."""
        rng = random.Random(5)
        for text in ("fp16", "fp8", "fp8-w8a8", *(f"threshold:{rng.randrange(1, 5000)}" for _ in range(20))):
            settings = Settings.parse({"nestedfp": {"policy": text}})
            policy = Policy(settings.policy)
            for _ in range(200):
                tokens = rng.choice([1, settings.threshold() if settings.threshold() > 0 else 1, rng.randrange(1, 9000)])
                tokens = min(tokens, 1 << 20)
                self.assertEqual(_library.FP8 if tokens > settings.threshold() else _library.FP16, policy.choose(tokens), text)

    def test_requests_have_the_last_word(self):
        for wanted in (_library.FP16, _library.FP8):
            self.assertEqual(precision_of_step(wanted, []), wanted)
            self.assertEqual(precision_of_step(wanted, ["auto", "fast"]), wanted)
            self.assertEqual(precision_of_step(wanted, ["fast", "fast"]), _library.FP8)
            self.assertEqual(precision_of_step(wanted, ["fast", "exact", "auto"]), _library.FP16)
        self.assertEqual(tier_of(SimpleNamespace(sampling_params=None)), "auto")
        self.assertEqual(tier_of(SimpleNamespace(sampling_params=SimpleNamespace(extra_args={"nestedfp_precision": "fast"}))),
                         "fast")

    def test_parts_of_a_start_are_counted_once(self):
        import time

        from nestedfp.vllm.spent import seconds, spent

        @spent("whole")
        def whole():
            time.sleep(0.02)
            for _ in range(2):
                with spent("part"):
                    time.sleep(0.03)

        seconds.clear()
        begin = time.perf_counter()
        whole()
        whole()
        taken = time.perf_counter() - begin
        self.assertEqual(list(seconds), ["part", "whole"])
        self.assertGreaterEqual(seconds["part"], 0.12)
        self.assertGreaterEqual(seconds["whole"], 0.04)
        self.assertLess(sum(seconds.values()), taken)
        seconds.clear()

    def test_versions(self):
        versions.check_vllm("0.23.4")
        versions.check_vllm("0.23.0+cu130")
        with self.assertRaisesRegex(ValueError, "0.23.*0.31.0"):
            versions.check_vllm("0.31.0")
        os.environ["NESTEDFP_ANY_VLLM"] = "1"
        try:
            versions.check_vllm("0.31.0")
        finally:
            del os.environ["NESTEDFP_ANY_VLLM"]


class Targets(unittest.TestCase):
    FP16, FP8 = _library.FP16, _library.FP8

    def test_milliseconds(self):
        self.assertEqual((milliseconds(None), milliseconds(250), milliseconds("12.5")), (None, 0.25, 0.0125))
        for bad in (0, -3, "x", float("nan"), float("inf"), True, [5], 10**400):
            with self.assertRaisesRegex(ValueError, "positive"):
                milliseconds(bad)

    def test_step_times(self):
        times = StepTimes(0.5)
        self.assertIsNone(times.expected(self.FP16, 3))
        times.observe(self.FP16, 100, 0.010)
        times.observe(self.FP16, 127, 0.020)  # of one size: 64 to 127
        times.observe(self.FP16, 4000, 0.5)
        self.assertAlmostEqual(times.expected(self.FP16, 64), 0.015)
        self.assertAlmostEqual(times.expected(self.FP16, 1), 0.015)  # the nearest
        self.assertAlmostEqual(times.expected(self.FP16, 1 << 20), 0.5)
        self.assertIsNone(times.expected(self.FP8, 100))
        times.observe(self.FP8, 100, 0.004)  # twice as long at most
        self.assertAlmostEqual(times.expected(self.FP16, 64), 0.008)
        self.assertAlmostEqual(times.expected(self.FP8, 64), 0.004)
        self.assertAlmostEqual(times.expected(self.FP16, 4000), 0.5)

    def test_a_slow_step_does_not_end_fp16(self):
        """The first one, say, for which kernels were compiled, before prompts that each come alone."""
        clock, chosen = Clock(), []
        for i in range(20):
            late = clock.late([Wanted(Target(10.0 * i, 0.5, None))], 1000, 10.0 * i)
            chosen.append(self.FP8 if late else self.FP16)
            clock.ended(clock.scheduled(chosen[-1], 1000, 10.0 * i), 10.0 * i + (0.06 if late else 0.1 if i else 2.0))
        self.assertEqual(chosen, [self.FP16, self.FP8, *[self.FP16] * 18])

    def test_when_tokens_are_due(self):
        target = Target(100.0, 0.5, 0.1)
        self.assertAlmostEqual(target.due(0), 100.5)
        self.assertAlmostEqual(target.due(1), 100.6)  # the second, while the first is under way
        target.came(1, 100.3)
        self.assertAlmostEqual(target.due(0), 100.4)
        target.came(3, 100.9)
        self.assertAlmostEqual(target.due(0), 100.7)
        self.assertFalse(target.kept())  # 0.2 s a token
        self.assertIsNone(Target(1.0, None, 0.1).due(0))
        self.assertIsNone(Target(1.0, None, 0.1).due(1))
        self.assertIsNone(Target(1.0, 0.5, None).due(2))
        self.assertFalse(Target(1.0, 0.5, None).kept())  # no token
        late = Target(1.0, 0.5, None)
        late.came(1, 1.6)
        self.assertFalse(late.kept())

    def simulate(self, tpot_s, depth, steps=600, seconds=(0.014, 0.008), jitter=0.1):
        """A request that decodes alone, `depth` steps scheduled ahead: its mean pace after a start, and the share of FP8."""
        rng = random.Random(depth)
        clock, target, now, free = Clock(), Target(0.0, 1.0, tpot_s), 0.0, 0.0
        target.came(1, 0.0)
        ends, chosen, numbers = [], [], []
        for _ in range(steps):
            while len(ends) >= depth:
                now = max(now, ends.pop(0))
                clock.ended(numbers.pop(0), now)
                target.came(1, now)
            precision = self.FP8 if clock.late([Wanted(target, 1, len(ends))], 1, now) else self.FP16
            numbers.append(clock.scheduled(precision, 1, now))
            free = max(free, now) + seconds[precision] * (1 + jitter * (rng.random() - 0.5))
            ends.append(free)
            chosen.append(precision)
        return (target.last_s - target.first_s) / (target.tokens - 1), sum(chosen) / len(chosen), target.kept()

    def test_as_little_fp8_as_the_pace_needs(self):
        for depth in (1, 2):
            pace, share, _ = self.simulate(0.010, depth)  # between the two: (14 - 10) / (14 - 8) of the steps
            self.assertLess(pace, 0.01005)
            self.assertAlmostEqual(share, 2 / 3, delta=0.03)
            pace, share, kept = self.simulate(0.020, depth)
            self.assertEqual((share, kept), (0, True))
            _, share, kept = self.simulate(0.004, depth)  # cannot be kept: all that can be done is done
            self.assertGreater(share, 0.98)
            self.assertFalse(kept)

    def test_first_tokens(self):
        clock = Clock()
        for precision, seconds in ((self.FP16, 0.1), (self.FP8, 0.06)):
            number = clock.scheduled(precision, 1000, 0.0)
            clock.last_end_s = 0.0
            self.assertEqual(clock.ended(number, seconds), (precision, seconds))
        clock.last_end_s = 0.0
        target = Target(10.0, 0.25, None)
        self.assertFalse(clock.late([Wanted(target, 2)], 1000, 10.0))  # two steps of 0.1 s
        self.assertTrue(clock.late([Wanted(target, 3)], 1000, 10.0))
        clock.scheduled(self.FP16, 1000, 10.0)  # behind one that is under way
        self.assertTrue(clock.late([Wanted(target, 2)], 1000, 10.01))
        self.assertAlmostEqual(clock.starts(10.01), 10.1)
        last = clock.scheduled(self.FP8, 1000, 10.02)
        self.assertAlmostEqual(clock.starts(10.02), 10.16)
        clock.last_end_s = 10.1
        self.assertAlmostEqual(clock.ended(last, 10.2)[1], 0.1)  # the one before never ended
        self.assertIsNone(clock.ended(last, 10.3))
        back = Clock()
        back.ended(back.scheduled(self.FP16, 1, 10.0), 10.1)
        self.assertEqual(back.ended(back.scheduled(self.FP16, 1, 10.0), 10.05), (self.FP16, 0.0))  # none takes less
        self.assertEqual(clock.starts(10.3), 10.3)

    def test_counts_are_taken_once(self):
        from nestedfp.vllm.metrics import Counts

        counts = Counts()
        self.assertIsNone(counts.take())
        counts.add("late")
        counts.add("late", 2)
        self.assertEqual(counts.take(), {"late": 3})
        self.assertIsNone(counts.take())


class Assembler(unittest.TestCase):
    def chosen(self, before: dict[str, str], mode: int | None) -> str | None:
        """What Triton is told, beside a PyTorch whose ptxas has that mode; None: that has none."""
        with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, before):
            if not before:
                os.environ.pop(assembler.VARIABLE, None)
            if mode is not None:
                ptxas = Path(folder) / "bin" / "ptxas"
                ptxas.parent.mkdir()
                ptxas.touch(mode)
            assembler.choose(Path(folder))
            found = os.environ.get(assembler.VARIABLE)
            return found.replace(folder, "TORCH") if found else None

    def test_pytorchs_own_where_it_can_run(self):
        self.assertEqual(self.chosen({}, 0o755), "TORCH/bin/ptxas")
        self.assertIsNone(self.chosen({}, 0o644))
        self.assertIsNone(self.chosen({}, None))

    def test_a_users_choice_stays(self):
        self.assertEqual(self.chosen({assembler.VARIABLE: "/mine"}, 0o755), "/mine")


def scheduler_module():
    """nestedfp.vllm.scheduler; where there is no vLLM, over stand-ins for the four modules that it imports."""
    if HAVE_VLLM:
        return importlib.import_module("nestedfp.vllm.scheduler")
    sched = "vllm.v1.core.sched"
    modules = {"vllm.logger": SimpleNamespace(init_logger=logging.getLogger),
               f"{sched}.scheduler": SimpleNamespace(Scheduler=type("Scheduler", (), {})),
               f"{sched}.async_scheduler": SimpleNamespace(AsyncScheduler=type("AsyncScheduler", (), {})),
               f"{sched}.output": SimpleNamespace(SchedulerOutput=object)}
    with patch.dict(sys.modules, modules):
        return importlib.import_module("nestedfp.vllm.scheduler")


class Request:
    def __init__(self, name, tier=None, **extra):
        self.request_id, self.cache_salt, self.block_hashes, self.hashed = name, None, [1], 0
        extra = {**extra, **({"nestedfp_precision": tier} if tier else {})}
        self.sampling_params = SimpleNamespace(extra_args=extra or None)
        self.arrival_time, self.num_prompt_tokens, self.num_computed_tokens = 1000.0, 8, 8
        self.num_tokens, self.num_output_placeholders, self.is_prefill_chunk = 8, 0, False

    def update_block_hashes(self):
        self.hashed += 1


def came(name, end=None, tokens=(5,), pooled=None):
    """vLLM's EngineCoreOutput, as far as it is looked at."""
    return SimpleNamespace(request_id=name, new_token_ids=list(tokens), finish_reason=end, pooling_output=pooled)


class Scheduling(unittest.TestCase):
    """Over a scheduler of ours in vLLM's place: vLLM's real SchedulerOutputs in where it is there, decisions out."""

    WORKER, FP16, FP8 = "nestedfp.vllm.worker.Worker", _library.FP16, _library.FP8

    def setUp(self):
        class Base:
            def __init__(self, worker, executor="mp"):
                parallel = SimpleNamespace(worker_cls=worker, use_ubatching=False, data_parallel_size=1,
                                           distributed_executor_backend=executor)
                self.vllm_config = SimpleNamespace(parallel_config=parallel, model_config=SimpleNamespace(is_moe=False),
                                                   additional_config={"nestedfp": {"policy": "threshold:10"}})
                self.waiting, self.kv_cache_manager = [], SimpleNamespace(usage=0.1)
                self.requests = {}

            def add_request(self, request):
                self.requests[request.request_id] = request

            def update_from_output(self, scheduler_output, outputs):
                for output in outputs:
                    if output.finish_reason is not None:
                        self._free_request(self.requests.pop(output.request_id))
                return {0: SimpleNamespace(outputs=outputs)}

            def finish_requests(self, names, status):
                found = [name for name in names if name in self.requests]
                for name in found:
                    self._free_request(self.requests.pop(name))
                return [(name, 0) for name in found]

            def _update_request_as_session(self, session, update):
                session.arrival_time, session.sampling_params = update.arrival_time, update.sampling_params

            def make_stats(self):
                return SimpleNamespace()

            def schedule(self):
                return self.next

            def _free_request(self, request):
                pass

        self.base, self.module = Base, scheduler_module()
        self.scheduler = type("Scheduler", (self.module._ChoosesPrecision, Base), {})
        # The wall's clock and the one that nobody sets, which differ.
        self.wall_s, self.monotonic_s = 1000.0, 50.0
        clocks = SimpleNamespace(time=lambda: self.wall_s, monotonic=lambda: self.monotonic_s)
        clock = patch.object(self.module, "time", clocks)
        clock.start()
        self.addCleanup(clock.stop)

    def wait_until(self, second):
        self.wall_s, self.monotonic_s = 1000.0 + second, 50.0 + second

    def schedule(self, made, new, cached=None):
        """A step's output: tokens of requests that are new, tokens and those that came before of others."""
        if HAVE_VLLM:
            from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput

            output = SchedulerOutput.make_empty()
            output.scheduled_cached_reqs = CachedRequestData.make_empty()
        else:
            output = SimpleNamespace(scheduled_cached_reqs=SimpleNamespace())
        made.next = output
        output.scheduled_new_reqs = [SimpleNamespace(req_id=name) for name in new]
        output.num_scheduled_tokens = {**new, **{name: count for name, (count, _) in (cached or {}).items()}}
        output.total_num_scheduled_tokens = sum(output.num_scheduled_tokens.values())
        output.scheduled_cached_reqs.req_ids = list(cached or {})
        output.scheduled_cached_reqs.num_output_tokens = [answered for _, answered in (cached or {}).values()]
        return made.schedule()

    def decide(self, made, new, cached=None):
        from nestedfp.vllm.policy import ATTRIBUTE

        return getattr(self.schedule(made, new, cached), ATTRIBUTE, None)

    def step(self, made, begin, seconds, scheduled, *outputs):
        """The precision of a step in which requests of these names give a token each."""
        self.wait_until(begin)
        precision = self.decide(made, {}, {name: (1, 1) for name in scheduled})
        self.wait_until(begin + seconds)
        made.update_from_output(made.next, [came(*output) for output in outputs])
        return precision

    def test_precisions(self):
        with self.assertRaisesRegex(ValueError, "--worker-cls nestedfp.vllm.worker.Worker"):
            self.scheduler("auto")
        made = self.scheduler(self.WORKER)
        requests = {name: Request(name, tier) for name, tier in (("a", None), ("b", "exact"), ("c", "fast"), ("d", "best"))}
        with self.assertLogs("vllm.nestedfp", "WARNING") as logs:
            for request in requests.values():
                made.add_request(request)
        self.assertIn("'best'", logs.output[0])
        self.assertEqual([(r.cache_salt is not None, r.hashed) for r in requests.values()],
                         [(False, 0), (True, 1), (False, 0), (False, 0)])

        def decide(*steps):
            return [self.decide(made, *step) for step in steps]

        fp16, fp8 = self.FP16, self.FP8
        self.assertEqual(decide(({"a": 10},), ({"a": 11},), ({"d": 11},)), [fp16, fp8, fp8])
        self.assertEqual(decide(({"a": 20, "b": 3},), ({"c": 2},), ({"c": 2}, {"a": (1, 3)})), [fp16, fp8, fp16])
        self.assertEqual(decide(({},)), [None])
        made._free_request(requests["b"])
        self.assertEqual(decide(({"a": 20, "b": 3},)), [fp8])
        self.assertEqual(sum(made.nestedfp_steps.values()), 7)

    def test_no_client_gets_at_exact_requests_prefixes(self):
        made, salts = self.scheduler(self.WORKER), {}
        given = (None, "a", "nestedfp-exact", "anestedfp-exact", "anestedfp-exact.", "anestedfp-exact..", "a.")
        for tier in ("exact", "fast", None):
            for i, salt in enumerate(given):
                request = Request(f"{tier}{i}", tier)
                request.cache_salt = salt
                made.add_request(request)
                salts[tier, salt] = request.cache_salt
                self.assertEqual(request.hashed, int(request.cache_salt != salt))
        exact = {salt for (tier, _), salt in salts.items() if tier == "exact"}
        others = [salts["fast", salt] for salt in given]
        self.assertEqual(others, [salts[None, salt] for salt in given])
        self.assertEqual((len(exact), len(set(others))), (len(given), len(given)))
        self.assertFalse(exact & set(others))

    def test_more_input_of_a_request_leaves_what_it_is(self):
        made = self.scheduler(self.WORKER)
        for tier in ("exact", None, "fast"):
            made.add_request(Request("a", tier))
        self.assertEqual(made.nestedfp_tiers, {"a": "exact"})
        made.add_request(Request("b"))
        more = Request("b", "exact")
        made.add_request(more)  # what was computed before is not exact
        self.assertEqual((made.nestedfp_tiers, more.cache_salt), ({"a": "exact"}, None))

    def test_targets(self):
        fp16, fp8 = self.FP16, self.FP8
        made = self.scheduler(self.WORKER)  # FP16 steps take 0.1 s
        with self.assertLogs("vllm.nestedfp", "WARNING") as logs:
            for request in (Request("t", slo_tpot_ms=50, slo_ttft_ms=150), Request("x", "exact", slo_tpot_ms=50),
                            Request("u", slo_tpot_ms="soon"), Request("v")):
                made.add_request(request)
        self.assertEqual(set(made.nestedfp_targets), {"t", "x"})
        self.assertIn("'soon'", logs.output[0])
        self.assertEqual(self.step(made, 0.0, 0.1, "t", ("t", None)), fp16)  # in time
        self.assertEqual(self.step(made, 0.1, 0.06, "t", ("t", None)), fp8)  # due at 0.15, FP16 would take 0.1 s
        self.assertEqual(self.step(made, 0.2, 0.1, "tx", ("t", None), ("x", None)), fp16)  # exact is exact
        self.assertEqual(self.step(made, 0.3, 0.1, "v", ("v", None)), fp16)
        self.assertEqual(self.step(made, 0.4, 0.06, "t", ("t", "stop")), fp8)
        self.assertEqual(set(made.nestedfp_targets), {"x"})
        made._free_request(made.requests["x"])
        self.step(made, 0.5, 0.1, "v")
        self.assertEqual((made.nestedfp_targets, made.nestedfp_ended), ({}, {}))
        counts = made.make_stats().nestedfp
        self.assertEqual({key: counts[key] for key in ("steps_fp16", "steps_fp8", "switches", "late", "slo_requests")},
                         {"steps_fp16": 4, "steps_fp8": 2, "switches": 4, "late": 2, "slo_requests": 1})
        self.assertEqual(counts["slo_attained"], 0)  # 0.12 s a token
        self.assertAlmostEqual(counts["seconds_fp8"], 0.12, places=5)
        self.assertIsNone(made.make_stats().nestedfp)

    def test_drafts_that_are_refused_are_no_tokens(self):
        """Asynchronous: a step is scheduled while the one before it runs."""
        def decode(drafts):
            self.wait_until(0.0)
            made, request, chosen, ran = self.scheduler(self.WORKER), Request("t", slo_tpot_ms=20), [], []
            made.add_request(request)
            for precision, seconds in ((self.FP16, 0.025), (self.FP8, 0.012)):
                made.nestedfp_clock.times.observe(precision, 1 + drafts, seconds)
            made.nestedfp_targets["t"].came(1, 50.0)
            now = 0.0
            for _ in range(40):
                while len(ran) < 2:
                    request.num_output_placeholders += 1 + drafts  # as vLLM's scheduler does
                    chosen.append(self.decide(made, {}, {"t": (1 + drafts, 1)}))
                    ran.append(made.next)
                now += 0.012 if chosen[-2] == self.FP8 else 0.025
                self.wait_until(now)
                request.num_output_placeholders -= 1 + drafts
                made.update_from_output(ran.pop(0), [came("t")])
            return chosen, made.nestedfp_targets["t"].kept()

        chosen, kept = decode(0)
        self.assertTrue(kept)
        self.assertEqual(set(chosen), {self.FP16, self.FP8})
        self.assertEqual(decode(3), (chosen, True))

    def test_prompts_in_pieces_under_way(self):
        made, request = self.scheduler(self.WORKER), Request("t", slo_ttft_ms=150)
        made.add_request(request)
        request.num_computed_tokens, request.is_prefill_chunk = 4, True
        self.schedule(made, {"t": 4})
        self.assertEqual(made.nestedfp_clock.in_flight("t"), 0)
        request.num_computed_tokens, request.is_prefill_chunk = 8, False
        self.schedule(made, {}, {"t": (4, 0)})
        self.assertEqual(made.nestedfp_clock.in_flight("t"), 1)
        made.update_from_output(made.next, [came("t")])
        self.assertEqual(made.nestedfp_clock.in_flight("t"), 0)

    def test_requests_that_end_at_a_stop_string_are_counted(self):
        made = self.scheduler(self.WORKER)
        for name, milliseconds in (("kept", 500), ("late", 50), ("waits", 500), ("ends", 500)):
            made.add_request(Request(name, slo_ttft_ms=milliseconds))
        made.add_request(Request("none"))
        names = ("kept", "late", "none", "ends")
        self.step(made, 0.0, 0.1, names, *((name, None) for name in names))
        self.assertEqual(made.finish_requests(["kept", "late", "waits", "none", "gone"], "aborted"),
                         [(name, 0) for name in ("kept", "late", "waits", "none")])
        # One that ended by itself, in the next step, is no other's: it is counted there, and once.
        self.step(made, 0.1, 0.1, ("ends",), ("ends", "length"))
        made.finish_requests(["kept", "ends"], "aborted")
        counts = made.make_stats().nestedfp
        self.assertEqual((counts["slo_requests"], counts["slo_attained"]), (3, 2))
        self.assertEqual((made.nestedfp_targets, made.nestedfp_ended), ({}, {}))

    def test_requests_that_vllm_ends_in_an_update_are_counted_once(self):
        """Where a prompt's keys and values cannot be loaded: finish_requests(), and an output beside."""
        made = self.scheduler(self.WORKER)
        for name in ("first", "second"):
            made.add_request(Request(name, slo_ttft_ms=500))
        self.step(made, 0.0, 0.1, ("first",), ("first", None))

        def update(scheduler, scheduler_output, outputs):
            scheduler.finish_requests(["first", "second"], "error")
            return {0: SimpleNamespace(outputs=outputs)}

        with patch.object(self.base, "update_from_output", update):
            made.update_from_output(made.next, [came(name, "error", ()) for name in ("first", "second")])
        counts = made.make_stats().nestedfp
        self.assertEqual((counts["slo_requests"], counts["slo_attained"]), (2, 1))

    def test_each_input_of_a_session_has_a_target(self):
        """Of a request that gets more input while it runs: vLLM begins that in the update in which the answer to what
        came before ends, and what says that no more comes is a request too."""
        if HAVE_VLLM:
            from vllm.v1.core.sched.scheduler import Scheduler

            self.assertTrue(hasattr(Scheduler, "_update_request_as_session"))

        def come(second, **extra):
            self.wait_until(second)
            made_now = Request("s", **extra)
            made_now.arrival_time = 1000.0 + second
            with patch.object(self.base, "add_request", lambda *_: None):
                made.add_request(made_now)
            return made_now

        def update_with(more):
            def update(scheduler, scheduler_output, outputs):
                if more is not None:
                    scheduler._update_request_as_session(scheduler.requests["s"], more)
                return {0: SimpleNamespace(outputs=outputs)}

            return patch.object(self.base, "update_from_output", update)

        made = self.scheduler(self.WORKER)
        made.add_request(Request("s", slo_ttft_ms=500))
        self.step(made, 0.0, 0.1, "s", ("s", None))
        more = come(0.15, slo_ttft_ms=200)
        with update_with(more):
            self.assertEqual(self.step(made, 0.2, 0.1, "s", ("s", "stop")), self.FP16)
        self.assertAlmostEqual(made.nestedfp_targets["s"].arrival_s, 50.15)
        self.assertEqual(made.nestedfp_targets["s"].tokens, 0)
        come(0.3, slo_ttft_ms=200)
        with update_with(None):
            self.assertEqual(self.step(made, 0.3, 0.1, "s", ("s", "stop")), self.FP8)  # due at 0.35
        made.finish_requests(["s"], "aborted")
        counts = made.make_stats().nestedfp
        self.assertEqual((counts["slo_requests"], counts["slo_attained"]), (2, 1))
        self.assertEqual(made.nestedfp_targets, {})
        # The end of an answer without a target is not that of the next input's.
        made.add_request(Request("s"))
        with update_with(come(0.4, slo_ttft_ms=200)):
            self.step(made, 0.4, 0.1, "s", ("s", "stop"))
        self.assertEqual(made.nestedfp_targets["s"].tokens, 0)
        self.assertNotIn("slo_requests", made.make_stats().nestedfp)

    def test_of_those_that_wait_the_first_one_due_decides(self):
        rng = random.Random(8)
        for _ in range(20):
            self.wait_until(0.0)
            made = self.scheduler(self.WORKER)
            made.nestedfp_clock.times.observe(self.FP16, 1, 0.1)  # this step and one of its own: 0.2 s
            dues = [rng.randrange(100, 400) for _ in range(rng.randrange(1, 5))]
            for i, due in enumerate(dues):
                made.add_request(Request(f"w{i}", slo_ttft_ms=due))
                made.add_request(Request(f"n{i}", slo_tpot_ms=1))  # no first token is late
            made.add_request(Request("v"))
            self.assertEqual(self.decide(made, {"v": 1}), self.FP8 if min(dues) < 200 else self.FP16, dues)

    def test_requests_that_were_preempted(self):
        """They compute all that they had before their next token."""
        def late(count, missing):
            self.wait_until(0.0)
            made, request = self.scheduler(self.WORKER), Request("t", slo_tpot_ms=250)  # FP16 steps take 0.1 s
            made.add_request(request)
            self.step(made, 0.0, 0.1, "t", ("t",))  # the next is due at 0.35
            self.wait_until(0.2)
            request.num_tokens, request.num_computed_tokens, request.is_prefill_chunk = 9, 9 - missing, missing > 0
            return self.decide(made, {}, {"t": (count, 1)}) == self.FP8

        self.assertEqual([late(9, 0), late(8, 1), late(3, 6)], [False, True, True])

    def test_requests_that_give_no_tokens(self):
        """Of models that embed or score: what they are asked for comes with the end."""
        made = self.scheduler(self.WORKER)
        made.nestedfp_settings = Settings(slo_ttft_ms=500, slo_tpot_ms=20)
        for name in ("p", "late"):
            made.add_request(Request(name))
        self.step(made, 0.0, 0.1, ("p",), ("p", "stop", (), [0.5]))
        self.step(made, 0.1, 0.5, ("late",), ("late", "stop", (), [0.5]))
        counts = made.make_stats().nestedfp
        self.assertEqual((counts["slo_requests"], counts["slo_attained"]), (2, 1))

    def test_what_targets_do_not_go_with(self):
        made = self.scheduler(self.WORKER, "external_launcher")
        with self.assertLogs("vllm.nestedfp", "WARNING") as logs:
            made.add_request(Request("t", slo_tpot_ms=50))
        self.assertIn("external_launcher", logs.output[0])
        self.assertEqual(made.nestedfp_targets, {})
        made.vllm_config.parallel_config.use_ubatching = True
        with patch.object(self.base, "__init__", lambda self, old: setattr(self, "vllm_config", old)), \
                self.assertRaisesRegex(ValueError, "--enable-dbo"):
            self.scheduler(made.vllm_config)

    def test_a_clock_that_is_set_while_requests_run(self):
        made = self.scheduler(self.WORKER)
        self.wait_until(0.25)
        made.add_request(Request("t", slo_ttft_ms=500))
        self.assertAlmostEqual(made.nestedfp_targets["t"].arrival_s, 50.0)
        self.schedule(made, {}, {"t": (1, 0)})
        self.wall_s, self.monotonic_s = 900.0, 50.3  # after a step of 0.05 s
        made.update_from_output(made.next, [came("t", "stop")])
        counts = made.make_stats().nestedfp
        self.assertAlmostEqual(counts["seconds_fp16"], 0.05)
        self.assertEqual((counts["slo_requests"], counts["slo_attained"]), (1, 1))
        made.add_request(Request("u", slo_ttft_ms=500))  # that came, it says, in 100 s
        self.assertAlmostEqual(made.nestedfp_targets["u"].arrival_s, 50.3)


@unittest.skipUnless(HAVE_VLLM, "needs torch and vLLM")
class InsideVllm(unittest.TestCase):
    def test_the_op_and_its_fake(self):
        from nestedfp.vllm import op

        op.register()
        schema = str(torch.ops.nestedfp.linear.default._schema)
        self.assertIn("(Tensor x, Tensor upper, Tensor lower, Tensor scale, Tensor? bias, SymInt n, SymInt k, SymInt join)",
                      schema)
        with torch._subclasses.fake_tensor.FakeTensorMode():
            x, plane = torch.empty(5, 128, dtype=torch.float16), torch.empty(64 * 128, dtype=torch.uint8)
            y = torch.ops.nestedfp.linear(x, plane, plane, torch.empty(0), None, 64, 128, 0)
            half = torch.ops.nestedfp.swiglu(x, plane, plane, torch.empty(0), 64, 128, 0)
        self.assertEqual((tuple(y.shape), y.dtype), ((5, 64), torch.float16))
        self.assertEqual((tuple(half.shape), half.dtype), ((5, 32), torch.float16))

    def test_scheduler_output_carries_the_precision(self):
        import pickle

        from nestedfp.vllm.policy import ATTRIBUTE
        from vllm.v1.core.sched.output import SchedulerOutput

        rng = random.Random(2)
        for precision in (_library.FP16, _library.FP8):
            output = SchedulerOutput.make_empty()
            output.num_scheduled_tokens = {f"request-{i}": rng.randrange(1, 300) for i in range(rng.randrange(1, 40))}
            output.total_num_scheduled_tokens = sum(output.num_scheduled_tokens.values())
            setattr(output, ATTRIBUTE, precision)
            buffers = []  # as vLLM's queue to its workers does it
            data = pickle.dumps(output, protocol=pickle.HIGHEST_PROTOCOL, buffer_callback=buffers.append)
            for back in (pickle.loads(data, buffers=buffers), pickle.loads(pickle.dumps(output))):
                self.assertEqual(getattr(back, ATTRIBUTE), precision)
                self.assertEqual(back, output)

    def test_counts_reach_prometheus(self):
        """Over vLLM's own wire format between its processes."""
        from nestedfp.vllm import metrics
        from nestedfp.vllm.stat_logger import StatLogger
        from prometheus_client import generate_latest
        from vllm.v1.engine import EngineCoreOutputs
        from vllm.v1.metrics.stats import SchedulerStats
        from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

        metrics.install_field()
        stats = SchedulerStats(num_running_reqs=3)
        setattr(stats, metrics.FIELD, {"steps_fp8": 2, "tokens_fp8": 300, "seconds_fp8": 0.25, "late": 1, "unknown": 9})
        config = SimpleNamespace(model_config=SimpleNamespace(served_model_name="m", quantization="nestedfp"))
        logger = StatLogger(config, [0])
        for one in (stats, stats, SchedulerStats()):
            data = MsgpackEncoder().encode(EngineCoreOutputs(scheduler_stats=one))
            back = MsgpackDecoder(EngineCoreOutputs).decode(data).scheduler_stats
            self.assertEqual(back.num_running_reqs, one.num_running_reqs)
            logger.record(back, None)
        text = generate_latest().decode()
        self.assertIn('nestedfp:steps_total{engine="0",model_name="m",precision="fp8"} 4.0', text)
        self.assertIn('nestedfp:step_seconds_total{engine="0",model_name="m",precision="fp8"} 0.5', text)
        self.assertIn('nestedfp:slo_steps_total{engine="0",model_name="m"} 2.0', text)

    def test_statistics_stay_off_and_other_models_as_they_are(self):
        """A logger from vLLM's entry point would turn them on (AsyncLLM.__init__), whatever the model."""
        from nestedfp.vllm import metrics
        from nestedfp.vllm.stat_logger import StatLogger
        from vllm.plugins import STAT_LOGGER_PLUGINS_GROUP
        from vllm.v1.metrics import loggers

        project = (Path(__file__).parents[2] / "python" / "pyproject.toml").read_text()
        self.assertIn('"vllm.general_plugins"', project)
        self.assertNotIn(STAT_LOGGER_PLUGINS_GROUP, project)
        metrics.install_logger()

        class Mine(loggers.PrometheusStatLogger):
            def __init__(self, *args, **kwargs):
                pass

        for quantization, given, found in ((None, None, []), (None, [Mine], [Mine]), ("nestedfp", None, [StatLogger]),
                                           ("nestedfp", [Mine], [Mine, StatLogger])):
            config = SimpleNamespace(model_config=SimpleNamespace(served_model_name="m", quantization=quantization))
            with patch.object(loggers, "PrometheusStatLogger", Mine):  # vLLM's where none is given
                made = loggers.StatLoggerManager(vllm_config=config, engine_idxs=[0, 1], custom_stat_loggers=given,
                                                 enable_default_loggers=False)
            self.assertEqual([type(one) for one in made.stat_loggers], found if given else [*found, Mine])
            for one in made.stat_loggers:
                if isinstance(one, StatLogger):
                    self.assertEqual({engine for engine, _ in one.children}, {0, 1})

    def test_dependent_launch_unless_the_user_says_otherwise(self):
        from nestedfp.vllm import overlap

        for given, wanted in (({}, True), ({overlap.OPTION: False}, False)):
            compilation = SimpleNamespace(inductor_compile_config=dict(given))
            overlap.enable(SimpleNamespace(compilation_config=compilation))
            self.assertEqual(compilation.inductor_compile_config[overlap.OPTION], wanted)
        from torch._inductor.codegen.triton import TritonKernel

        lines = []

        class Kernel:
            GDC_WAIT, inside_reduction, range_trees = TritonKernel.GDC_WAIT, True, [SimpleNamespace(is_loop=True)]
            body, enabled = SimpleNamespace(writeline=lambda text: lines.append(("body", text))), True

            def _enable_pdl_codegen(self):
                return self.enabled

        buffer = SimpleNamespace(writeline=lambda text: lines.append(("buffer", text)))
        kernel = Kernel()
        TritonKernel._handle_pdl_before_access(kernel, buffer, "x")  # in a loop: before it
        kernel.inside_reduction = False
        TritonKernel._handle_pdl_before_access(kernel, buffer, "x", consider_reads=True)
        kernel.enabled = False
        TritonKernel._handle_pdl_before_access(kernel, buffer, "x")
        self.assertEqual(lines, [("body", Kernel.GDC_WAIT), ("buffer", Kernel.GDC_WAIT)])

    def norm_graph(self, reads_normed_twice=False, bias_after=False, weight_type=None, groups=()):
        """``groups``: over which vLLM sums what each norm reads. (hidden, residual) -> norm -> swiglu -> norm -> linear, as vLLM's graphs hold them before they are lowered."""
        import vllm.distributed.parallel_state
        import vllm.ir.ops  # noqa: F401
        from nestedfp.vllm import all_reduce, op
        from torch.fx.experimental.proxy_tensor import make_fx

        op.register()
        all_reduce.register()
        half, nested = torch.float16, torch.ops.nestedfp
        x, residual = torch.empty(5, 64, dtype=half), torch.empty(5, 64, dtype=half)
        weight = torch.empty(64, dtype=weight_type or half)
        plane, scale, bias = torch.empty(128 * 64, dtype=torch.uint8), torch.empty(0), torch.empty(64, dtype=half)

        def model(x, residual, weight, plane, scale, bias):
            over = iter(groups)

            def norm(x, *rest):
                group = next(over, None)
                x = torch.ops.vllm.all_reduce(x, group_name=group) if group else x
                return torch.ops.vllm_ir.fused_add_rms_norm(x, *rest)

            normed, residual = norm(x, residual, weight, 1e-5, None)
            x = nested.swiglu(normed.reshape(-1, 64), plane, plane, scale, 128, 64, 0)
            normed, residual = norm(x, residual, weight, 1e-5, None)
            y = nested.linear(normed, plane, plane, scale, bias * 2 if bias_after else bias, 64, 64, 0)
            return (y, residual, normed) if reads_normed_twice else (y, residual)

        return make_fx(model, tracing_mode="fake")(x, residual, weight, plane, scale, bias)

    def targets(self, traced, group=None):
        from nestedfp.vllm import norms

        norms.JoinNorms(group)(traced.graph)
        traced.graph.lint()
        for node in traced.graph.nodes:
            self.assertIn("val", node.meta if node.op != "output" else {"val": 0}, node)
        return [str(node.target) for node in traced.graph.nodes if node.op == "call_function"]

    def test_the_operators_bind_to_this_pytorch(self):
        from nestedfp.vllm import op

        folder = Path(torch.__file__).parent / "lib"
        if not (folder / "libtorch_cuda.so").is_file():
            self.skipTest("this PyTorch has no CUDA")
        # In a process of its own: once they are bound, no path is looked at any more.
        bind = "import sys; from nestedfp import _library as l; l.check(l.library().nfp_torch_bind(*map(str.encode, sys.argv[1:])))"
        for paths, name in ((("/nowhere/libtorch_cpu.so", ""), "nowhere"),
                            ((str(folder / "libc10.so"), str(folder / "libtorch_cuda.so")), "aoti_torch")):
            refused = subprocess.run([sys.executable, "-c", bind, *paths], stderr=subprocess.PIPE, text=True)
            self.assertNotEqual(refused.returncode, 0)
            self.assertRegex(refused.stderr, f"NestedFPError: .*{name}")
        op._bind()
        op._bind()
        for name in ("linear", "swiglu", "norm_linear", "norm"):
            self.assertTrue(torch._C._dispatch_has_kernel_for_dispatch_key(f"nestedfp::{name}", "CUDA"), name)

    def test_the_precision_in_force(self):
        from nestedfp.vllm.op import Step

        self.assertEqual((Step.forced, Step.threshold), (None, 1024))
        Step.forced = _library.FP8
        self.assertEqual(Step.forced, _library.FP8)
        Step.forced = None

    def test_a_layer_is_one_node_of_a_traced_graph(self):
        """What Dynamo and Inductor must look at in every layer; activations of other forms are made rows."""
        from nestedfp.vllm import op, quantization
        from torch.fx.experimental.proxy_tensor import make_fx

        op.register()
        method = quantization.NestedOnlineLinearMethod(None, "x")

        def traced_layer(shape, swiglu):
            def apply(x, plane, scale):
                layer = SimpleNamespace(nestedfp_shape=(128, 64, 0), nestedfp_swiglu=swiglu, nestedfp_interleaved=swiglu,
                                        weight=plane, weight_lower=plane, weight_scale=scale)
                return method.apply(layer, x)

            return make_fx(apply, tracing_mode="fake")(torch.empty(*shape, dtype=torch.float16),
                                                       torch.empty(128 * 64, dtype=torch.uint8), torch.empty(0))

        for shape in ((5, 64), (2, 3, 64), (64,)):
            for swiglu in (False, True):
                traced = traced_layer(shape, swiglu)
                nodes = [node for node in traced.graph.nodes if node.op == "call_function"]
                self.assertEqual(nodes[-1].meta["val"].shape, (*shape[:-1], 64 if swiglu else 128))
                product = [str(node.target) for node in nodes if "nestedfp" in str(node.target)]
                self.assertEqual(product, ["nestedfp.swiglu.default" if swiglu else "nestedfp.linear.default"])
                if len(shape) == 2:
                    self.assertEqual(len(nodes), 1)

    def test_norms_join_the_product_that_alone_reads_them(self):
        names = [name for name in self.targets(self.norm_graph()) if "getitem" not in name]
        self.assertEqual(names, ["nestedfp.norm_linear.default"] * 2)
        traced = self.norm_graph()
        self.targets(traced)
        swiglu, linear = [node for node in traced.graph.nodes if "norm_linear" in str(node.target)]
        self.assertEqual(swiglu.args[3:4] + swiglu.args[7:], (1e-5, None, 128, 64, 0, True))
        self.assertEqual(linear.args[7].name, "bias_1")
        self.assertEqual(linear.args[8:], (64, 64, 0, False))
        self.assertEqual([tuple(value.shape) for value in swiglu.meta["val"]], [(5, 64), (5, 64)])

    def test_other_norms_stay(self):
        for given in ({"reads_normed_twice": True}, {"bias_after": True}):
            names = " ".join(self.targets(self.norm_graph(**given)))
            self.assertEqual((names.count("fused_add_rms_norm"), names.count("norm_linear")), (1, 1), given)
            self.assertEqual(names.count("nestedfp.linear"), 1)
        names = " ".join(self.targets(self.norm_graph(weight_type=torch.float32)))
        self.assertEqual((names.count("fused_add_rms_norm"), names.count("norm_linear")), (2, 0))

    def test_norms_join_the_sum_over_ranks_before_them(self):
        traced = self.norm_graph(groups=("tp:0", "tp:0"))
        names = [name for name in self.targets(traced, "tp:0") if "getitem" not in name]
        self.assertEqual(names, ["nestedfp.reduce_norm_linear.default"] * 2)
        swiglu, linear = [node for node in traced.graph.nodes if "norm_linear" in str(node.target)]
        self.assertEqual(swiglu.args[0].op, "placeholder")  # the part, not the sum
        self.assertEqual(swiglu.args[3:4] + swiglu.args[7:], (1e-5, None, 128, 64, 0, True, "tp:0"))
        self.assertEqual(linear.args[8:], (64, 64, 0, False, "tp:0"))
        # A norm that others read too is its own operation. (The second of two here.)
        traced = self.norm_graph(groups=("tp:0", "tp:0"), reads_normed_twice=True)
        names = [name for name in self.targets(traced, "tp:0") if "getitem" not in name]
        self.assertEqual(names, ["nestedfp.reduce_norm_linear.default", "nestedfp.reduce_norm.default",
                                 "nestedfp.linear.default"])
        alone = next(node for node in traced.graph.nodes if "reduce_norm.default" in str(node.target))
        self.assertEqual(alone.args[3:], (1e-5, "tp:0"))
        self.assertEqual({user.args[1]: len(user.users) for user in alone.users}, {0: 2, 1: 1})
        names = " ".join(self.targets(self.norm_graph(groups=("tp:0", "tp:0"), weight_type=torch.float32), "tp:0"))
        self.assertEqual((names.count("vllm.all_reduce"), names.count("fused_add_rms_norm")), (2, 2))
        for group in (None, "tp:1"):  # sums that are not this group's stay vLLM's
            names = [name for name in self.targets(self.norm_graph(groups=("tp:0", None)), group) if "getitem" not in name]
            self.assertEqual(names, ["vllm.all_reduce.default"] + ["nestedfp.norm_linear.default"] * 2)

    def test_where_norms_sum_over_ranks(self):
        from nestedfp.vllm import all_reduce
        from vllm.config import CompilationMode
        from vllm.distributed import parallel_state

        joined = []

        def enabled(ranks=2, mode=CompilationMode.VLLM_COMPILE, custom=SimpleNamespace(disabled=False), name="tp:0"):
            passes = SimpleNamespace(fuse_allreduce_rms=True)
            config = SimpleNamespace(parallel_config=SimpleNamespace(tensor_parallel_size=ranks),
                                     compilation_config=SimpleNamespace(mode=mode, pass_config=passes))
            group = SimpleNamespace(unique_name=name, device_communicator=SimpleNamespace(ca_comm=custom))
            with patch.object(parallel_state, "get_tp_group", lambda: group):
                found = all_reduce.enable(config)
            self.assertEqual(passes.fuse_allreduce_rms, found is None)  # FlashInfer's, of the same sums
            return found

        class Group:
            name = None

            def join(self, group):
                joined.append(group.unique_name)
                self.name = group.unique_name

        with patch.object(all_reduce, "_group", Group()):
            for given in ({"ranks": 1}, {"ranks": 3}, {"mode": CompilationMode.NONE}, {"custom": None},
                          {"custom": SimpleNamespace(disabled=True)}):
                self.assertIsNone(enabled(**given), given)
            self.assertEqual([enabled(), enabled(ranks=4)], ["tp:0", "tp:0"])
            self.assertEqual(joined, ["tp:0"])
            self.assertIsNone(enabled(name="tp:1"))  # another engine's in this process, after that

    def test_which_steps_norms_sum_over_ranks(self):
        from nestedfp.vllm import all_reduce

        summed, joined, normed = [], [], []
        ops = SimpleNamespace(vllm=SimpleNamespace(all_reduce=lambda x, group: summed.append(group) or x + 1),
                              nestedfp=SimpleNamespace(norm_linear=lambda *given: joined.append(given) or given[:2],
                                                       norm=lambda *given: normed.append(given) or given[:2]))
        group = SimpleNamespace(name="tp:0", max_rows=lambda columns: 8192 // columns)
        with patch.object(all_reduce, "_group", group), patch.object(all_reduce.torch, "ops", ops):
            for rows, name in ((128, "tp:0"), (129, "tp:0"), (1, "tp:1")):
                x = torch.zeros(rows, 64)
                all_reduce._reduce_norm_linear(x, x, "w", 1e-5, "u", "l", "s", None, 32, 64, 0, True, name)
                all_reduce._reduce_norm(x, x, "w", 1e-5, name)
        self.assertEqual(summed, ["tp:0", "tp:0", "tp:1", "tp:1"])
        self.assertEqual([(float(given[0].max()), given[2:]) for given in normed],
                         [(0, ("w", 1e-5, True)), (1, ("w", 1e-5, False)), (1, ("w", 1e-5, False))])
        self.assertEqual([given[1:] for given in joined][0][1:], ("w", 1e-5, "u", "l", "s", None, 32, 64, 0, True, True))
        self.assertEqual([given[-1] for given in joined], [True, False, False])
        self.assertEqual([float(given[0].max()) for given in joined], [0, 1, 1])

    def test_norms_join_unless_the_user_has_a_pass(self):
        from nestedfp.vllm import norms
        from vllm.compilation.passes.inductor_pass import InductorPass

        other = norms.JoinNorms()
        for given in ({}, {norms.HOOK: other}):
            compilation = SimpleNamespace(inductor_compile_config=dict(given))
            norms.enable(SimpleNamespace(compilation_config=compilation,
                                         parallel_config=SimpleNamespace(tensor_parallel_size=1)))
            found = compilation.inductor_compile_config[norms.HOOK]
            self.assertIsInstance(found, InductorPass)
            self.assertEqual(found is other, bool(given))
            self.assertEqual(found.uuid(), other.uuid())

    def test_attention_is_ours_for_the_models_that_it_fits_alone(self):
        """In a process in which one runs behind another, too."""
        from nestedfp.vllm import attention, loading
        from vllm.model_executor.model_loader.base_loader import BaseModelLoader
        from vllm.v1.attention.backends import utils
        from vllm.v1.attention.backends.registry import AttentionBackendEnum

        def config(**changes):
            given = {"hybrid": False, "backend": None, "cache_dtype": "auto", "connector": None, "ranks": 1, **changes}
            return SimpleNamespace(
                model_config=SimpleNamespace(is_hybrid=given["hybrid"], dtype=torch.float16),
                attention_config=SimpleNamespace(backend=given["backend"]),
                cache_config=SimpleNamespace(cache_dtype=given["cache_dtype"]), kv_transfer_config=given["connector"],
                parallel_config=SimpleNamespace(decode_context_parallel_size=given["ranks"],
                                                prefill_context_parallel_size=1))

        def is_ours():
            return AttentionBackendEnum.FLASH_ATTN.get_path() == "nestedfp.vllm.attention.Backend"

        loading.install()
        self.addCleanup(attention.withdraw)
        for change in ({"hybrid": True}, {"backend": AttentionBackendEnum.FLASH_ATTN}, {"cache_dtype": "fp8"},
                       {"cache_dtype": "bfloat16"}, {"connector": object()}, {"ranks": 2}):
            for same in ({}, {"cache_dtype": "float16"}):
                attention.enable(config(**same))
                self.assertTrue(is_ours(), change)
                utils.set_kv_cache_layout("HND")  # as vLLM does once it takes ours
            attention.enable(config(**change))
            self.assertFalse(is_ours(), change)
            self.assertIsNone(utils._KV_CACHE_LAYOUT_OVERRIDE)
        seen = []

        class Loader(BaseModelLoader):  # its load_model() is vLLM's
            download_model = load_weights = None

        for quantization, runner, ours in (("nestedfp", "generate", True), (None, "draft", True),
                                           (None, "generate", False)):
            attention.enable(config())
            model = SimpleNamespace(quantization=quantization, runner_type=runner)
            vllm_config = SimpleNamespace(device_config=SimpleNamespace(device="cpu"),
                                          load_config=SimpleNamespace(device=None))
            model.dtype = torch.float16
            with patch("vllm.model_executor.model_loader.base_loader.initialize_model",
                       side_effect=lambda **_: seen.append(is_ours()) or self.fail("no further")), \
                    self.assertRaisesRegex(AssertionError, "no further"):
                Loader(None).load_model(vllm_config, model_config=model)
            self.assertEqual(seen.pop(), ours, (quantization, runner))

    def test_rows_of_gate_and_up_alternate(self):
        from nestedfp.vllm import op, swiglu

        n, k = 48, 8
        weight = torch.arange(n * k).reshape(n, k)
        x = torch.randn(5, k).double()
        ordered = op.interleave(weight)
        for i in range(n // 2):  # as the kernels have it (swiglu_gate_row, layout.h)
            row = i // 8 * 16 + i % 8
            self.assertTrue(torch.equal(ordered[row], weight[i]) and torch.equal(ordered[row + 8], weight[n // 2 + i]))
        self.assertTrue(torch.equal(op.in_order(x @ ordered.double().t()), x @ weight.double().t()))
        self.assertEqual(op.interleave(torch.zeros(n, 1)).shape, (n, 1))
        layer = SimpleNamespace(bias=None)
        self.assertTrue(swiglu.may_join("model.layers.3.mlp.gate_up_proj", [24, 24], layer))
        for prefix, parts, other in (("model.layers.3.mlp.gate_up_proj", [20, 20], layer),
                                     ("model.layers.3.mlp.gate_up_proj", [24, 16], layer),
                                     ("model.layers.3.mlp.experts.gate_up_proj", [24, 24], layer),
                                     ("model.layers.3.self_attn.qkv_proj", [24, 24], layer),
                                     ("model.layers.3.mlp.gate_up_proj", [24, 24], SimpleNamespace(bias=x))):
            self.assertFalse(swiglu.may_join(prefix, parts, other))

    def test_mlps_of_known_forms_leave_their_activation_to_the_product(self):
        from nestedfp.vllm import quantization, swiglu
        from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
        from vllm.model_executor import parameter
        from vllm.model_executor.layers import linear
        from vllm.model_executor.models.llama import LlamaMLP
        from vllm.model_executor.models.qwen2 import Qwen2MLP
        from vllm.utils.torch_utils import set_default_torch_dtype

        config = quantization.NestedFPConfig()
        config.nested = checkpoint.NestedInfo("nestedfp", "F16", "nearest")
        config.prepared = config.joins_swiglu = True
        patches = [patch.object(module, f"get_tensor_model_parallel_{name}", return_value=value)
                   for module in (linear, parameter) for name, value in (("rank", 0), ("world_size", 1))]
        for p in patches:
            p.start()
        try:
            class OtherMLP(LlamaMLP):
                pass

            with set_current_vllm_config(VllmConfig(device_config=DeviceConfig("cpu"))), \
                    set_default_torch_dtype(torch.float16):
                made = [kind(128, 384, "silu", quant_config=config, prefix=f"model.layers.{i}.mlp")
                        for i, kind in enumerate((LlamaMLP, Qwen2MLP, OtherMLP, LlamaMLP))]
        finally:
            for p in patches:
                p.stop()
        for mlp in made[:3]:
            layer = mlp.gate_up_proj
            planes = layer.quant_method.order(layer, layer.weight.data, layer.weight_scale.data)
            self.assertEqual([plane.shape for plane in planes], [(768, 128), (768, 1)])
            self.assertTrue(layer.nestedfp_interleaved)
        self.assertEqual(swiglu.join(torch.nn.ModuleList(made)), 2)
        self.assertEqual([mlp.gate_up_proj.nestedfp_swiglu for mlp in made], [True, True, False, False])
        self.assertEqual([isinstance(mlp.act_fn, torch.nn.Identity) for mlp in made], [True, True, False, False])

    def test_graphs_are_kept_apart_by_precision(self):
        from nestedfp.vllm.op import Step
        from nestedfp.vllm.worker import ByPrecision, forced

        table = ByPrecision()
        for precision in (_library.FP16, _library.FP8):
            with forced(precision):
                self.assertNotIn("key", table)
                table["key"] = precision
        for precision in (_library.FP16, _library.FP8):
            with forced(precision):
                self.assertEqual(table["key"], precision)
        self.assertIsNone(Step.forced)
        self.assertNotIn("key", table)

    def test_graphs_of_both_precisions_with_one_warm_up(self):
        """In vLLM's own code of both runners, without a GPU's graphs."""
        from contextlib import nullcontext
        from unittest.mock import MagicMock, patch

        from nestedfp.vllm import worker
        from nestedfp.vllm.op import Step
        from vllm.config import CUDAGraphMode
        from vllm.v1.worker.gpu import cudagraph_utils
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner

        fp16, fp8 = _library.FP16, _library.FP8
        none, piecewise = CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE
        runs = []

        def create_forward(desc, warmup):
            return (lambda mode: runs.append((desc.num_tokens, mode, warmup, Step.forced, Step.warming_up)),
                    (desc.num_tokens, Step.forced))

        def desc(mode, tokens):
            return cudagraph_utils.BatchExecutionDescriptor(mode, tokens, tokens)

        manager = object.__new__(cudagraph_utils.CudaGraphManager)
        manager.device, manager.pool, manager.graphs = None, None, worker.ByPrecision()
        manager._capture_descs = {mode: [desc(mode, 8), desc(mode, 4)] for mode in (piecewise, CUDAGraphMode.FULL)}
        with patch.object(cudagraph_utils, "graph_capture", lambda **_: nullcontext()), \
                patch.object(cudagraph_utils, "is_global_first_rank", lambda: False), \
                patch("torch.cuda.CUDAGraph", MagicMock), patch("torch.cuda.graph", lambda *_: nullcontext()):
            capture = inspect.unwrap(cudagraph_utils.CudaGraphManager.capture)
            with worker.forced(fp16):  # as the worker leaves it
                states = worker._in_both(capture, manager, create_forward)
            captured, graphs = list(runs), manager.graphs
            runs.clear()
            manager.graphs = worker.ByPrecision()
            others = worker._in_both(capture, manager, create_forward)  # an engine's behind it, with another worker
        self.assertEqual(([run[3:] for run in runs], set(others.values())), ([(None, False)] * 8, {((tokens, None),) * 2 for tokens in (8, 4)}))
        self.assertTrue(all(one in manager.graphs for one in manager._capture_descs[CUDAGraphMode.FULL]))
        runs[:], manager.graphs = captured, graphs
        of_fp8 = []
        for tokens in (8, 4):
            of_fp8 += [(tokens, none, True, fp8, True), (tokens, piecewise, True, fp8, False)]
        for tokens in (8, 4):
            of_fp8 += [(tokens, none, True, fp8, True), (tokens, none, False, fp8, False)]
        of_fp16 = [(tokens, mode, warmup, fp16, False) for tokens, mode, warmup, *_, warming_up in of_fp8 if not warming_up]
        self.assertEqual(runs, of_fp8 + of_fp16)
        self.assertEqual(dict.__len__(manager.graphs), 4)
        for precision in (fp16, fp8):  # a draft model's graphs ask for what the model's of their precision fill
            with worker.forced(precision):
                found = {states[one] for descs in manager._capture_descs.values() for one in descs}
            self.assertEqual(found, {((tokens, precision),) * 2 for tokens in (8, 4)})

        class Runner:
            compilation_config = SimpleNamespace(cudagraph_num_of_warmups=2)
            _warmup_and_capture = GPUModelRunner._warmup_and_capture

            def _dummy_run(self, tokens, is_graph_capturing=False, **_):
                runs.append((is_graph_capturing, Step.forced, Step.warming_up))

            def capture_model(self):
                torch.cuda.empty_cache()  # as torch.cuda.graph()
                self._warmup_and_capture(SimpleNamespace(num_tokens=8, uniform=True, num_active_loras=0),
                                         cudagraph_runtime_mode=piecewise)
                return 7

        runs.clear()
        runner = Runner()
        worker._each_in_both(runner)
        with patch("torch.cuda.empty_cache") as emptied:
            self.assertEqual(runner.capture_model(), 7)
        self.assertEqual(runs, [(False, fp8, True)] * 2 + [(True, fp8, False), (True, fp16, False)])
        self.assertEqual(emptied.call_count, 1)
        self.assertEqual((Step.forced, Step.precisions(5)), (None, (fp16,)))
        with Step.warm_up(), worker.forced(fp8):
            self.assertEqual(Step.precisions(5), (fp16, fp8))

    def in_two_processes(self, code):
        """What each prints, with other addresses and another order of sets."""
        return [subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, text=True,
                               env={**os.environ, "PYTHONHASHSEED": seed}).stdout.splitlines()[-1] for seed in "12"]

    def test_the_compile_cache_s_key_is_the_same_in_every_process(self):
        keys = self.in_two_processes("""
import torch
from nestedfp.vllm import quantization
from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
config = VllmConfig(device_config=DeviceConfig("cpu"))
before = config.compute_hash()
with set_current_vllm_config(config):
    quantization.NestedFPConfig()._prepare(torch.float16)
print(config.compute_hash(), config.compute_hash() != before)
""")
        self.assertEqual(keys[0], keys[1])
        self.assertIn("True", keys[0])

    def test_other_quantizations_are_not_imported_for_ours(self):
        found = self.in_two_processes("""
import sys
import nestedfp.vllm
nestedfp.vllm.register()
nestedfp.vllm.register()
from vllm.model_executor.model_loader import weight_utils
ours = weight_utils.get_quantization_config("nestedfp").__name__
imported = "vllm.model_executor.layers.quantization.gguf" in sys.modules
print(ours, imported, weight_utils.get_quantization_config("fp8").__name__)
""")
        self.assertEqual(found, ["NestedFPConfig False Fp8Config"] * 2)

    def mixture_layer(self, config, world=1, rank=0, prefix="model.layers.0.mlp.experts", expert_parallel=False, **fields):
        """vLLM's layer of make_models.py's experts, on the CPU."""

        from make_models import EXPERT_FFN, EXPERTS, HIDDEN, TOP
        from vllm.config import DeviceConfig, ParallelConfig, VllmConfig, set_current_vllm_config
        from vllm.model_executor.layers.fused_moe import FusedMoE, unquantized_fused_moe_method
        from vllm.model_executor.layers.fused_moe import config as moe_config

        stock = (unquantized_fused_moe_method.UnquantizedMoeBackend.CPU, None)  # else it looks for a GPU
        parallel = ParallelConfig(enable_expert_parallel=expert_parallel)
        with patch.object(moe_config, "get_tensor_model_parallel_rank", return_value=rank), \
                patch.object(unquantized_fused_moe_method, "select_unquantized_moe_backend", return_value=stock), \
                set_current_vllm_config(VllmConfig(device_config=DeviceConfig("cpu"), parallel_config=parallel)):
            given = {"num_experts": EXPERTS, "top_k": TOP, "hidden_size": HIDDEN, "intermediate_size": EXPERT_FFN,
                     "params_dtype": torch.float16, "tp_size": world, "dp_size": 1, "pcp_size": 1, **fields}
            return FusedMoE(quant_config=config, prefix=prefix, **given)

    def nested_config(self, nested=True):
        from nestedfp.vllm import op, quantization

        op.register()
        config = quantization.NestedFPConfig()
        config.nested = checkpoint.NestedInfo("nestedfp", "F16", "nearest") if nested else None
        config.prepared = True
        return config

    def test_which_mixtures_are_nested(self):
        from nestedfp.vllm import fused_moe
        from vllm.model_executor.layers.fused_moe import UnquantizedFusedMoEMethod

        sys.path.insert(0, str(HERE))
        config = self.nested_config(nested=False)
        layer = self.mixture_layer(config)
        self.assertIsInstance(layer.quant_method, fused_moe.NestedOnlineExpertsMethod)
        self.assertEqual({name: (tuple(p.shape), p.device.type) for name, p in layer.named_parameters()},
                         {"w13_weight": ((8, 192, 128), "meta"), "w2_weight": ((8, 128, 96), "meta")})
        self.assertEqual(layer.quant_method.topk_indices_dtype, torch.int32)
        self.assertFalse(layer.quant_method.is_monolithic)
        self.assertIsNone(layer.maybe_init_modular_kernel())
        refused = {"bias": {"has_bias": True}, "swigluoai": {"activation": "swigluoai"},
                   "gated silu": {"activation": "relu2"},
                   "router": {"apply_router_weight_on_input": True}, "limited": {"swiglu_limit": 7.0},
                   "multiple of 8": {"intermediate_size": 100}, "more than 512": {"num_experts": 600}}
        for i, (reason, fields) in enumerate(refused.items()):
            with self.assertLogs("vllm.nestedfp", "INFO") as logs:
                layer = self.mixture_layer(config, prefix=f"refused.{i}.mlp.experts", **fields)
            self.assertIsInstance(layer.quant_method, UnquantizedFusedMoEMethod, reason)
            self.assertRegex(logs.output[0], f"refused.{i}.mlp.experts stays dense: .*{reason}")
            with self.assertRaisesRegex(ValueError, reason):
                self.mixture_layer(self.nested_config(), **fields)

    def test_experts_that_are_given_to_their_layer(self):
        """As vLLM's backend for transformers does it, past the parameters: one by one or all as one tensor, other ranks'
        too."""
        from nestedfp.vllm import experts, fused_moe, op
        from vllm.model_executor.layers.fused_moe import fused_moe_make_expert_params_mapping

        sys.path.insert(0, str(HERE))
        from make_models import EXPERT_FFN, EXPERTS, HIDDEN

        mapping = [("experts.w13_weight", "experts.gate_up_proj", 0, "w1"),
                   ("experts.w13_weight", "experts.gate_up_proj", 1, "w3"),
                   ("experts.w2_weight", "experts.down_proj", 0, "w2"),
                   *fused_moe_make_expert_params_mapping(torch.nn.Module(), "gate_proj", "down_proj", "up_proj",
                                                         EXPERTS)]
        gate_up = torch.randn(EXPERTS, 2 * EXPERT_FFN, HIDDEN).half()
        down = torch.randn(EXPERTS, HIDDEN, EXPERT_FFN).half()
        gate, up = gate_up.chunk(2, dim=1)
        one_by_one = [(f"{e}.{name}.weight", tensor[e]) for e in range(EXPERTS)
                      for name, tensor in (("down_proj", down), ("gate_proj", gate), ("up_proj", up))]
        nested = []

        def nest(weight, *_):
            nested.append(weight.clone())
            return SimpleNamespace(bytes=weight.clone(), scale=torch.empty(0), dense={}, experts=len(weight))

        for given in (one_by_one, [("gate_up_proj", gate_up), ("down_proj", down)]):
            for world, rank in ((1, 0), (2, 0), (2, 1)):
                with patch.object(op, "self_test"), patch.object(op, "device"), patch.object(experts, "nest", nest), \
                        patch.object(experts, "Mixture"):
                    layer = self.mixture_layer(self.nested_config(nested=False), world, rank, expert_parallel=world > 1,
                                               expert_mapping=mapping)
                    self.assertIsInstance(layer.quant_method, fused_moe.NestedOnlineExpertsMethod)
                    read = list(layer.load_weights(given))
                here = slice(rank * EXPERTS // world, (rank + 1) * EXPERTS // world)
                self.assertEqual(set(read), {"w13_weight", "w2_weight"})
                for found, wanted in zip(nested, (gate_up, down)):
                    self.assertTrue(torch.equal(found, wanted[here]), (world, rank))
                self.assertEqual(len(nested), 2)
                nested.clear()

    def test_what_a_checkpoint_keeps_dense(self):
        from nestedfp.vllm import fused_moe, quantization
        from vllm.model_executor.layers.fused_moe import UnquantizedFusedMoEMethod
        from vllm.model_executor.layers.linear import ReplicatedLinear

        sys.path.insert(0, str(HERE))
        config = self.nested_config()
        config.ignore = ["model.layers.1.mlp.experts.0.gate_proj", "model.layers.1.mlp.shared_expert.gate_proj",
                         "model.layers.1.mlp.shared_expert.up_proj"]
        for number, kind in ((0, fused_moe.NestedCheckpointExpertsMethod), (1, UnquantizedFusedMoEMethod),
                             (11, fused_moe.NestedCheckpointExpertsMethod)):
            layer = self.mixture_layer(config, prefix=f"model.layers.{number}.mlp.experts")
            self.assertIsInstance(layer.quant_method, kind)
        self.assertTrue(config._is_dense_in_checkpoint("model.layers.1.mlp.shared_expert.gate_up_proj"))
        self.assertFalse(config._is_dense_in_checkpoint("model.layers.0.mlp.shared_expert.gate_up_proj"))
        config.ignore += ["model.layers.1.mlp.gate_up_proj"]  # as in Phi-3's checkpoints
        self.assertTrue(config._is_dense_in_checkpoint("model.layers.1.mlp.gate_up_proj"))
        self.assertFalse(config._is_dense_in_checkpoint("model.layers.0.mlp.gate_up_proj"))
        self.assertTrue(config._is_dense_in_checkpoint("draft_model.model.layers.1.mlp.shared_expert.gate_up_proj"))
        source = Path(vllm.__file__).parent / "v1/spec_decode/draft_model.py"
        self.assertIn('prefix="draft_model"', source.read_text())
        for given in (config, self.nested_config(nested=False)):
            router = ReplicatedLinear.__new__(ReplicatedLinear)
            torch.nn.Module.__init__(router)
            router.params_dtype = torch.float16
            for name in ("mlp.gate", "block_sparse_moe.gate", "feed_forward.router"):
                self.assertIsInstance(given.get_quant_method(router, f"model.layers.0.{name}"),
                                      quantization.UnquantizedLinearMethod)

    @unittest.skipUnless((Path(sys.executable).parent / "nestedfp").exists(), "the package is not installed")
    def test_experts_planes_are_cut_as_weights_are(self):
        """By columns and rows for tensor parallelism, whole for expert parallelism: against libnestedfp's planes."""
        folder = Path(tempfile.mkdtemp())
        try:
            for family, parts in (("qwen3_moe", ("gate_proj", "up_proj", "down_proj")), ("mixtral", ("w1", "w3", "w2"))):
                nested = nested_model(folder, family)
                upper = tensors(next(nested.glob("model-*.safetensors")))
                lower = tensors(next((nested / "nestedfp").glob("*.safetensors")))
                source = tensors(folder / family / "model.safetensors")
                stem = f"model.layers.0.{'block_sparse_moe' if family == 'mixtral' else 'mlp'}.experts"
                for world, rank, spread in ((1, 0, False), (2, 0, False), (2, 1, False), (2, 0, True), (2, 1, True)):
                    layer = self.mixture_layer(self.nested_config(), world, rank, stem, spread)
                    self.load_experts(layer, stem, parts, upper, lower)
                    self.check_experts(layer, stem, parts, source, world, rank, spread)
        finally:
            shutil.rmtree(folder)

    def load_experts(self, layer, stem, parts, upper, lower):
        """As models' load_weights() do it."""
        for e in range(layer.global_num_experts):
            for part, shard in zip(parts, ("w1", "w3", "w2")):
                name = "w2" if shard == "w2" else "w13"
                for suffix, values in (("weight", upper), ("weight_scale", upper), ("weight_lower", lower)):
                    tensor = torch.from_numpy(values[f"{stem}.{e}.{part}.{suffix}"].copy())
                    if suffix == "weight":
                        tensor = tensor.view(torch.float8_e4m3fn)
                    target = getattr(layer, f"{name}_{suffix}")
                    here = target.weight_loader(target, tensor, f"{stem}.{name}_{suffix}", shard_id=shard, expert_id=e,
                                                return_success=True)
                    self.assertEqual(here, layer.expert_map is None or int(layer.expert_map[e]) >= 0)

    def assert_planes(self, upper, lower, scale, expected):
        """Those of expected, bit for bit, and that they are the weights."""
        import nestedfp

        for got, wanted in zip((upper, lower, exponents_of(scale)), expected):
            np.testing.assert_array_equal(got, wanted)
        joined = nestedfp.join(nestedfp.Planes(upper, lower, exponents_of(scale), "float16"))
        np.testing.assert_array_equal(joined.view(np.uint16), expected[3].view(np.uint16))

    def check_experts(self, layer, stem, parts, source, world, rank, spread):
        count = layer.global_num_experts // (world if spread else 1)
        self.assertEqual(layer.local_num_experts, count)
        for local in range(count):
            expert = local + (rank * count if spread else 0)
            if spread:
                self.assertEqual(int(layer.expert_map[expert]), local)
            gate, up, down = (source[f"{stem}.{expert}.{part}.weight"] for part in parts)
            size = gate.shape[0] if spread else gate.shape[0] // world
            begin = 0 if spread else rank * size
            for name, whole, cut in (("w13", [gate, up], lambda w: w[begin:begin + size]),
                                     ("w2", [down], lambda w: w[:, begin:begin + size])):
                self.assert_planes(getattr(layer, f"{name}_weight")[local].view(torch.uint8).numpy(),
                                   getattr(layer, f"{name}_weight_lower")[local].numpy(),
                                   getattr(layer, f"{name}_weight_scale")[local], parts_of(whole, cut))

    @unittest.skipUnless((Path(sys.executable).parent / "nestedfp").exists(), "the package is not installed")
    def test_planes_are_cut_as_weights_are(self):
        """Fused q/k/v and gate/up, and slices for two GPUs, against what libnestedfp makes of the source's matrices; and
        a group that a checkpoint keeps dense."""
        folder = Path(tempfile.mkdtemp())
        try:
            for family in ("llama", "qwen2", "mistral"):
                nested = nested_model(folder, family)
                ignore = json.loads((nested / "config.json").read_text())["quantization_config"]["ignore"]
                upper = tensors(next(nested.glob("model-*.safetensors")))
                lower = tensors(next((nested / "nestedfp").glob("*.safetensors")))
                source = tensors(folder / family / "model.safetensors")
                dense = {self.check_slices(layer, ignore, source, upper, lower, world, rank)
                         for layer in (0, 1) for world in (1, 2) for rank in range(world)}
                dense_groups = ("model.layers.1.mlp.gate_up_proj",) if family == "mistral" else ()
                self.assertEqual(dense, {(), dense_groups})
        finally:
            shutil.rmtree(folder)

    def check_slices(self, number, ignore, source, upper, lower, world, rank):
        """The names of the layers that stay dense."""

        from make_models import FFN, HEAD, HEADS, HIDDEN, KV_HEADS
        from nestedfp.vllm import quantization
        from vllm.model_executor import parameter
        from vllm.model_executor.layers import linear

        config = self.nested_config()
        config.ignore = ignore
        names = ("get_tensor_model_parallel_rank", "get_tensor_model_parallel_world_size")
        patches = [patch.object(module, name, return_value=value)
                   for module in (linear, parameter) for name, value in zip(names, (rank, world))]
        for p in patches:
            p.start()
        dense = []
        try:
            stem = f"model.layers.{number}."

            def common(name):
                return {"bias": False, "params_dtype": torch.float16, "quant_config": config, "prefix": stem + name}

            made = {"self_attn.qkv_proj": linear.QKVParallelLinear(HIDDEN, HEAD, HEADS, KV_HEADS,
                                                                   **common("self_attn.qkv_proj")),
                    "mlp.gate_up_proj": linear.MergedColumnParallelLinear(HIDDEN, [FFN] * 2, **common("mlp.gate_up_proj")),
                    "mlp.down_proj": linear.RowParallelLinear(FFN, HIDDEN, **common("mlp.down_proj"))}
            parts = {"self_attn.qkv_proj": [("self_attn.q_proj", "q"), ("self_attn.k_proj", "k"), ("self_attn.v_proj", "v")],
                     "mlp.gate_up_proj": [("mlp.gate_proj", 0), ("mlp.up_proj", 1)], "mlp.down_proj": [("mlp.down_proj", None)]}

            def cut(matrix):
                axis = 1 if name == "mlp.down_proj" else 0
                return np.split(matrix, world, axis)[rank]

            for name, module in made.items():
                weights = [source[f"{stem}{part}.weight"] for part, _ in parts[name]]
                nested = isinstance(module.quant_method, quantization.NestedCheckpointLinearMethod)
                for part, shard in parts[name]:
                    found = {"weight": upper[f"{stem}{part}.weight"]}
                    if nested:
                        found.update(weight_lower=lower[f"{stem}{part}.weight_lower"],
                                     weight_scale=upper[f"{stem}{part}.weight_scale"])
                    for suffix, values in found.items():
                        tensor, target = torch.from_numpy(values.copy()), getattr(module, suffix)
                        if tensor.dtype == torch.uint8 and suffix == "weight":
                            tensor = tensor.view(torch.float8_e4m3fn)
                        target.weight_loader(target, tensor, *([] if shard is None else [shard]))
                if nested:
                    self.assert_planes(module.weight.view(torch.uint8).numpy(), module.weight_lower.numpy(),
                                       module.weight_scale, parts_of(weights, cut))
                else:
                    dense.append(stem + name)
                    self.assertIsInstance(module.quant_method, quantization.UnquantizedLinearMethod)
                    expected = np.concatenate([cut(weight) for weight in weights])
                    np.testing.assert_array_equal(module.weight.detach().numpy().view(np.uint16), expected.view(np.uint16))
        finally:
            for p in patches:
                p.stop()
        return tuple(dense)


if __name__ == "__main__":
    unittest.main(verbosity=1)
