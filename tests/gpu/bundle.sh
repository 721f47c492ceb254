#!/usr/bin/env bash
# Packs what the tests and benchmarks of the CUDA back end need into one folder that runs on a bare
# machine with a card: programs of a build with -Dcuda=enabled, the libraries they link, a tiny model.
#
#   tests/gpu/bundle.sh BUILD OUT [PROGRAM...]     PROGRAM: only these of the benchmarks
#
# On the other machine: OUT/checks.sh (see there), OUT/bin/bench_gpu_engine, ...
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
[ $# -ge 2 ] || { sed -n '2,8s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 2; }
build=$(cd "$1" && pwd)
out=$2
shift 2
checks=(tests/gpu/gpu_ops_check tests/gpu/gpu_attn_check tests/gpu/gpu_survive_check baton-keeper tests/test_engine tests/test_engine-prefix
    tests/test_engine-split tests/test_engine-tiers)

mkdir -p "$out/bin" "$out/lib" "$out/data"
for f in "${checks[@]}" "$@" kernels/cuda/baton-cuda.so; do
    [ -e "$build/$f" ] || { echo "bundle: $build has no $f" >&2; exit 1; }
    strip -o "$out/bin/$(basename "$f")" "$build/$f"
done
# Libraries: not the C library and its parts, which belong to the other machine's loader.
for f in "$out"/bin/*; do
    ldd "$f" | awk '$3 ~ /^\// { print $3 }'
done | sort -u | while read -r lib; do
    case $(basename "$lib") in
    libc.so* | libm.so* | libgcc_s.so* | libstdc++.so* | libdl.so* | libpthread.so* | librt.so* | libcublas* | libcuda*) ;;
    *) cp -L "$lib" "$out/lib/" ;;
    esac
done
"${BATON_TEST_PYTHON:-python3}" "$root/tests/tools/mkmodel.py" --out "$out/data/tiny.gguf" \
    --d-model 256 --head-dim 64 --ff 512 --vocab 320 --dtype bf16 --seed 3
cp "$root/tests/gpu/checks.sh" "$out/"
