/* Stop strings: what is shown, what is withheld, who wins; against a plain search. */
#include "common/text/stop.h"

#include <stdlib.h>

#include "tests/unit/cmocka.h"

/* Feeds `text` in deltas of `step` bytes; joins what is shown, flush included. Returns the match.
 */
static int
feed(const struct bt_str *stops, size_t n, struct bt_str text, size_t step, struct bt_buf *out)
{
    struct bt_stop *s = NULL;
    int matched = -1;

    assert_int_equal(bt_stop_create(stops, n, &s, NULL), BT_OK);
    for (size_t i = 0; i < text.n; i += step) {
        struct bt_str delta = {text.p + i, BT_MIN(step, text.n - i)};

        assert_int_equal(bt_stop_push(s, delta, out, &matched), BT_OK);
    }
    assert_int_equal(bt_stop_flush(s, out), BT_OK);
    assert_int_equal(bt_stop_n_held(s), 0);
    bt_stop_destroy(s);
    return matched;
}

static void
expect(const struct bt_str *stops, size_t n, const char *text, int matched, const char *shown)
{
    for (size_t step = 1; step < 40; step++) {
        struct bt_buf out = {0};

        assert_int_equal(feed(stops, n, bt_str_of(text), step, &out), matched);
        assert_true(bt_str_eq(bt_buf_str(&out), bt_str_of(shown)));
        bt_buf_fini(&out);
    }
}

static void test_STOP_01_match_near_miss_and_overlap(void **state)
{
    struct bt_str one[] = {BT_STR(" zeta eta theta")};
    struct bt_str two[] = {BT_STR("eta theta"), BT_STR("zeta eta theta")};
    struct bt_str nested[] = {BT_STR("bcde"), BT_STR("cd")};
    struct bt_str same[] = {BT_STR("cd"), BT_STR("bcd"), BT_STR("d")};

    expect(one, 1, " delta epsilon zeta eta theta iota", 0, " delta epsilon");
    expect(one, 1, " delta epsilon zeta etb", -1, " delta epsilon zeta etb");
    expect(one, 1, " zeta eta zeta eta theta", 0, " zeta eta");
    expect(two, 2, " delta epsilon zeta eta theta iota", 1, " delta epsilon ");
    expect(two, 2, "a theta eta theta", 0, "a theta ");
    /* Complete first wins; of those, the one that begins first. */
    expect(nested, 2, "abcdef", 1, "ab");
    expect(same, 3, "abcd", 1, "a");
    expect(one, 1, "", -1, "");
    expect(NULL, 0, "anything", -1, "anything");
}

static void test_STOP_01_withholds_only_a_true_prefix(void **state)
{
    struct bt_str stops[] = {BT_STR("abab"), BT_STR("bb")};
    struct bt_stop *s = NULL;
    struct bt_buf out = {0};
    int matched;

    assert_int_equal(bt_stop_create(stops, 2, &s, NULL), BT_OK);
    assert_int_equal(bt_stop_push(s, BT_STR("xab"), &out, &matched), BT_OK);
    assert_int_equal(matched, -1);
    assert_true(bt_str_eq(bt_buf_str(&out), BT_STR("x")));
    assert_int_equal(bt_stop_n_held(s), 2);
    assert_int_equal(bt_stop_push(s, BT_STR("aa"), &out, &matched), BT_OK);
    assert_true(bt_str_eq(bt_buf_str(&out), BT_STR("xaba")));
    assert_int_equal(bt_stop_n_held(s), 1);
    assert_int_equal(bt_stop_push(s, BT_STR("bb and more"), &out, &matched), BT_OK);
    assert_int_equal(matched, 1);
    assert_true(bt_str_eq(bt_buf_str(&out), BT_STR("xabaa")));
    /* After the match nothing is taken or given. */
    assert_int_equal(bt_stop_push(s, BT_STR("more"), &out, &matched), BT_OK);
    assert_int_equal(matched, 1);
    assert_int_equal(bt_stop_flush(s, &out), BT_OK);
    assert_true(bt_str_eq(bt_buf_str(&out), BT_STR("xabaa")));
    bt_stop_destroy(s);
    bt_buf_fini(&out);
}

static void test_full_buffer_changes_nothing(void **state)
{
    struct bt_str stops[] = {BT_STR("cd")};
    struct bt_buf out = {.max = 3};
    struct bt_stop *s = NULL;
    int matched = 7;

    assert_int_equal(bt_stop_create(stops, 1, &s, NULL), BT_OK);
    assert_int_equal(bt_stop_push(s, BT_STR("abc"), &out, &matched), BT_OK);
    assert_int_equal(bt_stop_push(s, BT_STR("xyz"), &out, &matched), BT_E_TOO_LARGE);
    assert_int_equal(out.n, 2);
    out.max = 0;
    assert_int_equal(bt_stop_push(s, BT_STR("d"), &out, &matched), BT_OK);
    assert_int_equal(matched, 0);
    assert_true(bt_str_eq(bt_buf_str(&out), BT_STR("ab")));
    bt_stop_destroy(s);
    bt_buf_fini(&out);
}

/* The rule, by brute force: the shortest text that ends in a stop string, the longest string. */
static int search(const struct bt_str *stops, size_t n, struct bt_str text, size_t *ret_from)
{
    for (size_t end = 1; end <= text.n; end++) {
        int found = -1;

        for (size_t k = 0; k < n; k++) {
            if (stops[k].n <= end &&
                memcmp(text.p + end - stops[k].n, stops[k].p, stops[k].n) == 0 &&
                (found < 0 || stops[k].n > stops[found].n)) {
                found = (int)k;
            }
        }
        if (found >= 0) {
            *ret_from = end - stops[found].n;
            return found;
        }
    }
    *ret_from = text.n;
    return -1;
}

static uint32_t rnd;

static uint32_t next_random(uint32_t n)
{
    rnd = rnd * 1664525 + 1013904223;
    return (rnd >> 8) % n;
}

static void test_STOP_01_random_texts_of_two_letters(void **state)
{
    rnd = 99;
    for (int round = 0; round < 4000; round++) {
        char text[48], words[4][8];
        struct bt_str stops[4], all = {text, next_random(48)};
        size_t n = 1 + next_random(4), from;
        struct bt_buf out = {0};
        int want;

        for (size_t i = 0; i < all.n; i++) {
            text[i] = (char)('a' + next_random(2));
        }
        for (size_t k = 0; k < n; k++) {
            stops[k] = (struct bt_str){words[k], 2 + next_random(6)};
            for (size_t i = 0; i < stops[k].n; i++) {
                words[k][i] = (char)('a' + next_random(2));
            }
        }
        want = search(stops, n, all, &from);
        /* Of equal strings the first one counts, in both. */
        assert_int_equal(feed(stops, n, all, 1 + next_random(9), &out), want);
        assert_true(bt_str_eq(bt_buf_str(&out), (struct bt_str){text, from}));
        bt_buf_fini(&out);
    }
}

static void test_STOP_03_limits(void **state)
{
    char big[BT_STOP_MAX_BYTES + 1];
    struct bt_str many[20], empty[] = {BT_STR(""), BT_STR("x")}, bad[] = {BT_STR("\xff")};
    struct bt_str long_one[] = {{big, sizeof(big)}};
    struct bt_stop *s = NULL;
    struct bt_buf out = {0};
    struct bt_err err = {0};

    memset(big, 'x', sizeof(big));
    for (size_t i = 0; i < 20; i++) {
        many[i] = BT_STR("stop");
    }
    assert_int_equal(bt_stop_create(empty, 1, &s, &err), BT_E_INVALID);
    assert_non_null(strstr(err.msg, "empty"));
    assert_int_equal(bt_stop_create(empty, 2, &s, &err), BT_E_INVALID);
    assert_int_equal(bt_stop_create(bad, 1, &s, &err), BT_E_INVALID);
    assert_int_equal(bt_stop_create(many, 20, &s, &err), BT_E_TOO_LARGE);
    assert_non_null(strstr(err.msg, "16"));
    assert_int_equal(bt_stop_create(long_one, 1, &s, &err), BT_E_TOO_LARGE);
    assert_null(s);
    assert_int_equal(bt_stop_check(NULL, 0, &err), BT_OK);
    long_one[0].n = BT_STOP_MAX_BYTES;
    /* The longest one possible, found across deltas, after a run that almost is one. */
    assert_int_equal(feed(long_one, 1, (struct bt_str){big, BT_STOP_MAX_BYTES}, 7, &out), 0);
    assert_int_equal(out.n, 0);
    assert_int_equal(feed(long_one, 1, (struct bt_str){big, BT_STOP_MAX_BYTES - 1}, 7, &out), -1);
    assert_int_equal(out.n, BT_STOP_MAX_BYTES - 1);
    bt_buf_fini(&out);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_STOP_01_match_near_miss_and_overlap),
        cmocka_unit_test(test_STOP_01_withholds_only_a_true_prefix),
        cmocka_unit_test(test_full_buffer_changes_nothing),
        cmocka_unit_test(test_STOP_01_random_texts_of_two_letters),
        cmocka_unit_test(test_STOP_03_limits),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
