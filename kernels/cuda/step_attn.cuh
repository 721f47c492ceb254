/* Attention as a phase of the step kernel: one row a sequence, its past positions by way of the ring.
 *
 * Positions are cut into units that fill a stage of the ring, K then V; the units of all rows and KV
 * heads lie in one line, of which each block has an equal piece. Past positions do not depend on this
 * step, so they are on their way long before q is there; the new position is put into the stage by the
 * warp that works on it. The query heads of a KV head are the rows of the products. Four warps take a
 * unit, the other four the next; a warp has 16 positions at a time and keeps sums of its own, which
 * are added up over the warps at the end of a run (consecutive units of one row and KV head), then over
 * the runs by whoever joins, both in one order. Numbers of a record carry the number of their phase, so
 * the joining warps know what is there. */
#ifndef KN_CUDA_STEP_ATTN_CUH
#define KN_CUDA_STEP_ATTN_CUH

#include "kernels/cuda/step.cuh"

namespace {

constexpr int MOST_GROUP = 8; // query heads of a KV head

// A block's piece of the line of units, one after the other.
struct Walk {
    int row, head, unit, units; // `units` of the row
    int left;                   // in the piece
};

template <int D> struct Units {
    static constexpr int N = STAGE / 4 / D; // positions of a unit

    const kn_cuda_step_args &a;
    int total;

    __device__ Units(const kn_cuda_step_args &args) : a(args), total(0)
    {
        for (int r = 0; r < a.rows; r++)
            total += of_row(r) * a.heads.n_kv_heads;
    }
    __device__ inline int ctx(int row) const { return __ldg(a.ctx_len + row); }
    __device__ inline int of_row(int row) const { return (ctx(row) + N - 1) / N; }
    __device__ inline int first_of(int block) const
    {
        // Few units: one for each of the first blocks.
        return total <= (int)gridDim.x ? min(block, total) : (int)((long long)block * total / (int)gridDim.x);
    }
    __device__ inline int block_of(int unit) const
    {
        return total <= (int)gridDim.x ? unit : (int)(((long long)(unit + 1) * gridDim.x - 1) / total);
    }
    __device__ Walk start() const
    {
        int at = first_of(blockIdx.x);
        Walk w = {0, 0, 0, 0, first_of(blockIdx.x + 1) - at};

        if (w.left == 0)
            return w;
        while (at >= of_row(w.row) * a.heads.n_kv_heads)
            at -= of_row(w.row++) * a.heads.n_kv_heads;
        w.units = of_row(w.row);
        w.head = at / w.units;
        w.unit = at % w.units;
        return w;
    }
    // True when a run has ended.
    __device__ bool next(Walk &w) const
    {
        w.left--;
        if (++w.unit < w.units)
            return w.left == 0;
        w.unit = 0;
        if (++w.head == a.heads.n_kv_heads && w.left > 0) {
            w.head = 0;
            do
                w.units = of_row(++w.row);
            while (w.units == 0);
        }
        return true;
    }
};

// The feeding warp: past positions of the block's units.
template <int D>
__device__ void produce_kv(const Units<D> &u, const kn_cuda_step_phase &p, Walk w, Feeder &f, char *stages,
                           uint64_t policy)
{
    const kn_cuda_step_args &a = u.a;
    int lane = threadIdx.x & 31, part = lane / 16, tokens = a.heads.page_tokens;
    int first = lane % 16 * tokens; // position in the unit of this lane's piece

    while (w.left > 0) {
        int pos = w.unit * Units<D>::N + first, past = min(Units<D>::N, u.ctx(w.row) - 1 - w.unit * Units<D>::N);
        int n = min(tokens, past - first);
        const char *src = nullptr;

        if (n > 0) {
            uint32_t page = __ldg(a.pages + (size_t)w.row * a.pages_stride + pos / tokens);

            src = (const char *)p.kv + page * a.heads.page_stride + part * (a.heads.page_stride / 2) +
                  ((size_t)w.head * tokens + (pos & (tokens - 1))) * D * 2;
            n = min(n, tokens - (pos & (tokens - 1)));
        }
        int s = f.next((uint32_t)max(past, 0) * D * 4);

        if (n > 0)
            copy_row(stages + s * STAGE + part * (STAGE / 2) + first * D * 2, src, (uint32_t)n * D * 2,
                     &f.ring.full[s], policy);
        u.next(w);
    }
}

// What a warp joins: `record`: bytes to the first of n; element `at` of the head of the group.
struct Item {
    int n, record, head, at, row, out;
};
__device__ inline int items_of(const kn_cuda_step_args &a, int head_dim)
{
    return a.rows * a.heads.n_heads * head_dim / 16;
}
template <int D> __device__ Item item_of(const Units<D> &u, int i)
{
    const kn_cuda_step_args &a = u.a;
    int group = a.heads.n_heads / a.heads.n_kv_heads, per_task = group * D / 16, task = i / per_task;
    int row = task / a.heads.n_kv_heads, head = task % a.heads.n_kv_heads;
    int units = row < a.rows ? u.of_row(row) : 0, first = head * units, at = i % per_task * 16;
    Item it = {0, 0, at / D, at, row, head * group * D + at};

    for (int r = 0; r < row && r < a.rows; r++)
        first += u.of_row(r) * a.heads.n_kv_heads;
    if (units > 0) {
        int block = u.block_of(first);

        it.n = u.block_of(first + units - 1) - block + 1;
        it.record = (block + task) * group * (D * 8 + 16);
    }
    return it;
}

template <typename T, int D> struct Attention {
    static constexpr int TILES = D / 16, KG = D / 64, N = Units<D>::N;

    const Units<D> &u;
    const kn_cuda_step_args &a;
    const kn_cuda_step_phase &p;
    const T *qkv;     // [rows, x_stride]
    char *scratch;    // sums of the warps
    uint32_t tag;     // of this phase
    int warp, lane, g, t, group;
    float c;          // scale * log2(e)
    uint32_t q[KG * 8]; // of query head g
    float m, l;         // of query head g: largest score, this lane's share of the weights
    uint4 fresh;        // lanes 0 .. D / 8 of each half: K or V of the new position
    float o[TILES][4];  // sums of query heads 2 t, + 1 in two columns, see products

    __device__ Attention(const Units<D> &units, const kn_cuda_step_phase &phase, const Flow &flow,
                         char *shared, uint32_t number)
        : u(units), a(units.a), p(phase), qkv((const T *)flow.at(phase.x)), scratch(shared), tag(number),
          warp(threadIdx.x / 32), lane(threadIdx.x & 31), g(lane / 4), t(lane % 4),
          group(a.heads.n_heads / a.heads.n_kv_heads), c(a.scale * 1.4426950408889634f)
    {
    }

    __device__ inline int row_floats() const { return 8 * group + 1; }
    __device__ inline float *sums_of(int w) const { return (float *)scratch + w * (D / 8) * row_floats(); }
    __device__ inline float2 *ends_of(int w) const // largest score, weight of each head
    {
        return (float2 *)sums_of(WARPS) + w * MOST_GROUP;
    }
    // Records: sums [group][D], then (largest, weight) of each head; every number with its tag.
    __device__ inline char *record(int block, int task) const
    {
        return (char *)a.records + (size_t)(block + task) * (group * (D * 8 + 16));
    }

    __device__ void begin(const Walk &w)
    {
        const char *at = (const char *)(qkv + (size_t)w.row * p.x_stride + (w.head * group + g) * D + t * 16);
        uint4 v[KG * 2];

        m = -INFINITY;
        l = 0;
        fresh = load_now(fresh_at(w));
#pragma unroll
        for (int i = 0; i < TILES; i++)
            o[i][0] = o[i][1] = o[i][2] = o[i][3] = 0;
#pragma unroll
        for (int i = 0; i < KG * 2; i++)
            v[i] = g < group ? load_now(at + i / 2 * 128 + i % 2 * 16) : make_uint4(0, 0, 0, 0);
#pragma unroll
        for (int i = 0; i < KG * 2; i++) {
            settle(v[i], at + i / 2 * 128 + i % 2 * 16);
            q[i * 4] = v[i].x;
            q[i * 4 + 1] = v[i].y;
            q[i * 4 + 2] = v[i].z;
            q[i * 4 + 3] = v[i].w;
        }
        __syncwarp();
    }

    __device__ inline const T *fresh_at(const Walk &w) const
    {
        return qkv + (size_t)w.row * p.x_stride +
               (a.heads.n_heads + lane / 16 * a.heads.n_kv_heads + w.head) * D + lane % (D / 8) * 8;
    }
    // K and V of the new position into row `at` of the stage, permuted like those from the pages.
    __device__ void put_new(const Walk &w, char *stage, int at)
    {
        settle(fresh, fresh_at(w));
        if (lane % 16 < D / 8)
            *(uint4 *)(stage + lane / 16 * (STAGE / 2) + at * D * 2 + in_page(at, lane % 16 * 8) * 2) = fresh;
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); // the copy engine writes here next
        __syncwarp();
    }

    // Scores of positions `first` + 2 t, + 1, + 8, + 9 of the tile.
    __device__ inline void scores(const char *k, float (&s)[2][4])
    {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            s[h][0] = s[h][1] = s[h][2] = s[h][3] = 0;
#pragma unroll
            for (int i = 0; i < KG; i++) {
                const uint4 *r = (const uint4 *)(k + (h * 8 + g) * D * 2 + i * 128);
                uint4 lo = r[2 * t ^ g], hi = r[(2 * t + 1) ^ g];

                mma<T>(s[h], q[i * 8], 0, q[i * 8 + 1], 0, lo.x, lo.y);
                mma<T>(s[h], q[i * 8 + 2], 0, q[i * 8 + 3], 0, lo.z, lo.w);
                mma<T>(s[h], q[i * 8 + 4], 0, q[i * 8 + 5], 0, hi.x, hi.y);
                mma<T>(s[h], q[i * 8 + 6], 0, q[i * 8 + 7], 0, hi.z, hi.w);
            }
        }
    }

    // Adds V times weights: columns of V are the rows of the product, query heads its columns. A lane
    // reads pieces of 8 columns of positions 2 t, + 1, + 8, + 9 of the tile, of which `left` exist.
    // D 128: tile i has element i of pieces 2 g (rows 0 .. 7) and 2 g + 1; D 64: elements 2 i and 2 i + 1
    // of piece g.
    __device__ inline void products(const char *v, uint32_t w0, uint32_t w1, int left)
    {
        uint4 x[4][KG];
        int turn = g & 1, piece = g * KG;

#pragma unroll
        for (int i = 0; i < 4; i++) {
            int r = 2 * t + (i & 1) + (i >> 1) * 8, by = r & 7;
            const uint4 *at = (const uint4 *)(v + r * D * 2);

            if (KG == 2) {
                uint4 y = at[(piece + turn) ^ by], z = at[(piece + (turn ^ 1)) ^ by];

                x[i][0] = turn ? z : y;
                x[i][KG - 1] = turn ? y : z;
            } else {
                x[i][0] = at[piece ^ by];
            }
            if (r >= left) { // what lies there may be anything
#pragma unroll
                for (int h = 0; h < KG; h++)
                    x[i][h] = make_uint4(0, 0, 0, 0);
            }
        }
#pragma unroll
        for (int i = 0; i < TILES; i++) {
            constexpr uint32_t LOW = 0x5410, HIGH = 0x7632;
            int e0 = KG == 2 ? i : 2 * i, e1 = KG == 2 ? i : 2 * i + 1;
            uint32_t s0 = e0 & 1 ? HIGH : LOW, s1 = e1 & 1 ? HIGH : LOW;
            uint32_t a[4];

#pragma unroll
            for (int j = 0; j < 2; j++) {
                a[j * 2] = __byte_perm(word(x[j * 2][0], e0 / 2), word(x[j * 2 + 1][0], e0 / 2), s0);
                a[j * 2 + 1] =
                    __byte_perm(word(x[j * 2][KG - 1], e1 / 2), word(x[j * 2 + 1][KG - 1], e1 / 2), s1);
            }
            mma<T>(o[i], a[0], a[1], a[2], a[3], w0, w1);
        }
    }
    __device__ inline uint32_t word(const uint4 &v, int i) const
    {
        return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
    }

    // 16 positions from `at` on in the stage.
    __device__ void tile(const Walk &w, char *stage, int at)
    {
        int pos = w.unit * N + at, left = u.ctx(w.row) - pos;
        float s[2][4], most = -INFINITY, sum = 0;

        if (left <= 0)
            return;
        if (left <= 16)
            put_new(w, stage, at + left - 1);
        scores(stage + at * D * 2, s);
#pragma unroll
        for (int h = 0; h < 2; h++) {
#pragma unroll
            for (int e = 0; e < 2; e++) {
                if (2 * t + e + h * 8 >= left)
                    s[h][e] = -INFINITY;
                most = fmaxf(most, s[h][e]);
            }
        }
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
        most = fmaxf(most, m);
        float f = exp2f((m - most) * c), offset = most * c;
        m = most;
#pragma unroll
        for (int h = 0; h < 2; h++) {
#pragma unroll
            for (int e = 0; e < 2; e++) {
                s[h][e] = exp2f(s[h][e] * c - offset);
                sum += s[h][e];
            }
        }
        l = l * f + sum;
        float f0 = __shfl_sync(0xffffffffu, f, t * 8), f1 = __shfl_sync(0xffffffffu, f, t * 8 + 4);
#pragma unroll
        for (int i = 0; i < TILES; i++) {
            o[i][0] *= f0;
            o[i][1] *= f1;
            o[i][2] *= f0;
            o[i][3] *= f1;
        }
        products(stage + STAGE / 2 + at * D * 2, pack<T>(s[0][0], s[0][1]), pack<T>(s[1][0], s[1][1]), left);
    }

    // Where element d of a head lies in a warp's sums.
    __device__ inline int place(int head, int d) const
    {
        int row = KG == 2 ? d % 8 * 2 + d / 8 % 2 : d % 8;

        return row * row_floats() + head * 8 + d / (8 * KG);
    }

    __device__ inline void put(char *to, float x)
    {
        asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to),
                     "l"((unsigned long long)tag << 32 | __float_as_uint(x))
                     : "memory");
    }

    // The warps' sums of a run become its record.
    __device__ void end(int task)
    {
        char *to = record(blockIdx.x, task);

        l += __shfl_xor_sync(0xffffffffu, l, 1);
        l += __shfl_xor_sync(0xffffffffu, l, 2);
        float *mine = sums_of(warp) + t * 16 + g;
#pragma unroll
        for (int i = 0; i < TILES * 2; i++, mine += row_floats()) {
            if (2 * t < group)
                mine[0] = o[i / 2][i % 2 * 2];
            if (2 * t + 1 < group)
                mine[8] = o[i / 2][i % 2 * 2 + 1];
        }
        if (t == 0 && g < group)
            ends_of(warp)[g] = make_float2(m, l);
        meet();
        for (int i = threadIdx.x; i < group * D; i += CONSUMERS) {
            int head = i / D, d = i % D;
            float most = -INFINITY, x = 0, sum = 0;

#pragma unroll
            for (int w = 0; w < WARPS; w++)
                most = fmaxf(most, ends_of(w)[head].x);
#pragma unroll
            for (int w = 0; w < WARPS; w++) {
                float2 e = ends_of(w)[head];
                float f = exp2f((e.x - most) * c);

                x += sums_of(w)[place(head, d)] * f;
                sum += e.y * f;
            }
            put(to + i * 8, x);
            if (d == 0) {
                put(to + group * D * 8 + head * 16, most);
                put(to + group * D * 8 + head * 16 + 8, sum);
            }
        }
        meet(); // the next run's sums go to the same place
    }

    // The units of this block.
    __device__ void run(Walk w, Ring &ring, char *stages, Cursor &at)
    {
        bool fresh = true;

        for (int i = 0; w.left > 0; i++) {
            int task = w.row * a.heads.n_kv_heads + w.head;
            char *stage = stages + at.s * STAGE;

            if (fresh)
                begin(w);
            barrier_wait(&ring.full[at.s], at.turn);
            if ((i & 1) == warp / 4) {
#pragma unroll 1
                for (int k = warp % 4 * 16; k < N; k += 64)
                    tile(w, stage, k);
            }
            __syncwarp();
            if (lane == 0)
                barrier_arrive(&ring.empty[at.s]);
            at.next();
            fresh = u.next(w);
            if (fresh)
                end(task);
        }
    }

    // Joins what an item names: 16 elements of a query head of a row, from all its records, every other
    // one by the other half of the warp.
    __device__ void join(const Item &it, T *out)
    {
        constexpr int BATCH = 12;
        const int size = group * (D * 8 + 16), half = lane / 16;
        const char *r = (const char *)a.records + it.record;
        float most = -INFINITY, x = 0, sum = 0;

        for (int k0 = 0; k0 < it.n; k0 += 2 * BATCH, r += 2 * BATCH * size) {
            const int n = min(2 * BATCH, it.n - k0);
            const char *ends = r + lane * size + group * D * 8 + it.head * 16;
            const char *mine = r + half * size + (it.at + lane % 16) * 8;
            unsigned long long v[BATCH];
            uint4 e = make_uint4(__float_as_uint(-INFINITY), tag, 0, tag);

            if (lane < n)
                e = load_now(ends);
#pragma unroll
            for (int k = 0; k < BATCH; k++)
                v[k] = 2 * k + half < n ? load_number(mine + 2 * k * size) : 0;
            for (bool missing = true; missing;) { // all that is missing is asked for together
                missing = e.y != tag || e.w != tag;
                if (missing)
                    e = load_now(ends);
#pragma unroll
                for (int k = 0; k < BATCH; k++) {
                    if (2 * k + half < n && (uint32_t)(v[k] >> 32) != tag) {
                        v[k] = load_number(mine + 2 * k * size);
                        missing = true;
                    }
                }
            }
            __syncwarp();
            float top = fmaxf(most, warp_max(__uint_as_float(e.x)));
            float f = exp2f((__uint_as_float(e.x) - top) * c), was = exp2f((most - top) * c);

            sum = sum * was + warp_sum(__uint_as_float(e.z) * f);
            x *= was;
            most = top;
#pragma unroll
            for (int k = 0; k < BATCH; k++) {
                float fk = __shfl_sync(0xffffffffu, f, 2 * k + half);

                if (2 * k + half < n)
                    x += __uint_as_float((uint32_t)v[k]) * fk;
            }
        }
        x += __shfl_xor_sync(0xffffffffu, x, 16);
        x = it.n > 0 ? x / sum : 0;
        float y = __shfl_down_sync(0xffffffffu, x, 1);
        if (half == 0 && (lane & 1) == 0)
            store_word(out + (size_t)it.row * p.out_stride + it.out + lane, pack<T>(x, y));
    }
    __device__ inline unsigned long long load_number(const char *from)
    {
        unsigned long long x;

        asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(x) : "l"(from) : "memory");
        return x;
    }
    __device__ inline float warp_max(float x)
    {
        for (int d = 16; d > 0; d >>= 1)
            x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, d));
        return x;
    }
    __device__ void join_all(const Item &first, T *out)
    {
        for (int i = blockIdx.x + gridDim.x * warp; i < items_of(a, D); i += gridDim.x * WARPS)
            join(i < (int)gridDim.x * WARPS ? first : item_of(u, i), out);
    }
};

// Shared memory that attention's sums take.
inline size_t attention_bytes(const kn_cuda_heads &h)
{
    int group = h.n_heads / h.n_kv_heads;

    return (size_t)WARPS * h.head_dim / 8 * (8 * group + 1) * 4 + WARPS * MOST_GROUP * 8;
}

} // namespace

#endif
