/* Ceilings of the card: reading memory, and tensor core products from shared memory. */
#include "kernels/cuda/attn/hopper.cuh"
#include "tests/gpu/attn_rig.h"

#include <cuda_runtime.h>

namespace {

__global__ void __launch_bounds__(512) read_kernel(const uint4 *p, size_t n, uint4 *sink)
{
    uint4 s = make_uint4(0, 0, 0, 0);
    size_t step = (size_t)gridDim.x * blockDim.x;

#pragma unroll 8
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step) {
        uint4 x = __ldcs(p + i);

        s.x ^= x.x;
        s.y ^= x.y;
        s.z ^= x.z;
        s.w ^= x.w;
    }
    if (s.x == 0x12345678 && s.y == 0x9abcdef0) {
        *sink = s;
    }
}

constexpr int MMA_TURNS = 4096;
constexpr int MMA_STEPS = 4; /* of 16, over the 64 columns that lie in shared memory */
constexpr int MMA_GROUPS = 2;

/* Two warpgroups, each 64 rows of its own times 128 rows of both; random values between -2 and 2,
 * for products of zeros cost less. */
__global__ void __launch_bounds__(128 * MMA_GROUPS, 1) mma_kernel(float *sink)
{
    __shared__ __align__(1024) uint16_t rows[(64 * MMA_GROUPS + 128) * 64];
    const int wg = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
    float d[64];

    for (int i = threadIdx.x; i < (64 * MMA_GROUPS + 128) * 64; i += blockDim.x) {
        uint32_t h = (uint32_t)(i + blockIdx.x * 40503) * 2654435761u;

        rows[i] = (uint16_t)((h >> 16 & 0x807f) | (0x3f80 - (h >> 8 & 3) * 0x80));
    }
    attn::fence_async();
    __syncthreads();
    const attn::operand a(attn::smem_u32(rows) + wg * 64 * 128, 16);
    const attn::operand b(attn::smem_u32(rows) + 64 * MMA_GROUPS * 128, 16);

    attn::products_fence();
    attn::products<__nv_bfloat16, 128>::ss_set(d, a.plus(0), b.plus(0));
    attn::products_commit();
    for (int n = 0; n < MMA_TURNS; n++) {
#pragma unroll
        for (int k = 0; k < MMA_STEPS; k++) {
            attn::products<__nv_bfloat16, 128>::ss_add(d, a.plus(k * 32), b.plus(k * 32));
        }
        attn::products_commit();
        attn::products_wait<1>();
    }
    attn::products_wait<0>();
    attn::hold(d);
    for (int i = 0; i < 64; i++) {
        if (d[i] == 1.25e-30f) {
            *sink = d[i];
        }
    }
}

template <typename F> double median_seconds(F launch)
{
    cudaEvent_t begin, end;
    float ms[5];

    rig_must(cudaEventCreate(&begin), "event");
    rig_must(cudaEventCreate(&end), "event");
    launch();
    rig_must(cudaGetLastError(), "launch");
    for (int i = 0; i < 5; i++) {
        rig_must(cudaEventRecord(begin), "event");
        launch();
        rig_must(cudaEventRecord(end), "event");
        rig_must(cudaEventSynchronize(end), "run");
        rig_must(cudaEventElapsedTime(&ms[i], begin, end), "event");
        for (int j = i; j > 0 && ms[j] < ms[j - 1]; j--) {
            float t = ms[j];

            ms[j] = ms[j - 1];
            ms[j - 1] = t;
        }
    }
    rig_must(cudaEventDestroy(begin), "event");
    rig_must(cudaEventDestroy(end), "event");
    return ms[2] / 1e3;
}

int n_sms()
{
    int n = 0;

    rig_must(cudaDeviceGetAttribute(&n, cudaDevAttrMultiProcessorCount, 0), "attribute");
    return n;
}

} // namespace

extern "C" double rig_read_rate(void)
{
    size_t bytes = (size_t)4 << 30;
    void *p;
    int blocks = n_sms() * 4;

    rig_must(cudaMalloc(&p, bytes), "cudaMalloc");
    rig_must(cudaMemset(p, 0x5a, bytes), "memset");
    double s = median_seconds(
        [&] { read_kernel<<<blocks, 512>>>((const uint4 *)p, bytes / 16, (uint4 *)p); });

    rig_must(cudaFree(p), "cudaFree");
    return (double)bytes / s;
}

extern "C" double rig_mma_rate(void)
{
    void *p;
    int blocks = n_sms();

    rig_must(cudaMalloc(&p, 64), "cudaMalloc");
    double s = median_seconds([&] { mma_kernel<<<blocks, 128 * MMA_GROUPS>>>((float *)p); });

    rig_must(cudaFree(p), "cudaFree");
    return 2.0 * 64 * 128 * 16 * (MMA_STEPS * MMA_TURNS + 1) * MMA_GROUPS * blocks / s;
}
