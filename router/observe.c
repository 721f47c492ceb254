/* What is remembered, counted and logged of a request. Every moment is the router's own; what nodes
 * say are durations (stages.h). The histograms of the first token and of its stages are fed at the
 * same moment, so that their sums agree in every scrape. Loop thread. */
#include "router/request_int.h"

#include "common/base/buf.h"
#include "common/thr/time.h"

#include <stdio.h>
#include <stdlib.h>

static double seconds(uint64_t ns)
{
    return (double)ns / 1e9;
}

int rt_observe_begin(struct rt_request *req)
{
    struct rt_trace *t = rt_trace_create();

    if (!t) {
        return BT_E_NOMEM;
    }
    req->trace = t;
    snprintf(t->id, sizeof(t->id), "%s", req->id);
    snprintf(t->answer_id, sizeof(t->answer_id), "%s",
             req->client->answer_id ? req->client->answer_id : "");
    t->via = req->client->via ? req->client->via : "grpc";
    t->t.came = bt_loop_now(req->router->loop);
    if (req->client->came_ns && req->client->came_ns < t->t.came) {
        t->t.came = req->client->came_ns;
    }
    return BT_OK;
}

/* --- the choice ------------------------------------------------------------------------------ */

static void
add_candidate(struct rt_trace *t, const struct rt_node_view *v, const struct rt_trace_candidate *c)
{
    struct rt_trace_candidate *to = &t->cand[t->n_cand++];

    *to = *c;
    snprintf(to->node, sizeof(to->node), "%s", v->name);
    to->excluded = v->excluded;
}

static bool is_chosen(const struct rt_pick *pick, enum rt_seen_kind kind, int idx)
{
    switch (kind) {
    case RT_SEEN_PREFILL:
        return idx == pick->prefill;
    case RT_SEEN_DECODE:
        return pick->prefill >= 0 && idx == pick->decode;
    case RT_SEEN_LOCAL:
        return pick->prefill < 0 && idx == pick->decode;
    case RT_SEEN_KINDS:
    default:
        return false;
    }
}

void rt_observe_picked(struct rt_request *req,
                       const struct rt_seen *seen,
                       const struct rt_node_view *views,
                       const struct rt_pick *pick)
{
    struct rt_trace *t = req->trace;

    t->n_cand = t->n_cand_all = 0;
    for (int kind = 0; kind < RT_SEEN_KINDS; kind++) {
        t->n_cand_all += seen->n_all[kind];
        for (unsigned i = 0; i < seen->n[kind]; i++) {
            const struct rt_seen_node *n = &seen->v[kind][i];
            struct rt_trace_candidate c = {.kind = (enum rt_seen_kind)kind,
                                           .chosen =
                                               is_chosen(pick, (enum rt_seen_kind)kind, n->idx),
                                           .cost_s = n->cost,
                                           .est = n->est};

            add_candidate(t, &views[n->idx], &c);
        }
    }
    memcpy(t->expected, req->expected_tier_tokens, sizeof(t->expected));
}

void rt_observe_launched(struct rt_request *req)
{
    struct rt_trace *t = req->trace;

    t->decode.known = false;
    if (!t->t.first) {
        t->t.launched = bt_now_ns();
        t->prompt.known = false;
        req->cached_tokens = 0;
        memset(req->cached_tier_tokens, 0, sizeof(req->cached_tier_tokens));
    }
}

void rt_observe_failed(struct rt_request *req, const char *why)
{
    struct rt_trace *t = req->trace;
    unsigned at = BT_MIN(t->n_failed, RT_TRACE_FAILED - 1u); /* the last one is replaced */

    snprintf(t->failed[at], sizeof(t->failed[at]), "%s", why);
    t->n_failed = at + 1;
}

/* --- legs and tokens ------------------------------------------------------------------------- */

static const char *const transports[RT_TRANSPORTS] = {"shm", "tcp", "rdma", "other"};

const char *rt_transport_name(int i)
{
    return transports[i];
}

static void read_times(const Baton__V1__LegTimes *m, struct rt_leg_times *t)
{
    static const uint64_t most_us = 86400ull * 1000000; /* a node's word is not trusted */

    *t = (struct rt_leg_times){
        .known = true,
        .queue_ns = BT_MIN(m->queue_us, most_us) * 1000,
        .load_ns = BT_MIN(m->load_us, most_us) * 1000,
        .wait_ns = BT_MIN(m->wait_us, most_us) * 1000,
        .compute_ns = BT_MIN(m->compute_us, most_us) * 1000,
        .tier_tokens = {m->pool_tokens, m->host_tokens, m->disk_tokens, m->store_tokens},
        .bytes = m->bytes};
    for (int i = 0; i < RT_TRANSPORTS && m->transport[0]; i++) {
        if (i == RT_TRANSPORTS - 1 || strcmp(m->transport, transports[i]) == 0) {
            snprintf(t->transport, sizeof(t->transport), "%s", transports[i]);
            break;
        }
    }
}

static void count_prompt(struct rt_request *req, const struct rt_leg_times *t)
{
    struct rt_stats *s = &req->router->stats;
    uint64_t slow = 0;

    for (int i = 0; i < RT_STAGE_TIERS; i++) {
        s->tier_hits[i] += t->tier_tokens[i] > 0;
        s->tier_tokens[i] += BT_MIN(t->tier_tokens[i], (uint32_t)req->prompt.n);
        slow += i > 0 ? t->tier_tokens[i] : 0;
    }
    for (int i = 1; i < RT_STAGE_TIERS && slow > 0; i++) { /* by their parts of what was brought */
        s->tier_load_s[i] += seconds(t->load_ns) * t->tier_tokens[i] / (double)slow;
    }
}

static void count_handoff(struct rt_request *req, const struct rt_leg_times *t)
{
    struct rt_stats *s = &req->router->stats;

    for (int i = 0; i < RT_TRANSPORTS; i++) {
        if (strcmp(t->transport, transports[i]) == 0) {
            s->transport_handoffs[i]++;
            s->transport_bytes[i] += t->bytes;
            s->transport_s[i] += seconds(t->load_ns);
        }
    }
}

void rt_observe_times(struct rt_request *req,
                      const struct rt_leg *leg,
                      const Baton__V1__LegTimes *m)
{
    struct rt_trace *t = req->trace;

    if (leg->kind == RT_LEG_DECODE && !t->decode.known) {
        read_times(m, &t->decode);
        count_handoff(req, &t->decode);
    } else if (leg->kind != RT_LEG_DECODE && !t->t.first && !t->prompt.known) {
        read_times(m, &t->prompt);
        count_prompt(req, &t->prompt);
    }
}

static void fill_stages(struct rt_trace *t, uint64_t now)
{
    rt_stages_fill(&t->t, &t->prompt, t->decode_is_second ? &t->decode : NULL, now, t->stage_ns);
}

static void on_first(struct rt_request *req, uint64_t now)
{
    struct rt_stats *s = &req->router->stats;
    struct rt_trace *t = req->trace;

    t->t.first = now;
    fill_stages(t, now);
    rt_histogram_add(&s->first_token, seconds(now - t->t.came), 1);
    rt_histogram_add(&s->path_first[req->path_taken], seconds(now - t->t.came), 1);
    for (int i = 0; i < RT_STAGE_FIRST_COUNT; i++) {
        rt_histogram_add(&s->stages[i], seconds(t->stage_ns[i]), 1);
    }
    t->first_retries = req->retries;
}

static void on_second(struct rt_request *req, uint64_t now)
{
    struct rt_stats *s = &req->router->stats;
    struct rt_trace *t = req->trace;

    t->t.second = now;
    t->decode_is_second = t->decode.known && t->first_retries == req->retries;
    fill_stages(t, now);
    for (int i = RT_STAGE_FIRST_COUNT; i < RT_STAGE_COUNT; i++) {
        rt_histogram_add(&s->stages[i], seconds(t->stage_ns[i]), 1);
    }
}

void rt_observe_tokens(struct rt_request *req, size_t n_before, size_t n)
{
    struct rt_trace *t = req->trace;
    uint64_t now, n_gaps;

    if (!t || n == n_before) {
        return;
    }
    now = bt_now_ns();
    n_gaps = n - n_before - (n_before == 0);
    if (n_before == 0) {
        on_first(req, now);
        t->t.last = now;
    }
    if (n >= 2 && !t->t.second) {
        on_second(req, now);
    }
    if (n_gaps > 0) {
        rt_histogram_add(&req->router->stats.token, seconds(now - t->t.last) / (double)n_gaps,
                         n_gaps);
    }
    t->t.last = now;
}

/* --- the end --------------------------------------------------------------------------------- */

static bool is_good(const struct rt_router *r, const struct rt_trace *t)
{
    return t->rc == BT_OK && t->t.first && t->t.first - t->t.came <= r->conf->good_first_ns &&
           rt_trace_token_s(t) <= seconds(r->conf->good_token_ns);
}

void rt_observe_refresh(struct rt_request *req)
{
    struct rt_trace *t = req->trace;

    t->state = req->state;
    snprintf(t->tenant, sizeof(t->tenant), "%s", req->tenant);
    t->path = req->path_taken;
    t->asked_path = req->path;
    t->retries = req->retries;
    t->n_prompt = (uint32_t)req->prompt.n;
    t->n_answer = (uint32_t)req->answer.ids.n;
    t->n_cached = req->cached_tokens;
    snprintf(t->prefill, sizeof(t->prefill), "%s", req->prefill_name);
    snprintf(t->decoder, sizeof(t->decoder), "%s", req->decode_name);
    snprintf(t->store, sizeof(t->store), "%s",
             req->path_taken == RT_PATH_STORE ? req->store.name : "");
    if (!t->t.first) { /* else they are filled: later attempts have times of their own */
        fill_stages(t, bt_now_ns());
    }
}

static void count_end(struct rt_router *r, const struct rt_trace *t)
{
    struct rt_stats *s = &r->stats;
    struct rt_tenant_stats *tenant = rt_stats_tenant(s, t->tenant);

    tenant->requests++;
    tenant->ok += t->rc == BT_OK;
    tenant->good += t->good;
    tenant->prompt_tokens += t->n_prompt;
    tenant->cached_tokens += t->n_cached;
    tenant->tokens += t->n_answer;
    s->good += t->good;
    s->cached_tokens += t->n_cached;
    if (t->rc == BT_OK) {
        rt_histogram_add(&s->total, seconds(t->end_ns - t->t.came), 1);
        if (t->n_answer > 1) {
            rt_histogram_add(&s->answer_token, rt_trace_token_s(t), 1);
        }
    }
}

void rt_observe_end(struct rt_request *req, enum rt_outcome outcome, int rc)
{
    struct rt_router *r = req->router;
    struct rt_trace *t = req->trace;

    (void)outcome;
    if (!t) {
        return;
    }
    rt_observe_refresh(req);
    t->end_ns = BT_MAX(bt_now_ns(), t->t.came);
    t->rc = rc;
    t->finish = req->finish ? req->finish : "none";
    t->good = is_good(r, t);
    t->client_id = req->client_id; /* ours from now on */
    req->client_id = NULL;
    count_end(r, t);
    rt_access_write(r, t);
    req->trace = NULL;
    rt_traces_add(r->traces, t);
}
