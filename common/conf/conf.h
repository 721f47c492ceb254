/* Table-driven configuration: one table per binary names every option once; reading, checking,
 * help, the example file and the log line all come from it.
 *
 * Sources in rising order: the default in the table; the file named by --config or BATON_CONFIG
 * (`key = value` lines); the environment (BATON_REDIS_ADDRESS for "redis.address"); flags
 * (--redis.address=VALUE or --redis.address VALUE, '-' and '_' alike). Whatever is unknown, given
 * twice in one source, malformed or out of range is an error that names source, line, key, value
 * and what is allowed, also where a higher source overrides it.
 *
 * File syntax: one `key = value` a line; blanks around both are dropped; '#' at the start of a line
 * or after a blank begins a comment; a value in double quotes keeps blanks and '#', and knows \"
 * and \\. At most 1 MiB, 4096 bytes a line, no control characters.
 *
 * A secret option "x" is given as "x_file": a path whose content, less one trailing line end, is
 * the value. "x" itself takes nothing but an empty value: flags show in process titles. Secrets are
 * masked in logs and errors.
 *
 * In the environment, names that clusters inject for services (BATON_*_SERVICE_HOST,
 * BATON_*_SERVICE_PORT*, BATON_*_PORT=tcp://.., BATON_*_PORT_80_TCP*) and BATON_TEST_* are passed
 * over; every other unknown BATON_ name is an error.
 *
 * Used by one thread at start-up. */
#ifndef BT_CONF_CONF_H
#define BT_CONF_CONF_H

#include "common/base/rc.h"

#include <stdio.h>

enum bt_conf_type {
    BT_CONF_T_STR,      /* char *, never NULL; range = length in bytes */
    BT_CONF_T_INT,      /* int64_t */
    BT_CONF_T_BYTES,    /* uint64_t, bytes */
    BT_CONF_T_DURATION, /* uint64_t, nanoseconds; range in ns too */
    BT_CONF_T_BOOL,     /* bool */
    BT_CONF_T_ENUM,     /* int, index into names */
    BT_CONF_T_LIST,     /* struct bt_conf_list; text separated by commas; range = items */
    BT_CONF_T_ADDR,     /* char *: "host:port", "[v6]:port", "unix:/path"; empty if min is 0 */
};

struct bt_conf_list {
    char **items; /* n strings, none empty */
    size_t n;
};

enum { BT_CONF_SECRET = 1 };

struct bt_conf_opt {
    const char *key; /* lower case words joined by '.' and '_' */
    enum bt_conf_type type;
    unsigned flags;
    size_t offset;            /* of the field in the binary's config struct */
    const char *def;          /* as text; NULL = must be given */
    int64_t min, max;         /* inclusive */
    const char *const *names; /* ENUM: choices, ends with NULL */
    const char *help;         /* one sentence */
};

/* Rows. S = config struct, f = its field (may be nested: node.log_level); the type of the field is
 * checked by the compiler. */
#define BT_CONF_AT_(S, f, T)                                                                       \
    (offsetof(S, f) +                                                                              \
     0 * sizeof(char[__builtin_types_compatible_p(__typeof__(((S *)0)->f), T) ? 1 : -1]))
#define BT_CONF_STR(S, f, key, def, max, help)                                                     \
    {                                                                                              \
        (key), BT_CONF_T_STR, 0, BT_CONF_AT_(S, f, char *), (def), 0, (max), NULL, (help)          \
    }
#define BT_CONF_SECRET_STR(S, f, key, max, help)                                                   \
    {                                                                                              \
        (key), BT_CONF_T_STR, BT_CONF_SECRET, BT_CONF_AT_(S, f, char *), "", 0, (max), NULL,       \
            (help)                                                                                 \
    }
#define BT_CONF_INT(S, f, key, def, min, max, help)                                                \
    {                                                                                              \
        (key), BT_CONF_T_INT, 0, BT_CONF_AT_(S, f, int64_t), (def), (min), (max), NULL, (help)     \
    }
#define BT_CONF_BYTES(S, f, key, def, min, max, help)                                              \
    {                                                                                              \
        (key), BT_CONF_T_BYTES, 0, BT_CONF_AT_(S, f, uint64_t), (def), (min), (max), NULL, (help)  \
    }
#define BT_CONF_DURATION(S, f, key, def, min_ms, max_ms, help)                                     \
    {                                                                                              \
        (key), BT_CONF_T_DURATION, 0, BT_CONF_AT_(S, f, uint64_t), (def), (min_ms)*1000000ll,      \
            (max_ms)*1000000ll, NULL, (help)                                                       \
    }
#define BT_CONF_BOOL(S, f, key, def, help)                                                         \
    {                                                                                              \
        (key), BT_CONF_T_BOOL, 0, BT_CONF_AT_(S, f, bool), (def), 0, 1, NULL, (help)               \
    }
#define BT_CONF_ENUM(S, f, key, def, names, help)                                                  \
    {                                                                                              \
        (key), BT_CONF_T_ENUM, 0, BT_CONF_AT_(S, f, int), (def), 0, 0, (names), (help)             \
    }
#define BT_CONF_LIST(S, f, key, def, max_items, help)                                              \
    {                                                                                              \
        (key), BT_CONF_T_LIST, 0, BT_CONF_AT_(S, f, struct bt_conf_list), (def), 0, (max_items),   \
            NULL, (help)                                                                           \
    }
/* An address that may be left empty, and one that may not. */
#define BT_CONF_ADDR(S, f, key, def, help)                                                         \
    {                                                                                              \
        (key), BT_CONF_T_ADDR, 0, BT_CONF_AT_(S, f, char *), (def), 0, 300, NULL, (help)           \
    }
#define BT_CONF_ADDR_REQUIRED(S, f, key, def, help)                                                \
    {                                                                                              \
        (key), BT_CONF_T_ADDR, 0, BT_CONF_AT_(S, f, char *), (def), 1, 300, NULL, (help)           \
    }

struct bt_conf_spec {
    const char *program; /* "baton-router" */
    const char *summary; /* one sentence for --help */
    const struct bt_conf_opt *opts;
    size_t n_opts;
    void *out; /* the binary's config struct, zeroed; filled by load */
};

enum bt_conf_action {
    BT_CONF_RUN,
    BT_CONF_HELP,        /* --help */
    BT_CONF_HELP_CONFIG, /* --help-config */
    BT_CONF_VERSION,     /* --version */
};

struct bt_conf; /* owns the strings in `out`, remembers where each value came from */

/* Reads all sources. argv[0] is skipped; envp may be NULL. On BT_OK the caller owns *ret_conf and
 * `out` is complete if bt_conf_action is BT_CONF_RUN. BT_E_CONFIG with a full text otherwise.
 * A table that is wrong itself (double key, bad default) is a programmer error and aborts. Reads
 * files, does not block on anything else. */
int bt_conf_load(const struct bt_conf_spec *spec,
                 char *const *argv,
                 char *const *envp,
                 struct bt_conf **ret_conf,
                 struct bt_err *err) BT_MUST_USE;
/* As bt_conf_load with the text of a file as the only source; for tests and fuzzing. `name` stands
 * in errors. */
int bt_conf_load_text(const struct bt_conf_spec *spec,
                      const char *name,
                      struct bt_str text,
                      struct bt_conf **ret_conf,
                      struct bt_err *err) BT_MUST_USE;
enum bt_conf_action bt_conf_action(const struct bt_conf *conf);
/* Frees the strings that `out` points to and zeroes `out`. NULL is fine. */
void bt_conf_destroy(struct bt_conf *conf);

/* Writes what an action other than RUN asks for. --help-config writes a whole example file that
 * bt_conf_load accepts. */
void bt_conf_print(const struct bt_conf_spec *spec, enum bt_conf_action action, FILE *to);
/* Logs the effective configuration (event=config), secrets masked, not rate limited. */
void bt_conf_log(const struct bt_conf *conf);

#endif
