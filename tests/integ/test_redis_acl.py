"""A whole cluster on a real Redis that asks for user and password and gives each the rights that the documentation
lists, no more, over its unix socket."""
import re
import subprocess

import pytest

from cluster import REDIS_PASSWORD, eventually
from test_ctl import ctl
from wire import ROOT, STORE


def rights():
    text = (ROOT / "common/cluster/README.md").read_text()
    node, router = re.search(r"Rights of a node's user: `([^`]*)`; of a router: `([^`]*)`", text).groups()
    node = node.replace("NAME", "default")
    keys = node.split()[0]
    return {"node": f"resetchannels -@all {node}", "router": f"resetchannels -@all {keys} {router}"}


def redis(c, *args, user="admin", password="admin-password"):
    out = subprocess.run(["redis-cli", "-s", str(c.folder / "redis.sock"), "--user", user, "--pass", password,
                          "--no-auth-warning", *args], capture_output=True, text=True, timeout=60)
    return (out.stdout + out.stderr).strip()


@pytest.mark.sanitize
def test_the_whole_cluster_with_users_of_few_rights(cluster):
    c = cluster(kvstore=1, redis_acl=rights(), node_args=["--store.enabled=on"])
    assert c.client.generate("The lamp keeper " * 40, max_tokens=4).tokens  # blocks go to the store
    assert c.client.generate("another prompt " * 40, max_tokens=4, path=STORE).tokens
    eventually(lambda: c.status("store-0").blocks_announced > 0, 15, "blocks in the index")
    at = ["--router", c.procs["router"].address]
    assert ctl("cordon", "decode-0", *at).returncode == 0  # an order is kept in Redis
    assert c.client.nodes()["decode-0"].cordoned
    assert ctl("uncordon", "decode-0", *at).returncode == 0
    c.procs["decode-0"].stop()
    c.restart("decode-0")
    eventually(lambda: c.state_of("decode-0") == "ready", 20, "the next process of its name")
    assert c.client.generate("once more", max_tokens=4).tokens
    keys = redis(c, "keys", "*").split()
    assert keys and all(k.startswith("baton:{default}:") for k in keys), keys
    refused = redis(c, "acl", "log")
    assert refused in ("", "(empty array)"), refused
    assert "WRONGPASS" in redis(c, "ping", user="node", password="wrong")
    assert "NOAUTH" in redis(c, "ping", user="default") or "WRONGPASS" in redis(c, "ping", user="default")
    assert "NOPERM" in redis(c, "config", "get", "*", user="node", password=REDIS_PASSWORD)
    c.allow("event=node .*lost")


def test_a_password_that_is_changed_freezes_the_membership_until_it_is_right_again(cluster):
    c = cluster(redis_acl=rights())
    c.allow("redis_", "index_", "orders")
    for user in ("node", "router"):
        redis(c, "acl", "setuser", user, "resetpass", ">another-password")
        redis(c, "client", "kill", "user", user)
    eventually(lambda: c.client.server().membership == "frozen", 15, "frozen")
    assert c.client.generate("still served", max_tokens=2).tokens
    out = ctl("cordon", "decode-0", "--router", c.procs["router"].address)
    assert out.returncode == 1 and out.stdout == "" and "redis.user or redis.password is wrong" in out.stderr, out
    for user in ("node", "router"):
        redis(c, "acl", "setuser", user, "resetpass", f">{REDIS_PASSWORD}")
    eventually(lambda: c.client.server().membership == "live", 20, "thawed")
    assert c.client.generate("and again", max_tokens=2).tokens
    for p in c.procs.values():
        assert "canary" not in p.log.read_text()
