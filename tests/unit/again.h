/* A test's program run anew as a child that plays another part. */
#ifndef BT_TESTS_UNIT_AGAIN_H
#define BT_TESTS_UNIT_AGAIN_H

#include <limits.h>
#include <unistd.h>

/* Replaces the calling process with this program; returns only when that fails. By its path, since
 * /proc/self/exe itself would be valgrind under valgrind. `argv` ends with NULL. */
static inline void exec_again(const char *const argv[])
{
    char path[PATH_MAX];
    ssize_t n = readlink("/proc/self/exe", path, sizeof(path) - 1);

    if (n > 0) {
        path[n] = '\0';
        execv(path, (char *const *)argv);
    }
}

#endif
