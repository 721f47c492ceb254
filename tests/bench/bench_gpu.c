/* Speed of each kernel of the CUDA back end but attention (bench_attn), on Llama-3.1-8B shapes.
 *
 * Bytes that must move (weights, rows in and out) over the time, beside the rate at which a kernel
 * reads memory; operations beside the rate of the best large BF16 product; both ceilings measured
 * in the same run. Launches go round over copies of the weights that together exceed the
 * second-level cache by far, inside a graph, as in a model. Needs a card; neither gRPC nor UCX.
 *
 *   bench_gpu [--json] [--only TEXT] [--sweep]     --sweep: splits and stages of our products */
#include "kernels/cuda/module.h"
#include "tests/bench/probe.h"
#include "tests/gpu/attn_rig.h"

#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>

#define MAX_ROWS    8192
#define MAX_WIDTH   28672
#define MAX_COPIES  16
#define CACHE_BYTES ((size_t)400 << 20)

struct bench {
    bool json, sweep;
    const char *only;
    cudaStream_t stream;
    double read_rate, mma;
    char *weights; /* CACHE_BYTES and more */
    char *x, *out;
    float *vector;
    struct kn_gemm *gemm;
};

struct shape {
    const char *name;
    int n, k;
    enum kn_cuda_stream_out kind;
};
static const struct shape shapes[] = {{"qkv", 6144, 4096, KN_STREAM_STORE},
                                      {"o", 4096, 4096, KN_STREAM_ADD},
                                      {"gate-up", 28672, 4096, KN_STREAM_SWIGLU},
                                      {"down", 4096, 14336, KN_STREAM_ADD},
                                      {"head", 128256, 4096, KN_STREAM_F32}};

static void *device(size_t bytes)
{
    void *p;

    rig_must((int)cudaMalloc(&p, bytes), "cudaMalloc");
    return p;
}

/* Microseconds of one of `n` launches recorded as a graph. `launch` gets 0..n-1. */
static double time_of(struct bench *b, int n, int (*launch)(void *arg, int i), void *arg)
{
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    cudaEvent_t from, to;
    double v[5];
    float ms;

    rig_must((int)cudaStreamBeginCapture(b->stream, cudaStreamCaptureModeThreadLocal), "capture");
    for (int i = 0; i < n; i++) {
        rig_must(launch(arg, i), "launch");
    }
    rig_must((int)cudaStreamEndCapture(b->stream, &graph), "capture");
    rig_must((int)cudaGraphInstantiate(&exec, graph, 0), "graph");
    rig_must((int)cudaEventCreate(&from), "event");
    rig_must((int)cudaEventCreate(&to), "event");
    rig_must((int)cudaGraphLaunch(exec, b->stream), "launch");
    for (int i = 0; i < 5; i++) {
        cudaEventRecord(from, b->stream);
        rig_must((int)cudaGraphLaunch(exec, b->stream), "launch");
        cudaEventRecord(to, b->stream);
        rig_must((int)cudaEventSynchronize(to), "run");
        cudaEventElapsedTime(&ms, from, to);
        v[i] = (double)ms * 1000 / n;
    }
    cudaEventDestroy(from);
    cudaEventDestroy(to);
    cudaGraphExecDestroy(exec);
    cudaGraphDestroy(graph);
    return probe_median(v, 5);
}

struct product {
    struct bench *b;
    const struct shape *s;
    int rows, copies, split, stages, group, warpgroups;
    struct kn_cuda_map x, w[MAX_COPIES];
};

static int launch_ours(void *arg, int i)
{
    struct product *p = arg;
    struct kn_cuda_stream_gemm_args a = {
        .w = &p->w[i % p->copies],
        .x = &p->x,
        .n = p->s->n,
        .k = p->s->k,
        .rows = p->rows,
        .kind = p->s->kind,
        .out = p->b->out,
        .out_stride = (size_t)(p->s->kind == KN_STREAM_SWIGLU ? p->s->n / 2 : p->s->n),
        .split = p->split,
        .stages = p->stages,
        .group = p->group,
        .warpgroups = p->warpgroups};

    return kn_cuda_stream_gemm(KN_CUDA_BF16, &a, p->b->stream);
}

static struct kn_gemm_args library_args(const struct product *p, int i)
{
    return (struct kn_gemm_args){.x = p->b->x,
                                 .w = p->b->weights + (size_t)(i % p->copies) * (size_t)p->s->n *
                                                          (size_t)p->s->k * 2,
                                 .rows = p->rows,
                                 .n = p->s->n,
                                 .k = p->s->k,
                                 .add = p->s->kind == KN_STREAM_ADD,
                                 .f32 = p->s->kind == KN_STREAM_F32,
                                 .out = p->b->out};
}

static int launch_library(void *arg, int i)
{
    struct product *p = arg;
    struct kn_gemm_args a = library_args(p, i);

    return kn_gemm_run(p->b->gemm, &a, p->b->stream);
}

static void report(struct bench *b, const char *name, double us, double bytes, double operations)
{
    double read_us = bytes / b->read_rate * 1e6, mma_us = operations / b->mma * 1e6;
    bool memory = read_us > mma_us;
    struct probe_result r = {.bench = "gpu",
                             .name = name,
                             .metric = memory ? "gb_per_s" : "tflop_per_s",
                             .unit = memory ? "GB/s" : "TFLOP/s",
                             .value = memory ? bytes / us / 1e3 : operations / us / 1e6,
                             .ceiling = memory ? "memory read" : "bf16 product",
                             .ceiling_value = memory ? b->read_rate / 1e9 : b->mma / 1e12};

    if (b->json) {
        probe_print(&r, true);
    } else {
        printf("%-26s %9.2f us %8.1f %-7s %.3f of %s\n", name, us, r.value, r.unit,
               r.value / r.ceiling_value, r.ceiling);
    }
}

static double product_bytes(const struct product *p)
{
    double out = p->s->kind == KN_STREAM_F32 ? 4 : p->s->kind == KN_STREAM_SWIGLU ? 1 : 2;

    return 2.0 * p->s->n * p->s->k + 2.0 * p->rows * p->s->k + out * p->rows * p->s->n;
}

static void init_product(struct product *p, struct bench *b, const struct shape *s, int rows)
{
    size_t bytes = (size_t)s->n * (size_t)s->k * 2;

    *p = (struct product){.b = b, .s = s, .rows = rows};
    p->copies = (int)BT_MAX(CACHE_BYTES / bytes, (size_t)1);
    p->copies = BT_MIN(p->copies, MAX_COPIES);
    for (int i = 0; i < p->copies; i++) {
        rig_must(kn_cuda_map_init(&p->w[i], KN_CUDA_BF16, b->weights + (size_t)i * bytes,
                                  (size_t)s->n, (size_t)s->k, (size_t)s->k, 64),
                 "map");
    }
    rig_must(kn_cuda_map_init(&p->x, KN_CUDA_BF16, b->x, MAX_ROWS, (size_t)s->k, (size_t)s->k,
                              kn_cuda_stream_box(rows)),
             "map");
}

struct tried {
    double us;
    int split, stages, group, warpgroups;
};

/* All settings of our product, the best first. */
static void sweep(struct bench *b, struct product *p, double bytes)
{
    static const int stages[] = {3, 4, 5, 6, 8, 10, 12}, groups[] = {1, 2, 4};
    struct tried all[512];
    int n = 0, box = 128 * kn_cuda_stream_box(p->rows);

    for (int i = 0; i < 2 * 4 * 7 * 3; i++) {
        struct tried t = {.warpgroups = i % 2 ? 4 : 2,
                          .split = 1 << i / 2 % 4,
                          .stages = stages[i / 8 % 7],
                          .group = groups[i / 56]};
        int at = n;

        if (t.stages * (8192 * t.warpgroups + box) > 222 * 1024 || t.group * 2 > t.stages ||
            (t.warpgroups == 4 && box < 32 * 128) || t.split * p->s->n / 128 > 1100) {
            continue;
        }
        p->split = t.split;
        p->stages = t.stages;
        p->group = t.group;
        p->warpgroups = t.warpgroups;
        t.us = time_of(b, 16, launch_ours, p);
        for (n++; at > 0 && all[at - 1].us > t.us; at--) {
            all[at] = all[at - 1];
        }
        all[at] = t;
    }
    for (int i = 0; i < 4; i++) {
        printf("  %s rows %d: split %d stages %d group %d warpgroups %d: %.2f us %.0f GB/s\n",
               p->s->name, p->rows, all[i].split, all[i].stages, all[i].group, all[i].warpgroups,
               all[i].us, bytes / all[i].us / 1e3);
    }
    p->split = p->stages = p->group = p->warpgroups = 0;
}

static void run_products(struct bench *b)
{
    static const int rows[] = {1, 8, 16, 32, 64, 128, 256, 1024, 8192};
    struct product p;
    char name[64];
    float us;

    for (size_t i = 0; i < BT_ARRAY_LEN(shapes); i++) {
        const struct shape *s = &shapes[i];

        for (size_t r = 0; r < BT_ARRAY_LEN(rows); r++) {
            double ops = 2.0 * s->n * s->k * rows[r];

            snprintf(name, sizeof(name), "%s rows %d", s->name, rows[r]);
            if ((b->only && !strstr(name, b->only)) || (s->n > 100000 && rows[r] > 256)) {
                continue;
            }
            init_product(&p, b, s, rows[r]);
            if (rows[r] <= 256) {
                report(b, name, time_of(b, 16, launch_ours, &p), product_bytes(&p), ops);
                if (b->sweep) {
                    sweep(b, &p, product_bytes(&p));
                }
            }
            if (rows[r] >= 8 && !b->sweep) {
                struct kn_gemm_args a = library_args(&p, 0);

                rig_must(kn_gemm_tune(b->gemm, &(struct kn_gemm_tune_args){.a = &a, .most = 16},
                                      b->stream, &us),
                         "tune");
                snprintf(name, sizeof(name), "%s rows %d cublaslt", s->name, rows[r]);
                report(b, name, time_of(b, 16, launch_library, &p), product_bytes(&p), ops);
            }
        }
    }
}

/* Row kernels. */
struct row_case {
    struct bench *b;
    int rows;
    struct kn_cuda_heads heads;
    struct kn_cuda_sample_args sample;
};

static int launch_norm(void *arg, int i)
{
    struct row_case *c = arg;
    struct kn_cuda_norm_args a = {.x = c->b->x,
                                  .weight = c->b->vector,
                                  .rows = c->rows,
                                  .width = 4096,
                                  .eps = 1e-5f,
                                  .out = c->b->out};

    (void)i;
    return kn_cuda_norm(KN_CUDA_BF16, &a, c->b->stream);
}

static int launch_swiglu(void *arg, int i)
{
    struct row_case *c = arg;

    (void)i;
    return kn_cuda_swiglu(KN_CUDA_BF16, c->b->x, c->rows, 14336, c->b->out, c->b->stream);
}

static int launch_heads(void *arg, int i)
{
    struct row_case *c = arg;

    (void)i;
    return kn_cuda_qkv_finish(KN_CUDA_BF16, c->b->x, c->rows, &c->heads, NULL, c->b->stream);
}

static int launch_sample(void *arg, int i)
{
    struct row_case *c = arg;

    (void)i;
    c->sample.n = c->rows;
    return kn_cuda_sample(&c->sample, c->b->stream);
}

static void run_rows(struct bench *b)
{
    static const int rows[] = {1, 64, 256, 8192};
    struct row_case c = {.b = b,
                         .heads = {.n_heads = 32,
                                   .n_kv_heads = 8,
                                   .head_dim = 128,
                                   .page_tokens = 64,
                                   .page_stride = 2 * 8 * 64 * 128 * 2,
                                   .kv = b->weights}};
    struct kn_cuda_draw *draws = device(256 * sizeof(*draws)), draw[256];
    int32_t *page = device(MAX_ROWS * sizeof(*page)), zero[MAX_ROWS] = {0};
    int32_t *drawn = device(256 * sizeof(*drawn));
    float *table = device((size_t)MAX_ROWS * 128 * sizeof(float));

    for (int i = 0; i < MAX_ROWS; i++) {
        zero[i] = i / 64;
    }
    rig_must((int)cudaMemset(table, 0, (size_t)MAX_ROWS * 128 * sizeof(float)), "memset");
    rig_must((int)cudaMemcpy(page, zero, sizeof(zero), cudaMemcpyHostToDevice), "copy");
    c.heads.pos = c.heads.page = page;
    c.heads.cos_sin = table;
    c.sample = (struct kn_cuda_sample_args){.logits = (float *)b->weights,
                                            .stride = 128256,
                                            .n_vocab = 128256,
                                            .draws = draws,
                                            .out = drawn};
    for (size_t i = 0; i < BT_ARRAY_LEN(rows); i++) {
        char name[64];
        double r = rows[i];

        c.rows = rows[i];
        snprintf(name, sizeof(name), "norm rows %d", rows[i]);
        report(b, name, time_of(b, 16, launch_norm, &c), r * 4096 * 4, 0);
        snprintf(name, sizeof(name), "swiglu rows %d", rows[i]);
        report(b, name, time_of(b, 16, launch_swiglu, &c), r * 14336 * 6, 0);
        snprintf(name, sizeof(name), "heads rows %d", rows[i]);
        report(b, name, time_of(b, 16, launch_heads, &c), r * 6144 * 4, 0);
        for (int k = 0; k < 3 && rows[i] <= 256; k++) {
            static const char *const kinds[] = {"greedy", "top_p", "top_k top_p"};

            for (int j = 0; j < 256; j++) {
                draw[j] = (struct kn_cuda_draw){.temperature = k ? 1 : 0,
                                                .top_p = k ? 0.9f : 1,
                                                .top_k = k == 2 ? 50 : 0,
                                                .seed = (uint64_t)j};
            }
            rig_must((int)cudaMemcpy(draws, draw, sizeof(draw), cudaMemcpyHostToDevice), "copy");
            snprintf(name, sizeof(name), "sample %s rows %d", kinds[k], rows[i]);
            report(b, name, time_of(b, 8, launch_sample, &c), r * 128256 * 4, 0);
        }
    }
}

/* Scattered blocks between pinned memory and the device. */
struct copies {
    struct bench *b;
    struct kn_cuda_copy_args a;
};
static int launch_copy(void *arg, int i)
{
    struct copies *c = arg;

    (void)i;
    return kn_cuda_copy_blocks(&c->a, c->b->stream);
}

static void run_copies(struct bench *b)
{
    enum { N = 2048, BYTES = 128 << 10 };
    static const int blocks[] = {2, 4, 8};
    char *host;
    const void **src = malloc(N * sizeof(*src));
    void **dst = malloc(N * sizeof(*dst));
    struct copies c = {.b = b, .a = {.n = N, .bytes = BYTES}};
    void *d_src = device(N * sizeof(*src)), *d_dst = device(N * sizeof(*dst));

    rig_must((int)cudaHostAlloc((void **)&host, (size_t)N * BYTES, cudaHostAllocMapped), "pinned");
    memset(host, 1, (size_t)N * BYTES);
    c.a.src = d_src;
    c.a.dst = d_dst;
    for (int out = 0; out < 2; out++) {
        for (int i = 0; i < N; i++) {
            char *h = host + (size_t)(i * 1021 % N) * BYTES;
            char *d = b->weights + (size_t)(i * 611 % N) * BYTES;

            src[i] = out ? d : h;
            dst[i] = out ? h : d;
        }
        rig_must((int)cudaMemcpy(d_src, src, N * sizeof(*src), cudaMemcpyHostToDevice), "copy");
        rig_must((int)cudaMemcpy(d_dst, dst, N * sizeof(*dst), cudaMemcpyHostToDevice), "copy");
        for (size_t k = 0; k < BT_ARRAY_LEN(blocks); k++) {
            struct probe_result r = {.bench = "gpu", .metric = "gb_per_s", .unit = "GB/s"};
            char name[64];

            c.a.blocks = blocks[k];
            snprintf(name, sizeof(name), "copy %s %d sms", out ? "out" : "in", blocks[k]);
            r.name = name;
            r.value = (double)N * BYTES / time_of(b, 1, launch_copy, &c) / 1e3;
            probe_print(&r, b->json);
        }
    }
    cudaFreeHost(host);
    free(src);
    free(dst);
}

static double matrix_rate(struct bench *b)
{
    struct shape s = {"ceiling", 14336, 4096, KN_STREAM_STORE};
    struct product p;
    struct kn_gemm_args a;
    float us;

    init_product(&p, b, &s, 8192);
    a = library_args(&p, 0);
    rig_must(
        kn_gemm_tune(b->gemm, &(struct kn_gemm_tune_args){.a = &a, .most = 16}, b->stream, &us),
        "tune");
    return 2.0 * 8192 * 14336 * 4096 / us * 1e6;
}

int main(int argc, char **argv)
{
    static const struct option options[] = {{"json", no_argument, NULL, 'j'},
                                            {"only", required_argument, NULL, 'o'},
                                            {"sweep", no_argument, NULL, 's'},
                                            {0}};
    struct bench b = {0};
    const struct kn_cuda_driver *driver;
    struct bt_err err = {0};
    size_t weights = CACHE_BYTES + ((size_t)1100 << 20), x = (size_t)MAX_ROWS * MAX_WIDTH * 2;
    int opt;

    while ((opt = getopt_long(argc, argv, "", options, NULL)) != -1) {
        switch (opt) {
        case 'j':
            b.json = true;
            break;
        case 'o':
            b.only = optarg;
            break;
        case 's':
            b.sweep = true;
            break;
        default:
            return 2;
        }
    }
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (kn_cuda_start(&driver, &err) < 0 ||
        kn_gemm_create(KN_CUDA_BF16, false, &b.gemm, &err) < 0) {
        fprintf(stderr, "bench_gpu: %s\n", err.msg);
        return 1;
    }
    rig_must(kn_cuda_stream_init(), "init");
    rig_must((int)cudaStreamCreateWithFlags(&b.stream, cudaStreamNonBlocking), "stream");
    b.weights = device(weights);
    b.x = device(x);
    b.out = device(x);
    b.vector = device(MAX_WIDTH * sizeof(float));
    rig_must((int)cudaMemset(b.vector, 0, MAX_WIDTH * sizeof(float)), "memset");
    rig_must(kn_cuda_fill(KN_CUDA_BF16, b.weights, weights / 2, 0.03f, 1, b.stream), "fill");
    rig_must(kn_cuda_fill(KN_CUDA_BF16, b.x, x / 2, 1, 2, b.stream), "fill");
    rig_must((int)cudaStreamSynchronize(b.stream), "fill");
    b.read_rate = rig_read_rate();
    b.mma = matrix_rate(&b);
    if (!b.json) {
        printf("reads %.3f TB/s, products %.0f TFLOP/s\n", b.read_rate / 1e12, b.mma / 1e12);
    }
    run_products(&b);
    if (!b.only || strcmp(b.only, "none") == 0) {
        run_rows(&b);
        run_copies(&b);
    }
    kn_gemm_destroy(b.gemm);
    return 0;
}
