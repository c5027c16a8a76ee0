"""How a step's precision gets to the op in a worker. Needs vLLM, and no GPU."""

import unittest
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

from nestedfp import _library

try:
    import torch  # noqa: F401
    import vllm

    HAVE_VLLM = True
except ImportError:
    HAVE_VLLM = False


@unittest.skipUnless(HAVE_VLLM, "needs torch and vLLM")
class Steps(unittest.TestCase):
    def test_a_step_s_precision_is_looked_at_by_the_runner(self):
        """vLLM's older executor for Ray calls the worker's runner, and not the worker."""
        from nestedfp.vllm import worker
        from nestedfp.vllm.op import Step
        from nestedfp.vllm.policy import ATTRIBUTE

        ran = []

        class Runner:
            def execute_model(self, scheduler_output, intermediate_tensors=None, dummy_run=False):
                ran.append((Step.forced, intermediate_tensors, dummy_run))
                return "done"

        runner, made = Runner(), worker.Worker.__new__(worker.Worker)
        worker._before_each_step(runner, made.nestedfp_begin)
        made.nestedfp_serving = True
        self.addCleanup(setattr, Step, "forced", None)
        for precision in (_library.FP8, _library.FP16):
            step = SimpleNamespace(total_num_scheduled_tokens=3, **{ATTRIBUTE: precision})
            self.assertEqual(runner.execute_model(step, "tensors"), "done")
            self.assertEqual(runner.execute_model(SimpleNamespace(total_num_scheduled_tokens=3), intermediate_tensors=None,
                                                  dummy_run=True), "done")
            self.assertEqual(ran[-2:], [(precision, "tensors", False), (precision, None, True)])
        with self.assertRaisesRegex(RuntimeError, "--scheduler-cls"):
            runner.execute_model(SimpleNamespace(total_num_scheduled_tokens=3), None)
        runner.execute_model(SimpleNamespace(total_num_scheduled_tokens=0), None)
        source = (Path(vllm.__file__).parent / "v1/executor/ray_utils.py").read_text()
        self.assertIn("self.worker.model_runner.execute_model(", source)

    def test_no_precision_outlasts_the_worker(self):
        from nestedfp.vllm import worker

        self.addCleanup(setattr, worker.Step, "forced", None)
        worker.Step.forced = _library.FP8
        with patch.object(worker.GpuWorker, "shutdown", lambda self: ended.append(self)):
            ended, made = [], worker.Worker.__new__(worker.Worker)
            made.shutdown()
        self.assertEqual((ended, worker.Step.forced), ([made], None))


if __name__ == "__main__":
    unittest.main(verbosity=1)
