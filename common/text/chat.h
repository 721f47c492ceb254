/* Chat messages to the token ids of a prompt, by the model's own template.
 *
 * Known now is the ChatML family (SmolLM2, Qwen2, Qwen2.5 and templates of the same two forms); any
 * other template is refused, chat is then not available and text and ids still are.
 *
 * The template's markers become control ids. What people wrote never does: the text between two
 * markers, their content included, is encoded as ordinary text, in one go, so that harmless
 * messages give exactly the ids of the reference library for the rendered string.
 *
 * A template is immutable after create; any thread.
 */
#ifndef BT_TEXT_CHAT_H
#define BT_TEXT_CHAT_H

#include "common/text/tokenizer.h"

#define BT_CHAT_MAX_MESSAGES 4096

struct bt_chat_message {
    struct bt_str role;         /* "system", "user", "assistant" or "tool" */
    size_t n_parts;             /* parts of the content, joined without anything between */
    const struct bt_str *parts; /* UTF-8 */
};

struct bt_chat_template;

/* `text` is the template as the model file has it. The tokenizer must outlive *ret_tmpl, which the
 * caller owns. Errors: BT_E_NOT_FOUND (the model has no template), BT_E_UNSUPPORTED (not of a known
 * form, or its markers are not tokens), BT_E_NOMEM. */
int bt_chat_create(const struct bt_tokenizer *tok,
                   struct bt_str text,
                   struct bt_chat_template **ret_tmpl,
                   struct bt_err *err) BT_MUST_USE;
void bt_chat_destroy(struct bt_chat_template *tmpl); /* NULL is fine */

/* Appends the ids of the conversation, and of the opening of the assistant's answer if
 * `open_answer`; the BOS rule (bt_tokenizer_begin) is the caller's, as for plain text. On failure
 * *ids is as before. Errors: BT_E_INVALID (no messages, unknown role, content not UTF-8: the
 * message is named), BT_E_TOO_LARGE (ids->max, BT_CHAT_MAX_MESSAGES), BT_E_NOMEM. Does not block.
 */
int bt_chat_render(const struct bt_chat_template *tmpl,
                   const struct bt_chat_message *messages,
                   size_t n_messages,
                   bool open_answer,
                   struct bt_ids *ids,
                   struct bt_err *err) BT_MUST_USE;

/* System text that the template uses when the first message is not a system message; empty = none.
 * Borrowed. */
struct bt_str bt_chat_default_system(const struct bt_chat_template *tmpl);

#endif
