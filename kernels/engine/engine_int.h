/* Private to the engine: what engine.c and xfer.c share. */
#ifndef KN_ENGINE_ENGINE_INT_H
#define KN_ENGINE_ENGINE_INT_H

#include "kernels/engine/exec.h"

#include "common/thr/mailbox.h"

struct kn_engine {
    struct kn_engine_cfg cfg;
    int max_ctx;         /* tokens of prompt and answer together */
    uint32_t max_tokens; /* the same, or the pool's where that is less */
    struct kv_pool *pool;
    struct kv_index *index;      /* engine thread; NULL = no prefix reuse */
    struct kv_key root;          /* of block keys, without a salt */
    struct kv_key_root_args key; /* what they are made of, in memory of our own */
    char *secret;
    uint8_t model_digest[32], kv_format[32];
    struct kv_source *sources[KN_MAX_SOURCES];
    uint32_t n_sources, n_local_sources;
    struct kn_exec *exec;
    struct kn_sched *sched;     /* engine thread */
    struct kn_token *drawn;     /* [max_running] */
    struct kv_handoff *handoff; /* NULL = none; set by start */
    struct bt_mailbox mailbox;
    int wake_fd;
    pthread_t thread;
    bool started;
    /* Signalled by sources' threads when loads of rows have come further. */
    pthread_mutex_t progress_lock;
    pthread_cond_t progress_cond;
    uint64_t progress;     /* guarded by the lock: counts signals */
    bool ended_all;        /* engine thread: stop was seen */
    atomic_bool stopping;  /* set by stop, read by submit and the loop */
    atomic_uint n_pending; /* submitted, not yet with the scheduler */
    struct kn_step *step;  /* engine thread: outputs not yet emitted, NULL = none */
    uint32_t step_tokens;  /* used of its tokens */
    uint64_t step_end_ns;  /* engine thread: when the last step ended */
    struct {               /* engine thread: for the next note */
        struct kv_event *events;
        size_t n_events, cap_events;
        bool lost;
        struct kn_step_sample sample;
    } notes;
    struct {                      /* memory from the keeper */
        struct kv_ledger *ledger; /* NULL = none */
        struct bt_mem_region ledger_mem;
        uint64_t pool_id;
        struct bt_mem_region notes_mem; /* device: what it measured */
        struct kn_model_home home;
    } keep;
    struct { /* written by the engine thread, read by any; relaxed: each by itself */
        atomic_uint waiting, running, holding;
        atomic_ullong tokens_waiting, steps, steps_ahead, tokens_computed, tokens_generated,
            preemptions;
        atomic_ullong tokens_cached, blocks_evicted, key_collisions, oldest_ns;
        atomic_ullong blocks_adopted, blocks_bad;
        atomic_ullong tier_tokens[KV_N_TIERS];
        atomic_ullong loads, loads_given_up, loads_short, load_wait_ns, overtakes, swapped, resumed;
    } stats;
};

/* note.c [engine] */
struct kv_event_sink kn_note_sink(struct kn_engine *e);
void kn_note_step(struct kn_engine *e, const struct kn_step_plan *plan, uint64_t ns);
void kn_note_flush(struct kn_engine *e);

/* keep.c; all before the start and after the stop. */
/* The pool from the keeper. */
int kn_keep_pool(struct kn_engine *e,
                 const struct kv_layout *layout,
                 struct bt_err *err) BT_MUST_USE;
/* Device: a home for the model's weights and notes; NULL without a keeper. */
const struct kn_model_home *kn_keep_home(struct kn_engine *e);
/* The ledger, and what a predecessor sealed in it; index and root are there. */
int kn_keep_adopt(struct kn_engine *e, struct bt_err *err) BT_MUST_USE;
/* From now on the memory stays as it is. Safe to repeat. */
void kn_keep_leave(struct kn_engine *e);
/* After pool and index are gone. */
void kn_keep_fini(struct kn_engine *e);

extern const struct kn_xfer_ops kn_xfer_handoff;
/* [engine] Layer `layer` of all rows is there: tells the sends. */
void kn_xfer_layer_done(struct kn_engine *e, const struct kn_step_plan *plan, int layer);

/* [engine] All layers of all rows are there. */
void kn_xfer_step_done(struct kn_engine *e, const struct kn_step_plan *plan);

#endif
