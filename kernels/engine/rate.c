/* Moving averages by range of positions: range 0 holds positions below FIRST, each next one twice
 * as many. */
#include "kernels/engine/rate.h"

#include "common/base/rc.h"

#define FIRST  128.0 /* positions of the first range */
#define WEIGHT 0.25  /* of a new measurement */

static int range_of(uint32_t pos)
{
    int i = 0;

    for (double end = FIRST; pos >= end && i < KN_RATE_RANGES - 1; end *= 2) {
        i++;
    }
    return i;
}

void kn_rate_add(struct kn_rate *r, uint32_t pos, uint32_t n, uint64_t ns)
{
    double *at = &r->ns[range_of(pos + n / 2)], one = n > 0 ? (double)ns / n : 0;

    if (one > 0) {
        *at = *at > 0 ? *at + WEIGHT * (one - *at) : one;
    }
}

static double lookup(const struct kn_rate *r, int range)
{
    for (int i = range; i >= 0; i--) {
        if (r->ns[i] > 0) {
            return r->ns[i];
        }
    }
    for (int i = range + 1; i < KN_RATE_RANGES; i++) {
        if (r->ns[i] > 0) {
            return r->ns[i];
        }
    }
    return r->guess_ns;
}

uint64_t kn_rate_ns(const struct kn_rate *r, uint32_t from, uint32_t to)
{
    double ns = 0, end = FIRST;

    for (int i = 0; i < KN_RATE_RANGES && from < to; i++, end *= 2) {
        double stop = i == KN_RATE_RANGES - 1 ? to : BT_MIN((double)to, end);

        if (from < stop) {
            ns += (stop - from) * lookup(r, i);
            from = (uint32_t)stop;
        }
    }
    return (uint64_t)ns;
}

bool kn_rate_known(const struct kn_rate *r)
{
    for (int i = 0; i < KN_RATE_RANGES; i++) {
        if (r->ns[i] > 0) {
            return true;
        }
    }
    return false;
}
