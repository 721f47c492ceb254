/* How the work of a step is cut into pieces: the bytes that plan.c writes and the kernels read.
 *
 * Positions are cut into units of KN_ATTN_UNIT, and KN_ATTN_GROUP units make a group, both at
 * absolute positions. A task is one block of packed rows (row i of a sequence and KV head is token
 * i / G, query head i % G, G = H / Hkv) over all units that its rows see. An item is a run of units
 * of one task; a multiprocessor's block works through a run of items.
 *
 * Order of sums of one output element, the same however tasks are cut into items (mma.cuh says
 * what happens inside a unit): units of a group in ascending order, one after the other onto an
 * empty sum; then groups in ascending order likewise. An item that is the whole of its task does
 * this in registers. Otherwise it leaves records, from which the block that finishes last goes on
 * in the same order: a run of units that starts at the start of a group makes one record; units
 * before the first start of a group make one each.
 */
#ifndef KN_CUDA_ATTN_PLAN_H
#define KN_CUDA_ATTN_PLAN_H

#include "kernels/cuda/attn/attn.h"

#ifdef __cplusplus
extern "C" {
#endif

#define KN_ATTN_UNIT  128
#define KN_ATTN_GROUP 8

struct kn_attn_item {
    int32_t seq;
    int32_t kv_head;
    int32_t row0;         /* first packed row */
    int32_t unit0, unit1; /* [unit0, unit1) */
    int32_t slot;         /* first of its records; -1 = the whole task, no records */
    int32_t task;         /* index of the split task, if slot >= 0 */
    int32_t section;      /* prefill: those of a section come one after the other */
};

/* A task in several items. */
struct kn_attn_task {
    int32_t slot0, n_slots, n_items, pad;
};

/* Followed by first[n_blocks + 1] (block b has items first[b] .. first[b + 1] - 1), items, tasks.
 */
struct kn_attn_plan {
    int32_t n_blocks;
    int32_t n_items;
    int32_t n_tasks;   /* split ones */
    int32_t off_items; /* bytes from the start of the plan */
    int32_t off_tasks;
    int32_t pad[11];
};

/* Shape of the launch that a plan is for. */
struct kn_attn_cut {
    int n_blocks;   /* blocks at once on the card */
    int block_rows; /* packed rows of a block */
};
#define KN_ATTN_DECODE_ROWS  16
#define KN_ATTN_PREFILL_ROWS 128

/* Blocks of decode on a multiprocessor, and stages of the ring of each (K or V of a unit): 128 KiB
 * under way in both cases. Memory is fastest with few long runs asked for at a time, and one block
 * computes fast enough where a unit is 64 KiB. */
KN_ATTN_BOTH int kn_attn_decode_blocks(int head_dim)
{
    return head_dim == 128 ? 1 : 2;
}
#define KN_ATTN_DECODE_STAGES 4

struct kn_attn_cut kn_attn_cut_decode(const struct kn_cuda_attn_shape *s);
struct kn_attn_cut kn_attn_cut_prefill(const struct kn_cuda_attn_shape *s);

/* Rows in a record, floats in a record: sums [rows][D], maxima [rows], weights [rows], unit. */
KN_ATTN_BOTH int kn_attn_record_rows(int block_rows, int group)
{
    return group < block_rows && block_rows == 16 ? group : block_rows;
}

KN_ATTN_BOTH size_t kn_attn_record_floats(int record_rows, int head_dim)
{
    return ((size_t)record_rows * (size_t)(head_dim + 2) + 4 + 3) / 4 * 4;
}

/* Records that the workspace has room for. */
size_t kn_attn_slots(const struct kn_cuda_attn_shape *s, bool decode);

/* Counters at the start of the workspace: one a split task. */
#define KN_ATTN_COUNTERS      2048
#define KN_ATTN_COUNTER_BYTES (KN_ATTN_COUNTERS * 4)

#ifdef __cplusplus
}
#endif

#endif
