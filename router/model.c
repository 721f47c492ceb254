/* The model as a router knows it: tokenizer, chat template, digest, limits; never its weights.
 * Immutable after open. */
#include "router/router_int.h"

#include "common/obs/log.h"
#include "common/text/chat.h"

#include <stdlib.h>

/* Ids of one prompt, whatever the context: bounds what a text may expand to. */
#define MAX_PROMPT_IDS (4u << 20)

struct rt_model {
    struct bt_model_file *file;
    struct bt_tokenizer *tok;
    struct bt_chat_template *chat; /* NULL = none that we know */
    uint8_t digest[32];
    char no_chat[200]; /* why */
};

void rt_model_close(struct rt_model *m)
{
    if (!m) {
        return;
    }
    bt_chat_destroy(m->chat);
    bt_tokenizer_destroy(m->tok);
    bt_model_close(m->file);
    free(m);
}

int rt_model_open(const char *path, struct rt_model **ret_model, struct bt_err *err)
{
    struct rt_model *m = bt_calloc(1, sizeof(*m));
    const struct bt_model_config *mc;
    struct bt_err why = {0};
    int rc;

    if (!m) {
        return BT_FAIL(err, BT_E_NOMEM, "no memory for the model");
    }
    if ((rc = bt_model_open(path, &m->file, err)) < 0 ||
        (rc = bt_model_digest(m->file, m->digest, err)) < 0 ||
        (rc = bt_tokenizer_create(bt_model_tok_source(m->file), &m->tok, err)) < 0) {
        rt_model_close(m);
        return rc;
    }
    mc = bt_model_config(m->file);
    rc = bt_chat_create(m->tok, bt_model_tok_source(m->file)->chat_template,
                        mc->n_eos ? mc->eos[0] : -1, &m->chat, &why);
    if (rc < 0) {
        snprintf(m->no_chat, sizeof(m->no_chat), "%s", bt_err_msg(&why, rc));
        BT_INFO("model", "msg=\"no chat: %s\"", m->no_chat);
    }
    *ret_model = m;
    return BT_OK;
}

const struct bt_model_config *rt_model_config(const struct rt_model *m)
{
    return bt_model_config(m->file);
}

const uint8_t *rt_model_digest(const struct rt_model *m)
{
    return m->digest;
}

const struct bt_tokenizer *rt_model_tokenizer(const struct rt_model *m)
{
    return m->tok;
}

bool rt_model_has_template(const struct rt_model *m)
{
    return m->chat != NULL;
}

bool rt_model_is(const struct rt_model *m, const char *name)
{
    return name[0] == '\0' || strcmp(name, bt_model_config(m->file)->name) == 0;
}

int rt_model_text(const struct rt_model *m,
                  const char *text,
                  struct bt_ids *ids,
                  struct bt_err *err)
{
    int rc;

    if (text[0] == '\0') {
        return BT_FAIL(err, BT_E_INVALID, "the prompt is empty");
    }
    ids->max = MAX_PROMPT_IDS;
    rc = bt_tokenizer_encode(m->tok, bt_str_of(text), 0, ids, err);
    if (rc == BT_OK) {
        rc = bt_tokenizer_begin(m->tok, ids);
    }
    return rc;
}

int rt_model_chat(const struct rt_model *m,
                  const Baton__V1__Chat *chat,
                  struct bt_ids *ids,
                  struct bt_err *err)
{
    struct bt_chat_message *messages;
    struct bt_str *contents;
    size_t n = chat->n_messages;
    int rc;

    if (!m->chat) {
        return BT_FAIL(err, BT_E_INVALID, "no chat with this model: %.180s", m->no_chat);
    }
    if (n == 0 || n > BT_CHAT_MAX_MESSAGES) {
        return BT_FAIL(err, BT_E_INVALID, "a chat of %zu messages, must be 1 to %d", n,
                       BT_CHAT_MAX_MESSAGES);
    }
    messages = bt_calloc(n, sizeof(*messages));
    contents = bt_calloc(n, sizeof(*contents));
    if (!messages || !contents) {
        rc = BT_FAIL(err, BT_E_NOMEM, "no memory for the chat");
        goto out;
    }
    for (size_t i = 0; i < n; i++) {
        contents[i] = bt_str_of(chat->messages[i]->content);
        messages[i] = (struct bt_chat_message){.role = bt_str_of(chat->messages[i]->role),
                                               .n_parts = 1,
                                               .parts = &contents[i],
                                               .name = bt_str_of(chat->messages[i]->name)};
    }
    ids->max = MAX_PROMPT_IDS;
    rc = bt_chat_render(m->chat, messages, n, true, ids, err);
    if (rc == BT_OK) {
        rc = bt_tokenizer_begin(m->tok, ids);
    }
out:
    free(messages);
    free(contents);
    return rc;
}

int rt_model_ids(const struct rt_model *m,
                 const int32_t *given,
                 size_t n,
                 struct bt_ids *ids,
                 struct bt_err *err)
{
    int n_vocab = bt_model_config(m->file)->n_vocab;
    uint32_t good = UINT32_MAX;

    if (n == 0) {
        return BT_FAIL(err, BT_E_INVALID, "the prompt is empty");
    }
    /* Its upper bit stays while ids are neither < 0 nor too large. */
    for (size_t i = 0; i < n; i++) {
        good &= ~(uint32_t)given[i] & ((uint32_t)given[i] - (uint32_t)n_vocab);
    }
    for (size_t i = 0; !(good >> 31) && i < n; i++) {
        if (given[i] < 0 || given[i] >= n_vocab) {
            return BT_FAIL(err, BT_E_INVALID, "token %d at %zu is not in the vocabulary of %d",
                           given[i], i, n_vocab);
        }
    }
    return bt_ids_add(ids, given, n);
}
