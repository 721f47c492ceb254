/* See session.h. */
#include "proto/wire/session.h"

#include "common/base/base.h"

bool wire_session_speaks(uint32_t version)
{
    return version >= WIRE_SESSION_VERSION_MIN && version <= WIRE_SESSION_VERSION;
}

int wire_session_pick(uint32_t lowest, uint32_t highest, uint32_t *ret_version, struct bt_err *err)
{
    highest = highest == 0 ? lowest : highest;
    if (lowest > highest || lowest > WIRE_SESSION_VERSION || highest < WIRE_SESSION_VERSION_MIN) {
        return BT_FAIL(err, BT_E_INCOMPATIBLE,
                       "session versions: %u to %u are asked for, %d to %d are spoken here", lowest,
                       highest, WIRE_SESSION_VERSION_MIN, WIRE_SESSION_VERSION);
    }
    *ret_version = BT_MIN(highest, (uint32_t)WIRE_SESSION_VERSION);
    return BT_OK;
}
