/* The router's prefix index against a plain model: changes, views, guesses, sweeps, runs, bytes. */
#include "router/index/index.h"

#include "common/base/buf.h"
#include "tests/unit/cmocka.h"

#include <stdlib.h>

#define N_FP    400
#define N_VIEWS 40

static uint64_t rnd(uint64_t *x)
{
    *x = *x * 6364136223846793005ull + 1442695040888963407ull;
    return *x >> 33;
}

static struct rt_index *make(void)
{
    struct rt_index *x = NULL;

    assert_int_equal(rt_index_create(&x, NULL), BT_OK);
    return x;
}

static uint16_t open_view(struct rt_index *x)
{
    uint16_t v = RT_VIEW_NONE;

    assert_int_equal(rt_index_open(x, &v), BT_OK);
    return v;
}

static void
put(struct rt_index *x, uint16_t view, enum kv_event_kind kind, unsigned tier, uint64_t fp)
{
    struct kv_event ev = {fp, (uint8_t)kind, (uint8_t)tier};

    assert_int_equal(rt_index_apply(x, view, &ev, 1), BT_OK);
}

static const struct rt_run *run_of(const struct rt_run *runs, size_t n, uint16_t view)
{
    for (size_t i = 0; i < n; i++) {
        if (runs[i].view == view) {
            return &runs[i];
        }
    }
    return NULL;
}

/* A node chooses its fingerprints so that a known multiplier would send all to one place: more than
 * 10^11 steps, if the multiplier were not secret. */
static void test_fingerprints_of_a_liar(void **state)
{
    enum { N = 600000, BATCH = 500 };
    struct rt_index *x = make();
    uint16_t v = open_view(x);
    const uint64_t golden = 0x9e3779b97f4a7c15ull;
    uint64_t inverse = golden; /* by Newton: five steps for 64 bits */
    struct kv_event ev[BATCH];

    for (int i = 0; i < 6; i++) {
        inverse *= 2 - golden * inverse;
    }
    assert_true(inverse * golden == 1);
    for (unsigned lie = 0; lie < 2; lie++) { /* undone, and plain small numbers */
        for (uint64_t i = 0; i < N; i += BATCH) {
            for (uint64_t k = 0; k < BATCH; k++) {
                ev[k] = (struct kv_event){(i + k + 1) * (lie ? 1 : inverse), KV_EVENT_STORED, 0};
            }
            assert_int_equal(rt_index_apply(x, v, ev, BATCH), BT_OK);
        }
    }
    assert_true(rt_index_digest(x, v, 0).n >= 2 * N - 2);
    rt_index_destroy(x);
}

static void test_runs_by_tier(void **state)
{
    struct rt_index *x = make();
    uint16_t a = open_view(x), b = open_view(x), c = open_view(x);
    const uint64_t fps[] = {11, 12, 13, 14, 15, 16};
    /* a: pool pool host pool disk -; b: disk, then everything in the pool but the second; c: only
     * the second. */
    static const int a_tier[] = {0, 0, 1, 0, 2};
    const struct rt_run *runs, *r;
    size_t n;

    for (int i = 0; i < 5; i++) {
        put(x, a, KV_EVENT_STORED, (unsigned)a_tier[i], fps[i]);
    }
    put(x, a, KV_EVENT_STORED, 2, fps[0]); /* also on disk: the pool counts */
    put(x, b, KV_EVENT_STORED, 2, fps[0]);
    put(x, b, KV_EVENT_STORED, 0, fps[2]);
    put(x, c, KV_EVENT_STORED, 0, fps[1]);
    runs = rt_index_look(x, fps, 6, &n);
    assert_int_equal(n, 2);
    r = run_of(runs, n, a);
    assert_non_null(r);
    assert_int_equal(r->upto[0], 2);
    assert_int_equal(r->upto[1], 4);
    assert_int_equal(r->upto[2], 5);
    assert_int_equal(r->slow[1], 1);
    assert_int_equal(r->slow[2], 1);
    assert_int_equal(r->host_in_disk, 1);
    r = run_of(runs, n, b);
    assert_non_null(r);
    assert_int_equal(r->upto[0], 0);
    assert_int_equal(r->upto[1], 0);
    assert_int_equal(r->upto[2], 1);
    rt_index_look(x, fps + 5, 1, &n);
    assert_int_equal(n, 0);
    rt_index_look(x, fps, 0, &n);
    assert_int_equal(n, 0);
    rt_index_destroy(x);
}

static const struct rt_run *look_for(struct rt_index *x, const uint64_t fps[6], uint16_t view)
{
    size_t n;
    const struct rt_run *runs = rt_index_look(x, fps, 6, &n);

    return run_of(runs, n, view);
}

/* What others share goes on where a view's own run ends; pools and guesses are nobody else's. */
static void test_runs_into_the_store(void **state)
{
    struct rt_index *x = make();
    uint16_t a = open_view(x), d = open_view(x), e = open_view(x);
    const uint64_t fps[] = {11, 12, 13, 14, 15, 16};
    const struct rt_run *r;
    size_t n;

    put(x, a, KV_EVENT_STORED, 0, fps[0]);
    put(x, a, KV_EVENT_STORED, 1, fps[1]);
    put(x, d, KV_EVENT_STORED, 1, fps[0]); /* not the second */
    put(x, d, KV_EVENT_STORED, 2, fps[2]);
    put(x, e, KV_EVENT_STORED, 1, fps[3]);
    put(x, e, KV_EVENT_STORED, 0, fps[4]);
    assert_int_equal(rt_index_guess(x, e, fps + 4, 1), BT_OK);
    r = look_for(x, fps, a);
    assert_int_equal(r->store, 0); /* nobody shares yet */
    assert_int_equal(rt_index_looked_store(x), 0);
    rt_index_share(x, d, true);
    rt_index_share(x, e, true);
    r = look_for(x, fps, a);
    assert_int_equal(r->upto[2], 2);
    assert_int_equal(r->store, 2); /* the third of d, the fourth of e; not e's pool */
    assert_int_equal(rt_index_looked_store(x), 1);
    put(x, d, KV_EVENT_STORED, 1, fps[1]);
    rt_index_look(x, fps, 6, &n);
    assert_int_equal(rt_index_looked_store(x), 4);
    rt_index_share(x, e, false);
    r = look_for(x, fps, a);
    assert_int_equal(r->store, 1);
    rt_index_withdraw(x, e, fps + 4, 1);
    rt_index_close(x, d); /* with it, what it shared */
    r = look_for(x, fps, a);
    assert_int_equal(r->store, 0);
    rt_index_destroy(x);
}

static void test_guesses_are_counted(void **state)
{
    struct rt_index *x = make();
    uint16_t v = open_view(x);
    const uint64_t fps[] = {0, 2, 3}; /* zero is a fingerprint like any other */
    const struct rt_run *r;
    size_t n;

    assert_int_equal(rt_index_guess(x, v, fps, 3), BT_OK);
    assert_int_equal(rt_index_guess(x, v, fps, 2), BT_OK);
    put(x, v, KV_EVENT_STORED, 0, 0);
    r = rt_index_look(x, fps, 3, &n);
    assert_int_equal(n, 1);
    assert_int_equal(r->upto[0], 3);
    assert_int_equal(r->guessed, 2);
    assert_true(rt_index_digest(x, v, 0).n == 1); /* guesses are no part of it */
    rt_index_withdraw(x, v, fps, 3);
    r = rt_index_look(x, fps, 3, &n);
    assert_int_equal(r->upto[0], 2);
    rt_index_withdraw(x, v, fps, 2);
    r = rt_index_look(x, fps, 3, &n);
    assert_int_equal(r->upto[0], 1); /* what was stored stays */
    assert_int_equal(r->guessed, 0);
    assert_true(rt_index_stats(x).entries == 1);
    assert_true(rt_index_stats(x).guesses == 0);
    rt_index_destroy(x);
}

/* Guesses of a closed view are withdrawn later; its number is not used before. */
static void test_closed_views(void **state)
{
    struct rt_index *x = make();
    uint16_t a = open_view(x), b = open_view(x), c;
    const uint64_t fp = 77;
    size_t n;

    put(x, a, KV_EVENT_STORED, 0, fp);
    put(x, b, KV_EVENT_STORED, 1, fp);
    assert_int_equal(rt_index_guess(x, a, &fp, 1), BT_OK);
    rt_index_close(x, a);
    rt_index_look(x, &fp, 1, &n);
    assert_int_equal(n, 1);
    for (int i = 0; i < 2000; i++) {
        rt_index_sweep(x);
    }
    assert_true(rt_index_stats(x).entries == 1);
    c = open_view(x);
    assert_int_not_equal(c, a);
    rt_index_withdraw(x, a, &fp, 1);
    while (rt_index_sweep(x)) {
    }
    assert_int_equal(open_view(x), a);
    rt_index_look(x, &fp, 1, &n);
    assert_int_equal(n, 1);
    rt_index_destroy(x);
}

struct model {
    uint8_t bits[N_VIEWS][N_FP];
    bool shared[N_VIEWS];
    uint16_t view[N_VIEWS];
};

static void check(struct rt_index *x, const struct model *m, const uint64_t *fps)
{
    for (int v = 0; v < N_VIEWS; v++) {
        for (unsigned t = 0; t < RT_INDEX_TIERS; t++) {
            struct kv_digest d = rt_index_digest(x, m->view[v], t);
            uint64_t n = 0, sum = 0;

            for (int i = 0; i < N_FP; i++) {
                if (m->bits[v][i] & 1u << t) {
                    n++;
                    sum += fps[i];
                }
            }
            assert_true(d.n == n && d.sum == sum);
        }
    }
}

/* Blocks from `at` on, before `end`, that some shared view has outside its pool. */
static uint32_t store_from(const struct model *m, int at, int end)
{
    uint32_t n = 0;
    bool any = true;

    for (; any && at < end; at++) {
        any = false;
        for (int v = 0; v < N_VIEWS; v++) {
            any |= m->shared[v] && (m->bits[v][at] & 6);
        }
        n += any;
    }
    return n;
}

static void check_look(struct rt_index *x, const struct model *m, const uint64_t *fps, int from)
{
    size_t n, len = (size_t)BT_MIN(12, N_FP - from);
    const struct rt_run *runs = rt_index_look(x, fps + from, len, &n);

    assert_int_equal(rt_index_looked_store(x), store_from(m, from, from + (int)len));
    for (int v = 0; v < N_VIEWS; v++) {
        const struct rt_run *r = run_of(runs, n, m->view[v]);
        uint32_t upto[RT_INDEX_TIERS] = {0};

        for (unsigned t = 0; t < RT_INDEX_TIERS; t++) {
            while (upto[t] < len && m->bits[v][from + (int)upto[t]] & ((2u << t) - 1)) {
                upto[t]++;
            }
        }
        if (upto[2] == 0) {
            assert_null(r);
        } else {
            assert_non_null(r);
            assert_memory_equal(r->upto, upto, sizeof(upto));
            assert_int_equal(r->store, store_from(m, from + (int)upto[2], from + (int)len));
        }
    }
}

/* Random changes; some blocks on many views; views that go and come back; one tier cleared. */
static void test_against_a_model(void **state)
{
    struct model *m = bt_calloc(1, sizeof(*m));
    struct rt_index *x = make();
    uint64_t fps[N_FP], seed = 5;

    assert_non_null(m);
    for (int i = 0; i < N_FP; i++) { /* small ones, near ones, random ones */
        fps[i] = i < 20   ? (uint64_t)i
                 : i < 60 ? UINT64_MAX - (uint64_t)i
                          : rnd(&seed) << 33 | rnd(&seed);
    }
    for (int v = 0; v < N_VIEWS; v++) {
        m->view[v] = open_view(x);
    }
    for (int round = 0; round < 300; round++) {
        for (int k = 0; k < 300; k++) {
            int v = (int)(rnd(&seed) % N_VIEWS), i = (int)(rnd(&seed) % N_FP);
            unsigned t = (unsigned)(rnd(&seed) % RT_INDEX_TIERS);
            bool store = rnd(&seed) % 100 < (round / 60 % 2 ? 35u : 70u);

            put(x, m->view[v], store ? KV_EVENT_STORED : KV_EVENT_REMOVED, t, fps[i]);
            m->bits[v][i] =
                store ? (uint8_t)(m->bits[v][i] | 1u << t) : (uint8_t)(m->bits[v][i] & ~(1u << t));
        }
        if (round % 10 == 3) {
            int v = (int)(rnd(&seed) % N_VIEWS);

            rt_index_close(x, m->view[v]);
            m->view[v] = open_view(x);
            memset(m->bits[v], 0, N_FP);
            m->shared[v] = false;
        }
        if (round % 10 == 7) {
            int v = (int)(rnd(&seed) % N_VIEWS);

            put(x, m->view[v], KV_EVENT_CLEARED, 1, 0);
            for (int i = 0; i < N_FP; i++) {
                m->bits[v][i] &= (uint8_t)~2u;
            }
        }
        if (round % 3 == 0) { /* at times nobody shares, at times a few do */
            int v = (int)(rnd(&seed) % N_VIEWS);

            m->shared[v] = round % 60 < 30;
            rt_index_share(x, m->view[v], m->shared[v]);
        }
        for (int k = 0; k < 100; k++) {
            rt_index_sweep(x);
        }
        check(x, m, fps);
        for (int k = 0; k < 20; k++) {
            check_look(x, m, fps, (int)(rnd(&seed) % N_FP));
        }
    }
    for (int v = 0; v < N_VIEWS; v++) {
        rt_index_close(x, m->view[v]);
    }
    while (rt_index_sweep(x)) {
    }
    assert_true(rt_index_stats(x).entries == 0);
    assert_true(rt_index_stats(x).blocks == 0);
    rt_index_destroy(x);
    free(m);
}

/* Growing by steps keeps the bytes per entry low at any size, here from 100,000 on. */
static void test_bytes_per_entry(void **state)
{
    struct rt_index *x = make();
    uint16_t v = open_view(x);
    uint64_t seed = 9;
    double most = 0;

    for (int i = 1; i <= 400000; i++) {
        put(x, v, KV_EVENT_STORED, 0, rnd(&seed) << 33 ^ rnd(&seed));
        if (i >= 100000 && i % 1000 == 0) {
            struct rt_index_stats s = rt_index_stats(x);
            double fixed = RT_VIEWS_MAX * 150 + (2 << 20); /* a huge page that is not full */

            assert_true(s.entries == (uint64_t)i);
            most = BT_MAX(most, ((double)s.bytes - fixed) / i);
        }
    }
    assert_true(most <= 24);
    rt_index_destroy(x);
}

/* A view that is full takes nothing more, guesses aside; what leaves makes room. */
static void test_a_view_has_a_limit(void **state)
{
    struct rt_index *x;
    uint16_t v, other;
    struct kv_event ev[200];
    uint64_t guesses[] = {900, 901};

    assert_int_equal(rt_index_create(&x, NULL), BT_OK);
    assert_int_equal(rt_index_open(x, &v), BT_OK);
    assert_int_equal(rt_index_open(x, &other), BT_OK);
    rt_index_limit(x, v, 100);
    for (uint64_t i = 0; i < 200; i++) {
        ev[i] = (struct kv_event){i + 1, KV_EVENT_STORED, 0};
    }
    assert_int_equal(rt_index_apply(x, v, ev, 100), BT_OK);
    assert_int_equal(rt_index_apply(x, v, ev + 100, 100), BT_E_EXHAUSTED);
    assert_int_equal(rt_index_digest(x, v, 0).n, 100);
    assert_int_equal(rt_index_stats(x).entries, 100);
    assert_int_equal(rt_index_stats(x).blocks, 100); /* no slot is left of what was refused */
    assert_int_equal(rt_index_apply(x, other, ev, 200), BT_OK);
    assert_int_equal(rt_index_guess(x, v, guesses, 2), BT_OK);
    rt_index_withdraw(x, v, guesses, 2);
    for (size_t i = 0; i < 10; i++) { /* another tier of a block that is there is no new entry */
        ev[i].tier = 1;
    }
    assert_int_equal(rt_index_apply(x, v, ev, 10), BT_OK);
    for (size_t i = 10; i < 20; i++) {
        ev[i].kind = KV_EVENT_REMOVED;
    }
    assert_int_equal(rt_index_apply(x, v, ev + 10, 10), BT_OK);
    assert_int_equal(rt_index_apply(x, v, ev + 100, 10), BT_OK);
    assert_int_equal(rt_index_apply(x, v, ev + 110, 1), BT_E_EXHAUSTED);
    rt_index_destroy(x);
}

/* Views that come and go faster than they are swept piece by piece: what they leave is bounded. */
static void test_what_closed_views_leave_is_bounded(void **state)
{
    enum { N = 20000, ROUNDS = 100 };
    struct kv_event *ev = bt_calloc(N, sizeof(*ev));
    struct rt_index *x;
    uint64_t most = 0;

    assert_non_null(ev);
    assert_int_equal(rt_index_create(&x, NULL), BT_OK);
    for (uint64_t r = 0; r < ROUNDS; r++) {
        struct rt_index_stats st;
        uint16_t v;

        assert_int_equal(rt_index_open(x, &v), BT_OK);
        for (uint64_t i = 0; i < N; i++) {
            ev[i] = (struct kv_event){(r * N + i + 1) * 0x9e3779b97f4a7c15ull, KV_EVENT_STORED, 0};
        }
        assert_int_equal(rt_index_apply(x, v, ev, N), BT_OK);
        rt_index_close(x, v);
        rt_index_sweep(x);
        st = rt_index_stats(x);
        assert_true(st.dead == st.entries);
        most = BT_MAX(most, st.entries);
    }
    assert_true(most <= 3 * N);
    while (rt_index_sweep(x)) {
    }
    assert_int_equal(rt_index_stats(x).entries, 0);
    assert_int_equal(rt_index_stats(x).dead, 0);
    rt_index_destroy(x);
    free(ev);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_fingerprints_of_a_liar),
        cmocka_unit_test(test_runs_into_the_store),
        cmocka_unit_test(test_runs_by_tier),
        cmocka_unit_test(test_guesses_are_counted),
        cmocka_unit_test(test_closed_views),
        cmocka_unit_test(test_against_a_model),
        cmocka_unit_test(test_bytes_per_entry),
        cmocka_unit_test(test_a_view_has_a_limit),
        cmocka_unit_test(test_what_closed_views_leave_is_bounded),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
