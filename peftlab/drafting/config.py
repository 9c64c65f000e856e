"""The sections that all draft recipes share, and the base of the kinds' own sections."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from peftlab.checkpoints.merge.config import MergeConfig
from peftlab.decoding.table import Chosen, Window
from peftlab.methods.config import MethodConfig
from peftlab.section import Section, Seed


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
        description="A file (txt, one prompt per line; jsonl, json, csv, tsv, parquet with texts or chat messages; "
        "package:NAME/path), or the prompts themselves.",
    )
    targets: list[str] | None = Field(
        default=None,
        min_length=1,
        description="Further targets of the one draft (S2D), models with the target's tokenizer: each continues the "
        "prompts, and its distribution is what the draft learns there. null: none.",
    )
    field: str | None = Field(
        default=None,
        description="Column with the prompts, or a text with columns in braces, 'Where is {city}?'; null: prompt, "
        "text, question, instruction, messages, turns or prompt_ids.",
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
    seed: Seed = Field(default=0, description="Seed of the target's sampling.")
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
class OtherKeys:
    """The keys of a draft recipe that a draft's section is checked against; named as there."""

    method: MethodConfig | None
    objective: DraftObjective
    data: DraftData
    merge: bool | MergeConfig | None
    acceptance_head: bool
    policy: Chosen
    draft_window: Window | None


class DraftConfig(Section):
    """Base of the kinds' sections, distinguished by ``kind`` in a recipe's ``draft``."""

    kind: str
    usual_method: ClassVar[str | None] = "lora"
    """The method of a recipe that names none; None: nothing is put into the model."""
    language_model: ClassVar[bool] = True
    """Whether a method is injected into a language model, target or draft, so that a run can write ``merged/``."""
    several_targets: ClassVar[bool] = False
    """Whether one draft can be trained for several targets: it reads no states of theirs."""

    def needs_pair(self, recipe: OtherKeys, who: str, model: str) -> Iterator[tuple[str, str]]:
        """Yield the keys that only a draft that is a model beside its target trains with.

        Args:
            who: trains without them. model: why there is no such model, both for messages.
        """
        objective = recipe.objective
        if objective.name == "topk_kl" or objective.selective is not None or recipe.data.on_policy:
            yield "objective", f"{who} without topk_kl, selective and on_policy"
        if recipe.acceptance_head:
            yield "acceptance_head", f"reads a draft model's states; {model}"

    def problems(self, recipe: OtherKeys) -> Iterator[tuple[str, str]]:
        """Yield each key of the recipe that does not go with this draft, and why."""
        if recipe.method is None:
            yield "method", f"null, and draft kind {self.kind} has no parameters of its own to train; name a method"
