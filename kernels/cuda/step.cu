/* Projections of a decode step of up to 8 rows, one after the other in one kernel: the output
 * projection of attention, gate and up, down, then what the next layer begins with (or logits).
 *
 * Such a step is bound by reading weights, and what costs time is memory standing still between
 * products. Here one block a multiprocessor stays through up to four products (phases). A warp feeds a
 * ring in shared memory with the block's share of the weights of all phases and never waits for
 * activations; while blocks meet at the end of a phase, memory fills the rings, about 14 MB or 3 us.
 *
 * What was measured on the way (H200): pieces of 1 KB of a row 3.3 TB/s, of 2 KB 4.2, rows beginning
 * on 128 bytes of shared memory 7 % faster than padded ones (hence the turns that neighbours take to
 * read their halves), 4 stages as good as 6; asking for weights ahead into the second-level cache takes
 * a third of the rate; x of several rows of the down projection is better read as it is needed.
 *
 * A group of 16 weight rows belongs to one block with all of K, in chunks of 1,024 columns: 8 warps
 * take twice 64 columns each by mma.sync, rows of x as the N of 8, and add up in shared memory, in the order of
 * the warps. Rows of a group are chosen so that what follows sees its pairs in one thread: gate and up,
 * or both elements that the rotary embedding turns. Columns are permuted inside a lane's 16, the same
 * way on both sides, so that loads are 16 bytes wide.
 *
 * Blocks meet at a counter that only grows. All blocks must be on the card at once: one a
 * multiprocessor, and nothing that waits for them starts before they have. */
#include "kernels/cuda/heads.cuh"
#include "kernels/cuda/hopper.cuh"

namespace {

constexpr int GROUP = 16, CHUNK = 1024, WARPS = 8, CONSUMERS = 32 * WARPS, PARTS = CHUNK / 512;
constexpr int ROW_BYTES = CHUNK * 2;
constexpr int STAGE = GROUP * ROW_BYTES;
constexpr int MAX_STAGES = 12, SMEM_BYTES = 216 * 1024, MOST_X = 32 * 1024;

struct Args {
    kn_cuda_step_args s;
    int stages;
};

struct Ring {
    uint64_t full[MAX_STAGES], empty[MAX_STAGES];
};

struct Shared {
    Ring ring;
    float4 part[2][WARPS][32];
    float sums[WARPS];
};

__device__ inline void copy_row(void *dst, const void *src, uint32_t bytes, uint64_t *b)
{
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
                     "r"(smem_addr(dst)),
                 "l"(src), "r"(bytes), "r"(smem_addr(b))
                 : "memory");
}

__device__ inline void meet() { asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory"); }

template <typename T>
__device__ inline void mma(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                           uint32_t b1);
template <>
__device__ inline void mma<bf16>(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                 uint32_t b0, uint32_t b1)
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
                 "{%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
template <>
__device__ inline void mma<f16>(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                uint32_t b0, uint32_t b1)
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
                 "{%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ inline int groups_of(const kn_cuda_step_phase &p) { return (p.n + GROUP - 1) / GROUP; }

// Groups of all phases are dealt out in one row, so that who has one more in a phase has one less in
// the next: first of this block where `dealt` groups went before.
__device__ inline int first_group(int dealt)
{
    int g = (int)blockIdx.x - dealt % (int)gridDim.x;

    return g < 0 ? g + (int)gridDim.x : g;
}

// Row of the weights that is row i of a group; pairs are 8 apart.
__device__ inline int row_of(const kn_cuda_step_args &a, const kn_cuda_step_phase &p, int group, int i)
{
    int row = group * GROUP + i;

    if (p.kind == KN_STREAM_SWIGLU)
        row = group * 8 + (i & 7) + (i < 8 ? 0 : p.n / 2);
    if (p.kind == KN_STREAM_QKV) {
        int half = a.heads.head_dim / 2, pair = group * 8 + (i & 7);
        HeadPlace at = pair_at(pair % half, half, a.heads.interleaved);

        row = pair / half * a.heads.head_dim + (i < 8 ? at.a : at.b);
    }
    return row < p.n ? row : p.n - 1;
}

// The ninth warp: all weights of the block, phase by phase.
__device__ void produce(const kn_cuda_step_args &a, int n_stages, Ring &ring, char *stages)
{
    int lane = threadIdx.x & 31, s = 0, turn = 1; // the first turn finds every stage empty
    int dealt = 0;

    for (int ph = 0; ph < a.n_phases; ph++) {
        const kn_cuda_step_phase &p = a.phases[ph];
        int n = groups_of(p);

        for (int g = first_group(dealt); g < n; g += gridDim.x) {
            const uint16_t *row = (const uint16_t *)p.w + (size_t)row_of(a, p, g, lane & 15) * p.k;

            for (int c = 0; c < p.k; c += CHUNK) {
                uint32_t bytes = (uint32_t)(p.k - c < CHUNK ? p.k - c : CHUNK) * 2;

                barrier_wait(&ring.empty[s], turn);
                if (lane == 0)
                    barrier_expect(&ring.full[s], bytes * GROUP);
                __syncwarp();
                if (lane < GROUP)
                    copy_row(stages + s * STAGE + lane * ROW_BYTES, row + c, bytes, &ring.full[s]);
                if (++s == n_stages) {
                    s = 0;
                    turn ^= 1;
                }
            }
        }
        dealt += n;
    }
}

// Asks for what norm_rows reads beside x.
__device__ inline void warm_norm(const kn_cuda_step_phase &p)
{
    for (int i = threadIdx.x * 8; i < p.k; i += CONSUMERS * 8)
        asm volatile("prefetch.global.L1 [%0];" ::"l"(p.norm + i));
}

// x / rms(x) * weight of all rows into shared memory. 8, 4, 2 or 1 warps take a row.
template <typename T>
__device__ void norm_rows(const kn_cuda_step_args &a, const kn_cuda_step_phase &p, Shared &sh, char *h,
                          int stride)
{
    int warp = threadIdx.x / 32, n = p.k / 8;
    int team = a.rows == 1 ? 8 : a.rows == 2 ? 4 : a.rows <= 4 ? 2 : 1; // warps
    int r = warp / team, first = threadIdx.x % (32 * team), step = 32 * team;
    const uint4 *x = (const uint4 *)((const T *)p.x + (size_t)r * p.x_stride);
    float sum = 0;

    if (r < a.rows) {
#pragma unroll 8
        for (int i = first; i < n; i += step) {
            uint4 raw = __ldcg(x + i);
            const T *v = (const T *)&raw;

            *(uint4 *)(h + r * stride + i * 16) = raw;
#pragma unroll
            for (int e = 0; e < 8; e++)
                sum += to_f(v[e]) * to_f(v[e]);
        }
    }
    sum = warp_sum(sum);
    if ((threadIdx.x & 31) == 0)
        sh.sums[warp] = sum;
    meet();
    sum = 0;
    for (int w = r * team; w < (r + 1) * team; w++)
        sum += sh.sums[w];
    float scale = rsqrtf(sum / (float)p.k + a.eps);
    for (int i = first; i < n && r < a.rows; i += step) {
        uint4 raw = *(const uint4 *)(h + r * stride + i * 16);
        T *v = (T *)&raw;
        const float4 *w = (const float4 *)p.norm + i * 2;
        float4 lo = w[0], hi = w[1];
        float ws[8] = {lo.x, lo.y, lo.z, lo.w, hi.x, hi.y, hi.z, hi.w};

#pragma unroll
        for (int e = 0; e < 8; e++)
            v[e] = from_f<T>(to_f(v[e]) * scale * ws[e]);
        *(uint4 *)(h + r * stride + i * 16) = raw;
    }
    meet();
}

// A pair of one head of one row: rotary embedding, then into q or the pages.
template <typename T>
__device__ void store_pair(const kn_cuda_step_args &a, const kn_cuda_step_phase &p, int pair, int row,
                           float va, float vb)
{
    const kn_cuda_heads &h = a.heads;
    int half = h.head_dim / 2, head = pair / half, pos = h.pos[row];
    HeadPlace at = pair_at(pair % half, half, h.interleaved);
    bool is_q = head < h.n_heads, is_v = head >= h.n_heads + h.n_kv_heads;
    T *dst = (T *)p.out + (size_t)row * p.out_stride + (size_t)head * h.head_dim;

    if (p.bias) {
        va += p.bias[head * h.head_dim + at.a];
        vb += p.bias[head * h.head_dim + at.b];
    }
    if (!is_v) {
        float2 t = ((const float2 *)h.cos_sin)[(size_t)pos * half + pair % half];
        float x = va, y = vb;

        va = x * t.x - y * t.y;
        vb = y * t.x + x * t.y;
    }
    if (!is_q) {
        int kvh = head - h.n_heads - (is_v ? h.n_kv_heads : 0);

        if (h.page[row] < 0) // an empty row of a recorded step
            return;
        dst = (T *)((char *)h.kv + (size_t)h.page[row] * h.page_stride +
                    (is_v ? h.page_stride / 2 : 0)) +
              ((size_t)kvh * h.page_tokens + (pos & (h.page_tokens - 1))) * h.head_dim;
    }
    dst[at.a] = from_f<T>(va);
    dst[at.b] = from_f<T>(vb);
}

// As other multiprocessors left it.
template <typename T> __device__ inline T old_value(const T *p)
{
    unsigned short raw = __ldcg((const unsigned short *)p);

    return *(const T *)&raw;
}

// Lane holds of weight rows l / 4 and l / 4 + 8 the sums with rows 2 * (l % 4) and + 1 of x.
template <typename T>
__device__ void store(const kn_cuda_step_args &a, const kn_cuda_step_phase &p, int group, float4 c)
{
    int lane = threadIdx.x & 31, r = lane / 4;
    float lo[2] = {c.x, c.y}, hi[2] = {c.z, c.w};

#pragma unroll
    for (int e = 0; e < 2; e++) {
        int row = lane % 4 * 2 + e, n = group * GROUP + r;

        if (row >= a.rows)
            continue;
        if (p.kind == KN_STREAM_QKV) {
            store_pair<T>(a, p, group * 8 + r, row, lo[e], hi[e]);
        } else if (p.kind == KN_STREAM_SWIGLU) {
            float gate = to_f(from_f<T>(lo[e])), up = to_f(from_f<T>(hi[e]));

            ((T *)p.out)[(size_t)row * p.out_stride + group * 8 + r] =
                from_f<T>(gate / (1 + __expf(-gate)) * up);
        } else if (p.kind == KN_STREAM_F32) {
            float *out = (float *)p.out + (size_t)row * p.out_stride;

            if (n < p.n)
                out[n] = lo[e];
            if (n + 8 < p.n)
                out[n + 8] = hi[e];
        } else {
            T *out = (T *)p.out + (size_t)row * p.out_stride;

            if (n < p.n)
                out[n] = from_f<T>(to_f(old_value(out + n)) + lo[e]);
            if (n + 8 < p.n)
                out[n + 8] = from_f<T>(to_f(old_value(out + n + 8)) + hi[e]);
        }
    }
}

// First warp: what this block wrote in the phase is written; the others' too, when it returns.
__device__ void arrive(unsigned long long *counter, unsigned long long *ret_until)
{
    __syncwarp();
    __threadfence();
    __syncwarp();
    if ((threadIdx.x & 31) == 0) {
        unsigned long long old = atomicAdd(counter, 1ull);

        *ret_until = (old / gridDim.x + 1) * gridDim.x;
    }
}
__device__ void wait_for_all(const unsigned long long *counter, unsigned long long until)
{
    unsigned long long now;

    do {
        asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(now) : "l"(counter) : "memory");
    } while (now < until);
}

struct XPart { // of a row of x: 16 columns
    uint4 a, b;
};
// Rows of x into shared memory as they are.
template <typename T>
__device__ void copy_rows(const kn_cuda_step_args &a, const kn_cuda_step_phase &p, char *h, int stride)
{
    for (int r = 0; r < a.rows; r++) {
        const uint4 *x = (const uint4 *)((const T *)p.x + (size_t)r * p.x_stride);

#pragma unroll 4
        for (int i = threadIdx.x; i < p.k / 8; i += CONSUMERS)
            *(uint4 *)(h + r * stride + i * 16) = __ldcg(x + i);
    }
    meet();
}

__device__ inline XPart load_x(const char *row, bool shared, bool in)
{
    XPart x = {};

    if (in && shared) {
        x.a = ((const uint4 *)row)[0];
        x.b = ((const uint4 *)row)[1];
    } else if (in) {
        x.a = __ldcg((const uint4 *)row);
        x.b = __ldcg((const uint4 *)row + 1);
    }
    return x;
}

template <typename T>
__device__ void consume(const kn_cuda_step_args &a, int n_stages, Shared &sh, char *stages, char *h)
{
    int warp = threadIdx.x / 32, lane = threadIdx.x & 31, row = lane / 4, q = lane % 4;
    int s = 0, turn = 0, buf = 0, dealt = 0;
    int odd = row & 1; // neighbours read their halves in turn: no bank twice
    unsigned long long until = 0;

    wait_before();
    for (int ph = 0; ph < a.n_phases; ph++) {
        const kn_cuda_step_phase &p = a.phases[ph];
        int n = groups_of(p), stride = p.k * 2 + 16, col = warp * 64 + q * 16;

        if (p.norm)
            warm_norm(p);
        if (ph > 0) {
            if (threadIdx.x == 0)
                wait_for_all(a.counter, until);
            __syncwarp();
            meet();
        }
        bool shared = p.norm || a.rows * stride <= MOST_X;
        if (p.norm)
            norm_rows<T>(a, p, sh, h, stride);
        else if (shared)
            copy_rows<T>(a, p, h, stride);
        const char *x = shared ? h + row * stride : (const char *)((const T *)p.x + (size_t)row * p.x_stride);
        XPart now[PARTS];
#pragma unroll
        for (int j = 0; j < PARTS; j++)
            now[j] = load_x(x + (col + j * 512) * 2, shared, row < a.rows && col + j * 512 < p.k);

        for (int g = first_group(dealt); g < n; g += gridDim.x) {
            float c[4] = {0, 0, 0, 0};

            for (int at = 0; at < p.k; at += CHUNK) {
                int next = at + CHUNK < p.k ? at + CHUNK : 0;
                const char *w = stages + s * STAGE + row * ROW_BYTES + col * 2;
                XPart then[PARTS];

#pragma unroll
                for (int j = 0; j < PARTS; j++)
                    then[j] = load_x(x + (next + col + j * 512) * 2, shared,
                                     row < a.rows && next + col + j * 512 < p.k);
                barrier_wait(&sh.ring.full[s], turn);
#pragma unroll
                for (int j = 0; j < PARTS; j++) {
                    if (at + col + j * 512 < p.k) { // the same for all lanes of the warp
                        const char *wj = w + j * 1024;
                        const uint4 *u = (const uint4 *)wj, *v = (const uint4 *)(wj + 8 * ROW_BYTES);
                        uint4 ua = u[odd], ub = u[odd ^ 1], va = v[odd], vb = v[odd ^ 1];
                        uint4 u0 = odd ? ub : ua, u1 = odd ? ua : ub;
                        uint4 v0 = odd ? vb : va, v1 = odd ? va : vb;

                        mma<T>(c, u0.x, v0.x, u0.y, v0.y, now[j].a.x, now[j].a.y);
                        mma<T>(c, u0.z, v0.z, u0.w, v0.w, now[j].a.z, now[j].a.w);
                        mma<T>(c, u1.x, v1.x, u1.y, v1.y, now[j].b.x, now[j].b.y);
                        mma<T>(c, u1.z, v1.z, u1.w, v1.w, now[j].b.z, now[j].b.w);
                    }
                    now[j] = then[j];
                }
                __syncwarp();
                if (lane == 0)
                    barrier_arrive(&sh.ring.empty[s]);
                if (++s == n_stages) {
                    s = 0;
                    turn ^= 1;
                }
            }
            sh.part[buf][warp][lane] = make_float4(c[0], c[1], c[2], c[3]);
            meet();
            if (warp == 0) { // it meets the others at the next group only when it is through
                float4 sum = sh.part[buf][0][lane];

#pragma unroll
                for (int i = 1; i < WARPS; i++) {
                    float4 v = sh.part[buf][i][lane];

                    sum = make_float4(sum.x + v.x, sum.y + v.y, sum.z + v.z, sum.w + v.w);
                }
                store<T>(a, p, g, sum);
            }
            buf ^= 1;
        }
        dealt += n;
        if (warp == 0 && ph + 1 < a.n_phases)
            arrive(a.counter, &until);
    }
}

template <typename T>
__global__ void __launch_bounds__(CONSUMERS + 32, 1) step_kernel(const __grid_constant__ Args a)
{
    extern __shared__ __align__(128) char raw[];
    __shared__ Shared sh;

    let_next();
    if (threadIdx.x == 0) {
        for (int i = 0; i < a.stages; i++) {
            barrier_init(&sh.ring.full[i], 1);
            barrier_init(&sh.ring.empty[i], WARPS);
        }
        barrier_init_done();
    }
    __syncthreads();
    if (threadIdx.x >= CONSUMERS)
        produce(a.s, a.stages, sh.ring, raw);
    else
        consume<T>(a.s, a.stages, sh, raw, raw + a.stages * STAGE);
}

template <typename T> int run(const kn_cuda_step_args *s, cudaStream_t stream)
{
    Args a = {};
    size_t h = 0;

    a.s = *s;
    a.stages = s->stages > 0 && s->stages <= MAX_STAGES ? s->stages : 6;
    for (int i = 0; i < s->n_phases; i++) {
        size_t bytes = (size_t)s->rows * (s->phases[i].k * 2 + 16);

        bytes = s->phases[i].norm || bytes <= MOST_X ? bytes : 0;

        h = bytes > h ? bytes : h;
    }
    while (a.stages > 2 && a.stages * STAGE + h > SMEM_BYTES)
        a.stages--;
    return launch(step_kernel<T>, dim3(s->n_sms), CONSUMERS + 32, a.stages * STAGE + h, 1, stream, a);
}

} // namespace

int kn_cuda_step_init(void)
{
    const void *kernels[] = {(const void *)step_kernel<bf16>, (const void *)step_kernel<f16>};
    int rc = 0;

    for (int i = 0; i < 2 && rc == 0; i++) {
        rc = cudaFuncSetAttribute(kernels[i], cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  SMEM_BYTES);
        rc = rc ? rc
                : cudaFuncSetAttribute(kernels[i], cudaFuncAttributePreferredSharedMemoryCarveout,
                                       cudaSharedmemCarveoutMaxShared);
    }
    return rc;
}

int kn_cuda_step(enum kn_cuda_dtype t, const struct kn_cuda_step_args *a, kn_cuda_stream s)
{
    return t == KN_CUDA_BF16 ? run<bf16>(a, s) : run<f16>(a, s);
}
