/* Where the time of a pass goes: time, bytes and operations of every op.
 *
 * An op table can be wrapped so that each call is counted, whatever the back end. Bytes are those
 * that a call must move at least (weights, KV and activations once), operations those of its
 * products, counted as two a multiply-add; both follow from the arguments alone. */
#ifndef KN_CORE_PROFILE_H
#define KN_CORE_PROFILE_H

#include "kernels/core/ops.h"

struct kn_op_count {
    uint64_t calls;
    uint64_t ns;
    uint64_t bytes;
    uint64_t operations;
    uint64_t limit_ns; /* see kn_profile_set_rates */
};

/* Models created from now on count. Main thread, before they are created. */
void kn_profile_enable(void);
/* `ops` itself, or the wrapped table when counting is enabled; one back end a process then. */
const struct kn_ops *kn_profile_wrap(const struct kn_ops *ops);
/* Rates of this machine: from now on each call adds to limit_ns the longer of its bytes over one
 * and its operations over the other. Before the first call, or on the thread that calls. */
void kn_profile_set_rates(double bytes_per_s, double operations_per_s);
bool kn_profile_enabled(void);
/* Counts so far. Any thread; fields of one op may be a call apart. */
void kn_profile_read(struct kn_op_count ret[KN_OP_COUNT]);

#endif
