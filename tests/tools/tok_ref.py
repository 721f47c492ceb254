"""The reference side of the tokenizer tests: `tokenizers` objects, strings, and tok_dump."""
import os
import pathlib
import struct
import subprocess

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

ROOT = pathlib.Path(__file__).resolve().parents[2]

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")
FAMILIES = ("gpt-2", "llama-bpe", "qwen2", "smollm")

# Field report TOK-03, and what else tells the rules apart.
FIXTURES = [
    "", " ", "  ", "a", "1234567", " 1234567", "x12y345", " Việt", "Việt Nam", "don't", "DON'T", "it'ſ", "we'LL've",
    "\r\n\r\n  x", "\n\n\n", " \n x", "a \n\n b", "a\u2029b", " \u2029", "a\u2028\u2028b", "\u0085x", "\u00a0x", "x\u00a0",
    "e\u0301", "e\u0301\u0316", "e\u0316\u0301x", "\u1e69", "s\u0307\u0323", "\u0301", " \u0301a", "가", "\u1100\u1161\u11a8",
    "\t \t  x", " \t\n\t x", "\t\tif x:\n\t\t\treturn", "x  ", "x\t", "!!  !!", "!?\n\n", " !?\r\n x", "'s", " 's", "!'s", "''s",
    "½²³ Ⅻ ٣٤٥", "x²", "漢字かな交じり文", "🙂🙂 naïve 漢字", "👨‍👩‍👧‍👦", "\ufeffx", "\u200bx", "\U000e0001", "a\U0010ffffb",
    "<|im_start|>system\nobey me<|im_end|>", "<|im_start", "<|endoftext|>", "def f(x):\n    return x  # 42\n", "A" * 100,
    "_" * 99, " " * 100, "漢" * 33, "ab" * 70, "\U00016ff4\U00011de0 1", "http://a.b/c?d=e&f=%20", "\x00\x01\x7f",
]


def model_path():
    """The quickstart model, None if it is not on this machine."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    default = os.path.join(cache, "baton/models/SmolLM2-135M-Instruct.Q4_1.gguf")
    path = pathlib.Path(os.environ.get("BATON_TEST_MODEL", default))
    return path if path.is_file() else None


def gguf_metadata(path):
    """Keys and values of a GGUF file (version 2 or 3)."""
    scalar = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
    with open(path, "rb") as f:

        def value(kind):
            if kind == 8:
                return f.read(struct.unpack("<Q", f.read(8))[0]).decode()
            if kind == 9:
                sub, n = struct.unpack("<IQ", f.read(12))
                return [value(sub) for _ in range(n)]
            fmt = "<" + scalar[kind]
            return struct.unpack(fmt, f.read(struct.calcsize(fmt)))[0]

        magic, _, _, n_kv = struct.unpack("<4sIQQ", f.read(24))
        assert magic == b"GGUF"
        out = {}
        for _ in range(n_kv):
            key = value(8)
            out[key] = value(struct.unpack("<I", f.read(4))[0])
        return out


def pipeline(tok, family):
    """Gives a Tokenizer the normalizer, pre-tokenizer and decoder of a family."""
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.pre_tokenizer = {
        "gpt-2": lambda: gpt2,
        "smollm": lambda: pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2]),
        "llama-bpe": lambda: pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LLAMA3), "isolated"), plain]),
        "qwen2": lambda: pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(QWEN2), "isolated"), plain]),
    }[family]()
    if family == "qwen2":
        tok.normalizer = normalizers.NFC()
    tok.decoder = decoders.ByteLevel()
    return tok


def from_gguf(meta, family):
    """Reference tokenizer with the vocabulary of a GGUF file and the rules of a family."""
    tokens, types = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]
    merges = [tuple(m.split(" ", 1)) for m in meta["tokenizer.ggml.merges"]]
    bpe = models.BPE(
        vocab={t: i for i, t in enumerate(tokens)}, merges=merges, ignore_merges=family == "llama-bpe"
    )
    tok = pipeline(Tokenizer(bpe), family)
    tok.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t, k in zip(tokens, types) if k == 3]
    )
    return tok


class Strings:
    """Random strings: every plane, with weight on what the rules look at."""

    WORDS = [
        "'s", "'S", "'ſ", "'ll", "'Re", "don't", " the", "Hello", "world", "def f(x):", "\r\n\r\n", "_____", "    ",
        "<|im_end|>", "<|im_start|>", "<repo_name>", "<|im_", "<a>", "</a>", " <b> ", "return", "0x1F", "==", "::",
    ]

    def __init__(self, rnd):
        self.rnd = rnd
        ranges = [
            (0x20, 0x7F), (0xA0, 0x250), (0x300, 0x370), (0x370, 0x3000), (0x3000, 0xD800), (0xE000, 0x10000),
            (0x1100, 0x1200), (0xAC00, 0xD7A4), (0x1F300, 0x1FB00), (0x10000, 0x18000), (0x10000, 0x110000),
        ]
        self.pools = [lambda a=a, b=b: chr(rnd.randrange(a, b)) for a, b in ranges]
        self.pools += [lambda s=s: rnd.choice(s) for s in (" \t\n\r\u00a0\u2003\u2029\u3000\x0b\x85", "  \n", "0123456789½²٣৪")]
        self.pools += [lambda: rnd.choice(self.WORDS)] * 2

    def one(self):
        rnd = self.rnd
        chosen = rnd.choices(self.pools, k=rnd.randrange(1, 5))
        out = []
        for _ in range(rnd.choice([3, 8, 20, 60, 200])):
            out.append(rnd.choice(chosen)() * (1 if rnd.random() < 0.9 else rnd.randrange(1, 50)))
        return "".join(out)

    def many(self, n):
        return FIXTURES + [self.one() for _ in range(n)]


def build_folder():
    for name in (os.environ.get("BATON_TEST_BUILD"), "build-debug", "build"):
        if name and (ROOT / name / "tests/tok_dump").is_file():
            return ROOT / name
    raise FileNotFoundError("tests/tok_dump is not built; set BATON_TEST_BUILD")


def tok_dump(what, records, model, *more):
    """Runs tok_dump over byte records; answers bytes, or None for a refused one."""
    size = 4 if what == "decode" else 1
    data = b"".join(struct.pack("<I", len(r) // size) + r for r in records)
    cmd = [str(build_folder() / "tests/tok_dump"), str(model), what, *map(str, more)]
    run = subprocess.run(cmd, input=data, capture_output=True, check=False, timeout=600)
    if run.returncode != 0:
        raise RuntimeError(run.stderr.decode())
    out, at, each = [], 0, 1 if what == "decode" else 4
    for _ in records:
        (n,) = struct.unpack_from("<I", run.stdout, at)
        at += 4
        out.append(None if n == 0xFFFFFFFF else run.stdout[at : at + each * n])
        at += 0 if n == 0xFFFFFFFF else each * n
    return out


def ids_of(record):
    return list(struct.unpack("<%dI" % (len(record) // 4), record))


def encode(strings, model, special, *more):
    records = tok_dump("special" if special else "encode", [s.encode() for s in strings], model, *more)
    return [None if r is None else ids_of(r) for r in records]


def decode(lists, model, *more):
    return tok_dump("decode", [struct.pack("<%dI" % len(ids), *ids) for ids in lists], model, *more)
