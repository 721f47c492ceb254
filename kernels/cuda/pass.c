/* One pass: the batch goes to the device, the work is queued, later its tokens come back.
 *
 * A step of decoding (one row for every sequence, all of them drawn from) is recorded once for each
 * number of rows in a list and replayed as a graph; missing rows are filled up with empty ones,
 * which have no page to write to and no context. Every other pass is launched kernel by kernel.
 * Two passes may be queued, so that the host plans while the device works. Thread: the engine's. */
#include "kernels/cuda/module.h"

#include "common/base/buf.h"

#include <stdlib.h>

/* Rows for which decode steps are recorded. */
static const int graph_rows[KN_CUDA_GRAPHS] = {1,   2,   4,   8,   16,  24,  32,  48,
                                               64,  80,  96,  112, 128, 144, 160, 176,
                                               192, 208, 224, 240, 256, 320, 384, 512};

/* Words [at, at + n) of the descriptor under construction. */
struct blob {
    int32_t *words;
    size_t used;
    struct kn_cuda_unpack_args to;
};

static int32_t *take(struct blob *b, size_t n)
{
    int32_t *p = b->words + b->used;

    b->used += n;
    return p;
}

/* The same, to be copied to `to` on the device. */
static int32_t *take_for(struct blob *b, void *to, size_t n)
{
    struct kn_cuda_unpack_args *u = &b->to;

    u->copy[u->n_copies].to = to;
    u->copy[u->n_copies].at = (int)b->used;
    u->copy[u->n_copies].n = (int)n;
    u->n_copies++;
    return take(b, n);
}

size_t kn_cuda_blob_words(const struct kn_device *d)
{
    size_t t = (size_t)d->cfg.max_batch_tokens, s = (size_t)d->cfg.max_batch_seqs;
    size_t draw = sizeof(struct kn_cuda_draw) / sizeof(int32_t);

    return 3 * t + 8 * (s + 1) + s * draw + s * (size_t)d->pages_stride + 64;
}

/* Rows that a graph for n_seqs sequences has; 0 = none. */
static int rows_of_graph(const struct kn_device *d, int n_seqs)
{
    for (int i = 0; i < KN_CUDA_GRAPHS; i++) {
        if (graph_rows[i] >= n_seqs) {
            return graph_rows[i] <= d->cfg.max_batch_seqs && graph_rows[i] <= d->cfg.max_outputs &&
                           graph_rows[i] <= d->cfg.max_batch_tokens
                       ? graph_rows[i]
                       : n_seqs;
        }
    }
    return 0;
}

static int check(const struct kn_device *d, const struct kn_device_batch *b, struct bt_err *err)
{
    int tokens = 0, wanted = 0;

    if (b->n_seqs < 1 || b->n_seqs > d->cfg.max_batch_seqs ||
        b->n_tokens > d->cfg.max_batch_tokens) {
        return BT_FAIL(err, BT_E_TOO_LARGE, "batch of %d sequences, %d tokens; at most %d, %d",
                       b->n_seqs, b->n_tokens, d->cfg.max_batch_seqs, d->cfg.max_batch_tokens);
    }
    if (d->n_queued == KN_CUDA_SLOTS) {
        return BT_FAIL(err, BT_E_INTERNAL, "%d passes are queued already", d->n_queued);
    }
    for (int i = 0; i < b->n_seqs; i++) {
        tokens += b->seqs[i].n_tokens;
        wanted += b->seqs[i].want_logits;
    }
    if (tokens != b->n_tokens || wanted > d->cfg.max_outputs) {
        return BT_FAIL(err, BT_E_INVALID, "batch: %d of %d tokens used, %d outputs of at most %d",
                       tokens, b->n_tokens, wanted, d->cfg.max_outputs);
    }
    if (b->layout->page_tokens != d->attn.page_tokens ||
        b->layout->page_stride != d->attn.page_stride) {
        return BT_FAIL(err, BT_E_INVALID, "KV pool of %d tokens a page, %zu bytes, not %d and %zu",
                       b->layout->page_tokens, b->layout->page_stride, d->attn.page_tokens,
                       d->attn.page_stride);
    }
    return BT_OK;
}

static struct kn_cuda_draw draw_of(const struct kn_device_draw *w)
{
    if (!w) {
        return (struct kn_cuda_draw){.skip = 1};
    }
    return (struct kn_cuda_draw){.temperature = w->temperature,
                                 .top_k = w->top_k,
                                 .top_p = w->top_p,
                                 .min_p = w->min_p,
                                 .seed = w->seed,
                                 .choice = w->choice,
                                 .position = w->position};
}

/* Rows: id, position and page of each; `rows` of them, those beyond the batch empty. */
static void put_rows(struct kn_device *d, const struct kn_device_batch *b, int rows, struct blob *o)
{
    int32_t *ids = take_for(o, d->ids, (size_t)rows);
    int32_t *pos = take_for(o, d->pos, (size_t)rows);
    int32_t *page = take_for(o, d->page, (size_t)rows);
    int row = 0;

    memcpy(ids, b->ids, (size_t)b->n_tokens * sizeof(*ids));
    for (int i = 0; i < b->n_seqs; i++) {
        const struct kn_device_seq *s = &b->seqs[i];

        for (int t = 0; t < s->n_tokens; t++, row++) {
            pos[row] = s->pos + t;
            page[row] = (int32_t)s->pages[(s->pos + t) / d->attn.page_tokens];
        }
    }
    for (; row < rows; row++) {
        ids[row] = pos[row] = 0;
        page[row] = -1;
    }
}

/* Sequences: first rows, lengths and page tables. Returns the host's copies for the plans. */
static void put_seqs(struct kn_device *d,
                     const struct kn_device_batch *b,
                     int n_seqs,
                     struct blob *o,
                     int32_t **ret_start,
                     int32_t **ret_ctx)
{
    int32_t *start = take_for(o, d->all.row_start, (size_t)n_seqs + 1);
    int32_t *ctx = take_for(o, d->all.ctx_len, (size_t)n_seqs);
    int32_t *first;
    size_t n_pages = 0;
    int row = 0;

    o->to.page_rows_at = (int)o->used;
    first = take(o, (size_t)n_seqs + 1);
    o->to.pages_at = (int)o->used;
    for (int i = 0; i < n_seqs; i++) {
        const struct kn_device_seq *s = i < b->n_seqs ? &b->seqs[i] : NULL;
        int end = s ? s->pos + s->n_tokens : 0;
        size_t n = (size_t)BT_DIV_UP(end, d->attn.page_tokens);

        start[i] = row;
        ctx[i] = end;
        first[i] = (int32_t)n_pages;
        row += s ? s->n_tokens : 1;
        if (n > 0) {
            memcpy(take(o, n), s->pages, n * sizeof(uint32_t));
        }
        n_pages += n;
    }
    start[n_seqs] = row;
    first[n_seqs] = (int32_t)n_pages;
    *ret_start = start;
    *ret_ctx = ctx;
}

/* Outputs: their rows, sequences of one row each, and how each is drawn. */
static int32_t *put_outputs(
    struct kn_device *d, const struct kn_device_batch *b, int n_seqs, bool decode, struct blob *o)
{
    size_t draw_words = sizeof(struct kn_cuda_draw) / sizeof(int32_t), most = (size_t)n_seqs;
    struct kn_cuda_draw draw;
    int32_t *rows, *ctx, *draws, *seq;
    int row = 0, n = 0;

    rows = take_for(o, d->wanted_rows, most);
    ctx = take_for(o, d->wanted.ctx_len, most);
    draws = take_for(o, d->draws, most * draw_words);
    o->to.wanted_at = (int)o->used;
    seq = take(o, most);
    memset(rows, 0, most * sizeof(*rows));
    memset(ctx, 0, most * sizeof(*ctx));
    for (int i = 0; i < n_seqs; i++) {
        const struct kn_device_seq *s = i < b->n_seqs ? &b->seqs[i] : NULL;

        row += s ? s->n_tokens : 1;
        if (s && !s->want_logits) {
            continue;
        }
        draw = draw_of(s ? s->draw : NULL);
        memcpy(draws + (size_t)n * draw_words, &draw, sizeof(draw));
        rows[n] = row - 1;
        ctx[n] = s ? s->pos + s->n_tokens : 0;
        seq[n++] = i;
    }
    d->n_wanted = n;
    o->to.n_wanted = decode ? 0 : n;
    return ctx;
}

/* Plan of one kind into the slot's pinned memory and on to the device. */
static int send_plan(struct kn_device *d, size_t bytes, const char *host, void *to)
{
    return bytes == 0 ? 0
                      : (int)cudaMemcpyAsync(to, host, bytes, cudaMemcpyHostToDevice, d->stream);
}

static int send_plans(struct kn_device *d,
                      struct kn_cuda_slot *slot,
                      int n_real,
                      const int32_t *start,
                      const int32_t *ctx)
{
    char *host = slot->plans;
    size_t n;
    int rc = 0;

    if (d->all.n_decode > 0) {
        n = kn_cuda_attn_plan_decode(&d->attn, BT_MIN(d->all.n_decode, n_real), ctx, host);
        rc = send_plan(d, n, host, d->all.plan_decode);
    }
    if (rc == 0 && d->all.n_decode < d->all.n_seqs) {
        host = slot->plans + d->plan_bytes;
        n = kn_cuda_attn_plan_prefill(&d->attn, d->all.n_seqs - d->all.n_decode,
                                      start + d->all.n_decode, ctx + d->all.n_decode, host);
        rc = send_plan(d, n, host, d->all.plan_prefill);
    }
    return rc;
}

/* Fills the slot, sends it, spreads it. `n_seqs`: with empty ones. */
static int send(struct kn_device *d,
                const struct kn_device_batch *b,
                int n_seqs,
                bool decode,
                struct kn_cuda_slot *slot)
{
    struct blob o = {.words = slot->words,
                     .to = {.from = d->blob,
                            .n_seqs = n_seqs,
                            .pages_stride = d->pages_stride,
                            .pages = d->all.pages,
                            .wanted_pages = d->wanted.pages}};
    int32_t *start, *ctx, *wanted_ctx;
    size_t n;
    int rc;

    d->all.rows = decode ? n_seqs : b->n_tokens;
    d->all.n_seqs = n_seqs;
    d->all.n_decode = 0;
    while (d->all.n_decode < n_seqs &&
           (d->all.n_decode >= b->n_seqs || b->seqs[d->all.n_decode].n_tokens == 1)) {
        d->all.n_decode++;
    }
    put_rows(d, b, d->all.rows, &o);
    wanted_ctx = put_outputs(d, b, n_seqs, decode, &o);
    put_seqs(d, b, n_seqs, &o, &start, &ctx);
    d->wanted.rows = d->wanted.n_seqs = d->wanted.n_decode = d->n_wanted;
    rc = (int)cudaMemcpyAsync(d->blob, slot->words, o.used * sizeof(int32_t),
                              cudaMemcpyHostToDevice, d->stream);
    rc = rc ? rc : send_plans(d, slot, b->n_seqs, start, ctx);
    if (rc == 0 && !decode && d->n_wanted > 0) {
        char *host = slot->plans + 2 * d->plan_bytes;

        n = kn_cuda_attn_plan_decode(&d->attn, d->n_wanted, wanted_ctx, host);
        rc = send_plan(d, n, host, d->wanted.plan_decode);
    }
    return rc ? rc : kn_cuda_unpack(&o.to, d->stream);
}

static void issue(struct kn_device *d, void (*record)(void *arg), void *arg)
{
    d->stepping = d->all.rows <= d->step_rows && d->all.n_decode == d->all.n_seqs &&
                  d->n_wanted == d->all.rows;
    kn_cuda_v_step_begin(d);
    d->view = &d->all;
    d->cur_x = d->x;
    d->cur_qkv = d->qkv;
    record(arg);
    kn_cuda_v_sample(d);
}

static int
capture(struct kn_device *d, struct kn_cuda_graph *g, void (*record)(void *arg), void *arg)
{
    cudaGraph_t graph = NULL;
    int rc = (int)cudaStreamBeginCapture(d->stream, cudaStreamCaptureModeThreadLocal);

    if (rc != 0) {
        return rc;
    }
    issue(d, record, arg);
    rc = (int)cudaStreamEndCapture(d->stream, &graph);
    if (rc == 0 && d->error == 0) {
        rc = (int)cudaGraphInstantiate(&g->exec, graph, 0);
    }
    if (graph) {
        cudaGraphDestroy(graph);
    }
    return rc;
}

/* The graph of a decode step of so many rows over this pool, recorded when it is first needed. */
static int replay(struct kn_device *d, int rows, void (*record)(void *arg), void *arg)
{
    struct kn_cuda_graph *g = d->graphs;
    int rc = 0;

    while (g < d->graphs + KN_CUDA_GRAPHS && g->exec && (g->rows != rows || g->kv != d->kv)) {
        g++;
    }
    if (g == d->graphs + KN_CUDA_GRAPHS) {
        issue(d, record, arg);
        return 0;
    }
    if (!g->exec) {
        rc = capture(d, g, record, arg);
        g->rows = rows;
        g->kv = d->kv;
    }
    return rc ? rc : d->error ? 0 : (int)cudaGraphLaunch(g->exec, d->stream);
}

static int fault(struct kn_device *d, const char *what, int rc, struct bt_err *err)
{
    d->error = rc;
    return kn_cuda_fail(err, what, rc);
}

int kn_cuda_pass(struct kn_device *d,
                 const struct kn_device_batch *b,
                 void (*record)(void *arg),
                 void *arg,
                 struct bt_err *err)
{
    struct kn_cuda_slot *slot = &d->slots[(d->first + d->n_queued) % KN_CUDA_SLOTS];
    bool decode = true;
    int n_seqs = b->n_seqs, rc = check(d, b, err);

    if (rc < 0) {
        return rc;
    }
    for (int i = 0; i < b->n_seqs; i++) {
        decode = decode && b->seqs[i].n_tokens == 1 && b->seqs[i].want_logits;
    }
    if (decode) {
        n_seqs = rows_of_graph(d, b->n_seqs);
        decode = n_seqs > 0;
        n_seqs = decode ? n_seqs : b->n_seqs;
    }
    d->kv = b->kv;
    d->layer_stride = b->layout->layer_stride;
    rc = send(d, b, n_seqs, decode, slot);
    if (rc != 0) {
        return fault(d, "sending the batch", rc, err);
    }
    if (decode) {
        rc = replay(d, n_seqs, record, arg);
        rc = rc ? rc : kn_cuda_mirror_rows(d, n_seqs);
    } else {
        kn_cuda_mirror_begin(d, b->n_tokens);
        issue(d, record, arg);
        rc = kn_cuda_mirror_end(d);
    }
    if (rc == 0 && d->error != 0) {
        return fault(d, d->error_what, d->error, err);
    }
    slot->n_outputs = decode ? b->n_seqs : d->n_wanted;
    if (rc == 0 && slot->n_outputs > 0) {
        rc = (int)cudaMemcpyAsync(slot->drawn, d->drawn,
                                  (size_t)slot->n_outputs * sizeof(*slot->drawn),
                                  cudaMemcpyDeviceToHost, d->stream);
    }
    rc = rc ? rc : (int)cudaEventRecord(slot->done, d->stream);
    if (rc != 0) {
        return fault(d, "forward pass", rc, err);
    }
    d->n_queued++;
    return BT_OK;
}

int kn_cuda_wait(struct kn_device *d, int32_t *drawn, float *logits, struct bt_err *err)
{
    struct kn_cuda_slot *slot = &d->slots[d->first];
    int rc;

    if (d->n_queued == 0) {
        return BT_FAIL(err, BT_E_INTERNAL, "no pass is queued");
    }
    d->first = (d->first + 1) % KN_CUDA_SLOTS;
    d->n_queued--;
    rc = (int)cudaEventSynchronize(slot->done);
    if (rc == 0 && logits && slot->n_outputs > 0) {
        size_t n = (size_t)slot->n_outputs * (size_t)d->c->n_vocab;

        rc = (int)cudaMemcpy(logits, d->logits, n * sizeof(*logits), cudaMemcpyDeviceToHost);
    }
    if (rc != 0) {
        return fault(d, "forward pass", rc, err);
    }
    if (drawn) {
        memcpy(drawn, slot->drawn, (size_t)slot->n_outputs * sizeof(*drawn));
    }
    return BT_OK;
}

/* Activations that a projection reads while it is tuned. */
static const struct kn_cuda_act *act_of(const struct kn_device *d, const struct kn_cuda_weight *w)
{
    return w->k == d->act.width ? &d->act : w->k == d->att.width ? &d->att : &d->h;
}

/* Products of the projections [n] of one shape at `rows` rows. */
static int tune_one(struct kn_device *d, const void *const *w, int n, int rows, const void *bits)
{
    const struct kn_cuda_weight *first = d->tuned;
    const struct bt_model_config *c = d->c;
    bool head = first->n == c->n_vocab;
    struct kn_gemm_args a = {.x = act_of(d, first)->p,
                             .w = first->data,
                             .rows = rows,
                             .n = first->n,
                             .k = first->k,
                             .add = first->n == c->d_model,
                             .f32 = head,
                             .out = head ? (void *)d->logits : d->gu};
    struct kn_gemm_tune_args t = {
        .a = &a, .w = w, .n_w = n, .most = rows > 1024 ? 12 : 64, .bits = bits};
    float us;

    if (head && rows > d->cfg.max_outputs) {
        return 0;
    }
    return kn_gemm_tune(d->gemm, &t, d->stream, &us);
}

/* Mean of 8 launches after 2, in us; negative if they do not run. */
static float mean_us(struct kn_device *d, const void *const *w, int n, int rows, bool ours)
{
    const struct kn_cuda_weight *first = d->tuned;
    struct kn_gemm_args a = {
        .x = d->h.p, .w = NULL, .rows = rows, .n = first->n, .k = first->k, .out = d->gu};
    struct kn_cuda_stream_gemm_args s = {.w = &first->pairs,
                                         .x = &d->h.maps[rows > 32 ? 3 : 2],
                                         .n = first->n,
                                         .k = first->k,
                                         .rows = rows,
                                         .kind = KN_STREAM_SWIGLU,
                                         .out = d->act.p,
                                         .out_stride = (size_t)d->c->d_ff,
                                         .box = first->pair_box,
                                         .warpgroups = 4};
    const struct kn_cuda_weight *q = first;
    cudaEvent_t from, to;
    float ms = -1;
    int rc = 0;

    cudaEventCreate(&from);
    cudaEventCreate(&to);
    for (int i = 0; i < 10 && rc == 0; i++) {
        if (i == 2) {
            cudaEventRecord(from, d->stream);
        }
        a.w = w[i % n];
        while (q->data != a.w) {
            q = q->next ? q->next : first;
        }
        s.w = &q->pairs;
        if (ours) {
            rc = kn_cuda_stream_gemm(d->dtype, &s, d->stream);
            continue;
        }
        rc = kn_gemm_run(d->gemm, &a, d->stream);
        rc = rc ? rc : kn_cuda_swiglu(d->dtype, d->gu, rows, d->c->d_ff, d->act.p, d->stream);
    }
    cudaEventRecord(to, d->stream);
    if (cudaEventSynchronize(to) != cudaSuccess || rc != 0 ||
        cudaEventElapsedTime(&ms, from, to) != cudaSuccess) {
        ms = -1;
    }
    cudaEventDestroy(from);
    cudaEventDestroy(to);
    return ms < 0 ? ms : ms * 1000 / 8;
}

/* Gate and up at `rows` rows: the library and a kernel for SwiGLU, or both in one of ours? Only
 * where ours was ever faster in a whole layer: more rows made it slower there than one by one. */
static void tune_pairs(struct kn_device *d, const void *const *w, int n, int rows)
{
    const struct kn_cuda_weight *first = d->tuned;
    struct kn_gemm_args a = {.rows = rows, .n = first->n, .k = first->k};
    float library, ours;

    if (d->cfg.invariant || first->n != 2 * d->c->d_ff || first->k != d->c->d_model || rows <= 16 ||
        rows > 64 || kn_gemm_restored(d->gemm, &a)) {
        return;
    }
    library = mean_us(d, w, n, rows, false);
    ours = mean_us(d, w, n, rows, true);
    kn_gemm_set_beaten(d->gemm, &a, ours > 0 && ours < library);
}

/* Row 0 of the product of d->tuned, added up from the first column to the last in steps of 16: what
 * invariant numerics are, whatever the size of passes. */
static int one_order_bits(struct kn_device *d, void *ret)
{
    const struct kn_cuda_weight *w = d->tuned;
    bool head = w->n == d->c->n_vocab;
    struct kn_cuda_stream_gemm_args a = {.w = &w->map,
                                         .x = &act_of(d, w)->maps[0],
                                         .n = w->n,
                                         .k = w->k,
                                         .rows = 1,
                                         .kind = head ? KN_STREAM_F32 : KN_STREAM_STORE,
                                         .out = head ? (void *)d->logits : d->gu,
                                         .out_stride = (size_t)w->n,
                                         .split = 1};
    int rc = kn_cuda_stream_gemm(d->dtype, &a, d->stream);

    rc = rc ? rc
            : (int)cudaMemcpyAsync(ret, a.out, (size_t)w->n * (head ? 4 : 2),
                                   cudaMemcpyDeviceToHost, d->stream);
    return rc ? rc : (int)cudaStreamSynchronize(d->stream);
}

/* Numbers of rows that products are tuned for, the largest first: chunks of prompts, then steps. A
 * pass of other numbers takes the next larger plan where numerics are invariant, so the largest
 * pass and the most outputs are among them. */
static int tuned_rows(const struct kn_device *d, int *ret)
{
    static const int chunks[] = {8192, 7168, 6144, 5120, 4096, 3584, 3072, 2560,
                                 2048, 1792, 1536, 1280, 1024, 896,  768,  640};
    bool fast = !d->cfg.invariant;
    int n = 0;

    ret[n++] = d->cfg.max_batch_tokens;
    for (size_t i = 0; i < BT_ARRAY_LEN(chunks); i++) {
        bool power = (chunks[i] & (chunks[i] - 1)) == 0;

        if (chunks[i] < d->cfg.max_batch_tokens && (power || !fast)) {
            ret[n++] = chunks[i];
        }
    }
    for (int i = KN_CUDA_GRAPHS - 1; i >= 0; i--) {
        int rows = graph_rows[i], most = d->cfg.max_outputs;

        if (rows < most && most < ret[n - 1]) {
            ret[n++] = most;
        }
        if (rows > d->stream_rows && rows < ret[n - 1]) {
            ret[n++] = rows;
        }
    }
    return n;
}

static int tune_shape(struct kn_device *d, const struct kn_cuda_weight *of)
{
    const void *w[16];
    void *bits = NULL;
    int rows[KN_CUDA_GRAPHS + 20], n_rows = tuned_rows(d, rows), n = 0, rc = 0;

    for (const struct kn_cuda_weight *q = of; q && n < (int)BT_ARRAY_LEN(w); q = q->next) {
        if (q->n == of->n && q->k == of->k) {
            w[n++] = q->data;
        }
    }
    d->tuned = of;
    if (of->k != act_of(d, of)->width || (of->n > 2 * d->c->d_ff && of->n != d->c->n_vocab)) {
        return 0; /* there is no room for it: it stays untuned */
    }
    if (d->cfg.invariant) {
        bits = malloc((size_t)of->n * sizeof(float));
        rc = bits ? one_order_bits(d, bits) : (int)cudaErrorMemoryAllocation;
    }
    for (int i = 0; i < n_rows && rc == 0; i++) {
        rc = tune_one(d, w, n, rows[i], bits);
        if (rc == 0) {
            tune_pairs(d, w, n, rows[i]);
        }
    }
    free(bits);
    return rc;
}

int kn_cuda_tune(struct kn_device *d, struct bt_err *err)
{
    const struct kn_cuda_weight *seen[8];
    int n_seen = 0, rc = 0;

    rc = kn_cuda_fill(d->dtype, d->h.p, (size_t)d->cfg.max_batch_tokens * (size_t)d->h.width, 1, 1,
                      d->stream);
    rc = rc ? rc
            : kn_cuda_fill(d->dtype, d->act.p,
                           (size_t)d->cfg.max_batch_tokens * (size_t)d->act.width, 1, 2, d->stream);
    rc = rc ? rc
            : kn_cuda_fill(d->dtype, d->att.p,
                           (size_t)d->cfg.max_batch_tokens * (size_t)d->att.width, 1, 3, d->stream);
    for (const struct kn_cuda_weight *w = d->weights; w && rc == 0; w = w->next) {
        int i = 0;

        while (i < n_seen && (seen[i]->n != w->n || seen[i]->k != w->k)) {
            i++;
        }
        if (i < n_seen || n_seen == (int)BT_ARRAY_LEN(seen)) {
            continue;
        }
        seen[n_seen++] = w;
        rc = tune_shape(d, w);
    }
    return rc ? kn_cuda_fail(err, "tuning products", rc) : BT_OK;
}
