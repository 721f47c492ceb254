"""Where requests go: hits that routers expect and nodes confirm, loss of events, restarts, bursts."""
import hashlib
import random
import struct
import sys
import threading
import urllib.request

import pytest

from cluster import eventually
from fakenode import FakeNode
from relay import Relay
from wire import DIRECT, LENGTH, LOCAL, ROOT

sys.path.insert(0, str(ROOT / "tests/tools"))
import block_keys  # noqa: E402

BLOCK = 64


def ids(seed, n):
    rng = random.Random(seed)
    return [rng.randrange(3, 512) for _ in range(n)]


def ask(client, prompt, path=DIRECT, n=2, **kw):
    return client.generate(ids=prompt, max_tokens=n, ignore_eos=True, path=path, timeout=120, **kw)


def info(client, name):
    return client.nodes()[name]


def settled(c, client, names):
    """The router's picture of each node is the node's own: as many blocks as it has cached."""
    def look():
        for name in names:
            s = c.status(name)
            if info(client, name).blocks_pool * BLOCK // 16 != s.pages_cached:
                return False
        return True
    eventually(look, 10, "the pictures agree")


@pytest.fixture
def small(cluster):
    def start(**kw):
        args = [f"--engine.block_tokens={BLOCK}", "--tier.host_bytes=0", *kw.pop("node_args", ())]
        return cluster(node_args=args, **kw)
    return start


def test_expected_hits_are_hits(small):
    """Chats over three prefill nodes and two routers. Each turn goes where its history lies, whoever
    routes it, and what a router expects is what the node finds."""
    c = small(prefill=3, decode=1, model="slow")
    c.add_router("router-b").wait_ready()
    a, b = c.client, c.client_of("router-b")
    names = [f"prefill-{i}" for i in range(3)]
    eventually(lambda: {*names, "decode-0"} <= {n.name for n in b.server().nodes if n.state == "ready"}, 10,
               "b is ready")
    rng, cached, tokens = random.Random(1), 0, 0
    for chat in range(6):
        prompt, home = ids(chat, 650), None
        for turn in range(3):
            settled(c, a, names)
            settled(c, b, names)
            answer = ask(rng.choice((a, b)), prompt)
            if home:
                assert answer.timing.prefill_node == home  # both routers know
                assert answer.usage.cached_tokens == known // BLOCK * BLOCK
            home, known = answer.timing.prefill_node, len(prompt)
            cached, tokens = cached + answer.usage.cached_tokens, tokens + len(prompt)
            prompt = prompt + ids(chat * 10 + turn, 60)
    sums = [client.server().cache for client in (a, b)]
    assert sum(s.prompt_tokens for s in sums) == tokens
    assert sum(s.cached_tokens for s in sums) == cached == sum(s.expected_tokens for s in sums)
    assert sum(s.expected_pool_tokens for s in sums) == sum(c.status(n).tokens_cached for n in names)
    assert cached > 0 and all(info(a, n).cache_drifts == 0 for n in names)


def test_salts_share_nothing(small):
    c = small(prefill=1, decode=1)
    prompt = ids(5, 200)
    for salt, want in (("a", 0), ("a", 192), ("b", 0), ("", 0), ("b", 192)):
        settled(c, c.client, ["prefill-0"])
        before = c.client.server().cache.expected_tokens
        assert ask(c.client, prompt, cache_salt=salt).usage.cached_tokens == want
        assert c.client.server().cache.expected_tokens - before == want


def test_restart_clears_what_was_known(small):
    """RTR-01's other half: prefixes of a process that is gone are gone with it."""
    c = small(prefill=1, decode=1)
    c.allow("node=prefill-0.*to=lost", "peer", "msg=\"node prefill-0")
    prompt = ids(7, 200)
    ask(c.client, prompt)
    settled(c, c.client, ["prefill-0"])
    assert info(c.client, "prefill-0").blocks_pool == 3
    c.procs["prefill-0"].kill()
    c.restart("prefill-0")
    eventually(lambda: c.state_of("prefill-0") == "ready", 20, "back")
    eventually(lambda: info(c.client, "prefill-0").blocks_pool == 0, 10, "forgotten")
    before = c.client.server().cache.expected_tokens
    assert ask(c.client, prompt).usage.cached_tokens == 0
    assert c.client.server().cache.expected_tokens == before


# --- what nodes and daemons have outside their pools ---

TIERS = ("pool", "host", "disk", "store")


def figures(client):
    """What the router expected and what nodes did, by tier."""
    s = client.server().cache
    return ([getattr(s, f"expected_{t}_tokens") for t in TIERS], [getattr(s, f"cached_{t}_tokens") for t in TIERS])


def did(c, names):
    """What the nodes say that they found, by tier."""
    st = [c.status(n) for n in names]
    return [sum(getattr(s, f"tokens_cached_{t}") for s in st) for t in TIERS]


SHARING = ["--store.enabled=on", "--engine.bring=always", "--tier.host_bytes=64M", "--redis.lookup_timeout=1s",
           f"--engine.block_tokens={BLOCK}"]


def test_store_is_a_tier_of_every_node(cluster):
    """A prompt that lies in a daemon alone: the router expects it of any node, goes by load, and the
    node finds it there."""
    c = cluster(prefill=2, decode=1, kvstore=1, model="slow", node_args=SHARING)
    names, n, N = ["prefill-0", "prefill-1"], 10 * BLOCK + 5, 16
    for p in [*names, "decode-0"]:
        eventually(lambda p=p: c.status(p).store_daemons == 1, 10, f"daemon known to {p}")
    prompts = [ids(i, n) for i in range(N)]
    for prompt in prompts:
        ask(c.client, prompt)
    eventually(lambda: info(c.client, "store-0").blocks_host >= N * 10, 20, "the router follows the daemon")
    eventually(lambda: c.status("store-0").blocks_announced >= N * 10, 10, "nodes can find it")
    for p in ["prefill-0", "prefill-1", "decode-0"]:  # empty caches, the daemon keeps what it has
        c.procs[p].stop()
        c.restart(p)
    eventually(lambda: {*names, "decode-0"} <= set(c.ready_nodes()), 20, "nodes ready")
    for p in [*names, "decode-0"]:
        eventually(lambda p=p: c.status(p).store_daemons == 1, 10, f"daemon known to {p}")
    eventually(lambda: all(info(c.client, p).blocks_host == info(c.client, p).blocks_pool == 0 for p in names),
               10, "old blocks forgotten")
    before = figures(c.client)
    counts = burst(c, prompts)
    expected, cached = ([b - a for a, b in zip(x, y)] for x, y in zip(before, figures(c.client)))
    assert expected == cached == [0, 0, 0, N * 10 * BLOCK] == did(c, names)
    assert set(counts) == set(names), counts  # nothing binds them to one


def test_hits_by_tier_agree_with_the_nodes(cluster, tmp_path):
    """Prompts that lie in the pool, in host memory, on disk and elsewhere: what /metrics says was
    expected and found is what the node says it found, tier by tier."""
    block = 8 * 2 * 8 * 32 * BLOCK * 2  # bytes; layers, K and V, heads, dim, tokens, of the model "slow"
    c = cluster(prefill=1, decode=1, kvstore=1, model="slow", pool=str(15 * block), node_args=[*SHARING[:2], *SHARING[3:]],
                prefill_args=[f"--tier.host_bytes={20 * block}", f"--tier.disk_path={tmp_path}",
                              "--tier.disk_write_rate=0"], decode_args=["--tier.host_bytes=64M"], router_args=["--http.listen=127.0.0.1:0"])
    for p in ("prefill-0", "decode-0"):
        eventually(lambda p=p: c.status(p).store_daemons == 1, 10, f"daemon known to {p}")

    def settled_all():
        """The router's picture of the node and the daemon is whole and at rest."""
        def look():
            s, i, d = c.status("prefill-0"), info(c.client, "prefill-0"), info(c.client, "store-0")
            return (i.blocks_pool * BLOCK // 16 == s.pages_cached and s.tier_pins == 0 and
                    i.blocks_host * block == s.tier_host_bytes and
                    i.blocks_disk * block <= s.tier_disk_bytes < (i.blocks_disk + 1) * (block + 8192) and
                    d.blocks_host >= stored and c.status("store-0").blocks_announced >= stored)
        eventually(look, 20, "settled")

    stored, prompts = 0, [ids(i, 6 * BLOCK + 5) for i in range(12)]
    for prompt in prompts:
        ask(c.client, prompt)
        stored += 6
        settled_all()
    elsewhere = [ids(100 + i, 6 * BLOCK + 5) for i in range(2)]
    for prompt in elsewhere:  # never seen by the prefill node
        ask(c.client, prompt, path=LOCAL)
        stored += 6
        settled_all()
    i = info(c.client, "prefill-0")
    assert i.blocks_pool and i.blocks_host and i.blocks_disk, i
    before = figures(c.client), did(c, ["prefill-0"])
    for prompt in [prompts[11], prompts[8], prompts[0], *elsewhere, prompts[1]]:
        ask(c.client, prompt)
        settled_all()
    with urllib.request.urlopen(f"http://{c.procs['router'].ready['http']}/metrics") as r:
        metrics = dict(line.rsplit(" ", 1) for line in r.read().decode().split("\n") if line and line[0] != "#")
    found, expected = ([int(metrics[f'baton_router_cache_{what}_tokens_total{{tier="{t}"}}'])
                        for t in ("engine", "host", "disk", "store")] for what in ("hit", "expected"))
    assert (expected, found) == figures(c.client)
    node = [b - a for a, b in zip(before[1], did(c, ["prefill-0"]))]
    assert [b - a for a, b in zip(before[0][1], found)] == node and all(node), (expected, found, node)
    assert [b - a for a, b in zip(before[0][0], expected)] == node, (expected, found, node)
    assert sum(node) == 6 * 6 * BLOCK


# --- played nodes ---

class Cache:
    """The cache side of a fake prefill node: answers CacheFollow from a log, loses what it is told to."""

    def __init__(self, loss=0.0, seed=1, rank=0):
        self.rank = rank
        self.log, self.have, self.loss, self.rng = [], set(), loss, random.Random(seed)
        self.asked, self.lock = [], threading.Lock()

    def store(self, session, fps):
        with self.lock:
            first = len(self.log) + 1
            self.log += fps
            self.have |= set(fps)
        self.send(session, first, fps)

    def send(self, session, first, fps):
        if session and self.rng.random() >= self.loss:
            session.send(events={"seq": first, "rank": self.rank, "events": [{"change": 0, "tier": 0, "blocks": fps}]})

    def follow(self, session, m):
        self.asked.append((m.after, m.snapshot))
        if m.snapshot:
            session.send(snapshot={"seq": len(self.log), "rank": self.rank, "first": True, "last": True, "blocks": sorted(self.have)})
            return
        with self.lock:
            rest = self.log[m.after:]
        for i in range(0, len(rest), 500):
            self.send(session, m.after + 1 + i, rest[i:i + 500])

    def load(self):
        return {"pages_free": 100, "cache_seq": len(self.log),
                "tiers": [{"tier": 0, "blocks": len(self.have), "sum": sum(self.have) & (1 << 64) - 1}]}


def prefill_answer(session, start):
    """A played prefill leg: first token, then handed over."""
    session.output(start.stream_id, 0, [70])
    session.output(start.stream_id, handed_over=True)


def decode_answer(session, start):
    session.output(start.stream_id, 1, [71], finish=LENGTH)


@pytest.fixture
def fakes(cluster):
    nodes = []

    def start(*ns, **kw):
        nodes.extend(ns)
        c = cluster(prefill=0, decode=0, redis=False, seeds=[n.address for n in ns], wait=False, **kw)
        digest = bytes.fromhex(c.client.model().digest)
        for n in ns:
            n.set_digest(digest)
        eventually(lambda: len(c.ready_nodes()) == len(ns), 20, "nodes ready")
        c.allow("from=ready to=lost")
        return c

    yield start
    for n in nodes:
        n.stop()


def keys(digest, prompt, numerics=b"fake/1"):
    key = block_keys.root(b"", digest, 1, b"", b"", hashlib.sha256(b"kv").digest(), numerics)
    for i in range(len(prompt) // BLOCK):
        key = block_keys.block(key, prompt[i * BLOCK:(i + 1) * BLOCK])
        yield struct.unpack("<Q", key[:8])[0]


def test_event_loss_is_repaired_within_a_second(fakes):
    """One message of ten is lost on the way; the digest in the load finds what no gap shows."""
    cache = Cache(loss=0.1)
    p = FakeNode("p0", "prefill", block_tokens=BLOCK, cache=cache, on_start=prefill_answer)
    d = FakeNode("d0", "decode", on_start=decode_answer)
    c = fakes(p, d)
    eventually(lambda: cache.asked, 10, "the router follows")
    rng = random.Random(2)
    for _ in range(200):
        cache.store(p.sessions[-1], [rng.getrandbits(64) for _ in range(7)])
    eventually(lambda: info(c.client, "p0").blocks_pool == len(cache.have), 1, "repaired")
    assert info(c.client, "p0").cache_gaps > 0


@pytest.fixture
def relay():
    r = Relay()
    yield r
    r.close()


def test_event_loss_of_a_real_node_is_repaired(relay, small):
    """Prompts push each other out of a node's pages, and one message of ten about it is lost. Ten
    heartbeats (a second) after the last change the router knows which blocks the node has: what it
    expects is what the node finds."""
    rng = random.Random(4)
    relay.lose = lambda m: m.WhichOneof("kind") == "events" and rng.random() < 0.1
    c = small(prefill=1, decode=1, model="slow", pool="16M", prefill_args=relay.args)
    for seed in range(60):
        ask(c.client, ids(seed, rng.randrange(100, 500)))
    assert relay.lost > 0 and c.status("prefill-0").blocks_evicted > 0
    before, found = c.client.server().cache, 0
    for seed in range(59, 55, -1):
        beats = relay.seen["load"]
        eventually(lambda: relay.seen["load"] >= beats + 10, 20, "ten heartbeats")
        assert info(c.client, "prefill-0").blocks_pool * BLOCK // 16 == c.status("prefill-0").pages_cached
        found += ask(c.client, ids(seed, 500)).usage.cached_tokens
    cache = c.client.server().cache
    assert 0 < found == cache.cached_tokens - before.cached_tokens == cache.expected_tokens - before.expected_tokens
    assert info(c.client, "prefill-0").cache_gaps + info(c.client, "prefill-0").cache_drifts > 0


def test_drift_is_repaired(fakes):
    """A node that says one thing and means another: a snapshot sets it right."""
    cache = Cache()
    p = FakeNode("p0", "prefill", block_tokens=BLOCK, cache=cache, on_start=prefill_answer)
    c = fakes(p, FakeNode("d0", "decode", on_start=decode_answer))
    eventually(lambda: cache.asked, 10, "the router follows")
    cache.store(p.sessions[-1], [1, 2, 3])
    eventually(lambda: info(c.client, "p0").blocks_pool == 3, 5, "followed")
    cache.have.add(9)  # nobody was told
    eventually(lambda: info(c.client, "p0").blocks_pool == 4, 5, "repaired")
    i = info(c.client, "p0")
    assert i.cache_drifts >= 1 and i.cache_snapshots >= 1 and cache.asked[-1][1]


def test_longest_prefix_wins_among_idle_nodes(fakes):
    prompt = ids(11, 10 * BLOCK)
    caches = [Cache(), Cache(), Cache()]
    ps = [FakeNode(f"p{i}", "prefill", block_tokens=BLOCK, cache=x, on_start=prefill_answer)
          for i, x in enumerate(caches)]
    c = fakes(*ps, FakeNode("d0", "decode", on_start=decode_answer))
    fps = list(keys(bytes.fromhex(c.client.model().digest), prompt))
    eventually(lambda: all(x.asked for x in caches), 10, "the router follows")
    for n, (p, x) in enumerate(zip(ps, caches)):
        x.store(p.sessions[-1], fps[:[2, 8, 5][n]])
    eventually(lambda: [info(c.client, f"p{i}").blocks_pool for i in range(3)] == [2, 8, 5], 5, "followed")
    for _ in range(10):
        assert ask(c.client, prompt).timing.prefill_node == "p1"
    assert c.client.server().cache.expected_tokens == 10 * 8 * BLOCK


def test_ranks_are_targets(fakes):
    """One node with three ranks, each with a cache and a queue of its own: prefixes go to the rank that
    has them, others to the least loaded one, and what is sent counts at once."""
    held = []

    def prefill(session, start):
        if len(start.prompt) > 4000:
            held.append((session, start))
        else:
            prefill_answer(session, start)

    def decode(session, start):
        if len(start.prompt) > 4000:
            held.append((session, start))
        else:
            decode_answer(session, start)

    caches = [Cache(rank=i) for i in range(3)]
    p = FakeNode("p0", "prefill", block_tokens=BLOCK, cache=caches, on_start=prefill, ranks=3)
    d = FakeNode("d0", "decode", on_start=decode, ranks=2, cache=[Cache(), Cache(rank=1)])
    c = fakes(p, d)
    prompt = ids(11, 10 * BLOCK)
    fps = list(keys(bytes.fromhex(c.client.model().digest), prompt))
    eventually(lambda: all(x.asked for x in caches), 10, "the router follows every rank")
    for x, n in zip(caches, (2, 5, 8)):
        x.store(p.sessions[-1], fps[:n])
    eventually(lambda: info(c.client, "p0").blocks_pool == 15, 5, "followed")
    assert info(c.client, "p0").ranks == 3
    for _ in range(5):
        a = ask(c.client, prompt)
        assert (a.timing.prefill_node, a.timing.prefill_rank) == ("p0", 2)
        assert p.starts[-1].rank == 2 and d.starts[-1].rank == a.timing.decode_rank < 2
    assert c.client.server().cache.expected_tokens == 5 * 8 * BLOCK
    # One rank repairs its drift, the others' pictures stay.
    caches[1].have.add(9)
    eventually(lambda: info(c.client, "p0").blocks_pool == 16, 5, "repaired")
    assert caches[1].asked[-1][1] and not caches[0].asked[-1][1] and not caches[2].asked[-1][1]
    # A rank that is at work on a long prompt gets no cold ones, not even its own prefix's neighbours.
    t = threading.Thread(target=lambda: ask(c.fresh_client(), ids(1, 7000)))
    t.start()
    eventually(lambda: len(held) == 2, 10, "the long one is held")
    busy = next(s.rank for _, s in held if s.leg == 1)
    got = [ask(c.client, ids(i, 100)).timing.prefill_rank for i in range(2, 22)]
    assert set(got) == {0, 1, 2} - {busy}
    for session, start in sorted(held, key=lambda h: h[1].leg):
        (prefill_answer if start.leg == 1 else decode_answer)(session, start)
    t.join()


def burst(c, prompts):
    """All at once; how many went where."""
    counts, lock, gate = {}, threading.Lock(), threading.Barrier(len(prompts))

    def one(prompt):
        gate.wait()
        a = ask(c.client, prompt, n=1)
        with lock:
            counts[a.timing.prefill_node] = counts.get(a.timing.prefill_node, 0) + 1

    threads = [threading.Thread(target=one, args=(prompt,)) for prompt in prompts]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return counts


def test_RTR_02_burst_over_a_shared_prefix(small):
    """Two equal prefill nodes, a long system prompt that all requests share. In a burst neither gets
    much more than half, although one had the prefix first."""
    c = small(prefill=2, decode=1, pool="256M", model="slow")
    c.allow("event=redis_down")  # all processors are busy
    head = ids(20, 6 * BLOCK)
    for i in range(4):
        ask(c.client, head + ids(100 + i, 100))
    counts = burst(c, [head + ids(200 + i, 200) for i in range(100)])
    assert sum(counts.values()) == 100 and max(counts.values()) <= 65, \
        (counts, [info(c.client, f"prefill-{i}") for i in range(2)])


def test_RTR_02_cold_traffic_avoids_the_busy_node(fakes):
    """One very long request is held on a prefill node: cold prompts go to the other one."""
    held = []

    def prefill(session, start):
        if len(start.prompt) > 4000:
            held.append((session, start))
        else:
            prefill_answer(session, start)

    def decode(session, start):
        if len(start.prompt) > 4000:
            held.append((session, start))
        else:
            decode_answer(session, start)

    ps = [FakeNode(f"p{i}", "prefill", on_start=prefill) for i in range(2)]
    d = FakeNode("d0", "decode", on_start=decode)
    c = fakes(*ps, d)
    got = []
    t = threading.Thread(target=lambda: got.append(ask(c.fresh_client(), ids(1, 7000))))
    t.start()
    eventually(lambda: len(held) == 2, 10, "the long one is held")
    busy = next(p.name for p in ps if p.starts)
    for i in range(2, 22):
        assert ask(c.client, ids(i, 100)).timing.prefill_node != busy
    for session, start in sorted(held, key=lambda h: h[1].leg):  # prefill is leg 1, decode 2
        (prefill_answer if start.leg == 1 else decode_answer)(session, start)
    t.join()
    assert list(got[0].tokens) == [70, 71] and got[0].timing.prefill_node == busy
