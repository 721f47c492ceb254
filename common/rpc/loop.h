/* Control loop: the one thread of a process that owns all service state.
 *
 * It polls one gRPC completion queue and runs timers and a mailbox. Every callback of server.h,
 * client.h and health.h, every timer and every message handler runs on the thread inside
 * bt_loop_run, one after the other, never nested: state touched only there needs no lock. Callbacks
 * must not block: while one runs, no peer is answered, not even a keep-alive ping.
 * See common/adr/0001-one-control-loop.md. */
#ifndef BT_RPC_LOOP_H
#define BT_RPC_LOOP_H

#include "common/base/rc.h"
#include "common/thr/mailbox.h"
#include "common/thr/time.h"

struct bt_loop;
struct bt_timer;

typedef void (*bt_timer_fn)(struct bt_loop *loop, struct bt_timer *timer);

/* One-shot timer, embedded in the object it serves; owner = loop thread. Fields are the loop's. */
struct bt_timer {
    uint64_t deadline_ns;
    uint64_t seq;          /* order of start; breaks ties of deadline_ns */
    struct bt_timer *prev; /* left sibling, or parent for a first child */
    struct bt_timer *next; /* right sibling */
    struct bt_timer *child;
    bool armed;
    bt_timer_fn fn;
};

/* The calling thread owns the loop until bt_loop_run moves the ownership to its caller.
 * Errors: BT_E_NOMEM. Starts gRPC's own threads on first use. */
int bt_loop_create(struct bt_loop **ret_loop, struct bt_err *err) BT_MUST_USE;
/* Refuses later posts, handles the messages that are left, waits for what gRPC still has in flight
 * and frees. Servers and channels of the loop must have been destroyed, timers are dropped without
 * running. No other thread may be inside bt_loop_post or bt_loop_stop. NULL is fine. */
void bt_loop_destroy(struct bt_loop *loop);

/* Runs until bt_loop_stop, then returns; may be called again. Loop thread only. */
void bt_loop_run(struct bt_loop *loop);
/* Makes bt_loop_run return after the callback that is running. Any thread; not in a signal
 * handler. A stop before the run counts: the next run returns at once. */
void bt_loop_stop(struct bt_loop *loop);
/* Lets the loop look for at most so long before it sleeps, as long as its waits are that short; an
 * idle loop sleeps. 0, as at the beginning: never. Loop thread. */
void bt_loop_spin(struct bt_loop *loop, uint64_t most_ns);
/* One step for owners that drive the loop themselves (tests, orderly exit): waits until
 * `deadline_ns` at most and runs what became due. False if nothing did. Not inside a callback. */
bool bt_loop_poll(struct bt_loop *loop, uint64_t deadline_ns);

/* Hands msg to the loop thread, which calls msg->handle(msg, loop) once. Messages of one thread
 * keep their order. Any thread, never blocks for long; about 15 us when the loop sleeps, a mutex
 * otherwise. False after bt_loop_destroy began: the message stays with the caller. */
bool bt_loop_post(struct bt_loop *loop, struct bt_msg *msg);

/* Time at which the callback that is running was entered (CLOCK_MONOTONIC). */
uint64_t bt_loop_now(const struct bt_loop *loop);
/* True on the thread that owns the loop. */
bool bt_loop_on_thread(const struct bt_loop *loop);

/* Timers. All loop thread only; none fails or allocates. A zeroed timer with `fn` set is ready.
 * start: fn runs once, at or after deadline_ns, about 1 ms late when the loop was asleep; never
 *   inside start, even if the deadline has passed. Starting an armed timer moves it. Timers with
 *   equal deadlines run in the order of their starts. BT_NEVER_NS = stop.
 * stop: fn does not run any more; a timer that is not armed is left alone.
 * The timer is disarmed before fn is called: fn may restart it or free the object around it. */
void bt_timer_start(struct bt_loop *loop, struct bt_timer *timer, uint64_t deadline_ns);
void bt_timer_stop(struct bt_loop *loop, struct bt_timer *timer);

#endif
