/* Medians, and the line that every benchmark prints. */
#include "tests/bench/probe.h"

#include <stdio.h>
#include <stdlib.h>

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

double probe_median(double *values, int n)
{
    qsort(values, (size_t)n, sizeof(*values), by_value);
    return n % 2 ? values[n / 2] : (values[n / 2 - 1] + values[n / 2]) / 2;
}

void probe_print(const struct probe_result *r, bool json)
{
    double ratio = !r->ceiling          ? 0
                   : r->lower_is_better ? r->ceiling_value / r->value
                                        : r->value / r->ceiling_value;

    if (!json) {
        printf("%s  %-24s %12.3f %s", r->bench, r->name, r->value, r->unit);
        if (r->ceiling) {
            printf("  (%s %.3f, ratio %.3f)", r->ceiling, r->ceiling_value, ratio);
        }
        if (r->peer) {
            printf("  (peer %.3f, ratio %.3f)", r->peer_value, r->peer_ratio);
        }
        printf("\n");
    } else {
        printf("{\"bench\":\"%s\",\"case\":\"%s\",\"metric\":\"%s\",\"value\":%.6g,\"unit\":\"%s\"",
               r->bench, r->name, r->metric, r->value, r->unit);
        if (r->ceiling) {
            printf(",\"ceiling\":\"%s\",\"ceiling_value\":%.6g,\"ratio\":%.4f", r->ceiling,
                   r->ceiling_value, ratio);
        }
        if (r->peer) {
            printf(",\"peer\":\"%s\",\"peer_value\":%.6g,\"peer_ratio\":%.4f", r->peer,
                   r->peer_value, r->peer_ratio);
        }
        printf("}\n");
    }
    fflush(stdout);
}
