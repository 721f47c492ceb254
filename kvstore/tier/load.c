/* Bringing blobs: into an engine's pages, layer by layer (load), or from disk into host memory for
 * others (bring). Runs on the workers; the blobs are pinned by whoever asked. Workers that have
 * nothing else to do help with a large load.
 *
 * A blob that is used for the second time since it came and lies on disk only is promoted: it is
 * read into pieces of host memory instead of a scratch buffer and stays there when all of it was
 * good. Every layer is checked against its sum before it counts as ready. */
#include "kvstore/tier/tiers_int.h"

#include "common/base/buf.h"

#include <stdlib.h>
#include <unistd.h>

#define OPEN_MAX 128 /* files kept open during a load; the others are opened for every layer */
#define HELPERS  7

struct part {
    struct kv_blob *blob;
    int fd; /* -1 = not open */
    bool from_disk, promote;
};

/* One load. Pieces, a layer of a block each, are numbered layer by layer; who works on it takes the
 * next one. The worker that picked the load up owns it and waits for the helpers. */
struct kv_loading {
    struct kv_tiers *t;
    struct kv_job *job;
    struct kv_load *load;
    struct part *parts;
    uint32_t n_blocks, n_layers;
    atomic_uint_fast64_t next;
    atomic_uint *left;    /* [n_layers] pieces of a layer that are not placed */
    atomic_bool given_up; /* cancelled, or no memory */
    uint64_t start_ns;
    /* Under the tiers' lock. */
    uint64_t ns[2], bytes[2]; /* host, disk; of all threads */
    uint32_t n_helping;
    uint32_t n_ready; /* layers that are ready */
    struct kv_job helpers[HELPERS];
    int n_helpers;
};

/* What one thread needs and finds out. */
struct hand {
    void *scratch; /* a layer from disk */
    uint64_t ns[2], bytes[2];
};

static int open_part(struct kv_loading *g, struct part *p, int *ret_fd)
{
    struct kv_disk_name name = {p->blob->meta.root, p->blob->meta.key, p->blob->file_gen};

    return kv_disk_open_file(g->t->disk, &name, ret_fd);
}

static uint32_t n_good(const struct kv_loading *g)
{
    return atomic_load_explicit(&g->load->n_good, memory_order_relaxed);
}

/* Says where each blob comes from; lock held. */
static void plan(struct kv_loading *g)
{
    for (uint32_t i = 0; i < g->n_blocks; i++) {
        struct part *p = &g->parts[i];
        struct kv_blob *b = p->blob;

        if (b->dead) {
            atomic_store_explicit(&g->load->n_good, i, memory_order_release);
            break;
        }
        b->n_uses++;
        p->from_disk = b->host != KV_PLACE_READY;
        p->promote = p->from_disk && b->host == KV_PLACE_NONE && b->n_uses >= 2 &&
                     kv_host_room(g->t, b) == BT_OK;
    }
}

static bool setup(struct kv_loading *g)
{
    const struct kv_found *found = g->load->find->priv;

    g->start_ns = bt_now_ns();
    g->n_blocks = g->load->n_blocks;
    g->n_layers = g->t->shape.n_layers;
    g->parts = bt_calloc(g->n_blocks, sizeof(*g->parts));
    g->left = bt_calloc(g->n_layers, sizeof(*g->left));
    if (!g->parts || !g->left) {
        return false;
    }
    for (uint32_t l = 0; l < g->n_layers; l++) {
        atomic_init(&g->left[l], g->n_blocks);
    }
    for (uint32_t i = 0; i < g->n_blocks; i++) {
        g->parts[i] = (struct part){.blob = found->blobs[i], .fd = -1};
    }
    pthread_mutex_lock(&g->t->lock);
    plan(g);
    pthread_mutex_unlock(&g->t->lock);
    /* From the last to the first, so that heads are the most recently used for the next scan. */
    for (uint32_t i = g->n_blocks; i-- > 0;) {
        struct part *p = &g->parts[i];

        if (p->from_disk && i < OPEN_MAX && open_part(g, p, &p->fd) == BT_OK) {
            kv_disk_used(p->fd);
        }
    }
    return true;
}

/* ---- pieces: by any thread that works on the load ---- */

/* Reads a layer from disk to `to`. */
static int read_part(struct kv_loading *g, struct part *p, uint32_t layer, void *to)
{
    int fd = p->fd, rc = BT_OK;

    if (fd < 0) {
        rc = open_part(g, p, &fd);
    }
    if (rc == BT_OK) {
        rc = kv_disk_read_layer(fd, &p->blob->meta, layer, to);
        if (fd != p->fd) {
            close(fd);
        }
    }
    return rc;
}

static int place(struct kv_loading *g, struct hand *h, uint32_t i, uint32_t layer)
{
    struct kv_tiers *t = g->t;
    struct part *p = &g->parts[i];
    size_t n = t->shape.layer_bytes;
    uint32_t block_pages =
        t->shape.block_tokens / (uint32_t)kv_pool_layout(g->load->pool)->page_tokens;
    void *bytes;
    int rc = BT_OK;

    if (p->from_disk && !p->promote && !h->scratch) {
        h->scratch = malloc(n);
        if (!h->scratch) {
            return BT_E_SYS;
        }
    }
    bytes = p->from_disk && !p->promote ? h->scratch : kv_tiers_at(t, p->blob, layer);
    if (p->from_disk) {
        rc = read_part(g, p, layer, bytes);
    }
    /* One pass for both; what is wrong is never told to be there. */
    if (rc == BT_OK &&
        kv_blob_scatter_sum(g->load->pool, g->load->pages + (size_t)i * block_pages,
                            t->shape.block_tokens, (int)layer, bytes) != p->blob->sums[layer]) {
        rc = BT_E_CORRUPT;
    }
    return rc;
}

/* Waits as a throttled tier would make us; false: cancelled. */
static bool throttle(struct kv_loading *g, bool disk)
{
    struct kv_limit *l = disk ? &g->t->disk_limit : &g->t->host_limit;
    bool go;

    if (l->bytes_per_s == 0) {
        return !atomic_load_explicit(&g->job->cancelled, memory_order_relaxed);
    }
    pthread_mutex_lock(&g->t->lock);
    go = kv_limit_wait(g->t, l, g->t->shape.layer_bytes, &g->job->cancelled);
    pthread_mutex_unlock(&g->t->lock);
    return go;
}

/* Nothing from block i on is good. */
static void bad_part(struct kv_loading *g, uint32_t i, int rc)
{
    struct part *p = &g->parts[i];
    uint32_t was = n_good(g);

    while (was > i && !atomic_compare_exchange_weak(&g->load->n_good, &was, i)) {
    }
    if (rc != BT_E_SYS) { /* want of descriptors or memory is not the file's fault */
        kv_tiers_damaged(g->t, p->blob, p->from_disk ? KV_TIER_DISK : KV_TIER_HOST);
    }
}

/* A layer is complete: it is ready when those before it are. */
static void layer_complete(struct kv_loading *g)
{
    bool told = false;

    pthread_mutex_lock(&g->t->lock);
    while (g->n_ready < g->n_layers &&
           atomic_load_explicit(&g->left[g->n_ready], memory_order_acquire) == 0) {
        g->n_ready++;
        told = true;
    }
    if (told) {
        atomic_store_explicit(&g->load->layers_ready, g->n_ready, memory_order_release);
    }
    pthread_mutex_unlock(&g->t->lock);
    if (told && g->load->progress) {
        g->load->progress(g->load);
    }
}

static void work(struct kv_loading *g)
{
    uint64_t n = (uint64_t)g->n_blocks * g->n_layers, k;
    struct hand h = {0};

    while (!atomic_load_explicit(&g->given_up, memory_order_relaxed) && n_good(g) > 0 &&
           (k = atomic_fetch_add_explicit(&g->next, 1, memory_order_relaxed)) < n) {
        uint32_t layer = (uint32_t)(k / g->n_blocks), i = (uint32_t)(k % g->n_blocks);
        bool disk = g->parts[i].from_disk;
        uint64_t start = bt_now_ns();
        int rc;

        if (i < n_good(g)) {
            if (!throttle(g, disk)) {
                atomic_store_explicit(&g->given_up, true, memory_order_relaxed);
                break;
            }
            rc = place(g, &h, i, layer);
            h.ns[disk] += bt_now_ns() - start;
            h.bytes[disk] += g->t->shape.layer_bytes;
            if (rc != BT_OK) {
                bad_part(g, i, rc);
            }
        }
        /* Pairs with layer_complete: what was placed is seen by who sees it ready. */
        if (atomic_fetch_sub_explicit(&g->left[layer], 1, memory_order_acq_rel) == 1) {
            layer_complete(g);
        }
    }
    free(h.scratch);
    pthread_mutex_lock(&g->t->lock);
    for (int d = 0; d < 2; d++) {
        g->ns[d] += h.ns[d];
        g->bytes[d] += h.bytes[d];
    }
    pthread_mutex_unlock(&g->t->lock);
}

/* ---- helpers ---- */

void kv_job_help_begin(struct kv_job *job)
{
    job->loading->n_helping++;
}

void kv_job_help(struct kv_tiers *t, struct kv_job *job)
{
    struct kv_loading *g = job->loading;

    work(g);
    pthread_mutex_lock(&t->lock);
    g->n_helping--;
    pthread_cond_broadcast(&t->changed);
    pthread_mutex_unlock(&t->lock);
}

static void call_helpers(struct kv_loading *g)
{
    struct kv_tiers *t = g->t;
    uint64_t bytes = g->n_blocks * kv_blob_bytes(&t->shape);

    if (bytes < t->share_bytes || t->n_workers < 2) {
        return;
    }
    pthread_mutex_lock(&t->lock);
    g->n_helpers = BT_MIN(t->n_workers - 1, HELPERS);
    for (int i = 0; i < g->n_helpers; i++) {
        g->helpers[i] = (struct kv_job){.kind = KV_JOB_HELP, .loading = g};
        kv_job_push(t, &g->helpers[i]);
    }
    pthread_mutex_unlock(&t->lock);
}

/* Nobody works on the load afterwards; lock held, given up meanwhile. */
static void dismiss_helpers(struct kv_loading *g)
{
    for (int i = 0; i < g->n_helpers; i++) {
        if (!g->helpers[i].started) {
            bt_list_remove(&g->helpers[i].link);
        }
    }
    while (g->n_helping > 0) {
        pthread_cond_wait(&g->t->changed, &g->t->lock);
    }
}

/* ---- the load as a whole ---- */

/* Promoted blobs stay if all of them is there; lock held. */
static void settle_parts(struct kv_loading *g, bool whole)
{
    for (uint32_t i = 0; g->parts && i < g->n_blocks; i++) {
        struct part *p = &g->parts[i];

        if (p->promote && whole && i < n_good(g) && !p->blob->dead) {
            kv_host_ready(g->t, p->blob);
        } else if (p->promote) {
            kv_host_drop(g->t, p->blob);
        }
    }
}

/* What it took, shared out among the tiers by the time spent on each; lock held. */
static void measure(struct kv_loading *g)
{
    struct kv_tiers *t = g->t;
    double wall = (double)(bt_now_ns() - g->start_ns);
    double all = (double)(g->ns[0] + g->ns[1]);

    if (all > 0) {
        kv_rate_add(&t->host_rate, g->bytes[0], (uint64_t)(wall * (double)g->ns[0] / all));
        kv_rate_add(&t->disk_rate, g->bytes[1], (uint64_t)(wall * (double)g->ns[1] / all));
    }
    t->stats.host.read_bytes += g->bytes[0];
    t->stats.disk.read_bytes += g->bytes[1];
    kv_load_forget(t, g->job);
}

static void free_loading(struct kv_loading *g)
{
    for (uint32_t i = 0; g->parts && i < g->n_blocks; i++) {
        if (g->parts[i].fd >= 0) {
            close(g->parts[i].fd);
        }
    }
    free(g->parts);
    free(g->left);
    free(g);
}

/* Without memory for what a load needs. */
static void cannot_load(struct kv_tiers *t, struct kv_job *job)
{
    struct kv_load *load = job->load;

    atomic_store_explicit(&load->n_good, 0, memory_order_release);
    pthread_mutex_lock(&t->lock);
    kv_load_forget(t, job);
    pthread_mutex_unlock(&t->lock);
    free(job);
    load->done(load);
}

void kv_job_load(struct kv_tiers *t, struct kv_job *job)
{
    struct kv_loading *g = bt_calloc(1, sizeof(*g));
    struct kv_load *load = job->load;
    bool whole;

    if (!g) {
        cannot_load(t, job);
        return;
    }
    g->t = t;
    g->job = job;
    g->load = load;
    if (setup(g)) {
        call_helpers(g);
        work(g);
    }
    pthread_mutex_lock(&t->lock);
    dismiss_helpers(g);
    whole = g->n_layers > 0 && g->n_ready == g->n_layers;
    if (!whole) {
        atomic_store_explicit(&load->n_good, 0, memory_order_release);
    }
    settle_parts(g, whole);
    measure(g);
    pthread_mutex_unlock(&t->lock);
    free_loading(g);
    free(job);
    load->done(load);
}

/* ---- bring ---- */

static int read_whole(struct kv_tiers *t, struct kv_blob *b)
{
    struct kv_disk_name name = {b->meta.root, b->meta.key, b->file_gen};
    int fd, rc = kv_disk_open_file(t->disk, &name, &fd);

    if (rc < 0) {
        return rc;
    }
    kv_disk_used(fd);
    for (uint32_t l = 0; l < b->meta.shape.n_layers && rc == BT_OK; l++) {
        void *to = kv_tiers_at(t, b, l);

        rc = kv_disk_read_layer(fd, &b->meta, l, to);
        if (rc == BT_OK && kv_blob_sum(to, b->meta.shape.layer_bytes) != b->sums[l]) {
            rc = BT_E_CORRUPT;
        }
    }
    close(fd);
    return rc;
}

/* BT_OK: it is there; BT_PENDING: to be read into its room. Lock held. */
static int prepare(struct kv_tiers *t, struct kv_blob *b)
{
    int rc;

    while (b->host == KV_PLACE_FILLING && !t->stop) { /* by a load on another worker */
        pthread_cond_wait(&t->changed, &t->lock);
    }
    if (b->dead || t->stop) {
        return b->dead ? BT_E_CORRUPT : BT_E_CANCELLED;
    }
    if (b->host == KV_PLACE_READY) {
        return BT_OK;
    }
    rc = kv_host_room(t, b);
    return rc == BT_OK ? BT_PENDING : rc == BT_E_TOO_LARGE ? BT_E_EXHAUSTED : rc;
}

void kv_job_bring(struct kv_tiers *t, struct kv_job *job)
{
    struct kv_bring *bring = job->bring;
    struct kv_blob *b = bring->blob;
    uint64_t start = bt_now_ns(), ns;
    int rc;

    pthread_mutex_lock(&t->lock);
    rc = prepare(t, b);
    pthread_mutex_unlock(&t->lock);
    if (rc == BT_PENDING) {
        rc = read_whole(t, b);
        ns = bt_now_ns() - start;
        if (rc != BT_OK && rc != BT_E_SYS) {
            kv_tiers_damaged(t, b, KV_TIER_DISK);
        }
        pthread_mutex_lock(&t->lock);
        if (rc == BT_OK && b->dead) {
            rc = BT_E_CORRUPT;
        }
        if (rc == BT_OK) {
            kv_host_ready(t, b);
            kv_rate_add(&t->disk_rate, kv_blob_size(b), ns);
            t->stats.disk.read_bytes += kv_blob_size(b);
        } else {
            kv_host_drop(t, b);
        }
        pthread_mutex_unlock(&t->lock);
    }
    pthread_mutex_lock(&t->lock);
    t->queued[1] -= job->bytes[1];
    pthread_mutex_unlock(&t->lock);
    free(job);
    bring->done(bring, rc);
}
