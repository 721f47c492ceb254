/* Choice of nodes. See policy.h. */
#include "router/policy.h"

#include "router/cost.h"

#include <stdio.h>

#define RT_LOCAL_SEEN 8 /* steps with prompt tokens */

const char *const rt_route_names[] = {"cost",         "random",         "round_robin",
                                      "least_loaded", "longest_prefix", NULL};

bool rt_compat_equal(const struct rt_compat *a, const struct rt_compat *b, char why[160])
{
    if (memcmp(a->kv_format, b->kv_format, sizeof(a->kv_format)) != 0) {
        snprintf(why, 160, "kv format %02x%02x%02x%02x and %02x%02x%02x%02x", a->kv_format[0],
                 a->kv_format[1], a->kv_format[2], a->kv_format[3], b->kv_format[0],
                 b->kv_format[1], b->kv_format[2], b->kv_format[3]);
        return false;
    }
    if (strcmp(a->numerics, b->numerics) != 0) {
        snprintf(why, 160, "numerics %s and %s", a->numerics, b->numerics);
        return false;
    }
    if (a->weight_epoch != b->weight_epoch) {
        snprintf(why, 160, "weight epoch %u and %u", a->weight_epoch, b->weight_epoch);
        return false;
    }
    return true;
}

static bool can_prefill(const struct rt_node_view *v)
{
    return v->ready && v->role == RT_ROLE_PREFILL;
}

static bool can_receive(const struct rt_node_view *v)
{
    return v->ready && v->role == RT_ROLE_DECODE;
}

static bool can_local(const struct rt_node_view *v)
{
    return v->ready && (v->role == RT_ROLE_DECODE || v->role == RT_ROLE_BOTH);
}

/* Costs that differ by less than this are ties: a share of the cost, and a time. */
#define TIE_SHARE 0.005
#define TIE_S     50e-6

/* Keeps the least cost; of n that tie with it each is kept with the same probability. Nodes that
 * the request has failed on count only while there are no others. */
struct best {
    int idx;
    double cost;
    bool excluded;
    unsigned n_equal;
    uint64_t ticket;
};

static void keep(struct best *b, int idx, double cost, bool excluded)
{
    b->idx = idx;
    b->cost = cost;
    b->excluded = excluded;
}

static void consider(struct best *b, int idx, double cost, bool excluded)
{
    double tie = b->cost * TIE_SHARE + TIE_S;

    if (b->idx < 0 || b->excluded != excluded) {
        if (b->idx < 0 || b->excluded) {
            keep(b, idx, cost, excluded);
            b->n_equal = 1;
        }
        return;
    }
    if (cost > b->cost + tie) {
        return;
    }
    if (cost < b->cost - tie) {
        keep(b, idx, cost, excluded);
        b->n_equal = 1;
        return;
    }
    b->n_equal++;
    b->ticket = b->ticket * 6364136223846793005ull + 1442695040888963407ull;
    if ((b->ticket >> 33) % b->n_equal == 0) {
        b->idx = idx;
    }
    b->cost = cost < b->cost ? cost : b->cost;
}

/* Keeps it if it is among the cheapest of its kind. */
static void see(const struct rt_pick_args *a,
                enum rt_seen_kind kind,
                int idx,
                double cost,
                const struct rt_estimate *est)
{
    struct rt_seen *s = a->seen;
    unsigned at;

    if (!s) {
        return;
    }
    s->n_all[kind]++;
    at = s->n[kind] < RT_SEEN_MAX ? s->n[kind]++ : RT_SEEN_MAX;
    if (at == RT_SEEN_MAX) {
        at = 0;
        for (unsigned i = 1; i < RT_SEEN_MAX; i++) {
            at = s->v[kind][i].cost > s->v[kind][at].cost ? i : at;
        }
        if (s->v[kind][at].cost <= cost) {
            return;
        }
    }
    s->v[kind][at] = (struct rt_seen_node){.idx = idx, .cost = cost};
    if (est) {
        s->v[kind][at].est = *est;
    }
}

static int best_decode_for(const struct rt_pick_args *a, int prefill)
{
    struct best b = {.idx = -1, .ticket = a->ticket ^ 0x9e3779b97f4a7c15ull};
    char why[160];

    for (size_t i = 0; i < a->n; i++) {
        const struct rt_node_view *v = &a->nodes[i];

        if (can_receive(v) && rt_compat_equal(a->nodes[prefill].compat, v->compat, why)) {
            double cost = rt_cost_answer(a, v, false);

            consider(&b, (int)i, cost, v->excluded);
            see(a, RT_SEEN_DECODE, (int)i, cost, NULL);
        }
    }
    return b.idx;
}

static bool has_decode_for(const struct rt_pick_args *a, int prefill)
{
    char why[160];

    for (size_t i = 0; i < a->n; i++) {
        if (can_receive(&a->nodes[i]) &&
            rt_compat_equal(a->nodes[prefill].compat, a->nodes[i].compat, why)) {
            return true;
        }
    }
    return false;
}

/* What the route makes of a candidate; the least is taken. `nth` of all candidates so far. */
static double
route_cost(const struct rt_pick_args *a, const struct rt_estimate *e, uint64_t nth, uint64_t n)
{
    switch (a->route) {
    case RT_ROUTE_RANDOM:
        return 0;
    case RT_ROUTE_ROUND_ROBIN:
        return (double)((nth + n - a->turn % n) % n);
    case RT_ROUTE_LEAST_LOADED:
        return e->queue_s;
    case RT_ROUTE_LONGEST_PREFIX:
        return -(double)e->cached_blocks;
    case RT_ROUTE_COST:
        break;
    }
    return rt_estimate_cost(e);
}

static bool pick_pair(const struct rt_pick_args *a, struct rt_pick *ret)
{
    struct best b = {.idx = -1, .ticket = a->ticket};
    uint64_t n = 0, nth = 0;
    unsigned n_targets = 0;
    double least = 0;

    for (size_t i = 0; i < a->n; i++) {
        n += can_prefill(&a->nodes[i]);
    }
    for (size_t i = 0; i < a->n; i++) {
        struct rt_estimate e;

        if (!can_prefill(&a->nodes[i])) {
            continue;
        }
        if (has_decode_for(a, (int)i)) {
            e = rt_cost_prompt(a, &a->nodes[i]);
            least = n_targets++ ? BT_MIN(least, e.queue_s) : e.queue_s;
            consider(&b, (int)i, route_cost(a, &e, nth, n), a->nodes[i].excluded);
            see(a, RT_SEEN_PREFILL, (int)i, rt_estimate_cost(&e), &e);
        }
        nth++;
    }
    if (b.idx < 0) {
        return false;
    }
    *ret = (struct rt_pick){.path = RT_PATH_DIRECT,
                            .prefill = b.idx,
                            .decode = best_decode_for(a, b.idx),
                            .est = rt_cost_prompt(a, &a->nodes[b.idx]),
                            .least_queue_s = least,
                            .n_targets = n_targets};
    return true;
}

/* All that the request costs on v alone; e is of its prompt there. */
static double
alone_cost(const struct rt_pick_args *a, const struct rt_node_view *v, const struct rt_estimate *e)
{
    return rt_estimate_cost(e) + rt_cost_stall(a, v, e) + rt_cost_answer(a, v, true);
}

static bool pick_local(const struct rt_pick_args *a, struct rt_pick *ret)
{
    struct best b = {.idx = -1, .ticket = a->ticket};
    unsigned n_targets = 0;
    double least = 0;

    for (size_t i = 0; i < a->n; i++) {
        if (can_local(&a->nodes[i])) {
            struct rt_estimate e = rt_cost_prompt(a, &a->nodes[i]);
            double cost = alone_cost(a, &a->nodes[i], &e);

            least = n_targets++ ? BT_MIN(least, e.queue_s) : e.queue_s;
            consider(&b, (int)i, cost, a->nodes[i].excluded);
            see(a, RT_SEEN_LOCAL, (int)i, cost, &e);
        }
    }
    if (b.idx < 0) {
        return false;
    }
    *ret = (struct rt_pick){.path = RT_PATH_LOCAL,
                            .prefill = -1,
                            .decode = b.idx,
                            .est = rt_cost_prompt(a, &a->nodes[b.idx]),
                            .least_queue_s = least,
                            .n_targets = n_targets};
    return true;
}

static int tell_missing(const struct rt_pick_args *a, struct bt_err *err)
{
    size_t n_prefill = 0, n_decode = 0, n_cordoned = 0;
    const struct rt_node_view *p = NULL, *d = NULL;
    char why[160] = "", cordoned[40] = "";

    for (size_t i = 0; i < a->n; i++) {
        n_cordoned += a->nodes[i].cordoned;
        if (can_prefill(&a->nodes[i])) {
            n_prefill++;
            p = &a->nodes[i];
        } else if (can_local(&a->nodes[i])) {
            n_decode++;
            d = can_receive(&a->nodes[i]) ? &a->nodes[i] : d;
        }
    }
    if (n_cordoned > 0) {
        snprintf(cordoned, sizeof(cordoned), ", %zu cordoned", n_cordoned);
    }
    if (n_decode == 0) {
        return BT_FAIL(err, BT_E_UNAVAILABLE,
                       "no decode node is ready (%zu nodes known, %zu prefill nodes ready%s)", a->n,
                       n_prefill, cordoned);
    }
    if (n_prefill == 0) {
        return BT_FAIL(err, BT_E_UNAVAILABLE,
                       "no prefill node is ready (%zu nodes known, %zu decode nodes ready%s)", a->n,
                       n_decode, cordoned);
    }
    if (!d) {
        return BT_FAIL(err, BT_E_UNAVAILABLE, "no decode node takes handoffs");
    }
    rt_compat_equal(p->compat, d->compat, why);
    return BT_FAIL(err, BT_E_UNAVAILABLE,
                   "no prefill node fits a decode node: %.63s and %.63s have %s", p->name, d->name,
                   why);
}

static bool has_failed(const struct rt_pick_args *a, const struct rt_pick *p)
{
    return a->nodes[p->decode].excluded || (p->prefill >= 0 && a->nodes[p->prefill].excluded);
}

/* Whether `alone` is cheaper than the pair. What a decode node takes to compute a prompt must have
 * been seen, not guessed. */
static bool
is_cheaper(const struct rt_pick_args *a, const struct rt_pick *alone, const struct rt_pick *pair)
{
    const struct rt_node_view *v = &a->nodes[alone->decode], *d = &a->nodes[pair->decode];

    return a->handoff_s > 0 && v->speed && v->speed->n_prompt >= RT_LOCAL_SEEN &&
           alone_cost(a, v, &alone->est) <
               rt_estimate_cost(&pair->est) + a->handoff_s + rt_cost_answer(a, d, false);
}

/* A pair, unless a node on its own is cheaper, or the request has seen the failure of the pair. */
static bool pick_auto(const struct rt_pick_args *a, struct rt_pick *ret)
{
    struct rt_pick alone;

    if (!pick_pair(a, ret)) {
        return pick_local(a, ret);
    }
    if (pick_local(a, &alone) && !has_failed(a, &alone) &&
        (has_failed(a, ret) || is_cheaper(a, &alone, ret))) {
        *ret = alone;
    }
    return true;
}

static double busy_mean(const struct rt_pick_args *a)
{
    double sum = 0;
    size_t n = 0;

    for (size_t i = 0; i < a->n; i++) {
        if (can_prefill(&a->nodes[i])) {
            sum += a->nodes[i].busy;
            n++;
        }
    }
    return n ? sum / (double)n : 0;
}

int rt_policy_pick(const struct rt_pick_args *args, struct rt_pick *ret_pick, struct bt_err *err)
{
    struct rt_pick_args own = *args, *a = &own;
    bool small = a->path == RT_PATH_AUTO && a->n_prompt < a->local_below_tokens;
    bool picked;

    own.busy_mean = busy_mean(args);
    if (own.seen) {
        *own.seen = (struct rt_seen){0};
    }
    if (a->path == RT_PATH_LOCAL || small) {
        picked = pick_local(a, ret_pick);
    } else if (a->path == RT_PATH_DIRECT) {
        picked = pick_pair(a, ret_pick);
    } else {
        picked = pick_auto(a, ret_pick);
    }
    return picked ? BT_OK : tell_missing(a, err);
}
