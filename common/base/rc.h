/* Result codes and the error record: the one way to fail.
 *
 * A function that can fail returns `int`: BT_OK (0), BT_PENDING (1) or a negative enum bt_rc.
 * The range of a code states the blast radius, so that a handler may switch on it:
 *   -1..-29  this request      -> fail the request
 *   -30..-49 a peer            -> re-route
 *   -50..-69 this node, device -> drain
 * Where a text helps, the last parameter is `struct bt_err *err` (may be NULL). The first detector
 * fills it with BT_FAIL; callers pass it up untouched.
 */
#ifndef BT_BASE_RC_H
#define BT_BASE_RC_H

#include "common/base/base.h"

/* X(name, value, text, grpc status) */
#define BT_RC_LIST(X)                                                                              \
    X(OK, 0, "ok", 0)                                                                              \
    X(PENDING, 1, "pending", 0)                                                                    \
    X(E_INVALID, -1, "invalid argument", 3)                                                        \
    X(E_TOO_LARGE, -2, "too large", 3)                                                             \
    X(E_NOT_FOUND, -3, "not found", 5)                                                             \
    X(E_CANCELLED, -4, "cancelled", 1)                                                             \
    X(E_DEADLINE, -5, "deadline exceeded", 4)                                                      \
    X(E_EXHAUSTED, -6, "resource exhausted", 8)                                                    \
    X(E_UNSUPPORTED, -7, "unsupported", 12)                                                        \
    X(E_FORMAT, -8, "malformed input", 3)                                                          \
    X(E_DENIED, -9, "permission denied", 7)                                                        \
    X(E_UNAUTHENTICATED, -10, "unauthenticated", 16)                                               \
    X(E_EXISTS, -11, "already exists", 6)                                                          \
    X(E_PEER_LOST, -30, "peer lost", 14)                                                           \
    X(E_PEER_PROTOCOL, -31, "peer broke the protocol", 13)                                         \
    X(E_PEER_STALE, -32, "stale ticket or generation", 10)                                         \
    X(E_INCOMPATIBLE, -33, "incompatible peer", 9)                                                 \
    X(E_UNAVAILABLE, -34, "unavailable", 14)                                                       \
    X(E_CORRUPT, -35, "checksum mismatch", 15)                                                     \
    X(E_NOMEM, -50, "out of memory", 8)                                                            \
    X(E_IO, -51, "input/output error", 13)                                                         \
    X(E_SYS, -52, "system call failed", 13)                                                        \
    X(E_DEVICE_LOST, -53, "device lost", 13)                                                       \
    X(E_INTERNAL, -54, "internal error", 13)                                                       \
    X(E_CONFIG, -55, "bad configuration", 3)

enum bt_rc {
#define X(name, value, text, status) BT_##name = value,
    BT_RC_LIST(X)
#undef X
};

struct bt_err {
    enum bt_rc rc;
    int sys;           /* errno at the point of failure, 0 if it plays no part */
    const char *where; /* static string "file:line" */
    char msg[232];     /* one line, for the person who has to act */
};

/* Name ("E_INVALID") and text of a code; static strings; any thread. */
const char *bt_rc_name(int rc);
const char *bt_rc_text(int rc);
/* gRPC status code (0..16) of a result code. */
int bt_rc_grpc(int rc);
/* Message of err if it holds one, else the code's text. Borrowed. */
const char *bt_err_msg(const struct bt_err *err, int rc);

/* Fills err (may be NULL) and returns rc. Control characters in the text become '?'. */
int bt_err_set(struct bt_err *err, int rc, const char *where, const char *fmt, ...)
    BT_PRINTF_ATTR(4, 5);

#define BT_FAIL(err, rc, ...) bt_err_set((err), (rc), BT_WHERE, __VA_ARGS__)
/* Same with errno: keeps it in err->sys and appends its text. */
int bt_err_set_sys(struct bt_err *err, int rc, const char *where, const char *fmt, ...)
    BT_PRINTF_ATTR(4, 5);
#define BT_FAIL_SYS(err, rc, ...) bt_err_set_sys((err), (rc), BT_WHERE, __VA_ARGS__)

#endif
