/* Private to the scheduler: scheduler.c (events, states) and plan.c (steps, pages). */
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
void kn_sched_free_pages(struct kn_sched *sched, struct kn_seq *s);
void kn_sched_own_pages(struct kn_sched *sched, struct kn_seq *s, enum kv_owner owner);
/* Whether s is computed here, rather than received. */
static inline bool kn_seq_computes(const struct kn_seq *s)
{
    return s->leg != KN_LEG_DECODE || s->received;
}

#endif
