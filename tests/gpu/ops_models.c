/* Whole models: logits of the device against the plain C rows, for prompts in one piece and in
 * chunks, mixed batches and recorded decode steps; and greedy tokens drawn on the device. */
#include "tests/gpu/made_model.h"
#include "tests/gpu/ops_check.h"

#include "kernels/model/model.h"

#include <math.h>
#include <stdlib.h>

#define PAGE  16
#define PAGES 64 /* of each sequence */
#define SEQS  6
#define CTX   512

/* A model with a pool and where its sequences are. */
struct side {
    struct kn_model *m;
    struct bt_mem_region kv;
    struct kv_layout layout;
    uint32_t tables[SEQS][PAGES];
    int pos[SEQS];
    float *logits; /* [SEQS, V] */
};

static void side_init(struct side *s, const struct bt_model_file *file, bool device)
{
    const struct bt_model_config *c = bt_model_config(file);
    struct bt_err err = {0};
    struct kn_model_cfg cfg = {.file = file,
                               .n_threads = 8,
                               .isa = "auto",
                               .max_batch_tokens = 512,
                               .max_batch_seqs = SEQS,
                               .max_outputs = SEQS,
                               .max_ctx = CTX,
                               .device = device ? kn_cuda_get(KN_DEVICE_ABI) : NULL,
                               .page_tokens = PAGE};
    const struct bt_mem_ops *mem = device ? &kn_cuda_mem : &bt_mem_host;

    *s = (struct side){.layout = {.n_layers = c->n_layers,
                                  .n_kv_heads = c->n_kv_heads,
                                  .head_dim = c->head_dim,
                                  .page_tokens = PAGE,
                                  .dtype = device ? KV_DTYPE_BF16 : KV_DTYPE_F32,
                                  .n_pages = SEQS * PAGES}};
    if (kv_layout_init(&s->layout, &err) < 0 ||
        mem->alloc(s->layout.bytes, "kv", &s->kv, &err) < 0 ||
        kn_model_create(&cfg, &s->m, &err) < 0) {
        printf("FAIL model: %s\n", err.msg);
        exit(1);
    }
    for (int q = 0; q < SEQS; q++) {
        for (int i = 0; i < PAGES; i++) { /* pages of sequences lie among each other */
            s->tables[q][i] = (uint32_t)((i * 7 % PAGES) * SEQS + (q * 5 + i) % SEQS);
        }
    }
    if (device) {
        must((int)cudaMemset(s->kv.base, 0xff, s->layout.bytes), "poison");
    }
    s->logits = malloc((size_t)SEQS * (size_t)c->n_vocab * sizeof(float));
}

static void side_free(struct side *s)
{
    kn_model_destroy(s->m);
    s->kv.ops->free(&s->kv);
    free(s->logits);
}

/* One pass: n[q] new tokens of each sequence. */
static int side_pass(struct side *s, const int32_t *ids, const int *n, const bool *want)
{
    struct kn_batch_seq seqs[SEQS];
    struct kn_batch b = {
        .ids = ids, .seqs = seqs, .layout = &s->layout, .kv = s->kv.base, .logits = s->logits};
    struct bt_err err = {0};
    int rc;

    for (int q = 0; q < SEQS; q++) {
        if (n[q] > 0) {
            seqs[b.n_seqs++] = (struct kn_batch_seq){
                .n_tokens = n[q], .pos = s->pos[q], .pages = s->tables[q], .want_logits = want[q]};
            b.n_tokens += n[q];
            s->pos[q] += n[q];
        }
    }
    rc = kn_model_forward(s->m, &b, &err);
    if (rc < 0) {
        printf("FAIL pass: %s\n", err.msg);
        exit(1);
    }
    return rc;
}

static double distance(const float *a, const float *b, size_t n)
{
    double d = 0, s = 0;

    for (size_t i = 0; i < n; i++) {
        d += ((double)a[i] - (double)b[i]) * ((double)a[i] - (double)b[i]);
        s += (double)b[i] * (double)b[i];
    }
    return sqrt(d / s);
}

/* Steps: how many tokens of each sequence, and who wants logits. */
static const int steps[][SEQS] = {
    {1, 40, 3, 0, 129, 0}, {1, 1, 17, 64, 1, 0}, {1, 1, 1, 1, 1, 7},   {1, 1, 1, 1, 1, 1},
    {1, 1, 1, 1, 1, 1},    {1, 0, 1, 0, 1, 0},   {0, 0, 0, 200, 0, 0}, {1, 1, 1, 1, 1, 1},
};

static void check_model(const struct made_model *made, double limit)
{
    struct bt_model_file *file;
    struct bt_err err = {0};
    struct side cpu, gpu;
    int n_vocab = made->vocab;
    double worst = 0;

    if (made_model_open(made, &file, &err) < 0) {
        printf("FAIL made model: %s\n", err.msg);
        exit(1);
    }
    side_init(&cpu, file, false);
    side_init(&gpu, file, true);
    for (size_t i = 0; i < BT_ARRAY_LEN(steps); i++) {
        int32_t ids[512];
        bool want[SEQS];
        size_t n = 0, outputs = 0;

        for (int q = 0; q < SEQS; q++) {
            for (int k = 0; k < steps[i][q]; k++) {
                ids[n++] = (int32_t)(rnd() % (uint32_t)n_vocab);
            }
            want[q] = !(i == 1 && q == 3);
            outputs += steps[i][q] > 0 && want[q];
        }
        side_pass(&cpu, ids, steps[i], want);
        side_pass(&gpu, ids, steps[i], want);
        for (size_t o = 0; o < outputs; o++) {
            double d = distance(gpu.logits + o * (size_t)n_vocab, cpu.logits + o * (size_t)n_vocab,
                                (size_t)n_vocab);

            worst = d == d ? fmax(worst, d) : INFINITY;
        }
        check(worst < limit, "%s %s d=%d step %zu: logits %.2e from the CPU's", made->arch,
              made->dtype, made->head_dim, i, worst);
    }
    printf("model %s %s, heads of %d: logits at most %.2e from the CPU's\n", made->arch,
           made->dtype, made->head_dim, worst);
    side_free(&cpu);
    side_free(&gpu);
    bt_model_close(file);
}

void check_models(bool quick)
{
    struct made_model models[] = {
        {"llama", "BF16", 3, 512, 8, 2, 64, 1376, 3000, 1024, false, false},
        {"qwen2", "BF16", 2, 256, 4, 1, 64, 704, 1002, 1024, true, false},
        {"qwen3", "BF16", 2, 384, 4, 2, 128, 1024, 1536, 1024, false, false},
        {"llama", "F16", 2, 256, 8, 8, 64, 512, 1000, 1024, false, false},
        {"qwen3", "F32", 2, 256, 2, 2, 128, 512, 1000, 1024, true, false},
    };

    for (size_t i = 0; i < BT_ARRAY_LEN(models); i += quick ? 2 : 1) {
        check_model(&models[i],
                    models[i].dtype[0] == 'F' && models[i].dtype[1] == '1' ? 4e-3 : 3e-2);
    }
}
