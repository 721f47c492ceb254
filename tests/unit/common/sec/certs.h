/* Certificates for tests: a CA and what it signs, written as PEM files. */
#ifndef BT_TESTS_SEC_CERTS_H
#define BT_TESTS_SEC_CERTS_H

#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/x509v3.h>
#include <stdio.h>
#include <stdlib.h>

struct test_cert {
    EVP_PKEY *key;
    X509 *x;
};

static void test_cert_ext(X509 *x, X509 *issuer, int nid, const char *value)
{
    X509V3_CTX ctx;
    X509_EXTENSION *e;

    X509V3_set_ctx(&ctx, issuer, x, NULL, NULL, 0);
    e = X509V3_EXT_conf_nid(NULL, &ctx, nid, value);
    if (!e || X509_add_ext(x, e, -1) != 1) {
        abort();
    }
    X509_EXTENSION_free(e);
}

/* ca NULL: signed by itself. `from_s` and `to_s` are relative to now. */
static struct test_cert
test_cert_make(const char *name, const struct test_cert *ca, long from_s, long to_s)
{
    struct test_cert c = {EVP_EC_gen("P-256"), X509_new()};
    static long serial = 1;
    char san[128];

    snprintf(san, sizeof(san), "DNS:%s,IP:127.0.0.1", name);
    X509_set_version(c.x, X509_VERSION_3);
    ASN1_INTEGER_set(X509_get_serialNumber(c.x), serial++);
    X509_gmtime_adj(X509_getm_notBefore(c.x), from_s);
    X509_gmtime_adj(X509_getm_notAfter(c.x), to_s);
    X509_NAME_add_entry_by_txt(X509_get_subject_name(c.x), "CN", MBSTRING_ASC,
                               (const unsigned char *)name, -1, -1, 0);
    X509_set_issuer_name(c.x, X509_get_subject_name(ca ? ca->x : c.x));
    X509_set_pubkey(c.x, c.key);
    test_cert_ext(c.x, ca ? ca->x : c.x, NID_basic_constraints,
                  ca ? "CA:FALSE" : "critical,CA:TRUE");
    if (ca) {
        test_cert_ext(c.x, ca->x, NID_subject_alt_name, san);
    }
    if (X509_sign(c.x, ca ? ca->key : c.key, EVP_sha256()) <= 0) {
        abort();
    }
    return c;
}

static void test_cert_free(struct test_cert *c)
{
    EVP_PKEY_free(c->key);
    X509_free(c->x);
}

/* Either path may be NULL. `pass` NULL: the key is not encrypted. */
static void
test_cert_write(const struct test_cert *c, const char *cert, const char *key, const char *pass)
{
    FILE *f;

    if (cert) {
        f = fopen(cert, "w");
        if (!f || PEM_write_X509(f, c->x) != 1 || fclose(f) != 0) {
            abort();
        }
    }
    if (key) {
        f = fopen(key, "w");
        if (!f ||
            PEM_write_PrivateKey(f, c->key, pass ? EVP_aes_128_cbc() : NULL, (const void *)pass,
                                 pass ? (int)strlen(pass) : 0, NULL, NULL) != 1 ||
            fclose(f) != 0) {
            abort();
        }
    }
}

#endif
