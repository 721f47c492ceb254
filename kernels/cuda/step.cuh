/* What the parts of the step kernel share: its shape, and memory through which blocks hand each other
 * numbers without a barrier.
 *
 * What a phase leaves lies in memory ("flow") that was filled with ones beforehand. Nothing here ever
 * stores a word of ones as a number (conversions make another NaN), so a reader fetches what it
 * needs, and fetches again what is still all ones: no counter, no fence, and nobody waits for more
 * than it reads. There are two sets of this memory; a step uses one and fills the other with ones
 * for the step after it. */
#ifndef KN_CUDA_STEP_CUH
#define KN_CUDA_STEP_CUH

#include "kernels/cuda/heads.cuh"
#include "kernels/cuda/hopper.cuh"

namespace {

constexpr int GROUP = 16, CHUNK = 1024, WARPS = 8, CONSUMERS = 32 * WARPS, PARTS = CHUNK / 512;
constexpr int ROW_BYTES = CHUNK * 2;
constexpr int STAGE = GROUP * ROW_BYTES;
constexpr int MAX_STAGES = 8, MOST_X = 32 * 1024;
constexpr int MAX_ROWS = KN_STEP_MAX_ROWS, PART_ROW = 20; // rows of x in `part`, without bank conflicts
constexpr uint32_t NOT_YET = 0xffffffffu;

struct Args {
    kn_cuda_step_args s;
    int stages, flight;
    long long *trace; // of a probe, see Trace
};

struct Ring {
    uint64_t full[MAX_STAGES], empty[MAX_STAGES];
};

struct Shared {
    Ring ring;
    float part[2][WARPS][MAX_ROWS * PART_ROW];
    float sums[WARPS];
    int pos[MAX_ROWS], page[MAX_ROWS];
    unsigned long long epoch;
};
constexpr int SMEM_BYTES = 227 * 1024 - 5632; // beside Shared
static_assert(sizeof(Shared) <= 5632, "shared memory of a block");

// A place in the ring.
struct Cursor {
    int s, turn, n;

    __device__ inline void next()
    {
        if (++s == n) {
            s = 0;
            turn ^= 1;
        }
    }
};

__device__ inline void barrier_arrive_at(uint32_t b)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(b) : "memory");
}

// The feeding warp's side of the ring. No more than `flight` stages are under way at a time: enough to
// keep memory busy, and what the other warps ask for does not stand in a longer queue.
struct Feeder {
    Ring &ring;
    Cursor at, landed;
    int ahead; // stages that may still be asked for before the next has to land

    __device__ Feeder(Ring &r, int stages, int flight)
        : ring(r), at{0, 1, stages}, landed{0, 0, stages}, ahead(flight) // the first turn finds all empty
    {
    }
    // The next stage, which gets so many bytes.
    __device__ inline int next(uint32_t bytes)
    {
        int s = at.s;

        if (ahead > 0) {
            ahead--;
        } else {
            barrier_wait(&ring.full[landed.s], landed.turn);
            landed.next();
        }
        barrier_wait(&ring.empty[s], at.turn);
        if ((threadIdx.x & 31) == 0)
            barrier_expect(&ring.full[s], bytes);
        __syncwarp();
        at.next();
        return s;
    }
};

__device__ inline void copy_row(void *dst, const void *src, uint32_t bytes, uint64_t *b, uint64_t policy)
{
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
                 "[%0], [%1], %2, [%3], %4;" ::"r"(smem_addr(dst)),
                 "l"(src), "r"(bytes), "r"(smem_addr(b)), "l"(policy)
                 : "memory");
}

// The consuming warps meet.
__device__ inline void meet() { asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory"); }

template <typename T>
__device__ inline void mma(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                           uint32_t b1);
template <>
__device__ inline void mma<bf16>(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                 uint32_t b0, uint32_t b1)
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
                 "{%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
template <>
__device__ inline void mma<f16>(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                uint32_t b0, uint32_t b1)
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
                 "{%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ inline uint4 load_shared(uint32_t at)
{
    uint4 v;

    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(at)
                 : "memory");
    return v;
}
// One instruction, where the compiler would make two moves.
__device__ inline uint32_t pick(int c, uint32_t yes, uint32_t no)
{
    uint32_t v;

    asm("{\n.reg .pred p;\nsetp.ne.s32 p, %3, 0;\nselp.b32 %0, %1, %2, p;\n}"
        : "=r"(v)
        : "r"(yes), "r"(no), "r"(c));
    return v;
}

template <typename T> __device__ inline uint32_t pack(float lo, float hi)
{
    Vec2<T> v = {{from_f<T>(lo), from_f<T>(hi)}};

    return *(const uint32_t *)&v;
}
template <typename T> __device__ inline float2 unpack(uint32_t w)
{
    Vec2<T> v = *(const Vec2<T> *)&w;

    return make_float2(to_f(v.v[0]), to_f(v.v[1]));
}

// ---- flow ----

__device__ inline uint4 load_now(const void *p)
{
    uint4 v;

    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p)
                 : "memory");
    return v;
}
__device__ inline uint32_t load_word(const void *p)
{
    uint32_t v;

    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
__device__ inline void store_word(void *p, uint32_t v)
{
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
__device__ inline bool not_yet(uint4 v)
{
    return max(max(v.x, v.y), max(v.z, v.w)) == NOT_YET;
}

// Pointers of the phases: those into the flow go to the set of this step.
struct Flow {
    char *base;
    size_t bytes, shift;

    __device__ inline bool has(const void *p) const { return (size_t)((const char *)p - base) < bytes; }
    template <typename P> __device__ inline P *at(P *p) const
    {
        return has(p) ? (P *)((char *)p + shift) : p;
    }
};

// Reads again until all of the 16 bytes are there.
__device__ inline void settle(uint4 &v, const void *p)
{
    while (not_yet(v))
        v = load_now(p);
}

// ---- times of a probe: compiled in by KN_STEP_TRACE alone ----

#ifdef KN_STEP_TRACE
struct Trace {
    long long *at, t[6];

    __device__ Trace(long long *to) : at(to) {}
    __device__ inline void mark(int i) { t[i] = clock64(); }
    __device__ inline void zero() { t[0] = t[1] = t[2] = t[3] = t[4] = t[5] = 0; }
    __device__ inline long long now() { return clock64(); }
    __device__ inline void add(int i, long long since) { t[i] += clock64() - since; }
    __device__ inline void write(int ph)
    {
        if (threadIdx.x == 0)
            for (int i = 0; i < 6; i++)
                at[((size_t)ph * gridDim.x + blockIdx.x) * 6 + i] = t[i];
    }
};
#else
struct Trace {
    __device__ Trace(long long *) {}
    __device__ inline void mark(int) {}
    __device__ inline void zero() {}
    __device__ inline long long now() { return 0; }
    __device__ inline void add(int, long long) {}
    __device__ inline void write(int) {}
};
#endif

} // namespace

#endif
