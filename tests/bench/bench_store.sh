#!/usr/bin/env bash
# Put and get rates of the KV store between two processes, over shared memory and over TCP, beside
# the lower of memcpy and ucx_perftest in the same run (bench_store.c); then the gap between first and
# second token colocated, directly and through the store, with the quickstart model (store_gap.py; left out
# with BATON_BENCH_GAP=0, alone with BATON_BENCH_GAP=only).
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/../../deploy/lib.sh"
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

# perftest TRANSPORTS TEST SIZE COUNT PORT: GB/s, with the settings that our nets use
perftest() {
    export UCX_TCP_TX_SEG_SIZE=64k UCX_TCP_RX_SEG_SIZE=64k UCX_WARN_UNUSED_ENV_VARS=n
    UCX_TLS=$1 ucx_perftest -p "$5" >/dev/null 2>&1 &
    local server=$!
    for _ in 1 2 3 4 5 6 7 8 9 10; do
        sleep 0.3
        UCX_TLS=$1 timeout 60 ucx_perftest 127.0.0.1 -p "$5" -t "$2" -s "$3" -n "$4" -f 2>/dev/null |
            awk 'NF == 8 && $1 > 0 {v = $6 * 1048576 / 1e9} END {if (v) print v; else exit 1}' && break
    done
    kill "$server" 2>/dev/null || true
}

if [ "${BATON_BENCH_GAP:-1}" != only ]; then
    shm=$(perftest posix,sysv,cma,self ucp_get 524288 2000 27451)
    tcp=$(perftest tcp,self ucp_am_bw 61440 20000 27452)
    "$build/tests/bench_store" "$@" --redis "unix:$dir/redis.sock" --case shm --transports auto --perftest "$shm"
    "$build/tests/bench_store" "$@" --redis "unix:$dir/redis.sock" --case tcp --transports tcp --perftest "$tcp"
fi
[ "${BATON_BENCH_GAP:-1}" != 0 ] || exit 0
{
    ensure_packages python3-venv
    ensure_test_venv
    ensure_model
    ninja -C "$build"
} >&2
BATON_TEST_BUILD=$build "$TEST_VENV/bin/python" "$ROOT_DIR/tests/bench/store_gap.py" --model "$MODEL_FILE" "$@"
