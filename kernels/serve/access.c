/* The node's access log: a JSON line for each leg that has ended, under the id that the router gave
 * the request, so that one id finds its story on all nodes. Never text or ids of tokens. Loop
 * thread. */
#include "kernels/serve/serve_int.h"

#include "common/base/jsonw.h"
#include "common/thr/time.h"

#include <stdio.h>

static const char *const leg_names[] = {"local", "prefill", "decode"}; /* enum kn_leg */

void kn_access_begin(struct kn_stream *st, const Baton__V1__StartRequest *req, enum kn_leg leg)
{
    snprintf(st->request_id, sizeof(st->request_id), "%.*s", (int)sizeof(st->request_id) - 1,
             req->request_id);
    st->leg = leg;
    st->came_ns = bt_now_ns();
    st->n_prompt = (uint32_t)(req->n_prompt + req->n_answered);
    if (leg != KN_LEG_LOCAL && req->handoff) {
        snprintf(st->peer, sizeof(st->peer), "%.*s", (int)sizeof(st->peer) - 1,
                 req->handoff->store_name[0] && leg == KN_LEG_DECODE ? req->handoff->store_name
                                                                     : req->handoff->peer_name);
    }
}

static double ms(uint64_t ns)
{
    return (double)ns / 1e6;
}

static void put_times(struct bt_jsonw *w, const struct kn_stream *st)
{
    const struct kn_times *t = &st->times;
    bool decode = st->leg == KN_LEG_DECODE;

    bt_jw_open(w, "ms", '{');
    bt_jw_f64(w, "queue", ms(t->queue_ns), 3);
    bt_jw_f64(w, decode ? "receive" : "load", ms(t->load_ns), 3);
    bt_jw_f64(w, "wait", ms(t->wait_ns), 3);
    bt_jw_f64(w, "compute", ms(t->compute_ns), 3);
    bt_jw_close(w, '}');
    if (decode) {
        bt_jw_str(w, "transport", t->transport ? t->transport : "");
        bt_jw_u64(w, "bytes", t->bytes);
        return;
    }
    bt_jw_open(w, "cached", '{');
    bt_jw_u64(w, "pool", t->tier_tokens[KV_TIER_POOL]);
    bt_jw_u64(w, "host", t->tier_tokens[KV_TIER_HOST]);
    bt_jw_u64(w, "disk", t->tier_tokens[KV_TIER_DISK]);
    bt_jw_u64(w, "store", t->tier_tokens[KV_TIER_STORE]);
    bt_jw_close(w, '}');
}

void kn_access_end(const struct kn_serve *s, const struct kn_stream *st, const struct kn_output *o)
{
    struct bt_lines *lines = bt_node_access_log(s->node);
    struct bt_buf b = {.max = 4096};
    struct bt_jsonw w = {.b = &b};
    struct timespec ts;
    char at[40];

    if (!lines) {
        return;
    }
    clock_gettime(CLOCK_REALTIME, &ts);
    bt_lines_time(&ts, at);
    bt_jw_open(&w, NULL, '{');
    bt_jw_str(&w, "time", at);
    bt_jw_str(&w, "id", st->request_id);
    bt_jw_str(&w, "node", s->name);
    bt_jw_str(&w, "leg", leg_names[st->leg]);
    bt_jw_str(&w, "router", st->session ? st->session->router : "");
    bt_jw_str(&w, "peer", st->peer);
    bt_jw_u64(&w, "tokens_in", st->n_prompt);
    bt_jw_u64(&w, "tokens_out", st->n_tokens);
    put_times(&w, st);
    bt_jw_f64(&w, "total_ms", ms(bt_now_ns() - st->came_ns), 3);
    bt_jw_str(&w, "end",
              o->rc < 0                     ? bt_rc_name(o->rc)
              : o->handed_over              ? "handed_over"
              : o->finish == KN_FINISH_STOP ? "stop"
                                            : "length");
    bt_jw_close(&w, '}');
    if (w.rc == BT_OK) {
        bt_lines_add(lines, bt_buf_str(&b));
    }
    bt_buf_fini(&b);
}
