/* From GGUF keys to the configuration and the tokenizer source.
 *
 * Which ids end an answer (field report STOP-04): tokenizer.ggml.eos_token_id, eot_token_id and
 * eom_token_id, and every token of type control (3) whose text is one of the end markers below.
 * Files often name one id only, while chat models end a turn with another; a token of type control
 * with such a text has no other meaning. User text never makes a control token, so no answer is cut
 * by words that look like a marker. */
#include "common/file/gguf.h"

#include <stdio.h>
#include <stdlib.h>

#define REQUIRED INT64_MIN

static const char *const end_markers[] = {
    "<|im_end|>",      "<|eot_id|>",    "<|eom_id|>", "<|end_of_text|>", "<|endoftext|>", "<|end|>",
    "<|end_of_turn|>", "<end_of_turn>", "</s>",
};

/* Reads many keys and remembers the first failure, so that callers read like a table. */
struct reader {
    const struct bt_gguf *g;
    const char *arch; /* prefix of "%s.block_count"-like keys */
    struct bt_err *err;
    int rc;
};

static const struct bt_gguf_kv *find(const struct reader *r, const char *suffix, char key[96])
{
    snprintf(key, 96, "%s.%s", r->arch, suffix);
    return bt_gguf_find(r->g, key);
}

static int bad_type(struct reader *r, const struct bt_gguf_kv *kv, const char *want)
{
    if (r->rc != BT_OK) {
        return r->rc;
    }
    if (kv->type == BT_GGUF_ARR) {
        return BT_FAIL(r->err, BT_E_UNSUPPORTED,
                       "gguf: key %.*s: values per layer are not supported", BT_NAME_ARG(kv->key));
    }
    return BT_FAIL(r->err, BT_E_FORMAT, "gguf: key %.*s: %s value, expected %s in range",
                   BT_NAME_ARG(kv->key), bt_gguf_type_name(kv->type), want);
}

/* Integers of the configuration all fit into an int. */
static int64_t get_int(struct reader *r, const char *suffix, int64_t dflt)
{
    const struct bt_gguf_kv *kv;
    char key[96];
    int64_t v = 0;

    kv = find(r, suffix, key);
    if (!kv) {
        if (dflt == REQUIRED && r->rc == BT_OK) {
            r->rc = BT_FAIL(r->err, BT_E_FORMAT, "gguf: key %s is missing", key);
        }
        return dflt == REQUIRED ? 0 : dflt;
    }
    if (!bt_gguf_as_int(kv, &v) || v < 0 || v > INT32_MAX) {
        r->rc = bad_type(r, kv, "a positive integer");
        return 0;
    }
    return v;
}

static double get_float(struct reader *r, const char *suffix, double dflt)
{
    const struct bt_gguf_kv *kv;
    char key[96];
    double v = 0;

    kv = find(r, suffix, key);
    if (!kv) {
        return dflt;
    }
    if (!bt_gguf_as_float(kv, &v)) {
        r->rc = bad_type(r, kv, "a finite float");
        return dflt;
    }
    return v;
}

/* A string under a full key; empty if absent. */
static struct bt_str get_str(struct reader *r, const char *key)
{
    const struct bt_gguf_kv *kv = bt_gguf_find(r->g, key);
    struct bt_str s = {"", 0};

    if (kv && !bt_gguf_as_str(kv, &s)) {
        r->rc = bad_type(r, kv, "a string");
    }
    return s;
}

/* Keys that change the computation in ways this engine does not know; 0 or 1 switches them off. */
static void refuse_variants(struct reader *r, const struct bt_model_config *c)
{
    static const char *const zero[] = {
        "expert_count",           "expert_used_count",       "attention.scale",
        "attn_logit_softcapping", "final_logit_softcapping", "attention.clamp_kqv"};
    static const char *const one[] = {"logit_scale", "embedding_scale", "residual_scale"};
    int64_t window = get_int(r, "attention.sliding_window", 0);
    int64_t rot = get_int(r, "rope.dimension_count", c->head_dim);
    int64_t vlen = get_int(r, "attention.value_length", c->head_dim);
    int64_t splits;
    const struct bt_gguf_kv *kv;
    char key[96];
    double v = 0;

    for (size_t i = 0; r->rc == BT_OK && i < BT_ARRAY_LEN(zero) + BT_ARRAY_LEN(one); i++) {
        bool z = i < BT_ARRAY_LEN(zero);
        int64_t n = 0;

        kv = find(r, z ? zero[i] : one[i - BT_ARRAY_LEN(zero)], key);
        if (!kv) {
            continue;
        }
        v = bt_gguf_as_int(kv, &n) ? (double)n : -1;
        if ((v < 0 && !bt_gguf_as_float(kv, &v)) || v != (z ? 0.0 : 1.0)) {
            r->rc = BT_FAIL(r->err, BT_E_UNSUPPORTED, "gguf: key %s: not supported", key);
        }
    }
    if (r->rc != BT_OK) {
        return;
    }
    kv = bt_gguf_find(r->g, "split.count");
    if (kv && bt_gguf_as_int(kv, &splits) && splits > 1) {
        r->rc = BT_FAIL(r->err, BT_E_UNSUPPORTED,
                        "gguf: key split.count: split files are not supported");
    } else if (window > 0 && window < c->n_ctx) {
        r->rc = BT_FAIL(r->err, BT_E_UNSUPPORTED,
                        "gguf: key %s.attention.sliding_window: a window of %lld is smaller than "
                        "the context of %d, which is not supported",
                        r->arch, (long long)window, c->n_ctx);
    } else if (rot != c->head_dim) {
        r->rc = BT_FAIL(r->err, BT_E_UNSUPPORTED,
                        "gguf: key %s.rope.dimension_count: %lld of a head of %d, partial rotation "
                        "is not supported",
                        r->arch, (long long)rot, c->head_dim);
    } else if (vlen != c->head_dim) {
        r->rc = BT_FAIL(r->err, BT_E_UNSUPPORTED,
                        "gguf: key %s.attention.value_length: %lld differs from the key size %d",
                        r->arch, (long long)vlen, c->head_dim);
    }
}

static void read_rope(struct reader *r, struct bt_model_config *c)
{
    struct bt_str type;
    char key[96];

    c->rope_interleaved = c->arch == BT_ARCH_LLAMA;
    c->rope_theta = (float)get_float(r, "rope.freq_base", 10000.0);
    c->rope_factor = (float)get_float(r, "rope.scaling.factor", 0);
    snprintf(key, sizeof(key), "%s.rope.scaling.type", r->arch);
    type = get_str(r, key);
    if (r->rc != BT_OK) {
        return;
    }
    if (type.n == 0) {
        /* The key of older files: a factor alone means linear. */
        double old = get_float(r, "rope.scale_linear", 0);

        if (c->rope_factor == 0.0f) {
            c->rope_factor = (float)old;
        }
        c->rope_scaling =
            c->rope_factor != 0.0f && c->rope_factor != 1.0f ? BT_ROPE_LINEAR : BT_ROPE_NONE;
    } else if (bt_str_eq(type, BT_STR("linear"))) {
        c->rope_scaling = BT_ROPE_LINEAR;
    } else if (!bt_str_eq(type, BT_STR("none"))) {
        r->rc =
            BT_FAIL(r->err, BT_E_UNSUPPORTED,
                    "gguf: key %s: rope scaling \"%.*s\" is not supported", key, BT_NAME_ARG(type));
    }
    if (c->rope_scaling == BT_ROPE_NONE) {
        c->rope_factor = 1.0f;
    }
}

static int read_config(struct bt_model_config *c, const struct bt_gguf *g, struct bt_err *err)
{
    struct reader r = {g, "", err, BT_OK};
    struct bt_str arch = get_str(&r, "general.architecture");
    int id = r.rc == BT_OK ? bt_arch_of_gguf(arch) : -1;

    if (r.rc != BT_OK) {
        return r.rc;
    }
    if (id < 0) {
        return arch.n == 0
                   ? BT_FAIL(err, BT_E_FORMAT, "gguf: key general.architecture is missing")
                   : BT_FAIL(err, BT_E_UNSUPPORTED, "gguf: architecture \"%.*s\" is not supported",
                             BT_NAME_ARG(arch));
    }
    c->arch = (enum bt_arch)id;
    r.arch = bt_arch_name(c->arch);
    bt_model_name_set(c, get_str(&r, "general.name"));
    c->n_layers = (int)get_int(&r, "block_count", REQUIRED);
    c->d_model = (int)get_int(&r, "embedding_length", REQUIRED);
    c->n_heads = (int)get_int(&r, "attention.head_count", REQUIRED);
    c->n_kv_heads = (int)get_int(&r, "attention.head_count_kv", c->n_heads);
    c->d_ff = (int)get_int(&r, "feed_forward_length", REQUIRED);
    c->n_ctx = (int)get_int(&r, "context_length", REQUIRED);
    c->head_dim = (int)get_int(&r, "attention.key_length", 0);
    c->rms_eps = (float)get_float(&r, "attention.layer_norm_rms_epsilon", 0);
    if (r.rc == BT_OK && c->head_dim == 0) {
        if (c->n_heads == 0 || c->d_model % c->n_heads != 0) {
            return BT_FAIL(err, BT_E_FORMAT,
                           "gguf: key %s.attention.key_length is missing and %d heads do not "
                           "divide %d",
                           r.arch, c->n_heads, c->d_model);
        }
        c->head_dim = c->d_model / c->n_heads;
    }
    read_rope(&r, c);
    refuse_variants(&r, c);
    return r.rc == BT_OK ? bt_model_config_check(c, err) : r.rc;
}

/* Array of strings under `key` to borrowed ranges; absent: none. */
static int read_strings(const struct bt_gguf *g,
                        const char *key,
                        struct bt_str **ret,
                        size_t *ret_n,
                        struct bt_err *err)
{
    const struct bt_gguf_kv *kv = bt_gguf_find(g, key);
    const uint8_t *p;
    struct bt_str *s;

    if (!kv) {
        return BT_OK;
    }
    if (kv->type != BT_GGUF_ARR || kv->elem != BT_GGUF_STR || kv->count > INT32_MAX) {
        return BT_FAIL(err, BT_E_FORMAT, "gguf: key %s: must be an array of strings", key);
    }
    /* count is at most bytes / 8: every element was walked. */
    s = bt_calloc((size_t)kv->count, sizeof(*s));
    if (!s) {
        return BT_E_NOMEM;
    }
    p = kv->p;
    for (size_t i = 0; i < kv->count; i++) {
        uint64_t n;

        memcpy(&n, p, sizeof(n));
        s[i] = (struct bt_str){(const char *)p + 8, (size_t)n};
        p += 8 + n;
    }
    *ret = s;
    *ret_n = (size_t)kv->count;
    return BT_OK;
}

static int read_types(struct bt_model_file *mf, const struct bt_gguf *g, struct bt_err *err)
{
    const struct bt_gguf_kv *kv = bt_gguf_find(g, "tokenizer.ggml.token_type");
    const struct bt_gguf_kv *scores = bt_gguf_find(g, "tokenizer.ggml.scores");
    size_t n = mf->tok.n_tokens;

    if (scores && (scores->type != BT_GGUF_ARR || scores->elem != BT_GGUF_F32 ||
                   scores->count != mf->tok.n_tokens)) {
        return BT_FAIL(err, BT_E_FORMAT,
                       "gguf: key tokenizer.ggml.scores: must be %zu values of float32", n);
    }
    if (kv && (kv->type != BT_GGUF_ARR || (kv->elem != BT_GGUF_I32 && kv->elem != BT_GGUF_U32) ||
               kv->count != n)) {
        return BT_FAIL(err, BT_E_FORMAT,
                       "gguf: key tokenizer.ggml.token_type: must be %zu values of int32", n);
    }
    mf->tok_types = bt_calloc(n, sizeof(*mf->tok_types));
    if (!mf->tok_types) {
        return BT_E_NOMEM;
    }
    for (size_t i = 0; i < n; i++) {
        mf->tok_types[i] = 1;
        if (kv) {
            memcpy(&mf->tok_types[i], kv->p + i * 4, 4);
        }
        if (mf->tok_types[i] < 0 || mf->tok_types[i] > 6) {
            return BT_FAIL(err, BT_E_FORMAT,
                           "gguf: key tokenizer.ggml.token_type: value %d of token %zu",
                           mf->tok_types[i], i);
        }
    }
    return BT_OK;
}

static int read_eos(struct bt_model_file *mf, const struct bt_gguf *g, struct bt_err *err)
{
    static const char *const keys[] = {"tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id",
                                       "tokenizer.ggml.eom_token_id"};
    int rc = BT_OK;

    for (size_t i = 0; rc == BT_OK && i < BT_ARRAY_LEN(keys); i++) {
        const struct bt_gguf_kv *kv = bt_gguf_find(g, keys[i]);
        int64_t id = -1;

        if (!kv) {
            continue;
        }
        if (!bt_gguf_as_int(kv, &id)) {
            return BT_FAIL(err, BT_E_FORMAT, "gguf: key %s: must be an integer", keys[i]);
        }
        rc = bt_model_eos_add(&mf->cfg, id, keys[i], err);
    }
    for (size_t i = 0; rc == BT_OK && i < mf->tok.n_tokens; i++) {
        if (mf->tok.types[i] != 3) {
            continue;
        }
        for (size_t k = 0; rc == BT_OK && k < BT_ARRAY_LEN(end_markers); k++) {
            if (bt_str_eq(mf->tok.tokens[i], bt_str_of(end_markers[k]))) {
                rc = bt_model_eos_add(&mf->cfg, (int64_t)i, "tokenizer.ggml.tokens", err);
            }
        }
    }
    return rc;
}

static int read_bos(struct bt_model_file *mf, const struct bt_gguf *g, struct bt_err *err)
{
    const struct bt_gguf_kv *kv = bt_gguf_find(g, "tokenizer.ggml.bos_token_id");
    const struct bt_gguf_kv *add = bt_gguf_find(g, "tokenizer.ggml.add_bos_token");
    int64_t id = -1;

    if (kv && (!bt_gguf_as_int(kv, &id) || id < 0 || id >= mf->cfg.n_vocab)) {
        return BT_FAIL(err, BT_E_FORMAT,
                       "gguf: key tokenizer.ggml.bos_token_id: not an id of the vocabulary");
    }
    mf->tok.bos_id = (int32_t)id;
    if (add) {
        if (!bt_gguf_as_bool(add, &mf->tok.add_bos)) {
            return BT_FAIL(err, BT_E_FORMAT,
                           "gguf: key tokenizer.ggml.add_bos_token: must be a bool");
        }
    } else {
        /* What the tools that write these files assume where they leave it out. */
        mf->tok.add_bos = id >= 0 && (bt_str_eq(mf->tok.model, BT_STR("llama")) ||
                                      bt_str_eq(mf->tok.pre, BT_STR("llama3")) ||
                                      bt_str_eq(mf->tok.pre, BT_STR("llama-v3")) ||
                                      bt_str_eq(mf->tok.pre, BT_STR("llama-bpe")));
    }
    return BT_OK;
}

static int read_tokenizer(struct bt_model_file *mf, const struct bt_gguf *g, struct bt_err *err)
{
    struct reader r = {g, "", err, BT_OK};
    struct bt_tok_source *tok = &mf->tok;
    int rc;

    tok->json = (struct bt_str){"", 0};
    tok->model = get_str(&r, "tokenizer.ggml.model");
    tok->pre = get_str(&r, "tokenizer.ggml.pre");
    tok->chat_template = get_str(&r, "tokenizer.chat_template");
    if (r.rc != BT_OK) {
        return r.rc;
    }
    rc = read_strings(g, "tokenizer.ggml.tokens", &mf->tok_tokens, &tok->n_tokens, err);
    if (rc == BT_OK) {
        rc = read_strings(g, "tokenizer.ggml.merges", &mf->tok_merges, &tok->n_merges, err);
    }
    if (rc != BT_OK) {
        return rc;
    }
    if (tok->n_tokens == 0 || tok->n_tokens > (size_t)mf->cfg.n_vocab) {
        return BT_FAIL(err, BT_E_FORMAT,
                       "gguf: key tokenizer.ggml.tokens: %zu tokens for an embedding of %d rows",
                       tok->n_tokens, mf->cfg.n_vocab);
    }
    rc = read_types(mf, g, err);
    tok->tokens = mf->tok_tokens;
    tok->merges = mf->tok_merges;
    tok->types = mf->tok_types;
    if (rc == BT_OK) {
        rc = read_bos(mf, g, err);
    }
    return rc == BT_OK ? read_eos(mf, g, err) : rc;
}

/* Divisors of a rope_freqs tensor, if the file has one. */
static int read_rope_factors(const struct bt_model_file *mf, float **ret, struct bt_err *err)
{
    const struct bt_tensor *t = bt_model_tensor(mf, "rope_freqs.weight");

    if (!t) {
        return BT_OK;
    }
    if (t->dtype != BT_DTYPE_F32 || t->n_dims != 1 || t->shape[0] != mf->cfg.head_dim / 2) {
        return BT_FAIL(err, BT_E_FORMAT, "tensor rope_freqs.weight: must be f32 with %d values",
                       mf->cfg.head_dim / 2);
    }
    *ret = malloc(t->bytes);
    if (!*ret) {
        return BT_E_NOMEM;
    }
    memcpy(*ret, t->data, t->bytes);
    return BT_OK;
}

int bt_gguf_load(struct bt_model_file *mf, const uint8_t *p, size_t n, struct bt_err *err)
{
    BT_AUTO(bt_free_ptr) float *factors = NULL;
    struct bt_gguf g;
    int rc = bt_gguf_parse(p, n, &g, err);

    if (rc != BT_OK) {
        return rc;
    }
    mf->tensors = g.tensors;
    mf->n_tensors = g.n_tensors;
    g.tensors = NULL;
    rc = read_config(&mf->cfg, &g, err);
    if (rc == BT_OK) {
        rc = read_rope_factors(mf, &factors, err);
    }
    if (rc == BT_OK) {
        rc = bt_model_rope_build(mf, factors, err);
    }
    if (rc == BT_OK) {
        mf->cfg.tied = bt_model_tensor(mf, "output.weight") == NULL;
        rc = bt_model_check(mf, err);
    }
    if (rc == BT_OK) {
        rc = read_tokenizer(mf, &g, err);
    }
    bt_gguf_fini(&g);
    return rc;
}
