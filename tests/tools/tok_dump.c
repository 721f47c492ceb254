/* Encodes or decodes for comparison with other tokenizers.
 *
 * usage: tok_dump MODEL encode|special|decode [PRE]
 * MODEL is a GGUF file, a model directory, or a tokenizer.json; PRE overrides the pre-tokenizer
 * name. Standard input holds records of a little-endian 32-bit length and so many bytes (encode,
 * special) or ids (decode); each gives one record of the other kind. A record of length 0xffffffff
 * says that the input was refused. */
#include "common/text/detok.h"

#include <stdio.h>
#include <stdlib.h>

static int read_file(const char *path, struct bt_buf *out)
{
    FILE *f = fopen(path, "rb");
    char part[65536];
    size_t n;
    int rc = f ? BT_OK : BT_E_IO;

    while (rc == BT_OK && (n = fread(part, 1, sizeof(part), f)) > 0) {
        rc = bt_buf_add(out, part, n);
    }
    if (f) {
        fclose(f);
    }
    return rc;
}

static bool read_all(void *p, size_t n)
{
    return fread(p, 1, n, stdin) == n;
}

static void write_record(uint32_t count, const void *p, size_t n)
{
    if (fwrite(&count, sizeof(count), 1, stdout) != 1 || (n && fwrite(p, 1, n, stdout) != n)) {
        exit(1);
    }
}

static void encode_loop(const struct bt_tokenizer *tok, unsigned flags)
{
    struct bt_buf text = {0};
    struct bt_ids ids = {0};
    uint32_t n;

    while (read_all(&n, sizeof(n))) {
        text.n = 0;
        ids.n = 0;
        if (bt_buf_reserve(&text, n) < 0 || !read_all(text.p, n)) {
            exit(1);
        }
        if (bt_tokenizer_encode(tok, (struct bt_str){text.p, n}, flags, &ids, NULL) < 0) {
            write_record(UINT32_MAX, NULL, 0);
        } else {
            write_record((uint32_t)ids.n, ids.p, ids.n * sizeof(*ids.p));
        }
    }
    bt_buf_fini(&text);
    bt_ids_fini(&ids);
}

static void decode_loop(const struct bt_tokenizer *tok)
{
    struct bt_buf text = {0};
    struct bt_ids ids = {0};
    uint32_t n;

    while (read_all(&n, sizeof(n))) {
        text.n = 0;
        if (bt_ids_reserve(&ids, n) < 0 || !read_all(ids.p, n * sizeof(*ids.p)) ||
            bt_detok_all(tok, ids.p, n, 0, &text) < 0) {
            exit(1);
        }
        write_record((uint32_t)text.n, text.p, text.n);
    }
    bt_buf_fini(&text);
    bt_ids_fini(&ids);
}

static void run(const struct bt_tok_source *src, const char *what)
{
    struct bt_tokenizer *tok = NULL;
    struct bt_err err = {0};

    if (bt_tokenizer_create(src, &tok, &err) < 0) {
        fprintf(stderr, "tok_dump: %s\n", err.msg);
        exit(2);
    }
    if (strcmp(what, "decode") == 0) {
        decode_loop(tok);
    } else {
        encode_loop(tok, strcmp(what, "special") == 0 ? BT_TOK_SPECIAL : 0);
    }
    bt_tokenizer_destroy(tok);
}

int main(int argc, char **argv)
{
    struct bt_model_file *mf = NULL;
    struct bt_tok_source src = {.bos_id = -1};
    struct bt_buf json = {0};
    struct bt_err err = {0};
    size_t len = argc > 1 ? strlen(argv[1]) : 0;

    if (argc < 3 || argc > 4) {
        fprintf(stderr, "usage: tok_dump MODEL encode|special|decode [PRE]\n");
        return 1;
    }
    if (len > 5 && strcmp(argv[1] + len - 5, ".json") == 0) {
        if (read_file(argv[1], &json) < 0) {
            fprintf(stderr, "tok_dump: cannot read %s\n", argv[1]);
            return 1;
        }
        src.json = bt_buf_str(&json);
    } else {
        if (bt_model_open(argv[1], &mf, &err) < 0) {
            fprintf(stderr, "tok_dump: %s\n", err.msg);
            return 1;
        }
        src = *bt_model_tok_source(mf);
    }
    if (argc == 4) {
        src.pre = bt_str_of(argv[3]);
    }
    run(&src, argv[2]);
    bt_buf_fini(&json);
    bt_model_close(mf);
    return fflush(stdout) == 0 ? 0 : 1;
}
