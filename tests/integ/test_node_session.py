"""A node against routers that lie, repeat themselves, do not read or vanish."""
import queue
import threading

import grpc
import pytest

from cluster import SANITIZED, eventually
from wire import (LEG_DECODE, LEG_LOCAL, LEG_PREFILL, LENGTH, OPTIONS, NodeMessage, RouterMessage)

pytestmark = pytest.mark.sanitize
E_INVALID, E_CANCELLED, E_DEADLINE, E_EXHAUSTED, E_UNSUPPORTED, E_EXISTS = -1, -4, -5, -6, -7, -11

LONG = 1000 if SANITIZED else 3000  # tokens: still running when something is done to others


class Router:
    """One session with a node, driven by the test."""

    def __init__(self, address, hello=True, name="tester", wire_version=1, read=True, incarnation=7, options=(),
                 wire_version_max=0):
        self.channel = grpc.insecure_channel(address, options=[*OPTIONS, *options])
        self.out = queue.Queue()
        self.call = self.channel.stream_stream(
            "/baton.v1.Node/Session", request_serializer=lambda m: m.SerializeToString(),
            response_deserializer=NodeMessage.FromString)(iter(self.out.get, None))
        self.welcome, self.outputs, self.loads, self.error = None, {}, [], None
        self.changed = threading.Condition()
        if hello:
            self.hello(name, wire_version, incarnation, wire_version_max)
        if read:
            threading.Thread(target=self.read, daemon=True).start()
            if hello:
                self.wait(lambda: self.welcome or self.error)

    def hello(self, name="tester", wire_version=1, incarnation=7, wire_version_max=0):
        self.out.put(RouterMessage(hello=dict(wire_version=wire_version, wire_version_max=wire_version_max,
                                              router=name, incarnation=incarnation)))

    def read(self):
        try:
            for m in self.call:
                with self.changed:
                    kind = m.WhichOneof("kind")
                    if kind == "welcome":
                        self.welcome = m.welcome
                    elif kind == "load":
                        self.loads.append(m.load)
                    else:
                        for o in m.step.outputs:
                            self.outputs.setdefault(o.stream_id, []).append(o)
                    self.changed.notify_all()
            error = grpc.StatusCode.OK
        except grpc.RpcError as e:
            error = e
        with self.changed:
            self.error = error
            self.changed.notify_all()

    def wait(self, predicate, timeout=20):
        with self.changed:
            assert self.changed.wait_for(predicate, timeout), (self.outputs, self.error)

    def start(self, stream_id, prompt=(5, 6, 7), leg=LEG_LOCAL, max_tokens=4, sampling=True, handoff=None,
              answered=(), **kw):
        m = RouterMessage()
        m.start.stream_id = stream_id
        m.start.leg = leg
        m.start.prompt.extend(prompt)
        m.start.answered.extend(answered)
        m.start.claim = stream_id
        m.start.deadline_us = kw.pop("deadline_us", 0)
        if sampling:
            m.start.sampling.max_tokens = max_tokens
            m.start.sampling.top_p = 1
            m.start.sampling.repetition_penalty = 1
            m.start.sampling.logprobs = -1
            m.start.sampling.ignore_eos = True
            for key, value in kw.items():
                f = getattr(m.start.sampling, key)
                if hasattr(f, "extend"):
                    f.extend(value)
                else:
                    setattr(m.start.sampling, key, value)
        if handoff:
            for key, value in handoff.items():
                setattr(m.start.handoff, key, value)
        self.out.put(m)

    def cancel(self, stream_id):
        self.out.put(RouterMessage(cancel=dict(stream_id=stream_id)))

    def ended(self, stream_id):
        """The last output of a stream, once it has come."""
        def last():
            for o in self.outputs.get(stream_id, []):
                if o.finish or o.HasField("error") or o.handed_over:
                    return o
        self.wait(last)
        return last()

    def tokens(self, stream_id):
        return [t for o in self.outputs[stream_id] for t in o.tokens]

    def whole(self, stream_id, n):
        """Waits for the finish of a stream of n tokens, whatever else was said under its id."""
        self.wait(lambda: any(o.finish for o in self.outputs.get(stream_id, [])))
        assert len(self.tokens(stream_id)) == n

    def close(self):
        self.out.put(None)
        self.call.cancel()
        self.channel.close()


@pytest.fixture(scope="module")
def c(models):
    from cluster import Cluster
    cluster = Cluster(models("tiny"))
    yield cluster
    cluster.finish()


@pytest.fixture
def session(c):
    opened = []

    def start(node="decode-0", **kw):
        opened.append(Router(c.procs[node].address, **kw))
        return opened[-1]

    yield start
    for r in opened:
        r.close()
    c.pages_back()


def test_welcome_and_load(c, session):
    r = session()
    w = r.welcome
    assert w.name == "decode-0" and w.role == "decode" and w.wire_version == 1 and w.incarnation
    assert len(w.model_digest) == 32 and len(w.kv_format) == 32 and w.numerics.startswith("cpu/")
    assert w.context_tokens == 8192 and w.page_tokens == 16 and w.pages_total > 0
    r.wait(lambda: len(r.loads) >= 3)
    assert r.loads[-1].pages_free == w.pages_total
    assert session("prefill-0").welcome.kv_format == w.kv_format


def test_local_stream_and_resume(session):
    r = session()
    r.start(1, max_tokens=6)
    assert r.ended(1).finish == LENGTH
    whole = r.tokens(1)
    assert len(whole) == 6
    r.start(2, max_tokens=6, answered=whole[:4])
    r.ended(2)
    assert r.outputs[2][0].offset == 4 and r.tokens(2) == whole[4:]


def test_second_start_with_an_id_in_use_is_refused_alone(session):
    r = session()
    r.start(1, max_tokens=LONG)
    r.start(1, max_tokens=5)
    r.wait(lambda: any(o.HasField("error") for o in r.outputs.get(1, [])))
    err = [o.error for o in r.outputs[1] if o.HasField("error")]
    assert err[0].rc == E_EXISTS
    r.whole(1, LONG)  # the first one goes on


BAD = {
    "empty prompt": dict(prompt=()),
    "id = vocabulary": dict(prompt=(512,)),
    "id negative": dict(prompt=(-1,)),
    "answered outside": dict(answered=(512,)),
    "too long": dict(prompt=(5,) * 9000),
    "no sampling": dict(sampling=False),
    "temperature": dict(temperature=-1.0),
    "nan": dict(temperature=float("nan")),
    "top_p": dict(top_p=2.0),
    "max_tokens 0": dict(max_tokens=0),
    "logprobs": dict(logprobs=1000),
    "stop ids": dict(stop_token_ids=[512]),
    "many stop ids": dict(stop_token_ids=[5] * 1000),
    "unknown leg": dict(leg=99),
    "all answered": dict(answered=(5, 6, 7, 8), max_tokens=4),
    "no handoff": dict(leg=LEG_DECODE),
    "handoff without address": dict(leg=LEG_DECODE, handoff=dict(id_hi=1, id_lo=1, peer_name="p")),
    "handoff to unix": dict(leg=LEG_DECODE, handoff=dict(id_hi=1, id_lo=1, peer_name="p",
                                                         peer_net_address="unix:/tmp/x")),
    "handoff to nowhere": dict(leg=LEG_DECODE, handoff=dict(id_hi=1, id_lo=1, peer_name="p",
                                                            peer_net_address="no port")),
    "handoff name": dict(leg=LEG_DECODE, handoff=dict(id_hi=1, id_lo=1, peer_name="p" * 500,
                                                      peer_net_address="127.0.0.1:9")),
}


def test_bad_starts_cost_themselves_alone(session):
    r = session()
    r.start(1, max_tokens=LONG)
    for i, (name, kw) in enumerate(BAD.items(), 100):
        r.start(i, **kw)
        last = r.ended(i)
        assert last.error.rc == E_INVALID, name
        assert last.error.message and not last.error.retryable, name
    r.whole(1, LONG)
    assert r.error is None


def test_legs_that_the_role_does_not_take(session):
    r = session()
    r.start(1, leg=LEG_PREFILL, handoff=dict(id_hi=1, id_lo=2))
    assert r.ended(1).error.rc == E_UNSUPPORTED
    p = session("prefill-0")
    p.start(1, leg=LEG_LOCAL)
    assert p.ended(1).error.rc == E_UNSUPPORTED
    p.start(2, leg=LEG_DECODE, handoff=dict(id_hi=1, id_lo=2, peer_name="p", peer_net_address="127.0.0.1:9"))
    assert p.ended(2).error.rc == E_UNSUPPORTED


@pytest.fixture(scope="module")
def store(c):
    return c.add_store("store-9").wait_ready()


N = 2  # the newest version of a session


@pytest.mark.parametrize("node", ["decode-0", "prefill-0", "store-9"])
def test_sessions_speak_the_highest_version_that_both_know(store, session, node):
    for lowest, highest, used in ((N - 1, 0, N - 1), (N - 1, N - 1, N - 1), (N, 0, N), (N - 1, N, N), (N, N + 7, N),
                                  (N - 2, N - 1, N - 1), (0, 1000, N)):
        r = session(node, wire_version=lowest, wire_version_max=highest)
        assert r.error is None and r.welcome.wire_version == used, (lowest, highest, r.error)
    for lowest, highest in ((N - 2, 0), (N + 1, 0), (N + 1, N + 2), (N, N - 1)):
        r = session(node, wire_version=lowest, wire_version_max=highest)
        assert r.error.code() == grpc.StatusCode.FAILED_PRECONDITION, (lowest, highest)
        assert f"{lowest} to {highest or lowest} are asked for" in r.error.details()
        assert f"{N - 1} to {N} are spoken" in r.error.details()


def test_a_router_of_the_version_before_is_served(session):
    r = session(wire_version=N - 1)
    r.start(1, max_tokens=6)
    assert r.ended(1).finish == LENGTH and len(r.tokens(1)) == 6


@pytest.mark.parametrize("how", ["no hello", "second hello", "wire version", "no name", "long name"])
def test_bad_session_is_ended(c, session, how):
    healthy = session(name="healthy")
    healthy.start(1, max_tokens=LONG)
    r = session(hello=how == "second hello", name="bad")
    if how == "no hello":
        r.start(1)
    elif how == "second hello":
        r.start(1, max_tokens=LONG)
        r.hello("bad")
    elif how == "wire version":
        r.hello("bad", wire_version=77)
    else:
        r.hello("" if how == "no name" else "x" * 200)
    r.wait(lambda: r.error)
    assert r.error.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION)
    healthy.whole(1, LONG)


def test_end_of_a_session_cancels_its_streams(c, session):
    r = session()
    for i in range(1, 9):
        r.start(i, max_tokens=8000)
    r.wait(lambda: len(r.outputs) == 8)
    assert c.status("decode-0").requests_running == 8
    r.close()
    c.pages_back(timeout=5)


def test_half_close_ends_the_session_too(c, session):
    r = session()
    r.start(1, max_tokens=8000)
    r.wait(lambda: r.outputs)
    r.out.put(None)
    r.wait(lambda: r.error)
    c.pages_back(timeout=5)


def test_router_that_comes_again_replaces_its_old_session(c, session):
    old = session(name="same", incarnation=9)
    old.start(1, max_tokens=8000)
    old.wait(lambda: old.outputs)
    new = session(name="same", incarnation=9)
    new.out.put(RouterMessage(take={}))
    old.wait(lambda: old.error)
    assert old.error.code() == grpc.StatusCode.ABORTED
    new.start(1, max_tokens=3)
    assert new.ended(1).finish == LENGTH


def test_router_that_finds_a_node_twice_does_no_harm(session):
    """It learns who answers from the welcome alone; leaving then must not cost its first session."""
    first = session(name="same", incarnation=9)
    first.start(1, max_tokens=2000)
    first.wait(lambda: first.outputs)
    for _ in range(3):
        second = session(name="same", incarnation=9)
        assert second.welcome.name == "decode-0"
        second.call.cancel()
        second.wait(lambda: second.error)
    assert first.ended(1).finish == LENGTH
    assert first.error is None


def test_deadline_of_a_stream(session):
    r = session()
    r.start(1, max_tokens=8000, deadline_us=100_000)
    assert r.ended(1).error.rc == E_DEADLINE


def test_cancel(session):
    r = session()
    r.start(1, max_tokens=8000)
    r.wait(lambda: r.outputs.get(1))
    r.cancel(1)
    assert r.ended(1).error.rc == E_CANCELLED


def test_cancel_of_unknown_and_ended_streams_is_ignored(session):
    r = session()
    r.cancel(12345)
    r.start(1, max_tokens=2)
    r.ended(1)
    r.cancel(1)
    r.start(1, max_tokens=3)  # an id may be used again after its end
    r.wait(lambda: len([o for o in r.outputs[1] if o.finish]) == 2)


def test_queue_limit(cluster):
    c = cluster(prefill=0, role="both", node_args=["--engine.max_running=1", "--engine.max_waiting=2"])
    r = Router(c.procs["decode-0"].address)
    for i in range(1, 20):
        r.start(i, max_tokens=8000)
    r.wait(lambda: sum(bool(os and os[-1].HasField("error")) for os in r.outputs.values()) >= 16)
    errors = [o.error for os in r.outputs.values() for o in os if o.HasField("error")]
    assert all(e.rc == E_EXHAUSTED and e.retryable for e in errors) and 16 <= len(errors) < 19
    r.close()


def test_router_that_does_not_read_loses_its_session_alone(cluster):
    c = cluster(prefill=0, role="both", node_args=["--session.max_queued_bytes=64K"])
    c.allow("event=session_slow")
    narrow = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65536)]
    healthy = Router(c.procs["decode-0"].address, name="healthy")
    slow = Router(c.procs["decode-0"].address, name="slow", read=False, options=narrow)
    for i in range(1, 17):
        slow.start(i, max_tokens=8000, logprobs=20)
    eventually(lambda: "event=session_slow" in c.procs["decode-0"].log.read_text(), 60, "slow session ended")
    healthy.start(1, max_tokens=50)
    assert healthy.ended(1).finish == LENGTH and len(healthy.tokens(1)) == 50
    slow.close()
    healthy.close()


def test_garbage_message_costs_the_session(c, session):
    channel = grpc.insecure_channel(c.procs["decode-0"].address, options=OPTIONS)
    call = channel.stream_stream("/baton.v1.Node/Session")(iter([b"\xff\xff\xff\xff\xff"]))
    with pytest.raises(grpc.RpcError) as e:
        list(call)
    assert e.value.code() in (grpc.StatusCode.INTERNAL, grpc.StatusCode.INVALID_ARGUMENT)
    channel.close()
    assert session().welcome
