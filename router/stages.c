/* See stages.h. */
#include "router/stages.h"

const char *const rt_stage_names[RT_STAGE_COUNT] = {
    "tokenize", "queue",   "retry",   "prefill_queue", "load",        "prefill",
    "relay",    "reserve", "handoff", "decode_queue",  "decode_step", "second_relay"};

static uint64_t span(uint64_t from, uint64_t to)
{
    return to > from ? to - from : 0;
}

/* Takes at most what is left of the window: what a node says cannot be more than there was. */
static uint64_t take(uint64_t *left, uint64_t want)
{
    uint64_t got = BT_MIN(*left, want);

    *left -= got;
    return got;
}

static void
fill_first(const struct rt_stamps *t, const struct rt_leg_times *prompt, uint64_t now, uint64_t *ns)
{
    uint64_t end = t->first ? t->first : now, left = span(t->came, end);

    ns[RT_STAGE_TOKENIZE] = take(&left, span(t->came, t->tokenized ? t->tokenized : end));
    ns[RT_STAGE_QUEUE] = take(&left, span(t->tokenized, t->asked ? t->asked : end));
    ns[RT_STAGE_RETRY] = take(&left, t->asked ? span(t->asked, t->launched) : 0);
    if (prompt->known) {
        ns[RT_STAGE_LOAD] = take(&left, prompt->load_ns);
        ns[RT_STAGE_PREFILL] = take(&left, prompt->compute_ns);
        ns[RT_STAGE_PREFILL_QUEUE] = take(&left, prompt->queue_ns + prompt->wait_ns);
    }
    ns[RT_STAGE_RELAY] = left;
}

/* Of [from, to) what lies in the gap. */
static uint64_t clip(const struct rt_stamps *t, uint64_t from, uint64_t to)
{
    return span(BT_MAX(from, t->first), BT_MIN(to, t->second));
}

static void fill_second(const struct rt_stamps *t, const struct rt_leg_times *decode, uint64_t *ns)
{
    uint64_t left = span(t->first, t->second), at = t->launched;

    if (decode && decode->known) {
        ns[RT_STAGE_RESERVE] = take(&left, clip(t, at, at + decode->queue_ns));
        at += decode->queue_ns;
        ns[RT_STAGE_HANDOFF] = take(&left, clip(t, at, at + decode->load_ns));
        at += decode->load_ns;
        ns[RT_STAGE_DECODE_QUEUE] = take(&left, clip(t, at, at + decode->wait_ns));
        at += decode->wait_ns;
        ns[RT_STAGE_DECODE] = take(&left, clip(t, at, at + decode->compute_ns));
        ns[RT_STAGE_SECOND_RELAY] = left;
    } else {
        ns[RT_STAGE_DECODE] = left;
    }
}

void rt_stages_fill(const struct rt_stamps *t,
                    const struct rt_leg_times *prompt,
                    const struct rt_leg_times *decode,
                    uint64_t now,
                    uint64_t ret_ns[RT_STAGE_COUNT])
{
    memset(ret_ns, 0, RT_STAGE_COUNT * sizeof(*ret_ns));
    fill_first(t, prompt, now, ret_ns);
    if (t->first && t->second) {
        fill_second(t, decode, ret_ns);
    }
}
