"""Deciding where each tensor of a merged checkpoint comes from, by names and shapes alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from peftlab.checkpoints.adapter import Adapter, in_model
from peftlab.checkpoints.fitting import check_fit, fitted
from peftlab.checkpoints.formats.peft_settling import divided
from peftlab.checkpoints.merge.options import MergeOptions
from peftlab.checkpoints.merge.plain_task import plain_task_model
from peftlab.checkpoints.merge.task_model import task_model
from peftlab.checkpoints.quantised import FP8, TrainingWeights, compressible
from peftlab.checkpoints.tensors import DTYPES, NAMES, Shard, open_shards
from peftlab.errors import PeftlabError
from peftlab.methods.injection import inject, injection_of
from peftlab.methods.leaf import Adapted, addition
from peftlab.methods.lora.own_copy import OwnCopy
from peftlab.methods.merging import refuse_unfoldable
from peftlab.models.base_format import BaseFormat
from peftlab.models.plain import NoValues
from peftlab.models.pretrained import load_config
from peftlab.models.skeleton import Place, places, tied_names

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_SUMMABLE = ("F16", "BF16", "F32", "F64")  # dtypes that a sum can be stored in; others are quantisation codes


@dataclass(frozen=True)
class Target:
    """One tensor of the merged checkpoint.

    Attributes:
        key: its key. name: the model's name for it. dtype, shape: as it is stored.
        shard, source: its file and key in the base; None and an empty string where the base has none.
        place: the base key's place; None where the base has none.
        scale: the key of its scales, for a weight in fp8.
    """

    key: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    shard: Shard | None = None
    source: str = ""
    place: Place | None = None
    scale: str = ""


@dataclass
class MergePlan:
    """What a merge will write.

    Attributes:
        model: the task model on the meta device, adapter injected.
        adapter: the adapter. shards: the base's files.
        files: the merged files' targets, by file name.
        folded: the parameters with a linear addition, and the leaf of each.
        given: parameters that the adapter contains whole.
        dropped: base keys left out, and why. notes: what the reader of the report should know.
        dtype: the dtype of most weights, by torch's name. stored: the dtype asked for, or None.
        trained: the weights that the base computed with in training, where the update is added to those.
        plain: for fp8, the linear maps that keep their dtype; None for other dtypes.
        composite: the base's configuration, where the adapter was trained in the text model of a larger one, which
            the merged checkpoint still is; else None.
    """

    model: PreTrainedModel
    adapter: Adapter
    shards: list[Shard]
    files: dict[str, list[Target]]
    folded: dict[str, str]
    given: dict[str, Tensor]
    dropped: dict[str, str]
    dtype: str
    stored: torch.dtype | None
    trained: TrainingWeights | None = None
    plain: list[str] | None = None
    composite: PretrainedConfig | None = None
    notes: list[str] = field(default_factory=list)

    def changes(self, name: str) -> bool:
        """Whether the merge changes the values of a parameter."""
        return name in self.folded or name in self.given or (self.trained is not None and name in self.trained)

    def close(self) -> None:
        """Close the base's files."""
        for shard in self.shards:
            shard.close()


def plan_merge(
    adapter: Adapter, directory: Path, options: MergeOptions, *, source: str, dequantised: bool = False
) -> MergePlan:
    """Decide where each tensor comes from; refuse whatever does not fit.

    Args:
        directory: of the base. source: the adapter's path, for messages.
        dequantised: ``directory`` already contains the values that a quantised base computes with.
    """
    shards = open_shards(directory)
    plain = plain_task_model(adapter, directory, shards, options)
    if plain is not None:
        with suppress(PeftlabError):  # what does not fit is told by the names of the class itself
            return _planned(plain, adapter, shards, options, source, dequantised)
    model = task_model(adapter, directory, source=source, trust_remote_code=options.trust_remote_code)
    config = load_config(str(directory), trust_remote_code=options.trust_remote_code)
    composite = config if type(model.config) in config.sub_configs.values() else None
    return _planned(model, adapter, shards, options, source, dequantised, composite)


def _planned(
    model: PreTrainedModel,
    adapter: Adapter,
    shards: list[Shard],
    options: MergeOptions,
    source: str,
    dequantised: bool,
    composite: PretrainedConfig | None = None,
) -> MergePlan:
    fp8 = options.dtype == FP8
    stored = None if fp8 else options.dtype
    weights, plain = _compressible(model) if fp8 else (set(), None)
    adapter = in_model(model, adapter)
    tied = tied_names(model)
    known = {name: parameter.shape for name, parameter in model.named_parameters(remove_duplicate=False)}
    known |= {name: tensor.shape for name, tensor in model.state_dict(keep_vars=True).items()}
    with NoValues():
        inject(model, adapter.config)
    given, shared = _whole_tensors(model, adapter, known, source)
    replaced = {name: model.get_submodule(name) for name in injection_of(model).replaced}
    leaves = {n: leaf for n, leaf in replaced.items() if isinstance(leaf, Adapted) and not isinstance(leaf, OwnCopy)}
    refuse_unfoldable(leaves)
    folded = {f"{name}.{key}": name for name, leaf in leaves.items() for key in leaf.fold()}
    main = _main_dtype(shards) if stored is None else stored
    name = str(main).removeprefix("torch.")
    plan = MergePlan(model, adapter, shards, {}, folded, given, {}, name, stored, plain=plain, composite=composite)
    plan.notes += adapter.notes
    found = _place_base(plan, known, tied)
    if not dequantised:
        _restore_training(plan, found, options, source)
    _refuse_codes(plan, found)
    extra = _tie(plan, found, tied, shared)
    _refuse_missing(plan, known, found, tied, extra, shards[0].path.parent)
    for shard in shards:
        targets = [_target(plan, shard, key, found[key]) for key in shard.entries if key in found]
        if targets:
            plan.files[shard.output_name] = targets
    plan.files[list(plan.files)[-1]] += extra
    plan.files = {name: list(_in_fp8(targets, weights)) for name, targets in plan.files.items()}
    return plan


def _restore_training(plan: MergePlan, found: dict[str, Place], options: MergeOptions, source: str) -> None:
    """Let the update be added to the values that a base had which was quantised when it was loaded."""
    if options.into == "dequantised" and not plan.adapter.base:
        raise PeftlabError(
            f"{source} does not say how its base was loaded, so --into dequantised cannot compute the base's values "
            "again; load the base as in training, then the adapter, and save it with peftlab.save_adapter, which "
            "notes that; or merge --into original"
        )
    raw = plan.adapter.base.get("format")
    if not isinstance(raw, dict):
        return
    how = BaseFormat.from_dict(raw, source)
    if options.into == "original":
        plan.notes.append(f"the adapter was trained on a base in {how}; the update was added to the original weights")
        return
    holders = {place.name: (shard, key) for shard in plan.shards for key in shard.entries if (place := found.get(key))}

    def read(name: str) -> Tensor | None:
        if name not in holders:
            return None
        shard, key = holders[name]
        return shard.read(key) if found[key].converter is None else None

    plan.trained = TrainingWeights(plan.model, how, read, source)
    plan.notes.append(
        f"the adapter was trained on a base in {how}: the update was added to the values of that, computed again from "
        "the base (--into original adds it to the base as it is)"
    )


def _compressible(model: PreTrainedModel) -> tuple[set[str], list[str]]:
    """Return the weights to store in fp8, and the linear maps that are not."""
    names, plain = compressible(model)
    many = next((name for name, parameter in model.named_parameters() if parameter.ndim == 3), None)
    if many or not names:
        why = f"{many} is the weights of several experts" if many else "it has no linear maps but its head"
        raise PeftlabError(f"{type(model).__name__} cannot be stored in fp8: {why}; choose --dtype bf16")
    return {f"{name}.weight" for name in names}, plain


def _in_fp8(targets: list[Target], weights: set[str]) -> Iterator[Target]:
    for target in targets:
        if target.name not in weights:
            yield target
            continue
        scale = f"{target.key}_scale"
        yield replace(target, dtype=NAMES[FP8], scale=scale)
        yield Target(scale, f"{target.name}_scale", "F32", (target.shape[0], 1))


def _whole_tensors(
    model: PreTrainedModel, adapter: Adapter, known: dict[str, torch.Size], source: str
) -> tuple[dict[str, Tensor], set[str]]:
    """Return the adapter's whole tensors by parameter, and those of them that all tied twins share.

    All others are checked to be the trained parameters of the method, one to one.
    """
    trained, given = divided(model, fitted(model, adapter.tensors, source=source), source=source)
    check_fit(model, trained, source=source)
    shared = set(given)
    for key, tensor in trained.items():
        module, _, last = key.rpartition(".")
        name = f"{module}.{last.removeprefix('own_')}"
        if name in known:
            given[name] = tensor
            shared |= {name} & {key}
    return given, shared


def _place_base(plan: MergePlan, known: dict[str, torch.Size], tied: dict[str, str]) -> dict[str, Place]:
    """Return the place of each base key in the model; keys without one are recorded as dropped.

    Where the model is the text model of a larger one, and the base contains all of it, all keys stay as they are.
    """
    kind = type(plan.model).__name__
    everywhere = places(plan.model, [key for shard in plan.shards for key in shard.entries])
    if plan.composite is not None:
        present = {name for place in everywhere.values() if place is not None for name in place.names}
        present |= {name for pair in tied.items() if present & {*pair} for name in pair}
        if known.keys() <= present:
            everywhere = {key: Place(key, key) if p is None else replace(p, key=key) for key, p in everywhere.items()}
        else:  # a task head is new: the merged checkpoint is the task model's
            plan.composite = None
    found: dict[str, Place] = {}
    for shard in plan.shards:
        for key, entry in shard.entries.items():
            place = everywhere[key]
            if place is None:
                plan.dropped[key] = f"{kind} has no such parameter"
                continue
            whole = place.converter is None and place.name not in plan.given
            needed = tuple(known.get(place.name, entry.shape))
            if whole and entry.shape != needed:
                raise PeftlabError(f"{shard.path}: {key!r} has shape {entry.shape}, {kind} needs {needed}")
            found[key] = place
    if not found:
        raise PeftlabError(f"{plan.shards[0].path.parent}: none of its weights belongs to {kind}")
    return found


def _refuse_codes(plan: MergePlan, found: dict[str, Place]) -> None:
    """Refuse to change weights that are stored as integers or in eight bits."""
    for shard in plan.shards:
        for key, entry in shard.entries.items():
            names = found[key].names if key in found else ()
            if entry.dtype not in _SUMMABLE and any(name in plan.folded or name in plan.given for name in names):
                raise PeftlabError(
                    f"{shard.path}: {key!r} is stored as {entry.dtype}, which cannot represent W0 + ΔW; config.json "
                    "has no quantization_config to read it by; merge into the model that was quantised"
                )


def _tie(plan: MergePlan, found: dict[str, Place], tied: dict[str, str], shared: set[str]) -> list[Target]:
    """Keep tied parameters tied, or untie those that the adapter makes differ.

    Returns the targets that the base has no key for: heads, and the second of two untied parameters.
    """
    holders = {place.name: (shard, key) for shard in plan.shards for key in shard.entries if (place := found.get(key))}
    pairs = [(twin, origin) for twin, origin in tied.items() if twin in holders or origin in holders]
    differ = [pair for pair in pairs if _differ(plan, holders, *pair, shared)]
    extra = []
    for twin, origin in pairs:
        if not differ:
            if twin in holders and origin in holders:
                if plan.composite is not None:  # which may not tie what its text model does
                    plan.given |= {twin: plan.given[origin]} if origin in plan.given else {}
                    continue
                key = holders[twin][1]
                plan.dropped[key] = f"tied to {origin}"
                del found[key]
            plan.given.pop(twin, None)
            continue
        if (twin, origin) in differ:
            plan.notes.append(f"{twin} and {origin} were tied and differ now: both are written, config.json says so")
        # The setting holds for the whole model: pairs that are still equal would not be tied on loading either.
        for config in {id(c): c for c in (plan.model.config, plan.model.config.get_text_config())}.values():
            config.tie_word_embeddings = False
        for name, other in ((twin, origin), (origin, twin)):
            if name not in plan.given and other in shared and other in plan.given:
                plan.given[name] = plan.given[other]
            if name not in holders:
                shard, key = holders[other]
                prefix = key.removesuffix(other) if plan.composite is not None and key.endswith(other) else ""
                extra.append(_target(plan, shard, key, Place(name, prefix + name)))
    present = {place.name for place in found.values()} | {target.name for target in extra} | set(tied)
    for name, tensor in plan.given.items():
        if name not in present:
            extra.append(Target(name, name, NAMES[getattr(torch, plan.dtype)], tuple(tensor.shape)))
    return extra


def _differ(plan: MergePlan, holders: dict[str, tuple[Shard, str]], twin: str, origin: str, shared: set[str]) -> bool:
    """Whether two tied parameters have different values after the merge."""
    if twin in plan.folded or origin in plan.folded:
        return not _folded_alike(plan, twin, origin)
    if twin in plan.given and origin in plan.given:
        return not torch.equal(plan.given[twin], plan.given[origin])
    if twin in plan.given or origin in plan.given:
        return not shared & {twin, origin}
    if twin in holders and origin in holders:
        (shard, key), (other, other_key) = holders[twin], holders[origin]
        return not torch.equal(shard.read(key), other.read(other_key))
    return False


def _folded_alike(plan: MergePlan, twin: str, origin: str) -> bool:
    leaves = [plan.model.get_submodule(plan.folded[name]) for name in (twin, origin) if name in plan.folded]
    return len({addition(leaf) for leaf in leaves if isinstance(leaf, Adapted)}) == 1 and len(leaves) == 2


def _target(plan: MergePlan, shard: Shard, key: str, place: Place) -> Target:
    entry = shard.entries[key]
    floating = DTYPES[entry.dtype].is_floating_point
    dtype = NAMES[plan.stored] if plan.stored is not None and floating else entry.dtype
    whole = place.name in plan.given and place.converter is None
    shape = tuple(plan.given[place.name].shape) if whole else entry.shape
    return Target(place.key, place.name, dtype, shape, shard, key, place)


def _main_dtype(shards: list[Shard]) -> torch.dtype:
    sizes: Counter[torch.dtype] = Counter()
    for shard in shards:
        for entry in shard.entries.values():
            if DTYPES[entry.dtype].is_floating_point:
                sizes[DTYPES[entry.dtype]] += entry.nbytes
    if not sizes:
        raise PeftlabError(f"{shards[0].path.parent}: has no floating-point weights")
    return sizes.most_common(1)[0][0]


def _refuse_missing(
    plan: MergePlan,
    known: dict[str, torch.Size],
    found: dict[str, Place],
    tied: dict[str, str],
    extra: list[Target],
    base: Path,
) -> None:
    present = {target.name for target in extra} | plan.given.keys()
    for place in found.values():
        present |= set(place.names)
    twins = {*tied.items(), *((origin, twin) for twin, origin in tied.items())}
    present |= {name for name, other in twins if other in present}
    computed = set(plan.model._keys_to_ignore_on_save or ())  # such as sinusoidal positions, made by the class
    missing = [name for name in known if name not in present and name not in tied and name not in computed]
    if missing:
        raise PeftlabError(
            f"{base} and the adapter together lack {len(missing)} tensors of {type(plan.model).__name__}: "
            f"{', '.join(missing[:5])}{', ...' if len(missing) > 5 else ''}"
        )
