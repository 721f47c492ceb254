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

/* Where a block's pieces lie in pages and in the blob: K then V, in each the heads. */
struct geometry {
    uint32_t n_pages, n_rows; /* rows: heads of K, then heads of V */
    size_t page_row, blob_row;
};

struct rows {
    const struct kv_pool *pool;
    const uint32_t *pages;
    uint32_t block_tokens;
    int layer;
    bool gathers; /* from pages into blob form, else back */
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

/* Bytes [offset, offset + n) of a layer in blob form, which come next in `c`, between their places
 * in pages and `blob`: row by row, in the order of the blob. Pages that are not there are zeros, or
 * dropped. */
static void add_rows(struct kv_copy *c, const struct rows *r, size_t offset, char *blob, size_t n)
{
    static const char zeros[4096];
    struct geometry g = geometry_of(kv_pool_layout(r->pool), r->block_tokens);

    while (n > 0) {
        size_t row = offset / g.page_row, in_row = offset % g.page_row;
        size_t k = BT_MIN(g.page_row - in_row, n);
        uint32_t page = r->pages[row % g.n_pages];
        char *at = NULL;

        if (page != KV_PAGE_NONE) {
            at = (char *)kv_pool_page(r->pool, r->layer, page) + row / g.n_pages * g.page_row +
                 in_row;
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
    struct geometry g = geometry_of(kv_pool_layout(pool), block_tokens);
    struct rows r = {pool, pages, block_tokens, layer, true};
    struct kv_copy c;

    kv_copy_begin(&c);
    add_rows(&c, &r, 0, dst, g.n_rows * g.blob_row);
    return kv_copy_end(&c);
}

void kv_blob_gather(
    const struct kv_pool *pool, const uint32_t *pages, uint32_t block_tokens, int layer, void *dst)
{
    (void)kv_blob_gather_sum(pool, pages, block_tokens, layer, dst);
}

void kv_blob_scatter_part(
    struct kv_copy *c, const struct kv_blob_place *to, int layer, size_t offset, struct bt_str part)
{
    struct rows r = {to->pool, to->pages, to->block_tokens, layer, false};

    add_rows(c, &r, offset, (char *)(uintptr_t)part.p, part.n);
    kv_copy_flush(c);
}

uint64_t kv_blob_scatter_sum(const struct kv_pool *pool,
                             const uint32_t *pages,
                             uint32_t block_tokens,
                             int layer,
                             const void *src)
{
    struct geometry g = geometry_of(kv_pool_layout(pool), block_tokens);
    struct kv_blob_place to = {pool, pages, block_tokens};
    struct kv_copy c;

    kv_copy_begin(&c);
    kv_blob_scatter_part(&c, &to, layer, 0, (struct bt_str){src, g.n_rows * g.blob_row});
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
