/* How many of each role there are: start in order, scaling, the end in reverse order, and the loop
 * that looks at everything whenever something has happened or is due. */
#include "deploy/supervisor/supervisor.h"

#include "common/obs/log.h"
#include "common/thr/mailbox.h"

#include <poll.h>
#include <stdlib.h>

#define FDS_MAX 1024

struct sv_child *sv_child_find(const struct sv *sv, const char *name)
{
    for (size_t i = 0; i < sv->n_roles; i++) {
        bt_list_for_each (it, &sv->roles[i]->childs) {
            struct sv_child *c = BT_LIST_ENTRY(it, struct sv_child, link);

            if (strcmp(c->name, name) == 0) {
                return c;
            }
        }
    }
    return NULL;
}

unsigned sv_role_ready(const struct sv_role *role)
{
    unsigned n = 0;

    bt_list_for_each (it, &role->childs) {
        const struct sv_child *c = BT_LIST_ENTRY(it, struct sv_child, link);

        n += c->state == SV_READY && !c->unwanted && c->generation == role->generation;
    }
    return n;
}

static unsigned count_wanted(const struct sv_role *role)
{
    unsigned n = 0;

    bt_list_for_each (it, &role->childs) {
        n += !BT_LIST_ENTRY(it, struct sv_child, link)->unwanted;
    }
    return n;
}

/* The lowest index that is free; those of processes that are ending are not. */
static unsigned free_index(const struct sv_role *role)
{
    unsigned index = 0;

    bt_list_for_each (it, &role->childs) {
        if (BT_LIST_ENTRY(it, struct sv_child, link)->index != index) {
            break;
        }
        index++;
    }
    return index;
}

static struct sv_child *last_wanted(const struct sv_role *role)
{
    struct sv_child *last = NULL;

    bt_list_for_each (it, &role->childs) {
        struct sv_child *c = BT_LIST_ENTRY(it, struct sv_child, link);

        last = c->unwanted ? last : c;
    }
    return last;
}

void sv_role_scale(struct sv *sv, struct sv_role *role, unsigned n)
{
    if (role->wanted != n) {
        BT_INFO("scale", "role=%s from=%u to=%u", role->name, role->wanted, n);
    }
    role->wanted = n;
    sv->dirty = true;
}

/* As many as are wanted: the highest go first, the lowest free names come. */
static void match(struct sv *sv, struct sv_role *role)
{
    unsigned n = count_wanted(role);

    for (; n > role->wanted; n--) {
        struct sv_child *c = last_wanted(role);

        c->unwanted = true;
        sv_child_stop(sv, c);
    }
    for (; n < role->wanted; n++) {
        if (!sv_child_add(role, free_index(role))) {
            BT_ERROR("scale", "role=%s msg=\"no memory\"", role->name);
            return;
        }
    }
}

/* A new command: one process after the other, the next one when all others are ready. */
static void renew(struct sv *sv, struct sv_role *role)
{
    struct sv_child *old = NULL;

    bt_list_for_each (it, &role->childs) {
        struct sv_child *c = BT_LIST_ENTRY(it, struct sv_child, link);

        if (c->unwanted) {
            continue;
        }
        if (c->generation != role->generation && c->state == SV_READY) {
            old = old ? old : c;
        } else if (c->state != SV_READY) {
            return;
        }
    }
    if (old) {
        sv_child_stop(sv, old);
    }
}

static bool all_ready(const struct sv_role *role)
{
    return sv_role_ready(role) >= role->wanted;
}

/* The next role begins when the ones before are ready. */
static void start_roles(struct sv *sv)
{
    while (sv->boot < sv->n_roles && (sv->boot == 0 || all_ready(sv->roles[sv->boot - 1]))) {
        sv->boot++;
        match(sv, sv->roles[sv->boot - 1]);
    }
    if (!sv->booted && sv->boot == sv->n_roles && all_ready(sv->roles[sv->boot - 1])) {
        sv->booted = true;
        sv->ready(sv->ready_arg);
    }
}

/* Those that were started last go first; the ones before follow when they are over. */
static bool stop_roles(struct sv *sv)
{
    for (size_t i = sv->n_roles; i-- > 0;) {
        struct sv_role *role = sv->roles[i];

        if (bt_list_empty(&role->childs)) {
            continue;
        }
        bt_list_for_each (it, &role->childs) {
            struct sv_child *c = BT_LIST_ENTRY(it, struct sv_child, link);

            c->unwanted = true;
            sv_child_stop(sv, c);
        }
        return false;
    }
    return true;
}

/* False: everything has ended. */
static bool turn(struct sv *sv, uint64_t *ret_next_ns)
{
    *ret_next_ns = BT_NEVER_NS;
    if (!sv->stopping && (__atomic_load_n(&sv->quit, __ATOMIC_ACQUIRE) || sv->failed)) {
        BT_INFO("stop", "msg=\"ending all processes\"");
        sv->stopping = true;
    }
    if (sv->stopping && stop_roles(sv)) {
        return false;
    }
    for (size_t i = 0; i < sv->boot && !sv->stopping; i++) {
        match(sv, sv->roles[i]);
        renew(sv, sv->roles[i]);
    }
    if (!sv->stopping) {
        start_roles(sv);
    }
    for (size_t i = 0; i < sv->n_roles; i++) {
        bt_list_for_each_safe (it, &sv->roles[i]->childs) {
            sv_child_turn(sv, BT_LIST_ENTRY(it, struct sv_child, link), ret_next_ns);
        }
        if (sv->roles[i]->canary && sv->roles[i]->wanted == 0 &&
            bt_list_empty(&sv->roles[i]->childs)) {
            sv_role_remove(sv, sv->roles[i--]);
            sv->dirty = true;
        }
    }
    if (sv->dirty) { /* something has changed: look once more before sleeping */
        sv_state_write(sv);
        *ret_next_ns = bt_now_ns();
    }
    return true;
}

static void wait_for_events(struct sv *sv, uint64_t next_ns)
{
    static struct pollfd fds[FDS_MAX];
    uint64_t now = bt_now_ns();
    size_t n = 0;
    int ms = -1;

    fds[n++] = (struct pollfd){sv->wake_fd, POLLIN, 0};
    n += sv_control_poll(sv, fds + n, 128);
    for (size_t i = 0; i < sv->n_roles; i++) {
        bt_list_for_each (it, &sv->roles[i]->childs) {
            const struct sv_child *c = BT_LIST_ENTRY(it, struct sv_child, link);

            if (c->pidfd >= 0 && n < FDS_MAX) {
                fds[n++] = (struct pollfd){c->pidfd, POLLIN, 0};
            }
        }
    }
    if (next_ns != BT_NEVER_NS) {
        ms = next_ns > now ? (int)BT_MIN((next_ns - now) / BT_NS_PER_MS + 1, 60000ull) : 0;
    }
    poll(fds, (nfds_t)n, ms);
    bt_eventfd_clear(sv->wake_fd);
}

void sv_stop(struct sv *sv)
{
    __atomic_store_n(&sv->quit, true, __ATOMIC_RELEASE); /* pairs with turn */
    bt_eventfd_wake(&sv->wake_fd);
}

void sv_run(struct sv *sv)
{
    uint64_t next, idle = BT_NEVER_NS; /* idle: when a client has been silent for too long */

    while (turn(sv, &next)) {
        wait_for_events(sv, BT_MIN(next, idle));
        idle = BT_NEVER_NS;
        sv_control_turn(sv, &idle);
    }
    sv_state_write(sv);
}
