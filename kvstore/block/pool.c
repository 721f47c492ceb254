/* Paged KV pool: a bitmap of free pages and one descriptor per page.
 *
 * Allocation looks for neighbours: the pages behind the caller's last one, then the first run that
 * is long enough, then the longest runs there are. A scan costs one load per 64 pages.
 *
 * Thread: the engine's. The counters that other threads read stand behind a sequence number that is
 * odd while they change (one writer), so that a reader always sees a set that adds up to the number
 * of pages. They are sequentially consistent: a few of them per step cost nothing.
 */
#include "kvstore/block/pool.h"

#include "common/base/buf.h"
#include "common/obs/log.h"

#include <stdatomic.h>
#include <stdlib.h>

struct page {
    _Atomic uint32_t generation; /* relaxed: a holder's page does not change under it */
    uint8_t owner;               /* enum kv_owner */
};

struct kv_pool {
    struct kv_layout layout;
    struct bt_mem_region region;
    struct kv_ledger *ledger; /* NULL = none */
    struct page *pages;
    uint64_t *free_bits;      /* bit set = free; bits behind the last page are clear */
    _Atomic uint32_t version; /* of the counters */
    _Atomic uint32_t n_owned[KV_N_OWNERS];
    _Atomic uint32_t n_cached;
};

/* n pages change from one owner to another. */
static void count_moved(struct kv_pool *pool, size_t n, enum kv_owner from, enum kv_owner to)
{
    pool->version++;
    pool->n_owned[from] -= (uint32_t)n;
    pool->n_owned[to] += (uint32_t)n;
    pool->version++;
}

static bool is_free(const struct kv_pool *pool, uint32_t page)
{
    return pool->free_bits[page / 64] >> (page % 64) & 1;
}

int kv_pool_create_in(const struct kv_layout *layout,
                      const struct bt_mem_region *take_region,
                      struct kv_pool **ret_pool,
                      struct bt_err *err)
{
    size_t n_words = BT_DIV_UP((size_t)layout->n_pages, 64);
    struct kv_pool *pool;

    if (layout->n_pages == 0 || layout->n_pages == KV_PAGE_NONE) {
        return BT_FAIL(err, BT_E_INVALID, "pool of %u pages", layout->n_pages);
    }
    if (take_region->bytes < layout->bytes) {
        return BT_FAIL(err, BT_E_INVALID, "pool of %zu bytes in memory of %zu", layout->bytes,
                       take_region->bytes);
    }
    pool = bt_calloc(1, sizeof(*pool));
    if (!pool) {
        return BT_FAIL(err, BT_E_NOMEM, "pool: no memory");
    }
    pool->layout = *layout;
    pool->pages = bt_calloc(layout->n_pages, sizeof(*pool->pages));
    pool->free_bits = bt_calloc(n_words, sizeof(*pool->free_bits));
    if (!pool->pages || !pool->free_bits) {
        free(pool->free_bits);
        free(pool->pages);
        free(pool);
        return BT_FAIL(err, BT_E_NOMEM, "pool: no memory for %u page descriptors", layout->n_pages);
    }
    for (uint32_t p = 0; p < layout->n_pages; p++) {
        pool->free_bits[p / 64] |= 1ull << (p % 64);
    }
    pool->n_owned[KV_OWNER_FREE] = layout->n_pages;
    pool->region = *take_region;
    *ret_pool = pool;
    return BT_OK;
}

int kv_pool_create(const struct kv_layout *layout,
                   const struct bt_mem_ops *ops,
                   const char *name,
                   struct kv_pool **ret_pool,
                   struct bt_err *err)
{
    struct bt_mem_region region;
    int rc;

    if (layout->n_pages == 0 || layout->n_pages == KV_PAGE_NONE) {
        return BT_FAIL(err, BT_E_INVALID, "pool %s: %u pages", name, layout->n_pages);
    }
    rc = ops->alloc(layout->bytes, name, &region, err);
    if (rc < 0) {
        return rc;
    }
    rc = kv_pool_create_in(layout, &region, ret_pool, err);
    if (rc < 0) {
        ops->free(&region);
    }
    return rc;
}

void kv_pool_set_ledger(struct kv_pool *pool, struct kv_ledger *ledger)
{
    pool->ledger = ledger;
    if (!ledger) {
        return;
    }
    BT_BUG_ON(pool->n_owned[KV_OWNER_FREE] != pool->layout.n_pages);
    for (uint32_t p = 0; p < pool->layout.n_pages; p++) {
        atomic_store_explicit(&pool->pages[p].generation, kv_ledger_generation(ledger, p),
                              memory_order_relaxed);
    }
}

void kv_pool_destroy(struct kv_pool *pool)
{
    if (!pool) {
        return;
    }
    BT_BUG_ON(!kv_pool_audit(pool));
    pool->region.ops->free(&pool->region);
    free(pool->free_bits);
    free(pool->pages);
    free(pool);
}

const struct kv_layout *kv_pool_layout(const struct kv_pool *pool)
{
    return &pool->layout;
}

const struct bt_mem_region *kv_pool_region(const struct kv_pool *pool)
{
    return &pool->region;
}

void *kv_pool_page(const struct kv_pool *pool, int layer, uint32_t page)
{
    BT_DASSERT(layer >= 0 && layer < pool->layout.n_layers && page < pool->layout.n_pages);
    return (char *)pool->region.base + kv_layout_offset(&pool->layout, layer, page);
}

uint32_t kv_pool_generation(const struct kv_pool *pool, uint32_t page)
{
    BT_BUG_ON(page >= pool->layout.n_pages);
    return atomic_load_explicit(&pool->pages[page].generation, memory_order_relaxed);
}

bool kv_pool_is_free(const struct kv_pool *pool, uint32_t page)
{
    return is_free(pool, page);
}

/* First page >= `from` that is free (want) or not free (!want); n_pages if none. */
static uint32_t find_page(const struct kv_pool *pool, uint32_t from, bool want)
{
    uint32_t n = pool->layout.n_pages;

    while (from < n) {
        uint64_t word = pool->free_bits[from / 64];

        word = (want ? word : ~word) >> (from % 64);
        if (word) {
            from += (uint32_t)__builtin_ctzll(word);
            break;
        }
        from = (from / 64 + 1) * 64;
    }
    return BT_MIN(from, n);
}

/* First run of `need` free pages; if there is none the longest. Returns its length, at most need.
 */
static uint32_t find_run(const struct kv_pool *pool, uint32_t need, uint32_t *ret_start)
{
    uint32_t best = 0, start, end;

    for (start = find_page(pool, 0, true); start < pool->layout.n_pages && best < need;
         start = find_page(pool, end, true)) {
        end = find_page(pool, start, false);
        if (end - start > best) {
            best = end - start;
            *ret_start = start;
        }
    }
    return BT_MIN(best, need);
}

static void take_run(struct kv_pool *pool, uint32_t start, uint32_t n, enum kv_owner owner)
{
    for (uint32_t p = start; p < start + n; p++) {
        struct page *d = &pool->pages[p];
        uint32_t generation = atomic_load_explicit(&d->generation, memory_order_relaxed);

        BT_DASSERT(d->owner == KV_OWNER_FREE && is_free(pool, p));
        pool->free_bits[p / 64] &= ~(1ull << (p % 64));
        d->owner = (uint8_t)owner;
        atomic_store_explicit(&d->generation, generation + 1, memory_order_relaxed);
        if (pool->ledger) {
            kv_ledger_page_taken(pool->ledger, p, generation + 1);
        }
    }
}

int kv_pool_take(
    struct kv_pool *pool, uint32_t n, enum kv_owner owner, uint32_t after, uint32_t *ret_pages)
{
    uint32_t done = 0, start = 0, run = 0;

    BT_BUG_ON(owner != KV_OWNER_SEQ && owner != KV_OWNER_TRANSFER);
    if (n > pool->n_owned[KV_OWNER_FREE]) {
        return BT_E_EXHAUSTED;
    }
    if (after != KV_PAGE_NONE && after + 1 < pool->layout.n_pages && is_free(pool, after + 1)) {
        start = after + 1;
        run = BT_MIN(find_page(pool, start, false) - start, n);
    }
    while (done < n) {
        if (run == 0) {
            run = find_run(pool, n - done, &start);
        }
        BT_BUG_ON(run == 0);
        take_run(pool, start, run, owner);
        for (uint32_t i = 0; i < run; i++) {
            ret_pages[done++] = start + i;
        }
        run = 0;
    }
    count_moved(pool, n, KV_OWNER_FREE, owner);
    return BT_OK;
}

void kv_pool_give(struct kv_pool *pool, const uint32_t *pages, size_t n, enum kv_owner owner)
{
    BT_BUG_ON(owner == KV_OWNER_FREE);
    for (size_t i = 0; i < n; i++) {
        uint32_t p = pages[i];

        BT_BUG_ON(p >= pool->layout.n_pages || pool->pages[p].owner != owner);
        pool->pages[p].owner = KV_OWNER_FREE;
        pool->free_bits[p / 64] |= 1ull << (p % 64);
        if (pool->ledger) {
            kv_ledger_page_free(pool->ledger, p);
        }
    }
    count_moved(pool, n, owner, KV_OWNER_FREE);
}

bool kv_pool_adopt(struct kv_pool *pool, const uint32_t *pages, size_t n)
{
    size_t done = 0;

    while (done < n && pages[done] < pool->layout.n_pages && is_free(pool, pages[done])) {
        pool->free_bits[pages[done] / 64] &= ~(1ull << (pages[done] % 64));
        done++;
    }
    for (size_t i = 0; i < done; i++) {
        if (done < n) {
            pool->free_bits[pages[i] / 64] |= 1ull << (pages[i] % 64);
        } else {
            pool->pages[pages[i]].owner = KV_OWNER_INDEX;
        }
    }
    if (done < n) {
        return false;
    }
    count_moved(pool, n, KV_OWNER_FREE, KV_OWNER_INDEX);
    return true;
}

void kv_pool_set_owner(
    struct kv_pool *pool, const uint32_t *pages, size_t n, enum kv_owner from, enum kv_owner to)
{
    BT_BUG_ON(from == KV_OWNER_FREE || to == KV_OWNER_FREE);
    for (size_t i = 0; i < n; i++) {
        BT_BUG_ON(pages[i] >= pool->layout.n_pages || pool->pages[pages[i]].owner != from);
        pool->pages[pages[i]].owner = (uint8_t)to;
    }
    count_moved(pool, n, from, to);
}

void kv_pool_set_cached(struct kv_pool *pool, uint32_t n_pages)
{
    pool->version++;
    pool->n_cached = n_pages;
    pool->version++;
}

struct kv_pool_stats kv_pool_stats(const struct kv_pool *pool)
{
    struct kv_pool_stats s = {.n_pages = pool->layout.n_pages};
    uint32_t version;

    do {
        version = pool->version;
        s.n_free = pool->n_owned[KV_OWNER_FREE];
        s.n_seq = pool->n_owned[KV_OWNER_SEQ];
        s.n_transfer = pool->n_owned[KV_OWNER_TRANSFER];
        s.n_index = pool->n_owned[KV_OWNER_INDEX];
        s.n_cached = pool->n_cached;
    } while (version % 2 != 0 || version != pool->version);
    return s;
}

bool kv_pool_audit(const struct kv_pool *pool)
{
    struct kv_pool_stats s = kv_pool_stats(pool);
    uint32_t n_free = 0;
    bool ok = true;

    for (uint32_t p = 0; p < pool->layout.n_pages; p++) {
        bool free_bit = is_free(pool, p);

        n_free += free_bit;
        if (free_bit != (pool->pages[p].owner == KV_OWNER_FREE)) {
            BT_ERROR("pool_audit", "msg=\"free list and owner differ\" page=%u owner=%u", p,
                     pool->pages[p].owner);
            ok = false;
        } else if (!free_bit) {
            BT_ERROR("pool_audit", "msg=\"page not returned\" page=%u owner=%u generation=%u", p,
                     pool->pages[p].owner, kv_pool_generation(pool, p));
            ok = false;
        }
    }
    if (n_free != s.n_free) {
        BT_ERROR("pool_audit", "msg=\"counter differs\" free=%u counted=%u", s.n_free, n_free);
        ok = false;
    }
    return ok;
}
