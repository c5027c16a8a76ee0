"""scripts/test-vllm with a Python that is a script: what it is asked for.

usage: test_test_vllm.py SOURCE_DIRECTORY"""

import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

SOURCE = pathlib.Path(sys.argv.pop(1)).resolve()
# Lacks nothing, and makes one model.
PYTHON = """#!/bin/sh
case $1 in
-) exit 0;;
*make_models.py) mkdir -p "$2/tiny" && echo '{}' >"$2/tiny/config.json";;
*) printf '%s\\n' "$PWD: $*" >>"$SAID";;
esac
"""


class TestVllm(unittest.TestCase):
    def setUp(self):
        work = tempfile.TemporaryDirectory()
        self.addCleanup(work.cleanup)
        self.folder = pathlib.Path(work.name).resolve() / "a folder"
        (self.folder / "bin").mkdir(parents=True)
        python = self.folder / "bin/python"
        python.write_text(PYTHON)
        python.chmod(0o755)

    def test_a_python_by_any_path(self):
        said = self.folder / "said"
        for name, flag in (("bin/python", True), ("./bin/python", False), (str(self.folder / "bin/python"), True)):
            said.unlink(missing_ok=True)
            arguments = ["--python", name] if flag else []
            run = subprocess.run([SOURCE / "scripts/test-vllm", *arguments, "--out", "out", "--", "test_op"],
                                 capture_output=True, text=True, timeout=120, cwd=self.folder,
                                 env={**os.environ, "SAID": str(said), **({} if flag else {"NFP_VLLM_PYTHON": name})})
            self.assertEqual(run.returncode, 0, run.stderr)
            convert, tests = said.read_text().splitlines()
            self.assertIn(f"convert {self.folder}/out/models/tiny {self.folder}/out/models/tiny-nested", convert)
            self.assertEqual(tests, f"{SOURCE}/tests/vllm: -m unittest test_op")

    def test_a_folder_of_its_own_is_removed(self):
        temporary = self.folder / "Bob's"
        temporary.mkdir()
        run = subprocess.run([SOURCE / "scripts/test-vllm", "--python", self.folder / "bin/python"], capture_output=True,
                             text=True, timeout=120, env={**os.environ, "SAID": "/dev/null", "TMPDIR": str(temporary)})
        self.assertEqual(run.returncode, 0, run.stderr)
        self.assertEqual(list(temporary.iterdir()), [])


unittest.main()
