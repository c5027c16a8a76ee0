"""The console script ``nestedfp``: the program that lies beside this file."""

import os
import signal
import sys
from pathlib import Path


def main() -> None:
    program = Path(__file__).parent / "bin" / "nestedfp"
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # by Python, and so by what it becomes: `nestedfp ... | head` would go on
        signal.signal(ignored, signal.SIG_DFL)
    os.execv(program, [str(program), *sys.argv[1:]])
