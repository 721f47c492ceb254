/* What it costs that memory outlives its process: sealing a block as it is published (its bytes are
 * summed), adopting all of them at the start (keys are computed again), and checking a block's
 * bytes when it is first found. The ceiling of the sums is XXH3 over one piece of the same size,
 * measured in turn in the same run. With --json one object a line. */
#include "common/thr/time.h"
#include "kvstore/block/index.h"

#include <stdio.h>
#include <stdlib.h>
#include <xxhash.h>

#define BLOCK    128 /* tokens */
#define N_BLOCKS 64
#define CHAIN    16 /* blocks of a sequence */

struct shape {
    const char *name;
    int layers, heads, dim;
};

struct world {
    struct kv_layout layout;
    struct bt_mem_region pool_mem, ledger_mem;
    struct kv_pool *pool;
    struct kv_index *index;
    struct kv_ledger *ledger;
    struct kv_adopted adopted;
};

static void keep(struct bt_mem_region *r)
{
    r->base = NULL; /* the world's, for the next process */
}

static const struct bt_mem_ops kept = {.kind = BT_MEM_HOST, .name = "kept", .free = keep};

static void check(int rc, const struct bt_err *err)
{
    if (rc < 0) {
        fprintf(stderr, "%s\n", bt_err_msg(err, rc));
        exit(1);
    }
}

static void world_init(struct world *w, const struct shape *s)
{
    struct bt_err err = {0};

    *w = (struct world){.layout = {.n_layers = s->layers,
                                   .n_kv_heads = s->heads,
                                   .head_dim = s->dim,
                                   .page_tokens = 16,
                                   .dtype = KV_DTYPE_F16,
                                   .n_pages = N_BLOCKS * BLOCK / 16}};
    check(kv_layout_init(&w->layout, &err), &err);
    check(bt_mem_host.alloc(w->layout.bytes, "pool", &w->pool_mem, &err), &err);
    check(bt_mem_host.alloc(kv_ledger_bytes(&w->layout, BLOCK), "ledger", &w->ledger_mem, &err),
          &err);
    for (size_t i = 0; i < w->layout.bytes / 8; i++) {
        ((uint64_t *)w->pool_mem.base)[i] = i * 0x9e3779b97f4a7c15ull;
    }
}

/* Returns how long adoption took. */
static uint64_t world_open(struct world *w)
{
    struct kv_ledger_cfg lc = {.layout = &w->layout,
                               .block_tokens = BLOCK,
                               .pool_id = 1,
                               .incarnation = 1,
                               .pool = w->pool_mem.base,
                               .mem = w->ledger_mem.base,
                               .bytes = w->ledger_mem.bytes};
    struct bt_mem_region region = {&kept, w->pool_mem.base, w->pool_mem.bytes, -1};
    struct kv_index_cfg xc = {.block_tokens = BLOCK};
    struct bt_err err = {0};
    uint64_t start;

    check(kv_pool_create_in(&w->layout, &region, &w->pool, &err), &err);
    xc.pool = w->pool;
    check(kv_index_create(&xc, &w->index, &err), &err);
    start = bt_now_ns();
    check(kv_ledger_create(&lc, &w->ledger, &err), &err);
    kv_pool_set_ledger(w->pool, w->ledger);
    check(kv_index_adopt(w->index, w->ledger, &w->adopted, &err), &err);
    return bt_now_ns() - start;
}

static void world_close(struct world *w)
{
    kv_index_leave_ledger(w->index);
    kv_pool_set_ledger(w->pool, NULL);
    kv_index_destroy(w->index);
    kv_pool_destroy(w->pool);
    kv_ledger_destroy(w->ledger);
}

struct run {
    struct kv_chain chain;
    int32_t ids[CHAIN * BLOCK];
    struct kv_key keys[CHAIN];
    struct kv_block *blocks[CHAIN];
};

static void make_run(struct world *w, struct run *r, uint32_t number)
{
    r->chain = (struct kv_chain){.keys = r->keys, .ids = r->ids, .n_blocks = CHAIN};
    for (uint32_t i = 0; i < CHAIN * BLOCK; i++) {
        r->ids[i] = (int32_t)(number * 1000 + i);
    }
    for (uint32_t i = 0; i < CHAIN; i++) {
        kv_index_key(w->index, i ? &r->keys[i - 1] : &r->chain.root, r->ids + i * BLOCK,
                     &r->keys[i]);
    }
}

/* All blocks; returns the time in kv_index_publish. */
static uint64_t publish_all(struct world *w)
{
    static struct run r;
    uint64_t took = 0;

    for (uint32_t number = 0; number < N_BLOCKS / CHAIN; number++) {
        make_run(w, &r, number);
        for (uint32_t i = 0; i < CHAIN; i++) {
            struct kv_chain c = r.chain;
            uint32_t pages[BLOCK / 16];
            uint64_t start;

            c.n_blocks = i + 1;
            check(kv_pool_take(w->pool, BLOCK / 16, KV_OWNER_SEQ, KV_PAGE_NONE, pages), NULL);
            start = bt_now_ns();
            kv_index_publish(w->index, &c, i ? r.blocks[i - 1] : NULL, pages, &r.blocks[i]);
            took += bt_now_ns() - start;
        }
        kv_index_drop(w->index, r.blocks, CHAIN);
    }
    return took;
}

/* Finds all of them for the first time. */
static uint64_t find_all(struct world *w)
{
    static struct run r;
    uint64_t took = 0;

    for (uint32_t number = 0; number < N_BLOCKS / CHAIN; number++) {
        uint64_t start;

        make_run(w, &r, number);
        start = bt_now_ns();
        if (kv_index_match(w->index, &r.chain, r.blocks) != CHAIN) {
            fprintf(stderr, "a block is missing\n");
            exit(1);
        }
        took += bt_now_ns() - start;
    }
    return took;
}

static void print(bool json, const char *shape, const char *what, double us, double ceiling_us)
{
    printf(json
               ? "{\"bench\":\"ledger\",\"case\":\"%s\",\"metric\":\"%s\",\"value\":%.3f,"
                 "\"unit\":\"us_per_block\",\"ceiling\":\"xxh3 of one piece\","
                 "\"ceiling_value\":%.3f,\"ratio\":%.3f}\n"
               : "ledger  %-22s %-8s %8.1f us per block of 128 tokens (ceiling %.1f, ratio %.2f)\n",
           shape, what, us, ceiling_us, ceiling_us / us);
}

int main(int argc, char **argv)
{
    static const struct shape shapes[] = {
        {"135M, 30x3x64", 30, 3, 64},
        {"8B, 32x8x128", 32, 8, 128},
    };
    bool json = argc > 1 && strcmp(argv[1], "--json") == 0;

    for (size_t i = 0; i < BT_ARRAY_LEN(shapes); i++) {
        uint64_t start, linear, seal, adopt, find;
        struct world w;
        volatile uint64_t sink;

        world_init(&w, &shapes[i]);
        world_open(&w);
        start = bt_now_ns();
        sink = XXH3_64bits(w.pool_mem.base, w.layout.bytes);
        (void)sink;
        linear = bt_now_ns() - start;
        seal = publish_all(&w);
        world_close(&w);
        adopt = world_open(&w);
        if (w.adopted.n_blocks != N_BLOCKS) {
            fprintf(stderr, "%u blocks adopted\n", w.adopted.n_blocks);
            return 1;
        }
        find = find_all(&w);
        print(json, shapes[i].name, "seal", (double)seal / N_BLOCKS / 1e3,
              (double)linear / N_BLOCKS / 1e3);
        print(json, shapes[i].name, "check", (double)find / N_BLOCKS / 1e3,
              (double)linear / N_BLOCKS / 1e3);
        printf(json ? "{\"bench\":\"ledger\",\"case\":\"%s\",\"metric\":\"adopt\",\"value\":%.3f,"
                      "\"unit\":\"us_per_block\"}\n"
                    : "ledger  %-22s adopt    %8.1f us per block\n",
               shapes[i].name, (double)adopt / N_BLOCKS / 1e3);
        world_close(&w);
        bt_mem_host.free(&w.pool_mem);
        bt_mem_host.free(&w.ledger_mem);
    }
    return 0;
}
