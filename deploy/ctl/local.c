/* The client's end of the supervisor's socket. */
#include "deploy/ctl/local.h"

#include "common/file/json.h"
#include "deploy/ctl/cluster.h"
#include "deploy/supervisor/protocol.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

const char *ctl_local_path(const struct ctl_args *a, char buf[108])
{
    const char *dir = getenv("XDG_RUNTIME_DIR");

    if (a->supervisor) {
        return a->supervisor;
    }
    snprintf(buf, 108, "%.80s/baton/control.sock", geteuid() == 0 || !dir ? "/run" : dir);
    return buf;
}

static int unreachable(const char *path, const char *what)
{
    fprintf(stderr, "batonctl: no supervisor at %s: %s\n", path, what);
    return CTL_UNREACHABLE;
}

static int connect_to(const char *path, int *ret_fd)
{
    struct sockaddr_un sa = {.sun_family = AF_UNIX};
    int fd;

    if (strlen(path) >= sizeof(sa.sun_path)) {
        return unreachable(path, "the path is too long");
    }
    snprintf(sa.sun_path, sizeof(sa.sun_path), "%s", path);
    fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (fd < 0 || connect(fd, (struct sockaddr *)&sa, sizeof(sa)) < 0) {
        int code = unreachable(path, strerror(errno));

        code = errno == EACCES ? CTL_DENIED : code;
        if (fd >= 0) {
            close(fd);
        }
        return code;
    }
    *ret_fd = fd;
    return CTL_OK;
}

static int exchange(int fd, const char *path, const char *text, uint64_t deadline_ns, json_t **ret)
{
    static char packet[SV_PACKET_MAX];
    const struct bt_json_caps caps = {.bytes = sizeof(packet), .values = 40000, .depth = 8};
    struct pollfd p = {fd, POLLIN, 0};
    struct bt_err err = {0};
    uint64_t now = bt_now_ns();
    ssize_t n;
    int rc;

    /* Who is refused may have been told before it could ask. */
    if (send(fd, text, strlen(text), MSG_NOSIGNAL) < 0 && errno != EPIPE) {
        return unreachable(path, strerror(errno));
    }
    rc = poll(&p, 1, now < deadline_ns ? (int)((deadline_ns - now) / BT_NS_PER_MS) : 0);
    if (rc == 0) {
        fprintf(stderr, "batonctl: the supervisor at %s does not answer in time\n", path);
        return CTL_TIMEOUT;
    }
    n = rc < 0 ? -1 : recv(fd, packet, sizeof(packet), 0);
    if (n <= 0) {
        return unreachable(path, n == 0 ? "it has closed the connection" : strerror(errno));
    }
    rc = bt_json_parse((struct bt_str){packet, (size_t)n}, "answer", &caps, ret, &err);
    if (rc < 0) {
        fprintf(stderr, "batonctl: %s\n", bt_err_msg(&err, rc));
        return CTL_FAILED;
    }
    return CTL_OK;
}

/* The exit code that an answer stands for. */
static int code_of(const json_t *answer)
{
    const char *code = json_string_value(json_object_get(answer, "code"));
    const char *text = json_string_value(json_object_get(answer, "error"));

    if (json_is_true(json_object_get(answer, "ok"))) {
        return CTL_OK;
    }
    fprintf(stderr, "batonctl: %s\n", text ? text : "refused");
    if (code && strcmp(code, "not_found") == 0) {
        return CTL_NOT_FOUND;
    }
    return code && strcmp(code, "denied") == 0 ? CTL_DENIED : CTL_FAILED;
}

int ctl_local_ask(const struct ctl_args *a,
                  json_t *take_request,
                  uint64_t deadline_ns,
                  json_t **ret_answer)
{
    char *text = take_request ? json_dumps(take_request, JSON_COMPACT) : NULL;
    char buf[108];
    const char *path = ctl_local_path(a, buf);
    json_t *answer = NULL;
    int fd = -1, code = text ? connect_to(path, &fd) : CTL_FAILED;

    json_decref(take_request);
    if (code == CTL_OK) {
        code = exchange(fd, path, text, deadline_ns, &answer);
    }
    if (fd >= 0) {
        close(fd);
    }
    free(text);
    code = code == CTL_OK ? code_of(answer) : code;
    if (code == CTL_OK) {
        *ret_answer = answer;
    } else {
        json_decref(answer);
    }
    return code;
}

/* --- status ---------------------------------------------------------------------------------- */

const json_t *ctl_local_role(const json_t *status, const char *name)
{
    const json_t *r;
    size_t i;

    json_array_foreach(json_object_get(status, "roles"), i, r)
    {
        const char *s = json_string_value(json_object_get(r, "name"));

        if (s && strcmp(s, name) == 0) {
            return r;
        }
    }
    return NULL;
}

const json_t *ctl_local_process(const json_t *status, const char *name, const json_t **ret_role)
{
    const json_t *r, *p;
    size_t i, j;

    json_array_foreach(json_object_get(status, "roles"), i, r)
    {
        json_array_foreach(json_object_get(r, "processes"), j, p)
        {
            const char *s = json_string_value(json_object_get(p, "name"));

            if (s && strcmp(s, name) == 0) {
                *ret_role = r;
                return p;
            }
        }
    }
    return NULL;
}

const char *ctl_local_router(const struct ctl_args *a, const json_t *status)
{
    const json_t *role = ctl_local_role(status, "router");
    const char *listen = json_string_value(
        json_object_get(json_array_get(json_object_get(role, "processes"), 0), "listen"));

    return !a->router_given && listen && listen[0] ? listen : a->router;
}

static bool is_settled(const json_t *status)
{
    const json_t *r;
    size_t i;

    json_array_foreach(json_object_get(status, "roles"), i, r)
    {
        json_int_t n = json_integer_value(json_object_get(r, "replicas"));

        if (json_integer_value(json_object_get(r, "ready")) != n ||
            json_array_size(json_object_get(r, "processes")) != (size_t)n) {
            return false;
        }
    }
    return true;
}

static bool none_left(const json_t *status, const json_t *names)
{
    const json_t *v, *role;
    size_t i;

    json_array_foreach(names, i, v)
    {
        if (ctl_local_process(status, json_string_value(v), &role)) {
            return false;
        }
    }
    return true;
}

/* Looks until `names` are gone, or, if NULL, until all is settled. */
static int wait_for(const struct ctl_args *a, const json_t *names, uint64_t deadline_ns)
{
    for (;;) {
        json_t *status = NULL;
        int code = ctl_local_ask(a, json_pack("{s:s}", "op", "status"), deadline_ns, &status);
        bool done = code == CTL_OK && (names ? none_left(status, names) : is_settled(status));

        json_decref(status);
        if (code != CTL_OK || done) {
            return code;
        }
        if (bt_now_ns() + CTL_LOOK_NS / 4 >= deadline_ns) {
            fputs("batonctl: not all processes are as they should be yet\n", stderr);
            return CTL_TIMEOUT;
        }
        ctl_sleep(CTL_LOOK_NS / 4);
    }
}

int ctl_local_settle(const struct ctl_args *a, uint64_t deadline_ns)
{
    return wait_for(a, NULL, deadline_ns);
}

int ctl_local_gone(const struct ctl_args *a, const json_t *names, uint64_t deadline_ns)
{
    return wait_for(a, names, deadline_ns);
}
