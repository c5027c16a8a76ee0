"""The console script ``nestedfp``: the program that lies beside this file."""

import os
import sys
from pathlib import Path


def main() -> None:
    program = Path(__file__).parent / "bin" / "nestedfp"
    os.execv(program, [str(program), *sys.argv[1:]])
