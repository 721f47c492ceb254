/* Roles: read from the configuration, made as canaries, compared by name. */
#include "deploy/supervisor/supervisor.h"

#include "common/base/buf.h"
#include "common/cluster/member.h"
#include "common/conf/value.h"
#include "common/file/json.h"

#include <stdio.h>
#include <stdlib.h>

#define STOP_NS (40 * BT_NS_PER_S) /* longer than a node's own drain_timeout */

void sv_role_free(struct sv_role *role)
{
    if (!role) {
        return;
    }
    for (size_t i = 0; i < role->n_command; i++) {
        free(role->command[i]);
    }
    free(role->command);
    free(role->ready);
    free(role->release);
    free(role);
}

struct sv_role *sv_role_find(const struct sv *sv, const char *name)
{
    for (size_t i = 0; i < sv->n_roles; i++) {
        if (strcmp(sv->roles[i]->name, name) == 0) {
            return sv->roles[i];
        }
    }
    return NULL;
}

static struct sv_role *role_make(void)
{
    struct sv_role *role = bt_calloc(1, sizeof(*role));

    if (role) {
        role->stop_ns = STOP_NS;
        bt_list_init(&role->childs);
    }
    return role;
}

static int role_insert(struct sv *sv, struct sv_role *role, size_t at, struct bt_err *err)
{
    if (sv->n_roles == SV_MAX_ROLES) {
        return BT_FAIL(err, BT_E_CONFIG, "more than %d roles", SV_MAX_ROLES);
    }
    memmove(&sv->roles[at + 1], &sv->roles[at], (sv->n_roles - at) * sizeof(sv->roles[0]));
    sv->roles[at] = role;
    sv->n_roles++;
    return BT_OK;
}

void sv_role_remove(struct sv *sv, struct sv_role *role)
{
    for (size_t i = 0; i < sv->n_roles; i++) {
        if (sv->roles[i] == role) {
            sv->n_roles--;
            memmove(&sv->roles[i], &sv->roles[i + 1], (sv->n_roles - i) * sizeof(sv->roles[0]));
            sv->boot -= i < sv->boot;
            sv_role_free(role);
            return;
        }
    }
}

/* --- the file -------------------------------------------------------------------------------- */

static int set_text(char **to, const json_t *v)
{
    const char *s = json_string_value(v);

    *to = s ? strdup(s) : NULL;
    return *to ? BT_OK : BT_E_INVALID;
}

static int set_command(struct sv_role *role, const json_t *v)
{
    size_t n = json_array_size(v);

    if (n == 0 || n > SV_MAX_ARGS) {
        return BT_E_INVALID;
    }
    role->command = bt_calloc(n, sizeof(*role->command));
    for (size_t i = 0; role->command && i < n; i++, role->n_command++) {
        if (set_text(&role->command[i], json_array_get(v, i)) < 0) {
            return BT_E_INVALID;
        }
    }
    return role->command ? BT_OK : BT_E_NOMEM;
}

static int set_field(struct sv_role *role, const char *key, const json_t *v)
{
    if (strcmp(key, "name") == 0) {
        const char *s = json_string_value(v);

        if (!s || strlen(s) > SV_NAME_MAX || !bt_member_name_ok(bt_str_of(s))) {
            return BT_E_INVALID;
        }
        snprintf(role->name, sizeof(role->name), "%s", s);
        return BT_OK;
    }
    if (strcmp(key, "single") == 0 && json_is_boolean(v)) {
        role->single = json_is_true(v);
        return BT_OK;
    }
    if (strcmp(key, "replicas") == 0 && json_is_integer(v) && json_integer_value(v) >= 0 &&
        json_integer_value(v) <= SV_MAX_REPLICAS) {
        role->wanted = (unsigned)json_integer_value(v);
        return BT_OK;
    }
    if (strcmp(key, "command") == 0) {
        return set_command(role, v);
    }
    if (strcmp(key, "ready") == 0) {
        return set_text(&role->ready, v);
    }
    if (strcmp(key, "stop") == 0 && json_is_string(v)) {
        return bt_read_duration(bt_str_of(json_string_value(v)), &role->stop_ns);
    }
    return BT_E_INVALID;
}

static int read_role(struct sv *sv, json_t *v, struct bt_err *err)
{
    struct sv_role *role = role_make();
    const char *key;
    json_t *field;
    int rc = role ? BT_OK : BT_FAIL(err, BT_E_NOMEM, "no memory for a role");

    if (rc < 0) {
        return rc;
    }
    role->wanted = 1;
    json_object_foreach(v, key, field)
    {
        if (rc == BT_OK && set_field(role, key, field) < 0) {
            rc = BT_FAIL(err, BT_E_CONFIG, "role %zu (%s): bad or unknown field \"%.40s\"",
                         sv->n_roles, role->name, key);
        }
    }
    if (rc == BT_OK && (!role->name[0] || !role->command)) {
        rc = BT_FAIL(err, BT_E_CONFIG, "role %zu has no %s", sv->n_roles,
                     role->name[0] ? "command" : "name");
    } else if (rc == BT_OK && role->single && role->wanted > 1) {
        rc = BT_FAIL(err, BT_E_CONFIG, "role %s is single and has %u replicas", role->name,
                     role->wanted);
    } else if (rc == BT_OK && sv_role_find(sv, role->name)) {
        rc = BT_FAIL(err, BT_E_CONFIG, "role %s is there twice", role->name);
    }
    rc = rc < 0 ? rc : role_insert(sv, role, sv->n_roles, err);
    if (rc < 0) {
        sv_role_free(role);
    }
    return rc;
}

static int read_file(const char *path, struct bt_buf *to, struct bt_err *err)
{
    FILE *f = fopen(path, "re");
    char part[4096];
    size_t n;
    int rc = BT_OK;

    if (!f) {
        return BT_FAIL_SYS(err, BT_E_CONFIG, "%.120s", path);
    }
    while (rc == BT_OK && (n = fread(part, 1, sizeof(part), f)) > 0) {
        rc = bt_buf_add(to, part, n);
    }
    if (rc == BT_OK && ferror(f)) {
        rc = BT_FAIL_SYS(err, BT_E_CONFIG, "%.120s", path);
    }
    fclose(f);
    return rc;
}

int sv_config_read(struct sv *sv, const char *path, struct bt_err *err)
{
    const struct bt_json_caps caps = {.bytes = 1u << 20, .values = 20000, .depth = 8};
    struct bt_buf text = {.max = 1u << 20};
    json_t *doc = NULL, *roles, *v;
    const char *key;
    size_t i;
    int rc = read_file(path, &text, err);

    rc = rc < 0 ? rc : bt_json_parse(bt_buf_str(&text), path, &caps, &doc, err);
    if (rc < 0) {
        goto out;
    }
    json_object_foreach(doc, key, v)
    {
        if (strcmp(key, "roles") != 0) {
            rc = BT_FAIL(err, BT_E_CONFIG, "%.100s: unknown field \"%.40s\"", path, key);
            goto out;
        }
    }
    roles = json_object_get(doc, "roles");
    if (json_array_size(roles) == 0) {
        rc = BT_FAIL(err, BT_E_CONFIG, "%.120s: no roles", path);
        goto out;
    }
    json_array_foreach(roles, i, v)
    {
        rc = rc < 0 ? rc : read_role(sv, v, err);
    }

out:
    json_decref(doc);
    bt_buf_fini(&text);
    return rc;
}

/* --- canaries -------------------------------------------------------------------------------- */

static void canary_name(const struct sv_role *base, char ret[SV_NAME_MAX + 1])
{
    snprintf(ret, SV_NAME_MAX + 1, "%.*s-canary", SV_NAME_MAX - 7, base->name);
}

struct sv_role *sv_role_canary_of(const struct sv *sv, const struct sv_role *base)
{
    char name[SV_NAME_MAX + 1];
    struct sv_role *role;

    canary_name(base, name);
    role = sv_role_find(sv, name);
    return role && role->canary && sv_role_base_of(sv, name) == base ? role : NULL;
}

struct sv_role *sv_role_base_of(const struct sv *sv, const char *canary)
{
    char name[SV_NAME_MAX + 1];

    for (size_t i = 0; i < sv->n_roles; i++) {
        canary_name(sv->roles[i], name);
        if (!sv->roles[i]->canary && strcmp(name, canary) == 0) {
            return sv->roles[i];
        }
    }
    return NULL;
}

static int copy_command(struct sv_role *to, const struct sv_role *from, const char *binary)
{
    char **command = bt_calloc(from->n_command, sizeof(*command));
    size_t n = 0;

    for (; command && n < from->n_command; n++) {
        command[n] = strdup(n == 0 && binary ? binary : from->command[n]);
        if (!command[n]) {
            break;
        }
    }
    if (!command || n < from->n_command) {
        while (n > 0) {
            free(command[--n]);
        }
        free(command);
        return BT_E_NOMEM;
    }
    for (size_t i = 0; i < to->n_command; i++) {
        free(to->command[i]);
    }
    free(to->command);
    to->command = command;
    to->n_command = n;
    return BT_OK;
}

int sv_role_take(struct sv_role *role, const struct sv_role *from)
{
    char *release = from->release ? strdup(from->release) : NULL;

    if ((from->release && !release) || copy_command(role, from, NULL) < 0) {
        free(release);
        return BT_E_NOMEM;
    }
    free(role->release);
    role->release = release;
    role->generation++;
    return BT_OK;
}

int sv_role_canary(struct sv *sv,
                   const struct sv_role *base,
                   const char *binary,
                   const char *release,
                   struct bt_err *err)
{
    struct sv_role *role = role_make();
    size_t at = 0;
    int rc = role ? BT_OK : BT_E_NOMEM;

    if (rc < 0) {
        return BT_FAIL(err, rc, "no memory for a canary");
    }
    canary_name(base, role->name);
    if (sv_role_find(sv, role->name) || sv_role_base_of(sv, role->name) != base) {
        rc = BT_FAIL(err, BT_E_EXISTS, "the name %s is taken", role->name);
        sv_role_free(role);
        return rc;
    }
    role->canary = true;
    role->stop_ns = base->stop_ns;
    role->ready = base->ready ? strdup(base->ready) : NULL;
    role->release = release ? strdup(release) : NULL;
    rc = (base->ready && !role->ready) || (release && !role->release)
             ? BT_E_NOMEM
             : copy_command(role, base, binary);
    while (at < sv->n_roles && sv->roles[at] != base) {
        at++;
    }
    rc = rc < 0 ? BT_FAIL(err, rc, "no memory for a canary") : role_insert(sv, role, at + 1, err);
    if (rc < 0) {
        sv_role_free(role);
        return rc;
    }
    sv->boot += at < sv->boot;
    return BT_OK;
}

/* --- placeholders ---------------------------------------------------------------------------- */

char *sv_expand(const struct sv *sv, const struct sv_child *c, const char *text)
{
    struct bt_buf b = {.max = 1u << 16};
    char index[16];
    const struct {
        const char *name, *value;
    } at[] = {{"{name}", c->name}, {"{index}", index}, {"{run}", sv->run}};
    int rc = BT_OK;

    snprintf(index, sizeof(index), "%u", c->index);
    while (rc == BT_OK && *text) {
        size_t i = 0;

        while (i < BT_ARRAY_LEN(at) && strncmp(text, at[i].name, strlen(at[i].name)) != 0) {
            i++;
        }
        if (i < BT_ARRAY_LEN(at)) {
            rc = bt_buf_add(&b, at[i].value, strlen(at[i].value));
            text += strlen(at[i].name);
        } else {
            rc = bt_buf_add(&b, text++, 1);
        }
    }
    rc = rc < 0 ? rc : bt_buf_add(&b, "", 1);
    if (rc < 0) {
        bt_buf_fini(&b);
        return NULL;
    }
    return b.p;
}
