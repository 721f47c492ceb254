/* batonctl scale, flip: how many nodes of each role there are. What goes is emptied first: cordon,
 * wait, then stop, then the cordon is taken off, since its name may come again. */
#include "common/conf/value.h"
#include "common/thr/time.h"
#include "deploy/ctl/cluster.h"
#include "deploy/ctl/pools.h"

#include <string.h>

#define CLEANUP_NS (5 * BT_NS_PER_S)

static int wrong(const struct ctl_args *a, const char *what, const char *arg)
{
    fprintf(stderr, "batonctl: %s: %s\n", what, arg);
    return ctl_bad_usage(a->command);
}

/* "prefill=3" */
static int read_size(const struct ctl_args *a, const char *word, struct ctl_size *ret)
{
    const char *eq = strchr(word, '=');
    size_t n = eq ? (size_t)(eq - word) : 0;

    if (n == 0 || n >= sizeof(ret->role) ||
        bt_read_int(bt_str_of(eq + 1), 0, 100000, &ret->to) < 0) {
        return wrong(a, "not ROLE=N", word);
    }
    snprintf(ret->role, sizeof(ret->role), "%.*s", (int)n, word);
    ret->from = -1;
    return CTL_OK;
}

static void
tell(const struct ctl_args *a, const struct ctl_size *s, size_t n, const json_t *names, bool done)
{
    json_t *doc = json_pack("{s:b, s:b, s:o, s:O}", "dry_run", a->dry_run, "settled", done, "roles",
                            json_object(), "stopping", names);
    const json_t *v;
    size_t i;

    if (a->output == CTL_JSON) {
        for (i = 0; i < n; i++) {
            json_object_set_new(
                json_object_get(doc, "roles"), s[i].role,
                json_pack("{s:I, s:I}", "from", (json_int_t)s[i].from, "to", (json_int_t)s[i].to));
        }
        json_dumpf(doc, stdout, JSON_COMPACT);
        putchar('\n');
    } else {
        printf("%-16s %6s %6s\n", "ROLE", "FROM", "TO");
        for (i = 0; i < n; i++) {
            printf("%-16s %6lld %6lld\n", s[i].role, (long long)s[i].from, (long long)s[i].to);
        }
        json_array_foreach(names, i, v)
        {
            printf("%s %s\n", a->dry_run ? "would drain and stop" : "drained and stopped",
                   json_string_value(v));
        }
    }
    json_decref(doc);
}

/* Until the processes are as ordered and the router has taken note: what comes gets requests, what
 * has gone gets none. */
static int settle(
    struct ctl_pools *p, const struct ctl_size *s, size_t n, const json_t *gone, uint64_t deadline)
{
    json_t *there = json_array();
    int code = p->ops->settle(p, s, n, deadline);

    if (code == CTL_OK) {
        code = p->ops->members(p, s, n, there, deadline);
    }
    if (code == CTL_OK) {
        code = ctl_pools_known(p, there, gone, deadline);
    }
    json_decref(there);
    return code;
}

static int scale(struct ctl_pools *p, struct ctl_size *s, size_t n, uint64_t deadline)
{
    json_t *names = json_array(), *cordoned = json_array();
    int code = p->ops->plan(p, s, n, names, deadline);

    if (code != CTL_OK || p->a->dry_run) {
        goto out;
    }
    code = ctl_pools_drain(p, names, deadline, cordoned);
    if (code != CTL_OK) {
        fputs("batonctl: nothing was scaled\n", stderr);
        goto out;
    }
    code = p->ops->scale(p, s, n, deadline);
    if (code == CTL_OK && json_array_size(names) > 0) {
        code = p->ops->gone(p, names, deadline);
    }
    ctl_pools_uncordon(p, cordoned, bt_deadline_ns(CLEANUP_NS));
    if (code == CTL_OK && p->a->wait) {
        code = settle(p, s, n, names, deadline);
    }

out:
    if (code == CTL_OK) {
        tell(p->a, s, n, names, p->a->wait);
    }
    json_decref(names);
    json_decref(cordoned);
    return code;
}

int ctl_scale(const struct ctl_args *a)
{
    uint64_t deadline = bt_deadline_ns(a->timeout_ns);
    struct ctl_size sizes[CTL_MAX_WORDS];
    struct ctl_pools pools = {0};
    int code;

    for (size_t i = 0; i < a->n_words; i++) {
        code = read_size(a, a->words[i], &sizes[i]);
        if (code != CTL_OK) {
            return code;
        }
        for (size_t j = 0; j < i; j++) {
            if (strcmp(sizes[i].role, sizes[j].role) == 0) {
                return wrong(a, "given twice", sizes[i].role);
            }
        }
    }
    code = ctl_pools_open(a, deadline, &pools);
    if (code == CTL_OK) {
        code = scale(&pools, sizes, a->n_words, deadline);
    }
    ctl_pools_close(&pools);
    return code;
}

/* --- flip ------------------------------------------------------------------------------------ */

static int flip(struct ctl_pools *p, const char *node, const char *to, uint64_t deadline)
{
    json_t *names = json_pack("[s]", node), *cordoned = json_array();
    int code = p->ops->flip(p, node, to, true, deadline);

    if (code != CTL_OK || p->a->dry_run) {
        goto out;
    }
    code = ctl_pools_drain(p, names, deadline, cordoned);
    if (code != CTL_OK) {
        goto out;
    }
    code = p->ops->flip(p, node, to, false, deadline);
    if (code == CTL_OK) {
        code = p->ops->gone(p, names, deadline);
    }
    ctl_pools_uncordon(p, cordoned, bt_deadline_ns(CLEANUP_NS));
    if (code == CTL_OK && p->a->wait) {
        code = settle(p, NULL, 0, names, deadline);
    }

out:
    json_decref(names);
    json_decref(cordoned);
    return code;
}

int ctl_flip(const struct ctl_args *a)
{
    uint64_t deadline = bt_deadline_ns(a->timeout_ns);
    struct ctl_pools pools = {0};
    const char *node = a->words[0], *to = a->words[1];
    int code;

    if (strcmp(to, "prefill") != 0 && strcmp(to, "decode") != 0) {
        return wrong(a, "prefill or decode, not", to);
    }
    code = ctl_pools_open(a, deadline, &pools);
    if (code == CTL_OK) {
        code = flip(&pools, node, to, deadline);
    }
    ctl_pools_close(&pools);
    if (code == CTL_OK && a->output == CTL_JSON) {
        printf("{\"node\": \"%s\", \"to\": \"%s\", \"dry_run\": %s}\n", node, to,
               a->dry_run ? "true" : "false");
    } else if (code == CTL_OK) {
        printf("%s %s to %s\n", a->dry_run ? "would flip" : "flipped", node, to);
    }
    return code;
}
