/* A thread that handles messages one after the other: for work that would hold up a loop. */
#ifndef BT_THR_WORKER_H
#define BT_THR_WORKER_H

#include "common/thr/mailbox.h"

struct bt_worker;

/* Starts a thread called `name` (15 characters at most); `consumer` (borrowed) is what handlers
 * get. BT_E_NOMEM, BT_E_SYS. */
int bt_worker_start(const char *name,
                    void *consumer,
                    struct bt_worker **ret_worker,
                    struct bt_err *err) BT_MUST_USE;
/* Any thread, until stop is called. The message's handler runs on the worker's thread. */
void bt_worker_post(struct bt_worker *w, struct bt_msg *msg);
/* Returns when all that was posted has been handled and the thread is gone. NULL is fine. */
void bt_worker_stop(struct bt_worker *w);

#endif
