/* UTF-8, character classes and NFC.
 *
 * NFC is done by the book (decompose, sort marks, compose; Unicode Standard Annex 15). Sorting is
 * by counting when a run of marks is long, so that a text of nothing but accents stays linear. */
#include "common/text/unicode_int.h"

#include <stdlib.h>

struct uni_range {
    uint32_t first, last;
    uint8_t value;
};

struct uni_triple {
    uint32_t a, b, c;
};

#include "common/text/unicode_data.inc.h"

/* Hangul syllables are computed, not listed (Unicode Standard, section 3.12). */
#define HANGUL_S 0xac00u
#define HANGUL_L 0x1100u
#define HANGUL_V 0x1161u
#define HANGUL_T 0x11a7u
#define N_L      19u
#define N_V      21u
#define N_T      28u
#define N_S      (N_L * N_V * N_T)

void uni_table_init(struct uni_table *t)
{
    memset(t->cls, 0, sizeof(t->cls));
    for (size_t i = 0; i < BT_ARRAY_LEN(class_ranges); i++) {
        for (uint32_t c = class_ranges[i].first; c <= class_ranges[i].last && c < UNI_LIMIT; c++) {
            t->cls[c] |= class_ranges[i].value;
        }
    }
    for (size_t i = 0; i < BT_ARRAY_LEN(ccc_ranges); i++) {
        for (uint32_t c = ccc_ranges[i].first; c <= ccc_ranges[i].last; c++) {
            t->cls[c] |= UNI_QC;
        }
    }
    for (size_t i = 0; i < BT_ARRAY_LEN(decompositions); i++) {
        t->cls[decompositions[i].a] |= UNI_QC;
    }
    /* What composes to itself needs no work; what may join the character before it does. */
    for (size_t i = 0; i < BT_ARRAY_LEN(compositions); i++) {
        t->cls[compositions[i].c] &= (uint8_t)~UNI_QC;
    }
    for (size_t i = 0; i < BT_ARRAY_LEN(compositions); i++) {
        t->cls[compositions[i].b] |= UNI_QC;
    }
    for (uint32_t c = HANGUL_V; c < HANGUL_T + N_T; c++) {
        t->cls[c] |= UNI_QC;
    }
}

size_t utf8_put(uint32_t cp, uint8_t *ret)
{
    if (cp < 0x80) {
        ret[0] = (uint8_t)cp;
        return 1;
    }
    if (cp < 0x800) {
        ret[0] = (uint8_t)(0xc0 | cp >> 6);
        ret[1] = (uint8_t)(0x80 | (cp & 0x3f));
        return 2;
    }
    if (cp < 0x10000) {
        ret[0] = (uint8_t)(0xe0 | cp >> 12);
        ret[1] = (uint8_t)(0x80 | (cp >> 6 & 0x3f));
        ret[2] = (uint8_t)(0x80 | (cp & 0x3f));
        return 3;
    }
    ret[0] = (uint8_t)(0xf0 | cp >> 18);
    ret[1] = (uint8_t)(0x80 | (cp >> 12 & 0x3f));
    ret[2] = (uint8_t)(0x80 | (cp >> 6 & 0x3f));
    ret[3] = (uint8_t)(0x80 | (cp & 0x3f));
    return 4;
}

size_t bt_utf8_valid_prefix(const char *text, size_t n)
{
    const uint8_t *p = (const uint8_t *)text;
    size_t i = 0;

    while (i < n) {
        unsigned need;
        uint64_t eight;

        if (n - i >= 8) {
            memcpy(&eight, p + i, 8);
            if (!(eight & 0x8080808080808080u)) {
                i += 8;
                continue;
            }
        }
        need = utf8_need(p[i]);
        if (!need || n - i < need) {
            return i;
        }
        for (unsigned k = 1; k < need; k++) {
            if (!utf8_follows(p[i], k, p[i + k])) {
                return i;
            }
        }
        i += need;
    }
    return n;
}

bool uni_is_nfc(const struct uni_table *t, struct bt_str text)
{
    const uint8_t *p = (const uint8_t *)text.p;
    size_t i = 0, len;

    while (i < text.n) {
        if (p[i] < 0xcc) { /* below U+0300 everything is as it should be */
            i += p[i] < 0x80 ? 1 : 2;
            continue;
        }
        if (uni_class(t, utf8_get(p + i, &len)) & UNI_QC) {
            return false;
        }
        i += len;
    }
    return true;
}

static uint8_t combining_class(uint32_t c)
{
    size_t lo = 0, hi = BT_ARRAY_LEN(ccc_ranges);

    if (c < ccc_ranges[0].first) {
        return 0;
    }
    while (lo < hi) {
        size_t mid = (lo + hi) / 2;

        if (c > ccc_ranges[mid].last) {
            lo = mid + 1;
        } else if (c < ccc_ranges[mid].first) {
            hi = mid;
        } else {
            return ccc_ranges[mid].value;
        }
    }
    return 0;
}

static const struct uni_triple *find_decomposition(uint32_t c)
{
    size_t lo = 0, hi = BT_ARRAY_LEN(decompositions);

    while (lo < hi) {
        size_t mid = (lo + hi) / 2;

        if (decompositions[mid].a < c) {
            lo = mid + 1;
        } else {
            hi = mid;
        }
    }
    return lo < BT_ARRAY_LEN(decompositions) && decompositions[lo].a == c ? &decompositions[lo]
                                                                          : NULL;
}

/* 0 if the two do not compose. */
static uint32_t compose_pair(uint32_t a, uint32_t b)
{
    size_t lo = 0, hi = BT_ARRAY_LEN(compositions);

    if (a - HANGUL_L < N_L && b - HANGUL_V < N_V) {
        return HANGUL_S + ((a - HANGUL_L) * N_V + (b - HANGUL_V)) * N_T;
    }
    if (a - HANGUL_S < N_S && (a - HANGUL_S) % N_T == 0 && b - (HANGUL_T + 1) < N_T - 1) {
        return a + (b - HANGUL_T);
    }
    while (lo < hi) {
        size_t mid = (lo + hi) / 2;

        if (compositions[mid].a < a || (compositions[mid].a == a && compositions[mid].b < b)) {
            lo = mid + 1;
        } else {
            hi = mid;
        }
    }
    return lo < BT_ARRAY_LEN(compositions) && compositions[lo].a == a && compositions[lo].b == b
               ? compositions[lo].c
               : 0;
}

/* A character with its combining class in the top byte. */
#define MARK(c)    ((uint32_t)combining_class(c) << 24 | (c))
#define CHAR_OF(m) ((m)&0xffffff)
#define CCC_OF(m)  ((m) >> 24)

#define MAX_DECOMPOSED 4 /* longest canonical decomposition of one character */

/* Full canonical decomposition; returns how many characters were written (1..4). */
static size_t decompose(uint32_t c, uint32_t ret[MAX_DECOMPOSED])
{
    const struct uni_triple *d;
    uint32_t tail[MAX_DECOMPOSED];
    size_t n_tail = 0, n = 0;

    if (c - HANGUL_S < N_S) {
        uint32_t s = c - HANGUL_S;

        ret[n++] = HANGUL_L + s / (N_V * N_T);
        ret[n++] = HANGUL_V + s % (N_V * N_T) / N_T;
        if (s % N_T) {
            ret[n++] = HANGUL_T + s % N_T;
        }
        return n;
    }
    while ((d = find_decomposition(c)) != NULL) {
        if (d->c) {
            tail[n_tail++] = d->c;
        }
        c = d->b;
    }
    ret[n++] = MARK(c);
    while (n_tail) {
        n_tail--;
        ret[n++] = MARK(tail[n_tail]);
    }
    return n;
}

/* Stable sort of a run of marks by combining class. `scratch` has room for n. */
static void sort_marks(uint32_t *m, size_t n, uint32_t *scratch)
{
    size_t start[257] = {0};

    if (n <= 16) {
        for (size_t i = 1; i < n; i++) {
            uint32_t x = m[i];
            size_t j = i;

            while (j && CCC_OF(m[j - 1]) > CCC_OF(x)) {
                m[j] = m[j - 1];
                j--;
            }
            m[j] = x;
        }
        return;
    }
    for (size_t i = 0; i < n; i++) {
        start[CCC_OF(m[i]) + 1]++;
    }
    for (size_t k = 1; k < 257; k++) {
        start[k] += start[k - 1];
    }
    for (size_t i = 0; i < n; i++) {
        scratch[start[CCC_OF(m[i])]++] = m[i];
    }
    memcpy(m, scratch, n * sizeof(*m));
}

static void reorder(uint32_t *m, size_t n, uint32_t *scratch)
{
    size_t i = 0;

    while (i < n) {
        size_t j = i;

        while (j < n && CCC_OF(m[j])) {
            j++;
        }
        if (j - i > 1) {
            sort_marks(m + i, j - i, scratch);
        }
        i = j + 1;
    }
}

/* Composes in place; returns the new length. */
static size_t compose(uint32_t *m, size_t n)
{
    size_t out = 0, starter = SIZE_MAX;
    uint32_t last_ccc = 0;

    for (size_t i = 0; i < n; i++) {
        uint32_t ccc = CCC_OF(m[i]);

        if (starter != SIZE_MAX) {
            bool adjacent = out == starter + 1;
            uint32_t c = 0;

            /* A mark is blocked by one of the same or a higher class between it and the starter. */
            if (adjacent || (ccc && last_ccc < ccc)) {
                c = compose_pair(CHAR_OF(m[starter]), CHAR_OF(m[i]));
            }
            if (c) {
                m[starter] = c;
                continue;
            }
        }
        if (!ccc) {
            starter = out;
        }
        last_ccc = ccc;
        m[out++] = m[i];
    }
    return out;
}

static int put_all(const uint32_t *m, size_t n, struct bt_buf *out)
{
    int rc;

    for (size_t i = 0; i < n; i++) {
        uint8_t b[4];

        rc = bt_buf_add(out, b, utf8_put(CHAR_OF(m[i]), b));
        if (rc < 0) {
            return rc;
        }
    }
    return BT_OK;
}

int uni_nfc(struct bt_str text, struct bt_buf *out)
{
    const uint8_t *p = (const uint8_t *)text.p;
    size_t n = 0, len, cap, i;
    uint32_t *m;
    int rc;

    /* Two bytes or more give at most four characters, one byte gives one. */
    if (!bt_mul_size(text.n, 2, &cap) || !bt_add_size(cap, MAX_DECOMPOSED, &cap)) {
        return BT_E_TOO_LARGE;
    }
    m = bt_calloc(cap, 2 * sizeof(*m));
    if (!m) {
        return BT_E_NOMEM;
    }
    for (i = 0; i < text.n; i += len) {
        n += decompose(utf8_get(p + i, &len), m + n);
    }
    reorder(m, n, m + cap);
    n = compose(m, n);
    rc = put_all(m, n, out);
    free(m);
    return rc;
}
