/* Traces of requests for the replay tool: read, or refused with the line's number; requests are in
 * the order of their times and within their limits. First byte: odd = whole blocks alone. */
#include "router/sim/trace.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    char path[64];
    struct rt_sim_trace_cfg cfg = {.path = path,
                                   .most = 100,
                                   .divide = 2,
                                   .block_tokens = 256,
                                   .speedup = 1,
                                   .max_tokens = 1e5};
    struct rt_sim_trace t;
    struct bt_err err = {0};
    int fd = memfd_create("trace", 0);

    if (n == 0 || fd < 0 || write(fd, data + 1, n - 1) != (ssize_t)(n - 1)) {
        close(fd);
        return 0;
    }
    cfg.exact = data[0] % 2;
    snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
    if (rt_sim_trace_load(&cfg, &t, &err) == BT_OK) {
        for (size_t i = 0; i < t.n; i++) {
            if (t.r[i].n_tokens == 0 || t.r[i].n_tokens > 100000 || t.r[i].at_ns > INT64_MAX ||
                (i > 0 && t.r[i].at_ns < t.r[i - 1].at_ns)) {
                abort();
            }
        }
        rt_sim_trace_free(&t);
    } else if (!err.msg[0]) {
        abort();
    }
    close(fd);
    return 0;
}
