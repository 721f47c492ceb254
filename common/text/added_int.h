/* Added tokens: texts that become one id before anything is split or merged.
 *
 * A trie of their bytes; the leftmost, then longest match counts, as in the reference library.
 * Immutable after create; any thread. */
#ifndef BT_TEXT_ADDED_INT_H
#define BT_TEXT_ADDED_INT_H

#include "common/text/unicode_int.h"

#define ADDED_MAX_TEXT 1024 /* bytes; bounds the cost of one place in the text */

struct added_token {
    struct bt_str text; /* owned by the caller of added_init, copied into the trie */
    int32_t id;
    bool control;
    bool lstrip, rstrip; /* takes the white space before, after it */
};

struct added_edge {
    uint32_t key; /* node << 8 | byte; UINT32_MAX = free */
    uint32_t child;
};

struct added {
    size_t n;
    struct added_token *tokens; /* text is not kept */
    struct added_edge *edges;   /* hash */
    size_t edges_mask;
    int32_t *leaf;   /* per node: index into tokens, -1 = none */
    bool first[256]; /* some token starts with this byte */
};

/* Two tokens with the same text: the later one counts. BT_OK, BT_E_NOMEM, BT_E_TOO_LARGE (a text of
 * none or more than ADDED_MAX_TEXT bytes), BT_E_FORMAT (not UTF-8). */
int added_init(struct added *a, const struct added_token *tokens, size_t n) BT_MUST_USE;
void added_fini(struct added *a);

struct added_match {
    const struct added_token *token;
    size_t from, to;  /* bytes of the text, stripped white space included */
    size_t len;       /* bytes of the token itself */
    size_t scan;      /* where the search goes on: the token's own end */
    size_t spaces_to; /* end of a run of white space seen before, so that none is walked twice */
};

/* First match from io->scan on (a zeroed io at first). Control tokens are passed over, text and
 * all, unless `control` is set. A token may lie in the white space that the one before it took;
 * then from < the last `to`, and both count, as in the reference. False: none in the rest. */
bool added_next(const struct added *a,
                const struct uni_table *uni,
                struct bt_str text,
                bool control,
                struct added_match *io);

/* The token with exactly this text, NULL if none. */
const struct added_token *added_find(const struct added *a, struct bt_str text);

#endif
