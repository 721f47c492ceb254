/* Operators on values: items, slices, arithmetic, relations; as Python has them, with 64-bit
 * integers. */
#include "common/jinja/jinja_int.h"

#include <math.h>

/* ---- items ---- */

struct bt_jval bt_jattr(struct bt_jcx *cx, const struct bt_jval *v, struct bt_str name)
{
    const struct bt_jval *found = NULL;

    if (v->type == BT_J_UNDEFINED) {
        bt_jfail(cx, BT_E_INVALID, "\"%.*s\" of an undefined value",
                 (int)BT_MIN(name.n, (size_t)60), name.p);
    } else if (v->type == BT_J_DICT && bt_jstep(cx, 1 + v->d->n / 8)) {
        found = bt_jdict_get(v->d, name);
    }
    return found ? *found : (struct bt_jval){0};
}

struct bt_jval bt_jitem(struct bt_jcx *cx, const struct bt_jval *v, const struct bt_jval *i)
{
    int64_t n, at = bt_jint(i);

    if (v->type == BT_J_UNDEFINED) {
        bt_jfail(cx, BT_E_INVALID, "an element of an undefined value");
        return (struct bt_jval){0};
    }
    if (i->type == BT_J_STR) {
        return bt_jattr(cx, v, i->s->s);
    }
    if ((v->type != BT_J_LIST && v->type != BT_J_STR) ||
        (i->type != BT_J_INT && i->type != BT_J_BOOL)) {
        return (struct bt_jval){0};
    }
    n = (int64_t)(v->type == BT_J_LIST ? v->l->n : bt_jstr_chars(v->s->s));
    at += at < 0 ? n : 0;
    if (at < 0 || at >= n) {
        return (struct bt_jval){0};
    }
    if (v->type == BT_J_LIST) {
        return v->l->p[at];
    }
    bt_jstep(cx, 1 + v->s->s.n / 16);
    return bt_jstr_slice(cx, v->s, bt_jstr_offset(v->s->s, (size_t)at),
                         bt_jstr_offset(v->s->s, (size_t)at + 1));
}

/* Start and stop of a slice as Python sets them. */
static bool slice_bounds(struct bt_jcx *cx, const struct bt_jval p[3], int64_t n, int64_t ret[3])
{
    int64_t step = p[2].type == BT_J_NONE ? 1 : bt_jint(&p[2]);

    for (int i = 0; i < 3; i++) {
        if (p[i].type != BT_J_NONE && p[i].type != BT_J_INT && p[i].type != BT_J_BOOL) {
            bt_jfail(cx, BT_E_INVALID, "%s is no bound of a slice", bt_jtype_name(&p[i]));
            return false;
        }
    }
    if (step == 0 || step < -(INT64_MAX / 2)) {
        bt_jfail(cx, BT_E_INVALID, "a slice with step 0");
        return false;
    }
    for (int i = 0; i < 2; i++) {
        int64_t low = step < 0 ? -1 : 0, high = step < 0 ? n - 1 : n, v = bt_jint(&p[i]);

        if (p[i].type == BT_J_NONE) {
            ret[i] = (i == 0) == (step > 0) ? low : high;
            continue;
        }
        v += v < 0 ? n : 0;
        ret[i] = v < low ? low : v > high ? high : v;
    }
    ret[2] = step;
    return true;
}

struct bt_jval bt_jslice(struct bt_jcx *cx, const struct bt_jval *v, const struct bt_jval p[3])
{
    bool str = v->type == BT_J_STR;
    struct bt_jval out = {0};
    struct bt_jsb sb = {.cx = cx};
    int64_t b[3], n;

    if (!str && v->type != BT_J_LIST) {
        bt_jfail(cx, BT_E_INVALID, "a slice of %s", bt_jtype_name(v));
        return out;
    }
    n = (int64_t)(str ? bt_jstr_chars(v->s->s) : v->l->n);
    if (!bt_jstep(cx, 1 + (str ? v->s->s.n / 8 : 0)) || !slice_bounds(cx, p, n, b)) {
        return out;
    }
    if (str && b[2] == 1) {
        return bt_jstr_slice(cx, v->s, bt_jstr_offset(v->s->s, (size_t)b[0]),
                             bt_jstr_offset(v->s->s, (size_t)BT_MAX(b[0], b[1])));
    }
    if (!str) {
        out = bt_jval_list(cx->arena);
        if (out.type == BT_J_LIST) {
            out.l->tuple = v->l->tuple;
        }
    }
    for (int64_t i = b[0]; b[2] > 0 ? i < b[1] : i > b[1]; i += b[2]) {
        if (!bt_jstep(cx, 1 + (str ? v->s->s.n / 8 : 0)) || (!str && out.type != BT_J_LIST)) {
            break;
        }
        if (str) {
            bt_jsb_add_str(&sb, v->s, bt_jstr_offset(v->s->s, (size_t)i),
                           bt_jstr_offset(v->s->s, (size_t)i + 1));
        } else {
            bt_jlist_push(cx->arena, out.l, v->l->p[i]);
        }
    }
    return str ? bt_jsb_done(&sb) : out;
}

/* ---- arithmetic ---- */

static struct bt_jval int_op(struct bt_jcx *cx, enum bt_jop op, int64_t a, int64_t b)
{
    int64_t r = 1;
    bool over = false;

    if ((op == BT_JO_FLOORDIV || op == BT_JO_MOD) && (b == 0 || (b == -1 && a == INT64_MIN))) {
        bt_jfail(cx, BT_E_INVALID, "division of %lld by %lld", (long long)a, (long long)b);
        return (struct bt_jval){0};
    }
    switch ((int)op) {
    case BT_JO_ADD:
        over = __builtin_add_overflow(a, b, &r);
        break;
    case BT_JO_SUB:
        over = __builtin_sub_overflow(a, b, &r);
        break;
    case BT_JO_MUL:
        over = __builtin_mul_overflow(a, b, &r);
        break;
    case BT_JO_FLOORDIV:
        r = a / b - (a % b != 0 && (a < 0) != (b < 0));
        break;
    case BT_JO_MOD:
        r = a % b + (a % b != 0 && (a < 0) != (b < 0) ? b : 0);
        break;
    default: /* a power; b is not negative */
        for (int64_t i = 0; i < b && !over && (a > 1 || a < -1); i++) {
            over = __builtin_mul_overflow(r, a, &r);
        }
        r = b == 0 || a == 1 ? 1 : a == 0 ? 0 : a == -1 ? (b % 2 ? -1 : 1) : r;
        break;
    }
    if (over) {
        bt_jfail(cx, BT_E_INVALID, "a number of more than 64 bits");
    }
    return bt_jval_int(r);
}

static struct bt_jval float_op(struct bt_jcx *cx, enum bt_jop op, double a, double b)
{
    if ((op == BT_JO_DIV || op == BT_JO_FLOORDIV || op == BT_JO_MOD) && b == 0) {
        bt_jfail(cx, BT_E_INVALID, "division by zero");
        return (struct bt_jval){0};
    }
    switch ((int)op) {
    case BT_JO_ADD:
        return bt_jval_float(a + b);
    case BT_JO_SUB:
        return bt_jval_float(a - b);
    case BT_JO_MUL:
        return bt_jval_float(a * b);
    case BT_JO_DIV:
        return bt_jval_float(a / b);
    case BT_JO_FLOORDIV:
        return bt_jval_float(floor(a / b));
    case BT_JO_MOD:
        return bt_jval_float(a - floor(a / b) * b);
    default:
        return bt_jval_float(pow(a, b));
    }
}

static struct bt_jval
join_lists(struct bt_jcx *cx, const struct bt_jlist *a, const struct bt_jlist *b)
{
    struct bt_jval v = bt_jval_list(cx->arena);

    for (int k = 0; k < 2; k++) {
        const struct bt_jlist *l = k ? b : a;

        for (size_t i = 0; i < l->n && bt_jstep(cx, 1); i++) {
            bt_jlist_push(cx->arena, v.type == BT_J_LIST ? v.l : NULL, l->p[i]);
        }
    }
    if (v.type == BT_J_LIST) {
        v.l->tuple = a->tuple;
    }
    return v;
}

static struct bt_jval repeat(struct bt_jcx *cx, const struct bt_jval *v, int64_t times)
{
    struct bt_jval out = v->type == BT_J_LIST ? bt_jval_list(cx->arena) : (struct bt_jval){0};
    struct bt_jsb sb = {.cx = cx};

    for (int64_t i = 0; i < times && bt_jstep(cx, 1); i++) {
        if (v->type == BT_J_STR) {
            bt_jsb_add_str(&sb, v->s, 0, v->s->s.n);
        }
        for (size_t k = 0; out.type == BT_J_LIST && k < v->l->n && bt_jstep(cx, 1); k++) {
            bt_jlist_push(cx->arena, out.l, v->l->p[k]);
        }
    }
    return v->type == BT_J_STR ? bt_jsb_done(&sb) : out;
}

static struct bt_jval concat(struct bt_jcx *cx, const struct bt_jval *a, const struct bt_jval *b)
{
    struct bt_jsb sb = {.cx = cx};

    bt_jprint(&sb, a);
    bt_jprint(&sb, b);
    return bt_jsb_done(&sb);
}

struct bt_jval
bt_jbinary(struct bt_jcx *cx, enum bt_jop op, const struct bt_jval *a, const struct bt_jval *b)
{
    static const char *const names[] = {"+", "-", "*", "/", "//", "%", "**", "~"};
    bool floats = a->type == BT_J_FLOAT || b->type == BT_J_FLOAT || op == BT_JO_DIV;

    if (op == BT_JO_CONCAT) {
        return concat(cx, a, b);
    }
    if (bt_jis_num(a) && bt_jis_num(b)) {
        floats |= op == BT_JO_POW && bt_jint(b) < 0;
        return floats ? float_op(cx, op, bt_jnum(a), bt_jnum(b))
                      : int_op(cx, op, bt_jint(a), bt_jint(b));
    }
    if (op == BT_JO_ADD && a->type == BT_J_STR && b->type == BT_J_STR) {
        return concat(cx, a, b);
    }
    if (op == BT_JO_ADD && a->type == BT_J_LIST && b->type == BT_J_LIST) {
        return join_lists(cx, a->l, b->l);
    }
    if (op == BT_JO_MUL && (a->type == BT_J_STR || a->type == BT_J_LIST) && b->type == BT_J_INT) {
        return repeat(cx, a, b->i);
    }
    if (op == BT_JO_MUL && (b->type == BT_J_STR || b->type == BT_J_LIST) && a->type == BT_J_INT) {
        return repeat(cx, b, a->i);
    }
    bt_jfail(cx, BT_E_INVALID, "%s %s %s", bt_jtype_name(a), names[op], bt_jtype_name(b));
    return (struct bt_jval){0};
}

bool bt_jrelation(struct bt_jcx *cx, int op, const struct bt_jval *a, const struct bt_jval *b)
{
    switch (op) {
    case BT_JO_EQ:
        return bt_jequal(cx, a, b);
    case BT_JO_NE:
        return !bt_jequal(cx, a, b);
    case BT_JO_IN:
        return bt_jcontains(cx, b, a);
    case BT_JO_NOT_IN:
        return !bt_jcontains(cx, b, a);
    case BT_JO_LT:
        return bt_jcompare(cx, a, b) < 0;
    case BT_JO_LE:
        return bt_jcompare(cx, a, b) <= 0;
    case BT_JO_GT:
        return bt_jcompare(cx, a, b) > 0;
    default:
        return bt_jcompare(cx, a, b) >= 0;
    }
}
