/* Drawing tokens from rows of logits: the definition of kernels/model/sampler.h, in parallel.
 *
 * Vocabularies of up to 160k: sample_wide.cuh, in which most of what is here is used. Others, and
 * rows that it cannot do: one block a row. Logits become keys in the order of the floats; the best k and the best of mass p
 * are found by counting keys in three rounds of 11, 11 and 10 bits. Masses are whole numbers
 * (weight times 2^46): sums are exact, so their order, and with it batch and timing, cannot matter;
 * they differ from the doubles of the plain C sampler by less than 1e-9 of the total. Exponentials
 * are those of kernels/core/mathf.h bit for bit, hence the explicit rounding. */
#include "kernels/cuda/common.cuh"

#include <float.h>

namespace {

constexpr int THREADS = 512, WARPS = THREADS / 32, BUCKETS = 2048;
constexpr double ONE = 0x1p46;

struct Cut { // what stays: greater keys, and equal ones of ids below `id`
    uint32_t key;
    int id;
};

struct Row {
    const float *logits;
    int n;
    float max, temperature;
    float min_w; // weights below this are out
    Cut k, p;
};

struct Shared {
    uint32_t hits[BUCKETS];
    unsigned long long mass[BUCKETS];
    unsigned long long warp_mass[WARPS];
    uint32_t warp_hits[WARPS];
    float warp_max[WARPS], warp_min[WARPS];
    int warp_id[WARPS];
    // outcome of a round of narrowing
    uint32_t bucket;
    unsigned long long above_mass;
    uint32_t above_hits;
    int id;
};

__device__ inline float finite(float x)
{
    x = x > FLT_MAX ? FLT_MAX : x;
    return x >= -FLT_MAX ? x : -INFINITY;
}

__device__ inline uint32_t key_of(float x)
{
    uint32_t u = __float_as_uint(__fadd_rn(x, 0.0f));

    return u & 0x80000000u ? ~u : u | 0x80000000u;
}

__device__ inline float exp_neg(float x)
{
    float c = x < -87.0f ? -87.0f : x;
    float t = __fadd_rn(__fmul_rn(c, 0x1.715476p+0f), 0x1.8p23f);
    float n = __fsub_rn(t, 0x1.8p23f);
    float r = __fsub_rn(__fsub_rn(c, __fmul_rn(n, 0x1.62e4p-1f)), __fmul_rn(n, 0x1.7f7d1cp-20f));
    float p = 1.0f / 5040;

    p = __fadd_rn(__fmul_rn(p, r), 1.0f / 720);
    p = __fadd_rn(__fmul_rn(p, r), 1.0f / 120);
    p = __fadd_rn(__fmul_rn(p, r), 1.0f / 24);
    p = __fadd_rn(__fmul_rn(p, r), 1.0f / 6);
    p = __fadd_rn(__fmul_rn(p, r), 0.5f);
    p = __fadd_rn(__fmul_rn(p, r), 1);
    p = __fadd_rn(__fmul_rn(p, r), 1);
    p = __fmul_rn(p, __uint_as_float((__float_as_uint(t) + 127) << 23));
    return x < -87.0f ? 0 : p;
}

__device__ inline float weight_of(const Row &r, float x)
{
    return exp_neg(__fdiv_rn(__fsub_rn(x, r.max), r.temperature));
}

__device__ inline bool stays(const Cut &c, uint32_t key, int id)
{
    return key > c.key || (key == c.key && id < c.id);
}

// Mass of id i, 0 if it is out. *ret_x: its logit; *ret_in: is it a candidate?
__device__ inline unsigned long long mass_at(const Row &r, int i, uint32_t *ret_key, bool *ret_in)
{
    float x = finite(r.logits[i]);
    uint32_t key = key_of(x);
    bool in = x > -INFINITY && stays(r.k, key, i) && stays(r.p, key, i);
    float w = in ? weight_of(r, x) : 0;

    in = in && w >= r.min_w;
    *ret_key = key;
    *ret_in = in;
    return in ? (unsigned long long)((double)w * ONE) : 0;
}

__device__ inline unsigned long long warp_sum64(unsigned long long x)
{
    for (int d = 16; d > 0; d >>= 1)
        x += __shfl_xor_sync(0xffffffffu, x, d);
    return x;
}

// Best logit and its lowest id; id -1 if there is none.
__device__ void best(const float *logits, int n, Shared &s, float *ret_max, int *ret_id)
{
    float max = -INFINITY;
    int id = -1;

#pragma unroll 8
    for (int i = threadIdx.x; i < n; i += THREADS) {
        float x = finite(logits[i]);

        if (x > max) {
            max = x;
            id = i;
        }
    }
    for (int d = 16; d > 0; d >>= 1) {
        float m = __shfl_xor_sync(0xffffffffu, max, d);
        int o = __shfl_xor_sync(0xffffffffu, id, d);

        if (o >= 0 && (m > max || id < 0 || (m == max && o < id))) {
            max = m;
            id = o;
        }
    }
    if (threadIdx.x % 32 == 0) {
        s.warp_max[threadIdx.x / 32] = max;
        s.warp_id[threadIdx.x / 32] = id;
    }
    __syncthreads();
    for (int w = 0; w < WARPS; w++) {
        float m = s.warp_max[w];
        int o = s.warp_id[w];

        if (o >= 0 && (m > max || id < 0 || (m == max && o < id))) {
            max = m;
            id = o;
        }
    }
    __syncthreads();
    *ret_max = max;
    *ret_id = id;
}

__device__ unsigned long long total(const Row &r, Shared &s, uint32_t *ret_n)
{
    unsigned long long sum = 0;
    uint32_t n = 0, key;
    bool in;

#pragma unroll 4
    for (int i = threadIdx.x; i < r.n; i += THREADS) {
        sum += mass_at(r, i, &key, &in);
        n += in;
    }
    sum = warp_sum64(sum);
    for (int d = 16; d > 0; d >>= 1)
        n += __shfl_xor_sync(0xffffffffu, n, d);
    if (threadIdx.x % 32 == 0) {
        s.warp_mass[threadIdx.x / 32] = sum;
        s.warp_hits[threadIdx.x / 32] = n;
    }
    __syncthreads();
    sum = 0;
    n = 0;
    for (int w = 0; w < WARPS; w++) {
        sum += s.warp_mass[w];
        n += s.warp_hits[w];
    }
    __syncthreads();
    *ret_n = n;
    return sum;
}

// Finds, from the highest bucket down, the one in which hits or masses reach what is wanted, on top
// of `hits` and `mass`. Outcome in s.
__device__ void narrow(Shared &s, int buckets, uint32_t hits, unsigned long long mass,
                       uint32_t want_n, unsigned long long want_mass)
{
    int per = buckets / THREADS, lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    unsigned long long m = 0, m_below;
    uint32_t h = 0, h_below;

    for (int j = 0; j < per; j++) {
        int b = buckets - 1 - ((int)threadIdx.x * per + j);

        h += s.hits[b];
        m += s.mass[b];
    }
    h_below = h;
    m_below = m;
    for (int d = 1; d < 32; d <<= 1) {
        uint32_t ho = __shfl_up_sync(0xffffffffu, h_below, d);
        unsigned long long mo = __shfl_up_sync(0xffffffffu, m_below, d);

        if (lane >= d) {
            h_below += ho;
            m_below += mo;
        }
    }
    if (lane == 31) {
        s.warp_hits[warp] = h_below;
        s.warp_mass[warp] = m_below;
    }
    __syncthreads();
    h_below += hits - h;
    m_below += mass - m;
    for (int w = 0; w < warp; w++) {
        h_below += s.warp_hits[w];
        m_below += s.warp_mass[w];
    }
    bool reached = h_below >= want_n || m_below >= want_mass;
    for (int j = 0; j < per && !reached; j++) {
        int b = buckets - 1 - ((int)threadIdx.x * per + j);

        if (h_below + s.hits[b] >= want_n || m_below + s.mass[b] >= want_mass) {
            s.bucket = (uint32_t)b; // one thread alone gets here
            s.above_hits = h_below;
            s.above_mass = m_below;
            break;
        }
        h_below += s.hits[b];
        m_below += s.mass[b];
    }
    __syncthreads();
}

// Id after the `n`-th candidate that has this key, ascending; one warp.
__device__ int id_after(const Row &r, uint32_t key, uint32_t n)
{
    int lane = threadIdx.x & 31;
    uint32_t seen = 0;

    for (int i0 = 0; i0 < r.n; i0 += 32) {
        uint32_t k = 0;
        bool in = false;

        if (i0 + lane < r.n)
            mass_at(r, i0 + lane, &k, &in);
        uint32_t hit = __ballot_sync(0xffffffffu, in && k == key);
        if (seen + __popc(hit) >= n) {
            while (seen + 1 < n) {
                hit &= hit - 1;
                seen++;
            }
            return i0 + __ffs(hit);
        }
        seen += __popc(hit);
    }
    return r.n;
}

// The cut after which at least want_n candidates or want_mass are kept, whichever comes first.
__device__ Cut find_cut(const Row &r, Shared &s, uint32_t want_n, unsigned long long want_mass)
{
    uint32_t prefix = 0, hits = 0;
    unsigned long long mass = 0;
    int above = 32;

    for (int round = 0; round < 3; round++) {
        int bits = round == 2 ? 10 : 11, shift = above - bits;

        for (int b = threadIdx.x; b < BUCKETS; b += THREADS) {
            s.hits[b] = 0;
            s.mass[b] = 0;
        }
        __syncthreads();
#pragma unroll 4
        for (int i = threadIdx.x; i < r.n; i += THREADS) {
            uint32_t key;
            bool in;
            unsigned long long m = mass_at(r, i, &key, &in);

            // what has no mass is never reached by mass
            if (in && (m > 0 || want_n != ~0u) && (above == 32 || key >> above == prefix)) {
                uint32_t b = key >> shift & ((1u << bits) - 1);

                atomicAdd(&s.hits[b], 1);
                atomicAdd(&s.mass[b], m);
            }
        }
        __syncthreads();
        narrow(s, 1 << bits, hits, mass, want_n, want_mass);
        hits = s.above_hits;
        mass = s.above_mass;
        prefix = prefix << bits | s.bucket;
        above = shift;
    }
    uint32_t equal = s.hits[s.bucket], n = 1;
    unsigned long long each = s.mass[s.bucket] / equal;
    while (n < equal && hits + n < want_n && mass + n * each < want_mass)
        n++;
    Cut c = {prefix, r.n};
    if (n < equal) { // rare: some of equal logits stay
        if (threadIdx.x < 32) {
            int id = id_after(r, prefix, n);

            if (threadIdx.x == 0)
                s.id = id;
        }
        __syncthreads();
        c.id = s.id;
    }
    __syncthreads();
    return c;
}

// Philox 4x32-10, as kernels/model/philox.h.
__device__ double uniform(const kn_cuda_draw &d)
{
    uint32_t c0 = (uint32_t)d.position, c1 = (uint32_t)(d.position >> 32), c2 = d.choice, c3 = 0;
    uint32_t k0 = (uint32_t)d.seed, k1 = (uint32_t)(d.seed >> 32);

    for (int round = 0; round < 10; round++) {
        uint64_t a = (uint64_t)0xd2511f53u * c0, b = (uint64_t)0xcd9e8d57u * c2;
        uint32_t n0 = (uint32_t)(b >> 32) ^ c1 ^ k0, n2 = (uint32_t)(a >> 32) ^ c3 ^ k1;

        c0 = n0;
        c1 = (uint32_t)b;
        c2 = n2;
        c3 = (uint32_t)a;
        k0 += 0x9e3779b9u;
        k1 += 0xbb67ae85u;
    }
    return (double)(((uint64_t)c0 << 32 | c1) >> 11) * 0x1p-53;
}

// First id at which the masses, summed by ascending id, exceed `at`. Warps take neighbouring pieces.
__device__ int walk(const Row &r, Shared &s, double at)
{
    int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    int piece = (r.n + WARPS * 32 - 1) / (WARPS * 32) * 32, from = warp * piece;
    int to = from + piece < r.n ? from + piece : r.n, last = -1;
    unsigned long long sum = 0, before = 0;
    uint32_t key;
    bool in;

#pragma unroll 4
    for (int i = from + lane; i < to; i += 32)
        sum += mass_at(r, i, &key, &in);
    sum = warp_sum64(sum);
    if (lane == 0)
        s.warp_mass[warp] = sum;
    if (threadIdx.x == 0)
        s.id = -1;
    __syncthreads();
    for (int w = 0; w < warp; w++)
        before += s.warp_mass[w];
    if (sum > 0 && (double)before <= at && (double)(before + sum) > at) {
        for (int i0 = from; i0 < to && last < 0; i0 += 32) {
            unsigned long long m = i0 + lane < to ? mass_at(r, i0 + lane, &key, &in) : 0, upto = m;

            for (int d = 1; d < 32; d <<= 1) {
                unsigned long long o = __shfl_up_sync(0xffffffffu, upto, d);

                upto += lane >= d ? o : 0;
            }
            uint32_t over = __ballot_sync(0xffffffffu, m > 0 && (double)(before + upto) > at);
            if (over)
                last = i0 + __ffs(over) - 1;
            before += __shfl_sync(0xffffffffu, upto, 31);
        }
        if (lane == 0)
            s.id = last;
    }
    __syncthreads();
    return s.id;
}

__device__ int draw(const kn_cuda_draw &d, const float *logits, int n, float max, Shared &s)
{
    Row r = {logits, n, max, d.temperature, 0, {0, n}, {0, n}};
    unsigned long long sum;
    uint32_t left;

    if (d.top_k > 0) {
        total(r, s, &left);
        if ((uint32_t)d.top_k < left)
            r.k = find_cut(r, s, (uint32_t)d.top_k, ~0ull);
    }
    if (d.top_p < 1) {
        double want;

        sum = total(r, s, &left);
        want = (double)(d.top_p > 0 ? d.top_p : 0) * (double)sum;
        r.p = find_cut(r, s, ~0u, want < 1 ? 1 : (unsigned long long)want);
    }
    r.min_w = d.min_p > 0 ? fminf(d.min_p, 1.0f) : 0;
    sum = total(r, s, &left);
    return walk(r, s, uniform(d) * (double)sum);
}

__global__ void __launch_bounds__(THREADS) sample_kernel(kn_cuda_sample_args a)
{
    __shared__ Shared s;
    const float *logits = a.logits + (size_t)blockIdx.x * a.stride;
    float max;
    int id;

    let_next();
    wait_before();
    kn_cuda_draw d = a.draws[blockIdx.x];
    if (d.skip) {
        id = -1;
    } else {
        best(logits, a.n_vocab, s, &max, &id);
        if (id >= 0 && d.temperature > 0)
            id = draw(d, logits, a.n_vocab, max, s);
    }
    if (threadIdx.x == 0) {
        a.out[blockIdx.x] = id;
        if (a.out_host)
            a.out_host[blockIdx.x] = id;
    }
}

} // namespace

#include "kernels/cuda/sample_wide.cuh"

// From so many rows on greedy ones are left to a block each: a cluster reads one sooner, blocks read
// many faster.
constexpr int MANY_ROWS = 17;

int kn_cuda_sample(const struct kn_cuda_sample_args *a, kn_cuda_stream s)
{
    bool many = a->n >= MANY_ROWS;
    int rc = 0;

    if (a->n_vocab > CLUSTER * THREADS * 40)
        return launch(sample_kernel, dim3(a->n), THREADS, 0, 1, s, *a);
    if (many)
        rc = launch(greedy_kernel, dim3(a->n), 1024, 0, 1, s, *a);
    if (rc != 0)
        return rc;
    if (a->n_vocab > CLUSTER * THREADS * 32)
        return launch_wide<40, 1>(*a, many, s);
    return many ? launch_wide<32, 2>(*a, true, s) : launch_wide<32, 1>(*a, false, s);
}
