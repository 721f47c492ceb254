/* Operators' orders against a real redis-server that the test starts on a unix socket. */
#include "common/cluster/orders.h"

#include "tests/unit/common/cluster/redis_fixture.h"

#include <pthread.h>

static struct bt_cluster_conf conf = {
    .name = (char *)"test",
    .lease_ns = 900 * BT_NS_PER_MS,
    .poll_ns = 50 * BT_NS_PER_MS,
    .redis_address = address,
    .redis_user = (char *)"",
    .redis_password = (char *)"",
    .redis_timeout_ns = 300 * BT_NS_PER_MS,
};

/* One follower: the last list, the last answer. */
struct follower {
    struct bt_orders *o;
    pthread_mutex_t lock;
    struct bt_order_list *list;
    int n_placed, rc;
    bool told_before; /* the list had changed before the order was told to be placed */
    const char *want_key, *want_text;
};

static const char *text_of(struct follower *f, const char *key)
{
    for (size_t i = 0; f->list && i < f->list->n; i++) {
        if (strcmp(f->list->at[i].key, key) == 0) {
            return f->list->at[i].text;
        }
    }
    return NULL;
}

static void changed(void *arg, struct bt_order_list *take_list)
{
    struct follower *f = arg;

    pthread_mutex_lock(&f->lock);
    free(f->list);
    f->list = take_list;
    pthread_mutex_unlock(&f->lock);
}

static void placed(void *arg, void *token, int rc, const struct bt_err *err)
{
    struct follower *f = arg;

    pthread_mutex_lock(&f->lock);
    f->n_placed++;
    f->rc = rc;
    f->told_before = (text_of(f, token) != NULL);
    pthread_mutex_unlock(&f->lock);
}

static void follow(struct follower *f, const struct bt_cluster_conf *c)
{
    const struct bt_orders_cfg cfg = {.conf = c, .changed = changed, .placed = placed, .arg = f};
    struct bt_err err;

    memset(f, 0, sizeof(*f));
    pthread_mutex_init(&f->lock, NULL);
    assert_int_equal(bt_orders_create(&cfg, &f->o, &err), BT_OK);
}

static void unfollow(struct follower *f)
{
    bt_orders_destroy(f->o);
    free(f->list);
}

static bool is_placed(void *arg)
{
    struct follower *f = arg;
    bool yes;

    pthread_mutex_lock(&f->lock);
    yes = f->n_placed > 0;
    pthread_mutex_unlock(&f->lock);
    return yes;
}

static int order(struct follower *f, const char *key, const char *text)
{
    f->n_placed = 0;
    assert_int_equal(bt_orders_place(f->o, key, text, (void *)(uintptr_t)key), BT_OK);
    assert_true(eventually(is_placed, f));
    return f->rc;
}

static bool has_wanted(void *arg)
{
    struct follower *f = arg;
    const char *text;
    bool yes;

    pthread_mutex_lock(&f->lock);
    text = text_of(f, f->want_key);
    yes = f->want_text ? text && strcmp(text, f->want_text) == 0 : f->list && !text;
    pthread_mutex_unlock(&f->lock);
    return yes;
}

static bool sees(struct follower *f, const char *key, const char *text)
{
    f->want_key = key;
    f->want_text = text;
    return eventually(has_wanted, f);
}

/* --- tests ----------------------------------------------------------------------------------- */

static int setup(void **state)
{
    redis_launch(NULL);
    return 0;
}

static int teardown(void **state)
{
    redis_kill();
    return 0;
}

static void test_all_follow_and_a_late_one_too(void **state)
{
    struct follower a, b, c;

    follow(&a, &conf);
    follow(&b, &conf);
    assert_int_equal(order(&a, "cordon:decode-0", "1"), BT_OK);
    assert_true(a.told_before);
    assert_true(sees(&b, "cordon:decode-0", "1"));
    assert_int_equal(order(&b, "canary:decode", "10 0.2.0"), BT_OK);
    assert_true(sees(&a, "canary:decode", "10 0.2.0"));
    unfollow(&a);
    unfollow(&b);
    follow(&c, &conf); /* nobody was left to remember */
    assert_true(sees(&c, "cordon:decode-0", "1"));
    assert_true(sees(&c, "canary:decode", "10 0.2.0"));
    assert_int_equal(order(&c, "cordon:decode-0", NULL), BT_OK);
    assert_true(sees(&c, "cordon:decode-0", NULL));
    assert_true(sees(&c, "canary:decode", "10 0.2.0"));
    unfollow(&c);
}

static void test_an_emptied_redis_gets_them_back(void **state)
{
    struct follower a, b;

    must("SET baton:{test}:epoch first");
    follow(&a, &conf);
    assert_int_equal(order(&a, "cordon:p", "1"), BT_OK);
    must("FLUSHALL");
    must("SET baton:{test}:epoch second"); /* as whoever announces itself does */
    follow(&b, &conf);
    assert_true(sees(&b, "cordon:p", "1"));
    assert_int_equal(order(&b, "cordon:p", NULL), BT_OK); /* and no ghost comes back */
    assert_true(sees(&a, "cordon:p", NULL));
    assert_true(sees(&b, "cordon:p", NULL));
    unfollow(&a);
    unfollow(&b);
}

static void test_while_redis_is_away_orders_hold_and_none_is_taken(void **state)
{
    struct follower a;

    follow(&a, &conf);
    assert_int_equal(order(&a, "cordon:p", "1"), BT_OK);
    redis_kill();
    assert_int_equal(order(&a, "cordon:q", "1"), BT_E_UNAVAILABLE);
    assert_true(sees(&a, "cordon:p", "1"));
    assert_true(sees(&a, "cordon:q", NULL));
    redis_launch(NULL);
    a.rc = BT_E_UNAVAILABLE;
    for (int i = 0; a.rc == BT_E_UNAVAILABLE && i < 100; i++) {
        order(&a, "cordon:r", "1");
    }
    assert_int_equal(a.rc, BT_OK);
    assert_true(sees(&a, "cordon:r", "1"));
    unfollow(&a);
}

static void test_hostile_content(void **state)
{
    struct follower a;

    must("SET baton:{test}:orders text");
    follow(&a, &conf);
    assert_int_equal(order(&a, "cordon:p", "1"), BT_OK);
    must("HSET baton:{test}:orders \"bad key\" 1");
    must("HSET baton:{test}:orders bad \"two\\nlines\"");
    must("HSET baton:{test}:orders empty \"\"");
    assert_int_equal(order(&a, "cordon:q", "1"), BT_OK);
    assert_true(sees(&a, "cordon:q", "1"));
    assert_int_equal(a.list->n, 2);
    unfollow(&a);
}

static void test_too_many(void **state)
{
    struct follower a;
    char key[32];

    follow(&a, &conf);
    for (int i = 0; i < BT_ORDERS_MAX; i++) {
        char command[96];

        snprintf(command, sizeof(command), "HSET baton:{test}:orders cordon:n%d 1", i);
        must(command);
    }
    assert_int_equal(order(&a, "cordon:more", "1"), BT_E_EXHAUSTED);
    snprintf(key, sizeof(key), "cordon:n%d", 5);
    assert_int_equal(order(&a, key, "2"), BT_OK);
    unfollow(&a);
}

static void test_without_redis(void **state)
{
    struct bt_cluster_conf alone = conf;
    struct follower a;

    alone.redis_address = (char *)"";
    follow(&a, &alone);
    assert_false(bt_orders_kept(a.o));
    assert_int_equal(order(&a, "cordon:p", "1"), BT_OK);
    assert_true(a.told_before);
    assert_int_equal(order(&a, "cordon:p", "2"), BT_OK);
    assert_true(sees(&a, "cordon:p", "2"));
    assert_int_equal(a.list->n, 1);
    assert_int_equal(order(&a, "cordon:p", NULL), BT_OK);
    assert_true(sees(&a, "cordon:p", NULL));
    assert_int_equal(bt_orders_place(a.o, "", "1", NULL), BT_E_INVALID);
    assert_int_equal(bt_orders_place(a.o, "a b", "1", NULL), BT_E_INVALID);
    assert_int_equal(bt_orders_place(a.o, "a", "", NULL), BT_E_INVALID);
    assert_int_equal(bt_orders_place(a.o, "a", "\n", NULL), BT_E_INVALID);
    unfollow(&a);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
#define T(fn) cmocka_unit_test_setup_teardown(fn, setup, teardown)
        T(test_all_follow_and_a_late_one_too),
        T(test_an_emptied_redis_gets_them_back),
        T(test_while_redis_is_away_orders_hold_and_none_is_taken),
        T(test_hostile_content),
        T(test_too_many),
        cmocka_unit_test(test_without_redis),
#undef T
    };
    int rc;

    if (!redis_prepare()) {
        return 77; /* skipped, for meson */
    }
    rc = cmocka_run_group_tests(tests, NULL, NULL);
    redis_cleanup();
    return rc;
}
