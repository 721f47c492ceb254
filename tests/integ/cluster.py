"""Real processes on free ports: redis-server, router, nodes."""
import os
import pathlib
import re
import shutil
import signal
import subprocess
import tempfile
import time

import grpc

from wire import BUILD, Client

SANITIZED = any(k in os.environ for k in ("ASAN_OPTIONS", "TSAN_OPTIONS"))
# cuda: nodes compute on the card, where answers are compared across batches too.
DEVICE = os.environ.get("BATON_TEST_DEVICE", "cpu")
HEAD_DIM = 16 if DEVICE == "cpu" else 64  # of the tiny model
SLOW = 4 if SANITIZED else 1  # how much longer everything may take
REDIS_PASSWORD = "redis-password-canary"


def clean_env():
    """Without BATON_ names: to our binaries they are configuration."""
    return {k: v for k, v in os.environ.items() if not k.startswith("BATON_")}


def eventually(predicate, timeout=10, what="condition"):
    """Waits until predicate() is true and returns its value."""
    end = time.monotonic() + timeout * SLOW
    last = None
    while True:
        try:
            value = predicate()
            if value:
                return value
            last = value
        except (grpc.RpcError, OSError) as e:
            last = e
        if time.monotonic() > end:
            raise AssertionError(f"{what} did not come true: {last!r}")
        time.sleep(0.02)


class Proc:
    """One process; its stderr goes to a file."""

    def __init__(self, name, argv, folder):
        self.name, self.argv, self.folder = name, argv, folder
        self.log = folder / f"{name}.log"
        self.ready_file = folder / f"{name}.ready"
        self.ready = {}
        self.stopped = False  # for a while, in any of the lives that the log tells of
        self.start()

    def start(self):
        with open(self.log, "ab") as log:
            self.p = subprocess.Popen(self.argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                      env=clean_env())
        self.killed = self.asked = False

    def wait_ready(self):
        def look():
            assert self.p.poll() is None, f"{self.name} ended: {self.log.read_text()[-2000:]}"
            if not self.ready_file.exists():
                return False
            self.ready = dict(line.split("=", 1) for line in self.ready_file.read_text().split())
            return int(self.ready["pid"]) == self.p.pid
        eventually(look, 60, f"{self.name} ready")
        return self

    def signal(self, sig):
        self.asked = self.asked or sig == signal.SIGTERM  # a second one would end it at once
        self.stopped = self.stopped or sig == signal.SIGSTOP
        self.p.send_signal(sig)

    def kill(self):
        self.killed = True
        self.p.kill()
        self.p.wait()

    def stop(self, timeout=40):
        if self.p.poll() is None and not self.asked:
            self.signal(signal.SIGTERM)
        try:
            return self.p.wait(timeout * SLOW)
        except subprocess.TimeoutExpired:
            self.p.kill()
            self.p.wait()
            raise AssertionError(f"{self.name} does not stop: {self.log.read_text()[-3000:]}")

    @property
    def address(self):
        return self.ready["listen"]


class Cluster:
    """Started by the fixture `cluster`; what it asserts at the end is in finish()."""

    def __init__(self, model, prefill=1, decode=1, redis=True, role="decode", router_args=(),
                 node_args=(), prefill_args=(), decode_args=(), seeds=(), wait=True, pool="64M", threads=1,
                 keeper=False, kvstore=0, kvstore_args=(), access=None, redis_acl=None):
        """access: what clients of these tests show, see security.py. redis_acl: rights of the users "node" and "router",
        whose password is in a file; nobody else gets into Redis."""
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="baton-integ."))
        self.model, self.procs, self.allowed, self.clients = model, {}, [], {}
        self.redis, self.pool, self.threads, self.access = None, pool, threads, access
        self.redis_acl = redis_acl or {}
        try:
            self.common = [f"--redis.address={self.start_redis() if redis else ''}"]
            self.seeds = list(seeds)
            self.node_extra = [f"--keeper.socket={self.start_keeper()}"] if keeper else []
            for i in range(prefill):
                self.add_node("prefill", f"prefill-{i}", [*node_args, *prefill_args])
            for i in range(decode):
                self.add_node("decode", f"decode-{i}", [*node_args, *decode_args, f"--role={role}"])
            for i in range(kvstore):
                self.add_store(f"store-{i}", kvstore_args)
            nodes = [self.procs[n] for n in self.node_names()]
            for p in nodes:
                p.wait_ready()
            if not redis:
                self.seeds += [p.address for p in nodes if not p.name.startswith("store")]
            self.add_router("router", router_args).wait_ready()
            self.client = self.client_of("router")
            if kvstore:
                time.sleep(0.3)  # nodes read the membership every 100 ms
            if wait:
                names = {p.name for p in nodes}
                eventually(lambda: names <= set(self.ready_nodes()), 20, "nodes ready")
        except BaseException:
            self.kill_all()
            raise

    def start_redis(self):
        sock, users, more = self.folder / "redis.sock", self.folder / "users.acl", []
        if self.redis_acl:
            lines = ["user default off", "user admin on >admin-password ~* &* +@all"]
            lines += [f"user {name} on >{REDIS_PASSWORD} {rights}" for name, rights in self.redis_acl.items()]
            users.write_text("\n".join(lines) + "\n")
            (self.folder / "redis.password").write_text(REDIS_PASSWORD + "\n")
            more = ["--aclfile", str(users)]
        self.redis = Proc("redis", ["redis-server", "--port", "0", "--unixsocket", str(sock), "--save", "",
                                    "--appendonly", "no", "--dir", str(self.folder), *more], self.folder)
        eventually(sock.exists, 10, "redis socket")
        return f"unix:{sock}"

    def start_keeper(self):
        sock = self.folder / "keeper.sock"
        self.procs["keeper"] = Proc("keeper", [
            str(BUILD / "baton-keeper"), f"--socket={sock}", f"--ready_file={self.folder}/keeper.ready",
            "--die_with_parent=true"], self.folder)
        self.procs["keeper"].wait_ready()
        return sock

    def add(self, binary, name, args, model=True):
        argv = [str(BUILD / binary), *([f"--model={self.model}"] if model else []),
                f"--access_log={self.folder}/{name}.access",
                f"--ready_file={self.folder}/{name}.ready", "--die_with_parent=true", f"--name={name}",
                "--cluster.poll=100ms", "--cluster.lease=3s",
                *self.common, *args]
        if self.redis_acl:
            argv += [f"--redis.user={'router' if binary == 'baton-router' else 'node'}",
                     f"--redis.password_file={self.folder}/redis.password"]
        self.procs[name] = Proc(name, argv, self.folder)
        return self.procs[name]

    def add_node(self, kind, name, args=()):
        return self.add(f"baton-{kind}", name, ["--heartbeat=100ms", f"--engine.pool_bytes={self.pool}",
                                                f"--engine.threads={self.threads}", f"--engine.device={DEVICE}",
                                                "--engine.numerics=invariant", *self.node_extra, *args])

    def add_store(self, name, args=()):
        return self.add("baton-kvstore", name, args, model=False)

    def add_router(self, name, args=()):
        seeds = [f"--cluster.seeds={','.join(self.seeds)}"] if self.seeds else []
        return self.add("baton-router", name, ["--listen=127.0.0.1:0", *seeds, *args])

    def client_of(self, name):
        c = self.clients.get(name)
        if not c:
            c = self.clients[name] = Client(self.procs[name].address, access=self.access)
        return c

    def fresh_client(self, options=()):
        """A client with a connection of its own."""
        return Client(self.procs["router"].address, options, self.access)

    def restart(self, name):
        p = self.procs[name]
        if name in self.clients:
            self.clients.pop(name).close()
        p.start()
        return p.wait_ready()

    def ready_nodes(self):
        return [n.name for n in self.client.server().nodes if n.state == "ready"]

    def state_of(self, name):
        n = self.client.nodes().get(name)
        return n.state if n else None

    def status(self, name):
        return self.client_of(name).status()

    def node_names(self):
        return [n for n, p in self.procs.items() if not n.startswith(("router", "keeper"))]

    def live_nodes(self):
        return [n for n in self.node_names() if self.procs[n].p.poll() is None]

    def pages_back(self, names=None, timeout=15):
        """All pages of these nodes are free and nothing runs."""
        for n in names or self.live_nodes():
            def look(n=n):
                s = self.status(n)
                return (s.pages_free == s.pages_total and s.requests_running == 0 and
                        s.requests_waiting == 0 and s.handoffs_active == 0) or None
            eventually(look, timeout, f"all pages of {n} free")

    def allow(self, *patterns):
        """Warnings and errors that this test provokes."""
        self.allowed += patterns

    def kill_all(self):
        for p in [*self.procs.values(), *([self.redis] if self.redis else [])]:
            if p.p.poll() is None:
                p.signal(signal.SIGCONT)
                p.kill()

    def bad_lines(self):
        for p in self.procs.values():
            for line in p.log.read_text(errors="replace").split("\n"):
                known = re.search(r"level=(warn|error)", line) or "Sanitizer" in line or \
                    "runtime error" in line
                if p.stopped and "event=net_stall" in line:  # it says for how long
                    continue
                if known and not any(re.search(a, line) for a in self.allowed):
                    yield f"{p.name}: {line}"

    def finish(self, failed=False):
        if failed:
            print(self.logs())
            self.kill_all()
            shutil.rmtree(self.folder)
            return
        try:
            self.pages_back()
            for c in self.clients.values():
                c.close()
            order = sorted(self.procs.values(), key=lambda p: p.name.startswith(("router", "keeper")))
            codes = {p.name: p.stop() for p in order if not p.killed}
            assert all(c == 0 for c in codes.values()), codes
            bad = list(self.bad_lines())
            assert not bad, "\n".join(bad)
        except BaseException:
            print(self.logs())
            raise
        finally:
            self.kill_all()
        shutil.rmtree(self.folder)

    def logs(self):
        return "\n".join(f"--- {p.name}\n{p.log.read_text(errors='replace')[-6000:]}"
                         for p in self.procs.values())
