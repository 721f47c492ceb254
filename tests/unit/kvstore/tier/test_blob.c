/* Blobs: copies between pages of different sizes, the written head, runs. */
#include "common/base/buf.h"
#include "kvstore/tier/blob.h"

#include "tests/unit/cmocka.h"

#include <stdlib.h>

#define BLOCK 32
#define HEADS 3
#define DIM   4

static struct kv_pool *make_pool(int page_tokens, enum kv_dtype dtype)
{
    struct kv_layout l = {.n_layers = 2,
                          .n_kv_heads = HEADS,
                          .head_dim = DIM,
                          .page_tokens = page_tokens,
                          .dtype = dtype,
                          .n_pages = 16};
    struct kv_pool *pool = NULL;

    assert_int_equal(kv_layout_init(&l, NULL), BT_OK);
    assert_int_equal(kv_pool_create(&l, &bt_mem_host, "test", &pool, NULL), BT_OK);
    return pool;
}

/* What K (v = 0) or V (v = 1) of a token and head holds. */
static uint32_t value(int layer, int v, int head, int token, int d)
{
    return (uint32_t)(((layer * 2 + v) * HEADS + head) * 10000 + token * 16 + d);
}

static uint32_t *
at(struct kv_pool *pool, const uint32_t *pages, int layer, int v, int head, int token)
{
    int pt = kv_pool_layout(pool)->page_tokens;
    uint32_t *page = kv_pool_page(pool, layer, pages[token / pt]);

    return page + (size_t)(((v * HEADS + head) * pt + token % pt) * DIM);
}

static void each(struct kv_pool *pool, const uint32_t *pages, int n_tokens, bool check)
{
    for (int layer = 0; layer < 2; layer++) {
        for (int v = 0; v < 2; v++) {
            for (int head = 0; head < HEADS; head++) {
                for (int token = 0; token < n_tokens; token++) {
                    for (int d = 0; d < DIM; d++) {
                        uint32_t *p = at(pool, pages, layer, v, head, token) + d;

                        if (check) {
                            assert_int_equal(*p, value(layer, v, head, token, d));
                        } else {
                            *p = value(layer, v, head, token, d);
                        }
                    }
                }
            }
        }
    }
}

/* A blob does not show which page size it came from. */
static void test_page_sizes(void **state)
{
    const uint32_t small_pages[] = {7, 2, 9, 4}, large_pages[] = {3, 1};
    struct kv_pool *small = make_pool(8, KV_DTYPE_F32), *large = make_pool(16, KV_DTYPE_F32);
    struct kv_blob_shape s = kv_blob_shape_of(kv_pool_layout(small), BLOCK);
    struct kv_blob_shape s2 = kv_blob_shape_of(kv_pool_layout(large), BLOCK);
    void *a = malloc(s.layer_bytes), *b = malloc(s.layer_bytes);

    assert_true(kv_blob_shape_eq(&s, &s2));
    assert_int_equal(s.layer_bytes, 2 * HEADS * BLOCK * DIM * 4);
    each(small, small_pages, BLOCK, false);
    for (int l = 0; l < 2; l++) {
        kv_blob_gather(small, small_pages, BLOCK, l, a);
        kv_blob_scatter(large, large_pages, BLOCK, l, a);
        assert_int_equal(kv_blob_gather_sum(large, large_pages, BLOCK, l, b),
                         kv_blob_sum(a, s.layer_bytes));
        assert_memory_equal(a, b, s.layer_bytes);
        /* K of head 1, token 20, as the contract says. */
        assert_int_equal(((uint32_t *)a)[(1 * BLOCK + 20) * DIM + 2], value(l, 0, 1, 20, 2));
        assert_int_equal(((uint32_t *)a)[((HEADS + 2) * BLOCK + 5) * DIM], value(l, 1, 2, 5, 0));
    }
    each(large, large_pages, BLOCK, true);
    free(a);
    free(b);
    kv_pool_destroy(small);
    kv_pool_destroy(large);
}

/* Both 16-bit dtypes take half of what F32 does. */
static void test_dtypes(void **state)
{
    static const enum kv_dtype half[] = {KV_DTYPE_F16, KV_DTYPE_BF16};
    const uint32_t pages[] = {7, 2, 9, 4}, back[] = {1, 3, 5, 6};

    for (size_t i = 0; i < BT_ARRAY_LEN(half); i++) {
        struct kv_pool *pool = make_pool(8, half[i]);
        struct kv_blob_shape s = kv_blob_shape_of(kv_pool_layout(pool), BLOCK);
        size_t page = kv_pool_layout(pool)->page_stride;
        unsigned char *a = malloc(s.layer_bytes + 64);

        assert_int_equal(s.layer_bytes, 2 * HEADS * BLOCK * DIM * 2);
        memset(a + s.layer_bytes, 0xa5, 64);
        for (uint32_t p = 0; p < 4; p++) {
            memset(kv_pool_page(pool, 1, pages[p]), (int)(17 * p + 1), page);
        }
        kv_blob_gather(pool, pages, BLOCK, 1, a);
        for (int k = 0; k < 64; k++) {
            assert_int_equal(a[s.layer_bytes + (size_t)k], 0xa5); /* nothing beyond its size */
        }
        kv_blob_scatter(pool, back, BLOCK, 1, a);
        for (uint32_t p = 0; p < 4; p++) {
            assert_memory_equal(kv_pool_page(pool, 1, pages[p]), kv_pool_page(pool, 1, back[p]),
                                page);
        }
        free(a);
        kv_pool_destroy(pool);
    }
}

/* Pages behind a tail: zeros in the blob, not written back. */
static void test_pages_left_out(void **state)
{
    const uint32_t pages[] = {7, 2, KV_PAGE_NONE, KV_PAGE_NONE}, back[] = {1, 5, KV_PAGE_NONE, 3};
    struct kv_pool *pool = make_pool(8, KV_DTYPE_F32);
    struct kv_blob_shape s = kv_blob_shape_of(kv_pool_layout(pool), BLOCK);
    uint32_t *a = malloc(s.layer_bytes);

    each(pool, pages, 16, false);
    for (int l = 0; l < 2; l++) {
        memset(a, 0xff, s.layer_bytes);
        kv_blob_gather(pool, pages, BLOCK, l, a);
        assert_int_equal(a[20 * DIM], 0);
        assert_int_equal(a[((HEADS + 1) * BLOCK + 31) * DIM + 3], 0);
        assert_int_equal(kv_blob_gather_sum(pool, pages, BLOCK, l, a),
                         kv_blob_sum(a, s.layer_bytes));
        kv_blob_scatter(pool, back, BLOCK, l, a);
        assert_int_equal(*(uint32_t *)kv_pool_page(pool, l, 3), 0);
    }
    each(pool, back, 16, true);
    free(a);
    kv_pool_destroy(pool);
}

struct arrays {
    int32_t ids[64];
    uint64_t sums[8];
};

static struct kv_blob_meta make_meta(struct arrays *a)
{
    struct kv_blob_meta m = {.prefix = 5,
                             .generation = 0x0102030405060708,
                             .n_tokens = 60,
                             .shape = {8, 64, 4096},
                             .ids = a->ids,
                             .sums = a->sums};

    for (int i = 0; i < 64; i++) {
        a->ids[i] = i * 77 - 5;
    }
    for (uint64_t i = 0; i < 8; i++) {
        a->sums[i] = i << 40;
    }
    memset(m.key.b, 1, 16);
    memset(m.parent.b, 2, 16);
    memset(m.root.b, 3, 16);
    return m;
}

static int decode(const void *p, size_t n, struct arrays *a, struct kv_blob_meta *m, size_t *head)
{
    struct kv_blob_room room = {a->ids, 64, a->sums, 8};

    return kv_blob_decode(p, n, &room, m, head);
}

static void test_head(void **state)
{
    struct arrays a, b;
    struct kv_blob_meta m = make_meta(&a), got;
    size_t n = kv_blob_head_bytes(&m), head = 0;
    uint8_t *p = malloc(n + 10), *cut;

    assert_int_equal(n, 104 + 4 * 60 + 8 * 8 + 8);
    kv_blob_encode(&m, p);
    assert_memory_equal(p, "BTKVBLB1", 8);
    assert_int_equal(p[32], 8); /* generation, little-endian */
    assert_int_equal(decode(p, n + 10, &b, &got, &head), BT_OK);
    assert_int_equal(head, n);
    assert_memory_equal(&got.key, &m.key, 3 * sizeof(m.key));
    assert_true(got.prefix == m.prefix && got.generation == m.generation);
    assert_true(got.n_tokens == 60 && kv_blob_shape_eq(&got.shape, &m.shape));
    assert_memory_equal(got.ids, a.ids, 60 * sizeof(a.ids[0]));
    assert_memory_equal(got.sums, a.sums, sizeof(a.sums));
    for (size_t i = 0; i < n; i++) {
        cut = malloc(i + 1);
        memcpy(cut, p, i);
        assert_true(decode(cut, i, &b, &got, &head) < 0);
        free(cut);
    }
    for (size_t bit = 0; bit < 8 * n; bit++) {
        p[bit / 8] ^= (uint8_t)(1u << bit % 8);
        assert_true(decode(p, n, &b, &got, &head) < 0);
        p[bit / 8] ^= (uint8_t)(1u << bit % 8);
    }
    free(p);
}

/* Whole and with a right sum, but out of limits or larger than the reader's arrays. */
static void test_head_limits(void **state)
{
    struct arrays a, b;
    struct kv_blob_meta good = make_meta(&a), m, got;
    uint8_t *p = malloc(KV_BLOB_HEAD_MAX);
    size_t head;

    m = good;
    m.shape.layer_bytes = 0;
    kv_blob_encode(&m, p);
    assert_int_equal(decode(p, KV_BLOB_HEAD_MAX, &b, &got, &head), BT_E_FORMAT);
    m = good;
    m.shape.layer_bytes = KV_BLOB_MAX_LAYER_BYTES + 1;
    kv_blob_encode(&m, p);
    assert_int_equal(decode(p, KV_BLOB_HEAD_MAX, &b, &got, &head), BT_E_FORMAT);
    m = good;
    m.shape.block_tokens = 59; /* fewer than there are */
    kv_blob_encode(&m, p);
    assert_int_equal(decode(p, KV_BLOB_HEAD_MAX, &b, &got, &head), BT_E_FORMAT);
    m = good;
    m.n_tokens = 0;
    kv_blob_encode(&m, p);
    assert_int_equal(decode(p, KV_BLOB_HEAD_MAX, &b, &got, &head), BT_E_FORMAT);
    kv_blob_encode(&good, p);
    assert_int_equal(kv_blob_decode(p, KV_BLOB_HEAD_MAX,
                                    &(struct kv_blob_room){b.ids, 59, b.sums, 8}, &got, &head),
                     BT_E_FORMAT);
    assert_int_equal(kv_blob_decode(p, KV_BLOB_HEAD_MAX,
                                    &(struct kv_blob_room){b.ids, 64, b.sums, 7}, &got, &head),
                     BT_E_FORMAT);
    free(p);
}

/* A part of a chain is proven by the same sums as the whole. */
static void test_runs(void **state)
{
    struct kv_key keys[4] = {{{1}}, {{2}}, {{3}}, {{4}}};
    int32_t ids[4 * 8];
    struct kv_chain chain = {.root = {{9}}, .keys = keys, .ids = ids, .n_blocks = 4};
    struct kv_run whole, part;
    struct kv_blob_meta a, b;
    uint64_t p, q;

    for (int i = 0; i < 32; i++) {
        ids[i] = i;
    }
    whole = kv_run_of(&chain, 0, 8, 3);
    part = kv_run_of(&chain, 2, 8, 3);
    p = whole.prefix;
    q = part.prefix;
    assert_int_equal(p, 0);
    for (uint32_t i = 0; i < 4; i++) {
        kv_run_at(&whole, i, &p, &a);
        assert_int_equal(a.n_tokens, i == 3 ? 3 : 8);
        assert_true(kv_key_eq(&a.parent, i ? &keys[i - 1] : &chain.root));
        if (i >= 2) {
            kv_run_at(&part, i - 2, &q, &b);
            assert_int_equal(p, q);
            assert_true(kv_key_eq(&a.parent, &b.parent) && a.ids == b.ids);
            assert_int_equal(a.n_tokens, b.n_tokens);
        }
    }
    ids[1]++; /* any id before changes it */
    part = kv_run_of(&chain, 2, 8, 3);
    q = part.prefix;
    kv_run_at(&part, 0, &q, &b);
    kv_run_at(&part, 1, &q, &b);
    assert_int_not_equal(p, q);
}

/* The same block by its grid: gathered, sampled, and descriptions that reach beyond the memory. */
static void test_grids(void **state)
{
    struct kv_pool *pool = make_pool(8, KV_DTYPE_F32);
    const uint32_t pages[] = {7, 2, 15, 0};
    uint32_t wild[] = {7, 2, 15, 16};
    struct kv_blob_grid g = kv_blob_grid_of(pool, pages, BLOCK), bad;
    struct kv_blob_shape shape = kv_blob_shape_of(kv_pool_layout(pool), BLOCK);
    size_t bytes = kv_pool_layout(pool)->bytes;
    char *a = malloc(shape.layer_bytes), *b = malloc(shape.layer_bytes);
    struct kv_key key = {{0}};
    uint64_t sum;
    int seen = 0;

    each(pool, pages, BLOCK, false);
    for (uint32_t l = 0; l < 2; l++) {
        sum = kv_blob_gather_sum(pool, pages, BLOCK, (int)l, a);
        assert_true(kv_blob_grid_gather(&g, l, b) == sum &&
                    sum == kv_blob_sum(b, shape.layer_bytes));
        assert_memory_equal(a, b, shape.layer_bytes);
    }
    for (int k = 0; k < 256; k++) {
        char *row =
            (char *)kv_pool_page(pool, 1, pages[k / 24 % 4]) + g.row_bytes * ((size_t)k % g.n_rows);

        key.b[0] = (uint8_t)k;
        sum = kv_blob_grid_sample(&g, &key, 2);
        assert_true(sum == kv_blob_sample_row(&g, &key, 1, kv_blob_sample_row(&g, &key, 0, 0)));
        row[(size_t)k % g.row_bytes] ^= 1; /* seen by those keys that take this row */
        seen += sum != kv_blob_grid_sample(&g, &key, 2);
        row[(size_t)k % g.row_bytes] ^= 1;
    }
    assert_true(seen > 0 && seen < 256);
    assert_true(kv_blob_grid_fits(&g, &shape, bytes));
    assert_false(kv_blob_grid_fits(&g, &shape, bytes - 1));
    bad = g;
    bad.pages = wild;
    assert_false(kv_blob_grid_fits(&bad, &shape, bytes));
    bad = g;
    bad.n_rows++;
    assert_false(kv_blob_grid_fits(&bad, &shape, bytes));
    bad = g;
    bad.row_bytes = SIZE_MAX / 2;
    assert_false(kv_blob_grid_fits(&bad, &shape, SIZE_MAX));
    bad = g;
    bad.layer_stride = SIZE_MAX;
    assert_false(kv_blob_grid_fits(&bad, &shape, SIZE_MAX));
    free(a);
    free(b);
    kv_pool_destroy(pool);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_page_sizes),     cmocka_unit_test(test_dtypes),
        cmocka_unit_test(test_pages_left_out), cmocka_unit_test(test_head),
        cmocka_unit_test(test_head_limits),    cmocka_unit_test(test_runs),
        cmocka_unit_test(test_grids),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
