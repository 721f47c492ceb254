/* Scheduler, sixth part: the step after the one that runs, made before it is known what that one
 * draws, so that a device need not wait for the host.
 *
 * Only what follows from the running plan by itself is planned: its requests' next tokens and the
 * next piece of a prompt. Everything else (somebody to be admitted, to give way, to be loaded, a
 * prompt that shares a step with others) needs a plan of the ordinary kind, for which the running
 * step has to be done. A drawn token's place holds -1 - i in the plan, i its number among the
 * tokens that the running step draws. Nothing but step_done may happen while two steps are under
 * way: no message, no deadline, no other plan. An answer that ends in the first of them keeps its
 * pages until the second is done; what that computed for it is thrown away.
 */
#include "kernels/engine/scheduler_int.h"

struct ahead {
    struct kn_sched *sched;
    const struct kn_step_plan *running;
    struct kn_step_plan *plan;
    uint32_t budget; /* tokens left */
};

/* Where the row's request is when it has run. */
static uint32_t end_of(const struct kn_plan_row *row)
{
    return row->pos + row->n_tokens;
}

/* Tokens it wants in the step after; 0 = none. */
static uint32_t wants(const struct kn_seq *s, const struct kn_plan_row *row)
{
    if (s->over) {
        return 0;
    }
    if (row->draw) {
        return s->leg == KN_LEG_PREFILL || s->n_answer + 1 >= s->max_answer ? 0 : 1;
    }
    return kn_seq_target(s) - end_of(row);
}

/* Whether the ordinary plan would do no more than go on with the running one. */
static bool goes_on(const struct ahead *a)
{
    const struct kn_sched_stats *stats = &a->sched->stats;
    uint32_t n_active = stats->n_state[KN_SEQ_RUNNING] + stats->n_state[KN_SEQ_PREFILLING];
    uint32_t n_rows = 0, n_drawn = 0, n_prompts = 0;

    if (a->running->n_loading > 0 || stats->n_state[KN_SEQ_LOADING] > 0 ||
        (!bt_list_empty(&a->sched->lists[KN_LIST_QUEUE]) && !a->sched->looked)) {
        return false;
    }
    for (uint32_t i = 0; i < a->running->n_rows; i++) {
        const struct kn_plan_row *row = &a->running->rows[i];
        const struct kn_seq *s = kn_sched_at(a->sched, row->slot);

        if (!s || s->tag != row->tag || s->again) {
            return false;
        }
        n_rows += !s->over;
        n_drawn += row->draw && wants(s, row) > 0;
        n_prompts += !row->draw && wants(s, row) > 0;
    }
    /* Prompts that share a step are the ordinary plan's to weigh. */
    return n_rows == n_active - a->sched->n_over && n_prompts <= 1 &&
           n_drawn + n_prompts <= a->budget && n_drawn + n_prompts > 0;
}

static bool get_pages(struct ahead *a, struct kn_seq *s, uint32_t n_tokens)
{
    uint32_t need = kv_layout_pages_for(kv_pool_layout(a->sched->cfg.pool), n_tokens);

    if (need <= s->n_pages) {
        return true;
    }
    if (kn_sched_room(a->sched) < need - s->n_pages) {
        return false;
    }
    kn_sched_take_pages(a->sched, s, need - s->n_pages, KV_OWNER_SEQ);
    return true;
}

/* The row after `row`, which draws token number `drawn` of its step if it draws. */
static bool
add_after(struct ahead *a, struct kn_seq *s, const struct kn_plan_row *row, uint32_t n, int drawn)
{
    struct kn_plan_row *next;
    int32_t *ids;

    if (!get_pages(a, s, end_of(row) + n)) {
        return false;
    }
    next = kn_sched_add_row(a->sched, s, end_of(row), n);
    if (!next) {
        return false;
    }
    ids = a->plan->ids + next->first_id;
    if (row->draw) {
        ids[0] = -1 - drawn;
        next->n_answer++;
        next->draw = true;
    } else {
        memcpy(ids, s->ids + next->pos, n * sizeof(*ids));
        next->draw = end_of(next) == kn_seq_target(s) && kn_seq_draws(s);
    }
    a->plan->n_draws += next->draw;
    return true;
}

/* Takes back what has been planned: its pages stay with the requests, which need them next. */
static const struct kn_step_plan *give_up(struct ahead *a)
{
    for (uint32_t i = 0; i < a->plan->n_rows; i++) {
        kn_sched_at(a->sched, a->plan->rows[i].slot)->last_step = a->running->step;
    }
    a->sched->cur_plan ^= 1;
    return NULL;
}

const struct kn_step_plan *
kn_sched_plan_ahead(struct kn_sched *sched, const struct kn_step_plan *running, uint64_t now_ns)
{
    struct ahead a = {sched, running, NULL, (uint32_t)sched->cfg.max_batch_tokens};
    uint32_t n_drawn = 0, left;
    int drawn = 0;

    if (now_ns >= kn_sched_next_wake_ns(sched) || !goes_on(&a)) {
        return NULL;
    }
    sched->now_ns = now_ns;
    a.plan = kn_sched_new_plan(sched);
    for (uint32_t i = 0; i < running->n_rows; i++) {
        const struct kn_plan_row *row = &running->rows[i];

        n_drawn += row->draw && wants(kn_sched_at(sched, row->slot), row) > 0;
    }
    left = a.budget - n_drawn; /* the prompt's */
    for (uint32_t i = 0; i < running->n_rows; i++) {
        const struct kn_plan_row *row = &running->rows[i];
        struct kn_seq *s = kn_sched_at(sched, row->slot);
        uint32_t n = wants(s, row);

        if (n > 0 && !add_after(&a, s, row, row->draw ? 1 : BT_MIN(n, left), drawn)) {
            return give_up(&a);
        }
        drawn += row->draw;
    }
    sched->stats.steps_ahead++;
    return a.plan;
}
