/* Checksums of KV bytes, alone and on the way of a copy.
 *
 * The sum is XXH3-64 (seed 0) everywhere. A copy with a sum reads every source byte once: what was
 * summed is what was written, also where another process may change the source meanwhile. It goes
 * past the caches and reads several pages at once, a unit ahead, since neither side is used again
 * soon and one page alone does not keep the memory busy.
 *
 * Pure functions; any thread, one object at a time. */
#ifndef KV_BLOCK_SUM_H
#define KV_BLOCK_SUM_H

#include "common/base/base.h"

uint64_t kv_sum(const void *p, size_t n);
uint64_t kv_sum_seeded(const void *p, size_t n, uint64_t seed);
/* As kv_sum, faster by a quarter where the bytes are in no cache, slower where they are. */
uint64_t kv_sum_cold(const void *p, size_t n);

#define KV_COPY_UNIT 1024u /* the sum's own: after so many bytes it is mixed */
#define KV_COPY_LANE 4096u /* longest piece of a lane */

struct kv_copy_lane {
    char *to;
    const char *from;
};

/* A copy under way: private. */
struct kv_copy {
    uint64_t acc[8];
    uint64_t pending[8]; /* of the last whole unit, not yet in acc */
    uint64_t bytes;      /* all that were added */
    uint32_t n_carry;    /* bytes of a unit that is not whole */
    uint32_t n_lanes;    /* pieces that wait to be copied, of lane_bytes each */
    uint32_t lane_bytes;
    bool has_pending;
    bool keep;        /* what is written goes through the caches */
    uint8_t tail[64]; /* the last bytes of the last whole unit */
    uint8_t carry[KV_COPY_UNIT];
    struct kv_copy_lane lanes[8]; /* four to copy, four to read ahead of */
};

void kv_copy_begin(struct kv_copy *c);
/* For a copy that is used at once: it stays in the cache. */
void kv_copy_begin_kept(struct kv_copy *c);
/* The next n bytes: from `from` to `to`, in the order of the sum. to NULL: only summed. Both stay
 * valid until kv_copy_flush or kv_copy_end; they do not overlap. */
void kv_copy_add(struct kv_copy *c, void *to, const void *from, size_t n);
/* All that was added is copied, and seen by whoever hears of it after this. */
void kv_copy_flush(struct kv_copy *c);
/* Flushes; the sum of all bytes. */
uint64_t kv_copy_end(struct kv_copy *c);
/* For tests: the widest instructions that are used. 0 plain C, 1 AVX2, 2 AVX-512. */
extern int kv_copy_isa_max;
/* All of it in one go. */
uint64_t kv_copy_sum(void *to, const void *from, size_t n);

#endif
