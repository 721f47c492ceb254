/* Building a byte-level BPE model from a vocabulary; its checks. Merging is in merge.c.
 *
 * Start-up only, one thread. Two flat hash tables: token bytes to id, and (left id, right id) to
 * (rank, new id). `direct` is worked out here by merging every token's own bytes: most pieces of
 * real text are whole tokens, and for those one look-up replaces the merging. */
#include "common/text/bpe_int.h"

#include "common/text/unicode_int.h"

#include <stdlib.h>

#define MAX_TOKENS     ((size_t)1 << 24)
#define MAX_TOKEN_TEXT 65536

static uint64_t hash_bytes(const char *p, size_t n)
{
    uint64_t h = 0x9e3779b97f4a7c15u ^ n, w;

    while (n >= 8) {
        memcpy(&w, p, 8);
        h = (h ^ w) * 0xff51afd7ed558ccdu;
        h ^= h >> 32;
        p += 8;
        n -= 8;
    }
    if (n) {
        w = 0;
        memcpy(&w, p, n);
        h = (h ^ w) * 0xff51afd7ed558ccdu;
        h ^= h >> 32;
    }
    h *= 0xc4ceb9fe1a85ec53u;
    return h ^ h >> 29;
}

/* Byte that the character stands for, -1 if none. The table: printable ASCII and Latin-1 stand for
 * themselves; the other 68 byte values, in order, are U+0100 and up. */
static int byte_of(uint32_t cp)
{
    if ((cp >= 0x21 && cp <= 0x7e) || (cp >= 0xa1 && cp <= 0xac) || (cp >= 0xae && cp <= 0xff)) {
        return (int)cp;
    }
    if (cp < 0x100 || cp > 0x143) {
        return -1;
    }
    cp -= 0x100;
    if (cp <= 0x20) {
        return (int)cp; /* 00-20 */
    }
    if (cp <= 0x42) {
        return (int)(cp - 0x21 + 0x7f); /* 7f-a0 */
    }
    return 0xad;
}

int bpe_unmap(struct bt_str text, struct bt_buf *out)
{
    const uint8_t *p = (const uint8_t *)text.p;
    size_t start = out->n, len;
    int rc = bt_buf_reserve(out, text.n);

    if (rc < 0) {
        return rc;
    }
    if (bt_utf8_valid_prefix(text.p, text.n) != text.n) {
        return BT_E_FORMAT;
    }
    for (size_t i = 0; i < text.n; i += len) {
        int b = byte_of(utf8_get(p + i, &len));

        if (b < 0) {
            out->n = start;
            return BT_E_FORMAT;
        }
        out->p[out->n++] = (char)b;
    }
    return BT_OK;
}

int32_t bpe_find(const struct bpe *m, struct bt_str bytes)
{
    size_t at = hash_bytes(bytes.p, bytes.n) & m->ids_mask;

    while (m->ids[at] >= 0) {
        if (bt_str_eq(bpe_bytes(m, m->ids[at]), bytes)) {
            return m->ids[at];
        }
        at = (at + 1) & m->ids_mask;
    }
    return -1;
}

static void put_id(struct bpe *m, int32_t id)
{
    struct bt_str bytes = bpe_bytes(m, id);
    size_t at = hash_bytes(bytes.p, bytes.n) & m->ids_mask;

    while (m->ids[at] >= 0) {
        if (bt_str_eq(bpe_bytes(m, m->ids[at]), bytes)) {
            if (m->kind[id] < m->kind[m->ids[at]]) {
                m->ids[at] = id;
            }
            return;
        }
        at = (at + 1) & m->ids_mask;
    }
    m->ids[at] = id;
}

static size_t slots_for(size_t n)
{
    size_t slots = 16;

    while (slots < 2 * n) {
        slots *= 2;
    }
    return slots;
}

/* Bytes of every token. A normal token that holds a character which stands for no byte can never
 * come out of merging; its text is then literal and it counts as unused. */
static int init_tokens(struct bpe *m, const struct bpe_source *src, struct bt_err *err)
{
    struct bt_buf blob = {.max = UINT32_MAX};
    int rc = BT_OK;

    for (size_t i = 0; i < src->n_tokens; i++) {
        const struct bpe_token *t = &src->tokens[i];

        if (t->text.n > MAX_TOKEN_TEXT) {
            rc = BT_FAIL(err, BT_E_TOO_LARGE, "tokenizer: token %zu has %zu bytes", i, t->text.n);
            goto out;
        }
        m->off[i] = (uint32_t)blob.n;
        m->kind[i] = (uint8_t)t->kind;
        rc = BT_E_FORMAT;
        if (t->kind < BPE_ADDED) {
            rc = bpe_unmap(t->text, &blob);
        }
        if (rc == BT_E_FORMAT) {
            if (t->kind == BPE_NORMAL) {
                m->kind[i] = BPE_UNUSED;
            }
            rc = bt_buf_add(&blob, t->text.p, t->text.n);
        }
        if (rc < 0) {
            BT_FAIL(err, rc, "tokenizer: no room for the vocabulary");
            goto out;
        }
    }
    m->off[src->n_tokens] = (uint32_t)blob.n;
    /* One byte at least, so that the bytes of an empty token have an address. */
    rc = bt_buf_reserve(&blob, 1);
    if (rc < 0) {
        BT_FAIL(err, rc, "tokenizer: no room for the vocabulary");
        goto out;
    }
    m->blob = blob.p;
    return BT_OK;
out:
    bt_buf_fini(&blob);
    return rc;
}

static int init_bytes(struct bpe *m, struct bt_err *err)
{
    size_t missing = 0;

    for (int b = 0; b < 256; b++) {
        char c = (char)b;
        int32_t id = bpe_find(m, (struct bt_str){&c, 1});

        m->byte_id[b] = id;
        if (id < 0) {
            missing++;
        } else if (m->kind[id] == BPE_CONTROL) {
            return BT_FAIL(err, BT_E_UNSUPPORTED,
                           "tokenizer: control token %d is the plain byte 0x%02x", (int)id,
                           (unsigned)b);
        }
    }
    if (missing == 256) {
        return BT_FAIL(err, BT_E_FORMAT, "tokenizer: the vocabulary has no single bytes");
    }
    return BT_OK;
}

static void put_merge(struct bpe *m, uint64_t key, uint32_t rank, int32_t id)
{
    size_t at = (size_t)(key * 0x9e3779b97f4a7c15u >> 32) & m->merges_mask;

    while (m->merges[at].key != BPE_NO_KEY && m->merges[at].key != key) {
        at = (at + 1) & m->merges_mask;
    }
    m->merges[at] = (struct merge_slot){key, rank, id};
}

static int init_merge(struct bpe *m,
                      const struct bpe_merge *mg,
                      uint32_t rank,
                      struct bt_buf *tmp,
                      struct bt_err *err)
{
    int32_t left = -1, right = -1, both = -1;
    size_t cut = 0;
    int rc;

    tmp->n = 0;
    rc = bpe_unmap(mg->left, tmp);
    cut = tmp->n;
    if (rc == BT_OK) {
        rc = bpe_unmap(mg->right, tmp);
    }
    if (rc == BT_OK && cut && tmp->n > cut) {
        left = bpe_find(m, (struct bt_str){tmp->p, cut});
        right = bpe_find(m, (struct bt_str){tmp->p + cut, tmp->n - cut});
        both = bpe_find(m, bt_buf_str(tmp));
    }
    if (rc < 0 && rc != BT_E_FORMAT) {
        return BT_FAIL(err, rc, "tokenizer: no room for the merges");
    }
    if (left < 0 || right < 0 || both < 0) {
        return BT_FAIL(err, BT_E_FORMAT, "tokenizer: merge %u is not made of tokens",
                       (unsigned)rank);
    }
    /* Ordinary text never becomes a control token, whatever the file says. */
    if (m->kind[both] != BPE_CONTROL) {
        put_merge(m, (uint64_t)(uint32_t)left << 32 | (uint32_t)right, rank, both);
    }
    return BT_OK;
}

static int init_merges(struct bpe *m, const struct bpe_source *src, struct bt_err *err)
{
    BT_AUTO(bt_buf_fini) struct bt_buf tmp = {0};

    for (size_t i = 0; i <= m->merges_mask; i++) {
        m->merges[i].key = BPE_NO_KEY;
    }
    for (size_t i = 0; i < src->n_merges; i++) {
        int rc = init_merge(m, &src->merges[i], (uint32_t)i, &tmp, err);

        if (rc < 0) {
            return rc;
        }
    }
    return BT_OK;
}

static int init_direct(struct bpe *m, bool ignore_merges, struct bt_err *err)
{
    struct bpe_work w = {0};
    struct bt_ids ids = {0};
    int rc = BT_OK;

    for (size_t i = 0; i < m->n_tokens && rc == BT_OK; i++) {
        struct bt_str bytes = bpe_bytes(m, (int32_t)i);

        if (m->kind[i] != BPE_NORMAL || !bytes.n || bpe_find(m, bytes) != (int32_t)i) {
            continue;
        }
        ids.n = 0;
        if (!ignore_merges) {
            rc = bpe_encode_piece(m, bytes, &w, &ids);
        }
        m->direct[i] = ignore_merges || (ids.n == 1 && ids.p[0] == (int32_t)i);
    }
    bpe_work_fini(&w);
    bt_ids_fini(&ids);
    return rc < 0 ? BT_FAIL(err, rc, "tokenizer: no room for the vocabulary") : BT_OK;
}

int bpe_init(struct bpe *m, const struct bpe_source *src, struct bt_err *err)
{
    size_t slots;
    int rc;

    *m = (struct bpe){.n_tokens = src->n_tokens, .unk_id = src->unk_id};
    if (src->n_tokens == 0 || src->n_tokens > MAX_TOKENS || src->n_merges > MAX_TOKENS) {
        return BT_FAIL(err, BT_E_FORMAT,
                       "tokenizer: %zu tokens and %zu merges (1 to %zu are possible)",
                       src->n_tokens, src->n_merges, MAX_TOKENS);
    }
    m->off = bt_calloc(src->n_tokens + 1, sizeof(*m->off));
    m->kind = bt_calloc(src->n_tokens, 1);
    m->direct = bt_calloc(src->n_tokens, 1);
    slots = slots_for(src->n_tokens);
    m->ids_mask = slots - 1;
    m->ids = bt_calloc(slots, sizeof(*m->ids));
    slots = slots_for(src->n_merges);
    m->merges_mask = slots - 1;
    m->merges = bt_calloc(slots, sizeof(*m->merges));
    if (!m->off || !m->kind || !m->direct || !m->ids || !m->merges) {
        rc = BT_FAIL(err, BT_E_NOMEM, "tokenizer: no room for the vocabulary");
        goto fail;
    }
    rc = init_tokens(m, src, err);
    if (rc < 0) {
        goto fail;
    }
    memset(m->ids, 0xff, (m->ids_mask + 1) * sizeof(*m->ids));
    for (size_t i = 0; i < src->n_tokens; i++) {
        if (m->off[i + 1] > m->off[i]) {
            put_id(m, (int32_t)i);
        }
    }
    rc = init_bytes(m, err);
    if (rc == BT_OK) {
        rc = init_merges(m, src, err);
    }
    if (rc == BT_OK) {
        rc = init_direct(m, src->ignore_merges, err);
    }
    if (rc == BT_OK) {
        return BT_OK;
    }
fail:
    bpe_fini(m);
    return rc;
}

void bpe_fini(struct bpe *m)
{
    free(m->merges);
    free(m->ids);
    free(m->direct);
    free(m->kind);
    free(m->off);
    free(m->blob);
    *m = (struct bpe){0};
}
