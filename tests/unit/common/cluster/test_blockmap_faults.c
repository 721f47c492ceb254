/* The block index and membership while Redis is not itself: frozen, killed, loading, a replica,
 * full, closed to us. Look-ups are answered always, nobody is dropped, and all is well afterwards.
 */
#include "tests/unit/common/cluster/index_fixture.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/random.h>

/* A frozen server: one look-up waits for its deadline, the next ones not at all; whoever looks gets
 * an answer, always; nobody is dropped. */
static void test_TIER_05_redis_frozen(void **state)
{
    static struct peer a = {.salt = 4, .n_held = 500};
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
    /* held blocks change meanwhile, and more happens than the queue takes */
    hold(&a, 600);
    for (uint64_t i = 0; i < 70000; i++) {
        struct bt_block_key gone = key_of(99, i);
        struct bt_block_have h = have_of(4, i % 600);

        bt_blockmap_withdraw(a.bm, &gone, 1);
        if (i % 100 == 0) {
            bt_blockmap_announce(a.bm, &h, 1);
        }
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
    static struct peer a = {.salt = 4, .n_held = 500}, r = {0};

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
    static struct peer a = {.salt = 4, .n_held = 500};

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

/* Hard at work for a second: DEBUG SLEEP holds its only thread. */
static void test_redis_busy(void **state)
{
    static struct peer a = {.salt = 4, .n_held = 500};

    redis_kill();
    redis_launch((const char *const[]){"--enable-debug-command", "yes", NULL});
    peer_start(&a, "a", 100);
    assert_true(sees_all(&a, 4, 500));
    watch_for_loss(&a, "a");
    ask_and_go("DEBUG SLEEP 2");
    assert_true(eventually(is_down, &a));
    assert_true(eventually(frozen, &a));
    assert_true(sees_all(&a, 4, 500));
    assert_false(was_lost(&a));
    peer_stop(&a);
}

static bool says_loading(void *arg)
{
    char answer[64];

    return ask("GET x", answer, sizeof(answer)) && strncmp(answer, "-LOADING", 8) == 0;
}

static void test_redis_loading(void **state)
{
    static struct peer a = {.salt = 4, .n_held = 500};
    uint64_t n_loading = 0;
    char dump[128];

    redis_kill();
    redis_launch((const char *const[]){"--enable-debug-command", "yes", NULL});
    peer_start(&a, "a", 100);
    assert_true(sees_all(&a, 4, 500));
    watch_for_loss(&a, "a");
    must("DEBUG POPULATE 15000 filler 500");
    must("SAVE");
    redis_kill();
    redis_launch((const char *const[]){"--key-load-delay", "100",
                                       "--loading-process-events-interval-bytes", "1024", NULL});
    while (says_loading(NULL)) {
        struct outcome o = look_one(&a, key_of(4, 0));

        assert_true(o.rc == BT_E_UNAVAILABLE && o.n_with == 0);
        n_loading++;
    }
    assert_true(n_loading > 0);
    assert_true(sees_all(&a, 4, 500));
    assert_true(eventually(is_synced, &a));
    assert_false(was_lost(&a));
    snprintf(dump, sizeof(dump), "%s/dump.rdb", dir);
    unlink(dump);
    peer_stop(&a);
}

/* --- servers that refuse --------------------------------------------------------------------- */

/* What is logged, from log_begin to log_end: stderr goes to a file meanwhile. */
static int real_stderr = -1;
static char logged[1 << 16];

static void log_begin(void)
{
    char path[128];
    int fd;

    snprintf(path, sizeof(path), "%s/log", dir);
    fd = open(path, O_RDWR | O_CREAT | O_TRUNC | O_APPEND, 0600);
    unlink(path);
    real_stderr = dup(STDERR_FILENO);
    dup2(fd, STDERR_FILENO);
    close(fd);
}

static void log_end(void)
{
    ssize_t n = pread(STDERR_FILENO, logged, sizeof(logged) - 1, 0);

    dup2(real_stderr, STDERR_FILENO);
    close(real_stderr);
    logged[n > 0 ? n : 0] = '\0';
    (void)!write(STDERR_FILENO, logged, strlen(logged));
}

/* Lines with both texts. */
static unsigned n_logged(const char *event, const char *text)
{
    unsigned n = 0;

    for (char *line = logged, *end; (end = strchr(line, '\n')); line = end + 1) {
        char *a = strstr(line, event), *b = strstr(line, text);

        n += a && a < end && b && b < end;
    }
    return n;
}

struct refusal {
    struct peer *p;
    uint64_t n_failures;
};

static bool failed_more(void *arg)
{
    const struct refusal *r = arg;

    return bt_blockmap_stats(r->p->bm).n_failures >= r->n_failures &&
           bt_registry_stats(r->p->reg).n_failures >= 4;
}

/* `begin` makes the server refuse, `end` makes it serve again. Nobody is dropped meanwhile, by who
 * announces itself nor by who only reads; both say once what to do (`advice`), and neither hammers.
 */
static void refuse(const char *begin, const char *end, const char *advice)
{
    static struct peer a, r;
    uint64_t since, before, n;

    a = (struct peer){.salt = 4, .n_held = 500};
    r = (struct peer){0};
    peer_start(&a, "a", 100);
    peer_start(&r, NULL, 0);
    assert_true(sees_all(&r, 4, 500));
    assert_true(eventually(is_synced, &a));
    watch_for_loss(&a, "a");
    watch_for_loss(&r, "a");
    before = bt_blockmap_stats(a.bm).n_failures;
    log_begin();
    since = bt_now_ns();
    must(begin);
    assert_true(eventually(put_is_down, &a));
    assert_true(eventually(frozen, &a));
    assert_true(eventually(frozen, &r));
    hold(&a, 600);
    /* all leases are over by now */
    assert_true(eventually(failed_more, &(struct refusal){&a, before + 6}));
    assert_true(eventually(failed_more, &(struct refusal){&r, 0}));
    n = bt_blockmap_stats(a.bm).n_failures - before;
    /* two connections, pauses of 75 ms and more */
    assert_true(n <= 2 * ((bt_now_ns() - since) / (75 * BT_NS_PER_MS) + 3));
    must(end);
    log_end();
    assert_int_equal(n_logged("index_put_down", advice), 1);
    assert_int_equal(n_logged("redis_down", advice), 2); /* a and r */
    assert_true(sees_all(&r, 4, 600));
    assert_true(eventually(is_synced, &a));
    assert_false(was_lost(&a));
    assert_false(was_lost(&r));
    peer_stop(&r);
    peer_stop(&a);
}

static void test_TIER_05_read_only_replica(void **state)
{
    refuse("REPLICAOF 127.0.0.1 1", "REPLICAOF NO ONE", "point redis.address at the primary");
}

static void test_TIER_05_out_of_memory(void **state)
{
    refuse("CONFIG SET maxmemory 1", "CONFIG SET maxmemory 0", "raise its maxmemory");
}

static void test_TIER_05_replica_without_data(void **state)
{
    must("CONFIG SET replica-serve-stale-data no");
    refuse("REPLICAOF 127.0.0.1 1", "REPLICAOF NO ONE", "point redis.address at the primary");
}

static void test_too_few_replicas(void **state)
{
    refuse("CONFIG SET min-replicas-to-write 1", "CONFIG SET min-replicas-to-write 0",
           "min-replicas-to-write");
}

/* What is full or a replica still tells what it has. */
static void test_reading_goes_on_when_full(void **state)
{
    static struct peer a = {.salt = 4, .n_held = 500};

    peer_start(&a, "a", 100);
    assert_true(sees_all(&a, 4, 500));
    assert_true(eventually(is_synced, &a));
    must("CONFIG SET maxmemory 1");
    assert_true(eventually(put_is_down, &a));
    assert_true(sees_all(&a, 4, 500));
    peer_stop(&a);
}

/* The rights that README.md lists are enough; without one of them, or locked out, all waits. */
#define NODE_RIGHTS                                                                                \
    "resetkeys ~baton:{test}:* resetchannels -@all +ping +time +eval +get +set +setrange "         \
    "+getrange +del +type +ttl +pttl +expire +zadd +zrem +zremrangebyscore +zrevrange +hset "      \
    "+hdel +hget +hgetall"
#define READER_RIGHTS                                                                              \
    "resetkeys ~baton:{test}:* resetchannels -@all +ping +time +get +getrange +setrange "          \
    "+zrevrange "                                                                                  \
    "+eval +hget "                                                                                 \
    "+hdel +hgetall"

static void test_acl_user(void **state)
{
    static struct peer a = {.salt = 4, .n_held = 500}, r = {0};

    must("ACL SETUSER baton on >secret " NODE_RIGHTS);
    must("ACL SETUSER looker on >secret " READER_RIGHTS);
    conf.redis_password = (char *)"secret";
    conf.redis_user = (char *)"looker";
    peer_start(&r, NULL, 0);
    conf.redis_user = (char *)"baton";
    peer_start(&a, "a", 100);
    assert_true(sees_all(&a, 4, 500));
    assert_true(eventually(is_synced, &a));
    watch_for_loss(&a, "a");
    log_begin();
    must("ACL SETUSER baton -hgetall");
    assert_true(eventually(is_down, &a));
    must("ACL SETUSER baton +hgetall");
    assert_true(sees_all(&a, 4, 500));
    must("ACL SETUSER baton -eval");
    assert_true(eventually(frozen, &a));
    must("ACL SETUSER baton +eval");
    assert_true(eventually(put_is_up, &a));
    assert_true(sees_all(&a, 4, 500));
    must("ACL SETUSER baton off");
    must("CLIENT KILL USER baton");
    assert_true(eventually(is_down, &a));
    assert_true(eventually(frozen, &a));
    for (int i = 0; i < 10; i++) {
        assert_int_equal(look_one(&a, key_of(4, 0)).rc, BT_E_UNAVAILABLE);
    }
    must("ACL SETUSER baton on");
    assert_true(sees_all(&a, 4, 500));
    log_end();
    assert_true(n_logged("index_down", "redis.user lacks a right") > 0);
    assert_true(n_logged("redis_down", "redis.user lacks a right") > 0);
    assert_false(was_lost(&a));
    conf.redis_user = conf.redis_password = (char *)"";
    peer_stop(&a);
    peer_stop(&r);
}

static void test_wrong_password(void **state)
{
    static struct peer a = {.salt = 4, .n_held = 5};

    redis_kill();
    redis_start("right");
    log_begin();
    peer_start(&a, "a", 100); /* none given */
    assert_true(eventually(failed_more, &(struct refusal){&a, 4}));
    peer_stop(&a);
    log_end();
    assert_int_equal(n_logged("redis_down", "it wants redis.password"), 1);
    assert_int_equal(n_logged("index_down", "it wants redis.password"), 1);
    a = (struct peer){.salt = 4, .n_held = 5};
    conf.redis_password = (char *)"wrong";
    log_begin();
    peer_start(&a, "a", 100);
    assert_true(eventually(failed_more, &(struct refusal){&a, 4}));
    peer_stop(&a);
    log_end();
    assert_int_equal(n_logged("redis_down", "redis.password is wrong"), 1);
    assert_null(strstr(logged, "wrong\" ")); /* the password itself is not logged */
    a = (struct peer){.salt = 4, .n_held = 5};
    conf.redis_password = (char *)"right";
    peer_start(&a, "a", 100);
    assert_true(sees_all(&a, 4, 5));
    peer_stop(&a);
    conf.redis_password = (char *)"";
}

/* Free, and 10000 above too (a Redis cluster talks there), and below what the system gives to
 * connections. */
static int free_port(void)
{
    for (;;) {
        int ok = 0;
        uint16_t port = 0;

        assert_int_equal(getrandom(&port, sizeof(port), 0), sizeof(port));
        port = (uint16_t)(11000 + port % 10000);
        for (int i = 0; i < 2; i++) {
            struct sockaddr_in sa = {.sin_family = AF_INET,
                                     .sin_addr.s_addr = htonl(INADDR_LOOPBACK),
                                     .sin_port = htons((uint16_t)(port + i * 10000))};
            int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

            ok += bind(fd, (struct sockaddr *)&sa, sizeof(sa)) == 0;
            close(fd);
        }
        if (ok == 2) {
            return port;
        }
    }
}

static void run(const char *command)
{
    assert_int_equal(system(command), 0);
}

/* --- Redis cluster --------------------------------------------------------------------------- */

static bool says_moved(void *arg)
{
    char answer[64];

    return ask("GET baton:{test}:x", answer, sizeof(answer)) && strncmp(answer, "-MOVED", 6) == 0;
}

/* A node without slots, and one whose slots another one has; then one that has all: every key of
 * one cluster.name is in one slot. */
static void test_redis_cluster_node(void **state)
{
    static struct peer a = {.salt = 4, .n_held = 5};
    char port[16], other_port[16], command[256], saved[sizeof(address)];
    pid_t other;

    redis_kill();
    snprintf(port, sizeof(port), "%d", free_port());
    snprintf(other_port, sizeof(other_port), "%d", free_port());
    redis_launch((const char *const[]){"--cluster-enabled", "yes", "--port", port, "--cluster-port",
                                       "0", NULL});
    log_begin();
    peer_start(&a, "a", 100);
    assert_true(eventually(failed_more, &(struct refusal){&a, 4}));
    peer_stop(&a);
    log_end();
    assert_int_equal(n_logged("redis_down", "its Redis cluster is down"), 1);

    other = fork();
    assert_true(other >= 0);
    if (other == 0) {
        int null = open("/dev/null", O_RDWR);

        prctl(PR_SET_PDEATHSIG, SIGKILL);
        dup2(null, STDOUT_FILENO);
        execlp("redis-server", "redis-server", "--cluster-enabled", "yes", "--port", other_port,
               "--cluster-config-file", "other.conf", "--save", "", "--dir", dir, NULL);
        _exit(127);
    }
    snprintf(command, sizeof(command),
             "for i in $(seq 300); do redis-cli -p %s CLUSTER ADDSLOTSRANGE 0 16383 2>&1 | "
             "grep -q OK && exit 0; sleep .1; done; exit 1",
             other_port);
    run(command);
    snprintf(command, sizeof(command), "CLUSTER MEET 127.0.0.1 %s", other_port);
    must(command);
    assert_true(eventually(says_moved, NULL));
    a = (struct peer){.salt = 4, .n_held = 5};
    log_begin();
    peer_start(&a, "a", 100);
    assert_true(eventually(failed_more, &(struct refusal){&a, 4}));
    peer_stop(&a);
    log_end();
    assert_int_equal(n_logged("redis_down", "point redis.address at the node that it names"), 1);
    assert_int_equal(n_logged("index_down", "point redis.address at the node that it names"), 1);

    memcpy(saved, address, sizeof(saved));
    snprintf(address, sizeof(address), "127.0.0.1:%s", other_port);
    a = (struct peer){.salt = 4, .n_held = 500};
    peer_start(&a, "a", 100);
    assert_true(sees_all(&a, 4, 500));
    peer_stop(&a);
    memcpy(address, saved, sizeof(saved));
    kill(other, SIGKILL);
    waitpid(other, NULL, 0);
}

/* --- addresses ------------------------------------------------------------------------------- */

static void test_tcp(void **state)
{
    static struct peer a = {.salt = 4, .n_held = 500};
    char port[16], saved[sizeof(address)];

    snprintf(port, sizeof(port), "%d", free_port());
    redis_kill();
    redis_launch((const char *const[]){"--port", port, "--bind", "127.0.0.1", NULL});
    memcpy(saved, address, sizeof(saved));
    for (int scheme = 0; scheme < 2; scheme++) {
        snprintf(address, sizeof(address), "%s127.0.0.1:%s", scheme ? "redis://" : "", port);
        a = (struct peer){.salt = 4, .n_held = 500};
        peer_start(&a, "a", 100 + (uint64_t)scheme);
        assert_true(sees_all(&a, 4, 500));
        peer_stop(&a);
    }
    memcpy(address, saved, sizeof(saved));
}

static void test_bad_addresses(void **state)
{
    static const char *const bad[] = {"localhost",          "host:0",           "redis://host",
                                      "rediss://",          "rediss://unix:/x", "redis://unix:/x",
                                      "http://host:6379/0", "rediss://host:x"};
    struct bt_cluster_conf c = conf;
    struct bt_err err;

    for (size_t i = 0; i < BT_ARRAY_LEN(bad); i++) {
        c.redis_address = (char *)(uintptr_t)bad[i];
        assert_int_equal(bt_cluster_conf_check(&c, &err), BT_E_CONFIG);
        assert_non_null(strstr(err.msg, "redis.address"));
    }
    c = conf;
    c.redis_user = (char *)"somebody";
    assert_int_equal(bt_cluster_conf_check(&c, &err), BT_E_CONFIG);
    assert_non_null(strstr(err.msg, "redis.password"));
    /* Certificates beside an address without TLS: nobody is to believe that it is encrypted. */
    c = conf;
    c.redis_address = (char *)"127.0.0.1:6379";
    c.redis_tls_ca = (char *)"/some/ca.pem";
    assert_int_equal(bt_cluster_conf_check(&c, &err), BT_E_CONFIG);
    assert_non_null(strstr(err.msg, "redis.tls_ca = /some/ca.pem"));
    assert_non_null(strstr(err.msg, "redis.address = 127.0.0.1:6379"));
}

/* With hiredis_ssl a real server with a certificate; without, refused at start with the reason. */
static void test_tls(void **state)
{
    static struct peer a = {.salt = 4, .n_held = 500};
    char port[16], saved[sizeof(address)], ca[128], cert[128], key[128], command[512];
    struct bt_err err;

    memcpy(saved, address, sizeof(saved));
    snprintf(port, sizeof(port), "%d", free_port());
    snprintf(address, sizeof(address), "rediss://127.0.0.1:%s", port);
    if (bt_cluster_conf_check(&conf, &err) < 0) {
        struct bt_blockmap_cfg bc = {.conf = &conf};
        struct bt_blockmap *bm;

        assert_non_null(strstr(err.msg, "hiredis_ssl"));
        assert_int_equal(bt_blockmap_create(&bc, &bm, &err), BT_E_CONFIG);
        memcpy(address, saved, sizeof(saved));
        return;
    }
    snprintf(ca, sizeof(ca), "%s/ca.pem", dir);
    snprintf(cert, sizeof(cert), "%s/cert.pem", dir);
    snprintf(key, sizeof(key), "%s/key.pem", dir);
    snprintf(
        command, sizeof(command),
        "cd %s && openssl req -x509 -newkey rsa:2048 -nodes -keyout key.pem -out ca.pem -days 2 "
        "-subj /CN=test -addext subjectAltName=IP:127.0.0.1 2>/dev/null && cp ca.pem cert.pem",
        dir);
    run(command);
    redis_kill();
    redis_launch((const char *const[]){"--tls-port", port, "--tls-cert-file", cert,
                                       "--tls-key-file", key, "--tls-ca-cert-file", ca, NULL});
    conf.redis_tls_cert = cert;
    assert_int_equal(bt_cluster_conf_check(&conf, &err), BT_E_CONFIG); /* no key */
    conf.redis_tls_key = key;
    log_begin();
    peer_start(&a, "a", 100); /* nobody vouches for the certificate */
    assert_true(eventually(failed_more, &(struct refusal){&a, 3}));
    peer_stop(&a);
    log_end();
    assert_true(n_logged("index_down", "certificate") > 0);
    conf.redis_tls_ca = ca;
    a = (struct peer){.salt = 4, .n_held = 5000};
    peer_start(&a, "a", 100);
    assert_true(sees_all(&a, 4, 5000));
    kill(redis_pid, SIGSTOP);
    assert_true(eventually(is_down, &a));
    kill(redis_pid, SIGCONT);
    assert_true(sees_all(&a, 4, 5000));
    peer_stop(&a);
    /* the right certificate of somebody else */
    snprintf(address, sizeof(address), "rediss://localhost:%s", port);
    a = (struct peer){.salt = 4, .n_held = 5};
    log_begin();
    peer_start(&a, "a", 101);
    assert_true(eventually(failed_more, &(struct refusal){&a, 3}));
    peer_stop(&a);
    log_end();
    assert_true(n_logged("index_down", "ostname mismatch") > 0);
    conf.redis_tls_ca = conf.redis_tls_cert = conf.redis_tls_key = NULL;
    memcpy(address, saved, sizeof(saved));
    unlink(ca);
    unlink(cert);
    unlink(key);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
#define T(fn) cmocka_unit_test_setup_teardown(fn, setup, teardown)
        T(test_TIER_05_redis_frozen),
        T(test_TIER_05_redis_killed),
        T(test_absent_at_start),
        T(test_redis_busy),
        T(test_redis_loading),
        T(test_TIER_05_read_only_replica),
        T(test_TIER_05_out_of_memory),
        T(test_TIER_05_replica_without_data),
        T(test_too_few_replicas),
        T(test_reading_goes_on_when_full),
        T(test_acl_user),
        T(test_wrong_password),
        T(test_redis_cluster_node),
        T(test_tcp),
        T(test_tls),
        cmocka_unit_test(test_bad_addresses),
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
