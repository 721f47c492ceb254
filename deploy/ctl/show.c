/* See show.h. */
#include "deploy/ctl/show.h"

#include <errno.h>
#include <stdlib.h>

/* --- calls ----------------------------------------------------------------------------------- */

struct got {
    const ProtobufCMessageDescriptor *type;
    ProtobufCMessage *copy;
};

static void on_answer(void *user, const ProtobufCMessage *msg)
{
    struct got *g = user;
    size_t n = protobuf_c_message_get_packed_size(msg);
    uint8_t *bytes = malloc(n + 1);

    if (bytes && !g->copy) {
        protobuf_c_message_pack(msg, bytes);
        g->copy = protobuf_c_message_unpack(g->type, NULL, n, bytes);
    }
    free(bytes);
}

int ctl_ask(const char *address, const struct ctl_ask *a, ProtobufCMessage **ret_answer)
{
    struct got g = {.type = a->response};
    struct ctl_call c = {.path = a->path,
                         .peer = a->peer,
                         .request = a->request,
                         .response = a->response,
                         .deadline_ns = a->deadline_ns,
                         .message = on_answer,
                         .user = &g};
    int code = ctl_run(address, &c);

    if (code == CTL_OK && !g.copy) {
        fprintf(stderr, "batonctl: %s: an empty answer\n", address);
        code = CTL_FAILED;
    }
    if (code != CTL_OK) {
        if (g.copy) {
            protobuf_c_message_free_unpacked(g.copy, NULL);
        }
        return code;
    }
    *ret_answer = g.copy;
    return CTL_OK;
}

/* --- JSON ------------------------------------------------------------------------------------ */

static void put_bytes(struct bt_jsonw *w, const char *key, const ProtobufCBinaryData *d)
{
    static const char digits[] = "0123456789abcdef";
    struct bt_buf hex = {0};
    int rc = bt_buf_reserve(&hex, 2 * d->len + 1);

    for (size_t i = 0; rc == BT_OK && i < d->len; i++) {
        char two[2] = {digits[d->data[i] >> 4], digits[d->data[i] & 15]};

        rc = bt_buf_add(&hex, two, 2);
    }
    bt_jw_strn(w, key, bt_buf_str(&hex));
    bt_buf_fini(&hex);
}

static void put_enum(struct bt_jsonw *w, const char *key, const ProtobufCFieldDescriptor *f, int v)
{
    const ProtobufCEnumValue *e = protobuf_c_enum_descriptor_get_value(f->descriptor, v);

    if (e) {
        bt_jw_str(w, key, e->name);
    } else {
        bt_jw_i64(w, key, v);
    }
}

static void
put_value(struct bt_jsonw *w, const char *key, const ProtobufCFieldDescriptor *f, const char *at)
{
    switch (f->type) {
    case PROTOBUF_C_TYPE_INT32:
    case PROTOBUF_C_TYPE_SINT32:
    case PROTOBUF_C_TYPE_SFIXED32:
        bt_jw_i64(w, key, *(const int32_t *)(const void *)at);
        break;
    case PROTOBUF_C_TYPE_INT64:
    case PROTOBUF_C_TYPE_SINT64:
    case PROTOBUF_C_TYPE_SFIXED64:
        bt_jw_i64(w, key, *(const int64_t *)(const void *)at);
        break;
    case PROTOBUF_C_TYPE_UINT32:
    case PROTOBUF_C_TYPE_FIXED32:
        bt_jw_u64(w, key, *(const uint32_t *)(const void *)at);
        break;
    case PROTOBUF_C_TYPE_UINT64:
    case PROTOBUF_C_TYPE_FIXED64:
        bt_jw_u64(w, key, *(const uint64_t *)(const void *)at);
        break;
    case PROTOBUF_C_TYPE_FLOAT:
        bt_jw_f64(w, key, (double)*(const float *)(const void *)at, 9);
        break;
    case PROTOBUF_C_TYPE_DOUBLE:
        bt_jw_f64(w, key, *(const double *)(const void *)at, 9);
        break;
    case PROTOBUF_C_TYPE_BOOL:
        bt_jw_bool(w, key, *(const protobuf_c_boolean *)(const void *)at);
        break;
    case PROTOBUF_C_TYPE_ENUM:
        put_enum(w, key, f, *(const int *)(const void *)at);
        break;
    case PROTOBUF_C_TYPE_STRING:
        bt_jw_str(w, key, *(char *const *)(const void *)at);
        break;
    case PROTOBUF_C_TYPE_BYTES:
        put_bytes(w, key, (const void *)at);
        break;
    case PROTOBUF_C_TYPE_MESSAGE:
        ctl_put_message(w, key, *(ProtobufCMessage *const *)(const void *)at);
        break;
    }
}

static size_t size_of(const ProtobufCFieldDescriptor *f)
{
    switch ((int)f->type) {
    case PROTOBUF_C_TYPE_STRING:
    case PROTOBUF_C_TYPE_MESSAGE:
        return sizeof(void *);
    case PROTOBUF_C_TYPE_BYTES:
        return sizeof(ProtobufCBinaryData);
    case PROTOBUF_C_TYPE_BOOL:
        return sizeof(protobuf_c_boolean);
    case PROTOBUF_C_TYPE_INT64:
    case PROTOBUF_C_TYPE_SINT64:
    case PROTOBUF_C_TYPE_SFIXED64:
    case PROTOBUF_C_TYPE_UINT64:
    case PROTOBUF_C_TYPE_FIXED64:
    case PROTOBUF_C_TYPE_DOUBLE:
        return 8;
    default:
        return 4;
    }
}

void ctl_put_message(struct bt_jsonw *w, const char *key, const ProtobufCMessage *m)
{
    if (!m) {
        bt_jw_str(w, key, NULL);
        return;
    }
    bt_jw_open(w, key, '{');
    for (unsigned i = 0; i < m->descriptor->n_fields; i++) {
        const ProtobufCFieldDescriptor *f = &m->descriptor->fields[i];
        const char *at = (const char *)m + f->offset;
        const char *count = (const char *)m + f->quantifier_offset;

        if (f->label == PROTOBUF_C_LABEL_REPEATED) {
            const char *list = *(char *const *)(const void *)at;
            size_t n = *(const size_t *)(const void *)count;

            bt_jw_open(w, f->name, '[');
            for (size_t k = 0; k < n; k++) {
                put_value(w, NULL, f, list + k * size_of(f));
            }
            bt_jw_close(w, ']');
        } else if (!(f->flags & PROTOBUF_C_FIELD_FLAG_ONEOF) ||
                   *(const uint32_t *)(const void *)count == f->id) {
            put_value(w, f->name, f, at);
        }
    }
    bt_jw_close(w, '}');
}

int ctl_print_buf(struct bt_jsonw *w)
{
    int code = CTL_OK;

    if (w->rc < 0) {
        fprintf(stderr, "batonctl: %s\n", bt_rc_text(w->rc));
        code = CTL_FAILED;
    } else {
        fwrite(w->b->p, 1, w->b->n, stdout);
        fputc('\n', stdout);
    }
    bt_buf_fini(w->b);
    return code;
}

int ctl_print_json(const ProtobufCMessage *m)
{
    struct bt_buf b = {0};
    struct bt_jsonw w = {.b = &b};

    ctl_put_message(&w, NULL, m);
    return ctl_print_buf(&w);
}

/* --- plain text ------------------------------------------------------------------------------ */

/* C0, DEL, and C1 as UTF-8 and as a byte of its own. */
static void plain_text(char *s)
{
    for (unsigned char *p = (unsigned char *)s; *p; p++) {
        if (*p < ' ' || *p == 0x7f) {
            *p = '?';
        } else if (*p == 0xc2 && p[1] >= 0x80 && p[1] < 0xa0) {
            p[0] = p[1] = '?';
        }
    }
}

static void make_plain(const ProtobufCFieldDescriptor *f, void *at)
{
    char **s = at;
    ProtobufCMessage **m = at;

    if (f->type == PROTOBUF_C_TYPE_STRING && *s) {
        plain_text(*s);
    } else if (f->type == PROTOBUF_C_TYPE_MESSAGE && *m) {
        ctl_make_plain(*m);
    }
}

void ctl_make_plain(ProtobufCMessage *m)
{
    for (unsigned i = 0; i < m->descriptor->n_fields; i++) {
        const ProtobufCFieldDescriptor *f = &m->descriptor->fields[i];
        char *at = (char *)m + f->offset, *count = (char *)m + f->quantifier_offset;

        if (f->type != PROTOBUF_C_TYPE_STRING && f->type != PROTOBUF_C_TYPE_MESSAGE) {
            continue;
        }
        if (f->label == PROTOBUF_C_LABEL_REPEATED) {
            for (size_t k = 0; k < *(const size_t *)(const void *)count; k++) {
                make_plain(f, *(char **)(void *)at + k * sizeof(void *));
            }
        } else if (!(f->flags & PROTOBUF_C_FIELD_FLAG_ONEOF) ||
                   *(const uint32_t *)(const void *)count == f->id) {
            make_plain(f, at);
        }
    }
}

/* --- words ----------------------------------------------------------------------------------- */

const char *ctl_bytes(double n, char buf[24])
{
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
    size_t i = 0;

    while (n >= 1024 && i + 1 < BT_ARRAY_LEN(units)) {
        n /= 1024;
        i++;
    }
    snprintf(buf, 24, i == 0 || n >= 100 ? "%.0f %s" : "%.1f %s", n, units[i]);
    return buf;
}

const char *ctl_path_name(int path)
{
    static const char *const names[] = {"-", "direct", "local", "store"};

    return path >= 0 && path < (int)BT_ARRAY_LEN(names) ? names[path] : "?";
}

const char *ctl_node_state(const Baton__V1__NodeInfo *n)
{
    return n->cordoned && strcmp(n->state, "ready") == 0 ? "cordoned" : n->state;
}

const char *ctl_dash(const char *s)
{
    return s && s[0] ? s : "-";
}

char *ctl_read_file(const char *path, size_t max, size_t *ret_n)
{
    FILE *f = strcmp(path, "-") == 0 ? stdin : fopen(path, "rb");
    struct bt_buf b = {.max = max + 1};
    char chunk[65536];
    size_t n;
    int rc = f ? BT_OK : BT_E_IO;

    while (rc == BT_OK && (n = fread(chunk, 1, sizeof(chunk), f)) > 0) {
        rc = bt_buf_add(&b, chunk, n);
    }
    if (rc == BT_OK && ferror(f)) {
        rc = BT_E_IO;
    }
    if (rc == BT_OK) {
        rc = bt_buf_add(&b, "", 1);
    }
    if (f && f != stdin) {
        fclose(f);
    }
    if (rc < 0) {
        fprintf(stderr, "batonctl: %s: %s\n", path,
                rc == BT_E_IO ? strerror(errno) : bt_rc_text(rc));
        bt_buf_fini(&b);
        return NULL;
    }
    *ret_n = b.n - 1;
    return b.p;
}
