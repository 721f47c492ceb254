/* See fair.h. The queue is one list in the order of arrival and is searched whole for the next one:
 * it is bounded, and a search costs less than the look-up that follows. */
#include "router/fair.h"

#include "common/base/buf.h"

#include <stdio.h>
#include <stdlib.h>

struct rt_tenant {
    struct bt_list link;
    char name[RT_FAIR_TENANT_MAX];
    double weight;
    double finish; /* virtual time at which what it has queued so far is served */
    size_t n_queued, n_running;
    bool named; /* in the configuration: stays */
};

struct rt_fair {
    struct rt_fair_cfg cfg;
    struct bt_list items;   /* queued, oldest first */
    struct bt_list tenants; /* with something here, or named */
    double now;             /* virtual time: the start tag of what was started last */
    double queued_s;
    size_t n_queued;
};

static struct rt_tenant *add_tenant(struct rt_fair *f, const char *name)
{
    struct rt_tenant *t = bt_calloc(1, sizeof(*t));

    if (t) {
        snprintf(t->name, sizeof(t->name), "%.63s", name);
        t->weight = 1;
        t->finish = f->now;
        bt_list_push_back(&f->tenants, &t->link);
    }
    return t;
}

static int read_weight(struct rt_fair *f, const char *text, size_t n, struct bt_err *err)
{
    char row[RT_FAIR_TENANT_MAX + 32], *eq, *end;
    struct rt_tenant *t;
    double w;

    snprintf(row, sizeof(row), "%.*s", (int)n, text);
    eq = strchr(row, '=');
    w = eq ? strtod(eq + 1, &end) : 0;
    if (!eq || eq == row || eq - row >= RT_FAIR_TENANT_MAX || *end || !(w >= 0.01 && w <= 100)) {
        return BT_FAIL(err, BT_E_CONFIG,
                       "admission.weights: \"%.80s\" is not name=weight with 0.01 to 100", row);
    }
    *eq = '\0';
    t = add_tenant(f, row);
    if (!t) {
        return BT_FAIL(err, BT_E_NOMEM, "no memory for tenants");
    }
    t->weight = w;
    t->named = true;
    return BT_OK;
}

int rt_fair_create(const struct rt_fair_cfg *cfg, struct rt_fair **ret_fair, struct bt_err *err)
{
    struct rt_fair *f = bt_calloc(1, sizeof(*f));
    const char *p = cfg->weights;
    int rc = BT_OK;

    if (!f) {
        return BT_FAIL(err, BT_E_NOMEM, "no memory for the queue");
    }
    f->cfg = *cfg;
    f->cfg.weights = NULL;
    bt_list_init(&f->items);
    bt_list_init(&f->tenants);
    while (rc == BT_OK && p && *p) {
        size_t n = strcspn(p, ",");

        rc = read_weight(f, p, n, err);
        p += n + (p[n] == ',');
    }
    if (rc < 0) {
        rt_fair_destroy(f);
        return rc;
    }
    *ret_fair = f;
    return BT_OK;
}

void rt_fair_destroy(struct rt_fair *f)
{
    struct bt_list *it;

    if (!f) {
        return;
    }
    BT_BUG_ON(f->n_queued > 0);
    while ((it = bt_list_pop_front(&f->tenants))) {
        free(BT_LIST_ENTRY(it, struct rt_tenant, link));
    }
    free(f);
}

static struct rt_tenant *tenant_of(struct rt_fair *f, const char *name)
{
    bt_list_for_each (it, &f->tenants) {
        struct rt_tenant *t = BT_LIST_ENTRY(it, struct rt_tenant, link);

        if (strcmp(t->name, name) == 0) {
            return t;
        }
    }
    return add_tenant(f, name);
}

static void leave(struct rt_tenant *t)
{
    if (t->n_queued == 0 && t->n_running == 0 && !t->named) {
        bt_list_remove(&t->link);
        free(t);
    }
}

int rt_fair_push(struct rt_fair *f,
                 struct rt_fair_item *it,
                 const char *tenant,
                 uint64_t now_ns,
                 struct bt_err *err)
{
    struct rt_tenant *t;

    BT_BUG_ON(it->tenant);
    if (f->n_queued >= f->cfg.max_queued) {
        return BT_FAIL(err, BT_E_EXHAUSTED, "%zu requests are queued, no more are taken",
                       f->n_queued);
    }
    t = tenant_of(f, tenant);
    if (!t) {
        return BT_FAIL(err, BT_E_NOMEM, "no memory for a tenant");
    }
    if (f->cfg.tenant_max_queued > 0 && t->n_queued >= f->cfg.tenant_max_queued) {
        return BT_FAIL(err, BT_E_EXHAUSTED, "%zu requests of %s are queued, no more are taken",
                       t->n_queued, t->name[0] ? t->name : "the default tenant");
    }
    it->tenant = t;
    it->running = false;
    it->queued_ns = now_ns;
    it->tag = BT_MAX(f->now, t->finish);
    t->finish = it->tag + it->cost_s / t->weight;
    t->n_queued++;
    f->n_queued++;
    f->queued_s += it->cost_s;
    bt_list_push_back(&f->items, &it->link);
    return BT_OK;
}

/* Smaller is sooner. */
static double rank(const struct rt_fair_item *it, uint64_t now_ns)
{
    double waited = now_ns > it->queued_ns ? (double)(now_ns - it->queued_ns) / 1e9 : 0;

    return it->tag - it->priority * RT_FAIR_PRIORITY_S - waited;
}

struct rt_fair_item *rt_fair_next(const struct rt_fair *f, uint64_t now_ns)
{
    struct rt_fair_item *best = NULL;

    bt_list_for_each (l, &f->items) {
        struct rt_fair_item *it = BT_LIST_ENTRY(l, struct rt_fair_item, link);
        size_t most = f->cfg.tenant_max_running;

        if ((most == 0 || it->tenant->n_running < most) &&
            (!best || rank(it, now_ns) < rank(best, now_ns))) {
            best = it;
        }
    }
    return best;
}

static void unqueue(struct rt_fair *f, struct rt_fair_item *it)
{
    bt_list_remove(&it->link);
    it->tenant->n_queued--;
    f->n_queued--;
    f->queued_s = f->n_queued ? f->queued_s - it->cost_s : 0; /* no rounding stays */
}

void rt_fair_start(struct rt_fair *f, struct rt_fair_item *it)
{
    BT_BUG_ON(!it->tenant || it->running);
    unqueue(f, it);
    it->running = true;
    it->tenant->n_running++;
    f->now = BT_MAX(f->now, it->tag);
}

void rt_fair_end(struct rt_fair *f, struct rt_fair_item *it)
{
    struct rt_tenant *t = it->tenant;

    if (!t) {
        return;
    }
    if (it->running) {
        t->n_running--;
    } else {
        unqueue(f, it);
        t->finish -= it->cost_s / t->weight; /* it was not served */
    }
    it->tenant = NULL;
    leave(t);
}

size_t rt_fair_queued(const struct rt_fair *f)
{
    return f->n_queued;
}

double rt_fair_queued_s(const struct rt_fair *f)
{
    return f->queued_s;
}

double rt_fair_oldest_s(const struct rt_fair *f, uint64_t now_ns)
{
    const struct rt_fair_item *it;

    if (bt_list_empty(&f->items)) {
        return 0;
    }
    it = BT_LIST_ENTRY(f->items.next, const struct rt_fair_item, link);
    return now_ns > it->queued_ns ? (double)(now_ns - it->queued_ns) / 1e9 : 0;
}
