"""One weight matrix in two bytes a weight, on NumPy arrays and torch tensors.

    planes = nestedfp.nest(weight)         # FP16 or BF16 [rows, columns]
    planes.upper, planes.lower             # uint8; upper is E4M3 of weight * 2^(8 - exponent)
    nestedfp.join(planes)                  # the weight again, bit for bit
"""

from __future__ import annotations

import ctypes
import operator
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import _library
from ._library import BF16, F16, NestedFPError


class NotNestable(ValueError):
    """The matrix has a row that no power of two brings under 1.75 without losing a bit, or one of BF16 that FP16 does
    not reach; it must stay as it is."""


@dataclass(frozen=True)
class Planes:
    """A nested matrix. ``upper`` and ``lower`` are uint8 [rows, columns], ``exponents`` int8 [rows]: row r is worth
    ``2.0 ** exponents[r]`` times what its bytes hold. All three are torch tensors where the weight was one.

    ``inexact`` counts BF16 weights that nesting changed (0 for FP16: nesting FP16 loses nothing)."""

    upper: Any
    lower: Any
    exponents: Any
    dtype: str  # "float16" or "bfloat16"
    inexact: int = 0

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.upper.shape
        return int(rows), int(columns)

    def fp8(self) -> Any:
        """What FP8 steps multiply with: float32 [rows, columns]."""
        values = _E4M3[_to_numpy(self.upper)]
        out = values * np.exp2(_to_numpy(self.exponents).astype(np.float32) - 8)[:, None]
        return _like(self.upper, out)


def _e4m3_values() -> np.ndarray:
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, code & 7
    magnitude = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    magnitude[(code & 127) == 127] = np.nan
    return np.where(code & 128, -magnitude, magnitude).astype(np.float32)


_E4M3 = _e4m3_values()


def _is_torch(value: Any) -> bool:
    return type(value).__module__.split(".")[0] == "torch"


def _to_numpy(value: Any) -> np.ndarray:
    return value.cpu().numpy() if _is_torch(value) else np.asarray(value)


def _like(model: Any, value: np.ndarray) -> Any:
    if not _is_torch(model):
        return value
    import torch

    return torch.from_numpy(value).to(model.device)


def _bits(weight: Any) -> tuple[np.ndarray, str]:
    """The weight's 16-bit patterns and its type."""
    if _is_torch(weight):
        import torch

        names = {torch.float16: "float16", torch.bfloat16: "bfloat16"}
        if weight.dtype not in names:
            raise TypeError(f"nestedfp.nest takes float16 and bfloat16, not {weight.dtype}")
        return weight.detach().contiguous().view(torch.int16).cpu().numpy().view(np.uint16), names[weight.dtype]
    array = np.asarray(weight)
    if array.dtype.name not in ("float16", "bfloat16"):  # bfloat16 is the ml_dtypes package's
        raise TypeError(f"nestedfp.nest takes float16 and bfloat16, not {array.dtype}")
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))  # of a file of another machine
    return np.asarray(array, order="C").view(np.uint16), array.dtype.name


def _thread_count(threads: Any) -> int:
    """ctypes would cut a larger number."""
    try:
        count = operator.index(threads)
    except TypeError:
        raise TypeError(f"threads is a whole number, not {threads!r}") from None
    if not 0 <= count <= 1024:
        raise ValueError(f"threads is {count}, must be 0 to 1024")
    return count


def nest(weight: Any, threads: int = 0) -> Planes:
    """Splits a matrix [rows, columns] of FP16 or BF16. Computed on the host, by ``threads`` (0 = all it may use).

    Raises NotNestable for a matrix that must stay dense, ValueError for NaN and infinities."""
    bits, dtype = _bits(weight)
    threads = _thread_count(threads)
    if bits.ndim != 2 or bits.size == 0:
        raise ValueError(f"nestedfp.nest takes a matrix, not an array of shape {tuple(bits.shape)}")
    library = _library.library()
    rows, columns = bits.shape
    kind = BF16 if dtype == "bfloat16" else F16
    exponents = np.empty(rows, np.int8)
    report = _library.MatrixReport(ctypes.sizeof(_library.MatrixReport))
    try:
        _library.check(library.nfp_analyse(bits.ctypes.data, rows, columns, kind, threads, exponents.ctypes.data,
                                           ctypes.byref(report)))
    except NestedFPError as error:
        kinds = {_library.INVALID_INPUT: ValueError, _library.UNSUPPORTED: NotNestable}
        if error.code not in kinds:
            raise
        raise kinds[error.code](str(error)) from None
    if not report.nests:
        raise NotNestable(report.reason.decode())
    upper, lower = np.empty((rows, columns), np.uint8), np.empty((rows, columns), np.uint8)
    _library.check(library.nfp_nest(bits.ctypes.data, rows, columns, kind, exponents.ctypes.data, threads,
                                    upper.ctypes.data, lower.ctypes.data))
    return Planes(_like(weight, upper), _like(weight, lower), _like(weight, exponents), dtype, int(report.inexact))


def join(planes: Planes, threads: int = 0) -> Any:
    """The matrix again: bit for bit where ``planes.inexact`` is 0. A torch tensor where the planes are; BF16 without
    torch needs the ml_dtypes package."""
    if not isinstance(planes, Planes):
        raise TypeError(f"nestedfp.join takes Planes, as nestedfp.nest makes them, not {type(planes).__name__}")
    if planes.dtype not in ("float16", "bfloat16"):
        raise ValueError(f"dtype of the planes is 'float16' or 'bfloat16', not {planes.dtype!r}")
    threads = _thread_count(threads)
    upper, lower, exponents = (np.asarray(_to_numpy(part), order="C")
                               for part in (planes.upper, planes.lower, planes.exponents))
    if upper.ndim != 2 or lower.shape != upper.shape or exponents.shape != upper.shape[:1]:
        raise ValueError(f"upper {upper.shape}, lower {lower.shape} and exponents {exponents.shape} are not of one matrix")
    if upper.dtype != np.uint8 or lower.dtype != np.uint8 or exponents.dtype != np.int8:
        raise TypeError(f"upper and lower are uint8 and exponents int8, not {upper.dtype}, {lower.dtype}, {exponents.dtype}")
    rows, columns = upper.shape
    bits = np.empty((rows, columns), np.uint16)
    kind = BF16 if planes.dtype == "bfloat16" else F16
    _library.check(_library.library().nfp_unnest(upper.ctypes.data, lower.ctypes.data, rows, columns, kind,
                                                 exponents.ctypes.data, threads, bits.ctypes.data))
    if _is_torch(planes.upper):
        import torch

        return torch.from_numpy(bits.view(np.int16)).view(getattr(torch, planes.dtype)).to(planes.upper.device)
    if planes.dtype == "float16":
        return bits.view(np.float16)
    import ml_dtypes

    return bits.view(ml_dtypes.bfloat16)
