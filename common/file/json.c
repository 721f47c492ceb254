/* Bounded JSON; see json.h. The scan knows strings and brackets only; whether the text is
 * JSON at all is for the parser behind it. */
#include "common/file/json.h"

/* Index just past the string that opens at text.p[i], or text.n. */
static size_t skip_string(struct bt_str text, size_t i)
{
    for (i++; i < text.n; i++) {
        if (text.p[i] == '\\') {
            i++;
        } else if (text.p[i] == '"') {
            return i + 1;
        }
    }
    return text.n;
}

static int
scan(struct bt_str text, const char *what, const struct bt_json_caps *caps, struct bt_err *err)
{
    size_t values = 0, i = 0;
    int depth = 0;

    while (i < text.n) {
        char c = text.p[i];

        if (c == '"') {
            i = skip_string(text, i);
            continue;
        }
        depth += (c == '{' || c == '[') - (c == '}' || c == ']');
        values += c == '{' || c == '[' || c == ',';
        if (depth > caps->depth) {
            return BT_FAIL(err, BT_E_FORMAT, "%s: nested more than %d deep at byte %zu", what,
                           caps->depth, i);
        }
        if (values > caps->values) {
            return BT_FAIL(err, BT_E_TOO_LARGE, "%s: more than %zu values", what, caps->values);
        }
        i++;
    }
    return BT_OK;
}

int bt_json_parse(struct bt_str text,
                  const char *what,
                  const struct bt_json_caps *caps,
                  json_t **ret,
                  struct bt_err *err)
{
    json_error_t bad;
    json_t *j;
    int rc;

    if (text.n > caps->bytes) {
        return BT_FAIL(err, BT_E_TOO_LARGE, "%s: %zu bytes of JSON, at most %zu are accepted", what,
                       text.n, caps->bytes);
    }
    rc = scan(text, what, caps, err);
    if (rc != BT_OK) {
        return rc;
    }
    j = json_loadb(text.n ? text.p : "", text.n, JSON_REJECT_DUPLICATES, &bad);
    if (!j) {
        return BT_FAIL(err, BT_E_FORMAT, "%s: line %d: %s", what, bad.line, bad.text);
    }
    if (!json_is_object(j)) {
        json_decref(j);
        return BT_FAIL(err, BT_E_FORMAT, "%s: not a JSON object", what);
    }
    *ret = j;
    return BT_OK;
}

static size_t skip_space(struct bt_str t, size_t i)
{
    while (i < t.n && (t.p[i] == ' ' || t.p[i] == '\t' || t.p[i] == '\n' || t.p[i] == '\r')) {
        i++;
    }
    return i;
}

/* Index of the comma or bracket that ends the value which begins at i. */
static size_t skip_value(struct bt_str t, size_t i)
{
    size_t depth = 0;

    while (i < t.n) {
        char c = t.p[i];

        if (c == '"') {
            i = skip_string(t, i);
            continue;
        }
        if (depth == 0 && (c == ',' || c == '}' || c == ']')) {
            break;
        }
        depth += c == '{' || c == '[';
        depth -= c == '}' || c == ']';
        i++;
    }
    return i;
}

bool bt_json_top_value(struct bt_str t, const char *key, struct bt_str *ret)
{
    size_t key_n = strlen(key), i = skip_space(t, 0);

    if (i == t.n || t.p[i] != '{') {
        return false;
    }
    do {
        size_t name, end, value;

        name = skip_space(t, i + 1);
        if (name >= t.n || t.p[name] != '"') {
            return false;
        }
        end = skip_string(t, name);
        value = skip_space(t, end);
        if (value >= t.n || t.p[value] != ':') {
            return false;
        }
        value = skip_space(t, value + 1);
        i = skip_value(t, value);
        if (end - name == key_n + 2 && memcmp(t.p + name + 1, key, key_n) == 0) {
            *ret = (struct bt_str){t.p + value, i - value};
            return true;
        }
    } while (i < t.n && t.p[i] == ',');
    return false;
}
