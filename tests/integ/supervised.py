"""A cluster under a real baton-supervisor: Redis, router, prefill and decode nodes."""
import json
import pathlib
import shutil
import signal
import socket
import subprocess
import tempfile

from cluster import SLOW, clean_env, eventually
from wire import BUILD, Client


class Supervised:
    def __init__(self, model, prefill=1, decode=1, extra=(), pool="64M", supervisor_args=(), wait=True):
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="baton-super."))
        self.run = self.folder / "run"
        self.socket = self.run / "control.sock"
        self.log = self.folder / "supervisor.log"
        self.ready_file = self.folder / "supervisor.ready"
        common = [f"--model={model}", "--redis.address=unix:{run}/redis.sock", "--cluster.poll=100ms",
                  "--cluster.lease=3s", "--name={name}", "--ready_file={run}/{name}.ready"]
        node = [*common, "--heartbeat=100ms", f"--engine.pool_bytes={pool}", "--engine.threads=1"]
        ready = "{run}/{name}.ready"
        self.roles = [
            {"name": "redis", "single": True, "ready": "{run}/redis.sock",
             "command": ["redis-server", "--port", "0", "--unixsocket", "{run}/redis.sock", "--save", "",
                         "--appendonly", "no", "--dir", "{run}"]},
            {"name": "prefill", "replicas": prefill, "ready": ready, "command": [str(BUILD / "baton-prefill"), *node]},
            {"name": "decode", "replicas": decode, "ready": ready, "command": [str(BUILD / "baton-decode"), *node]},
            {"name": "router", "single": True, "ready": ready,
             "command": [str(BUILD / "baton-router"), *common, "--listen=127.0.0.1:0"]},
            *extra]
        self.args = list(supervisor_args)
        self.client, self.p = None, None
        try:
            self.start(wait)
        except BaseException:
            self.finish(check=False)
            raise

    def start(self, wait=True):
        config = self.folder / "roles.json"
        config.write_text(json.dumps({"roles": self.roles}))
        with open(self.log, "ab") as log:
            self.p = subprocess.Popen([str(BUILD / "baton-supervisor"), f"--roles={config}", f"--run={self.run}",
                                       f"--ready_file={self.ready_file}", *self.args], stdin=subprocess.DEVNULL,
                                      stdout=log, stderr=log, env=clean_env())
        if wait:
            def look():
                assert self.p.poll() is None, self.log.read_text()[-2000:]
                return self.ready_file.exists() and f"pid={self.p.pid}" in self.ready_file.read_text()
            eventually(look, 60, "supervisor ready")
            self.reconnect()

    def reconnect(self):
        if self.client:
            self.client.close()
        self.client = Client(self.router)

    @property
    def router(self):
        text = (self.run / "router.ready").read_text()
        return dict(line.split("=", 1) for line in text.split())["listen"]

    def ask(self, **m):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as s:
            s.settimeout(20 * SLOW)
            s.connect(str(self.socket))
            s.send(json.dumps(m).encode())
            return json.loads(s.recv(1 << 17))

    def processes(self):
        return {p["name"]: p for r in self.ask(op="status")["roles"] for p in r["processes"]}

    def role(self, name):
        return next((r for r in self.ask(op="status")["roles"] if r["name"] == name), None)

    def ready_nodes(self):
        return sorted(n.name for n in self.client.server().nodes if n.state == "ready")

    def ctl(self, *args, **kw):
        return subprocess.run([str(BUILD / "batonctl"), *args, "--supervisor", str(self.socket)],
                              capture_output=True, text=True, timeout=120, **kw)

    def events(self):
        return self.log.read_text()

    def finish(self, check=True):
        pids = []
        try:
            if self.client:
                self.client.close()
            if self.p and self.p.poll() is None:
                pids = [p["pid"] for p in self.processes().values() if p["pid"]] if check else []
                self.p.send_signal(signal.SIGTERM)
                code = self.p.wait(60 * SLOW)
                assert not check or code == 0, self.events()[-3000:]
            for pid in pids:
                assert not pathlib.Path(f"/proc/{pid}").exists() or \
                    "Z" in pathlib.Path(f"/proc/{pid}/stat").read_text().split(")")[1][:3], f"{pid} is left"
        finally:
            if self.p and self.p.poll() is None:
                self.p.kill()
                self.p.wait()
            shutil.rmtree(self.folder, ignore_errors=True)
