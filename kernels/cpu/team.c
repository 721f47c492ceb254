/* Fork-join on futexes.
 *
 * A job is published by counting `epoch` up (release); a worker sees the new epoch (acquire), takes
 * items until none is left, then counts `n_busy` down (release); the caller waits for 0 (acquire).
 * Every worker takes part in every job, so that a late one cannot meet the next job half made.
 *
 * Both sides spin for SPIN_NS at most before they sleep: about the length of the serial work
 * between two ops of a decode step, far below a scheduler's time slice. Whoever changes a word that
 * the other side may sleep on looks at the count of sleepers first (sequentially consistent, pairs
 * with the sleeper's own order: announce, look again, sleep). */
#include "kernels/cpu/team.h"

#include "common/base/buf.h"
#include "common/thr/thread.h"
#include "common/thr/time.h"

#include <limits.h>
#include <linux/futex.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#define SPIN_NS     (30 * BT_NS_PER_US)
#define SPIN_CHECK  64 /* pauses between looks at the clock */
#define MAX_THREADS 256

struct member {
    struct kn_team *team;
    int idx;
    pthread_t thread;
};

struct kn_team {
    /* The job, written by the caller before epoch. */
    kn_team_fn fn;
    void *arg;
    int n_items;
    int n_threads;
    bool stop;
    int n_started; /* workers to join */
    struct member *members;

    BT_ALIGNED(BT_CACHE_LINE) uint32_t epoch;  /* futex of the workers */
    uint32_t n_asleep;                         /* workers that may sleep on epoch */
    BT_ALIGNED(BT_CACHE_LINE) int next_item;   /* taken by fetch_add, relaxed: epoch orders */
    BT_ALIGNED(BT_CACHE_LINE) uint32_t n_busy; /* futex of the caller */
    uint32_t caller_asleep;
};

static void futex_wait(uint32_t *word, uint32_t seen)
{
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
}

static void futex_wake(uint32_t *word)
{
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

static inline void relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

/* Waits until *word differs from (differ) or equals (!differ) `value`; `asleep` tells the other
 * side that it must wake us. */
static uint32_t wait_word(uint32_t *word, uint32_t value, bool differ, uint32_t *asleep)
{
    uint64_t until = 0;
    uint32_t seen;

    for (;;) {
        for (int i = 0; i < SPIN_CHECK; i++) {
            seen = __atomic_load_n(word, __ATOMIC_ACQUIRE);
            if ((seen != value) == differ) {
                return seen;
            }
            relax();
        }
        if (until == 0) {
            until = bt_deadline_ns(SPIN_NS);
        } else if (bt_now_ns() >= until) {
            __atomic_fetch_add(asleep, 1, __ATOMIC_SEQ_CST);
            seen = __atomic_load_n(word, __ATOMIC_SEQ_CST);
            if ((seen != value) != differ) {
                futex_wait(word, seen);
            }
            __atomic_fetch_sub(asleep, 1, __ATOMIC_SEQ_CST);
        }
    }
}

static void work(struct kn_team *t, int member)
{
    int item;

    while ((item = __atomic_fetch_add(&t->next_item, 1, __ATOMIC_RELAXED)) < t->n_items) {
        t->fn(t->arg, item, member);
    }
}

static void *worker_main(void *p)
{
    struct member *m = p;
    struct kn_team *t = m->team;
    uint32_t seen = 0;

    for (;;) {
        seen = wait_word(&t->epoch, seen, true, &t->n_asleep);
        if (t->stop) {
            return NULL;
        }
        work(t, m->idx);
        if (__atomic_sub_fetch(&t->n_busy, 1, __ATOMIC_SEQ_CST) == 0 &&
            __atomic_load_n(&t->caller_asleep, __ATOMIC_SEQ_CST)) {
            futex_wake(&t->n_busy);
        }
    }
}

static void publish(struct kn_team *t)
{
    __atomic_add_fetch(&t->epoch, 1, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&t->n_asleep, __ATOMIC_SEQ_CST)) {
        futex_wake(&t->epoch);
    }
}

int kn_team_create(int n_threads, struct kn_team **ret_team, struct bt_err *err)
{
    struct kn_team *t;
    int rc = BT_OK;

    if (n_threads < 1 || n_threads > MAX_THREADS) {
        return BT_FAIL(err, BT_E_CONFIG, "n_threads is %d, must be 1..%d", n_threads, MAX_THREADS);
    }
    t = aligned_alloc(BT_CACHE_LINE, sizeof(*t));
    if (!t) {
        return BT_FAIL(err, BT_E_NOMEM, "thread team: out of memory");
    }
    memset(t, 0, sizeof(*t));
    t->n_threads = n_threads;
    t->members = bt_calloc((size_t)n_threads, sizeof(*t->members));
    if (!t->members) {
        free(t);
        return BT_FAIL(err, BT_E_NOMEM, "thread team: out of memory");
    }
    for (int i = 1; i < n_threads && rc == BT_OK; i++) {
        struct member *m = &t->members[i];
        char name[16];

        m->team = t;
        m->idx = i;
        snprintf(name, sizeof(name), "team-%d", i);
        rc = bt_thread_start(&m->thread, name, worker_main, m, err);
        t->n_started += rc == BT_OK;
    }
    if (rc < 0) {
        kn_team_destroy(t);
        return rc;
    }
    *ret_team = t;
    return BT_OK;
}

void kn_team_destroy(struct kn_team *t)
{
    if (!t) {
        return;
    }
    t->stop = true;
    publish(t);
    for (int i = 1; i <= t->n_started; i++) {
        pthread_join(t->members[i].thread, NULL);
    }
    free(t->members);
    free(t);
}

int kn_team_size(const struct kn_team *t)
{
    return t ? t->n_threads : 1;
}

void kn_team_run(struct kn_team *t, int n_items, kn_team_fn fn, void *arg)
{
    if (!t || t->n_threads == 1 || n_items <= 1) {
        for (int i = 0; i < n_items; i++) {
            fn(arg, i, 0);
        }
        return;
    }
    t->fn = fn;
    t->arg = arg;
    t->n_items = n_items;
    __atomic_store_n(&t->next_item, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&t->n_busy, (uint32_t)t->n_threads - 1, __ATOMIC_RELAXED);
    publish(t);
    work(t, 0);
    wait_word(&t->n_busy, 0, false, &t->caller_asleep);
}
