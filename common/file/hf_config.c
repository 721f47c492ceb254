/* Settings of a Hugging Face directory: config.json, generation_config.json, tokenizer_config.json.
 *
 * Which ids end an answer (field report STOP-04): the union of eos_token_id of
 * generation_config.json, eos_token_id of config.json (each one id or a list) and the id of
 * eos_token of tokenizer_config.json. */
#include "common/file/hf.h"

#include <stdio.h>
#include <stdlib.h>

#define REQUIRED INT64_MIN

/* Reads many keys and remembers the first failure, so that callers read like a table. */
struct reader {
    const json_t *obj;
    const char *what; /* "config.json" or "config.json: rope_scaling" */
    struct bt_err *err;
    int rc;
};

/* A key that is null is as good as absent. */
static const json_t *get(const struct reader *r, const char *key)
{
    const json_t *v = json_object_get(r->obj, key);

    return json_is_null(v) ? NULL : v;
}

static void bad(struct reader *r, const char *key, const char *want)
{
    if (r->rc == BT_OK) {
        r->rc = BT_FAIL(r->err, BT_E_FORMAT, "%s: %s must be %s", r->what, key, want);
    }
}

static int64_t get_int(struct reader *r, const char *key, int64_t dflt)
{
    const json_t *v = get(r, key);

    if (!v) {
        if (dflt == REQUIRED) {
            bad(r, key, "given");
        }
        return dflt == REQUIRED ? 0 : dflt;
    }
    if (!json_is_integer(v) || json_integer_value(v) < 0 || json_integer_value(v) > INT32_MAX) {
        bad(r, key, "a positive integer");
        return 0;
    }
    return json_integer_value(v);
}

static double get_float(struct reader *r, const char *key, double dflt)
{
    const json_t *v = get(r, key);

    if (v && !json_is_number(v)) {
        bad(r, key, "a number");
    }
    return v ? json_number_value(v) : dflt;
}

static bool get_bool(struct reader *r, const char *key, bool dflt)
{
    const json_t *v = get(r, key);

    if (v && !json_is_boolean(v)) {
        bad(r, key, "true or false");
    }
    return v ? json_is_true(v) : dflt;
}

/* NULL if absent. */
static const char *get_str(struct reader *r, const char *key)
{
    const json_t *v = get(r, key);

    if (v && !json_is_string(v)) {
        bad(r, key, "a string");
    }
    return json_string_value(v);
}

static void unsupported(struct reader *r, const char *key, const char *why)
{
    if (r->rc == BT_OK) {
        r->rc = BT_FAIL(r->err, BT_E_UNSUPPORTED, "%s: %s %s", r->what, key, why);
    }
}

static void read_arch(struct reader *r, struct bt_model_config *c)
{
    const json_t *list = get(r, "architectures");
    const char *type = get_str(r, "model_type");
    const char *name = json_string_value(json_array_get(list, 0));
    int by_type = type ? bt_arch_of_hf(bt_str_of(type), true) : -1;
    int id = name ? bt_arch_of_hf(bt_str_of(name), false) : by_type;

    if (r->rc != BT_OK) {
        return;
    }
    if (!name && !type) {
        bad(r, "architectures", "given");
    } else if (id < 0) {
        r->rc = BT_FAIL(r->err, BT_E_UNSUPPORTED, "%s: architecture \"%.80s\" is not supported",
                        r->what, name ? name : type);
    } else if (type && by_type != id) {
        r->rc = BT_FAIL(r->err, BT_E_UNSUPPORTED,
                        "%s: model_type \"%.80s\" of architecture \"%.80s\" is not supported",
                        r->what, type, name);
    }
    c->arch = id < 0 ? BT_ARCH_LLAMA : (enum bt_arch)id;
}

/* The object that describes rotary scaling: rope_parameters of newer files (possibly one level down
 * under the layer type), else rope_scaling. NULL if there is none. */
static const json_t *rope_object(struct reader *r)
{
    const json_t *params = get(r, "rope_parameters"), *old = get(r, "rope_scaling");
    const json_t *full = json_object_get(params, "full_attention");

    if ((params && !json_is_object(params)) || (old && !json_is_object(old))) {
        bad(r, params ? "rope_parameters" : "rope_scaling", "an object");
        return NULL;
    }
    if (full && json_object_size(params) != 1) {
        unsupported(r, "rope_parameters", "per layer type are not supported");
    }
    return full ? full : params ? params : old;
}

static void read_llama3(struct reader *r, const struct reader *top, struct bt_model_config *c)
{
    static const char key[] = "original_max_position_embeddings";
    struct reader outer = *top;

    c->rope_scaling = BT_ROPE_LLAMA3;
    c->rope_low_freq_factor = (float)get_float(r, "low_freq_factor", 0);
    c->rope_high_freq_factor = (float)get_float(r, "high_freq_factor", 0);
    c->rope_orig_ctx = (int)get_int(r, key, get_int(&outer, key, 0));
}

static void read_rope(struct reader *top, struct bt_model_config *c)
{
    struct reader r = {rope_object(top), "config.json: rope scaling", top->err, top->rc};
    const char *type = get_str(&r, "rope_type");

    type = type ? type : get_str(&r, "type");
    c->rope_interleaved = false;
    c->rope_theta = (float)get_float(&r, "rope_theta", get_float(top, "rope_theta", 10000.0));
    c->rope_factor = (float)get_float(&r, "factor", 1.0);
    if (r.rc != BT_OK) {
        top->rc = r.rc;
        return;
    }
    if (!type) {
        if (get(&r, "factor")) {
            bad(&r, "rope_type", "given");
        }
    } else if (strcmp(type, "linear") == 0) {
        c->rope_scaling = BT_ROPE_LINEAR;
    } else if (strcmp(type, "llama3") == 0) {
        read_llama3(&r, top, c);
    } else if (strcmp(type, "default") != 0) {
        r.rc = BT_FAIL(r.err, BT_E_UNSUPPORTED, "%s \"%.40s\" is not supported", r.what, type);
    }
    if (c->rope_scaling == BT_ROPE_NONE) {
        c->rope_factor = 1.0f;
    }
    if (get_float(&r, "attention_factor", 1.0) != 1.0) {
        unsupported(&r, "attention_factor", "is not supported");
    }
    if (get_float(&r, "partial_rotary_factor", get_float(top, "partial_rotary_factor", 1.0)) !=
        1.0) {
        unsupported(&r, "partial_rotary_factor", "other than 1 is not supported");
    }
    top->rc = top->rc == BT_OK ? r.rc : top->rc;
}

/* Settings that change the computation in ways this engine does not know. */
static void refuse_variants(struct reader *r, const struct bt_model_config *c)
{
    const json_t *quant = get(r, "quantization_config"), *layers = get(r, "layer_types");
    const char *act = get_str(r, "hidden_act"), *method;
    int64_t window = c->arch == BT_ARCH_LLAMA ? get_int(r, "sliding_window", 0) : 0;

    if (quant) {
        method = json_string_value(json_object_get(quant, "quant_method"));
        if (r->rc == BT_OK) {
            r->rc = BT_FAIL(r->err, BT_E_UNSUPPORTED,
                            "%s: quantization_config (%.40s) is not supported", r->what,
                            method ? method : "no method");
        }
    }
    if (act && strcmp(act, "silu") != 0) {
        unsupported(r, "hidden_act", "other than silu is not supported");
    }
    if (get_bool(r, "mlp_bias", false)) {
        unsupported(r, "mlp_bias", "is not supported");
    }
    if (get_bool(r, "use_sliding_window", false)) {
        unsupported(r, "use_sliding_window", "is not supported");
    }
    for (size_t i = 0; i < json_array_size(layers); i++) {
        const char *kind = json_string_value(json_array_get(layers, i));

        if (!kind || strcmp(kind, "full_attention") != 0) {
            unsupported(r, "layer_types", "other than full_attention are not supported");
        }
    }
    if (r->rc == BT_OK && window > 0 && window < c->n_ctx) {
        r->rc = BT_FAIL(r->err, BT_E_UNSUPPORTED,
                        "%s: sliding_window %lld is smaller than the context of %d "
                        "(max_position_embeddings), which is not supported",
                        r->what, (long long)window, c->n_ctx);
    }
}

int bt_hf_read_config(struct bt_model_file *mf, const json_t *config, struct bt_err *err)
{
    struct reader r = {config, "config.json", err, BT_OK};
    struct bt_model_config *c = &mf->cfg;

    read_arch(&r, c);
    if (r.rc != BT_OK) {
        return r.rc;
    }
    c->n_layers = (int)get_int(&r, "num_hidden_layers", REQUIRED);
    c->d_model = (int)get_int(&r, "hidden_size", REQUIRED);
    c->n_heads = (int)get_int(&r, "num_attention_heads", REQUIRED);
    c->n_kv_heads = (int)get_int(&r, "num_key_value_heads",
                                 c->arch == BT_ARCH_LLAMA ? (int64_t)c->n_heads : REQUIRED);
    c->d_ff = (int)get_int(&r, "intermediate_size", REQUIRED);
    c->n_vocab = (int)get_int(&r, "vocab_size", REQUIRED);
    c->n_ctx = (int)get_int(&r, "max_position_embeddings", REQUIRED);
    c->rms_eps = (float)get_float(&r, "rms_norm_eps", 1e-6);
    c->tied = get_bool(&r, "tie_word_embeddings", false);
    /* Qwen3 writes it always; its class says 128 where it is left out. */
    c->head_dim = (int)get_int(&r, "head_dim", c->arch == BT_ARCH_QWEN3 ? 128 : 0);
    if (r.rc == BT_OK && c->head_dim == 0) {
        if (c->n_heads == 0 || c->d_model % c->n_heads != 0) {
            return BT_FAIL(err, BT_E_FORMAT,
                           "config.json: head_dim is missing and %d heads do not divide %d",
                           c->n_heads, c->d_model);
        }
        c->head_dim = c->d_model / c->n_heads;
    }
    read_rope(&r, c);
    refuse_variants(&r, c);
    return r.rc == BT_OK ? bt_model_config_check(c, err) : r.rc;
}

/* --- tokenizer side --- */

/* eos_token_id of one file: an id or a list of ids. */
static int
add_eos_ids(struct bt_model_config *c, const json_t *obj, const char *what, struct bt_err *err)
{
    const json_t *v = json_object_get(obj, "eos_token_id");
    size_t n = json_is_array(v) ? json_array_size(v) : 1;
    int rc = BT_OK;

    if (!v || json_is_null(v)) {
        return BT_OK;
    }
    for (size_t i = 0; rc == BT_OK && i < n; i++) {
        const json_t *id = json_is_array(v) ? json_array_get(v, i) : v;

        rc = json_is_integer(id) ? bt_model_eos_add(c, json_integer_value(id), what, err)
                                 : BT_FAIL(err, BT_E_FORMAT, "%s: must be integers", what);
    }
    return rc;
}

/* Text of a token setting: a string, or an object with "content". NULL if there is none. */
static const char *token_text(const json_t *tok, const char *key)
{
    const json_t *v = json_object_get(tok, key);

    return json_string_value(json_is_object(v) ? json_object_get(v, "content") : v);
}

/* Id of an added token by its text: tokenizer_config.json first, then tokenizer.json. -1 if there
 * is no such token. */
static int64_t token_id(const json_t *tok, const json_t *added, const char *text)
{
    const char *key;
    json_t *v;
    size_t i;

    json_object_foreach(json_object_get(tok, "added_tokens_decoder"), key, v)
    {
        const char *content = json_string_value(json_object_get(v, "content"));

        if (content && strcmp(content, text) == 0) {
            char *end;
            long long id = strtoll(key, &end, 10);

            return end != key && *end == 0 ? id : -1;
        }
    }
    json_array_foreach(json_object_get(added, "added_tokens"), i, v)
    {
        const char *content = json_string_value(json_object_get(v, "content"));

        if (content && strcmp(content, text) == 0 && json_is_integer(json_object_get(v, "id"))) {
            return json_integer_value(json_object_get(v, "id"));
        }
    }
    return -1;
}

/* {"added_tokens": ...} of tokenizer.json without the vocabulary; NULL if it has none. */
static int read_added(struct bt_str text, json_t **ret, struct bt_err *err)
{
    static const struct bt_json_caps caps = {16u << 20, 1000000, 8};
    struct bt_str v = {0};
    struct bt_buf b = {0};
    int rc;

    if (!bt_json_top_value(text, "added_tokens", &v) || v.n > caps.bytes) {
        return BT_OK;
    }
    rc = bt_buf_printf(&b, "{\"added_tokens\":");
    if (rc == BT_OK) {
        rc = bt_buf_add(&b, v.p, v.n);
    }
    if (rc == BT_OK) {
        rc = bt_buf_add(&b, "}", 1);
    }
    if (rc == BT_OK) {
        rc = bt_json_parse(bt_buf_str(&b), "tokenizer.json: added_tokens", &caps, ret, err);
    }
    bt_buf_fini(&b);
    return rc;
}

/* The template as bytes that live as long as mf. */
static int read_template(struct bt_model_file *mf, const struct bt_hf_settings *s)
{
    const json_t *v = json_object_get(s->tok, "chat_template");
    const char *text = json_string_value(v);
    size_t n = json_string_length(v);

    if (s->jinja.n) {
        mf->tok.chat_template = s->jinja;
        return BT_OK;
    }
    for (size_t i = 0; i < json_array_size(v); i++) {
        const json_t *e = json_array_get(v, i);
        const char *name = json_string_value(json_object_get(e, "name"));

        if (name && strcmp(name, "default") == 0) {
            text = json_string_value(json_object_get(e, "template"));
            n = json_string_length(json_object_get(e, "template"));
        }
    }
    if (!text) {
        return BT_OK;
    }
    mf->tok_text = malloc(n + 1);
    if (!mf->tok_text) {
        return BT_E_NOMEM;
    }
    memcpy(mf->tok_text, text, n);
    mf->tok.chat_template = (struct bt_str){mf->tok_text, n};
    return BT_OK;
}

static int read_bos(struct bt_model_file *mf,
                    const struct bt_hf_settings *s,
                    const json_t *added,
                    struct bt_err *err)
{
    struct reader r = {s->tok, "tokenizer_config.json", err, BT_OK};
    const char *text = token_text(s->tok, "bos_token");
    const json_t *conf = json_object_get(s->config, "bos_token_id");
    int64_t id = text ? token_id(s->tok, added, text) : -1;

    if (id < 0 && json_is_integer(conf)) {
        id = json_integer_value(conf);
    }
    mf->tok.add_bos = get_bool(&r, "add_bos_token", false);
    if (r.rc != BT_OK) {
        return r.rc;
    }
    mf->tok.bos_id = id >= 0 && id < mf->cfg.n_vocab ? (int32_t)id : -1;
    return BT_OK;
}

int bt_hf_read_tokenizer(struct bt_model_file *mf,
                         const struct bt_hf_settings *s,
                         struct bt_err *err)
{
    const char *eos = token_text(s->tok, "eos_token");
    json_t *added = NULL;
    int64_t id = -1;
    int rc = read_added(mf->tok.json, &added, err);

    if (rc != BT_OK) {
        return rc;
    }
    rc = add_eos_ids(&mf->cfg, s->gen, "generation_config.json: eos_token_id", err);
    if (rc == BT_OK) {
        rc = add_eos_ids(&mf->cfg, s->config, "config.json: eos_token_id", err);
    }
    if (rc == BT_OK && eos) {
        id = token_id(s->tok, added, eos);
        if (id >= 0) {
            rc = bt_model_eos_add(&mf->cfg, id, "tokenizer_config.json: eos_token", err);
        } else if (mf->cfg.n_eos == 0) {
            rc = BT_FAIL(err, BT_E_FORMAT,
                         "tokenizer_config.json: eos_token \"%.40s\" is no added token", eos);
        }
    }
    if (rc == BT_OK) {
        rc = read_bos(mf, s, added, err);
    }
    json_decref(added);
    return rc == BT_OK ? read_template(mf, s) : rc;
}
