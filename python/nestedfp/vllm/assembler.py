"""One assembler (ptxas) for all of Triton's kernels of a process.

Triton's cache goes by the version of its assembler, which it asks for once. Inductor points it to PyTorch's, but only
when it compiles a model: a start that finds the model in a cache would look for all other kernels, vLLM's sampler's
among them, under the version of Triton's own, find none that the first start left there, and compile them again.
"""

from __future__ import annotations

import os
from pathlib import Path

VARIABLE = "TRITON_PTXAS_PATH"


def choose(torch_folder: Path) -> None:
    """PyTorch's, where it has one and nobody has chosen another. Before Triton compiles anything."""
    ptxas = torch_folder / "bin" / "ptxas"
    if ptxas.is_file() and os.access(ptxas, os.X_OK):
        os.environ.setdefault(VARIABLE, str(ptxas))
