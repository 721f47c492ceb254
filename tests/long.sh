#!/usr/bin/env bash
# What takes hours; called by `tests/run.sh --long` with the folder for results.
#   BATON_TEST_FUZZ_SECONDS  per target (default 600)
#   BATON_TEST_TRACE         a trace of requests for the truth check of the replay tool; without it
#                            the check is left out
set -uo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/../deploy/lib.sh"
cd "$ROOT_DIR" || exit 1
results=$1
seconds=${BATON_TEST_FUZZ_SECONDS:-600}
rc=0

ensure_packages clang libclang-rt-14-dev

# A JUnit file with one case, for the count.
record() {
    local failure=''
    [ "$2" = 0 ] || failure='<failure/>'
    printf '<testsuite><testcase classname="long" name="%s">%s</testcase></testsuite>\n' "$1" \
        "$failure" >"$results/long-$1.xml"
}

fuzz() {
    local name=$1 work status=0
    work=$(mktemp -d "${TMPDIR:-/tmp}/baton-fuzz.XXXXXX")
    "build-fuzz/tests/fuzz_$name" -max_total_time="$seconds" -timeout=10 -rss_limit_mb=2048 \
        -artifact_prefix="$CACHE_DIR/fuzz-$name-" "$work" "tests/fuzz/corpus/$name" \
        >"$work/log" 2>&1 || status=1
    [ $status = 0 ] || tail -n 40 "$work/log"
    record "fuzz-$name" $status
    rm -rf "$work"
    return $status
}

if CC=clang step "building the fuzzers" build_tree build-fuzz -Dfuzz=true \
    -Db_sanitize=address,undefined -Db_lundef=false; then
    mkdir -p "$CACHE_DIR"
    for target in build-fuzz/tests/fuzz_*; do
        [ -x "$target" ] && [ -f "$target" ] || continue
        name=${target##*/fuzz_}
        step "fuzzing $name for $seconds s" fuzz "$name" || rc=1
    done
else
    record build-fuzz 1
    rc=1
fi
# Hits of a live cluster of the quickstart's model within two points of the replay's prediction, for
# slices of requests that two cores can serve as they come.
truth() {
    local status=0
    tests/bench/run truth --trace "$BATON_TEST_TRACE" --first "$1" --requests 300 --max-tokens 1024 \
        --speedup 0.75 --within 2 || status=1
    record "truth-$1" $status
    return $status
}

if [ -n "${BATON_TEST_TRACE:-}" ]; then
    for first in 0 3000; do
        step "truth check of the replay tool, from request $first" truth "$first" || rc=1
    done
else
    echo "BATON_TEST_TRACE is not set: no truth check of the replay tool" >&2
fi
exit $rc
