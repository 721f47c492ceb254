/* What nodes tell of the cost of their ops, kept for /metrics. Names come from outside: they become
 * labels, so they are checked and bounded. Loop thread. */
#include "router/router_int.h"

static bool good_name(const char *s)
{
    size_t n = strspn(s, "abcdefghijklmnopqrstuvwxyz0123456789_");

    return n > 0 && n < sizeof(((struct rt_op *)NULL)->name) && s[n] == '\0';
}

static struct rt_op *op_named(struct rt_target *t, const char *name)
{
    for (unsigned i = 0; i < t->n_ops; i++) {
        if (strcmp(t->ops[i].name, name) == 0) {
            return &t->ops[i];
        }
    }
    if (t->n_ops == RT_OPS_MAX || !good_name(name)) {
        return NULL;
    }
    memcpy(t->ops[t->n_ops].name, name, strlen(name) + 1);
    return &t->ops[t->n_ops++];
}

void rt_ops_load(struct rt_target *t, const Baton__V1__NodeLoad *l)
{
    for (size_t i = 0; i < l->n_ops; i++) {
        const Baton__V1__OpCount *m = l->ops[i];
        struct rt_op *op = op_named(t, m->op);

        if (op) {
            op->calls = m->calls;
            op->us = m->us;
            op->limit_us = m->limit_us;
            op->bytes = m->bytes;
            op->operations = m->operations;
        }
    }
}
