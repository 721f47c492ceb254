/* What this processor and its system can run. */
#ifndef KN_CPU_CPUID_H
#define KN_CPU_CPUID_H

#include "common/base/base.h"

struct kn_cpu {
    bool avx2;        /* with FMA and F16C, registers saved by the system (XGETBV) */
    bool avx512;      /* F, BW, VL, DQ and VNNI, registers saved by the system */
    bool avx512_bf16; /* besides */
};

/* Reads the processor each time; cheap. Any thread. */
struct kn_cpu kn_cpu_detect(void);

#endif
