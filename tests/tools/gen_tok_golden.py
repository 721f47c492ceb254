#!/usr/bin/env python3
"""Writes tests/data/tok: a small trained vocabulary and the ids that `tokenizers` gives with it.

vocab.txt    n_tokens n_merges; a line per token: type (as in GGUF), blank, text; a line per merge
FAMILY.json  the same as tokenizer.json, with the family's rules
ids.txt      FAMILY t|s (t: control tokens are text) hex of the text, ids
long.txt     FAMILY hex of a text, times it is repeated, number of ids, FNV-1a of their bytes

usage: gen_tok_golden.py   (needs tokenizers; run from anywhere)
"""
import json
import random
import struct

from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, trainers

import tok_ref

OUT = tok_ref.ROOT / "tests/data/tok"
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>"]
LONG = [("A", 1_000_000), ("_", 200_000), (" ", 1_000_000), ("漢", 300_000), ("\u0301\u0316", 150_000), ("\r\n", 200_000)]
WORDS = [
    "1234567 in 2024", " Việt Nam", "don't DON'T we'll WE'VE I'm", "\r\n\r\n  x", "def main(argc, argv):\n    return 0\n",
    "naïve café", "漢字かな交じり文 漢字", "🙂🙂", "    if (x == NULL) {\n\t\treturn;\n    }\n", "the quick brown fox jumps",
    "AAAA", "________", "        ", "漢漢漢漢",
]


def fnv(data):
    h = 0xCBF29CE484222325
    for b in data:
        h = (h ^ b) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return h


def train():
    tok = tok_ref.pipeline(Tokenizer(models.BPE()), "llama-bpe")
    trainer = trainers.BpeTrainer(
        vocab_size=720, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    corpus = WORDS * 40 + [p.read_text() for p in sorted(tok_ref.ROOT.glob("common/base/*.h"))]
    tok.train_from_iterator(corpus, trainer)
    tree = json.loads(tok.to_str())["model"]
    return tree["vocab"], [tuple(m) for m in tree["merges"]]


def main():
    OUT.mkdir(parents=True, exist_ok=True)
    vocab, merges = train()
    n_plain = len(vocab)
    added = CONTROL + ["<tool>"]  # the last is no control token
    lines = [f"{n_plain + len(added)} {len(merges)}"]
    lines += [f"1 {t}" for t in sorted(vocab, key=vocab.get)]
    lines += [f"{3 if t in CONTROL else 4} {t}" for t in added]
    lines += [" ".join(m) for m in merges]
    (OUT / "vocab.txt").write_text("\n".join(lines) + "\n")

    rnd = random.Random(7)
    strings = tok_ref.FIXTURES + WORDS + ["a<tool>b", "<|im_end|><tool> <|im_start|>", "<|endoftext|>" * 3]
    strings += [tok_ref.Strings(rnd).one()[:60] for _ in range(30)]
    ids_lines, long_lines = [], []
    for family in tok_ref.FAMILIES:
        bpe = models.BPE(vocab=vocab, merges=merges, ignore_merges=family == "llama-bpe")
        tok = tok_ref.pipeline(Tokenizer(bpe), family)
        tok.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in CONTROL])
        tok.add_tokens([AddedToken("<tool>", normalized=False)])
        compact = json.dumps(json.loads(tok.to_str()), ensure_ascii=False, separators=(",", ":"))
        (OUT / f"{family}.json").write_text(compact + "\n")
        for special in (False, True):
            tok.encode_special_tokens = not special
            for s in strings:
                ids = tok.encode(s, add_special_tokens=False).ids
                hexed = s.encode().hex() or "-"
                ids_lines.append(f"{family} {'s' if special else 't'} {hexed} {','.join(map(str, ids)) or '-'}")
        for unit, n in LONG:
            ids = tok.encode(unit * n, add_special_tokens=False).ids
            h = fnv(struct.pack(f"<{len(ids)}i", *ids))
            long_lines.append(f"{family} {unit.encode().hex()} {n} {len(ids)} {h:016x}")
    (OUT / "ids.txt").write_text("\n".join(ids_lines) + "\n")
    (OUT / "long.txt").write_text("\n".join(long_lines) + "\n")


if __name__ == "__main__":
    main()
