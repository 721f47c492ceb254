/* The set is a hash table from fingerprint to a mask of tiers: open addressing, linear probing,
 * backward-shift deletion. Fingerprints are bits of SHA-256, so they are their own hash. The one
 * that is 0 has a place of its own. */
#include "kvstore/block/events.h"

#include "common/base/buf.h"

#include <stdlib.h>

#define CAP_MIN 64u
#define CAP_MAX (1u << 30)

struct slot {
    uint64_t fp;
    uint8_t tiers; /* bit per tier; 0 = free */
};

struct kv_event_log {
    struct slot *slots;
    uint64_t mask;
    uint64_t n;         /* used slots */
    uint8_t zero_tiers; /* of fingerprint 0 */
    struct kv_digest digests[KV_EVENT_TIERS];
    struct kv_event *ring;
    uint64_t ring_mask;
    uint64_t seq;
};

int kv_event_log_create(uint32_t ring, struct kv_event_log **ret_log, struct bt_err *err)
{
    struct kv_event_log *log = bt_calloc(1, sizeof(*log));
    uint64_t n = 16;

    if (log) {
        while (n < ring) {
            n *= 2;
        }
        log->ring_mask = n - 1;
        log->ring = bt_calloc(n, sizeof(*log->ring));
        log->slots = bt_calloc(CAP_MIN, sizeof(*log->slots));
        log->mask = CAP_MIN - 1;
    }
    if (!log || !log->ring || !log->slots) {
        kv_event_log_destroy(log);
        return BT_FAIL(err, BT_E_NOMEM, "cache events: no memory");
    }
    *ret_log = log;
    return BT_OK;
}

void kv_event_log_destroy(struct kv_event_log *log)
{
    if (log) {
        free(log->slots);
        free(log->ring);
        free(log);
    }
}

/* ---- the set ---- */

static uint64_t home(const struct kv_event_log *log, uint64_t fp)
{
    return fp & log->mask;
}

/* The slot of fp, or the free one where it would go. */
static struct slot *find(const struct kv_event_log *log, uint64_t fp)
{
    uint64_t i = home(log, fp);

    while (log->slots[i].tiers && log->slots[i].fp != fp) {
        i = (i + 1) & log->mask;
    }
    return &log->slots[i];
}

static int grow(struct kv_event_log *log)
{
    struct slot *old = log->slots;
    uint64_t cap = log->mask + 1;

    if (cap >= CAP_MAX) {
        return BT_E_NOMEM;
    }
    log->slots = bt_calloc(2 * cap, sizeof(*log->slots));
    if (!log->slots) {
        log->slots = old;
        return BT_E_NOMEM;
    }
    log->mask = 2 * cap - 1;
    for (uint64_t i = 0; i < cap; i++) {
        if (old[i].tiers) {
            *find(log, old[i].fp) = old[i];
        }
    }
    free(old);
    return BT_OK;
}

static void take_out(struct kv_event_log *log, struct slot *s)
{
    uint64_t hole = (uint64_t)(s - log->slots);

    for (uint64_t i = (hole + 1) & log->mask; log->slots[i].tiers; i = (i + 1) & log->mask) {
        /* It may move into the hole if that is not before its home. */
        if (((i - home(log, log->slots[i].fp)) & log->mask) >= ((i - hole) & log->mask)) {
            log->slots[hole] = log->slots[i];
            hole = i;
        }
    }
    log->slots[hole] = (struct slot){0};
    log->n--;
}

static uint8_t tiers_of(const struct kv_event_log *log, uint64_t fp)
{
    return fp ? find(log, fp)->tiers : log->zero_tiers;
}

/* Sets the mask of fp. */
static int put(struct kv_event_log *log, uint64_t fp, uint8_t tiers)
{
    struct slot *s;

    if (fp == 0) {
        log->zero_tiers = tiers;
        return BT_OK;
    }
    if (tiers && 4 * (log->n + 1) > 3 * (log->mask + 1)) {
        int rc = grow(log);

        if (rc < 0) {
            return rc;
        }
    }
    s = find(log, fp);
    if (!s->tiers && tiers) {
        log->n++;
    } else if (s->tiers && !tiers) {
        take_out(log, s);
        return BT_OK;
    }
    *s = (struct slot){tiers ? fp : 0, tiers};
    return BT_OK;
}

static void clear(struct kv_event_log *log, unsigned tier)
{
    uint8_t bit = (uint8_t)(1u << tier);
    uint64_t i = 0;

    log->zero_tiers &= (uint8_t)~bit;
    while (i <= log->mask) {
        struct slot *s = &log->slots[i];

        if (s->tiers == bit) {
            take_out(log, s); /* another one may have come here: look again */
        } else {
            s->tiers &= (uint8_t)~bit;
            i++;
        }
    }
    log->digests[tier] = (struct kv_digest){0, 0};
}

/* ---- changes ---- */

static void number(struct kv_event_log *log, const struct kv_event *ev)
{
    log->seq++;
    log->ring[log->seq & log->ring_mask] = *ev;
}

static int add_one(struct kv_event_log *log, const struct kv_event *ev)
{
    struct kv_digest *d = &log->digests[ev->tier];
    uint8_t bit = (uint8_t)(1u << ev->tier), had = tiers_of(log, ev->fingerprint);
    bool stored = ev->kind == KV_EVENT_STORED;
    int rc;

    if (stored == ((had & bit) != 0)) {
        return BT_OK;
    }
    rc = put(log, ev->fingerprint, (uint8_t)(had ^ bit));
    if (rc < 0) {
        return rc;
    }
    d->n += stored ? 1 : (uint64_t)-1;
    d->sum += stored ? ev->fingerprint : -ev->fingerprint;
    number(log, ev);
    return BT_OK;
}

int kv_event_log_add(struct kv_event_log *log, const struct kv_event *ev)
{
    BT_BUG_ON(ev->tier >= KV_EVENT_TIERS);
    if (ev->kind != KV_EVENT_CLEARED) {
        return add_one(log, ev);
    }
    if (log->digests[ev->tier].n > 0) {
        clear(log, ev->tier);
        number(log, &(struct kv_event){0, KV_EVENT_CLEARED, ev->tier});
    }
    return BT_OK;
}

uint64_t kv_event_log_seq(const struct kv_event_log *log)
{
    return log->seq;
}

struct kv_digest kv_event_log_digest(const struct kv_event_log *log, unsigned tier)
{
    BT_BUG_ON(tier >= KV_EVENT_TIERS);
    return log->digests[tier];
}

bool kv_event_log_read(
    const struct kv_event_log *log, uint64_t after, struct kv_event *ret, size_t max, size_t *ret_n)
{
    uint64_t n = log->seq - after;

    if (after > log->seq || n > log->ring_mask + 1) {
        return false;
    }
    n = BT_MIN(n, (uint64_t)max);
    for (uint64_t i = 0; i < n; i++) {
        ret[i] = log->ring[(after + 1 + i) & log->ring_mask];
    }
    *ret_n = (size_t)n;
    return true;
}

int kv_event_log_snapshot(const struct kv_event_log *log, struct kv_event_snapshot *ret)
{
    size_t at[KV_EVENT_TIERS], n = 0;

    for (unsigned t = 0; t < KV_EVENT_TIERS; t++) {
        ret->first[t] = at[t] = n;
        n += log->digests[t].n;
    }
    ret->first[KV_EVENT_TIERS] = n;
    ret->seq = log->seq;
    ret->fingerprints = bt_calloc(n + 1, sizeof(*ret->fingerprints));
    if (!ret->fingerprints) {
        return BT_E_NOMEM;
    }
    for (uint64_t i = 0; i <= log->mask; i++) {
        for (unsigned t = 0; t < KV_EVENT_TIERS; t++) {
            if (log->slots[i].tiers & 1u << t) {
                ret->fingerprints[at[t]++] = log->slots[i].fp;
            }
        }
    }
    for (unsigned t = 0; t < KV_EVENT_TIERS; t++) {
        if (log->zero_tiers & 1u << t) {
            ret->fingerprints[at[t]++] = 0;
        }
    }
    return BT_OK;
}
