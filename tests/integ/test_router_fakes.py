"""The router against scripted nodes: order, repeats, gaps, lies, loss, pairing."""
import threading
import time

import grpc
import pytest

from cluster import eventually
from fakenode import FakeNode
from test_http import Http
from wire import DIRECT, LENGTH, LOCAL, STOP, Answer, GenerateResponse, request

pytestmark = pytest.mark.sanitize


@pytest.fixture
def fakes(cluster):
    """fakes(node, ...): a router whose seeds are these nodes."""
    nodes = []

    def start(*ns, router_args=(), wait=True, silence="500ms"):
        nodes.extend(ns)
        c = cluster(prefill=0, decode=0, redis=False, seeds=[n.address for n in ns],
                    router_args=[f"--node.silence={silence}", *router_args])
        digest = bytes.fromhex(c.client.model().digest)
        for n in ns:
            if not n.welcome["model_digest"]:
                n.set_digest(digest)
        c.allow("event=node .*malformed|event=node .*incompatible|event=misfit|from=ready to=lost")
        if wait:
            eventually(lambda: {n.name for n in ns} <= set(c.ready_nodes()), 15, "fakes ready")
        return c

    yield start
    for n in nodes:
        n.stop()


def run_async(c, **kw):
    """Generates on a thread; returns (thread, list that gets the answer or the error)."""
    got = []

    def work():
        try:
            got.append(c.client.generate(**kw))
        except Exception as e:
            got.append(e)

    t = threading.Thread(target=work)
    t.start()
    return t, got


def local(tokens, finish=LENGTH):
    return lambda s, m: s.output(m.stream_id, 0 + len(m.answered), tokens, finish)


def test_local_answer(fakes):
    d = FakeNode("d0", "both", on_start=local([70, 71, 72]))
    c = fakes(d)
    a = c.client.generate(ids=[5, 6, 7], max_tokens=3, request_id="mine")
    assert a.tokens == [70, 71, 72] and a.finish == LENGTH
    assert a.request_id == "mine" and a.stream_id
    assert a.usage.prompt_tokens == 3 and a.usage.completion_tokens == 3
    assert a.timing.path == LOCAL and a.timing.decode_node == "d0" and a.timing.retries == 0
    assert list(d.starts[0].prompt) == [5, 6, 7]
    assert d.starts[0].sampling.max_tokens == 3


def pair(p_start=None, d_start=None, **kw):
    return FakeNode("p0", "prefill", on_start=p_start), FakeNode("d0", "decode", on_start=d_start, **kw)


def test_pair_gets_both_legs_with_one_id(fakes):
    p, d = pair(lambda s, m: (s.output(m.stream_id, 0, [40]), s.output(m.stream_id, handed_over=True)),
                lambda s, m: s.output(m.stream_id, 1, [41, 42], LENGTH))
    c = fakes(p, d)
    a = c.client.generate(ids=[5], max_tokens=3)
    assert a.tokens == [40, 41, 42]
    assert a.timing.path == DIRECT and a.timing.prefill_node == "p0" and a.timing.decode_node == "d0"
    hp, hd = p.starts[0].handoff, d.starts[0].handoff
    assert (hp.id_hi, hp.id_lo) == (hd.id_hi, hd.id_lo)
    assert hd.peer_name == "p0" and hd.peer_net_address == "127.0.0.1:9" and hd.peer_incarnation == 1
    assert p.starts[0].claim == d.starts[0].claim


def test_tokens_of_decode_before_the_first_one_wait(fakes):
    p, d = pair(lambda s, m: threading.Timer(0.4, lambda: s.output(m.stream_id, 0, [40])).start(),
                lambda s, m: (s.output(m.stream_id, 1, [41]), s.output(m.stream_id, 2, [42], LENGTH)))
    c = fakes(p, d)
    a = c.client.generate(ids=[5], max_tokens=3)
    assert a.tokens == [40, 41, 42] and a.timing.retries == 0


def test_repeats_are_dropped(fakes):
    def start(s, m):
        s.output(m.stream_id, 0, [40, 41])
        s.output(m.stream_id, 0, [40, 41])
        s.output(m.stream_id, 1, [41, 42], LENGTH)
    c = fakes(FakeNode("d0", "both", on_start=start))
    assert c.client.generate(ids=[5], max_tokens=3).tokens == [40, 41, 42]


@pytest.mark.parametrize("lie", ["gap", "vocab", "logprobs"])
def test_a_lying_node_is_not_believed(fakes, lie):
    def start(s, m):
        if lie == "gap":
            s.output(m.stream_id, 3, [40])
        elif lie == "vocab":
            s.output(m.stream_id, 0, [999999])
        else:
            s.output(m.stream_id, 0, [40])
    liar = FakeNode("d0", "both", on_start=start)
    c = fakes(liar, router_args=["--route.retries=1"])
    kw = {"logprobs": 2} if lie == "logprobs" else {}
    e = c.client.error(ids=[5], max_tokens=3, **kw)
    assert e.code() == grpc.StatusCode.INTERNAL
    assert len(liar.starts) == 2  # one retry, there is no other node
    liar.wait(lambda: len(liar.cancels) == 2)


def test_resumes_elsewhere_with_what_was_answered(fakes):
    def dies(s, m):
        s.output(m.stream_id, 0, [40, 41])
        time.sleep(0.1)
        s.close()
    a, b = FakeNode("d0", "both", on_start=dies), FakeNode("d1", "both", on_start=local([42, 43]))
    a.on_start, b_start = dies, b.on_start
    both = [a, b]

    def resume(s, m):
        if len(m.answered):
            b_start(s, m)
        else:
            dies(s, m)
    for n in both:
        n.on_start = resume
    c = fakes(*both)
    ans = c.client.generate(ids=[5], max_tokens=4)
    assert ans.tokens == [40, 41, 42, 43] and ans.timing.retries == 1
    second = [m for n in both for m in n.starts if len(m.answered)]
    assert len(second) == 1 and list(second[0].answered) == [40, 41]
    first = [m for n in both for m in n.starts if not len(m.answered)]
    assert first[0].sampling.seed == second[0].sampling.seed
    assert first[0].claim == second[0].claim


def test_RTR_04_failed_prefill_cancels_decode_at_once(fakes):
    p, d = pair(lambda s, m: s.output(m.stream_id, error=(-54, "broken", True)))
    c = fakes(p, d, router_args=["--route.retries=0"])
    t0 = time.monotonic()
    e = c.client.error(ids=[5], max_tokens=3)
    d.wait(lambda: d.cancels, 2)
    assert time.monotonic() - t0 < 5
    assert e.code() == grpc.StatusCode.INTERNAL and "broken" in e.details()


def test_RTR_04_failed_decode_cancels_prefill_at_once(fakes):
    p, d = pair(None, lambda s, m: s.output(m.stream_id, error=(-6, "full", True)))
    c = fakes(p, d, router_args=["--route.retries=0"])
    e = c.client.error(ids=[5], max_tokens=3)
    p.wait(lambda: p.cancels, 2)
    assert e.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


def test_prefill_lost_after_first_token_restarts_behind_it(fakes):
    def p_start(s, m):
        if len(m.answered) == 0:
            s.output(m.stream_id, 0, [40])
            time.sleep(0.1)
            s.close()
        else:
            s.output(m.stream_id, 1, [41])

    p0, p1 = FakeNode("p0", "prefill", on_start=p_start), FakeNode("p1", "prefill", on_start=p_start)
    d = FakeNode("d0", "decode",
                 on_start=lambda s, m: len(m.answered) and s.output(m.stream_id, 2, [42], LENGTH))
    c = fakes(p0, p1, d)
    a = c.client.generate(ids=[5], max_tokens=3)
    assert a.tokens == [40, 41, 42] and a.timing.retries == 1
    assert len(p0.starts) == 1 and len(p1.starts) == 1
    assert d.cancels == [d.starts[0].stream_id]


def test_finish_at_the_handoff_ends_both_legs(fakes):
    p, d = pair(lambda s, m: s.output(m.stream_id, 0, [40], LENGTH))
    c = fakes(p, d)
    a = c.client.generate(ids=[5], max_tokens=1)
    assert a.tokens == [40] and a.finish == LENGTH
    d.wait(lambda: d.cancels)


def test_finish_at_the_handoff_told_by_the_decode_node_first(fakes):
    """P ends the handoff because the first token ends the answer; D's word of it comes earlier."""
    p, d = pair(lambda s, m: threading.Timer(0.3, lambda: s.output(m.stream_id, 0, [40], STOP)).start(),
                lambda s, m: s.output(m.stream_id, error=(-4, "cancelled by the prefill node", False)))
    c = fakes(p, d)
    a = c.client.generate(ids=[5], max_tokens=9)
    assert a.tokens == [40] and a.finish == STOP and a.timing.retries == 0


def test_decode_gone_without_a_reason_is_tried_again(fakes):
    """D was cancelled, yet P says that it has handed over: the attempt is void."""
    def p_start(s, m):
        s.output(m.stream_id, len(m.answered), [40 + len(m.answered)])
        s.output(m.stream_id, handed_over=True)

    def d_start(s, m):
        if len(m.answered) == 0:
            s.output(m.stream_id, error=(-4, "cancelled", False))
        else:
            s.output(m.stream_id, 2, [42], LENGTH)
    p, d = pair(lambda s, m: threading.Timer(0.2, lambda: p_start(s, m)).start(), d_start)
    c = fakes(p, d)
    a = c.client.generate(ids=[5], max_tokens=3, path=DIRECT)
    assert a.tokens == [40, 41, 42] and a.timing.retries == 1


def test_node_refusal_of_the_request_is_the_clients_error(fakes):
    d = FakeNode("d0", "both", on_start=lambda s, m: s.output(m.stream_id, error=(-1, "bad thing", False)))
    c = fakes(d)
    e = c.client.error(ids=[5])
    assert e.code() == grpc.StatusCode.INVALID_ARGUMENT and "bad thing" in e.details()
    assert len(d.starts) == 1


def test_silent_node_is_lost_and_comes_back(fakes):
    d = FakeNode("d0", "both")
    c = fakes(d, router_args=["--route.wait=0", "--route.retries=0"])
    d.beat = False
    e = c.client.error(ids=[5])
    assert e.code() == grpc.StatusCode.UNAVAILABLE and "d0" in e.details()
    d.beat = True
    eventually(lambda: c.state_of("d0") == "ready", 10, "back again")


def test_KVX_07_other_model_is_named_and_never_used(fakes):
    bad = FakeNode("d0", "both", digest=b"\x11" * 32, on_start=local([1], LENGTH))
    good = FakeNode("d1", "both", on_start=local([40], LENGTH))
    c = fakes(bad, good, wait=False)
    eventually(lambda: c.state_of("d0") == "incompatible" and c.state_of("d1") == "ready", 10)
    reason = c.client.nodes()["d0"].reason
    assert "1111111111111111" in reason and c.client.model().digest[:16] in reason
    for _ in range(8):
        assert c.client.generate(ids=[5], max_tokens=1).tokens == [40]
    assert not bad.starts


@pytest.mark.parametrize("field,value", [("kv_format", b"\x22" * 32), ("numerics", "fake/2"),
                                         ("weight_epoch", 7)])
def test_KVX_07_misfits_are_never_paired(fakes, field, value):
    p = FakeNode("p0", "prefill", on_start=lambda s, m: s.output(m.stream_id, 0, [40]))
    odd = FakeNode("d0", "decode", **{field: value})
    c = fakes(p, odd, router_args=["--route.wait=0"])
    e = c.client.error(ids=[5], path=DIRECT)
    assert e.code() == grpc.StatusCode.UNAVAILABLE
    assert "p0" in e.details() and "d0" in e.details() and field.replace("_", " ") in e.details()
    assert not p.starts and not odd.starts


@pytest.mark.parametrize("version", [1, 2])
def test_nodes_of_this_version_and_the_one_before_serve(fakes, version):
    d = FakeNode("d0", "both", wire_version=version, on_start=local([1, 2], LENGTH))
    c = fakes(d)
    assert c.client.generate(ids=[5], max_tokens=2).tokens == [1, 2]
    hello = d.hellos[-1]  # a node that knows version 1 alone compares the first number
    assert (hello.wire_version, hello.wire_version_max) == (1, 2)


@pytest.mark.parametrize("version", [0, 3, 9])
def test_wire_version_is_named(fakes, version):
    d = FakeNode("d0", "both", wire_version=version)
    c = fakes(d, wait=False)
    eventually(lambda: c.state_of("d0") == "incompatible", 10)
    reason = c.client.nodes()["d0"].reason
    assert f"session version {version}" in reason and "1 to 2" in reason
    assert not d.starts


def test_a_node_that_refuses_the_version_says_why(fakes):
    """One so new, or so old, that it ends the session: the operator reads both ranges."""
    d = FakeNode("d0", "both", refuse="session versions: 1 to 2 are asked for, 4 to 5 are spoken here")
    c = fakes(d, wait=False)
    eventually(lambda: any("4 to 5 are spoken here" in n.reason for n in c.client.server().nodes), 10)
    assert not d.starts and not c.ready_nodes()


def test_a_node_cannot_make_the_index_grow_without_end(fakes):
    """Events and pictures of blocks that are none: what is beyond the limit is left out, told once, and counted."""
    d = FakeNode("d0", "both", block_tokens=128, on_start=local([40]))
    c = fakes(d, router_args=["--index.max_blocks_per_node=2048", "--http.listen=127.0.0.1:0"])
    c.allow("index.max_blocks_per_node")
    s, seq = d.sessions[-1], 1
    for part in range(30):
        blocks = [(part * 1000 + i + 1) * 0x9E3779B97F4A7C15 % 2**64 for i in range(1000)]
        s.send(events=dict(seq=seq, events=[dict(change=0, tier=part % 3, blocks=blocks)]))
        seq += len(blocks)
    eventually(lambda: c.client.server().cache.index_entries == 2048)
    for part in range(30):  # each is a new picture, of which the last part never comes
        blocks = [(part * 1000 + i + 1) * 0x9E3779B97F4A7C15 % 2**64 for i in range(5000)]
        s.send(snapshot=dict(seq=seq, first=True, blocks=blocks))
    s.send(snapshot=dict(seq=seq, first=True, last=True, blocks=[1, 2, 3]))
    eventually(lambda: c.client.generate(ids=[5], max_tokens=1).tokens and c.client.server().cache.index_entries < 35 * 2048)
    log = c.procs["router"].log.read_text()
    assert log.count("index.max_blocks_per_node lets in") == 1
    assert Http(c).metric("baton_router_index_full") == 0  # the last picture fits
    s.send(events=dict(seq=seq + 1, events=[dict(change=0, tier=0, blocks=range(10, 5010))]))
    eventually(lambda: Http(c).metric("baton_router_index_full") == 1)


def test_no_node_names_what_is_missing(fakes):
    p = FakeNode("p0", "prefill")
    c = fakes(p, router_args=["--route.wait=100ms"])
    e = c.client.error(ids=[5])
    assert e.code() == grpc.StatusCode.UNAVAILABLE and "decode node" in e.details()


def test_draining_node_gets_nothing_new(fakes):
    a, b = FakeNode("d0", "both", on_start=local([40])), FakeNode("d1", "both", on_start=local([40]))
    c = fakes(a, b)
    a.sessions[-1].load(draining=True)
    eventually(lambda: c.state_of("d0") == "draining", 10)
    for _ in range(6):
        c.client.generate(ids=[5], max_tokens=1)
    assert not a.starts and len(b.starts) == 6


def test_idle_nodes_share_the_traffic(fakes):
    ns = [FakeNode(f"d{i}", "both", on_start=local([40])) for i in range(3)]
    c = fakes(*ns)
    for _ in range(60):
        c.client.generate(ids=[5], max_tokens=1)
    assert all(len(n.starts) >= 6 for n in ns), [len(n.starts) for n in ns]


def test_RTR_02_a_burst_is_spread_by_what_was_just_sent(fakes):
    """A hundred requests at once, before any node could tell of its load."""
    ps = [FakeNode(f"p{i}", "prefill") for i in range(2)]
    ds = [FakeNode(f"d{i}", "decode") for i in range(2)]
    c = fakes(*ps, *ds, router_args=["--admission.node_queue=0s"], silence="60s")  # all at once, none waits here
    for n in (*ps, *ds):
        n.beat = False  # none tells, however long the hundred take
    calls = [c.client.stream(request(ids=[5] * 2000)) for _ in range(100)]
    for kind in (ps, ds):
        eventually(lambda kind=kind: sum(len(n.starts) for n in kind) == 100)
        assert all(35 <= len(n.starts) <= 65 for n in kind), [len(n.starts) for n in kind]
    for call in calls:
        call.cancel()
    eventually(lambda: c.client.server().requests_active == 0)


def test_RTR_02_new_requests_avoid_the_busy_node(fakes):
    ps = [FakeNode(f"p{i}", "prefill", on_start=lambda s, m: s.output(m.stream_id, 0, [40], LENGTH))
          for i in range(2)]
    c = fakes(*ps, FakeNode("d0", "decode"))
    ps[0].beat = False  # its last word stands: much to do
    ps[0].sessions[-1].load(tokens_waiting=100_000)
    eventually(lambda: c.client.generate(ids=[5], max_tokens=1).timing.prefill_node == "p1")
    before = len(ps[0].starts)
    for _ in range(10):
        ps[0].sessions[-1].load(tokens_waiting=100_000)
        c.client.generate(ids=[5], max_tokens=1)
    assert len(ps[0].starts) <= before + 1


def test_client_cancel_reaches_both_legs(fakes):
    p, d = pair()
    c = fakes(p, d)
    call = c.client.stream(request(ids=[5]))
    p.wait(lambda: p.starts)
    d.wait(lambda: d.starts)
    call.cancel()
    p.wait(lambda: p.cancels, 2)
    d.wait(lambda: d.cancels, 2)
    eventually(lambda: c.client.server().requests_active == 0)


def test_deadline_goes_to_the_node_and_bounds_the_call(fakes):
    d = FakeNode("d0", "both")
    c = fakes(d)
    t0 = time.monotonic()
    e = c.client.error(ids=[5], timeout=0.5)
    assert e.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    assert time.monotonic() - t0 < 5
    assert 0 < d.starts[0].deadline_us <= 600_000
    d.wait(lambda: d.cancels, 2)


def test_limit_of_active_requests(fakes):
    d = FakeNode("d0", "both")
    c = fakes(d, router_args=["--limits.active=2"])
    calls = [c.client.stream(request(ids=[5])) for _ in range(2)]
    d.wait(lambda: len(d.starts) == 2)
    e = c.client.error(ids=[5])
    assert e.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert ("retry-after", "1") in [(k, v) for k, v in e.trailing_metadata()]
    for call in calls:
        call.cancel()


def test_slow_client_loses_its_request_alone(fakes):
    """A client that does not read: bounded memory, RESOURCE_EXHAUSTED, others go on."""
    stop = threading.Event()

    def flood(s, m):
        if m.sampling.max_tokens < 100:
            s.output(m.stream_id, 0, [40], LENGTH)
            return

        def work():
            at = 0
            while not stop.is_set() and m.stream_id not in d.cancels and at < 20_000_000:
                s.output(m.stream_id, at, [70] * 1000)
                at += 1000
        threading.Thread(target=work, daemon=True).start()
    d = FakeNode("d0", "both", on_start=flood, context_tokens=1 << 22)
    c = fakes(d, router_args=["--limits.queued_bytes=64K"])
    narrow = c.fresh_client([("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65536)])
    call = narrow.stream(request(ids=[5], max_tokens=8000))
    d.wait(lambda: d.cancels, 20)
    stop.set()
    assert c.client.generate(ids=[5], max_tokens=1).tokens == [40]
    with pytest.raises(grpc.RpcError) as e:
        for _ in call:
            pass
    assert e.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


def forced(pieces):
    """A node that emits these ids, one a message, whatever is asked."""
    def start(s, m):
        for i, t in enumerate(pieces):
            s.output(m.stream_id, i, [t], LENGTH if i + 1 == len(pieces) else 0)
    return start


def force(fakes, text, **kw):
    """The answer when a node emits exactly `text`, byte tokens only (the worst cutting)."""
    d = FakeNode("d0", "both")
    c = fakes(d)
    ids = byte_ids(c, text.encode())
    d.on_start = forced(ids)
    a = c.client.generate(ids=[5], max_tokens=len(ids), **kw)
    return a, d, ids


def byte_ids(c, data):
    """The ids of single bytes (3..258 in mkmodel.py), checked by the router's own decoder."""
    ids = [3 + b for b in data]
    if c.client.detokenize(ids) != data:  # the other order: printable bytes first
        order = [*range(33, 127), *range(161, 173), *range(174, 256)]
        order += [b for b in range(256) if b not in order]
        ids = [3 + order.index(b) for b in data]
    assert c.client.detokenize(ids) == data
    return ids


def test_TOK_01_characters_split_over_tokens_stay_whole(fakes):
    text = "🙂🙂 naïve 漢字"
    a, _, ids = force(fakes, text)
    assert a.text.decode() == text
    assert a.tokens == ids and "�" not in a.text.decode()


def test_STOP_01_stop_string_over_tokens(fakes):
    a, d, _ = force(fakes, " delta epsilon zeta eta theta iota", stop=[" zeta eta theta"])
    assert a.text.decode() == " delta epsilon" and a.finish == STOP
    d.wait(lambda: d.cancels or True)


def test_STOP_01_near_miss_loses_nothing(fakes):
    text = " delta epsilon zeta etb"
    a, _, _ = force(fakes, text, stop=[" zeta eta theta"])
    assert a.text.decode() == text and a.finish == LENGTH


def test_STOP_01_overlapping_stops_first_completed_wins(fakes):
    a, _, _ = force(fakes, " delta epsilon zeta eta theta iota", stop=["eta theta", "zeta eta theta"])
    assert a.text.decode() == " delta epsilon " and a.finish == STOP


def test_STOP_03_bad_stop_strings(fakes):
    d = FakeNode("d0", "both", on_start=local([40]))
    c = fakes(d)
    for stop in ([""], ["", "x"], ["y"] * 20, ["z" * 10240]):
        e = c.client.error(ids=[5], max_tokens=1, stop=stop)
        assert e.code() == grpc.StatusCode.INVALID_ARGUMENT, stop
    assert c.client.generate(ids=[5], max_tokens=1, stop=[]).tokens == [40]


def test_SEC_03_no_field_names_a_peer():
    """Clients cannot say where nodes connect to: the request has no such field."""
    names = {f.name for f in request().DESCRIPTOR.fields}
    assert not {n for n in names if "peer" in n or "address" in n or "host" in n}, names


def test_answer_helper_sees_gaps():
    a = Answer().add(GenerateResponse(offset=0, tokens=[1]))
    with pytest.raises(AssertionError):
        a.add(GenerateResponse(offset=2, tokens=[1]))
