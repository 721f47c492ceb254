/* Certificates and keys as they lie in PEM files: loaded, checked, and handed out as text (gRPC) or
 * as a context of libssl (HTTP). What is handed out is immutable and counted. */
#ifndef BT_SEC_PEM_H
#define BT_SEC_PEM_H

#include "common/base/rc.h"

struct ssl_ctx_st; /* SSL_CTX */

#define BT_PEM_FILE_MAX (1u << 20)

struct bt_pem_files {
    const char *cert, *key; /* both or none; NULL or empty = none */
    const char *ca;         /* whose certificates are believed; NULL or empty = none */
};

struct bt_pem {
    uint32_t refs; /* atomic; bt_pem_ref and _unref only */
    uint64_t version;
    char *cert, *key, *ca; /* terminated text; NULL = not given */
    int64_t not_after_s;   /* end of the certificate's validity, seconds since 1970; 0 = none */
    char subject[128];     /* of the certificate, for logs */
};

/* Reads and checks: the key belongs to the certificate and needs no passphrase, the certificate is
 * valid now, every block of the CA file is a certificate. BT_E_CONFIG with file and reason. */
int bt_pem_load(const struct bt_pem_files *files,
                struct bt_pem **ret_p,
                struct bt_err *err) BT_MUST_USE;
struct bt_pem *bt_pem_ref(struct bt_pem *p);
void bt_pem_unref(struct bt_pem *p); /* NULL is fine; keys are wiped with the last one */

/* A context for servers: TLS 1.2 and 1.3, no renegotiation, HTTP/1.1 by ALPN. With `ca` clients
 * need a certificate of it. The caller owns a reference (SSL_CTX_free). BT_E_CONFIG, BT_E_NOMEM. */
int bt_pem_server_ctx(const struct bt_pem *p,
                      struct ssl_ctx_st **ret_ctx,
                      struct bt_err *err) BT_MUST_USE;

/* A whole file as terminated text in *ret_text (malloc; *ret_n bytes without the terminator).
 * BT_E_CONFIG: not a readable plain file, more than `max` bytes, or a zero byte in it. */
int bt_sec_read_file(
    const char *path, size_t max, char **ret_text, size_t *ret_n, struct bt_err *err) BT_MUST_USE;

#endif
