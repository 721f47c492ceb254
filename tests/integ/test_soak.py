"""Mixed load with cancels for as long as BATON_TEST_SOAK_SECONDS says: prompts of many lengths over every
path, chats that come back, clients that leave in the middle or as soon as they have asked, HTTP beside gRPC.
Answers stay right, every page comes back, nothing stays pinned, and once it is warm no process's memory or
open files grow."""
import json
import os
import pathlib
import random
import statistics
import threading
import time

import grpc
import pytest

from cluster import SANITIZED, eventually
from test_http import Http
from wire import AUTO, DIRECT, LOCAL, STORE, Answer, request

PAGE = 3 * 2 * 2 * 16 * 16 * 2  # layers, K and V, heads, dim, tokens, bytes of the model "tiny"
BLOB = 8 * PAGE
SECONDS = float(os.environ.get("BATON_TEST_SOAK_SECONDS") or 12)
LONG = SECONDS >= 60
CLIENTS = 6
GROWTH = 0.03  # of resident memory, from the second quarter to the last
GROWTH_MB = 3  # what is noise in any case


def memory_mb(pid):
    """Anonymous memory: what is mapped of files and shared comes and goes with the page cache."""
    for line in pathlib.Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) / 1024
    return 0


def files(pid):
    return len(list(pathlib.Path(f"/proc/{pid}/fd").iterdir()))


class Load:
    def __init__(self, c):
        self.c, self.stop = c, threading.Event()
        self.known, self.lock = {}, threading.Lock()
        self.counts = dict.fromkeys(("whole", "cut", "left", "http"), 0)
        self.errors, self.wrong = {}, []
        self.threads = [threading.Thread(target=self.run, args=(k,)) for k in range(CLIENTS)]
        for t in self.threads:
            t.start()

    def count(self, what):
        with self.lock:
            self.counts[what] += 1

    def check(self, prompt, tokens, whole):
        """The same prompt has the same answer for good; who saw a part saw its beginning."""
        with self.lock:
            before = self.known.setdefault(prompt, tokens) if whole else self.known.get(prompt)
        if before is not None and list(before[:len(tokens)]) != list(tokens):
            self.wrong.append((prompt, before, tokens))

    def grpc(self, prompt, rng):
        n, a = 16, Answer()
        fate = rng.choice(["whole"] * 5 + ["cut", "cut", "left"])
        call = self.c.client.stream(request(ids=ids(prompt), max_tokens=n, ignore_eos=True,
                                            path=rng.choice([AUTO, LOCAL, DIRECT, STORE])), timeout=120)
        if fate == "left":
            time.sleep(rng.uniform(0, 0.02))
            call.cancel()
            self.count("left")
            return
        for m in call:
            a.add(m)
            if fate == "cut" and len(a.tokens) > 2:
                call.cancel()
                break
        self.count(fate)
        self.check(prompt, list(a.tokens), fate == "whole")

    def http(self, http, prompt):
        r, data = http.call("POST", "/v1/completions", json.dumps(
            {"prompt": ids(prompt), "max_tokens": 4, "temperature": 0}).encode())
        assert r.status == 200, data
        self.count("http")

    def run(self, k):
        rng, http = random.Random(k), Http(self.c)
        while not self.stop.is_set():
            # Some come back, most are new; lengths from one token to more than a dozen blocks.
            prompt = (rng.randrange(40), rng.choice([1, 40, 130, 300, 700])) if rng.random() < 0.3 else \
                (rng.randrange(1 << 30), rng.randrange(1, 900))
            try:
                self.http(http, prompt) if rng.random() < 0.1 else self.grpc(prompt, rng)
            except grpc.RpcError as e:
                with self.lock:
                    text = f"{e.code().name} {e.details()}"
                    self.errors[text] = self.errors.get(text, 0) + 1
            if len(self.known) > 2000:  # this process must not grow either
                with self.lock:
                    self.known = {p: t for p, t in self.known.items() if p[0] < 40}

    def end(self):
        self.stop.set()
        for t in self.threads:
            t.join()


def ids(prompt):
    rng = random.Random(prompt[0])
    return [rng.randrange(3, 500) for _ in range(prompt[1])]


def watch(c, load, seen):
    """Samples of memory and files of every process, until the time is over."""
    end = time.monotonic() + SECONDS
    while time.monotonic() < end and not load.wrong:
        for name, p in c.procs.items():
            seen.setdefault(name, []).append((memory_mb(p.p.pid), files(p.p.pid)))
        time.sleep(max(0.25, SECONDS / 400))


def grown(samples):
    """(before, after) medians of the second and of the last quarter: memory, files."""
    n = len(samples) // 4
    return [(statistics.median(x[i] for x in samples[n:2 * n]), statistics.median(x[i] for x in samples[-n:]))
            for i in range(2)]


@pytest.mark.skipif(SANITIZED, reason="sanitizers keep what is freed")
def test_nothing_grows_under_mixed_load(cluster, models, tmp_path):
    sharing = ["--store.enabled=on", "--engine.bring=always", f"--tier.host_bytes={40 * BLOB}",
               f"--tier.disk_bytes={200 * BLOB}", "--tier.disk_write_rate=0"]
    c = cluster(prefill=0, decode=0, wait=False, pool=str(256 * PAGE), router_args=["--http.listen=127.0.0.1:0"])
    for kind in ("prefill", "decode"):
        for i in range(2):
            c.add_node(kind, f"{kind}-{i}", [*sharing, f"--tier.disk_path={tmp_path}/{kind}-{i}"])
    c.add_store("store-0", [f"--tier.host_bytes={60 * BLOB}", f"--tier.disk_path={tmp_path}/store-0",
                            f"--tier.disk_bytes={200 * BLOB}", "--relay.bytes=8M"])
    for n in c.node_names():
        c.procs[n].wait_ready()
    eventually(lambda: len(c.ready_nodes()) == 5, 30, "all ready")
    load, seen = Load(c), {}
    try:
        watch(c, load, seen)
    finally:
        load.end()
    figures = {name: grown(s) for name, s in seen.items()}
    print(f"\n{SECONDS:.0f} s: {load.counts}, errors {load.errors}")
    for name, ((mb0, mb1), (f0, f1)) in figures.items():
        print(f"  {name}: {mb0:.1f} -> {mb1:.1f} MB, {f0:.0f} -> {f1:.0f} files")
    assert not load.wrong, load.wrong[:2]
    assert not load.errors, load.errors
    assert all(n > 0 for n in load.counts.values()), load.counts
    c.pages_back(timeout=60)  # a prompt that nobody fetched from a daemon is kept for a lease, 30 s
    for n in c.node_names():
        eventually(lambda n=n: c.status(n).tier_pins == 0, 10, f"{n} has nothing pinned")
    if LONG:  # in seconds nothing gets warm
        bad = {name: f for name, f in figures.items()
               if f[0][1] > f[0][0] * (1 + GROWTH) + GROWTH_MB or f[1][1] > f[1][0] + 8}
        assert not bad, bad
