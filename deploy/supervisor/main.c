/* baton-supervisor: starts the processes of a cluster on one host, keeps as many of each role as
 * are wanted, and takes orders from batonctl (deploy/supervisor/README.md). Thread: main. */
#include "common/node/node.h"
#include "common/obs/log.h"
#include "common/thr/mailbox.h"
#include "deploy/supervisor/supervisor.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

struct sv_conf {
    struct bt_node_conf common;
    char *roles, *run, *socket;
    bool boot_retry;
    uint64_t client_idle_ns;
};

#define S struct sv_conf
static const struct bt_conf_opt opts[] = {
    BT_NODE_CONF_ROWS(S, common),
    BT_CONF_STR(S, roles, "roles", NULL, 4000, "JSON file that says which processes there are."),
    BT_CONF_STR(S,
                run,
                "run",
                NULL,
                4000,
                "Folder for logs, ready files and the state; made if it is not there."),
    BT_CONF_STR(
        S, socket, "socket", "", 107, "Path of the socket for batonctl; empty = RUN/control.sock."),
    BT_CONF_BOOL(S,
                 boot_retry,
                 "boot_retry",
                 "off",
                 "Start again what ends before all processes were ready once, instead of ending."),
    BT_CONF_DURATION(S,
                     client_idle_ns,
                     "client_idle",
                     "30s",
                     100,
                     86400000,
                     "A client of the socket that asks nothing for this long is closed."),
};
#undef S

struct app {
    struct sv sv;
    struct bt_node *node;
    char socket[4200];
};

static void ask_stop(void *arg)
{
    sv_stop(arg);
}

static void on_ready(void *arg)
{
    struct app *a = arg;
    struct bt_node_addr addr = {"socket", a->sv.socket};
    struct bt_err err = {0};

    if (bt_node_ready(a->node, &addr, 1, &err) < 0) {
        BT_ERROR("ready", "msg=\"%s\"", bt_err_msg(&err, BT_E_IO));
        sv_stop(&a->sv);
    }
}

/* One supervisor a folder: two would start everything twice. */
static int lock_folder(struct sv *sv, struct bt_err *err)
{
    char path[4200];

    if (mkdir(sv->run, 0700) < 0 && errno != EEXIST) {
        return BT_FAIL_SYS(err, BT_E_CONFIG, "run = %.120s", sv->run);
    }
    snprintf(path, sizeof(path), "%.4000s/lock", sv->run);
    sv->lock_fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (sv->lock_fd < 0) {
        return BT_FAIL_SYS(err, BT_E_CONFIG, "%.120s", path);
    }
    if (flock(sv->lock_fd, LOCK_EX | LOCK_NB) < 0) {
        return BT_FAIL(err, BT_E_CONFIG, "another supervisor works in %.120s", sv->run);
    }
    return BT_OK;
}

static int prepare(struct app *a, const struct sv_conf *conf, struct bt_err *err)
{
    int rc;

    snprintf(a->socket, sizeof(a->socket), "%s%s", conf->socket[0] ? conf->socket : conf->run,
             conf->socket[0] ? "" : "/control.sock");
    if ((rc = sv_config_read(&a->sv, conf->roles, err)) < 0 ||
        (rc = lock_folder(&a->sv, err)) < 0 || (rc = bt_eventfd_create(&a->sv.wake_fd, err)) < 0 ||
        (rc = sv_control_open(&a->sv, a->socket, err)) < 0) {
        return rc;
    }
    return sv_state_read(&a->sv, err);
}

static void cleanup(struct sv *sv)
{
    sv_control_close(sv);
    for (size_t i = 0; i < sv->n_roles; i++) {
        bt_list_for_each_safe (it, &sv->roles[i]->childs) {
            sv_child_free(BT_LIST_ENTRY(it, struct sv_child, link));
        }
        sv_role_free(sv->roles[i]);
    }
    if (sv->wake_fd >= 0) {
        close(sv->wake_fd);
    }
    if (sv->lock_fd >= 0) {
        close(sv->lock_fd);
    }
}

static int run(struct bt_node *node, const struct sv_conf *conf)
{
    static struct app a;
    struct bt_err err = {0};
    int code = BT_EXIT_OK, rc;

    a.node = node;
    a.sv = (struct sv){.run = conf->run,
                       .boot_retry = conf->boot_retry,
                       .client_idle_ns = conf->client_idle_ns,
                       .wake_fd = -1,
                       .lock_fd = -1,
                       .listen_fd = -1,
                       .ready = on_ready,
                       .ready_arg = &a};
    bt_list_init(&a.sv.clients);
    rc = prepare(&a, conf, &err);
    if (rc < 0) {
        code = bt_node_fail(rc == BT_E_CONFIG || rc == BT_E_FORMAT ? BT_EXIT_CONFIG : BT_EXIT_OTHER,
                            rc, &err);
    } else {
        bt_node_on_stop(node, ask_stop, &a.sv);
        sv_run(&a.sv);
        code = a.sv.failed ? BT_EXIT_OTHER : BT_EXIT_OK;
    }
    cleanup(&a.sv);
    return code;
}

int main(int argc, char **argv)
{
    struct sv_conf conf = {0};
    struct bt_node_args args = {
        .spec = {.program = "baton-supervisor",
                 .summary = "Keeps the processes of a cluster running on one host.",
                 .opts = opts,
                 .n_opts = BT_ARRAY_LEN(opts),
                 .out = &conf},
        .conf = &conf.common,
        .argv = argv,
    };
    struct bt_node *node;
    int code;

    (void)argc;
    if (bt_node_create(&args, &node, &code)) {
        code = run(node, &conf);
        bt_node_destroy(node);
    }
    return code;
}
