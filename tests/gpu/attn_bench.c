/* Times the attention kernels beside what the card can read and multiply, measured in the same run.
 * Launches go round over copies of the pages, so that no launch finds its K and V in the cache, as
 * in a model, where every layer has its own. Needs a card; nothing else.
 *
 *     bench_attn [--json] [--only TEXT] [--n N]     N launches a case instead of 40 */
#include "tests/gpu/attn_rig.h"

#include <cuda_runtime_api.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct bench_case {
    const char *name;
    int n_seqs, rows, ctx; /* rows 0 = decode */
    double aim;            /* TB/s or TFLOP/s */
};

static const struct bench_case cases[] = {
    {"decode 1 x 2k", 1, 0, 2048, 1.0},           {"decode 1 x 32k", 1, 0, 32768, 3.5},
    {"decode 1 x 128k", 1, 0, 131072, 0},         {"decode 8 x 2k", 8, 0, 2048, 0},
    {"decode 64 x 2k", 64, 0, 2048, 4.0},         {"decode 16 x 8k", 16, 0, 8192, 4.1},
    {"decode 256 x 2k", 256, 0, 2048, 4.3},       {"decode 64 x 8k", 64, 0, 8192, 4.3},
    {"prefill 1 x 1k", 1, 1024, 1024, 161},       {"prefill 8 x 1k", 8, 1024, 1024, 381},
    {"prefill 4 x 2k", 4, 2048, 2048, 555},       {"prefill 1 x 4k", 1, 4096, 4096, 513},
    {"prefill 1 x 8k", 1, 8192, 8192, 635},       {"prefill 1 x 16k", 1, 16384, 16384, 725},
    {"prefill 1 x 32k", 1, 32768, 32768, 666},    {"prefill 512 over 8k", 1, 512, 8704, 532},
    {"prefill 2k over 32k", 1, 2048, 34816, 647},
};

struct options {
    bool json;
    const char *only;
    int launches;
    int page_tokens;
    bool invariant;
    int head_dim;
};

/* Seconds a launch: medians of replays of a graph of `n` launches. */
static double time_graph(struct rig *r, bool decode, int n)
{
    enum { REPLAYS = 5 };
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    cudaEvent_t begin, end;
    double seconds[REPLAYS];

    rig_must(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
    rig_must(cudaEventCreate(&begin), "event");
    rig_must(cudaEventCreate(&end), "event");
    rig_must(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
    for (int i = 0; i < n; i++) {
        rig_must(rig_launch(r, decode, i % r->n_layers, (struct CUstream_st *)stream), "launch");
    }
    rig_must(cudaStreamEndCapture(stream, &graph), "capture");
    rig_must(cudaGraphInstantiate(&exec, graph, 0), "graph");
    rig_must(cudaGraphLaunch(exec, stream), "graph");
    for (int i = 0; i < REPLAYS; i++) {
        float ms;

        rig_must(cudaEventRecord(begin, stream), "event");
        rig_must(cudaGraphLaunch(exec, stream), "graph");
        rig_must(cudaEventRecord(end, stream), "event");
        rig_must(cudaEventSynchronize(end), "run");
        rig_must(cudaEventElapsedTime(&ms, begin, end), "event");
        seconds[i] = (double)ms / 1e3 / n;
        for (int j = i; j > 0 && seconds[j] < seconds[j - 1]; j--) {
            double t = seconds[j];

            seconds[j] = seconds[j - 1];
            seconds[j - 1] = t;
        }
    }
    rig_must(cudaGraphExecDestroy(exec), "graph");
    rig_must(cudaGraphDestroy(graph), "graph");
    rig_must(cudaEventDestroy(begin), "event");
    rig_must(cudaEventDestroy(end), "event");
    rig_must(cudaStreamDestroy(stream), "stream");
    return seconds[REPLAYS / 2];
}

/* Bytes of K and V, and operations (causal, a multiply-add is two), of a call. */
static double bytes_of(const struct rig *r)
{
    double tokens = 0;

    for (int q = 0; q < r->n_seqs; q++) {
        tokens += r->ctx[q];
    }
    return tokens * 4.0 * r->shape.n_kv_heads * r->shape.head_dim;
}

static double ops_of(const struct rig *r)
{
    double pairs = 0;

    for (int q = 0; q < r->n_seqs; q++) {
        double rows = r->row_start[q + 1] - r->row_start[q];

        pairs += rows * (r->ctx[q] - rows) + rows * (rows + 1) / 2;
    }
    return pairs * 4.0 * r->shape.n_heads * r->shape.head_dim;
}

static void print_case(const struct bench_case *c,
                       const struct options *o,
                       double seconds,
                       double rate,
                       double ceiling)
{
    bool decode = c->rows == 0;

    if (o->json) {
        printf("{\"bench\": \"attn\", \"case\": \"%s%s\", \"metric\": \"%s\", \"value\": %.4g, "
               "\"unit\": \"%s\", \"ceiling\": \"%s\", \"ceiling_value\": %.4g, \"ratio\": %.3f}\n",
               c->name, o->invariant ? " invariant" : "", decode ? "tb_per_s" : "tflops", rate,
               decode ? "TB/s" : "TFLOP/s", decode ? "device read" : "tensor cores bf16", ceiling,
               rate / ceiling);
    } else {
        printf("%-20s %8.1f us %8.*f %s, %.0f %% of %.*f", c->name, seconds * 1e6, decode ? 2 : 0,
               rate, decode ? "TB/s" : "TFLOP/s", 100 * rate / ceiling, decode ? 2 : 0, ceiling);
        if (c->aim > 0) {
            printf(", aim %g: %s", c->aim, rate >= c->aim ? "met" : "MISSED");
        }
        printf("\n");
    }
    fflush(stdout);
}

static void
run_case(const struct bench_case *c, const struct options *o, int n_sms, double read, double mma)
{
    struct kn_cuda_attn_shape s = {.n_heads = 32,
                                   .n_kv_heads = 8,
                                   .head_dim = o->head_dim,
                                   .page_tokens = o->page_tokens,
                                   .scale = 1.0f / sqrtf((float)o->head_dim),
                                   .n_sms = n_sms,
                                   .invariant = o->invariant};
    static int rows[RIG_MAX_SEQS], ctx[RIG_MAX_SEQS];
    double layer = (double)c->n_seqs * c->ctx * 4.0 * s.n_kv_heads * s.head_dim;
    int layers = (int)fmin(32, ceil(400e6 / layer));
    struct rig r;

    for (int i = 0; i < c->n_seqs; i++) {
        rows[i] = c->rows;
        ctx[i] = c->ctx;
    }
    rig_init(&r, &s, c->n_seqs, c->rows ? rows : NULL, ctx, layers, false, 3);
    rig_plan(&r, c->rows == 0);

    int n = o->launches;
    double work = c->rows ? ops_of(&r) / 6e14 : bytes_of(&r) / 4e12;

    n = n ? n : (int)fmax(4, fmin(40, 0.04 / work)); /* at most about 40 ms a replay */
    double seconds = time_graph(&r, c->rows == 0, n);

    print_case(c, o, seconds, (c->rows ? ops_of(&r) : bytes_of(&r)) / seconds / 1e12,
               (c->rows ? mma : read) / 1e12);
    rig_free(&r);
}

int main(int argc, char **argv)
{
    struct options o = {.page_tokens = 64, .head_dim = 128};
    struct cudaDeviceProp prop;

    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--json") == 0) {
            o.json = true;
        } else if (strcmp(argv[i], "--invariant") == 0) {
            o.invariant = true;
        } else if (strcmp(argv[i], "--only") == 0 && i + 1 < argc) {
            o.only = argv[++i];
        } else if (strcmp(argv[i], "--n") == 0 && i + 1 < argc) {
            o.launches = (int)strtol(argv[++i], NULL, 10);
        } else if (strcmp(argv[i], "--page") == 0 && i + 1 < argc) {
            o.page_tokens = (int)strtol(argv[++i], NULL, 10);
        } else if (strcmp(argv[i], "--width") == 0 && i + 1 < argc) {
            o.head_dim = (int)strtol(argv[++i], NULL, 10);
        } else {
            fprintf(stderr, "usage: bench_attn [--json] [--invariant] [--only TEXT] [--n LAUNCHES] "
                            "[--page TOKENS] [--width D]\n");
            return 2;
        }
    }
    if (cudaGetDeviceProperties(&prop, 0) != cudaSuccess || prop.major != 9) {
        fprintf(stderr, "no Hopper card here\n");
        return 77;
    }
    double read = rig_read_rate(), mma = rig_mma_rate();

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        if (!o.only || strstr(cases[i].name, o.only)) {
            run_case(&cases[i], &o, prop.multiProcessorCount, read, mma);
        }
    }
    return 0;
}
