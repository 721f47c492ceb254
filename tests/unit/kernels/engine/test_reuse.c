/* The scheduler with a prefix index (sim.h): what is computed and what is not, who gives way. */
#include "tests/unit/kernels/engine/sim.h"

static uint64_t computed(const struct node *n)
{
    return kn_sched_stats(n->sched).tokens_computed;
}

/* A chat: each turn's prompt is the last one, its answer, and something new. */
static void test_turns(void **state)
{
    struct node *n = node_create(NULL, (struct node_cfg){64, 8, 32, 4});
    /* A turn that resumes is a prompt with part of its answer: the same ids. */
    struct req r = {.tag = 1, .n_prompt = 50, .max_tokens = 20};
    uint64_t before;

    submit(n, r);
    run_until_idle(n);
    assert_int_equal(computed(n), 50 + 19);
    check_answer(n, r);
    for (int turn = 1; turn <= 4; turn++) {
        /* 20 more each turn; all but the last one of them lie in the pool, in blocks of 16. */
        uint32_t known = 50 + 20 * (uint32_t)turn, hit = (known - 1) / 16 * 16;

        r.n_answered = 20 * (uint32_t)turn;
        r.max_tokens = r.n_answered + 20;
        n->results[1] = (struct result){0};
        before = computed(n);
        submit(n, r);
        run_until_idle(n);
        check_answer(n, r);
        assert_int_equal(n->results[1].cached, hit);
        assert_int_equal(computed(n) - before, known - hit + 19);
    }
    node_destroy(n);
}

static void test_PFX_03_same_prefix_at_once(void **state)
{
    struct node *n = node_create(NULL, (struct node_cfg){1200, 8, 4096, 64});
    struct kv_pool_stats s;

    for (int round = 0; round < 2; round++) {
        uint64_t before = computed(n);

        reuse.common = 128;
        for (uint32_t i = 0; i < 64; i++) {
            submit(n, (struct req){.tag = i, .n_prompt = 130 + i % 5, .max_tokens = 10});
        }
        for (int i = 0; i < 3; i++) {
            step(n);
        }
        /* The others waited until the first one had computed it. */
        s = kv_pool_stats(n->pool);
        assert_int_equal(s.n_index, 16);
        assert_int_equal(s.n_cached, 0);
        run_until_idle(n);
        for (uint32_t i = 0; i < 64; i++) {
            check_answer(n, (struct req){.tag = i, .n_prompt = 130 + i % 5, .max_tokens = 10});
            assert_int_equal(n->results[i].cached, round == 0 && i == 0 ? 0 : 128);
        }
        assert_true(computed(n) - before < 128 + 64 * (4 + 2 + 10));
        memset(n->results, 0, sizeof(n->results));
    }
    reuse.common = 0;
    node_destroy(n);
}

static void test_preempted_keeps_blocks(void **state)
{
    /* As test_exhaustion_oldest_finishes, with one prefix for all. */
    struct node *n = node_create(NULL, (struct node_cfg){16, 8, 64, 8});
    struct kn_sched_stats s;

    reuse.common = 32;
    for (uint32_t i = 0; i < 6; i++) {
        submit(n, (struct req){.tag = i, .claim = i, .n_prompt = 34, .max_tokens = 60});
    }
    run_until_idle(n);
    for (uint32_t i = 0; i < 6; i++) {
        check_answer(n, (struct req){.tag = i, .n_prompt = 34, .max_tokens = 60});
    }
    s = kn_sched_stats(n->sched);
    assert_true(s.preemptions > 0);
    /* The common part was computed by the first of them alone. */
    assert_int_equal(s.tokens_cached, 5 * 32);
    reuse.common = 0;
    node_destroy(n);
}

static void test_cold_prompts_evict(void **state)
{
    struct node *n = node_create(NULL, (struct node_cfg){40, 8, 64, 4});

    for (uint32_t round = 0; round < 3; round++) {
        for (uint32_t i = 0; i < 20; i++) {
            submit(n, (struct req){.tag = i, .claim = i, .n_prompt = 100, .max_tokens = 3});
        }
        run_until_idle(n);
        for (uint32_t i = 0; i < 20; i++) {
            check_answer(n, (struct req){.tag = i, .n_prompt = 100, .max_tokens = 3});
        }
        memset(n->results, 0, sizeof(n->results));
    }
    assert_true(kv_index_stats(n->index).evictions > 100);
    assert_int_equal(kv_index_stats(n->index).n_held, 0);
    node_destroy(n);
}

/* Two young requests hold little but the blocks that they share: only both together make room, and
 * the oldest gets it. */
static void test_oldest_frees_shared_pages(void **state)
{
    struct node *n = node_create(NULL, (struct node_cfg){22, 8, 256, 4});
    struct req young[2] = {{.tag = 1, .claim = 8, .n_prompt = 97, .max_tokens = 8},
                           {.tag = 2, .claim = 9, .n_prompt = 97, .max_tokens = 8}},
               old = {.tag = 3, .claim = 1, .n_prompt = 49, .max_tokens = 100};

    reuse.common = 96;
    submit(n, young[0]);
    run_until_idle(n);
    memset(n->results, 0, sizeof(n->results));
    young[0].max_tokens = young[1].max_tokens = 60;
    reuse.common = 0;
    submit(n, old);
    step(n);
    reuse.common = 96;
    submit(n, young[0]);
    submit(n, young[1]);
    for (int i = 0; i < 3; i++) {
        step(n);
    }
    assert_int_equal(kv_pool_stats(n->pool).n_index - kv_pool_stats(n->pool).n_cached, 12 + 6);
    run_until_idle(n);
    check_answer(n, young[0]);
    check_answer(n, young[1]);
    reuse.common = 0;
    check_answer(n, old);
    assert_true(kn_sched_stats(n->sched).preemptions >= 2);
    node_destroy(n);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_turns),
        cmocka_unit_test(test_PFX_03_same_prefix_at_once),
        cmocka_unit_test(test_preempted_keeps_blocks),
        cmocka_unit_test(test_cold_prompts_evict),
        cmocka_unit_test(test_oldest_frees_shared_pages),
    };

    reuse.block = 16;
    return cmocka_run_group_tests(tests, NULL, NULL);
}
