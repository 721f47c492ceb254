/* Moving bytes between nodes: messages, one-sided reads and writes. The only folder that includes
 * UCX; everything above sees this interface.
 *
 * One `struct bt_net` is one UCX worker, owned by one thread ("xfer") that it starts. All functions
 * marked [xfer] are called on that thread only: from callbacks, messages posted with bt_net_post
 * and timers. Peers are connected by listener and socket address, the same way on every transport.
 *
 * Proof. `closed` of a peer is called once, last, after every operation on it has completed or can
 * no longer touch local memory: what was lent to the peer's operations may be reused from then on.
 */
#ifndef BT_NET_NET_H
#define BT_NET_NET_H

#include "common/thr/mailbox.h"

#define BT_NET_MAX_HEAD 4096 /* bytes of a message's head */
#define BT_NET_MAX_KEY  512  /* bytes of a memory key */

struct bt_net;
struct bt_net_peer; /* one connection, either side */
struct bt_net_mem;  /* a registered range of local memory */
struct bt_net_rkey; /* access to a range of a peer's memory */

/* Who moves the bytes of a handoff over this peer's transport (ARCHITECTURE.md, handoff). */
enum bt_net_method {
    BT_NET_METHOD_PULL,    /* mapped memory: the receiver reads */
    BT_NET_METHOD_MESSAGE, /* TCP: the sender's bytes travel in messages, the receiver places them
                            */
    BT_NET_METHOD_PUT,     /* RDMA: the sender writes into the receiver's pages */
};

struct bt_net_cfg {
    const char *listen;       /* "host:port"; port 0 = any */
    const char *transports;   /* "auto", or UCX transport names such as "tcp" or "rc,tcp" */
    const char *devices;      /* UCX device names, "" = all that fit `listen` */
    const char *method;       /* "auto", "pull", "message", "put" */
    bool allow_insecure;      /* permits a listen address off loopback */
    size_t max_message_bytes; /* longer messages from a peer close it */
};

struct bt_net_handlers {
    void *arg;
    /* [xfer] A peer has connected to us and speaks our frames; it lives until closed. */
    void (*accepted)(void *arg, struct bt_net_peer *peer);
    /* [xfer] `head` and `data` are borrowed for the call and come from a stranger: check them. */
    void (*message)(void *arg, struct bt_net_peer *peer, struct bt_str head, struct bt_str data);
    /* [xfer] Once, last; see Proof above. rc says why. */
    void (*closed)(void *arg, struct bt_net_peer *peer, int rc);
};

/* Any thread; blocks until the thread runs and listens. BT_E_CONFIG names what is wrong. */
int bt_net_create(const struct bt_net_cfg *cfg,
                  const struct bt_net_handlers *handlers,
                  struct bt_net **ret_net,
                  struct bt_err *err) BT_MUST_USE;
/* Closes all peers by force, stops the thread, frees. Memory must be unregistered before. */
void bt_net_destroy(struct bt_net *net);
/* The bound address "host:port"; borrowed. Any thread. */
const char *bt_net_address(const struct bt_net *net);
/* Any thread. */
bool bt_net_post(struct bt_net *net, struct bt_msg *msg);

struct bt_net_timer {
    struct bt_list link; /* private */
    uint64_t deadline_ns;
    void (*fn)(struct bt_net_timer *t);
};
/* [xfer] Restarting moves the deadline; stop is safe when not started. Deadlines are put off by the
 * time for which the thread did not run at all (the process was stopped), once that is a second. */
void bt_net_timer_start(struct bt_net *net, struct bt_net_timer *t, uint64_t deadline_ns);
void bt_net_timer_stop(struct bt_net_timer *t);
/* [xfer] The clock without such times: what the silence of others is measured by. */
uint64_t bt_net_clock_ns(const struct bt_net *net);

/* [xfer] Connects; never blocks, so the host must be numeric (or "localhost"). Failure to reach
 * shows as `closed`. */
int bt_net_connect(struct bt_net *net,
                   const char *address,
                   struct bt_net_peer **ret_peer,
                   struct bt_err *err) BT_MUST_USE;
/* [xfer] `closed` follows, later. force: outstanding operations are cancelled at once; else they
 * are flushed first. Safe to repeat. */
void bt_net_peer_close(struct bt_net_peer *peer, bool force);
void bt_net_peer_set_user(struct bt_net_peer *peer, void *user);
void *bt_net_peer_user(const struct bt_net_peer *peer);
enum bt_net_method bt_net_peer_method(const struct bt_net_peer *peer);
/* Address of the other side, for logs; borrowed. */
const char *bt_net_peer_address(const struct bt_net_peer *peer);
/* How bytes come: "shm" (read from the peer's memory), "tcp", "rdma": for logs and metrics; static.
 */
const char *bt_net_peer_transport(const struct bt_net_peer *peer);

/* [xfer] End of an operation: BT_OK, BT_E_CANCELLED, BT_E_PEER_LOST. */
typedef void (*bt_net_done_fn)(void *arg, int rc);

/* Get, put, flush and keys need a connection that is up, which it is once a message has come in;
 * messages may be sent before and wait. */
/* [xfer] One message: `head` is copied (at most 4 KiB); `data` stays valid until done, which may be
 * called before the function returns. Messages of one peer arrive in order, also those that a done
 * callback sends. */
int bt_net_send(struct bt_net_peer *peer,
                struct bt_str head,
                struct bt_str data,
                bt_net_done_fn done,
                void *arg) BT_MUST_USE;
/* [xfer] Reads `bytes` at `remote` of the peer's memory into local memory. With method pull on one
 * host this is a system call that copies before it returns (done is called inside): keep the pieces
 * small enough for the thread's other work. Get and put without a key (a peer that has given none)
 * are BT_E_PEER_PROTOCOL where the transport needs one. */
int bt_net_get(struct bt_net_peer *peer,
               void *local,
               uint64_t remote,
               size_t bytes,
               struct bt_net_rkey *rkey,
               bt_net_done_fn done,
               void *arg) BT_MUST_USE;
/* [xfer] The same bytes in place, where the peer's memory can be mapped (a process of this host, a
 * sealed memory file): read-only, valid until `closed` of the peer returns. NULL: use bt_net_get.
 * The peer may write there meanwhile, so read once and check what was read. The first call for a
 * region looks through the peer's files, a millisecond. */
const void *bt_net_view(struct bt_net_peer *peer, uint64_t remote, size_t bytes);

/* A memory file by what it is rather than where somebody has mapped it: no other file of this host
 * has the same two numbers while it is open or mapped anywhere. */
struct bt_net_file {
    uint64_t dev, ino;
};
/* Which one a descriptor is of. False: peers could not see it in place (no file, or one that may
 * shrink). Any thread. */
bool bt_net_file_of(int fd, struct bt_net_file *ret_file) BT_MUST_USE;
/* [xfer] As bt_net_view: `bytes` from the start of a memory file that the peer has open. */
const void *
bt_net_view_file(struct bt_net_peer *peer, const struct bt_net_file *file, size_t bytes);
/* [xfer] Writes. done means: local memory may be reused. */
int bt_net_put(struct bt_net_peer *peer,
               const void *local,
               uint64_t remote,
               size_t bytes,
               struct bt_net_rkey *rkey,
               bt_net_done_fn done,
               void *arg) BT_MUST_USE;
/* [xfer] done means: every earlier put is visible at the peer. */
int bt_net_flush(struct bt_net_peer *peer, bt_net_done_fn done, void *arg) BT_MUST_USE;

/* [xfer] Registers local memory, once per pool or per ticket; *ret_key is what a peer needs to
 * reach it, owned by the registration. */
int bt_net_mem_register(struct bt_net *net,
                        void *base,
                        size_t bytes,
                        struct bt_net_mem **ret_mem,
                        struct bt_str *ret_key,
                        struct bt_err *err) BT_MUST_USE;
void bt_net_mem_unregister(struct bt_net_mem *mem);
/* [xfer] Takes a key that came from the peer: checked, never trusted to be well formed. */
int bt_net_rkey_unpack(struct bt_net_peer *peer,
                       struct bt_str key,
                       struct bt_net_rkey **ret_rkey,
                       struct bt_err *err) BT_MUST_USE;
void bt_net_rkey_destroy(struct bt_net_rkey *rkey);

#endif
