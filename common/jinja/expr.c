/* Expressions: one function a level of precedence, loosest last. */
#include "common/jinja/parse_int.h"

static struct bt_jnode *unary(struct bt_jparser *p, bool with_filters);

static struct bt_jnode *constant(struct bt_jparser *p, struct bt_jval v)
{
    struct bt_jnode *n = bt_jnode(p, BT_JN_CONST);

    n->v = v;
    return n;
}

/* Arguments behind "(", up to and with ")". */
static void call_args(struct bt_jparser *p, struct bt_jnode *call)
{
    struct bt_jkw **kw = &call->kw;

    while (p->rc == BT_OK && !bt_jeat_op(p, ")")) {
        if (bt_jpeek(p)->kind == BT_JT_NAME && bt_jpeek_next(p)->kind == BT_JT_OP &&
            bt_str_eq(bt_jpeek_next(p)->s, BT_STR("="))) {
            struct bt_jkw *k = bt_arena_alloc(p->arena, sizeof(*k));

            if (!k) {
                bt_jfull(p);
                return;
            }
            k->name = bt_jneed_name(p);
            bt_jneed_op(p, "=");
            k->value = bt_jexpr(p);
            *kw = k;
            kw = &k->next;
        } else if (bt_jis_op(p, "*") || bt_jis_op(p, "**")) {
            bt_jrefuse(p, BT_E_UNSUPPORTED, "unsupported: unpacked arguments", (struct bt_str){0});
        } else {
            bt_jadd(p, &call->list, bt_jexpr(p));
        }
        if (!bt_jis_op(p, ")")) {
            bt_jneed_op(p, ",");
        }
    }
}

static struct bt_jnode *list_literal(struct bt_jparser *p, const char *close)
{
    struct bt_jnode *n = bt_jnode(p, BT_JN_LIST);

    while (p->rc == BT_OK && !bt_jeat_op(p, close)) {
        bt_jadd(p, &n->list, bt_jexpr(p));
        if (!bt_jis_op(p, close)) {
            bt_jneed_op(p, ",");
        }
    }
    return n;
}

static struct bt_jnode *dict_literal(struct bt_jparser *p)
{
    struct bt_jnode *n = bt_jnode(p, BT_JN_DICT);

    while (p->rc == BT_OK && !bt_jeat_op(p, "}")) {
        bt_jadd(p, &n->list, bt_jexpr(p));
        bt_jneed_op(p, ":");
        bt_jadd(p, &n->list, bt_jexpr(p));
        if (!bt_jis_op(p, "}")) {
            bt_jneed_op(p, ",");
        }
    }
    return n;
}

/* Behind "(": a tuple or an expression. */
static struct bt_jnode *parenthesis(struct bt_jparser *p)
{
    struct bt_jnode *first, *n;

    if (bt_jeat_op(p, ")")) {
        n = bt_jnode(p, BT_JN_LIST);
        n->op = 1;
        return n;
    }
    first = bt_jexpr(p);
    if (bt_jeat_op(p, ")")) {
        return first;
    }
    bt_jneed_op(p, ",");
    n = list_literal(p, ")");
    n->op = 1; /* a tuple */
    bt_jadd(p, &n->list, NULL);
    if (p->rc == BT_OK) {
        memmove(n->list.p + 1, n->list.p, (n->list.n - 1) * sizeof(*n->list.p));
        n->list.p[0] = first;
    }
    return n;
}

static struct bt_jnode *name_or_word(struct bt_jparser *p)
{
    struct bt_str s = bt_jpeek(p)->s;
    struct bt_jnode *n;

    if (bt_jeat_word(p, "true") || bt_jeat_word(p, "True")) {
        return constant(p, bt_jval_bool(true));
    }
    if (bt_jeat_word(p, "false") || bt_jeat_word(p, "False")) {
        return constant(p, bt_jval_bool(false));
    }
    if (bt_jeat_word(p, "none") || bt_jeat_word(p, "None")) {
        return constant(p, bt_jval_none());
    }
    n = bt_jnode(p, BT_JN_NAME);
    n->name = s;
    bt_jskip(p);
    return n;
}

static struct bt_jnode *primary(struct bt_jparser *p)
{
    const struct bt_jtok *t = bt_jpeek(p);

    switch (t->kind) {
    case BT_JT_NAME:
        return name_or_word(p);
    case BT_JT_INT:
        bt_jskip(p);
        return constant(p, bt_jval_int(t->i));
    case BT_JT_FLOAT:
        bt_jskip(p);
        return constant(p, bt_jval_float(t->f));
    case BT_JT_STRING: {
        struct bt_str s = t->s;

        bt_jskip(p);
        while (p->rc == BT_OK && bt_jpeek(p)->kind == BT_JT_STRING) { /* neighbours are one */
            struct bt_str u = bt_jpeek(p)->s;
            char *q = bt_arena_alloc(p->arena, s.n + u.n + 1);

            if (!q) {
                bt_jfull(p);
                break;
            }
            memcpy(q, s.p, s.n);
            memcpy(q + s.n, u.p, u.n);
            s = (struct bt_str){q, s.n + u.n};
            bt_jskip(p);
        }
        return constant(p, bt_jval_str(p->arena, s, true));
    }
    case BT_JT_OP:
        if (bt_jeat_op(p, "(")) {
            return parenthesis(p);
        }
        if (bt_jeat_op(p, "[")) {
            return list_literal(p, "]");
        }
        if (bt_jeat_op(p, "{")) {
            return dict_literal(p);
        }
        break;
    case BT_JT_TEXT:
    case BT_JT_VAR_BEGIN:
    case BT_JT_VAR_END:
    case BT_JT_BLOCK_BEGIN:
    case BT_JT_BLOCK_END:
    case BT_JT_EOF:
        break;
    }
    bt_junexpected(p, "an expression");
    return bt_jnode(p, BT_JN_CONST);
}

/* Behind "[". */
static struct bt_jnode *subscript(struct bt_jparser *p, struct bt_jnode *of)
{
    struct bt_jnode *n = bt_jnode(p, BT_JN_ITEM), *part[3] = {0};
    bool slice = false;
    int i = 0;

    n->a = of;
    while (p->rc == BT_OK && !bt_jeat_op(p, "]")) {
        if (bt_jeat_op(p, ":")) {
            slice = true;
            if (++i == 3) {
                bt_junexpected(p, "]");
            }
        } else if (!part[i]) {
            part[i] = bt_jexpr(p);
        } else {
            bt_junexpected(p, "]");
        }
    }
    n->b = part[0];
    if (slice) {
        n->kind = BT_JN_SLICE;
        for (i = 0; i < 3; i++) {
            bt_jadd(p, &n->list, part[i] ? part[i] : constant(p, bt_jval_none()));
        }
    } else if (!part[0]) {
        bt_junexpected(p, "an index");
    }
    return n;
}

static struct bt_jnode *call(struct bt_jparser *p, struct bt_jnode *of)
{
    struct bt_jnode *n = bt_jnode(p, BT_JN_CALL);

    if (of->kind == BT_JN_ATTR && !bt_jmethod_known(of->name)) {
        bt_jrefuse(p, BT_E_UNSUPPORTED, "unsupported method", of->name);
    }
    n->a = of;
    if (of->kind == BT_JN_NAME) {
        bt_jadd(p, &p->calls, of);
    }
    call_args(p, n);
    return n;
}

static struct bt_jnode *postfix(struct bt_jparser *p, struct bt_jnode *n)
{
    while (p->rc == BT_OK) {
        if (bt_jeat_op(p, ".")) {
            struct bt_jnode *a =
                bt_jnode(p, bt_jpeek(p)->kind == BT_JT_INT ? BT_JN_ITEM : BT_JN_ATTR);

            a->a = n;
            if (bt_jpeek(p)->kind == BT_JT_INT) {
                a->b = constant(p, bt_jval_int(bt_jpeek(p)->i));
                bt_jskip(p);
            } else {
                a->name = bt_jneed_name(p);
            }
            n = a;
        } else if (bt_jeat_op(p, "[")) {
            n = subscript(p, n);
        } else if (bt_jeat_op(p, "(")) {
            n = call(p, n);
        } else {
            break;
        }
    }
    return n;
}

static void check_args(struct bt_jparser *p, const struct bt_jnode *n, struct bt_str name)
{
    for (const struct bt_jkw *k = n->kw; k && p->rc == BT_OK; k = k->next) {
        if (!bt_jfilter_takes(n->op, k->name)) {
            bt_jrefuse(p, BT_E_UNSUPPORTED, "unsupported argument of a filter", k->name);
        }
    }
    if (p->rc == BT_OK && n->list.n > bt_jfilter_most_args(n->op)) {
        bt_jrefuse(p, BT_E_UNSUPPORTED, "unsupported: so many arguments of filter", name);
    }
}

static struct bt_jnode *filter(struct bt_jparser *p, struct bt_jnode *of)
{
    struct bt_jnode *n = bt_jnode(p, BT_JN_FILT);
    struct bt_str name = bt_jpeek(p)->s;

    n->a = of;
    if (bt_jpeek(p)->kind == BT_JT_NAME) {
        n->op = bt_jfilter_find(name);
        if (n->op < 0) {
            bt_jrefuse(p, BT_E_UNSUPPORTED, "unsupported filter", name);
        }
    }
    bt_jneed_name(p);
    if (bt_jeat_op(p, "(")) {
        call_args(p, n);
    }
    check_args(p, n, name);
    return n;
}

static bool begins_argument(const struct bt_jparser *p)
{
    const struct bt_jtok *t = bt_jpeek(p);

    if (t->kind == BT_JT_OP) {
        return bt_jis_op(p, "[") || bt_jis_op(p, "{");
    }
    return t->kind == BT_JT_STRING || t->kind == BT_JT_INT || t->kind == BT_JT_FLOAT ||
           (t->kind == BT_JT_NAME && !bt_jis_word(p, "else") && !bt_jis_word(p, "or") &&
            !bt_jis_word(p, "and") && !bt_jis_word(p, "is") && !bt_jis_word(p, "if") &&
            !bt_jis_word(p, "in") && !bt_jis_word(p, "not"));
}

static struct bt_jnode *test(struct bt_jparser *p, struct bt_jnode *of)
{
    struct bt_jnode *n = bt_jnode(p, BT_JN_TEST);
    struct bt_str name;

    n->a = of;
    n->negated = bt_jeat_word(p, "not");
    name = bt_jpeek(p)->s;
    if (bt_jpeek(p)->kind == BT_JT_NAME) {
        n->op = bt_jtest_find(name);
        if (n->op < 0) {
            bt_jrefuse(p, BT_E_UNSUPPORTED, "unsupported test", name);
        }
    }
    bt_jneed_name(p);
    if (bt_jeat_op(p, "(")) {
        call_args(p, n);
    } else if (begins_argument(p)) {
        bt_jadd(p, &n->list, postfix(p, primary(p)));
    }
    return n;
}

static struct bt_jnode *filters(struct bt_jparser *p, struct bt_jnode *n)
{
    while (p->rc == BT_OK) {
        if (bt_jeat_op(p, "|")) {
            n = filter(p, n);
        } else if (bt_jeat_word(p, "is")) {
            n = test(p, n);
        } else if (bt_jeat_op(p, "(")) {
            n = call(p, n);
        } else {
            break;
        }
    }
    return n;
}

static struct bt_jnode *
binary(struct bt_jparser *p, enum bt_jnode_kind kind, struct bt_jnode *a, int op)
{
    struct bt_jnode *n = bt_jnode(p, kind);

    n->a = a;
    n->op = op;
    return n;
}

static struct bt_jnode *power(struct bt_jparser *p)
{
    struct bt_jnode *n = postfix(p, primary(p));

    while (bt_jeat_op(p, "**")) {
        n = binary(p, BT_JN_BINARY, n, BT_JO_POW);
        n->b = unary(p, false);
    }
    return n;
}

static struct bt_jnode *unary(struct bt_jparser *p, bool with_filters)
{
    struct bt_jnode *n;

    if (!bt_jenter(p)) {
        return bt_jnode(p, BT_JN_CONST);
    }
    if (bt_jeat_op(p, "-")) {
        n = bt_jnode(p, BT_JN_NEG);
        n->a = unary(p, false);
    } else if (bt_jeat_op(p, "+")) {
        n = bt_jnode(p, BT_JN_POS);
        n->a = unary(p, false);
    } else {
        n = power(p);
    }
    n = with_filters ? filters(p, n) : n;
    p->depth--;
    return n;
}

struct level {
    const char *text;
    enum bt_jop op;
};

static int find_level(struct bt_jparser *p, const struct level *l, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        if (bt_jeat_op(p, l[i].text)) {
            return (int)l[i].op;
        }
    }
    return -1;
}

static struct bt_jnode *product(struct bt_jparser *p)
{
    static const struct level ops[] = {
        {"*", BT_JO_MUL}, {"/", BT_JO_DIV}, {"//", BT_JO_FLOORDIV}, {"%", BT_JO_MOD}};
    struct bt_jnode *n = unary(p, true);
    int op;

    while ((op = find_level(p, ops, BT_ARRAY_LEN(ops))) >= 0) {
        n = binary(p, BT_JN_BINARY, n, op);
        n->b = unary(p, true);
    }
    return n;
}

static struct bt_jnode *concat(struct bt_jparser *p)
{
    struct bt_jnode *n = product(p);

    while (bt_jeat_op(p, "~")) {
        n = binary(p, BT_JN_BINARY, n, BT_JO_CONCAT);
        n->b = product(p);
    }
    return n;
}

static struct bt_jnode *sum(struct bt_jparser *p)
{
    static const struct level ops[] = {{"+", BT_JO_ADD}, {"-", BT_JO_SUB}};
    struct bt_jnode *n = concat(p);
    int op;

    while ((op = find_level(p, ops, BT_ARRAY_LEN(ops))) >= 0) {
        n = binary(p, BT_JN_BINARY, n, op);
        n->b = concat(p);
    }
    return n;
}

static int compare_op(struct bt_jparser *p)
{
    static const struct level ops[] = {{"==", BT_JO_EQ}, {"!=", BT_JO_NE}, {"<", BT_JO_LT},
                                       {"<=", BT_JO_LE}, {">", BT_JO_GT},  {">=", BT_JO_GE}};
    const struct bt_jtok *next = bt_jpeek_next(p);

    if (bt_jeat_word(p, "in")) {
        return BT_JO_IN;
    }
    if (bt_jis_word(p, "not") && next->kind == BT_JT_NAME && bt_str_eq(next->s, BT_STR("in"))) {
        bt_jskip(p);
        bt_jskip(p);
        return BT_JO_NOT_IN;
    }
    return find_level(p, ops, BT_ARRAY_LEN(ops));
}

/* a < b < c is a < b and b < c. */
static struct bt_jnode *compare(struct bt_jparser *p)
{
    struct bt_jnode *left = sum(p), *all = NULL;
    int op;

    while ((op = compare_op(p)) >= 0) {
        struct bt_jnode *n = binary(p, BT_JN_CMP, left, op);

        n->b = sum(p);
        left = n->b;
        if (all) {
            struct bt_jnode *both = binary(p, BT_JN_AND, all, 0);

            both->b = n;
            all = both;
        } else {
            all = n;
        }
    }
    return all ? all : left;
}

static struct bt_jnode *negation(struct bt_jparser *p)
{
    struct bt_jnode *n;

    if (!bt_jeat_word(p, "not")) {
        return compare(p);
    }
    n = bt_jnode(p, BT_JN_NOT);
    if (bt_jenter(p)) {
        n->a = negation(p);
    }
    p->depth--;
    return n;
}

static struct bt_jnode *conjunction(struct bt_jparser *p)
{
    struct bt_jnode *n = negation(p);

    while (bt_jeat_word(p, "and")) {
        n = binary(p, BT_JN_AND, n, 0);
        n->b = negation(p);
    }
    return n;
}

struct bt_jnode *bt_jexpr_or(struct bt_jparser *p)
{
    struct bt_jnode *n = conjunction(p);

    while (bt_jeat_word(p, "or")) {
        n = binary(p, BT_JN_OR, n, 0);
        n->b = conjunction(p);
    }
    return n;
}

struct bt_jnode *bt_jexpr(struct bt_jparser *p)
{
    struct bt_jnode *n;

    if (!bt_jenter(p)) {
        return bt_jnode(p, BT_JN_CONST);
    }
    n = bt_jexpr_or(p);
    while (bt_jeat_word(p, "if")) {
        struct bt_jnode *c = bt_jnode(p, BT_JN_COND);

        c->a = n;
        c->b = bt_jexpr_or(p);
        c->c = bt_jeat_word(p, "else") ? bt_jexpr(p) : NULL;
        n = c;
    }
    p->depth--;
    return n;
}

struct bt_jnode *bt_jfilters_of(struct bt_jparser *p, struct bt_jnode *of)
{
    return filters(p, filter(p, of));
}
