/* See worker.h. */
#include "common/thr/worker.h"

#include "common/base/buf.h"
#include "common/thr/thread.h"

#include <poll.h>
#include <stdlib.h>

struct bt_worker {
    struct bt_mailbox mailbox;
    void *consumer;
    pthread_t thread;
    int wake_fd;
    bool quit; /* atomic: set by stop before it wakes the thread */
};

static void *worker_main(void *p)
{
    struct bt_worker *w = p;
    struct pollfd fd = {w->wake_fd, POLLIN, 0};

    while (!__atomic_load_n(&w->quit, __ATOMIC_ACQUIRE)) { /* pairs with stop */
        if (poll(&fd, 1, -1) > 0) {
            bt_eventfd_clear(w->wake_fd);
            bt_mailbox_drain(&w->mailbox, w->consumer);
        }
    }
    bt_mailbox_drain(&w->mailbox, w->consumer);
    return NULL;
}

static void free_worker(struct bt_worker *w)
{
    bt_mailbox_fini(&w->mailbox);
    bt_close_fd(&w->wake_fd);
    free(w);
}

int bt_worker_start(const char *name,
                    void *consumer,
                    struct bt_worker **ret_worker,
                    struct bt_err *err)
{
    struct bt_worker *w = bt_calloc(1, sizeof(*w));
    int rc;

    if (!w) {
        return BT_FAIL(err, BT_E_NOMEM, "no memory for the thread %s", name);
    }
    w->consumer = consumer;
    rc = bt_eventfd_create(&w->wake_fd, err);
    if (rc < 0) {
        free(w);
        return rc;
    }
    bt_mailbox_init(&w->mailbox, bt_eventfd_wake, &w->wake_fd);
    rc = bt_thread_start(&w->thread, name, worker_main, w, err);
    if (rc < 0) {
        free_worker(w);
        return rc;
    }
    *ret_worker = w;
    return BT_OK;
}

void bt_worker_post(struct bt_worker *w, struct bt_msg *msg)
{
    bt_mailbox_push(&w->mailbox, msg); /* never closed */
}

void bt_worker_stop(struct bt_worker *w)
{
    if (!w) {
        return;
    }
    __atomic_store_n(&w->quit, true, __ATOMIC_RELEASE); /* pairs with worker_main */
    bt_eventfd_wake(&w->wake_fd);
    pthread_join(w->thread, NULL);
    free_worker(w);
}
