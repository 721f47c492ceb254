/* Configuration files: any bytes load or are refused with a text, and nothing leaks. */
#include "common/conf/conf.h"

#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static const char *const names[] = {"a", "b", NULL};

struct cfg {
    char *s, *secret, *addr;
    int64_t i;
    uint64_t bytes, wait_ns;
    bool b;
    int e;
    struct bt_conf_list list;
};

static const struct bt_conf_opt opts[] = {
    BT_CONF_STR(struct cfg, s, "s", "", 64, "Text."),
    BT_CONF_SECRET_STR(struct cfg, secret, "x.secret", 64, "Secret."),
    BT_CONF_ADDR(struct cfg, addr, "addr", "", "Address."),
    BT_CONF_INT(struct cfg, i, "i", "0", -5, 5, "Integer."),
    BT_CONF_BYTES(struct cfg, bytes, "bytes", "1K", 0, INT64_MAX, "Size."),
    BT_CONF_DURATION(struct cfg, wait_ns, "wait", "1s", 0, 1000000, "Duration."),
    BT_CONF_BOOL(struct cfg, b, "b", "no", "Truth."),
    BT_CONF_ENUM(struct cfg, e, "e", "a", names, "Choice."),
    BT_CONF_LIST(struct cfg, list, "list", "", 8, "List."),
};

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    struct cfg cfg = {0};
    const struct bt_conf_spec spec = {"fuzz", "fuzz", opts, BT_ARRAY_LEN(opts), &cfg};
    struct bt_conf *conf = NULL;
    struct bt_err err = {0};
    int rc = bt_conf_load_text(&spec, "fuzz", (struct bt_str){(const char *)data, n}, &conf, &err);

    if (rc == BT_OK) {
        if (!cfg.s || !cfg.addr || cfg.i < -5 || cfg.i > 5 || cfg.list.n > 8) {
            abort();
        }
        bt_conf_destroy(conf);
    } else if (!err.msg[0]) {
        abort();
    }
    return 0;
}
