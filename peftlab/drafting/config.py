"""The sections of draft recipes: what all share, and one for each kind of draft."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from peftlab.decoding.table import CHAIN, NamedRule, Window
from peftlab.decoding.theory import FEATURE_TREE, REDUCED, DraftCost, TargetWeights
from peftlab.methods.config import METHODS, MethodConfig
from peftlab.models.config import MergeConfig, PlainDtype
from peftlab.registry import Section, Seed, Texts


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
        description="AdaSPEC: train only on this share of each example's tokens, those whose loss is furthest above "
        "the reference's; null: all.",
    )
    reference: str | None = Field(
        default=None, description="AdaSPEC's reference: a draft distilled beforehand (directory or hub id)."
    )


class DraftData(Section):
    """The text the draft learns from: prompts that the target continues, and requests it has served."""

    prompts: str | list[str] | None = Field(
        default=None,
        description="A file (txt, one prompt per line; jsonl, json, csv, tsv, parquet with texts or chat messages, for "
        "a target that sees with images; package:NAME/path), or the prompts themselves.",
    )
    targets: Texts | None = Field(
        default=None,
        min_length=1,
        description="Further targets of the one draft (S2D), models with the target's tokenizer: each continues the "
        "prompts, and its distribution is what the draft learns there. null: none.",
    )
    field: str | None = Field(
        default=None,
        description="Column with the prompts, or a text with columns in braces, 'Where is {city}?'; null: prompt, "
        "text, question, instruction (and input), messages, turns or prompt_ids.",
    )
    chat: bool | None = Field(
        default=None,
        description="Put texts into the target's chat template as a user's turn; null: if it has one.",
    )
    max_prompts: int | None = Field(default=None, ge=1, description="Use only the first N prompts.")
    max_new_tokens: int = Field(default=128, ge=1, description="Tokens the target writes after a prompt, at most.")
    temperature: float = Field(default=0.0, ge=0, description="Of the target's sampling; 0 is greedy.")
    top_p: float | None = Field(default=None, gt=0, le=1, description="Nucleus of that sampling; null: all.")
    samples: int = Field(
        default=1, ge=1, description="Continuations per prompt; needs a temperature above 0 if 2 or more."
    )
    batch_size: int = Field(default=32, ge=1, description="Prompts the target continues together.")
    held_out: int = Field(
        default=16, ge=1, description="Prompts (the last) or newest requests kept for measuring acceptance."
    )
    max_train_examples: int | None = Field(
        default=None,
        ge=1,
        description="Train on only this many of the examples, drawn with seed; the held-out ones stay the same.",
    )
    on_policy: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Probability that an example's continuation is replaced by one of the draft's (GKD's lambda).",
    )
    top_k: int | None = Field(
        default=None,
        ge=1,
        description="Store the target's k largest probabilities per token and the mass of the rest, for topk_kl.",
    )
    replay: str | None = Field(
        default=None,
        description="Served requests to learn from: a file with prompt (or messages) and response.",
    )
    cache: str | None = Field(
        default=None, description="Directory of written data sets; null: draft-data beside output_dir."
    )
    seed: Seed = Field(default=0, description="Seed of the target's sampling and of max_train_examples.")
    endpoint: str | None = Field(
        default=None,
        description="An OpenAI-compatible server that serves the target and writes the text, http://HOST:PORT/v1; "
        "null: the target writes here, data.batch_size prompts together.",
    )
    endpoint_model: str | None = Field(
        default=None, description="The target's id at the endpoint; null: the only one that its /models lists."
    )
    endpoint_key: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z_]\w*$",
        description="Environment variable that contains the endpoint's key; null: no key is sent.",
    )
    concurrency: int = Field(default=16, ge=1, le=1024, description="Requests that the endpoint answers together.")
    requests_per_minute: float | None = Field(
        default=None, gt=0, description="Most requests sent to the endpoint per minute; null: no limit."
    )
    tokens_per_minute: float | None = Field(
        default=None,
        gt=0,
        description="Most tokens per minute, those of a prompt and data.max_new_tokens for each; null: no limit.",
    )

    @field_validator("endpoint")
    @classmethod
    def _address(cls, url: str | None) -> str | None:
        if url is None:
            return None
        try:
            parts = urlsplit(url)
            named = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:  # a port that is no number, a bracket without its other half
            named = False
        if not named or not url.isascii() or not url.isprintable() or " " in url:
            raise ValueError("must be the address of a server, http://HOST:PORT/v1")
        if "@" in parts.netloc or parts.query or parts.fragment:  # recipes are written to disk
            raise ValueError("must not contain a key; put it into an environment variable that data.endpoint_key names")
        return url.rstrip("/")

    @model_validator(mode="after")
    def _possible(self) -> DraftData:
        if self.prompts is None and self.replay is None:
            raise ValueError("names neither prompts nor replay; there is nothing to learn from")
        if self.samples > 1 and self.temperature == 0:
            raise ValueError("samples: greedy continuations are all the same; give a temperature above 0")
        if self.top_p is not None and self.temperature == 0:
            raise ValueError("top_p: temperature 0 is greedy and ignores it")
        if self.endpoint is not None and self.prompts is None:
            raise ValueError("endpoint: continues data.prompts, and there are none")
        return self


@dataclass(frozen=True)
class RecipeKeys:
    """The keys of a draft recipe that a draft's section is checked against; named as there."""

    method: MethodConfig | None
    objective: DraftObjective
    data: DraftData
    merge: bool | MergeConfig | None
    acceptance_head: bool
    policy: NamedRule
    draft_window: Window | None
    gamma: int


class DraftConfig(Section):
    """Base of the kinds' sections, distinguished by ``kind`` in a recipe's ``draft``."""

    model_config = ConfigDict(validate_by_name=True, validate_by_alias=True)  # ``from`` is no name in Python

    kind: str
    usual_method: ClassVar[str | None] = "lora"
    """The method of a recipe that names none; None: nothing is put into the model."""
    usual_optimizer: ClassVar[Literal["adamw", "muon"]] = "adamw"
    """What ``train.optimizer`` null is where no method trains."""
    language_model: ClassVar[bool] = True
    """Whether a method is injected into a language model, target or draft, so that a run can write ``merged/``."""
    several_targets: ClassVar[bool] = False
    """Whether one draft can be trained for several targets: it reads no states of theirs."""
    reads_images: ClassVar[bool] = False
    """Whether prompts may have images."""

    @property
    def estimates_acceptance(self) -> bool:
        """Whether the draft has a head of its own for policy head."""
        return False

    def needs_pair(self, recipe: RecipeKeys, who: str, model: str) -> Iterator[tuple[str, str]]:
        """Yield the keys of a recipe that only a draft that is a model beside its target trains with, and why.

        Args:
            recipe: its keys. who: what trains without them. model: why there is no such model; both for messages.
        """
        objective = recipe.objective
        if objective.name == "topk_kl" or objective.selective is not None or recipe.data.on_policy:
            yield "objective", f"{who} without topk_kl, selective and on_policy"
        if recipe.acceptance_head:
            yield "acceptance_head", f"reads a draft model's states; {model}"

    @classmethod
    def costs(cls, target: TargetWeights) -> list[DraftCost]:
        """Return the sizes that ``draft plan`` compares; none by default."""
        return []

    def problems(self, recipe: RecipeKeys) -> Iterator[tuple[str, str]]:
        """Yield each key of the recipe that does not go with this draft, and why."""
        if recipe.method is None:
            yield "method", f"null, and draft kind {self.kind} has no parameters of its own to train; name a method"


_STARTS = (
    "from: REF, truncate: {layers: [...]} or {keep: N, by: gates}, prune: {ffn: 0.4} and new: {layers: N, width: H}"
)


class Truncation(Section):
    """Some of the target's own layers, named or chosen by gates."""

    layers: list[int] | None = Field(default=None, min_length=1, description="Their numbers from 0, rising.")
    keep: int | None = Field(default=None, ge=1, description="How many to keep; which, is chosen.")
    by: Literal["gates"] | None = Field(
        default=None,
        description="gates: a gate for each layer trains on the target's text, the target frozen, under a price on "
        "open gates that ends where keep of them are open.",
    )
    steps: int | None = Field(default=None, ge=1, description="With keep: batches that the gates train on; null: 100.")

    @model_validator(mode="after")
    def _check_one_choice(self) -> Truncation:
        if (self.layers is None) == (self.keep is None):
            raise ValueError("give either layers, a list, or keep, how many, with by: gates")
        if self.keep is not None and self.by is None:
            raise ValueError("keep needs a way to choose the layers: by: gates")
        if self.layers is not None and (self.by is not None or self.steps is not None):
            raise ValueError("by and steps are for keep; the layers are named")
        return self

    @property
    def batches(self) -> int:
        """Batches that the gates train on."""
        return self.steps or 100


class Pruning(Section):
    """The target with fewer heads and feed-forward units in every layer, chosen by early-bird search."""

    ffn: float = Field(default=0.0, ge=0, lt=1, description="Share of each layer's feed-forward units that is removed.")
    kv_groups: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Share of each layer's key-value heads that is removed, with the query heads that read them.",
    )
    rounds: int = Field(default=1, ge=1, description="Searches one after the other, each for a part of the share.")
    rewind: bool = Field(
        default=True, description="Start the draft from the target's weights, not from those trained in the search."
    )
    steps: int = Field(default=200, ge=1, description="Batches of a search at most.")
    distance: float = Field(
        default=0.1, gt=0, lt=1, description="A search ends once the last five masks differ in less than this share."
    )

    @model_validator(mode="after")
    def _check_not_empty(self) -> Pruning:
        if not self.ffn and not self.kv_groups:
            raise ValueError("removes nothing; give ffn, kv_groups or both a share above 0")
        return self

    def shares(self) -> dict[str, float]:
        """Return the share that is removed of each part, by its key."""
        return {"ffn": self.ffn, "kv_groups": self.kv_groups}


class NewModel(Section):
    """The sizes of a model with random weights; its other settings are derived from the target's."""

    layers: int = Field(ge=1, description="How many layers.")
    width: int = Field(ge=1, description="Numbers of a hidden state.")


class ModelDraft(DraftConfig):
    """A second, smaller language model over the target's tokens."""

    several_targets: ClassVar[bool] = True

    kind: Literal["model"] = "model"
    from_: str | None = Field(
        default=None, alias="from", description="The model to start from, a reference like target's."
    )
    truncate: Truncation | None = Field(
        default=None,
        description="{layers: [...]}: start from these of the target's layers (from 0, rising), with its embeddings, "
        "final norm and LM head. {keep: N, by: gates}: from N of them, chosen on the target's text in steps (100) "
        "batches.",
    )
    prune: Pruning | None = Field(
        default=None,
        description="{ffn: 0.4, kv_groups: 0.33}: start from the target with these shares of each layer's feed-forward "
        "units and key-value heads removed, chosen by a search on the target's text: rounds (1), each of at most steps "
        "(200) batches, ended once masks differ in less than distance (0.1); rewind (true): from the target's weights.",
    )
    new: NewModel | None = Field(
        default=None,
        description="{layers: N, width: H}: start from random weights in a small model of the target's family, over "
        "its tokens; with method: full. H is a multiple of the target's head size, or of one that is a multiple of 8.",
    )
    dtype: PlainDtype = Field(
        default="fp32", description="Of its weights in memory; what trains beside them is in fp32."
    )
    vocabulary: int | None = Field(
        default=None,
        ge=1,
        description="Draft N tokens only, the most frequent of the target's text; the map is stored beside the merged "
        "weights and the ceiling p(V_d) reported. null: all.",
    )

    @model_validator(mode="after")
    def _check_one_start(self) -> ModelDraft:
        if self.starts != 1:
            raise ValueError(f"needs exactly one of {_STARTS}")
        return self

    @property
    def starts(self) -> int:
        """Number of models to start from that the recipe names."""
        return sum(start is not None for start in (self.from_, self.truncate, self.prune, self.new))

    @property
    def searched(self) -> bool:
        """Whether what the draft consists of is found on the target's text."""
        return self.prune is not None or (self.truncate is not None and self.truncate.layers is None)

    def problems(self, recipe: RecipeKeys) -> Iterator[tuple[str, str]]:
        yield from super().problems(recipe)
        if self.new is not None and recipe.method is not None and recipe.method.name != "full":
            reason = "leaves random weights as they are, and a new draft has no others; write method: full"
            yield "method", f"{recipe.method.name} {reason}"
        if self.vocabulary is not None and recipe.merge is False:
            yield "draft.vocabulary", "is stored beside the merged weights; remove merge: false"

    @classmethod
    def costs(cls, target: TargetWeights) -> list[DraftCost]:
        """Return what drafts of some of the target's layers cost, and a new one of an eighth at half the width."""
        found = []
        for layers in sorted({max(1, target.layers // 8), max(1, target.layers // 4)}):
            for rows in sorted({target.vocabulary, min(target.vocabulary, REDUCED)}, reverse=True):
                kept = f"truncate: {{layers: {list(range(layers))}}}"
                found.append(_model_cost(target, _layers_of(layers), kept, layers * target.layer, target.hidden, rows))
        layers, width = max(1, target.layers // 8), target.hidden // 2
        if width:
            size, made = f"new, {_layers_of(layers)} of {width}", f"new: {{layers: {layers}, width: {width}}}"
            body = layers * target.layer * (width / target.hidden) ** 2
            found.append(_model_cost(target, size, made, body, width, min(target.vocabulary, REDUCED)))
        return found


def _layers_of(count: int) -> str:
    return f"{count} layer{'s' * (count > 1)}"


def _reduced(target: TargetWeights, recipe: str) -> tuple[int, str]:
    """Return the rows of the LM head of a draft for at most ``REDUCED`` tokens, and the recipe that makes it."""
    rows = min(target.vocabulary, REDUCED)
    return rows, recipe + (f", vocabulary: {rows}" if rows < target.vocabulary else "")


def _model_cost(target: TargetWeights, size: str, start: str, body: float, width: int, rows: int) -> DraftCost:
    """Return the cost of a draft with ``body`` numbers in its layers and ``rows`` of ``width`` in its LM head."""
    less = rows < target.vocabulary
    each = (body + rows * width) / target.total
    recipe = f"kind: model, {start}" + (f", vocabulary: {rows}" if less else "")
    return DraftCost("model", size + (f", {rows}" if less else ""), recipe, 0.0, each)


class PardDraft(ModelDraft):
    """A smaller language model that writes K tokens in one pass, reading masks in their place (arXiv 2504.18583)."""

    several_targets: ClassVar[bool] = False
    kind: Literal["pard"] = "pard"  # type: ignore[assignment]
    tokens: int = Field(default=8, ge=1, description="K: tokens that one pass writes.")
    mask_token: int | None = Field(
        default=None,
        ge=0,
        description="Token id that stands for a token to be written; null: that of the draft that from names, else the "
        "highest id that the training text does not contain.",
    )
    retain: float = Field(
        default=0.7,
        gt=0,
        le=1,
        description="Share r of an example's tokens at which i masks are trained: r^i, drawn anew in every step.",
    )
    retain_least: float = Field(default=0.2, gt=0, le=1, description="The least such share.")

    @model_validator(mode="after")
    def _check_one_start(self) -> PardDraft:
        if self.starts:  # else an eighth of the target's layers
            super()._check_one_start()  # type: ignore[operator]  # a method, which pydantic's annotation does not say
        return self

    def problems(self, recipe: RecipeKeys) -> Iterator[tuple[str, str]]:
        yield from super().problems(recipe)
        objective = recipe.objective
        if objective.name == "topk_kl" or objective.selective is not None:
            yield "objective", "pard trains without topk_kl and selective"
        if recipe.acceptance_head:
            yield "acceptance_head", "reads the states of a model that drafts token by token; pard does not"
        if recipe.policy.row.needs not in ("", CHAIN):
            yield "policy", f"{recipe.policy.text}: needs a draft that draws token by token; pard writes all at once"
        if recipe.draft_window is not None:
            yield "draft_window", "limits a draft that draws token by token; pard writes all at once"
        if recipe.merge is False:
            yield "merge", "a pard draft is its merged weights, which name the mask; remove merge: false"
        if recipe.gamma > self.tokens:
            more = f"write draft.tokens: {recipe.gamma}"
            yield "gamma", f"{recipe.gamma}, but a pass writes {self.tokens} tokens; {more}"

    @classmethod
    def costs(cls, target: TargetWeights) -> list[DraftCost]:
        """Return what a draft of an eighth of the target's layers costs: one pass, as over one token, for any depth."""
        layers, (rows, recipe) = eighth_of_layers(target.layers), _reduced(target, "kind: pard")
        once = (layers * target.layer + rows * target.hidden) / target.total
        return [DraftCost("pard", _layers_of(layers), recipe, once, 0.0, 8, tree=True, width=4)]


def eighth_of_layers(layers: int) -> int:
    """Return an eighth of a number of layers, rounded up."""
    return -(-layers // 8)


class HeadsConfig(DraftConfig):
    """Base of the sections of heads on the target's last hidden state."""

    usual_method: ClassVar[str | None] = None
    from_: str | None = Field(
        default=None, alias="from", description="A run or directory of such heads to continue from; null: new ones."
    )
    heads: int = Field(default=4, ge=1, description="K: head i (from 0) predicts the token i + 2 positions ahead.")
    shared_head: bool = Field(
        default=False,
        description="Every head uses the target's own LM head, which stays frozen (multi-token "
        "prediction); false: each trains a copy W2.",
    )
    decay: float = Field(default=0.8, gt=0, le=1, description="Head i's loss is weighted decay^i.")
    preserve: float = Field(
        default=5.0,
        ge=0,
        description="Medusa-2, where the recipe's method trains the target too: weight of KL(base | trained model), "
        "which keeps the model what it was (5 is the paper's 1 : 0.2).",
    )
    vocabulary: int | None = Field(
        default=None,
        ge=1,
        description="Draft N tokens only, the most frequent of the target's text: the heads are written without the "
        "other rows, and the ceiling p(V_d) is reported. null: all.",
    )

    def problems(self, recipe: RecipeKeys) -> Iterator[tuple[str, str]]:
        yield from self.needs_pair(recipe, "heads train", "there is none with heads")
        if recipe.policy.row.needs:
            yield "policy", f"{recipe.policy.text}: chooses the length of a chain, and heads draft trees"
        if recipe.draft_window is not None:
            yield "draft_window", "limits the cache of a draft; heads have none"
        if recipe.method is None and recipe.merge:
            yield "merge", "method: null leaves the target as it is; there is nothing to merge"


class MedusaDraft(HeadsConfig):
    """K heads on the target's last hidden state, each guessing one token further ahead (arXiv 2401.10774)."""

    kind: Literal["medusa"] = "medusa"
    bias: bool = Field(default=False, description="Whether each head's inner map W1 has a bias.")
    markov: int | None = Field(
        default=None,
        ge=1,
        description="Rank of a bias W2 W1[x] on the heads' logits, x the token drafted before; it trains with the "
        "heads. null: heads do not see each other's choices.",
    )

    @classmethod
    def costs(cls, target: TargetWeights) -> list[DraftCost]:
        """Return what four heads on one LM head cost, without and with a Markov bias."""
        heads, rank = 4, 64
        rows, recipe = _reduced(target, f"kind: medusa, heads: {heads}, shared_head: true")
        once = (heads * target.hidden**2 + rows * target.hidden) / target.total
        bias = rank * rows / target.total
        return [
            DraftCost("medusa", f"{heads} heads", recipe, once, 0.0, heads, tree=True),
            DraftCost("medusa", f"{heads} heads, Markov", f"{recipe}, markov: {rank}", once, bias, heads, tree=True),
        ]


class HydraDraft(HeadsConfig):
    """K heads on the target's last hidden state that also read the tokens drafted before (arXiv 2402.05109)."""

    kind: Literal["hydra"] = "hydra"

    @classmethod
    def costs(cls, target: TargetWeights) -> list[DraftCost]:
        """Return what three heads on one LM head cost: by level, two maps of all that a head reads, and the LM head.

        Embeddings count as wide as states.
        """
        heads = 3
        rows, recipe = _reduced(target, f"kind: hydra, heads: {heads}, shared_head: true")
        maps = sum(2 * (i + 2) * target.hidden**2 for i in range(heads)) / heads
        each = (maps + rows * target.hidden) / target.total
        return [DraftCost("hydra", f"{heads} heads", recipe, 0.0, each, heads, tree=True)]


class EarlyExitDraft(DraftConfig):
    """The target itself, trained so that its first layers predict what the whole model does (LayerSkip)."""

    kind: Literal["early_exit"] = "early_exit"
    exits: list[Annotated[int, Field(ge=1)]] = Field(
        min_length=1,
        description="[k, ...], rising: exits after the first k layers, through the final norm and the LM head. The "
        "merged model is target and draft at once; the first exit drafts, and --draft exit:K chooses another.",
    )
    scale: float | None = Field(
        default=None,
        gt=0,
        description="LayerSkip's e_scale: an exit after k of L layers weighs scale (0 + ... + k-1), the whole model "
        "L-1 + scale (0 + ... + L-2), in the loss as shares of their sum; null: all weigh the same.",
    )
    curriculum: Literal["rotational", "gradual"] | None = Field(
        default=None,
        description="rotational: every R-th exit trains, in the next step those after them; gradual: the exits join "
        "one by one in the first half of the steps, the last one first; null: all train in every step.",
    )
    every: int = Field(default=2, ge=2, description="rotational: R.")
    dropout: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Layer dropout: layer l of L is left out for a row with probability dropout (2^(l/(L-1)) - 1), "
        "from the third step on.",
    )
    dropout_schedule: Literal["constant", "exponential"] = Field(
        default="constant",
        description="constant: the same in all steps; exponential: times 2^(t/(T-1)) - 1 in step t of T.",
    )

    def problems(self, recipe: RecipeKeys) -> Iterator[tuple[str, str]]:
        yield from super().problems(recipe)
        if self.exits != sorted(set(self.exits)):
            yield "draft.exits", f"{self.exits} is not a rising list of different numbers"
        if self.scale is not None and self.exits[0] == 1:
            yield "draft.scale", "an exit after one layer would weigh nothing; remove the exit or the scale"
        if self.curriculum == "rotational" and self.every > len(self.exits):
            yield "draft.every", f"{self.every} of {len(self.exits)} exits: some steps would train none"
        yield from self.needs_pair(recipe, "an early exit trains", "there is none with an early exit")
        if recipe.draft_window is not None:
            yield "draft_window", "limits the cache of a draft; an early exit drafts in the target's"

    @classmethod
    def costs(cls, target: TargetWeights) -> list[DraftCost]:
        """Return what an exit after an eighth of the layers costs."""
        exit_ = max(1, target.layers // 8)
        each = (exit_ * target.layer + target.vocabulary * target.hidden) / target.total
        return [DraftCost("early_exit", f"exit {exit_}", f"kind: early_exit, exits: [{exit_}]", 0.0, each)]


class GatedLoraDraft(DraftConfig):
    """A LoRA on the target that acts on masks alone, which predict several tokens in one pass (arXiv 2609.04010)."""

    kind: Literal["gated_lora"] = "gated_lora"
    language_model: ClassVar[bool] = False
    blocks: list[Annotated[int, Field(ge=2)]] = Field(
        default=[2, 4],
        min_length=1,
        description="Tokens of a block, rising: the target's own next one, and one for each mask behind it. Each "
        "number trains for an equal share of the steps; the last one drafts.",
    )
    mask_token: int | None = Field(
        default=None,
        ge=0,
        description="Token id that masks read; null: that of the draft that from names, else the highest id that the "
        "training text does not contain.",
    )
    noise: bool = Field(
        default=False,
        description="Masks read token ids drawn uniformly in place of mask_token, as Uno trains and SGLang serves.",
    )
    from_: str | None = Field(
        default=None, alias="from", description="A run or directory of such a draft to continue from; null: a new one."
    )

    def problems(self, recipe: RecipeKeys) -> Iterator[tuple[str, str]]:
        yield from super().problems(recipe)
        if self.blocks != sorted(set(self.blocks)):
            yield "draft.blocks", f"{self.blocks} is not a rising list of different numbers"
        elif recipe.gamma > self.blocks[-1]:
            more = f"end draft.blocks with {recipe.gamma}"
            yield "gamma", f"{recipe.gamma}, but the longest block has {self.blocks[-1]} tokens; {more}"
        if self.noise and self.mask_token is not None:
            yield "draft.mask_token", "with noise: true masks have no id of their own; remove one of them"
        if recipe.method is not None and recipe.method.name != "lora":
            yield "method", f"{recipe.method.name}: gated_lora trains by lora, which can act on some rows alone"
        objective = recipe.objective
        if objective.name == "topk_kl" or objective.selective is not None or recipe.data.on_policy:
            yield "objective", "gated_lora trains without topk_kl, selective and on_policy"
        if recipe.acceptance_head:
            yield "acceptance_head", "reads the states of a model that drafts token by token; gated_lora does not"
        if recipe.policy.row.needs not in ("", CHAIN):
            yield "policy", f"{recipe.policy.text}: needs a draft that draws token by token; masks predict all at once"
        if recipe.draft_window is not None:
            yield "draft_window", "limits the cache of a draft; gated_lora drafts in the target's"
        if recipe.merge:
            yield "merge", "the LoRA acts on masks alone, and the target stays as it is; there is nothing to merge"

    @classmethod
    def costs(cls, target: TargetWeights) -> list[DraftCost]:
        """Return what masks cost in a pass of their own, a target step over as many tokens, and in the verification."""
        return [
            DraftCost("gated_lora", "two passes", "kind: gated_lora, blocks: [2, 4, 8]", 0.0, 0.0, 8, passes=2),
            DraftCost("gated_lora", "one pass", "kind: gated_lora", 0.0, 0.0, 3, passes=1),
        ]


def _check_rising(layers: list[int]) -> list[int]:
    if min(layers) < 0 or layers != sorted(set(layers)):
        near = sorted({layer for layer in layers if layer >= 0}) or [0]
        raise ValueError(f"must be layer numbers from 0, rising, such as {near}")
    return layers


StateLayers = Annotated[list[int], Field(min_length=1), AfterValidator(_check_rising)]


ImageTokens = Annotated[int | None, Field(ge=0)]
_IMAGE_TOKENS = (
    "For a target that sees: how many tokens of each image the draft reads. N: the means of the target's states in N "
    "equal parts of the image, a compressed prefix; 0: none, the draft attends to text alone, whose states the target "
    "made with the image; null: all."
)


class StateConfig(DraftConfig):
    """Base of the sections of networks on the target's states."""

    usual_method: ClassVar[str | None] = None
    language_model: ClassVar[bool] = False
    vocabulary: int | None = Field(
        default=8192,
        ge=1,
        description="Draft N tokens only, the most frequent of the target's text, and report the ceiling p(V_d). null, "
        "or as many as the target has: all.",
    )
    store_gb: float | None = Field(
        default=None,
        gt=0,
        description="Compute the target's states of the training text once, keep them in bf16 beside the text "
        "(data.cache), in at most this many GB, and read them in every step; null: compute them anew in every step.",
    )
    from_: str | None = Field(
        default=None, alias="from", description="A run or directory of such a draft to continue from; null: a new one."
    )

    def problems(self, recipe: RecipeKeys) -> Iterator[tuple[str, str]]:
        yield from self.needs_pair(recipe, f"{self.kind} trains", f"{self.kind} is not a model of its own")
        if recipe.method is not None and self.from_ is None:
            what = f"a new {self.kind} layer trains whole"
            yield "method", f"{what}; write method: null, or tune a trained layer: draft.from"
        elif recipe.method is not None and not METHODS[recipe.method.name].folds:
            yield "method", f"{recipe.method.name} has no linear fold, and an {self.kind} layer is stored folded"
        if recipe.merge:
            reason = "leaves the target as it is and stores its layer folded; there is nothing to merge"
            yield "merge", f"{self.kind} {reason}"

    @property
    @abstractmethod
    def drafted(self) -> int:
        """Tokens that the network is trained to draft in a step."""


class UnrolledConfig(StateConfig):
    """Base of the sections of layers that draft token by token, each from their own state."""

    steps: int = Field(
        default=3,
        ge=1,
        description="Tokens that each position drafts in training, one after the other, on its own states "
        "(training-time test).",
    )
    decay: float = Field(default=1.0, gt=0, le=1, description="The loss of step k (from 0) is weighted decay^k.")

    @property
    def drafted(self) -> int:
        """Tokens that each position drafts in training."""
        return self.steps


class Eagle3Draft(UnrolledConfig):
    """One decoder layer that reads three of the target's states and the next token (EAGLE-3, arXiv 2503.01840)."""

    reads_images: ClassVar[bool] = True
    kind: Literal["eagle3"] = "eagle3"
    regression: float = Field(
        default=0.0,
        ge=0,
        description="Weight of the SmoothL1 distance between what the LM head reads of the layer and of the target, "
        "beside the objective. EAGLE-1's loss on its one feature: features: [L], steps: 1, regression: 10.",
    )
    features: StateLayers | None = Field(
        default=None,
        description="Layers of the target, from 0 and rising, whose entering states are read, L for the state that the "
        "LM head reads; null: 2, L/2 and L - 3.",
    )
    norm_before_residual: bool | None = Field(
        default=None,
        description="EAGLE 3.1: the residual of the layer is the normed state. For these four, null is false, or what "
        "a layer that `from` names has.",
    )
    norm_before_fc: bool | None = Field(default=None, description="The target's states are normed together before fc.")
    fc_norm: bool | None = Field(default=None, description="Each of the target's states is normed before fc.")
    norm_output: bool | None = Field(
        default=None, description="The next step reads the output after the final norm, as the LM head does."
    )
    image_tokens: ImageTokens = Field(default=None, description=_IMAGE_TOKENS)

    @model_validator(mode="after")
    def _one_norm_before_fc(self) -> Eagle3Draft:
        if self.norm_before_fc and self.fc_norm:
            raise ValueError("norm_before_fc and fc_norm exclude each other")
        return self

    def problems(self, recipe: RecipeKeys) -> Iterator[tuple[str, str]]:
        yield from super().problems(recipe)
        if recipe.draft_window is not None and self.image_tokens is not None:
            yield "draft_window", "does not go with draft.image_tokens, which counts other places; remove one of them"

    @classmethod
    def costs(cls, target: TargetWeights) -> list[DraftCost]:
        """Return what a layer over [embedding; feature] costs: q, k and v twice as wide, and a reduced head.

        The fusion of the target's states is read once per step. Each level reads the layer and the head once, whether
        it is one link of a chain or several nodes of a tree.
        """
        return [layer_cost("eagle3", target, once=3 * target.hidden**2 / target.total)]


def layer_cost(kind: str, target: TargetWeights, once: float = 0.0) -> DraftCost:
    """Return the cost of a layer, the map of embedding and state into it and a reduced head at each level.

    The map's 2H² weights are as many as queries, keys and values of twice the width add to a layer.

    Args:
        kind: name of the kind. target: sizes. once: what is read once in a step, as a share of the target.
    """
    rows, recipe = _reduced(target, f"kind: {kind}")
    each = (target.layer + 2 * target.hidden**2 + rows * target.hidden) / target.total
    return DraftCost(kind, "1 layer", recipe, once, each, tree=True, width=FEATURE_TREE)


OWN_LAYER = "target"
"""``from`` of an mtp draft that is the layer in the target's checkpoint."""
STITCHED = "stitched"
"""Such a layer in a copy of the target, as ``draft export --for`` names it."""


class MtpDraft(UnrolledConfig):
    """One transformer layer on the target's last state, used for every drafted token (FastMTP, arXiv 2509.18362)."""

    kind: Literal["mtp"] = "mtp"
    decay: float = Field(default=0.6, gt=0, le=1, description="The loss of step k (from 0) is weighted decay^k.")
    vocabulary: int | None = Field(
        default=8192,
        ge=1,
        description="Draft N tokens only, the most frequent of the target's text, and report the ceiling p(V_d). null, "
        "or as many as the target has: all, which is the default of from: target.",
    )
    from_: str | None = Field(
        default=None,
        alias="from",
        description="target: the layer for multi-token prediction in the target's own checkpoint (Qwen3-Next, Qwen3.5, "
        "GLM-4.5, DeepSeek-V3). Else a run or directory of an mtp draft to continue from; null: a new one.",
    )

    @model_validator(mode="before")
    @classmethod
    def _whole_vocabulary(cls, values: object) -> object:
        if isinstance(values, dict) and OWN_LAYER in (values.get("from"), values.get("from_")):
            return {"vocabulary": None} | values  # as engines draft with it
        return values

    @classmethod
    def costs(cls, target: TargetWeights) -> list[DraftCost]:
        """Return what a layer, the map into it, and a reduced head cost; each level reads them once."""
        return [layer_cost("mtp", target)]


class Markov(Section):
    """A bias on the logits of a token by the token before it, as a product of two matrices (DSpark's Markov head)."""

    rank: int = Field(ge=1, description="r of the bias W2 f(W1[x]), x the token before.")
    head: Literal["vanilla", "gated", "rnn"] = Field(
        default="vanilla",
        description="f: vanilla is W1[x] itself; gated multiplies it by a gate that reads the state, too; rnn "
        "continues a state of its own over the tokens of the block.",
    )


def _rank_alone(value: object) -> object:
    """Return the keys of a Markov head of which the rank alone is given."""
    if type(value) is int and value >= 1:
        return {"rank": value}
    if isinstance(value, dict | Markov):
        return value
    raise ValueError("must be a rank from 1, such as 64, or {rank: 64, head: vanilla|gated|rnn}")


MarkovOrRank = Annotated[
    Markov, BeforeValidator(_rank_alone, json_schema_input_type=Annotated[int, Field(ge=1)] | Markov)
]


class DflashDraft(StateConfig):
    """A few layers that draft a block of tokens in one pass, over keys and values of the target's states (DFlash).

    arXiv 2602.06036; with ``markov`` DSpark, arXiv 2607.05147.
    """

    usual_optimizer: ClassVar[Literal["adamw", "muon"]] = "muon"
    reads_images: ClassVar[bool] = True
    kind: Literal["dflash"] = "dflash"
    block_size: int = Field(
        default=8,
        ge=2,
        description="B: rows of a pass, the last token and B - 1 masks. The masks draft B - 1 tokens; with markov all "
        "rows draft, B tokens.",
    )
    layers: int = Field(default=2, ge=1, description="Layers of the draft.")
    features: StateLayers | None = Field(
        default=None,
        description="Layers of the target, from 0 and rising, whose entering states are read, L for the state that the "
        "LM head reads; null: 2, L/2 and L - 3.",
    )
    window: int | None = Field(
        default=None,
        ge=2,
        description="Sliding-window attention: a row sees this many tokens up to itself, and no later row of its "
        "block; null: a row sees all tokens before the block, and its whole block.",
    )
    mask_token: int | None = Field(
        default=None,
        ge=0,
        description="Token id whose embedding masks read, one that the tokenizer writes for no text; null: that of the "
        "draft that from names, else the tokenizer's mask, else the highest id without text, else the highest one that "
        "the training text does not contain.",
    )
    anchors: int = Field(
        default=16, ge=1, description="Blocks of each text that train in a step, at places drawn anew, at most."
    )
    decay: float = Field(
        default=0.8,
        gt=0,
        le=1,
        description="The loss of a block's k-th token (from 1) is weighted decay^(k-1); e^(-1/4) is 0.78.",
    )
    dpace: float | None = Field(
        default=None,
        ge=0,
        lt=1,
        description="D-PACE (arXiv 2605.18810) with this alpha, in place of decay: a token weighs what the expected "
        "accepted length owes to it, by the draft's own probabilities; the paper has 0.5.",
    )
    markov: MarkovOrRank | None = Field(
        default=None,
        description="DSpark: a bias on each token's logits by the token drafted before it, of this rank, or {rank: r, "
        "head: vanilla|gated|rnn}; null: the tokens of a block do not see each other.",
    )
    confidence: bool = Field(
        default=False,
        description="DSpark: a head that estimates the probability that a token is accepted, for policy head; its "
        "calibration on held-out text is reported. With markov.",
    )
    image_tokens: ImageTokens = Field(default=None, description=_IMAGE_TOKENS)

    @property
    def drafted(self) -> int:
        """Tokens that a pass drafts."""
        return self.block_size - (self.markov is None)

    @property
    def estimates_acceptance(self) -> bool:
        """Whether the draft has a head for policy head."""
        return self.confidence

    def problems(self, recipe: RecipeKeys) -> Iterator[tuple[str, str]]:
        yield from super().problems(recipe)
        if recipe.draft_window is not None:
            yield "draft_window", "limits a draft that draws token by token; a block is drafted at once (draft.window)"
        if self.confidence and self.markov is None:
            yield "draft.confidence", "is a part of DSpark; give markov a rank, such as 64"
        if recipe.gamma > self.drafted:
            more = self.block_size + recipe.gamma - self.drafted
            yield "gamma", f"{recipe.gamma}, but a block drafts {self.drafted} tokens; write draft.block_size: {more}"

    @classmethod
    def costs(cls, target: TargetWeights) -> list[DraftCost]:
        """Return what two layers and a reduced head cost: one pass for a block, and the fusion of three states."""
        rows, recipe = _reduced(target, "kind: dflash")
        once = (2 * target.layer + 3 * target.hidden**2 + rows * target.hidden) / target.total
        return [DraftCost("dflash", "2 layers", recipe, once, 0.0, 7, tree=True, width=FEATURE_TREE)]
