/* Pre-tokenizer rules, one function per family; see split_int.h. */
#include "common/text/split_int.h"

/* What the rules ask about the character at some byte. */
struct look {
    uint32_t cp;
    unsigned cls;
    size_t len; /* 0 at the end of the text */
};

struct text {
    const uint8_t *p;
    size_t n;
    const struct uni_table *uni;
};

#define CLS_WORD (UNI_L | UNI_N | UNI_S)

static inline struct look look_at(const struct text *t, size_t i)
{
    struct look k = {0};

    if (i < t->n) {
        k.cp = utf8_get(t->p + i, &k.len);
        k.cls = uni_class(t->uni, k.cp);
    }
    return k;
}

static inline bool is_other(struct look k)
{
    return k.len && !(k.cls & CLS_WORD);
}

/* End of the run of characters, from i on, that have a bit of `mask`. */
static size_t run_of(const struct text *t, size_t i, unsigned mask)
{
    for (;;) {
        struct look k = look_at(t, i);

        if (!(k.cls & mask)) {
            return i;
        }
        i += k.len;
    }
}

static size_t run_of_other(const struct text *t, size_t i)
{
    for (;;) {
        struct look k = look_at(t, i);

        if (!is_other(k)) {
            return i;
        }
        i += k.len;
    }
}

/* Length of an English contraction after the apostrophe at i, with it; 0 if none. */
static size_t contraction(const struct text *t, size_t i, bool any_case)
{
    const uint8_t *p = t->p + i + 1;
    size_t n = t->n - i - 1;
    int a, b;

    if (n == 0) {
        return 0;
    }
    /* U+017F, the long s, is an s when case is ignored. */
    if (any_case && n >= 2 && p[0] == 0xc5 && p[1] == 0xbf) {
        return 3;
    }
    a = any_case ? p[0] | 0x20 : p[0];
    if (a == 's' || a == 't' || a == 'm' || a == 'd') {
        return 2;
    }
    if (n < 2) {
        return 0;
    }
    b = any_case ? p[1] | 0x20 : p[1];
    return ((a == 'r' || a == 'v') && b == 'e') || (a == 'l' && b == 'l') ? 3 : 0;
}

/* \s+(?!\S)|\s+ for the run [i, end) of white space: all but the last character, unless the run
 * ends the text or is a single character. */
static size_t space_tail(const struct text *t, size_t i, size_t end)
{
    size_t last = end;

    if (end == t->n) {
        return end;
    }
    do {
        last--;
    } while ((t->p[last] & 0xc0) == 0x80);
    return last > i ? last : end;
}

static size_t next_gpt2(const struct text *t, size_t i)
{
    struct look k = look_at(t, i), first = k;
    size_t j = i;

    if (k.cp == '\'') {
        size_t len = contraction(t, i, false);

        if (len) {
            return i + len;
        }
    }
    if (k.cp == ' ') {
        struct look next = look_at(t, i + 1);

        if (next.len && !(next.cls & UNI_S)) {
            j = i + 1;
            k = next;
        }
    }
    if (k.cls & UNI_L) {
        return run_of(t, j + k.len, UNI_L);
    }
    if (k.cls & UNI_N) {
        return run_of(t, j + k.len, UNI_N);
    }
    if (is_other(k)) {
        return run_of_other(t, j + k.len);
    }
    return space_tail(t, i, run_of(t, i + first.len, UNI_S));
}

static size_t skip_newlines(const struct text *t, size_t i)
{
    while (i < t->n && (t->p[i] == '\r' || t->p[i] == '\n')) {
        i++;
    }
    return i;
}

/* White space: up to its last newline if it has one, else as space_tail. */
static size_t space_or_newlines(const struct text *t, size_t i)
{
    size_t end = run_of(t, i, UNI_S);

    for (size_t j = end; j > i; j--) {
        if (t->p[j - 1] == '\r' || t->p[j - 1] == '\n') {
            return j;
        }
    }
    return space_tail(t, i, end);
}

static size_t next_llama3(const struct text *t, size_t i, int max_digits)
{
    struct look k = look_at(t, i), next;
    size_t j;

    if (k.cls & UNI_L) {
        return run_of(t, i + k.len, UNI_L);
    }
    if (k.cls & UNI_N) {
        for (j = i; max_digits > 0 && (k.cls & UNI_N); max_digits--) {
            j += k.len;
            k = look_at(t, j);
        }
        return j;
    }
    if (k.cp == '\'') {
        size_t len = contraction(t, i, true);

        if (len) {
            return i + len;
        }
    }
    if (k.cp != '\r' && k.cp != '\n') {
        next = look_at(t, i + k.len);
        if (next.cls & UNI_L) {
            return run_of(t, i + k.len + next.len, UNI_L);
        }
        if (is_other(k) || (k.cp == ' ' && is_other(next))) {
            return skip_newlines(t, run_of_other(t, i + k.len));
        }
    }
    return space_or_newlines(t, i);
}

/* The part that the Digits rule hands to the next rule: one digit, a run of digits, or all up to
 * the next digit. */
static size_t digits_part(const struct splitter *sp, const struct text *t, size_t i)
{
    struct look k = look_at(t, i);

    if (k.cls & UNI_D) {
        return sp->digits == DIGITS_SINGLE ? i + k.len : run_of(t, i, UNI_D);
    }
    while (k.len && !(k.cls & UNI_D)) {
        i += k.len;
        k = look_at(t, i);
    }
    return i;
}

bool split_next(const struct splitter *sp, struct split_state *st, struct bt_str *ret)
{
    struct text t = {st->p, st->n, sp->uni};
    size_t end;

    if (st->at >= st->n) {
        return false;
    }
    if (sp->digits != DIGITS_JOINED) {
        if (st->until <= st->at) {
            st->until = digits_part(sp, &t, st->at);
        }
        t.n = st->until;
    }
    switch (sp->rule) {
    case SPLIT_GPT2:
        end = next_gpt2(&t, st->at);
        break;
    case SPLIT_LLAMA3:
        end = next_llama3(&t, st->at, 3);
        break;
    case SPLIT_QWEN2:
        end = next_llama3(&t, st->at, 1);
        break;
    case SPLIT_NONE:
    default:
        end = t.n;
        break;
    }
    *ret = (struct bt_str){(const char *)st->p + st->at, end - st->at};
    st->at = end;
    return true;
}

bool split_rule_of_regex(struct bt_str regex, enum split_rule *ret_rule)
{
    static const struct {
        const char *regex;
        enum split_rule rule;
    } known[] = {
        {"'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+",
         SPLIT_GPT2},
        {"'(?:[sdmt]|ll|ve|re)| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+",
         SPLIT_GPT2},
        {"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| "
         "?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+",
         SPLIT_LLAMA3},
        {"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}| "
         "?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+",
         SPLIT_QWEN2},
    };

    for (size_t i = 0; i < BT_ARRAY_LEN(known); i++) {
        if (bt_str_eq(regex, bt_str_of(known[i].regex))) {
            *ret_rule = known[i].rule;
            return true;
        }
    }
    return false;
}
