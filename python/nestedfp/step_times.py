"""How long a step takes, predicted from a table that ``nestedfp bench MODEL steps`` wrote (docs/step-times.md).

    from nestedfp.step_times import StepModel

    model = StepModel("step-times.json")
    model.levels                                  # what a step's linear layers may be computed in
    model.seconds("fp16", [(1, 900), (1, 300)])   # two sequences decoded, behind 900 and 300 tokens
    model.seconds("fp8-w8a8", [(512, 0)])         # the first 512 tokens of a prompt
"""

from __future__ import annotations

import ctypes
import os
from array import array
from collections.abc import Iterable
from ctypes import byref, c_double, c_void_p
from dataclasses import dataclass

from ._library import FP8, StepWork, check, file_name, library
from ._library import StepLevel as LevelFields

__all__ = ["StepLevel", "StepModel"]


@dataclass(frozen=True)
class StepLevel:
    """What the linear layers of a step are computed in."""

    name: str  # "fp16", "fp8-w8a8", "fp8-w8a8@0.50"
    fp8: bool
    fp8_share: float  # of the weights that are computed in FP8: 0 in FP16


class StepModel:
    """Any number of threads may ask one at a time; it never changes."""

    def __init__(self, file: str | os.PathLike[str]):
        """Errors of the file are NestedFPError and name it and the field."""
        self._library = library()
        self._model = c_void_p()
        check(self._library.nfp_step_model_load(file_name(file), byref(self._model)))
        self.levels: tuple[StepLevel, ...] = tuple(
            self._level(i) for i in range(self._library.nfp_step_model_levels(self._model)))

    def _level(self, index: int) -> StepLevel:
        level = LevelFields(size=ctypes.sizeof(LevelFields))
        check(self._library.nfp_step_model_level(self._model, index, byref(level)))
        return StepLevel(level.name.decode(), level.precision == FP8, level.fp8_share)

    def seconds(self, level: int | str, chunks: Iterable[tuple[int, int]], *, exact_singles: bool = False) -> float:
        """Of one step: ``chunks`` has for each sequence its tokens in the step (1: it is decoded) and those that are in
        the KV cache already. ``level`` is a place in ``levels`` or a name there. With ``exact_singles`` the step has
        two launches: sequences of one token in FP16, then the others at ``level``."""
        if isinstance(level, str):
            names = [known.name for known in self.levels]
            if level not in names:
                raise ValueError(f"level {level!r}: the table has {', '.join(names)}")
            level = names.index(level)
        rows = list(chunks)
        try:  # ctypes would cut what is larger
            (level,), tokens, contexts = (array("i", numbers) for numbers in
                                          ([level], [row[0] for row in rows], [row[1] for row in rows]))
        except OverflowError as error:
            raise ValueError(f"level and chunks have to be within 31 bits: {error}") from None
        work = StepWork(ctypes.sizeof(StepWork), len(rows), int(exact_singles), tokens.buffer_info()[0],
                        contexts.buffer_info()[0])
        found = c_double()
        check(self._library.nfp_step_model_seconds(self._model, level, byref(work), byref(found)))
        return found.value

    def __copy__(self) -> StepModel:  # two objects of one model of C would both free it
        return self

    def __deepcopy__(self, _: object) -> StepModel:
        return self

    def __del__(self) -> None:
        if getattr(self, "_model", None):
            self._library.nfp_step_model_destroy(self._model)
            self._model = c_void_p()
