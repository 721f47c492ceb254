#!/usr/bin/env bash
# The router between real sockets, with a simulated node: HTTP and gRPC; see front.py. With --peers
# other routers are installed into an environment of their own and measured in the same run.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/../../deploy/lib.sh"
build=${BATON_BENCH_BUILD:-$ROOT_DIR/build-bench}
peers=$CACHE_DIR/bench-routers
args=()
for a in "$@"; do
    if [ "$a" = --peers ]; then
        args+=(--peers "$peers/bin/python" --case peers)
    else
        args+=("$a")
    fi
done

make_peers() {
    rm -rf "$peers"
    "$(pip_python)" -m venv "$peers" &&
        "$peers/bin/pip" install --quiet --disable-pip-version-check vllm-router==0.1.17 sglang-router==0.3.2 &&
        touch "$peers/complete"
}

{
    ensure_packages python3-venv
    ensure_test_venv
    ensure_model
    case " $* " in
    *" --peers "*) [ -f "$peers/complete" ] || step "installing the peers" make_peers || die "no peers" ;;
    esac
    build_tree "$build" --buildtype=release
} >&2
BATON_TEST_BUILD=$build exec "$TEST_VENV/bin/python" "$ROOT_DIR/tests/bench/front.py" \
    --model "$MODEL_FILE" "${args[@]}"
