/* Two pipes and a child; see peer.h. */
#include "tests/bench/peer.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static void child(const int in[2], const int out[2], const char *command)
{
    dup2(in[0], STDIN_FILENO);
    dup2(out[1], STDOUT_FILENO);
    close(in[0]);
    close(in[1]);
    close(out[0]);
    close(out[1]);
    execl("/bin/sh", "sh", "-c", command, (char *)NULL);
    _exit(127);
}

bool peer_start(struct peer *p, const char *command)
{
    int in[2], out[2];

    if (pipe(in) < 0 || pipe(out) < 0) {
        perror("peer: pipe");
        return false;
    }
    p->pid = fork();
    if (p->pid == 0) {
        child(in, out, command);
    }
    close(in[0]);
    close(out[1]);
    p->to = fdopen(in[1], "w");
    p->from = fdopen(out[0], "r");
    if (p->pid < 0 || !p->to || !p->from || !fgets(p->name, sizeof(p->name), p->from)) {
        fprintf(stderr, "peer: \"%s\" did not start\n", command);
        return false;
    }
    p->name[strcspn(p->name, "\n")] = '\0';
    return true;
}

double peer_ask(struct peer *p, const char *request)
{
    char line[64];

    if (fprintf(p->to, "%s\n", request) < 0 || fflush(p->to) != 0 ||
        !fgets(line, sizeof(line), p->from)) {
        fprintf(stderr, "peer: no answer to \"%s\"\n", request);
        return -1;
    }
    return strtod(line, NULL);
}

void peer_stop(struct peer *p)
{
    if (p->to) {
        fclose(p->to); /* end of its requests */
    }
    if (p->from) {
        fclose(p->from);
    }
    if (p->pid > 0) {
        waitpid(p->pid, NULL, 0);
    }
    *p = (struct peer){.pid = 0};
}
