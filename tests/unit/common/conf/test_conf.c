/* Sources and their order, the file syntax, errors that name what is wrong, help that loads. */
#include "common/conf/conf.h"

#include "common/obs/log.h"

#include "tests/unit/cmocka.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#define ARGV(words) ((char *const *)(words))

static const char *const colours[] = {"red", "green", NULL};

struct inner {
    uint64_t wait_ns;
};

struct cfg {
    char *name, *password, *listen, *peer;
    int64_t port;
    uint64_t cache_bytes;
    struct inner inner;
    bool fast;
    int colour;
    struct bt_conf_list seeds;
};

static const struct bt_conf_opt opts[] = {
    BT_CONF_STR(struct cfg, name, "name", "some # \"name\"", 16, "Name of it."),
    BT_CONF_SECRET_STR(struct cfg, password, "redis.password", 64, "Password."),
    BT_CONF_ADDR_REQUIRED(struct cfg, listen, "listen", "127.0.0.1:0", "Where it listens."),
    BT_CONF_ADDR(struct cfg, peer, "peer", "", "Whom it calls."),
    BT_CONF_INT(struct cfg, port, "redis.port", "6379", 1, 65535, "Port."),
    BT_CONF_BYTES(struct cfg, cache_bytes, "cache_size", "64M", 1024, 1ll << 40, "Cache."),
    BT_CONF_DURATION(struct cfg, inner.wait_ns, "inner.wait", "3s", 100, 60000, "Wait."),
    BT_CONF_BOOL(struct cfg, fast, "fast_mode", "false", "Be fast."),
    BT_CONF_ENUM(struct cfg, colour, "colour", "green", colours, "Colour."),
    BT_CONF_LIST(struct cfg, seeds, "seeds", "", 3, "Seeds."),
};

static struct cfg cfg;
static const struct bt_conf_spec spec = {"baton-test", "tests", opts, BT_ARRAY_LEN(opts), &cfg};

static char *make_file(const char *text)
{
    static char path[64];
    int fd;

    snprintf(path, sizeof(path), "/tmp/baton_conf_XXXXXX");
    fd = mkstemp(path);
    assert_true(fd >= 0);
    assert_int_equal(write(fd, text, strlen(text)), strlen(text));
    close(fd);
    return path;
}

/* Loads with one flag and one environment entry (each may be NULL); the text of a file, if any. */
static int
load(const char *file, const char *env, const char *flag, struct bt_err *err, struct bt_conf **conf)
{
    const char *path = file ? make_file(file) : NULL, *argv[5] = {"x"}, *envp[3] = {0};
    int n = 1, rc;

    if (path) {
        argv[n++] = "--config";
        argv[n++] = path;
    }
    argv[n] = flag;
    envp[0] = "HOME=/";
    envp[1] = env;
    memset(&cfg, 0, sizeof(cfg));
    rc = bt_conf_load(&spec, (char *const *)argv, (char *const *)envp, conf, err);
    if (path) {
        unlink(path);
    }
    return rc;
}

static void refused(const char *file, const char *env, const char *flag, const char *words)
{
    struct bt_conf *conf = NULL;
    struct bt_err err = {0};

    assert_int_equal(load(file, env, flag, &err, &conf), BT_E_CONFIG);
    if (!strstr(err.msg, words)) {
        fail_msg("error \"%s\" lacks \"%s\"", err.msg, words);
    }
}

static void test_defaults(void **state)
{
    struct bt_conf *conf;
    struct bt_err err;

    assert_int_equal(load(NULL, NULL, NULL, &err, &conf), BT_OK);
    assert_int_equal(bt_conf_action(conf), BT_CONF_RUN);
    assert_string_equal(cfg.name, "some # \"name\"");
    assert_string_equal(cfg.password, "");
    assert_string_equal(cfg.listen, "127.0.0.1:0");
    assert_string_equal(cfg.peer, "");
    assert_int_equal(cfg.port, 6379);
    assert_int_equal(cfg.cache_bytes, 64 << 20);
    assert_int_equal(cfg.inner.wait_ns, 3000000000);
    assert_false(cfg.fast);
    assert_int_equal(cfg.colour, 1);
    assert_int_equal(cfg.seeds.n, 0);
    bt_conf_destroy(conf);
    bt_conf_destroy(NULL);
}

static void test_order(void **state)
{
    const char *file = "\n# comment\n  redis.port =  7000 # why\r\ncolour=red\nseeds = a:1 , b:2\n"
                       "name = \"x # \\\"y\\\\\"   # end\ninner.wait=250ms";
    struct bt_conf *conf;
    struct bt_err err;

    assert_int_equal(load(file, NULL, NULL, &err, &conf), BT_OK);
    assert_int_equal(cfg.port, 7000);
    assert_int_equal(cfg.colour, 0);
    assert_string_equal(cfg.name, "x # \"y\\");
    assert_int_equal(cfg.inner.wait_ns, 250000000);
    assert_int_equal(cfg.seeds.n, 2);
    assert_string_equal(cfg.seeds.items[0], "a:1");
    assert_string_equal(cfg.seeds.items[1], "b:2");
    bt_conf_destroy(conf);
    assert_int_equal(load(file, "BATON_REDIS_PORT=7001", NULL, &err, &conf), BT_OK);
    assert_int_equal(cfg.port, 7001);
    bt_conf_destroy(conf);
    assert_int_equal(load(file, "BATON_REDIS_PORT=7001", "--redis.port=7002", &err, &conf), BT_OK);
    assert_int_equal(cfg.port, 7002);
    bt_conf_destroy(conf);
}

static void test_flags(void **state)
{
    const char *words[] = {"x", "--fast-mode", "--redis.port", "9", "--name", "a b", "--seeds",
                           "q", NULL};
    const char *off[] = {"x", "--fast_mode", "off", "--cache-size=2K", NULL};
    const char *twice[] = {"x", "--name=a", "--name", "b", NULL};
    const char *alone[] = {"x", "--name", NULL};
    const char *version[] = {"x", "--version", "--nonsense", NULL};
    struct bt_conf *conf;
    struct bt_err err;

    memset(&cfg, 0, sizeof(cfg));
    assert_int_equal(bt_conf_load(&spec, ARGV(words), NULL, &conf, &err), BT_OK);
    assert_true(cfg.fast);
    assert_int_equal(cfg.port, 9);
    assert_string_equal(cfg.name, "a b");
    assert_int_equal(cfg.seeds.n, 1);
    bt_conf_destroy(conf);
    assert_int_equal(bt_conf_load(&spec, ARGV(off), NULL, &conf, &err), BT_OK);
    assert_false(cfg.fast);
    assert_int_equal(cfg.cache_bytes, 2048);
    bt_conf_destroy(conf);
    assert_int_equal(bt_conf_load(&spec, ARGV(twice), NULL, &conf, &err), BT_E_CONFIG);
    assert_string_equal(err.msg, "flag: name is given twice");
    assert_int_equal(bt_conf_load(&spec, ARGV(alone), NULL, &conf, &err), BT_E_CONFIG);
    assert_string_equal(err.msg, "flag: --name: its value is missing");
    assert_int_equal(bt_conf_load(&spec, ARGV(version), NULL, &conf, &err), BT_OK);
    assert_int_equal(bt_conf_action(conf), BT_CONF_VERSION);
    bt_conf_destroy(conf);
}

static void test_errors(void **state)
{
    char lines[5000];

    refused("redis.port = 70000\n", NULL, NULL,
            "line 1: redis.port = 70000: must be an integer from 1 to 65535");
    refused("\n\nredis.port = \n", NULL, NULL, "line 3: redis.port = : must be");
    refused("redis.prot = 1\n", NULL, NULL,
            "line 1: unknown key \"redis.prot\" (did you mean \"redis.port\"?)");
    refused("colour = red\ncolour = red\n", NULL, NULL, "line 2: colour is given twice");
    refused("colour = blue\n", NULL, NULL, "must be one of red, green");
    refused("colour\n", NULL, NULL, "must be key = value");
    refused("= red\n", NULL, NULL, "unknown key \"\"");
    refused("name = \"open\n", NULL, NULL, "quotes must be closed");
    refused("name = \"a\" b\n", NULL, NULL, "quotes must be closed");
    refused("name = \"a\\n\"\n", NULL, NULL, "quotes must be closed");
    refused("name = 12345678901234567\n", NULL, NULL, "a text of 0 to 16 bytes");
    refused("name = a\x01\n", NULL, NULL, "control character at column 9");
    refused("seeds = a,,b\n", NULL, NULL, "up to 3 items");
    refused("seeds = a,b,\n", NULL, NULL, "up to 3 items");
    refused("seeds = a,b,c,d\n", NULL, NULL, "up to 3 items");
    refused("inner.wait = 5\n", NULL, NULL, "a duration from 100ms to 60s");
    refused("inner.wait = 61s\n", NULL, NULL, "a duration from 100ms to 60s");
    refused("cache_size = 1000\n", NULL, NULL, "a size from 1K to 1T");
    refused("listen = \n", NULL, NULL, "must be host:port");
    refused("peer = nonsense\n", NULL, NULL, "or empty");
    refused(NULL, "BATON_REDIS_PORT=x", NULL, "environment: redis.port = x: must be an integer");
    refused(NULL, "BATON_NONSENSE=x", NULL, "environment: unknown key BATON_NONSENSE");
    refused(NULL, NULL, "--nonsense=1", "flag: unknown key \"nonsense\"");
    refused(NULL, NULL, "word", "flag: \"word\"");
    refused(NULL, NULL, "-x=1", "flag: \"-x=1\"");
    refused(NULL, NULL, "--config=/nonexistent/baton", "No such file");
    refused(NULL, NULL, "--config=/dev/zero", "not a regular file");
    refused(NULL, NULL, "--config=/tmp", "not a regular file");
    /* a bad value is told even where a higher source would win */
    refused("redis.port = 0\n", NULL, "--redis.port=1", "redis.port = 0");
    memset(lines, 'a', sizeof(lines) - 1);
    lines[sizeof(lines) - 1] = '\0';
    refused(lines, NULL, NULL, "longer than 4096 bytes");
}

static void test_big_file(void **state)
{
    size_t n = (1u << 20) + 1;
    char *text = malloc(n + 1);

    assert_non_null(text);
    memset(text, '\n', n);
    text[n] = '\0';
    refused(text, NULL, NULL, "larger than 1048576 bytes");
    free(text);
}

static void test_fifo(void **state)
{
    char path[64];

    snprintf(path, sizeof(path), "--config=/tmp/baton_fifo_%d", (int)getpid());
    assert_int_equal(mkfifo(path + 9, 0600), 0);
    refused(NULL, NULL, path, "not a regular file");
    unlink(path + 9);
}

/* Names that a cluster puts into every container's environment must not stop the start. */
static void test_injected_environment(void **state)
{
    static const char *const names[] = {
        "BATON_SERVICE_HOST=10.0.0.1",
        "BATON_ROUTER_SERVICE_PORT_GRPC=1",
        "BATON_ROUTER_PORT=tcp://10.0.0.1:1",
        "BATON_PORT_80_TCP_ADDR=10.0.0.1",
        "BATON_TEST_DATA=/x",
        "BATON_CONFIG=",
    };
    struct bt_conf *conf;
    struct bt_err err;

    for (size_t i = 0; i < BT_ARRAY_LEN(names); i++) {
        assert_int_equal(load(NULL, names[i], NULL, &err, &conf), BT_OK);
        bt_conf_destroy(conf);
    }
    refused(NULL, "BATON_ROUTER_PORT=12", NULL, "unknown key BATON_ROUTER_PORT");
}

static void test_secret(void **state)
{
    char *path = strdup(make_file("s3cret pass\n")), arg[128], log[8192] = {0}, *long_path;
    struct bt_conf *conf;
    struct bt_err err;
    int fds[2], saved;

    refused("redis.password = canary\n", NULL, NULL, "redis.password_file, a path");
    refused(NULL, "BATON_REDIS_PASSWORD=canary", NULL, "redis.password_file, a path");
    refused(NULL, NULL, "--redis.password=canary", "redis.password_file, a path");
    refused("redis.password =\nredis.password_file = /b\n", NULL, NULL, "given twice");
    long_path =
        strdup(make_file("12345678901234567890123456789012345678901234567890123456789012345\n"));
    snprintf(arg, sizeof(arg), "--redis.password_file=%s", long_path);
    refused(NULL, NULL, arg, "redis.password = ********:");
    unlink(long_path);
    free(long_path);
    refused(NULL, "BATON_REDIS_PASSWORD_FILE=/nonexistent/x", NULL, "secret file /nonexistent/x");
    snprintf(arg, sizeof(arg), "--redis.password-file=%s", path);
    assert_int_equal(load(NULL, NULL, arg, &err, &conf), BT_OK);
    assert_string_equal(cfg.password, "s3cret pass");
    /* the log shows every key and no secret */
    assert_int_equal(pipe(fds), 0);
    saved = dup(STDERR_FILENO);
    dup2(fds[1], STDERR_FILENO);
    bt_conf_log(conf);
    dup2(saved, STDERR_FILENO);
    close(saved);
    close(fds[1]);
    assert_true(read(fds[0], log, sizeof(log) - 1) > 0);
    close(fds[0]);
    assert_null(strstr(log, "s3cret"));
    assert_non_null(strstr(log, "redis.password=\"********\"@flag"));
    for (size_t i = 0; i < BT_ARRAY_LEN(opts); i++) {
        assert_non_null(strstr(log, opts[i].key));
    }
    bt_conf_destroy(conf);
    unlink(path);
    free(path);
}

static void test_help(void **state)
{
    char *text = NULL;
    size_t n = 0;
    struct bt_conf *conf;
    struct bt_err err;
    FILE *f = open_memstream(&text, &n);

    bt_conf_print(&spec, BT_CONF_HELP, f);
    bt_conf_print(&spec, BT_CONF_VERSION, f);
    fclose(f);
    for (size_t i = 0; i < BT_ARRAY_LEN(opts); i++) {
        assert_non_null(strstr(text, opts[i].key));
    }
    assert_non_null(strstr(text, "baton-test " BT_VERSION));
    free(text);
    /* the example file is a file that loads, to the defaults */
    f = open_memstream(&text, &n);
    bt_conf_print(&spec, BT_CONF_HELP_CONFIG, f);
    fclose(f);
    memset(&cfg, 0, sizeof(cfg));
    assert_int_equal(bt_conf_load_text(&spec, "x", (struct bt_str){text, n}, &conf, &err), BT_OK);
    assert_string_equal(cfg.name, "some # \"name\"");
    assert_int_equal(cfg.port, 6379);
    assert_int_equal(cfg.colour, 1);
    bt_conf_destroy(conf);
    free(text);
}

static void test_required(void **state)
{
    struct {
        char *model;
    } out = {0};
    const struct bt_conf_opt row[] = {
        {"model", BT_CONF_T_STR, 0, 0, NULL, 1, 100, NULL, "Path of the model."}};
    const struct bt_conf_spec one = {"x", "y", row, 1, &out};
    struct bt_conf *conf;
    struct bt_err err;
    const char *none[] = {"x", NULL}, *given[] = {"x", "--model=m", NULL};

    assert_int_equal(bt_conf_load(&one, ARGV(none), NULL, &conf, &err), BT_E_CONFIG);
    assert_string_equal(err.msg, "model must be given: Path of the model.");
    assert_int_equal(bt_conf_load(&one, ARGV(given), NULL, &conf, &err), BT_OK);
    assert_string_equal(out.model, "m");
    bt_conf_destroy(conf);
    assert_null(out.model);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_defaults), cmocka_unit_test(test_order),
        cmocka_unit_test(test_flags),    cmocka_unit_test(test_errors),
        cmocka_unit_test(test_big_file), cmocka_unit_test(test_fifo),
        cmocka_unit_test(test_secret),   cmocka_unit_test(test_injected_environment),
        cmocka_unit_test(test_help),     cmocka_unit_test(test_required),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
