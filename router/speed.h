/* How fast a node is, measured: the time of an engine step as a linear function of what is in it,
 * fitted as steps are reported (least squares on the relative error, no part negative, old steps
 * slowly forgotten), and beside it the ratio of measured to expected time of the last moments. The
 * fit says what a node can do, the ratio that it is throttled now or has a noisy neighbour: it
 * follows within a few steps and fades when nothing is heard, so that a node that has recovered
 * gets work again.
 *
 * Pure logic; the clock is the caller's. A plain value, owned by its node. */
#ifndef RT_SPEED_H
#define RT_SPEED_H

#include "common/base/base.h"

#define RT_SPEED_N 5 /* a step, prompt tokens, prompt work, rows, row work */

/* As in StepSample (proto/node.proto). */
struct rt_step {
    double prompt_tokens, prompt_work, rows, row_work;
    double seconds;
};

struct rt_speed {
    double w[RT_SPEED_N]; /* seconds per unit of each feature, scaled as in speed.c */
    double a[RT_SPEED_N][RT_SPEED_N], b[RT_SPEED_N]; /* sums over steps, in parts of the guess */
    double ratio;                                    /* measured over expected, of the last steps */
    uint64_t ratio_ns;                               /* when it was measured */
    double noise;         /* mean distance of a step\'s own ratio (log) from the running one */
    double error;         /* mean relative error of the fit, times the ratio, before each step */
    double busy_s;        /* time it computed, older time counting less */
    uint64_t busy_ns;     /* when it was brought up to date */
    uint64_t n, n_prompt; /* steps learned from; of them with prompt tokens */
};

/* Begins with an ordinary accelerator, trusted little: the first steps decide. */
void rt_speed_init(struct rt_speed *s);
/* What it begins with. */
const struct rt_speed *rt_speed_ordinary(void);
void rt_speed_learn(struct rt_speed *s, const struct rt_step *step, uint64_t now_ns);
/* Measured over expected as far as it is still believed; 1 = as usual. */
double rt_speed_ratio(const struct rt_speed *s, uint64_t now_ns);

/* It has computed for so many seconds since it last said so; and the share of the last minutes that
 * it did. */
void rt_speed_add_busy(struct rt_speed *s, double seconds, uint64_t now_ns);
double rt_speed_busy(const struct rt_speed *s, uint64_t now_ns);

/* Seconds to compute `n` tokens of a prompt behind `before` others, in steps of `chunk`. */
double
rt_speed_prefill(const struct rt_speed *s, double n, double before, double chunk, uint64_t now_ns);
/* Seconds of a step with so many rows that attend to so many tokens together. */
double rt_speed_decode(const struct rt_speed *s, double rows, double row_work, uint64_t now_ns);

#endif
