/* What routers are told of the cache and of the engine's speed. Runs on the loop thread, but for
 * the sinks.
 *
 * Every change of the cache goes into one log (kvstore/block/events.h), whoever made it: the engine
 * by its notes, other owners of blocks by kn_cache_sink. Sessions follow it
 * (kvstore/store/follow.h).
 */
#include "kernels/serve/serve_int.h"

#include "common/base/buf.h"
#include "common/obs/log.h"
#include "common/thr/time.h"

#include <stdlib.h>

#define RING (1u << 17) /* changes kept; 2 MiB */

/* --- into the log ---------------------------------------------------------------------------- */

static void add(struct kn_serve *s, const struct kv_event *ev)
{
    if (kv_event_log_add(s->cache.log, ev) < 0) {
        BT_WARN("cache_log", "msg=\"no memory: a cached block stays unknown to routers\"");
    }
}

static void pump_all(struct kn_serve *s)
{
    bt_list_for_each_safe (it, &s->sessions) {
        kn_cache_pump(BT_LIST_ENTRY(it, struct kn_session, link));
    }
}

static void on_note(struct bt_msg *msg, void *consumer)
{
    struct kn_note *note = BT_CONTAINER_OF(msg, struct kn_note, msg);
    struct kn_serve *s = consumer;

    for (size_t i = 0; i < note->n_events; i++) {
        add(s, &note->events[i]);
    }
    s->cache.busy_us += note->sample.us;
    if (note->sample.us > 0) {
        s->cache.samples[s->cache.n_samples++ % KN_N_SAMPLES] = note->sample;
    }
    if (note->n_events > 0) {
        pump_all(s);
    }
    free(note);
}

void kn_cache_note(void *arg, struct kn_note *take_note)
{
    struct kn_serve *s = arg;

    take_note->msg.handle = on_note;
    if (!bt_mailbox_push(&s->steps, &take_note->msg)) {
        free(take_note); /* closed: the loop has ended */
    }
}

void kn_cache_drop(struct bt_msg *msg)
{
    free(BT_CONTAINER_OF(msg, struct kn_note, msg));
}

static void tell(void *arg, const struct kv_event *ev)
{
    struct kn_note *note = malloc(sizeof(*note) + sizeof(*ev));

    if (note) { /* else the block stays unknown, or is believed in until its tier is cleared */
        *note = (struct kn_note){.n_events = 1};
        bt_list_init(&note->msg.link);
        note->events[0] = *ev;
        kn_cache_note(arg, note);
    }
}

struct kv_event_sink kn_cache_sink(struct kn_serve *s)
{
    return (struct kv_event_sink){tell, s};
}

/* --- to the sessions ------------------------------------------------------------------------- */

void kn_cache_pump(struct kn_session *ses)
{
    int rc = ses->closing ? BT_OK : kv_follow_pump(&ses->follow);

    if (rc == BT_E_NOMEM) {
        BT_WARN("cache_events", "router=%s msg=\"no memory, tried again later\"", ses->router);
    } else if (rc < 0) {
        kn_session_send_failed(ses, rc);
    }
}

void kn_cache_follow(struct kn_session *ses, const Baton__V1__CacheFollow *m)
{
    kv_follow_begin(&ses->follow, m);
    kn_cache_pump(ses);
}

/* Rates of tiers that have not loaded anything yet: low ones, so that somebody tries. */
#define HOST_BYTES_PER_S  (1ull << 30)
#define DISK_BYTES_PER_S  (200ull << 20)
#define STORE_BYTES_PER_S (1ull << 30) /* as the source itself guesses: every node is tried */

static uint32_t block_us(uint64_t bytes, uint64_t measured, uint64_t assumed)
{
    return (uint32_t)BT_MIN(bytes * 1000000 / (measured ? measured : assumed) + 1,
                            (uint64_t)UINT32_MAX);
}

static void fill_rates(struct kn_serve *s, Baton__V1__CacheTierState tiers[KV_EVENT_TIERS])
{
    struct kv_blob_shape shape;
    struct kv_tiers_stats t;
    uint64_t bytes;

    if (!s->tiers) {
        return;
    }
    shape = kv_blob_shape_of(kv_pool_layout(kn_engine_pool(s->engine)),
                             (uint32_t)s->conf->block_tokens);
    bytes = (uint64_t)shape.n_layers * shape.layer_bytes;
    t = kv_tiers_stats(s->tiers);
    tiers[KV_TIER_HOST].block_us = block_us(bytes, t.host.bytes_per_s, HOST_BYTES_PER_S);
    tiers[KV_TIER_DISK].block_us = block_us(bytes, t.disk.bytes_per_s, DISK_BYTES_PER_S);
    if (s->store && bt_blockmap_up(s->blockmap)) { /* else nothing is found there */
        tiers[KV_TIER_STORE].block_us =
            block_us(bytes, kv_client_stats(s->store).bytes_per_s, STORE_BYTES_PER_S);
    }
}

/* --- into the load --------------------------------------------------------------------------- */

void kn_cache_fill_load(struct kn_serve *s, struct kn_cache_load *buf, Baton__V1__NodeLoad *m)
{
    uint64_t n = BT_MIN(s->cache.n_samples, (uint64_t)KN_N_SAMPLES);

    m->busy_us = s->cache.busy_us;
    kv_follow_fill_load(s->cache.log, &buf->tiers, m);
    fill_rates(s, buf->tiers.at);
    for (uint64_t i = 0; i < n; i++) {
        const struct kn_step_sample *from =
            &s->cache.samples[(s->cache.n_samples - n + i) % KN_N_SAMPLES];
        Baton__V1__StepSample *to = &buf->samples[i];

        baton__v1__step_sample__init(to);
        to->prompt_tokens = from->prompt_tokens;
        to->prompt_work = from->prompt_work;
        to->rows = from->rows;
        to->row_work = from->row_work;
        to->us = from->us;
        buf->sample_ptrs[i] = to;
    }
    m->n_steps = (size_t)n;
    m->steps = buf->sample_ptrs;
}

int kn_cache_init(struct kn_serve *s, struct bt_err *err)
{
    return kv_event_log_create(RING, &s->cache.log, err);
}

void kn_cache_fini(struct kn_serve *s)
{
    kv_event_log_destroy(s->cache.log);
}
