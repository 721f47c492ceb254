#!/usr/bin/env python3
"""Writes golden logits made by Hugging Face transformers in float32.

Needs torch and transformers (CPU is enough), for the real model also gguf and tokenizers:

  goldens.py tests/data/golden                       the tiny models of mkmodel.py
  goldens.py tests/data/golden --smollm2 FILE.gguf   only the real model

Each file DIR/<name>.json is one JSON object:

  format        1
  name          file name without its ending
  mkmodel       list of arguments for mkmodel.py (no --out) which make the model; both forms of it
                and, for f32, the dtypes f16 and bf16 as well hold the very same weights. Absent
                for the real model.
  dtype         dtype of the matrices in the model file
  n_vocab       length of a full row of logits
  inv_freq      the head_dim / 2 inverse frequencies of the rotary embedding in use
  sample_ids    64 token ids, ascending
  cases         list of
    name        what the prompt is
    ids         prompt token ids; position of ids[i] is i; no id is added in front
    rows        for the last (at most 4) prompt positions, ascending:
      pos       position; the row holds the logits after ids[0..pos]
      top       8 pairs [id, logit], greatest first
      sample    logits of sample_ids
      mean      mean over all logits of the row
    greedy      ids that follow, always taking the greatest logit (not stopped at an end id)
    margin      least difference between the two greatest logits on that way: a run whose error is
                below half of it must yield the same ids

Logits have 7 significant digits. The same versions of the libraries give the same files; others
may differ in the last digits.
"""
import argparse
import json
import os
import sys
import tempfile
import warnings

import numpy as np
import torch
import transformers

import mkmodel

LLAMA3 = ["--rope-scaling", "llama3:8,1,4,256"]
TINY = {
    "llama": [],
    "llama-tied": ["--tied", "--seed", "2"],
    "llama-mha": ["--kv-heads", "4", "--seed", "3", "--theta", "500000"],
    "llama-head32": ["--head-dim", "32", "--seed", "4"],
    "llama-linear": ["--rope-scaling", "linear:4", "--seed", "5"],
    "llama-llama3": LLAMA3 + ["--seed", "6"],
    "llama-q8_0": ["--dtype", "q8_0", "--seed", "7"],
    "llama-q4_0": ["--dtype", "q4_0", "--seed", "7"],
    "llama-q4_1": ["--dtype", "q4_1", "--seed", "7"],
    "mistral-head32": ["--arch", "mistral", "--head-dim", "32", "--seed", "8"],
    "qwen2": ["--arch", "qwen2", "--seed", "9"],
    "qwen2-head32": ["--arch", "qwen2", "--head-dim", "32", "--tied", "--seed", "10"],
    "qwen3": ["--arch", "qwen3", "--seed", "11", "--theta", "1000000"],
    "qwen3-head32": ["--arch", "qwen3", "--head-dim", "32", "--tied", "--seed", "12"],
}
# Name and length of the random prompts; lengths around block sizes, one long.
PROMPTS = [("one", 1), ("seven", 7), ("block", 129), ("long", 1500)]
N_GREEDY = 16


def num(x):
    return float(f"{float(x):.7g}")


def run_case(model, name, ids, sample_ids, n_greedy):
    with torch.no_grad():
        out = model(torch.tensor([ids]), use_cache=True)
        logits = out.logits[0].float().numpy()
        rows = []
        for pos in range(max(0, len(ids) - 4), len(ids)):
            row = logits[pos]
            top = np.argsort(-row, kind="stable")[:8]
            rows.append({"pos": pos, "top": [[int(i), num(row[i])] for i in top],
                         "sample": [num(row[i]) for i in sample_ids],
                         "mean": num(row.astype(np.float64).mean())})
        greedy, margin, row = [], float("inf"), logits[-1]
        for _ in range(n_greedy):
            best = np.argsort(-row, kind="stable")[:2]
            margin = min(margin, float(row[best[0]] - row[best[1]]))
            greedy.append(int(best[0]))
            out = model(torch.tensor([[greedy[-1]]]), past_key_values=out.past_key_values,
                        use_cache=True)
            row = out.logits[0, -1].float().numpy()
    return {"name": name, "ids": ids, "rows": rows, "greedy": greedy, "margin": num(margin)}


def golden(model, name, dtype, prompts, mkmodel_args=None):
    n_vocab = model.config.vocab_size
    spread = mkmodel.integers(0, "sample", 4 * n_vocab, 0, n_vocab - 1)
    sample_ids = sorted(list(dict.fromkeys(spread.tolist()))[:64])
    g = {"format": 1, "name": name}
    if mkmodel_args is not None:
        g["mkmodel"] = mkmodel_args
    g.update(dtype=dtype, n_vocab=n_vocab,
             inv_freq=[float(f"{float(x):.9g}") for x in model.model.rotary_emb.inv_freq],
             sample_ids=sample_ids,
             cases=[run_case(model, n, ids, sample_ids, N_GREEDY) for n, ids in prompts])
    return g


def write(folder, g):
    path = os.path.join(folder, g["name"] + ".json")
    text = json.dumps(g, separators=(",", ":")).replace('{"name"', '\n{"name"')
    with open(path, "w", encoding="ascii") as f:
        f.write(text + "\n")
    worst = min(c["margin"] for c in g["cases"])
    print(f"{path}: {len(text)} bytes, least margin {worst:g}")


def load(folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager")
    return model.eval()


def tiny(folder, name, args):
    s = mkmodel.parse(args)
    with tempfile.TemporaryDirectory() as tmp:
        stored = s.dtype
        # What the file's values are, in float32.
        weights = mkmodel.make_weights(s)
        s.dtype = "f32"
        mkmodel.write_hf(s, tmp)
        tensors = [(mkmodel.hf_name(n), "F32", a.shape, mkmodel.encode(a, "f32"))
                   for n, a in weights.items()]
        mkmodel.write_safetensors(os.path.join(tmp, "model.safetensors"), tensors)
        model = load(tmp)
    prompts = [(n, mkmodel.integers(99, n, length, 3, s.vocab - 1).tolist())
               for n, length in PROMPTS]
    write(folder, golden(model, name, stored, prompts, args))


def smollm2(folder, path):
    import gguf
    from gguf.quants import dequantize
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    r = gguf.GGUFReader(path)
    f = {k: v.contents() for k, v in r.fields.items()}
    heads, kv = f["llama.attention.head_count"], f["llama.attention.head_count_kv"]
    config = transformers.LlamaConfig(
        hidden_size=f["llama.embedding_length"], num_hidden_layers=f["llama.block_count"],
        num_attention_heads=heads, num_key_value_heads=kv,
        intermediate_size=f["llama.feed_forward_length"],
        vocab_size=len(f["tokenizer.ggml.tokens"]),
        max_position_embeddings=f["llama.context_length"],
        rms_norm_eps=f["llama.attention.layer_norm_rms_epsilon"],
        rope_theta=f["llama.rope.freq_base"], tie_word_embeddings=True,
        attn_implementation="eager", bos_token_id=1, eos_token_id=2)
    config.rope_parameters = {"rope_type": "default", "rope_theta": f["llama.rope.freq_base"]}
    model = transformers.LlamaForCausalLM(config).eval()
    state = {}
    for t in r.tensors:
        a = np.array(dequantize(t.data, t.tensor_type), np.float32)
        for part, n in ((".attn_q.", heads), (".attn_k.", kv)):
            if part in t.name:
                # Back from pairs (2i, 2i + 1) to halves.
                a = a.reshape(n, a.shape[0] // n // 2, 2, -1).swapaxes(1, 2).reshape(a.shape)
        state[mkmodel.hf_name(t.name)] = torch.from_numpy(a)
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, strict=True)
    tok = Tokenizer(models.BPE({t: i for i, t in enumerate(f["tokenizer.ggml.tokens"])},
                               [tuple(m.split(" ")) for m in f["tokenizer.ggml.merges"]]))
    tok.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True),
         pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tok.decoder = decoders.ByteLevel()
    plain = tok.encode("The harbour of the old town lies").ids
    chat = ([1] + tok.encode("user\nWhat is the capital of France?").ids + [2]
            + tok.encode("\n").ids + [1] + tok.encode("assistant\n").ids)
    long = mkmodel.integers(99, "long", 600, 17, config.vocab_size - 1).tolist()
    g = golden(model, "smollm2", "q4_1", [("one", [504]), ("plain", plain), ("chat", chat),
                                          ("long", long)])
    for c in g["cases"]:
        print(c["name"], repr(tok.decode(c["greedy"])))
    write(folder, g)


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("folder")
    p.add_argument("--smollm2", metavar="FILE.gguf")
    p.add_argument("names", nargs="*", help="of tiny models; default: all")
    a = p.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.simplefilter("ignore", FutureWarning)
    if a.smollm2:
        smollm2(a.folder, a.smollm2)
        return
    unknown = [n for n in a.names if n not in TINY]
    if unknown:
        sys.exit(f"unknown models: {unknown}")
    for name in a.names or TINY:
        tiny(a.folder, name, TINY[name])


if __name__ == "__main__":
    main()
