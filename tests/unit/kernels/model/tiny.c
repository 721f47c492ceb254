/* Tiny models, see tiny.h. */
#include "tests/unit/kernels/model/tiny.h"

#include "tests/unit/cmocka.h"

#include <ftw.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#define MAX_ARGS 32

extern char **environ;

static const char *python(void)
{
    const char *p = getenv("BATON_TEST_PYTHON");

    return p ? p : "python3";
}

/* Exit code of `python argv[1..]`, -1 if it could not run. */
static int run_python(const char **argv)
{
    pid_t pid;
    int status;

    argv[0] = python();
    if (posix_spawnp(&pid, argv[0], NULL, NULL, (char *const *)argv, environ) != 0 ||
        waitpid(pid, &status, 0) != pid || !WIFEXITED(status)) {
        return -1;
    }
    return WEXITSTATUS(status);
}

bool tiny_available(void)
{
    const char *argv[] = {NULL, "-c",
                          "import importlib.util, sys; "
                          "sys.exit(importlib.util.find_spec('numpy') is None)",
                          NULL};

    if (run_python(argv) == 0) {
        return true;
    }
    fprintf(stderr, "SKIPPED: %s has no numpy; set BATON_TEST_PYTHON\n", python());
    return false;
}

static int remove_one(const char *path, const struct stat *st, int type, struct FTW *ftw)
{
    return remove(path);
}

struct bt_model_file *tiny_open(const char *const *args, bool dir)
{
    const char *data = getenv("BATON_TEST_DATA"), *tmp = getenv("TMPDIR");
    const char *argv[MAX_ARGS + 8];
    struct bt_model_file *mf = NULL;
    struct bt_err err = {0};
    char folder[256], out[300], tool[4096];
    int n = 2, rc;

    assert_non_null(data);
    snprintf(tool, sizeof(tool), "%s/../tools/mkmodel.py", data);
    snprintf(folder, sizeof(folder), "%s/baton-tiny-XXXXXX", tmp ? tmp : "/tmp");
    assert_non_null(mkdtemp(folder));
    snprintf(out, sizeof(out), "%s/%s", folder, dir ? "model" : "model.gguf");
    argv[1] = tool;
    for (int i = 0; args[i]; i++) {
        assert_true(i < MAX_ARGS);
        argv[n++] = args[i];
    }
    argv[n++] = "--out";
    argv[n++] = out;
    argv[n] = NULL;
    rc = run_python(argv);
    if (rc == 0) {
        rc = bt_model_open(out, &mf, &err);
    }
    nftw(folder, remove_one, 8, FTW_DEPTH | FTW_PHYS);
    if (rc != 0) {
        fail_msg("mkmodel.py or bt_model_open: %d %s", rc, err.msg);
    }
    return mf;
}
