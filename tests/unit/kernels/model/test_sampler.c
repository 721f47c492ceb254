/* The sampler: defined answers at every edge, the right sets and frequencies, finite logprobs. */
#include "tests/unit/cmocka.h"

#include "kernels/model/sampler.c" /* choose_candidates is compared with a plain sort */

#define V 1000

static struct kn_sampler *sampler;
static float logits[V];

static uint32_t rnd_state = 7;

static float rnd(void)
{
    rnd_state = rnd_state * 1664525u + 1013904223u;
    return (float)(rnd_state >> 8) / 16777216.0f;
}

static struct wire_sampling neutral(void)
{
    return (struct wire_sampling){
        .top_p = 1, .repetition_penalty = 1, .max_tokens = 16, .n_logprobs = -1, .seed = 42};
}

static void fill(float scale)
{
    for (int i = 0; i < V; i++) {
        logits[i] = (rnd() - 0.5f) * scale;
    }
}

static struct kn_token sample(const struct wire_sampling *p)
{
    struct kn_sample_args a = {.params = p, .logits = logits};
    struct kn_token t;

    kn_sample(sampler, &a, &t);
    return t;
}

static void test_philox_known_answers(void **state)
{
    static const struct {
        uint32_t ctr[4], key[2], want[4];
    } k[] = {
        {{0, 0, 0, 0}, {0, 0}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
        {{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff},
         {0xffffffff, 0xffffffff},
         {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
        {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
         {0xa4093822, 0x299f31d0},
         {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
    };

    for (size_t i = 0; i < BT_ARRAY_LEN(k); i++) {
        uint32_t c[4];

        memcpy(c, k[i].ctr, sizeof(c));
        kn_philox(c, k[i].key[0], k[i].key[1]);
        assert_memory_equal(c, k[i].want, sizeof(c));
    }
}

static void test_exp(void **state)
{
    assert_true(kn_exp_neg(0) == 1);
    assert_true(kn_exp_neg(-INFINITY) == 0);
    for (int i = 0; i < 87000; i++) {
        float x = -(float)i / 1000;
        double want = exp((double)x);

        assert_true(fabs((double)kn_exp_neg(x) - want) <= 3e-7 * want);
    }
}

static void test_SAMP_01_zero_temperature_is_argmax(void **state)
{
    static const float temps[] = {0.0f, -0.0f, 1e-9f, 1e-38f, 1e-45f};
    static const float top_ps[] = {0, 1, 0.5f};
    static const int top_ks[] = {-1, 0, 1, V};
    static const float min_ps[] = {0, 1, 0.3f};

    fill(10);
    logits[17] = logits[400] = logits[999] = 20; /* a tie */
    for (size_t t = 0; t < BT_ARRAY_LEN(temps); t++) {
        for (int i = 0; i < 3 * 4 * 3; i++) {
            struct wire_sampling p = neutral();

            p.temperature = temps[t];
            p.top_p = top_ps[i % 3];
            p.top_k = top_ks[i / 3 % 4];
            p.min_p = min_ps[i / 12];
            for (int again = 0; again < 3; again++) {
                int32_t id = sample(&p).id;

                if (t < 2) {
                    assert_int_equal(id, 17);
                } else { /* next to zero: one of the equal best */
                    assert_true(id == 17 || id == 400 || id == 999);
                }
            }
        }
    }
}

static void test_SAMP_01_top_p_zero_is_top_1(void **state)
{
    struct wire_sampling p = neutral();

    p.temperature = 100;
    p.top_p = 0;
    fill(10);
    logits[3] = logits[5] = 11;
    for (p.seed = 0; p.seed < 100; p.seed++) {
        assert_int_equal(sample(&p).id, 3);
    }
}

static void test_SAMP_01_never_nan(void **state)
{
    struct wire_sampling p = neutral();

    fill(10);
    for (int i = 0; i < V; i += 2) {
        logits[i] = NAN;
    }
    logits[1] = -INFINITY;
    logits[3] = INFINITY;
    for (int i = 0; i < 2; i++) {
        p.temperature = (float)i;
        p.repetition_penalty = i ? 0.001f : 1;
        assert_int_equal(sample(&p).id, 3);
    }
    for (int i = 0; i < V; i++) {
        logits[i] = NAN;
    }
    assert_int_equal(sample(&p).id, 0);
}

static void test_SAMP_03_bias(void **state)
{
    struct wire_bias one[] = {{5, 100}, {7, -100}}, all[V],
                     bad[] = {{-1, 5}, {V, 5}, {INT32_MAX, 5}};
    int32_t eos[] = {9};
    struct wire_sampling p = neutral();
    struct kn_sample_args a = {.params = &p, .logits = logits, .eos = eos, .n_eos = 1};
    struct kn_token t;

    fill(10);
    logits[7] = 200;
    p.bias = one;
    p.n_bias = 2;
    assert_int_equal(sample(&p).id, 5);
    for (int i = 0; i < V; i++) {
        all[i] = (struct wire_bias){i, -100};
    }
    p.bias = all;
    p.n_bias = V;
    p.n_logprobs = 3;
    for (int i = 0; i < 2; i++) { /* all banned: a defined answer, greedy or not */
        p.temperature = (float)i;
        kn_sample(sampler, &a, &t);
        assert_int_equal(t.id, 9);
        assert_int_equal(t.n_top, 3);
        assert_true(isfinite(t.logprob));
    }
    p.temperature = 0;
    p.bias = bad; /* refused by the check; harmless here */
    p.n_bias = 3;
    assert_int_equal(sample(&p).id, 7);
}

static void test_penalties(void **state)
{
    int32_t prompt[] = {10, 11}, answer[] = {20, 20, 21, V + 5, -3};
    struct wire_sampling p = neutral();
    struct kn_sample_args a = {.params = &p,
                               .logits = logits,
                               .prompt = prompt,
                               .n_prompt = 2,
                               .answer = answer,
                               .n_answer = 5};
    struct kn_token t;

    for (int i = 0; i < V; i++) {
        logits[i] = -1;
    }
    logits[10] = 4;
    logits[20] = 5;
    logits[30] = 3;
    kn_sample(sampler, &a, &t);
    assert_int_equal(t.id, 20);
    p.frequency_penalty = 0.9f; /* 5 - 2 * 0.9 = 3.2 */
    kn_sample(sampler, &a, &t);
    assert_int_equal(t.id, 10);
    p.frequency_penalty = 0.4f; /* 5 - 0.8 = 4.2 */
    kn_sample(sampler, &a, &t);
    assert_int_equal(t.id, 20);
    p.presence_penalty = 0.5f; /* 3.7 */
    kn_sample(sampler, &a, &t);
    assert_int_equal(t.id, 10); /* the prompt does not count */
    p.frequency_penalty = p.presence_penalty = 0;
    p.repetition_penalty = 2; /* 5 / 2, 4 / 2: once each, prompt and answer */
    kn_sample(sampler, &a, &t);
    assert_int_equal(t.id, 30);
    assert_true(logits[20] == 5); /* unchanged */
    for (int i = 0; i < V; i++) { /* scratch left clean */
        assert_true(sampler->count[i] == 0 && sampler->in_text[i] == 0);
    }
}

static void test_min_tokens(void **state)
{
    int32_t eos[] = {1, 2}, answer[8] = {0}, stop[] = {3};
    struct wire_sampling p = neutral();
    struct kn_sample_args a = {
        .params = &p, .logits = logits, .eos = eos, .n_eos = 2, .answer = answer};
    struct kn_token t;

    fill(1);
    logits[1] = 9;
    logits[2] = 8;
    logits[3] = 7;
    logits[4] = 6;
    p.min_tokens = 2;
    p.stop_ids = stop;
    p.n_stop_ids = 1;
    for (a.n_answer = 0; a.n_answer < 4; a.n_answer++) {
        kn_sample(sampler, &a, &t);
        assert_int_equal(t.id, a.n_answer < 2 ? 4 : 1);
    }
}

static int by_rank(const void *x, const void *y)
{
    int32_t a = *(const int32_t *)x, b = *(const int32_t *)y;

    if (logits[a] != logits[b]) {
        return logits[a] > logits[b] ? -1 : 1;
    }
    return a < b ? -1 : 1;
}

/* The kept set must be a prefix of the sorted ids, of the right length. */
static void check_set(const struct wire_sampling *p)
{
    int32_t order[V];
    bool kept[V] = {false};
    double weights[V], sum = 0, part = 0, slack = 1e-9;
    int n_k, n, want = 0;

    for (int i = 0; i < V; i++) {
        order[i] = i;
        sampler->work[i] = logits[i];
    }
    qsort(order, V, sizeof(order[0]), by_rank);
    n = choose_candidates(sampler, p, logits[order[0]]);
    for (int i = 0; i < n; i++) {
        assert_true(i == 0 || sampler->cand[i] > sampler->cand[i - 1]);
        kept[sampler->cand[i]] = true;
    }
    for (int i = 0; i < V; i++) {
        assert_int_equal(kept[order[i]], i < n);
    }
    n_k = p->top_k > 0 && p->top_k < V ? p->top_k : V;
    for (int i = 0; i < n_k; i++) {
        weights[i] = (double)kn_exp_neg((logits[order[i]] - logits[order[0]]) / p->temperature);
        sum += weights[i];
    }
    while (want < n_k && (p->top_p >= 1 || want == 0 || part < (double)p->top_p * sum - slack)) {
        part += weights[want++];
    }
    while (want > 0 && p->min_p > 0 && weights[want - 1] < (double)p->min_p) {
        want--;
    }
    assert_int_equal(n, want);
}

static void test_kept_sets(void **state)
{
    static const int ks[] = {0, 1, 2, 40, 999, 1000};
    static const float ps[] = {1, 0, 0.1f, 0.5f, 0.9f, 0.999f}, ms[] = {0, 0.05f, 0.5f, 1};
    static const float temps[] = {0.2f, 1, 3};

    for (int i = 0; i < 6 * 6 * 4 * 3 * 3; i++) {
        struct wire_sampling p = neutral();

        p.top_k = ks[i % 6];
        p.top_p = ps[i / 6 % 6];
        p.min_p = ms[i / 36 % 4];
        p.temperature = temps[i / 144 % 3];
        fill(12);
        if (i / 432 == 1) { /* few distinct values: ties at every boundary */
            for (int j = 0; j < V; j++) {
                logits[j] = (float)(int)logits[j];
            }
        } else if (i / 432 == 2) { /* one value alone */
            for (int j = 0; j < V; j++) {
                logits[j] = j % 2 ? 0.0f : -0.0f;
            }
        }
        check_set(&p);
    }
}

static void test_frequencies(void **state)
{
    struct wire_sampling p = neutral();
    int32_t answer[1] = {0};
    struct kn_sample_args a = {.params = &p, .logits = logits, .answer = answer};
    int hits[4] = {0}, n = 40000;
    static const double want[4] = {0.5, 0.25, 0.125, 0.125};
    struct kn_token t;

    for (int i = 0; i < V; i++) {
        logits[i] = -1e30f;
    }
    for (int i = 0; i < 4; i++) {
        logits[100 * i] = (float)log(want[i]) * 2;
    }
    p.temperature = 2;
    for (int i = 0; i < n; i++) {
        p.seed = (uint64_t)i / 100;
        p.choice = (uint32_t)i % 100;
        kn_sample(sampler, &a, &t);
        assert_true(t.id % 100 == 0 && t.id < 400);
        hits[t.id / 100]++;
    }
    for (int i = 0; i < 4; i++) { /* five standard deviations */
        double sd = sqrt(n * want[i] * (1 - want[i]));

        assert_true(fabs(hits[i] - n * want[i]) < 5 * sd);
    }
}

/* Seed, choice and position each matter; nothing else does. */
static void test_draw_is_keyed(void **state)
{
    struct wire_sampling p = neutral();
    int32_t answer[64] = {0};
    struct kn_sample_args a = {.params = &p, .logits = logits, .answer = answer};
    struct kn_token first[64], t;
    int same_choice = 0, same_seed = 0, same_pos = 0;

    fill(1);
    p.temperature = 1;
    for (a.n_answer = 0; a.n_answer < 64; a.n_answer++) {
        kn_sample(sampler, &a, &first[a.n_answer]);
    }
    for (int i = 63; i >= 0; i--) { /* any order, other calls between */
        a.n_answer = (size_t)i;
        kn_sample(sampler, &a, &t);
        assert_int_equal(t.id, first[i].id);
        p.choice = 1;
        kn_sample(sampler, &a, &t);
        same_choice += t.id == first[i].id;
        p.choice = 0;
        p.seed = 43;
        kn_sample(sampler, &a, &t);
        same_seed += t.id == first[i].id;
        p.seed = 42;
        same_pos += i > 0 && first[i].id == first[i - 1].id;
    }
    assert_true(same_choice < 4 && same_seed < 4 && same_pos < 4);
}

static void test_LOGP_01(void **state)
{
    struct wire_sampling p = neutral();
    struct wire_bias mask[V];
    struct kn_token t;
    double sum = 0;

    fill(8);
    logits[50] = 9;
    logits[51] = -INFINITY;
    logits[52] = NAN;
    t = sample(&p);
    assert_true(t.n_top == 0 && t.logprob == 0); /* off */
    p.n_logprobs = 0;                            /* zero alternatives is not off */
    t = sample(&p);
    assert_int_equal(t.id, 50);
    assert_int_equal(t.n_top, 0);
    assert_true(t.logprob < 0);
    for (int i = 0; i < V; i++) {
        sum += i == 51 || i == 52 ? 0 : exp((double)logits[i]);
    }
    assert_true(fabs((double)t.logprob - (9 - log(sum))) < 1e-5);
    p.n_logprobs = 20;
    t = sample(&p);
    assert_int_equal(t.n_top, 20);
    assert_int_equal(t.top[0].id, 50);
    assert_true(t.top[0].logprob == t.logprob);
    for (int i = 1; i < 20; i++) {
        assert_true(t.top[i].logprob <= t.top[i - 1].logprob);
        assert_true(logits[t.top[i].id] <= logits[t.top[i - 1].id]);
    }
    /* Hard masking: the chosen token may have no probability at all, the number stays finite. */
    for (int i = 0; i < V; i++) {
        mask[i] = (struct wire_bias){i, i == 51 ? 100 : -100};
    }
    p.bias = mask;
    p.n_bias = V;
    logits[51] = -1e30f;
    t = sample(&p);
    assert_int_equal(t.id, 51);
    assert_true(t.logprob == -9999);
    /* Everything at -infinity. */
    for (int i = 0; i < V; i++) {
        logits[i] = -INFINITY;
    }
    t = sample(&p);
    assert_int_equal(t.n_top, 20);
    for (int i = 0; i < 20; i++) {
        assert_true(isfinite(t.top[i].logprob));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_philox_known_answers),
        cmocka_unit_test(test_exp),
        cmocka_unit_test(test_SAMP_01_zero_temperature_is_argmax),
        cmocka_unit_test(test_SAMP_01_top_p_zero_is_top_1),
        cmocka_unit_test(test_SAMP_01_never_nan),
        cmocka_unit_test(test_SAMP_03_bias),
        cmocka_unit_test(test_penalties),
        cmocka_unit_test(test_min_tokens),
        cmocka_unit_test(test_kept_sets),
        cmocka_unit_test(test_frequencies),
        cmocka_unit_test(test_draw_is_keyed),
        cmocka_unit_test(test_LOGP_01),
    };
    struct bt_err err = {0};
    int rc;

    if (kn_sampler_create(V, &sampler, &err) < 0) {
        return 1;
    }
    rc = cmocka_run_group_tests(tests, NULL, NULL);
    kn_sampler_destroy(sampler);
    return rc;
}
