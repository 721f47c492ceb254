/* TLS of a connection: libssl on the socket itself, which never blocks. HTTP thread.
 *
 * A handshake has the time of a header, and its connection counts as idle meanwhile: it makes room
 * where there are too many. Records are read one a call, so a connection costs one record beside
 * what plain text costs, and nothing while it is idle (SSL_MODE_RELEASE_BUFFERS). Reading never
 * waits for room to write nor the other way round: renegotiation is off, and a client that asks for
 * new keys but does not read is dropped. */
#include "router/http/http_int.h"

#include <errno.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <sys/socket.h>

int rt_http_tls_open(struct rt_http_conn *c)
{
    SSL_CTX *ctx;

    if (!bt_sec_has_tls(c->h->sec, BT_SEC_HTTP)) {
        return BT_OK;
    }
    ctx = bt_sec_http(c->h->sec);
    ERR_clear_error();
    c->ssl = SSL_new(ctx);
    SSL_CTX_free(ctx); /* the connection keeps its own */
    if (!c->ssl || SSL_set_fd(c->ssl, c->fd) != 1) {
        ERR_clear_error();
        return BT_E_NOMEM;
    }
    SSL_set_accept_state(c->ssl);
    c->shaking = true;
    return BT_OK;
}

int rt_http_tls_shake(struct rt_http_conn *c)
{
    bool plain;
    int n;

    ERR_clear_error();
    c->shake_writes = false;
    n = SSL_do_handshake(c->ssl);
    if (n == 1) {
        c->shaking = false;
        return BT_OK;
    }
    switch (SSL_get_error(c->ssl, n)) {
    case SSL_ERROR_WANT_READ:
        return BT_PENDING;
    case SSL_ERROR_WANT_WRITE:
        c->shake_writes = true;
        return BT_PENDING;
    default:
        plain = ERR_GET_REASON(ERR_peek_error()) == SSL_R_HTTP_REQUEST;
        c->tls_over = true;
        ERR_clear_error();
        return plain ? BT_E_INVALID : BT_E_PEER_PROTOCOL;
    }
}

/* What a call that did nothing means; `ok` is the one reason to try again later. */
static ssize_t failed(struct rt_http_conn *c, int ret, int ok)
{
    int code = SSL_get_error(c->ssl, ret);

    if (code == ok) {
        errno = EAGAIN;
        return -1;
    }
    if (code == SSL_ERROR_ZERO_RETURN) {
        return 0; /* it has said goodbye */
    }
    c->tls_over = true;
    ERR_clear_error();
    errno = EPROTO;
    return -1;
}

ssize_t rt_http_recv(struct rt_http_conn *c, void *to, size_t n)
{
    size_t got;
    int ret;

    if (!c->ssl) {
        return recv(c->fd, to, n, 0);
    }
    ERR_clear_error();
    ret = SSL_read_ex(c->ssl, to, n, &got);
    return ret == 1 ? (ssize_t)got : failed(c, ret, SSL_ERROR_WANT_READ);
}

ssize_t rt_http_send(struct rt_http_conn *c, const void *from, size_t n)
{
    size_t put;
    ssize_t rc;
    int ret;

    if (!c->ssl) {
        return send(c->fd, from, n, MSG_NOSIGNAL);
    }
    ERR_clear_error();
    ret = SSL_write_ex(c->ssl, from, n, &put);
    if (ret == 1) {
        return (ssize_t)put;
    }
    rc = failed(c, ret, SSL_ERROR_WANT_WRITE);
    if (rc == 0) {
        errno = EPIPE;
    }
    return -1;
}

void rt_http_tls_bye(struct rt_http_conn *c)
{
    if (c->ssl && !c->shaking && !c->tls_over) {
        c->tls_over = true;
        ERR_clear_error();
        SSL_shutdown(c->ssl); /* as far as there is room */
        ERR_clear_error();
    }
}

void rt_http_tls_close(struct rt_http_conn *c)
{
    SSL_free(c->ssl);
    c->ssl = NULL;
}
