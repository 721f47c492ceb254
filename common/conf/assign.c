/* Text of one option to its typed field, and the words that say what an option accepts. */
#include "common/conf/conf_int.h"
#include "common/conf/value.h"
#include "common/thr/time.h"

#include <inttypes.h>
#include <stdlib.h>

void conf_list_free(struct bt_conf_list *list)
{
    for (size_t i = 0; i < list->n; i++) {
        free(list->items[i]);
    }
    free(list->items);
    *list = (struct bt_conf_list){0};
}

static struct bt_str trim(struct bt_str s)
{
    while (s.n > 0 && (s.p[0] == ' ' || s.p[0] == '\t')) {
        s.p++;
        s.n--;
    }
    while (s.n > 0 && (s.p[s.n - 1] == ' ' || s.p[s.n - 1] == '\t')) {
        s.n--;
    }
    return s;
}

/* "a, b" to a list; an empty text is an empty list, an empty item is malformed. */
static int read_list(struct bt_str s, int64_t max, struct bt_conf_list *ret_list)
{
    struct bt_conf_list list = {0};
    int rc;

    s = trim(s);
    while (s.n > 0) {
        const char *comma = memchr(s.p, ',', s.n);
        struct bt_str item = trim((struct bt_str){s.p, comma ? (size_t)(comma - s.p) : s.n});
        char **grown;

        rc = BT_E_FORMAT;
        if (item.n == 0 || (comma && comma == s.p + s.n - 1)) {
            goto fail;
        }
        rc = BT_E_INVALID;
        if ((int64_t)list.n >= max) {
            goto fail;
        }
        rc = BT_E_NOMEM;
        grown = realloc(list.items, (list.n + 1) * sizeof(*list.items));
        if (!grown) {
            goto fail;
        }
        list.items = grown;
        list.items[list.n] = strndup(item.p, item.n);
        if (!list.items[list.n]) {
            goto fail;
        }
        list.n++;
        s.n = comma ? s.n - (size_t)(comma + 1 - s.p) : 0;
        s.p = comma ? comma + 1 : s.p;
    }
    *ret_list = list;
    return BT_OK;

fail:
    conf_list_free(&list);
    return rc;
}

static int read_addr(const struct bt_conf_opt *opt, struct bt_str s)
{
    struct bt_addr a;

    if (s.n == 0 && opt->min == 0) {
        return BT_OK;
    }
    return (int64_t)s.n > opt->max ? BT_E_INVALID : bt_addr_read(s, &a);
}

static int read_enum(const struct bt_conf_opt *opt, struct bt_str s, int *ret_v)
{
    for (int i = 0; opt->names[i]; i++) {
        if (bt_str_eq(s, bt_str_of(opt->names[i]))) {
            *ret_v = i;
            return BT_OK;
        }
    }
    return BT_E_INVALID;
}

static int read_unsigned(const struct bt_conf_opt *opt, struct bt_str s, uint64_t *ret_v)
{
    uint64_t v = 0;
    int rc = opt->type == BT_CONF_T_BYTES ? bt_read_bytes(s, &v) : bt_read_duration(s, &v);

    if (rc == BT_OK && (v < (uint64_t)opt->min || v > (uint64_t)opt->max)) {
        rc = BT_E_INVALID;
    }
    if (rc == BT_OK) {
        *ret_v = v;
    }
    return rc;
}

/* Stores `text` (terminated, owned by the slot) in the field. */
static int store(const struct bt_conf_opt *opt, void *field, char *text)
{
    struct bt_str s = bt_str_of(text);
    struct bt_conf_list list;
    int rc = BT_OK;

    switch (opt->type) {
    case BT_CONF_T_STR:
        rc = (int64_t)s.n < opt->min || (int64_t)s.n > opt->max ? BT_E_INVALID : BT_OK;
        break;
    case BT_CONF_T_ADDR:
        rc = read_addr(opt, s);
        break;
    case BT_CONF_T_INT:
        return bt_read_int(s, opt->min, opt->max, field);
    case BT_CONF_T_BYTES:
    case BT_CONF_T_DURATION:
        return read_unsigned(opt, s, field);
    case BT_CONF_T_BOOL:
        return bt_read_bool(s, field);
    case BT_CONF_T_ENUM:
        return read_enum(opt, s, field);
    case BT_CONF_T_LIST:
        rc = read_list(s, opt->max, &list);
        if (rc == BT_OK) {
            conf_list_free(field);
            *(struct bt_conf_list *)field = list;
        }
        return rc;
    }
    if (rc == BT_OK) {
        *(char **)field = text;
    }
    return rc;
}

int conf_assign(struct bt_conf *conf,
                size_t idx,
                struct bt_str text,
                const struct conf_origin *from,
                struct bt_err *err)
{
    const struct bt_conf_opt *opt = &conf->spec.opts[idx];
    struct conf_slot *slot = &conf->slots[idx];
    char *copy = strndup(text.n ? text.p : "", text.n);
    char where[96], allowed[128];
    int rc;

    if (!copy) {
        return BT_FAIL(err, BT_E_NOMEM, "configuration: out of memory");
    }
    rc = store(opt, (char *)conf->spec.out + opt->offset, copy);
    if (rc < 0) {
        conf_origin_text(from, where, sizeof(where));
        conf_allowed(opt, allowed, sizeof(allowed));
        BT_FAIL(err, BT_E_CONFIG, "%s: %s = %.60s: must be %s", where, opt->key,
                opt->flags & BT_CONF_SECRET ? CONF_MASK : copy, allowed);
        free(copy);
        return BT_E_CONFIG;
    }
    free(slot->text);
    slot->text = copy;
    slot->source = from->source;
    return BT_OK;
}

static void text_of_bytes(uint64_t v, char *buf, size_t n)
{
    static const char units[] = "KMGT";
    int u = -1;

    while (v >= 1024 && v % 1024 == 0 && u < 3) {
        v /= 1024;
        u++;
    }
    snprintf(buf, n, "%" PRIu64 "%.*s", v, u >= 0 ? 1 : 0, u >= 0 ? &units[u] : "");
}

static void text_of_ns(uint64_t v, char *buf, size_t n)
{
    bool whole = v % BT_NS_PER_S == 0;

    snprintf(buf, n, "%llu%s", (unsigned long long)(v / (whole ? BT_NS_PER_S : BT_NS_PER_MS)),
             whole ? "s" : "ms");
}

static void allowed_enum(const struct bt_conf_opt *opt, char *buf, size_t n)
{
    size_t at = (size_t)snprintf(buf, n, "one of");

    for (int i = 0; opt->names[i] && at < n; i++) {
        at += (size_t)snprintf(buf + at, n - at, "%s %s", i ? "," : "", opt->names[i]);
    }
}

void conf_allowed(const struct bt_conf_opt *opt, char *buf, size_t n)
{
    char lo[32], hi[32];

    switch (opt->type) {
    case BT_CONF_T_STR:
        snprintf(buf, n, "a text of %" PRId64 " to %" PRId64 " bytes", opt->min, opt->max);
        break;
    case BT_CONF_T_INT:
        snprintf(buf, n, "an integer from %" PRId64 " to %" PRId64, opt->min, opt->max);
        break;
    case BT_CONF_T_BYTES:
        text_of_bytes((uint64_t)opt->min, lo, sizeof(lo));
        text_of_bytes((uint64_t)opt->max, hi, sizeof(hi));
        snprintf(buf, n, "a size from %s to %s (bytes, or with suffix K, M, G, T)", lo, hi);
        break;
    case BT_CONF_T_DURATION:
        text_of_ns((uint64_t)opt->min, lo, sizeof(lo));
        text_of_ns((uint64_t)opt->max, hi, sizeof(hi));
        snprintf(buf, n, "a duration from %s to %s (with unit ms or s)", lo, hi);
        break;
    case BT_CONF_T_BOOL:
        snprintf(buf, n, "true or false");
        break;
    case BT_CONF_T_ENUM:
        allowed_enum(opt, buf, n);
        break;
    case BT_CONF_T_LIST:
        snprintf(buf, n, "up to %" PRId64 " items separated by commas", opt->max);
        break;
    case BT_CONF_T_ADDR:
        snprintf(buf, n, "host:port, [v6]:port or unix:/path%s", opt->min ? "" : ", or empty");
        break;
    }
}

void conf_origin_text(const struct conf_origin *from, char *buf, size_t n)
{
    switch (from->source) {
    case CONF_DEFAULT:
        snprintf(buf, n, "default");
        break;
    case CONF_FILE:
        snprintf(buf, n, "file %.60s line %u", from->name, from->line);
        break;
    case CONF_ENV:
        snprintf(buf, n, "environment");
        break;
    case CONF_FLAG:
        snprintf(buf, n, "flag");
        break;
    }
}

void conf_env_name(const char *key, char *buf, size_t n)
{
    size_t at = (size_t)snprintf(buf, n, "BATON_");

    for (; *key && at + 1 < n; key++) {
        buf[at++] = (char)(*key == '.' ? '_' : *key >= 'a' && *key <= 'z' ? *key - 32 : *key);
    }
    buf[at] = '\0';
}
