/* A small server with the Echo service, health and reflection, for tests of common/rpc from
 * outside.
 *
 *   rpc_echo [--listen ADDRESS] [--protoset FILE] [--max-message-bytes N] [--grace-ms N]
 *            [--keepalive-ms N] [--allow-insecure]
 *
 * Prints "ready PORT" when it serves. SIGTERM: drain, at most grace-ms, then exit code 0 and
 * "opened N closed N". SIGUSR1 toggles the health state of baton.test.Echo. */
#include "common/base/buf.h"
#include "common/obs/log.h"
#include "common/rpc/health.h"
#include "common/rpc/reflection.h"
#include "common/rpc/server.h"
#include "common/thr/thread.h"

#include "tests/tools/rpc_echo_service.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>

struct app {
    struct bt_loop *loop;
    struct bt_rpc_server *srv;
    struct bt_health *health;
    struct bt_reflection *reflection;
    struct bt_rpc_service echo;
    struct echo_stats stats;
    struct bt_msg term;
    bool not_serving;
    uint64_t grace_ns;
    sigset_t signals;
};

struct options {
    const char *address, *protoset;
    struct bt_rpc_server_config config;
    uint64_t grace_ms;
};

static void stopped(void *arg)
{
    struct app *app = arg;

    bt_loop_stop(app->loop);
}

static void on_term(struct bt_msg *msg, void *consumer)
{
    struct app *app = BT_CONTAINER_OF(msg, struct app, term);

    bt_health_set_all(app->health, BT_HEALTH_NOT_SERVING);
    bt_rpc_server_shutdown(app->srv, bt_deadline_ns(app->grace_ns), stopped, app);
}

/* A message is free to be posted again only when its handler ran: one for each signal. */
struct toggle {
    struct bt_msg msg;
    struct app *app;
};

static void on_toggle(struct bt_msg *msg, void *consumer)
{
    struct toggle *t = BT_CONTAINER_OF(msg, struct toggle, msg);
    struct app *app = t->app;

    free(t);
    app->not_serving = !app->not_serving;
    bt_health_set(app->health, "baton.test.Echo",
                  app->not_serving ? BT_HEALTH_NOT_SERVING : BT_HEALTH_SERVING);
}

static void *signal_thread(void *arg)
{
    struct app *app = arg;
    struct toggle *t;
    int sig;

    while (sigwait(&app->signals, &sig) == 0) {
        if (sig == SIGTERM) {
            bt_loop_post(app->loop, &app->term);
            return NULL;
        }
        t = bt_calloc(1, sizeof(*t));
        BT_BUG_ON(!t);
        t->msg.handle = on_toggle;
        t->app = app;
        bt_loop_post(app->loop, &t->msg);
    }
    return NULL;
}

static bool parse(int argc, char **argv, struct options *o)
{
    *o = (struct options){.address = "127.0.0.1:0", .grace_ms = 2000};
    for (int i = 1; i < argc; i++) {
        const char *value = i + 1 < argc ? argv[i + 1] : NULL;

        if (strcmp(argv[i], "--allow-insecure") == 0) {
            o->config.allow_insecure = true;
            continue;
        }
        if (!value) {
            return false;
        }
        if (strcmp(argv[i], "--listen") == 0) {
            o->address = value;
        } else if (strcmp(argv[i], "--protoset") == 0) {
            o->protoset = value;
        } else if (strcmp(argv[i], "--max-message-bytes") == 0) {
            o->config.max_message_bytes = strtoull(value, NULL, 10);
        } else if (strcmp(argv[i], "--grace-ms") == 0) {
            o->grace_ms = strtoull(value, NULL, 10);
        } else if (strcmp(argv[i], "--keepalive-ms") == 0) {
            o->config.keepalive.time_ms = (int)strtol(value, NULL, 10);
            o->config.keepalive.timeout_ms = o->config.keepalive.time_ms;
        } else {
            return false;
        }
        i++;
    }
    return true;
}

static int read_file(const char *path, struct bt_buf *out)
{
    char chunk[4096];
    FILE *f = fopen(path, "rb");
    size_t n;
    int rc = f ? BT_OK : BT_E_IO;

    while (rc == BT_OK && (n = fread(chunk, 1, sizeof(chunk), f)) > 0) {
        rc = bt_buf_add(out, chunk, n);
    }
    if (f) {
        fclose(f);
    }
    return rc;
}

static int serve(struct app *app, const struct options *o, struct bt_str set, struct bt_err *err)
{
    int port = 0, rc;

    rc = bt_rpc_server_create(app->loop, &o->config, &app->srv, err);
    if (rc == BT_OK) {
        rc = bt_rpc_server_listen(app->srv, o->address, &port, err);
    }
    if (rc == BT_OK) {
        echo_service_init(&app->echo, &app->stats);
        rc = bt_rpc_server_register(app->srv, &app->echo, err);
    }
    if (rc == BT_OK) {
        rc = bt_health_create(app->srv, &app->health, err);
    }
    if (rc == BT_OK) {
        rc = bt_reflection_create(app->srv, &set, set.n > 0, &app->reflection, err);
    }
    if (rc == BT_OK) {
        rc = bt_rpc_server_start(app->srv, err);
    }
    if (rc == BT_OK) {
        bt_health_set(app->health, "baton.test.Echo", BT_HEALTH_SERVING);
        bt_health_set(app->health, "", BT_HEALTH_SERVING);
        printf("ready %d\n", port);
        fflush(stdout);
    }
    return rc;
}

int main(int argc, char **argv)
{
    struct app app = {.term.handle = on_term};
    struct bt_buf set = {0};
    struct options o;
    struct bt_err err;
    pthread_t tid;
    int rc;

    if (!parse(argc, argv, &o) || (o.protoset && read_file(o.protoset, &set) < 0)) {
        fprintf(stderr, "usage: see the head of rpc_echo.c\n");
        return 2;
    }
    app.grace_ns = o.grace_ms * BT_NS_PER_MS;
    sigemptyset(&app.signals);
    sigaddset(&app.signals, SIGTERM);
    sigaddset(&app.signals, SIGUSR1);
    sigprocmask(SIG_BLOCK, &app.signals, NULL);
    rc = bt_loop_create(&app.loop, &err);
    if (rc == BT_OK) {
        rc = serve(&app, &o, bt_buf_str(&set), &err);
    }
    if (rc == BT_OK) {
        rc = bt_thread_start(&tid, "signal", signal_thread, &app, &err);
    }
    if (rc == BT_OK) {
        bt_loop_run(app.loop);
        pthread_join(tid, NULL);
    } else {
        fprintf(stderr, "%s\n", err.msg);
    }
    bt_rpc_server_destroy(app.srv);
    bt_reflection_destroy(app.reflection);
    bt_health_destroy(app.health);
    bt_loop_destroy(app.loop);
    bt_buf_fini(&set);
    if (rc == BT_OK) {
        printf("opened %d closed %d\n", app.stats.n_opened, app.stats.n_closed);
    }
    return rc == BT_OK ? 0 : 1;
}
