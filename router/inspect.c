/* The service that operators ask: baton.v1.Inspect. Loop thread; every message is untrusted. */
#include "router/request_int.h"

#include "common/base/buf.h"
#include "common/thr/time.h"
#include "proto/inspect.pb-c.h"

#include <stdlib.h>

#define LIST_LIMIT 1000

static struct rt_router *router_of(struct bt_rpc_call *call)
{
    return bt_rpc_call_service_user(call);
}

static char *text(const char *s)
{
    return (char *)(uintptr_t)(s ? s : "");
}

static double seconds(uint64_t ns)
{
    return (double)ns / 1e9;
}

static Baton__V1__Path path_of(enum rt_path path)
{
    switch (path) {
    case RT_PATH_DIRECT:
        return BATON__V1__PATH__PATH_DIRECT;
    case RT_PATH_LOCAL:
        return BATON__V1__PATH__PATH_LOCAL;
    case RT_PATH_STORE:
        return BATON__V1__PATH__PATH_STORE;
    case RT_PATH_AUTO:
        break;
    }
    return BATON__V1__PATH__PATH_AUTO;
}

/* `now`: what a running one is aged by; 0 = it has ended. */
static void
fill_row(const struct rt_trace *t, const char *client_id, uint64_t now, Baton__V1__RequestRow *m)
{
    uint64_t end = now ? now : t->end_ns;

    baton__v1__request_row__init(m);
    m->id = text(t->id);
    m->client_id = text(client_id);
    m->tenant = text(t->tenant);
    m->state = text(rt_request_state_name(t->state));
    m->age_s = end > t->t.came ? seconds(end - t->t.came) : 0;
    m->prefill_node = text(t->prefill);
    m->decode_node = text(t->decoder);
    m->store = text(t->store);
    m->path = path_of(t->path);
    m->prompt_tokens = t->n_prompt;
    m->completion_tokens = t->n_answer;
    m->cached_tokens = t->n_cached;
    m->retries = t->retries;
    m->via = text(t->via);
}

/* --- ListRequests ---------------------------------------------------------------------------- */

static void list_requests(struct bt_rpc_call *call, const ProtobufCMessage *msg)
{
    const Baton__V1__ListRequestsRequest *m = (const void *)msg;
    struct rt_router *r = router_of(call);
    Baton__V1__ListRequestsResponse out = BATON__V1__LIST_REQUESTS_RESPONSE__INIT;
    size_t limit = m->limit ? m->limit : LIST_LIMIT, n = 0;
    Baton__V1__RequestRow *rows, **ptrs;
    uint64_t now = bt_now_ns();

    limit = BT_MIN(limit, r->n_requests);
    rows = bt_calloc(limit + 1, sizeof(*rows));
    ptrs = bt_calloc(limit + 1, sizeof(*ptrs));
    if (!rows || !ptrs) {
        bt_rpc_call_fail(call, BT_E_NOMEM, NULL);
    } else {
        bt_list_for_each (it, &r->requests) {
            struct rt_request *req = BT_LIST_ENTRY(it, struct rt_request, link);

            if (req->trace && n < limit) {
                rt_observe_refresh(req);
                fill_row(req->trace, req->client_id, now, &rows[n]);
                ptrs[n] = &rows[n];
                n++;
            }
        }
        out.n_requests = n;
        out.requests = ptrs;
        out.total = (uint32_t)r->n_requests;
        bt_rpc_call_reply(call, &out.base);
    }
    free(rows);
    free(ptrs);
}

/* --- Explain --------------------------------------------------------------------------------- */

struct explained {
    Baton__V1__Explanation m;
    Baton__V1__RequestRow row;
    Baton__V1__Candidate cand[RT_SEEN_KINDS * RT_SEEN_MAX];
    Baton__V1__Candidate *cand_ptrs[RT_SEEN_KINDS * RT_SEEN_MAX];
    Baton__V1__Stage stages[RT_STAGE_COUNT], *stage_ptrs[RT_STAGE_COUNT];
    Baton__V1__FailedAttempt failed[RT_TRACE_FAILED], *failed_ptrs[RT_TRACE_FAILED];
    Baton__V1__TierTokens expected, found;
};

static void fill_candidates(const struct rt_trace *t, struct explained *e)
{
    static const char *const legs[] = {"prefill", "decode", "local"}; /* enum rt_seen_kind */

    for (unsigned i = 0; i < t->n_cand; i++) {
        const struct rt_trace_candidate *c = &t->cand[i];
        Baton__V1__Candidate *m = &e->cand[i];

        baton__v1__candidate__init(m);
        m->node = text(c->node);
        m->leg = text(legs[c->kind]);
        m->chosen = c->chosen;
        m->excluded = c->excluded;
        m->cost_s = c->cost_s;
        m->queue_s = c->est.queue_s;
        m->bring_s = c->est.bring_s;
        m->compute_s = c->est.compute_s;
        m->evict_s = c->est.evict_s;
        m->share_s = c->est.share_s;
        m->cached_blocks = c->est.cached_blocks;
        e->cand_ptrs[i] = m;
    }
    e->m.n_candidates = t->n_cand;
    e->m.candidates = e->cand_ptrs;
    e->m.candidates_total = t->n_cand_all;
}

static void fill_stages(const struct rt_trace *t, struct explained *e)
{
    for (int i = 0; i < RT_STAGE_COUNT; i++) {
        baton__v1__stage__init(&e->stages[i]);
        e->stages[i].name = text(rt_stage_names[i]);
        e->stages[i].s = seconds(t->stage_ns[i]);
        e->stage_ptrs[i] = &e->stages[i];
    }
    e->m.n_first = RT_STAGE_FIRST_COUNT;
    e->m.first = e->stage_ptrs;
    if (t->t.second) {
        e->m.n_second = RT_STAGE_COUNT - RT_STAGE_FIRST_COUNT;
        e->m.second = e->stage_ptrs + RT_STAGE_FIRST_COUNT;
        e->m.second_gap_s = seconds(t->t.second - t->t.first);
    }
    e->m.first_token_s = t->t.first ? seconds(t->t.first - t->t.came) : 0;
    e->m.token_s = rt_trace_token_s(t);
}

static void explain_trace(struct bt_rpc_call *call,
                          const struct rt_trace *t,
                          const char *client_id,
                          uint64_t now)
{
    static const char *const paths[] = {"auto", "direct", "local", "store"}; /* enum rt_path */
    struct explained e;

    memset(&e, 0, sizeof(e));
    baton__v1__explanation__init(&e.m);
    fill_row(t, client_id, now, &e.row);
    e.m.request = &e.row;
    e.m.status = text(now ? "" : bt_rpc_status_name(bt_rc_grpc(t->rc)));
    e.m.finish = text(t->finish ? t->finish : "none");
    e.m.asked_path = text(paths[t->asked_path]);
    fill_candidates(t, &e);
    fill_stages(t, &e);
    baton__v1__tier_tokens__init(&e.expected);
    e.expected.pool = t->expected[0];
    e.expected.host = t->expected[1];
    e.expected.disk = t->expected[2];
    e.expected.store = t->expected[3];
    e.m.expected = &e.expected;
    baton__v1__tier_tokens__init(&e.found);
    e.found.pool = t->prompt.tier_tokens[0];
    e.found.host = t->prompt.tier_tokens[1];
    e.found.disk = t->prompt.tier_tokens[2];
    e.found.store = t->prompt.tier_tokens[3];
    e.m.found = &e.found;
    e.m.total_s = e.row.age_s;
    e.m.transport = text(t->decode.transport);
    e.m.handoff_bytes = t->decode.bytes;
    for (unsigned i = 0; i < t->n_failed; i++) {
        baton__v1__failed_attempt__init(&e.failed[i]);
        e.failed[i].reason = text(t->failed[i]);
        e.failed_ptrs[i] = &e.failed[i];
    }
    e.m.n_failed = t->n_failed;
    e.m.failed = e.failed_ptrs;
    e.m.good = t->good;
    bt_rpc_call_reply(call, &e.m.base);
}

static bool is_called(const struct rt_trace *t, const char *client_id, const char *id)
{
    return id[0] && (strcmp(t->id, id) == 0 || strcmp(t->answer_id, id) == 0 ||
                     (client_id && strcmp(client_id, id) == 0));
}

static void explain(struct bt_rpc_call *call, const ProtobufCMessage *msg)
{
    const Baton__V1__ExplainRequest *m = (const void *)msg;
    struct rt_router *r = router_of(call);
    struct rt_request *found = NULL;
    struct bt_err err = {0};

    bt_list_for_each (it, &r->requests) { /* the newest comes last */
        struct rt_request *req = BT_LIST_ENTRY(it, struct rt_request, link);

        if (req->trace && is_called(req->trace, req->client_id, m->id)) {
            found = req;
        }
    }
    if (found) {
        rt_observe_refresh(found);
        explain_trace(call, found->trace, found->client_id, bt_now_ns());
        return;
    }
    for (size_t i = 0; i < rt_traces_n(r->traces); i++) {
        const struct rt_trace *t = rt_traces_at(r->traces, i);

        if (is_called(t, t->client_id, m->id)) {
            explain_trace(call, t, t->client_id, 0);
            return;
        }
    }
    BT_FAIL(&err, BT_E_NOT_FOUND,
            "request %.64s does not run here and is not among the last %zu that ended", m->id,
            rt_traces_n(r->traces));
    bt_rpc_call_fail(call, BT_E_NOT_FOUND, &err);
}

/* --- FindPrefix ------------------------------------------------------------------------------ */

struct holders {
    Baton__V1__PrefixHolder *m, **ptrs;
    size_t n, cap;
};

static void on_holder(void *arg, const struct rt_target *t, const struct rt_run *run)
{
    struct holders *h = arg;
    Baton__V1__PrefixHolder *m;

    if (h->n == h->cap || run->upto[RT_INDEX_TIERS - 1] == 0) {
        return;
    }
    m = &h->m[h->n];
    baton__v1__prefix_holder__init(m);
    m->node = text(t->node->name);
    m->rank = t->rank;
    m->role = text(rt_role_name(t->node->role));
    m->pool_blocks = run->upto[0];
    m->host_blocks = run->upto[1];
    m->disk_blocks = run->upto[2];
    h->ptrs[h->n++] = m;
}

static void find_ids(struct bt_rpc_call *call, const struct bt_ids *ids, const char *salt)
{
    struct rt_router *r = router_of(call);
    Baton__V1__FindPrefixResponse out = BATON__V1__FIND_PREFIX_RESPONSE__INIT;
    struct holders h = {.cap = r->n_targets};
    struct rt_find_args a = {ids->p, ids->n, salt, on_holder, &h};
    int rc = BT_E_NOMEM;

    h.m = bt_calloc(h.cap + 1, sizeof(*h.m));
    h.ptrs = bt_calloc(h.cap + 1, sizeof(*h.ptrs));
    if (h.m && h.ptrs) {
        rc = rt_cache_find(r, &a);
    }
    if (rc < 0) {
        bt_rpc_call_fail(call, rc, NULL);
    } else {
        out.prompt_tokens = (uint32_t)ids->n;
        out.block_tokens = r->cache.n_idents ? r->cache.idents[0].block_tokens : 0;
        out.prompt_blocks = out.block_tokens ? (uint32_t)(ids->n / out.block_tokens) : 0;
        out.n_holders = h.n;
        out.holders = h.ptrs;
        bt_rpc_call_reply(call, &out.base);
    }
    free(h.m);
    free(h.ptrs);
}

/* A long text on its way through the tokenizer's thread. */
struct pending {
    struct bt_rpc_call *call;
    struct rt_tok_job *job;
    char *salt;
};

static void pending_free(struct pending *p)
{
    if (p) {
        free(p->salt);
        free(p);
    }
}

static void on_tokenized(void *user, struct rt_tok_job *job)
{
    struct pending *p = user;

    bt_rpc_call_set_user(p->call, NULL);
    if (job->rc < 0) {
        bt_rpc_call_fail(p->call, job->rc, &job->err);
    } else {
        find_ids(p->call, &job->ids, p->salt);
    }
    pending_free(p);
}

static int
tokenize_long(struct bt_rpc_call *call, const Baton__V1__FindPrefixRequest *m, struct bt_err *err)
{
    struct pending *p = bt_calloc(1, sizeof(*p));
    struct rt_tok_input in = {.done = on_tokenized, .user = p};
    int rc = BT_E_NOMEM;

    if (p) {
        p->call = call;
        p->salt = strdup(m->cache_salt);
    }
    if (p && p->salt) {
        if (m->input_case == BATON__V1__FIND_PREFIX_REQUEST__INPUT_TEXT) {
            in.text = m->text;
        } else {
            in.chat = m->chat;
        }
        rc = rt_tok_start(router_of(call), &in, &p->job, err);
    }
    if (rc < 0) {
        pending_free(p);
        return rc;
    }
    bt_rpc_call_set_user(call, p);
    return BT_OK;
}

static void find_prefix(struct bt_rpc_call *call, const ProtobufCMessage *msg)
{
    const Baton__V1__FindPrefixRequest *m = (const void *)msg;
    struct rt_router *r = router_of(call);
    struct bt_ids ids = {0};
    struct bt_err err = {0};
    bool later = false;
    int rc;

    switch ((int)m->input_case) {
    case BATON__V1__FIND_PREFIX_REQUEST__INPUT_TEXT:
        later = strlen(m->text) > RT_TOK_INLINE_BYTES;
        rc = later ? tokenize_long(call, m, &err) : rt_model_text(r->model, m->text, &ids, &err);
        break;
    case BATON__V1__FIND_PREFIX_REQUEST__INPUT_TOKENS:
        rc = rt_model_ids(r->model, m->tokens->ids, m->tokens->n_ids, &ids, &err);
        break;
    case BATON__V1__FIND_PREFIX_REQUEST__INPUT_CHAT:
        later = rt_chat_bytes(m->chat) > RT_TOK_INLINE_BYTES;
        rc = later ? tokenize_long(call, m, &err) : rt_model_chat(r->model, m->chat, &ids, &err);
        break;
    case BATON__V1__FIND_PREFIX_REQUEST__INPUT__NOT_SET:
    default:
        rc = BT_FAIL(&err, BT_E_INVALID, "one of text, tokens or chat must be given");
    }
    if (rc < 0) {
        bt_rpc_call_fail(call, rc, &err);
    } else if (!later) {
        find_ids(call, &ids, m->cache_salt);
    }
    bt_ids_fini(&ids);
}

static void find_prefix_closed(struct bt_rpc_call *call, bool cancelled)
{
    struct pending *p = bt_rpc_call_user(call);

    if (p) {
        p->job->user = NULL;
        pending_free(p);
    }
}

/* --- GetFigures ------------------------------------------------------------------------------ */

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return x < y ? -1 : x > y;
}

/* Sorts; nearest rank. */
static double quantile(double *v, size_t n, double q)
{
    if (n == 0) {
        return 0;
    }
    qsort(v, n, sizeof(*v), by_value);
    return v[BT_MIN((size_t)(q * (double)n), n - 1)];
}

static void fill_recent(const struct rt_router *r, double *v, Baton__V1__Figures *m)
{
    size_t n = 0;

    for (size_t i = 0; i < rt_traces_n(r->traces); i++) {
        const struct rt_trace *t = rt_traces_at(r->traces, i);

        if (t->t.first) {
            v[n++] = seconds(t->t.first - t->t.came);
        }
    }
    m->recent = (uint32_t)n;
    m->first_token_p50_s = quantile(v, n, 0.5);
    m->first_token_p99_s = quantile(v, n, 0.99);
    n = 0;
    for (size_t i = 0; i < rt_traces_n(r->traces); i++) {
        double s = rt_trace_token_s(rt_traces_at(r->traces, i));

        if (s > 0) {
            v[n++] = s;
        }
    }
    m->token_p50_s = quantile(v, n, 0.5);
    m->token_p99_s = quantile(v, n, 0.99);
}

struct counts {
    Baton__V1__Count v[RT_OUTCOMES + RT_STAGE_TIERS + 4], *ptrs[RT_OUTCOMES + RT_STAGE_TIERS + 4];
    size_t n;
};

static void count(struct counts *c, const char *name, uint64_t value)
{
    baton__v1__count__init(&c->v[c->n]);
    c->v[c->n].name = text(name);
    c->v[c->n].value = value;
    c->ptrs[c->n] = &c->v[c->n];
    c->n++;
}

static void fill_counts(const struct rt_stats *s, struct counts *c, Baton__V1__Figures *m)
{
    static const char *const tiers[] = {"pool", "host", "disk", "store"};

    m->outcomes = c->ptrs + c->n;
    for (int i = 0; i < RT_OUTCOMES; i++) {
        count(c, rt_outcome_names[i], rt_stats_outcome(s, (enum rt_outcome)i));
    }
    m->n_outcomes = RT_OUTCOMES;
    m->tier_tokens = c->ptrs + c->n;
    for (int i = 0; i < RT_STAGE_TIERS; i++) {
        count(c, tiers[i], s->tier_tokens[i]);
    }
    m->n_tier_tokens = RT_STAGE_TIERS;
    m->paths = c->ptrs + c->n;
    for (int i = RT_PATH_DIRECT; i <= RT_PATH_STORE; i++) {
        count(c, rt_path_name((enum rt_path)i), rt_histogram_n(&s->path_first[i]));
    }
    m->n_paths = RT_PATH_STORE - RT_PATH_DIRECT + 1;
}

static void get_figures(struct bt_rpc_call *call, const ProtobufCMessage *msg)
{
    struct rt_router *r = router_of(call);
    const struct rt_stats *s = &r->stats;
    Baton__V1__Figures m = BATON__V1__FIGURES__INIT;
    double *v = bt_calloc(rt_traces_n(r->traces) + 1, sizeof(*v));
    size_t n[RT_REQUEST_STATE_COUNT];
    struct counts c = {.n = 0};

    if (!v) {
        bt_rpc_call_fail(call, BT_E_NOMEM, NULL);
        return;
    }
    rt_requests_count(r, n);
    m.uptime_s = (double)(time(NULL) - s->started);
    m.queued = (uint32_t)(n[RT_REQUEST_TOKENIZE] + n[RT_REQUEST_QUEUED]);
    m.waiting = m.queued + (uint32_t)(n[RT_REQUEST_PREFILL] + n[RT_REQUEST_LOCAL]);
    m.running = (uint32_t)r->n_requests - BT_MIN(m.waiting, (uint32_t)r->n_requests);
    m.good = s->good;
    m.tokens = s->tokens;
    m.prompt_tokens = s->prompt_tokens;
    m.cached_tokens = s->cached_tokens;
    m.retries = s->retries;
    fill_counts(s, &c, &m);
    fill_recent(r, v, &m);
    bt_rpc_call_reply(call, &m.base);
    free(v);
}

const struct bt_rpc_method rt_inspect_methods[] = {
    {.path = "/baton.v1.Inspect/ListRequests",
     .request = &baton__v1__list_requests_request__descriptor,
     .response = &baton__v1__list_requests_response__descriptor,
     .message = list_requests},
    {.path = "/baton.v1.Inspect/Explain",
     .request = &baton__v1__explain_request__descriptor,
     .response = &baton__v1__explanation__descriptor,
     .message = explain},
    {.path = "/baton.v1.Inspect/FindPrefix",
     .request = &baton__v1__find_prefix_request__descriptor,
     .response = &baton__v1__find_prefix_response__descriptor,
     .message = find_prefix,
     .closed = find_prefix_closed},
    {.path = "/baton.v1.Inspect/GetFigures",
     .request = &baton__v1__get_figures_request__descriptor,
     .response = &baton__v1__figures__descriptor,
     .message = get_figures},
};
const size_t rt_inspect_n_methods = BT_ARRAY_LEN(rt_inspect_methods);
