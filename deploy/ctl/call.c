/* One call to a router or node, from connecting to its status, and its exit code. */
#include "deploy/ctl/cluster.h"

#include <string.h>
#include <time.h>

struct running {
    const struct ctl_call *c;
    const char *address;
    bool reached; /* there was a connection, so that UNAVAILABLE is the other side's word */
    int code;
};

static void on_state(void *user, enum bt_rpc_conn_state state)
{
    struct running *r = user;

    r->reached = r->reached || state == BT_RPC_CONN_READY;
}

static void on_message(struct bt_rpc_client_call *call, const ProtobufCMessage *msg)
{
    struct running *r = bt_rpc_client_user(call);

    r->reached = true;
    r->c->message(r->c->user, msg);
}

static int code_of(const struct running *r, int status)
{
    switch (status) {
    case BT_RPC_OK:
        return CTL_OK;
    case BT_RPC_UNAVAILABLE:
        return r->reached ? CTL_FAILED : CTL_UNREACHABLE;
    case BT_RPC_DEADLINE_EXCEEDED:
        return CTL_TIMEOUT;
    case BT_RPC_NOT_FOUND:
        return CTL_NOT_FOUND;
    case BT_RPC_UNAUTHENTICATED:
    case BT_RPC_PERMISSION_DENIED:
        return CTL_DENIED;
    default:
        return CTL_FAILED;
    }
}

/* What a failed handshake means to whoever typed the command; NULL = nothing of the kind. */
static const char *hint_of(const struct running *r, const char *text)
{
    if (strstr(text, "Peer name")) {
        return r->c->peer == CTL_NODE ? "--node-tls-name is the name in the nodes' certificates"
                                      : "--tls-name is the name in the router's certificate";
    }
    if (strstr(text, "certificate verify failed")) {
        return "its certificate is not of the CA of --ca, or has expired";
    }
    if (strstr(text, "wrong version number")) {
        return "it speaks no TLS: call it without --ca";
    }
    return strstr(text, "Socket closed") ? "if it speaks TLS it wants --ca, and perhaps --cert and "
                                           "--key"
                                         : NULL;
}

static void on_closed(struct bt_rpc_client_call *call, int status, const char *text)
{
    struct running *r = bt_rpc_client_user(call);

    if (status != BT_RPC_OK) {
        fprintf(stderr, "batonctl: %s: %s\n", bt_rpc_status_name(status), text);
        if (status == BT_RPC_UNAVAILABLE && !r->reached && hint_of(r, text)) {
            fprintf(stderr, "batonctl: %s\n", hint_of(r, text));
        }
    }
    r->code = code_of(r, status);
    bt_loop_stop(bt_rpc_client_loop(call));
}

static int fail(int rc, const struct bt_err *err)
{
    fprintf(stderr, "batonctl: %s\n", bt_err_msg(err, rc));
    return CTL_FAILED;
}

void ctl_sleep(uint64_t ns)
{
    struct timespec t = {(time_t)(ns / 1000000000), (long)(ns % 1000000000)};

    nanosleep(&t, NULL);
}

int ctl_run(const char *address, const struct ctl_call *c)
{
    static const struct bt_rpc_client_events events = {.message = on_message, .closed = on_closed};
    struct running r = {.c = c, .address = address};
    struct bt_rpc_channel_config cc = {
        .sec = ctl_access(c->peer), .on_state = on_state, .user = &r};
    struct bt_rpc_client_args a = {.path = c->path,
                                   .response = c->response,
                                   .events = &events,
                                   .user = &r,
                                   .deadline_ns = c->deadline_ns,
                                   .request = c->request,
                                   .half_close = true};
    struct bt_rpc_client_call *call;
    struct bt_rpc_channel *channel;
    struct bt_loop *loop;
    struct bt_err err = {0};
    int rc = bt_loop_create(&loop, &err);

    if (rc < 0) {
        return fail(rc, &err);
    }
    ctl_access_warn(address);
    rc = bt_rpc_channel_create(loop, address, &cc, &channel, &err);
    if (rc == BT_OK) {
        rc = bt_rpc_client_start(channel, &a, &call, &err);
        if (rc == BT_OK) {
            bt_loop_run(loop);
        }
        bt_rpc_channel_destroy(channel);
    }
    bt_loop_destroy(loop);
    return rc < 0 ? fail(rc, &err) : r.code;
}
