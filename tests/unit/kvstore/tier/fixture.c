/* See fixture.h. */
#include "tests/unit/kvstore/tier/fixture.h"

#include "common/base/buf.h"

#include "tests/unit/cmocka.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

void world_make(struct world *w, uint32_t n_pages, uint32_t n_blobs)
{
    struct kv_layout l = {.n_layers = N_LAYERS,
                          .n_kv_heads = 2,
                          .head_dim = 4,
                          .page_tokens = 8,
                          .dtype = KV_DTYPE_F16,
                          .n_pages = n_pages,
                          .page_stride = PAGE_BYTES};

    *w = (struct world){0};
    l.layer_stride = l.page_stride * n_pages;
    l.bytes = l.layer_stride * N_LAYERS;
    assert_int_equal(kv_pool_create(&l, &bt_mem_host, "test", &w->pool, NULL), BT_OK);
    assert_int_equal(kv_hasher_create(&w->hasher, NULL), BT_OK);
    w->conf = (struct kv_tiers_conf){.host_bytes = (uint64_t)n_blobs * BLOB_BYTES, .threads = 2};
}

void world_with_disk(struct world *w, uint32_t n_files)
{
    const char *tmp = getenv("TMPDIR");

    snprintf(w->dir, sizeof(w->dir), "%s/baton-tier-XXXXXX", tmp ? tmp : "/tmp");
    assert_non_null(mkdtemp(w->dir));
    w->conf.disk_path = w->dir;
    w->conf.disk_bytes = (uint64_t)n_files * (4096 + BLOB_BYTES);
}

static bool scanned(void *arg)
{
    return kv_tiers_stats(arg).scanned;
}

void world_begin(struct world *w)
{
    struct kv_tiers_cfg cfg = {.conf = &w->conf,
                               .shape = kv_blob_shape_of(kv_pool_layout(w->pool), BLOCK),
                               .key_bits = w->key_bits,
                               .share_bytes = w->share_bytes,
                               .events = w->events,
                               .arg = w->arg};
    struct bt_err err = {0};

    if (w->no_source) {
        cfg.shape = (struct kv_blob_shape){0};
    }
    if (kv_tiers_create(&cfg, &w->tiers, &err) != BT_OK) {
        fail_msg("%s", err.msg);
    }
    w->src = kv_tiers_source(w->tiers);
}

void world_start(struct world *w)
{
    world_begin(w);
    world_scanned(w);
}

void world_scanned(struct world *w)
{
    assert_true(eventually(scanned, w->tiers));
}

void world_stop(struct world *w)
{
    assert_int_equal(kv_tiers_stats(w->tiers).n_pins, 0);
    kv_tiers_destroy(w->tiers);
    w->tiers = NULL;
}

int files_of(const char *dir,
             const char *suffix,
             void (*fn)(void *arg, const char *path),
             void *arg)
{
    DIR *d = opendir(dir);
    struct dirent *e;
    char path[512];
    int n = 0;

    while (d && (e = readdir(d))) {
        size_t len = strlen(e->d_name), cut = suffix ? strlen(suffix) : 0;

        if (e->d_name[0] == '.') {
            continue;
        }
        snprintf(path, sizeof(path), "%s/%s", dir, e->d_name);
        if (e->d_type == DT_DIR) {
            n += files_of(path, suffix, fn, arg);
        } else if (!suffix || (len >= cut && strcmp(e->d_name + len - cut, suffix) == 0)) {
            n++;
            if (fn) {
                fn(arg, path);
            }
        }
    }
    if (d) {
        closedir(d);
    }
    return n;
}

static void remove_all(const char *dir)
{
    DIR *d = opendir(dir);
    struct dirent *e;
    char path[512];

    while (d && (e = readdir(d))) {
        if (strcmp(e->d_name, ".") == 0 || strcmp(e->d_name, "..") == 0) {
            continue;
        }
        snprintf(path, sizeof(path), "%s/%s", dir, e->d_name);
        if (unlink(path) != 0) {
            remove_all(path);
        }
    }
    if (d) {
        closedir(d);
    }
    rmdir(dir);
}

void world_free(struct world *w)
{
    if (w->tiers) {
        world_stop(w);
    }
    kv_pool_destroy(w->pool);
    kv_hasher_destroy(w->hasher);
    if (w->dir[0]) {
        remove_all(w->dir);
    }
}

/* ---- chains ---- */

static void cut(struct kv_key *key, int bits)
{
    for (int i = 0; bits > 0 && i < (int)sizeof(key->b); i++) {
        int left = bits - 8 * i;

        key->b[i] &= (uint8_t)(0xff00u >> (left < 0 ? 0 : left > 8 ? 8 : left));
    }
}

static void make_keys(struct world *w, struct chain *c)
{
    for (uint32_t i = 0; i < c->c.n_blocks; i++) {
        uint32_t n = i + 1 == c->c.n_blocks && c->last_tokens ? c->last_tokens : BLOCK;

        kv_key_block(w->hasher, i ? &c->keys[i - 1] : &c->c.root, c->ids + (size_t)i * BLOCK, n,
                     &c->keys[i]);
        cut(&c->keys[i], w->key_bits);
    }
}

void chain_make(
    struct world *w, struct chain *c, uint32_t head, uint32_t same, uint32_t tail, uint32_t n)
{
    *c = (struct chain){.c = {.n_blocks = n}};
    c->c.root.b[0] = 42;
    c->c.keys = c->keys;
    c->c.ids = c->ids;
    for (uint32_t i = 0; i < n * BLOCK; i++) {
        uint32_t from = i / BLOCK < same ? head : tail;

        c->ids[i] = (int32_t)((from * 2654435761u + i * 40503u) >> 4 & 0xffff);
    }
    make_keys(w, c);
}

void chain_cut(struct world *w, struct chain *c, uint32_t n_tokens)
{
    c->last_tokens = n_tokens;
    make_keys(w, c);
}

void fill_page(void *at, const struct chain *c, uint32_t i, uint32_t p, int layer)
{
    uint32_t n = i + 1 == c->c.n_blocks && c->last_tokens ? c->last_tokens : BLOCK;
    uint64_t v = kv_blob_prefix((uint64_t)layer * 8 + p + 1, c->ids, i * BLOCK + n) | 1;
    uint64_t *to = at;

    for (size_t k = 0; k < PAGE_BYTES / sizeof(*to); k++) {
        v ^= v << 13;
        v ^= v >> 7;
        v ^= v << 17;
        to[k] = v;
    }
}

/* ---- waiting ---- */

bool eventually(bool (*fn)(void *arg), void *arg)
{
    uint64_t waited = 0; /* without the time for which the process was stopped */

    while (!fn(arg)) {
        uint64_t start = bt_now_ns();

        if (waited > 20 * BT_NS_PER_S) {
            return false;
        }
        usleep(50);
        waited += BT_MIN(bt_now_ns() - start, 100 * BT_NS_PER_MS);
    }
    return true;
}

/* ---- offering ---- */

struct offering {
    atomic_int rc;
};

static void offered(void *arg, int rc)
{
    atomic_store(&((struct offering *)arg)->rc, rc);
}

static bool offer_over(void *arg)
{
    return atomic_load(&((struct offering *)arg)->rc) != BT_PENDING;
}

int offer_block(struct world *w, const struct chain *c, uint32_t i)
{
    struct offering o = {.rc = BT_PENDING};
    struct kv_offer offer = {
        .chain = c->c, .n_tokens = BLOCK, .pool = w->pool, .done = offered, .arg = &o};
    uint32_t pages[2];

    if (i + 1 == c->c.n_blocks && c->last_tokens) {
        offer.n_tokens = c->last_tokens;
    }
    offer.chain.n_blocks = i + 1;
    offer.pages = pages;
    assert_int_equal(kv_pool_take(w->pool, 2, KV_OWNER_SEQ, KV_PAGE_NONE, pages), BT_OK);
    for (int l = 0; l < N_LAYERS; l++) {
        for (uint32_t p = 0; p < 2; p++) {
            fill_page(kv_pool_page(w->pool, l, pages[p]), c, i, p, l);
        }
    }
    if (w->src->ops->offer(w->src, &offer)) {
        assert_true(eventually(offer_over, &o));
    }
    kv_pool_give(w->pool, pages, 2, KV_OWNER_SEQ);
    return atomic_load(&o.rc);
}

uint32_t offer_chain(struct world *w, const struct chain *c)
{
    uint32_t n = 0;

    for (uint32_t i = 0; i < c->c.n_blocks; i++) {
        n += offer_block(w, c, i) == BT_OK;
    }
    return n;
}

/* ---- taking ---- */

static void found(struct kv_find *f)
{
    atomic_fetch_add(&((struct taken *)f->arg)->n_done, 1);
}

static void loaded(struct kv_load *l)
{
    atomic_fetch_add(&((struct taken *)l->arg)->n_done, 1);
}

static void progress(struct kv_load *l)
{
    atomic_fetch_add(&((struct taken *)l->arg)->n_progress, 1);
}

static bool find_over(void *arg)
{
    return atomic_load(&((struct taken *)arg)->n_done) == 1;
}

void take_find(struct world *w, const struct chain *c, uint32_t first, struct taken *t)
{
    memset(t, 0, sizeof(*t));
    t->find = (struct kv_find){.chain = c->c,
                               .first = first,
                               .n_tokens = c->last_tokens ? c->last_tokens : BLOCK,
                               .deadline_ns = BT_NEVER_NS,
                               .done = found,
                               .arg = t};
    w->src->ops->find(w->src, &t->find);
    assert_true(eventually(find_over, t));
}

void take_begin(struct world *w, struct taken *t)
{
    uint32_t n = t->find.n;

    t->pages = bt_calloc(2 * n + 1, sizeof(*t->pages));
    assert_non_null(t->pages);
    if (n > 0) {
        assert_int_equal(kv_pool_take(w->pool, 2 * n, KV_OWNER_TRANSFER, KV_PAGE_NONE, t->pages),
                         BT_OK);
    }
    for (int l = 0; l < N_LAYERS; l++) {
        for (uint32_t p = 0; p < 2 * n; p++) {
            memset(kv_pool_page(w->pool, l, t->pages[p]), 0, PAGE_BYTES);
        }
    }
    t->load = (struct kv_load){.find = &t->find,
                               .pool = w->pool,
                               .n_blocks = n,
                               .pages = t->pages,
                               .done = loaded,
                               .progress = progress,
                               .arg = t};
    w->src->ops->load(w->src, &t->load);
}

static bool load_over(void *arg)
{
    return atomic_load(&((struct taken *)arg)->n_done) == 2;
}

bool take_wait(struct taken *t)
{
    return eventually(load_over, t);
}

void take_load(struct world *w, struct taken *t)
{
    take_begin(w, t);
    assert_true(take_wait(t));
}

bool take_right(struct world *w, const struct chain *c, struct taken *t, uint32_t n)
{
    uint8_t want[PAGE_BYTES];

    for (uint32_t i = 0; i < n; i++) {
        for (uint32_t p = 0; p < 2; p++) {
            for (int l = 0; l < N_LAYERS; l++) {
                fill_page(want, c, t->find.first + i, p, l);
                if (memcmp(want, kv_pool_page(w->pool, l, t->pages[2 * i + p]), PAGE_BYTES) != 0) {
                    return false;
                }
            }
        }
    }
    return true;
}

void take_end(struct world *w, struct taken *t)
{
    uint32_t n = t->find.n;

    w->src->ops->end(w->src, &t->find);
    if (t->pages && n > 0) {
        kv_pool_give(w->pool, t->pages, 2 * n, KV_OWNER_TRANSFER);
    }
    free(t->pages);
    t->pages = NULL;
}

uint32_t take_chain(struct world *w, const struct chain *c)
{
    struct taken t;
    uint32_t n;

    take_find(w, c, 0, &t);
    take_load(w, &t);
    n = atomic_load(&t.load.n_good);
    assert_true(n == 0 || atomic_load(&t.load.layers_ready) == N_LAYERS);
    assert_true(take_right(w, c, &t, n));
    take_end(w, &t);
    return n;
}
