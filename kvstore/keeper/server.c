/* The keeper's clients, their processes, and its loop (contract in server.h).
 *
 * An owner is a process in one incarnation. Its regions stay its own when its connection ends, for
 * its memory is still mapped: only the pidfd proves that it is over. Then its regions have no
 * owner, and whoever waits for one of them is served.
 *
 * A client that does not keep to the protocol, or does not read, loses its connection, nothing
 * else. Nothing here blocks but the poll. */
#include "kvstore/keeper/server_int.h"

#include "common/base/buf.h"
#include "common/mem/mem.h"
#include "common/obs/log.h"
#include "common/thr/mailbox.h"
#include "common/thr/time.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#define HELLO_NS (5 * BT_NS_PER_S) /* a client that says nothing for longer goes */
#define BACKLOG  64

static struct kv_client *client_of(struct bt_list *link)
{
    return BT_LIST_ENTRY(link, struct kv_client, link);
}

static struct kv_owner *owner_of(struct bt_list *link)
{
    return BT_LIST_ENTRY(link, struct kv_owner, link);
}

/* ---- owners ---- */

void kv_owner_put(struct kv_keeperd *k, struct kv_owner *o)
{
    if (!o || --o->n_refs > 0) {
        return;
    }
    bt_list_remove(&o->link);
    k->n_owners--;
    close(o->pidfd);
    free(o);
}

/* The live process of that number and incarnation: it has connected before. */
static struct kv_owner *
find_owner(const struct kv_keeperd *k, pid_t pid, const struct kv_keeper_hello *h)
{
    bt_list_for_each (l, &k->owners) {
        struct kv_owner *o = owner_of(l);

        if (pid > 0 && o->pid == pid && !o->over && !kv_pidfd_over(o->pidfd) &&
            o->incarnation == h->incarnation && strcmp(o->node, h->node) == 0) {
            return o;
        }
    }
    return NULL;
}

static int
get_owner(struct kv_keeperd *k, int sock, const struct kv_keeper_hello *h, struct kv_owner **ret)
{
    struct kv_sock_peer peer;
    struct kv_owner *o;
    int rc = kv_sock_peer(sock, &peer, NULL), pidfd;

    rc = rc < 0 ? rc : kv_sock_peer_pidfd(sock, &pidfd, NULL);
    if (rc < 0) {
        return rc;
    }
    o = find_owner(k, peer.pid, h);
    if (o) {
        close(pidfd);
    } else {
        o = bt_calloc(1, sizeof(*o));
        if (!o) {
            close(pidfd);
            return BT_E_NOMEM;
        }
        o->pidfd = pidfd;
        o->pid = peer.pid;
        o->incarnation = h->incarnation;
        memcpy(o->node, h->node, sizeof(o->node));
        bt_list_push_back(&k->owners, &o->link);
        k->n_owners++;
    }
    o->n_refs++;
    *ret = o;
    return BT_OK;
}

/* ---- answers ---- */

static void end_client(struct kv_client *c)
{
    c->ended = true;
    c->waits = false;
}

static void say(struct kv_client *c, enum kv_keeper_type type, void *msg, size_t bytes, int fd)
{
    if (!c->ended && kv_sock_send(c->fd, type, msg, bytes, fd) < 0) {
        end_client(c); /* gone, or it does not read */
    }
}

static void
refuse(struct kv_client *c, int rc, const struct kv_owner *in_the_way, const struct bt_err *err)
{
    struct kv_keeper_refused m = {.rc = rc};

    if (in_the_way) {
        m.pid = (uint32_t)in_the_way->pid;
        m.incarnation = in_the_way->incarnation;
    }
    snprintf(m.text, sizeof(m.text), "%s", bt_err_msg(err, rc));
    /* The way to ask whether a device's memory is here: no fault. */
    if (rc == BT_E_UNSUPPORTED && c->request.kind == BT_MEM_CUDA && c->request.device == 0) {
        BT_INFO("absent", "node=%s msg=\"%s\"", c->owner ? c->owner->node : "?", m.text);
    } else {
        BT_WARN("refused", "node=%s rc=%s msg=\"%s\"", c->owner ? c->owner->node : "?",
                bt_rc_name(rc), m.text);
    }
    say(c, KV_KEEPER_REFUSED, &m, sizeof(m), -1);
}

/* It broke a rule: told why, then cut off. */
static void expel(struct kv_client *c, const char *why)
{
    struct bt_err err;

    refuse(c, BT_FAIL(&err, BT_E_PEER_PROTOCOL, "%s", why), NULL, &err);
    end_client(c);
}

static void
grant(struct kv_client *c, struct kv_region *r, uint64_t previous, bool kept, bool with_fd)
{
    struct kv_keeper_grant m = {
        .id = r->id, .bytes = r->bytes, .previous = previous, .kept = kept, .pages = r->pages};

    BT_INFO(
        "granted", "node=%s region=%s incarnation=%llu previous=%llu bytes=%llu kept=%d pages=%s",
        r->node, r->name, (unsigned long long)r->incarnation, (unsigned long long)previous,
        (unsigned long long)r->bytes, kept, r->pages == KV_KEEPER_PAGES_HUGE ? "huge" : "plain");
    say(c, KV_KEEPER_GRANT, &m, sizeof(m), with_fd ? r->fd : -1);
}

/* ---- requests ---- */

/* Who has the region and lives, other than the client's own process. */
static struct kv_owner *in_the_way(const struct kv_region *r, const struct kv_client *c)
{
    return r && r->owner && r->owner != c->owner ? r->owner : NULL;
}

static void refuse_fenced(struct kv_client *c, const struct kv_owner *o)
{
    struct bt_err err;

    BT_FAIL(&err, BT_E_EXISTS,
            "region %s of %s: incarnation %llu (process %d) lives, incarnation %llu (process %d) "
            "gets nothing",
            c->request.region, o->node, (unsigned long long)o->incarnation, (int)o->pid,
            (unsigned long long)c->owner->incarnation, (int)c->owner->pid);
    refuse(c, BT_E_EXISTS, o, &err);
}

/* Nobody is in the way. */
static void give(struct kv_keeperd *k, struct kv_client *c)
{
    struct kv_region *r = kv_region_find(k, c->owner->node, c->request.region);
    uint64_t previous = r ? r->incarnation : 0;
    bool kept = r && kv_region_fits(r, &c->request);
    struct bt_err err = {.rc = BT_OK};
    int rc;

    if (c->owner->over) {
        end_client(c); /* somebody else holds the socket of a process that is over */
        return;
    }
    rc = kept ? BT_OK : kv_region_make(k, c->owner, &c->request, &r, &err);
    if (rc < 0) {
        refuse(c, rc, NULL, &err);
        return;
    }
    if (!r->owner) {
        kv_region_set_owner(r, c->owner);
    }
    grant(c, r, previous, kept, true);
}

static void handle_get(struct kv_keeperd *k, struct kv_client *c, const struct kv_keeper_request *q)
{
    struct kv_owner *o;

    c->request = *q;
    o = in_the_way(kv_region_find(k, c->owner->node, q->region), c);
    if (!o) {
        give(k, c);
    } else if (q->wait_ms == 0) {
        refuse_fenced(c, o);
    } else {
        c->waits = true;
        c->deadline_ns = bt_deadline_ns(BT_MIN(q->wait_ms, (uint64_t)86400000) * BT_NS_PER_MS);
    }
}

static void handle_register(struct kv_keeperd *k, struct kv_client *c, struct kv_packet *p)
{
    const struct kv_keeper_request *q = &p->request;
    struct kv_region *r = kv_region_find(k, c->owner->node, q->region);
    struct kv_owner *o = in_the_way(r, c);
    struct bt_err err = {.rc = BT_OK};
    int rc;

    c->request = *q;
    if (o) {
        refuse_fenced(c, o);
        return;
    }
    if (c->owner->over) {
        end_client(c);
        return;
    }
    if (!(r && r->owner == c->owner && r->id == q->id && kv_region_fits(r, q))) {
        rc = kv_region_take(k, c->owner, q, p->fds[0], &err);
        if (rc < 0) {
            refuse(c, rc, NULL, &err);
            return;
        }
        p->n_fds = 0;
        r = kv_region_find(k, c->owner->node, q->region);
        kv_region_set_owner(r, c->owner);
    }
    grant(c, r, c->owner->incarnation, true, false);
}

static void handle_hello(struct kv_keeperd *k, struct kv_client *c, const struct kv_keeper_hello *h)
{
    struct kv_keeper_welcome m = {.pid = (uint32_t)getpid()};
    struct bt_err err;
    int rc;

    if (c->owner || !kv_keeper_name_ok(h->node, sizeof(h->node)) || h->incarnation == 0) {
        expel(c, c->owner ? "second hello" : "hello with a bad name or no incarnation");
        return;
    }
    rc = get_owner(k, c->fd, h, &c->owner);
    if (rc < 0) {
        refuse(c, BT_FAIL(&err, rc, "the process at the other end cannot be watched"), NULL, &err);
        end_client(c);
        return;
    }
    say(c, KV_KEEPER_WELCOME, &m, sizeof(m), -1);
}

static void handle_status(struct kv_keeperd *k, struct kv_client *c)
{
    struct kv_keeper_rows m = {0};
    uint64_t now = bt_now_ns();

    bt_list_for_each (l, &k->regions) {
        const struct kv_region *r = BT_LIST_ENTRY(l, struct kv_region, link);
        struct kv_keeper_row *row;

        if (m.n == KV_KEEPER_ROWS_MAX) {
            say(c, KV_KEEPER_ROWS, &m, sizeof(m), -1);
            memset(&m, 0, sizeof(m));
        }
        row = &m.rows[m.n++];
        memcpy(row->node, r->node, sizeof(row->node));
        memcpy(row->region, r->name, sizeof(row->region));
        row->bytes = r->bytes;
        row->id = r->id;
        row->incarnation = r->incarnation;
        row->pid = r->owner ? (uint32_t)r->owner->pid : 0;
        row->pages = r->pages;
        row->idle_ms = r->owner ? 0 : (now - r->orphan_ns) / BT_NS_PER_MS;
    }
    m.last = 1;
    say(c, KV_KEEPER_ROWS, &m, sizeof(m), -1);
}

static bool request_ok(const struct kv_packet *p)
{
    return kv_keeper_name_ok(p->request.region, sizeof(p->request.region));
}

static void handle_packet(struct kv_keeperd *k, struct kv_client *c, struct kv_packet *p)
{
    bool is_register = kv_packet_is(p, KV_KEEPER_REGISTER);

    if (p->n_fds != (is_register ? 1 : 0)) {
        expel(c, "descriptors where none belong, or none where one does");
    } else if (c->waits) {
        expel(c, "a request while another one is open");
    } else if (kv_packet_is(p, KV_KEEPER_HELLO)) {
        handle_hello(k, c, &p->hello);
    } else if (kv_packet_is(p, KV_KEEPER_STATUS)) {
        handle_status(k, c);
    } else if (!is_register && !kv_packet_is(p, KV_KEEPER_GET)) {
        expel(c, "no message of this protocol version");
    } else if (!c->owner) {
        expel(c, "a request before the hello");
    } else if (!request_ok(p)) {
        expel(c, "a bad region name");
    } else if (is_register) {
        handle_register(k, c, p);
    } else {
        handle_get(k, c, &p->request);
    }
}

static void on_client(struct kv_keeperd *k, struct kv_client *c)
{
    struct kv_packet p;
    int rc = kv_sock_recv(c->fd, &p);

    if (rc == BT_PENDING) {
        return;
    }
    if (rc < 0) {
        end_client(c);
        return;
    }
    handle_packet(k, c, &p);
    kv_packet_drop(&p);
}

/* ---- ends ---- */

static void serve_waiting(struct kv_keeperd *k, uint64_t now_ns)
{
    bt_list_for_each (l, &k->clients) {
        struct kv_client *c = client_of(l);
        struct kv_owner *o;

        if (!c->waits) {
            continue;
        }
        o = in_the_way(kv_region_find(k, c->owner->node, c->request.region), c);
        if (!o) {
            c->waits = false;
            give(k, c);
        } else if (now_ns >= c->deadline_ns) {
            c->waits = false;
            refuse_fenced(c, o);
        }
    }
}

/* The process is over: nobody has its regions any more. */
static void on_over(struct kv_keeperd *k, struct kv_owner *o)
{
    o->over = true;
    o->n_refs++;
    bt_list_for_each (l, &k->regions) {
        struct kv_region *r = BT_LIST_ENTRY(l, struct kv_region, link);

        if (r->owner == o) {
            r->owner = NULL;
            r->orphan_ns = bt_now_ns();
            kv_owner_put(k, o);
            BT_INFO("orphaned", "node=%s region=%s incarnation=%llu pid=%d", r->node, r->name,
                    (unsigned long long)o->incarnation, (int)o->pid);
        }
    }
    kv_owner_put(k, o);
}

static void close_client(struct kv_keeperd *k, struct kv_client *c)
{
    bt_list_remove(&c->link);
    k->n_clients--;
    close(c->fd);
    kv_owner_put(k, c->owner);
    free(c);
}

static void close_ended(struct kv_keeperd *k)
{
    struct bt_list *l = k->clients.next, *next;

    for (; l != &k->clients; l = next) {
        next = l->next;
        if (client_of(l)->ended) {
            close_client(k, client_of(l));
        }
    }
}

/* ---- new clients ---- */

/* Refused before it is one: told why, then closed. */
static void turn_away(int fd, int rc, const char *why)
{
    struct kv_keeper_refused m = {.rc = rc};
    int said;

    snprintf(m.text, sizeof(m.text), "%s", why);
    BT_WARN("turned_away", "rc=%s msg=\"%s\"", bt_rc_name(rc), why);
    said = kv_sock_send(fd, KV_KEEPER_REFUSED, &m, sizeof(m), -1);
    (void)said;
    close(fd);
}

static void on_listen(struct kv_keeperd *k)
{
    int fd = accept4(k->listen_fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    struct kv_sock_peer peer;
    struct kv_client *c;
    char why[100];

    if (fd < 0) {
        return;
    }
    if (kv_sock_peer(fd, &peer, NULL) < 0 || peer.uid != geteuid()) {
        snprintf(why, sizeof(why), "user %u is not user %u, whom this keeper serves",
                 (unsigned)peer.uid, (unsigned)geteuid());
        turn_away(fd, BT_E_DENIED, why);
        return;
    }
    if (k->n_clients >= k->conf.max_clients) {
        snprintf(why, sizeof(why), "%u clients are connected, more are not served", k->n_clients);
        turn_away(fd, BT_E_EXHAUSTED, why);
        return;
    }
    c = bt_calloc(1, sizeof(*c));
    if (!c) {
        turn_away(fd, BT_E_NOMEM, "no memory");
        return;
    }
    c->fd = fd;
    c->deadline_ns = bt_deadline_ns(HELLO_NS);
    bt_list_push_back(&k->clients, &c->link);
    k->n_clients++;
}

/* ---- the loop ---- */

static void add_poll(struct kv_keeperd *k, int fd, void *what)
{
    BT_BUG_ON(k->n_polls == k->cap_polls);
    k->polls[k->n_polls] = (struct pollfd){.fd = fd, .events = POLLIN};
    k->polled[k->n_polls++] = what;
}

/* Returns where the owners begin. */
static uint32_t fill_polls(struct kv_keeperd *k)
{
    uint32_t first;

    k->n_polls = 0;
    add_poll(k, k->wake_fd, NULL);
    add_poll(k, k->listen_fd, NULL);
    bt_list_for_each (l, &k->clients) {
        add_poll(k, client_of(l)->fd, client_of(l));
    }
    first = k->n_polls;
    bt_list_for_each (l, &k->owners) {
        if (!owner_of(l)->over) {
            add_poll(k, owner_of(l)->pidfd, owner_of(l));
        }
    }
    return first;
}

/* Until the next moment at which something is due without an event. */
static int timeout_ms(struct kv_keeperd *k, uint64_t now)
{
    uint64_t next = kv_region_expire(k, now);

    bt_list_for_each (l, &k->clients) {
        const struct kv_client *c = client_of(l);

        if (c->waits || !c->owner) {
            next = BT_MIN(next, c->deadline_ns);
        }
    }
    if (next == BT_NEVER_NS) {
        return -1;
    }
    return next > now ? (int)BT_MIN((next - now) / BT_NS_PER_MS + 1, (uint64_t)3600000) : 0;
}

static void one_round(struct kv_keeperd *k)
{
    uint32_t owners = fill_polls(k), n = k->n_polls;
    uint64_t now;

    if (poll(k->polls, n, timeout_ms(k, bt_now_ns())) < 0) {
        return; /* a signal */
    }
    if (k->polls[0].revents) {
        bt_eventfd_clear(k->wake_fd);
        k->stop = true;
    }
    /* Ends first: a successor's request must not find a dead owner. */
    for (uint32_t i = owners; i < n; i++) {
        if (k->polls[i].revents) {
            on_over(k, k->polled[i]);
        }
    }
    for (uint32_t i = 2; i < owners; i++) {
        if (k->polls[i].revents) {
            on_client(k, k->polled[i]);
        }
    }
    if (k->polls[1].revents) {
        on_listen(k);
    }
    now = bt_now_ns();
    bt_list_for_each (l, &k->clients) {
        struct kv_client *c = client_of(l);

        if (!c->owner && !c->ended && now >= c->deadline_ns) {
            expel(c, "no hello in time");
        }
    }
    serve_waiting(k, now);
    close_ended(k);
}

void kv_keeperd_run(struct kv_keeperd *k)
{
    while (!k->stop) {
        one_round(k);
    }
}

void kv_keeperd_stop(struct kv_keeperd *k)
{
    bt_eventfd_wake(&k->wake_fd); /* its last touch of k: run ends behind it, then k may go */
}

/* ---- life ---- */

/* The lock goes with the process, whatever ends it; a socket that is there is then nobody's. */
static int take_path(struct kv_keeperd *k, struct bt_err *err)
{
    char lock[sizeof(k->path) + 8];
    struct stat st;

    snprintf(lock, sizeof(lock), "%s.lock", k->path);
    k->lock_fd = open(lock, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (k->lock_fd < 0) {
        return BT_FAIL_SYS(err, BT_E_SYS, "%.120s", lock);
    }
    if (flock(k->lock_fd, LOCK_EX | LOCK_NB) != 0) {
        return BT_FAIL(err, BT_E_EXISTS, "another keeper serves %.100s", k->path);
    }
    if (lstat(k->path, &st) == 0 && !S_ISSOCK(st.st_mode)) {
        return BT_FAIL(err, BT_E_CONFIG, "socket = %.100s: there is something else than a socket",
                       k->path);
    }
    if (unlink(k->path) != 0 && errno != ENOENT) {
        return BT_FAIL_SYS(err, BT_E_SYS, "%.100s", k->path);
    }
    return BT_OK;
}

/* The mode is set while it is bound, so that there is no moment at which others may connect. */
static int open_listener(struct kv_keeperd *k, struct bt_err *err)
{
    struct sockaddr_un sa;
    int rc = kv_sock_address(k->path, &sa, err), bound;
    mode_t mask;

    if (rc < 0) {
        return rc;
    }
    k->listen_fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (k->listen_fd < 0) {
        return BT_FAIL_SYS(err, BT_E_SYS, "socket");
    }
    mask = umask(0177);
    bound = bind(k->listen_fd, (struct sockaddr *)&sa, sizeof(sa));
    umask(mask);
    if (bound != 0 || listen(k->listen_fd, BACKLOG) != 0) {
        return BT_FAIL_SYS(err, BT_E_SYS, "cannot listen on %.100s", k->path);
    }
    return BT_OK;
}

static uint64_t host_memory(void)
{
    return (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE);
}

int kv_keeperd_create(const struct kv_keeper_conf *conf,
                      struct kv_keeperd **ret,
                      struct bt_err *err)
{
    struct kv_keeperd *k = bt_calloc(1, sizeof(*k));
    struct sockaddr_un sa;
    int rc;

    if (!k) {
        return BT_FAIL(err, BT_E_NOMEM, "keeper: no memory");
    }
    k->conf = *conf;
    k->conf.max_bytes = conf->max_bytes ? conf->max_bytes : host_memory();
    k->lock_fd = k->listen_fd = k->wake_fd = -1;
    bt_list_init(&k->clients);
    bt_list_init(&k->owners);
    bt_list_init(&k->regions);
    k->cap_polls = 2 + 2 * conf->max_clients + conf->max_regions; /* owners have one or the other */
    k->polls = bt_calloc(k->cap_polls, sizeof(*k->polls));
    k->polled = bt_calloc(k->cap_polls, sizeof(void *));
    rc = k->polls && k->polled ? BT_OK : BT_FAIL(err, BT_E_NOMEM, "keeper: no memory");
    rc = rc < 0 ? rc : kv_sock_address(conf->socket, &sa, err);
    if (rc == BT_OK) {
        snprintf(k->path, sizeof(k->path), "%s", conf->socket);
        rc = bt_eventfd_create(&k->wake_fd, err);
    }
    rc = rc < 0 ? rc : take_path(k, err);
    rc = rc < 0 ? rc : open_listener(k, err);
    if (rc < 0) {
        kv_keeperd_destroy(k);
        return rc;
    }
    *ret = k;
    return BT_OK;
}

void kv_keeperd_destroy(struct kv_keeperd *k)
{
    if (!k) {
        return;
    }
    if (k->listen_fd >= 0) {
        unlink(k->path); /* it is ours: we have the lock */
    }
    while (!bt_list_empty(&k->clients)) {
        close_client(k, client_of(k->clients.next));
    }
    while (!bt_list_empty(&k->regions)) {
        kv_region_drop(k, BT_LIST_ENTRY(k->regions.next, struct kv_region, link));
    }
    bt_close_fd(&k->listen_fd);
    bt_close_fd(&k->lock_fd);
    bt_close_fd(&k->wake_fd);
    free(k->polls);
    free(k->polled);
    free(k);
}
