"""Safetensors files with numpy alone: 8 bytes of header length, a JSON header, then the tensors' bytes one after another.

BF16 has no numpy type; it is held as uint16 bit patterns and named by the dtype string beside the array.
"""

import json
import struct

import numpy as np

STORAGE = {"F16": np.dtype("<f2"), "BF16": np.dtype("<u2"), "F32": np.dtype("<f4"), "F8_E4M3": np.dtype("u1"), "U8": np.dtype("u1")}


def write(path, tensors, metadata=None):
    """tensors: name -> (dtype string, array of the storage type). Returns the bytes of tensor data written."""
    header, offset = {}, 0
    if metadata:
        header["__metadata__"] = metadata
    for name, (dtype, array) in tensors.items():
        assert array.dtype == STORAGE[dtype], (name, array.dtype)
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [offset, offset + array.nbytes]}
        offset += array.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, array in tensors.values():
            file.write(np.ascontiguousarray(array).tobytes())
    return offset


def read(path):
    """name -> (dtype string, array of the storage type)."""
    with open(path, "rb") as file:
        data = file.read()
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    tensors = {}
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            array = np.frombuffer(data[8 + length + begin : 8 + length + end], STORAGE[entry["dtype"]])
            tensors[name] = (entry["dtype"], array.reshape(entry["shape"]))
    return tensors


def f32_to_bf16(values):
    """Bit patterns of float32 values rounded to nearest even; finite values only."""
    bits = np.asarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def to_f32(dtype, array):
    if dtype == "BF16":
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32)
