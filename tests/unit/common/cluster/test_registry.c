/* Membership against a real redis-server that the test starts on a unix socket of its own; nodes
 * that are to be killed or stopped are processes of their own (this binary with BATON_TEST_NODE in
 * its environment). Every wait is for an event with a generous deadline. */
#include "common/cluster/registry.h"

#include "tests/unit/again.h"
#include "tests/unit/common/cluster/redis_fixture.h"

#include <pthread.h>

#define PASSWORD "open sesame"

/* --- nodes and readers ----------------------------------------------------------------------- */

static struct bt_cluster_conf conf = {
    .name = (char *)"test",
    .lease_ns = 900 * BT_NS_PER_MS,
    .poll_ns = 50 * BT_NS_PER_MS,
    .redis_address = address,
    .redis_user = (char *)"",
    .redis_password = (char *)"",
    .redis_timeout_ns = 300 * BT_NS_PER_MS,
};

static struct bt_member node(const char *name, uint64_t incarnation)
{
    struct bt_member m = {.incarnation = incarnation, .role = BT_ROLE_DECODE};

    snprintf(m.name, sizeof(m.name), "%s", name);
    snprintf(m.grpc_addr, sizeof(m.grpc_addr), "127.0.0.1:%d", 1000 + name[0]);
    memset(m.model, 7, sizeof(m.model));
    return m;
}

/* Follows a registry: the last snapshot, and whether anybody of `watch` was ever missing in one. */
struct watcher {
    struct bt_registry *reg;
    pthread_mutex_t lock;
    struct bt_members *ms;
    const char *watch;
    bool lost;
    bool fenced;
    unsigned n_calls;
};

static void changed(void *arg, struct bt_members *take_members)
{
    struct watcher *w = arg;

    pthread_mutex_lock(&w->lock);
    bt_members_unref(w->ms);
    w->ms = take_members;
    w->n_calls++;
    if (w->watch && !bt_members_find(w->ms, bt_str_of(w->watch))) {
        w->lost = true;
    }
    pthread_mutex_unlock(&w->lock);
}

static void fenced(void *arg)
{
    struct watcher *w = arg;

    pthread_mutex_lock(&w->lock);
    w->fenced = true;
    pthread_mutex_unlock(&w->lock);
}

static void watch_start(struct watcher *w, const struct bt_member *self)
{
    const struct bt_registry_cfg cfg = {
        .conf = &conf, .self = self, .changed = changed, .fenced = fenced, .arg = w};
    struct bt_err err;

    memset(w, 0, sizeof(*w));
    pthread_mutex_init(&w->lock, NULL);
    assert_int_equal(bt_registry_create(&cfg, &w->reg, &err), BT_OK);
}

static void watch_stop(struct watcher *w)
{
    bt_registry_destroy(w->reg);
    bt_members_unref(w->ms);
    pthread_mutex_destroy(&w->lock);
}

/* What a watcher should come to see: member `name` with `incarnation` (0: any; absent if !present)
 * and the frozen mark. */
struct sight {
    struct watcher *w;
    const char *name;
    bool present;
    uint64_t incarnation;
    bool frozen;
};

static bool in_sight(void *arg)
{
    const struct sight *s = arg;
    const struct bt_member *m;
    bool yes = false;

    pthread_mutex_lock(&s->w->lock);
    if (s->w->ms && s->w->ms->frozen == s->frozen) {
        m = bt_members_find(s->w->ms, bt_str_of(s->name));
        yes = s->present ? m && (!s->incarnation || m->incarnation == s->incarnation) : !m;
    }
    pthread_mutex_unlock(&s->w->lock);
    return yes;
}

static bool sees(struct watcher *w, const char *name, uint64_t incarnation)
{
    return eventually(in_sight, &(struct sight){w, name, true, incarnation, false});
}

static bool sees_gone(struct watcher *w, const char *name)
{
    return eventually(in_sight, &(struct sight){w, name, false, 0, false});
}

static bool sees_frozen(struct watcher *w, const char *name)
{
    return eventually(in_sight, &(struct sight){w, name, true, 0, true});
}

static bool is_fenced(void *arg)
{
    struct watcher *w = arg;
    bool yes;

    pthread_mutex_lock(&w->lock);
    yes = w->fenced;
    pthread_mutex_unlock(&w->lock);
    return yes;
}

static void watch_for_loss(struct watcher *w, const char *name)
{
    pthread_mutex_lock(&w->lock);
    w->watch = name;
    w->lost = false;
    pthread_mutex_unlock(&w->lock);
}

static bool was_lost(struct watcher *w)
{
    bool lost;

    pthread_mutex_lock(&w->lock);
    lost = w->lost;
    pthread_mutex_unlock(&w->lock);
    return lost;
}

struct goal {
    struct watcher *w;
    uint64_t n_polls, n_failures;
};

static bool goal_met(void *arg)
{
    const struct goal *g = arg;
    struct bt_registry_stats s = bt_registry_stats(g->w->reg);

    return s.n_polls >= g->n_polls && s.n_failures >= g->n_failures;
}

/* n more readings, or n more failures, have happened. */
static bool polled(struct watcher *w, uint64_t n)
{
    return eventually(goal_met, &(struct goal){w, bt_registry_stats(w->reg).n_polls + n, 0});
}

static bool failed(struct watcher *w, uint64_t n)
{
    return eventually(goal_met, &(struct goal){w, 0, bt_registry_stats(w->reg).n_failures + n});
}

/* A node as a process: announces itself until it is killed; SIGTERM: leaves cleanly. */
static int node_process(const char *spec)
{
    struct bt_registry_cfg cfg = {.conf = &conf};
    char name[64];
    unsigned long long incarnation;
    struct bt_registry *reg;
    struct bt_member self;
    struct bt_err err;
    sigset_t set;
    int sig;

    if (sscanf(spec, "%63s %llu %127s", name, &incarnation, address) != 3) {
        return 1;
    }
    self = node(name, incarnation);
    cfg.self = &self;
    sigemptyset(&set);
    sigaddset(&set, SIGTERM);
    pthread_sigmask(SIG_BLOCK, &set, NULL);
    if (bt_registry_create(&cfg, &reg, &err) < 0) {
        return 1;
    }
    sigwait(&set, &sig);
    bt_registry_destroy(reg);
    return 0;
}

static pid_t node_start(const char *name, uint64_t incarnation)
{
    char spec[256];
    pid_t pid = fork();

    assert_true(pid >= 0);
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        snprintf(spec, sizeof(spec), "%s %llu %s", name, (unsigned long long)incarnation, address);
        setenv("BATON_TEST_NODE", spec, 1);
        exec_again((const char *[]){"test_registry", NULL});
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

static void test_register_update_leave(void **state)
{
    struct bt_member self = node("a", 100), other = node("b", 100);
    const struct bt_member *seen;
    struct watcher w;
    pid_t pid;

    watch_start(&w, &self);
    assert_true(sees(&w, "a", 100));
    pid = node_start("b", 200);
    assert_true(sees(&w, "b", 200));
    pthread_mutex_lock(&w.lock);
    assert_int_equal(w.ms->n, 2);
    seen = bt_members_find(w.ms, BT_STR("a"));
    assert_true(bt_member_equal(seen, &self));
    pthread_mutex_unlock(&w.lock);
    /* an update is seen, one that changes identity is refused */
    assert_int_equal(bt_registry_update(w.reg, &other), BT_E_INVALID);
    self.draining = true;
    self.weight_epoch = 5;
    assert_int_equal(bt_registry_update(w.reg, &self), BT_OK);
    assert_true(polled(&w, 3));
    pthread_mutex_lock(&w.lock);
    seen = bt_members_find(w.ms, BT_STR("a"));
    assert_true(seen->draining && seen->weight_epoch == 5);
    pthread_mutex_unlock(&w.lock);
    assert_int_equal(node_end(pid, SIGTERM), 0); /* a clean leave */
    assert_true(sees_gone(&w, "b"));
    assert_true(sees(&w, "a", 100));
    watch_stop(&w);
}

/* A clean leave takes effect at once, not when the lease ends. */
static void test_leave_deletes(void **state)
{
    struct bt_member self = node("a", 100);
    struct watcher w;
    char answer[64];

    watch_start(&w, &self);
    assert_true(sees(&w, "a", 100));
    watch_stop(&w);
    assert_true(ask("EXISTS baton:{test}:node:a", answer, sizeof(answer)));
    assert_string_equal(answer, ":0\r\n");
    assert_true(ask("ZCARD baton:{test}:nodes", answer, sizeof(answer)));
    assert_string_equal(answer, ":0\r\n");
}

static void test_RTR_01_killed_and_stopped_nodes(void **state)
{
    struct watcher w;
    pid_t a = node_start("a", 100), b = node_start("b", 100);

    watch_start(&w, NULL);
    assert_true(sees(&w, "a", 100));
    assert_true(sees(&w, "b", 100));
    assert_int_equal(node_end(a, SIGKILL), 1000 + SIGKILL);
    kill(b, SIGSTOP);
    assert_true(sees_gone(&w, "a"));
    assert_true(sees_gone(&w, "b"));
    /* back under a new incarnation; the stopped one comes back as it was */
    a = node_start("a", 101);
    assert_true(sees(&w, "a", 101));
    kill(b, SIGCONT);
    assert_true(sees(&w, "b", 100));
    node_end(a, SIGKILL);
    node_end(b, SIGKILL);
    watch_stop(&w);
}

static void test_TIER_05_restart_within_lease(void **state)
{
    struct watcher w;
    pid_t a = node_start("a", 100);

    watch_start(&w, NULL);
    assert_true(sees(&w, "a", 100));
    watch_for_loss(&w, "a");
    node_end(a, SIGKILL);
    a = node_start("a", 101); /* at once, while the old lease still runs */
    assert_true(sees(&w, "a", 101));
    assert_false(was_lost(&w));
    node_end(a, SIGKILL);
    watch_stop(&w);
}

static void test_older_incarnation_is_fenced(void **state)
{
    struct bt_member old = node("a", 100);
    struct watcher w_old, w;
    pid_t newer;

    watch_start(&w, NULL);
    watch_start(&w_old, &old);
    assert_true(sees(&w, "a", 100));
    newer = node_start("a", 200);
    assert_true(sees(&w, "a", 200));
    assert_true(eventually(is_fenced, &w_old));
    assert_true(bt_registry_stats(w_old.reg).fenced);
    /* also when the newer one is gone: the old one never comes back, nor deletes what is not its */
    node_end(newer, SIGKILL);
    assert_true(sees_gone(&w, "a"));
    assert_true(polled(&w, 20));
    assert_true(sees_gone(&w, "a"));
    watch_stop(&w_old);
    watch_stop(&w);
}

/* Stopped, overtaken, the successor gone too: when it wakes up it finds itself fenced. */
static void test_sleeper_is_fenced(void **state)
{
    struct watcher w;
    pid_t old = node_start("a", 100), newer;

    watch_start(&w, NULL);
    assert_true(sees(&w, "a", 100));
    kill(old, SIGSTOP);
    newer = node_start("a", 200);
    assert_true(sees(&w, "a", 200));
    node_end(newer, SIGKILL);
    assert_true(sees_gone(&w, "a"));
    kill(old, SIGCONT);
    assert_true(polled(&w, 20));
    assert_true(sees_gone(&w, "a"));
    node_end(old, SIGKILL);
    watch_stop(&w);
}

/* A process whose clock is behind waits for the other's lease, then gets its place. */
static void test_clock_behind(void **state)
{
    struct watcher w;
    pid_t first = node_start("a", 200), second;

    watch_start(&w, NULL);
    assert_true(sees(&w, "a", 200));
    second = node_start("a", 100);
    assert_true(polled(&w, 10));
    assert_true(sees(&w, "a", 200));
    node_end(first, SIGKILL);
    assert_true(sees(&w, "a", 100));
    node_end(second, SIGKILL);
    watch_stop(&w);
}

static void test_flushall_drops_nobody(void **state)
{
    struct watcher w;
    pid_t a = node_start("a", 100), b = node_start("b", 100);

    watch_start(&w, NULL);
    assert_true(sees(&w, "a", 100) && sees(&w, "b", 100));
    watch_for_loss(&w, "a");
    for (int i = 0; i < 5; i++) {
        must("FLUSHALL");
        assert_true(polled(&w, 4));
    }
    assert_true(polled(&w, 40)); /* well past the grace */
    assert_false(was_lost(&w));
    /* but one who does not come back is dropped after the grace */
    node_end(b, SIGKILL);
    must("FLUSHALL");
    assert_true(sees_gone(&w, "b"));
    assert_false(was_lost(&w));
    node_end(a, SIGKILL);
    watch_stop(&w);
}

static void test_redis_killed_freezes_and_returns_empty(void **state)
{
    struct watcher w;
    pid_t a = node_start("a", 100), b = node_start("b", 100);

    watch_start(&w, NULL);
    assert_true(sees(&w, "a", 100) && sees(&w, "b", 100));
    watch_for_loss(&w, "a");
    redis_kill();
    assert_true(sees_frozen(&w, "a"));
    node_end(b, SIGKILL); /* unseen: membership is frozen */
    assert_true(failed(&w, 8));
    assert_true(sees_frozen(&w, "b"));
    redis_start("");
    assert_true(sees(&w, "a", 100));
    assert_true(sees_gone(&w, "b"));
    assert_false(was_lost(&w));
    node_end(a, SIGKILL);
    watch_stop(&w);
}

static void test_redis_stopped(void **state)
{
    struct watcher w;
    pid_t a = node_start("a", 100);

    watch_start(&w, NULL);
    assert_true(sees(&w, "a", 100));
    watch_for_loss(&w, "a");
    kill(redis_pid, SIGSTOP);
    assert_true(sees_frozen(&w, "a"));
    assert_true(failed(&w, 4)); /* longer than a lease: all leases are over when it wakes up */
    kill(redis_pid, SIGCONT);
    assert_true(sees(&w, "a", 100));
    assert_true(polled(&w, 40));
    assert_false(was_lost(&w));
    node_end(a, SIGKILL);
    watch_stop(&w);
}

static void test_absent_at_start(void **state)
{
    char *items[] = {(char *)"127.0.0.1:1000", (char *)"s@127.0.0.1:1097"};
    struct bt_member self = node("a", 100);
    struct watcher w;

    redis_kill();
    conf.seeds = (struct bt_conf_list){items, 2};
    watch_start(&w, &self);
    conf.seeds = (struct bt_conf_list){0};
    assert_true(sees_frozen(&w, "s"));
    assert_true(failed(&w, 3));
    redis_start("");
    assert_true(sees(&w, "a", 100));
    /* "s" has the address of "a": now that "a" is known, one member is left of both */
    assert_true(sees_gone(&w, "s"));
    pthread_mutex_lock(&w.lock);
    assert_int_equal(w.ms->n, 2);
    assert_true(w.ms->m[0].seed && w.ms->m[0].role == BT_ROLE_UNKNOWN);
    pthread_mutex_unlock(&w.lock);
    watch_stop(&w);
}

static void test_no_redis_seeds_alone(void **state)
{
    char *items[] = {(char *)"s@127.0.0.1:1000"};
    struct watcher w;
    char saved = address[0];

    address[0] = '\0';
    conf.seeds = (struct bt_conf_list){items, 1};
    watch_start(&w, NULL);
    conf.seeds = (struct bt_conf_list){0};
    assert_true(sees(&w, "s", 0)); /* not frozen: there is nothing to be away */
    assert_int_equal(w.n_calls, 1);
    watch_stop(&w);
    address[0] = saved;
}

static void test_hostile_content(void **state)
{
    struct watcher w;
    pid_t a;

    must("SET baton:{test}:node:junk garbage");
    must("ZADD baton:{test}:nodes 99999999999999 junk");
    must("LPUSH baton:{test}:node:list x");
    must("ZADD baton:{test}:nodes 99999999999999 list");
    must("ZADD baton:{test}:nodes 99999999999999 \"bad name\\n\"");
    must("ZADD baton:{test}:nodes 99999999999999 missing");
    must("SETRANGE baton:{test}:node:huge 50000000 x");
    must("ZADD baton:{test}:nodes 99999999999999 huge");
    /* a record that would lock out every incarnation of "a", for ever */
    must("SET baton:{test}:node:a incarnation=ffffffffffffffff");
    must("SET baton:{test}:fence:a ffffffffffffffff");
    must("LPUSH baton:{test}:epoch x");
    watch_start(&w, NULL);
    a = node_start("a", 100);
    assert_true(sees(&w, "a", 100));
    assert_true(polled(&w, 3));
    pthread_mutex_lock(&w.lock);
    assert_int_equal(w.ms->n, 1);
    pthread_mutex_unlock(&w.lock);
    assert_true(bt_registry_stats(w.reg).n_bad >= 4);
    /* the set of names replaced by another type: frozen, and healed by the next announcement */
    must("DEL baton:{test}:nodes");
    must("SET baton:{test}:nodes x");
    assert_true(failed(&w, 1));
    assert_true(sees(&w, "a", 100));
    node_end(a, SIGKILL);
    watch_stop(&w);
}

static void test_password(void **state)
{
    struct watcher w;
    struct bt_member self = node("a", 100);

    redis_kill();
    redis_start(PASSWORD);
    watch_start(&w, &self);
    assert_true(failed(&w, 2));
    assert_false(bt_registry_stats(w.reg).up);
    watch_stop(&w);
    conf.redis_password = (char *)"wrong";
    watch_start(&w, &self);
    assert_true(failed(&w, 2));
    watch_stop(&w);
    conf.redis_password = (char *)PASSWORD;
    watch_start(&w, &self);
    assert_true(sees(&w, "a", 100));
    watch_stop(&w);
    conf.redis_user = (char *)"default";
    watch_start(&w, &self);
    assert_true(sees(&w, "a", 100));
    watch_stop(&w);
    conf.redis_user = (char *)"";
    conf.redis_password = (char *)"";
}

/* A server that accepts and says nothing, or talks nonsense, holds nobody for longer than the
 * deadline and is left alone between tries. */
static void test_strange_server(void **state)
{
    static const char *const words[] = {"", "HTTP/1.1 400 Bad Request\r\n\r\n", "*-9999\r\n",
                                        "$999999999\r\nx", "+PONG\r\n"};
    struct sockaddr_un sa = {.sun_family = AF_UNIX};
    struct watcher w;

    redis_kill();
    for (size_t i = 0; i < BT_ARRAY_LEN(words); i++) {
        int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0), n = 0;
        uint64_t deadline = bt_deadline_ns(PATIENCE_NS);

        snprintf(sa.sun_path, sizeof(sa.sun_path), "%s", sock);
        unlink(sock);
        assert_int_equal(bind(fd, (struct sockaddr *)&sa, sizeof(sa)), 0);
        assert_int_equal(listen(fd, 8), 0);
        watch_start(&w, NULL);
        while (bt_registry_stats(w.reg).n_failures < 2 && bt_now_ns() < deadline) {
            int one;

            if (poll(&(struct pollfd){fd, POLLIN, 0}, 1, 20) <= 0) {
                continue;
            }
            one = accept(fd, NULL, NULL);
            (void)!write(one, words[i], strlen(words[i]));
            n++;
            if (n > 1) {
                close(one); /* the first connection stays open and silent */
            }
        }
        assert_true(bt_registry_stats(w.reg).n_failures >= 2);
        assert_int_equal(bt_registry_stats(w.reg).n_polls, 0);
        watch_stop(&w);
        close(fd);
    }
}

static void test_bad_arguments(void **state)
{
    char *items[] = {(char *)"nonsense"};
    struct bt_member self = node("a", 0);
    struct bt_registry_cfg cfg = {.conf = &conf, .self = &self};
    struct bt_registry *reg;
    struct bt_err err;

    assert_int_equal(bt_registry_create(&cfg, &reg, &err), BT_E_INVALID);
    assert_non_null(strstr(err.msg, "incarnation"));
    cfg.self = NULL;
    conf.seeds = (struct bt_conf_list){items, 1};
    assert_int_equal(bt_registry_create(&cfg, &reg, &err), BT_E_CONFIG);
    assert_non_null(strstr(err.msg, "nonsense"));
    conf.seeds = (struct bt_conf_list){0};
    conf.name = (char *)"a}b";
    assert_int_equal(bt_registry_create(&cfg, &reg, &err), BT_E_CONFIG);
    conf.name = (char *)"test";
    bt_registry_destroy(NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
#define T(fn) cmocka_unit_test_setup_teardown(fn, setup, teardown)
        T(test_register_update_leave),
        T(test_leave_deletes),
        T(test_RTR_01_killed_and_stopped_nodes),
        T(test_TIER_05_restart_within_lease),
        T(test_older_incarnation_is_fenced),
        T(test_sleeper_is_fenced),
        T(test_clock_behind),
        T(test_flushall_drops_nobody),
        T(test_redis_killed_freezes_and_returns_empty),
        T(test_redis_stopped),
        T(test_absent_at_start),
        T(test_hostile_content),
        T(test_password),
        T(test_strange_server),
        cmocka_unit_test(test_no_redis_seeds_alone),
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
