"""Functions of scripts/lib.sh, and what scripts/quickstart is told.

usage: test_lib.py SOURCE_DIRECTORY"""

import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

SOURCE = pathlib.Path(sys.argv.pop(1)).resolve()


class Jobs(unittest.TestCase):
    def jobs(self, available_gb, **limits):
        """With 16 cores."""
        with tempfile.TemporaryDirectory() as root:
            files = {"proc/meminfo": f"MemTotal: 1 kB\nMemAvailable: {available_gb * 1000000} kB\n",
                     **{f"sys/fs/cgroup/{name.replace('__', '/')}": f"{value}\n" for name, value in limits.items()}}
            for name, text in files.items():
                path = pathlib.Path(root) / name.replace("_max", ".max")
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
            run = subprocess.run(["bash", "-euo", "pipefail", "-c", '. "$1/scripts/lib.sh"; nproc() { echo 16; }; nfp_jobs', "bash", SOURCE],
                                 capture_output=True, text=True, check=True, env={**os.environ, "NFP_SYSTEM_ROOT": root})
        return int(run.stdout)

    def test_memory_and_cores(self):
        self.assertEqual([self.jobs(gb) for gb in (1, 4, 6, 500)], [1, 2, 4, 16])

    def test_a_container_s_limit_counts(self):
        for name in ("memory_max", "memory__memory.limit_in_bytes"):
            found = [self.jobs(500, **{name: limit}) for limit in (1 << 30, 6 << 30, 1 << 40, (1 << 63) - 4096)]
            self.assertEqual(found, [1, 4, 16, 16], name)
        self.assertEqual([self.jobs(4, memory_max=limit) for limit in ("max", 6 << 30)], [2, 2])


class Steps(unittest.TestCase):
    def test_a_log_that_cannot_be_written(self):
        """Nothing runs, and the log of an earlier run is not shown as if it were this one's."""
        with tempfile.TemporaryDirectory() as root:
            (pathlib.Path(root) / "logs/step.log").mkdir(parents=True)
            run = subprocess.run(["bash", "-euo", "pipefail", "-c", '. "$1/scripts/lib.sh"; NFP_LOGS="$2/logs"; nfp_run step touch "$2/ran"', "bash", SOURCE, root],
                                 capture_output=True, text=True)
            self.assertEqual(run.returncode, 1)
            self.assertIn(f"error: cannot write {root}/logs/step.log; is the checkout another user's", run.stderr)
            self.assertEqual(os.listdir(root), ["logs"])


class Quickstart(unittest.TestCase):
    def test_wrong_arguments_end_before_anything_is_done(self):
        for arguments, status, told in ((["--max-tokens", "ten"], 1, "--max-tokens ten: is no number"), (["--prompt"], 2, "usage: "),
                                        (["--", "--port", "1"], 1, "what follows -- is for --serve")):
            run = subprocess.run([SOURCE / "scripts/quickstart", *arguments], cwd="/", capture_output=True, text=True, timeout=60)
            self.assertEqual((run.returncode, run.stdout), (status, ""), arguments)
            self.assertIn(told, run.stderr)
            self.assertNotIn("==>", run.stderr)


class Root(unittest.TestCase):
    def test_it_is_the_checkout_s_whatever_cd_is_told(self):
        for cdpath in (".", f".:{SOURCE}"):
            run = subprocess.run(["bash", "-euo", "pipefail", "-c", '. scripts/lib.sh; printf %s "$NFP_ROOT"'], cwd=SOURCE,
                                 capture_output=True, text=True, check=True, env={**os.environ, "CDPATH": cdpath})
            self.assertEqual(run.stdout, str(SOURCE))


unittest.main()
