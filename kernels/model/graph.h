/* The vocabulary of the architecture files: one short call for each step of a block, arguments
 * filled from the state of the forward pass. On the CPU a step runs as several ops of the table
 * (kernels/core/ops.h), on a device as few fused kernels (kernels/core/device.h). Widths in
 * comments use the letters of kernels/README.md. */
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

void kn_f_embed(struct kn_fwd *f); /* x [T, E] */
/* From x: norm, projection with its biases, norms of each head of q and k where the layer has them,
 * rotary embedding; K and V go to their pages, then the batch's owner is told. */
void kn_f_qkv(struct kn_fwd *f, int il); /* q [T, H, D] in rows of qkv */
/* In the last layer: only rows that want logits stay in x and q. */
void kn_f_keep_wanted(struct kn_fwd *f, int il);
void kn_f_attention(struct kn_fwd *f, int il); /* h [T, HD] */
void kn_f_attn_out(struct kn_fwd *f, int il);  /* x [T, E] += o h */
/* The feed-forward half of a block: x += down(silu(gate) * up). */
void kn_f_ffn(struct kn_fwd *f, int il);
/* Final norm and output projection of the rows left. */
void kn_f_logits(struct kn_fwd *f);

#endif
