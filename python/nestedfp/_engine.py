"""libnestedfp_engine (include/nestedfp_engine.h) through ctypes."""

from __future__ import annotations

import ctypes
import json
import os
import threading
from ctypes import POINTER, c_char_p, c_int32, c_size_t, c_void_p
from functools import cache
from typing import Any

from ._library import NestedFPError, file_name, load

ABI_VERSION = 2
USAGE = 6  # nfp_status

_FUNCTIONS = {
    "nfp_engine_abi_version": (c_int32, []),
    "nfp_engine_last_error": (c_char_p, []),
    "nfp_engine_free": (None, [c_void_p]),
    "nfp_engine_open": (c_int32, [c_char_p, c_char_p, POINTER(c_void_p)]),
    "nfp_engine_close": (None, [c_void_p]),
    "nfp_engine_info": (c_int32, [c_void_p, POINTER(c_void_p)]),
    "nfp_engine_encode": (c_int32, [c_void_p, c_char_p, c_size_t, POINTER(c_void_p)]),
    "nfp_engine_decode": (c_int32, [c_void_p, c_char_p, POINTER(c_void_p)]),
    "nfp_engine_apply_chat_template": (c_int32, [c_void_p, c_char_p, POINTER(c_void_p)]),
    "nfp_engine_submit": (c_int32, [c_void_p, c_char_p]),
    "nfp_engine_cancel": (c_int32, [c_void_p, c_char_p]),
    "nfp_engine_step": (c_int32, [c_void_p, POINTER(c_void_p)]),
}


@cache
def library() -> ctypes.CDLL:
    return load("libnestedfp_engine.so", _FUNCTIONS, "nfp_engine_abi_version", ABI_VERSION)


def _check(code: int) -> None:
    if code != 0:
        raise NestedFPError(code, library().nfp_engine_last_error().decode(errors="replace"))


def _plain(value: Any) -> Any:
    """Of what JSON does not know: NumPy's numbers and arrays, torch's tensors."""
    if not hasattr(value, "tolist"):
        raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")
    return value.tolist()


def _json(fields: dict[str, Any]) -> bytes:
    """The fields as an object; an error names the one that has no JSON: NaN, infinities, text that is not Unicode."""
    members = []
    for name, value in fields.items():
        try:
            text = json.dumps(value, allow_nan=False, ensure_ascii=False, default=_plain)
            members.append(f"{json.dumps(name)}: {text}".encode())
        except (TypeError, ValueError) as problem:
            raise NestedFPError(USAGE, f"field '{name}': {problem}") from problem
    return b"{" + b", ".join(members) + b"}"


class Engine:
    """A loaded model. Steps are computed in step() only, by whoever calls it. Threads take turns, close() too."""

    def __init__(self, model: str | os.PathLike[str], options: dict[str, Any]):
        self._handle = c_void_p()
        self._outputs = c_void_p()  # of a step, until delivered()
        self.steps = 0
        self._process = os.getpid()
        self._lock = threading.RLock()  # of the handle: while a call is inside, nobody frees it
        self._library = library()
        _check(self._library.nfp_engine_open(file_name(model), _json(options), ctypes.byref(self._handle)))

    def close(self) -> None:
        if os.getpid() != self._process:  # the model is the parent's
            self._handle = c_void_p()
            return
        with self._lock:
            handle, self._handle = self._handle, c_void_p()
            if handle:
                self._library.nfp_engine_close(handle)

    def __del__(self) -> None:
        if getattr(self, "_outputs", None):
            self.delivered()
        if getattr(self, "_handle", None):
            self.close()

    def check_process(self) -> None:
        """Before any lock is taken: fork() copies locks as they are, but not the threads that would leave them."""
        if os.getpid() != self._process:
            raise NestedFPError(USAGE, f"the model was loaded by process {self._process} and cannot be used after a "
                                       "fork; load it in this process, or start processes with 'spawn'")

    def _call(self, function: str, *arguments: Any) -> None:
        self.check_process()
        with self._lock:
            if not self._handle:
                raise NestedFPError(USAGE, "the model was closed")
            _check(getattr(self._library, function)(self._handle, *arguments))

    def _text(self, function: str, *arguments: Any) -> str:
        out = c_void_p()
        self._call(function, *arguments, ctypes.byref(out))
        try:
            return ctypes.string_at(out).decode()
        finally:
            self._library.nfp_engine_free(out)

    def _object(self, function: str, *arguments: Any) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self._text(function, *arguments))
        return answer

    def info(self) -> dict[str, Any]:
        return self._object("nfp_engine_info")

    def encode(self, text: str) -> list[int]:
        if not isinstance(text, str):
            raise TypeError(f"a text is a str, not {type(text).__name__}")
        try:
            data = text.encode()
        except UnicodeEncodeError as problem:
            raise NestedFPError(USAGE, f"a text that is not Unicode: {problem}") from problem
        return list(self._object("nfp_engine_encode", data, len(data))["ids"])

    def decode(self, ids: list[int]) -> str:
        return str(self._object("nfp_engine_decode", json.dumps(ids).encode())["text"])

    def apply_chat_template(self, **fields: Any) -> list[int]:
        return list(self._object("nfp_engine_apply_chat_template", _json(fields))["ids"])

    def submit(self, **fields: Any) -> None:
        self._call("nfp_engine_submit", _json(fields))

    def cancel(self, request: str) -> None:
        with self._lock:
            if self._handle:
                self._call("nfp_engine_cancel", request.encode())

    def step(self) -> dict[str, Any]:
        """What a step made, that of the number ``steps``: the same again until delivered(). For the exception of a
        signal's handler (KeyboardInterrupt) may come anywhere, and comes most often right behind the library's call."""
        with self._lock:
            if not self._outputs:
                self.steps += 1
                self._call("nfp_engine_step", ctypes.byref(self._outputs))
            outputs: dict[str, Any] = json.loads(ctypes.string_at(self._outputs).decode())
            return outputs

    @property
    def undelivered(self) -> bool:
        return bool(self._outputs)

    def delivered(self) -> None:
        """Not for close(), which a signal's handler may call while this very thread reads the outputs."""
        outputs, self._outputs = self._outputs, c_void_p()
        self._library.nfp_engine_free(outputs)
