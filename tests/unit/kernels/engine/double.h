/* A device back end of the CPU's making: passes run on a thread of their own, two may be queued,
 * tokens are drawn there, and pages are its own memory with a mirror in the host's, as on a card.
 * What it computes is the CPU back end's bit for bit. */
#ifndef BT_TESTS_KERNELS_ENGINE_DOUBLE_H
#define BT_TESTS_KERNELS_ENGINE_DOUBLE_H

#include "common/file/model.h"
#include "kernels/core/device.h"

#include <stdatomic.h>

struct double_cfg {
    const struct bt_model_file *file; /* that of the engine; borrowed */
    uint32_t pass_us;                 /* a pass takes at least so long */
    uint64_t fail_at;                 /* the pass of this number, from 1 on, faults; 0 = none */
    int64_t no_draw_at; /* at this position of an answer nothing is drawn; < 0 = never */
};

/* The one device of this process, for engines created from now on. */
const struct kn_device_ops *double_use(const struct double_cfg *cfg);

/* Since double_use. */
struct double_seen {
    atomic_ullong passes;
    atomic_ullong queued_behind; /* that were queued while another one was not done */
    atomic_uint most_queued;
};
extern struct double_seen double_seen;

#endif
