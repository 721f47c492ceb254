// Shared by the kernels of this folder: 16-bit dtypes, launches that overlap, warp sums.
#ifndef KN_CUDA_COMMON_CUH
#define KN_CUDA_COMMON_CUH

#define _Alignas alignas
#include "kernels/cuda/kernels.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

namespace {

using bf16 = __nv_bfloat16;
using f16 = __half;

__device__ inline float to_f(bf16 x) { return __bfloat162float(x); }
__device__ inline float to_f(f16 x) { return __half2float(x); }
template <typename T> __device__ inline T from_f(float x);
template <> __device__ inline bf16 from_f<bf16>(float x) { return __float2bfloat16_rn(x); }
template <> __device__ inline f16 from_f<f16>(float x) { return __float2half_rn(x); }

template <typename T> struct alignas(16) Vec8 {
    T v[8];
};
template <typename T> struct alignas(4) Vec2 {
    T v[2];
};

// The kernel before this one in the stream has ended and its writes are seen.
__device__ inline void wait_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
// The next kernel in the stream may start once every block has said so.
__device__ inline void let_next() { asm volatile("griddepcontrol.launch_dependents;" :::); }

__device__ inline float warp_sum(float x)
{
    for (int d = 16; d > 0; d >>= 1)
        x += __shfl_xor_sync(0xffffffffu, x, d);
    return x;
}

// Launch that may overlap the kernel before it; `cluster` blocks along x share their shared memory.
template <typename... P, typename... A>
int launch(void (*kernel)(P...), dim3 grid, int threads, size_t smem, int cluster, cudaStream_t s,
           A... args)
{
    cudaLaunchAttribute attr[2];
    cudaLaunchConfig_t c = {};

    attr[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attr[0].val.programmaticStreamSerializationAllowed = 1;
    attr[1].id = cudaLaunchAttributeClusterDimension;
    attr[1].val.clusterDim.x = cluster;
    attr[1].val.clusterDim.y = 1;
    attr[1].val.clusterDim.z = 1;
    c.gridDim = grid;
    c.blockDim = dim3(threads);
    c.dynamicSmemBytes = smem;
    c.stream = s;
    c.attrs = attr;
    c.numAttrs = cluster > 1 ? 2 : 1;
    return cudaLaunchKernelEx(&c, kernel, P(args)...);
}

// Element `e` of the row of position `pos` in the pages (attn/attn.h).
__device__ inline int in_page(int pos, int e) { return e ^ (pos & 7) << 3; }

// Rotary embedding, norm and page writes of one head by one warp. Lane holds pairs
// lane * E .. of D/2, E = D/64 rounded up; `a` and `b` are the two elements of each pair.
struct HeadPlace {
    int a, b; // elements of the head
};
__device__ inline HeadPlace pair_at(int p, int half, bool interleaved)
{
    return interleaved ? HeadPlace{2 * p, 2 * p + 1} : HeadPlace{p, p + half};
}

} // namespace

#endif
