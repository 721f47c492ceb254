/* The node's host memory and disk as sources of the engine: life, and what routers hear of them.
 *
 * Made after the engine's pool and before the engine starts; they go when the engine has stopped,
 * after what is only in memory was written to disk. Their events come from their own thread and go
 * into the log that routers follow (cache.c). */
#include "kernels/serve/serve_int.h"

#include "common/obs/log.h"
#include "common/thr/time.h"

#include <stdlib.h>

#define FLUSH_NS (10 * BT_NS_PER_S)
#define HELD     512 /* blocks listed at a time */

static struct kn_note *make_note(size_t n)
{
    struct kn_note *note = malloc(sizeof(*note) + n * sizeof(*note->events));

    if (note) {
        *note = (struct kn_note){.n_events = n};
        bt_list_init(&note->msg.link);
    }
    return note;
}

/* [tier-event] Everything anew: changes were lost. */
static void tell_all(struct kn_serve *s)
{
    struct kv_tiers_held held[HELD];
    struct kn_note *note = make_note(2);
    uint64_t cursor = 0;

    if (!note) {
        return; /* routers believe in what may be gone: a miss on the node */
    }
    note->events[0] = (struct kv_event){.kind = KV_EVENT_CLEARED, .tier = KV_TIER_HOST};
    note->events[1] = (struct kv_event){.kind = KV_EVENT_CLEARED, .tier = KV_TIER_DISK};
    kn_cache_note(s, note);
    do {
        size_t n = kv_tiers_held(s->tiers, &cursor, held, HELD);

        note = n > 0 ? make_note(n) : NULL;
        for (size_t i = 0; note && i < n; i++) {
            note->events[i] = (struct kv_event){kv_key_fingerprint(&held[i].key), KV_EVENT_STORED,
                                                (uint8_t)held[i].tier};
        }
        if (note) {
            kn_cache_note(s, note);
        }
    } while (cursor != 0);
}

/* [tier-event] */
static void on_events(void *arg, const struct kv_tiers_event *ev, size_t n)
{
    struct kn_serve *s = arg;
    struct kn_note *note = make_note(n);
    size_t k = 0;
    bool lost = !note;

    kn_store_events(s, ev, n);
    for (size_t i = 0; i < n && note; i++) {
        lost |= ev[i].kind == KV_TIERS_LOST;
        if (ev[i].kind != KV_TIERS_LOST) {
            note->events[k++] = (struct kv_event){kv_key_fingerprint(&ev[i].key),
                                                  ev[i].kind == KV_TIERS_STORED ? KV_EVENT_STORED
                                                                                : KV_EVENT_REMOVED,
                                                  (uint8_t)ev[i].tier};
        }
    }
    if (note) {
        note->n_events = k;
        kn_cache_note(s, note);
    }
    if (lost) {
        tell_all(s);
    }
}

int kn_tiers_open(struct kn_serve *s, struct bt_err *err)
{
    const struct kn_serve_conf *c = s->conf;
    struct kv_tiers_cfg cfg = {.conf = &c->tiers, .events = on_events, .arg = s};
    int rc;

    if (!c->prefix_cache || c->tiers.host_bytes == 0) {
        return BT_OK;
    }
    if (c->store) {
        cfg.mem = &bt_mem_host; /* others of this host read it in place */
    }
    cfg.shape =
        kv_blob_shape_of(kv_pool_layout(kn_engine_pool(s->engine)), (uint32_t)c->block_tokens);
    rc = kv_tiers_create(&cfg, &s->tiers, err);
    if (rc == BT_OK) {
        kn_engine_add_source(s->engine, kv_tiers_source(s->tiers), true);
    }
    return rc;
}

void kn_tiers_close(struct kn_serve *s)
{
    if (s->tiers && s->conf->tiers.disk_path[0]) {
        kv_tiers_flush(s->tiers, bt_deadline_ns(FLUSH_NS));
    }
    kv_tiers_destroy(s->tiers);
    s->tiers = NULL;
}
