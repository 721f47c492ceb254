/* Kubeconfig files as anybody may hand one to batonctl: read or refused. What was read has a server
 * with TLS, a namespace, and a token without control characters. Files that it names are not there.
 */
#include "deploy/ctl/kube.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    static FILE *nowhere;
    int fd = memfd_create("kubeconfig", MFD_CLOEXEC);
    struct kube k = {0};
    char path[64];

    if (!nowhere) { /* what is refused is told on stderr */
        nowhere = stderr = fopen("/dev/null", "w");
    }
    if (!nowhere || fd < 0 || write(fd, data, n) != (ssize_t)n) {
        abort();
    }
    snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
    if (kube_config_read(path, NULL, &k) == CTL_OK) {
        if (!k.server || strncmp(k.server, "https://", 8) != 0 || !k.ns || !k.cert != !k.key) {
            abort();
        }
        for (const char *p = k.token; p && *p; p++) {
            if (*p <= ' ' || *p > '~') {
                abort();
            }
        }
    } else if (k.server || k.token || k.key) {
        abort();
    }
    kube_free(&k);
    close(fd);
    return 0;
}
