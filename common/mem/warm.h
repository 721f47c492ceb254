/* Memory touched before anybody needs it.
 *
 * Pages of a pool that nobody has written to yet cost a fault each, in the middle of the first
 * request that wants them: a quarter of the time of a short turn whose history comes from another
 * node. A thread that rests most of the time faults them in while the node waits, as huge pages
 * where the kernel makes them. What is in the memory does not change, whoever writes to it
 * meanwhile. */
#ifndef BT_MEM_WARM_H
#define BT_MEM_WARM_H

#include "common/mem/mem.h"

struct bt_warm;

/* Starts thread "warm", which touches the pages of [base, base + bytes): page-aligned, mapped until
 * bt_warm_stop. It ends early, and says so in the log, where the system's memory would get scarce:
 * less than an eighth of it available. BT_E_NOMEM, BT_E_SYS. */
int bt_warm_start(void *base, size_t bytes, struct bt_warm **ret_warm, struct bt_err *err)
    BT_MUST_USE;
/* bt_warm_start for a region that is a memory file: anonymous memory comes in huge pages by itself,
 * and nobody waits for its first use. Not worth failing for: a failure is logged. */
void bt_warm_region(const struct bt_mem_region *r, struct bt_warm **ret_warm);
/* It has come to its end, early or not. Any thread. */
bool bt_warm_done(const struct bt_warm *w);
/* Ends the thread within a piece of 2 MiB, and a rest of 20 ms at most. Any thread, once. NULL is
 * fine. */
void bt_warm_stop(struct bt_warm *w);

/* The same at once, on the caller's thread: for what is small. */
void bt_warm_now(void *base, size_t bytes);

/* Bytes that the system can still give, and all it has, within the limit of the control group;
 * 0 = not known. Any thread. */
uint64_t bt_mem_available(uint64_t *ret_total);

#endif
