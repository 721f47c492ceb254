/* The calls of kernels/model/graph.h. Thread: the engine's. */
#include "kernels/model/graph.h"

#include <math.h>

/* Rows of x and h are as wide as what they hold; nothing pads. */
void kn_f_embed(struct kn_fwd *f, float *out)
{
    struct kn_embed_args a = {.table = f->w->embed,
                              .ids = f->b->ids,
                              .n_rows = f->n_rows,
                              .out = out,
                              .out_stride = (size_t)f->c->d_model};

    f->ops->embed(f->stream, &a);
    kn_tap(f, out, f->c->d_model, "embed", -1);
}

void kn_f_norm(struct kn_fwd *f, const float *x, const float *w, float *out)
{
    size_t e = (size_t)f->c->d_model;
    struct kn_rmsnorm_args a = {.x = x,
                                .x_stride = e,
                                .weight = w,
                                .n_rows = f->n_rows,
                                .n_heads = 1,
                                .width = f->c->d_model,
                                .eps = f->c->rms_eps,
                                .out = out,
                                .out_stride = e};

    f->ops->rmsnorm(f->stream, &a);
}

void kn_f_head_norm(struct kn_fwd *f, float *x, int n_heads, const float *w)
{
    size_t stride = (size_t)kn_f_qkv_width(f);
    struct kn_rmsnorm_args a = {.x = x,
                                .x_stride = stride,
                                .weight = w,
                                .n_rows = f->n_rows,
                                .n_heads = n_heads,
                                .width = f->c->head_dim,
                                .eps = f->c->rms_eps,
                                .out = x,
                                .out_stride = stride};

    f->ops->rmsnorm(f->stream, &a);
}

static void
matmul(struct kn_fwd *f, const float *x, const struct kn_weight *w, bool add, float *out)
{
    struct kn_matmul_args a = {.x = x,
                               .x_stride = (size_t)w->k,
                               .w = w,
                               .n_rows = f->n_rows,
                               .add = add,
                               .out = out,
                               .out_stride = (size_t)w->n};

    f->ops->matmul(f->stream, &a);
}

void kn_f_matmul(struct kn_fwd *f, const float *x, const struct kn_weight *w, float *out)
{
    matmul(f, x, w, false, out);
}

void kn_f_matmul_add(struct kn_fwd *f, const float *x, const struct kn_weight *w, float *out)
{
    matmul(f, x, w, true, out);
}

void kn_f_rope(struct kn_fwd *f, float *x, int n_heads)
{
    struct kn_rope_args a = {.x = x,
                             .x_stride = (size_t)kn_f_qkv_width(f),
                             .n_rows = f->n_rows,
                             .n_heads = n_heads,
                             .head_dim = f->c->head_dim,
                             .interleaved = f->c->rope_interleaved,
                             .cos_sin = f->cos_sin};

    f->ops->rope(f->stream, &a);
}

void kn_f_kv_write(struct kn_fwd *f, int il)
{
    struct kn_kv_write_args a = {.k = kn_f_k(f),
                                 .v = kn_f_v(f),
                                 .stride = (size_t)kn_f_qkv_width(f),
                                 .n_seqs = f->n_seqs,
                                 .seqs = f->seqs,
                                 .kv = f->b->kv,
                                 .layout = f->b->layout,
                                 .layer = il};

    f->ops->kv_write(f->stream, &a);
    if (f->b->layer_done) {
        f->b->layer_done(f->b->layer_done_arg, il);
    }
}

void kn_f_keep_wanted(struct kn_fwd *f, int il)
{
    size_t e = (size_t)f->c->d_model, qkv = (size_t)kn_f_qkv_width(f);
    struct kn_gather_args x = {.x = f->x,
                               .x_stride = e,
                               .rows = f->wanted_rows,
                               .n_rows = f->n_wanted,
                               .width = f->c->d_model,
                               .out = f->x,
                               .out_stride = e};
    struct kn_gather_args q = {.x = f->qkv,
                               .x_stride = qkv,
                               .rows = f->wanted_rows,
                               .n_rows = f->n_wanted,
                               .width = kn_f_q_width(f),
                               .out = f->qkv,
                               .out_stride = qkv};

    if (il != f->c->n_layers - 1 || f->n_wanted == f->n_rows) {
        return;
    }
    f->ops->gather(f->stream, &x);
    f->ops->gather(f->stream, &q);
    f->n_rows = f->n_seqs = f->n_wanted;
    f->seqs = f->wanted_seqs;
}

void kn_f_attention(struct kn_fwd *f, int il, float *out)
{
    struct kn_attention_args a = {.q = kn_f_q(f),
                                  .q_stride = (size_t)kn_f_qkv_width(f),
                                  .n_heads = f->c->n_heads,
                                  .scale = 1 / sqrtf((float)f->c->head_dim),
                                  .n_seqs = f->n_seqs,
                                  .seqs = f->seqs,
                                  .kv = f->b->kv,
                                  .layout = f->b->layout,
                                  .layer = il,
                                  .out = out,
                                  .out_stride = (size_t)kn_f_q_width(f)};

    f->ops->attention(f->stream, &a);
    kn_tap(f, out, kn_f_q_width(f), "attn_heads", il);
}

void kn_f_swiglu(struct kn_fwd *f, const float *x, float *out)
{
    struct kn_swiglu_args a = {.x = x,
                               .x_stride = 2 * (size_t)f->c->d_ff,
                               .n_rows = f->n_rows,
                               .width = f->c->d_ff,
                               .out = out,
                               .out_stride = (size_t)f->c->d_ff};

    f->ops->swiglu(f->stream, &a);
}

void kn_f_ffn(struct kn_fwd *f, int il)
{
    const struct kn_layer *l = &f->w->layers[il];

    kn_f_norm(f, f->x, l->ffn_norm, f->h);      /* h   [T, E] */
    kn_f_matmul(f, f->h, &l->gu, f->gu);        /* gu  [T, 2F] */
    kn_f_swiglu(f, f->gu, f->act);              /* act [T, F] */
    kn_f_matmul_add(f, f->act, &l->down, f->x); /* x   [T, E] */
    kn_tap(f, f->x, f->c->d_model, "ffn_out", il);
}

void kn_f_logits(struct kn_fwd *f)
{
    kn_f_norm(f, f->x, f->w->out_norm, f->h); /* h      [T, E] */
    kn_tap(f, f->h, f->c->d_model, "out_norm", -1);
    kn_f_matmul(f, f->h, &f->w->output, f->b->logits); /* logits [T, V] */
}
