"""What the router adds: relayed tokens a second and processor time a token, delay of the first token,
memory, new connections. One real router on one core; a simulated node and the clients on the others.

    front.py --model FILE [--case NAME]... [--streams N] [--seconds S] [--step-us N] [--json]

Cases: http and grpc (tokens), first-http and first-grpc (one stream at a time), fresh (a new
connection for every request), long (a prompt of 4,000 ids: processor time a request). router, which
is the benchmark of that name and runs only when asked for, takes it apart: what a request, a message to
a client, a token of a node cost, in processor time and in time, beside what each may cost.
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
from wire import BUILD  # noqa: E402

CASES = ("http", "grpc", "first-http", "first-grpc", "fresh", "long")
PROMPT = 4000  # ids: no text, so nothing is tokenized
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


class Bench:
    def __init__(self, o):
        self.o = o
        cores = sorted(os.sched_getaffinity(0))
        self.own, self.others = {cores[0]}, set(cores[1:]) or {cores[0]}

    def start(self, step_us, burst=1):
        o = self.o
        args = ["--http.listen=127.0.0.1:0", *o.router]
        # The simulated node needs the digest that the router has: a router without nodes tells it.
        first = Cluster(o.model, prefill=0, decode=0, redis=False, router_args=args, wait=False)
        digest = first.client.model().digest
        first.kill_all()
        cmd = [str(BUILD / "tests/front_node"), f"--digest={digest}", f"--step-us={step_us}", f"--burst={burst}"]
        self.node = subprocess.Popen(cmd, stdout=subprocess.PIPE, text=True)
        os.sched_setaffinity(self.node.pid, self.others)
        self.address = self.node.stdout.readline().split()[1]
        self.cluster = Cluster(o.model, prefill=0, decode=0, redis=False, seeds=[self.address], router_args=args)
        eventually(lambda: self.cluster.ready_nodes(), 15, "node ready")
        self.router_process = self.cluster.procs["router"]
        pin(self.router_process.p.pid, self.own)

    def stop(self):
        self.cluster.kill_all()
        self.node.kill()
        self.node.wait()

    def load(self, kind, **more):
        target = self.address if kind == "node" else self.router_process.ready["http" if kind == "http" else "listen"]
        cmd = [str(BUILD / "tests/front_load"), kind, target]
        for k, v in more.items():
            cmd += [f"--{k}"] if v is True else [f"--{k}", str(v)]
        p = subprocess.Popen(cmd, stdout=subprocess.PIPE, text=True)
        os.sched_setaffinity(p.pid, self.others)
        time.sleep(1)  # as long as the load warms up
        begin, peak = cpu_s(self.router_process.p.pid), 0
        end = time.monotonic() + more["seconds"]
        while time.monotonic() < end:
            time.sleep(min(0.2, max(0, end - time.monotonic())))
            peak = max(peak, rss_mb(self.router_process.p.pid))
        used = cpu_s(self.router_process.p.pid) - begin
        out = json.loads(p.communicate(timeout=60)[0])
        if out["errors"]:
            sys.exit(f"{kind}: {out['errors']} errors")
        return out | {"router_cpu_s": used, "rss_mb": peak}

    def print(self, case, metric, value, unit):
        line = {"bench": "front", "case": case, "metric": metric, "value": value, "unit": unit}
        text = f"front  {case:18} {metric:22} {value:12.4g} {unit}"
        print(json.dumps(line) if self.o.json else text, flush=True)

    def tokens(self, kind):
        for streams in self.o.streams:
            r = self.load(kind, streams=streams, seconds=self.o.seconds, tokens=200)
            case = f"{kind} {streams}"
            self.print(case, "tokens_per_s", r["tokens"] / r["seconds"], "tokens/s")
            self.print(case, "cpu_us_per_token", 1e6 * r["router_cpu_s"] / max(r["tokens"], 1), "us")
            self.print(case, "core_busy", r["router_cpu_s"] / r["seconds"], "")
            self.print(case, "clients_busy", r["cpu_s"] / (r["seconds"] + 1), "")
            self.print(case, "rss_mb", r["rss_mb"], "MB")

    def first(self, kind):
        """Beside the same question to the node itself, by turns."""
        both = {kind: [], "node": []}
        for _ in range(3):
            for k, list_ in both.items():
                list_.append(self.load(k, streams=1, seconds=self.o.seconds / 4, tokens=1))
        for q in ("p50", "p99"):
            routed, direct = (statistics.median(r[f"first_{q}_ms"] for r in both[k]) for k in (kind, "node"))
            self.print(f"first-{kind}", f"first_token_{q}_ms", routed, "ms")
            self.print(f"first-{kind}", f"delay_{q}_ms", routed - direct, "ms")

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

    def restart(self, step_us, burst):
        self.stop()
        self.start(step_us, burst)

    def router(self):
        """Processor time and time of a request of 4,000 ids, of a message to a client, of a token of a
        node. A stream's tokens come one and eight a step: a token's cost is message + token, or
        message / 8 + token. Time of a token: between two of them when nodes send more than the router
        can take."""
        o = self.o
        self.router_line("rss_mb", self.idle_mb, "MB", 60)
        r = self.load("grpc", streams=4, seconds=o.seconds, tokens=1, prompt=PROMPT)
        self.router_line("cpu_us_per_request", 1e6 * r["router_cpu_s"] / r["requests"], "us", 50)
        first = {"grpc": [], "node": []}
        for _ in range(3):
            for k, list_ in first.items():
                list_.append(self.load(k, streams=1, seconds=o.seconds / 4, tokens=1, prompt=PROMPT)["first_p50_ms"])
        routed, direct = (1e3 * statistics.median(v) for v in first.values())
        self.router_line("time_us_per_request", routed - direct, "us")
        cost = {1: [], 8: []}
        for burst in (1, 8, 1, 8, 1, 8):
            self.restart(o.step_us, burst)
            r = self.load("grpc", streams=64, seconds=o.seconds / 2, tokens=401)
            cost[burst].append(1e6 * r["router_cpu_s"] / r["tokens"])
        one, eight = (statistics.median(v) for v in cost.values())
        message = (one - eight) * 8 / 7
        self.router_line("cpu_us_per_client_message", message, "us", 15)
        self.router_line("cpu_us_per_node_token", one - message, "us", 2)
        self.restart(200, 1)
        r = self.load("grpc", streams=64, seconds=o.seconds / 2, tokens=401)
        self.router_line("time_us_per_token", 1e6 * r["seconds"] / r["tokens"], "us")
        self.router_line("core_busy", r["router_cpu_s"] / r["seconds"], "")

    def long(self):
        for kind in ("grpc", "http"):
            r = self.load(kind, streams=4, seconds=self.o.seconds, tokens=1, prompt=4000)
            self.print(f"long {kind}", "cpu_us_per_request", 1e6 * r["router_cpu_s"] / max(r["requests"], 1), "us")


def main():
    a = argparse.ArgumentParser()
    a.add_argument("--model", required=True)
    a.add_argument("--case", action="append", choices=(*CASES, "router"))
    a.add_argument("--streams", type=int, action="append")
    a.add_argument("--seconds", type=float, default=8)
    a.add_argument("--step-us", type=int, default=10000)
    a.add_argument("--router", action="append", default=["--limits.active=16384", "--admission.queued=16384", "--admission.node_queue=0s"], help="an option for the router")
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
            elif case in ("http", "grpc"):
                b.tokens(case)
            else:
                getattr(b, case)()
    finally:
        b.stop()


if __name__ == "__main__":
    main()
