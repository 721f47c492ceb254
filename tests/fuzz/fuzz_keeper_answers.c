/* What a process may hear from a keeper: packets of any bytes, with and without memory, as answers
 * to each of the client's questions. First byte: which question; then acts: a byte (how many
 * descriptors, and whether the packet gets a right head), then a part. */
#include "kvstore/keeper/client.c"

#include "tests/fuzz/feeder.inc.h"

#include <sys/mman.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

#define WANT 4096

static void must(bool ok)
{
    if (!ok) {
        abort();
    }
}

static size_t size_for(enum kv_keeper_type type)
{
    switch ((int)type) {
    case KV_KEEPER_WELCOME:
        return sizeof(struct kv_keeper_welcome);
    case KV_KEEPER_GRANT:
        return sizeof(struct kv_keeper_grant);
    case KV_KEEPER_REFUSED:
        return sizeof(struct kv_keeper_refused);
    default:
        return sizeof(struct kv_keeper_rows);
    }
}

/* Everything is said before it is asked for, as far as the socket takes it. */
static void say_all(int sock, struct feeder *f)
{
    static int memory[2] = {-1, -1}; /* of the size that is wanted, and a smaller one */
    struct bt_str part;

    for (int i = 0; i < 2 && memory[i] < 0; i++) {
        memory[i] = memfd_create("fuzz", MFD_CLOEXEC);
        must(memory[i] >= 0 && ftruncate(memory[i], i ? 1 : WANT) == 0);
    }
    while (f->n > 0) {
        uint8_t act = feeder_byte(f);
        struct kv_packet p = {0};
        enum kv_keeper_type type = (enum kv_keeper_type)(KV_KEEPER_WELCOME + act / 8 % 4);
        size_t at = act % 2 ? 0 : sizeof(p.head), bytes = at ? size_for(type) : 0;

        if (!feeder_part(f, &part)) {
            return;
        }
        if (part.n > 0) {
            memcpy((char *)&p.rows + at, part.p, BT_MIN(part.n, sizeof(p.rows) - at));
        }
        bytes = at ? bytes : BT_MIN(part.n, sizeof(p.rows));
        if (bytes >= sizeof(p.head)) {
            type = at ? type : (enum kv_keeper_type)p.head.type;
            if (kv_sock_send(sock, type, &p.rows, bytes,
                             act / 2 % 4 < 2 ? memory[act / 2 % 2] : -1) < 0) {
                return;
            }
        } else if (bytes > 0 && send(sock, &p.rows, bytes, MSG_DONTWAIT | MSG_NOSIGNAL) < 0) {
            return;
        }
    }
}

static void get(struct kv_keeper *k)
{
    struct kv_keeper_want want = {.name = "pool", .bytes = WANT, .ops = &bt_mem_host};
    struct kv_keeper_got got;

    if (kv_keeper_get(k, &want, &got, NULL) == BT_OK) {
        must(got.mem.base && got.mem.bytes >= WANT && (got.from_keeper || !got.kept));
        memset(got.mem.base, 1, WANT);
        got.mem.ops->free(&got.mem);
    }
}

static void rows(int sock)
{
    struct kv_keeper_row got[20];
    size_t n_got = 0;

    if (list(sock, bt_deadline_ns(BT_NS_PER_S), got, BT_ARRAY_LEN(got), &n_got, NULL) == BT_OK) {
        must(n_got <= BT_ARRAY_LEN(got));
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    const struct kv_keeper_cfg cfg = {.socket = "/nowhere", .node = "n", .incarnation = 7};
    struct feeder f = {data, n};
    uint8_t what = feeder_byte(&f);
    struct kv_keeper *k;
    int ends[2], rc = BT_OK;

    bt_log_threshold = BT_LOG_ERROR;
    must(kv_keeper_open(&cfg, &k, NULL) == BT_OK);
    must(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) == 0);
    say_all(ends[1], &f);
    shutdown(ends[1], SHUT_WR);
    k->sock = ends[0];
    switch (what % 4) {
    case 0:
        get(k);
        get(k);
        break;
    case 1:
        rc = greet(k, NULL);
        break;
    case 2:
        rows(k->sock);
        break;
    default:
        k->items[0].fd = memfd_create("fuzz", MFD_CLOEXEC);
        must(k->items[0].fd >= 0);
        k->n_items = 1;
        rc = settle(k, NULL);
        must(kv_keeper_has_all(k) == (rc == BT_OK));
        break;
    }
    (void)rc;
    kv_keeper_close(k);
    close(ends[1]);
    return 0;
}
