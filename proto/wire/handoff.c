/* Pack and unpack of handoff messages. */
#include "proto/wire/handoff.h"

#include "proto/wire/cursor.h"

const char *wire_handoff_type_name(int type)
{
    static const char *const names[] = {
        "?",      "HELLO",  "REFUSE", "PING", "PONG", "TICKET", "ANNOUNCE", "DATA",   "PLACED",
        "COMMIT", "RESEND", "ABORT",  "NO",   "ACK",  "ACKED",  "ABORTED",  "REACHED"};

    return type > 0 && type < (int)BT_ARRAY_LEN(names) ? names[type] : names[0];
}

static bool has_id(int type)
{
    return type >= WIRE_HANDOFF_TICKET;
}

/* ---- pack ---- */

static void pack_hello(const struct wire_handoff *m, struct cursor *c)
{
    BT_BUG_ON(m->name.n > WIRE_HANDOFF_MAX_NAME || m->key.n > WIRE_HANDOFF_MAX_KEY);
    put(c, m->version_min, 2);
    put(c, m->version_max, 2);
    put(c, m->page_tokens, 4);
    put(c, m->n_layers, 4);
    put(c, m->n_kv_heads, 4);
    put(c, m->head_dim, 4);
    put(c, m->dtype, 4);
    put(c, m->pool_pages, 4);
    put(c, m->method, 1);
    put(c, 0, 3);
    put(c, m->incarnation, 8);
    put(c, m->base, 8);
    put_bytes(c, m->compat, sizeof(m->compat));
    put(c, m->name.n, 2);
    put(c, m->key.n, 2);
    put(c, 0, 4);
    put_bytes(c, m->name.p, m->name.n);
    put_bytes(c, m->key.p, m->key.n);
}

static void pack_text(const struct wire_handoff *m, struct cursor *c)
{
    size_t n = BT_MIN(m->text.n, (size_t)WIRE_HANDOFF_MAX_TEXT);

    put(c, (uint32_t)m->rc, 4);
    put(c, n, 2);
    put(c, 0, 2);
    put_bytes(c, m->text.p, n);
}

static void pack_pieces(const struct wire_handoff *m, struct cursor *c)
{
    BT_BUG_ON(m->n_pieces == 0 || m->n_pieces > WIRE_HANDOFF_MAX_PIECES);
    put(c, m->layer, 4);
    put(c, m->first_page, 4);
    put(c, m->n_pieces, 2);
    put(c, m->flags, 2);
    for (uint32_t i = 0; i < m->n_pieces; i++) {
        put(c, m->pieces[i].page, 4);
        put(c, m->pieces[i].generation, 4);
        put(c, m->pieces[i].n_pages, 4);
        put(c, 0, 4);
        put(c, m->pieces[i].sum, 8);
    }
    if (m->type == WIRE_HANDOFF_DATA) {
        put(c, m->offset, 4);
        put(c, 0, 4);
    }
}

/* What version 2 adds. */
static void pack_ticket2(const struct wire_handoff *m, struct cursor *c)
{
    BT_BUG_ON(m->origin_name.n > WIRE_HANDOFF_MAX_NAME ||
              m->origin_address.n > WIRE_HANDOFF_MAX_ADDRESS);
    put(c, m->n_have, 4);
    put(c, m->block_tokens, 4);
    put(c, m->origin_incarnation, 8);
    put_bytes(c, m->root, sizeof(m->root));
    put(c, m->origin_name.n, 2);
    put(c, m->origin_address.n, 2);
    put(c, 0, 4);
    put_bytes(c, m->origin_name.p, m->origin_name.n);
    put_bytes(c, m->origin_address.p, m->origin_address.n);
}

static void pack_rest(const struct wire_handoff *m, struct cursor *c)
{
    switch (m->type) {
    case WIRE_HANDOFF_HELLO:
        pack_hello(m, c);
        break;
    case WIRE_HANDOFF_REFUSE:
    case WIRE_HANDOFF_ABORT:
    case WIRE_HANDOFF_NO:
        pack_text(m, c);
        break;
    case WIRE_HANDOFF_PING:
    case WIRE_HANDOFF_PONG:
        break;
    case WIRE_HANDOFF_TICKET:
        BT_BUG_ON(m->key.n > WIRE_HANDOFF_MAX_KEY);
        put(c, m->n_tokens, 4);
        put(c, m->method, 1);
        put(c, 0, 3);
        put(c, m->n_pages, 4);
        put(c, m->key.n, 4);
        put(c, 0, 4);
        put_bytes(c, m->key.p, m->key.n);
        if (m->version != 1) {
            pack_ticket2(m, c);
        }
        break;
    case WIRE_HANDOFF_ANNOUNCE:
    case WIRE_HANDOFF_DATA:
    case WIRE_HANDOFF_PLACED:
        pack_pieces(m, c);
        break;
    case WIRE_HANDOFF_COMMIT:
        BT_BUG_ON(m->n_first > WIRE_HANDOFF_MAX_FIRST);
        put(c, m->n_tokens, 4);
        put(c, m->n_first, 4);
        put(c, 0, 4);
        for (uint32_t i = 0; i < m->n_first; i++) {
            put(c, (uint32_t)m->first[i], 4);
        }
        break;
    case WIRE_HANDOFF_RESEND:
        put(c, m->layer, 4);
        put(c, m->first_page, 4);
        put(c, m->n_pages, 4);
        put(c, m->generation, 4);
        break;
    case WIRE_HANDOFF_ACK:
    case WIRE_HANDOFF_ACKED:
    case WIRE_HANDOFF_ABORTED:
        put(c, 0, 4);
        break;
    case WIRE_HANDOFF_REACHED:
        put(c, 0, 4);
        put(c, m->reached, 8);
        break;
    }
}

size_t wire_handoff_pack(const struct wire_handoff *m, char *buf)
{
    struct cursor c = {.p = (uint8_t *)buf, .n = WIRE_HANDOFF_MAX_HEAD};
    size_t end;

    put(&c, WIRE_HANDOFF_MAGIC, 2);
    put(&c, m->version ? m->version : WIRE_HANDOFF_VERSION, 1);
    put(&c, m->type, 1);
    put(&c, 0, 4);
    if (has_id(m->type)) {
        put(&c, m->id_hi, 8);
        put(&c, m->id_lo, 8);
        put(&c, m->ticket, 4);
    }
    pack_rest(m, &c);
    end = c.at;
    c.at = 4;
    put(&c, end, 4);
    return end;
}

/* ---- unpack ---- */

static void unpack_hello(struct cursor *c, struct wire_handoff *m)
{
    struct bt_str compat;
    size_t name_n, key_n;

    m->version_min = (uint16_t)get(c, 2);
    m->version_max = (uint16_t)get(c, 2);
    m->page_tokens = get32(c);
    m->n_layers = get32(c);
    m->n_kv_heads = get32(c);
    m->head_dim = get32(c);
    m->dtype = get32(c);
    m->pool_pages = get32(c);
    m->method = (uint8_t)get(c, 1);
    get_zero(c, 3);
    m->incarnation = get(c, 8);
    m->base = get(c, 8);
    compat = get_str(c, sizeof(m->compat), sizeof(m->compat));
    if (compat.n) {
        memcpy(m->compat, compat.p, compat.n);
    }
    name_n = (size_t)get(c, 2);
    key_n = (size_t)get(c, 2);
    get_zero(c, 4);
    m->name = get_str(c, name_n, WIRE_HANDOFF_MAX_NAME);
    m->key = get_str(c, key_n, WIRE_HANDOFF_MAX_KEY);
    if (m->version_min > m->version_max || m->version_min == 0 || m->page_tokens < 8 ||
        m->page_tokens > 256 || (m->page_tokens & (m->page_tokens - 1)) || m->n_layers == 0 ||
        m->n_kv_heads == 0 || m->head_dim == 0 || m->pool_pages == 0 || m->name.n == 0 ||
        (m->method > 2 && m->method != WIRE_HANDOFF_NO_METHOD)) {
        c->bad = true;
    }
}

static void unpack_text(struct cursor *c, struct wire_handoff *m)
{
    size_t n;

    m->rc = (int32_t)get32(c);
    n = (size_t)get(c, 2);
    get_zero(c, 2);
    m->text = get_str(c, n, WIRE_HANDOFF_MAX_TEXT);
    if (m->rc >= 0) {
        c->bad = true;
    }
}

static void unpack_pieces(struct cursor *c, struct wire_handoff *m)
{
    m->layer = get32(c);
    m->first_page = get32(c);
    m->n_pieces = (uint32_t)get(c, 2);
    m->flags = (uint16_t)get(c, 2);
    if (m->n_pieces == 0 || m->n_pieces > WIRE_HANDOFF_MAX_PIECES ||
        (m->type != WIRE_HANDOFF_ANNOUNCE && m->n_pieces != 1) || m->flags > WIRE_HANDOFF_AGAIN ||
        (m->flags && m->n_pieces != 1)) {
        c->bad = true;
        m->n_pieces = 0;
        return;
    }
    for (uint32_t i = 0; i < m->n_pieces; i++) {
        m->pieces[i].page = get32(c);
        m->pieces[i].generation = get32(c);
        m->pieces[i].n_pages = get32(c);
        get_zero(c, 4);
        m->pieces[i].sum = get(c, 8);
        if (m->pieces[i].n_pages == 0) {
            c->bad = true;
        }
    }
    if (m->type == WIRE_HANDOFF_DATA) {
        m->offset = get32(c);
        get_zero(c, 4);
    }
}

static void unpack_ticket2(struct cursor *c, struct wire_handoff *m)
{
    static const uint8_t zero[sizeof(m->root)];
    struct bt_str root;
    size_t name_n, address_n;

    m->n_have = get32(c);
    m->block_tokens = get32(c);
    m->origin_incarnation = get(c, 8);
    root = get_str(c, sizeof(m->root), sizeof(m->root));
    if (root.n) {
        memcpy(m->root, root.p, root.n);
    }
    name_n = (size_t)get(c, 2);
    address_n = (size_t)get(c, 2);
    get_zero(c, 4);
    m->origin_name = get_str(c, name_n, WIRE_HANDOFF_MAX_NAME);
    m->origin_address = get_str(c, address_n, WIRE_HANDOFF_MAX_ADDRESS);
    if (m->n_have > m->n_tokens || (name_n == 0) != (address_n == 0) ||
        (name_n == 0 &&
         (m->block_tokens || m->origin_incarnation || memcmp(m->root, zero, sizeof(zero)) != 0))) {
        c->bad = true;
    }
}

static void unpack_ticket(struct cursor *c, struct wire_handoff *m)
{
    uint32_t key_n;

    m->n_tokens = get32(c);
    m->method = (uint8_t)get(c, 1);
    get_zero(c, 3);
    m->n_pages = get32(c);
    key_n = get32(c);
    get_zero(c, 4);
    m->key = get_str(c, key_n, WIRE_HANDOFF_MAX_KEY);
    if (m->version >= 2) {
        unpack_ticket2(c, m);
    }
    if (m->method > 2 || m->n_tokens == 0) {
        c->bad = true;
    }
}

static void unpack_commit(struct cursor *c, struct wire_handoff *m)
{
    m->n_tokens = get32(c);
    m->n_first = get32(c);
    get_zero(c, 4);
    if (m->n_first > WIRE_HANDOFF_MAX_FIRST) {
        c->bad = true;
        m->n_first = 0;
    }
    for (uint32_t i = 0; i < m->n_first; i++) {
        m->first[i] = (int32_t)get32(c);
    }
}

static void unpack_rest(struct cursor *c, struct wire_handoff *m)
{
    switch (m->type) {
    case WIRE_HANDOFF_HELLO:
        unpack_hello(c, m);
        break;
    case WIRE_HANDOFF_REFUSE:
    case WIRE_HANDOFF_ABORT:
    case WIRE_HANDOFF_NO:
        unpack_text(c, m);
        break;
    case WIRE_HANDOFF_PING:
    case WIRE_HANDOFF_PONG:
        break;
    case WIRE_HANDOFF_TICKET:
        unpack_ticket(c, m);
        break;
    case WIRE_HANDOFF_ANNOUNCE:
    case WIRE_HANDOFF_DATA:
    case WIRE_HANDOFF_PLACED:
        unpack_pieces(c, m);
        break;
    case WIRE_HANDOFF_COMMIT:
        unpack_commit(c, m);
        break;
    case WIRE_HANDOFF_RESEND:
        m->layer = get32(c);
        m->first_page = get32(c);
        m->n_pages = get32(c);
        m->generation = get32(c);
        break;
    case WIRE_HANDOFF_ACK:
    case WIRE_HANDOFF_ACKED:
    case WIRE_HANDOFF_ABORTED:
        get_zero(c, 4);
        break;
    case WIRE_HANDOFF_REACHED:
        get_zero(c, 4);
        m->reached = get(c, 8);
        c->bad = c->bad || m->version < 3;
        break;
    default:
        c->bad = true;
        break;
    }
}

static const struct head_form form = {.name = "handoff",
                                      .magic = WIRE_HANDOFF_MAGIC,
                                      .version_min = WIRE_HANDOFF_VERSION_MIN,
                                      .version_max = WIRE_HANDOFF_VERSION,
                                      .hello = WIRE_HANDOFF_HELLO,
                                      .refuse = WIRE_HANDOFF_REFUSE};

int wire_handoff_unpack(struct bt_str head, struct wire_handoff *ret, struct bt_err *err)
{
    struct cursor c = {.p = (uint8_t *)(uintptr_t)head.p, .n = head.n};
    struct wire_handoff *m = ret;
    struct head h;
    int rc;

    memset(m, 0, sizeof(*m));
    rc = get_head(&c, &form, &h, err);
    if (rc < 0) {
        return rc;
    }
    m->version = (uint8_t)h.version;
    m->type = (enum wire_handoff_type)h.type;
    if (has_id((int)h.type)) {
        m->id_hi = get(&c, 8);
        m->id_lo = get(&c, 8);
        m->ticket = get32(&c);
    }
    unpack_rest(&c, m);
    if (c.bad || h.bytes != head.n || c.at != c.n) {
        return BT_FAIL(err, BT_E_PEER_PROTOCOL, "malformed handoff message %s of %zu bytes",
                       wire_handoff_type_name((int)h.type), head.n);
    }
    return BT_OK;
}
