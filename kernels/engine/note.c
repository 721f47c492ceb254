/* Notes: what a pass of the engine tells besides outputs. The prefix index tells of every block
 * that comes or goes; the changes gather here and leave with the step's cost in one message per
 * pass. Without memory for them they are lost; the next note then tells of all blocks anew.
 * Engine's thread; before the start, the thread that creates the engine. */
#include "kernels/engine/engine_int.h"

#include "common/base/buf.h"
#include "common/thr/time.h"

#include <stdlib.h>

#define EVENTS_MIN 64

static bool grow(struct kn_engine *e)
{
    size_t cap = BT_MAX(2 * e->notes.cap_events, (size_t)EVENTS_MIN);
    void *p = realloc(e->notes.events, cap * sizeof(*e->notes.events));

    if (p) {
        e->notes.events = p;
        e->notes.cap_events = cap;
    }
    return p != NULL;
}

static void on_event(void *arg, const struct kv_event *ev)
{
    struct kn_engine *e = arg;

    if (e->notes.n_events == e->notes.cap_events && !grow(e)) {
        e->notes.lost = true;
        return;
    }
    e->notes.events[e->notes.n_events++] = *ev;
}

struct kv_event_sink kn_note_sink(struct kn_engine *e)
{
    return (struct kv_event_sink){e->cfg.note ? on_event : NULL, e};
}

void kn_note_step(struct kn_engine *e, const struct kn_step_plan *plan, uint64_t ns)
{
    struct kn_step_sample *s = &e->notes.sample;

    ns = BT_MIN(ns / BT_NS_PER_US + 1, (uint64_t)UINT32_MAX);
    *s = (struct kn_step_sample){.us = (uint32_t)ns};
    for (uint32_t i = 0; i < plan->n_rows; i++) {
        const struct kn_plan_row *row = &plan->rows[i];
        uint64_t n = row->n_tokens;

        if (n > 1) {
            s->prompt_tokens += row->n_tokens;
            s->prompt_work += n * row->pos + n * (n + 1) / 2;
        } else {
            s->rows++;
            s->row_work += row->pos + 1;
        }
    }
}

static struct kn_note *make_note(struct kn_engine *e)
{
    size_t n = e->notes.n_events;
    struct kn_note *note = malloc(sizeof(*note) + n * sizeof(*note->events));

    if (note) {
        *note = (struct kn_note){.sample = e->notes.sample, .n_events = n};
        bt_list_init(&note->msg.link);
        if (n > 0) {
            memcpy(note->events, e->notes.events, n * sizeof(*note->events));
        }
    }
    return note;
}

void kn_note_flush(struct kn_engine *e)
{
    struct kn_note *note;

    if (!e->cfg.note) {
        return;
    }
    if (e->notes.lost) {
        e->notes.lost = false;
        e->notes.n_events = 0;
        kv_index_tell(e->index);
    }
    if (e->notes.n_events == 0 && e->notes.sample.us == 0) {
        return;
    }
    note = e->notes.lost ? NULL : make_note(e);
    e->notes.lost = e->notes.lost || (!note && e->notes.n_events > 0);
    e->notes.n_events = 0;
    e->notes.sample.us = 0;
    if (note) {
        e->cfg.note(e->cfg.note_arg, note);
    }
}
