/* The block index against a real redis-server: what is announced is found, what is dead or outdated
 * is not, what was lost comes back. */
#include "tests/unit/common/cluster/index_fixture.h"

static void test_announce_lookup_withdraw(void **state)
{
    struct bt_block_have have[3] = {have_of(1, 0), have_of(1, 1), have_of(1, 2)};
    struct bt_block_key keys[4] = {key_of(1, 0), key_of(9, 9), key_of(1, 2), key_of(1, 0)};
    static struct peer a = {.untold = true};
    struct outcome o;

    have[0].tier = BT_TIER_ENGINE;
    have[2].tier = BT_TIER_DISK;
    have[2].bytes = UINT32_MAX;
    peer_start(&a, "a", 100);
    bt_blockmap_announce(a.bm, have, 3);
    assert_true(sees(&a, 1, 2, "a", 100));
    o = look(&a, keys, 4);
    assert_int_equal(o.rc, BT_OK);
    assert_int_equal(o.n_with, 3);
    assert_true(o.n_of[0] == 1 && o.n_of[1] == 0 && o.n_of[2] == 1 && o.n_of[3] == 1);
    assert_true(o.tier[0] == BT_TIER_ENGINE && o.tier[2] == BT_TIER_DISK);
    assert_int_equal(o.bytes[0], 4096);
    assert_int_equal(o.bytes[2], UINT32_MAX);
    assert_true(o.incarnation[0] == 100 && strcmp(o.name[0], "a") == 0);
    /* the last word counts: another tier, then gone */
    have[0].tier = BT_TIER_DISK;
    bt_blockmap_withdraw(a.bm, keys, 1);
    bt_blockmap_announce(a.bm, have, 1);
    bt_blockmap_withdraw(a.bm, &keys[2], 1);
    assert_true(sees_none(&a, 1, 2));
    assert_int_equal(look_one(&a, keys[0]).tier[0], BT_TIER_DISK);
    peer_stop(&a);
}

static void test_several_holders_fastest_first(void **state)
{
    struct bt_block_have slow = have_of(1, 0), fast = have_of(1, 0);
    static struct peer a = {.untold = true}, b = {.untold = true};
    struct outcome o;

    slow.tier = BT_TIER_DISK;
    fast.tier = BT_TIER_ENGINE;
    peer_start(&a, "a", 100);
    peer_start(&b, "b", 100);
    bt_blockmap_announce(a.bm, &slow, 1);
    assert_true(sees(&b, 1, 0, "a", 0));
    bt_blockmap_announce(b.bm, &fast, 1);
    do {
        o = look_one(&a, key_of(1, 0));
    } while (o.n_of[0] < 2 && eventually(is_up, &a));
    assert_string_equal(o.name[0], "b");
    assert_string_equal(o.second, "a");
    bt_blockmap_withdraw(b.bm, &fast.key, 1);
    assert_true(sees(&a, 1, 0, "a", 100));
    peer_stop(&b);
    peer_stop(&a);
}

static void test_TIER_05_dead_owner_and_restart(void **state)
{
    static struct peer r = {0};
    pid_t a;

    peer_start(&r, NULL, 0);
    a = node_start("a", 100, 1000, 5);
    assert_true(sees_all(&r, 5, 1000));
    /* dead: nobody removes a thing, yet nothing names it once its lease is over */
    assert_int_equal(node_end(a, SIGKILL), 1000 + SIGKILL);
    assert_true(sees_none(&r, 5, 0));
    assert_true(sees_none(&r, 5, 999));
    /* back with its disk: the same blocks under the new incarnation; then a restart within the
     * lease */
    a = node_start("a", 101, 1000, 5);
    assert_true(sees_all(&r, 5, 1000));
    assert_true(sees(&r, 5, 0, "a", 101));
    node_end(a, SIGKILL);
    a = node_start("a", 102, 1000, 5);
    assert_true(sees(&r, 5, 999, "a", 102));
    assert_true(sees_all(&r, 5, 1000));
    /* Redis comes back empty */
    redis_kill();
    redis_start("");
    assert_true(sees_all(&r, 5, 1000));
    node_end(a, SIGTERM);
    assert_true(sees_none(&r, 5, 0));
    peer_stop(&r);
}

static void test_emptied_10k_rebuilt(void **state)
{
    static struct peer a = {.salt = 3, .n_held = 10000}, r = {0};

    peer_start(&a, "a", 100);
    peer_start(&r, NULL, 0);
    assert_true(sees_all(&r, 3, 10000));
    assert_true(eventually(is_synced, &a));
    assert_int_equal(bt_blockmap_stats(a.bm).n_held, 10000);
    watch_for_loss(&r, "a");
    for (int i = 0; i < 3; i++) {
        must("FLUSHALL");
        assert_true(sees_all(&r, 3, 10000));
    }
    assert_true(eventually(is_synced, &a));
    assert_false(was_lost(&r));
    peer_stop(&r);
    peer_stop(&a);
}

/* --- who may write --------------------------------------------------------------------------- */

static bool is_refused(void *arg)
{
    return bt_blockmap_stats(((struct peer *)arg)->bm).refused;
}

static void test_overtaken_writes_nothing(void **state)
{
    struct bt_block_key first = key_of(6, 0);
    static struct peer old = {.salt = 6, .n_held = 50}, young = {.salt = 6, .n_held = 50}, r = {0};

    peer_start(&r, NULL, 0);
    peer_start(&old, "a", 100);
    assert_true(sees(&r, 6, 49, "a", 100));
    peer_start(&young, "a", 200);
    assert_true(sees(&r, 6, 0, "a", 200));
    assert_true(eventually(is_synced, &young));
    bt_blockmap_withdraw(old.bm, &first, 1);
    assert_true(eventually(is_refused, &old));
    assert_true(sees(&r, 6, 0, "a", 200));
    assert_true(sees(&r, 6, 49, "a", 200));
    /* nor does it get its place back when the younger one is gone */
    peer_stop(&young);
    assert_true(sees_none(&r, 6, 0));
    must("FLUSHALL");
    peer_stop(&old);
    peer_stop(&r);
}

/* A successor whose clock is behind waits for the lease, then writes over what was left. */
static void test_clock_behind(void **state)
{
    static struct peer a = {.salt = 6, .n_held = 50}, r = {0};
    pid_t first = node_start("a", 200, 50, 6);

    peer_start(&r, NULL, 0);
    assert_true(sees(&r, 6, 0, "a", 200));
    node_end(first, SIGKILL);
    peer_start(&a, "a", 100);
    assert_true(sees(&r, 6, 0, "a", 100));
    assert_true(sees(&r, 6, 49, "a", 100));
    peer_stop(&a);
    peer_stop(&r);
}

/* --- what is outdated or wrong --------------------------------------------------------------- */

/* "<verb> <record of key> <rest>", the first line of the answer. */
static bool ask_of(const char *verb, struct bt_block_key key, const char *rest, char answer[64])
{
    char command[256], hex[33];

    for (int i = 0; i < 16; i++) {
        snprintf(hex + 2 * i, 3, "%02x", key.b[i]);
    }
    snprintf(command, sizeof(command), "%s baton:{test}:block:%s %s", verb, hex, rest);
    return ask(command, answer, 64);
}

static void tell(const char *verb, struct bt_block_key key, const char *rest)
{
    char answer[64];

    assert_true(ask_of(verb, key, rest, answer));
    assert_true(answer[0] == ':' || answer[0] == '+');
}

/* The field is not there (any more). */
struct absent {
    struct peer *p;
    struct bt_block_key key;
    const char *name;
};

static bool is_absent(void *arg)
{
    const struct absent *a = arg;
    char answer[64];

    look_one(a->p, a->key);
    return ask_of("HEXISTS", a->key, a->name, answer) && strcmp(answer, ":0\r\n") == 0;
}

static bool is_gone(struct peer *p, struct bt_block_key key, const char *name)
{
    return eventually(is_absent, &(struct absent){p, key, name});
}

static void test_outdated_is_scrubbed(void **state)
{
    struct bt_block_have h = have_of(7, 3);
    static struct peer a = {.untold = true}, r = {0};

    peer_start(&a, "a", 0x100);
    peer_start(&r, NULL, 0);
    bt_blockmap_announce(a.bm, &h, 1);
    assert_true(sees(&r, 7, 3, "a", 0x100));
    /* an older incarnation of a member; over; a member's, but from the future: left alone */
    tell("HSET", key_of(7, 0), "a 00000000000000ff:1:10:ffffffff");
    tell("HSET", key_of(7, 1), "who 0000000000000100:1:10:1");
    tell("HSET", key_of(7, 2), "a 0000000000000101:1:10:ffffffff");
    tell("HSET", key_of(7, 4), "who 0000000000000100:1:10:ffffffff");
    assert_true(is_gone(&r, key_of(7, 0), "a"));
    assert_true(is_gone(&r, key_of(7, 1), "who"));
    assert_int_equal(look_one(&r, key_of(7, 2)).n_with, 0);
    assert_int_equal(look_one(&r, key_of(7, 4)).n_with, 0);
    /* a holder that says no: only what that incarnation wrote goes */
    bt_blockmap_disown(r.bm, &h.key, "a", 0xff);
    bt_blockmap_disown(r.bm, &(struct bt_block_key[]){key_of(7, 4)}[0], "who", 0x100);
    assert_true(is_gone(&r, key_of(7, 4), "who"));
    assert_true(sees(&r, 7, 3, "a", 0x100));
    assert_false(is_absent(&(struct absent){&r, key_of(7, 2), "a"}));
    bt_blockmap_disown(r.bm, &h.key, "a", 0x100);
    assert_true(is_gone(&r, h.key, "a"));
    peer_stop(&r);
    peer_stop(&a);
}

/* A reader that still knows the predecessor, whose number is larger since the successor's clock is
 * behind, must not remove what the successor writes: the fence says whose turn it is. */
static void test_fence_decides_what_is_outdated(void **state)
{
    static struct peer r;
    struct bt_blockmap_cfg bc = {.conf = &conf};
    struct bt_member before = {
        .name = "b", .incarnation = 0x200, .role = BT_ROLE_KVSTORE, .grpc_addr = "127.0.0.1:1"};
    struct bt_members *ms = bt_members_make(&before, 1, NULL, 0);

    assert_int_equal(bt_blockmap_create(&bc, &r.bm, NULL), BT_OK);
    bt_blockmap_set_members(r.bm, ms);
    bt_members_unref(ms);
    assert_true(eventually(is_up, &r));
    must("SET baton:{test}:fence:b 0000000000000100 PX 80000000");
    tell("HSET", key_of(7, 5), "b 0000000000000100:1:10:ffffffff");
    tell("HSET", key_of(7, 6), "b 00000000000000ff:1:10:ffffffff");
    assert_int_equal(look_one(&r, key_of(7, 5)).n_with, 0);
    assert_true(is_gone(&r, key_of(7, 6), "b"));
    assert_false(is_absent(&(struct absent){&r, key_of(7, 5), "b"}));
    bt_blockmap_destroy(r.bm);
}

static void test_hostile_records(void **state)
{
    static const char *const bad[] = {
        "a \"\"",
        "a x",
        "a 0000000000000100",
        "a 0000000000000100:1:10",
        "a 0000000000000100:1:10:",
        "a 0000000000000100:1:10:xyz",
        "a 00000000000001000:1:10:ffffffff",
        "a 0000000000000000:1:10:ffffffff",
        "a 0000000000000100:1:fffffffff:ffffffff",
        "a 0000000000000100:1:10:11111111111111111",
        "a 0000000000000100:9:10:ffffffff",
        "\"\" 0000000000000100:1:10:ffffffff",
        "\"a\\x00\" 0000000000000100:1:10:ffffffff",
        ("a 0000000000000100:1:10:ffffffff:"
         "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa")};
    static struct peer a = {.salt = 8, .n_held = 3};
    char many[128];

    hold(&a, 0);
    peer_start(&a, "a", 0x100);
    assert_true(eventually(is_synced, &a));
    tell("HSET", key_of(8, 9), "a 0000000000000100:1:10:ffffffff:more:of:it");
    assert_true(sees(&a, 8, 9, "a", 0x100));
    for (size_t i = 0; i < BT_ARRAY_LEN(bad); i++) {
        tell("DEL", key_of(8, 0), "");
        tell("HSET", key_of(8, 0), bad[i]);
        assert_int_equal(look_one(&a, key_of(8, 0)).n_with, 0);
        assert_true(bt_blockmap_up(a.bm));
    }
    tell("DEL", key_of(8, 0), "");
    tell("SET", key_of(8, 0), "text");
    tell("LPUSH", key_of(8, 1), "text");
    for (int i = 0; i < 100; i++) { /* more names than anybody has nodes */
        snprintf(many, sizeof(many), "name%d 0000000000000100:0:10:ffffffff", i);
        tell("HSET", key_of(8, 2), many);
    }
    assert_int_equal(look_one(&a, key_of(8, 0)).n_with, 0);
    assert_int_equal(look_one(&a, key_of(8, 1)).n_with, 0);
    assert_int_equal(look_one(&a, key_of(8, 2)).n_with, 0);
    assert_true(bt_blockmap_stats(a.bm).n_bad > 10);
    /* announcing puts things right */
    hold(&a, 3);
    for (uint64_t i = 0; i < 3; i++) {
        struct bt_block_have h = have_of(8, i);

        bt_blockmap_announce(a.bm, &h, 1);
    }
    assert_true(sees_all(&a, 8, 3));
    peer_stop(&a);
}

/* Keys that are there for as long as they are renewed, and no longer. */
static bool written_often(void *arg)
{
    return bt_blockmap_stats(((struct peer *)arg)->bm).n_announced >= 9000;
}

static bool record_over(void *arg)
{
    char answer[64];

    return ask_of("EXISTS", key_of(9, 0), "", answer) && strcmp(answer, ":0\r\n") == 0;
}

static void test_entries_are_renewed(void **state)
{
    static struct peer a = {.salt = 9, .n_held = 1500}, r = {0};

    conf.block_ttl_ns = 2 * BT_NS_PER_S;
    peer_start(&a, "a", 100);
    peer_start(&r, NULL, 0);
    assert_true(sees_all(&r, 9, 1500));
    assert_true(eventually(written_often, &a));
    assert_true(sees_all(&r, 9, 1500));
    assert_int_equal(bt_blockmap_stats(a.bm).n_held, 1500);
    assert_false(record_over(NULL));
    peer_stop(&a);
    conf.block_ttl_ns = 600 * BT_NS_PER_S;
    assert_true(sees_none(&r, 9, 0));
    assert_true(eventually(record_over, NULL));
    peer_stop(&r);
}

static bool counted(void *arg)
{
    struct peer *p = arg;
    struct outcome o = {.lock = PTHREAD_MUTEX_INITIALIZER};
    struct bt_lookup_cb cb = {note, &o};

    assert_true(bt_blockmap_count(p->bm, 0, &cb) != 0);
    assert_true(eventually(called, &o));
    return o.n_of[0] == 2 && o.total == 1500 + 300;
}

static void test_count(void **state)
{
    static struct peer a = {.salt = 1, .n_held = 1500}, b = {.salt = 1, .n_held = 300}, r = {0};

    peer_start(&a, "a", 100);
    peer_start(&b, "b", 100);
    peer_start(&r, NULL, 0);
    assert_true(eventually(counted, &r));
    peer_stop(&r);
    peer_stop(&b);
    peer_stop(&a);
}

/* --- look-ups end once ----------------------------------------------------------------------- */

static void test_cancel_and_destroy(void **state)
{
    enum { N = 64 };
    static struct outcome o[3 * N];
    struct bt_block_key key = key_of(1, 0);
    static struct peer r = {0};
    uint64_t ids[N];

    for (int i = 0; i < 3 * N; i++) {
        o[i] = (struct outcome){.lock = PTHREAD_MUTEX_INITIALIZER};
    }
    peer_start(&r, NULL, 0);
    assert_true(eventually(is_up, &r));
    kill(redis_pid, SIGSTOP);
    for (int i = 0; i < N; i++) {
        struct bt_lookup_cb cb = {note, &o[i]};

        ids[i] = bt_blockmap_lookup(r.bm, &key, 1, 300 * BT_NS_PER_MS, &cb);
        assert_true(ids[i] != 0);
    }
    for (int i = 0; i < N; i++) {
        bt_blockmap_cancel(r.bm, ids[i]);
        bt_blockmap_cancel(r.bm, ids[i]);
    }
    for (int i = 0; i < N; i++) {
        assert_true(eventually(called, &o[i]));
        bt_blockmap_cancel(r.bm, ids[i]);
        assert_true(o[i].rc == BT_E_CANCELLED || o[i].rc == BT_E_UNAVAILABLE);
    }
    bt_blockmap_cancel(r.bm, 123456789);
    kill(redis_pid, SIGCONT);
    assert_true(eventually(is_up, &r));
    for (int i = N; i < 3 * N; i++) {
        struct bt_lookup_cb cb = {note, &o[i]};

        assert_true(bt_blockmap_lookup(r.bm, &key, 1, 0, &cb) != 0);
    }
    assert_true(bt_blockmap_lookup(r.bm, &key, 0, 0, &(struct bt_lookup_cb){note, o}) == 0);
    assert_true(bt_blockmap_lookup(r.bm, &key, BT_LOOKUP_KEYS_MAX + 1, 0,
                                   &(struct bt_lookup_cb){note, o}) == 0);
    peer_stop(&r);
    for (int i = 0; i < 3 * N; i++) {
        assert_int_equal(o[i].n_calls, 1);
    }
}

/* Blocks come and go while Redis is stopped and emptied; at the end the index says what is. */
struct churn {
    struct bt_blockmap *bm;
    pthread_mutex_t lock;
    bool held[1000];
    bool churned, stop; /* atomic: end churning, end asking */
    struct bt_blockmap *reader;
    uint64_t n_begun, n_ended; /* atomic */
};

static size_t list_churn(void *arg, uint64_t *cursor, struct bt_block_have *out, size_t max)
{
    struct churn *c = arg;
    size_t n = 0;

    pthread_mutex_lock(&c->lock);
    for (max = BT_MIN(max, (size_t)100); n < max && *cursor < 1000; (*cursor)++) {
        if (c->held[*cursor]) {
            out[n++] = have_of(2, *cursor);
        }
    }
    pthread_mutex_unlock(&c->lock);
    *cursor = *cursor < 1000 ? *cursor : 0;
    return n;
}

static void *churn_main(void *arg)
{
    struct churn *c = arg;
    unsigned seed = 1;

    for (int i = 0; !__atomic_load_n(&c->churned, __ATOMIC_RELAXED); i++) {
        uint64_t k = (uint64_t)rand_r(&seed) % 1000;
        struct bt_block_have h = have_of(2, k);
        bool now;

        pthread_mutex_lock(&c->lock);
        now = c->held[k] = !c->held[k];
        pthread_mutex_unlock(&c->lock);
        if (now) {
            bt_blockmap_announce(c->bm, &h, 1);
        } else {
            bt_blockmap_withdraw(c->bm, &h.key, 1);
        }
        if (i % 100 == 0) {
            poll(NULL, 0, 2);
        }
    }
    return NULL;
}

static void ended(void *arg, const struct bt_found *found)
{
    __atomic_fetch_add((uint64_t *)arg, 1, __ATOMIC_RELAXED);
}

static void *asking_main(void *arg)
{
    struct churn *c = arg;
    unsigned seed = 2;

    while (!__atomic_load_n(&c->stop, __ATOMIC_RELAXED)) {
        struct bt_block_key keys[16];
        struct bt_lookup_cb cb = {ended, &c->n_ended};
        uint64_t id;

        for (int i = 0; i < 16; i++) {
            keys[i] = key_of(2, (uint64_t)rand_r(&seed) % 1000);
        }
        id = bt_blockmap_lookup(c->reader, keys, 16, 0, &cb);
        __atomic_fetch_add(&c->n_begun, id != 0, __ATOMIC_RELAXED);
        if (rand_r(&seed) % 8 == 0) {
            bt_blockmap_cancel(c->reader, id);
        }
        poll(NULL, 0, 1);
    }
    return NULL;
}

struct truth {
    struct churn *c;
    struct peer *r;
};

static bool index_is_true(void *arg)
{
    static struct bt_block_key keys[1000];
    const struct truth *t = arg;

    for (uint64_t i = 0; i < 1000; i++) {
        struct outcome o = look_one(t->r, key_of(2, i));

        if (o.rc != BT_OK || (o.n_with == 1) != t->c->held[i]) {
            return false;
        }
        keys[i] = key_of(2, i);
    }
    return look(t->r, keys, 1000).rc == BT_OK;
}

static void test_churn(void **state)
{
    static struct churn c = {.lock = PTHREAD_MUTEX_INITIALIZER};
    static struct peer reg = {.untold = true}, r = {0};
    struct bt_blockmap_cfg bc = {
        .conf = &conf, .name = "a", .incarnation = 100, .held = list_churn, .arg = &c};
    pthread_t churner, asker[2];

    peer_start(&r, NULL, 0);
    assert_int_equal(bt_blockmap_create(&bc, &c.bm, NULL), BT_OK);
    peer_start(&reg, "a", 100); /* the membership that goes with it */
    c.reader = r.bm;
    assert_int_equal(pthread_create(&churner, NULL, churn_main, &c), 0);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(pthread_create(&asker[i], NULL, asking_main, &c), 0);
    }
    for (int i = 0; i < 4; i++) {
        poll(NULL, 0, 100);
        must("FLUSHALL");
        poll(NULL, 0, 100);
        kill(redis_pid, SIGSTOP);
        poll(NULL, 0, i % 2 ? 20 : 400); /* fewer changes than the queue takes */
        kill(redis_pid, SIGCONT);
    }
    /* the last changes are made while it is away: nothing later puts them right */
    kill(redis_pid, SIGSTOP);
    poll(NULL, 0, 100);
    __atomic_store_n(&c.churned, true, __ATOMIC_RELAXED);
    pthread_join(churner, NULL);
    assert_true(eventually(put_is_down, &(struct peer){.bm = c.bm}));
    kill(redis_pid, SIGCONT);
    assert_true(eventually(index_is_true, &(struct truth){&c, &r}));
    assert_int_equal(bt_blockmap_stats(c.bm).n_overflows, 0);
    __atomic_store_n(&c.stop, true, __ATOMIC_RELAXED);
    for (int i = 0; i < 2; i++) {
        pthread_join(asker[i], NULL);
    }
    peer_stop(&reg);
    bt_blockmap_destroy(c.bm);
    peer_stop(&r);
    assert_true(c.n_begun > 100);
    assert_int_equal(c.n_begun, c.n_ended);
}

static void test_no_redis(void **state)
{
    struct bt_block_have h = have_of(1, 0);
    static struct peer a = {.salt = 1, .n_held = 1};
    char saved = address[0];

    address[0] = '\0';
    peer_start(&a, "a", 100);
    bt_blockmap_announce(a.bm, &h, 1);
    assert_int_equal(look_one(&a, h.key).rc, BT_E_UNAVAILABLE);
    peer_stop(&a);
    address[0] = saved;
}

static void test_bad_arguments(void **state)
{
    struct bt_blockmap_cfg cfg = {.conf = &conf, .name = "bad name", .incarnation = 1};
    struct bt_blockmap *bm;
    struct bt_err err;

    assert_int_equal(bt_blockmap_create(&cfg, &bm, &err), BT_E_INVALID);
    cfg.name = "a";
    cfg.incarnation = 0;
    assert_int_equal(bt_blockmap_create(&cfg, &bm, &err), BT_E_INVALID);
    conf.block_ttl_ns = 0;
    cfg.incarnation = 1;
    assert_int_equal(bt_blockmap_create(&cfg, &bm, &err), BT_E_CONFIG);
    conf.block_ttl_ns = 600 * BT_NS_PER_S;
    bt_blockmap_destroy(NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
#define T(fn) cmocka_unit_test_setup_teardown(fn, setup, teardown)
        T(test_announce_lookup_withdraw),
        T(test_several_holders_fastest_first),
        T(test_TIER_05_dead_owner_and_restart),
        T(test_emptied_10k_rebuilt),
        T(test_overtaken_writes_nothing),
        T(test_clock_behind),
        T(test_outdated_is_scrubbed),
        T(test_fence_decides_what_is_outdated),
        T(test_hostile_records),
        T(test_entries_are_renewed),
        T(test_count),
        T(test_cancel_and_destroy),
        T(test_churn),
        cmocka_unit_test(test_no_redis),
        cmocka_unit_test(test_bad_arguments),
#undef T
    };
    const char *spec = getenv("BATON_TEST_NODE");
    int rc;

    if (spec) {
        return node_process(spec);
    }
    if (!redis_prepare()) {
        return 77; /* skipped, for meson */
    }
    rc = cmocka_run_group_tests(tests, NULL, NULL);
    redis_cleanup();
    return rc;
}
