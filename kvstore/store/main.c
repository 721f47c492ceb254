/* baton-kvstore: a daemon of the KV store. Passes prompts from prefill to decode nodes (relay.h),
 * keeps blocks in its tiers (tier/tiers.h) and serves them (server.h).
 *
 * Threads: main runs the control loop (status, health, drain); the transfer listener has its own;
 * "redis" brings the membership, which the relay asks before it calls anybody. SIGTERM: new prompts
 * are refused, those on their way end within drain_timeout. */
#include "common/base/buf.h"
#include "common/cluster/registry.h"
#include "common/conf/value.h"
#include "common/mem/warm.h"
#include "common/node/node.h"
#include "common/obs/log.h"
#include "common/rpc/health.h"
#include "common/rpc/reflection.h"
#include "common/rpc/server.h"
#include "common/thr/time.h"
#include "kvstore/store/access.h"
#include "kvstore/store/announce.h"
#include "kvstore/store/relay.h"
#include "kvstore/store/server.h"
#include "kvstore/store/tell.h"
#include "proto/descriptor.h"
#include "proto/node.pb-c.h"

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define DRAIN_LOOK_NS (20 * BT_NS_PER_MS)
#define SHUTDOWN_NS   (1 * BT_NS_PER_S)
#define FLUSH_NS      (10 * BT_NS_PER_S)
#define MOST_QUEUED   (4u << 20) /* bytes, for a router that reads slowly */

struct store_conf {
    struct bt_node_conf common;
    struct bt_cluster_conf cluster;
    struct kv_tiers_conf tiers;
    char *name, *listen, *advertise, *net_listen, *net_transports, *net_method, *store_listen;
    uint64_t relay_bytes, wait_ns, lease_ns, silence_ns, drain_timeout_ns, heartbeat_ns;
    int64_t relay_layouts, max_open;
    bool warm;
};

static const struct bt_conf_opt opts[] = {
    BT_NODE_CONF_ROWS(struct store_conf, common),
    BT_NODE_CONF_ACCESS_ROW(struct store_conf, common),
    BT_SEC_CONF_ROWS(struct store_conf, common.sec),
    BT_SEC_KV_CONF_ROWS(struct store_conf, common.sec),
    BT_CLUSTER_CONF_ROWS(struct store_conf, cluster),
    KV_TIERS_CONF_ROWS(struct store_conf, tiers),
    BT_CONF_STR(
        struct store_conf,
        name,
        "name",
        "",
        63,
        "Name of this daemon, unique in the cluster; empty = kvstore, host and process id."),
    BT_CONF_ADDR_REQUIRED(struct store_conf,
                          listen,
                          "listen",
                          "127.0.0.1:0",
                          "Address for status and health (gRPC); port 0 picks a free one."),
    BT_CONF_ADDR(struct store_conf,
                 advertise,
                 "advertise",
                 "",
                 "Address that others are told to use; empty = the one listened on."),
    BT_CONF_ADDR_REQUIRED(struct store_conf,
                          net_listen,
                          "net.listen",
                          "127.0.0.1:0",
                          "Address of the KV transfer listener; port 0 picks a free one."),
    BT_CONF_ADDR_REQUIRED(struct store_conf,
                          store_listen,
                          "store.listen",
                          "127.0.0.1:0",
                          "Address of the block server; port 0 picks a free one."),
    BT_CONF_STR(struct store_conf,
                net_transports,
                "net.transports",
                "auto",
                200,
                "UCX transports for KV transfers: auto, or names such as tcp."),
    BT_CONF_STR(struct store_conf,
                net_method,
                "net.method",
                "auto",
                16,
                "Who moves the bytes: auto; forced: pull (one host), message, put (RDMA)."),
    BT_CONF_BOOL(
        struct store_conf,
        warm,
        "store.warm",
        "on",
        "Touch the blocks' memory after the start, as huge pages where the kernel makes them; "
        "off: memory is taken as it is needed."),
    BT_CONF_BYTES(struct store_conf,
                  relay_bytes,
                  "relay.bytes",
                  "256M",
                  65536,
                  INT64_C(1) << 46,
                  "Memory for prompts on their way, for each KV layout."),
    BT_CONF_INT(struct store_conf,
                relay_layouts,
                "relay.layouts",
                "4",
                1,
                64,
                "KV layouts (models) at one time."),
    BT_CONF_INT(struct store_conf,
                max_open,
                "relay.max_open",
                "1024",
                1,
                65536,
                "Prompts on their way at one time; more are refused."),
    BT_CONF_DURATION(struct store_conf,
                     wait_ns,
                     "relay.wait",
                     "2s",
                     0,
                     600000,
                     "How long a prompt waits for memory before it is refused."),
    BT_CONF_DURATION(struct store_conf,
                     silence_ns,
                     "handoff.silence",
                     "3s",
                     100,
                     600000,
                     "A transfer peer that is silent for longer is given up."),
    BT_CONF_DURATION(struct store_conf,
                     lease_ns,
                     "handoff.lease",
                     "10s",
                     100,
                     3600000,
                     "How long a prompt that has come in waits for its decode node."),
    BT_CONF_DURATION(struct store_conf,
                     heartbeat_ns,
                     "heartbeat",
                     "500ms",
                     10,
                     60000,
                     "How often routers are told at least."),
    BT_CONF_DURATION(struct store_conf,
                     drain_timeout_ns,
                     "drain_timeout",
                     "30s",
                     0,
                     3600000,
                     "How long prompts on their way may go on after SIGTERM."),
};

struct store {
    const struct store_conf *conf;
    struct bt_node *node;
    char name[BT_MEMBER_NAME_MAX + 1];
    bool draining;

    struct bt_loop *loop;
    struct bt_rpc_server *server;
    struct bt_health *health;
    struct bt_reflection *reflection;
    struct bt_registry *registry;
    struct bt_member self; /* as announced */
    struct kv_relay *relay;
    struct bt_warm *warm;   /* NULL = off */
    struct kv_tiers *tiers; /* NULL = keeps no blocks; so are the next three */
    struct kv_tell *tell;
    struct kv_server *blocks;
    struct bt_blockmap *blockmap;
    struct bt_msg stop_msg, fenced_msg;
    struct bt_timer drain_look;
    uint64_t drain_until_ns;

    pthread_mutex_t lock;
    struct bt_members *members; /* [lock] NULL = none known */
};

/* ---- membership ---- */

/* [redis] */
static void on_members(void *arg, struct bt_members *take_members)
{
    struct store *s = arg;
    struct bt_members *old;

    pthread_mutex_lock(&s->lock);
    old = s->members;
    s->members = take_members;
    pthread_mutex_unlock(&s->lock);
    bt_members_unref(old);
    if (s->blockmap) {
        bt_blockmap_set_members(s->blockmap, take_members);
    }
    kv_relay_members_changed(s->relay);
}

/* [net] What it says of itself must be what the cluster knows of it. */
static bool is_member(void *arg, const struct kv_origin *o)
{
    struct store *s = arg;
    const struct bt_member *m;
    bool ok;

    pthread_mutex_lock(&s->lock);
    m = s->members ? bt_members_find(s->members, bt_str_of(o->name)) : NULL;
    ok = m && m->role == BT_ROLE_PREFILL && m->incarnation == o->incarnation &&
         strcmp(m->net_addr, o->address) == 0;
    pthread_mutex_unlock(&s->lock);
    return ok;
}

/* [net] */
static void on_passed(void *arg, const struct kv_relay_passed *p)
{
    const struct store *s = arg;

    kv_access_write(bt_node_access_log(s->node), s->name, p);
}

/* ---- status ---- */

static void on_status(struct bt_rpc_call *call, const ProtobufCMessage *msg)
{
    struct store *s = bt_rpc_call_service_user(call);
    struct kv_relay_stats st = kv_relay_stats(s->relay);
    Baton__V1__NodeStatus m = BATON__V1__NODE_STATUS__INIT;

    m.name = s->name;
    m.incarnation = s->self.incarnation;
    m.role = (char *)(uintptr_t)bt_role_name(BT_ROLE_KVSTORE);
    m.state = (char *)(uintptr_t)(s->draining ? "draining" : "ready");
    m.pages_total = st.pages_total;
    m.pages_free = st.pages_free;
    m.pages_transfers = st.pages_total - st.pages_free;
    m.requests_waiting = st.n_waiting;
    m.requests_running = st.n_open - st.n_keeping;
    m.handoffs_active = st.handoff.sends + st.handoff.recvs;
    m.handoff_bytes = st.handoff.bytes;
    m.handoff_connections = st.handoff.connections;
    m.relayed = st.relayed;
    m.relay_failed = st.failed;
    m.relay_refused = st.refused;
    m.transports = s->conf->net_transports;
    if (s->tiers) {
        struct kv_server_stats sv = kv_server_stats(s->blocks);
        struct kv_tiers_stats t = kv_tiers_stats(s->tiers);

        m.store_blocks = t.host.n_blocks > t.disk.n_blocks ? t.host.n_blocks : t.disk.n_blocks;
        m.store_kept = st.kept;
        m.store_gets = sv.gets;
        m.store_puts = sv.puts;
        m.store_misses = sv.misses;
        m.blocks_announced = bt_blockmap_stats(s->blockmap).n_held;
        m.sessions = kv_tell_sessions(s->tell);
    }
    bt_rpc_call_reply(call, &m.base);
}

static void on_open(struct bt_rpc_call *call)
{
    const struct store *s = bt_rpc_call_service_user(call);

    kv_tell_open(call, s->tell);
}

static const struct bt_rpc_method methods[] = {
    {.path = "/baton.v1.Node/Session",
     .request = &baton__v1__router_message__descriptor,
     .access = BT_ACCESS_CLUSTER,
     .response = &baton__v1__node_message__descriptor,
     .client_stream = true,
     .open = on_open,
     .message = kv_tell_message,
     .half_close = kv_tell_half_close,
     .drained = kv_tell_drained,
     .closed = kv_tell_closed},
    {.path = "/baton.v1.Node/GetStatus",
     .request = &baton__v1__node_status_request__descriptor,
     .access = BT_ACCESS_OPERATOR | BT_ACCESS_CLUSTER,
     .response = &baton__v1__node_status__descriptor,
     .message = on_status},
};

/* ---- drain ---- */

static void on_shut(void *arg)
{
    struct store *s = arg;

    bt_loop_stop(s->loop);
}

static void on_drain_look(struct bt_loop *loop, struct bt_timer *t)
{
    struct store *s = BT_CONTAINER_OF(t, struct store, drain_look);
    struct kv_relay_stats st = kv_relay_stats(s->relay);
    uint64_t now = bt_loop_now(loop);

    if (st.n_open + st.n_waiting > 0 && now < s->drain_until_ns) {
        bt_timer_start(loop, t, now + DRAIN_LOOK_NS);
        return;
    }
    if (st.n_open + st.n_waiting > 0) {
        BT_WARN("drain", "prompts=%u msg=\"drain_timeout is over, the rest is cancelled\"",
                st.n_open + st.n_waiting);
    }
    bt_rpc_server_shutdown(s->server, bt_deadline_ns(SHUTDOWN_NS), on_shut, s);
}

static void drain(struct store *s, const char *why)
{
    if (s->draining) {
        return;
    }
    s->draining = true;
    BT_INFO("drain", "prompts=%u msg=\"%s\"", kv_relay_stats(s->relay).n_open, why);
    bt_health_set_all(s->health, BT_HEALTH_NOT_SERVING);
    s->self.draining = true;
    if (bt_registry_update(s->registry, &s->self) < 0) {
        BT_WARN("drain", "msg=\"the membership still says ready\"");
    }
    kv_relay_drain(s->relay);
    if (s->tell) {
        kv_tell_drain(s->tell);
    }
    s->drain_until_ns = bt_deadline_ns(s->conf->drain_timeout_ns);
    bt_timer_start(s->loop, &s->drain_look, 0);
}

static void on_stop(struct bt_msg *msg, void *loop)
{
    drain(BT_CONTAINER_OF(msg, struct store, stop_msg), "asked to stop");
}

/* [signal] */
static void ask_stop(void *arg)
{
    struct store *s = arg;

    bt_loop_post(s->loop, &s->stop_msg);
}

static void on_fenced(struct bt_msg *msg, void *loop)
{
    BT_ERROR("fenced", "msg=\"a newer process has this daemon's name\"");
    drain(BT_CONTAINER_OF(msg, struct store, fenced_msg), "overtaken");
}

/* [redis] Once. */
static void tell_fenced(void *arg)
{
    struct store *s = arg;

    bt_loop_post(s->loop, &s->fenced_msg);
}

/* ---- start and stop ---- */

static int open_server(struct store *s, struct bt_rpc_service *service, struct bt_err *err)
{
    struct bt_rpc_server_config sc = {.sec = bt_node_sec(s->node),
                                      .allow_insecure = s->conf->common.allow_insecure};
    struct bt_str set = wire_descriptor_set();
    struct bt_addr addr;
    int port, rc;

    *service = (struct bt_rpc_service){
        .name = "baton.v1.Node", .methods = methods, .n_methods = BT_ARRAY_LEN(methods), .user = s};
    if ((rc = bt_rpc_server_create(s->loop, &sc, &s->server, err)) < 0 ||
        (rc = bt_rpc_server_register(s->server, service, err)) < 0 ||
        (rc = bt_health_create(s->server, &s->health, err)) < 0 ||
        (rc = bt_reflection_create(s->server, &set, 1, &s->reflection, err)) < 0 ||
        (rc = bt_rpc_server_listen(s->server, s->conf->listen, &port, err)) < 0) {
        return rc;
    }
    rc = bt_addr_read(bt_str_of(s->conf->listen), &addr);
    if (rc < 0 || addr.is_unix) {
        return BT_FAIL(err, BT_E_CONFIG, "listen = %.60s: host:port is needed", s->conf->listen);
    }
    snprintf(s->self.grpc_addr, sizeof(s->self.grpc_addr),
             memchr(addr.host.p, ':', addr.host.n) ? "[%.*s]:%d" : "%.*s:%d", (int)addr.host.n,
             addr.host.p, port);
    if (s->conf->advertise[0]) {
        snprintf(s->self.grpc_addr, sizeof(s->self.grpc_addr), "%s", s->conf->advertise);
    }
    return BT_OK;
}

/* [tier-event] */
static void on_events(void *arg, const struct kv_tiers_event *ev, size_t n)
{
    struct store *s = arg;

    kv_tell_events(s->tell, s->tiers, ev, n);
    if (__atomic_load_n(&s->blockmap, __ATOMIC_ACQUIRE)) {
        kv_announce_events(s->blockmap, s->tiers, ev, n);
    } /* else it lists everything when it starts */
}

static int open_tiers(struct store *s, struct bt_err *err)
{
    const struct store_conf *c = s->conf;
    /* Clients of this host read blocks in place: memory that can be mapped. */
    struct kv_tiers_cfg tc = {
        .conf = &c->tiers, .mem = &bt_mem_host, .events = on_events, .arg = s};
    struct bt_blockmap_cfg bc = {.conf = &c->cluster,
                                 .name = s->name,
                                 .incarnation = s->self.incarnation,
                                 .held = kv_announce_held};
    struct kv_server_cfg sc = {
        .net = {.listen = c->store_listen,
                .transports = c->net_transports,
                .devices = "",
                .method = c->net_method,
                .allow_insecure = bt_node_plain_kv(&c->common)},
        .node_name = s->name,
        .incarnation = s->self.incarnation,
        .takes_puts = true,
        .silence_ns = c->silence_ns,
    };
    const struct kv_tell_cfg kc = {.loop = s->loop,
                                   .self = &s->self,
                                   .heartbeat_ns = c->heartbeat_ns,
                                   .most_queued = MOST_QUEUED};
    struct bt_blockmap *bm;
    int rc;

    if (c->tiers.host_bytes == 0) {
        return BT_OK;
    }
    rc = kv_tell_create(&kc, &s->tell, err);
    if (rc == BT_OK) {
        rc = kv_tiers_create(&tc, &s->tiers, err);
    }
    if (rc < 0) {
        return rc;
    }
    bc.arg = sc.tiers = s->tiers;
    rc = kv_server_create(&sc, &s->blocks, err);
    if (rc == BT_OK) {
        rc = bt_blockmap_create(&bc, &bm, err);
    }
    if (rc == BT_OK) {
        __atomic_store_n(&s->blockmap, bm, __ATOMIC_RELEASE);
        snprintf(s->self.store_addr, sizeof(s->self.store_addr), "%s",
                 kv_server_address(s->blocks));
    }
    return rc;
}

static int open_relay(struct store *s, struct bt_err *err)
{
    const struct store_conf *c = s->conf;
    struct kv_relay_cfg rc = {
        .net = {.listen = c->net_listen,
                .transports = c->net_transports,
                .devices = "",
                .method = c->net_method,
                .allow_insecure = bt_node_plain_kv(&c->common)},
        .node_name = s->name,
        .incarnation = s->self.incarnation,
        .silence_ns = c->silence_ns,
        .lease_ns = c->lease_ns,
        .wait_ns = c->wait_ns,
        .pool_bytes = c->relay_bytes,
        .max_formats = (uint32_t)c->relay_layouts,
        .max_open = (uint32_t)c->max_open,
        .max_inflight_bytes = 32u << 20,
        .tiers = s->tiers,
        .is_member = is_member,
        .passed = on_passed,
        .arg = s,
    };
    int r = kv_relay_create(&rc, &s->relay, err);

    if (r == BT_OK) {
        snprintf(s->self.net_addr, sizeof(s->self.net_addr), "%s", kv_relay_address(s->relay));
    }
    return r;
}

static int check_conf(struct store *s, struct bt_err *err)
{
    const struct store_conf *c = s->conf;
    int rc = bt_node_check_listen(&c->common, BT_SEC_GRPC, "listen", c->listen, err);

    if (rc == BT_OK) {
        rc = bt_node_check_kv_listen(&c->common, "net.listen", c->net_listen, err);
    }
    if (rc == BT_OK) {
        rc = bt_node_check_kv_listen(&c->common, "store.listen", c->store_listen, err);
    }
    if (rc == BT_OK) {
        rc = kv_tiers_conf_check(&c->tiers, err);
    }
    if (rc == BT_OK && !bt_member_name_ok(bt_str_of(s->name))) {
        rc = BT_FAIL(err, BT_E_CONFIG, "name = %s: letters, digits, '-', '_', '.' only", s->name);
    }
    return rc;
}

static int start(struct store *s, struct bt_rpc_service *service, struct bt_err *err)
{
    struct bt_registry_cfg rc = {.conf = &s->conf->cluster,
                                 .self = &s->self,
                                 .changed = on_members,
                                 .fenced = tell_fenced,
                                 .arg = s};
    int code;

    if ((code = check_conf(s, err)) < 0 || (code = bt_loop_create(&s->loop, err)) < 0) {
        return bt_node_fail(code == BT_E_CONFIG ? BT_EXIT_CONFIG : BT_EXIT_OTHER, code, err);
    }
    if ((code = open_server(s, service, err)) < 0) {
        return bt_node_fail(code == BT_E_CONFIG ? BT_EXIT_CONFIG : BT_EXIT_BIND, code, err);
    }
    if ((code = open_tiers(s, err)) < 0 || (code = open_relay(s, err)) < 0 ||
        (code = bt_rpc_server_start(s->server, err)) < 0 ||
        (code = bt_registry_create(&rc, &s->registry, err)) < 0) {
        return bt_node_fail(code == BT_E_CONFIG ? BT_EXIT_CONFIG : BT_EXIT_OTHER, code, err);
    }
    return BT_EXIT_OK;
}

static int serve(struct store *s, struct bt_err *err)
{
    struct bt_node_addr addrs[] = {
        {"listen", s->self.grpc_addr}, {"net", s->self.net_addr}, {"store", s->self.store_addr}};
    int rc;

    bt_health_set(s->health, "baton.v1.Node", BT_HEALTH_SERVING);
    bt_health_set_all(s->health, BT_HEALTH_SERVING);
    rc = bt_node_ready(s->node, addrs, s->blocks ? 3 : 2, err);
    if (rc < 0) {
        return bt_node_fail(BT_EXIT_OTHER, rc, err);
    }
    if (s->tiers && s->conf->warm) {
        bt_warm_region(kv_tiers_region(s->tiers), &s->warm);
    }
    bt_node_on_stop(s->node, ask_stop, s);
    bt_loop_run(s->loop);
    return BT_EXIT_OK;
}

/* Every part may be missing. */
static void stop(struct store *s)
{
    bt_warm_stop(s->warm);
    bt_registry_destroy(s->registry);
    bt_rpc_server_destroy(s->server);
    bt_reflection_destroy(s->reflection);
    bt_health_destroy(s->health);
    kv_relay_destroy(s->relay);
    kv_server_destroy(s->blocks);
    if (s->tiers && s->conf->tiers.disk_path[0]) {
        kv_tiers_flush(s->tiers, bt_deadline_ns(FLUSH_NS));
    }
    kv_tiers_destroy(s->tiers); /* no event comes after it */
    bt_blockmap_destroy(s->blockmap);
    bt_loop_destroy(s->loop); /* with what the tiers have told last */
    kv_tell_destroy(s->tell);
    bt_members_unref(s->members);
    pthread_mutex_destroy(&s->lock);
}

static int run(struct bt_node *node, const struct store_conf *conf)
{
    struct store s = {.conf = conf,
                      .node = node,
                      .self = {.incarnation = bt_incarnation_make(), .role = BT_ROLE_KVSTORE},
                      .stop_msg.handle = on_stop,
                      .fenced_msg.handle = on_fenced,
                      .drain_look.fn = on_drain_look};
    struct bt_rpc_service service;
    struct bt_err err = {0};
    char host[40] = "";
    int code;

    pthread_mutex_init(&s.lock, NULL);
    if (conf->name[0]) {
        snprintf(s.name, sizeof(s.name), "%s", conf->name);
    } else {
        gethostname(host, sizeof(host) - 1);
        snprintf(s.name, sizeof(s.name), "kvstore-%s-%d", host, (int)getpid());
    }
    snprintf(s.self.name, sizeof(s.self.name), "%s", s.name);
    code = start(&s, &service, &err);
    if (code == BT_EXIT_OK) {
        code = serve(&s, &err);
    }
    stop(&s);
    return code;
}

int main(int argc, char **argv)
{
    struct store_conf conf = {0};
    struct bt_node_args args = {
        .spec = {.program = "baton-kvstore",
                 .summary = "KV store: passes KV caches from node to node, and keeps them.",
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
