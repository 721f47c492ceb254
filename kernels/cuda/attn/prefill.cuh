/* Prefill on Hopper: a block of two consumer warpgroups of 64 packed rows each and a warpgroup that
 * feeds them. The ideas are those of the FlashAttention papers (Dao 2023; Shah and others 2024):
 * softmax as it goes, products of one warpgroup under the softmax of the other, and, within a
 * warpgroup, scores of the next unit and products of the last one under way together.
 *
 * Feeding: one warp copies K and V by the tensor copy engine, a box for each page (or 128 positions
 * of a larger one) and 64 columns, through a ring of two stages each. Pages are permuted already
 * (attn.h), so boxes of 8 and more rows come as the products want them. Three warps copy q of the
 * next item while the last unit of the current one is worked on. Items come from the plan, a run
 * for each block; the ring goes on from item to item.
 *
 * With `invariant` the arithmetic is that of mma.cuh: products of a unit from zero, then joined;
 * sums of whole groups wait in shared memory. Otherwise products go straight onto the rescaled sum.
 *
 * Shared memory (D = 128): q 32 KiB, K and V 2 x 32 KiB each, invariant 64 KiB of sums. */
#ifndef KN_CUDA_ATTN_PREFILL_CUH
#define KN_CUDA_ATTN_PREFILL_CUH

#include "kernels/cuda/attn/args.cuh"
#include "kernels/cuda/attn/hopper.cuh"

#include <stddef.h>

namespace attn {

constexpr int TILE = KN_ATTN_UNIT;
constexpr int STAGES = 2;
constexpr int ROWS = KN_ATTN_PREFILL_ROWS;
constexpr int CONSUMERS = 256;
constexpr int PREFILL_THREADS = CONSUMERS + 128;
constexpr int Q_THREADS = 96;
/* Less than any score, and no infinity: a row's maximum where it sees nothing. */
constexpr float LEAST = -1e30f;
/* Weights may grow to 2^ROOM before a row's sums are taken down to a new maximum. */
constexpr float ROOM = 8;

template <int D, bool INVARIANT> struct prefill_smem {
    uint16_t q[ROWS * D];
    uint16_t k[STAGES][TILE * D];
    uint16_t v[STAGES][TILE * D];
    float sums[INVARIANT ? ROWS * D : 4];
    uint64_t k_full[STAGES], k_free[STAGES], v_full[STAGES], v_free[STAGES], q_full, q_free;
    int flag;
};

/* The same with addresses: `base` in a register, the rest constants. */
template <int D, bool INVARIANT> struct places {
    typedef prefill_smem<D, INVARIANT> M;
    static constexpr uint32_t TILE_BYTES = TILE * D * 2;

    uint32_t base;

    __device__ __forceinline__ places()
    {
        extern __shared__ __align__(1024) char prefill_shared[];

        /* Opaque, or the address would be made anew wherever it is used. */
        asm volatile("mov.u32 %0, %1;" : "=r"(base) : "r"(smem_u32(prefill_shared)));
    }
    __device__ __forceinline__ M &memory() const
    {
        extern __shared__ __align__(1024) char prefill_shared[];

        return *(M *)prefill_shared;
    }
    __device__ __forceinline__ uint32_t q() const
    {
        return base;
    }
    __device__ __forceinline__ uint32_t k(int i) const
    {
        return base + (uint32_t)offsetof(M, k) + (uint32_t)i * TILE_BYTES;
    }
    __device__ __forceinline__ uint32_t v(int i) const
    {
        return base + (uint32_t)offsetof(M, v) + (uint32_t)i * TILE_BYTES;
    }
    __device__ __forceinline__ uint32_t k_full(int i) const
    {
        return base + (uint32_t)offsetof(M, k_full) + (uint32_t)i * 8;
    }
    __device__ __forceinline__ uint32_t k_free(int i) const
    {
        return base + (uint32_t)offsetof(M, k_free) + (uint32_t)i * 8;
    }
    __device__ __forceinline__ uint32_t v_full(int i) const
    {
        return base + (uint32_t)offsetof(M, v_full) + (uint32_t)i * 8;
    }
    __device__ __forceinline__ uint32_t v_free(int i) const
    {
        return base + (uint32_t)offsetof(M, v_free) + (uint32_t)i * 8;
    }
    __device__ __forceinline__ uint32_t q_full() const
    {
        return base + (uint32_t)offsetof(M, q_full);
    }
    __device__ __forceinline__ uint32_t q_free() const
    {
        return base + (uint32_t)offsetof(M, q_free);
    }
};

/* An item while it is worked on. */
struct walk {
    kn_attn_item it;
    int ctx;
    int rows;
    int unit;

    __device__ __forceinline__ void load(const launch &p, int off, int i)
    {
        it = plan_item(p.plan, off, i);
        ctx = __ldg(p.ctx_len + it.seq);
        rows = __ldg(p.row_start + it.seq + 1) - __ldg(p.row_start + it.seq);
        unit = it.unit0;
    }
};

/* The same in all lanes, and known to be. */
__device__ __forceinline__ int uniform(int x)
{
    return __reduce_max_sync(0xffffffffu, x);
}
__device__ __forceinline__ uint32_t uniform(uint32_t x)
{
    return __reduce_max_sync(0xffffffffu, x);
}
__device__ __forceinline__ float uniform(float x)
{
    return __uint_as_float(uniform(__float_as_uint(x)));
}

/* The warp that copies K and V. */
template <typename T, int D, bool INVARIANT> struct feeder {
    const launch &p;
    const CUtensorMap *map;
    const places<D, INVARIANT> at;
    const int lane, piece_rows, pieces;
    ring<STAGES> k, v;

    __device__ feeder(const launch &p_, const CUtensorMap *map_, places<D, INVARIANT> at_)
        : p(p_), map(map_), at(at_), lane(threadIdx.x % 32),
          piece_rows(min(TILE, 1 << p_.page_shift)), pieces(TILE / piece_rows), k{0, 0}, v{0, 0}
    {
    }

    /* Lane i: the page of the i-th piece of a unit. */
    __device__ __forceinline__ uint32_t page_of(const walk &w)
    {
        int pos = w.unit * TILE + lane * piece_rows;

        return lane < pieces && pos < w.ctx
                   ? __ldg(p.pages + (size_t)w.it.seq * p.pages_stride + (pos >> p.page_shift))
                   : 0;
    }

    __device__ __forceinline__ void copy(const walk &w,
                                         uint32_t page,
                                         uint32_t to,
                                         uint32_t full,
                                         uint32_t free,
                                         uint32_t parity,
                                         int head)
    {
        int pos = w.unit * TILE + lane * piece_rows;
        int there = min(pieces, (w.ctx - w.unit * TILE + piece_rows - 1) / piece_rows);

        barrier_wait(free, parity ^ 1);
        if (lane == 0) {
            barrier_expect(full, (uint32_t)(there * piece_rows * D * 2));
        }
        __syncwarp();
        if (lane < there) {
#pragma unroll
            for (int h = 0; h < D / 64; h++) {
                copy_box(to + (uint32_t)(h * TILE + lane * piece_rows) * 128, map, full, h * 64,
                         pos & ((1 << p.page_shift) - 1), head, (int)page);
            }
        }
        __syncwarp();
    }

    __device__ __forceinline__ void copy_k(const walk &w, uint32_t page)
    {
        copy(w, page, at.k(k.stage), at.k_full(k.stage), at.k_free(k.stage), k.parity,
             w.it.kv_head);
        k.next();
    }

    __device__ __forceinline__ void copy_v(const walk &w, uint32_t page)
    {
        copy(w, page, at.v(v.stage), at.v_full(v.stage), at.v_free(v.stage), v.parity,
             p.n_kv_heads + w.it.kv_head);
        v.next();
    }

    /* K runs one unit ahead of V. */
    __device__ __forceinline__ void run(int off, int i, int end)
    {
        walk w, next;

        w.load(p, off, i);
        uint32_t page = page_of(w);
        grid_wait();
        copy_k(w, page);
        for (;;) {
            next = w;
            if (++next.unit == w.it.unit1) {
                if (++i == end) {
                    copy_v(w, page);
                    return;
                }
                next.load(p, off, i);
            }
            uint32_t next_page = page_of(next);

            copy_k(next, next_page);
            copy_v(w, page);
            w = next;
            page = next_page;
        }
    }
};

/* The three warps that copy q, rows permuted as those of the pages. */
template <typename T, int D, bool INVARIANT>
__device__ __forceinline__ void
feed_q(const launch &p, places<D, INVARIANT> at, int off, int i, int end)
{
    const int thread = threadIdx.x - CONSUMERS - 32;
    uint32_t parity = 0;

    grid_wait();
    for (; i < end; i++) {
        walk w;

        w.load(p, off, i);
        const int row_first = __ldg(p.row_start + w.it.seq);
        const int n = min(ROWS, w.rows * p.group - w.it.row0);

        barrier_wait(at.q_free(), parity ^ 1);
        parity ^= 1;
        for (int e = thread; e < ROWS * (D / 8); e += Q_THREADS) {
            int row = e / (D / 8), c = e % (D / 8), packed = w.it.row0 + min(row, n - 1);
            const T *from = (const T *)p.q + (size_t)(row_first + packed / p.group) * p.q_stride +
                            (size_t)(w.it.kv_head * p.group + packed % p.group) * D + c * 8;

            cp_async16(at.q() + (uint32_t)(c / 8 * ROWS + row) * 128 +
                           (uint32_t)((c % 8 ^ (row & 7)) << 4),
                       from, row < n);
        }
        cp_commit();
        cp_wait<0>();
        fence_async();
        barrier_arrive(at.q_full());
    }
}

/* A consumer warpgroup. What a loop over units does not need is read again at an item's end:
 * registers are what this kernel is short of. */
template <typename T, int D, bool INVARIANT> struct consumer {
    static constexpr int OT = D / 8; /* n8 tiles of a row of sums */
    static constexpr int ST = TILE / 8;

    const launch &p;
    const places<D, INVARIANT> at;
    const int wg;
    const uint32_t q_at; /* this warpgroup's rows of q */
    const int t;
    const int row; /* first of this thread's two rows in the block, 8 apart */
    ring<STAGES> k, v;
    uint32_t q_parity;
    /* Of the item */
    int limit[2];    /* last position that a row sees */
    int least_limit; /* of all rows of the warpgroup */
    int unit, unit1;
    int tail; /* positions of the last unit */
    float o[OT * 4], m[2], l[2];

    __device__ consumer(const launch &p_, places<D, INVARIANT> at_)
        : p(p_), at(at_), wg(uniform((int)threadIdx.x / 128)),
          q_at(uniform(at_.q() + (uint32_t)threadIdx.x / 128 * 64 * 128)), t(threadIdx.x % 4),
          row(threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4), k{0, 0}, v{0, 0}, q_parity(0)
    {
    }

    __device__ __forceinline__ void release(uint32_t b)
    {
        if (threadIdx.x % 32 == 0) {
            barrier_arrive(b);
        }
    }

    /* One warpgroup issues its products while the other does softmax. */
    __device__ __forceinline__ void my_turn()
    {
        named_sync<CONSUMERS>(2 + wg);
    }
    __device__ __forceinline__ void your_turn()
    {
        named_arrive<CONSUMERS>(2 + (wg ^ 1));
    }

    __device__ __forceinline__ void issue_scores(float (&s)[ST * 4], uint32_t k_at)
    {
        const operand a(q_at, 16), b(k_at, 16);

        products<T, TILE>::ss_set(s, a.plus(0), b.plus(0));
#pragma unroll
        for (int ks = 1; ks < D / 16; ks++) {
            products<T, TILE>::ss_add(s, a.plus(ks / 4 * ROWS * 128 + ks % 4 * 32),
                                      b.plus(ks / 4 * TILE * 128 + ks % 4 * 32));
        }
        products_commit();
    }

    /* Onto o, or (`set`) from zero. */
    __device__ __forceinline__ void issue_sums(const uint32_t (&w)[ST * 2], bool set, uint32_t v_at)
    {
        const operand b(v_at, TILE * 128);

        if (set) {
            products<T, D>::rs_set(o, &w[0], b.plus(0));
        } else {
            products<T, D>::rs_add(o, &w[0], b.plus(0));
        }
#pragma unroll
        for (int kt = 1; kt < TILE / 16; kt++) {
            products<T, D>::rs_add(o, &w[kt * 4], b.plus(kt * 16 * 128));
        }
        products_commit();
    }

    __device__ __forceinline__ void wait_k()
    {
        barrier_wait(at.k_full(k.stage), k.parity);
    }
    __device__ __forceinline__ void wait_v()
    {
        barrier_wait(at.v_full(v.stage), v.parity);
    }

    /* Scores are there: K may be overwritten, q too after the item's last unit. */
    __device__ __forceinline__ void done_k()
    {
        release(at.k_free(k.stage));
        k.next();
        if (unit + 1 == unit1) {
            release(at.q_free());
        }
    }

    __device__ __forceinline__ void done_v()
    {
        release(at.v_free(v.stage));
        v.next();
    }

    /* Positions that a row does not see. */
    __device__ __forceinline__ void mask(float (&s)[ST * 4])
    {
        if ((unit + 1) * TILE - 1 > least_limit) {
            const int at0 = limit[0] - unit * TILE - 2 * t, at1 = limit[1] - unit * TILE - 2 * t;

#pragma unroll
            for (int j = 0; j < ST; j++) {
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    if (j * 8 + (e & 1) > (e < 2 ? at0 : at1)) {
                        s[j * 4 + e] = -INFINITY;
                    }
                }
            }
        }
    }

    /* V of the unit where the sequence ends may hold anything behind the end; zero times that must
     * be zero. */
    __device__ __forceinline__ void clear_tail()
    {
        if (unit + 1 == unit1 && tail < TILE) {
            char *to = (char *)at.memory().v[v.stage];

            for (int e = tail * 8 + (int)threadIdx.x % 128; e < TILE * 8; e += 128) {
#pragma unroll
                for (int h = 0; h < D / 64; h++) {
                    *(uint4 *)(to + h * TILE * 128 + e * 16) = make_uint4(0, 0, 0, 0);
                }
            }
            fence_async();
            named_sync<128>(4 + wg);
        }
    }

    template <int H> static __device__ __forceinline__ float row_max(const float (&s)[ST * 4])
    {
        float a = s[H * 2], b = s[H * 2 + 1];

#pragma unroll
        for (int j = 1; j < ST; j++) {
            a = fmaxf(a, s[j * 4 + H * 2]);
            b = fmaxf(b, s[j * 4 + H * 2 + 1]);
        }
        a = fmaxf(a, b);
        a = fmaxf(a, __shfl_xor_sync(0xffffffffu, a, 1));
        return fmaxf(a, __shfl_xor_sync(0xffffffffu, a, 2));
    }

    static __device__ __forceinline__ float sum_of(const float (&quarter)[4])
    {
        return __fadd_rn(__fadd_rn(quarter[0], quarter[1]), __fadd_rn(quarter[2], quarter[3]));
    }

    /* Scores of row H become exponents of two of their weights. */
    template <int H>
    __device__ __forceinline__ void exponents(float (&s)[ST * 4], float c, const float (&offset)[2])
    {
#pragma unroll
        for (int j = 0; j < ST; j++) {
            s[j * 4 + H * 2] = __fmaf_rn(s[j * 4 + H * 2], c, -offset[H]);
            s[j * 4 + H * 2 + 1] = __fmaf_rn(s[j * 4 + H * 2 + 1], c, -offset[H]);
        }
    }

    /* Whether an exponent of row H in any lane is above ROOM: bits of floats are in order as
     * integers as long as one is positive, and three of those are compared at once. */
    template <int H> static __device__ __forceinline__ bool above_room(const float (&s)[ST * 4])
    {
        int even = max(__float_as_int(s[H * 2]), __float_as_int(s[H * 2 + 1]));
        int odd = max(__float_as_int(s[4 + H * 2]), __float_as_int(s[4 + H * 2 + 1]));

#pragma unroll
        for (int j = 2; j < ST; j += 2) {
            even = __vimax3_s32(even, __float_as_int(s[j * 4 + H * 2]),
                                __float_as_int(s[j * 4 + H * 2 + 1]));
            odd = __vimax3_s32(odd, __float_as_int(s[j * 4 + 4 + H * 2]),
                               __float_as_int(s[j * 4 + 4 + H * 2 + 1]));
        }
        return __any_sync(0xffffffffu, max(even, odd) > __float_as_int(ROOM));
    }

    /* Row H, if it has exponents above ROOM, takes the largest off all, and off what was summed. */
    template <int H> __device__ __forceinline__ void raise(float (&s)[ST * 4], float (&offset)[2])
    {
        float x = row_max<H>(s);

        x = x > ROOM ? x : 0.0f;
        const float f = exp2_fast(-x);
        offset[H] += x;
        l[H] *= f;
#pragma unroll
        for (int j = 0; j < ST; j++) {
            s[j * 4 + H * 2] -= x;
            s[j * 4 + H * 2 + 1] -= x;
        }
#pragma unroll
        for (int j = 0; j < OT; j++) {
            o[j * 4 + H * 2] *= f;
            o[j * 4 + H * 2 + 1] *= f;
        }
    }

    /* Exponents of row H become weights; returns their sum, this lane's. */
    template <int H> __device__ __forceinline__ float weights(float (&s)[ST * 4])
    {
        float quarter[4];

#pragma unroll
        for (int j = 0; j < ST; j++) {
            float &q = quarter[j / (ST / 4)];
            float &a = s[j * 4 + H * 2], &b = s[j * 4 + H * 2 + 1];

            a = exp2_fast(a);
            b = exp2_fast(b);
            q = j % (ST / 4) == 0 ? a : __fadd_rn(q, a);
            q = __fadd_rn(q, b);
        }
        return sum_of(quarter);
    }

    __device__ __forceinline__ void round(const float (&s)[ST * 4], uint32_t (&w)[ST * 2])
    {
#pragma unroll
        for (int i = 0; i < ST * 2; i++) {
            w[i] = num<T>::pack(s[i * 2], s[i * 2 + 1]);
        }
    }

    __device__ __forceinline__ kn_attn_item start_item(int off, int i)
    {
        walk w;

        w.load(p, off, i);
        const int total = w.rows * p.group;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            limit[h] = w.ctx - w.rows + min(w.it.row0 + row + h * 8, total - 1) / p.group;
            m[h] = -INFINITY;
            l[h] = 0;
        }
        least_limit = uniform(w.ctx - w.rows + (w.it.row0 + wg * 64) / p.group);
        unit = uniform(w.it.unit0);
        unit1 = uniform(w.it.unit1);
        tail = uniform(w.ctx - (unit1 - 1) * TILE);
        barrier_wait(at.q_full(), q_parity);
        q_parity ^= 1;
        return w.it;
    }

    /* All units of an item, sums straight onto each other. Scores of a unit and sums of the one
     * before are under way together, the sums still during half of softmax: a row after the other,
     * so that exponents of one are made while the special function unit is at the other's weights.
     * A unit's largest score is looked for only where one is far above what the row's offset
     * allows, rarely after the first units. l stays a lane's own until the end. */
    __device__ __forceinline__ void run_fast()
    {
        float s[ST * 4], offset[2];
        uint32_t w[ST * 2];

#pragma unroll
        for (int i = 0; i < OT * 4; i++) {
            o[i] = 0;
        }
        wait_k();
        my_turn();
        products_fence();
        issue_scores(s, uniform(at.k(k.stage)));
        your_turn();
        products_wait<0>();
        hold(s);
        done_k();
        mask(s);
        offset[0] = fmaxf(row_max<0>(s), LEAST) * p.c;
        offset[1] = fmaxf(row_max<1>(s), LEAST) * p.c;
        exponents<0>(s, p.c, offset);
        exponents<1>(s, p.c, offset);
        l[0] = weights<0>(s);
        l[1] = weights<1>(s);
        round(s, w);
        /* Uniform once a unit, or every product would copy its descriptor. */
        uint32_t k_at = uniform(at.k(k.stage)), v_at = uniform(at.v(v.stage));
        bool ready = false;
#pragma unroll 1
        while (++unit < unit1) {
            if (!ready) {
                wait_k();
                wait_v();
            }
            my_turn();
            products_fence();
            issue_scores(s, k_at);
            issue_sums(w, false, v_at);
            your_turn();
            const float c = uniform(p.c); /* in a register for this stretch alone: 1 % */

            products_wait<1>();
            hold(s);
            done_k();
            mask(s);
            exponents<0>(s, c, offset);
            if (above_room<0>(s)) {
                products_wait_here();
                hold(o);
                raise<0>(s, offset);
            }
            l[0] += weights<0>(s);
            exponents<1>(s, c, offset);
            /* The assembler would do all of the above after the wait for the sums, were the wait
             * not behind a branch that depends on it. */
            if (above_room<1>(s)) {
                products_wait_here();
                hold(o);
                raise<1>(s, offset);
            } else {
                products_wait<0>();
                hold(o);
            }
            done_v();
            /* Asked early: the answer takes as long as a dozen weights. */
            ready = barrier_is_done(at.k_full(k.stage), k.parity) &
                    barrier_is_done(at.v_full(v.stage), v.parity);
            k_at = uniform(at.k(k.stage));
            v_at = uniform(at.v(v.stage));
            l[1] += weights<1>(s);
            round(s, w);
        }
        unit--;
        wait_v();
        clear_tail();
        products_fence();
        issue_sums(w, false, uniform(at.v(v.stage)));
        products_wait<0>();
        hold(o);
        done_v();
#pragma unroll
        for (int h = 0; h < 2; h++) {
            l[h] = quad_sum(l[h]);
            m[h] = offset[h] / p.c;
        }
    }

    __device__ __forceinline__ void write_record(const float (&a)[OT * 4],
                                                 const float (&a_m)[2],
                                                 const float (&a_l)[2],
                                                 int slot,
                                                 int unit_first,
                                                 int n_valid)
    {
        record<D> r(p, slot);

#pragma unroll
        for (int h = 0; h < 2; h++) {
            int y = row + h * 8;

            if (y < n_valid) {
#pragma unroll
                for (int j = 0; j < OT; j++) {
                    *(float2 *)(r.sums(y) + j * 8 + 2 * t) =
                        make_float2(a[j * 4 + h * 2], a[j * 4 + h * 2 + 1]);
                }
                if (t == 0) {
                    *r.max_of(y) = a_m[h];
                    *r.weight_of(y) = a_l[h];
                }
            }
        }
        if (threadIdx.x == 0) {
            *r.unit() = unit_first;
        }
    }

    __device__ __forceinline__ void write_rows(const walk &w, int n_valid)
    {
        const int row_first = __ldg(p.row_start + w.it.seq);

#pragma unroll
        for (int h = 0; h < 2; h++) {
            int y = row + h * 8, packed = w.it.row0 + y;
            float inv = final_scale(l[h]);

            if (y < n_valid) {
                T *out = (T *)p.out + (size_t)(row_first + packed / p.group) * p.out_stride +
                         (size_t)(w.it.kv_head * p.group + packed % p.group) * D + 2 * t;

#pragma unroll
                for (int j = 0; j < OT; j++) {
                    *(uint32_t *)(out + j * 8) = num<T>::pack(finished(o[j * 4 + h * 2], inv),
                                                              finished(o[j * 4 + h * 2 + 1], inv));
                }
            }
        }
    }

    __device__ __forceinline__ void end_item(int off, int i)
    {
        walk w;

        w.load(p, off, i);
        const int n_valid = min(ROWS, w.rows * p.group - w.it.row0);
        if (w.it.slot < 0) {
            write_rows(w, n_valid);
            return;
        }
        if (!INVARIANT) {
            write_record(o, m, l, w.it.slot, w.it.unit0, n_valid);
        }
        kn_attn_task task = plan_task(p.plan, w.it.task);

        if (is_last<CONSUMERS>(p, w.it, task, &at.memory().flag)) {
            combine<T, D, CONSUMERS>(p, w.it, task, n_valid);
        }
    }

    /* A unit's sums in o join those of its group in a. */
    __device__ __forceinline__ void join_unit(float (&a)[OT * 4],
                                              float (&a_m)[2],
                                              float (&a_l)[2],
                                              const float (&x)[2],
                                              const float (&sum)[2])
    {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            factors f = merge(a_m[h], x[h], p.c);

            a_l[h] = joined(f, a_l[h], quad_sum(sum[h]));
#pragma unroll
            for (int j = 0; j < OT; j++) {
                a[j * 4 + h * 2] = joined(f, a[j * 4 + h * 2], o[j * 4 + h * 2]);
                a[j * 4 + h * 2 + 1] = joined(f, a[j * 4 + h * 2 + 1], o[j * 4 + h * 2 + 1]);
            }
        }
    }

    /* A group's sums join those of groups before, which wait in shared memory, a float4 of a thread
     * at a time; the result is there and in m and l, after the last group in o. */
    __device__ __forceinline__ void join_group(const float (&a)[OT * 4],
                                               const float (&a_m)[2],
                                               const float (&a_l)[2],
                                               bool first,
                                               bool last)
    {
        float4 *stash = (float4 *)at.memory().sums + threadIdx.x;
        factors f[2];

#pragma unroll
        for (int h = 0; h < 2; h++) {
            f[h] = merge(m[h], a_m[h], p.c);
            l[h] = joined(f[h], l[h], a_l[h]);
        }
#pragma unroll
        for (int j = 0; j < OT; j++) {
            float4 y = first ? make_float4(0, 0, 0, 0) : stash[j * CONSUMERS];

            y.x = joined(f[0], y.x, a[j * 4]);
            y.y = joined(f[0], y.y, a[j * 4 + 1]);
            y.z = joined(f[1], y.z, a[j * 4 + 2]);
            y.w = joined(f[1], y.w, a[j * 4 + 3]);
            if (!last) {
                stash[j * CONSUMERS] = y;
            }
            o[j * 4] = y.x;
            o[j * 4 + 1] = y.y;
            o[j * 4 + 2] = y.z;
            o[j * 4 + 3] = y.w;
        }
    }

    /* The arithmetic of mma.cuh: sums of a unit in o, of its group in a. They are joined while the
     * scores of the next unit are under way. */
    __device__ __forceinline__ void run_invariant(int slot, int n_valid)
    {
        float s[ST * 4], a[OT * 4], a_m[2], a_l[2];
        bool first = true;

#pragma unroll 1
        do {
            const int group = unit / KN_ATTN_GROUP * KN_ATTN_GROUP;
            const int end = min(unit1, group + KN_ATTN_GROUP);
            float x[2], sum[2];

            clear(a, a_m, a_l);
            clear(o, x, sum);
#pragma unroll 1
            do {
                uint32_t w[ST * 2];
                float offset[2];

                wait_k();
                my_turn();
                products_fence();
                issue_scores(s, uniform(at.k(k.stage)));
                your_turn();
                join_unit(a, a_m, a_l, x, sum);
                products_wait<0>();
                hold(s);
                done_k();
                mask(s);
                x[0] = row_max<0>(s);
                x[1] = row_max<1>(s);
                offset[0] = offset_of(x[0], p.c);
                offset[1] = offset_of(x[1], p.c);
                exponents<0>(s, p.c, offset);
                exponents<1>(s, p.c, offset);
                sum[0] = weights<0>(s);
                sum[1] = weights<1>(s);
                round(s, w);
                wait_v();
                clear_tail();
                products_fence();
                issue_sums(w, true, uniform(at.v(v.stage)));
                products_wait<0>();
                hold(o);
                done_v();
            } while (++unit < end);
            join_unit(a, a_m, a_l, x, sum);
            if (slot < 0) {
                join_group(a, a_m, a_l, first, unit == unit1);
                first = false;
            } else {
                write_record(a, a_m, a_l, slot++, group, n_valid);
            }
        } while (unit < unit1);
    }

    static __device__ __forceinline__ void
    clear(float (&a)[OT * 4], float (&a_m)[2], float (&a_l)[2])
    {
#pragma unroll
        for (int i = 0; i < OT * 4; i++) {
            a[i] = 0;
        }
        a_m[0] = a_m[1] = -INFINITY;
        a_l[0] = a_l[1] = 0;
    }

    __device__ __forceinline__ void run(int off, int i, int end)
    {
        grid_wait();
        if (wg == 1) {
            your_turn(); /* warpgroup 0 begins */
        }
        for (; i < end; i++) {
            kn_attn_item it = start_item(off, i);

            if (INVARIANT) {
                int rows = __ldg(p.row_start + it.seq + 1) - __ldg(p.row_start + it.seq);

                run_invariant(it.slot, min(ROWS, rows * p.group - it.row0));
            } else {
                run_fast();
            }
            end_item(off, i);
        }
        if (wg == 0) {
            my_turn(); /* takes the last turn that was given */
        }
    }
};

template <typename T, int D, bool INVARIANT>
__global__ void __launch_bounds__(PREFILL_THREADS, 1)
    prefill_kernel(const __grid_constant__ launch p, const __grid_constant__ CUtensorMap map)
{
    const places<D, INVARIANT> at;
    const int32_t *first = plan_first(p.plan);
    const int off = __ldg(&p.plan->off_items);
    const int i = uniform(__ldg(first + blockIdx.x)), end = uniform(__ldg(first + blockIdx.x + 1));

    grid_launch_dependents();
    if (i == end) {
        grid_wait();
        return;
    }
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) {
            barrier_init(at.k_full(s), 1);
            barrier_init(at.v_full(s), 1);
            barrier_init(at.k_free(s), CONSUMERS / 32);
            barrier_init(at.v_free(s), CONSUMERS / 32);
        }
        barrier_init(at.q_full(), Q_THREADS);
        barrier_init(at.q_free(), CONSUMERS / 32);
        barrier_init_done();
    }
    __syncthreads();
    const int warp = uniform((int)threadIdx.x / 32);

    if (warp < CONSUMERS / 32) {
        more_registers<232>();
        consumer<T, D, INVARIANT>(p, at).run(off, i, end);
    } else {
        fewer_registers<40>();
        if (warp == CONSUMERS / 32) {
            feeder<T, D, INVARIANT>(p, &map, at).run(off, i, end);
        } else {
            feed_q<T, D, INVARIANT>(p, at, off, i, end);
        }
    }
}

} // namespace attn

#endif
