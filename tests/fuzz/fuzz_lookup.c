/* What a Redis may answer to a look-up of two blocks: its time, then a hash for each. Holders are
 * members that live, the fastest first, and not too many; what is outdated is to be removed. */
#include "common/cluster/blockmap_get.c"

#include "tests/fuzz/replies.inc.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

#define KEYS 2

static struct bt_members *make_members(void)
{
    struct bt_member m[2] = {{.name = "a", .incarnation = 1}, {.name = "b", .incarnation = 2}};

    return bt_members_make(m, 2, NULL, 0);
}

static void audit(const struct block_lookup *l)
{
    for (size_t k = 0; k < l->n_keys && l->n_got > k + 1; k++) {
        if (l->first[k + 1] < l->first[k] || l->first[k + 1] - l->first[k] > BT_HOLDERS_MAX ||
            l->first[k + 1] > l->n_holders) {
            abort();
        }
        for (size_t i = l->first[k] + 1; i < l->first[k + 1]; i++) {
            if (l->holders[i].tier < l->holders[i - 1].tier) {
                abort();
            }
        }
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    static struct block_scrub scrubs[BLOCK_SCRUB_MAX];
    struct bt_blockmap bm = {.lock = PTHREAD_MUTEX_INITIALIZER, .scrubs = scrubs, .put_fd = -1};
    struct block_lookup *l =
        calloc(1, sizeof(*l) + KEYS * sizeof(l->keys[0]) + (KEYS + 1) * sizeof(uint32_t));
    redisReader *reader = replies_open(data, n);
    redisReply *reply;
    struct bt_err err;

    bt_log_threshold = -1;
    bm.members = make_members();
    if (!l || !bm.members) {
        abort();
    }
    l->n_keys = KEYS;
    l->first = (uint32_t *)(l->keys + KEYS);
    bt_list_init(&l->live);
    while (l->n_got < KEYS + 1 && (reply = replies_next(reader)) != NULL) {
        if (redis_refusal(reply, &err) < 0 || take_reply(&bm, l, reply) < 0) {
            freeReplyObject(reply);
            break;
        }
        freeReplyObject(reply);
        l->n_got++;
        audit(l);
    }
    redisReaderFree(reader);
    lookup_free(l);
    bt_members_unref(bm.members);
    return 0;
}
