/* Speed of block keys, beside plain SHA-256 of the same number of token bytes in one long buffer,
 * measured in turn in the same run. Prints ns per token; with --json one object a line. */
#include "common/thr/time.h"
#include "kvstore/block/key.h"

#include <openssl/evp.h>
#include <stdio.h>
#include <stdlib.h>

#define N_TOKENS 65536
#define ROUNDS   15

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

static double median(double *v)
{
    qsort(v, ROUNDS, sizeof(*v), by_value);
    return v[ROUNDS / 2];
}

static double since_ns_per_token(uint64_t start)
{
    return (double)(bt_now_ns() - start) / N_TOKENS;
}

int main(int argc, char **argv)
{
    static int32_t ids[N_TOKENS];
    static struct kv_key keys[N_TOKENS / 64];
    static const size_t sizes[] = {64, 128, 256};
    bool json = argc > 1 && strcmp(argv[1], "--json") == 0;
    double ours[ROUNDS], plain[ROUNDS];
    struct kv_key root = {{1}};
    struct kv_hasher *hasher;
    struct bt_err err;
    uint8_t out[32];

    if (kv_hasher_create(&hasher, &err) < 0) {
        fprintf(stderr, "%s\n", err.msg);
        return 1;
    }
    for (int i = 0; i < N_TOKENS; i++) {
        ids[i] = (i * 7919) % 50000;
    }
    for (size_t s = 0; s < BT_ARRAY_LEN(sizes); s++) {
        double v, c;

        for (int r = 0; r < ROUNDS; r++) {
            uint64_t start = bt_now_ns();

            kv_key_chain(hasher, &root, &(struct kv_key_tokens){ids, N_TOKENS, sizes[s]}, keys);
            ours[r] = since_ns_per_token(start);
            start = bt_now_ns();
            if (EVP_Digest(ids, sizeof(ids), out, NULL, EVP_sha256(), NULL) != 1) {
                return 1;
            }
            plain[r] = since_ns_per_token(start);
        }
        v = median(ours);
        c = median(plain);
        printf(json ? "{\"bench\":\"hash\",\"case\":\"block %zu\",\"metric\":\"ns_per_token\","
                      "\"value\":%.3f,\"unit\":\"ns\",\"ceiling\":\"sha256 of one buffer\","
                      "\"ceiling_value\":%.3f,\"ratio\":%.3f}\n"
                    : "hash  block %3zu  %.3f ns per token (plain SHA-256 %.3f, ratio %.3f)\n",
               sizes[s], v, c, c / v);
    }
    kv_hasher_destroy(hasher);
    return 0;
}
