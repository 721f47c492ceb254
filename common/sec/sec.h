/* The security of a process's ports: certificates, tokens, who may do what; exchanged without a
 * restart when their files change.
 *
 * One struct per process (the node skeleton owns it). Everything that is handed out is a counted or
 * copied snapshot: connections go on with the certificates they began with, what begins uses the
 * newest. Calls whose token is gone are ended (bt_sec_tokens_version). A new file that is broken is
 * refused with a log line and the old content stays.
 *
 * Who has which access (BT_ACCESS_ bits of tokens.h):
 *   - what the presented token gives;
 *   - with client certificates required by the port: CLIENT at a router, CLUSTER at a node, if no
 *     file of tokens is there for it;
 *   - if nothing at all is configured (then ports stay on loopback): everything;
 *   - with security.allow_anonymous: whatever no file of tokens is there for.
 * Nothing else: once one file of tokens is given, what has none is closed to everybody. */
#ifndef BT_SEC_SEC_H
#define BT_SEC_SEC_H

#include "common/conf/conf.h"
#include "common/sec/pem.h"
#include "common/sec/tokens.h"

/* Strings may be NULL (a binary without these options) or empty. */
struct bt_sec_conf {
    char *cert_file, *key_file, *client_ca_file;
    struct bt_conf_list client_names;
    char *operators_file, *clients_file, *cluster_file, *scrapers_file;
    bool allow_anonymous, allow_plain_kv, end_revoked;
    /* towards nodes */
    char *node_ca_file, *node_cert_file, *node_key_file, *node_name;
    /* of the HTTP port */
    bool http_tls;
    char *http_client_ca_file;
};

/* Rows of every binary with ports. */
#define BT_SEC_CONF_ROWS(S, f)                                                                     \
    BT_CONF_STR(S, f.cert_file, "tls.cert_file", "", 4000,                                         \
                "Certificate (PEM, with its chain) of this process's ports: they speak TLS then; " \
                "with tls.key_file."),                                                             \
        BT_CONF_STR(S, f.key_file, "tls.key_file", "", 4000,                                       \
                    "Private key (PEM, no passphrase) of tls.cert_file."),                         \
        BT_CONF_STR(S, f.client_ca_file, "tls.client_ca_file", "", 4000,                           \
                    "CA (PEM): callers of the gRPC port need a certificate of it (mutual TLS)."),  \
        BT_CONF_LIST(S, f.client_names, "tls.client_names", "", 64,                                \
                     "Names (DNS or common name) of which a caller's certificate must have one; "  \
                     "empty = any."),                                                              \
        BT_CONF_STR(S, f.operators_file, "security.operators_file", "", 4000,                      \
                    "Bearer tokens of operators, one a line: status, drain, metrics."),            \
        BT_CONF_STR(S, f.cluster_file, "security.cluster_file", "", 4000,                          \
                    "Bearer tokens that routers show to nodes: the first one is shown, any is "    \
                    "taken."),                                                                     \
        BT_CONF_BOOL(S, f.allow_anonymous, "security.allow_anonymous", "off",                      \
                     "Serve callers without a token or certificate, where no file of tokens says " \
                     "who may call, off loopback as well."),                                       \
        BT_CONF_BOOL(S, f.end_revoked, "security.end_revoked", "on",                               \
                     "End calls and streams that run when the token that they began with is "      \
                     "taken out of its file; off: they run to their end.")
/* Rows of binaries with a transfer port. */
#define BT_SEC_KV_CONF_ROWS(S, f)                                                                  \
    BT_CONF_BOOL(S, f.allow_plain_kv, "security.allow_plain_kv", "off",                            \
                 "Let the ports for KV (net.listen, store.listen) be reached from other machines " \
                 "although they are never encrypted.")
/* Rows of the router. */
#define BT_SEC_ROUTER_CONF_ROWS(S, f)                                                              \
    BT_CONF_STR(S, f.clients_file, "security.clients_file", "", 4000,                              \
                "Bearer tokens of clients, one a line, with the tenant that each acts for behind " \
                "it."),                                                                            \
        BT_CONF_STR(S, f.scrapers_file, "security.scrapers_file", "", 4000,                        \
                    "Bearer tokens of scrapers, one a line: /metrics and nothing else."),          \
        BT_CONF_STR(S, f.node_ca_file, "tls.node_ca_file", "", 4000,                               \
                    "CA (PEM) of the nodes' certificates: nodes are called by TLS then."),         \
        BT_CONF_STR(S, f.node_cert_file, "tls.node_cert_file", "", 4000,                           \
                    "Certificate (PEM) shown to nodes; with tls.node_key_file."),                  \
        BT_CONF_STR(S, f.node_key_file, "tls.node_key_file", "", 4000,                             \
                    "Private key (PEM) of tls.node_cert_file."),                                   \
        BT_CONF_STR(S, f.node_name, "tls.node_name", "", 253,                                      \
                    "Name that the nodes' certificates must have; empty = the host of the node's " \
                    "address."),                                                                   \
        BT_CONF_BOOL(S, f.http_tls, "http.tls", "on",                                              \
                     "Speak TLS on the HTTP port too, where tls.cert_file is given."),             \
        BT_CONF_STR(S, f.http_client_ca_file, "http.client_ca_file", "", 4000,                     \
                    "CA (PEM): callers of the HTTP port need a certificate of it.")

struct bt_sec;

/* Which port of the process a question is about. */
enum bt_sec_port { BT_SEC_GRPC, BT_SEC_HTTP };

/* Loads everything; `conf` is borrowed. BT_E_CONFIG with option or file and reason. */
int bt_sec_create(const struct bt_sec_conf *conf,
                  struct bt_sec **ret_s,
                  struct bt_err *err) BT_MUST_USE;
void bt_sec_destroy(struct bt_sec *s); /* NULL is fine; nobody uses it any more */

/* False: nothing is configured, there is nothing to look at. */
bool bt_sec_has_files(const struct bt_sec *s);
/* One look at the files, by one thread about once a second: what has changed, and not again since
 * the look before, is loaded. `now`: everything is loaded at once, changed or not (SIGHUP). Logs
 * event=reload or event=reload_refused. Reads files. */
void bt_sec_look(struct bt_sec *s, bool now);

/* BT_E_CONFIG, naming the option that is missing, if `addr` (the value of option `key`) can be
 * reached from other machines and the port is not encrypted (unless `allow_insecure`) or does not
 * ask who calls (unless security.allow_anonymous). `local`: it is loopback. */
int bt_sec_check_port(const struct bt_sec_conf *conf,
                      enum bt_sec_port port,
                      const char *key,
                      const char *addr,
                      bool allow_insecure,
                      struct bt_err *err) BT_MUST_USE;

/* --- snapshots; any thread ------------------------------------------------------------------- */

/* True if the port speaks TLS; never changes. */
bool bt_sec_has_tls(const struct bt_sec *s, enum bt_sec_port port);
/* True if callers of the port must have a certificate; never changes. */
bool bt_sec_wants_cert(const struct bt_sec *s, enum bt_sec_port port);
/* Of the gRPC port; a reference of the caller's, NULL without TLS. */
struct bt_pem *bt_sec_server(struct bt_sec *s);
/* Of the HTTP port; a reference of the caller's (SSL_CTX_free), NULL without TLS. */
struct ssl_ctx_st *bt_sec_http(struct bt_sec *s);
/* Towards nodes: CA and perhaps a certificate; a reference of the caller's, NULL = plain text. */
struct bt_pem *bt_sec_peer(struct bt_sec *s);
uint64_t bt_sec_peer_version(struct bt_sec *s);       /* changes when the one above does */
const char *bt_sec_peer_name(const struct bt_sec *s); /* empty = the host of the address */
/* True if there is a token to show and no TLS to show it by; never changes. */
bool bt_sec_shows_plain(const struct bt_sec *s);
/* Changes when files of tokens have been read anew; 0 = there are none. Whoever serves calls that
 * last looks at it about once a second (BT_SEC_LOOK_NS), and after a change authorizes each of them
 * again, if security.end_revoked is on (bt_sec_ends_revoked). */
uint64_t bt_sec_tokens_version(struct bt_sec *s);
bool bt_sec_ends_revoked(const struct bt_sec *s);
#define BT_SEC_LOOK_NS 1000000000ull
/* The token shown to nodes as "Bearer TOKEN"; false, and ret empty, if there is none. Wipe it. */
bool bt_sec_bearer(struct bt_sec *s, char *ret, size_t n);
#define BT_BEARER_MAX (BT_TOKEN_MAX + 8)

/* True if a name of a caller's certificate is one of tls.client_names, or any is welcome. */
bool bt_sec_name_ok(const struct bt_sec *s, struct bt_str name);
bool bt_sec_checks_names(const struct bt_sec *s);

struct bt_sec_ask {
    enum bt_sec_port port;
    struct bt_str authorization; /* value of the header; p == NULL = none */
    unsigned access;             /* what is needed: one of these BT_ACCESS_ bits */
};
/* BT_OK and who it is; BT_E_UNAUTHENTICATED: no token, or one that nobody has; BT_E_DENIED: a
 * token, but not for this. `s` NULL = no security: everything is allowed. */
int bt_sec_authorize(struct bt_sec *s,
                     const struct bt_sec_ask *ask,
                     struct bt_who *ret_who,
                     struct bt_err *err) BT_MUST_USE;

#endif
