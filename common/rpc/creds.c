/* TLS credentials from the process's security. Core asks for the server's certificate at each new
 * connection, on threads of its own: snapshots of bt_sec are for any thread. */
#include "common/rpc/rpc_int.h"

#include <stdlib.h>
#include <string.h>

static grpc_ssl_server_certificate_config *config_of(const struct bt_pem *p)
{
    const grpc_ssl_pem_key_cert_pair pair = {.private_key = p->key, .cert_chain = p->cert};

    /* Core insists on some; without a CA of ours it asks no client for a certificate. */
    return grpc_ssl_server_certificate_config_create(p->ca ? p->ca : p->cert, &pair, 1);
}

/* [core] Before a handshake. Core keeps what it got last; it calls this under a lock of the port.
 */
static grpc_ssl_certificate_config_reload_status fetch(void *user,
                                                       grpc_ssl_server_certificate_config **ret)
{
    struct bt_rpc_fetcher *f = user;
    struct bt_pem *p = bt_sec_server(f->sec);
    grpc_ssl_certificate_config_reload_status status = GRPC_SSL_CERTIFICATE_CONFIG_RELOAD_UNCHANGED;

    if (p && p->version != f->version) {
        *ret = config_of(p);
        f->version = p->version;
        status = GRPC_SSL_CERTIFICATE_CONFIG_RELOAD_NEW;
    }
    bt_pem_unref(p);
    return status;
}

grpc_server_credentials *bt_rpc_server_creds(struct bt_rpc_fetcher *f)
{
    grpc_ssl_client_certificate_request_type how =
        bt_sec_wants_cert(f->sec, BT_SEC_GRPC)
            ? GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY
            : GRPC_SSL_DONT_REQUEST_CLIENT_CERTIFICATE;

    return grpc_ssl_server_credentials_create_with_options(
        grpc_ssl_server_credentials_create_options_using_config_fetcher(how, fetch, f));
}

grpc_channel_credentials *bt_rpc_channel_creds(const struct bt_pem *p)
{
    grpc_ssl_pem_key_cert_pair pair = {.private_key = p->key, .cert_chain = p->cert};

    return grpc_ssl_credentials_create(p->ca, p->cert ? &pair : NULL, NULL, NULL);
}

static bool has_name(const struct bt_sec *sec, const grpc_auth_context *ctx, const char *property)
{
    grpc_auth_property_iterator it = grpc_auth_context_find_properties_by_name(ctx, property);
    const grpc_auth_property *p;

    while ((p = grpc_auth_property_iterator_next(&it)) != NULL) {
        if (bt_sec_name_ok(sec, (struct bt_str){p->value, p->value_length})) {
            return true;
        }
    }
    return false;
}

bool bt_rpc_cert_ok(const struct bt_sec *sec, grpc_call *call)
{
    grpc_auth_context *ctx;
    bool ok;

    if (!bt_sec_checks_names(sec)) {
        return true;
    }
    ctx = grpc_call_auth_context(call);
    ok = ctx && grpc_auth_context_peer_is_authenticated(ctx) &&
         (has_name(sec, ctx, GRPC_X509_SAN_PROPERTY_NAME) ||
          has_name(sec, ctx, GRPC_X509_CN_PROPERTY_NAME));
    if (ctx) {
        grpc_auth_context_release(ctx);
    }
    return ok;
}
