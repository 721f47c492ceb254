/* The engine: one for all roles. Takes requests, plans steps, runs the model, emits tokens.
 *
 * A step is planned as an immutable `struct kn_step_plan` (which sequences, which token ranges,
 * which pages, who samples) by the scheduler and run by the executor. Prefill node, decode node and
 * colocated node differ by the leg of each request alone:
 *   KN_LEG_LOCAL    prompt and answer here
 *   KN_LEG_PREFILL  prompt here, first token, then the KV is handed over (kvstore/handoff)
 *   KN_LEG_DECODE   KV is received, then the answer goes on here
 * Pages are taken on demand. When they run out the youngest holder (largest claim) gives way: it is
 * dropped and computed again later, which changes no bit of its output; on a prefill node finished
 * prompts that no decode node has asked for give way first. The oldest request always finishes, and
 * what can never fit is refused at once.
 *
 * Threads: the engine runs its own ("engine"). submit and cancel may be called from any thread.
 * Outputs are emitted on the engine's thread, once per step for all requests.
 */
#ifndef KN_ENGINE_ENGINE_H
#define KN_ENGINE_ENGINE_H

#include "common/file/model.h"
#include "common/mem/mem.h"
#include "kernels/model/sampler.h"
#include "kvstore/block/events.h"
#include "kvstore/block/key.h"
#include "kvstore/handoff/handoff.h"
#include "kvstore/tier/source.h"

struct kv_keeper;

struct kn_device_ops;

enum kn_leg { KN_LEG_LOCAL, KN_LEG_PREFILL, KN_LEG_DECODE };
enum kn_finish { KN_FINISH_NONE, KN_FINISH_STOP, KN_FINISH_LENGTH };

struct kn_engine;

/* Where a leg's time went until its first own token; the four follow one another. See LegTimes of
 * proto/node.proto. */
struct kn_times {
    uint64_t queue_ns, load_ns, wait_ns, compute_ns;
    uint32_t tier_tokens[KV_N_TIERS]; /* found instead of computed */
    const char *transport;            /* decode leg; static, NULL = nothing came */
    uint64_t bytes;                   /* decode leg: that came */
};

struct kn_output {
    uint64_t tag;    /* of the request */
    uint32_t offset; /* of the first token in the answer */
    uint32_t n_tokens;
    const struct kn_token *tokens; /* in the step's own memory */
    enum kn_finish finish;         /* not NONE: last output of the request */
    bool handed_over;              /* prefill leg: D has it all; last output */
    int rc;                        /* < 0: failed, last output; err_msg says why */
    char err_msg[160];
    uint32_t cached_tokens; /* of prompt and answered, not computed because their KV was here */
    bool timed;             /* the first own token of the leg is among these: times is filled */
    struct kn_times times;
};

/* One engine step's outputs; belongs to the receiver, who frees it with kn_step_free. `msg` is
 * there so that it can be posted on as it is. */
struct kn_step {
    struct bt_msg msg;
    size_t n_outputs;
    struct kn_output *outputs;
};
void kn_step_free(struct kn_step *step);

/* What a step cost: for models of a node's speed. us 0 = no step. */
struct kn_step_sample {
    uint32_t prompt_tokens; /* in rows of more than one token */
    uint64_t prompt_work;   /* sum over them of the tokens that each one attends to */
    uint32_t rows;          /* of one token */
    uint64_t row_work;      /* likewise */
    uint32_t us;
};

/* What else a pass of the engine has to tell: blocks that came or went, in order, and its cost.
 * Belongs to the receiver, who frees it with free(). */
struct kn_note {
    struct bt_msg msg;
    struct kn_step_sample sample;
    size_t n_events;
    struct kv_event events[];
};

struct kn_engine_cfg {
    const struct bt_model_file *file;   /* borrowed, outlives the engine */
    const struct bt_mem_ops *mem;       /* of the pool */
    const struct kn_device_ops *device; /* NULL = CPU; else pages live on the device in its dtype,
                                           and the pool is their copy in host memory (exec.h) */
    /* With prefix reuse: the pool's memory comes from here and outlives the process; blocks that a
     * predecessor sealed in it are adopted. Borrowed, not started yet; NULL = none. */
    struct kv_keeper *keeper;
    int n_threads;
    const char *isa;
    bool profile;   /* CPU: its ops are counted; one engine a process then */
    bool invariant; /* device: a request's bits do not depend on what runs beside it */
    enum kv_dtype kv_dtype;
    int page_tokens;
    size_t pool_bytes; /* rounded down to pages */
    int max_ctx;       /* 0 = the model's */
    /* Prefix reuse: tokens of an identity block, a multiple of the page's; 0 = off. `key` is what
     * the engine does not know of the root of block keys, borrowed for the call of create; its
     * format and numerics are filled in. key_bits: 0 = whole keys; fewer make collisions, for
     * tests.
     */
    int block_tokens;
    int key_bits;
    bool always_bring; /* blocks found outside the pool are brought, also where computing would be
                          cheaper; for measurements */
    bool never_ahead;  /* device: no step is begun before the one before it has ended; likewise */
    uint64_t random_seed; /* device: of made-up weights (struct kn_model_cfg); likewise */
    struct kv_key_root_args key;
    int max_batch_tokens; /* chunk budget of one step, e.g. 512 */
    int max_running;      /* sequences in one step */
    int max_waiting;      /* requests queued; more are refused with BT_E_EXHAUSTED */
    /* [engine thread] Takes the step. Must not block. */
    void (*emit)(void *arg, struct kn_step *take_step);
    void *emit_arg;
    /* [engine thread] Takes the note, before the outputs of the same pass. Must not block. NULL =
     * not wanted. */
    void (*note)(void *arg, struct kn_note *take_note);
    void *note_arg;
};

/* Creates pool and model; kn_engine_start starts the thread. Between the two the caller makes the
 * handoff over kn_engine_pool and hands it in (NULL = no handoffs: only KN_LEG_LOCAL is accepted).
 */
int kn_engine_create(const struct kn_engine_cfg *cfg,
                     struct kn_engine **ret_engine,
                     struct bt_err *err) BT_MUST_USE;
/* Before the start: where else blocks come from and go to, asked in this order. Borrowed until the
 * engine has stopped. Those that answer at once (`local`) come first. Needs prefix reuse. */
void kn_engine_add_source(struct kn_engine *e, struct kv_source *source, bool local);
/* A source that wanted no offers wants them now. Any thread, also before the start. */
void kn_engine_poke(struct kn_engine *e);
int kn_engine_start(struct kn_engine *e,
                    struct kv_handoff *handoff,
                    struct bt_err *err) BT_MUST_USE;
/* Cancels everything, waits for proof of every transfer, stops the thread, empties the prefix
 * index. True if all pages came back. The handoff must still run. */
bool kn_engine_stop(struct kn_engine *e);
void kn_engine_destroy(struct kn_engine *e);

struct kv_pool *kn_engine_pool(const struct kn_engine *e);
const struct bt_model_config *kn_engine_config(const struct kn_engine *e);
const char *kn_engine_numerics(const struct kn_engine *e);
int kn_engine_max_ctx(const struct kn_engine *e);

struct kn_submit_args {
    uint64_t tag; /* the caller's, unique among live requests */
    enum kn_leg leg;
    const int32_t *prompt;   /* copied */
    size_t n_prompt;         /* >= 1 */
    const int32_t *answered; /* ids of the answer that are already out; the next offset is their
                                number. Copied. */
    size_t n_answered;
    const struct wire_sampling *sampling; /* deep-copied; checked by the caller against V */
    const char *cache_salt; /* only requests with the same share blocks; NULL or empty = all that
                               give none. At most KV_KEY_FIELD_MAX bytes. Copied. */
    uint64_t claim;         /* smaller = older */
    uint64_t deadline_ns;   /* BT_NEVER_NS = none; then BT_E_DEADLINE */
    /* Handoff legs. Strings are copied. */
    struct kv_handoff_id handoff;
    const char *peer_name;
    uint64_t peer_incarnation;
    const char *peer_address;
    /* DECODE: the store's daemon that takes the prompt from the peer for us; name NULL = the peer
     * itself hands it over. Copied. */
    struct kv_origin via;
};

/* Any thread. Checks everything that needs no engine state and queues the request: BT_E_INVALID
 * (empty, bad id, prompt longer than the context: both numbers), BT_E_EXHAUSTED (queue full, or
 * more pages than the pool has), BT_E_UNSUPPORTED. After BT_OK exactly one last output follows. */
int kn_engine_submit(struct kn_engine *e,
                     const struct kn_submit_args *a,
                     struct bt_err *err) BT_MUST_USE;
/* Any thread. The last output (BT_E_CANCELLED, or what was faster) follows after proof. Unknown
 * tags are ignored. */
void kn_engine_cancel(struct kn_engine *e, uint64_t tag);

/* Any thread but the engine's: gives up all cached blocks that no request holds, waits for it and
 * returns how many pages that were. */
uint32_t kn_engine_flush(struct kn_engine *e);

struct kn_engine_stats {
    uint32_t waiting, running,
        holding; /* holding: finished prompts waiting for their decode node */
    uint64_t tokens_waiting;
    uint64_t steps, tokens_computed, tokens_generated, preemptions;
    uint64_t steps_ahead;   /* of steps: planned while the one before ran, on a device */
    uint64_t tokens_cached; /* taken from the prefix index instead of computed */
    uint64_t blocks_evicted, key_collisions;
    uint64_t blocks_adopted, blocks_bad; /* of a predecessor: taken over; refused or damaged */
    uint64_t oldest_ns; /* when the cached block that would go next was last used; 0 = none */
    uint64_t tier_tokens[KV_N_TIERS]; /* of tokens_cached, by where they were */
    uint64_t loads, loads_given_up, loads_short, load_wait_ns, overtakes, swapped, resumed;
};
struct kn_engine_stats kn_engine_stats(const struct kn_engine *e); /* any thread */

/* What all calls of one kind of op have cost (kernels/core/profile.h). */
#define KN_ENGINE_OPS_MAX 16
struct kn_engine_op {
    const char *name; /* static */
    uint64_t calls, ns, limit_ns, bytes, operations;
};
/* Those that were called; none without kn_engine_cfg.profile. Any thread. */
size_t kn_engine_ops(struct kn_engine_op ret[KN_ENGINE_OPS_MAX]);

#endif
