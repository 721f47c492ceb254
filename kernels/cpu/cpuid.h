/* What this processor and its system can run. */
#ifndef KN_CPU_CPUID_H
#define KN_CPU_CPUID_H

#include "common/base/base.h"

struct kn_cpu {
    bool avx2;        /* with FMA and F16C, registers saved by the system (XGETBV) */
    bool avx512;      /* F, BW, VL, DQ and VNNI, registers saved by the system */
    bool avx512_bf16; /* besides */
    bool amx;         /* besides: tiles, INT8 and BF16, and the system lets this process use them */
};

/* Reads the processor each time and asks the system for the tile registers (Linux gives them to
 * processes that ask, for all threads); cheap. Any thread. */
struct kn_cpu kn_cpu_detect(void);

#endif
