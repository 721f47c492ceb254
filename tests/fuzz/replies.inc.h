/* Answers of a Redis that may say anything: bytes of its protocol become replies, as hiredis reads
 * them from a socket. Included behind a .c of common/cluster. */
#ifndef TESTS_FUZZ_REPLIES_H
#define TESTS_FUZZ_REPLIES_H

#include <stdlib.h>

static inline redisReader *replies_open(const uint8_t *data, size_t n)
{
    redisReader *r = redisReaderCreate();

    if (!r || redis_bound(r) < 0 || redisReaderFeed(r, (const char *)data, n) != REDIS_OK) {
        abort();
    }
    return r;
}

/* The next whole reply, to be freed; NULL: there is none. */
static inline redisReply *replies_next(redisReader *r)
{
    void *reply = NULL;

    return redisReaderGetReply(r, &reply) == REDIS_OK ? reply : NULL;
}

#endif
