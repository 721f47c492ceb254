/* FlushCache: what nobody uses leaves the pool's index, host memory, the disk. A thread of its own
 * waits for the engine and removes files, one flush at a time; the loop answers when it is done. */
#include "kernels/serve/serve_int.h"

#include "common/base/buf.h"
#include "common/obs/log.h"
#include "common/thr/thread.h"

#include <stdlib.h>

struct kn_flush {
    struct kn_serve *serve;
    struct bt_rpc_call *call; /* loop; NULL = the caller has gone */
    pthread_t thread;
    bool joined;
    bool pool, host, disk;
    uint32_t pages;
    struct kv_tiers_cleared tiers;
    struct bt_msg done;
};

/* [flush] */
static void *flush_main(void *arg)
{
    struct kn_flush *f = arg;
    struct kn_serve *s = f->serve;

    if (f->pool) {
        f->pages = kn_engine_flush(s->engine);
    }
    if (s->tiers) {
        f->tiers = kv_tiers_clear(s->tiers, f->host, f->disk);
    }
    bt_loop_post(s->loop, &f->done);
    return NULL;
}

static void reply(struct bt_rpc_call *call, uint32_t pages, const struct kv_tiers_cleared *t)
{
    Baton__V1__FlushCacheResponse m = BATON__V1__FLUSH_CACHE_RESPONSE__INIT;

    m.pool_pages = pages;
    m.host_blocks = t->host_blocks;
    m.disk_blocks = t->disk_blocks;
    bt_rpc_call_reply(call, &m.base);
}

static void on_done(struct bt_msg *msg, void *loop)
{
    struct kn_flush *f = BT_CONTAINER_OF(msg, struct kn_flush, done);

    (void)loop;
    if (!f->joined) {
        pthread_join(f->thread, NULL);
    }
    BT_INFO("flush", "pool_pages=%u host_blocks=%llu disk_blocks=%llu", f->pages,
            (unsigned long long)f->tiers.host_blocks, (unsigned long long)f->tiers.disk_blocks);
    if (f->call) {
        bt_rpc_call_set_user(f->call, NULL);
        reply(f->call, f->pages, &f->tiers);
    }
    f->serve->flush = NULL;
    free(f);
}

/* What a flush would take now. */
static void
dry_run(struct kn_serve *s, struct bt_rpc_call *call, const Baton__V1__FlushCacheRequest *m)
{
    struct kv_tiers_cleared c = {0};
    uint32_t pages = m->pool ? kv_pool_stats(kn_engine_pool(s->engine)).n_cached : 0;

    if (s->tiers) {
        struct kv_tiers_stats t = kv_tiers_stats(s->tiers);

        c.host_blocks = m->host ? t.host.n_blocks : 0;
        c.disk_blocks = m->disk ? t.disk.n_blocks : 0;
    }
    reply(call, pages, &c);
}

void kn_flush_call(struct bt_rpc_call *call, const ProtobufCMessage *msg)
{
    const Baton__V1__FlushCacheRequest *m = (const void *)msg;
    struct kn_serve *s = bt_rpc_call_service_user(call);
    struct bt_err err = {0};
    struct kn_flush *f;
    int rc;

    if (m->dry_run) {
        dry_run(s, call, m);
        return;
    }
    if (s->flush) {
        BT_FAIL(&err, BT_E_EXHAUSTED, "another flush is under way");
        bt_rpc_call_fail(call, BT_E_EXHAUSTED, &err);
        return;
    }
    f = bt_calloc(1, sizeof(*f));
    if (!f) {
        bt_rpc_call_fail(call, BT_E_NOMEM, NULL);
        return;
    }
    *f = (struct kn_flush){.serve = s,
                           .call = call,
                           .pool = m->pool,
                           .host = m->host,
                           .disk = m->disk,
                           .done.handle = on_done};
    rc = bt_thread_start(&f->thread, "flush", flush_main, f, &err);
    if (rc < 0) {
        bt_rpc_call_fail(call, rc, &err);
        free(f);
        return;
    }
    s->flush = f;
    bt_rpc_call_set_user(call, f);
}

void kn_flush_closed(struct bt_rpc_call *call, bool cancelled)
{
    struct kn_flush *f = bt_rpc_call_user(call);

    (void)cancelled;
    if (f) {
        f->call = NULL;
    }
}

void kn_flush_stop(struct kn_serve *s)
{
    if (s->flush) {
        pthread_join(s->flush->thread, NULL);
        s->flush->joined = true; /* its message is with the loop, which frees it */
    }
}
