/* What the two halves of the parser share: expressions (expr.c) and statements (parse.c). */
#ifndef BT_JINJA_PARSE_INT_H
#define BT_JINJA_PARSE_INT_H

#include "common/jinja/jinja_int.h"

struct bt_jparser {
    const struct bt_jtoks *toks;
    size_t at;
    struct bt_arena *arena;
    struct bt_err *err;
    int rc; /* first error; everything after it does nothing */
    int depth;
    int loops; /* open ones of the current macro or template */
    struct bt_jnodes calls, macros;
};

static inline const struct bt_jtok *bt_jpeek(const struct bt_jparser *p)
{
    return &p->toks->t[p->at];
}

static inline const struct bt_jtok *bt_jpeek_next(const struct bt_jparser *p)
{
    return &p->toks->t[BT_MIN(p->at + 1, p->toks->n - 1)];
}

/* Errors; the first one stays. */
void bt_jrefuse(struct bt_jparser *p, int rc, const char *what, struct bt_str name);
void bt_junexpected(struct bt_jparser *p, const char *wanted);
void bt_jfull(struct bt_jparser *p);

void bt_jskip(struct bt_jparser *p);
bool bt_jis_op(const struct bt_jparser *p, const char *op);
bool bt_jis_word(const struct bt_jparser *p, const char *word);
/* True if it was next, and is behind us now. */
bool bt_jeat_op(struct bt_jparser *p, const char *op);
bool bt_jeat_word(struct bt_jparser *p, const char *word);
void bt_jneed_op(struct bt_jparser *p, const char *op);
void bt_jneed_kind(struct bt_jparser *p, enum bt_jtok_kind kind, const char *what);
struct bt_str bt_jneed_name(struct bt_jparser *p);

/* Never NULL: after an error, or without memory, one that is never rendered. */
struct bt_jnode *bt_jnode(struct bt_jparser *p, enum bt_jnode_kind kind);
void bt_jadd(struct bt_jparser *p, struct bt_jnodes *list, struct bt_jnode *n);
/* Counts nesting, which p->depth-- ends; false when it is too deep. */
bool bt_jenter(struct bt_jparser *p);

/* expr.c */
struct bt_jnode *bt_jexpr(struct bt_jparser *p);
/* Without "a if b else c". */
struct bt_jnode *bt_jexpr_or(struct bt_jparser *p);
/* Behind "|": a filter of `of`, and the filters and tests behind it. */
struct bt_jnode *bt_jfilters_of(struct bt_jparser *p, struct bt_jnode *of);

#endif
