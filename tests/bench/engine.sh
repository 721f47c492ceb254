# Sourced by tests/bench/run: models and peer of the engine benchmark.
cache=${XDG_CACHE_HOME:-$HOME/.cache}/baton
tools=${BATON_BENCH_VENV:-$cache/bench-venv}
peer_version=0.3.36

venv() {
    [ -x "$tools/bin/python" ] || python3 -m venv "$tools"
    "$tools/bin/python" -c 'import numpy' 2>/dev/null || "$tools/bin/pip" install -q numpy
}

# GCC below 13 takes LDTILECFG to read 8 bytes and drops the stores of the other 56: the peer's AMX
# code crashes then, unless dead stores are kept.
peer() {
    venv
    "$tools/bin/python" -c 'import llama_cpp' 2>/dev/null ||
        CMAKE_ARGS="-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF -DLLAMA_BUILD_COMMON=OFF" \
            CFLAGS="-fno-tree-dse -fno-dse" CXXFLAGS="-fno-tree-dse -fno-dse" \
            CMAKE_BUILD_PARALLEL_LEVEL=2 "$tools/bin/pip" install --no-cache-dir \
            --no-binary llama-cpp-python "llama-cpp-python==$peer_version"
}

# The weights of $1 as $2, made once.
converted() {
    local out=${1%.Q4_1.gguf}.from-Q4_1.$2.gguf
    [ -e "$out" ] || { venv && "$tools/bin/python" "$root/tests/tools/requant.py" --dtype "$2" "$1" "$out"; }
    echo "$out"
}

bench_engine() {
    local args=() model= models m
    while [ $# -gt 0 ]; do
        case $1 in
        --peer)
            peer >&2
            args+=(--peer "'$tools/bin/python' '$root/tests/bench/peer_llama.py'")
            ;;
        --model)
            model=$2
            shift
            ;;
        *) args+=("$1") ;;
        esac
        shift
    done
    models=("$model")
    if [ -z "$model" ]; then
        m=$cache/models/SmolLM2-135M-Instruct.Q4_1.gguf
        [ -e "$m" ] || { echo "no $m: run deploy/quickstart.sh --once" >&2 && return 1; }
        models=("$m" "$(converted "$m" q8_0)" "$(converted "$m" bf16)")
    fi
    for m in "${models[@]}"; do
        "$build/tests/bench_engine" "${args[@]}" --model "$m" || return 1
    done
}
