/* Scheduler, second part: what runs in the next step, and who gives way when pages are short. The
 * policy is described in scheduler.h.
 *
 * Why nothing stands still: a queued request takes all its pages at once or none, so only RUNNING
 * ones hold pages while they wait for more, and the oldest of those may preempt all others. Pages
 * of transfers come back by themselves: on a prefill node a prompt whose ticket is in holds all it
 * needs and moves on; one without a ticket gives way. On a decode node a reservation is filled or
 * fails; one that nothing fills is withdrawn for an older request.
 */
#include "kernels/engine/scheduler_int.h"

#include "common/thr/time.h"

#include <stdlib.h>

/* What may be done to make room. */
enum { ROOM_DROP = 1, ROOM_PREEMPT = 2, ROOM_WITHDRAW = 4 };

/* A prompt that takes more than a step leaves half of the step to prompts this much smaller. */
#define SMALL_FACTOR 4
/* Share of a step that running requests leave to prompts: 1 / PROMPT_SHARE. */
#define PROMPT_SHARE 8
/* How long a step may stand still for loads in all: alone as long again as it takes and this, else
 * this part of it. */
#define STALL_ALONE_NS (20 * BT_NS_PER_MS)
#define STALL_SHARE    4

struct planner {
    struct kn_sched *sched;
    uint64_t now_ns;
    uint32_t budget;     /* tokens left for prompts */
    uint32_t fail_pages; /* a forced attempt to get that many failed: younger ones need not try */
    bool fail_slot;      /* likewise for a slot */
    bool withdrawing;    /* free pages are kept for an older request until proofs are in */
};

/* Where its next row begins. */
static uint32_t position(const struct kn_seq *s)
{
    return s->state == KN_SEQ_LOADING ? s->load_tokens : s->n_computed;
}

static uint32_t remaining(const struct kn_seq *s)
{
    return kn_seq_target(s) - position(s);
}

static bool has_ticket(const struct kn_seq *s)
{
    return atomic_load_explicit(&s->ticketed, memory_order_relaxed);
}

/* Takes s off its pages: true if no transfer needs them. */
static bool drop(struct kn_sched *sched, struct kn_seq *s)
{
    if (s->xfer_open) {
        if (!sched->cfg.xfer->send_rewind(sched->cfg.xfer_arg, s)) {
            atomic_store_explicit(&s->ticketed, true, memory_order_relaxed);
            return false;
        }
        s->dropped |= s->state == KN_SEQ_HOLDING;
    }
    kn_sched_offer_tail(sched, s);
    sched->stats.swapped += s->tail_tokens > 0;
    kn_sched_free_pages(sched, s);
    kn_sched_set_state(sched, s, KN_SEQ_PREEMPTED);
    sched->stats.preemptions++;
    return true;
}

static bool droppable(const struct kn_seq *s)
{
    return s->state == KN_SEQ_HOLDING && !has_ticket(s);
}

/* Whether `s`, an active request, may be preempted for `needy`. A request that is only queued does
 * not take pages from one that has hardly begun. */
static bool preemptable(const struct planner *p, const struct kn_seq *s, const struct kn_seq *needy)
{
    bool queued = kn_seq_state_list(needy->state) == KN_LIST_QUEUE;

    return kn_seq_younger(s, needy) && s->n_pages > 0 && !(s->xfer_open && has_ticket(s)) &&
           !(queued && p->now_ns - s->held_ns < p->sched->cfg.patience_ns);
}

/* Youngest first; true if one gave way. */
static bool drop_one(struct planner *p)
{
    struct bt_list *head = &p->sched->lists[KN_LIST_AWAY], *l, *prev;

    for (l = head->prev; l != head; l = prev) {
        prev = l->prev;
        if (droppable(kn_seq_of(l)) && drop(p->sched, kn_seq_of(l))) {
            return true;
        }
    }
    return false;
}

static bool preempt_one(struct planner *p, const struct kn_seq *needy)
{
    struct bt_list *head = &p->sched->lists[KN_LIST_ACTIVE], *l, *prev;

    for (l = head->prev; l != head; l = prev) {
        prev = l->prev;
        if (preemptable(p, kn_seq_of(l), needy) && drop(p->sched, kn_seq_of(l))) {
            return true;
        }
    }
    return false;
}

static uint32_t own_pages(const struct kn_sched *sched, const struct kn_seq *s)
{
    return s->n_pages - s->n_blocks * kn_sched_block_pages(sched);
}

/* Withdraws younger reservations until `n` pages will be free once all proofs are in. */
static void withdraw(struct planner *p, const struct kn_seq *needy, uint32_t n)
{
    struct kn_sched *sched = p->sched;
    struct bt_list *head = &sched->lists[KN_LIST_AWAY];
    uint32_t pending = 0, filling = 0;

    bt_list_for_each (l, head) {
        const struct kn_seq *s = kn_seq_of(l);

        if (s->state == KN_SEQ_WITHDRAWN || s->state == KN_SEQ_ABORTING) {
            pending += own_pages(sched, s);
        } else if (s->state == KN_SEQ_FILLING && kn_seq_younger(s, needy)) {
            filling += own_pages(sched, s);
        }
    }
    if (pending + filling < n) {
        return;
    }
    for (struct bt_list *l = head->prev, *prev = l->prev; l != head && pending < n;
         l = prev, prev = l->prev) {
        struct kn_seq *s = kn_seq_of(l);

        if (s->state == KN_SEQ_FILLING && kn_seq_younger(s, needy)) {
            pending += own_pages(sched, s);
            sched->stats.withdrawals++;
            kn_sched_set_state(sched, s, KN_SEQ_WITHDRAWN);
            sched->cfg.xfer->recv_abort(sched->cfg.xfer_arg, s, BT_E_EXHAUSTED);
        }
    }
    p->withdrawing = true;
}

/* True if n pages are free now, or will be when offers that are under way are done. */
static bool room_soon(struct kn_sched *sched, uint32_t n)
{
    uint32_t room = kn_sched_room(sched);

    if (room < n) {
        room += kn_sched_count_offers(sched);
        kn_sched_uncount_offers(sched);
        if (room >= n) {
            kn_sched_hurry_offers(sched);
        }
    }
    return room >= n;
}

/* True if at least n pages are free now. Nobody gives way unless that is enough. */
static bool make_room(struct planner *p, const struct kn_seq *needy, uint32_t n, unsigned how)
{
    struct kn_sched *sched = p->sched;
    uint32_t room = kn_sched_room(sched);

    if (room >= n || room_soon(sched, n)) {
        return room >= n;
    }
    room += kn_sched_count_offers(sched);
    if (how & ROOM_DROP) {
        bt_list_for_each (l, &sched->lists[KN_LIST_AWAY]) {
            room += droppable(kn_seq_of(l)) ? kn_sched_count_room(sched, kn_seq_of(l)) : 0;
        }
    }
    if (how & ROOM_PREEMPT) {
        bt_list_for_each (l, &sched->lists[KN_LIST_ACTIVE]) {
            room +=
                preemptable(p, kn_seq_of(l), needy) ? kn_sched_count_room(sched, kn_seq_of(l)) : 0;
        }
    }
    for (int i = 0; i < KN_LIST_NONE; i++) {
        bt_list_for_each (l, &sched->lists[i]) {
            kn_sched_uncount(sched, kn_seq_of(l));
        }
    }
    kn_sched_uncount_offers(sched);
    if (room < n) {
        if (how & ROOM_WITHDRAW) {
            withdraw(p, needy, n - room);
        }
        return false;
    }
    while (!room_soon(sched, n)) {
        if (!((how & ROOM_DROP) && drop_one(p)) &&
            !((how & ROOM_PREEMPT) && preempt_one(p, needy))) {
            return false;
        }
    }
    return kn_sched_room(sched) >= n;
}

static uint64_t waited_ns(const struct planner *p, const struct kn_seq *s)
{
    return s->needy_ns ? p->now_ns - s->needy_ns : 0;
}

/* s did not get what it needs: remember since when, and when to look again. */
static void note_needy(struct planner *p, struct kn_seq *s)
{
    const struct kn_sched_cfg *cfg = &p->sched->cfg;
    uint64_t limits[] = {cfg->patience_ns, cfg->withdraw_ns};

    if (!s->needy_ns) {
        s->needy_ns = BT_MAX(p->now_ns, (uint64_t)1);
    }
    for (size_t i = 0; i < BT_ARRAY_LEN(limits); i++) {
        if (waited_ns(p, s) < limits[i]) {
            p->sched->next_patience_ns =
                BT_MIN(p->sched->next_patience_ns, s->needy_ns + limits[i]);
        }
    }
}

/* ---- 1: running requests ---- */

/* Requests that have no tokens yet take theirs, as long as more than `share` tokens are left. */
static void plan_running(struct planner *p, uint32_t share)
{
    struct kn_sched *sched = p->sched;
    const struct kv_layout *layout = kv_pool_layout(sched->cfg.pool);
    struct bt_list *head = &sched->lists[KN_LIST_ACTIVE];

    bt_list_for_each (l, head) {
        struct kn_seq *s = kn_seq_of(l);
        uint32_t n, need;
        unsigned how = ROOM_DROP | ROOM_PREEMPT;

        if (s->state != KN_SEQ_RUNNING || s->step_tokens > 0 || p->budget <= share) {
            continue;
        }
        n = BT_MIN(remaining(s), p->budget - share);
        need = kv_layout_pages_for(layout, s->n_computed + n);
        how |= waited_ns(p, s) >= sched->cfg.withdraw_ns ? ROOM_WITHDRAW : 0;
        if (need > s->n_pages) {
            if (!make_room(p, s, need - s->n_pages, how)) {
                note_needy(p, s);
                continue;
            }
            kn_sched_take_pages(sched, s, need - s->n_pages, KV_OWNER_SEQ);
            s->needy_ns = 0;
        }
        s->step_tokens = n;
        p->budget -= n;
    }
}

/* ---- 2: admission ---- */

static bool get_slot(struct planner *p, struct kn_seq *s, bool forced)
{
    struct kn_sched *sched = p->sched;

    if (sched->n_free_slots > 0) {
        return true;
    }
    if (forced && !p->fail_slot && preempt_one(p, s)) {
        return true;
    }
    p->fail_slot |= forced;
    return false;
}

/* Pages and a slot for a queued request, all or none. */
static bool get_place(struct planner *p, struct kn_seq *s, uint32_t n_pages)
{
    struct kn_sched *sched = p->sched;
    uint64_t waited = waited_ns(p, s);
    /* A prompt that already gave way waits until its decode node asks for it: else it and another
     * could drop each other for ever. */
    bool gave_way = s->dropped && !has_ticket(s);
    bool forced = s->needy_ns && waited >= sched->cfg.patience_ns && !gave_way;
    uint32_t headroom = sched->stats.n_state[KN_SEQ_RUNNING];
    unsigned how = 0;

    how |= forced || (s->xfer_open && has_ticket(s)) ? ROOM_DROP : 0;
    how |= forced ? ROOM_PREEMPT : 0;
    how |= forced && waited >= sched->cfg.withdraw_ns ? ROOM_WITHDRAW : 0;
    if (kn_sched_room(sched) < n_pages + headroom &&
        !(how && n_pages < p->fail_pages && make_room(p, s, n_pages, how))) {
        if (how) {
            p->fail_pages = BT_MIN(p->fail_pages, n_pages);
        }
        return false;
    }
    return get_slot(p, s, forced);
}

/* The held run is part of the n_pages; n_load more blocks come from sources. */
static void admit(struct planner *p, struct kn_seq *s, uint32_t n_pages, uint32_t n_load)
{
    struct kn_sched *sched = p->sched;
    bool computes = kn_seq_computes(s);

    if (!s->placed_ns) {
        s->placed_ns = kn_sched_clock(sched);
    }
    kn_sched_use_held(sched, s);
    kn_sched_take_pages(sched, s, n_pages - s->n_pages,
                        n_load || !computes ? KV_OWNER_TRANSFER : KV_OWNER_SEQ);
    if (n_load) {
        kn_sched_set_state(sched, s, KN_SEQ_LOADING);
    } else {
        kn_sched_decline(sched, s);
        if (!computes) {
            if (!kn_sched_begin_recv(sched, s)) {
                note_needy(p, s);
            }
            return;
        }
        kn_sched_begin_computing(sched, s);
    }
    s->held_ns = p->now_ns;
    if (s->leg == KN_LEG_PREFILL) {
        sched->cfg.xfer->send_pages(sched->cfg.xfer_arg, s);
        if (s->n_computed > 0) {
            sched->cfg.xfer->send_cached(sched->cfg.xfer_arg, s, s->n_computed);
        }
    }
    if (n_load) {
        kn_sched_start_loads(sched, s);
    }
}

/* Whether s would bring or compute a block that an older request is about to publish: it waits for
 * that instead, and takes it over. */
static bool twin_at_work(const struct planner *p, struct kn_seq *s, uint32_t hit)
{
    static const enum kn_seq_list lists[] = {KN_LIST_ACTIVE, KN_LIST_AWAY};
    struct kn_sched *sched = p->sched;

    if (!kn_seq_computes(s) || hit >= kn_sched_max_blocks(sched, s)) {
        return false;
    }
    for (size_t i = 0; i < BT_ARRAY_LEN(lists); i++) {
        bt_list_for_each (l, &sched->lists[lists[i]]) {
            struct kn_seq *o = kn_seq_of(l);
            uint32_t fills =
                o->tail_tokens ? o->tail_block : kn_seq_target(o) / kn_sched_block_tokens(sched);

            if ((o->state == KN_SEQ_PREFILLING || o->state == KN_SEQ_LOADING) &&
                kn_seq_younger(s, o) && !o->unlisted && o->n_blocks <= hit && hit < fills &&
                kv_key_eq(&kn_sched_chain(sched, s, hit + 1).keys[hit],
                          &kn_sched_chain(sched, o, hit + 1).keys[hit])) {
                return true;
            }
        }
    }
    return false;
}

static void plan_admission(struct planner *p)
{
    struct kn_sched *sched = p->sched;
    const struct kv_layout *layout = kv_pool_layout(sched->cfg.pool);
    struct bt_list *head = &sched->lists[KN_LIST_QUEUE], *l, *next;
    uint64_t planned = 0; /* tokens that admitted prompts want */
    uint32_t largest = 0;

    bt_list_for_each (a, &sched->lists[KN_LIST_ACTIVE]) {
        const struct kn_seq *s = kn_seq_of(a);

        if (s->state == KN_SEQ_PREFILLING) {
            planned += remaining(s);
            largest = BT_MAX(largest, remaining(s));
        }
    }
    for (l = head->next; l != head && !p->withdrawing; l = next) {
        struct kn_seq *s = kn_seq_of(l);
        uint32_t n_pages = kv_layout_pages_for(layout, kn_seq_target(s)), todo = remaining(s);
        bool full = kn_seq_computes(s) && planned >= p->budget;
        uint32_t hit, load;

        next = l->next;
        if (full && planned - largest >= p->budget / 2) {
            continue; /* there is nothing to compute it with in this step */
        }
        hit = kn_sched_match(sched, s);
        if (twin_at_work(p, s, hit) || !kn_sched_look(sched, s, hit)) {
            continue;
        }
        load = kn_sched_choose(sched, s);
        todo -= BT_MIN((hit + load) * kn_sched_block_tokens(sched), todo - 1);
        if (full && (uint64_t)todo * SMALL_FACTOR > largest) {
            continue; /* likewise, unless it is small */
        }
        kn_sched_hold(sched, s);
        if (!get_place(p, s, n_pages - hit * kn_sched_block_pages(sched))) {
            kn_sched_unhold(sched, s);
            note_needy(p, s);
            continue;
        }
        if (kn_seq_computes(s) && !load) {
            planned += todo;
            largest = BT_MAX(largest, todo);
        }
        admit(p, s, n_pages, load);
    }
}

/* ---- 3: prompts share what is left ---- */

static void give_tokens(struct planner *p, struct kn_seq *s, uint32_t n)
{
    s->step_tokens += n;
    p->budget -= n;
}

/* Lets prompts that are much smaller than `big` have up to half of the budget. */
static void plan_small(struct planner *p, const struct kn_seq *big)
{
    struct bt_list *head = &p->sched->lists[KN_LIST_ACTIVE];
    uint32_t half = p->budget / 2;

    for (struct bt_list *l = big->link.next; l != head && half > 0; l = l->next) {
        struct kn_seq *s = kn_seq_of(l);
        uint32_t n = BT_MIN(remaining(s), half);

        if (s->state == KN_SEQ_PREFILLING && s->step_tokens == 0 &&
            (uint64_t)remaining(s) * SMALL_FACTOR <= remaining(big)) {
            give_tokens(p, s, n);
            half -= n;
        }
    }
}

static void plan_prompts(struct planner *p)
{
    bt_list_for_each (l, &p->sched->lists[KN_LIST_ACTIVE]) {
        struct kn_seq *s = kn_seq_of(l);

        if (p->budget == 0) {
            return;
        }
        if (s->state != KN_SEQ_PREFILLING || s->step_tokens > 0) {
            continue;
        }
        if (remaining(s) > p->budget) {
            plan_small(p, s);
        }
        give_tokens(p, s, BT_MIN(remaining(s), p->budget));
    }
}

/* ---- 4: who can compute behind loads that are under way ---- */

/* What the step takes as it is planned now. */
static uint64_t estimate_ns(const struct kn_sched *sched, uint32_t *ret_rows)
{
    uint64_t ns = 0;

    *ret_rows = 0;
    for (int i = 0; i < sched->cfg.max_running; i++) {
        const struct kn_seq *s = sched->slots[i];

        if (s && s->step_tokens > 0) {
            ns += kn_rate_ns(&sched->rate, position(s), position(s) + s->step_tokens);
            ++*ret_rows;
        }
    }
    return ns;
}

/* On a guess only who is alone: nobody else waits if it was wrong. */
static void plan_loading(struct planner *p)
{
    struct kn_sched *sched = p->sched;
    bool known = kn_rate_known(&sched->rate);
    uint64_t step_ns;
    uint32_t n_rows;

    if (sched->stats.n_state[KN_SEQ_LOADING] == 0) {
        return;
    }
    step_ns = estimate_ns(sched, &n_rows);
    bt_list_for_each (l, &sched->lists[KN_LIST_AWAY]) {
        struct kn_seq *s = kn_seq_of(l);
        uint32_t n = s->state == KN_SEQ_LOADING ? BT_MIN(remaining(s), p->budget) : 0;
        uint64_t own = n ? kn_rate_ns(&sched->rate, position(s), position(s) + n) : 0;

        if (n > 0 && (known || n_rows == 0) &&
            kn_sched_may_overtake(sched, s, step_ns + own, n_rows == 0)) {
            give_tokens(p, s, n);
            step_ns += own;
            n_rows++;
        }
    }
    sched->plans[sched->cur_plan].stall_ns =
        n_rows == 1 ? step_ns + STALL_ALONE_NS : step_ns / STALL_SHARE;
}

/* ---- the plan ---- */

/* Shared pages are in the tables of many rows: their sum has no bound that is worth reserving. */
static bool grow_pages(struct kn_sched *sched, struct kn_step_plan *plan, uint32_t n)
{
    uint32_t *own = &sched->cap_plan_pages[sched->cur_plan];
    uint64_t cap = *own;
    uint32_t *p;

    if (n <= cap) {
        return true;
    }
    cap = BT_MAX(2 * cap, (uint64_t)n);
    p = cap <= UINT32_MAX ? realloc(plan->pages, cap * sizeof(*p)) : NULL;
    if (!p) {
        return false;
    }
    plan->pages = p;
    *own = (uint32_t)cap;
    return true;
}

struct kn_plan_row *
kn_sched_add_row(struct kn_sched *sched, struct kn_seq *s, uint32_t pos, uint32_t n)
{
    struct kn_step_plan *plan = &sched->plans[sched->cur_plan];
    uint32_t n_pages = kv_layout_pages_for(kv_pool_layout(sched->cfg.pool), pos + n);
    struct kn_plan_row *row = &plan->rows[plan->n_rows];

    BT_BUG_ON(n_pages > s->n_pages);
    if (!grow_pages(sched, plan, plan->n_pages + n_pages)) {
        return NULL;
    }
    *row = (struct kn_plan_row){
        .tag = s->tag,
        .slot = s->slot,
        .pos = pos,
        .n_tokens = n,
        .first_id = plan->n_tokens,
        .first_page = plan->n_pages,
        .n_pages = n_pages,
        .n_answer = s->n_answer,
    };
    if (!s->begun_ns) {
        s->begun_ns = sched->now_ns;
    }
    s->last_step = plan->step;
    memcpy(plan->pages + plan->n_pages, s->pages, n_pages * sizeof(*plan->pages));
    plan->n_rows++;
    plan->n_tokens += n;
    plan->n_pages += n_pages;
    return row;
}

static void add_row(struct kn_sched *sched, struct kn_seq *s)
{
    struct kn_step_plan *plan = &sched->plans[sched->cur_plan];
    uint32_t pos = position(s);
    struct kn_plan_row *row = kn_sched_add_row(sched, s, pos, s->step_tokens);

    if (!row) {
        s->step_tokens = 0; /* it runs in a later step */
        return;
    }
    row->draw = s->step_tokens == remaining(s) && kn_seq_draws(s);
    row->loading = s->state == KN_SEQ_LOADING;
    memcpy(plan->ids + row->first_id, s->ids + pos, row->n_tokens * sizeof(*plan->ids));
    plan->n_draws += row->draw;
    if (row->loading) {
        plan->n_loading++;
        sched->stats.overtakes++;
        s->exposed_ns = BT_MIN(s->exposed_ns, sched->now_ns - s->load_ns);
    }
}

struct kn_step_plan *kn_sched_new_plan(struct kn_sched *sched)
{
    struct kn_step_plan *plan;

    sched->cur_plan ^= 1;
    plan = &sched->plans[sched->cur_plan];
    plan->step = ++sched->step;
    plan->n_rows = plan->n_tokens = plan->n_pages = plan->n_draws = plan->n_loading = 0;
    plan->stall_ns = 0;
    return plan;
}

const struct kn_step_plan *kn_sched_plan(struct kn_sched *sched, uint64_t now_ns)
{
    struct planner p = {.sched = sched,
                        .now_ns = now_ns,
                        .budget = (uint32_t)sched->cfg.max_batch_tokens,
                        .fail_pages = UINT32_MAX};
    struct kn_step_plan *plan = kn_sched_new_plan(sched);
    bool prompts =
        !bt_list_empty(&sched->lists[KN_LIST_QUEUE]) || sched->stats.n_state[KN_SEQ_PREFILLING] > 0;

    BT_BUG_ON(sched->n_over > 0);
    sched->now_ns = now_ns;
    sched->next_patience_ns = BT_NEVER_NS;
    kn_sched_check_loads(sched);
    bt_list_for_each (l, &sched->lists[KN_LIST_ACTIVE]) {
        struct kn_seq *s = kn_seq_of(l);

        s->step_tokens = 0;
        s->held_ns = s->held_ns ? s->held_ns : now_ns;
    }
    bt_list_for_each (l, &sched->lists[KN_LIST_AWAY]) {
        kn_seq_of(l)->step_tokens = 0;
    }
    plan_running(&p, prompts ? BT_MAX(p.budget / PROMPT_SHARE, 1u) : 0);
    plan_admission(&p);
    /* Running requests that gave way during admission left their tokens. */
    p.budget = (uint32_t)sched->cfg.max_batch_tokens;
    bt_list_for_each (l, &sched->lists[KN_LIST_ACTIVE]) {
        p.budget -= kn_seq_of(l)->step_tokens;
    }
    plan_prompts(&p);
    plan_running(&p, 0); /* what prompts left over */
    plan_loading(&p);
    for (int i = KN_LIST_ACTIVE; i <= KN_LIST_AWAY; i++) {
        bt_list_for_each (l, &sched->lists[i]) {
            if (kn_seq_of(l)->step_tokens > 0) {
                add_row(sched, kn_seq_of(l));
            }
        }
    }
    sched->looked = p.budget > 0;
    return plan;
}
