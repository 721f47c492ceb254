/* Byte-level BPE tokenizer, from the vocabulary of a GGUF file or from a tokenizer.json.
 *
 * Gives the ids of the reference library (`tokenizers`) for the pre-tokenizer rules gpt2,
 * llama-bpe, qwen2 and smollm; whatever a file asks for beyond that is refused by name, for a
 * tokenizer that is nearly right makes a model quietly worse.
 *
 * The object is immutable after create and may be used from any thread. Encoding takes time linear
 * in the text (times a logarithm within one unbroken piece), little stack, and no recursion.
 */
#ifndef BT_TEXT_TOKENIZER_H
#define BT_TEXT_TOKENIZER_H

#include "common/base/buf.h"
#include "common/file/model.h"

struct bt_tokenizer;

/* Reads everything it needs from `src`, which need not outlive the call. The caller owns *ret_tok.
 * Errors name what is wrong: BT_E_FORMAT, BT_E_UNSUPPORTED (tokenizer model, pre-tokenizer,
 * normalizer, option), BT_E_TOO_LARGE, BT_E_NOMEM. Start-up only: takes some ten milliseconds. */
int bt_tokenizer_create(const struct bt_tok_source *src,
                        struct bt_tokenizer **ret_tok,
                        struct bt_err *err) BT_MUST_USE;
void bt_tokenizer_destroy(struct bt_tokenizer *tok); /* NULL is fine */

/* Control tokens spelled out in the text become their ids. Without it they are ordinary text, and
 * no text whatever yields a control id. Added tokens that are not control tokens are always found.
 * Only for text of our own making (templates), or where an interface documents it. */
#define BT_TOK_SPECIAL 1u

/* Appends the ids of `text` to *ids; on failure *ids is as before. No begin-of-sequence token is
 * added: see bt_tokenizer_begin. Errors: BT_E_INVALID (not UTF-8: names the offset), BT_E_TOO_LARGE
 * (the list's limit ids->max, or 2 GiB of text), BT_E_NOMEM. Does not block. */
int bt_tokenizer_encode(const struct bt_tokenizer *tok,
                        struct bt_str text,
                        unsigned flags,
                        struct bt_ids *ids,
                        struct bt_err *err) BT_MUST_USE;

/* The same for a text that is partly ours: control tokens are found where all their bytes lie in
 * runs that are ours, and nowhere else. */
int bt_tokenizer_encode_runs(const struct bt_tokenizer *tok,
                             struct bt_str text,
                             const struct bt_run *runs,
                             size_t n_runs,
                             struct bt_ids *ids,
                             struct bt_err *err) BT_MUST_USE;

/* The begin-of-sequence rule, for a whole prompt that came from text or a template: puts the BOS
 * token in front if this tokenizer adds one and the prompt does not start with it already. Removes
 * nothing. Not for prompts that came as ids. BT_OK, BT_E_NOMEM, BT_E_TOO_LARGE. */
int bt_tokenizer_begin(const struct bt_tokenizer *tok, struct bt_ids *ids) BT_MUST_USE;

size_t bt_tokenizer_n_vocab(const struct bt_tokenizer *tok); /* ids are 0 .. n - 1 */
int32_t bt_tokenizer_bos_id(const struct bt_tokenizer *tok); /* -1 = none */
bool bt_tokenizer_adds_bos(const struct bt_tokenizer *tok);

/* Bytes that a token stands for; for control and other added tokens their literal text. Empty for
 * an id that does not exist. Borrowed from the tokenizer. */
struct bt_str bt_tokenizer_token_bytes(const struct bt_tokenizer *tok, int32_t id);

bool bt_tokenizer_is_control(const struct bt_tokenizer *tok, int32_t id);

/* Id of the control or other added token with exactly this text, -1 if there is none. */
int32_t bt_tokenizer_find_special(const struct bt_tokenizer *tok, struct bt_str text);

#endif
