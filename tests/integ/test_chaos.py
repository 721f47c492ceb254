"""Everything at once: chats over every path with tiers, a keeper, daemons and Redis, while processes are
killed, stopped for a while or asked to end at random, Redis is emptied, full or a replica for a while, and
files of the disk tiers are damaged. Every answer that comes equals that of a node without a cache, errors are
few and clear, and in the end nothing is held by anybody."""
import os
import random
import signal
import subprocess
import threading
import time

import grpc

from cluster import SANITIZED, Cluster, eventually
from wire import AUTO, DIRECT, LOCAL, STORE, Answer, request

PAGE = 3 * 2 * 2 * 16 * 16 * 2  # layers, K and V, heads, dim, tokens, bytes of the model "tiny"
BLOB = 8 * PAGE
LONG = os.environ.get("BATON_TEST_LONG", "") not in ("", "0")
EVENTS = 1000 if LONG else 6 if SANITIZED else 20


def ids(seed, n):
    rng = random.Random(seed)
    return [rng.randrange(3, 500) for _ in range(n)]


class Chats:
    """Threads that chat until told to stop; each checks what it gets."""

    def __init__(self, c, plain, n):
        self.c, self.plain, self.known, self.lock = c, plain, {}, threading.Lock()
        self.stop, self.wrong, self.errors, self.good = threading.Event(), [], {}, 0
        self.threads = [threading.Thread(target=self.run, args=(k,)) for k in range(n)]
        for t in self.threads:
            t.start()

    def want(self, prompt, n):
        with self.lock:
            if tuple(prompt) not in self.known:
                self.known[tuple(prompt)] = list(self.plain.client.generate(
                    ids=prompt, max_tokens=20, ignore_eos=True, timeout=120).tokens)
            return self.known[tuple(prompt)][:n]

    def one(self, prompt, rng):
        """An answer, cut off now and then; None if there was an error."""
        n, cut, a = rng.choice([4, 12, 20]), rng.random() < 0.1, Answer()
        call = self.c.client.stream(request(ids=prompt, max_tokens=n, ignore_eos=True,
                                            path=rng.choice([AUTO, AUTO, LOCAL, DIRECT, STORE])), timeout=60)
        try:
            for m in call:
                a.add(m)
                if cut and len(a.tokens) > 2:
                    call.cancel()
                    break
        except grpc.RpcError as e:
            text = f"{e.code().name} {e.details()}"
            self.errors[text] = self.errors.get(text, 0) + 1
            time.sleep(0.05)
            return None
        want = self.want(prompt, n)
        if list(a.tokens) != (want[:len(a.tokens)] if cut else want):
            self.wrong.append((len(prompt), a.tokens, want, a.timing))
        self.good += 1
        return None if cut else list(a.tokens)

    def run(self, k):
        rng, chat = random.Random(k), 0
        while not self.stop.is_set():
            chat += 1
            prompt = ids(k * 7919 + chat % 6, 200 + 37 * (chat % 6))
            for turn in range(4):
                got = None if self.stop.is_set() else self.one(prompt, rng)
                if got is None:
                    break
                prompt = prompt + got + ids(turn + k * 10, 41)

    def end(self):
        self.stop.set()
        for t in self.threads:
            t.join()


def redis_cli(c, *args):
    def said():  # it may have been started a moment ago
        return subprocess.run(["redis-cli", "-s", str(c.folder / "redis.sock"), *args], capture_output=True, timeout=20,
                              check=False).returncode == 0
    eventually(said, 20, "an answer of Redis")


def make_redis_ill(c, rng):
    ill, well = rng.choice([(("config", "set", "maxmemory", "1"), ("config", "set", "maxmemory", "0")),
                            (("replicaof", "127.0.0.1", "1"), ("replicaof", "no", "one")),
                            (("flushall",), ("ping",))])
    redis_cli(c, *ill)
    time.sleep(rng.choice([0.1, 1, 4]))  # the last is longer than a lease
    redis_cli(c, *well)


def damage_files(folder, rng):
    """Some blocks of every disk tier: a byte flipped, cut, emptied or gone."""
    for f in sorted(folder.rglob("*.kv")):
        if rng.random() > 0.3:
            continue
        try:
            size = f.stat().st_size
            how = rng.choice(["flip", "cut", "empty", "gone"])
            if how == "flip":
                with open(f, "r+b") as file:
                    at = rng.randrange(size)
                    file.seek(at)
                    byte = file.read(1)
                    file.seek(at)
                    file.write(bytes([byte[0] ^ 1]))
            elif how == "gone":
                f.unlink()
            else:
                os.truncate(f, 0 if how == "empty" else size // 2)
        except (FileNotFoundError, ValueError, IndexError):  # it has gone, or is damaged already
            pass


def hurt(c, name, how, rng):
    p = c.redis if name == "redis" else c.procs[name]
    if how == "stop":
        p.signal(signal.SIGSTOP)
        time.sleep(rng.choice([0.1, 0.5, 2]))
        p.signal(signal.SIGCONT)
        return
    if how == "end" and name != "redis":
        assert p.stop() == 0, f"{name} ends badly"
    else:
        p.kill()  # Redis comes back empty
        time.sleep(rng.uniform(0, 0.5))
    p.start()
    if name != "redis":
        p.wait_ready()


def test_everything_at_once(cluster, models, tmp_path):
    rng = random.Random(int(os.environ.get("BATON_TEST_SEED", "7")))
    sharing = ["--store.enabled=on", "--engine.bring=always", f"--tier.host_bytes={40 * BLOB}",
               "--tier.disk_write_rate=0"]
    plain = Cluster(models("tiny"), prefill=0, decode=1, role="both", pool="256M",
                    node_args=["--engine.prefix_cache=off"])
    c = cluster(prefill=0, decode=0, keeper=True, wait=False, pool=str(256 * PAGE))
    c.allow("level=(warn|error)")
    for kind in ("prefill", "decode"):
        for i in range(2):
            c.add_node(kind, f"{kind}-{i}", [*sharing, f"--tier.disk_path={tmp_path}/{kind}-{i}"])
    for i in range(2):
        c.add_store(f"store-{i}", [f"--tier.host_bytes={60 * BLOB}", f"--tier.disk_path={tmp_path}/store-{i}",
                                   "--relay.bytes=8M"])
    names = c.node_names()
    for n in names:
        c.procs[n].wait_ready()
    eventually(lambda: len(c.ready_nodes()) == 6, 30, "all ready")
    chats = Chats(c, plain, 4)
    try:
        for _ in range(EVENTS):
            time.sleep(rng.uniform(0.2, 1))
            what = rng.choice([*names, "keeper", "redis", "redis is ill", "files"])
            if what == "redis is ill":
                make_redis_ill(c, rng)
            elif what == "files":
                damage_files(tmp_path, rng)
            else:
                hurt(c, what, rng.choice(["kill", "stop", "end"]), rng)
    finally:
        chats.end()
    print(f"\n{EVENTS} rounds, {chats.good} answers, {len(chats.wrong)} wrong, errors: {chats.errors}")
    plain.allow("level=(warn|error)")  # a machine that is busy for long: who is right is asked, not how fast
    plain.finish()
    assert not chats.wrong, chats.wrong[:3]
    assert chats.good > 5 * EVENTS and sum(chats.errors.values()) < chats.good / 10, chats.errors
    eventually(lambda: len(c.ready_nodes()) == 6, 30, "all ready again")
    c.pages_back(timeout=60)  # a prompt that nobody fetched from a daemon is kept for a lease, 30 s
    for n in names:
        eventually(lambda n=n: c.status(n).tier_pins == 0, 10, "nothing pinned")
        assert c.procs[n].p.poll() is None
