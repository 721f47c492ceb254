/* The architectures: their names in both forms, their parameters and the shape of each.
 *
 * One table serves the translation of Hugging Face names and the completeness check: a parameter
 * that is missing, misshapen, or of no use to the architecture (a bias that nobody would add) is
 * refused by name, so that a wrong model never answers. */
#include "common/file/file_int.h"

#include <stdio.h>
#include <stdlib.h>

static const struct {
    const char *gguf, *hf_class, *hf_type;
    enum bt_arch arch;
} archs[] = {
    {"llama", "LlamaForCausalLM", "llama", BT_ARCH_LLAMA},
    {"llama", "MistralForCausalLM", "mistral", BT_ARCH_LLAMA},
    {"qwen2", "Qwen2ForCausalLM", "qwen2", BT_ARCH_QWEN2},
    {"qwen3", "Qwen3ForCausalLM", "qwen3", BT_ARCH_QWEN3},
};

enum dim { DIM_NONE, DIM_E, DIM_Q, DIM_KV, DIM_HEAD, DIM_FF, DIM_V };
enum when { ALWAYS, IF_QKV_BIAS, IF_QK_NORM, IF_UNTIED };

struct part {
    const char *gguf, *hf;
    enum dim rows, cols; /* cols DIM_NONE: one dimension */
    enum when when;
};

static const struct part top_parts[] = {
    {"token_embd.weight", "model.embed_tokens.weight", DIM_V, DIM_E, ALWAYS},
    {"output_norm.weight", "model.norm.weight", DIM_E, DIM_NONE, ALWAYS},
    {"output.weight", "lm_head.weight", DIM_V, DIM_E, IF_UNTIED},
};

static const struct part layer_parts[] = {
    {"attn_norm.weight", "input_layernorm.weight", DIM_E, DIM_NONE, ALWAYS},
    {"attn_q.weight", "self_attn.q_proj.weight", DIM_Q, DIM_E, ALWAYS},
    {"attn_k.weight", "self_attn.k_proj.weight", DIM_KV, DIM_E, ALWAYS},
    {"attn_v.weight", "self_attn.v_proj.weight", DIM_KV, DIM_E, ALWAYS},
    {"attn_q.bias", "self_attn.q_proj.bias", DIM_Q, DIM_NONE, IF_QKV_BIAS},
    {"attn_k.bias", "self_attn.k_proj.bias", DIM_KV, DIM_NONE, IF_QKV_BIAS},
    {"attn_v.bias", "self_attn.v_proj.bias", DIM_KV, DIM_NONE, IF_QKV_BIAS},
    {"attn_q_norm.weight", "self_attn.q_norm.weight", DIM_HEAD, DIM_NONE, IF_QK_NORM},
    {"attn_k_norm.weight", "self_attn.k_norm.weight", DIM_HEAD, DIM_NONE, IF_QK_NORM},
    {"attn_output.weight", "self_attn.o_proj.weight", DIM_E, DIM_Q, ALWAYS},
    {"ffn_norm.weight", "post_attention_layernorm.weight", DIM_E, DIM_NONE, ALWAYS},
    {"ffn_gate.weight", "mlp.gate_proj.weight", DIM_FF, DIM_E, ALWAYS},
    {"ffn_up.weight", "mlp.up_proj.weight", DIM_FF, DIM_E, ALWAYS},
    {"ffn_down.weight", "mlp.down_proj.weight", DIM_E, DIM_FF, ALWAYS},
};

int bt_arch_of_gguf(struct bt_str name)
{
    for (size_t i = 0; i < BT_ARRAY_LEN(archs); i++) {
        if (bt_str_eq(name, bt_str_of(archs[i].gguf))) {
            return (int)archs[i].arch;
        }
    }
    return -1;
}

int bt_arch_of_hf(struct bt_str name, bool is_model_type)
{
    for (size_t i = 0; i < BT_ARRAY_LEN(archs); i++) {
        if (bt_str_eq(name, bt_str_of(is_model_type ? archs[i].hf_type : archs[i].hf_class))) {
            return (int)archs[i].arch;
        }
    }
    return -1;
}

const char *bt_arch_name(enum bt_arch arch)
{
    for (size_t i = 0; i < BT_ARRAY_LEN(archs); i++) {
        if (archs[i].arch == arch) {
            return archs[i].gguf;
        }
    }
    return "unknown";
}

/* Decimal layer number followed by a point; the rest stays in *s. */
static bool take_layer(struct bt_str *s, int *ret)
{
    size_t i = 0;
    int n = 0;

    while (i < s->n && i < 6 && s->p[i] >= '0' && s->p[i] <= '9') {
        n = n * 10 + (s->p[i++] - '0');
    }
    if (i == 0 || i == s->n || s->p[i] != '.' || (s->p[0] == '0' && i > 1)) {
        return false;
    }
    *s = (struct bt_str){s->p + i + 1, s->n - i - 1};
    *ret = n;
    return true;
}

bool bt_tensor_name_of_hf(struct bt_str hf, char *ret, size_t cap)
{
    static const struct bt_str prefix = BT_STR("model.layers.");
    int layer;

    for (size_t i = 0; i < BT_ARRAY_LEN(top_parts); i++) {
        if (bt_str_eq(hf, bt_str_of(top_parts[i].hf))) {
            snprintf(ret, cap, "%s", top_parts[i].gguf);
            return true;
        }
    }
    if (hf.n <= prefix.n || memcmp(hf.p, prefix.p, prefix.n) != 0) {
        return false;
    }
    hf = (struct bt_str){hf.p + prefix.n, hf.n - prefix.n};
    if (!take_layer(&hf, &layer)) {
        return false;
    }
    for (size_t i = 0; i < BT_ARRAY_LEN(layer_parts); i++) {
        if (bt_str_eq(hf, bt_str_of(layer_parts[i].hf))) {
            snprintf(ret, cap, "blk.%d.%s", layer, layer_parts[i].gguf);
            return true;
        }
    }
    return false;
}

bool bt_tensor_is_ignorable(struct bt_str name)
{
    static const struct bt_str ends[] = {BT_STR(".rotary_emb.inv_freq"),
                                         BT_STR(".attn_rot_embd.weight")};

    for (size_t i = 0; i < BT_ARRAY_LEN(ends); i++) {
        if (name.n > ends[i].n && memcmp(name.p + name.n - ends[i].n, ends[i].p, ends[i].n) == 0) {
            return true;
        }
    }
    return bt_str_eq(name, BT_STR("rope_freqs.weight"));
}

static int64_t dim_of(const struct bt_model_config *c, enum dim d)
{
    switch (d) {
    case DIM_E:
        return c->d_model;
    case DIM_Q:
        return (int64_t)c->n_heads * c->head_dim;
    case DIM_KV:
        return (int64_t)c->n_kv_heads * c->head_dim;
    case DIM_HEAD:
        return c->head_dim;
    case DIM_FF:
        return c->d_ff;
    case DIM_V:
        return c->n_vocab;
    case DIM_NONE:
        break;
    }
    return 0;
}

static bool wanted(const struct bt_model_config *c, enum when when)
{
    switch (when) {
    case ALWAYS:
        return true;
    case IF_QKV_BIAS:
        return c->qkv_bias;
    case IF_QK_NORM:
        return c->qk_norm;
    case IF_UNTIED:
        return !c->tied;
    }
    return false;
}

/* Requires one parameter; `layer` < 0 for those outside the layers. Marks it in `seen`. */
static int check_part(
    struct bt_model_file *mf, const struct part *part, int layer, bool *seen, struct bt_err *err)
{
    int64_t rows = dim_of(&mf->cfg, part->rows), cols = dim_of(&mf->cfg, part->cols);
    bool flat = part->cols == DIM_NONE;
    struct bt_tensor *t;
    char name[64];

    if (layer < 0) {
        snprintf(name, sizeof(name), "%s", part->gguf);
    } else {
        snprintf(name, sizeof(name), "blk.%d.%s", layer, part->gguf);
    }
    t = (struct bt_tensor *)(uintptr_t)bt_model_tensor(mf, name);
    if (!t) {
        return BT_FAIL(err, BT_E_FORMAT, "tensor %s (%s) is missing", name, part->hf);
    }
    if (flat && t->n_dims == 2 && t->shape[0] == 1) {
        t->n_dims = 1;
        t->shape[0] = t->shape[1];
        t->shape[1] = 0;
    }
    if (t->n_dims != (flat ? 1 : 2) || t->shape[0] != rows || (!flat && t->shape[1] != cols)) {
        return BT_FAIL(err, BT_E_FORMAT,
                       "tensor %s (%s) has shape [%lld, %lld], the configuration says [%lld, %lld]",
                       name, part->hf, (long long)t->shape[0],
                       (long long)(t->n_dims == 2 ? t->shape[1] : 0), (long long)rows,
                       (long long)cols);
    }
    if (flat && bt_dtype_block_elems(t->dtype) != 1) {
        return BT_FAIL(err, BT_E_UNSUPPORTED, "tensor %s: %s is not supported for a vector", name,
                       bt_dtype_name(t->dtype));
    }
    seen[t - mf->tensors] = true;
    return BT_OK;
}

static int check_parts(struct bt_model_file *mf,
                       const struct part *parts,
                       size_t n,
                       int layer,
                       bool *seen,
                       struct bt_err *err)
{
    for (size_t i = 0; i < n; i++) {
        int rc =
            wanted(&mf->cfg, parts[i].when) ? check_part(mf, &parts[i], layer, seen, err) : BT_OK;

        if (rc != BT_OK) {
            return rc;
        }
    }
    return BT_OK;
}

/* Tensors that nothing above asked for: harmless buffers are dropped, the rest is refused. */
static int drop_unused(struct bt_model_file *mf, const bool *seen, struct bt_err *err)
{
    size_t n = 0;

    for (size_t i = 0; i < mf->n_tensors; i++) {
        struct bt_str name = mf->tensors[i].name;

        if (seen[i]) {
            mf->tensors[n++] = mf->tensors[i];
        } else if (!bt_tensor_is_ignorable(name) && !bt_str_eq(name, BT_STR("output.weight"))) {
            return BT_FAIL(err, BT_E_UNSUPPORTED,
                           "tensor %.*s is not a part of architecture %s with %d layers",
                           BT_NAME_ARG(name), bt_arch_name(mf->cfg.arch), mf->cfg.n_layers);
        }
    }
    mf->n_tensors = n;
    return BT_OK;
}

int bt_model_check(struct bt_model_file *mf, struct bt_err *err)
{
    const struct bt_tensor *embd = bt_model_tensor(mf, "token_embd.weight");
    struct bt_model_config *cfg = &mf->cfg;
    BT_AUTO(bt_free_ptr) bool *seen = NULL;
    int rc;

    if (!embd || embd->n_dims != 2 || embd->shape[0] > INT32_MAX) {
        return BT_FAIL(
            err, BT_E_FORMAT,
            "tensor token_embd.weight (model.embed_tokens.weight) is missing or not a matrix");
    }
    if (mf->n_tensors / BT_ARRAY_LEN(layer_parts) > (size_t)cfg->n_layers + 1) {
        return BT_FAIL(err, BT_E_FORMAT, "%zu tensors are too many for %d layers", mf->n_tensors,
                       cfg->n_layers);
    }
    cfg->n_vocab = (int)embd->shape[0];
    cfg->qkv_bias = cfg->arch == BT_ARCH_QWEN2 || bt_model_tensor(mf, "blk.0.attn_q.bias");
    cfg->qk_norm = cfg->arch == BT_ARCH_QWEN3;
    seen = bt_calloc(mf->n_tensors, sizeof(*seen));
    if (!seen) {
        return BT_E_NOMEM;
    }
    rc = check_parts(mf, top_parts, BT_ARRAY_LEN(top_parts), -1, seen, err);
    for (int i = 0; rc == BT_OK && i < cfg->n_layers; i++) {
        rc = check_parts(mf, layer_parts, BT_ARRAY_LEN(layer_parts), i, seen, err);
    }
    return rc == BT_OK ? drop_unused(mf, seen, err) : rc;
}
