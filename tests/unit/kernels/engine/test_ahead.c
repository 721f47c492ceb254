/* The engine on a device that works beside the host: the next step is planned and queued while one
 * runs, and nothing of that shows in what is emitted. */
#include "tests/unit/kernels/engine/double.h"
#include "tests/unit/kernels/engine/rig.h"

#include "tests/gpu/made_model.h"

#define N_REQ  6
#define ANSWER 40

static struct bt_model_file *model;

static const struct made_model made = {"llama", "F16", 2,   64,   4,     2,
                                       16,      128,   320, 1024, false, false};
static const uint32_t prompt_len[N_REQ] = {1, 8, 9, 33, 100, 201};

static struct wire_sampling sampling_of(uint32_t i)
{
    struct wire_sampling s;

    wire_sampling_defaults(&s);
    s.max_tokens = ANSWER - i; /* they end in different steps */
    s.ignore_eos = true;
    if (i % 2) {
        s.temperature = 0.9f;
        s.top_p = 0.95f;
        s.seed = 1000 + i;
    } else {
        s.temperature = 0;
    }
    return s;
}

static int try_submit_at(struct rig *r,
                         uint32_t i,
                         const struct wire_sampling *s,
                         uint64_t tag,
                         const int32_t *answered,
                         size_t n_answered)
{
    int32_t prompt[512];
    struct kn_submit_args a = {.tag = tag,
                               .prompt = prompt,
                               .n_prompt = prompt_len[i],
                               .answered = answered,
                               .n_answered = n_answered,
                               .sampling = s,
                               .claim = tag,
                               .deadline_ns = BT_NEVER_NS};

    for (uint32_t k = 0; k < prompt_len[i]; k++) {
        prompt[k] = (int32_t)(3 + (i * 7919 + k * k * 31 + k * 17) % 317);
    }
    return kn_engine_submit(r->engine, &a, NULL);
}

static int try_submit(struct rig *r, uint32_t i, const struct wire_sampling *s, uint64_t tag)
{
    return try_submit_at(r, i, s, tag, NULL, 0);
}

/* What the CPU's engine says, one request at a time. */
static struct rig_result *reference(void (*change)(uint32_t i, struct wire_sampling *s))
{
    struct rig_result *want = bt_calloc(N_REQ, sizeof(*want));
    struct rig r;

    assert_non_null(want);
    rig_create(&r, model, (struct rig_opts){1, 16, 512, 8, 64, .max_ctx = 512});
    rig_start(&r, NULL);
    for (uint32_t i = 0; i < N_REQ; i++) {
        struct wire_sampling s = sampling_of(i);

        if (change) {
            change(i, &s);
        }
        assert_int_equal(try_submit(&r, i, &s, i), BT_OK);
        rig_wait(&r, i + 1);
        want[i] = r.results[i];
        assert_int_equal(want[i].rc, BT_OK);
    }
    assert_true(kn_engine_stop(r.engine));
    rig_destroy(&r);
    return want;
}

static void compare(const struct rig *r, const struct rig_result *want)
{
    for (uint32_t i = 0; i < N_REQ; i++) {
        const struct rig_result *got = &r->results[i];

        assert_int_equal(got->rc, BT_OK);
        assert_int_equal(got->n, want[i].n);
        assert_int_equal(got->finish, want[i].finish);
        assert_memory_equal(got->ids, want[i].ids, want[i].n * sizeof(*got->ids));
    }
}

/* All requests at once on the device. */
static struct kn_engine_stats run_all(struct rig_opts o,
                                      void (*change)(uint32_t i, struct wire_sampling *s),
                                      const struct rig_result *want)
{
    struct double_cfg cfg = {.file = model, .pass_us = 300, .no_draw_at = -1};
    struct kn_engine_stats stats;
    struct rig r;

    o.max_ctx = 512;
    o.device = double_use(&cfg);
    rig_create(&r, model, o);
    for (uint32_t i = 0; i < N_REQ; i++) {
        struct wire_sampling s = sampling_of(i);

        if (change) {
            change(i, &s);
        }
        assert_int_equal(try_submit(&r, i, &s, i), BT_OK);
    }
    rig_start(&r, NULL);
    rig_wait(&r, N_REQ);
    stats = kn_engine_stats(r.engine);
    assert_true(kn_engine_stop(r.engine));
    compare(&r, want);
    rig_destroy(&r);
    return stats;
}

/* Any budget, page size and number of rows gives the same tokens; in a steady batch most steps are
 * queued before the one before them has ended. */
static void test_same_tokens(void **state)
{
    static const int budgets[] = {1, 7, 64, 512}, pages[] = {8, 16, 64};
    struct rig_result *want = reference(NULL);
    struct kn_engine_stats stats;

    for (size_t b = 0; b < BT_ARRAY_LEN(budgets); b++) {
        for (size_t p = 0; p < BT_ARRAY_LEN(pages); p++) {
            stats =
                run_all((struct rig_opts){1, pages[p], budgets[b], 8, (uint32_t)(1024 / pages[p])},
                        NULL, want);
            assert_true(stats.steps >= ANSWER);
        }
    }
    stats = run_all((struct rig_opts){1, 16, 512, 8, 64}, NULL, want);
    assert_true(stats.steps_ahead * 2 > stats.steps);
    assert_int_equal(atomic_load(&double_seen.most_queued), 2);
    assert_true(atomic_load(&double_seen.queued_behind) > 0);
    /* One at a time while others wait; and pages so short that they push each other out. */
    stats = run_all((struct rig_opts){1, 16, 64, 1, 64}, NULL, want);
    assert_true(stats.steps_ahead > 0);
    stats = run_all((struct rig_opts){1, 8, 64, 8, 36}, NULL, want);
    assert_true(stats.preemptions > 0);
    /* Blocks are shared and published while their request's next row runs. */
    stats = run_all((struct rig_opts){1, 8, 64, 8, 128, .block = 16}, NULL, want);
    assert_true(stats.steps_ahead > 0);
    free(want);
}

static const struct rig_result *cut_at; /* answers to be cut */

static void stop_in_the_middle(uint32_t i, struct wire_sampling *s)
{
    s->stop_ids = &cut_at[i].ids[10 + 3 * i];
    s->n_stop_ids = 1;
}

/* The token that ends an answer is known one step late: the row that ran on is thrown away. */
static void test_ends_one_step_late(void **state)
{
    struct rig_result *whole = reference(NULL), *want;

    cut_at = whole;
    want = reference(stop_in_the_middle);
    for (uint32_t i = 0; i < N_REQ; i++) {
        assert_int_equal(want[i].finish, KN_FINISH_STOP);
        assert_true(want[i].n <= 11 + 3 * i);
    }
    run_all((struct rig_opts){1, 8, 512, 8, 128}, stop_in_the_middle, want);
    assert_true(atomic_load(&double_seen.queued_behind) > 0);
    run_all((struct rig_opts){1, 8, 32, 3, 48, .block = 16}, stop_in_the_middle, want);
    free(whole);
    free(want);
}

static void some_on_the_host(uint32_t i, struct wire_sampling *s)
{
    s->repetition_penalty = i % 3 == 1 ? 1.2f : 1;
    s->min_tokens = i == 2 ? 9 : 0;
}

/* Rows whose tokens the host draws stand in the same steps. */
static void test_host_draws(void **state)
{
    struct rig_result *want = reference(some_on_the_host);

    run_all((struct rig_opts){1, 16, 64, 8, 64}, some_on_the_host, want);
    free(want);
}

/* The device draws nothing at position 5 (no logit is above -infinity): token 0 stands there, and
 * what was computed behind the token that was none counts for nothing. */
static void test_nothing_drawn(void **state)
{
    struct double_cfg cfg = {.file = model, .pass_us = 300, .no_draw_at = 5};
    struct wire_sampling s = sampling_of(1);
    struct rig_result want;
    int32_t forced[6];
    struct rig r;

    rig_create(&r, model, (struct rig_opts){1, 16, 512, 8, 64, .max_ctx = 512});
    rig_start(&r, NULL);
    assert_int_equal(try_submit(&r, 1, &s, 1), BT_OK);
    rig_wait(&r, 1);
    memcpy(forced, r.results[1].ids, 5 * sizeof(*forced));
    forced[5] = 0;
    assert_int_equal(try_submit_at(&r, 1, &s, 2, forced, 6), BT_OK);
    rig_wait(&r, 2);
    want = r.results[2];
    memcpy(want.ids, forced, sizeof(forced));
    assert_true(kn_engine_stop(r.engine));
    rig_destroy(&r);

    rig_create(&r, model,
               (struct rig_opts){1, 16, 512, 8, 64, .max_ctx = 512, .device = double_use(&cfg)});
    assert_int_equal(try_submit(&r, 1, &s, 1), BT_OK);
    rig_start(&r, NULL);
    rig_wait(&r, 1);
    assert_true(kn_engine_stats(r.engine).steps_ahead > 0);
    assert_int_equal(r.results[1].n, want.n);
    assert_memory_equal(r.results[1].ids, want.ids, want.n * sizeof(int32_t));
    assert_true(kn_engine_stop(r.engine));
    rig_destroy(&r);
}

/* A fault with two steps under way: every request ends once, all pages come back. */
static void test_fault(void **state)
{
    for (uint64_t at = 1; at < 24; at += 2) {
        struct double_cfg cfg = {.file = model, .pass_us = 300, .fail_at = at, .no_draw_at = -1};
        uint32_t failed = 0;
        struct rig r;

        rig_create(&r, model,
                   (struct rig_opts){1, 16, 64, 8, 64, .max_ctx = 512, .device = double_use(&cfg)});
        for (uint32_t i = 0; i < N_REQ; i++) {
            struct wire_sampling s = sampling_of(i);

            assert_int_equal(try_submit(&r, i, &s, i), BT_OK);
        }
        rig_start(&r, NULL);
        rig_wait(&r, N_REQ);
        for (uint32_t i = 0; i < N_REQ; i++) {
            failed += r.results[i].rc == BT_E_DEVICE_LOST;
        }
        assert_true(failed > 0);
        assert_int_equal(rig_room(&r), 64);
        assert_true(kn_engine_stop(r.engine));
        rig_destroy(&r);
    }
}

/* Requests come, go and are cancelled all the time. */
static void test_disturbed(void **state)
{
    struct double_cfg cfg = {.file = model, .pass_us = 100, .no_draw_at = -1};
    struct rig_result *want = reference(NULL);
    struct rig r;

    rig_create(&r, model,
               (struct rig_opts){1, 8, 64, 8, 96, .max_ctx = 512, .device = double_use(&cfg)});
    rig_start(&r, NULL);
    for (uint64_t tag = 0; tag < 120; tag++) {
        struct wire_sampling s = sampling_of((uint32_t)tag % N_REQ);

        assert_int_equal(try_submit(&r, (uint32_t)tag % N_REQ, &s, tag), BT_OK);
        if (tag % 3 == 2) {
            rig_wait_tokens(&r, tag - 1, 1 + (uint32_t)tag % 7);
            kn_engine_cancel(r.engine, tag - 1);
        }
    }
    rig_wait(&r, 120);
    for (uint64_t tag = 0; tag < 120; tag++) {
        const struct rig_result *got = &r.results[tag], *w = &want[tag % N_REQ];

        assert_true(got->rc == BT_OK || (tag % 3 == 1 && got->rc == BT_E_CANCELLED));
        assert_true(got->rc == BT_E_CANCELLED || got->n == w->n);
        assert_memory_equal(got->ids, w->ids, got->n * sizeof(int32_t));
    }
    assert_int_equal(rig_room(&r), 96);
    /* Stopped while steps are under way. */
    for (uint64_t tag = 200; tag < 206; tag++) {
        struct wire_sampling s = sampling_of((uint32_t)tag % N_REQ);

        assert_int_equal(try_submit(&r, (uint32_t)tag % N_REQ, &s, tag), BT_OK);
    }
    rig_wait_tokens(&r, 200, 5);
    assert_true(kn_engine_stop(r.engine));
    assert_int_equal(r.n_last, 126);
    rig_destroy(&r);
    free(want);
}

static int open_model(void **state)
{
    struct bt_err err = {0};

    if (made_model_open(&made, &model, &err) < 0) {
        fail_msg("%s", err.msg);
    }
    return 0;
}

static int close_model(void **state)
{
    bt_model_close(model);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_same_tokens), cmocka_unit_test(test_ends_one_step_late),
        cmocka_unit_test(test_host_draws),  cmocka_unit_test(test_nothing_drawn),
        cmocka_unit_test(test_fault),       cmocka_unit_test(test_disturbed),
    };

    return cmocka_run_group_tests(tests, open_model, close_model);
}
