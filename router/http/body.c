/* Bodies of requests: JSON to the message that the router takes. Here only form is checked: types,
 * and that no field is passed over which would change the answer; ranges are checked where gRPC's
 * are. Every field that is known stands in one table; what is not in it is refused by name.
 *
 * A null is a field that is not there, but for max_tokens of a completion, where absence means 16
 * and null the end of the context. Any thread. */
#include "router/http/body.h"

#include "common/base/buf.h"
#include "common/conf/value.h"
#include "common/file/json.h"
#include "proto/wire/sampling.h"

#include <math.h>
#include <stddef.h>
#include <stdlib.h>

#define DEFAULT_COMPLETION_TOKENS 16
#define MAX_CHAT_MESSAGES         4096
#define MAX_DEPTH                 32

/* Memory of one spec, freed with it. */
struct rt_http_block {
    struct rt_http_block *next;
    max_align_t data[];
};

struct reader {
    struct rt_http_spec *spec;
    struct bt_err *err;
    bool chat;
    Baton__V1__Sampling sampling;
    Baton__V1__Stopping stopping;
    Baton__V1__GenerateRequest msg;
    const json_t *prompt, *messages, *stream_options, *top_logprobs;
    int64_t n, best_of;
    bool has_max;
};

static void *take_memory(struct rt_http_spec *spec, size_t n, size_t size)
{
    struct rt_http_block *b;
    size_t bytes;

    if (!bt_mul_size(n ? n : 1, size, &bytes) || !bt_add_size(bytes, sizeof(*b), &bytes)) {
        return NULL;
    }
    b = calloc(1, bytes);
    if (!b) {
        return NULL;
    }
    b->next = spec->blocks;
    spec->blocks = b;
    return b->data;
}

void rt_http_spec_fini(struct rt_http_spec *spec)
{
    while (spec->blocks) {
        struct rt_http_block *b = spec->blocks;

        spec->blocks = b->next;
        free(b);
    }
    json_decref(spec->root);
    spec->root = NULL;
    spec->msgs = NULL;
}

static int bad(struct reader *r, const char *param, const char *why)
{
    snprintf(r->spec->param, sizeof(r->spec->param), "%s", param);
    return BT_FAIL(r->err, BT_E_INVALID, "%.64s: %s", param, why);
}

static int no_memory(struct reader *r)
{
    return BT_FAIL(r->err, BT_E_NOMEM, "no memory for the request");
}

/* --- values ---------------------------------------------------------------------------------- */

static int read_float(struct reader *r, const char *key, const json_t *v, float *ret)
{
    double d;

    if (!json_is_number(v)) {
        return bad(r, key, "must be a number");
    }
    d = json_number_value(v);
    if (!isfinite((float)d)) {
        return bad(r, key, "is out of range");
    }
    *ret = (float)d;
    return BT_OK;
}

static int
read_int(struct reader *r, const char *key, const json_t *v, const int64_t range[2], int64_t *ret)
{
    char why[80];

    if (!json_is_integer(v)) {
        return bad(r, key, "must be an integer");
    }
    if (json_integer_value(v) < range[0] || json_integer_value(v) > range[1]) {
        snprintf(why, sizeof(why), "is %lld, must be %lld to %lld",
                 (long long)json_integer_value(v), (long long)range[0], (long long)range[1]);
        return bad(r, key, why);
    }
    *ret = json_integer_value(v);
    return BT_OK;
}

static int read_bool(struct reader *r, const char *key, const json_t *v, bool *ret)
{
    if (!json_is_boolean(v)) {
        return bad(r, key, "must be true or false");
    }
    *ret = json_is_true(v);
    return BT_OK;
}

static int read_string(struct reader *r, const char *key, const json_t *v, char **ret)
{
    if (!json_is_string(v)) {
        return bad(r, key, "must be a string");
    }
    *ret = (char *)(uintptr_t)json_string_value(v);
    return BT_OK;
}

static int read_ids(struct reader *r, const char *key, const json_t *v, int32_t **ret, size_t *n)
{
    static const int64_t range[] = {INT32_MIN, INT32_MAX};
    size_t count = json_array_size(v);
    int32_t *ids = take_memory(r->spec, count, sizeof(*ids));
    int64_t id = 0;
    int rc;

    if (!json_is_array(v)) {
        return bad(r, key, "must be an array of token ids");
    }
    if (!ids) {
        return no_memory(r);
    }
    for (size_t i = 0; i < count; i++) {
        rc = read_int(r, key, json_array_get(v, i), range, &id);
        if (rc < 0) {
            return rc;
        }
        ids[i] = (int32_t)id;
    }
    *ret = ids;
    *n = count;
    return BT_OK;
}

/* --- fields ---------------------------------------------------------------------------------- */

typedef int (*field_fn)(struct reader *r, const char *key, const json_t *v);

static int f_model(struct reader *r, const char *key, const json_t *v)
{
    return read_string(r, key, v, &r->msg.model);
}

static int f_prompt(struct reader *r, const char *key, const json_t *v)
{
    r->prompt = v;
    return BT_OK;
}

static int f_messages(struct reader *r, const char *key, const json_t *v)
{
    r->messages = v;
    return BT_OK;
}

static int f_stream(struct reader *r, const char *key, const json_t *v)
{
    return read_bool(r, key, v, &r->spec->stream);
}

static int f_stream_options(struct reader *r, const char *key, const json_t *v)
{
    const char *k;
    json_t *o;
    int rc = json_is_object(v) ? BT_OK : bad(r, key, "must be an object");

    r->stream_options = v;
    if (rc < 0) {
        return rc;
    }
    json_object_foreach((json_t *)(uintptr_t)v, k, o)
    {
        if (strcmp(k, "include_usage") == 0) {
            if (!json_is_null(o) && (rc = read_bool(r, "stream_options.include_usage", o,
                                                    &r->spec->include_usage)) < 0) {
                return rc;
            }
        } else if (strcmp(k, "include_obfuscation") != 0) {
            return bad(r, k, "is not an option of streams here");
        }
    }
    return BT_OK;
}

static int f_temperature(struct reader *r, const char *key, const json_t *v)
{
    return read_float(r, key, v, &r->sampling.temperature);
}

static int f_top_p(struct reader *r, const char *key, const json_t *v)
{
    r->sampling.top_p__case = BATON__V1__SAMPLING__TOP_P__TOP_P;
    return read_float(r, key, v, &r->sampling.top_p);
}

static int f_min_p(struct reader *r, const char *key, const json_t *v)
{
    return read_float(r, key, v, &r->sampling.min_p);
}

static int f_presence(struct reader *r, const char *key, const json_t *v)
{
    return read_float(r, key, v, &r->sampling.presence_penalty);
}

static int f_frequency(struct reader *r, const char *key, const json_t *v)
{
    return read_float(r, key, v, &r->sampling.frequency_penalty);
}

static int f_repetition(struct reader *r, const char *key, const json_t *v)
{
    r->sampling.repetition_penalty__case =
        BATON__V1__SAMPLING__REPETITION_PENALTY__REPETITION_PENALTY;
    return read_float(r, key, v, &r->sampling.repetition_penalty);
}

static int f_top_k(struct reader *r, const char *key, const json_t *v)
{
    static const int64_t range[] = {-1, INT32_MAX};
    int64_t i = 0;
    int rc = read_int(r, key, v, range, &i);

    r->sampling.top_k = (int32_t)i;
    return rc;
}

static int f_seed(struct reader *r, const char *key, const json_t *v)
{
    static const int64_t range[] = {INT64_MIN, INT64_MAX};
    int64_t i = 0;
    int rc = read_int(r, key, v, range, &i);

    r->sampling.seed__case = BATON__V1__SAMPLING__SEED__SEED;
    r->sampling.seed = (uint64_t)i;
    return rc;
}

static int f_max_tokens(struct reader *r, const char *key, const json_t *v)
{
    static const int64_t range[] = {1, UINT32_MAX - 1};
    int64_t i = 0;
    int rc;

    if (r->has_max) {
        return bad(r, key, "max_tokens and max_completion_tokens are both there; give one of them");
    }
    r->has_max = true;
    rc = read_int(r, key, v, range, &i);
    r->stopping.max_tokens__case = BATON__V1__STOPPING__MAX_TOKENS__MAX_TOKENS;
    r->stopping.max_tokens = (uint32_t)i;
    return rc;
}

static int f_min_tokens(struct reader *r, const char *key, const json_t *v)
{
    static const int64_t range[] = {0, UINT32_MAX - 1};
    int64_t i = 0;
    int rc = read_int(r, key, v, range, &i);

    r->stopping.min_tokens = (uint32_t)i;
    return rc;
}

static int f_ignore_eos(struct reader *r, const char *key, const json_t *v)
{
    bool b = false;
    int rc = read_bool(r, key, v, &b);

    r->stopping.ignore_eos = b;
    return rc;
}

static int f_skip_special(struct reader *r, const char *key, const json_t *v)
{
    bool b = false;
    int rc = read_bool(r, key, v, &b);

    r->msg.skip_special_tokens = b;
    return rc;
}

static int f_stop(struct reader *r, const char *key, const json_t *v)
{
    size_t n = json_is_array(v) ? json_array_size(v) : 1;
    char **strings = take_memory(r->spec, n, sizeof(*strings));
    int rc;

    if (!strings) {
        return no_memory(r);
    }
    for (size_t i = 0; i < n; i++) {
        const json_t *s = json_is_array(v) ? json_array_get(v, i) : v;

        rc = json_is_string(s) ? read_string(r, key, s, &strings[i])
                               : bad(r, key, "must be a string or an array of strings");
        if (rc < 0) {
            return rc;
        }
        if (strings[i][0] == '\0') {
            return bad(r, key, "an empty string would stop every answer");
        }
    }
    r->stopping.strings = strings;
    r->stopping.n_strings = n;
    return BT_OK;
}

static int f_stop_ids(struct reader *r, const char *key, const json_t *v)
{
    return read_ids(r, key, v, &r->stopping.token_ids, &r->stopping.n_token_ids);
}

static int f_logit_bias(struct reader *r, const char *key, const json_t *v)
{
    size_t n = json_object_size(v), i = 0;
    Baton__V1__LogitBias *rows = take_memory(r->spec, n, sizeof(*rows));
    Baton__V1__LogitBias **ptrs = take_memory(r->spec, n, sizeof(*ptrs));
    const char *k;
    json_t *o;

    if (!json_is_object(v)) {
        return bad(r, key, "must be an object of token id and bias");
    }
    if (!rows || !ptrs) {
        return no_memory(r);
    }
    json_object_foreach((json_t *)(uintptr_t)v, k, o)
    {
        int64_t id;
        int rc;

        baton__v1__logit_bias__init(&rows[i]);
        if (bt_read_int(bt_str_of(k), INT32_MIN, INT32_MAX, &id) < 0) {
            return bad(r, key, "a key is no token id");
        }
        rows[i].token = (int32_t)id;
        rc = read_float(r, key, o, &rows[i].bias);
        if (rc < 0) {
            return rc;
        }
        ptrs[i] = &rows[i];
        i++;
    }
    r->sampling.n_logit_bias = n;
    r->sampling.logit_bias = ptrs;
    return BT_OK;
}

static int f_logprobs(struct reader *r, const char *key, const json_t *v)
{
    static const int64_t range[] = {0, WIRE_MAX_LOGPROBS};
    int64_t i = 0;
    int rc;

    if (r->chat) {
        return read_bool(r, key, v, &r->spec->logprobs);
    }
    rc = read_int(r, key, v, range, &i);
    r->spec->logprobs = rc == BT_OK;
    r->sampling.logprobs = (int32_t)i;
    return rc;
}

static int f_top_logprobs(struct reader *r, const char *key, const json_t *v)
{
    static const int64_t range[] = {0, WIRE_MAX_LOGPROBS};
    int64_t i = 0;
    int rc = read_int(r, key, v, range, &i);

    r->top_logprobs = v;
    r->sampling.logprobs = (int32_t)i;
    return rc;
}

static int f_n(struct reader *r, const char *key, const json_t *v)
{
    static const int64_t range[] = {1, RT_HTTP_MAX_CHOICES};

    return read_int(r, key, v, range, strcmp(key, "n") == 0 ? &r->n : &r->best_of);
}

static int f_request_id(struct reader *r, const char *key, const json_t *v)
{
    return read_string(r, key, v, &r->msg.request_id);
}

static int f_tenant(struct reader *r, const char *key, const json_t *v)
{
    return read_string(r, key, v, &r->msg.tenant);
}

static int f_priority(struct reader *r, const char *key, const json_t *v)
{
    static const int64_t range[] = {INT32_MIN, INT32_MAX};
    int64_t i = 0;
    int rc = read_int(r, key, v, range, &i);

    r->msg.priority = (int32_t)i;
    return rc;
}

static int f_salt(struct reader *r, const char *key, const json_t *v)
{
    return read_string(r, key, v, &r->msg.cache_salt);
}

/* Says nothing about the answer. */
static int f_ignored(struct reader *r, const char *key, const json_t *v)
{
    return BT_OK;
}

/* Fine as long as it asks for nothing: false, "", [], {} or the value that means no change. */
static int f_off(struct reader *r, const char *key, const json_t *v)
{
    static const char *const neutral[] = {"", "none", "auto", "text"};
    const json_t *t =
        json_is_object(v) && json_object_size(v) == 1 ? json_object_get(v, "type") : v;

    if (json_is_array(v) && json_array_size(v) == 1 && strcmp(key, "modalities") == 0) {
        t = json_array_get(v, 0);
    }
    if (json_is_false(v) || (json_is_array(v) && json_array_size(v) == 0) ||
        (json_is_object(v) && json_object_size(v) == 0)) {
        return BT_OK;
    }
    for (size_t i = 0; json_is_string(t) && i < BT_ARRAY_LEN(neutral); i++) {
        if (strcmp(json_string_value(t), neutral[i]) == 0) {
            return BT_OK;
        }
    }
    return bad(r, key, "is not supported here");
}

/* True would change the answer. */
static int f_false(struct reader *r, const char *key, const json_t *v)
{
    bool b = false;
    int rc = read_bool(r, key, v, &b);

    return rc == BT_OK && b ? bad(r, key, "is not supported here") : rc;
}

static int f_suffix(struct reader *r, const char *key, const json_t *v)
{
    char *s = NULL;
    int rc = read_string(r, key, v, &s);

    return rc == BT_OK && s[0] ? bad(r, key, "is not supported here") : rc;
}

enum { CHAT = 1, TEXT = 2, BOTH = 3 };

static const struct field {
    const char *key;
    int where;
    field_fn read;
} fields[] = {
    {"model", BOTH, f_model},
    {"messages", CHAT, f_messages},
    {"prompt", TEXT, f_prompt},
    {"stream", BOTH, f_stream},
    {"stream_options", BOTH, f_stream_options},
    {"temperature", BOTH, f_temperature},
    {"top_p", BOTH, f_top_p},
    {"top_k", BOTH, f_top_k},
    {"min_p", BOTH, f_min_p},
    {"presence_penalty", BOTH, f_presence},
    {"frequency_penalty", BOTH, f_frequency},
    {"repetition_penalty", BOTH, f_repetition},
    {"seed", BOTH, f_seed},
    {"max_tokens", BOTH, f_max_tokens},
    {"max_completion_tokens", CHAT, f_max_tokens},
    {"min_tokens", BOTH, f_min_tokens},
    {"ignore_eos", BOTH, f_ignore_eos},
    {"skip_special_tokens", BOTH, f_skip_special},
    {"stop", BOTH, f_stop},
    {"stop_token_ids", BOTH, f_stop_ids},
    {"logit_bias", BOTH, f_logit_bias},
    {"logprobs", BOTH, f_logprobs},
    {"top_logprobs", CHAT, f_top_logprobs},
    {"n", BOTH, f_n},
    {"best_of", TEXT, f_n},
    {"request_id", BOTH, f_request_id},
    {"cache_salt", BOTH, f_salt},
    {"tenant", BOTH, f_tenant},
    {"priority", BOTH, f_priority},
    {"user", BOTH, f_ignored},
    {"metadata", BOTH, f_ignored},
    {"service_tier", BOTH, f_ignored},
    {"safety_identifier", BOTH, f_ignored},
    {"prompt_cache_key", BOTH, f_ignored},
    {"prompt_cache_retention", BOTH, f_ignored},
    {"prediction", CHAT, f_ignored},          /* a hint for speed */
    {"parallel_tool_calls", CHAT, f_ignored}, /* there are no tools */
    {"store", BOTH, f_false},
    {"tools", CHAT, f_off},
    {"tool_choice", CHAT, f_off},
    {"functions", CHAT, f_off},
    {"function_call", CHAT, f_off},
    {"response_format", CHAT, f_off},
    {"modalities", CHAT, f_off},
    {"echo", TEXT, f_false},
    {"suffix", TEXT, f_suffix},
    {"include_stop_str_in_output", BOTH, f_false},
};

static const struct field *find_field(const char *key, int where)
{
    for (size_t i = 0; i < BT_ARRAY_LEN(fields); i++) {
        if ((fields[i].where & where) && strcmp(fields[i].key, key) == 0) {
            return &fields[i];
        }
    }
    return NULL;
}

const char *rt_http_field_of(const char *msg, bool chat)
{
    char word[32];
    size_t n = strcspn(msg, " :");
    const struct field *f;

    if (n >= sizeof(word)) {
        return NULL;
    }
    memcpy(word, msg, n);
    word[n] = '\0';
    f = find_field(word, chat ? CHAT : TEXT);
    return f ? f->key : NULL;
}

static int read_fields(struct reader *r)
{
    const char *key;
    json_t *v;
    int rc = BT_OK;

    json_object_foreach(r->spec->root, key, v)
    {
        const struct field *f = find_field(key, r->chat ? CHAT : TEXT);

        if (!f) {
            return bad(r, key, "is not a field that is supported here");
        }
        if (json_is_null(v)) {
            r->has_max = r->has_max || (!r->chat && f->read == f_max_tokens);
            continue;
        }
        rc = f->read(r, key, v);
        if (rc < 0) {
            if (!r->spec->param[0]) {
                snprintf(r->spec->param, sizeof(r->spec->param), "%s", key);
            }
            return rc;
        }
    }
    return BT_OK;
}

/* --- prompts --------------------------------------------------------------------------------- */

/* A string, or an array of text parts, which are put together. */
static int read_content(struct reader *r, const json_t *v, char **ret)
{
    size_t total = 1, at = 0;
    char *text;

    if (json_is_string(v) || !json_is_array(v)) {
        return read_string(r, "messages.content", v, ret);
    }
    for (size_t i = 0; i < json_array_size(v); i++) {
        const json_t *part = json_array_get(v, i), *type = json_object_get(part, "type");

        if (!json_is_string(type) || strcmp(json_string_value(type), "text") != 0 ||
            !json_is_string(json_object_get(part, "text"))) {
            return bad(r, "messages.content", "only parts of the type text are supported");
        }
        total += json_string_length(json_object_get(part, "text"));
    }
    text = take_memory(r->spec, total, 1);
    if (!text) {
        return no_memory(r);
    }
    for (size_t i = 0; i < json_array_size(v); i++) {
        const json_t *t = json_object_get(json_array_get(v, i), "text");

        memcpy(text + at, json_string_value(t), json_string_length(t));
        at += json_string_length(t);
    }
    *ret = text;
    return BT_OK;
}

static int read_message(struct reader *r, const json_t *m, Baton__V1__ChatMessage *to)
{
    const json_t *content = json_object_get(m, "content"), *name = json_object_get(m, "name");
    const char *key;
    json_t *v;
    int rc;

    baton__v1__chat_message__init(to);
    if (!json_is_object(m)) {
        return bad(r, "messages", "must be objects");
    }
    json_object_foreach((json_t *)(uintptr_t)m, key, v)
    {
        bool empty = json_is_null(v) || (json_is_array(v) && json_array_size(v) == 0);

        if (strcmp(key, "role") != 0 && strcmp(key, "content") != 0 && strcmp(key, "name") != 0 &&
            !empty) {
            return bad(r, key, "is not supported in messages here");
        }
    }
    rc = read_string(r, "messages.role", json_object_get(m, "role"), &to->role);
    if (rc == BT_OK && name && !json_is_null(name)) {
        rc = read_string(r, "messages.name", name, &to->name);
    }
    if (rc < 0) {
        return rc;
    }
    if (strcmp(to->role, "developer") == 0) { /* the newer name */
        to->role = (char *)(uintptr_t) "system";
    }
    if (strcmp(to->role, "system") != 0 && strcmp(to->role, "user") != 0 &&
        strcmp(to->role, "assistant") != 0 && strcmp(to->role, "tool") != 0) {
        return bad(r, "messages.role", "must be system, developer, user, assistant or tool");
    }
    if (json_is_null(content) && strcmp(to->role, "assistant") == 0) {
        return BT_OK; /* empty */
    }
    return read_content(r, content, &to->content);
}

static int read_chat(struct reader *r, const json_t *messages, Baton__V1__Chat **ret)
{
    size_t n = json_array_size(messages);
    Baton__V1__Chat *chat;
    Baton__V1__ChatMessage *rows;
    int rc;

    if (!json_is_array(messages) || n == 0 || n > MAX_CHAT_MESSAGES) {
        return bad(r, "messages", "must be an array of 1 to 4096 messages");
    }
    chat = take_memory(r->spec, 1, sizeof(*chat));
    rows = take_memory(r->spec, n, sizeof(*rows));
    if (!chat || !rows) {
        return no_memory(r);
    }
    baton__v1__chat__init(chat);
    chat->messages = take_memory(r->spec, n, sizeof(*chat->messages));
    if (!chat->messages) {
        return no_memory(r);
    }
    for (size_t i = 0; i < n; i++) {
        rc = read_message(r, json_array_get(messages, i), &rows[i]);
        if (rc < 0) {
            return rc;
        }
        chat->messages[i] = &rows[i];
    }
    chat->n_messages = n;
    *ret = chat;
    return BT_OK;
}

static int
read_tokens(struct reader *r, const char *key, const json_t *v, Baton__V1__GenerateRequest *m)
{
    Baton__V1__TokenIds *ids = take_memory(r->spec, 1, sizeof(*ids));

    if (!ids) {
        return no_memory(r);
    }
    baton__v1__token_ids__init(ids);
    m->input_case = BATON__V1__GENERATE_REQUEST__INPUT_TOKENS;
    m->tokens = ids;
    return read_ids(r, key, v, &ids->ids, &ids->n_ids);
}

static int read_prompt(struct reader *r, const json_t *v, Baton__V1__GenerateRequest *m)
{
    if (json_is_string(v)) {
        m->input_case = BATON__V1__GENERATE_REQUEST__INPUT_TEXT;
        return read_string(r, "prompt", v, &m->text);
    }
    if (json_array_size(v) == 0) {
        return bad(r, "prompt",
                   "must be a string, token ids, or an array of these; none may be "
                   "empty");
    }
    return read_tokens(r, "prompt", v, m);
}

/* One message per prompt. */
static int read_prompts(struct reader *r)
{
    const json_t *p = r->prompt, *first = json_array_get(p, 0);
    bool many = json_is_string(first) || json_is_array(first);
    size_t n = many && !r->chat ? json_array_size(p) : 1;
    int rc = BT_OK;

    if (n * (size_t)r->n > RT_HTTP_MAX_CHOICES) {
        return bad(r, "prompt", "prompts times n give more than 128 answers");
    }
    r->spec->msgs = take_memory(r->spec, n, sizeof(*r->spec->msgs));
    if (!r->spec->msgs) {
        return no_memory(r);
    }
    r->spec->n_prompts = n;
    for (size_t i = 0; rc == BT_OK && i < n; i++) {
        Baton__V1__GenerateRequest *m = &r->spec->msgs[i];

        *m = r->msg;
        if (r->chat) {
            m->input_case = BATON__V1__GENERATE_REQUEST__INPUT_CHAT;
            rc = read_chat(r, r->messages, &m->chat);
        } else {
            rc = read_prompt(r, many ? json_array_get(p, i) : p, m);
        }
    }
    return rc;
}

/* --- whole bodies ---------------------------------------------------------------------------- */

static int parse(struct reader *r, struct bt_str body)
{
    size_t max = r->spec->max_values ? r->spec->max_values : RT_HTTP_MAX_VALUES;
    const struct bt_json_caps caps = {SIZE_MAX, max, MAX_DEPTH};
    int rc;

    baton__v1__sampling__init(&r->sampling);
    baton__v1__stopping__init(&r->stopping);
    baton__v1__generate_request__init(&r->msg);
    rc = bt_json_parse(body, "the body", &caps, &r->spec->root, r->err);
    return rc == BT_E_TOO_LARGE
               ? BT_FAIL(r->err, rc, "the body has more than %zu values (http.max_body_values)",
                         max)
               : rc;
}

/* What fields say together. */
static int check(struct reader *r)
{
    if (r->stream_options && !r->spec->stream) {
        return bad(r, "stream_options", "needs stream = true");
    }
    if (r->top_logprobs && !r->spec->logprobs) {
        return bad(r, "top_logprobs", "needs logprobs = true");
    }
    if (r->best_of > r->n) {
        return bad(r, "best_of", "is not supported beyond n");
    }
    if (r->chat ? !r->messages : !r->prompt) {
        return bad(r, r->chat ? "messages" : "prompt", "is missing");
    }
    return BT_OK;
}

static int set_messages(struct reader *r)
{
    Baton__V1__Sampling *s = take_memory(r->spec, 1, sizeof(*s));
    Baton__V1__Stopping *t = take_memory(r->spec, 1, sizeof(*t));

    if (!s || !t) {
        return no_memory(r);
    }
    if (r->spec->logprobs) {
        r->sampling.logprobs__case = BATON__V1__SAMPLING__LOGPROBS__LOGPROBS;
    }
    if (!r->chat && !r->has_max) {
        r->stopping.max_tokens__case = BATON__V1__STOPPING__MAX_TOKENS__MAX_TOKENS;
        r->stopping.max_tokens = DEFAULT_COMPLETION_TOKENS;
    }
    *s = r->sampling;
    *t = r->stopping;
    r->msg.sampling = s;
    r->msg.stopping = t;
    r->spec->chat = r->chat;
    r->spec->n = (size_t)r->n;
    return BT_OK;
}

int rt_http_spec_read(struct bt_str body,
                      bool chat,
                      const char *request_id,
                      struct rt_http_spec *ret,
                      struct bt_err *err)
{
    struct reader r = {.spec = ret, .err = err, .chat = chat, .n = 1, .best_of = 1};
    int rc = parse(&r, body);

    if (rc < 0) {
        return rc;
    }
    r.sampling.temperature__case = BATON__V1__SAMPLING__TEMPERATURE__TEMPERATURE;
    r.sampling.temperature = 1; /* OpenAI's default, where gRPC's is greedy */
    r.msg.skip_special_tokens = true;
    r.msg.request_id = (char *)(uintptr_t)request_id;
    if ((rc = read_fields(&r)) < 0 || (rc = check(&r)) < 0 || (rc = set_messages(&r)) < 0) {
        return rc;
    }
    return read_prompts(&r);
}

/* The one message of a question about text, and the only keys that it may have. */
static int read_question(struct reader *r, struct bt_str body, const char *const keys[])
{
    const char *key;
    json_t *v;
    int rc = parse(r, body);

    if (rc < 0) {
        return rc;
    }
    r->spec->msgs = take_memory(r->spec, 1, sizeof(*r->spec->msgs));
    if (!r->spec->msgs) {
        return no_memory(r);
    }
    r->spec->msgs[0] = r->msg;
    json_object_foreach(r->spec->root, key, v)
    {
        bool known = false;

        for (size_t i = 0; keys[i]; i++) {
            known = known || strcmp(keys[i], key) == 0;
        }
        if (!known) {
            return bad(r, key, "is not a field that is supported here");
        }
    }
    v = json_object_get(r->spec->root, "model");
    return v && !json_is_null(v) ? read_string(r, "model", v, &r->spec->msgs[0].model) : BT_OK;
}

int rt_http_spec_read_tokenize(struct bt_str body, struct rt_http_spec *ret, struct bt_err *err)
{
    static const char *const keys[] = {"model", "prompt", "messages", NULL};
    struct reader r = {.spec = ret, .err = err};
    const json_t *prompt, *messages;
    int rc = read_question(&r, body, keys);

    if (rc < 0) {
        return rc;
    }
    prompt = json_object_get(ret->root, "prompt");
    messages = json_object_get(ret->root, "messages");
    if (!prompt == !messages) {
        return bad(&r, "prompt", "one of prompt and messages must be given");
    }
    if (messages) {
        ret->msgs[0].input_case = BATON__V1__GENERATE_REQUEST__INPUT_CHAT;
        return read_chat(&r, messages, &ret->msgs[0].chat);
    }
    ret->msgs[0].input_case = BATON__V1__GENERATE_REQUEST__INPUT_TEXT;
    return read_string(&r, "prompt", prompt, &ret->msgs[0].text);
}

int rt_http_spec_read_detokenize(struct bt_str body, struct rt_http_spec *ret, struct bt_err *err)
{
    static const char *const keys[] = {"model", "tokens", NULL};
    struct reader r = {.spec = ret, .err = err};
    int rc = read_question(&r, body, keys);

    return rc < 0 ? rc
                  : read_tokens(&r, "tokens", json_object_get(ret->root, "tokens"), &ret->msgs[0]);
}
