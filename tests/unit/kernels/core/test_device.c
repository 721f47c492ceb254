/* Loading the CUDA module where there is no card, and a module that is none. */
#include "tests/unit/cmocka.h"

#include "kernels/core/device.h"

#include <unistd.h>

static bool have_card(void)
{
    return access("/dev/nvidiactl", F_OK) == 0 || access("/dev/nvidia0", F_OK) == 0;
}

/* A build with CUDA on a machine without a card says so. */
static void test_K8S_04(void **state)
{
    const struct kn_device_ops *ops = NULL;
    struct bt_err err = {0};

    (void)state;
    if (have_card()) {
        skip();
    }
    assert_int_equal(kn_device_load(NULL, &ops, &err), BT_E_UNAVAILABLE);
    assert_non_null(strstr(err.msg, "no CUDA device"));
    assert_null(ops);
}

static void test_wrong_module(void **state)
{
    const struct kn_device_ops *ops = NULL;
    struct bt_err err = {0};

    (void)state;
    assert_int_equal(kn_device_load("/nonexistent/baton-cuda.so", &ops, &err), BT_E_UNAVAILABLE);
    assert_null(ops);
    assert_true(err.msg[0] != '\0');
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_K8S_04),
                                       cmocka_unit_test(test_wrong_module)};

    return cmocka_run_group_tests(tests, NULL, NULL);
}
