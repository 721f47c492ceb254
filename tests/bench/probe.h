/* Ceilings of this machine, measured in the same run as the figure they belong to, and the JSON
 * line that every benchmark prints. */
#ifndef BT_TESTS_BENCH_PROBE_H
#define BT_TESTS_BENCH_PROBE_H

#include "common/base/base.h"

/* Bytes a second that `threads` threads read together from a buffer of `bytes`, over and over, for
 * a tenth of a second. Call it before every run and take medians of both. Main thread. */
double probe_read_bytes_per_s(int threads, size_t bytes);

/* Multiply-add operations (counted as two) a second of `threads` threads in the widest instruction
 * that this processor has for 8-bit integers (VNNI), else for floats (FMA), from registers; a tenth
 * of a second. */
double probe_mac_ops_per_s(int threads, const char **ret_name);

double probe_median(double *values, int n);

/* One result. ceiling NULL = none. Prints a JSON object a line, or a line of text. */
struct probe_result {
    const char *bench, *name, *metric, *unit;
    double value;
    const char *ceiling;
    double ceiling_value;
    bool lower_is_better;
    const char *peer;              /* NULL = none */
    double peer_value, peer_ratio; /* above 1: we are better */
};
void probe_print(const struct probe_result *r, bool json);

#endif
