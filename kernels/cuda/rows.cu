/* Kernels over rows of activations: embedding, norms, heads, SwiGLU, gather, batch descriptor.
 *
 * All are bound by memory: 16-byte accesses, one pass, sums in f32. One block or warp sees one row,
 * so a row's result never depends on the others. */
#include "kernels/cuda/heads.cuh"

namespace {

constexpr int NORM_THREADS = 256, NORM_BLOCKS = 132 * 6;

template <typename T>
__global__ void __launch_bounds__(128) embed_kernel(kn_cuda_embed_args a)
{
    let_next();
    wait_before();
    int row = blockIdx.x, id = a.ids[row];

    if (id < 0)
        id = max(a.prev[-1 - id], 0); // none was drawn: the host throws this row away
    const Vec8<T> *from = (const Vec8<T> *)((const T *)a.table + (size_t)id * a.width);
    Vec8<T> *to = (Vec8<T> *)((T *)a.out + (size_t)row * a.width);
    for (int i = threadIdx.x; i < a.width / 8; i += blockDim.x)
        to[i] = from[i];
}

// Up to NV vectors of 8 elements of a row in a thread; a block takes every gridDim.x-th row, asks for the
// next one before it is done with the one at hand, and keeps its share of the weights.
template <typename T, int NV>
__global__ void __launch_bounds__(NORM_THREADS) norm_kernel(kn_cuda_norm_args a)
{
    __shared__ float sums[2][NORM_THREADS / 32];
    const Vec8<T> *x = (const Vec8<T> *)a.x;
    Vec8<T> *out = (Vec8<T> *)a.out;
    int n = a.width / 8;
    Vec8<T> v[NV];
    float4 w[NV][2];

    let_next();
#pragma unroll
    for (int j = 0; j < NV; j++) {
        int i = threadIdx.x + j * NORM_THREADS;

        if (i < n) {
            w[j][0] = ((const float4 *)a.weight)[i * 2];
            w[j][1] = ((const float4 *)a.weight)[i * 2 + 1];
        }
    }
    wait_before();
#pragma unroll
    for (int j = 0; j < NV; j++) {
        int i = threadIdx.x + j * NORM_THREADS;

        if (i < n)
            v[j] = x[(size_t)blockIdx.x * n + i];
    }
    for (int row = blockIdx.x, turn = 0; row < a.rows; row += gridDim.x, turn ^= 1) {
        Vec8<T> next[NV];
        float sum = 0;

#pragma unroll
        for (int j = 0; j < NV; j++) {
            int i = threadIdx.x + j * NORM_THREADS;

            if (i < n && row + (int)gridDim.x < a.rows)
                next[j] = x[(size_t)(row + gridDim.x) * n + i];
        }
#pragma unroll
        for (int j = 0; j < NV; j++) {
            if (threadIdx.x + j * NORM_THREADS < n) {
#pragma unroll
                for (int e = 0; e < 8; e++) {
                    float f = to_f(v[j].v[e]);

                    sum += f * f;
                }
            }
        }
        sum = warp_sum(sum);
        if ((threadIdx.x & 31) == 0)
            sums[turn][threadIdx.x / 32] = sum;
        __syncthreads();
        sum = 0;
#pragma unroll
        for (int i = 0; i < NORM_THREADS / 32; i++)
            sum += sums[turn][i];
        float r = rsqrtf(sum / (float)a.width + a.eps);
#pragma unroll
        for (int j = 0; j < NV; j++) {
            int i = threadIdx.x + j * NORM_THREADS;

            if (i < n) {
                float ws[8] = {w[j][0].x, w[j][0].y, w[j][0].z, w[j][0].w,
                               w[j][1].x, w[j][1].y, w[j][1].z, w[j][1].w};
                Vec8<T> y;

#pragma unroll
                for (int e = 0; e < 8; e++)
                    y.v[e] = from_f<T>(to_f(v[j].v[e]) * r * ws[e]);
                out[(size_t)row * n + i] = y;
            }
            v[j] = next[j];
        }
    }
}

// One warp a head of a row.
template <typename T, int E>
__global__ void __launch_bounds__(256)
    qkv_kernel(T *qkv, int rows, const float *bias, kn_cuda_heads h)
{
    int heads = h.n_heads + 2 * h.n_kv_heads, half = h.head_dim / 2;
    long unit = (long)blockIdx.x * 8 + threadIdx.x / 32;
    int lane = threadIdx.x & 31;

    let_next();
    if (unit >= (long)rows * heads) {
        wait_before();
        return;
    }
    int row = (int)(unit / heads), head = (int)(unit % heads);
    // positions and pages came with the batch, before anything that this kernel waits for
    HeadRow<E> place = head_row<E>(h, row, head < h.n_heads + h.n_kv_heads);
    T *q_row = qkv + (size_t)row * heads * h.head_dim;
    const T *x = q_row + (size_t)head * h.head_dim;
    float va[E], vb[E];

    wait_before();
    if (E == 2 && !h.interleaved && h.head_dim == 128) {
        Vec2<T> a = *(const Vec2<T> *)(x + lane * 2), b = *(const Vec2<T> *)(x + half + lane * 2);

#pragma unroll
        for (int j = 0; j < E; j++) {
            va[j] = to_f(a.v[j & 1]);
            vb[j] = to_f(b.v[j & 1]);
        }
    } else {
#pragma unroll
        for (int j = 0; j < E; j++) {
            int p = lane * E + j;
            HeadPlace at = pair_at(p, half, h.interleaved);

            va[j] = p < half ? to_f(x[at.a]) : 0;
            vb[j] = p < half ? to_f(x[at.b]) : 0;
        }
    }
    if (bias) {
#pragma unroll
        for (int j = 0; j < E; j++) {
            int p = lane * E + j;
            HeadPlace at = pair_at(p, half, h.interleaved);

            if (p < half) {
                va[j] += bias[head * h.head_dim + at.a];
                vb[j] += bias[head * h.head_dim + at.b];
            }
        }
    }
    __syncwarp();
    finish_head<T, E>(h, place, head, va, vb, q_row);
}

// The same to the bit for many rows, where heads have no norms and a pair's elements lie half a head
// apart: 8 pairs a thread, HEAD_TURNS heads one after the other, all of them asked for at once.
constexpr int HEAD_TURNS = 3;

template <typename T>
__global__ void __launch_bounds__(256)
    qkv_wide_kernel(T *qkv, int rows, const float *bias, kn_cuda_heads h)
{
    int heads = h.n_heads + 2 * h.n_kv_heads, turned = h.n_heads + h.n_kv_heads, half = h.head_dim / 2;
    int lanes = half / 8, side = 32 / lanes; // of a head; heads side by side in a warp
    int per_row = (heads + side * HEAD_TURNS - 1) / (side * HEAD_TURNS);
    long unit = (long)blockIdx.x * 8 + threadIdx.x / 32;
    int row = (int)(unit / per_row), p = threadIdx.x % lanes * 8;
    int first = (int)(unit % per_row) * side * HEAD_TURNS + (threadIdx.x & 31) / lanes;

    let_next();
    if (row >= rows) {
        wait_before();
        return;
    }
    int pos = h.pos[row], page = h.page[row];
    const float4 *cs = (const float4 *)((const float2 *)h.cos_sin + (size_t)pos * half + p);
    float4 t[4] = {cs[0], cs[1], cs[2], cs[3]}; // of two pairs each
    T *q_row = qkv + (size_t)row * heads * h.head_dim;
    Vec8<T> a[HEAD_TURNS], b[HEAD_TURNS];

    wait_before();
#pragma unroll
    for (int i = 0; i < HEAD_TURNS; i++) {
        const T *x = q_row + (size_t)(first + i * side) * h.head_dim + p;

        if (first + i * side < heads) {
            a[i] = *(const Vec8<T> *)x;
            b[i] = *(const Vec8<T> *)(x + half);
        }
    }
#pragma unroll
    for (int i = 0; i < HEAD_TURNS; i++) {
        int head = first + i * side, kv = head - h.n_heads;
        T *dst = q_row + (size_t)head * h.head_dim;
        int turn = 0; // of places in the page

        if (head >= heads || (kv >= 0 && page < 0))
            continue;
        if (kv >= 0) {
            bool is_v = head >= turned;

            dst = (T *)((char *)h.kv + (size_t)page * h.page_stride + (is_v ? h.page_stride / 2 : 0)) +
                  ((size_t)(is_v ? kv - h.n_kv_heads : kv) * h.page_tokens +
                   (pos & (h.page_tokens - 1))) *
                      h.head_dim;
            turn = pos;
        }
#pragma unroll
        for (int e = 0; e < 8; e++) {
            float x = to_f(a[i].v[e]), y = to_f(b[i].v[e]);
            float c = e & 1 ? t[e / 2].z : t[e / 2].x, s = e & 1 ? t[e / 2].w : t[e / 2].y;

            if (bias) {
                x += bias[head * h.head_dim + p + e];
                y += bias[head * h.head_dim + half + p + e];
            }
            float2 at = head < turned ? turn_pair(x, y, c, s) : make_float2(x, y);
            a[i].v[e] = from_f<T>(at.x);
            b[i].v[e] = from_f<T>(at.y);
        }
        *(Vec8<T> *)(dst + in_page(turn, p)) = a[i];
        *(Vec8<T> *)(dst + in_page(turn, half + p)) = b[i];
    }
}

template <typename T>
__global__ void __launch_bounds__(256) swiglu_kernel(const T *x, long vecs, int width, T *out)
{
    let_next();
    wait_before();
    long step = (long)gridDim.x * blockDim.x;
    int per_row = width / 8;

    for (long i = (long)blockIdx.x * blockDim.x + threadIdx.x; i < vecs; i += step) {
        long row = i / per_row;
        int at = (int)(i % per_row);
        const Vec8<T> *g = (const Vec8<T> *)(x + row * 2 * width) + at;
        Vec8<T> gate = g[0], up = g[per_row], y;

#pragma unroll
        for (int e = 0; e < 8; e++) {
            float v = to_f(gate.v[e]);

            y.v[e] = from_f<T>(v / (1 + __expf(-v)) * to_f(up.v[e]));
        }
        ((Vec8<T> *)(out + row * width))[at] = y;
    }
}

__global__ void __launch_bounds__(128) gather_kernel(kn_cuda_gather_args a)
{
    let_next();
    wait_before();
    const uint4 *from = (const uint4 *)((const uint16_t *)a.x + (size_t)a.rows[blockIdx.x] * a.x_stride);
    uint4 *to = (uint4 *)((uint16_t *)a.out + (size_t)blockIdx.x * a.out_stride);

    for (int i = threadIdx.x; i < a.width / 8; i += blockDim.x)
        to[i] = from[i];
}

template <typename T>
__global__ void fill_kernel(T *out, size_t elems, float scale, uint64_t seed)
{
    size_t step = (size_t)gridDim.x * blockDim.x;

    wait_before();
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < elems; i += step) {
        uint64_t z = (i + 1) * 0x9e3779b97f4a7c15ull + seed; // splitmix64 (Steele et al. 2014)

        z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
        z = (z ^ z >> 27) * 0x94d049bb133111ebull;
        z ^= z >> 31;
        out[i] = from_f<T>(((float)(z >> 40) * 0x1p-23f - 1) * scale);
    }
}

// The arithmetic of kernels/model/rope.c, operation by operation.
__device__ inline double step(double p, double z, double c) { return __dadd_rn(__dmul_rn(p, z), c); }

__device__ void cos_sin(double x, float *ret_cos, float *ret_sin)
{
    long long n = (long long)__dadd_rn(__dmul_rn(x, 0x1.45f306dc9c883p-1), 0.5);
    double f = (double)n;
    double r = __dsub_rn(__dsub_rn(__dsub_rn(x, __dmul_rn(f, 0x1.921fb544p+0)),
                                   __dmul_rn(f, 0x1.0b4611a6p-34)),
                         __dmul_rn(f, 0x1.3198a2e037073p-69));
    double z = __dmul_rn(r, r), p = -1.0 / 1307674368000.0, q = 1.0 / 20922789888000.0;

    p = step(p, z, 1.0 / 6227020800.0);
    p = step(p, z, -1.0 / 39916800.0);
    p = step(p, z, 1.0 / 362880.0);
    p = step(p, z, -1.0 / 5040.0);
    p = step(p, z, 1.0 / 120.0);
    p = step(p, z, -1.0 / 6.0);
    float s = (float)__dadd_rn(r, __dmul_rn(__dmul_rn(r, z), p));
    q = step(q, z, -1.0 / 87178291200.0);
    q = step(q, z, 1.0 / 479001600.0);
    q = step(q, z, -1.0 / 3628800.0);
    q = step(q, z, 1.0 / 40320.0);
    q = step(q, z, -1.0 / 720.0);
    q = step(q, z, 1.0 / 24.0);
    q = step(q, z, -0.5);
    float c = (float)__dadd_rn(1.0, __dmul_rn(z, q));
    float co = n & 1 ? s : c, si = n & 1 ? c : s;
    *ret_cos = (n + 1) & 2 ? -co : co;
    *ret_sin = n & 2 ? -si : si;
}

__global__ void rope_kernel(const float *freqs, long n, int half, float2 *out)
{
    long i = (long)blockIdx.x * blockDim.x + threadIdx.x;

    wait_before();
    if (i < n) {
        float2 t;

        cos_sin((double)__fmul_rn((float)(i / half), freqs[i % half]), &t.x, &t.y);
        out[i] = t;
    }
}

// Block b < n_seqs spreads a page table, the next n_wanted ones those of the outputs, the last ones
// copy arrays.
__global__ void __launch_bounds__(1024) unpack_kernel(kn_cuda_unpack_args a)
{
    wait_before(); // what reads these arrays in the step before has ended
    int b = blockIdx.x;

    if (b < a.n_seqs + a.n_wanted) {
        int seq = b < a.n_seqs ? b : a.from[a.wanted_at + b - a.n_seqs];
        uint32_t *to = b < a.n_seqs ? a.pages + (size_t)b * a.pages_stride
                                    : a.wanted_pages + (size_t)(b - a.n_seqs) * a.pages_stride;
        int first = a.from[a.page_rows_at + seq], n = a.from[a.page_rows_at + seq + 1] - first;

        for (int i = threadIdx.x; i < n; i += blockDim.x)
            to[i] = (uint32_t)a.from[a.pages_at + first + i];
        return;
    }
    b -= a.n_seqs + a.n_wanted;
    for (int i = threadIdx.x; i < a.copy[b].n; i += blockDim.x)
        a.copy[b].to[i] = a.from[a.copy[b].at + i];
}

template <typename T, int E>
int qkv_launch(void *qkv, int rows, const kn_cuda_heads *h, const float *bias, cudaStream_t s)
{
    long units = (long)rows * (h->n_heads + 2 * h->n_kv_heads);

    return launch(qkv_kernel<T, E>, dim3((unsigned)((units + 7) / 8)), 256, 0, 1, s, (T *)qkv, rows,
                  bias, *h);
}

constexpr int MANY_ROWS = 256;

template <typename T>
int qkv_wide_launch(void *qkv, int rows, const kn_cuda_heads *h, const float *bias, cudaStream_t s)
{
    int heads = h->n_heads + 2 * h->n_kv_heads, each = 32 / (h->head_dim / 16) * HEAD_TURNS;
    long units = (long)rows * ((heads + each - 1) / each);

    return launch(qkv_wide_kernel<T>, dim3((unsigned)((units + 7) / 8)), 256, 0, 1, s, (T *)qkv, rows,
                  bias, *h);
}
template <typename T>
int qkv_by_width(void *qkv, int rows, const kn_cuda_heads *h, const float *bias, cudaStream_t s)
{
    bool plain = !h->q_norm && !h->k_norm && !h->interleaved;

    if (plain && rows >= MANY_ROWS && (h->head_dim == 64 || h->head_dim == 128))
        return qkv_wide_launch<T>(qkv, rows, h, bias, s);
    if (h->head_dim <= 64)
        return qkv_launch<T, 1>(qkv, rows, h, bias, s);
    if (h->head_dim <= 128)
        return qkv_launch<T, 2>(qkv, rows, h, bias, s);
    return qkv_launch<T, 4>(qkv, rows, h, bias, s);
}

template <typename T> int norm_launch(const kn_cuda_norm_args *a, cudaStream_t s)
{
    dim3 grid(a->rows < NORM_BLOCKS ? a->rows : NORM_BLOCKS);
    int vecs = (a->width / 8 + NORM_THREADS - 1) / NORM_THREADS;

    if (vecs <= 1)
        return launch(norm_kernel<T, 1>, grid, NORM_THREADS, 0, 1, s, *a);
    if (vecs <= 2)
        return launch(norm_kernel<T, 2>, grid, NORM_THREADS, 0, 1, s, *a);
    return vecs <= 4 ? launch(norm_kernel<T, 4>, grid, NORM_THREADS, 0, 1, s, *a)
                     : launch(norm_kernel<T, 8>, grid, NORM_THREADS, 0, 1, s, *a);
}

} // namespace

int kn_cuda_embed(enum kn_cuda_dtype t, const struct kn_cuda_embed_args *a, kn_cuda_stream s)
{
    (void)t; // both dtypes are two bytes
    return launch(embed_kernel<bf16>, dim3(a->rows), 128, 0, 1, s, *a);
}

int kn_cuda_norm(enum kn_cuda_dtype t, const struct kn_cuda_norm_args *a, kn_cuda_stream s)
{
    return t == KN_CUDA_BF16 ? norm_launch<bf16>(a, s) : norm_launch<f16>(a, s);
}

int kn_cuda_qkv_finish(enum kn_cuda_dtype t, void *qkv, int rows, const struct kn_cuda_heads *h,
                       const float *bias, kn_cuda_stream s)
{
    return t == KN_CUDA_BF16 ? qkv_by_width<bf16>(qkv, rows, h, bias, s)
                             : qkv_by_width<f16>(qkv, rows, h, bias, s);
}

int kn_cuda_swiglu(enum kn_cuda_dtype t, const void *x, int rows, int width, void *out,
                   kn_cuda_stream s)
{
    long vecs = (long)rows * (width / 8), blocks = (vecs + 255) / 256;
    dim3 grid((unsigned)(blocks < 132 * 16 ? blocks : 132 * 16));

    return t == KN_CUDA_BF16 ? launch(swiglu_kernel<bf16>, grid, 256, 0, 1, s, (const bf16 *)x, vecs,
                                      width, (bf16 *)out)
                             : launch(swiglu_kernel<f16>, grid, 256, 0, 1, s, (const f16 *)x, vecs,
                                      width, (f16 *)out);
}

int kn_cuda_gather(const struct kn_cuda_gather_args *a, kn_cuda_stream s)
{
    return launch(gather_kernel, dim3(a->n), 128, 0, 1, s, *a);
}

int kn_cuda_fill(enum kn_cuda_dtype t, void *out, size_t elems, float scale, uint64_t seed,
                 kn_cuda_stream s)
{
    return t == KN_CUDA_BF16
               ? launch(fill_kernel<bf16>, dim3(2048), 256, 0, 1, s, (bf16 *)out, elems, scale, seed)
               : launch(fill_kernel<f16>, dim3(2048), 256, 0, 1, s, (f16 *)out, elems, scale, seed);
}

int kn_cuda_unpack(const struct kn_cuda_unpack_args *a, kn_cuda_stream s)
{
    return launch(unpack_kernel, dim3(a->n_seqs + a->n_wanted + a->n_copies), 1024, 0, 1, s, *a);
}

int kn_cuda_rope_table(const float *freqs, int n_pos, int half, float *out, kn_cuda_stream s)
{
    long n = (long)n_pos * half;

    return launch(rope_kernel, dim3((unsigned)((n + 255) / 256)), 256, 0, 1, s, freqs, n, half,
                  (float2 *)out);
}
