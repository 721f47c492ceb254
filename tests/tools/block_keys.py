#!/usr/bin/env python3
"""Block keys computed independently of kvstore/block/key.c, from the table in key.h alone; prints
the golden values of tests/unit/kvstore/block/test_key.c."""
import hashlib
import struct


def field(tag, data):
    return struct.pack("<BI", tag, len(data)) + data


def root(secret, model, epoch, adapter, salt, kv_format, numerics):
    data = b"BKR1" + field(1, secret) + field(2, model) + field(3, struct.pack("<Q", epoch))
    data += field(4, adapter) + field(5, salt) + field(6, kv_format) + field(7, numerics)
    return hashlib.sha256(data).digest()[:16]


def block(parent, ids):
    data = b"BKB1" + field(16, parent) + field(17, struct.pack(f"<{len(ids)}i", *ids))
    return hashlib.sha256(data).digest()[:16]


def main():
    model, fmt = bytes(range(32)), bytes(range(100, 132))
    r0 = root(b"", bytes(32), 0, b"", b"", bytes(32), b"")
    r1 = root(b"cluster secret", model, 0x0123456789ABCDEF, b"lora-a", b"tenant 7", fmt, b"cpu/avx2/f32/1")
    print("root, all empty        ", r0.hex())
    print("root, all set          ", r1.hex())
    ids = [(i * 7919 + 13) % 50000 for i in range(1000)]
    print("one token, id 0        ", block(r1, [0]).hex())
    print("one token, id -1       ", block(r1, [-1]).hex())
    print("one token, id 2^31-1   ", block(r1, [2**31 - 1]).hex())
    print("256 tokens             ", block(r1, ids[:256]).hex())
    print("257 tokens             ", block(r1, ids[:257]).hex())
    print("1000 tokens            ", block(r1, ids).hex())
    key = r1
    for i in range(1000 // 128):
        key = block(key, ids[i * 128:(i + 1) * 128])
        if i in (0, 6):
            print(f"chain of 128s, block {i} ", key.hex())


if __name__ == "__main__":
    main()
