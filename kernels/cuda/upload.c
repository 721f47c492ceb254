/* Weights on their way to the device: threads copy pieces of the file's pages into pinned buffers,
 * the copy engine takes them from there. One thread copies about 10 GB/s, PCIe carries 55.
 *
 * An upload returns when the last piece is in a pinned buffer; each thread waits for its own two
 * buffers alone. Threads: the caller's, and WORKERS of our own between begin and end. */
#include "kernels/cuda/module.h"

#include "common/base/buf.h"
#include "common/thr/thread.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <sys/mman.h>

#define WORKERS 10
#define PIECE   ((size_t)4 << 20)
#define SMALL   ((size_t)1 << 20) /* up to here the caller copies by itself */

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22 /* <linux/mman.h> */
#endif

/* One thread's way to the device. */
struct lane {
    void *buf[2]; /* pinned, PIECE */
    cudaEvent_t free[2];
    cudaStream_t stream;
    int next;
};

struct worker {
    struct kn_cuda_upload *u;
    struct lane lane;
    pthread_t thread;
    bool started;
};

struct kn_cuda_upload {
    struct lane own;
    struct worker workers[WORKERS];
    int n_workers;
    pthread_mutex_t lock;
    pthread_cond_t work, done;
    uint64_t job; /* guarded by lock, as is stop: number of the upload under way */
    bool stop;
    int busy; /* guarded by lock: workers that have not ended this job */
    /* The job: written before it is told, read by the workers. */
    char *dst;
    const char *src;
    size_t bytes;
    atomic_size_t next; /* first byte that nobody has taken */
    atomic_int error;   /* cudaError_t */
};

static int lane_init(struct lane *l)
{
    int rc = (int)cudaStreamCreateWithFlags(&l->stream, cudaStreamNonBlocking);

    for (int i = 0; i < 2 && rc == 0; i++) {
        rc = (int)cudaMallocHost(&l->buf[i], PIECE);
        rc = rc ? rc : (int)cudaEventCreateWithFlags(&l->free[i], cudaEventDisableTiming);
    }
    return rc;
}

static void lane_fini(struct lane *l)
{
    for (int i = 0; i < 2; i++) {
        cudaFreeHost(l->buf[i]);
        if (l->free[i]) {
            cudaEventDestroy(l->free[i]);
        }
    }
    if (l->stream) {
        cudaStreamDestroy(l->stream);
    }
}

static int lane_copy(struct lane *l, char *dst, const char *src, size_t n)
{
    int i = l->next, rc = (int)cudaEventSynchronize(l->free[i]);

    l->next ^= 1;
    if (rc != 0) {
        return rc;
    }
    memcpy(l->buf[i], src, n);
    rc = (int)cudaMemcpyAsync(dst, l->buf[i], n, cudaMemcpyHostToDevice, l->stream);
    return rc ? rc : (int)cudaEventRecord(l->free[i], l->stream);
}

/* The file's pages of a piece in one go, rather than by a fault for each few of them. */
static void populate(const char *src, size_t n)
{
    size_t from = (size_t)src & ~(size_t)4095, to = ((size_t)src + n + 4095) & ~(size_t)4095;

    madvise((char *)src - ((size_t)src - from), to - from, MADV_POPULATE_READ); /* a wish */
}

static void copy_pieces(struct kn_cuda_upload *u, struct lane *l)
{
    size_t at;

    while ((at = atomic_fetch_add_explicit(&u->next, PIECE, memory_order_relaxed)) < u->bytes) {
        size_t n = BT_MIN(PIECE, u->bytes - at);
        int rc;

        populate(u->src + at, n);
        rc = lane_copy(l, u->dst + at, u->src + at, n);
        if (rc != 0) {
            atomic_store_explicit(&u->error, rc, memory_order_relaxed);
            return;
        }
    }
}

static void *worker_main(void *arg)
{
    struct worker *w = arg;
    struct kn_cuda_upload *u = w->u;
    uint64_t seen = 0;
    int rc;

    cudaSetDevice(0);
    rc = lane_init(&w->lane); /* pinning on all threads at once */
    pthread_mutex_lock(&u->lock);
    for (;;) {
        while (u->job == seen && !u->stop) {
            pthread_cond_wait(&u->work, &u->lock);
        }
        if (u->stop) {
            break;
        }
        seen = u->job;
        pthread_mutex_unlock(&u->lock);
        if (rc == 0) { /* else the others do it */
            copy_pieces(u, &w->lane);
        }
        pthread_mutex_lock(&u->lock);
        if (--u->busy == 0) {
            pthread_cond_signal(&u->done);
        }
    }
    pthread_mutex_unlock(&u->lock);
    if (w->lane.stream) {
        rc = rc ? rc : (int)cudaStreamSynchronize(w->lane.stream);
    }
    lane_fini(&w->lane);
    if (rc != 0) {
        atomic_store_explicit(&u->error, rc, memory_order_relaxed);
    }
    return NULL;
}

int kn_cuda_upload_begin(struct kn_cuda_upload **ret, struct bt_err *err)
{
    struct kn_cuda_upload *u = bt_calloc(1, sizeof(*u));
    int n = BT_MIN(WORKERS, bt_cpus_usable()), rc;

    if (!u) {
        return BT_FAIL(err, BT_E_NOMEM, "CUDA: out of memory");
    }
    pthread_mutex_init(&u->lock, NULL);
    pthread_cond_init(&u->work, NULL);
    pthread_cond_init(&u->done, NULL);
    rc = lane_init(&u->own);
    if (rc != 0) {
        kn_cuda_upload_end(u);
        return kn_cuda_fail(err, "pinned memory for weights", rc);
    }
    for (int i = 0; i < n; i++) {
        struct worker *w = &u->workers[i];

        w->u = u;
        w->started = bt_thread_start(&w->thread, "upload", worker_main, w, NULL) == BT_OK;
        u->n_workers += w->started; /* without it the others do its share */
    }
    *ret = u;
    return BT_OK;
}

int kn_cuda_upload_end(struct kn_cuda_upload *u)
{
    int rc;

    if (!u) {
        return 0;
    }
    pthread_mutex_lock(&u->lock);
    u->stop = true;
    pthread_cond_broadcast(&u->work);
    pthread_mutex_unlock(&u->lock);
    for (int i = 0; i < WORKERS; i++) {
        if (u->workers[i].started) {
            pthread_join(u->workers[i].thread, NULL);
        }
    }
    rc = u->own.stream ? (int)cudaStreamSynchronize(u->own.stream) : 0;
    lane_fini(&u->own);
    rc = rc ? rc : atomic_load_explicit(&u->error, memory_order_relaxed);
    pthread_cond_destroy(&u->work);
    pthread_cond_destroy(&u->done);
    pthread_mutex_destroy(&u->lock);
    free(u);
    return rc;
}

int kn_cuda_upload(struct kn_cuda_upload *u, void *dst, const void *src, size_t bytes)
{
    if (bytes <= SMALL) {
        return lane_copy(&u->own, dst, src, bytes);
    }
    u->dst = dst;
    u->src = src;
    u->bytes = bytes;
    atomic_store_explicit(&u->next, 0, memory_order_relaxed);
    pthread_mutex_lock(&u->lock);
    u->job++;
    u->busy = u->n_workers;
    pthread_cond_broadcast(&u->work);
    pthread_mutex_unlock(&u->lock);
    copy_pieces(u, &u->own);
    pthread_mutex_lock(&u->lock);
    while (u->busy > 0) {
        pthread_cond_wait(&u->done, &u->lock);
    }
    pthread_mutex_unlock(&u->lock);
    return atomic_load_explicit(&u->error, memory_order_relaxed);
}
