/* The supervisor's control socket, and the state file that an earlier supervisor has left. Requests
 * are answered with an object that says whether they were done, or the client goes; names stay
 * unique and numbers within their limits. First byte: odd = the first part is a state file; the
 * other parts are packets. Nothing is started: processes wait for the loop, which does not run. */
#include "deploy/supervisor/control.c"

#include "tests/fuzz/feeder.inc.h"

#include <fcntl.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static const char roles[] =
    "{\"roles\": [{\"name\": \"redis\", \"single\": true, \"command\": [\"r\"]},"
    "{\"name\": \"prefill\", \"replicas\": 2, \"command\": [\"p\", \"--name={name}\"]},"
    "{\"name\": \"decode\", \"command\": [\"d\"], \"ready\": \"{run}/{name}.ready\"}]}";

static void must(bool ok)
{
    if (!ok) {
        abort();
    }
}

static char dir[64];

static void remove_dir(void)
{
    static const char *const files[] = {"roles.json", "state.json"};
    char path[128];

    for (size_t i = 0; i < BT_ARRAY_LEN(files); i++) {
        snprintf(path, sizeof(path), "%s/%s", dir, files[i]);
        unlink(path);
    }
    rmdir(dir);
}

static const char *run_dir(void)
{
    if (!dir[0]) {
        snprintf(dir, sizeof(dir), "/tmp/fuzz-supervisor-XXXXXX");
        must(mkdtemp(dir) && atexit(remove_dir) == 0);
    }
    return dir;
}

static void put_file(const char *name, struct bt_str text)
{
    char path[128];
    int fd;

    snprintf(path, sizeof(path), "%s/%s", run_dir(), name);
    fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    must(fd >= 0 && write(fd, text.p, text.n) == (ssize_t)text.n);
    close(fd);
}

static void audit(const struct sv *sv)
{
    must(sv->n_roles <= SV_MAX_ROLES);
    for (size_t i = 0; i < sv->n_roles; i++) {
        const struct sv_role *r = sv->roles[i];
        unsigned before = 0, n = 0;

        must(sv_role_find(sv, r->name) == r && r->wanted <= SV_MAX_REPLICAS && r->n_command > 0);
        must(!r->single || r->wanted == 1);
        bt_list_for_each (it, &r->childs) {
            const struct sv_child *c = BT_LIST_ENTRY(it, struct sv_child, link);

            must(n++ == 0 || c->index > before);
            before = c->index;
        }
    }
}

/* One packet, and its answer. */
static void ask(struct sv *sv, struct sv_client *c, int sock, struct bt_str packet)
{
    static char text[SV_PACKET_MAX + 1];
    bool asked, stays;
    ssize_t n;
    json_t *m;

    if (packet.n == 0 || send(sock, packet.p, packet.n, MSG_NOSIGNAL) != (ssize_t)packet.n) {
        return;
    }
    stays = serve(sv, c, &asked);
    must(asked && stays);
    n = recv(sock, text, sizeof(text), MSG_DONTWAIT);
    must(n > 0 && n <= SV_PACKET_MAX);
    m = json_loadb(text, (size_t)n, 0, NULL);
    must(m && json_is_boolean(json_object_get(m, "ok")));
    must(json_is_true(json_object_get(m, "ok")) || json_is_string(json_object_get(m, "error")));
    json_decref(m);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    struct feeder f = {data, n};
    struct sv sv = {.run = run_dir(), .wake_fd = -1, .lock_fd = -1, .listen_fd = -1};
    struct sv_client client = {0};
    bool with_state = feeder_byte(&f) % 2 == 1;
    char path[128];
    struct bt_str part;
    int ends[2], rc = BT_OK;

    bt_log_threshold = BT_LOG_ERROR;
    bt_list_init(&sv.clients);
    put_file("roles.json", BT_STR(roles));
    snprintf(path, sizeof(path), "%s/roles.json", run_dir());
    must(sv_config_read(&sv, path, NULL) == BT_OK);
    if (with_state && feeder_part(&f, &part)) {
        put_file("state.json", part);
        rc = sv_state_read(&sv, NULL);
        audit(&sv);
    }
    must(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) == 0);
    client.fd = ends[0];
    while (rc == BT_OK && feeder_part(&f, &part)) {
        ask(&sv, &client, ends[1], part);
        audit(&sv);
    }
    for (size_t i = 0; i < sv.n_roles; i++) {
        bt_list_for_each_safe (it, &sv.roles[i]->childs) {
            sv_child_free(BT_LIST_ENTRY(it, struct sv_child, link));
        }
        sv_role_free(sv.roles[i]);
    }
    close(ends[0]);
    close(ends[1]);
    return 0;
}
