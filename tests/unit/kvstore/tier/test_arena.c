/* The slab arena: pieces never overlap, all come back, chunks change class when they are empty. */
#include "kvstore/tier/arena.h"

#include "tests/unit/cmocka.h"

#include <stdlib.h>

#define MIB ((size_t)1 << 20)

static void test_all_or_none(void **state)
{
    struct kv_arena a;
    uint64_t p[64], more[1];
    int cls, owner;

    assert_int_equal(kv_arena_init(&a, 64 * 1000, 1000), BT_OK);
    cls = kv_arena_class_of(&a, 1000);
    assert_true(cls >= 0);
    assert_int_equal(kv_arena_class_of(&a, 1024), cls); /* the same piece */
    assert_int_equal(kv_arena_class_of(&a, 64001), -1);
    assert_int_equal(kv_arena_class_of(&a, 0), -1);
    assert_false(kv_arena_take(&a, cls, 63, &owner, p)); /* 62 of 1024 */
    assert_int_equal(a.used_bytes, 0);
    assert_true(kv_arena_take(&a, cls, 62 / 3 * 3, &owner, p));
    kv_arena_give(&a, p + 5, 1);
    assert_true(kv_arena_take(&a, cls, 1, &owner, more));
    assert_int_equal(more[0], p[5]);
    kv_arena_give(&a, p, 62 / 3 * 3);
    assert_int_equal(a.used_bytes, 0);
    assert_int_equal(a.n_free_chunks, a.n_chunks);
    kv_arena_fini(&a);
}

struct held {
    uint64_t pieces[8];
    uint32_t n;
    size_t bytes;
};

/* Random work of many sizes against a map of who owns which 256 bytes. */
static void test_random(void **state)
{
    static const size_t sizes[] = {100, 256, 3000, 65536, 70000, 250000};
    size_t n_units = 8 * MIB / 256;
    uint16_t *map = calloc(n_units, sizeof(*map));
    struct held *held = calloc(500, sizeof(*held));
    struct kv_arena a;
    uint32_t seed = 5, taken = 0;

    assert_int_equal(kv_arena_init(&a, 8 * MIB, 0), BT_OK);
    for (int i = 0; i < 20000; i++) {
        struct held *h;
        uint32_t who;

        seed = seed * 1664525u + 1013904223u;
        who = (seed >> 8) % 500;
        h = &held[who];
        if (h->n == 0) {
            h->bytes = sizes[(seed >> 4) % BT_ARRAY_LEN(sizes)];
            h->n = 1 + (seed >> 28) % 8;
            if (!kv_arena_take(&a, kv_arena_class_of(&a, h->bytes), h->n, h, h->pieces)) {
                h->n = 0;
                continue;
            }
            taken++;
        }
        for (uint32_t k = 0; k < h->n; k++) {
            bool giving = map[h->pieces[k] / 256] != 0;

            assert_true(h->pieces[k] % 256 == 0 && h->pieces[k] + h->bytes <= 8 * MIB);
            assert_ptr_equal(
                kv_arena_chunk_of(&a, h->pieces[k])
                    ->owners[h->pieces[k] % a.chunk_bytes / BT_DIV_UP(h->bytes, 256) / 256],
                h);
            for (size_t u = 0; u < BT_DIV_UP(h->bytes, 256); u++) {
                uint16_t *at = &map[h->pieces[k] / 256 + u];

                assert_int_equal(*at, giving ? who + 1 : 0);
                *at = (uint16_t)(giving ? 0 : who + 1);
            }
            if (giving && k + 1 == h->n) {
                kv_arena_give(&a, h->pieces, h->n);
                h->n = 0;
                break;
            }
        }
    }
    assert_true(taken > 3000);
    for (int i = 0; i < 500; i++) {
        kv_arena_give(&a, held[i].pieces, held[i].n);
    }
    assert_int_equal(a.used_bytes, 0);
    assert_int_equal(a.n_free_chunks, a.n_chunks);
    for (int c = 0; c < KV_ARENA_CLASSES; c++) {
        assert_int_equal(a.classes[c].n_chunks, 0);
        assert_int_equal(a.classes[c].n_free, 0);
    }
    kv_arena_fini(&a);
    free(map);
    free(held);
}

/* More sizes than there are classes: those without memory give their class up. */
static void test_classes_are_reused(void **state)
{
    struct kv_arena a;
    uint64_t p[KV_ARENA_CLASSES];
    int c;

    assert_int_equal(kv_arena_init(&a, 2048 * MIB, 0), BT_OK);
    for (size_t i = 0; i < KV_ARENA_CLASSES; i++) {
        c = kv_arena_class_of(&a, (i + 1) * 256);
        assert_true(c >= 0 && kv_arena_take(&a, c, 1, &a, &p[i]));
    }
    assert_int_equal(kv_arena_class_of(&a, 100 * 256), -1);
    kv_arena_give(&a, &p[3], 1);
    c = kv_arena_class_of(&a, 100 * 256);
    assert_true(c >= 0 && kv_arena_take(&a, c, 1, &a, &p[3]));
    kv_arena_give(&a, p, KV_ARENA_CLASSES);
    assert_int_equal(a.n_free_chunks, a.n_chunks);
    kv_arena_fini(&a);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_all_or_none),
        cmocka_unit_test(test_random),
        cmocka_unit_test(test_classes_are_reused),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
