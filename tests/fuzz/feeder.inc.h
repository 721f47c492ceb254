/* An input as a row of parts: one byte says how long, then that many bytes; 255 stands for all the
 * rest. */
#ifndef TESTS_FUZZ_FEEDER_H
#define TESTS_FUZZ_FEEDER_H

#include "common/base/base.h"

struct feeder {
    const uint8_t *p;
    size_t n;
};

/* The next byte; 0 behind the end. */
static inline uint8_t feeder_byte(struct feeder *f)
{
    if (f->n == 0) {
        return 0;
    }
    f->n--;
    return *f->p++;
}

/* The next part; false: there is none. It may be empty. */
static inline bool feeder_part(struct feeder *f, struct bt_str *ret)
{
    size_t n;

    if (f->n == 0) {
        return false;
    }
    n = feeder_byte(f);
    n = n == 255 ? f->n : BT_MIN(n, f->n);
    *ret = (struct bt_str){(const char *)f->p, n};
    f->p += n;
    f->n -= n;
    return true;
}

#endif
