/* One side of a lent block is another process, which is killed or stopped in the middle of it.
 *
 * The binary starts itself as `test child daemon` or `test child client ADDRESS` and talks to it in
 * lines. Every byte of a block follows from its salt, number and place, so that both processes know
 * what is right; pages are overwritten as soon as they are back. */
#include "common/cluster/blockmap.h"
#include "kvstore/store/client.h"
#include "kvstore/store/server.h"
#include "tests/unit/common/net/side.h"

#include "tests/unit/again.h"
#include "tests/unit/cmocka.h"

#include <poll.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#define N_LAYERS    16
#define HEADS       4
#define DIM         64
#define PAGE_TOKENS 16
#define BLOCK       128
#define BLOCK_PAGES (BLOCK / PAGE_TOKENS)
#define N_BLOCKS    24
#define N_ROUNDS    4
#define SILENCE_NS  (1500 * BT_NS_PER_MS)
#define LEND_NS     (100 * BT_NS_PER_MS)

static struct kv_layout layout = {.n_layers = N_LAYERS,
                                  .n_kv_heads = HEADS,
                                  .head_dim = DIM,
                                  .page_tokens = PAGE_TOKENS,
                                  .dtype = KV_DTYPE_F16,
                                  .n_pages = N_BLOCKS * BLOCK_PAGES};

/* ---- blocks ---- */

struct blocks {
    int32_t ids[N_BLOCKS * BLOCK];
    struct kv_key keys[N_BLOCKS];
    struct kv_chain chain;
    uint32_t salt;
};

static void blocks_make(struct blocks *b, uint32_t salt)
{
    struct kv_hasher *h;

    b->salt = salt;
    for (size_t i = 0; i < BT_ARRAY_LEN(b->ids); i++) {
        b->ids[i] = (int32_t)(i * 31 + salt * 7919) % 50000;
    }
    b->chain =
        (struct kv_chain){.root = {{7}}, .keys = b->keys, .ids = b->ids, .n_blocks = N_BLOCKS};
    if (kv_hasher_create(&h, NULL) != BT_OK) {
        exit(3);
    }
    kv_key_chain(h, &b->chain.root, &(struct kv_key_tokens){b->ids, BT_ARRAY_LEN(b->ids), BLOCK},
                 b->keys);
    kv_hasher_destroy(h);
}

/* Word at a place of the blob form. */
static uint64_t word(const struct blocks *b, uint32_t block, uint32_t layer, size_t at)
{
    uint64_t x = ((uint64_t)b->salt << 44 | (uint64_t)block << 36 | (uint64_t)layer << 28 | at);

    return x * 0x9E3779B97F4A7C15ull ^ x >> 29;
}

static void
fill(struct kv_pool *pool, const struct blocks *b, uint32_t block, const uint32_t *pages)
{
    struct kv_blob_grid g = kv_blob_grid_of(pool, pages, BLOCK);

    for (uint32_t l = 0; l < N_LAYERS; l++) {
        for (uint32_t r = 0; r < g.n_rows * g.n_pages; r++) {
            uint64_t *to =
                (uint64_t *)(void *)((char *)kv_pool_page(pool, (int)l, pages[r % g.n_pages]) +
                                     r / g.n_pages * g.row_bytes);

            for (size_t i = 0; i < g.row_bytes / 8; i++) {
                to[i] = word(b, block, l, r * g.row_bytes + 8 * i);
            }
        }
    }
}

/* How many of the blocks are there; every one that is there is right, else *ret_wrong. */
static uint32_t look(struct kv_tiers *t, const struct blocks *b, uint32_t *ret_wrong)
{
    struct kv_blob_shape shape = kv_blob_shape_of(&layout, BLOCK);
    uint32_t n = 0;

    for (uint32_t i = 0; i < N_BLOCKS; i++) {
        struct kv_run run = kv_run_of(&b->chain, i, BLOCK, 0);
        struct kv_blob *blob;
        bool wrong = false;

        run.n_blocks = 1;
        if (kv_tiers_pin(t, &run, &blob) != 1) {
            continue;
        }
        n++;
        for (uint32_t l = 0; l < N_LAYERS; l++) {
            const uint64_t *p = kv_blob_layer(t, blob, l);

            wrong = wrong || kv_sum(p, shape.layer_bytes) != kv_blob_meta(blob)->sums[l];
            for (size_t k = 0; k < shape.layer_bytes / 8; k++) {
                wrong = wrong || p[k] != word(b, i, l, 8 * k);
            }
        }
        *ret_wrong += wrong;
        kv_tiers_unpin(t, &blob, 1);
    }
    return n;
}

/* ---- the two sides ---- */

struct daemon {
    struct kv_tiers *tiers;
    struct kv_server *server;
};

static void daemon_open(struct daemon *d)
{
    struct kv_tiers_conf tc = {.host_bytes = 2 * layout.bytes, .threads = 1};
    struct kv_tiers_cfg cfg = {.conf = &tc, .mem = &bt_mem_host};
    struct kv_server_cfg sc = {.net = {.listen = "127.0.0.1:0"},
                               .node_name = "s0",
                               .incarnation = 4,
                               .takes_puts = true,
                               .silence_ns = SILENCE_NS};
    struct bt_err err = {0};

    if (kv_tiers_create(&cfg, &d->tiers, &err) != BT_OK) {
        fprintf(stderr, "%s\n", err.msg);
        exit(3);
    }
    sc.tiers = d->tiers;
    if (kv_server_create(&sc, &d->server, &err) != BT_OK) {
        fprintf(stderr, "%s\n", err.msg);
        exit(3);
    }
}

static void daemon_close(struct daemon *d)
{
    kv_server_destroy(d->server);
    kv_tiers_destroy(d->tiers);
}

struct lender {
    struct kv_pool *pool;
    struct bt_blockmap *map;
    struct kv_client *client;
    struct bt_members *members;
    struct blocks b;
    uint32_t pages[N_BLOCKS * BLOCK_PAGES];
    atomic_uint n_back;
    struct offering {
        struct lender *lender;
        uint32_t block;
    } offers[N_BLOCKS];
};

/* Any thread: the pages are ours again, and used at once. */
static void offered(void *arg, int rc)
{
    struct offering *f = arg;
    struct lender *c = f->lender;

    for (uint32_t l = 0; l < N_LAYERS; l++) {
        for (uint32_t p = 0; p < BLOCK_PAGES; p++) {
            memset(kv_pool_page(c->pool, (int)l, c->pages[f->block * BLOCK_PAGES + p]), 0xee,
                   layout.page_stride);
        }
    }
    atomic_fetch_add(&c->n_back, 1);
}

/* Borrowed by the block index, which is never up. */
static struct bt_cluster_conf conf = {.name = (char *)(uintptr_t) "test",
                                      .redis_address = (char *)(uintptr_t) "",
                                      .redis_user = (char *)(uintptr_t) "",
                                      .redis_password = (char *)(uintptr_t) "",
                                      .redis_timeout_ns = BT_NS_PER_S,
                                      .lookup_timeout_ns = BT_NS_PER_S,
                                      .block_ttl_ns = 600 * BT_NS_PER_S};

static void lender_open(struct lender *c, const char *address)
{
    struct bt_blockmap_cfg bc = {.conf = &conf};
    struct bt_member m = {.name = "s0", .incarnation = 4, .role = BT_ROLE_KVSTORE};
    struct kv_client_cfg cc = {.net = {.listen = "127.0.0.1:0"},
                               .node_name = "p0",
                               .incarnation = 5,
                               .replicas = 1,
                               .silence_ns = SILENCE_NS,
                               .lend_ns = LEND_NS,
                               .shape = kv_blob_shape_of(&layout, BLOCK)};
    struct bt_err err = {0};

    memset(c, 0, sizeof(*c));
    snprintf(m.store_addr, sizeof(m.store_addr), "%s", address);
    c->members = bt_members_make(&m, 1, NULL, 0);
    if (!c->members || kv_pool_create(&layout, &bt_mem_host, "test", &c->pool, NULL) != BT_OK ||
        bt_blockmap_create(&bc, &c->map, NULL) != BT_OK) {
        exit(3);
    }
    cc.blockmap = c->map;
    if (kv_client_create(&cc, &c->client, &err) != BT_OK) {
        fprintf(stderr, "%s\n", err.msg);
        exit(3);
    }
    kv_client_set_members(c->client, c->members);
    if (kv_pool_take(c->pool, N_BLOCKS * BLOCK_PAGES, KV_OWNER_SEQ, KV_PAGE_NONE, c->pages) !=
        BT_OK) {
        exit(3);
    }
}

static void lender_offer_all(struct lender *c, uint32_t salt)
{
    struct kv_source *src = kv_client_source(c->client);

    if (c->b.salt) { /* their pages are not ours before that */
        EVENTUALLY(atomic_load(&c->n_back) == N_BLOCKS);
    }
    blocks_make(&c->b, salt);
    atomic_store(&c->n_back, 0);
    for (uint32_t i = 0; i < N_BLOCKS; i++) {
        fill(c->pool, &c->b, i, c->pages + (size_t)i * BLOCK_PAGES);
    }
    for (uint32_t i = 0; i < N_BLOCKS; i++) {
        struct kv_offer o = {.chain = c->b.chain,
                             .n_tokens = BLOCK,
                             .pages = c->pages + (size_t)i * BLOCK_PAGES,
                             .pool = c->pool,
                             .done = offered,
                             .arg = &c->offers[i]};

        c->offers[i] = (struct offering){c, i};
        o.chain.n_blocks = i + 1;
        if (!src->ops->offer(src, &o)) {
            offered(&c->offers[i], BT_E_CANCELLED);
        }
    }
}

static void lender_close(struct lender *c)
{
    kv_client_destroy(c->client);
    bt_blockmap_destroy(c->map);
    bt_members_unref(c->members);
    kv_pool_give(c->pool, c->pages, N_BLOCKS * BLOCK_PAGES, KV_OWNER_SEQ);
    kv_pool_destroy(c->pool);
}

/* ---- the child ---- */

static int child_daemon(void)
{
    static struct blocks b;
    struct daemon d;
    unsigned salt;
    char line[64];

    daemon_open(&d);
    printf("%s\n", kv_server_address(d.server));
    fflush(stdout);
    while (fgets(line, sizeof(line), stdin) && sscanf(line, "look %u", &salt) == 1) {
        uint32_t wrong = 0, n;

        blocks_make(&b, salt);
        n = look(d.tiers, &b, &wrong);
        printf("%u %u\n", n, wrong);
        fflush(stdout);
    }
    daemon_close(&d);
    return 0;
}

static int child_client(const char *address)
{
    static struct lender c;
    unsigned salt;
    char line[64];

    lender_open(&c, address);
    printf("ready\n");
    fflush(stdout);
    while (fgets(line, sizeof(line), stdin) && sscanf(line, "offer %u", &salt) == 1) {
        lender_offer_all(&c, salt);
    }
    EVENTUALLY(atomic_load(&c.n_back) == N_BLOCKS);
    lender_close(&c);
    return 0;
}

struct child {
    pid_t pid;
    FILE *to, *from;
};

static void child_start(struct child *c, const char *role, const char *address, char line[64])
{
    int in[2], out[2];

    assert_int_equal(pipe(in), 0);
    assert_int_equal(pipe(out), 0);
    c->pid = fork();
    if (c->pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        dup2(in[0], 0);
        dup2(out[1], 1);
        for (int fd = 3; fd < 256; fd++) {
            close(fd);
        }
        exec_again((const char *[]){"test", "child", role, address, NULL});
        _exit(9);
    }
    close(in[0]);
    close(out[1]);
    c->to = fdopen(in[1], "w");
    c->from = fdopen(out[0], "r");
    assert_non_null(fgets(line, 64, c->from));
    line[strcspn(line, "\n")] = '\0';
}

static void child_say(struct child *c, const char *what, unsigned n)
{
    fprintf(c->to, "%s %u\n", what, n);
    fflush(c->to);
}

/* Ends it; it must have lived until then, unless it was killed. */
static void child_end(struct child *c, bool killed)
{
    int status;

    fclose(c->to);
    assert_int_equal(waitpid(c->pid, &status, 0), c->pid);
    fclose(c->from);
    assert_true(killed ? WIFSIGNALED(status) : WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

/* ---- tests ---- */

/* The daemon is killed or stopped when some blocks are through: all pages are back soon, by proof,
 * while it stands still, too. What it has read late is nothing: what it holds is right. */
static void daemon_hit(int sig)
{
    static struct lender c;
    struct child d;
    char line[64];
    unsigned n, wrong;

    for (uint32_t round = 0; round < N_ROUNDS; round++) {
        child_start(&d, "daemon", NULL, line);
        lender_open(&c, line);
        lender_offer_all(&c, 1); /* connects */
        assert_true(EVENTUALLY(atomic_load(&c.n_back) == N_BLOCKS));
        lender_offer_all(&c, 2 + round);
        assert_true(EVENTUALLY(atomic_load(&c.n_back) >= round * N_BLOCKS / (N_ROUNDS + 1)));
        kill(d.pid, sig);
        assert_true(EVENTUALLY(atomic_load(&c.n_back) == N_BLOCKS));
        if (sig == SIGSTOP) {
            kill(d.pid, SIGCONT);
            for (unsigned salt = 1; salt <= 2 + round; salt += 1 + round) {
                child_say(&d, "look", salt);
                assert_non_null(fgets(line, sizeof(line), d.from));
                assert_int_equal(sscanf(line, "%u %u", &n, &wrong), 2);
                assert_int_equal(wrong, 0);
                assert_true(n > 0 || salt > 1);
            }
        }
        lender_close(&c); /* pages and staging: the pool checks that all is free */
        child_end(&d, sig == SIGKILL);
    }
}

static void test_KVX_01_daemon_killed_in_mid_put(void **state)
{
    daemon_hit(SIGKILL);
}

static void test_KVX_01_daemon_stopped_in_mid_put(void **state)
{
    daemon_hit(SIGSTOP);
}

/* The client is killed, or stopped for a while, when some blocks are stored: no room stays reserved
 * for it, and what is found is right. */
static void client_hit(int sig)
{
    static struct blocks b;
    struct daemon d;
    struct child c;
    char line[64];
    uint32_t n, wrong = 0;

    daemon_open(&d);
    for (uint32_t round = 0; round < N_ROUNDS; round++) {
        uint64_t before = kv_server_stats(d.server).puts;

        child_start(&c, "client", kv_server_address(d.server), line);
        child_say(&c, "offer", 100 + round);
        assert_true(EVENTUALLY(kv_server_stats(d.server).puts >= before + N_BLOCKS / 2));
        before = kv_server_stats(d.server).puts;
        child_say(&c, "offer", 200 + round);
        assert_true(EVENTUALLY(kv_server_stats(d.server).puts >=
                               before + (uint64_t)round * N_BLOCKS / N_ROUNDS));
        kill(c.pid, sig);
        if (sig == SIGSTOP) {
            /* It goes on where it was, or it was given up meanwhile. */
            poll(NULL, 0, round % 2 ? 200 : (int)(4 * SILENCE_NS / 3 / BT_NS_PER_MS));
            kill(c.pid, SIGCONT);
        }
        child_end(&c, sig == SIGKILL);
        assert_true(EVENTUALLY(kv_server_stats(d.server).clients == 0));
        assert_true(EVENTUALLY(kv_tiers_stats(d.tiers).n_pins == 0));
        blocks_make(&b, 100 + round);
        n = look(d.tiers, &b, &wrong);
        assert_int_equal(wrong, 0);
        assert_true(n > 0);
        blocks_make(&b, 200 + round);
        look(d.tiers, &b, &wrong);
        assert_int_equal(wrong, 0);
    }
    daemon_close(&d);
}

static void test_KVX_01_client_killed_in_mid_put(void **state)
{
    client_hit(SIGKILL);
}

static void test_KVX_01_client_stopped_in_mid_put(void **state)
{
    client_hit(SIGSTOP);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_KVX_01_daemon_killed_in_mid_put),
        cmocka_unit_test(test_KVX_01_daemon_stopped_in_mid_put),
        cmocka_unit_test(test_KVX_01_client_killed_in_mid_put),
        cmocka_unit_test(test_KVX_01_client_stopped_in_mid_put),
    };

    signal(SIGPIPE, SIG_IGN);
    if (kv_layout_init(&layout, NULL) != BT_OK) {
        return 1;
    }
    if (argc >= 3 && strcmp(argv[1], "child") == 0) {
        return strcmp(argv[2], "daemon") == 0 ? child_daemon() : child_client(argv[3]);
    }
    return cmocka_run_group_tests(tests, NULL, NULL);
}
