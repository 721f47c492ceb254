/* Condition variables whose deadlines are those of time.h (the monotonic clock). Any thread. */
#ifndef BT_THR_COND_H
#define BT_THR_COND_H

#include "common/thr/time.h"

#include <pthread.h>
#include <stdbool.h>

static inline void bt_cond_init(pthread_cond_t *cond)
{
    pthread_condattr_t attr;

    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(cond, &attr);
    pthread_condattr_destroy(&attr);
}

/* Waits for a signal, at most until the deadline; `lock` is held, and given up meanwhile. False:
 * the time is over. As ever, what is waited for has to be looked at again. */
static inline bool bt_cond_until(pthread_cond_t *cond, pthread_mutex_t *lock, uint64_t deadline_ns)
{
    const struct timespec ts = {.tv_sec = (time_t)(deadline_ns / BT_NS_PER_S),
                                .tv_nsec = (long)(deadline_ns % BT_NS_PER_S)};

    if (deadline_ns == BT_NEVER_NS) {
        return pthread_cond_wait(cond, lock) == 0;
    }
    return pthread_cond_timedwait(cond, lock, &ts) == 0;
}

#endif
