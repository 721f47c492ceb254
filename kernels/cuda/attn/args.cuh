/* What kernels of this folder are launched with, and the records of split tasks. */
#ifndef KN_CUDA_ATTN_ARGS_CUH
#define KN_CUDA_ATTN_ARGS_CUH

#include "kernels/cuda/attn/mma.cuh"
#include "kernels/cuda/attn/plan.h"

namespace attn {

struct launch {
    const void *q;
    const char *kv;
    const int32_t *row_start;
    const int32_t *ctx_len;
    const uint32_t *pages;
    const kn_attn_plan *plan;
    void *out;
    int32_t *counters; /* one a split task, all zero between launches */
    float *records;
    size_t q_stride, out_stride, page_stride;
    int pages_stride;
    int page_shift;
    int n_heads, n_kv_heads, group;
    int record_rows;
    float c; /* scale * log2(e) */
};

__device__ __forceinline__ const int32_t *plan_first(const kn_attn_plan *p)
{
    return (const int32_t *)(p + 1);
}

__device__ __forceinline__ kn_attn_item plan_item(const kn_attn_plan *p, int off, int i)
{
    const int4 *at = (const int4 *)((const char *)p + off) + 2 * i;
    int4 a = __ldg(at), b = __ldg(at + 1);

    return {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
}

__device__ __forceinline__ kn_attn_task plan_task(const kn_attn_plan *p, int i)
{
    int4 a = __ldg((const int4 *)((const char *)p + p->off_tasks) + i);

    return {a.x, a.y, a.z, a.w};
}

/* A record: sums, then maxima, weights and the first unit. */
template <int D> struct record {
    float *at;
    int rows;

    __device__ __forceinline__ record(const launch &p, int slot)
        : at(p.records + (size_t)slot * kn_attn_record_floats(p.record_rows, D)),
          rows(p.record_rows)
    {
    }
    __device__ __forceinline__ float *sums(int row)
    {
        return at + row * D;
    }
    __device__ __forceinline__ float *max_of(int row)
    {
        return at + rows * D + row;
    }
    __device__ __forceinline__ float *weight_of(int row)
    {
        return at + rows * (D + 1) + row;
    }
    __device__ __forceinline__ int32_t *unit()
    {
        return (int32_t *)(at + rows * (D + 2));
    }
};

/* Four columns of one row, as joined in one order from the records of a task. */
struct quad_sums {
    float4 v;
    float m, l;

    __device__ __forceinline__ void clear()
    {
        v = make_float4(0, 0, 0, 0);
        m = -INFINITY;
        l = 0;
    }
    __device__ __forceinline__ void add(const quad_sums &s, float c)
    {
        factors f = merge(m, s.m, c);

        v.x = joined(f, v.x, s.v.x);
        v.y = joined(f, v.y, s.v.y);
        v.z = joined(f, v.z, s.v.z);
        v.w = joined(f, v.w, s.v.w);
        l = joined(f, l, s.l);
    }
};

/* Whether this block is the last of its task, after its records are written. The block's first N
 * threads call it; `flag` is shared memory. */
template <int N>
__device__ __forceinline__ bool
is_last(const launch &p, const kn_attn_item &it, const kn_attn_task &task, int *flag)
{
    named_sync<N>(1);
    if (threadIdx.x == 0) {
        int n;

        /* What the block wrote is before this, what the last one reads is after it. */
        asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;"
                     : "=r"(n)
                     : "l"(p.counters + it.task)
                     : "memory");
        *flag = n == task.n_items - 1;
        if (*flag) {
            p.counters[it.task] = 0;
        }
    }
    named_sync<N>(1);
    return *flag != 0;
}

/* The first N threads of the last block: joins the records of a task and writes its rows. */
template <typename T, int D, int N>
__device__ __forceinline__ void
combine(const launch &p, const kn_attn_item &it, const kn_attn_task &task, int n_valid)
{
    constexpr int AHEAD = 4;
    const int row_first = p.row_start[it.seq];

    for (int e = threadIdx.x; e < n_valid * (D / 4); e += N) {
        int row = e / (D / 4), col = e % (D / 4) * 4;
        quad_sums all, part;

        all.clear();
        part.clear();
        for (int i0 = 0; i0 < task.n_slots; i0 += AHEAD) {
            quad_sums s[AHEAD];
            int unit[AHEAD];

#pragma unroll
            for (int i = 0; i < AHEAD; i++) {
                if (i0 + i < task.n_slots) {
                    record<D> r(p, task.slot0 + i0 + i);

                    s[i].v = __ldcg((const float4 *)(r.sums(row) + col));
                    s[i].m = __ldcg(r.max_of(row));
                    s[i].l = __ldcg(r.weight_of(row));
                    unit[i] = __ldcg(r.unit());
                }
            }
#pragma unroll
            for (int i = 0; i < AHEAD; i++) {
                if (i0 + i < task.n_slots) {
                    if (unit[i] % KN_ATTN_GROUP == 0) {
                        all.add(part, p.c);
                        part.clear();
                    }
                    part.add(s[i], p.c);
                }
            }
        }
        all.add(part, p.c);

        int packed = it.row0 + row;
        float inv = final_scale(all.l);
        T *out = (T *)p.out + (size_t)(row_first + packed / p.group) * p.out_stride +
                 (size_t)(it.kv_head * p.group + packed % p.group) * D + col;
        uint2 v = {num<T>::pack(finished(all.v.x, inv), finished(all.v.y, inv)),
                   num<T>::pack(finished(all.v.z, inv), finished(all.v.w, inv))};

        *(uint2 *)out = v;
    }
}

} // namespace attn

#endif
