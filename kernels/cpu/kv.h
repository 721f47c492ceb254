/* Where a position's K and V lie in a paged pool. */
#ifndef KN_CPU_KV_H
#define KN_CPU_KV_H

#include "kvstore/block/layout.h"

struct kn_kv_at {
    void *k; /* [D] */
    void *v; /* [D] */
};

static inline size_t kn_kv_elem_bytes(const struct kv_layout *l)
{
    return l->dtype == KV_DTYPE_F16 ? 2 : 4;
}

static inline struct kn_kv_at
kn_kv_at(void *kv, const struct kv_layout *l, int layer, const uint32_t *pages, int pos, int head)
{
    size_t row = (size_t)l->head_dim * kn_kv_elem_bytes(l), pt = (size_t)l->page_tokens;
    uint32_t page = pages[(size_t)pos / pt];
    char *k = (char *)kv + kv_layout_offset(l, layer, page) +
              ((size_t)head * pt + (size_t)pos % pt) * row;

    return (struct kn_kv_at){k, k + l->page_stride / 2};
}

#endif
