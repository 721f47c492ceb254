/* Life of a node: start in order, run, drain, stop in reverse order. The thread is main, which runs
 * the loop.
 *
 * Draining: refuse new requests, leave the membership, tell the routers, let what runs end within
 * drain_timeout, cancel the rest and wait until the engine has proof that nothing touches its pages
 * any more; then exit. */
#include "kernels/serve/serve_int.h"

#include "common/base/buf.h"
#include "common/conf/value.h"
#include "common/mem/warm.h"
#include "common/obs/log.h"
#include "common/thr/thread.h"
#include "common/thr/time.h"
#include "kernels/core/device_load.h"
#include "kvstore/keeper/client.h"
#include "proto/descriptor.h"

#include <openssl/evp.h>
#include <stdlib.h>
#include <unistd.h>

#define BLOCKS_WIRE     1
#define LOAD_SOON_NS    (10 * BT_NS_PER_MS) /* a change is told to routers this much later */
#define CANCEL_LIMIT_NS (30 * BT_NS_PER_S)  /* for the proofs after the drain limit */
#define SHUTDOWN_NS     (1 * BT_NS_PER_S)   /* for the last messages to routers */

const char *const kn_serve_devices[] = {"auto", "cpu", "cuda", NULL};
const char *const kn_serve_numerics[] = {"fast", "invariant", NULL};
const char *const kn_serve_isas[] = {"auto", "ref", "avx2", "avx512", "avx512bf16", "amx", NULL};
const char *const kn_serve_brings[] = {"cheaper", "always", NULL};
const char *const kn_serve_kv_dtypes[] = {"f16", "f32", NULL};

/* --- engine to loop -------------------------------------------------------------------------- */

static void on_step(struct bt_msg *msg, void *consumer)
{
    kn_session_step(consumer, BT_CONTAINER_OF(msg, struct kn_step, msg));
}

/* Empties the box once. Emptied again, it would let a push post steps_msg that is still with the
 * loop, for a push in between. */
static void on_steps(struct bt_msg *msg, void *loop)
{
    struct kn_serve *s = BT_CONTAINER_OF(msg, struct kn_serve, steps_msg);
    struct bt_list batch, *it;

    bt_list_init(&batch);
    bt_mailbox_detach(&s->steps, &batch);
    while ((it = bt_list_pop_front(&batch)) != NULL) {
        struct bt_msg *m = BT_CONTAINER_OF(it, struct bt_msg, link);

        m->handle(m, s);
    }
}

/* [engine thread] */
static void emit(void *arg, struct kn_step *take_step)
{
    struct kn_serve *s = arg;

    take_step->msg.handle = on_step;
    if (!bt_mailbox_push(&s->steps, &take_step->msg)) {
        kn_step_free(take_step); /* closed: the loop has ended */
    }
}

/* [engine thread] The box was empty, so steps_msg has been taken out of the loop's mailbox. */
static void wake_loop(void *arg)
{
    struct kn_serve *s = arg;

    bt_loop_post(s->loop, &s->steps_msg);
}

/* --- load and draining ----------------------------------------------------------------------- */

static void on_heartbeat(struct bt_loop *loop, struct bt_timer *t)
{
    struct kn_serve *s = BT_CONTAINER_OF(t, struct kn_serve, heartbeat);

    kn_session_broadcast_load(s, true);
    bt_timer_start(loop, t, bt_loop_now(loop) + s->conf->heartbeat_ns);
}

static void on_load_soon(struct bt_loop *loop, struct bt_timer *t)
{
    kn_session_broadcast_load(BT_CONTAINER_OF(t, struct kn_serve, load_soon), false);
}

static void on_shut(void *arg)
{
    struct kn_serve *s = arg;

    bt_loop_stop(s->loop);
}

static void end(struct kn_serve *s)
{
    s->state = KN_SERVE_ENDING;
    bt_timer_stop(s->loop, &s->drain_limit);
    bt_timer_stop(s->loop, &s->heartbeat);
    bt_timer_stop(s->loop, &s->load_soon);
    kn_session_end_all(s, BT_RPC_UNAVAILABLE, "node is gone");
    bt_rpc_server_shutdown(s->server, bt_deadline_ns(SHUTDOWN_NS), on_shut, s);
}

void kn_serve_changed(struct kn_serve *s)
{
    if ((s->state == KN_SERVE_DRAINING || s->state == KN_SERVE_CANCELLING) && s->streams.n == 0) {
        end(s);
    } else if (s->state == KN_SERVE_READY && !s->load_soon.armed) {
        bt_timer_start(s->loop, &s->load_soon, bt_loop_now(s->loop) + LOAD_SOON_NS);
    }
}

/* First the running requests are cancelled; if even their proofs do not come, the node gives up. */
static void on_drain_limit(struct bt_loop *loop, struct bt_timer *t)
{
    struct kn_serve *s = BT_CONTAINER_OF(t, struct kn_serve, drain_limit);
    struct kn_stream *st;
    size_t pos = 0;

    if (s->state == KN_SERVE_CANCELLING) {
        BT_ERROR("drain", "streams=%zu msg=\"no proof that transfers are over\"", s->streams.n);
        end(s);
        return;
    }
    BT_WARN("drain", "streams=%zu msg=\"drain_timeout is over, the rest is cancelled\"",
            s->streams.n);
    s->state = KN_SERVE_CANCELLING;
    while ((st = bt_map_next(&s->streams, &pos, NULL))) {
        kn_engine_cancel(s->engine, st->tag);
    }
    bt_timer_start(loop, t, bt_loop_now(loop) + CANCEL_LIMIT_NS);
}

static void drain(struct kn_serve *s, const char *why)
{
    if (s->state != KN_SERVE_READY) {
        return;
    }
    BT_INFO("drain", "streams=%zu sessions=%u msg=\"%s\"", s->streams.n, s->n_sessions, why);
    s->state = KN_SERVE_DRAINING;
    bt_health_set_all(s->health, BT_HEALTH_NOT_SERVING);
    s->self.draining = true;
    if (bt_registry_update(s->registry, &s->self) < 0) {
        BT_WARN("drain", "msg=\"the membership still says ready\"");
    }
    kn_session_broadcast_load(s, true);
    bt_timer_start(s->loop, &s->drain_limit, bt_deadline_ns(s->conf->drain_timeout_ns));
    kn_serve_changed(s);
}

static void on_stop(struct bt_msg *msg, void *loop)
{
    drain(BT_CONTAINER_OF(msg, struct kn_serve, stop_msg), "asked to stop");
}

/* [signal thread] */
static void ask_stop(void *arg)
{
    struct kn_serve *s = arg;

    bt_loop_post(s->loop, &s->stop_msg);
}

static void on_fenced(struct bt_msg *msg, void *loop)
{
    BT_ERROR("fenced", "msg=\"a newer process has this node's name\"");
    drain(BT_CONTAINER_OF(msg, struct kn_serve, fenced_msg), "overtaken");
}

void kn_serve_lost(struct kn_serve *s)
{
    if (!s->lost) {
        s->lost = true;
        BT_ERROR("device_lost", "msg=\"nothing can run on it any more: this process ends\"");
        drain(s, "lost its device");
    }
}

/* [redis thread] Once. */
static void tell_fenced(void *arg)
{
    struct kn_serve *s = arg;

    bt_loop_post(s->loop, &s->fenced_msg);
}

/* --- start ----------------------------------------------------------------------------------- */

static int add_field(struct bt_buf *b, const char *tag, const void *p, size_t n)
{
    uint64_t len = n;
    int rc = bt_buf_add(b, tag, strlen(tag) + 1);

    if (rc == BT_OK) {
        rc = bt_buf_add(b, &len, sizeof(len));
    }
    return rc < 0 ? rc : bt_buf_add(b, p, n);
}

/* What two nodes must have in common to exchange blocks; every field tagged and length-prefixed.
 * "wire" is the layout of blocks between pools, none of the versions that sessions and handoffs
 * agree about: with those in it no node could be paired with one of the version before. */
static int make_compat(const struct kn_serve *s, uint8_t ret[32], struct bt_err *err)
{
    const char *numerics = kn_engine_numerics(s->engine);
    uint32_t wire = BLOCKS_WIRE, epoch = KN_WEIGHT_EPOCH;
    struct bt_buf b = {.max = 4096};
    int rc = BT_OK;

    if (add_field(&b, "wire", &wire, sizeof(wire)) < 0 ||
        add_field(&b, "model", s->model_digest, 32) < 0 ||
        add_field(&b, "epoch", &epoch, sizeof(epoch)) < 0 ||
        add_field(&b, "format", s->kv_format, 32) < 0 ||
        add_field(&b, "numerics", numerics, strlen(numerics)) < 0 ||
        EVP_Digest(b.p, b.n, ret, NULL, EVP_sha256(), NULL) != 1) {
        rc = BT_FAIL(err, BT_E_INTERNAL, "cannot make the compatibility digest");
    }
    bt_buf_fini(&b);
    return rc;
}

static int open_keeper(struct kn_serve *s, struct bt_err *err)
{
    struct kv_keeper_cfg kc = {.socket = s->conf->keeper_socket,
                               .node = s->name,
                               .incarnation = s->incarnation,
                               .wait_ns = s->conf->keeper_wait_ns};

    if (!s->conf->keeper_socket[0]) {
        return BT_OK;
    }
    if (!s->conf->name[0]) {
        return BT_FAIL(err, BT_E_CONFIG,
                       "keeper.socket needs a name: a successor finds its memory by it");
    }
    return kv_keeper_open(&kc, &s->keeper, err);
}

static int start_keeper(struct kn_serve *s, struct bt_err *err)
{
    struct kn_engine_stats st = kn_engine_stats(s->engine);
    struct kv_pool_stats pool = kv_pool_stats(kn_engine_pool(s->engine));

    if (!s->keeper) {
        return BT_OK;
    }
    BT_INFO("adopted", "blocks=%llu pages=%u of=%u bad=%llu", (unsigned long long)st.blocks_adopted,
            pool.n_index, pool.n_pages, (unsigned long long)st.blocks_bad);
    return kv_keeper_start(s->keeper, err);
}

/* NULL = CPU. A device that is asked for by name must be there. */
static int open_device(struct kn_serve *s, const struct kn_device_ops **ret, struct bt_err *err)
{
    struct bt_err why = {0};

    *ret = NULL;
    if (strcmp(kn_serve_devices[s->conf->device], "cuda") == 0) {
        return kn_device_load(NULL, ret, err);
    }
    if (strcmp(kn_serve_devices[s->conf->device], "auto") == 0 &&
        kn_device_load(NULL, ret, &why) < 0) {
        BT_DEBUG("no_device", "msg=\"%s\"", why.msg);
    }
    return BT_OK;
}

/* A model that a device which nobody asked for cannot run goes to the CPU. */
static int create_engine(struct kn_serve *s, struct kn_engine_cfg *ec, struct bt_err *err)
{
    int rc = kn_engine_create(ec, &s->engine, err);

    if (rc == BT_E_UNSUPPORTED && ec->device &&
        strcmp(kn_serve_devices[s->conf->device], "auto") == 0) {
        BT_INFO("device_unused", "msg=\"%s\"", bt_err_msg(err, rc));
        ec->device = NULL;
        rc = kn_engine_create(ec, &s->engine, err);
    }
    return rc;
}

static int open_engine(struct kn_serve *s, struct bt_err *err)
{
    const struct kn_serve_conf *c = s->conf;
    struct kn_engine_cfg ec = {
        .file = s->file,
        .mem = &bt_mem_host,
        .n_threads = c->threads ? (int)c->threads : bt_cpus_usable(),
        .isa = kn_serve_isas[c->isa],
        .profile = c->profile,
        .invariant = c->numerics == 1,
        .kv_dtype = (enum kv_dtype)c->kv_dtype,
        .page_tokens = (int)c->page_tokens,
        .pool_bytes = c->pool_bytes,
        .max_ctx = (int)c->max_ctx,
        .always_bring = c->bring == 1,
        .block_tokens = c->prefix_cache ? (int)c->block_tokens : 0,
        .key = {.secret = bt_str_of(c->cluster.secret),
                .model_digest = s->model_digest,
                .weight_epoch = KN_WEIGHT_EPOCH},
        .max_batch_tokens = (int)c->max_batch_tokens,
        .max_running = (int)c->max_running,
        .max_waiting = (int)c->max_waiting,
        .emit = emit,
        .emit_arg = s,
        .note = kn_cache_note,
        .note_arg = s,
    };
    struct kv_handoff_cfg hc = {
        .net = {.listen = c->net_listen,
                .transports = c->net_transports,
                .devices = "",
                .method = c->net_method,
                .allow_insecure = bt_node_plain_kv(&c->common)},
        .node_name = s->name,
        .incarnation = s->incarnation,
        .silence_ns = c->handoff_silence_ns,
        .lease_ns = c->handoff_lease_ns,
        .max_open = (uint32_t)(c->max_running + c->max_waiting),
        .max_inflight_bytes = 32u << 20,
    };
    int rc = open_device(s, &ec.device, err);

    rc = rc < 0 ? rc : kn_cache_init(s, err);
    rc = rc < 0 ? rc : open_keeper(s, err);
    ec.keeper = s->keeper;
    rc = rc < 0 ? rc : create_engine(s, &ec, err);
    rc = rc < 0 ? rc : start_keeper(s, err);
    if (rc < 0) {
        return rc;
    }
    kv_layout_digest(kv_pool_layout(kn_engine_pool(s->engine)), s->kv_format);
    rc = make_compat(s, s->self.compat, err);
    if (rc == BT_OK && s->role->handoffs) {
        memcpy(hc.compat, s->self.compat, sizeof(hc.compat));
        hc.pool = kn_engine_pool(s->engine);
        rc = kv_handoff_create(&hc, &s->handoff, err);
    }
    rc = rc < 0 ? rc : kn_tiers_open(s, err);
    rc = rc < 0 ? rc : kn_store_open(s, err);
    if (rc == BT_OK) {
        rc = kn_engine_start(s->engine, s->handoff, err);
    }
    return rc;
}

static int open_server(struct kn_serve *s, struct bt_rpc_service *service, struct bt_err *err)
{
    struct bt_rpc_server_config sc = {.sec = bt_node_sec(s->node),
                                      .allow_insecure = s->conf->common.allow_insecure,
                                      .max_queued_bytes = s->conf->max_queued_bytes};
    struct bt_str set = wire_descriptor_set();
    struct bt_addr addr;
    int port, rc;

    *service = (struct bt_rpc_service){.name = "baton.v1.Node",
                                       .methods = kn_session_methods,
                                       .n_methods = kn_session_n_methods,
                                       .user = s};
    if ((rc = bt_rpc_server_create(s->loop, &sc, &s->server, err)) < 0 ||
        (rc = bt_rpc_server_register(s->server, service, err)) < 0 ||
        (rc = bt_health_create(s->server, &s->health, err)) < 0 ||
        (rc = bt_reflection_create(s->server, &set, 1, &s->reflection, err)) < 0 ||
        (rc = bt_rpc_server_listen(s->server, s->conf->listen, &port, err)) < 0) {
        return rc;
    }
    rc = bt_addr_read(bt_str_of(s->conf->listen), &addr);
    if (rc < 0 || addr.is_unix) {
        return BT_FAIL(err, BT_E_CONFIG, "listen = %.60s: a node needs host:port", s->conf->listen);
    }
    snprintf(s->self.grpc_addr, sizeof(s->self.grpc_addr),
             memchr(addr.host.p, ':', addr.host.n) ? "[%.*s]:%d" : "%.*s:%d", (int)addr.host.n,
             addr.host.p, port);
    return BT_OK;
}

static void make_name(struct kn_serve *s)
{
    char host[40] = "";

    if (s->conf->name[0]) {
        snprintf(s->name, sizeof(s->name), "%s", s->conf->name);
        return;
    }
    gethostname(host, sizeof(host) - 1);
    snprintf(s->name, sizeof(s->name), "%s-%s-%d", s->role->name, host, (int)getpid());
}

static int join(struct kn_serve *s, struct bt_err *err)
{
    struct bt_registry_cfg rc = {.conf = &s->conf->cluster,
                                 .self = &s->self,
                                 .changed = kn_store_members,
                                 .fenced = tell_fenced,
                                 .arg = s};

    s->self.incarnation = s->incarnation;
    s->self.role = bt_role_parse(bt_str_of(s->role->name));
    s->self.weight_epoch = KN_WEIGHT_EPOCH;
    snprintf(s->self.name, sizeof(s->self.name), "%s", s->name);
    if (s->conf->advertise[0]) {
        snprintf(s->self.grpc_addr, sizeof(s->self.grpc_addr), "%s", s->conf->advertise);
    }
    if (s->handoff) {
        snprintf(s->self.net_addr, sizeof(s->self.net_addr), "%s", kv_handoff_address(s->handoff));
    }
    memcpy(s->self.model, s->model_digest, 32);
    return bt_registry_create(&rc, &s->registry, err);
}

/* Who asks for sharing is not to go without it unnoticed. */
static int check_store_needs(const struct kn_serve_conf *c, struct bt_err *err)
{
    const char *without = !c->cluster.redis_address[0] ? "redis.address empty"
                          : !c->prefix_cache           ? "engine.prefix_cache = off"
                          : c->tiers.host_bytes == 0   ? "tier.host_bytes = 0"
                                                       : NULL;

    return without ? BT_FAIL(err, BT_E_CONFIG,
                             "store.enabled = on with %s: blocks are shared out of the tiers of "
                             "prefix reuse, and found through Redis",
                             without)
                   : BT_OK;
}

static int check_conf(struct kn_serve *s, struct bt_err *err)
{
    const struct kn_serve_conf *c = s->conf;
    int rc = bt_node_check_listen(&c->common, BT_SEC_GRPC, "listen", c->listen, err);

    if (rc == BT_OK) {
        rc = bt_cluster_conf_check(&c->cluster, err);
    }
    if (rc == BT_OK && s->role->handoffs) {
        rc = bt_node_check_kv_listen(&c->common, "net.listen", c->net_listen, err);
    }
    if (rc == BT_OK && c->store) {
        rc = bt_node_check_kv_listen(&c->common, "store.listen", c->store_listen, err);
    }
    if (rc == BT_OK) {
        rc = kv_tiers_conf_check(&c->tiers, err);
    }
    if (rc == BT_OK && c->store) {
        rc = check_store_needs(c, err);
    }
    if (rc == BT_OK && !bt_member_name_ok(bt_str_of(s->name))) {
        rc = BT_FAIL(err, BT_E_CONFIG, "name = %s: letters, digits, '-', '_', '.' only", s->name);
    }
    return rc;
}

static enum bt_exit exit_of(int rc, enum bt_exit other)
{
    return rc == BT_E_CONFIG ? BT_EXIT_CONFIG : other;
}

static int start(struct kn_serve *s, struct bt_rpc_service *service, struct bt_err *err)
{
    int rc;

    if ((rc = check_conf(s, err)) < 0) {
        return bt_node_fail(exit_of(rc, BT_EXIT_OTHER), rc, err);
    }
    if ((rc = bt_model_open(s->conf->model, &s->file, err)) < 0 ||
        (rc = bt_model_digest(s->file, s->model_digest, err)) < 0) {
        return bt_node_fail(BT_EXIT_MODEL, rc, err);
    }
    if ((rc = bt_loop_create(&s->loop, err)) < 0) {
        return bt_node_fail(BT_EXIT_OTHER, rc, err);
    }
    if ((rc = open_server(s, service, err)) < 0) {
        return bt_node_fail(exit_of(rc, BT_EXIT_BIND), rc, err);
    }
    if ((rc = open_engine(s, err)) < 0 || (rc = bt_rpc_server_start(s->server, err)) < 0 ||
        (rc = join(s, err)) < 0) {
        return bt_node_fail(exit_of(rc, BT_EXIT_OTHER), rc, err);
    }
    return BT_EXIT_OK;
}

static void start_warming(struct kn_serve *s)
{
    bt_warm_region(kv_pool_region(kn_engine_pool(s->engine)), &s->warm_pool);
    if (s->tiers) {
        bt_warm_region(kv_tiers_region(s->tiers), &s->warm_tiers);
    }
}

static int serve(struct kn_serve *s, struct bt_err *err)
{
    struct bt_node_addr addrs[] = {{"listen", s->self.grpc_addr}, {"net", s->self.net_addr}};
    int rc;

    bt_health_set(s->health, "baton.v1.Node", BT_HEALTH_SERVING);
    bt_health_set_all(s->health, BT_HEALTH_SERVING);
    bt_timer_start(s->loop, &s->heartbeat, bt_deadline_ns(s->conf->heartbeat_ns));
    rc = bt_node_ready(s->node, addrs, s->handoff ? 2 : 1, err);
    if (rc < 0) {
        return bt_node_fail(BT_EXIT_OTHER, rc, err);
    }
    if (s->conf->warm) {
        start_warming(s);
    }
    bt_node_on_stop(s->node, ask_stop, s);
    bt_loop_run(s->loop);
    return s->lost ? BT_EXIT_OTHER : BT_EXIT_OK;
}

/* The server first: its sessions use the engine. Every part may be missing. False: pages did not
 * come back. */
static bool stop(struct kn_serve *s)
{
    struct bt_list left, *it;
    bool clean;

    bt_warm_stop(s->warm_pool);
    bt_warm_stop(s->warm_tiers);
    bt_registry_destroy(s->registry);
    bt_rpc_server_destroy(s->server);
    bt_reflection_destroy(s->reflection);
    bt_health_destroy(s->health);
    kn_flush_stop(s);
    clean = !s->engine || kn_engine_stop(s->engine);
    if (s->handoff) {
        kv_handoff_destroy(s->handoff);
    }
    kn_store_stop(s);
    kn_store_close(s);
    kn_tiers_close(s);
    kn_engine_destroy(s->engine);
    kv_keeper_close(s->keeper);
    bt_mailbox_close(&s->steps);
    bt_list_init(&left);
    bt_mailbox_detach(&s->steps, &left);
    while ((it = bt_list_pop_front(&left))) {
        struct bt_msg *msg = BT_CONTAINER_OF(it, struct bt_msg, link);

        if (msg->handle == on_step) {
            kn_step_free(BT_CONTAINER_OF(msg, struct kn_step, msg));
        } else {
            kn_cache_drop(msg);
        }
    }
    bt_loop_destroy(s->loop);
    bt_mailbox_fini(&s->steps);
    kn_cache_fini(s);
    bt_model_close(s->file);
    return clean;
}

static void free_streams(struct kn_serve *s)
{
    struct kn_stream *st;
    size_t pos = 0;

    while ((st = bt_map_next(&s->streams, &pos, NULL))) {
        free(st);
    }
    bt_map_fini(&s->streams);
}

int kn_serve_run(struct bt_node *node,
                 const struct kn_serve_conf *conf,
                 const struct kn_serve_role *role)
{
    struct kn_serve s = {.conf = conf,
                         .role = role,
                         .node = node,
                         .incarnation = bt_incarnation_make(),
                         .steps_msg.handle = on_steps,
                         .stop_msg.handle = on_stop,
                         .fenced_msg.handle = on_fenced,
                         .heartbeat.fn = on_heartbeat,
                         .load_soon.fn = on_load_soon,
                         .drain_limit.fn = on_drain_limit};
    struct bt_rpc_service service;
    struct bt_err err = {0};
    bool clean;
    int code;

    make_name(&s);
    pthread_mutex_init(&s.blockmap_lock, NULL);
    bt_list_init(&s.sessions);
    bt_map_init(&s.streams);
    bt_mailbox_init(&s.steps, wake_loop, &s);
    code = start(&s, &service, &err);
    if (code == BT_EXIT_OK) {
        code = serve(&s, &err);
    }
    clean = stop(&s);
    free_streams(&s);
    pthread_mutex_destroy(&s.blockmap_lock);
    if (!clean) {
        BT_ERROR("exit", "msg=\"pages did not come back\"");
        code = BT_EXIT_OTHER;
    }
    return code;
}
