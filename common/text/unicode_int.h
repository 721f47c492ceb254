/* Characters as the tokenizer sees them: UTF-8, classes, and composed normal form (NFC).
 *
 * Classes and normalisation follow the reference library's versions of Unicode (see
 * tests/tools/gen_unicode.py), not the machine's: every node computes the same ids. Everything here
 * is pure; any thread. */
#ifndef BT_TEXT_UNICODE_INT_H
#define BT_TEXT_UNICODE_INT_H

#include "common/base/buf.h"
#include "common/text/utf8.h"

#define UNI_LIMIT 0x32400 /* characters from here on have no class and no normalisation */

#define UNI_L     1u  /* letter */
#define UNI_N     2u  /* number, by the regular expressions */
#define UNI_S     4u  /* white space */
#define UNI_D     8u  /* number, by the Digits rule */
#define UNI_QC    16u /* text that holds it may not be in NFC */
#define UNI_OTHER 0u

/* Class bits of every character below UNI_LIMIT, in caller's storage. */
struct uni_table {
    uint8_t cls[UNI_LIMIT];
};

void uni_table_init(struct uni_table *t);

static inline unsigned uni_class(const struct uni_table *t, uint32_t cp)
{
    return cp < UNI_LIMIT ? t->cls[cp] : UNI_OTHER;
}

/* Decodes the character at p, which must be whole and valid UTF-8. */
static inline uint32_t utf8_get(const uint8_t *p, size_t *ret_len)
{
    if (p[0] < 0x80) {
        *ret_len = 1;
        return p[0];
    }
    if (p[0] < 0xe0) {
        *ret_len = 2;
        return (uint32_t)(p[0] & 0x1f) << 6 | (p[1] & 0x3f);
    }
    if (p[0] < 0xf0) {
        *ret_len = 3;
        return (uint32_t)(p[0] & 0x0f) << 12 | (uint32_t)(p[1] & 0x3f) << 6 | (p[2] & 0x3f);
    }
    *ret_len = 4;
    return (uint32_t)(p[0] & 0x07) << 18 | (uint32_t)(p[1] & 0x3f) << 12 |
           (uint32_t)(p[2] & 0x3f) << 6 | (p[3] & 0x3f);
}

/* Writes 1 to 4 bytes; cp is a scalar value. */
size_t utf8_put(uint32_t cp, uint8_t *ret);

/* Bytes that the character starting with lead byte `b` has; 0 if none starts with it. */
static inline unsigned utf8_need(uint8_t b)
{
    if (b < 0x80) {
        return 1;
    }
    if (b < 0xc2 || b > 0xf4) {
        return 0;
    }
    return b < 0xe0 ? 2 : b < 0xf0 ? 3 : 4;
}

/* May `b` follow as byte number `at` (1..3) of a character with this lead byte? */
static inline bool utf8_follows(uint8_t lead, unsigned at, uint8_t b)
{
    if (at == 1) {
        switch (lead) {
        case 0xe0:
            return b >= 0xa0 && b <= 0xbf;
        case 0xed:
            return b >= 0x80 && b <= 0x9f;
        case 0xf0:
            return b >= 0x90 && b <= 0xbf;
        case 0xf4:
            return b >= 0x80 && b <= 0x8f;
        default:
            break;
        }
    }
    return (b & 0xc0) == 0x80;
}

/* True when valid UTF-8 text is surely in NFC already. */
bool uni_is_nfc(const struct uni_table *t, struct bt_str text);

/* Appends the NFC form of valid UTF-8 text; linear time. BT_OK, BT_E_NOMEM, BT_E_TOO_LARGE. */
int uni_nfc(struct bt_str text, struct bt_buf *out) BT_MUST_USE;

#endif
