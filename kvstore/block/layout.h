/* Geometry of a paged KV pool: one layer group, unsharded.
 *
 * The pool is layer-major: layer l of page p starts at l * layer_stride + p * page_stride and holds
 *     K [n_kv_heads][page_tokens][head_dim], then V [n_kv_heads][page_tokens][head_dim]
 * so that K and V of one page and layer lie side by side, and neighbouring pages make one
 * contiguous piece of a layer: the piece that a handoff moves (ARCHITECTURE.md, handoff).
 */
#ifndef KV_BLOCK_LAYOUT_H
#define KV_BLOCK_LAYOUT_H

#include "common/base/rc.h"

/* BF16: device back ends alone. */
enum kv_dtype { KV_DTYPE_F16, KV_DTYPE_F32, KV_DTYPE_BF16 };

struct kv_layout {
    int n_layers;
    int n_kv_heads;  /* Hkv */
    int head_dim;    /* D */
    int page_tokens; /* tokens a page holds; 8..256, power of two */
    enum kv_dtype dtype;
    uint32_t n_pages;
    size_t page_stride;  /* bytes of one page in one layer: 2 * Hkv * page_tokens * D * element */
    size_t layer_stride; /* page_stride * n_pages */
    size_t bytes;        /* layer_stride * n_layers */
};

/* Fills the derived fields from the given ones. BT_E_INVALID names the field that is out of range
 * or the product that overflows. */
int kv_layout_init(struct kv_layout *l, struct bt_err *err) BT_MUST_USE;

static inline size_t kv_layout_offset(const struct kv_layout *l, int layer, uint32_t page)
{
    return (size_t)layer * l->layer_stride + (size_t)page * l->page_stride;
}

static inline uint32_t kv_layout_pages_for(const struct kv_layout *l, size_t tokens)
{
    return (uint32_t)((tokens + (size_t)l->page_tokens - 1) / (size_t)l->page_tokens);
}

/* KV-format digest: everything that must be equal for two nodes to exchange blocks, and nothing
 * that may differ (page size, number of pages). */
void kv_layout_digest(const struct kv_layout *l, uint8_t ret_digest[32]);

#endif
