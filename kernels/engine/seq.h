/* One request inside the engine: its ids, pages, sampling, transfer, state.
 *
 * Made by kn_engine_submit on the caller's thread with all the memory that it will ever need, then
 * owned by the scheduler (engine thread) until its last output.
 */
#ifndef KN_ENGINE_SEQ_H
#define KN_ENGINE_SEQ_H

#include "common/ds/list.h"
#include "kernels/engine/engine.h"
#include "kvstore/tier/source.h"

#include <stdatomic.h>

enum kn_seq_state {
#define KN_STATE(name, list, slot, meaning, next) KN_SEQ_##name,
#include "kernels/engine/states.def"
#undef KN_STATE
    KN_SEQ_N_STATES
};

enum kn_seq_list { KN_LIST_QUEUE, KN_LIST_ACTIVE, KN_LIST_AWAY, KN_LIST_NONE };

#define KN_SLOT_NONE   UINT32_MAX
#define KN_MAX_SOURCES 4

/* What sources were asked about a queued request. */
enum kn_look { KN_LOOK_NONE, KN_LOOK_ASKING, KN_LOOK_KNOWN };

/* One source's part in a look-up, and in the load that may follow. `find` and `load` are the
 * source's between the call and done, which posts found or loaded to the engine. */
struct kn_part {
    struct kv_find find;
    struct kv_load load;
    struct bt_msg found, loaded;
    atomic_int gate; /* who sees the answer first: the asking call, or found */
    struct kn_sched *sched;
    struct kn_seq *seq;
    uint32_t source;   /* index in the scheduler's list */
    bool asking;       /* find is not done */
    bool open;         /* end is due */
    bool loading;      /* load is not done */
    uint32_t n_wanted; /* blocks to be loaded from here */
    uint64_t asked_ns;
    uint64_t found_ns, loaded_ns; /* written before found, loaded are posted */
};

struct kn_seq {
    struct bt_list link; /* in the scheduler's list of its state, by (claim, order) */
    enum kn_seq_state state;
    uint64_t tag;
    uint64_t claim;
    uint64_t order; /* of arrival, breaks ties of claim */
    uint64_t deadline_ns;
    enum kn_leg leg;

    /* When it came, first had pages, had all that others bring, and was first in a step; 0 = not
     * yet. Told once, with its first own token. */
    uint64_t came_ns, placed_ns, ready_ns, begun_ns;
    bool times_told;
    uint32_t tier_tokens[KV_N_TIERS]; /* of cached_tokens */
    const char *transport;            /* of what was received; static */
    uint64_t recv_bytes;

    int32_t *ids;        /* prompt, then answer */
    uint32_t n_prompt;   /* tokens */
    uint32_t n_answered; /* answer tokens that were out before the request came */
    uint32_t n_answer;   /* answer tokens now, n_answered included */
    uint32_t max_answer; /* ends with LENGTH when n_answer reaches it */
    bool limited;        /* max_answer is less than max_tokens: the context ends there */

    uint32_t n_computed; /* tokens whose K and V lie in pages */
    uint32_t *pages;     /* page table */
    uint32_t n_pages;
    enum kv_owner page_owner; /* of all that are its own */

    /* Prefix reuse; all NULL and 0 without an index. The pages of held blocks are the index's,
     * except where the request had computed the same block itself and could not change over. */
    char *cache_salt;
    struct kv_key root;
    struct kv_key *keys; /* of full blocks, made when first needed */
    uint32_t n_keys;
    struct kv_block **blocks; /* [n_blocks] held, first to last; queued: [n_match] matched */
    uint32_t n_blocks;
    uint32_t n_match;
    uint64_t match_changes; /* kv_index_changes when n_match was found + 1; 0 = never */
    bool unlisted;          /* another block has a key of it: publishes no more */
    bool placed;            /* has had pages before: a hit now is no cache hit to tell */
    uint32_t cached_tokens; /* of the known ones, found when it first got pages */

    /* Blocks from sources (fetch.c); parts is NULL without sources. */
    struct kn_part *parts; /* [n_parts] asked, in order; what they found is one run */
    uint32_t n_parts;
    enum kn_look look;
    uint32_t look_first;                      /* blocks that the pool had when they were asked */
    uint64_t look_ns;                         /* when all had answered */
    uint32_t n_remote_looks;                  /* since it was queued */
    uint32_t n_loads;                         /* not done */
    uint64_t load_ns;                         /* when the loads began */
    uint64_t load_promised_ns, load_saves_ns; /* estimates: of the loads, of computing instead */
    bool load_given_up;
    bool load_void;        /* a row above its loads was not waited for */
    bool load_told;        /* prefill leg: the transfer knows of what was brought */
    uint32_t load_tokens;  /* computed ones, if all loads come whole */
    uint32_t ahead_tokens; /* computed behind them in a step that is over */
    bool ahead_draws;      /* the last one of them drew this token */
    struct kn_token ahead;
    uint64_t exposed_ns;  /* of the time of its loads, in which it could not compute */
    uint32_t tail_tokens; /* preempted: of the block behind the full ones, kept by a source */
    uint32_t tail_block;  /* its number */
    struct kn_offer *tail_offer; /* under way; NULL = none */

    uint32_t slot;           /* KN_SLOT_NONE or its place among the rows */
    uint32_t step_tokens;    /* planned for this step */
    uint64_t last_step;      /* the last planned one with a row of it */
    bool over;               /* its answer ended, but it has a row in the step that runs */
    bool again;              /* what that row computes counts for nothing */
    uint64_t needy_ns;       /* since when it has been waiting for pages or a slot, 0 = it is not */
    uint64_t held_ns;        /* since when it has had pages and could compute */
    uint32_t counted_tokens; /* its part of the scheduler's tokens_waiting */

    struct wire_sampling sampling; /* bias and stop_ids point into this object's memory */
    int32_t *ends;                 /* ids that end the answer: eos unless ignored, then stop ids */
    uint32_t n_ends;

    struct kv_handoff_id handoff;
    char *peer_name, *peer_address;
    char *via_name, *via_address; /* NULL = straight from the peer */
    uint64_t via_incarnation;
    uint64_t peer_incarnation;
    struct kv_send *send; /* engine.c's, while xfer_open */
    struct kv_recv *recv;
    bool xfer_open;       /* a send or recv exists: pages go back only after its done */
    bool received;        /* decode leg: KV came; when preempted it is computed here */
    bool dropped;         /* prefill leg: gave way once after its prompt was done */
    bool said_last;       /* last output is out, only the proof is missing */
    atomic_bool ticketed; /* hint from the net thread, relaxed: kv_send_rewind knows */

    int end_rc; /* why it is ABORTING */
    char end_msg[160];

    /* Messages to the engine. xfer_* is written by the net thread before it posts xfer_done. */
    struct bt_msg submit, xfer_done;
    void *engine;
    int xfer_rc;
    char xfer_text[160];
    struct kv_first xfer_first;
};

struct kn_seq_cfg {
    uint32_t max_tokens; /* of prompt and answer together: context or pool, what is less */
    uint32_t page_tokens;
    uint32_t block_tokens; /* 0 = no prefix index */
    uint32_t n_sources;
    const int32_t *eos;
    uint32_t n_eos;
};

/* Any thread. Copies everything of `a`, which the caller has checked. BT_E_NOMEM. */
int kn_seq_create(const struct kn_submit_args *a,
                  const struct kn_seq_cfg *cfg,
                  struct kn_seq **ret,
                  struct bt_err *err) BT_MUST_USE;
/* It must be in no list and hold no pages. NULL is fine. */
void kn_seq_destroy(struct kn_seq *s);

const char *kn_seq_state_name(enum kn_seq_state state);
enum kn_seq_list kn_seq_state_list(enum kn_seq_state state);
bool kn_seq_state_slot(enum kn_seq_state state);
/* Whether the table allows the edge. */
bool kn_seq_may(enum kn_seq_state from, enum kn_seq_state to);

/* Tokens that must lie in pages before the next token can be drawn (or, on a prefill leg, before
 * the prompt can be handed over). */
static inline uint32_t kn_seq_target(const struct kn_seq *s)
{
    return s->n_prompt + (s->leg == KN_LEG_PREFILL ? s->n_answered : s->n_answer);
}

/* Whether the row that reaches the target draws a token: not when a prefill leg has its first token
 * and only the pages had to be made again. */
static inline bool kn_seq_draws(const struct kn_seq *s)
{
    return s->leg != KN_LEG_PREFILL || s->n_answer == s->n_answered;
}

/* Appends one answer token; there must be room (n_answer < max_answer). Says whether it ends the
 * answer. */
enum kn_finish kn_seq_append(struct kn_seq *s, int32_t id);

#endif
