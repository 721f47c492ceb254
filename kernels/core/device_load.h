/* Finding the CUDA module, for those who only pass it on (kernels/core/device.h says what it is).
 */
#ifndef KN_CORE_DEVICE_LOAD_H
#define KN_CORE_DEVICE_LOAD_H

#include "common/base/rc.h"

struct kn_device_ops;

/* Loads the CUDA module, once. `path` NULL: beside the program, then in the library folder of the
 * installation. BT_E_UNAVAILABLE where there is no module or no /dev/nvidia*; says which. Any
 * thread; blocks for about half a second the first time. */
int kn_device_load(const char *path,
                   const struct kn_device_ops **ret,
                   struct bt_err *err) BT_MUST_USE;

#endif
