#!/usr/bin/env bash
# The router between real sockets, with a simulated node: HTTP and gRPC; see front.py.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/../../deploy/lib.sh"
build=${BATON_BENCH_BUILD:-$ROOT_DIR/build-bench}
{
    ensure_packages python3-venv
    ensure_test_venv
    ensure_model
    build_tree "$build" --buildtype=release
} >&2
BATON_TEST_BUILD=$build exec "$TEST_VENV/bin/python" "$ROOT_DIR/tests/bench/front.py" \
    --model "$MODEL_FILE" "$@"
