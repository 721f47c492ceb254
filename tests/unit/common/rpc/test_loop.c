/* Timers, mailbox, waking from other threads, stop. */
#include "common/base/buf.h"
#include "common/rpc/loop.h"
#include "common/thr/thread.h"

#include "tests/unit/cmocka.h"

#include <stdio.h>
#include <stdlib.h>

#define N_TIMERS 2000

struct tick {
    struct bt_timer timer;
    uint64_t due_ns;
    bool early;
    int n_runs;
};

static struct tick *order[N_TIMERS];
static size_t n_order;

static void on_tick(struct bt_loop *loop, struct bt_timer *timer)
{
    struct tick *t = BT_CONTAINER_OF(timer, struct tick, timer);

    t->early = bt_now_ns() < t->due_ns;
    t->n_runs++;
    order[n_order++] = t;
}

static void stop_loop(struct bt_loop *loop, struct bt_timer *timer)
{
    bt_loop_stop(loop);
}

static void test_timers_run_in_order(void **state)
{
    static struct tick ticks[N_TIMERS];
    struct bt_timer end = {.fn = stop_loop};
    struct bt_loop *loop;
    uint64_t base = bt_now_ns();
    unsigned seed = 7;

    assert_int_equal(bt_loop_create(&loop, NULL), BT_OK);
    n_order = 0;
    for (size_t i = 0; i < N_TIMERS; i++) {
        ticks[i] = (struct tick){.timer.fn = on_tick};
        ticks[i].due_ns = base + (uint64_t)(rand_r(&seed) % 50) * BT_NS_PER_MS;
        bt_timer_start(loop, &ticks[i].timer, ticks[i].due_ns);
    }
    for (size_t i = 0; i < N_TIMERS; i += 3) { /* a third is stopped, a part of it moved */
        bt_timer_stop(loop, &ticks[i].timer);
        bt_timer_stop(loop, &ticks[i].timer);
        if (i % 2 == 0) {
            ticks[i].due_ns = base + 20 * BT_NS_PER_MS;
            bt_timer_start(loop, &ticks[i].timer, base + 70 * BT_NS_PER_MS);
            bt_timer_start(loop, &ticks[i].timer, ticks[i].due_ns);
        }
    }
    bt_timer_start(loop, &end, base + 60 * BT_NS_PER_MS);
    bt_loop_run(loop);
    for (size_t i = 0; i < N_TIMERS; i++) {
        assert_int_equal(ticks[i].n_runs, i % 3 != 0 || i % 2 == 0);
        assert_false(ticks[i].early);
        assert_false(ticks[i].timer.armed);
    }
    for (size_t i = 1; i < n_order; i++) { /* by deadline, then by order of start */
        assert_true(order[i - 1]->due_ns < order[i]->due_ns ||
                    (order[i - 1]->due_ns == order[i]->due_ns &&
                     order[i - 1]->timer.seq < order[i]->timer.seq));
    }
    bt_timer_start(loop, &end, BT_NEVER_NS);
    assert_false(end.armed);
    bt_loop_destroy(loop);
}

struct chain {
    struct bt_timer timer;
    int left;
    int n_posted_seen;
    struct bt_msg msg;
};

static void on_chain_msg(struct bt_msg *msg, void *consumer)
{
    struct chain *c = BT_CONTAINER_OF(msg, struct chain, msg);

    c->n_posted_seen++;
    bt_loop_stop(consumer);
}

static void on_chain(struct bt_loop *loop, struct bt_timer *timer)
{
    struct chain *c = BT_CONTAINER_OF(timer, struct chain, timer);

    c->left--;
    if (c->left == 1000) {
        bt_loop_post(loop, &c->msg);
    }
    bt_timer_start(loop, timer, 0); /* always due */
}

static void test_due_timers_do_not_starve_messages(void **state)
{
    struct chain c = {.timer.fn = on_chain, .left = 2000000, .msg.handle = on_chain_msg};
    struct bt_loop *loop;

    assert_int_equal(bt_loop_create(&loop, NULL), BT_OK);
    c.left = 1001;
    bt_timer_start(loop, &c.timer, 0);
    bt_loop_run(loop);
    assert_int_equal(c.n_posted_seen, 1);
    bt_timer_stop(loop, &c.timer);
    bt_loop_destroy(loop);
}

#define N_THREADS 4
#define N_MSGS    20000

struct counted {
    struct bt_msg msg;
    int thread, seq;
};

struct producer {
    pthread_t tid;
    struct bt_loop *loop;
    struct counted *msgs;
    int id;
    uint64_t pause_ns;
    bool refused; /* written by the thread, read after join */
};

static int next_seq[N_THREADS];
static int n_got;
static bool out_of_order;

static void on_counted(struct bt_msg *msg, void *consumer)
{
    struct counted *m = BT_CONTAINER_OF(msg, struct counted, msg);

    out_of_order |= m->seq != next_seq[m->thread];
    next_seq[m->thread] = m->seq + 1;
    if (++n_got == N_THREADS * N_MSGS) {
        bt_loop_stop(consumer);
    }
}

static void *produce(void *arg)
{
    struct producer *p = arg;

    for (int i = 0; i < N_MSGS; i++) {
        p->msgs[i] = (struct counted){.msg.handle = on_counted, .thread = p->id, .seq = i};
        p->refused |= !bt_loop_post(p->loop, &p->msgs[i].msg);
        if (i % 64 == p->id) { /* let the loop fall asleep now and then */
            nanosleep(&(struct timespec){.tv_nsec = 20000}, NULL);
        }
    }
    return NULL;
}

/* Every message arrives once and in its thread's order, whatever the loop is doing. */
static void test_posts_from_four_threads(void **state)
{
    struct producer p[N_THREADS] = {0};
    struct bt_loop *loop;

    assert_int_equal(bt_loop_create(&loop, NULL), BT_OK);
    n_got = 0;
    for (int i = 0; i < N_THREADS; i++) {
        next_seq[i] = 0;
        p[i].loop = loop;
        p[i].id = i;
        p[i].msgs = bt_calloc(N_MSGS, sizeof(*p[i].msgs));
        assert_non_null(p[i].msgs);
        assert_int_equal(bt_thread_start(&p[i].tid, "producer", produce, &p[i], NULL), BT_OK);
    }
    bt_loop_run(loop);
    for (int i = 0; i < N_THREADS; i++) {
        pthread_join(p[i].tid, NULL);
        assert_false(p[i].refused);
        assert_int_equal(next_seq[i], N_MSGS);
    }
    assert_false(out_of_order);
    assert_int_equal(n_got, N_THREADS * N_MSGS);
    bt_loop_destroy(loop);
    for (int i = 0; i < N_THREADS; i++) {
        free(p[i].msgs);
    }
}

struct ping {
    struct bt_msg msg;
    int n; /* written by the loop before it answers */
    pthread_mutex_t lock;
    pthread_cond_t cond;
    bool answered; /* under lock */
};

static void on_ping(struct bt_msg *msg, void *consumer)
{
    struct ping *p = BT_CONTAINER_OF(msg, struct ping, msg);

    p->n++;
    pthread_mutex_lock(&p->lock);
    p->answered = true;
    pthread_cond_signal(&p->cond);
    pthread_mutex_unlock(&p->lock);
}

static void *run_loop(void *arg)
{
    bt_loop_run(arg);
    return NULL;
}

static uint64_t cpu_ns(pthread_t tid)
{
    struct timespec ts;
    clockid_t clock;

    assert_int_equal(pthread_getcpuclockid(tid, &clock), 0);
    assert_int_equal(clock_gettime(clock, &ts), 0);
    return (uint64_t)ts.tv_sec * BT_NS_PER_S + (uint64_t)ts.tv_nsec;
}

/* One post at a time to a loop that sleeps, or looks for spin_ns before it does: each must wake it,
 * or this hangs. Then nothing comes: it must sleep. */
static void check_every_post_wakes(uint64_t spin_ns)
{
    const struct timespec quiet = {.tv_nsec = 200 * (long)BT_NS_PER_MS};
    uint64_t used;
    struct ping p = {
        .msg.handle = on_ping, .lock = PTHREAD_MUTEX_INITIALIZER, .cond = PTHREAD_COND_INITIALIZER};
    struct bt_loop *loop;
    pthread_t tid;

    assert_int_equal(bt_loop_create(&loop, NULL), BT_OK);
    bt_loop_spin(loop, spin_ns);
    assert_int_equal(bt_thread_start(&tid, "loop", run_loop, loop, NULL), BT_OK);
    for (int i = 1; i <= 3000; i++) {
        assert_true(bt_loop_post(loop, &p.msg));
        pthread_mutex_lock(&p.lock);
        while (!p.answered) {
            pthread_cond_wait(&p.cond, &p.lock);
        }
        p.answered = false;
        pthread_mutex_unlock(&p.lock);
        assert_int_equal(p.n, i);
    }
    used = cpu_ns(tid);
    nanosleep(&quiet, NULL);
    assert_true(cpu_ns(tid) - used < 100 * BT_NS_PER_MS);
    bt_loop_stop(loop);
    pthread_join(tid, NULL);
    bt_loop_destroy(loop);
}

static void test_every_post_wakes(void **state)
{
    check_every_post_wakes(0);
    check_every_post_wakes(100 * BT_NS_PER_US);
    check_every_post_wakes(BT_NS_PER_MS);
}

static void test_stop_before_run_and_leftover_mail(void **state)
{
    struct chain c = {.msg.handle = on_chain_msg};
    struct bt_loop *loop;

    assert_int_equal(bt_loop_create(&loop, NULL), BT_OK);
    assert_true(bt_loop_on_thread(loop));
    bt_loop_stop(loop);
    bt_loop_run(loop);
    assert_true(bt_loop_post(loop, &c.msg));
    bt_loop_destroy(loop); /* handles what is left */
    assert_int_equal(c.n_posted_seen, 1);
    bt_loop_destroy(NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_timers_run_in_order),
        cmocka_unit_test(test_due_timers_do_not_starve_messages),
        cmocka_unit_test(test_posts_from_four_threads),
        cmocka_unit_test(test_every_post_wakes),
        cmocka_unit_test(test_stop_before_run_and_leftover_mail),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
