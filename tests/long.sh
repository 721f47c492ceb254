# Stages that take hours; sourced by tests/run.sh, which runs them with --long or by name.
#   BATON_TEST_FUZZ_SECONDS  per target (default 600)
#   BATON_TEST_FUZZ          only targets whose names this pattern fits
#   BATON_TEST_SOAK_SECONDS  of mixed load (default 3600)
#   BATON_TEST_RDMA_SECONDS  until the emulated machine is given up (default 1800)
#   BATON_TEST_TRACE         a trace of requests for the truth check of the replay tool; without it
#                            the check is left out
# shellcheck shell=bash

LONG_STAGES=(clang valgrind rdma fuzz soak aiperf truth)

# record NAME STATUS: a JUnit file with one case, for the count.
record() {
    local failure=''
    [ "$2" = 0 ] || failure='<failure/>'
    printf '<testsuite><testcase classname="long" name="%s">%s</testcase></testsuite>\n' "$1" \
        "$failure" >"$results/long-$1.xml"
}

# The other compiler, its warnings as errors.
stage_clang() {
    ensure_packages clang
    CC=clang step "building (clang)" build_tree build-clang --buildtype=debugoptimized -Dwerror=true || return 1
    BATON_TEST_MODEL=$MODEL_FILE run_meson build-clang unit ops fuzz
}

# Not under valgrind: forks killed with what they hold, and models that would take hours.
VALGRIND_LEAVES_OUT="ledger-crash model-goldens model-invariance"

stage_valgrind() {
    local tests dir=build-debug
    ensure_packages valgrind
    step "building (debug)" build_tree $dir --buildtype=debugoptimized -Dwerror=true || return 1
    tests=$(meson test -C $dir --list --suite unit 2>/dev/null | sed -n 's/^.* \/ //p' |
        grep -vxF "$(printf '%s\n' $VALGRIND_LEAVES_OUT)")
    # shellcheck disable=SC2086
    meson test -C $dir --no-rebuild --timeout-multiplier 30 --print-errorlogs --num-processes 2 --suite unit \
        --logbase valgrind --wrapper "valgrind --quiet --fair-sched=yes --error-exitcode=99 --leak-check=full --show-leak-kinds=definite --errors-for-leak-kinds=definite \
        --suppressions=$ROOT_DIR/tests/data/valgrind.supp" $tests
    local rc=$?
    cp "$dir/meson-logs/valgrind-valgrind.junit.xml" "$results/valgrind.xml" || broken=$((broken + 1))
    return $rc
}

# Transfers over RDMA, in an emulated machine.
stage_rdma() {
    step "building (debug)" build_tree build-debug --buildtype=debugoptimized -Dwerror=true || return 1
    tests/rdma/machine.sh build-debug "$results"
}

fuzz_target() {
    local name=$1 seconds=$2 work status=0
    work=$(mktemp -d "${TMPDIR:-/tmp}/baton-fuzz.XXXXXX")
    UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1 \
        "build-fuzz/tests/fuzz_$name" -max_total_time="$seconds" -timeout=10 -rss_limit_mb=2048 \
        -artifact_prefix="$CACHE_DIR/fuzz-$name-" "$work" "tests/fuzz/corpus/$name" \
        >"$work/log" 2>&1 || status=1
    [ $status = 0 ] || tail -n 40 "$work/log"
    grep -E '^(Done|stat::number_of_executed_units)' "$work/log"
    record "fuzz-$name" $status
    rm -rf "$work"
    return $status
}

# Every parser that files or the network reach.
stage_fuzz() {
    local seconds=${BATON_TEST_FUZZ_SECONDS:-600} target name rc=0
    ensure_packages clang libclang-rt-14-dev
    if ! CC=clang step "building the fuzzers" build_tree build-fuzz -Dfuzz=true \
        -Db_sanitize=address,undefined -Db_lundef=false; then
        record build-fuzz 1
        return 1
    fi
    mkdir -p "$CACHE_DIR"
    for target in build-fuzz/tests/fuzz_*; do
        [ -x "$target" ] && [ -f "$target" ] || continue
        name=${target##*/fuzz_}
        # shellcheck disable=SC2053
        [[ $name == ${BATON_TEST_FUZZ:-*} ]] || continue
        step "fuzzing $name for $seconds s" fuzz_target "$name" "$seconds" || rc=1
    done
    return $rc
}

# Mixed load with cancels; nothing may grow.
stage_soak() {
    step "building (debug)" build_tree build-debug --buildtype=debugoptimized -Dwerror=true || return 1
    BATON_TEST_SOAK_SECONDS=${BATON_TEST_SOAK_SECONDS:-3600} run_pytest soak build-debug -s tests/integ/test_soak.py
}

AIPERF_VENV=$CACHE_DIR/venv-aiperf-0.13

make_aiperf() {
    rm -rf "$AIPERF_VENV"
    "$(pip_python)" -m venv "$AIPERF_VENV" &&
        "$AIPERF_VENV/bin/pip" install --quiet --disable-pip-version-check 'aiperf==0.13.*' &&
        touch "$AIPERF_VENV/complete"
}

# A load generator of others against the HTTP port; 1.2 GB in an environment of its own.
stage_aiperf() {
    step "building (debug)" build_tree build-debug --buildtype=debugoptimized -Dwerror=true || return 1
    [ -f "$AIPERF_VENV/complete" ] || step "installing aiperf" make_aiperf || return 1
    BATON_TEST_AIPERF=$AIPERF_VENV/bin/aiperf run_pytest aiperf build-debug tests/integ/test_aiperf.py
}

# Hits of a live cluster of the quickstart's model within two points of the replay's prediction, for
# slices of requests that two cores can serve as they come.
truth_slice() {
    local status=0
    tests/bench/run truth --trace "$BATON_TEST_TRACE" --first "$1" --requests 300 --max-tokens 1024 \
        --speedup 0.75 --within 2 || status=1
    record "truth-$1" $status
    return $status
}

stage_truth() {
    local rc=0 first
    if [ -z "${BATON_TEST_TRACE:-}" ]; then
        echo "BATON_TEST_TRACE is not set: no truth check of the replay tool" >&2
        return 0
    fi
    for first in 0 3000; do
        step "truth check of the replay tool, from request $first" truth_slice "$first" || rc=1
    done
    return $rc
}
