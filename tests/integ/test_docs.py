"""Commands in README, deploy/docs and proto/README: run as they stand against a small cluster, or, where a
comment says why not, checked against what the programs know. Options named in the text are checked too.

In the pages: a ```bash block is run; `<!-- not run: WHY -->` before it makes it checked only; `<!-- file: NAME -->`
before any block makes the test write it. Blocks of a page share one shell, in an empty folder with the tree's
folders in it. test_docs_security.py runs deploy/docs/security.md."""
import functools
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tempfile

import pytest

from cluster import DEVICE, SLOW, clean_env
from ports import free_ports
from wire import BUILD, ROOT

OPERATING = "deploy/docs/operating.md"
PAGES = ["README.md", "proto/README.md", *sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("deploy/docs/*.md"))]
PROGRAMS = ["router", "prefill", "decode", "kvstore", "keeper", "supervisor"]
MARKS = re.compile(r"(?:<!-- (not run|file): (.*?) -->\n)?```(\w*)\n(.*?)\n```", re.S)


class Block:
    def __init__(self, mark, value, lang, text):
        self.lang, self.text = lang, text
        self.file = value if mark == "file" else None
        self.run = lang == "bash" and mark != "not run"


@functools.cache
def blocks(page):
    return [Block(*m.groups()) for m in MARKS.finditer((ROOT / page).read_text())]


@functools.cache
def output(*argv):
    r = subprocess.run([str(BUILD / argv[0]), *argv[1:]], capture_output=True, text=True, env=clean_env())
    return r.stdout if r.returncode == 0 else ""


@functools.cache
def keys(program):
    return set(re.findall(r"^(?:# )?([a-z_.]+) =", output(program, "--help-config"), re.M))


def all_keys():
    return set().union(*(keys(f"baton-{p}") for p in PROGRAMS))


def commands(text):
    """Command lines of a block, whole, without comments."""
    for line in re.sub(r"\\\n", " ", text).split("\n"):
        try:
            words = shlex.split(line, comments=True)
        except ValueError:  # a quotation over several lines
            continue
        while words:
            n = next((i for i, w in enumerate(words) if w in ("|", "||", "&&", "&", ";")), len(words))
            if words[:n]:
                yield words[:n]
            words = words[n + 1:]


def test_ARCHITECTURE_names_every_thread():
    text = (ROOT / "ARCHITECTURE.md").read_text()
    text = text[text.index("## Threads of a node"):text.index("## The life of a request")]
    named = set(re.findall(r"[a-z-]+", text))
    started = set()
    for folder in ("common", "kvstore", "kernels", "router", "prefill", "decode"):
        for path in (ROOT / folder).rglob("*.c"):
            started |= set(re.findall(r'bt_thread_start\(&[^,]+,\s*"([^"]+)"', path.read_text()))
    assert len(started) > 15 and started <= named, started - named


def wrong(words):
    """What is not right about a command line, or None."""
    name = os.path.basename(words[0])
    options = [w.split("=")[0] for w in words[1:] if re.match(r"--?[a-z]", w)]
    if name == "batonctl" and len(words) > 1 and re.match(r"[a-z]", words[1]):
        text = output("batonctl", words[1], "--help")
        if not text:
            return f"batonctl has no command {words[1]}"
        known = set(re.findall(r"(--[a-z-]+|-[a-z])\b", text))
    elif name.startswith("baton-"):
        if name[6:] not in PROGRAMS:
            return f"there is no {name}"
        known = {f"--{k}" for k in keys(name)} | {"--help", "--help-config", "--version", "--config"}
    elif words[0].startswith(("deploy/", "tests/")):
        text = (ROOT / words[0]).read_text() if (ROOT / words[0]).exists() else ""
        if not text:
            return f"there is no {words[0]}"
        known = set(re.findall(r"--[a-z-]+", text))
    else:
        return None
    unknown = [o for o in options if o not in known]
    return f"{' '.join(words[:2])} does not know {unknown}" if unknown else None


def test_the_checks_see_what_is_wrong():
    assert not wrong(["batonctl", "scale", "decode=2", "--wait"])
    assert wrong(["batonctl", "scales"]) and wrong(["batonctl", "scale", "--waits"])
    assert not wrong(["baton-decode", "--engine.threads=1"]) and wrong(["baton-decode", "--engine.thread=1"])
    assert wrong(["baton-encode"]) and wrong(["deploy/slowstart.sh"]) and wrong(["tests/run.sh", "--stages"])
    assert list(commands("a b \\\n  c # d\ne 'f | g' | h &")) == [["a", "b", "c"], ["e", "f | g"], ["h"]]


@pytest.mark.parametrize("page", PAGES)
def test_commands_and_options_exist(page):
    text = (ROOT / page).read_text()
    bad = [w for b in blocks(page) if b.lang == "bash" for w in map(wrong, commands(b.text)) if w]
    spans = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.S))
    for s in spans:
        if re.match(r"(batonctl|baton-\w+|deploy/\S+\.sh|tests/\S+/run|tests/run\.sh) ", s):
            bad += filter(None, [wrong(s.split())])
    # a.b or a.b=c where a is how options begin
    first = {k.split(".")[0] for k in all_keys() if "." in k}
    for s in spans:
        m = re.fullmatch(r"(?:--)?(([a-z]+)(?:\.[a-z_]+)+)(?:=.*)?", s)
        if m and m[2] in first and m[1] not in all_keys() and not re.search(r"\.(c|h|md|proto)$", m[1]):
            bad.append(f"no option {m[1]}")
    metrics = set(re.findall(r'"((?:baton|vllm:)[a-z_:]+)', "".join(
        p.read_text() for p in (ROOT / "router/http").glob("*.c"))))
    bad += [f"no metric {m}" for m in re.findall(r"\b(?:baton_router_|vllm:)[a-z_]+\b", text)
            if not any(k.startswith(m) for k in metrics)]
    assert not bad, "\n".join(bad)


@pytest.mark.parametrize("section, word, folders", [
    ("A model", r"(?i)arch_qwen3|\bqwen3\b", ("common/file", "kernels", "tests/tools")),
    ("An op", r"(?i)\w+_gather\b|gather,", ("kernels/core", "kernels/cpu/ref", "kernels/ops.def", "tests/ops")),
    ("A routing policy", r"(?i)route_longest_prefix|longest_prefix", ("router",))])
def test_extending_names_every_place(section, word, folders):
    """What the newest of its kind stands in, the page sends the next one to."""
    page = (ROOT / "deploy/docs/extending.md").read_text().split(f"## {section}\n")[1].split("\n## ")[0]
    files = [p for f in folders for p in ([ROOT / f] if (ROOT / f).is_file() else sorted((ROOT / f).rglob("*")))
             if p.is_file() and p.suffix in (".c", ".h", ".def", ".py", ".build") and "cuda" not in p.parts]
    missing = [str(p.relative_to(ROOT)) for p in files if re.search(word, re.sub(r"/\*.*?\*/", "", p.read_text(), flags=re.S))
               and not any(f"`{q.relative_to(ROOT)}{end}`" in page for q in (p, *p.parents) if ROOT in q.parents
                           for end in ("", "/"))]
    assert files and not missing, missing


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", (ROOT / page).read_text(), flags=re.S)
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)
    assert [x for x in links if not (ROOT / page).parent.joinpath(x).exists()] == []


class Shell:
    """Runs blocks in a folder that looks like the tree, with ports and model of this run."""

    def __init__(self, model):
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="baton-docs."))
        for name in ("deploy", "proto", "tests"):
            (self.folder / name).symlink_to(ROOT / name)
        known = ["127.0.0.1:50050", "127.0.0.1:8000", "127.0.0.1:8100", "127.0.0.1:8080", "127.0.0.1:6379"]
        self.names = dict(zip(known, (f"127.0.0.1:{p}" for p in free_ports(len(known)))))
        self.names["/models/model.gguf"] = str(model)

    def here(self, text):
        for a, b in self.names.items():
            text = text.replace(a, b)
        # Without --router the default is called: that address stands for it.
        return re.sub(r"^batonctl (status|generate)(?!.*--router)", rf"\g<0> --router {self.names['127.0.0.1:50050']}",
                      text, flags=re.M)

    def script(self, page, keep=lambda b: True):
        parts = []
        for b in filter(keep, blocks(page)):
            if b.file:
                (self.folder / b.file).write_text(self.here(b.text) + "\n")
            elif b.run:
                parts.append(self.here(b.text))
        return parts

    def run(self, parts):
        tools = os.path.dirname(sys.executable)
        env = {**clean_env(), "PATH": f"{BUILD}:{tools}:{os.environ['PATH']}"}
        redis = self.names["127.0.0.1:6379"].split(":")[1]
        head = ["set -euo pipefail", "set -m", "set -x", "trap 'kill $(jobs -p) 2>/dev/null || :; wait' EXIT"]
        if any(self.names["127.0.0.1:6379"] in p for p in parts):
            head.append(f"redis-server --port {redis} --save '' >redis.log &")
        out = subprocess.run(["timeout", str(240 * SLOW), "bash", "-c", "\n".join([*head, *parts])], cwd=self.folder,
                             env=env, text=True, capture_output=True)
        logs = "".join(f"--- {p.name}\n{p.read_text(errors='replace')[-1500:]}"
                       for p in [*self.folder.glob("*.log"), *self.folder.glob("run/*.log")])
        assert out.returncode == 0, out.stdout[-3000:] + out.stderr[-5000:] + logs
        return out.stdout


@pytest.fixture
def shell(models):
    if DEVICE != "cpu":
        pytest.skip("pages are run on the CPU")
    s = Shell(models("tiny"))
    yield s
    shutil.rmtree(s.folder)


def cluster_of_operating(shell):
    """The cluster that operating.md starts, for the pages that call one."""
    return shell.script(OPERATING)[:1]


def test_operating(shell):
    out = shell.run(shell.script(OPERATING))
    assert "flipped decode-1 to prefill" in out and "vllm:num_requests" in out


@pytest.mark.parametrize("page", ["README.md", "deploy/docs/sizing.md"])
def test_pages_that_call_a_cluster(shell, page):
    parts = shell.script(page)
    assert parts
    shell.run([*cluster_of_operating(shell), *parts])


def test_examples_in_python_and_c(shell):
    out = shell.run([*cluster_of_operating(shell), *shell.script("proto/README.md")])
    assert re.search(r"\d+ tokens, \d\.\d+ s to the first one", out) and "status 0" in out
    assert "baton.v1.Baton" in out and '"SERVING"' in out and "vllm:kv_cache_usage_perc" in out


@pytest.mark.parametrize("page", [p for p in PAGES if p.startswith("deploy/docs")
                                  and p not in (OPERATING, "deploy/docs/sizing.md", "deploy/docs/security.md")])
def test_pages_without_a_cluster(shell, page):
    parts = shell.script(page)
    if parts:
        shell.run(parts)
