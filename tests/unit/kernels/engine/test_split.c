/* Two engines in one process, joined by two handoffs over loopback: prompt on one, answer on the
 * other. The answer equals that of one engine, whatever is aborted around it, and all pages
 * return. */
#include "tests/unit/kernels/engine/rig.h"

#define N_SHAPES 6
#define ANSWER   12

static struct bt_model_file *model;

static const uint32_t prompt_len[N_SHAPES] = {1, 16, 33, 64, 120, 250};

struct node {
    struct rig rig;
    struct kv_handoff *handoff;
    const char *name;
};

struct pair {
    struct node p, d;
    uint64_t next_tag;
};

static void node_open(struct node *n, const char *name, struct rig_opts o)
{
    struct kv_handoff_cfg cfg = {.net = {.listen = "127.0.0.1:0",
                                         .transports = "auto",
                                         .devices = "",
                                         .method = "auto",
                                         .max_message_bytes = 4u << 20},
                                 .node_name = name,
                                 .incarnation = 1,
                                 .compat = {7},
                                 .silence_ns = 10 * BT_NS_PER_S,
                                 .lease_ns = 20 * BT_NS_PER_S,
                                 .max_open = 256,
                                 .max_inflight_bytes = 8u << 20};
    struct bt_err err = {0};

    o.block = 64; /* prompts repeat: both ends share and publish blocks */
    rig_create(&n->rig, model, o);
    n->name = name;
    cfg.pool = kn_engine_pool(n->rig.engine);
    if (kv_handoff_create(&cfg, &n->handoff, &err) < 0) {
        fail_msg("kv_handoff_create: %s", err.msg);
    }
    rig_start(&n->rig, n->handoff);
}

/* Each node's engine stops before either handoff goes. */
static void pair_close(struct pair *two)
{
    assert_true(kn_engine_stop(two->d.rig.engine));
    assert_true(kn_engine_stop(two->p.rig.engine));
    kv_handoff_destroy(two->d.handoff);
    kv_handoff_destroy(two->p.handoff);
    rig_destroy(&two->d.rig);
    rig_destroy(&two->p.rig);
}

static void pair_open(struct pair *two, struct rig_opts p, struct rig_opts d)
{
    memset(two, 0, sizeof(*two));
    node_open(&two->p, "p0", p);
    node_open(&two->d, "d0", d);
    two->next_tag = 1;
}

static void make_prompt(uint32_t shape, int32_t *ids)
{
    uint32_t n_vocab = (uint32_t)bt_model_config(model)->n_vocab;

    for (uint32_t k = 0; k < prompt_len[shape]; k++) {
        ids[k] = (int32_t)(3 + (shape * 7919 + k * k * 31 + k * 17) % (n_vocab - 3));
    }
}

static struct wire_sampling sampling_of(uint32_t shape)
{
    struct wire_sampling s;

    wire_sampling_defaults(&s);
    s.max_tokens = ANSWER;
    s.ignore_eos = true;
    if (shape % 2) {
        s.temperature = 0.8f;
        s.seed = shape;
    }
    return s;
}

struct ask {
    uint32_t shape, max_tokens;
    uint64_t deadline_ns, claim;
    const int32_t *answered;
    uint32_t n_answered;
    bool p, d; /* which legs */
};

static uint64_t submit(struct pair *two, struct ask q)
{
    struct wire_sampling s = sampling_of(q.shape);
    int32_t prompt[512];
    uint64_t tag = two->next_tag++;
    struct kn_submit_args a = {.tag = tag,
                               .leg = KN_LEG_PREFILL,
                               .prompt = prompt,
                               .n_prompt = prompt_len[q.shape],
                               .answered = q.answered,
                               .n_answered = q.n_answered,
                               .sampling = &s,
                               .claim = q.claim ? q.claim : tag,
                               .deadline_ns = q.deadline_ns ? q.deadline_ns : BT_NEVER_NS,
                               .handoff = {1, tag},
                               .peer_name = two->p.name,
                               .peer_incarnation = 1,
                               .peer_address = kv_handoff_address(two->p.handoff)};

    s.max_tokens = q.max_tokens ? q.max_tokens : ANSWER;
    make_prompt(q.shape, prompt);
    if (q.p) {
        assert_int_equal(kn_engine_submit(two->p.rig.engine, &a, NULL), BT_OK);
    }
    a.leg = KN_LEG_DECODE;
    if (q.d) {
        assert_int_equal(kn_engine_submit(two->d.rig.engine, &a, NULL), BT_OK);
    }
    return tag;
}

/* Answers of one engine alone. */
static void reference(struct rig_result *want)
{
    struct rig r;

    rig_create(&r, model, (struct rig_opts){1, 16, 256, 8, 64, .max_ctx = 512});
    rig_start(&r, NULL);
    for (uint32_t i = 0; i < N_SHAPES; i++) {
        struct wire_sampling s = sampling_of(i);
        int32_t prompt[512];
        struct kn_submit_args a = {.tag = i,
                                   .prompt = prompt,
                                   .n_prompt = prompt_len[i],
                                   .sampling = &s,
                                   .deadline_ns = BT_NEVER_NS};

        make_prompt(i, prompt);
        assert_int_equal(kn_engine_submit(r.engine, &a, NULL), BT_OK);
    }
    rig_wait(&r, N_SHAPES);
    memcpy(want, r.results, N_SHAPES * sizeof(*want));
    assert_true(kn_engine_stop(r.engine));
    rig_destroy(&r);
}

static void check(const struct pair *two, uint64_t tag, const struct rig_result *want)
{
    const struct rig_result *p = &two->p.rig.results[tag], *d = &two->d.rig.results[tag];

    if (p->rc < 0 || d->rc < 0) {
        fail_msg("request %llu: P %s, D %s", (unsigned long long)tag, p->err_msg, d->err_msg);
    }
    assert_true(p->handed_over);
    assert_int_equal(p->n, p->first + 1);
    assert_int_equal(d->first, p->n);
    assert_int_equal(d->n, want->n);
    assert_int_equal(d->finish, want->finish);
    assert_int_equal(p->ids[p->first], want->ids[p->first]);
    assert_memory_equal(d->ids + d->first, want->ids + d->first,
                        (d->n - d->first) * sizeof(*d->ids));
}

static void test_split_equals_colocated(void **state)
{
    static const struct {
        struct rig_opts p, d;
    } shapes[] = {
        {{1, 16, 64, 8, 128, .max_ctx = 512}, {1, 16, 64, 8, 128, .max_ctx = 512}},
        {{2, 8, 7, 3, 256, .max_ctx = 512}, {1, 64, 512, 8, 32, .max_ctx = 512}},
        {{1, 32, 512, 8, 64, .max_ctx = 512}, {2, 8, 16, 2, 256, .max_ctx = 512}},
        /* Pools that hold little more than the longest. */
        {{1, 16, 64, 8, 20, .max_ctx = 512}, {1, 16, 64, 8, 18, .max_ctx = 512}},
    };
    struct rig_result *want = bt_calloc(N_SHAPES, sizeof(*want));
    struct pair two;

    reference(want);
    for (size_t v = 0; v < BT_ARRAY_LEN(shapes); v++) {
        uint64_t first;

        pair_open(&two, shapes[v].p, shapes[v].d);
        first = two.next_tag;
        for (uint32_t i = 0; i < 2 * N_SHAPES; i++) {
            submit(&two, (struct ask){.shape = i % N_SHAPES, .p = true, .d = true});
        }
        rig_wait(&two.d.rig, 2 * N_SHAPES);
        rig_wait(&two.p.rig, 2 * N_SHAPES);
        for (uint32_t i = 0; i < 2 * N_SHAPES; i++) {
            check(&two, first + i, &want[i % N_SHAPES]);
        }
        /* Once more, one by one: P computes the rest behind whole blocks only. */
        for (uint32_t i = 0; i < 2 * N_SHAPES; i++) {
            uint64_t tag = submit(&two, (struct ask){.shape = i % N_SHAPES, .p = true, .d = true});

            rig_wait(&two.d.rig, 2 * N_SHAPES + i + 1);
            rig_wait(&two.p.rig, 2 * N_SHAPES + i + 1);
            check(&two, tag, &want[i % N_SHAPES]);
            if (v == 0) {
                assert_int_equal(two.p.rig.results[tag].cached,
                                 (prompt_len[i % N_SHAPES] - 1) / 64 * 64);
                assert_int_equal(two.d.rig.results[tag].cached, 0);
            }
        }
        pair_close(&two);
    }
    free(want);
}

static void test_resume_split(void **state)
{
    struct rig_result *want = bt_calloc(N_SHAPES, sizeof(*want));
    struct pair two;

    reference(want);
    pair_open(&two, (struct rig_opts){1, 16, 64, 8, 64, .max_ctx = 512},
              (struct rig_opts){1, 16, 64, 8, 64, .max_ctx = 512});
    for (uint32_t i = 0; i < N_SHAPES; i++) {
        submit(&two,
               (struct ask){
                   .shape = i, .p = true, .d = true, .answered = want[i].ids, .n_answered = i + 1});
    }
    rig_wait(&two.d.rig, N_SHAPES);
    rig_wait(&two.p.rig, N_SHAPES);
    for (uint32_t i = 0; i < N_SHAPES; i++) {
        assert_int_equal(two.p.rig.results[1 + i].first, i + 1);
        check(&two, 1 + i, &want[i]);
    }
    pair_close(&two);
    free(want);
}

static void test_SAMP_04_one_token(void **state)
{
    struct pair two;
    uint64_t tag;

    pair_open(&two, (struct rig_opts){1, 16, 64, 8, 64, .max_ctx = 512},
              (struct rig_opts){1, 16, 64, 8, 64, .max_ctx = 512});
    tag = submit(&two, (struct ask){.shape = 3, .p = true, .d = true, .max_tokens = 1});
    rig_wait(&two.p.rig, 1);
    /* As a router does. D hears it from P as well, unless its ticket comes after P has forgotten.
     */
    kn_engine_cancel(two.d.rig.engine, tag);
    rig_wait(&two.d.rig, 1);
    assert_int_equal(two.p.rig.results[tag].n, 1);
    assert_int_equal(two.p.rig.results[tag].finish, KN_FINISH_LENGTH);
    assert_int_equal(two.d.rig.results[tag].n, 0);
    assert_true(two.d.rig.results[tag].rc < 0);
    assert_int_equal(kn_engine_stats(two.d.rig.engine).steps, 0);
    pair_close(&two);
}

/* D waits for KV that never comes, and has nothing else to do. */
static void test_KVX_01_deadline_on_idle_node(void **state)
{
    struct pair two;
    uint64_t d, p;

    pair_open(&two, (struct rig_opts){1, 16, 64, 8, 64, .max_ctx = 512},
              (struct rig_opts){1, 16, 64, 8, 64, .max_ctx = 512});
    d = submit(&two, (struct ask){
                         .shape = 4, .d = true, .deadline_ns = bt_deadline_ns(600 * BT_NS_PER_MS)});
    p = submit(&two, (struct ask){
                         .shape = 4, .p = true, .deadline_ns = bt_deadline_ns(600 * BT_NS_PER_MS)});
    rig_wait(&two.d.rig, 1);
    rig_wait(&two.p.rig, 1);
    assert_int_equal(two.d.rig.results[d].rc, BT_E_DEADLINE);
    assert_int_equal(two.p.rig.results[p].rc, BT_E_DEADLINE);
    assert_int_equal(two.p.rig.results[p].n, 1);
    assert_int_equal(rig_room(&two.d.rig), 64);
    assert_int_equal(rig_room(&two.p.rig), 64);
    pair_close(&two);
}

static uint32_t rng(uint32_t *state, uint32_t n)
{
    *state = *state * 1664525u + 1013904223u;
    return (uint32_t)(((uint64_t)(*state >> 4) * n) >> 28);
}

/* D has room for two. A is aborted at a random point, on D, on P or on both, and B starts at once:
 * B is what it always is, and nothing leaks. */
static void test_KVX_04_abort_then_start(void **state)
{
    struct rig_result *want = bt_calloc(N_SHAPES, sizeof(*want));
    uint32_t rounds = 1000, seed = 1;
    struct pair two;

    reference(want);
    pair_open(&two, (struct rig_opts){1, 16, 64, 8, 64, .max_ctx = 512},
              (struct rig_opts){1, 16, 64, 8, 34, .max_ctx = 512});
    for (uint32_t i = 0; i < rounds; i++) {
        struct timespec pause = {.tv_nsec = (long)rng(&seed, 4) * (long)rng(&seed, 1000000)};
        uint32_t shape = rng(&seed, N_SHAPES), where = 1 + rng(&seed, 3);
        uint64_t a = submit(&two, (struct ask){.shape = 5, .p = true, .d = true}), b;

        nanosleep(&pause, NULL);
        if (where & 1) {
            kn_engine_cancel(two.d.rig.engine, a);
        }
        if (where & 2) {
            kn_engine_cancel(two.p.rig.engine, a);
        }
        b = submit(&two, (struct ask){.shape = shape, .p = true, .d = true});
        rig_wait_tokens(&two.d.rig, b, RIG_MAX_ANSWER);
        rig_wait_tokens(&two.p.rig, b, RIG_MAX_ANSWER);
        check(&two, b, &want[shape]);
        /* Whatever one side did not cancel ends as well, or the router would cancel it. */
        kn_engine_cancel(two.d.rig.engine, a);
        kn_engine_cancel(two.p.rig.engine, a);
    }
    rig_wait(&two.d.rig, 2 * rounds);
    rig_wait(&two.p.rig, 2 * rounds);
    assert_int_equal(rig_room(&two.d.rig), 34);
    assert_int_equal(rig_room(&two.p.rig), 64);
    pair_close(&two);
    free(want);
}

/* Many at once on small pools, all dropped in the middle; then one more at full health. */
static void test_KVX_02_mass_cancel(void **state)
{
    struct rig_result *want = bt_calloc(N_SHAPES, sizeof(*want));
    uint32_t seed = 5, total = 0;
    struct pair two;

    reference(want);
    pair_open(&two, (struct rig_opts){1, 16, 64, 8, 40, .max_ctx = 512},
              (struct rig_opts){1, 16, 64, 8, 40, .max_ctx = 512});
    for (int round = 0; round < 5; round++) {
        uint64_t first = two.next_tag, probe;
        struct timespec pause = {.tv_nsec = (long)rng(&seed, 20000000)};

        for (int i = 0; i < 60; i++) {
            submit(&two, (struct ask){.shape = rng(&seed, N_SHAPES), .p = true, .d = true});
        }
        nanosleep(&pause, NULL);
        for (uint64_t tag = first; tag < first + 60; tag++) {
            kn_engine_cancel(two.d.rig.engine, tag);
            kn_engine_cancel(two.p.rig.engine, tag);
        }
        probe = submit(&two, (struct ask){.shape = 4, .p = true, .d = true});
        total += 61;
        rig_wait(&two.d.rig, total);
        rig_wait(&two.p.rig, total);
        check(&two, probe, &want[4]);
        assert_int_equal(rig_room(&two.d.rig), 40);
        assert_int_equal(rig_room(&two.p.rig), 40);
    }
    pair_close(&two);
    free(want);
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
        cmocka_unit_test(test_split_equals_colocated),
        cmocka_unit_test(test_resume_split),
        cmocka_unit_test(test_SAMP_04_one_token),
        cmocka_unit_test(test_KVX_01_deadline_on_idle_node),
        cmocka_unit_test(test_KVX_04_abort_then_start),
        cmocka_unit_test(test_KVX_02_mass_cancel),
    };

    return cmocka_run_group_tests(tests, open_model, close_model);
}
