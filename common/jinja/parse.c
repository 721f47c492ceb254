/* Tokens to a tree, by recursive descent with a bounded depth: statements, and the parser's tools.
 * Whatever the renderer does not know is refused here, by name and line. */
#include "common/jinja/parse_int.h"

#include <stdio.h>

void bt_jskip(struct bt_jparser *p)
{
    p->at += p->at + 1 < p->toks->n;
}

void bt_jrefuse(struct bt_jparser *p, int rc, const char *what, struct bt_str name)
{
    if (p->rc == BT_OK) {
        p->rc = BT_FAIL(p->err, rc, "chat template, line %d: %s%s%.*s%s", bt_jpeek(p)->line, what,
                        name.n ? " \"" : "", (int)BT_MIN(name.n, (size_t)60), name.p ? name.p : "",
                        name.n ? "\"" : "");
    }
}

void bt_jfull(struct bt_jparser *p)
{
    bt_jrefuse(p, BT_E_TOO_LARGE, "the template is too large", (struct bt_str){0});
}

void bt_junexpected(struct bt_jparser *p, const char *wanted)
{
    static const char *const kinds[] = {
        [BT_JT_TEXT] = "text",      [BT_JT_VAR_BEGIN] = "{{", [BT_JT_VAR_END] = "}}",
        [BT_JT_BLOCK_BEGIN] = "{%", [BT_JT_BLOCK_END] = "%}", [BT_JT_INT] = "a number",
        [BT_JT_FLOAT] = "a number", [BT_JT_EOF] = "the end"};
    const struct bt_jtok *t = bt_jpeek(p);
    bool named = t->kind == BT_JT_NAME || t->kind == BT_JT_OP || t->kind == BT_JT_STRING;
    char text[64];

    snprintf(text, sizeof(text), "expected %s, found%s%s", wanted, named ? "" : " ",
             named ? "" : kinds[t->kind]);
    bt_jrefuse(p, BT_E_FORMAT, text, named ? t->s : (struct bt_str){0});
}

bool bt_jis_op(const struct bt_jparser *p, const char *op)
{
    return bt_jpeek(p)->kind == BT_JT_OP && bt_str_eq(bt_jpeek(p)->s, bt_str_of(op));
}

bool bt_jis_word(const struct bt_jparser *p, const char *word)
{
    return bt_jpeek(p)->kind == BT_JT_NAME && bt_str_eq(bt_jpeek(p)->s, bt_str_of(word));
}

bool bt_jeat_op(struct bt_jparser *p, const char *op)
{
    bool yes = p->rc == BT_OK && bt_jis_op(p, op);

    if (yes) {
        bt_jskip(p);
    }
    return yes;
}

bool bt_jeat_word(struct bt_jparser *p, const char *word)
{
    bool yes = p->rc == BT_OK && bt_jis_word(p, word);

    if (yes) {
        bt_jskip(p);
    }
    return yes;
}

void bt_jneed_op(struct bt_jparser *p, const char *op)
{
    if (!bt_jeat_op(p, op)) {
        bt_junexpected(p, op);
    }
}

void bt_jneed_kind(struct bt_jparser *p, enum bt_jtok_kind kind, const char *what)
{
    if (p->rc == BT_OK && bt_jpeek(p)->kind == kind) {
        bt_jskip(p);
    } else {
        bt_junexpected(p, what);
    }
}

struct bt_str bt_jneed_name(struct bt_jparser *p)
{
    struct bt_str s = bt_jpeek(p)->s;

    bt_jneed_kind(p, BT_JT_NAME, "a name");
    return s;
}

/* Never NULL: after an error, or without memory, one that is never rendered. */
struct bt_jnode *bt_jnode(struct bt_jparser *p, enum bt_jnode_kind kind)
{
    static struct bt_jnode none;
    struct bt_jnode *n = p->rc == BT_OK ? bt_arena_alloc(p->arena, sizeof(*n)) : NULL;

    if (!n) {
        bt_jfull(p);
        none = (struct bt_jnode){0};
        return &none;
    }
    n->kind = kind;
    n->line = bt_jpeek(p)->line;
    return n;
}

void bt_jadd(struct bt_jparser *p, struct bt_jnodes *list, struct bt_jnode *n)
{
    if (list->n == list->cap) {
        size_t cap = list->cap ? 2 * list->cap : 4;
        struct bt_jnode **q = p->rc == BT_OK ? bt_arena_alloc(p->arena, cap * sizeof(*q)) : NULL;

        if (!q) {
            bt_jfull(p);
            return;
        }
        if (list->n) {
            memcpy(q, list->p, list->n * sizeof(*q));
        }
        list->p = q;
        list->cap = cap;
    }
    list->p[list->n++] = n;
}

bool bt_jenter(struct bt_jparser *p)
{
    if (++p->depth > BT_J_MAX_DEPTH) {
        bt_jrefuse(p, BT_E_TOO_LARGE, "nested too deeply", (struct bt_str){0});
    }
    return p->rc == BT_OK;
}

static void add_name(struct bt_jparser *p, struct bt_jnames *names, struct bt_str s)
{
    struct bt_str *q =
        p->rc == BT_OK ? bt_arena_alloc(p->arena, (names->n + 1) * sizeof(*q)) : NULL;

    if (!q) {
        bt_jfull(p);
        return;
    }
    if (names->n) {
        memcpy(q, names->p, names->n * sizeof(*q));
    }
    q[names->n] = s;
    names->p = q;
    names->n++;
}

static struct bt_jnode *statements(struct bt_jparser *p, const char *const *ends);

static void end_block(struct bt_jparser *p)
{
    bt_jneed_kind(p, BT_JT_BLOCK_END, "%}");
}

/* The body up to {% end.. %}; the end's name is eaten, its %} too. */
static struct bt_jnode *body_until(struct bt_jparser *p, const char *end)
{
    const char *const ends[] = {end, NULL};
    struct bt_jnode *n = statements(p, ends);

    bt_jskip(p);
    end_block(p);
    return n;
}

static struct bt_jnode *stmt_if(struct bt_jparser *p)
{
    static const char *const ends[] = {"elif", "else", "endif", NULL};
    struct bt_jnode *n = bt_jnode(p, BT_JN_IF);

    n->a = bt_jexpr(p);
    end_block(p);
    n->body = statements(p, ends);
    if (bt_jeat_word(p, "elif")) {
        if (bt_jenter(p)) {
            n->other = stmt_if(p);
        }
        p->depth--;
        return n;
    }
    if (bt_jeat_word(p, "else")) {
        end_block(p);
        n->other = body_until(p, "endif");
        return n;
    }
    bt_jskip(p);
    end_block(p);
    return n;
}

/* a, b, .. */
static void targets(struct bt_jparser *p, struct bt_jnode *n)
{
    bool paren = bt_jeat_op(p, "(");

    do {
        add_name(p, &n->names, bt_jneed_name(p));
    } while (bt_jeat_op(p, ",") && bt_jpeek(p)->kind == BT_JT_NAME && !bt_jis_word(p, "in"));
    if (paren) {
        bt_jneed_op(p, ")");
    }
}

static struct bt_jnode *stmt_for(struct bt_jparser *p)
{
    static const char *const ends[] = {"else", "endfor", NULL};
    struct bt_jnode *n = bt_jnode(p, BT_JN_FOR);

    targets(p, n);
    if (!bt_jeat_word(p, "in")) {
        bt_junexpected(p, "in");
    }
    n->a = bt_jexpr_or(p); /* a condition behind it filters */
    if (bt_jeat_word(p, "if")) {
        n->b = bt_jexpr(p);
    }
    if (bt_jis_word(p, "recursive")) {
        bt_jrefuse(p, BT_E_UNSUPPORTED, "unsupported: recursive loops", (struct bt_str){0});
    }
    end_block(p);
    p->loops++;
    n->body = statements(p, ends);
    p->loops--;
    if (bt_jeat_word(p, "else")) {
        end_block(p);
        n->other = body_until(p, "endfor");
        return n;
    }
    bt_jskip(p);
    end_block(p);
    return n;
}

static struct bt_jnode *stmt_set(struct bt_jparser *p)
{
    struct bt_jnode *n = bt_jnode(p, BT_JN_SET);

    targets(p, n);
    if (n->names.n == 1 && bt_jeat_op(p, ".")) {
        n->b = bt_jnode(p, BT_JN_NAME);
        n->b->name = n->names.p[0];
        n->name = bt_jneed_name(p);
    }
    if (bt_jeat_op(p, "=")) {
        n->a = bt_jexpr(p);
        if (bt_jis_op(p, ",")) { /* a tuple without parentheses */
            struct bt_jnode *t = bt_jnode(p, BT_JN_LIST);

            t->op = 1;
            bt_jadd(p, &t->list, n->a);
            while (bt_jeat_op(p, ",")) {
                bt_jadd(p, &t->list, bt_jexpr(p));
            }
            n->a = t;
        }
        end_block(p);
        return n;
    }
    n->kind = BT_JN_SET_BODY;
    if (n->names.n != 1) {
        bt_junexpected(p, "=");
    }
    if (bt_jeat_op(p, "|")) {
        n->a = bt_jnode(p, BT_JN_HOLE);
        n->a = bt_jfilters_of(p, n->a);
    }
    end_block(p);
    n->body = body_until(p, "endset");
    return n;
}

static struct bt_jnode *stmt_macro(struct bt_jparser *p)
{
    struct bt_jnode *n = bt_jnode(p, BT_JN_MACRO);
    int loops = p->loops;

    n->name = bt_jneed_name(p);
    bt_jadd(p, &p->macros, n);
    bt_jneed_op(p, "(");
    while (p->rc == BT_OK && !bt_jeat_op(p, ")")) {
        add_name(p, &n->names, bt_jneed_name(p));
        bt_jadd(p, &n->list, bt_jeat_op(p, "=") ? bt_jexpr(p) : NULL);
        if (!bt_jis_op(p, ")")) {
            bt_jneed_op(p, ",");
        }
    }
    end_block(p);
    p->loops = 0;
    n->body = body_until(p, "endmacro");
    p->loops = loops;
    return n;
}

static struct bt_jnode *stmt_filter(struct bt_jparser *p)
{
    struct bt_jnode *n = bt_jnode(p, BT_JN_FILTER);

    n->a = bt_jfilters_of(p, bt_jnode(p, BT_JN_HOLE));
    end_block(p);
    n->body = body_until(p, "endfilter");
    return n;
}

static struct bt_jnode *stmt_jump(struct bt_jparser *p, enum bt_jnode_kind kind)
{
    if (p->loops == 0) {
        bt_jrefuse(p, BT_E_FORMAT, "not inside a loop:", bt_jpeek(p)->s);
    }
    end_block(p);
    return bt_jnode(p, kind);
}

static struct bt_jnode *stmt_generation(struct bt_jparser *p)
{
    struct bt_jnode *n = bt_jnode(p, BT_JN_BLOCK);

    end_block(p);
    n->body = body_until(p, "endgeneration");
    return n;
}

/* Behind "{%". */
static struct bt_jnode *block(struct bt_jparser *p)
{
    if (bt_jeat_word(p, "if")) {
        return stmt_if(p);
    }
    if (bt_jeat_word(p, "for")) {
        return stmt_for(p);
    }
    if (bt_jeat_word(p, "set")) {
        return stmt_set(p);
    }
    if (bt_jeat_word(p, "macro")) {
        return stmt_macro(p);
    }
    if (bt_jeat_word(p, "filter")) {
        return stmt_filter(p);
    }
    if (bt_jeat_word(p, "generation")) { /* marks the assistant's part for training */
        return stmt_generation(p);
    }
    if (bt_jeat_word(p, "break")) {
        return stmt_jump(p, BT_JN_BREAK);
    }
    if (bt_jeat_word(p, "continue")) {
        return stmt_jump(p, BT_JN_CONTINUE);
    }
    if (bt_jpeek(p)->kind == BT_JT_NAME) {
        bt_jrefuse(p, BT_E_UNSUPPORTED, "unsupported tag", bt_jpeek(p)->s);
    } else {
        bt_junexpected(p, "a tag's name");
    }
    return bt_jnode(p, BT_JN_BLOCK);
}

static bool at_end(const struct bt_jparser *p, const char *const *ends)
{
    for (; ends && *ends; ends++) {
        if (bt_jis_word(p, *ends)) {
            return true;
        }
    }
    return false;
}

/* Up to a tag with one of these names, which is next then; NULL: up to the end of the template. */
static struct bt_jnode *statements(struct bt_jparser *p, const char *const *ends)
{
    struct bt_jnode *first = NULL, **link = &first;

    if (!bt_jenter(p)) {
        p->depth--;
        return NULL;
    }
    while (p->rc == BT_OK) {
        const struct bt_jtok *t = bt_jpeek(p);
        struct bt_jnode *n = NULL;

        if (t->kind == BT_JT_EOF) {
            if (ends) {
                bt_jrefuse(p, BT_E_FORMAT, "the template ends before", bt_str_of(ends[0]));
            }
            break;
        }
        bt_jskip(p);
        if (t->kind == BT_JT_TEXT) {
            n = bt_jnode(p, BT_JN_TEXT);
            n->v = bt_jval_str(p->arena, t->s, true);
        } else if (t->kind == BT_JT_VAR_BEGIN) {
            n = bt_jnode(p, BT_JN_PRINT);
            n->a = bt_jexpr(p);
            bt_jneed_kind(p, BT_JT_VAR_END, "}}");
        } else if (t->kind == BT_JT_BLOCK_BEGIN && at_end(p, ends)) {
            break;
        } else {
            n = block(p);
        }
        if (p->rc == BT_OK) {
            *link = n;
            link = &n->next;
        }
    }
    p->depth--;
    return first;
}

/* Only what is ours or a macro of the template may be called. */
static void check_calls(struct bt_jparser *p)
{
    for (size_t i = 0; i < p->calls.n && p->rc == BT_OK; i++) {
        const struct bt_jnode *c = p->calls.p[i];
        bool known = bt_jfunc_find(c->name) >= 0;

        for (size_t k = 0; k < p->macros.n && !known; k++) {
            known = bt_str_eq(p->macros.p[k]->name, c->name);
        }
        if (!known) {
            p->rc = BT_FAIL(p->err, BT_E_UNSUPPORTED,
                            "chat template, line %d: unsupported function \"%.*s\"", c->line,
                            (int)BT_MIN(c->name.n, (size_t)60), c->name.p);
        }
    }
}

int bt_jparse(const struct bt_jtoks *toks,
              struct bt_arena *a,
              struct bt_jnode **ret,
              struct bt_err *err)
{
    struct bt_jparser p = {.toks = toks, .arena = a, .err = err};

    *ret = statements(&p, NULL);
    check_calls(&p);
    return p.rc;
}
