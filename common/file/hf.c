/* Hugging Face directories: which files count, and their weights.
 *
 * With model.safetensors.index.json the index decides: every file that it names must be there and
 * hold the tensors it says, and nothing else is read, whatever else lies in the folder. Without an
 * index model.safetensors is all. File names come from an untrusted index, so they must be plain
 * names; symbolic links are followed, since download caches consist of them. */
#include "common/file/hf.h"
#include "common/file/safetensors.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define MAX_SHARDS  4096
#define MAX_TENSORS 131072

static const struct bt_json_caps config_caps = {1u << 20, 100000, 32};
static const struct bt_json_caps tok_config_caps = {16u << 20, 1000000, 32};
static const struct bt_json_caps index_caps = {16u << 20, 400000, 8};

struct loader {
    struct bt_model_file *mf;
    const char *dir;
    struct bt_err *err;
    json_t *weight_map;  /* names still to be found, or NULL: no index */
    struct bt_buf names; /* canonical names; tensors hold offsets until it is complete */
    size_t cap_tensors;
};

/* Opens DIR/name and appends it to the model's files; *ret is valid until the next call. */
static int open_file(struct loader *l, const char *name, size_t max, struct bt_file_map **ret)
{
    struct bt_model_file *mf = l->mf;
    char path[PATH_MAX];
    int n = snprintf(path, sizeof(path), "%s/%s", l->dir, name), rc;

    if (n < 0 || (size_t)n >= sizeof(path)) {
        return BT_FAIL(l->err, BT_E_INVALID, "path of %.80s is too long", name);
    }
    if (mf->n_files == mf->cap_files) {
        size_t cap = mf->cap_files ? mf->cap_files * 2 : 16;
        struct bt_file_map *files = realloc(mf->files, cap * sizeof(*files));

        if (!files) {
            return BT_E_NOMEM;
        }
        mf->files = files;
        mf->cap_files = cap;
    }
    rc = bt_file_map_init(path, max, &mf->files[mf->n_files], l->err);
    if (rc != BT_OK) {
        return rc;
    }
    *ret = &mf->files[mf->n_files++];
    (*ret)->role = strrchr((*ret)->path, '/') + 1;
    return BT_OK;
}

/* Text of a file; an absent one is empty unless required. */
static int
read_text(struct loader *l, const char *name, size_t max, bool required, struct bt_str *ret)
{
    struct bt_file_map *m = NULL;
    int rc = open_file(l, name, max, &m);

    *ret = (struct bt_str){"", 0};
    if (rc == BT_E_NOT_FOUND && !required) {
        return BT_OK;
    }
    if (rc == BT_OK && m->n) {
        *ret = (struct bt_str){(const char *)m->p, m->n};
    }
    return rc;
}

/* Parsed object, or NULL for an absent file that is not required. */
static int read_json(struct loader *l,
                     const char *name,
                     const struct bt_json_caps *caps,
                     bool required,
                     json_t **ret)
{
    struct bt_str text;
    size_t before = l->mf->n_files;
    int rc = read_text(l, name, caps->bytes, required, &text);

    if (rc != BT_OK || l->mf->n_files == before) {
        return rc;
    }
    return bt_json_parse(text, name, caps, ret, l->err);
}

/* --- weights --- */

static int add_tensor(struct loader *l, const struct bt_st_tensor *s, const char *name)
{
    struct bt_model_file *mf = l->mf;
    struct bt_tensor *t;
    size_t at = l->names.n;

    if (mf->n_tensors == l->cap_tensors) {
        size_t cap = l->cap_tensors ? l->cap_tensors * 2 : 256;

        if (cap > MAX_TENSORS) {
            return BT_FAIL(l->err, BT_E_TOO_LARGE, "more than %d tensors", MAX_TENSORS);
        }
        t = realloc(mf->tensors, cap * sizeof(*t));
        if (!t) {
            return BT_E_NOMEM;
        }
        mf->tensors = t;
        l->cap_tensors = cap;
    }
    if (bt_buf_add(&l->names, name, strlen(name)) != BT_OK) {
        return BT_E_NOMEM;
    }
    t = &mf->tensors[mf->n_tensors++];
    *t = (struct bt_tensor){
        .name = {(const char *)(uintptr_t)at, strlen(name)},
        .dtype = (enum bt_dtype)s->dtype,
        .n_dims = s->n_dims,
        .shape = {s->shape[0], s->n_dims == 2 ? s->shape[1] : 0},
        .data = s->data,
        .bytes = s->bytes,
    };
    return BT_OK;
}

/* One tensor of a file that counts. */
static int take_tensor(struct loader *l, const struct bt_st_tensor *s, const char *file)
{
    char name[64];

    if (bt_tensor_is_ignorable(bt_str_of(s->name))) {
        return BT_OK;
    }
    if (!bt_tensor_name_of_hf(bt_str_of(s->name), name, sizeof(name))) {
        return BT_FAIL(l->err, BT_E_UNSUPPORTED,
                       "%s: tensor %.80s is not a part of architecture %s", file, s->name,
                       bt_arch_name(l->mf->cfg.arch));
    }
    if (s->dtype < 0 || s->n_dims < 1 || s->n_dims > 2) {
        return BT_FAIL(l->err, BT_E_UNSUPPORTED,
                       "%s: tensor %.80s: %s with %d dimensions is not supported", file, s->name,
                       s->dtype_name, s->n_dims);
    }
    if ((uintptr_t)s->data % bt_dtype_block_bytes((enum bt_dtype)s->dtype) != 0) {
        return BT_FAIL(l->err, BT_E_UNSUPPORTED,
                       "%s: tensor %.80s is not aligned to its elements; save the file anew", file,
                       s->name);
    }
    return add_tensor(l, s, name);
}

static int read_shard(struct loader *l, const char *file)
{
    struct bt_file_map *m = NULL;
    struct bt_st st;
    int rc = open_file(l, file, SIZE_MAX, &m);

    if (rc != BT_OK) {
        return rc;
    }
    rc = bt_st_parse(m->p, m->n, file, &st, l->err);
    if (rc != BT_OK) {
        return rc;
    }
    for (size_t i = 0; rc == BT_OK && i < st.n; i++) {
        if (l->weight_map) {
            const char *where =
                json_string_value(json_object_get(l->weight_map, st.tensors[i].name));

            if (!where || strcmp(where, file) != 0) {
                continue;
            }
        }
        rc = take_tensor(l, &st.tensors[i], file);
        if (l->weight_map) {
            json_object_del(l->weight_map, st.tensors[i].name);
        }
    }
    bt_st_fini(&st);
    return rc;
}

static int cmp_text(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

static bool plain_name(const char *s)
{
    size_t n = strlen(s);

    return n > 12 && n < 256 && s[0] != '.' && !strpbrk(s, "/\\") &&
           strcmp(s + n - 12, ".safetensors") == 0;
}

/* Distinct file names of the index, owned copies, ascending. */
static int list_shards(struct loader *l, const json_t *weight_map, char ***ret, size_t *ret_n)
{
    size_t n = 0, unique = 0;
    const char **all = bt_calloc(json_object_size(weight_map), sizeof(*all));
    char **out = bt_calloc(MAX_SHARDS, sizeof(*out));
    const char *key;
    json_t *v;
    int rc = all && out ? BT_OK : BT_E_NOMEM;

    json_object_foreach((json_t *)(uintptr_t)weight_map, key, v)
    {
        const char *file = json_string_value(v);

        if (rc == BT_OK && (!file || !plain_name(file))) {
            rc = BT_FAIL(l->err, BT_E_FORMAT,
                         "model.safetensors.index.json: tensor %.60s: \"%.80s\" is not a plain "
                         "safetensors file name",
                         key, file ? file : "");
        }
        if (rc == BT_OK) {
            all[n++] = file;
        }
    }
    if (n) {
        qsort(all, n, sizeof(*all), cmp_text);
    }
    for (size_t i = 0; rc == BT_OK && i < n; i++) {
        if (i && strcmp(all[i - 1], all[i]) == 0) {
            continue;
        }
        if (unique == MAX_SHARDS) {
            rc = BT_FAIL(l->err, BT_E_TOO_LARGE, "model.safetensors.index.json: more than %d files",
                         MAX_SHARDS);
            break;
        }
        out[unique] = strdup(all[i]);
        rc = out[unique++] ? BT_OK : BT_E_NOMEM;
    }
    free(all);
    *ret = out;
    *ret_n = unique;
    return rc;
}

/* All of the files, before the first is read, so that the message has all missing names. */
static int require_files(struct loader *l, char *const *files, size_t n)
{
    struct bt_buf list = {0};
    char path[PATH_MAX];
    size_t missing = 0;
    int rc = BT_OK;

    for (size_t i = 0; i < n; i++) {
        int len = snprintf(path, sizeof(path), "%s/%s", l->dir, files[i]);

        if (len < 0 || (size_t)len >= sizeof(path) || access(path, R_OK) != 0) {
            missing++;
            rc = bt_buf_printf(&list, "%s%s", list.n ? ", " : "", files[i]);
            if (rc != BT_OK) {
                break;
            }
        }
    }
    if (rc == BT_OK && missing) {
        rc = BT_FAIL(l->err, BT_E_NOT_FOUND,
                     "model.safetensors.index.json: %zu of %zu files cannot be read: %.*s", missing,
                     n, (int)BT_MIN(list.n, (size_t)140), list.p);
    }
    bt_buf_fini(&list);
    return rc;
}

static int read_indexed(struct loader *l, json_t *index)
{
    const json_t *map = json_object_get(index, "weight_map");
    char **files = NULL;
    const char *left;
    size_t n = 0;
    int rc;

    if (!json_is_object(map) || json_object_size(map) == 0) {
        return BT_FAIL(l->err, BT_E_FORMAT,
                       "model.safetensors.index.json: weight_map is missing or empty");
    }
    rc = list_shards(l, map, &files, &n);
    if (rc == BT_OK) {
        rc = require_files(l, files, n);
    }
    l->weight_map = json_object_get(index, "weight_map");
    for (size_t i = 0; rc == BT_OK && i < n; i++) {
        rc = read_shard(l, files[i]);
    }
    if (rc == BT_OK && json_object_size(l->weight_map) > 0) {
        left = json_object_iter_key(json_object_iter(l->weight_map));
        rc = BT_FAIL(l->err, BT_E_FORMAT, "%s: tensor %.80s is missing, the index says it is there",
                     json_string_value(json_object_get(l->weight_map, left)), left);
    }
    for (size_t i = 0; files && i < n; i++) {
        free(files[i]);
    }
    free(files);
    return rc;
}

static int read_weights(struct loader *l)
{
    struct bt_model_file *mf = l->mf;
    json_t *index = NULL;
    int rc = read_json(l, "model.safetensors.index.json", &index_caps, false, &index);

    if (rc != BT_OK) {
        return rc;
    }
    rc = index ? read_indexed(l, index) : read_shard(l, "model.safetensors");
    l->weight_map = NULL;
    json_decref(index);
    if (rc != BT_OK) {
        return rc;
    }
    for (size_t i = 0; i < mf->n_tensors; i++) {
        mf->tensors[i].name.p = l->names.p + (uintptr_t)mf->tensors[i].name.p;
    }
    mf->names = l->names.p;
    l->names = (struct bt_buf){0};
    return bt_tensors_sort(mf->tensors, mf->n_tensors, l->err);
}

/* --- all of it --- */

static void set_name(struct bt_model_file *mf, const char *dir)
{
    char real[PATH_MAX];
    const char *base = realpath(dir, real) ? strrchr(real, '/') : NULL;

    bt_model_name_set(&mf->cfg, bt_str_of(base ? base + 1 : dir));
}

static int load(struct loader *l, struct bt_hf_settings *s)
{
    json_t *config = NULL, *gen = NULL, *tok = NULL;
    int n_vocab, rc = read_json(l, "config.json", &config_caps, true, &config);

    s->config = config;
    if (rc == BT_OK) {
        rc = bt_hf_read_config(l->mf, config, l->err);
    }
    if (rc == BT_OK) {
        rc = read_json(l, "generation_config.json", &config_caps, false, &gen);
        s->gen = gen;
    }
    if (rc == BT_OK) {
        rc = read_text(l, "tokenizer.json", 256u << 20, true, &l->mf->tok.json);
    }
    if (rc == BT_OK) {
        rc = read_json(l, "tokenizer_config.json", &tok_config_caps, false, &tok);
        s->tok = tok;
    }
    if (rc == BT_OK) {
        rc = read_text(l, "chat_template.jinja", 4u << 20, false, &s->jinja);
    }
    if (rc == BT_OK) {
        rc = read_weights(l);
    }
    n_vocab = l->mf->cfg.n_vocab;
    if (rc == BT_OK) {
        rc = bt_model_check(l->mf, l->err);
    }
    if (rc == BT_OK && l->mf->cfg.n_vocab != n_vocab) {
        rc = BT_FAIL(l->err, BT_E_FORMAT,
                     "config.json: vocab_size is %d, model.embed_tokens.weight has %d rows",
                     n_vocab, l->mf->cfg.n_vocab);
    }
    if (rc == BT_OK) {
        rc = bt_hf_read_tokenizer(l->mf, s, l->err);
    }
    json_decref(config);
    json_decref(gen);
    json_decref(tok);
    return rc;
}

int bt_hf_load(struct bt_model_file *mf, const char *dir, struct bt_err *err)
{
    struct loader l = {.mf = mf, .dir = dir, .err = err};
    struct bt_hf_settings settings = {.jinja = {"", 0}};
    int rc;

    mf->tok = (struct bt_tok_source){
        .model = {"", 0}, .pre = {"", 0}, .chat_template = {"", 0}, .bos_id = -1};
    set_name(mf, dir);
    rc = load(&l, &settings);
    bt_buf_fini(&l.names);
    return rc == BT_OK ? bt_model_rope_build(mf, NULL, err) : rc;
}
