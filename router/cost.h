/* Costs in seconds of a request on a node; what they are made of is told in policy.h. Pure. */
#ifndef RT_COST_H
#define RT_COST_H

#include "router/policy.h"

/* The prompt on v: the cheapest mix of bringing and computing. */
struct rt_estimate rt_cost_prompt(const struct rt_pick_args *a, const struct rt_node_view *v);
/* Until the first token: queue, bring and compute. */
double rt_estimate_first_s(const struct rt_estimate *e);
/* What decides: the same, what is evicted, and the node's share so far. */
double rt_estimate_cost(const struct rt_estimate *e);
/* The answer on v; `has_prompt`: it computes the prompt itself, nothing is handed over. */
double rt_cost_answer(const struct rt_pick_args *a, const struct rt_node_view *v, bool has_prompt);
/* What computing the prompt on v costs those whose answers it is making. */
double rt_cost_stall(const struct rt_pick_args *a,
                     const struct rt_node_view *v,
                     const struct rt_estimate *e);

#endif
