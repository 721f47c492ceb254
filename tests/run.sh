#!/usr/bin/env bash
# Installs what the tests need, builds, runs all of them, and ends with one line:
#   N passed, N failed
#
#   tests/run.sh [--long] [--gpu] [--stage NAME]...
#
#   --long        also what takes hours: the stages of tests/long.sh, and longer integration tests
#   --gpu         the tests that need a CUDA device (says so and fails where there is none)
#   --stage NAME  only this stage (may be repeated): unit, integ, asan, tsan, quickstart, or one of
#                 the long ones: clang, valgrind, rdma, fuzz, soak, aiperf, truth
set -uo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/../deploy/lib.sh"

TEST_PACKAGES="libcmocka-dev redis-server clang-format-14 python3-venv procps iproute2 curl
    libc6-dbg" # its symbols name the frames in tests/data/tsan.supp
long=0 gpu=0 stages=()

while [ $# -gt 0 ]; do
    case $1 in
    --long) long=1 ;;
    --gpu) gpu=1 ;;
    --stage)
        [ $# -ge 2 ] || die "--stage needs a name"
        stages+=("$2")
        shift
        ;;
    -h | --help) sed -n '2,10s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
    *) die "unknown option $1" ;;
    esac
    shift
done
. "$ROOT_DIR/tests/long.sh"
if [ ${#stages[@]} -eq 0 ]; then
    stages=(unit integ asan tsan quickstart)
    [ $long = 0 ] || stages+=("${LONG_STAGES[@]}")
fi

cd "$ROOT_DIR" || exit 1
results=$(mktemp -d "${TMPDIR:-/tmp}/baton-tests.XXXXXX")
broken=0 # stages that could not even run

# run_meson DIR SUITE...: the suites of one build, those of -SUITE left out; results as JUnit.
run_meson() {
    local dir=$1 suites=() s
    shift
    for s in "$@"; do
        case $s in
        -*) suites+=(--no-suite "${s#-}") ;;
        *) suites+=(--suite "$s") ;;
        esac
    done
    BATON_TEST_PYTHON=$venv/bin/python \
        meson test -C "$dir" --no-rebuild --timeout-multiplier 5 --print-errorlogs --num-processes 2 "${suites[@]}"
    local rc=$?
    cp "$dir/meson-logs/testlog.junit.xml" "$results/$(basename "$dir").xml" || broken=$((broken + 1))
    return $rc
}

# run_pytest NAME BUILD-DIR ARG...
run_pytest() {
    local name=$1 dir=$2
    shift 2
    BATON_TEST_BUILD=$ROOT_DIR/$dir BATON_TEST_MODEL=$MODEL_FILE BATON_TEST_LONG=$long \
        "$venv/bin/python" -m pytest -q -ra --durations=5 -p no:cacheprovider \
        --junitxml="$results/$name.xml" "$@"
    local rc=$?
    [ -f "$results/$name.xml" ] || broken=$((broken + 1))
    return $rc
}

# tree NAME: builds what a stage tests. Sanitizers want names and lines of their frames, no variables.
tree() {
    case $1 in
    debug) build_tree build-debug --buildtype=debugoptimized -Dwerror=true ;;
    asan) build_tree build-asan --buildtype=debugoptimized -Db_sanitize=address,undefined -Db_lundef=false -Dc_args=-g1 ;;
    tsan) build_tree build-tsan --buildtype=debugoptimized -Db_sanitize=thread -Db_lundef=false -Dc_args=-g1 ;;
    esac
}

# Tests wait most of the time: what later stages need is built meanwhile, with what is left of the processors.
ahead='' # process group
build_ahead() {
    local s trees=()
    [ -z "$ahead" ] || return 0
    for s in asan tsan; do [[ " ${stages[*]} " != *" $s "* ]] || trees+=("$s"); done
    set -m
    (
        renice -n 19 -p $BASHPID
        for s in "${trees[@]}"; do tree "$s"; done
    ) >"$results/ahead.log" 2>&1 </dev/null &
    ahead=$!
    set +m
}

# Whatever failed is built again, and told, in its own stage.
await_ahead() { [ -z "$ahead" ] || wait "$ahead" || true; }
end_ahead() { [ -z "$ahead" ] || kill -- "-$ahead" 2>/dev/null || true; }
trap end_ahead EXIT

build_after_ahead() { await_ahead && tree "$1"; }

stage_unit() {
    step "building (debug)" tree debug || return 1
    build_ahead
    BATON_TEST_MODEL=$MODEL_FILE run_meson build-debug unit ops fuzz integ lint
}

stage_integ() {
    step "building (debug)" tree debug || return 1
    build_ahead
    run_pytest integ build-debug tests/integ
}

# sanitized NAME SUITE...: these suites, then the marked integration tests.
sanitized() {
    local name=$1 rc=0
    shift
    step "building ($name)" build_after_ahead "$name" || return 1
    BATON_TEST_MODEL=$MODEL_FILE run_meson "build-$name" "$@" || rc=1
    run_pytest "integ-$name" "build-$name" -m sanitize tests/integ || rc=1
    return $rc
}

stage_asan() {
    ASAN_OPTIONS=detect_leaks=1:abort_on_error=0 UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1 \
        LSAN_OPTIONS=suppressions=$ROOT_DIR/tests/data/lsan.supp:print_suppressions=0 \
        sanitized asan unit ops fuzz
}

stage_tsan() {
    # UCX's memory hooks run in a thread's exit, when the sanitizer has already let go of it.
    # A process that exits waits for races with threads that still run: a second each, where a tenth is plenty.
    UCX_MEM_EVENTS=n \
        TSAN_OPTIONS=suppressions=$ROOT_DIR/tests/data/tsan.supp:halt_on_error=1:atexit_sleep_ms=100 \
        sanitized tsan unit ops -alone # long ones without threads
}

# What runs on a bare machine with a card (tests/gpu/bundle.sh packs it), then whole nodes on this one.
stage_gpu() {
    step "building (CUDA)" build_tree build-gpu --buildtype=release -Dcuda=enabled || return 1
    local rc=0
    BATON_TEST_PYTHON=$venv/bin/python tests/gpu/bundle.sh build-gpu "$results/gpu" || return 1
    OUT=$results "$results/gpu/checks.sh" || rc=1
    BATON_TEST_DEVICE=cuda run_pytest gpu build-gpu tests/integ/test_generate.py \
        tests/integ/test_prefix.py tests/integ/test_keeper.py tests/integ/test_tiers.py || rc=1
    return $rc
}

stage_quickstart() { run_pytest quickstart build-debug tests/quickstart; }

# shellcheck disable=SC2086
ensure_packages $BUILD_PACKAGES $TEST_PACKAGES
ensure_test_venv
venv=$TEST_VENV
ensure_model

failed_stages=()
for s in "${stages[@]}"; do
    declare -F "stage_$s" >/dev/null || die "unknown stage $s"
    printf '\n%s=== %s%s\n' "$BOLD" "$s" "$PLAIN"
    started=$(now_ms)
    "stage_$s" || failed_stages+=("$s")
    printf '=== %s took %s s\n' "$s" "$(seconds_since "$started")"
done
if [ $gpu = 1 ]; then
    printf '\n=== gpu\n'
    command -v nvidia-smi >/dev/null && nvidia-smi -L | grep -q GPU ||
        die "--gpu: no CUDA device here"
    stage_gpu || failed_stages+=(gpu)
fi

printf '\n'
[ ${#failed_stages[@]} -eq 0 ] || printf 'failed stages: %s\n' "${failed_stages[*]}"
python3 tests/tools/count.py "$results" $((broken + ${#failed_stages[@]}))
rc=$?
rm -rf "$results"
exit $rc
