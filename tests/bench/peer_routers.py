"""Other routers beside ours in the benchmark `front`: vllm-router and sglang-router, from packages in an
environment of their own (bench_front.sh makes it). They speak HTTP to their workers, so the node
behind them is front_worker. Each gets one core and as many threads as it makes for one."""
import json
import os
import pathlib
import subprocess
import tempfile
import time
import urllib.request

from ports import free_ports

PEERS = {"vllm-router": "vllm_router.launch_router", "sglang-router": "sglang_router.launch_router"}


def version(python, name):
    code = f"import importlib.metadata as m; print(m.version('{name}'))"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


class Peer:
    """One router with one worker behind it; `address` answers when the constructor returns."""

    def __init__(self, python, name, worker, cores):
        self.log = tempfile.TemporaryFile()
        self.address = f"127.0.0.1:{free_ports(1)[0]}"
        cmd = [python, "-m", PEERS[name], "--worker-urls", f"http://{worker}", "--host", "127.0.0.1",
               "--port", self.address.rsplit(":", 1)[1], "--policy", "round_robin", "--log-level", "error",
               "--max-concurrent-requests", "16384", "--prometheus-port", str(free_ports(1)[0])]
        self.p = subprocess.Popen(cmd, stdout=self.log, stderr=self.log, start_new_session=True,
                                  preexec_fn=lambda: os.sched_setaffinity(0, cores))
        end = time.monotonic() + 60
        while not self.answers():
            if self.p.poll() is not None or time.monotonic() > end:
                self.stop()
                self.log.seek(0)
                raise SystemExit(f"{name} does not serve: {self.log.read()[-2000:].decode(errors='replace')}")
            time.sleep(0.2)

    def answers(self):
        body = json.dumps({"model": "simulated", "prompt": "a", "max_tokens": 1, "stream": True}).encode()
        ask = urllib.request.Request(f"http://{self.address}/v1/completions", body,
                                     {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(ask, timeout=5) as r:
                return b"[DONE]" in r.read()
        except OSError:
            return False

    def pids(self):
        """Of the router and what it has started: they share its session."""
        found = []
        for d in pathlib.Path("/proc").iterdir():
            try:
                if d.name.isdigit() and os.getsid(int(d.name)) == self.p.pid:
                    found.append(int(d.name))
            except ProcessLookupError:
                pass
        return found

    def stop(self):
        for pid in self.pids():
            try:
                os.kill(pid, 9)
            except ProcessLookupError:
                pass
        self.p.wait()
