/* What a Redis may answer to a reading of the members: the list of names, then an entry for each
 * valid one, the epoch, and whether it takes writes. Members that are found are valid. */
#include "common/cluster/registry.c"

#include "tests/fuzz/replies.inc.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

/* Replies to what read_entries asks for; false: too few. */
static bool entries(redisReader *reader, struct reading *r)
{
    for (size_t i = 0; i < r->n_names + 2; i++) {
        r->replies[i] = replies_next(reader);
        if (!r->replies[i]) {
            return false;
        }
    }
    return true;
}

static void take(struct bt_registry *reg, redisReader *reader, const redisReply *list)
{
    struct reading r = {0};
    struct bt_err err;

    if (list->type == REDIS_REPLY_ARRAY && pick_names(&r, list) == BT_OK && entries(reader, &r) &&
        check_replies(&r, &err) == BT_OK) {
        const redisReply *epoch = r.replies[r.n_names];

        decode_entries(&r);
        if (epoch->type == REDIS_REPLY_STRING && epoch->len > 0 && epoch->len <= EPOCH_MAX) {
            look_at_epoch(reg, epoch); /* else it would be written, which needs a connection */
        }
        if (accept_reading(reg, &r) < 0 || reg->n_known < r.n_found) {
            abort();
        }
        for (size_t i = 0; i < reg->n_known; i++) {
            if (!bt_member_name_ok(bt_str_of(reg->known[i].name))) {
                abort();
            }
        }
        tell_bad(reg, &r);
        publish(reg);
    }
    redis_free_replies(r.replies, r.replies ? r.n_names + 2 : 0);
    free(r.names);
    free(r.replies);
    free(r.found);
}

static void changed(void *arg, struct bt_members *take_members)
{
    bt_members_unref(take_members);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    char address[] = "redis:1";
    const struct bt_cluster_conf conf = {.lease_ns = BT_NS_PER_S, .redis_address = address};
    struct bt_registry reg = {.cfg = {.conf = &conf, .changed = changed},
                              .lock = PTHREAD_MUTEX_INITIALIZER,
                              .link = LINK_UP};
    redisReader *reader = replies_open(data, n);
    redisReply *list;

    bt_log_threshold = -1;
    while ((list = replies_next(reader)) != NULL) {
        take(&reg, reader, list);
        freeReplyObject(list);
    }
    redisReaderFree(reader);
    bt_members_unref(reg.last);
    free(reg.known);
    return 0;
}
