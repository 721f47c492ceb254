/* What this machine allows: the rates that ops are held against. Measured by short loops on threads
 * of their own, so other work at that moment lowers what they say. Any thread, one call at a time;
 * each takes about `ns`. */
#ifndef KN_CORE_LIMITS_H
#define KN_CORE_LIMITS_H

#include "common/base/base.h"

/* Bytes a second that `threads` threads read together, each its part of `buf` over and over. A
 * buffer that fits the caches gives their rate. 0: the buffer is shorter than 256 bytes a thread.
 */
double kn_limit_read(int threads, uint64_t ns, const void *buf, size_t bytes);

/* Multiply-add operations (counted as two) a second of `threads` threads in the widest vector
 * instruction that this processor has for 8-bit integers (VNNI), else for floats (FMA), from
 * registers. AMX tile products are above it. *ret_name: static. */
double kn_limit_mac(int threads, uint64_t ns, const char **ret_name);

#endif
