/* Files, what they last held, and what they hold now.
 *
 * Three groups of files are loaded each as a whole: certificates of the ports, certificates towards
 * nodes, tokens. A group that changed is loaded when two looks in a row saw the same files: whoever
 * writes certificate and key one after the other is given the time.
 *
 * `lock` covers the pointers to the snapshots; groups and their stamps belong to the thread that
 * looks. */
#include "common/sec/sec.h"

#include "common/base/buf.h"
#include "common/conf/value.h"
#include "common/obs/log.h"
#include "common/thr/time.h"

#include <openssl/crypto.h>
#include <openssl/ssl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <time.h>

#define N_FILES     4
#define EXPIRY_S    (7 * 86400)
#define EXPIRY_SAYS (24 * 3600 * BT_NS_PER_S)

struct stamp {
    uint64_t dev, ino, size;
    struct timespec written, changed;
};

struct group {
    const char *what; /* in logs */
    const char *files[N_FILES];
    int (*load)(struct bt_sec *s, struct bt_err *err);
    struct stamp tried[N_FILES], seen[N_FILES];
};

struct shared_tokens {
    uint32_t refs; /* atomic */
    struct bt_tokens *table;
    unsigned access_of_files;
    char *bearer; /* NULL = none */
};

struct bt_sec {
    const struct bt_sec_conf *conf;
    struct group groups[3];
    uint64_t next_expiry_ns;

    pthread_mutex_t lock;
    struct bt_pem *server, *peer; /* NULL = none */
    SSL_CTX *http;
    struct shared_tokens *tokens;
    uint64_t version, tokens_version;
};

static bool given(const char *s)
{
    return s && s[0];
}

/* It has the rows of a router: it shows the cluster's token and takes it from nobody. */
static bool is_router(const struct bt_sec_conf *c)
{
    return c->clients_file != NULL;
}

/* --- tokens ---------------------------------------------------------------------------------- */

static void tokens_unref(struct shared_tokens *t)
{
    /* Pairs with the other unrefs: whoever frees sees what they did before. */
    if (t && __atomic_sub_fetch(&t->refs, 1, __ATOMIC_ACQ_REL) == 0) {
        bt_tokens_destroy(t->table);
        if (t->bearer) {
            OPENSSL_cleanse(t->bearer, strlen(t->bearer));
            free(t->bearer);
        }
        free(t);
    }
}

static struct shared_tokens *tokens_get(struct bt_sec *s)
{
    struct shared_tokens *t;

    pthread_mutex_lock(&s->lock);
    t = s->tokens;
    __atomic_fetch_add(&t->refs, 1, __ATOMIC_RELAXED);
    pthread_mutex_unlock(&s->lock);
    return t;
}

/* `bearer`: the first of them is the one that we show. */
static int read_tokens(
    struct shared_tokens *t, const char *path, unsigned access, bool bearer, struct bt_err *err)
{
    struct bt_str text, first;
    char *p;
    int rc;

    if (!given(path)) {
        return BT_OK;
    }
    rc = bt_sec_read_file(path, BT_TOKEN_FILE_MAX, &p, &text.n, err);
    if (rc < 0) {
        return rc;
    }
    text.p = p;
    rc = bt_tokens_add(t->table, path, text, access, err);
    t->access_of_files |= access;
    if (rc == BT_OK && bearer && (rc = bt_tokens_first(path, text, &first, err)) == BT_OK) {
        t->bearer = strndup(first.p, first.n);
        rc = t->bearer ? BT_OK : BT_FAIL(err, BT_E_NOMEM, "tokens: out of memory");
    }
    OPENSSL_cleanse(p, text.n);
    free(p);
    return rc;
}

static int load_tokens(struct bt_sec *s, struct bt_err *err)
{
    struct shared_tokens *t = bt_calloc(1, sizeof(*t)), *old;
    /* At a router it opens nothing; it is read all the same, so that no client has the same one. */
    unsigned cluster = is_router(s->conf) ? 0 : BT_ACCESS_CLUSTER;
    int rc;

    if (!t) {
        return BT_FAIL(err, BT_E_NOMEM, "tokens: out of memory");
    }
    t->refs = 1;
    if ((rc = bt_tokens_create(&t->table, err)) < 0 ||
        (rc = read_tokens(t, s->conf->clients_file, BT_ACCESS_CLIENT, false, err)) < 0 ||
        (rc = read_tokens(t, s->conf->operators_file, BT_ACCESS_OPERATOR, false, err)) < 0 ||
        (rc = read_tokens(t, s->conf->scrapers_file, BT_ACCESS_SCRAPER, false, err)) < 0 ||
        (rc = read_tokens(t, s->conf->cluster_file, cluster, true, err)) < 0) {
        tokens_unref(t);
        return rc;
    }
    pthread_mutex_lock(&s->lock);
    old = s->tokens;
    s->tokens = t;
    s->tokens_version++;
    pthread_mutex_unlock(&s->lock);
    tokens_unref(old);
    return BT_OK;
}

/* --- certificates ---------------------------------------------------------------------------- */

static void swap(struct bt_sec *s, struct bt_pem **where, struct bt_pem *p)
{
    struct bt_pem *old;

    pthread_mutex_lock(&s->lock);
    old = *where;
    p->version = ++s->version;
    *where = p;
    pthread_mutex_unlock(&s->lock);
    bt_pem_unref(old);
}

static int load_http(const struct bt_sec_conf *c, SSL_CTX **ret, struct bt_err *err)
{
    struct bt_pem_files f = {c->cert_file, c->key_file, c->http_client_ca_file};
    struct bt_pem *p;
    int rc = bt_pem_load(&f, &p, err);

    if (rc == BT_OK) {
        rc = bt_pem_server_ctx(p, ret, err);
        bt_pem_unref(p);
    }
    return rc;
}

static int load_server(struct bt_sec *s, struct bt_err *err)
{
    const struct bt_sec_conf *c = s->conf;
    struct bt_pem_files f = {c->cert_file, c->key_file, c->client_ca_file};
    struct bt_pem *p;
    SSL_CTX *http = NULL, *old;
    int rc;

    if (!given(c->cert_file)) {
        return BT_OK;
    }
    rc = bt_pem_load(&f, &p, err);
    if (rc < 0) {
        return rc;
    }
    if (bt_sec_has_tls(s, BT_SEC_HTTP) && (rc = load_http(c, &http, err)) < 0) {
        bt_pem_unref(p);
        return rc;
    }
    swap(s, &s->server, p);
    pthread_mutex_lock(&s->lock);
    old = s->http;
    s->http = http;
    pthread_mutex_unlock(&s->lock);
    SSL_CTX_free(old);
    s->next_expiry_ns = 0;
    return BT_OK;
}

static int load_peer(struct bt_sec *s, struct bt_err *err)
{
    const struct bt_sec_conf *c = s->conf;
    struct bt_pem_files f = {c->node_cert_file, c->node_key_file, c->node_ca_file};
    struct bt_pem *p;
    int rc;

    if (!given(c->node_ca_file)) {
        return BT_OK;
    }
    rc = bt_pem_load(&f, &p, err);
    if (rc == BT_OK) {
        swap(s, &s->peer, p);
    }
    return rc;
}

/* --- looking --------------------------------------------------------------------------------- */

static void stamp_files(const struct group *g, struct stamp ret[N_FILES])
{
    struct stat st;

    memset(ret, 0, N_FILES * sizeof(*ret));
    for (int i = 0; i < N_FILES; i++) {
        if (given(g->files[i]) && stat(g->files[i], &st) == 0) {
            ret[i] = (struct stamp){.dev = st.st_dev,
                                    .ino = st.st_ino,
                                    .size = (uint64_t)st.st_size,
                                    .written = st.st_mtim,
                                    .changed = st.st_ctim};
        }
    }
}

static bool stamps_equal(const struct stamp a[N_FILES], const struct stamp b[N_FILES])
{
    for (int i = 0; i < N_FILES; i++) {
        if (a[i].dev != b[i].dev || a[i].ino != b[i].ino || a[i].size != b[i].size ||
            a[i].written.tv_sec != b[i].written.tv_sec ||
            a[i].written.tv_nsec != b[i].written.tv_nsec ||
            a[i].changed.tv_sec != b[i].changed.tv_sec ||
            a[i].changed.tv_nsec != b[i].changed.tv_nsec) {
            return false;
        }
    }
    return true;
}

static bool in_use(const struct group *g)
{
    for (int i = 0; i < N_FILES; i++) {
        if (given(g->files[i])) {
            return true;
        }
    }
    return false;
}

static int load(struct bt_sec *s, struct group *g, struct bt_err *err)
{
    stamp_files(g, g->tried); /* before: what changes while it is read is looked at again */
    memcpy(g->seen, g->tried, sizeof(g->seen));
    return g->load(s, err);
}

static void reload(struct bt_sec *s, struct group *g)
{
    struct bt_err err = {0};
    char msg[256];
    int rc = load(s, g, &err);

    if (rc < 0) {
        BT_ERROR("reload_refused", "what=%s msg=\"%s: what was loaded before stays\"", g->what,
                 bt_log_quotable(bt_err_msg(&err, rc), msg, sizeof(msg)));
    } else {
        BT_INFO("reload", "what=%s", g->what);
    }
}

/* Says once a day that the ports' certificate ends soon. */
static void check_expiry(struct bt_sec *s)
{
    int64_t left = s->server ? s->server->not_after_s - (int64_t)time(NULL) : EXPIRY_S;
    char subject[160];

    if (bt_now_ns() < s->next_expiry_ns) {
        return;
    }
    s->next_expiry_ns = bt_deadline_ns(EXPIRY_SAYS);
    if (left < EXPIRY_S) {
        BT_WARN("certificate_ends", "hours=%lld subject=\"%s\"", (long long)(left / 3600),
                bt_log_quotable(s->server->subject, subject, sizeof(subject)));
    }
}

bool bt_sec_has_files(const struct bt_sec *s)
{
    return in_use(&s->groups[0]) || in_use(&s->groups[1]) || in_use(&s->groups[2]);
}

void bt_sec_look(struct bt_sec *s, bool now)
{
    struct stamp stamps[N_FILES];

    for (size_t i = 0; i < BT_ARRAY_LEN(s->groups); i++) {
        struct group *g = &s->groups[i];

        if (!in_use(g)) {
            continue;
        }
        stamp_files(g, stamps);
        if (now || (!stamps_equal(stamps, g->tried) && stamps_equal(stamps, g->seen))) {
            reload(s, g);
        }
        memcpy(g->seen, stamps, sizeof(g->seen));
    }
    check_expiry(s);
}

/* --- life ------------------------------------------------------------------------------------ */

static int together(const char *a, const char *b, const char *text, struct bt_err *err)
{
    return given(a) == given(b) ? BT_OK
                                : BT_FAIL(err, BT_E_CONFIG, "%s must be given together", text);
}

static int needs(const char *a, const char *b, const char *text, struct bt_err *err)
{
    return !given(a) || given(b) ? BT_OK : BT_FAIL(err, BT_E_CONFIG, "%s", text);
}

static int check(const struct bt_sec_conf *c, struct bt_err *err)
{
    int rc;

    if ((rc = together(c->cert_file, c->key_file, "tls.cert_file and tls.key_file", err)) < 0 ||
        (rc = needs(c->client_ca_file, c->cert_file, "tls.client_ca_file needs tls.cert_file",
                    err)) < 0 ||
        (rc = together(c->node_cert_file, c->node_key_file,
                       "tls.node_cert_file and tls.node_key_file", err)) < 0 ||
        (rc = needs(c->node_cert_file, c->node_ca_file, "tls.node_cert_file needs tls.node_ca_file",
                    err)) < 0 ||
        (rc = needs(c->node_name, c->node_ca_file, "tls.node_name needs tls.node_ca_file", err)) <
            0) {
        return rc;
    }
    if (given(c->http_client_ca_file) && !(given(c->cert_file) && c->http_tls)) {
        return BT_FAIL(err, BT_E_CONFIG,
                       "http.client_ca_file needs tls.cert_file, and http.tls on");
    }
    return c->client_names.n == 0 || given(c->client_ca_file)
               ? BT_OK
               : BT_FAIL(err, BT_E_CONFIG, "tls.client_names needs tls.client_ca_file");
}

int bt_sec_create(const struct bt_sec_conf *conf, struct bt_sec **ret_s, struct bt_err *err)
{
    struct bt_sec *s;
    int rc = check(conf, err);

    if (rc < 0) {
        return rc;
    }
    s = bt_calloc(1, sizeof(*s));
    if (!s) {
        return BT_FAIL(err, BT_E_NOMEM, "security: out of memory");
    }
    s->conf = conf;
    pthread_mutex_init(&s->lock, NULL);
    s->groups[0] = (struct group){
        .what = "certificates",
        .files = {conf->cert_file, conf->key_file, conf->client_ca_file, conf->http_client_ca_file},
        .load = load_server};
    s->groups[1] =
        (struct group){.what = "node_certificates",
                       .files = {conf->node_ca_file, conf->node_cert_file, conf->node_key_file},
                       .load = load_peer};
    s->groups[2] = (struct group){.what = "tokens",
                                  .files = {conf->clients_file, conf->operators_file,
                                            conf->cluster_file, conf->scrapers_file},
                                  .load = load_tokens};
    for (size_t i = 0; rc == BT_OK && i < BT_ARRAY_LEN(s->groups); i++) {
        rc = load(s, &s->groups[i], err);
    }
    if (rc < 0) {
        bt_sec_destroy(s);
        return rc;
    }
    *ret_s = s;
    return BT_OK;
}

void bt_sec_destroy(struct bt_sec *s)
{
    if (!s) {
        return;
    }
    bt_pem_unref(s->server);
    bt_pem_unref(s->peer);
    SSL_CTX_free(s->http);
    tokens_unref(s->tokens);
    pthread_mutex_destroy(&s->lock);
    free(s);
}

/* --- questions ------------------------------------------------------------------------------- */

static const char *ca_of(const struct bt_sec_conf *c, enum bt_sec_port port)
{
    return port == BT_SEC_HTTP ? c->http_client_ca_file : c->client_ca_file;
}

int bt_sec_check_port(const struct bt_sec_conf *c,
                      enum bt_sec_port port,
                      const char *key,
                      const char *addr,
                      bool allow_insecure,
                      struct bt_err *err)
{
    bool tls = given(c->cert_file) && (port != BT_SEC_HTTP || c->http_tls);
    struct bt_addr a;

    if (bt_addr_read(bt_str_of(addr), &a) < 0) {
        return BT_FAIL(err, BT_E_CONFIG, "%s = %.60s: must be host:port", key, addr);
    }
    if (bt_addr_is_loopback(&a)) {
        return BT_OK;
    }
    if (!tls && !allow_insecure) {
        return BT_FAIL(err, BT_E_CONFIG,
                       "%s = %.60s: not a loopback address: give it tls.cert_file and "
                       "tls.key_file; without encryption this needs allow_insecure = true",
                       key, addr);
    }
    if (!given(c->clients_file) && !given(c->operators_file) &&
        (is_router(c) || !given(c->cluster_file)) && !given(ca_of(c, port)) &&
        !c->allow_anonymous) {
        return BT_FAIL(err, BT_E_CONFIG,
                       "%s = %.60s: not a loopback address, and anybody could call: give tokens "
                       "(security.%s_file), require certificates (%s), or set "
                       "security.allow_anonymous = on",
                       key, addr, is_router(c) ? "clients" : "cluster",
                       port == BT_SEC_HTTP ? "http.client_ca_file" : "tls.client_ca_file");
    }
    return BT_OK;
}

bool bt_sec_has_tls(const struct bt_sec *s, enum bt_sec_port port)
{
    return given(s->conf->cert_file) && (port != BT_SEC_HTTP || s->conf->http_tls);
}

bool bt_sec_wants_cert(const struct bt_sec *s, enum bt_sec_port port)
{
    return bt_sec_has_tls(s, port) && given(ca_of(s->conf, port));
}

static struct bt_pem *pem_get(struct bt_sec *s, struct bt_pem **where)
{
    struct bt_pem *p;

    pthread_mutex_lock(&s->lock);
    p = *where ? bt_pem_ref(*where) : NULL;
    pthread_mutex_unlock(&s->lock);
    return p;
}

struct bt_pem *bt_sec_server(struct bt_sec *s)
{
    return pem_get(s, &s->server);
}

struct bt_pem *bt_sec_peer(struct bt_sec *s)
{
    return pem_get(s, &s->peer);
}

uint64_t bt_sec_peer_version(struct bt_sec *s)
{
    uint64_t v;

    pthread_mutex_lock(&s->lock);
    v = s->peer ? s->peer->version : 0;
    pthread_mutex_unlock(&s->lock);
    return v;
}

const char *bt_sec_peer_name(const struct bt_sec *s)
{
    return given(s->conf->node_name) ? s->conf->node_name : "";
}

SSL_CTX *bt_sec_http(struct bt_sec *s)
{
    SSL_CTX *ctx;

    pthread_mutex_lock(&s->lock);
    ctx = s->http;
    if (ctx) {
        SSL_CTX_up_ref(ctx);
    }
    pthread_mutex_unlock(&s->lock);
    return ctx;
}

bool bt_sec_shows_plain(const struct bt_sec *s)
{
    return given(s->conf->cluster_file) && !given(s->conf->node_ca_file);
}

uint64_t bt_sec_tokens_version(struct bt_sec *s)
{
    uint64_t v;

    if (!in_use(&s->groups[2])) {
        return 0;
    }
    pthread_mutex_lock(&s->lock);
    v = s->tokens_version;
    pthread_mutex_unlock(&s->lock);
    return v;
}

bool bt_sec_ends_revoked(const struct bt_sec *s)
{
    return s->conf->end_revoked;
}

bool bt_sec_bearer(struct bt_sec *s, char *ret, size_t n)
{
    struct shared_tokens *t = tokens_get(s);
    bool there = t->bearer != NULL;

    ret[0] = '\0';
    if (there) {
        snprintf(ret, n, "Bearer %s", t->bearer);
    }
    tokens_unref(t);
    return there;
}

bool bt_sec_checks_names(const struct bt_sec *s)
{
    return s->conf->client_names.n > 0;
}

bool bt_sec_name_ok(const struct bt_sec *s, struct bt_str name)
{
    const struct bt_conf_list *l = &s->conf->client_names;

    for (size_t i = 0; i < l->n; i++) {
        if (bt_str_eq(name, bt_str_of(l->items[i]))) {
            return true;
        }
    }
    return l->n == 0;
}

/* What everybody on the port may do, without a token. */
static unsigned open_access(const struct bt_sec *s, unsigned of_files, enum bt_sec_port port)
{
    unsigned access = 0;

    if (bt_sec_wants_cert(s, port)) {
        access = (is_router(s->conf) ? BT_ACCESS_CLIENT : BT_ACCESS_CLUSTER) & ~of_files;
    } else if (of_files == 0) {
        access = BT_ACCESS_ANY; /* bt_sec_check_port has seen to it that this is right */
    }
    return s->conf->allow_anonymous ? access | (BT_ACCESS_ANY & ~of_files) : access;
}

int bt_sec_authorize(struct bt_sec *s,
                     const struct bt_sec_ask *ask,
                     struct bt_who *ret_who,
                     struct bt_err *err)
{
    struct bt_who who = {.access = BT_ACCESS_ANY, .any_tenant = true}, of_token;
    struct bt_str token = bt_token_of_header(ask->authorization);
    struct shared_tokens *t;
    bool known = false;

    if (s) {
        t = tokens_get(s);
        who.access = open_access(s, t->access_of_files, ask->port);
        known = token.n > 0 && bt_tokens_find(t->table, token, &of_token);
        tokens_unref(t);
    }
    if (known) {
        of_token.any_tenant |= !(of_token.access & BT_ACCESS_CLIENT); /* its name is no tenant */
        of_token.access |= who.access;
        who = of_token;
    }
    *ret_who = who;
    if ((ask->access & BT_ACCESS_OPEN) || (ask->access & who.access)) {
        return BT_OK;
    }
    if (known) {
        return BT_FAIL(err, BT_E_DENIED, "this token is not for that");
    }
    return token.n > 0 ? BT_FAIL(err, BT_E_UNAUTHENTICATED, "nobody has this token")
                       : BT_FAIL(err, BT_E_UNAUTHENTICATED, "a bearer token is needed");
}
