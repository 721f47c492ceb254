#!/bin/busybox sh
# Process 1 of the emulated machine (tests/rdma/machine.sh): makes a Soft-RoCE device and runs on it
#   the net's promises (rdma_check), handoffs, handoffs whose other side is killed or stopped,
#   and whole nodes: answers equal to those of one node alone, either side killed while KV moves.
# Tells by lines "guest: ok NAME", "guest: failed NAME", at last "guest: end".
/bin/busybox --install -s /bin
# busybox prefers its own, which knows no veth.
ip() { /test/ip "$@"; }
export PATH=/test:/usr/sbin:/usr/bin:/sbin:/bin HOME=/tmp
ADDRESS=10.9.0.1

say() { echo "guest: $*"; }
end() {
    say end
    echo b >/proc/sysrq-trigger
    sleep 60
}

mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
exec >/dev/console 2>&1 </dev/null
mkdir -p /dev/shm && mount -t tmpfs shm /dev/shm
mount -t tmpfs tmp /tmp
ulimit -l unlimited
ulimit -c 0
cd /tmp || end

# check NAME COMMAND...
check() {
    what=$1
    shift
    if timeout 900 "$@" >/tmp/out 2>&1; then
        say ok "$what"
    else
        tail -n 60 /tmp/out
        say failed "$what"
    fi
}

# A function cannot be run by timeout; these have their own ends.
check_here() {
    what=$1
    shift
    if "$@" >/tmp/out 2>&1; then
        say ok "$what"
    else
        tail -n 60 /tmp/out
        for n in /tmp/*.log; do echo "--- $n"; tail -n 6 "$n"; done
        say failed "$what"
    fi
}
make_device() {
    for m in veth crc32_generic rdma_rxe rdma_ucm ib_uverbs; do
        modprobe $m || return 1
    done
    ip link set lo up && ip link add d0 type veth peer name d1 && ip addr add $ADDRESS/24 dev d0 &&
        ip link set d0 up && ip link set d1 up && rdma link add rxe0 type rxe netdev d0 || return 1
    for _ in 1 2 3 4 5 6 7 8 9 10; do
        [ -e /dev/infiniband/uverbs0 ] && rdma link show && return 0
        sleep 1
    done
    return 1
}
check_here device make_device
grep -q . /sys/class/infiniband/rxe0/node_guid || end
# The second GID is the one of the IPv4 address.
export UCX_IB_GID_INDEX=1
# UCX watches peers over UD, whose setup between two endpoints of one Soft-RoCE device never ends, and a
# flush waits for that too. Dead peers are noticed by the connection and by the handoff's silence.
export UCX_KEEPALIVE_INTERVAL=inf

export BATON_TEST_NET_SLOW=1
check net rdma_check $ADDRESS
export BATON_TEST_NET_LISTEN=$ADDRESS:0 BATON_TEST_NET_TRANSPORTS=rc_v,self
check handoff test_handoff test_put_tcp
check handoff-behind test_handoff 'test_only_what_lies_behind_is_sent'
check handoff-killed test_handoff-crash '*killed'
check handoff-stopped test_handoff-crash '*stopped'
unset BATON_TEST_NET_LISTEN BATON_TEST_NET_TRANSPORTS

# --- whole nodes --------------------------------------------------------------------------------

ready() { # NAME: its address once it serves
    for _ in $(seq 600); do
        [ -s "/tmp/$1.ready" ] && sed -n "s/^${2:-listen}=//p" "/tmp/$1.ready" && return 0
        sleep 0.2
    done
    return 1
}

node() { # KIND NAME PORT ARG...
    kind=$1 name=$2 port=$3
    shift 3
    rm -f "/tmp/$name.ready"
    "baton-$kind" --model=/test/tiny.gguf --name="$name" --ready_file="/tmp/$name.ready" \
        --listen=127.0.0.1:"$port" --net.listen=$ADDRESS:0 --net.transports=rc_v,self --allow_insecure=true --redis.address= \
        --engine.threads=1 --engine.pool_bytes=16M --engine.max_batch_tokens=32 --heartbeat=200ms --handoff.silence=8s \
        --access_log="/tmp/$name.access" "$@" 2>>"/tmp/$name.log" &
    eval "pid_$name=$!"
}

router() { # NAME SEEDS ARG...
    name=$1 seeds=$2
    shift 2
    baton-router --model=/test/tiny.gguf --name="$name" --ready_file="/tmp/$name.ready" --listen=127.0.0.1:0 \
        --http.listen=127.0.0.1:0 --redis.address= --cluster.seeds="$seeds" \
        --node.silence=60s --route.retries=8 --route.wait=60s --admission.first_token=0s "$@" 2>>"/tmp/$name.log" &
    eval "pid_$name=$!"
}

prompt() { # SEED LENGTH
    seq "$2" | awk -v s="$1" '{printf "%s%d", (NR > 1 ? "," : ""), 3 + (s * 7919 + $1 * 31) % 300}'
}

ask() { # ROUTER SEED LENGTH: the answer's text
    curl -sS --fail -m 300 -H 'Content-Type: application/json' \
        -d "{\"prompt\":[$(prompt "$2" "$3")],\"max_tokens\":12,\"temperature\":0,\"ignore_eos\":true}" \
        "http://$(ready "$1" http)/v1/completions" | sed 's/.*"text":"\(.*\)","logprobs".*/\1/'
}

both_ready() {
    for _ in $(seq 300); do
        curl -sS "http://$(ready split http)/metrics" | grep -q 'baton_router_nodes{state="ready"} 4' &&
            return 0
        sleep 0.2
    done
    return 1
}

start_nodes() {
    node prefill p0 7001 && node prefill p1 7002 && node decode d0 7003 && node decode d1 7004
    node decode alone 7005 --role=both
    for n in p0 p1 d0 d1 alone; do ready $n >/dev/null || return 1; done
    router split 127.0.0.1:7001,127.0.0.1:7002,127.0.0.1:7003,127.0.0.1:7004 --route.path=direct
    router plain 127.0.0.1:7005
    ready split >/dev/null && ready plain >/dev/null && both_ready
}

same_answers() {
    for n in 1 40 333 700; do
        want=$(ask plain $n $n) && got=$(ask split $n $n) || return 1
        [ -n "$want" ] && [ "$want" = "$got" ] || { echo "$n: '$want' '$got'"; return 1; }
    done
    cat /tmp/d0.access /tmp/d1.access
    ! grep -v '"transport": *"rdma"' /tmp/d0.access /tmp/d1.access && grep -q rdma /tmp/d0.access /tmp/d1.access
}

# killed KIND: both nodes of a kind in turn while a long prompt is under way, at different times.
killed() {
    for i in 1 2 3 4 5 6; do
        victim=$1$((i % 2)) port=$([ "$1" = p ] && echo $((7001 + i % 2)) || echo $((7003 + i % 2)))
        kind=$([ "$1" = p ] && echo prefill || echo decode)
        seed=$((i * 10 + $([ "$1" = p ] && echo 1 || echo 2)))
        want=$(ask plain $seed 700)
        ask split $seed 700 >/tmp/answer &
        asker=$!
        usleep $((150000 * i))
        eval "kill -9 \$pid_$victim; wait \$pid_$victim"
        wait $asker
        [ -n "$want" ] && [ "$want" = "$(cat /tmp/answer)" ] || { echo "$victim: '$want' '$(cat /tmp/answer)'"; return 1; }
        node $kind $victim $port
        ready $victim >/dev/null && both_ready || return 1
    done
}

# No page is lost: a node that has not got all back says so by its exit status.
all_pages_back() {
    for n in split plain p0 p1 d0 d1 alone; do
        eval "kill \$pid_$n; wait \$pid_$n" || { echo "$n: exit status $?"; cat "/tmp/$n.log"; return 1; }
    done
    ! grep -h 'level=error' /tmp/*.log
}

check_here start start_nodes
check_here same-answers same_answers
check_here prefill-killed killed p
check_here decode-killed killed d
check_here pages all_pages_back
end
