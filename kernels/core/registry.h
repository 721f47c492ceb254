/* Chooses the op table of this machine. */
#ifndef KN_CORE_REGISTRY_H
#define KN_CORE_REGISTRY_H

#include "kernels/core/ops.h"

/* `isa`: "auto" (the best that processor and system allow), "ref", "avx2", "avx512",
 * "avx512bf16" or "amx".
 * *ret_ops is static. Starts from the plain C rows and lays the rows of the chosen set over them
 * where their weight format allows. BT_E_CONFIG for an unknown name, BT_E_UNSUPPORTED for one that
 * was not built, that the processor lacks (with what is missing), or whose table has holes (with
 * their names). Any thread. */
int kn_ops_select(const char *isa, const struct kn_ops **ret_ops, struct bt_err *err) BT_MUST_USE;

/* Names that kn_ops_select accepts on this machine besides "auto", best first, NULL at the end. */
const char *const *kn_ops_available(void);

#endif
