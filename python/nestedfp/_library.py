"""libnestedfp (include/nestedfp.h, nestedfp_torch.h) through ctypes."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from ctypes import POINTER, c_char_p, c_double, c_float, c_int32, c_int64, c_size_t, c_uint64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

ABI_VERSION = 2

INVALID_INPUT, UNSUPPORTED = 1, 3  # of nfp_status
F16, BF16 = 0, 1
JOIN_BIASED, JOIN_FREE = 0, 1
UPPER, LOWER = 0, 1
FP16, FP8 = 0, 1  # nfp_precision
SILU, GELU_TANH = 0, 1
KV_F16, KV_E4M3, KV_BF16 = 0, 1, 2


class NestedFPError(RuntimeError):
    """A call into libnestedfp that failed. ``code`` is its nfp_status."""

    def __init__(self, code: int, message: str):
        super().__init__(message)
        self.code = code

    def __reduce__(self) -> tuple[Any, ...]:  # what a pool of processes hands on to its caller
        return type(self), (self.code, str(self))


class MatrixReport(ctypes.Structure):
    _fields_ = [("size", c_size_t), ("nests", c_int32), ("nests_by_paper", c_int32), ("largest", c_float),
                ("largest_row", c_int64), ("rows_shifted", c_int64), ("inexact", c_int64), ("largest_error", c_float),
                ("reason", ctypes.c_char * 256)]


class Weight(ctypes.Structure):
    _fields_ = [("size", c_size_t), ("upper", c_void_p), ("lower", c_void_p), ("row_scale", c_void_p), ("n", c_int64),
                ("k", c_int64), ("join", c_int32)]


class ExpertStack(ctypes.Structure):
    _fields_ = [("size", c_size_t), ("bytes", c_void_p), ("row_scale", c_void_p), ("dense", c_char_p), ("n", c_int64),
                ("k", c_int64), ("join", c_int32)]


class ExpertsCall(ctypes.Structure):
    _fields_ = [("size", c_size_t), ("precision", c_int32), ("type", c_int32), ("rows", c_int64), ("top", c_int32),
                ("x", c_void_p), ("ids", c_void_p), ("weights", c_void_p), ("map", c_void_p), ("map_size", c_int32),
                ("y", c_void_p), ("scratch", c_void_p), ("scratch_bytes", c_size_t)]


class AttentionCall(ctypes.Structure):
    _fields_ = [("size", c_size_t), ("heads", c_int32), ("kv_heads", c_int32), ("head_dim", c_int32), ("scale", c_float),
                ("soft_cap", c_float), ("window", c_int32), ("kv_type", c_int32), ("key_scale", c_float),
                ("value_scale", c_float), ("block_size", c_int32), ("blocks", c_int64), ("block_stride", c_int64),
                ("keys", c_void_p), ("values", c_void_p), ("q", c_void_p), ("q_stride", c_int64), ("out", c_void_p),
                ("cos_sin", c_void_p), ("q_norm", c_void_p), ("k_norm", c_void_p), ("norm_epsilon", c_float),
                ("query_start", c_void_p), ("context", c_void_p), ("block_table", c_void_p), ("table_width", c_int32),
                ("first_sequence", c_int32), ("sequences", c_int32), ("tokens", c_int32), ("likely_context", c_int32),
                ("deterministic", c_int32), ("independent_start", c_int32), ("workspace", c_void_p),
                ("workspace_bytes", c_size_t)]


class StepLoad(ctypes.Structure):
    _fields_ = [("size", c_size_t), ("step_tokens", c_int32), ("prefill_tokens", c_int32), ("running", c_int32),
                ("waiting", c_int32), ("kv_use", c_double), ("recent_tpot_s", c_double), ("recent_ttft_s", c_double),
                ("step_index", c_uint64)]


class StepLevel(ctypes.Structure):
    _fields_ = [("size", c_size_t), ("name", ctypes.c_char * 32), ("precision", c_int32), ("fp8_share", c_double)]


class StepWork(ctypes.Structure):
    _fields_ = [("size", c_size_t), ("sequences", c_int32), ("exact_singles", c_int32), ("tokens", c_void_p),
                ("contexts", c_void_p)]


# name: (result, arguments). c_int32 as the result means nfp_status.
_FUNCTIONS = {
    "nfp_abi_version": (c_int32, []),
    "nfp_version": (c_char_p, []),
    "nfp_build": (c_char_p, []),
    "nfp_last_error": (c_char_p, []),
    "nfp_split": (c_int32, [c_void_p, c_size_t, c_void_p, c_void_p]),
    "nfp_join": (c_int32, [c_void_p, c_void_p, c_size_t, c_void_p]),
    "nfp_analyse": (c_int32, [c_void_p, c_int64, c_int64, c_int32, c_int32, c_void_p, POINTER(MatrixReport)]),
    "nfp_nest": (c_int32, [c_void_p, c_int64, c_int64, c_int32, c_void_p, c_int32, c_void_p, c_void_p]),
    "nfp_unnest": (c_int32, [c_void_p, c_void_p, c_int64, c_int64, c_int32, c_void_p, c_int32, c_void_p]),
    "nfp_plane_bytes": (c_size_t, [c_int64, c_int64]),
    "nfp_e4m3_row_bytes": (c_int64, [c_int64]),
    "nfp_pack": (c_int32, [c_void_p, c_int64, c_int64, c_int32, c_int32, c_int32, c_void_p]),
    "nfp_gpu_create": (c_int32, [POINTER(c_void_p)]),
    "nfp_gpu_destroy": (None, [c_void_p]),
    "nfp_gpu_name": (c_char_p, [c_void_p]),
    "nfp_gpu_read_choices": (c_int32, [c_void_p, c_char_p]),
    "nfp_gpu_workspace_bytes": (c_size_t, []),
    "nfp_max_quantised_columns": (c_int64, []),
    "nfp_max_attention_rows": (c_int64, []),
    "nfp_gpu_nest": (c_int32, [c_void_p, c_void_p, c_int64, c_int64, c_int64, c_int32, c_int32, c_void_p, c_void_p,
                               c_void_p, c_void_p, c_void_p]),
    "nfp_gpu_pack": (c_int32, [c_void_p, c_void_p, c_int64, c_int64, c_int64, c_int32, c_int32, c_void_p, c_void_p]),
    "nfp_gpu_unnest": (c_int32, [c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int32, c_int32, c_void_p,
                                 c_int64, c_void_p]),
    "nfp_linear_create": (c_int32, [c_void_p, POINTER(Weight), c_void_p, c_size_t, POINTER(c_void_p)]),
    "nfp_linear_destroy": (None, [c_void_p]),
    "nfp_linear_set_independent_start": (None, [c_void_p, c_int32]),
    "nfp_linear_scratch_bytes": (c_size_t, [c_void_p, c_int64]),
    "nfp_linear_run": (c_int32, [c_void_p, c_int32, c_int32, c_int64, c_void_p, c_int64, c_void_p, c_int64, c_void_p,
                                 c_void_p, c_void_p]),
    "nfp_linear_run_swiglu": (c_int32, [c_void_p, c_int32, c_int32, c_int64, c_void_p, c_int64, c_void_p, c_int64, c_void_p,
                                        c_void_p]),
    "nfp_all_reduce_buffer_bytes": (c_size_t, [c_int32, c_size_t]),
    "nfp_all_reduce_create": (c_int32, [c_void_p, c_int32, c_int32, POINTER(c_void_p), c_size_t, POINTER(c_void_p)]),
    "nfp_all_reduce_max_rows": (c_int64, [c_void_p, c_int64]),
    "nfp_linear_norm_scratch_bytes": (c_size_t, [c_void_p, c_int64]),
    "nfp_linear_run_norm": (c_int32, [c_void_p, c_int32, c_int32, c_int64, c_void_p, c_int64, c_void_p, c_void_p,
                                      c_int64, c_void_p, c_int32, c_void_p, c_void_p]),
    "nfp_linear_describe": (c_int32, [c_void_p, c_int32, c_int32, c_int64, c_char_p, c_size_t]),
    "nfp_expert_bytes": (c_size_t, [c_int64, c_int64]),
    "nfp_experts_create": (c_int32, [c_void_p, c_int32, POINTER(ExpertStack), POINTER(ExpertStack), c_int32,
                                     POINTER(c_void_p)]),
    "nfp_experts_destroy": (None, [c_void_p]),
    "nfp_experts_scratch_bytes": (c_size_t, [c_void_p, c_int64, c_int32]),
    "nfp_experts_run": (c_int32, [c_void_p, POINTER(ExpertsCall), c_void_p]),
    "nfp_attention_workspace_bytes": (c_int32, [c_void_p, POINTER(AttentionCall), POINTER(c_size_t)]),
    "nfp_attention_decode": (c_int32, [c_void_p, POINTER(AttentionCall), c_void_p]),
    "nfp_attention_prefill": (c_int32, [c_void_p, POINTER(AttentionCall), c_void_p]),
    "nfp_attention_append": (c_int32, [c_void_p, POINTER(AttentionCall), c_void_p]),
    "nfp_torch_bind": (c_int32, [c_char_p, c_char_p]),
    "nfp_torch_set_device": (c_int32, [c_int32, c_void_p, c_void_p, c_size_t, c_int32]),
    "nfp_torch_set_all_reduce": (c_int32, [c_int32, c_void_p]),
    "nfp_torch_set_precision": (None, [c_int32, c_int64]),
    "nfp_torch_set_warm_up": (None, [c_int32]),
    "nfp_torch_forget": (None, [c_int32]),
    "nfp_torch_refresh": (c_int32, [c_int32, c_void_p]),
    "nfp_policy_create": (c_int32, [c_char_p, POINTER(c_void_p)]),
    "nfp_policy_destroy": (None, [c_void_p]),
    "nfp_policy_choose": (c_int32, [c_void_p, POINTER(StepLoad), POINTER(c_int32)]),
    "nfp_step_model_load": (c_int32, [c_char_p, POINTER(c_void_p)]),
    "nfp_step_model_destroy": (None, [c_void_p]),
    "nfp_step_model_levels": (c_int32, [c_void_p]),
    "nfp_step_model_level": (c_int32, [c_void_p, c_int32, POINTER(StepLevel)]),
    "nfp_step_model_seconds": (c_int32, [c_void_p, c_int32, POINTER(StepWork), POINTER(c_double)]),
}


def find(name: str) -> str:
    """The file of a library of this package: NESTEDFP_LIBRARY_DIR's, else the one inside the package."""
    folder = os.environ.get("NESTEDFP_LIBRARY_DIR")
    path = Path(folder) if folder else Path(__file__).parent / "lib"
    if not (path / name).is_file():
        raise ImportError(f"nestedfp: {path / name} is missing; install the wheel again"
                          + (" (NESTEDFP_LIBRARY_DIR is set)" if folder else ""))
    return str((path / name).absolute())  # a name alone is looked for elsewhere


def file_name(file: str | bytes | os.PathLike[str]) -> bytes:
    """For C, where a zero would end it."""
    name = os.fsencode(file)
    if b"\0" in name:
        raise ValueError(f"a file's name has a zero in it: {file!r}")
    return name


def load(file: str, functions: Mapping[str, tuple[Any, Any]], abi_version: str, needed: int) -> ctypes.CDLL:
    """The library, whose interface's version, as its function ``abi_version`` tells it, is the one that is needed."""
    loaded = ctypes.CDLL(find(file))
    for name, (result, arguments) in functions.items():
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    if (version := getattr(loaded, abi_version)()) != needed:
        raise ImportError(f"nestedfp: {file} has interface version {version}, this package needs {needed}; both must "
                          "come from one wheel")
    return loaded


@cache
def library() -> ctypes.CDLL:
    return load("libnestedfp.so", _FUNCTIONS, "nfp_abi_version", ABI_VERSION)


def check(code: int) -> None:
    if code != 0:
        raise NestedFPError(code, library().nfp_last_error().decode(errors="replace"))
