/* A request's memory, its state table and its stop rules. No thread of its own. */
#include "kernels/engine/seq.h"

#include "common/base/buf.h"
#include "common/thr/time.h"

#include <stdlib.h>

#define KN_TO(name) (1u << KN_SEQ_##name)

static const struct {
    const char *name;
    enum kn_seq_list list;
    bool slot;
    uint32_t next;
} state_table[KN_SEQ_N_STATES] = {
#define KN_STATE(name, list, slot, meaning, next)                                                  \
    [KN_SEQ_##name] = {#name, KN_LIST_##list, slot, next},
#include "kernels/engine/states.def"
#undef KN_STATE
};

const char *kn_seq_state_name(enum kn_seq_state state)
{
    return state_table[state].name;
}

enum kn_seq_list kn_seq_state_list(enum kn_seq_state state)
{
    return state_table[state].list;
}

bool kn_seq_state_slot(enum kn_seq_state state)
{
    return state_table[state].slot;
}

bool kn_seq_may(enum kn_seq_state from, enum kn_seq_state to)
{
    return state_table[from].next >> to & 1;
}

static void *copy(const void *p, size_t n, size_t size)
{
    void *c = bt_calloc(n ? n : 1, size);

    if (c && n > 0) {
        memcpy(c, p, n * size);
    }
    return c;
}

static bool
copy_sampling(struct kn_seq *s, const struct wire_sampling *from, const struct kn_seq_cfg *cfg)
{
    uint32_t n_eos = from->ignore_eos ? 0 : cfg->n_eos;

    s->sampling = *from;
    s->sampling.bias = copy(from->bias, from->n_bias, sizeof(*from->bias));
    s->sampling.stop_ids = NULL;
    s->ends = bt_calloc(n_eos + from->n_stop_ids + 1, sizeof(*s->ends));
    if (!s->sampling.bias || !s->ends) {
        return false;
    }
    if (n_eos > 0) {
        memcpy(s->ends, cfg->eos, n_eos * sizeof(*s->ends));
    }
    if (from->n_stop_ids > 0) {
        memcpy(s->ends + n_eos, from->stop_ids, from->n_stop_ids * sizeof(*s->ends));
    }
    s->n_ends = n_eos + (uint32_t)from->n_stop_ids;
    s->sampling.stop_ids = s->ends + n_eos;
    return true;
}

int kn_seq_create(const struct kn_submit_args *a,
                  const struct kn_seq_cfg *cfg,
                  struct kn_seq **ret,
                  struct bt_err *err)
{
    uint32_t room = cfg->max_tokens - (uint32_t)a->n_prompt, max_total;
    struct kn_seq *s = bt_calloc(1, sizeof(*s));

    if (!s) {
        return BT_FAIL(err, BT_E_NOMEM, "request: no memory");
    }
    bt_list_init(&s->link);
    s->came_ns = bt_now_ns();
    s->tag = a->tag;
    s->claim = a->claim;
    s->deadline_ns = a->deadline_ns;
    s->leg = a->leg;
    s->slot = KN_SLOT_NONE;
    s->n_prompt = (uint32_t)a->n_prompt;
    s->n_answered = s->n_answer = (uint32_t)a->n_answered;
    s->max_answer = BT_MIN(a->sampling->max_tokens, room);
    s->limited = room < a->sampling->max_tokens;
    max_total = s->n_prompt + BT_MAX(s->max_answer, s->n_answered);
    s->handoff = a->handoff;
    s->peer_incarnation = a->peer_incarnation;
    s->cache_salt = strdup(a->cache_salt ? a->cache_salt : "");
    s->peer_name = strdup(a->peer_name ? a->peer_name : "");
    s->peer_address = strdup(a->peer_address ? a->peer_address : "");
    if (a->via.name) {
        s->via_incarnation = a->via.incarnation;
        s->via_name = strdup(a->via.name);
        s->via_address = strdup(a->via.address);
    }
    s->ids = bt_calloc((size_t)max_total + KV_HANDOFF_MAX_FIRST, sizeof(*s->ids));
    s->pages = bt_calloc((size_t)(max_total + cfg->block_tokens) / cfg->page_tokens + 2,
                         sizeof(*s->pages));
    if (cfg->block_tokens > 0) {
        s->keys = bt_calloc((size_t)max_total / cfg->block_tokens + 1, sizeof(*s->keys));
        s->blocks = bt_calloc((size_t)max_total / cfg->block_tokens + 1, sizeof(struct kv_block *));
    }
    if (cfg->block_tokens > 0 && cfg->n_sources > 0) {
        s->parts = bt_calloc(cfg->n_sources, sizeof(*s->parts));
    }
    if ((cfg->block_tokens > 0 && (!s->keys || !s->blocks || (cfg->n_sources && !s->parts))) ||
        !copy_sampling(s, a->sampling, cfg) || !s->ids || !s->pages || !s->peer_name ||
        !s->peer_address || !s->cache_salt || (a->via.name && (!s->via_name || !s->via_address))) {
        kn_seq_destroy(s);
        return BT_FAIL(err, BT_E_NOMEM, "request: no memory for %zu tokens", (size_t)max_total);
    }
    memcpy(s->ids, a->prompt, a->n_prompt * sizeof(*s->ids));
    if (a->n_answered > 0) {
        memcpy(s->ids + a->n_prompt, a->answered, a->n_answered * sizeof(*s->ids));
    }
    *ret = s;
    return BT_OK;
}

void kn_seq_destroy(struct kn_seq *s)
{
    if (!s) {
        return;
    }
    BT_BUG_ON(s->n_pages != 0 || s->n_blocks != 0 || s->xfer_open || s->slot != KN_SLOT_NONE);
    BT_BUG_ON(s->look != KN_LOOK_NONE || s->n_loads != 0);
    free((void *)s->sampling.bias); /* ours: copied in copy_sampling */
    free(s->ends);
    free(s->ids);
    free(s->pages);
    free(s->keys);
    free(s->blocks);
    free(s->parts);
    free(s->cache_salt);
    free(s->peer_name);
    free(s->peer_address);
    free(s->via_name);
    free(s->via_address);
    free(s);
}

enum kn_finish kn_seq_append(struct kn_seq *s, int32_t id)
{
    BT_BUG_ON(s->n_answer >= s->max_answer);
    s->ids[s->n_prompt + s->n_answer++] = id;
    for (uint32_t i = 0; i < s->n_ends; i++) {
        if (s->ends[i] == id && s->n_answer > s->sampling.min_tokens) {
            return KN_FINISH_STOP;
        }
    }
    return s->n_answer == s->max_answer ? KN_FINISH_LENGTH : KN_FINISH_NONE;
}
