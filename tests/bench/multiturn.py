"""Time to first token of the second turn of a chat, by where the KV of its history lies.

Real processes (router, one node, for `store` also Redis and a store daemon), the quickstart model, real
text cut by its tokenizer. For every place (engine pool, host memory, disk, store) two clusters stand
side by side, one with every cache off; their second turns alternate, so that both see the same noise.
For `store` the node is started anew before every second turn: it has seen nothing, and computed nothing.

  ttft_ms       median; ceiling: the larger of the time to load the history from that tier (its bytes
                over the measured rate of the tier) and the time to compute the new part (another second
                turn right behind, with the history in the pool)
  on_over_off   time to first token with every cache off, over the one with it on: above 1, the cache wins

`--sweep` moves the length of the new part and the bandwidth of the host tier (throttled) through the
point where loading and computing take the same time: on_over_off must not fall below 0.98.
"""
import argparse
import json
import pathlib
import statistics
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/integ"))

from cluster import Cluster, eventually  # noqa: E402
from wire import LOCAL, request  # noqa: E402

ANSWER = 24
MB = 1 << 20


def text_ids(client):
    """Token ids of the documents of this tree, each turn of a chat is cut from somewhere else."""
    text = "\n".join(p.read_text() for p in sorted(ROOT.glob("**/README.md"))[:12])
    ids = []
    for i in range(0, min(len(text), 60000), 6000):
        ids += client.tokenize(text[i:i + 6000])
    return ids


class Chats:
    """Cuts prompts that no earlier prompt begins like."""

    def __init__(self, ids):
        self.ids, self.n = ids, 0

    def cut(self, n):
        self.n += 1
        start = self.n * 97 % len(self.ids)
        return [self.n % 1000 + 1000, *(self.ids[start:] + self.ids)[:n - 1]]


def ttft(client, prompt, n=1):
    """(ms to the first token, whole answer, cached tokens)."""
    started, first, tokens, cached = time.perf_counter(), None, [], 0
    for m in client.stream(request(ids=prompt, max_tokens=n, ignore_eos=True, path=LOCAL), timeout=300):
        if m.tokens and first is None:
            first = (time.perf_counter() - started) * 1e3
        tokens += m.tokens
        if m.finish:
            cached = m.usage.cached_tokens
    return first, tokens, cached


class Place:
    """A cluster whose history of a chat lies in one tier when the second turn comes."""

    def __init__(self, name, args, o):
        self.name, self.o = name, o
        # The pool holds one chat and a little more, so that another chat pushes it out.
        self.room = o.history + ANSWER + max(o.suffixes) + 512
        pool = f"{(self.room + 128) * o.token_bytes // MB + 1}M"
        if name == "engine":
            pool = "256M"
        store = name == "store"
        self.c = Cluster(str(o.model), prefill=0, decode=1, role="both", redis=store, kvstore=int(store), pool=pool,
                         threads=o.threads, node_args=args)
        self.client = self.c.client

    def first_turn(self, chats):
        prompt = chats.cut(self.o.history)
        _, answer, _ = ttft(self.client, prompt, ANSWER)
        return prompt + answer

    def push_out(self, chats):
        """Puts the history where it belongs."""
        if self.name == "engine":
            return
        if self.name == "store":
            time.sleep(1)
            self.restart_node()
            return
        for _ in range(1 if self.name == "host" else 3):
            ttft(self.client, chats.cut(self.room - 64), 1)
        time.sleep(0.5 if self.name == "host" else 2)

    def restart_node(self):
        """A node in place of the one that has ended: the router speaks to it, it knows the store."""
        self.c.procs["decode-0"].stop()
        self.c.restart("decode-0")
        life = self.c.status("decode-0").incarnation

        def known():
            n = self.c.client.nodes().get("decode-0")
            return n and n.state == "ready" and n.incarnation == life and self.c.status("decode-0").store_daemons == 1
        eventually(known, 20, "the node ready")

    def load_ms(self, tokens):
        """What bringing that many tokens from this tier takes, by the rate that the node has measured."""
        s = self.c.status("decode-0")
        rate = {"host": s.tier_host_load_rate, "disk": s.tier_disk_load_rate,
                "store": s.store_load_rate}.get(self.name, 0)
        return tokens * self.o.token_bytes / rate * 1e3 if rate else 0

    def close(self):
        self.c.kill_all()


PLACES = {
    "engine": ["--tier.host_bytes=0"],
    "host": ["--tier.host_bytes=1G"],
    "disk": ["--tier.host_bytes=48M", "--tier.disk_path={disk}", "--tier.disk_write_rate=0"],
    "store": ["--store.enabled=on", "--tier.host_bytes=256M"],
}


def open_place(name, o, extra=()):
    folder = o.folder / f"{name}-{time.monotonic_ns()}"
    folder.mkdir(parents=True)
    return Place(name, [a.format(disk=folder) for a in PLACES[name]] + list(extra), o)


def measure(place, off, chats, suffix, o):
    """Medians: first token with the history in its place, with caches off, with it in the pool; tokens found."""
    on_ms, off_ms, pool_ms, cached = [], [], [], []
    for _ in range(o.rounds):
        history = place.first_turn(chats)
        place.push_out(chats)
        prompt = history + chats.cut(suffix)
        turns = [(off, off_ms), (place, on_ms)]
        if len(on_ms) % 2:
            turns.reverse()
        answers = set()
        for who, into in turns:
            ms, tokens, hit = ttft(who.client, prompt, 4)
            into.append(ms)
            answers.add(tuple(tokens))
            if who is place:
                cached.append(hit)
        assert len(answers) == 1, "the answer depends on the cache"
        pool_ms.append(ttft(place.client, history + chats.cut(suffix))[0])
    return [statistics.median(x) for x in (on_ms, off_ms, pool_ms, cached)]


def report(o, **line):
    line = {"bench": "multiturn", **line}
    if o.json:
        print(json.dumps(line), flush=True)
    else:
        tail = f"  {line['ceiling']} {line['ceiling_value']:.1f}, ratio {line['ratio']:.2f}" if "ceiling" in line else ""
        print(f"{line['case']:34} {line['metric']:12} {line['value']:9.2f} {line['unit']}{tail}", flush=True)


def run_places(o, off, chats):
    for name in o.places:
        place = open_place(name, o)
        try:
            for suffix in o.suffixes:
                on, plain, pool, cached = measure(place, off, chats, suffix, o)
                limit = max(place.load_ms(cached), pool)
                case = f"{name} history {o.history} new {suffix}"
                report(o, case=case, metric="ttft_ms", value=on, unit="ms", ceiling="larger of load and new part",
                       ceiling_value=limit, ratio=limit / on)
                report(o, case=case, metric="on_over_off", value=plain / on, unit="x")
                report(o, case=case, metric="cached_tokens", value=cached, unit="tokens")
        finally:
            place.close()


def run_sweep(o, off, chats):
    for rate in o.rates:
        place = open_place("host", o, [f"--tier.host_max_rate={rate}M"] if rate else [])
        try:
            for suffix in o.suffixes:
                on, plain, _, cached = measure(place, off, chats, suffix, o)
                case = f"sweep host {rate or 'full'} mb_per_s new {suffix}"
                report(o, case=case, metric="on_over_off", value=plain / on, unit="x")
                report(o, case=case, metric="cached_tokens", value=cached, unit="tokens")
        finally:
            place.close()


def main():
    numbers = lambda s: [int(x) for x in s.split(",")]  # noqa: E731
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--model", required=True)
    a.add_argument("--json", action="store_true")
    a.add_argument("--history", type=int, default=1024, help="tokens of the first prompt")
    a.add_argument("--suffixes", type=numbers, default=[16, 128, 512], help="tokens of the new part")
    a.add_argument("--rates", type=numbers, default=[2, 6, 12, 25, 100, 0], help="MB/s of the sweep, 0 = full")
    a.add_argument("--places", type=lambda s: s.split(","), default=list(PLACES))
    a.add_argument("--rounds", type=int, default=5)
    a.add_argument("--threads", type=int, default=1)
    a.add_argument("--sweep", action="store_true", help="only the sweep")
    a.add_argument("--no-sweep", action="store_true")
    o = a.parse_args()
    import tempfile
    with tempfile.TemporaryDirectory(prefix="baton-multiturn.") as folder:
        o.folder, o.token_bytes = pathlib.Path(folder), 30 * 3 * 64 * 2 * 2
        off = Place("engine", ["--engine.prefix_cache=off", "--tier.host_bytes=0"], o)
        try:
            chats = Chats(text_ids(off.client))
            if not o.sweep:
                run_places(o, off, chats)
            if not o.no_sweep:
                run_sweep(o, off, chats)
        finally:
            off.close()


if __name__ == "__main__":
    main()
