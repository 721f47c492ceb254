/* Speed models: they find the speed of a node from its steps, notice at once when it turns slow and
 * when it is over. Time is simulated. */
#include "router/speed.h"
#include "router/work.h"
#include "tests/unit/cmocka.h"

#include <math.h>

#define S 1000000000ull

struct machine {
    double step, token, pair, row, work, noise;
    uint64_t seed;
};

static const struct machine cpu = {2e-3, 1e-3, 2e-7, 3e-3, 4e-7, 0.05, 1};
static const struct machine gpu = {4e-3, 3e-5, 1e-10, 2e-5, 2e-9, 0.05, 2};

static double rnd(struct machine *m)
{
    m->seed = m->seed * 6364136223846793005ull + 1442695040888963407ull;
    return (double)(m->seed >> 33) / 0x7fffffff;
}

static double time_of(struct machine *m, const struct rt_step *s)
{
    double t = m->step + m->token * s->prompt_tokens + m->pair * s->prompt_work + m->row * s->rows +
               m->work * s->row_work;

    return t * (1 + m->noise * (2 * rnd(m) - 1));
}

/* n steps, a tenth of a second apart; `slow` times as slow as the machine is. */
static uint64_t run(struct rt_speed *s, struct machine *m, int n, double slow, uint64_t now)
{
    for (int i = 0; i < n; i++) {
        struct rt_step st = {0};

        if (rnd(m) < 0.6) {
            st.prompt_tokens = floor(rnd(m) * 500) + 2;
            st.prompt_work = st.prompt_tokens * (rnd(m) * 4000 + st.prompt_tokens / 2);
        }
        if (rnd(m) < 0.7 || st.prompt_tokens == 0) {
            st.rows = floor(rnd(m) * 40) + 1;
            st.row_work = st.rows * rnd(m) * 3000;
        }
        st.seconds = slow * time_of(m, &st);
        now += S / 10;
        rt_speed_learn(s, &st, now);
    }
    return now;
}

static double off(double got, double want)
{
    return fabs(got / want - 1);
}

static void test_fits(void **state)
{
    const struct machine kinds[] = {cpu, gpu};

    for (int k = 0; k < 2; k++) {
        struct machine m = kinds[k];
        struct rt_speed s;
        uint64_t now;
        double want;

        rt_speed_init(&s);
        now = run(&s, &m, 300, 1, S);
        want = 8 * m.step + 4000 * m.token + 4000 * (1000 + 2000) * m.pair;
        assert_true(off(rt_speed_prefill(&s, 4000, 1000, 500, now), want) < 0.15);
        want = m.step + 20 * m.row + 20000 * m.work;
        assert_true(off(rt_speed_decode(&s, 20, 20000, now), want) < 0.15);
        assert_true(s.error < 0.12);
        assert_true(s.n == 300 && s.n_prompt > 100);
    }
}

/* A node that only computes prompts says nothing of rows, and the other way round; the part that is
 * known is right. */
static void test_one_kind_alone(void **state)
{
    struct machine m = cpu;
    struct rt_speed s;
    uint64_t now = S;

    rt_speed_init(&s);
    for (int i = 1; i <= 200; i++) {
        struct rt_step st = {.prompt_tokens = 512, .prompt_work = 512.0 * (i % 8 * 512 + 256)};

        st.seconds = time_of(&m, &st);
        rt_speed_learn(&s, &st, now += S / 10);
    }
    assert_true(off(rt_speed_prefill(&s, 2048, 0, 512, now),
                    4 * m.step + 2048 * m.token + 2048 * 1024 * m.pair) < 0.15);
    assert_true(rt_speed_decode(&s, 10, 1000, now) > 0);
}

/* Three times as slow: seen within two seconds, over within two seconds after it is over. A node
 * that hears nothing any more is believed to be its usual self again. */
/* A node that has only ever seen the same few steps: what they do not tell apart must not make a
 * whole prompt look like an hour. */
static void test_few_kinds_of_steps(void **state)
{
    static const struct rt_step kinds[] = {
        {512, 512 * 256.0, 0, 0, 0},
        {488, 488 * 756.0, 0, 0, 0},
        {104, 104 * 948.0, 0, 0, 0},
        {0, 0, 1, 1010, 0},
    };

    for (uint64_t seed = 1; seed < 20; seed++) {
        struct machine m = {1e-4, 3e-6, 1e-10, 5e-6, 1e-10, 0.9, seed};
        uint64_t now = S;
        struct rt_speed s;

        rt_speed_init(&s);
        for (int i = 0; i < 8000; i++) {
            struct rt_step st = kinds[i < 2 ? i : rnd(&m) < 0.04 ? 2 : 3];

            st.seconds = time_of(&m, &st) * (rnd(&m) < 0.05 ? 30 * rnd(&m) : 1);
            now += S / 10;
            rt_speed_learn(&s, &st, now);
            if (i >= 10 && i % 16 == 0) {
                double whole = rt_speed_prefill(&s, 1000, 0, 512, now);

                assert_true(whole < 1);
            }
        }
    }
}

/* Tens of thousands of steps of a small model on a machine that is busy with other work, among them
 * such as take a hundred times as long: a prompt never looks like minutes, which would be refused.
 */
static void test_long_life_beside_others(void **state)
{
    for (uint64_t seed = 1; seed <= 6; seed++) {
        struct machine m = {3e-4, 1.2e-5, 2e-9, 1e-4, 1e-8, 0.8, seed};
        uint64_t now = S;
        struct rt_speed s;

        rt_speed_init(&s);
        for (int i = 0; i < 30000; i++) {
            struct rt_step st = {.rows = floor(rnd(&m) * 4)};
            double before = 128 * floor(rnd(&m) * 5);

            if (rnd(&m) < 0.15 || st.rows < 1) {
                st.prompt_tokens = 41 + floor(rnd(&m) * 20);
                st.prompt_tokens += rnd(&m) < 0.2 ? 200 + 37 * floor(rnd(&m) * 6) : 0;
                st.prompt_work = st.prompt_tokens * (before + st.prompt_tokens / 2);
            }
            st.row_work = st.rows * (300 + 400 * rnd(&m));
            st.seconds = time_of(&m, &st) + (rnd(&m) < 0.05 ? 0.02 * rnd(&m) : 0) +
                         (rnd(&m) < 0.002 ? 0.5 * rnd(&m) : 0);
            now += S / 100;
            rt_speed_learn(&s, &st, now);
            if (i >= 50) {
                double whole = rt_speed_prefill(&s, 600, 0, 512, now);

                assert_true(whole > 1e-4 && whole < 1);
            }
        }
        assert_true(rt_speed_prefill(&s, 600, 0, 512, now + 60 * S) < 0.1);
    }
}

static void test_slow_node(void **state)
{
    struct machine m = cpu;
    struct rt_speed s;
    uint64_t now;
    double usual;

    rt_speed_init(&s);
    now = run(&s, &m, 300, 1, S);
    usual = rt_speed_prefill(&s, 1000, 0, 500, now);
    now = run(&s, &m, 20, 3, now);
    assert_true(rt_speed_prefill(&s, 1000, 0, 500, now) > 2.4 * usual);
    assert_true(rt_speed_ratio(&s, now) > 2);
    now = run(&s, &m, 20, 1, now);
    assert_true(rt_speed_prefill(&s, 1000, 0, 500, now) < 1.3 * usual);
    now = run(&s, &m, 10, 3, now);
    assert_true(rt_speed_prefill(&s, 1000, 0, 500, now) > 2 * usual);
    assert_true(rt_speed_prefill(&s, 1000, 0, 500, now + 20 * S) < 1.5 * usual);
}

static void test_odd_steps(void **state)
{
    const struct rt_step odd[] = {
        {1, 1, 0, 0, 0},   {1, 1, 0, 0, -1},  {0, 0, 0, 0, 1},         {1, 1, 0, 0, INFINITY},
        {1, 1, 0, 0, NAN}, {1, 1, 0, 0, 1e9}, {1e9, 1e18, 0, 0, 1e-9}, {0, 0, 4096, 1e12, 1e-9}};
    struct rt_speed s;

    rt_speed_init(&s);
    for (int round = 0; round < 500; round++) {
        for (size_t i = 0; i < BT_ARRAY_LEN(odd); i++) {
            rt_speed_learn(&s, &odd[i], S + (uint64_t)round);
        }
    }
    assert_true(isfinite(rt_speed_prefill(&s, 1000, 100, 512, S)));
    assert_true(rt_speed_prefill(&s, 1000, 100, 512, S) > 0);
    assert_true(rt_speed_prefill(&s, 0, 100, 512, S) == 0);
    assert_true(rt_speed_decode(&s, 1, 1, S) > 0);
}

static void test_busy(void **state)
{
    struct rt_speed s;
    uint64_t now = S;

    rt_speed_init(&s);
    assert_true(rt_speed_busy(&s, now) == 0);
    for (int i = 0; i < 1200; i++) {
        rt_speed_add_busy(&s, 0.25, now += S / 2);
    }
    assert_true(fabs(rt_speed_busy(&s, now) - 0.5) < 0.02);
    assert_true(rt_speed_busy(&s, now + 600 * S) < 0.01);
}

static void test_work(void **state)
{
    struct rt_work_item a, b, c;
    struct rt_work w;

    rt_work_init(&w);
    assert_true(rt_work_seconds(&w, S) == 0);
    rt_work_add(&w, &a, 2, S);
    rt_work_add(&w, &b, 3, S);
    rt_work_add(&w, &c, 1, S);
    assert_true(fabs(rt_work_seconds(&w, S) - 6) < 1e-9);
    assert_true(fabs(rt_work_seconds(&w, 2 * S) - 5) < 1e-9);
    assert_true(fabs(rt_work_seconds(&w, 9 * S) - 6) < 1e-9); /* late: another two, it seems */
    rt_work_done(&w, &b, 9 * S);                              /* out of order */
    assert_true(fabs(rt_work_seconds(&w, 9 * S) - 3) < 1e-9);
    rt_work_done(&w, &a, 10 * S);
    assert_true(fabs(rt_work_seconds(&w, 10 * S + S / 2) - 0.5) < 1e-9);
    rt_work_done(&w, &c, 11 * S);
    assert_true(rt_work_seconds(&w, 11 * S) == 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_fits),
        cmocka_unit_test(test_one_kind_alone),
        cmocka_unit_test(test_few_kinds_of_steps),
        cmocka_unit_test(test_long_life_beside_others),
        cmocka_unit_test(test_slow_node),
        cmocka_unit_test(test_odd_steps),
        cmocka_unit_test(test_busy),
        cmocka_unit_test(test_work),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
