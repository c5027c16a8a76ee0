"""vLLM's worker, with the precision of the step in force while it runs, and CUDA graphs of both precisions."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch._dynamo.utils import counters
from vllm.compilation.counter import compilation_counter
from vllm.config import CUDAGraphMode
from vllm.logger import init_logger
from vllm.v1.worker.gpu_worker import Worker as GpuWorker

from .._library import FP8, FP16
from . import limits
from .op import Step, forced
from .patches import around
from .policy import ATTRIBUTE
from .spent import seconds, spent

logger = init_logger("vllm.nestedfp")

SECOND_SET = "capturing the second set of graphs"
NAME_A_SCHEDULER = "--scheduler-cls nestedfp.vllm.scheduler.Scheduler"


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Generator[None, None, None]:
    """Another attribute of an object or a module, for a while."""
    own, before = name in vars(owner), getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


class ByPrecision(dict):
    """A table of graphs that has one for each key and precision: the precision in force is part of every key."""

    def __contains__(self, key: object) -> bool:
        return super().__contains__((Step.forced, key))

    def __getitem__(self, key: object) -> Any:
        return super().__getitem__((Step.forced, key))

    def __setitem__(self, key: object, value: Any) -> None:
        super().__setitem__((Step.forced, key), value)

    def get(self, key: object, default: Any = None) -> Any:
        return super().get((Step.forced, key), default)


def _graphs_by_precision() -> None:
    """Every table of graphs that vLLM makes from now on is one (but those of steps in parts: limits.py), and its second
    runner and its graphs of encoders capture each graph in both precisions."""
    from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphWrapper
    from vllm.compilation.cuda_graph import CUDAGraphWrapper
    from vllm.v1.worker.encoder_cudagraph import EncoderCudaGraphManager
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

    for kind, table in ((CUDAGraphWrapper, "concrete_cudagraph_entries"), (BreakableCUDAGraphWrapper, "entries"),
                        (CudaGraphManager, "graphs"), (EncoderCudaGraphManager, "budget_graphs")):
        _by_precision(kind, table)
    around(CudaGraphManager, "capture")(_in_both)
    around(EncoderCudaGraphManager, "capture")(_encoders_in_both)


def _by_precision(kind: type, table: str) -> None:
    @around(kind, "__init__")
    def init(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        setattr(self, table, ByPrecision())


def _encoders_in_both(capture: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if Step.forced is None:  # of an engine behind one of this worker's, in one process
        return capture(*args, **kwargs)
    for precision in (FP8, FP16):
        with forced(precision):
            capture(*args, **kwargs)


# Before vLLM captures a graph it runs the same step without one, so that the capture finds all kernels loaded. The runs
# for graphs in FP8 load FP16's too (Step.warm_up), and graphs in FP16 are captured without a run of their own.


def _of_both(forward: Callable[[Any], None], mode: Any) -> None:
    with Step.warm_up():
        forward(mode)


def _left_out(forward: Callable[[Any], None], mode: Any) -> None:
    pass


def _with_warm_up(create_forward: Callable[..., Any], warm_up: Callable[[Callable[[Any], None], Any], None]) -> Any:
    """create_forward, whose runs before a capture are made by warm_up(forward, mode)."""

    def create(desc: Any, warmup: bool) -> Any:
        forward, state = create_forward(desc, warmup=warmup)

        def run(mode: CUDAGraphMode) -> None:
            if warmup and mode == CUDAGraphMode.NONE:
                warm_up(forward, mode)
            else:
                forward(mode)

        return run, state

    return create


def _in_both(capture: Callable[..., Any], self: Any, create_forward: Callable[..., Any], *args: Any,
             **kwargs: Any) -> Any:
    """CudaGraphManager.capture(self, create_forward_fn, ...), vLLM's second runner's."""
    if Step.forced is None:
        return capture(self, create_forward, *args, **kwargs)
    states = ByPrecision()  # of attention; graphs of a draft model take those that the model's of their precision fill
    gc.freeze()  # as the first runner does: the collector would look at all that has been loaded again and again
    try:
        with _keeping_free_memory():
            with forced(FP8):
                for desc, state in capture(self, _with_warm_up(create_forward, _of_both), *args, **kwargs).items():
                    states[desc] = state
            with forced(FP16), spent(SECOND_SET):
                for desc, state in capture(self, _with_warm_up(create_forward, _left_out), *args, **kwargs).items():
                    states[desc] = state
        return states
    finally:
        gc.unfreeze()


def _each_in_both(runner: Any) -> None:
    """vLLM's first runner captures one graph after the other by _warmup_and_capture(), which runs _dummy_run()."""
    capture, dummy_run, capture_all = runner._warmup_and_capture, runner._dummy_run, runner.capture_model

    def dummy_run_of_both(*args: Any, is_graph_capturing: bool = False, **kwargs: Any) -> Any:
        if is_graph_capturing:
            return dummy_run(*args, is_graph_capturing=True, **kwargs)
        with Step.warm_up():
            return dummy_run(*args, **kwargs)

    def capture_both(*args: Any, **kwargs: Any) -> None:
        with forced(FP8), replaced(runner, "_dummy_run", dummy_run_of_both):
            capture(*args, **kwargs)
        with forced(FP16), spent(SECOND_SET):
            capture(*args, **{**kwargs, "num_warmups": 0})

    def capture_model(*args: Any, **kwargs: Any) -> Any:
        with _keeping_free_memory():
            return capture_all(*args, **kwargs)

    runner._warmup_and_capture = capture_both
    runner.capture_model = capture_model


def _before_each_step(runner: Any, begin: Callable[[Any], None]) -> None:
    """Calls begin(scheduler_output) before the runner executes a step: not the worker, which vLLM's older executor for
    Ray (VLLM_USE_RAY_V2_EXECUTOR_BACKEND=0) goes past. Runs of made-up tokens are no steps."""
    execute = runner.execute_model

    def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:  # tensors of the stage before, dummy_run
        if not (kwargs.get("dummy_run") or (len(args) > 1 and args[1])):
            begin(scheduler_output)
        return execute(scheduler_output, *args, **kwargs)

    runner.execute_model = execute_model


@contextmanager
def _keeping_free_memory() -> Generator[None, None, None]:
    """torch.cuda.graph() returns all free memory to the driver before each of the thousands of captures, and the next
    warm-up asks for it again. vLLM has room for that memory: it is a part of what the profile's run took."""
    with replaced(torch.cuda, "empty_cache", lambda: None), replaced(torch._C, "_host_emptyCache", lambda: None):
        yield
    torch.cuda.empty_cache()


class Worker(GpuWorker):
    nestedfp_serving = False  # warm-up runs come without a scheduler's decision
    nestedfp_mode_log: Any = None

    def init_device(self, *args: Any, **kwargs: Any) -> Any:
        if self.vllm_config.model_config.quantization != "nestedfp":
            raise RuntimeError("nestedfp's worker is for models of --quantization nestedfp")
        if self.vllm_config.scheduler_config.scheduler_cls is None:  # vLLM's own; what another does is seen by a step
            raise ValueError(f"nestedfp's worker needs {NAME_A_SCHEDULER}")
        limits.check(self.vllm_config)
        _graphs_by_precision()
        result = super().init_device(*args, **kwargs)
        if hasattr(self.model_runner, "_warmup_and_capture"):  # vLLM's first runner
            _each_in_both(self.model_runner)
        _before_each_step(self.model_runner, self.nestedfp_begin)
        # Of warm-up and profiling runs; execute_model sets each step's own.
        Step.forced = FP16
        return result

    def shutdown(self) -> None:
        super().shutdown()
        Step.forced = None  # another engine in this process may have another worker

    def determine_available_memory(self) -> int:
        # FP8 needs room for activations in E4M3 too: the profile is of the larger.
        with forced(FP8):
            return super().determine_available_memory()

    def compile_or_warm_up_model(self, *args: Any, **kwargs: Any) -> Any:
        seconds.pop(SECOND_SET, None)  # of profiling
        result = super().compile_or_warm_up_model(*args, **kwargs)
        if SECOND_SET in seconds:
            logger.info("nestedfp: %s took %.2f s", SECOND_SET, seconds.pop(SECOND_SET))
        self.nestedfp_serving = True
        prefix = os.environ.get("NESTEDFP_MODE_LOG")
        if prefix:  # a byte for each step: its precision, to be compared between ranks
            self.nestedfp_mode_log = open(f"{prefix}.{self.rank}", "wb", buffering=0)  # noqa: SIM115
        return result

    def nestedfp_activity(self) -> dict[str, int]:
        """What serving must not add to: graphs that were captured, pieces that were compiled, device allocations."""
        stats = torch.cuda.memory_stats(self.device)
        return {"captured": compilation_counter.num_cudagraph_captured,
                "compiled": counters["stats"]["unique_graphs"] + compilation_counter.num_backend_compilations
                + compilation_counter.num_inductor_compiles,
                "device_allocations": stats["num_device_alloc"]}

    def nestedfp_begin(self, scheduler_output: Any) -> None:
        precision = getattr(scheduler_output, ATTRIBUTE, None)
        if precision is not None:
            Step.forced = precision
            if self.nestedfp_mode_log is not None:
                self.nestedfp_mode_log.write(bytes([precision]))
        elif self.nestedfp_serving and scheduler_output.total_num_scheduled_tokens > 0:
            raise RuntimeError(f"nestedfp: a step came without a precision; add {NAME_A_SCHEDULER}")
