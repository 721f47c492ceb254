/* Sums and histograms of the router. */
#include "router/stats.h"

#include "common/base/rc.h"

#include <stdio.h>

const char *const rt_outcome_names[RT_OUTCOMES] = {"ok",         "cancelled",   "invalid",
                                                   "overloaded", "unavailable", "error"};

const double rt_histogram_bounds[RT_HISTOGRAM_BUCKETS] = {
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 10, 20, 40, 80, 160};

enum rt_outcome rt_outcome_of(int rc)
{
    switch (rc) {
    case BT_E_CANCELLED:
        return RT_OUTCOME_CANCELLED;
    case BT_E_INVALID:
    case BT_E_TOO_LARGE:
    case BT_E_NOT_FOUND:
    case BT_E_UNSUPPORTED:
    case BT_E_FORMAT:
        return RT_OUTCOME_INVALID;
    case BT_E_EXHAUSTED:
        return RT_OUTCOME_OVERLOADED;
    case BT_E_UNAVAILABLE:
    case BT_E_PEER_LOST:
    case BT_E_INCOMPATIBLE:
        return RT_OUTCOME_UNAVAILABLE;
    default:
        return RT_OUTCOME_ERROR;
    }
}

uint64_t rt_stats_outcome(const struct rt_stats *s, enum rt_outcome o)
{
    return s->outcomes[o] + __atomic_load_n(&s->refused[o], __ATOMIC_RELAXED);
}

void rt_stats_refused(struct rt_stats *s, enum rt_outcome o)
{
    __atomic_fetch_add(&s->refused[o], 1, __ATOMIC_RELAXED);
}

uint64_t rt_histogram_n(const struct rt_histogram *h)
{
    uint64_t n = 0;

    for (size_t i = 0; i <= RT_HISTOGRAM_BUCKETS; i++) {
        n += h->n[i];
    }
    return n;
}

struct rt_tenant_stats *rt_stats_tenant(struct rt_stats *s, const char *name)
{
    for (unsigned i = 0; i < s->n_tenants; i++) {
        if (strcmp(s->tenants[i].name, name) == 0) {
            return &s->tenants[i];
        }
    }
    if (s->n_tenants == RT_TENANTS_MAX) {
        return &s->other_tenants;
    }
    snprintf(s->tenants[s->n_tenants].name, sizeof(s->tenants[0].name), "%s", name);
    return &s->tenants[s->n_tenants++];
}

void rt_histogram_add(struct rt_histogram *h, double value, uint64_t n)
{
    size_t i = 0;

    while (i < RT_HISTOGRAM_BUCKETS && value > rt_histogram_bounds[i]) {
        i++;
    }
    h->n[i] += n;
    h->sum += value * (double)n;
}
