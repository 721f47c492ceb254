#!/usr/bin/env bash
# Put and get rates of the KV store between two processes, over shared memory and over TCP, beside
# the lower of memcpy and ucx_perftest in the same run (bench_store.c); then the gap between first and
# second token colocated, directly and through the store, with the quickstart model (second_token.py; left out
# with BATON_BENCH_GAP=0, alone with BATON_BENCH_GAP=only).
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/../../deploy/lib.sh"
. "$ROOT_DIR/tests/bench/perftest.sh"
build=${BATON_BENCH_BUILD:-$ROOT_DIR/build-bench}
{
    ensure_packages redis-server ucx-utils
    [ -e "$build/build.ninja" ] || meson setup "$build" "$ROOT_DIR" -Dbuildtype=release
    ninja -C "$build" tests/bench_store
} >&2
dir=$(mktemp -d)
redis-server --port 0 --unixsocket "$dir/redis.sock" --save '' --appendonly no --dir "$dir" >/dev/null &
redis=$!
trap 'kill $redis 2>/dev/null; rm -rf "$dir"' EXIT

if [ "${BATON_BENCH_GAP:-1}" != only ]; then
    perftest_ceilings
    "$build/tests/bench_store" "$@" --redis "unix:$dir/redis.sock" --case shm --transports auto --perftest "$shm" --cached "$shm_cached"
    "$build/tests/bench_store" "$@" --redis "unix:$dir/redis.sock" --case tcp --transports tcp --perftest "$tcp" --cached "$tcp_cached"
fi
[ "${BATON_BENCH_GAP:-1}" != 0 ] || exit 0
{
    ensure_packages python3-venv
    ensure_test_venv
    ensure_model
    ninja -C "$build"
} >&2
BATON_TEST_BUILD=$build "$TEST_VENV/bin/python" "$ROOT_DIR/tests/bench/second_token.py" --store --model "$MODEL_FILE" "$@"
