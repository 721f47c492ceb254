"""Host memory and disk under the engine, with real processes and pools that are far too small.

Every answer equals that of a node without a cache; usage and the nodes' counters say where the blocks
were. Where counters are compared the nodes always bring what they find (engine.bring=always): on a busy
machine computing may look cheaper.
"""
import itertools
import os
import pathlib
import random
import subprocess
import threading

import grpc
import pytest

from cluster import DEVICE, SANITIZED, Cluster, eventually
from wire import AUTO, DIRECT, LOCAL, request

BLOCK = 128
PAGE = 8 * 2 * 8 * (32 if DEVICE == "cpu" else 64) * 16 * 2  # layers, K and V, heads, dim, tokens, bytes of the model "slow"
BLOB = PAGE * BLOCK // 16
ANSWER = 20
ROUNDS = 1000 if os.environ.get("BATON_TEST_LONG", "") not in ("", "0") else 5 if SANITIZED else 50


def ids(seed, n):
    rng = random.Random(seed)
    return [rng.randrange(3, 512) for _ in range(n)]


def ask(c, prompt, path=AUTO, n=ANSWER, **kw):
    return c.client.generate(ids=prompt, max_tokens=n, ignore_eos=True, path=path, timeout=240, **kw)


class Plain:
    """What a node without a cache answers, one request at a time; remembered."""

    def __init__(self, model):
        self.c = Cluster(model, prefill=0, decode=1, role="both", pool="512M",
                         node_args=["--engine.prefix_cache=off"])
        self.known = {}

    def __call__(self, prompt, n=ANSWER, **kw):
        key = (tuple(prompt), n, tuple(sorted(kw.items())))
        if key not in self.known:
            self.known[key] = list(ask(self.c, prompt, n=n, **kw).tokens)
        return self.known[key]


@pytest.fixture(scope="module")
def plain(models):
    p = Plain(models("slow"))
    yield p
    p.c.finish()


def tiers(host, disk=None, *more):
    return ["--engine.bring=always", f"--tier.host_bytes={host}", *([f"--tier.disk_path={disk}", "--tier.disk_write_rate=0"] if disk else []),
            *more]


def pages(tokens):
    return str(PAGE * (tokens // 16))


def at_rest(c, name="decode-0"):
    def look():
        s = c.status(name)
        return s if s.tier_pins == 0 and s.pages_transfers == 0 and s.requests_running == 0 else None
    return eventually(look, 20, "nothing pinned")


def settle_disk(c, least, name="decode-0"):
    return eventually(lambda: c.status(name).tier_disk_bytes >= least, 30, "blocks on disk")


def chats(c, plain, n_chats, n_turns, path=AUTO, first=300, check=None):
    """Chats that take turns, so that each one's blocks are pushed out by the others'."""
    prompts = {k: ids(k, first + 37 * k) for k in range(n_chats)}
    for turn in range(n_turns):
        for k in prompts:
            a = ask(c, prompts[k], path)
            assert list(a.tokens) == plain(prompts[k])
            if check:
                check(k, turn, len(prompts[k]), a)
            prompts[k] = prompts[k] + list(a.tokens) + ids(k * 100 + turn + 1000, 41)


def test_turns_from_host_memory(cluster, plain):
    """A pool that holds one chat at a time: every turn computes its new part alone."""
    c = cluster(model="slow", prefill=0, decode=1, role="both", pool=pages(1024), node_args=tiers("256M"))
    known = {}

    def check(k, turn, n, a):
        want = known.get(k, 0) // BLOCK * BLOCK
        known[k] = n + ANSWER - 1
        assert a.usage.cached_tokens == want

    chats(c, plain, 6, 4, check=check)
    s = at_rest(c)
    assert s.tokens_cached_host > s.tokens_cached_pool
    assert s.tokens_cached_host + s.tokens_cached_pool == s.tokens_cached
    assert s.loads > 10 and s.loads_short == 0 and s.tier_bad_blocks == 0


def test_turns_from_disk(cluster, plain, tmp_path):
    """Host memory that is too small as well: histories come back from disk."""
    c = cluster(model="slow", prefill=0, decode=1, role="both", pool=pages(1024),
                node_args=tiers(str(16 * BLOB), tmp_path))
    chats(c, plain, 8, 3)
    s = at_rest(c)
    assert s.tokens_cached_disk > 0 and s.tokens_cached_host > 0
    assert s.tier_bad_blocks == 0


def test_disk_survives_a_restart(cluster, plain, tmp_path):
    c = cluster(model="slow", prefill=0, decode=1, role="both", pool=pages(1024),
                node_args=tiers("256M", tmp_path))
    prompts = [ids(k, 400) for k in range(4)]
    for p in prompts:
        ask(c, p)
    assert c.procs["decode-0"].stop() == 0
    c.restart("decode-0")
    eventually(lambda: "decode-0" in c.ready_nodes(), 20, "node ready")
    settle_disk(c, 4 * 3 * BLOB)
    for p in prompts:
        a = ask(c, p)
        assert list(a.tokens) == plain(p)
        assert a.usage.cached_tokens == 3 * BLOCK
    assert at_rest(c).tokens_cached_disk == 4 * 3 * BLOCK


def test_disk_survives_kill(cluster, plain, tmp_path):
    """Without a word of farewell: what had sunk to disk is there, the rest is computed."""
    c = cluster(model="slow", prefill=0, decode=1, role="both", pool=pages(1024),
                node_args=tiers(str(12 * BLOB), tmp_path))
    c.allow("event=session", "event=retry", "peer", "lost")
    prompts = [ids(k, 400) for k in range(8)]
    for p in prompts:
        ask(c, p)
    settle_disk(c, 3 * BLOB)
    c.procs["decode-0"].kill()
    c.restart("decode-0")
    eventually(lambda: "decode-0" in c.ready_nodes(), 20, "node ready")
    settle_disk(c, 3 * BLOB)
    for p in prompts:
        assert list(ask(c, p).tokens) == plain(p)
    assert at_rest(c).tokens_cached_disk > 0


@pytest.mark.parametrize("how", ["flip", "cut", "empty", "gone"])
def test_TIER_01_damaged_files(cluster, plain, tmp_path, how):
    c = cluster(model="slow", prefill=0, decode=1, role="both", pool=pages(1024),
                node_args=tiers("256M", tmp_path))
    prompts = [ids(k, 400) for k in range(3)]
    for p in prompts:
        ask(c, p)
    assert c.procs["decode-0"].stop() == 0
    c.restart("decode-0")
    eventually(lambda: "decode-0" in c.ready_nodes(), 20, "node ready")
    settle_disk(c, 3 * 3 * BLOB)
    files = sorted(f for f in pathlib.Path(tmp_path).rglob("*") if f.is_file() and f.stat().st_size > BLOB // 2)
    assert len(files) >= 9
    for f in files[::2]:  # after they were found to be there
        data = bytearray(f.read_bytes())
        if how == "flip":
            data[len(data) // 2] ^= 1
            f.write_bytes(data)
        elif how == "gone":
            f.unlink()
        else:
            os.truncate(f, 0 if how == "empty" else len(data) // 2)
    c.allow("tier", "blob", "disk")
    for p in prompts * 2:
        assert list(ask(c, p).tokens) == plain(p)
    s = at_rest(c)
    assert s.tier_bad_blocks > 0
    assert s.tokens_cached > 0  # the second time at least


def mounted(path, options):
    if subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", path], capture_output=True).returncode:
        pytest.skip("this user may not mount a file system")


def unmounted(path, c):
    """The cluster's own end comes before the file system's."""
    try:
        c.finish()
        c.finish = lambda failed=False: None
    finally:
        subprocess.run(["umount", "-l", path], check=True)


def only_whole_files(path):
    """No file that is being written, none of no size, none half."""
    sizes = {f.stat().st_size for f in pathlib.Path(path).rglob("*") if f.is_file()}
    assert sizes and min(sizes) > BLOB and len(sizes) == 1, sizes


def works_again(c, plain, before):
    """Blocks are written and read as before; new chats make them sink."""
    fresh = itertools.count(100)

    def more():
        for _ in range(4):
            prompt = ids(next(fresh), 400)
            assert list(ask(c, prompt).tokens) == plain(prompt)
        return c.status("decode-0").tier_disk_bytes > before.tier_disk_bytes + 8 * BLOB
    eventually(more, 60, "blocks are written again")
    found = c.status("decode-0").tokens_cached_disk
    old = itertools.cycle(range(100, 110))  # more than host memory holds

    def read():
        prompt = ids(next(old), 400)
        assert list(ask(c, prompt).tokens) == plain(prompt)
        return c.status("decode-0").tokens_cached_disk > found
    eventually(read, 60, "blocks are read again")


def test_TIER_01_full_disk(cluster, plain, tmp_path):
    """Room for two blocks and a half: the third is a file that cannot be finished. It works again when there is room."""
    mounted(tmp_path, f"size={5 * BLOB // 2}")
    c = cluster(model="slow", prefill=0, decode=1, role="both", pool=pages(1024),
                node_args=tiers(str(12 * BLOB), tmp_path))
    try:
        c.allow("tier", "disk", "sink")
        chats(c, plain, 6, 2)
        eventually(lambda: c.status("decode-0").tier_write_errors > 0, 30, "writes fail")
        before = at_rest(c)
        assert before.tier_disk_bytes < 5 * BLOB // 2 and before.tier_bad_blocks == 0
        subprocess.run(["mount", "-o", "remount,size=512m", tmp_path], check=True)
        works_again(c, plain, before)
        at_rest(c)
    finally:
        unmounted(tmp_path, c)


def test_TIER_01_disk_turns_read_only(cluster, plain, tmp_path):
    mounted(tmp_path, "size=512m")
    c = cluster(model="slow", prefill=0, decode=1, role="both", pool=pages(1024),
                node_args=tiers(str(12 * BLOB), tmp_path))
    try:
        c.allow("tier", "disk", "sink")
        chats(c, plain, 5, 1)
        settle_disk(c, 1)
        subprocess.run(["mount", "-o", "remount,ro", tmp_path], check=True)
        chats(c, plain, 5, 2)
        eventually(lambda: c.status("decode-0").tier_write_errors > 0, 30, "writes fail")
        before = at_rest(c)
        only_whole_files(tmp_path)
        subprocess.run(["mount", "-o", "remount,rw", tmp_path], check=True)
        works_again(c, plain, before)
        at_rest(c)
        assert c.status("decode-0").tier_bad_blocks == 0
    finally:
        unmounted(tmp_path, c)


@pytest.mark.sanitize
def test_preempted_requests_come_back(cluster, plain):
    """More answers than the pool has room for: some give way, are swapped, and go on, same tokens."""
    n, many, room = (60, 6, 1024) if SANITIZED else (200, 10, 2048)
    c = cluster(model="slow", prefill=0, decode=1, role="both", pool=pages(room), node_args=tiers("256M"))
    prompts = [ids(50 + k, 150 + 11 * k) for k in range(many)]
    got = [None] * len(prompts)

    def work(k):
        got[k] = ask(c, prompts[k], n=n)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(len(prompts))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for k, p in enumerate(prompts):
        assert got[k] and list(got[k].tokens) == plain(p, n=n)
    s = at_rest(c)
    assert s.preemptions > 0 and s.swapped > 0 and s.resumed > 0


def test_SCHED_03_lengths_through_tiers(cluster, plain):
    """Around whole blocks, three times, pushed out of the pools in between; P, D and alone."""
    c = cluster(model="slow", prefill=1, decode=1, pool=pages(768), node_args=tiers("256M"))
    for path in (DIRECT, LOCAL):
        for n in (BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 3 * BLOCK - 1, 3 * BLOCK, 3 * BLOCK + 1):
            for time in range(3):
                prompt = ids(n, n)
                a = ask(c, prompt, path, n=4)
                assert list(a.tokens) == plain(prompt, n=4)
                if time or path == LOCAL:
                    assert a.usage.cached_tokens == (n - 1) // BLOCK * BLOCK
                else:
                    assert a.usage.cached_tokens == 0
                if time < 2:
                    flood = ids(7000 + time, 600)
                    assert list(ask(c, flood, path, n=4).tokens) == plain(flood, n=4)
    at_rest(c)
    at_rest(c, "prefill-0")


def test_answers_of_other_tenants_are_strangers(cluster, plain):
    c = cluster(model="slow", prefill=0, decode=1, role="both", pool=pages(768), node_args=tiers("256M"))
    prompt, flood = ids(1, 500), ids(2, 700)
    for time in range(2):
        for salt in ("", "a", "b"):
            a = ask(c, prompt, cache_salt=salt)
            assert list(a.tokens) == plain(prompt)
            assert a.usage.cached_tokens == (3 * BLOCK if time else 0)
            ask(c, flood)
    e = c.client.error(ids=prompt, max_tokens=2, cache_salt="x" * 257)
    assert e.code() == grpc.StatusCode.INVALID_ARGUMENT and "257" in e.details()


def test_TIER_06_aborts_leave_no_pin(cluster, plain):
    """Blocks that lie in the pool and in host memory, requests that end right after the look-up."""
    c = cluster(model="slow", prefill=1, decode=1, pool=pages(1024),
                node_args=tiers(str(64 * BLOB)))
    prompts = [ids(300 + k, 300 + 20 * k) for k in range(8)]
    rng = random.Random(4)
    for p in prompts:
        ask(c, p, DIRECT, n=2)
    for _ in range(100):
        p = rng.choice(prompts)
        call = c.client.stream(request(ids=p, max_tokens=50, ignore_eos=True, path=rng.choice((DIRECT, LOCAL))))
        if rng.random() < 0.7:
            threading.Event().wait(rng.random() * 0.02)
            call.cancel()
        else:
            next(iter(call))
            call.cancel()
    for name in ("decode-0", "prefill-0"):
        at_rest(c, name)
    before = c.status("decode-0").tokens_cached
    for p in prompts:
        assert list(ask(c, p, LOCAL).tokens) == plain(p)
    assert c.status("decode-0").tokens_cached > before


def test_rounds_of_aborts_evictions_restarts(cluster, plain, tmp_path):
    """No page and no pin is lost, no token is wrong, whatever comes between."""
    c = cluster(model="slow", prefill=1, decode=1, pool=pages(1280),
                prefill_args=tiers(str(16 * BLOB), tmp_path / "p"),
                decode_args=tiers(str(16 * BLOB), tmp_path / "d"), router_args=["--route.retries=20"])
    c.allow("event=session", "event=retry", "peer", "lost", "handoff", "cancel", "event=node")
    heads = [ids(900 + k, 2 * BLOCK + 30 * k) for k in range(4)]
    rng = random.Random(9)

    def one(k):
        prompt = rng.choice(heads)[:rng.randrange(60, 400)] + ids(k % 7, rng.randrange(1, 60))
        n = rng.randrange(2, 40)
        path, abort = rng.choice((AUTO, DIRECT, LOCAL)), rng.random() < 0.3

        def run():
            if not abort:
                assert list(ask(c, prompt, path, n=n).tokens) == plain(prompt, n=n)
                return
            call = c.client.stream(request(ids=prompt, max_tokens=n, ignore_eos=True, path=path))
            threading.Event().wait(rng.random() * 0.1)
            call.cancel()
        return run

    for r in range(ROUNDS):
        failed = []

        def guarded(run):
            try:
                run()
            except BaseException as e:  # told on the main thread
                failed.append(e)

        threads = [threading.Thread(target=guarded, args=(one(r * 8 + k),)) for k in range(rng.randrange(1, 6))]
        for t in threads:
            t.start()
        if r % 25 == 12:
            name = rng.choice(("decode-0", "prefill-0"))
            c.procs[name].kill()
            c.restart(name)
        for t in threads:
            t.join()
        assert not failed, failed
    for name in ("decode-0", "prefill-0"):
        eventually(lambda name=name: name in c.ready_nodes(), 20, "node ready")
        at_rest(c, name)


def test_answers_are_found_on_the_other_node(cluster, plain):
    """A chat through P and D: the next turn's prefill node brings the answer's blocks from the decode
    node, and what it computed itself is not sent to D again."""
    c = cluster(model="slow", prefill=1, decode=1, node_args=[*tiers("256M"), "--store.enabled=on"])
    prompt, known = ids(77, 3 * BLOCK), 0
    for turn in range(4):
        want = known // BLOCK * BLOCK

        def found():
            return c.status("decode-0").tier_host_bytes >= want // BLOCK * BLOB
        eventually(found, what="answers kept")
        before = c.status("prefill-0").tokens_computed
        a = ask(c, prompt, DIRECT, n=2 * BLOCK)
        assert list(a.tokens) == plain(prompt, n=2 * BLOCK)
        if turn:
            assert a.usage.cached_tokens == want
            # Twice where a step did not wait any longer for the blocks that it was computed behind.
            rest = len(prompt) - want
            assert c.status("prefill-0").tokens_computed - before in (rest, 2 * rest)
        known = len(prompt) + 2 * BLOCK - 1
        prompt = prompt + list(a.tokens) + ids(turn, 20)
    s = at_rest(c, "prefill-0")
    assert s.tokens_cached_store >= 3 * BLOCK
    at_rest(c)


def test_a_node_that_dies_takes_its_blocks_along(cluster, plain):
    """What others had is brought while they live; when they die in between it is computed."""
    c = cluster(model="slow", prefill=0, decode=3, role="both",
                node_args=[*tiers("256M"), "--store.enabled=on"])
    c.allow("event=session", "event=retry", "peer", "lost", "event=node", "store", "event=link")
    prompt = ids(5, 700)
    for turn in range(9):
        a = ask(c, prompt)
        assert list(a.tokens) == plain(prompt)
        prompt = prompt + list(a.tokens) + ids(60 + turn, 30)
        if turn in (2, 5):
            name = f"decode-{turn // 3}"
            c.procs[name].kill()
            eventually(lambda: name not in c.ready_nodes(), 20, "node gone")
