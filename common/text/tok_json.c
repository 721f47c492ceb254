/* Tokenizer from a tokenizer.json of the Hugging Face `tokenizers` library.
 *
 * Reads the parts that byte-level BPE models use and refuses every other part by name, unknown keys
 * included: a setting that was overlooked would change ids without a word. "truncation" and
 * "padding" are passed over, they concern batches for training. Start-up only, one thread; the JSON
 * tree is gone when the tokenizer is made. */
#include "common/text/tokenizer_int.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>

#define MAX_JSON     ((size_t)256 << 20)
#define MAX_TOKENS   ((size_t)1 << 24)
#define SPARE_IDS    65536 /* ids may leave holes, but not make a small file need much memory */
#define MAX_SEQUENCE 16    /* parts of a Sequence; they do not nest */

struct loader {
    struct bt_tokenizer *tok;
    struct bt_err *err;
    json_t *vocab;
    json_t *added_list;
    json_t *merges_list;
    struct bpe_token *tokens;
    size_t n_tokens;
    struct added_token *added, *late;
    size_t n_added, n_late;
    struct bt_buf *late_text; /* normalised contents, n_late of them */
    bool byte_level;          /* the pre-tokenizer maps bytes */
    bool split_seen;
};

#define UNSUPPORTED(l, ...) BT_FAIL((l)->err, BT_E_UNSUPPORTED, "tokenizer.json: " __VA_ARGS__)
#define MALFORMED(l, ...)   BT_FAIL((l)->err, BT_E_FORMAT, "tokenizer.json: " __VA_ARGS__)

static struct bt_str str_of(const json_t *j)
{
    return (struct bt_str){json_string_value(j), json_string_length(j)};
}

/* Every key of the object must be one of the space-separated `known`. */
static int check_keys(struct loader *l, json_t *obj, const char *what, const char *known)
{
    const char *key;
    json_t *value;

    json_object_foreach(obj, key, value)
    {
        size_t n = strlen(key);
        const char *p = known;
        bool found = false;

        while (n && (p = strstr(p, key)) != NULL) {
            if ((p == known || p[-1] == ' ') && (p[n] == ' ' || p[n] == '\0')) {
                found = true;
                break;
            }
            p += n;
        }
        if (!found) {
            return UNSUPPORTED(l, "%s has an unknown key \"%.64s\"", what, key);
        }
    }
    return BT_OK;
}

/* Absent and null are the same. */
static json_t *get(json_t *obj, const char *key)
{
    json_t *v = json_object_get(obj, key);

    return json_is_null(v) ? NULL : v;
}

static int get_bool(struct loader *l, json_t *obj, const char *key, bool dflt, bool *ret)
{
    json_t *v = get(obj, key);

    if (v && !json_is_boolean(v)) {
        return MALFORMED(l, "\"%s\" is not true or false", key);
    }
    *ret = v ? json_is_true(v) : dflt;
    return BT_OK;
}

/* "type" of a part such as a normalizer; "" if it has none. */
static const char *type_of(json_t *part)
{
    const char *t = json_string_value(json_object_get(part, "type"));

    return t ? t : "";
}

/* Runs `one` on the part, or on each part of a Sequence whose list is under `key`. */
static int
each_part(struct loader *l, json_t *part, const char *key, int (*one)(struct loader *, json_t *))
{
    char known[32];
    json_t *list;
    int rc;

    if (strcmp(type_of(part), "Sequence") != 0) {
        return one(l, part);
    }
    snprintf(known, sizeof(known), "type %s", key);
    rc = check_keys(l, part, "a Sequence", known);
    list = json_object_get(part, key);
    if (rc == BT_OK && (!json_is_array(list) || json_array_size(list) > MAX_SEQUENCE)) {
        rc = MALFORMED(l, "\"%s\" is not a list of at most %d", key, MAX_SEQUENCE);
    }
    for (size_t i = 0; rc == BT_OK && i < json_array_size(list); i++) {
        rc = one(l, json_array_get(list, i));
    }
    return rc;
}

static int read_normalizer(struct loader *l, json_t *part)
{
    if (strcmp(type_of(part), "NFC") != 0) {
        return UNSUPPORTED(l, "normalizer \"%.64s\" is not supported (NFC is)", type_of(part));
    }
    l->tok->nfc = true;
    return check_keys(l, part, "normalizer NFC", "type");
}

static int read_split(struct loader *l, json_t *part)
{
    json_t *pattern = json_object_get(part, "pattern"), *regex = get(pattern, "Regex");
    const char *behavior = json_string_value(json_object_get(part, "behavior"));
    bool invert = false;
    int rc = check_keys(l, part, "pre-tokenizer Split", "type pattern behavior invert");

    if (rc == BT_OK) {
        rc = get_bool(l, part, "invert", false, &invert);
    }
    if (rc < 0) {
        return rc;
    }
    if (invert || !behavior || strcmp(behavior, "Isolated") != 0) {
        return UNSUPPORTED(l, "pre-tokenizer Split with behavior \"%.64s\"%s is not supported",
                           behavior ? behavior : "", invert ? ", inverted," : "");
    }
    if (!json_is_string(regex) || !split_rule_of_regex(str_of(regex), &l->tok->split.rule)) {
        return UNSUPPORTED(l,
                           "the regular expression of pre-tokenizer Split is not known: \"%.100s\"",
                           json_is_string(regex) ? json_string_value(regex) : "");
    }
    return BT_OK;
}

/* Order matters: Digits, then one splitting rule, then the bytes. */
static int read_pre_tokenizer(struct loader *l, json_t *part)
{
    const char *type = type_of(part);
    bool on = false;
    int rc;

    if (l->byte_level) {
        return UNSUPPORTED(l, "pre-tokenizer \"%.64s\" after ByteLevel is not supported", type);
    }
    if (strcmp(type, "Digits") == 0) {
        if (l->split_seen || l->tok->split.digits != DIGITS_JOINED) {
            return UNSUPPORTED(l, "pre-tokenizer Digits after another rule is not supported");
        }
        rc = get_bool(l, part, "individual_digits", false, &on);
        l->tok->split.digits = on ? DIGITS_SINGLE : DIGITS_RUNS;
        return rc < 0 ? rc : check_keys(l, part, "pre-tokenizer Digits", "type individual_digits");
    }
    if (strcmp(type, "Split") == 0) {
        if (l->split_seen) {
            return UNSUPPORTED(l, "more than one pre-tokenizer Split is not supported");
        }
        l->split_seen = true;
        return read_split(l, part);
    }
    if (strcmp(type, "ByteLevel") != 0) {
        return UNSUPPORTED(l, "pre-tokenizer \"%.64s\" is not supported", type);
    }
    l->byte_level = true;
    rc = check_keys(l, part, "pre-tokenizer ByteLevel",
                    "type add_prefix_space trim_offsets use_regex");
    if (rc == BT_OK) {
        rc = get_bool(l, part, "add_prefix_space", true, &on);
    }
    if (rc == BT_OK && on) {
        rc = UNSUPPORTED(l, "pre-tokenizer ByteLevel with add_prefix_space is not supported");
    }
    if (rc == BT_OK) {
        rc = get_bool(l, part, "use_regex", true, &on);
    }
    if (rc == BT_OK && on && l->split_seen) {
        rc = UNSUPPORTED(l, "pre-tokenizer ByteLevel with use_regex after Split is not supported");
    }
    if (rc == BT_OK && on) {
        l->tok->split.rule = SPLIT_GPT2;
    }
    return rc;
}

/* The one id of special token `name` in a TemplateProcessing part. */
static int read_bos(struct loader *l, json_t *part, json_t *name)
{
    json_t *special, *ids, *id;

    if (!json_is_string(name)) {
        return MALFORMED(l, "post-processor TemplateProcessing has a token without a name");
    }
    special = get(json_object_get(part, "special_tokens"), json_string_value(name));
    ids = get(special, "ids");
    id = json_array_get(ids, 0);
    if (json_array_size(ids) != 1 || !json_is_integer(id) || json_integer_value(id) < 0 ||
        json_integer_value(id) >= (json_int_t)MAX_TOKENS) {
        return MALFORMED(l, "post-processor: special token \"%.64s\" has not one id",
                         json_string_value(name));
    }
    l->tok->bos_id = (int32_t)json_integer_value(id);
    l->tok->add_bos = true;
    return BT_OK;
}

/* ByteLevel only moves offsets. TemplateProcessing may put one token in front of the text. */
static int read_post_processor(struct loader *l, json_t *part)
{
    json_t *single, *front, *text;
    size_t n;

    if (strcmp(type_of(part), "ByteLevel") == 0) {
        return BT_OK;
    }
    if (strcmp(type_of(part), "TemplateProcessing") != 0) {
        return UNSUPPORTED(l, "post-processor \"%.64s\" is not supported", type_of(part));
    }
    single = json_object_get(part, "single");
    n = json_array_size(single);
    text = json_array_get(single, n ? n - 1 : 0);
    front = json_object_get(json_array_get(single, 0), "SpecialToken");
    if (n < 1 || n > 2 || !json_object_get(text, "Sequence") || (n == 2 && !front)) {
        return UNSUPPORTED(l,
                           "post-processor TemplateProcessing does more than to add one token in "
                           "front of the text");
    }
    return n == 2 ? read_bos(l, part, json_object_get(front, "id")) : BT_OK;
}

static int read_decoder(struct loader *l, json_t *part)
{
    if (strcmp(type_of(part), "ByteLevel") != 0) {
        return UNSUPPORTED(l, "decoder \"%.64s\" is not supported (ByteLevel is)", type_of(part));
    }
    return BT_OK;
}

static int read_pipeline(struct loader *l, json_t *root)
{
    json_t *part;
    int rc = check_keys(l, root, "the file",
                        "version truncation padding added_tokens normalizer pre_tokenizer "
                        "post_processor decoder model");

    part = get(root, "normalizer");
    if (rc == BT_OK && part) {
        rc = each_part(l, part, "normalizers", read_normalizer);
    }
    part = get(root, "pre_tokenizer");
    if (rc == BT_OK && part) {
        rc = each_part(l, part, "pretokenizers", read_pre_tokenizer);
    }
    if (rc == BT_OK && !l->byte_level) {
        rc = UNSUPPORTED(l, "the pre-tokenizer is not byte-level");
    }
    part = get(root, "post_processor");
    if (rc == BT_OK && part) {
        rc = each_part(l, part, "processors", read_post_processor);
    }
    part = get(root, "decoder");
    if (rc == BT_OK && part) {
        rc = each_part(l, part, "decoders", read_decoder);
    }
    return rc;
}

static int place_token(struct loader *l, json_t *id, struct bt_str text, enum bpe_kind kind)
{
    json_int_t v = json_integer_value(id);
    struct bpe_token *t;

    if (!json_is_integer(id) || v < 0 || v >= (json_int_t)l->n_tokens) {
        return MALFORMED(l, "token \"%.*s\" has no sensible id", (int)BT_MIN(text.n, (size_t)64),
                         text.p ? text.p : "");
    }
    t = &l->tokens[v];
    if (t->text.n && !bt_str_eq(t->text, text)) {
        return MALFORMED(l, "two tokens have the id %lld", (long long)v);
    }
    *t = (struct bpe_token){text, kind};
    return BT_OK;
}

static int read_vocab(struct loader *l)
{
    const char *key;
    json_t *value;
    int rc;

    json_object_foreach(l->vocab, key, value)
    {
        rc = place_token(l, value, bt_str_of(key), BPE_NORMAL);
        if (rc < 0) {
            return rc;
        }
    }
    return BT_OK;
}

/* A token that is looked for after normalisation is looked for in its own normal form. */
static int add_late(struct loader *l, const struct added_token *t)
{
    struct bt_buf *b = &l->late_text[l->n_late];
    int rc = l->tok->nfc ? uni_nfc(t->text, b) : bt_buf_add(b, t->text.p, t->text.n);

    if (rc < 0) {
        bt_buf_fini(b);
        return BT_FAIL(l->err, rc, "tokenizer.json: no room for the added tokens");
    }
    l->late[l->n_late] = *t;
    l->late[l->n_late].text = bt_buf_str(b);
    l->n_late++;
    return BT_OK;
}

static int read_added_token(struct loader *l, json_t *j)
{
    struct added_token t = {0};
    json_t *id = json_object_get(j, "id"), *in_vocab;
    bool normalized = false, single_word = false;
    int rc;

    t.text = str_of(json_object_get(j, "content"));
    if (!t.text.n) {
        return MALFORMED(l, "an added token has no content");
    }
    rc = check_keys(l, j, "an added token",
                    "id content single_word lstrip rstrip normalized special");
    rc = rc < 0 ? rc : get_bool(l, j, "special", false, &t.control);
    rc = rc < 0 ? rc : get_bool(l, j, "lstrip", false, &t.lstrip);
    rc = rc < 0 ? rc : get_bool(l, j, "rstrip", false, &t.rstrip);
    rc = rc < 0 ? rc : get_bool(l, j, "single_word", false, &single_word);
    rc = rc < 0 ? rc : get_bool(l, j, "normalized", !t.control, &normalized);
    if (rc < 0) {
        return rc;
    }
    if (single_word) {
        return UNSUPPORTED(l, "added token \"%.64s\" with single_word is not supported", t.text.p);
    }
    in_vocab = json_object_get(l->vocab, t.text.p);
    if (in_vocab && json_integer_value(in_vocab) != json_integer_value(id)) {
        return MALFORMED(l, "added token \"%.64s\" has another id in the vocabulary", t.text.p);
    }
    rc = place_token(l, id, t.text, t.control ? BPE_CONTROL : BPE_ADDED);
    if (rc < 0) {
        return rc;
    }
    t.id = (int32_t)json_integer_value(id);
    if (normalized) {
        return add_late(l, &t);
    }
    l->added[l->n_added++] = t;
    return BT_OK;
}

static int read_added_tokens(struct loader *l)
{
    size_t n = json_array_size(l->added_list);
    int rc = BT_OK;

    for (size_t i = 0; rc == BT_OK && i < n; i++) {
        rc = read_added_token(l, json_array_get(l->added_list, i));
    }
    if (rc == BT_OK) {
        rc = added_init(&l->tok->added, l->added, l->n_added);
    } else {
        return rc;
    }
    if (rc == BT_OK) {
        rc = added_init(&l->tok->late, l->late, l->n_late);
    }
    return rc < 0 ? BT_FAIL(l->err, rc, "tokenizer.json: %zu added tokens of at most %d bytes: %s",
                            n, ADDED_MAX_TEXT, bt_rc_text(rc))
                  : BT_OK;
}

/* "left right", or [left, right] in newer files. */
static int read_merge(struct loader *l, size_t i, struct bpe_merge *ret)
{
    json_t *j = json_array_get(l->merges_list, i);

    if (json_is_string(j)) {
        struct bt_str s = str_of(j);
        const char *space = s.n ? memchr(s.p, ' ', s.n) : NULL;

        if (space) {
            ret->left = (struct bt_str){s.p, (size_t)(space - s.p)};
            ret->right = (struct bt_str){space + 1, s.n - ret->left.n - 1};
            return BT_OK;
        }
    } else if (json_array_size(j) == 2 && json_is_string(json_array_get(j, 0)) &&
               json_is_string(json_array_get(j, 1))) {
        ret->left = str_of(json_array_get(j, 0));
        ret->right = str_of(json_array_get(j, 1));
        return BT_OK;
    }
    return MALFORMED(l, "merge %zu is not a pair", i);
}

/* The unknown token stands for bytes that the vocabulary lacks. One that is a control token is not
 * used, because text of users must not yield it: such bytes are dropped, as without one. */
static int read_unk(struct loader *l, json_t *model, int32_t *ret_id)
{
    json_t *unk = get(model, "unk_token"), *id;

    *ret_id = -1;
    if (!unk) {
        return BT_OK;
    }
    id = json_is_string(unk) ? json_object_get(l->vocab, json_string_value(unk)) : NULL;
    if (!id) {
        return MALFORMED(l, "the unknown token is not in the vocabulary");
    }
    if (l->tokens[json_integer_value(id)].kind != BPE_CONTROL) {
        *ret_id = (int32_t)json_integer_value(id);
    }
    return BT_OK;
}

static int check_model(struct loader *l, json_t *model)
{
    const char *type = type_of(model);
    json_t *prefix = get(model, "continuing_subword_prefix");
    json_t *suffix = get(model, "end_of_word_suffix"), *dropout = get(model, "dropout");
    bool on = false;
    int rc;

    if (*type && strcmp(type, "BPE") != 0) {
        return UNSUPPORTED(l, "model \"%.64s\" is not supported (BPE is)", type);
    }
    rc = check_keys(l, model, "the model",
                    "type dropout unk_token continuing_subword_prefix end_of_word_suffix fuse_unk "
                    "byte_fallback ignore_merges vocab merges");
    if (rc < 0) {
        return rc;
    }
    if (json_string_length(prefix) || json_string_length(suffix)) {
        return UNSUPPORTED(l, "a prefix or suffix of words is not supported");
    }
    if (dropout && json_number_value(dropout) != 0) {
        return UNSUPPORTED(l, "dropout is not supported");
    }
    rc = get_bool(l, model, "byte_fallback", false, &on);
    if (rc == BT_OK && on) {
        rc = UNSUPPORTED(l, "byte_fallback is not supported");
    }
    if (rc == BT_OK && (!json_is_object(l->vocab) || !json_is_array(l->merges_list))) {
        rc = MALFORMED(l, "the model has no vocabulary or no merges");
    }
    return rc;
}

/* Highest id + 1, which may be more than the tokens there are, within reason. */
static int count_tokens(struct loader *l)
{
    size_t n = json_object_size(l->vocab) + json_array_size(l->added_list);
    json_int_t top = -1, limit = (json_int_t)BT_MIN(2 * n + SPARE_IDS, MAX_TOKENS);
    const char *key;
    json_t *value;

    json_object_foreach(l->vocab, key, value)
    {
        top = BT_MAX(top, json_integer_value(value));
    }
    for (size_t i = 0; i < json_array_size(l->added_list); i++) {
        value = json_object_get(json_array_get(l->added_list, i), "id");
        top = BT_MAX(top, json_integer_value(value));
    }
    if (top >= limit) {
        return MALFORMED(l, "id %lld with only %zu tokens", (long long)top, n);
    }
    l->n_tokens = (size_t)(top + 1);
    return BT_OK;
}

static int read_model(struct loader *l, json_t *model)
{
    size_t n_merges = json_array_size(l->merges_list), n_added = json_array_size(l->added_list);
    BT_AUTO(bt_free_ptr) struct bpe_merge *merges = bt_calloc(n_merges, sizeof(*merges));
    struct bpe_source src = {.n_merges = n_merges, .merges = merges};
    int rc;

    l->tokens = bt_calloc(l->n_tokens, sizeof(*l->tokens));
    l->added = bt_calloc(n_added, sizeof(*l->added));
    l->late = bt_calloc(n_added, sizeof(*l->late));
    l->late_text = bt_calloc(n_added, sizeof(*l->late_text));
    if (!merges || !l->tokens || !l->added || !l->late || !l->late_text) {
        return BT_FAIL(l->err, BT_E_NOMEM, "tokenizer.json: no room for the vocabulary");
    }
    rc = read_vocab(l);
    if (rc == BT_OK) {
        rc = read_added_tokens(l);
    }
    for (size_t i = 0; rc == BT_OK && i < n_merges; i++) {
        rc = read_merge(l, i, &merges[i]);
    }
    if (rc == BT_OK) {
        rc = read_unk(l, model, &src.unk_id);
    }
    if (rc == BT_OK) {
        rc = get_bool(l, model, "ignore_merges", false, &src.ignore_merges);
    }
    if (rc < 0) {
        return rc;
    }
    src.n_tokens = l->n_tokens;
    src.tokens = l->tokens;
    return bpe_init(&l->tok->bpe, &src, l->err);
}

static void loader_fini(struct loader *l)
{
    for (size_t i = 0; i < l->n_late; i++) {
        bt_buf_fini(&l->late_text[i]);
    }
    free(l->late_text);
    free(l->late);
    free(l->added);
    free(l->tokens);
}

int tok_load_json(struct bt_tokenizer *tok, const struct bt_tok_source *src, struct bt_err *err)
{
    struct loader l = {.tok = tok, .err = err};
    json_error_t je;
    json_t *root, *model;
    int rc;

    if (src->json.n > MAX_JSON) {
        return BT_FAIL(err, BT_E_TOO_LARGE, "tokenizer.json of %zu bytes", src->json.n);
    }
    root = json_loadb(src->json.p, src->json.n, JSON_REJECT_DUPLICATES, &je);
    if (!root) {
        return BT_FAIL(err, BT_E_FORMAT, "tokenizer.json: line %d: %.120s", je.line, je.text);
    }
    model = json_object_get(root, "model");
    l.vocab = json_object_get(model, "vocab");
    l.merges_list = json_object_get(model, "merges");
    l.added_list = get(root, "added_tokens");
    rc = check_model(&l, model);
    if (rc == BT_OK) {
        rc = read_pipeline(&l, root);
    }
    if (rc == BT_OK && l.added_list && !json_is_array(l.added_list)) {
        rc = MALFORMED(&l, "\"added_tokens\" is not a list");
    }
    if (rc == BT_OK) {
        rc = count_tokens(&l);
    }
    if (rc == BT_OK) {
        rc = read_model(&l, model);
    }
    loader_fini(&l);
    json_decref(root);
    return rc;
}
