/* The router's access log: a JSON line for each request that has ended. Its stages add up to the
 * time to the first token, and to the gap before the second one; nodes write lines of their own
 * under the same id. What never became a request has a line, too. Never a prompt, a text of an
 * answer, or a token. Loop thread, refusals any; a thread of the log writes. */
#include "router/router_int.h"

#include "common/base/jsonw.h"
#include "common/rpc/rpc.h"
#include "common/thr/time.h"

#include <stdio.h>
#include <stdlib.h>

static double ms(uint64_t ns)
{
    return (double)ns / 1e6;
}

const char *rt_path_name(enum rt_path path)
{
    static const char *const names[] = {"none", "direct", "local", "store"}; /* of one taken */

    return names[path];
}

static void put_tiers(struct bt_jsonw *w, const char *key, const uint32_t *tokens, int n)
{
    static const char *const names[] = {"pool", "host", "disk", "store"};

    bt_jw_open(w, key, '{');
    for (int i = 0; i < n; i++) {
        bt_jw_u64(w, names[i], tokens[i]);
    }
    bt_jw_close(w, '}');
}

static void put_stages(struct bt_jsonw *w, const struct rt_trace *t)
{
    bt_jw_open(w, "first_ms", '{');
    for (int i = 0; i < RT_STAGE_FIRST_COUNT; i++) {
        bt_jw_f64(w, rt_stage_names[i], ms(t->stage_ns[i]), 3);
    }
    bt_jw_close(w, '}');
    if (t->t.first) {
        bt_jw_f64(w, "ttft_ms", ms(t->t.first - t->t.came), 3);
    }
    if (!t->t.second) {
        return;
    }
    bt_jw_open(w, "second_ms", '{');
    for (int i = RT_STAGE_FIRST_COUNT; i < RT_STAGE_COUNT; i++) {
        bt_jw_f64(w, rt_stage_names[i], ms(t->stage_ns[i]), 3);
    }
    bt_jw_close(w, '}');
    bt_jw_f64(w, "second_gap_ms", ms(t->t.second - t->t.first), 3);
    bt_jw_f64(w, "token_ms", rt_trace_token_s(t) * 1e3, 3);
}

static void put_line(struct bt_jsonw *w, const struct rt_router *r, const struct rt_trace *t)
{
    struct timespec ts;
    char at[40];

    clock_gettime(CLOCK_REALTIME, &ts);
    bt_lines_time(&ts, at);
    bt_jw_open(w, NULL, '{');
    bt_jw_str(w, "time", at);
    bt_jw_str(w, "id", t->id);
    bt_jw_str(w, "client_id", t->client_id ? t->client_id : "");
    bt_jw_str(w, "answer_id", t->answer_id);
    bt_jw_str(w, "router", r->name);
    bt_jw_str(w, "via", t->via);
    bt_jw_str(w, "tenant", t->tenant);
    bt_jw_str(w, "model", rt_model_config(r->model)->name);
    bt_jw_str(w, "path", rt_path_name(t->path));
    bt_jw_str(w, "prefill", t->prefill);
    bt_jw_str(w, "decode", t->decoder);
    bt_jw_str(w, "store", t->store);
    bt_jw_str(w, "transport", t->decode.transport);
    bt_jw_u64(w, "handoff_bytes", t->decode.bytes);
    bt_jw_u64(w, "retries", t->retries);
    bt_jw_u64(w, "tokens_in", t->n_prompt);
    bt_jw_u64(w, "tokens_out", t->n_answer);
    bt_jw_u64(w, "cached", t->n_cached);
    put_tiers(w, "expected", t->expected, RT_TIERS);
    put_tiers(w, "found", t->prompt.tier_tokens, RT_STAGE_TIERS);
    put_stages(w, t);
    bt_jw_f64(w, "total_ms", ms(t->end_ns - t->t.came), 3);
    bt_jw_str(w, "finish", t->finish);
    bt_jw_str(w, "status", bt_rpc_status_name(bt_rc_grpc(t->rc)));
    bt_jw_bool(w, "good", t->good);
    bt_jw_close(w, '}');
}

void rt_access_write(const struct rt_router *r, const struct rt_trace *t)
{
    struct bt_lines *lines = bt_node_access_log(r->node);
    struct bt_buf b = {.max = 16384};
    struct bt_jsonw w = {.b = &b};

    if (!lines) {
        return;
    }
    put_line(&w, r, t);
    if (w.rc == BT_OK) {
        bt_lines_add(lines, bt_buf_str(&b));
    }
    bt_buf_fini(&b);
}

void rt_access_refused(struct rt_router *r, const struct rt_refusal *f)
{
    struct rt_trace *t = rt_trace_create();

    rt_stats_refused(&r->stats, rt_outcome_of(f->rc));
    if (!t) {
        return;
    }
    snprintf(t->id, sizeof(t->id), "%s", f->id);
    snprintf(t->answer_id, sizeof(t->answer_id), "%s", f->answer_id);
    snprintf(t->tenant, sizeof(t->tenant), "%s", f->tenant);
    t->client_id = strdup(f->client_id);
    t->via = f->via;
    t->t.came = f->came_ns;
    t->end_ns = BT_MAX(bt_now_ns(), f->came_ns);
    t->finish = "none";
    t->rc = f->rc;
    rt_access_write(r, t);
    rt_trace_destroy(t);
}
