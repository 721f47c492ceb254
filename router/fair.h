/* Who is next: a queue of requests of many tenants.
 *
 * Start-time fair queueing: each tenant gets service (seconds of computing) in proportion to its
 * weight while it has something queued, whatever others queue. A request's place is its start tag
 * in virtual time; each level of priority is worth RT_FAIR_PRIORITY_S of service, and every second
 * of waiting a second, so that nobody waits for ever: an old request passes a flood of urgent ones.
 * Source of the algorithm: Goyal, Vin, Cheng, "Start-time fair queueing" (SIGCOMM 1996).
 *
 * Bounded: all together, and per tenant queued and running. Pure logic; the clock is the caller's.
 * Loop thread. */
#ifndef RT_FAIR_H
#define RT_FAIR_H

#include "common/base/rc.h"
#include "common/ds/list.h"

#define RT_FAIR_PRIORITY_S   5.0
#define RT_FAIR_PRIORITY_MAX 10
#define RT_FAIR_TENANT_MAX   64 /* bytes of a name, the zero included */

struct rt_fair;
struct rt_tenant;

struct rt_fair_cfg {
    size_t max_queued;         /* all tenants */
    size_t tenant_max_queued;  /* each; 0 = no limit of its own */
    size_t tenant_max_running; /* each; 0 = no limit */
    const char *weights;       /* "name=weight,..."; others have 1. NULL = none. Copied */
};

/* BT_E_CONFIG: weights cannot be read, or are not from 0.01 to 100. */
int rt_fair_create(const struct rt_fair_cfg *cfg,
                   struct rt_fair **ret_fair,
                   struct bt_err *err) BT_MUST_USE;
void rt_fair_destroy(struct rt_fair *f); /* nothing may be in it; NULL is fine */

/* A request's part, embedded. */
struct rt_fair_item {
    struct bt_list link;
    struct rt_tenant *tenant; /* NULL = not here */
    double cost_s, tag;
    int priority; /* -MAX..MAX, larger is more urgent */
    uint64_t queued_ns;
    bool running;
};

/* Queues it. BT_E_EXHAUSTED: a bound is reached, err says which; BT_E_NOMEM. */
int rt_fair_push(struct rt_fair *f,
                 struct rt_fair_item *it,
                 const char *tenant,
                 uint64_t now_ns,
                 struct bt_err *err) BT_MUST_USE;
/* Who is next among those whose tenant may run another one; NULL = nobody. Stays queued. */
struct rt_fair_item *rt_fair_next(const struct rt_fair *f, uint64_t now_ns);
/* It runs from here on, and is charged. */
void rt_fair_start(struct rt_fair *f, struct rt_fair_item *it);
/* It is over, whether it waited, ran or was never here. */
void rt_fair_end(struct rt_fair *f, struct rt_fair_item *it);

size_t rt_fair_queued(const struct rt_fair *f);
double rt_fair_queued_s(const struct rt_fair *f); /* service that is queued */
double rt_fair_oldest_s(const struct rt_fair *f, uint64_t now_ns);

#endif
