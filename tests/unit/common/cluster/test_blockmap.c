/* The block index against a real redis-server. Nodes that are to be killed are processes of their
 * own (this binary with BATON_TEST_NODE in its environment); the others are a registry and a
 * blockmap in this process. */
#include "common/cluster/blockmap.h"

#include "tests/unit/common/cluster/redis_fixture.h"

#include <inttypes.h>
#include <pthread.h>

static struct bt_cluster_conf conf = {
    .name = (char *)"test",
    .lease_ns = 900 * BT_NS_PER_MS,
    .poll_ns = 50 * BT_NS_PER_MS,
    .redis_address = address,
    .redis_user = (char *)"",
    .redis_password = (char *)"",
    .redis_timeout_ns = 300 * BT_NS_PER_MS,
    .lookup_timeout_ns = 50 * BT_NS_PER_MS,
    .block_ttl_ns = 600 * BT_NS_PER_S,
};

/* --- nodes ----------------------------------------------------------------------------------- */

/* A node, or with incarnation 0 somebody who only looks. Holds the blocks [0, n_held) of `salt`. */
struct peer {
    struct bt_registry *reg;
    struct bt_blockmap *bm;
    struct bt_member self;
    bool untold; /* has no `held`: what is announced by hand is not written again */
    uint32_t salt;
    pthread_mutex_t lock;
    size_t n_held;         /* under lock */
    struct bt_members *ms; /* under lock: the last snapshot */
    const char *watch;     /* under lock */
    bool lost;             /* under lock: somebody of `watch` was missing once */
};

static struct bt_block_key key_of(uint32_t salt, uint64_t i)
{
    struct bt_block_key k = {{0}};

    memcpy(k.b, &i, sizeof(i));
    memcpy(k.b + 8, &salt, sizeof(salt));
    k.b[15] = 0xbb;
    return k;
}

static struct bt_block_have have_of(uint32_t salt, uint64_t i)
{
    return (struct bt_block_have){key_of(salt, i), (uint32_t)(4096 + i), BT_TIER_HOST};
}

static size_t list_held(void *arg, uint64_t *cursor, struct bt_block_have *out, size_t max)
{
    struct peer *p = arg;
    size_t n = 0;

    pthread_mutex_lock(&p->lock);
    while (n < max && *cursor < p->n_held) {
        out[n++] = have_of(p->salt, (*cursor)++);
    }
    if (*cursor >= p->n_held) {
        *cursor = 0;
    }
    pthread_mutex_unlock(&p->lock);
    return n;
}

static void hold(struct peer *p, size_t n)
{
    pthread_mutex_lock(&p->lock);
    p->n_held = n;
    pthread_mutex_unlock(&p->lock);
}

static void changed(void *arg, struct bt_members *take_members)
{
    struct peer *p = arg;

    bt_blockmap_set_members(p->bm, take_members);
    pthread_mutex_lock(&p->lock);
    bt_members_unref(p->ms);
    p->ms = take_members;
    if (p->watch && !bt_members_find(p->ms, bt_str_of(p->watch))) {
        p->lost = true;
    }
    pthread_mutex_unlock(&p->lock);
}

static void peer_start(struct peer *p, const char *name, uint64_t incarnation)
{
    struct bt_blockmap_cfg bc = {.conf = &conf, .arg = p};
    struct bt_registry_cfg rc = {.conf = &conf, .changed = changed, .arg = p};
    struct bt_err err;

    pthread_mutex_init(&p->lock, NULL);
    if (incarnation) {
        p->self = (struct bt_member){.incarnation = incarnation, .role = BT_ROLE_KVSTORE};
        snprintf(p->self.name, sizeof(p->self.name), "%s", name);
        snprintf(p->self.grpc_addr, sizeof(p->self.grpc_addr), "127.0.0.1:%d", 1000 + name[0]);
        bc.name = name;
        bc.incarnation = incarnation;
        bc.held = p->untold ? NULL : list_held;
        rc.self = &p->self;
    }
    assert_int_equal(bt_blockmap_create(&bc, &p->bm, &err), BT_OK);
    assert_int_equal(bt_registry_create(&rc, &p->reg, &err), BT_OK);
}

static void peer_stop(struct peer *p)
{
    bt_registry_destroy(p->reg);
    bt_blockmap_destroy(p->bm);
    bt_members_unref(p->ms);
    pthread_mutex_destroy(&p->lock);
}

static void watch_for_loss(struct peer *p, const char *name)
{
    pthread_mutex_lock(&p->lock);
    p->watch = name;
    p->lost = false;
    pthread_mutex_unlock(&p->lock);
}

static bool was_lost(struct peer *p)
{
    bool lost;

    pthread_mutex_lock(&p->lock);
    lost = p->lost;
    pthread_mutex_unlock(&p->lock);
    return lost;
}

/* A node as a process, until it is killed. */
static int node_process(const char *spec)
{
    static struct peer p;
    char name[64];
    unsigned long long incarnation;
    sigset_t set;
    int sig;

    if (sscanf(spec, "%63s %llu %zu %u %127s", name, &incarnation, &p.n_held, &p.salt, address) !=
        5) {
        return 1;
    }
    sigemptyset(&set);
    sigaddset(&set, SIGTERM);
    pthread_sigmask(SIG_BLOCK, &set, NULL);
    peer_start(&p, name, incarnation);
    sigwait(&set, &sig);
    peer_stop(&p);
    return 0;
}

static pid_t node_start(const char *name, uint64_t incarnation, size_t n_held, uint32_t salt)
{
    char spec[256];
    pid_t pid = fork();

    assert_true(pid >= 0);
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        snprintf(spec, sizeof(spec), "%s %llu %zu %u %s", name, (unsigned long long)incarnation,
                 n_held, salt, address);
        setenv("BATON_TEST_NODE", spec, 1);
        execl("/proc/self/exe", "test_blockmap", NULL);
        _exit(127);
    }
    return pid;
}

static int node_end(pid_t pid, int sig)
{
    int status = 0;

    kill(pid, sig);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
}

/* --- looking --------------------------------------------------------------------------------- */

/* Outcome of one look-up, copied out of the callback. */
struct outcome {
    pthread_mutex_t lock;
    unsigned n_calls;
    int rc;
    size_t n_with;    /* keys with a holder */
    uint32_t n_of[8]; /* holders of the first keys */
    char name[8][64]; /* of the first holder of each */
    uint64_t incarnation[8];
    uint32_t bytes[8];
    enum bt_tier tier[8];
    char second[64]; /* second holder of the first key */
    uint64_t total;  /* of all bytes */
};

static void note(void *arg, const struct bt_found *f)
{
    struct outcome *o = arg;

    pthread_mutex_lock(&o->lock);
    o->n_calls++;
    o->rc = f->rc;
    o->n_with = 0;
    for (size_t i = 0; i < f->n_keys; i++) {
        const struct bt_holder *h = &f->holders[f->first[i]];
        uint32_t n = f->first[i + 1] - f->first[i];

        o->n_with += n > 0;
        for (uint32_t j = 0; j < n; j++) {
            o->total += h[j].bytes;
        }
        if (i < 8) {
            o->n_of[i] = n;
        }
        if (i < 8 && n > 0) {
            snprintf(o->name[i], sizeof(o->name[i]), "%s", h->member->name);
            o->incarnation[i] = h->member->incarnation;
            o->bytes[i] = h->bytes;
            o->tier[i] = h->tier;
        }
        if (i == 0 && n > 1) {
            snprintf(o->second, sizeof(o->second), "%s", h[1].member->name);
        }
    }
    pthread_mutex_unlock(&o->lock);
}

static unsigned n_calls(struct outcome *o)
{
    unsigned n;

    pthread_mutex_lock(&o->lock);
    n = o->n_calls;
    pthread_mutex_unlock(&o->lock);
    return n;
}

static bool called(void *arg)
{
    return n_calls(arg) > 0;
}

/* Looks up and waits for the callback. */
static struct outcome look(struct peer *p, const struct bt_block_key *keys, size_t n)
{
    struct outcome o = {.lock = PTHREAD_MUTEX_INITIALIZER};
    struct bt_lookup_cb cb = {note, &o};

    assert_true(bt_blockmap_lookup(p->bm, keys, n, 0, &cb) != 0);
    assert_true(eventually(called, &o));
    assert_int_equal(o.n_calls, 1);
    return o;
}

static struct outcome look_one(struct peer *p, struct bt_block_key key)
{
    return look(p, &key, 1);
}

/* What should come to be seen of key `i` of `salt`. */
struct sight {
    struct peer *p;
    uint32_t salt;
    uint64_t i;
    const char *name; /* NULL: nobody holds it, and Redis has answered */
    uint64_t incarnation;
};

static bool in_sight(void *arg)
{
    const struct sight *s = arg;
    struct outcome o = look_one(s->p, key_of(s->salt, s->i));

    if (!s->name) {
        return o.rc == BT_OK && o.n_with == 0;
    }
    return o.n_with == 1 && strcmp(o.name[0], s->name) == 0 &&
           (!s->incarnation || o.incarnation[0] == s->incarnation);
}

static bool sees(struct peer *p, uint32_t salt, uint64_t i, const char *name, uint64_t incarnation)
{
    return eventually(in_sight, &(struct sight){p, salt, i, name, incarnation});
}

static bool sees_none(struct peer *p, uint32_t salt, uint64_t i)
{
    return eventually(in_sight, &(struct sight){p, salt, i, NULL, 0});
}

static bool is_synced(void *arg)
{
    return bt_blockmap_stats(((struct peer *)arg)->bm).synced;
}

static bool is_up(void *arg)
{
    return bt_blockmap_up(((struct peer *)arg)->bm);
}

static bool is_down(void *arg)
{
    struct peer *p = arg;

    look_one(p, key_of(0, 0));
    return !bt_blockmap_up(p->bm);
}

static bool put_is_up(void *arg)
{
    return bt_blockmap_stats(((struct peer *)arg)->bm).put_up;
}

static bool put_is_down(void *arg)
{
    return !put_is_up(arg);
}

static bool frozen(void *arg)
{
    struct peer *p = arg;
    bool yes;

    pthread_mutex_lock(&p->lock);
    yes = p->ms && p->ms->frozen;
    pthread_mutex_unlock(&p->lock);
    return yes;
}

struct all {
    struct peer *p;
    uint32_t salt;
    size_t n;
};

/* All n blocks of `salt` have a holder. */
static bool all_found(void *arg)
{
    const struct all *a = arg;
    static struct bt_block_key keys[1000];

    for (size_t i = 0; i < a->n;) {
        size_t n = 0;

        for (; n < 1000 && i < a->n; n++, i++) {
            keys[n] = key_of(a->salt, i);
        }
        if (look(a->p, keys, n).n_with != n) {
            return false;
        }
    }
    return true;
}

static bool sees_all(struct peer *p, uint32_t salt, size_t n)
{
    return eventually(all_found, &(struct all){p, salt, n});
}

/* --- tests ----------------------------------------------------------------------------------- */

static int setup(void **state)
{
    redis_start("");
    return 0;
}

static int teardown(void **state)
{
    redis_kill();
    return 0;
}

static void test_announce_lookup_withdraw(void **state)
{
    struct bt_block_have have[3] = {have_of(1, 0), have_of(1, 1), have_of(1, 2)};
    struct bt_block_key keys[4] = {key_of(1, 0), key_of(9, 9), key_of(1, 2), key_of(1, 0)};
    struct peer a = {.untold = true};
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
    struct peer a = {.untold = true}, b = {.untold = true};
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
    struct peer r = {0};
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
    struct peer a = {.salt = 3, .n_held = 10000}, r = {0};

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

/* A frozen server: one look-up waits for its deadline, the next ones not at all; whoever looks gets
 * an answer, always; nobody is dropped. */
static void test_TIER_05_redis_frozen(void **state)
{
    struct peer a = {.salt = 4, .n_held = 500};
    struct outcome o;
    uint64_t n_opened;

    peer_start(&a, "a", 100);
    assert_true(sees_all(&a, 4, 500));
    watch_for_loss(&a, "a");
    n_opened = bt_blockmap_stats(a.bm).n_opened;
    assert_true(eventually(is_up, &a));
    kill(redis_pid, SIGSTOP);
    o = look_one(&a, key_of(4, 0));
    assert_int_equal(o.rc, BT_E_DEADLINE);
    assert_false(bt_blockmap_up(a.bm));
    for (int i = 0; i < 2000; i++) {
        o = look_one(&a, key_of(4, 0));
        assert_true(o.n_with == 0 && o.rc == BT_E_UNAVAILABLE);
    }
    assert_int_equal(bt_blockmap_stats(a.bm).n_opened, n_opened + 1);
    assert_true(eventually(frozen, &a));
    /* held blocks change meanwhile; more announcements than the queue takes */
    hold(&a, 600);
    for (uint64_t i = 0; i < 70000; i++) {
        struct bt_block_have h = have_of(4, i % 600);

        bt_blockmap_announce(a.bm, &h, 1);
    }
    assert_true(bt_blockmap_stats(a.bm).n_overflows > 0);
    assert_true(eventually(put_is_down, &a));
    kill(redis_pid, SIGCONT);
    assert_true(sees_all(&a, 4, 600));
    assert_true(eventually(is_synced, &a));
    assert_false(was_lost(&a));
    peer_stop(&a);
}

static void test_TIER_05_redis_killed(void **state)
{
    struct peer a = {.salt = 4, .n_held = 500}, r = {0};

    peer_start(&a, "a", 100);
    peer_start(&r, NULL, 0);
    assert_true(sees_all(&r, 4, 500));
    watch_for_loss(&r, "a");
    redis_kill();
    assert_true(eventually(is_down, &r));
    assert_true(eventually(frozen, &r));
    for (int i = 0; i < 100; i++) {
        assert_int_equal(look_one(&r, key_of(4, 0)).rc, BT_E_UNAVAILABLE);
    }
    redis_start("");
    assert_true(sees_all(&r, 4, 500));
    assert_false(was_lost(&r));
    peer_stop(&r);
    peer_stop(&a);
}

static void test_absent_at_start(void **state)
{
    struct peer a = {.salt = 4, .n_held = 500};

    redis_kill();
    peer_start(&a, "a", 100);
    for (int i = 0; i < 100; i++) {
        assert_int_equal(look_one(&a, key_of(4, 0)).rc, BT_E_UNAVAILABLE);
    }
    assert_true(eventually(put_is_down, &a));
    redis_start("");
    assert_true(sees_all(&a, 4, 500));
    assert_true(eventually(put_is_up, &a));
    peer_stop(&a);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
#define T(fn) cmocka_unit_test_setup_teardown(fn, setup, teardown)
        T(test_announce_lookup_withdraw),
        T(test_several_holders_fastest_first),
        T(test_TIER_05_dead_owner_and_restart),
        T(test_emptied_10k_rebuilt),
        T(test_TIER_05_redis_frozen),
        T(test_TIER_05_redis_killed),
        T(test_absent_at_start),
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
