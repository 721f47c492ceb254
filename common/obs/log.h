/* Structured log: one logfmt line to stderr per call, written with one write(2).
 *
 *   ts=2026-01-31T12:00:00.123456Z level=info thread=engine event=ready msg="..." key=value
 *
 * error = an operator must act; warn = degraded; info = lifecycle only; debug = per object.
 * Prompts, token text and secrets are never logged. Any thread. Calls from one place are limited to
 * 20 a second; what was dropped is told with the next line (dropped=N). */
#ifndef BT_OBS_LOG_H
#define BT_OBS_LOG_H

#include "common/base/rc.h"

enum bt_log_level { BT_LOG_ERROR, BT_LOG_WARN, BT_LOG_INFO, BT_LOG_DEBUG };

struct bt_log_site {
    uint64_t
        window_s; /* second of the current window; atomic, relaxed: a lost update drops a line */
    uint32_t n;   /* lines in it */
    uint32_t dropped;
};

extern int bt_log_threshold; /* enum bt_log_level; set before threads start */

/* "error".."debug" to level, -1 if unknown. */
int bt_log_level_parse(struct bt_str s);
/* `fmt` gives the rest of the line: key=value pairs. Values with blanks must be quoted (\"%s\"). */
void bt_log_write(struct bt_log_site *site,
                  enum bt_log_level level,
                  const char *event,
                  const char *fmt,
                  ...) BT_PRINTF_ATTR(4, 5);

/* Copies text that is to stand between quotes: '"' becomes '\''. Returns buf (terminated). */
const char *bt_log_quotable(const char *text, char *buf, size_t n);

#define BT_LOG_(level, event, ...)                                                                 \
    do {                                                                                           \
        static struct bt_log_site bt_site_;                                                        \
        if ((int)(level) <= bt_log_threshold) {                                                    \
            bt_log_write(&bt_site_, (level), (event), __VA_ARGS__);                                \
        }                                                                                          \
    } while (0)
#define BT_ERROR(event, ...) BT_LOG_(BT_LOG_ERROR, event, __VA_ARGS__)
#define BT_WARN(event, ...)  BT_LOG_(BT_LOG_WARN, event, __VA_ARGS__)
#define BT_INFO(event, ...)  BT_LOG_(BT_LOG_INFO, event, __VA_ARGS__)
#define BT_DEBUG(event, ...) BT_LOG_(BT_LOG_DEBUG, event, __VA_ARGS__)

#endif
