"""What llama.cpp's converter and loader do with an adapter (version and files: ``table.py``)."""

from __future__ import annotations

from peftlab.checkpoints.consumers.features import (
    FUSED,
    LLAMA,
    changed_meaning,
    foreign,
    incomplete_experts,
    other_scale,
    shortened,
)
from peftlab.checkpoints.consumers.fit import Fit
from peftlab.checkpoints.consumers.table import Verdict
from peftlab.models.skeleton import tied_names

_ARCHITECTURES: dict[str, frozenset[str]] = {
    "LlamaForCausalLM": LLAMA,
    "MistralForCausalLM": LLAMA,
    "Qwen2ForCausalLM": LLAMA,
    "Qwen3ForCausalLM": LLAMA,
    "GemmaForCausalLM": LLAMA,
    "Gemma2ForCausalLM": LLAMA,
    "Gemma3ForCausalLM": LLAMA,
    "GraniteForCausalLM": LLAMA,
    "SmolLM3ForCausalLM": LLAMA,
    "Phi3ForCausalLM": FUSED,
    "MixtralForCausalLM": LLAMA,
    "Qwen2MoeForCausalLM": LLAMA,
    "Qwen3MoeForCausalLM": LLAMA,
}
_NO_HEAD = ("GemmaForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM")  # their output layer is left out
_IGNORED_OPTIONS = ("lora_bias", "layer_replication", "use_bdlora", "use_qalora")


def rule(fit: Fit) -> Verdict:
    """Return what llama.cpp makes of an adapter."""
    contents = fit.contents
    if verdict := foreign(fit, "llama.cpp"):
        return verdict
    if verdict := changed_meaning(fit, "llama.cpp", _IGNORED_OPTIONS):
        return verdict
    others = contents.beside_factors
    if norms := [piece.key for piece in others if "_layernorm" in piece.key or ".norm" in piece.key]:
        return Verdict(False, f"llama.cpp converts trained norms and leaves them out when it loads: {shortened(norms)}")
    if others:
        keys = shortened(piece.key for piece in others)
        return Verdict(False, f"llama.cpp's converter refuses keys that are no factors: {keys}")
    if together := [pair.module for pair in contents.pairs if fit.experts(pair)]:
        return Verdict(
            False,
            f"llama.cpp's converter has no name for {together[0]}, whose factors are in one tensor for all experts",
        )
    if fit.architecture == "GPT2LMHeadModel" and contents.pairs:
        return Verdict(False, "llama.cpp's converter transposes the factors of GPT-2's layers, which exchanges A and B")
    if fit.architecture not in _ARCHITECTURES:
        return Verdict("unknown", f"no rule for {fit.architecture}")
    return _modules(fit)


def _modules(fit: Fit) -> Verdict:
    contents = fit.contents
    known = _ARCHITECTURES[fit.architecture] | {"embed_tokens", "lm_head"}
    if incomplete := incomplete_experts(fit):
        return Verdict(False, f"llama.cpp's converter needs factors of every matrix of every expert of {incomplete}")
    for pair in contents.pairs:
        if pair.last not in known and fit.single(pair) is None:
            return Verdict(False, f"llama.cpp's converter has no name for {pair.module} of {fit.architecture}")
        if pair.last == "lm_head" and fit.architecture in _NO_HEAD:
            return Verdict(False, f"llama.cpp leaves lm_head of {fit.architecture} out, silently")
        if pair.last == "lm_head" and tied_names(fit.model):
            return Verdict(False, "llama.cpp has no output layer of its own where it is tied to the embeddings")
    # alpha / rank, with each tensor's own rank; patterns and rsLoRA are not looked at.
    applied = {contents.rank(pair): contents.lora_alpha / contents.rank(pair) for pair in contents.pairs}
    if verdict := other_scale(fit, "llama.cpp", applied):
        return verdict
    return Verdict(True, "scaling lora_alpha / rank of each module")
