/* Packets with descriptors over unix sockets, and who is at the other end. */
#ifndef KV_KEEPER_SOCK_H
#define KV_KEEPER_SOCK_H

#include "common/base/rc.h"
#include "kvstore/keeper/wire.h"

#include <sys/socket.h>
#include <sys/types.h>
#include <sys/un.h>

#define KV_SOCK_MAX_FDS 4

struct kv_packet {
    union {
        struct kv_keeper_head head;
        struct kv_keeper_hello hello;
        struct kv_keeper_request request;
        struct kv_keeper_welcome welcome;
        struct kv_keeper_grant grant;
        struct kv_keeper_refused refused;
        struct kv_keeper_rows rows;
    };
    size_t n; /* bytes received */
    int fds[KV_SOCK_MAX_FDS];
    int n_fds;
    bool cut; /* more bytes or descriptors came than there was room for */
};

/* Address of a path; BT_E_CONFIG: empty or too long. */
int kv_sock_address(const char *path, struct sockaddr_un *ret, struct bt_err *err) BT_MUST_USE;
/* A connected socket, not blocking. BT_E_UNAVAILABLE: nobody listens there. */
int kv_sock_connect(const char *path, int *ret_fd, struct bt_err *err) BT_MUST_USE;
/* Sends a message of `bytes` bytes whose head it fills in, with a descriptor if fd >= 0. Does not
 * block: BT_E_UNAVAILABLE if there is no room, BT_E_PEER_LOST if the peer is gone. */
int kv_sock_send(int sock, enum kv_keeper_type type, void *msg, size_t bytes, int fd) BT_MUST_USE;
/* Receives one packet; its descriptors belong to the caller. BT_PENDING: none is there.
 * BT_E_PEER_LOST: the end, or an empty packet. */
int kv_sock_recv(int sock, struct kv_packet *ret) BT_MUST_USE;
/* Whether head and size are those of a message of the type. */
bool kv_packet_is(const struct kv_packet *p, enum kv_keeper_type type);
/* Closes the descriptors that are left in it. */
void kv_packet_drop(struct kv_packet *p);
/* Waits until a packet can be read, at most until the deadline. BT_E_DEADLINE. */
int kv_sock_wait(int sock, uint64_t deadline_ns) BT_MUST_USE;

struct kv_sock_peer {
    uid_t uid;
    pid_t pid; /* 0: in a namespace that we do not see */
};
int kv_sock_peer(int sock, struct kv_sock_peer *ret, struct bt_err *err) BT_MUST_USE;
/* A descriptor of the process that connected; readable once it is over. BT_E_UNSUPPORTED: the
 * kernel has none, or cannot name that process. */
int kv_sock_peer_pidfd(int sock, int *ret_fd, struct bt_err *err) BT_MUST_USE;
/* Whether the process of a pidfd is over: none of its threads will write again. */
bool kv_pidfd_over(int pidfd);

/* Names of nodes and regions: 1 to size - 1 letters, digits, '-', '_', '.', and a NUL. */
bool kv_keeper_name_ok(const char *field, size_t size);

#endif
