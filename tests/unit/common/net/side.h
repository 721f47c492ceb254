/* Test kit: one side of a connection, with counters that the test's thread can wait for, and a way
 * to run a function on the net's own thread. */
#ifndef BT_TESTS_NET_SIDE_H
#define BT_TESTS_NET_SIDE_H

#include "common/net/net.h"
#include "common/thr/time.h"

#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <time.h>

static inline void side_nap(void)
{
    const struct timespec ts = {0, 1000000};

    nanosleep(&ts, NULL);
}

static inline uint64_t side_patience_ns(void)
{
    return (getenv("BATON_TEST_NET_SLOW") ? 200 : 20) * BT_NS_PER_S;
}

/* Naps; returns what counts of it as waiting: not the time for which the process was stopped. */
static inline uint64_t side_nap_counted(void)
{
    uint64_t start = bt_now_ns();

    side_nap();
    return BT_MIN(bt_now_ns() - start, 100 * BT_NS_PER_MS);
}

/* Waits up to 20 s for a condition, in a slow machine 200 s. */
#define EVENTUALLY(cond)                                                                           \
    ({                                                                                             \
        uint64_t ev_waited_ = 0;                                                                   \
        bool ev_ok_;                                                                               \
        while (!(ev_ok_ = (cond)) && ev_waited_ < side_patience_ns()) {                            \
            ev_waited_ += side_nap_counted();                                                      \
        }                                                                                          \
        ev_ok_;                                                                                    \
    })
#define LOAD(x) __atomic_load_n(&(x), __ATOMIC_ACQUIRE)
#define INC(x)  __atomic_add_fetch(&(x), 1, __ATOMIC_ACQ_REL)

struct side_call {
    struct bt_msg msg;
    void (*fn)(void *arg);
    void *arg;
    int done;
};

static inline void side_call_run(struct bt_msg *msg, void *consumer)
{
    struct side_call *c = BT_CONTAINER_OF(msg, struct side_call, msg);

    c->fn(c->arg);
    __atomic_store_n(&c->done, 1, __ATOMIC_RELEASE);
}

/* Runs fn(arg) on the thread of `net` and waits for it. */
static inline void side_on_net(struct bt_net *net, void (*fn)(void *arg), void *arg)
{
    struct side_call c = {.msg.handle = side_call_run, .fn = fn, .arg = arg};

    bt_list_init(&c.msg.link);
    BT_BUG_ON(!bt_net_post(net, &c.msg));
    while (!LOAD(c.done)) {
        side_nap();
    }
}

#endif
