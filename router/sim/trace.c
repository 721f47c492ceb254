/* See trace.h. */
#include "router/sim/trace.h"

#include "common/base/buf.h"

#include <errno.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>

#define AT_NS_MAX 1e18 /* 31 years */

static int grow(struct rt_sim_trace *t)
{
    size_t cap = BT_MAX(2 * t->cap, (size_t)1024);
    void *p = t->n < t->cap ? t->r : realloc(t->r, cap * sizeof(*t->r));

    if (!p) {
        return BT_E_NOMEM;
    }
    t->cap = t->n < t->cap ? t->cap : cap;
    t->r = p;
    return BT_OK;
}

static int add(const struct rt_sim_trace_cfg *cfg, struct rt_sim_trace *t, json_t *line)
{
    json_t *ids = json_object_get(line, "hash_ids");
    double at_ns = json_number_value(json_object_get(line, "timestamp")) * 1e6 / cfg->speedup;
    double length = json_number_value(json_object_get(line, "input_length"));
    uint64_t n_tokens = length > 0 && length < 4e9 ? (uint32_t)length / cfg->divide : 0;
    size_t n = json_array_size(ids);
    uint32_t *copy = bt_calloc(n + 1, sizeof(*copy));

    if (!copy || n == 0 || !(at_ns >= 0 && at_ns <= AT_NS_MAX)) {
        free(copy);
        return copy ? BT_E_FORMAT : BT_E_NOMEM;
    }
    for (size_t i = 0; i < n; i++) {
        copy[i] = (uint32_t)json_integer_value(json_array_get(ids, i));
    }
    if (cfg->exact) {
        n = BT_MIN(n, (size_t)n_tokens / cfg->block_tokens);
    } else {
        n_tokens = (uint64_t)n * cfg->block_tokens + 1;
    }
    if (n_tokens == 0 || n_tokens > UINT32_MAX || (double)n_tokens > cfg->max_tokens) {
        free(copy);
        return BT_OK;
    }
    if (grow(t) < 0) {
        free(copy);
        return BT_E_NOMEM;
    }
    t->r[t->n++] = (struct rt_replay_request){.at_ns = (uint64_t)at_ns,
                                              .n_tokens = (uint32_t)n_tokens,
                                              .n_blocks = (uint32_t)n,
                                              .ids = copy};
    return BT_OK;
}

static int by_time(const void *a, const void *b)
{
    const struct rt_replay_request *x = a, *y = b;

    return x->at_ns < y->at_ns ? -1 : x->at_ns > y->at_ns;
}

static int
read_lines(const struct rt_sim_trace_cfg *cfg, FILE *f, struct rt_sim_trace *t, struct bt_err *err)
{
    char *line = NULL;
    size_t cap = 0, n_line = 0;
    int rc = BT_OK;

    while (rc == BT_OK && t->n < cfg->most && getline(&line, &cap, f) > 0) {
        json_error_t je = {.text = ""};
        json_t *j;

        if (++n_line <= cfg->first) {
            continue;
        }
        j = json_loads(line, 0, &je);
        rc = j ? add(cfg, t, j) : BT_E_FORMAT;
        json_decref(j);
        if (rc < 0) {
            BT_FAIL(err, rc, "%.120s:%zu: no request (%.60s)", cfg->path, n_line, je.text);
        }
    }
    free(line);
    return rc;
}

int rt_sim_trace_load(const struct rt_sim_trace_cfg *cfg,
                      struct rt_sim_trace *ret,
                      struct bt_err *err)
{
    FILE *f = fopen(cfg->path, "r");
    struct rt_sim_trace t = {0};
    int rc;

    if (!f) {
        return BT_FAIL_SYS(err, BT_E_IO, "%.120s", cfg->path);
    }
    rc = read_lines(cfg, f, &t, err);
    fclose(f);
    if (rc == BT_OK && t.n == 0) {
        rc = BT_FAIL(err, BT_E_FORMAT, "%.120s holds no request", cfg->path);
    }
    if (rc < 0) {
        rt_sim_trace_free(&t);
        return rc;
    }
    qsort(t.r, t.n, sizeof(*t.r), by_time);
    for (size_t i = t.n; i-- > 0;) {
        t.r[i].at_ns -= t.r[0].at_ns;
    }
    *ret = t;
    return BT_OK;
}

void rt_sim_trace_free(struct rt_sim_trace *t)
{
    for (size_t i = 0; i < t->n; i++) {
        free((void *)(uintptr_t)t->r[i].ids);
    }
    free(t->r);
    *t = (struct rt_sim_trace){0};
}
