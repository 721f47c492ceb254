/* Hopper's own instructions: barriers in shared memory, tensor copies, warpgroup products. */
#ifndef KN_CUDA_ATTN_HOPPER_CUH
#define KN_CUDA_ATTN_HOPPER_CUH

#include "kernels/cuda/attn/mma.cuh"

#include <cuda.h>

namespace attn {

/* Barriers are named by their addresses in shared memory. */
__device__ __forceinline__ void barrier_init(uint32_t b, int count)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(b), "r"(count));
}

/* Makes initialized barriers known to the copy engine. */
__device__ __forceinline__ void barrier_init_done()
{
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32_t b)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(b) : "memory");
}

/* Arrives, and lets the phase wait for so many bytes more. */
__device__ __forceinline__ void barrier_expect(uint32_t b, uint32_t bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(b), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void barrier_wait(uint32_t b, uint32_t parity)
{
    asm volatile("{\n"
                 ".reg .pred done;\n"
                 "again:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra again;\n"
                 "}" ::"r"(b),
                 "r"(parity)
                 : "memory");
}

__device__ __forceinline__ bool barrier_is_done(uint32_t b, uint32_t parity)
{
    uint32_t done;

    asm volatile("{\n"
                 ".reg .pred done;\n"
                 "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
                 "selp.u32 %0, 1, 0, done;\n"
                 "}"
                 : "=r"(done)
                 : "r"(b), "r"(parity)
                 : "memory");
    return done != 0;
}

/* Place in a ring of N stages that both sides walk in step. */
template <int N> struct ring {
    int stage;
    uint32_t parity;

    __device__ __forceinline__ void next()
    {
        if (++stage == N) {
            stage = 0;
            parity ^= 1;
        }
    }
};

/* A box of the map of all pages: from column x, position y of the page, head z (K heads, then V
 * heads), page w. */
__device__ __forceinline__ void
copy_box(uint32_t dst, const CUtensorMap *map, uint32_t full, int x, int y, int z, int w)
{
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(dst),
                 "l"(map), "r"(full), "r"(x), "r"(y), "r"(z), "r"(w)
                 : "memory");
}

/* What is read once in a pass leaves the second-level cache first. */
__device__ __forceinline__ uint64_t read_once()
{
    uint64_t policy;

    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

/* A run of memory, 16-byte aligned, a multiple of 16 bytes. */
__device__ __forceinline__ void
copy_run(uint32_t dst, const void *src, uint32_t bytes, uint32_t full, uint64_t policy)
{
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
                 "[%0], [%1], %2, [%3], %4;" ::"r"(dst),
                 "l"(src), "r"(bytes), "r"(full), "l"(policy)
                 : "memory");
}

/* Ordinary writes to shared memory become visible to tensor cores and the copy engine. */
__device__ __forceinline__ void fence_async()
{
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

template <int N> __device__ __forceinline__ void more_registers()
{
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}

template <int N> __device__ __forceinline__ void fewer_registers()
{
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}

/* Operands in shared memory: rows of 64 elements of 16 bits in 128 bytes with the 128-byte swizzle,
 * 8 rows after 8 rows. `wide`: bytes between halves of a transposed operand wider than 64. `plus`
 * moves on by so many bytes: an addition to the low word, so that no table of operands is kept. */
struct operand {
    uint32_t low;

    __device__ __forceinline__ operand(uint32_t addr, uint32_t wide)
        : low((addr >> 4) | (wide >> 4) << 16)
    {
    }
    __device__ __forceinline__ uint64_t plus(uint32_t bytes) const
    {
        return (uint64_t)((1024 >> 4) | 1u << 30) << 32 | (low + (bytes >> 4));
    }
};

__device__ __forceinline__ void products_fence()
{
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void products_commit()
{
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

/* As products_wait<0>, in a place of its own: equal ones in two branches would become one before
 * them. */
__device__ __forceinline__ void products_wait_here()
{
    asm volatile("// here\n\twgmma.wait_group.sync.aligned 0;" ::: "memory");
}

template <int N> __device__ __forceinline__ void products_wait()
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

/* What was computed of these before stays before, and what comes after stays after. */
template <int N> __device__ __forceinline__ void hold(float (&x)[N])
{
#pragma unroll
    for (int i = 0; i < N; i++) {
        asm volatile("" : "+f"(x[i])::"memory");
    }
}

#define ATTN_S4(a, b, c, d) "%" #a ",%" #b ",%" #c ",%" #d
#define ATTN_S32                                                                                   \
    ATTN_S4(0, 1, 2, 3)                                                                            \
    "," ATTN_S4(4, 5, 6, 7) "," ATTN_S4(8, 9, 10, 11) "," ATTN_S4(12, 13, 14, 15) "," ATTN_S4(     \
        16, 17, 18, 19) "," ATTN_S4(20, 21, 22, 23) "," ATTN_S4(24, 25, 26,                        \
                                                                27) "," ATTN_S4(28, 29, 30, 31)
#define ATTN_S64                                                                                   \
    ATTN_S32                                                                                       \
    "," ATTN_S4(32, 33, 34, 35) "," ATTN_S4(36, 37, 38, 39) "," ATTN_S4(                           \
        40, 41, 42,                                                                                \
        43) "," ATTN_S4(44, 45, 46,                                                                \
                        47) "," ATTN_S4(48, 49, 50,                                                \
                                        51) "," ATTN_S4(52, 53, 54,                                \
                                                        55) "," ATTN_S4(56, 57, 58,                \
                                                                        59) "," ATTN_S4(60, 61,    \
                                                                                        62, 63)
#define ATTN_D4(c, i)  c(d[i]), c(d[i + 1]), c(d[i + 2]), c(d[i + 3])
#define ATTN_D16(c, i) ATTN_D4(c, i), ATTN_D4(c, i + 4), ATTN_D4(c, i + 8), ATTN_D4(c, i + 12)
#define ATTN_D32(c)    ATTN_D16(c, 0), ATTN_D16(c, 16)
#define ATTN_D64(c)    ATTN_D32(c), ATTN_D16(c, 32), ATTN_D16(c, 48)

/* d[64, N] = or += A[64, 16] B[16, N] by a warpgroup, asynchronously. Thread t holds of rows
 * 16 (t / 32 % 4) + t % 32 / 4 and 8 below it columns 8 j + 2 (t % 4) and the next:
 * d[4 j], d[4 j + 1] and d[4 j + 2], d[4 j + 3]. */
template <typename T, int N> struct products;

/* ss: A and B in shared memory, B as N rows of 16 (not transposed); rs: A in registers, B as 16
 * rows of N. */
#define ATTN_PRED(x) "{\n.reg .pred p;\nsetp.ne.b32 p, " #x ", 0;\n"
#define ATTN_PRODUCTS(T, NAME, N, REGS, P0, P1, P2, P3, P4)                                        \
    template <> struct products<T, N> {                                                            \
        static __device__ __forceinline__ void ss_set(float (&d)[REGS], uint64_t a, uint64_t b)    \
        {                                                                                          \
            asm volatile(ATTN_PRED(0) "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME       \
                                      "." NAME " {" ATTN_S##REGS "}, %" #P0 ", %" #P1              \
                                                                 ", p, 1, 1, 0, 0;\n}"             \
                         : ATTN_D##REGS("=f")                                                      \
                         : "l"(a), "l"(b));                                                        \
        }                                                                                          \
        static __device__ __forceinline__ void ss_add(float (&d)[REGS], uint64_t a, uint64_t b)    \
        {                                                                                          \
            asm volatile(ATTN_PRED(1) "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME       \
                                      "." NAME " {" ATTN_S##REGS "}, %" #P0 ", %" #P1              \
                                                                 ", p, 1, 1, 0, 0;\n}"             \
                         : ATTN_D##REGS("+f")                                                      \
                         : "l"(a), "l"(b));                                                        \
        }                                                                                          \
        static __device__ __forceinline__ void                                                     \
        rs_set(float (&d)[REGS], const uint32_t *a, uint64_t b)                                    \
        {                                                                                          \
            asm volatile(ATTN_PRED(0) "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME       \
                                      "." NAME " {" ATTN_S##REGS                                   \
                         "}, {%" #P0 ", %" #P1 ", %" #P2 ", %" #P3 "}, %" #P4 ", p, 1, 1, 1;\n}"   \
                         : ATTN_D##REGS("=f")                                                      \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                    \
        }                                                                                          \
        static __device__ __forceinline__ void                                                     \
        rs_add(float (&d)[REGS], const uint32_t *a, uint64_t b)                                    \
        {                                                                                          \
            asm volatile(ATTN_PRED(1) "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME       \
                                      "." NAME " {" ATTN_S##REGS                                   \
                         "}, {%" #P0 ", %" #P1 ", %" #P2 ", %" #P3 "}, %" #P4 ", p, 1, 1, 1;\n}"   \
                         : ATTN_D##REGS("+f")                                                      \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                    \
        }                                                                                          \
    };
ATTN_PRODUCTS(__nv_bfloat16, "bf16", 64, 32, 32, 33, 34, 35, 36)
ATTN_PRODUCTS(__nv_bfloat16, "bf16", 128, 64, 64, 65, 66, 67, 68)
ATTN_PRODUCTS(__half, "f16", 64, 32, 32, 33, 34, 35, 36)
ATTN_PRODUCTS(__half, "f16", 128, 64, 64, 65, 66, 67, 68)

} // namespace attn

#endif
