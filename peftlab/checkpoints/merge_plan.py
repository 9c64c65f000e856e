"""Deciding where each tensor of a merged checkpoint comes from, by names and shapes alone.

The model is made without transformers where names and shapes alone decide: ``plain_task_model``.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from peftlab.checkpoints.adapter import Adapter, by_parameter_name, check_fit, resolve_adapter
from peftlab.checkpoints.peft_format import all_names, new_names, split_embeddings
from peftlab.checkpoints.quantised import FP8, TrainingWeights, compressible
from peftlab.checkpoints.tensors import DTYPES, NAMES, Shard, open_shards
from peftlab.errors import PeftlabError, did_you_mean, reason
from peftlab.files import Json, read_object, typed_value
from peftlab.methods.base import Adapted, addition, refuse_unfoldable
from peftlab.methods.inject import inject
from peftlab.methods.lora.layers import OwnCopy
from peftlab.models.architectures import NoValues, PlainModel, inside, plain_model
from peftlab.models.config import Into
from peftlab.models.load import Bounded, Place, check_sizes, empty_model, load_config, places, tied_names
from peftlab.models.quantised import STORED, BaseFormat

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_SUMMABLE = ("F16", "BF16", "F32", "F64")  # dtypes that a sum can be stored in; others are quantisation codes


@dataclass(frozen=True)
class Training:
    """What a card says of the training behind a model.

    Attributes:
        name: title and model name. summary: what was trained on what, the end of the card's first sentence.
        parts: Markdown blocks. data: front matter: task, data sets, results.
    """

    name: str
    summary: str
    parts: Sequence[str]
    data: Mapping[str, object]


@dataclass(frozen=True)
class MergeOptions:
    """Options of ``merge_checkpoint``; all have defaults.

    Attributes:
        dtype: of the merged weights; None: each keeps the dtype it is stored in.
        gguf_type: the same for a GGUF file: one of ``checkpoints.gguf.TYPES``; None or ``keep``: as it is stored.
        fp64: compute product and sum in fp64 instead of fp32.
        overwrite: replace the output if it is a model directory that peftlab wrote.
        allow_nonfinite: write NaN and infinity where they arise.
        into: what the update is added to where the base was quantised: ``dequantised``, the values that the model
            computed with in training, or ``original``, the weights before they were quantised. None: dequantised
            where the adapter says how its base was loaded, else the weights as they are stored.
        trust_remote_code: run the model code in the base directory.
        revision: git revision of a base on the hub; None: the one that the adapter names with that base.
        lora_alpha: α of a loralib file, which does not contain it.
        push_to_hub: id of a repository to upload the result to; a new one is private.
        recipe: text to embed in the model card. training: what the card says of the adapter's training.
    """

    dtype: torch.dtype | None = None
    gguf_type: str | None = None
    fp64: bool = False
    overwrite: bool = False
    allow_nonfinite: bool = False
    into: Into | None = None
    trust_remote_code: bool = False
    revision: str | None = None
    lora_alpha: float | None = None
    push_to_hub: str | None = None
    recipe: str | None = None
    training: Training | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.dtype, torch.dtype | None):
            right = STORED.get(str(self.dtype)) or f"one of {', '.join(map(str, STORED.values()))}"
            raise PeftlabError(f"MergeOptions: dtype {self.dtype!r} is not a torch.dtype; write {right}")

    @property
    def precision(self) -> torch.dtype:
        """The dtype of product and sum."""
        return torch.float64 if self.fp64 else torch.float32


@dataclass(frozen=True)
class Target:
    """One tensor of the merged checkpoint.

    Attributes:
        key: its key. name: the model's name for it. dtype, shape: as it is stored.
        shard, source: its file and key in the base; None and an empty string where the base has none.
        place: the base key's place; None where the base has none.
        scale: the key of its scales, for a weight in fp8.
        pieces: the keys under which it is stored in parts, as experts one by one; empty for all else.
    """

    key: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    shard: Shard | None = None
    source: str = ""
    place: Place | None = None
    scale: str = ""
    pieces: tuple[str, ...] = ()


@dataclass(frozen=True)
class BaseAccounts:
    """What became of the tensors in the base's files.

    Attributes:
        tensors: how many there are. changed: by the merge. copied: with the values they have.
        left_out: named in the report's ``dropped``, with the reason.
    """

    tensors: int = 0
    changed: int = 0
    copied: int = 0
    left_out: int = 0

    def line(self) -> str:
        """Return the accounts as a line of text."""
        found = self.changed + self.copied + self.left_out
        return (
            f"{found} of {self.tensors} base tensors accounted for: {self.changed} changed, {self.copied} copied, "
            f"{self.left_out} left out"
        )


@dataclass
class MergePlan:
    """What a merge will write. Each tensor of the base's files is a target's source, in ``dropped``, or refused.

    Attributes:
        model: the task model on the meta device, adapter injected.
        adapter: the adapter. shards: the base's files.
        files: the merged files' targets, by file name.
        folded: the parameters with a linear addition, under each of their names, and the leaf of each.
        given: the values of parameters that the adapter contains whole, under each of their names.
        values: the adapter's tensors by the identity of the model's parameters.
        ignored: base keys that the task model has no parameter for and that are copied as they are.
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
    values: dict[int, Tensor]
    dropped: dict[str, str]
    dtype: str
    stored: torch.dtype | None
    trained: TrainingWeights | None = None
    plain: list[str] | None = None
    ignored: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    composite: PretrainedConfig | None = None

    def changes(self, name: str) -> bool:
        """Whether the merge changes the values of a parameter."""
        return name in self.folded or name in self.given or (self.trained is not None and name in self.trained)

    def accounts(self) -> BaseAccounts:
        """Count what becomes of the base's tensors.

        Raises:
            PeftlabError: one is neither written nor named as left out: a fault of the plan, not of its input.
        """
        changed: set[str] = set()
        written: set[str] = set()
        for target in (target for targets in self.files.values() for target in targets if target.shard is not None):
            names = target.place.names if target.place is not None else [target.name]
            written.add(target.source)
            if any(self.changes(name) for name in names):
                changed.add(target.source)
        every = {key for shard in self.shards for key in shard.entries}
        if lost := sorted(every - written - self.dropped.keys()):
            raise PeftlabError(f"{len(lost)} tensors of the base would be lost, {lost[0]} for one; nothing was written")
        return BaseAccounts(len(every), len(changed), len(written - changed), len(self.dropped))

    def ignored_note(self, to_file: bool) -> list[str]:
        """Return a note on what became of the tensors in ``ignored``; none if there are none.

        Args:
            to_file: the merge writes a GGUF file, not a directory.
        """
        became = f"that {type(self.model).__name__} has no parameter for were copied as they are"
        became = "are not in the GGUF file, which has no place for them" if to_file else became
        return [f"{len(self.ignored)} tensors of the base {became}: {_summary(self.ignored)}"] if self.ignored else []

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
            return _build_plan(plain, adapter, shards, options, source, dequantised)
    model = task_model(adapter, directory, source=source, trust_remote_code=options.trust_remote_code)
    config = load_config(str(directory), trust_remote_code=options.trust_remote_code)
    composite = config if type(model.config) in config.sub_configs.values() else None
    return _build_plan(model, adapter, shards, options, source, dequantised, composite)


def _build_plan(
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
    found = _find_places(model, shards)
    notes = _untie_what_differs(model, shards, found)
    adapter = resolve_adapter(model, adapter)
    tied: dict[int, list[str]] = defaultdict(list)  # all names of each parameter
    for name, parameter in model.named_parameters(remove_duplicate=False):
        tied[id(parameter)].append(name)
    known = {name: parameter.shape for name, parameter in model.named_parameters(remove_duplicate=False)}
    known |= {name: tensor.shape for name, tensor in model.state_dict(keep_vars=True).items()}
    groups = [names for names in tied.values() if len(names) > 1]
    if composite is not None:
        present = _with_ties((name for place in found.values() for name in place.names), groups)
        if known.keys() <= present:  # all of the larger model is there: its keys stay as they are
            found = {key: replace(place, key=key) for key, place in found.items()}
        else:  # a task head is new: the merged checkpoint is the task model's
            composite = None
    with NoValues():
        inject(model, adapter.config)
    # An embedding that peft saved beside the adapter replaces the base's parameter in all modules that share it; all
    # other tensors are the trained parameters of the method, one to one.
    trained, saved = split_embeddings(model, by_parameter_name(model, adapter.tensors, source=source), source=source)
    check_fit(model, trained, source=source)
    parameters: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    parameters |= dict(model.named_buffers(remove_duplicate=False))
    values = {id(parameters[name]): tensor for name, tensor in (saved | trained).items()}
    given = {}  # a module that trains a copy of its own has that copy's value
    for name in known:
        owner, _, last = name.rpartition(".")
        used = parameters.get(f"{owner}.own_{last}", parameters.get(name))
        if id(used) in values:
            given[name] = values[id(used)]
    main = _main_dtype(shards) if stored is None else stored
    name = str(main).removeprefix("torch.")
    plan = MergePlan(
        model, adapter, shards, {}, _folded(model), given, values, {}, name, stored, plain=plain, composite=composite
    )
    plan.notes += [*adapter.notes, *notes]
    if not dequantised:
        _add_to_training_weights(plan, found, options, source)
    _refuse_codes(plan, found)
    extra = _write_tied(plan, found, groups)
    _refuse_missing(plan, known, found, extra, groups)
    rest = _find_other_places(plan, found, options)
    for shard in shards:
        where = {key: place for key in shard.entries if (place := found.get(key) or rest.get(key))}
        if where:
            plan.files[shard.output_name] = [_target(plan, shard, key, place) for key, place in where.items()]
    plan.files[list(plan.files)[-1]] += extra
    _check_shapes(plan, known)
    plan.files = {name: list(_in_fp8(targets, weights)) for name, targets in plan.files.items()}
    return plan


def _find_places(model: PreTrainedModel, shards: list[Shard]) -> dict[str, Place]:
    """Return the place in the model of each base key that it has a parameter for: each parameter has one key.

    Raises:
        PeftlabError: no key belongs to the model, or two keys are one parameter.
    """
    kind, base = type(model).__name__, shards[0].path.parent
    holders = {key: shard for shard in shards for key in shard.entries}
    found = {key: place for key, place in places(model, list(holders)).items() if place is not None}
    if not found:
        raise PeftlabError(f"{base}: none of its weights belongs to {kind}")
    by_name: dict[str, str] = {}
    for key, place in found.items():
        first = by_name.setdefault(place.name, key) if place.converter is None else key
        if first != key:
            raise PeftlabError(f"{base}: {first!r} and {key!r} are both {place.name} of {kind}; remove one of them")
    return found


def _holders(shards: list[Shard], found: dict[str, Place]) -> dict[str, tuple[Shard, str]]:
    """Return the file and the key of each parameter that the base contains, by its name in the model."""
    return {place.name: (shard, key) for shard in shards for key in shard.entries if (place := found.get(key))}


def _untie_what_differs(model: PreTrainedModel, shards: list[Shard], found: dict[str, Place]) -> list[str]:
    """Untie the parameters that the base stores with different values, as ``from_pretrained`` does; return notes.

    The configuration may say that they are tied: the files decide.
    """
    holders = _holders(shards, found)
    notes = []
    for twin, origin in tied_names(model).items():
        if twin not in holders or origin not in holders or model.get_parameter(twin) is not model.get_parameter(origin):
            continue
        (shard, key), (other, other_key) = holders[twin], holders[origin]
        if shard.entries[key].shape == other.entries[other_key].shape and torch.equal(
            shard.read(key), other.read(other_key)
        ):
            continue
        owner, _, last = twin.rpartition(".")
        parameter = model.get_parameter(twin)
        model.get_submodule(owner)._parameters[last] = nn.Parameter(torch.empty_like(parameter))
        model.all_tied_weights_keys.pop(twin)
        notes.append(f"the base stores {twin} and {origin} with different values: they are merged as two matrices")
    return notes


def _folded(model: PreTrainedModel) -> dict[str, str]:
    """Return the parameters with a linear addition, under each of their names, with the name of the adapted leaf."""
    refuse_unfoldable({name: leaf for name, leaf in model.named_modules() if isinstance(leaf, Adapted)})
    return {
        f"{name}.{key}": name
        for name, leaf in model.named_modules(remove_duplicate=False)
        if isinstance(leaf, Adapted) and not isinstance(leaf, OwnCopy)
        for key in leaf.fold()
    }


def _add_to_training_weights(plan: MergePlan, found: dict[str, Place], options: MergeOptions, source: str) -> None:
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
    holders = _holders(plan.shards, found)

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


def _check_shapes(plan: MergePlan, known: dict[str, torch.Size]) -> None:
    """Refuse a tensor that would not have its parameter's shape, as where the vocabulary has grown in training."""
    for target in (target for targets in plan.files.values() for target in targets):
        if target.place is None or target.place.converter is not None or target.name not in known:
            continue
        shape = tuple(known[target.name])
        if target.shape == shape:
            continue
        assert target.shard is not None
        tokens = getattr(plan.model.config.get_text_config(), "vocab_size", None)
        grown = (
            f"; the adapter was trained with {tokens} tokens and does not contain {target.name}: load the base, "
            f"model.resize_token_embeddings({tokens}) as in training, save that base, and merge into it (--base)"
        )
        raise PeftlabError(
            f"{target.shard.path}: {target.source!r} has shape {target.shape}, {type(plan.model).__name__} needs "
            f"{shape}{grown if tokens in shape and tokens not in target.shape else ''}"
        )


def _refuse_codes(plan: MergePlan, found: dict[str, Place]) -> None:
    """Refuse to change weights that are stored as integers or in eight bits."""
    for shard in plan.shards:
        for key, entry in shard.entries.items():
            names = found[key].names if key in found else ()
            summed = [n for n in names if n in plan.folded or (n in plan.given and plan.given[n].is_floating_point())]
            if entry.dtype not in _SUMMABLE and summed:
                raise PeftlabError(
                    f"{shard.path}: {key!r} is stored as {entry.dtype}, which cannot represent W0 + ΔW; config.json "
                    "has no quantization_config to read it by; merge into the model that was quantised"
                )


def _write_tied(plan: MergePlan, found: dict[str, Place], groups: list[list[str]]) -> list[Target]:
    """Choose the names that tied parameters are written under; return the targets that the base has no key for.

    Parameters that are equal after the merge stay tied and are written once. Where two differ, every tied name of the
    model is written, since the setting in ``config.json`` holds for all of them.

    Args:
        groups: the names of each parameter that has several, in the model's order.
    """
    holders = _holders(plan.shards, found)
    groups = [names for names in groups if any(name in holders or name in plan.given for name in names)]
    untied = [names for names in groups if len({_merged_value(plan, name) for name in names}) > 1]
    extra: list[Target] = []
    for names in groups:
        held = [name for name in names if name in holders]
        if not untied:
            # A larger model around this one may not tie what this one does: there both are written.
            for name in held[1:] if plan.composite is None else []:
                plan.dropped[holders[name][1]] = f"tied to {held[0]}"
                del found[holders[name][1]]
        elif held:
            shard, key = holders[held[0]]
            prefix = key.removesuffix(held[0]) if plan.composite is not None else ""
            extra += [_target(plan, shard, key, Place(name, prefix + name)) for name in names if name not in holders]
    if untied:
        plan.notes += [f"{' and '.join(names)} were tied and differ now: both are written" for names in untied]
        for config in (plan.model.config, plan.model.config.get_text_config()):
            config.tie_word_embeddings = False
    written = {place.name for place in found.values()} | {target.name for target in extra}
    tied = {name for names in groups if written.intersection(names) for name in names}
    for name, tensor in plan.given.items():
        if name not in written | tied:
            dtype = getattr(torch, plan.dtype) if tensor.is_floating_point() else tensor.dtype
            extra.append(Target(name, name, NAMES[dtype], tuple(tensor.shape)))
            tied |= {other for names in groups if not untied and name in names for other in names}
    return extra


def _merged_value(plan: MergePlan, name: str) -> tuple[object, ...]:
    """Return what identifies a tied parameter's value after the merge: where it starts, and what is folded into it."""
    given = plan.given.get(name)
    start = None if given is None else next(id(t) for t in plan.given.values() if t is given or torch.equal(t, given))
    if name not in plan.folded:
        return start, None
    leaf = plan.model.get_submodule(plan.folded[name])
    assert isinstance(leaf, Adapted)
    return start, addition(leaf), name.removeprefix(f"{plan.folded[name]}.")


def _find_other_places(plan: MergePlan, found: dict[str, Place], options: MergeOptions) -> dict[str, Place]:
    """Return the places of base keys that the task model has no parameter for: they are copied as they are.

    Such are layers that predict further tokens, the vision tower beside a text model, buffers: what the class ignores
    when it loads, and other programs read. Only the head of the base's own task is left out where the adapter's task
    has another one; that is noted.
    """
    kind = type(plan.model).__name__
    rest = [key for shard in plan.shards for key in shard.entries if key not in found and key not in plan.dropped]
    if not rest:
        return {}
    from transformers import PreTrainedModel

    directory = plan.shards[0].path.parent
    config = load_config(str(directory), trust_remote_code=options.trust_remote_code)
    own = None  # the model of the class that the base's configuration names, if it can be made
    with suppress(PeftlabError):
        own = empty_model((config.architectures or [""])[0], config, directory, options.trust_remote_code)
    where: dict[str, Place] = {}
    prefix = f"{plan.model.base_model_prefix}."
    heads: list[str] = []
    in_body: set[str] = set()
    if own is not None and type(own) is not type(plan.model):
        body = own.base_model_prefix
        if isinstance(own._modules.get(body), nn.Module):
            # A head is what the class adds to its body; a tower or a codec beside it is a model by itself, and stays.
            for name, child in own.named_children():
                if name != body and not any(isinstance(inner, PreTrainedModel) for inner in child.modules()):
                    heads.append(name)
        elif any(place.key == prefix + key for key, place in found.items()):  # of the bare body, whose name is added
            in_body = {key for key, place in places(own, rest).items() if place is not None}
    for key in rest:
        if inside(key, heads):
            plan.dropped[key] = f"of the head of {type(own).__name__}, which {kind} does not have"
        else:
            where[key] = Place(key, prefix + key if key in in_body else key)
    plan.ignored = list(where)
    if plan.dropped.keys() & rest:
        left = [key for key in rest if key in plan.dropped]
        plan.notes.append(f"{len(left)} tensors were left out: the head of {type(own).__name__} ({_summary(left)})")
    return where


def _summary(keys: Iterable[str]) -> str:
    """Return keys in short: the first two parts of their names, layers' numbers as ``*``."""
    starts = dict.fromkeys(".".join(re.sub(r"\b\d+\b", "*", key).split(".")[:2]) for key in keys)
    return ", ".join([*list(starts)[:4], *(["..."] if len(starts) > 4 else [])])


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


def _with_ties(names: Iterable[str], groups: list[list[str]]) -> set[str]:
    """Return names of parameters, and the other names of those that have several."""
    found = set(names)
    return found.union(*(group for group in groups if found.intersection(group)))


def _refuse_missing(
    plan: MergePlan, known: dict[str, torch.Size], found: dict[str, Place], extra: list[Target], groups: list[list[str]]
) -> None:
    """Refuse a model with a parameter that neither the base nor the adapter contains."""
    in_base = {name for place in found.values() for name in place.names}
    present = _with_ties(in_base | {target.name for target in extra} | plan.given.keys(), groups)
    computed = set(plan.model._keys_to_ignore_on_save or ())  # such as sinusoidal positions, made by the class
    again = {name for names in groups for name in names[1:]}  # other names of a tied parameter, which is one tensor
    missing = [name for name in known if name not in present | computed | again]
    if missing:
        raise PeftlabError(
            f"{plan.shards[0].path.parent} and the adapter together lack {len(missing)} tensors of "
            f"{type(plan.model).__name__}: {', '.join(missing[:5])}{', ...' if len(missing) > 5 else ''}"
        )


def plain_task_model(
    adapter: Adapter, directory: Path, shards: Sequence[Shard], options: MergeOptions
) -> PlainModel | None:
    """Return the model the adapter was trained in, on the meta device, made without transformers; None where it
    has to be asked.

    The base's files contain exactly the parameters of the class that the base's configuration and the adapter name,
    and the adapter contains low-rank factors of its layers and nothing else.

    Args:
        adapter: as it was read. directory: the base's. shards: its weight files. options: of the merge.
    """
    if not _factors_of_layers(adapter) or adapter.base.get("format"):
        return None
    if options.dtype == FP8 or options.trust_remote_code:
        return None
    # Where it is missing, transformers makes one of the model's defaults.
    if not (directory / "generation_config.json").is_file():
        return None
    try:
        with Bounded(directory):
            model = plain_model(_trained(adapter, read_object(directory / "config.json")))
    except (PeftlabError, OSError):
        return None  # making the model by its class says what is wrong
    stored = {key: tuple(entry.shape) for shard in shards for key, entry in shard.entries.items()}
    # Of two tied parameters the first is stored.
    known = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()} if model is not None else {}
    return model if known == stored else None


def _factors_of_layers(adapter: Adapter) -> bool:
    """Whether the adapter's tensors are low-rank factors of maps in numbered layers, which nothing is tied to."""
    names = [name.rpartition(".") for name in adapter.tensors]
    return all(last in ("lora_A", "lora_B") and ".layers." in f".{owner}" for owner, _, last in names)


def _trained(adapter: Adapter, base: Mapping[str, Json]) -> dict[str, Json]:
    """Return the configuration of the merged model: the trained one's, or for a foreign adapter the base's own; an
    empty one where the two are of different models."""
    if not adapter.base:
        return dict(base) if adapter.task_type in (None, "CAUSAL_LM") else {}
    trained = adapter.base.get("config")
    same = isinstance(trained, dict) and trained.get("model_type") == base.get("model_type")
    if not isinstance(trained, dict) or not same or base.get("auto_map"):
        return {}
    return {**trained, "architectures": [adapter.base.get("architecture")]}


_ADDED = re.compile(r"\.base_layer|[._]lora_\w+$|\.token_rows$")


# peft's task_type -> the auto class that makes the model; otherwise the first class that has the adapter's modules.
_AUTO = {
    "SEQ_CLS": "AutoModelForSequenceClassification",
    "TOKEN_CLS": "AutoModelForTokenClassification",
    "QUESTION_ANS": "AutoModelForQuestionAnswering",
    "CAUSAL_LM": "AutoModelForCausalLM",
    "SEQ_2_SEQ_LM": "AutoModelForSeq2SeqLM",
    "FEATURE_EXTRACTION": "AutoModel",
}


def task_model(adapter: Adapter, base: Path, *, source: str, trust_remote_code: bool = False) -> PreTrainedModel:
    """Return the model the adapter was trained in, on the meta device.

    An adapter that peftlab wrote names class and configuration. For any other it is the first class that has the
    adapter's modules (the one that its task type names, or the one that the base's configuration names), with the
    numbers of labels and tokens of its tensors.

    Args:
        source: the adapter's path, for messages. trust_remote_code: run model code in ``base``.

    Raises:
        PeftlabError: the adapter is for another architecture than ``base``.
    """
    model, unknown = closest_model(adapter, base, source=source, trust_remote_code=trust_remote_code)
    if unknown:
        hint = did_you_mean(unknown[0], all_names(model))
        raise PeftlabError(f"{source} does not fit {base}: {type(model).__name__} has no {unknown[0]}{hint}")
    return model


def closest_model(
    adapter: Adapter, base: Path, *, source: str, trust_remote_code: bool = False
) -> tuple[PreTrainedModel, list[str]]:
    """Return the model that lacks fewest of the adapter's modules, and what it lacks; else as ``task_model``.

    Args:
        adapter: as it was read. base: the base's directory. source, trust_remote_code: as for ``task_model``.
    """
    config = load_config(str(base), trust_remote_code=trust_remote_code)
    trained = adapter.base.get("config")
    if isinstance(trained, dict) and trained:
        part = _part(config, trained.get("model_type", config.model_type))
        if part is None:
            raise PeftlabError(f"{source} was trained on {trained['model_type']!r}, {base} is {config.model_type!r}")
        config = part
        if type(config).__module__.startswith("transformers."):
            config = _config_of(trained, config, source)
        return empty_model(typed_value(adapter.base, "architecture", str, source), config, base, trust_remote_code), []
    own, autos = (config.architectures or [])[:1], list(_AUTO.values())
    # The class of a model of images and text is the base's own, whatever task its adapter names.
    names = [_AUTO[adapter.task_type], *own] if adapter.task_type in _AUTO else own + autos
    closest: tuple[PreTrainedModel, list[str]] | None = None
    failed = ""
    for name in names:
        try:
            model = empty_model(name, config, base, trust_remote_code)
        except PeftlabError as error:
            failed = failed or str(error)
            continue
        renamed = new_names(model, adapter.tensors)
        wanted = {_ADDED.sub("", renamed.get(name, name)) for name in adapter.tensors}
        unknown = sorted(wanted - all_names(model))
        if not unknown:
            tensors = {renamed.get(key, key): tensor for key, tensor in adapter.tensors.items()}
            return _resized(model, tensors, name, base, trust_remote_code), []
        if closest is None or len(unknown) < len(closest[1]):
            closest = model, unknown
    if closest is None:
        raise PeftlabError(f"{source} does not fit {base}: {failed}")
    return closest


def _part(config: PretrainedConfig, model_type: object) -> PretrainedConfig | None:
    """Return a configuration, or the one in it, that is of ``model_type``; None where there is none.

    A text model is loaded from a composite checkpoint by the text configuration in its config.json.
    """
    inner = (getattr(config, name, None) for name in config.sub_configs)
    return next((each for each in (config, *inner) if getattr(each, "model_type", None) == model_type), None)


def _config_of(values: Mapping[str, Json], like: PretrainedConfig, source: str) -> PretrainedConfig:
    check_sizes(values, f"{source}: the base model's configuration")
    try:
        return type(like).from_dict(dict(values))
    except Exception as error:  # whatever the library makes of values that are not as it expects
        raise PeftlabError(f"{source}: the base model's configuration cannot be read: {reason(error)}") from error


def _resized(
    model: PreTrainedModel, tensors: Mapping[str, Tensor], name: str, base: Path, trust_remote_code: bool
) -> PreTrainedModel:
    """Return the model with the numbers of labels and tokens of the adapter's whole tensors."""
    config, changed = model.config, False
    text = config.get_text_config()  # of a model of images and text, the part that has a vocabulary
    shapes = {key: p.shape for key, p in model.named_parameters(remove_duplicate=False)}
    for key, tensor in tensors.items():
        shape = shapes.get(_ADDED.sub("", key))
        if shape is None or shape == tensor.shape or shape[1:] != tensor.shape[1:]:
            continue
        if shape[0] == config.num_labels:
            config.num_labels, changed = tensor.shape[0], True
        elif shape[0] == getattr(text, "vocab_size", None):
            text.vocab_size, changed = tensor.shape[0], True
    return empty_model(name, config, base, trust_remote_code) if changed else model
