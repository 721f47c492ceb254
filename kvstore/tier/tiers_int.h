/* Inside of the tiers: blobs, their index and lists, jobs, the disk. Private to this folder.
 *
 * One mutex, kv_tiers.lock, guards everything that is not marked otherwise. Bytes of a blob are
 * read and written outside of it by whoever holds the blob: pinned (n_pins), or being worked on by
 * one of the own threads (n_io, or a place that is FILLING). */
#ifndef KV_TIER_TIERS_INT_H
#define KV_TIER_TIERS_INT_H

#include "common/thr/cond.h"
#include "common/thr/thread.h"
#include "kvstore/tier/arena.h"
#include "kvstore/tier/disk.h"
#include "kvstore/tier/tiers.h"

#define KV_TIERS_OFFERS_MAX 512 /* offers queued; more are not wanted */

enum kv_place { KV_PLACE_NONE, KV_PLACE_FILLING, KV_PLACE_READY };

struct kv_blob {
    struct kv_blob *next;            /* in its bucket */
    struct bt_list in_host, in_disk; /* least recently used first; READY there and not pinned */
    struct kv_blob_meta meta;        /* key and parent are cut to key_bits; never changes, but for
                                        the generation, and the sums until READY */
    uint8_t host, disk;              /* enum kv_place */
    bool dead;                       /* not in the index: gone with the last pin */
    bool unwritten_ok; /* was on disk and pushed out: not written again before a use */
    int8_t cls;        /* of its pieces */
    uint32_t n_pins;
    uint32_t n_io;     /* own threads that use it without a pin: not to be evicted */
    uint32_t n_uses;   /* pins and loads since it came */
    uint64_t stamp;    /* of its last move to the end of the lists */
    uint64_t file_gen; /* with the key the name of its file */
    uint64_t *pieces;  /* [n_layers] offsets in the region; valid unless host is NONE */
    bool has_pieces;
    bool reserved; /* FILLING by somebody from outside */
    int32_t *ids;
    uint64_t *sums;
};

enum kv_job_kind { KV_JOB_LOAD, KV_JOB_HELP, KV_JOB_OFFER, KV_JOB_BRING };

struct kv_loading; /* load.c */

struct kv_job {
    struct bt_list link;
    enum kv_job_kind kind;
    bool started;
    atomic_bool cancelled;
    uint64_t bytes[2]; /* queued: host, disk */
    struct kv_load *load;
    struct kv_loading *loading; /* of a helper, whose job it is part of */
    struct kv_bring *bring;
    struct kv_offer offer; /* chain is not valid */
    struct kv_blob *blob;  /* of an offer */
    uint32_t *pages;       /* of an offer */
};

/* What a find holds; kv_find.priv. */
struct kv_found {
    uint32_t n;
    struct kv_blob *blobs[];
};

/* A rate limit: `next_ns` is when the next bytes may move. */
struct kv_limit {
    uint64_t bytes_per_s; /* 0 = none */
    uint64_t next_ns;
};

/* What moving a byte takes in a load, as measured: a mean that forgets, small loads counting less.
 */
struct kv_rate {
    double ns_per_byte;
    bool measured;
};
static inline uint64_t kv_rate_ns(const struct kv_rate *r, uint64_t bytes)
{
    return (uint64_t)((double)bytes * r->ns_per_byte);
}
static inline void kv_rate_add(struct kv_rate *r, uint64_t bytes, uint64_t ns)
{
    double now = bytes ? (double)BT_MAX(ns, 1u) / (double)bytes : 0;

    if (bytes > 0) {
        double weight = (double)bytes / (8u << 20);

        weight = weight < 0.1 ? 0.1 : weight > 0.3 ? 0.3 : weight;
        r->ns_per_byte = r->measured ? r->ns_per_byte + weight * (now - r->ns_per_byte) : now;
        r->measured = true;
    }
}

struct kv_tiers {
    struct kv_source source; /* first: the source is the tiers */
    struct kv_tiers_conf conf;
    struct kv_blob_shape shape;
    int key_bits;
    uint64_t share_bytes;
    void (*events)(void *arg, const struct kv_tiers_event *ev, size_t n);
    void *arg;
    const struct bt_mem_ops *mem;
    struct bt_mem_region region;
    struct kv_disk *disk; /* NULL = none; its calls need no lock */

    pthread_mutex_t lock;
    struct kv_blob **buckets;
    uint64_t bucket_mask, n_blobs;
    struct kv_arena arena;
    struct bt_list host_lru[KV_ARENA_CLASSES], disk_lru;
    uint64_t clock, generation;

    /* jobs */
    pthread_cond_t work;         /* jobs, stop */
    pthread_cond_t offered;      /* offers, stop */
    pthread_cond_t hurried;      /* hurry, stop */
    pthread_cond_t changed;      /* a place is READY or NONE, a job was cancelled, a write ended */
    struct bt_list jobs, offers; /* offers: of full blocks */
    uint32_t n_offers;           /* queued */
    uint64_t queued[2];          /* bytes of loads: host, disk */
    uint64_t offer_bytes;        /* queued */
    struct kv_rate host_rate, disk_rate;
    struct kv_limit host_limit, disk_limit, write_limit;
    pthread_t workers[64], keepers[64];
    int n_workers, n_keepers;
    bool stop;
    bool hurry; /* somebody waits for the offers that are queued */

    /* sink.c */
    pthread_cond_t sink;
    pthread_t sinker, scanner, teller;
    bool has_sinker, has_scanner, has_teller;
    uint32_t n_flushing;
    bool listed; /* the scan knows all names of earlier files */
    bool writing;
    uint64_t retry_ns, pause_ns; /* after a failed write */
    uint64_t disk_used;
    uint64_t n_failures; /* of writing, counted up */

    /* events, delivered by the teller */
    pthread_cond_t told;
    struct kv_tiers_event *ev;
    size_t n_ev, cap_ev;

    struct kv_tiers_stats stats;
};

static inline uint64_t kv_blob_size(const struct kv_blob *b)
{
    return kv_blob_bytes(&b->meta.shape);
}
static inline void *kv_tiers_at(const struct kv_tiers *t, const struct kv_blob *b, uint32_t layer)
{
    return (char *)t->region.base + b->pieces[layer];
}

/* ---- index.c: all with the lock held ---- */

/* NULL = not here; *ret_other: another block has the key. m's key and parent get cut. */
struct kv_blob *kv_index_of(struct kv_tiers *t, struct kv_blob_meta *m, bool *ret_other);
/* A new blob in no tier, in the index. m->sums may be NULL. NULL = no memory. */
struct kv_blob *kv_index_add(struct kv_tiers *t, const struct kv_blob_meta *m);
/* Takes a blob that is in no tier any more out and frees it, with the last pin. */
void kv_index_settle(struct kv_tiers *t, struct kv_blob *b);
/* Not found from now on. */
void kv_index_kill(struct kv_tiers *t, struct kv_blob *b);
void kv_index_pin(struct kv_tiers *t, struct kv_blob *b);
void kv_index_unpin(struct kv_tiers *t, struct kv_blob *const *blobs, uint32_t n);
/* The longest leading run that is here, pinned. */
uint32_t kv_index_run(struct kv_tiers *t, const struct kv_run *run, struct kv_blob **ret_blobs);
/* To the end of the lists of the tiers that it is in, its parents behind it. */
void kv_index_touch(struct kv_tiers *t, struct kv_blob *b);
void kv_tiers_tell(struct kv_tiers *t,
                   enum kv_tiers_event_kind kind,
                   enum kv_tier tier,
                   const struct kv_blob *b);

/* ---- host.c: all with the lock held ---- */

/* Gives a blob pieces, by eviction if need be; host is FILLING then. BT_E_EXHAUSTED,
 * BT_E_TOO_LARGE. */
int kv_host_room(struct kv_tiers *t, struct kv_blob *b) BT_MUST_USE;
/* FILLING to READY, and to NONE. */
void kv_host_ready(struct kv_tiers *t, struct kv_blob *b);
void kv_host_drop(struct kv_tiers *t, struct kv_blob *b);
/* Only in host memory: to be written before it goes. */
static inline bool kv_host_dirty(const struct kv_blob *b)
{
    return b->host == KV_PLACE_READY && b->disk == KV_PLACE_NONE;
}

/* ---- load.c ---- */

void kv_job_load(struct kv_tiers *t, struct kv_job *job);
void kv_job_bring(struct kv_tiers *t, struct kv_job *job);
/* A worker has picked a helper's job up; lock held. Then without it: the job is gone afterwards. */
void kv_job_help_begin(struct kv_job *job);
void kv_job_help(struct kv_tiers *t, struct kv_job *job);

/* ---- worker.c ---- */

extern const struct kv_source_ops kv_tiers_source_ops;
void *kv_worker_run(void *tiers);
void *kv_keeper_run(void *tiers);
/* A load is no longer queued or running: counters, and its job is not the load's any more. Lock
 * held. */
void kv_load_forget(struct kv_tiers *t, struct kv_job *job);
/* Queues a job; lock held. */
void kv_job_push(struct kv_tiers *t, struct kv_job *job);
/* Waits until `bytes` may move; lock held, given up meanwhile. False: cancelled or stopped. */
bool kv_limit_wait(struct kv_tiers *t, struct kv_limit *l, uint64_t bytes, atomic_bool *cancelled);

/* ---- sink.c ---- */

void *kv_sink_run(void *tiers);
void *kv_scan_run(void *tiers);
void *kv_teller_run(void *tiers);
/* A blob has a damaged copy: dead, its file removed. Takes the lock. */
void kv_tiers_damaged(struct kv_tiers *t, struct kv_blob *b, enum kv_tier tier);
/* Takes the blob out of the disk tier; the file is removed by the caller, outside the lock (its
 * name in *ret_name) . Lock held. */
void kv_sink_forget(struct kv_tiers *t, struct kv_blob *b, struct kv_disk_name *ret_name);
/* Something may be to write. Lock held. */
void kv_sink_wake(struct kv_tiers *t);

#endif
