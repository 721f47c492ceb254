/* See access.h. Names come from peers that were greeted; the writer of JSON escapes them. */
#include "kvstore/store/access.h"

#include "common/base/jsonw.h"

#include <stdio.h>

static double ms(uint64_t ns)
{
    return (double)ns / 1e6;
}

void kv_access_write(struct bt_lines *lines, const char *node, const struct kv_relay_passed *p)
{
    struct bt_buf b = {.max = 4096};
    struct bt_jsonw w = {.b = &b};
    struct timespec ts;
    char at[40], id[17];

    if (!lines) {
        return;
    }
    clock_gettime(CLOCK_REALTIME, &ts);
    bt_lines_time(&ts, at);
    snprintf(id, sizeof(id), "%016llx", (unsigned long long)p->id.hi);
    bt_jw_open(&w, NULL, '{');
    bt_jw_str(&w, "time", at);
    bt_jw_str(&w, "id", id);
    bt_jw_str(&w, "node", node);
    bt_jw_str(&w, "leg", "store");
    bt_jw_str(&w, "origin", p->origin);
    bt_jw_str(&w, "peer", p->asker);
    bt_jw_u64(&w, "tokens_in", p->n_tokens);
    bt_jw_u64(&w, "tokens_had", p->n_have);
    bt_jw_u64(&w, "bytes", p->bytes);
    bt_jw_open(&w, "ms", '{');
    bt_jw_f64(&w, "wait", ms(p->wait_ns), 3);
    bt_jw_f64(&w, "move", ms(p->move_ns), 3);
    bt_jw_close(&w, '}');
    bt_jw_f64(&w, "total_ms", ms(p->wait_ns + p->move_ns), 3);
    bt_jw_str(&w, "end", p->rc < 0 ? bt_rc_name(p->rc) : "handed_over");
    bt_jw_close(&w, '}');
    if (w.rc == BT_OK) {
        bt_lines_add(lines, bt_buf_str(&b));
    }
    bt_buf_fini(&b);
}
