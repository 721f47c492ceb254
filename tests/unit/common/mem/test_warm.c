/* Memory is touched ahead, whole, and nothing in it changes; the thread ends when it is told to. */
#include "common/base/buf.h"
#include "common/mem/mem.h"
#include "common/mem/warm.h"
#include "common/thr/thread.h"
#include "common/thr/time.h"

#include "tests/unit/cmocka.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#define BYTES ((size_t)40 << 20)

static size_t resident(const struct bt_mem_region *r)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE), n = r->bytes / page, in = 0;
    unsigned char *at = calloc(n, 1);

    assert_non_null(at);
    assert_int_equal(mincore(r->base, r->bytes, at), 0);
    for (size_t i = 0; i < n; i++) {
        in += at[i] & 1;
    }
    free(at);
    return in;
}

static size_t all_of(const struct bt_mem_region *r)
{
    return r->bytes / (size_t)sysconf(_SC_PAGESIZE);
}

static struct bt_mem_region make(const struct bt_mem_ops *ops, size_t bytes)
{
    struct bt_mem_region r;
    struct bt_err err = {0};

    assert_int_equal(ops->alloc(bytes, "test-warm", &r, &err), BT_OK);
    return r;
}

/* Kernels before 5.14 cannot: then nothing is promised. */
static bool kernel_can(void)
{
    struct bt_mem_region r = make(&bt_mem_host, 1 << 20);
    bool can;

    bt_warm_now(r.base, r.bytes);
    can = resident(&r) == all_of(&r);
    r.ops->free(&r);
    return can;
}

static void wait_resident(const struct bt_mem_region *r)
{
    uint64_t end = bt_deadline_ns(20 * BT_NS_PER_S);

    while (resident(r) < all_of(r)) {
        assert_true(bt_now_ns() < end);
        usleep(2000);
    }
}

static void wait_done(const struct bt_warm *w)
{
    uint64_t end = bt_deadline_ns(20 * BT_NS_PER_S);

    while (!bt_warm_done(w)) {
        assert_true(bt_now_ns() < end);
        usleep(2000);
    }
}

struct writer {
    uint64_t *words;
    size_t n;
    atomic_bool stop;
    size_t changed; /* words that did not hold what was written to them */
};

/* Word i holds i plus a round, which only grows. */
static void *write_on(void *arg)
{
    struct writer *w = arg;

    for (uint64_t round = 1; !atomic_load(&w->stop); round++) {
        for (size_t i = 0; i < w->n; i += 509) {
            w->changed += w->words[i] != (round == 1 ? 0 : i + round - 1);
            w->words[i] = i + round;
        }
    }
    return NULL;
}

static void test_all_is_there_and_nothing_changes(void **state)
{
    struct bt_mem_region r[] = {make(&bt_mem_host, BYTES), make(&bt_mem_private, BYTES + 4096)};
    struct writer w = {.words = r[0].base, .n = BYTES / sizeof(uint64_t)};
    struct bt_warm *warm[2] = {NULL, NULL};
    struct bt_err err = {0};
    pthread_t t;

    if (!kernel_can()) {
        skip();
    }
    memset((char *)r[1].base + BYTES, 0x5a, 4096);
    assert_true(resident(&r[0]) < all_of(&r[0]));
    assert_int_equal(bt_thread_start(&t, "writer", write_on, &w, &err), BT_OK);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(bt_warm_start(r[i].base, r[i].bytes, &warm[i], &err), BT_OK);
        wait_resident(&r[i]);
    }
    atomic_store(&w.stop, true);
    pthread_join(t, NULL);
    bt_warm_stop(warm[0]);
    bt_warm_stop(warm[1]);
    assert_int_equal(w.changed, 0);
    assert_int_equal(((unsigned char *)r[1].base)[BYTES], 0x5a);
    assert_int_equal(((unsigned char *)r[1].base)[BYTES - 1], 0);
    r[0].ops->free(&r[0]);
    r[1].ops->free(&r[1]);
}

/* Of the process's mappings, what is mapped by huge pages of memory files. */
static size_t huge_bytes(void)
{
    unsigned long long kib = 0;
    char line[256];
    FILE *f = fopen("/proc/self/smaps_rollup", "re");

    while (f && fgets(line, sizeof(line), f) &&
           sscanf(line, "ShmemPmdMapped: %llu kB", &kib) != 1) {
    }
    if (f) {
        fclose(f);
    }
    return (size_t)kib * 1024;
}

/* A memory file becomes huge pages, with what was in it, here and wherever it is mapped by
 * bt_mem_map afterwards; a rest that is no huge page is there as well. */
static void test_memory_files_become_huge_pages(void **state)
{
    struct bt_mem_region r = make(&bt_mem_host, BYTES + 4096);
    struct bt_warm *warm = NULL;
    struct bt_err err = {0};
    size_t before = huge_bytes();
    uint64_t sum = 0;
    char *other;

    assert_int_equal((uintptr_t)r.base % BT_MEM_HUGE, 0);
    for (size_t i = 0; i < BYTES / 2; i += 4096) { /* the first half is in use */
        ((char *)r.base)[i] = 1;
    }
    assert_int_equal(bt_warm_start(r.base, r.bytes, &warm, &err), BT_OK);
    wait_done(warm);
    bt_warm_stop(warm);
    if (!kernel_can() || huge_bytes() == before) {
        r.ops->free(&r);
        skip(); /* before 6.1, or without huge pages */
    }
    assert_int_equal(huge_bytes() - before, BYTES);
    assert_int_equal(resident(&r), all_of(&r));
    other = bt_mem_map(r.fd, 0, r.bytes, PROT_READ);
    assert_non_null(other);
    for (size_t i = 0; i < BYTES; i += 4096) {
        sum += (uint64_t)other[i];
    }
    assert_int_equal(sum, BYTES / 2 / 4096);
    assert_int_equal(huge_bytes() - before, 2 * BYTES);
    munmap(other, r.bytes);
    other = bt_mem_map(r.fd, BYTES, 4096, PROT_READ);
    assert_non_null(other);
    munmap(other, 4096);
    other = bt_mem_map(r.fd, 4096, BYTES, PROT_READ);
    assert_int_equal((uintptr_t)other % BT_MEM_HUGE, 4096);
    munmap(other, BYTES);
    r.ops->free(&r);
}

/* Told to stop at once, it has not gone through everything, and what it went through may go. */
static void test_stops_in_the_middle(void **state)
{
    struct bt_mem_region r = make(&bt_mem_host, (size_t)64 << 20);
    struct bt_warm *warm = NULL;
    struct bt_err err = {0};

    bt_warm_stop(NULL);
    for (int i = 0; i < 20; i++) {
        assert_int_equal(bt_warm_start(r.base, r.bytes, &warm, &err), BT_OK);
        bt_warm_stop(warm);
    }
    r.ops->free(&r);
}

/* Memory that is gone is no crash: the kernel says no. */
static void test_unmapped_range_is_left(void **state)
{
    struct bt_mem_region r = make(&bt_mem_host, 1 << 20);
    void *base = r.base;
    struct bt_warm *warm = NULL;
    struct bt_err err = {0};

    r.ops->free(&r);
    assert_int_equal(bt_warm_start(base, 1 << 20, &warm, &err), BT_OK);
    bt_warm_stop(warm);
}

static void test_available(void **state)
{
    uint64_t total = 0, available = bt_mem_available(&total);

    assert_true(total > 0);
    assert_in_range(available, 1, total);
    assert_in_range(bt_mem_available(NULL), 1, total);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_all_is_there_and_nothing_changes),
        cmocka_unit_test(test_memory_files_become_huge_pages),
        cmocka_unit_test(test_stops_in_the_middle),
        cmocka_unit_test(test_unmapped_range_is_left),
        cmocka_unit_test(test_available),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
