/* A process is killed while it publishes and evicts: at each of the ledger's own moments in turn,
 * and at random ones. Whatever the successor adopts is whole, and what was sealed and not given up
 * is there. Contents are a function of the keys, so no checksum is needed to tell. */
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

static long countdown; /* 0 = never */
#define KV_LEDGER_POINT() (countdown > 0 && --countdown == 0 ? raise(SIGKILL) : 0)
#include "kvstore/block/ledger.c"

#include "tests/unit/kvstore/block/ledger_rig.h"

#include "common/thr/time.h"

#include <stdio.h>

#define PAGES 24 /* twelve blocks: less than the letters make */

static uint64_t rnd(uint64_t *s)
{
    *s ^= *s << 13;
    *s ^= *s >> 7;
    *s ^= *s << 17;
    return *s;
}

/* Chains over three letters, now and then a block given up. */
static void work_one(struct rig *r, uint64_t *seed)
{
    char letters[MAX_CHAIN + 1] = "";
    uint64_t n = 1 + rnd(seed) % 4;

    for (uint64_t i = 0; i < n; i++) {
        letters[i] = (char)('a' + rnd(seed) % 3);
    }
    run(r, letters);
    if (rnd(seed) % 4 == 0) {
        kv_index_evict(r->index, 2);
    }
}

/* Every adopted block holds what belongs to its key. */
static void check(struct rig *r)
{
    static const char *letters[] = {"a", "b", "c"};
    char chain[5];
    uint32_t found = 0;

    assert_int_equal(r->adopted.n_bad, 0); /* a crash alone damages nothing */
    for (int i = 0; i < 81; i++) {
        struct user u;

        snprintf(chain, sizeof(chain), "%s%s%s%s", letters[i / 27], letters[i / 9 % 3],
                 letters[i / 3 % 3], letters[i % 3]);
        user_make(r, &u, chain);
        u.n = kv_index_match(r->index, &u.chain, u.blocks);
        for (uint32_t b = 0; b < u.n; b++) {
            assert_true(holds(r, u.blocks[b]));
            found += u.blocks[b]->mark++ == 0;
        }
    }
    assert_int_equal(found, r->adopted.n_blocks);
    assert_int_equal(kv_index_stats(r->index).bad, 0);
    assert_int_equal(kv_pool_stats(r->pool).n_free + 2 * found, PAGES);
}

static void killed_in(struct rig *r, pid_t pid, bool *ret_by_itself)
{
    int status;

    assert_int_equal(waitpid(pid, &status, 0), pid);
    *ret_by_itself = WIFEXITED(status) && WEXITSTATUS(status) == 0;
    assert_true(*ret_by_itself || (WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL));
    (void)r;
}

/* The n-th moment of one and the same work, until the work ends before it is reached. */
static void test_every_moment(void **state)
{
    bool done = false;
    long n;

    for (n = 1; !done; n++) {
        struct rig r;
        uint64_t seed = 7;
        pid_t pid;

        rig_init(&r, PAGES);
        pid = fork();
        if (pid == 0) {
            countdown = n;
            rig_open(&r);
            for (int i = 0; i < 60; i++) {
                work_one(&r, &seed);
            }
            _exit(0);
        }
        killed_in(&r, pid, &done);
        rig_open(&r);
        check(&r);
        rig_close(&r);
        rig_fini(&r);
    }
    assert_true(n > 200);
}

/* One memory, many short lives: each adopts what the last one left, killed at any instruction, in
 * adoption too. */
static void test_random_moments(void **state)
{
    const char *more = getenv("BATON_TEST_LONG");
    int rounds = more && *more == '1' ? 5000 : 150;
    uint64_t seed = bt_now_ns() | 1, adopted = 0;
    struct rig r;

    printf("seed %llu\n", (unsigned long long)seed);
    rig_init(&r, PAGES);
    for (int i = 0; i < rounds; i++) {
        struct timespec ts = {.tv_nsec = (long)(rnd(&seed) % 4000000)};
        bool by_itself;
        pid_t pid = fork();

        if (pid == 0) {
            uint64_t s = seed;

            rig_open(&r);
            for (;;) {
                work_one(&r, &s);
            }
        }
        nanosleep(&ts, NULL);
        kill(pid, SIGKILL);
        killed_in(&r, pid, &by_itself);
        assert_false(by_itself);
        if (i % 3 == 0) { /* between, the next child is the successor */
            rig_open(&r);
            check(&r);
            adopted += r.adopted.n_blocks;
            rig_close(&r);
        }
    }
    rig_open(&r);
    check(&r);
    assert_true(adopted > 0);
    rig_close(&r);
    rig_fini(&r);
}

/* What one life sealed the next one has: nothing is lost by a kill. */
static void test_nothing_is_lost(void **state)
{
    struct rig r;

    rig_init(&r, 64);
    for (int i = 0; i < 6; i++) {
        char letters[2] = {(char)('a' + i), '\0'};
        pid_t pid = fork();
        bool by_itself;

        if (pid == 0) {
            rig_open(&r);
            run(&r, letters);
            raise(SIGKILL);
        }
        killed_in(&r, pid, &by_itself);
        assert_false(by_itself);
    }
    rig_open(&r);
    assert_int_equal(r.adopted.n_blocks, 6);
    for (int i = 0; i < 6; i++) {
        char letters[2] = {(char)('a' + i), '\0'};

        assert_int_equal(run(&r, letters), 1);
    }
    rig_close(&r);
    rig_fini(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_moment),
        cmocka_unit_test(test_random_moments),
        cmocka_unit_test(test_nothing_is_lost),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
