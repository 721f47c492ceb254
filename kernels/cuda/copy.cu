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

// Pages on the device are permuted (attn/attn.h), others are not: what is read at i comes from the place
// where the other side has it, either way. A unit is a page in a layer.
__global__ void __launch_bounds__(1024) pages_kernel(kn_cuda_pages_args a)
{
    size_t n = a.page_stride / 16, step = blockDim.x;
    int row = __ffs(a.head_bytes / 16) - 1;
    auto place = [row](size_t i) { return i ^ (i >> row & 7); };
    long units = (long)a.n * a.n_layers;

    for (long u = blockIdx.x; u < units; u += gridDim.x) {
        size_t at = (size_t)(a.first_layer + u / a.n) * a.layer_stride +
                    (size_t)a.pages[u % a.n] * a.page_stride;
        const uint4 *from = (const uint4 *)(a.from + at);
        uint4 *to = (uint4 *)(a.to + at);
        size_t i = threadIdx.x;

        for (; i + 3 * step < n; i += 4 * step) {
            uint4 v0 = from[place(i)], v1 = from[place(i + step)], v2 = from[place(i + 2 * step)],
                  v3 = from[place(i + 3 * step)];

            to[i] = v0;
            to[i + step] = v1;
            to[i + 2 * step] = v2;
            to[i + 3 * step] = v3;
        }
        for (; i < n; i += step)
            to[i] = from[place(i)];
    }
}

// A unit is what a row has of one head of K or V; rows fastest: neighbours lie side by side.
__global__ void __launch_bounds__(1024) rows_kernel(kn_cuda_pages_args a)
{
    int vecs = a.head_bytes / 16, per_block = blockDim.x / vecs, lane = threadIdx.x % vecs;
    long units = (long)a.rows * 2 * a.n_kv_heads * a.n_layers;
    long step = (long)gridDim.x * per_block;

    if ((int)threadIdx.x >= per_block * vecs)
        return;
#pragma unroll 4
    for (long u = (long)blockIdx.x * per_block + threadIdx.x / vecs; u < units; u += step) {
        int row = (int)(u % a.rows), head = (int)(u / a.rows % (2 * a.n_kv_heads));
        int layer = a.first_layer + (int)(u / a.rows / (2 * a.n_kv_heads)), page = a.page[row];

        if (page < 0)
            continue;
        size_t at = (size_t)layer * a.layer_stride + (size_t)page * a.page_stride +
                    ((size_t)head * a.page_tokens + (a.pos[row] & (a.page_tokens - 1))) *
                        a.head_bytes;
        ((uint4 *)(a.to + at))[lane] = ((const uint4 *)(a.from + at))[lane ^ (a.pos[row] & 7)];
    }
}

} // namespace

int kn_cuda_copy_pages(const struct kn_cuda_pages_args *a, kn_cuda_stream s)
{
    if (a->n < 1)
        return 0;
    pages_kernel<<<a->blocks, 1024, 0, s>>>(*a);
    return cudaGetLastError();
}

int kn_cuda_copy_rows(const struct kn_cuda_pages_args *a, kn_cuda_stream s)
{
    if (a->rows < 1)
        return 0;
    rows_kernel<<<a->blocks, 1024, 0, s>>>(*a);
    return cudaGetLastError();
}

int kn_cuda_copy_blocks(const struct kn_cuda_copy_args *a, kn_cuda_stream s)
{
    int blocks = a->blocks < a->n ? a->blocks : a->n;

    return blocks > 0 ? launch(copy_kernel, dim3(blocks), 1024, 0, 1, s, *a) : 0;
}
