/* Settings of servers and channels in one place, time conversion, gRPC's log. Any thread. */
#include "common/obs/log.h"
#include "common/rpc/rpc_int.h"
#include "common/rpc/server.h"

#include <arpa/inet.h>
#include <grpc/grpc_security.h>
#include <grpc/support/log.h>
#include <grpc/support/time.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>

/* A connection attempt that got no answer, not even a refusal, is given up after this. */
#define CONNECT_TIMEOUT_MS 3000

static __thread char log_last[1024];

static void arg_int(struct bt_rpc_args *a, const char *key, int value)
{
    BT_BUG_ON(a->args.num_args >= BT_RPC_MAX_ARGS);
    a->v[a->args.num_args++] =
        (grpc_arg){.type = GRPC_ARG_INTEGER, .key = (char *)(uintptr_t)key, .value.integer = value};
}

void bt_rpc_args_add_str(struct bt_rpc_args *a, const char *key, const char *value)
{
    BT_BUG_ON(a->args.num_args >= BT_RPC_MAX_ARGS);
    a->v[a->args.num_args++] = (grpc_arg){.type = GRPC_ARG_STRING,
                                          .key = (char *)(uintptr_t)key,
                                          .value.string = (char *)(uintptr_t)value};
}

/* What both ends share. Each end keeps quiet connections alive and accepts the other's pings. */
static void
args_common(struct bt_rpc_args *a, const struct bt_rpc_keepalive *ka, int max_message_bytes)
{
    int time_ms = ka->time_ms > 0 ? ka->time_ms : BT_RPC_KEEPALIVE_TIME_MS;
    int timeout_ms = ka->timeout_ms > 0 ? ka->timeout_ms : BT_RPC_KEEPALIVE_TIMEOUT_MS;

    a->args.num_args = 0;
    a->args.args = a->v;
    arg_int(a, GRPC_ARG_KEEPALIVE_TIME_MS, time_ms);
    arg_int(a, GRPC_ARG_KEEPALIVE_TIMEOUT_MS, timeout_ms);
    arg_int(a, GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, !ka->calls_only);
    arg_int(a, GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0); /* 0 = no limit on our own pings */
    arg_int(a, GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS,
            BT_MIN(BT_RPC_MIN_PING_MS, time_ms / 2));
    arg_int(a, GRPC_ARG_MAX_RECEIVE_MESSAGE_LENGTH, max_message_bytes);
    /* A few kilobytes of gzip may stand for gigabytes, and core checks only the packed size. */
    arg_int(a, GRPC_COMPRESSION_CHANNEL_ENABLED_ALGORITHMS_BITSET, 1 << GRPC_COMPRESS_NONE);
}

void bt_rpc_args_server(struct bt_rpc_args *a,
                        const struct bt_rpc_keepalive *ka,
                        int max_message_bytes,
                        int max_streams)
{
    args_common(a, ka, max_message_bytes);
    arg_int(a, GRPC_ARG_MAX_CONCURRENT_STREAMS, max_streams);
    if (ka->calls_only) { /* core would count a client's own pings between calls against it */
        arg_int(a, GRPC_ARG_HTTP2_MAX_PING_STRIKES, 0);
    }
    /* Without this a second process binds the same port in silence and takes half the calls. */
    arg_int(a, GRPC_ARG_ALLOW_REUSEPORT, 0);
    /* Fixed windows: a stream holds this much that nobody waits for, not what the link could carry;
     * guard.c tells an endless message from read-ahead by that. */
    arg_int(a, GRPC_ARG_HTTP2_BDP_PROBE, 0);
    arg_int(a, GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, 64 << 10);
    arg_int(a, GRPC_ARG_MAX_METADATA_SIZE, 16 << 10);
    arg_int(a, GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS, 10000);
}

void bt_rpc_args_client(struct bt_rpc_args *a,
                        const struct bt_rpc_keepalive *ka,
                        int max_message_bytes,
                        const int backoff_ms[2])
{
    args_common(a, ka, max_message_bytes);
    arg_int(a, GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, backoff_ms[0]);
    arg_int(a, GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, CONNECT_TIMEOUT_MS); /* its real meaning */
    arg_int(a, GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, backoff_ms[1]);
    /* One channel, one connection of its own: no backoff inherited from an earlier channel. */
    arg_int(a, GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    /* Our calls are not repeated by core; its filter for that keeps a copy of what is sent. */
    arg_int(a, GRPC_ARG_ENABLE_RETRIES, 0);
    arg_int(a, GRPC_ARG_ENABLE_HTTP_PROXY, 0);
    arg_int(a, GRPC_ARG_SERVICE_CONFIG_DISABLE_RESOLUTION, 1);
}

gpr_timespec bt_rpc_to_gpr(uint64_t deadline_ns)
{
    gpr_timespec t = gpr_inf_future(GPR_CLOCK_MONOTONIC);

    if (deadline_ns != BT_NEVER_NS) {
        t.tv_sec = (int64_t)(deadline_ns / BT_NS_PER_S);
        t.tv_nsec = (int32_t)(deadline_ns % BT_NS_PER_S);
    }
    return t;
}

uint64_t bt_rpc_from_gpr(gpr_timespec t)
{
    t = gpr_convert_clock_type(t, GPR_CLOCK_MONOTONIC);
    if (gpr_time_cmp(t, gpr_inf_future(GPR_CLOCK_MONOTONIC)) == 0) {
        return BT_NEVER_NS;
    }
    return t.tv_sec < 0 ? 0 : (uint64_t)t.tv_sec * BT_NS_PER_S + (uint64_t)t.tv_nsec;
}

/* What core calls an error is mostly a peer that went away: our layers report that with the call,
 * so here it is debug. A failed assertion is followed by abort and must be seen. */
static void log_line(gpr_log_func_args *line)
{
    snprintf(log_last, sizeof(log_last), "%s", line->message);
    if (strncmp(line->message, "assertion failed", 16) == 0) {
        BT_ERROR("grpc-assert", "msg=\"%s\" file=%s:%d", line->message, line->file, line->line);
    } else {
        BT_DEBUG("grpc", "msg=\"%.600s\" file=%s:%d", line->message, line->file, line->line);
    }
}

void bt_rpc_log_init(void)
{
    gpr_set_log_function(log_line);
    if (!getenv("GRPC_VERBOSITY")) {
        gpr_set_log_verbosity(GPR_LOG_SEVERITY_ERROR);
    }
}

const char *bt_rpc_log_last(void)
{
    return log_last;
}

void bt_rpc_log_clear(void)
{
    log_last[0] = 0;
}

struct bt_str bt_rpc_md_get(const grpc_metadata_array *md, const char *key)
{
    for (size_t i = 0; i < md->count; i++) {
        const grpc_metadata *m = &md->metadata[i];

        if (grpc_slice_str_cmp(m->key, key) == 0) {
            return (struct bt_str){(const char *)GRPC_SLICE_START_PTR(m->value),
                                   GRPC_SLICE_LENGTH(m->value)};
        }
    }
    return (struct bt_str){NULL, 0};
}

bool bt_rpc_address_is_local(const char *address)
{
    const char *colon = strrchr(address, ':');
    char host[80];
    struct in6_addr a6;
    struct in_addr a4;
    size_t n;

    if (strncmp(address, "unix:", 5) == 0 || strncmp(address, "unix-abstract:", 14) == 0) {
        return true;
    }
    n = colon ? (size_t)(colon - address) : strlen(address);
    if (n >= 2 && address[0] == '[' && address[n - 1] == ']') {
        address++;
        n -= 2;
    }
    if (n >= sizeof(host)) {
        return false;
    }
    memcpy(host, address, n);
    host[n] = 0;
    if (strcmp(host, "localhost") == 0) {
        return true;
    }
    if (inet_pton(AF_INET, host, &a4) == 1) {
        return ntohl(a4.s_addr) >> 24 == 127;
    }
    return inet_pton(AF_INET6, host, &a6) == 1 &&
           (IN6_IS_ADDR_LOOPBACK(&a6) || (IN6_IS_ADDR_V4MAPPED(&a6) && a6.s6_addr[12] == 127));
}

const char *bt_rpc_status_name(int status)
{
    static const char *const names[] = {
        "OK",
        "CANCELLED",
        "UNKNOWN",
        "INVALID_ARGUMENT",
        "DEADLINE_EXCEEDED",
        "NOT_FOUND",
        "ALREADY_EXISTS",
        "PERMISSION_DENIED",
        "RESOURCE_EXHAUSTED",
        "FAILED_PRECONDITION",
        "ABORTED",
        "OUT_OF_RANGE",
        "UNIMPLEMENTED",
        "INTERNAL",
        "UNAVAILABLE",
        "DATA_LOSS",
        "UNAUTHENTICATED",
    };

    return status >= 0 && status < (int)BT_ARRAY_LEN(names) ? names[status] : "STATUS_?";
}
