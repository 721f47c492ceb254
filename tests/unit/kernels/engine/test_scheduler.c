/* The scheduler as pure logic, driven step by step (sim.h). All of it runs without prefix reuse,
 * with it, and with keys so short that they collide. */
#include "tests/unit/kernels/engine/sim.h"

/* ---- the state table ---- */

static void test_states(void **state)
{
    static const struct {
        enum kn_seq_state from, to;
    } edges[] = {
#define E(a, b) {KN_SEQ_##a, KN_SEQ_##b}
        E(WAITING, PREFILLING),   E(WAITING, FILLING),      E(WAITING, ABORTING),
        E(WAITING, LOADING),      E(PREEMPTED, LOADING),    E(LOADING, PREFILLING),
        E(LOADING, FILLING),      E(LOADING, WAITING),      E(LOADING, ABORTING),
        E(LOADING, DONE),         E(WAITING, DONE),         E(PREFILLING, RUNNING),
        E(PREFILLING, HOLDING),   E(PREFILLING, PREEMPTED), E(PREFILLING, ABORTING),
        E(PREFILLING, DONE),      E(RUNNING, PREEMPTED),    E(RUNNING, DONE),
        E(PREEMPTED, PREFILLING), E(PREEMPTED, ABORTING),   E(PREEMPTED, DONE),
        E(HOLDING, PREEMPTED),    E(HOLDING, ABORTING),     E(HOLDING, DONE),
        E(FILLING, RUNNING),      E(FILLING, WITHDRAWN),    E(FILLING, ABORTING),
        E(FILLING, DONE),         E(WITHDRAWN, WAITING),    E(WITHDRAWN, RUNNING),
        E(WITHDRAWN, ABORTING),   E(WITHDRAWN, DONE),       E(ABORTING, DONE),
#undef E
    };
    int n = 0;

    for (enum kn_seq_state a = 0; a < KN_SEQ_N_STATES; a++) {
        for (enum kn_seq_state b = 0; b < KN_SEQ_N_STATES; b++) {
            bool listed = false;

            for (size_t i = 0; i < BT_ARRAY_LEN(edges); i++) {
                listed |= edges[i].from == a && edges[i].to == b;
            }
            assert_int_equal(kn_seq_may(a, b), listed);
            n += listed;
        }
    }
    assert_int_equal(n, BT_ARRAY_LEN(edges));
    assert_string_equal(kn_seq_state_name(KN_SEQ_HOLDING), "HOLDING");
}

/* ---- one node ---- */

static void test_alone(void **state)
{
    struct node *n = node_create(NULL, (struct node_cfg){64, 8, 16, 4});
    struct req r = {.tag = 1, .n_prompt = 40, .max_tokens = 20};

    submit(n, r);
    run_until_idle(n);
    check_answer(n, r);
    assert_int_equal(n->steps, 3 + 19); /* 16 + 16 + 8, the last one draws */
    assert_false(step(n));
    node_destroy(n);
}

static void test_stop_rules(void **state)
{
    struct node *n = node_create(NULL, (struct node_cfg){64, 8, 64, 4});
    struct req r = {.tag = 1, .n_prompt = 5, .max_tokens = 20}, late = {.tag = 3, .n_prompt = 5};
    int32_t answer[256];

    expected(r, n->max_tokens, answer);
    r.stop = answer[6];
    submit(n, r);
    late.max_tokens = 100; /* resumed at offset 30 */
    late.n_answered = 30;
    submit(n, late);
    submit(n, (struct req){.tag = 4, .n_prompt = 190, .max_tokens = 50});
    run_until_idle(n);
    check_answer(n, r);
    check_answer(n, late);
    assert_int_equal(n->results[3].first, 30);
    /* The context of 200 ends it. */
    assert_int_equal(n->results[4].finish, KN_FINISH_LENGTH);
    assert_int_equal(n->results[4].n, 10);
    node_destroy(n);
}

static void test_SCHED_03_lengths(void **state)
{
    /* Prompt lengths around pages and chunks, any budget. */
    for (int budget = 1; budget <= 33; budget += 8) {
        struct node *n = node_create(NULL, (struct node_cfg){64, 8, budget, 3});

        for (uint32_t len = 1; len <= 34; len++) {
            submit(n, (struct req){.tag = len, .claim = len, .n_prompt = len, .max_tokens = 9});
        }
        run_until_idle(n);
        for (uint32_t len = 1; len <= 34; len++) {
            check_answer(n, (struct req){.tag = len, .n_prompt = len, .max_tokens = 9});
        }
        node_destroy(n);
    }
}

static void test_exhaustion_oldest_finishes(void **state)
{
    /* Each wants 12 of 14 pages in the end: they run together, then give way to the oldest. */
    struct node *n = node_create(NULL, (struct node_cfg){14, 8, 64, 8});
    uint64_t done[6] = {0};

    for (uint32_t i = 0; i < 6; i++) {
        submit(n, (struct req){.tag = i, .claim = 10 - i, .n_prompt = 16, .max_tokens = 80});
    }
    for (int t = 1; t < 5000 && kn_sched_stats(n->sched).n_live > 0; t++) {
        step(n);
        for (int i = 0; i < 6; i++) {
            done[i] = n->results[i].last && !done[i] ? (uint64_t)t : done[i];
        }
    }
    for (uint32_t i = 0; i < 6; i++) {
        check_answer(n, (struct req){.tag = i, .n_prompt = 16, .max_tokens = 80});
        /* Claims were given in reverse; those that share all they have may end together. */
        assert_true(i == 0 || done[i] < done[i - 1] || (reuse.block > 0 && done[i] == done[i - 1]));
    }
    assert_true(kn_sched_stats(n->sched).preemptions > 0);
    /* The oldest is never disturbed: one prompt step and 79 more. */
    assert_true(done[5] <= 81);
    node_destroy(n);
}

static void test_whole_pool(void **state)
{
    /* The longest request that fits, beside others; its end is the pool's. */
    struct node *n = node_create(NULL, (struct node_cfg){8, 8, 16, 4});
    struct req big = {.tag = 1, .claim = 5, .n_prompt = 40, .max_tokens = 100};

    assert_int_equal(n->max_tokens, 64);
    submit(n, (struct req){.tag = 0, .claim = 1, .n_prompt = 20, .max_tokens = 10});
    submit(n, big);
    submit(n, (struct req){.tag = 2, .claim = 9, .n_prompt = 20, .max_tokens = 10});
    run_until_idle(n);
    check_answer(n, (struct req){.tag = 0, .n_prompt = 20, .max_tokens = 10});
    check_answer(n, big);
    assert_int_equal(n->results[1].n, 24);
    check_answer(n, (struct req){.tag = 2, .n_prompt = 20, .max_tokens = 10});
    node_destroy(n);
}

static void test_SCHED_01_small_beside_huge(void **state)
{
    /* A huge prompt must not hold up a small one, whichever came first. */
    struct node *n = node_create(NULL, (struct node_cfg){64, 8, 16, 4});
    struct req huge = {.tag = 1, .claim = 1, .n_prompt = 190, .max_tokens = 5},
               small = {.tag = 2, .claim = 2, .n_prompt = 8, .max_tokens = 2};
    int steps = 0;

    submit(n, huge);
    step(n);
    submit(n, small);
    while (!n->results[2].last) {
        step(n);
        steps++;
    }
    assert_true(steps <= 3);
    assert_false(n->results[1].last);
    run_until_idle(n);
    check_answer(n, huge);
    check_answer(n, small);
    node_destroy(n);
}

static void test_SCHED_04_flood(void **state)
{
    /* A steady flood of small requests at full capacity, and one long one in the middle. */
    struct node *n = node_create(NULL, (struct node_cfg){30, 8, 32, 4});
    struct req odd = {.tag = 500, .claim = 100, .n_prompt = 180, .max_tokens = 5};
    uint32_t tag = 0;
    int waited = 0;

    for (; tag < 100; tag++) {
        submit(n, (struct req){.tag = tag, .claim = tag, .n_prompt = 30, .max_tokens = 30});
        if (tag > 8) {
            step(n);
        }
    }
    submit(n, odd);
    while (!n->results[500].last) {
        if (tag < 400) {
            tag++;
            submit(n, (struct req){.tag = tag, .claim = tag, .n_prompt = 30, .max_tokens = 30});
        }
        step(n);
        waited++;
    }
    /* It waits for those before it (91 x 30 tokens, about 4 at a time), not for those behind. */
    assert_true(waited < 1100);
    run_until_idle(n);
    check_answer(n, odd);
    for (uint32_t i = 101; i <= tag && i < 400; i++) {
        check_answer(n, (struct req){.tag = i, .n_prompt = 30, .max_tokens = 30});
    }
    node_destroy(n);
}

static void test_cancel_and_deadline(void **state)
{
    struct node *n = node_create(NULL, (struct node_cfg){20, 8, 16, 2});

    for (uint32_t i = 0; i < 6; i++) {
        submit(n, (struct req){.tag = i,
                               .claim = i,
                               .n_prompt = 30,
                               .max_tokens = 40,
                               .deadline_ns = i == 5 ? n->now + 100 * MS : 0});
    }
    step(n);
    step(n);
    step(n);
    kn_sched_end(n->sched, kn_sched_find(n->sched, 0), BT_E_CANCELLED, "cancelled"); /* RUNNING */
    kn_sched_end(n->sched, kn_sched_find(n->sched, 1), BT_E_CANCELLED, "cancelled");
    kn_sched_end(n->sched, kn_sched_find(n->sched, 4), BT_E_CANCELLED, "cancelled"); /* WAITING */
    assert_int_equal(n->results[0].rc, BT_E_CANCELLED);
    assert_null(kn_sched_find(n->sched, 0));
    assert_true(kn_sched_next_wake_ns(n->sched) <= 1100 * MS);
    run_until_idle(n);
    assert_int_equal(n->results[4].rc, BT_E_CANCELLED);
    assert_int_equal(n->results[5].rc, BT_E_DEADLINE);
    check_answer(n, (struct req){.tag = 2, .n_prompt = 30, .max_tokens = 40});
    check_answer(n, (struct req){.tag = 3, .n_prompt = 30, .max_tokens = 40});
    assert_int_equal(kn_sched_next_wake_ns(n->sched), BT_NEVER_NS);
    node_destroy(n);
}

static void test_double_tag_and_no_handoff(void **state)
{
    struct node *n = node_create(NULL, (struct node_cfg){20, 8, 16, 2});

    submit(n, (struct req){.tag = 1, .n_prompt = 3, .max_tokens = 4, .leg = KN_LEG_PREFILL});
    assert_int_equal(n->results[1].rc, BT_E_UNSUPPORTED);
    submit(n, (struct req){.tag = 2, .n_prompt = 3, .max_tokens = 4});
    submit(n, (struct req){.tag = 2, .n_prompt = 3, .max_tokens = 4});
    assert_int_equal(n->results[2].rc, BT_E_EXISTS);
    n->results[2] = (struct result){0};
    run_until_idle(n);
    check_answer(n, (struct req){.tag = 2, .n_prompt = 3, .max_tokens = 4});
    node_destroy(n);
}

static void test_failed_step(void **state)
{
    struct node *n = node_create(NULL, (struct node_cfg){20, 8, 16, 2});
    const struct kn_step_plan *plan;

    submit(n, (struct req){.tag = 1, .n_prompt = 30, .max_tokens = 4});
    submit(n, (struct req){.tag = 2, .claim = 1, .n_prompt = 3, .max_tokens = 4});
    plan = kn_sched_plan(n->sched, n->now);
    assert_int_equal(plan->n_rows, 2);
    kn_sched_step_failed(n->sched, plan, BT_E_INTERNAL, "device");
    assert_int_equal(n->results[1].rc, BT_E_INTERNAL);
    assert_int_equal(n->results[2].rc, BT_E_INTERNAL);
    node_destroy(n);
}

static void test_split(void **state)
{
    struct pair two;
    struct req a = {.tag = 1, .claim = 1, .n_prompt = 50, .max_tokens = 30},
               b = {.tag = 2, .claim = 2, .n_prompt = 7, .max_tokens = 2},
               c = {.tag = 3, .claim = 3, .n_prompt = 20, .max_tokens = 20, .n_answered = 9};

    pair_init(&two, (struct node_cfg){32, 8, 16, 4}, (struct node_cfg){16, 16, 16, 4});
    pair_submit(&two, a);
    pair_submit(&two, b);
    pair_submit(&two, c);
    pair_run(&two);
    pair_check(&two, a);
    pair_check(&two, b);
    pair_check(&two, c);
    pair_fini(&two);
}

/* The second turn's decode node has the first one's blocks, also those of the answer, and takes
 * only what is new; P computes it all where nothing else brings it the answer's. */
static void test_decode_node_has_blocks(void **state)
{
    struct pair two;
    struct req r = {.tag = 1, .n_prompt = 50, .max_tokens = 40};
    uint64_t before;

    pair_init(&two, (struct node_cfg){32, 8, 64, 4}, (struct node_cfg){32, 16, 64, 4});
    pair_submit(&two, r);
    pair_run(&two);
    pair_check(&two, r);
    before = two.w.tokens_sent;
    assert_int_equal(before, 50);
    r = (struct req){.tag = 1, .n_prompt = 50, .n_answered = 40, .max_tokens = 50};
    memset(two.p->results, 0, sizeof(two.p->results));
    memset(two.d->results, 0, sizeof(two.d->results));
    pair_submit(&two, r);
    pair_run(&two);
    pair_check(&two, r);
    if (!reuse.key_bits) { /* how many collide with which is chance */
        assert_int_equal(two.w.tokens_sent - before, reuse.block ? 90 - 80 : 90);
    }
    assert_int_equal(two.d->results[1].cached, 0); /* what was received is no hit */
    pair_fini(&two);
}

static void test_SAMP_04_first_token_ends(void **state)
{
    struct pair two;
    struct req r = {.tag = 1, .n_prompt = 20, .max_tokens = 1},
               s = {.tag = 2, .n_prompt = 20, .max_tokens = 9};
    int32_t answer[256];

    expected(s, 200, answer);
    s.stop = answer[0];
    pair_init(&two, (struct node_cfg){32, 8, 16, 4}, (struct node_cfg){32, 8, 16, 4});
    pair_submit(&two, r);
    pair_submit(&two, s);
    pair_run(&two);
    check_answer(two.p, r);
    check_answer(two.p, s);
    assert_int_equal(two.d->steps, 0);
    assert_int_equal(two.d->results[1].rc, BT_E_CANCELLED);
    assert_int_equal(two.d->results[2].rc, BT_E_CANCELLED);
    pair_fini(&two);
}

static void test_SCHED_01_holder_behind_blockless(void **state)
{
    /* D of 2,048 tokens' worth: A wants 1,600 parts and is first, B holds 1,249 and waits for its
     * KV, then small C; here in pages of a smaller pool. */
    struct pair two;
    struct req b = {.tag = 1, .claim = 2, .n_prompt = 120, .max_tokens = 4},
               a = {.tag = 2, .claim = 1, .n_prompt = 160, .max_tokens = 4},
               c = {.tag = 3, .claim = 3, .n_prompt = 9, .max_tokens = 4};

    pair_init(&two, (struct node_cfg){64, 8, 16, 4}, (struct node_cfg){25, 8, 16, 4});
    pair_submit(&two, b);
    step(two.d); /* B reserves */
    pair_submit(&two, a);
    pair_submit(&two, c);
    for (int i = 0; i < 1000 && !two.d->results[3].last; i++) {
        step(two.p);
        step(two.d);
        pair_move(&two);
    }
    assert_false(two.d->results[2].last); /* C passed A */
    pair_run(&two);
    pair_check(&two, a);
    pair_check(&two, b);
    pair_check(&two, c);
    /* B's reservation was filled, so it was not taken away. */
    assert_int_equal(kn_sched_stats(two.d->sched).withdrawals, 0);
    pair_fini(&two);
}

static void test_withdraw_unfilled(void **state)
{
    /* B's prefill node never comes; older A needs its pages. */
    struct pair two;
    struct req a = {.tag = 2, .claim = 1, .n_prompt = 160, .max_tokens = 4},
               b = {.tag = 1, .claim = 2, .n_prompt = 120, .max_tokens = 4};

    pair_init(&two, (struct node_cfg){64, 8, 16, 4}, (struct node_cfg){25, 8, 16, 4});
    b.leg = KN_LEG_DECODE;
    submit(two.d, b);
    step(two.d);
    pair_submit(&two, a);
    for (int i = 0; i < 1000 && !two.d->results[2].last; i++) {
        step(two.p);
        step(two.d);
        pair_move(&two);
    }
    pair_check(&two, a);
    assert_int_equal(kn_sched_stats(two.d->sched).withdrawals, 1);
    /* B has its reservation again and is served once P comes. */
    step(two.d);
    b.leg = KN_LEG_PREFILL;
    submit(two.p, b);
    pair_run(&two);
    pair_check(&two, b);
    pair_fini(&two);
}

static void test_holding_gives_way(void **state)
{
    /* P is full of finished prompts that D has no room for yet, in the opposite order of claims: D
     * waits for what P cannot start, unless a prompt without a ticket is dropped. */
    struct pair two;

    pair_init(&two, (struct node_cfg){25, 8, 32, 8}, (struct node_cfg){13, 8, 32, 8});
    for (uint32_t i = 0; i < 8; i++) {
        struct req r = {.tag = i, .n_prompt = 90, .max_tokens = 6};

        r.leg = KN_LEG_PREFILL;
        r.claim = i;
        submit(two.p, r);
        r.leg = KN_LEG_DECODE;
        r.claim = 8 - i;
        submit(two.d, r);
    }
    pair_run(&two);
    for (uint32_t i = 0; i < 8; i++) {
        pair_check(&two, (struct req){.tag = i, .n_prompt = 90, .max_tokens = 6});
    }
    assert_true(two.w.rewinds > 0);
    pair_fini(&two);
}

static void test_abort_waits_for_proof(void **state)
{
    struct pair two;
    struct req r = {.tag = 1, .n_prompt = 50, .max_tokens = 30};
    struct kn_sched *p, *d;

    pair_init(&two, (struct node_cfg){32, 8, 16, 4}, (struct node_cfg){32, 8, 16, 4});
    p = two.p->sched;
    d = two.d->sched;
    pair_submit(&two, r);
    step(two.p);
    step(two.d);
    pair_move(&two); /* ticket is in */
    kn_sched_end(d, kn_sched_find(d, 1), BT_E_CANCELLED, "cancelled");
    kn_sched_end(d, kn_sched_find(d, 1), BT_E_DEADLINE, "too late to be the reason");
    kn_sched_end(p, kn_sched_find(p, 1), BT_E_CANCELLED, "cancelled");
    step(two.p);
    step(two.d);
    assert_false(two.p->results[1].last);
    assert_false(two.d->results[1].last);
    assert_int_equal(kv_pool_stats(two.p->pool).n_free, 32 - 7);
    assert_int_equal(kv_pool_stats(two.p->pool).n_seq, 0);
    assert_int_equal(kv_pool_stats(two.p->pool).n_cached, 0);
    assert_int_equal(kv_pool_stats(two.d->pool).n_transfer, 7);
    pair_move(&two);
    pair_move(&two);
    assert_int_equal(two.p->results[1].rc, BT_E_CANCELLED);
    assert_int_equal(two.d->results[1].rc, BT_E_CANCELLED);
    pair_fini(&two);
}

static void test_recv_limit(void **state)
{
    struct pair two;

    pair_init(&two, (struct node_cfg){64, 8, 64, 8}, (struct node_cfg){64, 8, 64, 8});
    two.w.max_recv = 1;
    for (uint32_t i = 0; i < 4; i++) {
        pair_submit(&two, (struct req){.tag = i, .claim = i, .n_prompt = 20, .max_tokens = 6});
    }
    pair_run(&two);
    for (uint32_t i = 0; i < 4; i++) {
        pair_check(&two, (struct req){.tag = i, .n_prompt = 20, .max_tokens = 6});
    }
    pair_fini(&two);
}

/* Any mix of everything, with cancels at random: pages return, answers are right. */
static void stress(uint32_t seed)
{
    struct pair two;
    struct req reqs[60];
    bool cancelled[60] = {false}, alone[60];

    rng_state = seed;
    pair_init(&two, (struct node_cfg){20 + rng(20), 8, (int)(8 + rng(60)), (int)(2 + rng(6))},
              (struct node_cfg){10 + rng(12), 16, (int)(8 + rng(60)), (int)(2 + rng(6))});
    for (uint32_t i = 0, t = 0; t < 20000; t++) {
        if (i < 60 && rng(4) == 0) {
            struct req r = {.tag = i,
                            .claim = rng(3) ? i : rng(60),
                            .n_prompt = 1 + rng(rng(4) ? 40 : 120),
                            .max_tokens = 2 + rng(30)};

            reqs[i] = r;
            alone[i] = rng(3) == 0;
            if (alone[i]) {
                submit(rng(2) ? two.p : two.d, r);
            } else {
                pair_submit(&two, r);
            }
            i++;
        }
        if (rng(2)) {
            step(two.p);
        }
        if (rng(2)) {
            step(two.d);
        }
        xfer_move(&two.w, &two.w.xfers[rng(60)]);
        if (rng(40) == 0) {
            uint64_t tag = rng(60);
            struct kn_seq *p = kn_sched_find(two.p->sched, tag),
                          *d = kn_sched_find(two.d->sched, tag);

            if (p && rng(4) > 0) {
                cancelled[tag] = true;
                kn_sched_end(two.p->sched, p, BT_E_CANCELLED, "cancelled");
            }
            if (d && (rng(4) > 0 || cancelled[tag])) {
                cancelled[tag] = true;
                kn_sched_end(two.d->sched, d, BT_E_CANCELLED, "cancelled");
            }
        }
        if (i == 60 && kn_sched_stats(two.p->sched).n_live == 0 &&
            kn_sched_stats(two.d->sched).n_live == 0) {
            break;
        }
        /* A leg whose other end is gone would wait until its lease ends. */
        for (uint64_t tag = 0; i == 60 && t > 15000 && tag < 60; tag++) {
            struct kn_seq *s = kn_sched_find(two.d->sched, tag);

            if (s && cancelled[tag]) {
                kn_sched_end(two.d->sched, s, BT_E_CANCELLED, "lease");
            }
            s = kn_sched_find(two.p->sched, tag);
            if (s && cancelled[tag]) {
                kn_sched_end(two.p->sched, s, BT_E_CANCELLED, "lease");
            }
        }
    }
    for (uint32_t i = 0; i < 60; i++) {
        if (cancelled[i]) {
            continue;
        }
        if (!alone[i]) {
            pair_check(&two, reqs[i]);
        } else {
            check_answer(two.p->results[i].last ? two.p : two.d, reqs[i]);
        }
    }
    pair_fini(&two);
}

static void test_stress(void **state)
{
    for (uint32_t seed = 1; seed <= 100; seed++) {
        stress(seed);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_states),
        cmocka_unit_test(test_alone),
        cmocka_unit_test(test_stop_rules),
        cmocka_unit_test(test_SCHED_03_lengths),
        cmocka_unit_test(test_exhaustion_oldest_finishes),
        cmocka_unit_test(test_whole_pool),
        cmocka_unit_test(test_SCHED_01_small_beside_huge),
        cmocka_unit_test(test_SCHED_04_flood),
        cmocka_unit_test(test_cancel_and_deadline),
        cmocka_unit_test(test_double_tag_and_no_handoff),
        cmocka_unit_test(test_failed_step),
        cmocka_unit_test(test_split),
        cmocka_unit_test(test_decode_node_has_blocks),
        cmocka_unit_test(test_SAMP_04_first_token_ends),
        cmocka_unit_test(test_SCHED_01_holder_behind_blockless),
        cmocka_unit_test(test_withdraw_unfilled),
        cmocka_unit_test(test_holding_gives_way),
        cmocka_unit_test(test_abort_waits_for_proof),
        cmocka_unit_test(test_recv_limit),
        cmocka_unit_test(test_stress),
    };
    int failed = cmocka_run_group_tests_name("no reuse", tests, NULL, NULL);

    reuse.block = 16;
    reuse.common = 40;
    failed += cmocka_run_group_tests_name("reuse", tests, NULL, NULL);
    reuse.key_bits = 5;
    failed += cmocka_run_group_tests_name("reuse with collisions", tests, NULL, NULL);
    return failed;
}
