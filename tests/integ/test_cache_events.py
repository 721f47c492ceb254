"""What nodes tell routers of their caches: numbers, fingerprints, digests, repair after loss."""
import random
import struct
import sys
import threading

import pytest

from cluster import eventually
from test_node_session import Router
from wire import LEG_LOCAL, ROOT, RouterMessage

sys.path.insert(0, str(ROOT / "tests/tools"))
import block_keys  # noqa: E402

BLOCK = 64
STORED, REMOVED, CLEARED = 0, 1, 2
MASK = (1 << 64) - 1


class Follower(Router):
    """Applies what a node says of its cache. `drop(message number)` loses messages of events."""

    def __init__(self, address, drop=lambda i: False, **kw):
        self.blocks, self.seq, self.drop, self.n_messages, self.gaps = {}, 0, drop, 0, 0
        self.snapshots, self.last_load, self.building, self.steps = 0, None, None, []
        super().__init__(address, read=False, **kw)
        threading.Thread(target=self.read, daemon=True).start()
        self.wait(lambda: self.welcome or self.error)

    def follow(self, after=0, snapshot=False):
        self.out.put(RouterMessage(follow=dict(after=after, snapshot=snapshot)))

    def on_events(self, m):
        self.n_messages += 1
        if self.drop(self.n_messages):
            return
        if m.seq > self.seq + 1:
            self.gaps += 1
            return
        seq = m.seq
        for e in m.events:
            tier = self.blocks.setdefault(e.tier, set())
            if e.change == CLEARED:
                tier.clear()
                seq += 1
            for fp in e.blocks:
                (tier.add if e.change == STORED else tier.discard)(fp)
                seq += 1
        self.seq = seq - 1

    def on_snapshot(self, m):
        if m.first:
            self.building = {}
        self.building.setdefault(m.tier, set()).update(m.blocks)
        if m.last:
            self.blocks, self.seq, self.snapshots = self.building, m.seq, self.snapshots + 1

    def read(self):
        try:
            for m in self.call:
                with self.changed:
                    kind = m.WhichOneof("kind")
                    if kind == "welcome":
                        self.welcome = m.welcome
                    elif kind == "load":
                        self.last_load = m.load
                        self.steps += m.load.steps
                    elif kind == "events":
                        self.on_events(m.events)
                    elif kind == "snapshot":
                        self.on_snapshot(m.snapshot)
                    else:
                        for o in m.step.outputs:
                            self.outputs.setdefault(o.stream_id, []).append(o)
                    self.changed.notify_all()
        except Exception as e:  # the test looks at it
            with self.changed:
                self.error = e
                self.changed.notify_all()

    def agrees(self):
        """As the node's last load says."""
        if not self.last_load or self.last_load.cache_seq != self.seq:
            return False
        return all(t.blocks == len(self.blocks.get(t.tier, ())) and
                   t.sum == sum(self.blocks.get(t.tier, ())) & MASK for t in self.last_load.tiers)

    def fingerprints(self, ids):
        w = self.welcome
        key = block_keys.root(b"", w.model_digest, w.weight_epoch, b"", b"", w.kv_format, w.numerics.encode())
        fps = []
        for i in range(len(ids) // BLOCK):
            key = block_keys.block(key, ids[i * BLOCK:(i + 1) * BLOCK])
            fps.append(struct.unpack("<Q", key[:8])[0])
        return fps


def ids(seed, n):
    rng = random.Random(seed)
    return [rng.randrange(3, 512) for _ in range(n)]


@pytest.fixture
def node(cluster):
    c = cluster(prefill=0, decode=1, role="both", wait=False,
                node_args=[f"--engine.block_tokens={BLOCK}"], pool="1M")
    yield c.procs["decode-0"]


def run(r, stream, prompt, max_tokens=2):
    r.start(stream, prompt=prompt, leg=LEG_LOCAL, max_tokens=max_tokens)
    return r.ended(stream)


def test_keys_are_those_of_the_table(node):
    r = Follower(node.address)
    assert r.welcome.block_tokens == BLOCK
    r.follow()
    prompt = ids(1, 5 * BLOCK + 3)
    run(r, 1, prompt)
    r.wait(lambda: len(r.blocks.get(0, ())) == 5)
    assert r.blocks[0] == set(r.fingerprints(prompt))
    r.wait(r.agrees)
    r.out.put(None)


def test_late_router_and_eviction(node):
    """A small pool: blocks go again. Who comes late has the same picture, from the ring or a snapshot."""
    a = Follower(node.address, name="a")
    a.follow()
    for i in range(60):
        run(a, i + 1, ids(100 + i, 4 * BLOCK + 1))
    a.wait(a.agrees)
    assert 0 < len(a.blocks[0]) < 240
    b = Follower(node.address, name="b")
    b.follow()
    c = Follower(node.address, name="c")
    c.follow(snapshot=True)
    for r in (b, c):
        r.wait(r.agrees)
        assert r.blocks[0] == a.blocks[0]
    assert b.snapshots == 0 and c.snapshots == 1
    b.follow(after=a.seq + 1000)  # a number that was never given
    b.wait(lambda: b.snapshots == 1)
    b.wait(b.agrees)
    for r in (a, b, c):
        r.out.put(None)


def test_resume_behind_a_number(node):
    """After a lost message the router asks for what is behind its number and gets just that."""
    rng = random.Random(3)
    lost = {i for i in range(1, 200) if rng.random() < 0.3}
    r = Follower(node.address, drop=lambda i: i in lost)
    r.follow()
    for i in range(20):
        run(r, i + 1, ids(200 + i, 3 * BLOCK + 1))

    def repaired():
        if r.agrees():
            return True
        r.follow(after=r.seq)
        return False

    eventually(repaired, 10, "the picture is repaired")
    assert r.snapshots == 0 and len(lost & set(range(r.n_messages + 1))) > 0
    r.out.put(None)


def test_load_tells_costs_and_starts(node):
    r = Follower(node.address)
    for i in range(3):
        run(r, i + 1, ids(300 + i, 100), max_tokens=5)
        r.wait(lambda: r.last_load and r.last_load.starts == i + 1)
    r.wait(lambda: r.last_load.pages_unused < r.last_load.pages_free)  # blocks are cached
    r.wait(lambda: any(s.prompt_tokens == 100 and s.prompt_work == 5050 and s.us > 0 for s in r.steps))
    r.wait(lambda: any(s.rows == 1 and s.row_work > 100 for s in r.steps))
    r.out.put(None)
