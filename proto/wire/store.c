/* Pack and unpack of the block server's messages. */
#include "proto/wire/store.h"

#include "proto/wire/cursor.h"

const char *wire_store_type_name(int type)
{
    static const char *const names[] = {"?",      "HELLO", "REFUSE", "PING",    "PONG", "GET",
                                        "HAVE",   "MISS",  "DATA",   "RELEASE", "PUT",  "GO",
                                        "PLACED", "DONE",  "LEND",   "TAKEN",   "KEEP", "DROP"};

    return type > 0 && type < (int)BT_ARRAY_LEN(names) ? names[type] : names[0];
}

/* ---- pack ---- */

static void pack_hello(const struct wire_store *m, struct cursor *c)
{
    BT_BUG_ON(m->name.n > WIRE_STORE_MAX_NAME || m->key.n > WIRE_STORE_MAX_KEY);
    put(c, m->version_min, 2);
    put(c, m->version_max, 2);
    put(c, m->method, 1);
    put(c, 0, 3);
    put(c, m->incarnation, 8);
    put(c, m->base, 8);
    put(c, m->bytes, 8);
    put(c, m->name.n, 2);
    put(c, m->key.n, 2);
    put(c, 0, 4);
    put_bytes(c, m->name.p, m->name.n);
    put_bytes(c, m->key.p, m->key.n);
}

static void pack_text(const struct wire_store *m, struct cursor *c)
{
    size_t n = BT_MIN(m->text.n, (size_t)WIRE_STORE_MAX_TEXT);

    put(c, (uint32_t)m->rc, 4);
    put(c, n, 2);
    put(c, 0, 2);
    put_bytes(c, m->text.p, n);
}

static void pack_rest(const struct wire_store *m, struct cursor *c)
{
    switch (m->type) {
    case WIRE_STORE_HELLO:
        pack_hello(m, c);
        break;
    case WIRE_STORE_REFUSE:
        pack_text(m, c);
        break;
    case WIRE_STORE_PING:
    case WIRE_STORE_PONG:
        break;
    case WIRE_STORE_GET:
        put(c, m->n_items, 4);
        put(c, m->method, 1);
        put(c, 0, 3);
        put(c, m->n_layers, 4);
        put(c, m->block_tokens, 4);
        put(c, m->layer_bytes, 8);
        put_bytes(c, m->root, sizeof(m->root));
        break;
    case WIRE_STORE_HAVE:
        put(c, m->item, 4);
        put(c, m->n_layers, 4);
        put(c, m->generation, 8);
        break;
    case WIRE_STORE_MISS:
        put(c, m->item, 4);
        put(c, (uint32_t)m->rc, 4);
        break;
    case WIRE_STORE_DATA:
        put(c, m->item, 4);
        put(c, m->layer, 4);
        put(c, m->offset, 8);
        if (m->version == 0 || m->version >= 3) {
            put(c, m->sum, 8);
        }
        break;
    case WIRE_STORE_RELEASE:
    case WIRE_STORE_PLACED:
    case WIRE_STORE_TAKEN:
    case WIRE_STORE_KEEP:
    case WIRE_STORE_DROP:
        put(c, 0, 8);
        break;
    case WIRE_STORE_PUT:
        put(c, m->method, 1);
        put(c, m->flags, 1);
        put(c, 0, 6);
        put(c, m->offset, 8);
        break;
    case WIRE_STORE_GO:
        put(c, m->n_layers, 4);
        put(c, 0, 4);
        break;
    case WIRE_STORE_DONE:
        put(c, (uint32_t)m->rc, 4);
        put(c, 0, 4);
        break;
    case WIRE_STORE_LEND:
        put(c, m->file_dev, 8);
        put(c, m->file_ino, 8);
        put(c, m->layer_stride, 8);
        put(c, m->page_stride, 8);
        put(c, m->row_bytes, 4);
        put(c, m->n_pages, 4);
        put(c, m->sample, 8);
        break;
    }
}

size_t wire_store_pack(const struct wire_store *m, char *buf)
{
    struct cursor c = {.p = (uint8_t *)buf, .n = WIRE_STORE_MAX_HEAD};
    size_t end;

    put(&c, WIRE_STORE_MAGIC, 2);
    put(&c, m->version ? m->version : WIRE_STORE_VERSION, 1);
    put(&c, m->type, 1);
    put(&c, 0, 4);
    if (m->type >= WIRE_STORE_GET) {
        put(&c, m->req, 8);
    }
    pack_rest(m, &c);
    end = c.at;
    c.at = 4;
    put(&c, end, 4);
    return end;
}

/* ---- unpack ---- */

static void unpack_hello(struct cursor *c, struct wire_store *m)
{
    size_t name_n, key_n;

    m->version_min = (uint16_t)get(c, 2);
    m->version_max = (uint16_t)get(c, 2);
    m->method = (uint8_t)get(c, 1);
    get_zero(c, 3);
    m->incarnation = get(c, 8);
    m->base = get(c, 8);
    m->bytes = get(c, 8);
    name_n = (size_t)get(c, 2);
    key_n = (size_t)get(c, 2);
    get_zero(c, 4);
    m->name = get_str(c, name_n, WIRE_STORE_MAX_NAME);
    m->key = get_str(c, key_n, WIRE_STORE_MAX_KEY);
    if (m->version_min > m->version_max || m->version_min == 0 || m->name.n == 0 ||
        m->base > UINT64_MAX - m->bytes || (m->method > 2 && m->method != WIRE_STORE_NO_METHOD)) {
        c->bad = true;
    }
}

static void unpack_text(struct cursor *c, struct wire_store *m)
{
    size_t n;

    m->rc = (int32_t)get32(c);
    n = (size_t)get(c, 2);
    get_zero(c, 2);
    m->text = get_str(c, n, WIRE_STORE_MAX_TEXT);
    if (m->rc >= 0) {
        c->bad = true;
    }
}

static void unpack_get(struct cursor *c, struct wire_store *m)
{
    struct bt_str root;

    m->n_items = get32(c);
    m->method = (uint8_t)get(c, 1);
    get_zero(c, 3);
    m->n_layers = get32(c);
    m->block_tokens = get32(c);
    m->layer_bytes = get(c, 8);
    root = get_str(c, sizeof(m->root), sizeof(m->root));
    if (root.n) {
        memcpy(m->root, root.p, root.n);
    }
    if (m->n_items == 0 || m->n_items > WIRE_STORE_MAX_ITEMS || m->method > 2) {
        c->bad = true;
    }
}

static void unpack_lend(struct cursor *c, struct wire_store *m)
{
    m->file_dev = get(c, 8);
    m->file_ino = get(c, 8);
    m->layer_stride = get(c, 8);
    m->page_stride = get(c, 8);
    m->row_bytes = get32(c);
    m->n_pages = get32(c);
    m->sample = get(c, 8);
    if (m->n_pages == 0 || m->n_pages > WIRE_STORE_MAX_PAGES) {
        c->bad = true;
    }
}

static void unpack_rest(struct cursor *c, struct wire_store *m)
{
    switch (m->type) {
    case WIRE_STORE_HELLO:
        unpack_hello(c, m);
        break;
    case WIRE_STORE_REFUSE:
        unpack_text(c, m);
        break;
    case WIRE_STORE_PING:
    case WIRE_STORE_PONG:
        break;
    case WIRE_STORE_GET:
        unpack_get(c, m);
        break;
    case WIRE_STORE_HAVE:
        m->item = get32(c);
        m->n_layers = get32(c);
        m->generation = get(c, 8);
        break;
    case WIRE_STORE_MISS:
        m->item = get32(c);
        m->rc = (int32_t)get32(c);
        c->bad = c->bad || m->rc >= 0;
        break;
    case WIRE_STORE_DATA:
        m->item = get32(c);
        m->layer = get32(c);
        m->offset = get(c, 8);
        m->sum = m->version >= 3 ? get(c, 8) : 0;
        break;
    case WIRE_STORE_RELEASE:
    case WIRE_STORE_PLACED:
    case WIRE_STORE_TAKEN:
    case WIRE_STORE_KEEP:
    case WIRE_STORE_DROP:
        get_zero(c, 8);
        break;
    case WIRE_STORE_PUT:
        m->method = (uint8_t)get(c, 1);
        m->flags = (uint8_t)get(c, 1);
        get_zero(c, 6);
        m->offset = get(c, 8);
        /* By message alone: the method 1. */
        c->bad = c->bad || m->method > 2 || m->flags > WIRE_STORE_SUMS_LATER ||
                 (m->flags && (m->version < 3 || m->method != 1));
        break;
    case WIRE_STORE_GO:
        m->n_layers = get32(c);
        get_zero(c, 4);
        break;
    case WIRE_STORE_DONE:
        m->rc = (int32_t)get32(c);
        get_zero(c, 4);
        c->bad = c->bad || m->rc > 0;
        break;
    case WIRE_STORE_LEND:
        unpack_lend(c, m);
        break;
    default:
        c->bad = true;
        break;
    }
}

static const struct head_form form = {.name = "store",
                                      .magic = WIRE_STORE_MAGIC,
                                      .version_min = WIRE_STORE_VERSION_MIN,
                                      .version_max = WIRE_STORE_VERSION,
                                      .hello = WIRE_STORE_HELLO,
                                      .refuse = WIRE_STORE_REFUSE};

int wire_store_unpack(struct bt_str head, struct wire_store *ret, struct bt_err *err)
{
    struct cursor c = {.p = (uint8_t *)(uintptr_t)head.p, .n = head.n};
    struct wire_store *m = ret;
    struct head h;
    int rc;

    memset(m, 0, sizeof(*m));
    rc = get_head(&c, &form, &h, err);
    if (rc < 0) {
        return rc;
    }
    m->version = (uint8_t)h.version;
    m->type = (enum wire_store_type)h.type;
    if (h.type >= WIRE_STORE_GET) {
        m->req = get(&c, 8);
    }
    unpack_rest(&c, m);
    if (h.type >= WIRE_STORE_LEND && h.version < 2) {
        c.bad = true;
    }
    if (c.bad || h.bytes != head.n || c.at != c.n) {
        return BT_FAIL(err, BT_E_PEER_PROTOCOL, "malformed store message %s of %zu bytes",
                       wire_store_type_name((int)h.type), head.n);
    }
    return BT_OK;
}

/* ---- data ---- */

int wire_store_add_u32(struct bt_buf *to, uint32_t v)
{
    uint8_t b[4];
    struct cursor c = {.p = b, .n = sizeof(b)};

    put(&c, v, 4);
    return bt_buf_add(to, b, sizeof(b));
}

int wire_store_add_u64(struct bt_buf *to, uint64_t v)
{
    uint8_t b[8];
    struct cursor c = {.p = b, .n = sizeof(b)};

    put(&c, v, 8);
    return bt_buf_add(to, b, sizeof(b));
}

uint64_t wire_store_u64(const char *p)
{
    struct cursor c = {.p = (uint8_t *)(uintptr_t)p, .n = 8};

    return get(&c, 8);
}

uint32_t wire_store_u32(const char *p)
{
    struct cursor c = {.p = (uint8_t *)(uintptr_t)p, .n = 4};

    return get32(&c);
}

int32_t wire_store_i32(const char *p)
{
    return (int32_t)wire_store_u32(p);
}

int wire_store_add_item(struct bt_buf *to, const struct wire_store_item *item, const int32_t *ids)
{
    uint8_t head[WIRE_STORE_ITEM_BYTES];
    struct cursor c = {.p = head, .n = sizeof(head)};
    int rc;

    put_bytes(&c, item->key, 16);
    put_bytes(&c, item->parent, 16);
    put(&c, item->prefix, 8);
    put(&c, item->n_tokens, 4);
    put(&c, 0, 4);
    rc = bt_buf_add(to, head, sizeof(head));
    for (uint32_t i = 0; rc == BT_OK && i < item->n_tokens; i++) {
        uint8_t b[4];

        c = (struct cursor){.p = b, .n = sizeof(b)};
        put(&c, (uint32_t)ids[i], 4);
        rc = bt_buf_add(to, b, sizeof(b));
    }
    return rc;
}

bool wire_store_take_item(struct bt_str *data,
                          uint32_t max_tokens,
                          struct wire_store_item *ret_item)
{
    struct cursor c = {.p = (uint8_t *)(uintptr_t)data->p, .n = data->n};
    struct bt_str key = get_str(&c, 16, 16), parent = get_str(&c, 16, 16);

    ret_item->prefix = get(&c, 8);
    ret_item->n_tokens = get32(&c);
    get_zero(&c, 4);
    if (c.bad || ret_item->n_tokens == 0 || ret_item->n_tokens > max_tokens ||
        (c.n - c.at) / 4 < ret_item->n_tokens) {
        return false;
    }
    memcpy(ret_item->key, key.p, 16);
    memcpy(ret_item->parent, parent.p, 16);
    ret_item->ids = data->p + c.at;
    c.at += (size_t)ret_item->n_tokens * 4;
    *data = (struct bt_str){data->p + c.at, data->n - c.at};
    return true;
}
