/* See mk.h. */
#include "tests/unit/common/file/mk.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <unistd.h>

static void ok(int rc)
{
    BT_BUG_ON(rc != BT_OK);
}

void mk_raw(struct bt_buf *b, const void *p, size_t n)
{
    ok(bt_buf_add(b, p, n));
}

void mk_str(struct bt_buf *b, const char *s)
{
    uint64_t n = strlen(s);

    mk_raw(b, &n, 8);
    mk_raw(b, s, n);
}

void mk_key(struct mk_gguf *g, const char *key, uint32_t type)
{
    mk_str(&g->kvs, key);
    mk_raw(&g->kvs, &type, 4);
    g->n_kvs++;
}

void mk_kv_u32(struct mk_gguf *g, const char *key, uint32_t v)
{
    mk_key(g, key, 4);
    mk_raw(&g->kvs, &v, 4);
}

void mk_kv_f32(struct mk_gguf *g, const char *key, float v)
{
    mk_key(g, key, 6);
    mk_raw(&g->kvs, &v, 4);
}

void mk_kv_bool(struct mk_gguf *g, const char *key, bool v)
{
    uint8_t b = v;

    mk_key(g, key, 7);
    mk_raw(&g->kvs, &b, 1);
}

void mk_kv_str(struct mk_gguf *g, const char *key, const char *v)
{
    mk_key(g, key, 8);
    mk_str(&g->kvs, v);
}

static void array(struct mk_gguf *g, const char *key, uint32_t elem, uint64_t n)
{
    mk_key(g, key, 9);
    mk_raw(&g->kvs, &elem, 4);
    mk_raw(&g->kvs, &n, 8);
}

void mk_kv_strs(struct mk_gguf *g, const char *key, const char *const *v, size_t n)
{
    array(g, key, 8, n);
    for (size_t i = 0; i < n; i++) {
        mk_str(&g->kvs, v[i]);
    }
}

void mk_kv_i32s(struct mk_gguf *g, const char *key, const int32_t *v, size_t n)
{
    array(g, key, 5, n);
    mk_raw(&g->kvs, v, n * sizeof(*v));
}

static void zeros(struct bt_buf *b, size_t n)
{
    static const char zero[256];

    while (n > 0) {
        size_t k = BT_MIN(n, sizeof(zero));

        mk_raw(b, zero, k);
        n -= k;
    }
}

void mk_tensor_at(struct mk_gguf *g,
                  const char *name,
                  uint32_t type,
                  int n_dims,
                  const uint64_t *dims,
                  uint64_t offset)
{
    uint32_t n = (uint32_t)n_dims;

    mk_str(&g->infos, name);
    mk_raw(&g->infos, &n, 4);
    mk_raw(&g->infos, dims, (size_t)n_dims * 8);
    mk_raw(&g->infos, &type, 4);
    mk_raw(&g->infos, &offset, 8);
    g->n_tensors++;
}

static size_t align_of(const struct mk_gguf *g)
{
    return g->alignment ? g->alignment : 32;
}

void mk_tensor(struct mk_gguf *g, const char *name, uint32_t type, int n_dims, const uint64_t *dims)
{
    /* f32 and f16 only; blocks of quantized types are cut from the same cloth: 32 elements. */
    size_t n = type == 0 ? 4 : 2;

    for (int i = 0; i < n_dims; i++) {
        n *= dims[i];
    }
    if (type == 3) {
        n = n / 2 / 32 * 20;
    }
    mk_tensor_at(g, name, type, n_dims, dims, g->data.n);
    zeros(&g->data, BT_DIV_UP(n, align_of(g)) * align_of(g));
}

void mk_gguf_write(const struct mk_gguf *g, struct bt_buf *ret)
{
    uint32_t version = g->version ? g->version : 3;

    *ret = (struct bt_buf){0};
    mk_raw(ret, "GGUF", 4);
    mk_raw(ret, &version, 4);
    mk_raw(ret, &g->n_tensors, 8);
    mk_raw(ret, &g->n_kvs, 8);
    mk_raw(ret, g->kvs.p, g->kvs.n);
    mk_raw(ret, g->infos.p, g->infos.n);
    zeros(ret, (align_of(g) - ret->n % align_of(g)) % align_of(g));
    mk_raw(ret, g->data.p, g->data.n);
}

void mk_gguf_fini(struct mk_gguf *g)
{
    bt_buf_fini(&g->kvs);
    bt_buf_fini(&g->infos);
    bt_buf_fini(&g->data);
    *g = (struct mk_gguf){0};
}

void mk_gguf_settings(struct mk_gguf *g, const struct mk_spec *s)
{
    const struct {
        const char *key;
        int v;
    } rows[] = {
        {"block_count", s->layers},     {"context_length", 512},
        {"embedding_length", s->e},     {"feed_forward_length", s->f},
        {"attention.head_count", s->h}, {"attention.head_count_kv", s->hkv},
    };
    char key[96];

    mk_kv_str(g, "general.architecture", s->arch);
    mk_kv_str(g, "general.name", "tiny\nmodel \xc3\xa9\xff");
    for (size_t i = 0; i < BT_ARRAY_LEN(rows); i++) {
        snprintf(key, sizeof(key), "%s.%s", s->arch, rows[i].key);
        mk_kv_u32(g, key, (uint32_t)rows[i].v);
    }
    if (s->h * s->d != s->e) {
        snprintf(key, sizeof(key), "%s.attention.key_length", s->arch);
        mk_kv_u32(g, key, (uint32_t)s->d);
        snprintf(key, sizeof(key), "%s.attention.value_length", s->arch);
        mk_kv_u32(g, key, (uint32_t)s->d);
    }
    snprintf(key, sizeof(key), "%s.attention.layer_norm_rms_epsilon", s->arch);
    mk_kv_f32(g, key, 1e-5f);
}

void mk_gguf_tokenizer(struct mk_gguf *g)
{
    static const char *const tokens[MK_N_TOKENS] = {
        "<|endoftext|>", "<|im_start|>", "<|im_end|>", "a", "b", "c", "ab", "<|eot_id|>"};
    static const int32_t types[MK_N_TOKENS] = {3, 3, 3, 1, 1, 1, 1, 1};
    static const char *const merges[] = {"a b"};

    mk_kv_str(g, "tokenizer.ggml.model", "gpt2");
    mk_kv_str(g, "tokenizer.ggml.pre", "smollm");
    mk_kv_strs(g, "tokenizer.ggml.tokens", tokens, MK_N_TOKENS);
    mk_kv_i32s(g, "tokenizer.ggml.token_type", types, MK_N_TOKENS);
    mk_kv_strs(g, "tokenizer.ggml.merges", merges, 1);
}

/* Name, rows, columns (0 = vector) of every parameter, by turns. */
struct param {
    char gguf[64], hf[96];
    int rows, cols;
};

static size_t params_of(const struct mk_spec *s, struct param *ret, size_t cap)
{
    bool bias = s->bias || strcmp(s->arch, "qwen2") == 0, qwen3 = strcmp(s->arch, "qwen3") == 0;
    const struct {
        const char *gguf, *hf;
        int rows, cols;
        bool on;
    } parts[] = {
        {"attn_norm.weight", "input_layernorm.weight", s->e, 0, true},
        {"attn_q.weight", "self_attn.q_proj.weight", s->h * s->d, s->e, true},
        {"attn_k.weight", "self_attn.k_proj.weight", s->hkv * s->d, s->e, true},
        {"attn_v.weight", "self_attn.v_proj.weight", s->hkv * s->d, s->e, true},
        {"attn_output.weight", "self_attn.o_proj.weight", s->e, s->h * s->d, true},
        {"attn_q.bias", "self_attn.q_proj.bias", s->h * s->d, 0, bias},
        {"attn_k.bias", "self_attn.k_proj.bias", s->hkv * s->d, 0, bias},
        {"attn_v.bias", "self_attn.v_proj.bias", s->hkv * s->d, 0, bias},
        {"attn_q_norm.weight", "self_attn.q_norm.weight", s->d, 0, qwen3},
        {"attn_k_norm.weight", "self_attn.k_norm.weight", s->d, 0, qwen3},
        {"ffn_norm.weight", "post_attention_layernorm.weight", s->e, 0, true},
        {"ffn_gate.weight", "mlp.gate_proj.weight", s->f, s->e, true},
        {"ffn_up.weight", "mlp.up_proj.weight", s->f, s->e, true},
        {"ffn_down.weight", "mlp.down_proj.weight", s->e, s->f, true},
    };
    size_t n = 0;

    ret[n++] = (struct param){"token_embd.weight", "model.embed_tokens.weight", s->v, s->e};
    ret[n++] = (struct param){"output_norm.weight", "model.norm.weight", s->e, 0};
    if (!s->tied) {
        ret[n++] = (struct param){"output.weight", "lm_head.weight", s->v, s->e};
    }
    for (int i = 0; i < s->layers; i++) {
        for (size_t k = 0; k < BT_ARRAY_LEN(parts); k++) {
            if (!parts[k].on) {
                continue;
            }
            BT_BUG_ON(n == cap);
            snprintf(ret[n].gguf, sizeof(ret[n].gguf), "blk.%d.%s", i, parts[k].gguf);
            snprintf(ret[n].hf, sizeof(ret[n].hf), "model.layers.%d.%s", i, parts[k].hf);
            ret[n].rows = parts[k].rows;
            ret[n++].cols = parts[k].cols;
        }
    }
    return n;
}

void mk_gguf_tensors(struct mk_gguf *g, const struct mk_spec *s)
{
    static struct param params[128];
    size_t n = params_of(s, params, BT_ARRAY_LEN(params));

    for (size_t i = 0; i < n; i++) {
        uint64_t rows = (uint64_t)params[i].rows, cols = (uint64_t)params[i].cols;

        if (cols) {
            mk_tensor(g, params[i].gguf, 1, 2, (const uint64_t[]){cols, rows});
        } else {
            mk_tensor(g, params[i].gguf, 0, 1, &rows);
        }
    }
}

void mk_gguf_model(struct mk_gguf *g, const struct mk_spec *s)
{
    mk_gguf_settings(g, s);
    mk_gguf_tokenizer(g);
    mk_gguf_tensors(g, s);
}

/* One safetensors file with parameters [from, to). */
static void
write_shard(const char *dir, const char *name, const struct param *params, size_t from, size_t to)
{
    struct bt_buf head = {0}, file = {0};
    size_t at = 0;
    uint64_t n;

    ok(bt_buf_printf(&head, "{\"__metadata__\":{\"format\":\"pt\"}"));
    for (size_t i = from; i < to; i++) {
        size_t rows = (size_t)params[i].rows, cols = (size_t)params[i].cols;
        size_t bytes = rows * (cols ? cols : 1) * 2;

        ok(bt_buf_printf(&head, ",\"%s\":{\"dtype\":\"BF16\",\"shape\":[%zu", params[i].hf, rows));
        if (cols) {
            ok(bt_buf_printf(&head, ",%zu", cols));
        }
        ok(bt_buf_printf(&head, "],\"data_offsets\":[%zu,%zu]}", at, at + bytes));
        at += bytes;
    }
    ok(bt_buf_printf(&head, "}"));
    while (head.n % 8) {
        mk_raw(&head, " ", 1);
    }
    n = head.n;
    mk_raw(&file, &n, 8);
    mk_raw(&file, head.p, head.n);
    zeros(&file, at);
    mk_file(dir, name, file.p, file.n);
    bt_buf_fini(&head);
    bt_buf_fini(&file);
}

static void write_weights(const char *dir, const struct mk_spec *s, int shards)
{
    static struct param params[128];
    size_t n = params_of(s, params, BT_ARRAY_LEN(params));
    struct bt_buf index = {0};
    char name[64];

    if (shards == 1) {
        write_shard(dir, "model.safetensors", params, 0, n);
        return;
    }
    ok(bt_buf_printf(&index, "{\"metadata\":{},\"weight_map\":{"));
    for (int i = 0; i < shards; i++) {
        size_t from = n * (size_t)i / (size_t)shards, to = n * (size_t)(i + 1) / (size_t)shards;

        snprintf(name, sizeof(name), "model-%05d-of-%05d.safetensors", i + 1, shards);
        write_shard(dir, name, params, from, to);
        for (size_t k = from; k < to; k++) {
            ok(bt_buf_printf(&index, "%s\"%s\":\"%s\"", k ? "," : "", params[k].hf, name));
        }
    }
    ok(bt_buf_printf(&index, "}}"));
    mk_file(dir, "model.safetensors.index.json", index.p, index.n);
    bt_buf_fini(&index);
}

void mk_hf_model(const char *dir, const struct mk_spec *s, const char *extra, int shards)
{
    static const struct {
        const char *arch, *class;
    } classes[] = {{"llama", "LlamaForCausalLM"},
                   {"mistral", "MistralForCausalLM"},
                   {"qwen2", "Qwen2ForCausalLM"},
                   {"qwen3", "Qwen3ForCausalLM"}};
    const char *class = "NobodyForCausalLM";
    struct bt_buf config = {0};

    for (size_t i = 0; i < BT_ARRAY_LEN(classes); i++) {
        class = strcmp(s->arch, classes[i].arch) == 0 ? classes[i].class : class;
    }
    ok(bt_buf_printf(&config,
                     "{\"architectures\":[\"%s\"],\"model_type\":\"%s\",\"hidden_size\":%d,"
                     "\"num_hidden_layers\":%d,\"num_attention_heads\":%d,"
                     "\"num_key_value_heads\":%d,\"head_dim\":%d,\"intermediate_size\":%d,"
                     "\"vocab_size\":%d,\"max_position_embeddings\":512,\"rms_norm_eps\":1e-5,"
                     "\"tie_word_embeddings\":%s%s}",
                     class, s->arch, s->e, s->layers, s->h, s->hkv, s->d, s->f, s->v,
                     s->tied ? "true" : "false", extra));
    mk_file(dir, "config.json", config.p, config.n);
    bt_buf_fini(&config);
    mk_text(dir, "tokenizer.json",
            "{\"version\":\"1.0\",\"added_tokens\":[{\"id\":0,\"content\":\"<|endoftext|>\"},"
            "{\"id\":2,\"content\":\"<|im_end|>\"}],\"model\":{\"type\":\"BPE\",\"vocab\":{}}}");
    write_weights(dir, s, shards);
}

void mk_dir(char ret[128])
{
    const char *tmp = getenv("TMPDIR");

    snprintf(ret, 128, "%s/bt-file-XXXXXX", tmp && tmp[0] && strlen(tmp) < 100 ? tmp : "/tmp");
    BT_BUG_ON(mkdtemp(ret) == NULL);
}

const char *mk_path(const char *dir, const char *name)
{
    static char path[512];

    snprintf(path, sizeof(path), "%s/%s", dir, name);
    return path;
}

void mk_dir_remove(const char *dir)
{
    DIR *d = opendir(dir);
    struct dirent *e;

    while (d && (e = readdir(d)) != NULL) {
        if (strcmp(e->d_name, ".") != 0 && strcmp(e->d_name, "..") != 0) {
            remove(mk_path(dir, e->d_name));
        }
    }
    if (d) {
        closedir(d);
    }
    rmdir(dir);
}

void mk_file(const char *dir, const char *name, const void *p, size_t n)
{
    FILE *f = fopen(mk_path(dir, name), "wb");

    BT_BUG_ON(!f);
    BT_BUG_ON(fwrite(p, 1, n, f) != n);
    BT_BUG_ON(fclose(f) != 0);
}

void mk_text(const char *dir, const char *name, const char *text)
{
    mk_file(dir, name, text, strlen(text));
}

void mk_limit_memory(void)
{
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
    struct rlimit lim = {2ull << 30, 2ull << 30};

    BT_BUG_ON(setrlimit(RLIMIT_AS, &lim) != 0);
#endif
}
