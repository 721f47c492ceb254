/* Environment, addresses and names: what has to be said to UCX before and while it starts.
 *
 * UCX reads most of its settings from the environment only (ucp_config_modify does not reach the
 * transports), so they are put there, without overriding the user. */
#include "common/net/net_int.h"

#include "common/conf/value.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <ucs/config/global_opts.h>
#include <ucs/debug/debug.h>
#include <ucs/sys/string.h>

#define SEGMENT_MIN 8192
#define SEGMENT_MAX (1u << 20)
#define TX_SEGMENT  "UCX_TCP_TX_SEG_SIZE"
#define RX_SEGMENT  "UCX_TCP_RX_SEG_SIZE"

/* As long in both directions; whoever sets one means both. 8k by default: a third of the rate. */
static void set_segments(void)
{
    const char *tx = getenv(TX_SEGMENT), *rx = getenv(RX_SEGMENT);

    setenv(TX_SEGMENT, rx ? rx : "256k", 0);
    setenv(RX_SEGMENT, tx ? tx : "256k", 0);
}

static void env_init_once(void)
{
    static const struct {
        const char *name, *value;
    } vars[] = {
        {"UCX_POSIX_ERROR_HANDLING", "y"}, /* else shared memory is left out in PEER mode */
        {"UCX_SYSV_ERROR_HANDLING", "y"},
        {"UCX_KEEPALIVE_INTERVAL", "500ms"},
        {"UCX_TCP_CONN_NB", "y"},           /* connect() must not block the thread */
        {"UCX_IB_RCACHE_MAX_REGIONS", "1"}, /* see bt_net_mem_unregister */
        {"UCX_TCP_CM_REUSEADDR", "y"},
        {"UCX_LOG_LEVEL", "error"},
        {"UCX_VFS_ENABLE", "n"},
        {"UCX_WARN_UNUSED_ENV_VARS", "n"},
        {"UCX_ERROR_SIGNALS", ""},
    };
    /* UCX has put handlers on these when the library was loaded. */
    static const int sigs[] = {SIGILL, SIGSEGV, SIGBUS, SIGFPE};

    for (size_t i = 0; i < BT_ARRAY_LEN(vars); i++) {
        setenv(vars[i].name, vars[i].value, 0);
    }
    set_segments();
    /* These two were read when the library was loaded. */
    ucs_global_opts_set_value("LOG_LEVEL", getenv("UCX_LOG_LEVEL"));
    ucs_global_opts_set_value("WARN_UNUSED_ENV_VARS", getenv("UCX_WARN_UNUSED_ENV_VARS"));
    for (size_t i = 0; i < BT_ARRAY_LEN(sigs); i++) {
        ucs_debug_disable_signal(sigs[i]);
    }
}

void bt_net_env_init(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;

    pthread_once(&once, env_init_once);
}

int bt_net_env_segment(uint32_t *ret, struct bt_err *err)
{
    const char *tx = getenv(TX_SEGMENT), *rx = getenv(RX_SEGMENT);
    size_t t = 0, r = 0;

    if (ucs_str_to_memunits(tx, &t) != UCS_OK || ucs_str_to_memunits(rx, &r) != UCS_OK || t != r ||
        r < SEGMENT_MIN || r > SEGMENT_MAX) {
        return BT_FAIL(err, BT_E_CONFIG, "%s is \"%s\" and %s \"%s\": both must be equal, 8k to 1m",
                       TX_SEGMENT, tx, RX_SEGMENT, rx);
    }
    *ret = (uint32_t)r;
    return BT_OK;
}

int bt_net_resolve(const char *address,
                   bool numeric_only,
                   struct sockaddr_storage *ret,
                   socklen_t *ret_len,
                   struct bt_err *err)
{
    struct addrinfo hints = {.ai_family = AF_INET, .ai_socktype = SOCK_STREAM}, *found = NULL;
    struct bt_addr a;
    char host[256], port[8];
    int e;

    if (bt_addr_read(bt_str_of(address), &a) != BT_OK || a.is_unix || a.host.n == 0 ||
        a.host.n >= sizeof(host)) {
        return BT_FAIL(err, BT_E_INVALID, "\"%.80s\" is not an address \"host:port\"", address);
    }
    memcpy(host, a.host.p, a.host.n);
    host[a.host.n] = '\0';
    if (strcmp(host, "localhost") == 0) {
        snprintf(host, sizeof(host), "127.0.0.1");
    }
    if (strchr(host, ':')) {
        /* UCX 1.13's TCP mixes up the lengths of addresses there and overruns its own memory. */
        return BT_FAIL(err, BT_E_UNSUPPORTED,
                       "address %.80s: transfers over IPv6 are not supported", address);
    }
    snprintf(port, sizeof(port), "%u", a.port);
    hints.ai_flags = AI_NUMERICSERV | (numeric_only ? AI_NUMERICHOST : 0);
    e = getaddrinfo(host, port, &hints, &found);
    if (e != 0) {
        return BT_FAIL(err, BT_E_INVALID, "address %.80s: %s%s", address, gai_strerror(e),
                       numeric_only ? " (a numeric address is needed here)" : "");
    }
    memset(ret, 0, sizeof(*ret));
    memcpy(ret, found->ai_addr, found->ai_addrlen);
    *ret_len = found->ai_addrlen;
    freeaddrinfo(found);
    return BT_OK;
}

void bt_net_format(const struct sockaddr_storage *sa, char *buf, size_t n)
{
    char host[INET6_ADDRSTRLEN] = "?";

    if (sa->ss_family == AF_INET6) {
        const struct sockaddr_in6 *in6 = (const struct sockaddr_in6 *)sa;

        inet_ntop(AF_INET6, &in6->sin6_addr, host, sizeof(host));
        snprintf(buf, n, "[%s]:%u", host, ntohs(in6->sin6_port));
    } else {
        const struct sockaddr_in *in = (const struct sockaddr_in *)sa;

        inet_ntop(AF_INET, &in->sin_addr, host, sizeof(host));
        snprintf(buf, n, "%s:%u", host, ntohs(in->sin_port));
    }
}

void bt_net_set_port(struct sockaddr_storage *sa, uint16_t port)
{
    if (sa->ss_family == AF_INET6) {
        ((struct sockaddr_in6 *)sa)->sin6_port = htons(port);
    } else {
        ((struct sockaddr_in *)sa)->sin_port = htons(port);
    }
}

static bool same_host(const struct sockaddr_storage *a, const struct sockaddr *b)
{
    if (!b || a->ss_family != b->sa_family) {
        return false;
    }
    if (a->ss_family == AF_INET6) {
        return memcmp(&((const struct sockaddr_in6 *)a)->sin6_addr,
                      &((const struct sockaddr_in6 *)b)->sin6_addr, sizeof(struct in6_addr)) == 0;
    }
    return ((const struct sockaddr_in *)a)->sin_addr.s_addr ==
           ((const struct sockaddr_in *)b)->sin_addr.s_addr;
}

static bool is_wildcard(const struct sockaddr_storage *sa)
{
    if (sa->ss_family == AF_INET6) {
        return IN6_IS_ADDR_UNSPECIFIED(&((const struct sockaddr_in6 *)sa)->sin6_addr);
    }
    return ((const struct sockaddr_in *)sa)->sin_addr.s_addr == htonl(INADDR_ANY);
}

/* Appends the RDMA ports whose network device is `netdev`. */
static void add_rdma_devices(const char *netdev, char *buf, size_t n)
{
    DIR *devs = opendir("/sys/class/infiniband");
    struct dirent *d;

    while (devs && (d = readdir(devs)) != NULL) {
        char path[600], name[IFNAMSIZ + 1] = "";
        size_t used = strlen(buf);
        FILE *f;

        if (d->d_name[0] == '.') {
            continue;
        }
        snprintf(path, sizeof(path), "/sys/class/infiniband/%s/ports/1/gid_attrs/ndevs/0",
                 d->d_name);
        f = fopen(path, "re");
        if (!f) {
            continue;
        }
        if (fgets(name, sizeof(name), f)) {
            name[strcspn(name, "\n")] = '\0';
        }
        fclose(f);
        if (strcmp(name, netdev) == 0 && used < n) {
            snprintf(buf + used, n - used, ",%s:1", d->d_name);
        }
    }
    if (devs) {
        closedir(devs);
    }
}

int bt_net_devices_for(const struct sockaddr_storage *sa, char *buf, size_t n, struct bt_err *err)
{
    struct ifaddrs *all = NULL;
    char text[64];
    int rc = BT_E_CONFIG;

    if (is_wildcard(sa)) {
        snprintf(buf, n, "all");
        return BT_OK;
    }
    if (getifaddrs(&all) != 0) {
        return BT_FAIL_SYS(err, BT_E_SYS, "cannot list the network interfaces");
    }
    for (struct ifaddrs *i = all; i; i = i->ifa_next) {
        /* 127.0.0.0/8 is all on the loopback device, though only one address is listed. */
        bool loop = (i->ifa_flags & IFF_LOOPBACK) && sa->ss_family == AF_INET &&
                    (ntohl(((const struct sockaddr_in *)sa)->sin_addr.s_addr) >> 24) == 127;

        if (loop || same_host(sa, i->ifa_addr)) {
            snprintf(buf, n, "%s", i->ifa_name);
            add_rdma_devices(i->ifa_name, buf, n);
            rc = BT_OK;
            break;
        }
    }
    freeifaddrs(all);
    if (rc != BT_OK) {
        bt_net_format(sa, text, sizeof(text));
        return BT_FAIL(err, rc, "listen address %s belongs to no network interface here", text);
    }
    return BT_OK;
}

int bt_net_method_parse(const char *name, int *ret_method, struct bt_err *err)
{
    static const char *const names[] = {"pull", "message", "put"};

    if (!name || !name[0] || strcmp(name, "auto") == 0) {
        *ret_method = -1;
        return BT_OK;
    }
    for (size_t i = 0; i < BT_ARRAY_LEN(names); i++) {
        if (strcmp(name, names[i]) == 0) {
            *ret_method = (int)i;
            return BT_OK;
        }
    }
    return BT_FAIL(err, BT_E_CONFIG,
                   "transfer method \"%.40s\": must be auto, pull, message or put", name);
}

int bt_net_rc_of(ucs_status_t status)
{
    switch ((int)status) {
    case UCS_OK:
        return BT_OK;
    case UCS_ERR_CANCELED:
        return BT_E_CANCELLED;
    case UCS_ERR_NO_MEMORY:
        return BT_E_NOMEM;
    case UCS_ERR_UNSUPPORTED:
        return BT_E_UNSUPPORTED;
    default:
        return BT_E_PEER_LOST;
    }
}
