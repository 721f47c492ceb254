/* Names and texts of result codes; filling an error record. */
#include "common/base/rc.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

const char *bt_rc_name(int rc)
{
    switch (rc) {
#define X(name, value, text, status)                                                               \
    case value:                                                                                    \
        return #name;
        BT_RC_LIST(X)
#undef X
    default:
        return "E_UNKNOWN";
    }
}

const char *bt_rc_text(int rc)
{
    switch (rc) {
#define X(name, value, text, status)                                                               \
    case value:                                                                                    \
        return text;
        BT_RC_LIST(X)
#undef X
    default:
        return "unknown result code";
    }
}

int bt_rc_grpc(int rc)
{
    switch (rc) {
#define X(name, value, text, status)                                                               \
    case value:                                                                                    \
        return status;
        BT_RC_LIST(X)
#undef X
    default:
        return 13;
    }
}

const char *bt_err_msg(const struct bt_err *err, int rc)
{
    return err && err->msg[0] ? err->msg : bt_rc_text(rc);
}

BT_PRINTF_ATTR(4, 0)
static void err_fill(struct bt_err *err, int rc, const char *where, const char *fmt, va_list ap)
{
    err->rc = (enum bt_rc)rc;
    err->sys = 0;
    err->where = where;
    vsnprintf(err->msg, sizeof(err->msg), fmt, ap);
    for (char *p = err->msg; *p; p++) {
        if ((unsigned char)*p < 0x20 || *p == 0x7f) {
            *p = '?';
        }
    }
}

int bt_err_set(struct bt_err *err, int rc, const char *where, const char *fmt, ...)
{
    va_list ap;

    if (err) {
        va_start(ap, fmt);
        err_fill(err, rc, where, fmt, ap);
        va_end(ap);
    }
    return rc;
}

int bt_err_set_sys(struct bt_err *err, int rc, const char *where, const char *fmt, ...)
{
    int sys = errno;
    va_list ap;
    size_t n;

    if (err) {
        va_start(ap, fmt);
        err_fill(err, rc, where, fmt, ap);
        va_end(ap);
        err->sys = sys;
        n = strlen(err->msg);
        snprintf(err->msg + n, sizeof(err->msg) - n, ": %s", strerror(sys));
    }
    return rc;
}

void bt_bug(const char *where, const char *what)
{
    fprintf(stderr, "BUG %s: %s\n", where, what);
    abort();
}

void bt_free_ptr(void *pp)
{
    void **p = pp;

    free(*p);
    *p = NULL;
}

void bt_close_fd(const int *fd)
{
    if (*fd >= 0) {
        close(*fd);
    }
}
