/* See varint.h. Ids of a vocabulary have one to three bytes in no order that a processor could
 * guess, so sixteen bytes at a time are asked where varints end, and the rest goes without
 * branches; eight of two bytes, the usual ones, are done at once. */
#include "common/base/varint.h"

#include "common/base/rc.h"

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#define MAX_BYTES 10

size_t bt_varints_count(const uint8_t *p, size_t n)
{
    size_t count = 0, i = 0;

#ifdef __SSE2__
    const __m128i zero = _mm_setzero_si128();

    while (n - i >= 16) {
        size_t end = i + BT_MIN((n - i) / 16, (size_t)255) * 16; /* sums of bytes hold that */
        __m128i sum = zero;

        for (; i < end; i += 16) {
            sum = _mm_sub_epi8(
                sum, _mm_cmpgt_epi8(_mm_loadu_si128((const void *)(p + i)), _mm_set1_epi8(-1)));
        }
        sum = _mm_sad_epu8(sum, zero);
        count += (size_t)_mm_cvtsi128_si32(sum) + (size_t)_mm_extract_epi16(sum, 4);
    }
#endif
    for (; i < n; i++) {
        count += p[i] < 0x80;
    }
    return count;
}

/* Of any length up to MAX_BYTES. */
static int32_t value_of(const uint8_t *p, size_t len, bool *shortest)
{
    uint32_t v = 0;

    for (size_t i = 0; i < len && i < 5; i++) {
        v |= (uint32_t)(p[i] & 0x7f) << (7 * i);
    }
    if ((len > 1 && p[len - 1] == 0) || len > 5 || (len == 5 && p[4] > 7)) {
        *shortest = false;
    }
    return (int32_t)v;
}

#ifdef __SSE2__
/* Bytes of it, at most 4 with the last one at 8 * last bits, without their upper bits. */
static int32_t join(uint32_t w, unsigned last)
{
    static const uint32_t masks[] = {0x7f, 0x7f7f, 0x7f7f7f, 0x7f7f7f7f};

    w &= masks[last];
    w = (w & 0x007f007f) | (w & 0x7f007f00) >> 1;
    return (int32_t)((w & 0x3fff) | w >> 16 << 14);
}

/* Whole varints of the 16 bytes at p; bytes done, 0 = a varint has more than 10. */
static size_t read_block(const uint8_t *p, int32_t **v, bool *shortest)
{
    const __m128i b = _mm_loadu_si128((const void *)p), zero = _mm_setzero_si128();
    unsigned more = (unsigned)_mm_movemask_epi8(b), ends = ~more & 0xffff, at = 0;
    int32_t *to = *v;

    /* A last byte of zero that is not the only one says nothing. */
    *shortest = *shortest && !((unsigned)_mm_movemask_epi8(_mm_cmpeq_epi8(b, zero)) & more << 1);
    if (more == 0x5555) {
        __m128i w = _mm_or_si128(_mm_and_si128(b, _mm_set1_epi16(0x7f)),
                                 _mm_and_si128(_mm_srli_epi16(b, 1), _mm_set1_epi16(0x3f80)));

        _mm_storeu_si128((void *)to, _mm_unpacklo_epi16(w, zero));
        _mm_storeu_si128((void *)(to + 4), _mm_unpackhi_epi16(w, zero));
        *v = to + 8;
        return 16;
    }
    while (ends) {
        unsigned end = (unsigned)__builtin_ctz(ends), last = end - at;
        uint32_t w;

        if (last > 3) {
            if (last >= MAX_BYTES) {
                return 0;
            }
            *to++ = value_of(p + at, last + 1, shortest);
        } else {
            memcpy(&w, p + at, sizeof(w)); /* up to 3 bytes behind the block */
            *to++ = join(w, last);
        }
        ends &= ends - 1;
        at = end + 1;
    }
    *v = to;
    return at;
}
#endif

int bt_varints_read(const uint8_t *p, size_t n, int32_t *ret_v, bool *ret_shortest)
{
    size_t at = 0;

    *ret_shortest = true;
#ifdef __SSE2__
    while (n - at >= 16 + 3) {
        size_t done = read_block(p + at, &ret_v, ret_shortest);

        if (done == 0) {
            return BT_E_FORMAT;
        }
        at += done;
    }
#endif
    while (at < n) {
        size_t len = 1;

        while (p[at + len - 1] & 0x80) {
            if (++len > MAX_BYTES || len > n - at) {
                return BT_E_FORMAT;
            }
        }
        *ret_v++ = value_of(p + at, len, ret_shortest);
        at += len;
    }
    return BT_OK;
}

size_t bt_varints_size(const int32_t *v, size_t n)
{
    size_t size = n;

    for (size_t i = 0; i < n; i++) {
        uint32_t u = (uint32_t)v[i];

        size += (size_t)(u >= 1u << 7) + (u >= 1u << 14) + (u >= 1u << 21) + (u >= 1u << 28) +
                5 * (size_t)(v[i] < 0);
    }
    return size;
}

static uint8_t *write_one(int32_t v, uint8_t *p)
{
    uint64_t u = (uint64_t)(int64_t)v;

    for (; u >= 0x80; u >>= 7) {
        *p++ = (uint8_t)(u | 0x80);
    }
    *p++ = (uint8_t)u;
    return p;
}

#ifdef __SSE2__
/* Eight integers of two bytes each. False: they are not. */
static bool write_block(const int32_t *v, uint8_t *p)
{
    __m128i w =
        _mm_packs_epi32(_mm_loadu_si128((const void *)v), _mm_loadu_si128((const void *)(v + 4)));
    __m128i fits = _mm_and_si128(_mm_cmpgt_epi16(w, _mm_set1_epi16(0x7f)),
                                 _mm_cmplt_epi16(w, _mm_set1_epi16(0x4000)));

    if (_mm_movemask_epi8(fits) != 0xffff) {
        return false;
    }
    w = _mm_or_si128(_mm_or_si128(_mm_and_si128(w, _mm_set1_epi16(0x7f)), _mm_set1_epi16(0x80)),
                     _mm_slli_epi16(_mm_and_si128(w, _mm_set1_epi16(0x3f80)), 1));
    _mm_storeu_si128((void *)p, w);
    return true;
}
#endif

void bt_varints_write(const int32_t *v, size_t n, uint8_t *p)
{
    size_t i = 0;

    while (i < n) {
        size_t end = BT_MIN(i + 8, n);

#ifdef __SSE2__
        if (end == i + 8 && write_block(v + i, p)) {
            p += 16;
            i = end;
            continue;
        }
#endif
        for (; i < end; i++) {
            p = write_one(v[i], p);
        }
    }
}
