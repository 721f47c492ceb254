/* Launches of the attention kernels, by type and width of a head.
 *
 * Every launch fills the card once: blocks that find no items in the plan end at once. */
#include "kernels/cuda/attn/prefill.cuh"
#include "kernels/cuda/attn/unit.cuh"

#include <cudaTypedefs.h>
#include <cuda_runtime.h>

namespace {

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
    constexpr int S = KN_ATTN_DECODE_STAGES;

    return {(const void *)attn::unit_kernel<T, D, 1, S, kn_attn_decode_blocks(D)>,
            sizeof(attn::unit_smem<D, 1, S>)};
}

template <typename T, int D> choice prefill_choice(bool invariant)
{
    if (invariant) {
        return {(const void *)attn::prefill_kernel<T, D, true>,
                sizeof(attn::prefill_smem<D, true>)};
    }
    return {(const void *)attn::prefill_kernel<T, D, false>, sizeof(attn::prefill_smem<D, false>)};
}

choice choose(const kn_cuda_attn_shape *s, bool decode)
{
    bool wide = s->head_dim == 128;

    if (s->dtype == KN_CUDA_BF16) {
        if (wide) {
            return decode ? decode_choice<__nv_bfloat16, 128>()
                          : prefill_choice<__nv_bfloat16, 128>(s->invariant);
        }
        return decode ? decode_choice<__nv_bfloat16, 64>()
                      : prefill_choice<__nv_bfloat16, 64>(s->invariant);
    }
    if (wide) {
        return decode ? decode_choice<__half, 128>() : prefill_choice<__half, 128>(s->invariant);
    }
    return decode ? decode_choice<__half, 64>() : prefill_choice<__half, 64>(s->invariant);
}

/* The driver's function by way of the runtime, so that nothing links to the driver. */
PFN_cuTensorMapEncodeTiled_v12000 encoder()
{
    void *f = nullptr;
    cudaDriverEntryPointQueryResult found;

    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &f, 12000, cudaEnableDefault,
                                     &found);
    return (PFN_cuTensorMapEncodeTiled_v12000)f;
}

/* All pages of a layer: column, position, head (K, then V), page. How many pages there are is not
 * known here; page tables name those that exist. */
int page_map(const kn_cuda_attn_shape *s, const void *kv, CUtensorMap *map)
{
    static const PFN_cuTensorMapEncodeTiled_v12000 encode = encoder();
    cuuint64_t row = (cuuint64_t)s->head_dim * 2, head = row * (cuuint64_t)s->page_tokens;
    cuuint64_t size[4] = {(cuuint64_t)s->head_dim, (cuuint64_t)s->page_tokens,
                          (cuuint64_t)s->n_kv_heads * 2, (cuuint64_t)1 << 30};
    cuuint64_t stride[3] = {row, head, s->page_stride};
    cuuint32_t box[4] = {64, (cuuint32_t)(s->page_tokens < 128 ? s->page_tokens : 128), 1, 1};
    cuuint32_t step[4] = {1, 1, 1, 1};

    if (!encode) {
        return cudaErrorNotSupported;
    }
    CUresult rc = encode(map,
                         s->dtype == KN_CUDA_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                  : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
                         4, (void *)kv, size, stride, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
                         CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                         CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);

    return rc == CUDA_SUCCESS ? 0 : cudaErrorInvalidValue;
}

} // namespace

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
    kn_attn_cut cut = kn_attn_cut_decode(s);
    attn::launch p = launch_of(s, a, cut);
    choice c = choose(s, true);
    void *args[] = {&p};

    return start(c.kernel, cut.n_blocks, attn::UNIT_THREADS, c.smem, args, stream);
}

extern "C" int
kn_cuda_attn_prefill(const kn_cuda_attn_shape *s, const kn_cuda_attn_args *a, CUstream_st *stream)
{
    kn_attn_cut cut = kn_attn_cut_prefill(s);
    attn::launch p = launch_of(s, a, cut);
    choice c = choose(s, false);
    CUtensorMap map;
    void *args[] = {&p, &map};
    int rc = page_map(s, a->kv, &map);

    return rc ? rc : start(c.kernel, cut.n_blocks, attn::PREFILL_THREADS, c.smem, args, stream);
}
