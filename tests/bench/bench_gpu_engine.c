/* Speed of whole passes on a CUDA device: Llama-3.1-8B shapes, random weights made on the device.
 *
 *   prefill N          one prompt of N tokens, in pieces of at most 8,192, until its first token
 *   decode B x C       a step of B sequences with C positions each; tokens are drawn on the device
 *                      and the host queues the next step while one runs
 *   requests N         N prompts of 1,024 and 128 answered tokens each, all at once: prompts first,
 *                      eight a pass, then steps of all
 *   requests N mixed P the same with P prompts a pass and the steps of those that are through
 *
 * Ceilings of the same run: bytes that must be read (weights, K and V) at the rate at which a
 * kernel reads memory, operations at the rate of the best large BF16 product. Floors add both by
 * phases; ratio = floor over measured. Peer: vLLM 0.25.1 as measured on the same card (NOTES.md),
 * not here. Needs a card; neither gRPC nor UCX, no network, no files.
 *
 *   bench_gpu_engine [--json] [--only TEXT] [--layers N] [--invariant] [--start]
 *     --start: from a weights file to a model that can run, three times */
#include "kernels/cuda/module.h"
#include "kernels/model/model.h"
#include "tests/bench/probe.h"
#include "tests/gpu/attn_rig.h"
#include "tests/gpu/made_model.h"

#include "common/thr/time.h"

#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define PAGE      64
#define MAX_SEQS  256
#define MAX_CHUNK 8192
#define MAX_CTX   32832
#define POOL      (256 * (2048 + 128) + 64) /* tokens; 64 x 8k fits too */

struct bench {
    bool json, invariant, start;
    const char *only;
    struct made_model made;
    struct bt_model_file *file;
    struct kn_model *model;
    struct bt_mem_region kv;
    struct kv_layout layout;
    uint32_t *pages;       /* a permutation of all */
    double read_rate, mma; /* bytes and operations a second */
    double block_weights, head_weights;
    double kv_token; /* bytes of K and V of a position, all layers */
};

static void die(const char *what, const struct bt_err *err)
{
    fprintf(stderr, "bench_gpu_engine: %s: %s\n", what, err->msg);
    exit(1);
}

static double matrix_rate(void)
{
    enum { M = 8192, N = 14336, K = 4096 };
    struct kn_gemm *g;
    struct bt_err err = {0};
    struct kn_gemm_args a = {.rows = M, .n = N, .k = K};
    void *x, *w;
    float us;

    if (kn_gemm_create(KN_CUDA_BF16, false, &g, &err) < 0) {
        die("matrix rate", &err);
    }
    rig_must((int)cudaMalloc(&x, (size_t)M * K * 2), "cudaMalloc");
    rig_must((int)cudaMalloc(&w, (size_t)N * K * 2), "cudaMalloc");
    rig_must((int)cudaMalloc(&a.out, (size_t)M * N * 2), "cudaMalloc");
    a.x = x;
    a.w = w;
    rig_must(kn_cuda_fill(KN_CUDA_BF16, x, (size_t)M * K, 1, 1, NULL), "fill");
    rig_must(kn_cuda_fill(KN_CUDA_BF16, w, (size_t)N * K, 1, 2, NULL), "fill");
    rig_must(kn_gemm_tune(g, &(struct kn_gemm_tune_args){.a = &a, .most = 16}, NULL, &us), "tune");
    cudaFree(x);
    cudaFree(w);
    cudaFree(a.out);
    kn_gemm_destroy(g);
    return 2.0 * M * N * K / us * 1e6;
}

static struct kn_model_cfg model_cfg(const struct bench *b)
{
    return (struct kn_model_cfg){.max_batch_tokens = MAX_CHUNK,
                                 .max_batch_seqs = MAX_SEQS,
                                 .max_outputs = MAX_SEQS,
                                 .max_ctx = MAX_CTX,
                                 .device = kn_cuda_get(KN_DEVICE_ABI),
                                 .page_tokens = PAGE,
                                 .invariant = b->invariant,
                                 .random_seed = 42,
                                 .file = b->file};
}

/* As a keeper does it: the first process's descriptor, imported by the next ones. The last two
 * starts find the weights. */
static int keep_weights(void *arg,
                        const struct bt_mem_ops *ops,
                        size_t bytes,
                        struct bt_mem_region *ret,
                        bool *ret_whole,
                        struct bt_err *err)
{
    static int fd = -1, n;
    int rc;

    (void)arg;
    *ret_whole = n++ >= 2;
    if (*ret_whole) {
        return ops->import(dup(fd), bytes, "weights", ret, err);
    }
    rc = ops->alloc(bytes, "weights", ret, err);
    fd = rc == BT_OK && n == 2 ? dup(ret->fd) : -1;
    return rc;
}

/* From a weights file (zeros; its pages are in memory from the second time on) to a model that can
 * run, without the pool. Floor: its bytes at 55 GB/s. */
static void run_start(struct bench *b)
{
    struct kn_model_home home = {.weights = keep_weights, .notes_bytes = (size_t)64 << 10};
    struct kn_model_cfg cfg;
    struct bt_err err = {0};
    double bytes;

    if (made_model_open(&b->made, &b->file, &err) < 0) {
        die("model file", &err);
    }
    cfg = model_cfg(b);
    cfg.random_seed = 0;
    home.notes = calloc(1, home.notes_bytes);
    cfg.home = &home;
    for (int i = 0; i < 4; i++) {
        uint64_t start = bt_now_ns();

        if (kn_model_create(&cfg, &b->model, &err) < 0) {
            die("model", &err);
        }
        printf("start %d: %.2f s\n", i, (double)(bt_now_ns() - start) / 1e9);
        start = bt_now_ns();
        kn_model_destroy(b->model);
        printf("        end %.2f s\n", (double)(bt_now_ns() - start) / 1e9);
    }
    bytes = 2 * (double)(b->made.layers * (4096.0 * 6144 + 4096.0 * 4096 + 3.0 * 4096 * 14336) +
                         2.0 * 4096 * 128256);
    printf("weights %.2f GB: floor %.2f s\n", bytes / 1e9, bytes / 55e9);
    bt_model_close(b->file);
}

static void setup(struct bench *b)
{
    const struct made_model *m = &b->made;
    struct kn_model_cfg cfg;
    double hd = m->heads * m->head_dim, kd = m->kv_heads * m->head_dim, e = m->width;
    struct bt_err err = {0};
    uint64_t start = bt_now_ns();

    if (made_model_open(m, &b->file, &err) < 0) {
        die("model file", &err);
    }
    cfg = model_cfg(b);
    if (kn_model_create(&cfg, &b->model, &err) < 0) {
        die("model", &err);
    }
    b->layout = (struct kv_layout){.n_layers = m->layers,
                                   .n_kv_heads = m->kv_heads,
                                   .head_dim = m->head_dim,
                                   .page_tokens = PAGE,
                                   .dtype = KV_DTYPE_BF16,
                                   .n_pages = POOL / PAGE};
    if (kv_layout_init(&b->layout, &err) < 0 ||
        kn_cuda_mem.alloc(b->layout.bytes, "kv", &b->kv, &err) < 0) {
        die("pool", &err);
    }
    rig_must(kn_cuda_fill(KN_CUDA_BF16, b->kv.base, b->layout.bytes / 2, 1, 7, NULL), "fill");
    rig_must((int)cudaDeviceSynchronize(), "fill");
    b->pages = malloc(b->layout.n_pages * sizeof(*b->pages));
    for (uint32_t i = 0; i < b->layout.n_pages; i++) { /* runs of 4 pages, scattered */
        b->pages[i] = (i / 4 * 1021 % (b->layout.n_pages / 4)) * 4 + i % 4;
    }
    b->block_weights = m->layers * (e * (hd + 2 * kd) + hd * e + 3.0 * e * m->ff);
    b->head_weights = e * m->vocab;
    b->kv_token = m->layers * 2 * kd * 2;
    if (!b->json) {
        printf("model and pool set up in %.2f s\n", (double)(bt_now_ns() - start) / 1e9);
    }
}

/* Queues one step of n sequences from `pos` on; `first`: ids come from the host. */
static void submit_step(struct bench *b, int n, int per_seq, int pos, bool first)
{
    static const struct kn_device_draw greedy;
    static struct kn_batch_seq seqs[MAX_SEQS];
    static int32_t ids[MAX_SEQS];
    struct kn_batch batch = {.n_tokens = n,
                             .ids = ids,
                             .n_seqs = n,
                             .seqs = seqs,
                             .kv = b->kv.base,
                             .layout = &b->layout};
    struct bt_err err = {0};

    for (int i = 0; i < n; i++) {
        ids[i] = first ? 100 + i : -1 - i;
        seqs[i] = (struct kn_batch_seq){.n_tokens = 1,
                                        .pos = pos,
                                        .pages = b->pages + (size_t)i * (size_t)per_seq,
                                        .want_logits = true,
                                        .draw = &greedy};
    }
    if (kn_model_submit(b->model, &batch, &err) < 0) {
        die("decode", &err);
    }
}

static void wait_step(struct bench *b)
{
    static int32_t drawn[MAX_SEQS];
    struct bt_err err = {0};

    if (kn_model_wait(b->model, drawn, NULL, &err) < 0) {
        die("step", &err);
    }
}

/* Seconds of `steps` steps whose contexts end at ctx. */
static double decode_steps(struct bench *b, int n, int ctx, int steps)
{
    int per_seq = BT_DIV_UP(ctx + 64, PAGE);
    uint64_t start = bt_now_ns();

    for (int i = 0; i < steps; i++) {
        submit_step(b, n, per_seq, ctx - steps + i, i == 0);
        if (i > 0) {
            wait_step(b);
        }
    }
    wait_step(b);
    return (double)(bt_now_ns() - start) / 1e9;
}

/* n prompts of `len` tokens from position 0, in one pass, or one prompt in pieces. */
static void prefill_pass(struct bench *b, int first_seq, int n, int len, int per_seq, int pos)
{
    static const struct kn_device_draw greedy;
    static struct kn_batch_seq seqs[MAX_SEQS];
    static int32_t ids[MAX_CHUNK];
    struct kn_batch batch = {.n_tokens = n * len,
                             .ids = ids,
                             .n_seqs = n,
                             .seqs = seqs,
                             .kv = b->kv.base,
                             .layout = &b->layout};
    struct bt_err err = {0};

    for (int i = 0; i < n * len; i++) {
        ids[i] = (int32_t)((uint32_t)(i + pos) * 2654435761u % (uint32_t)b->made.vocab);
    }
    for (int i = 0; i < n; i++) {
        seqs[i] =
            (struct kn_batch_seq){.n_tokens = len,
                                  .pos = pos,
                                  .pages = b->pages + (size_t)(first_seq + i) * (size_t)per_seq,
                                  .want_logits = true,
                                  .draw = &greedy};
    }
    if (kn_model_submit(b->model, &batch, &err) < 0) {
        die("prefill", &err);
    }
}

static double prefill_once(struct bench *b, int len)
{
    uint64_t start = bt_now_ns();
    int per_seq = BT_DIV_UP(len, PAGE) + 1;

    for (int pos = 0; pos < len; pos += MAX_CHUNK) {
        prefill_pass(b, 0, 1, BT_MIN(len - pos, MAX_CHUNK), per_seq, pos);
        if (pos > 0) {
            wait_step(b);
        }
    }
    wait_step(b);
    return (double)(bt_now_ns() - start) / 1e9;
}

static double prefill_ops(const struct bench *b, double len)
{
    double attention = 4.0 * b->made.heads * b->made.head_dim * b->made.layers * len * len / 2;

    return 2 * b->block_weights * len + attention + 2 * b->head_weights;
}

static double decode_bytes(const struct bench *b, double n, double ctx)
{
    return 2 * (b->block_weights + b->head_weights) + n * ctx * b->kv_token;
}

static double peer_ms; /* of the case, 0 = none; set by the tables below */

static void report(struct bench *b, const char *name, double s, double floor_s, double work)
{
    struct probe_result r = {.bench = "gpu-engine",
                             .name = name,
                             .metric = "ms",
                             .unit = "ms",
                             .value = s * 1e3,
                             .ceiling = "floor",
                             .ceiling_value = floor_s * 1e3,
                             .lower_is_better = true,
                             .peer = peer_ms > 0 ? "vLLM 0.25.1 (recorded)" : NULL,
                             .peer_value = peer_ms,
                             .peer_ratio = peer_ms / (s * 1e3)};

    if (b->json) {
        probe_print(&r, true);
    } else {
        printf("%-20s %9.3f ms  floor %8.3f  share %.3f  %7.1f %s", name, s * 1e3, floor_s * 1e3,
               floor_s / s, work / s / 1e12, strncmp(name, "prefill", 7) == 0 ? "TFLOP/s" : "TB/s");
        if (peer_ms > 0) {
            printf("  vLLM (recorded) %.2f ms: %.3fx", peer_ms, peer_ms / (s * 1e3));
        }
        printf("\n");
    }
}

static bool wanted(const struct bench *b, const char *name)
{
    return !b->only || strstr(name, b->only);
}

static void run_decode(struct bench *b, int n, int ctx, double peer)
{
    char name[64];
    double best[3], bytes = decode_bytes(b, n, ctx - 16);

    snprintf(name, sizeof(name), "decode %d x %d", n, ctx);
    if (!wanted(b, name)) {
        return;
    }
    decode_steps(b, n, ctx, 4);
    for (int i = 0; i < 3; i++) {
        best[i] = decode_steps(b, n, ctx, 32) / 32;
    }
    peer_ms = peer;
    report(b, name, probe_median(best, 3), bytes / b->read_rate, bytes);
}

static void run_prefill(struct bench *b, int len, double peer)
{
    char name[64];
    double t[5], ops = prefill_ops(b, len);
    int n = len > 10000 ? 2 : 5;

    snprintf(name, sizeof(name), "prefill %d", len);
    if (!wanted(b, name)) {
        return;
    }
    prefill_once(b, len);
    for (int i = 0; i < n; i++) {
        t[i] = prefill_once(b, len);
    }
    peer_ms = peer;
    report(b, name, probe_median(t, n), ops / b->mma, ops);
}

/* How n prompts of 1,024 and 128 answered tokens each are made into passes. */
enum { IN = 1024, OUT = 128 };
struct flow {
    int n, per_seq;
    int per_pass;         /* prompts in a pass */
    bool mixed;           /* steps of those that are through ride along with prompts */
    int prompts;          /* whose prompts have been queued */
    int n_out[MAX_SEQS];  /* tokens that each has, those under way included */
    int was_at[MAX_SEQS]; /* its output of the pass before, -1 = none */
};

static int fill_steps(struct bench *b, struct flow *f, struct kn_batch_seq *seqs, int32_t *ids)
{
    static const struct kn_device_draw greedy;
    int n = 0;

    for (int i = 0; i < f->prompts; i++) {
        if (f->n_out[i] == OUT) {
            f->was_at[i] = -1;
            continue;
        }
        ids[n] = f->was_at[i] >= 0 ? -1 - f->was_at[i] : 100 + i;
        seqs[n] = (struct kn_batch_seq){.n_tokens = 1,
                                        .pos = IN + f->n_out[i]++ - 1,
                                        .pages = b->pages + (size_t)i * (size_t)f->per_seq,
                                        .want_logits = true,
                                        .draw = &greedy};
        f->was_at[i] = n++;
    }
    return n;
}

/* Queues the next pass; false = there is none. *ret_prompts: it has some. */
static bool flow_pass(struct bench *b, struct flow *f, bool *ret_prompts)
{
    static const struct kn_device_draw greedy;
    static struct kn_batch_seq seqs[MAX_SEQS];
    static int32_t ids[MAX_CHUNK];
    int last = BT_MIN(f->n, f->prompts + f->per_pass), n = 0, tokens;
    struct kn_batch batch = {.ids = ids, .seqs = seqs, .kv = b->kv.base, .layout = &b->layout};
    struct bt_err err = {0};

    *ret_prompts = f->prompts < last;
    if (f->mixed || !*ret_prompts) {
        n = fill_steps(b, f, seqs, ids);
    } else {
        memset(f->was_at, -1, sizeof(f->was_at)); /* none of them is in the pass before */
    }
    tokens = n;
    for (; f->prompts < last; f->prompts++) {
        for (int t = 0; t < IN; t++) {
            ids[tokens++] = (int32_t)((uint32_t)(f->prompts * 7919 + t) * 2654435761u %
                                      (uint32_t)b->made.vocab);
        }
        f->n_out[f->prompts] = 1;
        f->was_at[f->prompts] = n;
        seqs[n++] =
            (struct kn_batch_seq){.n_tokens = IN,
                                  .pages = b->pages + (size_t)f->prompts * (size_t)f->per_seq,
                                  .want_logits = true,
                                  .draw = &greedy};
    }
    batch.n_seqs = n;
    batch.n_tokens = tokens;
    if (n > 0 && kn_model_submit(b->model, &batch, &err) < 0) {
        die("pass", &err);
    }
    return n > 0;
}

/* Seconds; *ret_prompts_s: of them until the last pass with prompts was done. */
static double run_flow(struct bench *b, struct flow *f, double *ret_prompts_s)
{
    uint64_t start = bt_now_ns(), prompts_end = start;
    bool prompts, before = false, any;
    int queued = 0;

    do {
        any = flow_pass(b, f, &prompts);
        queued += any;
        if (queued == 2 || (!any && queued > 0)) {
            wait_step(b);
            queued--;
            prompts_end = before ? bt_now_ns() : prompts_end;
        }
        before = any && prompts;
    } while (queued > 0);
    *ret_prompts_s = (double)(prompts_end - start) / 1e9;
    return (double)(bt_now_ns() - start) / 1e9;
}

static void run_requests(struct bench *b, int n, int per_pass, bool mixed, double peer_tokens_per_s)
{
    double ops = n * prefill_ops(b, IN), bytes = 0, s, prompts_s;
    struct flow f = {
        .n = n, .per_seq = BT_DIV_UP(IN + OUT, PAGE), .per_pass = per_pass, .mixed = mixed};
    char name[64];

    snprintf(name, sizeof(name), mixed ? "requests %d mixed %d" : "requests %d", n, per_pass);
    if (!wanted(b, name)) {
        return;
    }
    for (int i = 1; i < OUT; i++) {
        bytes += decode_bytes(b, n, IN + i);
    }
    s = run_flow(b, &f, &prompts_s);
    peer_ms = n * OUT / peer_tokens_per_s * 1e3;
    report(b, name, s, ops / b->mma + bytes / b->read_rate, bytes);
    if (!b->json) {
        printf("%-20s %9.1f output tokens/s (vLLM, recorded: %.0f); passes with prompts %.1f ms "
               "(floor %.1f), the others %.1f (%.1f)\n",
               "", n * OUT / s, peer_tokens_per_s, prompts_s * 1e3, ops / b->mma * 1e3,
               (s - prompts_s) * 1e3, bytes / b->read_rate * 1e3);
    }
}

int main(int argc, char **argv)
{
    static const struct option options[] = {
        {"json", no_argument, NULL, 'j'},         {"only", required_argument, NULL, 'o'},
        {"layers", required_argument, NULL, 'l'}, {"invariant", no_argument, NULL, 'i'},
        {"start", no_argument, NULL, 's'},        {0}};
    struct bench b = {
        .made = {"llama", "BF16", 32, 4096, 32, 8, 128, 14336, 128256, 131072, false, true}};
    const struct kn_cuda_driver *driver;
    struct bt_err err = {0};
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
            b.start = true;
            break;
        case 'i':
            b.invariant = true;
            break;
        case 'l':
            b.made.layers = (int)strtol(optarg, NULL, 10);
            break;
        default:
            return 2;
        }
    }
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (kn_cuda_start(&driver, &err) < 0) {
        die("start", &err);
    }
    if (b.start) {
        run_start(&b);
        return 0;
    }
    b.read_rate = rig_read_rate();
    b.mma = matrix_rate();
    if (!b.json) {
        printf("reads %.3f TB/s, products %.0f TFLOP/s\n", b.read_rate / 1e12, b.mma / 1e12);
    }
    setup(&b);
    run_decode(&b, 1, 2048, 4.97);
    run_decode(&b, 2, 2048, 0);
    run_decode(&b, 4, 2048, 0);
    run_decode(&b, 8, 2048, 0);
    run_decode(&b, 64, 2048, 9.48);
    run_decode(&b, 256, 2048, 25.0);
    run_decode(&b, 64, 8192, 20.8);
    run_prefill(&b, 1024, 28.0);
    run_prefill(&b, 8192, 215.5);
    run_prefill(&b, 32768, 1197);
    run_requests(&b, 64, MAX_CHUNK / IN, false, 3312);
    run_requests(&b, 64, 7, true, 3312);
    run_requests(&b, 64, 2, true, 3312);
    run_requests(&b, 256, MAX_CHUNK / IN, false, 3944);
    run_requests(&b, 256, 7, true, 3944);
    run_requests(&b, 256, 2, true, 3944);
    kn_model_destroy(b.model);
    kn_cuda_mem.free(&b.kv);
    bt_model_close(b.file);
    free(b.pages);
    return 0;
}
