#!/usr/bin/env python3
"""Rewrites the matrices of a GGUF file in another dtype, everything else as it was.

  requant.py --dtype q8_0 model.Q4_1.gguf model.Q8_0.gguf

For benchmarks that compare dtypes on one model: values come from the file given, so going to a
wider dtype loses nothing but what the file had lost already. Needs numpy.
"""
import argparse
import os
import struct
import sys

import numpy as np

import mkmodel

SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
NAMES = {v: k for k, v in mkmodel.GGML_TYPE.items()}
BLOCK = {"f32": (1, 4), "f16": (1, 2), "bf16": (1, 2), "q4_0": (32, 18), "q4_1": (32, 20),
         "q8_0": (32, 34)}


class Reader:
    def __init__(self, raw):
        self.raw, self.at = raw, 0

    def take(self, fmt):
        v = struct.unpack_from("<" + fmt, self.raw, self.at)
        self.at += struct.calcsize("<" + fmt)
        return v[0] if len(v) == 1 else v

    def text(self):
        n = self.take("Q")
        self.at += n
        return bytes(self.raw[self.at - n:self.at])

    def skip_value(self, kind):
        if kind == 8:
            self.text()
        elif kind == 9:
            item, n = self.take("IQ")
            for _ in range(n):
                self.skip_value(item)
        else:
            self.at += SIZES[kind]


def decode(raw, dtype, shape):
    if dtype in mkmodel.QUANT:
        return mkmodel.QUANT[dtype][1](raw, shape)
    if dtype == "bf16":
        u = np.frombuffer(raw, np.uint16).astype(np.uint32) << 16
        return u.view(np.float32).reshape(shape)
    return np.frombuffer(raw, np.float16 if dtype == "f16" else np.float32).astype(
        np.float32).reshape(shape)


def convert(src, dst, dtype):
    raw = np.memmap(src, np.uint8, "r")
    r = Reader(raw)
    magic, version, n_tensors, n_keys = r.take("4sIQQ")
    if magic != b"GGUF":
        raise SystemExit(f"{src} is no GGUF file")
    keys_at, keys = r.at, None
    patch, align = None, 32
    for _ in range(n_keys):
        name, kind = r.text(), r.take("I")
        if name == b"general.file_type":
            patch = r.at - keys_at
        if name == b"general.alignment":
            align = struct.unpack_from("<I", raw, r.at)[0]
        r.skip_value(kind)
    keys = bytearray(raw[keys_at:r.at])
    if patch is not None:
        struct.pack_into("<I", keys, patch, mkmodel.FILE_TYPE[dtype])
    tensors = []
    for _ in range(n_tensors):
        name, n_dims = r.text(), r.take("I")
        dims = [r.take("Q") for _ in range(n_dims)]
        kind, offset = r.take("IQ")
        tensors.append((name, dims, NAMES[kind], offset))
    data_at = (r.at + align - 1) // align * align
    infos, at, plan = b"", 0, []
    for name, dims, old, offset in tensors:
        new = dtype if len(dims) == 2 else old
        n = int(np.prod(dims))
        size = n // BLOCK[new][0] * BLOCK[new][1]
        infos += struct.pack("<Q", len(name)) + name + struct.pack("<I", len(dims))
        infos += struct.pack(f"<{len(dims)}Q", *dims)
        infos += struct.pack("<IQ", mkmodel.GGML_TYPE[new], at)
        plan.append((dims, old, new, offset, n // BLOCK[old][0] * BLOCK[old][1]))
        at += (size + align - 1) // align * align
    head = struct.pack("<4sIQQ", magic, version, n_tensors, n_keys) + bytes(keys) + infos
    part = dst + ".part"
    with open(part, "wb") as f:
        f.write(head + b"\0" * (-len(head) % align))
        for dims, old, new, offset, size in plan:
            piece = raw[data_at + offset:data_at + offset + size].tobytes()
            if new != old:
                piece = mkmodel.encode(decode(piece, old, dims[::-1]), new)
            f.write(piece + b"\0" * (-len(piece) % align))
    os.replace(part, dst)


def main(argv):
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--dtype", choices=sorted(mkmodel.GGML_TYPE), required=True)
    p.add_argument("src")
    p.add_argument("dst")
    a = p.parse_args(argv)
    convert(a.src, a.dst, a.dtype)


if __name__ == "__main__":
    main(sys.argv[1:])
