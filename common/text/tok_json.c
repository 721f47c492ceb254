/* Tokenizer from a tokenizer.json. */
#include "common/text/tokenizer_int.h"

int tok_load_json(struct bt_tokenizer *tok, const struct bt_tok_source *src, struct bt_err *err)
{
    return BT_FAIL(err, BT_E_UNSUPPORTED, "tokenizer.json is not read yet");
}
