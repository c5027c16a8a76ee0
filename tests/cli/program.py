"""Running the program as a person would; what the tests in this folder share.

A test here is a script: test_NAME.py PROGRAM TINY_MODELS [unittest arguments]
"""

import atexit
import json
import os
import shutil
import subprocess
import sys
import tempfile
import unittest

if not os.path.isdir(sys.argv[2]):
    print("skipped: the tiny models were not made (numpy is missing; scripts/test installs it)")
    sys.exit(77)

PROGRAM, TINY = sys.argv[1:3]
# Calibrations are kept in the user's cache: not the real one's here.
CACHE = tempfile.TemporaryDirectory(prefix="nfp-cache-")
atexit.register(CACHE.cleanup)
os.environ["XDG_CACHE_HOME"] = CACHE.name
ALL_MODELS = [os.path.join(TINY, name) for name in sorted(os.listdir(TINY)) if os.path.isdir(os.path.join(TINY, name))]
FP8_MODELS = [model for model in ALL_MODELS if "-fp8-" in os.path.basename(model)]  # whose weights are FP8 already
MODELS = [model for model in ALL_MODELS if model not in FP8_MODELS]
F16_MODEL = os.path.join(TINY, "llama-tied")


def run(*arguments, code=0, stdin="", timeout=300, **keywords):
    """Runs the program; its output as (stdout, stderr)."""
    done = subprocess.run([PROGRAM, *arguments], input=stdin, capture_output=True, text=True, timeout=timeout, **keywords)
    if done.returncode != code:
        raise AssertionError(f"{' '.join(arguments)}: exit code {done.returncode}, expected {code}\n{done.stdout}\n{done.stderr}")
    return done.stdout, done.stderr


def failure(*arguments, code=1, **keywords):
    """The one line that a refused command prints."""
    out, err = run(*arguments, code=code, **keywords)
    lines = [line for line in err.splitlines() if line.startswith("nestedfp: error: ")]
    if len(lines) != 1:
        raise AssertionError(f"expected one error line, got:\n{err}")
    return lines[0]


def run_json(*arguments, **keywords):
    return json.loads(run(*arguments, "--json", **keywords)[0])


class Scratch(unittest.TestCase):
    def setUp(self):
        self.dir = tempfile.mkdtemp(prefix="nfp-cli-")

    def tearDown(self):
        shutil.rmtree(self.dir, ignore_errors=True)

    def path(self, name):
        return os.path.join(self.dir, name)


def main():
    unittest.main(module="__main__", argv=[sys.argv[0], *sys.argv[3:]], verbosity=2)
