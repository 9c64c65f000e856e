"""The ``train`` section of a recipe."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from peftlab.errors import PeftlabError
from peftlab.registry import Section, Seed, as_list

Beta = Annotated[float, Field(ge=0, lt=1)]
Tracker = Literal["tensorboard", "wandb", "trackio"]
Trackers = Annotated[list[Tracker], BeforeValidator(as_list, json_schema_input_type=Tracker | list[Tracker])]


class TrainedLayers(Section):
    """Which layers train."""

    model_config = ConfigDict(validate_by_name=True, validate_by_alias=True)

    from_: int | None = Field(
        default=None,
        ge=0,
        alias="from",
        description="Only the layers from this one on (from 0), task head and modules_to_save; backward ends there.",
    )
    active: int | None = Field(
        default=None,
        ge=1,
        description="Of the layers that train, so many at a time, drawn anew after each period (LISA); what belongs to "
        "no layer trains in every step. null: all.",
    )
    every: int | None = Field(default=None, ge=1, description="With active: steps of a period; null: 20.")

    @model_validator(mode="after")
    def _check_selection(self) -> TrainedLayers:
        if self.from_ is None and self.active is None:
            raise ValueError("give from, active, or both")
        if self.active is None and self.every is not None:
            raise ValueError("every is the length of a period between draws; give active, the layers to draw, too")
        return self

    @property
    def period(self) -> int:
        """Steps between draws."""
        return self.every or 20


class SampledExamples(Section):
    """Which of the training examples are trained on."""

    keep: float = Field(gt=0, lt=1, description="Share of the examples, or of the mini-batches, that is trained on.")
    by: Literal["random", "batches", "least_confidence", "lowest_acceptance"] = Field(
        default="random",
        description="random: in every epoch another share of the examples, drawn at random, the control of the others; "
        "batches: in every epoch another share of its mini-batches (SMD); least_confidence: in rounds, each adds the "
        "examples whose most probable answer has the lowest probability; lowest_acceptance, in draft recipes: those "
        "whose tokens the target would accept least.",
    )
    rounds: int | None = Field(
        default=None,
        ge=2,
        description="least_confidence, lowest_acceptance: times that an equal part of the examples is chosen, the "
        "first at random; null: 4, and 1 with a scorer.",
    )
    scorer: str | None = Field(
        default=None,
        description="least_confidence: a trained model, run or adapter for the same task that scores all examples "
        "once, before training; null: the model in training scores those that are not chosen yet, before each round.",
    )

    @model_validator(mode="after")
    def _check_rounds(self) -> SampledExamples:
        if not self.by_score and self.rounds is not None:
            raise ValueError(f"rounds: {self.by} draws in every epoch and has no rounds; remove it")
        if self.by != "least_confidence" and self.scorer is not None:
            raise ValueError(f"scorer: {self.by} scores no example by a trained model; set by: least_confidence")
        if self.scorer is not None and self.rounds is not None:
            raise ValueError("rounds: a scorer does not change in training and chooses once; remove rounds or scorer")
        return self

    @property
    def by_score(self) -> bool:
        """Whether examples are chosen by a score, in rounds."""
        return self.by in ("least_confidence", "lowest_acceptance")

    @property
    def total_rounds(self) -> int:
        """Rounds in which examples are chosen."""
        return 1 if self.scorer is not None else self.rounds or 4


Bits = Annotated[int, Field(ge=1, le=16)]


class EmulatedHardware(Section):
    """Number formats of the emulated hardware; null: fp32."""

    format: Literal["dorefa", "bfp"] = Field(
        default="dorefa",
        description="dorefa: evenly spaced levels up to the largest value of a tensor, or of an example; bfp: "
        "blocks of neighbours that share an exponent (block floating point).",
    )
    weights: Bits | None = Field(
        default=None, description="Bits of the copy of the linear layers' weights that computes."
    )
    stored: Bits | None = Field(
        default=None, description="Bits of the copy that the optimiser updates; as many as weights: one copy."
    )
    activations: Bits | None = Field(default=None, description="Bits of the linear layers' inputs.")
    gradients: Bits | None = Field(default=None, description="Bits of the gradients of the linear layers' outputs.")
    rounding: Literal["stochastic", "nearest"] = Field(
        default="stochastic", description="How gradients are rounded: at random, exact in the mean, or to the nearest."
    )
    prune: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="Share of the gradients' values that become zero, at random and exact in the mean, as if they were "
        "log-normal.",
    )
    tile: int | None = Field(default=None, ge=1, description="bfp: neighbours that share an exponent; null: 24.")

    @model_validator(mode="after")
    def _check_formats(self) -> EmulatedHardware:
        widths = {name: getattr(self, name) for name in ("weights", "stored", "activations", "gradients")}
        if self.prune is None and not any(widths.values()):
            raise ValueError("give bits of weights, stored, activations or gradients, or prune")
        if self.format == "dorefa" and self.tile is not None:
            raise ValueError("tile: dorefa has no blocks; remove it or set format: bfp")
        few = [name for name, bits in widths.items() if bits == 1 and (self.format == "bfp" or name == "stored")]
        if few:
            raise ValueError(f"{few[0]}: 1 bit leaves no mantissa beside the sign; at least 2")
        return self

    @property
    def neighbours(self) -> int:
        """Values that share an exponent."""
        return self.tile or 24


class TrainConfig(Section):
    """Settings of the training loop."""

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
    packing: bool | None = Field(
        default=None,
        description="text/chat, text/completion, text/plain: examples share rows of max_length tokens, and a step "
        "takes batch_size of them on average; null: on GPUs.",
    )
    eval_batch_size: int = Field(default=64, ge=1, description="Examples per evaluation batch and process.")
    gradient_accumulation_steps: int = Field(
        default=1,
        ge=1,
        le=1024,
        description="Parts each global batch is split into to save memory; the result is the same.",
    )
    max_length: int = Field(default=128, ge=2, description="Tokens an example is truncated to.")
    lr: float | None = Field(default=None, gt=0, description="Peak learning rate; null: the method's own.")
    scheduler: Literal["linear", "cosine", "constant"] = Field(default="linear", description="Decay after warm-up.")
    warmup: float = Field(default=0.06, ge=0, description="Warm-up: share of all steps if below 1, else steps.")
    optimizer: Literal["adamw", "muon"] | None = Field(
        default=None,
        description="muon: matrices of the layers of a draft step along orthogonalised momentum (Muon), with updates "
        "as large as AdamW's, and all else by AdamW; for drafts with modules of their own, which it trains in fewer "
        "steps. null: adamw; for a new dflash draft muon.",
    )
    weight_decay: float = Field(default=0.0, ge=0, description="AdamW's decoupled decay; not on biases and norms.")
    betas: tuple[Beta, Beta] = Field(default=(0.9, 0.999), description="AdamW's betas.")
    eps: float = Field(default=1e-8, gt=0, description="AdamW's epsilon.")
    label_smoothing: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="text/chat, text/completion, text/plain: share of each token's training loss that is the mean "
        "over the vocabulary.",
    )
    class_weights: Literal["balanced"] | dict[str, Annotated[float, Field(ge=0, allow_inf_nan=False)]] | None = Field(
        default=None,
        description="Tasks with classes: by what the loss of a class's examples is multiplied. balanced: so that every "
        "class has the same share, by its training examples; {NAME: weight}: those classes, others 1.",
    )
    max_grad_norm: float | None = Field(default=1.0, gt=0, description="Gradient norm clipping; null for none.")
    precision: Literal["fp32", "tf32", "bf16", "fp16"] = Field(
        default="fp32",
        description="bf16, fp16: mixed precision of the forward; tf32: fp32, with TF32 products on GPUs. With bf16 "
        "Muon's momenta are made orthogonal in bf16, too.",
    )
    compile: bool = Field(
        default=False, description="Compile the model with torch.compile; where that fails, continue without."
    )
    gradient_checkpointing: bool | Literal["selective"] = Field(
        default=False,
        description="Recompute activations in backward. true: each layer keeps its input alone, and a step takes a "
        "third longer; selective: also the results of products with weights and of attention.",
    )
    layers: TrainedLayers | None = Field(
        default=None,
        description="{from: K}: only the layers from K on train; {active: N, every: 20}: N layers at a time, drawn "
        "anew every 20 steps. null: all that the method trains.",
    )
    sample: SampledExamples | None = Field(
        default=None,
        description="{keep: 0.5, by: random|batches|least_confidence|lowest_acceptance}: the share of the examples "
        "that is trained on, and how it is chosen. null: all examples in every epoch.",
    )
    weights: Literal["bf16_stochastic"] | None = Field(
        default=None,
        description="method full on a base in bf16: each step's result is rounded to bf16 at random, so that its mean "
        "is exact, without an fp32 copy of the weights; null: to the nearest.",
    )
    emulate: EmulatedHardware | None = Field(
        default=None,
        description="{weights: 8, activations: 8, gradients: 8, format: dorefa|bfp}: linear layers compute as hardware "
        "of few bits would, slower than without, and are scored so; null: no emulation.",
    )
    eval_every: int | None = Field(default=None, ge=1, description="Steps between evaluations; null: every epoch.")
    eval_before: bool = Field(
        default=True,
        description="Score the model before training where that is the baseline (language models, drafts), and decode "
        "with an untrained draft; costs one evaluation. false: there is no baseline.",
    )
    early_stopping: int | None = Field(
        default=None, ge=1, description="Stop after this many evaluations without a better score."
    )
    save_every: int | None = Field(
        default=None, ge=1, description="Steps between checkpoints besides those at evaluations; null: none."
    )
    keep_checkpoints: int = Field(default=2, ge=1, description="Newest checkpoints kept beside the best one.")
    trackers: Trackers = Field(default=[], description="Trackers beside metrics.jsonl.")
    seed: Seed = Field(default=0, description="Seed of initialisation, data order and dropout.")

    @model_validator(mode="after")
    def _check_max_tokens(self) -> TrainConfig:
        if self.max_tokens is not None and self.max_tokens < self.max_length:
            raise ValueError(f"max_tokens {self.max_tokens} does not fit one example of max_length {self.max_length}")
        return self

    @model_validator(mode="after")
    def _check_compile(self) -> TrainConfig:
        if self.compile and self.layers is not None and self.layers.active is not None:
            raise ValueError("compile makes one graph, and with layers.active every draw is another; set one of them")
        return self

    @model_validator(mode="after")
    def _check_emulation(self) -> TrainConfig:
        if self.emulate is not None and (self.compile or self.precision != "fp32"):
            key = "compile" if self.compile else f"precision {self.precision}"
            raise ValueError(f"emulate computes few bits in fp32, step by step; remove {key}")
        return self

    @property
    def peak_lr(self) -> float:
        """``lr``; a recipe without one has its method's.

        Raises:
            PeftlabError: it is null, and the section belongs to no recipe.
        """
        if self.lr is None:
            raise PeftlabError("train.lr: missing; only a recipe, which names a method, has a default")
        return self.lr
