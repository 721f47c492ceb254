/* batonctl: what its commands share. One thread.
 *
 * commands.c holds two tables: the options there are, and the commands with the options each takes.
 * Arguments are read, checked and explained from them, and whatever else lists commands
 * (completion, the man page) goes through them as well. A command is one file with one function. */
#ifndef CTL_CTL_H
#define CTL_CTL_H

#include "common/rpc/client.h"
#include "proto/baton.pb-c.h"

#include <stdio.h>

/* Exit codes; scripts rely on them. Texts are in ctl_exit_texts. */
enum ctl_exit {
    CTL_OK = 0,
    CTL_FAILED = 1,      /* refused or gone wrong, also in part; stderr says what */
    CTL_USAGE = 2,       /* nothing was done */
    CTL_UNREACHABLE = 3, /* who would have to do it does not answer */
    CTL_TIMEOUT = 4,     /* asked for, but not seen to be done within --timeout */
    CTL_NOT_FOUND = 5,   /* no such node, request, workload */
    CTL_DENIED = 6,      /* token or rights */
    CTL_EXIT_COUNT,
};
extern const char *const ctl_exit_texts[CTL_EXIT_COUNT];

enum ctl_output { CTL_TABLE, CTL_JSON };

#define CTL_MAX_WORDS 16

/* What was given; NULL, false or 0 where it was not, if the table names no default. Strings are of
 * argv. */
struct ctl_args {
    const struct ctl_command *command;
    const char *words[CTL_MAX_WORDS]; /* arguments that are no options; their number is checked */
    size_t n_words;
    const char *router, *node, *prompt;
    bool router_given;
    const char *supervisor, *kubeconfig, *service_account, *context, *ns, *workload,
        *kind; /* where pools are */
    const char *binary, *image, *version;
    int64_t percent, replicas; /* percent: -1 = not given */
    const char *token_file, *ca, *cert, *key, *tls_name, *node_tls_name;
    bool chat, help, wait, dry_run;
    int64_t max_tokens;
    uint64_t timeout_ns;
    int output; /* enum ctl_output */
    /* of commands that look */
    int64_t limit, tokens, requests, concurrency, prompt_tokens;
    bool once;
    uint64_t interval_ns, memory;
    const char *text, *ids, *prompt_file, *salt, *redis;
    int tier;     /* enum ctl_tier */
    int kv_dtype; /* 0 = f16, 1 = f32 */
    const char *trace;
    int64_t nodes, blocks, speed;
    uint64_t goal_ns;
};

enum ctl_tier { CTL_TIER_ALL, CTL_TIER_POOL, CTL_TIER_HOST, CTL_TIER_DISK };

enum ctl_kind {
    CTL_K_FLAG,   /* bool */
    CTL_K_TEXT,   /* const char * */
    CTL_K_COUNT,  /* int64_t within min..max */
    CTL_K_TIME,   /* uint64_t, ns; "500ms", "30s" */
    CTL_K_BYTES,  /* uint64_t; "16G" */
    CTL_K_CHOICE, /* int, index into choices */
    CTL_K_ADDR,   /* const char *; "host:port" or "unix:/path" */
};

struct ctl_option {
    const char *name; /* without dashes */
    char letter;      /* 0 = none */
    enum ctl_kind kind;
    size_t offset;     /* in struct ctl_args */
    const char *value; /* what the usage calls its value; NULL for flags */
    const char *def;   /* as text; NULL = none */
    const char *env;   /* variable that gives the value where the option does not; NULL = none */
    bool calls;        /* taken by every command that takes router or node */
    int64_t min, max;
    const char *const *choices; /* NULL at the end */
    const char *help;
};

struct ctl_command {
    const char *name;
    const char *words; /* as the usage shows them, "" = none */
    size_t min_words, max_words;
    const char *options; /* names, a blank between them; "prompt!" must be given */
    const char *summary; /* one line */
    const char *timeout; /* default of --timeout if it is another one */
    const char *details; /* more lines for `batonctl NAME --help`; NULL = none */
    int (*run)(const struct ctl_args *a);
};

extern const struct ctl_option ctl_options[];
extern const size_t ctl_n_options;
extern const struct ctl_command ctl_commands[];
extern const size_t ctl_n_commands;

/* The command takes the option; *ret_must: it needs it. */
bool ctl_takes(const struct ctl_command *c, const struct ctl_option *o, bool *ret_must);
/* As text; NULL = none. */
const char *ctl_default_of(const struct ctl_command *c, const struct ctl_option *o);
/* Of one command, or of all of them where c is NULL. */
void ctl_usage(FILE *to, const struct ctl_command *c);
/* The short one behind the message of what was wrong, on stderr; CTL_USAGE. */
int ctl_bad_usage(const struct ctl_command *c);
/* CTL_OK; else the exit code, and stderr says why. --help is CTL_OK with ret->help set and nothing
 * else checked. ret->command is NULL where none was named (with --help or --version). */
int ctl_read_args(int argc, char **argv, struct ctl_args *ret);

/* Whom a call goes to: their certificates have different names. */
enum ctl_peer { CTL_ROUTER, CTL_NODE, CTL_PEERS };

/* One call with its messages; runs the loop until it is closed. Returns an exit code; a failed call
 * is told on stderr. */
struct ctl_call {
    const char *path;
    enum ctl_peer peer;
    const ProtobufCMessage *request;
    const ProtobufCMessageDescriptor *response;
    uint64_t deadline_ns; /* 0 = none */
    void (*message)(void *user, const ProtobufCMessage *msg);
    void *user;
};
int ctl_run(const char *address, const struct ctl_call *c);

/* access.c: what is shown to whom we call, and who is believed. CTL_OK or an exit code, told on
 * stderr. The other one is NULL without any of it. */
int ctl_access_open(const struct ctl_args *a);
struct bt_sec *ctl_access(enum ctl_peer peer);
void ctl_access_close(void);
/* Warns on stderr if our token is about to travel to another machine in the clear. */
void ctl_access_warn(const char *address);

int ctl_generate(const struct ctl_args *a);
int ctl_status(const struct ctl_args *a);
int ctl_node(const struct ctl_args *a);
int ctl_cordon(const struct ctl_args *a);
int ctl_uncordon(const struct ctl_args *a);
int ctl_drain(const struct ctl_args *a);
int ctl_scale(const struct ctl_args *a);
int ctl_flip(const struct ctl_args *a);
int ctl_canary(const struct ctl_args *a);
int ctl_promote(const struct ctl_args *a);
int ctl_rollback(const struct ctl_args *a);
int ctl_requests(const struct ctl_args *a);
int ctl_explain(const struct ctl_args *a);
int ctl_top(const struct ctl_args *a);
int ctl_cache(const struct ctl_args *a);
int ctl_doctor(const struct ctl_args *a);
int ctl_fit(const struct ctl_args *a);
int ctl_simulate(const struct ctl_args *a);
int ctl_bench(const struct ctl_args *a);
int ctl_completion(const struct ctl_args *a);
int ctl_man(const struct ctl_args *a);

#endif
