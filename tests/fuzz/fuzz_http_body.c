/* Bodies of the HTTP endpoints: one text is read as each of the four. What comes out whole must be
 * a message that can be packed, with every choice bounded. */
#include "router/http/body.h"

#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static void check(int rc, const struct rt_http_spec *spec, const struct bt_err *err)
{
    if (rc > 0 || (rc < 0 && rc != BT_E_NOMEM && !err->msg[0])) {
        abort();
    }
    for (size_t i = 0; rc == BT_OK && i < spec->n_prompts; i++) {
        size_t size = baton__v1__generate_request__get_packed_size(&spec->msgs[i]);
        uint8_t *out = malloc(size + 1);

        if (!out || baton__v1__generate_request__pack(&spec->msgs[i], out) != size) {
            abort();
        }
        free(out);
    }
    if (rc == BT_OK && spec->n_prompts * spec->n > RT_HTTP_MAX_CHOICES) {
        abort();
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    struct bt_str body = {(const char *)data, n};

    for (int kind = 0; kind < 4; kind++) {
        struct rt_http_spec spec = {0};
        struct bt_err err = {0};
        int rc = kind < 2    ? rt_http_spec_read(body, kind == 0, "id", &spec, &err)
                 : kind == 2 ? rt_http_spec_read_tokenize(body, &spec, &err)
                             : rt_http_spec_read_detokenize(body, &spec, &err);

        check(rc, &spec, &err);
        rt_http_spec_fini(&spec);
    }
    return 0;
}
