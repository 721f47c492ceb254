/* The JSON settings of a directory. The text stands for config.json, generation_config.json,
 * tokenizer_config.json and tokenizer.json at once. */
#include "common/file/hf.h"

#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    static const struct bt_json_caps caps = {1u << 20, 100000, 32};
    struct bt_model_file *mf = bt_calloc(1, sizeof(*mf));
    struct bt_str text = {(const char *)data, n};
    struct bt_err err = {0};
    json_t *j = NULL;
    int rc = bt_json_parse(text, "fuzz", &caps, &j, &err);

    if (!mf) {
        abort();
    }
    if (rc == BT_OK) {
        struct bt_hf_settings s = {.config = j, .gen = j, .tok = j, .jinja = {"", 0}};

        mf->tok.json = text;
        rc = bt_hf_read_config(mf, j, &err);
        if (rc == BT_OK) {
            rc = bt_model_rope_build(mf, NULL, &err);
        }
        if (rc == BT_OK) {
            rc = bt_hf_read_tokenizer(mf, &s, &err);
        }
    }
    if (rc > 0 || (rc < 0 && !err.msg[0] && rc != BT_E_NOMEM)) {
        abort();
    }
    json_decref(j);
    bt_model_close(mf);
    return 0;
}
