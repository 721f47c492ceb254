/* How attention is cut into items for the team.
 *
 * An item is up to `item_rows` neighbouring (query, head) rows of one sequence that share a key
 * head, query-major: they read the same K and V. Order: sequence by sequence, then chunks from the
 * last (it sees most, so it takes longest) to the first, then key heads. */
#ifndef KN_CPU_VEC_ATTN_ITEM_H
#define KN_CPU_VEC_ATTN_ITEM_H

#include "kernels/core/ops.h"
#include "kernels/cpu/vec/v16.h"

struct kn_attn_item {
    const struct kn_attention_args *a;
    const struct kn_seq_rows *seq;
    int kv_head;
    int group; /* query heads a key head */
    int row0;  /* first row of the item */
    int n_rows;
};

KN_INLINE int kn_attn_chunks(const struct kn_attention_args *a, int item_rows, int seq)
{
    int group = a->n_heads / a->layout->n_kv_heads;

    return (int)BT_DIV_UP((int64_t)a->seqs[seq].n_rows * group, item_rows);
}

KN_INLINE int kn_attn_n_items(const struct kn_attention_args *a, int item_rows)
{
    int n = 0;

    for (int i = 0; i < a->n_seqs; i++) {
        n += kn_attn_chunks(a, item_rows, i) * a->layout->n_kv_heads;
    }
    return n;
}

/* Item number `item` of kn_attn_n_items. */
KN_INLINE struct kn_attn_item
kn_attn_item_at(const struct kn_attention_args *a, int item_rows, int item)
{
    int heads = a->layout->n_kv_heads, group = a->n_heads / heads, seq = 0, n_chunks, row0;

    while (item >= (n_chunks = kn_attn_chunks(a, item_rows, seq)) * heads) {
        item -= n_chunks * heads;
        seq++;
    }
    row0 = (n_chunks - 1 - item / heads) * item_rows;
    return (struct kn_attn_item){
        .a = a,
        .seq = &a->seqs[seq],
        .kv_head = item % heads,
        .group = group,
        .row0 = row0,
        .n_rows = BT_MIN(a->seqs[seq].n_rows * group - row0, item_rows),
    };
}

/* Absolute position of the item's row r: it sees [0, this]. */
KN_INLINE int kn_attn_row_pos(const struct kn_attn_item *it, int r)
{
    return it->seq->pos + (it->row0 + r) / it->group;
}

/* Where row r lies in a [T, H, D] array. */
KN_INLINE size_t kn_attn_row_offset(const struct kn_attn_item *it, int r, size_t stride)
{
    size_t t = (size_t)(it->seq->row0 + (it->row0 + r) / it->group);
    size_t h = (size_t)(it->kv_head * it->group + (it->row0 + r) % it->group);

    return t * stride + h * (size_t)it->a->layout->head_dim;
}

#endif
