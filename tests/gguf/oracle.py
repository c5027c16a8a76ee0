#!/usr/bin/env python3
"""Dequantisation against the gguf package, bit for bit, on random blocks: oracle.py NFP_DEQUANTIZE"""

import subprocess
import sys

try:
    import numpy as np
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize
except ImportError as missing:
    print(f"skipped: {missing.name} is not installed (scripts/test installs it)")
    sys.exit(77)

BLOCKS = 3000
# Bytes of each block that are FP16 scales: random ones could be NaN, so these get finite numbers instead.
SCALES = {"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208]}


def main():
    random = np.random.default_rng(20250601)
    failed = []
    for name in [*SCALES, "BF16", "F16", "F32"]:
        kind = GGMLQuantizationType[name]
        elements, size = GGML_QUANT_SIZES[kind]
        blocks = random.integers(0, 256, (BLOCKS, size), dtype=np.uint8)
        for at in SCALES.get(name, []):
            scale = (random.normal(size=BLOCKS) * 0.01).astype(np.float16)
            blocks[:, at : at + 2] = scale.view(np.uint8).reshape(BLOCKS, 2)
        if name in ("BF16", "F16", "F32"):
            plain = random.normal(size=BLOCKS).astype(np.float16 if name == "F16" else np.float32)
            raw = plain.view(np.uint8).reshape(BLOCKS, -1)
            blocks = np.ascontiguousarray(raw[:, 2:] if name == "BF16" else raw)
        expected = np.asarray(dequantize(blocks, kind), np.float32).reshape(-1)
        done = subprocess.run([sys.argv[1], str(kind.value)], input=blocks.tobytes(), capture_output=True, check=True)
        got = np.frombuffer(done.stdout, np.float32)
        differ = got.size != BLOCKS * elements or int(np.count_nonzero(got.view(np.uint32) != expected.view(np.uint32)))
        print(f"{name}: {got.size} values, {int(differ)} differ")
        if differ:
            failed.append(name)
    if failed:
        sys.exit(f"differs from the gguf package: {', '.join(failed)}")


if __name__ == "__main__":
    main()
