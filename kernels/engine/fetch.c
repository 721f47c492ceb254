/* Scheduler, fourth part: blocks that sources have (kvstore/tier/source.h).
 *
 * Looking. A queued request that the scan comes by asks the sources in turn for what lies behind
 * the run that the pool has; each is asked behind what the ones before it found. Sources on this
 * machine answer at once. The others are asked only if computing takes much longer than their
 * answers do, and the request waits for them no longer than a small part of that. What is found
 * stays pinned until it is loaded or given up, or until it was known for too long without being
 * used.
 *
 * Bringing. At admission each part is brought if its estimate, corrected by how earlier loads kept
 * theirs, is clearly less than computing it by measured rates. All pages of the request belong to
 * the transfer until every load of it is done; then the leading blocks that are valid count as
 * computed and the rest is computed. A load that is late beyond what computing would cost is given
 * up.
 *
 * Overtaking. What stands behind the blocks may be computed while they come, in a step that takes
 * at least as long as their loads are estimated to need yet: it waits for the loads layer by layer,
 * and counts if they all come whole.
 *
 * Threads: everything runs on the engine's, except the `done` and `progress` of finds and loads,
 * which only post. */
#include "kernels/engine/scheduler_int.h"

#include "common/thr/time.h"

/* How a load must compare with computing, times 1/4: cheaper by a margin. */
#define MARGIN_QUARTERS 5
#define LOAD_FIXED_NS   (100 * BT_NS_PER_US) /* cost of any load: threads wake, a step later */
#define LONG_LOAD_NS    10e6 /* from here on the rate decides, below what every load costs */
#define LEARN_WEIGHT    0.25
#define LOOK_KEEP_NS    (1 * BT_NS_PER_S) /* pins of a request that is not admitted */
#define LOOK_SHARE      50                /* of the time saved, that waiting for answers may take */
#define LOOK_MAX_NS     (50 * BT_NS_PER_MS)
#define LOOK_ALWAYS_NS                                                                             \
    (2 * BT_NS_PER_S)                    /* the same, where blocks are brought whatever it costs   \
                                          */
#define LOOK_AGAIN_NS (BT_NS_PER_MS / 4) /* for the moment to compute behind a load */
#define LOOK_MIN_NS   (1 * BT_NS_PER_MS)
#define MAX_REMOTE    2 /* look-ups on other machines for one stay in the queue */
#define LATE_SHARE    8 /* a load without its first layer may be late by this part of computing */

enum { GATE_CALLING, GATE_ANSWERED, GATE_RETURNED, GATE_LOADED };

static uint32_t block_tokens(const struct kn_sched *sched)
{
    return kn_sched_block_tokens(sched);
}

/* Tokens in the first n blocks of what was looked for, the last of which may be a tail. */
static uint32_t tokens_in(const struct kn_sched *sched, const struct kn_seq *s, uint32_t n)
{
    uint32_t full = n * block_tokens(sched);

    return s->tail_tokens && n == s->tail_block + 1 ? full - block_tokens(sched) + s->tail_tokens
                                                    : full;
}

bool kn_sched_fetch_busy(const struct kn_seq *s)
{
    return s->look == KN_LOOK_ASKING || s->n_loads > 0;
}

/* ---- looking ---- */

/* Unpins. Nothing may be under way. */
static void end_look(struct kn_sched *sched, struct kn_seq *s)
{
    for (uint32_t i = 0; i < s->n_parts; i++) {
        struct kn_part *part = &s->parts[i];
        struct kv_source *src = sched->cfg.sources[part->source];

        BT_BUG_ON(part->asking || part->loading);
        if (part->open) {
            src->ops->end(src, &part->find);
            part->open = false;
        }
    }
    s->n_parts = 0;
    s->look = KN_LOOK_NONE;
}

static uint32_t found(const struct kn_seq *s)
{
    uint32_t n = 0;

    for (uint32_t i = 0; i < s->n_parts; i++) {
        n += s->parts[i].find.n;
    }
    return n;
}

/* Any thread. */
static void on_found(struct kv_find *f)
{
    struct kn_part *part = f->arg;
    struct kn_sched *sched = part->sched;

    part->found_ns = sched->cfg.clock(sched->cfg.post_arg);
    /* Pairs with the exchange in ask: one of the two sees the other's. */
    if (atomic_exchange_explicit(&part->gate, GATE_ANSWERED, memory_order_acq_rel) ==
        GATE_RETURNED) {
        sched->cfg.post(sched->cfg.post_arg, &part->found);
    }
}

static void take_answer(struct kn_sched *sched, struct kn_part *part)
{
    struct kv_find *f = &part->find;
    uint64_t *ema = &sched->look_ns[part->source], took = part->found_ns - part->asked_ns;
    uint32_t n_asked = f->chain.n_blocks - f->first;

    part->asking = false;
    *ema = *ema ? (3 * *ema + took) / 4 : took;
    f->n = BT_MIN(f->n, n_asked);
    f->n_fast = BT_MIN(f->n_fast, f->n);
}

/* Puts the question; true if the answer is there already. */
static bool ask(struct kn_sched *sched, struct kn_part *part)
{
    struct kv_source *src = sched->cfg.sources[part->source];

    part->asking = part->open = true;
    part->asked_ns = sched->cfg.clock(sched->cfg.post_arg);
    atomic_store_explicit(&part->gate, GATE_CALLING, memory_order_relaxed);
    src->ops->find(src, &part->find);
    return atomic_exchange_explicit(&part->gate, GATE_RETURNED, memory_order_acq_rel) ==
           GATE_ANSWERED;
}

/* What the sources may be asked for: full blocks of the known tokens, or what was computed when it
 * gave way, to the token. */
static struct kv_chain look_chain(struct kn_sched *sched, struct kn_seq *s)
{
    return s->tail_tokens ? kn_sched_tail_chain(sched, s, s->tail_block, s->tail_tokens)
                          : kn_sched_chain(sched, s, kn_sched_max_blocks(sched, s));
}

/* Whether waiting for the answer of a source elsewhere can pay. */
static bool worth_asking(const struct kn_sched *sched, uint32_t source, uint64_t saves_ns)
{
    return sched->cfg.always_bring ||
           saves_ns / LOOK_SHARE >= BT_MAX(sched->look_ns[source], LOOK_MIN_NS);
}

/* Asks the sources from `source` on, until one does not answer at once or all have. */
static void ask_from(struct kn_sched *sched, struct kn_seq *s, uint32_t source)
{
    struct kv_chain chain = look_chain(sched, s);
    /* What is received comes from another machine anyway. */
    uint32_t n = kn_seq_computes(s) ? sched->cfg.n_sources : sched->cfg.n_local;

    for (; source < n; source++) {
        struct kn_part *part = &s->parts[s->n_parts];
        uint32_t first = s->look_first + found(s);
        bool remote = source >= sched->cfg.n_local;
        uint64_t saves, wait;

        if (first >= chain.n_blocks) {
            break;
        }
        saves = kn_rate_ns(&sched->rate, tokens_in(sched, s, first),
                           tokens_in(sched, s, chain.n_blocks));
        wait = sched->cfg.always_bring ? LOOK_ALWAYS_NS : BT_MIN(saves / LOOK_SHARE, LOOK_MAX_NS);
        if (remote && (s->n_remote_looks >= MAX_REMOTE || !worth_asking(sched, source, saves))) {
            /* Averages of rare answers fade, so that a source that was slow once is asked again. */
            sched->look_ns[source] -= sched->look_ns[source] / 64;
            continue;
        }
        s->n_remote_looks += remote;
        part->find = (struct kv_find){
            .chain = chain,
            .first = first,
            .n_tokens = s->tail_tokens ? s->tail_tokens : block_tokens(sched),
            .deadline_ns = remote ? sched->now_ns + wait : BT_NEVER_NS,
            .done = on_found,
            .arg = part,
        };
        part->source = source;
        part->n_wanted = 0;
        s->n_parts++;
        s->look = KN_LOOK_ASKING;
        if (!ask(sched, part)) {
            return;
        }
        take_answer(sched, part);
    }
    s->look = KN_LOOK_KNOWN;
    s->look_ns = sched->now_ns;
}

static void handle_found(struct bt_msg *msg, void *consumer)
{
    struct kn_part *part = BT_CONTAINER_OF(msg, struct kn_part, found);
    struct kn_sched *sched = part->sched;
    struct kn_seq *s = part->seq;

    take_answer(sched, part);
    if (s->state == KN_SEQ_ABORTING) {
        s->look = KN_LOOK_KNOWN;
        kn_sched_settle(sched, s);
    } else {
        ask_from(sched, s, part->source + 1);
    }
}

bool kn_sched_look(struct kn_sched *sched, struct kn_seq *s, uint32_t n_pool)
{
    uint32_t n_max;

    if (s->look == KN_LOOK_ASKING || s->tail_offer) {
        return false;
    }
    if (!s->parts) {
        return true;
    }
    if (s->look == KN_LOOK_KNOWN) {
        if (s->look_first == n_pool && sched->now_ns - s->look_ns < LOOK_KEEP_NS) {
            return true;
        }
        end_look(sched, s);
    }
    n_max = kn_sched_max_blocks(sched, s) + (s->tail_tokens > 0);
    if (n_pool < n_max) {
        s->look_first = n_pool;
        ask_from(sched, s, 0);
    }
    return s->look != KN_LOOK_ASKING;
}

/* ---- deciding ---- */

static uint64_t corrected(const struct kn_sched *sched, const struct kn_part *part, uint64_t ns)
{
    const struct kn_load_fit *fit = &sched->load_fit[part->source];

    return (uint64_t)((double)ns * fit->scale + fit->fixed_ns);
}

/* Blocks of the part that are cheaper to bring than to compute; adds to the estimates. Who receives
 * its prompt takes what lies in memory alone. */
static uint32_t
choose_part(const struct kn_sched *sched, struct kn_seq *s, const struct kn_part *part)
{
    const struct kv_find *f = &part->find;
    const struct {
        uint32_t n;
        uint64_t ns;
    } ways[] = {{f->n, f->load_ns}, {f->n_fast, f->fast_ns}};

    if (sched->cfg.always_bring) {
        s->load_promised_ns += corrected(sched, part, f->load_ns);
        s->load_saves_ns = BT_NEVER_NS / 4; /* never given up */
        return f->n;
    }
    for (size_t i = kn_seq_computes(s) ? 0 : 1; i < BT_ARRAY_LEN(ways); i++) {
        uint64_t load = corrected(sched, part, ways[i].ns), compute;

        compute = kn_rate_ns(&sched->rate, tokens_in(sched, s, f->first),
                             tokens_in(sched, s, f->first + ways[i].n));
        if (ways[i].n > 0 && load < UINT64_MAX / MARGIN_QUARTERS &&
            load * MARGIN_QUARTERS / 4 < compute) {
            s->load_promised_ns += load;
            s->load_saves_ns += compute;
            return ways[i].n;
        }
    }
    return 0;
}

uint32_t kn_sched_choose(struct kn_sched *sched, struct kn_seq *s)
{
    uint32_t n = 0;
    bool all = s->look == KN_LOOK_KNOWN;

    s->load_promised_ns = s->load_saves_ns = 0;
    for (uint32_t i = 0; i < s->n_parts; i++) {
        struct kn_part *part = &s->parts[i];

        part->n_wanted = all ? choose_part(sched, s, part) : 0;
        all = all && part->n_wanted == part->find.n;
        n += part->n_wanted;
    }
    return n;
}

void kn_sched_decline(struct kn_sched *sched, struct kn_seq *s)
{
    for (uint32_t i = 0; i < s->n_parts; i++) {
        struct kn_load_fit *fit = &sched->load_fit[s->parts[i].source];

        /* A correction that forbids loads must not do so for ever. */
        if (s->parts[i].find.n > 0) {
            fit->scale -= (fit->scale - 1) / 32;
            fit->fixed_ns -= (fit->fixed_ns - LOAD_FIXED_NS) / 32;
        }
    }
    kn_sched_fetch_end(sched, s);
    s->tail_tokens = 0;
    s->n_remote_looks = 0;
}

/* ---- bringing ---- */

/* Any thread. */
static void on_loaded(struct kv_load *l)
{
    struct kn_part *part = l->arg;
    struct kn_sched *sched = part->sched;

    void (*progress)(void *arg) = sched->cfg.progress;
    void *arg = sched->cfg.post_arg;

    part->loaded_ns = sched->cfg.clock(arg);
    /* Pairs with the acquire in load_is_done. */
    atomic_store_explicit(&part->gate, GATE_LOADED, memory_order_release);
    sched->cfg.post(arg, &part->loaded); /* the part may be gone from here on */
    if (progress) {
        progress(arg);
    }
}

/* Any thread. */
static void on_progress(struct kv_load *l)
{
    const struct kn_part *part = l->arg;

    part->sched->cfg.progress(part->sched->cfg.post_arg);
}

void kn_sched_start_loads(struct kn_sched *sched, struct kn_seq *s)
{
    uint32_t bp = kn_sched_block_pages(sched), last = 0;

    for (uint32_t i = 0; i < s->n_parts; i++) {
        const struct kn_part *part = &s->parts[i];

        last = part->n_wanted ? part->find.first + part->n_wanted : last;
    }
    /* Pages of a tail's block that it does not reach. */
    for (uint32_t i = s->n_pages; i < last * bp; i++) {
        s->pages[i] = KV_PAGE_NONE;
    }
    s->load_ns = sched->now_ns;
    s->load_tokens = BT_MIN(tokens_in(sched, s, last), kn_seq_target(s) - 1);
    s->load_given_up = s->load_void = s->load_told = false;
    s->ahead_tokens = 0;
    s->exposed_ns = BT_NEVER_NS;
    s->n_remote_looks = 0;
    for (uint32_t i = 0; i < s->n_parts; i++) {
        s->n_loads += s->parts[i].n_wanted > 0;
    }
    sched->stats.loads += s->n_loads;
    for (uint32_t i = 0; i < s->n_parts; i++) {
        struct kn_part *part = &s->parts[i];
        struct kv_source *src = sched->cfg.sources[part->source];

        if (part->n_wanted == 0) {
            continue;
        }
        part->load.find = &part->find;
        part->load.pool = sched->cfg.pool;
        part->load.n_blocks = part->n_wanted;
        part->load.pages = s->pages + (size_t)part->find.first * bp;
        atomic_store_explicit(&part->load.layers_ready, 0, memory_order_relaxed);
        atomic_store_explicit(&part->load.n_good, part->n_wanted, memory_order_relaxed);
        part->load.done = on_loaded;
        part->load.progress = sched->cfg.progress ? on_progress : NULL;
        atomic_store_explicit(&part->gate, GATE_CALLING, memory_order_relaxed);
        part->load.arg = part;
        part->loading = true;
        src->ops->load(src, &part->load);
    }
}

static uint32_t layers_ready(const struct kn_part *part)
{
    return atomic_load_explicit(&part->load.layers_ready, memory_order_acquire);
}

/* Nothing writes the pages any more, and what is ready is final. */
static bool load_is_done(const struct kn_part *part)
{
    return atomic_load_explicit(&part->gate, memory_order_acquire) == GATE_LOADED;
}

/* Leading blocks that have come whole. Only when all loads are done. */
static uint32_t count_good(const struct kn_sched *sched, const struct kn_seq *s)
{
    uint32_t n = 0, n_layers = (uint32_t)kv_pool_layout(sched->cfg.pool)->n_layers;

    for (uint32_t i = 0; i < s->n_parts; i++) {
        const struct kn_part *part = &s->parts[i];
        uint32_t good = 0;

        if (part->n_wanted == 0) {
            continue;
        }
        if (layers_ready(part) >= n_layers) {
            good = atomic_load_explicit(&part->load.n_good, memory_order_acquire);
            good = BT_MIN(good, part->n_wanted);
        }
        n += good;
        if (good < part->n_wanted) {
            break;
        }
    }
    return n;
}

/* Where the first n of the blocks found lay. */
static void count_tiers(struct kn_sched *sched, struct kn_seq *s, uint32_t n)
{
    for (uint32_t i = 0; i < s->n_parts; i++) {
        for (int tier = 0; tier < KV_N_TIERS; tier++) {
            uint32_t k = BT_MIN(n, s->parts[i].find.n_tier[tier]);

            sched->stats.tier_tokens[tier] += (uint64_t)k * block_tokens(sched);
            s->tier_tokens[tier] += k * block_tokens(sched);
            n -= k;
        }
    }
}

/* How long it took against what was promised, for the next estimates. */
static void learn(struct kn_sched *sched, const struct kn_seq *s, const struct kn_part *part)
{
    struct kn_load_fit *fit = &sched->load_fit[part->source];
    double took = (double)(part->loaded_ns - s->load_ns), promised = (double)part->find.load_ns;
    double *of = &fit->fixed_ns, now = took - promised, most = 50e6;

    if (part->n_wanted < part->find.n) {
        return;
    }
    if (promised > LONG_LOAD_NS) {
        of = &fit->scale;
        now = took / promised;
        most = 16;
    }
    now = BT_MAX(now, 0.0);
    now = BT_MIN(now, most);
    *of += LEARN_WEIGHT * (now - *of);
}

void kn_sched_fit_init(struct kn_sched *sched)
{
    for (uint32_t i = 0; i < sched->cfg.n_sources; i++) {
        sched->load_fit[i] = (struct kn_load_fit){.scale = 1, .fixed_ns = LOAD_FIXED_NS};
    }
}

/* ---- computing behind loads that are under way ---- */

static bool layer_ready(const struct kn_sched *sched, const struct kn_seq *s, int layer)
{
    bool all = layer == kv_pool_layout(sched->cfg.pool)->n_layers;

    bool ready = true;

    for (uint32_t i = 0; i < s->n_parts; i++) {
        const struct kn_part *part = &s->parts[i];

        if (part->n_wanted > 0 && !load_is_done(part)) {
            ready &= !all && layers_ready(part) > (uint32_t)layer;
            if (atomic_load_explicit(&part->load.n_good, memory_order_acquire) < part->n_wanted) {
                return true; /* the row is lost: nothing to wait for */
            }
        }
    }
    return ready || s->load_void;
}

bool kn_sched_layer_ready(const struct kn_sched *sched, const struct kn_step_plan *plan, int layer)
{
    for (uint32_t i = plan->n_rows - plan->n_loading; i < plan->n_rows; i++) {
        if (!layer_ready(sched, sched->slots[plan->rows[i].slot], layer)) {
            return false;
        }
    }
    return true;
}

void kn_sched_layer_waited(struct kn_sched *sched,
                           const struct kn_step_plan *plan,
                           int layer,
                           uint64_t ns)
{
    for (uint32_t i = plan->n_rows - plan->n_loading; i < plan->n_rows; i++) {
        struct kn_seq *s = sched->slots[plan->rows[i].slot];

        s->load_void |= !layer_ready(sched, s, layer);
        s->exposed_ns += ns;
    }
}

bool kn_sched_loads_whole(const struct kn_sched *sched, const struct kn_seq *s)
{
    uint32_t wanted = 0;

    for (uint32_t i = 0; i < s->n_parts; i++) {
        wanted += s->parts[i].n_wanted;
        if (s->parts[i].n_wanted > 0 && !load_is_done(&s->parts[i])) {
            return false;
        }
    }
    return !s->load_void && count_good(sched, s) == wanted;
}

/* Time until the loads of s are done, by how far they are. */
static uint64_t loads_left_ns(const struct kn_sched *sched, const struct kn_seq *s)
{
    uint32_t n_layers = (uint32_t)kv_pool_layout(sched->cfg.pool)->n_layers, k = n_layers;
    uint64_t elapsed = sched->now_ns - s->load_ns;

    for (uint32_t i = 0; i < s->n_parts; i++) {
        const struct kn_part *part = &s->parts[i];

        if (part->n_wanted > 0 && !load_is_done(part)) {
            k = BT_MIN(k, layers_ready(part));
        }
    }
    if (k > 0) {
        return elapsed / k * (n_layers - k);
    }
    return elapsed < s->load_promised_ns ? s->load_promised_ns - elapsed : s->load_promised_ns;
}

bool kn_sched_may_overtake(struct kn_sched *sched, struct kn_seq *s, uint64_t step_ns, bool alone)
{
    uint64_t left = loads_left_ns(sched, s), at;

    /* Placing a tail writes all of its page, also where the row would stand. */
    if (s->load_tokens % block_tokens(sched) != 0 || !kn_seq_computes(s) || s->load_given_up ||
        s->load_void || s->ahead_tokens > 0 || s->n_loads == 0 || sched->cfg.progress == NULL) {
        return false;
    }
    /* Both go through the layers at an even pace, so a load that ends before the step does never
     * makes it wait. Others in the step get a margin. */
    if (alone ? left <= step_ns : left * MARGIN_QUARTERS / 4 <= step_ns) {
        return true;
    }
    at = left > step_ns ? left - step_ns : 0;
    at = sched->now_ns + BT_MAX(at, LOOK_AGAIN_NS);
    sched->next_load_ns = BT_MIN(sched->next_load_ns, at);
    return false;
}

/* ---- the end of loads ---- */

static void all_loaded(struct kn_sched *sched, struct kn_seq *s)
{
    uint32_t wanted = 0, good = count_good(sched, s), n = s->n_blocks + good;
    uint32_t before = s->n_computed;

    for (uint32_t i = 0; i < s->n_parts; i++) {
        wanted += s->parts[i].n_wanted;
    }
    sched->stats.loads_short += good < wanted;
    sched->stats.load_wait_ns +=
        s->exposed_ns == BT_NEVER_NS || s->load_void ? sched->now_ns - s->load_ns : s->exposed_ns;
    if (s->state == KN_SEQ_ABORTING) {
        kn_sched_settle(sched, s);
        return;
    }
    if (!s->placed && kn_seq_computes(s)) {
        count_tiers(sched, s, good);
    }
    sched->stats.resumed += s->placed && good > 0;
    /* At least one token is computed, also if a tail holds them all. */
    s->n_computed = BT_MIN(tokens_in(sched, s, n), kn_seq_target(s) - 1);
    BT_BUG_ON(s->ahead_tokens > 0 && s->n_computed != s->load_tokens);
    end_look(sched, s);
    s->tail_tokens = 0;
    kn_sched_own_pages(sched, s, KV_OWNER_SEQ);
    if (!kn_seq_computes(s)) {
        kn_sched_publish(sched, s);
        kn_sched_own_pages(sched, s, KV_OWNER_TRANSFER);
        kn_sched_begin_recv(sched, s);
        return;
    }
    kn_sched_begin_computing(sched, s);
    kn_sched_publish(sched, s);
    if (s->leg == KN_LEG_PREFILL && s->n_computed > before && !s->load_told) {
        sched->cfg.xfer->send_cached(sched->cfg.xfer_arg, s, s->n_computed);
    }
    if (s->ahead_tokens > 0) {
        kn_sched_take_ahead(sched, s);
    }
}

static void handle_loaded(struct bt_msg *msg, void *consumer)
{
    struct kn_part *part = BT_CONTAINER_OF(msg, struct kn_part, loaded);
    struct kn_sched *sched = part->sched;
    struct kn_seq *s = part->seq;

    part->loading = false;
    learn(sched, s, part);
    if (--s->n_loads == 0) {
        all_loaded(sched, s);
    }
}

/* ---- giving up ---- */

static void cancel_loads(struct kn_sched *sched, struct kn_seq *s)
{
    if (s->load_given_up) {
        return;
    }
    s->load_given_up = true;
    for (uint32_t i = 0; i < s->n_parts; i++) {
        struct kn_part *part = &s->parts[i];

        if (part->loading) {
            sched->cfg.sources[part->source]->ops->load_cancel(sched->cfg.sources[part->source],
                                                               &part->load);
        }
    }
}

bool kn_sched_fetch_cancel(struct kn_sched *sched, struct kn_seq *s)
{
    if (s->look == KN_LOOK_ASKING) {
        struct kn_part *part = &s->parts[s->n_parts - 1];
        struct kv_source *src = sched->cfg.sources[part->source];

        src->ops->find_cancel(src, &part->find);
    } else if (s->n_loads > 0) {
        cancel_loads(sched, s);
    } else {
        kn_sched_fetch_end(sched, s);
    }
    return !kn_sched_fetch_busy(s);
}

void kn_sched_fetch_end(struct kn_sched *sched, struct kn_seq *s)
{
    BT_BUG_ON(kn_sched_fetch_busy(s));
    if (s->look != KN_LOOK_NONE) {
        end_look(sched, s);
    }
}

/* When the loads of s are to be looked at again; 0 = they are later than computing would be. */
static uint64_t next_check(const struct kn_sched *sched, const struct kn_seq *s)
{
    uint32_t n_layers = (uint32_t)kv_pool_layout(sched->cfg.pool)->n_layers, k = n_layers;
    uint64_t elapsed = sched->now_ns - s->load_ns, limit, rest;

    for (uint32_t i = 0; i < s->n_parts; i++) {
        k = s->parts[i].loading ? BT_MIN(k, layers_ready(&s->parts[i])) : k;
    }
    if (elapsed < s->load_promised_ns) {
        return s->load_ns + s->load_promised_ns;
    }
    if (k == 0) {
        limit = s->load_ns + s->load_promised_ns + s->load_saves_ns / LATE_SHARE;
        return sched->now_ns < limit ? limit : 0;
    }
    rest = elapsed / k * (n_layers - k);
    return rest <= s->load_saves_ns ? sched->now_ns + BT_MAX(elapsed / 8, BT_NS_PER_MS) : 0;
}

void kn_sched_check_loads(struct kn_sched *sched)
{
    sched->next_load_ns = BT_NEVER_NS;
    if (sched->stats.n_state[KN_SEQ_LOADING] == 0) {
        return;
    }
    bt_list_for_each (l, &sched->lists[KN_LIST_AWAY]) {
        struct kn_seq *s = kn_seq_of(l);
        uint64_t at;

        if (s->state != KN_SEQ_LOADING || s->load_given_up) {
            continue;
        }
        at = next_check(sched, s);
        if (at == 0) {
            sched->stats.loads_given_up++;
            cancel_loads(sched, s);
        } else {
            sched->next_load_ns = BT_MIN(sched->next_load_ns, at);
        }
    }
}

void kn_sched_fetch_init(struct kn_sched *sched, struct kn_seq *s)
{
    for (uint32_t i = 0; s->parts && i < sched->cfg.n_sources; i++) {
        struct kn_part *part = &s->parts[i];

        part->sched = sched;
        part->seq = s;
        bt_list_init(&part->found.link);
        bt_list_init(&part->loaded.link);
        part->found.handle = handle_found;
        part->loaded.handle = handle_loaded;
    }
}
