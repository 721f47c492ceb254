/* What ops have cost, without the types of the op table, for those who only tell it. Any thread. */
#include "kernels/core/profile.h"
#include "kernels/engine/engine.h"

_Static_assert(KN_OP_COUNT <= KN_ENGINE_OPS_MAX, "every op is told");

size_t kn_engine_ops(struct kn_engine_op ret[KN_ENGINE_OPS_MAX])
{
    struct kn_op_count counts[KN_OP_COUNT];
    size_t n = 0;

    kn_profile_read(counts);
    for (int i = 0; i < KN_OP_COUNT; i++) {
        const struct kn_op_count *c = &counts[i];

        if (c->calls > 0) {
            ret[n++] = (struct kn_engine_op){
                kn_op_name((enum kn_op)i), c->calls, c->ns, c->limit_ns, c->bytes, c->operations};
        }
    }
    return n;
}
