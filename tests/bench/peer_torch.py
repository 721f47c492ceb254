#!/usr/bin/env python3
"""The shapes of gpu-engine in plain PyTorch: a peer of the same run, where PyTorch is installed.

Llama-3.1-8B in BF16 with random weights, eager, one kernel after the other: torch.nn.functional for
products, norms and SiLU, scaled_dot_product_attention (causal, grouped heads) over contiguous K and
V. No compiler, no graphs, no paged cache: what somebody writes first. Decode appends to K and V in
place; the token is the argmax.

    peer_torch.py [--json] [--layers N]

One line a case, medians of 5; exit status 77 and a reason if there is no PyTorch or no card."""
import argparse
import json
import statistics
import sys
import time

try:
    import torch
    import torch.nn.functional as F
except ImportError as e:
    print(f"peer_torch: {e}", file=sys.stderr)
    sys.exit(77)

HEADS, KV_HEADS, WIDTH, FF, VOCAB, D = 32, 8, 4096, 14336, 128256, 128


class Model:
    def __init__(self, layers, ctx):
        def make(*shape):
            return torch.randn(*shape, device="cuda", dtype=torch.bfloat16).mul_(shape[-1] ** -0.5)

        self.layers = [
            {
                "qkv": make((HEADS + 2 * KV_HEADS) * D, WIDTH),
                "o": make(WIDTH, HEADS * D),
                "gu": make(2 * FF, WIDTH),
                "down": make(WIDTH, FF),
                "k": make(KV_HEADS, ctx, D),
                "v": make(KV_HEADS, ctx, D),
            }
            for _ in range(layers)
        ]
        self.embed = make(VOCAB, WIDTH)
        self.head = make(VOCAB, WIDTH)
        self.norm = torch.ones(WIDTH, device="cuda", dtype=torch.bfloat16)
        angle = torch.outer(
            torch.arange(ctx, device="cuda"),
            500000.0 ** -(torch.arange(0, D, 2, device="cuda") / D),
        )
        self.cos = torch.cos(angle).repeat(1, 2).to(torch.bfloat16)
        self.sin = torch.sin(angle).repeat(1, 2).to(torch.bfloat16)

    def rope(self, x, pos, n):
        a, b = x.chunk(2, -1)
        turned = torch.cat((-b, a), -1)
        return x * self.cos[pos : pos + n] + turned * self.sin[pos : pos + n]

    def step(self, ids, pos):
        """ids [n] from position pos on; returns the next id."""
        n = ids.shape[0]
        x = F.embedding(ids, self.embed)
        for w in self.layers:
            h = F.rms_norm(x, (WIDTH,), self.norm, 1e-5)
            q, k, v = F.linear(h, w["qkv"]).view(n, -1, D).transpose(0, 1).split(
                (HEADS, KV_HEADS, KV_HEADS)
            )
            q, k = self.rope(q, pos, n), self.rope(k, pos, n)
            w["k"][:, pos : pos + n] = k
            w["v"][:, pos : pos + n] = v
            att = F.scaled_dot_product_attention(
                q[None],
                w["k"][None, :, : pos + n],
                w["v"][None, :, : pos + n],
                is_causal=n > 1,
                enable_gqa=True,
            )
            x = x + F.linear(att[0].transpose(0, 1).reshape(n, HEADS * D), w["o"])
            h = F.rms_norm(x, (WIDTH,), self.norm, 1e-5)
            gate, up = F.linear(h, w["gu"]).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, w["down"])
        x = F.rms_norm(x[-1:], (WIDTH,), self.norm, 1e-5)
        return F.linear(x, self.head).argmax(-1)


def seconds(call):
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def decode(model, pos, steps):
    ids = torch.zeros(1, device="cuda", dtype=torch.long)
    for i in range(steps):
        ids = model.step(ids, pos + i)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--json", action="store_true")
    p.add_argument("--layers", type=int, default=32)
    a = p.parse_args()
    if not torch.cuda.is_available():
        print("peer_torch: no card here", file=sys.stderr)
        return 77
    torch.manual_seed(1)
    model = Model(a.layers, 8192)
    peer = f"PyTorch {torch.__version__} eager, SDPA"
    with torch.inference_mode():
        cases = []
        for n in (1024, 8192):
            ids = torch.randint(VOCAB, (n,), device="cuda")
            cases.append((f"prefill {n}", lambda ids=ids: model.step(ids, 0), 1))
        cases.append(("decode 1 x 2048", lambda: decode(model, 2048 - 32, 32), 32))
        for name, call, n in cases:
            seconds(call)
            ms = statistics.median(seconds(call) for _ in range(5)) * 1e3 / n
            if a.json:
                line = {"bench": "gpu-engine", "case": name, "metric": "ms", "value": round(ms, 3)}
                print(json.dumps({**line, "unit": "ms", "of": peer}), flush=True)
            else:
                print(f"{name:<20} {ms:9.3f} ms  ({peer})", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
