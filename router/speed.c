/* See speed.h. Features are scaled to about 1 for a busy node, which keeps the matrix tame. */
#include "router/speed.h"

#include <math.h>

#define FORGET      0.998 /* weight of a step after the next one: 500 steps count */
#define TRUST       1e4 /* variance of the first guess, relative to it and to the noise of a step */
#define STIFF       1e-9  /* of a part's own sum, so that rounding has no say */
#define Z_MAX       1e5   /* of a part: a step that took no time says no more */
#define NOISE_SHARE 0.5   /* of the usual scatter of steps: a ratio within it says nothing */
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
        y += s->w[i] * x[i];
    }
    return fmax(y, 1e-7);
}

/* Solves (A + diag) v = b over the parts in `use` by Cholesky, into v; others become 0. */
static void
solve(const struct rt_speed *s, const double diag[], const double b[], unsigned use, double v[])
{
    double l[RT_SPEED_N][RT_SPEED_N] = {{0}}, y[RT_SPEED_N] = {0};

    for (int i = 0; i < RT_SPEED_N; i++) {
        v[i] = 0;
        if (!(use >> i & 1)) {
            continue;
        }
        y[i] = b[i];
        for (int j = 0; j <= i; j++) {
            double sum = s->a[i][j] + (i == j ? diag[i] : 0);

            for (int k = 0; k < j; k++) {
                sum -= l[i][k] * l[j][k];
            }
            if (use >> j & 1) {
                /* diag keeps what is under the root above zero, but for rounding */
                l[i][j] = i == j ? sqrt(fmax(sum, diag[i] / 2)) : sum / l[j][j];
                y[i] -= i == j ? 0 : l[i][j] * y[j];
            }
        }
        y[i] /= l[i][i];
    }
    for (int i = RT_SPEED_N - 1; i >= 0; i--) {
        if (use >> i & 1) {
            v[i] = y[i];
            for (int k = i + 1; k < RT_SPEED_N; k++) {
                v[i] -= l[k][i] * v[k];
            }
            v[i] /= l[i][i];
        }
    }
}

/* The parts, none negative, that fit the steps best: whatever comes out negative is left out, the
 * most negative first, so that what made up for it is not taken for real. */
static void fit_parts(const struct rt_speed *s, double v[RT_SPEED_N])
{
    double diag[RT_SPEED_N], b[RT_SPEED_N], got[RT_SPEED_N];
    unsigned use = (1u << RT_SPEED_N) - 1;

    for (int i = 0; i < RT_SPEED_N; i++) {
        diag[i] = 1 / TRUST + STIFF * s->a[i][i];
        b[i] = s->b[i] + diag[i] * v[i]; /* what steps do not tell stays as it was */
    }
    while (use) {
        int least = 0;

        solve(s, diag, b, use, got);
        for (int i = 1; i < RT_SPEED_N; i++) {
            least = got[i] < got[least] ? i : least;
        }
        if (!(got[least] < 0)) {
            break;
        }
        use &= ~(1u << least);
    }
    for (int i = 0; use && i < RT_SPEED_N; i++) {
        v[i] = isfinite(got[i]) ? got[i] : v[i];
    }
}

/* Another step, where x is already divided by its time: x.w = 1. In parts of the guess, sums over
 * the steps are kept and not their inverse: they stay what they are in any number of steps. */
static void fit(struct rt_speed *s, const double x[RT_SPEED_N])
{
    double z[RT_SPEED_N], v[RT_SPEED_N];

    for (int i = 0; i < RT_SPEED_N; i++) {
        z[i] = fmin(x[i] * guess[i], Z_MAX);
        v[i] = s->w[i] / guess[i];
    }
    for (int i = 0; i < RT_SPEED_N; i++) {
        s->b[i] = FORGET * s->b[i] + z[i];
        for (int j = 0; j < RT_SPEED_N; j++) {
            s->a[i][j] = FORGET * s->a[i][j] + z[i] * z[j];
        }
    }
    fit_parts(s, v);
    for (int i = 0; i < RT_SPEED_N; i++) {
        s->w[i] = v[i] * guess[i];
    }
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
