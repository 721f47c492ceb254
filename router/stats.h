/* What the router counts: plain sums, read for /metrics. Loop thread. */
#ifndef RT_STATS_H
#define RT_STATS_H

#include "common/base/base.h"

#include <time.h>

enum rt_outcome {
    RT_OUTCOME_OK,
    RT_OUTCOME_CANCELLED,   /* the client has gone */
    RT_OUTCOME_INVALID,     /* the request's own fault */
    RT_OUTCOME_OVERLOADED,  /* no room */
    RT_OUTCOME_UNAVAILABLE, /* no nodes, or they are lost */
    RT_OUTCOME_ERROR,       /* anything else */
    RT_OUTCOMES
};
extern const char *const rt_outcome_names[RT_OUTCOMES];
/* Of a request that fails with `rc`. */
enum rt_outcome rt_outcome_of(int rc);

#define RT_HISTOGRAM_BUCKETS 18
extern const double rt_histogram_bounds[RT_HISTOGRAM_BUCKETS]; /* seconds, rising */

struct rt_histogram {
    uint64_t n[RT_HISTOGRAM_BUCKETS + 1]; /* the last: beyond all bounds */
    double sum;
};
void rt_histogram_add(struct rt_histogram *h, double value);

struct rt_stats {
    time_t started;
    uint64_t outcomes[RT_OUTCOMES];
    uint64_t tokens, prompt_tokens, retries;
    struct rt_histogram first_token;
};

#endif
