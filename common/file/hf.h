/* The two halves of a Hugging Face directory: JSON settings (hf_config.c) and weights (hf.c).
 * Used inside this folder and by its fuzz targets and tests. */
#ifndef BT_FILE_HF_H
#define BT_FILE_HF_H

#include "common/file/file_int.h"
#include "common/file/json.h"

/* config.json -> mf->cfg (all but n_vocab and what bt_model_check finds out). */
int bt_hf_read_config(struct bt_model_file *mf,
                      const json_t *config,
                      struct bt_err *err) BT_MUST_USE;

/* The ids that end an answer, the begin token and the chat template, after bt_model_check.
 * `gen` and `tok` may be NULL; mf->tok.json is set. */
struct bt_hf_settings {
    const json_t *config, *gen, *tok;
    struct bt_str jinja; /* chat_template.jinja, which goes before tokenizer_config.json */
};
int bt_hf_read_tokenizer(struct bt_model_file *mf,
                         const struct bt_hf_settings *s,
                         struct bt_err *err) BT_MUST_USE;

#endif
