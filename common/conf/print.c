/* What the table says about itself: --help, the example file, --version, and the log line. */
#include "common/conf/conf_int.h"
#include "common/obs/log.h"

#include <stdlib.h>

#define LOG_LINE_BYTES 700

static void print_help(const struct bt_conf_spec *spec, FILE *to)
{
    fprintf(to,
            "%s: %s\n\nusage: %s [--config FILE] [--key=value | --key value]...\n"
            "       %s --help | --help-config | --version\n\noptions:\n",
            spec->program, spec->summary, spec->program, spec->program);
    for (size_t i = 0; i < spec->n_opts; i++) {
        const struct bt_conf_opt *opt = &spec->opts[i];
        char allowed[160];

        conf_allowed(opt, allowed, sizeof(allowed));
        if (opt->flags & BT_CONF_SECRET) {
            fprintf(to, "  --%s_file\n      %s\n      a path whose content is %s; default empty\n",
                    opt->key, opt->help, allowed);
            continue;
        }
        fprintf(to, "  --%s\n      %s\n      %s; ", opt->key, opt->help, allowed);
        if (!opt->def) {
            fprintf(to, "must be given\n");
        } else {
            fprintf(to, "default %s\n", opt->def[0] ? opt->def : "empty");
        }
    }
    fprintf(to, "\nEvery option may stand in the file (key = value), in the environment\n"
                "(BATON_KEY, with _ for .) or here; the latter wins. Secrets are read from\n"
                "files alone. --help-config prints an example file.\n");
}

/* Text as it must stand in a file: quoted where bare text would read differently. */
static void print_value(const char *text, FILE *to)
{
    if (!strpbrk(text, " \t#\"\\")) {
        fputs(text, to);
        return;
    }
    fputc('"', to);
    for (; *text; text++) {
        if (*text == '"' || *text == '\\') {
            fputc('\\', to);
        }
        fputc(*text, to);
    }
    fputc('"', to);
}

static void print_example(const struct bt_conf_spec *spec, FILE *to)
{
    fprintf(to, "# %s: every option with its default.\n", spec->program);
    for (size_t i = 0; i < spec->n_opts; i++) {
        const struct bt_conf_opt *opt = &spec->opts[i];
        char allowed[160], env[96];

        conf_allowed(opt, allowed, sizeof(allowed));
        conf_env_name(opt->key, env, sizeof(env));
        if (opt->flags & BT_CONF_SECRET) {
            fprintf(
                to,
                "\n# %s\n# Must be a path whose content is %s. Environment: %s_FILE\n%s_file =\n",
                opt->help, allowed, env, opt->key);
            continue;
        }
        fprintf(to, "\n# %s\n# Must be %s. Environment: %s\n", opt->help, allowed, env);
        if (!opt->def) {
            fprintf(to, "# Must be given.\n# %s =\n", opt->key);
            continue;
        }
        fprintf(to, "%s =%s", opt->key, opt->def[0] ? " " : "");
        print_value(opt->def, to);
        fputc('\n', to);
    }
}

void bt_conf_print(const struct bt_conf_spec *spec, enum bt_conf_action action, FILE *to)
{
    switch (action) {
    case BT_CONF_HELP:
        print_help(spec, to);
        break;
    case BT_CONF_HELP_CONFIG:
        print_example(spec, to);
        break;
    case BT_CONF_VERSION:
        fprintf(to, "%s %s\n", spec->program, BT_VERSION);
        break;
    case BT_CONF_RUN:
        break;
    }
}

/* key="value" with quotes inside made harmless, cut at 120 bytes. */
static void log_pair(const struct bt_conf *conf, size_t idx, char *buf, size_t n)
{
    static const char *const sources[] = {"default", "file", "env", "flag"};
    const struct bt_conf_opt *opt = &conf->spec.opts[idx];
    const struct conf_slot *slot = &conf->slots[idx];
    const char *text = slot->text ? slot->text : "";
    char value[121];
    size_t at = 0;

    if (opt->flags & BT_CONF_SECRET && text[0]) {
        text = CONF_MASK;
    }
    for (; *text && at + 1 < sizeof(value); text++) {
        value[at++] = (char)(*text == '"' ? '\'' : *text);
    }
    value[at] = '\0';
    snprintf(buf, n, "%s=\"%s\"%s%s ", opt->key, value, slot->source ? "@" : "",
             slot->source ? sources[slot->source] : "");
}

void bt_conf_log(const struct bt_conf *conf)
{
    char line[LOG_LINE_BYTES], pair[256];
    size_t used = 0;

    for (size_t i = 0; i <= conf->spec.n_opts; i++) {
        bool last = i == conf->spec.n_opts;

        if (!last) {
            log_pair(conf, i, pair, sizeof(pair));
        }
        if (used > 0 && (last || used + strlen(pair) >= sizeof(line))) {
            struct bt_log_site fresh = {0}; /* one per line: this log is complete or useless */

            if (BT_LOG_INFO <= bt_log_threshold) {
                bt_log_write(&fresh, BT_LOG_INFO, "config", "%s", line);
            }
            used = 0;
        }
        if (!last) {
            used += (size_t)snprintf(line + used, sizeof(line) - used, "%s", pair);
        }
    }
}
