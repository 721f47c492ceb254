/* TLS to Redis, where hiredis_ssl was there when this was built; Debian 12's hiredis 0.14 has none.
 * The handshake is done here with a deadline; from then on hiredis reads and writes through it. */
#include "common/cluster/redis_int.h"

#ifdef BT_HAVE_HIREDIS_SSL

#include <arpa/inet.h>
#include <hiredis/hiredis_ssl.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <poll.h>

static int fail(struct bt_err *err, const char *what)
{
    const char *reason = ERR_reason_error_string(ERR_peek_last_error());

    ERR_clear_error();
    return BT_FAIL(err, BT_E_UNAVAILABLE, "redis: TLS: %.80s: %.80s", what,
                   reason ? reason : "connection lost");
}

/* A handshake that failed, because of the certificate if that was it. */
static int refused(const SSL *ssl, struct bt_err *err)
{
    long verdict = SSL_get_verify_result(ssl);

    return verdict == X509_V_OK
               ? fail(err, "handshake")
               : BT_FAIL(err, BT_E_UNAVAILABLE, "redis: TLS: its certificate: %.100s",
                         X509_verify_cert_error_string(verdict));
}

static bool given(const char *path)
{
    return path && path[0];
}

/* Whom to trust and who we are. */
static int load_files(SSL_CTX *ctx, const struct bt_cluster_conf *conf, struct bt_err *err)
{
    int ok = given(conf->redis_tls_ca)
                 ? SSL_CTX_load_verify_locations(ctx, conf->redis_tls_ca, NULL)
                 : SSL_CTX_set_default_verify_paths(ctx);

    if (!ok) {
        return fail(err, given(conf->redis_tls_ca) ? conf->redis_tls_ca : "system certificates");
    }
    if (given(conf->redis_tls_cert) &&
        SSL_CTX_use_certificate_chain_file(ctx, conf->redis_tls_cert) != 1) {
        return fail(err, conf->redis_tls_cert);
    }
    if (given(conf->redis_tls_key) &&
        SSL_CTX_use_PrivateKey_file(ctx, conf->redis_tls_key, SSL_FILETYPE_PEM) != 1) {
        return fail(err, conf->redis_tls_key);
    }
    return BT_OK;
}

/* A session that takes no certificate but one of `host`. */
static SSL *make_session(const struct bt_cluster_conf *conf, const char *host, struct bt_err *err)
{
    SSL_CTX *ctx = SSL_CTX_new(TLS_client_method());
    struct in6_addr a;
    SSL *ssl = NULL;
    bool is_ip = inet_pton(AF_INET, host, &a) == 1 || inet_pton(AF_INET6, host, &a) == 1;

    if (!ctx || SSL_CTX_set_min_proto_version(ctx, TLS1_2_VERSION) != 1) {
        fail(err, "library");
        goto out;
    }
    SSL_CTX_set_verify(ctx, SSL_VERIFY_PEER, NULL);
    if (load_files(ctx, conf, err) < 0) {
        goto out;
    }
    ssl = SSL_new(ctx);
    if (!ssl || (is_ip ? X509_VERIFY_PARAM_set1_ip_asc(SSL_get0_param(ssl), host)
                       : SSL_set1_host(ssl, host) && SSL_set_tlsext_host_name(ssl, host)) != 1) {
        fail(err, "library");
        SSL_free(ssl);
        ssl = NULL;
    }

out:
    SSL_CTX_free(ctx); /* the session has its own reference */
    return ssl;
}

static int shake_hands(struct redis_conn *c, SSL *ssl, uint64_t deadline_ns, struct bt_err *err)
{
    for (;;) {
        int n, rc, code;

        ERR_clear_error();
        n = SSL_do_handshake(ssl);
        if (n == 1) {
            return BT_OK;
        }
        code = SSL_get_error(ssl, n);
        if (code != SSL_ERROR_WANT_READ && code != SSL_ERROR_WANT_WRITE) {
            return refused(ssl, err);
        }
        rc = redis_wait(c, code == SSL_ERROR_WANT_READ ? POLLIN : POLLOUT, deadline_ns);
        if (rc < 0) {
            return BT_FAIL(err, BT_E_UNAVAILABLE, "redis: TLS: handshake: %s", bt_rc_text(rc));
        }
    }
}

int redis_tls_check(const struct bt_cluster_conf *conf, struct bt_err *err)
{
    return given(conf->redis_tls_cert) == given(conf->redis_tls_key)
               ? BT_OK
               : BT_FAIL(err, BT_E_CONFIG, "redis.tls_cert and redis.tls_key go together");
}

int redis_tls_start(struct redis_conn *c,
                    const struct bt_cluster_conf *conf,
                    const char *host,
                    uint64_t deadline_ns,
                    struct bt_err *err)
{
    SSL *ssl = make_session(conf, host, err);

    if (!ssl) {
        return BT_E_UNAVAILABLE;
    }
    if (redisInitiateSSL(c->ctx, ssl) != REDIS_OK) {
        int rc = refused(ssl, err);

        SSL_free(ssl);
        return rc;
    }
    return shake_hands(c, ssl, deadline_ns, err); /* the connection owns ssl now */
}

#else

int redis_tls_check(const struct bt_cluster_conf *conf, struct bt_err *err)
{
    return BT_FAIL(err, BT_E_CONFIG,
                   "redis.address = %.60s: this build cannot speak TLS with Redis, hiredis_ssl "
                   "(hiredis 1.0 and newer) was not there; take a unix socket or a tunnel",
                   conf->redis_address);
}

int redis_tls_start(struct redis_conn *c,
                    const struct bt_cluster_conf *conf,
                    const char *host,
                    uint64_t deadline_ns,
                    struct bt_err *err)
{
    return redis_tls_check(conf, err);
}

#endif
