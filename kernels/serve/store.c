/* The node's part in the KV store: its tiers are served to others and told to the block index, and
 * what others hold is a source of its engine, behind its own tiers (kvstore/store).
 *
 * Made before the engine starts; the source goes when the engine has stopped. Without Redis, prefix
 * reuse or tiers there is none of it. */
#include "kernels/serve/serve_int.h"

#include "kvstore/store/announce.h"

int kn_store_open(struct kn_serve *s, struct bt_err *err)
{
    const struct kn_serve_conf *c = s->conf;
    const struct bt_net_cfg net = {.listen = c->store_listen,
                                   .transports = c->net_transports,
                                   .devices = "",
                                   .method = c->net_method,
                                   .allow_insecure = bt_node_plain_kv(&c->common)};
    struct bt_blockmap_cfg bc = {.conf = &c->cluster,
                                 .name = s->name,
                                 .incarnation = s->incarnation,
                                 .held = kv_announce_held,
                                 .arg = s->tiers};
    struct kv_server_cfg sc = {.net = net,
                               .node_name = s->name,
                               .incarnation = s->incarnation,
                               .tiers = s->tiers,
                               .silence_ns = c->handoff_silence_ns};
    struct kv_client_cfg cc = {.net = net,
                               .node_name = s->name,
                               .incarnation = s->incarnation,
                               .replicas = (uint32_t)c->store_replicas,
                               .silence_ns = c->handoff_silence_ns,
                               .stall_ns = c->store_stall_ns};
    struct bt_blockmap *bm;
    char host[BT_MEMBER_ADDR_MAX + 1];
    int rc;

    if (!c->store || !s->tiers || !c->cluster.redis_address[0]) {
        return BT_OK;
    }
    rc = bt_blockmap_create(&bc, &bm, err);
    if (rc < 0) {
        return rc;
    }
    pthread_mutex_lock(&s->blockmap_lock);
    s->blockmap = bm;
    pthread_mutex_unlock(&s->blockmap_lock);
    rc = kv_server_create(&sc, &s->blocks, err);
    if (rc < 0) {
        return rc;
    }
    snprintf(s->self.store_addr, sizeof(s->self.store_addr), "%s", kv_server_address(s->blocks));
    /* The client takes no calls; any port will do. */
    snprintf(host, sizeof(host), "%s", c->store_listen);
    snprintf(strrchr(host, ':'), 3, ":0");
    cc.net.listen = host;
    cc.blockmap = bm;
    cc.shape =
        kv_blob_shape_of(kv_pool_layout(kn_engine_pool(s->engine)), (uint32_t)c->block_tokens);
    rc = kv_client_create(&cc, &s->store, err);
    if (rc == BT_OK) {
        kn_engine_add_source(s->engine, kv_client_source(s->store), false);
    }
    return rc;
}

/* [tier-event] */
void kn_store_events(struct kn_serve *s, const struct kv_tiers_event *ev, size_t n)
{
    pthread_mutex_lock(&s->blockmap_lock);
    if (s->blockmap) {
        kv_announce_events(s->blockmap, s->tiers, ev, n);
    } /* else it lists everything when it starts, or is gone */
    pthread_mutex_unlock(&s->blockmap_lock);
}

/* [redis] */
void kn_store_members(void *arg, struct bt_members *take_members)
{
    struct kn_serve *s = arg;

    if (s->blockmap) {
        bt_blockmap_set_members(s->blockmap, take_members);
    }
    if (s->store) {
        kv_client_set_members(s->store, take_members);
        kn_engine_poke(s->engine); /* blocks may wait for the first daemon */
    }
    bt_members_unref(take_members);
}

void kn_store_stop(struct kn_serve *s)
{
    kv_client_destroy(s->store);
    s->store = NULL;
    kv_server_destroy(s->blocks);
    s->blocks = NULL;
}

void kn_store_close(struct kn_serve *s)
{
    struct bt_blockmap *bm;

    /* Its thread lists the tiers and theirs tell it of changes: neither may outlive the other. */
    pthread_mutex_lock(&s->blockmap_lock);
    bm = s->blockmap;
    s->blockmap = NULL;
    pthread_mutex_unlock(&s->blockmap_lock);
    bt_blockmap_destroy(bm);
}

void kn_store_status(struct kn_serve *s, Baton__V1__NodeStatus *m)
{
    if (s->blocks) {
        struct kv_server_stats st = kv_server_stats(s->blocks);

        m->store_gets = st.gets;
        m->store_misses = st.misses;
        m->blocks_announced = bt_blockmap_stats(s->blockmap).n_held;
    }
    if (s->store) {
        struct kv_client_stats st = kv_client_stats(s->store);

        m->store_found = st.found_blocks;
        m->store_loaded = st.loaded_blocks;
        m->store_offered = st.puts;
        m->store_daemons = st.daemons;
        m->store_load_rate = st.bytes_per_s;
    }
}
