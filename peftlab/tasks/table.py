"""The table of tasks, and the table of metrics of generated answers.

Adding a task is a row of ``TASKS``, or an entry point ``peftlab.tasks``; adding a metric of generated answers is a row
of ``GENERATION_METRICS``, or an entry point ``peftlab.generation_metrics``; other metrics are in ``tasks.metrics`` and
``tasks.answers``. A row names its code (see ``peftlab.registry``), so that reading the tables imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from peftlab.errors import PeftlabError
from peftlab.registry import Registry


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
        prepare: function of the task, the data section, the model's source and ``TaskOptions`` to a ``TaskProblem``
            (``peftlab.tasks.problem``); default: labelled texts and a task head.
        answers: class of what the answers of a labelled task are, by that ``prepare``: their head, loss, scores and
            predictions (``peftlab.tasks.answers:Answers``).
        columns: function from the data section and the names of a file's columns to the ``Columns`` that it must have;
            for tasks on the user's files.
        load: function from the task, the recipe's data section and a trained model's class names (or None) to the
            task with ``labels`` and ``text`` filled in, its splits, and the number of rows left out by reason.
        objectives: names of the objectives that a recipe chooses from, the usual one first; empty: the task has its own
            loss. Else the ``TaskOptions`` have the recipe's ``objective``.
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
    prepare: str = "peftlab.tasks.labelled:prepare"
    answers: str = "peftlab.tasks.answers:OneClass"
    columns: str = "peftlab.tasks.data:text_columns"
    objectives: tuple[str, ...] = ()
    examples: str = "peftlab.tasks.language:examples"
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
    prepare="peftlab.tasks.language:prepare",
    load="peftlab.tasks.language:load_language",
    check="peftlab.tasks.config:check_language",
)
_own = partial(Task, load="peftlab.tasks.labelled_rows:load_text_task", check="peftlab.tasks.config:check_own")
_rows = partial(Task, check="peftlab.tasks.config:check_rows")
_NUMBER = "peftlab.tasks.answers:Number"

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
        answers="peftlab.tasks.answers:ManyClasses",
        columns="peftlab.tasks.data:multilabel_columns",
        load="peftlab.tasks.labelled_rows:load_label_sets",
    ),
    _rows(
        "text/tokens",
        metrics=("entity_f1", "entity_precision", "entity_recall", "accuracy"),
        answers="peftlab.tasks.answers:WordTags",
        columns="peftlab.tasks.data:word_columns",
        load="peftlab.tasks.labelled_rows:load_tagged_words",
    ),
    _rows(
        "text/choice",
        choices=True,
        answers="peftlab.tasks.answers:OneChoice",
        columns="peftlab.tasks.data:choice_columns",
        load="peftlab.tasks.labelled_rows:load_choices",
    ),
    _language("text/chat", token_loss=True, prompted=True, columns="peftlab.tasks.data:chat_columns"),
    _language("text/completion", token_loss=True, prompted=True, columns="peftlab.tasks.data:completion_columns"),
    _language("text/plain", token_loss=True, columns="peftlab.tasks.data:plain_columns"),
    _language(
        "text/preference",
        columns="peftlab.tasks.data:preference_columns",
        objectives=("dpo",),
        prepare="peftlab.tasks.preference:prepare",
        load="peftlab.tasks.preference:load_preferences",
        examples="peftlab.tasks.preference:examples",
    ),
)
TASKS: Registry[Task] = Registry("task", "peftlab.tasks", Task, {task.name: task for task in _BUILT_IN})


def find_task(name: str) -> Task:
    """Return the table's row for ``name``.

    Raises:
        PeftlabError: there is none (the nearest name is in the message), or the row is of another name.
    """
    task = TASKS.find(name)
    if task.name != name:
        raise PeftlabError(f"task {name!r}: the entry point's row is named {task.name!r}; give both one name")
    return task


LOW, HIGH = "_low", "_high"  # what follows a metric's name in the names of the ends of its 95 % interval


@dataclass(frozen=True)
class GenerationMetric:
    """One metric; its function is named as ``"module:attribute"``.

    Attributes:
        score: function of a sequence of ``generated.Answer`` to a number; or, of a metric that is a mean over the
            answers, to one number for each of them.
        mean: whether it is such a mean; it is then reported with a 95 % interval.
        packages: what has to be installed, by import name.
    """

    score: str
    mean: bool = False
    packages: tuple[str, ...] = ()


_METRICS = {
    "gsm8k": GenerationMetric("peftlab.tasks.generated:gsm8k", mean=True),
    "gsm8k_peft": GenerationMetric("peftlab.tasks.generated:gsm8k_peft", mean=True),
    "exact_match": GenerationMetric("peftlab.tasks.generated:exact_match", mean=True),
    "rouge_l": GenerationMetric("peftlab.tasks.generated:rouge_l", mean=True, packages=("rouge_score",)),
    "bleu": GenerationMetric("peftlab.tasks.generated:bleu", packages=("sacrebleu",)),
    "nist": GenerationMetric("peftlab.tasks.generated:nist", packages=("nltk", "sacrebleu")),
    "cider": GenerationMetric("peftlab.tasks.generated:cider"),
}
GENERATION_METRICS: Registry[GenerationMetric] = Registry(
    "metric", "peftlab.generation_metrics", GenerationMetric, _METRICS
)
