/* Token ids to text, one at a time, never with a broken character.
 *
 * A token's bytes may begin or end inside a UTF-8 character. What is not yet whole stays here, at
 * most three bytes, until the next token completes it; what can never complete becomes U+FFFD, one
 * for each maximal part (Unicode Standard, section 3.9, "U+FFFD substitution of maximal subparts").
 * The joined pieces are byte for byte the text of decoding all ids at once.
 *
 * Embedded in its owner and used by its thread; the tokenizer must outlive it. No allocation of its
 * own. */
#ifndef BT_TEXT_DETOK_H
#define BT_TEXT_DETOK_H

#include "common/text/tokenizer.h"

/* Control tokens give no text; without it they give their literal text. */
#define BT_DETOK_SKIP_CONTROL 1u

struct bt_detok {
    const struct bt_tokenizer *tok; /* borrowed */
    unsigned flags;
    uint8_t n_held;  /* bytes in held */
    uint8_t held[3]; /* beginning of a character */
};

void bt_detok_init(struct bt_detok *d, const struct bt_tokenizer *tok, unsigned flags);

/* Appends the text that is whole after this token; may append nothing. An id outside the
 * vocabulary gives nothing. On BT_E_NOMEM or BT_E_TOO_LARGE (limit of *text) neither has changed.
 */
int bt_detok_push(struct bt_detok *d, int32_t id, struct bt_buf *text) BT_MUST_USE;

/* The end: a held beginning of a character becomes U+FFFD. Then ready for a new text. Errors as
 * push. */
int bt_detok_flush(struct bt_detok *d, struct bt_buf *text) BT_MUST_USE;

/* All ids at once: appends their text. Errors as push; *text may then hold a part. */
int bt_detok_all(const struct bt_tokenizer *tok,
                 const int32_t *ids,
                 size_t n,
                 unsigned flags,
                 struct bt_buf *text) BT_MUST_USE;

#endif
