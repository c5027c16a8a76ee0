"""What bench/vllm/serve_figures.py reads from a log of vLLM's."""

import datetime
import sys
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "bench" / "vllm"))
import serve_figures  # noqa: E402

LOG = """INFO 11-25 08:30:26 [api_utils.py:273] non-default args: {'dtype': 'float16'}
(EngineCore pid=4) INFO 11-25 08:30:31 [swiglu.py:60] nestedfp: of loading the model: kernels 0.41 s, nesting 0.92 s
(EngineCore pid=4) INFO 11-25 08:30:31 [model_runner.py:319] Model loading took 15.06 GiB and 2.403616 seconds
(EngineCore pid=4) INFO 11-25 08:30:33 [backends.py:1148] Dynamo bytecode transform time: 2.59 s
(EngineCore pid=4) INFO 11-25 08:30:39 [backends.py:393] Compiling a graph for compile range (1, 512) takes 5.86 s
(EngineCore pid=4) INFO 11-25 08:30:40 [monitor.py:53] torch.compile took 9.25 s in total
Capturing CUDA graphs (FULL):   0%|          | 0/5 [00:00<?, ?it/s]\rCapturing CUDA graphs (FULL): 100%|##| 5/5
(EngineCore pid=4) INFO 11-25 08:30:42 [model_runner.py:701] Graph capturing finished in 1 secs, took 0.01 GiB
(EngineCore pid=4) INFO 11-25 08:30:42 [worker.py:240] nestedfp: capturing the second set of graphs took 0.38 s
(EngineCore pid=4) INFO 11-25 08:30:43 [core.py:306] init engine (profile, create kv cache, warmup model) took 11.98 s
"""


class Starts(unittest.TestCase):
    def test_what_a_log_says_about_a_start(self):
        began = datetime.datetime(2026, 11, 25, 8, 30, 6, 500000).timestamp()
        found = serve_figures.start_of(LOG, began)
        self.assertEqual({name: found[name] for name in serve_figures.SECONDS},
                         {"load_s": 2.403616, "dynamo_s": 2.59, "inductor_s": 5.86, "compile_s": 9.25, "init_s": 11.98})
        self.assertEqual(found["milestones_s"], {"arguments read": 19.5, "model loaded": 24.5, "compiled": 33.5,
                                                 "graphs captured": 35.5, "engine made": 36.5})
        self.assertEqual(found["own"], ["of loading the model: kernels 0.41 s, nesting 0.92 s",
                                        "capturing the second set of graphs took 0.38 s"])
        self.assertEqual(serve_figures.start_of("", began), {"milestones_s": {}})


if __name__ == "__main__":
    unittest.main(verbosity=1)
