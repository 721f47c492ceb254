// Drawing with the whole row in registers: a cluster of eight blocks a row, read from memory once.
//
// What has no mass (31.9 temperatures below the best and more) cannot be drawn and decides nothing.
// The others are counted in 2,048 buckets by their distance to the best logit; the bucket in which
// a cut lies is gathered in block 0, which finds the cut among its few members by comparing each
// with each. Where too many fall into that bucket (flat rows with a few far from the rest), it is
// cut into 2,048 buckets in turn; only where that is not enough (ties) block 0 does it all from
// memory. Clusters go on from row to row; greedy rows of large batches are another kernel's.
#ifndef KN_CUDA_SAMPLE_WIDE_CUH
#define KN_CUDA_SAMPLE_WIDE_CUH

#include <cooperative_groups.h>

namespace {

constexpr int CLUSTER = 8, LIST = 1024;

struct Order { // what block 0 tells the others
    bool count, gather, done, slow;
    int within; // the bucket whose parts are counted and gathered, -1 = all buckets are
    int bucket; // whose members are gathered
    Cut cut;
};

// A bucket of all, or (FINE) a part of bucket `within`, -1 where x is in another one.
template <bool FINE> __device__ inline int bucket_of(const Row &r, float scale, int within, float x)
{
    float t = fmaxf((r.max - x) * scale, 0);
    int b = min(BUCKETS - 1, (int)t);

    if (!FINE)
        return BUCKETS - 1 - b;
    if (BUCKETS - 1 - b != within)
        return -1;
    return BUCKETS - 1 - min(BUCKETS - 1, (int)((t - (float)b) * BUCKETS));
}

// Block 0's search for both cuts.
struct Search {
    bool by_p; // the second cut
    uint32_t want_n, above_hits;
    unsigned long long want_mass, above_mass;
    Order last;
};

struct List { // members of a bucket
    uint32_t key[LIST];
    int id[LIST];
    unsigned long long mass[LIST];
};

struct Wide {
    union {
        uint32_t part[4][BUCKETS]; // of this block: hits, and masses in pieces of 16 bits
        List list;                 // of block 0, while nothing is counted
    };
    Shared s;    // of block 0: sums of all blocks, the best bucket last
    Shared fine; // likewise, of the parts of a bucket
    uint32_t n_list;
    Search search; // of block 0
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

// Hits and masses of all blocks by bucket, in block 0's w.s or, of parts, w.fine.
template <bool FINE, int PER>
__device__ void wide_count(const Row &r, const Piece<PER> &p, float scale, int within, Wide &w,
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
        int b = m > 0 ? bucket_of<FINE>(r, scale, within, p.x[e]) : -1;

        if (b >= 0) {
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
    Shared *sums = FINE ? &to->fine : &to->s;
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
        sums->hits[b] = h;
        sums->mass[b] = m;
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

// Members of a bucket into block 0's list.
template <bool FINE, int PER>
__device__ void wide_gather(const Row &r, const Piece<PER> &p, float scale, const Order &o,
                            Wide *zero)
{
#pragma unroll
    for (int e = 0; e < PER; e++) {
        float weight;

        if (p.x[e] > -INFINITY && bucket_of<FINE>(r, scale, o.within, p.x[e]) == o.bucket) {
            unsigned long long m = mass_of(r, p.x[e], &weight);
            uint32_t at = m > 0 ? atomicAdd(&zero->n_list, 1) : LIST;

            if (at < LIST) {
                zero->list.key[at] = key_of(p.x[e]);
                zero->list.id[at] = p.id(e);
                zero->list.mass[at] = m;
            }
        }
    }
}

// Tells all blocks what block 0 wants; then the members of the bucket are in its list if wanted.
// Every block comes here. Returns the order.
template <int PER>
__device__ Order wide_tell(const Row &r, const Piece<PER> &p, float scale, Wide &w,
                           cooperative_groups::cluster_group &cluster)
{
    Wide *zero = cluster.map_shared_rank(&w, 0);
    Order o;

    if (cluster.block_rank() == 0) {
        if (threadIdx.x == 0 && w.search.last.gather)
            w.n_list = 0;
        if (threadIdx.x < CLUSTER)
            cluster.map_shared_rank(&w, threadIdx.x)->order = w.search.last;
    }
    cluster.sync();
    o = w.order;
    if (o.gather && o.within < 0)
        wide_gather<false>(r, p, scale, o, zero);
    else if (o.gather)
        wide_gather<true>(r, p, scale, o, zero);
    cluster.sync();
    return o;
}

// The cut in the list after which, on top of `hits` and `mass`, want_n candidates or want_mass are
// kept; only members that stay behind `before` count. Block 0. w.upto: what is kept by then.
__device__ Cut wide_choose(Wide &w, const Cut &before, uint32_t hits, unsigned long long mass,
                           uint32_t want_n, unsigned long long want_mass)
{
    int n = min((int)w.n_list, LIST);

    __syncthreads(); // all have what the choice before came to
    if (threadIdx.x == 0) {
        w.cut = before;
        w.upto = mass;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += THREADS) {
        uint32_t key = w.list.key[i], h = hits;
        int id = w.list.id[i];
        unsigned long long m = mass;

        if (!stays(before, key, id))
            continue;
        for (int j = 0; j < n; j++) {
            uint32_t k = w.list.key[j];

            if (k > key || (k == key && w.list.id[j] < id)) {
                h++;
                m += w.list.mass[j];
            }
        }
        if (h < want_n && m < want_mass &&
            (h + 1 >= want_n || m + w.list.mass[i] >= want_mass)) { // one alone
            w.cut = Cut{key, id + 1};
            w.upto = m + w.list.mass[i];
        }
    }
    __syncthreads();
    return w.cut;
}

// One order after the other.
struct Searching : Search {
    // Looks for the bucket in which the wanted is reached, and for its members.
    __device__ void gather(Shared &counts, uint32_t hits, unsigned long long mass)
    {
        narrow(counts, BUCKETS, hits, mass, want_n, want_mass);
        above_hits = counts.above_hits;
        above_mass = counts.above_mass;
        last.count = false;
        last.gather = true;
        last.bucket = (int)counts.bucket;
    }

    // What is kept until now has this mass: the cut by p. False if that is all.
    __device__ bool want_p(float top_p, unsigned long long mass)
    {
        unsigned long long m = (unsigned long long)((double)(top_p > 0 ? top_p : 0) * (double)mass);

        by_p = true;
        want_n = ~0u;
        want_mass = m < 1 ? 1 : m;
        return top_p < 1;
    }

    __device__ void end(bool slow)
    {
        last.count = last.gather = false;
        last.done = true;
        last.slow = slow;
    }

    __device__ void choose(Wide &w)
    {
        last.cut = wide_choose(w, last.cut, above_hits, above_mass, want_n, want_mass);
    }

    // All is counted for the first time.
    __device__ void begin(int top_k, float top_p, Wide &w)
    {
        unsigned long long sum;
        uint32_t left;

        wide_total(w, &left, &sum);
        by_p = false;
        want_n = (uint32_t)top_k;
        want_mass = ~0ull;
        if ((top_k > 0 && want_n < left) || want_p(top_p, sum))
            gather(w.s, 0, 0);
        else
            end(false);
    }

    // The last order was carried out.
    __device__ void go_on(float top_p, Wide &w)
    {
        if (last.count) {
            gather(w.fine, above_hits, above_mass);
        } else if (w.n_list > LIST && last.within >= 0) {
            end(true);
        } else if (w.n_list > LIST) {
            last.gather = false;
            last.count = true;
            last.within = last.bucket;
        } else {
            choose(w);
            if (by_p || !want_p(top_p, w.upto)) {
                end(false);
            } else if (above_mass < want_mass) { // among the same members
                choose(w);
                end(false);
            } else {
                last.within = -1;
                gather(w.s, 0, 0);
            }
        }
    }
};


// The next order of the search. A call of its own, so that what it needs does not take registers
// from the row.
__device__ __noinline__ void search_next(int top_k, float top_p, Wide &w, bool first)
{
    Searching s;

    (Search &)s = w.search;
    if (first)
        s.begin(top_k, top_p, w);
    else
        s.go_on(top_p, w);
    __syncthreads(); // all have read what is written now, the list's length too
    if (threadIdx.x == 0)
        w.search = s;
    __syncthreads();
}

// Both cuts, known to all blocks. False: too many equal ones.
template <int PER>
__device__ bool wide_cut(const kn_cuda_draw &d, Row &r, const Piece<PER> &p, float scale, Wide &w,
                         cooperative_groups::cluster_group &cluster)
{
    Order told = {true, false, false, false, -1, 0, {0, 0x7fffffff}};
    bool first = true;

    if (threadIdx.x == 0)
        w.search.last = told;
    do {
        // nothing that follows from these is to be kept from round to round: there is no room
        asm volatile("" : "+f"(scale), "+f"(r.max), "+f"(r.temperature));
        if (told.count && told.within < 0)
            wide_count<false>(r, p, scale, -1, w, cluster);
        else if (told.count)
            wide_count<true>(r, p, scale, told.within, w, cluster);
        if (cluster.block_rank() == 0)
            search_next(d.top_k, d.top_p, w, first);
        first = false;
        told = wide_tell(r, p, scale, w, cluster);
    } while (!told.done);
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

__device__ inline void write_id(const kn_cuda_sample_args &a, int row, int id)
{
    a.out[row] = id;
    if (a.out_host)
        a.out_host[row] = id;
}

// BLOCKS a multiprocessor: one keeps everything in registers, two hide each other's waits.
// `drawn`: rows that are drawn from alone, the others are greedy_kernel's.
template <int PER, int BLOCKS>
__global__ void __launch_bounds__(THREADS, BLOCKS) wide_kernel(kn_cuda_sample_args a, bool drawn)
{
    extern __shared__ __align__(16) char room[];
    Wide &w = *(Wide *)room;
    cooperative_groups::cluster_group cluster = cooperative_groups::this_cluster();
    int rank = cluster.block_rank();

    let_next();
    wait_before();
    for (int row = blockIdx.x / CLUSTER; row < a.n; row += gridDim.x / CLUSTER) {
        const float *logits = a.logits + (size_t)row * a.stride;
        Piece<PER> p = {{}, rank * PER * THREADS + (int)threadIdx.x * 4};
        kn_cuda_draw d = a.draws[row];
        float most, least;
        int id = -1;

        if (drawn && (d.skip || d.temperature <= 0))
            continue;
        cluster.barrier_arrive(); // all blocks are there, and done with the row before
        if (!d.skip)
            p.load(logits, a.n_vocab);
        cluster.barrier_wait();
        if (!d.skip)
            wide_best(p, w, cluster, &most, &id, &least);
        if (id < 0 || d.temperature <= 0) {
            if (rank == 0 && threadIdx.x == 0)
                write_id(a, row, id);
            continue;
        }
        Row r = {logits, a.n_vocab, most, d.temperature, 0, {0, 0x7fffffff}, {0, 0x7fffffff}};
        float scale = BUCKETS / fmaxf(fminf(32 * d.temperature, most - least), 1e-30f);

        if ((d.top_k <= 0 && d.top_p >= 1) || wide_cut(d, r, p, scale, w, cluster)) {
            r.min_w = d.min_p > 0 ? fminf(d.min_p, 1.0f) : 0;
            wide_walk(r, p, uniform(d), w, cluster, a, row);
        } else if (rank == 0) {
            id = draw(d, logits, a.n_vocab, most, w.s);
            if (threadIdx.x == 0)
                write_id(a, row, id);
        }
    }
}

// The best of each greedy row, by one block.
__global__ void __launch_bounds__(1024) greedy_kernel(kn_cuda_sample_args a)
{
    __shared__ float warp_max[32];
    __shared__ int warp_id[32];
    int row = blockIdx.x, lane = threadIdx.x & 31, id = -1;
    const float *logits = a.logits + (size_t)row * a.stride;
    float most = -INFINITY;
    auto take = [&](float x, int i) {
        if (i >= 0 && (x > most || (x == most && (id < 0 || i < id)))) {
            most = x;
            id = i;
        }
    };
    auto take_warp = [&] {
        for (int d = 16; d > 0; d >>= 1) {
            float m = __shfl_xor_sync(0xffffffffu, most, d);

            take(m, __shfl_xor_sync(0xffffffffu, id, d));
        }
    };

    let_next();
    wait_before();
    kn_cuda_draw d = a.draws[row];
    if (!d.skip && d.temperature > 0)
        return;
    int n = d.skip ? 0 : a.n_vocab;
    if (a.n_vocab % 4 == 0 && a.stride % 4 == 0) {
        constexpr int AHEAD = 8; // loads at once
        const int step = 4 * blockDim.x;

        for (int i0 = threadIdx.x * 4; i0 < n; i0 += AHEAD * step) {
            float4 v[AHEAD];

#pragma unroll
            for (int j = 0; j < AHEAD; j++)
                v[j] = i0 + j * step < n ? __ldcs((const float4 *)(logits + i0 + j * step))
                                         : make_float4(-INFINITY, -INFINITY, -INFINITY, -INFINITY);
#pragma unroll
            for (int j = 0; j < AHEAD; j++) {
                float x[4] = {finite(v[j].x), finite(v[j].y), finite(v[j].z), finite(v[j].w)};

#pragma unroll
                for (int k = 0; k < 4; k++)
                    take(x[k], x[k] > -INFINITY ? i0 + j * step + k : -1);
            }
        }
    } else {
        for (int i = threadIdx.x; i < n; i += blockDim.x) {
            float x = finite(logits[i]);

            take(x, x > -INFINITY ? i : -1);
        }
    }
    take_warp();
    if (lane == 0) {
        warp_max[threadIdx.x / 32] = most;
        warp_id[threadIdx.x / 32] = id;
    }
    __syncthreads();
    if (threadIdx.x < 32) {
        most = warp_max[lane];
        id = warp_id[lane];
        take_warp();
        if (lane == 0)
            write_id(a, row, id);
    }
}

// One cluster a row, the next as soon as one ends; of many rows, where most may be greedy and starting
// clusters for nothing costs, as many as the card takes at once.
template <int PER, int BLOCKS>
int launch_wide(const kn_cuda_sample_args &a, bool drawn, kn_cuda_stream s)
{
    static int most; // clusters at once

    if (most == 0) {
        const void *kernel = (const void *)wide_kernel<PER, BLOCKS>;
        cudaLaunchConfig_t config = {};
        cudaLaunchAttribute cluster;
        int n = 0;
        int rc = (int)cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                           sizeof(Wide));

        rc = rc ? rc
                : (int)cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                            cudaSharedmemCarveoutMaxShared);
        cluster.id = cudaLaunchAttributeClusterDimension;
        cluster.val.clusterDim.x = CLUSTER;
        cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
        config.gridDim = dim3(CLUSTER);
        config.blockDim = dim3(THREADS);
        config.dynamicSmemBytes = sizeof(Wide);
        config.attrs = &cluster;
        config.numAttrs = 1;
        rc = rc ? rc : (int)cudaOccupancyMaxActiveClusters(&n, kernel, &config);
        if (rc != 0)
            return rc;
        most = n > 0 ? n : 1;
    }
    int clusters = a.n <= 4 * most ? a.n : most;

    return launch(wide_kernel<PER, BLOCKS>, dim3(clusters * CLUSTER), THREADS, sizeof(Wide), CLUSTER,
                  s, a, drawn);
}

} // namespace

#endif
