/* Test kit: a node with a pool and a handoff, prompts with random content, and the comparison of
 * what arrived, token by token. The test's thread plays the engine. */
#ifndef BT_TESTS_HANDOFF_NODE_H
#define BT_TESTS_HANDOFF_NODE_H

#include "kvstore/handoff/handoff.h"
#include "tests/unit/common/net/side.h"

#include <stdio.h>
#include <stdlib.h>

struct node {
    struct kv_pool *pool;
    struct kv_handoff *h;
    const struct kv_layout *l;
    uint64_t incarnation;
    char name[16];
};

struct node_opts {
    int n_layers, n_kv_heads, head_dim, page_tokens;
    enum kv_dtype dtype;
    uint32_t n_pages;
    const char *name, *transports, *method, *listen;
    uint64_t incarnation;
    uint8_t compat;
    uint64_t silence_ns, lease_ns;
    uint32_t max_open, wire_version;
    size_t max_inflight;
};

/* By default the loopback device. BATON_TEST_NET_LISTEN and BATON_TEST_NET_TRANSPORTS take all
 * nodes of these tests elsewhere, whatever a test says: how they run over RDMA. */
static inline const char *node_env(const char *name, const char *value)
{
    const char *env = getenv(name);

    return env && *env ? env : value;
}

static inline int node_open(struct node *n, const struct node_opts *o, struct bt_err *err)
{
    struct kv_layout l = {.n_layers = o->n_layers ? o->n_layers : 4,
                          .n_kv_heads = o->n_kv_heads ? o->n_kv_heads : 2,
                          .head_dim = o->head_dim ? o->head_dim : 32,
                          .page_tokens = o->page_tokens ? o->page_tokens : 16,
                          .dtype = o->dtype,
                          .n_pages = o->n_pages ? o->n_pages : 256};
    struct kv_handoff_cfg cfg = {
        .net = {.listen = o->listen ? o->listen : node_env("BATON_TEST_NET_LISTEN", "127.0.0.1:0"),
                .transports = node_env("BATON_TEST_NET_TRANSPORTS", o->transports),
                .allow_insecure = true,
                .method = o->method},
        .node_name = o->name,
        .incarnation = o->incarnation ? o->incarnation : 1,
        .silence_ns = o->silence_ns,
        .lease_ns = o->lease_ns,
        .max_open = o->max_open ? o->max_open : 64,
        .max_inflight_bytes = o->max_inflight,
        .wire_version = o->wire_version,
    };
    int rc;

    *n = (struct node){.incarnation = cfg.incarnation};
    snprintf(n->name, sizeof(n->name), "%s", o->name);
    cfg.compat[0] = o->compat;
    rc = kv_layout_init(&l, err);
    if (rc == BT_OK) {
        rc = kv_pool_create(&l, &bt_mem_host, "kv", &n->pool, err);
    }
    if (rc == BT_OK) {
        cfg.pool = n->pool;
        n->l = kv_pool_layout(n->pool);
        rc = kv_handoff_create(&cfg, &n->h, err);
    }
    return rc;
}

static inline void node_close(struct node *n)
{
    kv_handoff_destroy(n->h);
    kv_pool_destroy(n->pool); /* audits: every page must be back */
}

/* Random content, the same for the same seed whatever the page size. */
static inline uint8_t content(uint64_t seed, int layer, int kv_head, uint32_t token, size_t byte)
{
    uint64_t x = seed + (uint64_t)layer * 0x9e3779b97f4a7c15ull +
                 (uint64_t)kv_head * 0xbf58476d1ce4e5b9ull + token * 0x94d049bb133111ebull +
                 byte / 8;

    x ^= x >> 31;
    x *= 0xd6e8feb86659fd93ull;
    x ^= x >> 29;
    return (uint8_t)(x >> (byte % 8 * 8));
}

static inline uint8_t *
token_at(const struct node *n, const uint32_t *pages, int layer, int kv_head, uint32_t t)
{
    uint32_t tp = (uint32_t)n->l->page_tokens;
    size_t token = (size_t)n->l->head_dim * (n->l->dtype == KV_DTYPE_F32 ? 4 : 2);

    return (uint8_t *)kv_pool_page(n->pool, layer, pages[t / tp]) +
           ((size_t)kv_head * tp + t % tp) * token;
}

static inline size_t token_bytes(const struct node *n)
{
    return (size_t)n->l->head_dim * (n->l->dtype == KV_DTYPE_F32 ? 4 : 2);
}

static inline void fill_tokens(
    struct node *n, const uint32_t *pages, uint64_t seed, int layer, uint32_t t0, uint32_t t1)
{
    for (int kh = 0; kh < 2 * n->l->n_kv_heads; kh++) {
        for (uint32_t t = t0; t < t1; t++) {
            uint8_t *p = token_at(n, pages, layer, kh, t);

            for (size_t b = 0; b < token_bytes(n); b++) {
                p[b] = content(seed, layer, kh, t, b);
            }
        }
    }
}

/* Number of bytes that are not what `seed` says. */
static inline size_t
wrong_bytes(struct node *n, const uint32_t *pages, uint64_t seed, uint32_t tokens)
{
    size_t wrong = 0;

    for (int l = 0; l < n->l->n_layers; l++) {
        for (int kh = 0; kh < 2 * n->l->n_kv_heads; kh++) {
            for (uint32_t t = 0; t < tokens; t++) {
                const uint8_t *p = token_at(n, pages, l, kh, t);

                for (size_t b = 0; b < token_bytes(n); b++) {
                    wrong += p[b] != content(seed, l, kh, t, b);
                }
            }
        }
    }
    return wrong;
}

struct prompt {
    struct node *node;
    struct kv_handoff_id id;
    uint64_t seed;
    uint32_t tokens, n_pages, have; /* have: D holds these tokens and gives the pages behind */
    uint32_t *pages;
    struct kv_send *send;
    struct kv_recv *recv;
    struct kv_origin origin; /* where a relay gets it from */
    int ticketed, done, rc;  /* atomic: the net's thread writes them */
    char msg[232];
    struct kv_first first;
};

static inline void prompt_ticketed(void *arg)
{
    struct prompt *p = arg;

    INC(p->ticketed);
}

static inline void prompt_send_done(void *arg, int rc, const char *msg)
{
    struct prompt *p = arg;

    p->rc = rc;
    snprintf(p->msg, sizeof(p->msg), "%s", msg);
    INC(p->done);
}

static inline void
prompt_recv_done(void *arg, int rc, const char *msg, const struct kv_first *tokens)
{
    struct prompt *p = arg;

    if (tokens) {
        p->first = *tokens;
    }
    prompt_send_done(arg, rc, msg);
}

static inline bool
prompt_pages(struct prompt *p, struct node *n, uint64_t id, uint32_t tokens, enum kv_owner owner)
{
    *p = (struct prompt){.node = n,
                         .id = {id * 0x1234567, id},
                         .seed = id * 77,
                         .tokens = tokens,
                         .n_pages = kv_layout_pages_for(n->l, tokens)};
    p->pages = calloc(p->n_pages, sizeof(*p->pages));
    if (kv_pool_take(n->pool, p->n_pages, owner, KV_PAGE_NONE, p->pages) != BT_OK) {
        free(p->pages);
        p->pages = NULL;
        return false;
    }
    return true;
}

static inline int prompt_send(struct prompt *p)
{
    const struct kv_send_cfg cfg = {
        .id = p->id, .n_tokens = p->tokens, .events = {p, prompt_ticketed, prompt_send_done}};
    int rc = kv_send_create(p->node->h, &cfg, &p->send, NULL);

    if (rc == BT_OK) {
        kv_send_set_pages(p->send, 0, p->pages, p->n_pages);
    }
    return rc;
}

static inline int
prompt_recv(struct prompt *p, const char *name, uint64_t incarnation, const char *address)
{
    uint32_t first = p->have / (uint32_t)p->node->l->page_tokens;
    const struct kv_recv_cfg cfg = {.id = p->id,
                                    .peer_name = name,
                                    .peer_incarnation = incarnation,
                                    .peer_address = address,
                                    .origin = p->origin,
                                    .n_tokens = p->tokens,
                                    .n_have = p->have,
                                    .pages = p->pages + first,
                                    .n_pages = p->n_pages - first,
                                    .events = {p, prompt_recv_done}};

    return kv_recv_create(p->node->h, &cfg, &p->recv, NULL);
}

/* Computes tokens [from, to) layer by layer as an engine would. */
static inline void prompt_compute(struct prompt *p, uint32_t from, uint32_t to)
{
    for (int l = 0; l < p->node->l->n_layers; l++) {
        fill_tokens(p->node, p->pages, p->seed, l, from, to);
        kv_send_progress(p->send, from, to - from, l);
    }
}

static inline void prompt_finish(struct prompt *p)
{
    const struct kv_first first = {2, {(int32_t)p->seed, 42}};

    kv_send_finish(p->send, &first);
}

/* Back to the pool; done must have been called. */
static inline void prompt_free(struct prompt *p, enum kv_owner owner)
{
    if (p->send) {
        kv_send_release(p->send);
    }
    if (p->recv) {
        kv_recv_release(p->recv);
    }
    if (p->pages) {
        kv_pool_give(p->node->pool, p->pages, p->n_pages, owner);
        free(p->pages);
    }
}

#endif
