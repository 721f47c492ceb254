/* Blobs: what is known of a block outside a pool besides its bytes (source.h), and how that is
 * written on disk and on the wire.
 *
 * Head of a blob, little-endian, no gaps; H = 104 + 4 * n_tokens + 8 * n_layers + 8 bytes:
 *   offset size
 *   0      8    "BTKVBLB1"; another layout is another word, so that old readers pass it over
 *   8      4    H
 *   12     4    n_layers
 *   16     4    block_tokens
 *   20     4    n_tokens
 *   24     8    layer_bytes
 *   32     8    generation
 *   40     8    prefix
 *   48     16   key
 *   64     16   parent
 *   80     16   root
 *   96     8    0
 *   104    4n   ids, int32
 *   ..     8l   XXH3-64 of each layer's bytes
 *   H-8    8    XXH3-64 of all before
 *
 * `prefix` is a sum over the token ids from the first block to this one: it ties a blob to all that
 * stands before it even where keys collide, so that a blob stored behind another parent with an
 * equal key is not taken for the one that is asked for.
 *
 * Pure functions; any thread. */
#ifndef KV_TIER_BLOB_H
#define KV_TIER_BLOB_H

#include "kvstore/block/sum.h"
#include "kvstore/tier/source.h"

#define KV_BLOB_HEAD_FIXED      104
#define KV_BLOB_MAX_LAYERS      1024
#define KV_BLOB_MAX_TOKENS      65536        /* of a block */
#define KV_BLOB_MAX_LAYER_BYTES (1ull << 30) /* 1 GiB */
#define KV_BLOB_HEAD_MAX        (KV_BLOB_HEAD_FIXED + 4 * KV_BLOB_MAX_TOKENS + 8 * KV_BLOB_MAX_LAYERS + 8)

struct kv_blob_meta {
    struct kv_key key, parent, root; /* parent of a first block: the root */
    uint64_t prefix;                 /* kv_blob_prefix over all ids up to this block's last */
    uint64_t generation;             /* of the copy; told by who keeps it */
    uint32_t n_tokens;               /* 1..block_tokens */
    struct kv_blob_shape shape;
    const int32_t *ids;   /* [n_tokens] */
    const uint64_t *sums; /* [n_layers] */
};

/* Sum of `n` more ids behind `before` (0 for the first block). */
uint64_t kv_blob_prefix(uint64_t before, const int32_t *ids, uint32_t n);
/* XXH3-64 of a layer's bytes. */
uint64_t kv_blob_sum(const void *p, size_t n);
/* kv_blob_gather, and the sum of what it wrote. */
uint64_t kv_blob_gather_sum(
    const struct kv_pool *pool, const uint32_t *pages, uint32_t block_tokens, int layer, void *dst);
/* Where the rows of a block's layers lie in memory made of pages: row i of page p of a layer is at
 * base + layer * layer_stride + pages[p] * page_stride + i * row_bytes. A layer in blob form is row
 * 0 of all pages, row 1 of all pages, ... */
struct kv_blob_grid {
    const char *base;
    size_t layer_stride, page_stride, row_bytes;
    uint32_t n_rows, n_pages; /* rows of a page; pages of the block */
    const uint32_t *pages;
};
/* That of a block in a pool; `pages` stay the caller's. */
struct kv_blob_grid
kv_blob_grid_of(const struct kv_pool *pool, const uint32_t *pages, uint32_t block_tokens);
/* True if all of it, in n_layers of the shape, lies in `bytes` from base on: for a grid that
 * somebody else describes (base does not count). */
bool kv_blob_grid_fits(const struct kv_blob_grid *g,
                       const struct kv_blob_shape *shape,
                       uint64_t bytes);
/* As kv_blob_gather_sum. */
uint64_t kv_blob_grid_gather(const struct kv_blob_grid *g, uint32_t layer, void *dst);
/* A sum over one row of every layer, which ones follows from the key: kv_sum_seeded of the row,
 * with `sum` so far (0 at first). It tells memory that is not the one that was meant; it does not
 * replace the sums of all bytes. */
uint64_t kv_blob_sample_row(const struct kv_blob_grid *g,
                            const struct kv_key *key,
                            uint32_t layer,
                            uint64_t sum);
/* Of all layers. */
uint64_t
kv_blob_grid_sample(const struct kv_blob_grid *g, const struct kv_key *key, uint32_t n_layers);
/* Bytes [offset, offset + n) of a layer, which come next in `c`, from the pages to `dst`; done on
 * return. */
struct kv_blob_place;
void kv_blob_gather_part(struct kv_copy *c,
                         const struct kv_blob_place *from,
                         int layer,
                         size_t offset,
                         struct bt_str dst);
/* kv_blob_scatter, and the sum of what it read; each byte is read once, so that the sum is that of
 * what lies in the pages. */
uint64_t kv_blob_scatter_sum(const struct kv_pool *pool,
                             const uint32_t *pages,
                             uint32_t block_tokens,
                             int layer,
                             const void *src);
/* The same in parts, which follow each other from offset 0 on: the next one of a copy that was
 * begun for this layer. It is done on return. */
struct kv_blob_place {
    const struct kv_pool *pool;
    const uint32_t *pages; /* of one block */
    uint32_t block_tokens;
};
void kv_blob_scatter_part(struct kv_copy *c,
                          const struct kv_blob_place *to,
                          int layer,
                          size_t offset,
                          struct bt_str part);
static inline size_t kv_blob_bytes(const struct kv_blob_shape *s)
{
    return s->n_layers * s->layer_bytes;
}
static inline bool kv_blob_shape_eq(const struct kv_blob_shape *a, const struct kv_blob_shape *b)
{
    return a->n_layers == b->n_layers && a->block_tokens == b->block_tokens &&
           a->layer_bytes == b->layer_bytes;
}
/* Within the limits above, and not empty. */
bool kv_blob_shape_ok(const struct kv_blob_shape *s);

/* H for a meta whose shape and n_tokens are within the limits. */
size_t kv_blob_head_bytes(const struct kv_blob_meta *m);
/* Writes H bytes to `to`. */
void kv_blob_encode(const struct kv_blob_meta *m, void *to);
/* Reads a head that anybody may have written. ret_ids [KV_BLOB_MAX_TOKENS at most: n_ids],
 * ret_sums [n_sums] take ids and sums and are pointed to by *ret_m. BT_E_FORMAT: not a head, or one
 * of another layout, cut off, out of limits, or larger than the arrays; BT_E_CORRUPT: its sum is
 * wrong. *ret_bytes = H. */
struct kv_blob_room {
    int32_t *ids;
    uint32_t n_ids;
    uint64_t *sums;
    uint32_t n_sums;
};
int kv_blob_decode(const void *p,
                   size_t n,
                   const struct kv_blob_room *room,
                   struct kv_blob_meta *ret_m,
                   size_t *ret_bytes) BT_MUST_USE;

/* A run of blocks behind `parent`, as it is asked for or stored. All ranges are borrowed. */
struct kv_run {
    struct kv_key root, parent; /* parent = root: from the first block on */
    uint64_t prefix;            /* of the ids before; 0 from the first block on */
    const struct kv_key *keys;  /* [n_blocks] */
    const int32_t *ids;         /* [n_blocks * block_tokens], fewer for a short last block */
    uint32_t n_blocks, block_tokens;
    uint32_t last_tokens; /* of the last block; 0 = block_tokens */
};
/* Blocks [first, n_blocks) of a chain. */
struct kv_run kv_run_of(const struct kv_chain *chain,
                        uint32_t first,
                        uint32_t block_tokens,
                        uint32_t last_tokens);
/* Block i of it (i counted up from 0; *prefix starts as run->prefix and is carried along). Fills
 * all but generation, shape and sums. */
void kv_run_at(const struct kv_run *run, uint32_t i, uint64_t *prefix, struct kv_blob_meta *ret_m);

#endif
