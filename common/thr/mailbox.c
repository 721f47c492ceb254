/* Mutex and list: one short critical section per push, one per batch on the consumer's side. */
#include "common/thr/mailbox.h"

#include <errno.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <unistd.h>

void bt_mailbox_init(struct bt_mailbox *mb, void (*wake)(void *arg), void *wake_arg)
{
    BT_BUG_ON(pthread_mutex_init(&mb->lock, NULL) != 0);
    bt_list_init(&mb->msgs);
    mb->closed = false;
    mb->pushing = 0;
    mb->wake = wake;
    mb->wake_arg = wake_arg;
}

void bt_mailbox_fini(struct bt_mailbox *mb)
{
    pthread_mutex_destroy(&mb->lock);
}

bool bt_mailbox_push(struct bt_mailbox *mb, struct bt_msg *msg)
{
    bool was_empty, open;

    __atomic_add_fetch(&mb->pushing, 1, __ATOMIC_RELAXED); /* ordered by the lock */
    pthread_mutex_lock(&mb->lock);
    open = !mb->closed;
    was_empty = bt_list_empty(&mb->msgs);
    if (open) {
        bt_list_push_back(&mb->msgs, &msg->link);
    }
    pthread_mutex_unlock(&mb->lock);
    if (open && was_empty && mb->wake) {
        mb->wake(mb->wake_arg);
    }
    __atomic_sub_fetch(&mb->pushing, 1, __ATOMIC_RELEASE); /* pairs with close */
    return open;
}

bool bt_mailbox_detach(struct bt_mailbox *mb, struct bt_list *to)
{
    bool any;

    pthread_mutex_lock(&mb->lock);
    any = !bt_list_empty(&mb->msgs);
    bt_list_splice_back(to, &mb->msgs);
    pthread_mutex_unlock(&mb->lock);
    return any;
}

size_t bt_mailbox_drain(struct bt_mailbox *mb, void *consumer)
{
    struct bt_list batch, *it;
    size_t n = 0;

    bt_list_init(&batch);
    while (bt_mailbox_detach(mb, &batch)) {
        while ((it = bt_list_pop_front(&batch)) != NULL) {
            struct bt_msg *msg = BT_LIST_ENTRY(it, struct bt_msg, link);

            msg->handle(msg, consumer);
            n++;
        }
    }
    return n;
}

void bt_mailbox_close(struct bt_mailbox *mb)
{
    pthread_mutex_lock(&mb->lock);
    mb->closed = true;
    pthread_mutex_unlock(&mb->lock);
    while (__atomic_load_n(&mb->pushing, __ATOMIC_ACQUIRE) > 0) {
        sched_yield();
    }
}

int bt_eventfd_create(int *ret_fd, struct bt_err *err)
{
    int fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);

    if (fd < 0) {
        return BT_FAIL_SYS(err, BT_E_SYS, "eventfd");
    }
    *ret_fd = fd;
    return BT_OK;
}

void bt_eventfd_wake(void *fd_ptr)
{
    const uint64_t one = 1;
    ssize_t n;

    do {
        n = write(*(int *)fd_ptr, &one, sizeof(one));
    } while (n < 0 && errno == EINTR);
}

void bt_eventfd_clear(int fd)
{
    uint64_t v;
    ssize_t n;

    do {
        n = read(fd, &v, sizeof(v));
    } while (n < 0 && errno == EINTR);
}
