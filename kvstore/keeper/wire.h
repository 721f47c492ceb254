/* Messages between a keeper and the processes of its host, over a unix SOCK_SEQPACKET socket.
 *
 * One packet is one message: a head, then the body of its type, of exactly that size; integers in
 * the byte order of the host. Text ends with a NUL inside its field. Descriptors travel as
 * SCM_RIGHTS with the message that speaks of them: one with REGISTER, one with a GRANT that answers
 * a GET, none otherwise.
 *
 *   process                                keeper
 *   HELLO(node, incarnation)        ->
 *                                   <-     WELCOME
 *   GET(region, digest, bytes, ..)  ->     waits for the predecessor's end if it must
 *                                   <-     GRANT + descriptor, or REFUSED
 *   REGISTER(region, .., id) + fd   ->
 *                                   <-     GRANT, or REFUSED
 *   STATUS (needs no HELLO)         ->
 *                                   <-     ROWS, ... ROWS(last)
 *
 * One request is open at a time. Whatever breaks these rules is answered by REFUSED, and the
 * connection ends. What changes here is a new version, which older sides refuse. */
#ifndef KV_KEEPER_WIRE_H
#define KV_KEEPER_WIRE_H

#include "common/base/base.h"

#define KV_KEEPER_MAGIC   0x31504b42u /* "BKP1" */
#define KV_KEEPER_VERSION 1
#define KV_KEEPER_NODE    64 /* bytes of a node's name, NUL included */
#define KV_KEEPER_REGION  32

enum kv_keeper_type {
    KV_KEEPER_HELLO = 1,
    KV_KEEPER_GET,
    KV_KEEPER_REGISTER,
    KV_KEEPER_STATUS,
    KV_KEEPER_WELCOME = 64,
    KV_KEEPER_GRANT,
    KV_KEEPER_REFUSED,
    KV_KEEPER_ROWS,
};

struct kv_keeper_head {
    uint32_t magic;
    uint16_t version;
    uint16_t type; /* enum kv_keeper_type */
};

struct kv_keeper_hello {
    struct kv_keeper_head head;
    char node[KV_KEEPER_NODE];
    uint64_t incarnation;
};

struct kv_keeper_request { /* GET and REGISTER */
    struct kv_keeper_head head;
    char region[KV_KEEPER_REGION];
    uint8_t digest[32]; /* content under another one is of no use */
    uint64_t bytes;
    uint32_t kind;    /* enum bt_mem_kind */
    uint32_t device;  /* which of the kind; 0 for host memory */
    uint64_t id;      /* REGISTER: the memory's identity, as granted or made up by its maker */
    uint64_t wait_ms; /* GET: how long to wait for a predecessor's end */
};

struct kv_keeper_welcome {
    struct kv_keeper_head head;
    uint32_t pid;
    uint32_t unused;
};

enum kv_keeper_pages { KV_KEEPER_PAGES_PLAIN, KV_KEEPER_PAGES_HUGE };

struct kv_keeper_grant {
    struct kv_keeper_head head;
    uint64_t id;       /* of the memory: random, another one whenever the memory is new */
    uint64_t bytes;    /* that are there; at least those asked for */
    uint64_t previous; /* incarnation that wrote it last, 0 = none */
    uint32_t kept;     /* 1 = content of a predecessor, 0 = zeros */
    uint32_t pages;    /* enum kv_keeper_pages */
};

struct kv_keeper_refused {
    struct kv_keeper_head head;
    int32_t rc;           /* enum bt_rc */
    uint32_t pid;         /* of the process in the way, 0 = none */
    uint64_t incarnation; /* its */
    char text[232];
};

struct kv_keeper_row {
    char node[KV_KEEPER_NODE];
    char region[KV_KEEPER_REGION];
    uint64_t bytes;
    uint64_t id;
    uint64_t incarnation; /* that has it, or had it last */
    uint32_t pid;         /* of the process that has it, 0 = nobody */
    uint32_t pages;       /* enum kv_keeper_pages */
    uint64_t idle_ms;     /* since nobody has it */
};

#define KV_KEEPER_ROWS_MAX 16

struct kv_keeper_rows {
    struct kv_keeper_head head;
    uint32_t n;
    uint32_t last; /* 1 = no more follow */
    struct kv_keeper_row rows[KV_KEEPER_ROWS_MAX];
};

_Static_assert(sizeof(struct kv_keeper_request) == 8 + 32 + 32 + 8 + 8 + 16, "no holes");
_Static_assert(sizeof(struct kv_keeper_row) == 64 + 32 + 24 + 8 + 8, "no holes");

#endif
