/* Blobs: geometry, copies between pages and blob form, the written head. */
#include "kvstore/tier/blob.h"

#include <xxhash.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

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

/* Copies past the caches: neither side of such a copy is used again soon, and a store that need not
 * read its line first saves a third of the traffic. */
static void copy_past(void *dst, const void *src, size_t n)
{
#ifdef __SSE2__
    if ((uintptr_t)dst % 16 == 0 && n % 64 == 0 && n >= 256) {
        __m128i *to = dst;
        const __m128i *from = src;

        for (size_t i = 0; i < n / 16; i += 4) {
            __m128i a = _mm_loadu_si128(from + i), b = _mm_loadu_si128(from + i + 1);
            __m128i c = _mm_loadu_si128(from + i + 2), d = _mm_loadu_si128(from + i + 3);

            _mm_stream_si128(to + i, a);
            _mm_stream_si128(to + i + 1, b);
            _mm_stream_si128(to + i + 2, c);
            _mm_stream_si128(to + i + 3, d);
        }
        return;
    }
#endif
    memcpy(dst, src, n);
}

/* Before others may read what was copied. */
static void copy_done(void)
{
#ifdef __SSE2__
    _mm_sfence();
#endif
}

/* Row by row in the order of the blob; with st, the sum of all is taken on the way. */
static void gather(const struct kv_pool *pool,
                   const uint32_t *pages,
                   int layer,
                   const struct geometry *g,
                   char *to,
                   XXH3_state_t *st)
{
    static const char zeros[4096];

    for (uint32_t r = 0; r < g->n_rows; r++) {
        for (uint32_t p = 0; p < g->n_pages; p++, to += g->page_row) {
            const char *from = NULL;

            if (pages[p] != KV_PAGE_NONE) {
                from = (const char *)kv_pool_page(pool, layer, pages[p]) + r * g->page_row;
            }
            if (from && st) {
                XXH3_64bits_update(st, from, g->page_row);
            }
            if (from) {
                copy_past(to, from, g->page_row);
                continue;
            }
            memset(to, 0, g->page_row);
            for (size_t n = 0; st && n < g->page_row; n += sizeof(zeros)) {
                XXH3_64bits_update(st, zeros, BT_MIN(sizeof(zeros), g->page_row - n));
            }
        }
    }
    copy_done();
}

void kv_blob_gather(
    const struct kv_pool *pool, const uint32_t *pages, uint32_t block_tokens, int layer, void *dst)
{
    struct geometry g = geometry_of(kv_pool_layout(pool), block_tokens);

    gather(pool, pages, layer, &g, dst, NULL);
}

uint64_t kv_blob_gather_sum(
    const struct kv_pool *pool, const uint32_t *pages, uint32_t block_tokens, int layer, void *dst)
{
    struct geometry g = geometry_of(kv_pool_layout(pool), block_tokens);
    XXH3_state_t *st = XXH3_createState();
    uint64_t sum;

    if (!st) {
        gather(pool, pages, layer, &g, dst, NULL);
        return kv_blob_sum(dst, g.n_rows * g.blob_row);
    }
    XXH3_64bits_reset(st);
    gather(pool, pages, layer, &g, dst, st);
    sum = XXH3_64bits_digest(st);
    XXH3_freeState(st);
    return sum;
}

void kv_blob_scatter(const struct kv_pool *pool,
                     const uint32_t *pages,
                     uint32_t block_tokens,
                     int layer,
                     const void *src)
{
    struct geometry g = geometry_of(kv_pool_layout(pool), block_tokens);
    const char *from = src;

    for (uint32_t r = 0; r < g.n_rows; r++) {
        for (uint32_t p = 0; p < g.n_pages; p++, from += g.page_row) {
            if (pages[p] != KV_PAGE_NONE) {
                copy_past((char *)kv_pool_page(pool, layer, pages[p]) + r * g.page_row, from,
                          g.page_row);
            }
        }
    }
    copy_done();
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
