/* Random numbers: ids of handoffs and streams, ties, seeds of requests without one. */
#include "router/router_int.h"

#include <sys/random.h>

/* From the system; where that has none yet, a counter mixed (splitmix64: Steele, Lea, Flood 2014).
 */
uint64_t rt_random(struct rt_router *r)
{
    uint64_t z = 0;

    if (getrandom(&z, sizeof(z), GRND_NONBLOCK) == (ssize_t)sizeof(z)) {
        return z;
    }
    z = r->random += 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}
