"""The two commands of README.md, as a newcomer would run them."""
import json
import os
import pathlib
import re
import signal
import subprocess
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]


def test_quickstart_once():
    out = subprocess.run([ROOT / "deploy/quickstart.sh", "--once", "--max-tokens", "24"],
                         capture_output=True, text=True, timeout=900)
    assert out.returncode == 0, out.stdout + out.stderr
    assert len(out.stdout.strip()) > 10, out.stdout
    assert "first answer" in out.stderr


def test_quickstart_with_a_keeper():
    out = subprocess.run([ROOT / "deploy/quickstart.sh", "--once", "--keeper", "--max-tokens", "4"],
                         capture_output=True, text=True, timeout=900)
    assert out.returncode == 0, out.stdout + out.stderr
    assert out.stdout.strip() and "starting the keeper" in out.stderr


def test_quickstart_stays_up_until_interrupted():
    # A run in the background of a shell ignores SIGINT, and so would the script; a terminal's does not.
    p = subprocess.Popen([ROOT / "deploy/quickstart.sh", "--max-tokens", "4"],
                         stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                         preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    lines = []
    try:
        for line in p.stderr:
            lines.append(line)
            if line.startswith("  logs"):
                break
        else:
            raise AssertionError("".join(lines))
        text = "".join(lines)
        address = re.search(r"  router +(127\.0\.0\.1:\d+)", text).group(1)
        time.sleep(0.5)
        assert p.poll() is None
        ask = subprocess.run([ROOT / "build-release/batonctl", "generate", "--router", address,
                              "--prompt", "One two three", "--max-tokens", "4"],
                             capture_output=True, text=True, timeout=60)
        assert ask.returncode == 0, ask.stderr
        assert ask.stdout.strip()
        curl = subprocess.run(["bash", "-c", re.search(r"curl -sS .*", text).group(0)],
                              capture_output=True, text=True, timeout=60)
        assert json.loads(curl.stdout)["choices"][0]["message"]["content"], curl.stdout + curl.stderr
    finally:
        p.send_signal(signal.SIGINT)
        rest = p.communicate(timeout=60)
    assert p.returncode == 130, "".join(lines) + rest[1]


def test_quickstart_names_what_is_wrong():
    out = subprocess.run([ROOT / "deploy/quickstart.sh", "--model", "/nowhere.gguf"],
                         capture_output=True, text=True, timeout=900)
    assert out.returncode != 0
    assert "/nowhere.gguf" in out.stderr
    out = subprocess.run([ROOT / "deploy/quickstart.sh", "--colour"], capture_output=True, text=True,
                         timeout=30)
    assert out.returncode != 0
    assert "--colour" in out.stderr


def test_no_sudo_says_what_is_missing(tmp_path):
    """As a user who may install nothing, on a machine where a package is missing."""
    fake = tmp_path / "bin"
    fake.mkdir()
    for name, text in {"dpkg-query": "#!/bin/sh\nexit 1\n", "sudo": "#!/bin/sh\nexit 1\n",
                       "id": "#!/bin/sh\necho 1000\n"}.items():
        (fake / name).write_text(text)
        (fake / name).chmod(0o755)
    env = dict(os.environ, PATH=f"{fake}:{os.environ['PATH']}")
    out = subprocess.run([ROOT / "deploy/quickstart.sh", "--once"], capture_output=True, text=True,
                         timeout=60, env=env)
    assert out.returncode != 0
    assert "sudo apt-get install" in out.stderr and "libgrpc-dev" in out.stderr
