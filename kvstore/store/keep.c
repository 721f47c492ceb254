/* See keep.h. */
#include "kvstore/store/keep.h"

#include "common/base/buf.h"
#include "common/thr/cond.h"
#include "common/thr/pace.h"
#include "common/thr/thread.h"

#include <pthread.h>
#include <stdlib.h>

struct kv_keep {
    struct kv_tiers *tiers;
    struct kv_hasher *hasher;
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t cond;
    struct bt_list jobs; /* [lock] */
    bool hurry;          /* [lock] */
    bool stopping;       /* [lock] */
    uint64_t n_blocks;   /* atomic */
};

/* False: no room for it or what follows. */
static bool keep_block(struct kv_keep *k,
                       const struct kv_keep_job *job,
                       const struct kv_blob_meta *meta,
                       uint32_t first_token)
{
    const struct kv_blob_shape *shape = &meta->shape;
    uint32_t page_tokens = (uint32_t)kv_pool_layout(job->pool)->page_tokens;
    const uint32_t *pages = job->pages + (first_token - job->first) / page_tokens;
    uint64_t sums[KV_BLOB_MAX_LAYERS];
    struct kv_blob *blob;
    int rc = kv_tiers_reserve(k->tiers, meta, &blob);

    if (rc != BT_OK) {
        return rc == BT_E_EXISTS;
    }
    for (uint32_t l = 0; l < shape->n_layers; l++) {
        void *to = kv_blob_layer(k->tiers, blob, l);

        sums[l] = kv_blob_gather_sum(job->pool, pages, shape->block_tokens, (int)l, to);
    }
    kv_tiers_commit(k->tiers, blob, sums);
    kv_tiers_unpin(k->tiers, &blob, 1);
    __atomic_add_fetch(&k->n_blocks, 1, __ATOMIC_RELAXED);
    return true;
}

static void rest(struct kv_keep *k, uint64_t until_ns)
{
    pthread_mutex_lock(&k->lock);
    while (!k->hurry && !k->stopping && bt_list_empty(&k->jobs) &&
           bt_cond_until(&k->cond, &k->lock, until_ns)) {
    }
    pthread_mutex_unlock(&k->lock);
}

static void keep(struct kv_keep *k, const struct kv_keep_job *job)
{
    const struct kv_layout *l = kv_pool_layout(job->pool);
    struct kv_blob_meta m = {.root = job->root, .n_tokens = job->block_tokens};
    struct kv_key parent = job->root;
    uint32_t n = job->block_tokens;
    uint64_t rest_ns = 0; /* between blocks: after the last one the pages go back at once */
    bool room = true;

    if (n == 0 || n > KV_BLOB_MAX_TOKENS || n % (uint32_t)l->page_tokens != 0) {
        return;
    }
    m.shape = kv_blob_shape_of(l, n);
    if (!kv_blob_shape_ok(&m.shape)) {
        return;
    }
    for (uint32_t t = 0; room && n <= job->n_tokens - t; t += n) {
        m.ids = job->ids + t;
        m.parent = parent;
        m.prefix = kv_blob_prefix(m.prefix, m.ids, n);
        kv_key_block(k->hasher, &parent, m.ids, n, &m.key);
        parent = m.key;
        if (t >= job->first) {
            uint64_t begun_ns;

            rest(k, rest_ns);
            begun_ns = bt_now_ns();
            room = keep_block(k, job, &m, t);
            rest_ns = bt_pace_until(begun_ns);
        }
    }
}

static void *run(void *arg)
{
    struct kv_keep *k = arg;

    bt_thread_background();
    pthread_mutex_lock(&k->lock);
    for (;;) {
        struct bt_list *it = bt_list_pop_front(&k->jobs);

        if (it) {
            struct kv_keep_job *job = BT_LIST_ENTRY(it, struct kv_keep_job, link);

            pthread_mutex_unlock(&k->lock);
            keep(k, job);
            job->done(job);
            pthread_mutex_lock(&k->lock);
            k->hurry = k->hurry && !bt_list_empty(&k->jobs);
        } else if (k->stopping) {
            break;
        } else {
            pthread_cond_wait(&k->cond, &k->lock);
        }
    }
    pthread_mutex_unlock(&k->lock);
    return NULL;
}

int kv_keep_create(struct kv_tiers *tiers, struct kv_keep **ret, struct bt_err *err)
{
    struct kv_keep *k = bt_calloc(1, sizeof(*k));
    int rc;

    if (!k) {
        return BT_FAIL(err, BT_E_NOMEM, "relay: out of memory");
    }
    k->tiers = tiers;
    bt_list_init(&k->jobs);
    pthread_mutex_init(&k->lock, NULL);
    bt_cond_init(&k->cond);
    rc = kv_hasher_create(&k->hasher, err);
    if (rc == BT_OK) {
        rc = bt_thread_start(&k->thread, "relay-keep", run, k, err);
    }
    if (rc != BT_OK) {
        kv_hasher_destroy(k->hasher);
        free(k);
        return rc;
    }
    *ret = k;
    return BT_OK;
}

void kv_keep_destroy(struct kv_keep *k)
{
    if (!k) {
        return;
    }
    pthread_mutex_lock(&k->lock);
    k->stopping = true;
    pthread_cond_signal(&k->cond);
    pthread_mutex_unlock(&k->lock);
    pthread_join(k->thread, NULL);
    kv_hasher_destroy(k->hasher);
    pthread_mutex_destroy(&k->lock);
    pthread_cond_destroy(&k->cond);
    free(k);
}

void kv_keep_push(struct kv_keep *k, struct kv_keep_job *job)
{
    bt_list_init(&job->link);
    pthread_mutex_lock(&k->lock);
    bt_list_push_back(&k->jobs, &job->link);
    pthread_cond_signal(&k->cond);
    pthread_mutex_unlock(&k->lock);
}

void kv_keep_hurry(struct kv_keep *k)
{
    pthread_mutex_lock(&k->lock);
    k->hurry = true;
    pthread_cond_signal(&k->cond);
    pthread_mutex_unlock(&k->lock);
}

uint64_t kv_keep_blocks(const struct kv_keep *k)
{
    return __atomic_load_n(&k->n_blocks, __ATOMIC_RELAXED);
}
