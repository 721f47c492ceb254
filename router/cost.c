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

/* Blocks of the run in tiers 0..t, the time to bring them; false if a tier's time is not known. */
static bool bring(const struct rt_node_view *v, int t, double *ret_s)
{
    const struct rt_run *r = &v->run;

    *ret_s = 0;
    if (t >= 1 && (t == 1 ? r->slow[1] : r->host_in_disk) > 0) {
        *ret_s += v->block_s[1] * (t == 1 ? r->slow[1] : r->host_in_disk);
        if (v->block_s[1] <= 0) {
            return false;
        }
    }
    if (t == 2 && r->slow[2] > 0) {
        *ret_s += v->block_s[2] * r->slow[2];
        return v->block_s[2] > 0;
    }
    return true;
}

static void count_tiers(const struct rt_node_view *v, int t, struct rt_estimate *e)
{
    e->tier_blocks[2] = t == 2 ? BT_MIN(v->run.slow[2], e->cached_blocks) : 0;
    e->tier_blocks[1] = t == 2 ? v->run.host_in_disk : t == 1 ? v->run.slow[1] : 0;
    e->tier_blocks[1] = BT_MIN(e->tier_blocks[1], e->cached_blocks - e->tier_blocks[2]);
    e->tier_blocks[0] = e->cached_blocks - e->tier_blocks[1] - e->tier_blocks[2];
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

    for (int t = 0; t < RT_INDEX_TIERS; t++) {
        struct rt_estimate e = {.cached_blocks = BT_MIN(v->run.upto[t], most)};
        double cached = (double)e.cached_blocks * v->block_tokens;

        if (t > 0 && (v->run.upto[t] == v->run.upto[t - 1] || !bring(v, t, &e.bring_s))) {
            continue;
        }
        e.compute_s = compute_s(a, v, n - cached, cached);
        if (t == 0 || e.bring_s + e.compute_s < best.bring_s + best.compute_s) {
            count_tiers(v, t, &e);
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
