"""The table of draft kinds."""

from __future__ import annotations

from dataclasses import dataclass

from peftlab.registry import Registry

_KINDS = "peftlab.drafting.kinds"


@dataclass(frozen=True)
class DraftKind:
    """One kind of draft, named as ``"module:attribute"``; the types are those of ``kinds.base``.

    Training calls ``check``, ``load``, ``prepare``, ``loss``, ``score``, ``save`` and ``drafter`` in this order;
    ``find``, ``open`` and ``export`` read what is on disk, ``update`` continues it.

    Attributes:
        config: the section of a recipe, a ``DraftConfig``; its ``kind`` is the name of the row.
        check: (job, the target's configuration) -> None; refuses what will not work, before any weights are read.
        load: (job, target) -> ``Draft``: the module that trains, before the method is injected into it.
        loss: (job, draft) -> a function of (model, batch) that returns the sum of the loss over tokens.
        score: (draft, model, rows, batch size) -> metrics of a held-out split; ``acceptance`` decides.
        save: (job, draft, directory, training rows) -> the reduced vocabulary [V_d] or None. Called when adapter and
            merged model are written; writes what else the draft consists of.
        calibrate: (draft, directory, held-out rows, batch size) -> None; called after ``save``, measures on held-out
            text what trees are made or planned from and stores it with the draft. None: nothing is measured.
        drafter: (draft, ``Saved`` or None before training) -> ``Served``, or None where nothing can draft yet.
        find: (reference) -> the reference of the draft of this kind that is there, or None.
        open: (what ``find`` returned, ``Opening``) -> ``Opened``: the draft as decoding takes it.
        export: (what ``find`` returned, consumer) -> the plain model directory that the consumer loads, or an
            ``Exporting`` that writes what it loads.
        update: (config, newest run directory, log of requests) -> the config that continues from that run.
        heads: whether it has trees of its own and no step for each token, as heads on the target have.
        prepare: (job, draft, training rows) -> None; what the draft takes from the text before it decodes or trains.
            Empty: nothing.
    """

    config: str
    check: str
    load: str
    loss: str
    score: str
    save: str
    drafter: str
    find: str
    open: str
    export: str
    update: str
    heads: bool = False
    prepare: str = ""
    calibrate: str | None = None


def _row(
    config: str, module: str, *, heads: bool = False, prepares: bool = False, calibrates: bool = False
) -> DraftKind:
    """Return the row of a kind whose functions have the names of the fields."""
    names = ["check", "load", "loss", "score", "save", "drafter", "find", "open", "export", "update"]
    names += ["prepare"] if prepares else []
    names += ["calibrate"] if calibrates else []
    functions = {name: f"{_KINDS}.{module}:{name}" for name in names}
    return DraftKind(config=f"peftlab.drafting.config:{config}", heads=heads, **functions)


DRAFTS: Registry[DraftKind] = Registry(
    "draft kind",
    "peftlab.drafts",
    DraftKind,
    {
        "model": _row("ModelDraft", "model.pair", prepares=True),
        "early_exit": _row("EarlyExitDraft", "early_exit.self_draft"),
        "medusa": _row("MedusaDraft", "medusa.head_draft", heads=True, calibrates=True),
        "pard": _row("PardDraft", "pard.pard_draft", heads=True, prepares=True),
        "gated_lora": _row("GatedLoraDraft", "gated_lora.gated_draft", heads=True, prepares=True),
        "hydra": _row("HydraDraft", "hydra.hydra_draft", heads=True, calibrates=True),
        "mtp": _row("MtpDraft", "mtp.mtp_draft", heads=True, prepares=True, calibrates=True),
        "eagle3": _row("Eagle3Draft", "eagle3.eagle_draft", heads=True, prepares=True, calibrates=True),
    },
)
"""The kinds. A reference belongs to the last row whose ``find`` knows it: ``model``, which takes any, is the first."""
