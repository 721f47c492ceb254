/* batonctl node: everything that one node says of itself, a line a field. */
#include "common/thr/time.h"
#include "deploy/ctl/show.h"
#include "proto/node.pb-c.h"

#include <stdio.h>

/* Fields of a status are numbers and texts; whatever a newer node adds is printed as well once its
 * descriptor is here. */
static void on_message(void *user, const ProtobufCMessage *msg)
{
    if (((const struct ctl_args *)user)->output == CTL_JSON) {
        ctl_print_json(msg);
        return;
    }
    for (unsigned i = 0; i < msg->descriptor->n_fields; i++) {
        const ProtobufCFieldDescriptor *f = &msg->descriptor->fields[i];
        const char *at = (const char *)msg + f->offset;

        if (f->label == PROTOBUF_C_LABEL_REPEATED) {
            continue;
        }
        switch ((int)f->type) {
        case PROTOBUF_C_TYPE_UINT32:
            printf("%-24s %u\n", f->name, *(const uint32_t *)at);
            break;
        case PROTOBUF_C_TYPE_UINT64:
            printf("%-24s %llu\n", f->name, (unsigned long long)*(const uint64_t *)at);
            break;
        case PROTOBUF_C_TYPE_FIXED64:
            printf("%-24s %016llx\n", f->name, (unsigned long long)*(const uint64_t *)at);
            break;
        case PROTOBUF_C_TYPE_STRING:
            printf("%-24s %s\n", f->name, *(char *const *)at);
            break;
        default:
            break;
        }
    }
}

int ctl_node(const struct ctl_args *a)
{
    Baton__V1__NodeStatusRequest m = BATON__V1__NODE_STATUS_REQUEST__INIT;
    struct ctl_call c = {.path = "/baton.v1.Node/GetStatus",
                         .peer = CTL_NODE,
                         .request = &m.base,
                         .response = &baton__v1__node_status__descriptor,
                         .deadline_ns = bt_deadline_ns(a->timeout_ns),
                         .message = on_message,
                         .user = (void *)(uintptr_t)a};

    return ctl_run(a->node, &c);
}
