/* qwen3: Qwen 3, dense. Norms on each head of q and k before the rotary embedding. */
#include "kernels/model/graph.h"

static int check(const struct bt_model_config *c, struct bt_err *err)
{
    if (c->qkv_bias) {
        return BT_FAIL(err, BT_E_UNSUPPORTED, "qwen3 with attention bias is not supported");
    }
    if (!c->qk_norm) {
        return BT_FAIL(err, BT_E_UNSUPPORTED, "qwen3 without norms of q and k is not supported");
    }
    return BT_OK;
}

static const struct kn_bind binds[] = {
    KN_VECTOR("attn_norm.weight", attn_norm, KN_DIM_E),
    KN_MATRIX("attn_q.weight", qkv, 0, KN_DIM_HD, KN_DIM_E),
    KN_MATRIX("attn_k.weight", qkv, 1, KN_DIM_KD, KN_DIM_E),
    KN_MATRIX("attn_v.weight", qkv, 2, KN_DIM_KD, KN_DIM_E),
    KN_VECTOR("attn_q_norm.weight", q_norm, KN_DIM_D),
    KN_VECTOR("attn_k_norm.weight", k_norm, KN_DIM_D),
    KN_MATRIX("attn_output.weight", o, 0, KN_DIM_E, KN_DIM_HD),
    KN_VECTOR("ffn_norm.weight", ffn_norm, KN_DIM_E),
    KN_MATRIX("ffn_gate.weight", gu, 0, KN_DIM_F, KN_DIM_E),
    KN_MATRIX("ffn_up.weight", gu, 1, KN_DIM_F, KN_DIM_E),
    KN_MATRIX("ffn_down.weight", down, 0, KN_DIM_E, KN_DIM_F),
};

static void attn(struct kn_fwd *f, int il)
{
    kn_f_qkv(f, il); /* q [T, H, D]; k, v [T, Hkv, D] in the pages, heads of q and k normed */
    kn_f_keep_wanted(f, il);
    kn_f_attention(f, il); /* h [T, HD] */
    kn_f_attn_out(f, il);  /* x [T, E] */
}

static void forward(struct kn_fwd *f)
{
    kn_f_embed(f); /* x [T, E] */

    for (int il = 0; il < f->c->n_layers; il++) {
        attn(f, il);
        kn_f_ffn(f, il); /* x [T, E] */
    }

    kn_f_logits(f); /* logits [wanted, V] */
}

const struct kn_arch kn_arch_qwen3 = {
    .name = "qwen3",
    .check = check,
    .binds = binds,
    .n_binds = BT_ARRAY_LEN(binds),
    .forward = forward,
};
