/* Finding and loading the CUDA module. */
#include "kernels/core/device.h"

#include <dlfcn.h>
#include <libgen.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <unistd.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static const struct kn_device_ops *loaded; /* guarded by lock; the module is never unloaded */

/* Beside the program, in the build tree, then where the dynamic loader looks. */
static void *open_module(const char *path)
{
    static const char *const places[] = {
        KN_CUDA_MODULE, "kernels/cuda/" KN_CUDA_MODULE, "../kernels/cuda/" KN_CUDA_MODULE,
        "../../kernels/cuda/" KN_CUDA_MODULE, "../lib/baton/" KN_CUDA_MODULE};
    char self[PATH_MAX], file[PATH_MAX + 64];
    ssize_t n = readlink("/proc/self/exe", self, sizeof(self) - 1);

    if (path) {
        return dlopen(path, RTLD_NOW | RTLD_LOCAL);
    }
    if (n > 0) {
        self[n] = '\0';
        dirname(self);
        for (size_t i = 0; i < BT_ARRAY_LEN(places); i++) {
            snprintf(file, sizeof(file), "%s/%s", self, places[i]);
            if (access(file, R_OK) == 0) {
                return dlopen(file, RTLD_NOW | RTLD_LOCAL);
            }
        }
    }
    return dlopen(KN_CUDA_MODULE, RTLD_NOW | RTLD_LOCAL);
}

static int load(const char *path, struct bt_err *err)
{
    void *module, *entry;
    kn_device_get get;

    if (access("/dev/nvidiactl", F_OK) != 0 && access("/dev/nvidia0", F_OK) != 0) {
        return BT_FAIL(err, BT_E_UNAVAILABLE, "no CUDA device: there is no /dev/nvidia*");
    }
    module = open_module(path);
    if (!module) {
        return BT_FAIL(err, BT_E_UNAVAILABLE, "the CUDA module does not load: %s", dlerror());
    }
    entry = dlsym(module, KN_CUDA_ENTRY);
    if (entry) {
        memcpy(&get, &entry, sizeof(get));
        loaded = get(KN_DEVICE_ABI);
    }
    if (!loaded) {
        dlclose(module);
        return BT_FAIL(err, BT_E_UNAVAILABLE, "the CUDA module is of another version");
    }
    return BT_OK;
}

int kn_device_load(const char *path, const struct kn_device_ops **ret, struct bt_err *err)
{
    int rc = BT_OK;

    pthread_mutex_lock(&lock);
    if (!loaded) {
        rc = load(path, err);
    }
    if (rc == BT_OK) {
        *ret = loaded;
    }
    pthread_mutex_unlock(&lock);
    return rc;
}
