/* The options and commands of batonctl. */
#include "deploy/ctl/ctl.h"

const char *const ctl_exit_texts[CTL_EXIT_COUNT] = {
    "done",
    "refused or gone wrong, also in part",
    "wrong usage, nothing was done",
    "who would have to do it cannot be reached",
    "not done within --timeout",
    "no such node, request or workload",
    "denied: token or rights",
};

static const char *const outputs[] = {"table", "json", NULL};

#define AT(field) offsetof(struct ctl_args, field)

const struct ctl_option ctl_options[] = {
    {.name = "router",
     .kind = CTL_K_TEXT,
     .offset = AT(router),
     .value = "ADDRESS",
     .def = "127.0.0.1:50050",
     .help = "host:port or unix:/path of a router"},
    {.name = "node",
     .kind = CTL_K_TEXT,
     .offset = AT(node),
     .value = "ADDRESS",
     .help = "address of a node, as status shows it"},
    {.name = "prompt",
     .kind = CTL_K_TEXT,
     .offset = AT(prompt),
     .value = "TEXT",
     .help = "what to answer"},
    {.name = "chat",
     .kind = CTL_K_FLAG,
     .offset = AT(chat),
     .help = "the prompt is a user's message, put into the model's own template"},
    {.name = "max-tokens",
     .kind = CTL_K_COUNT,
     .offset = AT(max_tokens),
     .value = "N",
     .min = 1,
     .max = UINT32_MAX,
     .help = "length of the answer (default: to the end of the context)"},
    {.name = "wait",
     .kind = CTL_K_FLAG,
     .offset = AT(wait),
     .help = "return when it is done, not when it is begun"},
    {.name = "timeout",
     .kind = CTL_K_TIME,
     .offset = AT(timeout_ns),
     .value = "TIME",
     .def = "10s",
     .help = "longest time it may take, as 500ms or 30s"},
    {.name = "dry-run",
     .kind = CTL_K_FLAG,
     .offset = AT(dry_run),
     .help = "say what would be done, do nothing"},
    {.name = "output",
     .letter = 'o',
     .kind = CTL_K_CHOICE,
     .offset = AT(output),
     .value = "FORMAT",
     .def = "table",
     .choices = outputs,
     .help = "table or json"},
    {.name = "help", .letter = 'h', .kind = CTL_K_FLAG, .offset = AT(help), .help = "this text"},
};
const size_t ctl_n_options = BT_ARRAY_LEN(ctl_options);

const struct ctl_command ctl_commands[] = {
    {.name = "generate",
     .words = "",
     .options = "router prompt! chat max-tokens",
     .summary = "streams the answer to a prompt to standard output",
     .run = ctl_generate},
    {.name = "status",
     .words = "",
     .options = "router timeout",
     .summary = "shows the router's model and the table of nodes",
     .run = ctl_status},
    {.name = "node",
     .words = "",
     .options = "node! timeout",
     .summary = "shows what a node or a store's daemon says of itself: pages, caches, loads",
     .run = ctl_node},
};
const size_t ctl_n_commands = BT_ARRAY_LEN(ctl_commands);
