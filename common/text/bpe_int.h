/* Byte-level BPE model: vocabulary, merge rules, and merging of one piece. Immutable after create.
 *
 * Everything works on raw bytes: the printable stand-ins that vocabulary files use for bytes
 * (GPT-2's byte-to-unicode table) are undone once, when the model is built. */
#ifndef BT_TEXT_BPE_INT_H
#define BT_TEXT_BPE_INT_H

#include "common/base/buf.h"

enum bpe_kind {
    BPE_NORMAL,
    BPE_UNUSED,  /* has bytes, but is not looked up as a whole piece */
    BPE_ADDED,   /* matched in text before splitting; its text is literal */
    BPE_CONTROL, /* likewise, but only where control tokens may be parsed */
};

struct bpe_token {
    struct bt_str text; /* as in the file; borrowed */
    enum bpe_kind kind;
};

struct bpe_merge {
    struct bt_str left, right; /* as in the file; borrowed */
};

struct bpe_source {
    size_t n_tokens;
    const struct bpe_token *tokens; /* index = id; an empty text is a hole */
    size_t n_merges;
    const struct bpe_merge *merges; /* index = rank */
    bool ignore_merges;             /* a piece that is a token needs no merging */
    int32_t unk_id;                 /* for bytes that the vocabulary lacks; -1 = drop them */
};

struct merge_slot {
    uint64_t key; /* left id << 32 | right id; BPE_NO_KEY = free */
    uint32_t rank;
    int32_t id; /* what the two become */
};

#define BPE_NO_KEY UINT64_MAX

struct bpe {
    size_t n_tokens;
    char *blob;      /* bytes of all tokens */
    uint32_t *off;   /* n_tokens + 1 offsets into blob */
    uint8_t *kind;   /* enum bpe_kind */
    uint8_t *direct; /* 1: a piece of exactly these bytes becomes this one id */
    int32_t *ids;    /* hash of token bytes to id; -1 = free */
    size_t ids_mask; /* slots - 1 */
    struct merge_slot *merges;
    size_t merges_mask; /* slots - 1 */
    int32_t byte_id[256];
    int32_t unk_id;
};

struct bpe_sym {
    int32_t prev, next; /* -1 = none */
    int32_t id;         /* -1 = merged into the one before */
    uint32_t rank;      /* of the merge with next; BPE_NO_RANK */
    int32_t merged;     /* its result */
};

#define BPE_NO_RANK UINT32_MAX

/* Scratch of one encode call; starts zeroed. */
struct bpe_work {
    struct bpe_sym *syms;
    size_t cap_syms;
    uint64_t *heap;
    size_t n_heap, cap_heap;
};

void bpe_work_fini(struct bpe_work *w);

/* The source is not kept. BT_E_FORMAT, BT_E_UNSUPPORTED, BT_E_TOO_LARGE, BT_E_NOMEM. */
int bpe_init(struct bpe *m, const struct bpe_source *src, struct bt_err *err) BT_MUST_USE;
void bpe_fini(struct bpe *m);

/* Appends the ids of one piece. BT_OK, BT_E_NOMEM, BT_E_TOO_LARGE (limit of the list). */
int bpe_encode_piece(const struct bpe *m,
                     struct bt_str piece,
                     struct bpe_work *w,
                     struct bt_ids *out) BT_MUST_USE;

static inline struct bt_str bpe_bytes(const struct bpe *m, int32_t id)
{
    return (struct bt_str){m->blob + m->off[id], m->off[id + 1] - m->off[id]};
}

/* Id of a token by its bytes; -1 = none. Of several, an ordinary one comes before an added one. */
int32_t bpe_find(const struct bpe *m, struct bt_str bytes);

/* Undoes the byte-to-unicode table: appends raw bytes. BT_E_FORMAT if `text` has a character that
 * stands for no byte (nothing is appended then). */
int bpe_unmap(struct bt_str text, struct bt_buf *out) BT_MUST_USE;

#endif
