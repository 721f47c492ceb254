/* Choice of nodes for a request: a pure function of what is known of the nodes.
 *
 * Costs are outstanding work: on a prefill node the prompt tokens that are not computed yet, as it
 * last reported plus what this router has sent since; on a decode node its requests, and how full
 * its pool is. The least cost wins, ties fall to `ticket` (a random number), so that idle nodes
 * share the traffic evenly. Nodes that a request has failed on come last, not never: they may be
 * all there is. */
#ifndef RT_POLICY_H
#define RT_POLICY_H

#include "common/base/rc.h"

enum rt_role { RT_ROLE_PREFILL, RT_ROLE_DECODE, RT_ROLE_BOTH };
/* STORE: a pair as for DIRECT, with a daemon of the store between them (stores.c). */
enum rt_path { RT_PATH_AUTO, RT_PATH_DIRECT, RT_PATH_LOCAL, RT_PATH_STORE };

/* What decides whether two nodes may exchange KV. */
struct rt_compat {
    uint8_t kv_format[32];
    char numerics[64];
    uint32_t weight_epoch;
};

struct rt_node_view {
    const char *name;
    enum rt_role role;
    bool ready;
    bool excluded; /* the request has failed on it */
    const struct rt_compat *compat;
    uint64_t tokens_outstanding;
    uint32_t requests_outstanding;
    uint32_t pages_free, pages_total;
};

struct rt_pick_args {
    const struct rt_node_view *nodes;
    size_t n;
    enum rt_path path;
    size_t n_prompt;           /* with what was answered already */
    size_t local_below_tokens; /* AUTO: shorter prompts are computed by the decode node */
    uint64_t ticket;
};

struct rt_pick {
    enum rt_path path;   /* DIRECT or LOCAL */
    int prefill, decode; /* indexes into nodes; prefill is -1 on LOCAL */
};

/* BT_OK or BT_E_UNAVAILABLE, whose text names what is missing. */
int rt_policy_pick(const struct rt_pick_args *a,
                   struct rt_pick *ret_pick,
                   struct bt_err *err) BT_MUST_USE;

/* True if KV may go from one to the other; else `why` names the field and both values. */
bool rt_compat_equal(const struct rt_compat *a, const struct rt_compat *b, char why[160]);

#endif
