/* One call to a router, from connecting to its status. */
#include "deploy/ctl/ctl.h"

#include <stdio.h>

struct running {
    const struct ctl_call *c;
    int code;
};

static void on_message(struct bt_rpc_client_call *call, const ProtobufCMessage *msg)
{
    const struct running *r = bt_rpc_client_user(call);

    r->c->message(msg);
}

static void on_closed(struct bt_rpc_client_call *call, int status, const char *text)
{
    struct running *r = bt_rpc_client_user(call);

    if (status != BT_RPC_OK) {
        fprintf(stderr, "batonctl: %s: %s\n", bt_rpc_status_name(status), text);
        r->code = 1;
    }
    bt_loop_stop(bt_rpc_client_loop(call));
}

static int fail(int rc, const struct bt_err *err)
{
    fprintf(stderr, "batonctl: %s\n", bt_err_msg(err, rc));
    return 1;
}

int ctl_run(const char *router, const struct ctl_call *c)
{
    static const struct bt_rpc_client_events events = {.message = on_message, .closed = on_closed};
    struct running r = {.c = c};
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
    rc = bt_rpc_channel_create(loop, router, NULL, &channel, &err);
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
