/* Blocks that are lent: the owner gathers them from the sender's pages, and only the sender's word
 * makes a block of that. Over real UCX; one side says what it is told, whatever that is. */
#include "tests/unit/kvstore/tier/fixture.h"

#include "common/base/buf.h"
#include "common/cluster/blockmap.h"
#include "kvstore/store/client.h"
#include "kvstore/store/link.h"
#include "kvstore/store/server.h"

#include "tests/unit/cmocka.h"

#include <poll.h>
#include <stdlib.h>
#include <unistd.h>

#define SILENCE_NS (10 * BT_NS_PER_S)
#define LEND_NS    (1 * BT_NS_PER_S) /* a loaded machine greets late */
#define N_HEARD    256
#define PAGES      2 /* of a block */

/* ---- a side that keeps to nothing; what it hears is written down ---- */

struct heard {
    enum wire_store_type type;
    uint64_t req;
    int32_t rc;
    uint8_t flags;
    uint32_t layer;
    uint64_t offset, sum, bytes;
};

static const char *side_method; /* that it forces; NULL = none */

struct side {
    struct kv_links links;
    char memory[4096];
    struct kv_link *link; /* [net] NULL = none, or closed */
    const char *address;
    struct heard heard[N_HEARD];
    uint32_t n_heard, closed, ready; /* atomic */
    uint32_t right;                  /* layers of DATA whose sum is right; before n_heard */
    char layer[1 << 16];
    struct wire_store say;
    struct bt_str data;
};

static void on_ready(void *arg, struct kv_link *l)
{
    struct side *s = arg;

    s->link = l;
    __atomic_store_n(&s->ready, 1, __ATOMIC_RELEASE);
}

static void on_message(void *arg, struct kv_link *l, const struct wire_store *m, struct bt_str data)
{
    struct side *s = arg;
    uint32_t n = s->n_heard;

    if (n < N_HEARD) {
        s->heard[n] =
            (struct heard){m->type, m->req, m->rc, m->flags, m->layer, m->offset, m->sum, data.n};
        if (m->type == WIRE_STORE_DATA && m->offset + data.n <= sizeof(s->layer)) {
            memcpy(s->layer + m->offset, data.p, data.n);
            s->right += m->sum != 0 && m->sum == kv_sum(s->layer, m->offset + data.n);
        }
        __atomic_store_n(&s->n_heard, n + 1, __ATOMIC_RELEASE);
    }
}

static void on_closed(void *arg, struct kv_link *l, int rc)
{
    struct side *s = arg;

    s->link = NULL;
    __atomic_add_fetch(&s->closed, 1, __ATOMIC_RELEASE);
}

static bool is_busy(void *arg, const struct kv_link *l)
{
    return true; /* so that both say PING */
}

static void on_pump(void *arg)
{
}

static void dial(void *arg)
{
    struct side *s = arg;

    kv_link_dial(&s->links, s->address, NULL);
}

static bool is_ready(void *arg)
{
    return __atomic_load_n(&((struct side *)arg)->ready, __ATOMIC_ACQUIRE);
}

static bool is_closed(void *arg)
{
    return __atomic_load_n(&((struct side *)arg)->closed, __ATOMIC_ACQUIRE) > 0;
}

static void side_open(struct side *s, const char *name, const char *dials)
{
    struct kv_links_cfg lc = {.net = {.listen = "127.0.0.1:0", .method = side_method},
                              .node_name = name,
                              .incarnation = 4,
                              .silence_ns = SILENCE_NS,
                              .base = s->memory,
                              .bytes = sizeof(s->memory),
                              .serves = !dials,
                              .ops = {s, on_ready, on_message, on_closed, is_busy, on_pump}};
    struct bt_err err = {0};

    *s = (struct side){.address = dials};
    if (kv_links_init(&s->links, &lc, &err) != BT_OK) {
        fail_msg("%s", err.msg);
    }
    if (dials) {
        kv_links_call(&s->links, dial, s);
        assert_true(eventually(is_ready, s));
    }
}

static void do_say(void *arg)
{
    struct side *s = arg;

    if (s->link) {
        kv_link_send(s->link, &s->say, s->data);
    }
}

static void say(struct side *s, struct wire_store m, struct bt_str data)
{
    s->say = m;
    s->data = data;
    kv_links_call(&s->links, do_say, s);
}

static void say_type(struct side *s, enum wire_store_type type, uint64_t req, int32_t rc)
{
    say(s, (struct wire_store){.type = type, .req = req, .rc = rc}, (struct bt_str){0});
}

/* The nth message of a type; NULL: not yet. */
static const struct heard *nth(struct side *s, enum wire_store_type type, uint32_t n)
{
    uint32_t n_heard = __atomic_load_n(&s->n_heard, __ATOMIC_ACQUIRE);

    for (uint32_t i = 0; i < n_heard; i++) {
        if (s->heard[i].type == type && n-- == 0) {
            return &s->heard[i];
        }
    }
    return NULL;
}

struct wish {
    struct side *s;
    enum wire_store_type type;
    uint32_t n;
};

static bool is_heard(void *arg)
{
    struct wish *w = arg;

    return nth(w->s, w->type, w->n) != NULL;
}

static const struct heard *hear(struct side *s, enum wire_store_type type, uint32_t n)
{
    struct wish w = {s, type, n};

    if (!eventually(is_heard, &w)) {
        fail_msg("%s %u did not come", wire_store_type_name((int)type), n);
    }
    return nth(s, type, n);
}

/* ---- a block server, and a side that lends to it ---- */

struct rig {
    struct world w;   /* the server's tiers */
    struct world own; /* the lender's pool */
    struct kv_server *server;
    struct side s;
    struct chain c;
};

static struct rig rig;

static void rig_open(uint64_t lease_ns)
{
    struct kv_server_cfg sc = {.net = {.listen = "127.0.0.1:0"},
                               .node_name = "s0",
                               .incarnation = 3,
                               .takes_puts = true,
                               .lease_ns = lease_ns,
                               .silence_ns = SILENCE_NS};
    struct bt_err err = {0};

    rig = (struct rig){0};
    world_make(&rig.w, 64, 64);
    world_start(&rig.w);
    world_make(&rig.own, 64, 1);
    chain_make(&rig.own, &rig.c, 1, 0, 2, 8);
    sc.tiers = rig.w.tiers;
    if (kv_server_create(&sc, &rig.server, &err) != BT_OK) {
        fail_msg("%s", err.msg);
    }
    side_open(&rig.s, "x0", kv_server_address(rig.server));
}

static bool is_free(void *arg)
{
    return kv_server_stats(rig.server).clients == 0 && kv_tiers_stats(rig.w.tiers).n_pins == 0;
}

static void rig_close(void)
{
    kv_links_fini(&rig.s.links);
    assert_true(eventually(is_free, NULL));
    kv_server_destroy(rig.server);
    world_free(&rig.own);
    world_free(&rig.w);
}

static void reconnect(void)
{
    kv_links_fini(&rig.s.links);
    assert_true(eventually(is_free, NULL));
    side_open(&rig.s, "x0", kv_server_address(rig.server));
}

/* What is said of a lent block; right as it is made, for tests to change. */
struct lending {
    uint32_t pages[PAGES];
    uint32_t n_pages; /* that are really told */
    struct wire_store m;
    struct kv_blob_meta meta;
};

static void lending_make(struct lending *d, uint32_t i, uint64_t req)
{
    static const uint64_t no_sums[N_LAYERS];
    struct kv_run run = kv_run_of(&rig.c.c, i, BLOCK, 0);
    const struct kv_layout *l = kv_pool_layout(rig.own.pool);
    uint64_t prefix = run.prefix;
    struct bt_net_file file;
    struct kv_blob_grid g;

    *d = (struct lending){.pages = {2 * i + 1, 2 * i}, .n_pages = PAGES};
    assert_true(bt_net_file_of(kv_pool_region(rig.own.pool)->fd, &file));
    for (int k = 0; k < N_LAYERS; k++) {
        for (uint32_t p = 0; p < PAGES; p++) {
            fill_page(kv_pool_page(rig.own.pool, k, d->pages[p]), &rig.c, i, p, k);
        }
    }
    kv_run_at(&run, 0, &prefix, &d->meta);
    d->meta.shape = kv_blob_shape_of(l, BLOCK);
    d->meta.sums = no_sums;
    g = kv_blob_grid_of(rig.own.pool, d->pages, BLOCK);
    d->m = (struct wire_store){.type = WIRE_STORE_LEND,
                               .req = req,
                               .file_dev = file.dev,
                               .file_ino = file.ino,
                               .layer_stride = g.layer_stride,
                               .page_stride = g.page_stride,
                               .row_bytes = (uint32_t)g.row_bytes,
                               .n_pages = PAGES,
                               .sample = kv_blob_grid_sample(&g, &d->meta.key, N_LAYERS)};
}

static void lend(const struct lending *d)
{
    struct bt_buf data = {0};
    char head[4096];

    for (uint32_t i = 0; i < d->n_pages; i++) {
        assert_int_equal(wire_store_add_u32(&data, d->pages[i]), BT_OK);
    }
    kv_blob_encode(&d->meta, head);
    assert_int_equal(bt_buf_add(&data, head, kv_blob_head_bytes(&d->meta)), BT_OK);
    say(&rig.s, d->m, bt_buf_str(&data));
    bt_buf_fini(&data);
}

/* Block 0 is found, and it holds what it should. */
static bool is_there(void)
{
    return take_chain(&rig.w, &rig.c) == 1;
}

/* A block that is taken is nothing before KEEP and right after it, whatever the pages hold then. */
static void test_a_block_is_one_with_keep(void **state)
{
    struct lending d;

    rig_open(0);
    lending_make(&d, 0, 7);
    lend(&d);
    assert_int_equal(hear(&rig.s, WIRE_STORE_TAKEN, 0)->req, 7);
    assert_int_equal(take_chain(&rig.w, &rig.c), 0);
    memset(kv_pool_region(rig.own.pool)->base, 0xee, kv_pool_region(rig.own.pool)->bytes);
    say_type(&rig.s, WIRE_STORE_KEEP, 7, 0);
    assert_int_equal(hear(&rig.s, WIRE_STORE_DONE, 0)->rc, BT_OK);
    assert_true(is_there());
    assert_int_equal(kv_server_stats(rig.server).puts, 1);
    lend(&d); /* again */
    assert_int_equal(hear(&rig.s, WIRE_STORE_DONE, 1)->rc, BT_E_EXISTS);
    rig_close();
}

/* Several at once: however words are put together, each gets all of its own. */
static void test_several_at_once(void **state)
{
    struct lending d[6];

    rig_open(0);
    for (uint32_t round = 0; round < 2; round++) {
        for (uint32_t i = 0; i < 6; i++) {
            lending_make(&d[i], i, 10 * round + i);
            lend(&d[i]);
        }
        for (uint32_t i = 0; i < 6; i++) {
            uint64_t req = hear(&rig.s, WIRE_STORE_TAKEN, 6 * round + i)->req;

            assert_int_equal(req, 10 * round + i); /* one after the other */
            say_type(&rig.s, round ? WIRE_STORE_KEEP : WIRE_STORE_DROP, req, 0);
        }
    }
    for (uint32_t i = 0; i < 6; i++) {
        assert_int_equal(hear(&rig.s, WIRE_STORE_DONE, i)->rc, BT_OK);
    }
    assert_int_equal(take_chain(&rig.w, &rig.c), 6);
    assert_int_equal(kv_server_stats(rig.server).puts, 6);
    rig_close();
}

/* Without the word, or with the other one, nothing is stored and no room is held; the block may be
 * lent again. */
static void test_KVX_01_a_late_read_is_no_block(void **state)
{
    struct lending d;

    rig_open(0);
    lending_make(&d, 0, 7);
    lend(&d);
    hear(&rig.s, WIRE_STORE_TAKEN, 0);
    say_type(&rig.s, WIRE_STORE_DROP, 7, 0);
    lend(&d); /* follows on, so DROP was seen */
    hear(&rig.s, WIRE_STORE_TAKEN, 1);
    assert_null(nth(&rig.s, WIRE_STORE_DONE, 0));
    reconnect(); /* gone without a word */
    assert_int_equal(take_chain(&rig.w, &rig.c), 0);
    assert_int_equal(kv_server_stats(rig.server).puts, 0);
    lend(&d);
    hear(&rig.s, WIRE_STORE_TAKEN, 0);
    say_type(&rig.s, WIRE_STORE_KEEP, 7, 0);
    assert_int_equal(hear(&rig.s, WIRE_STORE_DONE, 0)->rc, BT_OK);
    assert_true(is_there());
    rig_close();
}

/* Memory that is not the one that was meant: the sample is of other bytes. */
static void test_other_memory_is_refused(void **state)
{
    struct lending d;

    rig_open(0);
    for (int layer = 0; layer < N_LAYERS; layer++) {
        lending_make(&d, 0, 10 + (uint64_t)layer);
        for (uint32_t p = 0; p < PAGES; p++) { /* of one layer alone */
            memset(kv_pool_page(rig.own.pool, layer, d.pages[p]), 0xee, PAGE_BYTES);
        }
        lend(&d);
        assert_int_equal(hear(&rig.s, WIRE_STORE_DONE, (uint32_t)layer)->rc, BT_E_CORRUPT);
    }
    assert_int_equal(kv_server_stats(rig.server).bad, N_LAYERS);
    assert_int_equal(take_chain(&rig.w, &rig.c), 0);
    rig_close();
}

/* A file that the lender does not have, that may shrink, or that ends before the last page. */
static void test_memory_that_cannot_be_seen(void **state)
{
    uint32_t n = 0;
    struct lending d;
    struct bt_net_file file;
    struct bt_mem_region small;

    rig_open(0);
    lending_make(&d, 0, 1);
    d.m.file_ino += 100000;
    lend(&d);
    assert_int_equal(hear(&rig.s, WIRE_STORE_DONE, n++)->rc, BT_E_UNSUPPORTED);
    assert_int_equal(bt_mem_host.alloc(4096, "small", &small, NULL), BT_OK);
    assert_true(bt_net_file_of(small.fd, &file));
    lending_make(&d, 0, 2);
    d.m.file_dev = file.dev;
    d.m.file_ino = file.ino;
    lend(&d);
    assert_int_equal(hear(&rig.s, WIRE_STORE_DONE, n++)->rc, BT_E_UNSUPPORTED);
    lending_make(&d, 0, 3);
    d.m.layer_stride = kv_pool_region(rig.own.pool)->bytes / N_LAYERS + PAGE_BYTES;
    d.pages[0] = (uint32_t)(d.m.layer_stride / PAGE_BYTES) - 1;
    lend(&d);
    assert_int_equal(hear(&rig.s, WIRE_STORE_DONE, n++)->rc, BT_E_UNSUPPORTED);
    assert_int_equal(take_chain(&rig.w, &rig.c), 0);
    lending_make(&d, 0, 4); /* it goes on for what is right */
    lend(&d);
    hear(&rig.s, WIRE_STORE_TAKEN, 0);
    bt_mem_host.free(&small);
    rig_close();
}

static void wrong_description(struct lending *d, int how)
{
    switch (how) {
    case 0:
        d->pages[1] = 64; /* the pool has 64 */
        break;
    case 1:
        d->pages[0] = UINT32_MAX;
        break;
    case 2:
        d->m.row_bytes = 0;
        break;
    case 3:
        d->m.row_bytes *= 2; /* rows reach beyond their page */
        d->m.page_stride /= 4;
        break;
    case 4:
        d->m.row_bytes--;
        break;
    case 5:
        d->m.row_bytes = UINT32_MAX;
        break;
    case 6:
        d->m.layer_stride = UINT64_MAX / 2;
        break;
    case 7:
        d->m.layer_stride = UINT64_MAX;
        d->m.page_stride = UINT64_MAX;
        break;
    case 8:
        d->m.page_stride = 0;
        break;
    case 9:
        d->m.layer_stride = 0;
        break;
    case 10:
        d->m.n_pages = WIRE_STORE_MAX_PAGES; /* more than are told */
        break;
    case 11:
        d->n_pages = 0;
        break;
    case 12:
        d->m.n_pages = 1; /* a head that does not begin where it should */
        break;
    case 13:
        d->m.n_pages = WIRE_STORE_MAX_PAGES + 1;
        break;
    default:
        d->m.page_stride = d->m.layer_stride + 1;
        break;
    }
}

static void test_descriptions_that_are_wrong(void **state)
{
    for (int how = 0; how < 15; how++) {
        struct lending d;

        if (how == 0) {
            rig_open(0);
        } else {
            reconnect();
        }
        lending_make(&d, 0, 7);
        wrong_description(&d, how);
        lend(&d);
        if (!eventually(is_closed, &rig.s)) {
            fail_msg("%d was not punished", how);
        }
        assert_null(nth(&rig.s, WIRE_STORE_TAKEN, 0));
    }
    reconnect();
    assert_int_equal(take_chain(&rig.w, &rig.c), 0);
    rig_close();
}

/* Words that nothing goes before, and a word that does not come. */
static void test_words_out_of_turn(void **state)
{
    static const enum wire_store_type words[] = {WIRE_STORE_KEEP, WIRE_STORE_TAKEN};
    struct lending d;

    rig_open(300 * BT_NS_PER_MS);
    say_type(&rig.s, WIRE_STORE_DROP, 7, 0); /* may cross the DONE of a put: nothing */
    for (size_t i = 0; i < BT_ARRAY_LEN(words); i++) {
        say_type(&rig.s, words[i], 7, 0);
        assert_true(eventually(is_closed, &rig.s));
        reconnect();
    }
    lending_make(&d, 0, 7);
    lend(&d);
    hear(&rig.s, WIRE_STORE_TAKEN, 0);
    assert_true(eventually(is_closed, &rig.s)); /* it lives, and holds room for too long */
    assert_int_equal(take_chain(&rig.w, &rig.c), 0);
    rig_close();
}

/* ---- a block server, and a side that puts with sums that follow ---- */

static void begin_flow(const struct lending *d, uint64_t req)
{
    char head[4096];

    kv_blob_encode(&d->meta, head);
    say(&rig.s,
        (struct wire_store){.type = WIRE_STORE_PUT,
                            .req = req,
                            .method = BT_NET_METHOD_MESSAGE,
                            .flags = WIRE_STORE_SUMS_LATER},
        (struct bt_str){head, kv_blob_head_bytes(&d->meta)});
}

/* A layer in two parts; its sum with the last one. */
static void flow_layer(const struct lending *d, uint64_t req, uint32_t layer, uint64_t wrong)
{
    size_t n = (size_t)d->meta.shape.layer_bytes, half = n / 2;
    char *p = malloc(n);
    struct wire_store m = {.type = WIRE_STORE_DATA, .req = req, .layer = layer};
    uint64_t sum = kv_blob_gather_sum(rig.own.pool, d->pages, BLOCK, (int)layer, p);

    say(&rig.s, m, (struct bt_str){p, half});
    m.offset = half;
    m.sum = sum ^ wrong;
    say(&rig.s, m, (struct bt_str){p + half, n - half});
    free(p);
}

/* Sums that come behind the bytes are what is stored; a wrong one, or DROP, and nothing is. */
static void test_sums_behind_the_bytes(void **state)
{
    struct lending d;

    rig_open(0);
    lending_make(&d, 0, 0);
    begin_flow(&d, 1);
    hear(&rig.s, WIRE_STORE_GO, 0);
    for (uint32_t l = 0; l < N_LAYERS; l++) {
        flow_layer(&d, 1, l, l == N_LAYERS - 1); /* the last one is wrong */
    }
    assert_int_equal(hear(&rig.s, WIRE_STORE_DONE, 0)->rc, BT_E_CORRUPT);
    begin_flow(&d, 2);
    hear(&rig.s, WIRE_STORE_GO, 1);
    flow_layer(&d, 2, 0, 0);
    say_type(&rig.s, WIRE_STORE_DROP, 2, 0);
    assert_int_equal(hear(&rig.s, WIRE_STORE_DONE, 1)->rc, BT_E_CANCELLED);
    assert_int_equal(take_chain(&rig.w, &rig.c), 0);
    begin_flow(&d, 3);
    hear(&rig.s, WIRE_STORE_GO, 2);
    for (uint32_t l = 0; l < N_LAYERS; l++) {
        flow_layer(&d, 3, l, 0);
    }
    assert_int_equal(hear(&rig.s, WIRE_STORE_DONE, 2)->rc, BT_OK);
    assert_true(is_there());
    assert_int_equal(kv_server_stats(rig.server).bad, 1);
    rig_close();
}

/* ---- a client, and a side that it lends to ---- */

#define N_OFFERS 6

struct offering {
    atomic_int rc;
    uint32_t pages[PAGES];
};

struct desk {
    struct world w;
    struct side s;
    struct kv_client *client;
    struct bt_blockmap *map;
    struct bt_members *members;
    struct chain c;
    struct offering offers[N_OFFERS + 1]; /* the last one makes the connection */
    struct kv_client_stats before;
};

static struct desk desk;

static void offered(void *arg, int rc)
{
    atomic_store(&((struct offering *)arg)->rc, rc);
}

static void offer(uint32_t i)
{
    struct kv_source *src = kv_client_source(desk.client);
    struct offering *f = &desk.offers[i];
    struct kv_offer o = {.chain = desk.c.c,
                         .n_tokens = BLOCK,
                         .pages = f->pages,
                         .pool = desk.w.pool,
                         .done = offered,
                         .arg = f};

    o.chain.n_blocks = i + 1;
    atomic_store(&f->rc, BT_PENDING);
    assert_int_equal(kv_pool_take(desk.w.pool, PAGES, KV_OWNER_SEQ, KV_PAGE_NONE, f->pages), BT_OK);
    assert_true(src->ops->offer(src, &o));
}

static bool is_given(void *arg)
{
    return atomic_load(&((struct offering *)arg)->rc) != BT_PENDING;
}

static bool is_back(uint32_t i)
{
    return is_given(&desk.offers[i]);
}

static int wait_pages(uint32_t i)
{
    if (!eventually(is_given, &desk.offers[i])) {
        fail_msg("the pages of offer %u are not given back", i);
    }
    return atomic_load(&desk.offers[i].rc);
}

static void forget(void *arg)
{
    desk.s.n_heard = 0;
}

/* A first offer, so that the others do not wait for a greeting. */
static void connect_client(void)
{
    const struct heard *h = NULL;
    uint64_t end = bt_deadline_ns(20 * BT_NS_PER_S);

    offer(N_OFFERS);
    while (!h && bt_now_ns() < end) {
        poll(NULL, 0, 1);
        h = nth(&desk.s, WIRE_STORE_LEND, 0);
        h = h ? h : nth(&desk.s, WIRE_STORE_PUT, 0);
    }
    assert_non_null(h);
    say_type(&desk.s, WIRE_STORE_DONE, h->req, BT_E_EXISTS);
    wait_pages(N_OFFERS);
    desk.before = kv_client_stats(desk.client);
    kv_links_call(&desk.s.links, forget, NULL);
}

/* Borrowed by the block index, which is never up. */
static struct bt_cluster_conf conf = {.name = (char *)(uintptr_t) "test",
                                      .redis_address = (char *)(uintptr_t) "",
                                      .redis_user = (char *)(uintptr_t) "",
                                      .redis_password = (char *)(uintptr_t) "",
                                      .redis_timeout_ns = BT_NS_PER_S,
                                      .lookup_timeout_ns = BT_NS_PER_S,
                                      .block_ttl_ns = 600 * BT_NS_PER_S};

static void desk_open(struct kv_client_cfg cc)
{
    struct bt_blockmap_cfg bc = {.conf = &conf};
    struct bt_member m = {.name = "s0", .incarnation = 4, .role = BT_ROLE_KVSTORE};
    struct bt_err err = {0};

    desk = (struct desk){0};
    side_open(&desk.s, "s0", NULL);
    snprintf(m.store_addr, sizeof(m.store_addr), "%s", bt_net_address(desk.s.links.net));
    desk.members = bt_members_make(&m, 1, NULL, 0);
    assert_non_null(desk.members);
    world_make(&desk.w, 64, 1);
    chain_make(&desk.w, &desk.c, 1, 0, 2, N_OFFERS + 1);
    assert_int_equal(bt_blockmap_create(&bc, &desk.map, NULL), BT_OK);
    cc.net.listen = "127.0.0.1:0";
    cc.node_name = "p0";
    cc.incarnation = 5;
    cc.replicas = 1;
    cc.silence_ns = SILENCE_NS;
    cc.shape = kv_blob_shape_of(kv_pool_layout(desk.w.pool), BLOCK);
    cc.blockmap = desk.map;
    if (kv_client_create(&cc, &desk.client, &err) != BT_OK) {
        fail_msg("%s", err.msg);
    }
    kv_client_set_members(desk.client, desk.members);
    connect_client();
}

static void desk_close(void)
{
    kv_client_destroy(desk.client);
    for (uint32_t i = 0; i <= N_OFFERS; i++) { /* whatever became of it */
        if (desk.offers[i].pages[0] != desk.offers[i].pages[1]) {
            assert_true(is_back(i));
            kv_pool_give(desk.w.pool, desk.offers[i].pages, PAGES, KV_OWNER_SEQ);
        }
    }
    bt_blockmap_destroy(desk.map);
    bt_members_unref(desk.members);
    world_free(&desk.w);
    kv_links_fini(&desk.s.links);
}

/* Pages are held until TAKEN and no longer; as much as may be lent at once, and no more. */
static void test_lent_until_taken(void **state)
{
    desk_open((struct kv_client_cfg){.lend_ns = 600 * BT_NS_PER_S, .lend_bytes = 2 * BLOB_BYTES});
    for (uint32_t i = 0; i < N_OFFERS; i++) {
        offer(i);
    }
    for (uint32_t i = 0; i < N_OFFERS; i++) {
        uint64_t req = hear(&desk.s, WIRE_STORE_LEND, i)->req;

        assert_null(nth(&desk.s, WIRE_STORE_LEND, i + 2));
        assert_false(is_back(i));
        say_type(&desk.s, WIRE_STORE_TAKEN, req, 0);
        assert_int_equal(hear(&desk.s, WIRE_STORE_KEEP, i)->req, req);
        assert_int_equal(wait_pages(i), BT_OK);
        say_type(&desk.s, WIRE_STORE_DONE, req, BT_OK);
    }
    while (kv_client_stats(desk.client).puts < N_OFFERS) {
        poll(NULL, 0, 1);
    }
    assert_int_equal(kv_client_stats(desk.client).lent - desk.before.lent, N_OFFERS);
    assert_null(nth(&desk.s, WIRE_STORE_PUT, 0));
    desk_close();
}

/* An owner that lives and does not read: the pages come back in time by way of the staging; when it
 * has read after all that counts for nothing, and the copy follows. */
static void test_KVX_01_lent_for_too_long(void **state)
{
    uint64_t req;

    desk_open((struct kv_client_cfg){.lend_ns = LEND_NS});
    offer(0);
    req = hear(&desk.s, WIRE_STORE_LEND, 0)->req;
    assert_int_equal(wait_pages(0), BT_OK);
    assert_int_equal(kv_client_stats(desk.client).called_back - desk.before.called_back, 1);
    offer(1); /* it is slow: not lent */
    assert_int_equal(wait_pages(1), BT_OK);
    hear(&desk.s, WIRE_STORE_PUT, 0);
    say_type(&desk.s, WIRE_STORE_TAKEN, req, 0);
    assert_int_equal(hear(&desk.s, WIRE_STORE_DROP, 0)->req, req);
    assert_int_equal(hear(&desk.s, WIRE_STORE_PUT, 1)->req, req);
    assert_null(nth(&desk.s, WIRE_STORE_KEEP, 0));
    assert_null(nth(&desk.s, WIRE_STORE_LEND, 1));
    offer(2); /* it has said something */
    hear(&desk.s, WIRE_STORE_LEND, 1);
    desk_close();
}

/* No room in the staging either: the block is given up, not the pages. */
static void test_nowhere_to_go(void **state)
{
    uint32_t n_ok = 0;

    desk_open((struct kv_client_cfg){.lend_ns = LEND_NS, .staging_bytes = 1});
    for (uint32_t i = 0; i < 4; i++) {
        offer(i);
    }
    hear(&desk.s, WIRE_STORE_LEND, 3);
    for (uint32_t i = 0; i < 4; i++) {
        n_ok += wait_pages(i) == BT_OK;
    }
    assert_int_equal(n_ok, 2); /* slots */
    for (uint32_t i = 0; nth(&desk.s, WIRE_STORE_LEND, i); i++) {
        say_type(&desk.s, WIRE_STORE_TAKEN, nth(&desk.s, WIRE_STORE_LEND, i)->req, 0);
        hear(&desk.s, WIRE_STORE_DROP, i);
    }
    assert_null(nth(&desk.s, WIRE_STORE_KEEP, 0));
    desk_close();
}

/* Refused: because it is there already, or because our memory cannot be read. */
static void test_lending_is_refused(void **state)
{
    uint64_t req;

    desk_open((struct kv_client_cfg){.lend_ns = 600 * BT_NS_PER_S});
    offer(0);
    say_type(&desk.s, WIRE_STORE_DONE, hear(&desk.s, WIRE_STORE_LEND, 0)->req, BT_E_EXISTS);
    assert_int_equal(wait_pages(0), BT_OK);
    offer(1);
    req = hear(&desk.s, WIRE_STORE_LEND, 1)->req;
    say_type(&desk.s, WIRE_STORE_DONE, req, BT_E_UNSUPPORTED);
    assert_int_equal(wait_pages(1), BT_OK);
    assert_int_equal(hear(&desk.s, WIRE_STORE_PUT, 0)->req, req);
    offer(2); /* never again */
    assert_int_equal(wait_pages(2), BT_OK);
    hear(&desk.s, WIRE_STORE_PUT, 1);
    assert_null(nth(&desk.s, WIRE_STORE_LEND, 2));
    desk_close();
}

/* The owner asks for a word on what it was not lent, or says that it is done before it has one. */
static void test_owners_that_are_wrong(void **state)
{
    for (int how = 0; how < 4; how++) {
        uint64_t req;

        desk_open((struct kv_client_cfg){.lend_ns = 600 * BT_NS_PER_S});
        offer(0);
        req = hear(&desk.s, WIRE_STORE_LEND, 0)->req;
        if (how == 0) {
            say_type(&desk.s, WIRE_STORE_TAKEN, req + 1, 0);
        } else if (how == 1) {
            say_type(&desk.s, WIRE_STORE_DONE, req, BT_OK);
        } else if (how == 2) {
            say_type(&desk.s, WIRE_STORE_GO, req, 0);
        } else {
            say_type(&desk.s, WIRE_STORE_TAKEN, req, 0);
            hear(&desk.s, WIRE_STORE_KEEP, 0);
            say_type(&desk.s, WIRE_STORE_TAKEN, req, 0);
        }
        assert_true(eventually(is_closed, &desk.s));
        assert_int_equal(wait_pages(0), how == 3 ? BT_OK : BT_E_PEER_LOST);
        assert_int_equal(kv_client_stats(desk.client).puts, 0);
        desk_close();
    }
}

/* The client ends with blocks lent, waiting and staged: all pages come back. */
static void test_the_client_ends(void **state)
{
    for (int how = 0; how < 2; how++) {
        desk_open((struct kv_client_cfg){.lend_ns = how ? LEND_NS : 600 * BT_NS_PER_S,
                                         .lend_bytes = 2 * BLOB_BYTES,
                                         .staging_bytes = 1});
        for (uint32_t i = 0; i < N_OFFERS; i++) {
            offer(i);
        }
        hear(&desk.s, WIRE_STORE_LEND, 1);
        if (how) {
            wait_pages(0);
        }
        desk_close();
    }
}

/* Over TCP blocks are sent from the pages, the sum of a layer behind it; the pages are held until
 * the last byte is out and no longer. */
static void test_sent_from_the_pages(void **state)
{
    desk_open((struct kv_client_cfg){.lend_ns = 600 * BT_NS_PER_S, .lend_bytes = 2 * BLOB_BYTES});
    for (uint32_t i = 0; i < N_OFFERS; i++) {
        offer(i);
    }
    for (uint32_t i = 0; i < N_OFFERS; i++) {
        const struct heard *h = hear(&desk.s, WIRE_STORE_PUT, i);

        assert_int_equal(h->flags, WIRE_STORE_SUMS_LATER);
        assert_null(nth(&desk.s, WIRE_STORE_PUT, i + 2)); /* no more is held at once */
        assert_false(is_back(i));
        say_type(&desk.s, WIRE_STORE_GO, h->req, 0);
        hear(&desk.s, WIRE_STORE_DATA, (i + 1) * N_LAYERS - 1);
        assert_int_equal(wait_pages(i), BT_OK);
        say_type(&desk.s, WIRE_STORE_DONE, h->req, BT_OK);
    }
    assert_int_equal(desk.s.right, N_OFFERS * N_LAYERS);
    while (kv_client_stats(desk.client).puts < N_OFFERS) {
        poll(NULL, 0, 1);
    }
    assert_int_equal(kv_client_stats(desk.client).lent, 0);
    desk_close();
}

/* An owner that does not say GO: the pages come back by way of the staging, from which the block is
 * sent when it does; where there is no slot it is dropped. */
static void test_a_flow_is_called_back(void **state)
{
    uint64_t req[4];
    uint32_t n_ok = 0, n_dropped = 0;

    desk_open((struct kv_client_cfg){.lend_ns = LEND_NS, .staging_bytes = 1});
    for (uint32_t i = 0; i < 4; i++) {
        offer(i);
    }
    for (uint32_t i = 0; i < 4; i++) {
        req[i] = hear(&desk.s, WIRE_STORE_PUT, i)->req;
    }
    for (uint32_t i = 0; i < 4; i++) {
        n_ok += wait_pages(i) == BT_OK;
        memset(kv_pool_page(desk.w.pool, 0, desk.offers[i].pages[0]), 0xee, PAGE_BYTES);
    }
    assert_int_equal(n_ok, 2); /* slots */
    assert_int_equal(hear(&desk.s, WIRE_STORE_DROP, 1)->type, WIRE_STORE_DROP);
    for (uint32_t i = 0; i < 4; i++) {
        bool dropped = false;

        for (uint32_t k = 0; nth(&desk.s, WIRE_STORE_DROP, k); k++) {
            dropped = dropped || nth(&desk.s, WIRE_STORE_DROP, k)->req == req[i];
        }
        n_dropped += dropped;
        if (dropped) {
            say_type(&desk.s, WIRE_STORE_DONE, req[i], BT_E_CANCELLED);
        } else {
            say_type(&desk.s, WIRE_STORE_GO, req[i], 0);
        }
    }
    assert_int_equal(n_dropped, 2);
    hear(&desk.s, WIRE_STORE_DATA, 2 * N_LAYERS - 1);
    assert_int_equal(desk.s.right, 2 * N_LAYERS);
    assert_false(is_closed(&desk.s));
    desk_close();
}

/* DONE before all of it was sent, or the end of the owner in the middle. */
static void test_flows_that_end_early(void **state)
{
    for (int how = 0; how < 3; how++) {
        uint64_t req;

        desk_open((struct kv_client_cfg){.lend_ns = 600 * BT_NS_PER_S});
        offer(0);
        req = hear(&desk.s, WIRE_STORE_PUT, 0)->req;
        say_type(&desk.s, WIRE_STORE_DONE, req, how == 0 ? BT_OK : BT_E_EXISTS);
        if (how == 2) {
            say_type(&desk.s, WIRE_STORE_DONE, req, BT_E_EXISTS); /* once more */
        }
        assert_int_equal(wait_pages(0), how == 0 ? BT_E_PEER_LOST : BT_OK);
        if (how != 1) {
            assert_true(eventually(is_closed, &desk.s));
        }
        assert_int_equal(kv_client_stats(desk.client).puts, 0);
        desk_close();
    }
}

static int force_message(void **state)
{
    side_method = "message";
    return 0;
}

static int force_nothing(void **state)
{
    side_method = NULL;
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_block_is_one_with_keep),
        cmocka_unit_test(test_several_at_once),
        cmocka_unit_test(test_KVX_01_a_late_read_is_no_block),
        cmocka_unit_test(test_other_memory_is_refused),
        cmocka_unit_test(test_memory_that_cannot_be_seen),
        cmocka_unit_test(test_descriptions_that_are_wrong),
        cmocka_unit_test(test_words_out_of_turn),
        cmocka_unit_test(test_lent_until_taken),
        cmocka_unit_test(test_KVX_01_lent_for_too_long),
        cmocka_unit_test(test_nowhere_to_go),
        cmocka_unit_test(test_lending_is_refused),
        cmocka_unit_test(test_owners_that_are_wrong),
        cmocka_unit_test(test_the_client_ends),
        cmocka_unit_test(test_sums_behind_the_bytes),
        cmocka_unit_test_setup_teardown(test_sent_from_the_pages, force_message, force_nothing),
        cmocka_unit_test_setup_teardown(test_a_flow_is_called_back, force_message, force_nothing),
        cmocka_unit_test_setup_teardown(test_flows_that_end_early, force_message, force_nothing),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
