/* One UCX worker and the thread that owns it ("xfer").
 *
 * Loop: progress until nothing moves, mailbox, timers, closing peers; after a short spin arm the
 * worker and sleep in poll on {UCX's descriptor, our eventfd} until the next timer. Completion
 * flags live in callbacks, so nothing can be missed between arm and poll: arm answers BUSY when an
 * event slipped in.
 *
 * Teardown order (UCX aborts on any other): remote keys, endpoints, registered memory, listener,
 * worker, context. */
#include "common/net/net_int.h"

#include "common/conf/value.h"
#include "common/obs/log.h"
#include "common/thr/thread.h"
#include "common/thr/time.h"

#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define SPIN_NS        (25 * BT_NS_PER_US)
#define PROGRESS_BATCH 64
#define GATE_POLL_NS   BT_NS_PER_MS /* while busy; asleep it wakes us */
#define DEFAULT_MAX    (1u << 20)
#define STOP_NS        (10 * BT_NS_PER_S)
#define STALL_NS       (1 * BT_NS_PER_S) /* a thread that is so late was stopped */

static bool is_auto(const struct bt_net *net)
{
    return !net->transports[0] || strcmp(net->transports, "auto") == 0;
}

/* ---- timers ---- */

void bt_net_timer_start(struct bt_net *net, struct bt_net_timer *t, uint64_t deadline_ns)
{
    struct bt_list *at;

    bt_net_timer_stop(t);
    t->deadline_ns = deadline_ns;
    if (deadline_ns == BT_NEVER_NS) {
        return;
    }
    /* Most timers are the latest so far: look from the end. */
    for (at = net->timers.prev; at != &net->timers; at = at->prev) {
        if (BT_LIST_ENTRY(at, struct bt_net_timer, link)->deadline_ns <= deadline_ns) {
            break;
        }
    }
    bt_list_insert_before(at->next, &t->link);
}

void bt_net_timer_stop(struct bt_net_timer *t)
{
    if (t->link.next) {
        bt_list_remove(&t->link);
    } else {
        bt_list_init(&t->link);
    }
}

static bool run_timers(struct bt_net *net, uint64_t now)
{
    struct bt_list due;
    bool any = false;

    /* Only those due now: one that restarts itself for "now" waits for the next round. */
    bt_list_init(&due);
    while (!bt_list_empty(&net->timers)) {
        struct bt_net_timer *t = BT_LIST_ENTRY(net->timers.next, struct bt_net_timer, link);

        if (t->deadline_ns > now) {
            break;
        }
        bt_list_remove(&t->link);
        bt_list_push_back(&due, &t->link);
    }
    while (!bt_list_empty(&due)) {
        struct bt_net_timer *t = BT_LIST_ENTRY(due.next, struct bt_net_timer, link);

        bt_list_remove(&t->link);
        t->fn(t);
        any = true;
    }
    return any;
}

/* The thread did not run for STALL_NS and `ns` more: the machine or the process was stopped, or a
 * handler took long. Nobody could be heard meanwhile, so what is beyond STALL_NS counts for no
 * deadline: else whoever was stopped would take all others for silent. */
static void forgive(struct bt_net *net, uint64_t ns)
{
    BT_WARN("net_stall", "ms=%llu", (unsigned long long)(ns / BT_NS_PER_MS));
    net->stalled_ns += ns;
    bt_list_for_each (it, &net->timers) {
        struct bt_net_timer *t = BT_LIST_ENTRY(it, struct bt_net_timer, link);

        if (t->deadline_ns > 0) { /* 0: at once */
            t->deadline_ns += ns;
        }
    }
}

uint64_t bt_net_clock_ns(const struct bt_net *net)
{
    /* What is beyond it is in stalled_ns when the loop comes round. */
    uint64_t now = bt_now_ns();
    bool late = now > net->due_ns && now - net->due_ns > STALL_NS;

    return (late ? net->due_ns + STALL_NS : now) - net->stalled_ns;
}

/* ---- the thread ---- */

static void sleep_until_event(struct bt_net *net)
{
    struct pollfd fds[3] = {{.fd = net->ucp_fd, .events = POLLIN},
                            {.fd = net->efd, .events = POLLIN},
                            {.fd = net->gate_epfd, .events = POLLIN}}; /* -1 is skipped */
    struct timespec ts, *timeout = NULL;
    ucs_status_t status = ucp_worker_arm(net->worker);

    if (status != UCS_OK) {
        return; /* UCS_ERR_BUSY: something came in meanwhile */
    }
    /* Verbs promise an event for completions behind the arming alone; what came between the last
     * look and the arming makes none, save on devices that arm by the place in the queue. */
    if (ucp_worker_progress(net->worker) > 0) {
        return;
    }
    if (!bt_list_empty(&net->timers)) {
        uint64_t now = bt_now_ns();
        uint64_t at = BT_LIST_ENTRY(net->timers.next, struct bt_net_timer, link)->deadline_ns;
        uint64_t d = at > now ? at - now : 0;

        ts = (struct timespec){(time_t)(d / BT_NS_PER_S), (long)(d % BT_NS_PER_S)};
        timeout = &ts;
        net->due_ns = now + d;
    } else {
        net->due_ns = BT_NEVER_NS;
    }
    if (ppoll(fds, 3, timeout, NULL) > 0) {
        if (fds[1].revents & POLLIN) {
            bt_eventfd_clear(net->efd);
        }
        if (fds[2].revents & POLLIN) {
            net->gate_polled_ns = 0; /* look at once */
        }
    }
}

static void close_all(struct bt_net *net)
{
    bt_list_for_each (it, &net->peers) {
        bt_net_peer_close(BT_LIST_ENTRY(it, struct bt_net_peer, link), true);
    }
}

static void loop(struct bt_net *net)
{
    uint64_t busy_at = bt_now_ns(), give_up = BT_NEVER_NS;

    net->due_ns = busy_at;
    for (;;) {
        bool busy = false;
        uint64_t now;

        for (int i = 0; i < PROGRESS_BATCH && ucp_worker_progress(net->worker); i++) {
            busy = true;
            bt_net_post_held(net);
        }
        busy |= bt_net_post_held(net);
        busy |= bt_mailbox_drain(&net->mailbox, net) > 0;
        now = bt_now_ns();
        if (now > net->due_ns && now - net->due_ns > STALL_NS) {
            forgive(net, now - net->due_ns - STALL_NS);
        }
        net->due_ns = now;
        busy |= run_timers(net, now);
        if (net->gated && (net->n_handshakes > 0 || now - net->gate_polled_ns > GATE_POLL_NS)) {
            net->gate_polled_ns = now;
            busy |= bt_net_gate_poll(net);
        }
        busy |= bt_net_reap(net);
        busy |= bt_net_post_held(net);
        if (net->stopping) {
            if (give_up == BT_NEVER_NS) {
                give_up = now + STOP_NS;
            }
            close_all(net);
            if (bt_list_empty(&net->peers)) {
                return;
            }
            if (now > give_up) {
                BT_ERROR("net_stop", "msg=\"operations do not end; memory is left registered\"");
                return;
            }
        }
        if (busy) {
            busy_at = bt_now_ns(); /* the work may have taken long */
        } else if (now - busy_at > SPIN_NS && !net->stopping) {
            sleep_until_event(net);
        }
    }
}

static void on_stop(struct bt_msg *msg, void *consumer)
{
    struct bt_net *net = consumer;

    net->stopping = true;
    bt_mailbox_close(&net->mailbox);
}

static int open_context(struct bt_net *net, struct bt_err *err)
{
    ucp_params_t params = {
        .field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_NAME,
        .features = UCP_FEATURE_AM | UCP_FEATURE_RMA | UCP_FEATURE_WAKEUP,
        .name = "baton",
    };
    ucp_config_t *config;
    ucs_status_t status = ucp_config_read(NULL, NULL, &config);

    if (status != UCS_OK) {
        return BT_FAIL(err, BT_E_CONFIG, "UCX configuration: %s", ucs_status_string(status));
    }
    /* Nobody's shared memory: a process that is killed while it writes into the ring of another
     * leaves a slot that is taken and never filled, and UCX 1.13 waits for it for ever: that node
     * hears nobody on its host any more. Bytes of one host are read without UCX, see mapped.c. */
    status = ucp_config_modify(config, "TLS", is_auto(net) ? "^sysv,posix" : net->transports);
    if (status == UCS_OK && net->devices[0]) {
        status = ucp_config_modify(config, "NET_DEVICES", net->devices);
    }
    if (status == UCS_OK) {
        status = ucp_init(&params, config, &net->context);
    }
    ucp_config_release(config);
    if (status != UCS_OK) {
        return BT_FAIL(err, BT_E_CONFIG,
                       "UCX does not start with transports \"%s\" devices \"%s\": %s",
                       net->transports, net->devices, ucs_status_string(status));
    }
    return BT_OK;
}

static int open_worker(struct bt_net *net, struct bt_err *err)
{
    ucp_worker_params_t params = {
        .field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE,
        .thread_mode = UCS_THREAD_MODE_SINGLE,
    };
    ucp_worker_attr_t attr = {
        .field_mask = UCP_WORKER_ATTR_FIELD_THREAD_MODE | UCP_WORKER_ATTR_FIELD_MAX_AM_HEADER,
    };
    ucs_status_t status = ucp_worker_create(net->context, &params, &net->worker);

    if (status != UCS_OK) {
        return BT_FAIL(err, BT_E_CONFIG, "UCX worker: %s", ucs_status_string(status));
    }
    status = ucp_worker_query(net->worker, &attr);
    if (status != UCS_OK || attr.thread_mode < UCS_THREAD_MODE_SINGLE) {
        return BT_FAIL(err, BT_E_CONFIG, "UCX granted thread mode %d, %d is needed",
                       (int)attr.thread_mode, (int)UCS_THREAD_MODE_SINGLE);
    }
    net->max_head = BT_MIN(attr.max_am_header, (size_t)BT_NET_MAX_HEAD + BT_NET_FRAME_BYTES);
    status = ucp_worker_get_efd(net->worker, &net->ucp_fd);
    if (status != UCS_OK) {
        return BT_FAIL(err, BT_E_CONFIG, "UCX has no event descriptor: %s",
                       ucs_status_string(status));
    }
    return bt_net_peer_init_worker(net, err);
}

static void close_ucx(struct bt_net *net)
{
    while (!bt_list_empty(&net->mems)) {
        struct bt_net_mem *mem = BT_LIST_ENTRY(net->mems.next, struct bt_net_mem, link);

        BT_ERROR("net_stop", "msg=\"memory was still registered\"");
        bt_net_mem_unregister(mem);
    }
    bt_net_gate_close(net);
    if (net->listener) {
        ucp_listener_destroy(net->listener);
    }
    if (net->worker) {
        ucp_worker_destroy(net->worker);
    }
    if (net->context) {
        ucp_cleanup(net->context);
    }
}

static void report_ready(struct bt_net *net, int rc)
{
    pthread_mutex_lock(&net->lock);
    net->ready = true;
    net->start_rc = rc;
    pthread_cond_signal(&net->ready_cond);
    pthread_mutex_unlock(&net->lock);
}

static void *xfer_main(void *arg)
{
    struct bt_net *net = arg;
    int rc = open_context(net, &net->start_err);

    if (rc == BT_OK) {
        rc = open_worker(net, &net->start_err);
    }
    if (rc == BT_OK) {
        rc = bt_net_listen(net, &net->start_err);
    }
    report_ready(net, rc);
    if (rc == BT_OK) {
        loop(net);
        if (!bt_list_empty(&net->peers)) {
            return NULL; /* never free what UCX may still touch */
        }
    }
    close_ucx(net);
    return NULL;
}

/* ---- life ---- */

static void free_net(struct bt_net *net)
{
    struct bt_list *it;

    while ((it = bt_list_pop_front(&net->free_ops)) != NULL) {
        free(BT_LIST_ENTRY(it, struct bt_net_op, link));
    }
    bt_map_fini(&net->by_ep);
    bt_mailbox_fini(&net->mailbox);
    bt_close_fd(&net->efd);
    pthread_mutex_destroy(&net->lock);
    pthread_cond_destroy(&net->ready_cond);
    free(net->listen);
    free(net->transports);
    free(net->devices);
    free(net->method_name);
    free(net);
}

static int check_listen(struct bt_net *net, struct bt_err *err)
{
    struct sockaddr_storage *sa = &net->listen_address;
    struct bt_addr a;
    socklen_t len;
    char devices[512];
    int rc;

    if (bt_addr_read(bt_str_of(net->listen), &a) != BT_OK || a.is_unix) {
        return BT_FAIL(err, BT_E_CONFIG, "transfer listen address \"%.80s\" is not \"host:port\"",
                       net->listen);
    }
    if (!bt_addr_is_loopback(&a) && !net->cfg.allow_insecure) {
        return BT_FAIL(err, BT_E_CONFIG,
                       "transfer listen address %.80s is not loopback and KV travels without "
                       "encryption: set allow_insecure to permit it on a trusted network",
                       net->listen);
    }
    rc = bt_net_resolve(net->listen, false, sa, &len, err);
    if (rc != BT_OK) {
        return BT_E_CONFIG;
    }
    if (!net->devices[0]) {
        rc = bt_net_devices_for(sa, devices, sizeof(devices), err);
        if (rc != BT_OK) {
            return rc;
        }
        free(net->devices);
        net->devices = strdup(devices);
        if (!net->devices) {
            return BT_FAIL(err, BT_E_NOMEM, "out of memory");
        }
    }
    /* RDMA devices have a port number: "mlx5_0:1". */
    net->gated = !strchr(net->devices, ':') ||
                 !(is_auto(net) || strstr(net->transports, "rc") || strstr(net->transports, "dc") ||
                   strstr(net->transports, "ud") || strstr(net->transports, "ib"));
    return BT_OK;
}

static struct bt_net *new_net(const struct bt_net_cfg *cfg, const struct bt_net_handlers *handlers)
{
    struct bt_net *net = bt_calloc(1, sizeof(*net));

    if (!net) {
        return NULL;
    }
    net->cfg = *cfg;
    net->on = *handlers;
    net->efd = -1;
    net->ucp_fd = net->gate_fd = net->gate_epfd = net->door_fd = -1;
    bt_list_init(&net->gates);
    bt_list_init(&net->gate_queue);
    bt_list_init(&net->peers);
    bt_list_init(&net->dying);
    bt_list_init(&net->held);
    bt_list_init(&net->timers);
    bt_list_init(&net->mems);
    bt_list_init(&net->free_ops);
    bt_map_init(&net->by_ep);
    pthread_mutex_init(&net->lock, NULL);
    pthread_cond_init(&net->ready_cond, NULL);
    bt_mailbox_init(&net->mailbox, bt_eventfd_wake, &net->efd);
    net->stop_msg.handle = on_stop;
    net->listen = strdup(cfg->listen ? cfg->listen : "");
    net->transports = strdup(cfg->transports ? cfg->transports : "auto");
    net->devices = strdup(cfg->devices ? cfg->devices : "");
    net->method_name = strdup(cfg->method ? cfg->method : "auto");
    if (!net->listen || !net->transports || !net->devices || !net->method_name) {
        free_net(net);
        return NULL;
    }
    if (net->cfg.max_message_bytes == 0) {
        net->cfg.max_message_bytes = DEFAULT_MAX;
    }
    return net;
}

int bt_net_create(const struct bt_net_cfg *cfg,
                  const struct bt_net_handlers *handlers,
                  struct bt_net **ret_net,
                  struct bt_err *err)
{
    struct bt_net *net = new_net(cfg, handlers);
    int rc;

    if (!net) {
        return BT_FAIL(err, BT_E_NOMEM, "net: out of memory");
    }
    bt_net_env_init();
    rc = bt_net_env_segment(&net->segment, err);
    if (rc != BT_OK) {
        goto fail;
    }
    rc = bt_net_method_parse(net->method_name, &net->forced_method, err);
    if (rc != BT_OK) {
        goto fail;
    }
    net->may_map = is_auto(net) || strstr(net->transports, "cma") != NULL ||
                   strstr(net->transports, "shm") != NULL;
    rc = check_listen(net, err);
    if (rc != BT_OK) {
        goto fail;
    }
    rc = bt_eventfd_create(&net->efd, err);
    if (rc != BT_OK) {
        goto fail;
    }
    rc = bt_thread_start(&net->thread, "xfer", xfer_main, net, err);
    if (rc != BT_OK) {
        goto fail;
    }
    pthread_mutex_lock(&net->lock);
    while (!net->ready) {
        pthread_cond_wait(&net->ready_cond, &net->lock);
    }
    pthread_mutex_unlock(&net->lock);
    rc = net->start_rc;
    if (rc != BT_OK) {
        pthread_join(net->thread, NULL);
        if (err) {
            *err = net->start_err;
        }
        goto fail;
    }
    *ret_net = net;
    return BT_OK;

fail:
    free_net(net);
    return rc;
}

void bt_net_destroy(struct bt_net *net)
{
    if (!net) {
        return;
    }
    bt_mailbox_push(&net->mailbox, &net->stop_msg);
    pthread_join(net->thread, NULL);
    if (bt_list_empty(&net->peers)) {
        free_net(net);
    }
}

const char *bt_net_address(const struct bt_net *net)
{
    return net->address;
}

bool bt_net_post(struct bt_net *net, struct bt_msg *msg)
{
    return bt_mailbox_push(&net->mailbox, msg);
}
