/* The other side is another process, which is killed or stopped in the middle of a transfer.
 *
 * The binary starts itself as `test child p|d TRANSPORTS` and talks to it in lines. */
#include "tests/unit/again.h"
#include "tests/unit/cmocka.h"

#include "tests/unit/kvstore/handoff/node.h"

#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

enum { TOKENS = 640, CHUNK = 16 };

/* BATON_TEST_NET_SLOW: everything takes ten times as long, as in an emulated machine. */
static uint64_t silence(void)
{
    return (node_env("BATON_TEST_NET_SLOW", "")[0] ? 6000 : 600) * BT_NS_PER_MS;
}

/* ---- the child ---- */

/* Waits for a line of the parent before it computes token `hold`. */
static void child_send(struct node *n, uint64_t id, uint32_t hold)
{
    struct prompt a;
    char go[16];

    if (!prompt_pages(&a, n, id, TOKENS, KV_OWNER_SEQ) || prompt_send(&a) != BT_OK) {
        exit(3);
    }
    EVENTUALLY(LOAD(a.ticketed));
    for (uint32_t t = 0; t < TOKENS; t += CHUNK) {
        if (t == hold && !fgets(go, sizeof(go), stdin)) {
            exit(4);
        }
        prompt_compute(&a, t, t + CHUNK);
    }
    prompt_finish(&a);
    EVENTUALLY(LOAD(a.done));
    printf("done %d 0\n", a.rc);
    prompt_free(&a, KV_OWNER_SEQ);
}

static void child_recv(struct node *n, uint64_t id, const char *address)
{
    struct prompt b;

    if (!prompt_pages(&b, n, id, TOKENS, KV_OWNER_TRANSFER) ||
        prompt_recv(&b, "p0", 1, address) != BT_OK) {
        exit(3);
    }
    EVENTUALLY(LOAD(b.done));
    printf("done %d %zu\n", b.rc, wrong_bytes(n, b.pages, b.seed, TOKENS));
    prompt_free(&b, KV_OWNER_TRANSFER);
}

static int child_main(const char *role, const char *transports)
{
    struct node n;
    struct bt_err err = {0};
    char line[256], address[128];
    unsigned long long id;
    unsigned hold;

    prctl(PR_SET_PDEATHSIG, SIGKILL);
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (node_open(&n,
                  &(struct node_opts){.name = role[0] == 'p' ? "p0" : "d0",
                                      .transports = transports,
                                      .silence_ns = silence()},
                  &err) != BT_OK) {
        fprintf(stderr, "%s\n", err.msg);
        return 2;
    }
    printf("%s\n", kv_handoff_address(n.h));
    while (fgets(line, sizeof(line), stdin)) {
        if (sscanf(line, "send %llu %u", &id, &hold) == 2) {
            child_send(&n, id, hold);
        } else if (sscanf(line, "recv %llu %127s", &id, address) == 2) {
            child_recv(&n, id, address);
        }
    }
    node_close(&n);
    return 0;
}

/* ---- the parent ---- */

struct child {
    pid_t pid;
    FILE *to, *from;
    char address[128];
};

static void child_start(struct child *c, const char *role, const char *transports)
{
    int in[2], out[2];

    assert_int_equal(pipe(in), 0);
    assert_int_equal(pipe(out), 0);
    c->pid = fork();
    if (c->pid == 0) {
        dup2(in[0], 0);
        dup2(out[1], 1);
        for (int fd = 3; fd < 256; fd++) {
            close(fd);
        }
        exec_again((const char *[]){"test_crash", "child", role, transports, NULL});
        _exit(127);
    }
    close(in[0]);
    close(out[1]);
    c->to = fdopen(in[1], "w");
    c->from = fdopen(out[0], "r");
    setvbuf(c->to, NULL, _IOLBF, 0);
    assert_non_null(fgets(c->address, sizeof(c->address), c->from));
    c->address[strcspn(c->address, "\n")] = '\0';
}

static void child_end(struct child *c)
{
    kill(c->pid, SIGKILL);
    waitpid(c->pid, NULL, 0);
    fclose(c->to);
    fclose(c->from);
}

/* Returns when it is over with the process: a signal takes its time to reach all threads. The
 * process stays unreaped, as children of a busy parent do. */
static void hit(const struct child *c, int sig)
{
    siginfo_t info;

    kill(c->pid, sig);
    assert_int_equal(waitid(P_PID, (id_t)c->pid, &info, WEXITED | WSTOPPED | WNOWAIT), 0);
}

static void open_node(struct node *n, const char *name, const char *transports)
{
    struct bt_err err = {0};

    if (node_open(
            n, &(struct node_opts){.name = name, .transports = transports, .silence_ns = silence()},
            &err) != BT_OK) {
        fail_msg("%s", err.msg);
    }
}

static uint64_t prompt_bytes(const struct node *n)
{
    return (uint64_t)n->l->n_layers * kv_layout_pages_for(n->l, TOKENS) * n->l->page_stride;
}

/* Nothing of a peer that is over may touch pages that others have got. */
static void pages_stay_untouched(struct node *n, const struct child *c)
{
    uint32_t *pages = calloc(n->l->n_pages, sizeof(*pages));
    const char *base;
    size_t wrong = 0;

    assert_int_equal(kv_pool_take(n->pool, n->l->n_pages, KV_OWNER_SEQ, KV_PAGE_NONE, pages),
                     BT_OK);
    base = kv_pool_region(n->pool)->base;
    memset(kv_pool_region(n->pool)->base, 0x5c, n->l->bytes);
    kill(c->pid, SIGCONT);
    for (int i = 0; i < 300; i++) {
        side_nap();
    }
    for (size_t i = 0; i < n->l->bytes; i++) {
        wrong += base[i] != 0x5c;
    }
    assert_int_equal(wrong, 0);
    kv_pool_give(n->pool, pages, n->l->n_pages, KV_OWNER_SEQ);
    free(pages);
}

static void p_is_gone(const char *transports, int percent, int sig)
{
    struct node d;
    struct prompt b;
    struct child c;
    uint64_t want;
    uint32_t hold;

    open_node(&d, "d0", transports);
    child_start(&c, "p", transports);
    /* Most of what the other side has computed has arrived; the rest it computes when told to. */
    hold = (uint32_t)(TOKENS / CHUNK * percent / 100 * CHUNK);
    want = prompt_bytes(&d) * hold / TOKENS * 9 / 10;
    assert_true(prompt_pages(&b, &d, 5, TOKENS, KV_OWNER_TRANSFER));
    fprintf(c.to, "send 5 %u\n", hold);
    assert_int_equal(prompt_recv(&b, "p0", 1, c.address), BT_OK);
    assert_true(EVENTUALLY(kv_handoff_stats(d.h).bytes >= want));
    hit(&c, sig);
    if (sig == SIGSTOP) {
        fprintf(c.to, "go\n");
    }
    assert_true(EVENTUALLY(LOAD(b.done)));
    assert_int_equal(b.rc, BT_E_PEER_LOST);
    prompt_free(&b, KV_OWNER_TRANSFER);
    assert_int_equal(kv_handoff_stats(d.h).recvs + kv_handoff_stats(d.h).aborting, 0);
    if (sig == SIGSTOP) {
        pages_stay_untouched(&d, &c);
    }
    assert_int_equal(b.done, 1);
    child_end(&c);
    node_close(&d);
}

static void d_is_gone(const char *transports, int percent, int sig)
{
    struct node p, d;
    struct prompt a, b;
    struct child c;
    uint32_t at = (uint32_t)(TOKENS / CHUNK * percent / 100 * CHUNK);

    open_node(&p, "p0", transports);
    open_node(&d, "d1", transports);
    child_start(&c, "d", transports);
    assert_true(prompt_pages(&a, &p, 6, TOKENS, KV_OWNER_SEQ));
    assert_true(prompt_pages(&b, &d, 6, TOKENS, KV_OWNER_TRANSFER));
    assert_int_equal(prompt_send(&a), BT_OK);
    fprintf(c.to, "recv 6 %s\n", kv_handoff_address(p.h));
    assert_true(EVENTUALLY(LOAD(a.ticketed)));
    prompt_compute(&a, 0, at);
    side_nap();
    hit(&c, sig);
    /* The prompt is kept; another decode node gets it. */
    prompt_compute(&a, at, TOKENS);
    prompt_finish(&a);
    assert_int_equal(prompt_recv(&b, "p0", 1, kv_handoff_address(p.h)), BT_OK);
    assert_true(EVENTUALLY(LOAD(a.done) && LOAD(b.done)));
    assert_int_equal(a.rc, BT_OK);
    assert_int_equal(b.rc, BT_OK);
    assert_int_equal(wrong_bytes(&d, b.pages, b.seed, TOKENS), 0);
    assert_int_equal(a.done + b.done, 2);
    prompt_free(&a, KV_OWNER_SEQ);
    prompt_free(&b, KV_OWNER_TRANSFER);
    child_end(&c);
    node_close(&d);
    node_close(&p);
}

static void test_two_processes(void **state)
{
    static const char *const transports[] = {"auto", "tcp"};

    for (int i = 0; i < 2; i++) {
        struct node p;
        struct prompt a;
        struct child c;
        char line[64];
        int rc = -1, wrong = -1;

        open_node(&p, "p0", transports[i]);
        child_start(&c, "d", transports[i]);
        assert_true(prompt_pages(&a, &p, 6, TOKENS, KV_OWNER_SEQ));
        assert_int_equal(prompt_send(&a), BT_OK);
        fprintf(c.to, "recv 6 %s\n", kv_handoff_address(p.h));
        prompt_compute(&a, 0, TOKENS);
        prompt_finish(&a);
        assert_true(EVENTUALLY(LOAD(a.done)));
        assert_int_equal(a.rc, BT_OK);
        assert_non_null(fgets(line, sizeof(line), c.from));
        assert_int_equal(sscanf(line, "done %d %d", &rc, &wrong), 2);
        assert_int_equal(rc, BT_OK);
        assert_int_equal(wrong, 0);
        prompt_free(&a, KV_OWNER_SEQ);
        child_end(&c);
        node_close(&p);
    }
}

static const int percents[] = {10, 50, 90};

static void test_KVX_01_prefill_node_killed(void **state)
{
    for (size_t i = 0; i < BT_ARRAY_LEN(percents); i++) {
        p_is_gone("auto", percents[i], SIGKILL);
        p_is_gone("tcp", percents[i], SIGKILL);
    }
}

static void test_KVX_01_prefill_node_stopped(void **state)
{
    for (size_t i = 0; i < BT_ARRAY_LEN(percents); i++) {
        p_is_gone("auto", percents[i], SIGSTOP);
        p_is_gone("tcp", percents[i], SIGSTOP);
    }
}

static void test_decode_node_killed(void **state)
{
    for (size_t i = 0; i < BT_ARRAY_LEN(percents); i++) {
        d_is_gone("auto", percents[i], SIGKILL);
        d_is_gone("tcp", percents[i], SIGKILL);
    }
}

static void test_decode_node_stopped(void **state)
{
    for (size_t i = 0; i < BT_ARRAY_LEN(percents); i++) {
        d_is_gone("auto", percents[i], SIGSTOP);
        d_is_gone("tcp", percents[i], SIGSTOP);
    }
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_two_processes),
        cmocka_unit_test(test_KVX_01_prefill_node_killed),
        cmocka_unit_test(test_KVX_01_prefill_node_stopped),
        cmocka_unit_test(test_decode_node_killed),
        cmocka_unit_test(test_decode_node_stopped),
    };

    if (argc == 4 && strcmp(argv[1], "child") == 0) {
        return child_main(argv[2], argv[3]);
    }
    if (argc > 1) {
        cmocka_set_test_filter(argv[1]);
    }
    return cmocka_run_group_tests(tests, NULL, NULL);
}
