/* The vocabulary of the architecture files as launches. Products of few rows go through our own
 * kernel with what follows folded in, the others through cuBLASLt with kernels after it. A launch
 * that fails is remembered; the pass reports it. Thread: the engine's. */
#include "kernels/cuda/module.h"

static void did(struct kn_device *d, const char *what, int rc)
{
    if (rc != 0 && d->error == 0) {
        d->error = rc;
        d->error_what = what;
    }
}

/* What the product is followed by. */
struct product {
    const struct kn_cuda_act *x;
    const struct kn_weight *w;
    enum kn_cuda_stream_out kind;
    void *out;
    size_t out_stride;
    const struct kn_cuda_heads *heads;
};

static int box_index(int rows)
{
    int box = kn_cuda_stream_box(rows), i = 0;

    while (8 << i < box) {
        i++;
    }
    return i;
}

static void few_rows(struct kn_device *d, const struct product *p)
{
    const struct kn_cuda_weight *w = p->w->handle;
    bool pairs = p->kind == KN_STREAM_SWIGLU;
    struct kn_cuda_stream_gemm_args a = {
        .w = pairs ? &w->pairs : &w->map,
        .box = pairs ? w->pair_box : 0,
        .x = &p->x->maps[box_index(d->view->rows)],
        .n = w->n,
        .k = w->k,
        .rows = d->view->rows,
        .kind = p->kind,
        .bias = w->bias,
        .out = p->out,
        .out_stride = p->out_stride,
        .heads = p->heads,
        .warpgroups = 4, /* where there are so many rows */
    };

    did(d, "product of few rows", kn_cuda_stream_gemm(d->dtype, &a, d->stream));
}

static struct kn_gemm_args library_args(const struct kn_device *d, const struct product *p)
{
    const struct kn_cuda_weight *w = p->w->handle;

    return (struct kn_gemm_args){.x = p->x->p,
                                 .w = w->data,
                                 .rows = d->view->rows,
                                 .room = d->view == &d->wanted ? d->cfg.max_outputs
                                                               : d->cfg.max_batch_tokens,
                                 .n = w->n,
                                 .k = w->k,
                                 .add = p->kind == KN_STREAM_ADD,
                                 .f32 = p->kind == KN_STREAM_F32,
                                 .out = p->kind == KN_STREAM_SWIGLU ? d->gu : p->out};
}

/* Gate and up alone: tune_pairs in pass.c. */
static bool beaten(const struct kn_device *d, const struct product *p)
{
    struct kn_gemm_args a = library_args(d, p);

    return p->kind == KN_STREAM_SWIGLU && kn_gemm_beaten(d->gemm, &a);
}

static void many_rows(struct kn_device *d, const struct product *p)
{
    const struct kn_cuda_weight *w = p->w->handle;
    struct kn_gemm_args a = library_args(d, p);

    did(d, "product", kn_gemm_run(d->gemm, &a, d->stream));
    if (p->kind == KN_STREAM_SWIGLU) {
        did(d, "swiglu",
            kn_cuda_swiglu(d->dtype, d->gu, d->view->rows, w->n / 2, p->out, d->stream));
    }
    if (p->kind == KN_STREAM_QKV) {
        did(d, "heads",
            kn_cuda_qkv_finish(d->dtype, p->out, d->view->rows, p->heads, w->bias, d->stream));
    }
}

static void multiply(struct kn_device *d, const struct product *p)
{
    bool folds = p->kind != KN_STREAM_QKV || d->c->head_dim == 64 || d->c->head_dim == 128;

    if ((d->view->rows <= d->stream_rows && folds) || beaten(d, p)) {
        few_rows(d, p);
    } else {
        many_rows(d, p);
    }
}

static void norm(struct kn_device *d, const float *weight)
{
    struct kn_cuda_norm_args a = {.x = d->cur_x,
                                  .weight = weight,
                                  .rows = d->view->rows,
                                  .width = d->c->d_model,
                                  .eps = d->c->rms_eps,
                                  .out = d->h.p};

    did(d, "norm", kn_cuda_norm(d->dtype, &a, d->stream));
}

/* ---- steps of few rows ---- */

bool kn_cuda_v_steps(const struct kn_device *d)
{
    const struct bt_model_config *c = d->c;

    return c->d_model % 64 == 0 && c->d_ff % 64 == 0 && (c->n_heads * c->head_dim) % 64 == 0 &&
           !c->qk_norm && kn_cuda_step_supports(&d->step.heads);
}

size_t kn_cuda_v_flow_bytes(const struct kn_device *d, int rows)
{
    const struct bt_model_config *c = d->c;
    size_t qkv = (size_t)(c->n_heads + 2 * c->n_kv_heads) * (size_t)c->head_dim;
    size_t layer =
        qkv + (size_t)(c->n_heads * c->head_dim) + 2 * (size_t)c->d_model + (size_t)c->d_ff;

    return (size_t)c->n_layers * layer * (size_t)rows * 2;
}

void kn_cuda_v_step_begin(struct kn_device *d)
{
    struct kn_cuda_step_args *s = &d->step;

    s->n_phases = s->attn_first = 0;
    s->rows = d->all.rows;
    s->first = true;
    s->last = false;
    d->flow_used = 0;
}

/* Launches the phases that wait. */
static void step_launch(struct kn_device *d)
{
    struct kn_cuda_step_args *s = &d->step;

    did(d, "step", kn_cuda_step(d->dtype, s, d->stream));
    for (int i = 0; i < s->n_phases; i++) {
        s->attn_first += s->phases[i].w == NULL;
    }
    s->n_phases = 0;
    s->first = false;
}

static void step_add(struct kn_device *d, const struct kn_cuda_step_phase *p)
{
    if (d->step.n_phases == KN_STEP_PHASES) {
        step_launch(d);
    }
    d->step.phases[d->step.n_phases++] = *p;
}

/* Room for what a phase leaves: [rows, width]. */
static void *step_room(struct kn_device *d, int width)
{
    void *p = (char *)d->step.flow + d->flow_used;

    d->flow_used += (size_t)d->view->rows * (size_t)width * 2;
    return p;
}

/* The product of w with x [rows, K], normed first if `norm`. */
static struct kn_cuda_step_phase step_product(const struct kn_weight *weight,
                                              const void *x,
                                              const float *norm,
                                              enum kn_cuda_stream_out kind)
{
    const struct kn_cuda_weight *w = weight->handle;

    return (struct kn_cuda_step_phase){.w = w->data,
                                       .x = x,
                                       .x_stride = w->k,
                                       .norm = norm,
                                       .bias = w->bias,
                                       .n = w->n,
                                       .k = w->k,
                                       .kind = kind};
}

/* Adds a product with w to the residual stream. */
static void step_residual(struct kn_device *d, const struct kn_weight *w, const void *x)
{
    struct kn_cuda_step_phase p = step_product(w, x, NULL, KN_STREAM_ADD);

    p.old = d->cur_x;
    p.out = d->cur_x = step_room(d, d->c->d_model);
    p.out_stride = d->c->d_model;
    step_add(d, &p);
}

static void step_ffn(struct kn_device *d, const struct kn_device_ffn *a)
{
    struct kn_cuda_step_phase p = step_product(a->gu, d->cur_x, a->norm, KN_STREAM_SWIGLU);

    p.out = step_room(d, d->c->d_ff);
    p.out_stride = d->c->d_ff;
    step_add(d, &p);
    step_residual(d, a->down, p.out);
}

static void step_qkv(struct kn_device *d, const struct kn_device_qkv *a)
{
    struct kn_cuda_step_phase p = step_product(a->w, d->cur_x, a->norm, KN_STREAM_QKV);

    p.kv = d->kv + (size_t)a->layer * d->layer_stride;
    p.out = d->cur_qkv = step_room(d, a->w->n);
    p.out_stride = a->w->n;
    step_add(d, &p);
}

static void step_attention(struct kn_device *d, int layer)
{
    int width = d->c->n_heads * d->c->head_dim;
    struct kn_cuda_step_phase p = {.x = d->cur_qkv,
                                   .x_stride = width + 2 * d->c->n_kv_heads * d->c->head_dim,
                                   .kv = d->kv + (size_t)layer * d->layer_stride,
                                   .out = step_room(d, width),
                                   .out_stride = width};

    d->step_att = p.out;
    step_add(d, &p);
}

static void step_logits(struct kn_device *d, const float *norm, const struct kn_weight *output)
{
    struct kn_cuda_step_phase p = step_product(output, d->cur_x, norm, KN_STREAM_F32);

    p.out = d->logits;
    p.out_stride = d->c->n_vocab;
    step_add(d, &p);
    d->step.last = true;
    step_launch(d);
}

void kn_cuda_v_embed(struct kn_device *d, const void *table)
{
    struct kn_cuda_embed_args a = {.table = table,
                                   .ids = d->ids,
                                   .prev = d->drawn,
                                   .rows = d->view->rows,
                                   .width = d->c->d_model,
                                   .out = d->cur_x};

    did(d, "embedding", kn_cuda_embed(d->dtype, &a, d->stream));
}

void kn_cuda_v_qkv(struct kn_device *d, const struct kn_device_qkv *a)
{
    struct kn_cuda_heads heads = {.n_heads = d->c->n_heads,
                                  .n_kv_heads = d->c->n_kv_heads,
                                  .head_dim = d->c->head_dim,
                                  .page_tokens = d->attn.page_tokens,
                                  .page_stride = d->attn.page_stride,
                                  .q_norm = a->q_norm,
                                  .k_norm = a->k_norm,
                                  .eps = d->c->rms_eps,
                                  .interleaved = d->c->rope_interleaved,
                                  .cos_sin = d->cos_sin,
                                  .pos = d->pos,
                                  .page = d->page,
                                  .kv = d->kv + (size_t)a->layer * d->layer_stride};
    struct product p = {.x = &d->h,
                        .w = a->w,
                        .kind = KN_STREAM_QKV,
                        .out = d->cur_qkv,
                        .out_stride = (size_t)a->w->n,
                        .heads = &heads};

    if (d->stepping) {
        step_qkv(d, a);
        return;
    }
    norm(d, a->norm);
    multiply(d, &p);
    kn_cuda_mirror_layer(d, a->layer);
}

void kn_cuda_v_keep_wanted(struct kn_device *d)
{
    size_t qkv = (size_t)(d->c->n_heads + 2 * d->c->n_kv_heads) * (size_t)d->c->head_dim;
    struct kn_cuda_gather_args x = {.x = d->cur_x,
                                    .x_stride = (size_t)d->c->d_model,
                                    .rows = d->wanted_rows,
                                    .n = d->n_wanted,
                                    .width = d->c->d_model,
                                    .out = d->x_wanted,
                                    .out_stride = (size_t)d->c->d_model};
    struct kn_cuda_gather_args q = {.x = d->cur_qkv,
                                    .x_stride = qkv,
                                    .rows = d->wanted_rows,
                                    .n = d->n_wanted,
                                    .width = d->c->n_heads * d->c->head_dim,
                                    .out = d->qkv_wanted,
                                    .out_stride = qkv};

    if (d->n_wanted == d->view->rows) {
        return;
    }
    if (d->n_wanted > 0) {
        did(d, "gather", kn_cuda_gather(&x, d->stream));
        did(d, "gather", kn_cuda_gather(&q, d->stream));
    }
    d->cur_x = d->x_wanted;
    d->cur_qkv = d->qkv_wanted;
    d->view = &d->wanted;
}

void kn_cuda_v_attention(struct kn_device *d, int layer)
{
    const struct kn_cuda_view *v = d->view;
    struct kn_cuda_attn_args a = {
        .q = d->cur_qkv,
        .q_stride = (size_t)(d->c->n_heads + 2 * d->c->n_kv_heads) * (size_t)d->c->head_dim,
        .kv = d->kv + (size_t)layer * d->layer_stride,
        .row_start = v->row_start,
        .ctx_len = v->ctx_len,
        .pages = v->pages,
        .pages_stride = d->pages_stride,
        .plan = v->plan_decode,
        .n_seqs = v->n_decode,
        .max_rows = v->n_decode,
        .max_ctx = d->cfg.max_ctx,
        .out = d->att.p,
        .out_stride = (size_t)d->att.width,
        .workspace = d->attn_work,
    };

    if (d->stepping) {
        step_attention(d, layer);
        return;
    }
    if (v->n_decode > 0) {
        did(d, "attention", kn_cuda_attn_decode(&d->attn, &a, d->stream));
    }
    if (v->n_decode < v->n_seqs) {
        a.row_start += v->n_decode;
        a.ctx_len += v->n_decode;
        a.pages += (size_t)v->n_decode * (size_t)d->pages_stride;
        a.plan = v->plan_prefill;
        a.n_seqs = v->n_seqs - v->n_decode;
        a.max_rows = v->rows;
        did(d, "attention", kn_cuda_attn_prefill(&d->attn, &a, d->stream));
    }
}

void kn_cuda_v_attn_out(struct kn_device *d, const struct kn_weight *o)
{
    struct product p = {.x = &d->att,
                        .w = o,
                        .kind = KN_STREAM_ADD,
                        .out = d->cur_x,
                        .out_stride = (size_t)d->c->d_model};

    if (d->stepping) {
        step_residual(d, o, d->step_att);
    } else if (d->view->rows > 0) {
        multiply(d, &p);
    }
}

void kn_cuda_v_ffn(struct kn_device *d, const struct kn_device_ffn *a)
{
    struct product gu = {.x = &d->h,
                         .w = a->gu,
                         .kind = KN_STREAM_SWIGLU,
                         .out = d->act.p,
                         .out_stride = (size_t)d->c->d_ff};
    struct product down = {.x = &d->act,
                           .w = a->down,
                           .kind = KN_STREAM_ADD,
                           .out = d->cur_x,
                           .out_stride = (size_t)d->c->d_model};

    if (d->stepping) {
        step_ffn(d, a);
    } else if (d->view->rows > 0) {
        norm(d, a->norm);
        multiply(d, &gu);
        multiply(d, &down);
    }
}

void kn_cuda_v_logits(struct kn_device *d, const float *weight, const struct kn_weight *output)
{
    struct product p = {.x = &d->h,
                        .w = output,
                        .kind = KN_STREAM_F32,
                        .out = d->logits,
                        .out_stride = (size_t)d->c->n_vocab};

    if (d->stepping) {
        step_logits(d, weight, output);
    } else if (d->view->rows > 0) {
        norm(d, weight);
        multiply(d, &p);
    }
}

void kn_cuda_v_sample(struct kn_device *d)
{
    struct kn_cuda_sample_args a = {.logits = d->logits,
                                    .stride = (size_t)d->c->n_vocab,
                                    .n = d->view->rows,
                                    .n_vocab = d->c->n_vocab,
                                    .draws = d->draws,
                                    .out = d->drawn};

    if (d->view->rows > 0) {
        did(d, "sampling", kn_cuda_sample(&a, d->stream));
    }
}
