"""The gap between first and second token through the store and directly, in turn on the same cluster: the
store path may add 5 ms to a prompt of 4k tokens. Called by bench_store.sh."""
import argparse
import json
import pathlib
import statistics
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/integ"))

from cluster import Cluster  # noqa: E402
from wire import DIRECT, STORE  # noqa: E402

ALLOWED_MS = 5


def gap_ms(c, n, i, path):
    """A prompt that nobody has seen."""
    ids = [1000 + i, *((j * 7919 + i * 104729) % 40000 + 1000 for j in range(n - 1))]
    a = c.client.generate(ids=ids, max_tokens=3, ignore_eos=True, path=path, timeout=600)
    assert a.timing.path == path and a.timing.retries == 0
    return (a.timing.second_token - a.timing.first_token) * 1e3


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--json", action="store_true")
    p.add_argument("--model", required=True)
    p.add_argument("--tokens", type=int, default=4096)
    p.add_argument("--runs", type=int, default=5)
    o = p.parse_args()
    c = Cluster(o.model, kvstore=1, pool="512M")
    gaps = {DIRECT: [], STORE: []}
    for i in range(o.runs + 1):
        for k, path in enumerate(gaps):
            v = gap_ms(c, o.tokens, 2 * i + k, path)
            if i > 0:
                gaps[path].append(v)
    c.finish()
    direct, store = (statistics.median(v) for v in gaps.values())
    if o.json:
        print(json.dumps(dict(bench="store", case=f"path {o.tokens}", metric="second_token_gap_ms", value=round(store, 2),
                              unit="ms", ceiling="direct path", ceiling_value=round(direct, 2),
                              ratio=round(direct / store, 3))))
    else:
        print(f"store  path {o.tokens}  second token {store:.1f} ms behind the first (direct {direct:.1f}, "
              f"allowed {direct + ALLOWED_MS:.1f})")


main()
