// Drawing with the whole row in registers: a cluster of eight blocks a row, read from memory once.
//
// What has no mass (31.9 temperatures below the best and more) cannot be drawn and decides nothing.
// The others are counted in 2,048 buckets by their distance to the best logit; the bucket in which
// a cut lies is gathered in block 0, which finds the cut among its few members by comparing each
// with each. Where too many fall into that bucket (ties), block 0 does it all from memory.
#ifndef KN_CUDA_SAMPLE_WIDE_CUH
#define KN_CUDA_SAMPLE_WIDE_CUH

#include <cooperative_groups.h>

namespace {

constexpr int CLUSTER = 8, LIST = 2048;

struct Order { // what block 0 tells the others
    bool slow, gather;
    uint32_t bucket;
    Cut cut;
};

struct Wide {
    uint32_t part[4][BUCKETS]; // of this block: hits, and masses in pieces of 16 bits
    Shared s;                  // of block 0: sums of all blocks, the best bucket last
    uint32_t n_list;           // of block 0: members of a bucket
    uint32_t list_key[LIST];
    int list_id[LIST];
    unsigned long long list_mass[LIST];
    Order order;
    float max[CLUSTER], min[CLUSTER];
    int max_id[CLUSTER];
    unsigned long long sums[CLUSTER];
    unsigned long long pieces[16 * WARPS];
    // outcome of a choice in the list
    Cut cut;
    unsigned long long upto;
};

template <int PER> struct Piece { // a thread's part of the row
    float x[PER];
    int first; // id of x[0]; x[4 j + i] is first + 4 j THREADS + i

    __device__ int id(int e) const { return first + e / 4 * 4 * THREADS + e % 4; }

    __device__ void load(const float *logits, int n)
    {
#pragma unroll
        for (int j = 0; j < PER / 4; j++) {
            int i = first + j * 4 * THREADS;

            if (n % 4 == 0 && i < n) {
                float4 v = *(const float4 *)(logits + i);

                x[4 * j] = finite(v.x);
                x[4 * j + 1] = finite(v.y);
                x[4 * j + 2] = finite(v.z);
                x[4 * j + 3] = finite(v.w);
            } else {
#pragma unroll
                for (int k = 0; k < 4; k++)
                    x[4 * j + k] = i + k < n ? finite(logits[i + k]) : -INFINITY;
            }
        }
    }
};

__device__ inline unsigned long long mass_of(const Row &r, float x, float *ret_w)
{
    *ret_w = x > -INFINITY ? weight_of(r, x) : 0;
    return (unsigned long long)((double)*ret_w * ONE);
}

__device__ inline int bucket_of(const Row &r, float x, float scale)
{
    return BUCKETS - 1 - min(BUCKETS - 1, max((int)((r.max - x) * scale), 0));
}

// Best logit, its lowest id, and the least that is not -infinity, over the cluster.
template <int PER>
__device__ void wide_best(const Piece<PER> &p, Wide &w, cooperative_groups::cluster_group &cluster,
                          float *ret_max, int *ret_id, float *ret_min)
{
    float most = -INFINITY, least = INFINITY;
    int id = -1, rank = cluster.block_rank();

#pragma unroll
    for (int e = 0; e < PER; e++) {
        if (p.x[e] > most) {
            most = p.x[e];
            id = p.id(e);
        }
        least = p.x[e] > -INFINITY ? fminf(least, p.x[e]) : least;
    }
    for (int d = 16; d > 0; d >>= 1) {
        float m = __shfl_xor_sync(0xffffffffu, most, d);
        int o = __shfl_xor_sync(0xffffffffu, id, d);

        least = fminf(least, __shfl_xor_sync(0xffffffffu, least, d));
        if (o >= 0 && (id < 0 || m > most || (m == most && o < id))) {
            most = m;
            id = o;
        }
    }
    if (threadIdx.x % 32 == 0) {
        w.s.warp_max[threadIdx.x / 32] = most;
        w.s.warp_id[threadIdx.x / 32] = id;
        w.s.warp_min[threadIdx.x / 32] = least;
    }
    __syncthreads();
    if (threadIdx.x < CLUSTER) {
        for (int i = 0; i < WARPS; i++) {
            float m = w.s.warp_max[i];
            int o = w.s.warp_id[i];

            least = fminf(i ? least : INFINITY, w.s.warp_min[i]);
            if (i == 0 || (o >= 0 && (id < 0 || m > most || (m == most && o < id)))) {
                most = m;
                id = o;
            }
        }
        Wide *to = cluster.map_shared_rank(&w, threadIdx.x);
        to->max[rank] = most;
        to->max_id[rank] = id;
        to->min[rank] = least;
    }
    cluster.sync();
    most = -INFINITY;
    least = INFINITY;
    id = -1;
    for (int i = 0; i < CLUSTER; i++) { // by ascending ids: the first of equals stays
        if (w.max_id[i] >= 0 && (id < 0 || w.max[i] > most)) {
            most = w.max[i];
            id = w.max_id[i];
        }
        least = fminf(least, w.min[i]);
    }
    *ret_max = most;
    *ret_id = id;
    *ret_min = least;
}

// Hits and masses of all blocks by bucket, in block 0.
template <int PER>
__device__ void wide_count(const Row &r, const Piece<PER> &p, float scale, Wide &w,
                           cooperative_groups::cluster_group &cluster)
{
    int rank = cluster.block_rank();

    for (int i = threadIdx.x; i < 4 * BUCKETS; i += THREADS)
        w.part[i / BUCKETS][i % BUCKETS] = 0;
    __syncthreads();
#pragma unroll
    for (int e = 0; e < PER; e++) {
        float weight;
        unsigned long long m = mass_of(r, p.x[e], &weight);

        if (m > 0) {
            int b = bucket_of(r, p.x[e], scale);

            atomicAdd(&w.part[0][b], 1);
            atomicAdd(&w.part[1][b], (uint32_t)(m & 0xffff));
            if (m >> 16)
                atomicAdd(&w.part[2][b], (uint32_t)(m >> 16 & 0xffff));
            if (m >> 32)
                atomicAdd(&w.part[3][b], (uint32_t)(m >> 32));
        }
    }
    cluster.sync();
    Wide *to = cluster.map_shared_rank(&w, 0);
    for (int i = threadIdx.x; i < BUCKETS / CLUSTER; i += THREADS) {
        int b = rank * (BUCKETS / CLUSTER) + i;
        unsigned long long m = 0;
        uint32_t h = 0;

        for (int c = 0; c < CLUSTER; c++) {
            const Wide *from = cluster.map_shared_rank(&w, c);

            h += from->part[0][b];
            m += from->part[1][b] + ((unsigned long long)from->part[2][b] << 16) +
                 ((unsigned long long)from->part[3][b] << 32);
        }
        to->s.hits[b] = h;
        to->s.mass[b] = m;
    }
    cluster.sync();
}

// Sums over all buckets; block 0.
__device__ void wide_total(Wide &w, uint32_t *ret_n, unsigned long long *ret_mass)
{
    unsigned long long m = 0;
    uint32_t h = 0;

    for (int b = threadIdx.x; b < BUCKETS; b += THREADS) {
        h += w.s.hits[b];
        m += w.s.mass[b];
    }
    m = warp_sum64(m);
    for (int d = 16; d > 0; d >>= 1)
        h += __shfl_xor_sync(0xffffffffu, h, d);
    if (threadIdx.x % 32 == 0) {
        w.s.warp_hits[threadIdx.x / 32] = h;
        w.s.warp_mass[threadIdx.x / 32] = m;
    }
    __syncthreads();
    h = 0;
    m = 0;
    for (int i = 0; i < WARPS; i++) {
        h += w.s.warp_hits[i];
        m += w.s.warp_mass[i];
    }
    __syncthreads();
    *ret_n = h;
    *ret_mass = m;
}

// Tells all blocks what block 0 found; then the members of `bucket` are in its list if wanted.
// Every block comes here. Returns the order.
template <int PER>
__device__ Order wide_tell(const Row &r, const Piece<PER> &p, float scale, const Order &order,
                           Wide &w, cooperative_groups::cluster_group &cluster)
{
    Wide *zero = cluster.map_shared_rank(&w, 0);
    Order o;

    if (cluster.block_rank() == 0) {
        if (threadIdx.x == 0)
            w.n_list = 0;
        if (threadIdx.x < CLUSTER)
            cluster.map_shared_rank(&w, threadIdx.x)->order = order;
    }
    cluster.sync();
    o = w.order;
    if (o.gather) {
#pragma unroll
        for (int e = 0; e < PER; e++) {
            float weight;

            if (p.x[e] > -INFINITY && (uint32_t)bucket_of(r, p.x[e], scale) == o.bucket) {
                unsigned long long m = mass_of(r, p.x[e], &weight);
                uint32_t at = m > 0 ? atomicAdd(&zero->n_list, 1) : LIST;

                if (at < LIST) {
                    zero->list_key[at] = key_of(p.x[e]);
                    zero->list_id[at] = p.id(e);
                    zero->list_mass[at] = m;
                }
            }
        }
    }
    cluster.sync();
    return o;
}

// The cut in the list after which, on top of `hits` and `mass`, want_n candidates or want_mass are
// kept; only members that stay behind `before` count. Block 0. w.upto: what is kept by then.
__device__ Cut wide_choose(Wide &w, const Cut &before, uint32_t hits, unsigned long long mass,
                           uint32_t want_n, unsigned long long want_mass)
{
    int n = min((int)w.n_list, LIST);

    if (threadIdx.x == 0) {
        w.cut = before;
        w.upto = mass;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += THREADS) {
        uint32_t key = w.list_key[i], h = hits;
        int id = w.list_id[i];
        unsigned long long m = mass;

        if (!stays(before, key, id))
            continue;
        for (int j = 0; j < n; j++) {
            uint32_t k = w.list_key[j];

            if (k > key || (k == key && w.list_id[j] < id)) {
                h++;
                m += w.list_mass[j];
            }
        }
        if (h < want_n && m < want_mass &&
            (h + 1 >= want_n || m + w.list_mass[i] >= want_mass)) { // one alone
            w.cut = Cut{key, id + 1};
            w.upto = m + w.list_mass[i];
        }
    }
    __syncthreads();
    return w.cut;
}

// Both cuts, known to all blocks. False: too many in one bucket.
template <int PER>
__device__ bool wide_cut(const kn_cuda_draw &d, Row &r, const Piece<PER> &p, float scale, Wide &w,
                         cooperative_groups::cluster_group &cluster)
{
    bool zero = cluster.block_rank() == 0, by_k = false;
    Cut all = {0, 0x7fffffff};
    Order o = {false, false, 0, all}, told;
    unsigned long long sum = 0, above_mass = 0, want;
    uint32_t left = 0, above_hits = 0;

    wide_count(r, p, scale, w, cluster);
    if (zero) {
        wide_total(w, &left, &sum);
        by_k = d.top_k > 0 && (uint32_t)d.top_k < left;
        if (by_k) {
            narrow(w.s, BUCKETS, 0, 0, (uint32_t)d.top_k, ~0ull);
            above_hits = w.s.above_hits;
            above_mass = w.s.above_mass;
            o.gather = true;
            o.bucket = w.s.bucket;
        }
    }
    told = wide_tell(r, p, scale, o, w, cluster);
    if (zero) {
        o.gather = false;
        o.slow = by_k && w.n_list > LIST;
        if (by_k && !o.slow) {
            o.cut = wide_choose(w, all, above_hits, above_mass, (uint32_t)d.top_k, ~0ull);
            sum = w.upto;
        }
        if (d.top_p < 1 && !o.slow) {
            want = (unsigned long long)((double)(d.top_p > 0 ? d.top_p : 0) * (double)sum);
            want = want < 1 ? 1 : want;
            if (by_k && above_mass < want) { // among the same members
                __syncthreads();
                o.cut = wide_choose(w, o.cut, above_hits, above_mass, ~0u, want);
            } else {
                narrow(w.s, BUCKETS, 0, 0, ~0u, want);
                above_hits = w.s.above_hits;
                above_mass = w.s.above_mass;
                o.gather = true;
                o.bucket = w.s.bucket;
            }
        }
        __syncthreads();
    }
    told = wide_tell(r, p, scale, o, w, cluster);
    if (told.gather) {
        if (zero) {
            o.gather = false;
            o.slow = w.n_list > LIST;
            if (!o.slow)
                o.cut = wide_choose(w, o.cut, above_hits, above_mass, ~0u, want);
        }
        told = wide_tell(r, p, scale, o, w, cluster);
    }
    r.p = told.cut;
    return !told.slow;
}

// First id at which the masses of what stays, summed by ascending id, exceed u of their sum. The
// block that has it writes it.
template <int PER>
__device__ void wide_walk(const Row &r, const Piece<PER> &p, double u, Wide &w,
                          cooperative_groups::cluster_group &cluster, const kn_cuda_sample_args &a,
                          int row)
{
    int lane = threadIdx.x & 31, warp = threadIdx.x / 32, rank = cluster.block_rank();
    unsigned long long sum = 0, all = 0, before = 0;
    auto kept = [&](int e) {
        float weight;
        unsigned long long m = mass_of(r, p.x[e], &weight);

        return weight >= r.min_w && stays(r.p, key_of(p.x[e]), p.id(e)) ? m : 0ull;
    };

#pragma unroll
    for (int j = 0; j < PER / 4; j++) {
        unsigned long long m = warp_sum64(kept(4 * j) + kept(4 * j + 1) + kept(4 * j + 2) +
                                          kept(4 * j + 3));

        if (lane == 0)
            w.pieces[j * WARPS + warp] = m;
        sum += m;
    }
    if (lane == 0)
        w.s.warp_mass[warp] = sum;
    __syncthreads();
    if (threadIdx.x < CLUSTER) {
        sum = 0;
        for (int i = 0; i < WARPS; i++)
            sum += w.s.warp_mass[i];
        cluster.map_shared_rank(&w, threadIdx.x)->sums[rank] = sum;
    }
    cluster.sync();
    for (int i = 0; i < CLUSTER; i++) {
        before += i < rank ? w.sums[i] : 0;
        all += w.sums[i];
    }
    double at = u * (double)all;
    if (w.sums[rank] == 0 || (double)before > at || (double)(before + w.sums[rank]) <= at)
        return;
#pragma unroll
    for (int j = 0; j < PER / 4; j++) {
        for (int i = 0; i < WARPS; i++) {
            unsigned long long m = w.pieces[j * WARPS + i];

            if (i == warp && m > 0 && (double)before <= at && (double)(before + m) > at) {
                unsigned long long own[4], upto, mine = 0, b;

                for (int k = 0; k < 4; k++)
                    mine += own[k] = kept(4 * j + k);
                upto = mine;
                for (int d = 1; d < 32; d <<= 1) {
                    unsigned long long o = __shfl_up_sync(0xffffffffu, upto, d);

                    upto += lane >= d ? o : 0;
                }
                b = before + upto - mine;
                for (int k = 0; k < 4; k++) {
                    if (own[k] > 0 && (double)b <= at && (double)(b + own[k]) > at) {
                        a.out[row] = p.id(4 * j + k);
                        if (a.out_host)
                            a.out_host[row] = p.id(4 * j + k);
                    }
                    b += own[k];
                }
            }
            before += m;
        }
    }
}

// BLOCKS a multiprocessor: one keeps everything in registers, two hide each other's waits.
template <int PER, int BLOCKS>
__global__ void __launch_bounds__(THREADS, BLOCKS) wide_kernel(kn_cuda_sample_args a)
{
    extern __shared__ __align__(16) char room[];
    Wide &w = *(Wide *)room;
    cooperative_groups::cluster_group cluster = cooperative_groups::this_cluster();
    int row = blockIdx.x / CLUSTER, rank = cluster.block_rank(), id = -1;
    const float *logits = a.logits + (size_t)row * a.stride;
    Piece<PER> p = {{}, rank * PER * THREADS + (int)threadIdx.x * 4};
    float most, least;
    bool wide;

    let_next();
    wait_before();
    kn_cuda_draw d = a.draws[row];
    cluster.barrier_arrive(); // all blocks are there before one writes to another
    if (!d.skip)
        p.load(logits, a.n_vocab);
    cluster.barrier_wait();
    if (!d.skip) {
        wide_best(p, w, cluster, &most, &id, &least);
    }
    if (id < 0 || d.temperature <= 0) {
        if (rank == 0 && threadIdx.x == 0) {
            a.out[row] = id;
            if (a.out_host)
                a.out_host[row] = id;
        }
        return;
    }
    Row r = {logits, a.n_vocab, most, d.temperature, 0, {0, 0x7fffffff}, {0, 0x7fffffff}};
    float scale = BUCKETS / fmaxf(fminf(32 * d.temperature, most - least), 1e-30f);
    wide = (d.top_k <= 0 && d.top_p >= 1) || wide_cut(d, r, p, scale, w, cluster);
    if (wide) {
        r.min_w = d.min_p > 0 ? fminf(d.min_p, 1.0f) : 0;
        wide_walk(r, p, uniform(d), w, cluster, a, row);
    } else if (rank == 0) {
        id = draw(d, logits, a.n_vocab, most, w.s);
        if (threadIdx.x == 0) {
            a.out[row] = id;
            if (a.out_host)
                a.out_host[row] = id;
        }
    }
}

template <int PER, int BLOCKS> int launch_wide(const kn_cuda_sample_args &a, kn_cuda_stream s)
{
    static bool ready;

    if (!ready) {
        int rc = (int)cudaFuncSetAttribute((const void *)wide_kernel<PER, BLOCKS>,
                                           cudaFuncAttributeMaxDynamicSharedMemorySize,
                                           sizeof(Wide));
        if (rc != 0)
            return rc;
        ready = true;
    }
    return launch(wide_kernel<PER, BLOCKS>, dim3(a.n * CLUSTER), THREADS, sizeof(Wide), CLUSTER, s, a);
}

} // namespace

#endif
