#!/usr/bin/env bash
# KV of a prompt between two processes, over shared memory and over TCP, beside the lower of memcpy
# and ucx_perftest in the same run; see bench_handoff.c. --only shm|tcp: one of them.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/../../deploy/lib.sh"
. "$ROOT_DIR/tests/bench/perftest.sh"
build=${BATON_BENCH_BUILD:-$ROOT_DIR/build-bench}
only=all args=()
while [ $# -gt 0 ]; do
    case $1 in
    --only) only=$2 && shift ;;
    *) args+=("$1") ;;
    esac
    shift
done
{
    ensure_packages ucx-utils
    [ -e "$build/build.ninja" ] || meson setup "$build" "$ROOT_DIR" -Dbuildtype=release
    ninja -C "$build" tests/bench_handoff
} >&2
perftest_ceilings
for c in shm tcp; do
    [ "$only" = all ] || [ "$only" = $c ] || continue
    transports=auto perf=$shm cached=$shm_cached
    [ $c = shm ] || { transports=tcp perf=$tcp cached=$tcp_cached; }
    "$build/tests/bench_handoff" "${args[@]}" --case $c --transports $transports --perftest "$perf" --cached "$cached"
done
