/* Arguments by the tables of commands.c: reading, checking, usage. */
#include "common/conf/value.h"
#include "deploy/ctl/ctl.h"

#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

/* The list of the command's options has the name, maybe with a '!'. */
static bool lists(const struct ctl_command *c, const char *name, bool *ret_must)
{
    size_t n = strlen(name);
    const char *p = c->options;

    *ret_must = false;
    for (size_t len; *p; p += len + (p[len] == ' ')) {
        len = strcspn(p, " ");
        if (strncmp(p, name, n) == 0 && (len == n || (len == n + 1 && p[n] == '!'))) {
            *ret_must = len == n + 1;
            return true;
        }
    }
    return false;
}

bool ctl_takes(const struct ctl_command *c, const struct ctl_option *o, bool *ret_must)
{
    bool must; /* of whom it calls */

    return lists(c, o->name, ret_must) || strcmp(o->name, "help") == 0 ||
           (o->calls && (lists(c, "router", &must) || lists(c, "node", &must)));
}

/* --- usage ----------------------------------------------------------------------------------- */

const char *ctl_default_of(const struct ctl_command *c, const struct ctl_option *o)
{
    return c->timeout && strcmp(o->name, "timeout") == 0 ? c->timeout : o->def;
}

static void show_option(FILE *to, const struct ctl_command *c, const struct ctl_option *o)
{
    const char *def = ctl_default_of(c, o);
    char left[64];

    snprintf(left, sizeof(left), "%s%c%s--%s%s%s", o->letter ? "-" : "",
             o->letter ? o->letter : ' ', o->letter ? ", " : "   ", o->name, o->value ? " " : "",
             o->value ? o->value : "");
    fprintf(to, "  %-25s %s", left, o->help);
    if (o->env) {
        fprintf(to, " (or %s)", o->env);
    }
    fprintf(to, def ? " (default %s)\n" : "\n", def);
}

static void usage_line(FILE *to, const struct ctl_command *c, const char *lead)
{
    bool must;

    fprintf(to, "%sbatonctl %s%s%s", lead, c->name, c->words[0] ? " " : "", c->words);
    for (size_t i = 0; i < ctl_n_options; i++) {
        const struct ctl_option *o = &ctl_options[i];

        if (o->letter != 'h' && !o->calls && ctl_takes(c, o, &must)) {
            fprintf(to, must ? " --%s%s%s" : " [--%s%s%s]", o->name, o->value ? " " : "",
                    o->value ? o->value : "");
        }
    }
    fputc('\n', to);
}

int ctl_bad_usage(const struct ctl_command *c)
{
    if (c) {
        usage_line(stderr, c, "usage: ");
        fprintf(stderr, "batonctl %s --help says more\n", c->name);
    } else {
        fputs("usage: batonctl COMMAND [OPTION...]; batonctl --help lists the commands\n", stderr);
    }
    return CTL_USAGE;
}

void ctl_usage(FILE *to, const struct ctl_command *c)
{
    bool must;

    if (c) {
        usage_line(to, c, "usage: ");
        fprintf(to, "\n%s\n%s%s\n", c->summary, c->details ? "\n" : "",
                c->details ? c->details : "");
        for (size_t i = 0; i < ctl_n_options; i++) {
            if (ctl_takes(c, &ctl_options[i], &must)) {
                show_option(to, c, &ctl_options[i]);
            }
        }
        return;
    }
    fputs("usage: batonctl COMMAND [OPTION...]; batonctl COMMAND --help says more\n\n", to);
    for (size_t i = 0; i < ctl_n_commands; i++) {
        fprintf(to, "  %-10s %s\n", ctl_commands[i].name, ctl_commands[i].summary);
    }
    fputs("\n  --version  shows the version\n\nexit codes:\n", to);
    for (int i = 0; i < CTL_EXIT_COUNT; i++) {
        fprintf(to, "  %d  %s\n", i, ctl_exit_texts[i]);
    }
}

static int BT_PRINTF_ATTR(2, 3) bad(const struct ctl_command *c, const char *fmt, ...)
{
    va_list ap;

    fputs("batonctl: ", stderr);
    va_start(ap, fmt);
    vfprintf(stderr, fmt, ap);
    va_end(ap);
    fputc('\n', stderr);
    return ctl_bad_usage(c);
}

/* --- reading --------------------------------------------------------------------------------- */

static int set(struct ctl_args *a, const struct ctl_option *o, const char *value)
{
    char *at = (char *)a + o->offset;
    struct bt_addr addr;

    switch (o->kind) {
    case CTL_K_ADDR:
        *(const char **)at = value;
        return bt_addr_read(bt_str_of(value), &addr);
    case CTL_K_FLAG:
        *(bool *)at = true;
        return BT_OK;
    case CTL_K_TEXT:
        *(const char **)at = value;
        return BT_OK;
    case CTL_K_COUNT:
        return bt_read_int(bt_str_of(value), o->min, o->max, (int64_t *)at);
    case CTL_K_TIME:
        return bt_read_duration(bt_str_of(value), (uint64_t *)at);
    case CTL_K_BYTES:
        return bt_read_bytes(bt_str_of(value), (uint64_t *)at);
    case CTL_K_CHOICE:
        for (int i = 0; o->choices[i]; i++) {
            if (strcmp(o->choices[i], value) == 0) {
                *(int *)at = i;
                return BT_OK;
            }
        }
        break;
    }
    return BT_E_INVALID;
}

/* What set() takes, in words; `buf` holds it where it has to be made. */
static const char *allowed(const struct ctl_option *o, char *buf, size_t n)
{
    size_t at = 0;

    switch (o->kind) {
    case CTL_K_ADDR:
        return "HOST:PORT or unix:PATH";
    case CTL_K_COUNT:
        snprintf(buf, n, o->max == INT64_MAX ? "from %lld" : "%lld to %lld", (long long)o->min,
                 (long long)o->max);
        return buf;
    case CTL_K_TIME:
        return "a number and its unit, as in 300ms or 5s";
    case CTL_K_BYTES:
        return "bytes, or a number and its unit, as in 64K";
    case CTL_K_CHOICE:
        buf[0] = '\0';
        for (int i = 0; o->choices[i] && at < n; i++) {
            at += (size_t)snprintf(buf + at, n - at, "%s%s", i ? ", " : "", o->choices[i]);
        }
        return buf;
    case CTL_K_FLAG:
    case CTL_K_TEXT:
        break;
    }
    return "text";
}

/* "--name", "--name=value" or "-n"; *ret_value is what stands behind the '=' or NULL. */
static const struct ctl_option *find_option(const char *arg, const char **ret_value)
{
    const char *eq = strchr(arg, '=');
    size_t n = eq ? (size_t)(eq - arg) : strlen(arg);

    *ret_value = eq ? eq + 1 : NULL;
    for (size_t i = 0; i < ctl_n_options; i++) {
        const struct ctl_option *o = &ctl_options[i];

        if ((n > 2 && strncmp(arg, "--", 2) == 0 && strlen(o->name) == n - 2 &&
             memcmp(arg + 2, o->name, n - 2) == 0) ||
            (n == 2 && arg[1] == o->letter)) {
            return o;
        }
    }
    return NULL;
}

static const struct ctl_command *find_command(const char *name)
{
    for (size_t i = 0; i < ctl_n_commands; i++) {
        if (strcmp(ctl_commands[i].name, name) == 0) {
            return &ctl_commands[i];
        }
    }
    return NULL;
}

static int check_all_there(const struct ctl_args *a, uint64_t given)
{
    const struct ctl_command *c = a->command;
    bool must;

    for (size_t i = 0; i < ctl_n_options; i++) {
        if (ctl_takes(c, &ctl_options[i], &must) && must && !(given >> i & 1)) {
            return bad(c, "no --%s", ctl_options[i].name);
        }
    }
    if (a->n_words < c->min_words) {
        return bad(c, "missing: %s", c->words);
    }
    return CTL_OK;
}

/* One argument of a command, and its value, which may be the next one. */
static int
read_one(const struct ctl_command *c, char **argv, int *i, struct ctl_args *a, uint64_t *given)
{
    const char *value;
    const struct ctl_option *o;
    char words[160];
    bool must;

    if (argv[*i][0] != '-' || argv[*i][1] == '\0') {
        if (a->n_words == c->max_words || a->n_words == CTL_MAX_WORDS) {
            return bad(c, "too many arguments: %s", argv[*i]);
        }
        a->words[a->n_words++] = argv[*i];
        return CTL_OK;
    }
    o = find_option(argv[*i], &value);
    if (!o || !ctl_takes(c, o, &must) || (!o->value && value)) {
        return bad(c, "unknown option %s", argv[*i]);
    }
    if (o->value && !value) {
        value = argv[++*i];
        if (!value) {
            return bad(c, "no value for --%s", o->name);
        }
    }
    if (*given >> (o - ctl_options) & 1) {
        return bad(c, "--%s is given twice", o->name);
    }
    *given |= 1ull << (o - ctl_options);
    if (set(a, o, value) < 0) {
        return bad(c, "--%s takes %s (%s), not: %s", o->name, o->value,
                   allowed(o, words, sizeof(words)), value);
    }
    return CTL_OK;
}

int ctl_read_args(int argc, char **argv, struct ctl_args *ret)
{
    const struct ctl_command *c;
    uint64_t given = 0;
    char words[160];
    int rc;

    BT_BUG_ON(ctl_n_options > 64);
    *ret = (struct ctl_args){0};
    if (argc < 2) {
        return bad(NULL, "no command");
    }
    if (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0) {
        ret->help = true;
        return CTL_OK;
    }
    c = ret->command = find_command(argv[1]);
    if (!c) {
        return bad(NULL, "unknown command %s", argv[1]);
    }
    for (size_t i = 0; i < ctl_n_options; i++) {
        const struct ctl_option *o = &ctl_options[i];
        const char *value = o->env ? getenv(o->env) : NULL;
        const char *def = ctl_default_of(c, o);

        if (value && value[0]) {
            if (set(ret, o, value) < 0) {
                return bad(c, "%s takes %s (%s), not: %s", o->env, o->value,
                           allowed(o, words, sizeof(words)), value);
            }
        } else if (def) {
            rc = set(ret, o, def);
            BT_BUG_ON(rc < 0);
        }
    }
    for (int i = 2; i < argc; i++) {
        rc = read_one(c, argv, &i, ret, &given);
        if (rc != CTL_OK) {
            return rc;
        }
        if (ret->help) {
            return CTL_OK;
        }
    }
    for (size_t i = 0; i < ctl_n_options; i++) {
        if (strcmp(ctl_options[i].name, "router") == 0) {
            ret->router_given = given >> i & 1;
        }
    }
    return check_all_there(ret, given);
}
