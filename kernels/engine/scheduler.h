/* The scheduler: pure logic. Events in, step plans and outputs out; no model, no thread, no clock.
 *
 * Order is by claim, oldest first; age needs no term of its own.
 *   1 Every RUNNING request gets its token (of the step's budget a share stays for prompts).
 *   2 Queued requests are admitted as long as there is budget for them. Admission takes all pages
 *     of the known tokens at once or none, so that nobody holds pages while waiting for pages, and
 *     a transfer's pieces are long. The scan never stops at a request that does not fit.
 *   3 The rest of the budget goes to prompts. A prompt that needs more than one step leaves half to
 *     those a quarter of its size and smaller.
 * Prefix reuse (prefix.c): a request that is admitted takes over the longest run of blocks of its
 * known tokens that lies in the index, except that at least one token is left to compute, and
 * computes the rest. Blocks that become full go into the index. Cached blocks that nobody uses
 * count as free pages. When pages are short, in this order: finished prompts of prefill legs that
 * no decode node has asked for are dropped; then the youngest holder younger than the needy request
 * is preempted, for a holder at once, for a queued request after `patience_ns`, and only if that is
 * enough; then unfilled reservations younger than it are withdrawn (`withdraw_ns`).
 *
 * Thread: one (the engine's).
 */
#ifndef KN_ENGINE_SCHEDULER_H
#define KN_ENGINE_SCHEDULER_H

#include "kernels/engine/seq.h"

struct kn_sched;

/* One row: `n_tokens` tokens of one request at `pos`. */
struct kn_plan_row {
    uint64_t tag;
    uint32_t slot; /* the request's place; holds its sampling state on every executor */
    uint32_t pos;  /* absolute position of the first token */
    uint32_t n_tokens;
    uint32_t first_id;   /* in ids */
    uint32_t first_page; /* in pages; the table covers pos + n_tokens */
    uint32_t n_pages;
    uint32_t n_answer; /* position of the token to draw */
    bool draw;
    bool loading; /* tokens before pos are still being brought: worth something if they come */
};

/* A step, immutable once made: indexes only, no pointers into the scheduler, so that it can be sent
 * to executors elsewhere as it is. Valid until the next but one is made. */
struct kn_step_plan {
    uint64_t step;
    uint32_t n_rows, n_tokens, n_pages, n_draws;
    uint32_t n_loading;       /* rows */
    uint64_t stall_ns;        /* how long the step may wait for them in all */
    struct kn_plan_row *rows; /* [n_rows] by claim, loading ones last */
    int32_t *ids;    /* [n_tokens]; made ahead: -1 - i is token i that the step before draws */
    uint32_t *pages; /* [n_pages] */
};

/* How the scheduler speaks to the handoff. create sets s->send / s->recv; each done is reported by
 * kn_sched_xfer_done, exactly once, later. */
struct kn_xfer_ops {
    int (*send_create)(void *arg, struct kn_seq *s, struct bt_err *err);
    void (*send_pages)(void *arg, struct kn_seq *s); /* whole page table is there */
    /* The first n tokens are there, all layers. */
    void (*send_cached)(void *arg, struct kn_seq *s, uint32_t n);
    void (*send_finish)(void *arg, struct kn_seq *s); /* prompt computed, first token drawn */
    bool (*send_rewind)(void *arg, struct kn_seq *s);
    void (*send_abort)(void *arg, struct kn_seq *s, int rc);
    int (*recv_create)(void *arg, struct kn_seq *s, struct bt_err *err);
    void (*recv_abort)(void *arg, struct kn_seq *s, int rc);
};

struct kn_sched_cfg {
    struct kv_pool *pool;
    struct kv_index *index; /* NULL = no prefix reuse */
    /* Where blocks come from and go to besides the pool, asked in this order; the first n_local of
     * them answer at once. Needs an index. */
    struct kv_source *const *sources; /* copied */
    uint32_t n_sources, n_local;
    bool always_bring;       /* what is found is brought, whatever it costs */
    uint64_t guess_token_ns; /* what a prompt's token costs, before any was measured; 0 = 50 us */
    /* Any thread: has msg->handle run on the scheduler's, soon. NULL without sources. */
    void (*post)(void *arg, struct bt_msg *msg);
    uint64_t (*clock)(void *arg); /* any thread */
    void (*progress)(void *arg);  /* any thread: loads of rows may have come further; or NULL */
    void *post_arg;
    int max_batch_tokens;
    int max_running;
    int n_vocab;
    uint64_t patience_ns;
    uint64_t withdraw_ns;
    const struct kn_xfer_ops *xfer; /* NULL = no handoffs */
    void *xfer_arg;
    /* Takes a copy of what it needs. */
    void (*output)(void *arg, const struct kn_output *out);
    void *output_arg;
};

int kn_sched_create(const struct kn_sched_cfg *cfg,
                    struct kn_sched **ret,
                    struct bt_err *err) BT_MUST_USE;
/* No request may be left. NULL is fine. */
void kn_sched_destroy(struct kn_sched *sched);

/* Takes the request; whatever goes wrong from here on is its last output. */
void kn_sched_add(struct kn_sched *sched, struct kn_seq *take_s);
struct kn_seq *kn_sched_find(const struct kn_sched *sched, uint64_t tag);
struct kn_seq *kn_sched_at(const struct kn_sched *sched, uint32_t slot);
/* Ends a request in whatever state it is: its last output (rc, msg) follows at once, or after proof
 * where a transfer is open. The first reason wins. */
void kn_sched_end(struct kn_sched *sched, struct kn_seq *s, int rc, const char *msg);
/* All of them, for good: nothing is offered to sources any more. */
void kn_sched_end_all(struct kn_sched *sched, int rc, const char *msg);
/* No request is left and no source holds a page. */
bool kn_sched_idle(const struct kn_sched *sched);
/* The transfer of s is over, with proof. `first` only for a recv that is BT_OK. s may be gone
 * afterwards. */
void kn_sched_xfer_done(struct kn_sched *sched,
                        struct kn_seq *s,
                        int rc,
                        const char *msg,
                        const struct kv_first *first);
/* Ends what is past its deadline. */
void kn_sched_tick(struct kn_sched *sched, uint64_t now_ns);
/* Next moment at which tick or plan may have something to do without an event. */
uint64_t kn_sched_next_wake_ns(const struct kn_sched *sched);

/* Never NULL; n_rows 0 = nothing can be computed now. */
const struct kn_step_plan *kn_sched_plan(struct kn_sched *sched, uint64_t now_ns);
/* The step after `running`, made while that one runs and before it is known what it draws; NULL: it
 * has to be known. If it is run, then step_done of `running` follows, and nothing else. */
const struct kn_step_plan *
kn_sched_plan_ahead(struct kn_sched *sched, const struct kn_step_plan *running, uint64_t now_ns);
/* Whether layer `layer` of what the plan's rows need is there, or will not be waited for. With the
 * number of layers: whether all loads are done. */
bool kn_sched_layer_ready(const struct kn_sched *sched, const struct kn_step_plan *plan, int layer);
/* Rows whose loads have not come that far are not waited for any more: they were for nothing. The
 * step waited for so long. */
void kn_sched_layer_waited(struct kn_sched *sched,
                           const struct kn_step_plan *plan,
                           int layer,
                           uint64_t ns);
/* The loads behind which s computes are done and brought everything. */
bool kn_sched_loads_whole(const struct kn_sched *sched, const struct kn_seq *s);
/* It took ns to run, besides waiting for loads. */
void kn_sched_measured(struct kn_sched *sched, const struct kn_step_plan *plan, uint64_t ns);
/* The plan was run; `drawn` holds n_draws tokens in the order of the rows. */
void kn_sched_step_done(struct kn_sched *sched,
                        const struct kn_step_plan *plan,
                        const struct kn_token *drawn);
/* It was not: every request in it ends with rc. */
void kn_sched_step_failed(struct kn_sched *sched,
                          const struct kn_step_plan *plan,
                          int rc,
                          const char *msg);

struct kn_sched_stats {
    uint32_t n_state[KN_SEQ_N_STATES];
    uint32_t n_live;
    uint64_t tokens_waiting; /* to be computed before their first token */
    uint64_t steps, tokens_computed, tokens_generated, preemptions, withdrawals;
    uint64_t tokens_cached; /* not computed by requests that began, because their KV was here */
    uint64_t tier_tokens[KV_N_TIERS];            /* of them, by where they were */
    uint64_t loads, loads_given_up, loads_short; /* short: did not bring all that was promised */
    uint64_t load_wait_ns; /* of requests: what loads took and was not hidden behind computing */
    uint64_t overtakes;    /* rows computed behind loads */
    uint64_t steps_ahead;  /* of steps: planned while the one before ran */
    uint64_t tokens_discarded; /* computed behind loads that did not come whole, or behind an end */
    uint64_t offers, offers_refused;
    uint64_t swapped, resumed; /* preemptions that kept their tail, and loads after preemptions */
};
struct kn_sched_stats kn_sched_stats(const struct kn_sched *sched);

#endif
