"""The tasks, the metrics of generated answers, and the sections ``data``, ``generate`` and ``objective`` of a recipe.

Adding a task is a row of ``TASKS``, or an entry point ``peftlab.tasks``; adding a metric of generated answers is a row
of ``GENERATION_METRICS``, or an entry point ``peftlab.generation_metrics``; other metrics are in ``tasks.metrics`` and
``tasks.labelled``. A row names its code (see ``peftlab.registry``), so that reading the tables imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from math import inf
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from peftlab.errors import PeftlabError
from peftlab.registry import Registry, Section, Seed, Texts


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
        found: the keys ``text`` and ``label`` of the ``data`` section that the recipe does not give, with the columns
            of a usual name that stand for them; empty until data is read.
        image: whether a row is an image.
        labelled: whether a row has a class or a number; else it is text that a language model learns.
        token_loss: whether its loss is a sum over tokens, as ``train.packing`` and ``train.label_smoothing`` need.
        prompted: whether a row is a prompt and its answer, so that answers can be generated.
        trainable: whether there is a training split (the AX diagnostic has none and no labels either).
        prepare: function of the task, the data section, the model's source and ``TaskOptions`` to a ``TaskProblem``
            (``peftlab.tasks.problem``); default: labelled texts and a task head.
        answers: class of what the answers of a labelled task are, by that ``prepare``: their head, loss, scores and
            predictions (``peftlab.tasks.labelled:Answers``).
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
    found: Mapping[str, list[str] | str] = field(default_factory=dict, compare=False)
    image: bool = False
    trainable: bool = True
    labelled: bool = True
    token_loss: bool = False
    prompted: bool = False
    prepare: str = "peftlab.tasks.labelled:prepare"
    answers: str = "peftlab.tasks.labelled:OneClass"
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
_OWN_SPLITS = ("validation", "test")
_glue = partial(Task, load="peftlab.tasks.glue:load_glue", check="peftlab.tasks.table:check_glue")
_language = partial(
    Task,
    metrics=("loss",),
    labelled=False,
    prepare="peftlab.tasks.language:prepare",
    load="peftlab.tasks.language:load_language",
    check="peftlab.tasks.table:check_language",
)
_own = partial(
    Task,
    evaluation=_OWN_SPLITS,
    load="peftlab.tasks.labelled_rows:load_text_task",
    check="peftlab.tasks.table:check_own",
)
_rows = partial(Task, evaluation=_OWN_SPLITS, check="peftlab.tasks.table:check_rows")
_NUMBER = "peftlab.tasks.labelled:Number"

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
        answers="peftlab.tasks.labelled:ManyClasses",
        columns="peftlab.tasks.data:multilabel_columns",
        load="peftlab.tasks.labelled_rows:load_label_sets",
    ),
    _rows(
        "text/tokens",
        metrics=("entity_f1", "entity_precision", "entity_recall", "accuracy"),
        answers="peftlab.tasks.labelled:WordTags",
        columns="peftlab.tasks.data:word_columns",
        load="peftlab.tasks.labelled_rows:load_tagged_words",
    ),
    _rows(
        "text/choice",
        choices=True,
        answers="peftlab.tasks.labelled:OneChoice",
        columns="peftlab.tasks.data:choice_columns",
        load="peftlab.tasks.labelled_rows:load_choices",
    ),
    Task(
        "image/classification",
        metrics=("accuracy", "f1"),
        evaluation=_OWN_SPLITS,
        image=True,
        answers="peftlab.tasks.images:ImageClass",
        columns="peftlab.tasks.data:image_columns",
        load="peftlab.tasks.images:load_images",
        check="peftlab.tasks.table:check_rows",
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


# --- The ``data`` section of a finetune recipe.
Bins = dict[str, tuple[float | None, float | None]] | None
Count = Annotated[int, Field(gt=0)] | Annotated[float, Field(gt=0)]


class DataConfig(Section):
    """Where the examples come from."""

    path: str | None = Field(
        default=None,
        description="GLUE: null for the hub (nyu-mll/glue) or a directory in GLUE's TSV layout. Own task: a "
        "file (csv, tsv, jsonl, parquet; .gz too), a directory with train.* and validation.* (or val.*, dev.*) files, "
        "or package:NAME/path.",
    )
    text: Texts | None = Field(
        default=None,
        min_length=1,
        max_length=2,
        description="Own task: the text column, or the two columns of a pair; null: a column of a usual name, such "
        "as text, sentence or content. text/plain: the column; null: text. "
        "text/tokens: the column of words; null: tokens. text/choice: what comes before the choices; "
        "null: context and prompt, where the file has them.",
    )
    image: str | None = Field(
        default=None,
        description="image/classification: the column of the images' paths, from the file's directory; null: image. A "
        "directory with a folder of images for each class has no columns.",
    )
    messages: str | None = Field(
        default=None, description="text/chat: the column with the turns; null: recognised by the columns there are."
    )
    prompt: str | None = Field(
        default=None,
        description="text/chat, text/completion, text/preference: the column with the question, or what comes before.",
    )
    completion: str | None = Field(
        default=None, description="text/chat, text/completion: the column with the answer, or what follows."
    )
    separator: str | None = Field(
        default=None,
        min_length=1,
        description="text/completion: text between prompt and completion. text/multilabel: text between labels.",
    )
    train_on: Literal["assistant", "last", "all"] | None = Field(
        default=None,
        description="text/chat: every answer (the default), the last one, or all tokens; text/completion: the "
        "completion, or all.",
    )
    too_long: Literal["drop", "truncate", "error"] | None = Field(
        default=None,
        description="text/chat, text/completion, text/preference: what becomes of examples longer than "
        "train.max_length; null: drop. text/plain is cut into parts.",
    )
    label: str | None = Field(
        default=None,
        description="Own task: the column with the label (class name or number); null: a column of a usual name, such "
        "as label or labels. text/multilabel: a list of labels, or "
        "a text with data.separator between them. text/tokens: a tag for each word; null: tags. text/choice: the right "
        "choice's place, from 0, or its text; null: label. image/classification: null: label.",
    )
    labels: list[str] | None = Field(
        default=None,
        min_length=2,
        description="text/multilabel: instead of data.label, a column of 0 and 1 for each label.",
    )
    choices: Texts | None = Field(
        default=None,
        min_length=1,
        description="text/choice: the column with a list of choices, or the columns of one choice each; null: choices.",
    )
    bins: Bins = Field(
        default=None,
        min_length=2,
        description="Own classification task: make classes from a numeric label column (text/chat, text/completion: "
        "words from a numeric completion). Name to "
        "[lowest, highest], both inclusive, null for open; rows in no bin are left out and counted.",
    )
    validation: Count | Literal["all"] | None = Field(
        default=None,
        description="Own task in one file: examples (integer) or share (below 1) held out for validation; all, for "
        "`peftlab eval`: score the whole file.",
    )
    drop_missing: bool = Field(
        default=False,
        description="Own task: leave out rows without a text or label, and count them, instead of refusing the file.",
    )
    split_seed: Seed = Field(default=0, description="Seed of that held-out split; independent of train.seed.")
    max_train_examples: int | None = Field(
        default=None, ge=1, description="Use only this many training examples, drawn with split_seed."
    )

    @field_validator("validation", mode="before")
    @classmethod
    def _refuse_text(cls, value: object) -> object:
        if isinstance(value, str) and value != "all":
            hint = "; a file stands in a directory beside the training file: data.path=DIR with train.* and val.*"
            raise ValueError(
                f"expected a number of rows (200), a share (0.1), or all, got {value!r}"
                f"{hint if {'.', '/'} & {*value} else ''}"
            )
        return value

    @field_validator("validation")
    @classmethod
    def _check_validation(cls, value: int | float | str | None) -> int | float | str | None:
        if isinstance(value, float) and value >= 1:
            raise ValueError(f"a share is below 1 and a number of examples is whole, got {value}")
        return value

    @field_validator("bins")
    @classmethod
    def _check_bins(cls, bins: Bins) -> Bins:
        spans = sorted(
            (-inf if low is None else low, inf if high is None else high, name)
            for name, (low, high) in (bins or {}).items()
        )
        for low, high, name in spans:
            if not low <= high:  # so that NaN is rejected as well
                raise ValueError(f"{name}: its lowest value is above its highest")
        for (_, high, one), (low, _, other) in pairwise(spans):
            if low <= high:
                raise ValueError(f"{one} and {other} overlap (both ends of a bin belong to it)")
        return bins


Problem = tuple[tuple[str, ...], str]
"""The keys of a place in a recipe, and the message about it."""
_TEXT_KEYS = ("path", "text", "image", "label", "labels", "choices", "bins", "validation", "drop_missing")
_LANGUAGE_KEYS = ("messages", "prompt", "completion", "separator", "train_on", "too_long")
_TAKES = {
    "image/classification": {"image", "label"},
    "text/chat": {"messages", "prompt", "completion", "bins", "train_on", "too_long"},
    "text/completion": {"prompt", "completion", "separator", "bins", "train_on", "too_long"},
    "text/plain": {"text"},
    "text/preference": {"prompt", "too_long"},
    "text/multilabel": {"text", "label", "labels", "separator"},
    "text/tokens": {"text", "label"},
    "text/choice": {"text", "label", "choices"},
}


def check_glue(task: Task, data: DataConfig) -> list[Problem]:
    """Return the keys of ``data`` that a GLUE task does not take.

    Args:
        task: the table's row.
        data: the recipe's data section.
    """
    reason = f"belongs to one's own task (text/...); {task.name} has its own columns and splits"
    return [(("data", name), f"data.{name}: {reason}") for name in sorted(_given(data) - {"path"})]


def check_own(task: Task, data: DataConfig) -> list[Problem]:
    """Return the keys that a task on the user's files lacks, or does not take.

    Args:
        task: the table's row.
        data: the recipe's data section.
    """
    given = _given(data)
    problems = _without_path(task, given)
    if task.regression and "bins" in given:
        problems.append((("data", "bins"), f"data.bins: makes classes, but task {task.name} learns a number"))
    return problems + _not_taken(task, given & {*_LANGUAGE_KEYS, "image", "labels", "choices"})


def check_rows(task: Task, data: DataConfig) -> list[Problem]:
    """Return the keys that a task whose rows are more than a text and a class lacks, or does not take.

    Args:
        task: the table's row.
        data: the recipe's data section.
    """
    given = _given(data)
    takes = _TAKES[task.name] | {"path", "validation", "drop_missing"}
    problems = _without_path(task, given)
    if {"label", "labels"} <= given & takes:
        problems.append((("data", "labels"), "data.labels: the labels are in data.label already; give one of the two"))
    if task.name == "text/tokens" and len(data.text or ()) > 1:
        problems.append((("data", "text"), "data.text: task text/tokens has one column of words"))
    return problems + _not_taken(task, given - takes)


def check_language(task: Task, data: DataConfig) -> list[Problem]:
    """Return the keys that a language task lacks, or does not take.

    Args:
        task: the table's row.
        data: the recipe's data section.
    """
    given = _given(data)
    problems = _without_path(task, given)
    if ("prompt" in given) != ("completion" in given) and task.name == "text/chat":
        missing = "completion" if "prompt" in given else "prompt"
        problems.append((("data",), f"data.{missing}: missing; name both columns, prompt and completion, or neither"))
    if "messages" in given and "prompt" in given:
        problems.append((("data", "messages"), "data.messages: the chat is in one column or in two, not both"))
    if task.name == "text/plain" and len(data.text or ()) > 1:
        problems.append((("data", "text"), "data.text: task text/plain has one column of text"))
    if "bins" in given and "completion" not in given:
        problems.append((("data", "bins"), "data.bins: needs data.completion, the column with the numbers"))
    return problems + _not_taken(task, given - _TAKES[task.name] - {"path", "validation", "drop_missing"})


def _without_path(task: Task, given: set[str]) -> list[Problem]:
    return [] if "path" in given else [(("task",), f"data.path: missing; task {task.name} needs it")]


def _not_taken(task: Task, names: set[str]) -> list[Problem]:
    return [(("data", name), f"data.{name}: task {task.name} does not take it") for name in sorted(names)]


def _given(data: DataConfig) -> set[str]:
    return {name for name in (*_TEXT_KEYS, *_LANGUAGE_KEYS) if getattr(data, name) not in (None, False)}


# --- The ``generate`` section of a finetune recipe.
class GenerateConfig(Section):
    """Which held-out prompts are answered, how, and by which metrics the answers are scored."""

    metrics: Texts = Field(
        min_length=1, description="gsm8k, gsm8k_peft, exact_match, rouge_l, bleu, nist, cider (peftlab[metrics])."
    )
    max_new_tokens: int = Field(default=256, ge=1, description="Tokens of the longest answer.")
    examples: int | None = Field(
        default=None, ge=1, description="At most this many held-out prompts, drawn with data.split_seed; null: all."
    )
    before: bool = Field(default=True, description="Also score the model before training.")
    batch_size: int = Field(default=16, ge=1, description="Prompts per batch and process.")
    beams: int = Field(default=1, ge=1, description="Beams of beam search; 1: greedy, or sampled.")
    length_penalty: float = Field(
        default=1.0, description="Beam search: the exponent of the length that a beam's log-probability is divided by."
    )
    no_repeat_ngram: int = Field(default=0, ge=0, description="No n-gram of this size occurs twice; 0: any may.")
    temperature: float = Field(default=0.0, ge=0, description="0: the most probable token; above: sampled.")
    top_k: int | None = Field(default=None, ge=1, description="Sample from the k most probable tokens.")
    top_p: float | None = Field(
        default=None, gt=0, le=1, description="Sample from the fewest most probable tokens whose sum reaches this."
    )
    seed: Seed = Field(default=0, description="Seed of sampling.")

    @field_validator("metrics")
    @classmethod
    def _check_metrics(cls, names: list[str]) -> list[str]:
        try:
            for name in names:
                GENERATION_METRICS.find(name)
        except PeftlabError as error:
            raise ValueError(str(error)) from None
        return list(dict.fromkeys(names))

    @model_validator(mode="after")
    def _check_options(self) -> GenerateConfig:
        if self.temperature == 0 and (self.top_k is not None or self.top_p is not None):
            raise ValueError("top_k and top_p restrict sampling: set temperature above 0")
        if self.beams > 1 and self.temperature > 0:
            raise ValueError("beam search does not sample: leave out temperature, or beams")
        if self.beams == 1 and self.length_penalty != 1:
            raise ValueError("length_penalty belongs to beam search: set beams above 1")
        return self

    @property
    def stepwise(self) -> bool:
        """Whether each token depends on the logits alone: what peftlab's own decoder computes."""
        return self.beams == 1 and self.no_repeat_ngram == 0


# --- The ``objective`` section of a finetune recipe.
class PreferenceObjective(Section):
    """What text/preference minimises."""

    name: Literal["dpo"] = Field(default="dpo", description="dpo: direct preference optimisation.")
    beta: float = Field(
        default=0.1,
        gt=0,
        allow_inf_nan=False,
        description="Strength of the penalty for moving away from the model that training starts from.",
    )
