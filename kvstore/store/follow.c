/* See follow.h. */
#include "kvstore/store/follow.h"

#include "common/base/buf.h"
#include "kvstore/block/event_msg.h"

#include <stdlib.h>

#define BATCH          2048 /* changes in a message */
#define SNAPSHOT_BATCH 8192 /* blocks in a part of a snapshot */

static int send_snapshot_part(struct kv_follow *f)
{
    Baton__V1__NodeMessage m = BATON__V1__NODE_MESSAGE__INIT;
    Baton__V1__CacheSnapshot part = BATON__V1__CACHE_SNAPSHOT__INIT;
    int rc;

    kv_event_msg_part(&f->snapshot, f->snapshot_at, SNAPSHOT_BATCH, &part);
    m.kind_case = BATON__V1__NODE_MESSAGE__KIND_SNAPSHOT;
    m.snapshot = &part;
    rc = bt_rpc_call_send(f->call, &m.base);
    f->snapshot_at += part.n_blocks;
    if (rc == BT_OK && part.last) {
        f->seq = part.seq;
        kv_follow_end(f);
    }
    return rc;
}

static int send_events(struct kv_follow *f, const struct kv_event *ev, size_t n)
{
    Baton__V1__NodeMessage m = BATON__V1__NODE_MESSAGE__INIT;
    Baton__V1__CacheEvents events = BATON__V1__CACHE_EVENTS__INIT;
    struct kv_event_room room = {bt_calloc(n, sizeof(*room.runs)), bt_calloc(n, sizeof(*room.ptrs)),
                                 bt_calloc(n, sizeof(*room.fingerprints))};
    int rc = BT_E_NOMEM;

    if (!room.runs || !room.ptrs || !room.fingerprints) {
        goto out;
    }
    kv_event_msg_fill(ev, n, &room, &events);
    events.seq = f->seq + 1;
    m.kind_case = BATON__V1__NODE_MESSAGE__KIND_EVENTS;
    m.events = &events;
    rc = bt_rpc_call_send(f->call, &m.base);
    if (rc == BT_OK) {
        f->seq += n;
    }
out:
    free(room.runs);
    free(room.ptrs);
    free(room.fingerprints);
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
    kv_event_msg_digests(log, buf->at, buf->ptrs, m);
}
