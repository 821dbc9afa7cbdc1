"""Which checkpoint tensor goes where in the merged parameters: the name tables of both formats."""

from __future__ import annotations

from dataclasses import dataclass

from engine.model.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Target:
    """Place of one checkpoint tensor.

    name: merged parameter (`engine.model.weights.named_shapes`). row: its first row there. shape:
    what the checkpoint must hold. heads: rotated heads in its rows, 0 where rows are no heads (only
    q and k have them).
    """

    name: str
    row: int
    shape: tuple[int, ...]
    heads: int = 0


def _layer_targets(spec: ModelSpec, index: int) -> dict[str, Target]:
    """Role -> target for one layer, roles as both formats can name them."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    q, k = spec.q_size, spec.kv_size
    at = f"layers.{index}."
    targets = {
        "q": Target(at + "qkv", 0, (q, hidden), spec.num_heads),
        "k": Target(at + "qkv", q, (k, hidden), spec.num_kv_heads),
        "v": Target(at + "qkv", q + k, (k, hidden)),
        "o": Target(at + "o", 0, (hidden, q)),
        "gate": Target(at + "gate_up", 0, (inner, hidden)),
        "up": Target(at + "gate_up", inner, (inner, hidden)),
        "down": Target(at + "down", 0, (hidden, inner)),
        "attn_norm": Target(at + "attn_norm", 0, (hidden,)),
        "mlp_norm": Target(at + "mlp_norm", 0, (hidden,)),
    }
    if spec.qkv_bias:
        targets["q_bias"] = Target(at + "qkv_bias", 0, (q,), spec.num_heads)
        targets["k_bias"] = Target(at + "qkv_bias", q, (k,), spec.num_kv_heads)
        targets["v_bias"] = Target(at + "qkv_bias", q + k, (k,))
    if spec.qk_norm:
        targets["q_norm"] = Target(at + "q_norm", 0, (spec.head_dim,))
        targets["k_norm"] = Target(at + "k_norm", 0, (spec.head_dim,))
    return targets


_HF_LAYER = {
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "o": "self_attn.o_proj.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
    "attn_norm": "input_layernorm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
}

_GGUF_LAYER = {
    "q": "attn_q.weight",
    "k": "attn_k.weight",
    "v": "attn_v.weight",
    "o": "attn_output.weight",
    "q_bias": "attn_q.bias",
    "k_bias": "attn_k.bias",
    "v_bias": "attn_v.bias",
    "q_norm": "attn_q_norm.weight",
    "k_norm": "attn_k_norm.weight",
    "gate": "ffn_gate.weight",
    "up": "ffn_up.weight",
    "down": "ffn_down.weight",
    "attn_norm": "attn_norm.weight",
    "mlp_norm": "ffn_norm.weight",
}


def _all_targets(
    spec: ModelSpec, top: tuple[str, str, str], layer_prefix: str, layer_names: dict[str, str]
) -> dict[str, Target]:
    embedding, lm_head, final_norm = top
    vocab_shape = (spec.vocab_size, spec.hidden_size)
    targets = {
        embedding: Target("embedding", 0, vocab_shape),
        final_norm: Target("final_norm", 0, (spec.hidden_size,)),
    }
    if not spec.tied_embeddings:
        targets[lm_head] = Target("lm_head", 0, vocab_shape)
    for index in range(spec.num_layers):
        for role, target in _layer_targets(spec, index).items():
            targets[f"{layer_prefix}.{index}.{layer_names[role]}"] = target
    return targets


def hf_targets(spec: ModelSpec) -> dict[str, Target]:
    """Hugging Face tensor name -> its place."""
    top = ("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight")
    return _all_targets(spec, top, "model.layers", _HF_LAYER)


def gguf_targets(spec: ModelSpec) -> dict[str, Target]:
    """GGUF tensor name -> its place."""
    top = ("token_embd.weight", "output.weight", "output_norm.weight")
    return _all_targets(spec, top, "blk", _GGUF_LAYER)


def is_ignorable_hf(name: str, spec: ModelSpec) -> bool:
    """Tensors some checkpoints carry and nobody needs: rotary tables, a copy of a tied head."""
    return name.endswith("rotary_emb.inv_freq") or (
        spec.tied_embeddings and name == "lm_head.weight"
    )
