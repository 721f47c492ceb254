/* Attention kernels against plain double precision over odd shapes, and bit for bit against
 * themselves over batch, chunks, page sizes and kernels. Needs a card; nothing else. */
#include "tests/gpu/attn_rig.h"

#include <cuda_runtime_api.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int n_failed, n_run;

static void report(bool ok, const char *what, double figure)
{
    n_run++;
    n_failed += !ok;
    printf("%s %s %.2e\n", ok ? "ok    " : "FAILED", what, figure);
}

/* One query head of one row, in double. */
static void reference(const struct rig *r, int seq, int row, int head, double *out)
{
    const struct kn_cuda_attn_shape *s = &r->shape;
    int d = s->head_dim, kv_head = head / (s->n_heads / s->n_kv_heads);
    int rows = r->row_start[seq + 1] - r->row_start[seq];
    int pos = r->ctx[seq] - rows + row;
    const uint16_t *q = r->q + (size_t)(r->row_start[seq] + row) * r->row_elems + head * d;
    double *score = malloc((size_t)(pos + 1) * sizeof(*score)), max = -INFINITY, sum = 0;
    float qf[128];

    for (int i = 0; i < d; i++) {
        qf[i] = rig_float(r, q[i]);
        out[i] = 0;
    }
    for (int j = 0; j <= pos; j++) {
        const uint16_t *k = r->kv + rig_at(r, seq, j, kv_head, 0);
        double x = 0;

        for (int i = 0; i < d; i++) {
            x += (double)qf[i] * (double)rig_float(r, k[i]);
        }
        score[j] = x * (double)s->scale;
        max = score[j] > max ? score[j] : max;
    }
    for (int j = 0; j <= pos; j++) {
        const uint16_t *v = r->kv + rig_at(r, seq, j, kv_head, 1);
        double w = exp(score[j] - max);

        sum += w;
        for (int i = 0; i < d; i++) {
            out[i] += w * (double)rig_float(r, v[i]);
        }
    }
    for (int i = 0; i < d; i++) {
        out[i] /= sum;
    }
    free(score);
}

/* Largest error of a row over the size of the row, over a sample of rows with first and last. */
static double worst_error(const struct rig *r)
{
    double worst = 0, ref[128];

    for (int q = 0; q < r->n_seqs; q++) {
        int rows = r->row_start[q + 1] - r->row_start[q];
        int step = rows > 40 ? rows / 20 : 1;

        for (int row = 0; row < rows && r->ctx[q] > 0; row += row + step < rows ? step : 1) {
            for (int h = 0; h < r->shape.n_heads; h++) {
                const uint16_t *out =
                    r->out + (size_t)(r->row_start[q] + row) * r->row_elems + h * r->shape.head_dim;
                double diff = 0, size = 0;

                reference(r, q, row, h, ref);
                for (int i = 0; i < r->shape.head_dim; i++) {
                    double x = (double)rig_float(r, out[i]);

                    diff += (x - ref[i]) * (x - ref[i]);
                    size += ref[i] * ref[i];
                }
                diff = sqrt(diff / size);
                worst = diff <= worst ? worst : diff; /* NaN becomes worst */
                if (isnan(diff)) {
                    return INFINITY;
                }
            }
        }
    }
    return worst;
}

static struct kn_cuda_attn_shape shape_of(
    enum kn_cuda_dtype dtype, int kv_heads, int group, int d, int page, int sms, bool invariant)
{
    return (struct kn_cuda_attn_shape){.dtype = dtype,
                                       .n_heads = kv_heads * group,
                                       .n_kv_heads = kv_heads,
                                       .head_dim = d,
                                       .page_tokens = page,
                                       .scale = 1.0f / sqrtf((float)d),
                                       .n_sms = sms,
                                       .invariant = invariant};
}

static const int decode_ctx[] = {1,   15,   16,   17,   63,   64,   65,   127, 128,
                                 129, 255,  256,  257,  0,    511,  512,  513, 1023,
                                 1,   1024, 1025, 1537, 2047, 2048, 2049, 4100};
#define N_DECODE ((int)(sizeof(decode_ctx) / sizeof(decode_ctx[0])))

/* Scores that differ little within some tens of positions and by hundreds from there to the next,
 * up for some rows, down or not at all for others: maxima have to be followed. */
static void make_steps(struct rig *r)
{
    static const float level[] = {0, -90, 3, 25, 24, 400, -400, 60, 410, 411};
    static const float slope[] = {8, -8, 0.25f, 0};
    const float unit = sqrtf((float)r->shape.head_dim) / 8;

    for (int i = 0; i < r->n_rows * r->shape.n_heads; i++) {
        int row = i / r->shape.n_heads, head = i % r->shape.n_heads;

        r->q[(size_t)row * r->row_elems + (size_t)(head * r->shape.head_dim)] =
            rig_bits(r->shape.dtype, slope[(row + head) % 4]);
    }
    for (int seq = 0; seq < r->n_seqs; seq++) {
        for (int pos = 0; pos < r->ctx[seq]; pos++) {
            for (int h = 0; h < r->shape.n_kv_heads; h++) {
                r->kv[rig_at(r, seq, pos, h, 0)] =
                    rig_bits(r->shape.dtype, unit * level[pos / 50 % 10]);
            }
        }
    }
    rig_upload(r);
}

static void check_case(const struct kn_cuda_attn_shape *s,
                       int n,
                       const int *rows,
                       const int *ctx,
                       bool steps,
                       const char *what)
{
    struct rig r;
    char name[160];
    double error;

    rig_init(&r, s, n, rows, ctx, 1, true, 17);
    if (steps) {
        make_steps(&r);
    }
    rig_run(&r, !rows);
    error = worst_error(&r);
    snprintf(name, sizeof(name), "%s %s kv heads %d group %d width %d page %d sms %d%s", what,
             s->dtype == KN_CUDA_BF16 ? "bf16" : "f16", s->n_kv_heads, s->n_heads / s->n_kv_heads,
             s->head_dim, s->page_tokens, s->n_sms, s->invariant ? " invariant" : "");
    report(error < (s->dtype == KN_CUDA_BF16 ? 1e-2 : 1.5e-3), name, error);
    rig_free(&r);
}

static void check_shapes(int n_sms, bool invariant)
{
    static const int rows[] = {1, 7, 33, 129, 64, 1, 200, 300, 16, 0, 130, 1};
    static const int ctx[] = {1, 7, 160, 129, 1000, 700, 200, 811, 2049, 0, 256, 4097};
    static const struct {
        int kv_heads, group, d, page;
    } shape[] = {{2, 4, 128, 16}, {1, 8, 128, 64},  {3, 1, 128, 8},  {1, 4, 128, 256},
                 {2, 4, 64, 16},  {1, 8, 64, 128},  {2, 1, 64, 32},  {1, 7, 128, 32},
                 {1, 3, 64, 64},  {1, 16, 128, 64}, {1, 20, 64, 16}, {1, 32, 128, 16}};

    for (size_t i = 0; i < sizeof(shape) / sizeof(shape[0]); i++) {
        for (int t = 0; t < 2; t++) {
            struct kn_cuda_attn_shape s =
                shape_of(t ? KN_CUDA_F16 : KN_CUDA_BF16, shape[i].kv_heads, shape[i].group,
                         shape[i].d, shape[i].page, i % 3 == 2 ? 3 : n_sms, invariant);

            check_case(&s, N_DECODE, NULL, decode_ctx, false, "decode");
            check_case(&s, 12, rows, ctx, false, "prefill");
            check_case(&s, 1, &rows[4], &ctx[4], false, "prefill alone");
            if (i == 0 || i == 5) {
                check_case(&s, N_DECODE, NULL, decode_ctx, true, "decode, scores in steps,");
                check_case(&s, 12, rows, ctx, true, "prefill, scores in steps,");
            }
        }
    }
}

/* Rows of one sequence again as decode steps, chunks and parts of a batch: same bits. */
static void check_invariance(enum kn_cuda_dtype dtype, int group, int d, int n_sms)
{
    enum { N = 1500, CHUNKS = 5 };
    static const int chunk_end[CHUNKS] = {1, 130, 517, 1499, N};
    static const int pages[] = {16, 64, 256};
    struct kn_cuda_attn_shape s = shape_of(dtype, 2, group, d, 64, n_sms, true);
    int one = N;
    struct rig whole;
    char name[128];

    rig_init(&whole, &s, 1, &one, &one, 1, true, 5);
    rig_run(&whole, false);
    for (int p = 0; p < 3; p++) {
        long differ = 0;

        s.page_tokens = pages[p];
        for (int i = 0; i < CHUNKS; i++) {
            int begin = i ? chunk_end[i - 1] : 0, n = chunk_end[i] - begin;
            int rows[3] = {50, n, 9}, ctx[3] = {300, chunk_end[i], 2000};
            struct rig r;

            s.n_sms = p == 2 ? 7 : n_sms;
            rig_init(&r, &s, 3, rows, ctx, 1, true, (uint64_t)(100 + i));
            rig_copy_kv(&r, 1, &whole, 0, ctx[1]);
            memcpy(r.q + 50 * r.row_elems, whole.q + (size_t)begin * r.row_elems,
                   (size_t)n * r.row_elems * 2);
            rig_upload(&r);
            rig_run(&r, false);
            for (size_t e = 0; e < (size_t)n * r.row_elems; e++) {
                differ += r.out[50 * r.row_elems + e] != whole.out[(size_t)begin * r.row_elems + e];
            }
            rig_free(&r);
        }
        snprintf(name, sizeof(name), "same bits in chunks: group %d width %d page %d", group, d,
                 pages[p]);
        report(differ == 0, name, (double)differ);
    }
    for (int p = 0; p < 3; p++) {
        enum { STEPS = 64 };
        int ctx[STEPS];
        long differ = 0;
        struct rig r;

        for (int i = 0; i < STEPS; i++) {
            ctx[i] = i == STEPS - 1 ? N : 1 + i * N / STEPS;
        }
        s.page_tokens = pages[p];
        s.n_sms = p == 2 ? 7 : n_sms;
        rig_init(&r, &s, p == 1 ? 1 : STEPS, NULL, p == 1 ? &ctx[STEPS - 1] : ctx, 1, true, 77);
        for (int i = 0; i < r.n_seqs; i++) {
            rig_copy_kv(&r, i, &whole, 0, r.ctx[i]);
            memcpy(r.q + (size_t)i * r.row_elems, whole.q + (size_t)(r.ctx[i] - 1) * r.row_elems,
                   r.row_elems * 2);
        }
        rig_upload(&r);
        rig_run(&r, true);
        for (int i = 0; i < r.n_seqs; i++) {
            for (size_t e = 0; e < r.row_elems; e++) {
                differ += r.out[(size_t)i * r.row_elems + e] !=
                          whole.out[(size_t)(r.ctx[i] - 1) * r.row_elems + e];
            }
        }
        rig_free(&r);
        snprintf(name, sizeof(name), "same bits in %d decode steps: group %d width %d page %d",
                 p == 1 ? 1 : STEPS, group, d, pages[p]);
        report(differ == 0, name, (double)differ);
    }
    rig_free(&whole);
}

int main(int argc, char **argv)
{
    struct cudaDeviceProp prop;
    bool quick = argc > 1 && strcmp(argv[1], "--quick") == 0;

    if (cudaGetDeviceProperties(&prop, 0) != cudaSuccess || prop.major != 9) {
        fprintf(stderr, "no Hopper card here\n");
        return 77;
    }
    for (int invariant = 0; invariant < 2; invariant++) {
        check_shapes(prop.multiProcessorCount, invariant != 0);
        if (quick) {
            break;
        }
    }
    for (int t = 0; t < 2; t++) {
        check_invariance(t ? KN_CUDA_F16 : KN_CUDA_BF16, 4, 128, prop.multiProcessorCount);
        check_invariance(t ? KN_CUDA_F16 : KN_CUDA_BF16, 8, 64, prop.multiProcessorCount);
        check_invariance(t ? KN_CUDA_F16 : KN_CUDA_BF16, 1, 128, prop.multiProcessorCount);
    }
    printf("%d of %d checks failed\n", n_failed, n_run);
    return n_failed ? 1 : 0;
}
