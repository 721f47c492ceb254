/* Messages between a block server and its clients (kvstore/store): layout, pack and unpack.
 *
 * Every message is one transport message: a head, described here, and some bytes behind it
 * ("data"). Who has called is the client, who was called the server. Integers are little endian;
 * bytes named zero must be zero.
 *
 *   every head        0  u16 magic 0x5342   2  u8 version   3  u8 type   4  u32 bytes of the head
 *
 *   HELLO             8  u16 lowest version spoken   10  u16 highest   12  u8 forced method, 255 =
 *                    none   13  3 zero   16  u64 incarnation   24  u64 address and   32  u64 bytes
 *                    of the memory that blocks lie in   40  u16 name bytes   42  u16 key bytes
 *                    44  u32 zero   48  name, key
 *   REFUSE            8  i32 code   12  u16 text bytes   14  u16 zero   16  text
 *   PING, PONG        nothing more
 *
 *   all others        8  u64 request: the client's number of it
 *   GET              16  u32 n_items   20  u8 method   21  3 zero   24  u32 n_layers
 *                    28  u32 block_tokens   32  u64 layer_bytes   40  16 root
 *                        data: n_items times {16 key, 16 parent, u64 prefix, u32 n_tokens, u32
 * zero, n_tokens times i32} HAVE             16  u32 item   20  u32 n_layers   24  u64 generation
 *                        data: n_layers times {u64 offset in the server's memory, u64 XXH3-64}
 *   MISS             16  u32 item   20  i32 code
 *   DATA             16  u32 item (0 in a PUT)   20  u32 layer   24  u64 offset in the layer
 *                    32  u64 (version 3 on) XXH3-64 of the layer: in its last part, of a PUT whose
 *                        sums follow; else zero
 *                        data: the bytes; parts of a layer in their order, layers likewise
 *   RELEASE          16  u64 zero: nothing of the request is read any more
 *   PUT              16  u8 method   17  u8 flags (version 3 on: 1 = by message, its sums follow in
 *                    DATA and those in the head do not count)   18  6 zero
 *                    24  u64 offset in the client's memory (pull)
 *                        data: head of the blob (kvstore/tier/blob.h)
 *   GO               16  u32 n_layers   20  u32 zero      message: 0 layers
 *                        data: n_layers times u64 offset in the server's memory (put)
 *   PLACED           16  u64 zero: all layers are written (put)
 *   DONE             16  i32 code   20  u32 zero: of a PUT or LEND; its bytes are read no more
 *
 * Version 2:
 *   LEND             16  u64 device, 24  u64 inode of the memory file with the client's pool
 *                    32  u64 bytes of a layer in it   40  u64 bytes of a page in a layer
 *                    48  u32 bytes of a row   52  u32 n_pages   56  u64 sample
 *                        data: n_pages times u32 page; head of the blob, whose sums do not count
 *   TAKEN            16  u64 zero: all of the LEND is read, and will be by nobody again
 *   KEEP             16  u64 zero: the pages were lent until TAKEN came
 *   DROP             16  u64 zero: they were not; what was read is nothing. Version 3: of a PUT
 *                        whose sums follow: no more of it comes (DONE is the answer)
 *
 * A layer of a lent block is rows in the order of the blob: row i of every page in turn, then row
 * i + 1. Row i of a page lies i rows behind its first byte, page p of layer l at l layers and p
 * pages from the start of the file.
 *
 * Evolution: as in wire/handoff.h. */
#ifndef WIRE_STORE_H
#define WIRE_STORE_H

#include "common/base/buf.h"

#define WIRE_STORE_MAGIC       0x5342
#define WIRE_STORE_VERSION     3 /* N */
#define WIRE_STORE_VERSION_MIN 1 /* N-2, as long as that costs nothing */

#define WIRE_STORE_MAX_HEAD   1024
#define WIRE_STORE_MAX_NAME   128
#define WIRE_STORE_MAX_KEY    512
#define WIRE_STORE_MAX_TEXT   200
#define WIRE_STORE_MAX_ITEMS  32
#define WIRE_STORE_MAX_PAGES  8192 /* of a block */
#define WIRE_STORE_NO_METHOD  255
#define WIRE_STORE_SUMS_LATER 1  /* flag of a PUT */
#define WIRE_STORE_ITEM_BYTES 48 /* without its ids */

enum wire_store_type {
    WIRE_STORE_HELLO = 1,
    WIRE_STORE_REFUSE,
    WIRE_STORE_PING,
    WIRE_STORE_PONG,
    WIRE_STORE_GET,
    WIRE_STORE_HAVE,
    WIRE_STORE_MISS,
    WIRE_STORE_DATA,
    WIRE_STORE_RELEASE,
    WIRE_STORE_PUT,
    WIRE_STORE_GO,
    WIRE_STORE_PLACED,
    WIRE_STORE_DONE,
    WIRE_STORE_LEND, /* this and what follows: since version 2 */
    WIRE_STORE_TAKEN,
    WIRE_STORE_KEEP,
    WIRE_STORE_DROP,
};

/* One message; which fields count says the type. Strings are borrowed from the bytes unpacked. */
struct wire_store {
    enum wire_store_type type;
    uint8_t version; /* filled by unpack; pack writes the one given, 0 = the newest */
    /* HELLO */
    uint16_t version_min, version_max;
    uint8_t method; /* GET, PUT as well */
    uint64_t incarnation, base, bytes;
    struct bt_str name, key;
    int32_t rc; /* REFUSE, MISS, DONE */
    struct bt_str text;
    uint64_t req;
    /* GET */
    uint32_t n_items, n_layers, block_tokens; /* n_layers: HAVE, GO as well */
    uint64_t layer_bytes;
    uint8_t root[16];
    /* HAVE, MISS, DATA */
    uint32_t item, layer;
    uint64_t generation;
    uint64_t offset; /* DATA, PUT */
    uint64_t sum;    /* DATA, version 3 */
    uint8_t flags;   /* PUT, version 3 */
    /* LEND */
    uint64_t file_dev, file_ino, layer_stride, page_stride, sample;
    uint32_t row_bytes, n_pages;
};

/* A block that is asked for; ids are n_tokens times i32 as they came. */
struct wire_store_item {
    uint8_t key[16], parent[16];
    uint64_t prefix; /* of the ids before it (kvstore/tier/blob.h) */
    uint32_t n_tokens;
    const char *ids;
};

/* Writes the head into buf (WIRE_STORE_MAX_HEAD bytes); returns its size. Longer names and keys
 * than allowed are programmer errors; text is cut. */
size_t wire_store_pack(const struct wire_store *m, char *buf);
/* BT_OK; BT_E_INCOMPATIBLE: another wire version; BT_E_PEER_PROTOCOL: malformed. */
int wire_store_unpack(struct bt_str head, struct wire_store *ret, struct bt_err *err) BT_MUST_USE;
const char *wire_store_type_name(int type);

/* Appends an item of a GET; `ids` are the caller's own. */
int wire_store_add_item(struct bt_buf *to,
                        const struct wire_store_item *item,
                        const int32_t *ids) BT_MUST_USE;
/* Takes the next item off `data`; false: cut off or malformed. n_tokens is at least 1 and at most
 * max_tokens. */
bool wire_store_take_item(struct bt_str *data,
                          uint32_t max_tokens,
                          struct wire_store_item *ret_item) BT_MUST_USE;
/* Numbers as they stand in data. */
int wire_store_add_u32(struct bt_buf *to, uint32_t v) BT_MUST_USE;
int wire_store_add_u64(struct bt_buf *to, uint64_t v) BT_MUST_USE;
uint64_t wire_store_u64(const char *p);
uint32_t wire_store_u32(const char *p);
int32_t wire_store_i32(const char *p);

#endif
