/* Thread start, names, and the CPU quota of the control group. */
#include "common/thr/thread.h"

#include "common/base/buf.h"

#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define BACKGROUND_NICE 10 /* a tenth of the weight of nice 0 */

struct start {
    void *(*fn)(void *);
    void *arg;
    char name[16];
};

static __thread char thread_name[16] = "main";

static void *trampoline(void *p)
{
    struct start s = *(struct start *)p;

    free(p);
    memcpy(thread_name, s.name, sizeof(thread_name));
    pthread_setname_np(pthread_self(), s.name);
    return s.fn(s.arg);
}

int bt_thread_start(
    pthread_t *ret_thread, const char *name, void *(*fn)(void *), void *arg, struct bt_err *err)
{
    struct start *s = bt_calloc(1, sizeof(*s));
    sigset_t all, old;
    int e;

    if (!s) {
        return BT_FAIL(err, BT_E_NOMEM, "thread %s: out of memory", name);
    }
    s->fn = fn;
    s->arg = arg;
    snprintf(s->name, sizeof(s->name), "%s", name);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    e = pthread_create(ret_thread, NULL, trampoline, s);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    if (e != 0) {
        free(s);
        return BT_FAIL(err, BT_E_SYS, "thread %s: %s", name, strerror(e));
    }
    return BT_OK;
}

/* On Linux a nice value is a thread's own; it needs no right to raise it. */
void bt_thread_background(void)
{
    nice(BACKGROUND_NICE);
}

const char *bt_thread_name(void)
{
    return thread_name;
}

/* Quota in whole processors from cgroup v2 ("max 100000" or "150000 100000") or v1; 0 = none. */
static int quota_cpus(void)
{
    long long quota = -1, period = 0;
    char word[32];
    FILE *f = fopen("/sys/fs/cgroup/cpu.max", "re");

    if (f) {
        if (fscanf(f, "%31s %lld", word, &period) == 2 && strcmp(word, "max") != 0) {
            quota = strtoll(word, NULL, 10);
        }
        fclose(f);
    } else {
        f = fopen("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "re");
        if (f) {
            if (fscanf(f, "%lld", &quota) != 1) {
                quota = -1;
            }
            fclose(f);
        }
        f = fopen("/sys/fs/cgroup/cpu/cpu.cfs_period_us", "re");
        if (f) {
            if (fscanf(f, "%lld", &period) != 1) {
                period = 0;
            }
            fclose(f);
        }
    }
    if (quota <= 0 || period <= 0) {
        return 0;
    }
    return quota >= period ? (int)(quota / period) : 1;
}

int bt_cpus_usable(void)
{
    cpu_set_t set;
    int n = 1, quota = quota_cpus();

    if (sched_getaffinity(0, sizeof(set), &set) == 0) {
        n = CPU_COUNT(&set);
    }
    if (quota && quota < n) {
        n = quota;
    }
    return n < 1 ? 1 : n;
}
