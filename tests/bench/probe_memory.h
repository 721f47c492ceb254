/* What benchmarks of copies share: memory as a running node has it, and the plain copy beside it.
 */
#ifndef BT_TESTS_BENCH_PROBE_MEMORY_H
#define BT_TESTS_BENCH_PROBE_MEMORY_H

#include "common/mem/mem.h"

/* Touches a region as nodes do after their start, and waits for the end of it. */
void probe_warm(const struct bt_mem_region *r);

/* A plain copy of memory as malloc gives it. */
struct probe_copy {
    char *from, *to;
    size_t bytes;
};

int probe_copy_open(struct probe_copy *c, size_t bytes); /* BT_OK, BT_E_NOMEM */
/* The best of a few in a row. */
double probe_copy_gb_per_s(const struct probe_copy *c);
void probe_copy_close(struct probe_copy *c);

#endif
