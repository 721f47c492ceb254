"""What the router adds: relayed tokens a second and processor time a token, delay of the first token,
memory, new connections. One real router on one core; a simulated node and the clients on the others.

    front.py --model FILE [--case NAME]... [--streams N] [--seconds S] [--step-us N] [--json]
    front.py --model FILE --case soak-http|soak-grpc [--minutes N] [--soak-streams N]
    front.py --model FILE --peers PYTHON --case peers

Cases: http and grpc (tokens), first-http and first-grpc (one stream at a time; beside it what a bare
relay adds), fresh (a new connection for every request), long (a prompt of 4,000 ids: processor time
a request). Only when asked for: router, which is the benchmark of that name, takes it apart: what a
request, a message to a client, a token of a node cost, in processor time and in time, beside what
each may cost; soak-http and soak-grpc (many streams for minutes, some of which are left: memory and
descriptors); peers (tokens and first token over HTTP, of this router and of others that --peers has
installed).
Rates are what the router's core allows only where the clients are not the limit; processor time of
the router a token says which it is.
"""
import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/integ"))

from cluster import Cluster, eventually  # noqa: E402
from peer_routers import PEERS, Peer, version  # noqa: E402
from wire import BUILD  # noqa: E402

CASES = ("http", "grpc", "first-http", "first-grpc", "fresh", "long")
PROMPT = 4000  # ids: no text, so nothing is tokenized
BLOCK_TOKENS = 64  # of a node that has a prefix cache: then prompts are hashed
EXTRA = ("router", "soak-http", "soak-grpc", "peers")
SOAK_STEP_US = 200000
TICKS = os.sysconf("SC_CLK_TCK")


def cpu_s(pid):
    f = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(f[11]) + int(f[12])) / TICKS


def rss_mb(pid):
    for line in pathlib.Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    return 0


def pin(pid, cores):
    for task in pathlib.Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(task.name), cores)


def fds(pid):
    return len(os.listdir(f"/proc/{pid}/fd"))


class Helper:
    """A program of this benchmark that prints its address."""

    def __init__(self, cores, name, *args):
        self.p = subprocess.Popen([str(BUILD / "tests" / name), *args], stdout=subprocess.PIPE, text=True)
        os.sched_setaffinity(self.p.pid, cores)
        self.address = self.p.stdout.readline().split()[1]

    def stop(self):
        self.p.kill()
        self.p.wait()


class Bench:
    def __init__(self, o):
        self.o = o
        cores = sorted(os.sched_getaffinity(0))
        self.own, self.others = {cores[0]}, set(cores[1:]) or {cores[0]}

    def start(self, step_us, burst=1, block_tokens=0, more=()):
        o = self.o
        args = ["--http.listen=127.0.0.1:0", *o.router, *more]
        # The simulated node needs the digest that the router has: a router without nodes tells it.
        first = Cluster(o.model, prefill=0, decode=0, redis=False, router_args=args, wait=False)
        digest = first.client.model().digest
        first.kill_all()
        self.node = Helper(self.others, "front_node", f"--digest={digest}", f"--step-us={step_us}",
                           f"--burst={burst}", f"--block-tokens={block_tokens}")
        self.address = self.node.address
        self.cluster = Cluster(o.model, prefill=0, decode=0, redis=False, seeds=[self.address], router_args=args)
        eventually(lambda: self.cluster.ready_nodes(), 15, "node ready")
        self.router_process = self.cluster.procs["router"]
        pin(self.router_process.p.pid, self.own)

    def stop(self):
        self.cluster.kill_all()
        self.node.stop()

    def start_load(self, kind, target, **more):
        target = target or (self.address if kind == "node" else
                            self.router_process.ready["http" if kind == "http" else "listen"])
        cmd = [str(BUILD / "tests/front_load"), kind, target]
        for k, v in more.items():
            cmd += [f"--{k}"] if v is True else [f"--{k}", str(v)]
        p = subprocess.Popen(cmd, stdout=subprocess.PIPE, text=True)
        os.sched_setaffinity(p.pid, self.others)
        return p

    def load(self, kind, target=None, pids=None, **more):
        """Of the router, or of what listens at target and consists of pids."""
        pids = [self.router_process.p.pid] if pids is None else pids
        p = self.start_load(kind, target, **more)
        time.sleep(more.get("warm", 1))  # as long as the load does not count
        begin, peak = sum(map(cpu_s, pids)), 0
        end = time.monotonic() + more["seconds"]
        while time.monotonic() < end:
            time.sleep(min(0.2, max(0, end - time.monotonic())))
            peak = max(peak, sum(map(rss_mb, pids)))
        used = sum(map(cpu_s, pids)) - begin
        out = json.loads(p.communicate(timeout=60)[0])
        if out["errors"]:
            sys.exit(f"{kind}: {out['errors']} errors")
        return out | {"router_cpu_s": used, "rss_mb": peak}

    def print(self, case, metric, value, unit):
        line = {"bench": "front", "case": case, "metric": metric, "value": value, "unit": unit}
        text = f"front  {case:18} {metric:22} {value:12.4g} {unit}"
        print(json.dumps(line) if self.o.json else text, flush=True)

    def tokens(self, kind, name=None, **more):
        rates = []
        for streams in self.o.streams:
            r = self.load(kind, streams=streams, seconds=self.o.seconds, tokens=200, **more)
            case = f"{name or kind} {streams}"
            rates.append(r["tokens"] / r["seconds"])
            self.print(case, "tokens_per_s", rates[-1], "tokens/s")
            self.print(case, "cpu_us_per_token", 1e6 * r["router_cpu_s"] / max(r["tokens"], 1), "us")
            self.print(case, "core_busy", r["router_cpu_s"] / r["seconds"], "")
            self.print(case, "clients_busy", r["cpu_s"] / (r["seconds"] + 1), "")
            self.print(case, "rss_mb", r["rss_mb"], "MB")
        return rates

    def first(self, kind):
        """Beside the same question to the node itself, and to it through a relay, by turns."""
        relay = Helper(self.own, "front_relay", self.address)
        ways = {kind: (kind, None), "node": ("node", None), "relay": ("node", relay.address)}
        took = {w: [] for w in ways}
        try:
            for _ in range(3):
                for way, (k, target) in ways.items():
                    took[way].append(self.load(k, target, streams=1, seconds=self.o.seconds / 4, tokens=1))
        finally:
            relay.stop()
        for q in ("p50", "p99"):
            routed, direct, relayed = (statistics.median(r[f"first_{q}_ms"] for r in took[w]) for w in ways)
            self.print(f"first-{kind}", f"first_token_{q}_ms", routed, "ms")
            self.print(f"first-{kind}", f"delay_{q}_ms", routed - direct, "ms")
            self.print(f"first-{kind}", f"relay_delay_{q}_ms", relayed - direct, "ms")
        self.print(f"first-{kind}", "cpu_us_per_request", statistics.median(
            1e6 * r["router_cpu_s"] / max(r["requests"], 1) for r in took[kind]), "us")

    def fresh(self):
        r = self.load("http", streams=16, seconds=self.o.seconds, tokens=1, fresh=True)
        self.print("fresh", "connections_per_s", r["requests"] / r["seconds"], "connections/s")
        self.print("fresh", "first_token_max_ms", r["first_max_ms"], "ms")
        self.print("fresh", "cpu_us_per_request", 1e6 * r["router_cpu_s"] / max(r["requests"], 1), "us")

    def router_line(self, metric, value, unit, target=None):
        line = {"bench": "router", "case": "64 streams", "metric": metric, "value": round(value, 3), "unit": unit}
        text = f"router  {metric:28} {value:10.2f} {unit}"
        if target:
            line |= {"ceiling": "target", "ceiling_value": target, "ratio": round(target / value, 3)}
            text += f"  (at most {target})"
        print(json.dumps(line) if self.o.json else text, flush=True)

    def restart(self, *how, **more):
        self.stop()
        self.start(self.o.step_us, *how, **more)

    def request_cost(self):
        r = self.load("grpc", streams=16, seconds=self.o.seconds / 2, tokens=1, prompt=PROMPT)
        return 1e6 * r["router_cpu_s"] / r["requests"]

    def router(self):
        """Processor time of a request of 4,000 ids (to a node without a prefix cache; by turns to one that
        has one, for which prompts are hashed and looked up; and what the loop spends on looking for the next
        event before it sleeps, in time that nobody else wants), of a message to a client, of a token of a node: a
        stream's tokens come one and eight a step, so a token's cost is message + token, or message / 8 +
        token. Time of a request: by how much later its first token comes than from the node itself; of a
        token: from the node until the client has it, with 64 in each step's message."""
        o = self.o
        self.router_line("rss_mb", self.idle_mb, "MB", 60)
        plain, hashed, looking = [], [], []
        for _ in range(2):
            looking.append(self.request_cost())
            self.restart(more=["--loop.spin_us=0"])
            plain.append(self.request_cost())
            self.restart(block_tokens=BLOCK_TOKENS, more=["--loop.spin_us=0"])
            hashed.append(self.request_cost())
            self.restart()
        plain, hashed, looking = map(statistics.mean, (plain, hashed, looking))
        self.router_line("cpu_us_per_request", plain, "us", 50)
        self.router_line("cpu_us_of_looking", looking - plain, "us")
        self.router_line("cpu_us_per_request_hashed", hashed, "us")
        self.router_line("cpu_us_of_hashing", hashed - plain, "us")
        first = {"grpc": [], "node": []}
        for _ in range(3):
            for k, list_ in first.items():
                list_.append(self.load(k, streams=1, seconds=o.seconds / 4, tokens=1, prompt=PROMPT)["first_p50_ms"])
        routed, direct = (1e3 * statistics.median(v) for v in first.values())
        self.router_line("time_us_per_request", routed - direct, "us")
        cost, relay = {1: [], 8: []}, []
        for burst in (1, 8, 1, 8, 1, 8):
            self.restart(burst)
            r = self.load("grpc", streams=64, seconds=o.seconds / 2, tokens=401)
            cost[burst].append(1e6 * r["router_cpu_s"] / r["tokens"])
            relay += [r["relay_p50_us"]] if burst == 1 else []
        one, eight = (statistics.median(v) for v in cost.values())
        message = (one - eight) * 8 / 7
        self.router_line("cpu_us_per_client_message", message, "us", 15)
        self.router_line("cpu_us_per_node_token", one - message, "us", 2)
        self.router_line("time_us_per_token", statistics.median(relay), "us")

    def long(self):
        for kind in ("grpc", "http"):
            r = self.load(kind, streams=4, seconds=self.o.seconds, tokens=1, prompt=4000)
            self.print(f"long {kind}", "cpu_us_per_request", 1e6 * r["router_cpu_s"] / max(r["requests"], 1), "us")

    def soak(self, kind):
        """Streams for minutes, one request in fifty left in the middle of its answer. What may grow is
        read every second; from the second quarter to the last it must stay as it is."""
        self.stop()
        self.start(SOAK_STEP_US)
        pid, n = self.router_process.p.pid, self.o.soak_streams
        before, rss, held = fds(pid), [], []
        p = self.start_load(kind, None, streams=n, seconds=60 * self.o.minutes, tokens=100, leave=50)
        while p.poll() is None:
            time.sleep(1)
            rss.append(rss_mb(pid))
            held.append(fds(pid))
        r = json.loads(p.communicate()[0])
        eventually(lambda: self.cluster.client.server().requests_active == 0, 30, "no request left")
        eventually(lambda: fds(pid) <= before, 30, "descriptors back")
        quarter = len(rss) // 4
        growth = max(rss[-quarter:]) - max(rss[quarter:2 * quarter])
        for metric, value, unit in (
                ("minutes", self.o.minutes, ""), ("tokens_per_s", r["tokens"] / r["seconds"], "tokens/s"),
                ("requests", r["requests"], ""), ("left", r["left"], ""), ("errors", r["errors"], ""),
                ("rss_max_mb", max(rss), "MB"), ("rss_growth_mb", growth, "MB"),
                ("rss_after_mb", rss_mb(pid), "MB"), ("fds_max", max(held), ""),
                ("fds_before", before, ""), ("fds_after", fds(pid), "")):
            self.print(f"soak {kind} {n}", metric, value, unit)
        if r["errors"] or max(rss) > 200 or growth > 3:
            sys.exit(f"soak {kind}: errors, or not steady")

    def peers(self):
        """One core and the same load for each; the share of the best peer is of tokens at the most streams."""
        if not self.o.peers:
            sys.exit("peers: --peers PYTHON says where they are installed")
        ours = self.tokens("http")[-1]
        first = [self.load("http", streams=1, seconds=self.o.seconds / 4, tokens=1)["first_p50_ms"]]
        self.print("http", "first_token_p50_ms", first[0], "ms")
        best = 0
        worker = Helper(self.others, "front_worker", f"--step-us={self.o.step_us}")
        try:
            direct = self.load("http", worker.address, [worker.p.pid], streams=1, seconds=self.o.seconds / 4,
                               tokens=1, text=True)
            for name in PEERS:
                peer = Peer(self.o.peers, name, worker.address, self.own)
                at = {"target": peer.address, "pids": peer.pids(), "text": True, "warm": 4}
                label = f"{name} {version(self.o.peers, name)}"
                try:
                    best = max(best, self.tokens("http", label, **at)[-1])
                    r = self.load("http", streams=1, seconds=self.o.seconds / 4, tokens=1, **at)
                    for q in ("p50", "p99"):
                        self.print(label, f"delay_{q}_ms", r[f"first_{q}_ms"] - direct[f"first_{q}_ms"], "ms")
                finally:
                    peer.stop()
        finally:
            worker.stop()
        self.print(f"http {self.o.streams[-1]}", "times_best_peer", ours / best, "")


def main():
    a = argparse.ArgumentParser()
    a.add_argument("--model", required=True)
    a.add_argument("--case", action="append", choices=CASES + EXTRA)
    a.add_argument("--streams", type=int, action="append")
    a.add_argument("--seconds", type=float, default=8)
    a.add_argument("--step-us", type=int, default=10000)
    a.add_argument("--router", action="append", help="an option for the router", default=[
        "--limits.active=16384", "--admission.queued=16384", "--admission.node_queue=0s"])
    a.add_argument("--minutes", type=float, default=10)
    a.add_argument("--soak-streams", type=int, default=5000)
    a.add_argument("--peers", metavar="PYTHON")
    a.add_argument("--json", action="store_true")
    o = a.parse_args()
    o.streams = o.streams or [64, 2000]
    b = Bench(o)
    b.start(o.step_us)
    try:
        b.idle_mb = rss_mb(b.router_process.p.pid)
        if o.case != ["router"]:
            b.print("idle", "rss_mb", b.idle_mb, "MB")
        for case in o.case or CASES:
            if case.startswith("first-"):
                b.first(case.removeprefix("first-"))
            elif case.startswith("soak-"):
                b.soak(case.removeprefix("soak-"))
            elif case in ("http", "grpc"):
                b.tokens(case)
            else:
                getattr(b, case)()
    finally:
        b.stop()


if __name__ == "__main__":
    main()
