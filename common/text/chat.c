/* Conversations by the model's template: values in, text and runs out, ids of that. */
#include "common/text/chat.h"

#include "common/jinja/jinja.h"
#include "common/text/utf8.h"

#include <stdlib.h>
#include <time.h>

/* A rendering may write this many times the bytes of the content, and so much more. */
#define OUTPUT_FACTOR 8
#define OUTPUT_EXTRA  (1u << 20)
/* Memory of a rendering, for a byte of output. */
#define MEMORY_FACTOR 16
#define MEMORY_EXTRA  (16u << 20)

struct bt_chat_template {
    const struct bt_tokenizer *tok;
    struct bt_jinja *jinja;
    struct bt_str bos, eos; /* empty = none */
};

static bool known_role(struct bt_str role)
{
    static const char *const roles[] = {"system", "developer", "user", "assistant", "tool"};

    for (size_t i = 0; i < BT_ARRAY_LEN(roles); i++) {
        if (bt_str_eq(role, bt_str_of(roles[i]))) {
            return true;
        }
    }
    return false;
}

/* Checks the messages and adds up the bytes of their content. */
static int
check(const struct bt_chat_message *messages, size_t n, size_t *ret_bytes, struct bt_err *err)
{
    if (n == 0) {
        return BT_FAIL(err, BT_E_INVALID, "the conversation has no messages");
    }
    if (n > BT_CHAT_MAX_MESSAGES) {
        return BT_FAIL(err, BT_E_TOO_LARGE, "%zu messages, at most %d are taken", n,
                       BT_CHAT_MAX_MESSAGES);
    }
    *ret_bytes = 0;
    for (size_t i = 0; i < n; i++) {
        const struct bt_chat_message *m = &messages[i];

        if (!known_role(m->role)) {
            return BT_FAIL(err, BT_E_INVALID, "message %zu: role \"%.*s\" is unknown", i,
                           (int)BT_MIN(m->role.n, (size_t)40), m->role.p);
        }
        for (size_t k = 0; k < m->n_parts; k++) {
            size_t valid = bt_utf8_valid_prefix(m->parts[k].p, m->parts[k].n);

            if (valid != m->parts[k].n) {
                return BT_FAIL(err, BT_E_INVALID, "message %zu: content is not UTF-8 at byte %zu",
                               i, valid);
            }
            *ret_bytes += m->parts[k].n;
        }
        if (bt_utf8_valid_prefix(m->name.p, m->name.n) != m->name.n) {
            return BT_FAIL(err, BT_E_INVALID, "message %zu: name is not UTF-8", i);
        }
        *ret_bytes += m->name.n;
    }
    return BT_OK;
}

/* The content of a message in one piece; parts that are more than one are joined in *joined. */
static struct bt_str content_of(const struct bt_chat_message *m, char **joined)
{
    char *at = *joined;
    size_t n = 0;

    if (m->n_parts == 1) {
        return m->parts[0];
    }
    for (size_t k = 0; k < m->n_parts; k++) {
        if (m->parts[k].n) {
            memcpy(at + n, m->parts[k].p, m->parts[k].n);
            n += m->parts[k].n;
        }
    }
    *joined += n;
    return (struct bt_str){at, n};
}

static struct bt_jval
list_of(struct bt_arena *a, const struct bt_chat_message *messages, size_t n, char *joined)
{
    struct bt_jval list = bt_jval_list(a);

    for (size_t i = 0; i < n && list.type == BT_J_LIST; i++) {
        struct bt_jval m = bt_jval_dict(a);
        struct bt_str content = content_of(&messages[i], &joined);

        if (m.type == BT_J_DICT) {
            bt_jdict_set(a, m.d, BT_STR("role"), bt_jval_str(a, messages[i].role, true));
            bt_jdict_set(a, m.d, BT_STR("content"), bt_jval_str(a, content, false));
            if (messages[i].name.n) {
                bt_jdict_set(a, m.d, BT_STR("name"), bt_jval_str(a, messages[i].name, false));
            }
            bt_jlist_push(a, list.l, m);
        }
    }
    return list;
}

static int render(const struct bt_chat_template *t,
                  struct bt_arena *a,
                  struct bt_jval messages,
                  const struct bt_jinja_args *limits,
                  bool open_answer,
                  struct bt_jinja_out *ret,
                  struct bt_err *err)
{
    struct bt_jval vars = bt_jval_dict(a);
    struct bt_jinja_args args = *limits;

    if (vars.type != BT_J_DICT || messages.type != BT_J_LIST) {
        return BT_FAIL(err, BT_E_NOMEM, "no memory for the conversation");
    }
    bt_jdict_set(a, vars.d, BT_STR("messages"), messages);
    bt_jdict_set(a, vars.d, BT_STR("add_generation_prompt"), bt_jval_bool(open_answer));
    bt_jdict_set(a, vars.d, BT_STR("tools"), bt_jval_none());
    bt_jdict_set(a, vars.d, BT_STR("documents"), bt_jval_none());
    if (t->bos.n) {
        bt_jdict_set(a, vars.d, BT_STR("bos_token"), bt_jval_str(a, t->bos, true));
    }
    if (t->eos.n) {
        bt_jdict_set(a, vars.d, BT_STR("eos_token"), bt_jval_str(a, t->eos, true));
    }
    args.vars = vars.d;
    return bt_jinja_render(t->jinja, a, &args, ret, err);
}

int bt_chat_render(const struct bt_chat_template *tmpl,
                   const struct bt_chat_message *messages,
                   size_t n_messages,
                   bool open_answer,
                   struct bt_ids *ids,
                   struct bt_err *err)
{
    struct bt_jinja_args limits = {.now_s = (int64_t)time(NULL)};
    struct bt_jinja_out out;
    struct bt_arena *a = NULL;
    char *joined = NULL;
    size_t bytes = 0;
    int rc = check(messages, n_messages, &bytes, err);

    if (rc < 0) {
        return rc;
    }
    limits.max_output = bytes * OUTPUT_FACTOR + OUTPUT_EXTRA;
    joined = bt_calloc(1, bytes + 1);
    rc =
        joined ? bt_arena_create(limits.max_output * MEMORY_FACTOR + MEMORY_EXTRA, &a) : BT_E_NOMEM;
    if (rc < 0) {
        rc = BT_FAIL(err, rc, "no memory for the conversation");
        goto out;
    }
    rc = render(tmpl, a, list_of(a, messages, n_messages, joined), &limits, open_answer, &out, err);
    if (rc == BT_OK) {
        rc = bt_tokenizer_encode_runs(tmpl->tok, out.text, out.runs, out.n_runs, ids, err);
    }
out:
    bt_arena_destroy(a);
    free(joined);
    return rc;
}

/* A template may refuse a conversation, but must be able to render one. */
static int try_out(const struct bt_chat_template *t, struct bt_err *err)
{
    const struct bt_str text = BT_STR("x");
    const struct bt_chat_message m[] = {{BT_STR("user"), 1, &text},
                                        {BT_STR("assistant"), 1, &text}};
    struct bt_ids ids = {0};
    int rc = bt_chat_render(t, m, 1, true, &ids, err);

    if (rc == BT_OK) {
        rc = bt_chat_render(t, m, 2, false, &ids, err);
        rc = rc == BT_E_INVALID ? BT_OK : rc;
    }
    bt_ids_fini(&ids);
    return rc == BT_E_INVALID ? BT_E_UNSUPPORTED : rc;
}

int bt_chat_create(const struct bt_tokenizer *tok,
                   struct bt_str text,
                   int32_t eos_id,
                   struct bt_chat_template **ret_tmpl,
                   struct bt_err *err)
{
    struct bt_chat_template *t;
    int rc;

    if (!text.n) {
        return BT_FAIL(err, BT_E_NOT_FOUND, "the model has no chat template");
    }
    t = bt_calloc(1, sizeof(*t));
    if (!t) {
        return BT_FAIL(err, BT_E_NOMEM, "no room for the chat template");
    }
    t->tok = tok;
    t->bos = bt_tokenizer_token_bytes(tok, bt_tokenizer_bos_id(tok));
    t->eos = bt_tokenizer_token_bytes(tok, eos_id);
    rc = bt_jinja_compile(text, &t->jinja, err);
    rc = rc < 0 ? rc : try_out(t, err);
    if (rc < 0) {
        bt_chat_destroy(t);
        return rc;
    }
    *ret_tmpl = t;
    return BT_OK;
}

void bt_chat_destroy(struct bt_chat_template *tmpl)
{
    if (tmpl) {
        bt_jinja_destroy(tmpl->jinja);
        free(tmpl);
    }
}
