/* Blobs: geometry, copies between pages and blob form, the written head. */
#include "kvstore/tier/blob.h"

#include <xxhash.h>

#define MAGIC "BTKVBLB1"

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "numbers are written as they stand");

/* ---- geometry ---- */

static size_t element_bytes(const struct kv_layout *l)
{
    return l->dtype == KV_DTYPE_F16 ? 2 : 4;
}

struct kv_blob_shape kv_blob_shape_of(const struct kv_layout *l, uint32_t block_tokens)
{
    return (struct kv_blob_shape){
        .n_layers = (uint32_t)l->n_layers,
        .block_tokens = block_tokens,
        .layer_bytes = l->page_stride / (size_t)l->page_tokens * block_tokens,
    };
}

/* Where a block's pieces lie in pages and in the blob: K then V, in each the heads. */
struct geometry {
    uint32_t n_pages, n_rows; /* rows: heads of K, then heads of V */
    size_t page_row, blob_row;
};

static struct geometry geometry_of(const struct kv_layout *l, uint32_t block_tokens)
{
    size_t token = (size_t)l->head_dim * element_bytes(l);

    return (struct geometry){
        .n_pages = block_tokens / (uint32_t)l->page_tokens,
        .n_rows = 2 * (uint32_t)l->n_kv_heads,
        .page_row = token * (size_t)l->page_tokens,
        .blob_row = token * block_tokens,
    };
}

void kv_blob_gather(
    const struct kv_pool *pool, const uint32_t *pages, uint32_t block_tokens, int layer, void *dst)
{
    struct geometry g = geometry_of(kv_pool_layout(pool), block_tokens);

    for (uint32_t p = 0; p < g.n_pages; p++) {
        char *to = (char *)dst + p * g.page_row;
        const char *from = NULL;

        if (pages[p] != KV_PAGE_NONE) {
            from = kv_pool_page(pool, layer, pages[p]);
        }
        for (uint32_t r = 0; r < g.n_rows; r++, to += g.blob_row) {
            if (from) {
                memcpy(to, from + r * g.page_row, g.page_row);
            } else {
                memset(to, 0, g.page_row);
            }
        }
    }
}

void kv_blob_scatter(const struct kv_pool *pool,
                     const uint32_t *pages,
                     uint32_t block_tokens,
                     int layer,
                     const void *src)
{
    struct geometry g = geometry_of(kv_pool_layout(pool), block_tokens);

    for (uint32_t p = 0; p < g.n_pages; p++) {
        const char *from = (const char *)src + p * g.page_row;
        char *to;

        if (pages[p] == KV_PAGE_NONE) {
            continue;
        }
        to = kv_pool_page(pool, layer, pages[p]);
        for (uint32_t r = 0; r < g.n_rows; r++, from += g.blob_row) {
            memcpy(to + r * g.page_row, from, g.page_row);
        }
    }
}

uint64_t kv_blob_prefix(uint64_t before, const int32_t *ids, uint32_t n)
{
    return XXH3_64bits_withSeed(ids, n * sizeof(*ids), before);
}

uint64_t kv_blob_sum(const void *p, size_t n)
{
    return XXH3_64bits(p, n);
}

bool kv_blob_shape_ok(const struct kv_blob_shape *s)
{
    return s->n_layers >= 1 && s->n_layers <= KV_BLOB_MAX_LAYERS && s->block_tokens >= 1 &&
           s->block_tokens <= KV_BLOB_MAX_TOKENS && s->layer_bytes >= 1 &&
           s->layer_bytes <= KV_BLOB_MAX_LAYER_BYTES;
}

/* ---- the written head ---- */

size_t kv_blob_head_bytes(const struct kv_blob_meta *m)
{
    return KV_BLOB_HEAD_FIXED + sizeof(*m->ids) * m->n_tokens +
           sizeof(*m->sums) * m->shape.n_layers + sizeof(uint64_t);
}

static void put(uint8_t **at, const void *p, size_t n)
{
    memcpy(*at, p, n);
    *at += n;
}

static void get(const uint8_t **at, void *p, size_t n)
{
    memcpy(p, *at, n);
    *at += n;
}

void kv_blob_encode(const struct kv_blob_meta *m, void *to)
{
    uint32_t head = (uint32_t)kv_blob_head_bytes(m);
    uint64_t layer_bytes = m->shape.layer_bytes, zero = 0, sum;
    uint8_t *at = to;

    put(&at, MAGIC, 8);
    put(&at, &head, 4);
    put(&at, &m->shape.n_layers, 4);
    put(&at, &m->shape.block_tokens, 4);
    put(&at, &m->n_tokens, 4);
    put(&at, &layer_bytes, 8);
    put(&at, &m->generation, 8);
    put(&at, &m->prefix, 8);
    put(&at, &m->key, 16);
    put(&at, &m->parent, 16);
    put(&at, &m->root, 16);
    put(&at, &zero, 8);
    put(&at, m->ids, sizeof(*m->ids) * m->n_tokens);
    put(&at, m->sums, sizeof(*m->sums) * m->shape.n_layers);
    sum = kv_blob_sum(to, (size_t)(at - (uint8_t *)to));
    put(&at, &sum, 8);
}

int kv_blob_decode(const void *p,
                   size_t n,
                   const struct kv_blob_room *room,
                   struct kv_blob_meta *ret_m,
                   size_t *ret_bytes)
{
    const uint8_t *at = p;
    struct kv_blob_meta m = {0};
    uint64_t layer_bytes, zero, sum;
    uint32_t head;

    if (n < KV_BLOB_HEAD_FIXED || memcmp(at, MAGIC, 8) != 0) {
        return BT_E_FORMAT;
    }
    at += 8;
    get(&at, &head, 4);
    get(&at, &m.shape.n_layers, 4);
    get(&at, &m.shape.block_tokens, 4);
    get(&at, &m.n_tokens, 4);
    get(&at, &layer_bytes, 8);
    get(&at, &m.generation, 8);
    get(&at, &m.prefix, 8);
    get(&at, &m.key, 16);
    get(&at, &m.parent, 16);
    get(&at, &m.root, 16);
    get(&at, &zero, 8);
    m.shape.layer_bytes = layer_bytes;
    if (!kv_blob_shape_ok(&m.shape) || m.n_tokens == 0 || m.n_tokens > m.shape.block_tokens ||
        zero != 0 || head != kv_blob_head_bytes(&m) || n < head || m.n_tokens > room->n_ids ||
        m.shape.n_layers > room->n_sums) {
        return BT_E_FORMAT;
    }
    memcpy(&sum, (const uint8_t *)p + head - 8, 8);
    if (sum != kv_blob_sum(p, head - 8)) {
        return BT_E_CORRUPT;
    }
    get(&at, room->ids, sizeof(*room->ids) * m.n_tokens);
    get(&at, room->sums, sizeof(*room->sums) * m.shape.n_layers);
    m.ids = room->ids;
    m.sums = room->sums;
    *ret_m = m;
    *ret_bytes = head;
    return BT_OK;
}

/* ---- runs ---- */

struct kv_run
kv_run_of(const struct kv_chain *chain, uint32_t first, uint32_t block_tokens, uint32_t last_tokens)
{
    struct kv_run run = {
        .root = chain->root,
        .parent = first ? chain->keys[first - 1] : chain->root,
        .keys = chain->keys + first,
        .ids = chain->ids + (size_t)first * block_tokens,
        .n_blocks = chain->n_blocks - first,
        .block_tokens = block_tokens,
        .last_tokens = last_tokens,
    };

    for (uint32_t i = 0; i < first; i++) {
        run.prefix =
            kv_blob_prefix(run.prefix, chain->ids + (size_t)i * block_tokens, block_tokens);
    }
    return run;
}

void kv_run_at(const struct kv_run *run, uint32_t i, uint64_t *prefix, struct kv_blob_meta *ret_m)
{
    bool last = i + 1 == run->n_blocks;

    *ret_m = (struct kv_blob_meta){
        .key = run->keys[i],
        .parent = i ? run->keys[i - 1] : run->parent,
        .root = run->root,
        .n_tokens = last && run->last_tokens ? run->last_tokens : run->block_tokens,
        .shape.block_tokens = run->block_tokens,
        .ids = run->ids + (size_t)i * run->block_tokens,
    };
    *prefix = kv_blob_prefix(*prefix, ret_m->ids, ret_m->n_tokens);
    ret_m->prefix = *prefix;
}
