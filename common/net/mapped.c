/* Reading the memory of another process of this host: what makes "pull" one copy and one-sided.
 *
 * UCX 1.13 has this transport ("cma") but gives it no lane for reads on connections made by socket
 * address, and its newer protocols, which would, abort when a peer dies. So process_vm_readv is
 * called here. Whether a peer can be read is found out when it says hello: it names its host, its
 * process and where a random word lies in its memory, and we read that word. */
#include "common/net/net_int.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

static struct bt_net_home home;

static uint64_t mix(uint64_t h, const void *p, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        h = (h ^ ((const uint8_t *)p)[i]) * 0x100000001b3ull; /* FNV-1a */
    }
    return h;
}

static void home_init_once(void)
{
    char boot[64] = "";
    struct stat st = {0};
    int fd = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
    ssize_t n = -1;

    if (fd >= 0) {
        n = read(fd, boot, sizeof(boot));
        close(fd);
    }
    if (n > 0 && stat("/proc/self/ns/pid", &st) == 0) {
        uint64_t ino = st.st_ino;

        home.host = mix(mix(0xcbf29ce484222325ull, boot, (size_t)n), &ino, sizeof(ino));
        home.pid = (uint32_t)getpid();
    }
    if (getrandom(home.cookie, sizeof(home.cookie), 0) != (ssize_t)sizeof(home.cookie)) {
        home.pid = 0;
    }
    home.cookie_at = (uint64_t)(uintptr_t)home.cookie;
#ifdef PR_SET_PTRACER
    /* Where Yama restricts it, a process must say that its peers may look in. They are peers of the
     * same user; elsewhere the call fails and is not needed. */
    (void)prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);
#endif
}

const struct bt_net_home *bt_net_home(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;

    pthread_once(&once, home_init_once);
    return &home;
}

static bool read_all(uint32_t pid, void *local, uint64_t remote, size_t bytes)
{
    while (bytes > 0) {
        struct iovec to = {local, bytes};
        struct iovec from = {(void *)(uintptr_t)remote, bytes};
        ssize_t n = process_vm_readv((pid_t)pid, &to, 1, &from, 1, 0);

        if (n <= 0) {
            if (n < 0 && errno == EINTR) {
                continue;
            }
            return false;
        }
        local = (char *)local + n;
        remote += (uint64_t)n;
        bytes -= (size_t)n;
    }
    return true;
}

bool bt_net_mapped_probe(const struct bt_net_home *peer)
{
    const struct bt_net_home *mine = bt_net_home();
    uint8_t seen[sizeof(peer->cookie)];

    return mine->pid != 0 && peer->pid != 0 && peer->pid <= INT32_MAX && peer->host == mine->host &&
           read_all(peer->pid, seen, peer->cookie_at, sizeof(seen)) &&
           memcmp(seen, peer->cookie, sizeof(seen)) == 0;
}

int bt_net_mapped_read(const struct bt_net_peer *peer, void *local, uint64_t remote, size_t bytes)
{
    return read_all(peer->mapped_pid, local, remote, bytes) ? BT_OK : BT_E_PEER_LOST;
}
