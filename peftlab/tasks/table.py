"""The table of tasks: what each one's columns, labels, splits and official metrics are.

Adding one is a row here, or an entry point ``peftlab.tasks``. A row names its code (see ``peftlab.rows``), so that
reading the table imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from peftlab.errors import PeftlabError
from peftlab.rows import Rows


@dataclass(frozen=True)
class Task:
    """One task; functions are named as ``"module:attribute"``.

    Attributes:
        name: as in a recipe, ``glue/cola`` or ``text/classification``; the name of the row.
        labels: class names in label order; empty for regression, and for a task on the user's files until data is read.
        text: the text column, or the two columns of a pair.
        metrics: metric names; the first one decides which checkpoint is best.
        evaluation: names of the labelled evaluation splits, the deciding one first.
        folder: directory name in GLUE's TSV distribution; empty elsewhere.
        regression: whether the label is a number.
        choices: whether the label is one of the row's own choices.
        labelled: whether a row has a class or a number; else it is text that a language model learns.
        token_loss: whether its loss is a sum over tokens, as ``train.packing`` and ``train.label_smoothing`` need.
        prompted: whether a row is a prompt and its answer, so that answers can be generated.
        trainable: whether there is a training split (the AX diagnostic has none and no labels either).
        prepare: function of the task, the data section and the model's source to a ``Prepared``, by keyword
            ``max_length``, ``batch_size`` and ``classes``; default: labelled texts and a task head.
        answers: class of what the answers of a labelled task are, by that ``prepare``: their head, loss, scores and
            predictions (``peftlab.tasks.labelled.answers.base:Answers``).
        columns: function from the data section and the names of a file's columns to the ``Columns`` that it must have;
            for tasks on the user's files.
        load: function from the task, the recipe's data section and a trained model's class names (or None) to the
            task with ``labels`` and ``text`` filled in, its splits, and the number of rows left out by reason.
        objectives: names of the objectives that a recipe chooses from, the usual one first; empty: the task has its own
            loss. Else ``prepare`` also takes the recipe's ``objective``.
        examples: function of the task, the data section, a row, the tokenizer and ``max_length`` to the row's examples,
            each a list of sequences with their titles, to be shown to people; for tasks that are not labelled.
        check: function from the task and the recipe's data section to what is wrong with the section, each as the
            keys of the place in the recipe and a message; it imports no torch.
    """

    name: str
    labels: tuple[str, ...] = ()
    text: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ("accuracy",)
    evaluation: tuple[str, ...] = ("validation",)
    folder: str = ""
    regression: bool = False
    choices: bool = False
    trainable: bool = True
    labelled: bool = True
    token_loss: bool = False
    prompted: bool = False
    prepare: str = "peftlab.tasks.labelled.labelled_task:prepare"
    answers: str = "peftlab.tasks.labelled.answers.one_class:OneClass"
    columns: str = "peftlab.tasks.columns:text_columns"
    objectives: tuple[str, ...] = ()
    examples: str = "peftlab.tasks.language.language_task:examples"
    load: str = field(kw_only=True)
    check: str = field(kw_only=True)

    @property
    def glue(self) -> bool:
        """Whether this is one of GLUE's tasks."""
        return self.name.startswith("glue/")

    @property
    def classed(self) -> bool:
        """Whether labels are classes that all rows share."""
        return self.labelled and not (self.regression or self.choices)


_PAIR = ("sentence1", "sentence2")
_NLI = ("entailment", "neutral", "contradiction")
_MNLI_SPLITS = ("validation_matched", "validation_mismatched")
_glue = partial(Task, load="peftlab.tasks.glue:load_glue", check="peftlab.tasks.config:check_glue")
_language = partial(
    Task,
    metrics=("loss",),
    labelled=False,
    prepare="peftlab.tasks.language.language_task:prepare",
    load="peftlab.tasks.language.language_task:load_language",
    check="peftlab.tasks.config:check_language",
)
_own = partial(Task, load="peftlab.tasks.text:load_text_task", check="peftlab.tasks.config:check_own")
_rows = partial(Task, check="peftlab.tasks.config:check_rows")
_NUMBER = "peftlab.tasks.labelled.answers.number:Number"

_BUILT_IN = (
    _glue(
        "glue/cola",
        ("unacceptable", "acceptable"),
        ("sentence",),
        ("matthews_correlation",),
        folder="CoLA",
    ),
    _glue("glue/sst2", ("negative", "positive"), ("sentence",), folder="SST-2"),
    _glue("glue/mrpc", ("not_equivalent", "equivalent"), _PAIR, ("accuracy", "f1"), folder="MRPC"),
    _glue("glue/stsb", (), _PAIR, ("pearson", "spearman"), folder="STS-B", regression=True, answers=_NUMBER),
    _glue(
        "glue/qqp",
        ("not_duplicate", "duplicate"),
        ("question1", "question2"),
        ("accuracy", "f1"),
        folder="QQP",
    ),
    _glue("glue/mnli", _NLI, ("premise", "hypothesis"), evaluation=_MNLI_SPLITS, folder="MNLI"),
    _glue("glue/qnli", ("entailment", "not_entailment"), ("question", "sentence"), folder="QNLI"),
    _glue("glue/rte", ("entailment", "not_entailment"), _PAIR, folder="RTE"),
    _glue("glue/wnli", ("not_entailment", "entailment"), _PAIR, folder="WNLI"),
    _glue("glue/ax", _NLI, ("premise", "hypothesis"), evaluation=(), folder="AX", trainable=False),
    _own("text/classification", metrics=("accuracy", "f1")),
    _own("text/regression", metrics=("pearson", "spearman"), regression=True, answers=_NUMBER),
    _rows(
        "text/multilabel",
        metrics=("micro_f1", "macro_f1", "subset_accuracy"),
        answers="peftlab.tasks.labelled.answers.many_classes:ManyClasses",
        columns="peftlab.tasks.columns:multilabel_columns",
        load="peftlab.tasks.own.label_sets:load_label_sets",
    ),
    _rows(
        "text/tokens",
        metrics=("entity_f1", "entity_precision", "entity_recall", "accuracy"),
        answers="peftlab.tasks.labelled.answers.word_tags:WordTags",
        columns="peftlab.tasks.columns:word_columns",
        load="peftlab.tasks.own.tagged_words:load_tagged_words",
    ),
    _rows(
        "text/choice",
        choices=True,
        answers="peftlab.tasks.labelled.answers.one_choice:OneChoice",
        columns="peftlab.tasks.columns:choice_columns",
        load="peftlab.tasks.own.choice_rows:load_choices",
    ),
    _language("text/chat", token_loss=True, prompted=True, columns="peftlab.tasks.columns:chat_columns"),
    _language("text/completion", token_loss=True, prompted=True, columns="peftlab.tasks.columns:completion_columns"),
    _language("text/plain", token_loss=True, columns="peftlab.tasks.columns:plain_columns"),
    _language(
        "text/preference",
        columns="peftlab.tasks.columns:preference_columns",
        objectives=("dpo",),
        prepare="peftlab.tasks.preference.preference_task:prepare",
        load="peftlab.tasks.preference.preference_task:load_preferences",
        examples="peftlab.tasks.preference.preference_task:examples",
    ),
)
TASKS: Rows[Task] = Rows("task", "peftlab.tasks", Task, {task.name: task for task in _BUILT_IN})


def find_task(name: str) -> Task:
    """Return the table's row for ``name``.

    Raises:
        PeftlabError: there is none (the nearest name is in the message), or the row is of another name.
    """
    task = TASKS.find(name)
    if task.name != name:
        raise PeftlabError(f"task {name!r}: the entry point's row is named {task.name!r}; give both one name")
    return task
