#include "tests/unit/common/text/tok_data.h"

#include <stdio.h>
#include <stdlib.h>

static void die(const char *what)
{
    fprintf(stderr, "test data: %s\n", what);
    exit(99);
}

void tok_data_read(const char *name, struct bt_buf *out)
{
    const char *folder = getenv("BATON_TEST_DATA");
    char path[4096], part[65536];
    size_t n;
    FILE *f;

    snprintf(path, sizeof(path), "%s/tok/%s", folder ? folder : "tests/data", name);
    f = fopen(path, "rb");
    if (!f) {
        die(path);
    }
    out->n = 0;
    while ((n = fread(part, 1, sizeof(part), f)) > 0) {
        if (bt_buf_add(out, part, n) < 0) {
            die("no memory");
        }
    }
    fclose(f);
    if (bt_buf_reserve(out, 1) < 0) {
        die("no memory");
    }
    out->p[out->n] = '\0';
}

bool tok_data_line(struct bt_str *rest, struct bt_str *ret)
{
    const char *nl = rest->n ? memchr(rest->p, '\n', rest->n) : NULL;

    if (!nl) {
        return false;
    }
    *ret = (struct bt_str){rest->p, (size_t)(nl - rest->p)};
    *rest = (struct bt_str){nl + 1, rest->n - ret->n - 1};
    return true;
}

struct bt_str tok_data_word(struct bt_str *line)
{
    const char *sp = line->n ? memchr(line->p, ' ', line->n) : NULL;
    struct bt_str w = {line->p, sp ? (size_t)(sp - line->p) : line->n};
    size_t skip = w.n + (sp != NULL);

    *line = (struct bt_str){line->p + skip, line->n - skip};
    return w;
}

static int nibble(char c)
{
    return c <= '9' ? c - '0' : c - 'a' + 10;
}

void tok_data_unhex(struct bt_str hex, struct bt_buf *out)
{
    for (size_t i = 0; i + 1 < hex.n; i += 2) {
        char c = (char)(nibble(hex.p[i]) << 4 | nibble(hex.p[i + 1]));

        if (bt_buf_add(out, &c, 1) < 0) {
            die("no memory");
        }
    }
}

/* The source and what it points to. */
struct loaded {
    struct bt_tok_source src; /* first: what the tests see */
    struct bt_buf text;
};

struct bt_tok_source *tok_data_source(const char *pre)
{
    struct loaded *l = bt_calloc(1, sizeof(*l));
    struct bt_str *tokens, *merges, rest, line;
    int32_t *types;
    char *end;

    if (!l) {
        die("no memory");
    }
    tok_data_read("vocab.txt", &l->text);
    rest = bt_buf_str(&l->text);
    if (!tok_data_line(&rest, &line)) {
        die("vocab.txt is empty");
    }
    l->src.n_tokens = strtoul(line.p, &end, 10);
    l->src.n_merges = strtoul(end, NULL, 10);
    tokens = bt_calloc(l->src.n_tokens, sizeof(*tokens));
    types = bt_calloc(l->src.n_tokens, sizeof(*types));
    merges = bt_calloc(l->src.n_merges, sizeof(*merges));
    if (!tokens || !types || !merges) {
        die("no memory");
    }
    for (size_t i = 0; i < l->src.n_tokens && tok_data_line(&rest, &line); i++) {
        types[i] = line.p[0] - '0';
        tokens[i] = (struct bt_str){line.p + 2, line.n - 2};
    }
    for (size_t i = 0; i < l->src.n_merges && tok_data_line(&rest, &line); i++) {
        merges[i] = line;
    }
    if (rest.n) {
        die("vocab.txt has more lines than it says");
    }
    l->src.model = BT_STR("gpt2");
    l->src.pre = bt_str_of(pre);
    l->src.tokens = tokens;
    l->src.types = types;
    l->src.merges = merges;
    l->src.bos_id = -1;
    return &l->src;
}

void tok_data_free(struct bt_tok_source *src)
{
    struct loaded *l = (struct loaded *)src;

    free((void *)(uintptr_t)src->tokens);
    free((void *)(uintptr_t)src->types);
    free((void *)(uintptr_t)src->merges);
    bt_buf_fini(&l->text);
    free(l);
}

struct bt_tokenizer *tok_data_tokenizer(const char *pre)
{
    struct bt_tok_source *src = tok_data_source(pre);
    struct bt_tokenizer *tok = NULL;
    struct bt_err err = {0};

    if (bt_tokenizer_create(src, &tok, &err) < 0) {
        die(err.msg);
    }
    tok_data_free(src);
    return tok;
}
