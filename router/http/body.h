/* Bodies of HTTP requests as the messages that the router takes. Any thread. */
#ifndef RT_HTTP_BODY_H
#define RT_HTTP_BODY_H

#include "common/base/rc.h"
#include "proto/node.pb-c.h"

#include <jansson.h>

#define RT_HTTP_MAX_CHOICES 128 /* prompts times n */
#define RT_HTTP_MAX_VALUES  262144

struct rt_http_block;

/* Owned by whoever read it. */
struct rt_http_spec {
    json_t *root; /* the messages borrow their strings from it */
    struct rt_http_block *blocks;
    bool chat, stream, include_usage, logprobs;
    size_t n_prompts, n; /* choices per prompt */
    Baton__V1__GenerateRequest *msgs;
    char param[64];    /* of the error, empty = none */
    size_t max_values; /* given: more in one body are refused; 0 = RT_HTTP_MAX_VALUES */
};

/* Reads a body of /v1/chat/completions or /v1/completions. Errors: BT_E_INVALID, BT_E_FORMAT,
 * BT_E_TOO_LARGE, BT_E_NOMEM; fini is needed in any case. */
int rt_http_spec_read(struct bt_str body,
                      bool chat,
                      const char *request_id,
                      struct rt_http_spec *ret,
                      struct bt_err *err) BT_MUST_USE;
/* Body of /tokenize: spec->msgs[0] has text or chat, and the model. */
int rt_http_spec_read_tokenize(struct bt_str body,
                               struct rt_http_spec *ret,
                               struct bt_err *err) BT_MUST_USE;
/* Body of /detokenize: spec->msgs[0] has tokens, and the model. */
int rt_http_spec_read_detokenize(struct bt_str body,
                                 struct rt_http_spec *ret,
                                 struct bt_err *err) BT_MUST_USE;
void rt_http_spec_fini(struct rt_http_spec *spec);

/* The field that a message of the router about a request begins with, as "top_p is 2"; NULL = none.
 */
const char *rt_http_field_of(const char *msg, bool chat);

#endif
