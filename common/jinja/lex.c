/* Template text to tokens, with the rules of white space applied.
 *
 * As the reference does with trim_blocks, lstrip_blocks and no trailing newline kept: the newline
 * behind a block or comment goes, and so do blanks in front of one on its line; "-" takes all white
 * space on its side, "+" keeps it. */
#include "common/jinja/jinja_int.h"

#include <errno.h>
#include <stdlib.h>

struct lexer {
    struct bt_str in;
    size_t at;
    int line;
    bool line_start; /* nothing but removed text since the last newline */
    struct bt_arena *arena;
    struct bt_jtoks *out;
    struct bt_err *err;
};

static int push(struct lexer *x, struct bt_jtok t)
{
    struct bt_jtoks *o = x->out;

    if (o->n == o->cap) {
        size_t cap = o->cap ? 2 * o->cap : 256;
        struct bt_jtok *p = bt_arena_alloc(x->arena, cap * sizeof(*p));

        if (!p) {
            return BT_FAIL(x->err, BT_E_TOO_LARGE, "the chat template is too large");
        }
        if (o->n) {
            memcpy(p, o->t, o->n * sizeof(*p));
        }
        o->t = p;
        o->cap = cap;
    }
    o->t[o->n++] = t;
    return BT_OK;
}

static bool is_space(char c)
{
    return c == ' ' || (c >= '\t' && c <= '\r');
}

static bool looking_at(const struct lexer *x, size_t at, const char *what)
{
    size_t n = strlen(what);

    return x->in.n - at >= n && memcmp(x->in.p + at, what, n) == 0;
}

static void advance(struct lexer *x, size_t to)
{
    for (; x->at < to; x->at++) {
        x->line += x->in.p[x->at] == '\n';
    }
}

static int bad(struct lexer *x, const char *what)
{
    return BT_FAIL(x->err, BT_E_FORMAT, "chat template, line %d: %s", x->line, what);
}

/* Where the next tag begins, or the end. */
static size_t next_tag(const struct lexer *x)
{
    size_t i = x->at;

    while (i < x->in.n &&
           !(x->in.p[i] == '{' && i + 1 < x->in.n && strchr("{%#", x->in.p[i + 1]))) {
        i++;
    }
    return i;
}

/* End of the text in front of the tag at `tag`, without what the tag takes away. */
static size_t text_end(const struct lexer *x, size_t tag)
{
    size_t end = tag, line;
    char kind = tag < x->in.n ? x->in.p[tag + 1] : 0;
    char mark = kind && tag + 2 < x->in.n ? x->in.p[tag + 2] : 0;

    if (kind && mark == '-') {
        while (end > x->at && is_space(x->in.p[end - 1])) {
            end--;
        }
        return end;
    }
    if (kind == 0 || kind == '{' || mark == '+') {
        return end;
    }
    for (line = end; line > x->at && (x->in.p[line - 1] == ' ' || x->in.p[line - 1] == '\t');) {
        line--;
    }
    if (line == x->at ? x->line_start : x->in.p[line - 1] == '\n') {
        end = line;
    }
    return end;
}

/* Behind a tag that ends at `at`; `mark` is the character before its closing bracket. */
static void after_tag(struct lexer *x, size_t at, char mark, bool trims)
{
    size_t to = at;

    if (mark == '-') {
        while (to < x->in.n && is_space(x->in.p[to])) {
            to++;
        }
    } else if (trims && mark != '+' && to < x->in.n && x->in.p[to] == '\n') {
        to++;
    }
    advance(x, to);
    x->line_start = to > at && x->in.p[to - 1] == '\n';
}

static int lex_comment(struct lexer *x)
{
    const char *end = memmem(x->in.p + x->at + 2, x->in.n - x->at - 2, "#}", 2);
    size_t at;

    if (!end) {
        return bad(x, "a comment does not end");
    }
    at = (size_t)(end - x->in.p);
    advance(x, at + 2);
    after_tag(x, at + 2, end[-1], true);
    return BT_OK;
}

static void put_utf8(char *p, size_t *n, uint32_t c)
{
    if (c < 0x80) {
        p[(*n)++] = (char)c;
    } else if (c < 0x800) {
        p[(*n)++] = (char)(0xc0 | c >> 6);
        p[(*n)++] = (char)(0x80 | (c & 0x3f));
    } else if (c < 0x10000) {
        p[(*n)++] = (char)(0xe0 | c >> 12);
        p[(*n)++] = (char)(0x80 | (c >> 6 & 0x3f));
        p[(*n)++] = (char)(0x80 | (c & 0x3f));
    } else {
        p[(*n)++] = (char)(0xf0 | c >> 18);
        p[(*n)++] = (char)(0x80 | (c >> 12 & 0x3f));
        p[(*n)++] = (char)(0x80 | (c >> 6 & 0x3f));
        p[(*n)++] = (char)(0x80 | (c & 0x3f));
    }
}

/* \xHH, \uHHHH, \UHHHHHHHH at s[i] = the letter: false if malformed. */
static bool hex_escape(struct bt_str s, size_t *i, char *out, size_t *n)
{
    size_t digits = s.p[*i] == 'x' ? 2 : s.p[*i] == 'u' ? 4 : 8;
    uint32_t c = 0;

    if (s.n - *i - 1 < digits) {
        return false;
    }
    for (size_t k = 0; k < digits; k++) {
        char h = s.p[++*i];
        int v = h >= '0' && h <= '9'   ? h - '0'
                : h >= 'a' && h <= 'f' ? h - 'a' + 10
                : h >= 'A' && h <= 'F' ? h - 'A' + 10
                                       : -1;

        if (v < 0) {
            return false;
        }
        c = c << 4 | (uint32_t)v;
    }
    if (c > 0x10ffff || (c >= 0xd800 && c < 0xe000)) {
        return false;
    }
    put_utf8(out, n, c);
    return true;
}

/* Undoes the escapes of a literal as Python does; unknown ones stay as they are. */
static int unescape(struct lexer *x, struct bt_str s, struct bt_str *ret)
{
    static const char from[] = "nrtabfv\\'\"", to[] = "\n\r\t\a\b\f\v\\'\"";
    char *p = bt_arena_alloc(x->arena, s.n + 1);
    size_t n = 0;

    if (!p) {
        return BT_FAIL(x->err, BT_E_TOO_LARGE, "the chat template is too large");
    }
    for (size_t i = 0; i < s.n; i++) {
        const char *known;

        if (s.p[i] != '\\' || i + 1 == s.n) {
            p[n++] = s.p[i];
            continue;
        }
        i++;
        known = s.p[i] ? strchr(from, s.p[i]) : NULL;
        if (known) {
            p[n++] = to[known - from];
        } else if (strchr("xuU", s.p[i]) && s.p[i]) {
            if (!hex_escape(s, &i, p, &n)) {
                return bad(x, "a malformed escape in a string");
            }
        } else if (s.p[i] == '\n') {
            continue;
        } else {
            p[n++] = '\\';
            p[n++] = s.p[i];
        }
    }
    *ret = (struct bt_str){p, n};
    return BT_OK;
}

static int lex_string(struct lexer *x)
{
    char quote = x->in.p[x->at];
    size_t from = x->at + 1, i = from;
    struct bt_jtok t = {.kind = BT_JT_STRING, .line = x->line};
    int rc;

    while (i < x->in.n && x->in.p[i] != quote) {
        i += x->in.p[i] == '\\' ? 2 : 1;
    }
    if (i >= x->in.n) {
        return bad(x, "a string does not end");
    }
    rc = unescape(x, (struct bt_str){x->in.p + from, i - from}, &t.s);
    if (rc < 0) {
        return rc;
    }
    advance(x, i + 1);
    return push(x, t);
}

static bool is_name(char c, bool first)
{
    return c == '_' || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') ||
           (!first && c >= '0' && c <= '9');
}

static int lex_number(struct lexer *x)
{
    struct bt_jtok t = {.kind = BT_JT_INT, .line = x->line};
    char text[48];
    size_t n = 0, i = x->at;
    bool exponent = false;
    char *end;

    for (; i < x->in.n; i++) {
        char c = x->in.p[i], next = i + 1 < x->in.n ? x->in.p[i + 1] : 0;
        bool dot = c == '.' && t.kind == BT_JT_INT && next >= '0' && next <= '9';
        bool exp = (c == 'e' || c == 'E') && !exponent && next != 0 &&
                   (strchr("+-", next) || (next >= '0' && next <= '9'));

        if (c == '_') {
            continue;
        }
        if (!dot && !exp && !(c >= '0' && c <= '9')) {
            break;
        }
        t.kind = dot || exp ? BT_JT_FLOAT : t.kind;
        exponent |= exp;
        if (n + 2 >= sizeof(text)) {
            return bad(x, "a number is too long");
        }
        text[n++] = c;
        if (exp && (next == '+' || next == '-')) {
            text[n++] = next;
            i++;
        }
    }
    text[n] = 0;
    errno = 0;
    if (t.kind == BT_JT_INT) {
        t.i = strtoll(text, &end, 10);
    } else {
        t.f = strtod(text, &end);
    }
    if (errno || *end || (i < x->in.n && is_name(x->in.p[i], true))) {
        return bad(x, "a malformed number");
    }
    advance(x, i);
    return push(x, t);
}

/* Longest first. */
static const char *const ops[] = {"==", "!=", "<=", ">=", "//", "**", "+", "-", "*",
                                  "/",  "%",  "~",  "<",  ">",  "=",  "(", ")", "[",
                                  "]",  "{",  "}",  ",",  ".",  ":",  "|"};

static int lex_inside_one(struct lexer *x)
{
    struct bt_jtok t = {.kind = BT_JT_OP, .line = x->line};
    char c = x->in.p[x->at];

    if (c == '\'' || c == '"') {
        return lex_string(x);
    }
    if (c >= '0' && c <= '9') {
        return lex_number(x);
    }
    if (is_name(c, true)) {
        size_t i = x->at;

        while (i < x->in.n && is_name(x->in.p[i], false)) {
            i++;
        }
        t.kind = BT_JT_NAME;
        t.s = (struct bt_str){x->in.p + x->at, i - x->at};
        x->at = i;
        return push(x, t);
    }
    for (size_t i = 0; i < BT_ARRAY_LEN(ops); i++) {
        if (looking_at(x, x->at, ops[i])) {
            t.s = bt_str_of(ops[i]);
            x->at += t.s.n;
            return push(x, t);
        }
    }
    return bad(x, "an unexpected character");
}

/* A {{ or {% tag, up to and with its end. */
static int lex_tag(struct lexer *x)
{
    bool var = x->in.p[x->at + 1] == '{';
    const char *close = var ? "}}" : "%}";
    int open = x->line, depth = 0, rc;

    rc = push(x,
              (struct bt_jtok){.kind = var ? BT_JT_VAR_BEGIN : BT_JT_BLOCK_BEGIN, .line = x->line});
    x->at += 2;
    x->at += x->at < x->in.n && (x->in.p[x->at] == '-' || x->in.p[x->at] == '+');
    while (rc == BT_OK) {
        char mark = 0;
        size_t at;

        while (x->at < x->in.n && is_space(x->in.p[x->at])) {
            advance(x, x->at + 1);
        }
        at = x->at;
        if (at < x->in.n && (x->in.p[at] == '-' || (x->in.p[at] == '+' && !var)) &&
            looking_at(x, at + 1, close)) {
            mark = x->in.p[at++];
        }
        if (at >= x->in.n) {
            x->line = open;
            return bad(x, "a tag does not end");
        }
        if ((mark || depth == 0) && looking_at(x, at, close)) {
            rc = push(x, (struct bt_jtok){.kind = var ? BT_JT_VAR_END : BT_JT_BLOCK_END,
                                          .line = x->line});
            advance(x, at + 2);
            after_tag(x, at + 2, mark, !var);
            return rc;
        }
        depth += x->in.p[x->at] == '{';
        depth -= x->in.p[x->at] == '}';
        rc = lex_inside_one(x);
    }
    return rc;
}

/* {% raw %}: everything up to {% endraw %} is text. */
static int lex_raw(struct lexer *x, bool *ret_was)
{
    struct bt_jtoks *o = x->out;
    const char *end;
    size_t at, i;

    *ret_was = o->n >= 3 && o->t[o->n - 1].kind == BT_JT_BLOCK_END &&
               o->t[o->n - 2].kind == BT_JT_NAME && bt_str_eq(o->t[o->n - 2].s, BT_STR("raw")) &&
               o->t[o->n - 3].kind == BT_JT_BLOCK_BEGIN;
    if (!*ret_was) {
        return BT_OK;
    }
    end = memmem(x->in.p + x->at, x->in.n - x->at, "endraw", 6);
    if (!end) {
        return bad(x, "raw does not end");
    }
    for (at = (size_t)(end - x->in.p); at > x->at && !looking_at(x, at, "{%");) {
        at--;
    }
    i = (size_t)(end - x->in.p) + 6;
    while (i < x->in.n && is_space(x->in.p[i])) {
        i++;
    }
    if (!looking_at(x, at, "{%") || !(looking_at(x, i, "%}") || looking_at(x, i, "-%}"))) {
        return bad(x, "raw does not end");
    }
    o->n -= 3;
    {
        struct bt_jtok t = {.kind = BT_JT_TEXT, .line = x->line};
        size_t stop = text_end(x, at);
        int rc;

        t.s = (struct bt_str){x->in.p + x->at, stop - x->at};
        rc = t.s.n ? push(x, t) : BT_OK;
        if (rc < 0) {
            return rc;
        }
    }
    advance(x, looking_at(x, i, "-%}") ? i + 3 : i + 2);
    after_tag(x, x->at, looking_at(x, i, "-%}") ? '-' : 0, true);
    return BT_OK;
}

int bt_jlex(struct bt_str text, struct bt_arena *a, struct bt_jtoks *ret, struct bt_err *err)
{
    struct lexer x = {
        .in = text, .line = 1, .line_start = true, .arena = a, .out = ret, .err = err};
    int rc = BT_OK;

    if (x.in.n && x.in.p[x.in.n - 1] == '\n') {
        x.in.n--;
    }
    *ret = (struct bt_jtoks){0};
    while (rc == BT_OK && x.at < x.in.n) {
        size_t tag = next_tag(&x), end = text_end(&x, tag);
        bool raw = false;

        if (end > x.at) {
            rc =
                push(&x, (struct bt_jtok){
                             .kind = BT_JT_TEXT, .line = x.line, .s = {x.in.p + x.at, end - x.at}});
        }
        advance(&x, tag);
        if (rc == BT_OK && tag < x.in.n) {
            rc = x.in.p[tag + 1] == '#' ? lex_comment(&x) : lex_tag(&x);
            rc = rc == BT_OK && x.in.p[tag + 1] == '%' ? lex_raw(&x, &raw) : rc;
        }
    }
    return rc == BT_OK ? push(&x, (struct bt_jtok){.kind = BT_JT_EOF, .line = x.line}) : rc;
}
