"""The gap between first and second token with prompt and answer on one node, handed over directly, and through
the store, in turn on the same cluster. The store path may add 5 ms to a prompt of 4k tokens; handing over may
add a tenth of what a chunk of 512 tokens takes. Called by bench_store.sh.

The pools and tiers are small and full when it begins, as they are in a process that has run for a while: memory
that is touched for the first time would cost more than what is measured."""
import argparse
import json
import pathlib
import statistics
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/integ"))

from cluster import Cluster  # noqa: E402
from wire import DIRECT, LOCAL, STORE  # noqa: E402

CHUNK = 512  # tokens of a step: engine.max_batch_tokens
STORE_ADDS_MS = 5
HANDOFF_ADDS = 0.1  # of a chunk
PATHS = {LOCAL: "colocated", DIRECT: "direct", STORE: "store"}
SMALL = ["--tier.host_bytes=224M"]


def ask(c, n, i, path):
    """A prompt that nobody has seen: the gap and the time of its last chunk, about, in ms."""
    ids = [1000 + i, *((j * 7919 + i * 104729) % 40000 + 1000 for j in range(n - 1))]
    a = c.client.generate(ids=ids, max_tokens=3, ignore_eos=True, path=path, timeout=600)
    assert a.timing.path == path and a.timing.retries == 0
    return (a.timing.second_token - a.timing.first_token) * 1e3, a.timing.first_token * 1e3 * CHUNK / n


def measure(model, tokens, warm, runs):
    c = Cluster(model, kvstore=1, pool="224M", node_args=SMALL, kvstore_args=[*SMALL, "--relay.bytes=224M"])
    seen = {path: [] for path in PATHS}
    for i in range(warm + runs):
        for k, path in enumerate(PATHS):
            v = ask(c, tokens, len(PATHS) * i + k, path)
            if i >= warm:
                seen[path].append(v)
    c.finish()
    chunk = statistics.median(t for v in seen.values() for _, t in v)
    return {PATHS[path]: statistics.median(gap for gap, _ in v) for path, v in seen.items()}, chunk


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--json", action="store_true")
    p.add_argument("--model", required=True)
    p.add_argument("--tokens", type=int, default=4096)
    p.add_argument("--warm", type=int, default=3)
    p.add_argument("--runs", type=int, default=5)
    o = p.parse_args()
    gap, chunk = measure(o.model, o.tokens, o.warm, o.runs)
    for name, base, adds in (("direct", "colocated", HANDOFF_ADDS * chunk), ("store", "direct", STORE_ADDS_MS)):
        if o.json:
            print(json.dumps(dict(bench="store", case=f"path {o.tokens}", metric=f"second_token_{name}_ms",
                                  value=round(gap[name], 2), unit="ms", ceiling=f"{base} path plus {adds:.1f} ms",
                                  ceiling_value=round(gap[base] + adds, 2),
                                  ratio=round((gap[base] + adds) / gap[name], 3))))
        else:
            print(f"store  path {o.tokens}  {name}: second token {gap[name]:.1f} ms behind the first "
                  f"({base} {gap[base]:.1f}, allowed {gap[base] + adds:.1f})")


if __name__ == "__main__":
    main()
