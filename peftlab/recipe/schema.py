"""The recipe: everything that determines a run, frozen and validated before anything is loaded."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Literal, Union

from pydantic import Field, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic.config import JsonDict
from pydantic_core import PydanticCustomError

from peftlab.decoding.table import HEAD, MOST_DRAFTED, POLICIES, policy, rule_help, window
from peftlab.drafting.config import DraftConfig, DraftData, DraftObjective, RecipeKeys
from peftlab.drafting.table import DRAFTS
from peftlab.errors import PeftlabError
from peftlab.files import is_url
from peftlab.methods.config import METHODS, LoraConfig, MethodConfig, config_class
from peftlab.models.config import Base, BaseConfig, MergeConfig
from peftlab.recipe.errors import fields
from peftlab.registry import Section, Seed, Texts, resolve
from peftlab.remote import check_url
from peftlab.tasks.table import TASKS, DataConfig, GenerateConfig, PreferenceObjective, Problem, Task, find_task
from peftlab.training.config import TrainConfig

if TYPE_CHECKING:
    AnyMethod = MethodConfig
    AnyDraft = DraftConfig
else:
    AnyDraft = Union[tuple(resolve(kind.config) for kind in DRAFTS.values())]  # noqa: UP007
    AnyMethod = Union[tuple(config_class(name) for name in METHODS)]  # noqa: UP007


_OUTPUT_DIR = "The run directory: a path, or a URL such as s3://bucket/run that it is uploaded to as it grows."
OWN_MODULES_LR = 1e-3  # of a draft whose own modules alone train: no method's row describes them


def _with_lr(train: TrainConfig, info: ValidationInfo[object]) -> TrainConfig:
    """Return ``train`` with its method's learning rate where it states none, so that a valid recipe always has one."""
    if train.lr is not None or "method" not in info.data:  # the method was refused
        return train
    method: MethodConfig | None = info.data["method"]
    lr = OWN_MODULES_LR if method is None else METHODS[method.name].default_lr
    return train.model_copy(update={"lr": lr})


def _run_place(path: str) -> str:
    """Return an ``output_dir``, which may be a URL that runs can be stored at; ``~`` is the home directory."""
    if is_url(path):
        try:
            check_url(path)
        except PeftlabError as error:
            raise ValueError(str(error)) from None
    return os.path.expanduser(path)


def _with_name(method: object) -> object:
    """Return a method's section, named lora where it has no name and all its keys are LoRA's."""
    if isinstance(method, dict) and "name" not in method and method.keys() <= fields(LoraConfig).keys():
        return {"name": "lora", **method}
    return method


def injected_method(method: MethodConfig, train: TrainConfig) -> MethodConfig:
    """Return the configuration that is put into the model: ``method`` in the layers that ``train.layers`` names."""
    first = train.layers.from_ if train.layers is not None else None
    if first is None:
        return method
    return method.model_validate({**method.model_dump(by_alias=True), "first_layer": first})


def _layer_problems(method: MethodConfig | None, train: TrainConfig) -> list[Problem]:
    """Return what ``train.layers`` asks for that the method does not do."""
    if method is None:
        reason = "there is no method whose layers it could choose; the draft's own modules train"
        return [(("train", "layers"), f"train.layers: {reason}")] if train.layers is not None else []
    if method.first_layer is not None:
        return [(("method", "first_layer"), "method.first_layer: write train.layers={from: K}, for any method")]
    try:
        injected_method(method, train)
    except ValidationError as error:
        reason = error.errors()[0]["msg"].removeprefix("Value error, ")
        return [(("train", "layers", "from"), f"train.layers.from: method {method.name}: {reason}")]
    return []


def _sample_problems(train: TrainConfig, task: Task | None) -> list[Problem]:
    """Return what ``train.sample`` asks for that a task, or a draft (None), has no score for."""
    by = train.sample.by if train.sample is not None else None
    where = ("train", "sample", "by")
    if by == "lowest_acceptance" and task is not None:
        return [(where, "train.sample.by: lowest_acceptance is for drafts, whose tokens a target accepts or rejects")]
    if by == "least_confidence" and task is None:
        return [(where, "train.sample.by: least_confidence is for classes; for a draft set lowest_acceptance")]
    if by == "least_confidence" and task is not None and (task.regression or not task.labelled):
        reason = f"needs the probabilities of an example's answers, which task {task.name} does not have"
        return [(where, f"train.sample.by: least_confidence {reason}; set random or batches")]
    return []


def _usual_objective(recipe: dict[str, object]) -> PreferenceObjective | None:
    task = recipe.get("task")  # absent if it was refused
    return PreferenceObjective() if isinstance(task, str) and find_task(task).objectives else None


def _objective_problems(task: Task, objective: PreferenceObjective | None) -> list[Problem]:
    given = objective.name if objective is not None else None
    if given in (task.objectives or (None,)):
        return []
    if given is None:
        return [(("objective",), f"objective: missing; task {task.name} needs one of {', '.join(task.objectives)}")]
    able = ", ".join(name for name, row in TASKS.items() if given in row.objectives)
    return [(("objective",), f"objective: task {task.name} has a loss of its own; objective {given} is for {able}")]


class FinetuneRecipe(Section):
    """Finetune ``model`` on ``task`` by ``method``."""

    kind: Literal["finetune"] = Field(default="finetune", description="What the recipe makes.")
    model: str = Field(description="Hub id, model, run or adapter directory, GGUF file, or package:NAME/path.")
    revision: str | None = Field(default=None, description="Git revision of a hub model.")
    trust_remote_code: bool = Field(default=False, description="Run Python code that the model repository ships.")
    base: Base = Field(default=BaseConfig(), description="How the model's weights are stored; null: fp32.")
    task: str = Field(
        description="glue/NAME; on your own files text/classification, text/regression, text/multilabel, text/tokens, "
        "text/choice, text/chat, text/completion, text/plain, text/preference, image/classification."
    )
    objective: PreferenceObjective | None = Field(
        default_factory=_usual_objective,
        description="text/preference: what is minimised, dpo by default; null: the task's own loss.",
    )
    data: DataConfig = Field(default=DataConfig(), description="Where the examples come from.")
    method: AnyMethod = Field(
        default=LoraConfig(),
        discriminator="name",
        description="What is added to the model and trained.",
    )
    train: TrainConfig = Field(default=TrainConfig(), description="How the loop runs.")
    generate: GenerateConfig | None = Field(
        default=None,
        description="text/chat, text/completion: answer held-out prompts (of the test split if there is one) before "
        "and after training, and score the answers.",
    )
    init_from: str | None = Field(
        default=None,
        description="A run or adapter of the same method whose trained tensors, but for the task head, this run "
        "starts from; null: a fresh start.",
    )
    merge: bool | MergeConfig | None = Field(
        default=None,
        description="Write merged/: true, false, or null for wherever the method has a linear fold; a section is null "
        "and says how.",
    )
    output_dir: str = Field(description=_OUTPUT_DIR)

    _method = field_validator("method", mode="before")(_with_name)
    _lr = field_validator("train")(_with_lr)
    _place = field_validator("output_dir")(_run_place)

    @field_validator("task")
    @classmethod
    def _trainable(cls, name: str) -> str:
        try:
            task = find_task(name)
        except PeftlabError as error:
            raise ValueError(str(error)) from None
        if not task.trainable:
            raise ValueError(f"{name} has no training split; it can only be predicted")
        return name

    @model_validator(mode="after")
    def _consistent(self) -> FinetuneRecipe:
        task = find_task(self.task)
        problems = [*_objective_problems(task, self.objective), *resolve(task.check)(task, self.data)]
        if self.base.quantised and self.method.name == "full":
            reason = f"{self.base.dtype} is for training something beside the weights, and method full trains them"
            problems = [*problems, (("base", "dtype"), f"base.dtype: {reason}; choose another method, or fp32")]
        unused = _unused_settings(self.train, f"task {task.name}", tokens=task.token_loss, classes=task.classed)
        problems = [*problems, *unused]
        problems = [*problems, *_layer_problems(self.method, self.train)]
        problems = [*problems, *_sample_problems(self.train, task)]
        if self.train.weights is not None and (self.method.name, self.base.dtype) != ("full", "bf16"):
            reason = "rounds the weights of a base in bf16 that train themselves; set method=full and base.dtype=bf16"
            problems = [*problems, (("train", "weights"), f"train.weights: {self.train.weights} {reason}")]
        if self.train.optimizer == "muon":
            reason = "muon trains a draft's own modules; a method beside a base trains by adamw"
            problems = [*problems, (("train", "optimizer"), f"train.optimizer: {reason}")]
        if self.train.emulate is not None and self.base.dtype not in (None, "fp32"):
            reason = f"computes few bits from weights in fp32, and the base is in {self.base.dtype}"
            problems = [*problems, (("train", "emulate"), f"train.emulate: {reason}; set base.dtype=fp32")]
        if self.generate is not None and not task.prompted:
            problems = [*problems, (("generate",), f"generate: task {task.name} has no prompts to answer")]
        if problems:
            message = "; ".join(text for _, text in problems)
            raise PydanticCustomError("recipe", "{message}", {"message": message, "problems": problems})
        return self


def _unused_settings(
    train: TrainConfig, what: str, *, tokens: bool, classes: bool
) -> list[tuple[tuple[str, ...], str]]:
    """Return the settings that ``what`` does not take.

    Args:
        tokens: whether its loss is one over an example's own tokens. classes: whether its labels are classes.
    """
    given = {} if tokens else {"packing": train.packing, "label_smoothing": train.label_smoothing}
    given |= {} if classes else {"class_weights": train.class_weights is not None}
    return [(("train", name), f"train.{name}: {what} does not take it") for name, value in given.items() if value]


def _usual_method(recipe: dict[str, object]) -> MethodConfig | None:
    draft = recipe.get("draft")  # absent if it was refused
    name = draft.usual_method if isinstance(draft, DraftConfig) else "lora"
    return config_class(name)(name=name) if name is not None else None


def _or_reference(schema: JsonDict) -> None:
    """Let the JSON Schema of ``draft`` accept a reference too."""
    branches: JsonDict = {key: schema.pop(key) for key in ("oneOf", "discriminator") if key in schema}
    schema["anyOf"] = [branches, {"type": "string"}]


def section_of_reference(value: object) -> object:
    """Return the section that a ``draft`` is short for, if it is a reference alone."""
    return {"kind": "model", "from": value} if isinstance(value, str) else value


class DraftRecipe(Section):
    """Train a draft that ``target`` accepts."""

    kind: Literal["draft"] = Field(description="What the recipe makes.")
    target: str = Field(
        description="The model to be served: hub id, model, run or adapter directory, GGUF file, or package:NAME/path."
    )
    draft: AnyDraft = Field(
        discriminator="kind",
        description="What drafts, by its kind. A reference alone is short for {kind: model, from: REF}.",
        json_schema_extra=_or_reference,
    )
    revision: str | None = Field(default=None, description="Git revision of a hub target.")
    trust_remote_code: bool = Field(default=False, description="Run Python code that a model repository ships.")
    base: Base = Field(default=BaseConfig(), description="How the target's weights are stored; null: fp32.")
    method: AnyMethod | None = Field(
        default_factory=_usual_method,
        discriminator="name",
        description="How the draft's language model trains (with kinds in or on the target: the target). Default: "
        "lora; null for kinds with modules of their own (medusa, hydra, mtp, eagle3): they alone train.",
    )
    objective: DraftObjective = Field(default=DraftObjective(), description="What the draft minimises.")
    data: DraftData = Field(description="The text the draft learns from.")
    train: TrainConfig = Field(
        default=TrainConfig(),
        description="How the loop runs; nothing is truncated, so max_length must fit every example.",
    )
    acceptance_head: bool = Field(
        default=False,
        description="Also fit a head that predicts whether a drafted token will be accepted, to stop drafting in time "
        "(SpecDec++): acceptance_head.safetensors in the run directory.",
    )
    gamma: int = Field(
        default=4, ge=1, le=MOST_DRAFTED, description="Drafted tokens per step when block efficiency is measured."
    )
    policy: str = Field(
        default="fixed", description=f"How the draft length is chosen then, at most gamma: {rule_help(POLICIES)}."
    )
    draft_window: str | None = Field(
        default=None,
        description="SINKS:LAST, such as 4:512: the first and the last tokens that the draft sees when it is measured; "
        "null: all.",
    )
    merge: bool | MergeConfig | None = Field(
        default=None,
        description="Write merged/: true, false, or null for wherever the method has a linear fold; a section is null "
        "and says how.",
    )
    output_dir: str = Field(description=_OUTPUT_DIR)

    _method = field_validator("method", mode="before")(_with_name)
    _lr = field_validator("train")(_with_lr)
    _place = field_validator("output_dir")(_run_place)

    _draft = field_validator("draft", mode="before")(section_of_reference)

    @model_validator(mode="after")
    def _consistent(self) -> DraftRecipe:
        objective, data = self.objective, self.data
        found: list[tuple[str, str]] = []
        if objective.name == "topk_kl" and data.top_k is None:
            found.append(("objective.name", "topk_kl needs the target's probabilities, and data.top_k stores none"))
        if data.top_k is not None and objective.name != "topk_kl":
            found.append(("data.top_k", f"objective {objective.name} does not use it; choose topk_kl or remove it"))
        if data.on_policy and objective.name in ("ce", "topk_kl"):
            reason = f"text of the draft's own needs the target's logits, which {objective.name} does without"
            found.append(("data.on_policy", reason))
        if data.targets is not None and not self.draft.several_targets:
            reason = f"draft kind {self.draft.kind} is for one target; a draft model alone serves several"
            found.append(("data.targets", reason))
        if data.targets is not None and (data.prompts is None or data.endpoint is not None):
            found.append(("data.targets", "each target continues data.prompts here; give prompts, and no endpoint"))
        if data.targets is not None and objective.name == "topk_kl":
            found.append(("data.targets", "topk_kl stores the probabilities of one target; choose another objective"))
        if (objective.selective is None) != (objective.reference is None):
            reason = "needs a reference, and a reference needs selective; give both or neither"
            found.append(("objective.selective", reason))
        if self.train.gradient_checkpointing and self.draft.usual_method is None and self.method is None:
            reason = f"computes layers of a model again, and {self.draft.kind} trains modules of its own; remove it"
            found.append(("train.gradient_checkpointing", reason))
        if self.train.layers is not None and self.train.layers.active is not None:
            found.append(("train.layers.active", "a draft trains all its layers in every step; remove it"))
        if self.train.optimizer == "muon" and self.method is not None:
            found.append(("train.optimizer", "muon trains modules of the draft's own; write method: null"))
        if self.train.weights is not None:
            found.append(("train.weights", "is for method full on a base in bf16, which drafts do not have; remove it"))
        if self.train.emulate is not None:
            found.append(("train.emulate", "is for tasks that are finetuned; a draft decodes on the target's hardware"))
        unused = _unused_settings(self.train, "a draft", tokens=False, classes=False)
        unused += _layer_problems(self.method, self.train) + _sample_problems(self.train, None)
        found += [(".".join(keys), text.partition(": ")[2]) for keys, text in unused]
        try:
            length = policy(self.policy, self.gamma)
        except PeftlabError as error:
            found.append(("policy", str(error).removeprefix("policy ")))
            length = policy("fixed")
        if length.row.needs == HEAD and not (self.acceptance_head or self.draft.estimates_acceptance):
            found.append(("policy", f"{length.text}: reads a trained head; set acceptance_head: true"))
        try:
            seen = None if self.draft_window is None else window(self.draft_window)
        except PeftlabError as error:
            found.append(("draft_window", str(error).removeprefix("draft_window ")))
            seen = None
        keys = RecipeKeys(self.method, objective, data, self.merge, self.acceptance_head, length, seen, self.gamma)
        found += self.draft.problems(keys)
        if found:
            problems = [(tuple(where.split(".")), f"{where}: {reason}") for where, reason in found]
            message = "; ".join(text for _, text in problems)
            raise PydanticCustomError("recipe", "{message}", {"message": message, "problems": problems})
        return self


Changes = dict[str, dict[str, object]]
"""By task or row, the keys of a cell's recipe that differ there."""


def _on_disk(path: str) -> str:
    """Return the ``output_dir`` of a table, which is no URL; ``~`` is the home directory."""
    if is_url(path):
        raise ValueError(f"{path}: the cells of a table or sweep share a directory; only single runs have a URL")
    return os.path.expanduser(path)


class TableCosts(Section):
    """The rows of a table beside others of equal cost."""

    of: str = Field(description="The row whose FLOPs are 1.")
    controls: dict[str, str] = Field(default={}, description="Row to the row of equal cost that it is compared with.")


class TableRecipe(Section):
    """Finetune on every task in every way (row) with every seed, and collect the scores in one table."""

    kind: Literal["table"] = Field(description="What the recipe makes.")
    model: str = Field(description="Hub id, model, run or adapter directory, GGUF file, or package:NAME/path.")
    revision: str | None = Field(default=None, description="Git revision of a hub model.")
    trust_remote_code: bool = Field(default=False, description="Run Python code that the model repository ships.")
    base: Base = Field(default=BaseConfig(), description="How the model's weights are stored; null: fp32.")
    tasks: Texts = Field(min_length=1, description="The columns: tasks as a finetune recipe names them.")
    rows: Changes = Field(
        min_length=1,
        description="The rows: name to its own keys, {lora: {method: {name: lora}, train: {lr: 5e-4}}}; per_task among "
        "them is for that row alone, init_from: null starts it from the model in every task.",
    )
    seeds: list[Seed] = Field(
        default=[0], min_length=1, description="Each task and row is run with each of these as train.seed."
    )
    data: DataConfig = Field(default=DataConfig(), description="Where the examples come from.")
    train: TrainConfig = Field(default=TrainConfig(), description="How the loop runs.")
    per_task: Changes = Field(
        default={},
        description="Task to its own keys, {glue/rte: {train: {epochs: 80}}}; a row's own keys win.",
    )
    init: dict[str, str] = Field(
        default={},
        description="Task to the task of this table whose result, same row and seed, it starts from.",
    )
    costs: TableCosts | None = Field(
        default=None,
        description="{of: full, controls: {upper: shorter}}: also show FLOPs as a share of a row's, bytes and "
        "time, and beside each row its control.",
    )
    merge: bool | MergeConfig = Field(
        default=False, description="Write merged/ in every cell whose method has a linear fold; a section says how."
    )
    output_dir: str = Field(description="Directory of the table; its cells are stored below it.")

    _place = field_validator("output_dir")(_on_disk)


class DraftTableRecipe(Section):
    """Train a draft for a target in every way (row) with every seed, and collect their acceptance in one table."""

    kind: Literal["draft_table"] = Field(description="What the recipe makes.")
    target: str = Field(
        description="The model to be served: hub id, model, run or adapter directory, GGUF file, or package:NAME/path."
    )
    draft: dict[str, object] | None = Field(
        default=None, description="What drafts, a section or reference as in kind: draft; null: each row says it."
    )
    revision: str | None = Field(default=None, description="Git revision of a hub target.")
    trust_remote_code: bool = Field(default=False, description="Run Python code that a model repository ships.")
    base: Base = Field(default=BaseConfig(), description="How the target's weights are stored; null: fp32.")
    method: dict[str, object] | None = Field(
        default=None, description="How the drafts train, as in kind: draft; null: as usual for the kind of draft."
    )
    objective: dict[str, object] | None = Field(
        default=None, description="What the drafts minimise, as in kind: draft; null: its default."
    )
    rows: Changes = Field(
        min_length=1,
        description="The rows: name to its own keys of a draft recipe, {tvd: {objective: {name: tvd}}}; a draft of "
        "another kind, or a method of another name, replaces the table's. Gains are those over the first row.",
    )
    seeds: list[Seed] = Field(
        default=[0], min_length=1, description="Each row is run with each of these as train.seed."
    )
    data: DraftData = Field(description="The text the drafts learn from: written once, for all cells that share it.")
    train: TrainConfig = Field(default=TrainConfig(), description="How the loop runs.")
    acceptance_head: bool = Field(default=False, description="As in kind: draft.")
    gamma: int = Field(
        default=4, ge=1, le=MOST_DRAFTED, description="Drafted tokens per step when block efficiency is measured."
    )
    policy: str = Field(default="fixed", description="How the draft length is chosen then, as in kind: draft.")
    draft_window: str | None = Field(default=None, description="What the draft sees then, as in kind: draft.")
    merge: bool | MergeConfig | None = Field(
        default=None,
        description="Write merged/ in the cells: true, false, or null for wherever the method has a linear fold; a "
        "section is null and says how.",
    )
    output_dir: str = Field(description="Directory of the table; its cells are stored below it.")

    _draft = field_validator("draft", mode="before")(section_of_reference)
    _place = field_validator("output_dir")(_on_disk)


AnyTable = TableRecipe | DraftTableRecipe
"""A recipe whose cells are recipes of their own."""


Recipe = Union[FinetuneRecipe, DraftRecipe, TableRecipe, DraftTableRecipe]  # noqa: UP007
"""Any kind of recipe."""

KINDS: dict[str, type[FinetuneRecipe] | type[DraftRecipe] | type[TableRecipe] | type[DraftTableRecipe]] = {
    "finetune": FinetuneRecipe,
    "draft": DraftRecipe,
    "table": TableRecipe,
    "draft_table": DraftTableRecipe,
}
"""The kinds of recipe by ``kind:``; the first is the default."""
