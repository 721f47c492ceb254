/* The control socket: who may ask, what is asked, what is answered (protocol.h).
 *
 * A client that sends what is no request, does not take its answer, or asks nothing for
 * client_idle, loses its connection.
 * Nothing here blocks. A request is checked whole before any of it is done. */
#include "deploy/supervisor/supervisor.h"

#include "common/base/buf.h"
#include "common/file/json.h"
#include "common/obs/log.h"

#include <errno.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#define CLIENTS_MAX 100

struct sv_client {
    struct bt_list link; /* sv.clients */
    int fd;
    uint64_t heard_ns;
};

/* --- answers --------------------------------------------------------------------------------- */

static json_t *BT_PRINTF_ATTR(2, 3) refusal(const char *code, const char *fmt, ...)
{
    char text[300];
    va_list ap;

    va_start(ap, fmt);
    vsnprintf(text, sizeof(text), fmt, ap);
    va_end(ap);
    for (char *p = text; *p; p++) { /* what a client said may be cut inside of a character */
        *p = (unsigned char)*p < ' ' || (unsigned char)*p > '~' ? '?' : *p;
    }
    return json_pack("{s:b, s:s, s:s}", "ok", 0, "code", code, "error", text);
}

static json_t *accepted(json_t *stopping)
{
    return json_pack("{s:b, s:o}", "ok", 1, "stopping", stopping ? stopping : json_array());
}

/* What a ready file says of the address that a process listens on; "" if it says nothing. */
static void listen_of(const struct sv *sv, const struct sv_child *c, char *ret, size_t size)
{
    char *path = c->role->ready ? sv_expand(sv, c, c->role->ready) : NULL;
    struct stat st;
    FILE *f = path && stat(path, &st) == 0 && S_ISREG(st.st_mode) ? fopen(path, "re") : NULL;
    char line[512];

    ret[0] = '\0';
    while (f && fgets(line, sizeof(line), f)) {
        if (strncmp(line, "listen=", 7) == 0) {
            snprintf(ret, size, "%.*s", (int)strcspn(line + 7, "\n"), line + 7);
        }
    }
    if (f) {
        fclose(f);
    }
    free(path);
}

static json_t *tell_child(const struct sv *sv, const struct sv_child *c)
{
    char listen[320];

    listen_of(sv, c, listen, sizeof(listen));
    return json_pack("{s:s, s:i, s:s, s:I, s:i, s:s}", "name", c->name, "pid", (int)c->pid, "state",
                     sv_state_name(c->state), "restarts", (json_int_t)c->n_restarts, "exit",
                     c->exit_status, "listen", listen);
}

static json_t *tell_status(const struct sv *sv)
{
    json_t *roles = json_array();

    for (size_t i = 0; i < sv->n_roles; i++) {
        const struct sv_role *r = sv->roles[i];
        json_t *list = json_array();

        bt_list_for_each (it, &r->childs) {
            json_array_append_new(list, tell_child(sv, BT_LIST_ENTRY(it, struct sv_child, link)));
        }
        json_array_append_new(roles,
                              json_pack("{s:s, s:b, s:b, s:s, s:i, s:i, s:o}", "name", r->name,
                                        "single", r->single, "canary", r->canary, "release",
                                        r->release ? r->release : "", "replicas", (int)r->wanted,
                                        "ready", (int)sv_role_ready(r), "processes", list));
    }
    return json_pack("{s:b, s:o}", "ok", 1, "roles", roles);
}

/* --- requests -------------------------------------------------------------------------------- */

static const char *text_in(const json_t *m, const char *key)
{
    return json_string_value(json_object_get(m, key));
}

static bool is_dry(const json_t *m)
{
    return json_is_true(json_object_get(m, "dry_run"));
}

/* A role that can be scaled, or the answer that says why not. */
static struct sv_role *scalable(const struct sv *sv, const char *name, json_t **ret_refusal)
{
    struct sv_role *role = name ? sv_role_find(sv, name) : NULL;

    if (!role) {
        *ret_refusal = refusal("not_found", "there is no role %.60s here", name ? name : "(none)");
    } else if (role->single) {
        *ret_refusal = refusal("invalid", "there is exactly one %s", role->name);
        role = NULL;
    }
    return role;
}

/* Names of those that would go if the role had n. */
static void would_stop(const struct sv_role *role, unsigned n, json_t *names)
{
    unsigned have = 0;

    bt_list_for_each (it, &role->childs) {
        const struct sv_child *c = BT_LIST_ENTRY(it, struct sv_child, link);

        have += !c->unwanted;
        if (!c->unwanted && have > n) {
            json_array_append_new(names, json_string(c->name));
        }
    }
}

static json_t *do_scale(struct sv *sv, const json_t *m)
{
    json_t *roles = json_object_get(m, "roles"), *v, *bad = NULL, *stopping;
    const char *key;

    if (json_object_size(roles) == 0) {
        return refusal("invalid", "no roles");
    }
    json_object_foreach(roles, key, v)
    {
        if (!scalable(sv, key, &bad)) {
            return bad;
        }
        if (!json_is_integer(v) || json_integer_value(v) < 0 ||
            json_integer_value(v) > SV_MAX_REPLICAS) {
            return refusal("invalid", "%.60s: 0 to %d replicas", key, SV_MAX_REPLICAS);
        }
    }
    stopping = json_array();
    json_object_foreach(roles, key, v)
    {
        struct sv_role *role = sv_role_find(sv, key);

        would_stop(role, (unsigned)json_integer_value(v), stopping);
        if (!is_dry(m)) {
            sv_role_scale(sv, role, (unsigned)json_integer_value(v));
        }
    }
    return accepted(stopping);
}

static json_t *do_flip(struct sv *sv, const json_t *m)
{
    const char *name = text_in(m, "name");
    struct sv_child *c = name ? sv_child_find(sv, name) : NULL;
    json_t *bad = NULL;
    struct sv_role *to = scalable(sv, text_in(m, "to"), &bad);

    if (!to) {
        return bad;
    }
    if (!c || c->unwanted) {
        return refusal("not_found", "there is no process %.60s here", name ? name : "(none)");
    }
    if (!scalable(sv, c->role->name, &bad)) {
        return bad;
    }
    if (c->role->wanted == 0) { /* scaled by another client, and the turn has not come yet */
        return refusal("invalid", "%s is about to end", c->name);
    }
    if (c->role == to) {
        return refusal("invalid", "%s is a %s already", c->name, to->name);
    }
    if (to->wanted == SV_MAX_REPLICAS) {
        return refusal("invalid", "%s: 0 to %d replicas", to->name, SV_MAX_REPLICAS);
    }
    if (!is_dry(m)) {
        BT_INFO("flip", "name=%s to=%s", c->name, to->name);
        sv_role_scale(sv, c->role, c->role->wanted - 1);
        sv_role_scale(sv, to, to->wanted + 1);
        c->unwanted = true;
        sv_child_stop(sv, c);
    }
    return accepted(json_pack("[s]", c->name));
}

static json_t *do_canary(struct sv *sv, const json_t *m)
{
    const char *binary = text_in(m, "binary"), *release = text_in(m, "release");
    json_t *v = json_object_get(m, "replicas"), *bad = NULL;
    json_int_t n = v ? json_integer_value(v) : 1;
    struct sv_role *role = scalable(sv, text_in(m, "role"), &bad);
    struct bt_err err = {0};

    if (!role) {
        return bad;
    }
    if (role->canary || (!binary && !release) || n < 1 || n > SV_MAX_REPLICAS) {
        return refusal("invalid",
                       "a canary has another binary or release than its role, and 1 to "
                       "%d replicas",
                       SV_MAX_REPLICAS);
    }
    if (sv_role_canary_of(sv, role)) {
        return refusal("invalid", "%s has a canary already: promote it or roll it back",
                       role->name);
    }
    if (binary && strchr(binary, '/') && access(binary, X_OK) != 0) {
        return refusal("not_found", "%.200s cannot be run here", binary);
    }
    if (is_dry(m)) {
        return accepted(NULL);
    }
    if (sv_role_canary(sv, role, binary, release, &err) < 0) {
        return refusal("invalid", "%s", bt_err_msg(&err, BT_E_NOMEM));
    }
    BT_INFO("canary", "role=%s binary=\"%s\" release=\"%s\"", role->name, binary ? binary : "",
            release ? release : "");
    sv_role_scale(sv, sv_role_canary_of(sv, role), (unsigned)n);
    return accepted(NULL);
}

/* The canary goes; if it is promoted, the role becomes what it was. */
static json_t *end_canary(struct sv *sv, const json_t *m, bool promote)
{
    json_t *bad = NULL, *stopping;
    struct sv_role *role = scalable(sv, text_in(m, "role"), &bad), *canary;

    if (!role) {
        return bad;
    }
    canary = sv_role_canary_of(sv, role);
    if (!canary || canary->wanted == 0) {
        return refusal("not_found", "%s has no canary", role->name);
    }
    stopping = json_array();
    would_stop(canary, 0, stopping);
    if (!is_dry(m)) {
        if (promote && sv_role_take(role, canary) < 0) {
            json_decref(stopping);
            return refusal("invalid", "no memory");
        }
        BT_INFO(promote ? "promote" : "rollback", "role=%s", role->name);
        sv_role_scale(sv, canary, 0);
    }
    return accepted(stopping);
}

static json_t *answer(struct sv *sv, const json_t *m)
{
    const char *op = text_in(m, "op");

    if (!op) {
        return refusal("invalid", "no op");
    }
    if (strcmp(op, "status") == 0) {
        return tell_status(sv);
    }
    if (sv->stopping) {
        return refusal("invalid", "the supervisor is ending");
    }
    if (strcmp(op, "scale") == 0) {
        return do_scale(sv, m);
    }
    if (strcmp(op, "flip") == 0) {
        return do_flip(sv, m);
    }
    if (strcmp(op, "canary") == 0) {
        return do_canary(sv, m);
    }
    if (strcmp(op, "rollback") == 0) {
        return end_canary(sv, m, false);
    }
    if (strcmp(op, "promote") == 0) {
        return end_canary(sv, m, true);
    }
    return refusal("invalid", "unknown op %.40s", op);
}

/* --- clients --------------------------------------------------------------------------------- */

static void drop(struct sv_client *c)
{
    bt_list_remove(&c->link);
    close(c->fd);
    free(c);
}

static bool send_json(int fd, json_t *take_doc)
{
    char *text = take_doc ? json_dumps(take_doc, JSON_COMPACT) : NULL;
    size_t n = text ? strlen(text) : 0;
    bool ok =
        n > 0 && n <= SV_PACKET_MAX && send(fd, text, n, MSG_DONTWAIT | MSG_NOSIGNAL) == (ssize_t)n;

    free(text);
    json_decref(take_doc);
    return ok;
}

/* False: the client is to go. *ret_asked: it has sent something. */
static bool serve(struct sv *sv, struct sv_client *c, bool *ret_asked)
{
    static char packet[SV_PACKET_MAX + 1];
    const struct bt_json_caps caps = {.bytes = SV_PACKET_MAX, .values = 4000, .depth = 6};
    ssize_t n = recv(c->fd, packet, sizeof(packet), MSG_DONTWAIT);
    struct bt_err err = {0};
    json_t *m = NULL, *out;
    int rc;

    *ret_asked = n > 0;
    if (n < 0) {
        return errno == EAGAIN || errno == EINTR;
    }
    if (n == 0 || n > SV_PACKET_MAX) {
        return false;
    }
    rc = bt_json_parse((struct bt_str){packet, (size_t)n}, "request", &caps, &m, &err);
    out = rc < 0 ? refusal("invalid", "%s", bt_err_msg(&err, rc)) : answer(sv, m);
    json_decref(m);
    return send_json(c->fd, out);
}

static bool is_ours(int fd)
{
    struct ucred peer;
    socklen_t n = sizeof(peer);

    return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &n) == 0 && peer.uid == geteuid();
}

static void take_clients(struct sv *sv)
{
    size_t n = 0;
    int fd;

    bt_list_for_each (it, &sv->clients) {
        n++;
    }
    while ((fd = accept4(sv->listen_fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK)) >= 0) {
        struct sv_client *c = NULL;

        if (!is_ours(fd)) {
            BT_WARN("control", "msg=\"a process of another user was refused\"");
            send_json(fd, refusal("denied", "only the user that runs the supervisor is served"));
        } else if (n < CLIENTS_MAX) {
            c = bt_calloc(1, sizeof(*c));
        }
        if (!c) {
            close(fd);
            continue;
        }
        c->fd = fd;
        c->heard_ns = bt_now_ns();
        bt_list_push_back(&sv->clients, &c->link);
        n++;
    }
}

size_t sv_control_poll(struct sv *sv, struct pollfd *fds, size_t max)
{
    size_t n = 0;

    fds[n++] = (struct pollfd){sv->listen_fd, POLLIN, 0};
    bt_list_for_each (it, &sv->clients) {
        if (n < max) {
            fds[n++] = (struct pollfd){BT_LIST_ENTRY(it, struct sv_client, link)->fd, POLLIN, 0};
        }
    }
    return n;
}

void sv_control_turn(struct sv *sv, uint64_t *ret_next_ns)
{
    uint64_t now = bt_now_ns();

    take_clients(sv);
    bt_list_for_each_safe (it, &sv->clients) {
        struct sv_client *c = BT_LIST_ENTRY(it, struct sv_client, link);

        bool asked = false;

        if (!serve(sv, c, &asked) || (!asked && now >= c->heard_ns + sv->client_idle_ns)) {
            drop(c);
        } else if (asked) {
            c->heard_ns = now;
        }
    }
    bt_list_for_each (it, &sv->clients) {
        uint64_t heard = BT_LIST_ENTRY(it, struct sv_client, link)->heard_ns;

        *ret_next_ns = BT_MIN(*ret_next_ns, heard + sv->client_idle_ns);
    }
}

/* The folder's lock is ours, so a socket that is there is an earlier supervisor's. */
int sv_control_open(struct sv *sv, const char *path, struct bt_err *err)
{
    struct sockaddr_un sa = {.sun_family = AF_UNIX};
    mode_t mask;
    int fd, rc;

    if (strlen(path) >= sizeof(sa.sun_path) || !path[0]) {
        return BT_FAIL(err, BT_E_CONFIG, "socket: a path of 1 to %zu bytes",
                       sizeof(sa.sun_path) - 1);
    }
    snprintf(sa.sun_path, sizeof(sa.sun_path), "%s", path);
    fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) {
        return BT_FAIL_SYS(err, BT_E_SYS, "socket");
    }
    unlink(path);
    mask = umask(0177);
    rc = bind(fd, (struct sockaddr *)&sa, sizeof(sa));
    umask(mask);
    if (rc < 0 || listen(fd, 64) < 0) {
        rc = BT_FAIL_SYS(err, BT_E_SYS, "socket %.100s", path);
        close(fd);
        return rc;
    }
    snprintf(sv->socket, sizeof(sv->socket), "%s", path);
    sv->listen_fd = fd;
    return BT_OK;
}

void sv_control_close(struct sv *sv)
{
    bt_list_for_each_safe (it, &sv->clients) {
        drop(BT_LIST_ENTRY(it, struct sv_client, link));
    }
    if (sv->listen_fd >= 0) {
        close(sv->listen_fd);
        unlink(sv->socket);
    }
}
