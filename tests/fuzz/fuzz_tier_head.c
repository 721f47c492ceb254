/* Heads of blobs as anybody may hand them in, from a file or a peer: read or refused; what was read
 * is within its limits and writes the same bytes again. A first byte that is odd sets the sum right
 * before, so that what stands behind the sum is reached too. */
#include "kvstore/tier/blob.h"

#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

#define IDS  512
#define SUMS 64

static void check(bool good)
{
    if (!good) {
        abort();
    }
}

static void set_sum(uint8_t *p, size_t n)
{
    uint32_t head;
    uint64_t sum;

    if (n < KV_BLOB_HEAD_FIXED) {
        return;
    }
    memcpy(&head, p + 8, 4);
    if (head >= 16 && head <= n) {
        sum = kv_blob_sum(p, head - 8);
        memcpy(p + head - 8, &sum, 8);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    static int32_t ids[IDS];
    static uint64_t sums[SUMS];
    struct kv_blob_room room = {ids, IDS, sums, SUMS};
    struct kv_blob_meta m;
    uint8_t *p, *again;
    size_t head = 0;

    if (n < 1) {
        return 0;
    }
    p = malloc(n); /* of its own, so that reading past it shows */
    memcpy(p, data + 1, n - 1);
    if (data[0] % 2) {
        set_sum(p, n - 1);
    }
    if (kv_blob_decode(p, n - 1, &room, &m, &head) == BT_OK) {
        check(head <= n - 1 && kv_blob_shape_ok(&m.shape));
        check(m.n_tokens >= 1 && m.n_tokens <= IDS && m.n_tokens <= m.shape.block_tokens);
        check(m.shape.n_layers <= SUMS && m.ids == ids && m.sums == sums);
        check(kv_blob_head_bytes(&m) == head);
        again = malloc(head);
        kv_blob_encode(&m, again);
        check(memcmp(again, p, head) == 0);
        free(again);
    }
    free(p);
    return 0;
}
