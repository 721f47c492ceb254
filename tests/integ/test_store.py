"""The store path: prefill and decode nodes that never connect, daemons that die, drain and fill up."""
import signal
import subprocess
import threading
import time
import urllib.request

import grpc
import pytest

from cluster import eventually
from test_node_session import Router
from wire import AUTO, DIRECT, LOCAL, STORE, Answer, cls, request


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


def test_no_registry_from_the_start(cluster):
    """A router that never sees Redis knows nodes by its seeds and no daemon: nothing waits for one, and
    who insists on the store is told so."""
    c = cluster(redis=False)
    c.common = [f"--redis.address=unix:{c.folder}/nobody.sock"]
    c.allow("event=redis_")
    c.add_router("router-b", ["--route.path=store", "--route.wait=300ms"]).wait_ready()
    b = c.client_of("router-b")
    eventually(lambda: sum(n.state == "ready" for n in b.server().nodes) == 2, 20, "nodes ready by seeds")
    a = b.generate(ids=ids(300), max_tokens=4, path=AUTO, timeout=30)
    assert a.timing.path == DIRECT and a.timing.retries == 0
    e = b.error(ids=ids(300), max_tokens=2, path=STORE, timeout=30)
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


SHARED = ["--store.enabled=on", "--engine.bring=always", "--tier.host_bytes=64M",
          "--redis.lookup_timeout=1s"]
SHARING = [*SHARED, "--store.stall=10s"]  # a loaded machine answers late


def sharing(cluster, kvstore, **kw):
    """Two nodes that need no other and share their blocks; both know all daemons."""
    c = cluster(prefill=0, decode=2, role="both", kvstore=kvstore,
                node_args=[*SHARING, *kw.pop("node_args", [])], **kw)
    for n in ("decode-0", "decode-1"):
        eventually(lambda n=n: c.status(n).store_daemons == kvstore, 10, f"daemons known to {n}")
    return c


def cached(a):
    return a.usage.cached_tokens


def test_put_by_one_node_is_a_hit_on_another(cluster):
    """Blocks that one node computed lie in a daemon, and on the node itself: the other one loads them."""
    c = sharing(cluster, 2)
    want = ask(c, 1000, AUTO).tokens
    first = next(n for n in ("decode-0", "decode-1") if c.status(n).tokens_computed)
    other = "decode-1" if first == "decode-0" else "decode-0"
    eventually(lambda: c.status(first).store_offered >= 7, 20, "blocks put")
    eventually(lambda: sum(c.status(f"store-{i}").blocks_announced for i in range(2)) >= 7, 10, "blocks announced")
    c.procs[first].stop()
    eventually(lambda: first not in c.ready_nodes(), 10, "router knows")
    a = ask(c, 1000, AUTO)
    assert a.tokens == want
    s = c.status(other)
    assert cached(a) == 7 * 128 and s.store_loaded == 7 and s.tokens_cached_store == 7 * 128
    assert sum(c.status(f"store-{i}").store_gets for i in range(2)) == 7


def test_daemon_that_comes_later_gets_what_was_computed(cluster):
    """Blocks that were computed while no daemon was known are put when there is one."""
    c = cluster(prefill=0, decode=1, role="both", node_args=SHARING)
    want = ask(c, 1000, AUTO).tokens
    assert c.status("decode-0").store_offered == 0
    c.add_store("store-0").wait_ready()
    eventually(lambda: c.status("store-0").blocks_announced >= 7, 20, "blocks put and announced")
    assert c.status("decode-0").store_offered >= 7
    assert ask(c, 1000, AUTO).tokens == want


def test_node_serves_its_own_tiers(cluster):
    """Without a daemon: what one node holds is a hit on another."""
    c = cluster(prefill=0, decode=2, role="both", node_args=SHARING)
    numbers = iter(range(1, 1000))

    def direct(name, prompt, n):  # the router sends it where it lies; so asked directly
        r = Router(c.procs[name].address)
        r.start(1, prompt=prompt, max_tokens=n)
        assert r.ended(1).finish
        tokens = list(r.tokens(1))
        r.close()
        return tokens

    def other_finds_it():  # not before it knows of the first node
        prompt = [next(numbers) + 2] * 150
        announced = c.status("decode-0").blocks_announced
        direct("decode-0", prompt, 1)
        eventually(lambda: c.status("decode-0").blocks_announced > announced, 10, "block announced")
        direct("decode-1", prompt, 1)
        return c.status("decode-1").store_loaded

    eventually(other_finds_it, 20, "one node knows the other")
    announced = c.status("decode-0").blocks_announced
    want = direct("decode-0", ids(1000), 20)
    eventually(lambda: c.status("decode-0").blocks_announced >= announced + 7, 10, "blocks announced")
    loaded, gets = c.status("decode-1").store_loaded, c.status("decode-0").store_gets
    assert direct("decode-1", ids(1000), 20) == want
    assert c.status("decode-1").store_loaded == loaded + 7 and c.status("decode-0").store_gets == gets + 7


@pytest.mark.parametrize("replicas", [1, 2])
def test_daemon_lost(cluster, replicas):
    """A store node lost with replicas left is a hit from another; without, a miss and computed."""
    c = sharing(cluster, 2, node_args=[f"--store.replicas={replicas}"])
    want = ask(c, 1000, AUTO).tokens
    first = next(n for n in ("decode-0", "decode-1") if c.status(n).tokens_computed)
    other = "decode-1" if first == "decode-0" else "decode-0"
    eventually(lambda: c.status(first).store_offered >= 7 * replicas, 20, "blocks put")
    eventually(lambda: sum(c.status(f"store-{i}").blocks_announced for i in range(2)) >= 7 * replicas, 10, "announced")
    c.procs["store-0"].kill()
    c.procs[first].kill()
    c.allow("from=ready to=lost", "event=store_")
    eventually(lambda: first not in c.ready_nodes(), 10, "router knows")
    a = ask(c, 1000, AUTO)
    assert a.tokens == want
    assert cached(a) == 7 * 128 if replicas == 2 else cached(a) < 7 * 128


@pytest.mark.parametrize("met", [False, True])
def test_daemon_frozen(cluster, met):
    """A daemon that has the blocks and is stopped, called before or not: the prompt is computed after all.
    Nothing else would end the wait in time: the engine brings always, and silence may be long."""
    c = cluster(prefill=0, decode=1, role="both", kvstore=1, node_args=SHARING)
    c.allow("event=store_stalled", "from=ready to=lost")
    eventually(lambda: c.status("decode-0").store_daemons == 1, 10, "daemon known")
    want = {n: ask(c, n, AUTO, n).tokens for n in (1000, 300)}
    eventually(lambda: c.status("store-0").blocks_announced >= 7 + 2, 20, "blocks announced")
    other = "decode-9"
    c.add_node("decode", other, [*SHARED, "--role=both", "--handoff.silence=60s", "--store.stall=300ms"]).wait_ready()
    eventually(lambda: other in c.ready_nodes() and c.status(other).store_daemons == 1, 10, "all known")
    c.procs["decode-0"].stop()
    eventually(lambda: "decode-0" not in c.ready_nodes(), 10, "router knows")
    if met:
        assert ask(c, 300, AUTO, 300).tokens == want[300]
        assert c.status(other).store_loaded == 2
    before = c.status(other)
    c.procs["store-0"].signal(signal.SIGSTOP)
    try:
        a = ask(c, 1000, AUTO, 1000)
        assert a.tokens == want[1000] and cached(a) == 0
        s = c.status(other)
        assert s.store_loaded == before.store_loaded and s.loads_short == before.loads_short + 1
        assert s.tokens_computed - before.tokens_computed >= 1000 + 24 - 1
        log = c.procs[other].log.read_text()
        assert log.count("event=store_stalled") == 1 and "event=store_load" not in log
        # The next one does not even wait.
        assert ask(c, 300, AUTO, 300).tokens == want[300]
        assert c.procs[other].log.read_text().count("event=store_stalled") == 1
    finally:
        c.procs["store-0"].signal(signal.SIGCONT)


def test_KVX_01_daemon_frozen_in_mid_put(cluster):
    """Blocks go to a daemon that stands still: the node has its pages back all the same, and the daemon gets
    copies when it goes on."""
    c = cluster(prefill=0, decode=1, role="both", kvstore=1, node_args=[*SHARING, "--handoff.silence=60s"])
    c.allow("from=ready to=lost")
    eventually(lambda: c.status("decode-0").store_daemons == 1, 10, "daemon known")
    ask(c, 300, AUTO, 2)
    eventually(lambda: c.status("store-0").blocks_announced >= 2, 20, "blocks put")
    c.procs["store-0"].signal(signal.SIGSTOP)
    try:
        want = ask(c, 1000, AUTO).tokens
        c.pages_back(["decode-0"], 8)
    finally:
        c.procs["store-0"].signal(signal.SIGCONT)
    eventually(lambda: c.status("store-0").blocks_announced >= 2 + 7, 20, "blocks put after all")
    assert ask(c, 1000, AUTO).tokens == want


N_PROMPTS = 20


def fill(c):
    """Prompts of two blocks each, computed by decode-0; all of them lie in the daemon."""
    eventually(lambda: c.status("decode-0").store_daemons == 1, 10, "daemon known")
    want = {s: ask(c, 300, AUTO, s).tokens for s in range(N_PROMPTS)}
    eventually(lambda: c.status("store-0").blocks_announced >= 2 * N_PROMPTS, 20, "blocks announced")
    return want


def hits_on_another(c, want):
    """A node that never saw the prompts is alone, and loads them, as soon as it knows who holds them."""
    c.add_node("decode", "decode-9", [*SHARING, "--role=both"]).wait_ready()
    eventually(lambda: "decode-9" in c.ready_nodes(), 10, "router knows")
    c.procs["decode-0"].kill()
    c.allow("from=ready to=lost", "event=store_")
    eventually(lambda: "decode-0" not in c.ready_nodes(), 10, "router knows")
    eventually(lambda: c.status("decode-9").store_daemons == 1, 10, "daemon known")
    prompts = iter(want.items())

    def hit():
        seed, tokens = next(prompts)
        a = ask(c, 300, AUTO, seed)
        assert a.tokens == tokens
        return cached(a) == 256
    eventually(hit, 20, "a hit")
    assert c.status("decode-9").store_loaded >= 2


def test_TIER_05_daemon_restarts_with_its_disk(cluster, tmp_path):
    c = cluster(prefill=0, decode=1, role="both", kvstore=1, node_args=SHARING,
                kvstore_args=[f"--tier.disk_path={tmp_path}"])
    want = fill(c)
    before = c.status("store-0").incarnation
    c.procs["store-0"].stop()  # what is in memory alone goes to disk
    c.restart("store-0")
    assert c.status("store-0").incarnation > before
    eventually(lambda: c.status("store-0").blocks_announced >= 2 * N_PROMPTS, 60, "announced again")
    hits_on_another(c, want)


BLOB = 3 * 2 * 2 * 16 * 128 * 2  # layers, K and V, heads, dim, tokens of a block, bytes


def test_TIER_05_daemon_killed_and_restarted_with_its_disk(cluster, tmp_path):
    """Without a word of farewell: what had sunk to disk is announced by the next life and is a hit; asked in between
    it is computed, and nobody waits for the dead."""
    c = cluster(prefill=0, decode=1, role="both", kvstore=1, node_args=SHARING,
                kvstore_args=[f"--tier.disk_path={tmp_path}", f"--tier.host_bytes={32 * BLOB}",
                              "--tier.disk_write_rate=0"])
    want = fill(c)

    eventually(lambda: len(list(tmp_path.rglob("*.kv"))) >= 12, 20, "blocks on disk")
    before = c.status("store-0").incarnation
    c.add_node("decode", "decode-8", [*SHARING, "--role=both"]).wait_ready()
    eventually(lambda: "decode-8" in c.ready_nodes(), 10, "router knows")
    c.procs["store-0"].kill()
    c.procs["decode-0"].kill()
    c.allow("from=ready to=lost", "event=store_")
    eventually(lambda: c.ready_nodes() == ["decode-8"], 10, "router knows")
    a = ask(c, 300, AUTO, N_PROMPTS - 1)
    assert a.tokens == want[N_PROMPTS - 1] and cached(a) == 0
    c.restart("store-0")
    assert c.status("store-0").incarnation > before
    eventually(lambda: c.status("store-0").blocks_announced >= 12, 20, "announced again")
    eventually(lambda: c.status("decode-8").store_daemons == 1, 10, "daemon known")
    prompts = iter(range(N_PROMPTS - 1))

    def hit():
        seed = next(prompts)
        loaded = c.status("decode-8").store_loaded
        a = ask(c, 300, AUTO, seed)
        assert a.tokens == want[seed]
        return c.status("decode-8").store_loaded > loaded
    eventually(hit, 20, "a hit")


def redis_cli(c, *args):
    return subprocess.run(["redis-cli", "-s", str(c.folder / "redis.sock"), *args], capture_output=True, text=True,
                          timeout=20, check=True).stdout


class RedisIll:
    """Ways in which Redis fails those who use it, and back."""

    @staticmethod
    def frozen(c):
        c.redis.signal(signal.SIGSTOP)
        return lambda: c.redis.signal(signal.SIGCONT)

    @staticmethod
    def killed(c):
        c.redis.kill()
        (c.folder / "redis.sock").unlink()
        return c.redis.start

    @staticmethod
    def full(c):
        redis_cli(c, "config", "set", "maxmemory", "1")
        return lambda: redis_cli(c, "config", "set", "maxmemory", "0")

    @staticmethod
    def replica(c):
        redis_cli(c, "replicaof", "127.0.0.1", "1")
        return lambda: redis_cli(c, "replicaof", "no", "one")


@pytest.mark.parametrize("how", ["frozen", "killed", "full", "replica"])
def test_TIER_05_redis_ill(cluster, how):
    """Every prompt is served as before over every path, nobody is dropped for longer than a lease, no prompt waits for
    Redis, and afterwards the index has all again, what was computed meanwhile as well."""
    c = cluster(prefill=1, decode=1, kvstore=1, node_args=["--store.enabled=on", "--tier.host_bytes=64M"])
    c.allow("event=redis_", "event=index_", "orders")
    for n in ("prefill-0", "decode-0"):
        eventually(lambda n=n: c.status(n).store_daemons == 1, 10, f"daemon known to {n}")
    plain = {(s, p): ask(c, 300, p, s).tokens for s in range(3) for p in (LOCAL, STORE)}
    seeds = iter(range(100, 10000))
    fastest = [min(ask(c, 300, LOCAL, next(seeds), 1).timing.first_token for _ in range(15))]
    everybody = sorted(c.ready_nodes())
    heal = getattr(RedisIll, how)(c)
    try:
        eventually(lambda: c.client.server().membership == "frozen", 30, "frozen")
        end = time.monotonic() + 4  # longer than a lease
        while time.monotonic() < end:
            for (s, p), tokens in plain.items():
                a = ask(c, 300, p, s)
                assert a.tokens == tokens and a.timing.retries == 0
                assert p == LOCAL or a.timing.path == STORE
            assert sorted(c.ready_nodes()) == everybody
        fastest += [min(ask(c, 300, LOCAL, next(seeds), 1).timing.first_token for _ in range(15))]
        new = next(seeds)
        ask(c, 300, DIRECT, new)
        assert c.client.server().membership == "frozen" and sorted(c.ready_nodes()) == everybody
    finally:
        heal()
    assert fastest[1] < fastest[0] + 0.05, fastest  # the look-up's limit is 50 ms
    eventually(lambda: c.client.server().membership == "live", 20, "live")
    held = c.status("decode-0").tier_host_bytes // BLOB
    assert held >= 2 * (3 + 15 + 15 + 1)
    eventually(lambda: len(redis_cli(c, "keys", "baton:{default}:block:*").split()) >= held, 20, "all is in the index")
    assert sorted(c.ready_nodes()) == everybody
    assert ask(c, 300, LOCAL, 0).tokens == plain[0, LOCAL]


def asked(c, name, prompt, n, **kw):
    """Of this node itself; the router would choose another one."""
    r = Router(c.procs[name].address)
    r.start(1, prompt=prompt, max_tokens=n, **kw)
    assert r.ended(1).finish
    tokens = list(r.tokens(1))
    r.close()
    return tokens


def test_KVX_07_nodes_of_other_formats_share_a_daemon(cluster):
    """Pages may have another size: blocks are hits. Numbers of another type never are, and do no harm."""
    c = cluster(prefill=0, decode=1, role="both", kvstore=1, node_args=SHARING)
    c.add_node("decode", "pages", [*SHARING, "--role=both", "--engine.page_tokens=32"])
    c.add_node("decode", "wide", [*SHARING, "--role=both", "--engine.kv_dtype=f32"])
    alone = cluster(prefill=0, decode=1, role="both", redis=False,
                    node_args=["--engine.kv_dtype=f32", "--engine.prefix_cache=off"])
    wide = asked(alone, "decode-0", ids(1000), 24)
    for n in ("pages", "wide"):
        c.procs[n].wait_ready()
    for n in ("decode-0", "pages", "wide"):
        eventually(lambda n=n: c.status(n).store_daemons == 1, 10, f"daemon known to {n}")
    want = asked(c, "decode-0", ids(1000), 24)
    eventually(lambda: c.status("store-0").blocks_announced >= 7, 20, "blocks announced")
    assert asked(c, "wide", ids(1000), 24) == wide
    assert c.status("wide").store_loaded == 0 and c.status("wide").tokens_cached == 0
    eventually(lambda: c.status("store-0").blocks_announced >= 14, 20, "both kinds are there")
    numbers = iter(range(400))

    def known():  # not before "pages" knows the daemon's life and the index is up
        prompt = [next(numbers) + 3] * 150
        asked(c, "decode-0", prompt, 1)
        asked(c, "pages", prompt, 1)
        return c.status("pages").store_loaded
    eventually(known, 20, "a hit")
    loaded = c.status("pages").store_loaded
    assert asked(c, "pages", ids(1000), 24) == want
    assert c.status("pages").store_loaded == loaded + 7
    assert asked(c, "wide", ids(1000), 24) == wide
    assert c.status("wide").store_loaded == 0


def test_salts_are_kept_apart_in_the_store(cluster):
    """What one tenant's prompts left in a daemon is a hit for that tenant alone, on any node."""
    c = sharing(cluster, 1)
    want = ask(c, 1000, AUTO, cache_salt="a").tokens
    first = next(n for n in ("decode-0", "decode-1") if c.status(n).tokens_computed)
    eventually(lambda: c.status("store-0").blocks_announced >= 7, 20, "blocks announced")
    c.procs[first].stop()
    eventually(lambda: first not in c.ready_nodes(), 10, "router knows")
    for salt in ("b", "", "aa"):
        a = ask(c, 1000, AUTO, cache_salt=salt)
        assert a.tokens == want and cached(a) == 0
    a = ask(c, 1000, AUTO, cache_salt="a")
    assert a.tokens == want and cached(a) == 7 * 128


def test_what_passes_is_kept(cluster):
    """The store path leaves the prompt's blocks in the daemon: hits for a node that never saw them."""
    c = cluster(prefill=1, decode=1, kvstore=1, decode_args=[*SHARING, "--store.replicas=0"])
    want = ask(c, 1000).tokens
    eventually(lambda: c.status("store-0").blocks_announced >= 7, 10, "blocks announced")
    assert c.status("store-0").store_kept == 7
    d = c.add_node("decode", "decode-9", [*SHARING, "--role=decode"])
    d.wait_ready()
    eventually(lambda: "decode-9" in c.ready_nodes(), 10, "router knows")
    c.procs["decode-0"].stop()
    eventually(lambda: "decode-0" not in c.ready_nodes(), 10, "router knows")
    a = ask(c, 1000, LOCAL)
    assert a.tokens == want and cached(a) == 7 * 128
    assert c.status("decode-9").store_loaded == 7


def test_redis_emptied(cluster):
    c = cluster(prefill=0, decode=1, role="both", kvstore=1, node_args=SHARING)
    want = fill(c)
    c.allow("event=redis_", "event=index_")
    c.redis.kill()
    c.redis.start()
    hits_on_another(c, want)


def test_RTR_04_cancel_frees_the_daemon(cluster):
    c = cluster("slow", kvstore=1, node_args=["--engine.max_batch_tokens=64"])
    call = c.client.stream(request(ids=ids(1500), max_tokens=50, ignore_eos=True, path=STORE), timeout=60)
    eventually(lambda: c.status("store-0").requests_running == 1, 20, "a relay")
    call.cancel()
    eventually(lambda: c.status("store-0").requests_running == 0, 5, "free")
    c.pages_back()


def test_operators_look_at_a_cluster_with_daemons(cluster):
    """Sessions with daemons stand among those with nodes, under a role of their own."""
    c = cluster(kvstore=1, node_args=["--store.enabled=on", "--tier.host_bytes=64M", "--engine.block_tokens=64"],
                router_args=["--http.listen=127.0.0.1:0"])
    eventually(lambda: c.status("prefill-0").store_daemons == 1, 10, "a daemon known to the node")
    ask(c, 600, DIRECT)
    with urllib.request.urlopen(f"http://{c.procs['router'].ready['http']}/metrics", timeout=20) as r:
        series = [line for line in r.read().decode().splitlines() if line.startswith("baton_router_node_requests_waiting{")]
    assert sorted(s.split(" ")[0].split("{")[1] for s in series) == [
        'node="decode-0",role="decode"}', 'node="prefill-0",role="prefill"}']

    eventually(lambda: c.client.nodes()["store-0"].blocks_host > 0, 20, "the router follows the daemon")
    m = c.client.unary("FindPrefix", cls("FindPrefixRequest")(tokens={"ids": ids(600)}), "FindPrefixResponse",
                       service="Inspect")
    assert {h.role for h in m.holders} <= {"prefill", "decode", "kvstore"} and m.prompt_blocks == 9
    for role in ("prefill", "both", "kvstore"):
        with pytest.raises(grpc.RpcError) as e:
            c.client.unary("SetCanary", cls("SetCanaryRequest")(role=role, version="9.9", percent=5), "OrderReply",
                           service="Operator")
        assert e.value.code() == (grpc.StatusCode.INVALID_ARGUMENT if role == "kvstore" else grpc.StatusCode.NOT_FOUND)
