/* Sampling in linear time, without sorting.
 *
 * Logits become keys: unsigned integers in the same order, unequal floats unequal, so that "the
 * best k" and "the best of total mass p" are both found by counting: three rounds over digits of
 * 11, 11 and 10 bits narrow the boundary to one exact key; among equal keys lower ids come first.
 * What is kept is then walked in ascending id, with sums in double, so that a draw depends on
 * nothing but the arguments. Exponentials are kn_exp_neg: equal bits on every machine.
 *
 * Thread: whoever owns the struct kn_sampler. */
#include "kernels/model/sampler.h"

#include "common/base/buf.h"
#include "kernels/core/mathf.h"
#include "kernels/model/philox.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>

#define LOGPROB_FLOOR (-9999.0f)
#define BAN           (-100.0f) /* a bias of this or less bans */
#define BUCKETS       2048

struct kn_sampler {
    int n_vocab;
    float *work;      /* [V] logits as changed; NaN-free, below infinity */
    float *weight;    /* [V] e^((work - max) / temperature) of candidates */
    int32_t *cand;    /* [V] ids still in the running, ascending */
    uint32_t *count;  /* [V] occurrences in the answer; zero between calls */
    uint8_t *in_text; /* [V] in prompt or answer; zero between calls */
    double mass[BUCKETS];
    uint32_t hits[BUCKETS];
};

int kn_sampler_create(int n_vocab, struct kn_sampler **ret, struct bt_err *err)
{
    struct kn_sampler *s = bt_calloc(1, sizeof(*s));
    size_t n = (size_t)n_vocab;

    if (s) {
        s->n_vocab = n_vocab;
        s->work = bt_calloc(n, sizeof(*s->work));
        s->weight = bt_calloc(n, sizeof(*s->weight));
        s->cand = bt_calloc(n, sizeof(*s->cand));
        s->count = bt_calloc(n, sizeof(*s->count));
        s->in_text = bt_calloc(n, sizeof(*s->in_text));
    }
    if (!s || !s->work || !s->weight || !s->cand || !s->count || !s->in_text) {
        kn_sampler_destroy(s);
        return BT_FAIL(err, BT_E_NOMEM, "sampler: out of memory for %d ids", n_vocab);
    }
    *ret = s;
    return BT_OK;
}

void kn_sampler_destroy(struct kn_sampler *s)
{
    if (!s) {
        return;
    }
    free(s->work);
    free(s->weight);
    free(s->cand);
    free(s->count);
    free(s->in_text);
    free(s);
}

/* Same order as the floats; -0 and +0 are equal. No NaN here. */
static uint32_t key_of(float x)
{
    uint32_t u = kn_bits_of_f32(x + 0.0f); /* -0 becomes +0 */

    return u & 0x80000000u ? ~u : u | 0x80000000u;
}

static bool valid(const struct kn_sampler *s, int32_t id)
{
    return id >= 0 && id < s->n_vocab;
}

/* NaN counts as -infinity, +infinity as the largest number. */
static float finite_logit(float x)
{
    x = x > FLT_MAX ? FLT_MAX : x;
    return x >= -FLT_MAX ? x : -INFINITY;
}

/* Logits copied and made harmless, biases added. */
static void copy_biased(struct kn_sampler *s, const struct kn_sample_args *a)
{
    for (int i = 0; i < s->n_vocab; i++) {
        s->work[i] = finite_logit(a->logits[i]);
    }
    for (size_t i = 0; i < a->params->n_bias; i++) {
        const struct wire_bias *b = &a->params->bias[i];

        if (valid(s, b->id)) {
            s->work[b->id] = b->value <= BAN ? -INFINITY : s->work[b->id] + b->value;
        }
    }
}

/* Adds ids to the text once each; applies the repetition penalty at first sight. */
static void repeat(struct kn_sampler *s, const int32_t *ids, size_t n, float penalty)
{
    for (size_t i = 0; i < n; i++) {
        if (valid(s, ids[i]) && !s->in_text[ids[i]]) {
            float x = s->work[ids[i]];

            s->in_text[ids[i]] = 1;
            s->work[ids[i]] = finite_logit(x > 0 ? x / penalty : x * penalty);
        }
    }
}

static void forget(struct kn_sampler *s, const int32_t *ids, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        if (valid(s, ids[i])) {
            s->in_text[ids[i]] = 0;
            s->count[ids[i]] = 0;
        }
    }
}

static void penalize(struct kn_sampler *s, const struct kn_sample_args *a)
{
    const struct wire_sampling *p = a->params;

    if (p->repetition_penalty != 1) {
        repeat(s, a->prompt, a->n_prompt, p->repetition_penalty);
        repeat(s, a->answer, a->n_answer, p->repetition_penalty);
        forget(s, a->prompt, a->n_prompt);
        forget(s, a->answer, a->n_answer);
    }
    if (p->presence_penalty == 0 && p->frequency_penalty == 0) {
        return;
    }
    for (size_t i = 0; i < a->n_answer; i++) {
        if (valid(s, a->answer[i])) {
            s->count[a->answer[i]]++;
        }
    }
    for (size_t i = 0; i < a->n_answer; i++) {
        int32_t id = a->answer[i];

        if (valid(s, id) && s->count[id]) { /* once for each id */
            s->work[id] -= p->presence_penalty + p->frequency_penalty * (float)s->count[id];
            s->count[id] = 0;
        }
    }
}

static void ban(struct kn_sampler *s, const int32_t *ids, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        if (valid(s, ids[i])) {
            s->work[ids[i]] = -INFINITY;
        }
    }
}

/* Lowest id with the greatest logit; -1 if all are banned. */
static int32_t argmax(const struct kn_sampler *s)
{
    int32_t best = -1;
    float max = -INFINITY;

    for (int32_t i = 0; i < s->n_vocab; i++) {
        if (s->work[i] > max) {
            max = s->work[i];
            best = i;
        }
    }
    return best;
}

/* Where the candidates are cut: keys above `key` stay, of those equal to it the first `n_equal`. */
struct cut {
    uint32_t key;
    uint32_t n_equal;
};

/* One round of narrowing: counts and masses of the candidates whose key shares `prefix` above bit
 * `shift + bits`, by their next `bits` bits. */
static void tally(struct kn_sampler *s, int n, uint32_t prefix, int shift, int bits)
{
    uint32_t mask = (1u << bits) - 1;
    int above = shift + bits;

    memset(s->mass, 0, sizeof(s->mass));
    memset(s->hits, 0, sizeof(s->hits));
    for (int i = 0; i < n; i++) {
        uint32_t key = key_of(s->work[s->cand[i]]);

        if (above == 32 || key >> above == prefix) {
            s->hits[key >> shift & mask]++;
            s->mass[key >> shift & mask] += (double)s->weight[s->cand[i]];
        }
    }
}

/* The cut after which at least `want_n` candidates or at least `want_mass` are kept, whichever is
 * reached first; at least one is. n >= 1. */
static struct cut find_cut(struct kn_sampler *s, int n, double want_n, double want_mass)
{
    static const int bits[] = {11, 11, 10};
    uint32_t prefix = 0;
    double have_n = 0, have_mass = 0;
    int shift = 32;

    for (size_t round = 0; round < BT_ARRAY_LEN(bits); round++) {
        uint32_t b = (1u << bits[round]) - 1, last = 0;

        shift -= bits[round];
        tally(s, n, prefix, shift, bits[round]);
        for (;; b--) { /* the bucket in which the goal is reached, or the lowest that has any */
            if (s->hits[b]) {
                last = b;
                if (have_n + s->hits[b] >= want_n || have_mass + s->mass[b] >= want_mass) {
                    break;
                }
                have_n += s->hits[b];
                have_mass += s->mass[b];
            }
            if (b == 0) { /* rounding: all of it is wanted; go on in the lowest */
                have_n -= s->hits[last];
                have_mass -= s->mass[last];
                break;
            }
        }
        prefix = prefix << bits[round] | last;
        if (round + 1 == BT_ARRAY_LEN(bits)) {
            uint32_t k = 0;
            double each = s->mass[last] / s->hits[last];

            do { /* equal keys have equal weights */
                k++;
            } while (k < s->hits[last] && have_n + k < want_n && have_mass + k * each < want_mass);
            return (struct cut){prefix, k};
        }
    }
    return (struct cut){0, 0}; /* not reached */
}

static int apply_cut(struct kn_sampler *s, int n, struct cut c)
{
    int kept = 0;

    for (int i = 0; i < n; i++) {
        uint32_t key = key_of(s->work[s->cand[i]]);

        if (key > c.key || (key == c.key && c.n_equal > 0)) {
            c.n_equal -= key == c.key;
            s->cand[kept++] = s->cand[i];
        }
    }
    return kept;
}

/* Weights of the candidates; of the whole vocabulary, which goes in vectors, if they are many. */
static void weigh(struct kn_sampler *s, int n, float max, float temperature)
{
    if (n > s->n_vocab / 8) {
        for (int i = 0; i < s->n_vocab; i++) {
            s->weight[i] = kn_exp_neg((s->work[i] - max) / temperature);
        }
        return;
    }
    for (int i = 0; i < n; i++) {
        int32_t id = s->cand[i];

        s->weight[id] = kn_exp_neg((s->work[id] - max) / temperature);
    }
}

static double total(const struct kn_sampler *s, int n)
{
    double sum = 0;

    for (int i = 0; i < n; i++) {
        sum += (double)s->weight[s->cand[i]];
    }
    return sum;
}

/* Candidates after top-k, top-p and min-p, with weights. */
static int choose_candidates(struct kn_sampler *s, const struct wire_sampling *p, float max)
{
    int n = 0, kept = 0;

    for (int32_t i = 0; i < s->n_vocab; i++) {
        s->cand[n] = i;
        n += s->work[i] > -INFINITY;
    }
    if (p->top_k > 0 && p->top_k < n) {
        n = apply_cut(s, n, find_cut(s, n, p->top_k, INFINITY)); /* masses play no part */
    }
    weigh(s, n, max, p->temperature);
    if (p->top_p < 1) {
        double want = (double)(p->top_p > 0 ? p->top_p : 0) * total(s, n);

        n = apply_cut(s, n, find_cut(s, n, INFINITY, want));
    }
    for (int i = 0; i < n; i++) { /* the best has weight 1 */
        if (s->weight[s->cand[i]] >= BT_MIN(p->min_p, 1.0f) || !(p->min_p > 0)) {
            s->cand[kept++] = s->cand[i];
        }
    }
    return kept;
}

static int32_t draw(struct kn_sampler *s, const struct kn_sample_args *a, float max)
{
    int n = choose_candidates(s, a->params, max);
    double at = kn_philox_uniform(a->params->seed, a->params->choice, a->n_answer) * total(s, n);
    double sum = 0;
    int32_t last = s->cand[0];

    for (int i = 0; i < n; i++) {
        int32_t id = s->cand[i];

        if (s->weight[id] > 0) {
            last = id;
            sum += (double)s->weight[id];
            if (sum > at) {
                break;
            }
        }
    }
    return last;
}

/* log of the sum of e^x over the raw logits; *ret_max = their maximum. */
static double log_sum(const struct kn_sampler *s, const float *logits, float *ret_max)
{
    float max = -INFINITY;
    double sum = 0;

    for (int i = 0; i < s->n_vocab; i++) {
        float x = finite_logit(logits[i]);

        max = x > max ? x : max;
    }
    *ret_max = max;
    if (max == -INFINITY) {
        return 0;
    }
    for (int i = 0; i < s->n_vocab; i++) {
        float x = finite_logit(logits[i]);

        sum += (double)kn_exp_neg(x - max);
    }
    return log(sum);
}

static float logprob_of(float logit, float max, double lse)
{
    double lp = (double)finite_logit(logit) - (double)max - lse;

    return lp > (double)LOGPROB_FLOOR ? (float)lp : LOGPROB_FLOOR; /* NaN (inf - inf) too */
}

/* The best n raw logits into ret, best first, ties by lower id. */
static void best_of(const struct kn_sampler *s, const float *logits, int n, struct kn_token *ret)
{
    for (int32_t i = 0; i < s->n_vocab && n > 0; i++) {
        float x = finite_logit(logits[i]);
        int at = ret->n_top;

        if (at == n && !(x > ret->top[n - 1].logprob)) {
            continue;
        }
        at = BT_MIN(at, n - 1);
        for (; at > 0 && x > ret->top[at - 1].logprob; at--) {
            ret->top[at] = ret->top[at - 1];
        }
        ret->top[at] = (struct kn_top){i, x};
        ret->n_top = BT_MIN(ret->n_top + 1, n);
    }
}

static void logprobs(struct kn_sampler *s, const struct kn_sample_args *a, struct kn_token *ret)
{
    int n = BT_MIN(a->params->n_logprobs, WIRE_MAX_LOGPROBS);
    float max;
    double lse;

    if (n < 0) {
        return;
    }
    lse = log_sum(s, a->logits, &max);
    ret->logprob = logprob_of(a->logits[ret->id], max, lse);
    best_of(s, a->logits, n, ret);
    for (int i = 0; i < ret->n_top; i++) {
        ret->top[i].logprob = logprob_of(ret->top[i].logprob, max, lse);
    }
}

void kn_sample(struct kn_sampler *s, const struct kn_sample_args *a, struct kn_token *ret)
{
    const struct wire_sampling *p = a->params;
    int32_t best;

    *ret = (struct kn_token){0};
    copy_biased(s, a);
    penalize(s, a);
    if (a->n_answer < p->min_tokens) {
        ban(s, a->eos, a->n_eos);
        ban(s, p->stop_ids, p->n_stop_ids);
    }
    best = argmax(s);
    if (best < 0) {
        ret->id = a->n_eos > 0 && valid(s, a->eos[0]) ? a->eos[0] : 0;
    } else if (p->temperature > 0) {
        ret->id = draw(s, a, s->work[best]);
    } else { /* 0, -0; what is out of range was refused long before */
        ret->id = best;
    }
    logprobs(s, a, ret);
}
