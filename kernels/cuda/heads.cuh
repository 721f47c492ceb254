// One head of a new row, by one warp: norm, rotary embedding, and where the result goes. Used by
// the projection with this folded in (stream_gemm.cu) and by the kernel for many rows (rows.cu).
#ifndef KN_CUDA_HEADS_CUH
#define KN_CUDA_HEADS_CUH

#include "kernels/cuda/common.cuh"

namespace {

// Lane l holds pairs l * E + j, j < E, of a head with D = 64 * E elements (pairs beyond D/2 are
// idle where D < 64 * E). va and vb are the elements of each pair in f32.
template <typename T, int E>
__device__ inline void finish_head(const kn_cuda_heads &h, int row, int head, float (&va)[E],
                                   float (&vb)[E], T *q_row)
{
    int lane = threadIdx.x & 31, half = h.head_dim / 2;
    bool is_q = head < h.n_heads, is_v = head >= h.n_heads + h.n_kv_heads;
    const float *w = is_q ? h.q_norm : h.k_norm;
    int pos = h.pos[row];
    T *dst;

    if (w && !is_v) {
        float sum = 0;

#pragma unroll
        for (int j = 0; j < E; j++)
            sum += va[j] * va[j] + vb[j] * vb[j];
        sum = warp_sum(sum);
        float r = rsqrtf(sum / (float)h.head_dim + h.eps);
#pragma unroll
        for (int j = 0; j < E; j++) {
            int p = lane * E + j;

            if (p < half) {
                HeadPlace at = pair_at(p, half, h.interleaved);

                va[j] *= r * w[at.a];
                vb[j] *= r * w[at.b];
            }
        }
    }
    if (!is_v) {
        const float2 *cs = (const float2 *)h.cos_sin + (size_t)pos * half;

#pragma unroll
        for (int j = 0; j < E; j++) {
            int p = lane * E + j;

            if (p < half) {
                float2 t = cs[p];
                float a = va[j], b = vb[j];

                va[j] = a * t.x - b * t.y;
                vb[j] = b * t.x + a * t.y;
            }
        }
    }
    if (is_q) {
        dst = q_row + (size_t)head * h.head_dim;
    } else {
        int kvh = head - h.n_heads - (is_v ? h.n_kv_heads : 0);

        if (h.page[row] < 0) // an empty row of a recorded step
            return;
        char *page = (char *)h.kv + (size_t)h.page[row] * h.page_stride;

        dst = (T *)(page + (is_v ? h.page_stride / 2 : 0)) +
              ((size_t)kvh * h.page_tokens + (pos & (h.page_tokens - 1))) * h.head_dim;
    }
    if (E == 2 && !h.interleaved) { // two neighbours in each half
        *(Vec2<T> *)(dst + lane * 2) = Vec2<T>{{from_f<T>(va[0]), from_f<T>(va[E - 1])}};
        *(Vec2<T> *)(dst + half + lane * 2) = Vec2<T>{{from_f<T>(vb[0]), from_f<T>(vb[E - 1])}};
        return;
    }
#pragma unroll
    for (int j = 0; j < E; j++) {
        int p = lane * E + j;

        if (p < half) {
            HeadPlace at = pair_at(p, half, h.interleaved);

            dst[at.a] = from_f<T>(va[j]);
            dst[at.b] = from_f<T>(vb[j]);
        }
    }
}

} // namespace

#endif
