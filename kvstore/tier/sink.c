/* Sinking: what nears its end in host memory is written to disk before its memory is needed, so
 * that making room finds it written and only lets go. Thread "tier-sink"; and the thread
 * "tier-scan", which reads the directory in at the start.
 *
 * Once host memory is three quarters full, the oldest quarter of each list, or its first
 * 256 blobs, is to be on disk. If
 * most of that is not, writing does not keep up: what was used again goes first then,
 * wherever it is, and what finds no time is given up unwritten. Writing follows a rate; a write
 * that fails (full disk, read-only, broken) is followed by a pause that doubles, and goes on when
 * it works again. Nothing is written before the scan has listed what is there: it would take new
 * files for old ones. */
#include "kvstore/tier/tiers_int.h"

#include "common/base/buf.h"
#include "common/obs/log.h"

#include <stdlib.h>

#define PAUSE_MIN_NS (100 * BT_NS_PER_MS)
#define PAUSE_MAX_NS (5 * BT_NS_PER_S)
#define VICTIMS      64
#define WINDOW_MAX   256  /* blobs of a list that are looked at: the lock is held meanwhile */
#define REUSED_MAX   4096 /* likewise, when writing does not keep up */

void kv_sink_wake(struct kv_tiers *t)
{
    if (t->has_sinker) {
        pthread_cond_signal(&t->sink);
    }
}

/* ---- what to write ---- */

static bool to_write(const struct kv_blob *b)
{
    return kv_host_dirty(b) && !b->unwritten_ok && b->n_io == 0;
}

static struct kv_blob *pick_reused(struct kv_tiers *t, int cls)
{
    uint32_t n = 0;

    bt_list_for_each (l, &t->host_lru[cls]) {
        struct kv_blob *b = BT_LIST_ENTRY(l, struct kv_blob, in_host);

        if (to_write(b) && b->n_uses > 0) {
            return b;
        }
        if (++n == REUSED_MAX) {
            break;
        }
    }
    return NULL;
}

/* The oldest of one list, as far as its oldest quarter goes. */
static struct kv_blob *pick_oldest(struct kv_tiers *t, int cls)
{
    const struct kv_arena_class *c = &t->arena.classes[cls];
    uint64_t used = (uint64_t)c->n_chunks * t->arena.chunk_bytes - c->n_free * c->piece_bytes;
    uint64_t window = used / 4, seen = 0, unwritten = 0;
    struct kv_blob *first = NULL, *reused = NULL;
    uint32_t n = 0;

    bt_list_for_each (l, &t->host_lru[cls]) {
        struct kv_blob *b = BT_LIST_ENTRY(l, struct kv_blob, in_host);

        if (seen >= window || n++ == WINDOW_MAX) {
            break;
        }
        seen += kv_blob_size(b);
        if (to_write(b)) {
            unwritten += kv_blob_size(b);
            first = first ? first : b;
        }
    }
    if (2 * unwritten > BT_MIN(seen, window)) { /* does not keep up */
        reused = pick_reused(t, cls);
    }
    return reused ? reused : first;
}

static struct kv_blob *pick_newest(struct kv_tiers *t, int cls)
{
    for (struct bt_list *l = t->host_lru[cls].prev; l != &t->host_lru[cls]; l = l->prev) {
        struct kv_blob *b = BT_LIST_ENTRY(l, struct kv_blob, in_host);

        if (to_write(b)) {
            return b;
        }
    }
    return NULL;
}

static struct kv_blob *pick(struct kv_tiers *t)
{
    struct kv_blob *best = NULL;
    bool flush = t->n_flushing > 0;

    if (!flush && t->arena.used_bytes < t->stats.host.max_bytes / 4 * 3) {
        return NULL;
    }
    for (int c = 0; c < KV_ARENA_CLASSES; c++) {
        struct kv_blob *b;

        if (bt_list_empty(&t->host_lru[c])) {
            continue;
        }
        b = flush ? pick_newest(t, c) : pick_oldest(t, c);
        if (b && (!best || (flush ? b->stamp > best->stamp : b->stamp < best->stamp))) {
            best = b;
        }
    }
    return best;
}

/* ---- room on disk ---- */

void kv_sink_forget(struct kv_tiers *t, struct kv_blob *b, struct kv_disk_name *ret_name)
{
    *ret_name = (struct kv_disk_name){b->meta.root, b->meta.key, b->file_gen};
    bt_list_remove(&b->in_disk);
    b->disk = KV_PLACE_NONE;
    t->disk_used -= kv_disk_file_bytes(&b->meta);
    t->stats.disk.n_blocks--;
    if (!b->dead) {
        kv_tiers_tell(t, KV_TIERS_REMOVED, KV_TIER_DISK, b);
    }
}

/* Least recently used files that have to go for `bytes` more; returns how many. */
static uint32_t make_room(struct kv_tiers *t, uint64_t bytes, struct kv_disk_name *names)
{
    uint32_t n = 0;

    while (t->disk_used + bytes > t->conf.disk_bytes && n < VICTIMS) {
        struct kv_blob *b;

        if (bt_list_empty(&t->disk_lru)) {
            break;
        }
        b = BT_LIST_ENTRY(t->disk_lru.next, struct kv_blob, in_disk);
        kv_sink_forget(t, b, &names[n++]);
        t->stats.disk.evictions++;
        b->unwritten_ok = true;
        kv_index_settle(t, b);
    }
    return n;
}

static void remove_files(struct kv_tiers *t, const struct kv_disk_name *names, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        kv_disk_remove(t->disk, &names[i]);
    }
}

/* ---- writing ---- */

static void written(struct kv_tiers *t, struct kv_blob *b)
{
    uint64_t bytes = kv_disk_file_bytes(&b->meta);

    b->disk = KV_PLACE_READY;
    t->pause_ns = 0;
    t->stats.disk.n_blocks++;
    t->stats.disk.stored++;
    t->stats.disk.written_bytes += bytes;
    if (b->n_pins == 0 && !b->dead) {
        bt_list_push_back(&t->disk_lru, &b->in_disk);
    }
    if (!b->dead) {
        kv_tiers_tell(t, KV_TIERS_STORED, KV_TIER_DISK, b);
    }
}

/* A full disk: something has to go, or nothing new ever comes in. */
static void failed(struct kv_tiers *t, struct kv_blob *b, int rc)
{
    b->disk = KV_PLACE_NONE;
    t->disk_used -= kv_disk_file_bytes(&b->meta);
    t->stats.disk.write_errors++;
    t->n_failures++;
    t->pause_ns = BT_MIN(2 * t->pause_ns, PAUSE_MAX_NS);
    t->pause_ns = BT_MAX(t->pause_ns, PAUSE_MIN_NS);
    t->retry_ns = bt_now_ns() + t->pause_ns;
    BT_WARN("tier_write", "msg=\"a block could not be written to disk\" reason=\"%s\" errors=%llu",
            bt_rc_text(rc), (unsigned long long)t->stats.disk.write_errors);
}

static int write_blob(struct kv_tiers *t, struct kv_blob *b)
{
    struct kv_blob_meta m = b->meta;
    void **layers = bt_calloc(m.shape.n_layers, sizeof(*layers));
    int rc;

    if (!layers) {
        return BT_E_NOMEM;
    }
    for (uint32_t l = 0; l < m.shape.n_layers; l++) {
        layers[l] = kv_tiers_at(t, b, l);
    }
    m.generation = b->file_gen;
    rc = kv_disk_write(t->disk, &m, layers);
    free(layers);
    return rc;
}

/* Lock held, given up meanwhile. */
static void sink_one(struct kv_tiers *t, struct kv_blob *b)
{
    uint64_t bytes = kv_disk_file_bytes(&b->meta);
    struct kv_disk_name names[VICTIMS], own;
    uint32_t n = 0;
    bool gone = false;
    int rc;

    if (bytes > t->conf.disk_bytes) {
        b->unwritten_ok = true;
        return;
    }
    b->n_io++; /* stays where it is */
    n = make_room(t, bytes, names);
    if (t->disk_used + bytes > t->conf.disk_bytes) { /* another turn, or all is pinned */
        t->retry_ns = n == 0 ? bt_now_ns() + PAUSE_MIN_NS : t->retry_ns;
        pthread_mutex_unlock(&t->lock);
        remove_files(t, names, n);
        pthread_mutex_lock(&t->lock);
        b->n_io--;
        return;
    }
    t->disk_used += bytes;
    b->disk = KV_PLACE_FILLING;
    b->file_gen = ++t->generation;
    t->writing = true;
    pthread_mutex_unlock(&t->lock);
    remove_files(t, names, n);
    rc = write_blob(t, b);
    pthread_mutex_lock(&t->lock);
    t->writing = false;
    b->n_io--;
    if (rc == BT_OK) {
        written(t, b);
    } else {
        failed(t, b, rc);
    }
    n = rc == BT_E_EXHAUSTED ? make_room(t, t->conf.disk_bytes - t->disk_used + 2 * bytes, names)
                             : 0;
    if (rc == BT_OK && b->dead) {
        kv_sink_forget(t, b, &own);
        gone = true;
    }
    if (t->write_limit.bytes_per_s > 0) {
        t->write_limit.next_ns =
            BT_MAX(bt_now_ns(), t->write_limit.next_ns) +
            (uint64_t)((double)bytes * 1e9 / (double)t->write_limit.bytes_per_s);
    }
    if (b->dead) {
        kv_index_settle(t, b);
    }
    pthread_cond_broadcast(&t->changed);
    if (n > 0 || gone) {
        pthread_mutex_unlock(&t->lock);
        remove_files(t, names, n);
        remove_files(t, &own, gone);
        pthread_mutex_lock(&t->lock);
    }
}

void *kv_sink_run(void *tiers)
{
    struct kv_tiers *t = tiers;

    bt_thread_background();
    pthread_mutex_lock(&t->lock);
    while (!t->stop) {
        uint64_t now = bt_now_ns(), until = t->retry_ns;
        struct kv_blob *b;

        if (t->n_flushing == 0) {
            until = BT_MAX(until, t->write_limit.next_ns);
        }
        b = t->listed ? pick(t) : NULL;
        if (b && now >= until) {
            sink_one(t, b);
        } else {
            pthread_cond_broadcast(&t->changed); /* a flush may be over */
            bt_cond_until(&t->sink, &t->lock, b ? until : BT_NEVER_NS);
        }
    }
    pthread_mutex_unlock(&t->lock);
    return NULL;
}

void kv_tiers_flush(struct kv_tiers *t, uint64_t deadline_ns)
{
    uint64_t failures;

    if (!t->has_sinker) {
        return;
    }
    pthread_mutex_lock(&t->lock);
    failures = t->n_failures;
    t->n_flushing++;
    kv_sink_wake(t);
    while (bt_now_ns() < deadline_ns && t->n_failures == failures && !t->stop &&
           (pick(t) || t->writing)) {
        bt_cond_until(&t->changed, &t->lock, deadline_ns);
    }
    t->n_flushing--;
    pthread_mutex_unlock(&t->lock);
}

/* ---- damage ---- */

void kv_tiers_damaged(struct kv_tiers *t, struct kv_blob *b, enum kv_tier tier)
{
    struct kv_disk_name name;
    bool on_disk = false;

    pthread_mutex_lock(&t->lock);
    if (!b->dead) {
        struct kv_tier_stats *s = tier == KV_TIER_DISK ? &t->stats.disk : &t->stats.host;

        s->bad++;
        s->removed++;
        BT_WARN("tier_bad", "msg=\"a block was damaged and is given up\" tier=%s bad=%llu",
                tier == KV_TIER_DISK ? "disk" : "host", (unsigned long long)s->bad);
    }
    kv_index_kill(t, b);
    if (b->disk == KV_PLACE_READY) {
        kv_sink_forget(t, b, &name);
        on_disk = true;
    }
    pthread_mutex_unlock(&t->lock);
    if (on_disk) {
        kv_disk_remove(t->disk, &name);
    }
}

/* ---- the directory at the start ---- */

static bool scan_stop(void *arg)
{
    struct kv_tiers *t = arg;
    bool stop;

    pthread_mutex_lock(&t->lock);
    stop = t->stop;
    pthread_mutex_unlock(&t->lock);
    return stop;
}

/* Writing begins: under names that the scan has not seen. */
static void scan_listed(void *arg, uint64_t max_generation)
{
    struct kv_tiers *t = arg;

    pthread_mutex_lock(&t->lock);
    if (max_generation < INT64_MAX) { /* names may be anything */
        t->generation = BT_MAX(t->generation, max_generation);
    }
    t->listed = true;
    kv_sink_wake(t);
    pthread_mutex_unlock(&t->lock);
}

/* The blob of a file, or NULL: not to be kept. Lock held. */
static struct kv_blob *blob_of_file(struct kv_tiers *t, const struct kv_blob_meta *file)
{
    struct kv_blob_meta m = *file;
    struct kv_blob *b;
    bool other;

    if (t->shape.n_layers > 0 && !kv_blob_shape_eq(&m.shape, &t->shape)) {
        t->stats.disk.bad++; /* of another layout */
        return NULL;
    }
    if (t->disk_used + kv_disk_file_bytes(&m) > t->conf.disk_bytes) {
        return NULL;
    }
    b = kv_index_of(t, &m, &other);
    if (other) {
        return NULL;
    }
    if (!b) {
        return kv_index_add(t, &m);
    }
    if (b->disk != KV_PLACE_NONE || b->host != KV_PLACE_READY ||
        memcmp(b->sums, m.sums, sizeof(*b->sums) * m.shape.n_layers) != 0) {
        return NULL;
    }
    return b;
}

static bool scan_found(void *arg, const struct kv_blob_meta *m)
{
    struct kv_tiers *t = arg;
    struct kv_blob *b;

    pthread_mutex_lock(&t->lock);
    b = blob_of_file(t, m);
    if (b) {
        b->disk = KV_PLACE_READY;
        b->file_gen = m->generation;
        t->disk_used += kv_disk_file_bytes(m);
        t->stats.disk.n_blocks++;
        if (b->n_pins == 0) {
            bt_list_push_front(&t->disk_lru, &b->in_disk);
        }
        kv_tiers_tell(t, KV_TIERS_STORED, KV_TIER_DISK, b);
    } else {
        t->stats.disk.removed++;
    }
    pthread_mutex_unlock(&t->lock);
    return b != NULL;
}

void *kv_scan_run(void *tiers)
{
    struct kv_tiers *t = tiers;
    struct kv_disk_scan scan = {
        .listed = scan_listed, .found = scan_found, .stop = scan_stop, .arg = t};

    bt_thread_background();
    kv_disk_scan(t->disk, &scan);
    pthread_mutex_lock(&t->lock);
    t->stats.disk.bad += scan.n_bad;
    t->stats.disk.removed += scan.n_bad;
    t->stats.scanned = true;
    BT_INFO("tier_scan", "blocks=%llu bytes=%llu bad=%llu",
            (unsigned long long)t->stats.disk.n_blocks, (unsigned long long)t->disk_used,
            (unsigned long long)t->stats.disk.bad);
    pthread_cond_broadcast(&t->changed);
    pthread_mutex_unlock(&t->lock);
    return NULL;
}
