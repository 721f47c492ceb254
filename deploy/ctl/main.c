/* batonctl: the operator's command line. Reads its arguments, runs one command. */
#include "common/obs/log.h"
#include "deploy/ctl/ctl.h"

#include <signal.h>
#include <string.h>

int main(int argc, char **argv)
{
    struct ctl_args a;
    int code;

    if (argc > 1 && strcmp(argv[1], "--version") == 0) {
        puts("batonctl " BT_VERSION);
        return CTL_OK;
    }
    code = ctl_read_args(argc, argv, &a);
    if (code != CTL_OK) {
        return code;
    }
    if (a.help) {
        ctl_usage(stdout, a.command);
        return CTL_OK;
    }
    bt_log_threshold = BT_LOG_ERROR;
    signal(SIGPIPE, SIG_IGN);
    code = ctl_access_open(&a);
    if (code == CTL_OK) {
        code = a.command->run(&a);
    }
    ctl_access_close();
    /* What could not be written was not told: a closed pipe must not look like success. */
    if (fflush(stdout) != 0 && code == CTL_OK) {
        fputs("batonctl: cannot write to standard output\n", stderr);
        code = CTL_FAILED;
    }
    return code;
}
