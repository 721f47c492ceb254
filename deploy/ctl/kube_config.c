/* Where the API server is and who we are there: kubeconfig files and service accounts. */
#include "deploy/ctl/kube.h"

#include "common/base/buf.h"

#include <errno.h>
#include <openssl/evp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <yaml.h>

#define FILE_MAX        (1u << 20)
#define SERVICE_ACCOUNT "/var/run/secrets/kubernetes.io/serviceaccount"

static int BT_PRINTF_ATTR(1, 2) bad(const char *fmt, ...)
{
    va_list ap;

    fputs("batonctl: ", stderr);
    va_start(ap, fmt);
    vfprintf(stderr, fmt, ap);
    va_end(ap);
    fputc('\n', stderr);
    return CTL_FAILED;
}

void kube_free(struct kube *k)
{
    char **texts[] = {&k->server, &k->ns, &k->ca, &k->cert, &k->key, &k->token};

    for (size_t i = 0; i < BT_ARRAY_LEN(texts); i++) {
        if (*texts[i]) {
            explicit_bzero(*texts[i], strlen(*texts[i]));
            free(*texts[i]);
        }
    }
    *k = (struct kube){0};
}

char *kube_read_file(const char *path)
{
    struct bt_buf b = {.max = FILE_MAX};
    FILE *f = fopen(path, "re");
    char part[4096];
    size_t n;
    int rc = BT_OK;

    if (!f) {
        bad("%s: %s", path, strerror(errno));
        return NULL;
    }
    while (rc == BT_OK && (n = fread(part, 1, sizeof(part), f)) > 0) {
        rc = bt_buf_add(&b, part, n);
    }
    rc = rc == BT_OK ? bt_buf_add(&b, "", 1) : rc;
    if (rc < 0 || ferror(f) || strlen(b.p) + 1 != b.n) {
        bad("%s: cannot be read, is longer than 1 MiB, or is no text", path);
        bt_buf_fini(&b);
    }
    fclose(f);
    return b.p;
}

/* --- YAML ------------------------------------------------------------------------------------ */

struct doc {
    yaml_document_t y;
    const char *path;
    char dir[4096]; /* of the file: relative paths begin there */
};

static yaml_node_t *get(struct doc *d, yaml_node_t *map, const char *key)
{
    if (!map || map->type != YAML_MAPPING_NODE) {
        return NULL;
    }
    for (yaml_node_pair_t *p = map->data.mapping.pairs.start; p < map->data.mapping.pairs.top;
         p++) {
        yaml_node_t *k = yaml_document_get_node(&d->y, p->key);

        if (k && k->type == YAML_SCALAR_NODE &&
            strcmp((const char *)k->data.scalar.value, key) == 0) {
            return yaml_document_get_node(&d->y, p->value);
        }
    }
    return NULL;
}

/* NULL: not there, empty, or no text. */
static const char *text(struct doc *d, yaml_node_t *map, const char *key)
{
    yaml_node_t *v = get(d, map, key);

    return v && v->type == YAML_SCALAR_NODE && v->data.scalar.length > 0
               ? (const char *)v->data.scalar.value
               : NULL;
}

/* The object `kind` of the entry called `name` in the list `kind`s. */
static yaml_node_t *named(struct doc *d, const char *kind, const char *name)
{
    char list_name[32];
    yaml_node_t *list;

    snprintf(list_name, sizeof(list_name), "%ss", kind);
    list = get(d, yaml_document_get_root_node(&d->y), list_name);
    if (!list || list->type != YAML_SEQUENCE_NODE || !name) {
        return NULL;
    }
    for (yaml_node_item_t *i = list->data.sequence.items.start; i < list->data.sequence.items.top;
         i++) {
        yaml_node_t *entry = yaml_document_get_node(&d->y, *i);
        const char *s = text(d, entry, "name");

        if (s && strcmp(s, name) == 0) {
            return get(d, entry, kind);
        }
    }
    return NULL;
}

/* --- fields ---------------------------------------------------------------------------------- */

static char *decode_base64(const char *s)
{
    size_t n = strlen(s), pad = 0;
    char *out = malloc(n / 4 * 3 + 4);
    int got = out && n % 4 == 0 && n < FILE_MAX
                  ? EVP_DecodeBlock((unsigned char *)out, (const unsigned char *)s, (int)n)
                  : -1;

    if (got < 0) {
        free(out);
        return NULL;
    }
    while (pad < 2 && n > pad && s[n - 1 - pad] == '=') {
        pad++;
    }
    out[(size_t)got - pad] = '\0';
    return out;
}

/* KEY-data (base64) or KEY (a file). */
static int pem(struct doc *d, yaml_node_t *map, const char *key, char **ret)
{
    char data_key[64], path[8400];
    const char *v;

    snprintf(data_key, sizeof(data_key), "%s-data", key);
    v = text(d, map, data_key);
    if (v) {
        *ret = decode_base64(v);
        return *ret ? CTL_OK : bad("%s: %s is no base64", d->path, data_key);
    }
    v = text(d, map, key);
    if (!v) {
        return CTL_OK;
    }
    snprintf(path, sizeof(path), "%s%s", v[0] == '/' ? "" : d->dir, v);
    *ret = kube_read_file(path);
    return *ret ? CTL_OK : CTL_FAILED;
}

static int refuse(struct doc *d, yaml_node_t *map, const char *what, const char *const *keys)
{
    for (size_t i = 0; keys[i]; i++) {
        const char *v = text(d, map, keys[i]);

        if (v && strcmp(v, "false") != 0) {
            return bad("%s: %s has %s, which batonctl does not take", d->path, what, keys[i]);
        }
    }
    return CTL_OK;
}

static int set_token(struct kube *k, const char *from)
{
    size_t n = strlen(from);

    while (n > 0 && strchr(" \r\n\t", from[n - 1])) {
        n--;
    }
    for (size_t i = 0; i < n; i++) {
        if (from[i] <= ' ' || from[i] > '~') {
            return bad("the token has characters that no token has");
        }
    }
    k->token = n ? strndup(from, n) : NULL;
    return n && k->token ? CTL_OK : bad("the token is empty");
}

static int set_token_file(struct kube *k, const char *path)
{
    char *s = kube_read_file(path);
    int code = s ? set_token(k, s) : CTL_FAILED;

    free(s);
    return code;
}

static int set_server(struct kube *k, const char *server)
{
    size_t n = strlen(server);

    if (strncmp(server, "https://", 8) != 0) {
        return bad("server %.200s: https:// alone is taken", server);
    }
    while (n > 8 && server[n - 1] == '/') {
        n--;
    }
    k->server = strndup(server, n);
    return k->server ? CTL_OK : CTL_FAILED;
}

static int read_cluster(struct doc *d, yaml_node_t *c, struct kube *k)
{
    static const char *const no[] = {"insecure-skip-tls-verify", "tls-server-name", "proxy-url",
                                     NULL};
    const char *server = text(d, c, "server");
    int code = refuse(d, c, "the cluster", no);

    if (code == CTL_OK && !server) {
        code = bad("%s: the cluster has no server", d->path);
    }
    code = code != CTL_OK ? code : set_server(k, server);
    return code != CTL_OK ? code : pem(d, c, "certificate-authority", &k->ca);
}

static int read_user(struct doc *d, yaml_node_t *u, const char *name, struct kube *k)
{
    static const char *const no[] = {"username", "password", "as", "as-uid", NULL};
    yaml_node_t *exec = get(d, u, "exec"), *provider = get(d, u, "auth-provider");
    const char *token = text(d, u, "token"), *file = text(d, u, "tokenFile");
    char path[8400];
    int code;

    if (exec || provider) {
        const char *what = exec ? text(d, exec, "command") : text(d, provider, "name");

        return bad(
            "%s: user %.80s gets its credentials from %s \"%.120s\", which batonctl does not run; "
            "give it a token, a tokenFile or a client certificate",
            d->path, name, exec ? "the program" : "the provider", what ? what : "?");
    }
    code = refuse(d, u, "the user", no);
    code = code != CTL_OK ? code : pem(d, u, "client-certificate", &k->cert);
    code = code != CTL_OK ? code : pem(d, u, "client-key", &k->key);
    if (code == CTL_OK && !k->cert != !k->key) {
        code =
            bad("%s: user %.80s has a client certificate or key without the other", d->path, name);
    }
    if (code == CTL_OK && file) { /* wins, as elsewhere */
        snprintf(path, sizeof(path), "%s%s", file[0] == '/' ? "" : d->dir, file);
        return set_token_file(k, path);
    }
    return code == CTL_OK && token ? set_token(k, token) : code;
}

static int read_context(struct doc *d, const char *name, struct kube *k)
{
    yaml_node_t *context, *cluster, *user;
    const char *ns;
    int code;

    name = name ? name : text(d, yaml_document_get_root_node(&d->y), "current-context");
    if (!name) {
        return bad("%s: no current-context; name one with --context", d->path);
    }
    context = named(d, "context", name);
    cluster = named(d, "cluster", text(d, context, "cluster"));
    user = named(d, "user", text(d, context, "user"));
    if (!context || !cluster || !user) {
        return bad("%s: no %s for context %.80s", d->path,
                   !context   ? "context"
                   : !cluster ? "cluster"
                              : "user",
                   name);
    }
    code = read_cluster(d, cluster, k);
    code = code != CTL_OK ? code : read_user(d, user, text(d, context, "user"), k);
    ns = text(d, context, "namespace");
    if (code == CTL_OK) {
        k->ns = strdup(ns ? ns : "default");
    }
    return code;
}

/* libyaml takes time by the square of the nesting. Brackets in texts count as well: no matter. */
static bool is_deep(const char *s)
{
    int depth = 0;

    for (; *s; s++) {
        depth += (*s == '[' || *s == '{') - (*s == ']' || *s == '}');
        if (depth > 100) {
            return true;
        }
    }
    return false;
}

int kube_config_read(const char *path, const char *context, struct kube *ret)
{
    struct doc d = {.path = path};
    const char *slash = strrchr(path, '/');
    yaml_parser_t parser;
    char *s = kube_read_file(path);
    int code = CTL_FAILED;

    if (s && is_deep(s)) {
        bad("%s: nested too deep", path);
        free(s);
        return CTL_FAILED;
    }
    if (!s || !yaml_parser_initialize(&parser)) {
        free(s);
        return CTL_FAILED;
    }
    snprintf(d.dir, sizeof(d.dir), "%.*s", slash ? (int)(slash - path + 1) : 0, path);
    yaml_parser_set_input_string(&parser, (const unsigned char *)s, strlen(s));
    if (yaml_parser_load(&parser, &d.y)) {
        code = read_context(&d, context, ret);
        yaml_document_delete(&d.y);
    } else {
        bad("%s: line %zu: %s", path, parser.problem_mark.line + 1,
            parser.problem ? parser.problem : "no YAML");
    }
    yaml_parser_delete(&parser);
    explicit_bzero(s, strlen(s));
    free(s);
    if (code != CTL_OK) {
        kube_free(ret);
    }
    return code;
}

/* --- which of them --------------------------------------------------------------------------- */

static int service_account(const char *dir, struct kube *k)
{
    const char *host = getenv("KUBERNETES_SERVICE_HOST"), *port = getenv("KUBERNETES_SERVICE_PORT");
    bool v6 = host && strchr(host, ':');
    char path[4200], server[400];
    int code;

    if (!host || !port) {
        return bad(
            "KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT are not set: this is no pod");
    }
    snprintf(server, sizeof(server), "https://%s%.250s%s:%.8s", v6 ? "[" : "", host, v6 ? "]" : "",
             port);
    snprintf(path, sizeof(path), "%.4000s/token", dir);
    code = set_server(k, server);
    code = code != CTL_OK ? code : set_token_file(k, path);
    if (code == CTL_OK) {
        snprintf(path, sizeof(path), "%.4000s/ca.crt", dir);
        k->ca = kube_read_file(path);
        snprintf(path, sizeof(path), "%.4000s/namespace", dir);
        k->ns = kube_read_file(path);
        code = k->ca && k->ns ? CTL_OK : CTL_FAILED;
    }
    if (code == CTL_OK) {
        k->ns[strcspn(k->ns, " \r\n")] = '\0';
    }
    return code;
}

static int choose(const struct ctl_args *a, struct kube *k)
{
    const char *env = getenv("KUBECONFIG"), *home = getenv("HOME");
    char path[4200];

    if (a->kubeconfig) {
        return kube_config_read(a->kubeconfig, a->context, k);
    }
    if (a->service_account) {
        return service_account(a->service_account, k);
    }
    if (env && env[0]) {
        return strchr(env, ':') ? bad("KUBECONFIG is a list: name one file with --kubeconfig")
                                : kube_config_read(env, a->context, k);
    }
    if (!a->context && getenv("KUBERNETES_SERVICE_HOST") &&
        access(SERVICE_ACCOUNT "/token", R_OK) == 0) {
        return service_account(SERVICE_ACCOUNT, k);
    }
    snprintf(path, sizeof(path), "%.4000s/.kube/config", home ? home : "");
    return kube_config_read(path, a->context, k);
}

/* A name of Kubernetes: it becomes part of a path. */
static bool name_ok(const char *s)
{
    size_t n = strlen(s);

    return n > 0 && n <= 253 && strspn(s, "abcdefghijklmnopqrstuvwxyz0123456789-.") == n &&
           s[0] != '.' && !strstr(s, "..");
}

int kube_load(const struct ctl_args *a, struct kube *ret)
{
    int code;

    *ret = (struct kube){0};
    code = choose(a, ret);
    if (code == CTL_OK && a->ns) {
        free(ret->ns);
        ret->ns = strdup(a->ns);
    }
    if (code == CTL_OK && (!ret->ns || !name_ok(ret->ns))) {
        code = bad("namespace \"%.80s\" is no name", ret->ns ? ret->ns : "");
    }
    if (code != CTL_OK) {
        kube_free(ret);
    }
    return code;
}
