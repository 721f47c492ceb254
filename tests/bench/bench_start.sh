#!/usr/bin/env bash
# From exec to ready, for each program; see start.py.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/../../deploy/lib.sh"
build=${BATON_BENCH_BUILD:-$ROOT_DIR/build-bench}
{
    ensure_packages redis-server python3-venv
    ensure_test_venv
    ensure_model
    build_tree "$build" --buildtype=release
} >&2
BATON_TEST_BUILD=$build exec "$TEST_VENV/bin/python" "$ROOT_DIR/tests/bench/start.py" \
    --model "$MODEL_FILE" "$@"
