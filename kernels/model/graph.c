/* The calls of kernels/model/graph.h. Thread: the engine's. */
#include "kernels/model/graph.h"

#include <math.h>

/* Rows of x and h are as wide as what they hold; nothing pads. */
static void embed(struct kn_fwd *f)
{
    float *out = f->x;
    struct kn_embed_args a = {.table = f->w->embed,
                              .ids = f->b->ids,
                              .n_rows = f->n_rows,
                              .out = out,
                              .out_stride = (size_t)f->c->d_model};

    f->ops->embed(f->stream, &a);
    kn_tap(f, out, f->c->d_model, "embed", -1);
}

void kn_f_embed(struct kn_fwd *f)
{
    if (f->device) {
        f->device_ops->embed(f->device, f->w->embed_data);
    } else {
        embed(f);
    }
}

static void norm(struct kn_fwd *f, const float *x, const float *w, float *out)
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

/* Norm of each head inside rows of qkv. */
static void head_norm(struct kn_fwd *f, float *x, int n_heads, const float *w)
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

static void rope(struct kn_fwd *f, float *x, int n_heads)
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

/* Writes k and v of layer il to the pages, then tells the batch's owner. */
static void kv_write(struct kn_fwd *f, int il)
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

void kn_f_qkv(struct kn_fwd *f, int il)
{
    const struct kn_layer *l = &f->w->layers[il];
    struct kn_device_qkv a = {
        .layer = il, .norm = l->attn_norm, .w = &l->qkv, .q_norm = l->q_norm, .k_norm = l->k_norm};

    if (f->device) {
        f->device_ops->qkv(f->device, &a);
        return;
    }
    norm(f, f->x, l->attn_norm, f->h);       /* h   [T, E] */
    matmul(f, f->h, &l->qkv, false, f->qkv); /* qkv [T, HD + 2 KD] */
    if (l->q_norm) {
        head_norm(f, kn_f_q(f), f->c->n_heads, l->q_norm);    /* q [T, H, D] */
        head_norm(f, kn_f_k(f), f->c->n_kv_heads, l->k_norm); /* k [T, Hkv, D] */
    }
    rope(f, kn_f_q(f), f->c->n_heads + f->c->n_kv_heads); /* q [T, H, D], k [T, Hkv, D] beside it */
    kv_write(f, il);
}

static void keep_wanted(struct kn_fwd *f)
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

    if (f->n_wanted == f->n_rows) {
        return;
    }
    f->ops->gather(f->stream, &x);
    f->ops->gather(f->stream, &q);
    f->n_rows = f->n_seqs = f->n_wanted;
    f->seqs = f->wanted_seqs;
}

void kn_f_keep_wanted(struct kn_fwd *f, int il)
{
    if (il != f->c->n_layers - 1) {
        return;
    }
    if (f->device) {
        f->device_ops->keep_wanted(f->device);
    } else {
        keep_wanted(f);
    }
}

static void attention(struct kn_fwd *f, int il)
{
    float *out = f->h;
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

    if (f->b->layer_wait) {
        f->b->layer_wait(f->b->layer_wait_arg, il);
    }
    f->ops->attention(f->stream, &a);
    kn_tap(f, out, kn_f_q_width(f), "attn_heads", il);
}

void kn_f_attention(struct kn_fwd *f, int il)
{
    if (f->device) {
        f->device_ops->attention(f->device, il);
    } else {
        attention(f, il);
    }
}

void kn_f_attn_out(struct kn_fwd *f, int il)
{
    const struct kn_layer *l = &f->w->layers[il];

    if (f->device) {
        f->device_ops->attn_out(f->device, &l->o);
        return;
    }
    matmul(f, f->h, &l->o, true, f->x); /* x [T, E] */
    kn_tap(f, f->x, f->c->d_model, "attn_out", il);
}

static void swiglu(struct kn_fwd *f, const float *x, float *out)
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
    struct kn_device_ffn a = {.norm = l->ffn_norm, .gu = &l->gu, .down = &l->down};

    if (f->device) {
        f->device_ops->ffn(f->device, &a);
        return;
    }
    norm(f, f->x, l->ffn_norm, f->h);        /* h   [T, E] */
    matmul(f, f->h, &l->gu, false, f->gu);   /* gu  [T, 2F] */
    swiglu(f, f->gu, f->act);                /* act [T, F] */
    matmul(f, f->act, &l->down, true, f->x); /* x   [T, E] */
    kn_tap(f, f->x, f->c->d_model, "ffn_out", il);
}

void kn_f_logits(struct kn_fwd *f)
{
    if (f->device) {
        f->device_ops->logits(f->device, f->w->out_norm, &f->w->output);
        return;
    }
    norm(f, f->x, f->w->out_norm, f->h); /* h      [T, E] */
    kn_tap(f, f->h, f->c->d_model, "out_norm", -1);
    matmul(f, f->h, &f->w->output, false, f->b->logits); /* logits [T, V] */
}
