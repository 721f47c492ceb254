/* batonctl: the operator's command line. Reads its arguments, runs one command. */
#include "common/conf/value.h"
#include "common/obs/log.h"
#include "deploy/ctl/ctl.h"

#include <stdio.h>

static const char usage[] =
    "usage: batonctl generate [--router ADDRESS] [--chat] --prompt TEXT [--max-tokens N]\n"
    "       batonctl status   [--router ADDRESS]\n"
    "       batonctl node     --node ADDRESS\n"
    "\n"
    "  generate   streams the answer to a prompt to standard output\n"
    "  status     shows the router's model and the table of nodes\n"
    "  node       shows what a node or a store's daemon says of itself: pages, caches, loads\n"
    "\n"
    "  --router ADDRESS  host:port or unix:/path of a router (default 127.0.0.1:50050)\n"
    "  --node ADDRESS    address of a node, as status shows it\n"
    "  --chat            the prompt is a user's message, put into the model's own template\n"
    "  --max-tokens N    length of the answer (default: to the end of the context)\n"
    "  --version         shows the version\n";

static int bad(const char *what, const char *arg)
{
    fprintf(stderr, "batonctl: %s%s\n%s", what, arg, usage);
    return 2;
}

/* 0, or an exit code. */
static int read_args(int argc, char **argv, struct ctl_args *a)
{
    for (int i = 2; i < argc; i++) {
        const char *key = argv[i];
        const char *value = i + 1 < argc ? argv[i + 1] : NULL;

        if (strcmp(key, "--chat") == 0) {
            a->chat = true;
            continue;
        }
        if (strcmp(key, "--router") != 0 && strcmp(key, "--node") != 0 &&
            strcmp(key, "--prompt") != 0 && strcmp(key, "--max-tokens") != 0) {
            return bad("unknown option ", key);
        }
        if (!value) {
            return bad("no value for ", key);
        }
        i++;
        if (strcmp(key, "--router") == 0) {
            a->router = value;
        } else if (strcmp(key, "--node") == 0) {
            a->node = value;
        } else if (strcmp(key, "--prompt") == 0) {
            a->prompt = value;
        } else if (bt_read_int(bt_str_of(value), 1, UINT32_MAX, &a->max_tokens) < 0) {
            return bad("not a number of tokens: ", value);
        }
    }
    return 0;
}

int main(int argc, char **argv)
{
    struct ctl_args a = {.router = "127.0.0.1:50050"};
    int code;

    if (argc < 2) {
        return bad("no command", "");
    }
    a.command = argv[1];
    if (strcmp(a.command, "--help") == 0 || strcmp(a.command, "-h") == 0) {
        fputs(usage, stdout);
        return 0;
    }
    if (strcmp(a.command, "--version") == 0) {
        puts("batonctl " BT_VERSION);
        return 0;
    }
    code = read_args(argc, argv, &a);
    if (code != 0) {
        return code;
    }
    bt_log_threshold = BT_LOG_ERROR;
    if (strcmp(a.command, "generate") == 0) {
        return a.prompt ? ctl_generate(&a) : bad("no --prompt", "");
    }
    if (strcmp(a.command, "status") == 0) {
        return ctl_status(&a);
    }
    if (strcmp(a.command, "node") == 0) {
        return a.node ? ctl_node(&a) : bad("no --node", "");
    }
    return bad("unknown command ", a.command);
}
