/* Result codes, buffers, lists, maps, mailboxes. */
#include "common/base/buf.h"
#include "common/ds/list.h"
#include "common/ds/map.h"
#include "common/mem/mem.h"
#include "common/thr/mailbox.h"
#include "common/thr/thread.h"
#include "common/thr/worker.h"

#include "tests/unit/cmocka.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static void test_err(void **state)
{
    struct bt_err err;

    assert_int_equal(BT_FAIL(&err, BT_E_FORMAT, "bad %s\n", "file"), BT_E_FORMAT);
    assert_string_equal(err.msg, "bad file?");
    assert_int_equal(BT_FAIL(NULL, BT_E_FORMAT, "nobody listens"), BT_E_FORMAT);
    errno = ENOENT;
    assert_int_equal(BT_FAIL_SYS(&err, BT_E_IO, "open x"), BT_E_IO);
    assert_string_equal(err.msg, "open x: No such file or directory");
    assert_string_equal(bt_rc_name(BT_E_NOMEM), "E_NOMEM");
    assert_int_equal(bt_rc_grpc(BT_E_EXHAUSTED), 8);
    assert_int_equal(bt_rc_grpc(-99), 13);
}

static void test_buf(void **state)
{
    struct bt_buf b = {.max = 100};
    struct bt_ids ids = {0};

    assert_int_equal(bt_buf_add(&b, "hello", 5), BT_OK);
    assert_int_equal(bt_buf_printf(&b, " %d", 42), BT_OK);
    assert_true(bt_str_eq(bt_buf_str(&b), BT_STR("hello 42")));
    assert_int_equal(bt_buf_reserve(&b, SIZE_MAX), BT_E_TOO_LARGE);
    assert_int_equal(bt_buf_reserve(&b, 93), BT_E_TOO_LARGE);
    assert_true(bt_str_eq(bt_buf_str(&b), BT_STR("hello 42")));
    bt_buf_fini(&b);
    for (int i = 0; i < 1000; i++) {
        assert_int_equal(bt_ids_push(&ids, i), BT_OK);
    }
    assert_int_equal(ids.n, 1000);
    assert_int_equal(ids.p[999], 999);
    bt_ids_fini(&ids);
    assert_null(bt_calloc(SIZE_MAX, 2));
}

static void test_list(void **state)
{
    struct bt_list a, b, n[3];

    bt_list_init(&a);
    bt_list_init(&b);
    for (int i = 0; i < 3; i++) {
        bt_list_init(&n[i]);
        bt_list_push_back(&a, &n[i]);
    }
    bt_list_remove(&n[1]);
    bt_list_remove(&n[1]);
    bt_list_push_front(&b, &n[1]);
    bt_list_splice_back(&b, &a);
    assert_true(bt_list_empty(&a));
    assert_ptr_equal(bt_list_pop_front(&b), &n[1]);
    assert_ptr_equal(bt_list_pop_front(&b), &n[0]);
    assert_ptr_equal(bt_list_pop_front(&b), &n[2]);
    assert_null(bt_list_pop_front(&b));
}

/* Random puts and deletes against a plain array. */
static void test_map(void **state)
{
    enum { KEYS = 512 };
    static char *model[KEYS];
    struct bt_map m;
    unsigned seed = 1;
    size_t n = 0, pos = 0, seen = 0;

    bt_map_init(&m);
    assert_null(bt_map_get(&m, 1));
    for (int i = 0; i < 50000; i++) {
        uint64_t k = (uint64_t)rand_r(&seed) % KEYS;

        if (rand_r(&seed) % 2) {
            n += model[k] == NULL;
            model[k] = (char *)model + 1 + i;
            assert_int_equal(bt_map_put(&m, k, model[k]), BT_OK);
        } else {
            assert_ptr_equal(bt_map_del(&m, k), model[k]);
            n -= model[k] != NULL;
            model[k] = NULL;
        }
        assert_int_equal(m.n, n);
        k = (uint64_t)rand_r(&seed) % KEYS;
        assert_ptr_equal(bt_map_get(&m, k), model[k]);
    }
    while (bt_map_next(&m, &pos, NULL)) {
        seen++;
    }
    assert_int_equal(seen, n);
    bt_map_fini(&m);
}

struct note {
    struct bt_msg msg;
    int producer, seq;
};

enum { PRODUCERS = 4, NOTES = 5000 };

struct inbox {
    struct bt_mailbox mb;
    int efd;
    int last[PRODUCERS];
    int n, disorder;
};

static struct note notes[PRODUCERS][NOTES];
static struct inbox inbox;

static void on_note(struct bt_msg *msg, void *consumer)
{
    struct note *note = BT_CONTAINER_OF(msg, struct note, msg);
    struct inbox *in = consumer;

    in->disorder += note->seq != in->last[note->producer] + 1;
    in->last[note->producer] = note->seq;
    in->n++;
}

static void *produce(void *arg)
{
    int p = (int)(intptr_t)arg;

    for (int i = 0; i < NOTES; i++) {
        notes[p][i] = (struct note){.producer = p, .seq = i + 1};
        notes[p][i].msg.handle = on_note;
        bt_mailbox_push(&inbox.mb, &notes[p][i].msg);
    }
    return NULL;
}

/* Every message arrives once and in its producer's order; the sleeper is always woken. */
static void test_mailbox(void **state)
{
    pthread_t t[PRODUCERS];
    struct note late = {.msg.handle = on_note};

    assert_int_equal(bt_eventfd_create(&inbox.efd, NULL), BT_OK);
    bt_mailbox_init(&inbox.mb, bt_eventfd_wake, &inbox.efd);
    for (int i = 0; i < PRODUCERS; i++) {
        assert_int_equal(bt_thread_start(&t[i], "producer", produce, (void *)(intptr_t)i, NULL),
                         BT_OK);
    }
    while (inbox.n < PRODUCERS * NOTES) {
        fd_set set;
        struct timeval tv = {10, 0};

        FD_ZERO(&set);
        FD_SET(inbox.efd, &set);
        assert_int_equal(select(inbox.efd + 1, &set, NULL, NULL, &tv), 1);
        bt_eventfd_clear(inbox.efd);
        bt_mailbox_drain(&inbox.mb, &inbox);
    }
    for (int i = 0; i < PRODUCERS; i++) {
        pthread_join(t[i], NULL);
    }
    assert_int_equal(inbox.disorder, 0);
    bt_mailbox_close(&inbox.mb);
    assert_false(bt_mailbox_push(&inbox.mb, &late.msg));
    bt_mailbox_fini(&inbox.mb);
    close(inbox.efd);
}

static struct bt_worker *worker;

static void *post_all(void *arg)
{
    int p = (int)(intptr_t)arg;

    for (int i = 0; i < NOTES; i++) {
        notes[p][i] = (struct note){.producer = p, .seq = i + 1, .msg.handle = on_note};
        bt_worker_post(worker, &notes[p][i].msg);
    }
    return NULL;
}

/* The same on a worker's thread; what was posted before stop is handled before it returns. */
static void test_worker(void **state)
{
    pthread_t t[PRODUCERS];

    inbox = (struct inbox){0};
    assert_int_equal(bt_worker_start("worker", &inbox, &worker, NULL), BT_OK);
    for (int i = 0; i < PRODUCERS; i++) {
        assert_int_equal(bt_thread_start(&t[i], "producer", post_all, (void *)(intptr_t)i, NULL),
                         BT_OK);
    }
    for (int i = 0; i < PRODUCERS; i++) {
        pthread_join(t[i], NULL);
    }
    bt_worker_stop(worker);
    assert_int_equal(inbox.n, PRODUCERS * NOTES);
    assert_int_equal(inbox.disorder, 0);
    bt_worker_stop(NULL);
}

static void test_mem(void **state)
{
    struct bt_mem_region r;
    struct bt_err err;

    assert_int_equal(bt_mem_host.alloc(1000, "test", &r, &err), BT_OK);
    assert_true(r.bytes >= 1000 && r.fd >= 0);
    assert_int_equal(((char *)r.base)[999], 0);
    bt_mem_host.free(&r);
    assert_int_equal(bt_mem_host.alloc(0, "none", &r, &err), BT_E_INVALID);
    assert_int_equal(bt_mem_host.alloc(SIZE_MAX, "all", &r, &err), BT_E_INVALID);
    assert_true(bt_cpus_usable() >= 1);
}

/* What another process made, as a descriptor. */
static void test_mem_import(void **state)
{
    struct bt_mem_region a, b;
    struct bt_err err;
    int fd, fds[2];

    assert_int_equal(bt_mem_host.alloc(10000, "made", &a, &err), BT_OK);
    memset(a.base, 7, 10000);
    fd = dup(a.fd);
    assert_int_equal(bt_mem_host.import(fd, a.bytes + 1, "more", &b, &err), BT_E_INVALID);
    assert_int_equal(bt_mem_host.import(fd, 0, "none", &b, &err), BT_E_INVALID);
    assert_int_equal(bt_mem_host.import(-1, 10000, "nothing", &b, &err), BT_E_SYS);
    assert_int_equal(bt_mem_host.import(fd, 10000, "taken", &b, &err), BT_OK);
    assert_true(b.bytes == a.bytes && b.fd == fd && b.ops == &bt_mem_host);
    bt_mem_host.free(&a);
    assert_int_equal(((char *)b.base)[9999], 7);
    bt_mem_host.free(&b);
    assert_int_equal(close(fd), -1); /* went with the region */
    assert_int_equal(pipe(fds), 0);
    assert_int_equal(bt_mem_host.import(fds[0], 1, "pipe", &b, &err), BT_E_INVALID);
    close(fds[0]);
    close(fds[1]);
    assert_null(bt_mem_private.import);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_err),     cmocka_unit_test(test_buf),
        cmocka_unit_test(test_list),    cmocka_unit_test(test_map),
        cmocka_unit_test(test_mailbox), cmocka_unit_test(test_worker),
        cmocka_unit_test(test_mem),     cmocka_unit_test(test_mem_import),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
