// One head of a new row, by one warp: norm, rotary embedding, and where the result goes. Used by
// the projection with this folded in (stream_gemm.cu) and by the kernel for many rows (rows.cu).
#ifndef KN_CUDA_HEADS_CUH
#define KN_CUDA_HEADS_CUH

#include "kernels/cuda/common.cuh"

namespace {

// A pair turned by an angle's cos and sin; the same bits wherever it is used.
__device__ inline float2 turn_pair(float a, float b, float c, float s)
{
    return make_float2(__fmaf_rn(a, c, -__fmul_rn(b, s)), __fmaf_rn(b, c, __fmul_rn(a, s)));
}

// What the heads of a row have in common: where it stands, and the turns of this lane's pairs.
template <int E> struct HeadRow {
    int pos, page;
    float2 turn[E];
};
template <int E> __device__ inline HeadRow<E> head_row(const kn_cuda_heads &h, int row, bool turned)
{
    int lane = threadIdx.x & 31, half = h.head_dim / 2;
    HeadRow<E> r = {h.pos[row], h.page[row], {}};
    const float2 *cs = (const float2 *)h.cos_sin + (size_t)r.pos * half;

#pragma unroll
    for (int j = 0; j < E; j++) {
        if (turned && lane * E + j < half)
            r.turn[j] = cs[lane * E + j];
    }
    return r;
}

// Lane l holds pairs l * E + j, j < E, of a head with D = 64 * E elements (pairs beyond D/2 are
// idle where D < 64 * E). va and vb are the elements of each pair in f32.
template <typename T, int E>
__device__ inline void finish_head(const kn_cuda_heads &h, const HeadRow<E> &r, int head,
                                   float (&va)[E], float (&vb)[E], T *q_row)
{
    int lane = threadIdx.x & 31, half = h.head_dim / 2;
    bool is_q = head < h.n_heads, is_v = head >= h.n_heads + h.n_kv_heads;
    const float *w = is_q ? h.q_norm : h.k_norm;
    int turn = 0; // of places in the page
    T *dst;

    if (w && !is_v) {
        float sum = 0;

#pragma unroll
        for (int j = 0; j < E; j++)
            sum += va[j] * va[j] + vb[j] * vb[j];
        sum = warp_sum(sum);
        float scale = rsqrtf(sum / (float)h.head_dim + h.eps);
#pragma unroll
        for (int j = 0; j < E; j++) {
            int p = lane * E + j;

            if (p < half) {
                HeadPlace at = pair_at(p, half, h.interleaved);

                va[j] *= scale * w[at.a];
                vb[j] *= scale * w[at.b];
            }
        }
    }
    if (!is_v) {
#pragma unroll
        for (int j = 0; j < E; j++) {
            int p = lane * E + j;

            if (p < half) {
                float2 x = turn_pair(va[j], vb[j], r.turn[j].x, r.turn[j].y);

                va[j] = x.x;
                vb[j] = x.y;
            }
        }
    }
    if (is_q) {
        dst = q_row + (size_t)head * h.head_dim;
    } else {
        int kvh = head - h.n_heads - (is_v ? h.n_kv_heads : 0);

        if (r.page < 0) // an empty row of a recorded step
            return;
        char *page = (char *)h.kv + (size_t)r.page * h.page_stride;

        dst = (T *)(page + (is_v ? h.page_stride / 2 : 0)) +
              ((size_t)kvh * h.page_tokens + (r.pos & (h.page_tokens - 1))) * h.head_dim;
        turn = r.pos;
    }
    if (E == 2 && !h.interleaved) { // two neighbours in each half
        *(Vec2<T> *)(dst + in_page(turn, lane * 2)) = Vec2<T>{{from_f<T>(va[0]), from_f<T>(va[E - 1])}};
        *(Vec2<T> *)(dst + in_page(turn, half + lane * 2)) = Vec2<T>{{from_f<T>(vb[0]), from_f<T>(vb[E - 1])}};
        return;
    }
#pragma unroll
    for (int j = 0; j < E; j++) {
        int p = lane * E + j;

        if (p < half) {
            HeadPlace at = pair_at(p, half, h.interleaved);

            dst[in_page(turn, at.a)] = from_f<T>(va[j]);
            dst[in_page(turn, at.b)] = from_f<T>(vb[j]);
        }
    }
}

} // namespace

#endif
