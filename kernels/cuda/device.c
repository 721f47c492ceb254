/* The module: one device, one model. Everything that a pass needs is allocated in open; uploads go
 * through upload.c. Thread: start-up and the engine's. */
#include "kernels/cuda/module.h"

#include "common/base/buf.h"
#include "common/obs/log.h"
#include "common/thr/time.h"

#include <stdlib.h>

#define ALIGN ((size_t)256)

/* Most rows for which our own products are used instead of cuBLASLt. One by one they are faster up
 * to 32 rows; a whole step of one row took 5.07 ms with them and 4.91 without (tests/bench/NOTES.md
 * says what is suspected), so for now none. */
#define STREAM_ROWS 0
#define STEP_ROWS   KN_STEP_MAX_ROWS /* in one kernel (step.cu) */

static void close_device(struct kn_device *d)
{
    if (!d) {
        return;
    }
    cudaDeviceSynchronize();
    for (int i = 0; i < KN_CUDA_GRAPHS; i++) {
        if (d->graphs[i].exec) {
            cudaGraphExecDestroy(d->graphs[i].exec);
        }
    }
    for (int i = 0; i < KN_CUDA_SLOTS; i++) {
        cudaFreeHost(d->slots[i].words);
        cudaFreeHost(d->slots[i].plans);
        cudaFreeHost(d->slots[i].drawn);
        if (d->slots[i].done) {
            cudaEventDestroy(d->slots[i].done);
        }
    }
    kn_cuda_upload_end(d->upload);
    while (d->weights) {
        struct kn_cuda_weight *w = d->weights;

        d->weights = w->next;
        free(w);
    }
    kn_cuda_mirror_close(d);
    kn_gemm_destroy(d->gemm);
    cudaFree(d->work);
    cudaFree(d->attn_work);
    if (d->stream) {
        cudaStreamDestroy(d->stream);
    }
    free(d);
}

/* Lays the arrays into d->work (NULL: only counts). Returns the bytes needed. */
static size_t lay_out(struct kn_device *d)
{
    const struct bt_model_config *c = d->c;
    size_t t = (size_t)d->cfg.max_batch_tokens, s = (size_t)d->cfg.max_batch_seqs;
    size_t o = (size_t)d->cfg.max_outputs, head = (size_t)c->head_dim;
    size_t e = (size_t)c->d_model, f = (size_t)c->d_ff, hd = (size_t)c->n_heads * head;
    size_t qkv = hd + 2 * (size_t)c->n_kv_heads * head;
    size_t pages = s * (size_t)d->pages_stride * sizeof(uint32_t);
    struct {
        void *field;
        size_t bytes;
    } parts[] = {
        {&d->x, t * e * 2},
        {&d->x_wanted, o * e * 2},
        {&d->qkv, t * qkv * 2},
        {&d->qkv_wanted, o * qkv * 2},
        {&d->gu, t * 2 * f * 2},
        {&d->h.p, t * e * 2},
        {&d->att.p, t * hd * 2},
        {&d->act.p, t * f * 2},
        {&d->logits, o * (size_t)c->n_vocab * sizeof(float)},
        {&d->freqs, head / 2 * sizeof(float)},
        {&d->cos_sin, (size_t)d->cfg.max_ctx * head * sizeof(float)},
        {&d->blob, d->blob_words * sizeof(int32_t)},
        {&d->ids, t * sizeof(int32_t)},
        {&d->pos, t * sizeof(int32_t)},
        {&d->page, t * sizeof(int32_t)},
        {&d->wanted_rows, s * sizeof(int32_t)},
        {&d->drawn, o * sizeof(int32_t)},
        {&d->step.counter, sizeof(*d->step.counter)},
        {&d->step.records,
         d->step_rows ? kn_cuda_step_record_bytes(&d->step.heads, d->step_rows, d->attn.n_sms) : 0},
        {&d->step.flow, 2 * d->step.flow_bytes},
        {&d->draws, s * sizeof(struct kn_cuda_draw)},
        {&d->all.row_start, (s + 1) * sizeof(int32_t)},
        {&d->all.ctx_len, s * sizeof(int32_t)},
        {&d->all.pages, pages},
        {&d->all.plan_decode, d->plan_bytes},
        {&d->all.plan_prefill, d->plan_bytes},
        {&d->wanted.row_start, (s + 1) * sizeof(int32_t)},
        {&d->wanted.ctx_len, s * sizeof(int32_t)},
        {&d->wanted.pages, pages},
        {&d->wanted.plan_decode, d->plan_bytes},
    };
    size_t used = 0;

    for (size_t i = 0; i < BT_ARRAY_LEN(parts); i++) {
        if (d->work) {
            *(void **)parts[i].field = d->work + used;
        }
        used += (parts[i].bytes + ALIGN - 1) / ALIGN * ALIGN;
    }
    return used;
}

static int make_maps(struct kn_device *d, struct kn_cuda_act *a, int width)
{
    int rc = 0;

    a->width = width;
    for (int i = 0; i < KN_CUDA_BOXES && rc == 0; i++) {
        rc = kn_cuda_map_init(&a->maps[i], d->dtype, a->p, (size_t)d->cfg.max_batch_tokens,
                              (size_t)width, (size_t)width, 8 << i);
    }
    return rc;
}

static int alloc_slot(struct kn_device *d, struct kn_cuda_slot *s)
{
    int rc = (int)cudaMallocHost((void **)&s->words, d->blob_words * sizeof(int32_t));

    rc = rc ? rc : (int)cudaMallocHost((void **)&s->plans, 3 * d->plan_bytes);
    rc = rc ? rc
            : (int)cudaMallocHost((void **)&s->drawn,
                                  (size_t)d->cfg.max_outputs * sizeof(*s->drawn));
    return rc ? rc : (int)cudaEventCreateWithFlags(&s->done, cudaEventDisableTiming);
}

static int alloc_all(struct kn_device *d)
{
    const struct bt_model_config *c = d->c;
    size_t bytes = lay_out(d), work;
    int rc = (int)cudaStreamCreateWithFlags(&d->stream, cudaStreamNonBlocking);

    rc = rc ? rc : (int)cudaMalloc((void **)&d->work, bytes);
    if (rc == 0) {
        lay_out(d);
        rc = (int)cudaMemset(d->work, 0, bytes);
        rc = rc ? rc : (int)cudaMemset(d->step.flow, 0xff, 2 * d->step.flow_bytes);
    }
    d->step.heads.cos_sin = d->cos_sin;
    d->step.heads.pos = d->pos;
    d->step.heads.page = d->page;
    d->step.ctx_len = d->all.ctx_len;
    d->step.pages = d->all.pages;
    work = kn_cuda_attn_workspace(&d->attn, d->cfg.max_batch_seqs, d->cfg.max_batch_tokens,
                                  d->cfg.max_ctx);
    rc = rc ? rc : (int)cudaMalloc(&d->attn_work, work);
    rc = rc ? rc : (int)cudaMemset(d->attn_work, 0, work);
    for (int i = 0; i < KN_CUDA_SLOTS && rc == 0; i++) {
        rc = alloc_slot(d, &d->slots[i]);
    }
    rc = rc ? rc : make_maps(d, &d->h, c->d_model);
    rc = rc ? rc : make_maps(d, &d->att, c->n_heads * c->head_dim);
    return rc ? rc : make_maps(d, &d->act, c->d_ff);
}

/* Constants: angles, and row i for output i. */
static int fill_constants(struct kn_device *d)
{
    size_t half = (size_t)d->c->head_dim / 2, n = (size_t)d->cfg.max_batch_seqs + 1;
    int32_t *rows = bt_calloc(n, sizeof(*rows));
    int rc;

    if (!rows) {
        return (int)cudaErrorMemoryAllocation;
    }
    for (size_t i = 0; i < n; i++) {
        rows[i] = (int32_t)i;
    }
    rc = (int)cudaMemcpy(d->wanted.row_start, rows, n * sizeof(*rows), cudaMemcpyHostToDevice);
    free(rows);
    rc = rc ? rc
            : (int)cudaMemcpy(d->freqs, d->cfg.freqs, half * sizeof(float), cudaMemcpyHostToDevice);
    rc = rc ? rc : kn_cuda_rope_table(d->freqs, d->cfg.max_ctx, (int)half, d->cos_sin, d->stream);
    return rc ? rc : (int)cudaStreamSynchronize(d->stream);
}

static int check_shape(const struct kn_device *d, struct bt_err *err)
{
    const struct bt_model_config *c = d->c;

    if (!kn_cuda_attn_supports(&d->attn, 90)) {
        return BT_FAIL(err, BT_E_UNSUPPORTED,
                       "CUDA: no attention kernel for %d query and %d KV heads of %d, pages of %d "
                       "tokens",
                       c->n_heads, c->n_kv_heads, c->head_dim, d->attn.page_tokens);
    }
    if (c->d_model % 32 || c->d_ff % 32 || (c->n_heads * c->head_dim) % 32 || c->n_vocab % 2 ||
        c->d_model > 16384) {
        return BT_FAIL(err, BT_E_UNSUPPORTED,
                       "CUDA: widths must be multiples of 32, the model's at most 16384: %d, %d, "
                       "vocabulary %d",
                       c->d_model, c->d_ff, c->n_vocab);
    }
    return BT_OK;
}

/* What launches of steps have in common; where arrays lie is filled in later. */
static void set_up_steps(struct kn_device *d)
{
    const struct bt_model_config *c = d->c;
    struct kn_cuda_step_args *s = &d->step;

    s->heads = (struct kn_cuda_heads){.n_heads = c->n_heads,
                                      .n_kv_heads = c->n_kv_heads,
                                      .head_dim = c->head_dim,
                                      .page_tokens = d->attn.page_tokens,
                                      .page_stride = d->attn.page_stride,
                                      .interleaved = c->rope_interleaved};
    s->n_sms = d->attn.n_sms;
    s->eps = c->rms_eps;
    s->scale = d->attn.scale;
    s->n_attn = c->n_layers;
    s->pages_stride = d->pages_stride;
    d->step_rows = d->cfg.invariant || !kn_cuda_v_steps(d) ? 0 : STEP_ROWS;
    s->flow_bytes = d->step_rows ? kn_cuda_v_flow_bytes(d, d->step_rows) : 0;
}

static int open_device(const struct kn_device_cfg *cfg, struct kn_device **ret, struct bt_err *err)
{
    const struct bt_model_config *c = cfg->model;
    const struct kn_cuda_driver *driver;
    struct kn_device *d;
    int rc = kn_cuda_start(&driver, err), e;

    if (rc < 0) {
        return rc;
    }
    d = bt_calloc(1, sizeof(*d));
    if (!d) {
        return BT_FAIL(err, BT_E_NOMEM, "CUDA: out of memory");
    }
    d->cfg = *cfg;
    d->c = c;
    d->dtype = cfg->dtype == BT_DTYPE_BF16 ? KN_CUDA_BF16 : KN_CUDA_F16;
    d->stream_rows = STREAM_ROWS;
    d->attn = (struct kn_cuda_attn_shape){
        .dtype = d->dtype,
        .n_heads = c->n_heads,
        .n_kv_heads = c->n_kv_heads,
        .head_dim = c->head_dim,
        .page_tokens = cfg->page_tokens,
        .page_stride =
            2 * (size_t)c->n_kv_heads * (size_t)cfg->page_tokens * (size_t)c->head_dim * 2,
        .scale = 1 / __builtin_sqrtf((float)c->head_dim),
        .invariant = cfg->invariant,
    };
    cudaDeviceGetAttribute(&d->attn.n_sms, cudaDevAttrMultiProcessorCount, 0);
    d->pages_stride = BT_DIV_UP(cfg->max_ctx, cfg->page_tokens);
    set_up_steps(d);
    rc = check_shape(d, err);
    if (rc == BT_OK) {
        size_t plan = kn_cuda_attn_plan_bytes(&d->attn, cfg->max_batch_seqs, cfg->max_batch_tokens,
                                              cfg->max_ctx);

        d->plan_bytes = (plan + ALIGN - 1) / ALIGN * ALIGN;
        d->blob_words = kn_cuda_blob_words(d);
        rc = kn_gemm_create(d->dtype, cfg->invariant, &d->gemm, err);
    }
    if (rc == BT_OK) {
        e = alloc_all(d);
        e = e ? e : kn_cuda_stream_init();
        e = e ? e : kn_cuda_step_init();
        e = e ? e : kn_cuda_attn_init(&d->attn);
        e = e ? e : fill_constants(d);
        rc = e ? kn_cuda_fail(err, "setting up the device", e) : BT_OK;
    }
    if (rc < 0) {
        close_device(d);
        return rc;
    }
    *ret = d;
    return BT_OK;
}

static const char *numerics(const struct kn_device *d)
{
    if (d->cfg.invariant) {
        return d->dtype == KN_CUDA_BF16 ? "cuda/sm90/bf16/invariant/1"
                                        : "cuda/sm90/f16/invariant/1";
    }
    return d->dtype == KN_CUDA_BF16 ? "cuda/sm90/bf16/1" : "cuda/sm90/f16/1";
}

static int upload(struct kn_device *d, void *dst, const void *src, size_t bytes, struct bt_err *err)
{
    int rc = d->upload ? BT_OK : kn_cuda_upload_begin(&d->upload, err), e;

    if (rc < 0) {
        return rc;
    }
    if (d->uploaded == 0) {
        d->upload_ns = bt_now_ns();
    }
    d->uploaded += bytes;
    e = kn_cuda_upload(d->upload, dst, src, bytes);
    return e ? kn_cuda_fail(err, "copying weights", e) : BT_OK;
}

static int fill(struct kn_device *d, void *dst, size_t elems, float scale, uint64_t seed)
{
    return kn_cuda_fill(d->dtype, dst, elems, scale, seed, d->stream) ? BT_E_DEVICE_LOST : BT_OK;
}

static int weight(struct kn_device *d, struct kn_weight *w, struct bt_err *err)
{
    struct kn_cuda_weight *h = bt_calloc(1, sizeof(*h));
    const char *next = w->part[0].data;
    const float *bias = w->part[0].bias;
    int e;

    if (!h) {
        return BT_FAIL(err, BT_E_NOMEM, "CUDA: out of memory");
    }
    h->next = d->weights;
    d->weights = h;
    for (int i = 0; i < w->n_parts; i++) {
        if (w->part[i].data != next || w->part[i].bias != bias) {
            return BT_FAIL(err, BT_E_UNSUPPORTED,
                           "CUDA: parts of a projection of %d inputs do not lie side by side",
                           w->k);
        }
        next += (size_t)w->part[i].n * (size_t)w->k * 2;
        bias += bias ? w->part[i].n : 0;
    }
    h->data = w->part[0].data;
    h->bias = w->part[0].bias;
    h->n = w->n;
    h->k = w->k;
    e = kn_cuda_map_init(&h->map, d->dtype, h->data, (size_t)w->n, (size_t)w->k, (size_t)w->k, 64);
    h->pair_box = kn_cuda_stream_pair_box(w->n);
    e = e ? e
          : kn_cuda_map_init(&h->pairs, d->dtype, h->data, (size_t)w->n, (size_t)w->k, (size_t)w->k,
                             h->pair_box);
    if (e != 0) {
        return BT_FAIL(err, BT_E_UNSUPPORTED, "CUDA: no tensor map for weights [%d, %d]: error %d",
                       w->n, w->k, e);
    }
    w->handle = h;
    return BT_OK;
}

static int finish(struct kn_device *d, struct bt_err *err)
{
    int e = kn_cuda_upload_end(d->upload), rc, known;
    uint64_t from = bt_now_ns();

    d->upload = NULL;
    e = e ? e : (int)cudaStreamSynchronize(d->stream);
    if (e != 0) {
        return kn_cuda_fail(err, "loading weights", e);
    }
    if (d->uploaded > 0) {
        BT_INFO("weights_copied", "mb=%zu ms=%llu", d->uploaded >> 20,
                (unsigned long long)((from - d->upload_ns) / BT_NS_PER_MS));
    }
    from = bt_now_ns();
    known = d->cfg.notes ? kn_gemm_restore(d->gemm, d->cfg.notes, d->cfg.notes_bytes) : 0;
    rc = kn_cuda_tune(d, err);
    if (rc == BT_OK && d->cfg.notes) {
        kn_gemm_save(d->gemm, d->cfg.notes, d->cfg.notes_bytes);
    }
    BT_INFO("products_tuned", "known=%d ms=%llu", known,
            (unsigned long long)((bt_now_ns() - from) / BT_NS_PER_MS));
    return rc;
}

static const struct kn_device_ops ops = {
    .abi = KN_DEVICE_ABI,
    .name = "cuda",
    .mem = &kn_cuda_mem,
    .open = open_device,
    .close = close_device,
    .numerics = numerics,
    .upload = upload,
    .fill = fill,
    .weight = weight,
    .finish = finish,
    .mirror = kn_cuda_mirror,
    .fetch = kn_cuda_fetch,
    .pass = kn_cuda_pass,
    .wait = kn_cuda_wait,
    .embed = kn_cuda_v_embed,
    .qkv = kn_cuda_v_qkv,
    .keep_wanted = kn_cuda_v_keep_wanted,
    .attention = kn_cuda_v_attention,
    .attn_out = kn_cuda_v_attn_out,
    .ffn = kn_cuda_v_ffn,
    .logits = kn_cuda_v_logits,
};

__attribute__((visibility("default"))) const struct kn_device_ops *kn_cuda_get(uint32_t abi)
{
    return abi == KN_DEVICE_ABI ? &ops : NULL;
}
