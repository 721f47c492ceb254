/* Named threads and the processors this process may really use. */
#ifndef BT_THR_THREAD_H
#define BT_THR_THREAD_H

#include "common/base/rc.h"

#include <pthread.h>

/* Starts fn(arg) on a thread called `name` (15 characters at most) with all signals blocked.
 * The caller joins it. */
int bt_thread_start(pthread_t *ret_thread,
                    const char *name,
                    void *(*fn)(void *),
                    void *arg,
                    struct bt_err *err) BT_MUST_USE;
/* The calling thread does what nobody waits for: from now on it takes little of a processor that
 * others want (10 is added to its nice value: a tenth of their share), and what is left otherwise.
 * There is no way back. */
void bt_thread_background(void);
/* Name of the calling thread, for logs; borrowed, static per thread. */
const char *bt_thread_name(void);

/* Processors usable by this process: min(affinity mask, cgroup CPU quota rounded down), at least 1.
 * Cgroup v1 and v2. */
int bt_cpus_usable(void);

#endif
