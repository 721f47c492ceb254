// Hopper's own instructions, one thin function each: barriers in shared memory, the tensor copy
// engine, warpgroup products.
#ifndef KN_CUDA_HOPPER_CUH
#define KN_CUDA_HOPPER_CUH

#include "kernels/cuda/common.cuh"

#include <cuda.h>
#include <cudaTypedefs.h>
#include <string.h>

namespace {

__device__ inline uint32_t smem_addr(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }

__device__ inline void barrier_init(uint64_t *b, int count)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_addr(b)), "r"(count));
}
__device__ inline void barrier_init_done()
{
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ inline void barrier_arrive(uint64_t *b)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(smem_addr(b)) : "memory");
}
__device__ inline void barrier_expect(uint64_t *b, uint32_t bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem_addr(b)),
                 "r"(bytes)
                 : "memory");
}
// `b`: an address in shared memory.
__device__ inline void barrier_wait_at(uint32_t b, uint32_t parity)
{
    asm volatile("{\n"
                 ".reg .pred p;\n"
                 "again:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
                 "@p bra done;\n"
                 "bra again;\n"
                 "done:\n"
                 "}" ::"r"(b),
                 "r"(parity)
                 : "memory");
}
__device__ inline void barrier_wait(uint64_t *b, uint32_t parity)
{
    barrier_wait_at(smem_addr(b), parity);
}

// Box at column c, row r of the matrix into shared memory; the barrier counts its bytes.
__device__ inline void copy_box(void *dst, const CUtensorMap *m, int c, int r, uint64_t *b)
{
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3}], [%4];" ::"r"(smem_addr(dst)),
                 "l"(m), "r"(c), "r"(r), "r"(smem_addr(b))
                 : "memory");
}
// What is read once in a pass leaves the second-level cache first.
__device__ inline uint64_t read_once()
{
    uint64_t policy;

    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
__device__ inline void prefetch_box(const CUtensorMap *m, int c, int r)
{
    asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%0, {%1, %2}];" ::"l"(m), "r"(c),
                 "r"(r)
                 : "memory");
}
__device__ inline void prefetch_map(const CUtensorMap *m)
{
    asm volatile("prefetch.tensormap [%0];" ::"l"(m) : "memory");
}

__device__ inline void cluster_sync()
{
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}
// f32 at the same place of another block of the cluster.
__device__ inline float cluster_read(const float *p, int rank)
{
    uint32_t there;
    float x;

    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(smem_addr(p)), "r"(rank));
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(x) : "r"(there) : "memory");
    return x;
}

__device__ inline float2 cluster_read2(const float *p, int rank)
{
    uint32_t there;
    float2 x;

    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(smem_addr(p)), "r"(rank));
    asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(there) : "memory");
    return x;
}

// A matrix in shared memory, rows of 64 16-bit elements in the 128-byte swizzle, 8 rows 1,024 bytes.
__device__ inline uint64_t mma_desc(const void *p)
{
    return (uint64_t)((smem_addr(p) & 0x3ffff) >> 4) | (uint64_t)1 << 16 | (uint64_t)64 << 32 |
           (uint64_t)1 << 62;
}
__device__ inline void mma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void mma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> __device__ inline void mma_wait()
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

// acc[64, NB] += A [64, 16] B [NB, 16]^T by one warpgroup. Thread t holds of row 16 * (t / 32 % 4) +
// t % 32 / 4 (+ 8) the columns 8 * j + 2 * (t % 4) (+ 1): acc[4 * j + 2 * (+ 8) + (+ 1)].
template <typename T, int NB> struct Mma;

#define KN_S4(a, b, c, d)   "%" #a ",%" #b ",%" #c ",%" #d
#define KN_MMA_4            KN_S4(0, 1, 2, 3)
#define KN_MMA_8            KN_MMA_4 "," KN_S4(4, 5, 6, 7)
#define KN_MMA_16           KN_MMA_8 "," KN_S4(8, 9, 10, 11) "," KN_S4(12, 13, 14, 15)
#define KN_MMA_32                                                                                  \
    KN_MMA_16 "," KN_S4(16, 17, 18, 19) "," KN_S4(20, 21, 22, 23) "," KN_S4(24, 25, 26, 27) ","    \
              KN_S4(28, 29, 30, 31)
#define KN_MMA_64                                                                                  \
    KN_MMA_32 "," KN_S4(32, 33, 34, 35) "," KN_S4(36, 37, 38, 39) "," KN_S4(40, 41, 42, 43) ","    \
              KN_S4(44, 45, 46, 47) "," KN_S4(48, 49, 50, 51) "," KN_S4(52, 53, 54, 55) ","        \
              KN_S4(56, 57, 58, 59) "," KN_S4(60, 61, 62, 63)
#define KN_O4(i)  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define KN_O8(i)  KN_O4(i), KN_O4(i + 4)
#define KN_O16(i) KN_O8(i), KN_O8(i + 8)
#define KN_O32(i) KN_O16(i), KN_O16(i + 16)
#define KN_O64(i) KN_O32(i), KN_O32(i + 32)
#define KN_MMA(T, NAME, NB, REGS, A, B, P)                                                         \
    template <> struct Mma<T, NB> {                                                                \
        __device__ static inline void run(float (&d)[REGS], uint64_t a, uint64_t b)                \
        {                                                                                          \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #P ", 0;\n"                          \
                         "wgmma.mma_async.sync.aligned.m64n" #NB "k16.f32." NAME "." NAME          \
                         " {" KN_MMA_##REGS "}, %" #A ", %" #B ", p, 1, 1, 0, 0;\n}"               \
                         : KN_O##REGS(0)                                                           \
                         : "l"(a), "l"(b), "n"(1));                                                \
        }                                                                                          \
    };
#define KN_MMA_ALL(T, NAME)                                                                        \
    KN_MMA(T, NAME, 8, 4, 4, 5, 6)                                                                 \
    KN_MMA(T, NAME, 16, 8, 8, 9, 10)                                                               \
    KN_MMA(T, NAME, 32, 16, 16, 17, 18)                                                            \
    KN_MMA(T, NAME, 64, 32, 32, 33, 34)                                                            \
    KN_MMA(T, NAME, 128, 64, 64, 65, 66)
KN_MMA_ALL(bf16, "bf16")
KN_MMA_ALL(f16, "f16")

} // namespace

#endif
