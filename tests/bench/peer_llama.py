#!/usr/bin/env python3
"""Speed of llama.cpp, the peer of the `engine` benchmark, on one GGUF file.

Uses the low-level API of the llama-cpp-python package, built for this machine. Reads cases from
standard input, one a line, and answers each with its tokens a second, so that the caller can take
turns with its own runs:

    prefill N     a prompt of N tokens until its first token
    decode B      B sequences together, each 16 tokens of prompt and 64 of answer, greedy

The first line printed names the peer, its version and the instruction sets that it uses.
"""
import argparse
import ctypes
import sys
import time

import llama_cpp as ll
import numpy as np

PROMPT, ANSWER = 16, 64  # as in bench_engine.c
CHUNK = 512              # tokens a pass, as our max_batch_tokens


@ll.llama_log_callback
def quiet(_level, _text, _arg):
    """The library's log is not wanted."""


class Peer:
    def __init__(self, path, threads, now):
        self.now = now
        ll.llama_log_set(quiet, ctypes.c_void_p(0))
        ll.llama_backend_init()
        params = ll.llama_model_default_params()
        params.n_gpu_layers = 0
        self.model = ll.llama_model_load_from_file(path.encode(), params)
        if not self.model:
            raise SystemExit(f"the peer cannot load {path}")
        self.vocab = ll.llama_vocab_n_tokens(ll.llama_model_get_vocab(self.model))
        params = ll.llama_context_default_params()
        params.n_ctx = 4096
        params.n_batch = params.n_ubatch = CHUNK
        params.n_seq_max = 8
        params.kv_unified = True
        params.type_k = params.type_v = 1  # f16, as our pool
        params.n_threads = params.n_threads_batch = threads
        self.ctx = ll.llama_init_from_model(self.model, params)
        self.batch = ll.llama_batch_init(CHUNK, 0, 1)

    def run(self, rows):
        """rows: (token, position, sequence, wants logits)."""
        b = self.batch
        b.n_tokens = len(rows)
        for i, (token, pos, seq, wanted) in enumerate(rows):
            b.token[i], b.pos[i], b.logits[i] = token, pos, wanted
            b.n_seq_id[i], b.seq_id[i][0] = 1, seq
        if ll.llama_decode(self.ctx, b) != 0:
            raise SystemExit("the peer failed to decode")
        ll.llama_synchronize(self.ctx)

    def best(self, row):
        logits = ll.llama_get_logits_ith(self.ctx, row)
        view = (ctypes.c_float * self.vocab).from_address(ctypes.addressof(logits.contents))
        return int(np.argmax(np.frombuffer(view, np.float32)))

    def clear(self):
        ll.llama_memory_clear(ll.llama_get_memory(self.ctx), False)

    def prompt(self, seq, n):
        return [(1 + (seq * 131 + k * 7919) % (self.vocab - 1), k, seq, k == n - 1)
                for k in range(n)]

    def prefill(self, n):
        self.clear()
        rows = self.prompt(0, n)
        start = self.now()
        for at in range(0, n, CHUNK):
            self.run(rows[at:at + CHUNK])
        self.best(-1)
        return n / (self.now() - start)

    def decode(self, n):
        self.clear()
        rows = [r for s in range(n) for r in self.prompt(s, PROMPT)]
        self.run(rows)
        tokens = [self.best((s + 1) * PROMPT - 1) for s in range(n)]
        start = self.now()
        for step in range(ANSWER - 1):
            self.run([(tokens[s], PROMPT + step, s, True) for s in range(n)])
            tokens = [self.best(s) for s in range(n)]
        return n * (ANSWER - 1) / (self.now() - start)


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--model", required=True)
    p.add_argument("--threads", type=int, required=True)
    p.add_argument("--cpu", action="store_true", help="processor time instead of wall time")
    args = p.parse_args()
    peer = Peer(args.model, args.threads, time.process_time if args.cpu else time.perf_counter)
    flags = ll.llama_print_system_info().decode().split("|")
    on = sorted({f.split("=")[0].split(":")[-1].strip() for f in flags if f.strip().endswith("= 1")})
    print(f"llama-cpp-python {ll.__version__} [{' '.join(on)}]", flush=True)
    for line in sys.stdin:
        kind, n = line.split()
        rate = peer.prefill(int(n)) if kind == "prefill" else peer.decode(int(n))
        print(f"{rate:.3f}", flush=True)


if __name__ == "__main__":
    main()
