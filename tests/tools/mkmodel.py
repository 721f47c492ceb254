#!/usr/bin/env python3
"""Makes a tiny random model: a Hugging Face directory or a GGUF file.

Needs numpy only. The same options give the same bytes on every machine: weights come from a
counter-based generator written out below, not from a library's. They are small integers times a
power of two, exact in f32, f16 and bf16, so those forms of one seed hold equal values. With a
quantized --dtype the HF form holds the dequantized values as f32.

  mkmodel.py --out tiny.gguf
  mkmodel.py --arch qwen3 --head-dim 32 --dtype bf16 --shards 3 --out dir/

The form follows from --out: a name that ends in .gguf is a file, anything else a directory.
The tokenizer is a byte-level BPE: ids 0..2 are <|endoftext|> <|im_start|> <|im_end|>, 3..258 the
bytes, then merges made from the text below. Answers end with id 2 or id 0.
"""
import argparse
import hashlib
import json
import os
import re
import struct
import sys

import numpy as np

CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TEXT = """
The lamp keeper walks along the quiet harbor every morning and counts the boats that came in with
the night wind. He writes their names into a long book, with the hour, the weather and the cargo:
salt, copper, oranges, timber, wool and letters from the islands. In the afternoon the children of
the village come up the stone stairs and ask him what the numbers mean. He answers slowly. A number
is a promise, he says, that somebody looked with care. Then they help him to clean the glass, to
trim the wick and to fill the reservoir, because light that is not prepared will not be there when
the storm begins. def main(argument): return value; for index in range(count): print(index) while
true do nothing until the signal arrives and the process stops. user system assistant question
"""


# --- weights ------------------------------------------------------------------------------------

def mix64(x):
    """The finalizer of SplitMix64 on an array of uint64."""
    with np.errstate(over="ignore"):
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


def integers(seed, name, n, lo, hi):
    """n integers of lo..hi, a function of (seed, name) alone."""
    key = int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "little")
    with np.errstate(over="ignore"):
        x = np.arange(1, n + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key)
    return (mix64(x) >> np.uint64(32)).astype(np.int64) % (hi - lo + 1) + lo


def matrix(seed, name, rows, cols, gain):
    """Uniform with a standard deviation near gain / sqrt(cols)."""
    exponent = round(float(np.log2(gain / np.sqrt(cols) / 0.577)))
    k = integers(seed, name, rows * cols, -128, 128).astype(np.float32)
    return (k / 128 * np.float32(2.0 ** exponent)).reshape(rows, cols)


def make_weights(s):
    """Canonical (GGUF) name -> float32 array in Hugging Face row order."""
    q, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
    # Small when it also projects the output: else the model repeats its input.
    gain = 2.0 if s.tied else 8.0
    w = {"token_embd.weight": matrix(s.seed, "token_embd.weight", s.vocab, s.d_model, gain)}

    def vector(name, n, lo, hi):
        w[name] = integers(s.seed, name, n, lo, hi).astype(np.float32) / 128

    for i in range(s.layers):
        p = f"blk.{i}."
        vector(p + "attn_norm.weight", s.d_model, 96, 160)
        for part, rows, cols, gain in (
            ("attn_q", q, s.d_model, 1.5), ("attn_k", kv, s.d_model, 1.5),
            ("attn_v", kv, s.d_model, 1.0), ("attn_output", s.d_model, q, 1.0),
            ("ffn_gate", s.ff, s.d_model, 1.0), ("ffn_up", s.ff, s.d_model, 1.0),
            ("ffn_down", s.d_model, s.ff, 1.0),
        ):
            w[p + part + ".weight"] = matrix(s.seed, p + part + ".weight", rows, cols, gain)
        if s.arch == "qwen2":
            for part, n in (("attn_q", q), ("attn_k", kv), ("attn_v", kv)):
                vector(p + part + ".bias", n, -64, 64)
        if s.arch == "qwen3":
            vector(p + "attn_q_norm.weight", s.head_dim, 96, 255)
            vector(p + "attn_k_norm.weight", s.head_dim, 96, 255)
        vector(p + "ffn_norm.weight", s.d_model, 96, 160)
    vector("output_norm.weight", s.d_model, 96, 160)
    if not s.tied:
        w["output.weight"] = matrix(s.seed, "output.weight", s.vocab, s.d_model, 2.0)
    if s.dtype in QUANT:
        for name, a in w.items():
            if a.ndim == 2:
                w[name] = QUANT[s.dtype][1](QUANT[s.dtype][0](a), a.shape)
    return w


# --- dtypes -------------------------------------------------------------------------------------

def to_bf16(a):
    """Round to nearest even; returns uint16."""
    u = np.ascontiguousarray(a, dtype=np.float32).view(np.uint32)
    return ((u + 0x7FFF + ((u >> 16) & 1)) >> 16).astype(np.uint16)


def blocks_of(a):
    return np.ascontiguousarray(a, dtype=np.float32).reshape(-1, 32)


def pack(dtype_fields):
    """Columns (n, bytes each) side by side -> bytes."""
    return np.concatenate([f.view(np.uint8).reshape(f.shape[0], -1) for f in dtype_fields],
                          axis=1).tobytes()


def inverse(d):
    return np.divide(1.0, d, out=np.zeros_like(d), where=d != 0)


def quant_q8_0(a):
    b = blocks_of(a)
    d = (np.abs(b).max(axis=1, keepdims=True) / 127).astype(np.float16)
    q = np.clip(np.rint(b * inverse(d.astype(np.float32))), -127, 127).astype(np.int8)
    return pack([d, q])


def dequant_q8_0(raw, shape):
    r = np.frombuffer(raw, np.uint8).reshape(-1, 34)
    d = r[:, :2].copy().view(np.float16).astype(np.float32)
    return (d * r[:, 2:].view(np.int8).astype(np.float32)).reshape(shape)


def nibbles(q):
    q = q.astype(np.uint8)
    return q[:, :16] | (q[:, 16:] << 4)


def from_nibbles(p):
    return np.concatenate([p & 15, p >> 4], axis=1).astype(np.float32)


def quant_q4_0(a):
    b = blocks_of(a)
    peak = np.take_along_axis(b, np.abs(b).argmax(axis=1, keepdims=True), axis=1)
    d = (peak / -8).astype(np.float16)
    q = np.clip(np.rint(b * inverse(d.astype(np.float32)) + 8), 0, 15)
    return pack([d, nibbles(q)])


def dequant_q4_0(raw, shape):
    r = np.frombuffer(raw, np.uint8).reshape(-1, 18)
    d = r[:, :2].copy().view(np.float16).astype(np.float32)
    return (d * (from_nibbles(r[:, 2:]) - 8)).reshape(shape)


def quant_q4_1(a):
    b = blocks_of(a)
    low = b.min(axis=1, keepdims=True)
    d = ((b.max(axis=1, keepdims=True) - low) / 15).astype(np.float16)
    m = low.astype(np.float16)
    q = np.clip(np.rint((b - m.astype(np.float32)) * inverse(d.astype(np.float32))), 0, 15)
    return pack([d, m, nibbles(q)])


def dequant_q4_1(raw, shape):
    r = np.frombuffer(raw, np.uint8).reshape(-1, 20)
    d = r[:, :2].copy().view(np.float16).astype(np.float32)
    m = r[:, 2:4].copy().view(np.float16).astype(np.float32)
    return (d * from_nibbles(r[:, 4:]) + m).reshape(shape)


QUANT = {
    "q8_0": (quant_q8_0, dequant_q8_0, 8),
    "q4_0": (quant_q4_0, dequant_q4_0, 2),
    "q4_1": (quant_q4_1, dequant_q4_1, 3),
}


def encode(a, dtype):
    if dtype == "f32":
        return np.ascontiguousarray(a, np.float32).tobytes()
    if dtype == "f16":
        return np.ascontiguousarray(a, np.float16).tobytes()
    if dtype == "bf16":
        return to_bf16(a).tobytes()
    return QUANT[dtype][0](a)


# --- tokenizer ----------------------------------------------------------------------------------

def byte_chars():
    """The printable stand-ins of byte-level BPE, byte -> character."""
    keep = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table, extra = {b: chr(b) for b in keep}, 256
    for b in range(256):
        if b not in table:
            table[b] = chr(extra)
            extra += 1
    return table


def make_tokenizer(vocab):
    """(tokens, merges): at most `vocab` tokens, merges by frequency, ties by text."""
    chars = byte_chars()
    tokens = CONTROL + [chars[b] for b in range(256)]
    words = {}
    for word in re.findall(r" ?[A-Za-z]+", " ".join(TEXT.split())):
        key = tuple(chars[b] for b in word.encode())
        words[key] = words.get(key, 0) + 1
    merges = []
    while len(tokens) < vocab:
        counts = {}
        for word, n in words.items():
            for pair in zip(word, word[1:]):
                counts[pair] = counts.get(pair, 0) + n
        if not counts:
            break
        best = min(counts, key=lambda p: (-counts[p], p))
        merges.append(best)
        tokens.append(best[0] + best[1])
        merged = {}
        for word, n in words.items():
            out, i = [], 0
            while i < len(word):
                if word[i:i + 2] == best:
                    out.append(word[i] + word[i + 1])
                    i += 2
                else:
                    out.append(word[i])
                    i += 1
            merged[tuple(out)] = merged.get(tuple(out), 0) + n
        words = merged
    return tokens, merges


def tokenizer_json(tokens, merges):
    added = [{"id": i, "content": t, "single_word": False, "lstrip": False, "rstrip": False,
              "normalized": False, "special": True} for i, t in enumerate(CONTROL)]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
                  "use_regex": True}
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Digits", "individual_digits": True}, byte_level]},
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "dropout": None, "unk_token": None,
                  "continuing_subword_prefix": None, "end_of_word_suffix": None,
                  "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                  "vocab": {t: i for i, t in enumerate(tokens)},
                  "merges": [f"{a} {b}" for a, b in merges]},
    }


# --- Hugging Face directory ---------------------------------------------------------------------

HF_LAYER = {
    "attn_norm.weight": "input_layernorm.weight", "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight", "attn_v.weight": "self_attn.v_proj.weight",
    "attn_q.bias": "self_attn.q_proj.bias", "attn_k.bias": "self_attn.k_proj.bias",
    "attn_v.bias": "self_attn.v_proj.bias", "attn_output.weight": "self_attn.o_proj.weight",
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight", "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight", "ffn_down.weight": "mlp.down_proj.weight",
}
HF_TOP = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight",
          "output.weight": "lm_head.weight"}
HF_CLASS = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM",
            "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def hf_name(name):
    if name in HF_TOP:
        return HF_TOP[name]
    _, layer, rest = name.split(".", 2)
    return f"model.layers.{layer}.{HF_LAYER[rest]}"


def hf_config(s):
    dtype = {"f16": "float16", "bf16": "bfloat16"}.get(s.dtype, "float32")
    c = {
        "architectures": [HF_CLASS[s.arch]], "model_type": s.arch, "torch_dtype": dtype,
        "hidden_size": s.d_model, "num_hidden_layers": s.layers, "num_attention_heads": s.heads,
        "num_key_value_heads": s.kv_heads, "head_dim": s.head_dim, "intermediate_size": s.ff,
        "vocab_size": s.vocab, "max_position_embeddings": s.ctx, "rms_norm_eps": s.eps,
        "hidden_act": "silu", "tie_word_embeddings": s.tied, "bos_token_id": 0, "eos_token_id": 2,
        "attention_dropout": 0.0, "initializer_range": 0.02, "use_cache": True,
    }
    if s.arch in ("llama", "qwen3"):
        c["attention_bias"] = False
    if s.arch == "llama":
        c["mlp_bias"] = False
    if s.arch == "mistral":
        c["sliding_window"] = None
    if s.arch in ("qwen2", "qwen3"):
        c["use_sliding_window"] = False
        c["sliding_window"] = None
        c["max_window_layers"] = s.layers
    rope = None
    if s.rope:
        kind = {"rope_type" if s.rope_key != "old" else "type": s.rope[0], "factor": s.rope[1]}
        rope = kind
        if s.rope[0] == "llama3":
            rope.update(low_freq_factor=s.rope[2], high_freq_factor=s.rope[3],
                        original_max_position_embeddings=int(s.rope[4]))
    if s.rope_key == "nested":
        c["rope_parameters"] = {"rope_theta": s.theta, **(rope or {"rope_type": "default"})}
    else:
        c["rope_theta"] = s.theta
        c["rope_scaling"] = rope
    return c


def write_json(path, value):
    with open(path, "w", encoding="utf-8") as f:
        json.dump(value, f, ensure_ascii=False, indent=1)
        f.write("\n")


def write_safetensors(path, tensors):
    """tensors: list of (name, dtype text, shape, bytes). Header padded to 8 bytes with blanks."""
    head, at = {"__metadata__": {"format": "pt"}}, 0
    for name, dtype, shape, raw in tensors:
        head[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + len(raw)]}
        at += len(raw)
    text = json.dumps(head, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for t in tensors:
            f.write(t[3])


def write_hf(s, out):
    weights = make_weights(s)
    os.makedirs(out, exist_ok=True)
    dtype = s.dtype if s.dtype in ("f32", "f16", "bf16") else "f32"
    text = {"f32": "F32", "f16": "F16", "bf16": "BF16"}[dtype]
    tensors = [(hf_name(n), text, a.shape, encode(a, dtype)) for n, a in weights.items()]
    if s.shards <= 1:
        write_safetensors(os.path.join(out, "model.safetensors"), tensors)
    else:
        where = {}
        for i in range(s.shards):
            name = f"model-{i + 1:05}-of-{s.shards:05}.safetensors"
            part = tensors[len(tensors) * i // s.shards:len(tensors) * (i + 1) // s.shards]
            write_safetensors(os.path.join(out, name), part)
            where.update({t[0]: name for t in part})
        total = sum(len(t[3]) for t in tensors)
        write_json(os.path.join(out, "model.safetensors.index.json"),
                   {"metadata": {"total_size": total}, "weight_map": where})
    tokens, merges = make_tokenizer(s.vocab)
    write_json(os.path.join(out, "config.json"), hf_config(s))
    write_json(os.path.join(out, "generation_config.json"),
               {"bos_token_id": 0, "eos_token_id": [2, 0]})
    write_json(os.path.join(out, "tokenizer.json"), tokenizer_json(tokens, merges))
    write_json(os.path.join(out, "tokenizer_config.json"), {
        "add_bos_token": False, "add_prefix_space": False, "bos_token": "<|endoftext|>",
        "eos_token": "<|im_end|>", "unk_token": "<|endoftext|>", "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False, "model_max_length": s.ctx,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "added_tokens_decoder": {str(i): {"content": t, "lstrip": False, "normalized": False,
                                          "rstrip": False, "single_word": False, "special": True}
                                 for i, t in enumerate(CONTROL)},
    })


# --- GGUF ---------------------------------------------------------------------------------------

GGML_TYPE = {"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q8_0": 8, "bf16": 30}
FILE_TYPE = {"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q8_0": 7, "bf16": 32}


def g_str(s):
    b = s.encode()
    return struct.pack("<Q", len(b)) + b


class Keys:
    """Key/value section of a GGUF file."""

    def __init__(self):
        self.n, self.raw = 0, b""

    def add(self, key, kind, payload):
        self.n += 1
        self.raw += g_str(key) + struct.pack("<I", kind) + payload

    def u32(self, key, v):
        self.add(key, 4, struct.pack("<I", v))

    def f32(self, key, v):
        self.add(key, 6, struct.pack("<f", v))

    def flag(self, key, v):
        self.add(key, 7, struct.pack("<B", v))

    def text(self, key, v):
        self.add(key, 8, g_str(v))

    def texts(self, key, vs):
        self.add(key, 9, struct.pack("<IQ", 8, len(vs)) + b"".join(g_str(v) for v in vs))

    def i32s(self, key, vs):
        self.add(key, 9, struct.pack("<IQ", 5, len(vs)) + struct.pack(f"<{len(vs)}i", *vs))


def rope_factors(s):
    """Divisors of the inverse frequencies under llama3 scaling."""
    _, factor, low, high, ctx = s.rope
    out = []
    for i in range(s.head_dim // 2):
        wavelen = 2 * np.pi * s.theta ** (2 * i / s.head_dim)
        if wavelen < ctx / high:
            out.append(1.0)
        elif wavelen > ctx / low:
            out.append(factor)
        else:
            smooth = (ctx / wavelen - low) / (high - low)
            out.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(out, np.float32)


def interleave(a, heads):
    """Row order of the llama GGUF form: the halves of each head take turns."""
    return a.reshape(heads, 2, a.shape[0] // heads // 2, *a.shape[1:]).swapaxes(1, 2).reshape(a.shape)


def gguf_keys(s):
    arch = "llama" if s.arch == "mistral" else s.arch
    k = Keys()
    k.text("general.architecture", arch)
    k.text("general.name", f"tiny {s.arch} seed {s.seed}")
    k.u32("general.file_type", FILE_TYPE[s.dtype])
    k.u32(f"{arch}.block_count", s.layers)
    k.u32(f"{arch}.context_length", s.ctx)
    k.u32(f"{arch}.embedding_length", s.d_model)
    k.u32(f"{arch}.feed_forward_length", s.ff)
    k.u32(f"{arch}.attention.head_count", s.heads)
    k.u32(f"{arch}.attention.head_count_kv", s.kv_heads)
    if s.head_dim * s.heads != s.d_model or s.arch == "qwen3":
        k.u32(f"{arch}.attention.key_length", s.head_dim)
        k.u32(f"{arch}.attention.value_length", s.head_dim)
    k.f32(f"{arch}.rope.freq_base", s.theta)
    if s.rope and s.rope[0] == "linear":
        k.text(f"{arch}.rope.scaling.type", "linear")
        k.f32(f"{arch}.rope.scaling.factor", s.rope[1])
    k.f32(f"{arch}.attention.layer_norm_rms_epsilon", s.eps)
    tokens, merges = make_tokenizer(s.vocab)
    k.text("tokenizer.ggml.model", "gpt2")
    k.text("tokenizer.ggml.pre", "smollm")
    k.texts("tokenizer.ggml.tokens", tokens)
    k.i32s("tokenizer.ggml.token_type", [3 if t in CONTROL else 1 for t in tokens])
    k.texts("tokenizer.ggml.merges", [f"{a} {b}" for a, b in merges])
    k.u32("tokenizer.ggml.bos_token_id", 0)
    k.u32("tokenizer.ggml.eos_token_id", 2)
    k.flag("tokenizer.ggml.add_bos_token", False)
    k.text("tokenizer.chat_template", CHAT_TEMPLATE)
    return k


def write_gguf(s, out):
    weights = make_weights(s)
    if s.rope and s.rope[0] == "llama3":
        weights["rope_freqs.weight"] = rope_factors(s)
    keys, infos, data = gguf_keys(s), b"", []
    at = 0
    for name, a in weights.items():
        if s.arch in ("llama", "mistral") and ".attn_q." in name:
            a = interleave(a, s.heads)
        if s.arch in ("llama", "mistral") and ".attn_k." in name:
            a = interleave(a, s.kv_heads)
        dtype = s.dtype if a.ndim == 2 else "f32"
        raw = encode(a, dtype)
        infos += g_str(name) + struct.pack("<I", a.ndim)
        infos += struct.pack(f"<{a.ndim}Q", *reversed(a.shape))
        infos += struct.pack("<IQ", GGML_TYPE[dtype], at)
        raw += b"\0" * (-len(raw) % 32)
        data.append(raw)
        at += len(raw)
    head = b"GGUF" + struct.pack("<IQQ", 3, len(weights), keys.n) + keys.raw + infos
    head += b"\0" * (-len(head) % 32)
    with open(out, "wb") as f:
        f.write(head)
        for raw in data:
            f.write(raw)


# --- command line -------------------------------------------------------------------------------

def rope_spec(text):
    """none | linear:FACTOR | llama3:FACTOR,LOW,HIGH,ORIGINAL_CTX"""
    if text == "none":
        return None
    kind, _, rest = text.partition(":")
    values = [float(v) for v in rest.split(",")] if rest else []
    if (kind, len(values)) not in (("linear", 1), ("llama3", 4)):
        raise argparse.ArgumentTypeError(rope_spec.__doc__)
    return (kind, *values)


def parser():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--arch", default="llama", choices=sorted(HF_CLASS))
    p.add_argument("--layers", type=int, default=3)
    p.add_argument("--d-model", type=int, default=64)
    p.add_argument("--heads", type=int, default=4)
    p.add_argument("--kv-heads", type=int, default=2)
    p.add_argument("--head-dim", type=int, default=0, help="0 = d-model / heads")
    p.add_argument("--ff", type=int, default=128)
    p.add_argument("--vocab", type=int, default=512, help="at least 259; rows of the embedding")
    p.add_argument("--ctx", type=int, default=8192)
    p.add_argument("--theta", type=float, default=10000.0)
    p.add_argument("--eps", type=float, default=1e-5)
    p.add_argument("--rope-scaling", dest="rope", type=rope_spec, default=None,
                   help=rope_spec.__doc__)
    p.add_argument("--rope-key", default="new", choices=["new", "old", "nested"],
                   help="spelling in config.json: rope_type, type, or rope_parameters")
    p.add_argument("--tied", action="store_true", help="output projection is the embedding")
    p.add_argument("--dtype", default="f32", choices=sorted(GGML_TYPE))
    p.add_argument("--shards", type=int, default=1)
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--out", help="FILE.gguf or a directory")
    return p


def parse(argv):
    s = parser().parse_args(argv)
    s.head_dim = s.head_dim or s.d_model // s.heads
    if s.vocab < 259 or s.heads % s.kv_heads or s.head_dim % 2:
        sys.exit("mkmodel.py: vocab below 259, kv-heads not dividing heads, or odd head-dim")
    return s


def main(argv):
    s = parse(argv)
    if not s.out:
        sys.exit("mkmodel.py: --out is required")
    if s.out.endswith(".gguf"):
        write_gguf(s, s.out)
    else:
        write_hf(s, s.out)


if __name__ == "__main__":
    main(sys.argv[1:])
