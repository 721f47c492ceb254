/* The scheduler with sources of blocks (memsource.h): what is brought, what is computed, and that
 * neither faults nor aborts lose a page, a pin or a token. */
#include "tests/unit/kernels/engine/memsource.h"

static struct mem_source *mem[2];
static struct kv_source *sources[2];

static void open_sources(uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        mem[i] = mem_create();
        sources[i] = &mem[i]->base;
    }
}

static struct node *open_node(struct node_cfg c, uint32_t n, uint32_t n_local)
{
    struct node *node;

    c.sources = sources;
    c.n_sources = n;
    c.n_local = n_local;
    node = node_create(NULL, c);
    for (uint32_t i = 0; i < n; i++) {
        mem[i]->node = node;
    }
    return node;
}

static bool moves(uint32_t n)
{
    bool any = false;

    for (uint32_t i = 0; i < n; i++) {
        any |= mem_move(mem[i]);
    }
    return any;
}

/* Runs until nothing is live and nothing is under way. */
static void run_all(struct node *n)
{
    for (int i = 0; i < 20000; i++) {
        bool any = moves(n->n_sources);

        if (!step(n) && !any && kn_sched_idle(n->sched)) {
            return;
        }
    }
    fail_msg("the node does not come to rest: %u live", kn_sched_stats(n->sched).n_live);
}

static void close_node(struct node *n)
{
    uint32_t k = n->n_sources;

    node_destroy(n);
    for (uint32_t i = 0; i < k; i++) {
        mem_destroy(mem[i]);
    }
}

/* Gives up what the pool has cached; the sources keep theirs. */
static void forget(struct node *n)
{
    kv_index_evict(n->index, UINT32_MAX);
    memset(n->shadow, 0,
           kv_pool_layout(n->pool)->n_pages * (size_t)n->page_tokens * sizeof(*n->shadow));
}

static uint64_t computed(const struct node *n)
{
    return kn_sched_stats(n->sched).tokens_computed;
}

static uint64_t run_one(struct node *n, struct req r)
{
    uint64_t before = computed(n);

    n->results[r.tag] = (struct result){0};
    submit(n, r);
    run_all(n);
    check_answer(n, r);
    return computed(n) - before;
}

/* What was evicted comes back from the source; what is short or unknown is computed. */
static void test_evicted_comes_back(void **state)
{
    struct node *n;
    struct req r = {.tag = 1, .n_prompt = 100, .max_tokens = 20};

    open_sources(1);
    n = open_node((struct node_cfg){64, 8, 32, 4}, 1, 1);
    assert_int_equal(run_one(n, r), 100 + 19);
    assert_int_equal(mem[0]->n_offers, (100 + 19) / 16); /* the answer's as well */
    forget(n);
    assert_int_equal(run_one(n, r), 100 - 96 + 19);
    assert_int_equal(n->results[1].cached, 96);
    assert_int_equal(kn_sched_stats(n->sched).tier_tokens[KV_TIER_HOST], 96);
    /* Now the pool has it again. */
    assert_int_equal(run_one(n, r), 100 - 96 + 19);
    assert_int_equal(kn_sched_stats(n->sched).tier_tokens[KV_TIER_POOL], 96);
    assert_int_equal(kn_sched_stats(n->sched).loads, 1);
    close_node(n);
}

/* What nobody wanted yet is offered once somebody does, as far as the pool still has it. */
static void test_offers_wait_until_they_are_wanted(void **state)
{
    struct node *n;
    struct req r = {.tag = 1, .n_prompt = 100, .max_tokens = 20};
    struct req gone = {.tag = 2, .n_prompt = 64, .max_tokens = 1};

    open_sources(2);
    mem[1]->busy = true;
    n = open_node((struct node_cfg){64, 8, 32, 4}, 2, 2);
    run_one(n, gone);
    forget(n);
    run_one(n, r);
    assert_int_equal(mem[0]->n_offers, 64 / 16 + (100 + 19) / 16);
    assert_int_equal(mem[1]->n_offers, 0);
    mem[1]->busy = false;
    run_all(n);
    assert_int_equal(mem[1]->n_offers, (100 + 19) / 16);
    assert_int_equal(mem[0]->n_offers, 64 / 16 + (100 + 19) / 16);
    close_node(n);
}

/* A source may rest between offers until somebody waits for the pages that they hold. */
static void test_offers_hurry_when_pages_are_waited_for(void **state)
{
    struct node *n;
    struct req r = {.tag = 1, .n_prompt = 190, .max_tokens = 4};
    struct req next = {.tag = 2, .n_prompt = 150, .max_tokens = 4};

    open_sources(1);
    mem[0]->rests = true;
    n = open_node((struct node_cfg){32, 8, 32, 4}, 1, 1);
    submit(n, r);
    for (int i = 0; i < 20000 && kn_sched_stats(n->sched).n_live > 0; i++) {
        moves(1);
        step(n);
    }
    check_answer(n, r);
    assert_true(mem[0]->rests);
    assert_false(kn_sched_idle(n->sched));
    submit(n, next);
    run_all(n);
    check_answer(n, next);
    assert_false(mem[0]->rests);
    close_node(n);
}

/* Part in the pool, more in the source; what was computed meanwhile changes the question. */
static void test_SCHED_03_lengths(void **state)
{
    static const uint32_t lengths[] = {1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 80, 81};
    struct node *n;

    open_sources(1);
    n = open_node((struct node_cfg){64, 8, 32, 4}, 1, 1);
    for (uint32_t i = 0; i < BT_ARRAY_LEN(lengths); i++) {
        struct req r = {.tag = i, .n_prompt = lengths[i], .max_tokens = 5};
        uint32_t cached = (lengths[i] - 1) / 16 * 16;

        run_one(n, r);
        for (int time = 0; time < 3; time++) {
            if (time != 1) {
                forget(n);
            }
            assert_int_equal(run_one(n, r), lengths[i] - cached + 4);
            assert_int_equal(n->results[i].cached, cached);
        }
    }
    close_node(n);
}

/* TIER-02: fewer blocks come than were promised; only the valid leading ones are used. */
static void test_TIER_02_short_loads(void **state)
{
    struct node *n;
    struct req r = {.tag = 1, .n_prompt = 170, .max_tokens = 5};

    open_sources(1);
    n = open_node((struct node_cfg){64, 8, 256, 4}, 1, 1);
    run_one(n, r);
    for (uint32_t bad = 0; bad < 10; bad++) {
        uint64_t before = computed(n);

        forget(n);
        n->results[1] = (struct result){0};
        submit(n, r);
        step(n); /* found and loading */
        assert_int_equal(kn_sched_stats(n->sched).n_state[KN_SEQ_LOADING], 1);
        for (uint32_t i = 0; i < MEM_BLOBS; i++) {
            mem[0]->blobs[i].bad = mem[0]->blobs[i].used && i >= bad && i < bad + 3;
        }
        run_all(n);
        check_answer(n, r);
        assert_int_equal(computed(n) - before, 170 - bad * 16 + 4);
        assert_int_equal(n->results[1].cached, bad * 16);
        for (uint32_t i = 0; i < MEM_BLOBS; i++) {
            mem[0]->blobs[i].bad = false;
        }
    }
    assert_int_equal(kn_sched_stats(n->sched).loads_short, 10);
    close_node(n);
}

/* A source that promises to be slower than computing is not used; one that lies is given up. */
static void test_slow_sources(void **state)
{
    struct node *n;
    struct req r = {.tag = 1, .n_prompt = 100, .max_tokens = 5};

    open_sources(1);
    n = open_node((struct node_cfg){64, 8, 256, 4}, 1, 1);
    run_one(n, r); /* 1 ms a token, 16 ms a block */
    forget(n);
    mem[0]->block_ns = 15 * MS;
    assert_int_equal(run_one(n, r), 100 + 4);
    forget(n);
    mem[0]->fast = 2; /* the rest is on a slow disk */
    assert_int_equal(run_one(n, r), 100 - 32 + 4);
    forget(n);
    mem[0]->fast = 0;
    mem[0]->block_ns = 10 * MS;
    assert_int_equal(run_one(n, r), 100 - 96 + 4);
    forget(n);
    mem[0]->stuck = true;
    assert_int_equal(run_one(n, r), 100 + 4);
    assert_int_equal(kn_sched_stats(n->sched).loads_given_up, 1);
    assert_int_equal(mem[0]->n_cancels, 1);
    /* It is not shunned for ever. */
    mem[0]->stuck = false;
    mem[0]->block_ns = MS;
    for (int i = 0; n->results[1].cached < 96; i++) {
        assert_true(i < 200);
        forget(n);
        run_one(n, r);
    }
    close_node(n);
}

/* The second source is asked behind what the first has, if its answers are worth waiting for. */
static void test_two_sources(void **state)
{
    struct node *n;
    struct req r = {.tag = 1, .n_prompt = 150, .max_tokens = 5};

    open_sources(2);
    mem[1]->local = false;
    mem[1]->tier = KV_TIER_STORE;
    n = open_node((struct node_cfg){64, 8, 256, 4}, 2, 1);
    /* Too little to gain: it is not even asked. */
    run_one(n, (struct req){.tag = 2, .n_prompt = 20, .max_tokens = 2});
    run_one(n, (struct req){.tag = 3, .n_prompt = 10, .max_tokens = 2});
    assert_int_equal(mem[1]->n_finds, 0);
    sim_token_ns = 20 * MS;
    run_one(n, r);
    mem[0]->blobs[0].used = false; /* of tag 2 */
    forget(n);
    for (uint32_t i = 4; i < MEM_BLOBS; i++) {
        mem[0]->blobs[i].used = false;
    }
    assert_int_equal(run_one(n, r), 150 - 144 + 4);
    assert_int_equal(kn_sched_stats(n->sched).tier_tokens[KV_TIER_HOST], 48);
    assert_int_equal(kn_sched_stats(n->sched).tier_tokens[KV_TIER_STORE], 96);
    sim_token_ns = MS;
    close_node(n);
}

/* TIER-06: whatever ends a request, at whatever point, nothing stays pinned or held. */
static void test_TIER_06_aborts(void **state)
{
    struct node *n;
    struct req r = {.tag = 1, .n_prompt = 150, .max_tokens = 5};

    open_sources(2);
    mem[1]->local = false;
    mem[0]->layers_per_move = 1;
    n = open_node((struct node_cfg){64, 8, 256, 4, .n_layers = 3}, 2, 1);
    run_one(n, r);
    for (uint32_t i = 3; i < MEM_BLOBS; i++) {
        mem[0]->blobs[i].used = false;
    }
    for (int when = 0; when < 24; when++) {
        struct kn_seq *s;

        forget(n);
        n->results[1] = (struct result){0};
        r.deadline_ns = when % 2 ? n->now + (uint64_t)(when / 2) * 5 * MS : 0;
        submit(n, r);
        for (int i = 0; i < when / 2; i++) {
            step(n);
            if (i % 2) {
                moves(2);
            }
        }
        s = kn_sched_find(n->sched, 1);
        if (s && when % 2 == 0) {
            kn_sched_end(n->sched, s, BT_E_CANCELLED, "cancelled");
        }
        run_all(n);
        assert_true(n->results[1].last);
        assert_int_equal(mem[0]->n_open + mem[1]->n_open, 0);
    }
    close_node(n);
}

/* Too few pages for all: who gives way comes back with what it had, to the token. */
static void test_preempted_is_brought_back(void **state)
{
    struct node *n;
    struct kn_sched_stats s;
    uint64_t total = 0;

    sim_token_ns = 100 * MS; /* any load is cheaper */
    open_sources(1);
    n = open_node((struct node_cfg){16, 8, 64, 8}, 1, 1);
    for (uint32_t i = 0; i < 6; i++) {
        submit(n, (struct req){.tag = i, .claim = i, .n_prompt = 34, .max_tokens = 60});
        total += 34 + 59;
    }
    run_all(n);
    for (uint32_t i = 0; i < 6; i++) {
        check_answer(n, (struct req){.tag = i, .n_prompt = 34, .max_tokens = 60});
        assert_int_equal(n->results[i].cached, 0); /* its own blocks are no cache hits */
    }
    s = kn_sched_stats(n->sched);
    assert_true(s.preemptions > 0 && s.swapped > 0 && s.resumed > 0);
    assert_true(mem[0]->n_tails > 0);
    assert_int_equal(s.tokens_computed, total); /* not one twice */
    sim_token_ns = MS;
    close_node(n);
}

/* The same with a source that takes nothing: computed again, as ever. */
static void test_preempted_without_room(void **state)
{
    struct node *n;

    open_sources(1);
    n = open_node((struct node_cfg){16, 8, 64, 8}, 1, 1);
    mem[0]->deaf = true;
    for (uint32_t i = 0; i < 6; i++) {
        submit(n, (struct req){.tag = i, .claim = i, .n_prompt = 34, .max_tokens = 60});
    }
    run_all(n);
    for (uint32_t i = 0; i < 6; i++) {
        check_answer(n, (struct req){.tag = i, .n_prompt = 34, .max_tokens = 60});
    }
    assert_true(kn_sched_stats(n->sched).preemptions > 0);
    assert_int_equal(kn_sched_stats(n->sched).resumed, 0);
    close_node(n);
}

static void move_on(struct node *n)
{
    moves(n->n_sources);
}

/* The rest is computed while the blocks before it are on their way. */
static void test_computes_behind_loads(void **state)
{
    struct node *n;
    struct req r = {.tag = 1, .n_prompt = 170, .max_tokens = 5};
    uint32_t steps[2];

    open_sources(1);
    mem[0]->layers_per_move = 1;
    n = open_node((struct node_cfg){64, 8, 256, 4, .n_layers = 3, .wait = move_on}, 1, 1);
    run_one(n, r);
    for (int time = 0; time < 2; time++) {
        forget(n);
        assert_int_equal(run_one(n, r), 170 - 160 + 4);
        assert_int_equal(n->results[1].cached, 160);
        assert_int_equal(n->n_ahead, time + 1);
        steps[time] = n->steps;
    }
    assert_int_equal(steps[1] - steps[0], 5);
    assert_int_equal(kn_sched_stats(n->sched).tokens_discarded, 0);
    close_node(n);
}

/* A node in place of the one before, which has computed nothing yet; the sources keep what they
 * have. */
static struct node *next_node(struct node *n, struct node_cfg c)
{
    uint32_t k = n->n_sources;

    node_destroy(n);
    return open_node(c, k, 1);
}

/* The very first prompt is computed behind its loads as well, and tells what prompts cost. */
static void test_first_prompt_behind_loads(void **state)
{
    struct node_cfg c = {64, 8, 256, 4, .n_layers = 3, .guess_ns = MS, .wait = move_on};
    struct node *n;
    struct req r = {.tag = 1, .n_prompt = 170, .max_tokens = 5};

    open_sources(1);
    mem[0]->layers_per_move = 1;
    n = open_node(c, 1, 1);
    run_one(n, r);
    n = next_node(n, c);
    sim_token_ns = MS / 100;
    for (uint32_t time = 1; time <= 3; time++) { /* too short to tell */
        forget(n);
        assert_int_equal(run_one(n, r), 10 + 4);
        assert_int_equal(n->n_ahead, time);
    }
    for (uint32_t i = 9; i < MEM_BLOBS; i++) {
        mem[0]->blobs[i].used = false;
    }
    mem[0]->deaf = true;
    forget(n);
    assert_int_equal(run_one(n, r), 170 - 144 + 4);
    assert_int_equal(n->n_ahead, 4);
    forget(n);
    assert_int_equal(run_one(n, r), 170 + 4); /* computing is cheaper, it turned out */
    sim_token_ns = MS;
    close_node(n);
}

/* With others in the step nobody is made to wait on a guess. */
static void test_others_do_not_wait_on_a_guess(void **state)
{
    struct node_cfg c = {64, 8, 256, 4, .n_layers = 3, .guess_ns = MS, .wait = move_on};
    struct node *n;
    struct req r = {.tag = 1, .n_prompt = 170, .max_tokens = 5};
    struct req other = {.tag = 2, .n_prompt = 4, .max_tokens = 40};

    open_sources(1);
    mem[0]->layers_per_move = 1;
    n = open_node(c, 1, 1);
    run_one(n, r);
    n = next_node(n, c);
    submit(n, other);
    step(n);
    submit(n, r);
    run_all(n);
    check_answer(n, r);
    check_answer(n, other);
    assert_int_equal(n->results[1].cached, 160);
    assert_int_equal(n->n_ahead, 0);
    close_node(n);
}

/* Before anything was measured the owner's guess decides whether an answer is worth waiting for. */
static void test_look_on_a_guess(void **state)
{
    struct node_cfg c = {64, 8, 256, 4};
    struct node *n;
    struct req r = {.tag = 1, .n_prompt = 150, .max_tokens = 5};

    open_sources(2);
    mem[1]->local = false;
    mem[0]->deaf = true;
    n = open_node(c, 2, 1);
    run_one(n, r);
    for (int dear = 0; dear < 2; dear++) {
        uint32_t before = mem[1]->n_finds;

        c.guess_ns = dear ? MS : MS / 10;
        n = next_node(n, c);
        assert_int_equal(run_one(n, r), dear ? 150 - 144 + 4 : 150 + 4);
        assert_int_equal(mem[1]->n_finds - before, dear);
    }
    close_node(n);
}

/* What was computed above a block that did not come, or not in time, was for nothing: not a token
 * of it goes out. */
static void test_TIER_02_computed_above_bad_blocks(void **state)
{
    struct node *n;
    struct req r = {.tag = 1, .n_prompt = 170, .max_tokens = 5};

    open_sources(1);
    mem[0]->layers_per_move = 1;
    n = open_node((struct node_cfg){64, 8, 256, 4, .n_layers = 3, .wait = move_on}, 1, 1);
    run_one(n, r);
    for (uint32_t bad = 0; bad <= 10; bad++) {
        uint64_t before = computed(n), discarded = kn_sched_stats(n->sched).tokens_discarded;

        forget(n);
        n->results[1] = (struct result){0};
        for (uint32_t i = 0; i < MEM_BLOBS; i++) {
            mem[0]->blobs[i].turns_bad = mem[0]->blobs[i].used && i == bad;
        }
        mem[0]->stuck = bad == 10;
        submit(n, r);
        step(n);
        mem[0]->stuck = false;
        run_all(n);
        check_answer(n, r);
        assert_int_equal(kn_sched_stats(n->sched).tokens_discarded - discarded, 10);
        assert_int_equal(computed(n) - before, 10 + 170 - bad * 16 + 4);
        for (uint32_t i = 0; i < MEM_BLOBS; i++) {
            mem[0]->blobs[i].bad = mem[0]->blobs[i].turns_bad = false;
        }
    }
    close_node(n);
}

/* Random requests, aborts, evictions, faults, on a pool that is too small. */
static void test_random(void **state)
{
    int rounds = getenv("BATON_TEST_LONG") ? 1000 : 50;

    for (int round = 0; round < rounds; round++) {
        struct node *n;
        struct req reqs[24];
        bool cancelled[24] = {0};

        rng_state = (uint32_t)round + 77;
        reuse.common = rng(3) * 24;
        open_sources(2);
        mem[0]->max_blobs = rng(2) ? 0 : 8 + rng(20);
        mem[0]->layers_per_move = 1 + rng(3);
        mem[0]->fast = rng(3) ? 0 : 1 + rng(3);
        mem[1]->local = false;
        mem[1]->layers_per_move = 1;
        mem[1]->block_ns = rng(20) * MS;
        n = open_node((struct node_cfg){20 + rng(30), 8, (int)(8 + rng(64)), 8, .n_layers = 3,
                                        .wait = rng(2) ? move_on : NULL},
                      2, 1);
        for (uint32_t i = 0; i < BT_ARRAY_LEN(reqs); i++) {
            reqs[i] = (struct req){
                .tag = i, .claim = rng(8), .n_prompt = 1 + rng(100), .max_tokens = 1 + rng(40)};
        }
        for (uint32_t i = 0; i < BT_ARRAY_LEN(reqs); i++) {
            submit(n, reqs[i]);
            for (uint32_t k = rng(12); k > 0; k--) {
                struct kn_seq *s;

                step(n);
                s = kn_sched_find(n->sched, rng(BT_ARRAY_LEN(reqs)));
                mem[0]->stuck = rng(8) == 0;
                if (rng(3)) {
                    moves(2);
                }
                if (s && rng(20) == 0) {
                    cancelled[s->tag] = true;
                    kn_sched_end(n->sched, s, BT_E_CANCELLED, "cancelled");
                }
                if (rng(10) == 0) {
                    struct mem_blob *b = &mem[rng(2)]->blobs[rng(32)];

                    b->bad = b->used && !b->bad;
                }
                if (rng(10) == 0) {
                    kv_index_evict(n->index, rng(8));
                }
            }
        }
        mem[0]->stuck = false;
        run_all(n);
        for (uint32_t i = 0; i < BT_ARRAY_LEN(reqs); i++) {
            assert_true(n->results[i].last);
            if (!cancelled[i] || n->results[i].rc == BT_OK) {
                check_answer(n, reqs[i]);
            }
        }
        close_node(n);
    }
    reuse.common = 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_evicted_comes_back),
        cmocka_unit_test(test_offers_wait_until_they_are_wanted),
        cmocka_unit_test(test_offers_hurry_when_pages_are_waited_for),
        cmocka_unit_test(test_SCHED_03_lengths),
        cmocka_unit_test(test_TIER_02_short_loads),
        cmocka_unit_test(test_slow_sources),
        cmocka_unit_test(test_two_sources),
        cmocka_unit_test(test_TIER_06_aborts),
        cmocka_unit_test(test_preempted_is_brought_back),
        cmocka_unit_test(test_preempted_without_room),
        cmocka_unit_test(test_computes_behind_loads),
        cmocka_unit_test(test_first_prompt_behind_loads),
        cmocka_unit_test(test_others_do_not_wait_on_a_guess),
        cmocka_unit_test(test_look_on_a_guess),
        cmocka_unit_test(test_TIER_02_computed_above_bad_blocks),
        cmocka_unit_test(test_random),
    };

    reuse.block = 16;
    return cmocka_run_group_tests(tests, NULL, NULL);
}
