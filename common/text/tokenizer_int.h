/* Inside of the tokenizer, shared by its two loaders. */
#ifndef BT_TEXT_TOKENIZER_INT_H
#define BT_TEXT_TOKENIZER_INT_H

#include "common/text/added_int.h"
#include "common/text/bpe_int.h"
#include "common/text/split_int.h"
#include "common/text/tokenizer.h"

struct bt_tokenizer {
    struct bpe bpe;
    struct uni_table uni;
    struct splitter split;
    struct added added; /* matched in the text as it came */
    struct added late;  /* matched after normalisation */
    bool nfc;
    int32_t bos_id;
    bool add_bos;
};

/* Fill a zeroed tokenizer; on failure the caller destroys it. */
int tok_load_gguf(struct bt_tokenizer *tok,
                  const struct bt_tok_source *src,
                  struct bt_err *err) BT_MUST_USE;
int tok_load_json(struct bt_tokenizer *tok,
                  const struct bt_tok_source *src,
                  struct bt_err *err) BT_MUST_USE;

#endif
