/* Tokenizer from the arrays of a GGUF file (keys tokenizer.ggml.*). */
#include "common/text/tokenizer_int.h"

#include <stdlib.h>

/* Values of tokenizer.ggml.token_type. */
enum { TYPE_NORMAL = 1, TYPE_UNKNOWN, TYPE_CONTROL, TYPE_USER, TYPE_UNUSED, TYPE_BYTE };

/* Names of tokenizer.ggml.pre. A GGUF file has no key for the normalizer or for "ignore_merges":
 * they follow from the family, as in its tokenizer.json. */
static const struct family {
    const char *name;
    enum split_rule rule;
    enum split_digits digits;
    bool nfc;
    bool ignore_merges;
} families[] = {
    {"gpt-2", SPLIT_GPT2, DIGITS_JOINED, false, false},
    {"gpt2", SPLIT_GPT2, DIGITS_JOINED, false, false},
    {"llama-bpe", SPLIT_LLAMA3, DIGITS_JOINED, false, true},
    {"llama3", SPLIT_LLAMA3, DIGITS_JOINED, false, true},
    {"llama-v3", SPLIT_LLAMA3, DIGITS_JOINED, false, true},
    {"qwen2", SPLIT_QWEN2, DIGITS_JOINED, true, false},
    {"smollm", SPLIT_GPT2, DIGITS_SINGLE, false, false},
};

static const struct family *find_family(struct bt_str name)
{
    for (size_t i = 0; i < BT_ARRAY_LEN(families); i++) {
        if (bt_str_eq(name, bt_str_of(families[i].name))) {
            return &families[i];
        }
    }
    return NULL;
}

static int fill_tokens(const struct bt_tok_source *src,
                       struct bpe_token *tokens,
                       struct added_token *added,
                       size_t *ret_n_added,
                       struct bt_err *err)
{
    size_t n_added = 0;

    for (size_t i = 0; i < src->n_tokens; i++) {
        int32_t type = src->types ? src->types[i] : TYPE_NORMAL;

        tokens[i].text = src->tokens[i];
        switch (type) {
        case TYPE_NORMAL:
        case TYPE_BYTE:
            tokens[i].kind = BPE_NORMAL;
            continue;
        case TYPE_UNUSED:
            tokens[i].kind = BPE_UNUSED;
            continue;
        case TYPE_USER:
            tokens[i].kind = BPE_ADDED;
            break;
        case TYPE_CONTROL:
        case TYPE_UNKNOWN:
            tokens[i].kind = BPE_CONTROL;
            break;
        default:
            return BT_FAIL(err, BT_E_FORMAT, "tokenizer: token %zu has type %d", i, (int)type);
        }
        if (src->tokens[i].n) {
            added[n_added++] = (struct added_token){
                .text = src->tokens[i], .id = (int32_t)i, .control = tokens[i].kind == BPE_CONTROL};
        }
    }
    *ret_n_added = n_added;
    return BT_OK;
}

static int
fill_merges(const struct bt_tok_source *src, struct bpe_merge *merges, struct bt_err *err)
{
    for (size_t i = 0; i < src->n_merges; i++) {
        struct bt_str m = src->merges[i];
        const char *space = m.n ? memchr(m.p, ' ', m.n) : NULL;

        if (!space) {
            return BT_FAIL(err, BT_E_FORMAT, "tokenizer: merge %zu is not a pair", i);
        }
        merges[i].left = (struct bt_str){m.p, (size_t)(space - m.p)};
        merges[i].right = (struct bt_str){space + 1, m.n - merges[i].left.n - 1};
    }
    return BT_OK;
}

static int build(struct bt_tokenizer *tok,
                 const struct bt_tok_source *src,
                 const struct family *f,
                 struct bt_err *err)
{
    BT_AUTO(bt_free_ptr) struct bpe_token *tokens = bt_calloc(src->n_tokens, sizeof(*tokens));
    BT_AUTO(bt_free_ptr) struct added_token *added = bt_calloc(src->n_tokens, sizeof(*added));
    BT_AUTO(bt_free_ptr) struct bpe_merge *merges = bt_calloc(src->n_merges, sizeof(*merges));
    struct bpe_source bpe = {.n_tokens = src->n_tokens,
                             .tokens = tokens,
                             .n_merges = src->n_merges,
                             .merges = merges,
                             .ignore_merges = f->ignore_merges,
                             .unk_id = -1};
    size_t n_added = 0;
    int rc;

    if (!tokens || !added || !merges) {
        return BT_FAIL(err, BT_E_NOMEM, "tokenizer: no room for the vocabulary");
    }
    rc = fill_tokens(src, tokens, added, &n_added, err);
    if (rc == BT_OK) {
        rc = fill_merges(src, merges, err);
    }
    if (rc == BT_OK) {
        rc = bpe_init(&tok->bpe, &bpe, err);
    }
    if (rc == BT_OK) {
        rc = added_init(&tok->added, added, n_added);
        if (rc < 0) {
            BT_FAIL(err, rc, "tokenizer: %zu added tokens: %s", n_added, bt_rc_text(rc));
        }
    }
    return rc;
}

int tok_load_gguf(struct bt_tokenizer *tok, const struct bt_tok_source *src, struct bt_err *err)
{
    const struct family *f;

    if (!bt_str_eq(src->model, BT_STR("gpt2"))) {
        return BT_FAIL(err, BT_E_UNSUPPORTED,
                       "tokenizer model \"%.*s\" is not supported (byte-level BPE, \"gpt2\", is)",
                       (int)BT_MIN(src->model.n, (size_t)64), src->model.p ? src->model.p : "");
    }
    f = find_family(src->pre);
    if (!f) {
        return BT_FAIL(err, BT_E_UNSUPPORTED,
                       "pre-tokenizer \"%.*s\" is not known (gpt-2, llama-bpe, qwen2, smollm are)",
                       (int)BT_MIN(src->pre.n, (size_t)64), src->pre.p ? src->pre.p : "");
    }
    tok->split.rule = f->rule;
    tok->split.digits = f->digits;
    tok->nfc = f->nfc;
    return build(tok, src, f, err);
}
