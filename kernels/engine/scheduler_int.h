/* Private to the scheduler: scheduler.c (events, states), plan.c (steps, pages), prefix.c (blocks
 * that requests share), fetch.c and offer.c (blocks from and to sources). */
#ifndef KN_ENGINE_SCHEDULER_INT_H
#define KN_ENGINE_SCHEDULER_INT_H

#include "kernels/engine/scheduler.h"

#include "common/ds/map.h"
#include "kernels/engine/rate.h"

/* How loads of a source keep their estimates, as moving averages: took = scale * estimate + fixed.
 */
struct kn_load_fit {
    double scale, fixed_ns;
};

struct kn_sched {
    struct kn_sched_cfg cfg;
    struct bt_list lists[KN_LIST_NONE]; /* struct kn_seq.link by (claim, order) */
    struct bt_map by_tag;
    struct kn_seq **slots; /* [max_running] */
    uint32_t *free_slots;  /* stack */
    uint32_t n_free_slots;
    uint64_t next_order;
    uint64_t next_deadline_ns;    /* no request ends earlier; may be too early */
    uint64_t next_patience_ns;    /* set by plan */
    struct kn_step_plan plans[2]; /* one may run while the other is made */
    uint32_t cap_plan_pages[2];   /* of their pages: shared pages are in many rows */
    uint32_t cur_plan;            /* made last */
    uint64_t step;                /* of the plan made last */
    bool looked;                  /* the last plan left nothing in the queue that it could admit,
                                     and nothing has changed since */
    uint64_t now_ns;              /* as last told by tick or plan */
    uint64_t next_load_ns;        /* when loads are to be looked at again */
    struct kv_source *sources[KN_MAX_SOURCES]; /* cfg.sources */
    struct kn_rate rate;                       /* of computing prompts */
    uint64_t look_ns[KN_MAX_SOURCES];          /* moving average: how long an answer takes */
    struct kn_load_fit load_fit[KN_MAX_SOURCES];
    struct kn_offers *offers; /* NULL = nothing to offer to */
    bool closing;             /* ends: nothing is offered any more */
    uint32_t n_over;          /* requests whose answer ended while a row of theirs was running */
    struct kn_sched_stats stats;
};

static inline struct kn_seq *kn_seq_of(struct bt_list *link)
{
    return BT_LIST_ENTRY(link, struct kn_seq, link);
}

static inline bool kn_seq_younger(const struct kn_seq *a, const struct kn_seq *b)
{
    return a->claim != b->claim ? a->claim > b->claim : a->order > b->order;
}

/* The one way to change a state: checks the edge, moves between lists, takes or returns the slot.
 */
void kn_sched_set_state(struct kn_sched *sched, struct kn_seq *s, enum kn_seq_state to);
/* The plan that is to be made next, empty. */
struct kn_step_plan *kn_sched_new_plan(struct kn_sched *sched);
/* A row of n tokens of s from `pos` on, with its pages; ids and what it draws are the caller's.
 * NULL: no memory. */
struct kn_plan_row *
kn_sched_add_row(struct kn_sched *sched, struct kn_seq *s, uint32_t pos, uint32_t n);

/* Brings the sum of waiting tokens up to date after n_computed or state changed. */
void kn_sched_recount(struct kn_sched *sched, struct kn_seq *s);

/* Asks for what s lacks of a prompt that is computed elsewhere; its pages belong to the transfer.
 * False: not now, it waits again; else s may be gone. */
bool kn_sched_begin_recv(struct kn_sched *sched, struct kn_seq *s);
/* Ends a request that is ABORTING, unless something is still under way. */
void kn_sched_settle(struct kn_sched *sched, struct kn_seq *s);

/* prefix.c. All of it does nothing without an index. */
/* The chain of the first n blocks; makes the keys that are missing. */
struct kv_chain kn_sched_chain(struct kn_sched *sched, struct kn_seq *s, uint32_t n);
/* The same, and behind it n_tail tokens of one more block. */
struct kv_chain
kn_sched_tail_chain(struct kn_sched *sched, struct kn_seq *s, uint32_t n, uint32_t n_tail);
/* Most full blocks that may be taken over: one token at least is computed, and a tail that a source
 * keeps stands behind them. */
uint32_t kn_sched_max_blocks(const struct kn_sched *sched, const struct kn_seq *s);
/* Length of the longest usable run for a queued request, in blocks; remembered in it. */
uint32_t kn_sched_match(struct kn_sched *sched, struct kn_seq *s);
/* Holds the matched run, and lets it go again. */
void kn_sched_hold(struct kn_sched *sched, struct kn_seq *s);
void kn_sched_unhold(struct kn_sched *sched, struct kn_seq *s);
/* Puts the pages of the held run into the page table: their tokens count as computed. */
void kn_sched_use_held(struct kn_sched *sched, struct kn_seq *s);
/* Everything that can be had without computing it is there: PREFILLING. */
void kn_sched_begin_computing(struct kn_sched *sched, struct kn_seq *s);
/* Puts blocks that have become full into the index, and offers them. */
void kn_sched_publish(struct kn_sched *sched, struct kn_seq *s);
/* Free pages and those that the index can give up. */
uint32_t kn_sched_room(const struct kn_sched *sched);
/* Pages that room grows by if s and those counted before let go; kn_sched_uncount ends it. */
uint32_t kn_sched_count_room(struct kn_sched *sched, struct kn_seq *s);
void kn_sched_uncount(struct kn_sched *sched, struct kn_seq *s);
/* Takes n pages behind those that s has; there must be room. */
void kn_sched_take_pages(struct kn_sched *sched, struct kn_seq *s, uint32_t n, enum kv_owner owner);
void kn_sched_free_pages(struct kn_sched *sched, struct kn_seq *s);
/* Changes the owner of all pages that are the request's own. */
void kn_sched_own_pages(struct kn_sched *sched, struct kn_seq *s, enum kv_owner owner);

/* fetch.c. All of it does nothing without sources. */
void kn_sched_fit_init(struct kn_sched *sched);
void kn_sched_fetch_init(struct kn_sched *sched, struct kn_seq *s);
/* Asks the sources what they have behind the n_pool blocks that the pool has; false: they have not
 * answered yet. */
bool kn_sched_look(struct kn_sched *sched, struct kn_seq *s, uint32_t n_pool);
/* How many of the blocks found shall be brought; remembered in s. */
uint32_t kn_sched_choose(struct kn_sched *sched, struct kn_seq *s);
/* None is, or nothing was found: lets go of them. */
void kn_sched_decline(struct kn_sched *sched, struct kn_seq *s);
/* Brings those that were chosen; s is LOADING and has all its pages, as TRANSFER. */
void kn_sched_start_loads(struct kn_sched *sched, struct kn_seq *s);
/* Whether rows of s, which is LOADING, may be in a step that takes step_ns, alone or with others:
 * it would not wait for the loads. */
bool kn_sched_may_overtake(struct kn_sched *sched, struct kn_seq *s, uint64_t step_ns, bool alone);
/* Takes over what was computed behind loads that have come whole; s may be gone afterwards. */
void kn_sched_take_ahead(struct kn_sched *sched, struct kn_seq *s);
/* Gives up loads that are too late. */
void kn_sched_check_loads(struct kn_sched *sched);
/* A look-up or a load is not done. */
bool kn_sched_fetch_busy(const struct kn_seq *s);
/* Stops both; true if nothing is under way any more, else kn_sched_settle follows. */
bool kn_sched_fetch_cancel(struct kn_sched *sched, struct kn_seq *s);
/* Lets go of what was found. */
void kn_sched_fetch_end(struct kn_sched *sched, struct kn_seq *s);

/* offer.c. Likewise. */
int kn_offers_create(struct kn_sched *sched, struct bt_err *err) BT_MUST_USE;
void kn_offers_destroy(struct kn_sched *sched);
bool kn_offers_idle(const struct kn_sched *sched);
void kn_sched_queue_offer(struct kn_sched *sched, struct kv_block *b);
void kn_sched_pump_offers(struct kn_sched *sched);
/* The tokens of s behind its full blocks, whose pages leave it; it gives way. */
void kn_sched_offer_tail(struct kn_sched *sched, struct kn_seq *s);
/* s goes while its tail may still be copied. */
void kn_sched_leave_tail(struct kn_seq *s);
/* As kn_sched_count_room, of what only open offers keep. */
uint32_t kn_sched_count_offers(struct kn_sched *sched);
void kn_sched_uncount_offers(struct kn_sched *sched);
/* Somebody waits for pages that open offers hold. */
void kn_sched_hurry_offers(struct kn_sched *sched);

/* The moment, more exactly than the step's begin where there is a clock. */
static inline uint64_t kn_sched_clock(const struct kn_sched *sched)
{
    return sched->cfg.clock ? sched->cfg.clock(sched->cfg.post_arg) : sched->now_ns;
}

static inline uint32_t kn_sched_block_tokens(const struct kn_sched *sched)
{
    return sched->cfg.index ? kv_index_block_tokens(sched->cfg.index) : 0;
}

static inline uint32_t kn_sched_block_pages(const struct kn_sched *sched)
{
    return sched->cfg.index ? kv_index_block_pages(sched->cfg.index) : 0;
}

/* Whether s is computed here, rather than received. */
static inline bool kn_seq_computes(const struct kn_seq *s)
{
    return s->leg != KN_LEG_DECODE || s->received;
}

#endif
