/* Control loop over one completion queue.
 *
 * Waking: another thread queues an empty batch on `waker`, a call on a lame channel that never does
 * anything else; core puts its tag into the queue at once. `wake_sent` keeps at most one such tag
 * outstanding. It is cleared before the mailbox is detached: a push that came too late for the
 * detach found the box empty and finds the flag cleared (the mailbox mutex orders the two), so it
 * queues a new tag.
 *
 * Core is initialised once and kept for the life of the process, with the lame channel as its
 * anchor: when the last channel or server goes, core 1.51 stops its timer threads on the caller's
 * thread, and now and then that waits for a timer seconds away (seen: 10 s, the handshake timeout).
 *
 * Spinning: a thread that sleeps is woken late, 30 us and more on a virtual machine, and waking it
 * costs the waker. So a loop that may spin looks for a while before it sleeps, but only when nearly
 * all of its last waits were shorter than that: `brisk` rises by one with each, falls by BRISK_LOSS
 * with each longer one, and a pause ends it. Bursts with pauses between them, as the steps of nodes
 * are, do not make a loop spin.
 *
 * Timers: an intrusive pairing heap (Fredman, Sedgewick, Sleator, Tarjan 1986), because starting
 * one must not allocate. */
#include "common/rpc/loop.h"

#include "common/base/buf.h"
#include "common/rpc/rpc_int.h"

#include <dlfcn.h>
#include <grpc/support/time.h>
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>

#define SLEEP_NS   (20 * BT_NS_PER_US)  /* a wait of this length was a sleep */
#define LATE_NS    (40 * BT_NS_PER_US)  /* of spinning, before what was put off is done */
#define CROWD_NS   (200 * BT_NS_PER_US) /* without the core, in a spin */
#define PAUSE_NS   BT_NS_PER_MS
#define BRISK      16 /* from here on a loop spins */
#define BRISK_MAX  24
#define BRISK_LOSS 3

struct bt_loop {
    struct bt_cq_tag wake_tag;
    grpc_completion_queue *cq;
    grpc_call *waker;
    pthread_t owner;
    struct bt_mailbox mailbox;
    int wake_sent; /* atomic: a wake tag is in the queue */
    int stop;      /* atomic: set by any thread, cleared by run */
    struct bt_timer *timers;
    uint64_t timer_seq;
    uint64_t now_ns;
    uint64_t spin_ns; /* longest spin; 0 = none */
    int brisk;
    struct bt_list late;
    uint64_t late_ns; /* since when there is something in it */
    size_t n_tags;    /* in flight, the wake tag not counted */
    size_t n_objects; /* servers and channels */
    bool in_callback;
    struct bt_rpc_arena arena;
};

static pthread_once_t core_once = PTHREAD_ONCE_INIT;
static grpc_channel *lame; /* written once, never destroyed */

/* Debian's abseil, on which core's locks stand, is built to look for deadlocks: every lock is
 * entered into a graph of all that are held, a tenth of what a request costs the router. Abseil has
 * a switch for it, in C++ alone; where it has another name nothing changes. */
static void quiet_locks(void)
{
    void (*set_mode)(int) = NULL;
    void *p = dlsym(RTLD_DEFAULT,
                    "_ZN4absl7debian329SetMutexDeadlockDetectionModeENS0_15OnDeadlockCycleE");

    static_assert(sizeof(p) == sizeof(set_mode), "POSIX");
    memcpy(&set_mode, &p, sizeof(p));
    if (set_mode) {
        set_mode(0); /* OnDeadlockCycle::kIgnore */
    }
}

static void core_init(void)
{
    bt_rpc_log_init();
    quiet_locks();
    grpc_init();
    lame = grpc_lame_client_channel_create("wake", GRPC_STATUS_UNAVAILABLE, "wake");
}

static void wake(void *arg)
{
    struct bt_loop *loop = arg;

    /* Pairs with the exchange in woken. */
    if (__atomic_exchange_n(&loop->wake_sent, 1, __ATOMIC_ACQ_REL) == 0) {
        BT_BUG_ON(grpc_call_start_batch(loop->waker, NULL, 0, &loop->wake_tag, NULL) !=
                  GRPC_CALL_OK);
    }
}

static void handle_mail(struct bt_loop *loop)
{
    struct bt_list batch, *it;

    bt_list_init(&batch);
    bt_mailbox_detach(&loop->mailbox, &batch);
    while ((it = bt_list_pop_front(&batch)) != NULL) {
        struct bt_msg *msg = BT_LIST_ENTRY(it, struct bt_msg, link);

        msg->handle(msg, loop);
    }
}

static void woken(struct bt_cq_tag *tag, bool ok)
{
    struct bt_loop *loop = BT_CONTAINER_OF(tag, struct bt_loop, wake_tag);

    /* Pairs with the exchange in wake: what was pushed before the wake is visible now. */
    __atomic_exchange_n(&loop->wake_sent, 0, __ATOMIC_ACQ_REL);
    handle_mail(loop);
}

static bool timer_before(const struct bt_timer *a, const struct bt_timer *b)
{
    return a->deadline_ns != b->deadline_ns ? a->deadline_ns < b->deadline_ns : a->seq < b->seq;
}

/* Joins two heaps; roots have no siblings and no parent. Either may be NULL. */
static struct bt_timer *heap_join(struct bt_timer *a, struct bt_timer *b)
{
    struct bt_timer *t;

    if (!a || !b) {
        return a ? a : b;
    }
    if (timer_before(b, a)) {
        t = a;
        a = b;
        b = t;
    }
    b->prev = a;
    b->next = a->child;
    if (a->child) {
        a->child->prev = b;
    }
    a->child = b;
    return a;
}

/* Two-pass joining of a sibling list. */
static struct bt_timer *heap_join_list(struct bt_timer *first)
{
    struct bt_timer *pairs = NULL, *root = NULL, *t;

    while (first) {
        struct bt_timer *a = first, *b = first->next;

        first = b ? b->next : NULL;
        a->prev = a->next = NULL;
        if (b) {
            b->prev = b->next = NULL;
        }
        t = heap_join(a, b);
        t->next = pairs;
        pairs = t;
    }
    while (pairs) {
        t = pairs;
        pairs = t->next;
        t->next = NULL;
        root = heap_join(root, t);
    }
    return root;
}

static void heap_remove(struct bt_loop *loop, struct bt_timer *t)
{
    struct bt_timer *rest = heap_join_list(t->child);

    if (t == loop->timers) {
        loop->timers = rest;
    } else {
        if (t->prev->child == t) {
            t->prev->child = t->next;
        } else {
            t->prev->next = t->next;
        }
        if (t->next) {
            t->next->prev = t->prev;
        }
        loop->timers = heap_join(loop->timers, rest);
    }
    t->prev = t->next = t->child = NULL;
    t->armed = false;
}

static bool run_timers(struct bt_loop *loop)
{
    struct bt_timer *t;
    uint64_t seq = loop->timer_seq; /* timers started by the ones that run wait for the next turn */
    bool any = false;

    loop->now_ns = bt_now_ns();
    while ((t = loop->timers) != NULL && t->deadline_ns <= loop->now_ns && t->seq < seq) {
        heap_remove(loop, t);
        t->fn(loop, t);
        any = true;
    }
    return any;
}

int bt_loop_create(struct bt_loop **ret_loop, struct bt_err *err)
{
    struct bt_loop *loop = bt_calloc(1, sizeof(*loop));
    gpr_timespec never = gpr_inf_future(GPR_CLOCK_MONOTONIC);

    if (!loop) {
        return BT_FAIL(err, BT_E_NOMEM, "control loop: out of memory");
    }
    pthread_once(&core_once, core_init);
    loop->wake_tag.fn = woken;
    loop->cq = grpc_completion_queue_create_for_next(NULL);
    loop->waker =
        grpc_channel_create_call(lame, NULL, GRPC_PROPAGATE_DEFAULTS, loop->cq,
                                 grpc_slice_from_static_string("/wake"), NULL, never, NULL);
    loop->owner = pthread_self();
    loop->now_ns = bt_now_ns();
    bt_list_init(&loop->late);
    bt_mailbox_init(&loop->mailbox, wake, loop);
    *ret_loop = loop;
    return BT_OK;
}

void bt_loop_destroy(struct bt_loop *loop)
{
    grpc_event ev;

    if (!loop) {
        return;
    }
    BT_BUG_ON(loop->in_callback);
    BT_BUG_ON(loop->n_objects != 0);
    loop->owner = pthread_self();
    bt_mailbox_close(&loop->mailbox);
    handle_mail(loop);
    while (loop->n_tags > 0 || __atomic_load_n(&loop->wake_sent, __ATOMIC_ACQUIRE)) {
        bt_loop_poll(loop, BT_NEVER_NS);
    }
    grpc_call_unref(loop->waker);
    grpc_completion_queue_shutdown(loop->cq);
    do {
        ev = grpc_completion_queue_next(loop->cq, gpr_inf_future(GPR_CLOCK_MONOTONIC), NULL);
    } while (ev.type != GRPC_QUEUE_SHUTDOWN);
    grpc_completion_queue_destroy(loop->cq);
    bt_mailbox_fini(&loop->mailbox);
    bt_rpc_arena_fini(&loop->arena);
    free(loop);
}

static void run_late(struct bt_loop *loop)
{
    struct bt_list *it;

    loop->in_callback = true;
    while ((it = bt_list_pop_front(&loop->late)) != NULL) {
        struct bt_late *late = BT_LIST_ENTRY(it, struct bt_late, link);

        late->fn(late);
    }
    loop->in_callback = false;
}

/* Looks without sleeping, for a while and not beyond the deadline. Whoever is to wake us may wait
 * for this core; and where others need it a sleeper comes back sooner than one that looks. */
static grpc_event spin(struct bt_loop *loop, uint64_t deadline_ns)
{
    const gpr_timespec at_once = bt_rpc_to_gpr(0);
    uint64_t begin = loop->now_ns, last = begin, now;
    grpc_event ev;

    for (;;) {
        ev = grpc_completion_queue_next(loop->cq, at_once, NULL);
        now = bt_now_ns();
        if (now - last >= CROWD_NS) {
            loop->brisk = 0;
        }
        if (ev.type != GRPC_QUEUE_TIMEOUT || now - begin >= loop->spin_ns || now >= deadline_ns ||
            now - last >= CROWD_NS) {
            return ev;
        }
        if (now - begin >= LATE_NS) {
            run_late(loop);
        }
        last = now;
        sched_yield();
    }
}

static void note_wait(struct bt_loop *loop, uint64_t waited_ns)
{
    if (waited_ns < SLEEP_NS) {
        return;
    }
    if (waited_ns < loop->spin_ns) {
        loop->brisk = BT_MIN(loop->brisk + 1, BRISK_MAX);
    } else {
        loop->brisk = waited_ns < PAUSE_NS ? BT_MAX(loop->brisk - BRISK_LOSS, 0) : 0;
    }
}

/* The next event, or none until the deadline. */
static grpc_event next_event(struct bt_loop *loop, uint64_t deadline_ns)
{
    uint64_t begin = loop->now_ns;
    bool waits = deadline_ns > begin;
    grpc_event ev = {.type = GRPC_QUEUE_TIMEOUT};

    if (!bt_list_empty(&loop->late) && begin - loop->late_ns >= LATE_NS) {
        run_late(loop); /* events that keep coming must not put it off for ever */
    }
    if (waits && loop->spin_ns > 0 && loop->brisk >= BRISK) {
        ev = spin(loop, deadline_ns);
    }
    if (ev.type == GRPC_QUEUE_TIMEOUT) {
        run_late(loop);
        if (loop->timers) { /* started by what was put off */
            deadline_ns = BT_MIN(deadline_ns, loop->timers->deadline_ns);
        }
        ev = grpc_completion_queue_next(loop->cq, bt_rpc_to_gpr(deadline_ns), NULL);
    }
    loop->now_ns = bt_now_ns();
    if (waits) {
        note_wait(loop, loop->now_ns - begin);
    }
    return ev;
}

bool bt_loop_poll(struct bt_loop *loop, uint64_t deadline_ns)
{
    struct bt_cq_tag *tag;
    grpc_event ev;
    bool any;

    BT_BUG_ON(loop->in_callback);
    loop->in_callback = true;
    any = run_timers(loop);
    loop->in_callback = false;
    if (any) {
        deadline_ns = 0; /* only look at what is there already */
    } else if (loop->timers) {
        deadline_ns = BT_MIN(deadline_ns, loop->timers->deadline_ns);
    }
    ev = next_event(loop, deadline_ns);
    loop->in_callback = true;
    if (ev.type == GRPC_OP_COMPLETE) {
        tag = ev.tag;
        if (tag != &loop->wake_tag) {
            loop->n_tags--;
        }
        tag->fn(tag, ev.success != 0);
        any = true;
    } else {
        any |= run_timers(loop);
    }
    loop->in_callback = false;
    return any;
}

void bt_loop_run(struct bt_loop *loop)
{
    loop->owner = pthread_self();
    /* Pairs with the store in bt_loop_stop. */
    while (!__atomic_exchange_n(&loop->stop, 0, __ATOMIC_ACQUIRE)) {
        bt_loop_poll(loop, BT_NEVER_NS);
    }
}

void bt_loop_stop(struct bt_loop *loop)
{
    __atomic_store_n(&loop->stop, 1, __ATOMIC_RELEASE); /* pairs with the exchange in run */
    wake(loop);
}

bool bt_loop_post(struct bt_loop *loop, struct bt_msg *msg)
{
    return bt_mailbox_push(&loop->mailbox, msg);
}

uint64_t bt_loop_now(const struct bt_loop *loop)
{
    return loop->now_ns;
}

void bt_loop_spin(struct bt_loop *loop, uint64_t most_ns)
{
    loop->spin_ns = most_ns;
}

void bt_loop_put_off(struct bt_loop *loop, struct bt_late *late)
{
    BT_DASSERT(bt_loop_on_thread(loop));
    bt_list_remove(&late->link);
    if (bt_list_empty(&loop->late)) {
        loop->late_ns = loop->now_ns;
    }
    bt_list_push_back(&loop->late, &late->link);
}

bool bt_loop_on_thread(const struct bt_loop *loop)
{
    return pthread_equal(loop->owner, pthread_self()) != 0;
}

void bt_timer_start(struct bt_loop *loop, struct bt_timer *timer, uint64_t deadline_ns)
{
    BT_DASSERT(bt_loop_on_thread(loop));
    bt_timer_stop(loop, timer);
    if (deadline_ns == BT_NEVER_NS) {
        return;
    }
    timer->deadline_ns = deadline_ns;
    timer->seq = loop->timer_seq++;
    timer->prev = timer->next = timer->child = NULL;
    timer->armed = true;
    loop->timers = heap_join(loop->timers, timer);
}

void bt_timer_stop(struct bt_loop *loop, struct bt_timer *timer)
{
    BT_DASSERT(bt_loop_on_thread(loop));
    if (timer->armed) {
        heap_remove(loop, timer);
    }
}

grpc_completion_queue *bt_loop_cq(struct bt_loop *loop)
{
    return loop->cq;
}

void bt_loop_expect(struct bt_loop *loop)
{
    loop->n_tags++;
}

void bt_loop_attach(struct bt_loop *loop)
{
    loop->n_objects++;
}

void bt_loop_detach(struct bt_loop *loop)
{
    loop->n_objects--;
}

struct bt_rpc_arena *bt_loop_arena(struct bt_loop *loop)
{
    return &loop->arena;
}

void bt_loop_batch(
    struct bt_loop *loop, grpc_call *call, const grpc_op *ops, size_t n_ops, struct bt_cq_tag *tag)
{
    BT_DASSERT(bt_loop_on_thread(loop));
    BT_BUG_ON(grpc_call_start_batch(call, ops, n_ops, tag, NULL) != GRPC_CALL_OK);
    loop->n_tags++;
}
