/* The small real model answers sensibly on every instruction set of this machine. */
#include "tests/unit/kernels/model/run.h"

#include "kernels/core/registry.h"

static struct bt_model_file *mf;

static int32_t find_token(const char *text)
{
    const struct bt_tok_source *tok = bt_model_tok_source(mf);

    for (size_t i = 0; i < tok->n_tokens; i++) {
        if (bt_str_eq(tok->tokens[i], bt_str_of(text))) {
            return (int32_t)i;
        }
    }
    fail_msg("token %s not found", text);
    return -1;
}

/* Greedy continuation of `prompt`, printed and compared with its expected beginning. */
static void check_greedy(const char *isa)
{
    static const char *const prompt[] = {"The",
                                         "\xc4\xa0"
                                         "capital",
                                         "\xc4\xa0"
                                         "of",
                                         "\xc4\xa0"
                                         "France",
                                         "\xc4\xa0"
                                         "is"};
    const struct bt_tok_source *tok = bt_model_tok_source(mf);
    struct run r;
    int32_t ids[BT_ARRAY_LEN(prompt)], id, first;

    run_open(&r, mf,
             (struct run_opts){.isa = isa,
                               .threads = 2,
                               .page_tokens = 16,
                               .kv = KV_DTYPE_F16,
                               .max_ctx = 256,
                               .max_batch = 64});
    for (size_t i = 0; i < BT_ARRAY_LEN(prompt); i++) {
        ids[i] = find_token(prompt[i]);
    }
    run_chunks(&r, 0, ids, BT_ARRAY_LEN(ids), 64);
    first = id = run_argmax(r.logits, r.c->n_vocab);
    print_message("%s:", isa);
    for (int i = 0; i < 12; i++) {
        print_message(" %.*s", (int)tok->tokens[id].n, tok->tokens[id].p);
        run_chunks(&r, 0, &id, 1, 1);
        id = run_argmax(r.logits, r.c->n_vocab);
    }
    print_message("\n");
    assert_int_equal(first, find_token("\xc4\xa0"
                                       "Paris"));
    run_close(&r);
}

static void test_greedy_is_sensible(void **state)
{
    if (!mf) {
        skip();
    }
    for (const char *const *isa = kn_ops_available(); *isa; isa++) {
        check_greedy(*isa);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_greedy_is_sensible)};
    int rc;

    mf = run_real_model();
    rc = cmocka_run_group_tests(tests, NULL, NULL);
    bt_model_close(mf);
    return rc;
}
