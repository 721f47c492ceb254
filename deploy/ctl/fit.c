/* batonctl fit: from the model's file alone, before anything is loaded: what its weights take, what
 * a token of KV takes, and how many requests of which length fit into a memory beside them. */
#include "deploy/ctl/show.h"

#include "common/file/model.h"
#include "common/mem/warm.h"

#include <unistd.h>

#define PAGE_TOKENS 16

struct fit {
    const struct bt_model_config *c;
    uint64_t weights, parameters, kv_token, workspace, memory, room;
    size_t n_tensors;
};

/* Activations of a step of `batch` tokens: a few rows of each width, and the logits of those that
 * draw. */
static uint64_t workspace(const struct bt_model_config *c, uint64_t batch)
{
    uint64_t widths = 4 * (uint64_t)c->d_model + 3 * (uint64_t)c->d_ff +
                      2 * (uint64_t)c->head_dim * (uint64_t)(c->n_heads + 2 * c->n_kv_heads);

    return batch * widths * 4 + 64 * (uint64_t)c->n_vocab * 4;
}

static void measure(const struct ctl_args *a, const struct bt_model_file *mf, struct fit *f)
{
    uint64_t elem = a->kv_dtype == 1 ? 4 : 2;

    f->c = bt_model_config(mf);
    f->n_tensors = bt_model_n_tensors(mf);
    for (size_t i = 0; i < f->n_tensors; i++) {
        const struct bt_tensor *t = bt_model_tensor_at(mf, i);

        f->weights += t->bytes;
        f->parameters += (uint64_t)t->shape[0] * (uint64_t)(t->n_dims == 2 ? t->shape[1] : 1);
    }
    f->kv_token =
        2 * (uint64_t)f->c->n_layers * (uint64_t)f->c->n_kv_heads * (uint64_t)f->c->head_dim * elem;
    f->workspace = workspace(f->c, 512);
    f->memory = a->memory ? a->memory : bt_mem_available(NULL);
    f->room = f->memory > f->weights + f->workspace ? f->memory - f->weights - f->workspace : 0;
}

static uint64_t requests_of(const struct fit *f, uint64_t tokens)
{
    uint64_t pages = (tokens + PAGE_TOKENS - 1) / PAGE_TOKENS;

    return f->room / (pages * PAGE_TOKENS * f->kv_token);
}

static int print_table(const struct fit *f, const uint64_t *lengths, size_t n)
{
    static const char *const archs[] = {"llama", "qwen2", "qwen3"};
    char a[24], b[24];

    printf("model          %s (%s), %d layers, %d KV heads of %d, context %d\n", f->c->name,
           archs[f->c->arch], f->c->n_layers, f->c->n_kv_heads, f->c->head_dim, f->c->n_ctx);
    printf("weights        %s, %.2f thousand million parameters in %zu tensors\n",
           ctl_bytes((double)f->weights, a), (double)f->parameters / 1e9, f->n_tensors);
    printf("KV             %s a token, %s a page of %d tokens\n", ctl_bytes((double)f->kv_token, a),
           ctl_bytes((double)(f->kv_token * PAGE_TOKENS), b), PAGE_TOKENS);
    printf("memory         %s, ", ctl_bytes((double)f->memory, a));
    printf("of it about %s for activations, ", ctl_bytes((double)f->workspace, a));
    printf("%s for KV: %llu tokens\n\n", ctl_bytes((double)f->room, b),
           (unsigned long long)(f->room / f->kv_token));
    printf("%14s %14s %16s\n", "TOKENS", "KV EACH", "REQUESTS AT ONCE");
    for (size_t i = 0; i < n; i++) {
        printf("%14llu %14s %16llu\n", (unsigned long long)lengths[i],
               ctl_bytes((double)(lengths[i] * f->kv_token), a),
               (unsigned long long)requests_of(f, lengths[i]));
    }
    return CTL_OK;
}

static int print_json(const struct fit *f, const uint64_t *lengths, size_t n)
{
    struct bt_buf buf = {0};
    struct bt_jsonw w = {.b = &buf};

    bt_jw_open(&w, NULL, '{');
    bt_jw_str(&w, "model", f->c->name);
    bt_jw_u64(&w, "weights_bytes", f->weights);
    bt_jw_u64(&w, "parameters", f->parameters);
    bt_jw_u64(&w, "layers", (uint64_t)f->c->n_layers);
    bt_jw_u64(&w, "kv_heads", (uint64_t)f->c->n_kv_heads);
    bt_jw_u64(&w, "head_dim", (uint64_t)f->c->head_dim);
    bt_jw_u64(&w, "context_tokens", (uint64_t)f->c->n_ctx);
    bt_jw_u64(&w, "kv_bytes_per_token", f->kv_token);
    bt_jw_u64(&w, "memory_bytes", f->memory);
    bt_jw_u64(&w, "workspace_bytes", f->workspace);
    bt_jw_u64(&w, "kv_bytes", f->room);
    bt_jw_u64(&w, "kv_tokens", f->room / f->kv_token);
    bt_jw_open(&w, "fits", '[');
    for (size_t i = 0; i < n; i++) {
        bt_jw_open(&w, NULL, '{');
        bt_jw_u64(&w, "tokens", lengths[i]);
        bt_jw_u64(&w, "requests", requests_of(f, lengths[i]));
        bt_jw_close(&w, '}');
    }
    bt_jw_close(&w, ']');
    bt_jw_close(&w, '}');
    return ctl_print_buf(&w);
}

int ctl_fit(const struct ctl_args *a)
{
    static const uint64_t steps[] = {512, 2048, 8192, 32768, 131072, 524288};
    uint64_t lengths[BT_ARRAY_LEN(steps) + 1];
    struct bt_model_file *mf;
    struct fit f = {0};
    struct bt_err err = {0};
    size_t n = 0;
    int code, rc = bt_model_open(a->words[0], &mf, &err);

    if (rc < 0) {
        fprintf(stderr, "batonctl: %s: %s\n", a->words[0], bt_err_msg(&err, rc));
        return rc == BT_E_NOT_FOUND ? CTL_NOT_FOUND : CTL_FAILED;
    }
    measure(a, mf, &f);
    if (a->tokens) {
        lengths[n++] = (uint64_t)a->tokens;
    } else {
        for (size_t i = 0; i < BT_ARRAY_LEN(steps) && steps[i] < (uint64_t)f.c->n_ctx; i++) {
            lengths[n++] = steps[i];
        }
        lengths[n++] = (uint64_t)f.c->n_ctx;
    }
    code = a->output == CTL_JSON ? print_json(&f, lengths, n) : print_table(&f, lengths, n);
    if (code == CTL_OK && requests_of(&f, lengths[a->tokens ? 0 : n > 1 ? 0 : n - 1]) == 0) {
        fprintf(stderr, "batonctl: %s does not fit\n",
                f.room == 0 ? "the model" : "not even one request of this length");
        code = CTL_FAILED;
    }
    bt_model_close(mf);
    return code;
}
