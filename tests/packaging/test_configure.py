"""Configures the sources where folders have unusual names.

usage: test_configure.py CMAKE SOURCE_DIRECTORY"""

import os
import pathlib
import shutil
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

    def test_grammars_are_found_where_the_script_makes_them(self):
        asked = 'root="$1"; . "$root/scripts/lib.sh"; printf %s "$NFP_CACHE"'
        version = next(line.split()[1].rstrip(")") for line in (SOURCE / "cmake/NfpXgrammar.cmake").read_text().splitlines()
                       if line.startswith("set(NFP_XGRAMMAR_VERSION"))
        home, cache = str(self.work / "home"), str(self.work / "cache")
        for environment in ({"HOME": home, "XDG_CACHE_HOME": ""}, {"HOME": home, "XDG_CACHE_HOME": cache}):
            folder = subprocess.run(["bash", "-c", asked, "bash", SOURCE], capture_output=True, text=True, check=True,
                                    env={**os.environ, **environment}).stdout
            made = pathlib.Path(folder) / f"xgrammar-{version}"
            for file in ("lib/libxgrammar.a", "include/xgrammar/xgrammar.h"):
                (made / file).parent.mkdir(parents=True, exist_ok=True)
                (made / file).touch()
            shutil.rmtree(self.work / "build", ignore_errors=True)
            self.assertIn(f"grammars by xgrammar {version} ({made})", self.configure(SOURCE, **environment))


unittest.main()
