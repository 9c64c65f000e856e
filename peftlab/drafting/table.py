"""The table of draft kinds, and how a stored draft is told from others: by names, folders and files, without torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from re import fullmatch

from peftlab.errors import PeftlabError
from peftlab.files import Json, read_object
from peftlab.registry import Registry


@dataclass(frozen=True)
class DraftRow:
    """A row of the table describes one kind of draft; it names classes as ``"module:attribute"``.

    Attributes:
        config: the section of a recipe, a ``DraftConfig``; its ``kind`` is the name of the row.
        kind: the class, a ``base.DraftKind``.
        folder: of a run directory, which contains the stored draft.
        file: of this folder, which such a draft has.
        marks: (key, value) of that file, a JSON object; one of them says that the draft is of this kind. Empty: the
            file does.
        names: regular expression of references that are drafts of this kind without any file.
        heads: whether it has trees of its own and no step for each token, as heads on the target have.
    """

    config: str
    kind: str
    folder: str = "merged"
    file: str = "config.json"
    marks: tuple[tuple[str, Json], ...] = ()
    names: str = field(default="", kw_only=True)
    heads: bool = field(default=True, kw_only=True)

    def recognises(self, directory: str | Path) -> bool:
        """Whether a directory contains a draft of this kind."""
        file = Path(directory) / self.file
        if not file.is_file():
            return False
        return not self.marks or any(read_object(file).get(key) == value for key, value in self.marks)

    def find(self, reference: str) -> str | None:
        """Return the directory of the draft that a reference is, or has as a run, or the name that it is; else None."""
        if self.names:
            return reference if fullmatch(self.names, reference) else None
        places = (Path(reference) / self.folder, Path(reference))
        return next((str(place) for place in places if self.recognises(place)), None)

    def newest(self, run: Path) -> str:
        """Return the directory of the draft that a run has written; ``PeftlabError`` if there is none."""
        if not self.recognises(run / self.folder):
            raise PeftlabError(f"{run}: contains no {self.folder}/ to continue from; did the run end?")
        return str(run / self.folder)


DRAFTS: Registry[DraftRow] = Registry(
    "draft kind",
    "peftlab.drafts",
    DraftRow,
    {
        "model": DraftRow("peftlab.drafting.config:ModelDraft", "peftlab.drafting.model:ModelKind", heads=False),
        "early_exit": DraftRow(
            "peftlab.drafting.config:EarlyExitDraft",
            "peftlab.drafting.early_exit:EarlyExitKind",
            names=r"exit:[1-9]\d{0,3}|del|swift",
            heads=False,
        ),
        "medusa": DraftRow(
            "peftlab.drafting.config:MedusaDraft",
            "peftlab.drafting.heads:MedusaKind",
            folder="heads",
            marks=(("model_type", "medusa"),),
        ),
        "pard": DraftRow(
            "peftlab.drafting.config:PardDraft", "peftlab.drafting.pard:PardKind", marks=(("spd_type", "pard"),)
        ),
        "gated_lora": DraftRow(
            "peftlab.drafting.config:GatedLoraDraft",
            "peftlab.drafting.gated_lora:GatedLoraKind",
            folder="adapter",
            file="gated_lora.json",
        ),
        "hydra": DraftRow(
            "peftlab.drafting.config:HydraDraft",
            "peftlab.drafting.heads:HydraKind",
            folder="heads",
            marks=(("model_type", "hydra"),),
        ),
        "mtp": DraftRow(
            "peftlab.drafting.config:MtpDraft",
            "peftlab.drafting.mtp:MtpKind",
            folder="mtp",
            marks=(("speculators_model_type", "mtp"),),
        ),
        "eagle3": DraftRow(
            "peftlab.drafting.config:Eagle3Draft",
            "peftlab.drafting.eagle:Eagle3Kind",
            folder="eagle3",
            marks=(("speculators_model_type", "eagle3"), ("architectures", ["LlamaForCausalLMEagle3"])),
        ),
        "dflash": DraftRow(
            "peftlab.drafting.config:DflashDraft",
            "peftlab.drafting.block:DflashKind",
            folder="dflash",
            marks=(
                ("speculators_model_type", "dflash"),
                ("speculators_model_type", "dspark"),
                ("architectures", ["DFlashDraftModel"]),
                ("architectures", ["DSparkDraftModel"]),
                ("architectures", ["Qwen3DSparkModel"]),
            ),
        ),
    },
)
"""The kinds; what no other kind recognises is a ``model``."""


def find_draft(reference: str) -> tuple[DraftRow, str]:
    """Return the kind of the draft that a reference names, and the reference of the draft itself.

    Args:
        reference: as ``models.config.find_model`` takes it; a run directory of a draft recipe; a directory of
            heads; ``exit:K``, the target's first K layers; ``del``, as many of them as pay; or ``swift``, the target
            without some sublayers.

    Raises:
        PeftlabError: ``exit:`` without a number of layers.
    """
    for name, row in DRAFTS.items():
        if name != "model" and (place := row.find(reference)) is not None:
            return row, place
    if reference.startswith("exit:"):
        raise PeftlabError(f"draft {reference}: exits start at 1; exit:K is the target's first K layers")
    return DRAFTS["model"], DRAFTS["model"].find(reference) or reference
