/* Mailbox: many producers, one consumer; the only way to hand work to another thread.
 *
 * A message is embedded in the object it speaks of. It belongs to the receiver once pushed. The
 * consumer detaches the whole list and handles it outside the lock. Waking is the consumer's
 * choice: `wake` is called (outside the lock, on the producer's thread) only when the box turns
 * from empty to non-empty. See common/adr/0002-mutex-mailbox.md. */
#ifndef BT_THR_MAILBOX_H
#define BT_THR_MAILBOX_H

#include "common/base/rc.h"
#include "common/ds/list.h"

#include <pthread.h>

struct bt_msg {
    struct bt_list link;
    /* Runs on the consumer's thread; may free the object that holds the message. */
    void (*handle)(struct bt_msg *msg, void *consumer);
};

struct bt_mailbox {
    pthread_mutex_t lock;
    struct bt_list msgs; /* struct bt_msg.link, guarded by lock */
    bool closed;         /* guarded by lock */
    int pushing;         /* threads inside push; atomic, released by them, acquired by close */
    void (*wake)(void *arg);
    void *wake_arg;
};

void bt_mailbox_init(struct bt_mailbox *mb, void (*wake)(void *arg), void *wake_arg);
/* Messages still inside stay with whoever made them; detach them first. */
void bt_mailbox_fini(struct bt_mailbox *mb);
/* Any thread, never fails while open. False after close: the message stays with the caller. */
bool bt_mailbox_push(struct bt_mailbox *mb, struct bt_msg *msg);
/* Consumer: moves all messages to `to` (an initialised list head); true if there were any. */
bool bt_mailbox_detach(struct bt_mailbox *mb, struct bt_list *to);
/* Consumer: detach and handle until empty; returns the number handled. */
size_t bt_mailbox_drain(struct bt_mailbox *mb, void *consumer);
/* Consumer: refuses every later push and waits until no thread is inside one: its wake-up included,
 * so that what `wake` uses may be freed. */
void bt_mailbox_close(struct bt_mailbox *mb);

/* A wake-up through an eventfd, for consumers that sleep in poll or epoll. */
int bt_eventfd_create(int *ret_fd, struct bt_err *err) BT_MUST_USE;
void bt_eventfd_wake(void *fd_ptr); /* int *; the `wake` of a mailbox */
void bt_eventfd_clear(int fd);

#endif
