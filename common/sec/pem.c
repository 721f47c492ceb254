/* PEM files, checked with libcrypto before anybody uses them: gRPC would only say later, and to the
 * peer, that something is wrong with them. */
#include "common/sec/pem.h"

#include "common/base/buf.h"

#include <errno.h>
#include <fcntl.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/ssl.h>
#include <openssl/x509.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

static bool given(const char *path)
{
    return path && path[0];
}

/* The reason that libcrypto gives, and its queue emptied. */
static const char *reason(void)
{
    const char *text = ERR_reason_error_string(ERR_peek_last_error());

    ERR_clear_error();
    return text ? text : "not PEM";
}

/* --- files ----------------------------------------------------------------------------------- */

static void wipe(char *text, size_t n)
{
    if (text) {
        OPENSSL_cleanse(text, n);
        free(text);
    }
}

static int read_fd(int fd, char *text, size_t cap, size_t *ret_n)
{
    size_t n = 0;

    for (;;) {
        ssize_t got = read(fd, text + n, cap - n);

        if (got < 0 && errno == EINTR) {
            continue;
        }
        if (got < 0) {
            return BT_E_IO;
        }
        n += (size_t)got;
        if (got == 0 || n == cap) {
            *ret_n = n;
            return BT_OK;
        }
    }
}

int bt_sec_read_file(
    const char *path, size_t max, char **ret_text, size_t *ret_n, struct bt_err *err)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    struct stat st;
    char *text = NULL;
    size_t n = 0;
    int rc = BT_OK;

    if (fd < 0) {
        return BT_FAIL_SYS(err, BT_E_CONFIG, "%.120s", path);
    }
    if (fstat(fd, &st) != 0 || !S_ISREG(st.st_mode)) {
        rc = BT_FAIL(err, BT_E_CONFIG, "%.120s: not a plain file", path);
    } else if ((uint64_t)st.st_size > max) {
        rc = BT_FAIL(err, BT_E_CONFIG, "%.120s: more than %zu bytes", path, max);
    } else if (!(text = malloc(max + 2))) {
        rc = BT_FAIL(err, BT_E_NOMEM, "%.120s: out of memory", path);
    } else if (read_fd(fd, text, max + 1, &n) < 0) {
        rc = BT_FAIL_SYS(err, BT_E_CONFIG, "%.120s", path);
    } else if (n > max) {
        rc = BT_FAIL(err, BT_E_CONFIG, "%.120s: more than %zu bytes", path, max);
    } else if (memchr(text, '\0', n)) {
        rc = BT_FAIL(err, BT_E_CONFIG, "%.120s: a zero byte in it", path);
    }
    close(fd);
    if (rc < 0) {
        wipe(text, n);
        return rc;
    }
    text[n] = '\0';
    *ret_text = text;
    *ret_n = n;
    return BT_OK;
}

static int read_pem(const char *path, char **ret_text, struct bt_err *err)
{
    size_t n;

    return given(path) ? bt_sec_read_file(path, BT_PEM_FILE_MAX, ret_text, &n, err) : BT_OK;
}

/* --- checks ---------------------------------------------------------------------------------- */

/* Keys with a passphrase are refused; nobody is here to type it. */
static int no_passphrase(char *buf, int n, int writing, void *arg)
{
    return -1;
}

/* All certificates of a text; NULL with the reason if one is broken or there is none. */
static STACK_OF(X509) * read_certs(const char *text, const char *path, struct bt_err *err)
{
    STACK_OF(X509) *list = sk_X509_new_null();
    BIO *bio = BIO_new_mem_buf(text, -1);
    X509 *x = NULL;
    bool ok = list && bio;

    ERR_clear_error();
    while (ok && (x = PEM_read_bio_X509(bio, NULL, no_passphrase, NULL)) != NULL) {
        ok = sk_X509_push(list, x) > 0;
        if (!ok) {
            X509_free(x);
        }
    }
    if (ok && sk_X509_num(list) > 0 &&
        ERR_GET_REASON(ERR_peek_last_error()) == PEM_R_NO_START_LINE) {
        ERR_clear_error();
        BIO_free(bio);
        return list;
    }
    BT_FAIL(err, BT_E_CONFIG, "%.120s: certificate %d: %.80s", path,
            list ? sk_X509_num(list) + 1 : 1, reason());
    sk_X509_pop_free(list, X509_free);
    BIO_free(bio);
    return NULL;
}

static EVP_PKEY *read_key(const char *text)
{
    BIO *bio = BIO_new_mem_buf(text, -1);
    EVP_PKEY *key = bio ? PEM_read_bio_PrivateKey(bio, NULL, no_passphrase, NULL) : NULL;

    BIO_free(bio);
    return key;
}

static int check_time(const X509 *x, const char *path, int64_t *ret_not_after, struct bt_err *err)
{
    struct tm tm;

    if (X509_cmp_current_time(X509_get0_notBefore(x)) >= 0) {
        return BT_FAIL(err, BT_E_CONFIG, "%.120s: the certificate is not valid yet", path);
    }
    if (X509_cmp_current_time(X509_get0_notAfter(x)) <= 0) {
        return BT_FAIL(err, BT_E_CONFIG, "%.120s: the certificate has expired", path);
    }
    if (ASN1_TIME_to_tm(X509_get0_notAfter(x), &tm) != 1) {
        return BT_FAIL(err, BT_E_CONFIG, "%.120s: its time cannot be read", path);
    }
    *ret_not_after = timegm(&tm);
    return BT_OK;
}

static int check_pair(struct bt_pem *p, const struct bt_pem_files *f, struct bt_err *err)
{
    STACK_OF(X509) *list = read_certs(p->cert, f->cert, err);
    EVP_PKEY *key;
    int rc;

    if (!list) {
        return BT_E_CONFIG;
    }
    X509_NAME_oneline(X509_get_subject_name(sk_X509_value(list, 0)), p->subject,
                      sizeof(p->subject));
    rc = check_time(sk_X509_value(list, 0), f->cert, &p->not_after_s, err);
    key = rc == BT_OK ? read_key(p->key) : NULL;
    if (rc == BT_OK && !key) {
        ERR_clear_error();
        rc = BT_FAIL(err, BT_E_CONFIG, "%.120s: not a private key in PEM without a passphrase",
                     f->key);
    } else if (rc == BT_OK && X509_check_private_key(sk_X509_value(list, 0), key) != 1) {
        ERR_clear_error();
        rc = BT_FAIL(err, BT_E_CONFIG, "%.90s: this key is not the one of %.90s", f->key, f->cert);
    }
    EVP_PKEY_free(key);
    sk_X509_pop_free(list, X509_free);
    return rc;
}

static int check_ca(const struct bt_pem *p, const struct bt_pem_files *f, struct bt_err *err)
{
    STACK_OF(X509) *list = read_certs(p->ca, f->ca, err);

    if (!list) {
        return BT_E_CONFIG;
    }
    sk_X509_pop_free(list, X509_free);
    return BT_OK;
}

int bt_pem_load(const struct bt_pem_files *f, struct bt_pem **ret_p, struct bt_err *err)
{
    struct bt_pem *p = bt_calloc(1, sizeof(*p));
    int rc;

    if (!p) {
        return BT_FAIL(err, BT_E_NOMEM, "certificates: out of memory");
    }
    p->refs = 1;
    if ((rc = read_pem(f->cert, &p->cert, err)) == BT_OK &&
        (rc = read_pem(f->key, &p->key, err)) == BT_OK &&
        (rc = read_pem(f->ca, &p->ca, err)) == BT_OK) {
        rc = p->cert ? check_pair(p, f, err) : BT_OK;
        rc = rc == BT_OK && p->ca ? check_ca(p, f, err) : rc;
    }
    if (rc < 0) {
        bt_pem_unref(p);
        return rc;
    }
    *ret_p = p;
    return BT_OK;
}

struct bt_pem *bt_pem_ref(struct bt_pem *p)
{
    __atomic_fetch_add(&p->refs, 1, __ATOMIC_RELAXED);
    return p;
}

void bt_pem_unref(struct bt_pem *p)
{
    /* Pairs with the other unrefs: whoever frees sees what they did before. */
    if (p && __atomic_sub_fetch(&p->refs, 1, __ATOMIC_ACQ_REL) == 0) {
        free(p->cert);
        wipe(p->key, p->key ? strlen(p->key) : 0);
        free(p->ca);
        free(p);
    }
}

/* --- a context of libssl --------------------------------------------------------------------- */

/* HTTP/1.1 where it is offered; whoever offers other protocols alone is answered in it too. */
static int pick_protocol(SSL *ssl,
                         const unsigned char **out,
                         unsigned char *out_n,
                         const unsigned char *in,
                         unsigned int n,
                         void *arg)
{
    static const char name[] = "http/1.1";

    for (unsigned i = 0; i < n && in[i] < n - i; i += in[i] + 1u) {
        if (in[i] == sizeof(name) - 1 && memcmp(in + i + 1, name, in[i]) == 0) {
            *out = in + i + 1;
            *out_n = in[i];
            return SSL_TLSEXT_ERR_OK;
        }
    }
    return SSL_TLSEXT_ERR_NOACK;
}

static bool take_pair(SSL_CTX *ctx, const struct bt_pem *p)
{
    STACK_OF(X509) *list = read_certs(p->cert, "certificate", NULL);
    EVP_PKEY *key = read_key(p->key);
    bool ok = list && key && SSL_CTX_use_certificate(ctx, sk_X509_value(list, 0)) == 1 &&
              SSL_CTX_use_PrivateKey(ctx, key) == 1;

    for (int i = 1; ok && i < sk_X509_num(list); i++) {
        ok = SSL_CTX_add1_chain_cert(ctx, sk_X509_value(list, i)) == 1;
    }
    EVP_PKEY_free(key);
    sk_X509_pop_free(list, X509_free);
    return ok;
}

static bool take_ca(SSL_CTX *ctx, const struct bt_pem *p)
{
    STACK_OF(X509) *list = read_certs(p->ca, "CA", NULL);
    bool ok = list != NULL;

    for (int i = 0; ok && i < sk_X509_num(list); i++) {
        X509 *x = sk_X509_value(list, i);

        ok = X509_STORE_add_cert(SSL_CTX_get_cert_store(ctx), x) == 1 &&
             SSL_CTX_add_client_CA(ctx, x) == 1;
    }
    sk_X509_pop_free(list, X509_free);
    SSL_CTX_set_verify(ctx, SSL_VERIFY_PEER | SSL_VERIFY_FAIL_IF_NO_PEER_CERT, NULL);
    return ok;
}

int bt_pem_server_ctx(const struct bt_pem *p, SSL_CTX **ret_ctx, struct bt_err *err)
{
    static const unsigned char id[] = "baton";
    SSL_CTX *ctx = SSL_CTX_new(TLS_server_method());

    if (!ctx) {
        return BT_FAIL(err, BT_E_NOMEM, "TLS: %.80s", reason());
    }
    SSL_CTX_set_options(ctx, SSL_OP_NO_RENEGOTIATION | SSL_OP_NO_COMPRESSION |
                                 SSL_OP_CIPHER_SERVER_PREFERENCE | SSL_OP_PRIORITIZE_CHACHA);
    SSL_CTX_set_mode(ctx, SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER |
                              SSL_MODE_RELEASE_BUFFERS);
    /* One record a call: a client that sends nothing but key updates does not keep the thread. */
    SSL_CTX_clear_mode(ctx, SSL_MODE_AUTO_RETRY);
    SSL_CTX_set_alpn_select_cb(ctx, pick_protocol, NULL);
    if (SSL_CTX_set_min_proto_version(ctx, TLS1_2_VERSION) != 1 ||
        SSL_CTX_set_session_id_context(ctx, id, sizeof(id) - 1) != 1 || !take_pair(ctx, p) ||
        (p->ca && !take_ca(ctx, p))) {
        SSL_CTX_free(ctx);
        return BT_FAIL(err, BT_E_CONFIG, "TLS: %.80s", reason());
    }
    *ret_ctx = ctx;
    return BT_OK;
}
