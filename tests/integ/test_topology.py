"""Topology invariance: the ids of a request do not depend on where and with whom it runs.

The reference is one colocated process, one thread, one request at a time, nothing reused. Every other
arrangement must give the same ids bit for bit, greedy and seeded, also where a prompt comes again and
lies in the pool already.
"""
import random
import threading

import pytest

from cluster import Cluster
from wire import AUTO, DIRECT, LOCAL, STORE

N_TOKENS = 24
# One token; page size (16) and identity block (128) -1, 0, +1; several thousand.
LENGTHS = [1, 15, 16, 17, 127, 128, 129, 600, 3500]
SAMPLINGS = {"greedy": {}, "seeded": dict(temperature=0.9, top_p=0.95, top_k=100, seed=1234),
             "penalties": dict(temperature=0.7, seed=5, repetition_penalty=1.2, presence_penalty=0.5,
                               frequency_penalty=0.25, min_p=0.01)}


def prompt(n):
    rng = random.Random(n)
    return [rng.randrange(3, 512) for _ in range(n)]


def cases():
    for n in LENGTHS:
        for name in SAMPLINGS:
            if n > 200 and name == "penalties":
                continue
            yield n, name


def run(c, n, sampling, path):
    kw = SAMPLINGS[sampling]
    a = c.client.generate(ids=prompt(n), max_tokens=N_TOKENS, ignore_eos=True, path=path, timeout=120, **kw)
    assert len(a.tokens) == N_TOKENS
    return a


@pytest.fixture(scope="module")
def reference(models):
    c = Cluster(models("tiny"), prefill=0, decode=1, role="both", node_args=["--engine.prefix_cache=off"])
    out = {case: run(c, *case, AUTO).tokens for case in cases()}
    assert len({tuple(t) for t in out.values()}) > len(out) // 2  # the prompts do matter
    c.finish()
    return out


def check_alone(c, reference, path):
    for case in cases():
        a = run(c, *case, path)
        assert a.tokens == reference[case], case
        assert a.timing.path == (LOCAL if path == AUTO else path)
        assert a.timing.retries == 0


def check_eight_at_once(c, reference, path):
    mixed = [(3500, "greedy"), (1, "seeded"), (129, "greedy"), (600, "seeded"), (16, "penalties"),
             (128, "greedy"), (17, "seeded"), (127, "penalties")]
    got, barrier = {}, threading.Barrier(len(mixed))

    def work(case):
        barrier.wait()
        try:
            got[case] = run(c, *case, path).tokens
        except Exception as e:
            got[case] = e

    threads = [threading.Thread(target=work, args=(case,)) for case in mixed]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for case in mixed:
        assert got[case] == reference[case], (case, got[case])


ARRANGEMENTS = {
    "split": dict(),
    "split-tcp": dict(node_args=["--net.transports=tcp"]),
    "split-chunks-of-64": dict(node_args=["--engine.max_batch_tokens=64"]),
    "split-chunks-of-7": dict(prefill_args=["--engine.max_batch_tokens=7"]),
    "split-two-threads": dict(threads=2),
    "split-pages-of-32-and-8": dict(prefill_args=["--engine.page_tokens=32"],
                                    decode_args=["--engine.page_tokens=8"]),
    "split-blocks-of-64": dict(node_args=["--engine.block_tokens=64"]),
    "split-without-reuse": dict(node_args=["--engine.prefix_cache=off"]),
}


@pytest.mark.parametrize("name", ARRANGEMENTS)
def test_split(cluster, reference, name):
    c = cluster(**ARRANGEMENTS[name])
    check_alone(c, reference, DIRECT)
    check_eight_at_once(c, reference, DIRECT)
    assert c.status("decode-0").handoff_bytes > 0
    assert (c.status("prefill-0").tokens_cached > 0) == (name != "split-without-reuse")


STORES = {
    "store": dict(),
    "store-tcp": dict(node_args=["--net.transports=tcp"], kvstore_args=["--net.transports=tcp"]),
    "store-pages-of-32-and-8": dict(prefill_args=["--engine.page_tokens=32"],
                                    decode_args=["--engine.page_tokens=8"]),
    "store-without-reuse": dict(node_args=["--engine.prefix_cache=off"]),
}


@pytest.mark.parametrize("name", STORES)
def test_through_the_store(cluster, reference, name):
    """The same ids, and prefill and decode node have one connection each: to the daemon."""
    c = cluster(kvstore=1, **STORES[name])
    check_alone(c, reference, STORE)
    check_eight_at_once(c, reference, STORE)
    assert c.status("prefill-0").handoff_connections == c.status("decode-0").handoff_connections == 1
    s = c.status("store-0")
    assert s.handoff_connections == 2 and s.relay_failed == s.relay_refused == 0 and s.relayed > 0


@pytest.mark.parametrize("args", [dict(), dict(threads=2, node_args=["--engine.max_batch_tokens=33"])],
                         ids=["as-reference", "two-threads-chunks-of-33"])
def test_colocated(cluster, reference, args):
    c = cluster(prefill=0, decode=1, role="both", **args)
    check_alone(c, reference, AUTO)
    check_eight_at_once(c, reference, AUTO)


def test_decode_node_alone(cluster, reference):
    c = cluster()
    check_eight_at_once(c, reference, LOCAL)


def test_short_of_pages(cluster, reference):
    """Requests give way to each other and are computed again: no bit changes."""
    page = 3 * 2 * 2 * 16 * 16 * 2  # layers, K and V, heads, dim, tokens, bytes
    c = cluster(pool=str(page * 270))
    assert c.status("decode-0").pages_total == 270
    check_eight_at_once(c, reference, DIRECT)
    check_eight_at_once(c, reference, LOCAL)


def test_two_of_each(cluster, reference):
    c = cluster(prefill=2, decode=2)
    for _ in range(2):
        check_eight_at_once(c, reference, DIRECT)
    assert all(c.status(f"{k}-{i}").steps > 0 for k in ("prefill", "decode") for i in range(2))


def test_resumed_in_the_middle(cluster, reference):
    """A new attempt behind what was answered gives the rest: ids do not depend on the cut."""
    c = cluster(decode=2)
    c.allow("from=ready to=lost")
    call = threading.Event()
    case = (600, "seeded")
    kw = SAMPLINGS["seeded"]
    long = c.client.generate(ids=prompt(600), max_tokens=1500, ignore_eos=True, timeout=120, **kw).tokens
    assert long[:N_TOKENS] == reference[case]
    got = []

    def work():
        from wire import Answer, request
        a = Answer()
        for m in c.client.stream(request(ids=prompt(600), max_tokens=1500, ignore_eos=True, **kw), timeout=120):
            a.add(m)
            if len(a.tokens) > 100:
                call.set()
        got.append(a)

    t = threading.Thread(target=work)
    t.start()
    assert call.wait(60)
    busy = [n for n in ("decode-0", "decode-1") if c.status(n).requests_running][0]
    c.procs[busy].kill()
    t.join()
    assert got[0].tokens == long
    assert got[0].timing.retries >= 1
