/* Inside of a request: shared by request.c, attempt.c and begin.c, and by nobody else. Loop thread.
 */
#ifndef RT_REQUEST_INT_H
#define RT_REQUEST_INT_H

#include "router/router_int.h"

/* Fingerprints of a prompt's blocks, for one identity; made when first asked for. */
struct rt_keys {
    uint64_t *fps;
    size_t n, n_tokens; /* n_tokens: of the prompt they were made for */
};

struct rt_request {
    struct bt_list link;
    struct rt_router *router;
    struct rt_client *client;
    enum rt_request_state state;
    char id[20];
    char *client_id;
    char *cache_salt;
    bool first_sent;

    struct rt_tok_job *job; /* TOKENIZE: a long text on its way */
    struct bt_ids prompt;
    struct bt_buf
        packed; /* the prompt as it goes to nodes, length first, until it has gone; or {0} */
    struct wire_sampling_owned sampling;
    enum rt_path path; /* asked for */
    bool path_is_must; /* by the client, not by configuration */
    struct rt_answer answer;
    uint64_t claim, deadline_ns;
    char tenant[RT_FAIR_TENANT_MAX];
    struct rt_fair_item fair;                             /* until it is done */
    uint32_t cached_tokens, cached_tier_tokens[RT_TIERS]; /* as the node said */
    struct rt_keys keys[RT_MAX_IDENTS];
    struct rt_estimate est;                                   /* of this attempt */
    uint32_t expected_tokens, expected_tier_tokens[RT_TIERS]; /* cached ones */

    const char *finish;              /* static; NULL = not yet */
    struct rt_leg *prefill, *decode; /* of this attempt; decode: also the local leg */
    struct rt_token *early;
    size_t n_early, cap_early;
    enum _Baton__V1__FinishReason early_finish;

    struct {
        char name[BT_MEMBER_NAME_MAX + 1];
        uint64_t incarnation;
    } excluded[RT_MAX_EXCLUDED];
    size_t n_excluded;
    uint32_t retries;
    unsigned canary_drawn, canary_is;      /* bits by enum rt_role */
    struct bt_timer timer;                 /* QUEUED: the next look for nodes */
    uint64_t not_before_ns, wait_until_ns; /* QUEUED */

    struct rt_trace *trace; /* with all moments; given away at the end */
    char prefill_name[BT_MEMBER_NAME_MAX + 1], decode_name[BT_MEMBER_NAME_MAX + 1];
    uint32_t prefill_rank, decode_rank;
    enum rt_path path_taken;
    struct rt_store store; /* STORE: of this attempt */
    bool store_failed;
};

/* observe.c: what is remembered, counted and logged of a request. */
int rt_observe_begin(struct rt_request *req) BT_MUST_USE;
/* Nodes were chosen; views as in the arguments of the choice. */
void rt_observe_picked(struct rt_request *req,
                       const struct rt_seen *seen,
                       const struct rt_node_view *views,
                       const struct rt_pick *pick);
void rt_observe_launched(struct rt_request *req);
void rt_observe_times(struct rt_request *req,
                      const struct rt_leg *leg,
                      const Baton__V1__LegTimes *m);
void rt_observe_failed(struct rt_request *req, const char *why);
/* The answer has grown to n tokens from n_before. */
void rt_observe_tokens(struct rt_request *req, size_t n_before, size_t n);
void rt_observe_end(struct rt_request *req, enum rt_outcome outcome, int rc);
/* Brings the trace of a running request up to date. */
void rt_observe_refresh(struct rt_request *req);

static inline uint64_t rt_request_now(const struct rt_request *req)
{
    return bt_loop_now(req->router->loop);
}

/* request.c */
void rt_request_set_state(struct rt_request *req, enum rt_request_state to);
/* Ends the request with an error; nothing happens if it has ended. */
void rt_request_fail(struct rt_request *req, int rc, const char *msg);
/* The request was refused: frees it, tells the client nothing. */
void rt_request_fail_early(struct rt_request *req, int rc);
/* No leg is the request's any more; `cancel`: nor wanted on the nodes. */
void rt_request_drop_legs(struct rt_request *req, bool cancel);

/* attempt.c */
/* The ids of the prompt as varints, as they came; without memory it is done again later. */
void rt_request_keep_packed(struct rt_request *req, struct bt_str ids);
/* QUEUED: looks for nodes, now or after a pause. */
void rt_request_enqueue(struct rt_request *req, uint64_t pause_ns);
/* QUEUED: chooses nodes and starts the attempt. False: all nodes have enough queued, it waits. */
bool rt_request_dispatch(struct rt_request *req);
/* The attempt is over: whatever is left of it is cancelled, and another one may follow. */
void rt_request_retry(struct rt_request *req, int rc, const char *msg);
/* The node comes last in later attempts. */
void rt_request_exclude(struct rt_request *req, const struct rt_node *n);
/* No later attempt goes through this one's store. */
void rt_request_exclude_store(struct rt_request *req);
bool rt_request_excludes(const struct rt_request *req, const char *name, uint64_t incarnation);
void rt_request_on_timer(struct bt_loop *loop, struct bt_timer *t);

#endif
