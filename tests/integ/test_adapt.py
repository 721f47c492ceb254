"""A node that turns slow loses load and gets it back; what routers have measured is in /metrics."""
import collections
import random
import re
import signal
import threading
import time
import urllib.request

from cluster import eventually
from wire import DIRECT

NAMES = ["prefill-0", "prefill-1"]
LAST = 40  # requests whose share counts


class Throttle:
    """The process runs for 20 of 100 ms, as in a container that has used up its share."""

    def __init__(self, proc):
        self.proc, self.end = proc, threading.Event()
        self.thread = threading.Thread(target=self.run)

    def run(self):
        while not self.end.is_set():
            self.proc.signal(signal.SIGSTOP)
            time.sleep(0.08)
            self.proc.signal(signal.SIGCONT)
            time.sleep(0.02)

    def __enter__(self):
        self.thread.start()

    def __exit__(self, *_):
        self.end.set()
        self.thread.join()


class Stream:
    """Clients that ask one cold prompt after the other; which node computed each of the last ones."""

    def __init__(self, c, clients):
        self.c, self.stop, self.errors, self.count = c, threading.Event(), [], 0
        self.last, self.lock = collections.deque(maxlen=LAST), threading.Lock()
        self.threads = [threading.Thread(target=self.ask, args=(k,)) for k in range(clients)]

    def ask(self, k):
        client, rng = self.c.fresh_client(), random.Random(k)
        while not self.stop.is_set():
            prompt = [rng.randrange(3, 512) for _ in range(300)]
            try:
                node = client.generate(ids=prompt, max_tokens=3, ignore_eos=True, path=DIRECT,
                                       timeout=120).timing.prefill_node
            except Exception as e:
                self.errors.append(e)
                return
            with self.lock:
                self.last.append(node)
                self.count += 1
        client.close()

    def share(self, name):
        """Of the last requests; None while there are too few since clear()."""
        with self.lock:
            return self.last.count(name) / LAST if len(self.last) == LAST else None

    def clear(self):
        with self.lock:
            self.last.clear()

    def __enter__(self):
        for t in self.threads:
            t.start()
        return self

    def __exit__(self, *_):
        self.stop.set()
        for t in self.threads:
            t.join()


def metrics(c):
    with urllib.request.urlopen(f"http://{c.procs['router'].ready['http']}/metrics", timeout=10) as r:
        return {m[1]: float(m[2]) for m in re.finditer(r"^([^# ]+) (\S+)$", r.read().decode(), re.M)}


def of(c, what, name):
    """0 if it is not there (yet)."""
    return metrics(c).get(f'baton_router_node_{what}{{node="{name}"}}', 0)


def test_a_slow_node_loses_load_and_gets_it_back(cluster):
    c = cluster(prefill=2, decode=1, model="slow", node_args=["--tier.host_bytes=0"],
                router_args=["--http.listen=127.0.0.1:0", "--node.silence=20s"])
    c.allow("event=redis_down", "event=lease")  # all processors are busy
    with Stream(c, 4) as s:
        eventually(lambda: all((s.share(n) or 0) >= 0.25 for n in NAMES), 60, "both take their part")
        with Throttle(c.procs["prefill-1"]):
            s.clear()
            eventually(lambda: s.share("prefill-1") is not None and s.share("prefill-1") <= 0.25, 60,
                       "the slow one loses load")
            assert c.state_of("prefill-1") == "ready"
            eventually(lambda: of(c, "slowdown", "prefill-1") > 1.2 * of(c, "slowdown", "prefill-0"), 60,
                       "its steps are seen to take longer")
        s.clear()
        eventually(lambda: (s.share("prefill-1") or 0) >= 0.35, 60, "it gets load back")
    assert not s.errors
    for what in ("prefill_tokens_per_second", "decode_step_seconds", "speed_error", "slowdown"):
        for name in NAMES:
            assert (of(c, what, name) > 0) == (what != "decode_step_seconds"), (what, name)
    assert of(c, "decode_step_seconds", "decode-0") > 0
