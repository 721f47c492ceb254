/* Instructions that CUDA C has no words for, and the arithmetic that all kernels here share.
 *
 * What happens to a row in a unit of positions, to the bit: scores are one chain of tensor core
 * products over D, ascending; m is their largest; weights are exp2(score * c - m * c), summed over
 * four quarters of the unit (each lane its columns, ascending), the quarters as (0 + 1) + (2 + 3),
 * then lanes by butterflies; weights rounded to the type of V times V are one chain of tensor core
 * products over the positions, ascending, from zero. Two sums are joined by merge(). */
#ifndef KN_CUDA_ATTN_MMA_CUH
#define KN_CUDA_ATTN_MMA_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

namespace attn {

__device__ __forceinline__ uint32_t smem_u32(const void *p)
{
    return (uint32_t)__cvta_generic_to_shared(p);
}

__device__ __forceinline__ void grid_wait()
{
    asm volatile("griddepcontrol.wait;" ::: "memory");
}

__device__ __forceinline__ void grid_launch_dependents()
{
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

/* Barrier `id` of the block, of N threads. */
template <int N> __device__ __forceinline__ void named_sync(int id)
{
    asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(N) : "memory");
}

template <int N> __device__ __forceinline__ void named_arrive(int id)
{
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "n"(N) : "memory");
}

/* 16 bytes; zeros where !valid. */
__device__ __forceinline__ void cp_async16(uint32_t dst, const void *src, bool valid)
{
    int n = valid ? 16 : 0;

    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(dst), "l"(src),
                 "r"(n)
                 : "memory");
}

__device__ __forceinline__ void cp_commit()
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}

template <int N> __device__ __forceinline__ void cp_wait()
{
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

__device__ __forceinline__ void ldsm4(uint32_t r[4], uint32_t addr)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(addr)
                 : "memory");
}

__device__ __forceinline__ void ldsm4_t(uint32_t r[4], uint32_t addr)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(addr)
                 : "memory");
}

template <typename T> struct num;

template <> struct num<__nv_bfloat16> {
    static constexpr bool bf16 = true;

    static __device__ __forceinline__ uint32_t pack(float lo, float hi)
    {
        __nv_bfloat162 v = __floats2bfloat162_rn(lo, hi);
        return *(uint32_t *)&v;
    }

    static __device__ __forceinline__ void
    mma(float c[4], const uint32_t a[4], uint32_t b0, uint32_t b1)
    {
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                     "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
};

template <> struct num<__half> {
    static constexpr bool bf16 = false;

    static __device__ __forceinline__ uint32_t pack(float lo, float hi)
    {
        __half2 v = __floats2half2_rn(lo, hi);
        return *(uint32_t *)&v;
    }

    static __device__ __forceinline__ void
    mma(float c[4], const uint32_t a[4], uint32_t b0, uint32_t b1)
    {
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
                     "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
};

__device__ __forceinline__ float exp2_fast(float x)
{
    float y;

    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* m * c as an offset of exponents; 0 where nothing was seen, so that no difference is NaN. */
__device__ __forceinline__ float offset_of(float m, float c)
{
    return m == -INFINITY ? 0.0f : __fmul_rn(m, c);
}

__device__ __forceinline__ float weight_of(float s, float c, float offset)
{
    return exp2_fast(__fmaf_rn(s, c, -offset));
}

/* Factors that join a sum with maximum `m` (updated) and a later one with maximum `m2`. */
struct factors {
    float a, b;
};

/* 1 for m = n, exactly: joining onto an empty sum changes nothing. */
__device__ __forceinline__ float factor_of(float m, float n, float c)
{
    float d = m == -INFINITY ? -INFINITY : __fsub_rn(m, n);

    return exp2_fast(__fmul_rn(d, c));
}

__device__ __forceinline__ factors merge(float &m, float m2, float c)
{
    float n = fmaxf(m, m2);
    factors f = {factor_of(m, n, c), factor_of(m2, n, c)};

    m = n;
    return f;
}

__device__ __forceinline__ float joined(factors f, float x, float y)
{
    return __fmaf_rn(x, f.a, __fmul_rn(y, f.b));
}

__device__ __forceinline__ float quad_max(float x)
{
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

__device__ __forceinline__ float quad_sum(float x)
{
    x = __fadd_rn(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return __fadd_rn(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

/* What a row of sums becomes at the end; + 0 makes one zero of both. */
__device__ __forceinline__ float final_scale(float l)
{
    return l > 0.0f ? __frcp_rn(l) : 0.0f;
}

__device__ __forceinline__ float finished(float x, float inv)
{
    return __fmaf_rn(x, inv, 0.0f);
}

} // namespace attn

#endif
