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
 * Before it waits for the kernel before it, a block fills its ring with weights and asks for the
 * next ones into the second-level cache: memory stays busy while short kernels run. Shared memory
 * stays under half of a multiprocessor's so that the next product can be resident for that.
 *
 * What follows the product is folded in: bias, residual, SwiGLU (gate and up rows share a block), or
 * norms, rotary embedding and cache write of the heads. */
#include "kernels/cuda/heads.cuh"
#include "kernels/cuda/hopper.cuh"

namespace {

constexpr int KC = 64;          // columns of a stage
constexpr int W_BYTES = 16384;  // of weights in a stage
constexpr int MAX_STAGES = 12;
constexpr int CONSUMERS = 256;  // two warpgroups
constexpr int THREADS = CONSUMERS + 32;
constexpr int PART_LD = 132;    // floats from column to column of partial sums: no bank twice

struct Args {
    int n;      // rows of the weights
    int chunks; // of K
    int rows;
    int stages, prefetch;
    const float *bias;
    void *out;
    size_t out_stride;
    kn_cuda_heads heads;
};

struct Ring {
    uint64_t full[MAX_STAGES], empty[MAX_STAGES];
};

// One thread: everything that goes through the copy engine.
template <int NB>
__device__ void produce(const CUtensorMap *w, const CUtensorMap *x, const Args &a, Ring &ring,
                        char *stages, int row_a, int row_b, int b0, int c0, int c1)
{
    constexpr int STAGE = W_BYTES + NB * 128;
    int n = c1 - c0, pre = n < a.stages ? n : a.stages;

    prefetch_map(w);
    prefetch_map(x);
    for (int i = 0; i < pre; i++) {
        char *st = stages + i * STAGE;

        barrier_expect(&ring.full[i], STAGE);
        copy_box(st, w, (c0 + i) * KC, row_a, &ring.full[i]);
        copy_box(st + W_BYTES / 2, w, (c0 + i) * KC, row_b, &ring.full[i]);
    }
    for (int i = pre; i < n && i < pre + a.prefetch; i++) {
        prefetch_box(w, (c0 + i) * KC, row_a);
        prefetch_box(w, (c0 + i) * KC, row_b);
    }
    wait_before();
    for (int i = 0; i < pre; i++)
        copy_box(stages + i * STAGE + W_BYTES, x, (c0 + i) * KC, b0, &ring.full[i]);
    for (int i = pre, s = 0, turn = 0; i < n; i++) {
        char *st = stages + s * STAGE;

        barrier_wait(&ring.empty[s], turn);
        barrier_expect(&ring.full[s], STAGE);
        copy_box(st, w, (c0 + i) * KC, row_a, &ring.full[s]);
        copy_box(st + W_BYTES / 2, w, (c0 + i) * KC, row_b, &ring.full[s]);
        copy_box(st + W_BYTES, x, (c0 + i) * KC, b0, &ring.full[s]);
        if (++s == a.stages) {
            s = 0;
            turn ^= 1;
        }
    }
}

template <typename T, int NB>
__device__ void consume(const Args &a, Ring &ring, char *stages, int n, float *part)
{
    constexpr int STAGE = W_BYTES + NB * 128;
    int wg = threadIdx.x / 128, lane = threadIdx.x & 31, warp = threadIdx.x / 32 & 3;
    float acc[NB / 2];

#pragma unroll
    for (int i = 0; i < NB / 2; i++)
        acc[i] = 0;
    for (int i = 0, s = 0, last = 0, turn = 0; i < n; i++) {
        barrier_wait(&ring.full[s], turn);
        uint64_t da = mma_desc(stages + s * STAGE + wg * (W_BYTES / 2));
        uint64_t db = mma_desc(stages + s * STAGE + W_BYTES);
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
    asm volatile("bar.sync 1, 256;" ::: "memory"); // no one reads the ring any more
    int row = wg * 64 + warp * 16 + lane / 4, col = lane % 4 * 2;
#pragma unroll
    for (int j = 0; j < NB / 8; j++) {
#pragma unroll
        for (int e = 0; e < 4; e++)
            part[(8 * j + col + (e & 1)) * PART_LD + row + (e / 2) * 8] = acc[4 * j + e];
    }
}

// Sum over the cluster of the element at column b, row r of the tile.
__device__ inline float total(const float *part, int b, int r, int split)
{
    const float *p = part + b * PART_LD + r;
    float sum = 0;

    if (split == 1)
        return *p;
    for (int rank = 0; rank < split; rank++)
        sum += cluster_read(p, rank);
    return sum;
}

template <typename T, int KIND>
__device__ void store(const Args &a, const float *part, int tile, int rank, int split, int b0,
                      int rows)
{
    constexpr int WIDTH = KIND == KN_STREAM_SWIGLU ? 64 : 128;
    int n = KIND == KN_STREAM_SWIGLU ? a.n / 2 : a.n, n0 = tile * WIDTH;

    for (int i = rank * CONSUMERS + threadIdx.x; i < rows * (WIDTH / 2); i += split * CONSUMERS) {
        int b = i / (WIDTH / 2), r = i % (WIDTH / 2) * 2;

        if (n0 + r >= n)
            continue;
        float y0 = total(part, b, r, split), y1 = total(part, b, r + 1, split);
        size_t at = (size_t)(b0 + b) * a.out_stride + n0 + r;
        if (KIND == KN_STREAM_SWIGLU) {
            float u0 = total(part, b, 64 + r, split), u1 = total(part, b, 65 + r, split);

            // rounded as the product alone would be, then as the many-row kernel computes
            y0 = to_f(from_f<T>(y0));
            y1 = to_f(from_f<T>(y1));
            y0 = y0 / (1 + __expf(-y0)) * to_f(from_f<T>(u0));
            y1 = y1 / (1 + __expf(-y1)) * to_f(from_f<T>(u1));
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
            y0 += a.bias[n0 + r];
            y1 += a.bias[n0 + r + 1];
        }
        *out = Vec2<T>{{from_f<T>(y0), from_f<T>(y1)}};
    }
}

// A tile is one head of 128 or two of 64; a warp takes one head of one row.
template <typename T, int E>
__device__ void store_heads(const Args &a, const float *part, int tile, int rank, int split, int b0,
                            int rows)
{
    constexpr int D = 64 * E, PER = 128 / D;
    int warp = threadIdx.x / 32, lane = threadIdx.x & 31;

    for (int u = rank * 8 + warp; u < rows * PER; u += split * 8) {
        int b = u / PER, in_tile = u % PER, head = tile * PER + in_tile;
        float va[E], vb[E];

        if (head * D >= a.n)
            continue;
#pragma unroll
        for (int j = 0; j < E; j++) {
            HeadPlace at = pair_at(lane * E + j, D / 2, a.heads.interleaved);

            va[j] = total(part, b, in_tile * D + at.a, split);
            vb[j] = total(part, b, in_tile * D + at.b, split);
            if (a.bias) {
                va[j] += a.bias[head * D + at.a];
                vb[j] += a.bias[head * D + at.b];
            }
        }
        finish_head<T, E>(a.heads, b0 + b, head, va, vb,
                          (T *)a.out + (size_t)(b0 + b) * a.out_stride);
    }
}

template <typename T, int NB, int KIND>
__global__ void __launch_bounds__(THREADS)
    stream_gemm(const __grid_constant__ CUtensorMap w, const __grid_constant__ CUtensorMap x,
                const __grid_constant__ Args a)
{
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
            barrier_init(&ring.empty[i], CONSUMERS / 32);
        }
        barrier_init_done();
    }
    __syncthreads();
    if (threadIdx.x >= CONSUMERS) {
        if (threadIdx.x == CONSUMERS) {
            int row_a = KIND == KN_STREAM_SWIGLU ? tile * 64 : tile * 128;
            int row_b = KIND == KN_STREAM_SWIGLU ? a.n / 2 + tile * 64 : tile * 128 + 64;

            produce<NB>(&w, &x, a, ring, stages, row_a, row_b, b0, c0, c1);
        }
    } else {
        consume<T, NB>(a, ring, stages, c1 - c0, part);
        asm volatile("bar.sync 1, 256;" ::: "memory");
    }
    if (split > 1)
        cluster_sync();
    if (threadIdx.x < CONSUMERS) {
        wait_before();
        if (KIND != KN_STREAM_QKV)
            store<T, KIND>(a, part, tile, rank, split, b0, rows);
        else if (a.heads.head_dim == 128)
            store_heads<T, 2>(a, part, tile, rank, split, b0, rows);
        else
            store_heads<T, 1>(a, part, tile, rank, split, b0, rows);
    }
    if (split > 1)
        cluster_sync(); // the others may still read this block's sums
}

template <typename T, int NB, int KIND> int run(const kn_cuda_stream_gemm_args *a, cudaStream_t s)
{
    constexpr int STAGE = W_BYTES + NB * 128, PART = NB * PART_LD * 4;
    int tiles = KIND == KN_STREAM_SWIGLU ? (a->n / 2 + 63) / 64 : (a->n + 127) / 128;
    int chunks = (a->k + KC - 1) / KC, split = a->split, stages = a->stages;

    while (split == 0) { // so many that the card is nearly full, and not short of work each
        split = 1;
        while (split < 8 && tiles * split * 2 <= 160 && chunks / (split * 2) >= 8)
            split *= 2;
    }
    if (stages == 0) {
        stages = 100 * 1024 / STAGE;
        if (tiles * split > 132) // two of this product and one of the next on a multiprocessor
            stages = 72 * 1024 / STAGE;
        stages = stages > 6 ? 6 : stages;
    }
    while (stages * STAGE < PART)
        stages++;
    stages = stages > MAX_STAGES ? MAX_STAGES : stages;
    Args args = {};
    args.n = a->n;
    args.chunks = chunks;
    args.rows = a->rows;
    args.stages = stages;
    args.prefetch = a->prefetch < 0 ? 12 : a->prefetch;
    args.bias = a->bias;
    args.out = a->out;
    args.out_stride = a->out_stride;
    if (a->heads)
        args.heads = *a->heads;
    CUtensorMap w, x;
    memcpy(&w, a->w, sizeof(w));
    memcpy(&x, a->x, sizeof(x));
    return launch(stream_gemm<T, NB, KIND>, dim3(split, tiles, (a->rows + NB - 1) / NB), THREADS,
                  (size_t)stages * STAGE + 1024, split, s, w, x, args);
}

template <typename T, int NB> int by_kind(const kn_cuda_stream_gemm_args *a, cudaStream_t s)
{
    switch (a->kind) {
    case KN_STREAM_STORE:
        return run<T, NB, KN_STREAM_STORE>(a, s);
    case KN_STREAM_ADD:
        return run<T, NB, KN_STREAM_ADD>(a, s);
    case KN_STREAM_SWIGLU:
        return run<T, NB, KN_STREAM_SWIGLU>(a, s);
    case KN_STREAM_F32:
        return run<T, NB, KN_STREAM_F32>(a, s);
    case KN_STREAM_QKV:
        return run<T, NB, KN_STREAM_QKV>(a, s);
    }
    return cudaErrorInvalidValue;
}

template <typename T> int by_rows(const kn_cuda_stream_gemm_args *a, cudaStream_t s)
{
    switch (kn_cuda_stream_box(a->rows)) {
    case 8:
        return by_kind<T, 8>(a, s);
    case 16:
        return by_kind<T, 16>(a, s);
    case 32:
        return by_kind<T, 32>(a, s);
    case 64:
        return by_kind<T, 64>(a, s);
    default:
        return by_kind<T, 128>(a, s);
    }
}

template <typename T, int NB, int KIND> int allow()
{
    return cudaFuncSetAttribute(stream_gemm<T, NB, KIND>,
                                cudaFuncAttributeMaxDynamicSharedMemorySize, 220 * 1024);
}
template <typename T, int NB> int allow_kinds()
{
    int rc = allow<T, NB, KN_STREAM_STORE>();

    rc = rc ? rc : allow<T, NB, KN_STREAM_ADD>();
    rc = rc ? rc : allow<T, NB, KN_STREAM_SWIGLU>();
    rc = rc ? rc : allow<T, NB, KN_STREAM_F32>();
    return rc ? rc : allow<T, NB, KN_STREAM_QKV>();
}
template <typename T> int allow_all()
{
    int rc = allow_kinds<T, 8>();

    rc = rc ? rc : allow_kinds<T, 16>();
    rc = rc ? rc : allow_kinds<T, 32>();
    rc = rc ? rc : allow_kinds<T, 64>();
    return rc ? rc : allow_kinds<T, 128>();
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
