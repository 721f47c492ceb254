/* Admission: which requests are refused, which wait, and who is next. Loop thread.
 *
 * Nodes get prompts only as far as they are worth `admission.node_queue` of computing; the rest
 * waits here, where order can still be chosen (fair.h). A request that cannot have its first token
 * within its deadline or `admission.first_token` is refused at once with the time after which to
 * try again, instead of failing late and in company. That is predicted from what the nodes have
 * queued, what waits here and measured speeds; nothing is refused on guesses. Further attempts of a
 * request that nodes have failed do not queue again. */
#include "router/request_int.h"

#include "common/base/buf.h"
#include "common/obs/log.h"
#include "common/thr/time.h"

#include <math.h>
#include <stdio.h>

#define LOOK_NS   (5 * BT_NS_PER_MS) /* pause between looks while all nodes are full */
#define RETRY_MIN 0.1                /* seconds */

static void on_look(struct bt_loop *loop, struct bt_timer *t)
{
    rt_admit_run(BT_CONTAINER_OF(t, struct rt_router, admit.timer));
}

int rt_admit_init(struct rt_router *r, struct bt_err *err)
{
    struct rt_fair_cfg cfg = {.max_queued = (size_t)r->conf->max_queued,
                              .tenant_max_queued = (size_t)r->conf->tenant_queued,
                              .tenant_max_running = (size_t)r->conf->tenant_running,
                              .weights = r->conf->weights};

    r->admit.timer.fn = on_look;
    return rt_fair_create(&cfg, &r->admit.fair, err);
}

void rt_admit_fini(struct rt_router *r)
{
    rt_fair_destroy(r->admit.fair);
}

void rt_admit_soon(struct rt_router *r)
{
    if (rt_fair_queued(r->admit.fair) > 0 && !r->admit.timer.armed && !r->draining) {
        bt_timer_start(r->loop, &r->admit.timer, bt_loop_now(r->loop) + LOOK_NS);
    }
}

/* Seconds to compute the whole prompt on a node as there are here; *ret_known: measured. */
static double prompt_s(const struct rt_request *req, bool *ret_known)
{
    const struct rt_router *r = req->router;
    const struct rt_speed *s = rt_speed_ordinary();

    for (int i = 0; i < r->cache.n_idents; i++) {
        if (r->cache.idents[i].speed.n_prompt > s->n_prompt) {
            s = &r->cache.idents[i].speed;
        }
    }
    *ret_known = s->n_prompt >= 8;
    return rt_speed_prefill(s, (double)(req->prompt.n + req->answer.ids.n), 0, 512,
                            rt_request_now(req));
}

/* Seconds that the first token may take from now on. */
static double limit_s(const struct rt_request *req)
{
    uint64_t now = rt_request_now(req), most = req->router->conf->first_token_ns;
    double limit = INFINITY;

    if (req->deadline_ns != BT_NEVER_NS) {
        limit = req->deadline_ns > now ? (double)(req->deadline_ns - now) / 1e9 : 0;
    }
    if (most > 0) {
        limit = fmin(limit, ((double)most - (double)(now - req->trace->t.came)) / 1e9);
    }
    return limit;
}

static void refuse(struct rt_request *req, double retry_s, const char *why)
{
    req->router->admit.refused++;
    req->client->retry_after_s = fmax(retry_s, RETRY_MIN);
    rt_request_fail(req, BT_E_EXHAUSTED, why);
}

bool rt_admit_refuses(struct rt_request *req, double first_s)
{
    double limit = limit_s(req);
    char why[200];

    if (first_s <= limit) {
        return false;
    }
    snprintf(why, sizeof(why),
             "the first token would take %.1f s, %.1f s are left; try again in %.1f s", first_s,
             fmax(limit, 0), fmax(first_s - limit, RETRY_MIN));
    refuse(req, first_s - limit, why);
    return true;
}

/* One prompt that no node of the cluster has pages for, however long it waits. */
static bool is_too_large(struct rt_request *req)
{
    uint64_t most = 0, need = req->prompt.n + 1;
    char why[160];

    bt_list_for_each (it, &req->router->nodes) {
        const struct rt_node *n = BT_LIST_ENTRY(it, struct rt_node, link);
        uint64_t tokens = (uint64_t)n->pages_total * n->page_tokens;

        if (n->state == RT_NODE_READY && n->role != RT_ROLE_STORE) {
            most = BT_MAX(most, tokens ? tokens : UINT64_MAX);
        }
    }
    if (most == 0 || need <= most) {
        return false;
    }
    snprintf(why, sizeof(why), "prompt of %zu tokens, the largest KV pool holds %llu",
             req->prompt.n, (unsigned long long)most);
    rt_request_fail(req, BT_E_EXHAUSTED, why);
    return true;
}

void rt_admit(struct rt_request *req)
{
    struct rt_router *r = req->router;
    double queued_s = rt_fair_queued_s(r->admit.fair);
    struct bt_err err = {0};
    bool known;
    int rc;

    if (is_too_large(req)) {
        return;
    }
    req->fair.cost_s = prompt_s(req, &known);
    if (queued_s > 0 && known &&
        rt_admit_refuses(req, r->admit.least_queue_s + req->fair.cost_s +
                                  queued_s / BT_MAX(r->admit.n_targets, 1u))) {
        return;
    }
    rc = rt_fair_push(r->admit.fair, &req->fair, req->tenant, rt_request_now(req), &err);
    if (rc == BT_E_EXHAUSTED) {
        refuse(req, queued_s / BT_MAX(r->admit.n_targets, 1u), err.msg);
    } else if (rc < 0) {
        rt_request_fail(req, rc, bt_err_msg(&err, rc));
    } else {
        rt_admit_run(r);
    }
}

void rt_admit_run(struct rt_router *r)
{
    struct rt_fair_item *it;

    if (r->admit.running) {
        return; /* further up */
    }
    r->admit.running = true;
    while ((it = rt_fair_next(r->admit.fair, bt_loop_now(r->loop)))) {
        if (!rt_request_dispatch(BT_CONTAINER_OF(it, struct rt_request, fair))) {
            break;
        }
    }
    r->admit.running = false;
    rt_admit_soon(r);
}

void rt_admit_started(struct rt_request *req)
{
    if (req->fair.tenant && !req->fair.running) {
        rt_fair_start(req->router->admit.fair, &req->fair);
    }
}

void rt_admit_ended(struct rt_request *req)
{
    rt_fair_end(req->router->admit.fair, &req->fair);
    rt_admit_soon(req->router);
}
