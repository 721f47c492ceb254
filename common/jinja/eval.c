/* Rendering: the tree is walked with a frame of names for each scope. Loops and macros have scopes
 * of their own, branches have not, as in the reference. */
#include "common/jinja/jinja_int.h"

#include <stdlib.h>

#define MAX_TEXT       (1u << 20) /* bytes of a template */
#define COMPILE_BYTES  (64u << 20)
#define STEPS_PER_BYTE 64
#define MIN_STEPS      (4u << 20)

struct bt_jinja {
    struct bt_arena *arena; /* tree and strings */
    struct bt_jnode *root;
};

struct bt_jframe {
    struct bt_jframe *up;
    struct bt_jdict vars;
};

static struct bt_jval eval(struct bt_jcx *cx, const struct bt_jnode *n);
static void run(struct bt_jcx *cx, const struct bt_jnode *n);

/* ---- names ---- */

static struct bt_jval lookup(struct bt_jcx *cx, struct bt_str name)
{
    const struct bt_jval *v = NULL;
    int func;

    for (struct bt_jframe *f = cx->frame; f && !v; f = f->up) {
        bt_jstep(cx, 1 + f->vars.n / 8);
        v = bt_jdict_get(&f->vars, name);
    }
    v = v ? v : bt_jdict_get(cx->args->vars, name);
    if (v) {
        return *v;
    }
    func = bt_jfunc_find(name);
    return func < 0 ? (struct bt_jval){0} : (struct bt_jval){.type = BT_J_FUNC, .func = func};
}

static void assign(struct bt_jcx *cx, struct bt_str name, struct bt_jval v)
{
    bt_jdict_set(cx->arena, &cx->frame->vars, name, v);
}

/* One value to one name, or its elements to several. */
static void unpack(struct bt_jcx *cx, const struct bt_jnames *names, const struct bt_jval *v)
{
    if (names->n == 1) {
        assign(cx, names->p[0], *v);
        return;
    }
    if (v->type != BT_J_LIST || v->l->n != names->n) {
        bt_jfail(cx, BT_E_INVALID, "%s does not have %zu elements", bt_jtype_name(v), names->n);
        return;
    }
    for (size_t i = 0; i < names->n; i++) {
        assign(cx, names->p[i], v->l->p[i]);
    }
}

/* ---- calls ---- */

const struct bt_jval *bt_jarg(const struct bt_jcall *c, size_t i, const char *name)
{
    return i < c->n ? &c->args[i] : bt_jdict_get(c->kw, bt_str_of(name));
}

static struct bt_jval
call_macro(struct bt_jcx *cx, const struct bt_jnode *m, const struct bt_jcall *c)
{
    struct bt_jframe frame = {.up = cx->globals}, *before = cx->frame;
    struct bt_jsb sb = {.cx = cx}, *out = cx->out;
    struct bt_jval v = {0};

    if (c->n > m->names.n) {
        bt_jfail(cx, BT_E_INVALID, "macro \"%.*s\" takes %zu arguments, %zu are given",
                 (int)BT_MIN(m->name.n, (size_t)60), m->name.p, m->names.n, c->n);
        return v;
    }
    cx->frame = &frame;
    for (size_t i = 0; i < m->names.n && cx->rc == BT_OK; i++) {
        const struct bt_jval *given = i < c->n ? &c->args[i] : bt_jdict_get(c->kw, m->names.p[i]);
        struct bt_jval value = given ? *given : m->list.p[i] ? eval(cx, m->list.p[i]) : v;

        assign(cx, m->names.p[i], value);
    }
    cx->out = &sb;
    if (++cx->depth <= BT_J_MAX_DEPTH) {
        run(cx, m->body);
    } else {
        bt_jfail(cx, BT_E_TOO_LARGE, "macros call each other too deeply");
    }
    cx->depth--;
    cx->out = out;
    cx->frame = before;
    return bt_jsb_done(&sb);
}

/* Arguments of a call, filter or test, evaluated. */
static bool
arguments(struct bt_jcx *cx, const struct bt_jnode *n, struct bt_jdict *kw, struct bt_jcall *ret)
{
    struct bt_jval *args = n->list.n ? bt_arena_alloc(cx->arena, n->list.n * sizeof(*args)) : NULL;

    if (n->list.n && !args) {
        return bt_jstep(cx, 1);
    }
    for (size_t i = 0; i < n->list.n; i++) {
        args[i] = eval(cx, n->list.p[i]);
    }
    for (const struct bt_jkw *k = n->kw; k; k = k->next) {
        bt_jdict_set(cx->arena, kw, k->name, eval(cx, k->value));
    }
    *ret = (struct bt_jcall){args, n->list.n, kw};
    return cx->rc == BT_OK;
}

static struct bt_jval call(struct bt_jcx *cx, const struct bt_jnode *n)
{
    struct bt_jval f, none = {0};
    struct bt_jdict kw = {0};
    struct bt_jcall c;

    if (n->a->kind == BT_JN_ATTR) {
        struct bt_jval self = eval(cx, n->a->a);

        return arguments(cx, n, &kw, &c) ? bt_jmethod(cx, &self, n->a->name, &c) : none;
    }
    f = eval(cx, n->a);
    if (!arguments(cx, n, &kw, &c)) {
        return none;
    }
    cx->at = n;
    if (f.type == BT_J_MACRO) {
        return call_macro(cx, f.macro, &c);
    }
    if (f.type == BT_J_FUNC) {
        return bt_jfunc(cx, f.func, &c);
    }
    bt_jfail(cx, BT_E_INVALID, "%s is called", bt_jtype_name(&f));
    return none;
}

static struct bt_jval filtered(struct bt_jcx *cx, const struct bt_jnode *n)
{
    struct bt_jval v = eval(cx, n->a), none = {0};
    struct bt_jdict kw = {0};
    struct bt_jcall c;

    if (!arguments(cx, n, &kw, &c)) {
        return none;
    }
    cx->at = n;
    return bt_jfilter(cx, n->op, v, &c);
}

static struct bt_jval tested(struct bt_jcx *cx, const struct bt_jnode *n)
{
    struct bt_jval v = eval(cx, n->a);
    struct bt_jdict kw = {0};
    struct bt_jcall c;

    if (!arguments(cx, n, &kw, &c)) {
        return v;
    }
    cx->at = n;
    return bt_jval_bool(bt_jtest(cx, n->op, &v, &c) != n->negated);
}

/* ---- expressions ---- */

static struct bt_jval literal_list(struct bt_jcx *cx, const struct bt_jnode *n)
{
    struct bt_jval v = bt_jval_list(cx->arena);

    for (size_t i = 0; i < n->list.n && bt_jstep(cx, 1); i++) {
        bt_jlist_push(cx->arena, v.type == BT_J_LIST ? v.l : NULL, eval(cx, n->list.p[i]));
    }
    if (v.type == BT_J_LIST) {
        v.l->tuple = n->op == 1;
    }
    return v;
}

static struct bt_jval literal_dict(struct bt_jcx *cx, const struct bt_jnode *n)
{
    struct bt_jval v = bt_jval_dict(cx->arena);

    for (size_t i = 0; i + 1 < n->list.n && v.type == BT_J_DICT && bt_jstep(cx, 1); i += 2) {
        struct bt_jval key = eval(cx, n->list.p[i]), value = eval(cx, n->list.p[i + 1]);

        if (key.type != BT_J_STR) {
            bt_jfail(cx, BT_E_INVALID, "%s as a key", bt_jtype_name(&key));
            break;
        }
        bt_jdict_set(cx->arena, v.d, key.s->s, value);
    }
    return v;
}

static struct bt_jval eval_slice(struct bt_jcx *cx, const struct bt_jnode *n)
{
    struct bt_jval v = eval(cx, n->a), part[3];

    for (int i = 0; i < 3; i++) {
        part[i] = eval(cx, n->list.p[i]);
    }
    cx->at = n;
    return bt_jslice(cx, &v, part);
}

static struct bt_jval eval_pair(struct bt_jcx *cx, const struct bt_jnode *n)
{
    struct bt_jval a = eval(cx, n->a), b = eval(cx, n->b);

    cx->at = n;
    if (cx->rc != BT_OK) {
        return (struct bt_jval){0};
    }
    if (n->kind == BT_JN_ITEM) {
        return bt_jitem(cx, &a, &b);
    }
    return n->kind == BT_JN_CMP ? bt_jval_bool(bt_jrelation(cx, n->op, &a, &b))
                                : bt_jbinary(cx, n->op, &a, &b);
}

static struct bt_jval eval_sign(struct bt_jcx *cx, const struct bt_jnode *n)
{
    struct bt_jval v = eval(cx, n->a), zero = bt_jval_int(0);

    if (cx->rc == BT_OK && !bt_jis_num(&v)) {
        bt_jfail(cx, BT_E_INVALID, "the sign of %s", bt_jtype_name(&v));
    }
    return n->kind == BT_JN_NEG ? bt_jbinary(cx, BT_JO_SUB, &zero, &v) : v;
}

static struct bt_jval eval_choice(struct bt_jcx *cx, const struct bt_jnode *n)
{
    struct bt_jval v;

    if (n->kind == BT_JN_COND) {
        v = eval(cx, n->b);
        if (bt_jtrue(&v)) {
            return eval(cx, n->a);
        }
        return n->c ? eval(cx, n->c) : (struct bt_jval){0};
    }
    v = eval(cx, n->a);
    return bt_jtrue(&v) == (n->kind == BT_JN_AND) ? eval(cx, n->b) : v;
}

static struct bt_jval eval_kind(struct bt_jcx *cx, const struct bt_jnode *n)
{
    struct bt_jval v;

    switch ((int)n->kind) {
    case BT_JN_CONST:
        return n->v;
    case BT_JN_NAME:
        return lookup(cx, n->name);
    case BT_JN_LIST:
        return literal_list(cx, n);
    case BT_JN_DICT:
        return literal_dict(cx, n);
    case BT_JN_ATTR:
        v = eval(cx, n->a);
        cx->at = n;
        return cx->rc == BT_OK ? bt_jattr(cx, &v, n->name) : v;
    case BT_JN_ITEM:
    case BT_JN_BINARY:
    case BT_JN_CMP:
        return eval_pair(cx, n);
    case BT_JN_SLICE:
        return eval_slice(cx, n);
    case BT_JN_CALL:
        return call(cx, n);
    case BT_JN_FILT:
        return filtered(cx, n);
    case BT_JN_TEST:
        return tested(cx, n);
    case BT_JN_NOT:
        v = eval(cx, n->a);
        return bt_jval_bool(!bt_jtrue(&v));
    case BT_JN_NEG:
    case BT_JN_POS:
        return eval_sign(cx, n);
    case BT_JN_AND:
    case BT_JN_OR:
    case BT_JN_COND:
        return eval_choice(cx, n);
    default: /* BT_JN_HOLE */
        return cx->hole;
    }
}

static struct bt_jval eval(struct bt_jcx *cx, const struct bt_jnode *n)
{
    if (!bt_jstep(cx, 1)) {
        return (struct bt_jval){0};
    }
    cx->at = n;
    return eval_kind(cx, n);
}

/* ---- statements ---- */

/* The text that statements write. */
static struct bt_jval capture(struct bt_jcx *cx, const struct bt_jnode *body)
{
    struct bt_jframe frame = {.up = cx->frame};
    struct bt_jsb sb = {.cx = cx}, *out = cx->out;

    cx->out = &sb;
    cx->frame = &frame;
    run(cx, body);
    cx->frame = frame.up;
    cx->out = out;
    return bt_jsb_done(&sb);
}

/* Applies a chain of filters that ends in a hole. */
static struct bt_jval through(struct bt_jcx *cx, const struct bt_jnode *chain, struct bt_jval v)
{
    struct bt_jval before = cx->hole;

    cx->hole = v;
    v = chain ? eval(cx, chain) : v;
    cx->hole = before;
    return v;
}

static void run_set(struct bt_jcx *cx, const struct bt_jnode *n)
{
    struct bt_jval v =
        n->kind == BT_JN_SET ? eval(cx, n->a) : through(cx, n->a, capture(cx, n->body));

    if (n->b) {
        struct bt_jval ns = lookup(cx, n->b->name);

        cx->at = n;
        if (ns.type != BT_J_DICT || !ns.d->ns) {
            bt_jfail(cx, BT_E_INVALID, "\"%.*s\" is no namespace",
                     (int)BT_MIN(n->b->name.n, (size_t)60), n->b->name.p);
            return;
        }
        bt_jdict_set(cx->arena, ns.d, n->name, v);
        return;
    }
    unpack(cx, &n->names, &v);
}

/* Elements for which the condition of the loop holds. */
static struct bt_jlist *
filter_items(struct bt_jcx *cx, const struct bt_jnode *n, struct bt_jlist *all)
{
    struct bt_jval kept = bt_jval_list(cx->arena);

    for (size_t i = 0; i < all->n && kept.type == BT_J_LIST && cx->rc == BT_OK; i++) {
        struct bt_jframe frame = {.up = cx->frame};
        struct bt_jval v;

        cx->frame = &frame;
        unpack(cx, &n->names, &all->p[i]);
        v = eval(cx, n->b);
        cx->frame = frame.up;
        if (bt_jtrue(&v)) {
            bt_jlist_push(cx->arena, kept.l, all->p[i]);
        }
    }
    return kept.type == BT_J_LIST ? kept.l : all;
}

/* The variable `loop`. */
static struct bt_jval loop_info(struct bt_jcx *cx, const struct bt_jlist *l, size_t i)
{
    struct bt_jval v = bt_jval_dict(cx->arena);
    struct {
        const char *name;
        struct bt_jval v;
    } f[] = {
        {"index0", bt_jval_int((int64_t)i)},
        {"index", bt_jval_int((int64_t)i + 1)},
        {"first", bt_jval_bool(i == 0)},
        {"last", bt_jval_bool(i + 1 == l->n)},
        {"length", bt_jval_int((int64_t)l->n)},
        {"revindex0", bt_jval_int((int64_t)(l->n - i - 1))},
        {"revindex", bt_jval_int((int64_t)(l->n - i))},
        {"previtem", i ? l->p[i - 1] : (struct bt_jval){0}},
        {"nextitem", i + 1 < l->n ? l->p[i + 1] : (struct bt_jval){0}},
    };

    for (size_t k = 0; k < BT_ARRAY_LEN(f) && v.type == BT_J_DICT; k++) {
        bt_jdict_set(cx->arena, v.d, bt_str_of(f[k].name), f[k].v);
    }
    return v;
}

static void run_for(struct bt_jcx *cx, const struct bt_jnode *n)
{
    struct bt_jval over = eval(cx, n->a);
    struct bt_jlist *l = cx->rc == BT_OK ? bt_jiterate(cx, &over) : NULL;

    if (l && n->b) {
        l = filter_items(cx, n, l);
    }
    if (!l || cx->rc != BT_OK) {
        return;
    }
    for (size_t i = 0; i < l->n && bt_jstep(cx, 4) && !cx->breaking; i++) {
        struct bt_jframe frame = {.up = cx->frame};

        cx->frame = &frame;
        unpack(cx, &n->names, &l->p[i]);
        assign(cx, BT_STR("loop"), loop_info(cx, l, i));
        run(cx, n->body);
        cx->frame = frame.up;
        cx->continuing = false;
    }
    cx->breaking = false;
    if (l->n == 0) {
        run(cx, n->other);
    }
}

static void run_print(struct bt_jcx *cx, const struct bt_jnode *n)
{
    struct bt_jval v = eval(cx, n->a);

    cx->at = n;
    if (cx->rc == BT_OK) {
        bt_jprint(cx->out, &v);
    }
}

static void run_one(struct bt_jcx *cx, const struct bt_jnode *n)
{
    struct bt_jval v;

    switch ((int)n->kind) {
    case BT_JN_TEXT:
        bt_jprint(cx->out, &n->v);
        break;
    case BT_JN_PRINT:
        run_print(cx, n);
        break;
    case BT_JN_IF:
        v = eval(cx, n->a);
        run(cx, cx->rc != BT_OK ? NULL : bt_jtrue(&v) ? n->body : n->other);
        break;
    case BT_JN_FOR:
        run_for(cx, n);
        break;
    case BT_JN_SET:
    case BT_JN_SET_BODY:
        run_set(cx, n);
        break;
    case BT_JN_MACRO:
        assign(cx, n->name, (struct bt_jval){.type = BT_J_MACRO, .macro = n});
        break;
    case BT_JN_FILTER:
        v = through(cx, n->a, capture(cx, n->body));
        bt_jprint(cx->out, &v);
        break;
    case BT_JN_BREAK:
        cx->breaking = true;
        break;
    case BT_JN_CONTINUE:
        cx->continuing = true;
        break;
    default: /* BT_JN_BLOCK */
        run(cx, n->body);
        break;
    }
}

static void run(struct bt_jcx *cx, const struct bt_jnode *n)
{
    for (; n && bt_jstep(cx, 1) && !cx->breaking && !cx->continuing; n = n->next) {
        cx->at = n;
        run_one(cx, n);
        if (cx->out->n > cx->args->max_output) {
            bt_jfail(cx, BT_E_TOO_LARGE, "the conversation is longer than %zu bytes",
                     cx->args->max_output);
        }
    }
}

/* ---- the whole ---- */

int bt_jinja_compile(struct bt_str text, struct bt_jinja **ret, struct bt_err *err)
{
    struct bt_jtoks toks;
    struct bt_jinja *j;
    char *copy;
    int rc;

    if (text.n > MAX_TEXT) {
        return BT_FAIL(err, BT_E_TOO_LARGE,
                       "the chat template has %zu bytes, at most %u may it have", text.n, MAX_TEXT);
    }
    j = bt_calloc(1, sizeof(*j));
    if (!j || bt_arena_create(COMPILE_BYTES, &j->arena) < 0) {
        free(j);
        return BT_FAIL(err, BT_E_NOMEM, "no memory for the chat template");
    }
    copy = bt_arena_alloc(j->arena, text.n + 1);
    if (copy && text.n) {
        memcpy(copy, text.p, text.n);
    }
    rc = copy ? bt_jlex((struct bt_str){copy, text.n}, j->arena, &toks, err)
              : BT_FAIL(err, BT_E_NOMEM, "no memory for the chat template");
    rc = rc < 0 ? rc : bt_jparse(&toks, j->arena, &j->root, err);
    if (rc < 0) {
        bt_jinja_destroy(j);
        return rc;
    }
    *ret = j;
    return BT_OK;
}

void bt_jinja_destroy(struct bt_jinja *j)
{
    if (j) {
        bt_arena_destroy(j->arena);
        free(j);
    }
}

int bt_jinja_render(const struct bt_jinja *j,
                    struct bt_arena *arena,
                    const struct bt_jinja_args *args,
                    struct bt_jinja_out *ret_out,
                    struct bt_err *err)
{
    struct bt_jframe globals = {0};
    struct bt_jcx cx = {.arena = arena,
                        .frame = &globals,
                        .globals = &globals,
                        .args = args,
                        .max_steps = MIN_STEPS + (uint64_t)args->max_output * STEPS_PER_BYTE,
                        .err = err};
    struct bt_jsb out = {.cx = &cx};

    cx.out = &out;
    run(&cx, j->root);
    bt_jstep(&cx, 1); /* an input that did not fit */
    if (cx.rc != BT_OK) {
        return cx.rc;
    }
    *ret_out = (struct bt_jinja_out){{out.p, out.n}, out.runs, out.n_runs};
    return BT_OK;
}
