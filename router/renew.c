/* When the token that routers show to nodes has been exchanged, the sessions that run are told, so
 * that taking the old one away at the nodes ends none of them. Loop thread. */
#include "router/router_int.h"

#include "proto/wire/session.h"

#include <openssl/crypto.h>

/* Whoever cannot be told now comes back with the new token when its session ends. */
static void tell(struct rt_node *n, char *bearer)
{
    Baton__V1__RouterMessage m = BATON__V1__ROUTER_MESSAGE__INIT;
    Baton__V1__RenewToken renew = BATON__V1__RENEW_TOKEN__INIT;

    if (n->state != RT_NODE_READY && n->state != RT_NODE_DRAINING) {
        return;
    }
    if (n->wire_version < WIRE_SESSION_RENEW) {
        return;
    }
    renew.authorization = bearer;
    m.kind_case = BATON__V1__ROUTER_MESSAGE__KIND_RENEW;
    m.renew = &renew;
    (void)!rt_node_send(n, &m);
}

static void on_look(struct bt_loop *loop, struct bt_timer *timer)
{
    struct rt_router *r = BT_CONTAINER_OF(timer, struct rt_router, renew.timer);
    struct bt_sec *sec = bt_node_sec(r->node);
    uint64_t version = bt_sec_tokens_version(sec);
    char bearer[BT_BEARER_MAX];

    bt_timer_start(loop, timer, bt_loop_now(loop) + BT_SEC_LOOK_NS);
    if (version == r->renew.version) {
        return;
    }
    r->renew.version = version;
    if (bt_sec_bearer(sec, bearer, sizeof(bearer))) {
        bt_list_for_each (it, &r->nodes) {
            tell(BT_LIST_ENTRY(it, struct rt_node, link), bearer);
        }
    }
    OPENSSL_cleanse(bearer, sizeof(bearer));
}

void rt_renew_start(struct rt_router *r)
{
    r->renew.version = bt_sec_tokens_version(bt_node_sec(r->node));
    r->renew.timer.fn = on_look;
    if (r->renew.version > 0) {
        bt_timer_start(r->loop, &r->renew.timer, bt_loop_now(r->loop) + BT_SEC_LOOK_NS);
    }
}

void rt_renew_stop(struct rt_router *r)
{
    if (r->loop) {
        bt_timer_stop(r->loop, &r->renew.timer);
    }
}
