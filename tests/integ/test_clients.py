"""gRPC clients that rest, freeze or stay away, as real processes: their core does nothing between calls."""
import pathlib
import signal
import socket
import struct
import subprocess
import sys
import time

import pytest

from cluster import eventually
from fakenode import FakeNode
from test_router_fakes import fakes, local  # noqa: F401

pytestmark = pytest.mark.sanitize

SETTINGS, PING, GOAWAY, ACK = 4, 6, 7, 1  # RFC 9113, section 6

HEAD = f"""
import sys, time
sys.path.insert(0, {str(pathlib.Path(__file__).parent)!r})
from wire import Client, request
# Nothing is repeated behind our back: an error of the connection is seen.
client = Client(sys.argv[1], options=[("grpc.enable_retries", 0)])
"""


def client(address, script):
    return subprocess.Popen([sys.executable, "-c", HEAD + script, address], stdin=subprocess.PIPE,
                            stdout=subprocess.PIPE, text=True)


def connections(c):
    """What the kernel says of the connections that clients have opened to the router."""
    port = c.procs["router"].address.rsplit(":", 1)[1]
    return subprocess.run(["ss", "-Htno", "state", "established", f"sport = :{port}"], capture_output=True, text=True,
                          check=True).stdout.splitlines()


@pytest.mark.parametrize("ping", ["500ms", "10s"])
def test_STRM_03_client_that_rests_between_calls_keeps_its_connection(fakes, ping):  # noqa: F811
    """It answers no ping while it rests. With the default it rests for longer than nodes may be silent."""
    c = fakes(FakeNode("d0", "both", on_start=local([70])), router_args=[f"--limits.ping={ping}"])
    p = client(c.procs["router"].address, f"""
for _ in range(2):
    assert client.generate(ids=[5, 6, 7], max_tokens=1).tokens == [70]
    time.sleep({3 if ping == "500ms" else 11})
assert client.generate(ids=[5, 6, 7], max_tokens=1).tokens == [70]
print("ok")
""")
    out, _ = p.communicate(timeout=60)
    assert p.returncode == 0 and out.strip() == "ok"


def frame(kind, payload=b"", flags=0):
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + bytes(4) + payload


def read_frame(f):
    """(type, flags, payload)"""
    head = f.read(9)
    assert len(head) == 9, "the router closed the connection"
    return head[3], head[4], f.read(int.from_bytes(head[:3], "big"))


def test_STRM_03_client_that_pings_between_calls_is_answered(fakes):  # noqa: F811
    """As cores with eager keep-alive do: HTTP/2 pings without a call. Core's own patience ends at the third."""
    c = fakes(FakeNode("d0", "both", on_start=local([70])))
    host, port = c.procs["router"].address.rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=20) as s, s.makefile("rb") as f:
        s.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(SETTINGS))
        for n in range(12):
            s.sendall(frame(PING, n.to_bytes(8, "big")))
            while (got := read_frame(f))[:2] != (PING, ACK):
                assert got[0] != GOAWAY, got[2][8:]
            assert int.from_bytes(got[2], "big") == n
            time.sleep(0.02)


def test_client_that_freezes_in_mid_stream_is_gone(fakes):  # noqa: F811
    node = FakeNode("d0", "both", on_start=lambda s, m: s.output(m.stream_id, 0, [70]))
    c = fakes(node, router_args=["--limits.ping=300ms"])
    p = client(c.procs["router"].address, """
for m in client.stream(request(ids=[5, 6, 7], max_tokens=9)):
    print("reading", flush=True)
""")
    try:
        assert p.stdout.readline().strip() == "reading"
        p.send_signal(signal.SIGSTOP)
        eventually(lambda: len(node.cancels) == 1, 20, "the node told to stop")
    finally:
        p.kill()
        p.communicate()


def test_host_that_is_gone_is_noticed_without_calls(fakes):  # noqa: F811
    """Nothing is pinged then: the kernel probes the connection, and the client's kernel answers."""
    c = fakes(FakeNode("d0", "both", on_start=local([70])))
    p = client(c.procs["router"].address, """
assert client.generate(ids=[5, 6, 7], max_tokens=1).tokens == [70]
print("open", flush=True)
sys.stdin.readline()
""")
    assert p.stdout.readline().strip() == "open"
    eventually(lambda: len(connections(c)) >= 2 and all("keepalive" in line for line in connections(c)), 20, "probes")
    p.communicate(timeout=30)
    assert p.returncode == 0
