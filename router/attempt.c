/* Attempts of a request: which nodes, the start of their legs, the pause before the next one. Loop
 * thread. */
#include "router/request_int.h"

#include "router/cost.h"

#include "common/base/buf.h"
#include "common/base/varint.h"
#include "common/obs/log.h"
#include "common/thr/time.h"

#include <stdlib.h>

#define BACKOFF_NS (50 * BT_NS_PER_MS) /* before the second retry; doubles */

bool rt_request_excludes(const struct rt_request *req, const char *name, uint64_t incarnation)
{
    for (size_t i = 0; i < req->n_excluded; i++) {
        if (req->excluded[i].incarnation == incarnation &&
            strcmp(req->excluded[i].name, name) == 0) {
            return true;
        }
    }
    return false;
}

static void exclude(struct rt_request *req, const char *name, uint64_t incarnation)
{
    size_t i = BT_MIN(req->n_excluded, (size_t)RT_MAX_EXCLUDED - 1); /* the last one is replaced */

    if (!rt_request_excludes(req, name, incarnation)) {
        snprintf(req->excluded[i].name, sizeof(req->excluded[i].name), "%s", name);
        req->excluded[i].incarnation = incarnation;
        req->n_excluded = i + 1;
    }
}

void rt_request_exclude(struct rt_request *req, const struct rt_node *n)
{
    exclude(req, n->name, n->incarnation);
}

void rt_request_exclude_store(struct rt_request *req)
{
    exclude(req, req->store.name, req->store.incarnation);
    req->store_failed = true;
}

void rt_request_enqueue(struct rt_request *req, uint64_t pause_ns)
{
    uint64_t now = rt_request_now(req);

    req->not_before_ns = now + pause_ns;
    req->wait_until_ns = req->not_before_ns + req->router->conf->wait_ns;
    if (pause_ns > 0) {
        bt_timer_start(req->router->loop, &req->timer, req->not_before_ns);
    } else if (req->retries == 0) {
        rt_admit(req);
    } else {
        rt_request_dispatch(req);
    }
}

/* The attempt is over: whatever is left of it is cancelled, and another one may follow. */
void rt_request_retry(struct rt_request *req, int rc, const char *msg)
{
    uint32_t n = req->retries;

    rt_request_drop_legs(req, true);
    if (req->state == RT_REQUEST_DONE) {
        return;
    }
    rt_observe_failed(req, msg);
    if (n >= (uint32_t)req->router->conf->retries) {
        rt_request_fail(req, rc == BT_E_CANCELLED ? BT_E_UNAVAILABLE : rc,
                        msg); /* not the client's doing */
        return;
    }
    BT_INFO("retry", "req=%s state=%s answered=%zu n=%u rc=%s msg=\"%s\"", req->id,
            rt_request_state_name(req->state), req->answer.ids.n, n + 1, bt_rc_name(rc), msg);
    req->retries++;
    rt_request_set_state(req, RT_REQUEST_QUEUED);
    rt_request_enqueue(req, n == 0 ? 0 : BACKOFF_NS << BT_MIN(n - 1, 5u));
}

static size_t n_tokens(const struct rt_request *req)
{
    return req->prompt.n + req->answer.ids.n;
}

/* Field 3 of StartRequest, the prompt, is sent as the bytes of req->packed: protobuf-c would look
 * at each id twice, 50 instructions of it, and most prompts of ids have come in the same bytes. */
#define START_PROMPT 3

/* Room in req->packed behind the length of so many bytes. */
static int begin_packed(struct rt_request *req, size_t n)
{
    int32_t len = (int32_t)n;
    int rc = n <= INT32_MAX ? bt_buf_reserve(&req->packed, n + 5) : BT_E_TOO_LARGE;

    if (rc == BT_OK) {
        bt_varints_write(&len, 1, (uint8_t *)req->packed.p);
        req->packed.n = bt_varints_size(&len, 1);
    }
    return rc;
}

void rt_request_keep_packed(struct rt_request *req, struct bt_str ids)
{
    if (begin_packed(req, ids.n) < 0 || bt_buf_add(&req->packed, ids.p, ids.n) < 0) {
        bt_buf_fini(&req->packed);
    }
}

/* *ret_field: of the message, borrows from the request. */
static int pack_prompt(struct rt_request *req, ProtobufCMessageUnknownField *ret_field)
{
    if (req->packed.n == 0) {
        size_t n = bt_varints_size(req->prompt.p, req->prompt.n);
        int rc = begin_packed(req, n);

        if (rc < 0) {
            return rc;
        }
        bt_varints_write(req->prompt.p, req->prompt.n, (uint8_t *)req->packed.p + req->packed.n);
        req->packed.n += n;
    }
    *ret_field = (ProtobufCMessageUnknownField){.tag = START_PROMPT,
                                                .wire_type = PROTOBUF_C_WIRE_TYPE_LENGTH_PREFIXED,
                                                .len = req->packed.n,
                                                .data = (uint8_t *)req->packed.p};
    return BT_OK;
}

static void
fill_start(struct rt_request *req, ProtobufCMessageUnknownField *prompt, Baton__V1__StartRequest *m)
{
    baton__v1__start_request__init(m);
    m->base.n_unknown_fields = 1;
    m->base.unknown_fields = prompt;
    m->n_answered = req->answer.ids.n;
    m->answered = req->answer.ids.p;
    m->claim = req->claim;
    m->cache_salt = req->cache_salt;
    m->request_id = req->id;
    if (req->deadline_ns != BT_NEVER_NS) {
        uint64_t now = rt_request_now(req);

        m->deadline_us = req->deadline_ns > now ? (req->deadline_ns - now) / 1000 + 1 : 1;
    }
}

/* The decode leg first: it can get its pages while the prompt is computed. */
static int start_pair(struct rt_request *req,
                      struct rt_target *tp,
                      struct rt_target *td,
                      Baton__V1__StartRequest *m)
{
    struct rt_node *p = tp->node, *d = td->node;
    Baton__V1__HandoffRef ref = BATON__V1__HANDOFF_REF__INIT;
    struct rt_start start = {.req = req, .msg = m, .n_tokens = n_tokens(req), .est = &req->est};
    int rc;

    ref.id_hi =
        strtoull(req->id, NULL, 16); /* so that the daemon's and the handoff's logs name it */
    ref.id_lo = rt_random(req->router) | 1; /* never all zero */
    ref.peer_name = p->name;
    ref.peer_incarnation = p->incarnation;
    ref.peer_net_address = p->net_address;
    if (req->path_taken == RT_PATH_STORE) {
        ref.store_name = req->store.name;
        ref.store_incarnation = req->store.incarnation;
        ref.store_net_address = req->store.net_address;
    }
    m->handoff = &ref;
    m->leg = BATON__V1__LEG__LEG_DECODE;
    start.kind = RT_LEG_DECODE;
    rc = rt_node_start(td, &start, &req->decode);
    if (rc < 0) {
        rt_request_exclude(req, d);
        return rc;
    }
    ref.peer_name = d->name;
    ref.peer_incarnation = d->incarnation;
    ref.peer_net_address = d->net_address;
    ref.store_name = ref.store_net_address = (char *)(uintptr_t) "";
    m->leg = BATON__V1__LEG__LEG_PREFILL;
    start.kind = RT_LEG_PREFILL;
    rc = rt_node_start(tp, &start, &req->prefill);
    if (rc < 0) {
        rt_request_exclude(req, p);
    }
    return rc;
}

static int start_legs(struct rt_request *req, struct rt_target *p, struct rt_target *d)
{
    Baton__V1__StartRequest m;
    struct wire_sampling_msg sm;
    struct rt_start start = {.req = req, .msg = &m, .n_tokens = n_tokens(req), .est = &req->est};
    ProtobufCMessageUnknownField prompt;
    int rc = pack_prompt(req, &prompt);

    if (rc < 0 || (rc = wire_sampling_to_node(&req->sampling.s, &sm)) < 0) {
        return rc;
    }
    fill_start(req, &prompt, &m);
    m.sampling = &sm.msg;
    if (p) {
        rc = start_pair(req, p, d, &m);
    } else {
        m.leg = BATON__V1__LEG__LEG_LOCAL;
        start.kind = RT_LEG_LOCAL;
        rc = rt_node_start(d, &start, &req->decode);
        if (rc < 0) {
            rt_request_exclude(req, d->node);
        }
    }
    wire_sampling_msg_fini(&sm);
    bt_buf_fini(&req->packed);
    return rc;
}

/* Views of all targets, in the order of the list, and the targets themselves beside them. */
static size_t
view_targets(struct rt_request *req, struct rt_node_view *views, struct rt_target **targets)
{
    size_t n = 0;

    bt_list_for_each (it, &req->router->nodes) {
        struct rt_node *node = BT_LIST_ENTRY(it, struct rt_node, link);
        bool excluded = rt_request_excludes(req, node->name, node->incarnation);

        for (uint32_t i = 0; i < node->n_targets; i++) {
            targets[n] = &node->targets[i];
            views[n++] = (struct rt_node_view){
                .name = node->name,
                .role = node->role,
                .ready = rt_node_serves(node),
                .cordoned = node->cordoned,
                .excluded = excluded,
                .compat = &node->compat,
                .pages_free = node->targets[i].pages_free,
                .pages_total = node->pages_total,
            };
        }
    }
    rt_cache_fill_views(req, views, targets);
    return n;
}

/* What is expected of this attempt, to be compared with what happens. */
static void
note_estimate(struct rt_request *req, const struct rt_estimate *est, const struct rt_node_view *v)
{
    req->expected_tokens = est->cached_blocks * v->block_tokens;
    for (int t = 0; t < RT_TIERS; t++) {
        req->expected_tier_tokens[t] = est->tier_blocks[t] * v->block_tokens;
    }
}

static void launch(struct rt_request *req, const struct rt_pick *pick, struct rt_target **targets)
{
    struct rt_target *td = targets[pick->decode];
    struct rt_target *tp = pick->prefill >= 0 ? targets[pick->prefill] : NULL;
    struct rt_node *d = td->node, *p = tp ? tp->node : NULL;
    int rc;

    if (!req->trace->t.asked) {
        req->trace->t.asked = bt_now_ns();
    }
    BT_DEBUG("route",
             "req=%s prefill=%s/%u decode=%s/%u queue=%.4f bring=%.4f compute=%.4f evict=%.4f "
             "share=%.4f cached_blocks=%u",
             req->id, p ? p->name : "", tp ? tp->rank : 0, d->name, td->rank, pick->est.queue_s,
             pick->est.bring_s, pick->est.compute_s, pick->est.evict_s, pick->est.share_s,
             pick->est.cached_blocks);
    if (req->retries == 0) {
        rt_orders_count(req->router, d);
        if (p) {
            rt_orders_count(req->router, p);
        }
    }
    req->path_taken = pick->path;
    snprintf(req->decode_name, sizeof(req->decode_name), "%s", d->name);
    snprintf(req->prefill_name, sizeof(req->prefill_name), "%s", p ? p->name : d->name);
    req->decode_rank = td->rank;
    req->prefill_rank = tp ? tp->rank : td->rank;
    rt_observe_launched(req);
    rt_request_set_state(req, p ? RT_REQUEST_PREFILL : RT_REQUEST_LOCAL);
    rc = start_legs(req, tp, td);
    if (rc < 0) {
        rt_request_retry(req, rc, "a node did not take the request");
    }
}

/* Path STORE is a pair with a daemon between. Without one: an error where the client insists, else,
 * and where a daemon has failed the request, as the router likes. */
static int take_store(const struct rt_request *req,
                      struct rt_pick_args *a,
                      const struct rt_store **ret_store,
                      struct bt_err *err)
{
    if (a->path != RT_PATH_STORE) {
        return BT_OK;
    }
    *ret_store = rt_store_pick(req);
    if (!*ret_store && req->path_is_must && !req->store_failed) {
        return BT_FAIL(err, BT_E_UNAVAILABLE, "no daemon of the KV store is a member");
    }
    a->path = *ret_store ? RT_PATH_DIRECT : RT_PATH_AUTO;
    return BT_OK;
}

/* The first attempt waits while all nodes have enough queued, and is refused if it is too late. */
static bool holds(struct rt_request *req, const struct rt_pick *pick, const struct rt_node_view *v)
{
    struct rt_router *r = req->router;
    double most = (double)r->conf->node_queue_ns / 1e9;

    r->admit.least_queue_s = pick->least_queue_s;
    r->admit.n_targets = pick->n_targets;
    if (req->fair.running || !req->fair.tenant) {
        return false;
    }
    return most > 0 && pick->least_queue_s > most && v->speed;
}

static bool
is_refused(struct rt_request *req, const struct rt_pick *pick, const struct rt_node_view *v)
{
    bool first = !req->fair.running && req->fair.tenant;

    return first && v->speed && v->speed->n_prompt >= 8 &&
           rt_admit_refuses(req, rt_estimate_first_s(&pick->est));
}

static void begin_attempt(struct rt_request *req,
                          struct rt_pick *pick,
                          const struct rt_store *store,
                          struct rt_target **targets)
{
    bt_timer_stop(req->router->loop, &req->timer);
    if (store && pick->prefill >= 0) {
        pick->path = RT_PATH_STORE;
        req->store = *store;
    }
    req->est = pick->est;
    req->router->n_picked++;
    launch(req, pick, targets);
}

/* Among the nodes that canaries leave for this request. BT_E_UNAVAILABLE: there are no canaries, or
 * those nodes do not do; the views are then of all nodes again. */
static int pick_held(struct rt_request *req,
                     const struct rt_pick_args *a,
                     struct rt_node_view *views,
                     struct rt_target **targets,
                     struct rt_pick *ret_pick)
{
    if (!rt_orders_hold(req, views, targets)) {
        return BT_E_UNAVAILABLE;
    }
    if (rt_policy_pick(a, ret_pick, NULL) == BT_OK) {
        return BT_OK;
    }
    for (size_t i = 0; i < a->n; i++) {
        views[i].ready = rt_node_serves(targets[i]->node);
    }
    return BT_E_UNAVAILABLE;
}

/* With room for the views of all targets. */
static bool
dispatch_among(struct rt_request *req, struct rt_node_view *views, struct rt_target **targets)
{
    struct rt_router *r = req->router;
    struct rt_pick_args a = {
        .nodes = views,
        .path = req->path,
        .n_prompt = n_tokens(req),
        .local_below_tokens = (size_t)r->conf->local_below_tokens,
        .ticket = rt_random(r),
        .turn = r->n_picked,
    };
    const struct rt_store *store = NULL;
    const struct rt_node_view *v;
    struct rt_seen seen;
    struct rt_pick pick;
    struct bt_err err = {0};

    a.seen = &seen;
    a.n = view_targets(req, views, targets);
    rt_cache_fill_args(req, &a);
    if (take_store(req, &a, &store, &err) == BT_OK &&
        (pick_held(req, &a, views, targets, &pick) == BT_OK ||
         rt_policy_pick(&a, &pick, &err) == BT_OK)) {
        v = &views[pick.prefill >= 0 ? pick.prefill : pick.decode];
        if (is_refused(req, &pick, v)) {
            return true;
        }
        if (holds(req, &pick, v)) {
            return false;
        }
        rt_admit_started(req);
        note_estimate(req, &pick.est, v);
        rt_observe_picked(req, &seen, views, &pick);
        begin_attempt(req, &pick, store, targets);
        return true;
    }
    rt_admit_started(req); /* it waits for nodes, not for its turn */
    if (rt_request_now(req) >= req->wait_until_ns) {
        rt_request_fail(req, BT_E_UNAVAILABLE, err.msg);
    } else {
        bt_timer_start(r->loop, &req->timer, req->wait_until_ns);
    }
    return true;
}

bool rt_request_dispatch(struct rt_request *req)
{
    size_t n = req->router->n_targets + 1;
    struct rt_node_view *views = bt_calloc(n, sizeof(*views));
    struct rt_target **targets = bt_calloc(n, sizeof(*targets));
    bool started = true;

    if (!views || !targets) {
        rt_request_fail(req, BT_E_NOMEM, "no memory");
    } else {
        started = dispatch_among(req, views, targets);
    }
    free(views);
    free(targets);
    return started;
}

void rt_request_on_timer(struct bt_loop *loop, struct bt_timer *t)
{
    struct rt_request *req = BT_CONTAINER_OF(t, struct rt_request, timer);

    if (req->state != RT_REQUEST_QUEUED) {
        return;
    }
    if (req->fair.tenant && !req->fair.running) {
        rt_admit_run(req->router);
    } else {
        rt_request_dispatch(req);
    }
}

void rt_requests_kick(struct rt_router *r)
{
    uint64_t now = bt_loop_now(r->loop);

    /* They look on the loop's next turn, so that nobody is called back from inside here. */
    bt_list_for_each (it, &r->requests) {
        struct rt_request *req = BT_LIST_ENTRY(it, struct rt_request, link);

        if (req->state == RT_REQUEST_QUEUED) {
            bt_timer_start(r->loop, &req->timer, BT_MAX(now, req->not_before_ns));
        }
    }
}

void rt_requests_fail_all(struct rt_router *r, int rc, const char *why)
{
    bt_list_for_each_safe (it, &r->requests) {
        rt_request_fail(BT_LIST_ENTRY(it, struct rt_request, link), rc, why);
    }
}
