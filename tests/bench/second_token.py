"""The gap between first and second token with prompt and answer on one node, handed over directly, and through
the store, in turn on the same cluster. Handing over may add a tenth of what a chunk of 512 tokens takes; the
store path may add 5 ms to a prompt of 4k tokens. Called by bench_handoff.sh, without store and with P and D
pinned to a core each, and by bench_store.sh.

The pools and tiers are small and full when it begins, as they are in a process that has run for a while: memory
that is touched for the first time would cost more than what is measured."""
import argparse
import json
import os
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


def pin(c):
    """The prefill node to one core, the decode node, which computes the colocated prompts, to another."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        sys.exit("two cores are needed: one for each node")
    for name, core in zip(("prefill-0", "decode-0"), cores):
        for task in pathlib.Path(f"/proc/{c.procs[name].p.pid}/task").iterdir():
            os.sched_setaffinity(int(task.name), {core})


def ask(c, n, i, path):
    """A prompt that nobody has seen: the gap and the time of its last chunk, about, in ms."""
    ids = [1000 + i, *((j * 7919 + i * 104729) % 40000 + 1000 for j in range(n - 1))]
    a = c.client.generate(ids=ids, max_tokens=3, ignore_eos=True, path=path, timeout=600)
    assert a.timing.path == path and a.timing.retries == 0
    return (a.timing.second_token - a.timing.first_token) * 1e3, a.timing.first_token * 1e3 * CHUNK / n


def measure(o):
    """Medians: the gap by path, a chunk."""
    paths = {p: n for p, n in PATHS.items() if o.store or p != STORE}
    c = Cluster(o.model, kvstore=int(o.store), pool="224M", node_args=SMALL,
                kvstore_args=[*SMALL, "--relay.bytes=224M"])
    if o.pin:
        pin(c)
    seen = {path: [] for path in paths}
    order = list(paths)
    for i in range(o.warm + o.runs):
        for k, path in enumerate(order):
            v = ask(c, o.tokens, len(paths) * i + k, path)
            if i >= o.warm:
                seen[path].append(v)
        order.append(order.pop(0))  # none always follows the same other
    c.finish()
    chunk = statistics.median(t for v in seen.values() for _, t in v)
    return {paths[path]: statistics.median(gap for gap, _ in v) for path, v in seen.items()}, chunk


def report(o, bench, metric, value, base, base_name, adds):
    if o.json:
        print(json.dumps(dict(bench=bench, case=f"path {o.tokens}", metric=metric, value=round(value, 2), unit="ms",
                              ceiling=f"{base_name} path plus {adds:.1f} ms", ceiling_value=round(base + adds, 2),
                              ratio=round((base + adds) / value, 3))), flush=True)
    else:
        print(f"{bench}  path {o.tokens}  {metric} {value:.1f} ms ({base_name} {base:.1f}, allowed "
              f"{base + adds:.1f})", flush=True)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--json", action="store_true")
    p.add_argument("--model", required=True)
    p.add_argument("--tokens", type=int, default=4096)
    p.add_argument("--warm", type=int, default=3)
    p.add_argument("--runs", type=int, default=9)
    p.add_argument("--store", action="store_true", help="the store path too")
    p.add_argument("--pin", action="store_true", help="each node to a core of its own")
    o = p.parse_args()
    gap, chunk = measure(o)
    adds = HANDOFF_ADDS * chunk
    if not o.store:
        report(o, "handoff", "second_token_gap_ms", gap["direct"], gap["colocated"], "colocated", adds)
        return
    report(o, "store", "second_token_direct_ms", gap["direct"], gap["colocated"], "colocated", adds)
    report(o, "store", "second_token_store_ms", gap["store"], gap["direct"], "direct", STORE_ADDS_MS)


if __name__ == "__main__":
    main()
