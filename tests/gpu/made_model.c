/* See made_model.h. */
#include "tests/gpu/made_model.h"

#include "common/base/buf.h"
#include "kernels/core/half.h"

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define MAX_TENSORS 2048

struct tensor {
    char name[96];
    int rows, cols; /* cols 0: a vector */
};

struct maker {
    const struct made_model *m;
    struct tensor *tensors;
    int n;
    size_t elem;
};

static void add(struct maker *k, int layer, const char *name, int rows, int cols)
{
    struct tensor *t = &k->tensors[k->n++];

    if (layer < 0) {
        snprintf(t->name, sizeof(t->name), "%s.weight", name);
    } else {
        snprintf(t->name, sizeof(t->name), "model.layers.%d.%s", layer, name);
    }
    t->rows = rows;
    t->cols = cols;
}

static void list(struct maker *k)
{
    const struct made_model *m = k->m;
    int hd = m->heads * m->head_dim, kd = m->kv_heads * m->head_dim;

    add(k, -1, "model.embed_tokens", m->vocab, m->width);
    for (int l = 0; l < m->layers; l++) {
        add(k, l, "input_layernorm.weight", m->width, 0);
        add(k, l, "self_attn.q_proj.weight", hd, m->width);
        add(k, l, "self_attn.k_proj.weight", kd, m->width);
        add(k, l, "self_attn.v_proj.weight", kd, m->width);
        if (strcmp(m->arch, "qwen2") == 0) {
            add(k, l, "self_attn.q_proj.bias", hd, 0);
            add(k, l, "self_attn.k_proj.bias", kd, 0);
            add(k, l, "self_attn.v_proj.bias", kd, 0);
        }
        if (strcmp(m->arch, "qwen3") == 0) {
            add(k, l, "self_attn.q_norm.weight", m->head_dim, 0);
            add(k, l, "self_attn.k_norm.weight", m->head_dim, 0);
        }
        add(k, l, "self_attn.o_proj.weight", m->width, hd);
        add(k, l, "post_attention_layernorm.weight", m->width, 0);
        add(k, l, "mlp.gate_proj.weight", m->ff, m->width);
        add(k, l, "mlp.up_proj.weight", m->ff, m->width);
        add(k, l, "mlp.down_proj.weight", m->width, m->ff);
    }
    add(k, -1, "model.norm", m->width, 0);
    if (!m->tied) {
        add(k, -1, "lm_head", m->vocab, m->width);
    }
}

static size_t elems(const struct tensor *t)
{
    return (size_t)t->rows * (size_t)(t->cols ? t->cols : 1);
}

static bool write_config(const struct made_model *m, const char *dir)
{
    static const struct {
        const char *arch, *class;
    } classes[] = {{"llama", "LlamaForCausalLM"},
                   {"qwen2", "Qwen2ForCausalLM"},
                   {"qwen3", "Qwen3ForCausalLM"}};
    char path[4200];
    const char *class = "";
    FILE *f;

    for (size_t i = 0; i < BT_ARRAY_LEN(classes); i++) {
        class = strcmp(m->arch, classes[i].arch) == 0 ? classes[i].class : class;
    }
    snprintf(path, sizeof(path), "%s/config.json", dir);
    f = fopen(path, "w");
    if (!f) {
        return false;
    }
    fprintf(f,
            "{\"architectures\": [\"%s\"], \"model_type\": \"%s\", \"hidden_act\": \"silu\", "
            "\"num_hidden_layers\": %d, \"hidden_size\": %d, \"num_attention_heads\": %d, "
            "\"num_key_value_heads\": %d, \"head_dim\": %d, \"intermediate_size\": %d, "
            "\"vocab_size\": %d, \"max_position_embeddings\": %d, \"rms_norm_eps\": 1e-5, "
            "\"rope_theta\": 500000.0, \"tie_word_embeddings\": %s, \"eos_token_id\": 0}\n",
            class, m->arch, m->layers, m->width, m->heads, m->kv_heads, m->head_dim, m->ff,
            m->vocab, m->ctx, m->tied ? "true" : "false");
    fclose(f);
    snprintf(path, sizeof(path), "%s/tokenizer.json", dir);
    f = fopen(path, "w");
    if (!f) {
        return false;
    }
    fputs("{\"added_tokens\": []}\n", f);
    return fclose(f) == 0;
}

static uint32_t next_random(uint64_t *s)
{
    *s = *s * 6364136223846793005u + 1442695040888963407u; /* Knuth's MMIX generator */
    return (uint32_t)(*s >> 33);
}

/* Norms about 1, biases small, matrices so that activations keep their size. */
static float value(const struct tensor *t, uint64_t *seed)
{
    float r = (float)next_random(seed) / 1073741824.0f - 1;

    if (t->cols == 0) {
        return strstr(t->name, "bias") ? r * 0.5f : 1 + r * 0.3f;
    }
    return r * (strstr(t->name, "embed") ? 1 : 1.7f / __builtin_sqrtf((float)t->cols));
}

static void write_values(const struct maker *k, FILE *f)
{
    uint64_t seed = 12345;

    for (int i = 0; i < k->n; i++) {
        const struct tensor *t = &k->tensors[i];

        for (size_t e = 0; e < elems(t); e++) {
            float x = value(t, &seed);
            uint16_t h = k->m->dtype[0] == 'B' ? kn_f32_to_bf16(x) : kn_f32_to_f16(x);

            fwrite(k->elem == 4 ? (const void *)&x : (const void *)&h, k->elem, 1, f);
        }
    }
}

static bool write_weights(const struct maker *k, const char *dir)
{
    char path[4200], *head = NULL;
    size_t at = 0, n = 0;
    uint64_t size;
    FILE *h = open_memstream(&head, &n), *f;
    bool ok;

    for (int i = 0; i < k->n; i++) {
        const struct tensor *t = &k->tensors[i];
        size_t end = at + elems(t) * k->elem;

        fprintf(h, "%s\"%s\":{\"dtype\":\"%s\",\"shape\":[%d", i ? "," : "{", t->name, k->m->dtype,
                t->rows);
        if (t->cols) {
            fprintf(h, ",%d", t->cols);
        }
        fprintf(h, "],\"data_offsets\":[%zu,%zu]}", at, end);
        at = end;
    }
    fputc('}', h);
    while (ftell(h) % 64) {
        fputc(' ', h);
    }
    fclose(h);
    snprintf(path, sizeof(path), "%s/model.safetensors", dir);
    f = fopen(path, "w");
    size = n;
    ok = f && fwrite(&size, sizeof(size), 1, f) == 1 && fwrite(head, n, 1, f) == 1;
    free(head);
    if (ok && !k->m->holes) {
        write_values(k, f);
    }
    ok = ok && fflush(f) == 0 && (!k->m->holes || ftruncate(fileno(f), (off_t)(8 + n + at)) == 0);
    if (f) {
        fclose(f);
    }
    return ok;
}

int made_model_open(const struct made_model *m, struct bt_model_file **ret, struct bt_err *err)
{
    static const char *const files[] = {"config.json", "tokenizer.json", "model.safetensors"};
    const char *tmp = getenv("TMPDIR");
    struct maker k = {.m = m, .elem = m->dtype[0] == 'F' && m->dtype[1] == '3' ? 4 : 2};
    char dir[4096], path[4200];
    int rc;

    snprintf(dir, sizeof(dir), "%s/baton-made.XXXXXX", tmp ? tmp : "/tmp");
    if (!mkdtemp(dir)) {
        return BT_FAIL_SYS(err, BT_E_IO, "cannot make %s", dir);
    }
    k.tensors = bt_calloc(MAX_TENSORS, sizeof(*k.tensors));
    list(&k);
    rc = write_config(m, dir) && write_weights(&k, dir)
             ? bt_model_open(dir, ret, err)
             : BT_FAIL_SYS(err, BT_E_IO, "cannot write a model to %s", dir);
    free(k.tensors);
    for (size_t i = 0; i < BT_ARRAY_LEN(files); i++) {
        snprintf(path, sizeof(path), "%s/%s", dir, files[i]);
        unlink(path);
    }
    rmdir(dir);
    return rc;
}
