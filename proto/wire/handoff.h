/* Messages of a handoff between a prefill node (P) and a decode node (D): layout, pack and unpack.
 *
 * Every message is one transport message: a head, described here, and for DATA and TICKET some
 * bytes behind it ("data"). All integers are little endian; bytes named zero must be zero. Lengths
 * and counts are checked against the head's size, values against their fixed ranges; what depends
 * on the state of a handoff (page numbers, layers, token ranges) is the receiver's to check.
 *
 *   every head        0  u16 magic 0x4f48   2  u8 version   3  u8 type   4  u32 bytes of the head
 *
 *   HELLO             8  u16 lowest version spoken   10  u16 highest   12  u32 page_tokens
 *                    16  u32 n_layers   20  u32 n_kv_heads   24  u32 head_dim   28  u32 dtype
 *                    32  u32 n_pages of the pool   36  u8 forced method, 255 = none   37  3 zero
 *                    40  u64 incarnation   48  u64 address of the pool   56  32 compat digest
 *                    88  u16 name bytes   90  u16 key bytes   92  u32 zero   96  name, key
 *   REFUSE            8  i32 code   12  u16 text bytes   14  u16 zero   16  text
 *   PING, PONG        nothing more
 *
 *   all others        8  u64 id.hi   16  u64 id.lo   24  u32 ticket: D's number of this attempt
 *   TICKET           28  u32 n_tokens   32  u8 method   33  3 zero   36  u32 n_pages
 *                    40  u32 key bytes   44  u32 zero   48  key
 *     version 2 on, behind the key:
 *                     0  u32 n_have: D has the first n_have tokens, send what lies behind them
 *                     4  u32 block_tokens, 0 = no ids   8  u64 origin's incarnation
 *                    16  16 root of the block keys   32  u16 name bytes   34  u16 address bytes
 *                    36  u32 zero   40  name and address of the origin: a store daemon takes the
 *                        prompt from there; none (and all of its fields zero) = you are the origin
 *                        data: PUT alone: a {u32 page, u32 generation} for each of n_pages, which
 *                        hold the tokens behind n_have; then, with block_tokens, n_tokens i32 ids
 *   ANNOUNCE, DATA,  28  u32 layer   32  u32 first page of the prompt, in P's pages
 *   PLACED           36  u16 n_pieces (DATA, PLACED: 1)   38  u16 flags (1 = sent again)
 *                    40  n_pieces times {u32 P's page, u32 generation, u32 n_pages, u32 zero,
 *                        u64 XXH3-64 of the bytes}
 *                        DATA: u32 offset of the data in the piece, u32 zero; the parts of a piece
 *                        come one after the other, the sum is that of the whole, from version 4 on
 *                        in the last part alone (in the others it means nothing)
 *   COMMIT           28  u32 n_tokens   32  u32 n_first   36  u32 zero   40  n_first times i32
 *   RESEND           28  u32 layer   32  u32 first page   36  u32 n_pages   40  u32 generation
 *   ABORT, NO        28  i32 code   32  u16 text bytes   34  u16 zero   36  text
 *   ACK, ACKED,      28  u32 zero
 *   ABORTED
 *
 * Version 3:
 *   REACHED          28  u32 zero   32  u64 bytes of announced pieces that are in place, all in all
 *                        (pull; from D, after every REACHED_BYTES of them at the latest)
 *
 * Evolution: HELLO and REFUSE keep their layout in every version and carry version 1; a node speaks
 * versions N and N-1 (and 1, as long as that costs nothing) and uses the highest both speak. A new
 * field goes to the end of its head under a new version. */
#ifndef WIRE_HANDOFF_H
#define WIRE_HANDOFF_H

#include "common/base/rc.h"

#define WIRE_HANDOFF_MAGIC       0x4f48
#define WIRE_HANDOFF_VERSION     4 /* N */
#define WIRE_HANDOFF_VERSION_MIN 1 /* N-3 */

#define WIRE_HANDOFF_MAX_HEAD    4096
#define WIRE_HANDOFF_MAX_NAME    128
#define WIRE_HANDOFF_MAX_ADDRESS 271
#define WIRE_HANDOFF_MAX_KEY     512
#define WIRE_HANDOFF_MAX_TEXT    200
#define WIRE_HANDOFF_MAX_PIECES  64
#define WIRE_HANDOFF_MAX_FIRST   16
#define WIRE_HANDOFF_NO_METHOD   255
#define WIRE_HANDOFF_AGAIN       1 /* flag: a piece that was asked for again */

#define WIRE_HANDOFF_REACHED_BYTES (1u << 20)

enum wire_handoff_type {
    WIRE_HANDOFF_HELLO = 1,
    WIRE_HANDOFF_REFUSE,
    WIRE_HANDOFF_PING,
    WIRE_HANDOFF_PONG,
    WIRE_HANDOFF_TICKET,
    WIRE_HANDOFF_ANNOUNCE,
    WIRE_HANDOFF_DATA,
    WIRE_HANDOFF_PLACED,
    WIRE_HANDOFF_COMMIT,
    WIRE_HANDOFF_RESEND,
    WIRE_HANDOFF_ABORT,
    WIRE_HANDOFF_NO,
    WIRE_HANDOFF_ACK,
    WIRE_HANDOFF_ACKED,
    WIRE_HANDOFF_ABORTED,
    WIRE_HANDOFF_REACHED, /* since version 3 */
};

struct wire_piece {
    uint32_t page; /* in P's pool */
    uint32_t generation;
    uint32_t n_pages; /* >= 1 */
    uint64_t sum;
};

/* One message; which fields count says the type. Strings are borrowed from the bytes unpacked. */
struct wire_handoff {
    enum wire_handoff_type type;
    uint8_t version; /* filled by unpack; pack writes the one given */
    /* HELLO */
    uint16_t version_min, version_max;
    uint32_t page_tokens, n_layers, n_kv_heads, head_dim, dtype, pool_pages;
    uint64_t incarnation, base;
    uint8_t compat[32];
    struct bt_str name;
    struct bt_str key; /* TICKET as well */
    uint8_t method;    /* TICKET as well */
    /* with an id */
    uint64_t id_hi, id_lo;
    uint32_t ticket;
    uint32_t n_tokens; /* TICKET, COMMIT */
    /* TICKET, version 2 */
    uint32_t n_have, block_tokens;
    uint64_t origin_incarnation;
    uint8_t root[16];
    struct bt_str origin_name, origin_address;
    /* pieces */
    uint32_t layer, first_page;   /* ANNOUNCE, DATA, PLACED, RESEND */
    uint32_t n_pages, generation; /* RESEND; n_pages also TICKET */
    uint16_t flags;
    uint32_t offset; /* DATA */
    uint32_t n_pieces;
    struct wire_piece pieces[WIRE_HANDOFF_MAX_PIECES];
    uint32_t n_first;
    int32_t first[WIRE_HANDOFF_MAX_FIRST];
    int32_t rc; /* REFUSE, ABORT, NO */
    struct bt_str text;
    uint64_t reached; /* REACHED */
};

/* Writes the head into buf (WIRE_HANDOFF_MAX_HEAD bytes); returns its size. Longer names, keys and
 * texts than allowed are programmer errors, except that text is cut. */
size_t wire_handoff_pack(const struct wire_handoff *m, char *buf);
/* BT_OK; BT_E_INCOMPATIBLE: another wire version, named in err; BT_E_PEER_PROTOCOL: malformed. */
int wire_handoff_unpack(struct bt_str head,
                        struct wire_handoff *ret,
                        struct bt_err *err) BT_MUST_USE;
/* "ANNOUNCE"; static. */
const char *wire_handoff_type_name(int type);

#endif
