/* What every binary's main shares: configuration, logging, limits, signals, the ready file.
 *
 *   struct rt_conf c = {0};
 *   struct bt_node *node;
 *   int code;
 *
 *   if (!bt_node_create(&args, &node, &code)) return code;      help was printed or start refused
 *   ... open sockets, load, start threads ...
 *   bt_node_on_stop(node, stop, app);
 *   rc = bt_node_ready(node, addrs, n, &err);
 *   ... run until stop ...
 *   bt_node_destroy(node);
 *   return BT_EXIT_OK;
 *
 * Signals: SIGTERM and SIGINT are blocked in all threads and read by the thread "signal". The first
 * one asks to stop (drain), the second ends the process at once with exit code 1. SIGHUP opens the
 * access log again and reads the files of certificates and tokens again; what changed of the latter
 * is also seen within two seconds. SIGPIPE is ignored. */
#ifndef BT_NODE_NODE_H
#define BT_NODE_NODE_H

#include "common/conf/conf.h"
#include "common/obs/lines.h"
#include "common/sec/sec.h"

enum bt_exit {
    BT_EXIT_OK = 0,
    BT_EXIT_OTHER = 1,
    BT_EXIT_CONFIG = 2,
    BT_EXIT_MODEL = 3, /* model files are missing, damaged or unsupported */
    BT_EXIT_BIND = 4,  /* an address is in use or cannot be bound */
};

/* Options that all binaries have; embed it in the binary's config struct and put
 * BT_NODE_CONF_ROWS(struct rt_conf, node) into its table. */
struct bt_node_conf {
    int log_level; /* enum bt_log_level */
    char *ready_file;
    bool die_with_parent;
    bool allow_insecure;
    char *access_log;       /* NULL where the binary has no row for it */
    struct bt_sec_conf sec; /* a binary with ports adds BT_SEC_CONF_ROWS(S, node.sec) */
};

extern const char *const bt_node_log_levels[];

#define BT_NODE_CONF_ROWS(S, f)                                                                    \
    BT_CONF_ENUM(S, f.log_level, "log_level", "info", bt_node_log_levels,                          \
                 "Least important log lines that are written."),                                   \
        BT_CONF_STR(S, f.ready_file, "ready_file", "", 4000,                                       \
                    "File that gets pid and bound addresses, as key=value lines, once ready; "     \
                    "removed at the end."),                                                        \
        BT_CONF_BOOL(S, f.die_with_parent, "die_with_parent", "false",                             \
                     "Be killed when the thread that started this process ends."),                 \
        BT_CONF_BOOL(S, f.allow_insecure, "allow_insecure", "false",                               \
                     "Listen on addresses other than loopback without encryption (callers still "  \
                     "have to say who they are, see security.allow_anonymous).")

/* A row for binaries that write an access log. */
#define BT_NODE_CONF_ACCESS_ROW(S, f)                                                              \
    BT_CONF_STR(S, f.access_log, "access_log", "", 4000,                                           \
                "File that gets one JSON line for each request that has ended; opened again at "   \
                "SIGHUP; - is standard output, empty is none.")

struct bt_node_args {
    struct bt_conf_spec spec;
    const struct bt_node_conf *conf; /* inside spec.out */
    char *const *argv;
};

struct bt_node; /* main owns it */

/* Loads the configuration, sets up log level, file limit, signals and the thread "signal", logs
 * event=start and the configuration. Call it first, before any other thread exists. False: the
 * process is to return *ret_exit_code at once (help printed, or the error logged). */
bool bt_node_create(const struct bt_node_args *args,
                    struct bt_node **ret_node,
                    int *ret_exit_code) BT_MUST_USE;

/* Sets who is told to stop: stop(arg) runs once, on the thread "signal", and must not block; on the
 * calling thread, before return, if stopping was asked for already. At most one call per node. */
void bt_node_on_stop(struct bt_node *node, void (*stop)(void *arg), void *arg);
/* Stops as a signal would; any thread (a fault that the process cannot outlive, an end of input).
 */
void bt_node_request_stop(struct bt_node *node);
/* The access log, NULL = none is configured; borrowed until bt_node_destroy. */
struct bt_lines *bt_node_access_log(const struct bt_node *node);
/* True once stopping was asked for; any thread. Long start-up work looks at it. */
bool bt_node_stopping(const struct bt_node *node);

struct bt_node_addr {
    const char *key;   /* "grpc", "http", "net": letters, digits, '_', '.' */
    const char *value; /* "127.0.0.1:50051" */
};

/* The node serves from now on: writes the ready file (beside, then renamed), logs event=ready,
 * tells the service manager (NOTIFY_SOCKET). BT_E_IO if the file cannot be written. */
int bt_node_ready(struct bt_node *node,
                  const struct bt_node_addr *addrs,
                  size_t n,
                  struct bt_err *err) BT_MUST_USE;

/* The security of the process's ports; the node owns it. */
struct bt_sec *bt_node_sec(struct bt_node *node);
/* bt_sec_check_port for the port of option `key`. */
int bt_node_check_listen(const struct bt_node_conf *conf,
                         enum bt_sec_port port,
                         const char *key,
                         const char *addr,
                         struct bt_err *err) BT_MUST_USE;
/* For a transfer port, which is never encrypted: BT_E_CONFIG off loopback without allow_insecure or
 * security.allow_plain_kv. */
int bt_node_check_kv_listen(const struct bt_node_conf *conf,
                            const char *key,
                            const char *addr,
                            struct bt_err *err) BT_MUST_USE;
/* True if transfer ports may be off loopback. */
bool bt_node_plain_kv(const struct bt_node_conf *conf);

/* Logs event=exit at level error with the text of err and returns `code`: for `return` in main. */
int bt_node_fail(enum bt_exit code, int rc, const struct bt_err *err);

/* Ends the thread, removes the ready file, frees the configuration (the strings in it too).
 * NULL is fine. */
void bt_node_destroy(struct bt_node *node);

#endif
