/* Launches of the attention kernels, by type and width of a head.
 *
 * Every launch fills the card once: blocks that find no items in the plan end at once. */
#include "kernels/cuda/attn/unit.cuh"

#include <cuda_runtime.h>

namespace {

constexpr int PREFILL_MT = 2;

/* Blocks on a multiprocessor; bound by shared memory for D = 128, by registers for 64. */
constexpr int decode_blocks(int d)
{
    return d == 128 ? 3 : 4;
}

constexpr int prefill_blocks(int d)
{
    return d == 128 ? 2 : 3;
}

int log2_of(int x)
{
    int n = 0;

    while (1 << n < x) {
        n++;
    }
    return n;
}

attn::launch launch_of(const kn_cuda_attn_shape *s, const kn_cuda_attn_args *a, kn_attn_cut cut)
{
    attn::launch p = {};

    p.q = a->q;
    p.kv = (const char *)a->kv;
    p.row_start = a->row_start;
    p.ctx_len = a->ctx_len;
    p.pages = a->pages;
    p.plan = (const kn_attn_plan *)a->plan;
    p.out = a->out;
    p.counters = (int32_t *)a->workspace;
    p.records = (float *)((char *)a->workspace + KN_ATTN_COUNTER_BYTES);
    p.q_stride = a->q_stride;
    p.out_stride = a->out_stride;
    p.page_stride = s->page_stride;
    p.pages_stride = a->pages_stride;
    p.page_shift = log2_of(s->page_tokens);
    p.n_heads = s->n_heads;
    p.n_kv_heads = s->n_kv_heads;
    p.group = s->n_heads / s->n_kv_heads;
    p.record_rows = kn_attn_record_rows(cut.block_rows, p.group);
    p.c = s->scale * 1.4426950408889634f;
    return p;
}

cudaError_t
start(const void *kernel, int blocks, int threads, size_t smem, void **args, CUstream_st *stream)
{
    cudaLaunchConfig_t config = {};
    cudaLaunchAttribute overlap;

    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
    config.gridDim = dim3((unsigned)blocks);
    config.blockDim = dim3((unsigned)threads);
    config.dynamicSmemBytes = smem;
    config.stream = stream;
    config.attrs = &overlap;
    config.numAttrs = 1;
    return cudaLaunchKernelExC(&config, kernel, args);
}

/* A kernel for a shape and what it takes to launch it. */
struct choice {
    const void *kernel;
    size_t smem;
};

template <typename T, int D> choice decode_choice()
{
    return {(const void *)attn::unit_kernel<T, D, 1, decode_blocks(D)>,
            sizeof(attn::unit_smem<D, 1>)};
}

template <typename T, int D> choice prefill_choice()
{
    return {(const void *)attn::unit_kernel<T, D, PREFILL_MT, prefill_blocks(D)>,
            sizeof(attn::unit_smem<D, PREFILL_MT>)};
}

choice choose(const kn_cuda_attn_shape *s, bool decode)
{
    bool wide = s->head_dim == 128;

    if (s->dtype == KN_CUDA_BF16) {
        if (wide) {
            return decode ? decode_choice<__nv_bfloat16, 128>()
                          : prefill_choice<__nv_bfloat16, 128>();
        }
        return decode ? decode_choice<__nv_bfloat16, 64>() : prefill_choice<__nv_bfloat16, 64>();
    }
    if (wide) {
        return decode ? decode_choice<__half, 128>() : prefill_choice<__half, 128>();
    }
    return decode ? decode_choice<__half, 64>() : prefill_choice<__half, 64>();
}

int run(const kn_cuda_attn_shape *s, const kn_cuda_attn_args *a, CUstream_st *stream, bool decode)
{
    kn_attn_cut cut = decode ? kn_attn_cut_decode(s) : kn_attn_cut_prefill(s);
    attn::launch p = launch_of(s, a, cut);
    choice c = choose(s, decode);
    void *args[] = {&p};

    return start(c.kernel, cut.n_blocks, attn::UNIT_THREADS, c.smem, args, stream);
}

} // namespace

extern "C" kn_attn_cut kn_attn_cut_decode(const kn_cuda_attn_shape *s)
{
    return {s->n_sms * decode_blocks(s->head_dim), 16};
}

extern "C" kn_attn_cut kn_attn_cut_prefill(const kn_cuda_attn_shape *s)
{
    return {s->n_sms * prefill_blocks(s->head_dim), 16 * PREFILL_MT};
}

extern "C" bool kn_cuda_attn_supports(const kn_cuda_attn_shape *s, int compute_capability)
{
    bool power = s->page_tokens >= 8 && s->page_tokens <= 256 &&
                 (s->page_tokens & (s->page_tokens - 1)) == 0;

    return compute_capability == 90 && power && (s->head_dim == 64 || s->head_dim == 128) &&
           s->n_kv_heads > 0 && s->n_heads % s->n_kv_heads == 0 && s->page_stride % 16 == 0;
}

extern "C" int kn_cuda_attn_init(const kn_cuda_attn_shape *s)
{
    for (int decode = 0; decode < 2; decode++) {
        choice c = choose(s, decode != 0);
        cudaError_t e = cudaFuncSetAttribute(c.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                             (int)c.smem);

        if (e == cudaSuccess) {
            e = cudaFuncSetAttribute(c.kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                     cudaSharedmemCarveoutMaxShared);
        }
        if (e != cudaSuccess) {
            return e;
        }
    }
    return 0;
}

extern "C" int
kn_cuda_attn_decode(const kn_cuda_attn_shape *s, const kn_cuda_attn_args *a, CUstream_st *stream)
{
    return run(s, a, stream, true);
}

extern "C" int
kn_cuda_attn_prefill(const kn_cuda_attn_shape *s, const kn_cuda_attn_args *a, CUstream_st *stream)
{
    return run(s, a, stream, false);
}
