/* GGUF files as anybody may hand them in: opened or refused with a message; what was opened lies in
 * the range and can be looked up. */
#include "common/file/gguf.h"

#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static void check(bool good)
{
    if (!good) {
        abort();
    }
}

static void walk(const struct bt_model_file *mf, const uint8_t *data, size_t n)
{
    const struct bt_tok_source *tok = bt_model_tok_source(mf);
    const struct bt_model_config *c = bt_model_config(mf);
    char name[256];
    float freqs[2048]; /* head size is at most 4096 */

    for (size_t i = 0; i < bt_model_n_tensors(mf); i++) {
        const struct bt_tensor *t = bt_model_tensor_at(mf, i);
        const uint8_t *p = t->data;

        check(t->bytes > 0 && p >= data && p + t->bytes <= data + n);
        check(t->name.n < sizeof(name));
        memcpy(name, t->name.p, t->name.n);
        name[t->name.n] = 0;
        check(bt_model_tensor(mf, name) == t || strlen(name) != t->name.n);
    }
    check(tok->n_tokens > 0 && tok->n_tokens <= (size_t)c->n_vocab);
    for (size_t i = 0; i < tok->n_tokens; i++) {
        const uint8_t *p = (const uint8_t *)tok->tokens[i].p;

        check(p >= data && p + tok->tokens[i].n <= data + n);
        check(tok->types[i] >= 0 && tok->types[i] <= 6);
    }
    for (int i = 0; i < c->n_eos; i++) {
        check(c->eos[i] >= 0 && c->eos[i] < c->n_vocab && (i == 0 || c->eos[i] > c->eos[i - 1]));
    }
    bt_model_rope_freqs(mf, freqs);
    for (int i = 0; i < c->head_dim / 2; i++) {
        check(freqs[i] >= 0.0f && freqs[i] <= 1e10f);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    struct bt_model_file *mf = NULL;
    struct bt_err err = {0};
    int rc = bt_model_open_mem(data, n, &mf, &err);

    if (rc == BT_OK) {
        walk(mf, data, n);
        bt_model_close(mf);
    } else {
        check(rc < 0 && (err.msg[0] || rc == BT_E_NOMEM) && !mf);
    }
    return 0;
}
