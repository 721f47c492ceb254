#include "tests/bench/probe_memory.h"

#include "common/mem/warm.h"
#include "common/thr/time.h"

#include <poll.h>
#include <stdlib.h>
#include <string.h>

/* Loads and stores at equal places of their pages wait for each other: half a page apart. */
#define SKEW 2048
/* On some virtual machines memory that was idle for a second is slow when it is next used. */
#define TRIES 3

void probe_warm(const struct bt_mem_region *r)
{
    struct bt_warm *w = NULL;

    bt_warm_region(r, &w);
    while (w && !bt_warm_done(w)) {
        poll(NULL, 0, 5);
    }
    bt_warm_stop(w);
}

int probe_copy_open(struct probe_copy *c, size_t bytes)
{
    *c = (struct probe_copy){malloc(bytes), malloc(bytes + SKEW), bytes};
    if (!c->from || !c->to) {
        probe_copy_close(c);
        return BT_E_NOMEM;
    }
    memset(c->from, 1, bytes);
    memset(c->to, 2, bytes + SKEW);
    return BT_OK;
}

double probe_copy_gb_per_s(const struct probe_copy *c)
{
    double best = 0;

    for (int i = 0; i < TRIES; i++) {
        uint64_t start = bt_now_ns();

        memcpy(c->to + SKEW, c->from, c->bytes);
        __asm__ volatile("" ::"r"(c->to) : "memory");
        best = BT_MAX(best, (double)c->bytes / (double)(bt_now_ns() - start));
    }
    return best;
}

void probe_copy_close(struct probe_copy *c)
{
    free(c->from);
    free(c->to);
    *c = (struct probe_copy){0};
}
