/* See cost.h. */
#include "router/cost.h"

#include <math.h>

#define STEP_TOKENS 512 /* where a node has not said */
#define WAIT_S      5.0 /* for as many pages as the pool has */
#define SHARE_MORE  2.0 /* bounds of the share term, in times of the time to compute */
#define SHARE_LESS  0.5
#define BUSY_LEAST  0.1 /* where nodes compute less than that shares say little */
#define STALL_SHARE                                                                                \
    0.125 /* of a step goes to prompts while rows run: they wait that much longer                  \
           */

static const struct rt_speed *speed_of(const struct rt_node_view *v)
{
    return v->speed ? v->speed : rt_speed_ordinary();
}

static double
compute_s(const struct rt_pick_args *a, const struct rt_node_view *v, double n, double before)
{
    double chunk = v->step_tokens ? v->step_tokens : STEP_TOKENS;

    return rt_speed_prefill(speed_of(v), n, before, chunk, a->now_ns);
}

/* The run's blocks by tier, if tiers 0..t are used. */
static void count_tiers(const struct rt_run *r, int t, uint32_t ret[RT_TIERS])
{
    bool disk = t >= RT_INDEX_TIERS - 1;

    ret[1] = disk ? r->host_in_disk : t == 1 ? r->slow[1] : 0;
    ret[2] = disk ? r->slow[2] : 0;
    ret[3] = t == RT_TIERS - 1 ? r->store : 0;
    ret[0] = r->upto[BT_MIN(t, RT_INDEX_TIERS - 1)] - ret[1] - ret[2];
}

/* The first `most` of them, slow ones last; false if the time to bring some is not known. */
static bool
take_tiers(const struct rt_node_view *v, int t, uint32_t most, struct rt_estimate *ret_e)
{
    uint32_t n[RT_TIERS], over;

    count_tiers(&v->run, t, n);
    ret_e->cached_blocks = n[0] + n[1] + n[2] + n[3];
    over = ret_e->cached_blocks - BT_MIN(ret_e->cached_blocks, most);
    ret_e->cached_blocks -= over;
    ret_e->bring_s = 0;
    for (int i = RT_TIERS - 1; i >= 0; i--) {
        uint32_t less = BT_MIN(over, n[i]);

        over -= less;
        ret_e->tier_blocks[i] = n[i] - less;
        if (i > 0 && n[i] > less) {
            if (v->block_s[i] <= 0) {
                return false;
            }
            ret_e->bring_s += v->block_s[i] * (n[i] - less);
        }
    }
    return true;
}

/* Seconds of computing that the new tokens push out, by the chance that they are asked for. */
static double evict_s(const struct rt_pick_args *a,
                      const struct rt_node_view *v,
                      double n_new,
                      double per_token_s)
{
    double pages, victims;

    if (a->reuse_s <= 0 || v->page_tokens == 0 || v->pages_total == 0) {
        return 0;
    }
    pages = ceil(n_new / v->page_tokens);
    victims = fmin(fmax(pages - v->pages_unused, 0), v->pages_total);
    return victims * v->page_tokens * per_token_s * exp(-v->oldest_s / a->reuse_s);
}

struct rt_estimate rt_cost_prompt(const struct rt_pick_args *a, const struct rt_node_view *v)
{
    struct rt_estimate best = {.compute_s = INFINITY};
    double share, n = (double)a->n_prompt, per_token_s = compute_s(a, v, 1000, 0) / 1000;
    /* One token at least is computed. */
    uint32_t most = v->block_tokens ? (uint32_t)((a->n_prompt - 1) / v->block_tokens) : 0;

    for (int t = 0; t < RT_TIERS; t++) {
        struct rt_estimate e = {0};
        double cached;

        if (!take_tiers(v, t, most, &e) || (t > 0 && e.cached_blocks == best.cached_blocks)) {
            continue;
        }
        cached = (double)e.cached_blocks * v->block_tokens;
        e.compute_s = compute_s(a, v, n - cached, cached);
        if (t == 0 || e.bring_s + e.compute_s < best.bring_s + best.compute_s) {
            best = e;
        }
    }
    best.queue_s = v->queue_s + (double)v->tokens_outstanding * per_token_s;
    share = (v->busy - a->busy_mean) / (a->busy_mean + BUSY_LEAST);
    best.share_s = (best.bring_s + best.compute_s) * fmin(fmax(share, -SHARE_LESS), SHARE_MORE);
    best.evict_s = evict_s(a, v, n - (double)best.tier_blocks[0] * v->block_tokens, per_token_s);
    return best;
}

double rt_estimate_first_s(const struct rt_estimate *e)
{
    return e->queue_s + e->bring_s + e->compute_s;
}

double rt_estimate_cost(const struct rt_estimate *e)
{
    return rt_estimate_first_s(e) + e->evict_s + e->share_s;
}

double rt_cost_answer(const struct rt_pick_args *a, const struct rt_node_view *v, bool has_prompt)
{
    double rows = v->requests_outstanding + 1.0, n = (double)a->n_prompt;
    double answer = fmax((double)a->n_answer, 1), lacks, cost, need, work;
    uint32_t used = v->pages_total - BT_MIN(v->pages_free, v->pages_total);

    work = (double)used * v->page_tokens + n + answer / 2;
    cost = answer * rt_speed_decode(speed_of(v), rows, work, a->now_ns);
    lacks = fmax(n - (double)v->run.upto[0] * v->block_tokens, 0);
    if (!has_prompt) {
        cost += a->handoff_token_s * lacks;
        cost += evict_s(a, v, lacks, compute_s(a, v, 1000, 0) / 1000);
    }
    if (v->page_tokens > 0 && v->pages_total > 0) {
        need = (lacks + answer) / v->page_tokens;
        cost += WAIT_S * fmax(need - v->pages_free, 0) / v->pages_total;
    }
    /* Of two that are equally fast the emptier one: answers grow. */
    return cost * (1 + (v->pages_total ? 0.05 * used / v->pages_total : 0));
}

double rt_cost_stall(const struct rt_pick_args *a,
                     const struct rt_node_view *v,
                     const struct rt_estimate *e)
{
    return (double)v->requests_outstanding * e->compute_s * STALL_SHARE;
}
