/* Philox 4x32-10 (Salmon, Moraes, Dror, Shaw: Parallel random numbers, as easy as 1, 2, 3; SC11):
 * a random number is a function of key and counter, so a stream goes on anywhere. */
#ifndef KN_MODEL_PHILOX_H
#define KN_MODEL_PHILOX_H

#include <stdint.h>

static inline void kn_philox(uint32_t ctr[4], uint32_t k0, uint32_t k1)
{
    for (int round = 0; round < 10; round++) {
        uint64_t a = (uint64_t)0xd2511f53u * ctr[0], b = (uint64_t)0xcd9e8d57u * ctr[2];
        uint32_t c1 = ctr[1], c3 = ctr[3];

        ctr[0] = (uint32_t)(b >> 32) ^ c1 ^ k0;
        ctr[1] = (uint32_t)b;
        ctr[2] = (uint32_t)(a >> 32) ^ c3 ^ k1;
        ctr[3] = (uint32_t)a;
        k0 += 0x9e3779b9u;
        k1 += 0xbb67ae85u;
    }
}

/* Uniform in [0, 1), 53 bits. Key = seed; counter = position (64 bits), choice, 0. */
static inline double kn_philox_uniform(uint64_t seed, uint32_t choice, uint64_t position)
{
    uint32_t c[4] = {(uint32_t)position, (uint32_t)(position >> 32), choice, 0};

    kn_philox(c, (uint32_t)seed, (uint32_t)(seed >> 32));
    return (double)(((uint64_t)c[0] << 32 | c[1]) >> 11) * 0x1p-53;
}

#endif
