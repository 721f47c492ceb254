/* What the engine's ops have cost, into messages. Loop thread. */
#include "kernels/serve/serve_int.h"

size_t kn_ops_fill(struct kn_op_rows *buf)
{
    struct kn_engine_op ops[KN_ENGINE_OPS_MAX];
    size_t n = kn_engine_ops(ops);

    for (size_t i = 0; i < n; i++) {
        Baton__V1__OpCount *m = &buf->rows[i];

        baton__v1__op_count__init(m);
        m->op = (char *)(uintptr_t)ops[i].name;
        m->calls = ops[i].calls;
        m->us = ops[i].ns / 1000;
        m->bytes = ops[i].bytes;
        m->operations = ops[i].operations;
        m->limit_us = ops[i].limit_ns / 1000;
        buf->ptrs[i] = m;
    }
    return n;
}
