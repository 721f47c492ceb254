#!/usr/bin/env bash
# KV of a prompt between two processes, over shared memory and over TCP, beside the lower of memcpy
# and ucx_perftest in the same run, with 12k and (what is exposed of it) with 4k tokens; see
# bench_handoff.c. Then the gap between first and second token, split against colocated, with the
# quickstart model; see second_token.py. --only shm|tcp|path: one of them.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/../../deploy/lib.sh"
. "$ROOT_DIR/tests/bench/perftest.sh"
build=${BATON_BENCH_BUILD:-$ROOT_DIR/build-bench}
only=all tokens=(12288 4096) args=()
while [ $# -gt 0 ]; do
    case $1 in
    --only) only=$2 && shift ;;
    --tokens) tokens=("$2") && shift ;;
    *) args+=("$1") ;;
    esac
    shift
done
{
    ensure_packages ucx-utils
    [ -e "$build/build.ninja" ] || meson setup "$build" "$ROOT_DIR" -Dbuildtype=release
    ninja -C "$build" tests/bench_handoff
} >&2
[ "$only" = path ] || perftest_ceilings
for c in shm tcp; do
    [ "$only" = all ] || [ "$only" = $c ] || continue
    transports=auto perf=$shm cached=$shm_cached
    [ $c = shm ] || { transports=tcp perf=$tcp cached=$tcp_cached; }
    for n in "${tokens[@]}"; do
        "$build/tests/bench_handoff" "${args[@]}" --tokens "$n" --case $c --transports $transports \
            --perftest "$perf" --cached "$cached"
    done
done
[ "$only" = all ] || [ "$only" = path ] || exit 0
{
    ensure_packages redis-server python3-venv
    ensure_test_venv
    ensure_model
    ninja -C "$build"
} >&2
BATON_TEST_BUILD=$build exec "$TEST_VENV/bin/python" "$ROOT_DIR/tests/bench/second_token.py" --pin \
    --model "$MODEL_FILE" "${args[@]}"
