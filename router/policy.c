/* Choice of nodes. See policy.h. */
#include "router/policy.h"

#include <stdio.h>

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
    return v->ready && v->role != RT_ROLE_PREFILL;
}

/* Lower is better. Failed nodes are far behind all others. */
static double prefill_cost(const struct rt_node_view *v)
{
    return (double)v->tokens_outstanding + (v->excluded ? 1e18 : 0);
}

static double decode_cost(const struct rt_node_view *v)
{
    double full = v->pages_total ? 1.0 - (double)v->pages_free / v->pages_total : 0;

    return (double)v->requests_outstanding + full + (v->excluded ? 1e18 : 0);
}

static double local_cost(const struct rt_node_view *v)
{
    return decode_cost(v) + (double)v->tokens_outstanding / 256;
}

/* Keeps the best so far; of n equal ones each is kept with the same probability. */
struct best {
    int idx;
    double cost;
    unsigned n_equal;
    uint64_t ticket;
};

static void consider(struct best *b, int idx, double cost)
{
    if (b->idx < 0 || cost < b->cost) {
        b->idx = idx;
        b->cost = cost;
        b->n_equal = 1;
        return;
    }
    if (cost > b->cost) {
        return;
    }
    b->n_equal++;
    b->ticket = b->ticket * 6364136223846793005ull + 1442695040888963407ull;
    if ((b->ticket >> 33) % b->n_equal == 0) {
        b->idx = idx;
    }
}

static int best_decode_for(const struct rt_pick_args *a, int prefill)
{
    struct best b = {.idx = -1, .ticket = a->ticket ^ 0x9e3779b97f4a7c15ull};
    char why[160];

    for (size_t i = 0; i < a->n; i++) {
        if (can_receive(&a->nodes[i]) &&
            rt_compat_equal(a->nodes[prefill].compat, a->nodes[i].compat, why)) {
            consider(&b, (int)i, decode_cost(&a->nodes[i]));
        }
    }
    return b.idx;
}

static bool pick_pair(const struct rt_pick_args *a, struct rt_pick *ret)
{
    struct best b = {.idx = -1, .ticket = a->ticket};

    for (size_t i = 0; i < a->n; i++) {
        if (can_prefill(&a->nodes[i]) && best_decode_for(a, (int)i) >= 0) {
            consider(&b, (int)i, prefill_cost(&a->nodes[i]));
        }
    }
    if (b.idx < 0) {
        return false;
    }
    *ret = (struct rt_pick){RT_PATH_DIRECT, b.idx, best_decode_for(a, b.idx)};
    return true;
}

static bool pick_local(const struct rt_pick_args *a, struct rt_pick *ret)
{
    struct best b = {.idx = -1, .ticket = a->ticket};

    for (size_t i = 0; i < a->n; i++) {
        if (can_local(&a->nodes[i])) {
            consider(&b, (int)i, local_cost(&a->nodes[i]));
        }
    }
    if (b.idx < 0) {
        return false;
    }
    *ret = (struct rt_pick){RT_PATH_LOCAL, -1, b.idx};
    return true;
}

static int tell_missing(const struct rt_pick_args *a, struct bt_err *err)
{
    size_t n_prefill = 0, n_decode = 0;
    const struct rt_node_view *p = NULL, *d = NULL;
    char why[160] = "";

    for (size_t i = 0; i < a->n; i++) {
        if (can_prefill(&a->nodes[i])) {
            n_prefill++;
            p = &a->nodes[i];
        } else if (can_local(&a->nodes[i])) {
            n_decode++;
            d = can_receive(&a->nodes[i]) ? &a->nodes[i] : d;
        }
    }
    if (n_decode == 0) {
        return BT_FAIL(err, BT_E_UNAVAILABLE,
                       "no decode node is ready (%zu nodes known, %zu prefill "
                       "nodes ready)",
                       a->n, n_prefill);
    }
    if (n_prefill == 0) {
        return BT_FAIL(err, BT_E_UNAVAILABLE,
                       "no prefill node is ready (%zu nodes known, %zu decode nodes ready)", a->n,
                       n_decode);
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

/* A pair first; a node on its own rather than a pair of which the request has seen the failure. */
static bool pick_auto(const struct rt_pick_args *a, struct rt_pick *ret)
{
    struct rt_pick alone;

    if (!pick_pair(a, ret)) {
        return pick_local(a, ret);
    }
    if (has_failed(a, ret) && pick_local(a, &alone) && !has_failed(a, &alone)) {
        *ret = alone;
    }
    return true;
}

int rt_policy_pick(const struct rt_pick_args *a, struct rt_pick *ret_pick, struct bt_err *err)
{
    bool small = a->path == RT_PATH_AUTO && a->n_prompt < a->local_below_tokens;
    bool picked;

    if (a->path == RT_PATH_LOCAL || small) {
        picked = pick_local(a, ret_pick);
    } else if (a->path == RT_PATH_DIRECT) {
        picked = pick_pair(a, ret_pick);
    } else {
        picked = pick_auto(a, ret_pick);
    }
    return picked ? BT_OK : tell_missing(a, err);
}
