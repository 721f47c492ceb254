/* The engine with a tiny real model, host memory and disk: whatever lies where, and however slowly
 * it comes, every answer equals that of an engine without any of it, bit for bit. */
#include "tests/unit/kernels/engine/rig.h"

#include "kvstore/tier/tiers.h"

#include <unistd.h>

#define BLOCK   32
#define MAX_CTX 512
#define N_ASKS  10
#define N_LONG  6 /* more, with the head of ask 2 and much behind it */

static struct bt_model_file *model;
static struct rig plain; /* without reuse, one request at a time */
static int32_t want[N_ASKS + N_LONG][RIG_MAX_ANSWER];

struct ask {
    int32_t prompt[MAX_CTX];
    uint32_t n_prompt, max_tokens, seed;
};

struct node {
    struct rig rig;
    struct kv_tiers *tiers;
    uint64_t tag;
};

/* Prompts of all lengths around blocks, some of which begin alike; every third is sampled. */
static struct ask make_ask(uint32_t i)
{
    int32_t n_vocab = bt_model_config(model)->n_vocab;
    struct ask q = {.n_prompt = i < N_ASKS ? 90 + 31 * i : 440, .max_tokens = 40, .seed = i % 3};

    for (uint32_t k = 0; k < q.n_prompt; k++) {
        uint32_t family = i % 2 && k < 70 ? 0 : i + 1;

        family = i >= N_ASKS && k < 130 ? 3 : family;

        q.prompt[k] =
            (int32_t)(3 + (family * 7919 + k * k * 31 + k * 17) % (uint32_t)(n_vocab - 3));
    }
    return q;
}

static void submit_ask(struct rig *r, const struct ask *q, uint64_t tag)
{
    struct wire_sampling s;
    struct kn_submit_args a = {.tag = tag,
                               .prompt = q->prompt,
                               .n_prompt = q->n_prompt,
                               .sampling = &s,
                               .claim = tag,
                               .deadline_ns = BT_NEVER_NS};

    wire_sampling_defaults(&s);
    s.max_tokens = q->max_tokens;
    s.ignore_eos = true;
    if (q->seed) {
        s.temperature = 0.9f;
        s.repetition_penalty = 1.1f;
        s.seed = q->seed;
    }
    assert_int_equal(kn_engine_submit(r->engine, &a, NULL), BT_OK);
}

static void submit(struct rig *r, uint32_t i, uint64_t tag)
{
    struct ask q = make_ask(i);

    submit_ask(r, &q, tag);
}

static void check(const struct rig *r, uint64_t tag, uint32_t i)
{
    if (r->results[tag].rc < 0) {
        fail_msg("request %llu: %s", (unsigned long long)tag, r->results[tag].err_msg);
    }
    assert_int_equal(r->results[tag].n, make_ask(i).max_tokens);
    assert_memory_equal(r->results[tag].ids, want[i], r->results[tag].n * sizeof(int32_t));
}

static void node_open(struct node *n, struct rig_opts o, struct kv_tiers_conf conf)
{
    static char none[] = "";
    struct kv_tiers_cfg cfg = {.conf = &conf, .key_bits = o.key_bits};
    struct bt_err err = {0};

    memset(n, 0, sizeof(*n));
    o.block = BLOCK;
    o.max_ctx = MAX_CTX;
    rig_create(&n->rig, model, o);
    conf.disk_path = conf.disk_path ? conf.disk_path : none;
    conf.threads = 2;
    cfg.shape = kv_blob_shape_of(kv_pool_layout(kn_engine_pool(n->rig.engine)), BLOCK);
    if (kv_tiers_create(&cfg, &n->tiers, &err) < 0) {
        fail_msg("kv_tiers_create: %s", err.msg);
    }
    kn_engine_add_source(n->rig.engine, kv_tiers_source(n->tiers), true);
    rig_start(&n->rig, NULL);
}

static void node_close(struct node *n)
{
    assert_true(kn_engine_stop(n->rig.engine));
    assert_int_equal(kv_tiers_stats(n->tiers).n_pins, 0);
    assert_int_equal(kv_tiers_stats(n->tiers).n_loads, 0);
    kv_tiers_destroy(n->tiers);
    rig_destroy(&n->rig);
}

static void ask_one(struct node *n, uint32_t i)
{
    submit(&n->rig, i, n->tag);
    rig_wait(&n->rig, (uint32_t)++n->tag);
    check(&n->rig, n->tag - 1, i);
}

/* One after the other, twice: the pool holds little more than one of them. */
static void ask_all(struct node *n)
{
    for (int time = 0; time < 2; time++) {
        for (uint32_t i = 0; i < N_ASKS; i++) {
            ask_one(n, i);
        }
    }
}

static void test_from_host_memory(void **state)
{
    static const int pages[] = {8, 32}, budgets[] = {BLOCK - 1, 512}, threads[] = {1, 2};

    for (int k = 0; k < 8; k++) {
        struct rig_opts o = {threads[k & 1], pages[k >> 1 & 1], budgets[k >> 2 & 1], 8,
                             .always_bring = true};
        struct kn_engine_stats s;
        struct node n;

        o.n_pages = (uint32_t)(512 / o.page_tokens);
        node_open(&n, o, (struct kv_tiers_conf){.host_bytes = 64 << 20});
        ask_all(&n);
        s = kn_engine_stats(n.rig.engine);
        assert_true(s.tier_tokens[KV_TIER_HOST] > 4 * 2 * BLOCK);
        assert_int_equal(s.loads_short, 0);
        node_close(&n);
    }
}

/* So slowly that layers are waited for: the new part is computed behind them. */
static void test_slow_loads(void **state)
{
    static const uint64_t rates[] = {200 << 10, 4 << 20, 50 << 20};
    uint64_t overtakes = 0;

    for (size_t k = 0; k < 2 * BT_ARRAY_LEN(rates); k++) {
        struct node n;

        node_open(&n, (struct rig_opts){1, 8, 512, 8, 64, .always_bring = k % 2},
                  (struct kv_tiers_conf){.host_bytes = 64 << 20,
                                         .host_max_rate = rates[k / 2] * (k % 2 ? 20 : 1)});
        ask_all(&n);
        for (uint32_t i = 0; i < 3 * N_LONG; i++) {
            ask_one(&n, 9);
            ask_one(&n, N_ASKS + i % N_LONG);
        }
        overtakes += kn_engine_stats(n.rig.engine).overtakes;
        node_close(&n);
    }
    assert_true(overtakes > 0);
}

static char *make_folder(void)
{
    static char path[64];

    snprintf(path, sizeof(path), "/tmp/baton-engine-tiers.XXXXXX");
    assert_non_null(mkdtemp(path));
    return path;
}

static void remove_folder(const char *path)
{
    char command[128];

    snprintf(command, sizeof(command), "rm -rf %s", path);
    assert_int_equal(system(command), 0);
}

static void test_from_disk(void **state)
{
    struct kv_tiers_conf conf = {.disk_path = make_folder(), .disk_bytes = 256 << 20};
    struct rig_opts o = {1, 8, 64, 8, 64, .always_bring = true};
    struct node n;

    conf.host_bytes = 16 * 12288; /* a dozen blocks */
    for (int life = 0; life < 2; life++) {
        uint64_t end = bt_deadline_ns(RIG_WAIT_NS);

        node_open(&n, o, conf);
        ask_all(&n);
        do { /* blocks sink in the background */
            ask_all(&n);
        } while (kn_engine_stats(n.rig.engine).tier_tokens[KV_TIER_DISK] == 0 && bt_now_ns() < end);
        assert_true(kn_engine_stats(n.rig.engine).tier_tokens[KV_TIER_DISK] > 0);
        assert_int_equal(kv_tiers_stats(n.tiers).disk.bad, 0);
        assert_true(kn_engine_stop(n.rig.engine));
        kv_tiers_flush(n.tiers, bt_deadline_ns(10 * BT_NS_PER_S));
        node_close(&n);
    }
    remove_folder(conf.disk_path);
}

/* Many prompts that begin alike in twos, all different in the end. */
static struct ask make_crowd(uint32_t i)
{
    int32_t n_vocab = bt_model_config(model)->n_vocab;
    struct ask q = {.n_prompt = 4 * BLOCK + 1, .max_tokens = 3};

    for (uint32_t k = 0; k < q.n_prompt; k++) {
        uint32_t family = k < BLOCK ? i / 2 : i + 1000;

        q.prompt[k] =
            (int32_t)(3 + (family * 7919 + k * k * 31 + k * 17) % (uint32_t)(n_vocab - 3));
    }
    return q;
}

#define N_CROWD 120

static void ask_one_of_crowd(struct node *n, uint32_t i, uint64_t first)
{
    struct ask q = make_crowd(i);
    const struct rig_result *got = &n->rig.results[n->tag];

    submit_ask(&n->rig, &q, n->tag);
    rig_wait(&n->rig, (uint32_t)++n->tag);
    assert_int_equal(got->n, q.max_tokens);
    assert_memory_equal(got->ids, plain.results[first + i].ids, got->n * sizeof(int32_t));
}

/* Each once more when three others have come: pushed out of the pool, not yet of host memory. */
static void ask_crowd(struct node *n, uint64_t first)
{
    for (uint32_t i = 0; i < N_CROWD; i++) {
        ask_one_of_crowd(n, i, first);
        if (i >= 3) {
            ask_one_of_crowd(n, i - 3, first);
        }
    }
}

/* Keys of 8 bits in the pool, in host memory and on disk at once, and again after a restart with
 * what lies on disk: a collision is a miss wherever it is met, and no answer is another one's. */
static void test_PFX_01_collisions_in_every_tier(void **state)
{
    struct kv_tiers_conf conf = {.disk_path = make_folder(), .disk_bytes = 256 << 20};
    struct rig_opts o = {1, 8, 64, 8, 64, .key_bits = 8, .always_bring = true};
    const uint64_t first = plain.n_last;
    struct node n;

    for (uint32_t i = 0; i < N_CROWD; i++) {
        struct ask q = make_crowd(i);

        submit_ask(&plain, &q, first + i);
        rig_wait(&plain, (uint32_t)first + i + 1);
    }
    conf.host_bytes = 16 * 12288;
    for (int life = 0; life < 2; life++) {
        uint64_t end = bt_deadline_ns(RIG_WAIT_NS);
        struct kn_engine_stats s;

        node_open(&n, o, conf);
        do { /* blocks sink in the background */
            ask_crowd(&n, first);
            s = kn_engine_stats(n.rig.engine);
        } while ((s.tier_tokens[KV_TIER_DISK] == 0 || s.tier_tokens[KV_TIER_HOST] == 0) &&
                 n.tag + 2 * N_CROWD < RIG_MAX_TAGS && bt_now_ns() < end);
        assert_true(s.tier_tokens[KV_TIER_DISK] > 0 && s.tier_tokens[KV_TIER_HOST] > 0);
        assert_true(s.key_collisions > 20);
        assert_true(kv_tiers_stats(n.tiers).collisions > 100);
        assert_int_equal(kv_tiers_stats(n.tiers).disk.bad, 0);
        assert_true(kn_engine_stop(n.rig.engine));
        kv_tiers_flush(n.tiers, bt_deadline_ns(10 * BT_NS_PER_S));
        node_close(&n);
    }
    remove_folder(conf.disk_path);
}

/* Too many answers for the pool: swapped and resumed, not a bit is different. */
static void test_preempted(void **state)
{
    struct kn_engine_stats s;
    struct node n;

    node_open(&n, (struct rig_opts){2, 8, 64, 8, 72, .always_bring = true},
              (struct kv_tiers_conf){.host_bytes = 64 << 20});
    for (int round = 0; round < 3; round++) {
        for (uint32_t i = 0; i < N_ASKS; i++) {
            submit(&n.rig, i, n.tag++);
        }
    }
    rig_wait(&n.rig, (uint32_t)n.tag);
    for (uint64_t tag = 0; tag < n.tag; tag++) {
        check(&n.rig, tag, (uint32_t)tag % N_ASKS);
    }
    s = kn_engine_stats(n.rig.engine);
    assert_true(s.preemptions > 0 && s.swapped > 0 && s.resumed > 0);
    node_close(&n);
}

/* Cancelled at any moment: nothing stays pinned, no page is lost, what is left is right. */
static void test_TIER_06_cancelled(void **state)
{
    struct node n;
    uint32_t random = 1;

    node_open(&n, (struct rig_opts){1, 8, 64, 8, 72, .always_bring = true},
              (struct kv_tiers_conf){.host_bytes = 64 << 20, .host_max_rate = 20 << 20});
    for (int k = 0; k < 300; k++) {
        struct timespec pause = {.tv_nsec = 0};

        submit(&n.rig, (uint32_t)k % N_ASKS, n.tag++);
        random = random * 1664525u + 1013904223u;
        pause.tv_nsec = (long)(random >> 8) % 3000000;
        if (k % 3 != 2) {
            nanosleep(&pause, NULL);
            kn_engine_cancel(n.rig.engine, n.tag - 1);
        } else {
            rig_wait(&n.rig, (uint32_t)n.tag);
        }
    }
    rig_wait(&n.rig, (uint32_t)n.tag);
    for (uint64_t tag = 2; tag < n.tag; tag += 3) {
        check(&n.rig, tag, (uint32_t)tag % N_ASKS);
    }
    node_close(&n);
}

static int open_model(void **state)
{
    model = rig_model();
    rig_create(&plain, model, (struct rig_opts){1, 16, 512, 1, 64, .max_ctx = MAX_CTX});
    rig_start(&plain, NULL);
    for (uint32_t i = 0; i < N_ASKS + N_LONG; i++) {
        submit(&plain, i, i);
        rig_wait(&plain, i + 1);
        memcpy(want[i], plain.results[i].ids, sizeof(want[i]));
    }
    return 0;
}

static int close_model(void **state)
{
    assert_true(kn_engine_stop(plain.engine));
    rig_destroy(&plain);
    bt_model_close(model);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_from_host_memory),
        cmocka_unit_test(test_slow_loads),
        cmocka_unit_test(test_from_disk),
        cmocka_unit_test(test_PFX_01_collisions_in_every_tier),
        cmocka_unit_test(test_preempted),
        cmocka_unit_test(test_TIER_06_cancelled),
    };

    return cmocka_run_group_tests(tests, open_model, close_model);
}
