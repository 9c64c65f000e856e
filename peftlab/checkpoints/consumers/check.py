"""``peftlab adapter check``: what an adapter's files are, what they would touch, and who reads them as meant."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from peftlab.checkpoints.adapter import CONFIG_FILE, text_or_none
from peftlab.checkpoints.consumers.contents import Contents, read_contents
from peftlab.checkpoints.consumers.fit import Fit, fit
from peftlab.checkpoints.consumers.table import CONSUMERS, Consumer, Verdict
from peftlab.errors import PeftlabError
from peftlab.registry import resolve
from peftlab.version import version_of

# Keys of a configuration that say nothing about the adapter, and values that say that an option is off.
_IDLE = (
    "auto_mapping", "base_model_name_or_path", "inference_mode", "megatron_core", "peft_version", "qalora_group_size",
    "revision",
)  # fmt: skip
_NOTHING: tuple[object, ...] = (None, False, {}, [], 0.0)
_OFF: dict[str, tuple[object, ...]] = {"bias": (None, "none"), "init_lora_weights": (None, True)}


@dataclass(frozen=True)
class Reading:
    """What one program makes of an adapter.

    Attributes:
        loads: ``True`` as meant, ``False`` refused or read as something else, ``"unknown"`` no rule.
        reason: what decides. source, date: the version of the program, its files and its day.
    """

    loads: bool | Literal["unknown"]
    reason: str
    source: str
    date: str


@dataclass(frozen=True)
class AdapterCheck:
    """What ``check_adapter`` found; the JSON has the same keys.

    Attributes:
        adapter, base: what was compared. format: ``peft``, ``peftlab``, ``adapterhub`` or ``loralib``.
        settings: rank, alpha, targets and the options that are on, as the file has them.
        architecture: the class of the model the adapter belongs to.
        matched: the base's modules that it would change.
        unmatched: what the file has and the base does not.
        missing: modules that its configuration targets and its file has no tensors for.
        notes: the reasons, and targets that match nothing.
        consumers: what each program makes of it.
    """

    adapter: str
    base: str
    format: str
    settings: Mapping[str, object]
    architecture: str
    matched: list[str]
    unmatched: list[str]
    missing: list[str]
    notes: list[str]
    consumers: dict[str, Reading]


def check_adapter(source: str | Path, base: str | None = None) -> AdapterCheck:
    """Return what an adapter's files are, what they would touch in a base, and which programs read them as meant.

    Of the base only headers are read: the model has no weights. peft and peftlab are asked by loading the adapter into
    it, the engines by rules that were derived from a named version of their source.

    Args:
        source: an adapter directory of peft's, peftlab's or AdapterHub's, a run directory, or loralib's file.
        base: reference of the base model; default: the one that the adapter names.

    Raises:
        PeftlabError: there is no adapter or no base, a file is damaged, or the base is another model.
    """
    contents = read_contents(source)
    reference = base or text_or_none(contents.raw, "base_model_name_or_path", contents.path / CONFIG_FILE)
    if not reference:
        raise PeftlabError(f"{source} names no base model; pass one (--base)")
    found = fit(contents, reference)
    return AdapterCheck(
        adapter=str(source),
        base=reference,
        format=contents.format,
        settings=_settings(contents),
        architecture=found.architecture,
        matched=found.matched,
        unmatched=sorted(found.misfits),
        missing=found.missing,
        notes=_notes(found),
        consumers={name: _reading(row, found) for name, row in CONSUMERS.items()},
    )


def _settings(contents: Contents) -> dict[str, object]:
    """Return what the configuration says, without what is off or of no use here."""
    if contents.format == "loralib":
        return {"r": contents.pairs[0].a[0]} if contents.pairs and contents.pairs[0].a else {}
    raw = contents.raw.get("method") if contents.format == "peftlab" else contents.raw.get("config", contents.raw)
    items = raw.items() if isinstance(raw, Mapping) else ()
    return {key: value for key, value in items if key not in _IDLE and value not in _OFF.get(key, _NOTHING)}


def _notes(found: Fit) -> list[str]:
    notes = list(found.misfits.values())
    notes += [f"target_modules: {name!r} matches no module of {found.architecture}" for name in found.idle_targets]
    notes += [f"{name} is targeted, and the file has no tensors for it" for name in found.missing]
    return notes


def _reading(row: Consumer, found: Fit) -> Reading:
    verdict: Verdict = resolve(row.rule)(found)
    return Reading(verdict.loads, verdict.reason, row.source.format(**_versions()), row.date)


def _versions() -> dict[str, str]:
    return {name: version_of(name) or "(not installed)" for name in ("peft", "peftlab")}
