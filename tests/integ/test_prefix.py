"""Prefix reuse with real processes: chats whose turns begin like earlier ones.

Every answer equals that of a node with the cache off; usage.cached_tokens and the nodes' counters say
what was not computed again.
"""
import random
import threading

import pytest

from cluster import HEAD_DIM, Cluster, eventually
from wire import AUTO, DIRECT, LOCAL

BLOCK = 128
TURNS, N_TOKENS = 4, 60


@pytest.fixture(scope="module")
def plain(models):
    """One node, one request at a time, no reuse."""
    c = Cluster(models("tiny"), prefill=0, decode=1, role="both", node_args=["--engine.prefix_cache=off"])
    yield c
    assert c.status("decode-0").tokens_cached == 0
    c.finish()


def ids(seed, n):
    rng = random.Random(seed)
    return [rng.randrange(3, 512) for _ in range(n)]


def ask(c, prompt, path, **kw):
    return c.client.generate(ids=prompt, max_tokens=N_TOKENS, ignore_eos=True, path=path, timeout=120, **kw)


def chat(c, number, path, first=100, **kw):
    """(prompt, answer) of each turn: the prompt is the last prompt, its answer and a new question."""
    prompt, turns = ids(number, first), []
    for turn in range(TURNS):
        a = ask(c, prompt, path, **kw)
        turns.append((prompt, a))
        prompt = prompt + list(a.tokens) + ids(number * 100 + turn, 50)
    return turns


def known(turns, turn, answers=True):
    """Tokens of a turn's prompt whose KV was computed before: all of the turn before it but the last."""
    if turn == 0:
        return 0
    prompt = turns[turn - 1][0]
    return len(prompt) + N_TOKENS - 1 if answers else len(prompt)


@pytest.mark.parametrize("sampling", [{}, dict(temperature=0.8, seed=7, repetition_penalty=1.1)],
                         ids=["greedy", "seeded"])
def test_turns_on_one_node(cluster, plain, sampling):
    c = cluster(prefill=0, decode=1, role="both")
    before = c.status("decode-0").tokens_computed
    turns = chat(c, 1, AUTO, **sampling)
    total = 0
    for turn, (prompt, a) in enumerate(turns):
        cached = known(turns, turn) // BLOCK * BLOCK
        assert a.usage.cached_tokens == cached
        assert a.tokens == ask(plain, prompt, AUTO, **sampling).tokens
        total += len(prompt) - cached + N_TOKENS - 1
    assert turns[-1][1].usage.cached_tokens > 0
    s = c.status("decode-0")
    assert s.tokens_computed - before == total  # the new part and nothing else
    assert s.tokens_cached == sum(a.usage.cached_tokens for _, a in turns)
    c.pages_back()
    s = c.status("decode-0")
    assert 0 < s.pages_cached < s.pages_total and s.pages_free == s.pages_total


def test_turns_through_both_nodes(cluster, plain):
    """The prefill node has the prompts of earlier turns; what the decode node answered it computes."""
    c = cluster()
    before = c.status("prefill-0").tokens_computed
    turns = chat(c, 2, DIRECT)
    total = 0
    for turn, (prompt, a) in enumerate(turns):
        cached = known(turns, turn, answers=False) // BLOCK * BLOCK
        assert a.usage.cached_tokens == cached
        assert a.tokens == ask(plain, prompt, AUTO).tokens
        total += len(prompt) - cached
    assert turns[-1][1].usage.cached_tokens >= BLOCK
    assert c.status("prefill-0").tokens_computed - before == total
    # The decode node has it all, its own answers included: the next turn can stay there.
    prompt = turns[-1][0] + list(turns[-1][1].tokens) + ids(99, 50)
    a = ask(c, prompt, LOCAL)
    assert a.usage.cached_tokens == (len(turns[-1][0]) + N_TOKENS - 1) // BLOCK * BLOCK
    assert a.tokens == ask(plain, prompt, AUTO).tokens


def test_SCHED_03_whole_blocks_three_times(cluster, plain):
    c = cluster()
    for path in (DIRECT, LOCAL):
        for n in (BLOCK - 1, BLOCK, BLOCK + 1, 4 * BLOCK - 1, 4 * BLOCK, 4 * BLOCK + 1):
            prompt = ids(n, n)
            want = ask(plain, prompt, AUTO).tokens
            for time in range(3):
                a = ask(c, prompt, path)
                assert a.tokens == want
                # The decode node got the prompts of the first path, blocks and all.
                if time or path == LOCAL:
                    assert a.usage.cached_tokens == (n - 1) // BLOCK * BLOCK
                else:
                    assert a.usage.cached_tokens == 0


def test_PFX_03_many_with_one_prefix(cluster, plain):
    c = cluster()
    head = ids(5, 600)
    prompts = [head + ids(1000 + i, 1 + i) for i in range(64)]
    want = [ask(plain, p, AUTO).tokens for p in prompts]
    for path in (DIRECT, LOCAL):
        got, barrier = [None] * len(prompts), threading.Barrier(len(prompts))

        def work(i):
            barrier.wait()
            got[i] = ask(c, prompts[i], path)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(len(prompts))]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert [list(a.tokens) for a in got] == [list(w) for w in want]
        assert sum(a.usage.cached_tokens > 0 for a in got) > 40


def test_short_of_pages(cluster, plain):
    """Cold prompts push out cached blocks; nothing is refused and no page is lost."""
    page = 3 * 2 * 2 * HEAD_DIM * 16 * 2  # layers, K and V, heads, dim, tokens, bytes
    c = cluster(pool=str(page * 80))
    for path in (DIRECT, LOCAL):
        for seed in [*range(8), *range(8)]:
            prompt = ids(200 + seed, 300 + 40 * seed)
            assert ask(c, prompt, path).tokens == ask(plain, prompt, AUTO).tokens
    eventually(lambda: c.status("decode-0").blocks_evicted > 0 and c.status("prefill-0").blocks_evicted > 0,
               what="evictions")


def test_block_must_be_whole_pages(models, tmp_path):
    import subprocess

    from cluster import clean_env
    from wire import BUILD
    p = subprocess.run([BUILD / "baton-decode", f"--model={models('tiny')}", "--engine.block_tokens=100"],
                       capture_output=True, text=True, env=clean_env(), timeout=60)
    assert p.returncode == 2, p.stderr
    assert "100" in p.stderr and "multiple" in p.stderr
