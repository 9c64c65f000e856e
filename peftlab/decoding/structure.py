"""What a decoder computes, read from a model of ``transformers``: as much as the flattened step can express.

A family is one row of a table: how its modules are called. The norms, heads, windows, caps and scales are then read
from the modules themselves. Whether the reading is right is not left to this module: ``engines.py`` tries every engine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from peftlab.decoding.packed import Addition, Linear
from peftlab.methods.leaf import base_leaf
from peftlab.methods.lora.gate import Gate
from peftlab.methods.lora.layers import LowRank
from peftlab.models.quantised import dequantised, is_quantised
from peftlab.untyped import KnownModel

Angles = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Positions [1, n] to cosines and sines [1, n, R] of the R first numbers of a head."""


@dataclass(frozen=True)
class Norm:
    """RMSNorm, or LayerNorm where ``centred``.

    A ``weight`` in float32 is multiplied before the result is rounded to the model's dtype, another one after.
    """

    weight: Tensor
    eps: float
    bias: Tensor | None = None
    centred: bool = False


@dataclass(frozen=True)
class LayerStructure:
    """One layer: h + after(out(attention(before(h)))), then the same with the MLP.

    Attributes:
        qkv: all query heads, then key heads, then value heads; in one linear or several, to be stacked.
        queries, keys: norms of each head, or of all heads at once where the weight is wider than a head.
        angles: name of the angles that rotate queries and keys; None for none.
        scale: of the products of queries and keys. cap: c of c tanh(x / c) on them.
        window: of attention; None for all tokens.
        up: where ``Structure.gated``, gates and then what they multiply.
    """

    qkv: tuple[Linear, ...]
    out: Linear
    up: tuple[Linear, ...]
    down: Linear
    scale: float
    before_attention: Norm | None = None
    after_attention: Norm | None = None
    before_mlp: Norm | None = None
    after_mlp: Norm | None = None
    queries: Norm | None = None
    keys: Norm | None = None
    angles: str | None = None
    cap: float | None = None
    window: int | None = None


@dataclass(frozen=True)
class Structure:
    """A decoder.

    Attributes:
        embedding: [V, H]. embedding_scale: what it is multiplied by. positions: learned ones, [limit, H].
        cap: c of c tanh(x / c) on the logits.
        heads, kv_heads, dim: query heads, key heads and numbers per head.
        angles: by name, see ``LayerStructure``.
        parallel: whether a layer's MLP reads what its attention reads, not what that gives.
        limit: how many positions there are.
    """

    layers: tuple[LayerStructure, ...]
    embedding: Tensor
    norm: Norm
    head: Linear
    heads: int
    kv_heads: int
    dim: int
    activation: Callable[[Tensor], Tensor]
    gated: bool
    limit: int
    angles: dict[str, Angles]
    embedding_scale: Tensor | None = None
    positions: Tensor | None = None
    cap: float | None = None
    parallel: bool = False


def structure_of(model: PreTrainedModel) -> Structure | None:
    """Return what ``model`` computes; None for a family not in the table, a hook, or a layer that is not plain."""
    read = _FAMILIES.get(type(model).__name__)
    if read is None or _changing_angles(model.config) or _hooked(model):
        return None
    try:
        return read(model)
    except _NotPlain:
        return None


class _NotPlain(Exception):
    """A module is not of the class that the family usually has: an adapter's, or one quantised on a GPU."""


_USUAL = {"before_attention": "input_layernorm", "before_mlp": "post_attention_layernorm"}
_AFTER = {"after_attention": "post_attention_layernorm", "after_mlp": "post_feedforward_layernorm"}
_AROUND = {"before_attention": "input_layernorm", "before_mlp": "pre_feedforward_layernorm", **_AFTER}


def _llama(model: KnownModel, norms: dict[str, str]) -> Structure:
    """Read a model built as Llama is: ``norms`` names the norms of a layer by their place."""
    config, body = model.config, model.model
    first = body.layers[0].self_attn
    queries, keys = config.num_attention_heads, getattr(config, "num_key_value_heads", config.num_attention_heads)
    kinds = sorted(set(getattr(config, "layer_types", None) or ["full_attention"]))
    by_kind = isinstance(getattr(body.rotary_emb, "rope_type", None), dict)

    def layer(i: int, module: KnownModel) -> LayerStructure:
        attention, mlp = module.self_attn, module.mlp
        fused = hasattr(attention, "qkv_proj")
        rotated = getattr(attention, "use_rope", True)
        return LayerStructure(
            qkv=_linears(attention, ["qkv_proj"] if fused else ["q_proj", "k_proj", "v_proj"]),
            out=_linear(attention.o_proj),
            up=_linears(mlp, ["gate_up_proj"] if hasattr(mlp, "gate_up_proj") else ["gate_proj", "up_proj"]),
            down=_linear(mlp.down_proj),
            scale=float(attention.scaling),
            queries=_norm(attention.q_norm) if hasattr(attention, "q_norm") else None,
            keys=_norm(attention.k_norm) if hasattr(attention, "k_norm") else None,
            angles=(config.layer_types[i] if by_kind else "all") if rotated else None,
            cap=getattr(attention, "attn_logit_softcapping", None),
            window=_window(config, i),
            **{place: _norm(module.get_submodule(name)) for place, name in norms.items()},
        )

    def angles(kind: str, positions: Tensor) -> tuple[Tensor, Tensor]:
        return body.rotary_emb(body.embed_tokens.weight[:1], positions, *([kind] if by_kind else []))

    scale = getattr(body.embed_tokens, "embed_scale", None)
    act = getattr(body.layers[0].mlp, "act_fn", None) or body.layers[0].mlp.activation_fn
    return Structure(
        layers=tuple(layer(i, module) for i, module in enumerate(body.layers)),
        embedding=body.embed_tokens.weight.detach(),
        norm=_norm(body.norm),
        head=_linear(model.lm_head),
        heads=queries,
        kv_heads=keys,
        dim=first.head_dim,
        activation=_activation(act),
        gated=True,
        limit=config.max_position_embeddings,
        angles={kind: partial(angles, kind) for kind in (kinds if by_kind else ["all"])},
        embedding_scale=None if scale is None else scale.to(body.embed_tokens.weight.dtype),
        cap=getattr(config, "final_logit_softcapping", None),
    )


def _gpt2(model: KnownModel) -> Structure:
    config, body = model.config, model.transformer
    if config.add_cross_attention:
        raise _NotPlain

    def layer(module: KnownModel) -> LayerStructure:
        attention, mlp = module.attn, module.mlp
        return LayerStructure(
            qkv=_linears(attention, ["c_attn"]),
            out=_linear(attention.c_proj),
            up=_linears(mlp, ["c_fc"]),
            down=_linear(mlp.c_proj),
            scale=float(attention.scaling),
            before_attention=_norm(module.ln_1),
            before_mlp=_norm(module.ln_2),
        )

    return Structure(
        layers=tuple(layer(module) for module in body.h),
        embedding=body.wte.weight.detach(),
        norm=_norm(body.ln_f),
        head=_linear(model.lm_head),
        heads=config.n_head,
        kv_heads=config.n_head,
        dim=config.n_embd // config.n_head,
        activation=_activation(body.h[0].mlp.act),
        gated=False,
        limit=config.n_positions,
        angles={},
        positions=body.wpe.weight.detach(),
    )


def _gpt_neox(model: KnownModel) -> Structure:
    config, body = model.config, model.gpt_neox
    heads, dim = config.num_attention_heads, config.hidden_size // config.num_attention_heads

    def by_part(linear: Linear) -> Linear:
        """The three parts of each head, next to one another in the file, as all queries, all keys, all values."""

        def parts(outputs: Tensor) -> Tensor:
            return outputs.unflatten(0, (heads, 3, dim)).transpose(0, 1).flatten(0, 2)

        bias, added = linear.bias, linear.addition
        added = None if added is None else replace(added, b=parts(added.b))
        return Linear(parts(linear.weight), None if bias is None else parts(bias), added)

    def layer(module: KnownModel) -> LayerStructure:
        attention, mlp = module.attention, module.mlp
        return LayerStructure(
            qkv=(by_part(_linear(attention.query_key_value)),),
            out=_linear(attention.dense),
            up=_linears(mlp, ["dense_h_to_4h"]),
            down=_linear(mlp.dense_4h_to_h),
            scale=float(attention.scaling),
            before_attention=_norm(module.input_layernorm),
            before_mlp=_norm(module.post_attention_layernorm),
            angles="all",
        )

    def angles(positions: Tensor) -> tuple[Tensor, Tensor]:
        return body.rotary_emb(body.embed_in.weight[:1], positions)

    return Structure(
        layers=tuple(layer(module) for module in body.layers),
        embedding=body.embed_in.weight.detach(),
        norm=_norm(body.final_layer_norm),
        head=_linear(model.get_output_embeddings()),
        heads=heads,
        kv_heads=heads,
        dim=dim,
        activation=_activation(body.layers[0].mlp.act),
        gated=False,
        limit=config.max_position_embeddings,
        angles={"all": angles},
        parallel=config.use_parallel_residual,
    )


_FAMILIES: dict[str, Callable[[PreTrainedModel], Structure]] = {
    **dict.fromkeys(
        (
            "LlamaForCausalLM",
            "MistralForCausalLM",
            "Qwen2ForCausalLM",
            "Qwen3ForCausalLM",
            "Phi3ForCausalLM",
            "SmolLM3ForCausalLM",
            "GemmaForCausalLM",
        ),
        partial(_llama, norms=_USUAL),
    ),
    "Gemma2ForCausalLM": partial(_llama, norms=_AROUND),
    "Gemma3ForCausalLM": partial(_llama, norms=_AROUND),
    "Olmo2ForCausalLM": partial(_llama, norms=_AFTER),
    "GPT2LMHeadModel": _gpt2,
    "GPTNeoXForCausalLM": _gpt_neox,
}


def _linear(module: KnownModel | None) -> Linear:
    if isinstance(module, LowRank) and module.lora_gate is not None and not is_quantised(module):
        return replace(_linear(base_leaf(module)), addition=_addition(module, module.lora_gate))
    if type(module) is Conv1D:
        return Linear(module.weight.detach().T, module.bias.detach())
    if module is None or not (_plain(module) or _dequantisable(module)):
        raise _NotPlain
    weight = module.weight.detach() if _plain(module) else dequantised(module, torch.float32)
    return Linear(weight, None if module.bias is None else module.bias.detach())


def _plain(module: nn.Module) -> bool:
    return type(module) is nn.Linear and type(module.weight) is nn.Parameter


def _dequantisable(module: nn.Module) -> bool:
    """Whether a map is one of bitsandbytes' on the CPU, which dequantise their weights at every step."""
    own = type(module).__name__ in ("Linear4bit", "Linear8bitLt")
    return own and is_quantised(module) and module.get_parameter("weight").device.type == "cpu"


def _addition(leaf: LowRank, gate: Gate) -> Addition:
    if leaf.lora_magnitude_vector is not None or leaf.lora_bias is not None:
        raise _NotPlain
    a, b = (factor.detach().to(leaf.weight.dtype) for factor in leaf.factors())
    return Addition(a, b * leaf.scale, gate)


def _linears(owner: nn.Module, names: list[str]) -> tuple[Linear, ...]:
    linears = tuple(_linear(owner.get_submodule(name)) for name in names)
    if len({linear.bias is None for linear in linears}) > 1:
        raise _NotPlain  # they are to be stacked
    return linears


def _norm(module: KnownModel) -> Norm:
    if type(module) is nn.LayerNorm:
        bias = None if module.bias is None else module.bias.detach()
        return Norm(module.weight.detach(), module.eps, bias, centred=True)
    weight, name = module.weight.detach(), type(module).__name__
    if not name.endswith("RMSNorm"):
        raise _NotPlain
    if name.startswith("Gemma"):  # stored as the difference from one
        return Norm(1 + weight.float(), float(module.eps))
    return Norm(weight.float() if name.startswith("Olmo2") else weight, float(module.variance_epsilon))


def _activation(module: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The function itself: calling a module takes longer than a small product."""
    return F.silu if isinstance(module, nn.SiLU) or type(module).__name__ == "SiLUActivation" else module


def _window(config: PretrainedConfig, layer: int) -> int | None:
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and kinds[layer] == "full_attention":
        return None
    return getattr(config, "sliding_window", None)


def _changing_angles(config: PretrainedConfig) -> bool:
    """Whether the angles of a position depend on the length: then there is no table of them."""
    parameters = getattr(config, "rope_parameters", None) or {}
    each = [parameters] if "rope_type" in parameters else [p for p in parameters.values() if isinstance(p, dict)]
    return any(p.get("rope_type") in ("dynamic", "longrope") for p in each)


def _hooked(model: nn.Module) -> bool:
    """Whether a hook may change what is computed; those that ``output_hidden_states`` leaves behind only record."""
    hooks = (hook for m in model.modules() for hook in (*m._forward_hooks.values(), *m._forward_pre_hooks.values()))
    return any(getattr(hook, "__module__", None) != "transformers.utils.output_capturing" for hook in hooks)
