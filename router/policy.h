/* Choice of nodes for a request: a pure function of what is known of the nodes. The router and the
 * replay tool (tests/bench/run replay) use the same code.
 *
 * Costs are seconds. On a prefill node (or for a prompt that a decode node computes itself)
 *   queue    what it has to compute before: this router's prompts by its own estimate, others' by
 *            the node's count of tokens
 *   bring    the blocks of the best prefix that lie in host memory, on disk, or behind them in what
 *            others share (the KV store), by measured time
 *   compute  the rest, by the node's measured speed; how much is brought and how much computed is
 *            chosen so that both together are least
 *   evict    what the new blocks push out of the node's cache: the time to compute that again,
 *            times the chance that somebody asks for it, which falls with the time since the next
 *            victim was last used (exp(-age / reuse_s)). So cold prompts go where the cache is
 *            turned over least, and hit rate and balance both gain.
 *   share    the time to compute, times how much busier than the mean the node was in the last
 *            minutes: prefixes that many ask for do not gather more and more of them on one node.
 *            Fades where all are idle: then the longest prefix wins
 * On a decode node: the time of the answer's tokens in a batch with one row more, the handoff of
 * what it lacks, and what it has to push out or wait for to have the pages. AUTO computes a prompt
 * on the decode node when that is cheaper than a handoff, the rows it stalls counted.
 *
 * The least cost wins; costs that differ by less than models err are ties and fall to `ticket` (a
 * random number), so that idle nodes share the traffic evenly. Nodes that a request has failed on
 * come last, not never: they may be all there is. */
#ifndef RT_POLICY_H
#define RT_POLICY_H

#include "common/base/rc.h"
#include "router/index/index.h"
#include "router/speed.h"

/* STORE: a daemon of the KV store, no target of any leg. */
enum rt_role { RT_ROLE_PREFILL, RT_ROLE_DECODE, RT_ROLE_BOTH, RT_ROLE_STORE };
/* STORE: a pair as for DIRECT, with a daemon of the store between them (stores.c). */
enum rt_path { RT_PATH_AUTO, RT_PATH_DIRECT, RT_PATH_LOCAL, RT_PATH_STORE };

/* How the prefill node is chosen; all but the first are there to be compared with. */
enum rt_route {
    RT_ROUTE_COST,
    RT_ROUTE_RANDOM,
    RT_ROUTE_ROUND_ROBIN,
    RT_ROUTE_LEAST_LOADED,
    RT_ROUTE_LONGEST_PREFIX,
};
extern const char *const rt_route_names[]; /* in that order, NULL at the end */

/* What decides whether two nodes may exchange KV. */
struct rt_compat {
    uint8_t kv_format[32];
    char numerics[64];
    uint32_t weight_epoch;
};

/* A routing target. Zero where nothing is known. */
struct rt_node_view {
    const char *name;
    enum rt_role role;
    bool ready;
    bool cordoned; /* and therefore not ready */
    bool excluded; /* the request has failed on it */
    const struct rt_compat *compat;
    const struct rt_speed *speed; /* NULL = an ordinary node */
    double queue_s;               /* of this router's prompts there */
    uint64_t tokens_outstanding;  /* of prompts, besides those */
    uint32_t requests_outstanding;
    uint32_t pages_free, pages_total; /* free: cached ones included */
    uint32_t pages_unused;            /* of pages_free: hold nothing */
    uint32_t page_tokens, block_tokens, step_tokens;
    double busy;     /* share of the last minutes that it computed */
    double oldest_s; /* since the next victim of the cache was used */
    struct rt_run run;
    double block_s[RT_TIERS]; /* to bring a block of the tier; 0 = not known, not used */
};

struct rt_seen;

struct rt_pick_args {
    const struct rt_node_view *nodes;
    size_t n;
    enum rt_path path;
    enum rt_route route;
    size_t n_prompt;           /* with what was answered already */
    size_t n_answer;           /* tokens that are expected */
    size_t local_below_tokens; /* AUTO: shorter prompts are computed by the decode node */
    double handoff_s;          /* what a handoff costs the second token; 0 = not known: AUTO then
                                  takes a pair where there is one */
    double handoff_token_s;    /* and each token's KV */
    double reuse_s;            /* 0 = evicting is free */
    double busy_mean;          /* of the candidates; filled in by rt_policy_pick */
    uint64_t ticket;
    uint64_t turn; /* ROUND_ROBIN */
    uint64_t now_ns;
    struct rt_seen *seen; /* filled with what was weighed; NULL = not wanted */
};

/* What is expected of the prompt on the node that computes it. */
struct rt_estimate {
    double queue_s, bring_s, compute_s, evict_s, share_s;
    uint32_t cached_blocks;
    uint32_t tier_blocks[RT_TIERS]; /* of them, by the fastest tier */
};

/* What was weighed for each leg: the cheapest nodes of all. `est` is not of decode legs. */
enum rt_seen_kind { RT_SEEN_PREFILL, RT_SEEN_DECODE, RT_SEEN_LOCAL, RT_SEEN_KINDS };
#define RT_SEEN_MAX 4
struct rt_seen_node {
    int idx;
    double cost;
    struct rt_estimate est;
};
struct rt_seen {
    struct rt_seen_node v[RT_SEEN_KINDS][RT_SEEN_MAX];
    unsigned n[RT_SEEN_KINDS], n_all[RT_SEEN_KINDS];
};

struct rt_pick {
    enum rt_path path;   /* DIRECT or LOCAL */
    int prefill, decode; /* indexes into nodes; prefill is -1 on LOCAL */
    struct rt_estimate est;
    double least_queue_s; /* of all nodes that could compute the prompt */
    unsigned n_targets;   /* those nodes */
};

/* BT_OK or BT_E_UNAVAILABLE, whose text names what is missing. */
int rt_policy_pick(const struct rt_pick_args *a,
                   struct rt_pick *ret_pick,
                   struct bt_err *err) BT_MUST_USE;

/* True if KV may go from one to the other; else `why` names the field and both values. */
bool rt_compat_equal(const struct rt_compat *a, const struct rt_compat *b, char why[160]);

#endif
