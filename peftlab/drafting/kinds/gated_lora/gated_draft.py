"""The target with a LoRA for masks as its own draft: trained in the frozen target, read back for decoding."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from datasets import Dataset
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from peftlab.checkpoints.adapter import load_adapter, read_adapter, save_adapter
from peftlab.checkpoints.fitting import fill
from peftlab.decoding.engine import Engine
from peftlab.decoding.engines import build_engine
from peftlab.decoding.parallel_drafters import MaskedPassEngine, Masks, OnePassDrafter, ParallelDrafter
from peftlab.decoding.recurrent import MIXERS
from peftlab.drafting.acceptance import by_depth
from peftlab.drafting.base import (
    Draft,
    DraftJob,
    Loss,
    Opened,
    Opening,
    OwnLayers,
    Saved,
    Served,
    check_start,
    found_in,
    newest_in,
)
from peftlab.drafting.checks import TargetIdentity, check_target, check_tokenizer, end_ids, identify
from peftlab.drafting.config import GatedLoraDraft
from peftlab.drafting.gated_lora import (
    FOLDER,
    GatedLoss,
    UnoExport,
    is_gated,
    measure_masks,
    read_masks_of_gate,
    write_masks_of_gate,
)
from peftlab.drafting.objectives import make_objective
from peftlab.drafting.pard import check_parallel, unused_token
from peftlab.drafting.states import head_weight
from peftlab.errors import PeftlabError
from peftlab.files import staged_directory
from peftlab.methods.config import MethodConfig
from peftlab.methods.injection import injection_of
from peftlab.methods.lora.gate import Gate
from peftlab.methods.lora.kinds import leaf_kind
from peftlab.methods.lora.layers import LoraConv1D, LoraLinear, conceal, set_gate
from peftlab.methods.table import plan

find = partial(found_in, folder=FOLDER, known=is_gated)


@dataclass
class GatedDraft(Draft):
    """A target and its LoRA for masks.

    Attributes:
        gate: on which rows the LoRA acts. masks: what they read. identity: of the target as it is without LoRA.
    """

    masks: Masks = field(kw_only=True)
    identity: TargetIdentity = field(kw_only=True)
    gate: Gate = field(default_factory=Gate, kw_only=True)


def check(job: DraftJob[GatedLoraDraft], target: PretrainedConfig) -> None:
    """Refuse a mask that is no token, and a draft to continue from that is none."""
    size, mask = target.get_text_config(decoder=True).vocab_size, job.config.mask_token
    if mask is not None and mask >= size:
        raise PeftlabError(f"draft.mask_token: {mask} is no token; the target has 0 to {size - 1}")
    check_start(job.config.from_, find, "is no gated LoRA (gated_lora.json)")


def load(job: DraftJob[GatedLoraDraft], target: PreTrainedModel) -> GatedDraft:
    """Return the target, checked for masks beside a text and for additions on some rows alone.

    Raises:
        PeftlabError: it cannot have them, or the method changes what the text is read with.
    """
    refuse_states(target)
    check_parallel(target, job.config.kind)
    assert job.method is not None
    check_targets(target, job.method)
    config, size = job.config, len(head_weight(target))
    masks = Masks(size if config.noise else -1 if config.mask_token is None else config.mask_token, 1, config.noise)
    if config.from_ is not None and config.mask_token is None and not config.noise:
        masks = read_masks_of_gate(str(find(config.from_)), size)
    masks = replace(masks, length=config.blocks[-1])
    identity, eos = identify(job.target, target, job.tokenizer), end_ids(target, job.tokenizer)
    return GatedDraft(target, target, target, job.target, eos, masks=masks, identity=identity)


def refuse_states(target: PreTrainedModel) -> None:
    """Refuse a state-space model."""
    if type(target).__name__ in MIXERS:
        raise PeftlabError(
            f"draft.kind gated_lora: {type(target).__name__} keeps a state that each token changes, so that masks "
            "cannot be read beside a text; train draft: {kind: model} for it"
        )


def check_targets(target: nn.Module, method: MethodConfig) -> None:
    """Refuse targets that see other rows than one for each token, and parameters that all rows read."""
    planned = plan(target, method)
    for name in planned.replace:
        if leaf_kind(target.get_submodule(name)) not in (LoraLinear, LoraConv1D) or ".experts." in name:
            raise PeftlabError(
                f"draft.kind gated_lora: {name} ({type(target.get_submodule(name)).__name__}) cannot take an addition "
                "on some rows of a batch alone, as linear maps on all tokens can; take it out of the method's targets"
            )
    if planned.train:
        raise PeftlabError(
            f"draft.kind gated_lora: method {method.name} would train {planned.train[0]} itself, which the text is "
            "read with; only additions can act on masks alone"
        )


def prepare(job: DraftJob[GatedLoraDraft], draft: GatedDraft, train: Dataset) -> None:
    """Choose the mask, where none is named."""
    if draft.masks.token < 0:
        draft.masks = replace(draft.masks, token=unused_token(len(head_weight(draft.target)), train["input_ids"]))


def loss(job: DraftJob[GatedLoraDraft], draft: GatedDraft) -> Loss:
    """Return the objective between masks and the text's own rows; the injected LoRA continues where it is to."""
    set_gate(draft.adapted, draft.gate)
    if job.config.from_ is not None:
        continue_from(draft.adapted, str(find(job.config.from_)))
    return GatedLoss(make_objective(job.objective), draft.gate, lambda: draft.masks, job.config.blocks)


def continue_from(model: nn.Module, place: str) -> None:
    """Copy the values of a stored LoRA of the same method into an injected model."""
    adapter, config = read_adapter(place), injection_of(model).config
    for key in ("lora_alpha", "alpha_pattern", "use_rslora", "use_dora", "init_lora_weights"):
        here, there = getattr(config, key, None), getattr(adapter.config, key, None)
        if here != there:
            raise PeftlabError(f"draft.from {place}: its method has {key} {there}, this run's {here}")
    fill(model, adapter.tensors, source=f"draft.from {place}")


def score(draft: GatedDraft, model: nn.Module, data: Dataset, batch_size: int) -> dict[str, float]:
    """Return the mean acceptance over the masks of a block, and each one's own."""
    return by_depth(measure_masks(model, draft.gate, data, draft.masks, batch_size))


def save(job: DraftJob[GatedLoraDraft], draft: GatedDraft, directory: Path, train: Dataset) -> None:
    """Write the LoRA once more, with what its masks read and the identity of its target beside it."""
    draft.gate.show(None)
    with staged_directory(directory / FOLDER, "adapter", overwrite=True) as staging:
        save_adapter(draft.adapted, staging, base=draft.base)
        write_masks_of_gate(staging, draft.masks)
        draft.identity.write(staging)


def drafter(draft: GatedDraft, saved: Saved | None) -> Served | None:
    """Return the target with its LoRA, which drafts in two passes; an untrained one, without a mask, drafts nothing."""
    if saved is None:
        return None
    own = _own(draft.gate, draft.masks, build_engine(draft.adapted))
    return Served(draft.adapted, partial(own.drafter, own.engine))


def _own(gate: Gate, masks: Masks, engine: Engine) -> OwnLayers:
    """Return the target's engine, with its LoRA for masks, as a draft in the target's cache."""
    if not engine.positioned:
        raise PeftlabError(
            f"draft gated_lora: reads masks beside the tokens of a text, and this target's kernel is {engine.kind}"
        )
    two = partial(ParallelDrafter, masks=masks, shares_cache=True)
    return OwnLayers(MaskedPassEngine(engine, gate), two, one_pass=partial(OnePassDrafter, engine, masks, gate=gate))


def open(reference: str, opening: Opening) -> Opened:
    """Load the LoRA into the target, which stays as it is but for masks: other tokens are refused, other weights a
    warning."""
    check_tokenizer(Path(reference), opening.tokenizer)  # before any weights are read
    target = opening.target
    warnings = check_target(Path(reference), target, opening.tokenizer)
    masks = read_masks_of_gate(reference, len(head_weight(target)))
    gate = Gate()
    load_adapter(target, reference)
    set_gate(target, gate)
    size = conceal(target)
    return Opened(size, own=partial(_own, gate, masks), masks=masks, warnings=warnings)


def export(place: str, consumer: str) -> UnoExport:
    """Return what writes the LoRA for SGLang, which alone serves such drafts."""
    if consumer != "sglang":
        raise PeftlabError(
            f"--for {consumer}: {place} is a LoRA that acts on masks alone (gated_lora), which sglang alone serves"
        )
    return UnoExport(Path(place))


def update(config: GatedLoraDraft, newest: Path, log: Path) -> GatedLoraDraft:
    """Return the section that continues from the LoRA of ``newest``, with its mask."""
    return config.model_copy(update={"from_": newest_in(newest, FOLDER, is_gated)})
