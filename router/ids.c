/* Random numbers: ids of handoffs and streams, ties, seeds of requests without one. */
#include "router/router_int.h"

#include <sys/random.h>

/* From the system, many at a time; where that has none yet, a counter mixed (splitmix64: Steele,
 * Lea, Flood 2014). A number is wiped as it is given out. */
uint64_t rt_random(struct rt_router *r)
{
    uint64_t z;

    if (r->n_drawn == 0 &&
        getrandom(r->drawn, sizeof(r->drawn), GRND_NONBLOCK) == (ssize_t)sizeof(r->drawn)) {
        r->n_drawn = BT_ARRAY_LEN(r->drawn);
    }
    if (r->n_drawn > 0) {
        z = r->drawn[--r->n_drawn];
        r->drawn[r->n_drawn] = 0;
        return z;
    }
    z = r->random += 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}
