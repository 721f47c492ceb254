/* Private to common/net: the objects behind net.h.
 *
 * Thread: everything here belongs to the xfer thread, except the fields of struct bt_net marked
 * [any]. */
#ifndef BT_NET_NET_INT_H
#define BT_NET_NET_INT_H

#include "common/base/buf.h"
#include "common/ds/map.h"
#include "common/net/net.h"
#include "common/thr/time.h"

#include <pthread.h>
#include <sys/socket.h>
#include <ucp/api/ucp.h>

#define BT_NET_AM_ID         1
#define BT_NET_FRAME_VERSION 2
#define BT_NET_OP_HEAD       256 /* longer heads are allocated one by one */
#define BT_NET_OPS_KEPT      512
#define BT_NET_MAX_PEERS     1024
#define BT_NET_KEY_ROOM      4096

#define BT_NET_UP_NS   (5 * BT_NS_PER_S) /* a connection that is not up by then is dropped */
#define BT_NET_SAFE_NS (3 * BT_NS_PER_S) /* how long a close waits for a safe moment */

/* In front of every head: offset 0 u16 version, 2 u16 kind, 4 u32 sequence number; little endian.
 * The sequence number proves the order that net.h promises; it counts messages only. */
#define BT_NET_FRAME_BYTES 8
enum bt_net_frame { BT_NET_FRAME_MESSAGE, BT_NET_FRAME_HELLO };

/* Behind the frame of a hello: offset 0 u64 host, 8 u64 address of the cookie, 16 u32 process,
 * 20 16 bytes of cookie. Together 44 bytes; the whole must stay below 64 to fit every transport. */
#define BT_NET_HELLO_BYTES (BT_NET_FRAME_BYTES + 36)

struct bt_net_home {
    uint64_t host; /* digest of boot id and process-id namespace */
    uint64_t cookie_at;
    uint32_t pid; /* 0 = unknown */
    uint8_t cookie[16];
};

/* CONNECTING -> UP -> CLOSING -> (freed). UP: our hello frame has gone out over the final lanes and
 * theirs has come in. UCX 1.13 picks the protocol of a send when it is posted; posted while the
 * lanes are still being chosen, it is run over lanes it was not made for and aborts the process. So
 * nothing but the tiny hello, which fits every transport, is posted before UP; messages queue here.
 * Closing starts in the loop, never inside a UCX callback. */
enum bt_net_peer_state { BT_NET_PEER_CONNECTING, BT_NET_PEER_UP, BT_NET_PEER_CLOSING };

struct bt_net_peer {
    struct bt_list link;       /* net->peers */
    struct bt_list dying_link; /* net->dying: to be closed, or closed and waiting for operations */
    struct bt_list held_link;  /* net->held: UP, and its queue is not empty */
    struct bt_net *net;
    void *user;
    ucp_ep_h ep; /* NULL until UCX may call */
    enum bt_net_peer_state state;
    struct bt_net_gate *gate; /* NULL once it is closed, or without gates */
    bool failed;              /* UCX has given the endpoint up */
    bool waiting;             /* for a safe moment to close */
    bool overdue;             /* do not wait any more for a safe moment to close */
    struct bt_list queue;     /* struct bt_net_op.link: messages waiting for UP, or for the loop */
    struct bt_net_timer up_timer;
    uint32_t mapped_pid;     /* its memory can be read; 0 = no */
    struct bt_net_home home; /* with mapped_pid: who it is */
    struct bt_list views;    /* struct view.link (view.c) */
    uint32_t n_view_tries;   /* that found nothing */
    bool hello_sent, hello_seen;
    bool up;          /* was up when it began to close: the layer above knows it */
    bool dying;       /* in net->dying */
    bool flushing;    /* a soft close has begun */
    bool close_done;  /* the endpoint is gone */
    bool lanes_known; /* method and transport are right */
    bool accepted;    /* they came to us */
    int rc;           /* why it closes; the first reason stays */
    uint32_t n_ops;   /* operations that UCX has not completed */
    uint32_t tx_seq, rx_seq;
    enum bt_net_method method;
    const char *transport;
    char address[64]; /* of the other side, for logs */
};

struct bt_net_op {
    struct bt_list link; /* net->free_ops or peer->queue */
    struct bt_net_peer *peer;
    bt_net_done_fn done;
    void *arg;
    size_t head_bytes;
    struct bt_str data; /* of a message */
    char *head;         /* `small`, or allocated */
    char small[BT_NET_FRAME_BYTES + BT_NET_OP_HEAD];
};

struct bt_net_mem {
    struct bt_list link; /* net->mems */
    struct bt_net *net;
    ucp_mem_h memh;
    void *key;
    size_t key_bytes;
};

struct bt_net_rkey {
    ucp_rkey_h rkey;
    struct bt_net_peer *peer;
};

struct bt_net {
    /* [any] set before the thread reports ready, constant afterwards */
    struct bt_net_cfg cfg;
    struct bt_net_handlers on;
    char *listen, *transports, *devices, *method_name; /* copies behind cfg */
    char address[64];
    uint32_t segment; /* bytes, longest of UCX's TCP in either direction */
    pthread_t thread;
    struct bt_mailbox mailbox;
    int efd;

    /* start-up handshake */
    pthread_mutex_t lock;
    pthread_cond_t ready_cond;
    bool ready;
    int start_rc;
    struct bt_err start_err;

    bool may_map;      /* reading a peer's memory directly is allowed by the configuration */
    int forced_method; /* enum bt_net_method, -1 = auto */
    ucp_context_h context;
    ucp_worker_h worker;
    ucp_listener_h listener;
    int ucp_fd;
    struct sockaddr_storage listen_address;
    /* gate.c */
    bool gated;
    struct bt_list gates;
    uint32_t n_handshakes;
    int gate_fd, gate_epfd;
    int door_fd; /* UCX's listening socket */
    struct bt_list gate_queue;
    struct bt_net_gate *at_door;
    struct sockaddr_storage ucx_address; /* UCX's private listener */
    struct bt_net_timer gate_pause;
    uint64_t gate_polled_ns;
    size_t max_head;
    struct bt_list peers;  /* struct bt_net_peer.link */
    struct bt_list dying;  /* struct bt_net_peer.dying_link */
    struct bt_list held;   /* struct bt_net_peer.held_link: to be posted by the loop */
    uint32_t in_done;      /* inside so many done callbacks */
    struct bt_list timers; /* by deadline */
    uint64_t due_ns;       /* when the loop comes round at the latest */
    uint64_t stalled_ns;   /* by so much it did not, all in all */
    struct bt_list mems;
    struct bt_list free_ops;
    uint32_t n_free_ops, n_peers;
    struct bt_map by_ep;
    struct bt_msg stop_msg;
    bool stopping;
};

/* env.c */
/* Sets the UCX_* variables this project relies on, once per process, where the user has not. */
void bt_net_env_init(void);
/* What UCX will be told of segments. BT_E_CONFIG: not one length for both directions. */
int bt_net_env_segment(uint32_t *ret, struct bt_err *err);
int bt_net_resolve(const char *address,
                   bool numeric_only,
                   struct sockaddr_storage *ret,
                   socklen_t *ret_len,
                   struct bt_err *err) BT_MUST_USE;
/* "1.2.3.4:5" or "[::1]:5". */
void bt_net_format(const struct sockaddr_storage *sa, char *buf, size_t n);
void bt_net_set_port(struct sockaddr_storage *sa, uint16_t port);
/* Names of the network devices that carry `sa`, comma separated, "all" for a wildcard address. */
int bt_net_devices_for(const struct sockaddr_storage *sa, char *buf, size_t n, struct bt_err *err)
    BT_MUST_USE;
int bt_net_method_parse(const char *name, int *ret_method, struct bt_err *err) BT_MUST_USE;
int bt_net_rc_of(ucs_status_t status);

/* mapped.c */
const struct bt_net_home *bt_net_home(void);
/* True if the memory of the process that says it is `peer` can be read and is that process. */
bool bt_net_mapped_probe(const struct bt_net_home *peer);
int bt_net_mapped_read(const struct bt_net_peer *peer, void *local, uint64_t remote, size_t bytes);

/* view.c */
void bt_net_views_drop(struct bt_net_peer *peer);

/* gate.c */
/* Opens the public port and shuts UCX's; UCX's listener is there. */
int bt_net_gate_listen(struct bt_net *net, struct bt_err *err) BT_MUST_USE;
void bt_net_gate_close(struct bt_net *net);
/* Handles what is ready; true if anything was. */
bool bt_net_gate_poll(struct bt_net *net);
/* Begins a connection; bt_net_peer_call follows when UCX may call. */
int bt_net_gate_dial(struct bt_net_peer *peer,
                     const struct sockaddr_storage *to,
                     struct bt_err *err) BT_MUST_USE;
/* The call that UCX has got is that of the gate at the door. False: there is none. */
bool bt_net_gate_adopt(struct bt_net_peer *peer);
void bt_net_gate_drop(struct bt_net_peer *peer);

/* peer.c */
/* Lets UCX call. */
void bt_net_peer_call(struct bt_net_peer *peer, const struct sockaddr_storage *to);
int bt_net_peer_init_worker(struct bt_net *net, struct bt_err *err) BT_MUST_USE;
int bt_net_listen(struct bt_net *net, struct bt_err *err) BT_MUST_USE;
void bt_net_peer_fail(struct bt_net_peer *peer, int rc);
/* Posts the messages that were sent from done callbacks; true if there were any. */
bool bt_net_post_held(struct bt_net *net);
/* Closes what is dying and reports what is dead; true if anything happened. */
bool bt_net_reap(struct bt_net *net);
struct bt_net_op *
bt_net_op_new(struct bt_net_peer *peer, size_t head, bt_net_done_fn done, void *arg);
void bt_net_op_free(struct bt_net_op *op);
/* Takes what a ucp_*_nbx call with bt_net_op_param returned. */
int bt_net_op_started(struct bt_net_op *op, ucs_status_ptr_t status);
ucp_request_param_t bt_net_op_param(struct bt_net_op *op);

#endif
