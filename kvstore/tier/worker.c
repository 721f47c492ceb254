/* The workers and what the engine calls: find, load, offer.
 *
 * Two queues with threads of their own. Loads and brings: somebody waits for them, and for the tail
 * of a request that gave way, which goes on when its bytes were copied. Offers of full blocks: they
 * come in crowds at the end of each prompt, just when its next token is computed, and have time; in
 * the background, with rests. */
#include "kvstore/tier/tiers_int.h"

#include "common/base/buf.h"
#include "common/thr/pace.h"

#include <stdlib.h>

static struct kv_tiers *tiers_of(struct kv_source *src)
{
    return BT_CONTAINER_OF(src, struct kv_tiers, source);
}

/* ---- waiting ---- */

bool kv_limit_wait(struct kv_tiers *t, struct kv_limit *l, uint64_t bytes, atomic_bool *cancelled)
{
    uint64_t end = BT_MAX(bt_now_ns(), l->next_ns) +
                   (uint64_t)((double)bytes * 1e9 / (double)BT_MAX(l->bytes_per_s, 1u));

    l->next_ns = end;
    while (!t->stop && !atomic_load_explicit(cancelled, memory_order_relaxed)) {
        if (bt_now_ns() >= end) {
            return true;
        }
        bt_cond_until(&t->changed, &t->lock, end);
    }
    return false;
}

/* ---- queues ---- */

void kv_job_push(struct kv_tiers *t, struct kv_job *job)
{
    if (job->kind == KV_JOB_OFFER && job->offer.n_tokens == t->shape.block_tokens) {
        bt_list_push_back(&t->offers, &job->link);
        pthread_cond_signal(&t->offered);
    } else {
        bt_list_push_back(&t->jobs, &job->link);
        pthread_cond_signal(&t->work);
    }
}

/* The first of a queue; NULL: stop. Lock held, given up meanwhile. */
static struct kv_job *take(struct kv_tiers *t, struct bt_list *queue, pthread_cond_t *cond)
{
    struct bt_list *l;

    while (!(l = bt_list_pop_front(queue)) && !t->stop) {
        pthread_cond_wait(cond, &t->lock);
    }
    return l ? BT_LIST_ENTRY(l, struct kv_job, link) : NULL;
}

static int copy_offer(struct kv_tiers *t, struct kv_job *job)
{
    struct kv_blob *b = job->blob;
    int rc;

    pthread_mutex_lock(&t->lock);
    rc = t->stop ? BT_E_CANCELLED : kv_host_room(t, b);
    pthread_mutex_unlock(&t->lock);
    for (uint32_t l = 0; l < b->meta.shape.n_layers && rc == BT_OK; l++) {
        void *to = kv_tiers_at(t, b, l);

        b->sums[l] =
            kv_blob_gather_sum(job->offer.pool, job->pages, t->shape.block_tokens, (int)l, to);
    }
    return rc;
}

static void run_offer(struct kv_tiers *t, struct kv_job *job)
{
    int rc = copy_offer(t, job);

    pthread_mutex_lock(&t->lock);
    if (rc == BT_OK) {
        kv_host_ready(t, job->blob);
        t->stats.offers++;
    } else {
        kv_host_drop(t, job->blob);
        kv_index_settle(t, job->blob);
    }
    t->n_offers--;
    t->hurry = t->hurry && t->n_offers > 0;
    t->offer_bytes -= job->bytes[0];
    pthread_mutex_unlock(&t->lock);
    job->offer.done(job->offer.arg, rc);
    free(job);
}

void *kv_worker_run(void *tiers)
{
    struct kv_tiers *t = tiers;
    struct kv_job *job;

    pthread_mutex_lock(&t->lock);
    while ((job = take(t, &t->jobs, &t->work)) != NULL) {
        job->started = true;
        if (job->kind == KV_JOB_HELP) {
            kv_job_help_begin(job);
        }
        pthread_mutex_unlock(&t->lock);
        switch (job->kind) {
        case KV_JOB_LOAD:
            kv_job_load(t, job);
            break;
        case KV_JOB_HELP:
            kv_job_help(t, job);
            break;
        case KV_JOB_BRING:
            kv_job_bring(t, job);
            break;
        case KV_JOB_OFFER:
            run_offer(t, job);
            break;
        }
        pthread_mutex_lock(&t->lock);
    }
    pthread_mutex_unlock(&t->lock);
    return NULL;
}

/* Not when more wait than one engine offers at a time: they come faster than they are copied. */
static void rest(struct kv_tiers *t, uint64_t until_ns)
{
    while (!t->stop && !t->hurry && t->n_offers < KV_SOURCE_OFFERS &&
           bt_cond_until(&t->hurried, &t->lock, until_ns)) {
    }
}

void *kv_keeper_run(void *tiers)
{
    struct kv_tiers *t = tiers;
    struct kv_job *job;

    bt_thread_background();
    pthread_mutex_lock(&t->lock);
    while ((job = take(t, &t->offers, &t->offered)) != NULL) {
        uint64_t begun_ns = bt_now_ns();

        pthread_mutex_unlock(&t->lock);
        run_offer(t, job);
        pthread_mutex_lock(&t->lock);
        rest(t, bt_pace_until(begun_ns));
    }
    pthread_mutex_unlock(&t->lock);
    return NULL;
}

/* ---- find ---- */

/* What was found and what it would take; lock held. */
static void estimate(struct kv_tiers *t, struct kv_find *f, const struct kv_found *found)
{
    uint64_t size = kv_blob_bytes(&t->shape), host, disk, queue;

    for (uint32_t i = 0; i < found->n; i++) {
        bool in_host = found->blobs[i]->host == KV_PLACE_READY;

        f->n_tier[in_host ? KV_TIER_HOST : KV_TIER_DISK]++;
        if (in_host && f->n_fast == i) {
            f->n_fast++;
        }
    }
    f->n = found->n;
    f->bytes = found->n * size;
    host = f->n_tier[KV_TIER_HOST] * size;
    disk = f->n_tier[KV_TIER_DISK] * size;
    queue = kv_rate_ns(&t->host_rate, t->queued[0]) + kv_rate_ns(&t->disk_rate, t->queued[1]);
    f->load_ns = queue + kv_rate_ns(&t->host_rate, host) + kv_rate_ns(&t->disk_rate, disk);
    f->fast_ns = queue + kv_rate_ns(&t->host_rate, f->n_fast * size);
}

static void src_find(struct kv_source *src, struct kv_find *f)
{
    struct kv_tiers *t = tiers_of(src);
    uint32_t block_tokens = t->shape.block_tokens;
    uint32_t n = f->chain.n_blocks > f->first ? f->chain.n_blocks - f->first : 0;
    struct kv_found *found = NULL;

    f->n = f->n_fast = 0;
    f->bytes = f->load_ns = f->fast_ns = 0;
    memset(f->n_tier, 0, sizeof(f->n_tier));
    f->priv = NULL;
    if (n > 0) {
        found = bt_calloc(1, sizeof(*found) + n * sizeof(found->blobs[0]));
    }
    if (found) {
        struct kv_run run = kv_run_of(&f->chain, f->first, block_tokens,
                                      f->n_tokens < block_tokens ? f->n_tokens : 0);

        pthread_mutex_lock(&t->lock);
        found->n = kv_index_run(t, &run, found->blobs);
        estimate(t, f, found);
        pthread_mutex_unlock(&t->lock);
        f->priv = found;
    }
    f->done(f);
}

static void src_find_cancel(struct kv_source *src, struct kv_find *f)
{
    (void)src; /* done was called inside find */
    (void)f;
}

static void src_end(struct kv_source *src, struct kv_find *f)
{
    struct kv_tiers *t = tiers_of(src);
    struct kv_found *found = f->priv;

    if (!found) {
        return;
    }
    f->priv = NULL;
    if (found->n > 0) {
        pthread_mutex_lock(&t->lock);
        kv_index_unpin(t, found->blobs, found->n);
        pthread_mutex_unlock(&t->lock);
    }
    free(found);
}

/* ---- load ---- */

static void src_load(struct kv_source *src, struct kv_load *l)
{
    struct kv_tiers *t = tiers_of(src);
    const struct kv_found *found = l->find->priv;
    struct kv_job *job;

    atomic_store_explicit(&l->layers_ready, 0, memory_order_release);
    atomic_store_explicit(&l->n_good, l->n_blocks, memory_order_release);
    l->priv = NULL;
    BT_BUG_ON(l->n_blocks > l->find->n);
    job = l->n_blocks > 0 ? bt_calloc(1, sizeof(*job)) : NULL;
    if (!job) {
        atomic_store_explicit(&l->n_good, 0, memory_order_release);
        l->done(l);
        return;
    }
    job->kind = KV_JOB_LOAD;
    job->load = l;
    l->priv = job;
    pthread_mutex_lock(&t->lock);
    for (uint32_t i = 0; i < l->n_blocks; i++) {
        job->bytes[found->blobs[i]->host != KV_PLACE_READY] += kv_blob_bytes(&t->shape);
    }
    t->queued[0] += job->bytes[0];
    t->queued[1] += job->bytes[1];
    t->stats.n_loads++;
    kv_job_push(t, job);
    pthread_mutex_unlock(&t->lock);
}

void kv_load_forget(struct kv_tiers *t, struct kv_job *job)
{
    t->queued[0] -= job->bytes[0];
    t->queued[1] -= job->bytes[1];
    t->stats.n_loads--;
    t->stats.loads++;
    job->load->priv = NULL;
}

static void src_load_cancel(struct kv_source *src, struct kv_load *l)
{
    struct kv_tiers *t = tiers_of(src);
    struct kv_job *job;
    bool queued = false;

    pthread_mutex_lock(&t->lock);
    job = l->priv; /* NULL: done is being called, or was */
    if (job) {
        atomic_store_explicit(&job->cancelled, true, memory_order_relaxed);
        queued = !job->started;
        pthread_cond_broadcast(&t->changed);
    }
    if (queued) {
        bt_list_remove(&job->link);
        kv_load_forget(t, job);
    }
    pthread_mutex_unlock(&t->lock);
    if (queued) {
        free(job);
        atomic_store_explicit(&l->n_good, 0, memory_order_release);
        l->done(l);
    }
}

/* ---- offer ---- */

/* A blob for the block, to be filled; NULL = not wanted. Lock held. */
static struct kv_blob *want(struct kv_tiers *t, struct kv_blob_meta *m)
{
    bool other;
    struct kv_blob *b;

    if (t->stop || t->n_offers >= KV_TIERS_OFFERS_MAX) {
        return NULL;
    }
    b = kv_index_of(t, m, &other);
    if (b) {
        kv_index_touch(t, b);
    }
    if (b || other) {
        return NULL;
    }
    b = kv_index_add(t, m);
    if (b) {
        b->host = KV_PLACE_FILLING;
    }
    return b;
}

static bool src_offer(struct kv_source *src, const struct kv_offer *o)
{
    struct kv_tiers *t = tiers_of(src);
    uint32_t block_tokens = t->shape.block_tokens;
    uint32_t n_pages = block_tokens / (uint32_t)kv_pool_layout(o->pool)->page_tokens;
    struct kv_run run = kv_run_of(&o->chain, o->chain.n_blocks - 1, block_tokens,
                                  o->n_tokens < block_tokens ? o->n_tokens : 0);
    uint64_t prefix = run.prefix;
    struct kv_blob_meta m;
    struct kv_job *job;
    bool wanted;

    kv_run_at(&run, 0, &prefix, &m);
    m.shape = t->shape;
    job = bt_calloc(1, sizeof(*job) + n_pages * sizeof(*job->pages));
    if (!job) {
        return false;
    }
    job->kind = KV_JOB_OFFER;
    job->offer = *o;
    job->pages = (uint32_t *)(job + 1);
    memcpy(job->pages, o->pages, n_pages * sizeof(*job->pages));
    pthread_mutex_lock(&t->lock);
    job->blob = want(t, &m);
    wanted = job->blob;
    if (wanted) {
        job->bytes[0] = kv_blob_bytes(&t->shape);
        t->offer_bytes += job->bytes[0];
        t->n_offers++;
        kv_job_push(t, job);
    }
    pthread_mutex_unlock(&t->lock);
    if (!wanted) { /* else it is a worker's, and may be gone */
        free(job);
    }
    return wanted;
}

static void src_hurry(struct kv_source *src)
{
    struct kv_tiers *t = tiers_of(src);

    pthread_mutex_lock(&t->lock);
    t->hurry = t->n_offers > 0;
    pthread_cond_broadcast(&t->hurried);
    pthread_mutex_unlock(&t->lock);
}

const struct kv_source_ops kv_tiers_source_ops = {
    .name = "tiers",
    .find = src_find,
    .find_cancel = src_find_cancel,
    .load = src_load,
    .load_cancel = src_load_cancel,
    .end = src_end,
    .offer = src_offer,
    .hurry = src_hurry,
};
