/* The ledger that a process has left behind, damaged in any way: adopted as far as it is whole,
 * never believed further. A good ledger is made once; an input is a row of patches to it: two bytes
 * where, one how long, then that many bytes. Where its first byte is odd the records' sums are made
 * right afterwards, so that what stands behind them is reached too. */
#include "kvstore/block/index.h"
#include "kvstore/block/sum.h"

#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

#define BLOCK   16 /* tokens; two pages */
#define N_PAGES 16
#define USED    168 /* bytes of a record, ledger.h: 88, 2 pages, 2 generations, 16 ids */
#define RECORD  192 /* rounded up */

static struct kv_layout layout = {.n_layers = 2,
                                  .n_kv_heads = 1,
                                  .head_dim = 2,
                                  .page_tokens = 8,
                                  .dtype = KV_DTYPE_F16,
                                  .n_pages = N_PAGES};
static char *pool_mem, *good;
static size_t ledger_bytes;

static void must(bool ok)
{
    if (!ok) {
        abort();
    }
}

static void leave(struct bt_mem_region *r)
{
    r->base = NULL; /* ours */
}

static const struct bt_mem_ops own_mem = {.kind = BT_MEM_HOST, .name = "fuzz", .free = leave};

struct life {
    struct kv_ledger *ledger;
    struct kv_pool *pool;
    struct kv_index *index;
    struct kv_adopted adopted;
};

static void life_begin(struct life *l, char *mem)
{
    struct kv_ledger_cfg lc = {.layout = &layout,
                               .block_tokens = BLOCK,
                               .root = {.b = {42}},
                               .pool_id = 77,
                               .incarnation = 1,
                               .pool = pool_mem,
                               .mem = mem,
                               .bytes = ledger_bytes};
    struct bt_mem_region region = {&own_mem, pool_mem, layout.bytes, -1};
    struct kv_index_cfg xc = {.block_tokens = BLOCK};

    must(kv_ledger_create(&lc, &l->ledger, NULL) == BT_OK);
    must(kv_pool_create_in(&layout, &region, &l->pool, NULL) == BT_OK);
    kv_pool_set_ledger(l->pool, l->ledger);
    xc.pool = l->pool;
    must(kv_index_create(&xc, &l->index, NULL) == BT_OK);
    must(kv_index_adopt(l->index, l->ledger, &l->adopted, NULL) == BT_OK);
}

static void life_end(struct life *l)
{
    kv_index_leave_ledger(l->index);
    kv_pool_set_ledger(l->pool, NULL);
    kv_index_destroy(l->index);
    kv_pool_destroy(l->pool);
    kv_ledger_destroy(l->ledger);
}

/* A chain of blocks that a process has computed and let go. */
static void make_good(void)
{
    struct kv_ledger_block b = {.root = {.b = {42}}};
    int32_t ids[BLOCK];
    uint32_t pages[N_PAGES];
    struct kv_key last = b.root;
    struct kv_hasher *hasher;
    struct life l;

    must(kv_layout_init(&layout, NULL) == BT_OK);
    ledger_bytes = kv_ledger_bytes(&layout, BLOCK);
    must(ledger_bytes == 4096 + 128 + (N_PAGES / 2) * RECORD);
    pool_mem = aligned_alloc(4096, (layout.bytes + 4095) / 4096 * 4096);
    good = aligned_alloc(64, ledger_bytes);
    must(pool_mem && good && kv_hasher_create(&hasher, NULL) == BT_OK);
    memset(pool_mem, 7, layout.bytes);
    memset(good, 0, ledger_bytes);
    life_begin(&l, good);
    must(kv_pool_take(l.pool, 8, KV_OWNER_SEQ, KV_PAGE_NONE, pages) == BT_OK);
    for (uint32_t i = 0; i < 4; i++) {
        for (int t = 0; t < BLOCK; t++) {
            ids[t] = (int32_t)(i * 100) + t;
        }
        b.has_parent = i > 0;
        b.parent = last;
        kv_key_block(hasher, &last, ids, BLOCK, &b.key);
        b.ids = ids;
        b.pages = pages + 2 * (size_t)i;
        kv_ledger_seal(l.ledger, i, &b);
        kv_ledger_mark_let_go(l.ledger, i);
        last = b.key;
    }
    /* The process dies here: the ledger stays as it is. */
    kv_pool_set_ledger(l.pool, NULL);
    kv_pool_give(l.pool, pages, 8, KV_OWNER_SEQ);
    kv_index_leave_ledger(l.index);
    kv_index_destroy(l.index);
    kv_pool_destroy(l.pool);
    kv_ledger_destroy(l.ledger);
    kv_hasher_destroy(hasher);
}

static void make_right(char *record)
{
    uint64_t sum = kv_sum_seeded(record + 4, 12, 0);

    sum = kv_sum_seeded(record + 24, 8, sum);
    sum = kv_sum_seeded(record + 40, USED - 40, sum);
    memcpy(record + 32, &sum, 8);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    struct kv_pool_stats s;
    struct life l;
    char *mem;

    if (!good) {
        make_good();
    }
    if (n < 1) {
        return 0;
    }
    mem = aligned_alloc(64, ledger_bytes); /* of its own, so that reading past it shows */
    must(mem);
    memcpy(mem, good, ledger_bytes);
    for (size_t at = 1; at + 3 <= n;) {
        size_t to = ((size_t)data[at] | (size_t)data[at + 1] << 8) % ledger_bytes;
        size_t len = BT_MIN(n - at - 3, ledger_bytes - to);

        len = BT_MIN(len, (size_t)data[at + 2]);
        memcpy(mem + to, data + at + 3, len);
        at += 3 + len;
    }
    for (size_t i = 0; data[0] % 2 && i < N_PAGES / 2; i++) {
        make_right(mem + 4096 + 128 + i * RECORD);
    }
    life_begin(&l, mem);
    s = kv_pool_stats(l.pool);
    must(s.n_free + s.n_index == N_PAGES && s.n_index == 2 * l.adopted.n_blocks);
    life_end(&l);
    free(mem);
    return 0;
}
