/* What the router counts: plain sums, read for /metrics. Loop thread. */
#ifndef RT_STATS_H
#define RT_STATS_H

#include "router/stages.h"

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
uint64_t rt_histogram_n(const struct rt_histogram *h);
/* n values of the same size. */
void rt_histogram_add(struct rt_histogram *h, double value, uint64_t n);

#define RT_TRANSPORTS 4 /* shm, tcp, rdma, other */
const char *rt_transport_name(int i);

/* Tenants are named by clients: the first ones to come have series of their own, the others share
 * the last. */
#define RT_TENANTS_MAX 32
struct rt_tenant_stats {
    char name[64];
    uint64_t requests, ok, good, prompt_tokens, cached_tokens, tokens;
};

struct rt_stats {
    time_t started;
    uint64_t outcomes[RT_OUTCOMES];
    uint64_t refused[RT_OUTCOMES]; /* before they became requests; atomic, relaxed: any thread */
    uint64_t tokens, prompt_tokens, retries;
    struct rt_histogram first_token;
    struct rt_histogram token;        /* between tokens, one by one */
    struct rt_histogram answer_token; /* the same, mean of each answer */
    struct rt_histogram total;
    struct rt_histogram stages[RT_STAGE_COUNT];
    struct rt_histogram path_first[4]; /* by enum rt_path */
    uint64_t good, cached_tokens;
    /* As nodes said it. */
    uint64_t tier_hits[RT_STAGE_TIERS], tier_tokens[RT_STAGE_TIERS];
    double tier_load_s[RT_STAGE_TIERS];
    uint64_t transport_handoffs[RT_TRANSPORTS], transport_bytes[RT_TRANSPORTS];
    double transport_s[RT_TRANSPORTS];
    unsigned n_tenants;
    struct rt_tenant_stats tenants[RT_TENANTS_MAX], other_tenants;
};
/* Of requests and of what was refused before it became one. */
uint64_t rt_stats_outcome(const struct rt_stats *s, enum rt_outcome o);
void rt_stats_refused(struct rt_stats *s, enum rt_outcome o); /* any thread */
struct rt_tenant_stats *rt_stats_tenant(struct rt_stats *s, const char *name);

#endif
