/* batonctl completion, man: made from the tables of commands.c, so that they cannot be out of date.
 */
#include "deploy/ctl/show.h"

#include <ctype.h>

/* --- shells ---------------------------------------------------------------------------------- */

static void bash_options(const struct ctl_command *c)
{
    bool must;

    for (size_t i = 0; i < ctl_n_options; i++) {
        if (ctl_takes(c, &ctl_options[i], &must)) {
            printf(" --%s", ctl_options[i].name);
        }
    }
}

/* Of commands whose first word is one of a few. */
static const char *subcommands(const struct ctl_command *c)
{
    return strcmp(c->name, "cache") == 0        ? "rates find flush"
           : strcmp(c->name, "completion") == 0 ? "bash zsh fish"
                                                : "";
}

/* The value is something in the file system. */
static bool is_file(const struct ctl_option *o)
{
    return o->value && (strcmp(o->value, "FILE") == 0 || strcmp(o->value, "PATH") == 0 ||
                        strcmp(o->value, "FOLDER") == 0);
}

static void bash(void)
{
    printf("# bash completion of batonctl; source it, or put it into\n"
           "# /usr/share/bash-completion/completions/batonctl\n"
           "_batonctl() {\n"
           "    local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD-1]}\n"
           "    case $prev in\n");
    for (size_t i = 0; i < ctl_n_options; i++) {
        const struct ctl_option *o = &ctl_options[i];

        if (o->kind == CTL_K_CHOICE) {
            printf("    --%s%s%c) COMPREPLY=($(compgen -W '", o->name, o->letter ? "|-" : "",
                   o->letter ? o->letter : ' ');
            for (int k = 0; o->choices[k]; k++) {
                printf(k ? " %s" : "%s", o->choices[k]);
            }
            printf("' -- \"$cur\")); return ;;\n");
        } else if (o->kind != CTL_K_FLAG) {
            printf("    --%s) %s return ;;\n", o->name,
                   is_file(o) ? "COMPREPLY=($(compgen -f -- \"$cur\"));" : "COMPREPLY=();");
        }
    }
    printf("    esac\n    if [ \"$COMP_CWORD\" -eq 1 ]; then\n"
           "        COMPREPLY=($(compgen -W '");
    for (size_t i = 0; i < ctl_n_commands; i++) {
        printf("%s ", ctl_commands[i].name);
    }
    printf("--help --version' -- \"$cur\"))\n        return\n    fi\n"
           "    case ${COMP_WORDS[1]} in\n");
    for (size_t i = 0; i < ctl_n_commands; i++) {
        const struct ctl_command *c = &ctl_commands[i];

        printf("    %s) COMPREPLY=($(compgen -W '%s", c->name, subcommands(c));
        bash_options(c);
        printf("' -- \"$cur\")) ;;\n");
    }
    printf("    esac\n"
           "    [ ${#COMPREPLY[@]} -gt 0 ] || COMPREPLY=($(compgen -f -- \"$cur\"))\n"
           "}\n"
           "complete -F _batonctl batonctl\n");
}

/* Text between single quotes of a shell; brackets and colons have a meaning for zsh. */
static void quoted(const char *s, bool zsh)
{
    for (; *s; s++) {
        if (*s == '\'') {
            fputs("'\\''", stdout);
        } else {
            if (zsh && strchr("[]:\\", *s)) {
                fputc('\\', stdout);
            }
            fputc(*s, stdout);
        }
    }
}

static void zsh(void)
{
    bool must;

    printf("#compdef batonctl\n_batonctl() {\n    local -a commands\n    commands=(\n");
    for (size_t i = 0; i < ctl_n_commands; i++) {
        printf("        '%s:", ctl_commands[i].name);
        quoted(ctl_commands[i].summary, true);
        printf("'\n");
    }
    printf("    )\n    if (( CURRENT == 2 )); then\n"
           "        _describe command commands\n        return\n    fi\n    case $words[2] in\n");
    for (size_t i = 0; i < ctl_n_commands; i++) {
        const struct ctl_command *c = &ctl_commands[i];

        printf("    %s) _arguments", c->name);
        for (size_t k = 0; k < ctl_n_options; k++) {
            const struct ctl_option *o = &ctl_options[k];

            if (!ctl_takes(c, o, &must)) {
                continue;
            }
            printf(" '--%s[", o->name);
            quoted(o->help, true);
            printf("]");
            if (o->kind == CTL_K_CHOICE) {
                printf(":%s:(", o->value);
                for (int n = 0; o->choices[n]; n++) {
                    printf(n ? " %s" : "%s", o->choices[n]);
                }
                printf(")");
            } else if (o->value) {
                printf(":%s:%s", o->value, is_file(o) ? "_files" : "");
            }
            printf("'");
        }
        if (subcommands(c)[0]) {
            printf(" '2:what:(%s)'", subcommands(c));
        }
        printf(" '*:file:_files' ;;\n");
    }
    printf("    esac\n}\n_batonctl \"$@\"\n");
}

static void fish(void)
{
    bool must;

    printf("complete -c batonctl -n __fish_use_subcommand -f\n");
    for (size_t i = 0; i < ctl_n_commands; i++) {
        const struct ctl_command *c = &ctl_commands[i];

        printf("complete -c batonctl -n __fish_use_subcommand -a %s -d '", c->name);
        quoted(c->summary, false);
        printf("'\n");
        if (subcommands(c)[0]) {
            printf("complete -c batonctl -n '__fish_seen_subcommand_from %s' -f -a '%s'\n", c->name,
                   subcommands(c));
        }
        for (size_t k = 0; k < ctl_n_options; k++) {
            const struct ctl_option *o = &ctl_options[k];

            if (!ctl_takes(c, o, &must)) {
                continue;
            }
            printf("complete -c batonctl -n '__fish_seen_subcommand_from %s' -l %s", c->name,
                   o->name);
            if (o->letter) {
                printf(" -s %c", o->letter);
            }
            if (o->kind == CTL_K_CHOICE) {
                printf(" -x -a '");
                for (int n = 0; o->choices[n]; n++) {
                    printf(n ? " %s" : "%s", o->choices[n]);
                }
                printf("'");
            } else if (o->kind != CTL_K_FLAG) {
                printf(" -r");
            }
            printf(" -d '");
            quoted(o->help, false);
            printf("'\n");
        }
    }
}

int ctl_completion(const struct ctl_args *a)
{
    if (strcmp(a->words[0], "bash") == 0) {
        bash();
    } else if (strcmp(a->words[0], "zsh") == 0) {
        zsh();
    } else if (strcmp(a->words[0], "fish") == 0) {
        fish();
    } else {
        fprintf(stderr, "batonctl: completion %s: there is bash, zsh and fish\n", a->words[0]);
        return CTL_USAGE;
    }
    return CTL_OK;
}

/* --- man page -------------------------------------------------------------------------------- */

/* Dashes and a leading dot have a meaning for roff. */
static void roff(const char *s)
{
    bool start = true;

    for (; *s; s++) {
        if (*s == '-') {
            fputs("\\-", stdout);
        } else if (*s == '\\') {
            fputs("\\e", stdout);
        } else {
            if (start && (*s == '.' || *s == '\'')) {
                fputs("\\&", stdout);
            }
            fputc(*s, stdout);
        }
        start = *s == '\n';
    }
}

static void man_command(const struct ctl_command *c)
{
    bool must;

    printf(".SS batonctl %s", c->name);
    if (c->words[0]) {
        fputc(' ', stdout);
        roff(c->words);
    }
    fputc('\n', stdout);
    roff(c->summary);
    printf(".\n");
    if (c->details) {
        printf(".PP\n.nf\n");
        roff(c->details);
        printf(".fi\n");
    }
    for (size_t i = 0; i < ctl_n_options; i++) {
        const struct ctl_option *o = &ctl_options[i];

        if (ctl_takes(c, o, &must) && strcmp(o->name, "help") != 0) {
            printf(".TP\n.B ");
            if (o->letter) {
                printf("\\-%c, ", o->letter);
            }
            printf("\\-\\-");
            roff(o->name);
            if (o->value) {
                printf(" \\fI");
                roff(o->value);
                printf("\\fR");
            }
            fputc('\n', stdout);
            roff(o->help);
            if (o->env) {
                printf(" (or %s)", o->env);
            }
            if (ctl_default_of(c, o)) {
                printf(" (default ");
                roff(ctl_default_of(c, o));
                printf(")");
            }
            printf("%s.\n", must ? "; must be given" : "");
        }
    }
}

int ctl_man(const struct ctl_args *a)
{
    (void)a;
    printf(".TH BATONCTL 1 \"\" \"baton " BT_VERSION "\" \"Baton\"\n"
           ".SH NAME\nbatonctl \\- look at a Baton cluster and operate it\n"
           ".SH SYNOPSIS\n.B batonctl\n.I COMMAND\n[\\fIOPTION\\fR...]\n"
           ".SH DESCRIPTION\nTalks to one router, and to nodes by the addresses that it tells. "
           "Every command answers\n.BR \\-\\-help .\nMessages go to standard error; with\n"
           ".B \\-o json\nstandard output is one JSON value a line or empty.\n"
           ".SH COMMANDS\n");
    for (size_t i = 0; i < ctl_n_commands; i++) {
        man_command(&ctl_commands[i]);
    }
    printf(".SH EXIT STATUS\n");
    for (int i = 0; i < CTL_EXIT_COUNT; i++) {
        printf(".TP\n.B %d\n", i);
        roff(ctl_exit_texts[i]);
        printf(".\n");
    }
    return CTL_OK;
}
