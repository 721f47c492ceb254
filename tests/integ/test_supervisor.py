"""The supervisor and the commands of batonctl that change what it runs, on real clusters."""
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import threading
import time

import pytest

from cluster import eventually
from supervised import Supervised
from wire import BUILD


@pytest.fixture
def supervised(models, request):
    started = []

    def start(model="tiny", **kw):
        started.append(Supervised(models(model), **kw))
        return started[-1]

    yield start
    failed = getattr(request.node, "test_failed", True)
    for s in started:
        if failed:
            print(s.events()[-6000:])
        s.finish(check=not failed)


def order(s, verb, node):
    return subprocess.run([BUILD / "batonctl", verb, node, "--router", s.router], capture_output=True).returncode


class Load:
    """Streams that run all the time; every one of them must come whole."""

    def __init__(self, s, n=3, tokens=60):
        self.s, self.stop, self.done, self.errors, self.retries = s, False, 0, [], 0
        self.threads = [threading.Thread(target=self.run, args=(i, tokens)) for i in range(n)]
        for t in self.threads:
            t.start()

    def run(self, i, tokens):
        k = 0
        while not self.stop:
            try:
                a = self.s.client.generate(f"stream {i} part {k}", max_tokens=tokens, ignore_eos=True)
                if len(a.tokens) != tokens:
                    self.errors.append(f"{len(a.tokens)} tokens")
                self.done += 1
                self.retries += a.timing.retries
            except Exception as e:  # noqa: BLE001 - whatever a client would see
                self.errors.append(repr(e))
            k += 1

    def end(self):
        self.stop = True
        for t in self.threads:
            t.join()
        assert not self.errors, self.errors[:3]
        return self.done


def test_scale_up_and_down_under_load_loses_nothing(supervised):
    s = supervised(model="slow")
    load = Load(s)
    out = s.ctl("scale", "prefill=2", "decode=3", "--wait", "-o", "json")
    assert out.returncode == 0, out.stderr
    said = json.loads(out.stdout)
    assert said["roles"] == {"prefill": {"from": 1, "to": 2}, "decode": {"from": 1, "to": 3}} and said["settled"]
    assert s.ready_nodes() == ["decode-0", "decode-1", "decode-2", "prefill-0", "prefill-1"], "the router knows already"
    n = load.done
    eventually(lambda: load.done > n + 3, 60, "streams on all nodes")
    out = s.ctl("scale", "prefill=1", "decode=1", "--wait", "-o", "json")
    assert out.returncode == 0, out.stderr
    assert sorted(json.loads(out.stdout)["stopping"]) == ["decode-1", "decode-2", "prefill-1"]
    assert sorted(s.processes()) == ["decode-0", "prefill-0", "redis", "router"]
    assert {n.name for n in s.client.server().nodes if n.state not in ("lost", "connecting")} == {"decode-0", "prefill-0"}
    n = load.done
    eventually(lambda: load.done > n, 60, "streams go on")
    load.end()
    assert load.retries == 0  # nothing had to be done twice: what went had been emptied
    # Their names are free again, without a cordon.
    assert s.ctl("scale", "decode=2", "--wait").returncode == 0
    eventually(lambda: "decode-1" in s.ready_nodes())
    assert not any(n.cordoned for n in s.client.server().nodes)


def test_CLI_01_scale_waits_until_the_router_knows(supervised):
    """Processes that run are not enough: with Redis stopped no router hears of the new node."""
    s = supervised()
    pid = s.processes()["redis"]["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        out = s.ctl("scale", "decode=2", "--wait", "--timeout", "4s")
        assert out.returncode == 4 and out.stdout == "" and "decode-1 is not known there" in out.stderr, out
    finally:
        os.kill(pid, signal.SIGCONT)
    out = s.ctl("scale", "decode=2", "--wait")
    assert out.returncode == 0 and "decode-1" in s.ready_nodes(), out
    out = s.ctl("scale", "decode=1", "--wait", "--router", "127.0.0.1:1", "--timeout", "10s")
    assert out.returncode == 3 and out.stdout == "", out  # it was named: not to know is a failure


def test_scale_waits_for_long_streams_or_does_nothing(supervised):
    s = supervised(model="slow", decode=1)
    assert s.ctl("scale", "decode=2", "--wait").returncode == 0
    eventually(lambda: "decode-1" in s.ready_nodes())
    assert s.ctl("cordon", "decode-0", "--router", s.router).returncode == 2  # no --supervisor there
    assert order(s, "cordon", "decode-0") == 0
    got = []
    t = threading.Thread(target=lambda: got.append(s.client.generate("long", max_tokens=400, ignore_eos=True)))
    t.start()
    eventually(lambda: s.client.nodes()["decode-1"].requests_running == 1)
    out = s.ctl("scale", "decode=1", "--timeout", "400ms")
    assert out.returncode == 4 and "nothing was scaled" in out.stderr and out.stdout == "", out
    assert s.role("decode")["replicas"] == 2 and not s.client.nodes()["decode-1"].cordoned
    t.join()
    assert len(got[0].tokens) == 400 and got[0].timing.retries == 0


def test_what_an_operator_has_cordoned_stays_so(supervised):
    s = supervised(decode=2)
    assert order(s, "cordon", "decode-1") == 0
    # One that the router has not seen yet goes without a word.
    out = s.ctl("scale", "decode=3", "--wait")
    out = s.ctl("scale", "decode=1", "--wait")
    assert out.returncode == 0 and out.stderr == "", out
    assert s.ctl("scale", "decode=2", "--wait").returncode == 0
    eventually(lambda: "decode-1" in s.ready_nodes())
    assert s.client.nodes()["decode-1"].cordoned and not s.client.nodes()["decode-0"].cordoned
    assert order(s, "uncordon", "decode-1") == 0


def test_a_dry_run_does_nothing(supervised):
    s = supervised(decode=2)
    out = s.ctl("scale", "decode=1", "prefill=2", "--dry-run")
    assert out.returncode == 0 and "would drain and stop decode-1" in out.stdout
    out = s.ctl("flip", "decode-1", "prefill", "--dry-run", "-o", "json")
    assert json.loads(out.stdout) == {"node": "decode-1", "to": "prefill", "dry_run": True}
    assert s.ctl("canary", "decode", "--binary", str(BUILD / "baton-decode"), "--dry-run").returncode == 0
    assert sorted(s.processes()) == ["decode-0", "decode-1", "prefill-0", "redis", "router"]


def test_flip_gives_a_place_to_the_other_role(supervised):
    s = supervised(decode=2)
    load = Load(s, n=2)
    out = s.ctl("flip", "decode-0", "prefill", "--wait")
    assert out.returncode == 0 and out.stdout == "flipped decode-0 to prefill\n", out.stderr
    assert sorted(s.processes()) == ["decode-1", "prefill-0", "prefill-1", "redis", "router"]
    assert s.ready_nodes() == ["decode-1", "prefill-0", "prefill-1"]
    n = load.done
    eventually(lambda: load.done > n, what="streams go on")
    load.end()
    for args, code in ((["decode-9", "prefill"], 5), (["router", "prefill"], 1), (["decode-1", "decode"], 1),
                       (["decode-1", "router"], 2)):
        out = s.ctl("flip", *args)
        assert out.returncode == code and out.stdout == "", (args, out)


def test_canary_promote_and_rollback(supervised, tmp_path):
    s = supervised(decode=2)
    new = tmp_path / "baton-decode-next"
    shutil.copy(BUILD / "baton-decode", new)
    out = s.ctl("canary", "decode", "--binary", str(new), "--version", "2.0", "--percent", "25", "-o", "json")
    assert out.returncode == 0, out.stderr
    assert json.loads(out.stdout) == {"role": "decode", "state": "canary", "dry_run": False, "version": "2.0",
                                      "percent": 25}
    who = [s.client.generate(f"p {i}", max_tokens=2).timing.decode_node for i in range(40)]
    assert who.count("decode-canary-0") == 10, who
    exe = os.readlink(f"/proc/{s.processes()['decode-canary-0']['pid']}/exe")
    assert exe == str(new)
    out = s.ctl("canary", "decode", "--binary", str(new), "--version", "3.0")
    assert out.returncode == 1 and "already" in out.stderr
    assert s.ctl("rollback", "decode", "--wait").returncode == 0
    assert "decode-canary-0" not in s.processes() and s.role("decode-canary") is None
    assert not s.client.server().canaries
    assert set(s.client.generate(f"q {i}", max_tokens=2).timing.decode_node for i in range(8)) <= {"decode-0", "decode-1"}
    assert s.ctl("rollback", "decode").returncode == 5
    # Again, and this time it becomes the version of the role.
    assert s.ctl("canary", "decode", "--binary", str(new), "--version", "2.0").returncode == 0
    load = Load(s, n=2, tokens=20)
    out = s.ctl("promote", "decode", "--wait")
    assert out.returncode == 0, out.stderr
    # --wait: the router has taken note of all of it.
    assert sorted((n.name, n.version) for n in s.client.server().nodes if n.role == "decode" and n.state == "ready") == \
        [("decode-0", "2.0"), ("decode-1", "2.0")]
    load.end()
    assert {os.readlink(f"/proc/{s.processes()[n]['pid']}/exe") for n in ("decode-0", "decode-1")} == {str(new)}


def test_a_canary_that_does_not_start_is_taken_back(supervised, tmp_path):
    s = supervised()
    bad = tmp_path / "bad"
    bad.write_text("#!/bin/sh\nexit 3\n")
    bad.chmod(0o755)
    out = s.ctl("canary", "decode", "--binary", str(bad), "--version", "2.0", "--timeout", "1500ms")
    assert out.returncode == 4 and out.stdout == "" and "taken back" in out.stderr, out
    eventually(lambda: s.role("decode-canary") is None)
    assert s.ctl("canary", "decode", "--binary", "/nowhere/x").returncode == 5
    out = s.ctl("canary", "decode", "--binary", str(BUILD / "baton-decode"))
    assert out.returncode == 1 and "another --version" in out.stderr
    eventually(lambda: s.role("decode-canary") is None)


def test_what_crashes_is_started_again_with_pauses(supervised):
    s = supervised()
    stream = s.client.generate("before", max_tokens=4)
    assert len(stream.tokens) == 4
    old = s.processes()["decode-0"]["pid"]
    os.kill(old, signal.SIGKILL)

    def again():
        p = s.processes()["decode-0"]
        return p["state"] == "ready" and p["pid"] != old and p["restarts"] == 1 and p["exit"] == signal.SIGKILL
    eventually(again, 20, "another process")
    eventually(lambda: "decode-0" in s.ready_nodes())
    assert len(s.client.generate("after", max_tokens=4).tokens) == 4
    # One that cannot start is tried less and less often, and costs the others nothing.
    s.ask(op="canary", role="decode", binary="/bin/false", release="9")
    eventually(lambda: s.processes()["decode-canary-0"]["restarts"] >= 5, 40)
    starts = [line for line in s.events().splitlines() if "name=decode-canary-0" in line and "state=starting" in line]
    times = [float(line.split("T")[1].split("Z")[0].split(":")[2]) for line in starts]
    gaps = [(b - a) % 60 for a, b in zip(times, times[1:])]
    assert max(gaps[3:]) > gaps[0], gaps  # 0.8 or 1.6 s, and 0.1
    assert "decode-0" in s.ready_nodes()
    assert s.ask(op="rollback", role="decode")["ok"]
    eventually(lambda: s.role("decode-canary") is None)


def test_a_supervisor_that_is_killed_leaves_its_processes_and_takes_them_over(supervised):
    s = supervised()
    assert s.ctl("scale", "decode=2", "--wait").returncode == 0
    before = {n: p["pid"] for n, p in s.processes().items()}
    s.p.kill()
    s.p.wait()
    assert len(s.client.generate("nobody watches", max_tokens=4).tokens) == 4
    os.kill(before["decode-1"], signal.SIGKILL)
    s.start()
    after = {n: p["pid"] for n, p in s.processes().items()}
    assert after.keys() == before.keys()
    assert {n: p for n, p in after.items() if n != "decode-1"} == {n: p for n, p in before.items() if n != "decode-1"}
    eventually(lambda: "decode-1" in s.ready_nodes())
    os.kill(after["decode-0"], signal.SIGKILL)  # also those that it has not started are watched
    eventually(lambda: s.processes()["decode-0"]["pid"] not in (0, after["decode-0"]))
    eventually(lambda: "decode-0" in s.ready_nodes())


def test_one_that_does_not_end_is_killed(supervised, tmp_path):
    stubborn = {"name": "stubborn", "replicas": 0, "stop": "200ms",
                "ready": "{run}/{name}.ready",
                "command": ["/bin/sh", "-c", "trap '' TERM; : > {run}/{name}.ready; while :; do sleep 1; done"]}
    s = supervised(extra=[stubborn])
    assert s.ask(op="scale", roles={"stubborn": 1})["ok"]
    eventually(lambda: s.processes().get("stubborn-0", {}).get("state") == "ready")
    pid = s.processes()["stubborn-0"]["pid"]
    assert s.ask(op="scale", roles={"stubborn": 0})["stopping"] == ["stubborn-0"]
    eventually(lambda: "stubborn-0" not in s.processes(), 30, "killed")
    assert f"pid={pid} msg=\"does not end; killed\"" in s.events()


def test_a_second_supervisor_is_refused(supervised):
    s = supervised()
    p = subprocess.run([BUILD / "baton-supervisor", f"--roles={s.folder}/roles.json", f"--run={s.run}"],
                       capture_output=True, text=True, timeout=30)
    assert p.returncode == 2 and "another supervisor" in p.stderr
    assert s.ask(op="status")["ok"]


def test_a_process_that_cannot_start_ends_the_supervisor(models):
    s = Supervised(models("tiny"), wait=False, extra=[{"name": "bad", "command": ["/bin/false"]}])
    try:
        assert s.p.wait(60) == 1
        assert "name=bad" in s.events()
        assert not (s.run / "redis.sock").exists() or subprocess.run(
            ["redis-cli", "-s", str(s.run / "redis.sock"), "ping"], capture_output=True).returncode != 0
    finally:
        s.finish(check=False)


@pytest.mark.parametrize("roles,word", [
    ({"roles": []}, "no roles"), ({"rolls": []}, "rolls"), ({"roles": [{"name": "a"}]}, "no command"),
    ({"roles": [{"command": ["x"]}]}, "no name"), ({"roles": [{"name": "a/b", "command": ["x"]}]}, "name"),
    ({"roles": [{"name": "a", "command": ["x"], "replicas": -1}]}, "replicas"),
    ({"roles": [{"name": "a", "command": ["x"], "stop": "soon"}]}, "stop"),
    ({"roles": [{"name": "a", "command": ["x"], "colour": 1}]}, "colour"),
    ({"roles": [{"name": "a", "command": ["x"]}, {"name": "a", "command": ["x"]}]}, "twice"),
    ({"roles": [{"name": "a", "command": ["x"], "single": True, "replicas": 2}]}, "single"),
])
def test_bad_configurations_are_named(tmp_path, roles, word):
    path = tmp_path / "roles.json"
    path.write_text(json.dumps(roles))
    p = subprocess.run([BUILD / "baton-supervisor", f"--roles={path}", f"--run={tmp_path}/run"], capture_output=True,
                       text=True, timeout=30)
    assert p.returncode == 2 and word in p.stderr, p.stderr


def test_hostile_requests(supervised):
    s = supervised()
    for m in ({}, {"op": 1}, {"op": "fly"}, {"op": "scale"}, {"op": "scale", "roles": {"decode": -1}},
              {"op": "scale", "roles": {"decode": 1, "prefill": 100000}}, {"op": "scale", "roles": {"router": 2}},
              {"op": "scale", "roles": {"nobody": 2}}, {"op": "scale", "roles": [1]}, {"op": "flip"},
              {"op": "canary", "role": "decode"}, {"op": "canary", "role": "decode", "binary": "/bin/true", "replicas": 0}):
        answer = s.ask(**m)
        assert answer["ok"] is False and answer["error"], m
    assert s.ask(op="scale", roles={"decode": 5, "router": 2})["ok"] is False
    assert s.role("decode")["replicas"] == 1  # all or nothing
    for raw in (b"", b"{", b"[1]", b"\xff" * 100, b"[" * 60000, b"{\"op\":\"status\"}" + b" " * 70000):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as k:
            k.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
            k.settimeout(20)
            k.connect(str(s.socket))
            k.send(raw)
            got = k.recv(1 << 17)
            assert got == b"" or json.loads(got)["ok"] is False
    assert s.ask(op="status")["ok"]
    assert os.stat(s.socket).st_mode & 0o777 == 0o600 and os.stat(s.run).st_mode & 0o777 == 0o700


def test_idle_clients_are_closed_and_make_room(supervised):
    """Whoever opens connections and asks nothing keeps batonctl out for client_idle, not for ever."""
    s = supervised(supervisor_args=["--client_idle=1s"])
    held = []
    for _ in range(120):
        k = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        k.connect(str(s.socket))
        k.settimeout(20)
        held.append(k)
    asks = held.pop(50)

    def all_closed():  # one that asks now and then stays
        asks.send(b'{"op": "status"}')
        assert json.loads(asks.recv(1 << 17))["ok"]
        return len(select.select(held, [], [], 0)[0]) == len(held)
    eventually(all_closed, 20, "idle clients are closed")
    for k in held:
        assert k.recv(1) == b""
        k.close()
    asks.close()
    assert s.ctl("scale", "decode=1", "--dry-run").returncode == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to be another user")
def test_another_user_is_refused(supervised):
    s = supervised()
    for d in (s.folder, s.run):
        os.chmod(d, 0o755)
    os.chmod(s.socket, 0o666)  # even where the file would let it
    code = ("import socket,sys\ns=socket.socket(socket.AF_UNIX,socket.SOCK_SEQPACKET)\ns.settimeout(20)\n"
            f"s.connect('{s.socket}')\nprint(s.recv(65536).decode())\n")
    p = subprocess.run(["python3", "-c", code], capture_output=True, text=True, timeout=60, user=65534, group=65534,
                       cwd="/")
    assert json.loads(p.stdout)["code"] == "denied", p
    assert s.ask(op="status")["ok"]


def test_CLI_01_supervisor_commands(supervised, tmp_path):
    s = supervised()
    nowhere = ["--supervisor", str(tmp_path / "none.sock")]
    for verb in (["scale", "decode=2"], ["flip", "decode-0", "prefill"], ["rollback", "decode"], ["promote", "decode"],
                 ["canary", "decode", "--binary", "/bin/true"]):
        for fmt in ([], ["-o", "json"]):
            out = subprocess.run([BUILD / "batonctl", *verb, *fmt, *nowhere], capture_output=True, text=True)
            assert out.returncode == 3 and out.stdout == "" and out.stderr, (verb, out)
    for args, code in ((["scale"], 2), (["scale", "decode"], 2), (["scale", "decode=x"], 2), (["scale", "=1"], 2),
                       (["scale", "decode=1", "decode=2"], 2), (["scale", "nobody=1"], 5), (["scale", "router=2"], 1),
                       (["scale", "decode=1000"], 1), (["canary", "decode"], 2), (["rollback", "nobody"], 5)):
        out = s.ctl(*args)
        assert out.returncode == code and out.stdout == "" and out.stderr, (args, out)
    # The router is gone: nodes drain themselves.
    os.kill(s.processes()["router"]["pid"], signal.SIGSTOP)
    try:
        out = s.ctl("scale", "decode=0", "--router", "127.0.0.1:1")
        assert out.returncode == 0 and "router cannot be asked" in out.stderr, out
        assert "decode-0" not in s.processes()
    finally:
        os.kill(s.processes()["router"]["pid"], signal.SIGCONT)
    # A supervisor that does not answer.
    s.p.send_signal(signal.SIGSTOP)
    try:
        out = s.ctl("scale", "decode=1", "--timeout", "300ms")
        assert out.returncode == 4 and out.stdout == "", out
    finally:
        s.p.send_signal(signal.SIGCONT)


def test_two_orders_in_one_turn(supervised):
    """A flip of a process whose role somebody else has just scaled to nothing."""
    s = supervised()
    s.p.send_signal(signal.SIGSTOP)
    clients = []
    for m in ({"op": "scale", "roles": {"decode": 0}}, {"op": "flip", "name": "decode-0", "to": "prefill"}):
        k = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        k.settimeout(20)
        k.connect(str(s.socket))
        k.send(json.dumps(m).encode())
        clients.append(k)
    s.p.send_signal(signal.SIGCONT)
    first, second = (json.loads(k.recv(1 << 16)) for k in clients)
    for k in clients:
        k.close()
    assert first == {"ok": True, "stopping": ["decode-0"]} and not second["ok"]
    eventually(lambda: sorted(s.processes()) == ["prefill-0", "redis", "router"], 30, "one has ended, none has come")
    assert s.role("decode")["replicas"] == 0 and s.role("prefill")["replicas"] == 1


def test_refusals_of_names_cut_inside_of_a_character(supervised):
    s = supervised()
    for m in ({"op": "scale", "roles": {"x" + "\u00e9" * 60: 1}}, {"op": "flip", "name": "x" + "\u00e9" * 60, "to": "prefill"},
              {"op": "x" + "\u20ac" * 40}):
        answer = s.ask(**m)
        assert not answer["ok"] and answer["error"]
