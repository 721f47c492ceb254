"""Prefill and decode on two hosts: network namespaces joined by a cable, nothing shared but TCP."""
import os
import shutil
import subprocess

import pytest

from cluster import Proc, eventually
from wire import BUILD, DIRECT, Client

HOST_A, HOST_B = "10.91.0.1", "10.91.0.2"


def ip(*args):
    return subprocess.run(["ip", *args], capture_output=True, text=True)


@pytest.fixture
def hosts():
    """Two namespaces with addresses HOST_A and HOST_B."""
    if not shutil.which("ip"):
        pytest.skip("no ip (package iproute2)")
    a, b = f"baton-a{os.getpid()}", f"baton-b{os.getpid()}"
    made = ip("netns", "add", a)
    if made.returncode == 0:
        made = ip("netns", "exec", a, "true")  # needs mounts of its own, which a plain chroot denies
    if made.returncode != 0:
        ip("netns", "del", a)
        pytest.skip(f"no network namespaces here: {made.stderr.strip()}")
    try:
        for args in (["netns", "add", b],
                     ["-n", a, "link", "add", "cable0", "type", "veth", "peer", "name", "cable1"],
                     ["-n", a, "link", "set", "cable1", "netns", b],
                     ["-n", a, "addr", "add", f"{HOST_A}/24", "dev", "cable0"],
                     ["-n", b, "addr", "add", f"{HOST_B}/24", "dev", "cable1"],
                     ["-n", a, "link", "set", "lo", "up"], ["-n", b, "link", "set", "lo", "up"],
                     ["-n", a, "link", "set", "cable0", "up"], ["-n", b, "link", "set", "cable1", "up"]):
            done = ip(*args)
            assert done.returncode == 0, (args, done.stderr)
        yield a, b
    finally:
        ip("netns", "del", a)
        ip("netns", "del", b)


def test_prefill_and_decode_on_two_hosts(hosts, models, cluster, tmp_path):
    a, b = hosts
    model = models("tiny")
    prompts = [[3 + i % 500 for i in range(n)] for n in (1, 40, 700)]
    ask = dict(max_tokens=12, ignore_eos=True, temperature=0.8, seed=3)
    one = cluster(prefill=0, decode=1, role="both")
    want = [one.client.generate(ids=p, **ask).tokens for p in prompts]

    def start(host, name, binary, *args):
        procs.append(Proc(name, ["ip", "netns", "exec", host, binary, *args], tmp_path))
        return procs[-1]

    def baton(host, name, binary, *args):
        return start(host, name, str(BUILD / binary), f"--model={model}", f"--name={name}",
                     "--allow_insecure=true", "--security.allow_anonymous=on",
                     f"--redis.address={HOST_A}:6390", "--cluster.poll=100ms",
                     f"--ready_file={tmp_path}/{name}.ready", *args)

    procs = []
    node = ["--engine.pool_bytes=64M", "--engine.threads=1"]
    try:
        redis = start(a, "redis", "redis-server", "--port", "6390", "--bind", HOST_A, "--protected-mode",
                      "no", "--save", "", "--dir", str(tmp_path))
        baton(a, "p0", "baton-prefill", f"--listen={HOST_A}:0", f"--net.listen={HOST_A}:0", *node).wait_ready()
        baton(b, "d0", "baton-decode", f"--listen={HOST_B}:0", f"--net.listen={HOST_B}:0", *node).wait_ready()
        # The router's door is a unix socket, since this process is on neither host.
        baton(a, "router", "baton-router", f"--listen=unix:{tmp_path}/router.sock").wait_ready()
        client = Client(f"unix:{tmp_path}/router.sock")
        eventually(lambda: len([n for n in client.server().nodes if n.state == "ready"]) == 2, 20,
                   "both nodes ready")
        for p, ids in zip(prompts, want):
            answer = client.generate(ids=p, path=DIRECT, **ask)
            assert answer.tokens == ids
            assert (answer.timing.prefill_node, answer.timing.decode_node) == ("p0", "d0")
        client.close()
        redis.killed = True
        for p in reversed(procs[1:]):
            assert p.stop() == 0, p.log.read_text()[-2000:]
    finally:
        for p in procs:
            p.kill()
