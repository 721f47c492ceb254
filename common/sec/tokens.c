/* Token files and the table of their digests. Entries are sorted by digest: a digest is salted with
 * bytes that nobody outside knows, so the path of the search tells nothing; the entry it ends at is
 * compared in constant time. */
#include "common/sec/tokens.h"

#include "common/base/buf.h"

#include <openssl/crypto.h>
#include <openssl/sha.h>
#include <stdlib.h>
#include <strings.h>
#include <sys/random.h>

#define SALT_BYTES 32

struct entry {
    uint8_t digest[SHA256_DIGEST_LENGTH];
    const char *file;
    size_t line;
    struct bt_who who;
};

struct bt_tokens {
    uint8_t salt[SALT_BYTES];
    struct entry *v;
    size_t n, cap;
};

int bt_tokens_create(struct bt_tokens **ret_t, struct bt_err *err)
{
    struct bt_tokens *t = bt_calloc(1, sizeof(*t));

    if (!t) {
        return BT_FAIL(err, BT_E_NOMEM, "tokens: out of memory");
    }
    if (getrandom(t->salt, sizeof(t->salt), 0) != (ssize_t)sizeof(t->salt)) {
        free(t);
        return BT_FAIL_SYS(err, BT_E_SYS, "tokens: no random bytes");
    }
    *ret_t = t;
    return BT_OK;
}

void bt_tokens_destroy(struct bt_tokens *t)
{
    if (t) {
        free(t->v);
        OPENSSL_cleanse(t, sizeof(*t));
        free(t);
    }
}

size_t bt_tokens_n(const struct bt_tokens *t)
{
    return t->n;
}

/* --- lines ----------------------------------------------------------------------------------- */

static bool blank(char c)
{
    return c == ' ' || c == '\t';
}

static bool letter(char c)
{
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9');
}

static bool token_ok(struct bt_str s)
{
    size_t n = s.n;

    while (n > 0 && s.p[n - 1] == '=') {
        n--;
    }
    for (size_t i = 0; i < n; i++) {
        if (!letter(s.p[i]) && (s.p[i] == '\0' || !strchr("-._~+/", s.p[i]))) {
            return false;
        }
    }
    return n > 0 && s.n >= BT_TOKEN_MIN && s.n <= BT_TOKEN_MAX;
}

static bool name_ok(struct bt_str s)
{
    for (size_t i = 0; i < s.n; i++) {
        if (!letter(s.p[i]) && (s.p[i] == '\0' || !strchr("-._", s.p[i]))) {
            return false;
        }
    }
    return s.n < BT_TENANT_MAX;
}

static struct bt_str word(struct bt_str *rest)
{
    struct bt_str w;

    for (; rest->n > 0 && blank(rest->p[0]); rest->p++, rest->n--) {
    }
    w = (struct bt_str){rest->p, 0};
    if (rest->n > 0 && rest->p[0] == '#') {
        rest->n = 0;
    }
    while (w.n < rest->n && !blank(rest->p[w.n])) {
        w.n++;
    }
    rest->p += w.n;
    rest->n -= w.n;
    return w;
}

struct line {
    struct bt_str token, name; /* token.n == 0: none on this line */
};

/* NULL, or what is wrong with the line. */
static const char *read_line(struct bt_str s, struct line *ret)
{
    if (s.n > 0 && s.p[s.n - 1] == '\r') {
        s.n--;
    }
    ret->token = word(&s);
    ret->name = word(&s);
    if (ret->token.n == 0) {
        return NULL;
    }
    if (!token_ok(ret->token)) {
        return "a token has 16 to 512 letters, digits and -._~+/ (RFC 6750)";
    }
    if (!bt_str_eq(ret->name, BT_STR("*")) && !name_ok(ret->name)) {
        return "a name has at most 63 letters, digits, '-', '_', '.', or is *";
    }
    return word(&s).n > 0 ? "more than a token and a name" : NULL;
}

typedef int (*line_fn)(void *arg, const struct line *l, size_t n, struct bt_err *err);

/* Calls fn for every line with a token. */
static int
each_line(const char *name, struct bt_str text, line_fn fn, void *arg, struct bt_err *err)
{
    size_t n = 0, n_tokens = 0;

    if (text.n > BT_TOKEN_FILE_MAX) {
        return BT_FAIL(err, BT_E_CONFIG, "%.100s: more than %u bytes", name, BT_TOKEN_FILE_MAX);
    }
    while (text.n > 0) {
        const char *nl = memchr(text.p, '\n', text.n);
        struct bt_str s = {text.p, nl ? (size_t)(nl - text.p) : text.n};
        const char *why;
        struct line l;
        int rc;

        text.n -= nl ? s.n + 1 : s.n;
        text.p = nl ? nl + 1 : text.p;
        n++;
        why = read_line(s, &l);
        if (why) {
            return BT_FAIL(err, BT_E_CONFIG, "%.100s line %zu: %s", name, n, why);
        }
        if (l.token.n > 0) {
            n_tokens++;
            rc = fn(arg, &l, n, err);
            if (rc < 0) {
                return rc;
            }
        }
    }
    return n_tokens > 0 ? BT_OK : BT_FAIL(err, BT_E_CONFIG, "%.100s: no token in it", name);
}

/* --- table ----------------------------------------------------------------------------------- */

static void digest_of(const struct bt_tokens *t, struct bt_str token, uint8_t *ret)
{
    uint8_t buf[SALT_BYTES + BT_TOKEN_MAX];

    memcpy(buf, t->salt, SALT_BYTES);
    memcpy(buf + SALT_BYTES, token.p, token.n);
    SHA256(buf, SALT_BYTES + token.n, ret);
    OPENSSL_cleanse(buf, sizeof(buf));
}

static int by_digest(const void *a, const void *b)
{
    return memcmp(((const struct entry *)a)->digest, ((const struct entry *)b)->digest,
                  SHA256_DIGEST_LENGTH);
}

struct adding {
    struct bt_tokens *t;
    const char *name;
    unsigned access;
};

static int add_line(void *arg, const struct line *l, size_t n, struct bt_err *err)
{
    const struct adding *a = arg;
    struct bt_tokens *t = a->t;
    struct entry *e;

    if (t->n == t->cap) {
        size_t cap = t->cap ? 2 * t->cap : 16;

        e = realloc(t->v, cap * sizeof(*t->v));
        if (!e) {
            return BT_FAIL(err, BT_E_NOMEM, "tokens: out of memory");
        }
        t->v = e;
        t->cap = cap;
    }
    e = &t->v[t->n++];
    *e = (struct entry){.file = a->name, .line = n, .who.access = a->access};
    e->who.any_tenant = bt_str_eq(l->name, BT_STR("*"));
    if (!e->who.any_tenant) {
        memcpy(e->who.tenant, l->name.p, l->name.n);
    }
    digest_of(t, l->token, e->digest);
    return BT_OK;
}

int bt_tokens_add(
    struct bt_tokens *t, const char *name, struct bt_str text, unsigned access, struct bt_err *err)
{
    struct adding a = {t, name, access};
    int rc = each_line(name, text, add_line, &a, err);

    if (rc < 0) {
        return rc;
    }
    qsort(t->v, t->n, sizeof(*t->v), by_digest);
    for (size_t i = 1; i < t->n; i++) {
        const struct entry *x = &t->v[i - 1], *y = &t->v[i];

        if (by_digest(x, y) == 0) {
            return BT_FAIL(err, BT_E_CONFIG, "%.90s line %zu and %.90s line %zu: the same token",
                           x->file, x->line, y->file, y->line);
        }
    }
    return BT_OK;
}

bool bt_tokens_find(const struct bt_tokens *t, struct bt_str token, struct bt_who *ret_who)
{
    struct entry key;
    size_t lo = 0, hi = t->n;

    if (token.n == 0 || token.n > BT_TOKEN_MAX) {
        return false;
    }
    digest_of(t, token, key.digest);
    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;

        if (by_digest(&t->v[mid], &key) < 0) {
            lo = mid + 1;
        } else {
            hi = mid;
        }
    }
    if (lo == t->n || CRYPTO_memcmp(t->v[lo].digest, key.digest, sizeof(key.digest)) != 0) {
        return false;
    }
    *ret_who = t->v[lo].who;
    return true;
}

/* --- presenting ------------------------------------------------------------------------------ */

static int take_first(void *arg, const struct line *l, size_t n, struct bt_err *err)
{
    struct bt_str *token = arg;

    if (token->n == 0) {
        *token = l->token;
    }
    return BT_OK;
}

int bt_tokens_first(const char *name,
                    struct bt_str text,
                    struct bt_str *ret_token,
                    struct bt_err *err)
{
    struct bt_str token = {NULL, 0};
    int rc = each_line(name, text, take_first, &token, err);

    if (rc == BT_OK) {
        *ret_token = token;
    }
    return rc;
}

struct bt_str bt_token_of_header(struct bt_str v)
{
    static const char scheme[] = "Bearer ";
    size_t n = sizeof(scheme) - 1;

    if (!v.p || v.n <= n || strncasecmp(v.p, scheme, n) != 0) {
        return (struct bt_str){NULL, 0};
    }
    while (n < v.n && v.p[n] == ' ') {
        n++;
    }
    while (v.n > n && blank(v.p[v.n - 1])) {
        v.n--;
    }
    return n < v.n ? (struct bt_str){v.p + n, v.n - n} : (struct bt_str){NULL, 0};
}
