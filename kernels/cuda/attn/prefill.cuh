/* Prefill on Hopper: a block of two consumer warpgroups of 64 packed rows each and a warpgroup that
 * feeds them. The ideas are those of the FlashAttention papers (Dao 2023; Shah and others 2024):
 * softmax as it goes, products of one warpgroup under the softmax of the other, and, within a
 * warpgroup, scores of the next unit and products of the last one under way together.
 *
 * Feeding: one warp copies K and V by the tensor copy engine, a box for each page (or 128 positions
 * of a larger one) and 64 columns, through a ring of two stages each; three warps copy q of the
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

namespace attn {

constexpr int TILE = KN_ATTN_UNIT;
constexpr int STAGES = 2;
constexpr int ROWS = 128;
constexpr int CONSUMERS = 256;
constexpr int PREFILL_THREADS = CONSUMERS + 128;
constexpr int Q_THREADS = 96;

template <int D, bool INVARIANT> struct prefill_smem {
    uint16_t q[ROWS * D];
    uint16_t k[STAGES][TILE * D];
    uint16_t v[STAGES][TILE * D];
    float sums[INVARIANT ? ROWS * D : 4];
    uint64_t k_full[STAGES], k_free[STAGES], v_full[STAGES], v_free[STAGES], q_full, q_free;
    int flag;
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

/* The warp that copies K and V. */
template <typename T, int D, bool INVARIANT> struct feeder {
    const launch &p;
    const CUtensorMap *map;
    prefill_smem<D, INVARIANT> &sm;
    const int lane, piece_rows, pieces;
    ring<STAGES> k, v;

    __device__ feeder(const launch &p_, const CUtensorMap *map_, prefill_smem<D, INVARIANT> &sm_)
        : p(p_), map(map_), sm(sm_), lane(threadIdx.x % 32),
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
                                         uint16_t *to,
                                         uint64_t *full,
                                         uint64_t *free,
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
                copy_box(smem_u32(to) + (uint32_t)(h * TILE + lane * piece_rows) * 128, map, full,
                         h * 64, pos & ((1 << p.page_shift) - 1), head, (int)page);
            }
        }
        __syncwarp();
    }

    __device__ __forceinline__ void copy_k(const walk &w, uint32_t page)
    {
        copy(w, page, sm.k[k.stage], &sm.k_full[k.stage], &sm.k_free[k.stage], k.parity,
             w.it.kv_head);
        k.next();
    }

    __device__ __forceinline__ void copy_v(const walk &w, uint32_t page)
    {
        copy(w, page, sm.v[v.stage], &sm.v_full[v.stage], &sm.v_free[v.stage], v.parity,
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

/* The three warps that copy q, rows permuted as the copy engine would. */
template <typename T, int D, bool INVARIANT>
__device__ __forceinline__ void
feed_q(const launch &p, prefill_smem<D, INVARIANT> &sm, int off, int i, int end)
{
    const int thread = threadIdx.x - CONSUMERS - 32;
    uint32_t parity = 0;

    grid_wait();
    for (; i < end; i++) {
        walk w;

        w.load(p, off, i);
        const int row_first = __ldg(p.row_start + w.it.seq);
        const int n = min(ROWS, w.rows * p.group - w.it.row0);

        barrier_wait(&sm.q_free, parity ^ 1);
        parity ^= 1;
        for (int e = thread; e < ROWS * (D / 8); e += Q_THREADS) {
            int row = e / (D / 8), c = e % (D / 8), packed = w.it.row0 + min(row, n - 1);
            const T *from = (const T *)p.q + (size_t)(row_first + packed / p.group) * p.q_stride +
                            (size_t)(w.it.kv_head * p.group + packed % p.group) * D + c * 8;

            cp_async16(smem_u32(sm.q) + (uint32_t)(c / 8 * ROWS + row) * 128 +
                           (uint32_t)((c % 8 ^ (row & 7)) << 4),
                       from, row < n);
        }
        cp_commit();
        cp_wait<0>();
        fence_async();
        barrier_arrive(&sm.q_full);
    }
}

/* A consumer warpgroup. */
template <typename T, int D, bool INVARIANT> struct consumer {
    static constexpr int OT = D / 8; /* n8 tiles of a row of sums */
    static constexpr int ST = TILE / 8;

    const launch &p;
    prefill_smem<D, INVARIANT> &sm;
    const int wg; /* the same in all lanes, and known to be */
    const int thread, g, t;
    ring<STAGES> k, v;
    uint32_t q_parity;
    const uint32_t q_addr;
    /* Of the item */
    int limit[2];    /* last position that a row sees */
    int least_limit; /* of all rows of the warpgroup */
    int row[2];      /* packed rows of this thread, in the block */
    int n_valid;
    float o[OT * 4], m[2], l[2];

    __device__ consumer(const launch &p_, prefill_smem<D, INVARIANT> &sm_)
        : p(p_), sm(sm_), wg(__shfl_sync(0xffffffffu, threadIdx.x / 128, 0)),
          thread(threadIdx.x % 128), g(thread % 32 / 4), t(thread % 4), k{0, 0}, v{0, 0},
          q_parity(0), q_addr(smem_u32(sm_.q) + wg * 64 * 128)
    {
        row[0] = wg * 64 + thread / 32 * 16 + g;
        row[1] = row[0] + 8;
    }

    __device__ __forceinline__ void release(uint64_t *b)
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

    __device__ __forceinline__ void issue_scores(float (&s)[ST * 4])
    {
        const operand a(q_addr, 16), b(smem_u32(sm.k[0]) + k.stage * (TILE * D * 2), 16);

        products_fence();
#pragma unroll
        for (int ks = 0; ks < D / 16; ks++) {
            products<T, TILE>::ss(s, a.plus(ks / 4 * ROWS * 128 + ks % 4 * 32),
                                  b.plus(ks / 4 * TILE * 128 + ks % 4 * 32), ks > 0);
        }
        products_commit();
    }

    __device__ __forceinline__ void issue_sums(const uint32_t (&w)[ST * 2], int onto)
    {
        const operand b(smem_u32(sm.v[0]) + v.stage * (TILE * D * 2), TILE * 128);

        products_fence();
#pragma unroll
        for (int kt = 0; kt < TILE / 16; kt++) {
            products<T, D>::rs(o, &w[kt * 4], b.plus(kt * 16 * 128), kt > 0 || onto);
        }
        products_commit();
    }

    /* Positions that a row does not see. */
    __device__ __forceinline__ void mask(float (&s)[ST * 4], const walk &w)
    {
        if ((w.unit + 1) * TILE - 1 > least_limit) {
            const int pos0 = w.unit * TILE + 2 * t;

#pragma unroll
            for (int j = 0; j < ST; j++) {
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    if (pos0 + j * 8 + (e & 1) > limit[e / 2]) {
                        s[j * 4 + e] = -INFINITY;
                    }
                }
            }
        }
    }

    /* V of the unit where the sequence ends may hold anything behind the end; zero times that must
     * be zero. */
    __device__ __forceinline__ void clear_tail(const walk &w)
    {
        int n = w.ctx - w.unit * TILE;

        if (n < TILE) {
            char *at = (char *)sm.v[v.stage];

            for (int e = n * 8 + thread; e < TILE * 8; e += 128) {
#pragma unroll
                for (int h = 0; h < D / 64; h++) {
                    *(uint4 *)(at + h * TILE * 128 + e * 16) = make_uint4(0, 0, 0, 0);
                }
            }
            fence_async();
            named_sync<128>(4 + wg);
        }
    }

    __device__ __forceinline__ void row_max(const float (&s)[ST * 4], float (&x)[2])
    {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float a = fmaxf(s[h * 2], s[h * 2 + 1]);

#pragma unroll
            for (int j = 1; j < ST; j++) {
                a = fmaxf(a, fmaxf(s[j * 4 + h * 2], s[j * 4 + h * 2 + 1]));
            }
            x[h] = quad_max(a);
        }
    }

    /* Scores become weights; returns this lane's sums of a row. */
    __device__ __forceinline__ void
    to_weights(float (&s)[ST * 4], const float (&x)[2], float (&sum)[2])
    {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float offset = offset_of(x[h], p.c), quarter[4];

#pragma unroll
            for (int n = 0; n < 4; n++) {
                quarter[n] = 0;
#pragma unroll
                for (int j = n * (ST / 4); j < (n + 1) * (ST / 4); j++) {
                    float &a = s[j * 4 + h * 2], &b = s[j * 4 + h * 2 + 1];

                    a = weight_of(a, p.c, offset);
                    b = weight_of(b, p.c, offset);
                    quarter[n] = __fadd_rn(__fadd_rn(quarter[n], a), b);
                }
            }
            sum[h] =
                __fadd_rn(__fadd_rn(quarter[0], quarter[1]), __fadd_rn(quarter[2], quarter[3]));
        }
    }

    __device__ __forceinline__ void round(const float (&s)[ST * 4], uint32_t (&w)[ST * 2])
    {
#pragma unroll
        for (int i = 0; i < ST * 2; i++) {
            w[i] = num<T>::pack(s[i * 2], s[i * 2 + 1]);
        }
    }

    __device__ __forceinline__ void start_item(const walk &w)
    {
        const int total = w.rows * p.group;

        n_valid = min(ROWS, total - w.it.row0);
        least_limit = w.ctx - w.rows + (w.it.row0 + wg * 64) / p.group;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            limit[h] = w.ctx - w.rows + min(w.it.row0 + row[h], total - 1) / p.group;
            m[h] = -INFINITY;
            l[h] = 0;
        }
        barrier_wait(&sm.q_full, q_parity);
        q_parity ^= 1;
    }

    /* All units of an item, sums straight onto each other. l stays a lane's own until the end. */
    __device__ __forceinline__ void run_fast(walk &w)
    {
        float s[ST * 4], x[2], sum[2];
        uint32_t wt[ST * 2];

        barrier_wait(&sm.k_full[k.stage], k.parity);
        my_turn();
        issue_scores(s);
        your_turn();
        products_wait<0>();
        release(&sm.k_free[k.stage]);
        k.next();
        if (w.unit + 1 == w.it.unit1) {
            release(&sm.q_free);
        }
        mask(s, w);
        row_max(s, m);
        to_weights(s, m, l);
        round(s, wt);
        int onto = 0;
#pragma unroll 1
        while (++w.unit < w.it.unit1) {
            barrier_wait(&sm.k_full[k.stage], k.parity);
            my_turn();
            issue_scores(s);
            barrier_wait(&sm.v_full[v.stage], v.parity);
            issue_sums(wt, onto);
            your_turn();
            onto = 1;
            products_wait<1>();
            release(&sm.k_free[k.stage]);
            k.next();
            if (w.unit + 1 == w.it.unit1) {
                release(&sm.q_free);
            }
            mask(s, w);
            row_max(s, x);
            float f[2];
#pragma unroll
            for (int h = 0; h < 2; h++) {
                x[h] = fmaxf(x[h], m[h]);
                f[h] = weight_of(m[h], p.c, offset_of(x[h], p.c));
                m[h] = x[h];
            }
            to_weights(s, m, sum);
#pragma unroll
            for (int h = 0; h < 2; h++) {
                l[h] = l[h] * f[h] + sum[h];
            }
            products_wait<0>();
            release(&sm.v_free[v.stage]);
            v.next();
#pragma unroll
            for (int j = 0; j < OT; j++) {
                o[j * 4] *= f[0];
                o[j * 4 + 1] *= f[0];
                o[j * 4 + 2] *= f[1];
                o[j * 4 + 3] *= f[1];
            }
            round(s, wt);
        }
        w.unit--;
        barrier_wait(&sm.v_full[v.stage], v.parity);
        clear_tail(w);
        issue_sums(wt, onto);
        products_wait<0>();
        release(&sm.v_free[v.stage]);
        v.next();
#pragma unroll
        for (int h = 0; h < 2; h++) {
            l[h] = quad_sum(l[h]);
        }
    }

    __device__ __forceinline__ void write_record(int slot, int unit)
    {
        record<D> r(p, slot);

#pragma unroll
        for (int h = 0; h < 2; h++) {
            if (row[h] < n_valid) {
#pragma unroll
                for (int j = 0; j < OT; j++) {
                    *(float2 *)(r.sums(row[h]) + j * 8 + 2 * t) =
                        make_float2(o[j * 4 + h * 2], o[j * 4 + h * 2 + 1]);
                }
                if (t == 0) {
                    *r.max_of(row[h]) = m[h];
                    *r.weight_of(row[h]) = l[h];
                }
            }
        }
        if (threadIdx.x == 0) {
            *r.unit() = unit;
        }
    }

    __device__ __forceinline__ void write_rows(const walk &w)
    {
        const int row_first = __ldg(p.row_start + w.it.seq);

#pragma unroll
        for (int h = 0; h < 2; h++) {
            int packed = w.it.row0 + row[h];
            float inv = final_scale(l[h]);

            if (row[h] < n_valid) {
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

    __device__ __forceinline__ void end_item(const walk &w)
    {
        if (w.it.slot < 0) {
            write_rows(w);
            return;
        }
        if (!INVARIANT) {
            write_record(w.it.slot, w.it.unit0);
        }
        kn_attn_task task = plan_task(p.plan, w.it.task);

        if (is_last<CONSUMERS>(p, w.it, task, &sm.flag)) {
            combine<T, D, CONSUMERS>(p, w.it, task, n_valid);
        }
    }

    /* The arithmetic of mma.cuh. Sums of the group so far in `a`, of groups before it in shared
     * memory, a float4 of a thread at a time. */
    __device__ __forceinline__ void run_invariant(walk &w)
    {
        float s[ST * 4], a[OT * 4], a_m[2], a_l[2];
        float4 *stash = (float4 *)sm.sums + threadIdx.x;
        int slot = w.it.slot;
        bool stashed = false;

#pragma unroll
        for (int i = 0; i < OT * 4; i++) {
            a[i] = 0;
        }
        a_m[0] = a_m[1] = -INFINITY;
        a_l[0] = a_l[1] = 0;
#pragma unroll 1
        for (; w.unit < w.it.unit1; w.unit++) {
            const bool end = w.unit + 1 == w.it.unit1;
            float x[2], sum[2];
            uint32_t wt[ST * 2];

            barrier_wait(&sm.k_full[k.stage], k.parity);
            my_turn();
            issue_scores(s);
            your_turn();
            products_wait<0>();
            release(&sm.k_free[k.stage]);
            k.next();
            if (end) {
                release(&sm.q_free);
            }
            mask(s, w);
            row_max(s, x);
            to_weights(s, x, sum);
            round(s, wt);
            barrier_wait(&sm.v_full[v.stage], v.parity);
            clear_tail(w);
            issue_sums(wt, 0);
            products_wait<0>();
            release(&sm.v_free[v.stage]);
            v.next();
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
            if (!end && (w.unit + 1) % KN_ATTN_GROUP != 0) {
                continue;
            }
            /* The end of a group. */
            if (slot >= 0) {
#pragma unroll
                for (int i = 0; i < OT * 4; i++) {
                    o[i] = a[i];
                }
                m[0] = a_m[0];
                m[1] = a_m[1];
                l[0] = a_l[0];
                l[1] = a_l[1];
                write_record(slot++, w.unit / KN_ATTN_GROUP * KN_ATTN_GROUP);
            } else {
                factors f[2];

#pragma unroll
                for (int h = 0; h < 2; h++) {
                    f[h] = merge(m[h], a_m[h], p.c);
                    l[h] = joined(f[h], l[h], a_l[h]);
                }
#pragma unroll
                for (int j = 0; j < OT; j++) {
                    float4 y = stashed ? stash[j * CONSUMERS] : make_float4(0, 0, 0, 0);

                    o[j * 4] = joined(f[0], y.x, a[j * 4]);
                    o[j * 4 + 1] = joined(f[0], y.y, a[j * 4 + 1]);
                    o[j * 4 + 2] = joined(f[1], y.z, a[j * 4 + 2]);
                    o[j * 4 + 3] = joined(f[1], y.w, a[j * 4 + 3]);
                    if (!end) {
                        stash[j * CONSUMERS] =
                            make_float4(o[j * 4], o[j * 4 + 1], o[j * 4 + 2], o[j * 4 + 3]);
                    }
                }
                stashed = true;
            }
#pragma unroll
            for (int i = 0; i < OT * 4; i++) {
                a[i] = 0;
            }
            a_m[0] = a_m[1] = -INFINITY;
            a_l[0] = a_l[1] = 0;
        }
    }

    __device__ __forceinline__ void run(int off, int i, int end)
    {
        grid_wait();
        if (wg == 1) {
            your_turn(); /* warpgroup 0 begins */
        }
        for (; i < end; i++) {
            walk w;

            w.load(p, off, i);
            start_item(w);
            if (INVARIANT) {
                run_invariant(w);
            } else {
                run_fast(w);
            }
            end_item(w);
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
    extern __shared__ __align__(1024) char shared[];
    auto &sm = *(prefill_smem<D, INVARIANT> *)shared;
    const int32_t *first = plan_first(p.plan);
    const int off = __ldg(&p.plan->off_items);
    const int i = __ldg(first + blockIdx.x), end = __ldg(first + blockIdx.x + 1);

    grid_launch_dependents();
    if (i == end) {
        grid_wait();
        return;
    }
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) {
            barrier_init(&sm.k_full[s], 1);
            barrier_init(&sm.v_full[s], 1);
            barrier_init(&sm.k_free[s], CONSUMERS / 32);
            barrier_init(&sm.v_free[s], CONSUMERS / 32);
        }
        barrier_init(&sm.q_full, Q_THREADS);
        barrier_init(&sm.q_free, CONSUMERS / 32);
        barrier_init_done();
    }
    __syncthreads();
    if (threadIdx.x < CONSUMERS) {
        more_registers<232>();
        consumer<T, D, INVARIANT>(p, sm).run(off, i, end);
    } else {
        fewer_registers<40>();
        if (threadIdx.x < CONSUMERS + 32) {
            feeder<T, D, INVARIANT>(p, &map, sm).run(off, i, end);
        } else {
            feed_q<T, D, INVARIANT>(p, sm, off, i, end);
        }
    }
}

} // namespace attn

#endif
