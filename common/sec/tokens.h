/* Bearer tokens: who may do what, read from files and looked up by what a caller presents.
 *
 * A file has one token a line, and behind it, after blanks, a name if one is wanted; '#' at the
 * start of a line or after a blank begins a comment:
 *
 *   # clients of team a
 *   q7fK2vLx9TzR4mWc8NbY   team-a
 *   hT5pZ1sD6gJ3kVn0XeQa   *          a gateway that may name any tenant
 *
 * A token is 16 to 512 of the characters that RFC 6750 allows (letters, digits, "-._~+/", '=' at
 * its end). A name has 1 to 63 letters, digits, '-', '_', '.'; a token of a client acts for the
 * tenant of that name. A file with a line that is none of this, without any token, or with a token
 * that is there twice (in any file) is refused as a whole.
 *
 * The table holds digests alone, under a random salt of the process: what a look-up compares tells
 * nothing about a token by the time that it takes. */
#ifndef BT_SEC_TOKENS_H
#define BT_SEC_TOKENS_H

#include "common/base/rc.h"

#define BT_TOKEN_MIN      16
#define BT_TOKEN_MAX      512
#define BT_TENANT_MAX     64 /* with the terminator */
#define BT_TOKEN_FILE_MAX (4u << 20)

/* What a caller may do, as bits; a method names the bits of which its callers need one. */
enum {
    BT_ACCESS_CLIENT = 1,   /* inference */
    BT_ACCESS_OPERATOR = 2, /* looking at the cluster and changing it */
    BT_ACCESS_CLUSTER = 4,  /* being a router to a node */
    BT_ACCESS_ANY = 7,      /* whoever may do more than look at metrics */
    BT_ACCESS_OPEN = 8,     /* everybody: health */
    BT_ACCESS_SCRAPER = 16, /* reading metrics, nothing else */
};

/* Who a caller has turned out to be. */
struct bt_who {
    unsigned access;            /* BT_ACCESS_ bits */
    bool any_tenant;            /* may act for whichever tenant it names */
    char tenant[BT_TENANT_MAX]; /* else for this one; empty = the default */
};

struct bt_tokens; /* immutable once it is shared */

/* An empty table. BT_E_NOMEM, BT_E_SYS. */
int bt_tokens_create(struct bt_tokens **ret_t, struct bt_err *err) BT_MUST_USE;
void bt_tokens_destroy(struct bt_tokens *t);
/* Adds what a file says; its tokens give `access`. `name` stands in errors and is borrowed as long
 * as the table lives. BT_E_CONFIG with the line, never with the token; the table is of no use then.
 */
int bt_tokens_add(struct bt_tokens *t,
                  const char *name,
                  struct bt_str text,
                  unsigned access,
                  struct bt_err *err) BT_MUST_USE;
size_t bt_tokens_n(const struct bt_tokens *t);
/* False, and *ret_who untouched, if nobody has this token. Any thread. */
bool bt_tokens_find(const struct bt_tokens *t, struct bt_str token, struct bt_who *ret_who);

/* The first token of a file, for whoever presents it: a part of `text`. Checks the whole file as
 * bt_tokens_add does. */
int bt_tokens_first(const char *name,
                    struct bt_str text,
                    struct bt_str *ret_token,
                    struct bt_err *err) BT_MUST_USE;
/* The token in the value of an Authorization header; p == NULL if it holds none ("Bearer " in any
 * case, then the token). */
struct bt_str bt_token_of_header(struct bt_str value);

#endif
