/* What a process of its host may send to the keeper: whole packets of any bytes over three
 * connections, with and without descriptors of several kinds. The keeper answers or hangs up; its
 * books stay right. An input is a row of acts: a byte (which connection, which descriptor, and
 * whether the packet gets a right head), then a part. */
#include "kvstore/keeper/server.c"

#include "common/mem/mem.h"
#include "tests/fuzz/feeder.inc.h"

#include <sys/mman.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

#define CLIENTS   3
#define MAX_BYTES (1u << 20)

static void must(bool ok)
{
    if (!ok) {
        abort();
    }
}

/* What clients may hold: nothing, memory of two sizes, memory to be read only, and what is none. */
static int descriptor(unsigned kind)
{
    static int memory[2] = {-1, -1}, no_memory[2], read_only;
    char path[40];

    if (memory[0] < 0) {
        for (int i = 0; i < 2; i++) {
            memory[i] = memfd_create("fuzz", MFD_CLOEXEC | MFD_ALLOW_SEALING);
            must(memory[i] >= 0 && ftruncate(memory[i], i ? 65536 : 4096) == 0);
        }
        snprintf(path, sizeof(path), "/proc/self/fd/%d", memory[0]);
        read_only = open(path, O_RDONLY | O_CLOEXEC);
        must(read_only >= 0 && pipe2(no_memory, O_CLOEXEC) == 0);
    }
    switch (kind) {
    case 1:
    case 2:
        return memory[kind - 1];
    case 3:
        return read_only;
    case 4:
        return no_memory[0];
    default:
        return -1;
    }
}

static size_t size_for(enum kv_keeper_type type)
{
    switch ((int)type) {
    case KV_KEEPER_HELLO:
        return sizeof(struct kv_keeper_hello);
    case KV_KEEPER_GET:
    case KV_KEEPER_REGISTER:
        return sizeof(struct kv_keeper_request);
    default:
        return sizeof(struct kv_keeper_head);
    }
}

static void say_packet(int sock, struct bt_str part, unsigned fd_kind, bool with_head)
{
    struct kv_packet p = {0};
    enum kv_keeper_type type =
        part.n > 0 ? (enum kv_keeper_type)((uint8_t)part.p[0] % 8) : KV_KEEPER_HELLO;
    size_t bytes = BT_MIN(part.n, sizeof(p.rows)), want = size_for(type);

    if (bytes > 0) {
        memcpy(&p.rows, part.p, bytes);
    }
    if (with_head) { /* as long as its type is, the rest zeros, so that the handlers are reached */
        if (part.n > 1) {
            memmove((char *)&p.rows + sizeof(p.head), part.p + 1,
                    BT_MIN(part.n - 1, sizeof(p.rows) - sizeof(p.head)));
        }
        p.head = (struct kv_keeper_head){KV_KEEPER_MAGIC, KV_KEEPER_VERSION, (uint16_t)type};
        bytes = want;
    }
    if (bytes > 0) {
        struct kv_keeper_head head = p.head;
        int rc = kv_sock_send(sock, (enum kv_keeper_type)head.type, &p.rows,
                              BT_MAX(bytes, sizeof(head)), descriptor(fd_kind));

        (void)rc; /* it may have been hung up on */
    }
}

/* Its counts are those of its lists, and nothing is above its limits. */
static void audit(const struct kv_keeperd *k)
{
    uint32_t clients = 0, owners = 0, regions = 0, refs = 0;
    uint64_t bytes = 0;

    bt_list_for_each (l, &k->clients) {
        const struct kv_client *c = client_of(l);

        clients++;
        refs += c->owner != NULL;
        must(!c->waits || c->owner);
    }
    bt_list_for_each (l, &k->regions) {
        const struct kv_region *r = BT_LIST_ENTRY(l, struct kv_region, link);

        regions++;
        refs += r->owner != NULL;
        bytes += r->kind == BT_MEM_HOST ? r->bytes : 0;
        must(kv_keeper_name_ok(r->name, sizeof(r->name)) && r->fd >= 0 &&
             r->bytes >= r->want_bytes && kv_region_find(k, r->node, r->name) == r);
    }
    bt_list_for_each (l, &k->owners) {
        owners++;
        refs -= owner_of(l)->n_refs;
    }
    must(clients == k->n_clients && owners == k->n_owners && regions == k->n_regions && refs == 0 &&
         bytes == k->bytes && bytes <= MAX_BYTES && regions <= k->conf.max_regions);
}

static void hear_all(int sock)
{
    struct kv_packet p;

    while (kv_sock_recv(sock, &p) == BT_OK) {
        must(kv_packet_is(&p, KV_KEEPER_WELCOME) || kv_packet_is(&p, KV_KEEPER_GRANT) ||
             kv_packet_is(&p, KV_KEEPER_REFUSED) || kv_packet_is(&p, KV_KEEPER_ROWS));
        kv_packet_drop(&p);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    struct feeder f = {data, n};
    char path[64];
    struct kv_keeper_conf conf = {
        .socket = path,
        .max_clients = CLIENTS + 1,
        .max_regions = 4,
        .max_bytes = MAX_BYTES,
        .orphan_ns = BT_NEVER_NS,
    };
    int socks[CLIENTS];
    struct kv_keeperd *k;
    struct bt_str part;

    bt_log_threshold = BT_LOG_ERROR;
    snprintf(path, sizeof(path), "/tmp/fuzz-keeper-%d.sock", (int)getpid());
    must(kv_keeperd_create(&conf, &k, NULL) == BT_OK);
    for (int i = 0; i < CLIENTS; i++) {
        must(kv_sock_connect(path, &socks[i], NULL) == BT_OK);
        one_round(k);
    }
    while (f.n > 0) {
        uint8_t act = feeder_byte(&f);
        int sock = socks[act % CLIENTS];

        if (!feeder_part(&f, &part)) {
            break;
        }
        say_packet(sock, part, act / CLIENTS % 5, act / (CLIENTS * 5) % 2 == 0);
        bt_eventfd_wake(&k->wake_fd); /* so that a round without anything to do ends */
        one_round(k);
        k->stop = false;
        audit(k);
        hear_all(sock);
    }
    for (int i = 0; i < CLIENTS; i++) {
        close(socks[i]);
    }
    kv_keeperd_destroy(k);
    snprintf(path, sizeof(path), "/tmp/fuzz-keeper-%d.sock.lock", (int)getpid());
    unlink(path);
    return 0;
}
