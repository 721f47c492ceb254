"""Memory that outlives its process: nodes and keeper are killed, and the next turn is a cache hit.

Every answer equals that of a node without any cache. What a turn finds is what the turns before it
left, whoever has died in between.
"""
import mmap
import os
import pathlib
import random
import socket
import struct
import subprocess
import sys
import threading
import time

import grpc
import pytest

from cluster import HEAD_DIM, SANITIZED, SLOW, Cluster, eventually
from test_cache_events import Follower
from wire import DIRECT, LOCAL

BLOCK = 128
N_TOKENS = 24
LONG = os.environ.get("BATON_TEST_LONG") == "1"
ROUNDS = 1000 if LONG else 10 if SANITIZED else 50
DEATHS = ("from=ready to=lost", "level=warn.*(peer|handoff|session|xfer|net|keeper|refused)")


@pytest.fixture(scope="module")
def plain(models):
    """One node, one request at a time, no reuse, no keeper."""
    c = Cluster(models("tiny"), prefill=0, decode=1, role="both", node_args=["--engine.prefix_cache=off"])
    yield c
    c.finish()


def ids(seed, n):
    rng = random.Random(seed)
    return [rng.randrange(3, 512) for _ in range(n)]


def want(plain, prompt, n_tokens=N_TOKENS):
    return list(plain.client.generate(ids=prompt, max_tokens=n_tokens, ignore_eos=True, timeout=120).tokens)


def ask(c, prompt, path, n_tokens=N_TOKENS):
    """Tried again while the router knows of no node that lives."""
    def attempt():
        return c.client.generate(ids=prompt, max_tokens=n_tokens, ignore_eos=True, path=path, timeout=60)
    return eventually(attempt, 20, "an answer")


# ---- the keeper, from outside ----

HEAD = struct.Struct("<IHH")
ROW = struct.Struct("<64s32sQQQIIQ")
STATUS, REFUSED, ROWS = 4, 66, 67


def keeper_socket(c):
    return str(c.folder / "keeper.sock")


def regions(c):
    """(node, region) -> (bytes, id, incarnation, pid)"""
    found = {}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as s:
        s.settimeout(5)
        s.connect(keeper_socket(c))
        s.send(HEAD.pack(0x31504B42, 1, STATUS))
        last = 0
        while not last:
            m = s.recv(1 << 16)
            assert HEAD.unpack_from(m)[2] == ROWS
            n, last = struct.unpack_from("<II", m, HEAD.size)
            for i in range(n):
                node, name, size, ident, inc, pid, _, _ = ROW.unpack_from(m, HEAD.size + 8 + i * ROW.size)
                found[node.rstrip(b"\0").decode(), name.rstrip(b"\0").decode()] = (size, ident, inc, pid)
    return found


def keeper_has(c, *nodes):
    """The keeper that runs now has the memory of these processes."""
    pids = {n: c.procs[n].p.pid for n in nodes}

    def look():
        rows = regions(c)
        return all((n, r) in rows and rows[n, r][3] == pids[n] for n in nodes for r in ("kv", "kv-ledger"))
    eventually(look, 20, "the keeper has all")


def kill(c, *names):
    for n in names:
        c.procs[n].p.kill()
    for n in names:
        c.procs[n].p.wait()


def memory(c, node):
    """The pool's memory of a node, from the keeper's descriptor."""
    folder = pathlib.Path(f"/proc/{c.procs['keeper'].p.pid}/fd")
    for fd in folder.iterdir():
        try:
            if os.readlink(fd).startswith(f"/memfd:baton-{node}-kv "):
                with open(fd, "r+b") as f:
                    return mmap.mmap(f.fileno(), 0)
        except FileNotFoundError:  # a connection that the keeper has just closed
            pass
    raise AssertionError(f"no memory of {node}")


# ---- tests ----

class Load:
    """Requests all the time on threads of their own: right answers, or none because nobody lives."""

    def __init__(self, c, plain):
        self.prompts = [ids(9000 + i, 150 + 40 * i) for i in range(6)]
        self.want = [want(plain, p) for p in self.prompts]
        self.paths = [DIRECT, LOCAL] if "prefill-0" in c.procs else [LOCAL]
        self.c, self.wrong, self.right, self.failed, self.over = c, [], 0, 0, threading.Event()
        self.threads = [threading.Thread(target=self.work, args=(i,)) for i in range(2)]
        for t in self.threads:
            t.start()

    def work(self, seed):
        rng = random.Random(seed)
        while not self.over.is_set():
            i = rng.randrange(len(self.prompts))
            try:
                a = self.c.client.generate(ids=self.prompts[i], max_tokens=N_TOKENS, ignore_eos=True,
                                           path=rng.choice(self.paths), timeout=60)
                self.right += 1
                if list(a.tokens) != self.want[i]:
                    self.wrong.append((i, list(a.tokens)))
            except grpc.RpcError as e:
                self.failed += 1
                if e.code() != grpc.StatusCode.UNAVAILABLE:
                    self.wrong.append(e)
                time.sleep(0.05)

    def stop(self):
        self.over.set()
        for t in self.threads:
            t.join(60 * SLOW)
            assert not t.is_alive()
        assert not self.wrong, self.wrong[:3]
        assert self.right > 0


@pytest.mark.sanitize
def test_kills_under_load(cluster, plain):
    """The next turn of every chat finds all that the turns before it left on the node."""
    rng = random.Random(int(os.environ.get("BATON_TEST_SEED", "4")))
    c = cluster(keeper=True)
    c.allow(*DEATHS)
    load = Load(c, plain)
    # Of each chat: the prompt of the next turn, the tokens whose KV is there, and the path.
    chats = [[ids(100 + i, 200), 0, [DIRECT, LOCAL][i % 2]] for i in range(4)]
    n_new = len(chats)
    adopted = cached = 0
    try:
        for number in range(ROUNDS):
            victims = rng.choice([["prefill-0"], ["decode-0"], ["prefill-0", "decode-0"], ["keeper"]])
            time.sleep(rng.random() * 0.03)
            kill(c, *victims)
            for v in victims:
                c.restart(v)
            if "keeper" in victims:
                keeper_has(c, "prefill-0", "decode-0")
            else:
                s = [c.status(v) for v in victims]
                assert all(x.blocks_bad == 0 for x in s), s
                adopted += sum(x.blocks_adopted for x in s)
            i = number % len(chats)
            prompt, known, path = chats[i]
            a = ask(c, prompt, path)
            assert list(a.tokens) == want(plain, prompt), (number, victims)
            assert a.usage.cached_tokens >= known // BLOCK * BLOCK, (number, victims, i)
            cached += a.usage.cached_tokens
            # A prefill node has the prompts, the node of a local answer all but the last token.
            known = len(prompt) + (N_TOKENS - 1 if path == LOCAL else 0)
            chats[i][:2] = prompt + list(a.tokens) + ids(number * 7 + i, 30), known
            if len(chats[i][0]) > 1200:
                chats[i] = [ids(100 + n_new, 200), 0, path]
                n_new += 1
    finally:
        load.stop()
    assert adopted > 0 and cached > 0
    print(f"\n{ROUNDS} rounds, {adopted} blocks adopted, {cached} tokens cached, load: {load.right} answers, "
          f"{load.failed} without a node")
    c.pages_back()


@pytest.mark.sanitize
def test_kills_while_blocks_are_pushed_out(cluster, plain):
    """A pool that is far too small: pages change hands all the time, and none is taken for another."""
    rng = random.Random(7)
    page = 3 * 2 * 2 * HEAD_DIM * 16 * 2  # layers, K and V, heads, dim, tokens, bytes
    c = cluster(prefill=0, decode=1, role="both", keeper=True, pool=str(page * 90))
    c.allow(*DEATHS)
    load, adopted, evicted = Load(c, plain), 0, 0
    heads = [ids(500 + i, 256) for i in range(6)]
    prompts = [rng.choice(heads) + ids(600 + i, 40) for i in range(12)]
    answers = [want(plain, p) for p in prompts]
    try:
        for number in range(ROUNDS // 2):
            i = rng.randrange(len(prompts))
            assert list(ask(c, prompts[i], LOCAL).tokens) == answers[i], number
            time.sleep(rng.random() * 0.05)
            evicted += c.status("decode-0").blocks_evicted
            kill(c, "decode-0")
            c.restart("decode-0")
            s = c.status("decode-0")
            assert s.blocks_bad == 0
            adopted += s.blocks_adopted
    finally:
        load.stop()
    c.pages_back()
    assert adopted > 0 and evicted > 0


def test_keeper_and_node_die_together(cluster, plain):
    """Then the memory is gone: a clean start, right answers."""
    c = cluster(prefill=0, decode=1, role="both", keeper=True)
    c.allow(*DEATHS)
    prompt = ids(1, 300)
    ask(c, prompt, LOCAL)
    kill(c, "keeper", "decode-0")
    c.restart("keeper")
    c.restart("decode-0")
    s = c.status("decode-0")
    assert s.blocks_adopted == 0 and s.blocks_bad == 0
    a = ask(c, prompt, LOCAL)
    assert a.usage.cached_tokens == 0 and list(a.tokens) == want(plain, prompt)
    assert ask(c, prompt, LOCAL).usage.cached_tokens == 256


@pytest.mark.sanitize
def test_stop_and_upgrade_keep_the_cache(cluster, plain):
    """A node that ends in good order leaves its blocks too; another geometry gets none of them."""
    c = cluster(prefill=0, decode=1, role="both", keeper=True)
    c.allow(*DEATHS)
    prompt = ids(2, 300)
    ask(c, prompt, LOCAL)
    assert c.procs["decode-0"].stop() == 0
    c.restart("decode-0")
    s = c.status("decode-0")
    assert s.blocks_adopted == 2 and s.blocks_bad == 0 and s.pages_cached == 16 and s.keeper == "holds"
    a = ask(c, prompt, LOCAL)
    assert a.usage.cached_tokens == 256 and list(a.tokens) == want(plain, prompt)
    for change in ("--engine.page_tokens=32", "--engine.kv_dtype=f32"):
        assert c.procs["decode-0"].stop() == 0
        c.procs["decode-0"].argv.append(change)
        c.restart("decode-0")
        assert c.status("decode-0").blocks_adopted == 0
        c.procs["decode-0"].argv.pop()
    assert ask(c, prompt, LOCAL).usage.cached_tokens == 0


def test_adopted_blocks_sink_into_the_tiers(cluster, plain):
    """Used once after the restart, they are kept elsewhere too when the pool needs their pages."""
    page = 3 * 2 * 2 * HEAD_DIM * 16 * 2  # layers, K and V, heads, dim, tokens, bytes
    c = cluster(prefill=0, decode=1, role="both", keeper=True, pool=str(page * 90),
                node_args=["--engine.bring=always"])
    c.allow(*DEATHS)
    prompt = ids(6, 300)
    ask(c, prompt, LOCAL)
    kill(c, "decode-0")
    c.restart("decode-0")
    assert ask(c, prompt, LOCAL).usage.cached_tokens == 256
    for i in range(8):
        ask(c, ids(60 + i, 900), LOCAL, 1)
    assert c.status("decode-0").blocks_evicted > 2
    before = c.status("decode-0").tokens_computed
    a = ask(c, prompt, LOCAL)
    assert a.usage.cached_tokens == 256 and list(a.tokens) == want(plain, prompt)
    assert c.status("decode-0").tokens_computed - before == 300 - 256 + N_TOKENS - 1


def test_adopted_blocks_are_announced(cluster):
    """Routers hear of them from the new incarnation as of any other block."""
    c = cluster(prefill=0, decode=1, role="both", keeper=True, node_args=["--engine.block_tokens=64"])
    c.allow(*DEATHS)
    prompt = ids(5, 5 * 64 + 3)
    ask(c, prompt, LOCAL, 1)
    incarnation = c.status("decode-0").incarnation
    kill(c, "decode-0")
    c.restart("decode-0")
    r = Follower(c.procs["decode-0"].address)
    assert r.welcome.incarnation != incarnation
    r.follow()
    r.wait(lambda: len(r.blocks.get(0, ())) == 5)
    assert r.blocks[0] == set(r.fingerprints(prompt))
    r.wait(r.agrees)
    r.out.put(None)


@pytest.mark.sanitize
@pytest.mark.parametrize("torn", ["one byte in every page", "one byte in one block"])
def test_torn_pages_are_refused(cluster, plain, torn):
    """The dead node's memory is damaged before its successor comes."""
    c = cluster(prefill=0, decode=1, role="both", keeper=True)
    c.allow(*DEATHS)
    prompts = [ids(10 + i, 600) for i in range(3)]
    for p in prompts:
        ask(c, p, LOCAL)
    s = c.status("decode-0")
    page, stride = 3, 2 * 2 * 16 * HEAD_DIM * 2  # K and V, heads, tokens, dim, bytes: a page in a layer
    kill(c, "decode-0")
    mem = memory(c, "decode-0")
    assert len(mem) >= s.pages_total * stride * 3
    layer = s.pages_total * stride  # of the second layer
    pages = range(s.pages_total) if torn.endswith("page") else [page]
    for p in pages:
        mem[layer + p * stride + 77] ^= 0x10
    mem.close()
    c.restart("decode-0")
    s = c.status("decode-0")
    assert s.blocks_adopted == 12 and s.blocks_bad == 0  # they are looked at when they are used
    cached = []
    for p in prompts:
        a = ask(c, p, LOCAL)
        assert list(a.tokens) == want(plain, p)
        cached.append(a.usage.cached_tokens)
    if torn.endswith("page"):
        assert cached == [0, 0, 0]
        assert c.status("decode-0").blocks_bad == 12
    else:
        # It was the first block of the first prompt; its children went with it.
        assert cached == [0, 512, 512]
        assert c.status("decode-0").blocks_bad == 4
    assert [ask(c, p, LOCAL).usage.cached_tokens for p in prompts] == [512, 512, 512]


def test_a_predecessor_that_lives_is_fenced_off(cluster, plain):
    """A second process of the same name gets nothing of the first one's memory, and serves all the same."""
    c = cluster(prefill=0, decode=1, role="both", keeper=True)
    c.allow(*DEATHS, "overtaken|fenced|newer process")
    prompt = ids(3, 300)
    ask(c, prompt, LOCAL)
    first = c.procs["decode-0"]
    before = regions(c)["decode-0", "kv"]
    second = c.add_node("decode", "twin", ["--role=both", "--keeper.wait=200ms"])
    second.p.kill()
    second.p.wait()
    second.argv = [a.replace("--name=twin", "--name=decode-0") for a in second.argv]
    second.start()
    second.wait_ready()
    assert regions(c)["decode-0", "kv"] == before
    log = second.log.read_text()
    assert f"process {first.p.pid}" in log and f"process {second.p.pid}" in log
    s = c.status("twin")
    assert s.keeper == "away" and s.blocks_adopted == 0
    first.kill()
    keeper_has_pid = lambda: regions(c)["decode-0", "kv"][3] == second.p.pid  # noqa: E731
    eventually(keeper_has_pid, 20, "the second one's memory is with the keeper")
    eventually(lambda: c.status("twin").keeper == "holds")
    a = ask(c, prompt, LOCAL)
    assert list(a.tokens) == want(plain, prompt)


FOREIGN = """
import os, socket, sys
os.setgroups([]); os.setgid(65534); os.setuid(65534)
s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
s.settimeout(10)
try:
    s.connect(sys.argv[1])
except PermissionError:
    print("no connection"); sys.exit()
fds = []
while True:
    try:
        m, more, _, _ = socket.recv_fds(s, 1 << 16, 8)
    except ConnectionResetError:
        continue
    fds += more
    if not m:
        break
    print("type", int.from_bytes(m[6:8], "little"), "rc", int.from_bytes(m[8:12], "little", signed=True))
print("descriptors", len(fds))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_foreign_user_gets_nothing(cluster):
    c = cluster(prefill=0, decode=1, role="both", keeper=True)
    c.allow("turned_away")
    os.chmod(c.folder, 0o755)

    def foreign():
        return subprocess.run([sys.executable, "-c", FOREIGN, keeper_socket(c)], capture_output=True, text=True,
                              timeout=60, check=True).stdout
    assert foreign() == "no connection\n"
    os.chmod(keeper_socket(c), 0o666)  # somebody opened it to all
    assert foreign() == f"type {REFUSED} rc -9\ndescriptors 0\n"


def test_no_keeper_at_start(cluster, plain):
    """The node serves, and its memory outlives it as soon as a keeper is there."""
    c = cluster(prefill=0, decode=1, role="both", keeper=True)
    c.allow(*DEATHS)
    kill(c, "decode-0", "keeper")
    c.restart("decode-0")
    assert c.status("decode-0").keeper == "away"
    prompt = ids(4, 300)
    ask(c, prompt, LOCAL)
    c.restart("keeper")
    keeper_has(c, "decode-0")
    kill(c, "decode-0")
    c.restart("decode-0")
    assert c.status("decode-0").blocks_adopted == 2
    a = ask(c, prompt, LOCAL)
    assert a.usage.cached_tokens == 256 and list(a.tokens) == want(plain, prompt)


def test_name_is_needed(cluster):
    c = cluster(prefill=0, decode=1, role="both", keeper=True)
    argv = [a for a in c.procs["decode-0"].argv if not a.startswith(("--name", "--ready_file"))]
    p = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert p.returncode == 2 and "name" in p.stderr


def test_restart_time(cluster, plain):
    """Prints how long kill -9 to ready takes with a pool full of blocks."""
    n = 40
    c = cluster(prefill=0, decode=1, role="both", keeper=True)
    c.allow(*DEATHS)
    prompts = [ids(1000 + i, 1025) for i in range(n)]
    for p in prompts:
        ask(c, p, LOCAL, 1)
    times = []
    for _ in range(5):
        t0 = time.monotonic()
        kill(c, "decode-0")
        c.procs["decode-0"].start()
        while not c.procs["decode-0"].ready_file.exists() or \
                f"pid={c.procs['decode-0'].p.pid}\n" not in c.procs["decode-0"].ready_file.read_text():
            time.sleep(0.001)
        times.append(time.monotonic() - t0)
        c.clients.pop("decode-0", None)
        c.procs["decode-0"].wait_ready()
    s = c.status("decode-0")
    print(f"\nkill -9 to ready: {min(times) * 1e3:.0f} to {max(times) * 1e3:.0f} ms, "
          f"{s.blocks_adopted} blocks, {s.pages_cached} pages adopted")
    assert s.blocks_adopted == n * 8 and s.pages_cached == n * 64
    a = ask(c, prompts[7], LOCAL)
    assert a.usage.cached_tokens == 1024 and list(a.tokens) == want(plain, prompts[7])
