/* Methods of strings and dicts, and global functions. */
#include "common/jinja/jinja_int.h"

#include <stdlib.h>
#include <time.h>

static bool is_space(char c)
{
    return c == ' ' || (c >= '\t' && c <= '\r') || (c >= 0x1c && c <= 0x1f);
}

static bool in_set(const struct bt_jval *chars, char c)
{
    return chars ? chars->s->s.n && memchr(chars->s->s.p, c, chars->s->s.n) != NULL : is_space(c);
}

struct bt_jval
bt_jstrip(struct bt_jcx *cx, const struct bt_jstr *s, const struct bt_jval *chars, int sides)
{
    size_t from = 0, to = s->s.n;

    if (chars && chars->type == BT_J_NONE) {
        chars = NULL;
    }
    if (chars && chars->type != BT_J_STR) {
        bt_jfail(cx, BT_E_INVALID, "%s is stripped off", bt_jtype_name(chars));
        return (struct bt_jval){0};
    }
    for (size_t i = 0; chars && i < chars->s->s.n; i++) {
        if ((unsigned char)chars->s->s.p[i] >= 0x80) {
            bt_jfail(cx, BT_E_UNSUPPORTED, "stripping characters that are not ASCII");
            return (struct bt_jval){0};
        }
    }
    while ((sides & 1) && from < to && in_set(chars, s->s.p[from])) {
        from++;
    }
    while ((sides & 2) && from < to && in_set(chars, s->s.p[to - 1])) {
        to--;
    }
    bt_jstep(cx, 1 + s->s.n / 32);
    return bt_jstr_slice(cx, s, from, to);
}

struct bt_jval bt_jreplace(struct bt_jcx *cx, const struct bt_jstr *s, const struct bt_jcall *c)
{
    const struct bt_jval *from = bt_jarg(c, 0, "old"), *to = bt_jarg(c, 1, "new"),
                         *count = bt_jarg(c, 2, "count");
    int64_t left = count && count->type == BT_J_INT && count->i >= 0 ? count->i : INT64_MAX;
    struct bt_jsb sb = {.cx = cx};
    size_t at = 0;

    if (!from || !to || from->type != BT_J_STR || to->type != BT_J_STR || from->s->s.n == 0) {
        bt_jfail(cx, BT_E_INVALID, "replace takes two strings, the first not empty");
        return (struct bt_jval){0};
    }
    while (left-- > 0 && at < s->s.n && bt_jstep(cx, 1)) {
        const char *p = memmem(s->s.p + at, s->s.n - at, from->s->s.p, from->s->s.n);
        size_t found = p ? (size_t)(p - s->s.p) : s->s.n;

        bt_jsb_add_str(&sb, s, at, found);
        if (!p) {
            return bt_jsb_done(&sb);
        }
        bt_jsb_add_str(&sb, to->s, 0, to->s->s.n);
        at = found + from->s->s.n;
    }
    bt_jsb_add_str(&sb, s, at, s->s.n);
    return bt_jsb_done(&sb);
}

static bool is_lower(char c)
{
    return c >= 'a' && c <= 'z';
}

static bool is_upper(char c)
{
    return c >= 'A' && c <= 'Z';
}

/* ASCII letters; others stay. */
struct bt_jval bt_jrecase(struct bt_jcx *cx, const struct bt_jstr *s, enum bt_jcase to)
{
    char *p = bt_arena_alloc(cx->arena, s->s.n + 1);
    bool inside = false;
    struct bt_jsb sb = {.cx = cx};
    struct bt_jstr copy = *s;

    if (!p || !bt_jstep(cx, 1 + s->s.n / 16)) {
        return (struct bt_jval){0};
    }
    for (size_t i = 0; i < s->s.n; i++) {
        char c = s->s.p[i];
        bool letter = is_lower(c) || is_upper(c);
        bool up = to == BT_JC_UPPER || (to != BT_JC_LOWER && !inside);

        if (letter) {
            c = (char)(up ? c & ~0x20 : c | 0x20);
        }
        inside = to == BT_JC_CAPITAL || letter || ((unsigned char)c >= 0x80 && to == BT_JC_TITLE);
        p[i] = c;
    }
    copy.s.p = p;
    bt_jsb_add_str(&sb, &copy, 0, copy.s.n);
    return bt_jsb_done(&sb);
}

/* ---- methods of strings ---- */

static struct bt_jval split_blanks(struct bt_jcx *cx, const struct bt_jstr *s, int64_t max)
{
    struct bt_jval v = bt_jval_list(cx->arena);
    size_t i = 0;

    while (v.type == BT_J_LIST && bt_jstep(cx, 1)) {
        size_t from;

        while (i < s->s.n && is_space(s->s.p[i])) {
            i++;
        }
        if (i == s->s.n) {
            break;
        }
        from = i;
        if (max-- == 0) {
            struct bt_jval rest = bt_jstr_slice(cx, s, from, s->s.n);

            bt_jlist_push(cx->arena, v.l,
                          rest.type == BT_J_STR ? bt_jstrip(cx, rest.s, NULL, 2) : rest);
            break;
        }
        while (i < s->s.n && !is_space(s->s.p[i])) {
            i++;
        }
        bt_jlist_push(cx->arena, v.l, bt_jstr_slice(cx, s, from, i));
    }
    return v;
}

/* How often `what`, which is not empty, is in s. */
static int64_t count_of(struct bt_jcx *cx, struct bt_str s, struct bt_str what)
{
    const char *p = s.p, *end = s.p + s.n;
    int64_t n = 0;

    while (p < end && (p = memmem(p, (size_t)(end - p), what.p, what.n)) && bt_jstep(cx, 1)) {
        p += what.n;
        n++;
    }
    return n;
}

static struct bt_jval
split(struct bt_jcx *cx, const struct bt_jstr *s, const struct bt_jcall *c, bool right)
{
    const struct bt_jval *sep = bt_jarg(c, 0, "sep"), *count = bt_jarg(c, 1, "maxsplit");
    int64_t max = count && count->type == BT_J_INT && count->i >= 0 ? count->i : INT64_MAX;
    int64_t together; /* separators at the front that do not split */
    struct bt_jval v;
    size_t at = 0;

    if (!sep || sep->type == BT_J_NONE) {
        if (right && max != INT64_MAX) {
            bt_jfail(cx, BT_E_UNSUPPORTED, "rsplit at blanks with a limit");
        }
        return split_blanks(cx, s, max);
    }
    if (sep->type != BT_J_STR || sep->s->s.n == 0) {
        bt_jfail(cx, BT_E_INVALID, "split takes a string that is not empty");
        return (struct bt_jval){0};
    }
    v = bt_jval_list(cx->arena);
    together =
        right && max != INT64_MAX ? BT_MAX(count_of(cx, s->s, sep->s->s) - max, (int64_t)0) : 0;
    for (size_t i = 0; v.type == BT_J_LIST && bt_jstep(cx, 1);) {
        const char *p =
            max > 0 && i < s->s.n ? memmem(s->s.p + i, s->s.n - i, sep->s->s.p, sep->s->s.n) : NULL;

        if (!p) {
            bt_jlist_push(cx->arena, v.l, bt_jstr_slice(cx, s, at, s->s.n));
            break;
        }
        i = (size_t)(p - s->s.p) + sep->s->s.n;
        if (together > 0) {
            together--;
            continue;
        }
        bt_jlist_push(cx->arena, v.l, bt_jstr_slice(cx, s, at, (size_t)(p - s->s.p)));
        at = i;
        max--;
    }
    return v;
}

/* Whether s begins (or ends) with the string, or one of the tuple of strings. */
static bool
has_end(struct bt_jcx *cx, const struct bt_jstr *s, const struct bt_jval *what, bool front)
{
    if (what && what->type == BT_J_LIST) {
        for (size_t i = 0; i < what->l->n && bt_jstep(cx, 1); i++) {
            if (what->l->p[i].type == BT_J_STR && has_end(cx, s, &what->l->p[i], front)) {
                return true;
            }
        }
        return false;
    }
    if (!what || what->type != BT_J_STR) {
        bt_jfail(cx, BT_E_INVALID, "startswith and endswith take strings");
        return false;
    }
    return what->s->s.n <= s->s.n &&
           (what->s->s.n == 0 || memcmp(front ? s->s.p : s->s.p + s->s.n - what->s->s.n,
                                        what->s->s.p, what->s->s.n) == 0);
}

/* Without `what` at that end, if it is there. */
static struct bt_jval
remove_end(struct bt_jcx *cx, const struct bt_jstr *s, const struct bt_jval *what, bool front)
{
    size_t n = what && what->type == BT_J_STR && has_end(cx, s, what, front) ? what->s->s.n : 0;

    return bt_jstr_slice(cx, s, front ? n : 0, front ? s->s.n : s->s.n - n);
}

static struct bt_jval
find(struct bt_jcx *cx, const struct bt_jstr *s, const struct bt_jval *what, bool last)
{
    const char *p = NULL;

    if (!what || what->type != BT_J_STR) {
        bt_jfail(cx, BT_E_INVALID, "find takes a string");
        return (struct bt_jval){0};
    }
    bt_jstep(cx, 1 + s->s.n / 8);
    if (!last) {
        p = what->s->s.n == 0 ? s->s.p
            : s->s.n          ? memmem(s->s.p, s->s.n, what->s->s.p, what->s->s.n)
                              : NULL;
        return bt_jval_int(
            what->s->s.n == 0 ? 0
            : p ? (int64_t)bt_jstr_chars((struct bt_str){s->s.p, (size_t)(p - s->s.p)})
                : -1);
    }
    for (size_t i = s->s.n; what->s->s.n <= s->s.n && i-- > 0;) {
        if (s->s.n - i >= what->s->s.n && memcmp(s->s.p + i, what->s->s.p, what->s->s.n) == 0) {
            return bt_jval_int((int64_t)bt_jstr_chars((struct bt_str){s->s.p, i}));
        }
    }
    return bt_jval_int(-1);
}

static struct bt_jval count(struct bt_jcx *cx, const struct bt_jstr *s, const struct bt_jval *what)
{
    if (!what || what->type != BT_J_STR || what->s->s.n == 0) {
        bt_jfail(cx, BT_E_INVALID, "count takes a string that is not empty");
        return (struct bt_jval){0};
    }
    return bt_jval_int(count_of(cx, s->s, what->s->s));
}

static struct bt_jval join(struct bt_jcx *cx, const struct bt_jstr *s, const struct bt_jval *what)
{
    struct bt_jlist *l = what ? bt_jiterate(cx, what) : NULL;
    struct bt_jsb sb = {.cx = cx};

    for (size_t i = 0; l && i < l->n && bt_jstep(cx, 1); i++) {
        if (i) {
            bt_jsb_add_str(&sb, s, 0, s->s.n);
        }
        bt_jprint(&sb, &l->p[i]);
    }
    return bt_jsb_done(&sb);
}

static bool all_chars(const struct bt_jstr *s, bool (*is)(char))
{
    for (size_t i = 0; i < s->s.n; i++) {
        if (!is(s->s.p[i])) {
            return false;
        }
    }
    return s->s.n > 0;
}

static bool is_digit(char c)
{
    return c >= '0' && c <= '9';
}

/* X(name) in the order of enum method. */
#define METHODS(X)                                                                                 \
    X(strip)                                                                                       \
    X(lstrip)                                                                                      \
    X(rstrip)                                                                                      \
    X(split)                                                                                       \
    X(rsplit)                                                                                      \
    X(splitlines)                                                                                  \
    X(startswith)                                                                                  \
    X(endswith)                                                                                    \
    X(removeprefix)                                                                                \
    X(removesuffix)                                                                                \
    X(replace)                                                                                     \
    X(upper)                                                                                       \
    X(lower)                                                                                       \
    X(title)                                                                                       \
    X(capitalize)                                                                                  \
    X(find)                                                                                        \
    X(rfind)                                                                                       \
    X(count)                                                                                       \
    X(join)                                                                                        \
    X(isdigit)                                                                                     \
    X(isspace)                                                                                     \
    X(items)                                                                                       \
    X(keys)                                                                                        \
    X(values)                                                                                      \
    X(get)                                                                                         \
    X(cycle)

enum method {
#define X(name) M_##name,
    METHODS(X)
#undef X
        N_METHODS
};

static const char *const methods[] = {
#define X(name) #name,
    METHODS(X)
#undef X
};

static int method_of(struct bt_str name)
{
    for (int i = 0; i < N_METHODS; i++) {
        if (bt_str_eq(name, bt_str_of(methods[i]))) {
            return i;
        }
    }
    return -1;
}

bool bt_jmethod_known(struct bt_str name)
{
    return method_of(name) >= 0;
}

static struct bt_jval splitlines(struct bt_jcx *cx, const struct bt_jstr *s)
{
    struct bt_jval v = bt_jval_list(cx->arena);
    size_t from = 0;

    for (size_t i = 0; i < s->s.n && v.type == BT_J_LIST && bt_jstep(cx, 1); i++) {
        if (s->s.p[i] == '\n' || s->s.p[i] == '\r') {
            bt_jlist_push(cx->arena, v.l, bt_jstr_slice(cx, s, from, i));
            i += s->s.p[i] == '\r' && i + 1 < s->s.n && s->s.p[i + 1] == '\n';
            from = i + 1;
        }
    }
    if (from < s->s.n && v.type == BT_J_LIST) {
        bt_jlist_push(cx->arena, v.l, bt_jstr_slice(cx, s, from, s->s.n));
    }
    return v;
}

static struct bt_jval
str_method(struct bt_jcx *cx, const struct bt_jstr *s, int m, const struct bt_jcall *c)
{
    const struct bt_jval *first = c->n ? &c->args[0] : NULL;

    switch (m) {
    case M_strip:
        return bt_jstrip(cx, s, first, 3);
    case M_lstrip:
        return bt_jstrip(cx, s, first, 1);
    case M_rstrip:
        return bt_jstrip(cx, s, first, 2);
    case M_split:
    case M_rsplit:
        return split(cx, s, c, m == M_rsplit);
    case M_splitlines:
        return splitlines(cx, s);
    case M_startswith:
    case M_endswith:
        return bt_jval_bool(has_end(cx, s, first, m == M_startswith));
    case M_removeprefix:
    case M_removesuffix:
        return remove_end(cx, s, first, m == M_removeprefix);
    case M_replace:
        return bt_jreplace(cx, s, c);
    case M_upper:
        return bt_jrecase(cx, s, BT_JC_UPPER);
    case M_lower:
        return bt_jrecase(cx, s, BT_JC_LOWER);
    case M_title:
        return bt_jrecase(cx, s, BT_JC_TITLE);
    case M_capitalize:
        return bt_jrecase(cx, s, BT_JC_CAPITAL);
    case M_find:
    case M_rfind:
        return find(cx, s, first, m == M_rfind);
    case M_count:
        return count(cx, s, first);
    case M_join:
        return join(cx, s, first);
    case M_isdigit:
        return bt_jval_bool(all_chars(s, is_digit));
    case M_isspace:
        return bt_jval_bool(all_chars(s, is_space));
    default:
        bt_jfail(cx, BT_E_INVALID, "a string has no method %s", methods[m]);
        return (struct bt_jval){0};
    }
}

/* ---- methods of dicts ---- */

static struct bt_jval dict_list(struct bt_jcx *cx, const struct bt_jdict *d, int m)
{
    struct bt_jval v = bt_jval_list(cx->arena);

    for (size_t i = 0; i < d->n && v.type == BT_J_LIST && bt_jstep(cx, 1); i++) {
        struct bt_jval pair = m == M_items ? bt_jval_list(cx->arena) : (struct bt_jval){0};

        if (pair.type == BT_J_LIST) {
            pair.l->tuple = true;
            bt_jlist_push(cx->arena, pair.l, d->p[i].key_val);
            bt_jlist_push(cx->arena, pair.l, d->p[i].v);
        }
        bt_jlist_push(cx->arena, v.l,
                      m == M_items  ? pair
                      : m == M_keys ? d->p[i].key_val
                                    : d->p[i].v);
    }
    return v;
}

static struct bt_jval
dict_method(struct bt_jcx *cx, const struct bt_jdict *d, int m, const struct bt_jcall *c)
{
    const struct bt_jval *found = NULL, *index;

    switch (m) {
    case M_items:
    case M_keys:
    case M_values:
        return dict_list(cx, d, m);
    case M_get:
        if (c->n == 0) {
            break;
        }
        bt_jstep(cx, 1 + d->n / 8);
        found = c->args[0].type == BT_J_STR ? bt_jdict_get(d, c->args[0].s->s) : NULL;
        found = found ? found : bt_jarg(c, 1, "default");
        return found ? *found : bt_jval_none();
    case M_cycle:
        index = bt_jdict_get(d, BT_STR("index0"));
        if (index && index->type == BT_J_INT && c->n) {
            return c->args[(size_t)index->i % c->n];
        }
        break;
    default:
        break;
    }
    bt_jfail(cx, BT_E_INVALID, "a dict has no method %s with %zu arguments", methods[m], c->n);
    return (struct bt_jval){0};
}

struct bt_jval bt_jmethod(struct bt_jcx *cx,
                          const struct bt_jval *self,
                          struct bt_str name,
                          const struct bt_jcall *c)
{
    int m = method_of(name);

    BT_BUG_ON(m < 0);
    if (self->type == BT_J_STR) {
        return str_method(cx, self->s, m, c);
    }
    if (self->type == BT_J_DICT) {
        return dict_method(cx, self->d, m, c);
    }
    bt_jfail(cx, BT_E_INVALID, "%s has no method %s", bt_jtype_name(self), methods[m]);
    return (struct bt_jval){0};
}

/* ---- global functions ---- */

enum func { F_RANGE, F_NAMESPACE, F_DICT, F_RAISE, F_STRFTIME };

int bt_jfunc_find(struct bt_str name)
{
    static const char *const names[] = {"range", "namespace", "dict", "raise_exception",
                                        "strftime_now"};

    for (size_t i = 0; i < BT_ARRAY_LEN(names); i++) {
        if (bt_str_eq(name, bt_str_of(names[i]))) {
            return (int)i;
        }
    }
    return -1;
}

static struct bt_jval range(struct bt_jcx *cx, const struct bt_jcall *c)
{
    int64_t at = c->n > 1 ? bt_jint(&c->args[0]) : 0, end = 0,
            step = c->n > 2 ? bt_jint(&c->args[2]) : 1;
    struct bt_jval v = bt_jval_list(cx->arena);

    for (size_t i = 0; i < c->n; i++) {
        if (c->args[i].type != BT_J_INT && c->args[i].type != BT_J_BOOL) {
            step = 0;
        }
    }
    if (c->n < 1 || c->n > 3 || step == 0) {
        bt_jfail(cx, BT_E_INVALID, "range takes one to three integers");
        return v;
    }
    end = bt_jint(&c->args[c->n > 1 ? 1 : 0]);
    while ((step > 0 ? at < end : at > end) && v.type == BT_J_LIST && bt_jstep(cx, 1)) {
        bt_jlist_push(cx->arena, v.l, bt_jval_int(at));
        if (__builtin_add_overflow(at, step, &at)) {
            break;
        }
    }
    return v;
}

static struct bt_jval make_dict(struct bt_jcx *cx, const struct bt_jcall *c, bool ns)
{
    struct bt_jval v = bt_jval_dict(cx->arena);
    const struct bt_jdict *from[2] = {c->n && c->args[0].type == BT_J_DICT ? c->args[0].d : NULL,
                                      c->kw};

    for (int k = 0; k < 2 && v.type == BT_J_DICT; k++) {
        for (size_t i = 0; from[k] && i < from[k]->n && bt_jstep(cx, 1 + i / 8); i++) {
            bt_jdict_set(cx->arena, v.d, from[k]->p[i].key, from[k]->p[i].v);
        }
    }
    if (v.type == BT_J_DICT) {
        v.d->ns = ns;
    }
    return v;
}

static struct bt_jval now_as(struct bt_jcx *cx, const struct bt_jcall *c)
{
    time_t t = (time_t)cx->args->now_s;
    char format[128], text[256];
    struct tm tm;

    if (c->n != 1 || c->args[0].type != BT_J_STR || c->args[0].s->s.n >= sizeof(format) ||
        !gmtime_r(&t, &tm)) {
        bt_jfail(cx, BT_E_INVALID, "strftime_now takes a short format");
        return (struct bt_jval){0};
    }
    memcpy(format, c->args[0].s->s.p, c->args[0].s->s.n);
    format[c->args[0].s->s.n] = 0;
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored                                                                     \
    "-Wformat-nonliteral" /* the template's; strftime writes no more than asked */
    return bt_jstr_plain(cx, (struct bt_str){text, strftime(text, sizeof(text), format, &tm)});
#pragma GCC diagnostic pop
}

static void raise_exception(struct bt_jcx *cx, const struct bt_jcall *c)
{
    struct bt_str s =
        c->n && c->args[0].type == BT_J_STR ? c->args[0].s->s : BT_STR("no reason given");

    bt_jfail(cx, BT_E_INVALID, "it refuses the conversation: %.*s", (int)BT_MIN(s.n, (size_t)130),
             s.p);
}

struct bt_jval bt_jfunc(struct bt_jcx *cx, int func, const struct bt_jcall *c)
{
    switch (func) {
    case F_RANGE:
        return range(cx, c);
    case F_NAMESPACE:
    case F_DICT:
        return make_dict(cx, c, func == F_NAMESPACE);
    case F_STRFTIME:
        return now_as(cx, c);
    default:
        raise_exception(cx, c);
        return (struct bt_jval){0};
    }
}
