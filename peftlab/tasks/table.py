"""The table of tasks: what each one's columns, labels, splits and official metrics are."""

from __future__ import annotations

from dataclasses import dataclass

from peftlab.errors import PeftlabError, did_you_mean


@dataclass(frozen=True)
class Task:
    """One task.

    Attributes:
        name: as a recipe spells it, ``glue/cola`` or ``text/classification``.
        labels: class names in label order; empty for regression, and for one's own task until data is read.
        text: the text column, or the two columns of a pair.
        metrics: metric names; the first one decides which checkpoint is best.
        evaluation: names of the labelled evaluation splits, the deciding one first.
        folder: directory name in GLUE's TSV distribution; empty for one's own task.
        regression: whether the label is a number.
        trainable: whether there is a training split (the AX diagnostic has none and no labels either).
    """

    name: str
    labels: tuple[str, ...] = ()
    text: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ("accuracy",)
    evaluation: tuple[str, ...] = ("validation",)
    folder: str = ""
    regression: bool = False
    trainable: bool = True

    @property
    def glue(self) -> bool:
        """Whether this is one of GLUE's tasks rather than one's own files."""
        return self.name.startswith("glue/")


_PAIR = ("sentence1", "sentence2")
_NLI = ("entailment", "neutral", "contradiction")
_MNLI_SPLITS = ("validation_matched", "validation_mismatched")

TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task(
            "glue/cola",
            ("unacceptable", "acceptable"),
            ("sentence",),
            ("matthews_correlation",),
            folder="CoLA",
        ),
        Task("glue/sst2", ("negative", "positive"), ("sentence",), folder="SST-2"),
        Task("glue/mrpc", ("not_equivalent", "equivalent"), _PAIR, ("accuracy", "f1"), folder="MRPC"),
        Task("glue/stsb", (), _PAIR, ("pearson", "spearman"), folder="STS-B", regression=True),
        Task(
            "glue/qqp",
            ("not_duplicate", "duplicate"),
            ("question1", "question2"),
            ("accuracy", "f1"),
            folder="QQP",
        ),
        Task("glue/mnli", _NLI, ("premise", "hypothesis"), evaluation=_MNLI_SPLITS, folder="MNLI"),
        Task("glue/qnli", ("entailment", "not_entailment"), ("question", "sentence"), folder="QNLI"),
        Task("glue/rte", ("entailment", "not_entailment"), _PAIR, folder="RTE"),
        Task("glue/wnli", ("not_entailment", "entailment"), _PAIR, folder="WNLI"),
        Task("glue/ax", _NLI, ("premise", "hypothesis"), evaluation=(), folder="AX", trainable=False),
        Task("text/classification", metrics=("accuracy", "f1")),
        Task("text/regression", metrics=("pearson", "spearman"), regression=True),
    )
}


def find_task(name: str) -> Task:
    """Return the table's row for ``name``; an unknown one raises ``PeftlabError`` with the nearest name."""
    if name not in TASKS:
        raise PeftlabError(f"unknown task {name!r}{did_you_mean(name, TASKS)}; one of {', '.join(TASKS)}")
    return TASKS[name]
