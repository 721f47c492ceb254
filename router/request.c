/* One Generate call, from its check to its status. Loop thread.
 *
 * A request runs as attempts. An attempt has one leg (local) or two (prefill and decode) and begins
 * at the offset that the answer has reached: the nodes are told what the client already has, and
 * since every token is a function of what came before it, a new attempt goes on exactly. When one
 * leg fails the other is cancelled at once, and another attempt follows on other nodes if there are
 * any. Tokens of the decode node that arrive before the prefill node's first one wait in `early`.
 */
#include "router/router_int.h"

#include "common/base/buf.h"
#include "common/obs/log.h"
#include "common/thr/time.h"

#include <stdlib.h>

#define MAX_EARLY     4096                /* tokens */
#define BACKOFF_NS    (50 * BT_NS_PER_MS) /* before the second retry; doubles */
#define MAX_CLIENT_ID 256

struct rt_request {
    struct bt_list link;
    struct rt_router *router;
    struct bt_rpc_call *call;
    enum rt_request_state state;
    char id[20];
    char *client_id;
    bool first_sent;

    struct rt_tok_job *job; /* TOKENIZE: a long text on its way */
    struct bt_ids prompt;
    struct wire_sampling_owned sampling;
    enum rt_path path; /* asked for */
    struct rt_answer answer;
    uint64_t claim, deadline_ns;
    uint32_t cached_tokens;

    struct rt_leg *prefill, *decode; /* of this attempt; decode: also the local leg */
    struct rt_token *early;
    size_t n_early, cap_early;
    enum _Baton__V1__FinishReason early_finish;

    struct {
        char name[BT_MEMBER_NAME_MAX + 1];
        uint64_t incarnation;
    } excluded[RT_MAX_EXCLUDED];
    size_t n_excluded;
    uint32_t retries;
    struct bt_timer timer;                 /* QUEUED: the next look for nodes */
    uint64_t not_before_ns, wait_until_ns; /* QUEUED */

    uint64_t t_start, t_asked, t_first, t_second;
    char prefill_name[BT_MEMBER_NAME_MAX + 1], decode_name[BT_MEMBER_NAME_MAX + 1];
    enum rt_path path_taken;
};

static void dispatch(struct rt_request *req);

static uint64_t now_of(const struct rt_request *req)
{
    return bt_loop_now(req->router->loop);
}

static void set_state(struct rt_request *req, enum rt_request_state to)
{
    BT_BUG_ON(!rt_request_state_allowed(req->state, to));
    BT_DEBUG("request", "req=%s from=%s to=%s", req->id, rt_request_state_name(req->state),
             rt_request_state_name(to));
    req->state = to;
}

/* --- the end --------------------------------------------------------------------------------- */

static void drop_legs(struct rt_request *req, bool cancel)
{
    struct rt_leg *p = req->prefill, *d = req->decode;

    req->prefill = NULL;
    req->decode = NULL;
    req->n_early = 0;
    req->early_finish = BATON__V1__FINISH_REASON__FINISH_NONE;
    if (d) {
        rt_leg_drop(d, cancel);
    }
    if (p) {
        rt_leg_drop(p, cancel);
    }
}

/* No leg is ours any more; the call still is, until it is closed. */
static void done(struct rt_request *req)
{
    if (req->state == RT_REQUEST_DONE) {
        return;
    }
    set_state(req, RT_REQUEST_DONE);
    if (req->job) {
        req->job->user = NULL;
        req->job = NULL;
    }
    bt_timer_stop(req->router->loop, &req->timer);
    drop_legs(req, true);
    req->router->n_requests--;
}

static void fail(struct rt_request *req, int rc, const char *msg)
{
    struct bt_err err = {.rc = rc};

    if (req->state == RT_REQUEST_DONE) {
        return;
    }
    snprintf(err.msg, sizeof(err.msg), "%s", msg);
    BT_DEBUG("request", "req=%s rc=%s msg=\"%s\"", req->id, bt_rc_name(rc), err.msg);
    done(req);
    bt_rpc_call_fail(req->call, rc, &err);
}

void rt_request_closed(struct rt_request *req)
{
    done(req);
    bt_list_remove(&req->link);
    rt_answer_fini(&req->answer);
    wire_sampling_owned_fini(&req->sampling);
    bt_ids_fini(&req->prompt);
    free(req->early);
    free(req->client_id);
    free(req);
}

/* --- tokens to the client -------------------------------------------------------------------- */

static double seconds(const struct rt_request *req, uint64_t t)
{
    return t ? (double)(t - req->t_start) / 1e9 : 0;
}

/* What the last message says besides tokens. */
static void fill_end(const struct rt_request *req, Baton__V1__Usage *u, Baton__V1__Timing *t)
{
    baton__v1__usage__init(u);
    u->prompt_tokens = (uint32_t)req->prompt.n;
    u->completion_tokens = (uint32_t)req->answer.ids.n;
    u->cached_tokens = req->cached_tokens;
    baton__v1__timing__init(t);
    t->queue = seconds(req, req->t_asked);
    t->first_token = seconds(req, req->t_first);
    t->second_token = seconds(req, req->t_second);
    t->total = seconds(req, bt_now_ns());
    t->prefill_node = (char *)(uintptr_t)req->prefill_name;
    t->decode_node = (char *)(uintptr_t)req->decode_name;
    t->path = req->path_taken == RT_PATH_DIRECT ? BATON__V1__PATH__PATH_DIRECT
                                                : BATON__V1__PATH__PATH_LOCAL;
    t->retries = req->retries;
}

static void stamp(struct rt_request *req)
{
    size_t n = req->answer.ids.n;

    if (n >= 1 && !req->t_first) {
        req->t_first = bt_now_ns();
    }
    if (n >= 2 && !req->t_second) {
        req->t_second = bt_now_ns();
    }
}

/* Sends what the answer holds; with a finish it is the last message and ends the call. */
static void
send(struct rt_request *req, const struct rt_token *tokens, Baton__V1__FinishReason finish)
{
    Baton__V1__GenerateResponse m = BATON__V1__GENERATE_RESPONSE__INIT;
    Baton__V1__Usage usage;
    Baton__V1__Timing timing;
    bool last = finish != BATON__V1__FINISH_REASON__FINISH_NONE;
    int rc;

    if (!req->first_sent) {
        m.stream_id = req->id;
        m.request_id = req->client_id;
    }
    if (last) {
        fill_end(req, &usage, &timing);
        m.finish = finish;
        m.usage = &usage;
        m.timing = &timing;
    }
    rc = rt_answer_send(&req->answer, req->call, tokens, &m);
    req->first_sent = true;
    if (rc == BT_E_EXHAUSTED) {
        fail(req, rc, "the client does not read its answer");
    } else if (rc < 0 && rc != BT_E_CANCELLED) {
        fail(req, rc, bt_rc_text(rc));
    } else if (last) {
        done(req);
        bt_rpc_call_finish(req->call, BT_RPC_OK, NULL);
    }
}

/* Takes tokens that continue the answer. */
static void take(struct rt_request *req,
                 const struct rt_token *tokens,
                 size_t n,
                 Baton__V1__FinishReason finish)
{
    bool last = finish != BATON__V1__FINISH_REASON__FINISH_NONE;
    int rc = BT_OK;

    for (size_t i = 0; rc == BT_OK && i < n && !req->answer.stopped; i++) {
        bool ends = finish == BATON__V1__FINISH_REASON__FINISH_STOP && i + 1 == n;

        rc = rt_answer_push(&req->answer, tokens[i].id, ends);
    }
    if (rc == BT_OK && last) {
        rc = rt_answer_flush(&req->answer);
    }
    if (rc < 0) {
        fail(req, rc, bt_rc_text(rc));
        return;
    }
    if (req->answer.stopped) {
        finish = BATON__V1__FINISH_REASON__FINISH_STOP;
    }
    stamp(req);
    send(req, tokens, finish);
}

/* --- attempts -------------------------------------------------------------------------------- */

static bool is_excluded(const struct rt_request *req, const struct rt_node *n)
{
    for (size_t i = 0; i < req->n_excluded; i++) {
        if (req->excluded[i].incarnation == n->incarnation &&
            strcmp(req->excluded[i].name, n->name) == 0) {
            return true;
        }
    }
    return false;
}

static void exclude(struct rt_request *req, const struct rt_node *n)
{
    size_t i = BT_MIN(req->n_excluded, (size_t)RT_MAX_EXCLUDED - 1); /* the last one is replaced */

    if (!is_excluded(req, n)) {
        snprintf(req->excluded[i].name, sizeof(req->excluded[i].name), "%s", n->name);
        req->excluded[i].incarnation = n->incarnation;
        req->n_excluded = i + 1;
    }
}

static void enqueue(struct rt_request *req, uint64_t pause_ns)
{
    uint64_t now = now_of(req);

    req->not_before_ns = now + pause_ns;
    req->wait_until_ns = req->not_before_ns + req->router->conf->wait_ns;
    if (pause_ns > 0) {
        bt_timer_start(req->router->loop, &req->timer, req->not_before_ns);
    } else {
        dispatch(req);
    }
}

/* The attempt is over: whatever is left of it is cancelled, and another one may follow. */
static void retry(struct rt_request *req, int rc, const char *msg)
{
    uint32_t n = req->retries;

    drop_legs(req, true);
    if (req->state == RT_REQUEST_DONE) {
        return;
    }
    if (n >= (uint32_t)req->router->conf->retries) {
        fail(req, rc == BT_E_CANCELLED ? BT_E_UNAVAILABLE : rc, msg); /* not the client's doing */
        return;
    }
    BT_INFO("retry", "req=%s state=%s answered=%zu n=%u rc=%s msg=\"%s\"", req->id,
            rt_request_state_name(req->state), req->answer.ids.n, n + 1, bt_rc_name(rc), msg);
    req->retries++;
    set_state(req, RT_REQUEST_QUEUED);
    enqueue(req, n == 0 ? 0 : BACKOFF_NS << BT_MIN(n - 1, 5u));
}

static void fill_start(struct rt_request *req, Baton__V1__StartRequest *m)
{
    baton__v1__start_request__init(m);
    m->n_prompt = req->prompt.n;
    m->prompt = req->prompt.p;
    m->n_answered = req->answer.ids.n;
    m->answered = req->answer.ids.p;
    m->claim = req->claim;
    if (req->deadline_ns != BT_NEVER_NS) {
        uint64_t now = now_of(req);

        m->deadline_us = req->deadline_ns > now ? (req->deadline_ns - now) / 1000 + 1 : 1;
    }
}

/* The decode leg first: it can get its pages while the prompt is computed. */
static int
start_pair(struct rt_request *req, struct rt_node *p, struct rt_node *d, Baton__V1__StartRequest *m)
{
    Baton__V1__HandoffRef ref = BATON__V1__HANDOFF_REF__INIT;
    int rc;

    ref.id_hi = rt_random(req->router);
    ref.id_lo = rt_random(req->router) | 1; /* never all zero */
    ref.peer_name = p->name;
    ref.peer_incarnation = p->incarnation;
    ref.peer_net_address = p->net_address;
    m->handoff = &ref;
    m->leg = BATON__V1__LEG__LEG_DECODE;
    rc = rt_node_start(d, req, RT_LEG_DECODE, m, &req->decode);
    if (rc < 0) {
        exclude(req, d);
        return rc;
    }
    ref.peer_name = d->name;
    ref.peer_incarnation = d->incarnation;
    ref.peer_net_address = d->net_address;
    m->leg = BATON__V1__LEG__LEG_PREFILL;
    rc = rt_node_start(p, req, RT_LEG_PREFILL, m, &req->prefill);
    if (rc < 0) {
        exclude(req, p);
    }
    return rc;
}

static int start_legs(struct rt_request *req, struct rt_node *p, struct rt_node *d)
{
    Baton__V1__StartRequest m;
    struct wire_sampling_msg sm;
    int rc = wire_sampling_to_node(&req->sampling.s, &sm);

    if (rc < 0) {
        return rc;
    }
    fill_start(req, &m);
    m.sampling = &sm.msg;
    if (p) {
        rc = start_pair(req, p, d, &m);
    } else {
        m.leg = BATON__V1__LEG__LEG_LOCAL;
        rc = rt_node_start(d, req, RT_LEG_LOCAL, &m, &req->decode);
        if (rc < 0) {
            exclude(req, d);
        }
    }
    wire_sampling_msg_fini(&sm);
    return rc;
}

/* Views of all nodes, in the order of the list, and the nodes themselves beside them. */
static size_t view_nodes(struct rt_request *req, struct rt_node_view *views, struct rt_node **nodes)
{
    size_t n = 0;

    bt_list_for_each (it, &req->router->nodes) {
        struct rt_node *node = BT_LIST_ENTRY(it, struct rt_node, link);

        nodes[n] = node;
        views[n++] = (struct rt_node_view){
            .name = node->name,
            .role = node->role,
            .ready = node->state == RT_NODE_READY,
            .excluded = is_excluded(req, node),
            .compat = &node->compat,
            .tokens_outstanding = node->tokens_waiting + node->sent_tokens,
            .requests_outstanding =
                node->requests_waiting + node->requests_running + node->sent_requests,
            .pages_free = node->pages_free,
            .pages_total = node->pages_total,
        };
    }
    return n;
}

static void launch(struct rt_request *req, const struct rt_pick *pick, struct rt_node **nodes)
{
    struct rt_node *d = nodes[pick->decode];
    struct rt_node *p = pick->prefill >= 0 ? nodes[pick->prefill] : NULL;
    int rc;

    if (!req->t_asked) {
        req->t_asked = bt_now_ns();
    }
    req->path_taken = pick->path;
    snprintf(req->decode_name, sizeof(req->decode_name), "%s", d->name);
    snprintf(req->prefill_name, sizeof(req->prefill_name), "%s", p ? p->name : d->name);
    set_state(req, p ? RT_REQUEST_PREFILL : RT_REQUEST_LOCAL);
    rc = start_legs(req, p, d);
    if (rc < 0) {
        retry(req, rc, "a node did not take the request");
    }
}

static void dispatch(struct rt_request *req)
{
    struct rt_router *r = req->router;
    struct rt_node_view *views = bt_calloc(r->n_nodes + 1, sizeof(*views));
    struct rt_node **nodes = bt_calloc(r->n_nodes + 1, sizeof(*nodes));
    struct rt_pick_args a = {
        .nodes = views,
        .path = req->path,
        .n_prompt = req->prompt.n + req->answer.ids.n,
        .local_below_tokens = (size_t)r->conf->local_below_tokens,
        .ticket = rt_random(r),
    };
    struct rt_pick pick;
    struct bt_err err = {0};

    if (!views || !nodes) {
        fail(req, BT_E_NOMEM, "no memory");
    } else {
        a.n = view_nodes(req, views, nodes);
        if (rt_policy_pick(&a, &pick, &err) == BT_OK) {
            bt_timer_stop(r->loop, &req->timer);
            launch(req, &pick, nodes);
        } else if (now_of(req) >= req->wait_until_ns) {
            fail(req, BT_E_UNAVAILABLE, err.msg);
        } else {
            bt_timer_start(r->loop, &req->timer, req->wait_until_ns);
        }
    }
    free(views);
    free(nodes);
}

static void on_timer(struct bt_loop *loop, struct bt_timer *t)
{
    struct rt_request *req = BT_CONTAINER_OF(t, struct rt_request, timer);

    if (req->state == RT_REQUEST_QUEUED) {
        dispatch(req);
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
        fail(BT_LIST_ENTRY(it, struct rt_request, link), rc, why);
    }
}

/* --- from the nodes -------------------------------------------------------------------------- */

static void forget_leg(struct rt_request *req, const struct rt_leg *leg)
{
    if (req->prefill == leg) {
        req->prefill = NULL;
    }
    if (req->decode == leg) {
        req->decode = NULL;
    }
}

/* A leg that is out of its node's map has failed. `other_to_blame`: its peer in the handoff. */
static void leg_failed(
    struct rt_request *req, const struct rt_leg *leg, int rc, const char *msg, bool other_to_blame)
{
    const struct rt_leg *other = leg->kind == RT_LEG_PREFILL ? req->decode : req->prefill;

    if (leg->kind == RT_LEG_PREFILL && req->state == RT_REQUEST_DECODE) {
        return; /* the decode node has everything */
    }
    if (!other_to_blame) {
        exclude(req, leg->node);
    } else if (other) {
        exclude(req, other->node);
    }
    retry(req, rc, msg);
}

static void
on_error(struct rt_request *req, const struct rt_leg *leg, const Baton__V1__StreamError *e)
{
    char text[232];
    bool peer = e->rc <= BT_E_PEER_LOST && e->rc > -50;
    int rc = e->rc < 0 ? e->rc : BT_E_PEER_PROTOCOL;

    snprintf(text, sizeof(text), "%s: %.150s", leg->node->name, e->message);
    if (!e->retryable && rc != BT_E_CANCELLED) { /* cancelled, but not by us: its peer's doing */
        fail(req, rc, text);
        return;
    }
    if (rc == BT_E_CANCELLED && leg->kind == RT_LEG_DECODE && req->prefill) {
        return; /* the prefill node has ended the handoff: it says why, or that the answer is whole
                 */
    }
    if (e->rc == BT_E_UNAVAILABLE) {
        peer = false; /* it is draining */
    }
    leg_failed(req, leg, rc, text, peer);
}

static int keep_early(struct rt_request *req, const struct rt_token *tokens, size_t n)
{
    if (req->n_early + n > MAX_EARLY) {
        return BT_E_EXHAUSTED;
    }
    if (req->n_early + n > req->cap_early) {
        size_t cap = BT_MAX(req->n_early + n, 2 * req->cap_early);
        void *p = realloc(req->early, cap * sizeof(*req->early));

        if (!p) {
            return BT_E_NOMEM;
        }
        req->early = p;
        req->cap_early = cap;
    }
    memcpy(req->early + req->n_early, tokens, n * sizeof(*tokens));
    req->n_early += n;
    return BT_OK;
}

static void flush_early(struct rt_request *req)
{
    struct rt_token *early = req->early;
    size_t n = req->n_early;
    Baton__V1__FinishReason finish = req->early_finish;

    if (n == 0 && finish == BATON__V1__FINISH_REASON__FINISH_NONE) {
        return;
    }
    /* The array goes along: taking may end the request and with it the attempt's buffer. */
    req->early = NULL;
    req->n_early = req->cap_early = 0;
    set_state(req, RT_REQUEST_DECODE);
    take(req, early, n, finish);
    free(early);
}

static void advance(struct rt_request *req, const struct rt_leg *leg)
{
    if (leg->kind == RT_LEG_PREFILL && req->state == RT_REQUEST_PREFILL) {
        set_state(req, RT_REQUEST_HANDOFF);
    } else if (leg->kind != RT_LEG_PREFILL && req->state != RT_REQUEST_DECODE) {
        set_state(req, RT_REQUEST_DECODE);
    }
}

/* Tokens and finish of a leg, in the order of offsets. */
static void on_tokens(struct rt_request *req,
                      const struct rt_leg *leg,
                      const Baton__V1__StreamOutput *m,
                      struct rt_token *tokens)
{
    size_t have = req->answer.ids.n + (leg->kind == RT_LEG_DECODE ? req->n_early : 0);
    size_t skip = have > m->offset ? have - m->offset : 0;
    size_t n = m->n_tokens > skip ? m->n_tokens - skip : 0;
    bool first_missing = leg->kind == RT_LEG_DECODE && req->state == RT_REQUEST_PREFILL;

    if (first_missing) {
        /* The prefill node's token comes by another connection: one place is kept for it. */
        if (m->n_tokens > 0 && m->offset != have + 1) {
            leg_failed(req, leg, BT_E_PEER_PROTOCOL, "gap in the answer", false);
            return;
        }
        if (keep_early(req, tokens, m->n_tokens) < 0) {
            leg_failed(req, leg, BT_E_PEER_PROTOCOL, "the first token does not come", false);
            return;
        }
        req->early_finish = m->finish;
        return;
    }
    if (m->n_tokens > 0 && m->offset > have) {
        leg_failed(req, leg, BT_E_PEER_PROTOCOL, "gap in the answer", false);
        return;
    }
    if (n == 0 && m->finish == BATON__V1__FINISH_REASON__FINISH_NONE) {
        return; /* a repeat */
    }
    advance(req, leg);
    take(req, tokens + (m->n_tokens - n), n, m->finish);
    if (req->state == RT_REQUEST_HANDOFF) {
        flush_early(req);
    }
}

void rt_request_output(struct rt_leg *leg, const Baton__V1__StreamOutput *m, bool last)
{
    struct rt_request *req = leg->req;
    struct rt_token *tokens;
    struct bt_err err = {0};
    int rc;

    if (last) {
        forget_leg(req, leg);
    }
    if (m->cached_tokens > 0 && leg->kind != RT_LEG_DECODE) {
        req->cached_tokens = BT_MIN(m->cached_tokens, (uint32_t)req->prompt.n);
    }
    if (m->error) {
        on_error(req, leg, m->error);
        return;
    }
    if (m->n_tokens > 0 || m->finish != BATON__V1__FINISH_REASON__FINISH_NONE) {
        tokens = bt_calloc(m->n_tokens + 1, sizeof(*tokens));
        if (!tokens) {
            fail(req, BT_E_NOMEM, "no memory for tokens");
            return;
        }
        rc = rt_answer_read(&req->answer, m, tokens, &err);
        if (rc < 0) {
            leg_failed(req, leg, rc, err.msg, false);
        } else {
            on_tokens(req, leg, m, tokens);
        }
        free(tokens);
    }
    if (m->handed_over &&
        (req->state == RT_REQUEST_PREFILL || (req->state == RT_REQUEST_HANDOFF && !req->decode))) {
        leg_failed(req, leg, BT_E_PEER_PROTOCOL, "handed over to nobody, or without a token",
                   false);
    }
}

void rt_request_node_lost(struct rt_leg *leg, const char *why)
{
    struct rt_request *req = leg->req;
    char text[220];

    snprintf(text, sizeof(text), "node %s is lost: %.140s", leg->node->name, why);
    forget_leg(req, leg);
    leg_failed(req, leg, BT_E_PEER_LOST, text, false);
}

/* --- the beginning --------------------------------------------------------------------------- */

/* Length limits come before the sampling ranges: max_tokens depends on them. */
static int take_limits(struct rt_request *req, struct bt_err *err)
{
    const struct bt_model_config *mc = rt_model_config(req->router->model);
    uint32_t ctx = rt_nodes_context(req->router, (uint32_t)mc->n_ctx);
    struct wire_sampling *s = &req->sampling.s;

    if (req->prompt.n >= ctx) {
        return BT_FAIL(err, BT_E_INVALID,
                       "the prompt has %zu tokens, the context is %u (with room for one answer "
                       "token: %u)",
                       req->prompt.n, ctx, ctx - 1);
    }
    if (s->max_tokens > ctx - req->prompt.n) {
        s->max_tokens = ctx - (uint32_t)req->prompt.n;
    }
    return wire_sampling_check(s, mc->n_vocab, err);
}

static int take_path(struct rt_request *req, int path, struct bt_err *err)
{
    switch (path) {
    case BATON__V1__PATH__PATH_AUTO:
        req->path = RT_PATH_AUTO;
        return BT_OK;
    case BATON__V1__PATH__PATH_DIRECT:
        req->path = RT_PATH_DIRECT;
        return BT_OK;
    case BATON__V1__PATH__PATH_LOCAL:
        req->path = RT_PATH_LOCAL;
        return BT_OK;
    default:
        return BT_FAIL(err, BT_E_INVALID, "path %d is unknown", path);
    }
}

static int
take_message(struct rt_request *req, const Baton__V1__GenerateRequest *m, struct bt_err *err)
{
    const struct rt_model *model = req->router->model;
    struct rt_answer_cfg ac = {
        .tok = rt_model_tokenizer(model),
        .n_vocab = rt_model_config(model)->n_vocab,
        .skip_special = m->skip_special_tokens,
    };
    bool has_seed;
    int rc;

    if (!rt_model_is(model, m->model)) {
        return BT_FAIL(err, BT_E_NOT_FOUND, "model %.100s is not served here", m->model);
    }
    if (strlen(m->request_id) > MAX_CLIENT_ID) {
        return BT_FAIL(err, BT_E_INVALID, "request_id has %zu bytes, at most %d",
                       strlen(m->request_id), MAX_CLIENT_ID);
    }
    if ((rc = take_path(req, (int)m->path, err)) < 0 ||
        (rc = wire_sampling_from_client(m->sampling, m->stopping, &req->sampling, &has_seed, err)) <
            0) {
        return rc;
    }
    if (m->stopping) {
        ac.stops = m->stopping->strings;
        ac.n_stops = m->stopping->n_strings;
    }
    ac.logprobs = req->sampling.s.n_logprobs >= 0;
    if ((rc = rt_answer_init(&req->answer, &ac, err)) < 0) {
        return rc;
    }
    if (!has_seed) {
        req->sampling.s.seed = rt_random(req->router);
    }
    req->client_id = strdup(m->request_id);
    return req->client_id ? BT_OK : BT_FAIL(err, BT_E_NOMEM, "no memory for a request");
}

/* The prompt is there: checks it and looks for nodes. */
static int have_prompt(struct rt_request *req, struct bt_err *err)
{
    int rc = take_limits(req, err);

    if (rc == BT_OK) {
        set_state(req, RT_REQUEST_QUEUED);
        enqueue(req, 0);
    }
    return rc;
}

static void on_tokenized(void *user, struct rt_tok_job *job)
{
    struct rt_request *req = user;
    struct bt_err err = job->err;
    int rc = job->rc;

    req->job = NULL;
    if (rc == BT_OK) {
        req->prompt = job->ids;
        job->ids = (struct bt_ids){0};
        rc = have_prompt(req, &err);
    }
    if (rc < 0) {
        fail(req, rc, bt_err_msg(&err, rc));
    }
}

static int
take_prompt(struct rt_request *req, const Baton__V1__GenerateRequest *m, struct bt_err *err)
{
    const struct rt_model *model = req->router->model;
    struct rt_tok_input in = {.done = on_tokenized, .user = req};
    int rc;

    switch ((int)m->input_case) {
    case BATON__V1__GENERATE_REQUEST__INPUT_TEXT:
        in.text = m->text;
        if (strlen(m->text) > RT_TOK_INLINE_BYTES) {
            return rt_tok_start(req->router, &in, &req->job, err);
        }
        rc = rt_model_text(model, m->text, &req->prompt, err);
        break;
    case BATON__V1__GENERATE_REQUEST__INPUT_TOKENS:
        rc = rt_model_ids(model, m->tokens->ids, m->tokens->n_ids, &req->prompt, err);
        break;
    case BATON__V1__GENERATE_REQUEST__INPUT_CHAT:
        in.chat = m->chat;
        if (rt_chat_bytes(m->chat) > RT_TOK_INLINE_BYTES) {
            return rt_tok_start(req->router, &in, &req->job, err);
        }
        rc = rt_model_chat(model, m->chat, &req->prompt, err);
        break;
    case BATON__V1__GENERATE_REQUEST__INPUT__NOT_SET:
    default:
        return BT_FAIL(err, BT_E_INVALID, "one of text, tokens or chat must be given");
    }
    return rc < 0 ? rc : have_prompt(req, err);
}

/* Older requests have smaller claims, in the whole cluster as far as clocks agree. */
static uint64_t make_claim(void)
{
    struct timespec ts;

    clock_gettime(CLOCK_REALTIME, &ts);
    return (uint64_t)ts.tv_sec * BT_NS_PER_S + (uint64_t)ts.tv_nsec;
}

int rt_request_begin(struct rt_router *r,
                     struct bt_rpc_call *call,
                     const Baton__V1__GenerateRequest *msg,
                     struct bt_err *err)
{
    struct rt_request *req = bt_calloc(1, sizeof(*req));
    int rc;

    if (!req) {
        return BT_FAIL(err, BT_E_NOMEM, "no memory for a request");
    }
    *req = (struct rt_request){.router = r,
                               .call = call,
                               .state = RT_REQUEST_TOKENIZE,
                               .timer.fn = on_timer,
                               .t_start = bt_loop_now(r->loop),
                               .claim = make_claim(),
                               .deadline_ns = bt_rpc_call_deadline_ns(call)};
    snprintf(req->id, sizeof(req->id), "%016llx", (unsigned long long)rt_random(r));
    bt_list_push_back(&r->requests, &req->link);
    r->n_requests++;
    rc = take_message(req, msg, err);
    if (rc == BT_OK) {
        rc = take_prompt(req, msg, err);
    }
    if (rc < 0) {
        rt_request_closed(req);
        return rc;
    }
    bt_rpc_call_set_user(call, req);
    bt_rpc_call_send_headers(call);
    return BT_OK;
}
