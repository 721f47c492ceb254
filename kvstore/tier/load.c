/* Bringing blobs: into an engine's pages, layer by layer (load), or from disk into host memory for
 * others (bring). Runs on the workers; the blobs are pinned by whoever asked.
 *
 * A blob that is used for the second time since it came and lies on disk only is promoted: it is
 * read into pieces of host memory instead of a scratch buffer and stays there when all of it was
 * good. Every layer is checked against its sum before it counts as ready. */
#include "kvstore/tier/tiers_int.h"

#include "common/base/buf.h"
#include "common/obs/log.h"

#include <stdlib.h>
#include <unistd.h>

#define OPEN_MAX 128 /* files kept open during a load; the others are opened for every layer */

struct part {
    struct kv_blob *blob;
    int fd; /* -1 = not open */
    bool from_disk, promote;
};

struct loading {
    struct kv_tiers *t;
    struct kv_job *job;
    struct kv_load *load;
    struct part *parts;
    void *scratch; /* a layer from disk */
    uint32_t n_good, n_layers;
    uint64_t ns[2], bytes[2]; /* host, disk */
};

static int open_part(struct loading *g, struct part *p, int *ret_fd)
{
    struct kv_disk_name name = {p->blob->meta.root, p->blob->meta.key, p->blob->file_gen};

    return kv_disk_open_file(g->t->disk, &name, ret_fd);
}

/* Says where each blob comes from; lock held. */
static void plan(struct loading *g)
{
    for (uint32_t i = 0; i < g->n_good; i++) {
        struct part *p = &g->parts[i];
        struct kv_blob *b = p->blob;

        if (b->dead) {
            g->n_good = i;
            break;
        }
        b->n_uses++;
        p->from_disk = b->host != KV_PLACE_READY;
        p->promote = p->from_disk && b->host == KV_PLACE_NONE && b->n_uses >= 2 &&
                     kv_host_room(g->t, b) == BT_OK;
    }
}

static bool setup(struct loading *g)
{
    const struct kv_found *found = g->load->find->priv;
    bool disk = false;

    g->n_good = g->load->n_blocks;
    g->n_layers = g->t->shape.n_layers;
    g->parts = bt_calloc(g->n_good, sizeof(*g->parts));
    if (!g->parts) {
        return false;
    }
    for (uint32_t i = 0; i < g->n_good; i++) {
        g->parts[i] = (struct part){.blob = found->blobs[i], .fd = -1};
    }
    pthread_mutex_lock(&g->t->lock);
    plan(g);
    pthread_mutex_unlock(&g->t->lock);
    /* From the last to the first, so that heads are the most recently used for the next scan. */
    for (uint32_t i = g->n_good; i-- > 0;) {
        struct part *p = &g->parts[i];

        disk |= p->from_disk;
        if (p->from_disk && i < OPEN_MAX && open_part(g, p, &p->fd) == BT_OK) {
            kv_disk_used(p->fd);
        }
    }
    if (disk) {
        g->scratch = malloc(g->t->shape.layer_bytes);
    }
    return !disk || g->scratch;
}

/* Reads a layer from disk to `to`. */
static int read_part(struct loading *g, struct part *p, uint32_t layer, void *to)
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

static int place(struct loading *g, uint32_t i, uint32_t layer)
{
    struct kv_tiers *t = g->t;
    struct part *p = &g->parts[i];
    size_t n = t->shape.layer_bytes;
    uint32_t block_pages =
        t->shape.block_tokens / (uint32_t)kv_pool_layout(g->load->pool)->page_tokens;
    void *bytes = p->from_disk && !p->promote ? g->scratch : kv_tiers_at(t, p->blob, layer);
    int rc = p->from_disk ? read_part(g, p, layer, bytes) : BT_OK;

    if (rc == BT_OK && kv_blob_sum(bytes, n) != p->blob->sums[layer]) {
        rc = BT_E_CORRUPT;
    }
    if (rc == BT_OK) {
        kv_blob_scatter(g->load->pool, g->load->pages + (size_t)i * block_pages,
                        t->shape.block_tokens, (int)layer, bytes);
    }
    return rc;
}

/* Waits as a throttled tier would make us. */
static bool throttle(struct loading *g, bool disk)
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

static void bad_part(struct loading *g, uint32_t i, int rc)
{
    struct part *p = &g->parts[i];

    g->n_good = i;
    atomic_store_explicit(&g->load->n_good, i, memory_order_release);
    if (rc != BT_E_SYS) { /* want of descriptors is not the file's fault */
        kv_tiers_damaged(g->t, p->blob, p->from_disk ? KV_TIER_DISK : KV_TIER_HOST);
    }
}

/* False: cancelled. */
static bool move_layer(struct loading *g, uint32_t layer)
{
    for (uint32_t i = 0; i < g->n_good; i++) {
        uint64_t start = bt_now_ns();
        bool disk = g->parts[i].from_disk;
        int rc;

        if (!throttle(g, disk)) {
            return false;
        }
        rc = place(g, i, layer);
        g->ns[disk] += bt_now_ns() - start;
        g->bytes[disk] += g->t->shape.layer_bytes;
        if (rc != BT_OK) {
            bad_part(g, i, rc);
        }
    }
    return true;
}

/* Promoted blobs stay if all of them is there; lock held. */
static void finish(struct loading *g, bool whole)
{
    struct kv_tiers *t = g->t;

    for (uint32_t i = 0; g->parts && i < g->load->n_blocks; i++) {
        struct part *p = &g->parts[i];

        if (p->promote && whole && i < g->n_good && !p->blob->dead) {
            kv_host_ready(t, p->blob);
        } else if (p->promote) {
            kv_host_drop(t, p->blob);
        }
    }
    kv_rate_add(&t->host_rate, g->bytes[0], g->ns[0]);
    kv_rate_add(&t->disk_rate, g->bytes[1], g->ns[1]);
    t->stats.host.read_bytes += g->bytes[0];
    t->stats.disk.read_bytes += g->bytes[1];
    t->queued[0] -= g->job->bytes[0];
    t->queued[1] -= g->job->bytes[1];
    t->stats.n_loads--;
    t->stats.loads++;
    g->load->priv = NULL;
}

void kv_job_load(struct kv_tiers *t, struct kv_job *job)
{
    struct loading g = {.t = t, .job = job, .load = job->load};
    bool go = setup(&g);
    uint32_t layer = 0;

    if (!go) {
        g.n_good = 0;
    }
    atomic_store_explicit(&g.load->n_good, g.n_good, memory_order_release);
    while (go && g.n_good > 0 && layer < g.n_layers) {
        go = move_layer(&g, layer);
        if (go) {
            atomic_store_explicit(&g.load->layers_ready, ++layer, memory_order_release);
            if (g.load->progress) {
                g.load->progress(g.load);
            }
        }
    }
    if (layer < g.n_layers) {
        atomic_store_explicit(&g.load->n_good, 0, memory_order_release);
    }
    for (uint32_t i = 0; g.parts && i < g.load->n_blocks; i++) {
        if (g.parts[i].fd >= 0) {
            close(g.parts[i].fd);
        }
    }
    pthread_mutex_lock(&t->lock);
    finish(&g, go && layer == g.n_layers);
    pthread_mutex_unlock(&t->lock);
    free(g.parts);
    free(g.scratch);
    g.load->done(g.load);
    free(job);
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
