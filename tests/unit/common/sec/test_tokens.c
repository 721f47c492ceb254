/* Token files: what is read, what is refused and how; look-ups; the header. */
#include "common/sec/tokens.h"

#include "tests/unit/cmocka.h"

#include <stdio.h>
#include <stdlib.h>

#define A "aaaaaaaaaaaaaaaa"
#define B "bbbbbbbb-._~+/=="
#define C "cccccccccccccccc"

static struct bt_tokens *table(void)
{
    struct bt_tokens *t;

    assert_int_equal(bt_tokens_create(&t, NULL), BT_OK);
    return t;
}

static void test_lines(void **state)
{
    struct bt_tokens *t = table();
    struct bt_str first;
    struct bt_who who;
    static const char text[] = "# nobody\n\n  " A "\tteam-a  # first\r\n" B "\n" C " *x\n";
    static const char good[] = "# nobody\n\n  " A "\tteam-a  # first\r\n" B "\n" C " *";

    assert_int_equal(bt_tokens_add(t, "f", BT_STR(text), BT_ACCESS_CLIENT, NULL), BT_E_CONFIG);
    bt_tokens_destroy(t);
    t = table();
    assert_int_equal(bt_tokens_add(t, "f", BT_STR(good), BT_ACCESS_CLIENT, NULL), BT_OK);
    assert_int_equal(bt_tokens_n(t), 3);
    assert_true(bt_tokens_find(t, BT_STR(A), &who));
    assert_int_equal(who.access, BT_ACCESS_CLIENT);
    assert_string_equal(who.tenant, "team-a");
    assert_false(who.any_tenant);
    assert_true(bt_tokens_find(t, BT_STR(B), &who));
    assert_string_equal(who.tenant, "");
    assert_false(who.any_tenant);
    assert_true(bt_tokens_find(t, BT_STR(C), &who));
    assert_true(who.any_tenant);
    assert_int_equal(bt_tokens_first("f", BT_STR(good), &first, NULL), BT_OK);
    assert_true(bt_str_eq(first, BT_STR(A)));
    bt_tokens_destroy(t);
}

/* A prefix, a longer one, another case, nothing: nobody has them. */
static void test_SEC_01_only_the_whole_token_is_one(void **state)
{
    struct bt_tokens *t = table();
    struct bt_who who = {.access = 77};
    char buf[BT_TOKEN_MAX + 8];

    assert_false(bt_tokens_find(t, BT_STR(A), &who));
    assert_int_equal(bt_tokens_add(t, "f", BT_STR(A "\n" B "\n"), BT_ACCESS_CLIENT, NULL), BT_OK);
    for (size_t n = 0; n < strlen(A); n++) {
        assert_false(bt_tokens_find(t, (struct bt_str){A, n}, &who));
    }
    assert_false(bt_tokens_find(t, BT_STR(A "a"), &who));
    assert_false(bt_tokens_find(t, BT_STR("AAAAAAAAAAAAAAAA"), &who));
    assert_false(bt_tokens_find(t, BT_STR(""), &who));
    memset(buf, 'a', sizeof(buf));
    assert_false(bt_tokens_find(t, (struct bt_str){buf, sizeof(buf)}, &who));
    assert_int_equal(who.access, 77);
    bt_tokens_destroy(t);
}

static void refused(const char *text, const char *why)
{
    struct bt_tokens *t = table();
    struct bt_err err = {0};
    struct bt_str first = {NULL, 0};

    assert_int_equal(bt_tokens_add(t, "some/file", bt_str_of(text), BT_ACCESS_CLIENT, &err),
                     BT_E_CONFIG);
    if (!strstr(err.msg, why) || !strstr(err.msg, "some/file")) {
        fail_msg("\"%s\" is not in \"%s\"", why, err.msg);
    }
    if (strstr(err.msg, "secret") || strstr(err.msg, A)) {
        fail_msg("the error shows a token: %s", err.msg);
    }
    if (!strstr(why, "same")) {
        assert_int_equal(bt_tokens_first("f", bt_str_of(text), &first, NULL), BT_E_CONFIG);
        assert_null(first.p);
    }
    bt_tokens_destroy(t);
}

static void test_refused(void **state)
{
    char line[BT_TOKEN_MAX + 80];

    refused("", "no token");
    refused("# only a comment\n\n  \n", "no token");
    refused(A "\nsecret-short\n", "line 2: a token has 16 to 512");
    refused("secret secret secret secret\n", "line 1: a token has");
    refused("secretsecretsecre\xc3\xa4\n", "line 1: a token has");
    refused("================\n", "line 1: a token has");
    refused("secret=secretsecret\n", "line 1: a token has");
    refused(A " name\"quoted\n", "line 1: a name has");
    refused(A " **\n", "line 1: a name has");
    refused(A " a b\n", "line 1: more than");
    refused(A "\n" B "\n" A " other\n", "the same token");
    memset(line, 's', sizeof(line));
    snprintf(line + BT_TOKEN_MAX + 1, 2, "\n");
    refused(line, "line 1: a token has");
    snprintf(line, sizeof(line), "%s %.*s\n", A, BT_TENANT_MAX,
             "ssssssssssssssssssssssssssssssss"
             "ssssssssssssssssssssssssssssssss");
    refused(line, "line 1: a name has");
}

/* The limits themselves are fine, and a file of another role may not hold a client's token. */
static void test_limits_and_roles(void **state)
{
    struct bt_tokens *t = table();
    struct bt_err err = {0};
    struct bt_who who;
    char line[BT_TOKEN_MAX + BT_TENANT_MAX + 4];

    memset(line, 's', sizeof(line));
    line[BT_TOKEN_MAX] = ' ';
    line[BT_TOKEN_MAX + BT_TENANT_MAX] = '\0';
    assert_int_equal(bt_tokens_add(t, "clients", bt_str_of(line), BT_ACCESS_CLIENT, &err), BT_OK);
    assert_true(bt_tokens_find(t, (struct bt_str){line, BT_TOKEN_MAX}, &who));
    assert_int_equal(strlen(who.tenant), BT_TENANT_MAX - 1);
    assert_int_equal(bt_tokens_add(t, "operators", BT_STR(A), BT_ACCESS_OPERATOR, &err), BT_OK);
    assert_true(bt_tokens_find(t, BT_STR(A), &who));
    assert_int_equal(who.access, BT_ACCESS_OPERATOR);
    assert_int_equal(bt_tokens_add(t, "cluster", BT_STR(B "\n" A "\n"), BT_ACCESS_CLUSTER, &err),
                     BT_E_CONFIG);
    assert_non_null(strstr(err.msg, "operators line 1"));
    assert_non_null(strstr(err.msg, "cluster line 2"));
    bt_tokens_destroy(t);
}

static void test_many(void **state)
{
    enum { N = 20000 };
    char *text = malloc(N * 32), *at = text, name[32];
    struct bt_tokens *t = table();
    struct bt_who who;

    assert_non_null(text);
    for (int i = 0; i < N; i++) {
        at += snprintf(at, 32, "token-number-%06d t%d\n", i, i);
    }
    assert_int_equal(
        bt_tokens_add(t, "f", (struct bt_str){text, (size_t)(at - text)}, BT_ACCESS_CLIENT, NULL),
        BT_OK);
    for (int i = 0; i < N; i += 7) {
        snprintf(name, sizeof(name), "token-number-%06d", i);
        assert_true(bt_tokens_find(t, bt_str_of(name), &who));
        snprintf(name, sizeof(name), "t%d", i);
        assert_string_equal(who.tenant, name);
    }
    assert_false(bt_tokens_find(t, BT_STR("token-number-020000"), &who));
    bt_tokens_destroy(t);
    free(text);
}

static void test_header(void **state)
{
    static const struct {
        const char *value, *token;
    } rows[] = {
        {"Bearer abc", "abc"},
        {"bearer   abc  ", "abc"},
        {"BEARER a b", "a b"},
        {"Bearer ", NULL},
        {"Bearer", NULL},
        {"Bearer    ", NULL},
        {"Basic abc", NULL},
        {"abc", NULL},
        {"", NULL},
        {"Bearerabc", NULL},
    };

    for (size_t i = 0; i < BT_ARRAY_LEN(rows); i++) {
        struct bt_str t = bt_token_of_header(bt_str_of(rows[i].value));

        if (rows[i].token) {
            assert_true(bt_str_eq(t, bt_str_of(rows[i].token)));
        } else {
            assert_int_equal(t.n, 0);
        }
    }
    assert_int_equal(bt_token_of_header((struct bt_str){NULL, 0}).n, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_lines),   cmocka_unit_test(test_SEC_01_only_the_whole_token_is_one),
        cmocka_unit_test(test_refused), cmocka_unit_test(test_limits_and_roles),
        cmocka_unit_test(test_many),    cmocka_unit_test(test_header),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
