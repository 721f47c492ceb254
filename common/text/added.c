/* Trie of added tokens in one hash of edges; see added_int.h. */
#include "common/text/added_int.h"

#include <stdlib.h>

#define NO_EDGE UINT32_MAX

static size_t edge_slot(const struct added *a, uint32_t key)
{
    size_t at = (size_t)(key * 0x9e3779b97f4a7c15u >> 32) & a->edges_mask;

    while (a->edges[at].key != NO_EDGE && a->edges[at].key != key) {
        at = (at + 1) & a->edges_mask;
    }
    return at;
}

int added_init(struct added *a, const struct added_token *tokens, size_t n)
{
    size_t total = 1, slots = 16;
    uint32_t n_nodes = 1;

    *a = (struct added){.n = n};
    for (size_t i = 0; i < n; i++) {
        if (tokens[i].text.n == 0 || tokens[i].text.n > ADDED_MAX_TEXT) {
            return BT_E_TOO_LARGE;
        }
        /* Otherwise a match could begin or end inside a character of the text. */
        if (bt_utf8_valid_prefix(tokens[i].text.p, tokens[i].text.n) != tokens[i].text.n) {
            return BT_E_FORMAT;
        }
        total += tokens[i].text.n;
    }
    if (total >= NO_EDGE >> 8) { /* node numbers have 24 bits */
        return BT_E_TOO_LARGE;
    }
    while (slots < 2 * total) {
        slots *= 2;
    }
    a->edges_mask = slots - 1;
    a->edges = bt_calloc(slots, sizeof(*a->edges));
    a->leaf = bt_calloc(total, sizeof(*a->leaf));
    a->tokens = bt_calloc(n, sizeof(*a->tokens));
    if (!a->edges || !a->leaf || !a->tokens) {
        added_fini(a);
        return BT_E_NOMEM;
    }
    memset(a->edges, 0xff, slots * sizeof(*a->edges));
    memset(a->leaf, 0xff, total * sizeof(*a->leaf));
    for (size_t i = 0; i < n; i++) {
        uint32_t node = 0;

        a->tokens[i] = tokens[i];
        a->tokens[i].text = (struct bt_str){0};
        a->first[(uint8_t)tokens[i].text.p[0]] = true;
        for (size_t k = 0; k < tokens[i].text.n; k++) {
            uint32_t key = node << 8 | (uint8_t)tokens[i].text.p[k];
            size_t at = edge_slot(a, key);

            if (a->edges[at].key == NO_EDGE) {
                a->edges[at] = (struct added_edge){key, n_nodes++};
            }
            node = a->edges[at].child;
        }
        a->leaf[node] = (int32_t)i;
    }
    return BT_OK;
}

void added_fini(struct added *a)
{
    free(a->edges);
    free(a->leaf);
    free(a->tokens);
    *a = (struct added){0};
}

/* Longest token that starts at byte i; its length in *ret_len. */
static const struct added_token *
longest_at(const struct added *a, struct bt_str text, size_t i, size_t *ret_len)
{
    const struct added_token *best = NULL;
    uint32_t node = 0;

    for (size_t k = i; k < text.n; k++) {
        size_t at = edge_slot(a, node << 8 | (uint8_t)text.p[k]);

        if (a->edges[at].key == NO_EDGE) {
            break;
        }
        node = a->edges[at].child;
        if (a->leaf[node] >= 0) {
            best = &a->tokens[a->leaf[node]];
            *ret_len = k + 1 - i;
        }
    }
    return best;
}

static size_t spaces_before(const struct uni_table *uni, struct bt_str text, size_t i, size_t floor)
{
    const uint8_t *p = (const uint8_t *)text.p;

    while (i > floor) {
        size_t k = i - 1, len;

        while (k > floor && (p[k] & 0xc0) == 0x80) {
            k--;
        }
        if (!(uni_class(uni, utf8_get(p + k, &len)) & UNI_S)) {
            break;
        }
        i = k;
    }
    return i;
}

static size_t spaces_after(const struct uni_table *uni, struct bt_str text, size_t i)
{
    const uint8_t *p = (const uint8_t *)text.p;
    size_t len;

    while (i < text.n && (uni_class(uni, utf8_get(p + i, &len)) & UNI_S)) {
        i += len;
    }
    return i;
}

bool added_next(const struct added *a,
                const struct uni_table *uni,
                struct bt_str text,
                bool control,
                struct added_match *io)
{
    size_t floor = io->to, i = io->scan, len = 0;

    if (a->n == 0) {
        return false;
    }
    while (i < text.n) {
        const struct added_token *t = NULL;

        if (a->first[(uint8_t)text.p[i]]) {
            t = longest_at(a, text, i, &len);
        }
        if (t && (control || !t->control)) {
            io->token = t;
            io->len = len;
            io->scan = i + len;
            io->from = i;
            if (t->lstrip) {
                io->from = floor >= i ? floor : spaces_before(uni, text, i, floor);
            }
            io->to = io->scan;
            if (t->rstrip) {
                io->spaces_to =
                    io->scan < io->spaces_to ? io->spaces_to : spaces_after(uni, text, io->scan);
                io->to = io->spaces_to;
            }
            return true;
        }
        i += t ? len : 1;
    }
    return false;
}

const struct added_token *added_find(const struct added *a, struct bt_str text)
{
    size_t len = 0;
    const struct added_token *t = a->n && text.n ? longest_at(a, text, 0, &len) : NULL;

    return t && len == text.n ? t : NULL;
}
