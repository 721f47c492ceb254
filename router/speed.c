/* See speed.h. Features are scaled to about 1 for a busy node, which keeps the matrix tame. */
#include "router/speed.h"

#include <math.h>

#define FORGET      0.998 /* weight of a step after the next one: 500 steps count */
#define TRUST       1e4 /* variance of the first guess, relative to it and to the noise of a step */
#define NOISE_SHARE 0.5 /* of the usual scatter of steps: a ratio within it says nothing */
#define RATIO_UP    0.25  /* weight of a new step in the ratio */
#define BUSY_NS     120e9 /* computing that long ago counts 1/e */
#define FADE_NS     4e9   /* silence after which a ratio is believed by 1/e */

static const double scale[RT_SPEED_N] = {1, 1e-3, 1e-6, 1.0 / 16, 1e-5};
/* A step 5 ms, a thousand tokens 100 ms, a million pairs 5 ms, 16 rows 1 ms, 100,000 tokens 5 ms.
 */
static const double guess[RT_SPEED_N] = {5e-3, 0.1, 5e-3, 1e-3, 5e-3};

const struct rt_speed *rt_speed_ordinary(void)
{
    static const struct rt_speed s = {.w = {5e-3, 0.1, 5e-3, 1e-3, 5e-3}, .ratio = 1};

    return &s;
}

void rt_speed_init(struct rt_speed *s)
{
    *s = (struct rt_speed){.ratio = 1, .error = 1};
    for (int i = 0; i < RT_SPEED_N; i++) {
        s->w[i] = guess[i];
        s->p[i][i] = TRUST * guess[i] * guess[i];
    }
}

static void features(const struct rt_step *step, double x[RT_SPEED_N])
{
    const double raw[RT_SPEED_N] = {1, step->prompt_tokens, step->prompt_work, step->rows,
                                    step->row_work};

    for (int i = 0; i < RT_SPEED_N; i++) {
        x[i] = raw[i] * scale[i];
    }
}

/* No part of a step has a negative cost. */
static double expect(const struct rt_speed *s, const double x[RT_SPEED_N])
{
    double y = 0;

    for (int i = 0; i < RT_SPEED_N; i++) {
        y += fmax(s->w[i], 0) * x[i];
    }
    return fmax(y, 1e-7);
}

/* What steps do not tell apart for a long time must not become a matter of their noise. Rows and
 * columns are scaled together, so that the matrix stays one of variances. */
static void bound(struct rt_speed *s)
{
    for (int i = 0; i < RT_SPEED_N; i++) {
        double limit = TRUST * guess[i] * guess[i], f;

        if (!(s->p[i][i] <= limit)) {
            f = s->p[i][i] > 0 ? sqrt(limit / s->p[i][i]) : 0;
            for (int j = 0; j < RT_SPEED_N; j++) {
                s->p[i][j] *= f;
                s->p[j][i] *= f;
            }
        }
    }
}

/* One step of recursive least squares for x.w = 1, where x is already divided by the time. */
static void fit(struct rt_speed *s, const double x[RT_SPEED_N])
{
    double px[RT_SPEED_N], gain[RT_SPEED_N], denom = FORGET, miss = 1;

    for (int i = 0; i < RT_SPEED_N; i++) {
        px[i] = 0;
        for (int j = 0; j < RT_SPEED_N; j++) {
            px[i] += s->p[i][j] * x[j];
        }
        denom += x[i] * px[i];
        miss -= x[i] * s->w[i];
    }
    for (int i = 0; i < RT_SPEED_N; i++) {
        gain[i] = px[i] / denom;
        s->w[i] += gain[i] * miss;
    }
    for (int i = 0; i < RT_SPEED_N; i++) {
        for (int j = 0; j < RT_SPEED_N; j++) {
            s->p[i][j] = (s->p[i][j] - gain[i] * px[j]) / FORGET;
        }
    }
    bound(s);
}

void rt_speed_learn(struct rt_speed *s, const struct rt_step *step, uint64_t now_ns)
{
    double x[RT_SPEED_N], y = step->seconds, ratio, off, was;

    if (!(y > 0) || !isfinite(y) || !(step->prompt_tokens + step->rows > 0)) {
        return;
    }
    features(step, x);
    was = expect(s, x);
    off = log(s->ratio) * exp(-(double)(now_ns - s->ratio_ns) / FADE_NS);
    s->error += (fmin(fabs(was * rt_speed_ratio(s, now_ns) - y) / y, 10) - s->error) /
                (s->n < 20 ? s->n + 1.0 : 20);
    for (int i = 0; i < RT_SPEED_N; i++) {
        x[i] /= y;
    }
    fit(s, x);
    s->n++;
    s->n_prompt += step->prompt_tokens > 0;
    /* Against the fit as it was: a sudden change must show here before the fit follows. */
    ratio = fmin(fmax(y / was, 0.05), 50);
    s->noise += (fabs(log(ratio) - off) - s->noise) / (s->n < 50 ? (double)s->n : 50);
    s->ratio = s->n < 8 ? 1 : exp(off + RATIO_UP * (log(ratio) - off));
    s->ratio_ns = now_ns;
}

double rt_speed_ratio(const struct rt_speed *s, uint64_t now_ns)
{
    double age = now_ns > s->ratio_ns ? (double)(now_ns - s->ratio_ns) : 0;
    double off = log(s->ratio) * exp(-age / FADE_NS), noise = NOISE_SHARE * s->noise;

    return exp(off > 0 ? fmax(off - noise, 0) : fmin(off + noise, 0));
}

double rt_speed_busy(const struct rt_speed *s, uint64_t now_ns)
{
    double age = now_ns > s->busy_ns ? (double)(now_ns - s->busy_ns) : 0;

    return s->busy_s * exp(-age / BUSY_NS) / (BUSY_NS / 1e9);
}

void rt_speed_add_busy(struct rt_speed *s, double seconds, uint64_t now_ns)
{
    if (seconds > 0 && isfinite(seconds)) {
        s->busy_s = rt_speed_busy(s, now_ns) * (BUSY_NS / 1e9) + fmin(seconds, BUSY_NS / 1e9);
        s->busy_ns = now_ns;
    }
}

double
rt_speed_prefill(const struct rt_speed *s, double n, double before, double chunk, uint64_t now_ns)
{
    double steps = ceil(n / fmax(chunk, 1));
    double x[RT_SPEED_N] = {steps, n * scale[1], n * (before + n / 2) * scale[2], 0, 0};

    return n > 0 ? expect(s, x) * rt_speed_ratio(s, now_ns) : 0;
}

double rt_speed_decode(const struct rt_speed *s, double rows, double row_work, uint64_t now_ns)
{
    double x[RT_SPEED_N] = {1, 0, 0, rows * scale[3], row_work * scale[4]};

    return expect(s, x) * rt_speed_ratio(s, now_ns);
}
