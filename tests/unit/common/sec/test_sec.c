/* Certificates and tokens of a process: what is refused at the start, who may do what, and the
 * exchange of files under a running process. */
#include "common/sec/sec.h"

#include "common/obs/log.h"
#include "tests/unit/cmocka.h"
#include "tests/unit/common/sec/certs.h"

#include <fcntl.h>
#include <openssl/ssl.h>
#include <pthread.h>
#include <sys/stat.h>
#include <unistd.h>

#define CLIENT   "client-token-aaaaaaa"
#define OPERATOR "operator-token-bbbbb"
#define CLUSTER  "cluster-token-cccccc"
#define DAY      86400l

static char dir[64];

static char *path(const char *name)
{
    static char ring[16][128];
    static int at;
    char *p = ring[at++ % 16];

    snprintf(p, sizeof(ring[0]), "%s/%s", dir, name);
    return p;
}

static char *put(const char *name, const char *text)
{
    char *p = path(name);
    FILE *f = fopen(p, "w");

    assert_non_null(f);
    assert_true(fputs(text, f) >= 0);
    fclose(f);
    return p;
}

static struct test_cert ca, other_ca, leaf, leaf2, expired, early;

static int setup(void **state)
{
    snprintf(dir, sizeof(dir), "/tmp/baton-test-sec.XXXXXX");
    assert_non_null(mkdtemp(dir));
    ca = test_cert_make("test ca", NULL, -DAY, 30 * DAY);
    other_ca = test_cert_make("other ca", NULL, -DAY, 30 * DAY);
    leaf = test_cert_make("node", &ca, -DAY, 30 * DAY);
    leaf2 = test_cert_make("node2", &ca, -DAY, 30 * DAY);
    expired = test_cert_make("expired", &ca, -2 * DAY, -DAY);
    early = test_cert_make("early", &ca, DAY, 2 * DAY);
    test_cert_write(&ca, path("ca.pem"), NULL, NULL);
    test_cert_write(&other_ca, path("other.pem"), NULL, NULL);
    test_cert_write(&leaf, path("cert.pem"), path("key.pem"), NULL);
    test_cert_write(&leaf2, path("cert2.pem"), path("key2.pem"), NULL);
    test_cert_write(&leaf, NULL, path("locked.pem"), "passphrase");
    test_cert_write(&expired, path("expired.pem"), path("expired_key.pem"), NULL);
    test_cert_write(&early, path("early.pem"), path("early_key.pem"), NULL);
    put("clients", CLIENT " team-a\n");
    put("operators", OPERATOR " alice\n");
    put("cluster", CLUSTER "\n");
    return 0;
}

static int teardown(void **state)
{
    char cmd[128];

    test_cert_free(&ca);
    test_cert_free(&other_ca);
    test_cert_free(&leaf);
    test_cert_free(&leaf2);
    test_cert_free(&expired);
    test_cert_free(&early);
    snprintf(cmd, sizeof(cmd), "rm -rf %s", dir);
    return system(cmd);
}

/* --- PEM ------------------------------------------------------------------------------------- */

static void pem_refused(const char *cert, const char *key, const char *ca_file, const char *why)
{
    struct bt_pem_files f = {cert, key, ca_file};
    struct bt_pem *p = NULL;
    struct bt_err err = {0};

    assert_int_equal(bt_pem_load(&f, &p, &err), BT_E_CONFIG);
    assert_null(p);
    if (!strstr(err.msg, why)) {
        fail_msg("\"%s\" is not in \"%s\"", why, err.msg);
    }
}

static void test_pem(void **state)
{
    char *cert = path("cert.pem"), *key = path("key.pem"), *ca_file = path("ca.pem");
    struct bt_pem_files f = {cert, key, ca_file};
    struct bt_pem *p = NULL;
    SSL_CTX *ctx;
    char big[400];

    assert_int_equal(bt_pem_load(&f, &p, NULL), BT_OK);
    assert_non_null(strstr(p->cert, "BEGIN CERTIFICATE"));
    assert_non_null(strstr(p->subject, "node"));
    assert_int_equal(bt_pem_server_ctx(p, &ctx, NULL), BT_OK);
    SSL_CTX_free(ctx);
    bt_pem_unref(p);
    p = NULL;

    pem_refused(path("none.pem"), key, NULL, "No such file");
    pem_refused(dir, key, NULL, "not a plain file");
    pem_refused("/dev/zero", key, NULL, "not a plain file");
    pem_refused(put("empty", ""), key, NULL, "certificate 1");
    pem_refused(put("garbage", "hello\n"), key, NULL, "certificate 1");
    pem_refused(key, key, NULL, "certificate 1");
    pem_refused(cert, cert, NULL, "not a private key");
    pem_refused(cert, path("locked.pem"), NULL, "without a passphrase");
    pem_refused(cert, path("key2.pem"), NULL, "not the one of");
    pem_refused(path("expired.pem"), path("expired_key.pem"), NULL, "has expired");
    pem_refused(path("early.pem"), path("early_key.pem"), NULL, "not valid yet");
    pem_refused(cert, key, put("empty", ""), "certificate 1");
    snprintf(big, sizeof(big), "cat %s/ca.pem %s/garbage > %s/mixed.pem", dir, dir, dir);
    assert_int_equal(system(big), 0);
    f.ca = path("mixed.pem"); /* text between blocks is a comment, as everywhere */
    assert_int_equal(bt_pem_load(&f, &p, NULL), BT_OK);
    bt_pem_unref(p);
    snprintf(big, sizeof(big), "(cat %s/ca.pem; sed 5,6d %s/other.pem) > %s/mixed.pem", dir, dir,
             dir);
    assert_int_equal(system(big), 0);
    pem_refused(cert, key, path("mixed.pem"), "certificate 2");
    assert_int_equal(truncate(path("empty"), BT_PEM_FILE_MAX + 1), 0);
    pem_refused(path("empty"), key, NULL, "more than");
}

/* --- who may do what ------------------------------------------------------------------------- */

static int ask(struct bt_sec *s, enum bt_sec_port port, const char *token, unsigned access)
{
    char value[BT_BEARER_MAX + 8] = "";
    struct bt_who who;
    struct bt_sec_ask a = {.port = port, .access = access};

    if (token) {
        snprintf(value, sizeof(value), "Bearer %s", token);
        a.authorization = bt_str_of(value);
    }
    return bt_sec_authorize(s, &a, &who, NULL);
}

static struct bt_sec *make(const struct bt_sec_conf *c)
{
    struct bt_sec *s = NULL;
    struct bt_err err = {0};

    if (bt_sec_create(c, &s, &err) < 0) {
        fail_msg("%s", err.msg);
    }
    return s;
}

static const char *const tokens[] = {NULL, "wrong-wrong-wrong-wrong", CLIENT, OPERATOR, CLUSTER};
static const unsigned accesses[] = {BT_ACCESS_CLIENT, BT_ACCESS_OPERATOR, BT_ACCESS_CLUSTER,
                                    BT_ACCESS_ANY, BT_ACCESS_OPEN};

/* o = may, u = unauthenticated, d = denied; a row for each token, a column for each access. */
static void matrix(const struct bt_sec_conf *c, enum bt_sec_port port, const char *const rows[5])
{
    struct bt_sec *s = make(c);

    for (size_t i = 0; i < BT_ARRAY_LEN(tokens); i++) {
        for (size_t k = 0; k < BT_ARRAY_LEN(accesses); k++) {
            int rc = ask(s, port, tokens[i], accesses[k]);
            char is = rc == BT_OK ? 'o' : rc == BT_E_UNAUTHENTICATED ? 'u' : 'd';

            if (is != rows[i][k]) {
                fail_msg("token %zu, access %zu: %c instead of %c", i, k, is, rows[i][k]);
            }
        }
    }
    bt_sec_destroy(s);
}

static void test_SEC_01_who_may_do_what(void **state)
{
    char none[] = "";
    struct bt_sec_conf router = {.clients_file = none, .http_tls = true};
    struct bt_sec_conf node = {0};

    matrix(&router, BT_SEC_GRPC, (const char *[]){"ooooo", "ooooo", "ooooo", "ooooo", "ooooo"});
    router.clients_file = path("clients");
    matrix(&router, BT_SEC_GRPC, (const char *[]){"uuuuo", "uuuuo", "oddoo", "uuuuo", "uuuuo"});
    router.operators_file = path("operators");
    matrix(&router, BT_SEC_HTTP, (const char *[]){"uuuuo", "uuuuo", "oddoo", "dodoo", "uuuuo"});
    router.cluster_file = path("cluster"); /* shown, not taken */
    matrix(&router, BT_SEC_HTTP, (const char *[]){"uuuuo", "uuuuo", "oddoo", "dodoo", "ddddo"});
    router.clients_file = none;
    router.allow_anonymous = true; /* for what has no file; operators have theirs */
    matrix(&router, BT_SEC_GRPC, (const char *[]){"ouooo", "ouooo", "ouooo", "ooooo", "odooo"});
    router = (struct bt_sec_conf){.clients_file = none, .cluster_file = path("cluster")};
    matrix(&router, BT_SEC_GRPC, (const char *[]){"ooooo", "ooooo", "ooooo", "ooooo", "ooooo"});

    node.cluster_file = path("cluster");
    matrix(&node, BT_SEC_GRPC, (const char *[]){"uuuuo", "uuuuo", "uuuuo", "uuuuo", "ddooo"});
    node.operators_file = path("operators");
    matrix(&node, BT_SEC_GRPC, (const char *[]){"uuuuo", "uuuuo", "uuuuo", "dodoo", "ddooo"});
    node.cluster_file = NULL;
    node.operators_file = NULL;
    node.cert_file = path("cert.pem");
    node.key_file = path("key.pem");
    node.client_ca_file = path("ca.pem"); /* a certificate makes a router, no operator */
    matrix(&node, BT_SEC_GRPC, (const char *[]){"uuooo", "uuooo", "uuooo", "uuooo", "uuooo"});
    node.cluster_file = path("cluster"); /* both are needed then */
    matrix(&node, BT_SEC_GRPC, (const char *[]){"uuuuo", "uuuuo", "uuuuo", "uuuuo", "ddooo"});
}

static void test_tenants(void **state)
{
    struct bt_sec_conf c = {.clients_file = put("tenants", CLIENT " team-a\n" CLUSTER " *\n"),
                            .operators_file = path("operators")};
    struct bt_sec *s = make(&c);
    struct bt_sec_ask a = {.access = BT_ACCESS_ANY, .authorization = BT_STR("Bearer " CLIENT)};
    struct bt_who who;

    assert_int_equal(bt_sec_authorize(s, &a, &who, NULL), BT_OK);
    assert_string_equal(who.tenant, "team-a");
    assert_false(who.any_tenant);
    a.authorization = BT_STR("Bearer " CLUSTER);
    assert_int_equal(bt_sec_authorize(s, &a, &who, NULL), BT_OK);
    assert_true(who.any_tenant);
    a.authorization = BT_STR("Bearer " OPERATOR);
    assert_int_equal(bt_sec_authorize(s, &a, &who, NULL), BT_OK);
    assert_int_equal(who.access, BT_ACCESS_OPERATOR);
    bt_sec_destroy(s);
    assert_int_equal(bt_sec_authorize(NULL, &a, &who, NULL), BT_OK);
    assert_true(who.any_tenant);
}

static void test_names(void **state)
{
    char *names[] = {(char *)(uintptr_t) "router-0", (char *)(uintptr_t) "router-1"};
    struct bt_sec_conf c = {.cert_file = path("cert.pem"),
                            .key_file = path("key.pem"),
                            .client_ca_file = path("ca.pem")};
    struct bt_sec *s = make(&c);

    assert_true(bt_sec_name_ok(s, BT_STR("anybody")));
    assert_false(bt_sec_checks_names(s));
    bt_sec_destroy(s);
    c.client_names = (struct bt_conf_list){names, 2};
    s = make(&c);
    assert_true(bt_sec_checks_names(s));
    assert_true(bt_sec_name_ok(s, BT_STR("router-1")));
    assert_false(bt_sec_name_ok(s, BT_STR("router")));
    assert_false(bt_sec_name_ok(s, BT_STR("router-10")));
    bt_sec_destroy(s);
}

/* --- start ----------------------------------------------------------------------------------- */

static void refused(struct bt_sec_conf c, const char *why)
{
    struct bt_sec *s = NULL;
    struct bt_err err = {0};

    assert_int_equal(bt_sec_create(&c, &s, &err), BT_E_CONFIG);
    assert_null(s);
    if (!strstr(err.msg, why)) {
        fail_msg("\"%s\" is not in \"%s\"", why, err.msg);
    }
}

static void test_start_is_refused(void **state)
{
    char *cert = path("cert.pem"), *key = path("key.pem"), *ca_file = path("ca.pem");
    char *names[] = {cert};

    refused((struct bt_sec_conf){.cert_file = cert}, "tls.key_file");
    refused((struct bt_sec_conf){.key_file = key}, "tls.cert_file");
    refused((struct bt_sec_conf){.client_ca_file = ca_file}, "tls.client_ca_file needs");
    refused((struct bt_sec_conf){.node_cert_file = cert, .node_ca_file = ca_file},
            "tls.node_key_file");
    refused((struct bt_sec_conf){.node_cert_file = cert, .node_key_file = key}, "tls.node_ca_file");
    refused((struct bt_sec_conf){.node_name = cert}, "tls.node_ca_file");
    refused(
        (struct bt_sec_conf){.cert_file = cert, .key_file = key, .http_client_ca_file = ca_file},
        "http.tls");
    refused((struct bt_sec_conf){.client_names = {names, 1}}, "tls.client_ca_file");
    refused((struct bt_sec_conf){.cert_file = cert, .key_file = path("key2.pem")},
            "not the one of");
    refused((struct bt_sec_conf){.clients_file = path("nobody")}, "No such file");
    refused(
        (struct bt_sec_conf){.clients_file = path("clients"), .operators_file = path("clients")},
        "the same token");
    refused((struct bt_sec_conf){.clients_file = path("cluster"), .cluster_file = path("cluster")},
            "the same token");
}

static int
port_rc(struct bt_sec_conf c, enum bt_sec_port port, const char *addr, bool plain, char *msg)
{
    struct bt_err err = {0};
    int rc = bt_sec_check_port(&c, port, "listen", addr, plain, &err);

    snprintf(msg, 256, "%s", err.msg);
    return rc;
}

static void test_SEC_01_off_loopback_is_refused(void **state)
{
    char none[] = "", msg[256], *cert = path("cert.pem"), *file = path("clients");
    struct bt_sec_conf c = {.clients_file = none, .cert_file = none, .http_tls = true};
    static const char *const near[] = {"127.0.0.1:1", "[::1]:1", "localhost:1", "unix:/x"};
    static const char *const far[] = {"0.0.0.0:1", "[::]:1", "10.0.0.7:1", "node:1"};

    for (size_t i = 0; i < BT_ARRAY_LEN(near); i++) {
        assert_int_equal(port_rc(c, BT_SEC_GRPC, near[i], false, msg), BT_OK);
    }
    for (size_t i = 0; i < BT_ARRAY_LEN(far); i++) {
        c.clients_file = file;
        c.cert_file = none;
        assert_int_equal(port_rc(c, BT_SEC_GRPC, far[i], false, msg), BT_E_CONFIG);
        assert_non_null(strstr(msg, "tls.cert_file"));
        assert_non_null(strstr(msg, "allow_insecure"));
        assert_int_equal(port_rc(c, BT_SEC_GRPC, far[i], true, msg), BT_OK);
        c.cert_file = cert;
        assert_int_equal(port_rc(c, BT_SEC_GRPC, far[i], false, msg), BT_OK);
        assert_int_equal(port_rc(c, BT_SEC_HTTP, far[i], false, msg), BT_OK);
        c.http_tls = false;
        assert_int_equal(port_rc(c, BT_SEC_HTTP, far[i], false, msg), BT_E_CONFIG);
        c.http_tls = true;
        c.clients_file = none;
        c.cluster_file = file; /* a router shows it: it keeps nobody out */
        assert_int_equal(port_rc(c, BT_SEC_GRPC, far[i], true, msg), BT_E_CONFIG);
        assert_non_null(strstr(msg, "security.clients_file"));
        assert_non_null(strstr(msg, "security.allow_anonymous"));
        c.clients_file = NULL; /* a node takes it */
        assert_int_equal(port_rc(c, BT_SEC_GRPC, far[i], false, msg), BT_OK);
        c.cluster_file = NULL;
        assert_int_equal(port_rc(c, BT_SEC_GRPC, far[i], true, msg), BT_E_CONFIG);
        assert_non_null(strstr(msg, "security.cluster_file"));
        c.client_ca_file = cert;
        assert_int_equal(port_rc(c, BT_SEC_GRPC, far[i], false, msg), BT_OK);
        assert_int_equal(port_rc(c, BT_SEC_HTTP, far[i], false, msg), BT_E_CONFIG);
        c.client_ca_file = NULL;
        c.allow_anonymous = true;
        assert_int_equal(port_rc(c, BT_SEC_GRPC, far[i], false, msg), BT_OK);
        c.allow_anonymous = false;
    }
    assert_int_equal(port_rc(c, BT_SEC_GRPC, "nonsense", true, msg), BT_E_CONFIG);
}

/* --- exchange -------------------------------------------------------------------------------- */

/* Lines that were logged, while `fn` ran. */
static void log_of(struct bt_sec *s, bool now, int n_looks, char *ret, size_t cap)
{
    int saved = dup(2), fd = open(path("log"), O_RDWR | O_CREAT | O_TRUNC, 0600);
    ssize_t n;

    assert_true(saved >= 0 && fd >= 0);
    dup2(fd, 2);
    for (int i = 0; i < n_looks; i++) {
        bt_sec_look(s, now);
    }
    dup2(saved, 2);
    n = pread(fd, ret, cap - 1, 0);
    ret[n > 0 ? n : 0] = '\0';
    close(saved);
    close(fd);
}

static void test_tokens_are_exchanged(void **state)
{
    struct bt_sec_conf c = {.clients_file = put("live", CLIENT "\n")};
    struct bt_sec *s = make(&c);
    uint64_t version = bt_sec_tokens_version(s);
    char log[4096];

    assert_true(version > 0);
    assert_false(bt_sec_ends_revoked(s));
    log_of(s, false, 3, log, sizeof(log));
    assert_string_equal(log, ""); /* nothing has changed */
    put("live", "another-client-token\n");
    assert_int_equal(ask(s, BT_SEC_GRPC, CLIENT, BT_ACCESS_CLIENT), BT_OK);
    log_of(s, false, 1, log, sizeof(log));
    assert_string_equal(log, ""); /* it may still be written to */
    assert_true(bt_sec_tokens_version(s) == version);
    log_of(s, false, 1, log, sizeof(log));
    assert_non_null(strstr(log, "event=reload what=tokens"));
    assert_int_equal(ask(s, BT_SEC_GRPC, CLIENT, BT_ACCESS_CLIENT), BT_E_UNAUTHENTICATED);
    assert_int_equal(ask(s, BT_SEC_GRPC, "another-client-token", BT_ACCESS_CLIENT), BT_OK);
    assert_true(bt_sec_tokens_version(s) != version);
    version = bt_sec_tokens_version(s);

    put("live", "canary-token-canary !\n"); /* broken: the old ones stay, it is said once */
    log_of(s, false, 5, log, sizeof(log));
    assert_non_null(strstr(log, "event=reload_refused what=tokens"));
    assert_non_null(strstr(log, "live line 1"));
    assert_null(strstr(strstr(log, "reload_refused") + 1, "reload_refused"));
    assert_null(strstr(log, "canary"));
    assert_int_equal(ask(s, BT_SEC_GRPC, "another-client-token", BT_ACCESS_CLIENT), BT_OK);
    assert_true(bt_sec_tokens_version(s) == version); /* nobody is asked again */
    assert_int_equal(unlink(path("live")), 0);        /* gone is broken too */
    log_of(s, false, 3, log, sizeof(log));
    assert_non_null(strstr(log, "reload_refused"));
    put("live", "");
    log_of(s, true, 1, log, sizeof(log)); /* at once */
    assert_non_null(strstr(log, "no token in it"));
    assert_int_equal(ask(s, BT_SEC_GRPC, "another-client-token", BT_ACCESS_CLIENT), BT_OK);
    put("live", CLIENT "\n");
    log_of(s, true, 1, log, sizeof(log));
    assert_int_equal(ask(s, BT_SEC_GRPC, CLIENT, BT_ACCESS_CLIENT), BT_OK);
    bt_sec_destroy(s);
}

static void test_certificates_are_exchanged(void **state)
{
    struct bt_sec_conf c = {.clients_file = (char *)(uintptr_t) "",
                            .cert_file = path("live.pem"),
                            .key_file = path("live_key.pem"),
                            .node_ca_file = path("live_ca.pem"),
                            .node_name = (char *)(uintptr_t) "node",
                            .cluster_file = put("live_cluster", CLUSTER "\n"),
                            .http_tls = true};
    struct bt_pem *old, *p;
    SSL_CTX *ctx, *ctx2;
    struct bt_sec *s;
    char log[4096], bearer[BT_BEARER_MAX];
    uint64_t version;

    test_cert_write(&leaf, c.cert_file, c.key_file, NULL);
    test_cert_write(&ca, c.node_ca_file, NULL, NULL);
    s = make(&c);
    old = bt_sec_server(s);
    ctx = bt_sec_http(s);
    version = bt_sec_peer_version(s);
    assert_non_null(ctx);
    assert_string_equal(bt_sec_peer_name(s), "node");
    assert_true(bt_sec_bearer(s, bearer, sizeof(bearer)));
    assert_string_equal(bearer, "Bearer " CLUSTER);

    test_cert_write(&leaf2, c.cert_file, NULL, NULL); /* the key does not fit yet */
    log_of(s, true, 1, log, sizeof(log));
    assert_non_null(strstr(log, "event=reload_refused what=certificates"));
    assert_non_null(strstr(log, "not the one of"));
    p = bt_sec_server(s);
    assert_ptr_equal(p, old);
    bt_pem_unref(p);
    test_cert_write(&leaf2, NULL, c.key_file, NULL);
    test_cert_write(&other_ca, c.node_ca_file, NULL, NULL);
    put("live_cluster", "next-cluster-token-0\n" CLUSTER "\n");
    log_of(s, false, 2, log, sizeof(log));
    assert_non_null(strstr(log, "event=reload what=certificates"));
    assert_non_null(strstr(log, "event=reload what=node_certificates"));
    p = bt_sec_server(s);
    assert_true(p->version > old->version);
    assert_non_null(strstr(p->subject, "node2"));
    assert_non_null(strstr(old->cert, "BEGIN")); /* who holds the old one may go on */
    ctx2 = bt_sec_http(s);
    assert_ptr_not_equal(ctx, ctx2);
    assert_true(bt_sec_peer_version(s) != version);
    assert_true(bt_sec_bearer(s, bearer, sizeof(bearer)));
    assert_string_equal(bearer, "Bearer next-cluster-token-0");

    test_cert_write(&expired, c.cert_file, c.key_file, NULL);
    log_of(s, false, 3, log, sizeof(log));
    assert_non_null(strstr(log, "has expired"));
    bt_pem_unref(p);
    bt_pem_unref(old);
    SSL_CTX_free(ctx);
    SSL_CTX_free(ctx2);
    bt_sec_destroy(s);
}

static void test_an_end_that_is_near_is_told(void **state)
{
    struct test_cert soon = test_cert_make("soon", &ca, -DAY, 2 * DAY + 1800);
    struct bt_sec_conf c = {.cert_file = path("soon.pem"), .key_file = path("soon_key.pem")};
    struct bt_sec *s;
    char log[4096];

    test_cert_write(&soon, c.cert_file, c.key_file, NULL);
    s = make(&c);
    log_of(s, false, 3, log, sizeof(log));
    assert_non_null(strstr(log, "event=certificate_ends hours=48"));
    assert_null(strstr(strstr(log, "certificate_ends") + 1, "certificate_ends"));
    bt_sec_destroy(s);
    test_cert_free(&soon);
}

/* --- threads --------------------------------------------------------------------------------- */

struct hammer {
    struct bt_sec *s;
    int stop, bad; /* atomic */
};

static void *hammer_main(void *arg)
{
    struct hammer *h = arg;

    while (!__atomic_load_n(&h->stop, __ATOMIC_ACQUIRE)) {
        struct bt_pem *p = bt_sec_server(h->s);
        SSL_CTX *ctx = bt_sec_http(h->s);
        char bearer[BT_BEARER_MAX];
        bool ok =
            p && ctx && strstr(p->cert, "BEGIN") && bt_sec_bearer(h->s, bearer, sizeof(bearer));

        if (!ok || ask(h->s, BT_SEC_GRPC, CLIENT, BT_ACCESS_CLIENT) != BT_OK ||
            ask(h->s, BT_SEC_GRPC, "no-token-of-anybody", BT_ACCESS_CLIENT) == BT_OK) {
            __atomic_store_n(&h->bad, 1, __ATOMIC_RELAXED);
        }
        bt_pem_unref(p);
        SSL_CTX_free(ctx);
    }
    return NULL;
}

static void test_exchange_under_load(void **state)
{
    struct bt_sec_conf c = {.clients_file = path("clients"),
                            .cluster_file = path("cluster"),
                            .cert_file = path("cert.pem"),
                            .key_file = path("key.pem"),
                            .http_tls = true};
    struct hammer h = {.s = make(&c)};
    pthread_t threads[2];
    char log[32];

    for (size_t i = 0; i < BT_ARRAY_LEN(threads); i++) {
        assert_int_equal(pthread_create(&threads[i], NULL, hammer_main, &h), 0);
    }
    log_of(h.s, true, 50, log, sizeof(log));
    __atomic_store_n(&h.stop, 1, __ATOMIC_RELEASE);
    for (size_t i = 0; i < BT_ARRAY_LEN(threads); i++) {
        pthread_join(threads[i], NULL);
    }
    assert_int_equal(h.bad, 0);
    bt_sec_destroy(h.s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_pem),
        cmocka_unit_test(test_SEC_01_who_may_do_what),
        cmocka_unit_test(test_tenants),
        cmocka_unit_test(test_names),
        cmocka_unit_test(test_start_is_refused),
        cmocka_unit_test(test_SEC_01_off_loopback_is_refused),
        cmocka_unit_test(test_tokens_are_exchanged),
        cmocka_unit_test(test_certificates_are_exchanged),
        cmocka_unit_test(test_an_end_that_is_near_is_told),
        cmocka_unit_test(test_exchange_under_load),
    };

    return cmocka_run_group_tests(tests, setup, teardown);
}
