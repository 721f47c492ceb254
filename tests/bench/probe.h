/* Medians, and the line that every benchmark prints, with the ceiling that was measured in the same
 * run. */
#ifndef BT_TESTS_BENCH_PROBE_H
#define BT_TESTS_BENCH_PROBE_H

#include "common/base/base.h"

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
