/* The supervisor's file of roles: read, or refused with a reason; what was read keeps its limits.
 */
#include "deploy/supervisor/supervisor.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    struct sv sv = {.run = "/tmp", .wake_fd = -1, .lock_fd = -1, .listen_fd = -1};
    struct bt_err err = {0};
    char path[64];
    int fd = memfd_create("roles", 0);

    snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
    if (fd < 0 || write(fd, data, n) != (ssize_t)n) {
        abort();
    }
    bt_list_init(&sv.clients);
    if (sv_config_read(&sv, path, &err) < 0) {
        if (!err.msg[0]) {
            abort();
        }
    } else {
        for (size_t i = 0; i < sv.n_roles; i++) {
            if (sv_role_find(&sv, sv.roles[i]->name) != sv.roles[i] ||
                sv.roles[i]->n_command == 0) {
                abort();
            }
        }
    }
    for (size_t i = 0; i < sv.n_roles; i++) {
        sv_role_free(sv.roles[i]);
    }
    close(fd);
    return 0;
}
