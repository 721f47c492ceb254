/* Digest and its cache: what changes it, what does not, and that it works without a cache. */
#include "common/file/model.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "tests/unit/cmocka.h"
#include "tests/unit/common/file/mk.h"

static char dir[128], cache[128], entries[256];

static int setup(void **state)
{
    mk_dir(dir);
    mk_dir(cache);
    snprintf(entries, sizeof(entries), "%s/baton/digest", cache);
    return setenv("XDG_CACHE_HOME", cache, 1);
}

static int teardown(void **state)
{
    mk_dir_remove(entries);
    rmdir(mk_path(cache, "baton"));
    mk_dir_remove(cache);
    mk_dir_remove(dir);
    return 0;
}

static void digest_of(const char *path, uint8_t ret[32])
{
    struct bt_model_file *mf = NULL;
    struct bt_err err = {0};

    assert_int_equal(bt_model_open(path, &mf, &err), BT_OK);
    assert_int_equal(bt_model_digest(mf, ret, &err), BT_OK);
    bt_model_close(mf);
}

/* Number of cache entries; the name of the last one goes to ret. */
static int list_entries(char ret[256])
{
    DIR *d = opendir(entries);
    struct dirent *e;
    int n = 0;

    while (d && (e = readdir(d)) != NULL) {
        if (e->d_name[0] != '.') {
            snprintf(ret, 256, "%s", e->d_name);
            n++;
        }
    }
    if (d) {
        closedir(d);
    }
    return n;
}

/* Sets the times of all files of the model to an hour ago: new files are not cached. */
static void age(void)
{
    const struct timespec t[2] = {{time(NULL) - 3600, 0}, {time(NULL) - 3600, 0}};
    DIR *d = opendir(dir);
    struct dirent *e;

    assert_non_null(d);
    while ((e = readdir(d)) != NULL) {
        if (e->d_name[0] != '.') {
            assert_int_equal(utimensat(AT_FDCWD, mk_path(dir, e->d_name), t, 0), 0);
        }
    }
    closedir(d);
}

static void test_content_decides(void **state)
{
    struct mk_spec s = MK_SPEC("llama");
    uint8_t a[32], b[32], zero = 1;
    char other[128], name[256];
    FILE *f;

    mk_hf_model(dir, &s, "", 2);
    digest_of(dir, a);
    assert_int_equal(list_entries(name), 0);
    age();
    digest_of(dir, b);
    assert_memory_equal(a, b, 32);
    assert_int_equal(list_entries(name), 1);
    digest_of(dir, b);
    assert_memory_equal(a, b, 32);
    assert_int_equal(list_entries(name), 1);

    /* Elsewhere, other inodes and times: the same digest. */
    mk_dir(other);
    mk_hf_model(other, &s, "", 2);
    digest_of(other, b);
    mk_dir_remove(other);
    assert_memory_equal(a, b, 32);

    /* One weight, in place. */
    f = fopen(mk_path(dir, "model-00002-of-00002.safetensors"), "r+b");
    assert_non_null(f);
    assert_int_equal(fseek(f, -1, SEEK_END), 0);
    assert_int_equal(fwrite(&zero, 1, 1, f), 1);
    fclose(f);
    digest_of(dir, b);
    assert_memory_not_equal(a, b, 32);

    /* The tokenizer alone. */
    mk_hf_model(dir, &s, "", 2);
    mk_text(dir, "tokenizer.json", "{\"version\":\"2\"}");
    digest_of(dir, b);
    assert_memory_not_equal(a, b, 32);

    /* A file that is no part of the model. */
    mk_hf_model(dir, &s, "", 2);
    mk_text(dir, "README.md", "hello");
    digest_of(dir, b);
    assert_memory_equal(a, b, 32);
}

static void test_cache_is_used_and_bad_entries_are_not(void **state)
{
    static const char *const bad[] = {"", "garbage\n", "0123456789abcdef"};
    struct mk_spec s = MK_SPEC("llama");
    char name[256], hex[66];
    uint8_t a[32], b[32];

    mk_hf_model(dir, &s, "", 1);
    age();
    digest_of(dir, a);
    assert_int_equal(list_entries(name), 1);
    for (size_t i = 0; i < BT_ARRAY_LEN(bad); i++) {
        mk_text(entries, name, bad[i]);
        digest_of(dir, b);
        assert_memory_equal(a, b, 32);
        assert_int_equal(list_entries(name), 1);
    }
    /* A well-formed entry is believed: the files are not read again. */
    memset(hex, '5', 64);
    hex[64] = '\n';
    mk_file(entries, name, hex, 65);
    digest_of(dir, b);
    assert_memory_not_equal(a, b, 32);
}

static void test_works_without_cache(void **state)
{
    struct mk_spec s = MK_SPEC("llama");
    uint8_t a[32], b[32];

    mk_hf_model(dir, &s, "", 1);
    age();
    digest_of(dir, a);
    /* A file where the folder should be; a relative path, which is not obeyed; none at all. */
    mk_text(dir, "file", "");
    age();
    assert_int_equal(setenv("XDG_CACHE_HOME", mk_path(dir, "file"), 1), 0);
    digest_of(dir, b);
    assert_memory_equal(a, b, 32);
    assert_int_equal(setenv("XDG_CACHE_HOME", "relative", 1), 0);
    assert_int_equal(setenv("HOME", "", 1), 0);
    digest_of(dir, b);
    assert_memory_equal(a, b, 32);
    assert_int_equal(unsetenv("XDG_CACHE_HOME"), 0);
    assert_int_equal(unsetenv("HOME"), 0);
    digest_of(dir, b);
    assert_memory_equal(a, b, 32);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_content_decides, setup, teardown),
        cmocka_unit_test_setup_teardown(test_cache_is_used_and_bad_entries_are_not, setup,
                                        teardown),
        cmocka_unit_test_setup_teardown(test_works_without_cache, setup, teardown),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
