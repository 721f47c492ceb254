/* Text form of a member, checked on reading; snapshots. Any thread; no I/O. */
#include "common/cluster/member.h"

#include "common/conf/value.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/random.h>
#include <time.h>

static const char *const role_names[] = {"unknown", "prefill", "decode",
                                         "both",    "router",  "kvstore"};

const char *bt_role_name(enum bt_role role)
{
    return (size_t)role < BT_ARRAY_LEN(role_names) ? role_names[role] : role_names[0];
}

enum bt_role bt_role_parse(struct bt_str s)
{
    for (size_t i = 1; i < BT_ARRAY_LEN(role_names); i++) {
        if (bt_str_eq(s, bt_str_of(role_names[i]))) {
            return (enum bt_role)i;
        }
    }
    return BT_ROLE_UNKNOWN;
}

bool bt_member_name_ok(struct bt_str name)
{
    if (name.n == 0 || name.n > BT_MEMBER_NAME_MAX) {
        return false;
    }
    for (size_t i = 0; i < name.n; i++) {
        char c = name.p[i], low = (char)(c | 0x20);

        if (!(low >= 'a' && low <= 'z') && !(c >= '0' && c <= '9') && c != '-' && c != '_' &&
            c != '.') {
            return false;
        }
    }
    return true;
}

bool bt_member_equal(const struct bt_member *a, const struct bt_member *b)
{
    return strcmp(a->name, b->name) == 0 && a->incarnation == b->incarnation &&
           a->role == b->role && a->draining == b->draining && a->seed == b->seed &&
           strcmp(a->grpc_addr, b->grpc_addr) == 0 && strcmp(a->net_addr, b->net_addr) == 0 &&
           strcmp(a->store_addr, b->store_addr) == 0 &&
           memcmp(a->model, b->model, sizeof(a->model)) == 0 &&
           memcmp(a->compat, b->compat, sizeof(a->compat)) == 0 &&
           a->weight_epoch == b->weight_epoch;
}

/* --- text form ------------------------------------------------------------------------------- */

static void hex32(const uint8_t bytes[32], char ret_hex[65])
{
    for (int i = 0; i < 32; i++) {
        snprintf(ret_hex + 2 * i, 3, "%02x", bytes[i]);
    }
}

int bt_member_encode(const struct bt_member *m, struct bt_buf *to)
{
    char model[65], compat[65];
    int rc;

    hex32(m->model, model);
    hex32(m->compat, compat);
    rc = bt_buf_printf(to,
                       "v=1\nname=%s\nincarnation=%016" PRIx64 "\nrole=%s\nstate=%s\ngrpc=%s\n"
                       "net=%s\nmodel=%s\ncompat=%s\nweight_epoch=%" PRIu64 "\n",
                       m->name, m->incarnation, bt_role_name(m->role),
                       m->draining ? "draining" : "ready", m->grpc_addr, m->net_addr, model, compat,
                       m->weight_epoch);
    if (rc == BT_OK && m->store_addr[0]) {
        rc = bt_buf_printf(to, "store=%s\n", m->store_addr);
    }
    return rc;
}

/* host:port with a port, short enough for the field. */
static int read_host_port(struct bt_str s, char ret_addr[BT_MEMBER_ADDR_MAX + 1])
{
    struct bt_addr a;

    if (s.n > BT_MEMBER_ADDR_MAX || bt_addr_read(s, &a) < 0 || a.is_unix || a.port == 0) {
        return BT_E_FORMAT;
    }
    memcpy(ret_addr, s.p, s.n);
    ret_addr[s.n] = '\0';
    return BT_OK;
}

static int read_hex_u64(struct bt_str s, uint64_t *ret_v)
{
    uint8_t b[8];
    uint64_t v = 0;

    if (bt_read_hex(s, b, sizeof(b)) < 0) {
        return BT_E_FORMAT;
    }
    for (size_t i = 0; i < sizeof(b); i++) {
        v = v << 8 | b[i];
    }
    *ret_v = v;
    return BT_OK;
}

enum field {
    F_V,
    F_NAME,
    F_INC,
    F_ROLE,
    F_STATE,
    F_GRPC,
    F_NET,
    F_MODEL,
    F_COMPAT,
    F_EPOCH,
    F_STORE,
    N_F
};

#define NEEDED ((1u << F_STORE) - 1) /* the fields of every record; later ones came later */

static const char *const field_names[N_F] = {"v",      "name",         "incarnation", "role",
                                             "state",  "grpc",         "net",         "model",
                                             "compat", "weight_epoch", "store"};

static int read_field(enum field f, struct bt_str v, struct bt_member *m)
{
    switch (f) {
    case F_V:
        return bt_str_eq(v, BT_STR("1")) ? BT_OK : BT_E_FORMAT;
    case F_NAME:
        return bt_str_eq(v, bt_str_of(m->name)) ? BT_OK : BT_E_FORMAT;
    case F_INC:
        return read_hex_u64(v, &m->incarnation) == BT_OK && m->incarnation ? BT_OK : BT_E_FORMAT;
    case F_ROLE:
        m->role = bt_role_parse(v);
        return m->role == BT_ROLE_UNKNOWN ? BT_E_FORMAT : BT_OK;
    case F_STATE:
        m->draining = bt_str_eq(v, BT_STR("draining"));
        return m->draining || bt_str_eq(v, BT_STR("ready")) ? BT_OK : BT_E_FORMAT;
    case F_GRPC:
        return read_host_port(v, m->grpc_addr);
    case F_NET:
        return v.n == 0 ? BT_OK : read_host_port(v, m->net_addr);
    case F_STORE:
        return v.n == 0 ? BT_OK : read_host_port(v, m->store_addr);
    case F_MODEL:
        return bt_read_hex(v, m->model, sizeof(m->model));
    case F_COMPAT:
        return bt_read_hex(v, m->compat, sizeof(m->compat));
    case F_EPOCH:
        return bt_read_u64(v, &m->weight_epoch);
    case N_F:
        break;
    }
    return BT_E_FORMAT;
}

static int field_of(struct bt_str key)
{
    for (int f = 0; f < N_F; f++) {
        if (bt_str_eq(key, bt_str_of(field_names[f]))) {
            return f;
        }
    }
    return -1;
}

int bt_member_decode(struct bt_str name,
                     struct bt_str text,
                     struct bt_member *ret_m,
                     struct bt_err *err)
{
    struct bt_member m = {0};
    unsigned seen = 0;

    if (!bt_member_name_ok(name)) {
        return BT_FAIL(err, BT_E_FORMAT, "member: bad name");
    }
    if (text.n > BT_MEMBER_RECORD_MAX) {
        return BT_FAIL(err, BT_E_FORMAT, "member: record of more than %d bytes",
                       BT_MEMBER_RECORD_MAX);
    }
    memcpy(m.name, name.p, name.n);
    while (text.n > 0) {
        const char *nl = memchr(text.p, '\n', text.n);
        size_t n = nl ? (size_t)(nl - text.p) : text.n;
        const char *eq = memchr(text.p, '=', n);
        size_t key_n = eq ? (size_t)(eq - text.p) : n;
        int f = field_of((struct bt_str){text.p, key_n});

        if (!eq) {
            return BT_FAIL(err, BT_E_FORMAT, "member: a line without '='");
        }
        if (f >= 0) {
            if (seen & 1u << f) {
                return BT_FAIL(err, BT_E_FORMAT, "member: %s twice", field_names[f]);
            }
            seen |= 1u << f;
            if (read_field((enum field)f, (struct bt_str){eq + 1, n - key_n - 1}, &m) < 0) {
                return BT_FAIL(err, BT_E_FORMAT, "member: bad %s", field_names[f]);
            }
        }
        text.p += nl ? n + 1 : n;
        text.n -= nl ? n + 1 : n;
    }
    if ((seen & NEEDED) != NEEDED) {
        return BT_FAIL(err, BT_E_FORMAT, "member: %s is missing",
                       field_names[__builtin_ctz(~seen)]);
    }
    *ret_m = m;
    return BT_OK;
}

int bt_member_read_seed(struct bt_str text, struct bt_member *ret_m, struct bt_err *err)
{
    struct bt_member m = {.seed = true};
    const char *at = text.n ? memchr(text.p, '@', text.n) : NULL;
    struct bt_str addr = text;

    if (at) {
        struct bt_str name = {text.p, (size_t)(at - text.p)};

        if (!bt_member_name_ok(name)) {
            goto bad;
        }
        memcpy(m.name, name.p, name.n);
        addr = (struct bt_str){at + 1, text.n - name.n - 1};
    }
    if (read_host_port(addr, m.grpc_addr) < 0) {
        goto bad;
    }
    *ret_m = m;
    return BT_OK;

bad:
    return BT_FAIL(err, BT_E_CONFIG, "seed \"%.*s\": must be host:port or name@host:port",
                   (int)BT_MIN(text.n, (size_t)80), text.n ? text.p : "");
}

uint64_t bt_incarnation_make(void)
{
    struct timespec ts;
    uint64_t ms, low = 0;

    clock_gettime(CLOCK_REALTIME, &ts);
    ms = (uint64_t)ts.tv_sec * 1000 + (uint64_t)ts.tv_nsec / 1000000;
    if (getrandom(&low, sizeof(low), 0) != (ssize_t)sizeof(low)) {
        low = (uint64_t)ts.tv_nsec;
    }
    return ms << 20 | (low & 0xfffff) | 1;
}

/* --- snapshots ------------------------------------------------------------------------------- */

struct bt_members *bt_members_ref(struct bt_members *ms)
{
    __atomic_fetch_add(&ms->refs, 1, __ATOMIC_RELAXED);
    return ms;
}

void bt_members_unref(struct bt_members *ms)
{
    /* acquire-release: whoever frees sees all that others did with it */
    if (ms && __atomic_sub_fetch(&ms->refs, 1, __ATOMIC_ACQ_REL) == 0) {
        free(ms);
    }
}

const struct bt_member *bt_members_find(const struct bt_members *ms, struct bt_str name)
{
    size_t lo = 0, hi = name.n > 0 ? ms->n : 0;

    while (lo < hi) { /* sorted by name, as strcmp has it */
        size_t mid = lo + (hi - lo) / 2, n = strlen(ms->m[mid].name);
        int c = memcmp(ms->m[mid].name, name.p, BT_MIN(n, name.n));

        if (c == 0 && n == name.n) {
            return &ms->m[mid];
        }
        if (c < 0 || (c == 0 && n < name.n)) {
            lo = mid + 1;
        } else {
            hi = mid;
        }
    }
    return NULL;
}

static int by_name(const void *pa, const void *pb)
{
    const struct bt_member *a = pa, *b = pb;
    int c = strcmp(a->name, b->name);

    return c ? c : strcmp(a->grpc_addr, b->grpc_addr);
}

static bool same_place(const struct bt_member *a, const struct bt_member *b)
{
    return (a->name[0] && strcmp(a->name, b->name) == 0) || strcmp(a->grpc_addr, b->grpc_addr) == 0;
}

struct bt_members *bt_members_make(const struct bt_member *reg,
                                   size_t n_reg,
                                   const struct bt_member *seeds,
                                   size_t n_seeds)
{
    struct bt_members *ms =
        bt_calloc(1, sizeof(*ms) + (n_reg + n_seeds) * sizeof(struct bt_member));

    if (!ms) {
        return NULL;
    }
    ms->refs = 1;
    for (size_t i = 0; i < n_reg; i++) {
        ms->m[ms->n++] = reg[i];
    }
    for (size_t i = 0; i < n_seeds; i++) {
        bool known = false;

        for (size_t j = 0; j < ms->n && !known; j++) {
            known = same_place(&seeds[i], &ms->m[j]);
        }
        if (!known) {
            ms->m[ms->n++] = seeds[i];
        }
    }
    qsort(ms->m, ms->n, sizeof(ms->m[0]), by_name);
    return ms;
}

bool bt_members_equal(const struct bt_members *a, const struct bt_members *b)
{
    if (a->n != b->n || a->frozen != b->frozen) {
        return false;
    }
    for (size_t i = 0; i < a->n; i++) {
        if (!bt_member_equal(&a->m[i], &b->m[i])) {
            return false;
        }
    }
    return true;
}
