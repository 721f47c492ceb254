"""Stages that add up, metrics under a real parser, access logs of all nodes under one id, rotation."""
import json
import os
import signal
import statistics
import threading
import time

import pytest
from prometheus_client.parser import text_string_to_metric_families

from cluster import DEVICE, SLOW, eventually
from fakenode import FakeNode
from test_http import Http
from wire import AUTO, DIRECT, LOCAL, STORE, cls, request

pytestmark = pytest.mark.sanitize
FIRST = ["tokenize", "queue", "retry", "prefill_queue", "load", "prefill", "relay"]
SECOND = ["reserve", "handoff", "decode_queue", "decode_step", "second_relay"]
SECRET = "whispering lighthouse pancake"
HTTP = ["--http.listen=127.0.0.1:0"]


def access(c, name):
    path = c.folder / f"{name}.access"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def line_of(c, name, rid):
    return eventually(lambda: [x for x in access(c, name) if x["id"] == rid], 10, f"{name} logs {rid}")


def series(http):
    """All series of a scrape, by name and labels; the parser refuses what Prometheus would."""
    t0 = time.monotonic()
    r, data = http.call("GET", "/metrics")
    assert r.status == 200 and time.monotonic() - t0 < 5 * SLOW
    text = data.decode()
    found = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation, family.name
        assert family.type in ("counter", "gauge", "histogram"), family.name
        for s in family.samples:
            key = (s.name, *sorted(s.labels.items()))
            assert key not in found, f"twice: {key}"
            found[key] = s.value
    return found


def inspect(c, method, request, response, **fields):
    return c.client.unary(method, cls(request)(**fields), response, service="Inspect")


def adds_up(line):
    """Every stage is rounded to a microsecond."""
    assert list(line["first_ms"]) == FIRST
    assert sum(line["first_ms"].values()) == pytest.approx(line["ttft_ms"], abs=0.001 * len(FIRST))
    if "second_ms" in line:
        assert list(line["second_ms"]) == SECOND
        assert sum(line["second_ms"].values()) == pytest.approx(line["second_gap_ms"],
                                                                abs=0.001 * len(SECOND))
    assert line["ttft_ms"] <= line["total_ms"] + 0.001


def test_stages_add_up_on_every_path(cluster):
    c = cluster(kvstore=1, router_args=HTTP)
    http = Http(c)
    answers = {}
    for i, path in enumerate([DIRECT, LOCAL, STORE, AUTO] * 3):
        t0 = time.monotonic()
        first = None
        for m in c.client.stream(request_of(f"{SECRET} {i} " + "walks on " * 40, path, i)):
            first = first or (time.monotonic() - t0 if m.tokens else None)
            answers[m.stream_id or rid] = (path, first)
            rid = m.stream_id or rid
    http.complete(prompt="The lamp keeper", max_tokens=3)
    lines = eventually(lambda: (x := access(c, "router")) and len(x) == 13 and x, 10, "13 lines")
    for line in lines:
        adds_up(line)
        assert line["status"] == "OK" and line["finish"] in ("stop", "length") and line["good"] in (True, False)
        for node in (line["prefill"], line["decode"]):
            assert line_of(c, node, line["id"])
    by_id = {x["id"]: x for x in lines}
    for rid, (path, first) in answers.items():
        line = by_id[rid]
        assert line["tokens_out"] == 8 and line["client_id"] == f"mine-{list(answers).index(rid)}"
        assert path == AUTO or line["path"] == {DIRECT: "direct", LOCAL: "local", STORE: "store"}[path]
        # The router cannot have seen the first token later than the client did.
        assert line["ttft_ms"] <= first * 1e3 + 1
        assert line["first_ms"]["prefill"] > 0
        if path in (DIRECT, STORE):
            assert line["transport"] in ("shm", "tcp") and line["handoff_bytes"] > 0
            leg = line_of(c, line["decode"], rid)[0]
            assert leg["leg"] == "decode" and leg["ms"]["compute"] > 0 and leg["bytes"] == line["handoff_bytes"]
        else:
            assert path == AUTO or line["transport"] == ""
        assert (line["store"] == "store-0") == (path == STORE)
    assert lines[-1]["via"] == "http" and lines[0]["via"] == "grpc"
    # The same sums in the metrics.
    s = series(http)
    stages = {k: sum(s[("baton_router_stage_seconds_sum", ("stage", x))] for x in names)
              for k, names in (("first", FIRST), ("second", SECOND))}
    assert stages["first"] == pytest.approx(s[("baton_router_time_to_first_token_seconds_sum",)], rel=1e-6)
    assert stages["first"] * 1e3 == pytest.approx(sum(x["ttft_ms"] for x in lines), rel=1e-3)
    assert stages["second"] * 1e3 == pytest.approx(sum(x["second_gap_ms"] for x in lines), rel=1e-3)
    assert s[("baton_router_inter_token_seconds_count",)] == sum(x["tokens_out"] - 1 for x in lines)
    assert s[("baton_router_request_seconds_count",)] == 13
    paths = {k[1][1]: v for k, v in s.items() if k[0] == "baton_router_path_first_token_seconds_count"}
    assert sum(paths.values()) == 13 and all(paths.values())


def request_of(text, path, i, n=8):
    return request(text, max_tokens=n, ignore_eos=True, path=path, request_id=f"mine-{i}")


def test_one_id_in_all_logs_and_no_prompt(cluster):
    c = cluster(kvstore=1, router_args=[*HTTP, "--log_level=debug"], node_args=["--log_level=debug"],
                kvstore_args=["--log_level=debug"])
    a = c.client.generate(f"{SECRET} once more", max_tokens=6, path=STORE)
    rid = a.stream_id
    line_of(c, "router", rid)
    for name in ("prefill-0", "decode-0"):
        line = line_of(c, name, rid)[0]
        assert line["node"] == name and line["router"] == "router"
        assert line["leg"] == name.split("-")[0]
    # grep: one id finds the request in every process that it touched, the daemon's log included.
    texts = {p.name: p.log.read_text() for p in c.procs.values()}
    assert rid in texts["router"] and rid in texts["store-0"]
    for path in c.folder.iterdir():
        if path.suffix in (".log", ".access"):
            for word in SECRET.split():
                assert word not in path.read_text(), f"a prompt's word in {path.name}"


def test_prefix_hits_by_tier(cluster):
    c = cluster(router_args=HTTP)
    text = "the quiet harbor and the lamp " * 80
    for i in range(2):
        c.client.generate(text, max_tokens=4, path=LOCAL, request_id=f"r{i}")
    cold, warm = eventually(lambda: (x := access(c, "router")) and len(x) == 2 and x, 10, "2 lines")
    assert cold["cached"] == 0 and sum(cold["found"].values()) == 0
    assert warm["cached"] > 0 and warm["found"]["pool"] == warm["cached"]
    assert warm["expected"]["pool"] == warm["cached"]
    s = series(Http(c))
    assert s[("baton_router_cache_hit_tokens_total", ("tier", "engine"))] == warm["cached"]
    assert s[("baton_router_tier_hits_total", ("tier", "engine"))] == 1
    assert s[("baton_router_cached_tokens_total",)] == warm["cached"]


def fake(name, role, model, delays):
    """A node that takes its time and says so; `delays` in ms: queue, load, wait, compute."""
    def on_start(session, start):
        def run():
            time.sleep(sum(delays) / 1e3)
            m = cls("NodeMessage")()
            first = 1 if start.leg == 2 else 0
            o = m.step.outputs.add(stream_id=start.stream_id, offset=first, tokens=[5],
                                   cached_tokens=128 if first == 0 and len(start.prompt) > 300 else 0)
            for key, v in zip(("queue_us", "load_us", "wait_us", "compute_us"), delays):
                setattr(o.times, key, v * 1000)
            if first:
                o.times.transport, o.times.bytes, o.finish = "rdma", 4096, 1
            else:
                o.times.pool_tokens = o.cached_tokens
            session.out.put(m)
            if not first:
                session.output(start.stream_id, handed_over=True)
        threading.Thread(target=run, daemon=True).start()
    return FakeNode(name, role, digest=model, on_start=on_start)


def test_MET_03_first_token_and_the_gap_tell_where_time_went(cluster):
    """200 ms in P; D has the pages at once, gets the KV 300 ms after P's token, and queues 100 ms."""
    p = fake("p", "prefill", None, (20, 0, 30, 150))
    d = fake("d", "decode", None, (10, 490, 100, 5))
    try:
        c2 = cluster(prefill=0, decode=0, redis=False, seeds=[p.address, d.address], wait=False,
                     router_args=HTTP)
        c2.allow("event=node node=[pd] .*to=lost")
        for node in (p, d):
            node.set_digest(bytes.fromhex(c2.client.model().digest))
        eventually(lambda: set(c2.ready_nodes()) == {"p", "d"}, 10, "fakes are ready")
        late = []  # of what the router saw against what the client did, ms
        for i, n in enumerate((100, 400) * 5):
            t0 = time.monotonic()
            stamps = []
            for m in c2.client.stream(request_ids(n, i)):
                stamps += [time.monotonic() - t0] * len(m.tokens)
                last = m
            line = eventually(lambda i=i: (x := access(c2, "router")) and len(x) == i + 1 and x[i], 10, "line")
            adds_up(line)
            assert last.usage.cached_tokens == line["cached"] == (128 if i % 2 else 0)
            assert line["tokens_out"] == 2, "P's token counts once"
            first, second = line["first_ms"], line["second_ms"]
            late.append(max(abs(line["ttft_ms"] - stamps[0] * 1e3),
                            abs(line["second_gap_ms"] - (stamps[1] - stamps[0]) * 1e3)))
            assert first["prefill"] == 150 and first["prefill_queue"] == 50
            # The KV was there 500 ms after D was asked; what P had taken by then hid a part of it.
            asked = first["tokenize"] + first["queue"] + first["retry"]
            assert second["handoff"] == pytest.approx(500 - (line["ttft_ms"] - asked), abs=0.5)
            assert second["decode_queue"] == pytest.approx(100, abs=0.01)
            assert line["transport"] == "rdma"
            if i % 2 and min(late) < 10:
                break
        assert min(late) < 10 * SLOW, late
        n = i + 1
        s = series(Http(c2))
        assert s[("baton_router_requests_total", ("outcome", "ok"))] == n, "each request counts once"
        assert s[("baton_router_handoffs_total", ("transport", "rdma"))] == n
        assert s[("baton_router_handoff_bytes_total", ("transport", "rdma"))] == 4096 * n
    finally:
        p.stop()
        d.stop()


def request_ids(n, i):
    return request(ids=[(7 * k) % 50 + 1 for k in range(n)], max_tokens=8, path=DIRECT, request_id=f"m{i}")


def test_MET_01_series_are_bounded(cluster):
    c = cluster(prefill=0, role="both", router_args=[*HTTP, "--explain.keep=16"])
    http = Http(c)
    c.client.generate("x", max_tokens=1, tenant="steady")
    if DEVICE == "cpu":  # what ops cost comes with a node's next report
        eventually(lambda: any(k[0] == "baton_router_node_op_calls_total" for k in series(http)), 10)
    before = None
    for round_ in range(3):
        for i in range(60):
            tenant = f"t{round_}-{i}" if i else "we\"ird\\\n\u00e9"
            c.client.generate("x", max_tokens=1, tenant=tenant, request_id=f"id-{round_}-{i}")
            http.call("GET", f"/path{round_}-{i}")
        s = series(http)
        before = before or len(s)
        assert len(s) == before, "the number of series grows with what clients send"
    own = {k for k in s if k[0] == "baton_router_tenant_requests_total" and ("overflow", "false") in k}
    assert len(own) == 32
    assert s[("baton_router_tenant_requests_total", ("overflow", "false"), ("tenant", "steady"))] == 1
    total = sum(v for k, v in s.items() if k[0] == "baton_router_tenant_requests_total")
    assert total == 181
    f = inspect(c, "GetFigures", "GetFiguresRequest", "Figures")
    assert f.recent == 16 and f.tokens == 181


def ops_of(s, what):
    """{(node, op): value} of baton_router_node_op_<what>_total."""
    name = f"baton_router_node_op_{what}_total"
    return {(dict(k[1:])["node"], dict(k[1:])["op"]): v for k, v in s.items() if k[0] == name}


@pytest.mark.skipif(DEVICE != "cpu", reason="ops are counted on the CPU")
def test_what_ops_cost(cluster):
    c = cluster(router_args=HTTP)
    http = Http(c)
    c.client.generate(ids=list(range(3, 203)), max_tokens=10, ignore_eos=True, path=DIRECT)
    steps = c.status("decode-0").steps

    def told():
        s = series(http)
        calls = ops_of(s, "calls")
        return s if calls.get(("decode-0", "attention"), 0) >= 3 * steps and ("prefill-0", "attention") in calls else None
    s = eventually(told, 20, "routers hear of all steps")
    calls, seconds, limit = (ops_of(s, w) for w in ("calls", "seconds", "limit_seconds"))
    # Three layers, one pass a step; the prefill node computes 200 tokens in one.
    assert calls["decode-0", "attention"] == 3 * steps and calls["prefill-0", "attention"] == 3
    # Scores and values of 200 causal rows, 4 heads of 16, in two layers; in the last one of one row.
    assert ops_of(s, "operations")["prefill-0", "attention"] == 4 * (2 * (200 * 201 // 2) + 200) * 4 * 16
    assert ops_of(s, "bytes")["prefill-0", "matmul"] > 0
    assert seconds.keys() == limit.keys() == calls.keys()
    for key, value in seconds.items():
        assert value > 0 or calls[key] < 1000, key
    assert 0 < limit["prefill-0", "matmul"]
    status = {o.op: o for o in c.status("prefill-0").ops}
    assert status["attention"].calls == 3 and set(status) == {op for node, op in calls if node == "prefill-0"}
    # As many series as there are kinds, whatever is asked.
    for i in range(20):
        c.client.generate(ids=list(range(3, 23 + i)), max_tokens=3, path=AUTO)
    assert ops_of(series(http), "calls").keys() == calls.keys()


def test_op_names_from_nodes_are_checked(cluster):
    def on_start(session, start):
        session.output(start.stream_id, tokens=[5], finish=1)
    p = FakeNode("p", "both", digest=None, on_start=on_start)
    try:
        c = cluster(prefill=0, decode=0, redis=False, seeds=[p.address], wait=False, router_args=HTTP)
        c.allow("event=node node=p .*to=lost")
        p.set_digest(bytes.fromhex(c.client.model().digest))
        eventually(lambda: c.ready_nodes() == ["p"], 10, "fake is ready")
        names = ["good_1", "", "a" * 16, 'a"b', "a b", "A", *(f"op{i}" for i in range(40))]
        p.sessions[-1].load(pages_free=100, ops=[{"op": n, "calls": 1, "us": 5} for n in names])
        s = eventually(lambda: (x := series(Http(c))) and ops_of(x, "calls") and x, 10, "the load is in")
        assert set(ops_of(s, "calls")) == {("p", n) for n in ["good_1", *(f"op{i}" for i in range(15))]}
        assert ops_of(s, "seconds")["p", "good_1"] == pytest.approx(5e-6)
    finally:
        p.stop()


def test_names_that_gateways_read(cluster):
    c = cluster(router_args=HTTP)
    c.client.generate("The lamp keeper", max_tokens=4)
    s = series(Http(c))
    names = {k[0] for k in s}
    for name in ("vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc",
                 "vllm:cache_config_info", "vllm:time_to_first_token_seconds_sum",
                 "vllm:inter_token_latency_seconds_count", "vllm:e2e_request_latency_seconds_bucket",
                 "vllm:prompt_tokens_total", "vllm:generation_tokens_total"):
        assert name in names, name
    assert s[("vllm:generation_tokens_total",)] == 4
    info = dict(next(k for k in s if k[0] == "vllm:cache_config_info")[1:])
    assert int(info["block_size"]) == 128 and int(info["num_gpu_blocks"]) > 0


def test_goodput(cluster):
    c = cluster(prefill=0, role="both", router_args=[*HTTP, "--goodput.first_token=3600s", "--goodput.token=3600s"])
    c.client.generate("The lamp keeper", max_tokens=4)
    assert series(Http(c))[("baton_router_requests_good_total",)] == 1
    c.add_router("router-strict", ["--http.listen=127.0.0.1:0", "--goodput.token=0"]).wait_ready()
    strict = c.client_of("router-strict")
    eventually(lambda: [n.name for n in strict.server().nodes if n.state == "ready"], 10, "ready")
    strict.generate("The lamp keeper", max_tokens=4, ignore_eos=True)
    s = series(Http(c, "router-strict"))
    assert s[("baton_router_requests_good_total",)] == 0
    assert s[("baton_router_requests_total", ("outcome", "ok"))] == 1


def test_a_request_through_the_store_is_in_the_daemons_log(cluster):
    """One id finds the whole story: router, both legs, and the daemon between them."""
    c = cluster(kvstore=1)
    a = c.client.generate(SECRET + " over the bay " * 30, max_tokens=4, path=STORE)
    (line,) = line_of(c, "store-0", a.stream_id)
    assert line["node"] == "store-0" and line["leg"] == "store" and line["end"] == "handed_over"
    assert (line["origin"], line["peer"]) == ("prefill-0", "decode-0")
    assert line["tokens_in"] == a.usage.prompt_tokens and line["tokens_had"] == 0 and line["bytes"] > 0
    assert line["total_ms"] == pytest.approx(line["ms"]["wait"] + line["ms"]["move"], abs=0.002)
    for name in ("router", "prefill-0", "decode-0"):
        assert line_of(c, name, a.stream_id)
    text = (c.folder / "store-0.access").read_text()
    assert "lighthouse" not in text and len(text.splitlines()) == 1


def test_a_prompt_that_finds_no_room_is_in_the_daemons_log(cluster):
    c = cluster(kvstore=1, kvstore_args=["--relay.bytes=64K", "--relay.wait=200ms"], router_args=["--route.retries=0"])
    c.allow("relay", "handoff", "leg")
    e = c.client.error("over the bay " * 200, max_tokens=4, path=STORE)
    assert e.code()
    line = eventually(lambda: access(c, "store-0"), 10, "a line")[0]
    assert line["end"].startswith("E_") and line["bytes"] == 0 and line["ms"]["move"] == 0


def test_rotation_at_sighup(cluster):
    c = cluster(prefill=0, role="both", router_args=HTTP)
    ids = []
    for round_ in range(3):
        ids.append([c.client.generate("x", max_tokens=2).stream_id for _ in range(5)])
        for name in ("router", "decode-0"):
            path = c.folder / f"{name}.access"
            eventually(lambda: len(path.read_text().splitlines()) == 5, 10, f"{name} has written")
            os.rename(path, c.folder / f"{name}.{round_}")
            c.procs[name].p.send_signal(signal.SIGHUP)
            eventually(path.exists, 10, f"{name} opens a new file")
    for name in ("router", "decode-0"):
        for round_ in range(3):
            lines = (c.folder / f"{name}.{round_}").read_text().splitlines()
            assert [json.loads(x)["id"] for x in lines] == ids[round_]


def test_errors_are_logged_with_their_status(cluster):
    c = cluster(prefill=0, role="both", router_args=HTTP)
    e = c.client.error("", request_id="empty")
    assert "INVALID" in str(e.code())
    stream = c.client.stream(request_of("y", AUTO, 9, n=4000))
    next(stream)
    stream.cancel()
    lines = eventually(lambda: (x := access(c, "router")) and len(x) == 2 and x, 10, "2 lines")
    assert lines[0]["status"] == "INVALID_ARGUMENT" and lines[0]["tokens_out"] == 0
    assert lines[0]["client_id"] == "empty"
    assert lines[1]["status"] == "CANCELLED" and lines[1]["finish"] == "none" and not lines[1]["good"]
    assert lines[1]["tokens_out"] > 0
    adds_up(lines[1])


def test_what_is_refused_before_it_is_a_request_is_logged_and_counted(cluster):
    """Every answer that names an id has a line under it: bad bodies of HTTP, and what finds no room."""
    c = cluster(prefill=0, role="both", router_args=[*HTTP, "--limits.active=1"])
    http = Http(c)
    for i, body in enumerate(["{", {"prompt": SECRET, "temperature": "hot"}, {"prompt": SECRET, "tools": 1}]):
        r, _ = http.call("POST", "/v1/completions", body, headers={"X-Request-Id": f"bad-{i}"})
        assert r.status == 400 and r.headers["X-Request-Id"] == f"bad-{i}"
    assert "INVALID" in str(c.client.error("x", request_id="hot", temperature=-3.0).code())
    stream = c.client.stream(request_of("y", AUTO, 9, n=4000))
    next(stream)
    assert "RESOURCE_EXHAUSTED" in str(c.client.error("x", request_id="late").code())
    r, _ = http.call("POST", "/v1/completions", {"prompt": "x"}, headers={"X-Request-Id": "late-too"})
    assert r.status == 429
    stream.cancel()
    lines = eventually(lambda: (x := access(c, "router")) and len(x) == 7 and x, 10, "7 lines")
    assert len({x["id"] for x in lines}) == 7
    by = {x["client_id"]: x for x in lines}
    assert [by[f"bad-{i}"]["status"] for i in range(3)] == ["INVALID_ARGUMENT"] * 3
    assert by["hot"]["status"] == "INVALID_ARGUMENT"
    assert by["late"]["status"] == by["late-too"]["status"] == "RESOURCE_EXHAUSTED"
    assert by["late-too"]["via"] == "http" and by["late-too"]["path"] == "none"
    assert "lighthouse" not in (c.folder / "router.access").read_text()
    s = series(http)
    told = {k[1][1]: v for k, v in s.items() if k[0] == "baton_router_requests_total"}
    assert told == {"ok": 0, "cancelled": 1, "invalid": 4, "overloaded": 2, "unavailable": 0, "error": 0}
    figures = inspect(c, "GetFigures", "GetFiguresRequest", "Figures")
    assert {o.name: o.value for o in figures.outcomes} == told


def test_cost_of_a_busy_log(cluster):
    """Many requests at once: as many lines as requests, every line whole."""
    c = cluster(prefill=0, role="both", router_args=HTTP)
    streams = [c.client.stream(request_of("z", AUTO, i, n=2)) for i in range(200)]
    ids = set()
    for s in streams:
        ids |= {m.stream_id for m in s if m.stream_id}
    assert len(ids) == 200
    eventually(lambda: {x["id"] for x in access(c, "router")} == ids, 20, "a line each")
    assert statistics.median(x["total_ms"] for x in access(c, "router")) > 0
