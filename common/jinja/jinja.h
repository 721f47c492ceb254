/* Chat templates: the part of the Jinja template language that model files use.
 *
 * Rendered as the reference does it for chats: trim_blocks and lstrip_blocks on, no auto-escaping,
 * loop controls, sandboxed (values are never changed in place), `raise_exception` and
 * `strftime_now` among the functions. Covered are the templates of the Llama 3, Qwen 2.5 and 3,
 * Mistral, SmolLM2 and DeepSeek families and whatever stays within the same constructs (README.md
 * lists them); everything else is refused by compile, by name and line.
 *
 * Every byte of the output says whose it is: literals of the template (and what the caller marks
 * so) are ours, everything that came in with a message is theirs, through every filter and method.
 * So text from people can never become a control token, whatever a template does with it.
 *
 * Time and memory of a rendering are bounded: the caller gives the largest output, and steps and
 * memory follow from it. A compiled template is immutable; any thread. Values belong to the arena
 * that they were made in. */
#ifndef BT_JINJA_JINJA_H
#define BT_JINJA_JINJA_H

#include "common/base/buf.h"

struct bt_jinja;

/* Errors: BT_E_UNSUPPORTED (a construct, filter, test, function or method that we do not know),
 * BT_E_FORMAT (not a template), BT_E_TOO_LARGE (nesting, or over a megabyte), BT_E_NOMEM; all name
 * the line. `text` need not outlive the call. */
int bt_jinja_compile(struct bt_str text, struct bt_jinja **ret, struct bt_err *err) BT_MUST_USE;
void bt_jinja_destroy(struct bt_jinja *j); /* NULL is fine */

/* ---- values ---- */

/* Memory of one rendering: inputs, everything in between, nothing after it. */
struct bt_arena;
int bt_arena_create(size_t max_bytes, struct bt_arena **ret) BT_MUST_USE;
void bt_arena_destroy(struct bt_arena *a); /* NULL is fine */

enum bt_jtype {
    BT_J_UNDEFINED, /* all zero: the value of a name that nobody gave one */
    BT_J_NONE,
    BT_J_BOOL,
    BT_J_INT,
    BT_J_FLOAT,
    BT_J_STR,
    BT_J_LIST,
    BT_J_DICT,
    BT_J_FUNC,
    BT_J_MACRO,
};

struct bt_jval {
    enum bt_jtype type;
    union {
        bool b;
        int64_t i;
        double f;
        const struct bt_jstr *s;
        struct bt_jlist *l;
        struct bt_jdict *d;
        int func;
        const struct bt_jnode *macro;
    };
};

/* Constructors; on lack of memory the value is BT_J_UNDEFINED and the arena remembers: render fails
 * with BT_E_TOO_LARGE. Strings are borrowed and must outlive the arena; `ours` as above. */
struct bt_jval bt_jval_none(void);
struct bt_jval bt_jval_bool(bool b);
struct bt_jval bt_jval_int(int64_t i);
struct bt_jval bt_jval_float(double f);
struct bt_jval bt_jval_str(struct bt_arena *a, struct bt_str s, bool ours);
struct bt_jval bt_jval_list(struct bt_arena *a);
struct bt_jval bt_jval_dict(struct bt_arena *a);
void bt_jlist_push(struct bt_arena *a, struct bt_jlist *l, struct bt_jval v);
/* Replaces the value of a key that is there. Keys are borrowed. */
void bt_jdict_set(struct bt_arena *a, struct bt_jdict *d, struct bt_str key, struct bt_jval v);

/* ---- rendering ---- */

struct bt_jinja_out {
    struct bt_str text;
    const struct bt_run *runs; /* [n_runs] */
    size_t n_runs;
};

struct bt_jinja_args {
    const struct bt_jdict *vars; /* names that the template sees */
    size_t max_output;           /* bytes */
    int64_t now_s;               /* for strftime_now; seconds since 1970, UTC */
};

/* *ret_out lives as long as the arena. Errors: BT_E_INVALID (raise_exception, or what the reference
 * raises for: the line is named), BT_E_TOO_LARGE (output, memory, steps). Does not block. */
int bt_jinja_render(const struct bt_jinja *j,
                    struct bt_arena *arena,
                    const struct bt_jinja_args *args,
                    struct bt_jinja_out *ret_out,
                    struct bt_err *err) BT_MUST_USE;

#endif
