/* Logs of lines and JSON text. */
#include "common/base/jsonw.h"
#include "common/obs/lines.h"
#include "common/thr/thread.h"
#include "common/thr/time.h"
#include "tests/unit/cmocka.h"

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static char *read_file(const char *path)
{
    FILE *f = fopen(path, "r");
    char *text = bt_calloc(1, 4u << 20);
    size_t n;

    assert_non_null(f);
    assert_non_null(text);
    n = fread(text, 1, (4u << 20) - 1, f);
    text[n] = '\0';
    fclose(f);
    return text;
}

static size_t count_lines(const char *text)
{
    size_t n = 0;

    for (; *text; text++) {
        n += *text == '\n';
    }
    return n;
}

struct writer {
    struct bt_lines *lines;
    int id;
};

#define N_LINES 2000

static void *write_lines(void *arg)
{
    const struct writer *w = arg;
    char text[64];

    for (int i = 0; i < N_LINES; i++) {
        int n = snprintf(text, sizeof(text), "{\"writer\":%d,\"line\":%d}", w->id, i);

        bt_lines_add(w->lines, (struct bt_str){text, (size_t)n});
    }
    return NULL;
}

/* Four threads write while the file is moved away three times: every line is whole and in one of
 * the files, those of a thread in order. */
static void test_rotation_loses_nothing(void **state)
{
    char dir[] = "/tmp/baton-lines.XXXXXX", path[64], old[4][80];
    int next[4] = {0};
    struct bt_lines *lines;
    struct writer writers[4];
    pthread_t threads[4];

    assert_non_null(mkdtemp(dir));
    snprintf(path, sizeof(path), "%s/log", dir);
    assert_int_equal(bt_lines_open(path, &lines, NULL), BT_OK);
    for (int i = 0; i < 4; i++) {
        writers[i] = (struct writer){lines, i};
        assert_int_equal(bt_thread_start(&threads[i], "writer", write_lines, &writers[i], NULL), 0);
    }
    for (int i = 0; i < 3; i++) {
        uint64_t end = bt_deadline_ns(10 * BT_NS_PER_S);

        snprintf(old[i], sizeof(old[i]), "%s.%d", path, i);
        assert_int_equal(rename(path, old[i]), 0);
        bt_lines_reopen(lines);
        while (access(path, F_OK) != 0 && bt_now_ns() < end) {
            usleep(1000);
        }
        assert_int_equal(access(path, F_OK), 0);
    }
    for (int i = 0; i < 4; i++) {
        pthread_join(threads[i], NULL);
    }
    bt_lines_close(lines);
    snprintf(old[3], sizeof(old[3]), "%s", path);
    for (int f = 0; f < 4; f++) {
        char *text = read_file(old[f]), *save = NULL;

        for (char *line = strtok_r(text, "\n", &save); line; line = strtok_r(NULL, "\n", &save)) {
            int writer = -1, n = -1;

            assert_int_equal(sscanf(line, "{\"writer\":%d,\"line\":%d}", &writer, &n), 2);
            assert_in_range(writer, 0, 3);
            assert_int_equal(n, next[writer]++);
        }
        free(text);
        unlink(old[f]);
    }
    for (int i = 0; i < 4; i++) {
        assert_int_equal(next[i], N_LINES);
    }
    rmdir(dir);
}

/* A reader that does not read: nobody who adds waits, and what was left out is counted. */
static void test_slow_file_drops_and_tells(void **state)
{
    char dir[] = "/tmp/baton-lines.XXXXXX", path[64];
    char line[1000];
    struct bt_lines *lines;
    size_t n_got, dropped = 0;
    char *text, *told;

    memset(line, 'x', sizeof(line));
    assert_non_null(mkdtemp(dir));
    snprintf(path, sizeof(path), "%s/log", dir);
    assert_int_equal(bt_lines_open(path, &lines, NULL), BT_OK);
    for (int i = 0; i < 20000; i++) { /* 20 MB; the buffer is 1 MiB */
        bt_lines_add(lines, (struct bt_str){line, sizeof(line)});
    }
    bt_lines_close(lines);
    text = bt_calloc(1, 64u << 20);
    assert_non_null(text);
    {
        FILE *f = fopen(path, "r");

        assert_non_null(f);
        text[fread(text, 1, (64u << 20) - 1, f)] = '\0';
        fclose(f);
    }
    n_got = count_lines(text);
    for (told = text; (told = strstr(told, "{\"dropped\":")); told++) {
        dropped += strtoul(told + 11, NULL, 10);
        n_got--;
    }
    assert_int_equal(n_got + dropped, 20000);
    free(text);
    unlink(path);
    rmdir(dir);
}

static void test_cannot_open(void **state)
{
    struct bt_lines *lines = NULL;
    struct bt_err err = {0};

    assert_int_equal(bt_lines_open("/nowhere/at/all", &lines, &err), BT_E_IO);
    assert_non_null(strstr(err.msg, "/nowhere/at/all"));
    bt_lines_add(NULL, bt_str_of("x"));
    bt_lines_reopen(NULL);
    bt_lines_close(NULL);
}

static void test_json_text(void **state)
{
    struct bt_buf b = {0};
    struct bt_jsonw w = {.b = &b};

    bt_jw_open(&w, NULL, '{');
    bt_jw_str(&w, "a\"", "q\"\\\n\x7f\xc3\xa9\xff\xed\xa0\x80.");
    bt_jw_str(&w, "none", NULL);
    bt_jw_open(&w, "l", '[');
    bt_jw_u64(&w, NULL, UINT64_MAX);
    bt_jw_i64(&w, NULL, -5);
    bt_jw_f64(&w, NULL, 1.25, 6);
    bt_jw_f64(&w, NULL, 100, 0);
    bt_jw_f64(&w, NULL, 3, 3);
    bt_jw_f64(&w, NULL, 0.0 / 0.0, 3);
    bt_jw_bool(&w, NULL, false);
    bt_jw_open(&w, NULL, '{');
    bt_jw_close(&w, '}');
    bt_jw_close(&w, ']');
    bt_jw_close(&w, '}');
    assert_int_equal(w.rc, BT_OK);
    assert_int_equal(bt_buf_add(&b, "", 1), BT_OK);
    assert_string_equal(b.p,
                        "{\"a\\\"\":\"q\\\"\\\\\\u000a\\u007f\xc3\xa9\xef\xbf\xbd\xef\xbf\xbd"
                        "\xef\xbf\xbd\xef\xbf\xbd.\",\"none\":null,\"l\":[18446744073709551615,"
                        "-5,1.25,100,3,null,false,{}]}");
    bt_buf_fini(&b);
}

/* printf's own digits, without the zeros at the end. */
static void printed(double v, int decimals, char *text, size_t cap)
{
    size_t n = (size_t)snprintf(text, cap, "%.*f", decimals, v);

    while (decimals > 0 && text[n - 1] == '0') {
        n--;
    }
    text[n - (text[n - 1] == '.')] = 0;
}

static void test_json_numbers(void **state)
{
    static const double fixed[] = {0,     -0.0,   0.1,      0.12,      9.9996, 0.0004, -0.0004,
                                   1e-12, 1234.5, 99999999, 999999999, 1e9,    1e15,   -17.25};
    uint64_t x = 88172645463325252u;

    for (int i = 0; i < 20000; i++) {
        struct bt_buf b = {0};
        struct bt_jsonw w = {.b = &b};
        int decimals = i % 10;
        char want[400];
        double v;

        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        /* Away from ties, where either neighbour is right. */
        v = i < 140 ? fixed[i / 10] : (double)(x >> 40) / (double)(1 + (x & 0xffff)) + 1e-10;
        v = i & 16 ? -v : v;
        bt_jw_f64(&w, NULL, v, decimals);
        assert_int_equal(bt_buf_add(&b, "", 1), BT_OK);
        printed(v, decimals, want, sizeof(want));
        assert_string_equal(b.p, want);
        bt_buf_fini(&b);
    }
}

static void test_json_bound(void **state)
{
    struct bt_buf b = {.max = 8};
    struct bt_jsonw w = {.b = &b};

    bt_jw_str(&w, NULL, "much too long");
    bt_jw_u64(&w, NULL, 1);
    assert_int_equal(w.rc, BT_E_TOO_LARGE);
    assert_true(b.n <= 8);
    bt_buf_fini(&b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rotation_loses_nothing),
        cmocka_unit_test(test_slow_file_drops_and_tells),
        cmocka_unit_test(test_cannot_open),
        cmocka_unit_test(test_json_text),
        cmocka_unit_test(test_json_numbers),
        cmocka_unit_test(test_json_bound),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
