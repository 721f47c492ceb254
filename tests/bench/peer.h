/* A peer: another program that measures the same cases on the same input, run by turns with ours.
 * It answers one line a request on its standard output; the first line names it. */
#ifndef BT_TESTS_BENCH_PEER_H
#define BT_TESTS_BENCH_PEER_H

#include "common/base/base.h"

struct peer {
    char name[256]; /* with version and what it was built for */
    int pid;
    void *to, *from; /* FILE */
};

/* Starts `command` through the shell and reads its name. Prints what is wrong and returns false. */
bool peer_start(struct peer *p, const char *command);
/* Sends a line, returns the number of the line that comes back; < 0 when none did. */
double peer_ask(struct peer *p, const char *request);
void peer_stop(struct peer *p);

#endif
