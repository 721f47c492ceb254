/* Encoding: added tokens, normalisation, splitting, merging, in this order. */
#include "common/text/tokenizer_int.h"

#include <stdlib.h>

#define MAX_TEXT ((size_t)INT32_MAX)

struct encoder {
    const struct bt_tokenizer *tok;
    bool control;
    const struct bt_run *runs, *runs_end; /* control tokens only where the text is ours; or NULL */
    struct bpe_work work;
    struct bt_buf normal; /* the part at hand in NFC */
    struct bt_ids *out;
};

static int encode_plain(struct encoder *e, struct bt_str text)
{
    struct split_state st = split_begin(text);
    struct bt_str piece;
    int rc = BT_OK;

    while (rc == BT_OK && split_next(&e->tok->split, &st, &piece)) {
        rc = bpe_encode_piece(&e->tok->bpe, piece, &e->work, e->out);
    }
    return rc;
}

/* Whether bytes [from, to) of the text are ours; asked in ascending order. */
static bool is_ours(struct encoder *e, size_t from, size_t to)
{
    const struct bt_run *r;

    while (e->runs < e->runs_end && e->runs->end <= from) {
        e->runs++;
    }
    for (r = e->runs; r < e->runs_end && r->ours && r->end < to;) {
        r++;
    }
    return r < e->runs_end && r->ours;
}

/* Runs `part` on what lies between the matches of `a`, and puts out the ids of the matches. */
static int around_matches(struct encoder *e,
                          const struct added *a,
                          struct bt_str text,
                          int (*part)(struct encoder *, struct bt_str))
{
    struct added_match m = {0};
    size_t done = 0;
    bool control;
    int rc = BT_OK;

    /* Runs say where the text as it came is ours; after normalisation no control token is found. */
    control = e->control && (!e->runs || a == &e->tok->added);
    while (rc == BT_OK && added_next(a, &e->tok->uni, text, control, &m)) {
        if (m.token->control && e->runs && !is_ours(e, m.scan - m.len, m.scan)) {
            m.to = done;
            continue;
        }
        if (m.from > done) {
            rc = part(e, (struct bt_str){text.p + done, m.from - done});
        }
        if (rc == BT_OK) {
            rc = bt_ids_push(e->out, m.token->id);
        }
        done = m.to;
    }
    if (rc == BT_OK && done < text.n) {
        rc = part(e, (struct bt_str){text.p + done, text.n - done});
    }
    return rc;
}

static int encode_part(struct encoder *e, struct bt_str text)
{
    const struct bt_tokenizer *tok = e->tok;

    if (tok->nfc && !uni_is_nfc(&tok->uni, text)) {
        int rc;

        e->normal.n = 0;
        rc = uni_nfc(text, &e->normal);
        if (rc < 0) {
            return rc;
        }
        text = bt_buf_str(&e->normal);
    }
    return around_matches(e, &tok->late, text, encode_plain);
}

static int encode(struct encoder *e, struct bt_str text, struct bt_err *err)
{
    struct bt_ids *ids = e->out;
    size_t n_before = ids->n, valid;
    int rc;

    if (text.n > MAX_TEXT) {
        return BT_FAIL(err, BT_E_TOO_LARGE, "text of %zu bytes is too long", text.n);
    }
    valid = bt_utf8_valid_prefix(text.p, text.n);
    if (valid != text.n) {
        return BT_FAIL(err, BT_E_INVALID, "text is not UTF-8 at byte %zu", valid);
    }
    rc = around_matches(e, &e->tok->added, text, encode_part);
    bpe_work_fini(&e->work);
    bt_buf_fini(&e->normal);
    if (rc == BT_OK) {
        return BT_OK;
    }
    ids->n = n_before;
    if (rc == BT_E_TOO_LARGE && ids->max) {
        return BT_FAIL(err, rc, "text of %zu bytes gives more than %zu tokens", text.n, ids->max);
    }
    return BT_FAIL(err, rc, "encoding %zu bytes of text: %s", text.n, bt_rc_text(rc));
}

int bt_tokenizer_encode(const struct bt_tokenizer *tok,
                        struct bt_str text,
                        unsigned flags,
                        struct bt_ids *ids,
                        struct bt_err *err)
{
    struct encoder e = {.tok = tok, .control = flags & BT_TOK_SPECIAL, .out = ids};

    return encode(&e, text, err);
}

int bt_tokenizer_encode_runs(const struct bt_tokenizer *tok,
                             struct bt_str text,
                             const struct bt_run *runs,
                             size_t n_runs,
                             struct bt_ids *ids,
                             struct bt_err *err)
{
    struct encoder e = {
        .tok = tok, .control = n_runs > 0, .runs = runs, .runs_end = runs + n_runs, .out = ids};

    return encode(&e, text, err);
}

int bt_tokenizer_begin(const struct bt_tokenizer *tok, struct bt_ids *ids)
{
    int rc;

    if (!tok->add_bos || tok->bos_id < 0 || (ids->n && ids->p[0] == tok->bos_id)) {
        return BT_OK;
    }
    rc = bt_ids_push(ids, tok->bos_id);
    if (rc < 0) {
        return rc;
    }
    memmove(ids->p + 1, ids->p, (ids->n - 1) * sizeof(*ids->p));
    ids->p[0] = tok->bos_id;
    return BT_OK;
}

int bt_tokenizer_create(const struct bt_tok_source *src,
                        struct bt_tokenizer **ret_tok,
                        struct bt_err *err)
{
    struct bt_tokenizer *tok = bt_calloc(1, sizeof(*tok));
    int rc;

    if (!tok) {
        return BT_FAIL(err, BT_E_NOMEM, "tokenizer: no room");
    }
    uni_table_init(&tok->uni);
    tok->split.uni = &tok->uni;
    tok->bos_id = src->bos_id;
    tok->add_bos = src->add_bos;
    rc = src->json.n ? tok_load_json(tok, src, err) : tok_load_gguf(tok, src, err);
    if (rc == BT_OK && tok->bos_id >= 0 && (size_t)tok->bos_id >= tok->bpe.n_tokens) {
        rc = BT_FAIL(err, BT_E_FORMAT, "tokenizer: BOS id %d does not exist", (int)tok->bos_id);
    }
    if (rc < 0) {
        bt_tokenizer_destroy(tok);
        return rc;
    }
    *ret_tok = tok;
    return BT_OK;
}

void bt_tokenizer_destroy(struct bt_tokenizer *tok)
{
    if (!tok) {
        return;
    }
    added_fini(&tok->late);
    added_fini(&tok->added);
    bpe_fini(&tok->bpe);
    free(tok);
}

size_t bt_tokenizer_n_vocab(const struct bt_tokenizer *tok)
{
    return tok->bpe.n_tokens;
}

int32_t bt_tokenizer_bos_id(const struct bt_tokenizer *tok)
{
    return tok->bos_id;
}

bool bt_tokenizer_adds_bos(const struct bt_tokenizer *tok)
{
    return tok->add_bos && tok->bos_id >= 0;
}

struct bt_str bt_tokenizer_token_bytes(const struct bt_tokenizer *tok, int32_t id)
{
    if (id < 0 || (size_t)id >= tok->bpe.n_tokens) {
        return (struct bt_str){0};
    }
    return bpe_bytes(&tok->bpe, id);
}

bool bt_tokenizer_is_control(const struct bt_tokenizer *tok, int32_t id)
{
    return id >= 0 && (size_t)id < tok->bpe.n_tokens && tok->bpe.kind[id] == BPE_CONTROL;
}

int32_t bt_tokenizer_find_special(const struct bt_tokenizer *tok, struct bt_str text)
{
    const struct added_token *t = added_find(&tok->added, text);

    if (!t) {
        t = added_find(&tok->late, text);
    }
    return t ? t->id : -1;
}
