/* Monotonic time in nanoseconds; the only clock used for deadlines. Any thread. */
#ifndef BT_THR_TIME_H
#define BT_THR_TIME_H

#include <stdint.h>
#include <time.h>

#define BT_NS_PER_US 1000ull
#define BT_NS_PER_MS 1000000ull
#define BT_NS_PER_S  1000000000ull
#define BT_NEVER_NS  UINT64_MAX /* a deadline that never comes */

static inline uint64_t bt_now_ns(void)
{
    struct timespec ts;

    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (uint64_t)ts.tv_sec * BT_NS_PER_S + (uint64_t)ts.tv_nsec;
}

/* Deadline `delay_ns` from now, saturating at BT_NEVER_NS. */
static inline uint64_t bt_deadline_ns(uint64_t delay_ns)
{
    uint64_t now = bt_now_ns();

    return delay_ns >= BT_NEVER_NS - now ? BT_NEVER_NS : now + delay_ns;
}

#endif
