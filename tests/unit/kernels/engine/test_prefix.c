/* The engine with a tiny real model and prefix reuse: what lies in the pool is not computed again,
 * and no bit of an answer changes. Every answer is compared with that of an engine without reuse.
 */
#include "tests/unit/kernels/engine/rig.h"

#define BLOCK   32
#define MAX_CTX 512

static struct bt_model_file *model;
static struct rig plain; /* without reuse, one request at a time */
static uint32_t plain_done;

struct ask {
    int32_t prompt[MAX_CTX];
    uint32_t n_prompt, max_tokens, seed; /* seed 0 = greedy */
    uint64_t claim;
    const char *salt;
};

static void fill(int32_t *ids, uint32_t from, uint32_t to, uint32_t family)
{
    int32_t n_vocab = bt_model_config(model)->n_vocab;

    for (uint32_t k = from; k < to; k++) {
        ids[k] = (int32_t)(3 + (family * 7919 + k * k * 31 + k * 17) % (uint32_t)(n_vocab - 3));
    }
}

/* `common` tokens of family 0, then its own. */
static struct ask make_ask(uint32_t family, uint32_t n, uint32_t common)
{
    struct ask q = {.n_prompt = n, .max_tokens = 8, .seed = family % 3, .claim = family};

    fill(q.prompt, 0, BT_MIN(common, n), 0);
    fill(q.prompt, BT_MIN(common, n), n, family + 1);
    return q;
}

static void submit(struct rig *r, const struct ask *q, uint64_t tag)
{
    struct wire_sampling s;
    struct kn_submit_args a = {.tag = tag,
                               .prompt = q->prompt,
                               .n_prompt = q->n_prompt,
                               .sampling = &s,
                               .claim = q->claim,
                               .cache_salt = q->salt,
                               .deadline_ns = BT_NEVER_NS};

    wire_sampling_defaults(&s);
    s.max_tokens = q->max_tokens;
    s.ignore_eos = true;
    if (q->seed) {
        s.temperature = 0.9f;
        s.repetition_penalty = 1.1f;
        s.seed = q->seed;
    }
    assert_int_equal(kn_engine_submit(r->engine, &a, NULL), BT_OK);
}

static void check(const struct rig *r, uint64_t tag, const struct ask *q)
{
    const struct rig_result *got = &r->results[tag], *want = &plain.results[plain_done];

    submit(&plain, q, plain_done);
    rig_wait(&plain, plain_done + 1);
    plain_done++;
    if (got->rc < 0) {
        fail_msg("request %llu: %s", (unsigned long long)tag, got->err_msg);
    }
    assert_int_equal(want->n, q->max_tokens);
    assert_int_equal(want->cached, 0);
    assert_int_equal(got->n, want->n);
    assert_memory_equal(got->ids, want->ids, want->n * sizeof(*got->ids));
}

static void open_rig(struct rig *r, struct rig_opts o)
{
    o.max_ctx = MAX_CTX;
    rig_create(r, model, o);
    rig_start(r, NULL);
}

static void close_rig(struct rig *r)
{
    assert_int_equal(rig_room(r), kv_pool_stats(kn_engine_pool(r->engine)).n_pages);
    assert_true(kn_engine_stop(r->engine));
    rig_destroy(r);
}

/* Tokens that the engine computes for one request. */
static uint64_t run_alone(struct rig *r, const struct ask *q, uint64_t tag)
{
    uint64_t before = kn_engine_stats(r->engine).tokens_computed;
    uint32_t n_last = r->n_last; /* the engine is idle */

    submit(r, q, tag);
    rig_wait(r, n_last + 1);
    /* The step that ended it is counted before its outputs go out. */
    return kn_engine_stats(r->engine).tokens_computed - before;
}

/* Prompts around whole blocks and chunks, three times each. */
static void test_SCHED_03_lengths(void **state)
{
    static const int budgets[] = {BLOCK - 1, BLOCK, BLOCK + 1, 512};
    static const uint32_t lengths[] = {1,         BLOCK - 1,     BLOCK,     BLOCK + 1,
                                       2 * BLOCK, 4 * BLOCK - 1, 4 * BLOCK, 4 * BLOCK + 1};

    for (size_t b = 0; b < BT_ARRAY_LEN(budgets); b++) {
        struct rig r;
        uint64_t tag = 0;

        open_rig(&r, (struct rig_opts){1, 8, budgets[b], 8, 256, .block = BLOCK});
        for (uint32_t i = 0; i < BT_ARRAY_LEN(lengths); i++) {
            struct ask q = make_ask(i, lengths[i], 0);

            for (int time = 0; time < 3; time++, tag++) {
                /* A block that would leave nothing to compute is computed again. */
                uint32_t cached = time ? (q.n_prompt - 1) / BLOCK * BLOCK : 0;

                assert_int_equal(run_alone(&r, &q, tag), q.n_prompt - cached + q.max_tokens - 1);
                assert_int_equal(r.results[tag].cached, cached);
                check(&r, tag, &q);
            }
        }
        assert_true(kn_engine_stats(r.engine).tokens_cached > 0);
        close_rig(&r);
    }
}

/* Chats: a turn's prompt is the last prompt, its answer and a few new tokens. */
static void test_turns(void **state)
{
    static const int pages[] = {8, 16, 32};

    for (size_t p = 0; p < BT_ARRAY_LEN(pages); p++) {
        struct rig r;

        open_rig(
            &r, (struct rig_opts){1, pages[p], 64, 8, (uint32_t)(2048 / pages[p]), .block = BLOCK});
        for (uint32_t chat = 0; chat < 3; chat++) {
            struct ask q = make_ask(chat, 45, 0);

            q.max_tokens = 30;
            for (uint32_t turn = 0; turn < 5; turn++) {
                uint64_t tag = chat * 5 + turn;
                /* All that was computed: the last token of the answer was not. */
                uint32_t known = turn ? q.n_prompt - 12 - 1 : 0, cached = known / BLOCK * BLOCK;

                assert_int_equal(run_alone(&r, &q, tag), q.n_prompt - cached + q.max_tokens - 1);
                assert_int_equal(r.results[tag].cached, cached);
                check(&r, tag, &q);
                memcpy(q.prompt + q.n_prompt, r.results[tag].ids, q.max_tokens * sizeof(*q.prompt));
                fill(q.prompt, q.n_prompt + q.max_tokens, q.n_prompt + q.max_tokens + 12,
                     chat * 10 + turn + 50);
                q.n_prompt += q.max_tokens + 12;
            }
        }
        close_rig(&r);
    }
}

/* Another salt never hits, whatever lies there. */
static void test_salts_share_nothing(void **state)
{
    static const char *const salts[] = {NULL, "a", "b", ""};
    struct ask q = make_ask(5, 4 * BLOCK + 1, 0);
    struct rig r;

    open_rig(&r, (struct rig_opts){1, 8, 512, 8, 256, .block = BLOCK});
    for (uint64_t tag = 0; tag < 12; tag++) {
        uint32_t cached = tag < 3 ? 0 : 4 * BLOCK;

        q.salt = salts[tag % 4];
        assert_int_equal(run_alone(&r, &q, tag), q.n_prompt - cached + q.max_tokens - 1);
        assert_int_equal(r.results[tag].cached, cached);
        check(&r, tag, &q);
    }
    close_rig(&r);
}

/* 64 requests with one long prefix meet on a cold engine, then again on a warm one. */
static void test_PFX_03_same_prefix_at_once(void **state)
{
    struct ask *q = bt_calloc(64, sizeof(*q));
    struct rig r;

    assert_non_null(q);
    rig_create(&r, model,
               (struct rig_opts){1, 8, 512, 64, 1024, .max_ctx = MAX_CTX, .block = BLOCK});
    for (uint32_t i = 0; i < 64; i++) {
        q[i] = make_ask(i, 97 + i % 40, 96);
        submit(&r, &q[i], i); /* before the start: they meet in one batch */
    }
    rig_start(&r, NULL);
    rig_wait(&r, 64);
    for (uint32_t i = 0; i < 64; i++) {
        submit(&r, &q[i], 64 + i);
    }
    rig_wait(&r, 128);
    for (uint32_t i = 0; i < 64; i++) {
        check(&r, i, &q[i]);
        assert_int_equal(r.results[64 + i].cached, 96 + (q[i].n_prompt - 97) / BLOCK * BLOCK);
        assert_memory_equal(r.results[64 + i].ids, r.results[i].ids,
                            q[i].max_tokens * sizeof(int32_t));
    }
    close_rig(&r);
    free(q);
}

/* Keys of 8 bits collide all the time: misses, never wrong answers. */
static void test_PFX_01_collisions(void **state)
{
    struct rig r;
    struct kn_engine_stats s;
    struct ask q;

    open_rig(&r, (struct rig_opts){1, 8, 512, 8, 4096, .block = 8, .key_bits = 8});
    for (uint32_t i = 0; i < 1000; i++) {
        /* Pairs with equal last block and length behind different ones among them. */
        q = make_ask(i % 500, 33, i % 7 * 4);
        fill(q.prompt, 24, 33, 0);
        q.max_tokens = 2;
        submit(&r, &q, i);
    }
    rig_wait(&r, 1000);
    for (uint32_t i = 0; i < 1000; i++) {
        q = make_ask(i % 500, 33, i % 7 * 4);
        fill(q.prompt, 24, 33, 0);
        q.max_tokens = 2;
        check(&r, i, &q);
    }
    s = kn_engine_stats(r.engine);
    assert_true(s.key_collisions > 100);
    assert_true(s.tokens_cached > 0);
    close_rig(&r);
}

/* A pool so small that requests push out each other and each other's blocks. */
static void test_short_of_pages(void **state)
{
    struct kn_engine_stats s;
    struct rig r;

    open_rig(&r, (struct rig_opts){1, 8, 64, 8, 30, .block = BLOCK});
    for (uint32_t round = 0; round < 3; round++) {
        for (uint32_t i = 0; i < 12; i++) {
            struct ask q = make_ask(i, 60 + 11 * (i % 5), i % 2 ? 64 : 0);

            q.max_tokens = 70;
            submit(&r, &q, round * 12 + i);
        }
    }
    rig_wait(&r, 36);
    for (uint32_t tag = 0; tag < 36; tag++) {
        struct ask q = make_ask(tag % 12, 60 + 11 * (tag % 12 % 5), tag % 12 % 2 ? 64 : 0);

        q.max_tokens = 70;
        check(&r, tag, &q);
    }
    s = kn_engine_stats(r.engine);
    assert_true(s.preemptions > 0);
    assert_true(s.blocks_evicted > 0);
    assert_true(s.tokens_cached > 0);
    close_rig(&r);
}

/* Cancelled requests leave what they had computed, and no page is lost. */
static void test_cancelled(void **state)
{
    struct rig r;
    struct ask q = make_ask(1, 200, 0);

    open_rig(&r, (struct rig_opts){1, 8, 64, 8, 64, .block = BLOCK});
    q.max_tokens = 100;
    submit(&r, &q, 0);
    rig_wait_tokens(&r, 0, 1);
    kn_engine_cancel(r.engine, 0);
    rig_wait(&r, 1);
    assert_int_equal(rig_room(&r), 64);
    q.max_tokens = 8;
    submit(&r, &q, 1);
    rig_wait(&r, 2);
    assert_int_equal(r.results[1].cached, 192);
    check(&r, 1, &q);
    close_rig(&r);
}

static int open_model(void **state)
{
    model = rig_model();
    open_rig(&plain, (struct rig_opts){1, 16, 512, 1, 64});
    return 0;
}

static int close_model(void **state)
{
    close_rig(&plain);
    bt_model_close(model);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_SCHED_03_lengths),
        cmocka_unit_test(test_turns),
        cmocka_unit_test(test_salts_share_nothing),
        cmocka_unit_test(test_PFX_03_same_prefix_at_once),
        cmocka_unit_test(test_PFX_01_collisions),
        cmocka_unit_test(test_short_of_pages),
        cmocka_unit_test(test_cancelled),
    };

    return cmocka_run_group_tests(tests, open_model, close_model);
}
