/* Formats a line on the stack and writes it at once; rate limit per call site. */
#include "common/obs/log.h"

#include "common/thr/thread.h"

#include <stdarg.h>
#include <stdio.h>
#include <time.h>
#include <unistd.h>

#define LINES_PER_SECOND 20

int bt_log_threshold = BT_LOG_INFO;

static const char *const level_names[] = {"error", "warn", "info", "debug"};

int bt_log_level_parse(struct bt_str s)
{
    for (size_t i = 0; i < BT_ARRAY_LEN(level_names); i++) {
        if (bt_str_eq(s, bt_str_of(level_names[i]))) {
            return (int)i;
        }
    }
    return -1;
}

/* True if the site may write now; *ret_dropped = lines left out since its last one. */
static bool site_allows(struct bt_log_site *site, uint64_t now_s, uint32_t *ret_dropped)
{
    if (__atomic_load_n(&site->window_s, __ATOMIC_RELAXED) != now_s) {
        __atomic_store_n(&site->window_s, now_s, __ATOMIC_RELAXED);
        __atomic_store_n(&site->n, 0, __ATOMIC_RELAXED);
    }
    if (__atomic_fetch_add(&site->n, 1, __ATOMIC_RELAXED) >= LINES_PER_SECOND) {
        __atomic_fetch_add(&site->dropped, 1, __ATOMIC_RELAXED);
        return false;
    }
    *ret_dropped = __atomic_exchange_n(&site->dropped, 0, __ATOMIC_RELAXED);
    return true;
}

void bt_log_write(
    struct bt_log_site *site, enum bt_log_level level, const char *event, const char *fmt, ...)
{
    struct timespec ts;
    struct tm tm;
    uint32_t dropped;
    char line[1024];
    va_list ap;
    int n;

    clock_gettime(CLOCK_REALTIME, &ts);
    if (!site_allows(site, (uint64_t)ts.tv_sec, &dropped)) {
        return;
    }
    gmtime_r(&ts.tv_sec, &tm);
    n = (int)strftime(line, sizeof(line), "ts=%Y-%m-%dT%H:%M:%S", &tm);
    n += snprintf(line + n, sizeof(line) - (size_t)n, ".%06ldZ level=%s thread=%s event=%s ",
                  ts.tv_nsec / 1000, level_names[level], bt_thread_name(), event);
    va_start(ap, fmt);
    n += vsnprintf(line + n, sizeof(line) - (size_t)n, fmt, ap);
    va_end(ap);
    n = BT_MIN(n, (int)sizeof(line) - 32);
    for (int i = 0; i < n; i++) {
        if ((unsigned char)line[i] < 0x20 || line[i] == 0x7f) {
            line[i] = '?';
        }
    }
    if (dropped) {
        n += snprintf(line + n, sizeof(line) - (size_t)n, " dropped=%u", dropped);
    }
    line[n++] = '\n';
    if (write(STDERR_FILENO, line, (size_t)n) < 0) {
        return; /* nobody is left to tell */
    }
}

const char *bt_log_quotable(const char *text, char *buf, size_t n)
{
    snprintf(buf, n, "%s", text);
    for (char *p = buf; *p; p++) {
        *p = (char)(*p == '"' ? '\'' : *p);
    }
    return buf;
}
