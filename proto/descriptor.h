/* The compiled descriptors of our services, for server reflection: a serialised
 * google.protobuf.FileDescriptorSet with all imports. */
#ifndef WIRE_DESCRIPTOR_H
#define WIRE_DESCRIPTOR_H

#include "common/base/base.h"

extern const char wire_protoset[], wire_protoset_end[];

static inline struct bt_str wire_descriptor_set(void)
{
    return (struct bt_str){wire_protoset, (size_t)(wire_protoset_end - wire_protoset)};
}

#endif
