"""The commands of batonctl that look: requests, explain, top, cache, doctor, fit, bench, simulate,
completion, man; against live clusters."""
import json
import os
import pathlib
import pty
import random
import re
import resource
import select
import shutil
import signal
import statistics
import struct
import subprocess
import time

import pytest

from cluster import SANITIZED, SLOW, eventually
from security import CLIENT, OPERATOR, Access, Tokens
from test_http import Http
from wire import BUILD, DIRECT, LOCAL, ROOT, request

TEXT = "the quiet harbor and the lamp keeper walk " * 60


def ctl(*args, **kw):
    return subprocess.run([BUILD / "batonctl", *map(str, args)], capture_output=True, text=True, timeout=120, **kw)


def at(c):
    return ["--router", c.procs["router"].address]


def good(*args):
    out = ctl(*args)
    assert out.returncode == 0, out.stderr + out.stdout
    assert out.stderr == ""
    return out.stdout


def js(*args, code=0):
    out = ctl(*args, "-o", "json")
    assert out.returncode == code, out.stderr + out.stdout
    lines = out.stdout.splitlines()
    assert len(lines) == 1
    return json.loads(lines[0])


def running(c, n=1, tokens=20000, **kw):
    """Streams that run until they are cancelled; their ids."""
    streams, ids = [], []
    for i in range(n):
        s = c.client.stream(request("The lamp keeper", max_tokens=tokens, ignore_eos=True, request_id=f"mine-{i}", **kw))
        ids.append(next(s).stream_id)
        streams.append(s)
    return streams, ids


def test_status_and_node_as_json(cluster):
    c = cluster()
    c.client.generate("x", max_tokens=2)
    j = js("status", *at(c))
    assert {n["name"]: n["state"] for n in j["nodes"]} == {"prefill-0": "ready", "decode-0": "ready"}
    assert j["models"][0]["digest"] == c.client.model().digest and j["membership"] == "live"
    n = js("node", "--node", c.procs["prefill-0"].address)
    assert n["name"] == "prefill-0" and n["tokens_computed"] == c.status("prefill-0").tokens_computed > 0


# --- requests, explain ------------------------------------------------------------------------------

def test_requests(cluster):
    c = cluster()
    assert "0 of 0 running" in good("requests", *at(c))
    streams, ids = running(c, 3, tenant="acme")
    rows = js("requests", *at(c))
    assert [r["id"] for r in rows["requests"]] == ids and rows["total"] == 3
    for i, r in enumerate(rows["requests"]):
        assert r["client_id"] == f"mine-{i}" and r["tenant"] == "acme" and r["state"] in ("handoff", "decode")
        assert r["prefill_node"] == "prefill-0" and r["decode_node"] == "decode-0" and r["via"] == "grpc"
        assert r["age_s"] > 0 and r["prompt_tokens"] > 0 and r["completion_tokens"] > 0
    assert len(js("requests", *at(c), "--limit", 2)["requests"]) == 2
    table = good("requests", *at(c))
    for word in (*ids, "acme", "decode-0", "3 of 3"):
        assert word in table
    for s in streams:
        s.cancel()
    eventually(lambda: js("requests", *at(c))["total"] == 0, 10, "all gone")


def test_clients_send_nothing_to_the_terminal(cluster):
    c = cluster()
    evil = "a\x1b]0;x\x07\x1b[2J\r\n\x7f\x9bb"
    s = c.client.stream(request("The lamp keeper", max_tokens=20000, ignore_eos=True, request_id=evil, tenant=evil))
    stream_id = next(s).stream_id
    for args in (["requests"], ["explain", stream_id]):
        table = good(*args, *at(c))
        assert "a?]0;x??[2J????" in table and not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", table)
    row = js("requests", *at(c))["requests"][0]
    assert row["tenant"] == row["client_id"] == evil
    s.cancel()


def test_explain(cluster):
    c = cluster(decode=2, router_args=["--http.listen=127.0.0.1:0"])
    a = c.client.generate(TEXT, max_tokens=5, path=DIRECT, request_id="by-client")
    b = c.client.generate(TEXT, max_tokens=5, path=DIRECT)
    e = js("explain", a.stream_id, *at(c))
    assert e["request"]["id"] == a.stream_id and e["status"] == "OK" and e["finish"] in ("stop", "length")
    assert e["asked_path"] == "direct" and e["transport"] in ("shm", "tcp") and e["handoff_bytes"] > 0
    chosen = {x["leg"]: x["node"] for x in e["candidates"] if x["chosen"]}
    assert chosen == {"prefill": a.timing.prefill_node, "decode": a.timing.decode_node}
    assert {x["node"] for x in e["candidates"] if x["leg"] == "decode"} == {"decode-0", "decode-1"}
    for leg in ("prefill", "decode"):
        least = min(x["cost_s"] for x in e["candidates"] if x["leg"] == leg)
        mine = next(x["cost_s"] for x in e["candidates"] if x["leg"] == leg and x["chosen"])
        assert mine <= least * 1.01 + 100e-6
    first = {s["name"]: s["s"] for s in e["first"]}
    assert sum(first.values()) == pytest.approx(e["first_token_s"], abs=1e-6) and first["prefill"] > 0
    assert sum(s["s"] for s in e["second"]) == pytest.approx(e["second_gap_s"], abs=1e-6)
    assert js("explain", "by-client", *at(c))["request"]["id"] == a.stream_id
    # The id of an HTTP answer finds it as well, whatever the client called it.
    _, answer = Http(c).call("POST", "/v1/completions", {"prompt": "x", "max_tokens": 2},
                             headers={"X-Request-Id": "mine"})
    by_http = js("explain", answer["id"], *at(c))["request"]
    assert by_http["client_id"] == "mine" and by_http["via"] == "http"
    assert js("explain", by_http["id"], *at(c))["request"] == by_http
    again = js("explain", b.stream_id, *at(c))
    blocks = (again["request"]["prompt_tokens"] - 1) // 128
    assert again["expected"]["pool"] == again["found"]["pool"] == again["request"]["cached_tokens"] == blocks * 128
    table = good("explain", b.stream_id, *at(c))
    for word in (b.stream_id, "prefill-0", "* ", "expected", "found", "first token", "to the second"):
        assert word in table, table
    assert "lamp keeper" not in table
    streams, ids = running(c)
    live = js("explain", ids[0], *at(c))
    assert live["status"] == "" and live["request"]["state"] in ("handoff", "decode")
    streams[0].cancel()
    out = ctl("explain", "0123456789abcdef", *at(c))
    assert out.returncode == 5 and "0123456789abcdef" in out.stderr and out.stdout == ""


def test_explain_tells_failed_attempts(cluster):
    c = cluster(decode=2)
    c.allow("event=node", "event=peer", "lost", "handoff")
    streams, ids = running(c, path=DIRECT)
    victim = js("explain", ids[0], *at(c))["request"]["decode_node"]
    c.procs[victim].kill()

    def moved():
        next(streams[0])
        e = js("explain", ids[0], *at(c))
        return e if e["request"]["retries"] else None
    e = eventually(moved, 20, "another attempt")
    assert e["request"]["decode_node"] not in ("", victim) and victim in e["failed"][0]["reason"]
    streams[0].cancel()


# --- top ----------------------------------------------------------------------------------------------

def test_top(cluster):
    c = cluster()
    streams, _ = running(c, 2)
    text = good("top", "--once", *at(c))
    assert "2 running" in text and "prefill-0" in text and "decode-0" in text and "\x1b" not in text
    j = js("top", "--once", *at(c))
    assert j["figures"]["running"] == 2 and len(j["server"]["nodes"]) == 2
    p = subprocess.Popen([BUILD / "batonctl", "top", *at(c), "--interval", "100ms"], stdout=subprocess.PIPE, text=True)
    seen = ""
    while seen.count("router 0") < 3:
        seen += p.stdout.readline()
    p.send_signal(signal.SIGTERM)
    p.communicate(timeout=20)
    assert p.returncode == 0 and "tokens" in seen
    for s in streams:
        s.cancel()


def test_top_fits_its_terminal(cluster):
    c = cluster(decode=3)
    pid, fd = pty.fork()
    if pid == 0:
        os.execv(BUILD / "batonctl", ["batonctl", "top", *at(c), "--interval", "100ms"])
    import fcntl
    import struct
    import termios
    fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", 6, 40, 0, 0))
    data, end = b"", time.monotonic() + 20 * SLOW
    while data.count(b"\x1b[2J") < 5 and time.monotonic() < end:
        if select.select([fd], [], [], 1)[0]:
            data += os.read(fd, 65536)
    os.kill(pid, signal.SIGINT)
    while True:
        try:
            if not os.read(fd, 65536):
                break
        except OSError:
            break
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    picture = data.split(b"\x1b[2J")[-2].decode().replace("\r", "")
    lines = picture.replace("\x1b[H", "").split("\n")
    assert len([x for x in lines if x]) <= 6 and all(len(x) <= 40 for x in lines), lines


# --- cache --------------------------------------------------------------------------------------------

def test_cache_rates_and_find(cluster, tmp_path):
    c = cluster()
    c.client.generate(TEXT, max_tokens=3, path=DIRECT)
    c.client.generate(TEXT, max_tokens=3, path=DIRECT)
    ids = c.client.tokenize(TEXT)
    blocks = len(ids) // 128
    j = js("cache", *at(c))
    tiers = {t["name"]: t["value"] for t in j["figures"]["tier_tokens"]}
    assert tiers["pool"] == (len(ids) - 1) // 128 * 128 == j["figures"]["cached_tokens"]
    assert "pool" in good("cache", "rates", *at(c))
    found = js("cache", "find", "--text", TEXT, *at(c))
    assert found["prompt_tokens"] == len(ids) and found["prompt_blocks"] == blocks
    holders = {h["node"]: h for h in found["holders"]}
    assert holders["prefill-0"]["pool_blocks"] == blocks and holders["decode-0"]["pool_blocks"] == blocks
    assert js("cache", "find", "--ids", ",".join(map(str, ids)), *at(c))["holders"] == found["holders"]
    path = tmp_path / "prompt"
    path.write_text(TEXT)
    assert js("cache", "find", "--prompt-file", path, *at(c))["holders"] == found["holders"]
    out = ctl("cache", "find", "--prompt-file", "-", *at(c), "-o", "json", input=TEXT)
    assert json.loads(out.stdout)["holders"] == found["holders"]
    assert js("cache", "find", "--text", TEXT, "--salt", "other", *at(c))["holders"] == []
    half = " ".join(TEXT.split()[:200]) + " something else " * 100
    part = js("cache", "find", "--text", half, *at(c))["holders"]
    assert part and all(0 < h["pool_blocks"] < blocks for h in part)
    # Long texts go through the tokenizer's thread.
    long = js("cache", "find", "--text", TEXT * 10, *at(c))
    assert long["prompt_tokens"] > 9 * len(ids) and long["holders"][0]["pool_blocks"] >= blocks - 1
    assert "prefill-0" in good("cache", "find", "--text", TEXT, *at(c))
    for bad in (["find"], ["find", "--text", "a", "--ids", "1"], ["dance"], ["find", "--ids", "1,x"]):
        assert ctl("cache", *bad, *at(c)).returncode == 2, bad
    assert ctl("cache", "find", "--ids", "99999999", *at(c)).returncode == 1
    assert ctl("cache", "find", "--prompt-file", tmp_path / "none", *at(c)).returncode == 1


def test_cache_flush(cluster, tmp_path):
    disk = tmp_path / "disk"
    c = cluster(prefill=0, role="both", decode_args=[f"--tier.disk_path={disk}", "--tier.disk_bytes=64M"])
    ids = c.client.tokenize(TEXT)
    want = c.client.generate(TEXT, max_tokens=5).tokens
    blocks = len(ids) // 128
    eventually(lambda: js("cache", "flush", "--dry-run", *at(c))["nodes"][0]["flushed"]["host_blocks"] >= blocks,
               10, "blocks sink into host memory")
    dry = js("cache", "flush", "--dry-run", *at(c))["nodes"][0]
    assert dry["node"] == "decode-0" and dry["ok"] and dry["flushed"]["pool_pages"] >= blocks * 8
    assert js("cache", "find", "--text", TEXT, *at(c))["holders"], "a dry run leaves all as it is"
    # One tier only: the pool is empty, host memory still has them.
    assert js("cache", "flush", "--tier", "pool", *at(c))["nodes"][0]["flushed"]["pool_pages"] >= blocks * 8
    assert c.status("decode-0").pages_cached == 0
    h = eventually(lambda: (x := js("cache", "find", "--text", TEXT, *at(c))["holders"]) and
                   x[0]["pool_blocks"] == 0 and x, 10, "the router has heard")
    assert h[0]["host_blocks"] == blocks
    # A request that runs keeps what it holds, and all comes back afterwards.
    streams, _ = running(c)
    out = js("cache", "flush", "decode-0", *at(c))
    assert out["nodes"][0]["flushed"]["host_blocks"] >= blocks
    eventually(lambda: js("cache", "find", "--text", TEXT, *at(c))["holders"] == [], 10, "nothing is left")
    streams[0].cancel()
    assert not [f for f in disk.rglob("*") if f.is_file() and f.stat().st_size > 4096]
    a = c.client.generate(TEXT, max_tokens=5)
    assert a.tokens == want and a.usage.cached_tokens == 0
    assert ctl("cache", "flush", "nobody", *at(c)).returncode == 5


def test_cache_flush_tells_who_failed(cluster):
    c = cluster()
    c.allow("event=node")
    c.procs["prefill-0"].signal(signal.SIGSTOP)
    out = ctl("cache", "flush", "--timeout", "500ms", *at(c), "-o", "json")
    c.procs["prefill-0"].signal(signal.SIGCONT)
    assert out.returncode == 1
    ok = {n["node"]: n["ok"] for n in json.loads(out.stdout)["nodes"]}
    assert ok == {"prefill-0": False, "decode-0": True} and "DEADLINE" in out.stderr


# --- doctor -------------------------------------------------------------------------------------------

def test_doctor(cluster):
    c = cluster()
    sock = c.folder / "redis.sock"
    j = js("doctor", *at(c), "--redis", f"unix:{sock}")
    assert j["failures"] == 0
    by = {}
    for f in j["findings"]:
        by.setdefault(f["check"], []).append(f)
        assert (f["level"] == "ok") == (f["fix"] == ""), f
    for check in ("limit memlock", "limit nofile", "huge pages", "rdma", "gpu", "processors",
                  "clock", "version", "redis", "roles", "membership", "node"):
        assert check in by, check
    assert {f["level"] for f in by["node"]} == {"ok"} and len(by["node"]) == 2
    assert any("PONG" in f["text"] for f in by["redis"])
    # What is wrong is found, with what to do.
    c.allow("event=node", "redis", "event=members")
    c.procs["decode-0"].kill()
    eventually(lambda: c.state_of("decode-0") != "ready", 10, "the router has noticed")
    out = ctl("doctor", *at(c), "--timeout", "2s")
    assert out.returncode == 1
    assert re.search(r"fail +node +decode-0 .*cannot be reached\n +-> ", out.stdout), out.stdout
    assert "no" not in out.stdout.splitlines()[-1] and "failures" in out.stdout.splitlines()[-1]
    c.redis.kill()
    eventually(lambda: any(f["check"] == "redis" and f["level"] == "warn"
                           for f in js("doctor", *at(c), code=1)["findings"]), 15, "Redis is missed")
    j = js("doctor", *at(c), "--redis", f"unix:{sock}", code=1)
    assert any(f["check"] == "redis" and f["level"] == "fail" for f in j["findings"])
    j = js("doctor", "--router", "127.0.0.1:1", code=1)
    assert any(f["check"] == "router" and f["level"] == "fail" and f["fix"] for f in j["findings"])


def test_doctor_sees_stores(cluster):
    c = cluster(kvstore=1)
    j = js("doctor", *at(c))
    assert j["failures"] == 0, j
    assert any("store-0 at" in f["text"] for f in j["findings"] if f["check"] == "node")


# --- fit, bench, simulate -----------------------------------------------------------------------------

def test_fit(models):
    gguf, hf = models("tiny"), models("hf")
    j = js("fit", gguf, "--memory", "1G")
    per = 2 * j["layers"] * j["kv_heads"] * j["head_dim"] * 2
    assert j["kv_bytes_per_token"] == per and 0 < j["weights_bytes"] <= os.path.getsize(gguf)
    assert j["kv_bytes"] == (1 << 30) - j["weights_bytes"] - j["workspace_bytes"]
    for row in j["fits"]:
        assert row["requests"] == j["kv_bytes"] // (-(-row["tokens"] // 16) * 16 * per)
    assert js("fit", gguf, "--memory", "1G", "--kv-dtype", "f32")["kv_bytes_per_token"] == 2 * per
    assert [r["tokens"] for r in js("fit", gguf, "--memory", "1G", "--tokens", 100)["fits"]] == [100]
    assert js("fit", hf, "--memory", "1G")["weights_bytes"] > 0
    assert "REQUESTS AT ONCE" in good("fit", gguf)
    out = ctl("fit", gguf, "--memory", "1K")
    assert out.returncode == 1 and "does not fit" in out.stderr
    assert ctl("fit", "/nowhere/at.gguf").returncode in (1, 5)
    assert ctl("fit", __file__).returncode == 1
    assert ctl("fit", gguf, "--memory", "much").returncode == 2


def fit_of(path):
    """batonctl fit with bounded memory: its exit code and what it says."""
    def bound():
        resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
    return subprocess.run([str(BUILD / "batonctl"), "fit", str(path), "--memory", "1G"], capture_output=True, text=True,
                          timeout=60 * SLOW, preexec_fn=None if SANITIZED else bound)


def refused(path, *words):
    out = fit_of(path)
    assert out.returncode == 1 and out.stdout == "" and out.stderr.startswith("batonctl: "), (path, out)
    assert all(w in out.stderr for w in words), out.stderr


HUGE = (2**31, 2**40, 2**63 - 1, 2**64 - 1)


def test_CLI_01_fit_on_damaged_gguf(models, tmp_path):
    """Counts and lengths beyond the file, and files that end anywhere."""
    good = pathlib.Path(models("tiny")).read_bytes()
    bad = tmp_path / "bad.gguf"

    def put(data, *words):
        bad.write_bytes(data)
        refused(bad, *words)
    for huge in HUGE:
        n = struct.pack("<Q", huge)
        put(good[:8] + n + good[16:], "n_tensors")
        put(good[:16] + n + good[24:], "n_kv")
        put(good[:24] + n + good[32:], "longer than the file")  # length of the first key
    for version in (0, 1, 4, 0x03000000):
        put(good[:4] + struct.pack("<I", version) + good[8:], "version")
    for at in (0, 3, 4, 8, 20, 24, 31, 100, 1000, len(good) // 2, len(good) - 1):
        put(good[:at])
    for seed in range(60):  # eight bytes anywhere in the tables: fit says what it sees, or refuses; it does not fall
        at = random.Random(seed).randrange(24, 4000)
        bad.write_bytes(good[:at] + struct.pack("<Q", HUGE[seed % 4]) + good[at + 8:])
        assert fit_of(bad).returncode in (0, 1), seed
    (tmp_path / "dir.gguf").mkdir()
    assert fit_of(tmp_path / "dir.gguf").returncode == 5  # a directory without a model


def test_CLI_01_fit_on_damaged_directories(models, tmp_path):
    """Headers of safetensors longer than the file, ranges outside of it, shapes whose product is none, and
    configurations with numbers that are not of this world."""
    def copy(**files):
        shutil.rmtree(tmp_path / "m", ignore_errors=True)
        shutil.copytree(models("hf"), tmp_path / "m")
        for name, data in files.items():
            name = {"weights": "model.safetensors", "config": "config.json"}[name]
            (tmp_path / "m" / name).write_bytes(data)
        return tmp_path / "m"
    whole = (pathlib.Path(models("hf")) / "model.safetensors").read_bytes()
    n = struct.unpack("<Q", whole[:8])[0]
    head, data = json.loads(whole[8:8 + n]), whole[8 + n:]
    name = next(k for k in head if k != "__metadata__")
    for huge in HUGE:
        refused(copy(weights=struct.pack("<Q", huge) + whole[8:]), "longer than the file")
    for field, value in (("data_offsets", [0, 2**62]), ("data_offsets", [-1, 5]), ("data_offsets", [5, 1]),
                         ("data_offsets", "x"), ("shape", [2**40, 2**40]), ("shape", [-1, 4]), ("shape", [1] * 100),
                         ("dtype", "F99"), ("dtype", None)):
        changed = json.dumps({**head, name: {**head[name], field: value}}).encode()
        refused(copy(weights=struct.pack("<Q", len(changed)) + changed + data), name)
    for at in (0, 7, 8, 100, 8 + n, len(whole) - 1):
        refused(copy(weights=whole[:at]))
    refused(copy(weights=struct.pack("<Q", 8 * 100000) + b"[" * 800000), "nested")
    config = json.loads((pathlib.Path(models("hf")) / "config.json").read_text())
    for key in ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_size", "vocab_size",
                "intermediate_size", "max_position_embeddings", "head_dim"):
        for value in (0, -1, 2**31, 2**62, 1e300, "many", [], {}):
            if (key, value) == ("head_dim", 0):  # as if it were not there
                continue
            out = fit_of(copy(config=json.dumps({**config, key: value}).encode()))
            assert out.returncode == 1 and out.stderr and out.stdout == "", (key, value, out)
    refused(copy(config=b"{" * 100000))


def test_fit_agrees_with_a_node(cluster):
    c = cluster(prefill=0, role="both")
    j = js("fit", c.model, "--memory", "1G")
    s = c.status("decode-0")
    assert s.pages_total == (64 << 20) // (16 * j["kv_bytes_per_token"])


def test_bench(cluster):
    c = cluster()
    j = js("bench", *at(c), "--requests", 12, "--concurrency", 3, "--max-tokens", 8, "--prompt-tokens", 40)
    assert j["requests"] == 12 and j["failed"] == 0 and j["tokens_per_s"] > 0
    for key in ("first_token_ms", "token_ms", "total_ms"):
        assert 0 < j[key]["p50"] <= j[key]["p90"] <= j[key]["p99"], key
    figures = js("top", "--once", *at(c))["figures"]
    assert figures["tokens"] == 12 * 8 and figures["prompt_tokens"] == 12 * 40
    assert "12 requests, 0 failed" in good("bench", *at(c), "--requests", 12, "--max-tokens", 2)
    out = ctl("bench", *at(c), "--requests", 2, "--prompt-tokens", 100000)
    assert out.returncode == 1 and "INVALID_ARGUMENT" in out.stderr
    assert ctl("bench", "--router", "127.0.0.1:1").returncode == 3
    empty = cluster(prefill=0, decode=0, router_args=["--route.wait=0"])
    out = ctl("bench", *at(empty), "--requests", 3)  # the router answers, but there are no nodes
    assert out.returncode == 1 and "UNAVAILABLE" in out.stderr and "3 requests, 3 failed" in out.stdout, out


def make_trace(path, n=200):
    with open(path, "w") as f:
        for i in range(n):
            head = [i % 5] * 1
            f.write(json.dumps({"timestamp": i * 500, "input_length": 512 * 4,
                                "output_length": 10, "hash_ids": head + [1000 + 3 * i + k for k in range(3)]}) + "\n")


def test_simulate(tmp_path):
    trace = tmp_path / "trace.jsonl"
    make_trace(trace)
    one = js("simulate", "--trace", trace, "--nodes", 4, "--speed", 8000)
    assert one == js("simulate", "--trace", trace, "--nodes", 4, "--speed", 8000), "a run repeats exactly"
    assert one["requests"] == 200 and one["good_percent"] > 99 and one["hit_percent"] > 10
    # The fewest nodes: one less is not enough.
    best = js("simulate", "--trace", trace, "--speed", 1500, "--goal", "2s")
    assert best["nodes"] > 1 and best["good_percent"] >= 99
    fewer = js("simulate", "--trace", trace, "--speed", 1500, "--goal", "2s", "--nodes", best["nodes"] - 1, code=1)
    assert fewer["good_percent"] < 99
    assert "prefill nodes" in good("simulate", "--trace", trace, "--nodes", 4)
    out = ctl("simulate", "--trace", trace, "--speed", 100, "--goal", "1ms")
    assert out.returncode == 1 and "not even" in out.stderr
    trace.write_text("{}\n")
    out = ctl("simulate", "--trace", trace)
    assert out.returncode == 1 and ":1:" in out.stderr
    assert ctl("simulate").returncode == 2


# --- completion, man ----------------------------------------------------------------------------------

def commands():
    """Of the command line itself: names, and the options of each."""
    names = re.findall(r"^  ([a-z]+) +\S", ctl("--help").stdout.split("--version")[0], re.M)
    return {n: set(re.findall(r"(--[a-z-]+)", ctl(n, "--help").stdout.split("\n\n", 2)[-1])) for n in names}


def test_completion():
    table = commands()
    assert {"status", "top", "explain", "cache", "doctor", "fit", "bench", "simulate", "drain"} <= set(table)
    texts = {shell: good("completion", shell) for shell in ("bash", "zsh", "fish")}
    for shell, text in texts.items():
        for name, options in table.items():
            assert name in text, (shell, name)
            for o in options:
                assert (o if shell != "fish" else f"-l {o[2:]}") in text, (shell, name, o)
        if shutil.which(shell):
            assert subprocess.run([shell, "-n"], input=text, text=True).returncode == 0, shell

    def complete(*words):
        script = texts["bash"] + f"\nCOMP_WORDS=({' '.join(words)!s})\nCOMP_CWORD={len(words) - 1}\n" \
            "_batonctl\nprintf '%s\\n' \"${COMPREPLY[@]}\"\n"
        return set(subprocess.run(["bash", "-c", script], capture_output=True, text=True).stdout.split())
    assert set(table) <= complete("batonctl", "''")
    assert complete("batonctl", "expl") == {"explain"}
    for name, options in table.items():
        assert options <= complete("batonctl", name, "--"), name
    assert complete("batonctl", "status", "-o", "js") == {"json"}
    assert complete("batonctl", "cache", "fl") == {"flush"}
    for o in ("--ca", "--key", "--token-file", "--supervisor", "--kubeconfig", "--binary", "--trace"):
        assert complete("batonctl", "scale", o, "/dev/nul") == {"/dev/null"}, o
    assert complete("batonctl", "scale", "--namespace", "/dev/nul") == set()
    assert ctl("completion", "tcsh").returncode == 2


def test_man_page():
    text = good("man")
    assert (BUILD / "batonctl.1").read_text() == text, "what is installed"
    plain = text.replace("\\-", "-")
    for name, options in commands().items():
        section = re.search(rf"^\.SS batonctl {name}\b(.*?)(?=^\.S[SH])", plain, re.M | re.S)
        assert section, name
        for o in options - {"--help"}:
            assert o in section.group(1), (name, o)
        for o, default in re.findall(r"(--[a-z-]+) .*\(default (.+)\)$", ctl(name, "--help").stdout, re.M):
            assert re.search(rf"^\.B .*{o}\b.*\n.*\(default {re.escape(default)}\)\.$", section.group(1), re.M), (name, o)
    assert "(or BATONCTL_TOKEN_FILE)" in plain
    codes = dict(re.findall(r"^  (\d)  (.+)$", ctl("--help").stdout, re.M))
    for code, meaning in codes.items():
        assert f".B {code}\n{meaning}." in plain
    if shutil.which("man"):
        out = subprocess.run(["man", "--warnings", "-E", "UTF-8", "-l", "-Tutf8", "-"], input=text, capture_output=True,
                             text=True)
        assert out.returncode == 0 and out.stderr == "", out.stderr
    readme = (pathlib.Path(ROOT) / "deploy/ctl/README.md").read_text()
    for name in commands():
        assert f"`{name}`" in readme or f"`{name}.c`" in readme or name in readme, name


# --- all of them --------------------------------------------------------------------------------------

def test_CLI_01_exit_codes_and_streams(cluster):
    c = cluster()
    rid = c.client.generate("x", max_tokens=2).stream_id
    calls = {"status": [], "requests": [], "explain": [rid], "top": ["--once"], "cache": []}
    for name, words in calls.items():
        out = ctl(name, *words, "--router", "127.0.0.1:1", "-o", "json")
        assert out.returncode == 3 and out.stdout == "" and out.stderr, name
        assert ctl(name, *words, *at(c), "--colour").returncode == 2
        json.loads(good(name, *words, *at(c), "-o", "json"))
        # A closed pipe is no success.
        p = subprocess.Popen([BUILD / "batonctl", name, *words, *at(c)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        p.stdout.close()
        p.stderr.read()
        assert p.wait(20) != 0, name


def test_CLI_01_without_the_right_token(cluster, tmp_path):
    """401 and 403: one code, nothing on standard output, and what was shown is not repeated."""
    t = Tokens(tmp_path)
    c = cluster(node_args=t.node_args, access=Access(CLIENT, OPERATOR), router_args=t.router_args)
    wrong = tmp_path / "wrong"
    wrong.write_text("a-token-that-nobody-has\n")
    looks = [["status"], ["requests"], ["explain", "x"], ["top", "--once"], ["cache"], ["cache", "find", "--text", "x"],
             ["cache", "flush"], ["canary", "decode", "--version", "2", "--dry-run"], ["rollback", "decode", "--dry-run"]]
    orders = [["cordon", "decode-0"], ["uncordon", "decode-0"], ["drain", "decode-0"], ["drain", "decode-0", "--wait"],
              ["drain", "decode-0", "--dry-run"], ["canary", "decode", "--version", "2"], ["promote", "decode"]]
    for words in (*looks, *orders, ["bench", "--requests", "1"]):
        for token in (None, wrong, t.operators if words[0] == "bench" else t.clients):
            for fmt in ([], ["-o", "json"]):
                out = ctl(*words, *at(c), *fmt, *(["--token-file", token] if token else []))
                assert out.returncode == 6 and out.stdout == "" and out.stderr, (words, token, out)
                assert "nobody-has" not in out.stderr and CLIENT not in out.stderr
    j = js("doctor", *at(c), code=1)
    assert [f["fix"] for f in j["findings"] if f["check"] == "router"] == ["a token of operators (--token-file)"]
    assert not c.client.nodes()["decode-0"].cordoned
    for words in looks:
        if words[0] != "explain":
            assert ctl(*words, *at(c), "--token-file", t.operators).returncode == 0, words
    assert ctl("canary", "decode", "--version", "2", "--dry-run", "--router", "127.0.0.1:1").returncode == 3


def test_every_command_is_quick_when_idle(cluster):
    """100 ms on an idle machine; other work runs beside the tests, so the best of several counts."""
    c = cluster()
    rid = c.client.generate("x", max_tokens=2).stream_id
    for args in (["status"], ["requests"], ["explain", rid], ["top", "--once"], ["cache"],
                 ["cache", "find", "--text", "x"], ["doctor"]):
        took = []
        for _ in range(15):
            t0 = time.monotonic()
            good(*args, *at(c)) if args[0] != "doctor" else ctl(*args, *at(c))
            took.append(time.monotonic() - t0)
            if min(took) < 0.1:
                break
        assert min(took) < 0.1 * SLOW, (args, statistics.median(took))
