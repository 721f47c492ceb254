"""Hostile and broken clients of the HTTP port, by raw sockets: the answer is prompt, memory bounded,
and the router goes on."""
import json
import re
import select
import socket
import threading
import time

import pytest

from cluster import SLOW, Cluster, eventually
from security import CLIENT, OPERATOR, Access, Tokens
from test_http import PROMPT, Http

pytestmark = pytest.mark.sanitize
SHORT = ["--http.header_timeout=500ms", "--http.body_timeout=700ms", "--http.idle_timeout=1s",
         "--http.stall_timeout=1s", "--http.heartbeat=200ms", "--http.max_body_bytes=64K",
         "--http.queued_bytes=64K", "--http.max_connections=40"]


@pytest.fixture(scope="module")
def c(models):
    cluster = Cluster(models("tiny"), router_args=["--http.listen=127.0.0.1:0", *SHORT])
    yield cluster
    cluster.finish()


@pytest.fixture(scope="module")
def h(c):
    return Http(c)


@pytest.fixture(autouse=True)
def alive(c, h):
    yield
    assert h.complete(max_tokens=1)["choices"]
    c.pages_back()


class Raw:
    def __init__(self, h, rcvbuf=None):
        host, port = h.address.split(":")
        self.s = socket.socket()
        if rcvbuf:
            self.s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, rcvbuf)
        self.s.settimeout(20 * SLOW)
        self.s.connect((host, int(port)))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.s.close()

    def send(self, data):
        self.s.sendall(data.encode() if isinstance(data, str) else data)
        return self

    def send_some(self, data):
        """Sends until the other side has had enough."""
        try:
            self.s.sendall(data)
        except OSError:
            pass
        return self

    def all(self):
        """Everything until the other side closes."""
        data = b""
        try:
            while part := self.s.recv(65536):
                data += part
        except ConnectionError:
            pass
        return data

    def until(self, mark):
        data = b""
        while mark not in data:
            part = self.s.recv(65536)
            assert part, data
            data += part
        return data


def post(path="/v1/completions", body=None, extra="", **fields):
    body = json.dumps({"prompt": "x", "max_tokens": 1, **fields}) if body is None else body
    body = body if isinstance(body, bytes) else body.encode()
    return (f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n{extra}\r\n").encode() + body


def status(data):
    m = re.match(rb"HTTP/1\.1 (\d+) ", data)
    assert m, data[:200]
    return int(m.group(1))


def error_of(data):
    return json.loads(data.split(b"\r\n\r\n", 1)[1])["error"]


def ask(h, data):
    with Raw(h) as s:
        return s.send_some(data).all()


# --- what is no request -------------------------------------------------------------------------

@pytest.mark.parametrize("data,want", [
    (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200), 400),  # TLS
    (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", (400, 405, 505)),
    (b"\x00" * 5000, 400),
    (b"GET / HTTP/1.1\r\n\r\n", 400),  # no Host
    (b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400),
    (b"GET / HTTP/3.7\r\nHost: a\r\n\r\n", (400, 505)),
    (b"GET / HTTP/1.1\r\nHost: a\r\nBad Name: x\r\n\r\n", 400),
    (b"GET / HTTP/1.1\nHost: a\x00b\n\n", 400),
    (b"GET /" + b"a" * 100000 + b" HTTP/1.1\r\nHost: a\r\n\r\n", (414, 431)),
    (b"GET /x HTTP/1.1\r\nHost: a\r\nX: " + b"a" * 100000 + b"\r\n\r\n", 431),
    (b"GET /x HTTP/1.1\r\nHost: a\r\n" + b"X: a\r\n" * 5000 + b"\r\n", 431),
    (b"POST /x HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n", 400),
    (b"POST /x HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", 400),
    (b"POST /x HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    (b"POST /x HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip\r\n\r\n", 400),
    (b"POST /tokenize HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
    (b"POST /x HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999999\r\n\r\n", 413),
    (b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n", 405),
    (b"POST /tokenize HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 400),
    (b"POST /tokenize HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n"
     b"0\r\n\r\n", 400),
    (b"GET /health HTTP/1.1\r\nHost: a\r\nX: a\r\n b\r\n\r\n", 400),  # a header over two lines
    (b"GET /health HTTP/1.1\r\nHost: a\r\n\tb\r\n\r\n", 400),
    (b"GET /health HTTP/1.1\r\nHost:\r\n a\r\n\r\n", 400),
    (b"GET /health HTTP/1.1\r\nHost: a\r\nTransfer-Encoding:\r\n chunked\r\n\r\n", 400),
], ids=range(24))
def test_garbage_is_answered_and_closed(h, data, want):
    got = status(ask(h, data))
    assert got in (want if isinstance(want, tuple) else (want,))


def test_methods_and_paths(h):
    for method, path, want in (("GET", "/v1/completions", 405), ("POST", "/v1/models", 405),
                               ("DELETE", "/health", 405), ("HEAD", "/health", 200),
                               ("OPTIONS", "/v1/completions", 200), ("GET", "/nothing", 404),
                               ("GET", "//v1/models", 404), ("GET", "/v1/models/", 404),
                               ("GET", "/v1%2Fmodels", 404), ("GET", "/health?x=1", 200)):
        r, data = h.call(method, path)
        assert r.status == want, (method, path)
        assert want != 405 or "OPTIONS" in r.headers["Allow"]
        assert method != "HEAD" or data == b""


def test_upgrade_offers_are_passed_over(h):
    extra = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQ\r\n"
    with Raw(h) as s:
        assert status(s.send(post(extra=extra)).until(b"finish_reason")) == 200
    with Raw(h) as s:
        assert status(s.send(f"GET /health HTTP/1.1\r\nHost: x\r\n{extra}\r\n").until(b"ok")) == 200


def test_expect_100_continue(h):
    head, body = post(extra="Expect: 100-continue\r\n").split(b"\r\n\r\n", 1)
    with Raw(h) as s:
        assert s.send(head + b"\r\n\r\n").until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        assert status(s.send(body).until(b"finish_reason")) == 200


def test_http_10_gets_a_plain_stream(h):
    data = ask(h, post(stream=True).replace(b"HTTP/1.1", b"HTTP/1.0"))
    assert status(data) == 200 and b"chunked" not in data and data.endswith(b"data: [DONE]\n\n")


# --- bodies -------------------------------------------------------------------------------------

def test_SEC_05_bodies(h):
    deep = "[" * 30000
    for body in (deep, '{"x":' + deep, '{"messages":' + deep, '{"tools":' + deep, "", "{", "null", "[]", "3",
                 '{"prompt":"x","prompt":"y"}', '{"prompt":"\\ud800"}', b'{"prompt":"\xff\xfe"}',
                 b'{"prompt":"caf\xe9"}', '{"prompt":"\\u0000"}', '{"a\\u0000":1}', '{"prompt":"x",}',
                 '{"prompt":1e999999}', '{"prompt":"x","seed":99999999999999999999999}',
                 '{"prompt":"x"} trailing', b"\xef\xbb\xbf{}", '{"prompt":' + "9" * 50000 + "}"):
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
            with Raw(h) as s:
                data = s.send(post(path, body)).until(b"}}")
            assert status(data) == 400, (path, body[:60])
            assert error_of(data)["message"]


@pytest.fixture(scope="module")
def large(models):
    """A router with the bounds of its default."""
    cluster = Cluster(models("tiny"), router_args=["--http.listen=127.0.0.1:0"])
    yield Http(cluster)
    cluster.finish()


def test_SEC_05_bodies_of_many_values_are_refused_by_name(large):
    limit = 262144
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        for body in ('{"prompt":[' + "1," * 1000000 + "1]}", '{"x":{' + '"a":[],' * 300000 + '"b":1}}', "[" * 300000,
                     '{"tokens":[' + "[],"  * limit + "1]}"):
            with Raw(large) as s:
                data = s.send(post(path, body)).until(b"}}")
                assert status(data) == 400, (path, body[:20])
                message = error_of(data)["message"]
                if body[0] == "[":
                    assert "nested more than 32 deep" in message
                else:
                    assert f"more than {limit} values (http.max_body_values)" in message
    with Raw(large) as s:  # just below: read, and refused for what it says
        data = s.send(post(body='{"prompt":[' + "1," * (limit - 3) + "1]}")).until(b"}}")
        assert status(data) == 400 and "max_body_values" not in error_of(data)["message"]


def test_SEC_05_large_bodies_are_read_behind_the_back_of_others(large):
    """Twenty bodies, each tens of milliseconds' work to read: others are answered while they are read."""
    body = post("/tokenize", '{"tokens":[' + "1," * 250000 + "1]}")
    held = [Raw(large).send(body) for _ in range(20)]
    for _ in range(3):
        assert large.call("GET", "/health")[0].status == 200
    left = len(held) - len(select.select([s.s for s in held], [], [], 0)[0])
    for s in held:
        data = s.until(b"}}")
        assert status(data) == 400 and "tokens" in error_of(data)["message"]
        s.s.close()
    assert left > 0
    held = [Raw(large).send(body) for _ in range(20)]
    for s in held:  # gone while theirs is read, or waits for that
        s.s.close()
    assert large.complete(max_tokens=1)["choices"]


def test_large_bodies_that_are_right(large):
    with Raw(large) as s:
        s.send(post("/detokenize", json.dumps({"tokens": [5, 6, 7] * 40000})) + post(max_tokens=2) +
               b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        data = s.all()  # in their order, though the first is read elsewhere
        assert [int(x) for x in re.findall(rb"HTTP/1\.1 (\d+) ", data)] == [200, 200, 200]
        order = [data.index(x) for x in (b'{"prompt":', b'"finish_reason"', b'{"status":"ok"}')]
        assert order == sorted(order)
    ids = [5, 6, 7] * 1000
    padded = json.dumps({"prompt": ids, "max_tokens": 2, "stream": True, "seed": 1}) + " " * 100000
    with Raw(large) as s:
        data = s.send(post(body=padded)).until(b"[DONE]")
        assert status(data) == 200
    with Raw(large) as s:  # half-closed behind it: left, as with a short body
        s.send(post(body=padded))
        s.s.shutdown(socket.SHUT_WR)
        assert b"[DONE]" not in s.all()
    with Raw(large) as s:  # a short question is answered all the same
        s.send(post("/tokenize", json.dumps({"prompt": "lamp " * 10000})))
        s.s.shutdown(socket.SHUT_WR)
        assert status(s.all()) == 200


def test_SEC_05_too_large_and_endless_bodies(h):
    assert status(ask(h, post(body="x" * (65 * 1024)))) == 413
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    with Raw(h) as s:
        s.send(head)
        data = b""
        while not data:  # never ends by itself
            s.send_some(b"1000\r\n" + b"x" * 4096 + b"\r\n")
            if select.select([s.s], [], [], 0)[0]:
                data = s.all()
        assert status(data) == 413
    with Raw(h) as s:  # slowly: 408
        s.send(head)
        stop = threading.Event()

        def drip():
            while not stop.wait(0.05):
                s.send_some(b"1\r\nx\r\n")
        t = threading.Thread(target=drip)
        t.start()
        data = s.all()
        stop.set()
        t.join()
        assert status(data) == 408


@pytest.fixture(scope="module")
def closed(models, tmp_path_factory):
    """A router that asks for tokens."""
    t = Tokens(tmp_path_factory.mktemp("tokens"))
    cluster = Cluster(models("tiny"), node_args=t.node_args, access=Access(CLIENT, OPERATOR),
                      router_args=["--http.listen=127.0.0.1:0", "--http.body_timeout=60s", *t.router_args])
    yield Http(cluster)
    cluster.finish()


MAY = f"Authorization: Bearer {CLIENT}\r\nConnection: close\r\n"


def test_SEC_05_no_memory_for_bodies_of_those_who_may_not_ask(closed):
    """Bodies of all connections have one budget: strangers have no part in it."""
    held = []
    for path in ("/v1/completions", "/tokenize", "/health", "/nothing") * 3:
        s = Raw(closed)
        s.s.settimeout(0.5)
        held.append(s.send_some(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 8000000\r\n\r\n".encode() +
                                b" " * 7900000))
    assert status(ask(closed, post(extra=MAY))) == 200
    for s in held:
        s.s.close()


@pytest.mark.parametrize("extra,want", [("", 401), ("Authorization: Bearer nobody-has-this-token\r\n", 401),
                                        (f"Authorization: Bearer {OPERATOR}\r\n", 403)])
def test_a_body_that_is_not_wanted_is_answered_at_once(closed, extra, want):
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\n{extra}"
    with Raw(closed) as s:  # not "100 Continue"
        assert status(s.send(f"{head}Expect: 100-continue\r\nContent-Length: 9\r\n\r\n").all()) == want
    with Raw(closed) as s:  # the rest is read, so that the answer arrives; it is no request
        data = s.send(f"{head}Content-Length: 6000000\r\n\r\n".encode() + b" " * 6000000).all()
        assert status(data) == want and data.count(b"HTTP/1.1") == 1
    with Raw(closed) as s:
        inner = "GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
        data = s.send(f"{head}Content-Length: {len(inner)}\r\n\r\n{inner}").all()
        assert status(data) == want and data.count(b"HTTP/1.1") == 1
    with Raw(closed) as s:
        data = s.send("GET /health HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc").all()
        assert status(data) == 200 and data.count(b"HTTP/1.1") == 1


@pytest.mark.parametrize("value", [b"abcdef", b"  ab cd ", b"", b"  "])
def test_headers_in_pieces_are_whole_and_folded_ones_are_not(h, value):
    """Wherever the bytes are cut: what is one line is taken, what is two is refused."""
    head = b"GET /health HTTP/1.1\r\nHost: x\r\nX-Thing:" + value + b"\r\nConnection: close\r\n"
    for folded in (False, True):
        data = head + (b"X: a\r\n b\r\n" if folded else b"X: a b\r\n") + b"\r\n"
        for at in (*range(44, len(data)), None):
            with Raw(h) as s:
                s.s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                for part in ([data[:at], data[at:]] if at else [data[i:i + 1] for i in range(len(data))]):
                    s.send_some(part)
                    time.sleep(0.001)
                assert status(s.all()) == (400 if folded else 200), (folded, at)


@pytest.mark.parametrize("header", [b"X: a\rb\r\n\r\n", b"X:\ra\n \r\n\r\n", b"X: a\r\n\rb\n\r\n", b"X: a\r\r\n\r\n"])
def test_SEC_05_a_bare_carriage_return_is_no_end_of_a_line(h, header):
    """Readers differ on where such a header ends: what one takes for a header is a request to another."""
    data = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n" + header
    for parts in ([data], [data[i:i + 1] for i in range(len(data))]):
        with Raw(h) as s:
            s.s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for part in parts:
                s.send_some(part)
            assert status(s.all()) == 400, header
    with Raw(h) as s:  # newlines alone are taken (RFC 9112 2.2)
        assert status(s.send(b"GET /health HTTP/1.1\nHost: x\nConnection: close\n\n").all()) == 200


def test_chunked_body_in_pieces(h):
    body = post().split(b"\r\n\r\n", 1)[1]
    data = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + \
        b"".join(b"1\r\n%c\r\n" % b for b in body) + b"0\r\n\r\n"
    with Raw(h) as s:
        for b in data:
            s.send(bytes([b]))
        assert status(s.until(b"finish_reason")) == 200


# --- times and numbers --------------------------------------------------------------------------

def test_slow_headers_and_idle_connections_are_closed(h):
    with Raw(h) as silent, Raw(h) as half, Raw(h) as idle:
        half.send("GET /health HTTP/1.1\r\nHo")
        idle.send("GET /health HTTP/1.1\r\nHost: x\r\n\r\n").until(b"ok")
        assert silent.all() == b""
        assert status(half.all()) == 408
        assert idle.all() == b""


def test_connections_beyond_the_limit(c, h):
    held = [Raw(h) for _ in range(100)]  # idle ones make room
    assert h.call("GET", "/health")[0].status == 200
    for s in held:
        s.s.close()
    # A place is only refused when all are busy.
    busy = [Raw(h).send(post(prompt=PROMPT, max_tokens=8000, ignore_eos=True)) for _ in range(40)]
    eventually(lambda: c.client.server().requests_active == 40, 20, "40 active requests")

    def refused():
        with Raw(h) as s:
            return b" 503 " in s.send_some(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n").until(b"\r\n\r\n")
    eventually(refused, 5, "a connection too many is refused")
    for s in busy:
        s.s.close()
    eventually(lambda: h.call("GET", "/health")[0].status == 200, 10, "room again")


def test_half_headers_make_room(cluster):
    """A stranger that sends the beginning of a header on every connection shuts nobody out."""
    h = Http(cluster(router_args=["--http.listen=127.0.0.1:0", "--http.max_connections=20"]))  # a header has 10 s
    held = [Raw(h).send("GET /health HTTP/1.1\r\nHo") for _ in range(40)]
    for _ in range(5):
        assert h.call("GET", "/health")[0].status == 200
        held.append(Raw(h).send("POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Le"))
    for s in held:
        s.s.close()


def test_pipelining_is_served_in_order(h):
    with Raw(h) as s:
        s.send(post(stream=True, max_tokens=3, request_id="a") + b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" +
               post(request_id="b") + b"GET /nothing HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n" +
               b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        data = s.all()
    assert [int(x) for x in re.findall(rb"HTTP/1\.1 (\d+) ", data)] == [200, 200, 200, 404]
    order = [data.index(x) for x in (b"[DONE]", b'{"status":"ok"}', b'"finish_reason":"length"}],"usage"',
                                     b"not_found")]
    assert order == sorted(order)


def test_many_pipelined_requests_are_bounded(h):
    n = 3000
    with Raw(h) as s:
        t = threading.Thread(target=s.send_some, args=(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n" * n,))
        t.start()
        seen, count = b"", 0
        while count < n:
            part = s.s.recv(1 << 20)
            assert part, f"closed after {count} answers"
            seen += part
            count += seen.count(b"HTTP/1.1 200 OK")
            seen = seen[seen.rfind(b"HTTP/1.1 200 OK") + 1:]
        t.join()
    assert count == n


def cancelled(h):
    return h.metric('baton_router_requests_total{outcome="cancelled"}')


def test_STRM_01_slow_reader_loses_its_request(c, h):
    before = cancelled(h)
    with Raw(h, rcvbuf=4096) as s:
        s.send(post(prompt=PROMPT, max_tokens=8000, stream=True, ignore_eos=True, logprobs=20))
        s.until(b"data:")
        eventually(lambda: cancelled(h) == before + 1, 30, "the request of a slow reader is cancelled")
        c.pages_back()


@pytest.mark.parametrize("how", ["reset", "close", "half"])
@pytest.mark.parametrize("stream", [True, False])
def test_STRM_01_client_is_gone(c, h, how, stream):
    before = cancelled(h)
    s = Raw(h).send(post(prompt=PROMPT, max_tokens=8000, stream=stream, ignore_eos=True, n=3))
    if stream:
        s.until(b"data:")
    else:
        eventually(lambda: h.metric("vllm:num_requests_running") == 3, 10, "three running choices")
    if how == "half":
        s.s.shutdown(socket.SHUT_WR)
    elif how == "reset":
        s.s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        s.s.close()
    else:
        s.s.close()
    eventually(lambda: cancelled(h) == before + 3, 10, "three cancelled choices")
    c.pages_back()
    s.s.close()


def test_half_close_behind_a_short_question_is_answered(h):
    with Raw(h) as s:
        s.send("GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        s.s.shutdown(socket.SHUT_WR)
        assert status(s.all()) == 200


def test_STRM_01_gone_while_it_waits_for_nodes(cluster):
    c = cluster(prefill=0, decode=0, wait=False,
                router_args=["--http.listen=127.0.0.1:0", "--route.wait=60s", "--http.heartbeat=100ms"])
    h = Http(c)
    s = Raw(h).send(post(prompt=PROMPT, stream=True))
    data = s.until(b": \n\n")  # queued: nothing but a heartbeat
    assert status(data) == 200 and b"data:" not in data
    s.s.close()
    eventually(lambda: cancelled(h) == 1, 10, "a cancelled request")


def test_STRM_04_heartbeats_before_the_first_token_only_comments(cluster):
    c = cluster(prefill=0, decode=0, wait=False,
                router_args=["--http.listen=127.0.0.1:0", "--route.wait=60s", "--http.heartbeat=100ms"])
    h = Http(c)
    with Raw(h) as s:
        s.send(post(prompt=PROMPT, stream=True, max_tokens=4, ignore_eos=True,
                    stream_options={"include_usage": True}))
        data = b""
        while data.count(b": \n\n") < 5:  # each comes before a proxy's read limit
            data += s.s.recv(4096)
        c.add_node("decode", "decode-0", ["--role=both"]).wait_ready()
        data += s.until(b"0\r\n\r\n")
        assert b'"completion_tokens":4' in data
        assert data.index(b"[DONE]") > data.rindex(b": \n\n")
        s.s.settimeout(0.5)  # and nothing behind the end
        with pytest.raises(TimeoutError):
            s.s.recv(1)


def test_STRM_04_no_request_is_lost_at_the_idle_limit(h):
    """A client that reuses a connection near the limit gets an answer, or a close with no byte of one:
    which clients take as leave to try again."""
    for pause in (0.8, 0.95, 1.0, 1.05, 1.2):
        with Raw(h) as s:
            s.send("GET /health HTTP/1.1\r\nHost: x\r\n\r\n").until(b'"ok"}')
            time.sleep(pause)
            data = s.send_some(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").all()
            assert data == b"" or status(data) == 200


def test_error_in_mid_stream_is_an_event(cluster):
    c = cluster(prefill=0, decode=1, role="both", model="slow", pool="512M",
                router_args=["--http.listen=127.0.0.1:0", "--route.wait=0ms", "--route.retries=0"])
    h = Http(c)
    c.allow("decode-0")
    with Raw(h) as s:
        s.send(post(prompt=PROMPT, stream=True, max_tokens=4000, ignore_eos=True)).until(b"data:")
        c.procs["decode-0"].kill()
        data = s.all()
    last = [e for e in data.decode().split("\n\n") if "data: " in e][-1]
    e = json.loads(last.split("data: ", 1)[1])["error"]
    assert e["type"] == "server_error" and b"[DONE]" not in data and data.endswith(b"0\r\n\r\n")


def test_many_connections_at_once(c):
    """A burst of new connections is neither refused nor delayed by a short backlog."""
    p = c.add_router("router3", ["--http.listen=127.0.0.1:0"]).wait_ready()
    h = Http(c, "router3")
    socks = [Raw(h) for _ in range(400)]
    for s in socks:
        s.send("GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert all(status(s.all()) == 200 for s in socks)
    for s in socks:
        s.s.close()
    assert p.stop() == 0
    del c.procs["router3"]
