/* The device's sampler against the plain C one: the same ids for the same arguments. */
#include "tests/gpu/ops_check.h"

#include "common/base/buf.h"
#include "kernels/model/sampler.h"

#include <math.h>
#include <stdlib.h>

#define ROWS 48

static void make_logits(float *x, int n, int kind)
{
    for (int i = 0; i < n; i++) {
        float r = rnd_float();

        switch (kind % 7) {
        case 0: /* like a model's */
            x[i] = r * 3 + (rnd() % 100 == 0 ? 8 : 0);
            break;
        case 1: /* few values, many ties */
            x[i] = (float)(int)(r * 4);
            break;
        case 2: /* one far ahead */
            x[i] = i == n / 3 ? 40 : r;
            break;
        case 3: /* broken ones among them */
            x[i] = rnd() % 50 == 0 ? NAN : rnd() % 50 == 0 ? -INFINITY : r * 5;
            break;
        case 4: /* flat, with a few far from the rest: too many for one bucket */
            x[i] = r * 0.03f + (rnd() % 200 == 0 ? rnd_float() : 0);
            break;
        case 5: /* flatter than the steps of a float allow */
            x[i] = 30 + r * 1e-4f + (i == n / 2 ? 3 : 0);
            break;
        default:
            x[i] = r * 20;
        }
    }
}

static void make_params(struct wire_sampling *p, struct kn_cuda_draw *d, int i)
{
    static const float temps[] = {0, 1, 0.7f, 1.5f, 0.01f}, tops[] = {1, 0.9f, 0.5f, 0, 0.999f};
    static const int ks[] = {0, 1, 40, 5, 100000};
    static const float mins[] = {0, 0.05f, 0.5f, 1};

    wire_sampling_defaults(p);
    p->temperature = temps[i % 5];
    p->top_p = tops[rnd() % 5];
    p->top_k = ks[rnd() % 5];
    p->min_p = mins[rnd() % 4];
    p->seed = (uint64_t)rnd() << 32 | rnd();
    p->choice = rnd() % 3;
    *d = (struct kn_cuda_draw){.temperature = p->temperature,
                               .top_p = p->top_p,
                               .top_k = p->top_k,
                               .min_p = p->min_p,
                               .seed = p->seed,
                               .choice = p->choice,
                               .position = rnd() % 1000};
}

static bool any(const float *x, int n)
{
    for (int i = 0; i < n; i++) {
        if (x[i] > -INFINITY) {
            return true;
        }
    }
    return false;
}

static void check_round(int n_vocab, struct kn_sampler *s, int round)
{
    size_t stride = (size_t)n_vocab;
    float *logits = malloc(ROWS * stride * sizeof(float));
    struct wire_sampling p[ROWS];
    struct kn_cuda_draw d[ROWS];
    int32_t got[ROWS], *answer = calloc(1000, sizeof(*answer)), *out;
    void *dev_logits, *dev_draws;
    struct kn_cuda_sample_args a = {.stride = stride, .n_vocab = n_vocab};
    int n = round % 2 ? 16 : ROWS; /* few rows and many go different ways */

    for (int r = 0; r < ROWS; r++) {
        make_logits(logits + (size_t)r * stride, n_vocab, r + round);
        make_params(&p[r], &d[r], r);
    }
    d[7].skip = 1;
    a.logits = dev_logits = to_device(logits, ROWS * stride * sizeof(float));
    a.draws = dev_draws = to_device(d, sizeof(d));
    out = to_device(got, sizeof(got));
    for (int r = 0; r < ROWS; r += n) {
        a.n = n;
        a.out = out + r;
        must(kn_cuda_sample(&a, NULL), "sample");
        a.logits += (size_t)n * stride;
        a.draws += n;
    }
    must((int)cudaDeviceSynchronize(), "sample");
    must((int)cudaMemcpy(got, out, sizeof(got), cudaMemcpyDeviceToHost), "copy");
    for (int r = 0; r < ROWS; r++) {
        struct kn_token want;
        struct kn_sample_args w = {.params = &p[r],
                                   .logits = logits + (size_t)r * stride,
                                   .answer = answer,
                                   .n_answer = d[r].position};

        kn_sample(s, &w, &want);
        if (d[r].skip || !any(w.logits, n_vocab)) {
            want.id = -1; /* the host's to draw */
        }
        check(got[r] == want.id,
              "sample V=%d row %d (temperature %g top_k %d top_p %g min_p %g): %d, not %d", n_vocab,
              r, (double)p[r].temperature, p[r].top_k, (double)p[r].top_p, (double)p[r].min_p,
              got[r], want.id);
    }
    cudaFree(dev_logits);
    cudaFree(dev_draws);
    cudaFree(out);
    free(logits);
    free(answer);
}

void check_sampling(bool quick)
{
    static const int sizes[] = {1, 31, 1000, 32001, 128256};
    struct bt_err err;

    for (size_t i = 0; i < BT_ARRAY_LEN(sizes); i++) {
        struct kn_sampler *s;

        must(kn_sampler_create(sizes[i], &s, &err), "sampler");
        for (int round = 0; round < (quick ? 2 : 8); round++) {
            check_round(sizes[i], s, round);
        }
        kn_sampler_destroy(s);
    }
}
