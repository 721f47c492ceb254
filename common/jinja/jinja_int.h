/* Inside of common/jinja: tokens, tree, values, the state of a rendering. */
#ifndef BT_JINJA_JINJA_INT_H
#define BT_JINJA_JINJA_INT_H

#include "common/jinja/jinja.h"

#define BT_J_MAX_DEPTH 96 /* of nested expressions and blocks, calls of macros included */

/* ---- arena ---- */

void *bt_arena_alloc(struct bt_arena *a, size_t n); /* zeroed; NULL: full, remembered */
bool bt_arena_failed(const struct bt_arena *a);

/* ---- tokens (lex.c) ---- */

enum bt_jtok_kind {
    BT_JT_TEXT,
    BT_JT_VAR_BEGIN,
    BT_JT_VAR_END,
    BT_JT_BLOCK_BEGIN,
    BT_JT_BLOCK_END,
    BT_JT_NAME,
    BT_JT_STRING, /* escapes undone */
    BT_JT_INT,
    BT_JT_FLOAT,
    BT_JT_OP,
    BT_JT_EOF,
};
struct bt_jtok {
    enum bt_jtok_kind kind;
    int line;
    struct bt_str s;
    int64_t i;
    double f;
};
struct bt_jtoks {
    struct bt_jtok *t;
    size_t n, cap;
};
/* Tokens and the strings that are not in `text` lie in the arena. */
int bt_jlex(struct bt_str text, struct bt_arena *a, struct bt_jtoks *ret, struct bt_err *err)
    BT_MUST_USE;

/* ---- tree (parse.c) ---- */

enum bt_jnode_kind {
    /* statements, linked by next */
    BT_JN_TEXT,     /* v */
    BT_JN_PRINT,    /* a */
    BT_JN_IF,       /* a, body, other */
    BT_JN_FOR,      /* names, a = iterable, b = filter or NULL, body, other */
    BT_JN_SET,      /* names, a; or name of a namespace in b and field in v */
    BT_JN_SET_BODY, /* names, body; b as in SET */
    BT_JN_MACRO,    /* v = name, names with defaults in list, body */
    BT_JN_BLOCK,    /* body: {% generation %} and the like */
    BT_JN_FILTER,   /* {% filter x %}: a = chain over an empty place, body */
    BT_JN_BREAK,
    BT_JN_CONTINUE,
    /* expressions */
    BT_JN_CONST,  /* v */
    BT_JN_NAME,   /* v */
    BT_JN_LIST,   /* list */
    BT_JN_DICT,   /* list: key, value, key, value .. */
    BT_JN_ATTR,   /* a, v = name */
    BT_JN_ITEM,   /* a, b */
    BT_JN_SLICE,  /* a, list: start, stop, step, each may be NULL kind NONE */
    BT_JN_CALL,   /* a, list = positional, kw = keyword arguments */
    BT_JN_FILT,   /* a, op = filter, list, kw */
    BT_JN_TEST,   /* a, op = test, list, negated in op2 */
    BT_JN_NOT,    /* a */
    BT_JN_NEG,    /* a */
    BT_JN_POS,    /* a */
    BT_JN_AND,    /* a, b */
    BT_JN_OR,     /* a, b */
    BT_JN_BINARY, /* a, b, op */
    BT_JN_CMP,    /* a, b, op; chains are ANDs */
    BT_JN_COND,   /* a if b else c (NULL) */
    BT_JN_HOLE,   /* what {% filter %} is applied to */
};

enum bt_jop {
    BT_JO_ADD,
    BT_JO_SUB,
    BT_JO_MUL,
    BT_JO_DIV,
    BT_JO_FLOORDIV,
    BT_JO_MOD,
    BT_JO_POW,
    BT_JO_CONCAT,
    BT_JO_EQ,
    BT_JO_NE,
    BT_JO_LT,
    BT_JO_LE,
    BT_JO_GT,
    BT_JO_GE,
    BT_JO_IN,
    BT_JO_NOT_IN,
};

struct bt_jnames {
    struct bt_str *p;
    size_t n;
};
struct bt_jnodes {
    struct bt_jnode **p;
    size_t n, cap;
};
struct bt_jkw {
    struct bt_str name;
    struct bt_jnode *value;
    struct bt_jkw *next;
};

struct bt_jnode {
    enum bt_jnode_kind kind;
    int line;
    int op;
    bool negated;
    struct bt_jval v;
    struct bt_str name;
    struct bt_jnode *a, *b, *c;
    struct bt_jnode *body, *other; /* first statement */
    struct bt_jnode *next;
    struct bt_jnodes list;
    struct bt_jkw *kw;
    struct bt_jnames names;
};

int bt_jparse(const struct bt_jtoks *toks,
              struct bt_arena *a,
              struct bt_jnode **ret,
              struct bt_err *err) BT_MUST_USE;

/* Names to numbers; -1 = unknown. */
int bt_jfilter_find(struct bt_str name);
/* Arguments by position, and whether it takes one by this name. */
size_t bt_jfilter_most_args(int filter);
bool bt_jfilter_takes(int filter, struct bt_str keyword);
int bt_jtest_find(struct bt_str name);
int bt_jfunc_find(struct bt_str name);
bool bt_jmethod_known(struct bt_str name);

/* ---- values (value.c) ---- */

struct bt_jstr {
    struct bt_str s;
    const struct bt_run *runs; /* cover s; [n_runs], at least one unless s is empty */
    size_t n_runs;
};
struct bt_jlist {
    struct bt_jval *p;
    size_t n, cap;
    bool tuple; /* printed with parentheses */
};
struct bt_jpair {
    struct bt_str key;
    struct bt_jval key_val; /* the key as it was given */
    struct bt_jval v;
};
struct bt_jdict {
    struct bt_jpair *p;
    size_t n, cap;
    bool ns; /* a namespace: fields may be set */
};

/* Everything of one rendering. The first error stays; after it nothing matters and loops end. */
struct bt_jcx {
    struct bt_arena *arena;
    struct bt_jframe *frame, *globals; /* eval.c */
    struct bt_jsb *out;
    const struct bt_jinja_args *args;
    uint64_t steps, max_steps;
    int depth;
    int rc;
    struct bt_err *err;
    const struct bt_jnode *at; /* being evaluated, for the line */
    struct bt_jval hole;       /* value of BT_JN_HOLE */
    bool breaking, continuing;
};

/* Sets the error, with the line of cx->at in front; the first one wins. */
void bt_jfail(struct bt_jcx *cx, int rc, const char *fmt, ...) BT_PRINTF_ATTR(3, 4);
/* Counts work; false when there was too much. */
bool bt_jstep(struct bt_jcx *cx, uint64_t n);

/* Builds a string with its runs. */
struct bt_jsb {
    struct bt_jcx *cx;
    char *p;
    size_t n, cap;
    struct bt_run *runs;
    size_t n_runs, cap_runs;
};
void bt_jsb_add(struct bt_jsb *sb, struct bt_str s, bool ours);
void bt_jsb_add_str(struct bt_jsb *sb, const struct bt_jstr *s, size_t from, size_t to);
struct bt_jval bt_jsb_done(struct bt_jsb *sb);

struct bt_jval bt_jstr_slice(struct bt_jcx *cx, const struct bt_jstr *s, size_t from, size_t to);
/* Number of characters, and the byte offset of character i. */
size_t bt_jstr_chars(struct bt_str s);
size_t bt_jstr_offset(struct bt_str s, size_t i);
struct bt_jval bt_jstr_plain(struct bt_jcx *cx, struct bt_str s); /* copied; ours */

const struct bt_jval *bt_jdict_get(const struct bt_jdict *d, struct bt_str key);
bool bt_jtrue(const struct bt_jval *v);
bool bt_jequal(struct bt_jcx *cx, const struct bt_jval *a, const struct bt_jval *b);
/* <0, 0, >0; an error for what has no order. */
int bt_jcompare(struct bt_jcx *cx, const struct bt_jval *a, const struct bt_jval *b);
bool bt_jcontains(struct bt_jcx *cx, const struct bt_jval *box, const struct bt_jval *v);
const char *bt_jtype_name(const struct bt_jval *v);
static inline bool bt_jis_num(const struct bt_jval *v)
{
    return v->type == BT_J_INT || v->type == BT_J_FLOAT || v->type == BT_J_BOOL;
}
double bt_jnum(const struct bt_jval *v);
int64_t bt_jint(const struct bt_jval *v); /* of an int or bool */

/* print.c: as str() and as JSON. */
void bt_jprint(struct bt_jsb *sb, const struct bt_jval *v);
struct bt_jval bt_jto_str(struct bt_jcx *cx, const struct bt_jval *v);
/* indent < 0: on one line. ascii: what is not, as escapes. */
void bt_jjson(struct bt_jsb *sb, const struct bt_jval *v, int indent, bool ascii);

/* ---- calls ---- */

struct bt_jcall {
    const struct bt_jval *args;
    size_t n;
    const struct bt_jdict *kw; /* may be empty */
};
/* Argument i or keyword `name`; NULL = not given. */
const struct bt_jval *bt_jarg(const struct bt_jcall *c, size_t i, const char *name);

struct bt_jval
bt_jfilter(struct bt_jcx *cx, int filter, struct bt_jval v, const struct bt_jcall *c);
bool bt_jtest(struct bt_jcx *cx, int test, const struct bt_jval *v, const struct bt_jcall *c);
struct bt_jval bt_jfunc(struct bt_jcx *cx, int func, const struct bt_jcall *c);
struct bt_jval bt_jmethod(struct bt_jcx *cx,
                          const struct bt_jval *self,
                          struct bt_str name,
                          const struct bt_jcall *c);
/* Values of anything that can be looped over: a list, keys of a dict, characters of a string. */
struct bt_jlist *bt_jiterate(struct bt_jcx *cx, const struct bt_jval *v);
struct bt_jval bt_jattr(struct bt_jcx *cx, const struct bt_jval *v, struct bt_str name);
struct bt_jval
bt_jbinary(struct bt_jcx *cx, enum bt_jop op, const struct bt_jval *a, const struct bt_jval *b);
struct bt_jval bt_jitem(struct bt_jcx *cx, const struct bt_jval *v, const struct bt_jval *i);
/* Start, stop, step. */
struct bt_jval bt_jslice(struct bt_jcx *cx, const struct bt_jval *v, const struct bt_jval p[3]);
/* BT_JO_EQ and what follows it. */
bool bt_jrelation(struct bt_jcx *cx, int op, const struct bt_jval *a, const struct bt_jval *b);
/* Shared by filters and methods. `chars` NULL = white space; sides: 1 left, 2 right. */
struct bt_jval
bt_jstrip(struct bt_jcx *cx, const struct bt_jstr *s, const struct bt_jval *chars, int sides);
struct bt_jval bt_jreplace(struct bt_jcx *cx, const struct bt_jstr *s, const struct bt_jcall *c);
enum bt_jcase { BT_JC_UPPER, BT_JC_LOWER, BT_JC_TITLE, BT_JC_CAPITAL };
struct bt_jval bt_jrecase(struct bt_jcx *cx, const struct bt_jstr *s, enum bt_jcase to);

#endif
