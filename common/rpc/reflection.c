/* Reflection: an index of file names and symbols over descriptor sets. Loop thread.
 *
 * Of google/protobuf/descriptor.proto only names and nesting matter here, so the few field numbers
 * below replace generated code for it. Both versions of the service have the same messages but for
 * the package, so the v1 structs serve both. */
#include "common/rpc/reflection.h"

#include "common/base/buf.h"
#include "common/rpc/reflection.pb-c.h"

#include <stdio.h>
#include <stdlib.h>

#define MAX_DEPTH  16           /* nesting of messages in our own files */
#define HIGH_WATER (256u << 10) /* stop reading questions while more waits to be sent */

extern const char bt_rpc_protoset[], bt_rpc_protoset_end[]; /* descriptor.S */

struct file {
    struct bt_str name;
    struct bt_str bytes;
};

struct symbol {
    char *name; /* full, without a leading dot; owned */
    size_t file_idx;
};

struct bt_reflection {
    struct bt_rpc_service v1, v1alpha;
    struct bt_rpc_server *srv;
    struct file *files;
    size_t n_files, cap_files;
    struct symbol *symbols;
    size_t n_symbols, cap_symbols;
};

/* --- descriptors --- */

enum kind { KIND_FILE, KIND_MESSAGE, KIND_ENUM, KIND_SERVICE, KIND_LEAF, KIND_NONE };

/* Kind of what field `number` of a descriptor of `parent` holds. Numbers: descriptor.proto. */
static enum kind child_kind(enum kind parent, uint32_t number)
{
    static const struct {
        enum kind parent;
        uint32_t number;
        enum kind child;
    } rows[] = {
        {KIND_FILE, 4, KIND_MESSAGE},    {KIND_FILE, 5, KIND_ENUM},    {KIND_FILE, 6, KIND_SERVICE},
        {KIND_FILE, 7, KIND_LEAF},       {KIND_MESSAGE, 2, KIND_LEAF}, {KIND_MESSAGE, 6, KIND_LEAF},
        {KIND_MESSAGE, 3, KIND_MESSAGE}, {KIND_MESSAGE, 4, KIND_ENUM}, {KIND_MESSAGE, 8, KIND_LEAF},
        {KIND_ENUM, 2, KIND_LEAF},       {KIND_SERVICE, 2, KIND_LEAF},
    };

    for (size_t i = 0; i < BT_ARRAY_LEN(rows); i++) {
        if (rows[i].parent == parent && rows[i].number == number) {
            return rows[i].child;
        }
    }
    return KIND_NONE;
}

static bool read_varint(struct bt_str *in, uint64_t *ret)
{
    uint64_t v = 0;

    for (unsigned shift = 0; shift < 64 && in->n > 0; shift += 7) {
        uint8_t b = (uint8_t)*in->p;

        in->p++;
        in->n--;
        v |= (uint64_t)(b & 0x7f) << shift;
        if (!(b & 0x80)) {
            *ret = v;
            return true;
        }
    }
    return false;
}

static bool skip(struct bt_str *in, size_t n)
{
    if (n > in->n) {
        return false;
    }
    in->p += n;
    in->n -= n;
    return true;
}

/* Next field; *ret is its content if it is length-delimited, else {NULL, 0}. 1 = field, 0 = end. */
static int next_field(struct bt_str *in, uint32_t *ret_number, struct bt_str *ret)
{
    uint64_t key, v;

    if (in->n == 0) {
        return 0;
    }
    if (!read_varint(in, &key)) {
        return BT_E_FORMAT;
    }
    *ret_number = (uint32_t)(key >> 3);
    *ret = (struct bt_str){NULL, 0};
    switch (key & 7) {
    case 0:
        return read_varint(in, &v) ? 1 : BT_E_FORMAT;
    case 1:
        return skip(in, 8) ? 1 : BT_E_FORMAT;
    case 2:
        if (!read_varint(in, &v) || v > in->n) {
            return BT_E_FORMAT;
        }
        *ret = (struct bt_str){in->p, (size_t)v};
        return skip(in, (size_t)v) ? 1 : BT_E_FORMAT;
    case 5:
        return skip(in, 4) ? 1 : BT_E_FORMAT;
    default:
        return BT_E_FORMAT;
    }
}

/* First length-delimited field `number`, {NULL, 0} if there is none. */
static struct bt_str field_of(struct bt_str in, uint32_t number)
{
    struct bt_str v;
    uint32_t n;

    while (next_field(&in, &n, &v) > 0) {
        if (n == number && v.p) {
            return v;
        }
    }
    return (struct bt_str){NULL, 0};
}

/* Makes room for one more element of `size` bytes. */
static int grow(void **array, size_t n, size_t *cap, size_t size)
{
    size_t want = *cap ? *cap * 2 : 64;
    void *p;

    if (n < *cap) {
        return BT_OK;
    }
    p = reallocarray(*array, want, size);
    if (!p) {
        return BT_E_NOMEM;
    }
    *array = p;
    *cap = want;
    return BT_OK;
}

static int
add_symbol(struct bt_reflection *r, size_t file_idx, struct bt_str scope, struct bt_str n)
{
    struct bt_buf full = {0};
    int rc = grow((void **)&r->symbols, r->n_symbols, &r->cap_symbols, sizeof(*r->symbols));

    if (rc == BT_OK) {
        rc = bt_buf_printf(&full, "%.*s%s%.*s%c", (int)scope.n, scope.p ? scope.p : "",
                           scope.n ? "." : "", (int)n.n, n.p, 0);
    }
    if (rc == BT_OK) {
        r->symbols[r->n_symbols++] = (struct symbol){.name = full.p, .file_idx = file_idx};
    }
    return rc;
}

/* Adds what a descriptor names and contains. Depth is bounded by MAX_DEPTH. */
static int index_descriptor(
    struct bt_reflection *r, size_t file_idx, enum kind kind, struct bt_str in, struct bt_str scope)
{
    struct bt_str v;
    uint32_t number;
    int rc, depth = 0;

    for (size_t i = 0; i < scope.n; i++) {
        depth += scope.p[i] == '.';
    }
    if (depth > MAX_DEPTH) {
        return BT_E_FORMAT;
    }
    while ((rc = next_field(&in, &number, &v)) > 0) {
        enum kind child = child_kind(kind, number);
        struct bt_str name, inner;

        if (child == KIND_NONE || !v.p) {
            continue;
        }
        name = field_of(v, 1);
        rc = name.p ? add_symbol(r, file_idx, scope, name) : BT_E_FORMAT;
        if (rc < 0) {
            return rc;
        }
        if (child == KIND_LEAF) {
            continue;
        }
        /* The values of an enum are named beside it, not inside it. */
        inner = child == KIND_ENUM ? scope : bt_str_of(r->symbols[r->n_symbols - 1].name);
        rc = index_descriptor(r, file_idx, child, v, inner);
        if (rc < 0) {
            return rc;
        }
    }
    return rc;
}

static const struct file *find_file(const struct bt_reflection *r, const char *name)
{
    for (size_t i = 0; i < r->n_files; i++) {
        if (bt_str_eq(r->files[i].name, bt_str_of(name))) {
            return &r->files[i];
        }
    }
    return NULL;
}

static const struct file *find_symbol(const struct bt_reflection *r, const char *name)
{
    for (size_t i = 0; i < r->n_symbols; i++) {
        if (strcmp(r->symbols[i].name, name) == 0) {
            return &r->files[r->symbols[i].file_idx];
        }
    }
    return NULL;
}

static int index_set(struct bt_reflection *r, struct bt_str set)
{
    struct bt_str bytes;
    uint32_t number;
    int rc;

    while ((rc = next_field(&set, &number, &bytes)) > 0) {
        struct bt_str name;
        bool known = false;

        if (number != 1 || !bytes.p) {
            continue;
        }
        name = field_of(bytes, 1);
        for (size_t i = 0; i < r->n_files; i++) {
            known |= bt_str_eq(r->files[i].name, name);
        }
        if (known) {
            continue; /* an import that two sets share */
        }
        rc = grow((void **)&r->files, r->n_files, &r->cap_files, sizeof(*r->files));
        if (rc < 0) {
            return rc;
        }
        r->files[r->n_files++] = (struct file){name, bytes};
        rc = index_descriptor(r, r->n_files - 1, KIND_FILE, bytes, field_of(bytes, 2));
        if (rc < 0) {
            return rc;
        }
    }
    return rc;
}

/* --- service --- */

static void send_response(struct bt_rpc_call *call,
                          const Grpc__Reflection__V1__ServerReflectionResponse *reply)
{
    int rc = bt_rpc_call_send(call, &reply->base);

    if (rc < 0) {
        bt_rpc_call_fail(call, rc, NULL);
    } else if (bt_rpc_call_queued_bytes(call) > HIGH_WATER && bt_rpc_call_want_drained(call)) {
        bt_rpc_call_pause(call);
    }
}

static void send_error(struct bt_rpc_call *call,
                       Grpc__Reflection__V1__ServerReflectionResponse *reply,
                       int status,
                       const char *text)
{
    Grpc__Reflection__V1__ErrorResponse e = GRPC__REFLECTION__V1__ERROR_RESPONSE__INIT;

    e.error_code = status;
    e.error_message = (char *)(uintptr_t)text;
    reply->message_response_case =
        GRPC__REFLECTION__V1__SERVER_REFLECTION_RESPONSE__MESSAGE_RESPONSE_ERROR_RESPONSE;
    reply->error_response = &e;
    send_response(call, reply);
}

static void send_file(struct bt_rpc_call *call,
                      Grpc__Reflection__V1__ServerReflectionResponse *reply,
                      const struct file *f,
                      const char *what)
{
    Grpc__Reflection__V1__FileDescriptorResponse files =
        GRPC__REFLECTION__V1__FILE_DESCRIPTOR_RESPONSE__INIT;
    ProtobufCBinaryData bytes;
    char text[200];

    if (!f) {
        snprintf(text, sizeof(text), "no descriptor for %.150s", what);
        send_error(call, reply, BT_RPC_NOT_FOUND, text);
        return;
    }
    bytes.data = (uint8_t *)(uintptr_t)f->bytes.p;
    bytes.len = f->bytes.n;
    files.file_descriptor_proto = &bytes;
    files.n_file_descriptor_proto = 1;
    reply->message_response_case =
        GRPC__REFLECTION__V1__SERVER_REFLECTION_RESPONSE__MESSAGE_RESPONSE_FILE_DESCRIPTOR_RESPONSE;
    reply->file_descriptor_response = &files;
    send_response(call, reply);
}

static void send_services(struct bt_rpc_call *call,
                          struct bt_reflection *r,
                          Grpc__Reflection__V1__ServerReflectionResponse *reply)
{
    enum { MAX_LISTED = 32 };
    Grpc__Reflection__V1__ListServiceResponse list =
        GRPC__REFLECTION__V1__LIST_SERVICE_RESPONSE__INIT;
    Grpc__Reflection__V1__ServiceResponse rows[MAX_LISTED], *ptrs[MAX_LISTED];
    const struct bt_rpc_service *s;

    for (size_t i = 0; i < MAX_LISTED && (s = bt_rpc_server_service(r->srv, i)) != NULL; i++) {
        grpc__reflection__v1__service_response__init(&rows[i]);
        rows[i].name = (char *)(uintptr_t)s->name;
        ptrs[i] = &rows[i];
        list.n_service = i + 1;
    }
    list.service = ptrs;
    reply->message_response_case =
        GRPC__REFLECTION__V1__SERVER_REFLECTION_RESPONSE__MESSAGE_RESPONSE_LIST_SERVICES_RESPONSE;
    reply->list_services_response = &list;
    send_response(call, reply);
}

static void send_extension_numbers(struct bt_rpc_call *call,
                                   struct bt_reflection *r,
                                   Grpc__Reflection__V1__ServerReflectionResponse *reply,
                                   const char *type)
{
    Grpc__Reflection__V1__ExtensionNumberResponse none =
        GRPC__REFLECTION__V1__EXTENSION_NUMBER_RESPONSE__INIT;

    if (!find_symbol(r, type)) {
        send_file(call, reply, NULL, type);
        return;
    }
    none.base_type_name = (char *)(uintptr_t)type; /* proto3 messages have no extensions */
    reply->message_response_case =
        GRPC__REFLECTION__V1__SERVER_REFLECTION_RESPONSE__MESSAGE_RESPONSE_ALL_EXTENSION_NUMBERS_RESPONSE;
    reply->all_extension_numbers_response = &none;
    send_response(call, reply);
}

static void on_request(struct bt_rpc_call *call, const ProtobufCMessage *msg)
{
    Grpc__Reflection__V1__ServerReflectionRequest *q =
        (Grpc__Reflection__V1__ServerReflectionRequest *)(uintptr_t)msg;
    struct bt_reflection *r = bt_rpc_call_service_user(call);
    Grpc__Reflection__V1__ServerReflectionResponse reply =
        GRPC__REFLECTION__V1__SERVER_REFLECTION_RESPONSE__INIT;

    reply.valid_host = q->host;
    reply.original_request = q;
    switch ((int)q->message_request_case) {
    case GRPC__REFLECTION__V1__SERVER_REFLECTION_REQUEST__MESSAGE_REQUEST_FILE_BY_FILENAME:
        send_file(call, &reply, find_file(r, q->file_by_filename), q->file_by_filename);
        break;
    case GRPC__REFLECTION__V1__SERVER_REFLECTION_REQUEST__MESSAGE_REQUEST_FILE_CONTAINING_SYMBOL:
        send_file(call, &reply, find_symbol(r, q->file_containing_symbol),
                  q->file_containing_symbol);
        break;
    case GRPC__REFLECTION__V1__SERVER_REFLECTION_REQUEST__MESSAGE_REQUEST_FILE_CONTAINING_EXTENSION:
        send_error(call, &reply, BT_RPC_NOT_FOUND, "there are no extensions");
        break;
    case GRPC__REFLECTION__V1__SERVER_REFLECTION_REQUEST__MESSAGE_REQUEST_ALL_EXTENSION_NUMBERS_OF_TYPE:
        send_extension_numbers(call, r, &reply, q->all_extension_numbers_of_type);
        break;
    case GRPC__REFLECTION__V1__SERVER_REFLECTION_REQUEST__MESSAGE_REQUEST_LIST_SERVICES:
        send_services(call, r, &reply);
        break;
    default:
        send_error(call, &reply, BT_RPC_INVALID_ARGUMENT, "the request asks nothing");
        break;
    }
}

static void on_drained(struct bt_rpc_call *call)
{
    bt_rpc_call_resume(call);
}

static void on_half_close(struct bt_rpc_call *call)
{
    bt_rpc_call_finish(call, BT_RPC_OK, NULL);
}

#define METHOD(package)                                                                            \
    {                                                                                              \
        .path = "/" package ".ServerReflection/ServerReflectionInfo",                              \
        .request = &grpc__reflection__v1__server_reflection_request__descriptor,                   \
        .response = &grpc__reflection__v1__server_reflection_response__descriptor,                 \
        .access = BT_ACCESS_ANY, .client_stream = true, .message = on_request,                     \
        .drained = on_drained, .half_close = on_half_close                                         \
    }

static const struct bt_rpc_method method_v1[] = {METHOD("grpc.reflection.v1")};
static const struct bt_rpc_method method_v1alpha[] = {METHOD("grpc.reflection.v1alpha")};

int bt_reflection_create(struct bt_rpc_server *srv,
                         const struct bt_str *sets,
                         size_t n_sets,
                         struct bt_reflection **ret_reflection,
                         struct bt_err *err)
{
    struct bt_reflection *r = bt_calloc(1, sizeof(*r));
    struct bt_str own = {bt_rpc_protoset, (size_t)(bt_rpc_protoset_end - bt_rpc_protoset)};
    int rc;

    if (!r) {
        return BT_FAIL(err, BT_E_NOMEM, "reflection: out of memory");
    }
    r->srv = srv;
    r->v1 = (struct bt_rpc_service){.name = "grpc.reflection.v1.ServerReflection",
                                    .methods = method_v1,
                                    .n_methods = 1,
                                    .user = r,
                                    .infrastructure = true};
    r->v1alpha = r->v1;
    r->v1alpha.name = "grpc.reflection.v1alpha.ServerReflection";
    r->v1alpha.methods = method_v1alpha;
    rc = index_set(r, own);
    for (size_t i = 0; i < n_sets && rc >= 0; i++) {
        rc = index_set(r, sets[i]);
    }
    if (rc < 0) {
        bt_reflection_destroy(r);
        return BT_FAIL(err, rc, "reflection: descriptor set cannot be read");
    }
    rc = bt_rpc_server_register(srv, &r->v1, err);
    if (rc < 0) {
        bt_reflection_destroy(r);
        return rc;
    }
    BT_BUG_ON(bt_rpc_server_register(srv, &r->v1alpha, NULL) < 0); /* r is in use from here on */
    *ret_reflection = r;
    return BT_OK;
}

void bt_reflection_destroy(struct bt_reflection *r)
{
    if (!r) {
        return;
    }
    for (size_t i = 0; i < r->n_symbols; i++) {
        free(r->symbols[i].name);
    }
    free(r->symbols);
    free(r->files);
    free(r);
}
