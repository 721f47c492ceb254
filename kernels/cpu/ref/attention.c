/* Paged KV: writing and causal attention in plain C.
 *
 * Softmax in two passes over the positions in ascending order: all scores and their maximum, then
 * the weighted sum. No tile, page or batch enters the order. */
#include "kernels/core/half.h"
#include "kernels/cpu/kv.h"
#include "kernels/cpu/ref/ref.h"

#include <math.h>

void kn_ref_kv_write(struct kn_stream *stream, const struct kn_kv_write_args *a)
{
    const struct kv_layout *l = a->layout;
    size_t d = (size_t)l->head_dim;

    for (int s = 0; s < a->n_seqs; s++) {
        const struct kn_seq_rows *seq = &a->seqs[s];

        for (int i = 0; i < seq->n_rows; i++) {
            size_t row = (size_t)(seq->row0 + i) * a->stride;

            for (int h = 0; h < l->n_kv_heads; h++) {
                struct kn_kv_at at = kn_kv_at(a->kv, l, a->layer, seq->pages, seq->pos + i, h);
                const float *k = a->k + row + (size_t)h * d, *v = a->v + row + (size_t)h * d;

                for (size_t c = 0; c < d; c++) {
                    if (l->dtype == KV_DTYPE_F16) {
                        ((uint16_t *)at.k)[c] = kn_f32_to_f16(k[c]);
                        ((uint16_t *)at.v)[c] = kn_f32_to_f16(v[c]);
                    } else {
                        ((float *)at.k)[c] = k[c];
                        ((float *)at.v)[c] = v[c];
                    }
                }
            }
        }
    }
}

static float kv_element(const struct kv_layout *l, const void *p, int i)
{
    return l->dtype == KV_DTYPE_F16 ? kn_f16_to_f32(((const uint16_t *)p)[i])
                                    : ((const float *)p)[i];
}

static float score(const struct kn_attention_args *a,
                   const struct kn_seq_rows *seq,
                   const float *q,
                   int pos,
                   int kv_head)
{
    struct kn_kv_at at = kn_kv_at((void *)a->kv, a->layout, a->layer, seq->pages, pos, kv_head);
    float s = 0;

    for (int c = 0; c < a->layout->head_dim; c++) {
        s += q[c] * kv_element(a->layout, at.k, c);
    }
    return s * a->scale;
}

/* One query head at absolute position `pos`. Scores are computed twice, so that none need keeping.
 */
static void attend(const struct kn_attention_args *a,
                   const struct kn_seq_rows *seq,
                   int pos,
                   int head,
                   const float *q,
                   float *out)
{
    const struct kv_layout *l = a->layout;
    int kv_head = head / (a->n_heads / l->n_kv_heads);
    float max = -INFINITY, sum = 0;

    memset(out, 0, (size_t)l->head_dim * sizeof(*out));
    for (int j = 0; j <= pos; j++) {
        float s = score(a, seq, q, j, kv_head);

        max = s > max ? s : max;
    }
    for (int j = 0; j <= pos; j++) {
        float p = expf(score(a, seq, q, j, kv_head) - max);
        struct kn_kv_at at = kn_kv_at((void *)a->kv, l, a->layer, seq->pages, j, kv_head);

        sum += p;
        for (int c = 0; c < l->head_dim; c++) {
            out[c] += p * kv_element(l, at.v, c);
        }
    }
    for (int c = 0; c < l->head_dim; c++) {
        out[c] /= sum;
    }
}

void kn_ref_attention(struct kn_stream *stream, const struct kn_attention_args *a)
{
    size_t d = (size_t)a->layout->head_dim;

    for (int s = 0; s < a->n_seqs; s++) {
        const struct kn_seq_rows *seq = &a->seqs[s];

        for (int i = 0; i < seq->n_rows; i++) {
            const float *q = a->q + (size_t)(seq->row0 + i) * a->q_stride;
            float *out = a->out + (size_t)(seq->row0 + i) * a->out_stride;

            for (int h = 0; h < a->n_heads; h++) {
                attend(a, seq, seq->pos + i, h, q + (size_t)h * d, out + (size_t)h * d);
            }
        }
    }
}
