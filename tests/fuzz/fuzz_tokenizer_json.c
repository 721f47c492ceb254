/* tokenizer.json: whatever the bytes, one clear answer; what loads must encode and decode.
 * The input is a tokenizer.json, optionally a NUL and a text to encode. */
#include "common/text/detok.h"

#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void use(const struct bt_tokenizer *tok, struct bt_str text)
{
    struct bt_ids ids = {.max = 100000};
    struct bt_buf back = {0};

    for (unsigned flags = 0; flags <= BT_TOK_SPECIAL; flags++) {
        ids.n = 0;
        if (bt_tokenizer_encode(tok, text, flags, &ids, NULL) < 0 ||
            bt_tokenizer_begin(tok, &ids) < 0) {
            continue;
        }
        for (size_t i = 0; i < ids.n; i++) {
            bool bos = i == 0 && ids.p[0] == bt_tokenizer_bos_id(tok);

            if (ids.p[i] < 0 || (size_t)ids.p[i] >= bt_tokenizer_n_vocab(tok)) {
                abort();
            }
            if (!flags && !bos && bt_tokenizer_is_control(tok, ids.p[i])) {
                abort(); /* text has become a control token */
            }
        }
        back.n = 0;
        if (bt_detok_all(tok, ids.p, ids.n, BT_DETOK_SKIP_CONTROL, &back) < 0) {
            abort();
        }
    }
    bt_ids_fini(&ids);
    bt_buf_fini(&back);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct bt_tok_source src = {.json = {(const char *)data, size}, .bos_id = -1};
    struct bt_str text =
        BT_STR("Hello, w\xc3\xb6rld 123 <|im_end|>\n\n don't e\xcc\x81 \xf0\x9f\x99\x82");
    const uint8_t *nul = size ? memchr(data, 0, size) : NULL;
    struct bt_tokenizer *tok = NULL;
    struct bt_err err = {0};

    if (nul) {
        src.json.n = (size_t)(nul - data);
        text = (struct bt_str){(const char *)nul + 1, size - src.json.n - 1};
    }
    if (src.json.n == 0) {
        return 0;
    }
    if (bt_tokenizer_create(&src, &tok, &err) == BT_OK) {
        use(tok, text);
    } else if (!err.msg[0]) {
        abort(); /* refused without a word */
    }
    bt_tokenizer_destroy(tok);
    return 0;
}
