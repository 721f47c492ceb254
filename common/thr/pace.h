/* The pace of work that has time: a rest after every piece, three times as long as the piece took.
 * A low priority alone gives way to who wants the same processor; it leaves the processor beside
 * it, which shares its memory and often its core, to be slowed down for as long as the work lasts.
 * Any thread. */
#ifndef BT_THR_PACE_H
#define BT_THR_PACE_H

#include "common/base/base.h"
#include "common/thr/time.h"

#define BT_PACE_REST     3
#define BT_PACE_REST_MAX (20 * BT_NS_PER_MS)

/* Until when to rest from now on, after a piece that was begun at begun_ns; ns of time.h. */
static inline uint64_t bt_pace_until(uint64_t begun_ns)
{
    uint64_t now = bt_now_ns();

    return now + BT_MIN(BT_PACE_REST * (now - begun_ns), BT_PACE_REST_MAX);
}

#endif
