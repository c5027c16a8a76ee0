"""What the plugin refuses, and that it says so before weights are read. Needs no GPU; some of it needs vLLM."""

import dataclasses
import json
import os
import struct
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

from nestedfp import _library
from nestedfp.vllm import checkpoint, limits, requests, versions

try:
    import torch
    import vllm  # noqa: F401

    HAVE_VLLM = True
except ImportError:
    HAVE_VLLM = False

# A vLLM that has what it offers to plugins and nothing else, and what it then does with a model.
OTHER_VLLM = {
    "vllm/__init__.py": "__version__ = '0.31.0'",
    "vllm/model_executor/__init__.py": "",
    "vllm/model_executor/layers/__init__.py": "",
    "vllm/model_executor/layers/quantization/__init__.py": """
METHODS = {}
def register_quantization_config(name):
    return lambda made: METHODS.setdefault(name, made)
""",
    "vllm/model_executor/layers/quantization/base_config.py": """
from abc import ABC, abstractmethod
class QuantizationConfig(ABC):
    @abstractmethod
    def something_new(self): ...
""",
}
ASK = """
import sys
from types import SimpleNamespace
import nestedfp.vllm
nestedfp.vllm.register()
from vllm.model_executor.layers.quantization import METHODS
made = METHODS["nestedfp"]
nested, ordinary = SimpleNamespace(nestedfp={"version": 1}), SimpleNamespace()
assert made.override_quantization_method({}, None, hf_config=ordinary) is None
assert made.override_quantization_method({}, "compressed-tensors", hf_config=nested) is None  # its upper bytes alone
assert made.override_quantization_method({}, "fp8") is None
for ask in (made, lambda: made.from_config({}), lambda: made.override_quantization_method({}, "nestedfp"),
            lambda: made.override_quantization_method({}, None, hf_config=nested)):
    try:
        ask()
    except ValueError as error:
        print(error)
    else:
        sys.exit("it was not refused")
"""


class OtherVersions(unittest.TestCase):
    def ask(self, installed=True, **environment):
        with tempfile.TemporaryDirectory() as folder:
            files = dict(OTHER_VLLM)
            if installed:
                files["vllm-0.31.0.dist-info/METADATA"] = "Metadata-Version: 2.1\nName: vllm\nVersion: 0.31.0\n"
            for name, text in files.items():
                (Path(folder) / name).parent.mkdir(parents=True, exist_ok=True)
                (Path(folder) / name).write_text(text)
            path = os.pathsep.join((folder, *filter(None, sys.path)))
            environment = {**os.environ, "PYTHONPATH": path, **environment}
            done = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True, env=environment, cwd=folder)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done

    def test_a_model_that_asks_for_nestedfp_is_refused(self):
        for installed in (True,) if HAVE_VLLM else (True, False):  # where none is in the way
            done = self.ask(installed)
            for line in done.stdout.splitlines():
                self.assertRegex(line, r"tested with vLLM 0\.23\.x, and this is 0\.31\.0.*NESTEDFP_ANY_VLLM=1")
            self.assertEqual(len(done.stdout.splitlines()), 4)
            self.assertEqual(done.stderr.count("0.31.0"), 1)  # a warning

    def test_one_that_was_tried_all_the_same_and_does_not_fit(self):
        done = self.ask(NESTEDFP_ANY_VLLM="1")
        self.assertRegex(done.stdout, "does not fit vLLM 0.31.0: ")

    @unittest.skipUnless(HAVE_VLLM, "needs torch and vLLM")
    def test_in_a_vllm_that_is_whole(self):
        import nestedfp.vllm
        from nestedfp.vllm.quantization import NestedFPConfig
        from vllm.model_executor.layers.quantization import get_quantization_config

        try:
            with patch.object(versions, "installed_vllm", return_value="0.22.1"):
                nestedfp.vllm.register()
            with self.assertRaisesRegex(ValueError, "this is 0.22.1"):
                get_quantization_config("nestedfp").from_config({})
        finally:
            nestedfp.vllm.register()
        self.assertIs(get_quantization_config("nestedfp"), NestedFPConfig)


# A vLLM that lacks what the plugin looks for last. In a process of its own: what was put into vLLM stays there.
HALF = """
from unittest.mock import patch
import nestedfp.vllm
from nestedfp.vllm import metrics
from vllm.model_executor.model_loader import weight_utils
with patch.object(metrics, "install_logger", side_effect=ImportError("no loggers")):
    nestedfp.vllm.register()
try:
    weight_utils.get_quantization_config("nestedfp").from_config({})
except ValueError as error:
    print(error)
"""


class HalfAPlugin(unittest.TestCase):
    @unittest.skipUnless(HAVE_VLLM, "needs torch and vLLM")
    def test_what_does_not_fit_whole_is_refused_where_weights_are_read(self):
        path = os.pathsep.join(filter(None, sys.path))
        done = subprocess.run([sys.executable, "-c", HALF], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path})
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertRegex(done.stdout, "does not fit vLLM .*: no loggers")


class OtherDevices(unittest.TestCase):
    def check(self, capability, cuda=True, build=b"cuda"):
        if capability is not None:
            major, minor = capability
            capability = SimpleNamespace(major=major, minor=minor, to_int=lambda: 10 * major + minor)
        platform = SimpleNamespace(is_cuda=lambda: cuda, get_device_capability=lambda: capability)
        modules = {"vllm": SimpleNamespace(), "vllm.platforms": SimpleNamespace(current_platform=platform)}
        library = SimpleNamespace(nfp_build=lambda: build)
        with patch.dict(sys.modules, modules), patch.object(_library, "library", lambda: library):
            versions.check_gpu()

    def test_only_hopper(self):
        self.check((9, 0))
        for capability, found in (((8, 9), "8.9"), ((10, 0), "10.0"), (None, "none")):
            with self.assertRaisesRegex(ValueError, f"capability 9.0 .*this one has {found}"):
                self.check(capability)
        with self.assertRaisesRegex(ValueError, "NVIDIA GPU"):
            self.check((9, 0), cuda=False)
        with self.assertRaisesRegex(ValueError, "no CUDA kernels"):
            self.check((9, 0), build=b"cpu")


class Requests(unittest.TestCase):
    """Fields that a server cannot give are errors for whoever sends them."""

    def config(self, worker=limits.WORKER, policy="threshold:1024", executor="mp", quantization="nestedfp"):
        return SimpleNamespace(
            parallel_config=SimpleNamespace(worker_cls=worker, distributed_executor_backend=executor),
            model_config=SimpleNamespace(quantization=quantization), additional_config={"nestedfp": {"policy": policy}})

    def check(self, refused, config, **extra):
        if refused is None:
            requests.check(extra, config)
        else:
            with self.assertRaisesRegex(ValueError, refused):
                requests.check(extra, config)

    def test_without_the_scheduler(self):
        stock = self.config("auto")
        for extra in ({}, {"nestedfp_precision": "auto"}, {"slo_ttft_ms": None}, {"another": "field"}):
            self.check(None, stock, **extra)
        needs = "needs nestedfp's scheduler and worker"
        for extra in ({"nestedfp_precision": "exact"}, {"nestedfp_precision": "fast"}, {"slo_ttft_ms": 5}, {"slo_tpot_ms": 5}):
            self.check(f"^{next(iter(extra))}: .*{needs}", stock, **extra)
        # All steps are what the request wants.
        self.check(None, self.config("auto", "fp16"), nestedfp_precision="exact")
        self.check(needs, self.config("auto", "fp16"), nestedfp_precision="fast")
        self.check(None, self.config("auto", "fp8"), nestedfp_precision="fast")
        self.check(needs, self.config("auto", "fp8-w8a8"), nestedfp_precision="exact")

    def test_with_it(self):
        ours = self.config()
        for tier in ("exact", "fast", "auto"):
            self.check(None, ours, nestedfp_precision=tier, slo_ttft_ms=500, slo_tpot_ms="20")
        for tier in ("exakt", "", 1, ["exact"]):
            self.check("^nestedfp_precision: .* is none of auto, exact, fast", ours, nestedfp_precision=tier)
        self.check("^slo_tpot_ms: -1 is no positive number", ours, slo_tpot_ms=-1)
        self.check("^slo_ttft_ms: .*external_launcher", self.config(executor="external_launcher"), slo_ttft_ms=500)

    def test_vllm_asks_before_a_request_goes_to_the_engine(self):
        if HAVE_VLLM:
            from vllm.v1.engine import input_processor as module
        else:
            module = SimpleNamespace()

        class InputProcessor:
            def __init__(self, config):
                self.vllm_config, self.model_config, self.seen = config, config.model_config, []

            def _validate_params(self, params, supported_tasks):
                self.seen.append(supported_tasks)

        names = ["vllm", "vllm.v1", "vllm.v1.engine"]
        modules = {} if HAVE_VLLM else {name: SimpleNamespace() for name in names}
        modules["vllm.v1.engine.input_processor"] = module
        exact = SimpleNamespace(extra_args={"nestedfp_precision": "exact"})
        with patch.dict(sys.modules, modules), patch.object(module, "InputProcessor", InputProcessor, create=not HAVE_VLLM):
            requests.install()
            requests.install()
        made = InputProcessor(self.config("auto"))
        with self.assertRaisesRegex(ValueError, "nestedfp_precision"):
            made._validate_params(exact, ("generate",))
        made._validate_params(SimpleNamespace(extra_args=None), supported_tasks=("generate",))
        made._validate_params(SimpleNamespace(), ("embed",))  # PoolingParams have none
        self.assertEqual(made.seen, [("generate",), ("generate",), ("embed",)])
        InputProcessor(self.config("auto", quantization="fp8"))._validate_params(exact, ("generate",))  # as without us

    @unittest.skipUnless(HAVE_VLLM, "needs torch and vLLM")
    def test_vllm_s_own_has_what_is_called(self):
        import inspect

        from vllm.v1.engine.input_processor import InputProcessor

        self.assertEqual(list(inspect.signature(InputProcessor._validate_params).parameters)[:2], ["self", "params"])


class LoadFormats(unittest.TestCase):
    def test_formats_that_would_leave_planes_unread(self):
        for good in ("auto", "hf", "safetensors", "fastsafetensors"):
            checkpoint.check_load_format(good, True)
            checkpoint.check_load_format(good, False)
        for good in ("dummy", "pt", "runai_streamer"):
            checkpoint.check_load_format(good, False)
            with self.assertRaisesRegex(ValueError, f"--load-format {good}: .*nested checkpoint with auto"):
                checkpoint.check_load_format(good, True)
        for bad in ("runai_streamer_sharded", "sharded_state", "tensorizer", "bitsandbytes", "gguf", "my_own"):
            for nested in (True, False):
                with self.assertRaisesRegex(ValueError, f"--load-format {bad}"):
                    checkpoint.check_load_format(bad, nested)

    @unittest.skipUnless(HAVE_VLLM, "needs torch and vLLM")
    def test_each_of_vllm_s_is_known(self):
        from vllm.model_executor.model_loader import _LOAD_FORMAT_TO_MODEL_LOADER, DefaultModelLoader

        for name in checkpoint._NESTED_FORMATS:
            self.assertIs(_LOAD_FORMAT_TO_MODEL_LOADER[name], DefaultModelLoader)
        self.assertLessEqual(set(checkpoint._ORDINARY_FORMATS), set(_LOAD_FORMAT_TO_MODEL_LOADER))

    @unittest.skipUnless(HAVE_VLLM, "needs torch and vLLM")
    def test_a_model_that_is_being_made(self):
        from nestedfp.vllm.quantization import NestedFPConfig
        from vllm.config import DeviceConfig, LoadConfig, VllmConfig, set_current_vllm_config

        config = NestedFPConfig()
        for nested, load_format in ((checkpoint.NestedInfo("nestedfp", "F16", "nearest"), "runai_streamer"),
                                    (None, "sharded_state")):
            config.nested = nested
            made = VllmConfig(device_config=DeviceConfig("cpu"), load_config=LoadConfig(load_format=load_format))
            for _ in range(2):  # and no second layer goes through
                with set_current_vllm_config(made), self.assertRaisesRegex(ValueError, f"--load-format {load_format}"):
                    config._prepare(torch.float16)


def write(path, tensors):
    """A safetensors file of bytes: name -> (dtype, shape)."""
    header, at = {}, 0
    for name, (dtype, shape) in tensors.items():
        size = shape[0] * shape[1]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(range(at % 256)) + bytes(at - at % 256))


@unittest.skipUnless(HAVE_VLLM, "needs torch and vLLM")
class LowerBytes(unittest.TestCase):
    def begin(self, folder, dtype="float16", nested=True, **fields):
        from vllm.config import LoadConfig
        from vllm.model_executor.model_loader import DefaultModelLoader

        checkpoint.install_loader()
        hf_config = SimpleNamespace(nestedfp={"version": 1, "lower": "nestedfp", **fields} if nested else None)
        config = SimpleNamespace(hf_config=hf_config, quantization="nestedfp", model=folder, revision=None,
                                 dtype=getattr(torch, dtype))
        return DefaultModelLoader(LoadConfig()).get_all_weights(config, SimpleNamespace())

    def read(self, *where, **fields):
        return [name for name, _ in self.begin(*where, **fields)]

    def test_they_come_last_and_must_be_there(self):
        with tempfile.TemporaryDirectory() as folder:
            write(Path(folder) / "model-1.safetensors", {"a.weight": ("F8_E4M3", (3, 5)), "b.weight": ("U8", (2, 2))})
            lower = Path(folder) / "nestedfp" / "lower-1.safetensors"
            with self.assertRaisesRegex(ValueError, r"the lower bytes \(nestedfp/\*.safetensors\) are missing"):
                self.begin(folder)  # no such folder
            lower.parent.mkdir()
            with self.assertRaisesRegex(ValueError, r"the lower bytes \(nestedfp/\*.safetensors\) are missing"):
                self.begin(folder)  # an empty one
            write(lower, {"b.weight_lower": ("U8", (3, 5))})
            with self.assertRaisesRegex(ValueError, "'a.weight_lower' is missing"):
                self.begin(folder)
            write(lower, {"a.weight_lower": ("U8", (3, 5))})
            names = self.read(folder)
            self.assertEqual((set(names[:2]), names[2:]), ({"a.weight", "b.weight"}, ["a.weight_lower"]))

    def test_another_checkpoint_s_are_joined_as_the_first_one_s(self):
        """Where weights are read again, from a folder that vLLM was not started with."""
        with tempfile.TemporaryDirectory() as folder:
            write(Path(folder) / "model.safetensors", {"a.weight": ("F8_E4M3", (3, 5))})
            write(Path(folder) / "nestedfp" / "lower.safetensors", {"a.weight_lower": ("U8", (3, 5))})
            f16, bf16, free, restricted = {}, {"source_dtype": "BF16"}, {"uppers": "free"}, {"uppers": "restricted"}
            for ours, theirs, dtype, why in ((f16, f16, "float16", None), (f16, restricted, "float16", None),
                                             (f16, free, "float16", "join"), (restricted, free, "float16", "join"),
                                             (free, f16, "float16", None), (f16, bf16, "float16", None),
                                             (bf16, bf16, "bfloat16", None), (bf16, f16, "bfloat16", "FP16 weights")):
                text = json.dumps({"nestedfp": {"version": 1, "lower": "nestedfp", **theirs}})
                (Path(folder) / "config.json").write_text(text)
                if why is None:
                    self.assertEqual(self.read(folder, dtype, **ours), ["a.weight", "a.weight_lower"])
                else:
                    with self.assertRaisesRegex(ValueError, f"config.json: .*{why}.*start "):
                        self.begin(folder, dtype, **ours)
            with self.assertRaisesRegex(ValueError, "config.json: this is a nested checkpoint.*started with an ordinary one"):
                self.begin(folder, nested=False)
            (Path(folder) / "config.json").write_text("{}")
            self.assertEqual(self.read(folder, nested=False), ["a.weight"])


def configuration(settings=None, moe=False, data_parallel=1, executor=None, ubatching=False,
                  scheduler="nestedfp.vllm.scheduler.Scheduler"):
    parallel = SimpleNamespace(use_ubatching=ubatching, data_parallel_size=data_parallel,
                               distributed_executor_backend=executor)
    return SimpleNamespace(parallel_config=parallel, model_config=SimpleNamespace(is_moe=moe),
                           scheduler_config=SimpleNamespace(scheduler_cls=scheduler),
                           additional_config={"nestedfp": settings or {}})


class PrecisionPerStep(unittest.TestCase):
    def test_options_that_do_not_go_with_it(self):
        for good in (configuration(), configuration(moe=True), configuration(data_parallel=2),
                     configuration(executor="external_launcher"), configuration({"slo_tpot_ms": 20}, executor="mp")):
            limits.check(good)
        for bad, option in ((configuration(ubatching=True), "--enable-dbo"),
                            (configuration(moe=True, data_parallel=2), "--data-parallel-size"),
                            (configuration({"slo_tpot_ms": 20}, executor="external_launcher"), "external_launcher"),
                            (configuration({"slo_ttft_ms": 20}, executor="external_launcher"), "external_launcher")):
            with self.assertRaisesRegex(ValueError, option):
                limits.check(bad)

    @unittest.skipUnless(HAVE_VLLM, "needs torch and vLLM")
    def test_they_are_looked_at_by_the_worker(self):
        from nestedfp.vllm.worker import Worker

        made = Worker.__new__(Worker)
        for bad, option in ((configuration(ubatching=True), "--enable-dbo"),
                            (configuration(scheduler=None), "--scheduler-cls nestedfp.vllm.scheduler.Scheduler")):
            made.vllm_config = bad
            made.vllm_config.model_config.quantization = "nestedfp"
            with self.assertRaisesRegex(ValueError, option):
                made.init_device()

    @unittest.skipUnless(HAVE_VLLM, "needs torch and vLLM")
    def test_their_names_are_vllm_s(self):
        from vllm.config import ModelConfig, ParallelConfig, SchedulerConfig

        self.assertIn("scheduler_cls", {field.name for field in dataclasses.fields(SchedulerConfig)})
        parallel = ParallelConfig()
        self.assertEqual((parallel.use_ubatching, parallel.data_parallel_size), (False, 1))
        self.assertTrue(ParallelConfig(enable_dbo=True, all2all_backend="deepep_low_latency").use_ubatching)
        self.assertIsNotNone(parallel.distributed_executor_backend)
        self.assertIsInstance(ModelConfig.is_moe, property)


class Offload(unittest.TestCase):
    def test_weights_that_are_moved_to_the_host(self):
        def config(gib=0, group=0):
            return SimpleNamespace(offload_config=SimpleNamespace(uva=SimpleNamespace(cpu_offload_gb=gib),
                                                                  prefetch=SimpleNamespace(offload_group_size=group)))

        limits.check_offload(config())
        limits.check_offload(SimpleNamespace())
        for bad, option in ((config(gib=0.5), "--cpu-offload-gb"), (config(group=8), "--offload-group-size")):
            with self.assertRaisesRegex(ValueError, option):
                limits.check_offload(bad)

    @unittest.skipUnless(HAVE_VLLM, "needs torch and vLLM")
    def test_the_names_are_vllm_s(self):
        from nestedfp.vllm.quantization import NestedFPConfig
        from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
        from vllm.config.offload import OffloadConfig, PrefetchOffloadConfig, UVAOffloadConfig

        for offload, option in ((OffloadConfig(uva=UVAOffloadConfig(cpu_offload_gb=1)), "--cpu-offload-gb"),
                                (OffloadConfig(prefetch=PrefetchOffloadConfig(offload_group_size=4)), "--offload-group-size")):
            config = VllmConfig(device_config=DeviceConfig("cpu"), offload_config=offload)
            with set_current_vllm_config(config), self.assertRaisesRegex(ValueError, option):
                NestedFPConfig()._prepare(torch.float16)


class BatchInvariance(unittest.TestCase):
    def test_results_that_depend_on_the_batch(self):
        limits.check_batch_invariance(False)
        with self.assertRaisesRegex(ValueError, "VLLM_BATCH_INVARIANT=1: .*leave it out"):
            limits.check_batch_invariance(True)

    @unittest.skipUnless(HAVE_VLLM, "needs torch and vLLM")
    def test_of_a_model_that_is_being_made(self):
        from nestedfp.vllm.quantization import NestedFPConfig
        from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config

        for value in ("0", "1"):
            with patch.dict(os.environ, {"VLLM_BATCH_INVARIANT": value}), \
                    set_current_vllm_config(VllmConfig(device_config=DeviceConfig("cpu"))):
                if value == "0":
                    NestedFPConfig()._prepare(torch.float16)
                else:
                    with self.assertRaisesRegex(ValueError, "VLLM_BATCH_INVARIANT=1"):
                        NestedFPConfig()._prepare(torch.float16)


@unittest.skipUnless(HAVE_VLLM, "needs torch and vLLM")
class Policies(unittest.TestCase):
    def test_one_that_there_is_not(self):
        from nestedfp import NestedFPError
        from nestedfp.vllm.quantization import NestedFPConfig
        from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config

        config = NestedFPConfig()
        for policy, kind, why in (("never", NestedFPError, "is unknown; use "),
                                  ("threshold:9223372036854775808", NestedFPError, "not a whole number"),
                                  ("alternate:3", ValueError, "without nestedfp's scheduler and worker")):
            made = VllmConfig(device_config=DeviceConfig("cpu"), additional_config={"nestedfp": {"policy": policy}})
            for _ in range(2):  # and no second layer goes through
                with set_current_vllm_config(made), self.assertRaisesRegex(kind, f"precision policy '{policy}'.*({why})"):
                    config._prepare(torch.float16)

    def prepare(self, settings, worker, draft=False):
        """Of a draft model, or of its target."""
        from nestedfp.vllm.quantization import NestedFPConfig
        from vllm.config import DeviceConfig, ParallelConfig, SpeculativeConfig, VllmConfig, set_current_vllm_config

        target = ParallelConfig(worker_cls=worker)
        made = VllmConfig(device_config=DeviceConfig("cpu"), additional_config={"nestedfp": settings},
                          parallel_config=SpeculativeConfig.create_draft_parallel_config(target, 1) if draft else target)
        made.speculative_config = SimpleNamespace(target_parallel_config=target)
        with set_current_vllm_config(made):
            NestedFPConfig()._prepare(torch.float16)

    def test_a_draft_model_has_its_target_s_worker(self):
        from nestedfp.vllm.op import Step

        self.addCleanup(setattr, Step, "forced", Step.forced)
        self.addCleanup(setattr, Step, "threshold", Step.threshold)
        for draft in (False, True):
            Step.forced, Step.threshold = _library.FP8, 1024
            self.prepare({"policy": "alternate:3"}, "nestedfp.vllm.worker.Worker", draft)
            self.assertEqual((Step.forced, Step.threshold), (_library.FP8, 1024))
            # Without it rows decide, whatever an engine before this one has left.
            self.prepare({"policy": "threshold:7"}, "auto", draft)
            self.assertEqual((Step.forced, Step.threshold), (None, 7))
            with self.assertRaisesRegex(ValueError, "without nestedfp's scheduler and worker"):
                self.prepare({"policy": "alternate:3"}, "auto", draft)

    def test_targets_need_a_scheduler(self):
        for name in ("slo_ttft_ms", "slo_tpot_ms"):
            with self.assertRaisesRegex(ValueError, "slo_ttft_ms and slo_tpot_ms need .*scheduler and worker"):
                self.prepare({name: 20}, "auto")
            self.prepare({name: 20}, "nestedfp.vllm.worker.Worker")


class CompileCache(unittest.TestCase):
    def test_the_plugin_s_version_counts(self):
        config = SimpleNamespace(additional_config={"nestedfp": {"policy": "fp16"}})
        versions.mark(config)
        versions.mark(config)
        self.assertEqual(config.additional_config, {"nestedfp": {"policy": "fp16"}, "nestedfp_version": versions.own()})
        self.assertRegex(versions.own(), r"^\d+\.\d+\S* [0-9a-f]{16}$")
        config = SimpleNamespace(additional_config=SimpleNamespace(compute_hash=lambda: "abc", other=3))
        versions.mark(config)
        versions.mark(config)
        self.assertEqual(config.additional_config.compute_hash(), f"abc {versions.own()}")
        self.assertEqual(config.additional_config.other, 3)

    @unittest.skipUnless(HAVE_VLLM, "needs torch and vLLM")
    def test_in_vllm_s_key(self):
        from nestedfp.vllm.quantization import NestedFPConfig
        from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config

        def key(version):
            config = VllmConfig(device_config=DeviceConfig("cpu"))
            with set_current_vllm_config(config), patch.object(versions, "own", return_value=version):
                NestedFPConfig()._prepare(torch.float16)
            return config.compute_hash()

        self.assertEqual(key("1"), key("1"))
        self.assertNotEqual(key("1"), key("2"))


@unittest.skipUnless(HAVE_VLLM, "needs torch and vLLM")
class Graphs(unittest.TestCase):
    def test_every_table_of_graphs_is_kept_apart_or_refused(self):
        """Where vLLM makes CUDA graphs. Another place than these would replay FP8 graphs in exact steps."""
        known = {"compilation/cuda_graph.py", "compilation/breakable_cudagraph.py", "v1/worker/gpu/cudagraph_utils.py",
                 "v1/worker/encoder_cudagraph.py",
                 "v1/worker/gpu_ubatch_wrapper.py",  # refused: limits.py
                 "v1/spec_decode/gemma4.py"}  # of the draft's head, which is dense
        root = Path(vllm.__file__).parent
        found = {str(path.relative_to(root)) for path in root.rglob("*.py") if "CUDAGraph()" in path.read_text()}
        self.assertLessEqual(found, known)

    def test_graphs_of_other_kinds(self):
        from nestedfp.vllm import worker
        from vllm.compilation import breakable_cudagraph
        from vllm.v1.worker import encoder_cudagraph
        from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

        worker._graphs_by_precision()
        with patch.object(breakable_cudagraph, "current_platform"):
            config = SimpleNamespace(compilation_config=None)
            made = breakable_cudagraph.BreakableCUDAGraphWrapper(lambda: None, config)
        self.assertIsInstance(made.entries, worker.ByPrecision)

        compilation = SimpleNamespace(encoder_cudagraph_token_budgets=[64, 128],
                                      encoder_cudagraph_max_vision_items_per_batch=2,
                                      encoder_cudagraph_max_frames_per_batch=None)
        limits_of = SimpleNamespace(get_limit_per_prompt=lambda kind: 0, mm_encoder_tp_mode="weights")
        config = SimpleNamespace(compilation_config=compilation, model_config=SimpleNamespace(multimodal_config=limits_of))
        model = SimpleNamespace(get_encoder_cudagraph_config=lambda: None)
        manager = encoder_cudagraph.EncoderCudaGraphManager(config, "cpu", torch.float16, model)
        captured = []

        def capture(self, budget):
            captured.append((worker.Step.forced, budget))
            self.budget_graphs[budget] = worker.Step.forced

        with patch.object(encoder_cudagraph.EncoderCudaGraphManager, "_capture_budget_graph", capture):
            manager.capture(graph_pool=None)  # of an engine behind one of this worker's, with another one
            self.assertEqual(captured, [(None, 128), (None, 64)])
            captured.clear()
            with worker.forced(_library.FP16):
                manager.capture(graph_pool=None)
        both = (_library.FP8, _library.FP16)
        self.assertEqual(captured, [(precision, budget) for precision in both for budget in (128, 64)])
        for precision in both:
            with worker.forced(precision):
                self.assertEqual([manager.budget_graphs[budget] for budget in (64, 128)], [precision] * 2)
        self.assertEqual([kind.capture.nestedfp for kind in (CudaGraphManager, type(manager))], [True] * 2)

    def test_the_first_runner_s_estimate_of_memory_is_of_both(self):
        """Its capture is replaced on the runner (worker.py): what the estimate measures must be that one."""
        import inspect

        from vllm.v1.worker.gpu_model_runner import GPUModelRunner

        self.assertIn("self._warmup_and_capture(", inspect.getsource(GPUModelRunner.profile_cudagraph_memory))


if __name__ == "__main__":
    unittest.main(verbosity=1)
