#!/usr/bin/env bash
# From a clone to an answer: installs what is missing, builds, fetches a small real model, starts
# Redis, a router, one prefill node and one decode node on loopback, and streams an answer.
#
#   deploy/quickstart.sh [--once] [--model PATH] [--prompt TEXT] [--max-tokens N] [--port N] [--http-port N] [--keeper]
#
#   --once          end after the answer (otherwise the cluster stays up until interrupted)
#   --model PATH    another model: a .gguf file or a Hugging Face directory
#   --prompt TEXT   what to ask
#   --max-tokens N  length of the answer (default 64)
#   --port N        the router's gRPC port (default: any free one)
#   --http-port N   its OpenAI-compatible HTTP port (default: any free one)
#   --keeper        a keeper holds the nodes' KV: a node started again finds it
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

once=0 model='' prompt='What is a relay race? Answer in one sentence.' max_tokens=64 port=0 http_port=0 keeper=0

usage() { sed -n '2,14s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; }

while [ $# -gt 0 ]; do
    case $1 in
    --once) once=1 ;;
    --keeper) keeper=1 ;;
    --model | --prompt | --max-tokens | --port | --http-port)
        [ $# -ge 2 ] || die "$1 needs a value"
        case $1 in
        --model) model=$2 ;;
        --prompt) prompt=$2 ;;
        --max-tokens) max_tokens=$2 ;;
        --port) port=$2 ;;
        --http-port) http_port=$2 ;;
        esac
        shift
        ;;
    -h | --help) usage; exit 0 ;;
    *) usage >&2; die "unknown option $1" ;;
    esac
    shift
done

started_all=$(now_ms)
pids=()
run=$(mktemp -d "${TMPDIR:-/tmp}/baton-quickstart.XXXXXX")

# Nodes first, so that the router sees them leave; Redis last. Then everything is gone.
cleanup() {
    local i pid
    trap - EXIT INT TERM
    for ((i = ${#pids[@]} - 1; i >= 0; i--)); do
        kill -TERM "${pids[i]}" 2>/dev/null || true
    done
    for pid in "${pids[@]}"; do
        wait "$pid" 2>/dev/null || true
    done
    rm -rf "$run"
}
trap cleanup EXIT
trap 'echo >&2; exit 130' INT
trap 'exit 143' TERM

# launch NAME BINARY OPTION...: starts one process of the cluster and waits until it is ready.
launch() {
    local name=$1 binary=$2 pid
    shift 2
    "$build/$binary" --ready_file="$run/$name.ready" "$@" 2>"$run/$name.log" &
    pid=$!
    pids+=("$pid")
    if ! wait_file "$run/$name.ready" "$pid" 60; then
        cat "$run/$name.log" >&2
        return 1
    fi
}

start_redis() {
    redis-server --port 0 --unixsocket "$run/redis.sock" --save '' --appendonly no \
        --dir "$run" >"$run/redis.log" 2>&1 &
    pids+=($!)
    local i
    for ((i = 0; i < 100; i++)); do
        [ -S "$run/redis.sock" ] && return 0
        sleep 0.05
    done
    cat "$run/redis.log" >&2
    return 1
}

# shellcheck disable=SC2086
ensure_packages $BUILD_PACKAGES redis-server
build=$ROOT_DIR/build-release
step "building (first time: a minute or two)" build_tree "$build" --buildtype=release -Dtests=disabled ||
    die "the build failed"
if [ -z "$model" ]; then
    ensure_model
    model=$MODEL_FILE
elif [ ! -e "$model" ]; then
    die "no model at $model"
fi

# `step` runs its command in this shell, so that the processes stay our children.
step "starting Redis" start_redis || die "Redis did not start"
common=(--model="$model" --redis.address="unix:$run/redis.sock" --cluster.name=quickstart)
node=("${common[@]}")
if [ $keeper = 1 ]; then
    step "starting the keeper" launch keeper baton-keeper --socket="$run/keeper.sock" ||
        die "the keeper did not start"
    node+=(--keeper.socket="$run/keeper.sock")
fi
step "starting the prefill node" launch prefill baton-prefill "${node[@]}" \
    --name=prefill-0 || die "the prefill node did not start"
step "starting the decode node" launch decode baton-decode "${node[@]}" \
    --name=decode-0 || die "the decode node did not start"
step "starting the router" launch router baton-router "${common[@]}" \
    --listen="127.0.0.1:$port" --http.listen="127.0.0.1:$http_port" || die "the router did not start"
address=$(ready_value "$run/router.ready" listen)
http=$(ready_value "$run/router.ready" http)

printf '%s==>%s asking: %s\n' "$BOLD" "$PLAIN" "$prompt" >&2
"$build/batonctl" generate --router "$address" --chat --prompt "$prompt" \
    --max-tokens "$max_tokens" || die "no answer; logs are in $run"
printf '%s==>%s first answer %s s after the start\n' "$BOLD" "$PLAIN" \
    "$(seconds_since "$started_all")" >&2
[ $once = 1 ] && exit 0

cat >&2 <<TXT

The cluster is up; Ctrl-C ends it.
  router     $address (gRPC, with reflection)
  http       http://$http/v1 (OpenAI-compatible):
             curl -sS http://$http/v1/chat/completions -d '{"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 32}'
  nodes      $build/batonctl status --router $address
  ask again  $build/batonctl generate --router $address --chat --prompt '...'
  logs       $run/*.log
TXT
# A process that dies is reported at once; all of them belong together.
wait -n "${pids[@]}" || true
die "a process ended; logs: $(tail -n 2 "$run"/*.log)"
