/* The tiers as others see them: life, pins, taking in, telling. */
#include "common/base/buf.h"
#include "common/obs/log.h"
#include "kvstore/tier/tiers_int.h"

#include <stdlib.h>
#include <unistd.h>

#define SHARE_BYTES (4u << 20)
#define HOST_START  0.25 /* ns a byte until measured: 4 GB/s */
#define DISK_START  2.0  /* likewise: 500 MB/s */

/* ---- events ---- */

void kv_tiers_tell(struct kv_tiers *t,
                   enum kv_tiers_event_kind kind,
                   enum kv_tier tier,
                   const struct kv_blob *b)
{
    enum kv_tier best = KV_N_TIERS;

    if (!t->events) {
        return;
    }
    if (!b->dead) {
        best = b->host == KV_PLACE_READY   ? KV_TIER_HOST
               : b->disk == KV_PLACE_READY ? KV_TIER_DISK
                                           : KV_N_TIERS;
    }
    if (t->n_ev == t->cap_ev) {
        size_t cap = t->cap_ev ? 2 * t->cap_ev : 64;
        struct kv_tiers_event *ev = realloc(t->ev, cap * sizeof(*ev));

        if (!ev) { /* there is always room for one: made at create */
            t->ev[t->n_ev - 1] = (struct kv_tiers_event){.kind = KV_TIERS_LOST};
            return;
        }
        t->ev = ev;
        t->cap_ev = cap;
    }
    t->ev[t->n_ev++] = (struct kv_tiers_event){kind, tier, best, b->meta.key, kv_blob_size(b)};
    pthread_cond_signal(&t->told);
}

void *kv_teller_run(void *tiers)
{
    struct kv_tiers *t = tiers;
    struct kv_tiers_event *out = NULL;
    size_t n, cap = 0;

    pthread_mutex_lock(&t->lock);
    while (!t->stop || t->n_ev > 0) {
        if (t->n_ev == 0) {
            pthread_cond_wait(&t->told, &t->lock);
            continue;
        }
        if (cap < t->n_ev) {
            struct kv_tiers_event *bigger = realloc(out, t->cap_ev * sizeof(*out));

            out = bigger ? bigger : out;
            cap = bigger ? t->cap_ev : cap;
        }
        n = BT_MIN(cap, t->n_ev);
        if (n == 0) {
            t->n_ev = 0; /* not even room for a few: nothing is told */
            continue;
        }
        memcpy(out, t->ev, n * sizeof(*out));
        memmove(t->ev, t->ev + n, (t->n_ev - n) * sizeof(*out));
        t->n_ev -= n;
        pthread_mutex_unlock(&t->lock);
        t->events(t->arg, out, n);
        pthread_mutex_lock(&t->lock);
    }
    pthread_mutex_unlock(&t->lock);
    free(out);
    return NULL;
}

/* ---- life ---- */

int kv_tiers_conf_check(const struct kv_tiers_conf *c, struct bt_err *err)
{
    uint64_t memory = (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE);
    bool has_path = c->disk_path && c->disk_path[0];

    if (has_path && c->host_bytes == 0) {
        return BT_FAIL(err, BT_E_CONFIG,
                       "tier.disk_path = %.100s with tier.host_bytes = 0: blocks reach the disk "
                       "through host memory",
                       c->disk_path);
    }
    if (has_path && c->disk_bytes == 0) {
        return BT_FAIL(err, BT_E_CONFIG, "tier.disk_path = %.100s with tier.disk_bytes = 0",
                       c->disk_path);
    }
    if (c->host_bytes > memory) {
        return BT_FAIL(err, BT_E_CONFIG, "tier.host_bytes = %llu: this machine's memory has %llu",
                       (unsigned long long)c->host_bytes, (unsigned long long)memory);
    }
    return BT_OK;
}

static int check(const struct kv_tiers_cfg *cfg, struct bt_err *err)
{
    const struct kv_tiers_conf *c = cfg->conf;
    const struct kv_blob_shape *s = &cfg->shape;

    if (c->host_bytes == 0) {
        return BT_FAIL(err, BT_E_CONFIG, "tier.host_bytes is 0: no tiers");
    }
    if (s->n_layers > 0 && !kv_blob_shape_ok(s)) {
        return BT_FAIL(err, BT_E_CONFIG,
                       "tiers: %u layers of %zu bytes, %u tokens a block are out of limits",
                       s->n_layers, s->layer_bytes, s->block_tokens);
    }
    if (s->n_layers > 0 && kv_blob_bytes(s) > c->host_bytes) {
        return BT_FAIL(err, BT_E_CONFIG, "tier.host_bytes is %llu, a block alone has %zu",
                       (unsigned long long)c->host_bytes, kv_blob_bytes(s));
    }
    if (cfg->key_bits < 0 || cfg->key_bits > 128) {
        return BT_FAIL(err, BT_E_CONFIG, "a key has 1 to 128 bits, not %d", cfg->key_bits);
    }
    if (s->n_layers > 0 && c->disk_path && c->disk_path[0] && kv_blob_bytes(s) > c->disk_bytes) {
        return BT_FAIL(err, BT_E_CONFIG, "tier.disk_bytes is %llu, a block alone has %zu",
                       (unsigned long long)c->disk_bytes, kv_blob_bytes(s));
    }
    return kv_tiers_conf_check(c, err);
}

static void init_sync(struct kv_tiers *t)
{
    pthread_cond_t *conds[] = {&t->work, &t->offered, &t->hurried, &t->changed, &t->sink, &t->told};

    pthread_mutex_init(&t->lock, NULL);
    for (size_t i = 0; i < BT_ARRAY_LEN(conds); i++) {
        bt_cond_init(conds[i]);
    }
    bt_list_init(&t->jobs);
    bt_list_init(&t->offers);
    bt_list_init(&t->disk_lru);
    for (int c = 0; c < KV_ARENA_CLASSES; c++) {
        bt_list_init(&t->host_lru[c]);
    }
}

static int alloc_memory(struct kv_tiers *t, struct bt_err *err)
{
    int rc = t->mem->alloc(t->conf.host_bytes, "baton-tier-host", &t->region, err);

    if (rc < 0) {
        return rc;
    }
    rc = kv_arena_init(&t->arena, t->region.bytes, t->shape.layer_bytes);
    t->bucket_mask = 1023;
    t->buckets = bt_calloc(t->bucket_mask + 1, sizeof(struct kv_blob *));
    if (t->events) {
        t->cap_ev = 64;
        t->ev = bt_calloc(t->cap_ev, sizeof(*t->ev));
    }
    if (rc < 0 || !t->buckets || (t->events && !t->ev)) {
        return BT_FAIL(err, BT_E_NOMEM, "tiers: no memory for the index");
    }
    t->stats.host.max_bytes = (uint64_t)t->arena.n_chunks * t->arena.chunk_bytes;
    t->stats.disk.max_bytes = t->conf.disk_bytes;
    if (kv_blob_bytes(&t->shape) > t->stats.host.max_bytes) {
        return BT_FAIL(err, BT_E_CONFIG, "tier.host_bytes is too small for a block");
    }
    return BT_OK;
}

static int start_threads(struct kv_tiers *t, struct bt_err *err)
{
    int rc = BT_OK, most = (int)BT_ARRAY_LEN(t->workers);
    int want = t->conf.threads < 1 ? 1 : t->conf.threads > most ? most : (int)t->conf.threads;

    while (rc == BT_OK && t->n_workers < want) {
        rc = bt_thread_start(&t->workers[t->n_workers], "tier", kv_worker_run, t, err);
        t->n_workers += rc == BT_OK;
    }
    while (rc == BT_OK && t->n_keepers < want && t->shape.n_layers > 0) {
        rc = bt_thread_start(&t->keepers[t->n_keepers], "tier-keep", kv_keeper_run, t, err);
        t->n_keepers += rc == BT_OK;
    }
    if (rc == BT_OK && t->disk) {
        rc = bt_thread_start(&t->sinker, "tier-sink", kv_sink_run, t, err);
        t->has_sinker = rc == BT_OK;
    }
    if (rc == BT_OK && t->events) {
        rc = bt_thread_start(&t->teller, "tier-event", kv_teller_run, t, err);
        t->has_teller = rc == BT_OK;
    }
    if (rc == BT_OK && t->disk) {
        rc = bt_thread_start(&t->scanner, "tier-scan", kv_scan_run, t, err);
        t->has_scanner = rc == BT_OK;
    }
    return rc;
}

int kv_tiers_create(const struct kv_tiers_cfg *cfg, struct kv_tiers **ret_tiers, struct bt_err *err)
{
    struct kv_tiers *t;
    struct timespec now;
    int rc = check(cfg, err);

    if (rc < 0) {
        return rc;
    }
    t = bt_calloc(1, sizeof(*t));
    if (!t) {
        return BT_FAIL(err, BT_E_NOMEM, "tiers: no memory");
    }
    clock_gettime(CLOCK_REALTIME, &now);
    t->source.ops = &kv_tiers_source_ops;
    t->conf = *cfg->conf;
    t->conf.disk_path = NULL; /* borrowed */
    t->shape = cfg->shape;
    t->key_bits = cfg->key_bits;
    t->share_bytes = cfg->share_bytes ? cfg->share_bytes : SHARE_BYTES;
    t->events = cfg->events;
    t->arg = cfg->arg;
    t->mem = cfg->mem ? cfg->mem : &bt_mem_private;
    t->region.fd = -1;
    /* Larger than any of an earlier process that wrote less than one a nanosecond. */
    t->generation = (uint64_t)now.tv_sec * BT_NS_PER_S + (uint64_t)now.tv_nsec;
    t->host_rate.ns_per_byte = HOST_START;
    t->disk_rate.ns_per_byte = DISK_START;
    t->host_limit.bytes_per_s = t->conf.host_max_rate;
    t->disk_limit.bytes_per_s = t->conf.disk_max_rate;
    t->write_limit.bytes_per_s = t->conf.disk_write_rate;
    init_sync(t);
    if (cfg->conf->disk_path && cfg->conf->disk_path[0] && t->conf.disk_bytes > 0) {
        rc = kv_disk_open(cfg->conf->disk_path, &t->disk, err);
    }
    t->stats.scanned = !t->disk;
    rc = rc < 0 ? rc : alloc_memory(t, err);
    rc = rc < 0 ? rc : start_threads(t, err);
    if (rc < 0) {
        kv_tiers_destroy(t);
        return rc;
    }
    *ret_tiers = t;
    return BT_OK;
}

static void stop_threads(struct kv_tiers *t)
{
    pthread_mutex_lock(&t->lock);
    t->stop = true;
    pthread_cond_broadcast(&t->work);
    pthread_cond_broadcast(&t->offered);
    pthread_cond_broadcast(&t->hurried);
    pthread_cond_broadcast(&t->changed);
    pthread_cond_broadcast(&t->sink);
    pthread_mutex_unlock(&t->lock);
    for (int i = 0; i < t->n_workers; i++) {
        pthread_join(t->workers[i], NULL);
    }
    for (int i = 0; i < t->n_keepers; i++) {
        pthread_join(t->keepers[i], NULL);
    }
    if (t->has_scanner) {
        pthread_join(t->scanner, NULL);
    }
    if (t->has_sinker) {
        pthread_join(t->sinker, NULL);
    }
    if (t->has_teller) { /* last: it tells what the others did */
        pthread_mutex_lock(&t->lock);
        pthread_cond_broadcast(&t->told);
        pthread_mutex_unlock(&t->lock);
        pthread_join(t->teller, NULL);
    }
}

void kv_tiers_destroy(struct kv_tiers *t)
{
    if (!t) {
        return;
    }
    stop_threads(t);
    if (t->stats.n_pins > 0) {
        BT_ERROR("tiers_destroy", "msg=\"blocks are pinned\" pins=%llu",
                 (unsigned long long)t->stats.n_pins);
    }
    BT_BUG_ON(t->stats.n_pins > 0 || t->stats.n_loads > 0);
    for (uint64_t i = 0; t->buckets && i <= t->bucket_mask; i++) {
        for (struct kv_blob *b = t->buckets[i], *next; b; b = next) {
            next = b->next;
            free(b);
        }
    }
    free(t->buckets);
    free(t->ev);
    kv_arena_fini(&t->arena);
    if (t->region.base) {
        t->mem->free(&t->region);
    }
    kv_disk_close(t->disk);
    pthread_cond_destroy(&t->work);
    pthread_cond_destroy(&t->offered);
    pthread_cond_destroy(&t->hurried);
    pthread_cond_destroy(&t->changed);
    pthread_cond_destroy(&t->sink);
    pthread_cond_destroy(&t->told);
    pthread_mutex_destroy(&t->lock);
    free(t);
}

struct kv_source *kv_tiers_source(struct kv_tiers *t)
{
    return t->shape.n_layers > 0 ? &t->source : NULL;
}

const struct bt_mem_region *kv_tiers_region(const struct kv_tiers *t)
{
    return &t->region;
}

/* ---- looking and holding ---- */

uint32_t kv_tiers_pin(struct kv_tiers *t, const struct kv_run *run, struct kv_blob **ret_blobs)
{
    uint32_t n;

    pthread_mutex_lock(&t->lock);
    n = kv_index_run(t, run, ret_blobs);
    for (uint32_t i = 0; i < n; i++) {
        ret_blobs[i]->n_uses++;
    }
    pthread_mutex_unlock(&t->lock);
    return n;
}

uint32_t kv_tiers_peek(struct kv_tiers *t, const struct kv_run *run, enum kv_tier *ret_tiers)
{
    uint64_t prefix = run->prefix;
    uint32_t n;

    pthread_mutex_lock(&t->lock);
    for (n = 0; n < run->n_blocks; n++) {
        struct kv_blob_meta m;
        struct kv_blob *b;
        bool other;

        kv_run_at(run, n, &prefix, &m);
        b = kv_index_of(t, &m, &other);
        if (!b || (b->host != KV_PLACE_READY && b->disk != KV_PLACE_READY)) {
            break;
        }
        if (ret_tiers) {
            ret_tiers[n] = b->host == KV_PLACE_READY ? KV_TIER_HOST : KV_TIER_DISK;
        }
    }
    pthread_mutex_unlock(&t->lock);
    return n;
}

void kv_tiers_unpin(struct kv_tiers *t, struct kv_blob *const *blobs, uint32_t n)
{
    pthread_mutex_lock(&t->lock);
    kv_index_unpin(t, blobs, n);
    pthread_mutex_unlock(&t->lock);
}

enum kv_tier kv_blob_tier(struct kv_tiers *t, const struct kv_blob *b)
{
    enum kv_tier tier;

    pthread_mutex_lock(&t->lock);
    tier = b->host == KV_PLACE_READY ? KV_TIER_HOST : KV_TIER_DISK;
    pthread_mutex_unlock(&t->lock);
    return tier;
}

const struct kv_blob_meta *kv_blob_meta(const struct kv_blob *b)
{
    return &b->meta;
}

void *kv_blob_layer(struct kv_tiers *t, const struct kv_blob *b, uint32_t layer)
{
    void *p;

    BT_BUG_ON(layer >= b->meta.shape.n_layers);
    pthread_mutex_lock(&t->lock);
    p = b->host == KV_PLACE_READY || b->reserved ? kv_tiers_at(t, b, layer) : NULL;
    pthread_mutex_unlock(&t->lock);
    return p;
}

void kv_tiers_bad(struct kv_tiers *t, struct kv_blob *b)
{
    kv_tiers_damaged(t, b, kv_blob_tier(t, b));
}

void kv_tiers_bring(struct kv_tiers *t, struct kv_bring *b)
{
    struct kv_job *job = NULL;
    bool here;

    pthread_mutex_lock(&t->lock);
    here = b->blob->host == KV_PLACE_READY;
    if (!here) {
        job = bt_calloc(1, sizeof(*job));
    }
    if (job) {
        job->kind = KV_JOB_BRING;
        job->bring = b;
        job->bytes[1] = kv_blob_size(b->blob);
        t->queued[1] += job->bytes[1];
        kv_job_push(t, job);
    }
    pthread_mutex_unlock(&t->lock);
    if (!job) {
        b->done(b, here ? BT_OK : BT_E_NOMEM);
    }
}

/* ---- taking in ---- */

int kv_tiers_reserve(struct kv_tiers *t, const struct kv_blob_meta *meta, struct kv_blob **ret_blob)
{
    struct kv_blob_meta m = *meta;
    struct kv_blob *b;
    bool other;
    int rc;

    if (!kv_blob_shape_ok(&m.shape) || m.n_tokens == 0 || m.n_tokens > m.shape.block_tokens ||
        (t->shape.n_layers > 0 && !kv_blob_shape_eq(&m.shape, &t->shape))) {
        return BT_E_INVALID;
    }
    pthread_mutex_lock(&t->lock);
    b = kv_index_of(t, &m, &other);
    if (b || other) {
        rc = BT_E_EXISTS;
        goto out;
    }
    b = kv_index_add(t, &m);
    if (!b) {
        rc = BT_E_EXHAUSTED;
        goto out;
    }
    rc = kv_host_room(t, b);
    if (rc < 0) {
        kv_index_settle(t, b);
        rc = rc == BT_E_TOO_LARGE ? BT_E_INVALID : rc;
        goto out;
    }
    b->reserved = true;
    kv_index_pin(t, b);
    *ret_blob = b;
out:
    pthread_mutex_unlock(&t->lock);
    return rc;
}

void kv_tiers_commit(struct kv_tiers *t, struct kv_blob *b, const uint64_t *sums)
{
    pthread_mutex_lock(&t->lock);
    BT_BUG_ON(!b->reserved);
    b->reserved = false;
    if (sums != b->sums) {
        memcpy(b->sums, sums, sizeof(*sums) * b->meta.shape.n_layers);
    }
    kv_host_ready(t, b);
    pthread_mutex_unlock(&t->lock);
}

void kv_tiers_abort(struct kv_tiers *t, struct kv_blob *b)
{
    pthread_mutex_lock(&t->lock);
    BT_BUG_ON(!b->reserved);
    b->reserved = false;
    kv_index_kill(t, b);
    kv_index_unpin(t, &b, 1);
    pthread_mutex_unlock(&t->lock);
}

/* ---- telling ---- */

static uint64_t reversed(uint64_t v)
{
    uint64_t r = 0;

    for (int i = 0; i < 64; i++) {
        r = r << 1 | (v >> i & 1);
    }
    return r;
}

/* Buckets are walked with the bits of their number counted from the top down, so that a table that
 * grows in between splits each bucket into ones that were both seen or both not. The cursor is the
 * number of the next bucket's bits turned round. */
size_t kv_tiers_held(struct kv_tiers *t, uint64_t *cursor, struct kv_tiers_held *ret, size_t max)
{
    size_t n = 0, in_bucket;

    pthread_mutex_lock(&t->lock);
    do {
        in_bucket = 0;
        for (struct kv_blob *b = t->buckets[*cursor & t->bucket_mask]; b; b = b->next) {
            in_bucket += b->host == KV_PLACE_READY || b->disk == KV_PLACE_READY;
        }
        if (n + in_bucket > max && n > 0) {
            break;
        }
        for (struct kv_blob *b = t->buckets[*cursor & t->bucket_mask]; b && n < max; b = b->next) {
            if (b->host == KV_PLACE_READY || b->disk == KV_PLACE_READY) {
                ret[n++] = (struct kv_tiers_held){
                    b->meta.key, b->host == KV_PLACE_READY ? KV_TIER_HOST : KV_TIER_DISK,
                    kv_blob_size(b)};
            }
        }
        *cursor = reversed(reversed(*cursor | ~t->bucket_mask) + 1);
    } while (*cursor != 0);
    pthread_mutex_unlock(&t->lock);
    return n;
}

struct kv_tiers_stats kv_tiers_stats(struct kv_tiers *t)
{
    struct kv_tiers_stats s;

    pthread_mutex_lock(&t->lock);
    s = t->stats;
    s.disk.bytes = t->disk_used;
    s.host.bytes_per_s = (uint64_t)(1e9 / t->host_rate.ns_per_byte);
    s.disk.bytes_per_s = (uint64_t)(1e9 / t->disk_rate.ns_per_byte);
    s.queued_bytes = t->queued[0] + t->queued[1] + t->offer_bytes;
    pthread_mutex_unlock(&t->lock);
    return s;
}
