"""scripts/test-gpu over a build folder whose programs are scripts: what it runs, its table and its exit status.

usage: test_test_gpu.py SOURCE_DIRECTORY"""

import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

SOURCE = pathlib.Path(sys.argv.pop(1)).resolve()
PASSES = "echo '[  PASSED  ] 12 tests.'"
SKIPS = "echo '[  PASSED  ] 0 tests.'; echo '[  SKIPPED ] 9 tests, listed below:'"
FAILS = "echo '[  FAILED  ] 1 test, listed below:'; echo '[  FAILED  ] Norms.AreRight, where GetParam() = 3'; exit 1"
NO_GPU = """echo '{"findings": [{"id": "gpu", "health": "slower", "found": "no NVIDIA driver is loaded"}]}'"""
HOPPER = """case $1 in
doctor) echo '{"findings": [{"id": "gpu", "health": "good", "found": "an H200"}]}';;
generate) echo "The capital of France is $CITY";;
perplexity) case "$*" in *cuda*fp8-w8a8*) echo "{\\"perplexity\\": $W8A8}";; *) echo '{"perplexity": 20.0}';; esac;;
esac"""


class TestGpu(unittest.TestCase):
    def setUp(self):
        work = tempfile.TemporaryDirectory()
        self.addCleanup(work.cleanup)
        self.build = pathlib.Path(work.name) / "a build"
        self.model = self.build / "model.gguf"
        self.program("apps/nestedfp", HOPPER)
        self.model.write_text("")

    def program(self, path, text):
        path = self.build / path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)

    def run_it(self, *flags, **environment):
        run = subprocess.run([SOURCE / "scripts/test-gpu", "--build", self.build, "--python", sys.executable, "--model", self.model, *flags],
                             capture_output=True, text=True, timeout=120,
                             env={**os.environ, "CITY": "Paris", "W8A8": "20.1", "CUDA_HOME": str(self.build), **environment})
        return run.returncode, run.stdout, run.stderr

    def test_help_and_list(self):
        code, out, _ = self.run_it("--help")
        self.assertEqual(code, 0)
        self.assertIn("--only NAME", out)
        code, out, _ = self.run_it("--list")
        self.assertEqual((code, [line.split()[0] for line in out.splitlines()]), (
            0, ["cuda", "engine", "overflow", "breakdown", "capi", "generate", "perplexity", "answers", "server", "memcheck", "vllm"]))
        self.assertEqual(self.run_it("--only", "cuda,kernels")[0], 1)
        self.assertEqual(self.run_it("--what")[0], 2)

    def test_passed_skipped_and_failed(self):
        self.program("src/backend/cuda/nfp_cuda_gpu_test", PASSES)
        self.program("src/capi/nfp_capi_gpu_test", SKIPS)
        code, out, _ = self.run_it("--only", "cuda,capi,breakdown,generate,perplexity")
        self.assertEqual(code, 0, out)
        for row in (r"cuda +passed +\d+s  12 passed", r"capi +skipped .*all 9 tests", r"breakdown +skipped .*not in the build folder",
                    r"generate +passed .*Paris", r"perplexity +passed .*fp16 20.000 .*fp8-w8a8 20.100 \(\+0.50 %"):
            self.assertRegex(out, row)
        self.program("src/backend/cuda/nfp_cuda_gpu_test", FAILS)
        code, out, said = self.run_it("--only", "cuda,generate")
        self.assertEqual(code, 1)
        self.assertRegex(out, r"cuda +failed .*Norms.AreRight.*cuda.log\ngenerate +passed")
        self.assertIn("GetParam() = 3", said)  # the end of its log

    def test_wrong_answers_fail(self):
        code, out, _ = self.run_it("--only", "generate", CITY="Rome")
        self.assertEqual(code, 1)
        self.assertRegex(out, r"generate +failed .*fp16 does not say Paris")
        code, out, _ = self.run_it("--only", "perplexity", W8A8="20.4")
        self.assertEqual(code, 1)
        self.assertRegex(out, r"perplexity +failed .*\+2.00 %")

    def test_memcheck(self):
        self.program("bin/compute-sanitizer", "echo '========= ERROR SUMMARY: 0 errors'")
        code, out, _ = self.run_it("--only", "memcheck", PATH="/usr/bin:/bin")
        self.assertEqual(code, 0)
        self.assertRegex(out, r"memcheck +passed +\d+s  0 errors in fp16 fp8 fp8-w8a8")
        self.program("bin/compute-sanitizer", "echo '========= ERROR SUMMARY: 2 errors'")
        self.assertEqual(self.run_it("--only", "memcheck", PATH="/usr/bin:/bin")[0], 1)

    def test_nothing_to_run_is_77(self):
        self.model.unlink()
        code, out, said = self.run_it("--only", "generate")
        self.assertEqual(code, 77)
        self.assertRegex(out, r"generate +skipped .*no demo model")
        self.program("apps/nestedfp", NO_GPU)
        code, out, said = self.run_it()
        self.assertEqual((code, out), (77, ""))
        self.assertIn("no Hopper GPU", said)


unittest.main()
