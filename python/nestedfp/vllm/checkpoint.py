"""Nested checkpoints as vLLM reads them: what their config.json says, and the lower bytes, which lie in a folder of
their own so that other engines do not see them."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .patches import around

FORMAT_VERSION = 1

# Values of --load-format whose loader reads safetensors files through DefaultModelLoader, where the lower bytes come
# in, and those that give a model's own load_weights() an ordinary checkpoint. Others write into parameters, which a
# layer that is not nested yet has not.
_NESTED_FORMATS = ("auto", "hf", "safetensors", "fastsafetensors", "instanttensor")
_ORDINARY_FORMATS = (*_NESTED_FORMATS, "mistral", "npcache", "pt", "runai_streamer", "dummy")


def check_load_format(load_format: str, nested: bool) -> None:
    """Raises ValueError for a --load-format that would leave planes unread. ``nested``: of a nested checkpoint."""
    kind, formats = ("a nested", _NESTED_FORMATS) if nested else ("an ordinary", _ORDINARY_FORMATS)
    if load_format not in formats:
        raise ValueError(f"--load-format {load_format}: nestedfp reads {kind} checkpoint with {', '.join(formats)}; "
                         "leave --load-format out")


@dataclass(frozen=True)
class NestedInfo:
    """The object "nestedfp" of config.json (docs/format.md)."""

    lower_directory: str
    source_dtype: str  # "F16", "BF16"
    uppers: str  # "nearest", "restricted", "free"

    @classmethod
    def parse(cls, value: Any, where: str = "config.json") -> NestedInfo:
        """Raises ValueError naming the file and the field."""
        if not isinstance(value, dict):
            raise ValueError(f"{where}: 'nestedfp' is no object; convert the model again")
        version = value.get("version")
        if version != FORMAT_VERSION:
            raise ValueError(f"{where}: nestedfp.version is {version}, this plugin reads {FORMAT_VERSION}")
        folder = value.get("lower")
        if not isinstance(folder, str) or not folder or "/" in folder or folder in (".", ".."):
            raise ValueError(f"{where}: nestedfp.lower is {folder!r}, no folder of the checkpoint")
        uppers = value.get("uppers", "nearest")
        if uppers not in ("nearest", "restricted", "free"):
            raise ValueError(f"{where}: nestedfp.uppers is {uppers!r}; nearest, restricted and free are known")
        return cls(folder, str(value.get("source_dtype", "F16")), uppers)


_MOST_HEADER_BYTES = 100_000_000  # safetensors' own bound


def _tensors(header: bytes) -> dict[str, tuple[str, tuple[int, ...], int]] | None:
    """Of a safetensors file's header: dtype, shape and end of each tensor. None where it is no header."""
    try:
        entries = json.loads(header)
        entries.pop("__metadata__", None)
        return {name: (str(entry["dtype"]), tuple(entry["shape"]), int(entry["data_offsets"][1]))
                for name, entry in entries.items()}
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return None


def _headers(folder: Path) -> dict[str, tuple[str, tuple[int, ...], Path]]:
    """Every tensor of the safetensors files in a folder: dtype, shape, file. Raises ValueError for a file that is cut."""
    found: dict[str, tuple[str, tuple[int, ...], Path]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        with path.open("rb") as file:
            length = struct.unpack("<Q", file.read(8))[0] if size >= 8 else size
            text = file.read(length) if length <= min(size - 8, _MOST_HEADER_BYTES) else b""
        tensors = _tensors(text)
        if tensors is None:  # of a file that is empty but for its size, too
            raise ValueError(f"{path}: is cut or no safetensors file ({size} bytes); copy it again")
        end = max((tensor_end for _, _, tensor_end in tensors.values()), default=0)
        if size < 8 + length + end:
            raise ValueError(f"{path}: is cut: {size} of {8 + length + end} bytes; copy it again")
        for name, (dtype, shape, _) in tensors.items():
            found[name] = (dtype, shape, path)
    return found


def check_files(folder: str, lower_folder: str) -> None:
    """Raises ValueError unless every FP8 matrix of the checkpoint has its lower bytes, whole."""
    main, lower = _headers(Path(folder)), _headers(Path(lower_folder))
    matrices = {name: shape for name, (dtype, shape, _) in main.items() if dtype == "F8_E4M3"}
    for name, shape in matrices.items():
        at = lower.get(name + "_lower")
        if at is None:
            raise ValueError(f"{lower_folder}: '{name}_lower' is missing ({len(lower)} lower planes for "
                             f"{len(matrices)} nested matrices); copy the whole folder or convert the model again")
        if at[0] != "U8" or at[1] != shape:
            raise ValueError(f"{at[2]}: '{name}_lower' is {at[0]} {list(at[1])}, expected U8 {list(shape)}; convert "
                             "the model again")


def check_replacement(folder: str, started: NestedInfo | None, bf16: bool) -> None:
    """Raises ValueError where what is in the folder cannot take the place of what vLLM was started with, whose
    config.json is the one that it knows, and whose join CUDA graphs hold: weights that are read again."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        return
    try:
        config = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: is no JSON ({error}); copy it again") from error
    raw = config.get("nestedfp") if isinstance(config, dict) else None
    if raw is None:
        return
    if started is None:
        raise ValueError(f"{path}: this is a nested checkpoint, and vLLM was started with an ordinary one: start vLLM with "
                         "it, or give the checkpoint that it was made of")
    given = NestedInfo.parse(raw, str(path))
    if given.uppers == "free" != started.uppers:
        raise ValueError(f"{path}: nestedfp.uppers is 'free', and '{started.uppers}' in the checkpoint that vLLM was "
                         "started with, whose join is another one: start vLLM with it")
    if bf16 and given.source_dtype != "BF16":
        raise ValueError(f"{path}: this nested checkpoint was made of FP16 weights, which BF16 activations cannot be "
                         "multiplied with exactly: start vLLM with it and --dtype float16")


def unread(*shape: int) -> tuple[Any, Any, Any]:
    """A matrix's upper and lower bytes and its rows' scales (torch's, on its default device) before they are read: a
    code that no upper byte has, and scales that are no numbers."""
    import torch

    upper = torch.full(shape, 0xFF, dtype=torch.uint8).view(torch.float8_e4m3fn)
    return upper, torch.empty(shape, dtype=torch.uint8), torch.full((*shape[:-1], 1), torch.nan, dtype=torch.float32)


def clear_unread(what: str, upper: Any, lower: Any, scale: Any) -> None:
    """Raises ValueError where nothing was read into them. Rows that some models do without become 0. Rows are read
    whole, so their first byte tells."""
    rows, unscaled = upper[..., 0] == 0xFF, scale[..., 0].isnan()
    count = int(rows.sum())
    if count == rows.numel():
        raise ValueError(f"{what}: the checkpoint has no weights for this layer; copy the whole folder or convert the "
                         "model again")
    if bool((rows != unscaled).any()):
        raise ValueError(f"{what}: the checkpoint has weights without scales, or scales without weights; convert the "
                         "model again")
    if count:
        upper[rows], lower[rows], scale[rows] = 0, 0, 1 / 256


def install_loader() -> None:
    """Lets vLLM's loader of safetensors files read the lower bytes after everything else. What is wrong is said before
    vLLM begins to replace weights that it runs with."""
    import torch
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    @around(DefaultModelLoader, "get_all_weights")
    def get_all_weights(original: Callable[..., Any], self: Any, model_config: Any,
                        model: Any) -> Iterable[tuple[str, Any]]:
        raw = getattr(model_config.hf_config, "nestedfp", None)
        if model_config.quantization != "nestedfp":
            return original(self, model_config, model)
        if raw is None:
            check_replacement(model_config.model, None, False)
            return original(self, model_config, model)
        info = NestedInfo.parse(raw)
        lower = DefaultModelLoader.Source(model_config.model, model_config.revision,
                                          subfolder=info.lower_directory, fall_back_to_pt=False,
                                          allow_patterns_overrides=["*.safetensors"])
        main_folder = self._prepare_weights(model_config.model, None, model_config.revision, False, None)[0]
        try:
            lower_folder = self._prepare_weights(lower.model_or_path, lower.subfolder, lower.revision, False,
                                                 lower.allow_patterns_overrides)[0]
        except (FileNotFoundError, RuntimeError) as error:
            raise ValueError(f"{model_config.model}: the lower bytes ({lower.subfolder}/*.safetensors) are missing; "
                             "copy the whole folder") from error
        check_replacement(main_folder, info, model_config.dtype is torch.bfloat16)
        check_files(main_folder, lower_folder)

        def both() -> Generator[tuple[str, Any], None, None]:
            yield from original(self, model_config, model)
            yield from self._get_weights_iterator(lower)

        return both()
