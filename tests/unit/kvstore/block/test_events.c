/* The log of cache changes: what is numbered, digests, the ring, snapshots; a follower that applies
 * the changes has the same set, whatever happened. */
#include "kvstore/block/events.h"

#include "common/base/buf.h"
#include "tests/unit/cmocka.h"

#include <stdlib.h>

#define N_FP 3000

static struct kv_event_log *make(uint32_t ring)
{
    struct kv_event_log *log = NULL;

    assert_int_equal(kv_event_log_create(ring, &log, NULL), BT_OK);
    return log;
}

static void add(struct kv_event_log *log, enum kv_event_kind kind, unsigned tier, uint64_t fp)
{
    struct kv_event ev = {fp, (uint8_t)kind, (uint8_t)tier};

    assert_int_equal(kv_event_log_add(log, &ev), BT_OK);
}

static void assert_digest(const struct kv_event_log *log, unsigned tier, uint64_t n, uint64_t sum)
{
    struct kv_digest d = kv_event_log_digest(log, tier);

    assert_true(d.n == n);
    assert_true(d.sum == sum);
}

static void test_numbers_and_digest(void **state)
{
    struct kv_event_log *log = make(16);

    add(log, KV_EVENT_STORED, 0, 5);
    add(log, KV_EVENT_STORED, 0, 5); /* nothing new */
    add(log, KV_EVENT_STORED, 1, 5);
    add(log, KV_EVENT_STORED, 0, 0); /* zero is a fingerprint like any other */
    add(log, KV_EVENT_REMOVED, 0, 6);
    assert_true(kv_event_log_seq(log) == 3);
    assert_digest(log, 0, 2, 5);
    assert_digest(log, 1, 1, 5);
    add(log, KV_EVENT_REMOVED, 0, 5);
    assert_digest(log, 0, 1, 0);
    add(log, KV_EVENT_CLEARED, 0, 0);
    add(log, KV_EVENT_CLEARED, 0, 0); /* is clear */
    assert_true(kv_event_log_seq(log) == 5);
    assert_digest(log, 0, 0, 0);
    assert_digest(log, 1, 1, 5);
    kv_event_log_destroy(log);
}

static void test_ring(void **state)
{
    struct kv_event_log *log = make(16);
    struct kv_event ev[32];
    size_t n = 99;

    assert_true(kv_event_log_read(log, 0, ev, 32, &n));
    assert_int_equal(n, 0);
    assert_false(kv_event_log_read(log, 1, ev, 32, &n)); /* from the future */
    for (uint64_t i = 1; i <= 20; i++) {
        add(log, KV_EVENT_STORED, 0, i);
    }
    assert_false(kv_event_log_read(log, 3, ev, 32, &n)); /* number 4 is overwritten */
    assert_true(kv_event_log_read(log, 4, ev, 32, &n));
    assert_int_equal(n, 16);
    assert_true(ev[0].fingerprint == 5 && ev[15].fingerprint == 20);
    assert_true(kv_event_log_read(log, 17, ev, 2, &n));
    assert_int_equal(n, 2);
    assert_true(ev[0].fingerprint == 18 && ev[1].fingerprint == 19);
    kv_event_log_destroy(log);
}

/* Applies a change to plain arrays. */
static void apply(uint8_t *tiers, const uint64_t *fps, const struct kv_event *ev)
{
    for (int i = 0; i < N_FP; i++) {
        if (ev->kind == KV_EVENT_CLEARED) {
            tiers[i] &= (uint8_t) ~(1u << ev->tier);
        } else if (fps[i] == ev->fingerprint) {
            tiers[i] = ev->kind == KV_EVENT_STORED ? (uint8_t)(tiers[i] | 1u << ev->tier)
                                                   : (uint8_t)(tiers[i] & ~(1u << ev->tier));
        }
    }
}

static void assert_same(const struct kv_event_log *log, const uint8_t *tiers, const uint64_t *fps)
{
    struct kv_event_snapshot snap;
    uint8_t *seen = bt_calloc(N_FP, 1);

    assert_non_null(seen);
    assert_int_equal(kv_event_log_snapshot(log, &snap), BT_OK);
    assert_true(snap.seq == kv_event_log_seq(log));
    for (unsigned t = 0; t < KV_EVENT_TIERS; t++) {
        uint64_t sum = 0;

        for (size_t i = snap.first[t]; i < snap.first[t + 1]; i++) {
            sum += snap.fingerprints[i];
            for (int k = 0; k < N_FP; k++) {
                seen[k] |= fps[k] == snap.fingerprints[i] ? (uint8_t)(1u << t) : 0;
            }
        }
        assert_digest(log, t, snap.first[t + 1] - snap.first[t], sum);
    }
    assert_memory_equal(seen, tiers, N_FP);
    free(snap.fingerprints);
    free(seen);
}

/* A follower reads the ring in pieces; its set, the snapshot and the digests stay equal. */
static void test_follower_agrees(void **state)
{
    struct kv_event_log *log = make(4096);
    uint64_t *fps = bt_calloc(N_FP, sizeof(*fps)), x = 1, at = 0;
    uint8_t *tiers = bt_calloc(N_FP, 1);
    struct kv_event ev[100];

    assert_true(fps && tiers);
    for (int i = 1; i < N_FP; i++) { /* the first is 0; some share the low bits: long runs */
        x = x * 6364136223846793005ull + 1442695040888963407ull;
        fps[i] = i % 3 ? x : x << 20 | 63;
    }
    for (int round = 0; round < 60; round++) {
        size_t n;

        for (int i = 0; i < 300; i++) {
            x = x * 6364136223846793005ull + 1442695040888963407ull;
            add(log, x >> 62 ? KV_EVENT_STORED : KV_EVENT_REMOVED, (x >> 60) & 3,
                fps[(x >> 33) % N_FP]);
        }
        if (round % 20 == 19) {
            add(log, KV_EVENT_CLEARED, (unsigned)round / 20, 0);
        }
        do {
            assert_true(kv_event_log_read(log, at, ev, 100, &n));
            for (size_t i = 0; i < n; i++) {
                apply(tiers, fps, &ev[i]);
            }
            at += n;
        } while (n > 0);
        if (round % 10 == 9) {
            assert_same(log, tiers, fps);
        }
    }
    kv_event_log_destroy(log);
    free(fps);
    free(tiers);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_numbers_and_digest),
        cmocka_unit_test(test_ring),
        cmocka_unit_test(test_follower_agrees),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
