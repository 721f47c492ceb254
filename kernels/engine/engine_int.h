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
    struct kn_exec *exec;
    struct kn_sched *sched;     /* engine thread */
    struct kn_token *drawn;     /* [max_running] */
    struct kv_handoff *handoff; /* NULL = none; set by start */
    struct bt_mailbox mailbox;
    int wake_fd;
    pthread_t thread;
    bool started;
    bool ended_all;        /* engine thread: stop was seen */
    atomic_bool stopping;  /* set by stop, read by submit and the loop */
    atomic_uint n_pending; /* submitted, not yet with the scheduler */
    struct kn_step *step;  /* engine thread: outputs not yet emitted, NULL = none */
    uint32_t step_tokens;  /* used of its tokens */
    struct {               /* engine thread: for the next note */
        struct kv_event *events;
        size_t n_events, cap_events;
        bool lost;
        struct kn_step_sample sample;
    } notes;
    struct { /* written by the engine thread, read by any; relaxed: each by itself */
        atomic_uint waiting, running, holding;
        atomic_ullong tokens_waiting, steps, tokens_computed, tokens_generated, preemptions;
        atomic_ullong tokens_cached, blocks_evicted, key_collisions, oldest_ns;
    } stats;
};

/* note.c [engine] */
struct kv_event_sink kn_note_sink(struct kn_engine *e);
void kn_note_step(struct kn_engine *e, const struct kn_step_plan *plan, uint64_t ns);
void kn_note_flush(struct kn_engine *e);

extern const struct kn_xfer_ops kn_xfer_handoff;
/* [engine] Layer `layer` of all rows is there: tells the sends. */
void kn_xfer_layer_done(struct kn_engine *e, const struct kn_step_plan *plan, int layer);

#endif
