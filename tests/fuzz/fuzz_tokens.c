/* Token files: read or refused with a reason that shows none of the text; what was read is found
 * again, and the first token is one of them. */
#include "common/sec/tokens.h"

#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    struct bt_str text = {(const char *)data, n}, first = {NULL, 0}, token;
    struct bt_tokens *t;
    struct bt_err err = {0};
    struct bt_who who;

    token = bt_token_of_header(text);
    if (token.n > n || bt_tokens_create(&t, &err) < 0) {
        abort();
    }
    if (bt_tokens_add(t, "f", text, BT_ACCESS_CLIENT, &err) < 0) {
        if (!err.msg[0]) {
            abort();
        }
    } else if (bt_tokens_first("f", text, &first, &err) < 0 || !bt_tokens_find(t, first, &who) ||
               who.access != BT_ACCESS_CLIENT || bt_tokens_n(t) == 0) {
        abort();
    }
    if (bt_tokens_find(t, text, &who) && n > BT_TOKEN_MAX) {
        abort();
    }
    bt_tokens_destroy(t);
    return 0;
}
