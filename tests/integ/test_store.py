"""The store path: prefill and decode nodes that never connect, daemons that die, drain and fill up."""
import threading

import pytest

from cluster import eventually
from wire import AUTO, DIRECT, LOCAL, STORE, Answer, request


def ids(n, seed=1):
    return [(i * 7919 + seed * 104729) % 500 + 3 for i in range(n)]


def ask(c, n=600, path=STORE, seed=1, max_tokens=24, **kw):
    return c.client.generate(ids=ids(n, seed), max_tokens=max_tokens, ignore_eos=True, path=path, timeout=60, **kw)


def test_p_and_d_never_meet(cluster):
    c = cluster(kvstore=1)
    want = ask(c, path=LOCAL).tokens
    for n in range(3):
        a = ask(c)
        assert a.tokens == want
        assert a.timing.path == STORE and a.timing.store == "store-0" and a.timing.retries == 0
    p, d, s = (c.status(n) for n in ("prefill-0", "decode-0", "store-0"))
    assert (p.handoff_connections, d.handoff_connections, s.handoff_connections) == (1, 1, 2)
    assert s.relayed == 3 and s.relay_failed == 0 and s.handoff_bytes > 0
    assert s.role == "kvstore" and s.state == "ready"
    assert ask(c, path=DIRECT).tokens == want
    assert c.status("prefill-0").handoff_connections == 2


def test_path_by_configuration(cluster):
    c = cluster(kvstore=1, router_args=["--route.path=store"])
    assert ask(c, path=AUTO).timing.path == STORE
    assert ask(c, path=LOCAL).timing.path == LOCAL
    c.procs["store-0"].stop()
    eventually(lambda: "store-0" not in c.ready_nodes(), 10, "router knows")
    a = ask(c, path=AUTO)  # nobody insists
    assert a.timing.path == DIRECT and a.timing.retries == 0
    e = c.client.error(ids=ids(50), max_tokens=2, path=STORE)
    assert e.code().name == "UNAVAILABLE" and "KV store" in e.details()


def test_many_at_once_over_two_daemons(cluster):
    c = cluster(prefill=2, decode=2, kvstore=2)
    want = {s: ask(c, 300 + 40 * s, LOCAL, s).tokens for s in range(8)}
    got = {}

    def work(s):
        try:
            got[s] = [ask(c, 300 + 40 * s, STORE, s).tokens for _ in range(3)]
        except Exception as e:
            got[s] = e

    threads = [threading.Thread(target=work, args=(s,)) for s in want]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert got == {s: [want[s]] * 3 for s in want}
    assert all(c.status(f"store-{i}").relayed > 0 for i in range(2))
    assert sum(c.status(f"store-{i}").relayed for i in range(2)) == 24
    for i in range(2):
        assert c.status(f"prefill-{i}").handoff_connections <= 2
        assert c.status(f"decode-{i}").handoff_connections <= 2


@pytest.mark.parametrize("daemons", [1, 2])
@pytest.mark.parametrize("percent", [10, 50, 90])
def test_KVX_01_daemon_killed_at(cluster, percent, daemons):
    """The prompt goes another way; no token is lost or comes twice (Answer checks offsets)."""
    c = cluster("slow", kvstore=daemons, node_args=["--engine.max_batch_tokens=64"])
    c.allow("handoff_silent", "level=warn event=handoff", "level=warn event=relay")
    n = 1500
    want = ask(c, n, LOCAL).tokens
    # Nothing lies in the pool of P yet, so its progress is the transfer's.
    before = c.status("prefill-0").tokens_computed
    answer, done = Answer(), threading.Event()

    def work():
        try:
            for m in c.client.stream(request(ids=ids(n), max_tokens=24, ignore_eos=True, path=STORE), timeout=60):
                answer.add(m)
        finally:
            done.set()

    t = threading.Thread(target=work)
    t.start()
    eventually(lambda: c.status("prefill-0").tokens_computed - before >= n * percent // 100, 30, "progress")
    busy = [s for s in (f"store-{i}" for i in range(daemons)) if c.status(s).requests_running]
    assert busy or done.is_set()
    for s in busy:
        c.procs[s].kill()
    t.join()
    assert answer.tokens == want
    assert not busy or answer.timing.retries >= 1
    assert not busy or answer.timing.path == (STORE if daemons == 2 else DIRECT)


def test_daemon_drains(cluster):
    c = cluster("slow", kvstore=2, node_args=["--engine.max_batch_tokens=64"])
    want = ask(c, 1500, LOCAL).tokens
    got = []
    t = threading.Thread(target=lambda: got.append(ask(c, 1500)))
    t.start()
    busy = eventually(lambda: [s for s in ("store-0", "store-1") if c.status(s).requests_running], 20, "a relay")[0]
    assert c.procs[busy].stop() == 0
    t.join()
    assert got[0].tokens == want and got[0].timing.retries == 0 and got[0].timing.store == busy
    a = ask(c, 200)
    assert a.timing.store != busy


def test_daemon_without_memory(cluster):
    """What does not fit the daemon's memory goes another way."""
    page = 3 * 2 * 2 * 16 * 16 * 2  # layers, K and V, heads, dim, tokens, bytes
    c = cluster(kvstore=1, kvstore_args=[f"--relay.bytes={page * 20}", "--relay.wait=200ms"],
                node_args=["--engine.prefix_cache=off"])
    want = ask(c, path=LOCAL).tokens
    a = ask(c)
    assert a.tokens == want and a.timing.path == DIRECT and a.timing.retries == 1
    assert ask(c, 100).timing.path == STORE
    assert c.status("store-0").relay_refused == 1


def test_RTR_04_cancel_frees_the_daemon(cluster):
    c = cluster("slow", kvstore=1, node_args=["--engine.max_batch_tokens=64"])
    call = c.client.stream(request(ids=ids(1500), max_tokens=50, ignore_eos=True, path=STORE), timeout=60)
    eventually(lambda: c.status("store-0").requests_running == 1, 20, "a relay")
    call.cancel()
    eventually(lambda: c.status("store-0").requests_running == 0, 5, "free")
    c.pages_back()
