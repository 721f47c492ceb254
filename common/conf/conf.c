/* Collects configuration from its sources in rising order: defaults, file, environment, flags.
 *
 * Every pass marks the options it has set, so that a second setting in the same source is an error.
 * Nothing here trusts its input: sizes are bounded before anything is copied. */
#include "common/conf/conf_int.h"
#include "common/conf/value.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#define FILE_MAX   (1u << 20)
#define LINE_MAX_  4096u
#define SECRET_MAX 4096u
#define KEY_MAX    64u

/* One pass over one source. */
struct pass {
    struct bt_conf *conf;
    struct conf_origin from;
    bool *seen; /* one per option */
};

/* --- finding options ------------------------------------------------------------------------- */

/* Index of `key`, or of the secret option that key with "_file" behind stands for; -1 if none. */
static int find(const struct bt_conf_spec *spec, struct bt_str key, bool *ret_indirect)
{
    for (size_t i = 0; i < spec->n_opts; i++) {
        struct bt_str k = bt_str_of(spec->opts[i].key);

        if (bt_str_eq(key, k)) {
            *ret_indirect = false;
            return (int)i;
        }
        if (spec->opts[i].flags & BT_CONF_SECRET && key.n == k.n + 5 &&
            memcmp(key.p, k.p, k.n) == 0 && memcmp(key.p + k.n, "_file", 5) == 0) {
            *ret_indirect = true;
            return (int)i;
        }
    }
    return -1;
}

/* Closest known key for a hint: longest common prefix plus suffix, at least half of the word. */
static const char *nearest(const struct bt_conf_spec *spec, struct bt_str key)
{
    const char *best = NULL;
    size_t best_score = key.n / 2;

    for (size_t i = 0; i < spec->n_opts; i++) {
        struct bt_str k = bt_str_of(spec->opts[i].key);
        size_t max = BT_MIN(k.n, key.n), head = 0, tail = 0;

        while (head < max && k.p[head] == key.p[head]) {
            head++;
        }
        while (tail < max - head && k.p[k.n - 1 - tail] == key.p[key.n - 1 - tail]) {
            tail++;
        }
        if (head + tail > best_score) {
            best_score = head + tail;
            best = spec->opts[i].key;
        }
    }
    return best;
}

/* Reads a bounded regular file whole; the caller frees *ret_p. `what` begins the error text. */
static int
read_file(const char *what, const char *path, size_t max, struct bt_buf *ret_b, struct bt_err *err)
{
    /* O_NONBLOCK: a FIFO must not hang the start */
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    struct bt_buf b = {.max = max};
    struct stat st;
    ssize_t got;
    int rc;

    if (fd < 0) {
        return BT_FAIL_SYS(err, BT_E_CONFIG, "%s %.100s", what, path);
    }
    if (fstat(fd, &st) != 0 || !S_ISREG(st.st_mode)) {
        rc = BT_FAIL(err, BT_E_CONFIG, "%s %.100s: not a regular file", what, path);
        goto fail;
    }
    do {
        char chunk[4096];

        got = read(fd, chunk, sizeof(chunk));
        if (got < 0 && errno != EINTR) {
            rc = BT_FAIL_SYS(err, BT_E_CONFIG, "%s %.100s", what, path);
            goto fail;
        }
        rc = got > 0 ? bt_buf_add(&b, chunk, (size_t)got) : BT_OK;
        if (rc < 0) {
            rc = BT_FAIL(err, BT_E_CONFIG, "%s %.100s: larger than %zu bytes", what, path, max);
            goto fail;
        }
    } while (got != 0);
    close(fd);
    *ret_b = b;
    return BT_OK;

fail:
    bt_buf_fini(&b);
    close(fd);
    return rc;
}

/* --- one setting ----------------------------------------------------------------------------- */

static int assign_from_path(struct pass *p, size_t idx, struct bt_str path, struct bt_err *err)
{
    BT_AUTO(bt_free_ptr) char *z = strndup(path.n ? path.p : "", path.n);
    struct bt_buf b;
    struct bt_str text;
    int rc;

    if (!z) {
        return BT_FAIL(err, BT_E_NOMEM, "configuration: out of memory");
    }
    if (path.n == 0) {
        return conf_assign(p->conf, idx, path, &p->from, err);
    }
    rc = read_file("secret file", z, SECRET_MAX, &b, err);
    if (rc < 0) {
        return rc;
    }
    text = bt_buf_str(&b);
    if (text.n > 0 && text.p[text.n - 1] == '\n') {
        text.n--;
    }
    if (text.n > 0 && memchr(text.p, 0, text.n)) {
        rc = BT_FAIL(err, BT_E_CONFIG, "secret file %.100s: holds a zero byte", z);
    } else {
        rc = conf_assign(p->conf, idx, text, &p->from, err);
    }
    bt_buf_fini(&b);
    return rc;
}

static int set(struct pass *p, struct bt_str key, struct bt_str value, struct bt_err *err)
{
    const struct bt_conf_spec *spec = &p->conf->spec;
    bool indirect = false;
    int idx = find(spec, key, &indirect);
    char where[96];

    conf_origin_text(&p->from, where, sizeof(where));
    if (idx < 0) {
        const char *hint = nearest(spec, key);

        return BT_FAIL(err, BT_E_CONFIG, "%s: unknown key \"%.*s\"%s%s%s; --help lists all", where,
                       (int)BT_MIN(key.n, KEY_MAX), key.p, hint ? " (did you mean \"" : "",
                       hint ? hint : "", hint ? "\"?)" : "");
    }
    if (p->seen[idx]) {
        return BT_FAIL(err, BT_E_CONFIG, "%s: %s is given twice", where, spec->opts[idx].key);
    }
    p->seen[idx] = true;
    if (!indirect && value.n > 0 && spec->opts[idx].flags & BT_CONF_SECRET) {
        return BT_FAIL(err, BT_E_CONFIG,
                       "%s: %s: a secret is read from a file, since others can see flags and "
                       "environments: give %s_file, a path",
                       where, spec->opts[idx].key, spec->opts[idx].key);
    }
    return indirect ? assign_from_path(p, (size_t)idx, value, err)
                    : conf_assign(p->conf, (size_t)idx, value, &p->from, err);
}

/* --- file ------------------------------------------------------------------------------------ */

static bool blank(char c)
{
    return c == ' ' || c == '\t';
}

/* Value in quotes at s (first byte is the quote); BT_E_FORMAT if it does not end well. */
static int unquote(struct bt_str s, struct bt_buf *out)
{
    size_t i = 1;
    int rc;

    for (; i < s.n && s.p[i] != '"'; i++) {
        if (s.p[i] == '\\') {
            i++;
            if (i >= s.n || (s.p[i] != '"' && s.p[i] != '\\')) {
                return BT_E_FORMAT;
            }
        }
        rc = bt_buf_add(out, &s.p[i], 1);
        if (rc < 0) {
            return rc;
        }
    }
    if (i >= s.n) {
        return BT_E_FORMAT;
    }
    for (i++; i < s.n && blank(s.p[i]); i++) {
    }
    return i == s.n || s.p[i] == '#' ? BT_OK : BT_E_FORMAT;
}

static struct bt_str bare_value(struct bt_str s)
{
    for (size_t i = 0; i < s.n; i++) {
        if (s.p[i] == '#' && (i == 0 || blank(s.p[i - 1]))) {
            s.n = i;
        }
    }
    while (s.n > 0 && blank(s.p[s.n - 1])) {
        s.n--;
    }
    return s;
}

static int read_line(struct pass *p, struct bt_str s, struct bt_err *err)
{
    const char *file = p->from.name, *eq;
    unsigned line = p->from.line;
    struct bt_buf quoted = {0};
    struct bt_str key;
    int rc;

    if (s.n > LINE_MAX_) {
        return BT_FAIL(err, BT_E_CONFIG, "file %.60s line %u: longer than %u bytes", file, line,
                       LINE_MAX_);
    }
    for (size_t i = 0; i < s.n; i++) {
        if (((unsigned char)s.p[i] < 0x20 && s.p[i] != '\t') || s.p[i] == 0x7f) {
            return BT_FAIL(err, BT_E_CONFIG, "file %.60s line %u: control character at column %zu",
                           file, line, i + 1);
        }
    }
    for (; s.n > 0 && blank(s.p[0]); s.p++, s.n--) {
    }
    if (s.n == 0 || s.p[0] == '#') {
        return BT_OK;
    }
    eq = memchr(s.p, '=', s.n);
    if (!eq) {
        return BT_FAIL(err, BT_E_CONFIG, "file %.60s line %u: \"%.*s\": must be key = value", file,
                       line, (int)BT_MIN(s.n, KEY_MAX), s.p);
    }
    key = (struct bt_str){s.p, (size_t)(eq - s.p)};
    while (key.n > 0 && blank(key.p[key.n - 1])) {
        key.n--;
    }
    s = (struct bt_str){eq + 1, s.n - (size_t)(eq + 1 - s.p)};
    for (; s.n > 0 && blank(s.p[0]); s.p++, s.n--) {
    }
    if (s.n == 0 || s.p[0] != '"') {
        return set(p, key, bare_value(s), err);
    }
    rc = unquote(s, &quoted);
    if (rc < 0) {
        rc = BT_FAIL(err, BT_E_CONFIG, "file %.60s line %u: %.*s: quotes must be closed and end it",
                     file, line, (int)BT_MIN(key.n, KEY_MAX), key.p);
    } else {
        rc = set(p, key, bt_buf_str(&quoted), err);
    }
    bt_buf_fini(&quoted);
    return rc;
}

static int read_text(struct pass *p, struct bt_str text, struct bt_err *err)
{
    int rc = BT_OK;

    p->from.line = 0;
    while (rc == BT_OK && text.n > 0) {
        const char *nl = memchr(text.p, '\n', text.n);
        struct bt_str line = {text.p, nl ? (size_t)(nl - text.p) : text.n};

        text.n = nl ? text.n - (line.n + 1) : 0;
        text.p = nl ? nl + 1 : text.p;
        if (line.n > 0 && line.p[line.n - 1] == '\r') {
            line.n--;
        }
        p->from.line++;
        rc = read_line(p, line, err);
    }
    return rc;
}

/* --- environment ----------------------------------------------------------------------------- */

/* Names that a cluster injects for its services, and the tests' own. */
static bool env_foreign(struct bt_str name, const char *value)
{
    char z[128];
    const char *port;

    if (name.n >= sizeof(z)) {
        return false;
    }
    memcpy(z, name.p, name.n);
    z[name.n] = '\0';
    if (strncmp(z, "BATON_TEST_", 11) == 0 || strstr(z, "_SERVICE_HOST") ||
        strstr(z, "_SERVICE_PORT")) {
        return true;
    }
    port = strstr(z, "_PORT");
    if (!port) {
        return false;
    }
    if (port[5] == '\0') {
        return strstr(value, "://") != NULL;
    }
    return port[5] == '_' && port[6] >= '0' && port[6] <= '9';
}

/* Index of the option that an environment name stands for; -1 if none. */
static int env_find(const struct bt_conf_spec *spec, struct bt_str name, char *key, size_t n)
{
    char env[KEY_MAX + 16];

    for (size_t i = 0; i < spec->n_opts; i++) {
        snprintf(key, n, "%s", spec->opts[i].key);
        conf_env_name(key, env, sizeof(env));
        if (bt_str_eq(name, bt_str_of(env))) {
            return (int)i;
        }
        if (spec->opts[i].flags & BT_CONF_SECRET) {
            snprintf(key, n, "%s_file", spec->opts[i].key);
            conf_env_name(key, env, sizeof(env));
            if (bt_str_eq(name, bt_str_of(env))) {
                return (int)i;
            }
        }
    }
    return -1;
}

static int read_env(struct pass *p, char *const *envp, struct bt_err *err)
{
    int rc = BT_OK;

    for (; rc == BT_OK && envp && *envp; envp++) {
        const char *eq = strchr(*envp, '=');
        struct bt_str name = {*envp, eq ? (size_t)(eq - *envp) : 0};
        char key[KEY_MAX + 8];

        if (name.n < 6 || memcmp(name.p, "BATON_", 6) != 0 ||
            bt_str_eq(name, BT_STR("BATON_CONFIG"))) {
            continue;
        }
        if (env_find(&p->conf->spec, name, key, sizeof(key)) >= 0) {
            rc = set(p, bt_str_of(key), bt_str_of(eq + 1), err);
        } else if (!env_foreign(name, eq + 1)) {
            rc = BT_FAIL(err, BT_E_CONFIG, "environment: unknown key %.*s; --help lists all",
                         (int)BT_MIN(name.n, KEY_MAX), name.p);
        }
    }
    return rc;
}

/* --- flags ----------------------------------------------------------------------------------- */

struct flag {
    struct bt_str key, value;
};

/* Splits the flag at argv[0] (and its value at argv[1]); returns the words used, 0 on error. */
static int
read_flag(const struct bt_conf_spec *spec, char *const *argv, struct flag *ret, char *key)
{
    const char *word = argv[0], *eq = strchr(word, '=');
    size_t n = eq ? (size_t)(eq - word) : strlen(word);
    bool indirect = false, dummy;
    int idx;

    if (n < 3 || n - 2 > KEY_MAX + 5 || word[0] != '-' || word[1] != '-') {
        return 0;
    }
    for (size_t i = 2; i < n; i++) {
        key[i - 2] = (char)(word[i] == '-' ? '_' : word[i]);
    }
    ret->key = (struct bt_str){key, n - 2};
    if (eq) {
        ret->value = bt_str_of(eq + 1);
        return 1;
    }
    idx = find(spec, ret->key, &indirect);
    if (idx >= 0 && spec->opts[idx].type == BT_CONF_T_BOOL &&
        (!argv[1] || bt_read_bool(bt_str_of(argv[1]), &dummy) < 0)) {
        ret->value = BT_STR("true");
        return 1;
    }
    ret->value = bt_str_of(argv[1]);
    return argv[1] ? 2 : 1;
}

static enum bt_conf_action action_of(const char *word)
{
    if (strcmp(word, "--help") == 0 || strcmp(word, "-h") == 0) {
        return BT_CONF_HELP;
    }
    if (strcmp(word, "--help-config") == 0) {
        return BT_CONF_HELP_CONFIG;
    }
    return strcmp(word, "--version") == 0 ? BT_CONF_VERSION : BT_CONF_RUN;
}

/* Walks the flags. p NULL: only finds --config and the actions; else sets options. */
static int read_flags(struct bt_conf *conf, struct pass *p, char *const *argv, struct bt_err *err)
{
    int used = 1, rc = BT_OK;

    for (argv += argv[0] ? 1 : 0; rc == BT_OK && *argv; argv += used) {
        char key[KEY_MAX + 8];
        struct flag f;
        enum bt_conf_action action = action_of(*argv);

        used = 1;
        if (action != BT_CONF_RUN) {
            conf->action = action;
            return BT_OK;
        }
        used = read_flag(&conf->spec, argv, &f, key);
        if (used == 0) {
            rc = BT_FAIL(err, BT_E_CONFIG, "flag: \"%.64s\": must be --key=value or --key value",
                         *argv);
        } else if (!f.value.p) {
            rc = BT_FAIL(err, BT_E_CONFIG, "flag: --%.*s: its value is missing", (int)f.key.n,
                         f.key.p);
        } else if (!bt_str_eq(f.key, BT_STR("config"))) {
            rc = p ? set(p, f.key, f.value, err) : BT_OK;
        } else if (!p && conf->path) {
            rc = BT_FAIL(err, BT_E_CONFIG, "flag: --config is given twice");
        } else if (!p) {
            conf->path = strdup(f.value.p);
            rc = conf->path ? BT_OK : BT_FAIL(err, BT_E_NOMEM, "configuration: out of memory");
        }
    }
    return rc;
}

/* --- all of it ------------------------------------------------------------------------------- */

/* The table is ours: what is wrong in it is a bug. */
static void check_table(const struct bt_conf_spec *spec)
{
    char a[KEY_MAX + 16], b[KEY_MAX + 16];

    for (size_t i = 0; i < spec->n_opts; i++) {
        BT_BUG_ON(strlen(spec->opts[i].key) > KEY_MAX || !spec->opts[i].help);
        BT_BUG_ON(spec->opts[i].type == BT_CONF_T_ENUM && !spec->opts[i].names);
        BT_BUG_ON(spec->opts[i].min > spec->opts[i].max);
        conf_env_name(spec->opts[i].key, a, sizeof(a));
        for (size_t j = 0; j < i; j++) {
            conf_env_name(spec->opts[j].key, b, sizeof(b));
            BT_BUG_ON(strcmp(a, b) == 0);
        }
    }
}

static int read_config_file(struct pass *p, struct bt_err *err)
{
    struct bt_buf b;
    int rc = read_file("configuration file", p->conf->path, FILE_MAX, &b, err);

    if (rc < 0) {
        return rc;
    }
    p->from.name = p->conf->path;
    rc = read_text(p, bt_buf_str(&b), err);
    bt_buf_fini(&b);
    return rc;
}

static int set_defaults(struct bt_conf *conf)
{
    const struct conf_origin from = {.source = CONF_DEFAULT};
    struct bt_err err;

    for (size_t i = 0; i < conf->spec.n_opts; i++) {
        const char *def = conf->spec.opts[i].def;
        int rc = def ? conf_assign(conf, i, bt_str_of(def), &from, &err) : BT_OK;

        if (rc == BT_E_NOMEM) {
            return rc;
        }
        BT_BUG_ON(rc < 0);
    }
    return BT_OK;
}

static int check_required(const struct bt_conf *conf, struct bt_err *err)
{
    for (size_t i = 0; i < conf->spec.n_opts; i++) {
        if (!conf->slots[i].text) {
            return BT_FAIL(err, BT_E_CONFIG, "%s must be given: %s", conf->spec.opts[i].key,
                           conf->spec.opts[i].help);
        }
    }
    return BT_OK;
}

/* With argv: all sources; without: `text` is the file. */
static int read_sources(struct bt_conf *conf,
                        char *const *argv,
                        char *const *envp,
                        const struct conf_origin *text_from,
                        struct bt_str text,
                        struct bt_err *err)
{
    size_t n = conf->spec.n_opts;
    BT_AUTO(bt_free_ptr) bool *seen = bt_calloc(n + 1, sizeof(*seen));
    struct pass p = {.conf = conf, .from = {.source = CONF_FILE}, .seen = seen};
    int rc;

    if (!seen) {
        return BT_FAIL(err, BT_E_NOMEM, "configuration: out of memory");
    }
    if (!argv) {
        p.from = *text_from;
        return read_text(&p, text, err);
    }
    rc = conf->path ? read_config_file(&p, err) : BT_OK;
    if (rc < 0) {
        return rc;
    }
    memset(seen, 0, n);
    p.from = (struct conf_origin){.source = CONF_ENV};
    rc = read_env(&p, envp, err);
    if (rc < 0) {
        return rc;
    }
    memset(seen, 0, n);
    p.from = (struct conf_origin){.source = CONF_FLAG};
    return read_flags(conf, &p, argv, err);
}

static int path_from_env(struct bt_conf *conf, char *const *envp, struct bt_err *err)
{
    for (; !conf->path && envp && *envp; envp++) {
        if (strncmp(*envp, "BATON_CONFIG=", 13) == 0 && (*envp)[13]) {
            conf->path = strdup(*envp + 13);
            if (!conf->path) {
                return BT_FAIL(err, BT_E_NOMEM, "configuration: out of memory");
            }
        }
    }
    return BT_OK;
}

static struct bt_conf *conf_create(const struct bt_conf_spec *spec, struct bt_err *err)
{
    struct bt_conf *conf = bt_calloc(1, sizeof(*conf));

    check_table(spec);
    if (conf) {
        conf->spec = *spec;
        conf->slots = bt_calloc(spec->n_opts + 1, sizeof(*conf->slots));
    }
    if (!conf || !conf->slots || set_defaults(conf) < 0) {
        BT_FAIL(err, BT_E_NOMEM, "configuration: out of memory");
        bt_conf_destroy(conf);
        return NULL;
    }
    return conf;
}

int bt_conf_load(const struct bt_conf_spec *spec,
                 char *const *argv,
                 char *const *envp,
                 struct bt_conf **ret_conf,
                 struct bt_err *err)
{
    struct bt_conf *conf = conf_create(spec, err);
    int rc;

    if (!conf) {
        return BT_E_NOMEM;
    }
    rc = read_flags(conf, NULL, argv, err);
    if (rc == BT_OK && conf->action == BT_CONF_RUN) {
        rc = path_from_env(conf, envp, err);
        if (rc == BT_OK) {
            rc = read_sources(conf, argv, envp, NULL, (struct bt_str){0}, err);
        }
        if (rc == BT_OK) {
            rc = check_required(conf, err);
        }
    }
    if (rc < 0) {
        bt_conf_destroy(conf);
        return rc;
    }
    *ret_conf = conf;
    return BT_OK;
}

int bt_conf_load_text(const struct bt_conf_spec *spec,
                      const char *name,
                      struct bt_str text,
                      struct bt_conf **ret_conf,
                      struct bt_err *err)
{
    struct conf_origin from = {.source = CONF_FILE, .name = name};
    struct bt_conf *conf = conf_create(spec, err);
    int rc;

    if (!conf) {
        return BT_E_NOMEM;
    }
    rc = read_sources(conf, NULL, NULL, &from, text, err);
    if (rc == BT_OK) {
        rc = check_required(conf, err);
    }
    if (rc < 0) {
        bt_conf_destroy(conf);
        return rc;
    }
    *ret_conf = conf;
    return BT_OK;
}

enum bt_conf_action bt_conf_action(const struct bt_conf *conf)
{
    return conf->action;
}

void bt_conf_destroy(struct bt_conf *conf)
{
    if (!conf) {
        return;
    }
    for (size_t i = 0; conf->slots && i < conf->spec.n_opts; i++) {
        const struct bt_conf_opt *opt = &conf->spec.opts[i];
        void *field = (char *)conf->spec.out + opt->offset;

        if (opt->type == BT_CONF_T_LIST) {
            conf_list_free(field);
        } else if (opt->type == BT_CONF_T_STR || opt->type == BT_CONF_T_ADDR) {
            *(char **)field = NULL;
        }
        if (conf->slots[i].text && opt->flags & BT_CONF_SECRET) {
            explicit_bzero(conf->slots[i].text, strlen(conf->slots[i].text));
        }
        free(conf->slots[i].text);
    }
    free(conf->slots);
    free(conf->path);
    free(conf);
}
