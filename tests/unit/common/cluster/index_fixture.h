/* For tests of the block index: nodes made of a registry and a blockmap, in this process or as
 * processes of their own (this binary with BATON_TEST_NODE in its environment), and look-ups that
 * wait for their callback. */
#ifndef BT_TESTS_INDEX_FIXTURE_H
#define BT_TESTS_INDEX_FIXTURE_H

#include "common/cluster/blockmap.h"

#include "tests/unit/again.h"
#include "tests/unit/common/cluster/redis_fixture.h"

#include <inttypes.h>
#include <pthread.h>

/* not every test binary uses all of it */
#pragma GCC diagnostic ignored "-Wunused-function"

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
    struct bt_cluster_conf conf; /* as `conf` was at the start */
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
    struct bt_blockmap_cfg bc = {.conf = &p->conf, .arg = p};
    struct bt_registry_cfg rc = {.conf = &p->conf, .changed = changed, .arg = p};
    struct bt_err err;

    pthread_mutex_init(&p->lock, NULL);
    p->conf = conf;
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
        exec_again((const char *[]){"test_blockmap", NULL});
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

#endif
