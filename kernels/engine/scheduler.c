/* Scheduler, first part: requests come, change state and go. plan.c plans, prefix.c shares.
 *
 * Every request is in exactly one list, that of its state, ordered by claim. A request's memory is
 * freed right after its last output, or, where a transfer is open, after the transfer's proof.
 */
#include "kernels/engine/scheduler_int.h"

#include "common/base/buf.h"
#include "common/thr/time.h"

#include <stdio.h>
#include <stdlib.h>

/* Of a prompt, if nobody has a better guess. */
#define GUESS_TOKEN_NS (50 * BT_NS_PER_US)

static bool alloc_plans(struct kn_sched *sched, uint32_t n_pages)
{
    bool ok = true;

    for (int i = 0; i < 2; i++) {
        struct kn_step_plan *p = &sched->plans[i];

        p->rows = bt_calloc((size_t)sched->cfg.max_running, sizeof(*p->rows));
        p->ids = bt_calloc((size_t)sched->cfg.max_batch_tokens, sizeof(*p->ids));
        p->pages = bt_calloc(n_pages, sizeof(*p->pages));
        sched->cap_plan_pages[i] = n_pages;
        ok = ok && p->rows && p->ids && p->pages;
    }
    return ok;
}

int kn_sched_create(const struct kn_sched_cfg *cfg, struct kn_sched **ret, struct bt_err *err)
{
    struct kn_sched *sched;
    uint32_t n_pages = kv_pool_layout(cfg->pool)->n_pages;

    if (cfg->max_batch_tokens < 1 || cfg->max_running < 1) {
        return BT_FAIL(err, BT_E_INVALID, "max_batch_tokens %d and max_running %d must be positive",
                       cfg->max_batch_tokens, cfg->max_running);
    }
    sched = bt_calloc(1, sizeof(*sched));
    if (!sched) {
        return BT_FAIL(err, BT_E_NOMEM, "scheduler: no memory");
    }
    BT_BUG_ON(cfg->n_sources > KN_MAX_SOURCES);
    sched->cfg = *cfg;
    sched->cfg.n_sources = cfg->index ? cfg->n_sources : 0;
    for (uint32_t i = 0; i < sched->cfg.n_sources; i++) {
        sched->sources[i] = cfg->sources[i];
    }
    sched->cfg.sources = sched->sources;
    kn_sched_fit_init(sched);
    sched->rate.guess_ns = (double)(cfg->guess_token_ns ? cfg->guess_token_ns : GUESS_TOKEN_NS);
    for (int i = 0; i < KN_LIST_NONE; i++) {
        bt_list_init(&sched->lists[i]);
    }
    bt_map_init(&sched->by_tag);
    sched->next_deadline_ns = sched->next_patience_ns = sched->next_load_ns = BT_NEVER_NS;
    sched->slots = bt_calloc((size_t)cfg->max_running, sizeof(struct kn_seq *));
    sched->free_slots = bt_calloc((size_t)cfg->max_running, sizeof(*sched->free_slots));
    if (!sched->slots || !sched->free_slots || !alloc_plans(sched, n_pages)) {
        kn_sched_destroy(sched);
        return BT_FAIL(err, BT_E_NOMEM, "scheduler: no memory for %d rows and %u pages",
                       cfg->max_running, n_pages);
    }
    if (kn_offers_create(sched, err) < 0) {
        kn_sched_destroy(sched);
        return BT_E_NOMEM;
    }
    for (int i = cfg->max_running - 1; i >= 0; i--) {
        sched->free_slots[sched->n_free_slots++] = (uint32_t)i;
    }
    *ret = sched;
    return BT_OK;
}

void kn_sched_destroy(struct kn_sched *sched)
{
    if (!sched) {
        return;
    }
    BT_BUG_ON(sched->stats.n_live != 0);
    kn_offers_destroy(sched);
    bt_map_fini(&sched->by_tag);
    free(sched->slots);
    free(sched->free_slots);
    for (int i = 0; i < 2; i++) {
        free(sched->plans[i].rows);
        free(sched->plans[i].ids);
        free(sched->plans[i].pages);
    }
    free(sched);
}

static void insert_by_claim(struct bt_list *head, struct kn_seq *s)
{
    struct bt_list *at = head->prev;

    while (at != head && kn_seq_younger(kn_seq_of(at), s)) {
        at = at->prev;
    }
    bt_list_insert_(&s->link, at, at->next);
}

void kn_sched_recount(struct kn_sched *sched, struct kn_seq *s)
{
    bool waits = s->state == KN_SEQ_WAITING || s->state == KN_SEQ_PREEMPTED ||
                 s->state == KN_SEQ_LOADING || s->state == KN_SEQ_PREFILLING;
    uint32_t n = waits && kn_seq_computes(s) ? kn_seq_target(s) - s->n_computed : 0;

    sched->stats.tokens_waiting += (uint64_t)n - s->counted_tokens;
    s->counted_tokens = n;
}

void kn_sched_set_state(struct kn_sched *sched, struct kn_seq *s, enum kn_seq_state to)
{
    BT_BUG_ON(!kn_seq_may(s->state, to));
    sched->stats.n_state[s->state]--;
    sched->stats.n_state[to]++;
    sched->looked = false;
    s->state = to;
    s->needy_ns = 0;
    bt_list_remove(&s->link);
    if (kn_seq_state_list(to) != KN_LIST_NONE) {
        insert_by_claim(&sched->lists[kn_seq_state_list(to)], s);
    }
    if (kn_seq_state_slot(to) && s->slot == KN_SLOT_NONE) {
        BT_BUG_ON(sched->n_free_slots == 0);
        s->slot = sched->free_slots[--sched->n_free_slots];
        sched->slots[s->slot] = s;
    } else if (!kn_seq_state_slot(to) && s->slot != KN_SLOT_NONE) {
        sched->slots[s->slot] = NULL;
        sched->free_slots[sched->n_free_slots++] = s->slot;
        s->slot = KN_SLOT_NONE;
        s->step_tokens = 0;
        s->held_ns = 0;
    }
    kn_sched_recount(sched, s);
}

static uint64_t span(uint64_t from, uint64_t to)
{
    return to > from ? to - from : 0;
}

/* Loads that a row has overtaken end, as far as they show, where it began. */
static void fill_times(struct kn_sched *sched, const struct kn_seq *s, struct kn_times *t)
{
    uint64_t ready = BT_MIN(s->ready_ns ? s->ready_ns : s->placed_ns, s->begun_ns);

    *t = (struct kn_times){.queue_ns = span(s->came_ns, s->placed_ns),
                           .load_ns = span(s->placed_ns, ready),
                           .wait_ns = span(BT_MAX(ready, s->placed_ns), s->begun_ns),
                           .compute_ns = span(s->begun_ns, kn_sched_clock(sched)),
                           .transport = s->transport,
                           .bytes = s->recv_bytes};
    memcpy(t->tier_tokens, s->tier_tokens, sizeof(t->tier_tokens));
}

static void say(struct kn_sched *sched, struct kn_seq *s, struct kn_output *out)
{
    if (out->n_tokens > 0 && !s->times_told) {
        s->times_told = out->timed = true;
        fill_times(sched, s, &out->times);
    }
    out->cached_tokens = s->cached_tokens;
    BT_BUG_ON(s->said_last);
    s->said_last = out->rc < 0 || out->finish != KN_FINISH_NONE || out->handed_over;
    sched->cfg.output(sched->cfg.output_arg, out);
}

/* Last output (unless it is out) and end of the request. */
static void finish(struct kn_sched *sched, struct kn_seq *s, struct kn_output *last)
{
    last->tag = s->tag;
    last->offset = s->n_answer;
    if (!s->said_last) {
        say(sched, s, last);
    }
    if (s->n_pages > 0) {
        kn_sched_free_pages(sched, s);
    }
    kn_sched_fetch_end(sched, s);
    kn_sched_leave_tail(s);
    if (kn_sched_find(sched, s->tag) == s) {
        bt_map_del(&sched->by_tag, s->tag);
    }
    kn_sched_set_state(sched, s, KN_SEQ_DONE);
    sched->stats.n_state[KN_SEQ_DONE]--;
    sched->stats.n_live--;
    sched->n_over -= s->over;
    kn_seq_destroy(s);
}

static void finish_rc(struct kn_sched *sched, struct kn_seq *s, int rc, const char *msg)
{
    struct kn_output last = {.rc = rc};

    snprintf(last.err_msg, sizeof(last.err_msg), "%s", msg && *msg ? msg : bt_rc_text(rc));
    finish(sched, s, &last);
}

void kn_sched_end(struct kn_sched *sched, struct kn_seq *s, int rc, const char *msg)
{
    bool withdrawn = s->state == KN_SEQ_WITHDRAWN, fetching;

    if (s->state == KN_SEQ_ABORTING) {
        return;
    }
    fetching = !kn_sched_fetch_cancel(sched, s);
    if (!s->xfer_open && !fetching) {
        finish_rc(sched, s, rc, msg);
        return;
    }
    s->end_rc = rc;
    snprintf(s->end_msg, sizeof(s->end_msg), "%s", msg);
    if (s->n_pages > 0) {
        kn_sched_own_pages(sched, s, KV_OWNER_TRANSFER);
    }
    kn_sched_set_state(sched, s, KN_SEQ_ABORTING);
    if (!s->xfer_open) {
        return;
    }
    if (s->leg == KN_LEG_PREFILL) {
        sched->cfg.xfer->send_abort(sched->cfg.xfer_arg, s, rc);
    } else if (!withdrawn) {
        sched->cfg.xfer->recv_abort(sched->cfg.xfer_arg, s, rc);
    }
}

void kn_sched_settle(struct kn_sched *sched, struct kn_seq *s)
{
    if (!s->xfer_open && !kn_sched_fetch_busy(s)) {
        finish_rc(sched, s, s->end_rc, s->end_msg);
    }
}

bool kn_sched_idle(const struct kn_sched *sched)
{
    return sched->stats.n_live == 0 && kn_offers_idle(sched);
}

void kn_sched_end_all(struct kn_sched *sched, int rc, const char *msg)
{
    sched->closing = true;
    kn_sched_hurry_offers(sched);
    for (int i = 0; i < KN_LIST_NONE; i++) {
        struct bt_list *l = sched->lists[i].next, *next;

        for (; l != &sched->lists[i]; l = next) {
            next = l->next;
            kn_sched_end(sched, kn_seq_of(l), rc, msg);
        }
    }
}

void kn_sched_add(struct kn_sched *sched, struct kn_seq *take_s)
{
    struct bt_err err = {.rc = BT_OK};
    struct kn_seq *s = take_s;
    int rc = BT_OK;

    s->order = sched->next_order++;
    s->state = KN_SEQ_WAITING;
    s->page_owner = KV_OWNER_SEQ;
    kn_sched_fetch_init(sched, s);
    sched->stats.n_state[KN_SEQ_WAITING]++;
    sched->stats.n_live++;
    sched->looked = false;
    insert_by_claim(&sched->lists[KN_LIST_QUEUE], s);
    kn_sched_recount(sched, s);
    sched->next_deadline_ns = BT_MIN(sched->next_deadline_ns, s->deadline_ns);
    if (kn_sched_find(sched, s->tag)) {
        rc = BT_FAIL(&err, BT_E_EXISTS, "another request has the tag %llu",
                     (unsigned long long)s->tag);
    } else {
        rc = bt_map_put(&sched->by_tag, s->tag, s);
    }
    if (rc == BT_OK && s->leg != KN_LEG_LOCAL && !sched->cfg.xfer) {
        rc = BT_FAIL(&err, BT_E_UNSUPPORTED, "this node makes no handoffs");
    }
    if (rc == BT_OK && s->leg == KN_LEG_PREFILL) {
        rc = sched->cfg.xfer->send_create(sched->cfg.xfer_arg, s, &err);
        s->xfer_open = rc == BT_OK;
    }
    if (rc < 0) {
        finish_rc(sched, s, rc, bt_err_msg(&err, rc));
    }
}

struct kn_seq *kn_sched_find(const struct kn_sched *sched, uint64_t tag)
{
    return bt_map_get(&sched->by_tag, tag);
}

struct kn_seq *kn_sched_at(const struct kn_sched *sched, uint32_t slot)
{
    return slot < (uint32_t)sched->cfg.max_running ? sched->slots[slot] : NULL;
}

bool kn_sched_begin_recv(struct kn_sched *sched, struct kn_seq *s)
{
    struct bt_err err = {.rc = BT_OK};
    int rc = sched->cfg.xfer->recv_create(sched->cfg.xfer_arg, s, &err);

    if (rc == BT_OK) {
        s->xfer_open = true;
        kn_sched_set_state(sched, s, KN_SEQ_FILLING);
        return true;
    }
    if (rc == BT_E_EXHAUSTED && sched->stats.n_state[KN_SEQ_FILLING] > 0) {
        /* A transfer's end makes room. */
        kn_sched_free_pages(sched, s);
        if (s->state != KN_SEQ_WAITING) {
            kn_sched_set_state(sched, s, KN_SEQ_WAITING);
        }
        return false;
    }
    kn_sched_end(sched, s, rc, bt_err_msg(&err, rc));
    return true;
}

/* All bytes are here: the transfer's pages become the request's, P's first tokens part of the
 * answer. P emits them, so nothing is said here. */
static void recv_complete(struct kn_sched *sched, struct kn_seq *s, const struct kv_first *first)
{
    enum kn_finish end = KN_FINISH_NONE;

    s->received = true;
    s->ready_ns = kn_sched_clock(sched);
    s->placed = true; /* KV that was received is no cache hit, also after a preemption */
    kn_sched_own_pages(sched, s, KV_OWNER_SEQ);
    if (first->n_tokens > KV_HANDOFF_MAX_FIRST) {
        finish_rc(sched, s, BT_E_PEER_PROTOCOL, "the prefill node sent too many first tokens");
        return;
    }
    for (uint32_t i = 0; i < first->n_tokens && end == KN_FINISH_NONE; i++) {
        if (first->ids[i] < 0 || first->ids[i] >= sched->cfg.n_vocab) {
            finish_rc(sched, s, BT_E_PEER_PROTOCOL,
                      "the prefill node sent a token outside the vocabulary");
            return;
        }
        end = kn_seq_append(s, first->ids[i]);
    }
    /* At least one token is computed here, also if P drew none. */
    s->n_computed = BT_MIN(s->n_prompt + s->n_answered, kn_seq_target(s) - 1);
    kn_sched_publish(sched, s);
    if (end != KN_FINISH_NONE) {
        struct kn_output last = {.finish = end};

        finish(sched, s, &last);
        return;
    }
    kn_sched_set_state(sched, s, KN_SEQ_RUNNING);
}

static void recv_done(
    struct kn_sched *sched, struct kn_seq *s, int rc, const char *msg, const struct kv_first *first)
{
    bool withdrawn = s->state == KN_SEQ_WITHDRAWN;

    if (rc == BT_OK) {
        recv_complete(sched, s, first);
        return;
    }
    kn_sched_free_pages(sched, s);
    if (withdrawn && rc == BT_E_EXHAUSTED) {
        kn_sched_set_state(sched, s, KN_SEQ_WAITING);
        return;
    }
    finish_rc(sched, s, rc, msg);
}

void kn_sched_xfer_done(
    struct kn_sched *sched, struct kn_seq *s, int rc, const char *msg, const struct kv_first *first)
{
    BT_BUG_ON(!s->xfer_open);
    s->xfer_open = false;
    s->send = NULL;
    s->recv = NULL;
    if (s->leg == KN_LEG_PREFILL && rc == BT_OK && !s->said_last) {
        struct kn_output last = {.handed_over = true};

        finish(sched, s, &last);
    } else if (s->state == KN_SEQ_ABORTING) {
        kn_sched_settle(sched, s);
    } else if (kn_sched_fetch_busy(s)) {
        kn_sched_end(sched, s, rc < 0 ? rc : BT_E_INTERNAL, msg);
    } else if (s->leg == KN_LEG_DECODE) {
        recv_done(sched, s, rc, msg, first);
    } else {
        finish_rc(sched, s, rc, msg);
    }
}

void kn_sched_tick(struct kn_sched *sched, uint64_t now_ns)
{
    uint64_t earliest = BT_NEVER_NS;

    sched->now_ns = now_ns;
    kn_sched_pump_offers(sched); /* those that waited until they were wanted */
    if (now_ns < sched->next_deadline_ns) {
        return;
    }
    for (int i = 0; i < KN_LIST_NONE; i++) {
        struct bt_list *l = sched->lists[i].next, *next;

        for (; l != &sched->lists[i]; l = next) {
            struct kn_seq *s = kn_seq_of(l);

            next = l->next;
            if (s->state == KN_SEQ_ABORTING) {
                continue;
            }
            if (s->deadline_ns <= now_ns) {
                kn_sched_end(sched, s, BT_E_DEADLINE, "the request's deadline passed");
            } else {
                earliest = BT_MIN(earliest, s->deadline_ns);
            }
        }
    }
    sched->next_deadline_ns = earliest;
}

uint64_t kn_sched_next_wake_ns(const struct kn_sched *sched)
{
    uint64_t own = BT_MIN(sched->next_deadline_ns, sched->next_patience_ns);

    return BT_MIN(own, sched->next_load_ns);
}

/* The row reached the target: the drawn token, or what a prefill leg drew before it gave way. A
 * request whose next row runs already keeps its pages until that step is done. */
static void
row_complete(struct kn_sched *sched, struct kn_seq *s, const struct kn_token *token, bool runs_on)
{
    struct kn_output out = {
        .tag = s->tag, .offset = s->n_answer, .n_tokens = token ? 1 : 0, .tokens = token};

    if (token) {
        out.finish = kn_seq_append(s, token->id);
        sched->stats.tokens_generated++;
        say(sched, s, &out);
    }
    if (out.finish != KN_FINISH_NONE && runs_on) {
        s->over = true;
        sched->n_over++;
        return;
    }
    if (out.finish != KN_FINISH_NONE) {
        /* A prefill leg's decode node learns that there is nothing left to do. */
        kn_sched_end(sched, s, BT_E_CANCELLED, "the answer ended at the first token");
        return;
    }
    if (s->leg == KN_LEG_PREFILL) {
        kn_sched_own_pages(sched, s, KV_OWNER_TRANSFER);
        kn_sched_set_state(sched, s, KN_SEQ_HOLDING);
        sched->cfg.xfer->send_finish(sched->cfg.xfer_arg, s);
    } else if (s->state == KN_SEQ_PREFILLING) {
        kn_sched_set_state(sched, s, KN_SEQ_RUNNING);
    }
}

/* Steps that were mostly one prompt's say what prompts cost. Loads beside a step slow it down a
 * little: it counts only while it is all that is known. */
#define MEASURE_TOKENS 16

void kn_sched_measured(struct kn_sched *sched, const struct kn_step_plan *plan, uint64_t ns)
{
    if (plan->n_loading > 0 && kn_rate_known(&sched->rate)) {
        return;
    }
    for (uint32_t i = 0; i < plan->n_rows; i++) {
        const struct kn_plan_row *row = &plan->rows[i];

        if (row->n_tokens >= MEASURE_TOKENS && row->n_tokens * 2 > plan->n_tokens) {
            kn_rate_add(&sched->rate, row->pos, row->n_tokens, ns / plan->n_tokens * row->n_tokens);
        }
    }
}

/* A row behind loads: if they came whole it counts, once they have all been reported. */
static void
row_ahead(struct kn_sched *sched, const struct kn_plan_row *row, const struct kn_token *drawn)
{
    struct kn_seq *s = sched->slots[row->slot];

    s->step_tokens = 0;
    if (!kn_sched_loads_whole(sched, s)) {
        s->load_void = true;
        sched->stats.tokens_discarded += row->n_tokens;
        return;
    }
    s->ahead_tokens = row->n_tokens;
    s->ahead_draws = row->draw;
    if (row->draw) {
        s->ahead = *drawn;
    }
}

void kn_sched_take_ahead(struct kn_sched *sched, struct kn_seq *s)
{
    s->n_computed += s->ahead_tokens;
    s->ahead_tokens = 0;
    kn_sched_recount(sched, s);
    kn_sched_publish(sched, s);
    if (s->ahead_draws || s->n_computed == kn_seq_target(s)) {
        row_complete(sched, s, s->ahead_draws ? &s->ahead : NULL, false);
    }
}

/* A row planned before it was known what the one before it draws, and for nothing: the answer has
 * ended, or the token was none. */
static bool row_void(struct kn_sched *sched, struct kn_seq *s, const struct kn_plan_row *row)
{
    if (!s->over && !s->again) {
        return false;
    }
    sched->stats.tokens_discarded += row->n_tokens;
    s->again = false;
    if (s->over) {
        kn_sched_end(sched, s, BT_E_CANCELLED, "the answer has ended");
    }
    return true;
}

void kn_sched_step_done(struct kn_sched *sched,
                        const struct kn_step_plan *plan,
                        const struct kn_token *drawn)
{
    sched->stats.steps++;
    sched->stats.tokens_computed += plan->n_tokens;
    for (uint32_t i = 0; i < plan->n_rows; i++) {
        const struct kn_plan_row *row = &plan->rows[i];
        struct kn_seq *s = sched->slots[row->slot];
        const struct kn_token *token = row->draw ? drawn++ : NULL;
        bool runs_on;

        if (row->loading) {
            row_ahead(sched, row, token);
            continue;
        }
        s->step_tokens = 0;
        if (row_void(sched, s, row)) {
            continue;
        }
        runs_on = s->last_step != plan->step;
        s->n_computed += row->n_tokens;
        kn_sched_recount(sched, s);
        kn_sched_publish(sched, s);
        if (token || s->n_computed == kn_seq_target(s)) {
            s->again = token && token->undrawn && runs_on;
            row_complete(sched, s, token, runs_on);
        }
    }
}

void kn_sched_step_failed(struct kn_sched *sched,
                          const struct kn_step_plan *plan,
                          int rc,
                          const char *msg)
{
    for (uint32_t i = 0; i < plan->n_rows; i++) {
        struct kn_seq *s = kn_sched_at(sched, plan->rows[i].slot);

        if (s && s->tag == plan->rows[i].tag) { /* else a step before it failed as well */
            kn_sched_end(sched, s, rc, msg);
        }
    }
}

struct kn_sched_stats kn_sched_stats(const struct kn_sched *sched)
{
    return sched->stats;
}
