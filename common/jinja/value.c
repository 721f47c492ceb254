/* Arena, strings that know whose bytes they hold, lists, dicts, comparison. */
#include "common/jinja/jinja_int.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

/* ---- arena ---- */

#define CHUNK_BYTES 65536

struct chunk {
    struct chunk *next;
    size_t used, bytes;
    _Alignas(16) char p[];
};

struct bt_arena {
    struct chunk *chunks;
    size_t total, max;
    bool failed;
};

int bt_arena_create(size_t max_bytes, struct bt_arena **ret)
{
    struct bt_arena *a = bt_calloc(1, sizeof(*a));

    if (!a) {
        return BT_E_NOMEM;
    }
    a->max = max_bytes;
    *ret = a;
    return BT_OK;
}

void bt_arena_destroy(struct bt_arena *a)
{
    struct chunk *c = a ? a->chunks : NULL, *next;

    for (; c; c = next) {
        next = c->next;
        free(c);
    }
    free(a);
}

void *bt_arena_alloc(struct bt_arena *a, size_t n)
{
    struct chunk *c = a->chunks;
    size_t bytes;
    void *p;

    if (n > SIZE_MAX / 2 || a->failed) {
        a->failed = true;
        return NULL;
    }
    n = BT_MAX((n + 15) & ~(size_t)15, (size_t)16);
    if (!c || c->bytes - c->used < n) {
        bytes = BT_MAX(n, (size_t)CHUNK_BYTES);
        c = bytes <= a->max - a->total ? bt_calloc(1, sizeof(*c) + bytes) : NULL;
        if (!c) {
            a->failed = true;
            return NULL;
        }
        c->bytes = bytes;
        a->total += bytes;
        c->next = a->chunks;
        a->chunks = c;
    }
    p = c->p + c->used;
    c->used += n;
    return p;
}

bool bt_arena_failed(const struct bt_arena *a)
{
    return a->failed;
}

/* ---- constructors ---- */

struct bt_jval bt_jval_none(void)
{
    return (struct bt_jval){.type = BT_J_NONE};
}

struct bt_jval bt_jval_bool(bool b)
{
    return (struct bt_jval){.type = BT_J_BOOL, .b = b};
}

struct bt_jval bt_jval_int(int64_t i)
{
    return (struct bt_jval){.type = BT_J_INT, .i = i};
}

struct bt_jval bt_jval_float(double f)
{
    return (struct bt_jval){.type = BT_J_FLOAT, .f = f};
}

static struct bt_jval
make_str(struct bt_arena *a, struct bt_str s, const struct bt_run *runs, size_t n_runs)
{
    struct bt_jstr *j = bt_arena_alloc(a, sizeof(*j));

    if (!j) {
        return (struct bt_jval){0};
    }
    *j = (struct bt_jstr){s, runs, n_runs};
    return (struct bt_jval){.type = BT_J_STR, .s = j};
}

struct bt_jval bt_jval_str(struct bt_arena *a, struct bt_str s, bool ours)
{
    struct bt_run *r = s.n ? bt_arena_alloc(a, sizeof(*r)) : NULL;

    if (s.n && !r) {
        return (struct bt_jval){0};
    }
    if (r) {
        *r = (struct bt_run){s.n, ours};
    }
    return make_str(a, s, r, s.n ? 1 : 0);
}

struct bt_jval bt_jval_list(struct bt_arena *a)
{
    struct bt_jlist *l = bt_arena_alloc(a, sizeof(*l));

    return l ? (struct bt_jval){.type = BT_J_LIST, .l = l} : (struct bt_jval){0};
}

struct bt_jval bt_jval_dict(struct bt_arena *a)
{
    struct bt_jdict *d = bt_arena_alloc(a, sizeof(*d));

    return d ? (struct bt_jval){.type = BT_J_DICT, .d = d} : (struct bt_jval){0};
}

/* Room for one more element of `size` bytes. */
static bool grow(struct bt_arena *a, void **p, size_t n, size_t *cap, size_t size)
{
    size_t more = *cap ? 2 * *cap : 8;
    void *q;

    if (n < *cap) {
        return true;
    }
    q = bt_arena_alloc(a, more * size);
    if (!q) {
        return false;
    }
    if (n) {
        memcpy(q, *p, n * size);
    }
    *p = q;
    *cap = more;
    return true;
}

void bt_jlist_push(struct bt_arena *a, struct bt_jlist *l, struct bt_jval v)
{
    void *p = l ? l->p : NULL;

    if (l && grow(a, &p, l->n, &l->cap, sizeof(*l->p))) {
        l->p = p;
        l->p[l->n++] = v;
    }
}

void bt_jdict_set(struct bt_arena *a, struct bt_jdict *d, struct bt_str key, struct bt_jval v)
{
    void *p = d ? d->p : NULL;

    if (!d) {
        return;
    }
    for (size_t i = 0; i < d->n; i++) {
        if (bt_str_eq(d->p[i].key, key)) {
            d->p[i].v = v;
            return;
        }
    }
    if (grow(a, &p, d->n, &d->cap, sizeof(*d->p))) {
        d->p = p;
        d->p[d->n++] = (struct bt_jpair){key, bt_jval_str(a, key, true), v};
    }
}

const struct bt_jval *bt_jdict_get(const struct bt_jdict *d, struct bt_str key)
{
    for (size_t i = 0; i < d->n; i++) {
        if (bt_str_eq(d->p[i].key, key)) {
            return &d->p[i].v;
        }
    }
    return NULL;
}

/* ---- errors and limits ---- */

void bt_jfail(struct bt_jcx *cx, int rc, const char *fmt, ...)
{
    char text[180];
    va_list ap;

    if (cx->rc != BT_OK) {
        return;
    }
    va_start(ap, fmt);
    vsnprintf(text, sizeof(text), fmt, ap);
    va_end(ap);
    cx->rc = BT_FAIL(cx->err, rc, "chat template, line %d: %s", cx->at ? cx->at->line : 0, text);
}

bool bt_jstep(struct bt_jcx *cx, uint64_t n)
{
    cx->steps += n;
    if (cx->rc == BT_OK && (cx->steps > cx->max_steps || bt_arena_failed(cx->arena))) {
        bt_jfail(cx, BT_E_TOO_LARGE, "the conversation takes too much work to render");
    }
    return cx->rc == BT_OK;
}

/* ---- strings ---- */

static bool sb_room(struct bt_jsb *sb, size_t n)
{
    size_t cap = BT_MAX(2 * sb->cap, sb->n + n + 64);
    char *p;

    if (!bt_jstep(sb->cx, 1 + n / 16)) {
        return false;
    }
    if (sb->cap - sb->n >= n) {
        return true;
    }
    p = bt_arena_alloc(sb->cx->arena, cap);
    if (!p) {
        bt_jstep(sb->cx, 1);
        return false;
    }
    if (sb->n) {
        memcpy(p, sb->p, sb->n);
    }
    sb->p = p;
    sb->cap = cap;
    return true;
}

void bt_jsb_add(struct bt_jsb *sb, struct bt_str s, bool ours)
{
    struct bt_run *last = sb->n_runs ? &sb->runs[sb->n_runs - 1] : NULL;
    void *p = sb->runs;

    if (!s.n || !sb_room(sb, s.n)) {
        return;
    }
    if (!last || last->ours != ours) {
        if (!grow(sb->cx->arena, &p, sb->n_runs, &sb->cap_runs, sizeof(*sb->runs))) {
            bt_jstep(sb->cx, 1);
            return;
        }
        sb->runs = p;
        last = &sb->runs[sb->n_runs++];
        last->ours = ours;
    }
    memcpy(sb->p + sb->n, s.p, s.n);
    sb->n += s.n;
    last->end = sb->n;
}

void bt_jsb_add_str(struct bt_jsb *sb, const struct bt_jstr *s, size_t from, size_t to)
{
    for (size_t i = 0; i < s->n_runs && from < to; i++) {
        size_t end = BT_MIN(s->runs[i].end, to);

        if (end > from) {
            bt_jsb_add(sb, (struct bt_str){s->s.p + from, end - from}, s->runs[i].ours);
            from = end;
        }
    }
}

struct bt_jval bt_jsb_done(struct bt_jsb *sb)
{
    struct bt_jval v = make_str(sb->cx->arena, (struct bt_str){sb->p, sb->n}, sb->runs, sb->n_runs);

    bt_jstep(sb->cx, 1);
    return v;
}

struct bt_jval bt_jstr_slice(struct bt_jcx *cx, const struct bt_jstr *s, size_t from, size_t to)
{
    struct bt_jsb sb = {.cx = cx};

    if (s->n_runs == 1 && from < to) {
        return bt_jval_str(cx->arena, (struct bt_str){s->s.p + from, to - from}, s->runs[0].ours);
    }
    bt_jsb_add_str(&sb, s, from, to);
    return bt_jsb_done(&sb);
}

struct bt_jval bt_jstr_plain(struct bt_jcx *cx, struct bt_str s)
{
    struct bt_jsb sb = {.cx = cx};

    bt_jsb_add(&sb, s, true);
    return bt_jsb_done(&sb);
}

static bool begins_char(char c)
{
    return ((unsigned char)c & 0xc0) != 0x80;
}

size_t bt_jstr_chars(struct bt_str s)
{
    size_t n = 0;

    for (size_t i = 0; i < s.n; i++) {
        n += begins_char(s.p[i]);
    }
    return n;
}

size_t bt_jstr_offset(struct bt_str s, size_t i)
{
    size_t at = 0;

    for (; at < s.n; at++) {
        if (begins_char(s.p[at]) && i-- == 0) {
            break;
        }
    }
    return at;
}

/* ---- truth, order ---- */

const char *bt_jtype_name(const struct bt_jval *v)
{
    static const char *const names[] = {
        "an undefined value", "none",   "a bool", "an int",     "a float",
        "a string",           "a list", "a dict", "a function", "a macro"};

    return names[v->type];
}

double bt_jnum(const struct bt_jval *v)
{
    return v->type == BT_J_FLOAT ? v->f : (double)bt_jint(v);
}

int64_t bt_jint(const struct bt_jval *v)
{
    return v->type == BT_J_BOOL ? v->b : v->type == BT_J_INT ? v->i : 0;
}

bool bt_jtrue(const struct bt_jval *v)
{
    switch (v->type) {
    case BT_J_UNDEFINED:
    case BT_J_NONE:
        return false;
    case BT_J_BOOL:
        return v->b;
    case BT_J_INT:
        return v->i != 0;
    case BT_J_FLOAT:
        return v->f != 0;
    case BT_J_STR:
        return v->s->s.n > 0;
    case BT_J_LIST:
        return v->l->n > 0;
    case BT_J_DICT:
        return v->d->ns || v->d->n > 0;
    case BT_J_FUNC:
    case BT_J_MACRO:
        break;
    }
    return true;
}

static bool lists_equal(struct bt_jcx *cx, const struct bt_jlist *a, const struct bt_jlist *b)
{
    bool same = a->n == b->n && a->tuple == b->tuple;

    if (++cx->depth > BT_J_MAX_DEPTH) {
        bt_jfail(cx, BT_E_TOO_LARGE, "values are nested too deeply");
        same = false;
    }
    for (size_t i = 0; same && i < a->n && bt_jstep(cx, 1); i++) {
        same = bt_jequal(cx, &a->p[i], &b->p[i]);
    }
    cx->depth--;
    return same;
}

static bool dicts_equal(struct bt_jcx *cx, const struct bt_jdict *a, const struct bt_jdict *b)
{
    bool same = a->n == b->n;

    if (++cx->depth > BT_J_MAX_DEPTH) {
        bt_jfail(cx, BT_E_TOO_LARGE, "values are nested too deeply");
        same = false;
    }
    for (size_t i = 0; same && i < a->n && bt_jstep(cx, 1 + b->n); i++) {
        const struct bt_jval *v = bt_jdict_get(b, a->p[i].key);

        same = v && bt_jequal(cx, &a->p[i].v, v);
    }
    cx->depth--;
    return same;
}

bool bt_jequal(struct bt_jcx *cx, const struct bt_jval *a, const struct bt_jval *b)
{
    if (bt_jis_num(a) && bt_jis_num(b)) {
        return a->type == BT_J_FLOAT || b->type == BT_J_FLOAT ? bt_jnum(a) == bt_jnum(b)
                                                              : bt_jint(a) == bt_jint(b);
    }
    if (a->type != b->type) {
        return false;
    }
    switch (a->type) {
    case BT_J_STR:
        return bt_jstep(cx, 1 + a->s->s.n / 64) && bt_str_eq(a->s->s, b->s->s);
    case BT_J_LIST:
        return a->l == b->l || lists_equal(cx, a->l, b->l);
    case BT_J_DICT:
        return a->d == b->d || dicts_equal(cx, a->d, b->d);
    case BT_J_FUNC:
        return a->func == b->func;
    case BT_J_MACRO:
        return a->macro == b->macro;
    case BT_J_UNDEFINED:
    case BT_J_NONE:
    case BT_J_BOOL:
    case BT_J_INT:
    case BT_J_FLOAT:
        break;
    }
    return true;
}

int bt_jcompare(struct bt_jcx *cx, const struct bt_jval *a, const struct bt_jval *b)
{
    if (bt_jis_num(a) && bt_jis_num(b)) {
        if (a->type != BT_J_FLOAT && b->type != BT_J_FLOAT) {
            return (bt_jint(a) > bt_jint(b)) - (bt_jint(a) < bt_jint(b));
        }
        return (bt_jnum(a) > bt_jnum(b)) - (bt_jnum(a) < bt_jnum(b));
    }
    if (a->type == BT_J_STR && b->type == BT_J_STR) {
        size_t n = BT_MIN(a->s->s.n, b->s->s.n);
        int c = n && bt_jstep(cx, 1 + n / 64) ? memcmp(a->s->s.p, b->s->s.p, n) : 0;

        return c ? c : (a->s->s.n > b->s->s.n) - (a->s->s.n < b->s->s.n);
    }
    bt_jfail(cx, BT_E_INVALID, "%s and %s have no order", bt_jtype_name(a), bt_jtype_name(b));
    return 0;
}

bool bt_jcontains(struct bt_jcx *cx, const struct bt_jval *box, const struct bt_jval *v)
{
    switch (box->type) {
    case BT_J_STR:
        if (v->type != BT_J_STR) {
            bt_jfail(cx, BT_E_INVALID, "%s is looked for in a string", bt_jtype_name(v));
            return false;
        }
        return bt_jstep(cx, 1 + box->s->s.n / 16) &&
               (v->s->s.n == 0 ||
                (box->s->s.n && memmem(box->s->s.p, box->s->s.n, v->s->s.p, v->s->s.n)));
    case BT_J_LIST:
        for (size_t i = 0; i < box->l->n && bt_jstep(cx, 1); i++) {
            if (bt_jequal(cx, &box->l->p[i], v)) {
                return true;
            }
        }
        return false;
    case BT_J_DICT:
        return v->type == BT_J_STR && bt_jstep(cx, 1 + box->d->n) && bt_jdict_get(box->d, v->s->s);
    case BT_J_UNDEFINED:
        return false;
    case BT_J_NONE:
    case BT_J_BOOL:
    case BT_J_INT:
    case BT_J_FLOAT:
    case BT_J_FUNC:
    case BT_J_MACRO:
        break;
    }
    bt_jfail(cx, BT_E_INVALID, "something is looked for in %s", bt_jtype_name(box));
    return false;
}
