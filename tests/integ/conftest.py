"""Fixtures: tiny models, clusters of real processes, the real model where there is one."""
import os
import pathlib
import subprocess
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))

from cluster import DEVICE, Cluster  # noqa: E402
from wire import ROOT  # noqa: E402


def pytest_configure(config):
    config.addinivalue_line("markers", "sanitize: also run with sanitizers")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    if call.when == "call":
        item.test_failed = outcome.get_result().failed


def make_model(out, *args):
    subprocess.run([sys.executable, ROOT / "tests/tools/mkmodel.py", "--out", out, *args], check=True)
    return out


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Tiny models by name, made when first asked for."""
    folder = tmp_path_factory.mktemp("models")
    kinds = {
        "tiny": ("tiny.gguf",),
        "other": ("other.gguf", "--seed", "2"),
        "short": ("short.gguf", "--ctx", "64"),
        "hf": ("hf", "--arch", "qwen3", "--dtype", "bf16"),
        "slow": ("slow.gguf", "--layers", "8", "--d-model", "256", "--ff", "1024", "--heads", "8",
                 "--kv-heads", "8"),
    }
    if DEVICE != "cpu":  # heads that the attention kernels know
        fit = ("--d-model", "256", "--head-dim", "64", "--dtype", "bf16")
        kinds = {k: (*v, *fit) for k, v in kinds.items()}
    made = {}

    def get(name):
        if name not in made:
            made[name] = make_model(folder / kinds[name][0], *kinds[name][1:])
        return made[name]

    return get


@pytest.fixture
def cluster(models, request):
    """cluster(prefill=1, decode=1, redis=True, model="tiny", ...): started, and checked at the end."""
    started = []

    def start(model="tiny", **kw):
        path = model if os.path.sep in str(model) else models(model)
        started.append(Cluster(path, **kw))
        return started[-1]

    yield start
    for c in started:
        c.finish(failed=getattr(request.node, "test_failed", True))


@pytest.fixture(scope="session")
def real_model():
    path = os.environ.get("BATON_TEST_MODEL", "")
    if not os.path.exists(path):
        pytest.skip("BATON_TEST_MODEL names no model")
    return path
