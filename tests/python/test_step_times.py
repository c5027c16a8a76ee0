"""nestedfp.step_times against a machine whose step times are a formula."""

import copy
import json
import os
import tempfile
import threading
import unittest
from pathlib import Path

from nestedfp import NestedFPError
from nestedfp.step_times import StepLevel, StepModel


def formula_ms(level, prefill, context, sequences, decode_context):
    tokens = prefill + sequences
    pairs = prefill * (context + 0.5 * (prefill + 1))
    return ((1, 0.55)[level] * (4 + 0.05 * tokens) + 1 + 2e-6 * pairs + 4e-5 * sequences * decode_context
            + 0.01 * (sequences + (1 if prefill else 0)))


def table():
    shapes = [(tokens, context, 0, 0) for tokens in (16, 64, 256, 512, 1024, 2048) for context in (0, 1024, 4096)]
    shapes += [(0, 0, sequences, context) for sequences in (1, 8, 32, 64) for context in (128, 1024)]
    steps = [{"level": level, "prefill_tokens": shape[0], "prefill_context": shape[1], "decode_sequences": shape[2],
              "decode_context": shape[3], "ms": formula_ms(level, *shape), "samples": 1}
             for level in (0, 1) for shape in shapes]
    return {"format": "nestedfp-step-times", "version": 1, "model": "m", "device": "formula", "weight_bytes": 1,
            "max_step_tokens": 2048, "max_sequences": 64, "kv_dtype": "f16",
            "levels": [{"precision": "fp16", "fp8_share": 0}, {"precision": "fp8-w8a8", "fp8_share": 1}],
            "steps": steps}


class StepTimes(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.file = Path(folder.name) / "steps.json"
        self.file.write_text(json.dumps(table()))

    def test_levels(self):
        self.assertEqual(StepModel(self.file).levels,
                         (StepLevel("fp16", False, 0.0), StepLevel("fp8-w8a8", True, 1.0)))

    def test_steps_that_were_measured_and_others(self):
        model = StepModel(str(self.file))
        for name, level in (("fp16", 0), ("fp8-w8a8", 1)):
            for prefill, context, sequences, decode_context in ((256, 1024, 0, 0), (700, 100, 0, 0), (0, 0, 32, 1024),
                                                                (0, 0, 20, 500), (300, 0, 8, 700)):
                chunks = [(prefill, context)] if prefill else []
                chunks += [(1, decode_context - 1)] * sequences
                expected = formula_ms(level, prefill, context, sequences, decode_context) / 1e3
                with self.subTest(level=name, chunks=chunks[:2]):
                    self.assertAlmostEqual(model.seconds(level, chunks) / expected, 1, delta=0.12)
                    self.assertEqual(model.seconds(name, iter(chunks)), model.seconds(level, chunks))

    def test_two_launches_are_one_after_the_other(self):
        model = StepModel(self.file)
        apart = model.seconds("fp8-w8a8", [(1, 100), (256, 0)], exact_singles=True)
        self.assertAlmostEqual(apart, model.seconds("fp16", [(1, 100)]) + model.seconds("fp8-w8a8", [(256, 0)]))

    def test_copies(self):
        model = StepModel(self.file)
        expected = model.seconds(0, [(1, 7)])
        others = [copy.copy(model), copy.deepcopy([model])[0]]
        del model
        self.assertEqual([other.seconds(0, [(1, 7)]) for other in others], [expected] * 2)

    def test_many_threads(self):
        model = StepModel(self.file)
        expected, found = model.seconds(0, [(64, 0), (1, 7)]), []

        def ask():
            found.extend(model.seconds(0, [(64, 0), (1, 7)]) for _ in range(200))

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(found, [expected] * 800)

    def test_errors_name_what_is_wrong(self):
        model = StepModel(self.file)
        with self.assertRaisesRegex(ValueError, "level 'fp4': the table has fp16, fp8-w8a8"):
            model.seconds("fp4", [(1, 0)])
        for level, chunks, message in ((7, [(1, 0)], "level 7"), (0, [], "sequences"),
                                       (0, [(0, 5)], r"tokens\[0\] is 0"),
                                       (0, [(1, 0), (1, -2)], r"contexts\[1\] is -2")):
            with self.assertRaisesRegex(NestedFPError, message):
                model.seconds(level, chunks)
        for level, chunks in ((2**32, [(1, 0)]), (0, [(2**32 + 1, 0)]), (0, [(1, 2**40)])):
            with self.assertRaisesRegex(ValueError, "within 31 bits"):
                model.seconds(level, chunks)
        with self.assertRaisesRegex(NestedFPError, "nowhere.json"):
            StepModel(self.file.with_name("nowhere.json"))
        self.file.write_text('{"format": "another"}')
        with self.assertRaisesRegex(NestedFPError, "steps.json"):
            StepModel(self.file)

    def test_the_figures_of_other_engines_are_no_table(self):
        rows = Path(os.environ.get("NFP_SOURCE", "")).parent / "shared" / "data" / "step-times.json"
        if not rows.is_file():
            self.skipTest(f"{rows} is not there")
        with self.assertRaisesRegex(NestedFPError, "step-times.json: .*format"):
            StepModel(rows)


if __name__ == "__main__":
    unittest.main()
