"""The recipe: everything that determines a run, frozen and validated before anything is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Union

from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from peftlab.drafting.config import DraftData, DraftObjective
from peftlab.errors import PeftlabError
from peftlab.methods.config import MethodConfig
from peftlab.methods.lora.config import LoraConfig
from peftlab.methods.table import METHODS, config_class
from peftlab.rows import resolve
from peftlab.section import Section, Seed
from peftlab.tasks.config import DataConfig
from peftlab.tasks.table import find_task
from peftlab.training.config import TrainConfig

if TYPE_CHECKING:
    AnyMethod = MethodConfig
else:
    AnyMethod = Union[tuple(config_class(name) for name in METHODS)]  # noqa: UP007


class FinetuneRecipe(Section):
    """Finetune ``model`` on ``task`` by ``method``."""

    kind: Literal["finetune"] = Field(default="finetune", description="What the recipe makes.")
    model: str = Field(description="Hub id, local directory, GGUF file, or package:NAME/path.")
    revision: str | None = Field(default=None, description="Git revision of a hub model.")
    trust_remote_code: bool = Field(default=False, description="Run Python code that the model repository ships.")
    task: str = Field(description="glue/NAME, text/classification or text/regression.")
    data: DataConfig = Field(default=DataConfig(), description="Where the examples come from.")
    method: AnyMethod = Field(
        default=LoraConfig(),
        discriminator="name",
        description="What is put into the model and trained.",
    )
    train: TrainConfig = Field(default=TrainConfig(), description="How the loop runs.")
    init_from: str | None = Field(
        default=None,
        description="A run or adapter of the same method whose trained tensors, but for the task head, this run "
        "starts from; null: a fresh start.",
    )
    merge: bool | None = Field(
        default=None,
        description="Write merged/: true, false, or null for wherever the method has a linear fold.",
    )
    output_dir: str = Field(description="The run directory.")

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
        problems = resolve(task.check)(task, self.data)
        if problems:
            message = "; ".join(text for _, text in problems)
            raise PydanticCustomError("recipe", "{message}", {"message": message, "problems": problems})
        return self


class Layers(Section):
    """Some of the target's own layers."""

    layers: list[int] = Field(min_length=1, description="Their numbers from 0, rising.")


class Truncation(Section):
    """A draft made of the target's own layers, embeddings, final norm and LM head."""

    truncate: Layers = Field(description="layers: which of the target's layers to keep, from 0, rising.")


class DraftRecipe(Section):
    """Train a draft model, or heads, that ``target`` accepts."""

    kind: Literal["draft"] = Field(description="What the recipe makes.")
    target: str = Field(description="The model to be served: hub id, local directory, GGUF file, or package:NAME/path.")
    draft: str | Truncation | None = Field(
        default=None,
        description="The draft to start from, as target; or truncate: {layers: [...]}, the target's own layers; null "
        "for method medusa, whose heads sit on the target.",
    )
    revision: str | None = Field(default=None, description="Git revision of a hub target.")
    trust_remote_code: bool = Field(default=False, description="Run Python code that a model repository ships.")
    method: AnyMethod = Field(
        default=LoraConfig(),
        discriminator="name",
        description="What is put into the draft and trained.",
    )
    objective: DraftObjective = Field(default=DraftObjective(), description="What the draft minimises.")
    data: DraftData = Field(description="The text the draft learns from.")
    train: TrainConfig = Field(
        default=TrainConfig(), description="How the loop runs; nothing is cut, so max_length must hold every example."
    )
    early_exit: bool = Field(
        default=False,
        description="Train the target itself so that its first layers, named by draft: {truncate: ...}, answer as "
        "the whole does (LayerSkip); the merged model is target and draft at once.",
    )
    vocabulary: int | None = Field(
        default=None,
        ge=1,
        description="Draft only so many tokens, the most frequent of the target's text; the map is stored beside the "
        "draft's weights (heads written lose the other rows) and the ceiling p(V_d) reported. null: all.",
    )
    acceptance_head: bool = Field(
        default=False,
        description="Also fit a head that foresees whether a drafted token stands, to stop drafting in time "
        "(SpecDec++): acceptance_head.safetensors in the run directory.",
    )
    gamma: int = Field(default=4, ge=1, description="Drafted tokens a step when block efficiency is measured.")
    merge: bool | None = Field(
        default=None,
        description="Write merged/: true, false, or null for wherever the method has a linear fold.",
    )
    output_dir: str = Field(description="The run directory.")

    @model_validator(mode="after")
    def _consistent(self) -> DraftRecipe:
        objective, data, medusa = self.objective, self.data, self.method.name == "medusa"
        problems: list[tuple[tuple[str, ...], str]] = []

        def refuse(where: str, reason: str) -> None:
            problems.append((tuple(where.split(".")), f"{where}: {reason}"))

        if medusa and self.draft is not None:
            refuse("draft", "method medusa puts heads on the target; remove it")
        if not medusa and self.draft is None:
            refuse("draft", "missing; name a model, or truncate: {layers: [...]}")
        if objective.name == "topk_kl" and data.top_k is None:
            refuse("objective.name", "topk_kl needs the target's probabilities, and data.top_k stores none")
        if data.top_k is not None and objective.name != "topk_kl":
            refuse("data.top_k", f"objective {objective.name} does not use it; choose topk_kl or remove it")
        if data.on_policy and objective.name in ("ce", "topk_kl"):
            refuse(
                "data.on_policy",
                f"text of the draft's own needs the target's logits, which {objective.name} does without",
            )
        if (objective.selective is None) != (objective.reference is None):
            refuse("objective.selective", "needs a reference, and a reference needs selective; give both or neither")
        special = medusa or self.early_exit
        if special and (objective.name == "topk_kl" or objective.selective is not None or data.on_policy):
            refuse("objective", "heads and early exit know no topk_kl, no selective filter and no on_policy text")
        if self.vocabulary is not None and self.early_exit:
            refuse("vocabulary", "an early exit drafts with the target's own LM head; remove it")
        if self.vocabulary is not None and not medusa and self.merge is False:
            refuse("vocabulary", "lies beside the merged weights; remove merge: false")
        if special and self.acceptance_head:
            refuse("acceptance_head", "reads a draft model's states; there is none with heads or early exit")
        if self.early_exit and not isinstance(self.draft, Truncation):
            refuse("early_exit", "needs draft: {truncate: {layers: [0, 1, ...]}}, the layers before the exit")
        elif self.early_exit and isinstance(self.draft, Truncation):
            layers = self.draft.truncate.layers
            if layers != list(range(len(layers))):
                refuse("early_exit", f"layers {layers} are not the first ones; an exit leaves out the last layers")
        if problems:
            message = "; ".join(text for _, text in problems)
            raise PydanticCustomError("recipe", "{message}", {"message": message, "problems": problems})
        return self


Changes = dict[str, dict[str, Any]]
"""By task or row, the keys of a finetune recipe that differ there."""


class TableRecipe(Section):
    """Finetune on every task in every way (row) with every seed, and put the scores into one table."""

    kind: Literal["table"] = Field(description="What the recipe makes.")
    model: str = Field(description="Hub id, local directory, GGUF file, or package:NAME/path.")
    revision: str | None = Field(default=None, description="Git revision of a hub model.")
    trust_remote_code: bool = Field(default=False, description="Run Python code that the model repository ships.")
    tasks: list[str] = Field(min_length=1, description="The columns: tasks as a finetune recipe names them.")
    rows: Changes = Field(
        min_length=1,
        description="The rows: name to its own keys, {lora: {method: {name: lora}, train: {lr: 5e-4}}}.",
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
    merge: bool = Field(default=False, description="Write merged/ in every cell whose method has a linear fold.")
    output_dir: str = Field(description="Directory of the table; its cells are stored below it.")


Recipe = Union[FinetuneRecipe, DraftRecipe, TableRecipe]  # noqa: UP007
"""Any kind of recipe."""

KINDS: dict[str, type[FinetuneRecipe] | type[DraftRecipe] | type[TableRecipe]] = {
    "finetune": FinetuneRecipe,
    "draft": DraftRecipe,
    "table": TableRecipe,
}
"""The kinds of recipe by ``kind:``; the first is the default."""
