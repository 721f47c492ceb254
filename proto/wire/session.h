/* Versions of the session between a router and a node or daemon (node.proto): which ones are spoken
 * here, and which one two peers use.
 *
 *   version 1   one number in the hello; the other side has it or refuses
 *   version 2   hello with the lowest and the highest version; the welcome says which one is used;
 *               RenewToken
 *
 * A version's messages are those of the one before and more: a peer sends nothing that the version
 * in use does not have, and passes over what it does not know.
 *
 * Evolution: N and N-1 are spoken. The hello's first number is the lowest version, so that a peer
 * which knows that one alone, and compares, finds what it looks for. */
#ifndef WIRE_SESSION_H
#define WIRE_SESSION_H

#include "common/base/rc.h"

#define WIRE_SESSION_VERSION     2 /* N */
#define WIRE_SESSION_VERSION_MIN 1 /* N-1 */
#define WIRE_SESSION_RENEW       2 /* from here on: RenewToken */

/* The highest version that both speak. `lowest` and `highest` as a hello says them; highest 0 is
 * that of a peer of version 1: the same as lowest. BT_E_INCOMPATIBLE names both ranges. */
int wire_session_pick(uint32_t lowest, uint32_t highest, uint32_t *ret_version, struct bt_err *err)
    BT_MUST_USE;
/* True if a welcome may name this version. */
bool wire_session_speaks(uint32_t version);

#endif
