/* Members of a cluster: what is known of each node, and immutable snapshots of all of them.
 *
 * In Redis a member is one text value, written and read here:
 *
 *   v=1
 *   name=decode-0                 same as in the key
 *   incarnation=019a6c51f3c2a7b4  16 hex digits, not 0
 *   role=decode                   prefill, decode, both, router, kvstore
 *   state=ready                   ready, draining
 *   grpc=10.0.0.7:50051           host:port, port not 0
 *   net=10.0.0.7:50061            host:port of the transfer listener; may be empty
 *   model=<64 hex digits>         model digest; all 0 = serves none
 *   compat=<64 hex digits>        compatibility digest
 *   weight_epoch=0
 *   store=10.0.0.7:50071          host:port of its block server; may be empty or left out
 *
 * Each line once, in any order; unknown keys are passed over, so that a newer node may add some
 * without breaking an older reader; `v` changes when that is not enough. Whoever can write to Redis
 * could have written it, so every field is checked. */
#ifndef BT_CLUSTER_MEMBER_H
#define BT_CLUSTER_MEMBER_H

#include "common/base/buf.h"

#define BT_MEMBER_NAME_MAX   63
#define BT_MEMBER_ADDR_MAX   271
#define BT_MEMBER_RECORD_MAX 2048 /* longer records are refused unread */

enum bt_role {
    BT_ROLE_UNKNOWN, /* a seed that nobody has spoken to */
    BT_ROLE_PREFILL,
    BT_ROLE_DECODE,
    BT_ROLE_BOTH,
    BT_ROLE_ROUTER,
    BT_ROLE_KVSTORE,
};

/* Static string; "unknown" for what is none. */
const char *bt_role_name(enum bt_role role);
/* BT_ROLE_UNKNOWN if it is none. */
enum bt_role bt_role_parse(struct bt_str s);

struct bt_member {
    char name[BT_MEMBER_NAME_MAX + 1]; /* of an unnamed seed: empty */
    uint64_t incarnation;              /* 0 = not known (seed) */
    enum bt_role role;
    bool draining;
    bool seed; /* from the static list: all but the addresses is to be learnt from its Welcome */
    char grpc_addr[BT_MEMBER_ADDR_MAX + 1];  /* "host:port" */
    char net_addr[BT_MEMBER_ADDR_MAX + 1];   /* "host:port" or empty */
    char store_addr[BT_MEMBER_ADDR_MAX + 1]; /* likewise */
    uint8_t model[32];
    uint8_t compat[32];
    uint64_t weight_epoch;
};

/* Letters, digits, '-', '_', '.'; 1 to 63 of them. */
bool bt_member_name_ok(struct bt_str name);
bool bt_member_equal(const struct bt_member *a, const struct bt_member *b);
/* Appends the text form. */
int bt_member_encode(const struct bt_member *m, struct bt_buf *to) BT_MUST_USE;
/* Reads the text form of member `name`; BT_E_FORMAT with the reason. *ret_m untouched then. */
int bt_member_decode(struct bt_str name,
                     struct bt_str text,
                     struct bt_member *ret_m,
                     struct bt_err *err) BT_MUST_USE;
/* Reads a seed, "[name@]host:port". */
int bt_member_read_seed(struct bt_str text,
                        struct bt_member *ret_m,
                        struct bt_err *err) BT_MUST_USE;

/* A new incarnation: milliseconds since 1970 in the upper 44 bits, random below; larger than any
 * made a millisecond earlier on a host whose clock agrees. Never 0. */
uint64_t bt_incarnation_make(void);

/* All members at one time, sorted by name, then address. Immutable; counted references. */
struct bt_members {
    uint32_t refs;    /* atomic; bt_members_ref and _unref only */
    uint64_t version; /* counts up with each snapshot of a registry */
    bool frozen;      /* Redis cannot be reached: as it was when it last could */
    size_t n;
    struct bt_member m[];
};

struct bt_members *bt_members_ref(struct bt_members *ms);
/* NULL is fine; frees with the last reference. Any thread. */
void bt_members_unref(struct bt_members *ms);
/* Borrowed from the snapshot; NULL if there is none. */
const struct bt_member *bt_members_find(const struct bt_members *ms, struct bt_str name);
/* A snapshot with one reference: `reg` (n_reg entries, registered) and those seeds that no
 * registered entry has the name or the gRPC address of. NULL without memory. */
struct bt_members *bt_members_make(const struct bt_member *reg,
                                   size_t n_reg,
                                   const struct bt_member *seeds,
                                   size_t n_seeds);
/* True if both hold the same members (version aside). */
bool bt_members_equal(const struct bt_members *a, const struct bt_members *b);

#endif
