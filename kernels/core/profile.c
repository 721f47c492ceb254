/* Counters around the rows of an op table; see profile.h.
 * Written by the engine's thread alone, read by any (relaxed atomics). */
#include "kernels/core/profile.h"

#include "common/thr/time.h"
#include "kernels/core/dtype.h"

static bool enabled;
static const struct kn_ops *inner;
static struct kn_ops wrapped;
static struct kn_op_count counts[KN_OP_COUNT];
static double ns_per_byte, ns_per_operation; /* 0 = not known */

struct cost {
    uint64_t bytes;
    uint64_t operations;
};

static uint64_t product(int64_t a, int64_t b)
{
    return (uint64_t)a * (uint64_t)b;
}

/* Rows of f32, `width` read and written together. */
static struct cost rows_cost(int rows, int width, unsigned ops_each)
{
    return (struct cost){4 * product(rows, width), ops_each * product(rows, width)};
}

static struct cost cost_embed(const struct kn_embed_args *a)
{
    int e = (int)a->table->shape[1];

    return rows_cost(a->n_rows, 2 * e, 0);
}

static struct cost cost_rmsnorm(const struct kn_rmsnorm_args *a)
{
    return rows_cost(a->n_rows, 2 * a->n_heads * a->width, 2);
}

static struct cost cost_matmul(const struct kn_matmul_args *a)
{
    struct cost c = rows_cost(a->n_rows, a->w->k + a->w->n * (a->add ? 2 : 1), 0);

    for (int i = 0; i < a->w->n_parts; i++) {
        c.bytes += (uint64_t)a->w->part[i].n * kn_row_bytes(a->w->part[i].dtype, (size_t)a->w->k);
    }
    c.operations = 2 * product(a->n_rows, a->w->n) * (uint64_t)a->w->k;
    return c;
}

static struct cost cost_rope(const struct kn_rope_args *a)
{
    return rows_cost(a->n_rows, 2 * a->n_heads * a->head_dim, 2);
}

static struct cost cost_kv_write(const struct kn_kv_write_args *a)
{
    struct cost c = {0};

    for (int s = 0; s < a->n_seqs; s++) {
        c.bytes +=
            12 * product(a->seqs[s].n_rows, a->layout->n_kv_heads) * (uint64_t)a->layout->head_dim;
    }
    return c;
}

static struct cost cost_attention(const struct kn_attention_args *a)
{
    uint64_t d = (uint64_t)a->layout->head_dim, h = (uint64_t)a->n_heads;
    uint64_t elem = a->layout->dtype == KV_DTYPE_F16 ? 2 : 4;
    struct cost c = {0};

    for (int s = 0; s < a->n_seqs; s++) {
        uint64_t n = (uint64_t)a->seqs[s].n_rows, p = (uint64_t)a->seqs[s].pos;
        uint64_t pairs = n * p + n * (n + 1) / 2; /* (query, position it sees) */

        c.operations += 4 * pairs * h * d;
        c.bytes += 2 * (p + n) * (uint64_t)a->layout->n_kv_heads * d * elem + 8 * n * h * d;
    }
    return c;
}

static struct cost cost_swiglu(const struct kn_swiglu_args *a)
{
    return rows_cost(a->n_rows, 3 * a->width, 2);
}

static struct cost cost_gather(const struct kn_gather_args *a)
{
    return rows_cost(a->n_rows, 2 * a->width, 0);
}

static void add(uint64_t *to, uint64_t n)
{
    __atomic_store_n(to, *to + n, __ATOMIC_RELAXED);
}

static void count(enum kn_op op, uint64_t start, struct cost c)
{
    struct kn_op_count *k = &counts[op];

    add(&k->ns, bt_now_ns() - start);
    add(&k->calls, 1);
    add(&k->bytes, c.bytes);
    add(&k->operations, c.operations);
    add(&k->limit_ns,
        (uint64_t)BT_MAX((double)c.bytes * ns_per_byte, (double)c.operations * ns_per_operation));
}

#define KN_OP(name, dtypes, what)                                                                  \
    static void profiled_##name(struct kn_stream *stream, const struct kn_##name##_args *args)     \
    {                                                                                              \
        struct cost c = cost_##name(args);                                                         \
        uint64_t start = bt_now_ns();                                                              \
                                                                                                   \
        inner->name(stream, args);                                                                 \
        count(KN_OP_##name, start, c);                                                             \
    }
#include "kernels/ops.def"
#undef KN_OP

void kn_profile_enable(void)
{
    enabled = true;
}

bool kn_profile_enabled(void)
{
    return enabled;
}

void kn_profile_set_rates(double bytes_per_s, double operations_per_s)
{
    ns_per_byte = bytes_per_s > 0 ? 1e9 / bytes_per_s : 0;
    ns_per_operation = operations_per_s > 0 ? 1e9 / operations_per_s : 0;
}

const struct kn_ops *kn_profile_wrap(const struct kn_ops *ops)
{
    if (!enabled) {
        return ops;
    }
    inner = ops;
    wrapped = *ops;
#define KN_OP(name, dtypes, what) wrapped.name = profiled_##name;
#include "kernels/ops.def"
#undef KN_OP
    return &wrapped;
}

void kn_profile_read(struct kn_op_count ret[KN_OP_COUNT])
{
    for (int i = 0; i < KN_OP_COUNT; i++) {
        ret[i].calls = __atomic_load_n(&counts[i].calls, __ATOMIC_RELAXED);
        ret[i].ns = __atomic_load_n(&counts[i].ns, __ATOMIC_RELAXED);
        ret[i].bytes = __atomic_load_n(&counts[i].bytes, __ATOMIC_RELAXED);
        ret[i].operations = __atomic_load_n(&counts[i].operations, __ATOMIC_RELAXED);
        ret[i].limit_ns = __atomic_load_n(&counts[i].limit_ns, __ATOMIC_RELAXED);
    }
}
