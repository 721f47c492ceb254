/* Blobs: geometry, copies between pages and blob form, the written head. */
#include "kvstore/tier/blob.h"

#define MAGIC "BTKVBLB1"

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "numbers are written as they stand");

/* ---- geometry ---- */

static size_t element_bytes(const struct kv_layout *l)
{
    return l->dtype == KV_DTYPE_F32 ? 4 : 2;
}

struct kv_blob_shape kv_blob_shape_of(const struct kv_layout *l, uint32_t block_tokens)
{
    return (struct kv_blob_shape){
        .n_layers = (uint32_t)l->n_layers,
        .block_tokens = block_tokens,
        .layer_bytes = l->page_stride / (size_t)l->page_tokens * block_tokens,
    };
}

/* Rows: heads of K, then heads of V. */
struct kv_blob_grid
kv_blob_grid_of(const struct kv_pool *pool, const uint32_t *pages, uint32_t block_tokens)
{
    const struct kv_layout *l = kv_pool_layout(pool);

    return (struct kv_blob_grid){
        .base = kv_pool_region(pool)->base,
        .layer_stride = l->layer_stride,
        .page_stride = l->page_stride,
        .row_bytes = (size_t)l->head_dim * element_bytes(l) * (size_t)l->page_tokens,
        .n_rows = 2 * (uint32_t)l->n_kv_heads,
        .n_pages = block_tokens / (uint32_t)l->page_tokens,
        .pages = pages,
    };
}

bool kv_blob_grid_fits(const struct kv_blob_grid *g,
                       const struct kv_blob_shape *shape,
                       uint64_t bytes)
{
    if (g->row_bytes == 0 || g->n_pages == 0 || g->n_rows == 0 ||
        g->row_bytes > shape->layer_bytes / g->n_pages / g->n_rows ||
        g->row_bytes * g->n_pages * g->n_rows != shape->layer_bytes ||
        g->n_rows * g->row_bytes > g->page_stride || g->page_stride > g->layer_stride ||
        g->layer_stride > bytes / shape->n_layers) {
        return false;
    }
    for (uint32_t i = 0; i < g->n_pages; i++) {
        if (g->pages[i] >= g->layer_stride / g->page_stride) {
            return false;
        }
    }
    return true;
}

static size_t layer_bytes_of(const struct kv_blob_grid *g)
{
    return g->row_bytes * g->n_rows * g->n_pages;
}

struct rows {
    struct kv_blob_grid grid;
    size_t layer;
    bool gathers; /* from pages into blob form, else back */
};

/* Bytes [offset, offset + n) of a layer in blob form, which come next in `c`, between their places
 * in pages and `blob`: row by row, in the order of the blob. Pages that are not there are zeros, or
 * dropped. */
static void add_rows(struct kv_copy *c, const struct rows *r, size_t offset, char *blob, size_t n)
{
    static const char zeros[4096];
    const struct kv_blob_grid *g = &r->grid;

    while (n > 0) {
        size_t row = offset / g->row_bytes, in_row = offset % g->row_bytes;
        size_t k = BT_MIN(g->row_bytes - in_row, n);
        uint32_t page = g->pages[row % g->n_pages];
        char *at = NULL;

        if (page != KV_PAGE_NONE) {
            at = (char *)(uintptr_t)g->base + r->layer * g->layer_stride + page * g->page_stride +
                 row / g->n_pages * g->row_bytes + in_row;
        } else if (r->gathers) {
            k = BT_MIN(k, sizeof(zeros));
        }
        if (r->gathers) {
            kv_copy_add(c, blob, at ? at : zeros, k);
        } else {
            kv_copy_add(c, at, blob, k);
        }
        offset += k;
        blob += k;
        n -= k;
    }
}

uint64_t kv_blob_gather_sum(
    const struct kv_pool *pool, const uint32_t *pages, uint32_t block_tokens, int layer, void *dst)
{
    struct kv_blob_grid g = kv_blob_grid_of(pool, pages, block_tokens);

    return kv_blob_grid_gather(&g, (uint32_t)layer, dst);
}

uint64_t kv_blob_grid_gather(const struct kv_blob_grid *g, uint32_t layer, void *dst)
{
    struct rows r = {*g, layer, true};
    struct kv_copy c;

    kv_copy_begin(&c);
    add_rows(&c, &r, 0, dst, layer_bytes_of(g));
    return kv_copy_end(&c);
}

uint64_t kv_blob_sample_row(const struct kv_blob_grid *g,
                            const struct kv_key *key,
                            uint32_t layer,
                            uint64_t sum)
{
    uint64_t row;
    uint32_t from;

    memcpy(&from, key->b, sizeof(from));
    /* Layers take different ones. */
    row = ((uint64_t)from + 13 * (uint64_t)layer) % ((uint64_t)g->n_rows * g->n_pages);
    return kv_sum_seeded(g->base + layer * g->layer_stride +
                             g->pages[row % g->n_pages] * g->page_stride +
                             row / g->n_pages * g->row_bytes,
                         g->row_bytes, sum);
}

uint64_t
kv_blob_grid_sample(const struct kv_blob_grid *g, const struct kv_key *key, uint32_t n_layers)
{
    uint64_t sum = 0;

    for (uint32_t l = 0; l < n_layers; l++) {
        sum = kv_blob_sample_row(g, key, l, sum);
    }
    return sum;
}

void kv_blob_gather(
    const struct kv_pool *pool, const uint32_t *pages, uint32_t block_tokens, int layer, void *dst)
{
    (void)kv_blob_gather_sum(pool, pages, block_tokens, layer, dst);
}

void kv_blob_scatter_part(
    struct kv_copy *c, const struct kv_blob_place *to, int layer, size_t offset, struct bt_str part)
{
    struct rows r = {kv_blob_grid_of(to->pool, to->pages, to->block_tokens), (size_t)layer, false};

    add_rows(c, &r, offset, (char *)(uintptr_t)part.p, part.n);
    kv_copy_flush(c);
}

void kv_blob_gather_part(struct kv_copy *c,
                         const struct kv_blob_place *from,
                         int layer,
                         size_t offset,
                         struct bt_str dst)
{
    struct rows r = {kv_blob_grid_of(from->pool, from->pages, from->block_tokens), (size_t)layer,
                     true};

    add_rows(c, &r, offset, (char *)(uintptr_t)dst.p, dst.n);
    kv_copy_flush(c);
}

uint64_t kv_blob_scatter_sum(const struct kv_pool *pool,
                             const uint32_t *pages,
                             uint32_t block_tokens,
                             int layer,
                             const void *src)
{
    struct kv_blob_grid g = kv_blob_grid_of(pool, pages, block_tokens);
    struct kv_blob_place to = {pool, pages, block_tokens};
    struct kv_copy c;

    kv_copy_begin(&c);
    kv_blob_scatter_part(&c, &to, layer, 0, (struct bt_str){src, layer_bytes_of(&g)});
    return kv_copy_end(&c);
}

void kv_blob_scatter(const struct kv_pool *pool,
                     const uint32_t *pages,
                     uint32_t block_tokens,
                     int layer,
                     const void *src)
{
    (void)kv_blob_scatter_sum(pool, pages, block_tokens, layer, src);
}

uint64_t kv_blob_prefix(uint64_t before, const int32_t *ids, uint32_t n)
{
    return kv_sum_seeded(ids, n * sizeof(*ids), before);
}

uint64_t kv_blob_sum(const void *p, size_t n)
{
    return kv_sum(p, n);
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
