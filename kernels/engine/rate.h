/* How long a prompt's tokens take to compute here, learned from the steps that were run.
 *
 * Attention grows with the position, so there is one moving average of nanoseconds a token for each
 * range of positions (powers of two). A step counts if one prompt made up most of it. What was
 * never measured is taken from the nearest shorter range, else from the nearest longer one; before
 * the first measurement all of it is a guess of the owner's.
 *
 * Thread: its owner's. */
#ifndef KN_ENGINE_RATE_H
#define KN_ENGINE_RATE_H

#include <stdbool.h>
#include <stdint.h>

#define KN_RATE_RANGES 20

struct kn_rate {
    double ns[KN_RATE_RANGES]; /* a token; 0 = not measured */
    double guess_ns;           /* likewise, before anything was measured; set once */
};

/* n tokens from position pos on, one request's, took ns. */
void kn_rate_add(struct kn_rate *r, uint32_t pos, uint32_t n, uint64_t ns);
/* Estimate for computing the tokens [from, to). */
uint64_t kn_rate_ns(const struct kn_rate *r, uint32_t from, uint32_t to);
/* Whether anything was measured: before that the estimate is a guess. */
bool kn_rate_known(const struct kn_rate *r);

#endif
