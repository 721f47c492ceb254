/* Sessions with nodes: connect, welcome, load, silence, loss; legs of requests. Loop thread.
 *
 * A node is known by the address to connect to (seed) and by name (registry); its welcome tells the
 * rest. What has a session stays in the table whatever the membership says; what has none stays
 * only while a seed or the registry names it. Losing a session fails all its legs, once each.
 *
 * Invariant: a leg is in its node's map from rt_node_start until the node's last word about it or
 * the loss of the session, also when its request is long gone. */
#include "router/router_int.h"

#include "common/base/buf.h"
#include "common/obs/log.h"
#include "common/thr/time.h"
#include "proto/wire/session.h"

#include <stdlib.h>

#define RETRY_MIN_NS     (100 * BT_NS_PER_MS)
#define RETRY_MAX_NS     (2 * BT_NS_PER_S)
#define N_FAILURES_MAX   5 /* the longest pause */
#define RECONNECT_MIN_MS 50
#define RECONNECT_MAX_MS 1000

/* One call; outlives its node's interest in it, since the loop tells its end later. */
struct rt_session {
    struct rt_node *node; /* NULL = given up */
    struct bt_rpc_client_call *call;
};

static void lose(struct rt_node *n, const char *why);

/* --- state ----------------------------------------------------------------------------------- */

static const char *label(const struct rt_node *n)
{
    return n->name[0] ? n->name : n->address;
}

static void set_state(struct rt_node *n, enum rt_node_state to, const char *reason)
{
    enum rt_node_state from = n->state;

    BT_BUG_ON(!rt_node_state_allowed(from, to));
    n->state = to;
    snprintf(n->reason, sizeof(n->reason), "%s", reason);
    if (to == RT_NODE_INCOMPATIBLE ||
        (to == RT_NODE_LOST && from == RT_NODE_READY && n->role != RT_ROLE_STORE)) {
        BT_WARN("node", "node=%s address=%s from=%s to=%s msg=\"%s\"", label(n), n->address,
                rt_node_state_name(from), rt_node_state_name(to), reason);
    } else if (to == RT_NODE_CONNECTING || (to == RT_NODE_LOST && n->n_failures > 0)) {
        BT_DEBUG("node", "node=%s address=%s from=%s to=%s msg=\"%s\"", label(n), n->address,
                 rt_node_state_name(from), rt_node_state_name(to), reason);
    } else {
        BT_INFO("node", "node=%s address=%s from=%s to=%s msg=\"%s\"", label(n), n->address,
                rt_node_state_name(from), rt_node_state_name(to), reason);
    }
    rt_cache_share(n);
    if (to == RT_NODE_READY || to == RT_NODE_DRAINING) {
        rt_requests_kick(n->router);
    }
}

static void remove_node(struct rt_node *n)
{
    BT_INFO("node", "node=%s address=%s msg=\"left the cluster\"", label(n), n->address);
    bt_timer_stop(n->router->loop, &n->timer);
    bt_rpc_channel_destroy(n->channel);
    for (uint32_t i = 0; i < n->n_targets; i++) {
        rt_cache_forget(&n->targets[i]);
    }
    n->router->n_targets -= n->n_targets;
    free(n->targets);
    bt_map_fini(&n->legs);
    bt_list_remove(&n->link);
    n->router->n_nodes--;
    free(n);
}

static void heard(struct rt_node *n)
{
    bt_timer_start(n->router->loop, &n->timer, bt_loop_now(n->router->loop) + n->silence_ns);
}

/* --- welcome and load ------------------------------------------------------------------------ */

static void hex_digest(const uint8_t *d, size_t n_bytes, char *ret)
{
    for (size_t i = 0; i < n_bytes; i++) {
        snprintf(ret + 2 * i, 3, "%02x", d[i]);
    }
}

/* Another entry of the table may be the same node (a seed and a registered one, or an older life).
 */
static bool is_double(struct rt_node *n)
{
    bt_list_for_each_safe (it, &n->router->nodes) {
        struct rt_node *o = BT_LIST_ENTRY(it, struct rt_node, link);

        if (o == n || strcmp(o->name, n->name) != 0) {
            continue;
        }
        if (o->incarnation > n->incarnation ||
            (o->incarnation == n->incarnation && o->state != RT_NODE_LOST && o->session)) {
            return true;
        }
        if (o->state != RT_NODE_LOST && o->incarnation < n->incarnation) {
            lose(o, "a newer process has taken its name");
        }
    }
    return false;
}

static bool fits_model(struct rt_node *n, const Baton__V1__NodeWelcome *w)
{
    const uint8_t *ours = rt_model_digest(n->router->model);
    char a[17], b[17];

    if (!wire_session_speaks(w->wire_version)) {
        snprintf(n->reason, sizeof(n->reason),
                 "session version %u, this router speaks %d to %d and asked for one of them",
                 w->wire_version, WIRE_SESSION_VERSION_MIN, WIRE_SESSION_VERSION);
        return false;
    }
    n->wire_version = w->wire_version;
    if (n->role == RT_ROLE_STORE) { /* holds blocks of any model; their keys tell */
        return true;
    }
    if (w->model_digest.len != 32 || w->kv_format.len != 32 ||
        strlen(w->numerics) >= sizeof(n->compat.numerics) || w->context_tokens == 0) {
        snprintf(n->reason, sizeof(n->reason), "malformed welcome");
        return false;
    }
    if (memcmp(w->model_digest.data, ours, 32) != 0) {
        hex_digest(w->model_digest.data, 8, a);
        hex_digest(ours, 8, b);
        snprintf(n->reason, sizeof(n->reason), "serves model %s, this router %s", a, b);
        return false;
    }
    return true;
}

/* Two ready nodes that must not exchange KV: said once, when the later one comes. */
static void tell_misfits(struct rt_node *n)
{
    char why[160];

    bt_list_for_each (it, &n->router->nodes) {
        struct rt_node *o = BT_LIST_ENTRY(it, struct rt_node, link);

        if (o == n || o->state != RT_NODE_READY || n->role == o->role || n->role == RT_ROLE_BOTH ||
            o->role == RT_ROLE_BOTH || n->role == RT_ROLE_STORE || o->role == RT_ROLE_STORE ||
            rt_compat_equal(&n->compat, &o->compat, why)) {
            continue;
        }
        snprintf(n->reason, sizeof(n->reason), "not paired with %s: %.100s", o->name, why);
        BT_WARN("misfit", "node=%s other=%s msg=\"never paired: %s\"", n->name, o->name, why);
    }
}

/* Why what answers at a member's address is not that member, or NULL. A seed may be anybody. */
static const char *stranger(const struct rt_node *n, const Baton__V1__NodeWelcome *w)
{
    return !n->seed && n->name[0] && strcmp(n->name, w->name) != 0
               ? "another node answers at its address"
               : NULL;
}

static bool take_welcome(struct rt_node *n, const Baton__V1__NodeWelcome *w)
{
    enum bt_role role = bt_role_parse(bt_str_of(w->role));

    if (!bt_member_name_ok(bt_str_of(w->name)) || w->incarnation == 0 ||
        (role != BT_ROLE_PREFILL && role != BT_ROLE_DECODE && role != BT_ROLE_BOTH &&
         role != BT_ROLE_KVSTORE) ||
        strlen(w->net_address) >= sizeof(n->net_address) ||
        strlen(w->version) >= sizeof(n->version)) {
        return false;
    }
    snprintf(n->name, sizeof(n->name), "%s", w->name);
    snprintf(n->version, sizeof(n->version), "%s", w->version);
    rt_orders_mark(n);
    n->incarnation = w->incarnation;
    n->role = role == BT_ROLE_PREFILL  ? RT_ROLE_PREFILL
              : role == BT_ROLE_DECODE ? RT_ROLE_DECODE
              : role == BT_ROLE_BOTH   ? RT_ROLE_BOTH
                                       : RT_ROLE_STORE;
    snprintf(n->net_address, sizeof(n->net_address), "%s", w->net_address);
    n->context_tokens = w->context_tokens;
    n->pages_total = w->pages_total;
    n->page_tokens = w->page_tokens;
    n->silence_ns = 3 * (uint64_t)BT_MIN(w->heartbeat_ms, 60000u) * BT_NS_PER_MS;
    n->silence_ns = BT_MAX(n->silence_ns, n->router->conf->node_silence_ns);
    return true;
}

/* As many targets as it has ranks, all new if the number changes. No leg is there. BT_E_NOMEM. */
static int make_targets(struct rt_node *n, uint32_t n_ranks)
{
    struct rt_target *ts;

    n_ranks = BT_MAX(n_ranks, 1u);
    n_ranks = BT_MIN(n_ranks, (uint32_t)RT_MAX_RANKS);
    if (n_ranks == n->n_targets) {
        return BT_OK;
    }
    ts = bt_calloc(n_ranks, sizeof(*ts));
    if (!ts) {
        return BT_E_NOMEM;
    }
    for (uint32_t i = 0; i < n->n_targets; i++) {
        rt_cache_forget(&n->targets[i]);
    }
    free(n->targets);
    for (uint32_t i = 0; i < n_ranks; i++) {
        rt_cache_init_target(&ts[i], n, i);
    }
    n->router->n_targets += n_ranks - n->n_targets;
    n->targets = ts;
    n->n_targets = n_ranks;
    n->feed_incarnation = 0; /* followed anew */
    return BT_OK;
}

static int send_take(struct rt_node *n)
{
    Baton__V1__RouterMessage m = BATON__V1__ROUTER_MESSAGE__INIT;
    Baton__V1__TakeSession take = BATON__V1__TAKE_SESSION__INIT;

    m.kind_case = BATON__V1__ROUTER_MESSAGE__KIND_TAKE;
    m.take = &take;
    return bt_rpc_client_send(n->session->call, &m.base);
}

static void on_welcome(struct rt_node *n, const Baton__V1__NodeWelcome *w)
{
    if (n->state != RT_NODE_CONNECTING) {
        lose(n, "second welcome");
        return;
    }
    if (stranger(n, w)) {
        n->n_failures = N_FAILURES_MAX;
        lose(n, stranger(n, w));
        return;
    }
    if (!take_welcome(n, w)) {
        lose(n, "malformed welcome");
        return;
    }
    n->n_failures = 0;
    if (is_double(n)) {
        n->n_failures = N_FAILURES_MAX;
        lose(n, "the same node by another entry, or an older process of its name");
        if (!n->registered) {
            n->name[0] = '\0'; /* the name is the other entry's */
        }
        return;
    }
    heard(n);
    if (!fits_model(n, w)) {
        char why[sizeof(n->reason)];

        memcpy(why, n->reason, sizeof(why));
        set_state(n, RT_NODE_INCOMPATIBLE, why);
        return;
    }
    if (n->role != RT_ROLE_STORE) {
        memcpy(n->model_digest, w->model_digest.data, 32);
        memcpy(n->compat.kv_format, w->kv_format.data, 32);
        snprintf(n->compat.numerics, sizeof(n->compat.numerics), "%s", w->numerics);
        n->compat.weight_epoch = w->weight_epoch;
    }
    if (make_targets(n, w->ranks) < 0) {
        lose(n, "no memory");
        return;
    }
    if (send_take(n) < 0) {
        lose(n, "cannot send");
        return;
    }
    rt_cache_welcome(n, w);
    set_state(n, RT_NODE_READY, "");
    tell_misfits(n);
}

static void on_load(struct rt_node *n, const Baton__V1__NodeLoad *l)
{
    rt_cache_load(n, l);
    if (l->draining && n->state == RT_NODE_READY) {
        set_state(n, RT_NODE_DRAINING, "told to stop");
    }
}

/* --- outputs --------------------------------------------------------------------------------- */

static void on_output(struct rt_node *n, const Baton__V1__StreamOutput *m)
{
    struct rt_leg *leg = bt_map_get(&n->legs, m->stream_id);
    bool last = m->error || m->handed_over || m->finish != BATON__V1__FINISH_REASON__FINISH_NONE;

    if (!leg) {
        return;
    }
    if (last) {
        bt_map_del(&n->legs, m->stream_id);
        rt_leg_end(leg);
    } else if (m->n_tokens > 0) {
        rt_leg_first(leg);
    }
    if (leg->req) {
        rt_request_output(leg, m, last);
    }
    if (last) {
        free(leg);
    }
}

/* What lies that far ahead of output i of a step; NULL = nothing. */
static struct rt_leg *leg_ahead(const struct rt_node *n, const Baton__V1__StepOutput *s, size_t i)
{
    return i < s->n_outputs ? bt_map_get(&n->legs, s->outputs[i]->stream_id) : NULL;
}

/* With thousands of streams each token finds its request outside the caches: what the next ones
 * will touch is fetched meanwhile. */
static void fetch_ahead(const struct rt_node *n, const Baton__V1__StepOutput *s, size_t i)
{
    struct rt_leg *leg = leg_ahead(n, s, i + 6);

    if (leg) {
        __builtin_prefetch(leg, 1);
        __builtin_prefetch(&leg->guess_view, 1);
    }
    leg = leg_ahead(n, s, i + 4);
    if (leg && leg->req) {
        rt_request_fetch(leg->req, RT_FETCH_SELF);
    }
    leg = leg_ahead(n, s, i + 2);
    if (leg && leg->req) {
        rt_request_fetch(leg->req, RT_FETCH_REST);
    }
}

static void on_step(struct rt_session *ses, struct rt_node *n, const Baton__V1__StepOutput *s)
{
    for (size_t i = 0; ses->node && i < s->n_outputs; i++) {
        fetch_ahead(n, s, i);
        on_output(n, s->outputs[i]);
    }
}

static void on_message(struct bt_rpc_client_call *call, const ProtobufCMessage *msg)
{
    struct rt_session *ses = bt_rpc_client_user(call);
    const Baton__V1__NodeMessage *m = (const void *)msg;
    struct rt_node *n = ses->node;

    if (!n) {
        return;
    }
    if (n->state == RT_NODE_CONNECTING && m->kind_case != BATON__V1__NODE_MESSAGE__KIND_WELCOME) {
        lose(n, "no welcome");
        return;
    }
    heard(n);
    switch ((int)m->kind_case) {
    case BATON__V1__NODE_MESSAGE__KIND_WELCOME:
        on_welcome(n, m->welcome);
        break;
    case BATON__V1__NODE_MESSAGE__KIND_STEP:
        on_step(ses, n, m->step);
        break;
    case BATON__V1__NODE_MESSAGE__KIND_LOAD:
        on_load(n, m->load);
        break;
    case BATON__V1__NODE_MESSAGE__KIND_EVENTS:
        rt_cache_events(n, m->events);
        break;
    case BATON__V1__NODE_MESSAGE__KIND_SNAPSHOT:
        rt_cache_snapshot(n, m->snapshot);
        break;
    case BATON__V1__NODE_MESSAGE__KIND__NOT_SET:
    default: /* a later version's message */
        break;
    }
}

static void on_closed(struct bt_rpc_client_call *call, int status, const char *text)
{
    struct rt_session *ses = bt_rpc_client_user(call);
    char why[160];

    if (ses->node) {
        snprintf(why, sizeof(why), "%s: %.120s", bt_rpc_status_name(status), text);
        ses->node->session = NULL;
        lose(ses->node, why);
    }
    free(ses);
}

/* --- connecting and losing ------------------------------------------------------------------- */

/* The cluster's token does not travel to other machines in the clear unless that is allowed. */
static int check_way(struct rt_node *n, struct bt_err *err)
{
    return n->router->conf->common.allow_insecure || bt_rpc_address_is_local(n->address) ||
                   !bt_sec_shows_plain(bt_node_sec(n->router->node))
               ? BT_OK
               : BT_FAIL(err, BT_E_CONFIG,
                         "the cluster's token would go there in the clear: give tls.node_ca_file, "
                         "or set allow_insecure");
}

static int open_session(struct rt_node *n, struct bt_err *err)
{
    static const struct bt_rpc_client_events events = {.message = on_message, .closed = on_closed};
    Baton__V1__RouterMessage m = BATON__V1__ROUTER_MESSAGE__INIT;
    Baton__V1__RouterHello hello = BATON__V1__ROUTER_HELLO__INIT;
    struct bt_rpc_channel_config cc = {.sec = bt_node_sec(n->router->node),
                                       .backoff_min_ms = RECONNECT_MIN_MS,
                                       .backoff_max_ms = RECONNECT_MAX_MS};
    struct bt_rpc_client_args ca = {.path = "/baton.v1.Node/Session",
                                    .response = &baton__v1__node_message__descriptor,
                                    .events = &events,
                                    .request = &m.base};
    struct rt_session *ses;
    int rc = check_way(n, err);

    if (rc < 0) {
        return rc;
    }
    ses = bt_calloc(1, sizeof(*ses));
    if (!ses) {
        return BT_FAIL(err, BT_E_NOMEM, "no memory for a session");
    }
    if (n->channel && bt_rpc_channel_stale(n->channel)) {
        bt_rpc_channel_destroy(n->channel);
        n->channel = NULL;
    }
    if (!n->channel) {
        rc = bt_rpc_channel_create(n->router->loop, n->address, &cc, &n->channel, err);
    }
    hello.wire_version = WIRE_SESSION_VERSION_MIN;
    hello.wire_version_max = WIRE_SESSION_VERSION;
    hello.router = n->router->name;
    hello.incarnation = n->router->incarnation;
    m.kind_case = BATON__V1__ROUTER_MESSAGE__KIND_HELLO;
    m.hello = &hello;
    ca.user = ses;
    if (rc == BT_OK) {
        rc = bt_rpc_client_start(n->channel, &ca, &ses->call, err);
    }
    if (rc < 0) {
        free(ses);
        return rc;
    }
    ses->node = n;
    n->session = ses;
    return BT_OK;
}

static void connect_node(struct rt_node *n)
{
    struct bt_err err = {0};
    int rc;

    set_state(n, RT_NODE_CONNECTING, "");
    n->silence_ns = n->router->conf->node_silence_ns;
    heard(n);
    rc = open_session(n, &err);
    if (rc < 0) {
        lose(n, bt_err_msg(&err, rc));
    }
}

static void drop_session(struct rt_node *n)
{
    if (n->session) {
        n->session->node = NULL;
        bt_rpc_client_cancel(n->session->call);
        n->session = NULL;
    }
}

/* The legs' requests may start elsewhere at once, so the node is lost before they hear of it. */
static void lose(struct rt_node *n, const char *why)
{
    struct rt_router *r = n->router;
    uint64_t key, pause;
    char text[200];

    drop_session(n);
    if (n->state != RT_NODE_LOST) {
        snprintf(text, sizeof(text), "%s", why);
        set_state(n, RT_NODE_LOST, text);
    }
    for (;;) {
        size_t pos = 0;
        struct rt_leg *leg = bt_map_next(&n->legs, &pos, &key);

        if (!leg) {
            break;
        }
        bt_map_del(&n->legs, key);
        rt_leg_end(leg);
        if (leg->req) {
            rt_request_node_lost(leg, n->reason);
        }
        free(leg);
    }
    pause = RETRY_MIN_NS << BT_MIN(n->n_failures, (unsigned)N_FAILURES_MAX);
    n->n_failures++;
    bt_timer_start(r->loop, &n->timer, bt_loop_now(r->loop) + BT_MIN(pause, RETRY_MAX_NS));
}

static void on_timer(struct bt_loop *loop, struct bt_timer *t)
{
    struct rt_node *n = BT_CONTAINER_OF(t, struct rt_node, timer);

    if (n->router->draining) {
        return;
    }
    if (n->state != RT_NODE_LOST) {
        lose(n, "silent");
    } else if (n->seed || n->registered) {
        connect_node(n);
    } else {
        remove_node(n);
    }
}

/* --- the table ------------------------------------------------------------------------------- */

void rt_nodes_init(struct rt_router *r)
{
    bt_list_init(&r->nodes);
}

void rt_nodes_fini(struct rt_router *r)
{
    bt_list_for_each_safe (it, &r->nodes) {
        struct rt_node *n = BT_LIST_ENTRY(it, struct rt_node, link);
        struct rt_leg *leg;
        size_t pos = 0;

        drop_session(n);
        while ((leg = bt_map_next(&n->legs, &pos, NULL))) {
            rt_leg_end(leg);
            free(leg);
        }
        remove_node(n);
    }
}

static struct rt_node *find(struct rt_router *r, const struct bt_member *m)
{
    bt_list_for_each (it, &r->nodes) {
        struct rt_node *n = BT_LIST_ENTRY(it, struct rt_node, link);

        if (m->name[0] && n->name[0] ? strcmp(n->name, m->name) == 0
                                     : strcmp(n->address, m->grpc_addr) == 0) {
            return n;
        }
    }
    return NULL;
}

static struct rt_node *add(struct rt_router *r, const struct bt_member *m)
{
    struct rt_node *n = r->n_nodes < RT_MAX_NODES ? bt_calloc(1, sizeof(*n)) : NULL;

    if (!n) {
        BT_WARN("node", "node=%s msg=\"no room in the table of %zu\"", m->name, r->n_nodes);
        return NULL;
    }
    n->router = r;
    n->state = RT_NODE_LOST;
    n->timer.fn = on_timer;
    n->ident = -1;
    bt_map_init(&n->legs);
    if (make_targets(n, 1) < 0) {
        free(n);
        BT_WARN("node", "node=%s msg=\"no memory\"", m->name);
        return NULL;
    }
    snprintf(n->name, sizeof(n->name), "%s", m->name);
    rt_orders_mark(n);
    snprintf(n->address, sizeof(n->address), "%s", m->grpc_addr);
    bt_list_push_back(&r->nodes, &n->link);
    r->n_nodes++;
    return n;
}

/* A member that is not in the table as it should be: new, moved, or a new process of its name. */
static void follow(struct rt_router *r, const struct bt_member *m)
{
    struct rt_node *n = find(r, m);
    bool moved;

    if (!n) {
        n = add(r, m);
        if (!n) {
            return;
        }
        n->seed = m->seed;
        n->registered = !m->seed;
        n->incarnation = m->incarnation;
        connect_node(n);
        return;
    }
    n->seed = n->seed || m->seed;
    n->registered = n->registered || !m->seed;
    if (m->seed || m->incarnation < n->incarnation) {
        return;
    }
    if (!n->name[0]) {
        snprintf(n->name, sizeof(n->name), "%s", m->name);
    }
    moved = strcmp(n->address, m->grpc_addr) != 0;
    if (m->incarnation == n->incarnation && !moved) {
        return;
    }
    if (n->incarnation != 0 && n->state != RT_NODE_LOST && n->state != RT_NODE_CONNECTING) {
        if (m->incarnation == n->incarnation) {
            return; /* a seed by another spelling that was reached first: its session goes on */
        }
        lose(n, "replaced by a newer process");
    }
    n->incarnation = m->incarnation;
    if (n->state == RT_NODE_CONNECTING && !moved) {
        return;
    }
    if (n->state != RT_NODE_LOST) {
        lose(n, "has another address");
    }
    if (moved) {
        bt_rpc_channel_destroy(n->channel);
        n->channel = NULL;
        snprintf(n->address, sizeof(n->address), "%s", m->grpc_addr);
    } else if (n->channel) {
        bt_rpc_channel_reset_backoff(n->channel);
    }
    n->n_failures = 0;
    connect_node(n);
}

void rt_nodes_update(struct rt_router *r, const struct bt_members *ms)
{
    r->membership_frozen = ms->frozen;
    rt_stores_update(r, ms);
    bt_list_for_each (it, &r->nodes) {
        BT_LIST_ENTRY(it, struct rt_node, link)->registered = false;
    }
    for (size_t i = 0; i < ms->n; i++) {
        enum bt_role role = ms->m[i].role;

        if (ms->m[i].seed || role == BT_ROLE_PREFILL || role == BT_ROLE_DECODE ||
            role == BT_ROLE_BOTH || (role == BT_ROLE_KVSTORE && ms->m[i].store_addr[0])) {
            follow(r, &ms->m[i]);
        }
    }
}

/* --- for requests and status ------------------------------------------------------------------ */

const char *rt_role_name(enum rt_role role)
{
    static const char *const names[] = {"prefill", "decode", "both", "kvstore"};

    return names[role];
}

void rt_node_info(const struct rt_node *n, Baton__V1__NodeInfo *m, char hex[65])
{
    hex_digest(n->model_digest, 32, hex);
    baton__v1__node_info__init(m);
    m->name = (char *)(uintptr_t)n->name;
    m->incarnation = n->incarnation;
    m->role =
        (char *)(uintptr_t)(n->context_tokens || n->role == RT_ROLE_STORE ? rt_role_name(n->role)
                                                                          : "unknown");
    m->address = (char *)(uintptr_t)n->address;
    m->state = (char *)(uintptr_t)rt_node_state_name(n->state);
    m->reason = (char *)(uintptr_t)n->reason;
    m->model_digest = hex;
    m->numerics = (char *)(uintptr_t)n->compat.numerics;
    m->cordoned = n->cordoned;
    m->version = (char *)(uintptr_t)n->version;
    m->legs = (uint32_t)n->legs.n;
    m->starts = n->n_ever;
    rt_cache_fill_node(n, m);
}

uint32_t rt_nodes_context(const struct rt_router *r, uint32_t model_ctx)
{
    uint32_t least = model_ctx;

    bt_list_for_each (it, &r->nodes) {
        const struct rt_node *n = BT_LIST_ENTRY(it, struct rt_node, link);

        if (n->state == RT_NODE_READY && n->role != RT_ROLE_STORE) {
            least = BT_MIN(least, n->context_tokens);
        }
    }
    return least;
}

static int send_cancel(struct rt_node *n, uint64_t stream_id)
{
    Baton__V1__RouterMessage m = BATON__V1__ROUTER_MESSAGE__INIT;
    Baton__V1__CancelRequest c = BATON__V1__CANCEL_REQUEST__INIT;

    c.stream_id = stream_id;
    m.kind_case = BATON__V1__ROUTER_MESSAGE__KIND_CANCEL;
    m.cancel = &c;
    return bt_rpc_client_send(n->session->call, &m.base);
}

int rt_node_send(struct rt_node *n, const Baton__V1__RouterMessage *m)
{
    return n->session ? bt_rpc_client_send(n->session->call, &m->base) : BT_E_PEER_LOST;
}

int rt_node_start(struct rt_target *t, const struct rt_start *start, struct rt_leg **ret_leg)
{
    struct rt_node *n = t->node;
    Baton__V1__RouterMessage m = BATON__V1__ROUTER_MESSAGE__INIT;
    Baton__V1__StartRequest *msg = start->msg;
    struct rt_leg *leg;
    int rc;

    if (n->state != RT_NODE_READY || !n->session) {
        return BT_E_PEER_LOST;
    }
    leg = bt_calloc(1, sizeof(*leg));
    if (!leg) {
        return BT_E_NOMEM;
    }
    *leg = (struct rt_leg){.stream_id = ++n->router->last_stream_id,
                           .kind = start->kind,
                           .node = n,
                           .target = t,
                           .req = start->req,
                           .n_tokens = start->n_tokens};
    msg->stream_id = leg->stream_id;
    msg->rank = t->rank;
    m.kind_case = BATON__V1__ROUTER_MESSAGE__KIND_START;
    m.start = msg;
    rc = bt_map_put(&n->legs, leg->stream_id, leg);
    if (rc == BT_OK) {
        rc = rt_node_send(n, &m);
        if (rc < 0) {
            bt_map_del(&n->legs, leg->stream_id);
        }
    }
    if (rc < 0) {
        free(leg);
        return rc == BT_E_CANCELLED ? BT_E_PEER_LOST : rc;
    }
    n->n_ever++;
    rt_leg_begin(leg, start->est);
    *ret_leg = leg;
    return BT_OK;
}

void rt_leg_drop(struct rt_leg *leg, bool cancel)
{
    rt_leg_end(leg);
    leg->req = NULL;
    if (cancel && leg->node->session && send_cancel(leg->node, leg->stream_id) == BT_E_EXHAUSTED) {
        lose(leg->node, "does not read"); /* frees the leg */
    }
}
