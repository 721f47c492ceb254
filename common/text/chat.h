/* Chat messages to the token ids of a prompt, by the model's own template (common/jinja).
 *
 * The template's markers become control ids. What people wrote never does, whatever the template
 * does with it: control tokens are looked for in the bytes that the template itself wrote. Text
 * between two markers is encoded in one go, so that harmless messages give exactly the ids of the
 * reference library for the rendered string.
 *
 * A template is immutable after create; any thread.
 */
#ifndef BT_TEXT_CHAT_H
#define BT_TEXT_CHAT_H

#include "common/text/tokenizer.h"

#define BT_CHAT_MAX_MESSAGES 4096

struct bt_chat_message {
    struct bt_str role;         /* "system", "developer", "user", "assistant" or "tool" */
    size_t n_parts;             /* parts of the content, joined without anything between */
    const struct bt_str *parts; /* UTF-8 */
    struct bt_str name;         /* of who speaks, for templates that ask for it; empty = none */
};

struct bt_chat_template;

/* `text` is the template as the model file has it, eos_id the token that it may ask for by
 * `eos_token` (-1 = none). The tokenizer must outlive *ret_tmpl, which the caller owns. Renders a
 * short conversation, so that what cannot work fails now. Errors: BT_E_NOT_FOUND (the model has no
 * template), those of bt_jinja_compile (a construct that we do not know, with its line),
 * BT_E_NOMEM.
 */
int bt_chat_create(const struct bt_tokenizer *tok,
                   struct bt_str text,
                   int32_t eos_id,
                   struct bt_chat_template **ret_tmpl,
                   struct bt_err *err) BT_MUST_USE;
void bt_chat_destroy(struct bt_chat_template *tmpl); /* NULL is fine */

/* Appends the ids of the conversation, and of the opening of the assistant's answer if
 * `open_answer`; the BOS rule (bt_tokenizer_begin) is the caller's, as for plain text. On failure
 * *ids is as before. Errors: BT_E_INVALID (no messages, unknown role, content or name not UTF-8:
 * the message is named; or the template refuses the conversation, with its reason), BT_E_TOO_LARGE
 * (ids->max, BT_CHAT_MAX_MESSAGES, the bounds of a rendering), BT_E_NOMEM. Does not block; time and
 * memory are linear in the content for all templates that look at a message a bounded number of
 * times, and bounded for all. */
int bt_chat_render(const struct bt_chat_template *tmpl,
                   const struct bt_chat_message *messages,
                   size_t n_messages,
                   bool open_answer,
                   struct bt_ids *ids,
                   struct bt_err *err) BT_MUST_USE;

#endif
