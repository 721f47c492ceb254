"""Other weights, positions or number formats under the same name: nothing of the old life is a hit."""
import shutil

import pytest

from cluster import eventually
from conftest import make_model
from wire import AUTO

PROMPT = [(i * 7919) % 500 + 3 for i in range(700)]  # 5 blocks and a tail


def ask(c, prompt=PROMPT):
    return c.client.generate(ids=prompt, max_tokens=16, ignore_eos=True, path=AUTO, timeout=60)


def solo(cluster, model, args=()):
    c = cluster(model=str(model), prefill=0, decode=1, role="both", node_args=["--engine.prefix_cache=off", *args])
    return list(ask(c).tokens)


@pytest.mark.parametrize("change", ["weights", "rope", "dtype"])
def test_PFX_04_new_weights_under_the_same_name(cluster, tmp_path, change):
    """Pages that a keeper holds, blocks in a daemon's memory and files on disk are all of the old weights."""
    model = tmp_path / "model.gguf"
    make_model(model, "--seed", "1")
    old = solo(cluster, model)
    c = cluster(model=str(model), prefill=0, decode=1, role="both", keeper=True, kvstore=1,
                node_args=["--store.enabled=on", "--engine.bring=always", "--tier.host_bytes=64M",
                           f"--tier.disk_path={tmp_path}/disk"])
    others = iter(range(3, 500))

    def daemon_is_known():  # what was computed before the node knew it is not put
        ask(c, [next(others)] * 150)
        return c.status("store-0").blocks_announced

    eventually(daemon_is_known, 20, "the node knows the daemon")
    assert list(ask(c).tokens) == old
    assert ask(c).usage.cached_tokens == 640
    eventually(lambda: c.status("store-0").blocks_announced >= 6, 20, "blocks in the daemon")
    for p in ("decode-0", "router"):
        c.procs[p].stop()
    assert len(list((tmp_path / "disk").rglob("*.kv"))) >= 5
    more = {"dtype": ["--engine.kv_dtype=f32"]}.get(change, [])
    if change != "dtype":
        new = make_model(tmp_path / "new.gguf", *{"weights": ("--seed", "2"), "rope": ("--theta", "500000")}[change])
        shutil.move(new, model)
    want = solo(cluster, model, more)
    c.procs["decode-0"].argv += more
    for p in ("decode-0", "router"):
        c.restart(p)
    c.client = c.client_of("router")
    eventually(lambda: "decode-0" in c.ready_nodes(), 20, "router knows")
    c.allow("event=keeper", "event=adopt")
    a = ask(c)
    s = c.status("decode-0")
    assert list(a.tokens) == want and (change == "dtype" or want != old)
    assert a.usage.cached_tokens == 0 and s.tokens_cached == 0
    assert s.blocks_adopted == 0 and s.store_loaded == 0
    # The new life has a cache of its own, and what is left of the old one is in nobody's way.
    a = ask(c)
    assert list(a.tokens) == want and a.usage.cached_tokens == 640
