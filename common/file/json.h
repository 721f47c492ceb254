/* JSON of untrusted files and messages: jansson behind a scan that bounds nesting and number of
 * values, so that neither the stack nor memory depends on what the text says. */
#ifndef BT_FILE_JSON_H
#define BT_FILE_JSON_H

#include "common/base/rc.h"

#include <jansson.h>

struct bt_json_caps {
    size_t bytes;
    size_t values; /* commas and brackets, an upper bound of the number of values */
    int depth;
};

/* Parses an object; duplicate keys are refused. `what` names the text in errors. The caller owns
 * the result. BT_E_FORMAT, BT_E_TOO_LARGE. */
int bt_json_parse(struct bt_str text,
                  const char *what,
                  const struct bt_json_caps *caps,
                  json_t **ret,
                  struct bt_err *err) BT_MUST_USE;
/* Text of the value under `key` of the outermost object, without parsing the rest; false if it is
 * not there or the text is no object. */
bool bt_json_top_value(struct bt_str text, const char *key, struct bt_str *ret);

#endif
