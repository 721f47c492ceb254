/* Cuts text into the pieces within which byte pairs merge (the "pre-tokenizer").
 *
 * Hand-written forms of the known regular expressions; each call looks at its piece and at most one
 * character behind it, but for white space, where it looks to the end of the run: every rule is
 * linear over a whole text, uses no stack and never backtracks. */
#ifndef BT_TEXT_SPLIT_INT_H
#define BT_TEXT_SPLIT_INT_H

#include "common/text/unicode_int.h"

enum split_rule {
    SPLIT_NONE,   /* the text is one piece */
    SPLIT_GPT2,   /* 's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+ */
    SPLIT_LLAMA3, /* contractions in any case; letters with one sign before; 1-3 digits; newlines */
    SPLIT_QWEN2,  /* as llama3, but single digits */
};

enum split_digits {
    DIGITS_JOINED, /* no Digits rule */
    DIGITS_RUNS,   /* a run of digits is cut off first */
    DIGITS_SINGLE, /* each digit is cut off first */
};

struct splitter {
    enum split_rule rule;
    enum split_digits digits;
    const struct uni_table *uni;
};

struct split_state {
    const uint8_t *p;
    size_t n;
    size_t at;    /* first byte not yet handed out */
    size_t until; /* end of the part that the Digits rule cut off */
};

static inline struct split_state split_begin(struct bt_str text)
{
    return (struct split_state){.p = (const uint8_t *)text.p, .n = text.n};
}

/* Next piece in *ret; false at the end. The text must be valid UTF-8. */
bool split_next(const struct splitter *sp, struct split_state *st, struct bt_str *ret);

/* The rule whose regular expression is `regex`, as tokenizer.json files spell it; false if none. */
bool split_rule_of_regex(struct bt_str regex, enum split_rule *ret_rule);

#endif
