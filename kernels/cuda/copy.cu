/* Pieces of memory from place to place by a few multiprocessors: blocks of KV between pages, host
 * tier and peers. Four 16-byte loads a thread are on their way at once; 2 to 4 blocks of 1,024
 * threads fill PCIe (measured 49-52 of 55 GB/s for scattered 128 KiB), 8 fill NVLink. */
#include "kernels/cuda/common.cuh"

namespace {

__global__ void __launch_bounds__(1024) copy_kernel(kn_cuda_copy_args a)
{
    let_next();
    wait_before();
    size_t n = a.bytes / 16, step = blockDim.x;

    for (int b = blockIdx.x; b < a.n; b += gridDim.x) {
        const uint4 *from = (const uint4 *)a.src[b];
        uint4 *to = (uint4 *)a.dst[b];
        size_t i = threadIdx.x;

        for (; i + 3 * step < n; i += 4 * step) {
            uint4 v0 = from[i], v1 = from[i + step], v2 = from[i + 2 * step], v3 = from[i + 3 * step];

            to[i] = v0;
            to[i + step] = v1;
            to[i + 2 * step] = v2;
            to[i + 3 * step] = v3;
        }
        for (; i < n; i += step)
            to[i] = from[i];
    }
}

} // namespace

int kn_cuda_copy_blocks(const struct kn_cuda_copy_args *a, kn_cuda_stream s)
{
    int blocks = a->blocks < a->n ? a->blocks : a->n;

    return blocks > 0 ? launch(copy_kernel, dim3(blocks), 1024, 0, 1, s, *a) : 0;
}
