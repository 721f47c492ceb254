#!/usr/bin/env bash
# From a clone to an answer: installs what is missing, builds, fetches a small real model, starts
# a supervisor with Redis, a router, one prefill node and one decode node on loopback, and streams an
# answer. `batonctl scale` changes how many there are.
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

usage() { sed -n '2,15s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; }

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

[[ $max_tokens =~ ^[1-9][0-9]{0,8}$ ]] || die "--max-tokens is $max_tokens, must be a number from 1"
for p in "$port" "$http_port"; do
    [[ $p =~ ^[0-9]{1,5}$ && 10#$p -le 65535 ]] || die "a port is $p, must be 0 (any) to 65535"
done

started_all=$(now_ms)
supervisor=''
run=$(mktemp -d "${TMPDIR:-/tmp}/baton-quickstart.XXXXXX")

# The supervisor ends what it has started, the router first, Redis last. Then everything is
# gone, but for the logs of what went wrong.
cleanup() {
    trap - EXIT INT TERM
    if [ -n "$supervisor" ]; then
        kill -TERM "$supervisor" 2>/dev/null || true
        wait "$supervisor" 2>/dev/null || true
    fi
    if [ -n "$supervisor" ] && [ "$1" != 0 ] && [ "$1" -lt 128 ]; then
        echo "logs are in $run" >&2
    else
        rm -rf "$run"
    fi
}
trap 'cleanup $?' EXIT
trap 'echo >&2; exit 130' INT
trap 'exit 143' TERM

json_text() { printf '"%s"' "$(printf '%s' "$1" | sed 's/\\/\\\\/g; s/"/\\"/g')"; }

# role NAME KIND READY COMMAND...: an entry of the supervisor's file.
role() {
    local name=$1 kind=$2 ready=$3 list='' arg
    shift 3
    for arg in "$@"; do list+="${list:+, }$(json_text "$arg")"; done
    printf '%s{"name": "%s", %s, "ready": "%s", "command": [%s]}' "${roles:+,
  }" "$name" "$kind" "$ready" "$list"
}

# started FILE NAME: waits for a process of the supervisor; its log says why it does not come.
started() {
    wait_file "$run/$1" "$supervisor" 60 && return 0
    cat "$run/$2.log" "$run/supervisor.log" >&2 || true
    return 1
}

start_supervisor() {
    # In a session of its own: Ctrl-C is for this script, which ends it in order.
    setsid "$build/baton-supervisor" --roles="$run/roles.json" --run="$run" \
        --ready_file="$run/supervisor.ready" 2>"$run/supervisor.log" &
    supervisor=$!
    local i
    for ((i = 0; i < 100; i++)); do
        [ -S "$run/control.sock" ] && return 0
        kill -0 "$supervisor" 2>/dev/null || return 1
        sleep 0.05
    done
    return 1
}

# shellcheck disable=SC2086
ensure_packages $BUILD_PACKAGES redis-server
build=$ROOT_DIR/build-release
cuda=disabled # its kernels take minutes to build, with a toolkit: only where there is a card
[ ! -e /dev/nvidiactl ] || cuda=auto
step "building (first time: a minute or two)" build_tree "$build" --buildtype=release -Dtests=disabled -Dcuda=$cuda ||
    die "the build failed"
if [ -z "$model" ]; then
    ensure_model
    model=$MODEL_FILE
elif [ ! -e "$model" ]; then
    die "no model at $model"
fi

common=(--model="$model" --redis.address="unix:$run/redis.sock" --cluster.name=quickstart
    --ready_file='{run}/{name}.ready' --name='{name}')
ready='{run}/{name}.ready' node=("${common[@]}") roles=''
roles+=$(role redis '"single": true' '{run}/redis.sock' redis-server --port 0 --unixsocket "$run/redis.sock" \
    --save '' --appendonly no --dir "$run")
if [ $keeper = 1 ]; then
    roles+=$(role keeper '"single": true' "$ready" "$build/baton-keeper" --socket="$run/keeper.sock" \
        --ready_file='{run}/{name}.ready')
    node+=(--keeper.socket="$run/keeper.sock")
fi
roles+=$(role prefill '"replicas": 1' "$ready" "$build/baton-prefill" "${node[@]}")
roles+=$(role decode '"replicas": 1' "$ready" "$build/baton-decode" "${node[@]}")
roles+=$(role router '"single": true' "$ready" "$build/baton-router" "${common[@]}" \
    --listen="127.0.0.1:$port" --http.listen="127.0.0.1:$http_port")
printf '{"roles": [\n  %s\n]}\n' "$roles" >"$run/roles.json"

# `step` runs its command in this shell, so that the supervisor stays our child.
step "starting the supervisor" start_supervisor || die "the supervisor did not start: $(cat "$run/supervisor.log")"
if [ $keeper = 1 ]; then
    step "starting the keeper" started keeper.ready keeper || die "the keeper did not start"
fi
step "starting the prefill node" started prefill-0.ready prefill-0 || die "the prefill node did not start"
step "starting the decode node" started decode-0.ready decode-0 || die "the decode node did not start"
step "starting the router" started router.ready router || die "the router did not start"
address=$(ready_value "$run/router.ready" listen)
http=$(ready_value "$run/router.ready" http)

printf '%s==>%s asking: %s\n' "$BOLD" "$PLAIN" "$prompt" >&2
"$build/batonctl" generate --router "$address" --chat --prompt "$prompt" \
    --max-tokens "$max_tokens" || die "no answer"
printf '%s==>%s first answer %s s after the start\n' "$BOLD" "$PLAIN" \
    "$(seconds_since "$started_all")" >&2
[ $once = 1 ] && exit 0

cat >&2 <<TXT

The cluster is up; Ctrl-C ends it.
  router     $address (gRPC, with reflection)
  http       http://$http/v1 (OpenAI-compatible):
             curl -sS http://$http/v1/chat/completions -d '{"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 32}'
  nodes      $build/batonctl status --router $address
  scale      $build/batonctl scale decode=2 --wait --supervisor $run/control.sock
  ask again  $build/batonctl generate --router $address --chat --prompt '...'
  logs       $run/*.log
TXT
# What dies is started again; the supervisor itself is not.
wait "$supervisor" || true
die "the supervisor ended; logs: $(tail -n 2 "$run"/*.log)"
