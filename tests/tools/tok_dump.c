/* Encodes or decodes for comparison with other tokenizers.
 *
 * usage: tok_dump MODEL encode|time|special|decode|chat [PRE [TEMPLATE]]
 * MODEL is a GGUF file, a model directory, or a tokenizer.json; PRE overrides the pre-tokenizer
 * name unless it is "", TEMPLATE is a file that overrides the chat template. Standard input holds
 * records of a little-endian 32-bit length and so many bytes (encode, special) or ids (decode);
 * each gives one record of the other kind. A record of length 0xffffffff says that the input was
 * refused. With time 64 bits of processor time in ns go before each record. A record for chat is a
 * sequence of role, NUL, content, NUL. */
#include "common/text/chat.h"
#include "common/text/detok.h"

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

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

static uint64_t cpu_ns(void)
{
    struct timespec t;

    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void encode_loop(const struct bt_tokenizer *tok, unsigned flags, bool timed)
{
    struct bt_buf text = {0};
    struct bt_ids ids = {0};
    uint64_t ns;
    uint32_t n;
    int rc;

    while (read_all(&n, sizeof(n))) {
        text.n = 0;
        ids.n = 0;
        if (bt_buf_reserve(&text, n) < 0 || !read_all(text.p, n)) {
            exit(1);
        }
        ns = cpu_ns();
        rc = bt_tokenizer_encode(tok, (struct bt_str){text.p, n}, flags, &ids, NULL);
        ns = cpu_ns() - ns;
        if (timed && fwrite(&ns, sizeof(ns), 1, stdout) != 1) {
            exit(1);
        }
        if (rc < 0) {
            write_record(UINT32_MAX, NULL, 0);
        } else {
            write_record((uint32_t)ids.n, ids.p, ids.n * sizeof(*ids.p));
        }
        if (timed && fflush(stdout) != 0) { /* one at a time: the other side waits */
            exit(1);
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

static size_t split_messages(struct bt_str in, struct bt_str *parts, struct bt_chat_message *ret)
{
    size_t n = 0, at = 0;

    while (at < in.n && n < 64) {
        const char *role = in.p + at;
        const char *content = role + strnlen(role, in.n - at) + 1;

        if (content >= in.p + in.n) {
            exit(1);
        }
        parts[n] = (struct bt_str){content, strnlen(content, (size_t)(in.p + in.n - content))};
        ret[n] = (struct bt_chat_message){bt_str_of(role), 1, &parts[n]};
        at = (size_t)(content - in.p) + parts[n].n + 1;
        n++;
    }
    return n;
}

static void chat_loop(const struct bt_tokenizer *tok, struct bt_str text, int32_t eos)
{
    struct bt_chat_template *tmpl = NULL;
    struct bt_chat_message messages[64];
    struct bt_str parts[64];
    struct bt_buf in = {0};
    struct bt_ids ids = {0};
    struct bt_err err = {0};
    uint32_t n;

    if (bt_chat_create(tok, text, eos, &tmpl, &err) < 0) {
        fprintf(stderr, "tok_dump: %s\n", err.msg);
        exit(3);
    }
    while (read_all(&n, sizeof(n))) {
        in.n = 0;
        ids.n = 0;
        if (bt_buf_reserve(&in, n) < 0 || !read_all(in.p, n)) {
            exit(1);
        }
        if (bt_chat_render(tmpl, messages,
                           split_messages((struct bt_str){in.p, n}, parts, messages), true, &ids,
                           NULL) < 0) {
            write_record(UINT32_MAX, NULL, 0);
        } else {
            write_record((uint32_t)ids.n, ids.p, ids.n * sizeof(*ids.p));
        }
    }
    bt_buf_fini(&in);
    bt_ids_fini(&ids);
    bt_chat_destroy(tmpl);
}

static void run(const struct bt_tok_source *src, const char *what, int32_t eos)
{
    struct bt_tokenizer *tok = NULL;
    struct bt_err err = {0};

    if (bt_tokenizer_create(src, &tok, &err) < 0) {
        fprintf(stderr, "tok_dump: %s\n", err.msg);
        exit(2);
    }
    if (strcmp(what, "decode") == 0) {
        decode_loop(tok);
    } else if (strcmp(what, "chat") == 0) {
        chat_loop(tok, src->chat_template, eos);
    } else {
        encode_loop(tok, strcmp(what, "special") == 0 ? BT_TOK_SPECIAL : 0,
                    strcmp(what, "time") == 0);
    }
    bt_tokenizer_destroy(tok);
}

int main(int argc, char **argv)
{
    struct bt_model_file *mf = NULL;
    struct bt_tok_source src = {.bos_id = -1};
    struct bt_buf json = {0}, tmpl = {0};
    struct bt_err err = {0};
    size_t len = argc > 1 ? strlen(argv[1]) : 0;
    int32_t eos = -1;

    if (argc < 3 || argc > 5) {
        fprintf(stderr, "usage: tok_dump MODEL encode|special|decode|chat [PRE [TEMPLATE]]\n");
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
        eos = bt_model_config(mf)->n_eos ? bt_model_config(mf)->eos[0] : -1;
    }
    if (argc > 3 && *argv[3]) {
        src.pre = bt_str_of(argv[3]);
    }
    if (argc > 4) {
        if (read_file(argv[4], &tmpl) < 0) {
            fprintf(stderr, "tok_dump: cannot read %s\n", argv[4]);
            return 1;
        }
        src.chat_template = bt_buf_str(&tmpl);
    }
    run(&src, argv[2], eos);
    bt_buf_fini(&json);
    bt_buf_fini(&tmpl);
    bt_model_close(mf);
    return fflush(stdout) == 0 ? 0 : 1;
}
