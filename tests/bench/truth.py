"""Does the replay tool tell the truth? A live cluster of four prefill nodes is driven by a slice of a
trace, shortened: lengths divided by 8, one block of the trace is one identity block of 64 tokens,
requests beyond the model's context are left out. Its hits (usage.cached_tokens, as nodes really did)
stand beside what the replay of the same slice, with the same caches, predicts.

    truth.py --model FILE --trace FILE [--requests N] [--first N] [--speedup X] [--blocks N] [--json]
"""
import argparse
import json
import pathlib
import random
import subprocess
import sys
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/integ"))

from cluster import Cluster, eventually  # noqa: E402
from wire import BUILD, DIRECT  # noqa: E402

DIVIDE, BLOCK, NODES = 8, 64, 4


def load(a, context, vocab):
    """(seconds, ids) of each request. A block's ids depend on its number in the trace alone."""
    out = []
    with open(a.trace) as f:
        for line in list(f)[a.first:]:
            r = json.loads(line)
            n = r["input_length"] // DIVIDE
            if 0 < n < context - 8:
                ids = []
                for h in r["hash_ids"]:
                    rng = random.Random(h)
                    ids += [rng.randrange(3, vocab) for _ in range(BLOCK)]
                rng = random.Random(len(out) + 1_000_000)  # the tail is nobody else's
                whole = n // BLOCK * BLOCK
                out.append((r["timestamp"] / 1e3, ids[:whole] + [rng.randrange(3, vocab) for _ in range(n - whole)]))
            if len(out) == a.requests:
                break
    return [((t - out[0][0]) / a.speedup, ids) for t, ids in out]


def drive(c, requests):
    answers, lock = [], threading.Lock()

    def one(ids):
        m = c.client.generate(ids=ids, max_tokens=1, ignore_eos=True, path=DIRECT, timeout=600)
        with lock:
            answers.append((len(ids), m.usage.cached_tokens, m.timing))

    begin, threads = time.monotonic(), []
    for at, ids in requests:
        time.sleep(max(0, begin + at - time.monotonic()))
        threads.append(threading.Thread(target=one, args=(ids,)))
        threads[-1].start()
    for t in threads:
        t.join()
    return answers


def predict(a, context, rate):
    out = subprocess.run([BUILD / "tests/bench_replay", "--trace", a.trace, "--nodes", str(NODES), "--blocks",
                          str(a.blocks), "--divide", str(DIVIDE), "--exact", "--requests", str(a.requests),
                          "--first", str(a.first), "--speedup", str(a.speedup), "--max-tokens", str(context - 9),
                          "--tokens-per-s", str(max(rate, 1)), "--json"], check=True, capture_output=True, text=True)
    return {m["metric"]: m["value"] for m in map(json.loads, out.stdout.splitlines())}


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--model", required=True)
    p.add_argument("--trace", required=True)
    p.add_argument("--requests", type=int, default=200)
    p.add_argument("--first", type=int, default=0)
    p.add_argument("--speedup", type=float, default=1)
    p.add_argument("--blocks", type=int, default=400)
    p.add_argument("--json", action="store_true")
    a = p.parse_args()
    c = Cluster(a.model, prefill=NODES, decode=1, pool="64M",
                node_args=[f"--engine.block_tokens={BLOCK}", "--tier.host_bytes=0"],
                router_args=["--admission.node_queue=0s", "--admission.first_token=0s"])
    try:
        page = c.status("prefill-0")
        pool = 64 * 2**20 // page.pages_total * 4 * a.blocks  # bytes of so many blocks of four pages
        c.kill_all()
        c = Cluster(a.model, prefill=NODES, decode=1, pool=str(pool),
                    node_args=[f"--engine.block_tokens={BLOCK}", "--tier.host_bytes=0"],
                    router_args=["--admission.node_queue=0s", "--admission.first_token=0s"])
        model = c.client.model()
        requests = load(a, model.context_tokens, model.vocab_size)
        answers = drive(c, requests)
        rates = [n.prefill_tokens_per_s for n in c.client.server().nodes if n.role == "prefill"]
        cache = c.client.server().cache
        tiers = [c.status(f"prefill-{i}") for i in range(NODES)]
        eventually(lambda: c.client.server().requests_active == 0, 10)
    finally:
        c.kill_all()
    tokens = sum(n for n, _, _ in answers)
    live = 100 * sum(k for _, k, _ in answers) / tokens
    blocks = sum(n // BLOCK for n, _, _ in answers)
    live_blocks = 100 * sum(k for _, k, _ in answers) / BLOCK / blocks
    said = predict(a, model.context_tokens, sum(rates) / len(rates))
    figures = {"live_hit_percent": live_blocks, "predicted_hit_percent": said["hit_rate_percent"],
               "off_by_points": live_blocks - said["hit_rate_percent"], "live_hit_token_percent": live,
               "router_expected_percent": 100 * cache.expected_tokens / max(1, cache.prompt_tokens),
               "prefill_tokens_per_s": sum(rates) / len(rates),
               "blocks_evicted": sum(s.blocks_evicted for s in tiers),
               "pool_share_percent": 100 * sum(s.tokens_cached_pool for s in tiers) /
               max(1, sum(s.tokens_cached for s in tiers))}
    for metric, value in figures.items():
        if a.json:
            print(json.dumps({"bench": "truth", "case": f"{len(answers)} requests", "metric": metric,
                              "value": round(value, 3), "unit": "percent" if "percent" in metric else "1"}))
        else:
            print(f"{metric:28} {value:10.2f}")


if __name__ == "__main__":
    main()
