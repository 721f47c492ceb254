/* The memory of another process of this host, mapped: what makes a read one copy without a system
 * call, by our own instructions.
 *
 * Pools and blocks lie in memory files. Which one an address of the peer belongs to says its
 * /proc/PID/maps, and the descriptor it keeps of it is opened through /proc/PID/fd, for which the
 * same right is needed as for process_vm_readv (mapped.c). Where the peer tells the file itself, no
 * address is needed, and what is seen is that file for sure. Only files that are sealed against
 * shrinking are mapped: reading them cannot fault, whatever the peer does. A mapping outlives the
 * peer; what it shows then is stale, as a late read is, and is caught by the same checks. */
#include "common/net/net_int.h"

#include "common/mem/mem.h"
#include "common/obs/log.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#define MAX_TRIES 16 /* of a peer, that found nothing */
#define MAX_FILES 16 /* of a peer, that are seen by name */

struct view {
    struct bt_list link; /* peer.views */
    bool by_name;
    uint64_t remote;         /* !by_name */
    struct bt_net_file file; /* by_name: all of it is seen */
    size_t bytes;
    char *local;
};

/* A line of maps. */
struct range {
    uint64_t start, end, offset, ino;
    dev_t dev;
};

static bool find_range(uint32_t pid, uint64_t remote, size_t bytes, struct range *ret)
{
    char path[64], line[512];
    bool found = false;
    FILE *f;

    snprintf(path, sizeof(path), "/proc/%u/maps", pid);
    f = fopen(path, "re");
    while (f && !found && fgets(line, sizeof(line), f)) {
        unsigned long long start, end, offset, ino;
        unsigned major_no, minor_no;
        char perms[5];

        if (sscanf(line, "%llx-%llx %4s %llx %x:%x %llu", &start, &end, perms, &offset, &major_no,
                   &minor_no, &ino) != 7) {
            continue;
        }
        if (remote < start || remote >= end) {
            continue;
        }
        if (perms[0] != 'r' || perms[3] != 's' || ino == 0 || bytes > end - remote) {
            break;
        }
        *ret = (struct range){start, end, offset, ino, makedev(major_no, minor_no)};
        found = true;
    }
    if (f) {
        fclose(f);
    }
    return found;
}

/* The peer's descriptor of that file, opened for reading; -1: it has none. */
static int open_file(uint32_t pid, uint64_t dev, uint64_t ino)
{
    char path[64 + 256];
    struct dirent *e;
    int fd = -1;
    DIR *d;

    snprintf(path, sizeof(path), "/proc/%u/fd", pid);
    d = opendir(path);
    while (d && fd < 0 && (e = readdir(d)) != NULL) {
        struct stat st;

        snprintf(path, sizeof(path), "/proc/%u/fd/%s", pid, e->d_name);
        if (e->d_name[0] == '.' || stat(path, &st) != 0 || !S_ISREG(st.st_mode) ||
            st.st_ino != ino || st.st_dev != dev) {
            continue;
        }
        fd = open(path, O_RDONLY | O_CLOEXEC);
        if (fd >= 0 && (fstat(fd, &st) != 0 || st.st_ino != ino || st.st_dev != dev)) {
            bt_close_fd(&fd);
            fd = -1;
        }
    }
    if (d) {
        closedir(d);
    }
    return fd;
}

/* Its size if it cannot become smaller; 0: it can, or is none. */
static uint64_t sealed_size(int fd, struct stat *st)
{
    int seals = fcntl(fd, F_GET_SEALS);

    return seals >= 0 && (seals & F_SEAL_SHRINK) && fstat(fd, st) == 0 && st->st_size > 0
               ? (uint64_t)st->st_size
               : 0;
}

/* Maps bytes of a file of the peer; takes the descriptor. NULL: it may not be. */
static struct view *map_file(struct bt_net_peer *peer, int fd, uint64_t offset, uint64_t bytes)
{
    struct view *v = bt_calloc(1, sizeof(*v));
    void *p = NULL;
    struct stat st;
    uint64_t size = fd >= 0 ? sealed_size(fd, &st) : 0;

    bytes = bytes ? bytes : size; /* 0: all of it */
    if (v && bytes > 0 && offset <= size && bytes <= size - offset) {
        p = bt_mem_map(fd, offset, bytes, PROT_READ);
    }
    bt_close_fd(&fd);
    /* The number may have gone to another process meanwhile. */
    if (p && !bt_net_mapped_probe(&peer->home)) {
        munmap(p, bytes);
        p = NULL;
    }
    if (!p) {
        free(v);
        return NULL;
    }
    v->bytes = bytes;
    v->local = p;
    bt_list_push_front(&peer->views, &v->link);
    BT_DEBUG("peer_view", "peer=%s bytes=%zu", peer->address, v->bytes);
    return v;
}

static struct view *make_view(struct bt_net_peer *peer, uint64_t remote, size_t bytes)
{
    struct view *v = NULL;
    struct range r;

    if (find_range(peer->mapped_pid, remote, bytes, &r)) {
        v = map_file(peer, open_file(peer->mapped_pid, r.dev, r.ino), r.offset, r.end - r.start);
    }
    if (v) {
        v->remote = r.start;
    }
    return v;
}

static bool can_view(const struct bt_net_peer *peer)
{
    return peer->mapped_pid && peer->state == BT_NET_PEER_UP && !peer->dying;
}

bool bt_net_file_of(int fd, struct bt_net_file *ret_file)
{
    struct stat st;

    if (fd < 0 || sealed_size(fd, &st) == 0) {
        return false;
    }
    *ret_file = (struct bt_net_file){st.st_dev, st.st_ino};
    return true;
}

const void *bt_net_view_file(struct bt_net_peer *peer, const struct bt_net_file *file, size_t bytes)
{
    uint32_t n_files = 0;
    struct view *v;

    if (!can_view(peer)) {
        return NULL;
    }
    bt_list_for_each (it, &peer->views) {
        v = BT_LIST_ENTRY(it, struct view, link);
        n_files += v->by_name;
        if (v->by_name && v->file.dev == file->dev && v->file.ino == file->ino) {
            return bytes <= v->bytes ? v->local : NULL;
        }
    }
    if (peer->n_view_tries >= MAX_TRIES || n_files >= MAX_FILES) {
        return NULL;
    }
    v = map_file(peer, open_file(peer->mapped_pid, file->dev, file->ino), 0, 0);
    if (!v) {
        peer->n_view_tries++;
        return NULL;
    }
    v->by_name = true;
    v->file = *file;
    return bytes <= v->bytes ? v->local : NULL;
}

const void *bt_net_view(struct bt_net_peer *peer, uint64_t remote, size_t bytes)
{
    struct view *v;

    if (!can_view(peer)) {
        return NULL;
    }
    bt_list_for_each (it, &peer->views) {
        v = BT_LIST_ENTRY(it, struct view, link);
        if (!v->by_name && remote >= v->remote && remote - v->remote < v->bytes &&
            bytes <= v->bytes - (remote - v->remote)) {
            return v->local + (remote - v->remote);
        }
    }
    if (peer->n_view_tries >= MAX_TRIES) {
        return NULL;
    }
    v = make_view(peer, remote, bytes);
    if (!v) {
        peer->n_view_tries++;
        return NULL;
    }
    return v->local + (remote - v->remote);
}

void bt_net_views_drop(struct bt_net_peer *peer)
{
    struct bt_list *it;

    while ((it = bt_list_pop_front(&peer->views)) != NULL) {
        struct view *v = BT_LIST_ENTRY(it, struct view, link);

        munmap(v->local, v->bytes);
        free(v);
    }
}
