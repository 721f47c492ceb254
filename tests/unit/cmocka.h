/* cmocka with the headers it wants before itself. */
#ifndef BT_TESTS_UNIT_CMOCKA_H
#define BT_TESTS_UNIT_CMOCKA_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#endif
