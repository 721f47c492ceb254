"""batonctl against a real cluster and against none."""
import json
import signal
import subprocess

from cluster import eventually
from wire import BUILD


def ctl(*args):
    return subprocess.run([BUILD / "batonctl", *args], capture_output=True, text=True, timeout=60)


def test_generate_and_status(cluster):
    c = cluster()
    at = ["--router", c.procs["router"].address]
    out = ctl("generate", *at, "--prompt", "The lamp keeper", "--max-tokens", "6")
    assert out.returncode == 0, out.stderr
    want = c.client.generate("The lamp keeper", max_tokens=6, skip_special=True).text.decode()
    assert out.stdout == want + "\n" and out.stderr == ""
    out = ctl("generate", *at, "--chat", "--prompt", "hello", "--max-tokens", "6")
    want = c.client.generate(chat=[("user", "hello")], max_tokens=6, skip_special=True).text.decode()
    assert out.returncode == 0 and out.stdout == want + "\n"
    out = ctl("status", *at)
    assert out.returncode == 0
    for word in ("prefill-0", "decode-0", "ready", "live", c.client.model().digest[:16]):
        assert word in out.stdout, out.stdout


def test_node(cluster):
    c = cluster()
    c.client.generate("The lamp keeper", max_tokens=6)
    out = ctl("node", "--node", c.procs["prefill-0"].address)
    assert out.returncode == 0, out.stderr
    said = dict(line.split(None, 1) if " " in line.strip() else (line, "") for line in out.stdout.splitlines())
    s = c.status("prefill-0")
    assert said["name"] == "prefill-0" and int(said["tokens_computed"]) == s.tokens_computed > 0
    assert int(said["incarnation"], 16) == s.incarnation and int(said["pages_total"]) == s.pages_total


def test_errors(cluster):
    c = cluster(prefill=0, decode=0, router_args=["--route.wait=0"])
    at = ["--router", c.procs["router"].address]
    out = ctl("generate", *at, "--prompt", "x")
    assert out.returncode == 1 and "UNAVAILABLE" in out.stderr and "decode" in out.stderr
    out = ctl("generate", *at, "--prompt", "")
    assert out.returncode == 1 and "INVALID_ARGUMENT" in out.stderr
    out = ctl("status", "--router", "127.0.0.1:1")
    assert out.returncode == 3 and "UNAVAILABLE" in out.stderr and out.stdout == ""


def test_usage():
    out = ctl("--help")
    assert out.returncode == 0 and "generate" in out.stdout and "exit codes" in out.stdout
    out = ctl("status", "--help")
    assert out.returncode == 0 and "--router ADDRESS" in out.stdout and "--prompt" not in out.stdout
    assert "0." in ctl("--version").stdout
    for args in ([], ["fly"], ["generate"], ["generate", "--prompt"], ["status", "--colour"], ["node"],
                 ["generate", "--prompt", "x", "--max-tokens", "many"], ["status", "--prompt", "x"], ["status", "x"],
                 ["status", "--router", ""], ["status", "--router", "here"], ["status", "--router", "a:99999"],
                 ["status", "--router", "unix:b"], ["node", "--node="], ["status", "--timeout=soon"], ["status", "--router", "a:1", "--router", "b:1"]):
        out = ctl(*args)
        assert out.returncode == 2 and "usage" in out.stderr and out.stdout == "", args


def test_CLI_01_an_answer_that_takes_too_long_or_that_nobody_reads(cluster):
    c = cluster(model="slow", prefill=0, role="both", pool="128M")
    c.allow("from=ready to=lost")
    ask = ["generate", "--router", c.procs["router"].address, "--prompt", "x", "--max-tokens", "400"]
    with open("/dev/full", "w") as full:
        p = subprocess.run([BUILD / "batonctl", *ask], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert p.returncode == 1 and "write" in p.stderr
    c.procs["decode-0"].signal(signal.SIGSTOP)
    out = ctl(*ask, "--timeout", "500ms")
    c.procs["decode-0"].signal(signal.SIGCONT)
    assert out.returncode == 4 and "DEADLINE_EXCEEDED" in out.stderr
    # Neither goes on to be computed.
    lines = eventually(lambda: (x := (c.folder / "router.access").read_text().splitlines()) and len(x) == 2 and x, 10, "lines")
    assert all(json.loads(x)["status"] != "OK" for x in lines), lines


def test_CLI_01_what_cannot_be_written_is_no_success(cluster):
    c = cluster()
    with open("/dev/full", "w") as full:
        p = subprocess.run([BUILD / "batonctl", "status", "--router", c.procs["router"].address], stdout=full,
                           stderr=subprocess.PIPE, text=True, timeout=60)
    assert p.returncode == 1 and "write" in p.stderr
