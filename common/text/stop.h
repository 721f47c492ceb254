/* Stop strings: finds the first one in a stream of text and withholds no more than it must.
 *
 * The match that is complete first, counted in bytes of the text, wins; of several complete at the
 * same byte the one that begins first. So the outcome does not depend on how the text was cut into
 * deltas. What is given out never holds a part of the match; what is withheld is only ever a tail
 * that is a true prefix of some stop string. Cost: linear in the text for each string
 * (Knuth-Morris-Pratt).
 */
#ifndef BT_TEXT_STOP_H
#define BT_TEXT_STOP_H

#include "common/base/buf.h"

#define BT_STOP_MAX_STRINGS 16
#define BT_STOP_MAX_BYTES   1024 /* of one string */

/* The limits, in one place for every interface. BT_OK; BT_E_INVALID (an empty string, not UTF-8),
 * BT_E_TOO_LARGE (too many, too long). No strings at all is fine. */
int bt_stop_check(const struct bt_str *strings, size_t n, struct bt_err *err) BT_MUST_USE;

/* State of one stream, used by its thread. */
struct bt_stop;

/* Copies the strings. Errors: as bt_stop_check; BT_E_NOMEM. The caller owns *ret_stop. */
int bt_stop_create(const struct bt_str *strings,
                   size_t n,
                   struct bt_stop **ret_stop,
                   struct bt_err *err) BT_MUST_USE;
void bt_stop_destroy(struct bt_stop *s); /* NULL is fine */

/* Takes the next text and appends to *out what may be shown. *ret_matched: index of the stop string
 * that ended the text, or -1; after a match nothing more is taken or given. On BT_E_NOMEM or
 * BT_E_TOO_LARGE (limit of *out) nothing has changed. */
int bt_stop_push(struct bt_stop *s, struct bt_str text, struct bt_buf *out, int *ret_matched)
    BT_MUST_USE;

/* The text is over without a match: appends what was withheld. Nothing after a match. Errors as
 * push. */
int bt_stop_flush(struct bt_stop *s, struct bt_buf *out) BT_MUST_USE;

/* Bytes withheld now. */
size_t bt_stop_n_held(const struct bt_stop *s);

#endif
