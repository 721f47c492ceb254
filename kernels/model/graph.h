/* The vocabulary of the architecture files: one short call per op, arguments filled from the state
 * of the forward pass. Widths in comments use the letters of kernels/README.md. */
#ifndef KN_MODEL_GRAPH_H
#define KN_MODEL_GRAPH_H

#include "kernels/model/model_int.h"

static inline int kn_f_q_width(const struct kn_fwd *f)
{
    return f->c->n_heads * f->c->head_dim;
}

static inline int kn_f_kv_width(const struct kn_fwd *f)
{
    return f->c->n_kv_heads * f->c->head_dim;
}

static inline int kn_f_qkv_width(const struct kn_fwd *f)
{
    return kn_f_q_width(f) + 2 * kn_f_kv_width(f);
}

/* q, k and v of the current layer, side by side in rows of f->qkv. */
static inline float *kn_f_q(const struct kn_fwd *f)
{
    return f->qkv;
}
static inline float *kn_f_k(const struct kn_fwd *f)
{
    return f->qkv + kn_f_q_width(f);
}
static inline float *kn_f_v(const struct kn_fwd *f)
{
    return f->qkv + kn_f_q_width(f) + kn_f_kv_width(f);
}

#ifdef NDEBUG
#define kn_tap(f, p, width, name, il) ((void)0)
#else
#define kn_tap(f, p, width, name, il)                                                              \
    ((f)->tap ? (f)->tap((f)->tap_arg, name, il, p, (f)->n_rows, width) : (void)0)
#endif

void kn_f_embed(struct kn_fwd *f, float *out);                                /* out [T, E] */
void kn_f_norm(struct kn_fwd *f, const float *x, const float *w, float *out); /* out [T, E] */
/* Norm of each head inside rows of qkv. */
void kn_f_head_norm(struct kn_fwd *f, float *x, int n_heads, const float *w);
void kn_f_matmul(struct kn_fwd *f, const float *x, const struct kn_weight *w, float *out);
void kn_f_matmul_add(struct kn_fwd *f, const float *x, const struct kn_weight *w, float *out);
void kn_f_rope(struct kn_fwd *f, float *x, int n_heads);
/* Writes k and v of layer il to the pages, then tells the batch's owner. */
void kn_f_kv_write(struct kn_fwd *f, int il);
/* In the last layer: only rows that want logits stay in x and q. */
void kn_f_keep_wanted(struct kn_fwd *f, int il);
void kn_f_attention(struct kn_fwd *f, int il, float *out);      /* out [T, HD] */
void kn_f_swiglu(struct kn_fwd *f, const float *x, float *out); /* x [T, 2F] -> out [T, F] */

/* The feed-forward half of a block that the architectures share: x += down(silu(gate) * up). */
void kn_f_ffn(struct kn_fwd *f, int il);
/* Final norm and output projection of the rows left. */
void kn_f_logits(struct kn_fwd *f);

#endif
