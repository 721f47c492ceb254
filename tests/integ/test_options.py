"""Options that cannot be meant: a clear end at the start, with the fields and both values named."""
import os
import subprocess

import pytest

from cluster import clean_env
from wire import BUILD

NODE = ["--redis.address=", "--engine.pool_bytes=8M", "--engine.threads=1"]


def start(binary, *args):
    return subprocess.run([str(BUILD / binary), "--die_with_parent=true", *args], capture_output=True, text=True,
                          timeout=60, env=clean_env(), stdin=subprocess.DEVNULL)


def refused(binary, args, *says):
    p = start(binary, *args)
    assert p.returncode == 2, p.stderr[-1000:]
    last = p.stderr.strip().split("\n")[-1]
    assert "level=error" in last and all(s in last for s in says), last


@pytest.mark.parametrize("binary", ["baton-decode", "baton-prefill", "baton-kvstore"])
def test_tiers(models, tmp_path, binary):
    common = [f"--model={models('tiny')}", *NODE] if binary != "baton-kvstore" else ["--redis.address="]
    disk = f"--tier.disk_path={tmp_path}/d"
    refused(binary, [*common, disk, "--tier.host_bytes=0"], f"tier.disk_path = {tmp_path}/d", "tier.host_bytes = 0")
    refused(binary, [*common, disk, "--tier.disk_bytes=0"], f"tier.disk_path = {tmp_path}/d", "tier.disk_bytes = 0")
    refused(binary, [*common, "--tier.host_bytes=1000T"], "tier.host_bytes = 1099511627776000", "memory")
    assert not os.path.exists(tmp_path / "d")


@pytest.mark.parametrize("without, says", [
    ([], "redis.address"),
    (["--redis.address=127.0.0.1:1", "--tier.host_bytes=0"], "tier.host_bytes = 0"),
    (["--redis.address=127.0.0.1:1", "--engine.prefix_cache=off"], "engine.prefix_cache = off")])
def test_sharing_without_what_it_needs(models, without, says):
    args = [a for a in NODE if not any(w.startswith(a.split("=")[0] + "=") for w in without)]
    refused("baton-decode", [f"--model={models('tiny')}", *args, "--store.enabled=on", *without], "store.enabled = on",
            says)


def test_certificates_without_tls(models):
    refused("baton-kvstore", ["--redis.address=127.0.0.1:6379", "--redis.tls_ca=/some/ca.pem"],
            "redis.tls_ca = /some/ca.pem", "redis.address = 127.0.0.1:6379")


def test_keeper_removes_no_file_of_others(tmp_path):
    mine = tmp_path / "mine"
    mine.write_text("precious")
    refused("baton-keeper", [f"--socket={mine}"], str(mine))
    assert mine.read_text() == "precious"
