/* Products of few rows with weights, at the speed of memory: out [rows, N] = x [rows, K] w [N, K]^T.
 *
 * The weights are the left operand: a block takes 128 of their rows (two boxes of 64, one for each
 * of two warpgroups) and all rows of x as the N of wgmma, so that 1 to 128 rows cost one pass over
 * the weights. A ninth warp feeds a ring of stages of 64 columns through the tensor copy engine.
 *
 * K may be split over the blocks of a cluster; their sums meet through distributed shared memory and
 * are added in rank order. The split depends on the shape of the weights alone, so the order in
 * which an output element is summed does not depend on the other rows.
 *
 * Before it waits for the kernel before it, a block fills its ring with weights: memory stays busy
 * while sums meet and short kernels run. Memory gives its full rate to few streams with long runs of
 * each row in flight (8 to 12 stages, filled 2 or 4 at a time), and far less to many: 4.3 TB/s
 * against 2.8 (gate and up, 8 rows, H200). Asking for more weights ahead of time into the
 * second-level cache made whole steps slower.
 *
 * What follows the product is folded in: bias, residual, SwiGLU (gate and up rows share a block), or
 * norms, rotary embedding and cache write of the heads. */
#include "kernels/cuda/heads.cuh"
#include "kernels/cuda/hopper.cuh"

namespace {

constexpr int KC = 64;         // columns of a stage
constexpr int MAX_STAGES = 12;
constexpr int SMEM_BYTES = 226 * 1024;
constexpr int PAST = 2048; // products of a box of fewer than 64 rows read past its end

// Sizes that follow from rows of x in a block and warpgroups that multiply.
template <int NB, int WGS> struct Sizes {
    static constexpr int ROWS = 64 * WGS; // of sums; those past a box of fewer rows are not used
    static constexpr int X_BYTES = NB * 128;
    static constexpr int CONSUMERS = 128 * WGS;
    static constexpr int LD = ROWS + 4; // floats from column to column of sums: no bank twice
    static constexpr int PART = NB * LD * 4;
};

struct Args {
    int n;      // rows of the weights
    int chunks; // of K
    int rows;
    int stages, group;
    int box; // rows of weights of a warpgroup
    const float *bias;
    void *out;
    size_t out_stride;
    kn_cuda_heads heads;
};

struct Ring {
    uint64_t full[MAX_STAGES], empty[MAX_STAGES];
};

// One thread: everything that goes through the copy engine. Stages are filled `group` at a time, so
// that memory sees longer runs of each row.
template <int NB, int WGS, bool PAIRS>
__device__ void produce(const CUtensorMap *w, const CUtensorMap *x, const Args &a, Ring &ring,
                        char *stages, int tile, int b0, int c0, int c1)
{
    using S = Sizes<NB, WGS>;
    int n = c1 - c0, done = 0, s = 0, turn = 1; // the first turn finds every stage empty
    int w_bytes = a.box * 128 * WGS, stage = w_bytes + S::X_BYTES;
    bool waited = false;

    prefetch_map(w);
    prefetch_map(x);
    while (done < n) {
        int g = n - done < a.group ? n - done : a.group, s0 = s, t = turn;

        if (!waited)
            g = n - done < a.stages ? n - done : a.stages;
        for (int i = 0; i < g; i++) {
            char *st = stages + s * stage;

            if (waited)
                barrier_wait(&ring.empty[s], t);
            barrier_expect(&ring.full[s], stage);
#pragma unroll
            for (int b = 0; b < WGS; b++) {
                int row = PAIRS ? (b < WGS / 2 ? 0 : a.n / 2) +
                                      (tile * (WGS / 2) + b % (WGS / 2)) * a.box
                                : (tile * WGS + b) * a.box;

                copy_box(st + b * a.box * 128, w, (c0 + done + i) * KC, row, &ring.full[s]);
            }
            if (++s == a.stages) {
                s = 0;
                t ^= 1;
            }
        }
        if (!waited)
            wait_before();
        waited = true;
        for (int i = 0; i < g; i++) {
            copy_box(stages + s0 * stage + w_bytes, x, (c0 + done + i) * KC, b0, &ring.full[s0]);
            s0 = s0 + 1 == a.stages ? 0 : s0 + 1;
        }
        turn = t;
        done += g;
    }
    if (!waited)
        wait_before();
}

template <int N> __device__ inline void consumers_sync()
{
    asm volatile("bar.sync 1, %0;" ::"n"(N) : "memory");
}

template <typename T, int NB, int WGS>
__device__ void consume(const Args &a, Ring &ring, char *stages, int n, float *part)
{
    using S = Sizes<NB, WGS>;
    int wg = threadIdx.x / 128, lane = threadIdx.x & 31, warp = threadIdx.x / 32 & 3;
    int w_bytes = a.box * 128 * WGS, stage = w_bytes + S::X_BYTES;
    uint64_t da0 = mma_desc(stages + wg * a.box * 128), db0 = mma_desc(stages + w_bytes);
    float acc[NB / 2];

#pragma unroll
    for (int i = 0; i < NB / 2; i++)
        acc[i] = 0;
    for (int i = 0, s = 0, last = 0, turn = 0; i < n; i++) {
        barrier_wait(&ring.full[s], turn);
        uint64_t da = da0 + (uint32_t)(s * stage >> 4), db = db0 + (uint32_t)(s * stage >> 4);
        mma_fence();
#pragma unroll
        for (int k = 0; k < 4; k++) // 16 columns are 32 bytes
            Mma<T, NB>::run(acc, da + 2 * k, db + 2 * k);
        mma_commit();
        mma_wait<1>(); // the stage before is read
        if (i > 0 && lane == 0)
            barrier_arrive(&ring.empty[last]);
        last = s;
        if (++s == a.stages) {
            s = 0;
            turn ^= 1;
        }
    }
    mma_wait<0>();
    consumers_sync<S::CONSUMERS>(); // no one reads the ring any more
    int row = wg * 64 + warp * 16 + lane / 4, col = lane % 4 * 2;
#pragma unroll
    for (int j = 0; j < NB / 8; j++) {
#pragma unroll
        for (int e = 0; e < 4; e++)
            part[(8 * j + col + (e & 1)) * S::LD + row + (e / 2) * 8] = acc[4 * j + e];
    }
}

// Sums over the cluster of an element and its neighbour, in the order of ranks; all are asked for at once.
template <int SPLIT> __device__ inline float2 sums_of(const float *p)
{
    float2 v[SPLIT], sum = {0, 0};

#pragma unroll
    for (int rank = 0; rank < SPLIT; rank++)
        v[rank] = cluster_read2(p, rank);
#pragma unroll
    for (int rank = 0; rank < SPLIT; rank++) {
        sum.x += v[rank].x;
        sum.y += v[rank].y;
    }
    return sum;
}
__device__ inline float2 total2(const float *p, int split)
{
    return split == 1   ? *(const float2 *)p
           : split == 2 ? sums_of<2>(p)
           : split == 4 ? sums_of<4>(p)
                        : sums_of<8>(p);
}
__device__ inline float total(const float *p, int split)
{
    float sum = 0;

    if (split == 1)
        return *p;
    for (int rank = 0; rank < split; rank++)
        sum += cluster_read(p, rank);
    return sum;
}

template <typename T, int NB, int KIND, int WGS>
__device__ void store(const Args &a, const float *part, int tile, int rank, int split, int b0,
                      int rows)
{
    using S = Sizes<NB, WGS>;
    // A thread keeps its pair of outputs and goes through rows of x.
    constexpr int BOXES = KIND == KN_STREAM_SWIGLU ? WGS / 2 : WGS, PAIRS = BOXES * 32;
    int q = threadIdx.x % PAIRS, n = KIND == KN_STREAM_SWIGLU ? a.n / 2 : a.n;
    int in_box = q % 32 * 2, at_n = (tile * BOXES + q / 32) * a.box + in_box;

    if (in_box >= a.box || at_n >= n)
        return;
    for (int b = rank * (S::CONSUMERS / PAIRS) + threadIdx.x / PAIRS; b < rows;
         b += split * (S::CONSUMERS / PAIRS)) {
        const float *p = part + b * S::LD + q * 2;
        float2 y = total2(p, split);
        float y0 = y.x, y1 = y.y;
        size_t at = (size_t)(b0 + b) * a.out_stride + at_n;
        if (KIND == KN_STREAM_SWIGLU) {
            float2 u = total2(p + BOXES * 64, split);

            // rounded as the product alone would be, then as the many-row kernel computes
            y0 = to_f(from_f<T>(y0));
            y1 = to_f(from_f<T>(y1));
            y0 = y0 / (1 + __expf(-y0)) * to_f(from_f<T>(u.x));
            y1 = y1 / (1 + __expf(-y1)) * to_f(from_f<T>(u.y));
        }
        if (KIND == KN_STREAM_F32) {
            *(float2 *)((float *)a.out + at) = make_float2(y0, y1);
            continue;
        }
        Vec2<T> *out = (Vec2<T> *)((T *)a.out + at);
        if (KIND == KN_STREAM_ADD) {
            Vec2<T> x = *out;

            y0 += to_f(x.v[0]);
            y1 += to_f(x.v[1]);
        }
        if (KIND == KN_STREAM_STORE && a.bias) {
            y0 += a.bias[at_n];
            y1 += a.bias[at_n + 1];
        }
        *out = Vec2<T>{{from_f<T>(y0), from_f<T>(y1)}};
    }
}

// A tile is whole heads of 128 or 64; a warp takes one head of one row.
template <typename T, int NB, int WGS, int E>
__device__ void store_heads(const Args &a, const float *part, int tile, int rank, int split, int b0,
                            int rows)
{
    using S = Sizes<NB, WGS>;
    constexpr int D = 64 * E, PER = S::ROWS / D, WARPS = S::CONSUMERS / 32;
    int warp = threadIdx.x / 32, lane = threadIdx.x & 31;

    for (int u = rank * WARPS + warp; u < rows * PER; u += split * WARPS) {
        int b = u / PER, in_tile = u % PER, head = tile * PER + in_tile;
        const float *p = part + b * S::LD + in_tile * D;
        float va[E], vb[E];

        if (head * D >= a.n)
            continue;
        if (E == 2 && !a.heads.interleaved) {
            float2 x = total2(p + lane * 2, split), y = total2(p + D / 2 + lane * 2, split);

            va[0] = x.x;
            va[E - 1] = x.y;
            vb[0] = y.x;
            vb[E - 1] = y.y;
        }
#pragma unroll
        for (int j = 0; j < E; j++) {
            HeadPlace at = pair_at(lane * E + j, D / 2, a.heads.interleaved);

            if (E != 2 || a.heads.interleaved) {
                va[j] = total(p + at.a, split);
                vb[j] = total(p + at.b, split);
            }
            if (a.bias) {
                va[j] += a.bias[head * D + at.a];
                vb[j] += a.bias[head * D + at.b];
            }
        }
        finish_head<T, E>(a.heads, head_row<E>(a.heads, b0 + b, true), head, va, vb,
                          (T *)a.out + (size_t)(b0 + b) * a.out_stride);
    }
}

template <typename T, int NB, int KIND, int WGS>
__global__ void __launch_bounds__(Sizes<NB, WGS>::CONSUMERS + 32)
    stream_gemm(const __grid_constant__ CUtensorMap w, const __grid_constant__ CUtensorMap x,
                const __grid_constant__ Args a)
{
    using S = Sizes<NB, WGS>;
    extern __shared__ char raw[];
    __shared__ Ring ring;
    char *stages = raw + ((1024 - (smem_addr(raw) & 1023)) & 1023);
    float *part = (float *)stages;
    int split = gridDim.x, rank = blockIdx.x, tile = blockIdx.y, b0 = blockIdx.z * NB;
    int c0 = (int)((long)a.chunks * rank / split), c1 = (int)((long)a.chunks * (rank + 1) / split);
    int rows = a.rows - b0 < NB ? a.rows - b0 : NB;

    let_next();
    if (threadIdx.x == 0) {
        for (int i = 0; i < a.stages; i++) {
            barrier_init(&ring.full[i], 1);
            barrier_init(&ring.empty[i], S::CONSUMERS / 32);
        }
        barrier_init_done();
    }
    __syncthreads();
    if (threadIdx.x >= S::CONSUMERS) {
        if (threadIdx.x == S::CONSUMERS)
            produce<NB, WGS, KIND == KN_STREAM_SWIGLU>(&w, &x, a, ring, stages, tile, b0, c0, c1);
    } else {
        consume<T, NB, WGS>(a, ring, stages, c1 - c0, part);
        consumers_sync<S::CONSUMERS>();
    }
    if (split > 1)
        cluster_sync();
    if (threadIdx.x < S::CONSUMERS) {
        wait_before();
        if (KIND != KN_STREAM_QKV)
            store<T, NB, KIND, WGS>(a, part, tile, rank, split, b0, rows);
        else if (a.heads.head_dim == 128)
            store_heads<T, NB, WGS, 2>(a, part, tile, rank, split, b0, rows);
        else
            store_heads<T, NB, WGS, 1>(a, part, tile, rank, split, b0, rows);
    }
    if (split > 1)
        cluster_sync(); // the others may still read this block's sums
}

template <typename T, int NB, int KIND, int WGS>
int run(const kn_cuda_stream_gemm_args *a, cudaStream_t s)
{
    using S = Sizes<NB, WGS>;
    int box = a->box ? a->box : 64, outputs = KIND == KN_STREAM_SWIGLU ? a->n / 2 : a->n;
    int width = KIND == KN_STREAM_SWIGLU ? box * WGS / 2 : box * WGS;
    int tiles = (outputs + width - 1) / width, chunks = (a->k + KC - 1) / KC;
    int split = a->split, stages = a->stages, group = a->group;
    int stage = box * 128 * WGS + NB * 128;

    // Measured: memory likes few blocks with long runs of their rows in flight. About half the card
    // is enough to fill it, and leaves the rest to the next product's first stages.
    while (split == 0) {
        split = 1;
        while (split < 8 && tiles * split * 2 <= 100 && chunks / (split * 2) >= 8)
            split *= 2;
    }
    if (stages == 0)
        stages = tiles * split <= 132 ? MAX_STAGES : tiles <= 400 ? 8 : 5;
    if (group == 0)
        group = tiles * split <= 132 ? 4 : 2;
    while (stages * stage > SMEM_BYTES - 1024 - PAST)
        stages--;
    while (stages * stage < S::PART)
        stages++;
    group = group * 2 > stages ? 1 : group;
    Args args = {};
    args.n = a->n;
    args.chunks = chunks;
    args.rows = a->rows;
    args.stages = stages;
    args.group = group;
    args.box = box;
    args.bias = a->bias;
    args.out = a->out;
    args.out_stride = a->out_stride;
    if (a->heads)
        args.heads = *a->heads;
    CUtensorMap w, x;
    memcpy(&w, a->w, sizeof(w));
    memcpy(&x, a->x, sizeof(x));
    return launch(stream_gemm<T, NB, KIND, WGS>, dim3(split, tiles, (a->rows + NB - 1) / NB),
                  S::CONSUMERS + 32, (size_t)stages * stage + 1024 + PAST, split, s, w, x, args);
}

template <typename T, int NB, int WGS>
int by_kind(const kn_cuda_stream_gemm_args *a, cudaStream_t s)
{
    switch (a->kind) {
    case KN_STREAM_STORE:
        return run<T, NB, KN_STREAM_STORE, WGS>(a, s);
    case KN_STREAM_ADD:
        return run<T, NB, KN_STREAM_ADD, WGS>(a, s);
    case KN_STREAM_SWIGLU:
        return run<T, NB, KN_STREAM_SWIGLU, WGS>(a, s);
    case KN_STREAM_F32:
        return run<T, NB, KN_STREAM_F32, WGS>(a, s);
    case KN_STREAM_QKV:
        return run<T, NB, KN_STREAM_QKV, WGS>(a, s);
    }
    return cudaErrorInvalidValue;
}

// More rows of x: wider tiles of weights, so that x is read less often.
template <typename T> int by_rows(const kn_cuda_stream_gemm_args *a, cudaStream_t s)
{
    bool wide = a->warpgroups == 4;

    switch (kn_cuda_stream_box(a->rows)) {
    case 8:
        return by_kind<T, 8, 2>(a, s);
    case 16:
        return by_kind<T, 16, 2>(a, s);
    case 32:
        return wide ? by_kind<T, 32, 4>(a, s) : by_kind<T, 32, 2>(a, s);
    case 64:
        return wide ? by_kind<T, 64, 4>(a, s) : by_kind<T, 64, 2>(a, s);
    default:
        return wide ? by_kind<T, 128, 4>(a, s) : by_kind<T, 128, 2>(a, s);
    }
}

template <typename T, int NB, int KIND, int WGS> int allow()
{
    return cudaFuncSetAttribute(stream_gemm<T, NB, KIND, WGS>,
                                cudaFuncAttributeMaxDynamicSharedMemorySize, SMEM_BYTES);
}
template <typename T, int NB, int WGS> int allow_kinds()
{
    int rc = allow<T, NB, KN_STREAM_STORE, WGS>();

    rc = rc ? rc : allow<T, NB, KN_STREAM_ADD, WGS>();
    rc = rc ? rc : allow<T, NB, KN_STREAM_SWIGLU, WGS>();
    rc = rc ? rc : allow<T, NB, KN_STREAM_F32, WGS>();
    return rc ? rc : allow<T, NB, KN_STREAM_QKV, WGS>();
}
template <typename T> int allow_all()
{
    int rc = allow_kinds<T, 8, 2>();

    rc = rc ? rc : allow_kinds<T, 16, 2>();
    rc = rc ? rc : allow_kinds<T, 32, 2>();
    rc = rc ? rc : allow_kinds<T, 64, 2>();
    rc = rc ? rc : allow_kinds<T, 128, 2>();
    rc = rc ? rc : allow_kinds<T, 32, 4>();
    rc = rc ? rc : allow_kinds<T, 64, 4>();
    return rc ? rc : allow_kinds<T, 128, 4>();
}

} // namespace

int kn_cuda_stream_init(void)
{
    int rc = allow_all<bf16>();

    return rc ? rc : allow_all<f16>();
}

int kn_cuda_stream_box(int rows)
{
    int box = 8;

    while (box < rows && box < 128)
        box *= 2;
    return box;
}

int kn_cuda_stream_pair_box(int n)
{
    // 128 blocks of 224 rows instead of 112 of 256 where 28,672 rows are cut
    return n % 224 == 0 && n / 224 <= 132 ? 56 : 64;
}

int kn_cuda_stream_gemm(enum kn_cuda_dtype t, const struct kn_cuda_stream_gemm_args *a,
                        kn_cuda_stream s)
{
    return t == KN_CUDA_BF16 ? by_rows<bf16>(a, s) : by_rows<f16>(a, s);
}

int kn_cuda_map_init(struct kn_cuda_map *m, enum kn_cuda_dtype t, const void *base, size_t rows,
                     size_t cols, size_t stride, int box_rows)
{
    static PFN_cuTensorMapEncodeTiled_v12000 encode; // found once; the value is the same for all threads
    cuuint64_t dims[2] = {cols, rows}, strides[1] = {stride * 2};
    cuuint32_t box[2] = {KC, (cuuint32_t)box_rows}, steps[2] = {1, 1};
    CUtensorMap map;
    int rc;

    if (!encode) {
        cudaDriverEntryPointQueryResult found;
        void *f = nullptr;

        rc = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &f, 12000,
                                              cudaEnableDefault, &found);
        if (rc || !f)
            return rc ? rc : cudaErrorNotSupported;
        encode = (PFN_cuTensorMapEncodeTiled_v12000)f;
    }
    rc = encode(&map, t == KN_CUDA_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                        : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
                2, (void *)base, dims, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    memcpy(m, &map, sizeof(map));
    return rc;
}
