#!/usr/bin/env python3
"""Checks what a compiler does not: layers, sizes, banned calls, file maps, scripts, formatting.

Usage: lint.py CHECK   with CHECK one of layers, sizes, banned, filemaps, scripts, format, all.
Prints one line per finding and exits 1 if there is any.
"""
import os
import re
import shutil
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

# Layer -> layers it may include. A longer prefix wins.
LAYERS = {
    "common": {"common"},
    "proto": {"common", "proto"},
    "kvstore": {"common", "proto", "kvstore"},
    "kernels": {"common", "proto", "kvstore", "kernels"},
    "prefill": {"common", "proto", "kvstore", "kernels", "prefill"},
    "decode": {"common", "proto", "kvstore", "kernels", "decode"},
    "router": {"common", "proto", "kvstore/block", "router"},
    "deploy": {"common", "proto", "router/sim", "deploy"},
}
# Header -> the only folder that may include it.
OWNERS = [
    (re.compile(r"grpc/"), "common/rpc"),
    (re.compile(r"(ucp|ucs|uct)/"), "common/net"),
    (re.compile(r"hiredis/"), "common/cluster"),
    (re.compile(r"cuda|cublas|nccl"), "kernels/cuda"),
]
BANNED = re.compile(
    r"\b(strcpy|strcat|sprintf|vsprintf|gets|atoi|atol|atof|strtok|alloca|tmpnam)\s*\("
)
FILE_LIMIT, FILE_NOTE = 1200, 800
FUNCTION_LIMIT = 120


def tracked(*suffixes):
    out = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT,
                         capture_output=True, text=True)
    if out.returncode == 0:
        files = out.stdout.split("\n")
    else:  # a source archive without git
        files = [os.path.relpath(os.path.join(d, f), ROOT)
                 for d, _, fs in os.walk(ROOT) for f in fs
                 if not os.path.relpath(d, ROOT).startswith("build")]
    return sorted(f for f in files if f.endswith(suffixes) and os.path.exists(os.path.join(ROOT, f)))


def lines(path):
    with open(os.path.join(ROOT, path), encoding="utf-8") as f:
        return f.read().split("\n")


def under(path, folder):
    return path == folder or path.startswith(folder + "/")


def check_layers():
    for path in tracked(".c", ".h", ".cu"):
        layer = path.split("/")[0]
        for n, line in enumerate(lines(path), 1):
            m = re.match(r'\s*#\s*include\s*([<"])([^>"]+)[>"]', line)
            if not m:
                continue
            inc = m.group(2)
            for pattern, owner in OWNERS:
                if m.group(1) == "<" and pattern.match(inc) and not under(path, owner):
                    if layer != "tests":
                        yield f"{path}:{n}: <{inc}> may be included in {owner} only"
            if m.group(1) == '"' and layer in LAYERS and "/" in inc:
                if inc.split("/")[0] not in LAYERS and not inc.startswith("tests/"):
                    continue
                if not any(under(inc, ok) for ok in LAYERS[layer]):
                    yield f"{path}:{n}: layer {layer} may not include {inc}"
            if inc.endswith("_int.h") and not under(path, os.path.dirname(inc)):
                yield f"{path}:{n}: {inc} is private to its folder and those below it"


def check_sizes():
    for path in tracked(".c", ".h", ".cu", ".py"):
        text = lines(path)
        if len(text) > FILE_LIMIT:
            yield f"{path}: {len(text)} lines, at most {FILE_LIMIT}"
        if not path.endswith((".c", ".cu")):
            continue
        start = None
        for n, line in enumerate(text, 1):
            if line == "{":
                start = n
            elif line == "}" and start:
                if n - start > FUNCTION_LIMIT and "long:" not in "".join(text[max(0, start - 8):start]):
                    yield f"{path}:{start}: function of {n - start} lines, at most {FUNCTION_LIMIT}"
                start = None


def check_banned():
    for path in tracked(".c", ".h", ".cu"):
        for n, line in enumerate(lines(path), 1):
            code = re.sub(r'"(\\.|[^"\\])*"', '""', line.split("//")[0])
            m = BANNED.search(code)
            if m and not code.lstrip().startswith("*"):
                yield f"{path}:{n}: {m.group(1)} is banned"


def check_filemaps():
    """Every .c and .h below a folder with a README that has a file map is named in it."""
    for readme in tracked("README.md"):
        folder = os.path.dirname(readme)
        text = "\n".join(lines(readme))
        if not folder or "File map" not in text:
            continue
        for path in tracked(".c", ".h", ".cu"):
            if not under(path, folder):
                continue
            deeper = os.path.dirname(path)
            while deeper != folder and not os.path.exists(os.path.join(ROOT, deeper, "README.md")):
                deeper = os.path.dirname(deeper)
            stem = os.path.splitext(os.path.basename(path))[0]
            if deeper == folder and not re.search(rf"\b{re.escape(stem)}\b", text):
                yield f"{readme}: file map does not name {path}"


def check_scripts():
    """Shell scripts and .ci/run that name their interpreter can be executed."""
    for path in [*tracked(".sh"), ".ci/run", "tests/bench/run"]:
        full = os.path.join(ROOT, path)
        with open(full, "rb") as f:
            if f.read(2) == b"#!" and not os.access(full, os.X_OK):
                yield f"{path}: not executable (chmod +x)"


def check_format():
    tool = shutil.which("clang-format-14") or shutil.which("clang-format")
    if not tool:
        yield "clang-format is not installed"
        return
    files = tracked(".c", ".h")
    for i in range(0, len(files), 50):
        out = subprocess.run([tool, "--dry-run", *files[i:i + 50]], cwd=ROOT,
                             capture_output=True, text=True)
        seen = set()
        for line in out.stderr.split("\n"):
            m = re.match(r"([^:]+):(\d+):\d+: warning: code should be clang-formatted", line)
            if m and m.group(1) not in seen:
                seen.add(m.group(1))
                yield f"{m.group(1)}:{m.group(2)}: not formatted (clang-format -i)"
        if out.returncode != 0:
            yield out.stderr.strip().split("\n")[0]


CHECKS = {
    "layers": check_layers,
    "sizes": check_sizes,
    "banned": check_banned,
    "filemaps": check_filemaps,
    "scripts": check_scripts,
    "format": check_format,
}


def main():
    if len(sys.argv) != 2 or sys.argv[1] not in [*CHECKS, "all"]:
        sys.exit(__doc__)
    names = list(CHECKS) if sys.argv[1] == "all" else [sys.argv[1]]
    found = 0
    for name in names:
        for finding in CHECKS[name]():
            print(finding)
            found += 1
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
