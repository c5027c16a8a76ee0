"""Which sequences of a batch run which attention kernel. Nothing here needs vLLM."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

TILE_ROWS = 128  # of the prefill kernel: query tokens times the heads that share a KV head
ENOUGH_TILES = 64  # to keep most of the GPU busy
SHORT_CONTEXT = 4096  # which one thread block reads in some 50 us


def split(lengths: npt.NDArray[np.int32], contexts: npt.NDArray[np.int32], group: int,
          kv_heads: int) -> tuple[int, int] | None:
    """lengths, contexts: query tokens of each sequence, and its keys or more. -> how many sequences ahead have one
    token, and all tokens of the rest. None where the rest would wait for its longest context: the prefill kernel reads
    a tile's keys in one thread block, FlashAttention shares them."""
    others = np.flatnonzero(lengths != 1)
    decodes = int(others[0]) if len(others) else len(lengths)
    rest, keys = lengths[decodes:].astype(np.int64), contexts[decodes:].astype(np.int64)
    tiles = (rest * group + TILE_ROWS - 1) // TILE_ROWS * kv_heads
    longest = int(keys.max(initial=0, where=tiles > 0))
    if longest > SHORT_CONTEXT and int((tiles * keys).sum()) < ENOUGH_TILES * longest:
        return None
    return decodes, int(rest.sum())
