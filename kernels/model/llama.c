/* llama: Llama 2 and 3, SmolLM2, Mistral (without sliding window). */
#include "kernels/model/graph.h"

static int check(const struct bt_model_config *c, struct bt_err *err)
{
    if (c->qkv_bias || c->qk_norm) {
        return BT_FAIL(err, BT_E_UNSUPPORTED, "llama with %s is not supported",
                       c->qkv_bias ? "attention bias" : "norms of q and k");
    }
    return BT_OK;
}

static const struct kn_bind binds[] = {
    KN_VECTOR("attn_norm.weight", attn_norm, KN_DIM_E),
    KN_MATRIX("attn_q.weight", qkv, 0, KN_DIM_HD, KN_DIM_E),
    KN_MATRIX("attn_k.weight", qkv, 1, KN_DIM_KD, KN_DIM_E),
    KN_MATRIX("attn_v.weight", qkv, 2, KN_DIM_KD, KN_DIM_E),
    KN_MATRIX("attn_output.weight", o, 0, KN_DIM_E, KN_DIM_HD),
    KN_VECTOR("ffn_norm.weight", ffn_norm, KN_DIM_E),
    KN_MATRIX("ffn_gate.weight", gu, 0, KN_DIM_F, KN_DIM_E),
    KN_MATRIX("ffn_up.weight", gu, 1, KN_DIM_F, KN_DIM_E),
    KN_MATRIX("ffn_down.weight", down, 0, KN_DIM_E, KN_DIM_F),
};

static void attn(struct kn_fwd *f, int il)
{
    const struct kn_layer *l = &f->w->layers[il];

    kn_f_norm(f, f->x, l->attn_norm, f->h); /* h   [T, E] */
    kn_f_matmul(f, f->h, &l->qkv, f->qkv);  /* qkv [T, HD + 2 KD] */

    kn_f_rope(f, kn_f_q(f), f->c->n_heads);    /* q [T, H, D] */
    kn_f_rope(f, kn_f_k(f), f->c->n_kv_heads); /* k [T, Hkv, D] */
    kn_f_kv_write(f, il);
    kn_f_keep_wanted(f, il);

    kn_f_attention(f, il, f->h);           /* h [T, HD] */
    kn_f_matmul_add(f, f->h, &l->o, f->x); /* x [T, E] */
    kn_tap(f, f->x, f->c->d_model, "attn_out", il);
}

static void forward(struct kn_fwd *f)
{
    kn_f_embed(f, f->x); /* x [T, E] */

    for (int il = 0; il < f->c->n_layers; il++) {
        attn(f, il);
        kn_f_ffn(f, il);
    }

    kn_f_logits(f);
}

const struct kn_arch kn_arch_llama = {
    .name = "llama",
    .check = check,
    .binds = binds,
    .n_binds = BT_ARRAY_LEN(binds),
    .forward = forward,
};
