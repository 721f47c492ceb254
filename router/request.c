/* One Generate call, from its check to its status. Loop thread.
 *
 * A request runs as attempts. An attempt has one leg (local) or two (prefill and decode) and begins
 * at the offset that the answer has reached: the nodes are told what the client already has, and
 * since every token is a function of what came before it, a new attempt goes on exactly. When one
 * leg fails the other is cancelled at once, and another attempt follows on other nodes if there are
 * any. Tokens of the decode node that arrive before the prefill node's first one wait in `early`.
 */
#include "router/request_int.h"

#include "common/base/buf.h"
#include "common/obs/log.h"
#include "common/thr/time.h"

#include <stdlib.h>

#define MAX_EARLY  4096 /* tokens */
#define FEW_TOKENS 4    /* of a message, without an allocation */

void rt_request_set_state(struct rt_request *req, enum rt_request_state to)
{
    BT_BUG_ON(!rt_request_state_allowed(req->state, to));
    BT_DEBUG("request", "req=%s from=%s to=%s", req->id, rt_request_state_name(req->state),
             rt_request_state_name(to));
    req->state = to;
}

/* --- the end --------------------------------------------------------------------------------- */

void rt_request_drop_legs(struct rt_request *req, bool cancel)
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

/* No leg is ours any more; the client still is, until it closes us. */
static void done(struct rt_request *req, enum rt_outcome outcome, int rc)
{
    struct rt_stats *stats = &req->router->stats;

    if (req->state == RT_REQUEST_DONE) {
        return;
    }
    rt_request_set_state(req, RT_REQUEST_DONE);
    if (req->job) {
        req->job->user = NULL;
        req->job = NULL;
    }
    bt_timer_stop(req->router->loop, &req->timer);
    rt_request_drop_legs(req, true);
    rt_admit_ended(req);
    req->router->n_requests--;
    stats->outcomes[outcome]++;
    stats->prompt_tokens += req->prompt.n;
    stats->retries += req->retries;
    rt_observe_end(req, outcome, rc);
}

void rt_request_fail(struct rt_request *req, int rc, const char *msg)
{
    struct bt_err err = {.rc = rc};

    if (req->state == RT_REQUEST_DONE) {
        return;
    }
    snprintf(err.msg, sizeof(err.msg), "%s", msg);
    BT_DEBUG("request", "req=%s rc=%s msg=\"%s\"", req->id, bt_rc_name(rc), err.msg);
    done(req, rt_outcome_of(rc), rc);
    req->client->ops->fail(req->client, rc, &err);
}

void rt_request_fail_early(struct rt_request *req, int rc)
{
    done(req, rt_outcome_of(rc), rc);
    rt_request_closed(req);
}

void rt_request_closed(struct rt_request *req)
{
    int rc = req->client->closed_rc < 0 ? req->client->closed_rc : BT_E_CANCELLED;

    done(req, rt_outcome_of(rc), rc);
    bt_list_remove(&req->link);
    rt_answer_fini(&req->answer);
    wire_sampling_owned_fini(&req->sampling);
    bt_ids_fini(&req->prompt);
    bt_buf_fini(&req->packed);
    rt_cache_free_keys(req);
    rt_trace_destroy(req->trace); /* NULL unless something went wrong at the very beginning */
    free(req->early);
    free(req->client_id);
    free(req->cache_salt);
    free(req);
}

void rt_requests_count(const struct rt_router *r, size_t n[RT_REQUEST_STATE_COUNT])
{
    memset(n, 0, RT_REQUEST_STATE_COUNT * sizeof(*n));
    bt_list_for_each (it, &r->requests) {
        n[BT_LIST_ENTRY(it, struct rt_request, link)->state]++;
    }
}

/* --- tokens to the client -------------------------------------------------------------------- */

static double seconds(const struct rt_request *req, uint64_t t)
{
    return t ? (double)(t - req->trace->t.came) / 1e9 : 0;
}

/* What the last message says besides tokens. */
static void fill_end(const struct rt_request *req, Baton__V1__Usage *u, Baton__V1__Timing *t)
{
    baton__v1__usage__init(u);
    u->prompt_tokens = (uint32_t)req->prompt.n;
    u->completion_tokens = (uint32_t)req->answer.ids.n;
    u->cached_tokens = req->cached_tokens;
    baton__v1__timing__init(t);
    t->queue = seconds(req, req->trace->t.asked);
    t->first_token = seconds(req, req->trace->t.first);
    t->second_token = seconds(req, req->trace->t.second);
    t->total = seconds(req, bt_now_ns());
    t->prefill_node = (char *)(uintptr_t)req->prefill_name;
    t->decode_node = (char *)(uintptr_t)req->decode_name;
    t->path = req->path_taken == RT_PATH_DIRECT  ? BATON__V1__PATH__PATH_DIRECT
              : req->path_taken == RT_PATH_STORE ? BATON__V1__PATH__PATH_STORE
                                                 : BATON__V1__PATH__PATH_LOCAL;
    if (req->path_taken == RT_PATH_STORE) {
        t->store = (char *)(uintptr_t)req->store.name;
    }
    t->retries = req->retries;
    t->prefill_rank = req->prefill_rank;
    t->decode_rank = req->decode_rank;
}

/* Sends what the answer holds; with a finish it is the last message and ends the call. */
static void
send(struct rt_request *req, const struct rt_token *tokens, Baton__V1__FinishReason finish)
{
    Baton__V1__GenerateResponse m = BATON__V1__GENERATE_RESPONSE__INIT;
    Baton__V1__Usage usage;
    Baton__V1__Timing timing;
    bool last = finish != BATON__V1__FINISH_REASON__FINISH_NONE;
    size_t n = req->answer.ids.n - req->answer.n_sent;
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
    rc = rt_answer_send(&req->answer, req->client, tokens, &m);
    req->first_sent = true;
    if (rc == BT_OK) {
        req->router->stats.tokens += n;
    }
    if (rc == BT_E_EXHAUSTED) {
        rt_request_fail(req, rc, "the client does not read its answer");
    } else if (rc < 0 && rc != BT_E_CANCELLED) {
        rt_request_fail(req, rc, bt_rc_text(rc));
    } else if (last) {
        rt_cache_finished(req);
        req->finish = finish == BATON__V1__FINISH_REASON__FINISH_STOP ? "stop" : "length";
        done(req, RT_OUTCOME_OK, BT_OK);
        req->client->ops->finish(req->client);
    }
}

/* Takes tokens that continue the answer. */
static void take(struct rt_request *req,
                 const struct rt_token *tokens,
                 size_t n,
                 Baton__V1__FinishReason finish)
{
    bool last = finish != BATON__V1__FINISH_REASON__FINISH_NONE;
    size_t before = req->answer.ids.n;
    int rc = BT_OK;

    for (size_t i = 0; rc == BT_OK && i < n && !req->answer.stopped; i++) {
        bool ends = finish == BATON__V1__FINISH_REASON__FINISH_STOP && i + 1 == n;

        rc = rt_answer_push(&req->answer, tokens[i].id, ends);
    }
    if (rc == BT_OK && last) {
        rc = rt_answer_flush(&req->answer);
    }
    if (rc < 0) {
        rt_request_fail(req, rc, bt_rc_text(rc));
        return;
    }
    if (req->answer.stopped) {
        finish = BATON__V1__FINISH_REASON__FINISH_STOP;
    }
    rt_observe_tokens(req, before, req->answer.ids.n);
    send(req, tokens, finish);
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
    if (req->path_taken == RT_PATH_STORE && (other_to_blame || leg->kind == RT_LEG_DECODE)) {
        rt_request_exclude_store(req); /* both legs have it as their peer */
    }
    if (!other_to_blame) {
        rt_request_exclude(req, leg->node);
    } else if (other && req->path_taken != RT_PATH_STORE) {
        rt_request_exclude(req, other->node);
    }
    rt_request_retry(req, rc, msg);
}

static void
on_error(struct rt_request *req, const struct rt_leg *leg, const Baton__V1__StreamError *e)
{
    char text[232];
    bool peer = e->rc <= BT_E_PEER_LOST && e->rc > -50;
    int rc = e->rc < 0 ? e->rc : BT_E_PEER_PROTOCOL;

    snprintf(text, sizeof(text), "%s: %.150s", leg->node->name, e->message);
    if (!e->retryable && rc != BT_E_CANCELLED) { /* cancelled, but not by us: its peer's doing */
        rt_request_fail(req, rc, text);
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
    rt_request_set_state(req, RT_REQUEST_DECODE);
    take(req, early, n, finish);
    free(early);
}

static void advance(struct rt_request *req, const struct rt_leg *leg)
{
    if (leg->kind == RT_LEG_PREFILL && req->state == RT_REQUEST_PREFILL) {
        rt_request_set_state(req, RT_REQUEST_HANDOFF);
    } else if (leg->kind != RT_LEG_PREFILL && req->state != RT_REQUEST_DECODE) {
        rt_request_set_state(req, RT_REQUEST_DECODE);
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

/* What the node has not computed. Figures that do not add up are a node's fault and stay bounded.
 */
static void take_cached(struct rt_request *req, const Baton__V1__StreamOutput *m)
{
    const Baton__V1__LegTimes *times =
        m->times; /* of the first token; before it all counts as pool */
    const uint32_t slow[RT_TIERS] = {0, times ? times->host_tokens : 0,
                                     times ? times->disk_tokens : 0,
                                     times ? times->store_tokens : 0};
    uint32_t left = BT_MIN(m->cached_tokens, (uint32_t)req->prompt.n);

    if (!times && left == req->cached_tokens) {
        return; /* known, with its tiers */
    }
    req->cached_tokens = left;
    for (int t = RT_TIERS - 1; t > 0; t--) {
        req->cached_tier_tokens[t] = BT_MIN(slow[t], left);
        left -= req->cached_tier_tokens[t];
    }
    req->cached_tier_tokens[0] = left;
}

static void fetch(const void *p, size_t n)
{
    for (size_t at = 0; at < n; at += 64) {
        __builtin_prefetch((const char *)p + at, 1);
    }
}

void rt_request_fetch(const struct rt_request *req, enum rt_fetch what)
{
    if (what == RT_FETCH_SELF) {
        fetch(req, offsetof(struct rt_request, prompt));
        fetch(&req->answer, sizeof(req->answer));
        fetch(&req->finish, 64);
        fetch(&req->trace, 1);
        return;
    }
    fetch(req->client, sizeof(*req->client));
    fetch(req->answer.ids.p ? req->answer.ids.p + req->answer.ids.n : NULL, 1);
    if (req->trace) {
        fetch(&req->trace->t, sizeof(req->trace->t));
    }
}

void rt_request_output(struct rt_leg *leg, const Baton__V1__StreamOutput *m, bool last)
{
    struct rt_request *req = leg->req;
    struct rt_token few[FEW_TOKENS], *tokens;
    struct bt_err err = {0};
    int rc;

    if (last) {
        forget_leg(req, leg);
    }
    /* Later attempts find what the first one has computed: that is no hit of this prompt. */
    if (m->cached_tokens > 0 && leg->kind != RT_LEG_DECODE && req->answer.ids.n == 0) {
        take_cached(req, m);
    }
    if (m->times) {
        rt_observe_times(req, leg, m->times);
    }
    if (m->error) {
        on_error(req, leg, m->error);
        return;
    }
    if (m->n_tokens > 0 || m->finish != BATON__V1__FINISH_REASON__FINISH_NONE) {
        tokens = m->n_tokens <= FEW_TOKENS ? few : bt_calloc(m->n_tokens, sizeof(*tokens));
        if (!tokens) {
            rt_request_fail(req, BT_E_NOMEM, "no memory for tokens");
            return;
        }
        rc = rt_answer_read(&req->answer, m, tokens, &err);
        if (rc < 0) {
            leg_failed(req, leg, rc, err.msg, false);
        } else {
            on_tokens(req, leg, m, tokens);
        }
        if (tokens != few) {
            free(tokens);
        }
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
