/* Private to common/conf: what the files of the folder share. */
#ifndef BT_CONF_CONF_INT_H
#define BT_CONF_CONF_INT_H

#include "common/base/buf.h"
#include "common/conf/conf.h"

#define CONF_MASK "********"

enum conf_source { CONF_DEFAULT, CONF_FILE, CONF_ENV, CONF_FLAG };

/* Where one value was found; for errors and for duplicates. */
struct conf_origin {
    enum conf_source source;
    const char *name; /* file path; borrowed */
    unsigned line;    /* in the file */
};

struct conf_slot {
    char *text; /* effective value as text; STR and ADDR fields point here */
    enum conf_source source;
};

struct bt_conf {
    struct bt_conf_spec spec;
    struct conf_slot *slots; /* one per option */
    enum bt_conf_action action;
    char *path; /* --config */
};

/* Converts text and stores it in the field; takes a copy of the text. */
int conf_assign(struct bt_conf *conf,
                size_t idx,
                struct bt_str text,
                const struct conf_origin *from,
                struct bt_err *err);
void conf_list_free(struct bt_conf_list *list);
/* "an integer from 1 to 65535": what the option accepts. */
void conf_allowed(const struct bt_conf_opt *opt, char *buf, size_t n);
/* "flag", "environment", "file x line 3" */
void conf_origin_text(const struct conf_origin *from, char *buf, size_t n);
/* BATON_REDIS_ADDRESS of "redis.address". */
void conf_env_name(const char *key, char *buf, size_t n);

#endif
