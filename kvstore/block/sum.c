/* XXH3-64 as its specification describes it for more than 240 bytes: eight accumulators; a unit of
 * 1,024 bytes is 16 stripes of 64, each added with its part of the secret; after a unit the
 * accumulators are mixed. What a unit adds does not depend on what was before it, so units of
 * several pages are worked out side by side and mixed in their order afterwards. The last stripe of
 * all has a key of its own; so the last whole unit waits until more bytes follow it or none do.
 *
 * The library supplies the secret, the sum of what is shorter, and sums without a copy. */
#define XXH_INLINE_ALL
#include "kvstore/block/sum.h"

#include <xxhash.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define STRIPE   64u
#define STRIPES  (KV_COPY_UNIT / STRIPE)
#define SECRET   192u
#define MIX_KEY  (SECRET - STRIPE)     /* of the mixing after a unit */
#define LAST_KEY (SECRET - STRIPE - 7) /* of the last stripe */
#define END_KEY  11u

static const uint64_t first_acc[8] = {
    0xC2B2AE3Du,           0x9E3779B185EBCA87ull, 0xC2B2AE3D27D4EB4Full, 0x165667B19E3779F9ull,
    0x85EBCA77C2B2AE63ull, 0x85EBCA77u,           0x27D4EB2F165667C5ull, 0x9E3779B1u,
};

/* ---- without a copy ---- */

#if defined(__x86_64__)
/* The library's functions that take the widest instructions there are. */
uint64_t XXH3_64bits_dispatch(const void *p, size_t n);
uint64_t XXH3_64bits_withSeed_dispatch(const void *p, size_t n, uint64_t seed);

uint64_t kv_sum(const void *p, size_t n)
{
    return XXH3_64bits_dispatch(p, n);
}

uint64_t kv_sum_seeded(const void *p, size_t n, uint64_t seed)
{
    return XXH3_64bits_withSeed_dispatch(p, n, seed);
}
#else
uint64_t kv_sum(const void *p, size_t n)
{
    return XXH3_64bits(p, n);
}

uint64_t kv_sum_seeded(const void *p, size_t n, uint64_t seed)
{
    return XXH3_64bits_withSeed(p, n, seed);
}
#endif

/* ---- stripes ---- */

static uint64_t load64(const void *p)
{
    uint64_t v;

    memcpy(&v, p, 8);
    return v;
}

static void add_stripe(uint64_t *acc, const void *p, const uint8_t *key)
{
    for (size_t i = 0; i < 8; i++) {
        uint64_t v = load64((const char *)p + 8 * i), k = v ^ load64(key + 8 * i);

        acc[i ^ 1] += v;
        acc[i] += (k & UINT32_MAX) * (k >> 32);
    }
}

static void mix(uint64_t *acc)
{
    for (size_t i = 0; i < 8; i++) {
        acc[i] = (acc[i] ^ acc[i] >> 47 ^ load64(XXH3_kSecret + MIX_KEY + 8 * i)) * 0x9E3779B1u;
    }
}

static uint64_t fold(uint64_t a, uint64_t b)
{
    unsigned __int128 v = (unsigned __int128)a * b;

    return (uint64_t)v ^ (uint64_t)(v >> 64);
}

/* Takes the sums of a whole unit. */
static void take_unit(struct kv_copy *c, const uint64_t *sums)
{
    if (c->has_pending) {
        for (size_t i = 0; i < 8; i++) {
            c->acc[i] += c->pending[i];
        }
        mix(c->acc);
    }
    memcpy(c->pending, sums, sizeof(c->pending));
    c->has_pending = true;
}

static void unit_sums(const uint8_t *p, uint64_t *sums)
{
    memset(sums, 0, 8 * sizeof(*sums));
    for (uint32_t s = 0; s < STRIPES; s++) {
        add_stripe(sums, p + (size_t)s * STRIPE, XXH3_kSecret + 8 * (size_t)s);
    }
}

/* ---- lanes ---- */

/* Four units to copy, and the four that come next: read ahead, since the hardware does not do that
 * beyond a page. */
struct four {
    struct kv_copy_lane now[4];
    const char *next[4];
};

/* sums[lane] = what it adds. `last` = the end of the last one. */
typedef void unit4_fn(const struct four *f, uint64_t sums[4][8], uint8_t *last);

static void unit4_plain(const struct four *f, uint64_t sums[4][8], uint8_t *last)
{
    uint8_t unit[KV_COPY_UNIT];

    for (int i = 0; i < 4; i++) {
        memcpy(unit, f->now[i].from, sizeof(unit));
        unit_sums(unit, sums[i]);
        if (f->now[i].to) {
            memcpy(f->now[i].to, unit, sizeof(unit));
        }
    }
    memcpy(last, unit + sizeof(unit) - STRIPE, STRIPE);
}

/* Past the caches; through them; only summed. */
enum store { STORE_PAST, STORE_KEPT, STORE_NONE };

#if defined(__x86_64__)
#define UNIT4(name, fn, isa, how)                                                                  \
    __attribute__((target(isa))) static void name(const struct four *f, uint64_t sums[4][8],       \
                                                  uint8_t *last)                                   \
    {                                                                                              \
        fn(f, sums, last, how);                                                                    \
    }

__attribute__((target("avx512f"), always_inline)) static inline void
unit4_avx512_as(const struct four *f, uint64_t sums[4][8], uint8_t *last, enum store how)
{
    __m512i a[4], x = _mm512_setzero_si512();

    for (int i = 0; i < 4; i++) {
        a[i] = _mm512_setzero_si512();
    }
    for (size_t s = 0; s < STRIPES; s++) {
        __m512i key = _mm512_loadu_si512(XXH3_kSecret + 8 * s);

        for (int i = 0; i < 4; i++) {
            __m512i k;

            x = _mm512_loadu_si512(f->now[i].from + STRIPE * s);
            _mm_prefetch(f->next[i] + STRIPE * s, _MM_HINT_T1);
            if (how == STORE_PAST) {
                _mm512_stream_si512((void *)(f->now[i].to + STRIPE * s), x);
            } else if (how == STORE_KEPT) {
                _mm512_store_si512((void *)(f->now[i].to + STRIPE * s), x);
            }
            k = _mm512_xor_si512(x, key);
            k = _mm512_mul_epu32(k, _mm512_srli_epi64(k, 32));
            a[i] = _mm512_add_epi64(a[i], k);
            a[i] = _mm512_add_epi64(a[i], _mm512_shuffle_epi32(x, _MM_PERM_BADC));
        }
    }
    for (int i = 0; i < 4; i++) {
        _mm512_storeu_si512(sums[i], a[i]);
    }
    _mm512_storeu_si512(last, x);
}

UNIT4(unit4_avx512_past, unit4_avx512_as, "avx512f", STORE_PAST)
UNIT4(unit4_avx512_kept, unit4_avx512_as, "avx512f", STORE_KEPT)
UNIT4(unit4_avx512_none, unit4_avx512_as, "avx512f", STORE_NONE)

__attribute__((target("avx2"), always_inline)) static inline void
unit4_avx2_as(const struct four *f, uint64_t sums[4][8], uint8_t *last, enum store how)
{
    __m256i a[4][2], x[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};

    for (int i = 0; i < 4; i++) {
        a[i][0] = a[i][1] = _mm256_setzero_si256();
    }
    for (size_t s = 0; s < STRIPES; s++) {
        const __m256i *key = (const __m256i *)(XXH3_kSecret + 8 * s);

        for (int i = 0; i < 4; i++) {
            _mm_prefetch(f->next[i] + STRIPE * s, _MM_HINT_T1);
            for (int h = 0; h < 2; h++) {
                size_t o = STRIPE * s + 32 * (size_t)h;
                __m256i k;

                x[h] = _mm256_loadu_si256((const __m256i *)(f->now[i].from + o));
                if (how == STORE_PAST) {
                    _mm256_stream_si256((__m256i *)(f->now[i].to + o), x[h]);
                } else if (how == STORE_KEPT) {
                    _mm256_store_si256((__m256i *)(f->now[i].to + o), x[h]);
                }
                k = _mm256_xor_si256(x[h], _mm256_loadu_si256(key + h));
                k = _mm256_mul_epu32(k, _mm256_srli_epi64(k, 32));
                a[i][h] = _mm256_add_epi64(a[i][h], k);
                a[i][h] = _mm256_add_epi64(a[i][h], _mm256_shuffle_epi32(x[h], 0x4e));
            }
        }
    }
    for (int i = 0; i < 4; i++) {
        _mm256_storeu_si256((__m256i *)sums[i], a[i][0]);
        _mm256_storeu_si256((__m256i *)(sums[i] + 4), a[i][1]);
    }
    _mm256_storeu_si256((__m256i *)last, x[0]);
    _mm256_storeu_si256((__m256i *)(last + 32), x[1]);
}

UNIT4(unit4_avx2_past, unit4_avx2_as, "avx2", STORE_PAST)
UNIT4(unit4_avx2_kept, unit4_avx2_as, "avx2", STORE_KEPT)
UNIT4(unit4_avx2_none, unit4_avx2_as, "avx2", STORE_NONE)
#endif

/* What widths there are for the two loops. */
struct isa {
    unit4_fn *unit4[3]; /* by enum store */
    void (*take)(struct kv_copy *c, uint64_t (*sums)[8], uint32_t n);
};

static void take_plain(struct kv_copy *c, uint64_t (*sums)[8], uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        take_unit(c, sums[i]);
    }
}

#if defined(__x86_64__)
__attribute__((target("avx512f"))) static void
take_avx512(struct kv_copy *c, uint64_t (*sums)[8], uint32_t n)
{
    __m512i acc = _mm512_loadu_si512(c->acc), key = _mm512_loadu_si512(XXH3_kSecret + MIX_KEY);
    __m512i pending = _mm512_loadu_si512(c->pending), prime = _mm512_set1_epi64(0x9E3779B1);
    uint32_t i = 0;

    if (!c->has_pending) {
        pending = _mm512_loadu_si512(sums[i++]);
        c->has_pending = true;
    }
    for (; i < n; i++) {
        __m512i v = _mm512_add_epi64(acc, pending), high;

        v = _mm512_xor_si512(_mm512_xor_si512(v, _mm512_srli_epi64(v, 47)), key);
        high = _mm512_mul_epu32(_mm512_srli_epi64(v, 32), prime);
        acc = _mm512_add_epi64(_mm512_mul_epu32(v, prime), _mm512_slli_epi64(high, 32));
        pending = _mm512_loadu_si512(sums[i]);
    }
    _mm512_storeu_si512(c->acc, acc);
    _mm512_storeu_si512(c->pending, pending);
}
#endif

int kv_copy_isa_max = 2;

static const struct isa *isa(void)
{
#if defined(__x86_64__)
    static const struct isa all[] = {
        {{unit4_plain, unit4_plain, unit4_plain}, take_plain},
        {{unit4_avx2_past, unit4_avx2_kept, unit4_avx2_none}, take_plain},
        {{unit4_avx512_past, unit4_avx512_kept, unit4_avx512_none}, take_avx512}};
    static int found = -1; /* every thread finds the same */
    int f = __atomic_load_n(&found, __ATOMIC_RELAXED);

    if (f < 0) {
        f = __builtin_cpu_supports("avx512f") ? 2 : __builtin_cpu_supports("avx2") ? 1 : 0;
        __atomic_store_n(&found, f, __ATOMIC_RELAXED);
    }
    return &all[BT_MIN(f, kv_copy_isa_max)];
#else
    static const struct isa plain = {{unit4_plain, unit4_plain, unit4_plain}, take_plain};

    return &plain;
#endif
}

static unit4_fn *unit4_of(const struct kv_copy *c)
{
    return isa()->unit4[!c->lanes[0].to ? STORE_NONE : c->keep ? STORE_KEPT : STORE_PAST];
}

static void add_bytes(struct kv_copy *c, char *to, const char *from, size_t n);

static struct kv_copy_lane lane_at(const struct kv_copy_lane *l, size_t at)
{
    return (struct kv_copy_lane){l->to ? l->to + at : NULL, l->from + at};
}

/* Fewer than four: their units side by side. */
static void run_few(struct kv_copy *c, uint32_t n)
{
    uint32_t per_lane = c->lane_bytes / KV_COPY_UNIT, n_units = n * per_lane, i = 0;
    uint64_t sums[4][8];
    struct four f;

    for (; i + 4 <= n_units; i += 4) {
        for (uint32_t k = 0; k < 4; k++) {
            const struct kv_copy_lane *l = &c->lanes[(i + k) / per_lane];
            size_t at = (i + k) % per_lane * KV_COPY_UNIT;

            f.now[k] = lane_at(l, at);
            f.next[k] = l->from + at;
        }
        unit4_of(c)(&f, sums, c->tail);
        isa()->take(c, sums, 4);
    }
    for (; i < n_units; i++) {
        const struct kv_copy_lane *l = &c->lanes[i / per_lane];
        size_t at = i % per_lane * KV_COPY_UNIT;

        add_bytes(c, lane_at(l, at).to, l->from + at, KV_COPY_UNIT);
    }
}

/* The first four lanes; the others move up. */
static void run_four(struct kv_copy *c)
{
    uint32_t units = c->lane_bytes / KV_COPY_UNIT;
    uint64_t sums[KV_COPY_LANE / KV_COPY_UNIT][4][8]; /* by unit, by lane */
    uint64_t in_order[4 * KV_COPY_LANE / KV_COPY_UNIT][8];
    unit4_fn *fn = unit4_of(c);

    for (uint32_t u = 0; u < units; u++) {
        struct four f;

        for (uint32_t i = 0; i < 4; i++) {
            const struct kv_copy_lane *l = &c->lanes[i];
            size_t at = (size_t)u * KV_COPY_UNIT;

            f.now[i] = lane_at(l, at);
            f.next[i] = u + 1 < units        ? l->from + at + KV_COPY_UNIT
                        : i + 4 < c->n_lanes ? c->lanes[i + 4].from
                                             : l->from + at;
        }
        fn(&f, sums[u], c->tail);
    }
    for (uint32_t i = 0; i < 4; i++) {
        for (uint32_t u = 0; u < units; u++) {
            memcpy(in_order[i * units + u], sums[u][i], sizeof(sums[u][i]));
        }
    }
    isa()->take(c, in_order, 4 * units);
    c->n_lanes -= 4;
    memmove(c->lanes, c->lanes + 4, c->n_lanes * sizeof(c->lanes[0]));
}

/* Does what waits. */
static void run_lanes(struct kv_copy *c)
{
    uint32_t n;

    while (c->n_lanes >= 4) {
        run_four(c);
    }
    n = c->n_lanes;
    c->n_lanes = 0;
    if (n > 0) {
        run_few(c, n);
    }
}

/* Of any length, by way of a unit of our own. */
static void add_bytes(struct kv_copy *c, char *to, const char *from, size_t n)
{
    uint64_t sums[8];

    while (n > 0) {
        size_t k = BT_MIN(KV_COPY_UNIT - c->n_carry, n);

        memcpy(c->carry + c->n_carry, from, k);
        if (to) {
            memcpy(to, c->carry + c->n_carry, k);
            to += k;
        }
        from += k;
        n -= k;
        c->n_carry += (uint32_t)k;
        if (c->n_carry == KV_COPY_UNIT) {
            c->n_carry = 0;
            unit_sums(c->carry, sums);
            memcpy(c->tail, c->carry + KV_COPY_UNIT - STRIPE, STRIPE);
            take_unit(c, sums);
        }
    }
}

/* ---- the copy ---- */

void kv_copy_begin(struct kv_copy *c)
{
    memcpy(c->acc, first_acc, sizeof(c->acc));
    c->bytes = 0;
    c->n_carry = c->n_lanes = 0;
    c->has_pending = c->keep = false;
}

void kv_copy_begin_kept(struct kv_copy *c)
{
    kv_copy_begin(c);
    c->keep = true;
}

static void add_lane(struct kv_copy *c, char *to, const char *from, size_t n)
{
    if (c->n_lanes > 0 && (c->lane_bytes != n || !c->lanes[0].to != !to)) {
        run_lanes(c);
    }
    c->lane_bytes = (uint32_t)n;
    c->lanes[c->n_lanes].to = to;
    c->lanes[c->n_lanes].from = from;
    if (++c->n_lanes == BT_ARRAY_LEN(c->lanes)) {
        run_four(c);
    }
}

void kv_copy_add(struct kv_copy *c, void *to, const void *from, size_t n)
{
    char *t = to;
    const char *f = from;

    c->bytes += n;
    while (n > 0) {
        size_t k = BT_MIN(n, (size_t)KV_COPY_LANE);

        /* Stores of whole lines. */
        if ((uintptr_t)t % STRIPE != 0 || k % KV_COPY_UNIT != 0 || c->n_carry > 0) {
            run_lanes(c);
            add_bytes(c, t, f, k);
        } else {
            add_lane(c, t, f, k);
        }
        t = t ? t + k : NULL;
        f += k;
        n -= k;
    }
}

void kv_copy_flush(struct kv_copy *c)
{
    run_lanes(c);
#if defined(__x86_64__)
    _mm_sfence();
#endif
}

/* The last 64 bytes of all. */
static void last_stripe(const struct kv_copy *c, uint8_t *to)
{
    size_t old = c->n_carry < STRIPE ? STRIPE - c->n_carry : 0;

    memcpy(to, c->tail + STRIPE - old, old);
    memcpy(to + old, c->carry + c->n_carry - (STRIPE - old), STRIPE - old);
}

uint64_t kv_copy_end(struct kv_copy *c)
{
    uint64_t none[8] = {0}, v = c->bytes * 0x9E3779B185EBCA87ull;
    uint8_t last[STRIPE];

    kv_copy_flush(c);
    if (!c->has_pending) {
        return kv_sum(c->carry, c->n_carry); /* all there is */
    }
    last_stripe(c, last);
    if (c->n_carry > 0) {
        take_unit(c, none); /* mixes the one before */
        for (uint32_t s = 0; s < (c->n_carry - 1) / STRIPE; s++) {
            add_stripe(c->acc, c->carry + (size_t)s * STRIPE, XXH3_kSecret + 8 * (size_t)s);
        }
    } else {
        uint64_t own[8] = {0}; /* the last stripe has another key than within a unit */

        add_stripe(own, last, XXH3_kSecret + 8 * (STRIPES - 1));
        for (size_t i = 0; i < 8; i++) {
            c->acc[i] += c->pending[i] - own[i];
        }
    }
    add_stripe(c->acc, last, XXH3_kSecret + LAST_KEY);
    for (size_t i = 0; i < 4; i++) {
        const uint8_t *key = XXH3_kSecret + END_KEY + 16 * i;

        v += fold(c->acc[2 * i] ^ load64(key), c->acc[2 * i + 1] ^ load64(key + 8));
    }
    v = (v ^ v >> 37) * 0x165667919E3779F9ull;
    return v ^ v >> 32;
}

uint64_t kv_sum_cold(const void *p, size_t n)
{
    return kv_copy_sum(NULL, p, n);
}

uint64_t kv_copy_sum(void *to, const void *from, size_t n)
{
    struct kv_copy c;

    kv_copy_begin(&c);
    kv_copy_add(&c, to, from, n);
    return kv_copy_end(&c);
}
