"""The recipe: everything that determines a run, frozen and validated before anything is loaded."""

from __future__ import annotations

from itertools import pairwise
from math import inf
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from peftlab.errors import PeftlabError
from peftlab.methods import METHODS
from peftlab.methods.config import MethodConfig
from peftlab.tasks.table import find_task

MOST_SEED = 2**32 - 1
"""The largest seed that all generators take."""


class Section(BaseModel):
    """Base of every recipe section: unknown keys are refused and values cannot change later."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


Bins = dict[str, tuple[float | None, float | None]] | None
Count = Annotated[int, Field(gt=0)] | Annotated[float, Field(gt=0)]


class DataConfig(Section):
    """Where the examples come from."""

    path: str | None = Field(
        default=None,
        description="GLUE: null for the hub (nyu-mll/glue) or a directory in GLUE's TSV layout. Own task: a "
        "file (csv, tsv, jsonl, parquet; .gz too), a directory with train.* and validation.* files, or "
        "package:NAME/path.",
    )
    text: list[str] | None = Field(
        default=None,
        min_length=1,
        max_length=2,
        description="Own task: the text column, or the two columns of a pair.",
    )
    label: str | None = Field(default=None, description="Own task: the column with the label (class name or number).")
    bins: Bins = Field(
        default=None,
        min_length=2,
        description="Own classification task: make classes from a numeric label column. Class name to "
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
    split_seed: int = Field(
        default=0, ge=0, le=MOST_SEED, description="Seed of that held-out split; independent of train.seed."
    )
    max_train_examples: int | None = Field(
        default=None, ge=1, description="Use only this many training examples, drawn with split_seed."
    )

    @field_validator("validation")
    @classmethod
    def _count_or_share(cls, value: int | float | str | None) -> int | float | str | None:
        if isinstance(value, float) and value >= 1:
            raise ValueError(f"a share is below 1 and a number of examples is whole, got {value}")
        return value

    @field_validator("bins")
    @classmethod
    def _disjoint(cls, bins: Bins) -> Bins:
        spans = sorted(
            (-inf if low is None else low, inf if high is None else high, name)
            for name, (low, high) in (bins or {}).items()
        )
        for low, high, name in spans:
            if low > high:
                raise ValueError(f"{name}: its lowest value is above its highest")
        for (_, high, one), (low, _, other) in pairwise(spans):
            if low <= high:
                raise ValueError(f"{one} and {other} overlap (both ends of a bin belong to it)")
        return bins


Beta = Annotated[float, Field(ge=0, lt=1)]


class TrainConfig(Section):
    """How the loop runs."""

    epochs: float = Field(default=3, gt=0, description="Passes over the training set.")
    max_steps: int | None = Field(default=None, ge=1, description="Optimiser steps; overrides epochs.")
    batch_size: int = Field(
        default=32,
        ge=1,
        description="Examples per optimiser step over all processes and accumulation steps (global batch).",
    )
    max_tokens: int | None = Field(
        default=None,
        ge=2,
        description="Padded tokens per optimiser step, instead of batch_size: as many examples as fit.",
    )
    eval_batch_size: int = Field(default=64, ge=1, description="Examples per evaluation batch and process.")
    gradient_accumulation_steps: int = Field(
        default=1,
        ge=1,
        description="Parts each global batch is split into to save memory; the result is the same.",
    )
    max_length: int = Field(default=128, ge=2, description="Tokens an example is truncated to.")
    lr: float = Field(default=1e-3, gt=0, description="Peak learning rate.")
    scheduler: Literal["linear", "cosine", "constant"] = Field(default="linear", description="Decay after warm-up.")
    warmup: float = Field(default=0.06, ge=0, description="Warm-up: share of all steps if below 1, else steps.")
    weight_decay: float = Field(default=0.0, ge=0, description="AdamW's decoupled decay; not on biases and norms.")
    betas: tuple[Beta, Beta] = Field(default=(0.9, 0.999), description="AdamW's betas.")
    eps: float = Field(default=1e-8, gt=0, description="AdamW's epsilon.")
    max_grad_norm: float | None = Field(default=1.0, gt=0, description="Gradient norm clipping; null for none.")
    precision: Literal["fp32", "tf32", "bf16", "fp16"] = Field(
        default="fp32",
        description="bf16, fp16: mixed precision of the forward; tf32: fp32, with TF32 products on GPUs.",
    )
    compile: bool = Field(
        default=False, description="Compile the model with torch.compile; go on without where that fails."
    )
    gradient_checkpointing: bool = Field(default=False, description="Recompute activations in backward.")
    eval_every: int | None = Field(default=None, ge=1, description="Steps between evaluations; null: every epoch.")
    early_stopping: int | None = Field(
        default=None, ge=1, description="Stop after this many evaluations without a better score."
    )
    save_every: int | None = Field(
        default=None, ge=1, description="Steps between checkpoints besides those at evaluations; null: none."
    )
    keep_checkpoints: int = Field(default=2, ge=1, description="Newest checkpoints kept beside the best one.")
    trackers: list[Literal["tensorboard", "wandb", "trackio"]] = Field(
        default=[], description="Trackers beside metrics.jsonl."
    )
    seed: int = Field(default=0, ge=0, le=MOST_SEED, description="Seed of initialisation, data order and dropout.")

    @model_validator(mode="after")
    def _longest_fits(self) -> TrainConfig:
        if self.max_tokens is not None and self.max_tokens < self.max_length:
            raise ValueError(f"max_tokens {self.max_tokens} does not hold one example of max_length {self.max_length}")
        return self


if TYPE_CHECKING:
    AnyMethod = MethodConfig
else:
    AnyMethod = Union[tuple(method.config for method in METHODS.values())]  # noqa: UP007


class FinetuneRecipe(Section):
    """Finetune ``model`` on ``task`` by ``method``."""

    kind: Literal["finetune"] = Field(default="finetune", description="What the recipe makes.")
    model: str = Field(description="Hub id, local directory, GGUF file, or package:NAME/path.")
    revision: str | None = Field(default=None, description="Git revision of a hub model.")
    trust_remote_code: bool = Field(default=False, description="Run Python code that the model repository ships.")
    task: str = Field(description="glue/NAME, text/classification or text/regression.")
    data: DataConfig = Field(default=DataConfig(), description="Where the examples come from.")
    method: AnyMethod = Field(
        default_factory=METHODS["lora"].config,
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
        own = ("path", "text", "label", "bins", "validation", "drop_missing")
        given = {name for name in own if getattr(self.data, name) not in (None, False)}
        problems: list[tuple[tuple[str, ...], str]] = []  # where it was written, and what is wrong
        if task.glue:
            reason = f"belongs to one's own task (text/...); {task.name} has its own columns and splits"
            problems += [(("data", name), f"data.{name}: {reason}") for name in sorted(given - {"path"})]
        else:
            missing = sorted({"path", "text", "label"} - given)
            problems += [(("task",), f"data.{name}: missing; task {task.name} needs it") for name in missing]
            if task.regression and "bins" in given:
                reason = f"makes classes, but task {task.name} learns a number"
                problems.append((("data", "bins"), f"data.bins: {reason}"))
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


class DraftObjective(Section):
    """What the draft minimises, over the tokens of the continuations."""

    name: Literal["ce", "kl", "reverse_kl", "jsd", "tvd", "lk", "lk_hybrid", "topk_kl"] = Field(
        default="kl",
        description="ce: cross-entropy on the text; the others compare with the target's distribution: KL(p|q), "
        "KL(q|p), Jensen-Shannon, total variation, -log of the acceptance, KL fading into total variation, KL on "
        "the stored data.top_k.",
    )
    beta: float = Field(default=0.5, gt=0, lt=1, description="jsd: weight of KL(p|m); m = beta p + (1 - beta) q.")
    eta: float = Field(default=3.0, gt=0, description="lk_hybrid: how fast KL fades as acceptance grows.")
    selective: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="AdaSPEC: train only on this share of each example's tokens, those whose loss lies most above "
        "the reference's; null: all.",
    )
    reference: str | None = Field(
        default=None, description="AdaSPEC's reference: a draft distilled beforehand (directory or hub id)."
    )


class DraftData(Section):
    """The text the draft learns from: prompts that the target continues, and requests it has served."""

    prompts: str | list[str] | None = Field(
        default=None,
        description="A file (txt, a prompt a line; jsonl, json, csv, tsv, parquet with texts or chat messages; "
        "package:NAME/path), or the prompts themselves.",
    )
    field: str | None = Field(
        default=None, description="Column with the prompts; null: prompt, text, question, instruction or messages."
    )
    chat: bool | None = Field(
        default=None,
        description="Put texts into the target's chat template as a user's turn; null: if it has one.",
    )
    max_prompts: int | None = Field(default=None, ge=1, description="Use only the first so many prompts.")
    max_new_tokens: int = Field(default=128, ge=1, description="Tokens the target writes after a prompt, at most.")
    temperature: float = Field(default=0.0, ge=0, description="Of the target's sampling; 0 is greedy.")
    top_p: float | None = Field(default=None, gt=0, le=1, description="Nucleus of that sampling; null: all.")
    samples: int = Field(
        default=1, ge=1, description="Continuations a prompt; needs a temperature above 0 if 2 or more."
    )
    batch_size: int = Field(default=32, ge=1, description="Prompts the target continues together.")
    held_out: int = Field(
        default=16, ge=1, description="Prompts (the last) or newest requests kept for measuring acceptance."
    )
    on_policy: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Chance that an example's continuation is written anew by the draft (GKD's lambda).",
    )
    top_k: int | None = Field(
        default=None,
        ge=1,
        description="Store the target's k largest probabilities a token and the rest's mass, for topk_kl.",
    )
    replay: str | None = Field(
        default=None,
        description="Served requests to learn from: a file with prompt (or messages) and response.",
    )
    cache: str | None = Field(
        default=None, description="Directory of written data sets; null: draft-data beside output_dir."
    )
    seed: int = Field(default=0, ge=0, le=MOST_SEED, description="Seed of the target's sampling.")

    @model_validator(mode="after")
    def _possible(self) -> DraftData:
        if self.prompts is None and self.replay is None:
            raise ValueError("names neither prompts nor replay; there is nothing to learn from")
        if self.samples > 1 and self.temperature == 0:
            raise ValueError("samples: greedy continuations are all the same; give a temperature above 0")
        if self.top_p is not None and self.temperature == 0:
            raise ValueError("top_p: temperature 0 is greedy and ignores it")
        return self


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
        default_factory=METHODS["lora"].config,
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
"""By task or row, the keys of a finetune recipe that are others there."""


class TableRecipe(Section):
    """Finetune on every task in every way (row) with every seed, and put the scores into one table."""

    kind: Literal["table"] = Field(description="What the recipe makes.")
    model: str = Field(description="Hub id, local directory, GGUF file, or package:NAME/path.")
    revision: str | None = Field(default=None, description="Git revision of a hub model.")
    trust_remote_code: bool = Field(default=False, description="Run Python code that the model repository ships.")
    tasks: list[str] = Field(min_length=1, description="The columns: tasks as a finetune recipe names them.")
    rows: Changes = Field(
        min_length=1,
        description="The rows: name to what is particular to it, {lora: {method: {name: lora}, train: {lr: 5e-4}}}.",
    )
    seeds: list[Annotated[int, Field(ge=0, le=MOST_SEED)]] = Field(
        default=[0], min_length=1, description="Each task and row is run with each of these as train.seed."
    )
    data: DataConfig = Field(default=DataConfig(), description="Where the examples come from.")
    train: TrainConfig = Field(default=TrainConfig(), description="How the loop runs.")
    per_task: Changes = Field(
        default={},
        description="Task to what is particular to it, {glue/rte: {train: {epochs: 80}}}; a row's own keys win.",
    )
    init: dict[str, str] = Field(
        default={},
        description="Task to the task of this table whose result, same row and seed, it starts from.",
    )
    merge: bool = Field(default=False, description="Write merged/ in every cell whose method has a linear fold.")
    output_dir: str = Field(description="Directory of the table; its cells lie below it.")


Recipe = Union[FinetuneRecipe, DraftRecipe, TableRecipe]  # noqa: UP007
"""Any kind of recipe."""

KINDS: dict[str, type[FinetuneRecipe] | type[DraftRecipe] | type[TableRecipe]] = {
    "finetune": FinetuneRecipe,
    "draft": DraftRecipe,
    "table": TableRecipe,
}
"""The kinds of recipe by ``kind:``; a recipe that does not say is the first."""
