"""Faults with real processes: bounded answers, clear errors, pages back, other streams unharmed."""
import json
import os
import random
import re
import signal
import socket
import threading
import time

import grpc
import pytest

from cluster import SLOW, eventually
from test_http import Http
from wire import AUTO, DIRECT, LENGTH, LOCAL, Answer, request

LONG = [random.Random(1).randrange(3, 512) for _ in range(3000)]
SHORT = LONG[:40]
# Steps of 32 tokens make a transfer of the long prompt last a second or so.
SLOWLY = ["--engine.max_batch_tokens=32"]


class Background:
    """A request on a thread of its own."""

    def __init__(self, c, ids, **kw):
        self.answer, self.error, self.took = None, None, 0
        self.tokens = 0
        timeout = kw.pop("timeout", 120)
        message = request(ids=ids, **kw)

        def work():
            t0, a = time.monotonic(), Answer()
            try:
                for m in c.client.stream(message, timeout=timeout):
                    a.add(m)
                    self.tokens = len(a.tokens)
                self.answer = a
            except grpc.RpcError as e:
                self.error = e
            self.took = time.monotonic() - t0

        self.thread = threading.Thread(target=work)
        self.thread.start()

    def result(self, timeout=60):
        self.thread.join(timeout * SLOW)
        assert not self.thread.is_alive(), "no answer within the bound"
        return self.answer or self.error


def at_percent(c, node, percent, n_tokens, before):
    """Waits until `node` has computed (P) or received (D) that much of the prompt."""
    if node.startswith("prefill"):
        eventually(lambda: c.status(node).tokens_computed - before >= n_tokens * percent / 100, 30,
                   "progress of P")
        return
    per_token = 8 * 2 * 8 * 32 * 2  # layers, K and V, heads, dim, bytes of the model "slow"
    eventually(lambda: c.status(node).handoff_bytes - before >= per_token * n_tokens * percent / 100, 30,
               "progress of D")


def count(c, node):
    s = c.status(node)
    return s.tokens_computed if node.startswith("prefill") else s.handoff_bytes


@pytest.fixture(scope="module")
def expected(models):
    """What the model "slow" answers to the long and the short prompt, undisturbed."""
    from cluster import Cluster
    c = Cluster(models("slow"), prefill=0, role="both")
    out = (c.client.generate(ids=LONG, max_tokens=12, ignore_eos=True).tokens,
           c.client.generate(ids=SHORT, max_tokens=12, ignore_eos=True).tokens)
    c.finish()
    return out


@pytest.mark.parametrize("percent", [10, 50, 90])
@pytest.mark.parametrize("victim", ["prefill-0", "decode-0"])
@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGSTOP], ids=["kill", "stop"])
def test_node_fails_during_a_transfer(cluster, expected, victim, percent, sig):
    """The request goes on elsewhere with the same ids; a stream on the other pair does not notice."""
    c = cluster(model="slow", prefill=1, decode=1, prefill_args=SLOWLY, pool="128M",
                node_args=["--handoff.silence=1s"])
    c.allow("from=ready to=lost", "level=warn.*(peer|handoff|session|xfer|net)", "drain_timeout")
    before = count(c, victim)
    first = Background(c, LONG, max_tokens=12, ignore_eos=True, path=DIRECT)
    at_percent(c, victim, percent, len(LONG), before)
    other = {"prefill": "prefill-1", "decode": "decode-1"}[victim.split("-")[0]]
    kind = victim.split("-")[0]
    c.procs[victim].signal(sig)
    if sig == signal.SIGKILL:
        c.procs[victim].killed = True
    spare = c.add_node(kind, other, [*(SLOWLY if kind == "prefill" else []), "--handoff.silence=1s",
                                     *(["--role=decode"] if kind == "decode" else [])])
    spare.wait_ready()
    got = first.result(40)
    assert isinstance(got, Answer), got
    assert got.tokens == expected[0] and got.timing.retries >= 1
    eventually(lambda: other in c.ready_nodes(), 10)
    assert c.client.generate(ids=SHORT, max_tokens=12, ignore_eos=True, path=DIRECT).tokens == expected[1]
    if sig == signal.SIGSTOP:
        c.procs[victim].signal(signal.SIGCONT)
        eventually(lambda: c.state_of(victim) == "ready", 20, "back after SIGCONT")
    c.pages_back()


def test_MET_03_a_lost_node_changes_no_figure_of_what_was_before(cluster):
    """A second attempt finds the prompt that the first one has computed, and has times of its own: neither is
    told as the first one's."""
    c = cluster(model="slow", prefill=1, decode=2, pool="128M", router_args=["--http.listen=127.0.0.1:0"])
    c.allow("from=ready to=lost", "level=warn.*(peer|handoff|session|xfer|net)")
    got = Background(c, LONG[:300], max_tokens=200, ignore_eos=True, path=DIRECT)
    eventually(lambda: got.tokens > 3, 20, "tokens")
    c.procs[next(n.name for n in c.client.server().nodes if n.role == "decode" and n.legs)].kill()
    answer = got.result(40)
    assert answer.timing.retries == 1 and answer.usage.cached_tokens == 0
    line = eventually(lambda: [json.loads(x) for x in (c.folder / "router.access").read_text().splitlines()], 10, "line")[0]
    assert line["cached"] == 0 and sum(line["found"].values()) == 0 and line["retries"] == 1
    told = {s: float(v) * 1e3 for s, v in re.findall(r'baton_router_stage_seconds_sum{stage="(\w+)"} (\S+)',
                                                    Http(c).call("GET", "/metrics")[1].decode())}
    for stage, ms in {**line["first_ms"], **line["second_ms"]}.items():
        assert told[stage] == pytest.approx(ms, abs=0.002), (stage, told, line)


@pytest.mark.parametrize("victim", ["prefill-0", "decode-0"])
def test_RTR_04_no_other_node_gives_a_bounded_clear_error(cluster, victim):
    c = cluster(model="slow", prefill_args=SLOWLY, pool="128M")
    c.allow("from=ready to=lost", "level=warn.*(peer|handoff)")
    before = count(c, victim)
    first = Background(c, LONG, max_tokens=12, path=DIRECT)
    at_percent(c, victim, 30, len(LONG), before)
    c.procs[victim].kill()
    t0 = time.monotonic()
    got = first.result(20)
    assert time.monotonic() - t0 < 10 * SLOW
    assert got.code() == grpc.StatusCode.UNAVAILABLE
    assert victim.split("-")[0] in got.details(), got.details()
    c.pages_back()  # of the one that lives
    c.restart(victim)
    eventually(lambda: c.state_of(victim) == "ready", 10)
    assert c.client.generate(ids=SHORT, max_tokens=2, path=DIRECT).finish


def test_prefill_dies_and_auto_goes_on_locally(cluster, expected):
    c = cluster(model="slow", prefill_args=SLOWLY, pool="128M")
    c.allow("from=ready to=lost", "level=warn.*(peer|handoff)")
    first = Background(c, LONG, max_tokens=12, ignore_eos=True, path=AUTO)
    at_percent(c, "prefill-0", 50, len(LONG), 0)
    c.procs["prefill-0"].kill()
    got = first.result(40)
    assert got.tokens == expected[0] and got.timing.path == LOCAL and got.timing.retries == 1


def test_other_streams_do_not_notice(cluster, expected):
    """Eight short answers run all the time while a decode node with a long one is killed."""
    c = cluster(model="slow", prefill=1, decode=2, pool="128M")
    c.allow("from=ready to=lost", "level=warn.*(peer|handoff)")
    stop, wrong, n = threading.Event(), [], [0]

    def work():
        while not stop.is_set():
            try:
                t = c.client.generate(ids=SHORT, max_tokens=12, ignore_eos=True).tokens
                if t != expected[1]:
                    wrong.append(t)
            except Exception as e:
                wrong.append(e)
            n[0] += 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    time.sleep(0.5)
    c.procs["decode-1"].kill()
    done = n[0]
    eventually(lambda: n[0] > done + 20, 60)
    stop.set()
    for t in threads:
        t.join()
    assert not wrong, wrong[:3]


def test_both_pools_full_at_the_same_time(cluster):
    """Design section 4, rule two: P full of finished prompts and D full of reservations."""
    page = 8 * 2 * 8 * 32 * 16 * 2
    c = cluster(model="slow", pool=str(page * 100))  # 1600 tokens each
    c.allow("level=warn.*(handoff|withdraw|preempt)")
    prompts = [[3 + i] * (500 + 37 * i) for i in range(8)]
    want = [c.client.generate(ids=p, max_tokens=40, ignore_eos=True, timeout=120).tokens for p in prompts]
    flood = [Background(c, p, max_tokens=40, ignore_eos=True, path=DIRECT) for p in prompts]
    got = [f.result(120) for f in flood]
    assert [g.tokens for g in got if isinstance(g, Answer)] == want, [g for g in got if not isinstance(g, Answer)]
    c.pages_back(timeout=30)


def test_more_pages_than_a_pool_has(cluster):
    page = 8 * 2 * 8 * 32 * 16 * 2
    c = cluster(model="slow", pool=str(page * 20))
    e = c.client.error(ids=[5] * 1000, max_tokens=4)
    assert e.code() in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INVALID_ARGUMENT)
    assert c.client.generate(ids=[5] * 100, max_tokens=4).finish


def test_redis_dies_and_comes_back(cluster, expected):
    c = cluster(model="slow")
    c.allow("redis", "level=warn.*(membership|registry)")
    running = Background(c, SHORT, max_tokens=400, ignore_eos=True)
    eventually(lambda: running.tokens > 5, 20)
    c.redis.kill()
    eventually(lambda: c.client.server().membership == "frozen", 20)
    assert set(c.ready_nodes()) == {"prefill-0", "decode-0"}
    for _ in range(5):
        assert c.client.generate(ids=SHORT, max_tokens=12, ignore_eos=True, path=DIRECT).tokens == expected[1]
    assert len(running.result().tokens) == 400
    time.sleep(3.5)  # longer than a lease: nobody is dropped
    assert set(c.ready_nodes()) == {"prefill-0", "decode-0"}
    os.unlink(c.folder / "redis.sock")
    c.redis.start()
    eventually(lambda: c.client.server().membership == "live", 20)
    assert set(c.ready_nodes()) == {"prefill-0", "decode-0"}
    assert c.client.generate(ids=SHORT, max_tokens=12, ignore_eos=True).tokens == expected[1]


def test_redis_absent_at_start(cluster):
    c = cluster(redis=False, node_args=["--redis.timeout=100ms"])
    assert c.client.generate(ids=SHORT, max_tokens=3, path=DIRECT).finish


GARBAGE = [b"", b"\x00" * 4096, os.urandom(65536), b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
           b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + os.urandom(2048),
           b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00" + b"\xff" * 4096]


@pytest.mark.sanitize
@pytest.mark.parametrize("kind,n", [("listen", 4), ("net", 3), ("store", 1)])
def test_garbage_at_every_port(cluster, kind, n):
    c = cluster(kvstore=1)
    c.allow("level=(warn|error).*(peer|net|xfer|ucx|UCX|grpc)")
    ports = [p.ready[kind] for p in c.procs.values() if kind in p.ready]
    assert len(ports) == n
    running = Background(c, SHORT, max_tokens=2000, ignore_eos=True)
    half_open = []
    for address in ports:
        host, port = address.rsplit(":", 1)
        for data in GARBAGE:
            with socket.create_connection((host, int(port)), timeout=5) as s:
                try:
                    s.sendall(data)
                    s.settimeout(0.05)
                    s.recv(4096)
                except OSError:
                    pass
        half_open.append(socket.create_connection((host, int(port)), timeout=5))  # says nothing
    assert c.client.generate(ids=SHORT, max_tokens=4, path=DIRECT).finish
    assert len(running.result().tokens) == 2000
    for s in half_open:
        s.close()
    assert all(p.p.poll() is None for p in c.procs.values())


def test_client_gone_at_every_stage(cluster):
    """STRM-01: in prefill, in transfer, in decode, after half of the answer."""
    c = cluster(model="slow", prefill_args=SLOWLY, pool="128M")
    for wait in (0.0, 0.05, 0.3, 0.8, 1.5):
        call = c.client.stream(request(ids=LONG, max_tokens=4000, ignore_eos=True, path=DIRECT))
        time.sleep(wait)
        call.cancel()
        c.pages_back(timeout=10)
    call = c.client.stream(request(ids=SHORT, max_tokens=4000, ignore_eos=True, path=DIRECT))
    for _ in range(5):
        next(call)
    call.cancel()
    c.pages_back(timeout=5)
    assert len(c.client.generate(ids=SHORT, max_tokens=3, ignore_eos=True).tokens) == 3


def test_SIGSTOP_of_a_client_costs_it_alone(cluster):
    """A client process that stops reading does not hold the others up."""
    c = cluster()
    narrow = c.fresh_client([("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65536)])
    call = narrow.stream(request(ids=SHORT, max_tokens=8000, ignore_eos=True))
    next(call)
    for _ in range(5):
        assert c.client.generate(ids=SHORT, max_tokens=20, ignore_eos=True).finish == LENGTH
    call.cancel()
    narrow.close()


def test_churn(cluster, expected):
    """Cancels, deadlines and whole answers mixed at random: nothing is left at the end."""
    c = cluster(model="slow", prefill=1, decode=2, pool="64M")
    rng = random.Random(7)
    deadline = time.monotonic() + 6

    def work(seed):
        r = random.Random(seed)
        while time.monotonic() < deadline:
            ids = SHORT if r.random() < 0.5 else LONG[:r.randrange(1, 1500)]
            path = r.choice([AUTO, DIRECT, LOCAL])
            timeout = r.choice([60, 60, 0.05, 0.3])
            call = c.client.stream(request(ids=ids, max_tokens=r.randrange(1, 60), path=path), timeout=timeout)
            try:
                for i, _ in enumerate(call):
                    if r.random() < 0.05:
                        call.cancel()
            except grpc.RpcError as e:
                ends = {grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED}
                if timeout < 1:  # refused at once: it could not be met
                    ends.add(grpc.StatusCode.RESOURCE_EXHAUSTED)
                assert e.code() in ends, e

    failures = []

    def guarded(seed):
        try:
            work(seed)
        except BaseException as e:
            failures.append(e)

    threads = [threading.Thread(target=guarded, args=(rng.random(),)) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures, failures[:2]
    c.pages_back()
    assert c.client.generate(ids=SHORT, max_tokens=12, ignore_eos=True).tokens == expected[1]
