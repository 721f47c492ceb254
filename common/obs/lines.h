/* A log of lines in a file of its own, such as the access log: whoever adds a line never waits for
 * the disk. A thread writes; what comes faster than it can write, beyond 4 MiB, is dropped and
 * counted in a line of its own. Rotation: rename the file, then bt_lines_reopen (SIGHUP): lines
 * that were added before go to the old file, later ones to the new one, none is cut or lost. */
#ifndef BT_OBS_LINES_H
#define BT_OBS_LINES_H

#include "common/base/rc.h"

#include <time.h>

struct bt_lines;

/* Opens the file for appending (made with mode 0640) and starts the thread "lines". path "-" =
 * standard output. BT_E_IO. */
int bt_lines_open(const char *path, struct bt_lines **ret_lines, struct bt_err *err) BT_MUST_USE;
/* Any thread. `line` without its end; control characters are the caller's care. NULL is fine. */
void bt_lines_add(struct bt_lines *lines, struct bt_str line);
/* "2026-01-31T12:00:00.123456Z" of a moment; buf holds 40 bytes. */
void bt_lines_time(const struct timespec *ts, char buf[40]);
/* Any thread; takes effect soon. If the file cannot be opened the old one stays, with a warning. */
void bt_lines_reopen(struct bt_lines *lines);
/* Writes what is left. No other thread uses it any more. NULL is fine. */
void bt_lines_close(struct bt_lines *lines);

#endif
