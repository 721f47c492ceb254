/* Inside of the supervisor: the processes of one host, by role. One thread (main); the thread
 * "signal" only asks to stop. */
#ifndef SV_SUPERVISOR_INT_H
#define SV_SUPERVISOR_INT_H

#include "common/base/rc.h"
#include "common/ds/list.h"
#include "common/thr/time.h"
#include "deploy/supervisor/protocol.h"

#include <jansson.h>
#include <sys/types.h>

#define SV_MAX_ROLES    64
#define SV_MAX_REPLICAS 256
#define SV_MAX_ARGS     256
#define SV_NAME_MAX     48

enum sv_state {
#define X(name, text, next, meaning) SV_##name,
#include "deploy/supervisor/child_states.def"
#undef X
    SV_STATE_COUNT,
};
const char *sv_state_name(enum sv_state s);
bool sv_state_allowed(enum sv_state from, enum sv_state to);

/* Processes that are alike. Owner: the supervisor. */
struct sv_role {
    char name[SV_NAME_MAX + 1];
    bool single;     /* one process that has the role's name; cannot be scaled */
    bool canary;     /* made by `canary`, gone with `rollback` or `promote` */
    unsigned wanted; /* replicas */
    char **command;  /* n_command texts with placeholders {name}, {index}, {run} */
    size_t n_command;
    char *ready;           /* likewise: the file that says that a process is ready; NULL = none */
    char *release;         /* announced with --release; NULL = the binary's own */
    unsigned generation;   /* counts changes of the command */
    uint64_t stop_ns;      /* from the first SIGTERM (drain) to the second */
    struct bt_list childs; /* struct sv_child.link, by index */
};

/* One process. In its role's list until it is gone. */
struct sv_child {
    struct bt_list link;
    struct sv_role *role;
    unsigned index, generation;
    char name[SV_NAME_MAX + 8];
    enum sv_state state;
    bool unwanted;       /* is not started again */
    bool ours;           /* started by this supervisor, so that its exit status can be read */
    pid_t pid;           /* 0 = none */
    int pidfd;           /* -1 = none */
    uint64_t started_at; /* by /proc, to know it again */
    unsigned n_signals;  /* STOPPING: sent so far */
    uint64_t since_ns, due_ns;
    unsigned n_failures; /* in a row */
    uint64_t n_restarts;
    int exit_status; /* of wait(2); -1 = never ended or not known */
};

struct sv_client; /* control.c */

struct sv {
    const char *run; /* folder for logs, ready files, state */
    bool boot_retry;
    uint64_t client_idle_ns;
    struct sv_role *roles[SV_MAX_ROLES]; /* in the order of their start */
    size_t n_roles;
    size_t boot;   /* roles below have been started */
    bool booted;   /* all roles were ready once */
    bool stopping; /* all of it */
    bool failed;   /* a process ended before `booted`, and that is the end */
    bool dirty;    /* the state file is outdated */
    bool quit;     /* atomic; asked for by a signal */
    int wake_fd, lock_fd, listen_fd;
    char socket[108];
    struct bt_list clients;
    void (*ready)(void *arg); /* once, when booted */
    void *ready_arg;
};

/* --- config.c --- */
/* Reads roles from a JSON file. BT_E_CONFIG names what is wrong. */
int sv_config_read(struct sv *sv, const char *path, struct bt_err *err) BT_MUST_USE;
/* Of role `base`, with another binary (NULL = the same) and release. Placed behind it.
 * BT_E_EXISTS: another role has the name. */
int sv_role_canary(struct sv *sv,
                   const struct sv_role *base,
                   const char *binary,
                   const char *release,
                   struct bt_err *err) BT_MUST_USE;
/* The canary of a role, and the role that a canary of this name would be of; NULL: there is none.
 */
struct sv_role *sv_role_canary_of(const struct sv *sv, const struct sv_role *base);
struct sv_role *sv_role_base_of(const struct sv *sv, const char *canary);
/* The role takes the command and release of `from`. */
int sv_role_take(struct sv_role *role, const struct sv_role *from) BT_MUST_USE;
void sv_role_free(struct sv_role *role);
/* Takes an empty role out. */
void sv_role_remove(struct sv *sv, struct sv_role *role);
struct sv_role *sv_role_find(const struct sv *sv, const char *name);
/* Text with placeholders filled in; the caller frees it; NULL without memory. */
char *sv_expand(const struct sv *sv, const struct sv_child *c, const char *text);

/* --- child.c --- */
/* A process of the role with this index, not started yet. NULL without memory. */
struct sv_child *sv_child_add(struct sv_role *role, unsigned index);
void sv_child_start(struct sv *sv, struct sv_child *c);
/* One that an earlier supervisor has started. False: it is not there any more. */
bool sv_child_adopt(struct sv *sv, struct sv_child *c, pid_t pid, uint64_t started_at);
void sv_child_stop(struct sv *sv, struct sv_child *c);
/* What time and the process itself have brought. *ret_next_ns is lowered to when to look again.
 * A child that is gone is freed. */
void sv_child_turn(struct sv *sv, struct sv_child *c, uint64_t *ret_next_ns);
void sv_child_free(struct sv_child *c);

/* --- pool.c --- */
/* Runs until everything has ended. */
void sv_run(struct sv *sv);
void sv_stop(struct sv *sv); /* any thread */
/* Another number of replicas; `first`, if it is one of the role's, is stopped before others. */
void sv_role_scale(struct sv *sv, struct sv_role *role, unsigned n);
struct sv_child *sv_child_find(const struct sv *sv, const char *name);
unsigned sv_role_ready(const struct sv_role *role);

/* --- state.c: the file that outlives a supervisor --- */
void sv_state_write(struct sv *sv);
/* Takes over what an earlier supervisor of this folder has left: numbers, canaries, processes. */
int sv_state_read(struct sv *sv, struct bt_err *err) BT_MUST_USE;

/* --- control.c --- */
int sv_control_open(struct sv *sv, const char *path, struct bt_err *err) BT_MUST_USE;
void sv_control_close(struct sv *sv);
struct pollfd;
/* Descriptors to be polled, at most `max`; and what came of it. */
size_t sv_control_poll(struct sv *sv, struct pollfd *fds, size_t max);
/* *ret_next_ns is lowered to when to look again. */
void sv_control_turn(struct sv *sv, uint64_t *ret_next_ns);

#endif
