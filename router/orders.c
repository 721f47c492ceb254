/* Orders of operators: cordons and canaries, and the calls that give them. Loop thread; the thread
 * "redis-orders" only posts what it has read.
 *
 * Orders by key (common/cluster/orders.h): "cordon:NODE" with any text, "canary:ROLE" with
 * "PERCENT VERSION". A call is answered when Redis has its order and this router follows it. */
#include "router/request_int.h"

#include "common/base/buf.h"
#include "common/conf/value.h"
#include "common/obs/log.h"

#include <stdio.h>
#include <stdlib.h>

static const char *const roles[] = {"prefill", "decode", "both"}; /* those of canaries */

/* One call until its order is in force. In rt_router.orders.waiting; freed by on_placed, or by
 * rt_orders_fini where that does not come any more. */
struct waiting {
    struct bt_list link;
    struct bt_msg msg; /* from the other thread */
    struct rt_router *router;
    struct bt_rpc_call *call; /* NULL = the caller is gone */
    int rc;
    struct bt_err err;
};

struct news {
    struct bt_msg msg;
    struct rt_router *router;
    struct bt_order_list *list;
};

/* --- following ------------------------------------------------------------------------------- */

static const char *text_of(const struct rt_router *r, const char *what, const char *name)
{
    const struct bt_order_list *l = r->orders.list;
    size_t n = strlen(what);

    for (size_t i = 0; l && i < l->n; i++) {
        if (strncmp(l->at[i].key, what, n) == 0 && strcmp(l->at[i].key + n, name) == 0) {
            return l->at[i].text;
        }
    }
    return NULL;
}

bool rt_orders_cordons(const struct rt_router *r, const char *name)
{
    return text_of(r, "cordon:", name) != NULL;
}

/* "PERCENT VERSION" */
static bool read_canary(const char *text, struct rt_canary *c)
{
    const char *blank = strchr(text, ' ');
    int64_t percent;

    if (!blank ||
        bt_read_int((struct bt_str){text, (size_t)(blank - text)}, 0, 100, &percent) < 0 ||
        strlen(blank + 1) >= sizeof(c->version) || !blank[1] || strchr(blank + 1, ' ')) {
        return false;
    }
    *c = (struct rt_canary){.percent = (unsigned)percent};
    snprintf(c->version, sizeof(c->version), "%s", blank + 1);
    return true;
}

static void apply_canaries(struct rt_router *r)
{
    for (size_t i = 0; i < BT_ARRAY_LEN(roles); i++) {
        const char *text = text_of(r, "canary:", roles[i]);
        struct rt_canary *old = &r->orders.canary[i], next = {0};

        if (text && !read_canary(text, &next)) {
            BT_WARN("orders", "role=%s msg=\"malformed canary; none is followed\"", roles[i]);
            next = (struct rt_canary){0};
        }
        if (strcmp(next.version, old->version) != 0 || next.percent != old->percent) {
            BT_INFO("canary", "role=%s version=\"%s\" percent=%u", roles[i], next.version,
                    next.percent);
            *old = next;
        }
    }
}

/* The other orders of the list are a later version's. */
static void apply(struct rt_router *r)
{
    bt_list_for_each (it, &r->nodes) {
        struct rt_node *n = BT_LIST_ENTRY(it, struct rt_node, link);
        bool was = n->cordoned;

        rt_orders_mark(n);
        if (n->cordoned != was) {
            BT_INFO("cordon", "node=%s on=%d", n->name, n->cordoned);
        }
    }
    apply_canaries(r);
    rt_requests_kick(r);
}

void rt_orders_mark(struct rt_node *n)
{
    n->cordoned = rt_orders_cordons(n->router, n->name);
}

/* --- canaries -------------------------------------------------------------------------------- */

static bool is_canary(const struct rt_router *r, const struct rt_node *n)
{
    return strcmp(n->version, r->orders.canary[n->role].version) == 0;
}

/* Whether this request is one of the canary's share. Drawn once for a request, in even steps, so
 * that of any hundred requests as many go there as the order says. */
static bool draw(struct rt_request *req, enum rt_role role)
{
    struct rt_canary *c = &req->router->orders.canary[role];
    unsigned bit = 1u << role;

    if (!(req->canary_drawn & bit)) {
        req->canary_drawn |= bit;
        c->owed += c->percent;
        if (c->owed >= 100) {
            c->owed -= 100;
            req->canary_is |= bit;
        }
    }
    return req->canary_is & bit;
}

static void hold_role(struct rt_request *req,
                      enum rt_role role,
                      struct rt_node_view *views,
                      struct rt_target **targets)
{
    struct rt_router *r = req->router;
    bool want = draw(req, role);
    size_t n_fit = 0;

    for (size_t i = 0; i < r->n_targets; i++) {
        n_fit += views[i].role == role && views[i].ready && !views[i].excluded &&
                 is_canary(r, targets[i]->node) == want;
    }
    for (size_t i = 0; n_fit > 0 && i < r->n_targets; i++) {
        if (views[i].role == role && is_canary(r, targets[i]->node) != want) {
            views[i].ready = false;
        }
    }
}

bool rt_orders_hold(struct rt_request *req, struct rt_node_view *views, struct rt_target **targets)
{
    bool any = false;

    for (size_t i = 0; i < BT_ARRAY_LEN(roles); i++) {
        if (req->router->orders.canary[i].version[0]) {
            hold_role(req, (enum rt_role)i, views, targets);
            any = true;
        }
    }
    return any;
}

void rt_orders_count(struct rt_router *r, const struct rt_node *n)
{
    struct rt_canary *c = &r->orders.canary[n->role];

    if (c->version[0]) {
        c->n_requests++;
        c->n_canary += is_canary(r, n);
    }
}

size_t rt_orders_canaries(const struct rt_router *r, Baton__V1__CanaryInfo *rows)
{
    size_t n = 0;

    for (size_t i = 0; i < BT_ARRAY_LEN(roles); i++) {
        const struct rt_canary *c = &r->orders.canary[i];

        if (c->version[0]) {
            baton__v1__canary_info__init(&rows[n]);
            rows[n].role = (char *)(uintptr_t)roles[i];
            rows[n].version = (char *)(uintptr_t)c->version;
            rows[n].percent = c->percent;
            rows[n].requests = c->n_requests;
            rows[n].canary_requests = c->n_canary;
            n++;
        }
    }
    return n;
}

/* --- from the other thread ------------------------------------------------------------------- */

static void on_news(struct bt_msg *msg, void *loop)
{
    struct news *n = BT_CONTAINER_OF(msg, struct news, msg);
    struct rt_router *r = n->router;

    free(r->orders.list);
    r->orders.list = n->list;
    if (!r->draining) {
        apply(r);
    }
    free(n);
}

/* [redis-orders thread] */
static void changed(void *arg, struct bt_order_list *take_list)
{
    struct rt_router *r = arg;
    struct news *n = bt_calloc(1, sizeof(*n));

    if (!n) {
        BT_ERROR("orders", "msg=\"out of memory; orders stay as they were\"");
        free(take_list);
        return;
    }
    *n = (struct news){.msg.handle = on_news, .router = r, .list = take_list};
    if (!bt_loop_post(r->loop, &n->msg)) {
        free(n->list);
        free(n);
    }
}

static void on_placed(struct bt_msg *msg, void *loop)
{
    struct waiting *w = BT_CONTAINER_OF(msg, struct waiting, msg);
    const struct rt_conf *conf = w->router->conf;
    Baton__V1__OrderReply out = BATON__V1__ORDER_REPLY__INIT;

    if (w->call) {
        bt_rpc_call_set_user(w->call, NULL);
        if (w->rc < 0) {
            bt_rpc_call_fail(w->call, w->rc, &w->err);
        } else {
            out.kept = bt_orders_kept(w->router->orders.client);
            out.settle_ms = out.kept ? (uint32_t)(2 * conf->cluster.poll_ns / BT_NS_PER_MS) : 0;
            bt_rpc_call_reply(w->call, &out.base);
        }
    }
    bt_list_remove(&w->link);
    free(w);
}

/* [redis-orders thread] */
static void placed(void *arg, void *token, int rc, const struct bt_err *err)
{
    struct rt_router *r = arg;
    struct waiting *w = token;

    /* Where Redis refuses us we do not refuse the operator. */
    w->rc = rc == BT_E_UNAUTHENTICATED || rc == BT_E_DENIED ? BT_E_UNAVAILABLE : rc;
    w->err = *err;
    if (!bt_loop_post(r->loop, &w->msg)) {
        /* the router is going; rt_orders_fini frees it */
    }
}

/* --- calls ----------------------------------------------------------------------------------- */

static void order(struct bt_rpc_call *call, const char *key, const char *text)
{
    struct rt_router *r = bt_rpc_call_service_user(call);
    struct waiting *w = bt_calloc(1, sizeof(*w));
    int rc = BT_E_NOMEM;

    if (w) {
        *w = (struct waiting){.msg.handle = on_placed, .router = r, .call = call};
        bt_list_push_back(&r->orders.waiting, &w->link);
        rc = bt_orders_place(r->orders.client, key, text, w);
    }
    if (rc < 0) {
        if (w) {
            bt_list_remove(&w->link);
            free(w);
        }
        bt_rpc_call_fail(call, rc, NULL);
        return;
    }
    bt_rpc_call_set_user(call, w);
    BT_INFO("order", "key=%s text=\"%s\"", key, text ? text : "");
}

static void order_closed(struct bt_rpc_call *call, bool cancelled)
{
    struct waiting *w = bt_rpc_call_user(call);

    if (w) {
        w->call = NULL;
    }
}

static bool knows_node(const struct rt_router *r, const char *name)
{
    bt_list_for_each (it, &r->nodes) {
        if (strcmp(BT_LIST_ENTRY(it, struct rt_node, link)->name, name) == 0) {
            return true;
        }
    }
    for (size_t i = 0; i < rt_stores_n(r); i++) {
        Baton__V1__NodeInfo m;

        rt_store_info(r, i, &m);
        if (strcmp(m.name, name) == 0) {
            return true;
        }
    }
    return false;
}

/* A name that was ordered but is not there may be on its way back: its cordon can be taken off. */
static void cordon(struct bt_rpc_call *call, const ProtobufCMessage *msg)
{
    const Baton__V1__CordonRequest *m = (const void *)msg;
    const struct rt_router *r = bt_rpc_call_service_user(call);
    char key[BT_ORDER_KEY_MAX + 1];
    struct bt_err err = {0};
    int rc = BT_OK;

    if (!bt_member_name_ok(bt_str_of(m->node))) {
        rc = BT_FAIL(&err, BT_E_INVALID, "%.80s is no name of a node", m->node);
    } else if (!knows_node(r, m->node) && (m->on || !rt_orders_cordons(r, m->node))) {
        rc = BT_FAIL(&err, BT_E_NOT_FOUND, "no node %s is known here", m->node);
    }
    if (rc < 0) {
        bt_rpc_call_fail(call, rc, &err);
        return;
    }
    snprintf(key, sizeof(key), "cordon:%s", m->node);
    order(call, key, m->on ? "1" : NULL);
}

static bool version_ok(const char *v)
{
    size_t n = strlen(v);

    for (size_t i = 0; i < n; i++) {
        if (v[i] <= ' ' || v[i] > '~') {
            return false;
        }
    }
    return n < RT_VERSION_MAX;
}

static int
check_canary(const struct rt_router *r, const Baton__V1__SetCanaryRequest *m, struct bt_err *err)
{
    bool role_ok = false;

    for (size_t i = 0; i < BT_ARRAY_LEN(roles); i++) {
        role_ok = role_ok || strcmp(m->role, roles[i]) == 0;
    }
    if (!role_ok) {
        return BT_FAIL(err, BT_E_INVALID, "role %.20s: prefill, decode or both", m->role);
    }
    if (!version_ok(m->version)) {
        return BT_FAIL(err, BT_E_INVALID, "a version has up to %d printable characters, no blanks",
                       RT_VERSION_MAX - 1);
    }
    if (m->percent > 100) {
        return BT_FAIL(err, BT_E_INVALID, "percent = %u: 0 to 100", m->percent);
    }
    if (!m->version[0]) {
        return BT_OK;
    }
    bt_list_for_each (it, &r->nodes) {
        const struct rt_node *n = BT_LIST_ENTRY(it, struct rt_node, link);

        if (strcmp(rt_role_name(n->role), m->role) == 0 && strcmp(n->version, m->version) == 0) {
            return BT_OK;
        }
    }
    return BT_FAIL(err, BT_E_NOT_FOUND, "no %s node announces version %s", m->role, m->version);
}

static void set_canary(struct bt_rpc_call *call, const ProtobufCMessage *msg)
{
    const Baton__V1__SetCanaryRequest *m = (const void *)msg;
    char key[32], text[BT_ORDER_TEXT_MAX + 1];
    struct bt_err err = {0};
    int rc = check_canary(bt_rpc_call_service_user(call), m, &err);

    if (rc < 0) {
        bt_rpc_call_fail(call, rc, &err);
        return;
    }
    snprintf(key, sizeof(key), "canary:%.20s", m->role);
    snprintf(text, sizeof(text), "%u %.*s", m->percent, RT_VERSION_MAX - 1, m->version);
    order(call, key, m->version[0] ? text : NULL);
}

const struct bt_rpc_method rt_operator_methods[] = {
    {.path = "/baton.v1.Operator/Cordon",
     .request = &baton__v1__cordon_request__descriptor,
     .response = &baton__v1__order_reply__descriptor,
     .message = cordon,
     .closed = order_closed},
    {.path = "/baton.v1.Operator/SetCanary",
     .request = &baton__v1__set_canary_request__descriptor,
     .response = &baton__v1__order_reply__descriptor,
     .message = set_canary,
     .closed = order_closed},
};
const size_t rt_operator_n_methods = BT_ARRAY_LEN(rt_operator_methods);

/* --- start and end --------------------------------------------------------------------------- */

int rt_orders_start(struct rt_router *r, struct bt_err *err)
{
    const struct bt_orders_cfg cfg = {
        .conf = &r->conf->cluster, .changed = changed, .placed = placed, .arg = r};

    return bt_orders_create(&cfg, &r->orders.client, err);
}

void rt_orders_stop(struct rt_router *r)
{
    bt_orders_destroy(r->orders.client);
}

void rt_orders_fini(struct rt_router *r)
{
    bt_list_for_each_safe (it, &r->orders.waiting) {
        bt_list_remove(it);
        free(BT_LIST_ENTRY(it, struct waiting, link));
    }
    free(r->orders.list);
    r->orders.list = NULL;
}
