/* What reading commands share: a call whose answer is handed back whole, and answers as JSON. */
#ifndef CTL_SHOW_H
#define CTL_SHOW_H

#include "common/base/jsonw.h"
#include "deploy/ctl/ctl.h"

/* One call with one answer, which the caller frees with protobuf_c_message_free_unpacked. Returns
 * an exit code; failures are told on stderr. */
struct ctl_ask {
    const char *path;
    enum ctl_peer peer;
    const ProtobufCMessage *request;
    const ProtobufCMessageDescriptor *response;
    uint64_t deadline_ns;
};
int ctl_ask(const char *address, const struct ctl_ask *a, ProtobufCMessage **ret_answer);

/* All fields of a message under their names; enums by name, bytes in hex. */
void ctl_put_message(struct bt_jsonw *w, const char *key, const ProtobufCMessage *m);
/* The message as one line on stdout. */
int ctl_print_json(const ProtobufCMessage *m);
/* What was written, as one line on stdout, and frees it. */
int ctl_print_buf(struct bt_jsonw *w);

/* For a terminal: control characters in texts of the message become '?'. Clients choose names of
 * tenants and ids of requests, and operators look at them. */
void ctl_make_plain(ProtobufCMessage *m);

/* "1.2 GiB"; buf holds 24 bytes. */
const char *ctl_bytes(double n, char buf[24]);
const char *ctl_path_name(int path);
/* The node's state, "cordoned" where that is all that keeps it from being ready. */
const char *ctl_node_state(const Baton__V1__NodeInfo *n);
/* "-" for "". */
const char *ctl_dash(const char *s);
/* Reads up to `max` bytes of a file, "-" = stdin; terminated. NULL: told on stderr. */
char *ctl_read_file(const char *path, size_t max, size_t *ret_n);

#endif
