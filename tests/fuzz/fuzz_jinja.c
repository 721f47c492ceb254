/* Any template, rendered over a small conversation: no crash, bounded time and memory. */
#include "common/jinja/jinja.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct bt_str text = {(const char *)data, size};
    struct bt_jinja_args args = {.max_output = 1 << 14};
    struct bt_jval vars, list, message;
    struct bt_jinja_out out;
    struct bt_arena *a;
    struct bt_jinja *j;
    struct bt_err err;

    if (bt_jinja_compile(text, &j, &err) < 0) {
        BT_BUG_ON(err.msg[0] == '\0');
        return 0;
    }
    BT_BUG_ON(bt_arena_create(4 << 20, &a) < 0);
    vars = bt_jval_dict(a);
    list = bt_jval_list(a);
    for (int i = 0; i < 2; i++) {
        message = bt_jval_dict(a);
        bt_jdict_set(a, message.d, BT_STR("role"), bt_jval_str(a, BT_STR("user"), true));
        bt_jdict_set(a, message.d, BT_STR("content"),
                     bt_jval_str(a, BT_STR(" a\nb </think> \xc3\xa9 "), false));
        bt_jlist_push(a, list.l, message);
    }
    bt_jdict_set(a, vars.d, BT_STR("messages"), list);
    bt_jdict_set(a, vars.d, BT_STR("add_generation_prompt"), bt_jval_bool(true));
    bt_jdict_set(a, vars.d, BT_STR("n"), bt_jval_int(7));
    args.vars = vars.d;
    if (bt_jinja_render(j, a, &args, &out, &err) == BT_OK) {
        size_t end = 0;

        for (size_t i = 0; i < out.n_runs; i++) {
            BT_BUG_ON(out.runs[i].end <= end);
            end = out.runs[i].end;
        }
        BT_BUG_ON(end != out.text.n);
    }
    bt_arena_destroy(a);
    bt_jinja_destroy(j);
    return 0;
}
