/* batonctl cache: what is found instead of computed, who holds a prefix, and giving caches up. */
#include "deploy/ctl/show.h"

#include "common/conf/value.h"
#include "common/thr/time.h"
#include "proto/inspect.pb-c.h"
#include "proto/node.pb-c.h"

#include <stdlib.h>

#define MAX_PROMPT (8u << 20)

static int get_server(const struct ctl_args *a, Baton__V1__ServerInfo **ret)
{
    Baton__V1__GetServerRequest m = BATON__V1__GET_SERVER_REQUEST__INIT;
    struct ctl_ask ask = {.path = "/baton.v1.Baton/GetServer",
                          .request = &m.base,
                          .response = &baton__v1__server_info__descriptor,
                          .deadline_ns = bt_deadline_ns(a->timeout_ns)};
    ProtobufCMessage *got;
    int code = ctl_ask(a->router, &ask, &got);

    if (code == CTL_OK) {
        *ret = (Baton__V1__ServerInfo *)got;
    }
    return code;
}

/* --- rates ----------------------------------------------------------------------------------- */

static double percent(uint64_t part, uint64_t of)
{
    return of ? 100.0 * (double)part / (double)of : 0;
}

static void print_rates(const Baton__V1__Figures *f, const Baton__V1__ServerInfo *s)
{
    const Baton__V1__CacheInfo *c = s->cache;

    printf("prompt tokens %llu, found %llu (%.1f %%)\n", (unsigned long long)f->prompt_tokens,
           (unsigned long long)f->cached_tokens, percent(f->cached_tokens, f->prompt_tokens));
    printf("%-8s %14s %9s %14s\n", "TIER", "FOUND", "OF PROMPT", "EXPECTED");
    for (size_t i = 0; i < f->n_tier_tokens; i++) {
        uint64_t expected = !c       ? 0
                            : i == 0 ? c->expected_pool_tokens
                            : i == 1 ? c->expected_host_tokens
                            : i == 2 ? c->expected_disk_tokens
                                     : 0;

        printf("%-8s %14llu %8.1f%% %14llu\n", f->tier_tokens[i]->name,
               (unsigned long long)f->tier_tokens[i]->value,
               percent(f->tier_tokens[i]->value, f->prompt_tokens), (unsigned long long)expected);
    }
    printf("\n%-20s %-8s %12s %12s %12s %8s\n", "NODE", "ROLE", "POOL BLOCKS", "HOST", "DISK",
           "DRIFTS");
    for (size_t i = 0; i < s->n_nodes; i++) {
        const Baton__V1__NodeInfo *n = s->nodes[i];

        printf("%-20s %-8s %12llu %12llu %12llu %8llu\n", ctl_dash(n->name), n->role,
               (unsigned long long)n->blocks_pool, (unsigned long long)n->blocks_host,
               (unsigned long long)n->blocks_disk, (unsigned long long)n->cache_drifts);
    }
}

static int rates(const struct ctl_args *a)
{
    Baton__V1__GetFiguresRequest m = BATON__V1__GET_FIGURES_REQUEST__INIT;
    struct ctl_ask ask = {.path = "/baton.v1.Inspect/GetFigures",
                          .request = &m.base,
                          .response = &baton__v1__figures__descriptor,
                          .deadline_ns = bt_deadline_ns(a->timeout_ns)};
    struct bt_buf b = {0};
    struct bt_jsonw w = {.b = &b};
    Baton__V1__ServerInfo *s;
    ProtobufCMessage *got;
    int code = ctl_ask(a->router, &ask, &got);

    if (code != CTL_OK) {
        return code;
    }
    code = get_server(a, &s);
    if (code == CTL_OK && a->output == CTL_JSON) {
        bt_jw_open(&w, NULL, '{');
        ctl_put_message(&w, "figures", got);
        ctl_put_message(&w, "server", &s->base);
        bt_jw_close(&w, '}');
        code = ctl_print_buf(&w);
    } else if (code == CTL_OK) {
        print_rates((const void *)got, s);
    }
    if (code == CTL_OK) {
        baton__v1__server_info__free_unpacked(s, NULL);
    }
    protobuf_c_message_free_unpacked(got, NULL);
    return code;
}

/* --- find ------------------------------------------------------------------------------------ */

/* "1,2, 3" */
static int read_ids(const char *text, struct bt_ids *ids)
{
    while (*text) {
        size_t n = strcspn(text, ", \n");
        int64_t v;

        if (n > 0 && (bt_read_int((struct bt_str){text, n}, 0, INT32_MAX, &v) < 0 ||
                      bt_ids_push(ids, (int32_t)v) < 0)) {
            fprintf(stderr, "batonctl: not a token id: %.*s\n", (int)BT_MIN(n, (size_t)40), text);
            return CTL_USAGE;
        }
        text += n + (text[n] != '\0');
    }
    return CTL_OK;
}

static void print_holders(const Baton__V1__FindPrefixResponse *m)
{
    printf("%u tokens, %u full blocks of %u\n", m->prompt_tokens, m->prompt_blocks,
           m->block_tokens);
    if (m->n_holders == 0) {
        printf("no node has the first block\n");
        return;
    }
    printf("%-20s %-8s %10s %10s %10s\n", "NODE", "ROLE", "IN POOL", "+ HOST", "+ DISK");
    for (size_t i = 0; i < m->n_holders; i++) {
        const Baton__V1__PrefixHolder *h = m->holders[i];

        printf("%-20s %-8s %10u %10u %10u\n", h->node, h->role, h->pool_blocks, h->host_blocks,
               h->disk_blocks);
    }
}

static int ask_find(const struct ctl_args *a, const Baton__V1__FindPrefixRequest *m)
{
    struct ctl_ask ask = {.path = "/baton.v1.Inspect/FindPrefix",
                          .request = &m->base,
                          .response = &baton__v1__find_prefix_response__descriptor,
                          .deadline_ns = bt_deadline_ns(a->timeout_ns)};
    ProtobufCMessage *got;
    int code = ctl_ask(a->router, &ask, &got);

    if (code != CTL_OK) {
        return code;
    }
    if (a->output == CTL_JSON) {
        code = ctl_print_json(got);
    } else {
        print_holders((const void *)got);
    }
    protobuf_c_message_free_unpacked(got, NULL);
    return code;
}

static int find(const struct ctl_args *a)
{
    Baton__V1__FindPrefixRequest m = BATON__V1__FIND_PREFIX_REQUEST__INIT;
    Baton__V1__ChatMessage message = BATON__V1__CHAT_MESSAGE__INIT, *messages[] = {&message};
    Baton__V1__TokenIds tokens = BATON__V1__TOKEN_IDS__INIT;
    Baton__V1__Chat chat = BATON__V1__CHAT__INIT;
    int n_given = (a->text != NULL) + (a->ids != NULL) + (a->prompt_file != NULL);
    struct bt_ids ids = {0};
    char *file = NULL;
    int code = CTL_OK;
    size_t n;

    if (n_given != 1 || a->n_words > 1) {
        fputs("batonctl: cache find takes one of --text, --ids and --prompt-file\n", stderr);
        return CTL_USAGE;
    }
    if (a->salt) {
        m.cache_salt = (char *)(uintptr_t)a->salt;
    }
    if (a->ids) {
        code = read_ids(a->ids, &ids);
        tokens.n_ids = ids.n;
        tokens.ids = ids.p;
        m.input_case = BATON__V1__FIND_PREFIX_REQUEST__INPUT_TOKENS;
        m.tokens = &tokens;
    } else {
        file = a->text ? strdup(a->text) : ctl_read_file(a->prompt_file, MAX_PROMPT, &n);
        code = file ? CTL_OK : CTL_FAILED;
        message.role = (char *)(uintptr_t) "user";
        message.content = file;
        chat.n_messages = 1;
        chat.messages = messages;
        if (a->chat) {
            m.input_case = BATON__V1__FIND_PREFIX_REQUEST__INPUT_CHAT;
            m.chat = &chat;
        } else {
            m.input_case = BATON__V1__FIND_PREFIX_REQUEST__INPUT_TEXT;
            m.text = file;
        }
    }
    if (code == CTL_OK) {
        code = ask_find(a, &m);
    }
    bt_ids_fini(&ids);
    free(file);
    return code;
}

/* --- flush ----------------------------------------------------------------------------------- */

struct flushed {
    const char *node;
    int code;
    Baton__V1__FlushCacheResponse *m; /* NULL = failed */
};

static bool wanted(const struct ctl_args *a, const char *node)
{
    bool any = a->n_words == 1;

    for (size_t i = 1; i < a->n_words; i++) {
        any = any || strcmp(a->words[i], node) == 0;
    }
    return any;
}

static void flush_one(const struct ctl_args *a, const Baton__V1__NodeInfo *n, struct flushed *f)
{
    Baton__V1__FlushCacheRequest m = BATON__V1__FLUSH_CACHE_REQUEST__INIT;
    struct ctl_ask ask = {.path = "/baton.v1.Node/FlushCache",
                          .peer = CTL_NODE,
                          .request = &m.base,
                          .response = &baton__v1__flush_cache_response__descriptor,
                          .deadline_ns = bt_deadline_ns(a->timeout_ns)};
    ProtobufCMessage *got;

    m.pool = a->tier == CTL_TIER_ALL || a->tier == CTL_TIER_POOL;
    m.host = a->tier == CTL_TIER_ALL || a->tier == CTL_TIER_HOST;
    m.disk = a->tier == CTL_TIER_ALL || a->tier == CTL_TIER_DISK;
    m.dry_run = a->dry_run;
    f->node = n->name;
    f->code = ctl_ask(n->address, &ask, &got);
    f->m = f->code == CTL_OK ? (Baton__V1__FlushCacheResponse *)got : NULL;
}

static int print_flushed(const struct ctl_args *a, const struct flushed *f, size_t n)
{
    struct bt_buf b = {0};
    struct bt_jsonw w = {.b = &b};

    if (a->output == CTL_TABLE) {
        printf("%-20s %12s %12s %12s\n", a->dry_run ? "NODE (would go)" : "NODE", "POOL PAGES",
               "HOST BLOCKS", "DISK BLOCKS");
        for (size_t i = 0; i < n; i++) {
            if (f[i].m) {
                printf("%-20s %12u %12llu %12llu\n", f[i].node, f[i].m->pool_pages,
                       (unsigned long long)f[i].m->host_blocks,
                       (unsigned long long)f[i].m->disk_blocks);
            } else {
                printf("%-20s failed\n", f[i].node);
            }
        }
        return CTL_OK;
    }
    bt_jw_open(&w, NULL, '{');
    bt_jw_bool(&w, "dry_run", a->dry_run);
    bt_jw_open(&w, "nodes", '[');
    for (size_t i = 0; i < n; i++) {
        bt_jw_open(&w, NULL, '{');
        bt_jw_str(&w, "node", f[i].node);
        bt_jw_bool(&w, "ok", f[i].m != NULL);
        if (f[i].m) {
            ctl_put_message(&w, "flushed", &f[i].m->base);
        }
        bt_jw_close(&w, '}');
    }
    bt_jw_close(&w, ']');
    bt_jw_close(&w, '}');
    return ctl_print_buf(&w);
}

static int check_names(const struct ctl_args *a, const Baton__V1__ServerInfo *s)
{
    for (size_t k = 1; k < a->n_words; k++) {
        bool found = false;

        for (size_t i = 0; i < s->n_nodes; i++) {
            found = found || strcmp(s->nodes[i]->name, a->words[k]) == 0;
        }
        if (!found) {
            fprintf(stderr, "batonctl: the router knows no node %s\n", a->words[k]);
            return CTL_NOT_FOUND;
        }
    }
    return CTL_OK;
}

/* Every node is asked, whatever becomes of the others; the first failure is the exit code. */
static int flush(const struct ctl_args *a)
{
    Baton__V1__ServerInfo *s;
    struct flushed *f;
    size_t n = 0;
    int code = get_server(a, &s), rc;

    if (code != CTL_OK) {
        return code;
    }
    code = check_names(a, s);
    f = calloc(s->n_nodes + 1, sizeof(*f));
    for (size_t i = 0; code == CTL_OK && f && i < s->n_nodes; i++) {
        const Baton__V1__NodeInfo *node = s->nodes[i];
        bool is_store = strcmp(node->role, "kvstore") == 0 || strcmp(node->role, "store") == 0;

        if (node->name[0] && wanted(a, node->name) && !(is_store && a->n_words == 1)) {
            flush_one(a, node, &f[n++]);
        }
    }
    if (code == CTL_OK) {
        code = print_flushed(a, f, n);
        for (size_t i = 0; i < n; i++) {
            rc = f[i].code == CTL_OK ? CTL_OK : n > 1 ? CTL_FAILED : f[i].code;
            code = code == CTL_OK ? rc : code;
        }
    }
    for (size_t i = 0; i < n; i++) {
        if (f[i].m) {
            baton__v1__flush_cache_response__free_unpacked(f[i].m, NULL);
        }
    }
    free(f);
    baton__v1__server_info__free_unpacked(s, NULL);
    return code;
}

int ctl_cache(const struct ctl_args *a)
{
    const char *what = a->n_words > 0 ? a->words[0] : "rates";

    if (strcmp(what, "rates") == 0 && a->n_words <= 1) {
        return rates(a);
    }
    if (strcmp(what, "find") == 0) {
        return find(a);
    }
    if (strcmp(what, "flush") == 0) {
        return flush(a);
    }
    fprintf(stderr, "batonctl: cache %s: there is rates, find and flush\n", what);
    return CTL_USAGE;
}
