/* Values as text: as Python prints them, and as JSON the way templates ask for it. */
#include "common/jinja/jinja_int.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

static void add(struct bt_jsb *sb, const char *z)
{
    bt_jsb_add(sb, bt_str_of(z), true);
}

/* Shortest text that reads back as the same number, in Python's form. */
static void print_float(struct bt_jsb *sb, double f, bool json)
{
    char text[40], *e;
    int digits = 1;

    if (isnan(f) || isinf(f)) {
        add(sb, isnan(f) ? (json ? "NaN" : "nan")
                : f > 0  ? (json ? "Infinity" : "inf")
                : json   ? "-Infinity"
                         : "-inf");
        return;
    }
    do {
        snprintf(text, sizeof(text), "%.*e", digits - 1, f);
    } while (strtod(text, NULL) != f && ++digits <= 17);
    e = strchr(text, 'e');
    if (e && strtol(e + 1, NULL, 10) >= -4 && strtol(e + 1, NULL, 10) < 16) {
        long exp = strtol(e + 1, NULL, 10);
        int decimals = digits - 1 - (int)exp;

        snprintf(text, sizeof(text), "%.*f", BT_MAX(decimals, 1), f);
    }
    add(sb, text);
}

static void print_int(struct bt_jsb *sb, int64_t i)
{
    char text[24];

    snprintf(text, sizeof(text), "%lld", (long long)i);
    add(sb, text);
}

/* A string as Python's repr. */
static void print_quoted(struct bt_jsb *sb, const struct bt_jstr *s)
{
    char quote =
        s->s.n && memchr(s->s.p, '\'', s->s.n) && !memchr(s->s.p, '"', s->s.n) ? '"' : '\'';
    size_t from = 0;

    bt_jsb_add(sb, (struct bt_str){&quote, 1}, true);
    for (size_t i = 0; i < s->s.n; i++) {
        unsigned char c = (unsigned char)s->s.p[i];
        char text[8];

        if (c >= 0x20 && c != 0x7f && c != '\\' && c != (unsigned char)quote) {
            continue;
        }
        bt_jsb_add_str(sb, s, from, i);
        from = i + 1;
        if (c == '\n' || c == '\r' || c == '\t') {
            snprintf(text, sizeof(text), "\\%c", c == '\n' ? 'n' : c == '\r' ? 'r' : 't');
        } else if (c == '\\' || c == (unsigned char)quote) {
            snprintf(text, sizeof(text), "\\%c", c);
        } else {
            snprintf(text, sizeof(text), "\\x%02x", c);
        }
        bt_jsb_add(sb, bt_str_of(text), false);
    }
    bt_jsb_add_str(sb, s, from, s->s.n);
    bt_jsb_add(sb, (struct bt_str){&quote, 1}, true);
}

static bool deeper(struct bt_jsb *sb)
{
    if (++sb->cx->depth > BT_J_MAX_DEPTH) {
        bt_jfail(sb->cx, BT_E_TOO_LARGE, "values are nested too deeply");
    }
    return bt_jstep(sb->cx, 1);
}

static void print_inside(struct bt_jsb *sb, const struct bt_jval *v)
{
    if (v->type == BT_J_STR) {
        print_quoted(sb, v->s);
    } else {
        bt_jprint(sb, v);
    }
}

static void print_list(struct bt_jsb *sb, const struct bt_jlist *l)
{
    add(sb, l->tuple ? "(" : "[");
    for (size_t i = 0; i < l->n && deeper(sb); i++) {
        add(sb, i ? ", " : "");
        print_inside(sb, &l->p[i]);
        sb->cx->depth--;
    }
    add(sb, l->tuple ? (l->n == 1 ? ",)" : ")") : "]");
}

static void print_dict(struct bt_jsb *sb, const struct bt_jdict *d)
{
    add(sb, "{");
    for (size_t i = 0; i < d->n && deeper(sb); i++) {
        add(sb, i ? ", " : "");
        print_inside(sb, &d->p[i].key_val);
        add(sb, ": ");
        print_inside(sb, &d->p[i].v);
        sb->cx->depth--;
    }
    add(sb, "}");
}

void bt_jprint(struct bt_jsb *sb, const struct bt_jval *v)
{
    switch (v->type) {
    case BT_J_UNDEFINED:
        break;
    case BT_J_NONE:
        add(sb, "None");
        break;
    case BT_J_BOOL:
        add(sb, v->b ? "True" : "False");
        break;
    case BT_J_INT:
        print_int(sb, v->i);
        break;
    case BT_J_FLOAT:
        print_float(sb, v->f, false);
        break;
    case BT_J_STR:
        bt_jsb_add_str(sb, v->s, 0, v->s->s.n);
        break;
    case BT_J_LIST:
        print_list(sb, v->l);
        break;
    case BT_J_DICT:
        print_dict(sb, v->d);
        break;
    case BT_J_FUNC:
    case BT_J_MACRO:
        bt_jfail(sb->cx, BT_E_INVALID, "%s is printed", bt_jtype_name(v));
        break;
    }
}

struct bt_jval bt_jto_str(struct bt_jcx *cx, const struct bt_jval *v)
{
    struct bt_jsb sb = {.cx = cx};

    if (v->type == BT_J_STR) {
        return *v;
    }
    bt_jprint(&sb, v);
    return bt_jsb_done(&sb);
}

struct json_how {
    int indent; /* < 0: on one line */
    bool ascii; /* what is not, as escapes */
};

/* Writes the escapes of the character at `p`, and returns its bytes. */
static size_t escape_utf8(const char *p, size_t n, char *to, size_t cap)
{
    unsigned char first = (unsigned char)*p;
    size_t len = first >= 0xf0 ? 4 : first >= 0xe0 ? 3 : 2;
    uint32_t c = first & (0xffu >> (len + 1));

    len = BT_MIN(len, n);
    for (size_t i = 1; i < len; i++) {
        c = c << 6 | ((unsigned char)p[i] & 0x3f);
    }
    if (c < 0x10000) {
        snprintf(to, cap, "\\u%04x", c);
    } else {
        snprintf(to, cap, "\\u%04x\\u%04x", 0xd800 + ((c - 0x10000) >> 10 & 0x3ff),
                 0xdc00 + (c & 0x3ff));
    }
    return len;
}

static void json_str(struct bt_jsb *sb, const struct bt_jstr *s, bool ascii)
{
    size_t from = 0;

    add(sb, "\"");
    for (size_t i = 0; i < s->s.n; i++) {
        unsigned char c = (unsigned char)s->s.p[i];
        static const char plain[] = "\"\\\n\r\t\b\f", letter[] = "\"\\nrtbf";
        const char *known = c ? strchr(plain, c) : NULL;
        char text[16];

        if (!known && c >= 0x20 && (c < 0x7f || !ascii)) {
            continue;
        }
        bt_jsb_add_str(sb, s, from, i);
        from = i + 1;
        if (c >= 0x80) {
            i += escape_utf8(s->s.p + i, s->s.n - i, text, sizeof(text)) - 1;
            from = i + 1;
        } else if (known) {
            snprintf(text, sizeof(text), "\\%c", letter[known - plain]);
        } else {
            snprintf(text, sizeof(text), "\\u%04x", c);
        }
        bt_jsb_add(sb, bt_str_of(text), false);
    }
    bt_jsb_add_str(sb, s, from, s->s.n);
    add(sb, "\"");
}

static void json(struct bt_jsb *sb, const struct bt_jval *v, const struct json_how *how, int level);

/* Between two elements, and before the first and behind the last one. */
static void json_gap(struct bt_jsb *sb, const char *comma, const struct json_how *how, int level)
{
    add(sb, comma);
    if (how->indent < 0) {
        add(sb, comma[0] ? " " : "");
        return;
    }
    add(sb, "\n");
    for (int i = 0; i < how->indent * level && bt_jstep(sb->cx, 1); i++) {
        add(sb, " ");
    }
}

static void
json_list(struct bt_jsb *sb, const struct bt_jlist *l, const struct json_how *how, int level)
{
    add(sb, "[");
    for (size_t i = 0; i < l->n && deeper(sb); i++) {
        json_gap(sb, i ? "," : "", how, level + 1);
        json(sb, &l->p[i], how, level + 1);
        sb->cx->depth--;
    }
    if (l->n) {
        json_gap(sb, "", how, level);
    }
    add(sb, "]");
}

static void
json_dict(struct bt_jsb *sb, const struct bt_jdict *d, const struct json_how *how, int level)
{
    add(sb, "{");
    for (size_t i = 0; i < d->n && deeper(sb); i++) {
        struct bt_jval key = bt_jto_str(sb->cx, &d->p[i].key_val);

        json_gap(sb, i ? "," : "", how, level + 1);
        if (key.type == BT_J_STR) {
            json_str(sb, key.s, how->ascii);
        }
        add(sb, ": ");
        json(sb, &d->p[i].v, how, level + 1);
        sb->cx->depth--;
    }
    if (d->n) {
        json_gap(sb, "", how, level);
    }
    add(sb, "}");
}

static void json(struct bt_jsb *sb, const struct bt_jval *v, const struct json_how *how, int level)
{
    switch (v->type) {
    case BT_J_NONE:
        add(sb, "null");
        break;
    case BT_J_BOOL:
        add(sb, v->b ? "true" : "false");
        break;
    case BT_J_INT:
        print_int(sb, v->i);
        break;
    case BT_J_FLOAT:
        print_float(sb, v->f, true);
        break;
    case BT_J_STR:
        json_str(sb, v->s, how->ascii);
        break;
    case BT_J_LIST:
        json_list(sb, v->l, how, level);
        break;
    case BT_J_DICT:
        json_dict(sb, v->d, how, level);
        break;
    case BT_J_UNDEFINED:
    case BT_J_FUNC:
    case BT_J_MACRO:
        bt_jfail(sb->cx, BT_E_INVALID, "%s has no JSON", bt_jtype_name(v));
        break;
    }
}

void bt_jjson(struct bt_jsb *sb, const struct bt_jval *v, int indent, bool ascii)
{
    const struct json_how how = {indent, ascii};

    json(sb, v, &how, 0);
}
