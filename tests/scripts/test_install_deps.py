"""scripts/install-deps with an apt-get that installs nothing.

usage: test_install_deps.py SOURCE_DIRECTORY"""

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

SOURCE = pathlib.Path(sys.argv.pop(1)).resolve()
RELEASE = pathlib.Path("/etc/os-release")


@unittest.skipUnless(RELEASE.exists() and "ID=debian" in RELEASE.read_text() and shutil.which("apt-get"), "this is not Debian")
class InstallDeps(unittest.TestCase):
    def setUp(self):
        work = tempfile.TemporaryDirectory()
        self.addCleanup(work.cleanup)
        self.work = pathlib.Path(work.name)

    def program(self, name, text):
        path = self.work / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)

    def test_it_waits_for_another_apt(self):
        self.program("dpkg-query", "exit 1")
        self.program("id", "echo 0")
        self.program("apt-get", f'echo "$*" >>{self.work}/asked')
        subprocess.run([SOURCE / "scripts/install-deps", "build"], check=True, capture_output=True, timeout=120,
                       env={**os.environ, "PATH": f"{self.work}:{os.environ['PATH']}"})
        update, install = (self.work / "asked").read_text().splitlines()
        self.assertEqual(update, "-q update")
        options = install.split(" install ")[0].split()
        self.assertIn("g++", install.split())
        self.assertIn("DPkg::Lock::Timeout=600", options)


unittest.main()
