/* Private to the scheduler: scheduler.c (events, states), plan.c (steps, pages) and prefix.c
 * (blocks that requests share). */
#ifndef KN_ENGINE_SCHEDULER_INT_H
#define KN_ENGINE_SCHEDULER_INT_H

#include "kernels/engine/scheduler.h"

#include "common/ds/map.h"

struct kn_sched {
    struct kn_sched_cfg cfg;
    struct bt_list lists[KN_LIST_NONE]; /* struct kn_seq.link by (claim, order) */
    struct bt_map by_tag;
    struct kn_seq **slots; /* [max_running] */
    uint32_t *free_slots;  /* stack */
    uint32_t n_free_slots;
    uint64_t next_order;
    uint64_t next_deadline_ns; /* no request ends earlier; may be too early */
    uint64_t next_patience_ns; /* set by plan */
    struct kn_step_plan plan;
    uint32_t cap_plan_pages; /* of plan.pages: shared pages are in many rows */
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
/* Brings the sum of waiting tokens up to date after n_computed or state changed. */
void kn_sched_recount(struct kn_sched *sched, struct kn_seq *s);

/* prefix.c. All of it does nothing without an index. */
/* Length of the longest usable run for a queued request, in blocks; remembered in it. */
uint32_t kn_sched_match(struct kn_sched *sched, struct kn_seq *s);
/* Holds the matched run, and lets it go again. */
void kn_sched_hold(struct kn_sched *sched, struct kn_seq *s);
void kn_sched_unhold(struct kn_sched *sched, struct kn_seq *s);
/* Puts the pages of the held run into the page table: their tokens count as computed. */
void kn_sched_use_held(struct kn_sched *sched, struct kn_seq *s);
/* Offers blocks that have become full to the index. */
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
