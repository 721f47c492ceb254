/* The engine with a tiny real model: the same request gives the same tokens however it is run. */
#include "tests/unit/kernels/engine/rig.h"

#define N_REQ  8
#define ANSWER 24

static struct bt_model_file *model;

static const uint32_t prompt_len[N_REQ] = {1, 7, 8, 9, 33, 64, 100, 201};

static void make_prompt(uint32_t i, uint32_t n, int32_t *ids)
{
    int32_t n_vocab = bt_model_config(model)->n_vocab;

    for (uint32_t k = 0; k < n; k++) {
        ids[k] = (int32_t)(3 + (i * 7919 + k * k * 31 + k * 17) % (uint32_t)(n_vocab - 3));
    }
}

static struct wire_sampling sampling_of(uint32_t i, bool greedy)
{
    struct wire_sampling s;

    wire_sampling_defaults(&s);
    s.max_tokens = ANSWER;
    s.ignore_eos = i % 4 != 0;
    if (!greedy) {
        s.temperature = 0.9f;
        s.top_p = 0.95f;
        s.top_k = i % 2 ? 40 : 0;
        s.repetition_penalty = i % 3 ? 1.0f : 1.1f;
        s.seed = 1000 + i;
    }
    return s;
}

static int try_submit(struct rig *r, uint32_t i, const struct wire_sampling *sampling, uint64_t tag)
{
    int32_t prompt[512];
    struct kn_submit_args a = {.tag = tag,
                               .prompt = prompt,
                               .n_prompt = prompt_len[i],
                               .sampling = sampling,
                               .claim = tag,
                               .deadline_ns = BT_NEVER_NS};

    make_prompt(i, prompt_len[i], prompt);
    return kn_engine_submit(r->engine, &a, NULL);
}

static void submit_all(struct rig *r, bool greedy)
{
    for (uint32_t i = 0; i < N_REQ; i++) {
        struct wire_sampling s = sampling_of(i, greedy);

        assert_int_equal(try_submit(r, i, &s, i), BT_OK);
    }
}

/* Every request by itself in one engine: what all others must equal. */
static void reference(bool greedy, struct rig_result *ret)
{
    struct rig r;

    rig_create(&r, model, (struct rig_opts){1, 16, 512, 8, 64, .max_ctx = 512});
    rig_start(&r, NULL);
    for (uint32_t i = 0; i < N_REQ; i++) {
        struct wire_sampling s = sampling_of(i, greedy);

        assert_int_equal(try_submit(&r, i, &s, i), BT_OK);
        rig_wait(&r, i + 1);
        ret[i] = r.results[i];
        assert_int_equal(ret[i].rc, BT_OK);
        assert_true(ret[i].n > 0);
        assert_true(ret[i].n == ANSWER || ret[i].finish == KN_FINISH_STOP);
    }
    assert_true(kn_engine_stop(r.engine));
    rig_destroy(&r);
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

static uint64_t run_variant(struct rig_opts o, bool greedy, const struct rig_result *want)
{
    struct kn_engine_stats stats;
    struct rig r;

    o.max_ctx = 512;
    rig_create(&r, model, o);
    submit_all(&r, greedy); /* before the start: they meet in one batch */
    rig_start(&r, NULL);
    rig_wait(&r, N_REQ);
    stats = kn_engine_stats(r.engine);
    assert_true(kn_engine_stop(r.engine));
    compare(&r, want);
    rig_destroy(&r);
    return stats.preemptions;
}

static void check_topologies(bool greedy)
{
    static const int budgets[] = {1, 7, 64, 512}, pages[] = {8, 16, 64, 256};
    struct rig_result *want = bt_calloc(N_REQ, sizeof(*want));

    assert_non_null(want);
    reference(greedy, want);
    for (size_t b = 0; b < BT_ARRAY_LEN(budgets); b++) {
        run_variant((struct rig_opts){1 + (int)b % 2, 16, budgets[b], 8, 64}, greedy, want);
    }
    for (size_t p = 0; p < BT_ARRAY_LEN(pages); p++) {
        run_variant((struct rig_opts){2, pages[p], 64, 8, (uint32_t)(1024 / pages[p])}, greedy,
                    want);
    }
    /* One sequence at a time; all begin in one pass, in a pool that just holds the longest, so that
     * they push each other out. */
    run_variant((struct rig_opts){1, 16, 64, 1, 64}, greedy, want);
    assert_true(run_variant((struct rig_opts){1, 8, 512, 8, 29}, greedy, want) > 0);
    free(want);
}

static void test_topology_greedy(void **state)
{
    check_topologies(true);
}

static void test_topology_seeded(void **state)
{
    check_topologies(false);
}

static void test_resume(void **state)
{
    struct rig_result *want = bt_calloc(N_REQ, sizeof(*want));
    struct rig r;

    reference(false, want);
    rig_create(&r, model, (struct rig_opts){1, 16, 64, 8, 64, .max_ctx = 512});
    rig_start(&r, NULL);
    for (uint32_t i = 0; i < N_REQ; i++) {
        struct wire_sampling s = sampling_of(i, false);
        int32_t prompt[512];
        struct kn_submit_args a = {.tag = i,
                                   .prompt = prompt,
                                   .n_prompt = prompt_len[i],
                                   .answered = want[i].ids,
                                   .n_answered = want[i].n / 2,
                                   .sampling = &s,
                                   .deadline_ns = BT_NEVER_NS};

        make_prompt(i, prompt_len[i], prompt);
        assert_int_equal(kn_engine_submit(r.engine, &a, NULL), BT_OK);
    }
    rig_wait(&r, N_REQ);
    for (uint32_t i = 0; i < N_REQ; i++) {
        uint32_t from = want[i].n / 2;

        assert_int_equal(r.results[i].first, from);
        assert_int_equal(r.results[i].n, want[i].n);
        assert_memory_equal(r.results[i].ids + from, want[i].ids + from,
                            (want[i].n - from) * sizeof(int32_t));
    }
    assert_true(kn_engine_stop(r.engine));
    rig_destroy(&r);
    free(want);
}

static void refused(struct rig *r, struct kn_submit_args a, int rc, const char *text)
{
    struct wire_sampling s = sampling_of(1, true);
    struct bt_err err = {0};

    a.sampling = &s;
    a.deadline_ns = BT_NEVER_NS;
    assert_int_equal(kn_engine_submit(r->engine, &a, &err), rc);
    if (!strstr(err.msg, text)) {
        fail_msg("\"%s\" does not say \"%s\"", err.msg, text);
    }
}

static void test_refusals(void **state)
{
    int32_t ids[600] = {0}, bad[2] = {5, 320}, negative[1] = {-1};
    struct wire_sampling s = sampling_of(1, true);
    struct rig r;

    rig_create(&r, model, (struct rig_opts){1, 16, 64, 8, 16, .max_ctx = 512, .max_waiting = 2});
    /* SAMP-06: an empty prompt is refused and nobody else notices. */
    refused(&r, (struct kn_submit_args){.prompt = ids}, BT_E_INVALID, "empty");
    refused(&r, (struct kn_submit_args){.prompt = ids, .n_prompt = 512}, BT_E_INVALID, "512");
    refused(&r, (struct kn_submit_args){.prompt = ids, .n_prompt = 600}, BT_E_INVALID, "600");
    refused(&r, (struct kn_submit_args){.prompt = ids, .n_prompt = 256}, BT_E_EXHAUSTED, "256");
    refused(&r, (struct kn_submit_args){.prompt = bad, .n_prompt = 2}, BT_E_INVALID, "320");
    refused(&r, (struct kn_submit_args){.prompt = negative, .n_prompt = 1}, BT_E_INVALID, "-1");
    refused(
        &r,
        (struct kn_submit_args){.prompt = ids, .n_prompt = 1, .answered = ids, .n_answered = 24},
        BT_E_INVALID, "max_tokens");
    refused(&r, (struct kn_submit_args){.prompt = ids, .n_prompt = 1, .leg = KN_LEG_DECODE},
            BT_E_UNSUPPORTED, "handoff");
    assert_int_equal(try_submit(&r, 1, &s, 1), BT_OK);
    assert_int_equal(try_submit(&r, 1, &s, 2), BT_OK);
    refused(&r, (struct kn_submit_args){.prompt = ids, .n_prompt = 1}, BT_E_EXHAUSTED, "2");
    rig_start(&r, NULL);
    rig_wait(&r, 2);
    assert_int_equal(r.results[1].n, ANSWER);
    assert_int_equal(r.results[2].n, ANSWER);
    assert_true(kn_engine_stop(r.engine));
    rig_destroy(&r);
}

static void test_cancel_deadline_stop(void **state)
{
    struct wire_sampling s = sampling_of(1, true);
    int32_t prompt[8];
    struct kn_submit_args late = {.tag = 3,
                                  .prompt = prompt,
                                  .n_prompt = 8,
                                  .sampling = &s,
                                  .claim = 99,
                                  .deadline_ns = bt_now_ns()};
    struct rig r;

    rig_create(&r, model, (struct rig_opts){1, 16, 64, 2, 64, .max_ctx = 1024});
    rig_start(&r, NULL);
    make_prompt(0, 8, prompt);
    s.max_tokens = 200;
    assert_int_equal(try_submit(&r, 6, &s, 1), BT_OK);
    assert_int_equal(try_submit(&r, 7, &s, 2), BT_OK);
    s.max_tokens = 1000;
    assert_int_equal(kn_engine_submit(r.engine, &late, NULL), BT_OK);
    rig_wait_tokens(&r, 1, 3);
    kn_engine_cancel(r.engine, 1);
    kn_engine_cancel(r.engine, 12345); /* unknown: nothing happens */
    rig_wait(&r, 3);
    assert_int_equal(r.results[1].rc, BT_E_CANCELLED);
    assert_int_equal(r.results[2].rc, BT_OK);
    assert_int_equal(r.results[2].n, 200);
    assert_int_equal(r.results[3].rc, BT_E_DEADLINE);
    /* Stop with requests in every state. */
    s.max_tokens = 240;
    for (uint64_t tag = 10; tag < 40; tag++) {
        assert_int_equal(try_submit(&r, (uint32_t)tag % N_REQ, &s, tag), BT_OK);
    }
    rig_wait_tokens(&r, 10, 2);
    assert_true(kn_engine_stop(r.engine));
    assert_int_equal(r.n_last, 33);
    assert_int_equal(try_submit(&r, 0, &s, 50), BT_E_UNAVAILABLE);
    rig_destroy(&r);
}

/* Many threads submit and cancel while the engine runs; everything ends once. */
struct clients {
    struct rig *r;
    uint64_t first;
    int failed;
};

static void *client_main(void *arg)
{
    struct clients *c = arg;
    unsigned rng = (unsigned)c->first + 1;

    for (uint64_t tag = c->first; tag < c->first + 200; tag++) {
        struct wire_sampling s = sampling_of((uint32_t)tag % N_REQ, tag % 2);

        s.max_tokens = 1 + (unsigned)rand_r(&rng) % 10;
        c->failed += try_submit(c->r, (uint32_t)tag % N_REQ, &s, tag) != BT_OK;
        if (rand_r(&rng) % 3 == 0) {
            kn_engine_cancel(c->r->engine, c->first + (unsigned)rand_r(&rng) % 200);
        }
    }
    return NULL;
}

static void test_many_clients(void **state)
{
    struct clients c[3];
    pthread_t threads[3];
    struct rig r;

    rig_create(&r, model, (struct rig_opts){2, 8, 128, 8, 64, .max_ctx = 512});
    rig_start(&r, NULL);
    for (int i = 0; i < 3; i++) {
        c[i] = (struct clients){&r, (uint64_t)i * 200, 0};
        assert_int_equal(pthread_create(&threads[i], NULL, client_main, &c[i]), 0);
    }
    for (int i = 0; i < 3; i++) {
        pthread_join(threads[i], NULL);
        assert_int_equal(c[i].failed, 0);
    }
    rig_wait(&r, 600);
    assert_int_equal(rig_room(&r), 64);
    assert_int_equal(kn_engine_stats(r.engine).waiting, 0);
    assert_true(kn_engine_stop(r.engine));
    rig_destroy(&r);
}

static int open_model(void **state)
{
    model = rig_model();
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
        cmocka_unit_test(test_topology_greedy),
        cmocka_unit_test(test_topology_seeded),
        cmocka_unit_test(test_resume),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_cancel_deadline_stop),
        cmocka_unit_test(test_many_clients),
    };

    return cmocka_run_group_tests(tests, open_model, close_model);
}
