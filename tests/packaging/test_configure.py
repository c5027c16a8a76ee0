"""Configures the sources where folders have unusual names.

usage: test_configure.py CMAKE SOURCE_DIRECTORY"""

import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

CMAKE, SOURCE = sys.argv[1], pathlib.Path(sys.argv[2]).resolve()
del sys.argv[1:]


class Configure(unittest.TestCase):
    def setUp(self):
        work = tempfile.TemporaryDirectory()
        self.addCleanup(work.cleanup)
        self.work = pathlib.Path(work.name)

    def configure(self, source, **environment):
        run = subprocess.run([CMAKE, "-S", source, "-B", self.work / "build", "-G", "Ninja", "-DNFP_CUDA=OFF", "-DNFP_BUILD_TESTS=OFF"],
                             capture_output=True, text=True, timeout=600, env={**os.environ, **environment})
        self.assertEqual(run.returncode, 0, run.stdout + run.stderr)
        return run.stdout

    def test_a_folder_whose_name_is_no_regular_expression(self):
        folder = self.work / "c++ (1)"
        folder.symlink_to(SOURCE)
        self.configure(folder)


unittest.main()
