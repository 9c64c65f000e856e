"""What LoRAX does with an adapter (version and files: ``table.py``)."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable

from peftlab.checkpoints.consumers.features import FUSED, LLAMA, changed_meaning, foreign, other_scale, shortened
from peftlab.checkpoints.consumers.fit import Fit
from peftlab.checkpoints.consumers.table import Verdict

_ARCHITECTURES: dict[str, frozenset[str]] = {
    "LlamaForCausalLM": LLAMA | {"lm_head"},
    "MistralForCausalLM": LLAMA | {"lm_head"},
    "Qwen2ForCausalLM": LLAMA | {"lm_head"},
    "GemmaForCausalLM": LLAMA,
    "Gemma2ForCausalLM": LLAMA,
    "Phi3ForCausalLM": FUSED,
}
_IGNORED_OPTIONS = ("use_dora", "lora_bias", "alora_invocation_tokens", "layer_replication")


def rule(fit: Fit) -> Verdict:
    """Return what LoRAX makes of an adapter."""
    contents = fit.contents
    if verdict := foreign(fit, "LoRAX"):
        return verdict
    if verdict := changed_meaning(fit, "LoRAX", _IGNORED_OPTIONS):
        return verdict
    dropped = [piece.key for piece in contents.pieces if piece.kind not in ("lora_A", "lora_B", "base")]
    dropped += [pair.module for pair in contents.pairs if fit.experts(pair)]
    known = _ARCHITECTURES.get(fit.architecture, frozenset())
    if not dropped and not known:
        return Verdict("unknown", f"no rule for {fit.architecture}")
    if dropped := dropped or [pair.module for pair in contents.pairs if pair.last not in known]:
        return Verdict(False, f"LoRAX leaves these out, with a warning in its log: {shortened(dropped)}")
    ranks: dict[str, set[int]] = {}
    for pair in contents.pairs:
        ranks.setdefault(pair.last, set()).add(pair.a[0])
    if uneven := [last for last, found in ranks.items() if len(found) > 1]:
        return Verdict(False, f"LoRAX needs one rank in all layers' {uneven[0]}; there are {sorted(ranks[uneven[0]])}")
    if gaps := absent_layers(fit.modules, {pair.module for pair in contents.pairs}):
        return Verdict(False, f"LoRAX leaves all {gaps[0].rpartition('.')[2]} out where one layer lacks it: {gaps[0]}")
    rank = contents.r
    if len(ranks) > 1 and padded_rank(rank) != rank:
        # Padding changes the rank that the next kinds of layer are scaled by.
        return Verdict(False, f"LoRAX pads rank {rank} to {padded_rank(rank)} and then scales by the padded rank")
    scaling = contents.lora_alpha / (math.sqrt(rank) if contents.raw.get("use_rslora") else rank)
    if verdict := other_scale(fit, "LoRAX", {contents.rank(pair): scaling for pair in contents.pairs}):
        return verdict
    return Verdict(True, f"scaling {scaling:g} everywhere")


def padded_rank(rank: int) -> int:
    """Return the rank that LoRAX's kernels pad to: at least 8, above that a multiple of 16."""
    return max(8, rank) if rank <= 8 else -(-rank // 16) * 16


def absent_layers(modules: Iterable[str], adapted: Collection[str]) -> list[str]:
    """Return the modules of other layers that are called as an adapted one and have no factors."""
    kinds = {name.rpartition(".")[2] for name in adapted}
    return [name for name in modules if name.rpartition(".")[2] in kinds and name not in adapted]
