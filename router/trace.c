/* See trace.h. */
#include "router/trace.h"

#include "common/base/buf.h"

#include <stdlib.h>

struct rt_traces {
    size_t keep, n, next;
    struct rt_trace *ring[];
};

int rt_traces_create(size_t keep, struct rt_traces **ret, struct bt_err *err)
{
    struct rt_traces *ts = bt_calloc(1, sizeof(*ts) + keep * sizeof(struct rt_trace *));

    if (!ts) {
        return BT_FAIL(err, BT_E_NOMEM, "router: no memory for %zu traces", keep);
    }
    ts->keep = keep;
    *ret = ts;
    return BT_OK;
}

void rt_traces_destroy(struct rt_traces *ts)
{
    for (size_t i = 0; ts && i < ts->n; i++) {
        rt_trace_destroy(ts->ring[i]);
    }
    free(ts);
}

void rt_traces_add(struct rt_traces *ts, struct rt_trace *take_trace)
{
    if (ts->keep == 0) {
        rt_trace_destroy(take_trace);
        return;
    }
    rt_trace_destroy(ts->ring[ts->next]);
    ts->ring[ts->next] = take_trace;
    ts->next = (ts->next + 1) % ts->keep;
    ts->n = BT_MIN(ts->n + 1, ts->keep);
}

size_t rt_traces_n(const struct rt_traces *ts)
{
    return ts->n;
}

const struct rt_trace *rt_traces_at(const struct rt_traces *ts, size_t i)
{
    return ts->ring[(ts->next + ts->keep - 1 - i) % ts->keep];
}

struct rt_trace *rt_trace_create(void)
{
    return bt_calloc(1, sizeof(struct rt_trace));
}

void rt_trace_destroy(struct rt_trace *t)
{
    if (t) {
        free(t->client_id);
        free(t);
    }
}

double rt_trace_token_s(const struct rt_trace *t)
{
    return t->n_answer > 1 && t->t.last > t->t.first
               ? (double)(t->t.last - t->t.first) / 1e9 / (t->n_answer - 1)
               : 0;
}
