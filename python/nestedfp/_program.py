"""The console script ``nestedfp``: the program that lies beside this file."""

import os
import signal
import sys
from pathlib import Path


def main() -> None:
    program = Path(__file__).parent / "bin" / "nestedfp"
    # Python ignores these, and so would what it becomes: `nestedfp ... | head` would go on.
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(ignored, signal.SIG_DFL)
    os.execv(program, [str(program), *sys.argv[1:]])
