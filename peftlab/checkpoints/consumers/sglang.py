"""What SGLang does with an adapter (version and files: ``table.py``)."""

from __future__ import annotations

from collections.abc import Iterable

from peftlab.checkpoints.consumers.features import (
    LLAMA,
    changed_meaning,
    foreign,
    incomplete_experts,
    other_scale,
    shortened,
)
from peftlab.checkpoints.consumers.fit import Fit
from peftlab.checkpoints.consumers.table import Verdict

_EMBEDDINGS = frozenset(("embed_tokens", "lm_head"))
_ARCHITECTURES: dict[str, frozenset[str]] = {
    "LlamaForCausalLM": LLAMA | _EMBEDDINGS,
    "MistralForCausalLM": LLAMA | _EMBEDDINGS,
    "Qwen2ForCausalLM": LLAMA | _EMBEDDINGS,
    "Qwen3ForCausalLM": LLAMA | _EMBEDDINGS,
    "GemmaForCausalLM": LLAMA,
    "Gemma2ForCausalLM": LLAMA,
    "Gemma3ForCausalLM": LLAMA,
    "GraniteForCausalLM": LLAMA,
    "Qwen3MoeForCausalLM": LLAMA,
}
# A projection that is read only beside these others of the same layer: they share one matrix in the engine.
PARTNERS = {"q_proj": ("v_proj",), "k_proj": ("q_proj", "v_proj"), "v_proj": ("q_proj",), "up_proj": ("gate_proj",)}
_IGNORED_OPTIONS = ("lora_bias", "alora_invocation_tokens", "layer_replication", "use_bdlora", "use_qalora")


def rule(fit: Fit) -> Verdict:
    """Return what SGLang makes of an adapter."""
    contents = fit.contents
    if verdict := foreign(fit, "SGLang"):
        return verdict
    if contents.raw.get("use_dora"):
        return Verdict(False, "SGLang refuses use_dora")
    targets = contents.raw.get("target_modules")
    if not targets or (isinstance(targets, str) and targets not in ("all", "all-linear")):
        return Verdict(False, f"SGLang refuses target_modules={targets!r}: it needs a list of names, or all-linear")
    if "added_tokens.json" in contents.files:
        return Verdict("unknown", "SGLang refuses adapters whose added_tokens.json has tokens the base lacks")
    if verdict := changed_meaning(fit, "SGLang", _IGNORED_OPTIONS):
        return verdict
    if dropped := contents.beside_factors:
        return Verdict(False, f"SGLang reads no tensor but factors: {shortened(piece.key for piece in dropped)}")
    if together := [pair.module for pair in contents.pairs if fit.experts(pair)]:
        return Verdict(
            False, f"SGLang reads factors expert by expert; those of {together[0]} are in one tensor for all experts"
        )
    if fit.architecture not in _ARCHITECTURES:
        return Verdict("unknown", f"no rule for {fit.architecture}")
    return _modules(fit)


def _modules(fit: Fit) -> Verdict:
    contents, known = fit.contents, _ARCHITECTURES[fit.architecture]
    if incomplete := incomplete_experts(fit):
        return Verdict("unknown", f"no rule for experts of {incomplete} without factors")
    for pair in contents.pairs:
        if pair.last not in known:
            return Verdict(False, f"SGLang's {fit.architecture} takes no LoRA on {pair.module}")
        if pair.a[0] != contents.r:
            return Verdict(False, f"SGLang needs rank r={contents.r} everywhere; {pair.module} has {pair.a[0]}")
    if verdict := other_scale(fit, "SGLang"):
        return verdict
    if lone := lone_projections([pair.module for pair in contents.pairs]):
        module, partner = lone[0]
        last = module.rpartition(".")[2]
        return Verdict(False, f"SGLang reads {last} only beside {partner} of the same layer: {module}")
    return Verdict(True, "rank r and scaling lora_alpha / r everywhere")


def lone_projections(modules: Iterable[str]) -> list[tuple[str, str]]:
    """Return the modules that lack a partner without which SGLang does not read them, and the partner's name."""
    adapted = set(modules)
    return [
        (module, partner)
        for module in sorted(adapted)
        for partner in PARTNERS.get(module.rpartition(".")[2], ())
        if f"{module.rpartition('.')[0]}.{partner}" not in adapted
    ]
