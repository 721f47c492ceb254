/* The small vocabulary of tests/data/tok, for every test of common/text. */
#ifndef BT_TESTS_TEXT_TOK_DATA_H
#define BT_TESTS_TEXT_TOK_DATA_H

#include "common/text/tokenizer.h"

/* Reads a file of the test data folder; ends the process if it is not there. `out` is the caller's,
 * terminated with a NUL that does not count. */
void tok_data_read(const char *name, struct bt_buf *out);

/* Source as from a GGUF file with the pre-tokenizer `pre`; freed by tok_data_free. */
struct bt_tok_source *tok_data_source(const char *pre);
void tok_data_free(struct bt_tok_source *src);

/* Tokenizer from those arrays; ends the process on failure. */
struct bt_tokenizer *tok_data_tokenizer(const char *pre);

/* Next line without its newline; false at the end. */
bool tok_data_line(struct bt_str *rest, struct bt_str *ret);
/* Next word of a line; empty at the end. */
struct bt_str tok_data_word(struct bt_str *line);
/* Appends the bytes that the hexadecimal digits spell; "-" spells none. */
void tok_data_unhex(struct bt_str hex, struct bt_buf *out);

#endif
