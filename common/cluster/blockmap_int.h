/* Private to common/cluster: what the halves of the block index share.
 *
 * blockmap.c    what callers use, the queues, create and destroy
 * blockmap_get.c  thread "redis-get": look-ups and the breaker
 * blockmap_put.c  thread "redis-put": connecting for both, announcing, removing
 *
 * One lock, held for copying only. Members marked `get` or `put` belong to that thread alone. */
#ifndef BT_CLUSTER_BLOCKMAP_INT_H
#define BT_CLUSTER_BLOCKMAP_INT_H

#include "common/cluster/block_value.h"
#include "common/cluster/blockmap.h"
#include "common/cluster/redis_int.h"
#include "common/ds/list.h"

#include <pthread.h>

#define BLOCK_QUEUE_MAX 65536 /* announcements and withdrawals waiting; power of two */
#define BLOCK_SCRUB_MAX 1024  /* removals waiting; power of two */
#define BLOCK_BATCH     128   /* entries of one script call: under half a millisecond of Redis */
#define BLOCK_FLIGHT    512   /* entries of one exchange */
#define BLOCK_WITHDRAW  0xff  /* as a tier: no longer held */

/* An entry that may go: field `name` of `key` if its value still begins with `expect`. */
struct block_scrub {
    struct bt_block_key key;
    char name[BT_MEMBER_NAME_MAX + 1];
    char expect[BLOCK_VALUE_MAX];
    bool overtaken; /* that is why; else its time is over, or its holder has said no */
};

/* One look-up, or a probe (no callback). Owner: `live` and `fresh` under the lock until "redis-get"
 * has taken it; freed there once it has had its callback and is off the wire. */
struct block_lookup {
    struct bt_list live; /* under lock: all that have not had their callback */
    struct bt_list link; /* fresh (under lock), then wire (get) */
    uint64_t id;
    struct bt_lookup_cb cb;
    uint64_t timeout_ns, start_ns, sent_ns;
    bool cancelled; /* under lock */
    bool counts;    /* reads `blocks` instead of block records */
    bool finished;  /* get: the callback has run */
    bool probe;
    size_t n_got;   /* get: replies read, of n_keys + 1 */
    uint64_t now_s; /* get: time by Redis's clock */
    struct bt_holder *holders;
    size_t n_holders, cap_holders;
    struct bt_members *members; /* get: whom holders point into */
    uint32_t *first;            /* n_keys + 1, behind keys */
    size_t n_keys;
    struct bt_block_key keys[];
};

enum block_breaker {
    BLOCK_AWAY,    /* no connection; "redis-put" is asked for one */
    BLOCK_OPEN,    /* connected, not trusted: a probe is sent when the pause is over */
    BLOCK_PROBING, /* the probe is on its way */
    BLOCK_CLOSED,  /* look-ups run */
};

struct bt_blockmap {
    struct bt_blockmap_cfg cfg; /* cfg.name points at name */
    char name[BT_MEMBER_NAME_MAX + 1];
    char incarnation[17];
    struct redis_target target;
    pthread_t get_thread, put_thread;
    int get_fd, put_fd; /* eventfds */

    pthread_mutex_t lock;
    /* under lock */
    bool quit;
    uint64_t last_id;
    size_t n_live;
    struct bt_list live, fresh;
    struct bt_members *members;
    struct bt_block_have *queue; /* BLOCK_QUEUE_MAX; NULL if this node has no name */
    uint64_t q_head, q_tail;     /* count up for ever; taken, added */
    uint64_t pass_after;         /* everything is written again once q_head has come here */
    bool pass_wanted;
    struct block_scrub *scrubs; /* BLOCK_SCRUB_MAX */
    uint64_t s_head, s_tail;
    bool any_cancelled;
    bool want_conn;             /* get wants a connection */
    bool told_down;             /* that look-ups find nothing */
    struct redis_conn new_conn; /* from put to get */
    struct bt_blockmap_stats stats;

    /* get */
    struct redis_conn get_conn;
    enum block_breaker breaker;
    struct bt_list wire; /* sent, in order of their replies */
    struct redis_pause get_pause;
    bool get_asked;  /* for a connection */
    bool get_unsent; /* the socket did not take everything */

    /* put */
    struct redis_conn put_conn;
    struct redis_pause put_redial, get_redial;
    bool put_ok, put_told, refused_told, count_told;
    uint64_t epoch_due_ns, told_count, count_due_ns;
    char epoch[65];
    struct bt_block_have
        *flight; /* BLOCK_FLIGHT; taken from the queue or listed, not yet written */
    size_t n_flight;
    bool flight_listed; /* from `held`, not from the queue */
    bool in_pass;
    uint64_t pass_cursor, pass_count, pass_due_ns, pass_gap_ns, pass_begun_ns, refresh_due_ns;
    struct redis_pause refused;
    bool pass_is_sync; /* the pass under way was wanted, not only due */
};

void block_count(struct bt_blockmap *bm, uint64_t *counter, uint64_t n);
void block_flag(struct bt_blockmap *bm, bool *flag, bool v);
void block_scrub(struct bt_blockmap *bm, const struct block_scrub *s);
/* Key of a block record in Redis, into buf of REDIS_KEY_MAX. */
struct bt_str
block_key(const struct bt_cluster_conf *conf, const struct bt_block_key *key, char *buf);
/* Under lock: drops the announcements in the queue, which writing everything covers, and has that
 * begin behind the withdrawals that stay. */
void block_want_pass(struct bt_blockmap *bm);

/* Logs once that look-ups find nothing, and that they do again. Either thread. */
void block_tell_down(struct bt_blockmap *bm, int rc, const struct bt_err *err);
void block_told_up(struct bt_blockmap *bm);

void *block_get_main(void *arg);
void *block_put_main(void *arg);

#endif
