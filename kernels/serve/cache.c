/* What routers are told of the cache and of the engine's speed. Runs on the loop thread, but for
 * the sinks.
 *
 * Every change of the cache goes into one log (kvstore/block/events.h), whoever made it: the engine
 * by its notes, other owners of blocks by kn_cache_sink. A session that follows has a cursor in the
 * log and is sent what is behind it, as long as the router reads; who falls out of the log's ring,
 * or has seen nothing yet, is sent a snapshot in parts and goes on behind it. So memory is bounded
 * whatever a router does, and a router that does not follow costs nothing. */
#include "kernels/serve/serve_int.h"

#include "common/base/buf.h"
#include "common/obs/log.h"
#include "common/thr/time.h"

#include <stdlib.h>

#define RING           (1u << 17) /* changes kept; 2 MiB */
#define BATCH          2048       /* changes in a message */
#define SNAPSHOT_BATCH 8192       /* blocks in a part of a snapshot */

_Static_assert((int)BATON__V1__CACHE_CHANGE__CACHE_STORED == (int)KV_EVENT_STORED &&
                   (int)BATON__V1__CACHE_CHANGE__CACHE_REMOVED == (int)KV_EVENT_REMOVED &&
                   (int)BATON__V1__CACHE_CHANGE__CACHE_CLEARED == (int)KV_EVENT_CLEARED,
               "sent as they are");

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

static int send(struct kn_session *ses, Baton__V1__NodeMessage *m)
{
    return bt_rpc_call_send(ses->call, &m->base);
}

static int send_snapshot_part(struct kn_session *ses)
{
    Baton__V1__NodeMessage m = BATON__V1__NODE_MESSAGE__INIT;
    Baton__V1__CacheSnapshot part = BATON__V1__CACHE_SNAPSHOT__INIT;
    struct kv_event_snapshot *snap = &ses->cache.snapshot;
    size_t at = ses->cache.snapshot_at, total = snap->first[KV_EVENT_TIERS], n;
    unsigned tier = 0;
    int rc;

    while (tier + 1 < KV_EVENT_TIERS && at >= snap->first[tier + 1]) {
        tier++;
    }
    n = BT_MIN(snap->first[tier + 1] - at, (size_t)SNAPSHOT_BATCH);
    part.seq = snap->seq;
    part.first = at == 0;
    part.before = at;
    part.last = at + n == total;
    part.tier = (Baton__V1__CacheTier)tier;
    part.n_blocks = n;
    part.blocks = snap->fingerprints + at;
    m.kind_case = BATON__V1__NODE_MESSAGE__KIND_SNAPSHOT;
    m.snapshot = &part;
    rc = send(ses, &m);
    ses->cache.snapshot_at += n;
    if (rc == BT_OK && part.last) {
        ses->cache.seq = snap->seq;
        kn_cache_end(ses);
    }
    return rc;
}

/* Runs of equal kind and tier become one CacheEvent. */
static int send_events(struct kn_session *ses, const struct kv_event *ev, size_t n)
{
    Baton__V1__NodeMessage m = BATON__V1__NODE_MESSAGE__INIT;
    Baton__V1__CacheEvents events = BATON__V1__CACHE_EVENTS__INIT;
    Baton__V1__CacheEvent *runs = bt_calloc(n, sizeof(*runs));
    Baton__V1__CacheEvent **ptrs = bt_calloc(n, sizeof(*ptrs));
    uint64_t *fps = bt_calloc(n, sizeof(*fps));
    size_t n_runs = 0;
    int rc = BT_E_NOMEM;

    if (!runs || !ptrs || !fps) {
        goto out;
    }
    for (size_t i = 0; i < n; i++) {
        Baton__V1__CacheEvent *r = n_runs ? &runs[n_runs - 1] : NULL;

        fps[i] = ev[i].fingerprint;
        if (!r || ev[i].kind == KV_EVENT_CLEARED || (int)r->change != (int)ev[i].kind ||
            (int)r->tier != (int)ev[i].tier) {
            r = ptrs[n_runs] = &runs[n_runs];
            n_runs++;
            baton__v1__cache_event__init(r);
            r->change = (Baton__V1__CacheChange)ev[i].kind;
            r->tier = (Baton__V1__CacheTier)ev[i].tier;
            r->blocks = fps + i;
        }
        r->n_blocks += ev[i].kind != KV_EVENT_CLEARED;
    }
    events.seq = ses->cache.seq + 1;
    events.n_events = n_runs;
    events.events = ptrs;
    m.kind_case = BATON__V1__NODE_MESSAGE__KIND_EVENTS;
    m.events = &events;
    rc = send(ses, &m);
    if (rc == BT_OK) {
        ses->cache.seq += n;
    }
out:
    free(runs);
    free(ptrs);
    free(fps);
    return rc;
}

/* BT_PENDING: nothing is left to send. */
static int pump_one(struct kn_session *ses)
{
    struct kn_serve *s = ses->serve;
    size_t n;

    if (ses->cache.snapshot.fingerprints) {
        return send_snapshot_part(ses);
    }
    if (!kv_event_log_read(s->cache.log, ses->cache.seq, s->cache.batch, BATCH, &n)) {
        ses->cache.snapshot_at = 0;
        return kv_event_log_snapshot(s->cache.log, &ses->cache.snapshot);
    }
    return n == 0 ? BT_PENDING : send_events(ses, s->cache.batch, n);
}

void kn_cache_pump(struct kn_session *ses)
{
    size_t limit = ses->serve->conf->max_queued_bytes / 4;
    int rc = BT_OK;

    while (ses->cache.follows && !ses->closing && rc == BT_OK) {
        if (bt_rpc_call_queued_bytes(ses->call) > limit) {
            if (bt_rpc_call_want_drained(ses->call)) {
                return; /* kn_cache_pump again then */
            }
        }
        rc = pump_one(ses);
    }
    if (rc == BT_E_NOMEM) {
        BT_WARN("cache_events", "router=%s msg=\"no memory, tried again later\"", ses->router);
    } else if (rc < 0) {
        kn_session_send_failed(ses, rc);
    }
}

void kn_cache_follow(struct kn_session *ses, const Baton__V1__CacheFollow *m)
{
    kn_cache_end(ses);
    ses->cache.follows = true;
    ses->cache.seq = m->snapshot ? UINT64_MAX : m->after; /* no such number: a snapshot */
    kn_cache_pump(ses);
}

void kn_cache_end(struct kn_session *ses)
{
    free(ses->cache.snapshot.fingerprints);
    ses->cache.snapshot.fingerprints = NULL;
}

/* Rates of tiers that have not loaded anything yet: low ones, so that somebody tries. */
#define HOST_BYTES_PER_S (1ull << 30)
#define DISK_BYTES_PER_S (200ull << 20)

static uint32_t block_us(uint64_t bytes, uint64_t measured, uint64_t assumed)
{
    return (uint32_t)BT_MIN(bytes * 1000000 / (measured ? measured : assumed) + 1,
                            (uint64_t)UINT32_MAX);
}

static void fill_rates(struct kn_serve *s, struct kn_cache_load *buf)
{
    struct kv_blob_shape shape;
    struct kv_tiers_stats t;
    uint64_t bytes;

    if (s->tiers) {
        shape = kv_blob_shape_of(kv_pool_layout(kn_engine_pool(s->engine)),
                                 (uint32_t)s->conf->block_tokens);
        bytes = (uint64_t)shape.n_layers * shape.layer_bytes;
        t = kv_tiers_stats(s->tiers);
        buf->tiers[KV_TIER_HOST].block_us = block_us(bytes, t.host.bytes_per_s, HOST_BYTES_PER_S);
        buf->tiers[KV_TIER_DISK].block_us = block_us(bytes, t.disk.bytes_per_s, DISK_BYTES_PER_S);
    }
}

/* --- into the load --------------------------------------------------------------------------- */

void kn_cache_fill_load(struct kn_serve *s, struct kn_cache_load *buf, Baton__V1__NodeLoad *m)
{
    uint64_t n = BT_MIN(s->cache.n_samples, (uint64_t)KN_N_SAMPLES);

    m->busy_us = s->cache.busy_us;
    m->cache_seq = kv_event_log_seq(s->cache.log);
    for (unsigned t = 0; t < KV_EVENT_TIERS; t++) {
        struct kv_digest d = kv_event_log_digest(s->cache.log, t);

        baton__v1__cache_tier_state__init(&buf->tiers[t]);
        buf->tiers[t].tier = (Baton__V1__CacheTier)t;
        buf->tiers[t].blocks = d.n;
        buf->tiers[t].sum = d.sum;
        buf->tier_ptrs[t] = &buf->tiers[t];
    }
    fill_rates(s, buf);
    m->n_tiers = KV_EVENT_TIERS;
    m->tiers = buf->tier_ptrs;
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
    int rc = kv_event_log_create(RING, &s->cache.log, err);

    if (rc == BT_OK) {
        s->cache.batch = bt_calloc(BATCH, sizeof(*s->cache.batch));
        rc = s->cache.batch ? BT_OK : BT_FAIL(err, BT_E_NOMEM, "cache events: no memory");
    }
    return rc;
}

void kn_cache_fini(struct kn_serve *s)
{
    kv_event_log_destroy(s->cache.log);
    free(s->cache.batch);
}
