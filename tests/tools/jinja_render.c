/* Renders a chat template for comparison with the reference engine.
 *
 * usage: jinja_render TEMPLATE [NOW]
 * TEMPLATE is a file, NOW the seconds since 1970 of strftime_now. Standard input holds records of a
 * little-endian 32-bit length and so many bytes: a JSON object, the variables. Each gives one
 * record: the text, its bytes that came from the variables marked by the second half of the
 * record, one byte each, '1' for ours and '0' for theirs. A record of length 0xffffffff says that
 * the template refused, and is followed by one with the reason. */
#include "common/jinja/jinja.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>

static bool read_all(void *p, size_t n)
{
    return fread(p, 1, n, stdin) == n;
}

static void write_all(const void *p, size_t n)
{
    if (n && fwrite(p, 1, n, stdout) != n) {
        exit(1);
    }
}

static void write_count(uint32_t n)
{
    write_all(&n, sizeof(n));
}

static struct bt_jval value_of(struct bt_arena *a, json_t *j, bool ours)
{
    struct bt_jval v = {0};
    const char *key;
    json_t *item;
    size_t i;

    switch (json_typeof(j)) {
    case JSON_OBJECT:
        v = bt_jval_dict(a);
        json_object_foreach(j, key, item)
        {
            bt_jdict_set(a, v.d, bt_str_of(key),
                         value_of(a, item, ours || strcmp(key, "role") == 0));
        }
        return v;
    case JSON_ARRAY:
        v = bt_jval_list(a);
        json_array_foreach(j, i, item)
        {
            bt_jlist_push(a, v.l, value_of(a, item, ours));
        }
        return v;
    case JSON_STRING:
        return bt_jval_str(a, (struct bt_str){json_string_value(j), json_string_length(j)}, ours);
    case JSON_INTEGER:
        return bt_jval_int(json_integer_value(j));
    case JSON_REAL:
        return bt_jval_float(json_real_value(j));
    case JSON_TRUE:
    case JSON_FALSE:
        return bt_jval_bool(json_is_true(j));
    case JSON_NULL:
        break;
    }
    return bt_jval_none();
}

static void render_one(const struct bt_jinja *j, json_t *vars, int64_t now_s)
{
    struct bt_jinja_args args = {.max_output = 1u << 20, .now_s = now_s};
    struct bt_jinja_out out;
    struct bt_arena *a;
    struct bt_jval v;
    struct bt_err err = {0};

    if (bt_arena_create(64u << 20, &a) < 0) {
        exit(1);
    }
    v = value_of(a, vars, false);
    args.vars = v.d;
    if (bt_jinja_render(j, a, &args, &out, &err) < 0) {
        write_count(UINT32_MAX);
        write_count((uint32_t)strlen(err.msg));
        write_all(err.msg, strlen(err.msg));
    } else {
        size_t at = 0;

        write_count((uint32_t)(2 * out.text.n));
        write_all(out.text.p, out.text.n);
        for (size_t i = 0; i < out.n_runs; i++) {
            for (; at < out.runs[i].end; at++) {
                write_all(out.runs[i].ours ? "1" : "0", 1);
            }
        }
    }
    bt_arena_destroy(a);
}

int main(int argc, char **argv)
{
    struct bt_jinja *j = NULL;
    struct bt_buf text = {0}, in = {0};
    struct bt_err err = {0};
    char part[65536];
    uint32_t len;
    size_t n;
    FILE *f = argc > 1 ? fopen(argv[1], "rb") : NULL;

    while (f && (n = fread(part, 1, sizeof(part), f)) > 0) {
        if (bt_buf_add(&text, part, n) < 0) {
            return 1;
        }
    }
    if (!f || bt_jinja_compile(bt_buf_str(&text), &j, &err) < 0) {
        fprintf(stderr, "jinja_render: %s\n", f ? err.msg : "no template");
        return 2;
    }
    fclose(f);
    while (read_all(&len, sizeof(len))) {
        json_t *vars;

        in.n = 0;
        if (bt_buf_reserve(&in, len) < 0 || !read_all(in.p, len)) {
            return 1;
        }
        vars = json_loadb(in.p, len, 0, NULL);
        if (!json_is_object(vars)) {
            return 1;
        }
        render_one(j, vars, argc > 2 ? strtoll(argv[2], NULL, 10) : 0);
        json_decref(vars);
    }
    bt_jinja_destroy(j);
    bt_buf_fini(&text);
    bt_buf_fini(&in);
    return fflush(stdout) == 0 ? 0 : 1;
}
