"""Cordons and canaries: what operators order, all routers follow, and a router's end does not undo."""
import json
import subprocess
import threading
import time

import grpc
import pytest

from cluster import eventually
from test_ctl import ctl
from test_http import Http
from wire import Client, cls

LONG = dict(max_tokens=400, ignore_eos=True)


def order(client, method, **fields):
    kind = {"Cordon": "CordonRequest", "SetCanary": "SetCanaryRequest"}[method]
    return client.unary(method, cls(kind)(**fields), "OrderReply", service="Operator")


def decoders(client, n, **kw):
    """Which decode nodes answered n requests."""
    return [client.generate(f"prompt {i} of many", max_tokens=2, **kw).timing.decode_node for i in range(n)]


def test_a_cordoned_node_gets_no_new_requests_and_ends_what_it_has(cluster):
    c = cluster(model="slow", decode=2)
    stream = c.client.stream(cls("GenerateRequest")(text="The lamp keeper", stopping=dict(
        max_tokens=400, ignore_eos=True)))
    got = [next(stream)]
    busy = eventually(lambda: [n.name for n in c.client.server().nodes if n.role == "decode" and n.requests_running],
                      what="a node that decodes")[0]
    other = {"decode-0": "decode-1", "decode-1": "decode-0"}[busy]
    out = ctl("cordon", busy, "--router", c.procs["router"].address, "-o", "json")
    assert out.returncode == 0 and json.loads(out.stdout) == {"node": busy, "state": "cordoned", "kept": True}
    assert c.client.nodes()[busy].cordoned and c.client.nodes()[busy].state == "ready"
    started = c.client.nodes()[busy].starts
    assert set(decoders(c.client, 12)) == {other}
    assert c.client.nodes()[busy].starts == started
    got += list(stream)
    assert sum(len(m.tokens) for m in got) == 400 and got[-1].timing.decode_node == busy
    assert got[-1].timing.retries == 0
    assert ctl("uncordon", busy, "--router", c.procs["router"].address).returncode == 0
    eventually(lambda: busy in decoders(c.client, 6), what="requests on the node again")


def test_drain_waits_for_streams(cluster):
    c = cluster(model="slow")
    at = ["--router", c.procs["router"].address]
    stream = c.client.stream(cls("GenerateRequest")(text="The lamp keeper", stopping=dict(
        max_tokens=400, ignore_eos=True)))
    n = len(next(stream).tokens)
    out = ctl("drain", "decode-0", *at, "--wait", "--timeout", "300ms")
    assert out.returncode == 4 and "decode-0 still has 1 requests" in out.stderr and out.stdout == ""
    seen = []
    t = threading.Thread(target=lambda: seen.append(ctl("drain", "decode-0", *at, "--wait", "--timeout", "60s")))
    t.start()
    n += sum(len(m.tokens) for m in stream)
    ended = time.monotonic()
    t.join()
    assert n == 400
    assert seen[0].returncode == 0 and seen[0].stdout == "decode-0 drained\n", seen[0]
    assert time.monotonic() >= ended
    e = c.client.error("x", max_tokens=1)
    assert e.code() == grpc.StatusCode.UNAVAILABLE and "decode" in e.details()


def test_a_cordon_is_seen_wherever_one_looks(cluster):
    c = cluster(router_args=["--http.listen=127.0.0.1:0"])
    at, h = ["--router", c.procs["router"].address], Http(c)

    def shown(*command):
        out = ctl(*command, *at)
        return [line.split()[2] for line in out.stdout.splitlines() if line.startswith("decode-0 ")], out.stdout

    def states():
        return [h.metric(f'baton_router_nodes{{state="{s}"}}') for s in ("ready", "cordoned")]

    assert h.call("GET", "/ready")[0].status == 200 and states() == [2, 0]
    assert shown("status")[0] == shown("top", "--once")[0] == ["ready"]
    assert ctl("cordon", "decode-0", *at).returncode == 0
    assert h.call("GET", "/ready")[0].status == 503 and states() == [1, 1]
    assert shown("status")[0] == shown("top", "--once")[0] == ["cordoned"]
    assert "1 prefill, 0 decode and 0 colocated nodes are ready" in shown("doctor")[1]
    e = c.client.error("x", max_tokens=1)
    assert e.code() == grpc.StatusCode.UNAVAILABLE and "1 prefill nodes ready, 1 cordoned" in e.details()
    assert ctl("uncordon", "decode-0", *at).returncode == 0
    assert h.call("GET", "/ready")[0].status == 200 and states() == [2, 0]


def test_a_cordon_outlives_routers_and_holds_for_all_of_them(cluster):
    c = cluster(decode=2)
    c.add_router("router-b").wait_ready()
    b = c.client_of("router-b")
    eventually(lambda: {"prefill-0", "decode-0", "decode-1"} <= {n.name for n in b.server().nodes if n.state == "ready"})
    reply = order(c.client, "Cordon", node="decode-0", on=True)
    assert reply.kept and reply.settle_ms > 0
    eventually(lambda: b.nodes()["decode-0"].cordoned, what="the other router's cordon")
    assert set(decoders(b, 8)) == {"decode-1"}
    c.procs["router"].stop()
    c.restart("router")
    c.client = c.client_of("router")
    eventually(lambda: c.client.nodes()["decode-0"].cordoned and c.client.nodes()["decode-1"].state == "ready")
    assert set(decoders(c.client, 8)) == {"decode-1"}
    # The node's next process is cordoned as well.
    c.procs["decode-0"].stop()
    c.restart("decode-0")
    eventually(lambda: c.client.nodes()["decode-0"].state == "ready", 20)
    assert set(decoders(c.client, 8)) == {"decode-1"}
    order(c.client, "Cordon", node="decode-0", on=False)
    eventually(lambda: not b.nodes()["decode-0"].cordoned)
    c.allow("event=node .*to=lost")


def test_without_redis_one_router_alone_knows(cluster):
    c = cluster(redis=False)
    out = ctl("cordon", "decode-0", "--router", c.procs["router"].address)
    assert out.returncode == 0 and "no Redis" in out.stderr
    assert c.client.nodes()["decode-0"].cordoned
    assert ctl("uncordon", "decode-0", "--router", c.procs["router"].address).returncode == 0


def test_a_canary_gets_its_share(cluster):
    c = cluster(prefill=1, decode=0, wait=False)
    for i, release in enumerate(["1.0", "1.0", "1.1"]):
        c.add_node("decode", f"decode-{i}", [f"--release={release}"])
    for i in range(3):
        c.procs[f"decode-{i}"].wait_ready()
    eventually(lambda: len(c.ready_nodes()) == 4, 20)
    assert c.client.nodes()["decode-2"].version == "1.1"
    with pytest.raises(grpc.RpcError) as e:
        order(c.client, "SetCanary", role="decode", version="9.9", percent=10)
    assert e.value.code() == grpc.StatusCode.NOT_FOUND
    order(c.client, "SetCanary", role="decode", version="1.1", percent=20)
    who = decoders(c.client, 50)
    assert who.count("decode-2") == 10, who
    assert {"decode-0", "decode-1"} <= set(who)
    (canary,) = c.client.server().canaries
    assert (canary.role, canary.version, canary.percent) == ("decode", "1.1", 20)
    assert (canary.requests, canary.canary_requests) == (50, 10)
    # A canary that is not there costs nobody a request.
    c.procs["decode-2"].kill()
    c.allow("event=node .*node=decode-2")
    assert set(decoders(c.client, 20)) <= {"decode-0", "decode-1"}
    order(c.client, "SetCanary", role="decode", version="1.0", percent=0)
    assert set(decoders(c.client, 6)) <= {"decode-0", "decode-1"}  # there is no other kind
    order(c.client, "SetCanary", role="decode")
    assert len(c.client.server().canaries) == 0


def test_CLI_01_orders_that_cannot_be(cluster):
    c = cluster()
    at = ["--router", c.procs["router"].address]
    for verb in ("cordon", "uncordon", "drain"):
        for extra in ([], ["-o", "json"], ["--dry-run"]):
            out = ctl(verb, "decode-7", *at, *extra)
            assert out.returncode == 5 and "decode-7" in out.stderr and out.stdout == "", (verb, extra, out)
            out = ctl(verb, "decode-0", "--router", "127.0.0.1:1", *extra)
            assert out.returncode == 3 and out.stderr and out.stdout == "", (verb, extra, out)
        assert ctl(verb, *at).returncode == 2
        assert ctl(verb, "a", "b", *at).returncode == 2
    assert ctl("cordon", "no/name", *at).returncode == 1
    out = ctl("drain", "decode-0", *at, "--dry-run", "-o", "json")
    assert json.loads(out.stdout)["would"] == "drain"
    assert not c.client.nodes()["decode-0"].cordoned
    # Given, but not seen to have reached all routers within the time.
    for extra in ([], ["-o", "json"]):
        out = ctl("uncordon", "decode-0", *at, "--wait", "--timeout", "150ms", *extra)
        assert out.returncode == 4 and "not all routers" in out.stderr and out.stdout == "", out
    c.redis.kill()
    out = ctl("cordon", "decode-0", *at)
    assert out.returncode == 1 and "redis" in out.stderr.lower(), out
    assert not c.client.nodes()["decode-0"].cordoned
    c.allow("redis_down", "index_.*down")


def redis(c, *args, data=None):
    out = subprocess.run(["redis-cli", "-s", str(c.folder / "redis.sock"), *(["-x"] if data is not None else []), *args],
                         input=data, capture_output=True, timeout=60)
    return out.stdout


@pytest.mark.sanitize
def test_orders_that_nobody_should_have_written(cluster):
    """Whoever can write to Redis may cordon what it likes, and no more: what is no order is passed over, said once,
    and costs nobody a request or the other orders."""
    c = cluster(decode=2, router_args=["--http.listen=127.0.0.1:0"])
    c.allow("event=orders", "redis_", "index_")
    key = "baton:{default}:orders"
    order(c.client, "Cordon", node="decode-1", on=True)
    for field, value in (("cordon:", "1"), ("cordon:decode-0", ""), ("cordon:decode-0\n", "1"), ("cordon:" + "d" * 5000, "1"),
                         ("CORDON:decode-0", "1"), ("cordon:decode-0 ", "1"), ("scale:decode", "1000000"),
                         ("role:decode-0", "prefill"), ("canary:decode", "-1 9.9"), ("canary:prefill", "101 x"),
                         ("canary:both", "ten"), ("canary:decode-0", "10 x"), ("../../x", "1"), ("cordon:*", "1"),
                         ("canary:prefill", "50 " + "v" * 150)):
        redis(c, "hset", key, field, value)
    redis(c, "hset", key, "cordon:decode-0", data=b"\xff\x00\x1b]0;x\x07" * 10)
    redis(c, "hset", key, "cordon:prefill-0", data=b"x" * 2000000)
    time.sleep(0.5)  # five readings
    assert c.client.generate("still there", max_tokens=2).timing.decode_node == "decode-0"
    redis(c, "hdel", key, "cordon:decode-0")
    for n in range(0, 3000, 100):  # more than there may be
        redis(c, "hset", key, *[x for i in range(n, n + 100) for x in (f"cordon:none-{i}", "1")])
    time.sleep(0.5)  # the first thousand of them count
    assert c.client.generate("still there", max_tokens=2).tokens
    seen = {n.name: n.cordoned for n in c.client.server().nodes}
    assert seen["decode-0"] is False and seen["prefill-0"] is False and not c.client.server().canaries
    assert c.procs["router"].log.read_text().count("an order in Redis is malformed") <= 1
    with pytest.raises(grpc.RpcError) as e:
        order(c.client, "Cordon", node="decode-0", on=True)
    assert e.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    for make in (["lpush", key, "x"], ["set", key, "x" * 100000], ["sadd", key, "a"], ["zadd", key, "1", "a"],
                 ["xadd", key, "*", "cordon:decode-0", "1"]):  # other kinds of values
        redis(c, "del", key)
        redis(c, *make)
        time.sleep(0.3)
        assert c.client.generate("still there", max_tokens=2).tokens, make
    redis(c, "set", "baton:{default}:epoch", data=b"e" * 1000000)
    time.sleep(0.3)
    assert c.client.generate("still there", max_tokens=2).tokens
    redis(c, "del", key)
    eventually(lambda: order(c.client, "Cordon", node="decode-0", on=True).kept, 20, "orders work again")
    eventually(lambda: c.client.nodes()["decode-0"].cordoned)
    order(c.client, "Cordon", node="decode-0", on=False)
    assert c.client.generate("at the end", max_tokens=2).tokens
