/* Ids to text in steps: never a broken character, joined equal to all at once. */
#include "tests/unit/common/text/tok_data.h"

#include "common/text/detok.h"
#include "common/text/utf8.h"

#include "tests/unit/cmocka.h"

static struct bt_tokenizer *tok;

static int setup(void **state)
{
    tok = tok_data_tokenizer("gpt-2");
    return 0;
}

static int teardown(void **state)
{
    bt_tokenizer_destroy(tok);
    return 0;
}

/* The token that is one raw byte. */
static int32_t byte_token(uint8_t b)
{
    for (int32_t id = 0; (size_t)id < bt_tokenizer_n_vocab(tok); id++) {
        struct bt_str s = bt_tokenizer_token_bytes(tok, id);

        if (s.n == 1 && (uint8_t)s.p[0] == b) {
            return id;
        }
    }
    fail_msg("no token for byte %02x", (unsigned)b);
    return -1;
}

static void bytes_to_ids(struct bt_str bytes, struct bt_ids *ids)
{
    for (size_t i = 0; i < bytes.n; i++) {
        assert_int_equal(bt_ids_push(ids, byte_token((uint8_t)bytes.p[i])), BT_OK);
    }
}

/* Pushes one by one; checks every delta, joins them into *text. */
static void in_steps(const struct bt_ids *ids, struct bt_buf *text)
{
    struct bt_detok d;

    bt_detok_init(&d, tok, 0);
    for (size_t i = 0; i <= ids->n; i++) {
        size_t before = text->n;

        assert_int_equal(i < ids->n ? bt_detok_push(&d, ids->p[i], text) : bt_detok_flush(&d, text),
                         BT_OK);
        assert_int_equal(bt_utf8_valid_prefix(text->p + before, text->n - before),
                         text->n - before);
    }
}

static void test_TOK_01_characters_spread_over_tokens(void **state)
{
    struct bt_str text = BT_STR("🙂🙂 naïve 漢字");
    struct bt_ids ids = {0};
    struct bt_buf steps = {0}, once = {0};

    bytes_to_ids(text, &ids);
    in_steps(&ids, &steps);
    assert_int_equal(bt_detok_all(tok, ids.p, ids.n, 0, &once), BT_OK);
    assert_true(bt_str_eq(bt_buf_str(&steps), text));
    assert_true(bt_str_eq(bt_buf_str(&once), text));
    bt_ids_fini(&ids);
    bt_buf_fini(&steps);
    bt_buf_fini(&once);
}

static void test_TOK_01_nothing_comes_before_the_character_is_whole(void **state)
{
    struct bt_detok d;
    struct bt_buf text = {0};

    bt_detok_init(&d, tok, 0);
    assert_int_equal(bt_detok_push(&d, byte_token(0xf0), &text), BT_OK);
    assert_int_equal(bt_detok_push(&d, byte_token(0x9f), &text), BT_OK);
    assert_int_equal(bt_detok_push(&d, byte_token(0x99), &text), BT_OK);
    assert_int_equal(text.n, 0);
    assert_int_equal(bt_detok_push(&d, byte_token(0x82), &text), BT_OK);
    assert_true(bt_str_eq(bt_buf_str(&text), BT_STR("🙂")));
    assert_int_equal(bt_detok_flush(&d, &text), BT_OK);
    assert_int_equal(text.n, 4);
    bt_buf_fini(&text);
}

#define R "\xef\xbf\xbd"

static void test_TOK_01_broken_bytes_become_one_mark_a_part(void **state)
{
    static const struct {
        struct bt_str bytes, text;
    } cases[] = {
        {BT_STR("\x80"), BT_STR(R)},
        {BT_STR("a\xff\xfe"
                "b"),
         BT_STR("a" R R "b")},
        {BT_STR("\xf0\x9f\x99"), BT_STR(R)},      /* cut off at the end */
        {BT_STR("\xf0\x9f\x99x"), BT_STR(R "x")}, /* cut off by a letter */
        {BT_STR("\xf0\x9f\xf0\x9f\x99\x82"), BT_STR(R "🙂")},
        {BT_STR("\xe0\x80\x80"), BT_STR(R R R)},       /* overlong */
        {BT_STR("\xed\xa0\x80"), BT_STR(R R R)},       /* surrogate */
        {BT_STR("\xf4\x90\x80\x80"), BT_STR(R R R R)}, /* beyond U+10FFFF */
        {BT_STR("\xc3\xc3\xa9"), BT_STR(R "é")},
        {BT_STR("\xe6\xbc"), BT_STR(R)},
    };

    for (size_t i = 0; i < BT_ARRAY_LEN(cases); i++) {
        struct bt_ids ids = {0};
        struct bt_buf steps = {0}, once = {0};

        bytes_to_ids(cases[i].bytes, &ids);
        in_steps(&ids, &steps);
        assert_int_equal(bt_detok_all(tok, ids.p, ids.n, 0, &once), BT_OK);
        assert_true(bt_str_eq(bt_buf_str(&steps), cases[i].text));
        assert_true(bt_str_eq(bt_buf_str(&once), cases[i].text));
        bt_ids_fini(&ids);
        bt_buf_fini(&steps);
        bt_buf_fini(&once);
    }
}

/* Every token of the vocabulary, in an order that breaks characters. */
static void test_TOK_01_steps_equal_once_for_random_ids(void **state)
{
    struct bt_ids ids = {0};
    struct bt_buf steps = {0}, once = {0};
    uint32_t x = 12345;

    for (int i = 0; i < 20000; i++) {
        x = x * 1664525 + 1013904223;
        assert_int_equal(bt_ids_push(&ids, (int32_t)((x >> 8) % (bt_tokenizer_n_vocab(tok) + 3))),
                         BT_OK);
    }
    in_steps(&ids, &steps);
    assert_int_equal(bt_detok_all(tok, ids.p, ids.n, 0, &once), BT_OK);
    assert_true(steps.n > 20000);
    assert_true(bt_str_eq(bt_buf_str(&steps), bt_buf_str(&once)));
    bt_ids_fini(&ids);
    bt_buf_fini(&steps);
    bt_buf_fini(&once);
}

static void test_control_tokens_are_skipped_on_request(void **state)
{
    int32_t end = bt_tokenizer_find_special(tok, BT_STR("<|im_end|>"));
    int32_t tool = bt_tokenizer_find_special(tok, BT_STR("<tool>"));
    int32_t ids[] = {byte_token(0xc3), end, byte_token(0xa9), tool};
    struct bt_buf text = {0};

    assert_int_equal(bt_detok_all(tok, ids, 4, BT_DETOK_SKIP_CONTROL, &text), BT_OK);
    assert_true(bt_str_eq(bt_buf_str(&text), BT_STR("é<tool>")));
    text.n = 0;
    assert_int_equal(bt_detok_all(tok, ids, 4, 0, &text), BT_OK);
    assert_true(bt_str_eq(bt_buf_str(&text), BT_STR(R "<|im_end|>" R "<tool>")));
    bt_buf_fini(&text);
}

static void test_full_buffer_changes_nothing(void **state)
{
    struct bt_detok d;
    struct bt_buf text = {.max = 2};

    bt_detok_init(&d, tok, 0);
    assert_int_equal(bt_detok_push(&d, byte_token(0xe6), &text), BT_OK);
    assert_int_equal(bt_detok_push(&d, byte_token('x'), &text), BT_E_TOO_LARGE);
    assert_int_equal(d.n_held, 1);
    assert_int_equal(bt_detok_flush(&d, &text), BT_E_TOO_LARGE);
    text.max = 0;
    assert_int_equal(bt_detok_push(&d, byte_token('x'), &text), BT_OK);
    assert_true(bt_str_eq(bt_buf_str(&text), BT_STR(R "x")));
    bt_buf_fini(&text);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_TOK_01_characters_spread_over_tokens),
        cmocka_unit_test(test_TOK_01_nothing_comes_before_the_character_is_whole),
        cmocka_unit_test(test_TOK_01_broken_bytes_become_one_mark_a_part),
        cmocka_unit_test(test_TOK_01_steps_equal_once_for_random_ids),
        cmocka_unit_test(test_control_tokens_are_skipped_on_request),
        cmocka_unit_test(test_full_buffer_changes_nothing),
    };

    return cmocka_run_group_tests(tests, setup, teardown);
}
