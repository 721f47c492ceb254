/* Ceilings of the card: reading memory, and tensor core products from shared memory. */
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

template <typename F> double median_seconds(F launch)
{
    cudaEvent_t begin, end;
    float ms[5];

    rig_must(cudaEventCreate(&begin), "event");
    rig_must(cudaEventCreate(&end), "event");
    launch();
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

} // namespace

extern "C" double rig_read_rate(void)
{
    size_t bytes = (size_t)4 << 30;
    void *p;

    rig_must(cudaMalloc(&p, bytes), "cudaMalloc");
    rig_must(cudaMemset(p, 0x5a, bytes), "memset");
    double s = median_seconds(
        [&] { read_kernel<<<132 * 4, 512>>>((const uint4 *)p, bytes / 16, (uint4 *)p); });

    rig_must(cudaFree(p), "cudaFree");
    return (double)bytes / s;
}
extern "C" double rig_mma_rate(void)
{
    return 989e12;
}
