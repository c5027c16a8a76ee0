#!/usr/bin/env python3
"""What the wheel's files ask of others and show to them:
test_libraries.py NFP_PORTABLE PROGRAM libnestedfp.so libnestedfp_engine.so [unittest arguments]"""

import re
import shutil
import subprocess
import sys
import unittest

PORTABLE, PROGRAM, *LIBRARIES = sys.argv[1:5]
# PEP 600's manylinux_2_28: x86-64 distributions of 2018 and later.
NEWEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}
CXX_RUNTIME = ("libstdc++", "libgcc_s")


def output(*command):
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@unittest.skipUnless(shutil.which("nm") and shutil.which("objdump"), "binutils is not installed")
class Files(unittest.TestCase):
    def test_libraries_export_their_c_functions_alone(self):
        for library in LIBRARIES:
            names = [line.split()[-1] for line in output("nm", "-D", "--defined-only", library).splitlines()]
            self.assertIn("nfp_version" if library.endswith("nestedfp.so") else "nfp_engine_open", names)
            self.assertEqual([name for name in names if not name.startswith("nfp_")], [], library)

    def test_the_program_exports_nothing_of_its_own(self):
        names = [line.split()[-1] for line in output("nm", "-D", "--defined-only", PROGRAM).splitlines()]
        self.assertEqual([name for name in names if "@GLIBC_" not in name], [], "which is libc's data")

    def test_the_cxx_runtime_is_inside(self):
        for file in [PROGRAM, *LIBRARIES]:
            needed = re.findall(r"NEEDED +(\S+)", output("objdump", "-p", file))
            self.assertIn("libc.so.6", needed)
            self.assertEqual([name for name in needed if name.startswith(CXX_RUNTIME)], [], file)

    @unittest.skipIf(PORTABLE != "ON", "they are not linked for an old C library (cmake/NfpPortable.cmake)")
    def test_an_old_c_library_has_all_that_they_need(self):
        for file in [PROGRAM, *LIBRARIES]:
            newer = []
            for name, version, numbers in re.findall(r" [Uvw] (\S+)@+([A-Z]+_([0-9.]+))$", output("nm", "-D", file), re.M):
                kind = version.split("_")[0]
                if tuple(int(number) for number in numbers.split(".")) > NEWEST[kind]:
                    newer.append(f"{name} ({version})")
            self.assertEqual(newer, [], f"{file}: see src/portable/glibc.cc")


unittest.main(module="__main__", argv=[sys.argv[0], *sys.argv[5:]], verbosity=2)
