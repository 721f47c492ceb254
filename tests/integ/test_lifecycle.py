"""Start, refusal to start, drain, restart, membership."""
import signal
import socket
import subprocess
import threading
import time

import grpc
import pytest

from cluster import SLOW, clean_env, eventually
from wire import BUILD, DIRECT, LENGTH, Answer, request

PROMPT = [7, 8, 9] * 10


def background(c, **kw):
    """A long answer on a thread: (thread, list for the answer or error, event of the 20th token)."""
    got, going = [], threading.Event()

    def work():
        a = Answer()
        try:
            for m in c.client.stream(request(ids=PROMPT, ignore_eos=True, **kw), timeout=120):
                a.add(m)
                if len(a.tokens) >= 20:
                    going.set()
            got.append(a)
        except grpc.RpcError as e:
            got.append(e)
        going.set()

    t = threading.Thread(target=work)
    t.start()
    assert going.wait(30)
    return t, got


@pytest.mark.parametrize("name", ["decode-0", "prefill-0"])
def test_drain_of_a_node_lets_running_requests_end(cluster, name):
    """Asked to stop in the middle of answers: they end whole, new ones go elsewhere, exit code 0."""
    c = cluster(model="slow", prefill=2, decode=2)
    threads = []
    while c.status(name).steps == 0 or len(threads) < 4:
        threads.append(background(c, max_tokens=400))
        assert len(threads) < 40
    c.procs[name].signal(signal.SIGTERM)
    eventually(lambda: c.state_of(name) in ("draining", "lost", None), 10)
    for _ in range(3):
        a = c.client.generate(ids=PROMPT, max_tokens=3, path=DIRECT)
        assert name not in (a.timing.prefill_node, a.timing.decode_node)
    for t, got in threads:
        t.join()
        assert not isinstance(got[0], Exception), got
        assert got[0].finish == LENGTH and len(got[0].tokens) == 400 and got[0].timing.retries == 0
    assert c.procs[name].stop() == 0
    eventually(lambda: c.state_of(name) is None, 15, "gone from the table")


def test_drain_timeout_cancels_and_the_router_resumes_elsewhere(cluster):
    c = cluster(model="slow", prefill=0, decode=2, decode_args=["--drain_timeout=200ms"])
    c.allow("drain_timeout is over")
    whole = c.client.generate(ids=PROMPT, max_tokens=600, ignore_eos=True).tokens
    t, got = background(c, max_tokens=600)
    busy = [n for n in ("decode-0", "decode-1") if c.status(n).requests_running][0]
    assert c.procs[busy].stop() == 0
    t.join()
    assert got[0].tokens == whole and got[0].timing.retries == 1


def test_drain_of_the_router(cluster):
    c = cluster(model="slow")
    t, got = background(c, max_tokens=300)
    c.procs["router"].signal(signal.SIGTERM)

    def refused():
        try:
            c.fresh_client().generate(ids=PROMPT, max_tokens=1, timeout=2)
        except grpc.RpcError as e:
            return e.code() == grpc.StatusCode.UNAVAILABLE
    eventually(refused, 5)
    t.join()
    assert got[0].finish == LENGTH and len(got[0].tokens) == 300
    assert c.procs["router"].stop() == 0
    c.procs["router"].killed = True


def test_router_dies_and_the_nodes_clean_up(cluster):
    c = cluster(model="slow")
    t, got = background(c, max_tokens=4000)
    c.procs["router"].kill()
    t.join()
    assert isinstance(got[0], grpc.RpcError)
    c.pages_back(timeout=10)
    c.client.close()
    c.clients.pop("router")
    c.restart("router")
    c.client = c.client_of("router")
    eventually(lambda: len(c.ready_nodes()) == 2)
    assert c.client.generate(ids=PROMPT, max_tokens=3).finish


def test_two_routers_share_the_nodes(cluster):
    c = cluster()
    c.add_router("router-b").wait_ready()
    b = c.client_of("router-b")
    eventually(lambda: len([n for n in b.server().nodes if n.state == "ready"]) == 2)
    want = c.client.generate(ids=PROMPT, max_tokens=10).tokens
    assert b.generate(ids=PROMPT, max_tokens=10).tokens == want
    c.procs["router-b"].kill()
    assert c.client.generate(ids=PROMPT, max_tokens=10).tokens == want


def test_RTR_01_restarted_nodes_come_back_under_a_new_incarnation(cluster):
    c = cluster()
    c.allow("from=ready to=lost")
    want = c.client.generate(ids=PROMPT, max_tokens=5, path=DIRECT).tokens
    for i in range(6):
        name = ("prefill-0", "decode-0")[i % 2]
        old = c.client.nodes()[name].incarnation
        c.procs[name].kill()
        c.restart(name)
        eventually(lambda: c.client.nodes()[name].incarnation > old and c.state_of(name) == "ready", 10)
        assert c.client.generate(ids=PROMPT, max_tokens=5, path=DIRECT).tokens == want


def test_dead_node_leaves_the_table_within_its_lease(cluster):
    c = cluster(decode=2)
    c.allow("from=ready to=lost")
    c.procs["decode-1"].kill()
    eventually(lambda: c.state_of("decode-1") in ("lost", None), 5)
    eventually(lambda: c.state_of("decode-1") is None, 15)


def test_second_process_of_a_name_does_not_take_over_silently(cluster):
    """Of two processes with one name the newer one serves, the older one leaves by itself."""
    c = cluster()
    c.allow("event=fenced", "newer process has", "from=ready to=lost", "overtaken")
    twin = c.add_node("decode", "twin")
    twin.kill()
    argv = [a.replace("--name=twin", "--name=decode-0") for a in twin.argv]
    twin.argv = argv
    twin.start()
    twin.wait_ready()
    assert c.procs["decode-0"].p.wait(30 * SLOW) == 0
    c.procs["decode-0"].killed = True
    eventually(lambda: c.state_of("decode-0") == "ready", 15)
    assert c.client.generate(ids=PROMPT, max_tokens=3, path=DIRECT).finish


def test_seeds_without_redis(cluster):
    c = cluster(redis=False)
    c.allow("from=ready to=lost")
    assert c.client.generate(ids=PROMPT, max_tokens=3, path=DIRECT).finish
    c.procs["decode-0"].kill()
    eventually(lambda: c.state_of("decode-0") == "lost")  # a seed stays in the table


def redis(c, *args, text=None):
    sock = str(c.folder / "redis.sock")
    out = subprocess.run(["redis-cli", "-s", sock, *args], capture_output=True, text=True, input=text, check=True)
    return out.stdout


def test_one_node_under_two_names_and_addresses(cluster):
    """A seed by another spelling and a forged member with a node's address: running answers and the
    table do not notice, and no request waits for either."""
    c = cluster(model="slow")
    port = c.procs["decode-0"].address.rsplit(":", 1)[1]
    c.seeds = [f"localhost:{port}"]
    c.add_router("router-b").wait_ready()
    b = c.client_of("router-b")
    eventually(lambda: len([n for n in b.server().nodes if n.state == "ready"]) == 2)
    record = redis(c, "get", "baton:{default}:node:decode-0").strip() + "\n"
    for name in ("other", "another"):
        redis(c, "zadd", "baton:{default}:nodes", "99999999999999", name)
        redis(c, "-x", "set", "baton:{default}:node:" + name,
              text=record.replace("name=decode-0", "name=" + name))
    for client in (c.client, b):
        whole = client.generate(ids=PROMPT, max_tokens=400, ignore_eos=True, path=DIRECT)
        assert whole.timing.retries == 0 and len(whole.tokens) == 400
        eventually(lambda client=client: {"other", "another"} <= set(client.nodes()))
        time.sleep(2.5)  # the longest pause before they are tried again
        whole = client.generate(ids=PROMPT, max_tokens=400, ignore_eos=True, path=DIRECT)
        assert whole.timing.retries == 0 and len(whole.tokens) == 400
        nodes = client.server().nodes
        assert sorted(n.name for n in nodes if n.name) == ["another", "decode-0", "other", "prefill-0"]
        assert len(nodes) <= 5  # and the seed
        assert {n.name for n in nodes if n.state == "ready"} == {"decode-0", "prefill-0"}


def run(*args, binary="baton-decode"):
    return subprocess.run([BUILD / binary, *args], capture_output=True, text=True, timeout=30 * SLOW,
                          env=clean_env())


def test_refusals_to_start(models, tmp_path):
    tiny = models("tiny")
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"GGUF" + b"\xff" * 100)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        taken = f"127.0.0.1:{s.getsockname()[1]}"
        for binary in ("baton-router", "baton-prefill", "baton-decode"):
            local = ["--redis.address=", "--listen=127.0.0.1:0", f"--model={tiny}"]
            cases = [
                (2, ["--colour=red"], "colour"),
                (2, ["--redis.address="], "model"),
                (2, ["--redis.address=", f"--model={tiny}", "--listen=0.0.0.0:0"], "allow_insecure"),
                (3, ["--redis.address=", "--listen=127.0.0.1:0", "--model=/nowhere"], "/nowhere"),
                (3, ["--redis.address=", "--listen=127.0.0.1:0", f"--model={bad}"], ""),
                (4, ["--redis.address=", f"--model={tiny}", f"--listen={taken}"], taken),
            ]
            cases.append((2, [*local, "--name=a b"], "name"))
            cases.append((2, [*local, "--name=\u00fc"], "name"))
            if binary != "baton-router":
                cases.append((2, [*local, "--net.listen=0.0.0.0:0"], "security.allow_plain_kv"))
            for code, args, text in cases:
                out = run(*args, binary=binary)
                assert out.returncode == code, (binary, args, out.stderr)
                last = out.stderr.strip().split("\n")[-1]
                assert "level=error" in last and text in last, (binary, args, out.stderr)


def test_help(models):
    for binary in ("baton-router", "baton-prefill", "baton-decode"):
        for flag in ("--help", "--help-config", "--version"):
            out = run(flag, binary=binary)
            assert out.returncode == 0 and "baton" in out.stdout, (binary, flag)


def test_stop_while_starting_and_twice(cluster):
    c = cluster(prefill=0, role="both")
    p = c.procs["decode-0"]
    t0 = time.monotonic()
    p.signal(signal.SIGTERM)
    assert p.p.wait(10 * SLOW) == 0
    assert time.monotonic() - t0 < 5 * SLOW
    assert not p.ready_file.exists()
