/* Runs a fuzz target over every file of the folders named on the command line. */
#include <dirent.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static int replay_file(const char *path)
{
    FILE *f = fopen(path, "rb");
    uint8_t *data = NULL;
    size_t n = 0, cap = 0, got;

    if (!f) {
        return -1;
    }
    do {
        if (n == cap) {
            cap = cap ? cap * 2 : 65536;
            data = realloc(data, cap);
            if (!data) {
                abort();
            }
        }
        got = fread(data + n, 1, cap - n, f);
        n += got;
    } while (got > 0);
    fclose(f);
    /* An exact-size copy, so that a sanitizer sees a read past the end. */
    data = realloc(data, n ? n : 1);
    LLVMFuzzerTestOneInput(data, n);
    free(data);
    return 0;
}

int main(int argc, char **argv)
{
    int n = 0;

    for (int i = 1; i < argc; i++) {
        DIR *dir = opendir(argv[i]);
        struct dirent *e;

        if (!dir) {
            fprintf(stderr, "no corpus at %s\n", argv[i]);
            return 1;
        }
        while ((e = readdir(dir)) != NULL) {
            char path[4096];

            if (e->d_name[0] == '.') {
                continue;
            }
            snprintf(path, sizeof(path), "%s/%s", argv[i], e->d_name);
            n += replay_file(path) == 0;
        }
        closedir(dir);
    }
    printf("%d inputs replayed\n", n);
    return n > 0 ? 0 : 1;
}
