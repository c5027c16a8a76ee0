"""E4M3 numbers with numpy."""

import numpy as np


def values():
    """The 127 finite non-negative E4M3 numbers, ascending; the index is the bit pattern."""
    codes = np.arange(127)
    exponent, mantissa = codes >> 3, codes & 7
    return np.where(exponent == 0, mantissa * 2.0**-9, (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def nearest(numbers):
    """Rounded to nearest, ties to even; |numbers| <= 448."""
    grid = values()
    magnitude = np.abs(numbers)
    above = np.clip(np.searchsorted(grid, magnitude), 1, 126)
    below = above - 1
    to_below, to_above = magnitude - grid[below], grid[above] - magnitude
    up = (to_above < to_below) | ((to_above == to_below) & (above % 2 == 0))
    return np.sign(numbers) * np.where(up, grid[above], grid[below])


def code_of(numbers):
    """The bit patterns of E4M3 numbers."""
    codes = np.searchsorted(values(), np.abs(numbers)).astype(np.uint8)
    return codes | (np.signbit(numbers).astype(np.uint8) << 7)


def number_of(codes):
    return np.where(codes & 0x80, -1.0, 1.0) * values()[codes & 0x7F]
