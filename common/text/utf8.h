/* UTF-8 checks for text from outside. Pure; any thread. */
#ifndef BT_TEXT_UTF8_H
#define BT_TEXT_UTF8_H

#include "common/base/base.h"

/* Length of the longest prefix that is whole, valid UTF-8: no surrogates, no overlong forms,
 * nothing beyond U+10FFFF. Equal to n when all of it is. */
size_t bt_utf8_valid_prefix(const char *p, size_t n);

#endif
