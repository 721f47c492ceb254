/* Private to common/cluster: one connection to Redis with a deadline on every exchange.
 *
 * hiredis is used without blocking; waiting is ours, so that a server that answers a byte at a time
 * or not at all cannot hold the thread longer than asked. After any error other than an error
 * reply the connection is closed. A connection belongs to one thread at a time. */
#ifndef BT_CLUSTER_REDIS_INT_H
#define BT_CLUSTER_REDIS_INT_H

#include "common/cluster/registry.h"

#include <hiredis/hiredis.h>

#define REDIS_REPLY_MAX (16u << 20) /* bytes of answers to one exchange */
/* Elements of an array in an answer. hiredis allocates as many as are announced before any of them
 * has come: without a limit, 16 GiB for a dozen bytes. */
#define REDIS_ELEMENTS_MAX 65536
#define REDIS_ARGS_MAX     300 /* parts of one command */
#define REDIS_KEY_MAX      192 /* bytes of a key, terminator included */

struct redis_conn {
    redisContext *ctx; /* NULL = not connected */
    size_t used_bytes; /* read in this exchange, or since the last whole reply */
};

struct redis_target {
    const struct bt_cluster_conf *conf; /* address, user, password, TLS files */
    uint64_t timeout_ns;
};

/* Connects, authenticates, asks for a sign of life. BT_E_UNAVAILABLE, BT_E_UNAUTHENTICATED,
 * BT_E_DENIED. Resolving a name may take as long as the system's resolver does. */
int redis_open(struct redis_conn *c, const struct redis_target *to, struct bt_err *err) BT_MUST_USE;
void redis_close(struct redis_conn *c);

/* Queues a command of `argc` parts. */
int redis_send(struct redis_conn *c, int argc, const struct bt_str *argv) BT_MUST_USE;
/* Sends what is queued and reads n replies, in order, into ret_replies (each to be freed with
 * freeReplyObject; NULL where none came). BT_OK even if some are error replies. */
int redis_receive(struct redis_conn *c,
                  uint64_t timeout_ns,
                  redisReply **ret_replies,
                  size_t n,
                  struct bt_err *err) BT_MUST_USE;
void redis_free_replies(redisReply **replies, size_t n);

/* The same in steps that never wait, for a thread with a poll(2) of its own: write what the socket
 * takes (*ret_done: all of it), read what it has, take the next whole reply (NULL: none yet; to be
 * freed). BT_E_UNAVAILABLE: the connection is closed. */
int redis_write_some(struct redis_conn *c, bool *ret_done, struct bt_err *err) BT_MUST_USE;
int redis_read_some(struct redis_conn *c, struct bt_err *err) BT_MUST_USE;
int redis_next_reply(struct redis_conn *c, redisReply **ret_reply, struct bt_err *err) BT_MUST_USE;

/* Sets the limits of what is read as an answer; longer arrays are an error. BT_E_NOMEM. */
int redis_bound(redisReader *reader) BT_MUST_USE;

/* Waits for poll(2) events on the connection; BT_E_DEADLINE when the time is over. */
int redis_wait(struct redis_conn *c, short events, uint64_t deadline_ns);
/* Whether this build can speak TLS, with the files named: BT_E_CONFIG with the reason. */
int redis_tls_check(const struct bt_cluster_conf *conf, struct bt_err *err);
/* The handshake, on a connection that is up; the server's certificate must be one of `host`. */
int redis_tls_start(struct redis_conn *c,
                    const struct bt_cluster_conf *conf,
                    const char *host,
                    uint64_t deadline_ns,
                    struct bt_err *err) BT_MUST_USE;

/* BT_OK unless the reply is an error that says that this server cannot, or may not, serve now:
 * then BT_E_UNAVAILABLE, BT_E_UNAUTHENTICATED or BT_E_DENIED with what to do about it. */
int redis_refusal(const redisReply *reply, struct bt_err *err);
/* Text of an error or status reply for a log line, "strange answer" if it is none. */
struct bt_str redis_text(const redisReply *reply);

/* Pauses between attempts: they double up to a limit, each cut by up to a quarter at random, so
 * that nodes do not march in step. */
struct redis_pause {
    uint64_t next_ns; /* no attempt before */
    uint64_t len_ns;
};

void redis_pause_reset(struct redis_pause *p);
/* After a failure. */
void redis_pause_grow(struct redis_pause *p, uint64_t lease_ns);
uint64_t redis_jitter(uint64_t ns);
uint64_t redis_random(void);
/* 32 random digits. */
void redis_random_text(char ret_text[33]);

/* "baton:{cluster}:<what>[name]" into buf of REDIS_KEY_MAX. */
struct bt_str
redis_key(const struct bt_cluster_conf *conf, const char *what, const char *name, char *buf);

#endif
