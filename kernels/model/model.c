/* A model bound to a back end: creation, workspace, and the pass around an architecture's forward.
 *
 * Owner: the engine. Everything a pass needs is allocated here once; kn_model_forward only fills in
 * the batch. */
#include "kernels/model/model_int.h"

#include "common/base/buf.h"
#include "common/mem/warm.h"
#include "common/thr/time.h"
#include "kernels/core/limits.h"
#include "kernels/core/profile.h"
#include "kernels/core/registry.h"
#include "kernels/cpu/team.h"

#include <stdlib.h>
#include <sys/mman.h>

#define LIMIT_NS (8 * BT_NS_PER_MS)

struct kn_model {
    struct kn_model_cfg cfg; /* file borrowed; isa not kept */
    const struct kn_arch *arch;
    struct kn_team *team;
    struct kn_stream stream;
    struct kn_weights weights;
    struct kn_fwd fwd;
    struct kn_device_seq *device_seqs; /* [max_batch_seqs] */
    struct kn_seq_rows *all_seqs;      /* fwd.seqs at the start of a pass */
    float *freqs;                      /* [D/2] */
    void *work;                        /* one mapping that holds all arrays of fwd and stream */
    size_t work_bytes;
};

static const struct kn_arch *arch_of(const struct bt_model_config *c)
{
    switch (c->arch) {
    case BT_ARCH_LLAMA:
        return &kn_arch_llama;
    case BT_ARCH_QWEN2:
        return &kn_arch_qwen2;
    case BT_ARCH_QWEN3:
        return &kn_arch_qwen3;
    }
    return NULL;
}

static int check_cfg(const struct kn_model_cfg *cfg, struct bt_err *err)
{
    const struct bt_model_config *c = bt_model_config(cfg->file);

    if (cfg->max_batch_tokens < 1 || cfg->max_batch_seqs < 1 || cfg->max_outputs < 1 ||
        cfg->max_ctx < 1) {
        return BT_FAIL(err, BT_E_CONFIG,
                       "model: max_batch_tokens %d, max_batch_seqs %d, max_outputs %d and max_ctx "
                       "%d must be at least 1",
                       cfg->max_batch_tokens, cfg->max_batch_seqs, cfg->max_outputs, cfg->max_ctx);
    }
    if (cfg->max_ctx > c->n_ctx) {
        return BT_FAIL(err, BT_E_CONFIG, "max_ctx is %d, the model was trained for %d positions",
                       cfg->max_ctx, c->n_ctx);
    }
    if (c->head_dim < 2 || c->head_dim % 2 || c->head_dim > KN_MAX_HEAD_DIM) {
        return BT_FAIL(err, BT_E_UNSUPPORTED, "head size %d is not supported: even, 2..%d",
                       c->head_dim, KN_MAX_HEAD_DIM);
    }
    return arch_of(c)->check(c, err);
}

/* Lays the arrays into `base` (NULL: only counts). Returns the bytes needed. */
static size_t lay_out(struct kn_model *m, char *base)
{
    const struct bt_model_config *c = bt_model_config(m->cfg.file);
    size_t t = (size_t)m->cfg.max_batch_tokens, s = (size_t)m->cfg.max_batch_seqs;
    size_t e = (size_t)c->d_model, f = (size_t)c->d_ff, d = (size_t)c->head_dim;
    size_t hd = (size_t)c->n_heads * d, kd = (size_t)c->n_kv_heads * d;
    size_t ef = BT_MAX(e, f), k_max = BT_MAX(ef, hd);
    size_t scratch = kn_scratch_bytes(t, k_max);
    size_t threads = (size_t)m->cfg.n_threads * KN_THREAD_SCRATCH_BYTES;
    struct {
        void *field; /* pointer to set */
        size_t bytes;
    } parts[] = {
        {&m->fwd.x, t * e * sizeof(float)},
        {&m->fwd.h, t * BT_MAX(e, hd) * sizeof(float)},
        {&m->fwd.qkv, t * (hd + 2 * kd) * sizeof(float)},
        {&m->fwd.gu, t * 2 * f * sizeof(float)},
        {&m->fwd.act, t * f * sizeof(float)},
        {&m->fwd.cos_sin, t * 2 * d * sizeof(float)},
        {&m->freqs, d / 2 * sizeof(float)},
        {&m->all_seqs, s * sizeof(struct kn_seq_rows)},
        {&m->fwd.wanted_seqs, s * sizeof(struct kn_seq_rows)},
        {&m->fwd.wanted_rows, s * sizeof(int)},
        {&m->stream.scratch, scratch},
        {&m->stream.thread_scratch, threads},
    };
    size_t used = 0;

    for (size_t i = 0; i < BT_ARRAY_LEN(parts); i++) {
        if (base) {
            *(void **)parts[i].field = base + used;
        }
        used += (parts[i].bytes + 63) / 64 * 64;
    }
    m->stream.scratch_bytes = scratch;
    return used;
}

static int alloc_work(struct kn_model *m, struct bt_err *err)
{
    size_t bytes = lay_out(m, NULL);
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    if (p == MAP_FAILED) {
        return BT_FAIL_SYS(err, BT_E_NOMEM, "model workspace: %zu bytes", bytes);
    }
    madvise(p, bytes, MADV_HUGEPAGE); /* a wish */
    bt_warm_now(p, bytes);
    m->work = p;
    m->work_bytes = bytes;
    lay_out(m, p);
    return BT_OK;
}

/* What weights are on a device, and activations with them. */
static enum bt_dtype device_dtype(const struct bt_model_file *file)
{
    const struct bt_tensor *t = bt_model_tensor(file, "blk.0.attn_q.weight");

    return t && t->dtype == BT_DTYPE_F16 ? BT_DTYPE_F16 : BT_DTYPE_BF16;
}

enum kv_dtype kn_model_device_kv(const struct bt_model_file *file)
{
    return device_dtype(file) == BT_DTYPE_F16 ? KV_DTYPE_F16 : KV_DTYPE_BF16;
}

static int create_on_device(struct kn_model *m, struct bt_err *err)
{
    const struct bt_model_config *c = bt_model_config(m->cfg.file);
    const struct kn_device_ops *ops = m->cfg.device;
    float freqs[KN_MAX_HEAD_DIM / 2];
    struct kn_device_cfg cfg = {
        .model = c,
        .dtype = device_dtype(m->cfg.file),
        .max_batch_tokens = m->cfg.max_batch_tokens,
        .max_batch_seqs = m->cfg.max_batch_seqs,
        .max_outputs = m->cfg.max_outputs,
        .max_ctx = m->cfg.max_ctx,
        .page_tokens = m->cfg.page_tokens,
        .freqs = freqs,
        .invariant = m->cfg.invariant,
        .notes = m->cfg.home ? m->cfg.home->notes : NULL,
        .notes_bytes = m->cfg.home ? m->cfg.home->notes_bytes : 0,
    };
    struct kn_weights_to to = {.device_ops = ops,
                               .dtype = cfg.dtype,
                               .random_seed = m->cfg.random_seed,
                               .home = m->cfg.home};
    int rc;

    m->device_seqs = bt_calloc((size_t)m->cfg.max_batch_seqs, sizeof(*m->device_seqs));
    if (!m->device_seqs) {
        return BT_FAIL(err, BT_E_NOMEM, "model: out of memory");
    }
    bt_model_rope_freqs(m->cfg.file, freqs);
    rc = ops->open(&cfg, &m->fwd.device, err);
    if (rc < 0) {
        return rc;
    }
    m->fwd.device_ops = ops;
    to.device = m->fwd.device;
    return kn_weights_load(m->cfg.file, m->arch, &to, &m->weights, err);
}

/* The limits that the profile holds ops against, from the weights as they lie in memory. */
static void measure_limits(const struct kn_model *m)
{
    const struct bt_mem_region *r = &m->weights.region;
    const char *name;

    if (kn_profile_enabled() && r->base) {
        double read = kn_limit_read(m->cfg.n_threads, LIMIT_NS, r->base, r->bytes);

        kn_profile_set_rates(read, kn_limit_mac(m->cfg.n_threads, LIMIT_NS, &name));
    }
}

static bool has_bf16(const struct bt_model_file *mf)
{
    for (size_t i = 0; i < bt_model_n_tensors(mf); i++) {
        const struct bt_tensor *t = bt_model_tensor_at(mf, i);

        if (t->n_dims == 2 && t->dtype == BT_DTYPE_BF16) {
            return true;
        }
    }
    return false;
}

/* Products of bf16 are another numerics, whose KV is no one else's: "auto" means them only where
 * there are such weights. */
static int
select_ops(const struct kn_model *m, const char *isa, const struct kn_ops **ret, struct bt_err *err)
{
    int rc = kn_ops_select(isa, ret, err);

    if (rc == BT_OK && strcmp(isa, "auto") == 0 && strcmp((*ret)->isa, "avx512bf16") == 0 &&
        !has_bf16(m->cfg.file)) {
        rc = kn_ops_select("avx512", ret, err);
    }
    return rc;
}

static int create_on_cpu(struct kn_model *m, const char *isa, struct bt_err *err)
{
    struct kn_weights_to to = {0};
    int rc = select_ops(m, isa, &to.ops, err);

    if (rc < 0) {
        return rc;
    }
    rc = kn_team_create(m->cfg.n_threads, &m->team, err);
    if (rc < 0) {
        return rc;
    }
    rc = alloc_work(m, err);
    if (rc < 0) {
        return rc;
    }
    to.team = m->team;
    rc = kn_weights_load(m->cfg.file, m->arch, &to, &m->weights, err);
    if (rc < 0) {
        return rc;
    }
    bt_model_rope_freqs(m->cfg.file, m->freqs);
    m->stream.team = m->team;
    m->fwd.ops = kn_profile_wrap(to.ops);
    measure_limits(m);
    m->fwd.stream = &m->stream;
    return BT_OK;
}

int kn_model_create(const struct kn_model_cfg *cfg, struct kn_model **ret_model, struct bt_err *err)
{
    struct kn_model *m;
    int rc = check_cfg(cfg, err);

    if (rc < 0) {
        return rc;
    }
    m = bt_calloc(1, sizeof(*m));
    if (!m) {
        return BT_FAIL(err, BT_E_NOMEM, "model: out of memory");
    }
    m->cfg = *cfg;
    m->cfg.isa = NULL;
    m->arch = arch_of(bt_model_config(cfg->file));
    m->weights.region.fd = -1;
    m->fwd.c = bt_model_config(cfg->file);
    m->fwd.w = &m->weights;
    rc = cfg->device ? create_on_device(m, err) : create_on_cpu(m, cfg->isa, err);
    if (rc < 0) {
        kn_model_destroy(m);
        return rc;
    }
    m->cfg.home = NULL; /* was borrowed */
    *ret_model = m;
    return BT_OK;
}

void kn_model_destroy(struct kn_model *m)
{
    if (!m) {
        return;
    }
    if (m->fwd.device) {
        m->fwd.device_ops->close(m->fwd.device);
    }
    kn_weights_free(&m->weights);
    if (m->work) {
        munmap(m->work, m->work_bytes);
    }
    kn_team_destroy(m->team);
    free(m->device_seqs);
    free(m);
}

const struct bt_model_config *kn_model_config(const struct kn_model *m)
{
    return m->fwd.c;
}

const char *kn_model_numerics(const struct kn_model *m)
{
    return m->fwd.device ? m->fwd.device_ops->numerics(m->fwd.device) : m->fwd.ops->numerics;
}

void kn_model_set_tap(struct kn_model *m, kn_tap_fn fn, void *arg)
{
    m->fwd.tap = fn;
    m->fwd.tap_arg = arg;
}

/* The batch in the form the ops take, with its limits checked: the engine must keep them, a breach
 * fails the pass before anything is written. */
static int set_batch(struct kn_model *m, const struct kn_batch *b, struct bt_err *err)
{
    struct kn_fwd *f = &m->fwd;
    int row = 0;

    if (b->n_seqs > m->cfg.max_batch_seqs || b->n_tokens > m->cfg.max_batch_tokens) {
        return BT_FAIL(err, BT_E_TOO_LARGE, "batch of %d sequences, %d tokens; at most %d, %d",
                       b->n_seqs, b->n_tokens, m->cfg.max_batch_seqs, m->cfg.max_batch_tokens);
    }
    f->n_wanted = 0;
    for (int i = 0; i < b->n_seqs; i++) {
        const struct kn_batch_seq *s = &b->seqs[i];

        if (s->n_tokens < 1 || s->pos < 0 || s->n_tokens > b->n_tokens - row ||
            s->pos > m->cfg.max_ctx - s->n_tokens) {
            return BT_FAIL(err, BT_E_INVALID,
                           "batch: sequence %d has %d tokens from position %d; %d tokens left in "
                           "the batch, context %d",
                           i, s->n_tokens, s->pos, b->n_tokens - row, m->cfg.max_ctx);
        }
        m->all_seqs[i] = (struct kn_seq_rows){row, s->n_tokens, s->pos, s->pages};
        row += s->n_tokens;
        if (s->want_logits) {
            f->wanted_rows[f->n_wanted] = row - 1;
            f->wanted_seqs[f->n_wanted] =
                (struct kn_seq_rows){f->n_wanted, 1, s->pos + s->n_tokens - 1, s->pages};
            f->n_wanted++;
        }
    }
    if (row != b->n_tokens || f->n_wanted > m->cfg.max_outputs) {
        return BT_FAIL(err, BT_E_INVALID, "batch: %d of %d tokens used, %d outputs of at most %d",
                       row, b->n_tokens, f->n_wanted, m->cfg.max_outputs);
    }
    f->b = b;
    f->n_rows = b->n_tokens;
    f->n_seqs = b->n_seqs;
    f->seqs = m->all_seqs;
    return BT_OK;
}

static void set_angles(struct kn_model *m)
{
    const struct bt_model_config *c = m->fwd.c;

    for (int i = 0; i < m->fwd.n_seqs; i++) {
        const struct kn_seq_rows *s = &m->fwd.seqs[i];

        for (int r = 0; r < s->n_rows; r++) {
            kn_rope_angles(m->freqs, c->head_dim, c->rope_interleaved, s->pos + r,
                           m->fwd.cos_sin + (size_t)(s->row0 + r) * 2 * (size_t)c->head_dim);
        }
    }
}

static int check_layout(const struct kn_model *m, const struct kv_layout *l, struct bt_err *err)
{
    const struct bt_model_config *c = m->fwd.c;

    if (l->n_layers != c->n_layers || l->n_kv_heads != c->n_kv_heads ||
        l->head_dim != c->head_dim) {
        return BT_FAIL(err, BT_E_INVALID,
                       "KV pool of %d layers, %d heads of %d does not fit the model: %d, %d, %d",
                       l->n_layers, l->n_kv_heads, l->head_dim, c->n_layers, c->n_kv_heads,
                       c->head_dim);
    }
    return BT_OK;
}

static void record(void *arg)
{
    struct kn_model *m = arg;

    m->arch->forward(&m->fwd);
}

int kn_model_submit(struct kn_model *m, const struct kn_batch *b, struct bt_err *err)
{
    struct kn_device_batch batch = {.n_tokens = b->n_tokens,
                                    .ids = b->ids,
                                    .n_seqs = b->n_seqs,
                                    .seqs = m->device_seqs,
                                    .kv = b->kv,
                                    .layout = b->layout};
    int rc = check_layout(m, b->layout, err);

    if (rc < 0) {
        return rc;
    }
    if (!m->fwd.device || b->n_seqs < 1 || b->n_seqs > m->cfg.max_batch_seqs) {
        return BT_FAIL(err, BT_E_INVALID, "batch of %d sequences for a device; at most %d",
                       b->n_seqs, m->cfg.max_batch_seqs);
    }
    for (int i = 0; i < b->n_seqs; i++) {
        const struct kn_batch_seq *s = &b->seqs[i];

        if (s->n_tokens < 1 || s->pos < 0 || s->pos > m->cfg.max_ctx - s->n_tokens) {
            return BT_FAIL(err, BT_E_INVALID,
                           "batch: sequence %d has %d tokens from position %d; context %d", i,
                           s->n_tokens, s->pos, m->cfg.max_ctx);
        }
        m->device_seqs[i] = (struct kn_device_seq){.n_tokens = s->n_tokens,
                                                   .pos = s->pos,
                                                   .pages = s->pages,
                                                   .want_logits = s->want_logits,
                                                   .draw = s->draw};
    }
    return m->fwd.device_ops->pass(m->fwd.device, &batch, record, m, err);
}

int kn_model_wait(struct kn_model *m, int32_t *drawn, float *logits, struct bt_err *err)
{
    return m->fwd.device_ops->wait(m->fwd.device, drawn, logits, err);
}

int kn_model_mirror(
    struct kn_model *m, const struct kv_layout *layout, void *kv, void *host, struct bt_err *err)
{
    return m->fwd.device_ops->mirror(m->fwd.device, layout, kv, host, err);
}

int kn_model_fetch(struct kn_model *m, const uint32_t *pages, size_t n, struct bt_err *err)
{
    return m->fwd.device_ops->fetch(m->fwd.device, pages, n, err);
}

static int forward_on_device(struct kn_model *m, const struct kn_batch *b, struct bt_err *err)
{
    int rc;

    if (b->layer_wait) {
        b->layer_wait(b->layer_wait_arg, m->fwd.c->n_layers - 1);
    }
    rc = kn_model_submit(m, b, err);
    if (rc == BT_OK) {
        rc = kn_model_wait(m, NULL, b->logits, err);
    }
    for (int il = 0; rc == BT_OK && b->layer_done && il < m->fwd.c->n_layers; il++) {
        b->layer_done(b->layer_done_arg, il);
    }
    return rc;
}

int kn_model_forward(struct kn_model *m, const struct kn_batch *b, struct bt_err *err)
{
    int rc;

    if (b->n_seqs == 0) {
        return BT_OK;
    }
    if (m->fwd.device) {
        return forward_on_device(m, b, err);
    }
    rc = check_layout(m, b->layout, err);
    if (rc < 0) {
        return rc;
    }
    rc = set_batch(m, b, err);
    if (rc < 0) {
        return rc;
    }
    set_angles(m);
    m->arch->forward(&m->fwd);
    return BT_OK;
}
