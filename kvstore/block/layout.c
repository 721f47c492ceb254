/* Geometry of a paged pool: derived sizes with every product checked, and the digest of what two
 * nodes must share. */
#include "kvstore/block/layout.h"

#include <openssl/sha.h>

#define MAX_LAYERS   4096
#define MAX_HEADS    4096
#define MAX_HEAD_DIM 4096

static size_t elem_bytes(enum kv_dtype t)
{
    return t == KV_DTYPE_F32 ? 4 : 2;
}

static int check(const struct kv_layout *l, struct bt_err *err)
{
    const struct {
        const char *name;
        int value, max;
    } ranges[] = {
        {"n_layers", l->n_layers, MAX_LAYERS},
        {"n_kv_heads", l->n_kv_heads, MAX_HEADS},
        {"head_dim", l->head_dim, MAX_HEAD_DIM},
    };

    for (size_t i = 0; i < BT_ARRAY_LEN(ranges); i++) {
        if (ranges[i].value < 1 || ranges[i].value > ranges[i].max) {
            return BT_FAIL(err, BT_E_INVALID, "KV layout: %s is %d, must be 1..%d", ranges[i].name,
                           ranges[i].value, ranges[i].max);
        }
    }
    if (l->page_tokens < 8 || l->page_tokens > 256 || (l->page_tokens & (l->page_tokens - 1))) {
        return BT_FAIL(err, BT_E_INVALID,
                       "KV layout: page_tokens is %d, must be a power of two, 8..256",
                       l->page_tokens);
    }
    if (l->dtype != KV_DTYPE_F16 && l->dtype != KV_DTYPE_F32 && l->dtype != KV_DTYPE_BF16) {
        return BT_FAIL(err, BT_E_INVALID, "KV layout: dtype %d is unknown", (int)l->dtype);
    }
    if (l->n_pages < 1 || l->n_pages == UINT32_MAX) { /* the last value means "no page" */
        return BT_FAIL(err, BT_E_INVALID, "KV layout: n_pages is %u, must be 1..%u", l->n_pages,
                       UINT32_MAX - 1);
    }
    return BT_OK;
}

int kv_layout_init(struct kv_layout *l, struct bt_err *err)
{
    int rc = check(l, err);
    size_t page, layer, all;

    if (rc < 0) {
        return rc;
    }
    /* 2 * 2^12 * 2^8 * 2^12 * 4 fits with ease. */
    page = 2 * (size_t)l->n_kv_heads * (size_t)l->page_tokens * (size_t)l->head_dim *
           elem_bytes(l->dtype);
    if (!bt_mul_size(page, l->n_pages, &layer) || !bt_mul_size(layer, (size_t)l->n_layers, &all) ||
        all > SIZE_MAX / 2) {
        return BT_FAIL(err, BT_E_INVALID, "KV layout: %u pages of %zu bytes in %d layers overflow",
                       l->n_pages, page, l->n_layers);
    }
    l->page_stride = page;
    l->layer_stride = layer;
    l->bytes = all;
    return BT_OK;
}

/* Digest input, all integers little-endian 32 bit:
 *   "baton-kv-format" 0x00, version 1, then pairs of (tag, value):
 *   1 n_layers, 2 n_kv_heads, 3 head_dim, 4 dtype (0 f16, 1 f32), 5 order (0 = head, token, dim) */
void kv_layout_digest(const struct kv_layout *l, uint8_t ret_digest[32])
{
    static const char magic[16] = "baton-kv-format";
    const uint32_t words[] = {
        1,
        1,
        (uint32_t)l->n_layers,
        2,
        (uint32_t)l->n_kv_heads,
        3,
        (uint32_t)l->head_dim,
        4,
        (uint32_t)l->dtype,
        5,
        0,
    };
    uint8_t bytes[sizeof(magic) + sizeof(words)];
    size_t n = sizeof(magic);

    memcpy(bytes, magic, sizeof(magic));
    for (size_t i = 0; i < BT_ARRAY_LEN(words); i++) {
        for (int shift = 0; shift < 32; shift += 8) {
            bytes[n++] = (uint8_t)(words[i] >> shift);
        }
    }
    SHA256(bytes, n, ret_digest);
}
