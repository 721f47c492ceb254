"""A load generator of others, aiperf, against the HTTP port as it comes: every request succeeds, and what it
counts is what the router counts. Needs BATON_TEST_AIPERF, its program; the stage aiperf of tests/run.sh
installs it."""
import json
import os
import re
import subprocess

import pytest

from cluster import Cluster
from test_http import Http

AIPERF = os.environ.get("BATON_TEST_AIPERF", "")
REQUESTS, TOKENS = 120, 24

pytestmark = pytest.mark.skipif(not AIPERF, reason="BATON_TEST_AIPERF names no aiperf")


@pytest.fixture(scope="module")
def served(models, request):
    """The model's own tokenizer.json is what aiperf makes prompts with."""
    c = Cluster(models("hf"), prefill=1, decode=2, redis=False, router_args=["--http.listen=127.0.0.1:0"])
    yield c
    c.finish(failed=request.session.testsfailed > 0)


def profile(h, folder, model, tokenizer, *args):
    # Offline it takes tokenizers from its cache alone: one snapshot, which `main` names.
    cache = folder / "hf/hub/models--local--hf"
    (cache / "snapshots").mkdir(parents=True)
    (cache / "refs").mkdir()
    (cache / "refs/main").write_text("0" * 40)
    (cache / "snapshots" / ("0" * 40)).symlink_to(tokenizer)
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HOME": str(folder),
           "HF_HOME": str(folder / "hf")}
    out = subprocess.run([AIPERF, "profile", "--url", h.url, "--model", model, "--tokenizer", "local/hf",
                          "--request-count", str(REQUESTS), "--concurrency", "8", "--workers-max", "2",
                          "--isl", "80", "--isl-stddev", "30", "--osl", str(TOKENS), "--random-seed", "7",
                          "--extra-inputs", "ignore_eos:true", "--use-server-token-count",
                          "--output-artifact-dir", str(folder), "--ui", "none", *args],
                         capture_output=True, text=True, timeout=400, env=env, cwd=folder)
    assert out.returncode == 0, out.stdout[-4000:] + out.stderr[-4000:]
    return json.loads(next(folder.rglob("profile_export_aiperf.json")).read_text()), [
        json.loads(line) for line in next(folder.rglob("profile_export.jsonl")).read_text().splitlines()]


def counts(h):
    _, text = h.call("GET", "/metrics")
    found = re.findall(r'^baton_router_(requests|tokens|prompt_tokens)_total(?:{outcome="(\w+)"})? (\d+)$',
                       text.decode(), re.M)
    assert len(found) > 6
    return {outcome or name: int(value) for name, outcome, value in found}


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_every_request_of_aiperf_succeeds(served, models, tmp_path, endpoint, stream):
    h = Http(served)
    model = h.call("GET", "/v1/models")[1]["data"][0]["id"]
    before = counts(h)
    args = ["--endpoint-type", endpoint, *(["--streaming"] if stream else [])]
    whole, records = profile(h, tmp_path, model, models("hf"), *args)
    assert whole["is_complete"] and not whole["was_cancelled"] and whole["error_summary"] == []
    assert whole["request_count"]["avg"] == REQUESTS and whole.get("error_request_count", {"avg": 0})["avg"] == 0
    assert len(records) == REQUESTS and not any(r.get("error") for r in records)
    got = [{k: r["metrics"][f"usage_{k}_tokens"]["value"] for k in ("prompt", "completion")} for r in records]
    assert {g["completion"] for g in got} == {TOKENS}
    assert all(("time_to_first_token" in r["metrics"]) == stream for r in records)
    after = {k: v - before[k] for k, v in counts(h).items()}
    assert after.pop("ok") == REQUESTS
    assert after.pop("tokens") == REQUESTS * TOKENS == whole["total_output_tokens"]["avg"]
    assert after.pop("prompt_tokens") == sum(g["prompt"] for g in got) == whole["total_isl"]["avg"]
    assert not any(after.values()), after
