/* The kernel of units: packed rows in blocks of 16 * MT; four warps that compute, and one that
 * feeds them with K and V by bulk copies. Decode at the card's read rate (MT = 1).
 *
 * Work: items of the plan, a unit of 128 positions at a time. Scores: each warp has 32 positions of
 * the unit and all rows. Products with V: each warp has a quarter of the columns and all positions,
 * so that every sum is one chain and no sums meet across warps. K and V of a page and head are one
 * run of memory each, copied whole: that is what memory is fastest at. They go through a ring, K of
 * a unit, then its V, which the feeding warp fills as soon as a stage is free, on from item to
 * item.
 *
 * Shared memory: rows of K, V, Q and weights with their 16-byte pieces permuted by row, so that
 * ldmatrix meets no bank twice. K and V lie so in the pages already (attn.h). */
#ifndef KN_CUDA_ATTN_UNIT_CUH
#define KN_CUDA_ATTN_UNIT_CUH

#include "kernels/cuda/attn/args.cuh"
#include "kernels/cuda/attn/hopper.cuh"

namespace attn {

constexpr int UNIT = KN_ATTN_UNIT;
constexpr int UNIT_CONSUMERS = 128;
constexpr int UNIT_THREADS = UNIT_CONSUMERS + 32;

template <int D, int MT, int S> struct unit_smem {
    uint16_t kv[S][UNIT * D];
    uint16_t q[16 * MT * D];
    uint16_t p[16 * MT * UNIT];
    float max[4][16 * MT];
    float sum[4][16 * MT][4];
    uint64_t full[S], free[S];
    int flag;
};

/* Byte offset of a 16-byte piece of a row of W bytes. */
template <int W> __device__ __forceinline__ uint32_t piece(int row, int i)
{
    return (uint32_t)(row * W + ((i ^ (row & 7)) << 4));
}

/* Reads so many floats that another multiprocessor wrote. */
template <int N> struct piece_of_row {
    float x[N];

    __device__ __forceinline__ void read(const float *from)
    {
#pragma unroll
        for (int i = 0; i < N; i += 2) {
            float2 y = __ldcg((const float2 *)(from + i));

            x[i] = y.x;
            x[i + 1] = y.y;
        }
    }
};

/* Records of one row of a split task, joined by one warp as combine() of args.cuh would, to the
 * bit: 32 at a time, a lane each finds its record's factors (maxima are exact in any order, so
 * prefixes of them are), then all lanes go through the records with their own columns. */
template <typename T, int D> struct row_join {
    static constexpr int N = D / 32; /* columns of a lane */
    static constexpr int AHEAD = 16;

    const launch &p;
    const kn_attn_task task;
    float4
        *factors; /* shared memory of the warp: 32 times part's own and new, whole's own and new */
    float *lengths; /* 32 */
    const int lane, row;
    float part_max,
        all_max; /* of the records so far: of the open group; of those that are closed */
    float part[N], all[N], part_l, all_l;

    __device__ row_join(const launch &p_, const kn_attn_task &task_, float *scratch, int row_)
        : p(p_), task(task_), factors((float4 *)scratch), lengths(scratch + 128),
          lane(threadIdx.x % 32), row(row_), part_max(-INFINITY), all_max(-INFINITY), part{}, all{},
          part_l(0), all_l(0)
    {
    }

    /* Largest of this lane and those before it; with `start`, of those since the last start. */
    __device__ __forceinline__ float prefix_max(float x, bool &start)
    {
#pragma unroll
        for (int d = 1; d < 32; d *= 2) {
            float y = __shfl_up_sync(0xffffffffu, x, d);
            bool f = __shfl_up_sync(0xffffffffu, (int)start, d) != 0;

            if (lane >= d) {
                x = start ? x : fmaxf(x, y);
                start = start || f;
            }
        }
        return x;
    }

    __device__ __forceinline__ bool starts(int i)
    {
        return __ldcg(record<D>(p, task.slot0 + i).unit()) % KN_ATTN_GROUP == 0;
    }

    /* Factors of records base .. base + 31. */
    __device__ __forceinline__ void find(int base)
    {
        const int i = base + lane;
        const bool valid = i < task.n_slots;
        float m = -INFINITY, l = 0;
        bool start = valid && starts(i), none = false;
        const bool head = start, end = i + 1 >= task.n_slots || starts(i + 1);

        if (valid) {
            record<D> r(p, task.slot0 + i);

            m = __ldcg(r.max_of(row));
            l = __ldcg(r.weight_of(row));
        }
        float pm = prefix_max(m, start);
        pm = start ? pm : fmaxf(pm, part_max);
        float before = __shfl_up_sync(0xffffffffu, pm, 1);
        before = lane == 0 ? part_max : before;
        part_max = __shfl_sync(0xffffffffu, pm, 31);

        /* The open group's records of earlier turns count too. */
        float am = fmaxf(prefix_max(lane == 0 ? fmaxf(m, before) : m, none), all_max);
        none = false;
        float closed = prefix_max(end ? am : -INFINITY, none);
        float last = __shfl_up_sync(0xffffffffu, closed, 1);
        last = lane == 0 ? all_max : fmaxf(last, all_max);
        all_max = fmaxf(all_max, __shfl_sync(0xffffffffu, closed, 31));

        __syncwarp();
        factors[lane] =
            make_float4(head ? 0.0f : factor_of(before, pm, p.c), factor_of(m, pm, p.c),
                        end ? factor_of(last, am, p.c) : 1.0f, end ? factor_of(pm, am, p.c) : 0.0f);
        lengths[lane] = l;
        __syncwarp();
    }

    __device__ __forceinline__ void fetch(piece_of_row<N> (&v)[AHEAD], int i0)
    {
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            if (i0 + i < task.n_slots) {
                v[i].read(record<D>(p, task.slot0 + i0 + i).sums(row) + lane * N);
            }
        }
    }

    __device__ __forceinline__ void join(const piece_of_row<N> (&v)[AHEAD], int i0)
    {
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            if (i0 + i < task.n_slots) {
                float4 f = factors[i0 % 32 + i];

                part_l = joined({f.x, f.y}, part_l, lengths[i0 % 32 + i]);
                all_l = joined({f.z, f.w}, all_l, part_l);
#pragma unroll
                for (int n = 0; n < N; n++) {
                    part[n] = joined({f.x, f.y}, part[n], v[i].x[n]);
                    all[n] = joined({f.z, f.w}, all[n], part[n]);
                }
            }
        }
    }

    __device__ __forceinline__ void run()
    {
#pragma unroll 1
        for (int i0 = 0; i0 < task.n_slots; i0 += AHEAD) {
            piece_of_row<N> v[AHEAD];

            fetch(v, i0);
            if (i0 % 32 == 0) {
                find(i0);
            }
            join(v, i0);
        }
    }

    __device__ __forceinline__ void write(const kn_attn_item &it)
    {
        const int packed = it.row0 + row;
        const float inv = final_scale(all_l);
        uint32_t *out =
            (uint32_t *)((T *)p.out +
                         (size_t)(p.row_start[it.seq] + packed / p.group) * p.out_stride +
                         (size_t)(it.kv_head * p.group + packed % p.group) * D + lane * N);

#pragma unroll
        for (int n = 0; n < N; n += 2) {
            out[n / 2] = num<T>::pack(finished(all[n], inv), finished(all[n + 1], inv));
        }
    }
};

/* An item while it is worked on. */
struct cursor {
    kn_attn_item it;
    int ctx;  /* positions in the pages */
    int rows; /* rows of the sequence in this call */
    int unit;

    __device__ __forceinline__ void load(const launch &p, int off, int i)
    {
        it = plan_item(p.plan, off, i);
        ctx = __ldg(p.ctx_len + it.seq);
        rows = __ldg(p.row_start + it.seq + 1) - __ldg(p.row_start + it.seq);
        unit = it.unit0;
    }
    /* Positions of the unit that exist. */
    __device__ __forceinline__ int there() const
    {
        return min(UNIT, ctx - unit * UNIT);
    }
};

/* The warp that copies K and V: a run of a page and head by a lane. */
template <int D, int MT, int S> struct unit_feeder {
    static constexpr int W = D * 2; /* bytes of a row of K */

    const launch &p;
    const uint32_t kv, full, free; /* of the first stage */
    const int lane, piece_rows;
    const uint64_t policy;
    ring<S> at;

    __device__ unit_feeder(const launch &p_, unit_smem<D, MT, S> &sm)
        : p(p_), kv(smem_u32(sm.kv)), full(smem_u32(sm.full)), free(smem_u32(sm.free)),
          lane(threadIdx.x % 32), piece_rows(min(UNIT, 1 << p_.page_shift)),
          policy(read_once()), at{0, 1}
    {
    }

    /* Lane i: the page of the i-th piece of a unit. */
    __device__ __forceinline__ uint32_t page_of(const cursor &c)
    {
        int first = lane * piece_rows, pos = c.unit * UNIT + first;

        return first < c.there()
                   ? __ldg(p.pages + (size_t)c.it.seq * p.pages_stride + (pos >> p.page_shift))
                   : 0;
    }

    /* K (part 0) or V (part 1) of a unit to the next stage. */
    __device__ __forceinline__ void copy(const cursor &c, uint32_t page, int part)
    {
        const int first = lane * piece_rows, there = c.there(), n = min(piece_rows, there - first);
        const int row = (c.unit * UNIT + first) & ((1 << p.page_shift) - 1);
        const uint32_t b = full + at.stage * 8;

        barrier_wait(free + at.stage * 8, at.parity);
        if (lane == 0) {
            barrier_expect(b, (uint32_t)(there * W));
        }
        __syncwarp();
        if (n > 0) {
            const size_t head = (size_t)(part * p.n_kv_heads + c.it.kv_head) << p.page_shift;

            copy_run(kv + (uint32_t)((at.stage * UNIT + first) * W),
                     p.kv + page * p.page_stride + (head + row) * W, (uint32_t)(n * W), b, policy);
        }
        at.next();
    }

    __device__ __forceinline__ void run(int off, int i, int end)
    {
        bool waited = false;
        cursor c;

        c.load(p, off, i);
        uint32_t page = page_of(c);
        for (;;) {
            cursor next = c;
            bool more = true;

            if (++next.unit == c.it.unit1) {
                more = ++i < end;
                if (more) {
                    next.load(p, off, i);
                }
            }
            uint32_t next_page = more ? page_of(next) : 0;

            /* Positions before those of this call lie in the pages already. */
            if (!waited && (c.unit + 1) * UNIT > c.ctx - c.rows) {
                grid_wait();
                waited = true;
            }
            copy(c, page, 0);
            copy(c, page, 1);
            if (!more) {
                return;
            }
            c = next;
            page = next_page;
        }
    }
};

/* The four warps that compute. */
template <typename T, int D, int MT, int S> struct unit_block {
    static constexpr int M = KN_ATTN_DECODE_ROWS * MT;
    static constexpr int NT = D / 32; /* n8 tiles of V's columns a warp */
    static constexpr int W = D * 2;   /* bytes of a row of K */

    const launch &p;
    unit_smem<D, MT, S> &sm;
    const int warp, lane, g, t;
    ring<S> at;
    int limit[MT][2]; /* last position that a row sees */
    int n_valid;      /* rows of the block that exist */
    /* The sum of the current run of units, and of whole groups before it. */
    float acc[MT][NT][4], all[MT][NT][4];
    float acc_m[MT][2], acc_l[MT][2], all_m[MT][2], all_l[MT][2];

    __device__ unit_block(const launch &p_, unit_smem<D, MT, S> &sm_)
        : p(p_), sm(sm_), warp(threadIdx.x / 32), lane(threadIdx.x % 32), g(lane / 4),
          t(lane % 4), at{0, 0}
    {
    }

    __device__ __forceinline__ void sync()
    {
        named_sync<UNIT_CONSUMERS>(1);
    }

    /* The next stage, once it is there. */
    __device__ __forceinline__ uint32_t wait_stage()
    {
        barrier_wait(smem_u32(sm.full) + at.stage * 8, at.parity);
        return smem_u32(sm.kv) + (uint32_t)(at.stage * UNIT * W);
    }

    /* This warp has read it. */
    __device__ __forceinline__ void done_stage()
    {
        __syncwarp();
        if (lane == 0) {
            barrier_arrive(smem_u32(sm.free) + at.stage * 8);
        }
        at.next();
    }

    __device__ __forceinline__ int rows_of(const cursor &c)
    {
        return min(M, c.rows * p.group - c.it.row0);
    }

    /* Starts the copy of an item's rows of q. */
    __device__ __forceinline__ void fetch_q(const cursor &c)
    {
        const int row_first = __ldg(p.row_start + c.it.seq), n = rows_of(c);

#pragma unroll
        for (int e = threadIdx.x; e < M * (D / 8); e += UNIT_CONSUMERS) {
            int row = e / (D / 8), i = e % (D / 8), packed = c.it.row0 + min(row, n - 1);

            cp_async16(smem_u32(sm.q) + piece<W>(row, i),
                       (const T *)p.q + (size_t)(row_first + packed / p.group) * p.q_stride +
                           (size_t)(c.it.kv_head * p.group + packed % p.group) * D + i * 8,
                       row < n);
        }
        cp_commit();
    }

    /* What each row sees. */
    __device__ __forceinline__ void start_item(const cursor &c)
    {
        const int total = c.rows * p.group;
        const int first_pos = c.ctx - c.rows;

        n_valid = rows_of(c);
#pragma unroll
        for (int mt = 0; mt < MT; mt++) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                int row = min(c.it.row0 + mt * 16 + h * 8 + g, total - 1);

                limit[mt][h] = first_pos + row / p.group;
                all_m[mt][h] = -INFINITY;
                all_l[mt][h] = 0;
            }
#pragma unroll
            for (int n = 0; n < NT; n++) {
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    all[mt][n][e] = 0;
                }
            }
        }
        clear_run();
        cp_wait<0>();
        sync(); /* q is there */
    }

    __device__ __forceinline__ void clear_run()
    {
#pragma unroll
        for (int mt = 0; mt < MT; mt++) {
            acc_m[mt][0] = acc_m[mt][1] = -INFINITY;
            acc_l[mt][0] = acc_l[mt][1] = 0;
#pragma unroll
            for (int n = 0; n < NT; n++) {
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    acc[mt][n][e] = 0;
                }
            }
        }
    }

    /* Scores of this warp's 32 positions, masked; their largest to shared memory. */
    __device__ __forceinline__ void scores(const cursor &c, uint32_t k, float s[MT][4][4])
    {
        const uint32_t q = smem_u32(sm.q);

#pragma unroll
        for (int mt = 0; mt < MT; mt++) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                s[mt][j][0] = s[mt][j][1] = s[mt][j][2] = s[mt][j][3] = 0;
            }
        }
#pragma unroll
        for (int ks = 0; ks < D / 16; ks++) {
            uint32_t b[2][4], a[4];

#pragma unroll
            for (int j = 0; j < 2; j++) {
                int row = warp * 32 + j * 16 + (lane & 7) + ((lane >> 4) << 3);

                ldsm4(b[j], k + piece<W>(row, ks * 2 + ((lane >> 3) & 1)));
            }
#pragma unroll
            for (int mt = 0; mt < MT; mt++) {
                ldsm4(a, q + piece<W>(mt * 16 + (lane & 15), ks * 2 + (lane >> 4)));
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    num<T>::mma(s[mt][j], a, b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
                }
            }
        }
        const int pos0 = c.unit * UNIT + warp * 32 + 2 * t;
        const bool masked = (c.unit + 1) * UNIT - 1 > c.ctx - c.rows;
#pragma unroll
        for (int mt = 0; mt < MT; mt++) {
            float m[2] = {-INFINITY, -INFINITY};

#pragma unroll
            for (int j = 0; j < 4; j++) {
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    if (masked && pos0 + j * 8 + (e & 1) > limit[mt][e / 2]) {
                        s[mt][j][e] = -INFINITY;
                    }
                    m[e / 2] = fmaxf(m[e / 2], s[mt][j][e]);
                }
            }
#pragma unroll
            for (int h = 0; h < 2; h++) {
                float x = quad_max(m[h]);

                if (t == 0) {
                    sm.max[warp][mt * 16 + h * 8 + g] = x;
                }
            }
        }
    }

    /* Weights from scores, rounded to shared memory; partial sums of them too. Returns the largest
     * scores of the unit in m. */
    __device__ __forceinline__ void weights(const float s[MT][4][4], float m[MT][2])
    {
#pragma unroll
        for (int mt = 0; mt < MT; mt++) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                int row = mt * 16 + h * 8 + g;
                float x = fmaxf(fmaxf(sm.max[0][row], sm.max[1][row]),
                                fmaxf(sm.max[2][row], sm.max[3][row]));
                float offset = offset_of(x, p.c), sum = 0;

                m[mt][h] = x;
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    float w0 = weight_of(s[mt][j][h * 2], p.c, offset);
                    float w1 = weight_of(s[mt][j][h * 2 + 1], p.c, offset);

                    sum = __fadd_rn(__fadd_rn(sum, w0), w1);
                    *(uint32_t *)((char *)sm.p + piece<UNIT * 2>(row, warp * 4 + j) + t * 4) =
                        num<T>::pack(w0, w1);
                }
                sm.sum[warp][row][t] = sum;
            }
        }
    }

    /* V behind the end of the sequence may be anything; zero times that must be zero. Each warp
     * clears its own columns. */
    __device__ __forceinline__ void clear_tail(const cursor &c, uint32_t v)
    {
        constexpr int PIECES = D / 32;

        if (c.there() < UNIT) {
            for (int e = c.there() * PIECES + lane; e < UNIT * PIECES; e += 32) {
                asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(
                                 v + piece<W>(e / PIECES, warp * PIECES + e % PIECES)),
                             "r"(0)
                             : "memory");
            }
            fence_async();
            __syncwarp();
        }
    }

    /* Weights times V, joined to the run. */
    __device__ __forceinline__ void products(uint32_t v, const float m[MT][2])
    {
        const uint32_t w = smem_u32(sm.p);
        float o[MT][NT][4] = {};

#pragma unroll
        for (int kt = 0; kt < UNIT / 16; kt++) {
            uint32_t a[4], b[NT / 2][4];

#pragma unroll
            for (int n = 0; n < NT / 2; n++) {
                int row = kt * 16 + (lane & 15);

                ldsm4_t(b[n], v + piece<W>(row, warp * NT + n * 2 + (lane >> 4)));
            }
#pragma unroll
            for (int mt = 0; mt < MT; mt++) {
                ldsm4(a, w + piece<UNIT * 2>(mt * 16 + (lane & 15), kt * 2 + (lane >> 4)));
#pragma unroll
                for (int n = 0; n < NT; n++) {
                    num<T>::mma(o[mt][n], a, b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]);
                }
            }
        }
#pragma unroll
        for (int mt = 0; mt < MT; mt++) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                int row = mt * 16 + h * 8 + g;
                float l = __fadd_rn(__fadd_rn(sm.sum[0][row][t], sm.sum[1][row][t]),
                                    __fadd_rn(sm.sum[2][row][t], sm.sum[3][row][t]));
                factors f = merge(acc_m[mt][h], m[mt][h], p.c);

                acc_l[mt][h] = joined(f, acc_l[mt][h], quad_sum(l));
#pragma unroll
                for (int n = 0; n < NT; n++) {
                    acc[mt][n][h * 2] = joined(f, acc[mt][n][h * 2], o[mt][n][h * 2]);
                    acc[mt][n][h * 2 + 1] = joined(f, acc[mt][n][h * 2 + 1], o[mt][n][h * 2 + 1]);
                }
            }
        }
    }

    /* The run joins the whole. */
    __device__ __forceinline__ void end_group()
    {
#pragma unroll
        for (int mt = 0; mt < MT; mt++) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                factors f = merge(all_m[mt][h], acc_m[mt][h], p.c);

                all_l[mt][h] = joined(f, all_l[mt][h], acc_l[mt][h]);
#pragma unroll
                for (int n = 0; n < NT; n++) {
                    all[mt][n][h * 2] = joined(f, all[mt][n][h * 2], acc[mt][n][h * 2]);
                    all[mt][n][h * 2 + 1] = joined(f, all[mt][n][h * 2 + 1], acc[mt][n][h * 2 + 1]);
                }
            }
        }
        clear_run();
    }

    __device__ __forceinline__ void write_record(int slot, int unit)
    {
        record<D> r(p, slot);

#pragma unroll
        for (int mt = 0; mt < MT; mt++) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                int row = mt * 16 + h * 8 + g;

                if (row < n_valid) {
#pragma unroll
                    for (int n = 0; n < NT; n++) {
                        *(float2 *)(r.sums(row) + warp * (D / 4) + n * 8 + 2 * t) =
                            make_float2(acc[mt][n][h * 2], acc[mt][n][h * 2 + 1]);
                    }
                    if (warp == 0 && t == 0) {
                        *r.max_of(row) = acc_m[mt][h];
                        *r.weight_of(row) = acc_l[mt][h];
                    }
                }
            }
        }
        if (threadIdx.x == 0) {
            *r.unit() = unit;
        }
        clear_run();
    }

    __device__ __forceinline__ void write_rows(const cursor &c)
    {
        const int row_first = __ldg(p.row_start + c.it.seq);

#pragma unroll
        for (int mt = 0; mt < MT; mt++) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                int row = mt * 16 + h * 8 + g, packed = c.it.row0 + row;
                float inv = final_scale(all_l[mt][h]);

                if (row < n_valid) {
                    T *out = (T *)p.out + (size_t)(row_first + packed / p.group) * p.out_stride +
                             (size_t)(c.it.kv_head * p.group + packed % p.group) * D +
                             warp * (D / 4) + 2 * t;

#pragma unroll
                    for (int n = 0; n < NT; n++) {
                        *(uint32_t *)(out + n * 8) = num<T>::pack(
                            finished(all[mt][n][h * 2], inv), finished(all[mt][n][h * 2 + 1], inv));
                    }
                }
            }
        }
    }

    /* After a unit: what its end closes. `slot` is the item's next record. */
    __device__ __forceinline__ void close(const cursor &c, int &slot)
    {
        constexpr int G = KN_ATTN_GROUP;
        const bool end = c.unit + 1 == c.it.unit1;
        const bool group_end = (c.unit + 1) % G == 0 || end;

        if (c.it.slot < 0) {
            if (group_end) {
                end_group();
            }
            if (end) {
                write_rows(c);
            }
            return;
        }
        const int group = c.unit / G * G;
        if (group < c.it.unit0) {
            write_record(slot++, c.unit);
        } else if (group_end) {
            write_record(slot++, group);
        }
        if (end) {
            kn_attn_task task = plan_task(p.plan, c.it.task);

            if (is_last<UNIT_CONSUMERS>(p, c.it, task, &sm.flag)) {
                /* Weights are read: their place serves the four warps. */
                for (int row = warp; row < n_valid; row += 4) {
                    row_join<T, D> join(p, task, (float *)sm.p + warp * 160, row);

                    join.run();
                    join.write(c.it);
                }
            }
        }
    }

    __device__ __forceinline__ void run(int off, int i, int end)
    {
        cursor c, next;

        c.load(p, off, i);
        grid_wait();
        fetch_q(c);
        start_item(c);
        int slot = c.it.slot;
        for (;;) {
            float s[MT][4][4], m[MT][2];
            bool more = true, other = false;

            next = c;
            if (++next.unit == c.it.unit1) {
                other = true;
                more = ++i < end;
                if (more) {
                    next.load(p, off, i);
                }
            }
            scores(c, wait_stage(), s);
            done_stage();
            sync(); /* q is read, maxima are there */
            if (other && more) {
                fetch_q(next);
            }
            weights(s, m);
            sync();
            const uint32_t v = wait_stage();
            clear_tail(c, v);
            products(v, m);
            done_stage();
            close(c, slot);
            if (!more) {
                return;
            }
            c = next;
            if (other) {
                start_item(c);
                slot = c.it.slot;
            }
        }
    }
};

template <typename T, int D, int MT, int S, int BLOCKS>
__global__ void __launch_bounds__(UNIT_THREADS, BLOCKS)
    unit_kernel(const __grid_constant__ launch p)
{
    extern __shared__ __align__(128) char unit_shared[];
    unit_smem<D, MT, S> &sm = *(unit_smem<D, MT, S> *)unit_shared;
    const int32_t *first = plan_first(p.plan);
    const int off = __ldg(&p.plan->off_items);
    const int i = __ldg(first + blockIdx.x), end = __ldg(first + blockIdx.x + 1);

    grid_launch_dependents();
    if (i == end) {
        grid_wait();
        return;
    }
    if (threadIdx.x == 0) {
        for (int s = 0; s < S; s++) {
            barrier_init(smem_u32(sm.full + s), 1);
            barrier_init(smem_u32(sm.free + s), UNIT_CONSUMERS / 32);
        }
        barrier_init_done();
    }
    __syncthreads();
    if (threadIdx.x < UNIT_CONSUMERS) {
        unit_block<T, D, MT, S>(p, sm).run(off, i, end);
    } else {
        unit_feeder<D, MT, S>(p, sm).run(off, i, end);
    }
}

} // namespace attn

#endif
