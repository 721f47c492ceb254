"""Does the replay tool tell the truth? A live cluster of four prefill nodes is driven by a slice of a
trace, shortened: lengths divided by 8, one block of the trace is one identity block of 64 tokens,
requests beyond the model's context are left out. Its hits (usage.cached_tokens, as nodes really did)
stand beside what the replay of the same slice, with the same caches, predicts.

    truth.py --model FILE --trace FILE [--requests N] [--first N] [--speedup X] [--blocks N]
             [--max-tokens N] [--within POINTS] [--json]

--max-tokens leaves out longer requests, so that real models on few cores keep up. --within ends with
status 1 if live and predicted hits are further apart.
"""
import argparse
import json
import math
import pathlib
import random
import subprocess
import sys
import tempfile
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/integ"))

from cluster import Cluster, eventually  # noqa: E402
from wire import BUILD, DIRECT  # noqa: E402

DIVIDE, BLOCK, NODES = 8, 64, 4


def load(a, context, vocab):
    """(seconds, ids, hash_ids) of each request. A block's ids depend on its number in the trace alone."""
    out = []
    with open(a.trace) as f:
        for line in list(f)[a.first:]:
            r = json.loads(line)
            n = r["input_length"] // DIVIDE
            if 0 < n <= min(context - 9, a.max_tokens):
                ids = []
                for h in r["hash_ids"]:
                    rng = random.Random(h)
                    ids += [rng.randrange(3, vocab) for _ in range(BLOCK)]
                rng = random.Random(len(out) + 1_000_000)  # the tail is nobody else's
                whole = n // BLOCK * BLOCK
                out.append((r["timestamp"] / 1e3, ids[:whole] + [rng.randrange(3, vocab) for _ in range(n - whole)],
                            r["hash_ids"]))
            if len(out) == a.requests:
                break
    return [((t - out[0][0]) / a.speedup, ids, hashes) for t, ids, hashes in out]


def drive(c, requests):
    """Answers, and when each request was really sent: this process may have waited for a core."""
    answers, sent, lock = [], [], threading.Lock()

    def one(ids):
        m = c.client.generate(ids=ids, max_tokens=1, ignore_eos=True, path=DIRECT, timeout=600)
        with lock:
            answers.append((len(ids), m.usage.cached_tokens, m.timing))

    begin, threads = time.monotonic(), []
    for at, ids, _ in requests:
        time.sleep(max(0, begin + at - time.monotonic()))
        sent.append(time.monotonic() - begin)
        threads.append(threading.Thread(target=one, args=(ids,)))
        threads[-1].start()
    for t in threads:
        t.join()
    return answers, sent


def replay(a, trace, rate):
    out = subprocess.run([BUILD / "tests/bench_replay", "--trace", trace, "--nodes", str(NODES), "--blocks",
                          str(a.blocks), "--divide", str(DIVIDE), "--exact", "--tokens-per-s", str(rate), "--json"],
                         check=True, capture_output=True, text=True)
    return {m["metric"]: m["value"] for m in map(json.loads, out.stdout.splitlines())}


def predict(a, requests, sent, first_token_s):
    """What the replay says of the same requests at the same times, and the rate that it was told: the
    one at which first tokens come as late as they did. Nodes that share cores with each other and with
    the rest of the machine have no rate of their own that a single step would show."""
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as f:
        for (_, ids, hashes), at in zip(requests, sent):
            print(json.dumps({"timestamp": at * 1e3, "input_length": len(ids) * DIVIDE, "hash_ids": hashes}), file=f)
        f.flush()
        low, high = 10.0, 100000.0
        for _ in range(16):
            rate = math.sqrt(low * high)
            said = replay(a, f.name, rate)
            low, high = (rate, high) if said["ttft_mean_s"] > first_token_s else (low, rate)
    return said, rate


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--model", required=True)
    p.add_argument("--trace", required=True)
    p.add_argument("--requests", type=int, default=200)
    p.add_argument("--first", type=int, default=0)
    p.add_argument("--speedup", type=float, default=1)
    p.add_argument("--blocks", type=int, default=400)
    p.add_argument("--max-tokens", type=int, default=2**31)
    p.add_argument("--within", type=float)
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
        answers, sent = drive(c, requests)
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
    first_token_s = sum(t.first_token for _, _, t in answers) / len(answers)
    said, rate = predict(a, requests, sent, first_token_s)
    figures = {"live_hit_percent": live_blocks, "predicted_hit_percent": said["hit_rate_percent"],
               "off_by_points": live_blocks - said["hit_rate_percent"], "live_hit_token_percent": live,
               "router_expected_percent": 100 * cache.expected_tokens / max(1, cache.prompt_tokens),
               "first_token_s": first_token_s,
               "predicted_first_token_s": said["ttft_mean_s"],
               "predicted_tokens_per_s": rate, "prefill_tokens_per_s": sum(rates) / len(rates),
               "blocks_evicted": sum(s.blocks_evicted for s in tiers),
               "pool_share_percent": 100 * sum(s.tokens_cached_pool for s in tiers) /
               max(1, sum(s.tokens_cached for s in tiers))}
    for metric, value in figures.items():
        if a.json:
            print(json.dumps({"bench": "truth", "case": f"{len(answers)} requests", "metric": metric,
                              "value": round(value, 3), "unit": "percent" if "percent" in metric else "1"}))
        else:
            print(f"{metric:28} {value:10.2f}")
    return a.within is not None and abs(figures["off_by_points"]) > a.within


if __name__ == "__main__":
    sys.exit(main())
