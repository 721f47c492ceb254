/* Fork-join on futexes.
 *
 * `ticket` holds the number of the job (high half) and the next item of it (low half). A member
 * takes an item by counting the ticket up with compare-and-swap, which succeeds only while that job
 * is the current one; the job's description lies in slot number % 2, which is not written again
 * before the job after it is over. So the caller waits for the items, not for the members: a worker
 * that the system does not run costs nothing, and one that comes late finds a later job or none.
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

/* Fields are read by workers that may find them overwritten; their compare-and-swap fails then. All
 * accesses relaxed, ordered by ticket. */
struct job {
    kn_team_fn fn;
    void *arg;
    int n_items;
};

struct kn_team {
    struct job jobs[2];
    int n_threads;
    bool stop;     /* written before epoch */
    int n_started; /* workers to join */
    struct member *members;

    BT_ALIGNED(BT_CACHE_LINE) uint64_t ticket;
    BT_ALIGNED(BT_CACHE_LINE) uint32_t epoch;  /* futex of the workers: number of the job */
    uint32_t n_asleep;                         /* workers that may sleep on epoch */
    BT_ALIGNED(BT_CACHE_LINE) uint32_t n_left; /* futex of the caller: items not done */
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

/* Takes items until the current job has none left. */
static void work(struct kn_team *t, int member)
{
    uint64_t ticket = __atomic_load_n(&t->ticket, __ATOMIC_ACQUIRE); /* pairs with publish */

    for (;;) {
        struct job *j = &t->jobs[ticket >> 32 & 1];
        kn_team_fn fn = __atomic_load_n(&j->fn, __ATOMIC_RELAXED);
        void *arg = __atomic_load_n(&j->arg, __ATOMIC_RELAXED);
        int n_items = __atomic_load_n(&j->n_items, __ATOMIC_RELAXED);

        if ((int)(uint32_t)ticket >= n_items) {
            return;
        }
        if (!__atomic_compare_exchange_n(&t->ticket, &ticket, ticket + 1, false, __ATOMIC_ACQ_REL,
                                         __ATOMIC_ACQUIRE)) {
            continue;
        }
        fn(arg, (int)(uint32_t)ticket, member);
        /* Pairs with the caller's wait: what fn wrote is visible once n_left is 0. */
        if (__atomic_sub_fetch(&t->n_left, 1, __ATOMIC_SEQ_CST) == 0 &&
            __atomic_load_n(&t->caller_asleep, __ATOMIC_SEQ_CST)) {
            futex_wake(&t->n_left);
        }
        ticket = __atomic_load_n(&t->ticket, __ATOMIC_ACQUIRE);
    }
}

static void *worker_main(void *p)
{
    struct member *m = p;
    struct kn_team *t = m->team;
    uint32_t seen = 0;

    for (;;) {
        seen = wait_word(&t->epoch, seen, true, &t->n_asleep);
        if (__atomic_load_n(&t->stop, __ATOMIC_RELAXED)) {
            return NULL;
        }
        work(t, m->idx);
    }
}

/* Counts the epoch up and wakes who sleeps on it. */
static void call_workers(struct kn_team *t)
{
    __atomic_add_fetch(&t->epoch, 1, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&t->n_asleep, __ATOMIC_SEQ_CST)) {
        futex_wake(&t->epoch);
    }
}

static void publish(struct kn_team *t, int n_items, kn_team_fn fn, void *arg)
{
    uint64_t number = (__atomic_load_n(&t->ticket, __ATOMIC_RELAXED) >> 32) + 1;
    struct job *j = &t->jobs[number & 1];

    __atomic_store_n(&j->fn, fn, __ATOMIC_RELAXED);
    __atomic_store_n(&j->arg, arg, __ATOMIC_RELAXED);
    __atomic_store_n(&j->n_items, n_items, __ATOMIC_RELAXED);
    __atomic_store_n(&t->n_left, (uint32_t)n_items, __ATOMIC_RELAXED);
    __atomic_store_n(&t->ticket, number << 32, __ATOMIC_RELEASE);
    call_workers(t);
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
    __atomic_store_n(&t->stop, true, __ATOMIC_RELAXED);
    call_workers(t);
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
    publish(t, n_items, fn, arg);
    work(t, 0);
    wait_word(&t->n_left, 0, false, &t->caller_asleep);
}
