/* The state file: what an operator has changed since the configuration, and the processes that run,
 * by pid and time of start. A supervisor that was killed leaves its processes alone; the next one
 * of the same folder takes them over.
 *
 *   {"roles": [{"name": "decode", "replicas": 2, "canary_of": "decode", "binary": "/x", "release":
 * "1.1", "processes": [{"index": 0, "pid": 4711, "started": 123456}]}]}
 *
 * Written beside and renamed. The folder belongs to the supervisor's user; what is read is checked
 * all the same. */
#include "deploy/supervisor/supervisor.h"

#include "common/base/buf.h"
#include "common/file/json.h"
#include "common/obs/log.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static void path_of(const struct sv *sv, const char *name, char path[4200])
{
    snprintf(path, 4200, "%.4000s/%s", sv->run, name);
}

static json_t *save_role(const struct sv_role *role)
{
    json_t *v = json_pack("{s:s, s:i, s:b, s:o}", "name", role->name, "replicas", (int)role->wanted,
                          "canary", role->canary, "processes", json_array());

    if (v && role->generation > 0) {
        json_object_set_new(v, "promoted", json_true());
    }
    if (v && (role->canary || role->generation > 0)) {
        json_object_set_new(v, "binary", json_string(role->command[0]));
        if (role->release) {
            json_object_set_new(v, "release", json_string(role->release));
        }
    }
    bt_list_for_each (it, &role->childs) {
        const struct sv_child *c = BT_LIST_ENTRY(it, struct sv_child, link);

        if (v && c->pid > 0) {
            json_array_append_new(json_object_get(v, "processes"),
                                  json_pack("{s:i, s:i, s:I}", "index", (int)c->index, "pid",
                                            (int)c->pid, "started", (json_int_t)c->started_at));
        }
    }
    return v;
}

void sv_state_write(struct sv *sv)
{
    char path[4200], fresh[4200];
    json_t *doc = json_pack("{s:o}", "roles", json_array());

    sv->dirty = false;
    for (size_t i = 0; doc && i < sv->n_roles; i++) {
        json_array_append_new(json_object_get(doc, "roles"), save_role(sv->roles[i]));
    }
    path_of(sv, "state.json", path);
    path_of(sv, "state.json.new", fresh);
    if (!doc || json_dump_file(doc, fresh, JSON_INDENT(1)) < 0 || rename(fresh, path) < 0) {
        BT_WARN("state",
                "path=%s msg=\"cannot be written; a restart of the supervisor would not "
                "know its processes\"",
                path);
    }
    json_decref(doc);
}

/* --- reading --------------------------------------------------------------------------------- */

static bool has_index(const struct sv_role *role, unsigned index)
{
    bt_list_for_each (it, &role->childs) {
        if (BT_LIST_ENTRY(it, struct sv_child, link)->index == index) {
            return true;
        }
    }
    return false;
}

static void take_process(struct sv *sv, struct sv_role *role, const json_t *v)
{
    json_int_t index = json_integer_value(json_object_get(v, "index"));
    json_int_t pid = json_integer_value(json_object_get(v, "pid"));
    json_int_t started = json_integer_value(json_object_get(v, "started"));
    struct sv_child *c;

    if (index < 0 || index >= SV_MAX_REPLICAS || pid <= 0 || pid > INT_MAX || started <= 0 ||
        has_index(role, (unsigned)index)) {
        return;
    }
    c = sv_child_add(role, (unsigned)index);
    if (c && !sv_child_adopt(sv, c, (pid_t)pid, (uint64_t)started)) {
        sv_child_free(c);
    }
}

static const char *text_in(const json_t *v, const char *key)
{
    return json_string_value(json_object_get(v, key));
}

/* The role a saved one is now; a canary's is made again, behind the role it stands for. */
static struct sv_role *role_of(struct sv *sv, const json_t *v)
{
    const char *name = text_in(v, "name"), *binary = text_in(v, "binary");
    struct sv_role *role;

    if (!name || strlen(name) > SV_NAME_MAX) {
        return NULL;
    }
    role = sv_role_find(sv, name);
    if (role || !json_is_true(json_object_get(v, "canary"))) {
        return role;
    }
    role = sv_role_base_of(sv, name);
    if (!role || sv_role_canary(sv, role, binary, text_in(v, "release"), NULL) < 0) {
        return NULL;
    }
    return sv_role_find(sv, name);
}

static void take_role(struct sv *sv, const json_t *v)
{
    struct sv_role *role = role_of(sv, v);
    json_int_t n = json_integer_value(json_object_get(v, "replicas"));
    const char *binary = text_in(v, "binary"), *release = text_in(v, "release");
    json_t *p;
    size_t i;

    if (!role) {
        return;
    }
    if (!role->single && n >= 0 && n <= SV_MAX_REPLICAS) {
        role->wanted = (unsigned)n;
    }
    if (json_is_true(json_object_get(v, "promoted")) && binary) {
        char *b = strdup(binary), *r = release ? strdup(release) : NULL;

        if (b && (r || !release)) {
            free(role->command[0]);
            free(role->release);
            role->command[0] = b;
            role->release = r;
            role->generation = 1;
        }
    }
    json_array_foreach(json_object_get(v, "processes"), i, p)
    {
        take_process(sv, role, p);
    }
}

int sv_state_read(struct sv *sv, struct bt_err *err)
{
    const struct bt_json_caps caps = {.bytes = 1u << 20, .values = 40000, .depth = 8};
    struct bt_buf text = {.max = 1u << 20};
    char path[4200], part[4096];
    json_t *doc = NULL, *v;
    ssize_t n;
    size_t i;
    int fd, rc = BT_OK;

    path_of(sv, "state.json", path);
    fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        return errno == ENOENT ? BT_OK : BT_FAIL_SYS(err, BT_E_IO, "%.120s", path);
    }
    while (rc == BT_OK && (n = read(fd, part, sizeof(part))) > 0) {
        rc = bt_buf_add(&text, part, (size_t)n);
    }
    close(fd);
    rc = rc < 0 ? rc : bt_json_parse(bt_buf_str(&text), path, &caps, &doc, err);
    if (rc == BT_OK) {
        json_array_foreach(json_object_get(doc, "roles"), i, v)
        {
            take_role(sv, v);
        }
    }
    json_decref(doc);
    bt_buf_fini(&text);
    return rc;
}
