"""What vLLM does with an adapter (version and files: ``table.py``)."""

from __future__ import annotations

from peftlab.checkpoints.consumers.contents import Pair, Piece
from peftlab.checkpoints.consumers.features import (
    ATTENTION,
    FUSED,
    LLAMA,
    PLAIN_STARTS,
    foreign,
    incomplete_experts,
    shortened,
)
from peftlab.checkpoints.consumers.fit import Fit
from peftlab.checkpoints.consumers.table import Verdict

# The classes that take LoRA, the last names of their linear layers, and whether embeddings and output layer take it.
_EMBEDDINGS = frozenset(("embed_tokens", "lm_head"))
_ARCHITECTURES: dict[str, frozenset[str]] = {
    "LlamaForCausalLM": LLAMA | _EMBEDDINGS,
    "MistralForCausalLM": LLAMA,
    "Qwen2ForCausalLM": LLAMA,
    "Qwen3ForCausalLM": LLAMA | _EMBEDDINGS,
    "GemmaForCausalLM": LLAMA,
    "Gemma2ForCausalLM": LLAMA,
    "Gemma3ForCausalLM": LLAMA,
    "GraniteForCausalLM": LLAMA | _EMBEDDINGS,
    "Phi3ForCausalLM": FUSED,
    "Qwen2MoeForCausalLM": frozenset(ATTENTION),
    "Qwen3MoeForCausalLM": frozenset(ATTENTION) | _EMBEDDINGS,
    "MixtralForCausalLM": frozenset(ATTENTION) | _EMBEDDINGS,
    "GptOssForCausalLM": frozenset(ATTENTION),
}
_MIXTURES = ("Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM", "MixtralForCausalLM", "GptOssForCausalLM")
_FUSED_EXPERTS = ("GptOssForCausalLM",)  # read peft's factors of all experts in one tensor without further settings
_SINGLE_EXPERTS = ("Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM", "MixtralForCausalLM")  # and factors of each expert
_RENAMED_EXPERTS = {"MixtralForCausalLM": "block_sparse_moe.experts"}
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
_DEFAULT_RANK = 16

# Options of peft's that are refused where they are on.
_REFUSED = (
    "use_dora", "lora_bias", "alora_invocation_tokens", "layer_replication", "use_bdlora", "use_qalora",
)  # fmt: skip
_HEADS = ("classifier", "score")  # what may be trained whole, in models that classify


def rule(fit: Fit) -> Verdict:
    """Return what vLLM makes of an adapter."""
    raw = fit.contents.raw
    if verdict := foreign(fit, "vLLM"):
        return verdict
    if missing := [key for key in ("r", "lora_alpha", "target_modules") if key not in raw]:
        return Verdict(False, f"vLLM refuses a configuration without {missing[0]}")
    for key in _REFUSED:
        if raw.get(key):
            return Verdict(False, f"vLLM refuses {key}")
    if other := [name for name in fit.contents.names("modules_to_save") if name not in _HEADS]:
        return Verdict(False, f"vLLM refuses modules_to_save={other}")
    if raw.get("bias", "none") != "none":
        return Verdict(False, f"vLLM refuses bias={raw['bias']}")
    start = raw.get("init_lora_weights", True)
    if isinstance(start, str) and start.lower() not in PLAIN_STARTS:
        return Verdict(False, f"vLLM refuses init_lora_weights={start!r}")
    if unread := [piece.key for piece in fit.contents.pieces if not _parsed(piece)]:
        return Verdict(False, f"vLLM refuses keys that are no factors: {shortened(unread)}")
    if fit.architecture not in _ARCHITECTURES:
        return Verdict("unknown", f"no rule for {fit.architecture}")
    if whole := fit.contents.of_kind("whole"):
        return Verdict(False, f"vLLM refuses {whole[0].key} in a model that does not classify")
    return _modules(fit)


def _parsed(piece: Piece) -> bool:
    """Return whether vLLM's reader takes a key: a factor, a head, or a base's embedding, which it leaves out."""
    if piece.kind == "base":
        return piece.key.endswith((".embed_tokens.base_layer.weight", ".lm_head.base_layer.weight"))
    if piece.kind == "whole":
        return piece.module.rpartition(".")[2] in _HEADS and piece.parameter in ("weight", "bias")
    return piece.kind in ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B")


def _modules(fit: Fit) -> Verdict:
    known = _ARCHITECTURES[fit.architecture]
    flags = []
    fused: list[Pair] = []
    for pair in fit.contents.pairs:
        if fit.experts(pair):
            fused.append(pair)
        elif fit.single(pair) is not None and fit.architecture in _SINGLE_EXPERTS:
            if incomplete := incomplete_experts(fit):
                return Verdict(False, f"vLLM needs factors of every matrix of every expert of {incomplete}")
        elif pair.last not in known and fit.architecture in _MIXTURES:
            return Verdict("unknown", f"no rule for {pair.module} of {fit.architecture}")
        elif pair.last not in known:
            return Verdict(False, f"vLLM's {fit.architecture} takes no LoRA on {pair.module}")
    if fused:
        verdict = _fused_experts(fit, fused)
        if verdict.loads is not True:
            return verdict
        flags += [verdict.reason] if verdict.reason else []
    highest = max([fit.contents.r, *fit.contents.patterns("rank_pattern").values()])
    if highest > _RANKS[-1]:
        return Verdict(False, f"vLLM's highest rank is {_RANKS[-1]}, this adapter's {highest}")
    if highest > _DEFAULT_RANK:
        flags.insert(0, f"--max-lora-rank {min(rank for rank in _RANKS if rank >= highest)}")
    return Verdict(True, f"with {' and '.join(flags)}" if flags else "scaling of each module included")


def _fused_experts(fit: Fit, pairs: list[Pair]) -> Verdict:
    """Return the verdict on the factors of all experts in one tensor; the reason names the settings it needs."""
    if renamed := _RENAMED_EXPERTS.get(fit.architecture):
        return Verdict(
            False, f"vLLM calls the experts {renamed} and would leave the factors of {pairs[0].module} out, silently"
        )
    by_module: dict[str, set[int]] = {}
    for pair in pairs:
        by_module.setdefault(pair.module, set()).add(pair.depth)
    if alone := [module for module, depths in by_module.items() if depths != {0, 1}]:
        return Verdict(False, f"vLLM needs factors of both gate_up_proj and down_proj of {alone[0]}")
    if fit.architecture in _FUSED_EXPERTS:
        return Verdict(True, "")
    return Verdict(True, "--enable-mixed-moe-lora-format and is_3d_lora_weight=True in the request")
