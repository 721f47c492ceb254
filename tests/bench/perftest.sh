# What ucx_perftest reaches here, with the settings that our nets use; sourced by bench_store.sh and
# bench_handoff.sh.
#
# perftest sends one buffer over and over: a short message never leaves the cache, while blocks and
# pages do. So the ceiling is taken with a message larger than the last-level cache, which is read
# from and written to memory as ours are; the short one is told beside it.

perftest_port=27450
# perftest TRANSPORTS TEST SIZE COUNT WARMUP: GB/s
perftest() {
    export UCX_TCP_TX_SEG_SIZE=256k UCX_TCP_RX_SEG_SIZE=256k UCX_WARN_UNUSED_ENV_VARS=n UCX_LOG_LEVEL=error
    local server port=$perftest_port
    UCX_TLS=$1 ucx_perftest -p "$port" >/dev/null 2>&1 &
    server=$!
    for _ in 1 2 3 4 5 6 7 8 9 10; do
        sleep 0.3
        UCX_TLS=$1 timeout 60 ucx_perftest 127.0.0.1 -p "$port" -t "$2" -s "$3" -n "$4" -w "$5" -f 2>/dev/null |
            awk 'NF == 8 && $1 > 0 {v = $6 * 1048576 / 1e9} END {if (v) print v; else exit 1}' && break
    done
    kill "$server" 2>/dev/null || true
    wait "$server" 2>/dev/null || true
}

# perftest_ceilings: sets shm, shm_cached, tcp, tcp_cached
perftest_ceilings() {
    local large=536870912 piece=524288 part=258048
    perftest_port=27451 shm=$(perftest posix,sysv,cma,self ucp_get $large 6 1)
    perftest_port=27452 shm_cached=$(perftest posix,sysv,cma,self ucp_get $piece 4000 100)
    perftest_port=27453 tcp=$(perftest tcp,self ucp_am_bw $large 6 1)
    perftest_port=27454 tcp_cached=$(perftest tcp,self ucp_am_bw $part 40000 100)
}
