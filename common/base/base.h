/* Attributes, checks and small helpers that every file uses. No dependency but libc. */
#ifndef BT_BASE_BASE_H
#define BT_BASE_BASE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define BT_PRINTF_ATTR(f, a) __attribute__((format(printf, f, a)))
#define BT_MUST_USE          __attribute__((warn_unused_result))
#define BT_NORETURN          __attribute__((noreturn))
#define BT_UNUSED            __attribute__((unused))
#define BT_LIKELY(x)         __builtin_expect(!!(x), 1)
#define BT_UNLIKELY(x)       __builtin_expect(!!(x), 0)
#define BT_ALIGNED(n)        __attribute__((aligned(n)))
#define BT_CACHE_LINE        64

#define BT_STR_(x)  #x
#define BT_STR2_(x) BT_STR_(x)
#define BT_WHERE    __FILE__ ":" BT_STR2_(__LINE__)

#define BT_ARRAY_LEN(a) (sizeof(a) / sizeof((a)[0]))
#define BT_MIN(a, b)                                                                               \
    ({                                                                                             \
        __typeof__(a) bt_a_ = (a);                                                                 \
        __typeof__(b) bt_b_ = (b);                                                                 \
        bt_a_ < bt_b_ ? bt_a_ : bt_b_;                                                             \
    })
#define BT_MAX(a, b)                                                                               \
    ({                                                                                             \
        __typeof__(a) bt_a_ = (a);                                                                 \
        __typeof__(b) bt_b_ = (b);                                                                 \
        bt_a_ > bt_b_ ? bt_a_ : bt_b_;                                                             \
    })
#define BT_CONTAINER_OF(ptr, type, member) ((type *)((char *)(ptr)-offsetof(type, member)))
#define BT_DIV_UP(n, d)                    (((n) + (d)-1) / (d))

/* Programmer errors: always compiled in, prints where and aborts. Never used on input. */
BT_NORETURN void bt_bug(const char *where, const char *what);
#define BT_BUG_ON(cond)                                                                            \
    do {                                                                                           \
        if (BT_UNLIKELY(cond)) {                                                                   \
            bt_bug(BT_WHERE, #cond);                                                               \
        }                                                                                          \
    } while (0)
/* Inner loops only: checked in debug builds. */
#ifdef NDEBUG
#define BT_DASSERT(cond) ((void)0)
#else
#define BT_DASSERT(cond) BT_BUG_ON(!(cond))
#endif

/* A borrowed range of bytes or text; not terminated. */
struct bt_str {
    const char *p;
    size_t n;
};
#define BT_STR(lit) ((struct bt_str){(lit), sizeof(lit) - 1})

static inline struct bt_str bt_str_of(const char *z)
{
    return (struct bt_str){z, z ? strlen(z) : 0};
}

static inline bool bt_str_eq(struct bt_str a, struct bt_str b)
{
    return a.n == b.n && (a.n == 0 || memcmp(a.p, b.p, a.n) == 0);
}

/* Products of dimensions: false on overflow, *ret untouched then. */
static inline bool bt_mul_size(size_t a, size_t b, size_t *ret)
{
    size_t r;

    if (__builtin_mul_overflow(a, b, &r)) {
        return false;
    }
    *ret = r;
    return true;
}

static inline bool bt_add_size(size_t a, size_t b, size_t *ret)
{
    size_t r;

    if (__builtin_add_overflow(a, b, &r)) {
        return false;
    }
    *ret = r;
    return true;
}

/* Cleanup for cold local resources: BT_AUTO(bt_free_ptr) char *p = ...; */
#define BT_AUTO(fn) __attribute__((cleanup(fn)))
void bt_free_ptr(void *pp);      /* frees *pp */
void bt_close_fd(const int *fd); /* closes *fd when it is >= 0 */

#endif
