"""Time from exec to ready of every program, model file in the page cache, Redis running. Ready is
when the file that --ready_file names appears, which is when the program serves and is announced.
Beside it the time that one thread takes to read the model file from the page cache.

    start.py --model FILE [--runs N] [--threads N] [--json]
"""
import argparse
import json
import pathlib
import statistics
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/integ"))

from cluster import Cluster  # noqa: E402


def read_file(path):
    buf = bytearray(1 << 20)
    begin = time.perf_counter()
    with open(path, "rb", buffering=0) as f:
        while f.readinto(buf):
            pass
    return time.perf_counter() - begin


def until_ready(p):
    """Restarts the process; seconds until it is ready."""
    p.stop()
    p.ready_file.unlink(missing_ok=True)
    begin = time.perf_counter()
    p.start()
    while not p.ready_file.exists():
        if p.p.poll() is not None:
            sys.exit(f"{p.name} ended: {p.log.read_text()[-2000:]}")
        time.sleep(0.0005)
    return time.perf_counter() - begin


def rss_mb(p):
    for line in pathlib.Path(f"/proc/{p.p.pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    return 0


def main():
    a = argparse.ArgumentParser()
    a.add_argument("--model", required=True)
    a.add_argument("--runs", type=int, default=9)
    a.add_argument("--threads", type=int, default=2)
    a.add_argument("--json", action="store_true")
    o = a.parse_args()
    c = Cluster(o.model, threads=o.threads, pool="256M", kvstore=1)
    try:
        for name in ("prefill-0", "decode-0", "router", "store-0"):
            floor, times = [], []
            for _ in range(o.runs):
                floor.append(read_file(o.model))
                times.append(until_ready(c.procs[name]))
            model = name not in ("store-0",)
            report(o, name.split("-")[0], statistics.median(times), statistics.median(floor) if model else None)
            print_line(o, {"bench": "start", "case": name.split("-")[0], "metric": "rss_mb",
                           "value": round(rss_mb(c.procs[name]), 1), "unit": "MB"})
    finally:
        c.kill_all()


def report(o, case, seconds, floor):
    line = {"bench": "start", "case": case, "metric": "ready_s", "value": round(seconds, 4), "unit": "s"}
    if floor:
        line |= {"ceiling": "reading the model file", "ceiling_value": round(floor, 4),
                 "ratio": round(floor / seconds, 3)}
    print_line(o, line)


def print_line(o, line):
    if o.json:
        print(json.dumps(line), flush=True)
    else:
        more = f"  (reading the model file {line['ceiling_value']} s)" if "ceiling" in line else ""
        print(f"start  {line['case']:8} {line['metric']:8} {line['value']} {line['unit']}{more}", flush=True)


if __name__ == "__main__":
    main()
