/* Sums and histograms of the router. */
#include "router/stats.h"

#include "common/base/rc.h"

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

void rt_histogram_add(struct rt_histogram *h, double value)
{
    size_t i = 0;

    while (i < RT_HISTOGRAM_BUCKETS && value > rt_histogram_bounds[i]) {
        i++;
    }
    h->n[i]++;
    h->sum += value;
}
