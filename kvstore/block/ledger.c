/* Crash-consistent ledger (format and rules in ledger.h).
 *
 * The writer may be killed between any two instructions. What its earlier instructions stored is
 * then in memory, so it is the order of the stores that counts: releases and fences keep the
 * compiler, and processors that reorder, from moving a seal in front of what it vouches for, or the
 * reuse of a page in front of the unsealing.
 *
 * Thread: the engine's, or whoever starts the successor. */
#include "kvstore/block/ledger.h"

#include "common/base/buf.h"
#include "kvstore/block/sum.h"

#include <openssl/sha.h>
#include <stdatomic.h>
#include <stdlib.h>

/* A test may kill the process at each of the moments that matter. */
#ifndef KV_LEDGER_POINT
#define KV_LEDGER_POINT() ((void)0)
#endif

#define VERSION      1
#define HEADER_BYTES 4096
#define ALIGN        64

enum { PAGE_FREE, PAGE_FILLING, PAGE_SEALED };

struct header {
    char magic[8];
    uint32_t version;
    _Atomic uint32_t whole;
    uint8_t geometry[32];
    uint8_t unused[16];
    struct kv_key root;
    uint64_t pool_id;
    uint64_t incarnation;
};
_Static_assert(offsetof(struct header, root) == 64, "as the format says");

struct page {
    _Atomic uint32_t generation, state;
};

struct record {
    _Atomic uint32_t sealed;
    uint32_t has_parent;
    uint64_t seal;
    _Atomic uint64_t let_go;
    uint64_t sum;
    uint64_t check;
    struct kv_key key, parent, root;
    uint32_t pages[]; /* [block_pages], then their generations, then ids[block_tokens] */
};
_Static_assert(sizeof(struct record) == 88 && offsetof(struct record, check) == 32,
               "as the format says");

struct kv_ledger {
    struct kv_layout layout;
    const char *pool;
    struct header *header;
    struct page *pages;
    char *records;
    size_t record_bytes; /* stride */
    size_t used_bytes;   /* of a record */
    uint32_t n_blocks, block_pages, block_tokens;
    uint64_t n_seals, n_let_go; /* the last numbers given */
    bool kept;
};

static const char magic[8] = {'B', 'T', 'L', 'E', 'D', 'G', 'R', '1'};

static size_t round_up(size_t n)
{
    return BT_DIV_UP(n, (size_t)ALIGN) * ALIGN;
}

static size_t record_used(uint32_t block_pages, uint32_t block_tokens)
{
    return sizeof(struct record) + (size_t)block_pages * 2 * sizeof(uint32_t) +
           (size_t)block_tokens * sizeof(int32_t);
}

static size_t records_at(const struct kv_layout *l)
{
    return round_up(HEADER_BYTES + (size_t)l->n_pages * sizeof(struct page));
}

size_t kv_ledger_bytes(const struct kv_layout *l, int block_tokens)
{
    uint32_t block_pages;

    if (block_tokens < l->page_tokens || block_tokens > 1 << 20 ||
        block_tokens % l->page_tokens != 0) {
        return 0;
    }
    block_pages = (uint32_t)(block_tokens / l->page_tokens);
    return records_at(l) + (size_t)(l->n_pages / block_pages) *
                               round_up(record_used(block_pages, (uint32_t)block_tokens));
}

/* Digest input: "baton-ledger" 0x00 0x00 0x00 0x00, KV-format digest, model digest, then 32-bit
 * little-endian: version, page_tokens, n_pages, block_tokens. */
void kv_ledger_digest(const struct kv_layout *l,
                      int block_tokens,
                      const uint8_t *model,
                      uint8_t ret_digest[32])
{
    static const char name[16] = "baton-ledger";
    const uint32_t words[] = {VERSION, (uint32_t)l->page_tokens, l->n_pages,
                              (uint32_t)block_tokens};
    uint8_t in[sizeof(name) + 64 + sizeof(words)];
    size_t n = sizeof(name) + 64;

    memcpy(in, name, sizeof(name));
    kv_layout_digest(l, in + sizeof(name));
    memcpy(in + sizeof(name) + 32, model, 32);
    for (size_t i = 0; i < BT_ARRAY_LEN(words); i++) {
        for (int shift = 0; shift < 32; shift += 8) {
            in[n++] = (uint8_t)(words[i] >> shift);
        }
    }
    SHA256(in, n, ret_digest);
}

static struct record *record_of(const struct kv_ledger *g, uint32_t slot)
{
    BT_BUG_ON(slot >= g->n_blocks);
    return (struct record *)(g->records + (size_t)slot * g->record_bytes);
}

/* ---- life ---- */

static bool fits(const struct kv_ledger *g, const struct kv_ledger_cfg *cfg, const uint8_t *digest)
{
    const struct header *h = g->header;

    return memcmp(h->magic, magic, sizeof(magic)) == 0 && h->version == VERSION &&
           atomic_load_explicit(&h->whole, memory_order_acquire) == 1 &&
           memcmp(h->geometry, digest, 32) == 0 && kv_key_eq(&h->root, &cfg->root) &&
           h->pool_id == cfg->pool_id;
}

/* Killed half-way it is not whole, and is emptied again. */
static void make_empty(struct kv_ledger *g, const struct kv_ledger_cfg *cfg, const uint8_t *digest)
{
    struct header *h = g->header;

    atomic_store_explicit(&h->whole, 0, memory_order_relaxed);
    atomic_thread_fence(memory_order_seq_cst);
    KV_LEDGER_POINT();
    for (uint32_t p = 0; p < g->layout.n_pages; p++) {
        /* Generations go on where there were any: old tickets stay stale. */
        atomic_store_explicit(&g->pages[p].state, PAGE_FREE, memory_order_relaxed);
    }
    for (uint32_t i = 0; i < g->n_blocks; i++) {
        struct record *r = record_of(g, i);

        if (atomic_load_explicit(&r->sealed, memory_order_relaxed) != 0) {
            atomic_store_explicit(&r->sealed, 0, memory_order_relaxed);
        }
    }
    KV_LEDGER_POINT();
    memcpy(h->magic, magic, sizeof(magic));
    h->version = VERSION;
    memcpy(h->geometry, digest, sizeof(h->geometry));
    h->root = cfg->root;
    h->pool_id = cfg->pool_id;
    KV_LEDGER_POINT();
    atomic_store_explicit(&h->whole, 1, memory_order_release);
}

/* Numbers go on behind the largest ones that are there. */
static void find_numbers(struct kv_ledger *g)
{
    for (uint32_t i = 0; i < g->n_blocks; i++) {
        const struct record *r = record_of(g, i);
        uint64_t let_go = atomic_load_explicit(&r->let_go, memory_order_relaxed);

        if (kv_ledger_sealed(g, i)) {
            g->n_seals = BT_MAX(g->n_seals, r->seal);
            g->n_let_go = BT_MAX(g->n_let_go, let_go == UINT64_MAX ? 0 : let_go);
        }
    }
    g->n_seals = BT_MIN(g->n_seals, UINT64_MAX / 2); /* a damaged record may say anything */
    g->n_let_go = BT_MIN(g->n_let_go, UINT64_MAX / 2);
}

int kv_ledger_create(const struct kv_ledger_cfg *cfg,
                     struct kv_ledger **ret_ledger,
                     struct bt_err *err)
{
    static const uint8_t no_model[32]; /* the root stands for it */
    size_t need = kv_ledger_bytes(cfg->layout, cfg->block_tokens);
    struct kv_ledger *g;
    uint8_t digest[32];

    if (need == 0 || cfg->bytes < need) {
        return BT_FAIL(err, BT_E_INVALID, "ledger of blocks of %d tokens: %zu bytes, not %zu",
                       cfg->block_tokens, cfg->bytes, need);
    }
    g = bt_calloc(1, sizeof(*g));
    if (!g) {
        return BT_FAIL(err, BT_E_NOMEM, "ledger: no memory");
    }
    g->layout = *cfg->layout;
    g->pool = cfg->pool;
    g->block_tokens = (uint32_t)cfg->block_tokens;
    g->block_pages = g->block_tokens / (uint32_t)g->layout.page_tokens;
    g->n_blocks = g->layout.n_pages / g->block_pages;
    g->used_bytes = record_used(g->block_pages, g->block_tokens);
    g->record_bytes = round_up(g->used_bytes);
    g->header = cfg->mem;
    g->pages = (struct page *)((char *)cfg->mem + HEADER_BYTES);
    g->records = (char *)cfg->mem + records_at(&g->layout);
    kv_ledger_digest(&g->layout, cfg->block_tokens, no_model, digest);
    g->kept = fits(g, cfg, digest);
    if (g->kept) {
        find_numbers(g);
    } else {
        make_empty(g, cfg, digest);
    }
    g->header->incarnation = cfg->incarnation;
    *ret_ledger = g;
    return BT_OK;
}

void kv_ledger_destroy(struct kv_ledger *g)
{
    free(g);
}

uint32_t kv_ledger_n_blocks(const struct kv_ledger *g)
{
    return g->n_blocks;
}

bool kv_ledger_kept(const struct kv_ledger *g)
{
    return g->kept;
}

/* ---- pages ---- */

uint32_t kv_ledger_generation(const struct kv_ledger *g, uint32_t page)
{
    BT_BUG_ON(page >= g->layout.n_pages);
    return atomic_load_explicit(&g->pages[page].generation, memory_order_relaxed);
}

void kv_ledger_page_taken(struct kv_ledger *g, uint32_t page, uint32_t generation)
{
    BT_DASSERT(page < g->layout.n_pages);
    atomic_store_explicit(&g->pages[page].generation, generation, memory_order_relaxed);
    atomic_store_explicit(&g->pages[page].state, PAGE_FILLING, memory_order_relaxed);
}

void kv_ledger_page_free(struct kv_ledger *g, uint32_t page)
{
    BT_DASSERT(page < g->layout.n_pages);
    atomic_store_explicit(&g->pages[page].state, PAGE_FREE, memory_order_relaxed);
}

/* ---- checksums ---- */

/* Piece after piece, each under the sum of those before it. */
static uint64_t sum_bytes(const struct kv_ledger *g, const uint32_t *pages)
{
    const struct kv_layout *l = &g->layout;
    uint64_t sum = 0;

    for (int layer = 0; layer < l->n_layers; layer++) {
        for (uint32_t i = 0; i < g->block_pages; i++) {
            sum =
                kv_sum_seeded(g->pool + kv_layout_offset(l, layer, pages[i]), l->page_stride, sum);
        }
    }
    return sum;
}

static uint64_t sum_record(const struct kv_ledger *g, const struct record *r)
{
    const char *p = (const char *)r;
    size_t from = offsetof(struct record, key);
    uint64_t sum = kv_sum_seeded(p + 4, 12, 0);

    sum = kv_sum_seeded(p + offsetof(struct record, sum), sizeof(r->sum), sum);
    return kv_sum_seeded(p + from, g->used_bytes - from, sum);
}

/* ---- blocks ---- */

void kv_ledger_seal(struct kv_ledger *g, uint32_t slot, const struct kv_ledger_block *b)
{
    struct record *r = record_of(g, slot);
    uint32_t n = g->block_pages;

    BT_BUG_ON(kv_ledger_sealed(g, slot));
    r->has_parent = b->has_parent;
    r->seal = ++g->n_seals;
    r->key = b->key;
    r->root = b->root;
    r->parent = b->has_parent ? b->parent : b->root;
    memcpy(r->pages, b->pages, n * sizeof(*r->pages));
    for (uint32_t i = 0; i < n; i++) {
        r->pages[n + i] = kv_ledger_generation(g, b->pages[i]);
    }
    KV_LEDGER_POINT();
    memcpy(r->pages + 2 * n, b->ids, g->block_tokens * sizeof(*b->ids));
    r->sum = sum_bytes(g, b->pages);
    r->check = sum_record(g, r);
    atomic_store_explicit(&r->let_go, UINT64_MAX, memory_order_relaxed);
    KV_LEDGER_POINT();
    for (uint32_t i = 0; i < n; i++) {
        atomic_store_explicit(&g->pages[b->pages[i]].state, PAGE_SEALED, memory_order_relaxed);
    }
    KV_LEDGER_POINT();
    atomic_store_explicit(&r->sealed, 1, memory_order_release); /* all of the above is there */
    KV_LEDGER_POINT();
}

void kv_ledger_unseal(struct kv_ledger *g, uint32_t slot)
{
    KV_LEDGER_POINT();
    atomic_store_explicit(&record_of(g, slot)->sealed, 0, memory_order_relaxed);
    atomic_thread_fence(memory_order_seq_cst); /* before any store into its pages */
    KV_LEDGER_POINT();
}

void kv_ledger_mark_held(struct kv_ledger *g, uint32_t slot)
{
    atomic_store_explicit(&record_of(g, slot)->let_go, UINT64_MAX, memory_order_relaxed);
}

void kv_ledger_mark_let_go(struct kv_ledger *g, uint32_t slot)
{
    atomic_store_explicit(&record_of(g, slot)->let_go, ++g->n_let_go, memory_order_relaxed);
}

bool kv_ledger_sealed(const struct kv_ledger *g, uint32_t slot)
{
    return atomic_load_explicit(&record_of(g, slot)->sealed, memory_order_acquire) == 1;
}

int kv_ledger_read(const struct kv_ledger *g, uint32_t slot, struct kv_ledger_block *ret_block)
{
    const struct record *r = record_of(g, slot);
    uint32_t n = g->block_pages;

    if (!kv_ledger_sealed(g, slot) || r->check != sum_record(g, r) || r->has_parent > 1) {
        return BT_E_CORRUPT;
    }
    for (uint32_t i = 0; i < n; i++) {
        uint32_t page = r->pages[i];

        if (page >= g->layout.n_pages || kv_ledger_generation(g, page) != r->pages[n + i] ||
            atomic_load_explicit(&g->pages[page].state, memory_order_relaxed) != PAGE_SEALED) {
            return BT_E_CORRUPT;
        }
    }
    *ret_block = (struct kv_ledger_block){
        .key = r->key,
        .root = r->root,
        .parent = r->parent,
        .has_parent = r->has_parent,
        .ids = (const int32_t *)(r->pages + 2 * (size_t)n),
        .pages = r->pages,
        .seal = r->seal,
        .let_go = atomic_load_explicit(&r->let_go, memory_order_relaxed),
    };
    return BT_OK;
}

bool kv_ledger_check_bytes(const struct kv_ledger *g, uint32_t slot)
{
    const struct record *r = record_of(g, slot);

    return r->sum == sum_bytes(g, r->pages);
}
