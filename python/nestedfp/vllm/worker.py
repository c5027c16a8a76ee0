"""vLLM's worker, with the precision of the step in force while it runs, and CUDA graphs of both precisions."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from vllm.logger import init_logger
from vllm.v1.worker.gpu_worker import Worker as GpuWorker

from .._library import FP8, FP16
from .op import Step
from .scheduler import ATTRIBUTE

logger = init_logger("vllm.nestedfp")


@contextmanager
def forced(precision: int) -> Generator[None, None, None]:
    before = Step.forced
    Step.forced = precision
    try:
        yield
    finally:
        Step.forced = before


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


def _tables_by_precision() -> None:
    """Every table of graphs that vLLM makes from now on is one. Idempotent."""
    from vllm.compilation.cuda_graph import CUDAGraphWrapper

    original = CUDAGraphWrapper.__init__
    if getattr(original, "nestedfp", False):
        return

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.concrete_cudagraph_entries = ByPrecision()

    init.nestedfp = True  # type: ignore[attr-defined]
    CUDAGraphWrapper.__init__ = init


class Worker(GpuWorker):
    def init_device(self, *args: Any, **kwargs: Any) -> Any:
        _tables_by_precision()
        result = super().init_device(*args, **kwargs)
        runner = self.model_runner
        if not hasattr(runner, "_warmup_and_capture"):
            raise RuntimeError("nestedfp's worker captures graphs through vLLM's first model runner: set "
                               "VLLM_USE_V2_MODEL_RUNNER=0")
        if self.vllm_config.model_config.quantization != "nestedfp":
            raise RuntimeError("nestedfp's worker is for models of --quantization nestedfp")
        capture = runner._warmup_and_capture

        def capture_both(*args: Any, **kwargs: Any) -> None:
            for precision in (FP8, FP16):
                with forced(precision):
                    capture(*args, **kwargs)

        runner._warmup_and_capture = capture_both
        # Warm-up and profiling runs; execute_model sets each step's own.
        Step.forced = FP16
        return result

    def determine_available_memory(self) -> int:
        # FP8 needs room for activations in E4M3 too: the profile is of the larger.
        with forced(FP8):
            return super().determine_available_memory()

    def execute_model(self, scheduler_output: Any) -> Any:
        precision = getattr(scheduler_output, ATTRIBUTE, None)
        if precision is None:
            if scheduler_output.total_num_scheduled_tokens > 0:
                raise RuntimeError("nestedfp: a step came without a precision; add --scheduler-cls "
                                   "nestedfp.vllm.scheduler.Scheduler")
        else:
            Step.forced = precision
        return super().execute_model(scheduler_output)
