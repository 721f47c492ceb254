/* Filters and tests. */
#include "common/jinja/jinja_int.h"

#include <math.h>
#include <stdlib.h>

#define ANY 99

/* Name, arguments beside the value by position at most, and by name: what is not here is refused,
 * as passing over it would change the text. NULL = any. */
#define FILTERS(X)                                                                                 \
    X(trim, 1, "chars")                                                                            \
    X(tojson, 2, "indent ensure_ascii")                                                            \
    X(length, 0, "")                                                                               \
    X(count, 0, "")                                                                                \
    X(upper, 0, "")                                                                                \
    X(lower, 0, "")                                                                                \
    X(title, 0, "")                                                                                \
    X(capitalize, 0, "")                                                                           \
    X(replace, 3, "old new count")                                                                 \
    X(join, 2, "d attribute")                                                                      \
    X(default, 2, "default_value boolean")                                                         \
    X(d, 2, "default_value boolean")                                                               \
    X(string, 0, "")                                                                               \
    X(int, 1, "default")                                                                           \
    X(float, 1, "default")                                                                         \
    X(abs, 0, "")                                                                                  \
    X(round, 1, "precision")                                                                       \
    X(list, 0, "")                                                                                 \
    X(items, 0, "")                                                                                \
    X(dictsort, 1, "case_sensitive reverse")                                                       \
    X(first, 0, "")                                                                                \
    X(last, 0, "")                                                                                 \
    X(reverse, 0, "")                                                                              \
    X(sort, 3, "reverse case_sensitive attribute")                                                 \
    X(unique, 0, "")                                                                               \
    X(min, 0, "")                                                                                  \
    X(max, 0, "")                                                                                  \
    X(sum, 2, "attribute start")                                                                   \
    X(map, ANY, NULL)                                                                              \
    X(select, ANY, NULL)                                                                           \
    X(reject, ANY, NULL)                                                                           \
    X(selectattr, ANY, NULL)                                                                       \
    X(rejectattr, ANY, NULL)                                                                       \
    X(indent, 3, "width first blank")                                                              \
    X(safe, 0, "")

enum filter {
#define X(name, n, keywords) F_##name,
    FILTERS(X)
#undef X
        N_FILTERS
};

#define TESTS(X)                                                                                   \
    X(defined)                                                                                     \
    X(undefined)                                                                                   \
    X(none)                                                                                        \
    X(string)                                                                                      \
    X(mapping)                                                                                     \
    X(sequence)                                                                                    \
    X(iterable)                                                                                    \
    X(number)                                                                                      \
    X(integer)                                                                                     \
    X(float)                                                                                       \
    X(boolean)                                                                                     \
    X(true)                                                                                        \
    X(false)                                                                                       \
    X(callable)                                                                                    \
    X(odd)                                                                                         \
    X(even)                                                                                        \
    X(divisibleby)                                                                                 \
    X(eq)                                                                                          \
    X(equalto)                                                                                     \
    X(ne)                                                                                          \
    X(lt)                                                                                          \
    X(le)                                                                                          \
    X(gt)                                                                                          \
    X(ge)                                                                                          \
    X(in)                                                                                          \
    X(sameas)                                                                                      \
    X(lower)                                                                                       \
    X(upper)

enum test {
#define X(name) T_##name,
    TESTS(X)
#undef X
        N_TESTS
};

static const char *const filter_names[] = {
#define X(name, n, keywords) #name,
    FILTERS(X)
#undef X
};

static const struct {
    size_t most;
    const char *keywords;
} filter_args[] = {
#define X(name, n, keywords) {n, keywords},
    FILTERS(X)
#undef X
};

static const char *const test_names[] = {
#define X(name) #name,
    TESTS(X)
#undef X
};

static int find(const char *const *names, int n, struct bt_str name)
{
    for (int i = 0; i < n; i++) {
        if (bt_str_eq(name, bt_str_of(names[i]))) {
            return i;
        }
    }
    return -1;
}

int bt_jfilter_find(struct bt_str name)
{
    return find(filter_names, N_FILTERS, name);
}

size_t bt_jfilter_most_args(int filter)
{
    return filter_args[filter].most;
}

bool bt_jfilter_takes(int filter, struct bt_str keyword)
{
    const char *p = filter_args[filter].keywords;

    for (size_t n; p && *p; p += n + (p[n] == ' ')) {
        n = strcspn(p, " ");
        if (bt_str_eq((struct bt_str){p, n}, keyword)) {
            return true;
        }
    }
    return !p;
}

int bt_jtest_find(struct bt_str name)
{
    return find(test_names, N_TESTS, name);
}

static struct bt_jval wrong(struct bt_jcx *cx, const char *what, const struct bt_jval *v)
{
    bt_jfail(cx, BT_E_INVALID, "%s of %s", what, bt_jtype_name(v));
    return (struct bt_jval){0};
}

struct bt_jlist *bt_jiterate(struct bt_jcx *cx, const struct bt_jval *v)
{
    struct bt_jval out;

    if (v->type == BT_J_LIST) {
        return v->l;
    }
    if (v->type != BT_J_DICT && v->type != BT_J_STR && v->type != BT_J_UNDEFINED) {
        wrong(cx, "elements", v);
        return NULL;
    }
    out = bt_jval_list(cx->arena);
    if (out.type != BT_J_LIST) {
        return NULL;
    }
    for (size_t i = 0; v->type == BT_J_DICT && i < v->d->n && bt_jstep(cx, 1); i++) {
        bt_jlist_push(cx->arena, out.l, v->d->p[i].key_val);
    }
    for (size_t at = 0; v->type == BT_J_STR && at < v->s->s.n && bt_jstep(cx, 4);) {
        size_t end = at + bt_jstr_offset((struct bt_str){v->s->s.p + at, v->s->s.n - at}, 1);

        bt_jlist_push(cx->arena, out.l, bt_jstr_slice(cx, v->s, at, end));
        at = end;
    }
    return out.l;
}

/* ---- tests ---- */

static bool int_test(struct bt_jcx *cx, int test, const struct bt_jval *v, const struct bt_jcall *c)
{
    int64_t by = test == T_divisibleby ? (c->n ? bt_jint(&c->args[0]) : 0) : 2, r;

    if ((v->type != BT_J_INT && v->type != BT_J_BOOL) || by == 0) {
        wrong(cx, test_names[test], v);
        return false;
    }
    r = by == -1 ? 0 : bt_jint(v) % by;
    return (r == 0) == (test != T_odd);
}

static bool
compare_test(struct bt_jcx *cx, int test, const struct bt_jval *v, const struct bt_jcall *c)
{
    const struct bt_jval *o = c->n ? &c->args[0] : NULL;

    if (!o) {
        bt_jfail(cx, BT_E_INVALID, "test %s takes an argument", test_names[test]);
        return false;
    }
    switch (test) {
    case T_eq:
    case T_equalto:
        return bt_jequal(cx, v, o);
    case T_ne:
        return !bt_jequal(cx, v, o);
    case T_in:
        return bt_jcontains(cx, o, v);
    case T_sameas:
        return v->type == o->type && bt_jequal(cx, v, o);
    case T_lt:
        return bt_jcompare(cx, v, o) < 0;
    case T_le:
        return bt_jcompare(cx, v, o) <= 0;
    case T_gt:
        return bt_jcompare(cx, v, o) > 0;
    default:
        return bt_jcompare(cx, v, o) >= 0;
    }
}

static bool case_test(struct bt_jcx *cx, int test, const struct bt_jval *v)
{
    bool some = false, other = false;

    for (size_t i = 0; v->type == BT_J_STR && i < v->s->s.n; i++) {
        char ch = v->s->s.p[i];
        bool low = ch >= 'a' && ch <= 'z', up = ch >= 'A' && ch <= 'Z';

        some |= test == T_lower ? low : up;
        other |= test == T_lower ? up : low;
    }
    return bt_jstep(cx, 1) && some && !other;
}

bool bt_jtest(struct bt_jcx *cx, int test, const struct bt_jval *v, const struct bt_jcall *c)
{
    switch (test) {
    case T_defined:
        return v->type != BT_J_UNDEFINED;
    case T_undefined:
        return v->type == BT_J_UNDEFINED;
    case T_none:
        return v->type == BT_J_NONE;
    case T_string:
        return v->type == BT_J_STR;
    case T_mapping:
        return v->type == BT_J_DICT && !v->d->ns;
    case T_sequence:
    case T_iterable:
        return v->type == BT_J_LIST || v->type == BT_J_STR || v->type == BT_J_UNDEFINED ||
               (v->type == BT_J_DICT && !v->d->ns);
    case T_number:
        return bt_jis_num(v);
    case T_integer:
        return v->type == BT_J_INT;
    case T_float:
        return v->type == BT_J_FLOAT;
    case T_boolean:
        return v->type == BT_J_BOOL;
    case T_true:
    case T_false:
        return v->type == BT_J_BOOL && v->b == (test == T_true);
    case T_callable:
        return v->type == BT_J_FUNC || v->type == BT_J_MACRO;
    case T_odd:
    case T_even:
    case T_divisibleby:
        return int_test(cx, test, v, c);
    case T_lower:
    case T_upper:
        return case_test(cx, test, v);
    default:
        return compare_test(cx, test, v, c);
    }
}

/* ---- filters of one value ---- */

static struct bt_jval tojson(struct bt_jcx *cx, const struct bt_jval *v, const struct bt_jcall *c)
{
    const struct bt_jval *indent = bt_jarg(c, 1, "indent");
    const struct bt_jval *ascii =
        c->n == 1 ? bt_jdict_get(c->kw, BT_STR("ensure_ascii")) : bt_jarg(c, 0, "ensure_ascii");
    struct bt_jsb sb = {.cx = cx};

    if (!indent || indent->type != BT_J_INT) { /* the reference's own filter takes it first */
        indent = c->n == 1 ? &c->args[0] : indent;
    }
    bt_jjson(&sb, v,
             indent && indent->type == BT_J_INT ? (int)BT_MIN((uint64_t)indent->i, (uint64_t)64)
                                                : -1,
             ascii && bt_jtrue(ascii));
    return bt_jsb_done(&sb);
}

static struct bt_jval length(struct bt_jcx *cx, const struct bt_jval *v)
{
    if (v->type == BT_J_STR) {
        return bt_jval_int((int64_t)bt_jstr_chars(v->s->s));
    }
    if (v->type == BT_J_LIST) {
        return bt_jval_int((int64_t)v->l->n);
    }
    if (v->type == BT_J_DICT && !v->d->ns) {
        return bt_jval_int((int64_t)v->d->n);
    }
    return v->type == BT_J_UNDEFINED ? bt_jval_int(0) : wrong(cx, "the length", v);
}

static struct bt_jval
to_number(struct bt_jcx *cx, const struct bt_jval *v, const struct bt_jcall *c, bool as_int)
{
    const struct bt_jval *other = bt_jarg(c, 0, "default");
    char text[64], *end;

    if (v->type == BT_J_FLOAT && as_int) {
        return fabs(v->f) < 9e18 ? bt_jval_int((int64_t)v->f) : wrong(cx, "the integer", v);
    }
    if (bt_jis_num(v)) {
        return as_int ? bt_jval_int(bt_jint(v)) : bt_jval_float(bt_jnum(v));
    }
    if (v->type == BT_J_STR && v->s->s.n && v->s->s.n < sizeof(text)) {
        double f;

        memcpy(text, v->s->s.p, v->s->s.n);
        text[v->s->s.n] = 0;
        f = strtod(text, &end);
        if (!*end && isfinite(f) && fabs(f) < 9e18) {
            return as_int ? bt_jval_int(strpbrk(text, ".eE") ? (int64_t)f : strtoll(text, NULL, 10))
                          : bt_jval_float(f);
        }
    }
    return other ? *other : as_int ? bt_jval_int(0) : bt_jval_float(0);
}

static struct bt_jval absolute(struct bt_jcx *cx, const struct bt_jval *v)
{
    if (v->type == BT_J_FLOAT) {
        return bt_jval_float(fabs(v->f));
    }
    if (!bt_jis_num(v) || bt_jint(v) == INT64_MIN) {
        return wrong(cx, "the absolute value", v);
    }
    return bt_jval_int(bt_jint(v) < 0 ? -bt_jint(v) : bt_jint(v));
}

static struct bt_jval rounded(struct bt_jcx *cx, const struct bt_jval *v, const struct bt_jcall *c)
{
    const struct bt_jval *digits = bt_jarg(c, 0, "precision");
    bool given = digits && digits->type == BT_J_INT && digits->i > -16 && digits->i < 16;
    double by = pow(10, given ? (double)digits->i : 0);

    return bt_jis_num(v) ? bt_jval_float(nearbyint(bt_jnum(v) * by) / by)
                         : wrong(cx, "rounding", v);
}

static struct bt_jval fallback(const struct bt_jval *v, const struct bt_jcall *c)
{
    const struct bt_jval *other = bt_jarg(c, 0, "default_value"),
                         *boolean = bt_jarg(c, 1, "boolean");

    if (v->type != BT_J_UNDEFINED && (!boolean || !bt_jtrue(boolean) || bt_jtrue(v))) {
        return *v;
    }
    return other ? *other : (struct bt_jval){0};
}

/* Blanks in front of all lines but the first. */
static struct bt_jval indent(struct bt_jcx *cx, const struct bt_jval *v, const struct bt_jcall *c)
{
    const struct bt_jval *width = bt_jarg(c, 0, "width"), *first = bt_jarg(c, 1, "first"),
                         *blank = bt_jarg(c, 2, "blank");
    int64_t n = width && width->type == BT_J_INT ? BT_MIN(width->i, 256) : 4;
    struct bt_jval s = bt_jto_str(cx, v);
    struct bt_jsb sb = {.cx = cx};
    size_t at = 0;

    for (bool begun = false; s.type == BT_J_STR && at <= s.s->s.n && bt_jstep(cx, 1);
         begun = true) {
        const char *p = at < s.s->s.n ? memchr(s.s->s.p + at, '\n', s.s->s.n - at) : NULL;
        size_t end = p ? (size_t)(p - s.s->s.p) : s.s->s.n;
        bool pad = begun ? end > at || (blank && bt_jtrue(blank)) : first && bt_jtrue(first);

        for (int64_t i = 0; pad && i < n; i++) {
            bt_jsb_add(&sb, BT_STR(" "), true);
        }
        bt_jsb_add_str(&sb, s.s, at, BT_MIN(end + 1, s.s->s.n));
        at = end + 1;
    }
    return bt_jsb_done(&sb);
}

/* ---- filters of sequences ---- */

static struct bt_jval copy_list(struct bt_jcx *cx, const struct bt_jlist *l, bool backwards)
{
    struct bt_jval v = bt_jval_list(cx->arena);

    for (size_t i = 0; l && i < l->n && v.type == BT_J_LIST && bt_jstep(cx, 1); i++) {
        bt_jlist_push(cx->arena, v.l, l->p[backwards ? l->n - 1 - i : i]);
    }
    return v;
}

static struct bt_jval reversed(struct bt_jcx *cx, const struct bt_jval *v)
{
    struct bt_jlist *l = bt_jiterate(cx, v);
    struct bt_jsb sb = {.cx = cx};

    if (v->type != BT_J_STR) {
        return copy_list(cx, l, true);
    }
    for (size_t i = l ? l->n : 0; i-- > 0;) {
        bt_jprint(&sb, &l->p[i]);
    }
    return bt_jsb_done(&sb);
}

/* Value of an attribute path "a.b" of v. */
static struct bt_jval path(struct bt_jcx *cx, struct bt_jval v, struct bt_str name)
{
    while (cx->rc == BT_OK) {
        const char *dot = name.n ? memchr(name.p, '.', name.n) : NULL;
        size_t n = dot ? (size_t)(dot - name.p) : name.n;

        v = bt_jattr(cx, &v, (struct bt_str){name.p, n});
        if (!dot) {
            break;
        }
        name = (struct bt_str){dot + 1, name.n - n - 1};
    }
    return v;
}

static struct bt_jval
by_attribute(struct bt_jcx *cx, const struct bt_jval *v, const struct bt_jval *attribute)
{
    return attribute && attribute->type == BT_J_STR ? path(cx, *v, attribute->s->s) : *v;
}

/* Strings compare without case unless asked, as in the reference. */
static struct bt_jval
sort_key(struct bt_jcx *cx, const struct bt_jval *v, const struct bt_jval *attribute, bool cased)
{
    struct bt_jval k = by_attribute(cx, v, attribute);

    return k.type == BT_J_STR && !cased ? bt_jrecase(cx, k.s, BT_JC_LOWER) : k;
}

/* Merge sort: stable. `keys` go with `vals`. */
static void sort(struct bt_jcx *cx, struct bt_jval *keys, struct bt_jval *vals, size_t n)
{
    struct bt_jval *k = bt_arena_alloc(cx->arena, 2 * BT_MAX(n, (size_t)1) * sizeof(*k)),
                   *v = k ? k + n : NULL;

    for (size_t width = 1; k && width < n; width *= 2) {
        for (size_t at = 0; at < n; at += 2 * width) {
            size_t a = at, mid = BT_MIN(at + width, n), b = mid, end = BT_MIN(at + 2 * width, n);

            for (size_t i = at; i < end && bt_jstep(cx, 1); i++) {
                bool left = a < mid && (b >= end || bt_jcompare(cx, &keys[a], &keys[b]) <= 0);

                k[i] = keys[left ? a : b];
                v[i] = vals[left ? a++ : b++];
            }
        }
        if (cx->rc != BT_OK) {
            return;
        }
        memcpy(keys, k, n * sizeof(*k));
        memcpy(vals, v, n * sizeof(*v));
    }
}

static struct bt_jval
sorted(struct bt_jcx *cx, struct bt_jlist *l, const struct bt_jcall *c, int filter)
{
    const struct bt_jval *attribute = filter == F_sort ? bt_jarg(c, 2, "attribute") : NULL;
    const struct bt_jval *down = bt_jarg(c, filter == F_sort ? 0 : 2, "reverse");
    const struct bt_jval *cased = bt_jarg(c, filter == F_sort ? 1 : 0, "case_sensitive");
    struct bt_jval out = copy_list(cx, l, down && bt_jtrue(down));
    struct bt_jval *keys;

    if (out.type != BT_J_LIST || out.l->n == 0) {
        return out;
    }
    keys = bt_arena_alloc(cx->arena, out.l->n * sizeof(*keys));
    for (size_t i = 0; keys && i < out.l->n; i++) {
        struct bt_jval *v = &out.l->p[i];

        keys[i] = sort_key(cx, filter == F_dictsort ? &v->l->p[0] : v, attribute,
                           cased && bt_jtrue(cased));
    }
    if (keys && cx->rc == BT_OK) {
        sort(cx, keys, out.l->p, out.l->n);
    }
    return down && bt_jtrue(down) ? copy_list(cx, out.l, true) : out;
}

static struct bt_jval dictsort(struct bt_jcx *cx, const struct bt_jval *v, const struct bt_jcall *c)
{
    struct bt_jdict none = {0};
    struct bt_jval items;

    if (v->type != BT_J_DICT) {
        return wrong(cx, "dictsort", v);
    }
    items = bt_jmethod(cx, v, BT_STR("items"), &(struct bt_jcall){NULL, 0, &none});
    return items.type == BT_J_LIST ? sorted(cx, items.l, c, F_dictsort) : items;
}

static struct bt_jval unique(struct bt_jcx *cx, const struct bt_jlist *l)
{
    struct bt_jval v = bt_jval_list(cx->arena);

    for (size_t i = 0; l && i < l->n && v.type == BT_J_LIST && bt_jstep(cx, 1); i++) {
        if (!bt_jcontains(cx, &v, &l->p[i])) {
            bt_jlist_push(cx->arena, v.l, l->p[i]);
        }
    }
    return v;
}

static struct bt_jval extreme(struct bt_jcx *cx, const struct bt_jlist *l, bool max)
{
    struct bt_jval best = {0};

    for (size_t i = 0; l && i < l->n && bt_jstep(cx, 1); i++) {
        if (i == 0 || (bt_jcompare(cx, &l->p[i], &best) > 0) == max) {
            best = l->p[i];
        }
    }
    return best;
}

static struct bt_jval sum(struct bt_jcx *cx, const struct bt_jlist *l, const struct bt_jcall *c)
{
    const struct bt_jval *attribute = bt_jarg(c, 0, "attribute"), *start = bt_jarg(c, 1, "start");
    struct bt_jval total = start ? *start : bt_jval_int(0);

    for (size_t i = 0; l && i < l->n && bt_jstep(cx, 1); i++) {
        struct bt_jval v = by_attribute(cx, &l->p[i], attribute);

        total = bt_jbinary(cx, BT_JO_ADD, &total, &v);
    }
    return total;
}

static struct bt_jval join(struct bt_jcx *cx, const struct bt_jlist *l, const struct bt_jcall *c)
{
    const struct bt_jval *between = bt_jarg(c, 0, "d"), *attribute = bt_jarg(c, 1, "attribute");
    struct bt_jsb sb = {.cx = cx};

    for (size_t i = 0; l && i < l->n && bt_jstep(cx, 1); i++) {
        struct bt_jval v = by_attribute(cx, &l->p[i], attribute);

        if (i && between) {
            bt_jprint(&sb, between);
        }
        bt_jprint(&sb, &v);
    }
    return bt_jsb_done(&sb);
}

/* The rest of a call whose first n arguments were taken. */
static struct bt_jcall rest(const struct bt_jcall *c, size_t n)
{
    return n ? (struct bt_jcall){c->args + n, c->n - n, c->kw} : *c;
}

static struct bt_jval mapped(struct bt_jcx *cx, const struct bt_jlist *l, const struct bt_jcall *c)
{
    const struct bt_jval *attribute = c->n ? NULL : bt_jdict_get(c->kw, BT_STR("attribute")), *def;
    int filter = c->n && c->args[0].type == BT_J_STR ? bt_jfilter_find(c->args[0].s->s) : -1;
    struct bt_jval out = bt_jval_list(cx->arena);

    if (!attribute && (filter < 0 || filter == F_map)) {
        bt_jfail(cx, BT_E_UNSUPPORTED,
                 "map takes an attribute or the name of a filter that we know");
        return out;
    }
    def = bt_jdict_get(c->kw, BT_STR("default"));
    for (size_t i = 0; l && i < l->n && out.type == BT_J_LIST && bt_jstep(cx, 1); i++) {
        struct bt_jcall inner = c->n ? rest(c, 1) : *c;
        struct bt_jval v = attribute ? by_attribute(cx, &l->p[i], attribute)
                                     : bt_jfilter(cx, filter, l->p[i], &inner);

        bt_jlist_push(cx->arena, out.l, attribute && def && v.type == BT_J_UNDEFINED ? *def : v);
    }
    return out;
}

/* select, reject (test, arguments) and selectattr, rejectattr (attribute, test, arguments). */
static struct bt_jval
chosen(struct bt_jcx *cx, const struct bt_jlist *l, const struct bt_jcall *c, int filter)
{
    bool attr = filter == F_selectattr || filter == F_rejectattr;
    bool keep = filter == F_select || filter == F_selectattr;
    const struct bt_jval *attribute = attr && c->n ? &c->args[0] : NULL;
    struct bt_jcall inner = rest(c, BT_MIN(c->n, (size_t)attr));
    struct bt_jval out = bt_jval_list(cx->arena);
    int test = -1;

    if (inner.n) {
        test = inner.args[0].type == BT_J_STR ? bt_jtest_find(inner.args[0].s->s) : -1;
        if (test < 0) {
            bt_jfail(cx, BT_E_UNSUPPORTED, "%s with a test that we do not know",
                     filter_names[filter]);
        }
        inner = rest(&inner, 1);
    }
    for (size_t i = 0; l && i < l->n && out.type == BT_J_LIST && bt_jstep(cx, 1); i++) {
        struct bt_jval v = by_attribute(cx, &l->p[i], attribute);
        bool yes = test < 0 ? bt_jtrue(&v) : bt_jtest(cx, test, &v, &inner);

        if (yes == keep) {
            bt_jlist_push(cx->arena, out.l, l->p[i]);
        }
    }
    return out;
}

static struct bt_jval
of_sequence(struct bt_jcx *cx, int filter, const struct bt_jval *v, const struct bt_jcall *c)
{
    bool lazy = filter == F_map || filter == F_select || filter == F_reject ||
                filter == F_selectattr || filter == F_rejectattr;
    struct bt_jlist *l;

    if (lazy && !bt_jtrue(v)) { /* none as well: it is not looked into */
        return bt_jval_list(cx->arena);
    }
    l = bt_jiterate(cx, v);
    if (!l) {
        return (struct bt_jval){0};
    }
    switch (filter) {
    case F_list:
        return copy_list(cx, l, false);
    case F_first:
        return l->n ? l->p[0] : (struct bt_jval){0};
    case F_last:
        return l->n ? l->p[l->n - 1] : (struct bt_jval){0};
    case F_sort:
        return sorted(cx, l, c, F_sort);
    case F_unique:
        return unique(cx, l);
    case F_min:
    case F_max:
        return extreme(cx, l, filter == F_max);
    case F_sum:
        return sum(cx, l, c);
    case F_join:
        return join(cx, l, c);
    case F_map:
        return mapped(cx, l, c);
    default:
        return chosen(cx, l, c, filter);
    }
}

static struct bt_jval
of_text(struct bt_jcx *cx, int filter, const struct bt_jval *v, const struct bt_jcall *c)
{
    struct bt_jval s = bt_jto_str(cx, v);

    if (s.type != BT_J_STR) {
        return s;
    }
    switch (filter) {
    case F_trim:
        return bt_jstrip(cx, s.s, bt_jarg(c, 0, "chars"), 3);
    case F_upper:
        return bt_jrecase(cx, s.s, BT_JC_UPPER);
    case F_lower:
        return bt_jrecase(cx, s.s, BT_JC_LOWER);
    case F_title:
        return bt_jrecase(cx, s.s, BT_JC_TITLE);
    case F_capitalize:
        return bt_jrecase(cx, s.s, BT_JC_CAPITAL);
    case F_replace:
        return bt_jreplace(cx, s.s, c);
    default: /* string, safe */
        return s;
    }
}

struct bt_jval bt_jfilter(struct bt_jcx *cx, int filter, struct bt_jval v, const struct bt_jcall *c)
{
    struct bt_jdict none = {0};

    switch (filter) {
    case F_trim:
    case F_upper:
    case F_lower:
    case F_title:
    case F_capitalize:
    case F_replace:
    case F_string:
    case F_safe:
        return of_text(cx, filter, &v, c);
    case F_tojson:
        return tojson(cx, &v, c);
    case F_length:
    case F_count:
        return length(cx, &v);
    case F_default:
    case F_d:
        return fallback(&v, c);
    case F_int:
    case F_float:
        return to_number(cx, &v, c, filter == F_int);
    case F_abs:
        return absolute(cx, &v);
    case F_round:
        return rounded(cx, &v, c);
    case F_items:
        return v.type == BT_J_UNDEFINED
                   ? bt_jval_list(cx->arena)
                   : bt_jmethod(cx, &v, BT_STR("items"), &(struct bt_jcall){NULL, 0, &none});
    case F_dictsort:
        return dictsort(cx, &v, c);
    case F_reverse:
        return reversed(cx, &v);
    case F_indent:
        return indent(cx, &v, c);
    default:
        return of_sequence(cx, filter, &v, c);
    }
}
