#!/usr/bin/env bash
# The tests of the CUDA back end, from a folder made by bundle.sh, on a machine with a card: kernels,
# the same under compute-sanitizer where it is installed, then engines on the card.
#
#   checks.sh [PART]...      PART: ops, attn, memcheck, racecheck, engine, survive; all without any
#
# One line for each check; exit status 0 if all passed. Output of each is in ${OUT:-.}/NAME.log.
set -uo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
out=${OUT:-$here}
export LD_LIBRARY_PATH=$here/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
export BATON_TEST_DEVICE=cuda BATON_TEST_MODULE=$here/bin/baton-cuda.so BATON_TEST_DATA=$here/data
parts=("$@")
[ $# -gt 0 ] || parts=(ops attn engine survive memcheck racecheck)
passed=0 failed=0

# check NAME COMMAND...
check() {
    local name=$1 started=$SECONDS rc=0
    shift
    "$@" >"$out/$name.log" 2>&1 || rc=$?
    if [ $rc = 0 ]; then
        passed=$((passed + 1))
        echo "ok      $name ($((SECONDS - started)) s): $(tail -n 1 "$out/$name.log")"
    else
        failed=$((failed + 1))
        echo "FAILED  $name, status $rc ($((SECONDS - started)) s):"
        tail -n 12 "$out/$name.log"
    fi
}

# sanitized TOOL NAME COMMAND...
sanitized() {
    local tool=$1
    shift
    if command -v compute-sanitizer >/dev/null; then
        check "$tool-$1" compute-sanitizer --tool "$tool" --error-exitcode 1 "${@:2}"
    else
        echo "skipped $tool-$1: no compute-sanitizer here"
    fi
}

for part in "${parts[@]}"; do
    case $part in
    ops | attn) check "$part" "$here/bin/gpu_${part}_check" ;;
    memcheck)
        sanitized memcheck ops "$here/bin/gpu_ops_check" --quick
        sanitized memcheck attn "$here/bin/gpu_attn_check" --quick
        ;;
    racecheck) # slows launches a thousand times: a few of each kind; filters by name break it
        sanitized racecheck products "$here/bin/gpu_ops_check" --only few
        sanitized racecheck rows "$here/bin/gpu_ops_check" --only rows
        ;;
    engine)
        for t in engine engine-prefix engine-split engine-tiers; do
            check "$t" "$here/bin/test_$t"
        done
        ;;
    survive) check survive "$here/bin/gpu_survive_check" "$here/bin/baton-keeper" ;;
    *) echo "checks.sh: no part is called $part" >&2; exit 2 ;;
    esac
done
echo "$passed passed, $failed failed"
[ $failed = 0 ]
