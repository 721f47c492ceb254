/* Opening, closing and looking up; what both forms of a model share: ranges of the configuration,
 * the table of rotary frequencies, the list of ids that end an answer. */
#include "common/file/file_int.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <sys/stat.h>

int bt_str_cmp(struct bt_str a, struct bt_str b)
{
    size_t n = BT_MIN(a.n, b.n);
    int d = n ? memcmp(a.p, b.p, n) : 0;

    return d ? d : (a.n > b.n) - (a.n < b.n);
}

static int cmp_name(const void *a, const void *b)
{
    const struct bt_tensor *x = a, *y = b;

    return bt_str_cmp(x->name, y->name);
}

int bt_tensors_sort(struct bt_tensor *t, size_t n, struct bt_err *err)
{
    if (n) {
        qsort(t, n, sizeof(*t), cmp_name);
    }
    for (size_t i = 1; i < n; i++) {
        if (bt_str_eq(t[i - 1].name, t[i].name)) {
            return BT_FAIL(err, BT_E_FORMAT, "duplicate tensor %.*s", BT_NAME_ARG(t[i].name));
        }
    }
    return BT_OK;
}

static int range(const char *what, int64_t v, int64_t lo, int64_t hi, struct bt_err *err)
{
    return v >= lo && v <= hi ? BT_OK
                              : BT_FAIL(err, BT_E_FORMAT, "%s is %lld, must be %lld to %lld", what,
                                        (long long)v, (long long)lo, (long long)hi);
}

static int rope_check(const struct bt_model_config *c, struct bt_err *err)
{
    if (!(c->rope_theta >= 1.0f && c->rope_theta < 1e15f)) {
        return BT_FAIL(err, BT_E_FORMAT, "rope base %g is out of range", (double)c->rope_theta);
    }
    if (c->rope_scaling != BT_ROPE_NONE && !(c->rope_factor >= 1.0f && c->rope_factor < 1e6f)) {
        return BT_FAIL(err, BT_E_FORMAT, "rope scaling factor %g is out of range",
                       (double)c->rope_factor);
    }
    if (c->rope_scaling == BT_ROPE_LLAMA3 &&
        !(c->rope_low_freq_factor > 0.0f && c->rope_high_freq_factor > c->rope_low_freq_factor &&
          c->rope_high_freq_factor < 1e6f && c->rope_orig_ctx > 0)) {
        return BT_FAIL(err, BT_E_FORMAT,
                       "rope scaling llama3: low_freq_factor %g, high_freq_factor %g, original "
                       "context %d do not make sense",
                       (double)c->rope_low_freq_factor, (double)c->rope_high_freq_factor,
                       c->rope_orig_ctx);
    }
    return BT_OK;
}

int bt_model_config_check(const struct bt_model_config *c, struct bt_err *err)
{
    const struct {
        const char *what;
        int64_t v, lo, hi;
    } rows[] = {
        {"number of layers", c->n_layers, 1, 4096},
        {"hidden size", c->d_model, 1, 1 << 20},
        {"number of heads", c->n_heads, 1, 4096},
        {"number of key/value heads", c->n_kv_heads, 1, c->n_heads},
        {"head size", c->head_dim, 2, 4096},
        {"feed-forward size", c->d_ff, 1, 1 << 22},
        {"context length", c->n_ctx, 1, 1 << 28},
    };

    for (size_t i = 0; i < BT_ARRAY_LEN(rows); i++) {
        int rc = range(rows[i].what, rows[i].v, rows[i].lo, rows[i].hi, err);

        if (rc != BT_OK) {
            return rc;
        }
    }
    if (c->n_heads % c->n_kv_heads != 0) {
        return BT_FAIL(err, BT_E_FORMAT, "%d key/value heads do not divide %d heads", c->n_kv_heads,
                       c->n_heads);
    }
    if (c->head_dim % 2 != 0) {
        return BT_FAIL(err, BT_E_FORMAT, "head size %d is odd", c->head_dim);
    }
    if (!(c->rms_eps > 0.0f && c->rms_eps < 1.0f)) {
        return BT_FAIL(err, BT_E_FORMAT, "norm epsilon %g is out of range", (double)c->rms_eps);
    }
    return rope_check(c, err);
}

/* One inverse frequency with the scaling of the configuration. */
static double rope_scaled(const struct bt_model_config *c, double inv)
{
    double wavelen, low, high, smooth;

    switch (c->rope_scaling) {
    case BT_ROPE_NONE:
        break;
    case BT_ROPE_LINEAR:
        return inv / (double)c->rope_factor;
    case BT_ROPE_LLAMA3:
        low = (double)c->rope_low_freq_factor;
        high = (double)c->rope_high_freq_factor;
        wavelen = 2.0 * M_PI / inv;
        if (wavelen < c->rope_orig_ctx / high) {
            return inv;
        }
        if (wavelen > c->rope_orig_ctx / low) {
            return inv / (double)c->rope_factor;
        }
        smooth = (c->rope_orig_ctx / wavelen - low) / (high - low);
        return (1.0 - smooth) * inv / (double)c->rope_factor + smooth * inv;
    }
    return inv;
}

int bt_model_rope_build(struct bt_model_file *mf, const float *factors, struct bt_err *err)
{
    const struct bt_model_config *c = &mf->cfg;
    int n = c->head_dim / 2;

    mf->rope_freqs = bt_calloc((size_t)n, sizeof(float));
    if (!mf->rope_freqs) {
        return BT_E_NOMEM;
    }
    for (int i = 0; i < n; i++) {
        double inv = rope_scaled(c, pow((double)c->rope_theta, -2.0 * i / c->head_dim));

        if (factors) {
            if (!(factors[i] > 0.0f && factors[i] < 1e9f)) {
                return BT_FAIL(err, BT_E_FORMAT, "tensor rope_freqs.weight: value %d is %g", i,
                               (double)factors[i]);
            }
            inv /= (double)factors[i];
        }
        mf->rope_freqs[i] = (float)inv;
    }
    return BT_OK;
}

void bt_model_rope_freqs(const struct bt_model_file *mf, float *ret)
{
    memcpy(ret, mf->rope_freqs, (size_t)mf->cfg.head_dim / 2 * sizeof(float));
}

int bt_model_eos_add(struct bt_model_config *cfg, int64_t id, const char *key, struct bt_err *err)
{
    int at = 0;

    if (id < 0 || id >= cfg->n_vocab) {
        return BT_FAIL(err, BT_E_FORMAT, "%s: id %lld is outside the vocabulary of %d", key,
                       (long long)id, cfg->n_vocab);
    }
    while (at < cfg->n_eos && cfg->eos[at] < id) {
        at++;
    }
    if (at < cfg->n_eos && cfg->eos[at] == id) {
        return BT_OK;
    }
    if (cfg->n_eos == BT_MODEL_MAX_EOS) {
        return BT_FAIL(err, BT_E_UNSUPPORTED, "%s: more than %d ids end an answer", key,
                       BT_MODEL_MAX_EOS);
    }
    memmove(&cfg->eos[at + 1], &cfg->eos[at], (size_t)(cfg->n_eos - at) * sizeof(cfg->eos[0]));
    cfg->eos[at] = (int32_t)id;
    cfg->n_eos++;
    return BT_OK;
}

/* Length of the well-formed UTF-8 sequence at p, 0 if there is none. */
static size_t utf8_len(const uint8_t *p, size_t n)
{
    size_t want = p[0] < 0x80 ? 1 : p[0] < 0xc2 ? 0 : p[0] < 0xe0 ? 2 : p[0] < 0xf0 ? 3 : 4;

    if (want == 0 || want > n || p[0] > 0xf4) {
        return 0;
    }
    for (size_t i = 1; i < want; i++) {
        if ((p[i] & 0xc0) != 0x80) {
            return 0;
        }
    }
    if ((p[0] == 0xe0 && p[1] < 0xa0) || (p[0] == 0xed && p[1] > 0x9f) ||
        (p[0] == 0xf0 && p[1] < 0x90) || (p[0] == 0xf4 && p[1] > 0x8f)) {
        return 0;
    }
    return want;
}

/* Length of the character at p that a terminal shows, 0 if there is none. */
static size_t shown_len(const uint8_t *p, size_t n)
{
    size_t len = utf8_len(p, n);
    bool control = len == 1 ? p[0] < 0x20 || p[0] == 0x7f : len == 2 && p[0] == 0xc2 && p[1] < 0xa0;

    return control ? 0 : len;
}

/* Names in messages come out of the file: they go to terminals and logs. */
static void clean(struct bt_err *err)
{
    size_t n = err ? strlen(err->msg) : 0;

    for (size_t i = 0; i < n;) {
        size_t len = shown_len((const uint8_t *)err->msg + i, n - i);

        if (len == 0) {
            err->msg[i] = '?';
        }
        i += len ? len : 1;
    }
}

void bt_model_name_set(struct bt_model_config *cfg, struct bt_str name)
{
    const uint8_t *p = (const uint8_t *)name.p;
    size_t n = 0;

    for (size_t i = 0; i < name.n;) {
        size_t len = shown_len(p + i, name.n - i);

        if (len) {
            if (n + len >= sizeof(cfg->name)) {
                break;
            }
            memcpy(cfg->name + n, p + i, len);
            n += len;
        }
        i += len ? len : 1;
    }
    cfg->name[n] = 0;
}

/* Says which file it was, for the person with many. */
static int name_file(const char *path, int rc, struct bt_err *err)
{
    const char *slash = strrchr(path, '/');
    struct bt_err why;

    if (!err || rc == BT_E_NOMEM) {
        return rc;
    }
    why = *err;
    bt_err_set(err, rc, why.where, "%.80s: %s", slash ? slash + 1 : path, bt_err_msg(&why, rc));
    err->sys = why.sys;
    return rc;
}

static int open_gguf(struct bt_model_file *mf, const char *path, struct bt_err *err)
{
    int rc;

    mf->files = bt_calloc(1, sizeof(*mf->files));
    if (!mf->files) {
        return BT_E_NOMEM;
    }
    rc = bt_file_map_init(path, SIZE_MAX, &mf->files[0], err);
    if (rc != BT_OK) {
        return rc;
    }
    mf->n_files = mf->cap_files = 1;
    mf->files[0].role = "model.gguf";
    rc = bt_gguf_load(mf, mf->files[0].p, mf->files[0].n, err);
    return rc < 0 ? name_file(path, rc, err) : rc;
}

int bt_model_open(const char *path, struct bt_model_file **ret_mf, struct bt_err *err)
{
    struct bt_model_file *mf;
    struct stat st;
    int rc;

    if (stat(path, &st) != 0) {
        rc = errno == ENOENT || errno == ENOTDIR ? BT_E_NOT_FOUND : BT_E_IO;
        return BT_FAIL_SYS(err, rc, "model %s", path);
    }
    mf = bt_calloc(1, sizeof(*mf));
    if (!mf) {
        return BT_FAIL(err, BT_E_NOMEM, "model %s: out of memory", path);
    }
    rc = S_ISDIR(st.st_mode) ? bt_hf_load(mf, path, err) : open_gguf(mf, path, err);
    if (rc != BT_OK) {
        bt_model_close(mf);
        if (rc == BT_E_NOMEM) {
            BT_FAIL(err, rc, "model %s: out of memory", path);
        }
        clean(err);
        return rc;
    }
    *ret_mf = mf;
    return BT_OK;
}

int bt_model_open_mem(const uint8_t *p, size_t n, struct bt_model_file **ret_mf, struct bt_err *err)
{
    struct bt_model_file *mf = bt_calloc(1, sizeof(*mf));
    int rc = mf ? bt_gguf_load(mf, p, n, err) : BT_E_NOMEM;

    if (rc != BT_OK) {
        bt_model_close(mf);
        return rc;
    }
    *ret_mf = mf;
    return BT_OK;
}

void bt_model_close(struct bt_model_file *mf)
{
    if (!mf) {
        return;
    }
    for (size_t i = 0; i < mf->n_files; i++) {
        bt_file_map_fini(&mf->files[i]);
    }
    free(mf->files);
    free(mf->tensors);
    free(mf->rope_freqs);
    free(mf->tok_tokens);
    free(mf->tok_merges);
    free(mf->tok_types);
    free(mf->tok_text);
    free(mf->names);
    free(mf);
}

const struct bt_model_config *bt_model_config(const struct bt_model_file *mf)
{
    return &mf->cfg;
}

const struct bt_tok_source *bt_model_tok_source(const struct bt_model_file *mf)
{
    return &mf->tok;
}

const struct bt_tensor *bt_model_tensor(const struct bt_model_file *mf, const char *name)
{
    struct bt_tensor want = {.name = bt_str_of(name)};

    return mf->n_tensors ? bsearch(&want, mf->tensors, mf->n_tensors, sizeof(want), cmp_name)
                         : NULL;
}

size_t bt_model_n_tensors(const struct bt_model_file *mf)
{
    return mf->n_tensors;
}

const struct bt_tensor *bt_model_tensor_at(const struct bt_model_file *mf, size_t idx)
{
    return idx < mf->n_tensors ? &mf->tensors[idx] : NULL;
}
