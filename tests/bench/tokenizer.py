"""Time of tokenizing about 4,000 tokens of English, code and Chinese, beside the `tokenizers` library
on the same text and vocabulary, by turns, one thread each, in processor time. The ids must be equal.

    tokenizer.py --model FILE [--runs N] [--json]

The library keeps words it has seen; `fresh` gives it and us a new text every time, `again` the same.
"""
import argparse
import json
import os
import pathlib
import random
import statistics
import struct
import subprocess
import sys
import time

os.environ["TOKENIZERS_PARALLELISM"] = "false"
ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/tools"))

import tok_ref  # noqa: E402
import tokenizers  # noqa: E402

TOKENS = 4000
SUBJECTS = "我们 这位老师 昨天来的客人 住在河边的孩子 新来的工程师 那家公司 我的朋友 隔壁的老人 火车上的旅客 研究人员".split()
TIMES = "上个星期 每天早上 去年冬天 刚才 在会议结束以后 下雨的时候 从那以后 到了晚上 不久以前 春节期间".split()
VERBS = "讨论了 忘记了 重新整理了 仔细检查过 终于找到了 打算出售 已经完成 一直在寻找 拒绝接受 画出了".split()
OBJECTS = "一份很长的报告 城里最老的地图 那台坏掉的机器 三本关于历史的书 新的计算方法 一张没有寄出的信 今年的全部计划 山上的小路 所有人的建议 两千个苹果".split()


class Ours:
    def __init__(self, model):
        cmd = [str(tok_ref.build_folder() / "tests/tok_dump"), model, "time"]
        self.run = subprocess.Popen(cmd, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def encode(self, text):
        data = text.encode()
        self.run.stdin.write(struct.pack("<I", len(data)) + data)
        self.run.stdin.flush()
        ns, n = struct.unpack("<QI", self.run.stdout.read(12))
        return ns, list(struct.unpack(f"<{n}I", self.run.stdout.read(4 * n)))


class Theirs:
    def __init__(self, model):
        self.tok = tok_ref.from_gguf(tok_ref.gguf_metadata(model), "smollm")

    def encode(self, text):
        begin = time.thread_time_ns()
        e = self.tok.encode_batch_fast([text], add_special_tokens=False)  # without offsets: the faster call
        return time.thread_time_ns() - begin, e[0].ids


def lines_of(pattern):
    out = []
    for p in sorted(ROOT.glob(pattern)):
        out += p.read_text().splitlines(keepends=True)
    return out


def english(rng):
    paragraphs = [line for line in lines_of("**/*.md") if len(line) > 60 and "|" not in line]
    return lambda: rng.choice(paragraphs)


def code(rng):
    lines = lines_of("common/**/*.c") + lines_of("kernels/**/*.c")

    def piece():
        at = rng.randrange(len(lines) - 20)
        return "".join(lines[at:at + 20])
    return piece


def chinese(rng):
    def piece():
        s = rng.choice(TIMES) + rng.choice(SUBJECTS) + rng.choice(VERBS) + rng.choice(OBJECTS)
        return s + rng.choice(["，", "。", "；", "。\n"])
    return piece


def text_of(piece, theirs):
    text = ""
    while len(theirs.encode(text)[1]) < TOKENS:
        for _ in range(40):
            text += piece()
    while len(theirs.encode(text)[1]) > TOKENS * 1.02:
        text = text[:int(len(text) * 0.98)]
    return text


def measure(name, texts, ours, theirs):
    """Medians in ns a token: ours, theirs."""
    a, b = [], []
    for text in texts:
        x, ids = ours.encode(text)
        y, same = theirs.encode(text)
        if ids != same:
            sys.exit(f"{name}: ids differ")
        a.append(x / len(ids))
        b.append(y / len(ids))
    return statistics.median(a), statistics.median(b)


def report(a, name, ours, theirs):
    peer = f"tokenizers {tokenizers.__version__}"
    if a.json:
        print(json.dumps({"bench": "tokenizer", "case": name, "metric": "ns_per_token", "value": round(ours, 1),
                          "unit": "ns", "peer": peer, "peer_value": round(theirs, 1),
                          "peer_ratio": round(theirs / ours, 3)}), flush=True)
    else:
        print(f"tokenizer  {name:14} {ours:7.1f} ns a token, {peer} {theirs:7.1f}, ratio {theirs / ours:.2f}", flush=True)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--model", required=True)
    p.add_argument("--runs", type=int, default=15)
    p.add_argument("--json", action="store_true")
    a = p.parse_args()
    rng = random.Random(4)
    ours = Ours(a.model)
    for name, piece in (("english", english(rng)), ("code", code(rng)), ("chinese", chinese(rng))):
        theirs = Theirs(a.model)  # the texts are chosen with one that is not measured
        texts = [text_of(piece, theirs) for _ in range(a.runs)]
        theirs = Theirs(a.model)
        for case, list_ in (("fresh", texts), ("again", texts[:1] * a.runs)):
            report(a, f"{name} {case}", *measure(f"{name} {case}", list_, ours, theirs))


if __name__ == "__main__":
    main()
