/* A decode step of up to 4 rows in one kernel: for each layer what QKV, attention, the output projection
 * of attention, gate and up, and down make of the residual stream, then logits.
 *
 * Such a step is bound by reading weights, and what costs time is memory standing still. Here one block
 * a multiprocessor stays through all phases. A warp feeds a ring of 200 KB in shared memory with the
 * block's share of the weights of all phases, and of the K and V of past positions (step_attn.cuh), and
 * never waits for activations. The other eight wait only for the elements of x that they read
 * (step.cuh), 1-2 us from the last store of a phase to the first product of the next; meanwhile memory
 * fills the ring, about 26 MB or 6 us. Down begins with the columns that are there and asks for the last
 * ones when it comes to them.
 *
 * What was measured on the way (H200): pieces of 1 KB of a row 3.3 TB/s, of 2 KB 4.2, rows beginning
 * on 128 bytes of shared memory 7 % faster than padded ones (hence the turns that neighbours take to
 * read their halves), 4 stages as good as 6; asking for weights ahead into the second-level cache takes
 * a third of the rate; x of several rows of the down projection is better read as it is needed.
 *
 * A group of 16 weight rows belongs to one block with all of K, in chunks of 1,024 columns: 8 warps
 * take twice 64 columns each by mma.sync, rows of x as the N of 8, and add up in shared memory, in the
 * order of the warps. Rows of a group are chosen so that what follows sees its pairs in one warp: gate
 * and up, or both elements that the rotary embedding turns. Columns are permuted inside a lane's 16,
 * the same way on both sides, so that loads are 16 bytes wide.
 *
 * All blocks must be on the card at once: one a multiprocessor, and nothing that waits for them starts
 * before they have. */
#include "kernels/cuda/step_attn.cuh"

namespace {

__device__ inline int groups_of(const kn_cuda_step_phase &p) { return (p.n + GROUP - 1) / GROUP; }

// Groups of all phases are dealt out in one row, so that who has one more in a phase has one less in
// the next: first of this block where `dealt` groups went before.
__device__ inline int first_group(int dealt)
{
    int g = (int)blockIdx.x - dealt % (int)gridDim.x;

    return g < 0 ? g + (int)gridDim.x : g;
}

// Row of the weights that is row i of a group; pairs are 8 apart.
__device__ inline int row_of(const kn_cuda_step_args &a, const kn_cuda_step_phase &p, int group, int i)
{
    int row = group * GROUP + i;

    if (p.kind == KN_STREAM_SWIGLU)
        row = group * 8 + (i & 7) + (i < 8 ? 0 : p.n / 2);
    if (p.kind == KN_STREAM_QKV) {
        int half = a.heads.head_dim / 2, pair = group * 8 + (i & 7);
        HeadPlace at = pair_at(pair % half, half, a.heads.interleaved);

        row = pair / half * a.heads.head_dim + (i < 8 ? at.a : at.b);
    }
    return row < p.n ? row : p.n - 1;
}

// The ninth warp: all that the block reads, phase by phase.
template <int D> __device__ void produce(const Args &args, Ring &ring, char *stages)
{
    const kn_cuda_step_args &a = args.s;
    Feeder f(ring, args.stages, args.flight);
    Units<D> units(a);
    const Walk piece = units.start();
    int lane = threadIdx.x & 31, dealt = 0;
    const uint64_t policy = read_once();

    for (int ph = 0; ph < a.n_phases; ph++) {
        const kn_cuda_step_phase &p = a.phases[ph];
        int n = groups_of(p);

        if (!p.w) {
            produce_kv<D>(units, p, piece, f, stages, policy);
            continue;
        }
        for (int g = first_group(dealt); g < n; g += gridDim.x) {
            const uint16_t *row = (const uint16_t *)p.w + (size_t)row_of(a, p, g, lane & 15) * p.k;

            for (int c = 0; c < p.k; c += CHUNK) {
                uint32_t bytes = (uint32_t)(p.k - c < CHUNK ? p.k - c : CHUNK) * 2;
                int s = f.next(bytes * GROUP);

                if (lane < GROUP)
                    copy_row(stages + s * STAGE + lane * ROW_BYTES, row + c, bytes, &ring.full[s], policy);
            }
        }
        dealt += n;
    }
}

struct XPart { // of a row of x: 16 columns
    uint4 a, b;
};

// What a lane of the storing warp needs beside the sum of one output; asked for before the products.
struct Beside {
    float2 turn; // QKV: cos, sin
    float bias_a, bias_b;
    uint32_t old; // ADD
};

template <typename T> struct Products {
    const kn_cuda_step_args &a;
    Shared &sh;
    char *stages, *h; // h: rows of x
    const Flow flow;
    Cursor at;
    int buf, dealt;
    const int warp, lane;

    __device__ Products(const kn_cuda_step_args &args, Shared &shared, char *ring, char *x, const Flow &f,
                        int n_stages)
        : a(args), sh(shared), stages(ring), h(x), flow(f), at{0, 0, n_stages}, buf(0), dealt(0),
          warp(threadIdx.x / 32), lane(threadIdx.x & 31)
    {
    }

    __device__ inline float squares(const uint4 &v) const
    {
        float2 x = unpack<T>(v.x), y = unpack<T>(v.y), z = unpack<T>(v.z), w = unpack<T>(v.w);
        float sum = x.x * x.x + x.y * x.y;

        sum += y.x * y.x + y.y * y.y;
        sum += z.x * z.x + z.y * z.y;
        return sum + (w.x * w.x + w.y * w.y);
    }
    __device__ inline uint4 normed(const uint4 &v, float scale, const float4 &lo, const float4 &hi) const
    {
        float2 x = unpack<T>(v.x), y = unpack<T>(v.y), z = unpack<T>(v.z), w = unpack<T>(v.w);

        return make_uint4(pack<T>(x.x * scale * lo.x, x.y * scale * lo.y),
                          pack<T>(y.x * scale * lo.z, y.y * scale * lo.w),
                          pack<T>(z.x * scale * hi.x, z.y * scale * hi.y),
                          pack<T>(w.x * scale * hi.z, w.y * scale * hi.w));
    }
    // 1 / rms of row r, from what each of the `team` warps of the row has added up.
    __device__ inline float scale_of(float sum, int r, int team, int k)
    {
        sum = warp_sum(sum);
        if (lane == 0)
            sh.sums[warp] = sum;
        meet();
        sum = 0;
        for (int w = r * team; w < (r + 1) * team; w++)
            sum += sh.sums[w];
        return rsqrtf(sum / (float)k + a.eps);
    }

    // x / rms(x) * weight of all rows into shared memory. 8, 4 or 2 warps take a row; what a thread
    // has of it stays in registers where that is little.
    __device__ void norm_rows(const kn_cuda_step_phase &p, const char *x0, int stride)
    {
        constexpr int FEW = 2;
        const int n = p.k / 8, team = a.rows == 1 ? 8 : a.rows == 2 ? 4 : 2; // warps
        const int r = warp / team, first = threadIdx.x % (32 * team), step = 32 * team;
        const uint4 *x = (const uint4 *)(x0 + (size_t)r * p.x_stride * 2);
        const float4 *norm = (const float4 *)p.norm;
        const bool flows = flow.has(p.x), own = r < a.rows;
        char *to = h + r * stride;
        float sum = 0;

        if (n <= step * FEW) {
            float4 lo[FEW], hi[FEW];
            uint4 raw[FEW];

#pragma unroll
            for (int j = 0; j < FEW; j++) {
                bool in = own && first + j * step < n;

                raw[j] = make_uint4(0, 0, 0, 0);
                if (in) {
                    lo[j] = __ldg(norm + (first + j * step) * 2);
                    hi[j] = __ldg(norm + (first + j * step) * 2 + 1);
                    raw[j] = load_now(x + first + j * step);
                }
            }
#pragma unroll
            for (int j = 0; j < FEW; j++) {
                if (flows)
                    settle(raw[j], x + first + j * step);
                sum += squares(raw[j]);
            }
            float scale = scale_of(sum, r, team, p.k);
#pragma unroll
            for (int j = 0; j < FEW; j++) {
                if (own && first + j * step < n)
                    *(uint4 *)(to + (first + j * step) * 16) = normed(raw[j], scale, lo[j], hi[j]);
            }
            meet();
            return;
        }
        for (int i0 = first; i0 < n && own; i0 += step * 4) {
            uint4 raw[4];

#pragma unroll
            for (int j = 0; j < 4; j++)
                raw[j] = i0 + j * step < n ? load_now(x + i0 + j * step) : make_uint4(0, 0, 0, 0);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                if (i0 + j * step >= n)
                    break;
                if (flows)
                    settle(raw[j], x + i0 + j * step);
                *(uint4 *)(to + (i0 + j * step) * 16) = raw[j];
                sum += squares(raw[j]);
            }
        }
        float scale = scale_of(sum, r, team, p.k);
#pragma unroll 4
        for (int i = first; i < n && own; i += step)
            *(uint4 *)(to + i * 16) =
                normed(*(const uint4 *)(to + i * 16), scale, __ldg(norm + i * 2), __ldg(norm + i * 2 + 1));
        meet();
    }

    // A warp's own columns of x as they are, parts [first, end) of 512 columns; four at a time.
    __device__ void copy_own(const kn_cuda_step_phase &p, const char *x0, int stride, int first, int end)
    {
        constexpr int AHEAD = 4;
        bool flows = flow.has(p.x);
        int col = (first + lane / 8) * 512 + warp * 64 + lane % 8 * 8, last = min(end * 512, p.k);

        for (int r = 0; r < a.rows; r++) {
            const char *x = x0 + (size_t)r * p.x_stride * 2;

            for (int c0 = col; c0 < last; c0 += 2048 * AHEAD) {
                uint4 raw[AHEAD];

#pragma unroll
                for (int j = 0; j < AHEAD; j++)
                    raw[j] = c0 + j * 2048 < last ? load_now(x + (c0 + j * 2048) * 2) : make_uint4(0, 0, 0, 0);
#pragma unroll
                for (int j = 0; j < AHEAD; j++) {
                    if (c0 + j * 2048 >= last)
                        break;
                    if (flows)
                        settle(raw[j], x + (c0 + j * 2048) * 2);
                    *(uint4 *)(h + r * stride + (c0 + j * 2048) * 2) = raw[j];
                }
            }
        }
        __syncwarp();
    }

    // Lane i of half e of the warp: output i of 16 of row e (+ 2 in the second round).
    __device__ inline int out_row(int round) const { return lane / 16 + round * 2; }

    __device__ void ask(const kn_cuda_step_phase &p, int group, Beside (&b)[2])
    {
        const kn_cuda_heads &hd = a.heads;
        int i = lane % 16;

#pragma unroll
        for (int round = 0; round < 2; round++) {
            int row = out_row(round), n = group * GROUP + i;

            if (row >= a.rows)
                continue;
            if (p.kind == KN_STREAM_ADD && (i & 1) == 0 && n < p.n)
                b[round].old = load_word((const T *)flow.at(p.old) + (size_t)row * p.out_stride + n);
            if (p.kind == KN_STREAM_QKV && i < 8) {
                int half = hd.head_dim / 2, pair = group * 8 + i, head = pair / half, pos = sh.pos[row];
                bool is_v = head >= hd.n_heads + hd.n_kv_heads;
                HeadPlace to = pair_at(pair % half, half, hd.interleaved);

                b[round].turn = is_v ? make_float2(1, 0)
                                     : __ldg((const float2 *)hd.cos_sin + (size_t)pos * half + pair % half);
                b[round].bias_a = p.bias ? __ldg(p.bias + head * hd.head_dim + to.a) : 0;
                b[round].bias_b = p.bias ? __ldg(p.bias + head * hd.head_dim + to.b) : 0;
            }
        }
    }

    // Lanes 0 .. 7 of each half: pairs of one head, rotary embedding, then into out and the pages.
    __device__ void store_pairs(const kn_cuda_step_phase &p, int group, int row, float va, const Beside &b)
    {
        const kn_cuda_heads &hd = a.heads;
        int half = hd.head_dim / 2, i = lane % 16, pair = group * 8 + i;
        HeadPlace to = pair_at(pair % half, half, hd.interleaved);
        float x = va + b.bias_a, y = __shfl_down_sync(0xffffffffu, va, 8) + b.bias_b;
        float xr = x * b.turn.x - y * b.turn.y, yr = y * b.turn.x + x * b.turn.y;
        float x2 = __shfl_down_sync(0xffffffffu, xr, 1), y2 = __shfl_down_sync(0xffffffffu, yr, 1);
        T *out = (T *)flow.at(p.out) + (size_t)row * p.out_stride + (size_t)(pair / half) * hd.head_dim;

        if (i >= 8 || row >= a.rows || (!hd.interleaved && (i & 1)))
            return;
        uint32_t wa = hd.interleaved ? pack<T>(xr, yr) : pack<T>(xr, x2), wb = pack<T>(yr, y2);

        store_word(out + to.a, wa);
        if (!hd.interleaved)
            store_word(out + to.b, wb);
        int kvh = pair / half - hd.n_heads, page = sh.page[row];

        if (kvh >= 0 && page >= 0) { // below 0: an empty row
            bool is_v = kvh >= hd.n_kv_heads;
            size_t in_head = (size_t)(is_v ? kvh - hd.n_kv_heads : kvh) * hd.page_tokens +
                             (sh.pos[row] & (hd.page_tokens - 1));
            T *kv = (T *)((char *)p.kv + (size_t)page * hd.page_stride + (is_v ? hd.page_stride / 2 : 0)) +
                    in_head * hd.head_dim;

            *(uint32_t *)(kv + in_page(sh.pos[row], to.a)) = wa;
            if (!hd.interleaved)
                *(uint32_t *)(kv + in_page(sh.pos[row], to.b)) = wb;
        }
    }

    __device__ void store(const kn_cuda_step_phase &p, int group, int row, float v, Beside &b)
    {
        int i = lane % 16, n = group * GROUP + i;
        bool in = row < a.rows;

        if (p.kind == KN_STREAM_QKV) {
            store_pairs(p, group, row, v, b);
        } else if (p.kind == KN_STREAM_SWIGLU) {
            float up = to_f(from_f<T>(__shfl_down_sync(0xffffffffu, v, 8))), gate = to_f(from_f<T>(v));
            float x = gate / (1 + __expf(-gate)) * up, x2 = __shfl_down_sync(0xffffffffu, x, 1);

            if (in && i < 8 && (i & 1) == 0)
                store_word((T *)flow.at(p.out) + (size_t)row * p.out_stride + group * 8 + i, pack<T>(x, x2));
        } else if (p.kind == KN_STREAM_F32) {
            if (in && n < p.n)
                ((float *)p.out)[(size_t)row * p.out_stride + n] = v;
        } else {
            float v2 = __shfl_down_sync(0xffffffffu, v, 1);

            if (!in || (i & 1) || n >= p.n)
                return;
            while (b.old == NOT_YET && flow.has(p.old))
                b.old = load_word((const T *)flow.at(p.old) + (size_t)row * p.out_stride + n);
            float2 old = unpack<T>(b.old);

            store_word((T *)flow.at(p.out) + (size_t)row * p.out_stride + n, pack<T>(old.x + v, old.y + v2));
        }
    }

    // Lane holds of weight rows l / 4 and l / 4 + 8 the sums with rows 2 * (l % 4) and + 1 of x.
    __device__ inline void leave_part(const float (&c)[4])
    {
        float *to = sh.part[buf][warp] + lane % 4 * 2 * PART_ROW + lane / 4;

        if (lane % 4 * 2 < a.rows) {
            to[0] = c[0];
            to[8] = c[2];
        }
        if (lane % 4 * 2 + 1 < a.rows) {
            to[PART_ROW] = c[1];
            to[PART_ROW + 8] = c[3];
        }
    }

    // 512 columns of the weights from shared memory; neighbours read their halves in turn.
    struct WPart {
        uint4 u, u2, v, v2; // of rows r and r + 8: this lane's first half, the other
    };
    __device__ inline WPart load_w(uint32_t at) const
    {
        return {load_shared(at), load_shared(at ^ 16), load_shared(at + 8 * ROW_BYTES),
                load_shared((at ^ 16) + 8 * ROW_BYTES)};
    }
    __device__ inline void multiply(float (&c)[4], const WPart &w, const XPart &x, int odd) const
    {
        mma<T>(c, pick(odd, w.u2.x, w.u.x), pick(odd, w.v2.x, w.v.x), pick(odd, w.u2.y, w.u.y),
               pick(odd, w.v2.y, w.v.y), x.a.x, x.a.y);
        mma<T>(c, pick(odd, w.u2.z, w.u.z), pick(odd, w.v2.z, w.v.z), pick(odd, w.u2.w, w.u.w),
               pick(odd, w.v2.w, w.v.w), x.a.z, x.a.w);
        mma<T>(c, pick(odd, w.u.x, w.u2.x), pick(odd, w.v.x, w.v2.x), pick(odd, w.u.y, w.u2.y),
               pick(odd, w.v.y, w.v2.y), x.b.x, x.b.y);
        mma<T>(c, pick(odd, w.u.z, w.u2.z), pick(odd, w.v.z, w.v2.z), pick(odd, w.u.w, w.u2.w),
               pick(odd, w.v.w, w.v2.w), x.b.z, x.b.w);
    }

    // Where a phase's x is, for this lane. A lane whose row of x does not exist takes the last one: what
    // it adds up is not looked at.
    struct Source {
        const char *x0;   // first row
        int stride;       // of rows in shared memory
        int late;         // columns from here on are not there yet
        uint32_t shared;  // this lane's first columns there, or
        const char *mine; // in memory
    };

    // One group: all of K.
    __device__ inline void group_shared(const kn_cuda_step_phase &p, Source &x, float (&c)[PARTS][4], Trace &trace)
    {
        const int odd = lane / 4 & 1, k_end = p.k;
        const uint32_t mine = smem_addr(stages) + lane / 4 * ROW_BYTES + warp * 128 + lane % 4 * 32 + odd * 16;
        const uint32_t full = smem_addr(sh.ring.full), empty = smem_addr(sh.ring.empty);

#pragma unroll 1
        for (int k = 0; k < k_end; k += CHUNK) {
            const uint32_t w = mine + at.s * STAGE, from = x.shared + k * 2;

            if (k >= x.late) {
                copy_own(p, x.x0, x.stride, x.late / 512, (k_end + 511) / 512);
                x.late = k_end;
            }
            long long since = trace.now();
            barrier_wait_at(full + at.s * 8, at.turn);
            trace.add(4, since);
            if (k + CHUNK <= k_end) {
                WPart w0 = load_w(w), w1 = load_w(w + 1024);
                XPart x0 = {load_shared(from), load_shared(from + 16)};
                XPart x1 = {load_shared(from + 1024), load_shared(from + 1040)};

                multiply(c[0], w0, x0, odd);
                multiply(c[1], w1, x1, odd);
            } else {
#pragma unroll 1
                for (int j = 0; k + j * 512 + warp * 64 < k_end; j++) {
                    XPart part = {load_shared(from + j * 1024), load_shared(from + j * 1024 + 16)};

                    multiply(c[0], load_w(w + j * 1024), part, odd);
                }
            }
            __syncwarp();
            if (lane == 0)
                barrier_arrive_at(empty + at.s * 8);
            at.next();
        }
    }
    // The same with x from memory, asked for a chunk ahead.
    __device__ inline XPart load_x(const char *from, bool in) const
    {
        XPart x = {};

        if (in) {
            x.a = load_now(from);
            x.b = load_now(from + 16);
        }
        return x;
    }
    __device__ inline void group_direct(const kn_cuda_step_phase &p, Source &x, float (&c)[PARTS][4], Trace &trace)
    {
        const int odd = lane / 4 & 1, cols = p.k - warp * 64;
        const uint32_t mine = smem_addr(stages) + lane / 4 * ROW_BYTES + warp * 128 + lane % 4 * 32 + odd * 16;
        const uint32_t full = smem_addr(sh.ring.full), empty = smem_addr(sh.ring.empty);
        const char *from = x.mine;
        XPart next[PARTS];

#pragma unroll
        for (int j = 0; j < PARTS; j++)
            next[j] = load_x(from + j * 1024, j * 512 < cols);
#pragma unroll 1
        for (int k = 0; k < cols; k += CHUNK, from += CHUNK * 2) {
            const uint32_t w = mine + at.s * STAGE;
            XPart now[PARTS];

#pragma unroll
            for (int j = 0; j < PARTS; j++) {
                now[j] = next[j];
                next[j] = load_x(from + CHUNK * 2 + j * 1024, k + CHUNK + j * 512 < cols);
            }
            long long since = trace.now();
            barrier_wait_at(full + at.s * 8, at.turn);
            trace.add(4, since);
            if (flow.has(p.x)) {
#pragma unroll
                for (int j = 0; j < PARTS; j++) {
                    settle(now[j].a, from + j * 1024);
                    settle(now[j].b, from + j * 1024 + 16);
                }
                __syncwarp();
            }
            WPart w0 = load_w(w);
            if (k + 512 < cols) { // the same for all lanes of the warp
                WPart w1 = load_w(w + 1024);

                multiply(c[1], w1, now[1], odd);
            }
            multiply(c[0], w0, now[0], odd);
            __syncwarp();
            if (lane == 0)
                barrier_arrive_at(empty + at.s * 8);
            at.next();
        }
        // K may end before this warp's columns of the last chunk.
        if (cols <= (p.k - 1) / CHUNK * CHUNK) {
            barrier_wait_at(full + at.s * 8, at.turn);
            __syncwarp();
            if (lane == 0)
                barrier_arrive_at(empty + at.s * 8);
            at.next();
        }
    }

    __device__ inline void store_group(const kn_cuda_step_phase &p, int group, Beside (&beside)[2])
    {
#pragma unroll
        for (int round = 0; round < 2; round++) {
            const float *part = sh.part[buf][0] + out_row(round) * PART_ROW + lane % 16;
            float sum = part[0];

            if (round * 2 >= a.rows)
                break;
#pragma unroll
            for (int i = 1; i < WARPS; i++)
                sum += part[i * MAX_ROWS * PART_ROW];
            store(p, group, out_row(round), sum, beside[round]);
        }
    }

    __device__ void run(const kn_cuda_step_phase &p, Trace &trace)
    {
        const int parts = (p.k + 511) / 512, n = groups_of(p), stride = p.k * 2 + 16;
        const int row = min(lane / 4, a.rows - 1), col = (warp * 64 + lane % 4 * 16) * 2;
        const bool shared = p.norm || a.rows * stride <= MOST_X;
        const char *x0 = (const char *)flow.at(p.x);
        Source x = {x0, stride, p.k, smem_addr(h) + row * stride + col, x0 + (size_t)row * p.x_stride * 2 + col};
        int g = first_group(dealt);
        Beside beside[2];

        dealt += n;
        if (g >= n)
            return;
        if (warp == 0)
            ask(p, g, beside);
        if (p.norm) {
            norm_rows(p, x0, stride);
        } else if (shared) {
            int most = parts > 4 ? (parts - 1) / 4 * 4 : parts;

            copy_own(p, x0, stride, 0, most);
            x.late = most * 512;
        }
        trace.mark(1);
        for (int storer = 0; g < n; g += gridDim.x, storer = (storer + 1) % WARPS) {
            float c[PARTS][4] = {};

            if (shared)
                group_shared(p, x, c, trace);
            else
                group_direct(p, x, c, trace);
#pragma unroll
            for (int i = 0; i < 4; i++)
                c[0][i] += c[1][i];
            leave_part(c[0]);
            meet();
            if (warp == storer) // it meets the others at the next group only when it is through
                store_group(p, g, beside);
            if (warp == (storer + 1) % WARPS && g + (int)gridDim.x < n)
                ask(p, g + gridDim.x, beside);
            buf ^= 1;
        }
    }
};

// Fills the set that the next step uses with ones; nobody reads or writes it in this step.
__device__ void clear_other(const kn_cuda_step_args &a, unsigned long long epoch)
{
    uint4 *to = (uint4 *)((char *)a.flow + ((epoch & 1) ^ 1) * a.flow_bytes);
    size_t n = a.flow_bytes / 16;

    for (size_t i = (size_t)blockIdx.x * CONSUMERS + threadIdx.x; i < n; i += (size_t)gridDim.x * CONSUMERS)
        to[i] = make_uint4(NOT_YET, NOT_YET, NOT_YET, NOT_YET);
}

template <typename T, int D>
__device__ void consume(const Args &args, Shared &sh, char *stages, char *h)
{
    const kn_cuda_step_args &a = args.s;

    wait_before();
    // The counter grows by one for each block that is through with a step.
    if (threadIdx.x == 0)
        sh.epoch = *(volatile unsigned long long *)a.counter / gridDim.x;
    if (threadIdx.x < a.rows) {
        sh.pos[threadIdx.x] = a.heads.pos[threadIdx.x];
        sh.page[threadIdx.x] = a.heads.page[threadIdx.x];
    }
    meet();
    const unsigned long long epoch = sh.epoch;
    const Flow flow = {(char *)a.flow, a.flow_bytes, (epoch & 1) * a.flow_bytes};
    Products<T> products(a, sh, stages, h, flow, args.stages);
    Units<D> units(a);
    const Walk piece = units.start();
    const Item item = item_of(units, blockIdx.x + gridDim.x * (threadIdx.x / 32));
    uint32_t tag = (uint32_t)epoch * a.n_attn + a.attn_first;
    Trace trace(args.trace);

    if (a.first)
        clear_other(a, epoch);
    for (int ph = 0; ph < a.n_phases; ph++) {
        const kn_cuda_step_phase &p = a.phases[ph];

        trace.zero();
        trace.mark(0);
        if (p.w) {
            products.run(p, trace);
        } else {
            Attention<T, D> attention(units, p, flow, h, ++tag);

            attention.run(piece, sh.ring, stages, products.at);
            trace.mark(1);
            attention.join_all(item, (T *)flow.at(p.out));
        }
        trace.mark(2);
        trace.write(ph);
    }
    if (a.last && threadIdx.x == 0)
        atomicAdd(a.counter, 1ull);
}

template <typename T, int D>
__global__ void __launch_bounds__(CONSUMERS + 32, 1) step_kernel(const __grid_constant__ Args a)
{
    extern __shared__ __align__(128) char raw[];
    __shared__ Shared sh;

    let_next();
    if (threadIdx.x == 0) {
        for (int i = 0; i < a.stages; i++) {
            barrier_init(&sh.ring.full[i], 1);
            barrier_init(&sh.ring.empty[i], WARPS);
        }
        barrier_init_done();
    }
    __syncthreads();
    if (threadIdx.x >= CONSUMERS)
        produce<D>(a, sh.ring, raw);
    else
        consume<T, D>(a, sh, raw, raw + a.stages * STAGE);
}

template <typename T, int D> int run(const kn_cuda_step_args *s, long long *trace, cudaStream_t stream)
{
    static thread_local Args a; // large
    size_t h = 0;

    a.s = *s;
    a.trace = trace;
    a.stages = s->stages > 0 && s->stages <= MAX_STAGES ? s->stages : 6;
    for (int i = 0; i < s->n_phases; i++) {
        const kn_cuda_step_phase *p = &s->phases[i];
        size_t bytes = (size_t)s->rows * (p->k * 2 + 16);

        bytes = !p->w ? attention_bytes(s->heads) : p->norm || bytes <= MOST_X ? bytes : 0;
        h = bytes > h ? bytes : h;
    }
    while (a.stages > 2 && a.stages * STAGE + h > SMEM_BYTES)
        a.stages--;
    a.flight = s->flight > 0 ? s->flight : 3;
    a.flight = a.flight < a.stages ? a.flight : a.stages;
    return launch(step_kernel<T, D>, dim3(s->n_sms), CONSUMERS + 32, a.stages * STAGE + h, 1, stream, a);
}

int run_any(enum kn_cuda_dtype t, const kn_cuda_step_args *a, long long *trace, cudaStream_t s)
{
    if (a->heads.head_dim == 64)
        return t == KN_CUDA_BF16 ? run<bf16, 64>(a, trace, s) : run<f16, 64>(a, trace, s);
    return t == KN_CUDA_BF16 ? run<bf16, 128>(a, trace, s) : run<f16, 128>(a, trace, s);
}

} // namespace

int kn_cuda_step_init(void)
{
    const void *kernels[] = {(const void *)step_kernel<bf16, 64>, (const void *)step_kernel<f16, 64>,
                             (const void *)step_kernel<bf16, 128>, (const void *)step_kernel<f16, 128>};
    int rc = 0;

    for (int i = 0; i < 4 && rc == 0; i++) {
        rc = cudaFuncSetAttribute(kernels[i], cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  SMEM_BYTES);
        rc = rc ? rc
                : cudaFuncSetAttribute(kernels[i], cudaFuncAttributePreferredSharedMemoryCarveout,
                                       cudaSharedmemCarveoutMaxShared);
    }
    return rc;
}

bool kn_cuda_step_supports(const struct kn_cuda_heads *h)
{
    return (h->head_dim == 64 || h->head_dim == 128) && h->n_heads % h->n_kv_heads == 0 &&
           h->n_heads / h->n_kv_heads <= MOST_GROUP && h->page_tokens >= 8;
}

size_t kn_cuda_step_record_bytes(const struct kn_cuda_heads *h, int rows, int n_sms)
{
    size_t group = (size_t)(h->n_heads / h->n_kv_heads);

    return ((size_t)n_sms + (size_t)(rows * h->n_kv_heads)) * group * ((size_t)h->head_dim * 8 + 16);
}

int kn_cuda_step(enum kn_cuda_dtype t, const struct kn_cuda_step_args *a, kn_cuda_stream s)
{
    return run_any(t, a, NULL, s);
}
