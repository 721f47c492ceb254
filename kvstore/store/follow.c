/* See follow.h. */
#include "kvstore/store/follow.h"

#include "common/base/buf.h"

#include <stdlib.h>

#define BATCH          2048 /* changes in a message */
#define SNAPSHOT_BATCH 8192 /* blocks in a part of a snapshot */

_Static_assert((int)BATON__V1__CACHE_CHANGE__CACHE_STORED == (int)KV_EVENT_STORED &&
                   (int)BATON__V1__CACHE_CHANGE__CACHE_REMOVED == (int)KV_EVENT_REMOVED &&
                   (int)BATON__V1__CACHE_CHANGE__CACHE_CLEARED == (int)KV_EVENT_CLEARED,
               "sent as they are");

static int send_snapshot_part(struct kv_follow *f)
{
    Baton__V1__NodeMessage m = BATON__V1__NODE_MESSAGE__INIT;
    Baton__V1__CacheSnapshot part = BATON__V1__CACHE_SNAPSHOT__INIT;
    struct kv_event_snapshot *snap = &f->snapshot;
    size_t at = f->snapshot_at, total = snap->first[KV_EVENT_TIERS], n;
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
    rc = bt_rpc_call_send(f->call, &m.base);
    f->snapshot_at += n;
    if (rc == BT_OK && part.last) {
        f->seq = snap->seq;
        kv_follow_end(f);
    }
    return rc;
}

/* Runs of equal kind and tier become one CacheEvent. */
static int send_events(struct kv_follow *f, const struct kv_event *ev, size_t n)
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
    events.seq = f->seq + 1;
    events.n_events = n_runs;
    events.events = ptrs;
    m.kind_case = BATON__V1__NODE_MESSAGE__KIND_EVENTS;
    m.events = &events;
    rc = bt_rpc_call_send(f->call, &m.base);
    if (rc == BT_OK) {
        f->seq += n;
    }
out:
    free(runs);
    free(ptrs);
    free(fps);
    return rc;
}

static int pump_one(struct kv_follow *f, struct kv_event batch[BATCH])
{
    size_t n;

    if (f->snapshot.fingerprints) {
        return send_snapshot_part(f);
    }
    if (!kv_event_log_read(f->log, f->seq, batch, BATCH, &n)) {
        f->snapshot_at = 0;
        return kv_event_log_snapshot(f->log, &f->snapshot);
    }
    return send_events(f, batch, n);
}

static bool has_all(const struct kv_follow *f)
{
    return !f->snapshot.fingerprints && f->seq == kv_event_log_seq(f->log);
}

int kv_follow_pump(struct kv_follow *f)
{
    struct kv_event *batch;
    int rc = BT_OK;

    if (!f->on || has_all(f)) {
        return BT_OK;
    }
    batch = bt_calloc(BATCH, sizeof(*batch));
    if (!batch) {
        return BT_E_NOMEM;
    }
    while (rc == BT_OK && !has_all(f)) {
        if (bt_rpc_call_queued_bytes(f->call) > f->most_queued &&
            bt_rpc_call_want_drained(f->call)) {
            break; /* again then */
        }
        rc = pump_one(f, batch);
    }
    free(batch);
    return rc;
}

void kv_follow_begin(struct kv_follow *f, const Baton__V1__CacheFollow *m)
{
    kv_follow_end(f);
    f->on = true;
    f->seq = m->snapshot ? UINT64_MAX : m->after; /* no such number: a snapshot */
}

void kv_follow_end(struct kv_follow *f)
{
    free(f->snapshot.fingerprints);
    f->snapshot.fingerprints = NULL;
}

void kv_follow_fill_load(const struct kv_event_log *log,
                         struct kv_follow_tiers *buf,
                         Baton__V1__NodeLoad *m)
{
    m->cache_seq = kv_event_log_seq(log);
    for (unsigned t = 0; t < KV_EVENT_TIERS; t++) {
        struct kv_digest d = kv_event_log_digest(log, t);

        baton__v1__cache_tier_state__init(&buf->at[t]);
        buf->at[t].tier = (Baton__V1__CacheTier)t;
        buf->at[t].blocks = d.n;
        buf->at[t].sum = d.sum;
        buf->ptrs[t] = &buf->at[t];
    }
    m->n_tiers = KV_EVENT_TIERS;
    m->tiers = buf->ptrs;
}
